"""Serves the page: the index at `/`, its files under `/static/`, each with an ETag and strict security headers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from dashboards.panels import words

STATIC: Final = Path(__file__).parent / "static"

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}
"""Content types by ending; a file with any other ending is not served."""

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    body: bytes
    content_type: str
    etag: str

    @classmethod
    def of(cls, body: bytes, content_type: str) -> Asset:
        return cls(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    def respond(self, request: Request) -> Response:
        """The body, or 304 when the browser already has it. `no-cache` makes the browser ask each time."""
        headers = {**SECURITY_HEADERS, "ETag": self.etag, "Cache-Control": "no-cache"}
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "Content-Type": self.content_type})


def assets() -> dict[str, Asset]:
    """Every served file by its path below `/static/`; what is not in here does not exist for a browser."""
    found = {
        path.relative_to(STATIC).as_posix(): Asset.of(path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(STATIC.rglob("*"))
        if path.is_file() and path.suffix in _TYPES and path.name != "package.json"  # that one is for node
    }
    return {**found, "words.json": Asset.of(json.dumps(words(), separators=(",", ":")).encode(), _TYPES[".json"])}


def routes() -> list[BaseRoute]:
    """The routes of the page; the files are read once, here."""
    served = assets()

    async def index(request: Request) -> Response:
        return served["index.html"].respond(request)

    async def static(request: Request) -> Response:
        asset = served.get(request.path_params["path"])
        if asset is None:
            return PlainTextResponse("There is no such file.", status_code=404, headers=SECURITY_HEADERS)
        return asset.respond(request)

    return [Route("/", index), Route("/static/{path:path}", static)]
