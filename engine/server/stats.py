"""Frames of numbers, built from the aggregates of telemetry: the same for a live run and for a recorded one."""

from __future__ import annotations

from engine.protocol import wire
from engine.protocol.events import Snapshot
from telemetry.hub import Hub, LaneTotals, Percentiles, Window

EMPTY = Snapshot(
    tick=0, waiting=0, prefilling=0, active=0, swapped=0, preempted=0, kv_used_blocks=0, kv_total_blocks=0,
    cached_blocks=0, lane="",
)  # fmt: skip


def stats_of(
    window: Window,
    state: Snapshot,
    *,
    block_size: int,
    database: str = "ok",
    skipped: int = 0,
    run: str = "",
    position: float = 0.0,
) -> wire.Stats:
    """One window and the state after it; `run` and `position` mark a replay."""
    return wire.Stats(
        time=window.time,
        window_s=window.window_s,
        tick=max(state.tick, window.tick),
        tokens_per_s=window.tokens_per_s,
        prefill_tokens_per_s=window.prefill_tokens_per_s,
        lanes={name: _lane(totals) for name, totals in window.lanes.items()},
        ttft=_quantiles(window.ttft),
        tpot=_quantiles(window.tpot),
        waiting=state.waiting,
        prefilling=state.prefilling,
        active=state.active,
        swapped=state.swapped,
        preempted=state.preempted,
        kv_used_tokens=state.kv_used_blocks * block_size,
        kv_total_tokens=state.kv_total_blocks * block_size,
        cached_tokens=state.cached_blocks * block_size,
        lane=state.lane,
        refusals=state.refusals,
        total_tokens=window.total_tokens,
        total_requests=window.total_requests,
        lost=window.lost,
        telemetry_cost=window.telemetry_cost,
        database=database,
        skipped=skipped,
        plain_tokens_per_s=window.plain_tokens_per_s,
        replay_run=run,
        replay_position=position,
    )


def state_of(window: Window, hub: Hub) -> Snapshot:
    """The state that a recorded run shows, where no engine is there to ask."""
    states = [request.state for request in hub.requests()]
    return Snapshot(
        tick=window.tick,
        waiting=states.count("waiting"),
        prefilling=states.count("prefilling"),
        active=states.count("active"),
        swapped=0,
        preempted=0,
        kv_used_blocks=window.kv_used,
        kv_total_blocks=window.kv_total,
        cached_blocks=0,
        lane=window.lane,
        refusals=window.refusals,
    )


def gate_of(hub: Hub) -> wire.GateView | None:
    """The last decision; None before the first."""
    gate = hub.gate()
    if gate is None:
        return None
    return wire.GateView(
        time=gate.time,
        mode=gate.mode,
        arm=gate.arm,
        reason=gate.reason,
        arms=tuple(
            wire.ArmView(
                name=arm.name,
                tokens_per_s=arm.tokens_per_s,
                deviation=arm.deviation,
                age_tokens=arm.age_tokens,
                stale=arm.stale,
            )
            for arm in gate.arms
        ),
        margin=gate.margin,
        losses=gate.losses,
        depth=gate.depth,
        width_bucket=gate.width_bucket,
        tokens_until_probe=gate.tokens_until_probe,
        switches=gate.switches,
    )


def _lane(totals: LaneTotals) -> wire.LaneStats:
    return wire.LaneStats(
        steps=totals.steps,
        tokens=totals.tokens,
        seconds=totals.seconds,
        drafted=totals.drafted,
        accepted=totals.accepted,
        drafted_at=tuple(totals.drafted_at),
        accepted_at=tuple(totals.accepted_at),
    )


def _quantiles(spread: Percentiles) -> wire.Quantiles:
    return wire.Quantiles(p50=spread.p50, p95=spread.p95, p99=spread.p99, count=spread.count)
