"""The one place where tokens are emitted: every lane ends here, so that every counter moves on every path."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.device import Sampled
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.value import StepValue
from engine.lanes.finish import finish
from engine.protocol.events import Delta, Token
from telemetry.names import Finish
from telemetry.record import SeqShare, TokenRecord

LOOP_FROM, LOOP_SHORTEST, LOOP_LONGEST, LOOP_REPEATS = 48, 2, 64, 3


class Committed(StepValue, frozen=True):
    """What one sequence got from one step. `emitted == accepted + bonus`."""

    drafted: int
    accepted: int
    emitted: int

    @property
    def bonus(self) -> int:
        return self.emitted - self.accepted

    def share(self, seq: Sequence, prefill_tokens: int = 0) -> SeqShare:
        return SeqShare(seq.request_id, self.drafted, self.accepted, self.emitted, prefill_tokens)


def commit(
    engine: EngineState,
    seq: Sequence,
    sampled: Seq[Sampled],
    lane: str,
    step: int,
    drafts: Seq[int] = (),
    first_row_fed: bool = True,
) -> Committed:
    """Emit the target's tokens as far as the drafts agree with them, and note what was thereby fed.

    Row j of `sampled` followed the last token and j drafts. `first_row_fed` is False for the row that ends a
    prompt: there the last token was not fed by this step.
    """
    emitted: list[Token] = []
    accepted = 0
    for row, choice in enumerate(sampled):
        agrees = row < len(drafts) and choice.token == drafts[row]
        accepted += agrees
        rejected = () if agrees else tuple(drafts[row:])
        text = _take(engine, seq, choice)
        emitted.append(
            Token(
                id=choice.token,
                lane=lane,
                draft=row + 1 if agrees else 0,
                step=step,
                text=text,
                logprob=choice.logprob,
                top=choice.top,
                rejected=rejected,
            )
        )
        if seq.is_finished or not agrees:
            break
    _note_fed(seq, emitted, first_row_fed)
    _account(seq, lane, len(drafts), accepted, len(emitted))
    _send(engine, seq, emitted)
    return Committed(len(drafts), accepted, len(emitted))


def _take(engine: EngineState, seq: Sequence, choice: Sampled) -> str:
    """Fold one token into the sequence, decide whether it ends, and return the text that is final."""
    token = choice.token
    vocabulary = engine.ctx.vocabulary
    ends = token in vocabulary.eos_ids and not seq.request.limits.ignore_eos
    data = b"" if ends else vocabulary.bytes_of(token)
    seq.emitted.append(token)
    seq.state.advance(token, data)
    text = seq.text.push(data)
    if ends or seq.text.stopped:
        finish(engine, seq, Finish.STOP)
    elif len(seq.emitted) >= seq.max_tokens:
        finish(engine, seq, Finish.LENGTH)
    elif engine.ctx.levers.flag("loop_watchdog") and is_looping(seq.emitted):
        finish(engine, seq, Finish.LOOP)
    return text


def _note_fed(seq: Sequence, emitted: Seq[Token], first_row_fed: bool) -> None:
    if first_row_fed and seq.last_token is not None:
        seq.tokens.append(seq.last_token)
    *accepted, newest = emitted
    if accepted:
        seq.tokens.extend(token.id for token in accepted)
    seq.last_token = newest.id


def _account(seq: Sequence, lane: str, drafted: int, accepted: int, emitted: int) -> None:
    account = seq.account
    account.tokens_by_lane[lane] += emitted
    account.steps_by_lane[lane] += 1
    account.drafted += drafted
    account.accepted += accepted
    if drafted:
        account.speculative_steps += 1
        account.first_draft_accepted += accepted > 0
    else:
        account.serial_steps += 1


def _send(engine: EngineState, seq: Sequence, emitted: list[Token]) -> None:
    ctx = engine.ctx
    now = ctx.clock.now_ns()
    if not seq.times.first_token:
        seq.times.first_token = now
    seq.times.last_token = now
    ctx.outbox.send(Delta(request_id=seq.request_id, tokens=tuple(emitted)))
    if ctx.levers.trace_level >= 3:
        first = len(seq.emitted) - len(emitted)
        for offset, token in enumerate(emitted):
            ctx.telemetry.append(
                TokenRecord(
                    seq.request_id, first + offset, now, token.step, token.id, token.lane, token.draft, token.logprob
                )
            )


def is_looping(tokens: list[int]) -> bool:
    """The same 2 to 64 tokens three times in a row at the end, from 48 tokens on."""
    if len(tokens) < LOOP_FROM:
        return False
    newest, before = tokens[-1], tokens[-2 : -2 - LOOP_LONGEST : -1]
    period = 0
    for _ in range(before.count(newest)):
        period = before.index(newest, period) + 1
        if period >= LOOP_SHORTEST and _repeats(tokens, period):
            return True
    return False


def _repeats(tokens: list[int], period: int) -> bool:
    last = tokens[-period:]
    enough = len(tokens) >= LOOP_REPEATS * period
    return enough and last == tokens[-2 * period : -period] == tokens[-3 * period : -2 * period]
