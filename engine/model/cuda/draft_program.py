"""The launches of a chained draft head: take in the target's rows and draft once, then draft again from the draft.

The block itself is a decoder of one layer and runs on the decoder's kernels; only what goes in and what comes out is
the head's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engine.model.config import ModelConfig
from engine.model.cuda import draft_kernels
from engine.model.cuda.inputs import DRAFT_WORDS, StepInputs
from engine.model.cuda.packing import PackedWeights
from engine.model.cuda.program import AttentionTiling, Buffers, Launch, ProgramBuilder
from engine.model.kv import PagedKV

MOST_SEQUENCES = 32
"""Sequences that one call drafts for."""
MOST_ROWS = 32
"""Rows of one sequence that a head can follow."""


@dataclass(slots=True)
class Rows:
    """Inputs of the head's layer that kernels fill in, int32 `[rows]`."""

    positions: torch.Tensor
    slots: torch.Tensor
    firsts: torch.Tensor
    table_starts: torch.Tensor
    tables: torch.Tensor


@dataclass(slots=True)
class DraftWeights:
    """Norms are multiplied into the matrices that follow them."""

    block: PackedWeights
    """The layer, the drafted rows of the LM head, and the target's embedding."""
    first: torch.Tensor
    """`[hidden, (taps + 1) * hidden]`."""
    again: torch.Tensor
    """`[hidden, 2 * hidden]`."""
    ids: torch.Tensor
    """int32: the token of each drafted row."""


@dataclass
class DraftBuilder:
    """Binds the kernels to a head's weights and cache, and to the target's streams, inputs, ring and tape."""

    config: ModelConfig
    """Of the head's block."""
    weights: DraftWeights
    kv: PagedKV
    taps: torch.Tensor
    """int32 `[taps]`."""
    target: Buffers
    rows: int
    tables: torch.Tensor
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        def new(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=self.device)

        most, c, tile = MOST_SEQUENCES, self.config, AttentionTiling.of(self.config)
        builders = []
        for rows in (self.rows, most):
            buffers = Buffers.of(c, rows, self.dtype, self.device, tile, drafts=True)
            builders.append(ProgramBuilder(c, self.weights.block, self.kv, buffers, tile))
        self._absorbing, self._chaining = builders
        parts = self.taps.numel() + 1
        self._taken = new(self.rows, parts * c.hidden_size, kind=self.dtype)
        self._pair = new(most, 2 * c.hidden_size, kind=self.dtype)
        self._following = new(self.rows)
        self._absorbed = Rows(new(self.rows), self.tables, new(self.rows), new(self.rows), self.tables)
        self._newest, self._itself = new(most), torch.arange(most, dtype=torch.int32, device=self.device)
        self._bases, self._tokens, self._state = new(most).fill_(-1), new(most), new(2)
        self._chained = Rows(new(most), new(most), new(most), new(most), self.tables)

    def absorb(self, rows: int, inputs: StepInputs, context: int, sequences: int) -> list[Launch]:
        """Keys and values of `rows` rows of the target, and the first draft of `sequences` (none for 0)."""
        b, c, w = self._absorbing, self.config, self.weights
        own = self._absorbed
        seen = Rows(own.positions, inputs.slots, own.firsts, own.table_starts, self.tables)
        taps = self.taps.numel()
        launches = [
            Launch(
                "accept", draft_kernels.accept, (max(rows, sequences),),
                (inputs.header, inputs.tokens, inputs.positions, inputs.firsts, inputs.table_starts,
                 inputs.row_segments, inputs.segment_rows, inputs.skips, self.target.ring, self.target.tape.words,
                 self._following, own.positions, own.firsts, own.table_starts, self._newest, self._bases,
                 self._chained.table_starts, self._state),
                {"MOST": MOST_ROWS, "SEQUENCES": max(sequences, 1), "WORDS": DRAFT_WORDS, "BS": self.kv.block_size}, 1,
            ),
            Launch(
                "taps", draft_kernels.gather_taps, (rows, taps + 1),
                (self.target.streams, self.taps, w.block.embedding, self._following, self._taken, c.rms_eps,
                 self.target.streams.stride(0)),
                {"K": c.hidden_size, "TAPS": taps, "BLOCK": triton.next_power_of_2(c.hidden_size)}, 4,
            ),
            b.product("fuse", self._taken, w.first, None, b.buffers.streams[0], rows),
        ]  # fmt: skip
        if not sequences:
            return [*launches, b.qkv(0, b.buffers.streams[0], rows, seen)]
        return [*launches, *b.layer(0, 0, rows, seen, context), *self._read_out(b, self._newest, sequences, 0)]

    def chain(self, sequences: int, context: int, drafts: int) -> list[Launch]:
        """Drafts 2 to `drafts` of `sequences`."""
        b, c, w, rows = self._chaining, self.config, self.weights, self._chained
        launches: list[Launch] = []
        for step in range(1, drafts):
            hidden = self._absorbing.buffers.streams[1] if step == 1 else b.buffers.streams[1]
            launches.append(
                Launch(
                    "chained", draft_kernels.gather_chained, (sequences, 2),
                    (hidden, self._newest if step == 1 else self._itself, self._tokens, w.block.embedding,
                     self._bases, rows.table_starts, self.tables, rows.positions, rows.slots, rows.firsts,
                     self._pair, c.rms_eps, step),
                    {"K": c.hidden_size, "BLOCK": triton.next_power_of_2(c.hidden_size), "BS": self.kv.block_size}, 4,
                )
            )  # fmt: skip
            launches.append(b.product("fuse", self._pair, w.again, None, b.buffers.streams[0], sequences))
            launches += b.layer(0, 0, sequences, rows, context)
            launches += self._read_out(b, self._itself, sequences, step)
        return launches

    def _read_out(self, builder: ProgramBuilder, picks: torch.Tensor, sequences: int, step: int) -> list[Launch]:
        b, n = builder.buffers, self.config.vocab_size
        project, tiles = builder.project(sequences, picks, 1, drafts=True)
        choose = Launch(
            "choose", draft_kernels.choose, (sequences,),
            (b.best, b.best_id, b.mass, self.weights.ids, self._state, self._tokens, self.target.tape.words,
             tiles, n, step),
            {"BLOCK": triton.next_power_of_2(tiles), "WORDS": DRAFT_WORDS}, 4,
        )  # fmt: skip
        return [project, choose]
