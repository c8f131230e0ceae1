"""Everything that draft heads keep between steps: hidden rows per sequence, and drafts made before the ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from engine.core.device import DeviceError, Draft, DrafterName, DraftItem, Segment, Step
from engine.model.backend import Behind, HostBatch, Output
from engine.model.heads import DraftHead, FollowingHead, HeadItem, HeadRows, HiddenRing

FOLLOWED_DRAFTS = 3
"""Drafts that are made unasked at least: who asked for fewer may ask for more, and they cost nobody's time."""
FOLLOWED_STEPS = 8
"""Steps without an ask after which a head is no longer followed: it works in the host's shadow, but not for nothing."""


@dataclass(slots=True)
class _Ahead:
    """Drafts that a head makes behind a step: of each of its sequences the segment."""

    behind: Behind
    count: int
    segments: dict[int, tuple[int, Segment]]


@dataclass(slots=True)
class _Kept:
    """One head and what it has of every sequence."""

    head: DraftHead
    rings: dict[int, HiddenRing] = field(default_factory=dict)
    count: int = 0
    """Drafts of the last ask."""
    unasked: int = FOLLOWED_STEPS
    """Steps since then."""
    ahead: _Ahead | None = None

    def ring(self, seq: int) -> HiddenRing:
        return self.rings.setdefault(seq, HiddenRing())

    def settle(self, seq: int, end: int) -> None:
        """Sequence `seq` is known to hold `end` tokens now: so far has the head taken it in behind the last step."""
        if self.ahead is None or seq not in self.ahead.segments:
            return
        _, segment = self.ahead.segments.pop(seq)
        if segment.start < end <= segment.start + len(segment.tokens):
            self.ring(seq).absorbed_to(end)


