"""What a recorded run would have delivered with other gate constants or draft counts.

The text of the run is laid out by emitted tokens. At every place the recording says, or its nearest neighbour of the
same batch width does, how long a plain and a verify step take and how long the accepted prefix of each sequence is.
A gate with the constants in question then walks through that text. A smaller draft count is exact in what is accepted,
since a prefix is a prefix; its time is interpolated between a plain step and the recorded verify step by rows.
The same walk with the recorded constants shows how far the model is from what was measured. Where the drafter was
`auto` an arbiter of many arms chose, which cannot be asked again: there the recorded choices stay, and only the draft
count and the extremes can be asked about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.drafters.gate import Arm, Gate, GateSettings
from telemetry.record import StepRecord
from telemetry.schema import SPECULATIVE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEFAULT_SETTINGS = GateSettings()
PLAIN = ("plain", "pipelined")
ARBITRATED = "auto"
NEIGHBOURS = 16
"""Steps around a place whose median is taken as the time there."""
FEWEST = 4
"""Plain and verify steps without which nothing is said."""
SETTINGS = {
    "gate_window": "window", "gate_dwell": "dwell", "gate_margin": "margin",
    "gate_reprobe_tokens": "reprobe_tokens", "gate_refresh_tokens": "refresh_tokens",
}  # fmt: skip


class WhatIfError(ValueError):
    """The question cannot be answered from this run; one sentence."""


@dataclass(frozen=True, slots=True)
class Policy:
    settings: GateSettings = DEFAULT_SETTINGS
    gate: str = "auto"
    """auto, force, off, or recorded: whatever was chosen at that place."""
    num_drafts: int = 0
    """Drafts per sequence at most; 0 is as recorded."""


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    tokens_per_s: float
    verify_share: float
    """Share of steps on the verify arm."""
    switches: int


@dataclass(frozen=True, slots=True)
class Answer:
    measured_tokens_per_s: float
    """Of the recorded decode steps."""
    outcomes: tuple[Outcome, ...]
    """recorded constants, asked for, always plain, always speculating."""
    steps: int
    tokens: int

    @property
    def model_error(self) -> float:
        """Throughput of the walk with the recorded constants over what was measured, minus one."""
        return self.outcomes[0].tokens_per_s / self.measured_tokens_per_s - 1

    @property
    def change(self) -> float:
        """What the asked-for policy would have changed, against the recorded one in the same model."""
        return self.outcomes[1].tokens_per_s / self.outcomes[0].tokens_per_s - 1


def policy_of(levers: Mapping[str, Any], overrides: Mapping[str, Any] = {}) -> Policy:
    """Gate constants and draft count from lever values; an override of another lever is refused."""
    known = {*SETTINGS, "num_drafts", "mtp_gate"}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise WhatIfError(f"{unknown[0]} cannot be asked about; these can: {', '.join(sorted(known))}.")
    if levers.get("drafter") == ARBITRATED:
        return _arbitrated(overrides)
    values = {**levers, **overrides}
    settings = {field: values[name] for name, field in SETTINGS.items() if name in values}
    drafts = int(overrides.get("num_drafts", 0))
    return Policy(replace(GateSettings(), **settings), str(values.get("mtp_gate", "auto")), drafts)


def _arbitrated(overrides: Mapping[str, Any]) -> Policy:
    constants = sorted(set(overrides) & set(SETTINGS))
    if constants:
        raise WhatIfError(
            f"{constants[0]} cannot be asked about in a run with the drafter {ARBITRATED}, where more than two arms "
            "were compared: ask about num_drafts or mtp_gate, or record a run with one drafter, such as --drafter mtp."
        )
    gate = str(overrides.get("mtp_gate", "recorded"))
    return Policy(gate="recorded" if gate == "auto" else gate, num_drafts=int(overrides.get("num_drafts", 0)))


def what_if(steps: Sequence[StepRecord], recorded: Policy, asked: Policy) -> Answer:
    """Walk the text of a run under both policies and both extremes. Raises `WhatIfError`."""
    text = _Text([step for step in steps if step.emitted and not step.prefill_tokens and step.width])
    always = ("always plain", replace(recorded, gate="off")), ("always speculating", replace(recorded, gate="force"))
    policies = (("as recorded", recorded), ("as asked", asked), *always)
    outcomes = tuple(_walk(name, policy, text) for name, policy in policies)
    return Answer(text.measured, outcomes, len(text.width), int(text.ends[-1]))


class _Text:
    """The decode steps of a run by place: [steps] arrays, places in emitted tokens."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        verify = [at for at, step in enumerate(steps) if step.lane in SPECULATIVE and step.drafted]
        plain = [at for at, step in enumerate(steps) if step.lane in PLAIN]
        if len(verify) < FEWEST or len(plain) < FEWEST:
            raise WhatIfError(
                f"The run holds {len(plain)} plain and {len(verify)} verify steps; {FEWEST} of each are needed."
            )
        self.speculated = np.zeros(len(steps), np.bool_)
        self.speculated[verify] = True
        wall = np.array([max(1, step.end_ns - step.start_ns) for step in steps], np.float64)
        self.width = np.array([step.width for step in steps], np.int64)
        self.depth = np.array([step.depth for step in steps], np.int64)
        self.ends = np.cumsum([step.emitted for step in steps])
        self.measured = float(self.ends[-1] / wall.sum() * 1e9)
        self.plain_ns = self._near(plain, wall)
        self.verify_ns = self._near(verify, wall)
        self.plain_ns[plain], self.verify_ns[verify] = wall[plain], wall[verify]
        nearest = self._nearest(verify)
        prefixes = {at: [(share.accepted, share.drafted) for share in steps[at].shares] for at in verify}
        self.prefixes = [prefixes[at] for at in nearest]
        self.places: list[int] = self.ends.tolist()
        self.drafts = np.array(
            [max(drafted for _, drafted in pairs) if pairs else 0 for pairs in self.prefixes], np.int64
        )

    def _nearest(self, known: Sequence[int]) -> list[int]:
        """For every step the nearest known one, of the same width where there is one."""
        by_width = {width: [at for at in known if self.width[at] == width] for width in set(self.width.tolist())}
        return [self._close(by_width[int(width)] or list(known), at) for at, width in enumerate(self.width)]

    @staticmethod
    def _close(known: list[int], at: int) -> int:
        right = int(np.searchsorted(known, at))
        around = known[max(0, right - 1) : right + 1]
        return min(around, key=lambda other: abs(other - at))

    def _near(self, known: Sequence[int], wall: Floats) -> Floats:
        """The median time of the known steps around every place, by width; scaled where a width was never seen."""
        result = np.zeros(len(wall))
        overall = float(np.median(wall[list(known)]))
        for width in set(self.width.tolist()):
            places = np.flatnonzero(self.width == width)
            same = np.array([at for at in known if self.width[at] == width], np.int64)
            if not len(same):
                result[places] = overall
                continue
            centres = np.searchsorted(same, places)
            count = min(NEIGHBOURS, len(same))
            low = np.clip(centres - count // 2, 0, len(same) - count)
            result[places] = np.median(wall[same[low[:, None] + np.arange(count)]], axis=1)
        return result

    def verify(self, at: int, drafts: int) -> tuple[int, float]:
        """(tokens, nanoseconds) of a verify step here with at most `drafts` drafts; 0 is as recorded."""
        width, recorded = int(self.width[at]), int(self.drafts[at])
        kept = min(drafts or recorded, recorded)
        accepted = sum(min(prefix, kept) for prefix, _ in self.prefixes[at])
        scale = width / max(1, len(self.prefixes[at]))
        part = kept / recorded if recorded else 1.0
        wall = self.plain_ns[at] + (self.verify_ns[at] - self.plain_ns[at]) * part
        return width + round(accepted * scale), float(max(wall, 1.0))


def _walk(name: str, policy: Policy, text: _Text) -> Outcome:
    gate = Gate(policy.settings)
    place, at, spent, steps, verified, switches = 0, 0, 0.0, 0, 0, 0
    while place < text.places[-1]:
        while text.places[at] <= place:
            at += 1
        arm, tokens, wall = _step(gate, policy, text, at)
        switches += gate.take_fresh_decision() is not None
        place += tokens
        spent += wall
        steps += 1
        verified += arm is Arm.VERIFY
    return Outcome(name, place / spent * 1e9, verified / steps, switches)


def _step(gate: Gate, policy: Policy, text: _Text, at: int) -> tuple[Arm, int, float]:
    width, depth = int(text.width[at]), int(text.depth[at])
    if policy.gate == "auto":
        gate.maybe_remeasure(depth, width)
        gate.note_depth(depth)
        arm = gate.next_step()
    else:
        speculates = bool(text.speculated[at]) if policy.gate == "recorded" else policy.gate == "force"
        arm = Arm.VERIFY if speculates else Arm.PLAIN
    tokens, wall = text.verify(at, policy.num_drafts) if arm is Arm.VERIFY else (width, float(text.plain_ns[at]))
    if policy.gate == "auto" and arm is Arm.VERIFY:
        gate.record_verify_step(int(wall), tokens, width)
    elif policy.gate == "auto":
        gate.record_decode(int(wall), width)
    return arm, tokens, wall


def to_text(answer: Answer) -> str:
    """Lines for the terminal."""
    lines = [
        f"{answer.steps} decode steps, {answer.tokens} tokens, measured {answer.measured_tokens_per_s:.1f} tokens/s"
    ]
    for outcome in answer.outcomes:
        lines.append(
            f"{outcome.name:>20}  {outcome.tokens_per_s:8.1f} tokens/s  {outcome.verify_share:6.1%} of steps speculate"
            f"  {outcome.switches} switches"
        )
    lines.append(f"as asked against as recorded: {answer.change:+.1%}; the model is off by {answer.model_error:+.1%}")
    return "\n".join(lines)
