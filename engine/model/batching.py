"""From a step's segments to the flat batch that a backend runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from engine.core.device import DeviceError, Segment, Step
from engine.model.backend import HostBatch, Place


def batch_of(
    step: Step,
    last_sampled: Mapping[int, Place],
    greedy: bool,
    taps: tuple[int, ...] = (),
    draft_skips: tuple[int, ...] | None = None,
) -> HostBatch:
    """The batch of a step; `last_sampled` says where each sequence's newest token is on the device.

    Raises `DeviceError` where `from_previous` has nothing to feed.
    """
    segments = step.segments
    offsets = (0, *accumulate(len(segment.tokens) for segment in segments))
    previous: list[tuple[int, Place]] = []
    for offset, segment in zip(offsets, segments, strict=False):
        if segment.from_previous:
            if segment.seq not in last_sampled:
                raise DeviceError(
                    f"sequence {segment.seq} has no sampled token to continue from: feed its token instead"
                )
            previous.append((offset, last_sampled[segment.seq]))
    return HostBatch(
        tokens=[token for segment in segments for token in segment.tokens],
        row_offsets=offsets,
        starts=tuple(segment.start for segment in segments),
        block_tables=[segment.blocks for segment in segments],
        logit_rows=_planned_rows(segments, offsets),
        greedy=greedy,
        taps=taps,
        previous=tuple(previous),
        draft_skips=draft_skips,
    )


def _planned_rows(segments: Sequence[Segment], offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        row for segment, end in zip(segments, offsets[1:], strict=True) for row in range(end - len(segment.rows), end)
    )


def check_step(step: Step, vocab_size: int, max_rows: int, max_context: int, block_size: int, num_blocks: int) -> None:
    """Refuse a step that would read or write outside the cache. Raises `DeviceError` with the offending numbers."""
    if not step.segments:
        raise DeviceError(f"step {step.step_id} has no segment: plan at least one row")
    if step.rows > max_rows:
        raise DeviceError(f"step {step.step_id} feeds {step.rows} rows, at most {max_rows} fit: slice the prompt")
    for segment in step.segments:
        end = segment.start + len(segment.tokens)
        if not segment.tokens or len(segment.rows) > len(segment.tokens):
            raise DeviceError(
                f"sequence {segment.seq} plans {len(segment.rows)} rows of {len(segment.tokens)} tokens: feed each row"
            )
        if not 0 <= segment.start < end <= max_context:
            raise DeviceError(
                f"sequence {segment.seq} reaches position {end}, beyond the context of {max_context}: shorten it"
            )
        if end > len(segment.blocks) * block_size:
            raise DeviceError(
                f"sequence {segment.seq} needs {end} positions, its {len(segment.blocks)} blocks hold "
                f"{len(segment.blocks) * block_size}: allocate blocks first"
            )
        if min(segment.blocks) < 0 or max(segment.blocks) >= num_blocks:
            raise DeviceError(f"sequence {segment.seq} names a block outside 0..{num_blocks - 1}: fix its block table")
        if min(segment.tokens) < 0 or max(segment.tokens) >= vocab_size:
            raise DeviceError(f"sequence {segment.seq} feeds a token outside 0..{vocab_size - 1}: fix its tokens")
