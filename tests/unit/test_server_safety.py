"""Who may speak to the server."""

from __future__ import annotations

import logging

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from engine.protocol.client import Address, WireClient, WireClosedError
from engine.protocol.wire import ChatTurn, LeverRefused
from engine.server.safety import Access, Role
from tests.fakes.live_server import live

BODY = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_foreign_host_name_is_refused_on_every_route() -> None:
    async with live() as served, served.http() as http:
        for path in ("/healthz", "/v1/models", "/metrics", "/nowhere"):
            answer = await http.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 421
            assert "--host-name" in answer.json()["error"]["message"]
        assert (await http.get("/healthz", headers={"host": f"localhost:{served.port}"})).status_code == 200


async def test_a_host_with_the_right_name_and_a_wrong_port_is_refused() -> None:
    async with live() as served, served.http() as http:
        assert (await http.get("/healthz", headers={"host": "localhost:1"})).status_code == 421


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://localhost.evil.example", "localhost", ""])
async def test_a_state_changing_call_of_a_strange_origin_is_refused(origin: str) -> None:
    async with live() as served, served.http() as http:
        answer = await http.post("/v1/chat/completions", json=BODY, headers={"origin": origin})
        assert answer.status_code == 403
        assert not served.engine.commands


@pytest.mark.parametrize("port", [8080, 80, 443])
def test_an_origin_is_own_only_with_the_port_of_this_server(port: int) -> None:
    access = Access.of("127.0.0.1", port, ["box.example"])
    for name in ("localhost", "127.0.0.1", "[::1]", "box.example"):
        assert access.knows_origin(f"http://{name}:{port}")
        assert not access.knows_origin(f"http://{name}:3000")
        assert access.knows_origin(f"http://{name}") is (port == 80)
        assert access.knows_origin(f"https://{name}") is (port == 443)
    assert access.knows_origin(None)
    assert not access.knows_origin("null")


def test_a_name_with_the_port_of_a_proxy_is_an_own_origin_there() -> None:
    access = Access.of("127.0.0.1", 8080, ["Chat.Example:443"])
    assert access.knows_host("chat.example")
    assert access.knows_origin("https://chat.example")
    assert not access.knows_origin("http://chat.example")
    assert not access.knows_origin("http://chat.example:8080")


async def test_the_own_page_and_clients_without_an_origin_may_call() -> None:
    async with live() as served, served.http() as http:
        assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
        own = {"origin": served.url}
        assert (await http.post("/v1/chat/completions", json=BODY, headers=own)).status_code == 200


@pytest.mark.parametrize("origin", ["null", "http://evil.example"])
async def test_a_websocket_of_a_strange_origin_never_opens(origin: str) -> None:
    async with live() as served:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://127.0.0.1:{served.port}/wire", origin=origin):  # type: ignore[arg-type]
                pass
        assert refused.value.response.status_code == 403


async def test_answers_carry_a_policy_without_inline_code_and_no_cross_origin_permission() -> None:
    async with live() as served, served.http() as http:
        answer = await http.get("/healthz", headers={"origin": "http://evil.example"})
        policy = answer.headers["content-security-policy"]
        assert "unsafe-inline" not in policy
        assert "default-src 'none'" in policy
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_another_address_than_loopback_requires_a_token() -> None:
    with pytest.raises(ValueError, match="--token"):
        Access.of("0.0.0.0", 80)
    assert not Access.of("0.0.0.0", 80, control="secret").is_open


def test_a_read_token_without_a_control_token_is_refused_and_gives_nobody_control() -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ValueError, match="--token"):
            Access.of(host, 80, read="look")
    alone = Access(frozenset(), frozenset(), read_token="look")
    assert not alone.is_open
    assert [alone.role_of(token) for token in ("look", "", "act")] == [Role.READ, Role.NONE, Role.NONE]


def test_tokens_give_their_role_and_nothing_else_gives_one() -> None:
    access = Access.of("127.0.0.1", 80, read="look", control="act")
    assert [access.role_of(token) for token in ("act", "look", "", "actor")] == [
        Role.CONTROL, Role.READ, Role.NONE, Role.NONE,
    ]  # fmt: skip
    assert Access.of("127.0.0.1", 80, control="act").role_of("") is Role.NONE


async def test_the_api_asks_for_its_token() -> None:
    async with live(tokens=("look", "act")) as served, served.http() as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/metrics")).status_code == 401
        read = {"authorization": "Bearer look"}
        assert (await http.get("/v1/models", headers=read)).status_code == 200
        assert (await http.post("/v1/chat/completions", json=BODY, headers=read)).status_code == 401
        control = {"authorization": "Bearer act"}
        assert (await http.post("/v1/chat/completions", json=BODY, headers=control)).status_code == 200


async def test_the_wire_refuses_a_wrong_token_with_a_sentence() -> None:
    async with live(tokens=("look", "act")) as served:
        with pytest.raises(WireClosedError, match="token"):
            await WireClient(Address(served.url, "guess")).open()


async def test_a_reader_sees_but_changes_nothing() -> None:
    async with live(tokens=("look", "act")) as served, WireClient(Address(served.url, "look")) as client:
        assert client.welcome is not None
        assert client.welcome.role == "read"
        assert isinstance(await client.set_lever("num_drafts", 5), LeverRefused)
        with pytest.raises(RuntimeError, match="read only"):
            async for _ in client.chat([ChatTurn(role="user", content="hi")]):
                pass
        assert (await client.query("select 1")).rows == ((1,),)
        assert not served.engine.commands


async def test_a_body_beyond_the_bound_is_refused_with_and_without_a_stated_length() -> None:
    async def drip() -> object:
        for _ in range(9):
            yield b"x" * 2**20

    async with live() as served, served.http() as http:
        assert (await http.post("/v1/chat/completions", content=b"x" * (9 * 2**20))).status_code == 413
        try:
            answer = await http.post("/v1/chat/completions", content=drip())  # type: ignore[arg-type]
            assert answer.status_code == 413
        except httpx.WriteError:
            pass  # it hung up first, which is as good
        assert not served.engine.commands


async def test_the_token_never_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with live(tokens=("", "s3cret-token")) as served, WireClient(Address(served.url, "s3cret-token")) as client:
        await client.query("select 1")
        async with served.http() as http:
            await http.get("/v1/models", headers={"authorization": "Bearer s3cret-token"})
    mentions = [record for record in caplog.records if "s3cret-token" in record.getMessage()]
    assert not [record for record in mentions if record.name.startswith(("metrale", "uvicorn"))]
