"""The registry itself: complete, consistent, and parsed the same from every face."""

from __future__ import annotations

import json

import pytest

from engine.levers.catalog import LEVERS
from engine.levers.resolve import LeverState, resolve
from engine.levers.spec import Kind, LeverError


@pytest.mark.parametrize("lever", LEVERS.values(), ids=lambda lever: lever.name)
def test_a_default_is_a_value_that_the_lever_itself_would_take(lever: object) -> None:
    assert lever.parse(lever.default) == lever.default  # type: ignore[attr-defined]
    assert lever.parse(lever.show(lever.default)) == lever.default  # type: ignore[attr-defined]
    assert json.loads(json.dumps(lever.default)) == lever.default  # type: ignore[attr-defined]


def test_names_variables_and_flags_are_unique() -> None:
    for attribute in ("name", "env", "flag"):
        values = [getattr(lever, attribute) for lever in LEVERS.values()]
        assert len(set(values)) == len(values)
    assert all(lever.env.startswith("METRALE_") for lever in LEVERS.values())


def test_lossy_levers_are_exactly_those_that_may_change_what_the_model_says() -> None:
    lossy = {name for name, lever in LEVERS.items() if not lever.lossless}
    assert lossy == {"loop_watchdog", "think_budget", "adaptive_sampling", "force_temp_zero"}


@pytest.mark.parametrize("lever", LEVERS.values(), ids=lambda lever: lever.name)
@pytest.mark.parametrize("raw", ["", "nan", "inf", "-999999999", "1e999", "\x00", "drop table", [], {}, "é" * 200])
def test_nonsense_is_refused_by_every_lever_with_its_range(lever: object, raw: object) -> None:
    if lever.kind is Kind.TEXT:  # type: ignore[attr-defined]
        return
    with pytest.raises(LeverError, match=lever.name):  # type: ignore[attr-defined]
        lever.parse(raw)  # type: ignore[attr-defined]


def test_an_environment_variable_that_is_wrong_is_named() -> None:
    with pytest.raises(LeverError, match="METRALE_NUM_DRAFTS"):
        resolve(environment={"METRALE_NUM_DRAFTS": "99"})


def test_gate_force_follows_its_variable_as_a_switch() -> None:
    assert resolve(environment={"METRALE_MTP_GATE_FORCE": "1"})[0]["mtp_gate"] == "force"
    assert resolve(environment={"METRALE_MTP_GATE_FORCE": "0"})[0]["mtp_gate"] == "auto"


def test_a_ladder_whose_widths_do_not_rise_is_refused() -> None:
    for bad in ("8:3,4:1", "4:3,4:1", "0:3", "4:99", "x", "4:3,"):
        with pytest.raises(LeverError):
            LEVERS["k_ladder"].parse(bad)


def test_the_state_counts_its_versions_and_remembers_who_set_a_value() -> None:
    state = LeverState.of(num_drafts=4)
    assert (state.int("num_drafts"), state.version, state.sources["num_drafts"]) == (4, 0, "flag")
    assert state.apply("num_drafts", 6) == 4
    assert (state.int("num_drafts"), state.version, state.sources["num_drafts"]) == (6, 1, "operator")
    state.apply("k_ladder", "2:5")
    assert state.ladder == ((2, 5),)
