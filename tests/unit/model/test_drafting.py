"""Drafts that a head made behind a step count only while that step is the newest of its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.core.device import GREEDY, Draft, DrafterName, DraftItem, Segment, Step, StepKind
from engine.model.backend import Behind, Output
from engine.model.batching import batch_of
from engine.model.drafting import Drafting
from engine.model.heads import Followed, HeadItem, HeadRows

SEQ = 4
ACCEPTED = 1
"""Of every step that the head follows."""


class _Follower:
    """Drafts 7, 8, 9 behind a step and nothing when asked."""

    drafter = DrafterName.MTP
    taps = (0,)
    kv = None

    def skip(self, kv_start: int) -> int:
        return 0

    def follows(self, rows: Sequence[int]) -> bool:
        return True

    def follow(self, behind: Behind, segments: int, context: int, count: int) -> None:
        pass

    def followed(self, behind: Behind, segment: int, count: int) -> Followed:
        return Followed(ACCEPTED, [7, 8, 9], [0.9, 0.9, 0.9])

    def extend(self, rows: Sequence[HeadRows]) -> None:
        pass

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        return [Draft() for _ in items]


def _drafting() -> Drafting:
    """One whose head has taken in a prompt of four tokens and been asked for drafts."""
    head: Any = _Follower()
    drafting = Drafting([head], torch.device("cpu"))
    _feed(drafting, 0, 4, saved=True)
    _ask(drafting, 4)
    return drafting


def _feed(drafting: Drafting, start: int, count: int, *, saved: bool) -> None:
    save = frozenset({DrafterName.MTP}) if saved else frozenset()
    segment = Segment(SEQ, 0, start, tuple(range(count)), [0], (GREEDY,) * count, save_hidden=save)
    step = Step(1, StepKind.VERIFY, (segment,))
    taps, skips = drafting.plan(step, greedy=True)
    batch = batch_of(step, {}, True, taps, skips)
    hidden = torch.zeros(count, len(taps), 8) if taps else None
    behind = Behind(count, 1, 0) if skips is not None else None
    drafting.keep(step, batch, Output(torch.zeros(count), None, hidden, behind=behind))


def _ask(drafting: Drafting, seq_len: int) -> tuple[int, ...]:
    item = DraftItem(SEQ, 0, seq_len, 5, tuple(range(seq_len)), [0], 3)
    (draft,) = drafting.draft(DrafterName.MTP, [item], 0.0)
    return draft.tokens


def test_drafts_made_behind_a_verify_are_there_when_asked_for() -> None:
    drafting = _drafting()
    _feed(drafting, 4, 4, saved=True)
    assert _ask(drafting, 4 + 1 + ACCEPTED) == (7, 8, 9)


@pytest.mark.parametrize("plain_steps", [1, 2])
def test_they_are_gone_once_a_step_ran_that_nobody_followed(plain_steps: int) -> None:
    """Even where the sequence still ends within the rows of the step that was followed."""
    drafting = _drafting()
    _feed(drafting, 4, 4, saved=True)
    for step in range(plain_steps):
        _feed(drafting, 4 + 1 + ACCEPTED + step, 1, saved=False)
    assert _ask(drafting, 4 + 1 + ACCEPTED + plain_steps) == ()
