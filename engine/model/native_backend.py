"""The compiled CPU backend: weights stay quantised as in the GGUF file, a whole step is one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.device import RowPlan
from engine.model.backend import Backend, BackendRequest, BackendUnavailable, Batch, HostBatch, Output, Progress
from engine.model.config import ModelConfig
from engine.model.gguf import GGUFFile
from engine.model.kv import PagedKV, available_bytes, default_kv_tokens
from engine.model.load import rope_frequencies
from engine.model.native.build import BuildError, library_path
from engine.model.native.cores import physical_cores, usable_processors
from engine.model.native.library import PARTS, DrawPlan, KvType, NativeError, NativeModel, ShapeArgs, StepArgs, load
from engine.model.quant import fill, matrix_names, unsupported

_KV_DTYPES = {"auto": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_TYPES = {torch.float32: KvType.F32, torch.float16: KvType.F16, torch.bfloat16: KvType.BF16}

WIDE_ABOVE = 1.0
"""Blocks of 32 activations whose largest value exceeds this many times the root mean square of those of their row are
multiplied in 16 bits, the others in 8. Default model, argmax agreement with float32 over 2,306 prompt positions, and ms
of a step of 1, 4 and 8 rows on one thread (AVX-512): no block wide 0.966, 2.7, 3.4, 5.0; 1.0 0.984, 2.8, 3.6, 5.6;
0.7 0.989, 2.9, 3.9, 6.4; all wide (0) 0.999, 2.8, 4.8, 8.7."""


class NativeBackend:
    """Implements `engine.model.backend.Backend`; a row's result is bitwise the same in every batch.

    Keys lie in their blocks as `[kv_heads, head_dim, block_size]`, so that 16 positions are one vector.
    """

    row_invariant = True

    def __init__(
        self,
        config: ModelConfig,
        file: GGUFFile,
        kv: PagedKV,
        threads: int,
        variant: str | None = None,
        wide_above: float = WIDE_ABOVE,
        progress: Progress | None = None,
    ) -> None:
        """`variant` forces an instruction-set level; `wide_above` 0 keeps all activations in 16 bits."""
        self.config = config
        self.kv = kv
        self.device = torch.device("cpu")
        cos, sin = rotary_tables(config, file)
        self.model = NativeModel(_shape(config, kv, threads, wide_above), cos, sin, variant)
        for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
            self.model.set_cache(layer, keys.data_ptr(), values.data_ptr(), keys.stride(0))
        fill(self.model, file, progress)
        kind = file.info("blk.0.attn_q.weight").type_name
        self.name = f"native {kind} {self.model.variant}"
        self.weight_bytes = sum(file.info(name).nbytes for name in matrix_names(config))
        """Bytes of all matrices, which a step of one row reads once (an untied embedding excepted)."""
        self._all_layers = np.arange(config.num_layers, dtype=np.int32)
        self._part_ns: npt.NDArray[np.int64] | None = None

    def run(self, batch: Batch) -> Output:
        """Raises `NativeError` for a batch that names tokens, blocks, rows or layers that do not exist."""
        _check(batch, self._all_layers if batch.layers is None else batch.layers)
        rows, wanted, taps = batch.tokens.numel(), len(batch.logit_rows), len(batch.taps)
        argmax = torch.empty(wanted, dtype=torch.int64)
        logits = None if batch.greedy or not wanted else torch.empty(wanted, self.config.vocab_size)
        hidden = torch.empty(rows, taps, self.config.hidden_size) if taps else None
        tokens, tables = batch.tokens.contiguous(), batch.block_tables.contiguous()
        offsets, starts = np.asarray(batch.row_offsets, np.int32), np.asarray(batch.starts, np.int32)
        logit_rows, tap_layers = np.asarray(batch.logit_rows, np.int32), np.asarray(batch.taps, np.int32)
        layers = self._all_layers if batch.layers is None else np.asarray(batch.layers, np.int32)
        self.model.step(
            StepArgs(
                rows, len(starts), wanted, taps, len(layers), tables.shape[1],
                tokens.data_ptr(), offsets.ctypes.data, starts.ctypes.data, tables.data_ptr(), logit_rows.ctypes.data,
                tap_layers.ctypes.data, layers.ctypes.data, _address(hidden), _address(logits), argmax.data_ptr(),
                None if self._part_ns is None else self._part_ns.ctypes.data,
            )
        )  # fmt: skip
        return Output(argmax, logits, hidden)

    def run_host(self, batch: HostBatch) -> Output:
        return self.run(batch.on(self.device))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.contiguous()
        out = torch.empty(tokens.numel(), self.config.hidden_size)
        self.model.embed(tokens.data_ptr(), tokens.numel(), out.data_ptr())
        return out

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.float().contiguous()
        logits = torch.empty(hidden.shape[0], self.config.vocab_size)
        self.model.head(hidden.data_ptr(), hidden.shape[0], logits.data_ptr())
        return logits

    def draw(self, rows: Sequence[torch.Tensor], plans: Sequence[RowPlan]) -> torch.Tensor:
        """What `engine.model.sampling.draw` draws, up to the rounding of sums.

        Raises `NativeError` for a row without a number in it."""
        tokens = torch.empty(len(rows), dtype=torch.int64)
        rows = [row.contiguous() for row in rows]
        if any(row.dtype != torch.float32 or row.numel() != self.config.vocab_size for row in rows):
            raise NativeError(f"a row of logits must be float32 [{self.config.vocab_size}]")
        self.model.draw(
            [
                DrawPlan(row.data_ptr(), plan.temperature, plan.top_p, plan.min_p, plan.uniform, plan.top_k)
                for row, plan in zip(rows, plans, strict=True)
            ],
            tokens.data_ptr(),
        )
        return tokens

    def profile(self, on: bool) -> None:
        """Start to add up the time of every part of a step, or stop."""
        self._part_ns = np.zeros(len(PARTS), np.int64) if on else None

    def part_seconds(self) -> dict[str, float]:
        """Seconds per part on the calling thread since `profile(True)`; empty when not profiled."""
        return {} if self._part_ns is None else dict(zip(PARTS, (self._part_ns / 1e9).tolist(), strict=True))

    def close(self) -> None:
        self.model.close()


def open_backend(request: BackendRequest) -> Backend:
    """Pack a GGUF file of supported types; `auto` keeps the cache in float16.

    Raises `BackendUnavailable` without a compiler, for other files and for tensor types without a kernel.
    """
    file = _open_file(request.path)
    try:
        if request.progress is not None and not library_path().exists():
            request.progress(0, 0, "building kernels")
        load()
    except (BuildError, OSError) as error:
        raise BackendUnavailable(str(error)) from None
    config, dtype = request.config, _KV_DTYPES[request.dtype]
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    tokens = request.kv_tokens or default_kv_tokens(
        per_token, config.max_context, request.max_batch_size, available_bytes(torch.device("cpu"))
    )
    blocks, size = -(-tokens // request.block_size), request.block_size
    kv = PagedKV(config.num_layers, blocks, size, config.num_kv_heads, config.head_dim, dtype, by_block=True)
    return NativeBackend(config, file, kv, _threads(request.threads), progress=request.progress)


def _threads(asked: int) -> int:
    """Every processor means every physical core; any other number is meant as it is."""
    cores = physical_cores()
    return cores if asked >= usable_processors() else asked


def _open_file(path: Path) -> GGUFFile:
    if path.is_dir():
        raise BackendUnavailable("the native kernels read GGUF files only, and this is a directory")
    file = GGUFFile(path)
    reason = unsupported(file)
    if reason is not None:
        raise BackendUnavailable(reason)
    return file


def rotary_tables(config: ModelConfig, file: GGUFFile) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines, float32 `[max_context, head_dim / 2]`."""
    scaling = config.rope_scaling
    factors = None
    if scaling is not None and scaling.kind == "factors":
        factors = torch.from_numpy(file.dequantize("rope_freqs.weight"))
    angles = torch.outer(torch.arange(config.max_context, dtype=torch.float32), rope_frequencies(config, factors))
    return angles.cos().numpy(), angles.sin().numpy()


