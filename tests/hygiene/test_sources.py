"""Rules of the sources: the environment is read at the edge, no check is an `assert`, modules explain themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "telemetry", "tui", "dashboards")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

READS_ENVIRONMENT = {
    "engine/fetch.py",  # where the cache is
    "engine/model/native/build.py",  # the same
    "engine/model/cuda_backend.py",  # the same
    "telemetry/database.py",  # where the database is
    "tui/sessions.py",  # where conversations are
}
"""Beside the commands in `engine/cli`; levers reach everything else as values."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that touch `os.environ` or `os.getenv`."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "environb", "putenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]


def test_the_check_would_see_a_read() -> None:
    assert environment_reads(ast.parse("import os\nx = os.environ['A']\ny = os.getenv('B')")) == [2, 3]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_the_edge_reads_the_environment(path: Path) -> None:
    if name_of(path).startswith("engine/cli/") or name_of(path) in READS_ENVIRONMENT:
        return
    assert not environment_reads(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_check_is_an_assert(path: Path) -> None:
    assert not [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_opens_with_a_sentence(path: Path) -> None:
    if path.read_text().strip():
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring
        assert docstring.strip().splitlines()[0].rstrip().endswith((".", ":", "?", "`", ",")) or "\n" in docstring
