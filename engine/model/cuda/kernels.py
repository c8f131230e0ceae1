"""Triton kernels of one decoder step; every row's arithmetic is the same in any batch.

A matrix product gives each warp one slice of the inner dimension: the slice is walked in steps of 16 in rising order by
tensor-core instructions whose output columns do not see each other, and the slices are added at the end. So tile
sizes may follow the number of rows while each output keeps its order of additions, bit for bit.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803, N806 - compile-time constants are written in capitals
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _await(PDL: tl.constexpr) -> Any:
    """Wait for what the kernel before has written; then the next may start, to load weights while this one computes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _product(
    w_ptr, x_ptr, n, row, ok, eps,
    K: tl.constexpr, S: tl.constexpr, BKS: tl.constexpr, ITERS: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
    BN: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """`W[n] @ x[row]`, divided by the root mean square of `x[row]` if NORM (whose weight is part of `W`); float32
    `[BN, R]`. The first weights are on their way before the inputs are awaited.

    The squares are summed on the diagonal of `x^T x`, by the same instructions: a sum across threads would follow the
    layout that the compiler chose for the number of rows.
    """
    SLICE: tl.constexpr = K // S
    begin = tl.arange(0, S)[:, None] * SLICE
    inner = begin + tl.arange(0, BKS)[None, :]
    w_row = w_ptr + n.to(tl.int64)[None, :, None] * K
    x_row = x_ptr + row.to(tl.int64)[None, None, :] * K
    live = ok[None, None, :]
    acc = tl.zeros([S, BN, R], tl.float32)
    gram = tl.zeros([S, R, R], tl.float32)
    if STAGES > 1:
        tl.static_assert(TAIL == 0)
        _await(PDL)
        for step in tl.range(0, ITERS, num_stages=STAGES):
            w = tl.load(w_row + (inner + step * BKS)[:, None, :])
            x = tl.load(x_row + (inner + step * BKS)[:, :, None], mask=live, other=0.0)
            acc = tl.dot(w, x, acc)
            if NORM:
                gram = tl.dot(tl.permute(x, (0, 2, 1)), x, gram)
    else:
        w = tl.load(w_row + inner[:, None, :])
        if TAIL > 0:
            last = begin + ITERS * BKS + tl.arange(0, TAIL if TAIL > 0 else 1)[None, :]
            w_tail = tl.load(w_row + last[:, None, :])
        _await(PDL)
        for step in range(ITERS - 1):
            following = tl.load(w_row + (inner + (step + 1) * BKS)[:, None, :])
            x = tl.load(x_row + (inner + step * BKS)[:, :, None], mask=live, other=0.0)
            acc = tl.dot(w, x, acc)
            if NORM:
                gram = tl.dot(tl.permute(x, (0, 2, 1)), x, gram)
            w = following
        x = tl.load(x_row + (inner + (ITERS - 1) * BKS)[:, :, None], mask=live, other=0.0)
        if TAIL > 0:
            x_tail = tl.load(x_row + last[:, :, None], mask=live, other=0.0)
        acc = tl.dot(w, x, acc)
        if NORM:
            gram = tl.dot(tl.permute(x, (0, 2, 1)), x, gram)
        if TAIL > 0:
            acc = tl.dot(w_tail, x_tail, acc)
            if NORM:
                gram = tl.dot(tl.permute(x_tail, (0, 2, 1)), x_tail, gram)
    out = tl.sum(acc, 0)
    if NORM:
        same = tl.arange(0, R)[:, None] == tl.arange(0, R)[None, :]
        square = tl.sum(tl.where(same, tl.sum(gram, 0), 0.0), 0)
        out = out * tl.rsqrt(square / K + eps)[None, :]
    return out


@triton.jit
def _halves(y, BN: tl.constexpr, R: tl.constexpr) -> Any:
    """Weights are packed in groups of 16 rows, 8 of one half and 8 of the other: `[BN / 2, R]` of each."""
    first, second = tl.split(tl.permute(tl.reshape(y, (BN // 16, 2, 8, R)), (0, 2, 3, 1)))
    return tl.reshape(first, (BN // 2, R)), tl.reshape(second, (BN // 2, R))


@triton.jit
def take_in(
    handed, area, taken, begin, size,
    STAGES: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Fetch the numbers of the next step from the host's memory, if one was handed over; else keep what is there."""
    _await(PDL)
    due = tl.load(taken) + 1
    source = handed + (due % STAGES) * size + begin
    at = tl.arange(0, BLOCK)
    inside = at < size - begin
    first = tl.load(source + at, mask=inside, other=0, volatile=True)
    number = tl.load(source + NUMBER, volatile=True)
    length = tl.load(source + NUMBER + 1, volatile=True)
    if number == due:
        tl.store(area + begin + at, first, mask=at < length)
        at += BLOCK
        done = BLOCK
        while done < length:
            rest = tl.load(source + at, mask=at < length, other=0, volatile=True)
            tl.store(area + begin + at, rest, mask=at < length)
            at += BLOCK
            done += BLOCK
        tl.store(taken, due)


@triton.jit
def embed(
    tokens, sources, ring, table, x_ptr, began,
    K: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Rows of the embedding; a token with a source comes from the ring of sampled tokens. TIMED: note when."""
    row = tl.program_id(0)
    _await(PDL)
    if TIMED:  # noqa: SIM102 - the outer one is decided at compile time
        if row == 0:
            tl.store(began, globaltimer())
    source = tl.load(sources + row)
    token = tl.load(tokens + row)
    if source >= 0:
        token = tl.load(ring + source).to(tl.int32)
    for at in range(0, K, BLOCK):
        k = at + tl.arange(0, BLOCK)
        tl.store(x_ptr + row * K + k, tl.load(table + token.to(tl.int64) * K + k, mask=k < K), mask=k < K)


@triton.jit(do_not_specialize=["M"])
def qkv(
    x_ptr, w_ptr, bias_ptr, positions, slots, cos_ptr, sin_ptr, q_ptr, key_ptr, value_ptr, eps,
    M, K: tl.constexpr, S: tl.constexpr, BKS: tl.constexpr, ITERS: tl.constexpr, TAIL: tl.constexpr,
    STAGES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Norm, projection and rope; queries go to `q_ptr`, keys and values into the cache at each row's slot."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * R + tl.arange(0, R)
    y = _product(w_ptr, x_ptr, n, row, row < M, eps, K, S, BKS, ITERS, TAIL, STAGES, BN, R, True, PDL)
    if BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    left, right = _halves(y, BN, R)
    head = tl.program_id(0) * BN // D
    i = tl.program_id(0) * BN % D // 2 + tl.arange(0, BN // 2)
    position = tl.load(positions + row, mask=row < M, other=-1)
    slot = tl.load(slots + row, mask=row < M, other=0).to(tl.int64)
    ok = (position >= 0)[None, :]
    if head < HEADS + KV_HEADS:
        angle = tl.maximum(position, 0)[None, :] * (D // 2) + i[:, None]
        cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
        left, right = left * cos - right * sin, right * cos + left * sin
    if head < HEADS:
        out = q_ptr + row[None, :] * (HEADS * D) + head * D + i[:, None]
    elif head < HEADS + KV_HEADS:
        out = key_ptr + slot[None, :] * (KV_HEADS * D) + (head - HEADS) * D + i[:, None]
    else:
        out = value_ptr + slot[None, :] * (KV_HEADS * D) + (head - HEADS - KV_HEADS) * D + i[:, None]
    tl.store(out, left.to(x_ptr.dtype.element_ty), mask=ok)
    tl.store(out + D // 2, right.to(x_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _at(
    table_at, t, seen, kv_head, KV_HEADS: tl.constexpr, D: tl.constexpr, BS: tl.constexpr,
) -> Any:  # fmt: skip
    """Offsets in the cache of the positions `t` `[S, T]`, `[S, T, D]`."""
    block = tl.load(table_at + t // BS, mask=seen, other=0).to(tl.int64)
    return ((block * BS + t % BS) * KV_HEADS + kv_head)[:, :, None] * D + tl.arange(0, D)[None, None, :]


@triton.jit
def _attend(q, keys, values, seen, scale, S: tl.constexpr) -> Any:
    """Attention of `q` `[D, G]` over keys and values `[S, T, D]`: maximum and sum `[G]`, output `[D, G]`.

    Each warp attends to a slice of the positions by itself; the slices are brought together at the end.
    """
    spread = tl.broadcast_to(q[None, :, :], (S, q.shape[0], q.shape[1]))
    scores = tl.where(seen[:, :, None], tl.dot(keys, spread) * (scale * LOG2_E), float("-inf"))
    tops = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(tops == float("-inf"), 0.0, tops)[:, None, :])
    totals = tl.sum(weights, 1)
    outs = tl.dot(tl.permute(values, (0, 2, 1)), weights.to(values.dtype))
    top = tl.max(tops, 0)
    shares = tl.exp2(tops - top[None, :])
    return top, tl.sum(totals * shares, 0), tl.sum(outs * shares[:, None, :], 0)


@triton.jit
def _merge(top, total, out, top_more, total_more, out_more) -> Any:
    """Add one chunk to what the earlier ones gave; the fused operations are spelled out so that all callers agree."""
    new = tl.maximum(top, top_more)
    old_share, share = tl.exp2(top - new), tl.exp2(top_more - new)
    total = tl.fma(total, old_share, total_more * share)
    return new, total, tl.fma(out, old_share[None, :], out_more * share[None, :])


@triton.jit
def _part(part_top, part_total, part_out, part, d, D: tl.constexpr) -> Any:
    """What another program left; read past this processor's own cache."""
    return (
        tl.load(part_top + part, cache_modifier=".cg"),
        tl.load(part_total + part, cache_modifier=".cg"),
        tl.load(part_out + part[None, :] * D + d[:, None], cache_modifier=".cg"),
    )


@triton.jit
def attention(
    q_ptr, key_ptr, value_ptr, positions, firsts, table_starts, tables, out_ptr,
    part_out, part_top, part_total, arrived, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr,
    S: tl.constexpr, G: tl.constexpr, MAX_CHUNKS: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Paged attention of one row and KV head. With SPLIT each program takes one chunk of the context and the last to
    arrive merges them in order; without, one program walks all chunks in the same order with the same operations.

    What earlier steps left in the cache (positions before `firsts`) is loaded before the queries are there.
    """
    row, kv_head, mine = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    if mine * CHUNK > position:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    g, d = tl.arange(0, G), tl.arange(0, D)
    table_at = tables + tl.load(table_starts + row)
    at = (row * HEADS + kv_head * GROUP + g)[None, :] * D + d[:, None]
    ok = (g < GROUP)[None, :]
    t = mine * CHUNK + tl.arange(0, S)[:, None] * (CHUNK // S) + tl.arange(0, CHUNK // S)[None, :]
    seen = t <= position
    old = t < tl.minimum(tl.load(firsts + row), position + 1)
    where = _at(table_at, t, seen, kv_head, KV_HEADS, D, BS)
    keys = tl.load(key_ptr + where, mask=old[:, :, None], other=0.0)
    values = tl.load(value_ptr + where, mask=old[:, :, None], other=0.0)
    _await(PDL)
    q = tl.load(q_ptr + at, mask=ok, other=0.0)
    new = seen & (t >= tl.load(firsts + row))
    keys = tl.load(key_ptr + where, mask=new[:, :, None], other=keys)
    values = tl.load(value_ptr + where, mask=new[:, :, None], other=values)
    top, total, out = _attend(q, keys, values, seen, scale, S)
    chunks = position // CHUNK + 1
    if not SPLIT:
        first = CHUNK
        while first <= position:
            t += CHUNK
            seen = t <= position
            where = _at(table_at, t, seen, kv_head, KV_HEADS, D, BS)
            keys = tl.load(key_ptr + where, mask=seen[:, :, None], other=0.0)
            values = tl.load(value_ptr + where, mask=seen[:, :, None], other=0.0)
            more = _attend(q, keys, values, seen, scale, S)
            top, total, out = _merge(top, total, out, more[0], more[1], more[2])
            first += CHUNK
    kind = out_ptr.dtype.element_ty
    if SPLIT:
        if chunks == 1:
            tl.store(out_ptr + at, (out / total[None, :]).to(kind), mask=ok)
        else:
            pair = row * KV_HEADS + kv_head  # parts are [rows, kv heads, chunks, G(, D)]
            part = (pair * MAX_CHUNKS + mine) * G + g
            tl.store(part_out + part[None, :] * D + d[:, None], out)
            tl.store(part_top + part, top)
            tl.store(part_total + part, total)
            tl.debug_barrier()
            if tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu") == chunks - 1:
                tl.store(arrived + pair, 0)
                part = pair * MAX_CHUNKS * G + g
                top, total, out = _part(part_top, part_total, part_out, part, d, D)
                merged = 1
                while merged < chunks:
                    merged += 1
                    part += G
                    more = _part(part_top, part_total, part_out, part, d, D)
                    top, total, out = _merge(top, total, out, more[0], more[1], more[2])
                tl.store(out_ptr + at, (out / total[None, :]).to(kind), mask=ok)
    else:
        tl.store(out_ptr + at, (out / total[None, :]).to(kind), mask=ok)


@triton.jit(do_not_specialize=["M"])
def add_product(
    x_ptr, w_ptr, residual_ptr, out_ptr, N,
    M, K: tl.constexpr, S: tl.constexpr, BKS: tl.constexpr, ITERS: tl.constexpr, TAIL: tl.constexpr,
    STAGES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`out = residual + W @ x`: the output projection of attention and the down projection; or without a residual."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * R + tl.arange(0, R)
    y = _product(w_ptr, x_ptr, n, row, row < M, 0.0, K, S, BKS, ITERS, TAIL, STAGES, BN, R, False, PDL)
    at = row[None, :] * N + n[:, None]
    ok = (row < M)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M"])
def gate_up(
    x_ptr, w_ptr, out_ptr, eps, F,
    M, K: tl.constexpr, S: tl.constexpr, BKS: tl.constexpr, ITERS: tl.constexpr, TAIL: tl.constexpr,
    STAGES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Norm, both projections of the feed-forward and `silu(gate) * up`."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * R + tl.arange(0, R)
    y = _product(w_ptr, x_ptr, n, row, row < M, eps, K, S, BKS, ITERS, TAIL, STAGES, BN, R, True, PDL)
    gate, up = _halves(y, BN, R)
    f = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    act = gate / (1.0 + tl.exp2(-gate * LOG2_E)) * up
    tl.store(out_ptr + row[None, :] * F + f[:, None], act.to(out_ptr.dtype.element_ty), mask=(row < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def head(
    x_ptr, w_ptr, rows_ptr, logits_ptr, best_ptr, best_id_ptr, mass_ptr, eps, N,
    M, K: tl.constexpr, S: tl.constexpr, BKS: tl.constexpr, ITERS: tl.constexpr, TAIL: tl.constexpr,
    STAGES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Final norm and LM head of chosen rows: per tile the largest logit with the lowest id, and the float32 logits, or
    for DRAFTS the sum of their exponentials."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    wanted = tl.program_id(1) * R + tl.arange(0, R)
    row = tl.load(rows_ptr + wanted, mask=wanted < M, other=0)
    inside = tl.minimum(n, N - 1)
    y = _product(w_ptr, x_ptr, inside, row, wanted < M, eps, K, S, BKS, ITERS, TAIL, STAGES, BN, R, True, PDL)
    y = tl.where((n < N)[:, None], y, float("-inf"))
    best = tl.max(y, 0)
    best_id = tl.min(tl.where(y == best[None, :], n[:, None], N), 0)
    at = wanted * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + at, best, mask=wanted < M)
    tl.store(best_id_ptr + at, best_id, mask=wanted < M)
    if DRAFTS:
        tl.store(mass_ptr + at, tl.sum(tl.exp2((y - best[None, :]) * LOG2_E), 0), mask=wanted < M)
    else:
        ok = (wanted < M)[None, :]
        tl.store(logits_ptr + wanted.to(tl.int64)[None, :] * N + n[:, None], y, mask=ok & (n < N)[:, None])


@triton.jit
def _word(stamp, content) -> Any:
    """A word of the tape."""
    return (stamp.to(tl.int64) << 32) | content.to(tl.int64)


@triton.jit
def argmax(
    best_ptr, best_id_ptr, header, ring, tape, began, clocks, tiles, N,
    BLOCK: tl.constexpr, CLOCKS: tl.constexpr, TIMED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """First index of the largest logit of each row, into the ring at the step's cursor and onto the tape. TIMED: and
    the microseconds since the embedding."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    cursor, stamp = tl.load(header), tl.load(header + 1)
    _await(PDL)
    best = tl.load(best_ptr + row * tiles + at, mask=at < tiles, other=float("-inf"))
    ids = tl.load(best_id_ptr + row * tiles + at, mask=at < tiles, other=N)
    token = tl.min(tl.where(best == tl.max(best, 0), ids, N), 0)
    token = tl.minimum(token, N - 1)
    if TIMED:  # noqa: SIM102 - the outer one is decided at compile time
        if row == 0:
            tl.store(clocks + stamp % CLOCKS, _word(stamp, (globaltimer() - tl.load(began)) // 1000))
    tl.store(ring + cursor + row, token.to(tl.int64))
    tl.store(tape + cursor + row, _word(stamp, token))
