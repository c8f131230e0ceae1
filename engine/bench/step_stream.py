"""A made-up but consistent stream of telemetry records: sums reconcile, requests come and go, the gate has opinions."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from telemetry.record import AnyRecord, GateRecord, HealthRecord, RequestRecord, RunRecord, SeqShare, StepRecord

_LANES = ("mtp", "ngram", "plain", "mixed")
_WEIGHTS = (5, 2, 2, 1)
_DRAFTS = {"mtp": 3, "ngram": 3, "plain": 0, "mixed": 0}
_REFUSED = {
    "mtp": (("ngram", "no_match"),),
    "ngram": (),
    "plain": (("ngram", "no_match"), ("mtp", "gate")),
    "mixed": (("ngram", "mixed_step"), ("mtp", "mixed_step")),
}
_SECOND_NS = 1_000_000_000


def run_record(run_id: str = "bench", unix_ns: int = 0) -> RunRecord:
    """The first record of a stream that begins at `unix_ns`; 0 is now."""
    return RunRecord(
        run_id, 0, unix_ns or time.time_ns(), "SmolLM2-135M", "cpu", "q4_1", {"num_drafts": 3, "mtp_gate": "auto"},
        {"metrale": "0"}, kv_tokens=65_536, block_size=16,
    )  # fmt: skip


@dataclass(slots=True)
class _Active:
    request_id: str
    arrived_ns: int
    wanted: int
    prompt: int
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    first_ns: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)


class StepStream:
    """Records of an engine with up to `width` sequences and steps of about `step_ns`."""

    def __init__(self, seed: int = 1, width: int = 4, step_ns: int = 1_000_000, first_step: int = 0) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._width = width
        self._step_ns = step_ns
        self._now = 0
        self._step = first_step
        self._requests = 0
        self._active: list[_Active] = []
        self._health_ns = 0
        self._records = 0

    def take(self, steps: int) -> list[AnyRecord]:
        """The records of the next `steps` lane steps."""
        out: list[AnyRecord] = []
        for _ in range(steps):
            self._admit()
            self._one(out)
        self._records += len(out)
        return out

    def _admit(self) -> None:
        rng = self._random
        while not self._active or (len(self._active) < self._width and rng.random() < 0.02):
            self._requests += 1
            request_id = f"chat-{self._seed:04x}{self._requests:012x}"
            self._active.append(_Active(request_id, self._now, rng.randint(20, 120), rng.randint(10, 200)))

    def _one(self, out: list[AnyRecord]) -> None:
        rng, start, step = self._random, self._now, self._step
        lane = rng.choices(_LANES, _WEIGHTS)[0]
        drafts = _DRAFTS[lane]
        end = start + int(self._step_ns * (0.7 + 0.5 * rng.random()))
        shares, drafted_at, accepted_at = self._serve(lane, drafts, end)
        width, accepted = len(shares), sum(accepted_at)
        gated = lane in ("mtp", "plain")
        out.append(
            StepRecord(
                step, step, lane, start, end, width, width * (drafts + 1), 16 if lane == "mixed" else 0,
                drafts * width, accepted, width, accepted + width, drafted_at, accepted_at, drafts,
                "num_drafts" if drafts else "", _REFUSED[lane], 40 + step // 8 % 60, 4096,
                100 + step % 400, 90 * drafts + rng.randint(0, 9), 700 + rng.randint(0, 99), 50 + rng.randint(0, 9),
                0, shares,
            )
        )  # fmt: skip
        if gated:
            out.append(self._gate(lane, end, width))
        self._now = end + 20_000 + rng.randint(0, 9_999)
        self._step += 1
        self._retire(out)
        if self._now - self._health_ns > _SECOND_NS:
            self._health_ns = self._now
            out.append(HealthRecord(self._now, 900_000_000, 2_000_000, self._records, 0, 400_000_000))

    def _serve(self, lane: str, drafts: int, end: int) -> tuple[tuple[SeqShare, ...], tuple[int, ...], tuple[int, ...]]:
        accepted_at = [0] * drafts
        shares = []
        for active in self._active:
            accepted = 0
            while accepted < drafts and self._random.random() < 0.7:
                accepted_at[accepted] += 1
                accepted += 1
            active.emitted += accepted + 1
            active.drafted += drafts
            active.accepted += accepted
            active.first_ns = active.first_ns or end
            active.tokens[lane] += accepted + 1
            active.steps[lane] += 1
            shares.append(SeqShare(active.request_id, drafts, accepted, accepted + 1))
        return tuple(shares), (len(shares),) * drafts, tuple(accepted_at)

    def _gate(self, lane: str, now: int, width: int) -> GateRecord:
        window, probing = self._step // 16, self._step % 256 < 16
        arms = (
            ("mtp", 120.0 + window % 7 * 1.3, 3.2, self._step % 16, False),
            ("plain", 100.0 + self._step // 256 % 5, 2.0, self._step % 1024, False),
        )
        return GateRecord(
            self._step, now, "mtp", lane, "probe" if probing else "hold", arms, 6.0, 0, 100 + self._step % 400,
            1 << max(0, width - 1).bit_length(), 256 - self._step % 256,
        )  # fmt: skip

    def _retire(self, out: list[AnyRecord]) -> None:
        for active in [active for active in self._active if active.emitted >= active.wanted]:
            self._active.remove(active)
            out.append(
                RequestRecord(
                    active.request_id, "chat", "", "", "", active.arrived_ns, active.arrived_ns + 1_000_000,
                    active.first_ns, self._now, "stop", "", active.prompt, 0, active.emitted, active.drafted,
                    active.accepted, 1, 0, dict(active.tokens), dict(active.steps), 0.7, 1.0, 0, 512, 42,
                    prefill_end_ns=active.first_ns,
                )
            )  # fmt: skip
