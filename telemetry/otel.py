"""From records to OpenTelemetry SDK spans with the recorded times; ids follow from run, request and step."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes

from telemetry.names import SUCCEEDED
from telemetry.record import (
    AnyRecord,
    GateRecord,
    LeverRecord,
    LoadRecord,
    RequestRecord,
    RunRecord,
    StepRecord,
)
from telemetry.rows import derived_ids, request_ids, span_base_of_run, trace_id_of_run

PROVIDER = "metrale"
_ANNOUNCED = 65_536
_SAMPLED, _UNSAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_UNSET = Status()
_SCOPE = InstrumentationScope("metrale")

# the seventh hex digit of a span id in the run's trace tells what it is; nine digits of a number follow
RUN, STEP, GATE = "1", "5", "6"


def span_id(base: str, kind: str, number: int) -> str:
    """16 hex digits; `spans` of the database composes the same ones."""
    return f"{base}{kind}{number & 0xFFFFFFFFF:09x}"


class SpanFactory:
    """Makes the spans of one engine run."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.resource = resource_of(run)
        self._offset_ns = run.unix_ns - run.clock_ns
        self._trace = int(trace_id_of_run(run.run_id), 16)
        self._base = span_base_of_run(run.run_id)
        self._root = self._own(span_id(self._base, RUN, 0))
        self._traces: OrderedDict[str, str] = OrderedDict()

    def announce(self, request_id: str, trace_id: str) -> None:
        """The caller's trace of a request, known before its record comes: steps link to it."""
        if trace_id:
            self._traces[request_id] = trace_id
            while len(self._traces) > _ANNOUNCED:
                self._traces.popitem(last=False)

    def spans(self, record: AnyRecord) -> Iterator[ReadableSpan]:
        """The spans of one record; an unsampled request has none."""
        maker = _MAKERS.get(type(record))
        if maker is not None:
            yield from maker(self, record)

    def run_span(self, end_ns: int) -> ReadableSpan:
        """The root of the engine run's trace; `end_ns` is Unix time."""
        attributes: dict[str, Any] = {"metrale.run_id": self.run.run_id, "metrale.kv_tokens": self.run.kv_tokens}
        return self._span("engine.run", self._root, None, (self.run.unix_ns, end_ns), attributes)

    def _request(self, record: RequestRecord) -> Iterator[ReadableSpan]:
        if not record.sampled:
            return
        trace, root_id = request_ids(self.run.run_id, record)
        root = _context(trace, root_id)
        parent = _context(trace, record.parent_span_id, remote=True) if record.parent_span_id else None
        failed = record.reason not in SUCCEEDED
        status = Status(StatusCode.ERROR, record.error or record.reason) if failed else _UNSET
        whole = self._unix(record.arrived_ns), self._unix(record.finished_ns)
        name = f"{record.operation} {self.run.model}".strip()
        attributes = {
            **_request_attributes(record, self.run.model),
            **({"error.type": record.reason} if failed else {}),
        }
        yield self._span(name, root, parent, whole, attributes, kind=SpanKind.SERVER, status=status)
        for phase, start, end in _phases(record):
            identity = hashlib.sha256(f"{root_id}/{phase}".encode()).hexdigest()[:16]
            chunks: dict[str, Any] = {"metrale.prefill.chunks": record.prefill_chunks} if phase == "prefill" else {}
            yield self._span(phase, _context(trace, identity), root, (self._unix(start), self._unix(end)), chunks)

    def _step(self, record: StepRecord) -> Iterator[ReadableSpan]:
        links = [Link(self._request_context(share.request_id)) for share in record.shares]
        times = self._unix(record.start_ns), self._unix(record.end_ns)
        context = self._own(span_id(self._base, STEP, record.step_id))
        yield self._span(f"lane.{record.lane}", context, self._root, times, step_attributes(record), links=links)

    def _gate(self, record: GateRecord) -> Iterator[ReadableSpan]:
        at = self._unix(record.time_ns)
        context = self._own(span_id(self._base, GATE, record.step_id))
        parent = self._own(span_id(self._base, STEP, record.step_id))
        yield self._span("gate.decision", context, parent, (at, at), gate_attributes(record))

    def _lever(self, record: LeverRecord) -> Iterator[ReadableSpan]:
        at = self._unix(record.time_ns)
        status = Status(StatusCode.ERROR, record.error) if record.error else _UNSET
        attributes = {
            f"metrale.lever.{name}": getattr(record, name)
            for name in ("name", "old", "new", "origin", "actor", "reason", "change_id")
        }
        context = self._own(self._derived(f"lever/{record.change_id}/{record.time_ns}"))
        yield self._span("lever.set", context, self._root, (at, at), {**attributes, "metrale.tick": record.tick},
                         status=status)  # fmt: skip

    def _load(self, record: LoadRecord) -> Iterator[ReadableSpan]:
        times = self._unix(record.start_ns), self._unix(record.end_ns)
        context = self._own(self._derived(f"load/{record.stage}/{record.start_ns}/{record.what}"))
        attributes: dict[str, Any] = {"metrale.load.what": record.what, "metrale.load.bytes": record.bytes}
        yield self._span(f"engine.{record.stage}", context, self._root, times, attributes)

    def _request_context(self, request_id: str) -> SpanContext:
        derived, own = derived_ids(self.run.run_id, request_id)
        return _context(self._traces.get(request_id, derived), own)

    def _derived(self, what: str) -> str:
        return hashlib.sha256(f"{self.run.run_id}/{what}".encode()).hexdigest()[:16]

    def _own(self, identity: str) -> SpanContext:
        return SpanContext(self._trace, int(identity, 16), False, _SAMPLED)

    def _unix(self, clock_ns: int) -> int:
        return clock_ns + self._offset_ns

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[int, int],
        attributes: Attributes,
        *,
        links: Sequence[Link] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = _UNSET,
    ) -> ReadableSpan:
        return ReadableSpan(
            name, context, parent, self.resource, attributes, (), links, kind, None, status,
            times[0], max(times), _SCOPE,
        )  # fmt: skip


