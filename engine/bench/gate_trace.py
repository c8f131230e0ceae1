"""Random texts with conditions that change: what a step costs and how many drafts are right, at every position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.core.device import DrafterName
from engine.drafters.arms import ArmKey

PLAIN_STEP_NS: Final = 10_000_000
MOST_DRAFTS: Final = 5
MOST_COPIED: Final = 16
WIDEST: Final = 32
ROW_PROFILES: Final = {
    "int4 on a CPU": (1.0, 1.17, 1.13, 1.09, 1.5, 1.55, 1.6, 1.65, 2.8),
    "bf16 on a CPU": (1.0, 1.0, 1.08, 1.16, 1.1, 1.15, 1.2, 1.26, 1.2),
    "compiled int4 on a CPU": (1.0, 1.2, 1.4, 1.6, 2.0, 2.2, 2.3, 2.4, 4.0),
    "few-row kernels on a GPU": (1.0, 1.1, 1.34, 1.62, 2.2, 2.4, 2.6, 2.68, 4.0),
    "tensor-core tiles on a GPU": (1.0, 4.8, 4.8, 4.8, 4.8, 4.8, 4.8, 4.8, 4.9),
    "rows for free": (1.0, 1.02, 1.03, 1.05, 1.06, 1.08, 1.1, 1.12, 1.2),
}
"""Time of a verify of 1..8 and of 16 rows over a plain step, after measurements of the default model."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """One text and its conditions; arrays are by position, `verify` also by draft count."""

    profile: str
    plain_ns: Floats  # [length]
    verify: Floats  # [length, 1 + MOST_COPIED] times of a plain step, by drafts
    draft: Floats  # [length] plain steps per draft
    accepted: Floats  # [length, 1 + MOST_DRAFTS] mean accepted of so many drafts
    runs: NDArray[np.int8]  # [length, 32] right drafts in a row of each sequence
    copied: Ints  # [length] right tokens of a copy from here
    match_len: Ints  # [length] before the token at this position
    width: Ints  # [length]
    depth: Ints  # [length]

    @property
    def length(self) -> int:
        return len(self.plain_ns)

    def step_ns(self, at: int, arm: ArmKey, *, bootstrap: bool = False) -> tuple[float, float]:
        """(wall, drafting) of a step at a position."""
        plain = self.plain_ns[at]
        drafting = 0.0
        if arm.drafter not in (None, DrafterName.NGRAM):
            drafting = float(self.draft[at] * arm.drafts * plain)
        rows = 0 if bootstrap else arm.drafts
        return float(plain * self.verify[at, rows]) + drafting, drafting

    def emitted(self, at: int, arm: ArmKey) -> float:
        """Tokens per sequence."""
        if arm.drafter is None:
            return 1.0
        if arm.drafter is DrafterName.NGRAM:
            return 1.0 + min(arm.drafts, int(self.copied[at]))
        return 1.0 + float(self.accepted[at, arm.drafts])

    def outcomes(self, at: int, arm: ArmKey) -> list[tuple[int, int]]:
        """(drafted, accepted) of every sequence."""
        if arm.drafter is None:
            return []
        if arm.drafter is DrafterName.NGRAM:
            return [(arm.drafts, min(arm.drafts, int(self.copied[at])))]
        return [(arm.drafts, min(arm.drafts, int(run))) for run in self.runs[at, : self.width[at]]]


def random_trace(rng: np.random.Generator, *, least: int = 2000, most: int = 6000) -> Trace:
    """A text of segments that each have their own speed, prices, acceptance and width."""
    length = int(rng.integers(least, most + 1))
    profile = str(rng.choice(list(ROW_PROFILES)))
    edges = _edges(rng, length)
    rows = _rows(profile)
    draft_price = rng.uniform(0.02, 0.2)
    widths = rng.choice([1, 2, 4, 8, 16, 32], size=len(edges), p=[0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    if rng.random() < 0.6:
        widths[:] = widths[0]
    plain, verify, draft = np.empty(length), np.empty((length, 1 + MOST_COPIED)), np.empty(length)
    accepted, width = np.zeros((length, 1 + MOST_DRAFTS)), np.empty(length, np.int64)
    runs = np.zeros((length, WIDEST), np.int8)
    copying = np.empty(length)
    first = rng.uniform(0.2, 0.9)
    speed, slope, copy_share = 1.0, 1.0, rng.uniform(0.3, 1.0)
    for (start, end), batch in zip(edges, widths, strict=True):
        speed *= float(np.exp(rng.normal(0, 0.2)))
        slope = float(np.clip(slope * np.exp(rng.normal(0, 0.15)), 0.4, 2.5))
        first = float(np.clip(first + rng.normal(0, 0.12), 0.05, 0.95))
        copy_share = float(np.clip(copy_share + rng.normal(0, 0.2), 0.1, 1.0))
        part = slice(start, end)
        plain[part] = PLAIN_STEP_NS * speed * (1 + 0.03 * (batch - 1))
        verify[part] = 1 + (rows - 1) * slope
        draft[part] = draft_price
        width[part] = batch
        copying[part] = copy_share
        runs[part, :batch] = _runs(rng, first, end - start, int(batch))
        for drafts in range(1 + MOST_DRAFTS):
            accepted[part, drafts] = np.minimum(runs[part, :batch], drafts).mean(axis=1)
    plain *= _noise(rng, length)
    match_len, copied = _copies(rng, copying)
    copied[width > 1] = 0
    return Trace(profile, plain, verify, draft, accepted, runs, copied, match_len, width, _depths(rng, length))


def _edges(rng: np.random.Generator, length: int) -> list[tuple[int, int]]:
    ends, at = [], 0
    mean = rng.choice([400, 1000, 4000])
    while at < length:
        step = max(100, int(rng.exponential(mean)))
        ends.append((at, min(length, at + step)))
        at += step
    return ends


def _rows(profile: str) -> Floats:
    known = ROW_PROFILES[profile]
    return np.interp(np.arange(1, 2 + MOST_COPIED), [*range(1, 9), 16], known)


def _runs(rng: np.random.Generator, first: float, length: int, width: int) -> NDArray[np.int8]:
    """Right drafts in a row; a draft after right ones is right a little more often."""
    shares = np.minimum(0.97, first + (1 - first) * 0.12 * np.arange(MOST_DRAFTS))
    right = rng.random((length, width, MOST_DRAFTS)) < shares
    runs: NDArray[np.int8] = np.cumprod(right, axis=2).sum(axis=2).astype(np.int8)
    return runs


def _noise(rng: np.random.Generator, length: int) -> Floats:
    spread = rng.choice([0.01, 0.04, 0.1, 0.2])
    noise = np.exp(rng.normal(0, spread, length))
    hiccups = rng.random(length) < 0.002
    return np.where(hiccups, noise * rng.uniform(3, 10, length), noise)


def _copies(rng: np.random.Generator, copying: Floats) -> tuple[Ints, Ints]:
    """Match length before each token and the run of right copies from it."""
    length = len(copying)
    draws, starts = rng.random(length), rng.random(length)
    match_len, hit = np.zeros(length, np.int64), np.zeros(length, bool)
    current = 0
    for at in range(length):
        match_len[at] = current
        if current >= 2:
            hit[at] = draws[at] < copying[at] * (1 - 0.5 * 0.85 ** (current - 2))
        current = min(16, current + 1) if hit[at] else (2 if starts[at] < 0.2 * copying[at] else 0)
    run = np.zeros(length + 1, np.int64)
    for at in range(length - 1, -1, -1):
        run[at] = run[at + 1] + 1 if hit[at] else 0
    return match_len, np.minimum(run[:length], MOST_COPIED)


def _depths(rng: np.random.Generator, length: int) -> Ints:
    start = int(rng.choice([64, 400, 1500]))
    reply = int(rng.choice([256, 1000, 8000]))
    return start + np.arange(length) % reply
