"""Where things are kept: state, configuration, logs, and the note that tells who owns a database now."""

from __future__ import annotations

import json
import os
import socket
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import platformdirs

APP = "metrale"
PROBE_S = 1.0


def state_dir() -> Path:
    """`METRALE_STATE`, else the user's state directory."""
    chosen = os.environ.get("METRALE_STATE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_state_path(APP, appauthor=False)


def config_dir() -> Path:
    """`METRALE_CONFIG`, else the user's configuration directory."""
    chosen = os.environ.get("METRALE_CONFIG")
    return Path(chosen).expanduser() if chosen else platformdirs.user_config_path(APP, appauthor=False)


def default_database() -> Path:
    """`METRALE_DB`, else the file in the state directory."""
    chosen = os.environ.get("METRALE_DB")
    return Path(chosen).expanduser() if chosen else state_dir() / "metrale.duckdb"


def log_file() -> Path:
    path = state_dir() / "logs" / "server.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True, slots=True)
class Owner:
    """The server that has a database open."""

    url: str
    pid: int
    token: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether its process is there and somebody listens at its address."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        parts = urllib.parse.urlsplit(self.url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), PROBE_S).close()
        except OSError:
            return False
        return True


def owner_file(database: Path) -> Path:
    return database.with_name(database.name + ".owner.json")


def note_owner(database: Path, owner: Owner) -> None:
    """Leave a note beside the database, readable by this user alone since it may hold the token."""
    path = owner_file(database)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump({"url": owner.url, "pid": owner.pid, "token": owner.token}, file)


def forget_owner(database: Path, pid: int) -> None:
    """Take the note away, if it is still ours."""
    found = read_owner(database)
    if found is not None and found.pid == pid:
        owner_file(database).unlink(missing_ok=True)


def read_owner(database: Path) -> Owner | None:
    """Who owns the database by the note, alive or not."""
    try:
        data = json.loads(owner_file(database).read_text())
        return Owner(str(data["url"]), int(data["pid"]), str(data.get("token", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def live_owner(database: Path) -> Owner | None:
    owner = read_owner(database)
    return owner if owner is not None and owner.is_alive else None
