"""Reads the hub and the queues into metrics: what `/metrics` shows and what the table `metrics` samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from telemetry.hub import Hub, LaneTotals
from telemetry.metrics import Labels, Metric
from telemetry.schema import SPECULATIVE

PREFIX = "metrale:"


def hub_metrics(hub: Hub) -> list[Metric]:
    """Everything that the hub knows, as counters and gauges; names follow what serving dashboards already read."""
    with hub.guard:
        return [*_speculation(hub.lanes), *_work(hub), *_decisions(hub), *_state(hub), *_own(hub)]


def gauge(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> Metric:
    return Metric(PREFIX + name, "gauge", text, _values(values, label))


def counter(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> Metric:
    return Metric(PREFIX + name + "_total", "counter", text, _values(values, label))


def _values(values: Mapping[str, float] | float, label: str) -> tuple[tuple[Labels, float], ...]:
    if isinstance(values, Mapping):
        return tuple((((label, key),), value) for key, value in values.items())
    return (((), values),)


def _speculation(lanes: Mapping[str, LaneTotals]) -> Iterable[Metric]:
    drafting = [totals for lane, totals in lanes.items() if lane in SPECULATIVE]
    positions = max((len(totals.accepted_at) for totals in drafting), default=0)
    accepted_at = {
        str(at): float(sum(totals.accepted_at[at] for totals in drafting if at < len(totals.accepted_at)))
        for at in range(positions)
    }
    drafts = sum(totals.drafted_at[0] for totals in drafting if totals.drafted_at)
    yield counter("spec_decode_num_drafts", "Times that a sequence was drafted for.", drafts)
    yield counter("spec_decode_num_draft_tokens", "Drafted tokens.", sum(totals.drafted for totals in drafting))
    yield counter("spec_decode_num_accepted_tokens", "Drafts accepted.", sum(totals.accepted for totals in drafting))
    yield counter(
        "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position from 0.", accepted_at, "position"
    )


def _work(hub: Hub) -> Iterable[Metric]:
    lanes = hub.lanes
    yield counter("steps", "Steps by lane.", {lane: totals.steps for lane, totals in lanes.items()}, "lane")
    tokens = {lane: totals.tokens for lane, totals in lanes.items()}
    yield counter("lane_tokens", "Tokens emitted, by the lane that produced them.", tokens, "lane")
    seconds = {lane: totals.seconds for lane, totals in lanes.items()}
    yield counter("lane_seconds", "Time spent in steps, by lane.", seconds, "lane")
    yield counter("generation_tokens", "Tokens emitted.", hub.tokens_out)
    yield counter("prompt_tokens", "Prompt tokens fed.", hub.tokens_in)
    yield counter("prefix_cache_hit_tokens", "Prompt tokens that came from the prefix cache.", hub.cached_tokens)
    yield counter("preemptions", "Sequences preempted.", hub.preemptions)
    yield counter("request_success", "Requests ended, by reason.", hub.requests_by_reason, "finished_reason")


def _decisions(hub: Hub) -> Iterable[Metric]:
    decisions = tuple(
        ((("arm", arm), ("reason", reason)), float(count)) for (arm, reason), count in hub.gate_decisions.items()
    )
    yield Metric(PREFIX + "gate_decisions_total", "counter", "Decisions of the gate, by arm and reason.", decisions)
    yield counter("gate_switches", "Times that the gate changed its mode.", hub.switches)
    refusals = tuple(
        ((("lane", lane), ("reason", reason)), float(count)) for (lane, reason), count in hub.refusals.items()
    )
    yield Metric(PREFIX + "lane_refusals_total", "counter", "Steps on which a lane was refused, and why.", refusals)
    gate = hub.gate()
    if gate is not None:
        speeds = {arm.name: arm.tokens_per_s for arm in gate.arms if arm.tokens_per_s is not None}
        yield gauge("gate_arm_tokens_per_second", "What the gate measured of an arm.", speeds, "arm")
    plain = {str(width): speed for width, speed in hub.baseline.by_width().items()}
    yield gauge("plain_tokens_per_second", "Measured plain decoding, by width bucket.", plain, "width_bucket")
    yield counter("shadow_rows", "Verify rows that were re-run one by one.", hub.shadow_rows)
    yield counter("shadow_differing_rows", "Re-run rows that gave another token.", hub.shadow_differing)


def _state(hub: Hub) -> Iterable[Metric]:
    states = {"running": 0, "waiting": 0}
    for request in hub.running():
        states["running" if request.state in ("active", "prefilling") else "waiting"] += 1
    yield gauge("num_requests_running", "Requests in prefill or decode.", states["running"])
    yield gauge("num_requests_waiting", "Requests that wait for admission.", states["waiting"])
    used, total = hub.kv()
    yield gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used / total if total else 0.0)
    yield gauge("kv_blocks_used", "KV blocks in use.", used)
    yield gauge("kv_blocks_total", "KV blocks of the pool.", total)


def _own(hub: Hub) -> Iterable[Metric]:
    yield counter("telemetry_lost", "Telemetry dropped, by kind.", hub.lost, "kind")
    yield gauge("telemetry_cost_ratio", "Share of tick time that recording took.", hub.telemetry_cost())
    health = hub.health()
    if health is not None:
        yield gauge("engine_resident_bytes", "Resident memory of the engine process.", health.resident_bytes)
