"""The server process: one port for wire, API and page; owner of the database; parent of the engine."""
