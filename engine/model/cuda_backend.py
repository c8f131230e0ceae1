"""The CUDA backend: a whole step of fused bf16 kernels is one graph replay, and a row's result never depends on others.

Prompts run through the same kernels as decode and verify, in slices of up to 1,024 rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import torch

from engine.model.backend import Backend, BackendRequest, BackendUnavailable, Batch, Behind, HostBatch, Output, Progress
from engine.model.config import ModelConfig
from engine.model.cuda.inputs import DRAFT_WORDS, RING, Arrivals, TapeArrival
from engine.model.cuda.packing import pack
from engine.model.cuda.tiling import fits
from engine.model.kv import PagedKV, available_bytes, default_kv_tokens
from engine.model.load import Weights, load_weights, open_source
from engine.model.self_spec import draft_layers

if TYPE_CHECKING:
    from engine.model.cuda.program import AttentionTiling

OLDEST = (8, 0)
"""Compute capability that bf16 tensor cores need; programmatic launch needs 9.0."""


class CudaBackend:
    """Implements `engine.model.backend.Backend`; a row's result is bitwise the same in every batch."""

    row_invariant = True
    brings_tokens = True
    """Outputs have an `arrival`, and queueing a step takes no thread: the device runs ahead by itself."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv: PagedKV,
        *,
        widths: Sequence[int] | None = None,
        pdl: bool = True,
        attention: AttentionTiling | None = None,
    ) -> None:
        """`widths` are the row counts to prepare for, all by default; `pdl`: kernels may start early."""
        from engine.model.cuda.program import AttentionTiling, Buffers, ProgramBuilder
        from engine.model.graphs import WIDTHS, StepGraphs

        self.config, self.kv = config, kv
        self.device = weights.embedding.device
        self.name = f"fused {str(weights.embedding.dtype).removeprefix('torch.')}"
        chosen = tuple(widths or WIDTHS)
        packed = pack(config, weights)
        self._embedding, self._head = weights.embedding, weights.head
        tile = attention or AttentionTiling.of(config)
        self.buffers = Buffers.of(config, max(chosen), weights.embedding.dtype, self.device, tile)
        builder = ProgramBuilder(config, packed, kv, self.buffers, tile)
        early = pdl and _has_pdl(self.device)
        entries = _table_entries(config, kv, max(chosen))
        self.graphs = StepGraphs(builder, self.device, widths=chosen, pdl=early, table_entries=entries)
        self._cursor = self._stamp = 0

    def prepare(self, progress: Progress | None = None) -> None:
        """Compile and capture every step that a chat can need."""
        keys = self.graphs.planned(draft_layers(self.config))
        if progress is not None:
            progress(0, 0, "building kernels")
        self.graphs.compile(self.graphs.kinds(keys))
        self.graphs.prepare(keys, lambda done: progress(done, len(keys), "graphs") if progress is not None else None)

    def run(self, batch: Batch) -> Output:
        return self.run_host(
            HostBatch(
                batch.tokens.tolist(), batch.row_offsets, batch.starts, batch.block_tables.tolist(), batch.logit_rows,
                batch.greedy, batch.taps, batch.layers,
            )
        )  # fmt: skip

    def run_host(self, batch: HostBatch) -> Output:
        rows = StepRows(batch, self.kv.block_size, self.kv.num_blocks)
        total, widest = len(batch.tokens), self.graphs.widths[-1]
        if total <= widest:
            return self._run_slice(rows, batch, 0, total)
        parts = [self._run_slice(rows, batch, at, min(at + widest, total)) for at in range(0, total, widest)]
        return Output(
            torch.cat([part.argmax for part in parts]),
            None if batch.greedy else torch.cat([part.logits for part in parts if part.logits is not None]),
            torch.cat([part.hidden for part in parts if part.hidden is not None]) if batch.taps else None,
            Arrivals(tuple(part.arrival for part in parts if part.arrival is not None)),
            [place for part in parts for place in part.places],
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self._embedding)

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.is_cuda:
            return torch.mm(hidden.float(), self._head.float().t())
        return torch.mm(hidden.to(self._head.dtype), self._head.t(), out_dtype=torch.float32)

    def reserve(self, count: int, margin: int = 0) -> int:
        """Where `count` results go in the ring and on the tape; `margin` more may be written behind them."""
        if self._cursor + count + margin > RING:
            self._cursor = 0
        cursor, self._cursor = self._cursor, self._cursor + count
        return cursor

    def next_stamp(self) -> int:
        """What marks the words of the next step; never 0, which marks those of no step."""
        self._stamp = self._stamp % (1 << 30) + 1
        return self._stamp

    def close(self) -> None:
        """Nothing but memory to give back."""

    def _run_slice(self, rows: StepRows, batch: HostBatch, begin: int, end: int) -> Output:
        count = end - begin
        wanted = [row - begin for row in batch.logit_rows if begin <= row < end]
        joined = len(wanted) == count and count <= self.buffers.logits.shape[0]
        key = self.graphs.key(count, max(rows.positions[begin:end]) + 1, joined, batch.layers)
        inputs = self.graphs.inputs[key.rows]
        cursor = self.reserve(key.rows if joined else len(wanted), self.graphs.widths[-1])
        stamp = self.next_stamp()
        header = [cursor, stamp, count]
        behind = None
        if batch.draft_skips is not None:
            behind = Behind(key.rows, stamp, self.reserve(DRAFT_WORDS * 2 * key.rows))
            header += [len(batch.starts), 1, behind.drafts_at]
        sources = self._sources(batch, begin, end)
        captured = self.graphs.get(key)
        columns = rows.columns(begin, end, sources, range(count) if joined else (), batch)
        inputs.write(header, columns, rows.tables, hand=self.graphs.takes_in(key.rows))
        captured.replay()
        logits = None
        if not joined:
            logits = self._heads(wanted, cursor, stamp, batch)
        elif not batch.greedy:
            logits = self.buffers.logits[: len(wanted)]
        hidden = None
        if batch.taps:
            hidden = torch.stack([self.buffers.streams[tap + 1, :count] for tap in batch.taps], 1)
        argmax = self.buffers.ring[cursor : cursor + len(wanted)]
        arrival = TapeArrival(self.buffers.tape, stamp, cursor, len(wanted))
        return Output(argmax, logits, hidden, arrival, range(cursor, cursor + len(wanted)), behind)

    def _heads(self, wanted: list[int], cursor: int, stamp: int, batch: HostBatch) -> torch.Tensor | None:
        """The LM head of some rows of the step that just ran, in passes; logits unless only the argmax is wanted."""
        if batch.layers is not None:
            raise BackendUnavailable("a step with fewer layers must want the logits of all its rows")
        limit = self.buffers.logits.shape[0]
        passes = []
        for at in range(0, len(wanted), limit):
            some = wanted[at : at + limit]
            key = self.graphs.head_key(len(some))
            none: tuple[int, ...] = ()
            self.graphs.inputs[key.rows].write((cursor + at, stamp), [none] * 6 + [some], none)
            self.graphs.get(key).replay()
            passes.append(self.buffers.logits[: len(some)])
            if len(wanted) > limit and not batch.greedy:
                passes[-1] = passes[-1].clone()
        return None if batch.greedy else torch.cat(passes) if passes else self.buffers.logits[:0]

    def _sources(self, batch: HostBatch, begin: int, end: int) -> list[int]:
        """Per row where in the ring its token is, or -1."""
        sources = [-1] * (end - begin)
        for row, place in batch.previous:
            if begin <= row < end:
                sources[row - begin] = place if isinstance(place, int) else self._placed(place)
        return sources

    def _placed(self, token: torch.Tensor) -> int:
        """Bring a token from elsewhere on the device into the ring."""
        place = self.reserve(1)
        self.buffers.ring[place].copy_(token)
        return place


class StepRows:
    """A batch's rows as plain numbers in the order of the kernels' inputs."""

    def __init__(self, batch: HostBatch, block_size: int, num_blocks: int) -> None:
        """Each table ends with a block of its segment's own behind the pool's, for a draft head whose drafts reach
        beyond the blocks; the target's cache has none such and never looks there."""
        width = max(len(table) for table in batch.block_tables) + 1
        self._tokens = batch.tokens
        self.positions: list[int] = []
        self._slots: list[int] = []
        self._firsts: list[int] = []
        self._segments: list[int] = []
        self.tables: list[int] = []
        ends = batch.row_offsets[1:]
        for segment, (start, begin, end, table) in enumerate(
            zip(batch.starts, batch.row_offsets, ends, batch.block_tables, strict=False)
        ):
            count = end - begin
            self.positions += range(start, start + count)
            self._slots += [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
            self._firsts += [start] * count
            self._segments += [segment] * count
            self.tables += table
            self.tables += [num_blocks + segment] * (width - len(table))
        self._width = width

    def columns(
        self, begin: int, end: int, sources: Sequence[int], logit_rows: Sequence[int], batch: HostBatch
    ) -> list[Sequence[int]]:
        """The columns of `StepInputs`; those of a draft head only where one follows."""
        cut = slice(begin, end)
        segments = self._segments[cut]
        columns: list[Sequence[int]] = [
            self._tokens[cut], sources, self.positions[cut], self._slots[cut], self._firsts[cut],
            [segment * self._width for segment in segments], logit_rows,
        ]  # fmt: skip
        if batch.draft_skips is not None:
            columns += [segments, batch.row_offsets[:-1], batch.draft_skips]
        return columns


def open_backend(request: BackendRequest) -> Backend:
    """Load bf16 weights onto the GPU, compile and capture. Raises `BackendUnavailable` where that cannot be."""
    reason = _missing(request)
    if reason is not None:
        raise BackendUnavailable(reason)
    cache = Path(os.environ.get("METRALE_CACHE") or platformdirs.user_cache_dir("metrale"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    device = torch.device("cuda", torch.cuda.current_device())
    config = request.config
    source = open_source(request.path)
    try:
        weights = load_weights(source, torch.bfloat16, device, request.progress)
    finally:
        source.close()
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    tokens = request.kv_tokens or default_kv_tokens(
        per_token, config.max_context, request.max_batch_size, available_bytes(device)
    )
    blocks = -(-tokens // request.block_size)
    kv = PagedKV(
        config.num_layers, blocks, request.block_size, config.num_kv_heads, config.head_dim, torch.bfloat16, device
    )
    backend = CudaBackend(config, weights, kv)
    backend.prepare(request.progress)
    return backend


def _missing(request: BackendRequest) -> str | None:
    """Why this backend cannot run here, in one sentence, or None."""
    if not torch.cuda.is_available():
        return "the CUDA kernels need an NVIDIA GPU, and torch sees none"
    if torch.cuda.get_device_capability() < OLDEST:
        return f"the CUDA kernels need compute capability {OLDEST[0]}.{OLDEST[1]} for bf16"
    if request.dtype == "float32":
        return "the CUDA kernels compute in bfloat16: use the reference backend for float32"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "the CUDA kernels need the package triton, which comes with torch for CUDA"
    return fits(request.config)


def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _table_entries(config: ModelConfig, kv: PagedKV, rows: int) -> int:
    """Numbers that the block tables of one step may have together."""
    longest = -(-config.max_context // kv.block_size) + 1
    return longest * min(rows, 256)