def resource_of(run: RunRecord) -> Resource:
    """Service, model, device, versions and the levers at start-up."""
    return Resource(
        {
            "service.name": "metrale",
            "service.instance.id": run.run_id,
            "service.version": run.versions.get("metrale", ""),
            "metrale.model": run.model,
            "metrale.device": run.device,
            "metrale.dtype": run.dtype,
            **{f"metrale.version.{name}": version for name, version in run.versions.items()},
            **{f"metrale.lever.{name}": value for name, value in run.levers.items()},
        }
    )


def _context(trace_id: str, identity: str, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(identity, 16), remote, _SAMPLED)


def _phases(record: RequestRecord) -> Iterator[tuple[str, int, int]]:
    """The phases that the request entered, each as long as it lasted."""
    end = record.finished_ns
    prefilled = record.prefill_end_ns or record.first_token_ns
    yield "queue", record.arrived_ns, record.admitted_ns or end
    if record.admitted_ns:
        yield "prefill", record.admitted_ns, prefilled or end
    if prefilled:
        yield "decode", prefilled, end


def _request_attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    """GenAI conventions first, then what only this engine knows. Drafts never count as output."""
    more = record.output_tokens - 1
    first = record.first_token_ns
    attributes: dict[str, Any] = {
        gen_ai.GEN_AI_OPERATION_NAME: record.operation,
        gen_ai.GEN_AI_PROVIDER_NAME: PROVIDER,
        gen_ai.GEN_AI_REQUEST_MODEL: model,
        gen_ai.GEN_AI_RESPONSE_MODEL: model,
        gen_ai.GEN_AI_RESPONSE_ID: record.request_id,
        gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: (record.reason,),
        gen_ai.GEN_AI_REQUEST_TEMPERATURE: record.temperature,
        gen_ai.GEN_AI_REQUEST_TOP_P: record.top_p,
        gen_ai.GEN_AI_REQUEST_TOP_K: record.top_k,
        gen_ai.GEN_AI_REQUEST_MAX_TOKENS: record.max_tokens,
        gen_ai.GEN_AI_REQUEST_SEED: record.seed,
        gen_ai.GEN_AI_REQUEST_STREAM: record.stream,
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: record.prompt_tokens,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: record.output_tokens,
        gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: record.cached_tokens,
        "metrale.drafted": record.drafted,
        "metrale.accepted": record.accepted,
        "metrale.preemptions": record.preemptions,
        "metrale.prefill.chunks": record.prefill_chunks,
        **{f"metrale.tokens.{lane}": tokens for lane, tokens in record.tokens_by_lane.items()},
        **{f"metrale.steps.{lane}": steps for lane, steps in record.steps_by_lane.items()},
    }
    if record.conversation_id:
        attributes[gen_ai.GEN_AI_CONVERSATION_ID] = record.conversation_id
    if first:
        attributes["metrale.ttft_s"] = (first - record.arrived_ns) / 1e9
        if more > 0:
            attributes["metrale.tpot_s"] = (record.finished_ns - first) / 1e9 / more
    return attributes


_STEP_ATTRIBUTES = (
    "step_id", "tick", "width", "rows", "prefill_tokens", "drafted", "accepted", "bonus", "emitted", "drafted_at",
    "accepted_at", "k", "k_reason", "kv_used", "kv_total", "depth", "draft_us", "device_us", "commit_us",
    "cached_tokens",
)  # fmt: skip


def step_attributes(record: StepRecord) -> dict[str, Any]:
    """The numbers of a lane step, and why the lanes above it were refused."""
    attributes = {f"metrale.{name}": getattr(record, name) for name in _STEP_ATTRIBUTES}
    return {**attributes, **{f"metrale.refused.{lane}": reason for lane, reason in record.refusals}}


def gate_attributes(record: GateRecord) -> dict[str, Any]:
    """What the gate knew and decided; the value of an unmeasured arm is left out."""
    names = (
        "mode", "arm", "reason", "margin", "losses", "depth", "width_bucket", "tokens_until_probe", "pinned",
    )  # fmt: skip
    attributes = {f"metrale.gate.{name}": getattr(record, name) for name in names}
    for name, speed, deviation, age, stale in record.arms:
        if speed >= 0:
            attributes[f"metrale.gate.{name}.tokens_per_s"] = speed
            attributes[f"metrale.gate.{name}.deviation"] = deviation
        attributes[f"metrale.gate.{name}.age_tokens"] = age
        attributes[f"metrale.gate.{name}.stale"] = stale
    return attributes


_MAKERS: dict[type, Callable[[SpanFactory, Any], Iterator[ReadableSpan]]] = {
    RequestRecord: SpanFactory._request,
    StepRecord: SpanFactory._step,
    GateRecord: SpanFactory._gate,
    LeverRecord: SpanFactory._lever,
    LoadRecord: SpanFactory._load,
}
