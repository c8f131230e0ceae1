"""The levers: declared once, every face of them derived."""
