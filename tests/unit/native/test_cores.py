"""Threads are counted by physical cores of the affinity mask."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.model import native_backend
from engine.model.backend import BackendRequest
from engine.model.gguf import GGUFFile
from engine.model.native.cores import physical_cores
from tests.unit.native.models import Shape, write_model


def _machine(root: Path, siblings: dict[int, str]) -> Path:
    for cpu, listed in siblings.items():
        directory = root / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(listed + "\n")
    return root


def test_hyper_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _machine(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    assert physical_cores(machine) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2})
    assert physical_cores(machine) == 1


def test_without_topology_every_processor_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    assert physical_cores(tmp_path) == 3


@pytest.mark.parametrize(("asked", "given"), [(4, 2), (8, 2), (3, 3), (1, 1)])
def test_every_processor_means_every_core_and_another_number_is_meant(
    asked: int, given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_backend, "usable_processors", lambda: 4)
    monkeypatch.setattr(native_backend, "physical_cores", lambda: 2)
    path = write_model(tmp_path / "m.gguf", Shape())
    opened = native_backend.open_backend(BackendRequest(path, GGUFFile(path).config(), 64, 16, 1, 64, "auto", asked))
    assert isinstance(opened, native_backend.NativeBackend)
    assert opened.model.shape.threads == given
