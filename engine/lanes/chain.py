"""The logits processor chain: what each row may emit, decided as data before the device runs (scheduler.md, 5).

A stage reads the folded `TokenState` and adds to the row's edits; it never sees a logit. Rows of a verify are
planned against a fork of the state that has folded in the drafts before them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.core.device import LogitEdits, RowPlan
from engine.core.draws import uniform
from engine.core.sequence import Sequence
from engine.core.token_state import TokenState
from engine.core.vocabulary import Vocabulary

TOOL_SUPPRESSION = -20.0
"""Added to the logit of the tool opener when a request suppresses tools; a penalty, not a mask."""
SHARPER = 0.6
"""Factor of the temperature inside structured zones with `adaptive_sampling`."""


@dataclass(slots=True)
class Draft:
    """The edits of one row while the stages run."""

    banned: list[int] = field(default_factory=list)
    added: dict[int, float] = field(default_factory=dict)
    only: tuple[int, ...] = ()
    mask: bytes = b""


Stage = Callable[[Sequence, TokenState, Vocabulary, Draft], None]


def min_tokens(seq: Sequence, state: TokenState, vocabulary: Vocabulary, draft: Draft) -> None:
    if state.emitted < seq.request.limits.min_tokens:
        draft.banned.extend(vocabulary.eos_ids)


def mid_word_mask(seq: Sequence, state: TokenState, vocabulary: Vocabulary, draft: Draft) -> None:
    close = state.markers.think_close
    if state.thinking and close is not None and state.mid_word:
        draft.banned.append(close)


def post_close_mask(seq: Sequence, state: TokenState, vocabulary: Vocabulary, draft: Draft) -> None:
    if state.thought_closed:
        draft.banned.extend(t for t in (state.markers.think_open, state.markers.think_close) if t is not None)


def tool_call_masks(seq: Sequence, state: TokenState, vocabulary: Vocabulary, draft: Draft) -> None:
    opener = state.markers.tool_open
    if opener is None:
        return
    if state.thinking:
        draft.banned.append(opener)
    elif seq.request.switches.suppress_tools:
        draft.added[opener] = draft.added.get(opener, 0.0) + TOOL_SUPPRESSION


def forced_close(seq: Sequence, state: TokenState, vocabulary: Vocabulary, draft: Draft) -> None:
    if state.thinking and state.force_close and state.markers.think_close is not None:
        draft.only = (state.markers.think_close,)


def required_tool_call(seq: Sequence, state: TokenState, vocabulary: Vocabulary, draft: Draft) -> None:
    opener = state.markers.tool_open
    answer_begins = not state.thinking and state.post_think == 0
    if seq.request.switches.require_tool and opener is not None and answer_begins and not state.tool_opened:
        draft.only = (opener,)


def grammar_bitmask(seq: Sequence, state: TokenState, vocabulary: Vocabulary, draft: Draft) -> None:
    """Stages 8 and 9: a single legal token is forced, else the bitmask applies; never inside thinking."""
    if state.grammar is None or state.thinking or draft.only:
        return
    if state.grammar.is_done():
        draft.only = tuple(sorted(vocabulary.eos_ids))
        return
    mask = state.grammar.mask()
    forced = _only_bit(mask)
    if forced is not None:
        draft.only = (forced,)
    else:
        draft.mask = mask


STAGES: tuple[Stage, ...] = (
    min_tokens,
    mid_word_mask,
    post_close_mask,
    tool_call_masks,
    forced_close,
    required_tool_call,
    grammar_bitmask,
)
"""In the order of the contract. The thinking budget (stage 2) is part of the fold: it arms `force_close`."""


def needs_chain(seq: Sequence) -> bool:
    """Whether a row's plan depends on more than how many tokens were emitted."""
    request, state = seq.request, seq.state
    sampling, limits = request.sampling, request.limits
    return not seq.greedy and (
        state.counts is not None
        or state.grammar is not None
        or state.markers.any
        or seq.sharpen
        or bool(sampling.logit_bias)
        or state.emitted < limits.min_tokens
    )


