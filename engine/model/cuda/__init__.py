"""Fused few-row Triton kernels of the decoder, and the programs of launches that run a step with them."""
