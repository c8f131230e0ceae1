"""The server behind a screen: its address, and the token that the screen gets."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from engine.cli import serve as serve_module
from engine.cli.child import ChildServer
from engine.cli.main import main
from engine.protocol.address import Address


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"METRALE_{name}", str(tmp_path / name.lower()))
    for name in ("METRALE_TOKEN", "METRALE_READ_TOKEN"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("host", "name"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")],
)
def test_the_address_of_a_child_is_a_url_that_can_be_reached(host: str, name: str) -> None:
    try:
        child = ChildServer([], host)
    except OSError:
        pytest.skip("no IPv6 here")
    assert child.url.startswith(f"http://{name}:")
    address = Address.parse(child.url)
    port = int(address.base.rpartition(":")[2])
    socket.create_connection((name.strip("[]"), port), 1).close()


@pytest.mark.parametrize("token", ["plain", "base64==", "a&b=c #%41+"])
def test_a_screen_reads_the_very_token_from_the_url(token: str) -> None:
    child = ChildServer([], token=token)
    assert Address.parse(child.screen_url) == Address(child.url, token)


@pytest.mark.parametrize("by", ["option", "environment"])
def test_serve_on_a_terminal_gives_its_screen_the_token(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def run(url: str, **_: Any) -> None:
        shown.append(url)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(serve_module, "find_model", lambda name: Path(name))
    monkeypatch.setattr(ChildServer, "__enter__", lambda self: self)
    monkeypatch.setattr("tui.app.run", run)
    monkeypatch.setenv("METRALE_TOKEN", "s3cret" if by == "environment" else "")
    words = ["--token", "s3cret"] if by == "option" else []
    assert main(["serve", "any.gguf", "--port", "0", *words]) == 0
    assert Address.parse(shown[0]).token == "s3cret"
