"""From a step's segments to the flat tensors that a backend runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from engine.core.device import DeviceError, Segment, Step
from engine.model.backend import Batch
from engine.model.sampling import is_plain_greedy


def block_tables(tables: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int32 `[segments, widest]`, padded with 0."""
    widest = max(len(table) for table in tables)
    padded = [[*table, *([0] * (widest - len(table)))] for table in tables]
    return torch.tensor(padded, dtype=torch.int32, device=device)


def batch_of(
    step: Step,
    last_sampled: Mapping[int, torch.Tensor],
    taps: tuple[int, ...],
    device: torch.device,
    staged: bool = False,
) -> Batch:
    """The batch of a step; `last_sampled` holds each sequence's newest token as a 0-d tensor on the device. A `staged`
    batch stays on the host, and its newest tokens go to the backend as they are.

    Raises `DeviceError` where `from_previous` has nothing to feed.
    """
    segments = step.segments
    offsets = (0, *accumulate(len(segment.tokens) for segment in segments))
    device = torch.device("cpu") if staged else device
    tokens = torch.tensor([token for segment in segments for token in segment.tokens], device=device)
    previous: tuple[tuple[int, torch.Tensor], ...] = ()
    chained = [
        (offset, segment.seq) for offset, segment in zip(offsets, segments, strict=False) if segment.from_previous
    ]
    if chained:
        missing = [seq for _, seq in chained if seq not in last_sampled]
        if missing:
            raise DeviceError(f"sequence {missing[0]} has no sampled token to continue from: feed its token instead")
        if staged:
            previous = tuple((offset, last_sampled[seq]) for offset, seq in chained)
        else:
            tokens[[offset for offset, _ in chained]] = torch.stack([last_sampled[seq] for _, seq in chained])
    positions = [segment.start + i for segment in segments for i in range(len(segment.tokens))]
    return Batch(
        tokens=tokens,
        positions=torch.tensor(positions, device=device),
        row_offsets=offsets,
        starts=tuple(segment.start for segment in segments),
        block_tables=block_tables([segment.blocks for segment in segments], device),
        logit_rows=_planned_rows(segments, offsets),
        greedy=all(is_plain_greedy(plan) for segment in segments for plan in segment.rows),
        taps=taps,
        previous=previous,
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
