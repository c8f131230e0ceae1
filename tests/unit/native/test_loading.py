"""What is said while a model loads: that kernels are built, where they are, and how many bytes are in."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model import native_backend
from engine.model.backend import BackendRequest
from engine.model.gguf import GGUFFile
from engine.model.quant import matrix_names
from tests.unit.native.models import Shape, write_model

Report = tuple[int, int, str]


def _opened(folder: Path) -> tuple[list[Report], int]:
    """Everything that was reported, and the bytes of all matrices."""
    path, said = write_model(folder / "m.gguf", Shape()), []
    file = GGUFFile(path)
    request = BackendRequest(path, file.config(), 64, 16, 1, 64, "auto", 1, lambda *report: said.append(report))
    native_backend.open_backend(request).close()
    return said, sum(file.info(name).nbytes for name in matrix_names(file.config()))


def test_weights_are_reported_in_bytes_up_to_all_of_them(tmp_path: Path) -> None:
    said, total = _opened(tmp_path)
    assert [report for report in said if report[2] != "weights"] == []
    assert len(said) == Shape().layers + 1
    assert said == sorted(said)
    assert said[-1] == (total, total, "weights")


def test_a_library_that_is_not_there_yet_is_said_to_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_CACHE", str(tmp_path / "empty"))
    said, _ = _opened(tmp_path)
    assert said[0] == (0, 0, "building kernels")
