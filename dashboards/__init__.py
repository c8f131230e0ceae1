"""The page: static files and the routes that serve them; it talks to the engine over the wire and nothing else."""
