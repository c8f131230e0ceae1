"""`drafter=combined`: at every step the drafter that is expected to have more of its drafts accepted.

A copy of the history is worth what its match length says: how often such matches were right is known from every
emitted token (`MatchAcceptance`). A head is worth what became of its drafts (`PositionAcceptance`).
"""

from __future__ import annotations

from typing import Final

from engine.core.device import DrafterName
from engine.drafters.arms import ArmKey, arm_of
from engine.drafters.promise import Promises

LEAST_REACH: Final = 0.3
"""A copy ends where a further token would be accepted less often than this. On 60 greedy replies to Spec-Bench
prompts 0.2 accepts 2 % more drafts and 0.5 accepts 7 % fewer; a row of a verify costs 0.1 to 0.3 plain steps."""


def longer_draft(promises: Promises, head: DrafterName, guesses: int, match_len: int, longest: int) -> ArmKey:
    """The copy or the head's draft, whichever is expected to have more accepted.

    `guesses` are the head's drafts, `match_len` is the length of the match that may be copied after (0: none), and
    `longest` the longest copy."""
    if match_len and longest > 0:
        copied = promises.matches.expected(match_len, longest)
        count = next((at for at in range(longest) if copied[at + 1] - copied[at] < LEAST_REACH), longest)
        if copied[count] > promises.accepts(head).expected(guesses)[guesses]:
            return arm_of(DrafterName.NGRAM, count)
    return arm_of(head, guesses)
