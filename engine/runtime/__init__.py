"""The engine process: the tick loop on the main thread, a link to the server on two others."""
