"""The page: static files and the reducer-free panels behind them."""
