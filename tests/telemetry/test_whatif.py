"""What-if: a worse arm is found worse, fewer drafts accept exactly their prefix, the model states its own error."""

from __future__ import annotations

import pytest

from engine.bench.whatif import WhatIfError, policy_of, throughput, to_text, what_if
from telemetry.record import SeqShare, StepRecord

MS = 1_000_000


def a_run(verify_ms: float, accepted: int, steps: int = 600, plain_ms: float = 10.0) -> list[StepRecord]:
    """One sequence; eight plain steps, then eight verify steps of three drafts, and so on."""
    out, now = [], 0
    for number in range(steps):
        is_verify = number // 8 % 2 == 1
        wall = int((verify_ms if is_verify else plain_ms) * MS)
        share = SeqShare("a", 3, accepted, accepted + 1) if is_verify else SeqShare("a", 0, 0, 1)
        out.append(
            StepRecord(
                number, number, "mtp" if is_verify else "plain", now, now + wall, 1, 4 if is_verify else 1,
                drafted=share.drafted, accepted=share.accepted, bonus=1, emitted=share.emitted, depth=100 + number % 50,
                shares=(share,),
            )
        )  # fmt: skip
        now += wall
    return out


def test_where_speculation_wins_the_gate_speculates_and_switching_it_off_is_seen_to_cost() -> None:
    answer = what_if(a_run(verify_ms=15, accepted=2), policy_of({}), policy_of({}, {"mtp_gate": "off"}))
    recorded, asked, plain, verify = answer.outcomes
    assert verify.tokens_per_s == pytest.approx(200.0, rel=0.01)
    assert plain.tokens_per_s == asked.tokens_per_s == pytest.approx(100.0, rel=0.01)
    assert recorded.tokens_per_s > 190
    assert answer.change < -0.4


def test_where_speculation_loses_the_gate_finds_plain() -> None:
    answer = what_if(a_run(verify_ms=30, accepted=0), policy_of({}), policy_of({}, {"gate_reprobe_tokens": 16}))
    recorded, often, plain, verify = answer.outcomes
    assert verify.tokens_per_s < 40
    assert recorded.tokens_per_s > 0.9 * plain.tokens_per_s
    assert recorded.verify_share < 0.2
    assert often.verify_share >= recorded.verify_share


def test_fewer_drafts_accept_exactly_their_prefix() -> None:
    answer = what_if(
        a_run(verify_ms=16, accepted=2), policy_of({}, {"mtp_gate": "force"}),
        policy_of({}, {"mtp_gate": "force", "num_drafts": 1}),
    )  # fmt: skip
    # one draft accepted of one, in a third of the extra time: 2 tokens in 12 ms
    assert answer.outcomes[1].tokens_per_s == pytest.approx(2 / 0.012, rel=0.02)
    assert answer.outcomes[0].tokens_per_s == pytest.approx(3 / 0.016, rel=0.02)


def test_an_arm_that_runs_on_takes_what_its_settled_steps_took_and_not_what_it_took_after_the_other() -> None:
    """Sixteen plain steps, of which the first eight find cold caches, then sixteen verify steps."""
    steps, now = [], 0
    for number in range(800):
        at, is_verify = number % 16, number // 16 % 2 == 1
        wall = (15 if is_verify else 14 if at < 8 else 10) * MS
        share = SeqShare("a", 3, 1, 2) if is_verify else SeqShare("a", 0, 0, 1)
        steps.append(
            StepRecord(
                number, number, "mtp" if is_verify else "pipelined", now, now + wall, 1, 4 if is_verify else 1,
                drafted=share.drafted, accepted=share.accepted, bonus=1, emitted=share.emitted, depth=100,
                shares=(share,),
            )
        )  # fmt: skip
        now += wall
    answer = what_if(steps, policy_of({}), policy_of({}, {"mtp_gate": "off"}))
    assert answer.outcomes[1].tokens_per_s == pytest.approx(100.0, rel=0.02)


