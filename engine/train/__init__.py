"""Draft heads trained from the model's own output."""
