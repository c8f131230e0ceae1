"""A collector of spans that takes them and forgets them, or is gone, or answers late, as it is told.

Its process imports nothing of the engine: started beside a measurement it must not disturb it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DOWN = -1.0
"""Instead of a delay: nobody listens."""


class Collector:
    """The process, seen from a benchmark."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._say(0.0))

    def _say(self, delay_s: float) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the collector cannot be spoken to")
        self._process.stdin.write(f"{delay_s}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def answer_after(self, delay_s: float) -> None:
        """From the next request on; `DOWN` closes the port."""
        self._say(delay_s)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    delay_s = 0.0


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if isinstance(self.server, _Server):
            time.sleep(self.server.delay_s)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    """Obey delays, one a line; each is answered with the port."""
    server: _Server | None = None
    port = 0
    for line in sys.stdin:
        delay_s = float(line)
        if delay_s == DOWN and server is not None:
            server.shutdown()
            server.server_close()
            server = None
        elif server is None:
            server = _Server(("127.0.0.1", port), _Handler)
            port = server.server_address[1]
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        if server is not None:
            server.delay_s = delay_s
        print(port, flush=True)


if __name__ == "__main__":
    main()
