"""The step profile names every part of every kind of step and its floor."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.bench.profile_cpu import CASES, profile_cpu
from engine.model.backend import BackendUnavailable
from engine.model.native.library import PARTS
from tests.unit.native.models import Shape, write_model


def test_every_part_of_every_step_has_its_time(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Shape(context=2048))
    result = profile_cpu(path, threads=2, repeats=1, progress=lambda _: None)
    assert [row["part"] for row in result.rows] == [*PARTS, "whole step"]
    assert set(result.rows[0]) == {"part", *(case.name for case in CASES)}
    whole = result.rows[-1]
    assert all(isinstance(whole[case.name], float) and whole[case.name] > 0 for case in CASES)
    assert result.figures["floor of a decode step ms"] > 0
    assert "gate_up" in result.text()


def test_a_model_without_native_kernels_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Shape(head_dim=16, heads=2))
    with pytest.raises(BackendUnavailable):
        profile_cpu(path)
