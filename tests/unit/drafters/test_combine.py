"""`drafter=combined`: of a copy and a head's draft, the one that is expected to have more accepted."""

from __future__ import annotations

from engine.core.device import DrafterName
from engine.drafters.arms import ArmKey
from engine.drafters.combine import LEAST_REACH, longer_draft
from engine.drafters.promise import Promises

MTP, NGRAM = DrafterName.MTP, DrafterName.NGRAM


def after(guessed: int, copied_share: float, match_len: int, trials: int = 200) -> Promises:
    """What is known when of three guesses `guessed` were always accepted, and copies were right that often."""
    promises = Promises()
    for trial in range(trials):
        promises.accepts(MTP).add(3, guessed)
        promises.matches.observe_match(match_len, hit=(trial * copied_share) % 1 + copied_share >= 1)
    return promises


def test_without_a_match_the_head_drafts() -> None:
    assert longer_draft(Promises(), MTP, 3, match_len=0, longest=16) == ArmKey(MTP, 3)


def test_a_long_match_is_copied_whatever_the_head_is_worth() -> None:
    arm = longer_draft(after(3, 0.98, 16), MTP, 3, match_len=16, longest=16)
    assert arm == ArmKey(NGRAM, 16)


def test_a_copy_that_was_wrong_lately_is_left_to_the_head() -> None:
    assert longer_draft(after(1, 0.1, 2), MTP, 3, match_len=2, longest=16) == ArmKey(MTP, 3)


def test_the_same_match_is_copied_where_the_head_is_worth_less() -> None:
    assert longer_draft(after(0, 0.6, 2), MTP, 3, match_len=2, longest=16).drafter is NGRAM


def test_a_copy_ends_where_a_further_token_is_accepted_too_rarely() -> None:
    promises = after(0, 0.5, 2)
    count = longer_draft(promises, MTP, 3, match_len=2, longest=16).drafts
    reach = promises.matches.expected(2, 17)
    assert 0 < count < 16
    assert reach[count] - reach[count - 1] >= LEAST_REACH > reach[count + 1] - reach[count]


def test_a_copy_is_never_longer_than_there_is_room() -> None:
    assert longer_draft(after(0, 0.98, 16), MTP, 3, match_len=16, longest=2) == ArmKey(NGRAM, 2)
    assert longer_draft(after(0, 0.98, 16), MTP, 1, match_len=16, longest=0) == ArmKey(MTP, 1)
