"""The library is compiled once per content, replaced in one piece, and its absence is a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.model.native import build as building
from engine.model.native.build import BuildError, build, library_path, units


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METRALE_CACHE", str(tmp_path))
    return tmp_path


def _fake_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A compiler that is only a shell script, first and alone on the search path."""
    compiler = directory / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")


_WRITES_OUTPUT = """
echo "called" >> "$(dirname "$0")/calls"
[ "$1" = --version ] && { echo "fake 1.0"; exit 0; }
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done
"""


def test_a_second_build_finds_the_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_compiler(cache, monkeypatch, _WRITES_OUTPUT)
    first = build()
    assert first.read_text() == "library\n"
    calls = (cache / "bin" / "calls").read_text().count("called")
    assert build() == first
    asked_version_only = (cache / "bin" / "calls").read_text().count("called") - calls
    assert asked_version_only == 1
    assert [entry.name for entry in first.parent.iterdir()] == [first.name], "scratch files are gone"


def test_another_source_or_compiler_is_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_compiler(cache, monkeypatch, _WRITES_OUTPUT)
    before = library_path()
    changed = cache / "sources"
    changed.mkdir()
    (changed / "model.cpp").write_text("int x;")
    monkeypatch.setattr(building, "SOURCES", changed)
    assert library_path() != before
    monkeypatch.undo()
    monkeypatch.setenv("METRALE_CACHE", str(cache))
    assert library_path() != before


def test_no_compiler_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(BuildError, match=r"there is no C\+\+ compiler .*: install one"):
        build()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '[ "$1" = --version ] && { echo fake; exit 0; }\necho "x.cpp:1: error: no such thing" >&2; exit 1'
    _fake_compiler(cache, monkeypatch, script)
    with pytest.raises(BuildError, match=r"compiling \w+ failed \(x.cpp:1: error: no such thing\)"):
        build()
    assert list((cache / "native").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_compiler(cache, monkeypatch, _WRITES_OUTPUT)
    (cache / "native").write_text("a file in the way")
    with pytest.raises(BuildError, match="cannot be written"):
        build()


def test_other_processors_get_the_portable_variant_alone() -> None:
    assert {unit.name for unit in units("x86_64")} > {"avx512", "avxvnni", "avx2", "portable"}
    assert {unit.name for unit in units("aarch64")} == {
        "portable",
        "check",
        "draft",
        "model",
        "pack",
        "pool",
        "scratch",
    }


def test_every_source_file_goes_into_the_build() -> None:
    compiled = {unit.source for unit in units("x86_64")}
    assert compiled == {entry.name for entry in building.SOURCES.iterdir() if entry.suffix == ".cpp"}
    assert os.sep not in "".join(compiled)
