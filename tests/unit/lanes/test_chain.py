"""The logits processor chain: its stages in their order, on every row of a verify as in plain decoding."""

from __future__ import annotations

from engine.core.context import Grammar
from engine.lanes.chain import TOOL_SUPPRESSION, needs_chain, plan_rows
from engine.protocol.commands import Sampling, Switches
from tests.fakes.bench import Workbench
from tests.fakes.scripted_device import EOS, LETTERS, THINKING_SPECIAL, ScriptedDevice, encode, vocabulary

WORDS = vocabulary(THINKING_SPECIAL)
THINK, CLOSE = THINKING_SPECIAL["<think>"], THINKING_SPECIAL["</think>"]
TOOL = THINKING_SPECIAL["<tool_call>"]


def seat(words=None, switches=None, sampling=None, levers=None, **limits):  # type: ignore[no-untyped-def]
    """The one sequence of a bench, planned but not run."""
    bench = Workbench(words=words, **(levers or {}))
    bench.submit("a", switches=switches, sampling=sampling, **limits)
    from engine.lanes.plan import plan

    plan(bench.engine)
    return bench.engine.queues.prefilling[0]


def edits(seq, drafts=()):  # type: ignore[no-untyped-def]
    return [plan.edits for plan in plan_rows(seq, WORDS, drafts)]


def test_eos_is_masked_until_min_tokens_counting_the_verify_position() -> None:
    rows = edits(seat(min_tokens=2), drafts=encode("ab"))
    assert [EOS in row.banned if row else False for row in rows] == [True, True, False]


def test_a_request_without_special_wishes_needs_no_chain_and_shares_one_plan() -> None:
    seq = seat()
    assert not needs_chain(seq)
    assert plan_rows(seq, WORDS, encode("ab")) == (seq.base_plan,) * 3


def test_thinking_cannot_close_in_the_middle_of_a_word() -> None:
    seq = seat(WORDS, Switches(thinking_open=True))
    first, mid = edits(seq, drafts=encode("a"))
    assert first is None or CLOSE not in first.banned
    assert CLOSE in mid.banned


def test_after_thinking_closed_neither_marker_comes_again() -> None:
    seq = seat(WORDS, Switches(thinking_open=True))
    assert {THINK, CLOSE} <= set(edits(seq, drafts=(CLOSE,))[1].banned)


def test_no_tool_call_opens_inside_thinking() -> None:
    assert TOOL in edits(seat(WORDS, Switches(thinking_open=True)))[0].banned


def test_suppressed_tools_are_a_penalty_outside_thinking() -> None:
    row = edits(seat(WORDS, Switches(suppress_tools=True)))[0]
    assert (TOOL, TOOL_SUPPRESSION) in row.added
    assert TOOL not in row.banned


def test_a_required_tool_call_is_pinned_right_after_thinking() -> None:
    seq = seat(WORDS, Switches(thinking_open=True, require_tool=True))
    before, after = edits(seq, drafts=(CLOSE,))
    assert before.only == ()
    assert after.only == (TOOL,)


def test_a_required_tool_call_opens_the_answer_when_nothing_is_thought() -> None:
    assert edits(seat(WORDS, Switches(require_tool=True)))[0].only == (TOOL,)


def test_a_forced_close_leaves_only_the_close_token() -> None:
    seq = seat(WORDS, Switches(thinking_open=True), levers={"think_budget": 1})
    assert edits(seq, drafts=encode("."))[1].only == (CLOSE,)


def test_a_model_without_the_markers_switches_the_stages_off() -> None:
    seq = seat(None, Switches(thinking_open=True, require_tool=True), levers={"think_budget": 1})
    assert edits(seq, drafts=encode("..")) == [None, None, None]


def test_penalties_see_the_drafts_before_their_row() -> None:
    seq = seat(sampling=Sampling(temperature=0, frequency_penalty=0.5, presence_penalty=0.25))
    first, second, third = edits(seq, drafts=encode("aa"))
    assert first is None
    assert second.added == ((0, -0.75),)
    assert third.added == ((0, -1.25),)


def test_the_repetition_penalty_covers_prompt_and_reply() -> None:
    seq = seat(sampling=Sampling(temperature=0, repetition_penalty=1.2))
    row = edits(seq, drafts=encode("z"))[1]
    assert row.repetition == 1.2
    assert set(row.repeated) == {*encode("hello"), *encode("z")}


def test_force_temp_zero_bypasses_everything() -> None:
    seq = seat(sampling=Sampling(temperature=1.0, frequency_penalty=1), levers={"force_temp_zero": "on"}, min_tokens=5)
    assert not needs_chain(seq)
    assert plan_rows(seq, WORDS)[0].temperature == 0


def test_every_verify_row_has_the_draw_of_its_own_position() -> None:
    seq = seat(sampling=Sampling(temperature=1.0, seed=3))
    draws = [plan.uniform for plan in plan_rows(seq, WORDS, encode("ab"))]
    assert len(set(draws)) == 3
    seq.state.advance(0, b"a")
    assert plan_rows(seq, WORDS)[0].uniform == draws[1]


class OneOf:
    """A grammar that allows exactly these words."""

    def __init__(self, words: tuple[str, ...], said: str = "") -> None:
        self.words, self.said = words, said

    def mask(self) -> bytes:
        bits = bytearray(9)
        for word in self.words:
            if word.startswith(self.said) and word != self.said:
                token = LETTERS.index(word[len(self.said)])
                bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def advance(self, token: int) -> bool:
        said = self.said + LETTERS[token] if token < len(LETTERS) else ""
        if not said or not any(word.startswith(said) for word in self.words):
            return False
        self.said = said
        return True

    def is_done(self) -> bool:
        return self.said in self.words

    def copy(self) -> Grammar:
        return OneOf(self.words, self.said)


WORDS_ALLOWED = ("json", "jxon", "jsxx")


def test_a_grammar_forces_its_only_token_masks_otherwise_and_ends_the_reply() -> None:
    bench = Workbench(ScriptedDevice(), grammars=lambda schema: OneOf(WORDS_ALLOWED))
    bench.submit("a", switches=Switches(grammar="{}"))
    bench.run()
    assert bench.text("a") in WORDS_ALLOWED
    assert bench.finish("a").reason == "stop"


def test_drafts_are_cut_at_the_first_token_that_the_grammar_refuses() -> None:
    from engine.core.device import DrafterName

    device = ScriptedDevice(drafters=frozenset({DrafterName.MTP}))
    bench = Workbench(device, grammars=lambda schema: OneOf(WORDS_ALLOWED), drafter="mtp", mtp_gate="force")
    bench.submit("a", switches=Switches(grammar="{}"))
    bench.run()
    assert bench.text("a") in WORDS_ALLOWED
    plainly = Workbench(grammars=lambda schema: OneOf(WORDS_ALLOWED))
    plainly.submit("a", switches=Switches(grammar="{}"))
    assert bench.ids("a") == plainly.run().ids("a")
    assert any(step.rows - step.width < step.k for step in bench.sink.steps("mtp"))
