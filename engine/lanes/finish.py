"""How a request ends: exactly once, with a reason, a record and everything it held given back."""

from __future__ import annotations

from engine.core.sequence import Sequence, Status
from engine.core.state import EngineState
from engine.protocol.events import Finished, Usage
from telemetry.names import Finish
from telemetry.record import RequestRecord

IDLE_TOKENS_ON_CPU = 16_384
"""What `prefix_cache_tokens=auto` keeps where memory is taken as it is written: eight chats of 2,048 tokens. Default
model: 377 MB, where an afternoon of chats would fill the 3 GB of the pool."""


def finish(engine: EngineState, seq: Sequence, reason: Finish, error: str = "") -> None:
    """Mark a sequence as ended; the tick's retirement does the rest. A second call changes nothing."""
    if not seq.is_finished:
        seq.finish, seq.error = reason, error
        seq.times.finished = engine.ctx.clock.now_ns()
        engine.queues.ended.append(seq)


def retire(engine: EngineState) -> None:
    """Tell the client, keep the KV for later prompts, give blocks and seat back. Never skipped."""
    ended = engine.queues.ended
    if not ended:
        return
    for seq in ended:
        engine.queues.remove(seq)
        remember_prefix(engine, seq)
        engine.pool.release(seq.blocks)
        seq.blocks = []
        if seq.status is not Status.WAITING:
            engine.ctx.device.release(seq.number)
        seq.status = Status.FINISHED
        _report(engine, seq)
    ended.clear()
    engine.pool.trim(_most_idle(engine))
    for slot, seq in enumerate(engine.queues.active):
        seq.slot = slot
    for slot, seq in enumerate(engine.queues.prefilling, len(engine.queues.active)):
        seq.slot = slot


def remember_prefix(engine: EngineState, seq: Sequence) -> None:
    """Offer the whole blocks that a sequence has filled to the prefix cache."""
    if engine.ctx.levers.flag("prefix_cache") and seq.blocks:
        known, digest = seq.remembered
        whole = seq.seq_len // engine.pool.block_size
        if whole > known:
            seq.remembered = (whole, engine.pool.remember(seq.tokens, seq.blocks, digest, known))


def _most_idle(engine: EngineState) -> int:
    """Blocks that may keep content without a holder."""
    tokens, facts = engine.ctx.levers.int("prefix_cache_tokens"), engine.ctx.device.facts
    if tokens < 0:
        tokens = IDLE_TOKENS_ON_CPU if facts.kind == "cpu" else facts.num_blocks * facts.block_size
    return engine.pool.blocks_for(tokens)


def usage(seq: Sequence) -> Usage:
    times, account = seq.times, seq.account
    ended = times.finished
    admitted = times.admitted or ended
    prefilled = times.prefilled or ended
    return Usage(
        prompt_tokens=len(seq.request.prompt),
        cached_tokens=account.cached_tokens,
        output_tokens=len(seq.emitted),
        drafted=account.drafted,
        accepted=account.accepted,
        queue_us=(admitted - times.arrived) // 1000,
        prefill_us=(prefilled - admitted) // 1000,
        decode_us=(ended - prefilled) // 1000,
        ttft_us=(times.first_token - times.arrived) // 1000 if times.first_token else 0,
        tokens_by_lane=dict(account.tokens_by_lane),
        steps_by_lane=dict(account.steps_by_lane),
        preemptions=account.preemptions,
        seed=seq.seed,
    )


def _report(engine: EngineState, seq: Sequence) -> None:
    ctx = engine.ctx
    reason = seq.finish or Finish.ERROR
    ctx.outbox.send(
        Finished(request_id=seq.request_id, reason=reason, usage=usage(seq), error=seq.error, tail=seq.text.finish())
    )
    if ctx.levers.trace_level >= 1:
        ctx.telemetry.append(_record(seq, reason))


def _record(seq: Sequence, reason: Finish) -> RequestRecord:
    request, times, account = seq.request, seq.times, seq.account
    return RequestRecord(
        request_id=seq.request_id,
        operation=request.operation,
        conversation_id=request.conversation_id,
        trace_id=request.trace.trace_id,
        parent_span_id=request.trace.parent_span_id,
        sampled=request.trace.sampled,
        arrived_ns=times.arrived,
        admitted_ns=times.admitted,
        prefill_end_ns=times.prefilled,
        first_token_ns=times.first_token,
        finished_ns=times.finished,
        reason=reason,
        error=seq.error,
        prompt_tokens=len(request.prompt),
        cached_tokens=account.cached_tokens,
        output_tokens=len(seq.emitted),
        drafted=account.drafted,
        accepted=account.accepted,
        prefill_chunks=account.prefill_chunks,
        preemptions=account.preemptions,
        tokens_by_lane=dict(account.tokens_by_lane),
        steps_by_lane=dict(account.steps_by_lane),
        temperature=seq.base_plan.temperature,
        top_p=seq.base_plan.top_p,
        top_k=seq.base_plan.top_k,
        max_tokens=seq.max_tokens,
        seed=seq.seed,
    )
