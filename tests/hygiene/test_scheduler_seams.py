"""The policy reads no clock, environment or randomness and sends nothing, except through its seams."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POLICY = [
    *sorted((ROOT / "engine/core").glob("*.py")),
    *sorted((ROOT / "engine/lanes").glob("*.py")),
    *sorted((ROOT / "engine/drafters").glob("*.py")),
    ROOT / "engine/scheduler.py",
]
FORBIDDEN = {
    "os", "time", "datetime", "random", "secrets", "socket", "threading", "asyncio", "subprocess", "torch", "numpy",
}  # fmt: skip
IMPORT_EXCEPTIONS = {("engine/core/clock.py", "time")}
SENDS = {"engine/lanes/emit.py", "engine/lanes/finish.py", "engine/lanes/plan.py", "engine/lanes/end.py"}
"""Where events leave the scheduler: tokens in one file, ends in one, answers to commands, the snapshot."""
EMITS_TOKENS = {"engine/lanes/emit.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def calls(tree: ast.AST, name: str) -> int:
    """Calls of a method or function called `name`."""
    found = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(getattr(func, "attr", getattr(func, "id", "")) == name for func in found)


@pytest.mark.parametrize("path", POLICY, ids=relative)
def test_no_clock_environment_randomness_or_torch_is_imported(path: Path) -> None:
    found = {(relative(path), name) for name in imports(ast.parse(path.read_text())) if name in FORBIDDEN}
    assert found <= IMPORT_EXCEPTIONS


@pytest.mark.parametrize("path", POLICY, ids=relative)
def test_events_leave_through_their_seams_only(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if calls(tree, "send"):
        assert relative(path) in SENDS | {"engine/core/context.py"}
    if calls(tree, "Delta"):
        assert relative(path) in EMITS_TOKENS


def test_the_scan_would_see_an_offender() -> None:
    offender = ast.parse("import time\nfrom os import environ\nctx.outbox.send(Delta())")
    assert {"time", "os"} <= set(imports(offender))
    assert calls(offender, "send") == calls(offender, "Delta") == 1
