"""What the gate and the arbiter lose against the best fixed choice, over random traces of cost and acceptance.

A trace is a text of at least 2,000 tokens per sequence with, at every position, the wall time of a plain step and of
a verify step, and how many drafts would be accepted there. Conditions belong to the position in the text, so every
policy walks through the same text under the same conditions and only spends different time on it. They change from
segment to segment: the machine's speed, the price of rows and drafts, acceptance, batch width, context depth.

    regret of a trace = time of the policy / time of the best fixed choice for that whole trace - 1

Everything is paid for: cold start, probes, bootstraps, steps of the losing arm. The choice that is best in hindsight
is allowed to be another one in every trace, but not to change within one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from engine.bench.gate_trace import MOST_COPIED, MOST_DRAFTS, Floats, Trace, random_trace
from engine.bench.result import BenchResult
from engine.core.device import DrafterName
from engine.drafters.arbiter import Arbiter, ArbiterSettings
from engine.drafters.arms import PLAIN, ArmKey, Offer, arms_of
from engine.drafters.gate import Arm, Gate, GateSettings


def time_of(trace: Trace, arm: ArmKey) -> float:
    """Nanoseconds of a fixed choice; n-gram drafts where there is a match and plain decoding elsewhere."""
    drafting = 0.0 if arm.drafter in (None, DrafterName.NGRAM) else arm.drafts
    walls = trace.plain_ns * (trace.verify[:, arm.drafts] + trace.draft * drafting)
    tokens = 1 + (trace.accepted[:, arm.drafts] if drafting else np.zeros(trace.length))
    if arm.drafter is DrafterName.NGRAM:
        has_match = (trace.match_len >= 2) & (trace.width == 1)
        walls = np.where(has_match, walls, trace.plain_ns)
        tokens = np.where(has_match, 1 + np.minimum(trace.copied, arm.drafts), 1)
    at, wall, wall_at, tokens_at = 0.0, 0.0, walls.tolist(), tokens.tolist()
    while at < trace.length:
        wall += wall_at[int(at)]
        at += tokens_at[int(at)]
    return wall


def gate_time(trace: Trace, gate: Gate, arm: ArmKey) -> float:
    """Nanoseconds under the gate; the first speculative step after a plain one is a bootstrap: one token."""
    drafting = trace.plain_ns * trace.draft * arm.drafts
    plain_at = (trace.plain_ns * trace.verify[:, 0]).tolist()
    bootstrap_at = (trace.plain_ns * trace.verify[:, 0] + drafting).tolist()
    verify_at = (trace.plain_ns * trace.verify[:, arm.drafts] + drafting).tolist()
    emitted_at, depth_at, width_at = (
        (1 + trace.accepted[:, arm.drafts]).tolist(), trace.depth.tolist(), trace.width.tolist()
    )  # fmt: skip
    at, wall, pending = 0.0, 0.0, False
    while at < trace.length:
        position = int(at)
        width, depth = width_at[position], depth_at[position]
        gate.maybe_remeasure(depth, width)
        gate.note_depth(depth)
        if gate.next_step() is Arm.PLAIN:
            step, tokens, pending = plain_at[position], 1.0, False
            gate.record_decode(int(step), width)
        else:
            step, tokens = (verify_at[position], emitted_at[position]) if pending else (bootstrap_at[position], 1.0)
            pending = True
            gate.record_verify_step(int(step), round(tokens * width), width)
        gate.take_fresh_decision()
        wall += step
        at += tokens
    return wall


def arbiter_time(trace: Trace, arbiter: Arbiter) -> float:
    """Nanoseconds under the arbiter with an MTP head of up to 5 drafts and copies of up to 16."""
    at, wall, pending = 0.0, 0.0, False
    guesses: Offer = {None: (0,), DrafterName.MTP: range(1, MOST_DRAFTS + 1)}
    with_copies: Offer = {**guesses, DrafterName.NGRAM: range(1, MOST_COPIED + 1)}
    while at < trace.length:
        position = int(at)
        width = int(trace.width[position])
        match_len = int(trace.match_len[position]) if width == 1 else 0
        offer = with_copies if match_len >= 2 else guesses
        arm = arbiter.choose(offer, int(trace.depth[position]), width, match_len)
        bootstrap = arm.drafter is DrafterName.MTP and not pending
        step, drafting = trace.step_ns(position, arm, bootstrap=bootstrap)
        tokens = 1.0 if bootstrap else trace.emitted(position, arm)
        pending = arm.drafter is not None
        outcomes = [(0, 0)] * width if bootstrap else trace.outcomes(position, arm)
        arbiter.record(arm, int(step), round(tokens * width), width, outcomes, int(drafting))
        for j in range(position, min(trace.length, position + int(tokens))):
            if width == 1 and trace.match_len[j] >= 2:
                arbiter.matches.observe_match(int(trace.match_len[j]), hit=bool(trace.copied[j] > 0))
        wall += step
        at += tokens
    return wall


@dataclass(frozen=True, slots=True)
class Regrets:
    """Regret of every trace, as shares: against the better of plain and one drafter, and against every fixed arm."""

    gate: Floats
    """Against the better of always plain and always K drafts, K drawn for the trace."""
    arbiter_of_two: Floats
    """Against the better of always plain and always three MTP drafts."""
    arbiter_of_all: Floats
    """Against the best of plain, 1 to 5 MTP drafts, and 1, 2, 4, 8 or 16 copied tokens."""


def regrets_of(seed: int) -> tuple[float, float, float]:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    plain = time_of(trace, PLAIN)
    by_drafts = {arm.drafts: time_of(trace, arm) for arm in arms_of(DrafterName.MTP, MOST_DRAFTS)}
    copies = [time_of(trace, ArmKey(DrafterName.NGRAM, k)) for k in (1, 2, 4, 8, 16)]
    drafts = int(rng.integers(1, MOST_DRAFTS + 1))
    gate = gate_time(trace, Gate(GateSettings()), ArmKey(DrafterName.MTP, drafts))
    arbiter = arbiter_time(trace, Arbiter(ArbiterSettings()))
    return (
        gate / min(plain, by_drafts[drafts]) - 1,
        arbiter / min(plain, by_drafts[3]) - 1,
        arbiter / min(plain, *by_drafts.values(), *copies) - 1,
    )


def simulate(
    traces: int, first_seed: int = 0, workers: int = 1, progress: Callable[[str], None] = lambda _: None
) -> Regrets:
    """Regrets of `traces` random traces; the same seeds always give the same ones."""
    found = []
    for done, regrets in enumerate(_in_processes(range(first_seed, first_seed + traces), workers), start=1):
        found.append(regrets)
        if done % 100 == 0:
            progress(f"{done} of {traces} traces")
    gate, two, every = np.array(found).T
    return Regrets(gate, two, every)


def _in_processes(seeds: range, workers: int) -> Iterator[tuple[float, float, float]]:
    if workers <= 1:
        yield from map(regrets_of, seeds)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(regrets_of, seeds, chunksize=10)


def bench_gate(traces: int = 5000, workers: int = 1, progress: Callable[[str], None] = print) -> BenchResult:
    """`metrale bench gate`: the distribution of regret, in percent; a negative one beats every fixed choice."""
    regrets = simulate(traces, workers=workers, progress=progress)
    result = BenchResult(f"gate: {traces:,} simulated traces, regret in percent of the best fixed time")
    result.rows = report_rows(regrets)
    result.figures = {
        "gate mean": 100 * float(regrets.gate.mean()),
        "auto mean, of two": 100 * float(regrets.arbiter_of_two.mean()),
        "auto mean, of all": 100 * float(regrets.arbiter_of_all.mean()),
    }
    result.notes = [
        "A trace is 2,000 to 6,000 tokens per sequence at widths 1 to 32; cost, acceptance, width and depth vary.",
        "Cold start, probes and bootstraps are paid for. The best fixed choice is known in hindsight only.",
    ]
    return result


def report_rows(regrets: Regrets) -> list[dict[str, object]]:
    """Mean, percentiles and worst of each regret in percent, and the share of traces above 3 %."""
    rows = []
    for name, values in (
        ("gate, to the better of plain and MTP:K", regrets.gate),
        ("auto, to the better of plain and MTP:3", regrets.arbiter_of_two),
        ("auto, to the best of 11 fixed arms", regrets.arbiter_of_all),
    ):
        median, p90, p99 = (100 * float(value) for value in np.percentile(values, (50, 90, 99)))
        row: dict[str, object] = {"policy": name, "mean": 100 * float(values.mean()), "p50": median, "p90": p90}
        rows.append({**row, "p99": p99, "worst": 100 * float(values.max()), "over 3 %": float(np.mean(values > 0.03))})
    return rows
