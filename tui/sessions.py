"""Conversations, typed lines and preferences as files under the user's state directory (`METRALE_STATE` overrides)."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import replace
from pathlib import Path

import msgspec

from tui.conversation import Conversation, Reply, Turn

HISTORY_LINES = 1000


class SessionError(ValueError):
    """A conversation that cannot be found or read; one sentence."""


def state_directory() -> Path:
    chosen = os.environ.get("METRALE_STATE")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_state_path

    return user_state_path("metrale", appauthor=False)


class Preferences(msgspec.Struct, omit_defaults=True):
    theme: str = ""


class Store:
    """All files of the terminal, made when first written."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or state_directory()

    # ---- conversations

    def write(self, conversation: Conversation) -> Path:
        path = self._path(conversation.id)
        _write_whole(path, msgspec.json.format(msgspec.json.encode(conversation), indent=1))
        return path

    def read(self, name: str) -> Conversation:
        """The conversation with that id, title or first words. Raises `SessionError`."""
        for conversation in self.saved():
            if name in (conversation.id, conversation.title, conversation.name):
                return conversation
        raise SessionError(f"There is no saved conversation {name!r}; /load without a name lists them.")

    def saved(self) -> list[Conversation]:
        """All readable conversations, the latest first."""
        found: list[Conversation] = []
        for path in (self.directory / "sessions").glob("*.json"):
            try:
                found.append(_settled(msgspec.json.decode(path.read_bytes(), type=Conversation)))
            except (OSError, msgspec.DecodeError):
                continue
        return sorted(found, key=lambda conversation: -conversation.updated)

    def delete(self, conversation: Conversation) -> None:
        self._path(conversation.id).unlink(missing_ok=True)

    def export(self, conversation: Conversation, name: str) -> Path:
        """Writes Markdown to `name`, or to a file named after the conversation in the present folder."""
        slug = re.sub(r"[^a-z0-9]+", "-", conversation.name.lower()).strip("-") or "conversation"
        path = Path(name).expanduser() if name else Path.cwd() / f"{slug}.md"
        path.write_text(conversation.markdown(), encoding="utf-8")
        return path

    def _path(self, session_id: str) -> Path:
        return self.directory / "sessions" / f"{session_id}.json"

    # ---- typed lines and preferences

    def history(self) -> list[str]:
        """What was typed, oldest first."""
        try:
            lines = (self.directory / "history.jsonl").read_bytes().splitlines()[-HISTORY_LINES:]
            return [msgspec.json.decode(line, type=str) for line in lines]
        except (OSError, msgspec.DecodeError):
            return []

    def remember(self, text: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "history.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(text) + b"\n")

    def preferences(self) -> Preferences:
        try:
            return msgspec.json.decode((self.directory / "terminal.json").read_bytes(), type=Preferences)
        except (OSError, msgspec.DecodeError):
            return Preferences()

    def prefer(self, preferences: Preferences) -> None:
        _write_whole(self.directory / "terminal.json", msgspec.json.encode(preferences))


def new_conversation(now: float, system: str = "") -> Conversation:
    return Conversation(id=uuid.uuid4().hex[:12], system=system, created=now, updated=now)


def _settled(conversation: Conversation) -> Conversation:
    """A reply that was running when the file was written is over now."""
    return replace(conversation, turns=tuple(_ended(turn) for turn in conversation.turns))


def _ended(turn: Turn) -> Turn:
    reply: Reply | None = turn.reply
    if reply is None or reply.status == "done":
        return turn
    return replace(turn, reply=replace(reply, status="done", reason=reply.reason or "cancelled"))


def _write_whole(path: Path, data: bytes) -> None:
    """Written beside and moved into place: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(data)
    draft.replace(path)
