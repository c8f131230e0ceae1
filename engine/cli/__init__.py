"""The composition root: commands and their options. May import everything, decides nothing."""

from engine.cli.main import main

__all__ = ["main"]
