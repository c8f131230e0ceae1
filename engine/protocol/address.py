"""Where a server is, as users write it."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from engine.protocol.wire import WIRE_PATH


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and the token for it; a token in a URL stands in its fragment only."""

    base: str
    """`http://host:port`."""
    token: str = ""

    @classmethod
    def parse(cls, url: str, token: str = "") -> Address:
        """From `host:port`, `http://host:port` or `http://host:port/#token=...`. Raises `ValueError`."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server; it looks like http://127.0.0.1:8080.")
        fragment = urllib.parse.parse_qs(parts.fragment if "=" in parts.fragment else f"token={parts.fragment}")
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
        return cls(f"{scheme}://{parts.netloc}", token or fragment.get("token", [""])[0])

    @property
    def socket(self) -> str:
        return self.base.replace("http", "ws", 1) + WIRE_PATH