def _check(batch: Batch, layers: Sequence[int] | npt.NDArray[Any]) -> None:
    """What the library cannot see behind its pointers: how long and of which type the arrays are."""
    segments = len(batch.row_offsets) - 1
    if batch.tokens.dtype != torch.int64 or batch.tokens.ndim != 1:
        raise NativeError(f"tokens must be int64 [rows], not {batch.tokens.dtype} {list(batch.tokens.shape)}")
    if batch.block_tables.dtype != torch.int32 or batch.block_tables.ndim != 2:
        raise NativeError(f"block tables must be int32 [segments, blocks], not {batch.block_tables.dtype}")
    if segments < 1 or batch.block_tables.shape[0] != segments or len(batch.starts) != segments:
        raise NativeError(
            f"{segments} segments come with {len(batch.starts)} starts and {batch.block_tables.shape[0]} block tables"
        )
    missing = sorted(set(batch.taps) - {int(layer) for layer in layers})
    if missing or list(batch.taps) != sorted(batch.taps):
        raise NativeError(f"taps {list(batch.taps)} must rise and name layers that run")


def _shape(config: ModelConfig, kv: PagedKV, threads: int, wide_above: float) -> ShapeArgs:
    return ShapeArgs(
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        max_context=config.max_context,
        block_size=kv.block_size,
        num_blocks=kv.num_blocks,
        kv_type=_KV_TYPES[kv.dtype],
        threads=threads,
        rms_eps=config.rms_eps,
        attention_scale=1.0 / math.sqrt(config.head_dim),
        wide_above=wide_above,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
