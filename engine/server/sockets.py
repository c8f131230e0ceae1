"""Binds the one listening socket of a server; loads no server."""

from __future__ import annotations

import socket


class PortTakenError(OSError):
    """The address cannot be bound; one sentence."""


def reachable(host: str) -> str:
    """A bind address as a URL on this machine names it: all addresses are reached on loopback."""
    return bracketed({"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(host, host))


def bracketed(host: str) -> str:
    """An address as URLs spell it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `PortTakenError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once only where a socket names its protocol; else a delta waits up to 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
