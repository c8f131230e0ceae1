"""Drafts for a batch: asked of the right drafter, cut to what each sequence can use, none where none are due."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.core.device import Draft, DrafterName, DraftItem
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.drafters.ladder import AdaptiveSuspend, draft_count
from engine.drafters.ngram import MatchObserver, NgramIndex, NgramSettings
from engine.lanes.chain import legal_prefix
from engine.lanes.eligibility import HEADS
from engine.lanes.park import reserve

NO_DRAFT = Draft()


@dataclass(slots=True)
class History:
    """What drafting knows of one sequence."""

    ngram: NgramIndex
    adaptive: AdaptiveSuspend
    indexed: int = 0
    """Emitted tokens that the n-gram index has seen."""


class Drafting:
    """Per-sequence drafting state; it dies with its sequence."""

    def __init__(self) -> None:
        self.observer: MatchObserver | None = None
        """Told of every emitted token whether a copy would have guessed it."""
        self._settings: tuple[int, NgramSettings] | None = None
        self._histories: WeakKeyDictionary[Sequence, History] = WeakKeyDictionary()

    def history(self, engine: EngineState, seq: Sequence) -> History:
        """The history of `seq`, up to date with its newest emitted token."""
        found = self._histories.get(seq)
        if found is None:
            found = History(NgramIndex(self._ngram_settings(engine), self.observer), AdaptiveSuspend())
            found.ngram.extend(seq.request.prompt)
            self._histories[seq] = found
        found.ngram.settings = self._ngram_settings(engine)
        if found.indexed < len(seq.emitted):
            news = seq.emitted[found.indexed :]
            for token in news:
                found.ngram.append(token)
            found.adaptive.observe_emitted(len(news))
            found.indexed = len(seq.emitted)
        return found

    def match_len(self, engine: EngineState, seq: Sequence) -> int:
        """Length of the suffix that could be copied after; 0 when it is shorter than `ngram_min`."""
        ngram = self.history(engine, seq).ngram
        return ngram.match_len if ngram.match_len >= ngram.settings.shortest else 0

    def _ngram_settings(self, engine: EngineState) -> NgramSettings:
        """The levers' settings, made anew only when a lever has changed. `ngram_max` governs matches of tokens that
        come from now on."""
        version = engine.ctx.levers.version
        if self._settings is None or self._settings[0] != version:
            self._settings = (version, NgramSettings.of(engine.ctx.levers))
        return self._settings[1]

    def propose(
        self, engine: EngineState, drafter: DrafterName, seqs: Seq[Sequence], most: int, exact: bool = False
    ) -> tuple[list[Draft], int, str]:
        """One draft per sequence (empty: it bootstraps or has nothing to copy), K, and what bounded K.

        `exact`: `most` was chosen by the arbiter, so an n-gram copy is that long whatever its own window says."""
        levers = engine.ctx.levers
        capacities = [capacity(engine, seq) for seq in seqs]
        count, reason = draft_count(most, levers.ladder, len(seqs), None, capacities)
        if drafter is DrafterName.NGRAM:
            count, reason = (most, "gate") if exact else self._window(engine, capacities[0])
        if max(capacities) < 1:
            return [NO_DRAFT for _ in seqs], 0, "capacity"
        if drafter is DrafterName.NGRAM:
            ngram = self.history(engine, seqs[0]).ngram
            drafts = [Draft(ngram.copy(count) if exact else ngram.propose(count))]
        else:
            drafts = self._from_device(engine, drafter, seqs, [min(count, room) for room in capacities])
        return [_legal(seq, draft) for seq, draft in zip(seqs, drafts, strict=True)], count, reason

    def observe(self, engine: EngineState, drafter: DrafterName, seq: Sequence, drafted: int, accepted: int) -> None:
        """Tell the drafter what came of a verify step."""
        levers, history = engine.ctx.levers, self._histories.get(seq)
        if history is None or not drafted:
            return
        if drafter is DrafterName.NGRAM:
            history.ngram.observe(drafted, accepted)
        elif levers.flag("dflash_adaptive"):
            history.adaptive.observe_verify(
                accepted, levers.float("dflash_adaptive_min"), levers.int("dflash_adaptive_reprobe")
            )

    def is_suspended(self, engine: EngineState, seq: Sequence) -> bool:
        return engine.ctx.levers.flag("dflash_adaptive") and self.history(engine, seq).adaptive.is_suspended

    def _window(self, engine: EngineState, room: int) -> tuple[int, str]:
        """n-gram copies as far as its own window goes; the ladder bounds heads only."""
        most = min(engine.ctx.levers.int("ngram_copy_max"), room)
        return most, "capacity" if most == room else "match"

    def _from_device(
        self, engine: EngineState, drafter: DrafterName, seqs: Seq[Sequence], counts: Seq[int]
    ) -> list[Draft]:
        device = engine.ctx.device
        items: list[DraftItem] = []
        for seq, count in zip(seqs, counts, strict=True):
            saved = device.saved_hidden(seq.number) if drafter in HEADS else seq.seq_len - 1
            if count > 0 and saved >= 0 and not self.is_suspended(engine, seq) and seq.last_token is not None:
                # A drafter writes rows of its own beside those of the verify: a chain ends where the blocks do.
                reserve(engine, seq, seq.seq_len + 1 + count)
                items.append(
                    DraftItem(
                        seq=seq.number,
                        slot=seq.slot,
                        seq_len=seq.seq_len,
                        last_token=seq.last_token,
                        recent=tuple(seq.tokens[saved + 1 :]),
                        blocks=seq.blocks,
                        count=count,
                    )
                )
        drafts = device.draft(drafter, items, engine.ctx.levers.float("draft_conf_min")) if items else []
        by_seq = {item.seq: draft for item, draft in zip(items, drafts, strict=True)}
        return [by_seq.get(seq.number, NO_DRAFT) for seq in seqs]


def capacity(engine: EngineState, seq: Sequence) -> int:
    """Drafts that a sequence has room for: tokens it may still emit beside the model's own, and context."""
    return min(seq.owed - 1, engine.context_limit - seq.seq_len - 1)


def _legal(seq: Sequence, draft: Draft) -> Draft:
    """Cut a draft at the first token that the grammar refuses."""
    legal = legal_prefix(seq, draft.tokens)
    return draft if legal == len(draft.tokens) else Draft(draft.tokens[:legal], draft.confidences[:legal])
