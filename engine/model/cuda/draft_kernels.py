"""Triton kernels of a chained draft head around the decoder's own: what is accepted, what goes in, what is drafted."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time constants are written in capitals
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from engine.model.cuda.kernels import LOG2_E, _await, _word


@triton.jit
def accept(
    header, tokens, positions, firsts, table_starts, row_segments, segment_rows, skips, ring, tape,
    following, draft_positions, draft_firsts, draft_table_starts, newest, bases, base_table_starts, state,
    MOST: tl.constexpr, SEQUENCES: tl.constexpr, WORDS: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """For each row the token after it and where the head sees it; for each segment its newest row that counts.

    After a verify the row of the last accepted draft is the newest, and each row is followed by the token sampled at
    it; else the last row is, and `tokens` holds what follows. Positions begin at the first block that the head reads.
    """
    row = tl.program_id(0)
    _await(PDL)
    rows, segments, accepts = tl.load(header + 2), tl.load(header + 3), tl.load(header + 4)
    live = row < rows
    segment = tl.load(row_segments + row, mask=live, other=0)
    first = tl.load(segment_rows + segment)
    end = tl.load(segment_rows + segment + 1, mask=segment + 1 < segments, other=0)
    end = tl.where(segment + 1 < segments, end, rows)
    sampled = ring + tl.load(header)
    at = tl.arange(0, MOST)
    fed = tl.load(tokens + first + at + 1, mask=first + at + 1 < end, other=-1)
    chosen = tl.load(sampled + first + at, mask=(first + at < end) & (accepts > 0), other=-2).to(tl.int32)
    accepted = tl.min(tl.where(fed == chosen, MOST, at), 0)
    accepted = tl.where(accepts > 0, accepted, end - 1 - first)
    given = tl.load(tokens + row, mask=live & (accepts == 0), other=0)
    tl.store(following + row, tl.load(sampled + row, mask=live & (accepts > 0), other=given).to(tl.int32))
    skip = tl.load(skips + segment) * BS
    own = tl.load(positions + row)
    tl.store(draft_positions + row, tl.where(live, own - skip, -1))
    tl.store(draft_firsts + row, tl.load(firsts + row) - skip)
    tl.store(draft_table_starts + row, tl.load(table_starts + row) + skip // BS)
    if live & (row == first):
        newest_row = first + accepted
        tl.store(newest + segment, newest_row)
        tl.store(bases + segment, tl.load(positions + newest_row) - skip)
        tl.store(base_table_starts + segment, tl.load(table_starts + row) + skip // BS)
        words = tape + tl.load(header + 5) + segment * WORDS
        tl.store(words, _word(tl.load(header + 1), accepted))
    if row == 0:
        tl.store(state, tl.load(header + 1))
        tl.store(state + 1, tl.load(header + 5))
    if (row >= segments) & (row < SEQUENCES):
        tl.store(newest + row, 0)
        tl.store(bases + row, -1)


@triton.jit
def _normed(x, K: tl.constexpr, eps) -> Any:
    """A row over its root mean square; alone in its program, so that the order of additions is always the same."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / K + eps)


@triton.jit
def gather_taps(
    streams, taps, embedding, following, out_ptr, eps, stride,
    K: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Normed residual streams of the tapped layers and the normed embedding of the next token, side by side."""
    row, part = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    _await(PDL)
    if part < TAPS:
        x = tl.load(streams + (tl.load(taps + part) + 1).to(tl.int64) * stride + row * K + k, mask=k < K, other=0.0)
    else:
        x = tl.load(embedding + tl.load(following + row).to(tl.int64) * K + k, mask=k < K, other=0.0)
    at = (row * (TAPS + 1) + part) * K + k
    tl.store(out_ptr + at, _normed(x, K, eps).to(out_ptr.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["step"])
def gather_chained(
    hidden, hidden_rows, tokens, embedding, bases, base_table_starts, tables,
    positions, slots, firsts, out_ptr, eps, step,
    K: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The same from the head's own last output and the token drafted from it; the row moves on by `step`."""
    row, part = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    _await(PDL)
    if part == 0:
        x = tl.load(hidden + tl.load(hidden_rows + row) * K + k, mask=k < K, other=0.0)
        base = tl.load(bases + row)
        position = tl.where(base >= 0, base + step, -1)
        block = tl.load(tables + tl.load(base_table_starts + row) + position // BS, mask=position >= 0, other=0)
        tl.store(positions + row, position)
        tl.store(firsts + row, position)
        tl.store(slots + row, block * BS + position % BS)
    else:
        x = tl.load(embedding + tl.load(tokens + row).to(tl.int64) * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + (row * 2 + part) * K + k, _normed(x, K, eps).to(out_ptr.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["step"])
def choose(
    best_ptr, best_id_ptr, mass_ptr, ids, state, tokens, tape, tiles, N, step,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The likeliest id of each row and its probability, for the next draft and onto the tape."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    stamp = tl.load(state)
    words = tape + tl.load(state + 1) + row * WORDS + 1 + 2 * step
    _await(PDL)
    best = tl.load(best_ptr + row * tiles + at, mask=at < tiles, other=float("-inf"))
    numbers = tl.load(best_id_ptr + row * tiles + at, mask=at < tiles, other=N)
    masses = tl.load(mass_ptr + row * tiles + at, mask=at < tiles, other=0.0)
    top = tl.max(best, 0)
    number = tl.min(tl.where(best == top, numbers, N), 0)
    chance = 1.0 / tl.sum(masses * tl.exp2((best - top) * LOG2_E), 0)
    token = tl.load(ids + tl.minimum(number, N - 1))
    tl.store(tokens + row, token)
    tl.store(words, _word(stamp, token))
    bits = chance.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(words + 1, _word(stamp, bits))
