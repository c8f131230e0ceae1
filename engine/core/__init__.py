"""Pure state of the scheduler: sequences, blocks, queues and the seams it is injected through."""
