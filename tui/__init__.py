"""The terminal program: a view of the wire that imports no torch."""
