"""Who may speak to this server: exact hosts, own origins, tokens in constant time, bounded bodies, a page policy."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY_BYTES = 8 * 1024 * 1024
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HOST_REFUSED = "This server does not go by that host name; name it with --host-name at start."


class Role(IntEnum):
    """What a caller may do; a higher one includes the lower."""

    NONE = 0
    READ = 1
    CONTROL = 2


@dataclass(frozen=True, slots=True)
class Access:
    """Addresses and tokens of this server."""

    hosts: frozenset[str]
    """Exact `Host` values, with and without port, lower case."""
    origins: frozenset[str]
    """Exact `Origin` values of pages that this server itself sent, lower case."""
    read_token: str = ""
    control_token: str = ""

    @classmethod
    def of(cls, host: str, port: int, names: Iterable[str] = (), read: str = "", control: str = "") -> Access:
        """For a bind address; a name may carry the port of a proxy in front (`name:443`).

        Raises `ValueError` with a sentence when the address is not loopback or a read token is set, and nobody would
        have control by token.
        """
        if not is_loopback(host) and not control:
            raise ValueError(
                f"Serving on {host} lets others in: set a token with --token or METRALE_TOKEN, or stay on 127.0.0.1."
            )
        if read and not control:
            raise ValueError("With a read token alone nobody has control: set --token or METRALE_TOKEN too.")
        known = {*LOOPBACK, *(() if host in ("0.0.0.0", "::") else (host,)), *names}
        addresses = {_address(name.lower(), port) for name in known}
        hosts = {name for address in addresses for name in (address[0], f"{address[0]}:{address[1]}")}
        return cls(frozenset(hosts), frozenset(_origins(addresses)), read, control)

    @property
    def is_open(self) -> bool:
        """No token is asked for."""
        return not (self.control_token or self.read_token)

    def role_of(self, token: str) -> Role:
        """What a token allows; every comparison takes the same time."""
        if self.is_open:
            return Role.CONTROL
        given = token.encode()
        control = hmac.compare_digest(given, self.control_token.encode()) and bool(self.control_token)
        read = hmac.compare_digest(given, self.read_token.encode()) and bool(self.read_token)
        return Role.CONTROL if control else Role.READ if read else Role.NONE

    def knows_host(self, host: str | None) -> bool:
        return host is not None and host.lower() in self.hosts

    def knows_origin(self, origin: str | None) -> bool:
        """Own pages, and clients that are no browser and send none; `null` is a stranger."""
        if origin is None:
            return True
        return origin.lower() in self.origins


def _address(name: str, port: int) -> tuple[str, int]:
    """The name as a header spells it, and its port."""
    bare, separator, own = name.rpartition(":")
    if separator and own.isdecimal() and (":" not in bare or bare.endswith("]")):
        return bare, int(own)
    return f"[{name}]" if ":" in name and not name.startswith("[") else name, port


def _origins(addresses: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Browsers leave out the port that is their scheme's own; any other port is another site."""
    for name, port in addresses:
        for scheme, usual in (("http", 80), ("https", 443)):
            yield f"{scheme}://{name}:{port}"
            if port == usual:
                yield f"{scheme}://{name}"


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def bearer(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class Guarded:
    """ASGI middleware: refuses strangers before any handler runs, and bounds the body that a handler may read."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is None:
            bounded = _bounded(receive) if scope["type"] == "http" else receive
            await self._app(scope, bounded, _hardened(send) if scope["type"] == "http" else send)
        elif scope["type"] == "websocket":
            await _refuse_socket(receive, send, refusal)
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if len(headers.getlist("host")) != 1 or not self._access.knows_host(headers.get("host")):
            return problem(421, HOST_REFUSED, "host_not_allowed")
        changes = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if changes and not self._access.knows_origin(headers.get("origin")):
            return problem(403, "Pages of other origins may not use this server.", "origin_not_allowed")
        if (length := headers.get("content-length")) and (not length.isdigit() or int(length) > MAX_BODY_BYTES):
            return problem(413, f"A request body may have at most {MAX_BODY_BYTES} bytes.", "body_too_large")
        return None


class BodyTooLargeError(ValueError):
    """A body without a stated length grew beyond the bound."""


def _bounded(receive: Receive) -> Receive:
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"A request body may have at most {MAX_BODY_BYTES} bytes.")
        return message

    return counted


def _hardened(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("content-security-policy", POLICY)
            headers.setdefault("x-content-type-options", "nosniff")
            headers.setdefault("referrer-policy", "no-referrer")
            headers.setdefault("cross-origin-resource-policy", "same-origin")
        await send(message)

    return with_headers


async def _refuse_socket(receive: Receive, send: Send, refusal: Response) -> None:
    await receive()
    await send({"type": "websocket.close", "code": 1008, "reason": "refused"})


def problem(status: int, message: str, code: str, param: str | None = None, kind: str = "") -> JSONResponse:
    """An error in the shape that OpenAI clients read."""
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status_code=status)
