"""Runs a server on a port: uvicorn set up once, with the bounds that hold for every connection."""

from __future__ import annotations

import socket

import uvicorn
from starlette.types import ASGIApp

from engine.protocol.wire import MAX_MESSAGE_BYTES

GRACE_S = 5


class PortTakenError(OSError):
    """The address cannot be bound; one sentence."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `PortTakenError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortTakenError(
            f"Port {port} on {host} cannot be used ({error.strerror}); choose another with --port."
        ) from None
    except OverflowError:
        listener.close()
        raise PortTakenError(f"Port {port} does not exist; ports are 0 to 65535.") from None
    listener.listen(128)
    return listener


def config_of(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_max_size=2 * MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        h11_max_incomplete_event_size=64 * 1024,
        timeout_graceful_shutdown=GRACE_S,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        date_header=True,
    )
