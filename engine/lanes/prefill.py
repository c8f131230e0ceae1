"""Prompts: begun in order, advanced in chunks, and fused with the decode rows of those who already chat."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.device import Sampled, Segment, StepKind
from engine.core.sequence import Sequence, Status
from engine.core.state import EngineState, Flow
from engine.core.value import StepValue
from engine.lanes.emit import commit
from engine.lanes.finish import remember_prefix
from engine.lanes.park import make_room
from engine.lanes.pipeline import settle
from engine.lanes.run import decode_segment, prompt_segment, run
from engine.lanes.trace import NOTHING, Timing, Work, record_step
from telemetry.names import Lane, Refusal

SLAI_SHARE = 0.8


class Chunk(StepValue, frozen=True):
    seq: Sequence
    count: int


def start_prefills(engine: EngineState) -> Flow:
    """Begin the prompts whose turn comes in this tick: what the prefix cache knows of them is taken, not computed."""
    if engine.queues.prefilling and not _must_wait(engine):
        budget = _budget(engine)
        for seq in engine.queues.prefilling:
            if budget <= 0:
                break
            if not seq.blocks and not seq.tokens:
                _reuse_prefix(engine, seq)
            budget -= seq.unfed
    return Flow.PROCEED


def continue_prefills(engine: EngineState) -> Flow:
    """Advance prompts by one step of at most `max_prefill_tokens`, mixed with decode rows when there are any: such a
    step was everybody's decode step, so it drops the lanes after it."""
    if not engine.queues.prefilling or _must_wait(engine):
        return Flow.PROCEED
    settle(engine)
    chunks = _plan_chunks(engine)
    if not chunks:
        return Flow.PROCEED
    decoding = _decoding(engine) if engine.ctx.levers.flag("always_mixed") else []
    did_mixed_step = bool(decoding)
    _step(engine, [chunk for chunk in chunks if chunk.seq.status is Status.PREFILLING], decoding)
    return Flow.SKIP_REST if did_mixed_step else Flow.PROCEED


def _step(engine: EngineState, chunks: list[Chunk], decoding: list[Sequence]) -> None:
    """One forward over prompt chunks and one plain token of every active sequence."""
    step, started = engine.next_step(), engine.ctx.clock.now_ns()
    lane = Lane.MIXED if decoding else Lane.PREFILL
    segments = [decode_segment(engine, seq) for seq in decoding]
    segments += [prompt_segment(engine, chunk.seq, chunk.count) for chunk in chunks]
    seqs = [*decoding, *(chunk.seq for chunk in chunks)]
    kind = StepKind.MIXED if decoding else StepKind.PREFILL
    result = run(engine, step, kind, segments, seqs)
    if result is None:
        return
    returned = engine.ctx.clock.now_ns()
    cached = sum(chunk.seq.account.cached_tokens for chunk in chunks if not chunk.seq.account.prefill_chunks)
    work = [
        Work(seq, commit(engine, seq, result.sampled[at], lane, step), len(seq.tokens))
        for at, seq in enumerate(decoding)
    ]
    for at, chunk in enumerate(chunks, len(decoding)):
        work.append(_advance(engine, chunk, segments[at].tokens, result.sampled[at], lane, step))
    if decoding:
        engine.refusals = tuple((other, Refusal.MIXED_STEP) for other in _DECODE_LANES)
    rows = sum(len(segment.tokens) for segment in segments)
    timing = Timing(started, started, returned, result.device_us)
    record_step(
        engine, lane, step, timing, work, rows=rows, width=len(decoding), cached_tokens=cached, decoded=bool(decoding)
    )
    _tell_pacer(engine, segments[len(decoding) :], returned - started, is_mixed=bool(decoding))


def _tell_pacer(engine: EngineState, prompts: Seq[Segment], wall_ns: int, *, is_mixed: bool) -> None:
    rows = sum(len(segment.tokens) for segment in prompts)
    positions = sum(len(segment.tokens) * (segment.start + len(segment.tokens) / 2) for segment in prompts)
    engine.pacer.note_prefill(wall_ns, rows, positions / rows, is_mixed)


def _advance(
    engine: EngineState, chunk: Chunk, fed: tuple[int, ...], sampled: Seq[Sampled], lane: str, step: int
) -> Work:
    """Note what a chunk fed; a prompt that ends emits its first token and joins those in decode."""
    seq = chunk.seq
    seq.tokens.extend(fed)
    seq.account.prefill_chunks += 1
    committed = NOTHING
    if seq.unfed == 0:
        seq.times.prefilled = seq.times.prefilled or engine.ctx.clock.now_ns()
        engine.queues.prefilling.remove(seq)
        engine.queues.active.append(seq)
        seq.status = Status.ACTIVE
        remember_prefix(engine, seq)
        if sampled:
            committed = commit(engine, seq, sampled, lane, step, first_row_fed=False)
    return Work(seq, committed, len(seq.tokens), chunk.count)


def _plan_chunks(engine: EngineState) -> list[Chunk]:
    """The prompt rows of this tick in order of seating, each with room made for it."""
    budget, chunks = _budget(engine), []
    for seq in list(engine.queues.prefilling):
        count = min(budget, seq.unfed)
        if count <= 0:
            break
        if seq.status is Status.PREFILLING and not seq.is_finished and make_room(engine, seq, seq.seq_len + count):
            chunks.append(Chunk(seq, count))
            budget -= count
    return chunks


def _decoding(engine: EngineState) -> list[Sequence]:
    """Active sequences with room for one more token; making it may park some of them."""
    for seq in list(engine.queues.active):
        if seq.status is Status.ACTIVE and not seq.is_finished:
            make_room(engine, seq, seq.seq_len + 1)
    return [seq for seq in engine.queues.active if not seq.is_finished]


def _budget(engine: EngineState) -> int:
    """Prompt rows that this tick may feed."""
    levers, active = engine.ctx.levers, len(engine.queues.active)
    chunk = min(levers.int("max_prefill_tokens"), engine.row_limit - active)
    if not active or not levers.flag("always_mixed"):
        return chunk
    cap = levers.int("mixed_slice_tokens")
    if cap < 0:
        return engine.pacer.slice(chunk, engine.queues.prefilling[0].seq_len)
    return min(chunk, cap) if cap else chunk


def _must_wait(engine: EngineState) -> bool:
    """With `slai`: some active sequence has nearly waited its deadline for the next token."""
    levers = engine.ctx.levers
    if levers.text("policy") != "slai" or not engine.queues.active:
        return False
    patience = levers.int("tbt_deadline_ms") * 1_000_000 * SLAI_SHARE
    now = engine.ctx.clock.now_ns()
    return any(now - seq.times.last_token >= patience for seq in engine.queues.active)


def _reuse_prefix(engine: EngineState, seq: Sequence) -> None:
    """Take the whole blocks that an earlier prompt left. At least one token is always fed: one to be sampled from, or,
    when a preempted sequence comes back, the step that makes it active again."""
    if not engine.ctx.levers.flag("prefix_cache"):
        return
    seq.blocks = engine.pool.match(seq.feed[:-1])
    held = len(seq.blocks) * engine.pool.block_size
    seq.tokens = list(seq.feed[:held])
    if seq.last_token is None:
        seq.account.cached_tokens = held


_DECODE_LANES = (Lane.NGRAM, Lane.SELF_SPEC, Lane.MTP, Lane.DFLASH, Lane.PIPELINED, Lane.PLAIN)
