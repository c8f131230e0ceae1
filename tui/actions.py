"""Every action once: name, key, sentence, slash command; bindings, palette, help and completion derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Where(StrEnum):
    EVERYWHERE = "everywhere"
    CHAT = "chat"
    SCREENS = "operator screens"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Action:
    name: str
    label: str
    """One or two words for the footer."""
    sentence: str
    key: str = ""
    """Comma-separated; the first is shown."""
    slash: str = ""
    argument: str = ""
    where: Where = Where.EVERYWHERE
    footer: bool = False


def _go(key: str, digit: str, name: str, label: str, sentence: str) -> Action:
    slash = "" if name in ("levers",) else f"/{name}"
    return Action(f"go_{name}", label, sentence, f"{key},{digit}".strip(","), slash, footer=name == "provenance")


ACTIONS: tuple[Action, ...] = (
    Action("help", "Help", "Show every key and command.", "f1,question_mark", "/help", footer=True),
    Action("palette", "Palette", "Find any action by name.", "ctrl+p", footer=True),
    _go("", "0", "chat", "Chat", "Go to the chat."),
    _go("f2", "", "provenance", "Origins", "Show where every token of the reply came from."),
    _go("f3", "1", "overview", "Overview", "Throughput, latency, batch and KV memory at a glance."),
    _go("f4", "2", "lanes", "Lanes", "What each lane did, and why faster lanes were refused."),
    _go("f5", "3", "gate", "Gate", "What the gate measured and decided, and when it looks again."),
    _go("f6", "4", "levers", "Levers", "Every lever with its source, history and effect."),
    _go("f7", "5", "requests", "Requests", "Running and finished requests; sort, filter, cancel."),
    _go("f8", "6", "telemetry", "Telemetry", "Queues, losses, own cost and the database."),
    _go("f9", "7", "sql", "SQL", "Ask the telemetry in SQL."),
    _go("f10", "8", "log", "Log", "What happened, line by line."),
    Action("stop", "Stop", "Stop the reply at once, keep its text; elsewhere, go back.", "escape", "/stop",
           footer=True),
    Action("interrupt", "Interrupt", "Copy what is marked; else stop the reply, clear the input, or leave.", "ctrl+c"),
    Action("levers_focus", "Levers", "Move between the input and the levers beside it.", "ctrl+l", "/levers",
           where=Where.CHAT, footer=True),
    Action("side", "Side panel", "Show or hide the panel beside the chat.", "ctrl+b", "/panel", where=Where.CHAT),
    Action("set", "Set", "Change a lever (`for 60s`, `guard 5%`) or a sampling setting.", "", "/set",
           "NAME VALUE"),
    Action("undo", "Undo", "Take the last lever change back.", "u", "/undo"),
    Action("stats", "Stats", "Print the numbers of the last minute into the chat.", "", "/stats", where=Where.CHAT),
    Action("model", "Model", "Say which model, device and limits are in use.", "", "/model", where=Where.CHAT),
    Action("regenerate", "Again", "Ask for the last reply again.", "ctrl+g", "/regenerate", where=Where.CHAT),
    Action("edit", "Edit", "Take the last message back into the input.", "ctrl+t", "/edit", where=Where.CHAT),
    Action("search", "Search", "Search what was typed before.", "ctrl+r", "/history", where=Where.CHAT),
    Action("copy", "Copy", "Copy the last reply.", "ctrl+y", "/copy", where=Where.CHAT, footer=True),
    Action("copy_code", "Copy code", "Copy the last code block of the last reply.", "alt+y", "/code",
           where=Where.CHAT),
    Action("system", "System", "Show or set the system prompt; `-` removes it.", "", "/system", "[TEXT]",
           where=Where.CHAT),
    Action("new", "New", "Start a new conversation; the old one stays saved.", "ctrl+n", "/clear", where=Where.CHAT),
    Action("load", "Open", "Open a saved conversation.", "ctrl+o", "/load", "[NAME]", where=Where.CHAT),
    Action("save", "Save", "Save the conversation, under a name if one is given.", "ctrl+s", "/save", "[NAME]",
           where=Where.CHAT),
    Action("rename", "Rename", "Give the conversation another name.", "", "/rename", "NAME", where=Where.CHAT),
    Action("delete", "Delete", "Delete a saved conversation.", "", "/delete", "NAME", where=Where.CHAT),
    Action("export", "Export", "Write the conversation as Markdown.", "", "/export", "[FILE]", where=Where.CHAT),
    Action("pause", "Pause", "Hold the picture still; nothing is lost meanwhile.", "p", "/pause",
           where=Where.SCREENS, footer=True),
    Action("span", "Span", "Change how much time the charts show.", "t", "", where=Where.SCREENS, footer=True),
    Action("replay_toggle", "Play/pause", "Pause or go on with the replay.", "space", where=Where.REPLAY, footer=True),
    Action("replay_back", "-10 s", "Go back ten seconds.", "left", where=Where.REPLAY, footer=True),
    Action("replay_forward", "+10 s", "Go on ten seconds.", "right", where=Where.REPLAY, footer=True),
    Action("replay_slower", "Slower", "Halve the speed of the replay.", "minus", where=Where.REPLAY),
    Action("replay_faster", "Faster", "Double the speed of the replay.", "plus,equals_sign", where=Where.REPLAY),
    Action("theme", "Theme", "Choose the colours.", "", "/theme", "[NAME]"),
    Action("quit", "Quit", "Leave; the conversation stays saved.", "ctrl+q", "/quit", footer=True),
)  # fmt: skip

BY_NAME = {action.name: action for action in ACTIONS}
BY_SLASH = {action.slash: action for action in ACTIONS if action.slash}

SETTINGS: dict[str, str] = {
    "temperature": "0 is greedy",
    "top_k": "0 keeps all",
    "top_p": "0 to 1",
    "min_p": "0 to 1",
    "repetition_penalty": "1 is none",
    "presence_penalty": "0 is none",
    "frequency_penalty": "0 is none",
    "seed": "a number, or none",
    "max_tokens": "0 is what the context leaves",
    "logprobs": "-1 none, 0 own, n alternatives",
    "speculate": "on or off",
}
"""What `/set` changes beside the levers: how this chat asks, with a hint each."""


def complete(text: str, lever_names: list[str]) -> list[tuple[str, str]]:
    """Completions of a started slash command, each with its hint."""
    if not text.startswith("/") or "\n" in text:
        return []
    command, space, rest = text.partition(" ")
    if not space:
        named = [action for action in ACTIONS if action.slash.startswith(command) and action.slash]
        return [(action.slash + (" " if action.argument else ""), action.sentence) for action in named]
    if command != "/set" or " " in rest.strip():
        return []
    names = [*SETTINGS.items()] + [(name, "lever") for name in lever_names]
    return [(f"/set {name} ", hint) for name, hint in names if name.startswith(rest.strip())]


def parse_slash(text: str) -> tuple[Action, str] | None:
    """The action that a slash command names, and its argument; None if there is none."""
    command, _, argument = text.strip().partition(" ")
    action = BY_SLASH.get(command)
    return (action, argument.strip()) if action else None
