"""The launches of one step for a fixed number of rows, over buffers that never move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import triton

from engine.model.config import ModelConfig
from engine.model.cuda import kernels
from engine.model.cuda.inputs import DRAFT_WORDS, NUMBER, RING, STAGES, StepInputs, Tape
from engine.model.cuda.packing import PackedLayer, PackedWeights
from engine.model.cuda.tiling import Tiling, tiling
from engine.model.kv import PagedKV

LOGIT_ROWS = 256
"""Rows whose logits one step may want; more run in several passes of the head."""
SPLIT_ROWS = 24
"""Up to this many rows, attention spreads the context of each row over several programs."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, bound to its arguments."""

    part: str
    """What a profile calls it."""
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    registers: int | None = None

    def __call__(self, pdl: bool) -> Any:
        """Launch; returns Triton's compiled kernel, or None where it is interpreted.

        `pdl` lets the next kernel start when the inputs of this one are there. An H200's step of 1 and 8 rows:
        446 and 463 us; when this one has started 496 and 548; when it has ended 756 and 788.
        """
        return self.kernel[self.grid](*self.arguments, **self._options(pdl))

    def compile(self, pdl: bool) -> None:
        """Put the binary into Triton's cache without running it."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self._options(pdl))

    def _options(self, pdl: bool) -> dict[str, Any]:
        options = {**self.constants, "PDL": pdl, "num_warps": self.warps, "num_stages": 1}
        if self.registers is not None:
            options["maxnreg"] = self.registers
        return {**options, "launch_pdl": True} if pdl else options


class RowInputs(Protocol):
    """What the layers need to know of their rows, int32 `[rows]` each, and all block tables, flat."""

    positions: torch.Tensor
    slots: torch.Tensor
    firsts: torch.Tensor
    table_starts: torch.Tensor
    tables: torch.Tensor


@dataclass(slots=True)
class Buffers:
    """Activations of at most `rows` rows; `streams[l]` is the residual stream before layer `l`."""

    streams: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
    activated: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor
    best_id: torch.Tensor
    mass: torch.Tensor
    ring: torch.Tensor
    tape: Tape
    began: torch.Tensor
    part_out: torch.Tensor
    part_top: torch.Tensor
    part_total: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        tile: AttentionTiling | None = None,
        *,
        drafts: bool = False,
    ) -> Buffers:
        """`drafts`: of a draft head, whose logits are not kept and whose tokens go elsewhere."""
        c = config
        chunks = (tile or AttentionTiling.of(c)).chunks(c.max_context)
        width = c.num_heads * c.head_dim
        pairs = min(SPLIT_ROWS, rows) * c.num_kv_heads * chunks * group_of(c)
        tiles = -(-c.vocab_size // 16)
        wanted = min(rows, LOGIT_ROWS)

        def new(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        return cls(
            streams=new(c.num_layers + 1, rows, c.hidden_size),
            q=new(rows, width),
            attended=new(rows, width),
            activated=new(rows, c.intermediate_size),
            logits=new(1 if drafts else wanted, c.vocab_size, kind=torch.float32),
            best=new(wanted, tiles, kind=torch.float32),
            best_id=new(wanted, tiles, kind=torch.int32),
            mass=new(wanted if drafts else 1, tiles, kind=torch.float32),
            ring=new(1 if drafts else RING + rows, kind=torch.int64),
            tape=Tape(1 if drafts else RING + DRAFT_WORDS * rows, device),
            began=new(1, kind=torch.int64),
            part_out=new(pairs, c.head_dim, kind=torch.float32),
            part_top=new(pairs, kind=torch.float32),
            part_total=new(pairs, kind=torch.float32),
            arrived=new(min(SPLIT_ROWS, rows) * c.num_kv_heads, kind=torch.int32),
        )


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """Positions that one program attends to at once, and its warps, each of which takes a slice of them. Part of the
    order of additions, so never a matter of width."""

    chunk: int
    warps: int

    @classmethod
    def of(cls, config: ModelConfig) -> AttentionTiling:
        return cls(max(128, min(256, 16384 // config.head_dim)), 4)

    def chunks(self, context: int) -> int:
        return -(-context // self.chunk)


def takes_in(rows: int) -> bool:
    """Whether a step of so many rows is handed over; one program fetches it, so it must not be long."""
    return rows <= SPLIT_ROWS


def group_of(config: ModelConfig) -> int:
    """Query heads of one KV head, padded to a tensor-core tile."""
    return max(8, 1 << (config.num_heads // config.num_kv_heads - 1).bit_length())


@dataclass(slots=True)
class ProgramBuilder:
    """Binds kernels to a model's weights, cache and buffers."""

    config: ModelConfig
    weights: PackedWeights
    kv: PagedKV
    buffers: Buffers
    attention: AttentionTiling
    tile: Callable[..., Tiling] = tiling
    launches: list[Launch] = field(default_factory=list)

    def body(self, rows: int, inputs: StepInputs, context: int, layers: Sequence[int] | None = None) -> list[Launch]:
        """Embedding and layers; `context` bounds the positions that any row reads."""
        run = range(self.config.num_layers) if layers is None else layers
        launches = [self._take_in(inputs)] if takes_in(rows) else []
        launches.append(self._embed(rows, inputs))
        stream = 0
        for layer in run:
            launches += self.layer(layer, stream, rows, inputs, context)
            stream = layer + 1
        return launches

    def head(self, rows: int, inputs: StepInputs, stream: int) -> list[Launch]:
        """Final norm, LM head and argmax of `rows` chosen rows of `streams[stream]`."""
        c, b = self.config, self.buffers
        project, tiles = self.project(rows, inputs.logit_rows, stream)
        choose = Launch(
            "argmax", kernels.argmax, (rows,),
            (b.best, b.best_id, inputs.header, b.ring, b.tape.words, b.began, b.tape.clocks, tiles, c.vocab_size),
            {"BLOCK": triton.next_power_of_2(tiles), "CLOCKS": b.tape.CLOCKS, "TIMED": b.ring.is_cuda}, 8,
        )  # fmt: skip
        return [project, choose]

    def project(self, rows: int, logit_rows: torch.Tensor, stream: int, *, drafts: bool = False) -> tuple[Launch, int]:
        """Final norm and LM head of `rows` chosen rows, and into how many tiles it cuts the vocabulary."""
        c, b = self.config, self.buffers
        tile = self.tile(c.hidden_size, c.vocab_size, rows, normed=True)
        tiles = -(-c.vocab_size // tile.outputs)
        launch = Launch(
            "head", kernels.head, (tiles, -(-rows // tile.rows)),
            (b.streams[stream], self.weights.head, logit_rows, b.logits, b.best, b.best_id, b.mass, c.rms_eps,
             c.vocab_size),
            {"M": rows, "K": c.hidden_size, **tile.constants(), "DRAFTS": drafts}, tile.warps, tile.registers,
        )  # fmt: skip
        return launch, tiles

    def _take_in(self, inputs: StepInputs) -> Launch:
        area = inputs.area
        return Launch(
            "take_in", kernels.take_in, (1,), (area.handed, area.data, area.taken, inputs.begin, area.size),
            {"STAGES": STAGES, "NUMBER": NUMBER, "BLOCK": 512}, 4,
        )  # fmt: skip

    def _embed(self, rows: int, inputs: StepInputs) -> Launch:
        b, width = self.buffers, self.config.hidden_size
        return Launch(
            "embed", kernels.embed, (rows,),
            (inputs.tokens, inputs.sources, b.ring, self.weights.embedding, b.streams[0], b.began),
            {"K": width, "BLOCK": min(1024, triton.next_power_of_2(width)), "TIMED": b.ring.is_cuda}, 4,
        )  # fmt: skip

    def layer(self, index: int, stream: int, rows: int, inputs: RowInputs, context: int) -> list[Launch]:
        """Attention and feed-forward, from `streams[stream]` to `streams[index + 1]`."""
        layer, b = self.weights.layers[index], self.buffers
        x, after = b.streams[stream], b.streams[index + 1]
        # The stream between attention and feed-forward takes the place that the layer's output fills afterwards:
        # each program of the down projection reads exactly the elements that it writes.
        return [
            self.qkv(index, x, rows, inputs),
            self._attention(index, rows, inputs, context),
            self.product("out", b.attended, layer.out, x, after, rows),
            self._gate_up(layer, after, rows),
            self.product("down", b.activated, layer.down, after, after, rows),
        ]

    def qkv(self, index: int, x: torch.Tensor, rows: int, inputs: RowInputs) -> Launch:
        """Queries, and keys and values into the cache."""
        c, b, w = self.config, self.buffers, self.weights
        layer = w.layers[index]
        outputs = layer.qkv.shape[0]
        tile = self.tile(c.hidden_size, outputs, rows, normed=True, most=c.head_dim)
        bias = layer.qkv_bias
        return Launch(
            "qkv", kernels.qkv, (outputs // tile.outputs, -(-rows // tile.rows)),
            (x, layer.qkv, layer.qkv if bias is None else bias, inputs.positions, inputs.slots,
             w.cos, w.sin, b.q, self.kv.keys[index], self.kv.values[index], c.rms_eps),
            {"M": rows, "K": c.hidden_size, **tile.constants(), "HEADS": c.num_heads, "KV_HEADS": c.num_kv_heads,
             "D": c.head_dim, "BIAS": bias is not None}, tile.warps, tile.registers,
        )  # fmt: skip

    def _attention(self, index: int, rows: int, inputs: RowInputs, context: int) -> Launch:
        c, b = self.config, self.buffers
        split = rows <= SPLIT_ROWS
        tile = self.attention
        chunks = tile.chunks(context) if split else 1
        return Launch(
            "attention", kernels.attention, (rows, c.num_kv_heads, chunks),
            (b.q, self.kv.keys[index], self.kv.values[index], inputs.positions, inputs.firsts, inputs.table_starts,
             inputs.tables, b.attended, b.part_out, b.part_top, b.part_total, b.arrived, c.head_dim**-0.5),
            {"HEADS": c.num_heads, "KV_HEADS": c.num_kv_heads, "D": c.head_dim, "BS": self.kv.block_size,
             "CHUNK": tile.chunk, "S": tile.warps, "G": group_of(c), "MAX_CHUNKS": tile.chunks(c.max_context),
             "SPLIT": split},
            tile.warps,
        )  # fmt: skip

    def product(
        self, part: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor,
        rows: int,
    ) -> Launch:  # fmt: skip
        """`out = residual + weight @ x`."""
        outputs, inner = weight.shape
        tile = self.tile(inner, outputs, rows, normed=False)
        return Launch(
            part, kernels.add_product, (outputs // tile.outputs, -(-rows // tile.rows)),
            (x, weight, x if residual is None else residual, out, outputs),
            {"M": rows, "K": inner, **tile.constants(), "RESIDUAL": residual is not None}, tile.warps, tile.registers,
        )  # fmt: skip

    def _gate_up(self, layer: PackedLayer, x: torch.Tensor, rows: int) -> Launch:
        c, b = self.config, self.buffers
        outputs = layer.gate_up.shape[0]
        tile = self.tile(c.hidden_size, outputs, rows, normed=True)
        return Launch(
            "gate_up", kernels.gate_up, (outputs // tile.outputs, -(-rows // tile.rows)),
            (x, layer.gate_up, b.activated, c.rms_eps, c.intermediate_size),
            {"M": rows, "K": c.hidden_size, **tile.constants()}, tile.warps, tile.registers,
        )  # fmt: skip
