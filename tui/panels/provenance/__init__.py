"""Where every token of a reply came from."""
