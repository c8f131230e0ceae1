"""The CUDA backend: a whole step of fused bf16 kernels is one graph replay, and a row's result never depends on others.

Prompts run through the same kernels as decode and verify, in slices of up to 1,024 rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import platformdirs
import torch

from engine.model.backend import Backend, BackendRequest, BackendUnavailable, Batch, Output, Progress
from engine.model.config import ModelConfig
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
    stages_inputs = True
    """Takes the tensors of a batch on the host and `Batch.previous` on the device: one copy a step."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kv: PagedKV,
        *,
        widths: Sequence[int] | None = None,
        pdl: int | None = None,
        attention: AttentionTiling | None = None,
    ) -> None:
        """`widths` are the row counts to prepare for, all by default; `pdl` is one of `program.EARLY`, `LATE` and 0."""
        from engine.model.cuda.program import LATE, AttentionTiling, Buffers, ProgramBuilder
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
        early = (LATE if pdl is None else pdl) if _has_pdl(self.device) else 0
        entries = _table_entries(config, kv, max(chosen))
        self.graphs = StepGraphs(builder, self.device, widths=chosen, pdl=early, table_entries=entries)
        self._cursor = 0
        self._ring_at = self.buffers.ring.data_ptr()

    def prepare(self, progress: Progress | None = None) -> None:
        """Compile and capture every step that a chat can need."""
        keys = self.graphs.planned(draft_layers(self.config))
        self.graphs.prepare(keys, lambda done: progress(done, len(keys), "graphs") if progress is not None else None)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Output:
        rows, widest = batch.tokens.numel(), self.graphs.widths[-1]
        if rows <= widest:
            return self._run_slice(_Rows(batch, self.kv.block_size), batch, 0, rows)
        whole = _Rows(batch, self.kv.block_size)
        parts = [self._run_slice(whole, batch, at, min(at + widest, rows)) for at in range(0, rows, widest)]
        return Output(
            torch.cat([part.argmax for part in parts]),
            None if batch.greedy else torch.cat([part.logits for part in parts if part.logits is not None]),
            torch.cat([part.hidden for part in parts if part.hidden is not None]) if batch.taps else None,
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self._embedding)

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.is_cuda:
            return torch.mm(hidden.float(), self._head.float().t())
        return torch.mm(hidden.to(self._head.dtype), self._head.t(), out_dtype=torch.float32)

    def close(self) -> None:
        """Nothing but memory to give back."""

    def _run_slice(self, rows: _Rows, batch: Batch, begin: int, end: int) -> Output:
        count = end - begin
        wanted = [row - begin for row in batch.logit_rows if begin <= row < end]
        joined = wanted == list(range(count)) and count <= self.buffers.logits.shape[0]
        cursor = self._reserve(len(wanted))
        key = self.graphs.key(count, int(rows.positions[begin:end].max()) + 1, joined, batch.layers)
        inputs = self.graphs.inputs[key.rows]
        columns, tables = rows.columns(begin, end)
        sources, copies = self._sources(batch, begin, end)
        columns[1] = sources
        inputs.write(cursor, [*columns, range(count) if joined else []], tables)
        for row, token in copies:
            inputs.tokens[row].copy_(token)
        self.graphs.get(key).replay()
        logits = self.buffers.logits[: len(wanted)]
        if not joined:
            logits = self._heads(wanted, cursor, batch)
        hidden = None
        if batch.taps:
            hidden = torch.stack([self.buffers.streams[tap + 1, :count] for tap in batch.taps], 1)
        argmax = self.buffers.ring[cursor : cursor + len(wanted)]
        return Output(argmax, None if batch.greedy else logits, hidden)

    def _heads(self, wanted: list[int], cursor: int, batch: Batch) -> torch.Tensor:
        """The LM head of some rows of the step that just ran, in passes."""
        if batch.layers is not None:
            raise BackendUnavailable("a step with fewer layers must want the logits of all its rows")
        limit = self.buffers.logits.shape[0]
        passes = []
        for at in range(0, len(wanted), limit):
            some = wanted[at : at + limit]
            key = self.graphs.head_key(len(some))
            empty: list[int] = []
            self.graphs.inputs[key.rows].write(cursor + at, [empty] * 6 + [some], np.empty(0, np.int32))
            self.graphs.get(key).replay()
            passes.append(self.buffers.logits[: len(some)])
            if len(wanted) > limit and not batch.greedy:
                passes[-1] = passes[-1].clone()
        return passes[0] if len(passes) == 1 else torch.cat(passes) if passes else self.buffers.logits[:0]

    def _reserve(self, count: int) -> int:
        """Where the step's tokens go in the ring. A padded width writes behind them, hence the margin."""
        margin = max(count, self.graphs.widths[-1])
        if self._cursor + margin > self.buffers.ring.numel():
            self._cursor = 0
        cursor, self._cursor = self._cursor, self._cursor + count
        return cursor

    def _sources(
        self, batch: Batch, begin: int, end: int
    ) -> tuple[npt.NDArray[np.int32], list[tuple[int, torch.Tensor]]]:
        """Per row where in the ring its token is, or -1; and tokens that lie elsewhere on the device."""
        sources = np.full(end - begin, -1, np.int32)
        copies = []
        for row, token in batch.previous:
            if not begin <= row < end:
                continue
            offset = token.data_ptr() - self._ring_at
            if 0 <= offset < self.buffers.ring.nbytes:
                sources[row - begin] = offset // 8
            else:
                copies.append((row - begin, token))
        return sources, copies


class _Rows:
    """A batch's rows as host arrays in the order of the kernels' inputs."""

    def __init__(self, batch: Batch, block_size: int) -> None:
        counts = np.diff(batch.row_offsets)
        tables = batch.block_tables.cpu().numpy()
        starts = np.asarray(batch.starts, np.int32)
        if len(counts) == batch.tokens.numel():  # a decode step: one row each
            segment, self.positions, self._firsts = np.arange(len(counts)), starts, starts
        else:
            segment = np.repeat(np.arange(len(counts)), counts)
            within = np.arange(len(segment)) - np.asarray(batch.row_offsets)[segment]
            self._firsts = starts[segment]
            self.positions = (self._firsts + within).astype(np.int32)
        block, offset = np.divmod(self.positions, block_size)
        self._tokens = batch.tokens.cpu().numpy()
        self._slots = tables[segment, block] * block_size + offset
        self._starts = segment * tables.shape[1]
        self._tables = tables.reshape(-1)

    def columns(self, begin: int, end: int) -> tuple[list[npt.NDArray[Any]], npt.NDArray[np.int32]]:
        """Tokens, sources (to be filled), positions, slots, first positions and table starts; and all tables, flat."""
        cut = slice(begin, end)
        empty = np.empty(0, np.int32)
        return [
            self._tokens[cut], empty, self.positions[cut], self._slots[cut], self._firsts[cut], self._starts[cut]
        ], self._tables  # fmt: skip


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
    longest = -(-config.max_context // kv.block_size)
    return longest * min(rows, 256)
