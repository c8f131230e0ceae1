"""What a recorded run would have delivered with other gate constants or draft counts.

The text of the run is laid out by emitted tokens. At every place the recording says, or its nearest neighbour of the
same batch width does, how long a plain and a verify step take and how long the accepted prefix of each sequence is.
A step takes from the end of the one before it to its own, and the longer an arm has run the less: plain steps run ahead
of each other and not of a verify, and a verify after plain steps catches up. A gate with the constants in question then
walks through that text. A smaller draft count is exact in what is accepted, since a prefix is a prefix; its time is the
recorded one less the drafting and the rows that are left out.
The same walk with the recorded constants shows how far the model is from what was measured. What the host saves where
speculation is off altogether is in no record: `mtp_gate=off` really brings a few percent more than is said.

Where the drafter was `auto` an arbiter of many arms chose, which cannot be asked again: there the recorded choices
stay, and only the draft count and the extremes can be asked about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
TELLING = 200
"""Steps of an arm below which it is said that its acceptance and times are known poorly."""
HICCUP = 4.0
"""Medians beyond which a hiccup of the machine is not counted."""
SETTLED = {Arm.PLAIN: 8, Arm.VERIFY: 3}
"""Steps of an arm after which its steps take no less: the first ones catch up, and find the caches full of others."""
PAUSE_NS = 2_000_000
"""Between two steps that are further apart the engine waited for work."""
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
    known_steps: dict[str, int]
    """Steps of each arm in the record: what they took and brought is all that is known of it."""

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
    text = _Text(steps)
    if asked.num_drafts > (most := int(text.drafts.max())):
        raise WhatIfError(
            f"The run drafted {most} tokens at most, so its record does not know what {asked.num_drafts} bring."
        )
    always = ("always plain", replace(recorded, gate="off")), ("always speculating", replace(recorded, gate="force"))
    policies = (("as recorded", recorded), ("as asked", asked), *always)
    outcomes = tuple(_walk(name, policy, text) for name, policy in policies)
    return Answer(text.measured, outcomes, len(text.width), int(text.ends[-1]), text.known_steps)


def throughput(steps: Sequence[StepRecord]) -> float:
    """Tokens per second of the decode steps of a run, from the end of each to the end of the next."""
    taken = _taken_ns(steps)
    decode = _decode(steps)
    return sum(steps[at].emitted for at in decode) / sum(taken[at] for at in decode) * 1e9


def _decode(steps: Sequence[StepRecord]) -> list[int]:
    """Where the steps are that decoded and nothing else."""
    return [at for at, step in enumerate(steps) if step.emitted and not step.prefill_tokens and step.width]


class _Text:
    """The decode steps of a run by place: [steps] arrays, places in emitted tokens."""

    def __init__(self, recorded: Sequence[StepRecord]) -> None:
        at_decode = _decode(recorded)
        steps = [recorded[at] for at in at_decode]
        verify = [at for at, step in enumerate(steps) if step.lane in SPECULATIVE and step.drafted]
        plain = [at for at, step in enumerate(steps) if step.lane in PLAIN]
        if len(verify) < FEWEST or len(plain) < FEWEST:
            raise WhatIfError(
                f"The run holds {len(plain)} plain and {len(verify)} verify steps; {FEWEST} of each are needed."
            )
        self.known_steps = {Arm.PLAIN.value: len(plain), Arm.VERIFY.value: len(verify)}
        self.speculated = np.zeros(len(steps), np.bool_)
        self.speculated[verify] = True
        self.width = np.array([step.width for step in steps], np.int64)
        self.depth = np.array([step.depth for step in steps], np.int64)
        self.ends = np.cumsum([step.emitted for step in steps])
        taken = np.array(_taken_ns(recorded), np.float64)[at_decode]
        self.measured = float(self.ends[-1] / taken.sum() * 1e9)
        self.replies = np.cumsum([at not in {before + 1, 0} for before, at in pairwise([-1, *at_decode])]).tolist()
        self._lay_out_times(steps, taken, plain, verify)
        nearest = self._nearest(verify)
        prefixes = {at: [(share.accepted, share.drafted) for share in steps[at].shares] for at in verify}
        self.prefixes = [prefixes[at] for at in nearest]
        self.places: list[int] = self.ends.tolist()
        self.drafts = np.array(
            [max(drafted for _, drafted in pairs) if pairs else 0 for pairs in self.prefixes], np.int64
        )

    def _lay_out_times(
        self, steps: Sequence[StepRecord], taken: Floats, plain: Sequence[int], verify: Sequence[int]
    ) -> None:
        """Times of both arms by position, as they pass; as the gate is told of them; and what drafting adds."""
        known = {Arm.PLAIN: plain, Arm.VERIFY: verify}
        position = self._positions(known)
        self.taken: dict[Arm, list[Floats]] = {}
        for arm, places in known.items():
            self.taken[arm] = []
            for steps_before in range(SETTLED[arm] + 1):
                same = [at for at in places if position[at] == steps_before]
                later = [at for at in places if position[at] >= steps_before]
                running = [at for at in places if position[at]]
                known_enough = (found for found in (same, later, running) if len(found) >= FEWEST)
                times = self._near(next(known_enough, places), taken)
                times[same] = taken[same]
                self.taken[arm].append(times)
        others = sorted({*range(len(steps))} - {*plain, *verify})
        for times in self.taken[Arm.PLAIN]:  # a step that made no drafts, and emitted one token of each
            times[others] = taken[others]
        told = np.array([_told_ns(step) for step in steps], np.float64)
        self.told = {arm: self._near(known[arm], told) for arm in Arm}
        for arm in Arm:
            self.told[arm][known[arm]] = told[known[arm]]
        device = np.array([step.device_us * 1e3 for step in steps], np.float64)
        drafting = np.array([step.draft_us * 1e3 for step in steps], np.float64)
        if not device[plain].any():
            device = told
        self.drafting_ns = np.maximum(
            self._near(verify, device) - self._near(plain, device) + self._near(verify, drafting), 0.0
        )

    def _positions(self, known: Mapping[Arm, Sequence[int]]) -> list[int]:
        """How many steps of the same arm came before each, without another between and in the same replies."""
        arms: list[Arm | None] = [None] * len(self.replies)
        for arm, places in known.items():
            for at in places:
                arms[at] = arm
        found = [0] * len(arms)
        for at in range(1, len(arms)):
            if arms[at] is arms[at - 1] and self.replies[at] == self.replies[at - 1]:
                found[at] = found[at - 1] + 1
        return [min(count, SETTLED[arm]) if arm else 0 for count, arm in zip(found, arms, strict=True)]

    def _nearest(self, known: Sequence[int]) -> list[int]:
        """For every step the nearest known one, of the same width where there is one."""
        by_width = {width: [at for at in known if self.width[at] == width] for width in set(self.width.tolist())}
        return [self._close(by_width[int(width)] or list(known), at) for at, width in enumerate(self.width)]

    @staticmethod
    def _close(known: list[int], at: int) -> int:
        right = int(np.searchsorted(known, at))
        around = known[max(0, right - 1) : right + 1]
        return min(around, key=lambda other: abs(other - at))

    def _near(self, known: Sequence[int], values: Floats) -> Floats:
        """What is usual around every place among known steps of its width: their median there, times how far the mean
        lies above medians, since what a hiccup takes is lost in any run. Of all known ones where a width was not seen.
        """
        result = np.zeros(len(values))
        overall = _mean(values[list(known)])
        for width in set(self.width.tolist()):
            places = np.flatnonzero(self.width == width)
            same = np.array([at for at in known if self.width[at] == width], np.int64)
            if not len(same):
                result[places] = overall
                continue
            usual = self._medians(same, places, values)
            own = self._medians(same, same, values)
            most = np.minimum(values[same], HICCUP * own)
            result[places] = usual * (most.sum() / own.sum() if own.sum() else 1.0)
        return result

    @staticmethod
    def _medians(known: Ints, places: Ints, values: Floats) -> Floats:
        """Of the known steps around every place."""
        count = min(NEIGHBOURS, len(known))
        low = np.clip(np.searchsorted(known, places) - count // 2, 0, len(known) - count)
        found: Floats = np.median(values[known[low[:, None] + np.arange(count)]], axis=1)
        return found

    def step(self, at: int, arm: Arm, position: int, drafts: int) -> tuple[int, float, float]:
        """(tokens, nanoseconds, nanoseconds that the gate is told) of a step here, with at most `drafts` drafts; 0 is
        as recorded."""
        width, taken, told = int(self.width[at]), float(self.taken[arm][position][at]), float(self.told[arm][at])
        if arm is Arm.PLAIN:
            return width, taken, told
        recorded = int(self.drafts[at])
        kept = min(drafts or recorded, recorded)
        accepted = sum(min(prefix, kept) for prefix, _ in self.prefixes[at])
        scale = width / max(1, len(self.prefixes[at]))
        saved = float(self.drafting_ns[at]) * (1 - kept / recorded) if recorded else 0.0
        return width + round(accepted * scale), max(taken - saved, 1.0), max(told - saved, 1.0)


def _taken_ns(steps: Sequence[StepRecord]) -> list[int]:
    """From the end of the step before to its own, where the engine went from one to the next; else the step alone."""
    taken, before_ns = [], 0
    for step in steps:
        begun_ns = before_ns if step.start_ns - before_ns < PAUSE_NS else step.start_ns
        taken.append(max(1, step.end_ns - begun_ns))
        before_ns = max(before_ns, step.end_ns)
    return taken


def _told_ns(step: StepRecord) -> int:
    """What the gate is told that a step took: of one that ran ahead not what came after it was read."""
    commit_ns = step.commit_us * 1000 if step.lane == "pipelined" else 0
    return max(1, step.end_ns - step.start_ns - commit_ns)


def _mean(values: Floats) -> float:
    """Without what a hiccup takes beyond a few medians."""
    return float(np.minimum(values, HICCUP * np.median(values)).mean())


def _walk(name: str, policy: Policy, text: _Text) -> Outcome:
    gate = Gate(policy.settings)
    place, at, spent, steps, verified, switches = 0, 0, 0.0, 0, 0, 0
    arm, position, reply = Arm.VERIFY, -1, 0
    while place < text.places[-1]:
        while text.places[at] <= place:
            at += 1
        before, arm = arm, _arm(gate, policy, text, at)
        position = min(position + 1, SETTLED[arm]) if (before, reply) == (arm, text.replies[at]) else 0
        reply = text.replies[at]
        tokens, taken, told = text.step(at, arm, position, policy.num_drafts)
        if policy.gate == "auto":
            _tell(gate, arm, round(told), tokens, int(text.width[at]))
        switches += gate.take_fresh_decision() is not None
        place += tokens
        spent += taken
        steps += 1
        verified += arm is Arm.VERIFY
    return Outcome(name, place / spent * 1e9, verified / steps, switches)


def _arm(gate: Gate, policy: Policy, text: _Text, at: int) -> Arm:
    if policy.gate == "auto":
        depth = int(text.depth[at])
        gate.maybe_remeasure(depth, int(text.width[at]))
        gate.note_depth(depth)
        return gate.next_step()
    speculates = bool(text.speculated[at]) if policy.gate == "recorded" else policy.gate == "force"
    return Arm.VERIFY if speculates else Arm.PLAIN


def _tell(gate: Gate, arm: Arm, wall_ns: int, tokens: int, width: int) -> None:
    if arm is Arm.VERIFY:
        gate.record_verify_step(wall_ns, tokens, width)
    else:
        gate.record_decode(wall_ns, width)


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
    arm, count = min(answer.known_steps.items(), key=lambda known: known[1])
    if count < TELLING:
        lines.append(f"Only {count} {arm} steps were recorded: what more of them bring is nearly a guess.")
    lines.append(f"as asked against as recorded: {answer.change:+.1%}; the model is off by {answer.model_error:+.1%}")
    return "\n".join(lines)