class Drafting:
    """The heads of one device.

    A head may follow (`FollowingHead`): while it is asked for drafts, every step is followed, on the device, by taking
    in what was accepted and by the next drafts, which are there when they are asked for."""

    def __init__(self, heads: Sequence[DraftHead], device: torch.device) -> None:
        self._kept = {head.drafter: _Kept(head) for head in heads}
        self._device = device

    @property
    def heads(self) -> list[DraftHead]:
        return [kept.head for kept in self._kept.values()]

    def plan(self, step: Step, greedy: bool) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Layers whose hidden rows the step must return, and `HostBatch.draft_skips` where a head will follow it."""
        taps: set[int] = set()
        skips: tuple[int, ...] | None = None
        for drafter, kept in self._kept.items():
            for segment in step.segments:
                kept.settle(segment.seq, segment.start)
            if not any(drafter in segment.save_hidden for segment in step.segments):
                continue
            kept.ahead = None
            kept.unasked += 1
            if greedy and skips is None and self._can_follow(kept, step):
                head = cast(FollowingHead, kept.head)
                skips = tuple(head.skip(kept.rings[segment.seq].kv_start) for segment in step.segments)
                places = {segment.seq: (at, segment) for at, segment in enumerate(step.segments)}
                kept.ahead = _Ahead(_UNPLACED, max(kept.count, FOLLOWED_DRAFTS), places)
            else:
                taps.update(kept.head.taps)
        return tuple(sorted(taps)), skips

    def keep(self, step: Step, batch: HostBatch, output: Output) -> None:
        """Once the step is queued: let the head follow, and keep the hidden rows of those that do not."""
        for drafter, kept in self._kept.items():
            if kept.ahead is not None and kept.ahead.behind is _UNPLACED and output.behind is not None:
                kept.ahead.behind = output.behind
                context = max(segment.start + len(segment.tokens) for segment in step.segments)
                cast(FollowingHead, kept.head).follow(output.behind, len(step.segments), context, kept.ahead.count)
            elif batch.taps and set(kept.head.taps) <= set(batch.taps):
                self._save(drafter, kept, step, batch, output)

    def draft(self, drafter: DrafterName, items: Sequence[DraftItem], conf_min: float) -> list[Draft]:
        kept = self._kept[drafter]
        kept.count, kept.unasked = max(item.count for item in items), 0
        made: list[Draft | None] = [self._made_ahead(kept, item, conf_min) for item in items]
        rest = [at for at, draft in enumerate(made) if draft is None]
        if rest:
            for at, draft in zip(rest, self._propose(kept, [items[at] for at in rest], conf_min), strict=True):
                made[at] = draft
        return [draft or Draft() for draft in made]

    def oldest(self, seq: int) -> int:
        """Position of the oldest row that some head has not drafted from, -1: none."""
        found = [kept.rings[seq].oldest for kept in self._kept.values() if seq in kept.rings]
        for kept in self._kept.values():
            if kept.ahead is not None and seq in kept.ahead.segments:
                found.append(kept.ahead.segments[seq][1].start)
        return min((oldest for oldest in found if oldest >= 0), default=-1)

    def forget(self, seq: int) -> None:
        for kept in self._kept.values():
            kept.rings.pop(seq, None)
            if kept.ahead is not None:
                kept.ahead.segments.pop(seq, None)

    def bundle(self, seq: int, blocks: Sequence[int]) -> dict[str, Any]:
        """Everything of a sequence, for the spill store."""
        caches = {name.value: kept.head.kv for name, kept in self._kept.items()}
        return {
            "heads": {name: kv.gather(blocks) for name, kv in caches.items() if kv is not None},
            "rings": {name.value: kept.rings[seq].state() for name, kept in self._kept.items() if seq in kept.rings},
        }

    def unbundle(self, seq: int, blocks: Sequence[int], bundle: Mapping[str, Any]) -> None:
        for name, content in bundle["heads"].items():
            kv = self._kept[DrafterName(name)].head.kv
            if kv is not None:
                kv.scatter(blocks, content)
        for name, state in bundle["rings"].items():
            self._kept[DrafterName(name)].rings[seq] = HiddenRing.from_state(state, self._device)

    def _can_follow(self, kept: _Kept, step: Step) -> bool:
        """Whether the head may follow, has been asked lately, and has taken in everything before the step."""
        follows = getattr(kept.head, "follows", None)
        if follows is None or kept.unasked > FOLLOWED_STEPS:
            return False
        for segment in step.segments:
            ring = kept.rings.get(segment.seq)
            if (
                ring is None
                or len(segment.rows) != len(segment.tokens)
                or segment.from_previous
                or not ring.is_absorbed_to(segment.start)
            ):
                return False
        return bool(follows([len(segment.tokens) for segment in step.segments]))

    def _made_ahead(self, kept: _Kept, item: DraftItem, conf_min: float) -> Draft | None:
        ahead = kept.ahead
        if ahead is None or item.seq not in ahead.segments:
            return None
        at, segment = ahead.segments[item.seq]
        kept.settle(item.seq, item.seq_len)
        if not segment.start < item.seq_len <= segment.start + len(segment.tokens):
            return None
        found = cast(FollowingHead, kept.head).followed(ahead.behind, at, ahead.count)
        if found.accepted != item.seq_len - 1 - segment.start:
            raise DeviceError(
                f"a head took {found.accepted} drafts of sequence {item.seq} for accepted and the scheduler "
                f"{item.seq_len - 1 - segment.start}: switch speculation off"
            )
        low = next((at for at, chance in enumerate(found.chances) if chance < conf_min), len(found.ids))
        keep = min(item.count, low)
        return Draft(tuple(found.ids[:keep]), tuple(found.chances[:keep]))

    @torch.inference_mode()
    def _propose(self, kept: _Kept, items: Sequence[DraftItem], conf_min: float) -> list[Draft]:
        earlier: list[HeadRows] = []
        ready: dict[int, HeadItem] = {}
        for index, item in enumerate(items):
            ring = kept.rings.get(item.seq)
            runs = ring.consume(item.seq, item.seq_len, item.recent, item.last_token, item.blocks) if ring else []
            if runs and runs[-1].start + runs[-1].hidden.shape[0] == item.seq_len:
                newest = runs.pop()
                ready[index] = HeadItem(item.seq, item.seq_len, item.last_token, newest, item.blocks, item.count)
            earlier.extend(runs)
        if earlier:
            kept.head.extend(earlier)
        made = kept.head.propose(list(ready.values()), conf_min) if ready else []
        drafts = dict(zip(ready, made, strict=True))
        return [drafts.get(index, Draft()) for index in range(len(items))]

    def _save(self, drafter: DrafterName, kept: _Kept, step: Step, batch: HostBatch, output: Output) -> None:
        if output.hidden is None:
            raise DeviceError("the backend returned no hidden rows: use the reference backend")
        hidden = output.hidden.clone()
        own = hidden if kept.head.taps == batch.taps else hidden[:, [batch.taps.index(tap) for tap in kept.head.taps]]
        for index, segment in enumerate(step.segments):
            if drafter not in segment.save_hidden:
                continue
            rows = own[batch.row_offsets[index] : batch.row_offsets[index + 1]]
            tokens = (-1, *segment.tokens[1:]) if segment.from_previous else segment.tokens
            ring = kept.ring(segment.seq)
            ring.append(segment.start, rows, tokens)
            ring.shed()
            if len(segment.rows) < len(segment.tokens) and hasattr(kept.head, "follow"):
                self._take_prompt(kept, ring, segment)

    def _take_prompt(self, kept: _Kept, ring: HiddenRing, segment: Segment) -> None:
        """Let a head whose work is only queued take in a prompt at once, not when the first draft is waited for."""
        known = ring.take_known(segment.seq, segment.blocks)
        if known is not None:
            kept.head.extend([known])


_UNPLACED = Behind(0, 0, 0)
