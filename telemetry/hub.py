"""Live aggregates for the screens: constant work per record, and a window of its own for every subscriber."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from telemetry.baseline import PlainBaseline
from telemetry.batch import Batch, merge
from telemetry.folding import RequestPart, lane_totals, request_parts
from telemetry.live import (
    Arm,
    GateState,
    LaneTotals,
    LiveRequest,
    Percentiles,
    Window,
    percentiles,
)
from telemetry.metrics import Labels, RequestHistograms
from telemetry.names import SUCCEEDED
from telemetry.record import GateRecord, HealthRecord, LeverRecord, RequestRecord, RunRecord, ShadowRecord
from telemetry.schema import DECODE

__all__ = ["Hub", "LaneTotals", "LiveRequest", "Percentiles", "Subscription", "Window", "percentiles"]

QUANTILE_WINDOW_NS = 60_000_000_000
_SAMPLES = 8192
_RUNNING = 4096
_FINISHED = 64
_HEALTH = 60
_LEVERS = 256
_WAITING_RECORDS, _WAITING_BATCHES = 4096, 64
"""What is put is summed once so much waits, at 10 batches a second every 6.4 s, or when somebody looks."""

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class _Step:
    """What the screens show of one step."""

    tick: int
    lane: str
    width: int
    refusals: tuple[tuple[str, str], ...]
    kv_used: int
    kv_total: int


def _step_at(batch: Batch, at: int) -> _Step:
    steps = {name: values[at].item() for name, values in batch.table("steps").items()}
    return _Step(
        steps["tick"], batch.words[steps["lane"]], steps["width"], batch.refusal_sets[steps["refusals"]],
        steps["kv_used"], steps["kv_total"],
    )  # fmt: skip


class Hub:
    """Fed with every record in order; read by any number of subscribers."""

    def __init__(self, clock_ns: Clock = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.RLock()
        self._waiting: list[Batch] = []
        self._waiting_records = 0
        """Held while a batch is taken; a reader that wants several values of one moment takes it too."""
        self.lost: dict[str, int] = {}
        """Dropped since the owner began, by kind."""
        self._reset(0)

    def _reset(self, offset_ns: int) -> None:
        self.run: RunRecord | None = None
        self._offset_ns = offset_ns
        self.lanes: dict[str, LaneTotals] = {}
        self._steps: _Step | None = None
        self._decode: _Step | None = None
        self._gate: GateRecord | None = None
        self.switches = 0
        self._gate_mode = ""
        self.cached_tokens = 0
        self.requests_by_reason: Counter[str] = Counter()
        self.tokens_in = 0
        self.tokens_out = 0
        self.gate_decisions: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.preemptions = 0
        self.shadow_rows = 0
        self.shadow_differing = 0
        self._running: dict[str, LiveRequest] = {}
        self._finished: deque[LiveRequest] = deque(maxlen=_FINISHED)
        self._latencies: deque[tuple[int, float | None, float | None]] = deque(maxlen=_SAMPLES)
        self._health: deque[HealthRecord] = deque(maxlen=_HEALTH)
        self.levers: deque[LeverRecord] = deque(maxlen=_LEVERS)
        self.baseline = PlainBaseline()
        self.histograms = RequestHistograms()

    @property
    def guard(self) -> AbstractContextManager[None]:
        """The lock; who holds it finds everything summed that was put before."""
        return self._settled()

    @contextmanager
    def _settled(self) -> Iterator[None]:
        with self._lock:
            self._settle()
            yield

    # ---- writing ----------------------------------------------------------------------------------------------

    def update(self, batches: Iterable[Batch]) -> None:
        """Take batches, oldest first."""
        with self._lock:
            self.put(batches)
            self._settle()

    def put(self, batches: Iterable[Batch]) -> None:
        """The same, summed when somebody looks or enough waits: a small batch costs nearly what a large one does."""
        with self._lock:
            for batch in batches:
                self._waiting.append(batch)
                self._waiting_records += len(batch)
            if self._waiting_records >= _WAITING_RECORDS or len(self._waiting) >= _WAITING_BATCHES:
                self._settle()

    def _settle(self) -> None:
        """Sum what waits; call with the lock held."""
        waiting, self._waiting, self._waiting_records = self._waiting, [], 0
        while waiting:
            ends = next((at for at, batch in enumerate(waiting) if at and batch.run is not None), len(waiting))
            self._take(merge(waiting[:ends]))
            waiting = waiting[ends:]

    def _take(self, batch: Batch) -> None:
        if batch.run is not None:
            self._run(batch.run)
        if batch.rows("steps"):
            self._take_steps(batch)
        if batch.rows("gates"):
            self._take_gates(batch)
        for record in batch.others:
            handler = _HANDLERS.get(type(record))
            if handler is not None:
                handler(self, record)

    def announce(self, request_id: str, prompt_tokens: int = 0, conversation_id: str = "") -> None:
        """A request was accepted; it shows as waiting until its first step."""
        with self.guard:
            self._make_room()
            self._running[request_id] = LiveRequest(request_id, self._clock_ns() / 1e9, prompt_tokens, conversation_id)

    def forget(self, request_id: str) -> None:
        """A request ended of which no record will come (refused, or the engine is gone)."""
        with self.guard:
            self._running.pop(request_id, None)

    def set_lost(self, lost: Mapping[str, int]) -> None:
        """What was dropped so far, by kind, as its owners count it."""
        with self._lock:
            self.lost = dict(lost)

    def _run(self, record: RunRecord) -> None:
        self._reset(record.unix_ns - record.clock_ns)
        self.run = record

    def _take_steps(self, batch: Batch) -> None:
        steps = batch.table("steps")
        for name, totals in lane_totals(batch).items():
            self.lanes.setdefault(name, LaneTotals()).add(totals)
            self.preemptions += totals.steps if name == "preempt" else 0
        self.tokens_out += int(steps["emitted"].sum())
        self.tokens_in += int(steps["prefill_tokens"].sum())
        self.cached_tokens += int(steps["cached_tokens"].sum())
        self._steps = _step_at(batch, -1)
        decoded = np.array([word in DECODE for word in batch.words], np.bool_)[steps["lane"]]
        if decoded.any():
            self._decode = _step_at(batch, int(np.flatnonzero(decoded)[-1]))
        counts = np.bincount(steps["refusals"][decoded], minlength=len(batch.refusal_sets)).tolist()
        for refused, count in zip(batch.refusal_sets, counts, strict=True):
            if count:
                self.refusals.update(dict.fromkeys(refused, count))
        for part in request_parts(batch, self.baseline.steps(batch, decoded)):
            self._take_part(part)

    def _take_part(self, part: RequestPart) -> None:
        request = self._running.get(part.request_id)
        if request is None:
            self._make_room()
            arrived = (part.started + self._offset_ns) / 1e9
            request = self._running[part.request_id] = LiveRequest(part.request_id, arrived)
        request.last_ns = part.ended
        request.prefilled += part.prefilled
        if part.emitted:
            if not request.first_token_ns:
                request.first_token_ns = part.first_token
                request.ttft_ms = max(0.0, (part.first_token + self._offset_ns) / 1e6 - request.arrived * 1e3)
            request.state = "active"
            request.lane = part.lane
            request.output_tokens += part.emitted
            request.drafted += part.drafted
            request.accepted += part.accepted
            request.decode_ns += int(part.decode_ns)
            request.plain_ns += part.plain_ns
        elif request.state == "waiting":
            request.state = "prefilling"

    def _take_gates(self, batch: Batch) -> None:
        gates = batch.table("gates")
        modes = [batch.words[code] for code in gates["mode"][np.flatnonzero(np.diff(gates["mode"], prepend=-1))]]
        self.switches += sum(before != mode for before, mode in pairwise([self._gate_mode or modes[0], *modes]))
        self._gate_mode = modes[-1]
        pairs, counts = np.unique(np.stack([gates["arm"], gates["reason"]]), axis=1, return_counts=True)
        for arm, reason, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            self.gate_decisions[batch.words[arm], batch.words[reason]] += count
        (self._gate,) = batch.gate_records(last=1)
        self.baseline.gate(self._gate)

    def _request(self, record: RequestRecord) -> None:
        request = self._running.pop(record.request_id, None)
        if request is None:
            request = LiveRequest(record.request_id, (record.arrived_ns + self._offset_ns) / 1e9)
        request.arrived = (record.arrived_ns + self._offset_ns) / 1e9
        request.state, request.reason = "finished", record.reason
        request.prompt_tokens, request.output_tokens = record.prompt_tokens, record.output_tokens
        request.drafted, request.accepted = record.drafted, record.accepted
        request.conversation_id = record.conversation_id
        request.first_token_ns, request.last_ns = record.first_token_ns, record.finished_ns
        first = record.first_token_ns
        request.ttft_ms = (first - record.arrived_ns) / 1e6 if first else None
        more = record.output_tokens - 1
        tpot_ms = (record.finished_ns - first) / 1e6 / more if first and more > 0 else None
        self._latencies.append((record.finished_ns, request.ttft_ms, tpot_ms))
        self._observe(record, request.ttft_ms, tpot_ms)
        self._finished.append(request)
        self.requests_by_reason[record.reason] += 1

    def _observe(self, record: RequestRecord, ttft_ms: float | None, tpot_ms: float | None) -> None:
        labels: Labels = (
            ("gen_ai_operation_name", record.operation),
            ("gen_ai_provider_name", "metrale"),
            ("gen_ai_request_model", self.run.model if self.run else ""),
        )
        failed = record.reason not in SUCCEEDED
        whole = (*labels, ("error_type", record.reason)) if failed else labels
        self.histograms.duration.observe(whole, (record.finished_ns - record.arrived_ns) / 1e9)
        if ttft_ms is not None:
            self.histograms.ttft.observe(labels, ttft_ms / 1e3)
        if tpot_ms is not None:
            self.histograms.tpot.observe(labels, tpot_ms / 1e3)

    def _health_record(self, record: HealthRecord) -> None:
        self._health.append(record)

    def _lever(self, record: LeverRecord) -> None:
        self.levers.append(record)

    def _shadow(self, record: ShadowRecord) -> None:
        self.shadow_rows += record.rows
        self.shadow_differing += record.differing

    def _make_room(self) -> None:
        """A request whose end was lost must not stay for ever."""
        if len(self._running) >= _RUNNING:
            oldest = min(self._running.values(), key=lambda request: request.last_ns)
            del self._running[oldest.request_id]

    # ---- reading ----------------------------------------------------------------------------------------------

    def subscribe(self) -> Subscription:
        """A cursor whose windows begin now."""
        return Subscription(self)

    def gate(self) -> GateState | None:
        """The last decision; None before the first."""
        with self.guard:
            record = self._gate
            if record is None:
                return None
            arms = tuple(
                Arm(name, speed if speed >= 0 else None, deviation if deviation >= 0 else None, age, stale)
                for name, speed, deviation, age, stale in record.arms
            )
            return GateState(
                self.unix_s(record.time_ns), record.mode, record.arm, record.reason, arms, record.margin,
                record.losses, record.depth, record.width_bucket, record.tokens_until_probe, record.pinned,
                self.switches,
            )  # fmt: skip

    def requests(self) -> tuple[LiveRequest, ...]:
        """Running requests, then those that ended last, newest first."""
        with self.guard:
            live = (*self._running.values(), *reversed(self._finished))
            return tuple(replace(request) for request in live)

    def running(self) -> tuple[LiveRequest, ...]:
        """Requests that have not ended."""
        with self.guard:
            return tuple(self._running.values())

    def kv(self) -> tuple[int, int]:
        """Blocks in use, and blocks of the pool, as of the last step."""
        with self.guard:
            last = self._steps
        return (last.kv_used, last.kv_total) if last else (0, 0)

    def request(self, request_id: str) -> LiveRequest | None:
        """A running or just finished request."""
        with self.guard:
            found = self._running.get(request_id)
            if found is None:
                found = next((done for done in reversed(self._finished) if done.request_id == request_id), None)
            return replace(found) if found else None

    def latencies(self) -> tuple[Percentiles, Percentiles]:
        """TTFT and time per output token of the last 60 s."""
        oldest = self._clock_ns() - self._offset_ns - QUANTILE_WINDOW_NS
        with self.guard:
            while self._latencies and self._latencies[0][0] < oldest:
                self._latencies.popleft()
            samples = tuple(self._latencies)
        return percentiles([ttft for _, ttft, _ in samples]), percentiles([tpot for _, _, tpot in samples])

    def telemetry_cost(self) -> float:
        with self.guard:
            ticks = sum(health.tick_ns for health in self._health)
            return sum(health.recording_ns for health in self._health) / ticks if ticks else 0.0

    def health(self) -> HealthRecord | None:
        with self.guard:
            return self._health[-1] if self._health else None

    @property
    def now_s(self) -> float:
        """Unix seconds of now; of a replay, at its position."""
        return self._clock_ns() / 1e9

    def unix_s(self, clock_ns: int) -> float:
        """Unix seconds of a time of the engine's clock."""
        return (clock_ns + self._offset_ns) / 1e9

    def _window(self, before: dict[str, LaneTotals], since_ns: int, now_ns: int) -> Window:
        lanes = {
            name: delta
            for name, totals in self.lanes.items()
            if (delta := totals.since(before.get(name, _NOTHING))).steps
        }
        elapsed = max(1e-9, (now_ns - since_ns) / 1e9)
        last, decode = self._steps, self._decode
        ttft, tpot = self.latencies()
        return Window(
            time=now_ns / 1e9,
            window_s=elapsed,
            tick=last.tick if last else 0,
            lanes=lanes,
            tokens_per_s=sum(lane.tokens for lane in lanes.values()) / elapsed,
            prefill_tokens_per_s=sum(lane.prefill_tokens for lane in lanes.values()) / elapsed,
            ttft=ttft,
            tpot=tpot,
            lane=decode.lane if decode else "",
            refusals=dict(decode.refusals) if decode else {},
            kv_used=last.kv_used if last else 0,
            kv_total=last.kv_total if last else 0,
            cached_tokens=self.cached_tokens,
            total_tokens=self.tokens_out,
            total_requests=self.requests_by_reason.total(),
            lost={kind: count for kind, count in self.lost.items() if count},
            telemetry_cost=self.telemetry_cost(),
            plain_tokens_per_s=self.baseline.tokens_per_s(decode.width if decode else 1),
            width_bucket=1 << max(0, (decode.width if decode else 1) - 1).bit_length(),
        )


class Subscription:
    """One reader's place; reading twice never counts a step twice, and a slow reader loses nothing."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        with hub.guard:
            self._run = hub.run
            self._before = {name: totals.copy() for name, totals in hub.lanes.items()}
            self._since_ns = hub._clock_ns()

    def read(self) -> Window:
        """The window since the last read; a new run begins a new window."""
        hub = self._hub
        with hub.guard:
            now_ns = hub._clock_ns()
            if hub.run is not self._run:
                self._run, self._before = hub.run, {}
            window = hub._window(self._before, self._since_ns, now_ns)
            for name in window.lanes:
                self._before[name] = hub.lanes[name].copy()
            self._since_ns = now_ns
        return window


_NOTHING = LaneTotals()


_HANDLERS: dict[type, Callable[[Hub, Any], None]] = {
    RunRecord: Hub._run,
    RequestRecord: Hub._request,
    HealthRecord: Hub._health_record,
    LeverRecord: Hub._lever,
    ShadowRecord: Hub._shadow,
}
