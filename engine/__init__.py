"""The engine: scheduler, lanes, drafters, model and the processes that carry them."""

__version__ = "0.1.0"
