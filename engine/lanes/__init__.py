"""What a tick may do, in order."""