def plan_rows(seq: Sequence, vocabulary: Vocabulary, drafts: Seq[int] = ()) -> tuple[RowPlan, ...]:
    """One plan per row of a step that feeds the last token and `drafts`."""
    if not needs_chain(seq):
        return _plain_plans(seq, seq.state.emitted, len(drafts) + 1)
    state = seq.state
    plans = [_edited_plan(seq, state, vocabulary)]
    if drafts:
        state = state.fork()
    for token in drafts:
        state.advance(token, vocabulary.bytes_of(token))
        plans.append(_edited_plan(seq, state, vocabulary))
    return tuple(plans)


def plan_ahead(seq: Sequence) -> tuple[RowPlan, ...]:
    """The plan of the row after one whose token is not known yet; only for a sequence without a chain."""
    return _plain_plans(seq, seq.state.emitted + 1, 1)


def legal_prefix(seq: Sequence, drafts: Seq[int]) -> int:
    """How many drafts the grammar accepts in a row; all of them where there is no grammar."""
    grammar = seq.state.grammar
    if grammar is None or not drafts:
        return len(drafts)
    if seq.state.thinking:
        return 0
    probe = grammar.copy()
    return next((at for at, token in enumerate(drafts) if not probe.advance(token)), len(drafts))


def _plain_plans(seq: Sequence, first: int, count: int) -> tuple[RowPlan, ...]:
    """The plans of rows that emit the tokens from number `first` on; only their draws differ."""
    base = seq.base_plan
    if base.temperature == 0:
        return (base,) * count
    draws = [uniform(seq.seed, position) for position in range(first, first + count)]
    return tuple(
        RowPlan(base.temperature, base.top_k, base.top_p, base.min_p, draw, None, base.top_logprobs) for draw in draws
    )


def _edited_plan(seq: Sequence, state: TokenState, vocabulary: Vocabulary) -> RowPlan:
    draft = Draft()
    for stage in STAGES:
        stage(seq, state, vocabulary, draft)
    base = seq.base_plan
    factor = SHARPER if seq.sharpen and state.structured else 1.0
    return RowPlan(
        base.temperature * factor,
        base.top_k,
        base.top_p,
        base.min_p,
        uniform(seq.seed, state.emitted) if base.temperature else 0.0,
        _edits(seq, state, draft),
        base.top_logprobs,
    )


def _edits(seq: Sequence, state: TokenState, draft: Draft) -> LogitEdits | None:
    sampling = seq.request.sampling
    for token, bias in sampling.logit_bias.items():
        draft.added[token] = draft.added.get(token, 0.0) + bias
    repeated: tuple[int, ...] = ()
    if state.counts is not None:
        _penalise(draft, state, sampling.presence_penalty, sampling.frequency_penalty)
        if sampling.repetition_penalty != 1.0:
            repeated = tuple(sorted({*seq.request.prompt, *state.counts}))
    if not (draft.only or draft.banned or draft.mask or draft.added or repeated):
        return None
    return LogitEdits(
        only=draft.only,
        banned=tuple(t for t in draft.banned if t not in draft.only),
        mask=draft.mask,
        repetition=sampling.repetition_penalty,
        repeated=repeated,
        added=tuple(sorted(draft.added.items())),
    )


def _penalise(draft: Draft, state: TokenState, presence: float, frequency: float) -> None:
    if state.counts is None or not (presence or frequency):
        return
    for token, count in state.counts.items():
        draft.added[token] = draft.added.get(token, 0.0) - presence - frequency * count


def _only_bit(mask: bytes) -> int | None:
    """The single set bit of a bitmask, or None when there are more or none."""
    rest = mask.lstrip(b"\0")
    if not rest or rest.rstrip(b"\0") != rest[:1] or rest[0] & (rest[0] - 1):
        return None
    return (len(mask) - len(rest)) * 8 + rest[0].bit_length() - 1
