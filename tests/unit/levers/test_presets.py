"""Presets: saved, read back, compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.levers.presets import PresetError, Presets, difference
from engine.levers.resolve import Source, resolve
from engine.levers.spec import LeverError


def test_a_preset_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    store = Presets(tmp_path / "new")
    store.save("fast", {"num_drafts": 5, "pipelined_decode": False})
    assert store.load("fast") == {"num_drafts": 5, "pipelined_decode": False}
    assert store.names() == ["fast"]
    store.save("fast", {"num_drafts": 7})
    assert store.load("fast") == {"num_drafts": 7}
    store.delete("fast")
    assert store.names() == []


def test_a_preset_stands_between_default_and_environment(tmp_path: Path) -> None:
    preset = {"num_drafts": 5, "gate_dwell": 4}
    values, sources = resolve({"gate_window": 9}, {"METRALE_MTP_GATE_DWELL": "6"}, preset)
    assert (values["num_drafts"], values["gate_dwell"], values["gate_window"]) == (5, 6, 9)
    assert (sources["num_drafts"], sources["gate_dwell"]) == (Source.PRESET, Source.ENVIRONMENT)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "x" * 65, "a b"])
def test_a_name_that_could_leave_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PresetError, match="cannot be called"):
        Presets(tmp_path).save(name, {})


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(PresetError, match=r"bad\.json"):
        Presets(tmp_path).load("bad")


def test_a_preset_with_a_wrong_value_or_lever_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"num_drafts": 99}')
    (tmp_path / "gone.json").write_text('{"num_draft": 3}')
    with pytest.raises(LeverError, match="1 to 15"):
        Presets(tmp_path).load("old")
    with pytest.raises(LeverError, match="Did you mean"):
        Presets(tmp_path).load("gone")


def test_a_missing_preset_names_those_that_exist(tmp_path: Path) -> None:
    Presets(tmp_path).save("fast", {})
    with pytest.raises(PresetError, match="fast"):
        Presets(tmp_path).load("slow")


def test_the_difference_names_what_both_sides_set_apart() -> None:
    found = difference({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9})
    assert [(one.name, one.left, one.right) for one in found] == [("b", 2, 9)]
