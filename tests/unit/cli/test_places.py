"""The note beside a database that tells who owns it."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from engine.cli import places


def test_a_note_is_found_while_its_owner_lives_and_listens(tmp_path: Path) -> None:
    database = tmp_path / "a.duckdb"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        owner = places.Owner(f"http://127.0.0.1:{listener.getsockname()[1]}", os.getpid(), "secret")
        places.note_owner(database, owner)
        assert places.live_owner(database) == owner
    assert places.live_owner(database) is None


def test_a_note_that_holds_a_token_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    database = tmp_path / "a.duckdb"
    places.note_owner(database, places.Owner("http://127.0.0.1:1", os.getpid(), "secret"))
    assert stat.S_IMODE(places.owner_file(database).stat().st_mode) == 0o600


def test_the_note_of_a_dead_process_and_a_damaged_one_name_nobody(tmp_path: Path) -> None:
    database = tmp_path / "a.duckdb"
    places.note_owner(database, places.Owner("http://127.0.0.1:1", 2**22 + 1))
    assert places.live_owner(database) is None
    places.owner_file(database).write_text("{")
    assert places.live_owner(database) is None


def test_only_the_own_note_is_taken_away(tmp_path: Path) -> None:
    database = tmp_path / "a.duckdb"
    places.note_owner(database, places.Owner("http://127.0.0.1:1", 12345))
    places.forget_owner(database, 999)
    assert places.read_owner(database) is not None
    places.forget_owner(database, 12345)
    assert places.read_owner(database) is None
