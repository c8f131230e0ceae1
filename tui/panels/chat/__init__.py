"""The chat: transcript, prompt with completion, and what one reply cost."""
