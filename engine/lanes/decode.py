"""The decode lane: one step for everyone who chats, by the first row of the contract's table that applies.

Drafters come first (n-gram, self-speculation, a draft head behind the gate), then running ahead, then plain. Every
drafter and width goes through one verify: feed the last token and the drafts, keep what the target agrees with.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.device import DeviceError, Draft, DrafterName, Segment, StepKind, StepResult
from engine.core.sequence import Sequence, Status
from engine.core.state import EngineState, Flow
from engine.core.value import StepValue
from engine.lanes import pipeline
from engine.lanes.choice import Choice, Outcome, Router
from engine.lanes.draft import NO_DRAFT, Drafting
from engine.lanes.eligibility import LANE_OF
from engine.lanes.emit import Committed, commit
from engine.lanes.park import make_room, reserve, trim
from engine.lanes.run import decode_segment, fail, run
from engine.lanes.shadow import Shadow
from engine.lanes.trace import Timing, Work, record_step
from telemetry.names import Lane, Refusal


class Drafted(StepValue, frozen=True):
    """The drafts of a step and how they came about."""

    drafts: Seq[Draft]
    lane: Lane
    drafter: DrafterName | None
    k: int = 0
    k_reason: str = ""

    @property
    def any(self) -> bool:
        return any(draft.tokens for draft in self.drafts)


class Decode:
    """The lane with the state that speculation keeps between steps."""

    def __init__(self) -> None:
        self.drafting = Drafting()
        self.router = Router(self.drafting)
        self._shadow = Shadow()

    def __call__(self, engine: EngineState) -> Flow:
        seqs = [seq for seq in engine.queues.active if not seq.is_finished]
        if not seqs:
            return Flow.PROCEED
        if engine.flight is not None and list(engine.flight.seqs) != seqs:
            pipeline.settle(engine)
            seqs = [seq for seq in seqs if not seq.is_finished]
        choice = self.router.choose(engine, seqs)
        if choice.drafter is None and choice.may_run_ahead and self._run_ahead(engine, choice, seqs):
            return Flow.PROCEED
        if engine.flight is not None:
            pipeline.settle(engine)
            seqs = [seq for seq in seqs if not seq.is_finished]
            if choice.arm is not None and seqs:  # what was in flight may have opened or closed a match
                choice = self.router.choose(engine, seqs)
        seqs = self._with_room(engine, seqs)
        if seqs:
            self._step(engine, choice, seqs)
        return Flow.PROCEED

    def _run_ahead(self, engine: EngineState, choice: Choice, seqs: list[Sequence]) -> bool:
        """Take the pipelined lane if this batch and the pool allow it."""
        reason = pipeline.refuses(engine)
        engine.refusals = choice.refusals if reason is None else (*choice.refusals, (Lane.PIPELINED, reason))
        if reason is not None:
            return False
        if engine.flight is None:
            seqs = self._with_room(engine, seqs)
        landed = pipeline.pipelined(engine, seqs)
        if landed is not None and choice.is_measured:
            self.router.record(engine, choice, _landed(landed))
        return True

    def _step(self, engine: EngineState, choice: Choice, seqs: list[Sequence]) -> None:
        """Draft, verify, commit, and tell the gate what it delivered for its time."""
        step, started = engine.next_step(), engine.ctx.clock.now_ns()
        try:
            drafted = self._draft(engine, choice, seqs)
        except DeviceError as error:
            fail(engine, seqs, str(error))
            return
        segments = self._segments(engine, seqs, drafted)
        drafted_at = engine.ctx.clock.now_ns()
        kind = StepKind.VERIFY if drafted.any else StepKind.DECODE
        result = run(engine, step, kind, segments, seqs)
        if result is None:
            return
        returned = engine.ctx.clock.now_ns()
        try:
            observed_ns = self._shadow.check(engine, step, segments, result) if drafted.any else 0
        except DeviceError as error:
            fail(engine, seqs, str(error))
            return
        work = self._commit(engine, seqs, segments, result, drafted, step)
        timing = Timing(started, drafted_at, returned, result.device_us, observed_ns)
        rows = sum(len(segment.tokens) for segment in segments)
        ended = record_step(
            engine, drafted.lane, step, timing, work, rows=rows, width=len(seqs), k=drafted.k, k_reason=drafted.k_reason
        )
        engine.pacer.note_decode(ended - started, returned - drafted_at, drafts=rows - len(seqs))
        if choice.is_measured:
            self.router.record(engine, choice, _outcome(step, started, drafted_at, ended, drafted, work))

    def _draft(self, engine: EngineState, choice: Choice, seqs: list[Sequence]) -> Drafted:
        if choice.drafter is None:
            engine.refusals = engine.refusals if choice.may_run_ahead else choice.refusals
            return Drafted([NO_DRAFT for _ in seqs], Lane.PLAIN, None)
        drafts, k, reason = self.drafting.propose(engine, choice.drafter, seqs, choice.most, choice.is_exact)
        drafts = [self.router.trim(choice, draft) for draft in drafts]
        engine.refusals = choice.refusals
        lane = LANE_OF[choice.drafter]
        if choice.drafter is DrafterName.NGRAM and not drafts[0].tokens:
            engine.refusals = (*choice.refusals, (Lane.NGRAM, Refusal.NO_MATCH))
            lane = Lane.PLAIN
        return Drafted(drafts, lane, choice.drafter, k, reason)

    def _segments(self, engine: EngineState, seqs: list[Sequence], drafted: Drafted) -> list[Segment]:
        """One segment per sequence; drafts for which the pool has no block are left out."""
        segments = []
        for seq, draft in zip(seqs, drafted.drafts, strict=True):
            drafts = draft.tokens
            if drafts:
                reserve(engine, seq, seq.seq_len + 1 + len(drafts))
                drafts = drafts[: len(seq.blocks) * engine.pool.block_size - seq.seq_len - 1]
            segments.append(decode_segment(engine, seq, drafts))
        return segments

    def _commit(
        self,
        engine: EngineState,
        seqs: list[Sequence],
        segments: list[Segment],
        result: StepResult,
        drafted: Drafted,
        step: int,
    ) -> list[Work]:
        work = []
        for seq, segment, sampled in zip(seqs, segments, result.sampled, strict=True):
            drafts = segment.tokens[1:]
            committed: Committed = commit(engine, seq, sampled, drafted.lane, step, drafts)
            if drafted.drafter is not None:
                trim(engine, seq)
                self.drafting.observe(engine, drafted.drafter, seq, len(drafts), committed.accepted)
            work.append(Work(seq, committed, len(seq.tokens)))
        return work

    def _with_room(self, engine: EngineState, seqs: list[Sequence]) -> list[Sequence]:
        """Those of `seqs` that still decode after every one got room for a token; making it may park some."""
        for seq in seqs:
            if seq.status is Status.ACTIVE and not seq.is_finished:
                make_room(engine, seq, seq.seq_len + 1)
        return [seq for seq in seqs if seq.status is Status.ACTIVE and not seq.is_finished]


def _outcome(step: int, started: int, drafted_at: int, ended: int, drafted: Drafted, work: Seq[Work]) -> Outcome:
    """What a step cost and delivered; times are clock readings in ns."""
    return Outcome(
        step=step,
        ended=ended,
        wall_ns=ended - started,
        draft_ns=drafted_at - started,
        emitted=sum(part.committed.emitted for part in work),
        work=[part.committed for part in work],
        confidences=[
            draft.confidences[: part.committed.drafted] for draft, part in zip(drafted.drafts, work, strict=True)
        ],
    )


def _landed(landed: pipeline.Landed) -> Outcome:
    """The same of a step that ran ahead."""
    committed = [part.committed for part in landed.work]
    emitted = sum(part.emitted for part in committed)
    return Outcome(landed.step, landed.ended, landed.wall_ns, 0, emitted, committed, [() for _ in committed])
