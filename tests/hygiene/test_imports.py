"""What a part loads when it is imported, proven in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "transformers", "textual", "duckdb", "opentelemetry", "starlette", "uvicorn", "pyarrow", "numpy")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that are loaded after a statement."""
    code = f"{statement}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import engine.protocol.wire, engine.protocol.commands, engine.protocol.events, engine.protocol.link", ()),
        ("import engine.protocol.client", ()),
        ("import engine.levers.catalog, engine.levers.resolve, engine.levers.changes, engine.levers.presets", ()),
        ("import engine.scheduler", ()),
        ("import engine.runtime.process", ("numpy",)),
        ("import engine.cli.main", ()),
        ("from engine.cli.main import cli; cli.get_command(None, 'levers')", ()),
        ("from engine.cli.main import cli; cli.get_command(None, 'chat')", ()),
        ("import tui.app", ("textual", "rich")),
        ("import dashboards.app", ("starlette",)),
        ("import telemetry.record, telemetry.ring", ()),
        ("import telemetry.hub", ("numpy",)),
        ("import engine.server.app", ("starlette", "uvicorn", "numpy")),
        ("import engine.text", ("numpy",)),
        ("from engine.cli import compose", ("starlette", "uvicorn", "numpy")),
        ("import telemetry.setup", ("duckdb", "pyarrow", "numpy", "opentelemetry")),
    ],
)
def test_a_part_loads_nothing_heavy_beyond_what_it_is_about(statement: str, allowed: tuple[str, ...]) -> None:
    heavy = set(HEAVY) - set(allowed)
    assert not loaded_by(statement) & heavy


def test_this_check_would_see_torch() -> None:
    assert "torch" in loaded_by("import torch")


@pytest.mark.slow
def test_help_comes_at_once() -> None:
    """0.3 s on an idle machine; here the best of several against the bare interpreter, so that load does not matter."""

    def seconds(*words: str) -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, *words], capture_output=True, check=True, timeout=60)
        return time.perf_counter() - begun

    bare = min(seconds("-c", "pass") for _ in range(5))
    helped = min(seconds("-m", "engine.cli", "--help") for _ in range(5))
    assert helped < max(0.3, 12 * bare)
