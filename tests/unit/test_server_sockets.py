"""The listening socket of a server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine.server.sockets import PortTakenError, bind


async def test_what_is_written_to_an_accepted_connection_leaves_at_once() -> None:
    undelayed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        undelayed.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(undelayed, 5) == 1
        writer.close()


def test_a_taken_port_is_one_sentence() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"Port {port} on 127.0.0.1 cannot be used"):
            bind("127.0.0.1", port)
    with pytest.raises(PortTakenError, match="ports are 0 to 65535"):
        bind("127.0.0.1", 70000)
