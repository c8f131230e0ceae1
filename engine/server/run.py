"""Runs a server on a port: uvicorn set up once, with the bounds that hold for every connection."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

from engine.protocol.wire import MAX_MESSAGE_BYTES

GRACE_S = 5
MAX_CONNECTIONS = 512
"""Sockets of all kinds; beyond it a request is answered with 503."""


def config_of(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_max_size=2 * MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        h11_max_incomplete_event_size=64 * 1024,
        timeout_graceful_shutdown=GRACE_S,
        limit_concurrency=MAX_CONNECTIONS,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        date_header=True,
    )