def test_time_passes_from_the_end_of_a_step_to_the_end_of_the_next_unless_the_engine_waited() -> None:
    def step(number: int, start_ms: float, end_ms: float, lane: str = "pipelined") -> StepRecord:
        return StepRecord(number, number, lane, int(start_ms * MS), int(end_ms * MS), 1, 1, emitted=1)

    # overlapping as they do when they run ahead, then half a millisecond of the host, then a second of nothing to do
    steps = [step(0, 0, 3), step(1, 2.5, 5), step(2, 4.5, 7), step(3, 7.5, 10, "plain"), step(4, 1010, 1012, "plain")]
    assert throughput(steps) == pytest.approx(5 / 0.012)


def test_fewer_drafts_save_their_rows_and_their_drafting_and_not_what_every_verify_pays() -> None:
    steps, now = [], 0
    for number in range(400):
        is_verify = number // 8 % 2 == 1
        share = SeqShare("a", 2, 2, 3) if is_verify else SeqShare("a", 0, 0, 1)
        wall = (16 if is_verify else 8) * MS
        steps.append(
            StepRecord(
                number, number, "mtp" if is_verify else "pipelined", now, now + wall, 1, 3 if is_verify else 1,
                drafted=share.drafted, accepted=share.accepted, bonus=1, emitted=share.emitted, depth=100,
                draft_us=2000 if is_verify else 0, device_us=10_000 if is_verify else 8000, shares=(share,),
            )
        )  # fmt: skip
        now += wall
    answer = what_if(steps, policy_of({}, {"mtp_gate": "force"}), policy_of({}, {"mtp_gate": "force", "num_drafts": 1}))
    # 2 ms of drafting and 2 ms of rows for two drafts; 4 ms are the host's
    assert answer.outcomes[1].tokens_per_s == pytest.approx(2 / 0.014, rel=0.02)


def test_a_run_that_only_speculated_cannot_answer_and_says_what_is_missing() -> None:
    only = [step for step in a_run(15, 2) if step.lane == "mtp"]
    with pytest.raises(WhatIfError, match="0 plain"):
        what_if(only, policy_of({}), policy_of({}))


def test_more_drafts_than_were_made_are_refused_since_nothing_is_known_of_them() -> None:
    with pytest.raises(WhatIfError, match=r"drafted 3 tokens at most.* what 4"):
        what_if(a_run(15, 2), policy_of({}), policy_of({}, {"num_drafts": 4}))


def test_a_lever_that_is_no_constant_of_the_gate_is_refused_with_those_that_are() -> None:
    with pytest.raises(WhatIfError, match=r"temperature.*gate_margin"):
        policy_of({}, {"temperature": 1})


def test_choices_of_the_arbiter_stay_as_recorded_and_its_constants_are_refused_with_what_can_be_asked() -> None:
    levers = {"drafter": "auto"}
    answer = what_if(a_run(verify_ms=16, accepted=2), policy_of(levers), policy_of(levers, {"num_drafts": 1}))
    recorded, asked, plain, verify = answer.outcomes
    assert answer.model_error == pytest.approx(0, abs=1e-9)
    assert 0 < recorded.verify_share < 1
    assert asked.tokens_per_s == pytest.approx((2 + 1) / 0.022, rel=0.3)
    assert plain.tokens_per_s < recorded.tokens_per_s < verify.tokens_per_s
    with pytest.raises(WhatIfError, match=r"gate_margin.*num_drafts.*--drafter mtp"):
        policy_of(levers, {"gate_margin": 0.2})


def test_recorded_lever_values_are_the_base_of_the_question() -> None:
    policy = policy_of({"gate_window": 8, "mtp_gate": "force", "policy": "fifo"}, {"gate_margin": 0.2})
    assert (policy.settings.window, policy.settings.margin, policy.gate) == (8, 0.2, "force")


def test_the_text_says_where_too_little_was_recorded_of_an_arm() -> None:
    asked = policy_of({}, {"gate_dwell": 3})
    assert "Only 48 verify steps were recorded" in to_text(what_if(a_run(15, 2, steps=100), policy_of({}), asked))
    assert "Only" not in to_text(what_if(a_run(15, 2), policy_of({}), asked))


def test_the_text_states_the_error_of_the_model() -> None:
    assert "the model is off by" in to_text(what_if(a_run(15, 2), policy_of({}), policy_of({}, {"gate_dwell": 3})))
