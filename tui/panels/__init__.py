"""The panes: each is told the state and paints it; none changes what it shows. This is the table of them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from tui.widgets import Panel


@dataclass(frozen=True, slots=True)
class Pane:
    label: str
    module: str
    cls: str


PANES: dict[str, Pane] = {
    "chat": Pane("chat", "tui.panels.chat.panel", "ChatPanel"),
    "provenance": Pane("origins", "tui.panels.provenance.panel", "ProvenancePanel"),
    "overview": Pane("overview", "tui.panels.overview", "OverviewPanel"),
    "lanes": Pane("lanes", "tui.panels.lanes", "LanesPanel"),
    "gate": Pane("gate", "tui.panels.gate", "GatePanel"),
    "levers": Pane("levers", "tui.panels.levers.panel", "LeversPanel"),
    "requests": Pane("requests", "tui.panels.requests", "RequestsPanel"),
    "telemetry": Pane("telemetry", "tui.panels.telemetry", "TelemetryPanel"),
    "sql": Pane("SQL", "tui.panels.sql", "SqlPanel"),
    "log": Pane("log", "tui.panels.log", "LogPanel"),
}


def make_pane(name: str) -> Panel:
    """A pane, its module imported now: what is not looked at costs no start-up time."""
    pane = PANES[name]
    made = getattr(import_module(pane.module), pane.cls)(id=f"pane-{name}")
    if not isinstance(made, Panel):
        raise TypeError(f"{pane.cls} is not a pane")
    return made
