"""The C functions of the native library as Python sees them: structures field for field, errors as exceptions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.model.native.build import build


class NativeError(ValueError):
    """The native library refused a shape, a weight or a step; the text says why."""


class QuantType(IntEnum):
    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2


class KvType(IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output")
"""GGUF names in the order of `MatrixSlot`; the last two belong to layer -1."""

VECTORS = (
    "attn_norm.weight", "ffn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "attn_q.bias", "attn_k.bias",
    "attn_v.bias", "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias", "output_norm.weight",
)  # fmt: skip
"""GGUF names in the order of `VectorSlot`; the last one belongs to layer -1."""

PARTS = ("embed", "norm", "qkv", "rope", "attention", "out", "gate_up", "down", "head", "wait")
"""Parts of a step in the order of `Part`."""


class ShapeArgs(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c_int32) for name in ("max_context", "block_size", "num_blocks", "kv_type", "threads")),
        ("rms_eps", c_float),
        ("attention_scale", c_float),
        ("wide_above", c_float),
    ]


class MatrixArgs(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("layer", "slot", "type", "rows", "cols")),
        ("data", c_void_p),
        ("row_order", c_void_p),
    ]


class StepArgs(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("rows", "segments", "logit_rows", "taps", "layers_run", "table_width")),
        *((name, c_void_p) for name in ("tokens", "row_offsets", "starts", "block_tables", "logit_row_ids")),
        *((name, c_void_p) for name in ("tap_layers", "layer_ids", "hidden", "logits", "argmax", "part_ns", "inputs")),
    ]


class DraftArgs(ctypes.Structure):
    _fields_ = [
        ("step", StepArgs),
        *((name, c_int32) for name in ("taps", "drafts")),
        ("chance_min", c_float),
        ("made", c_int32),
        *((name, c_void_p) for name in ("tap_rows", "token_part", "fused", "inputs", "offsets", "starts", "newest")),
        *((name, c_void_p) for name in ("drafted", "chances")),
    ]


class DrawPlan(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "uniform")),
        ("top_k", c_int64),
    ]


@cache
def load(path: Path | None = None) -> ctypes.CDLL:
    """The library with its signatures, built first where no path is given.

    Raises `BuildError` when it cannot be built and `OSError` when it cannot be loaded.
    """
    library = ctypes.CDLL(str(path or build()))
    model = c_void_p
    _declare(library.metrale_variant, c_char_p, c_int32)
    _declare(library.metrale_error, c_char_p, model)
    _declare(library.metrale_open, model, POINTER(ShapeArgs), c_int32, c_void_p, c_void_p)
    _declare(library.metrale_close, None, model)
    _declare(library.metrale_set_matrix, c_int, model, POINTER(MatrixArgs))
    _declare(library.metrale_set_vector, c_int, model, c_int32, c_int32, c_void_p, c_int32)
    _declare(library.metrale_set_cache, c_int, model, c_int32, c_void_p, c_void_p, c_int64)
    _declare(library.metrale_borrow_threads, c_int, model, model)
    _declare(library.metrale_draft, c_int, model, model, model, model, POINTER(DraftArgs))
    _declare(library.metrale_step, c_int, model, POINTER(StepArgs))
    _declare(library.metrale_embed, c_int, model, c_void_p, c_int64, c_void_p)
    _declare(library.metrale_draw, c_int, model, POINTER(DrawPlan), c_int64, c_void_p)
    _declare(library.metrale_head, c_int, model, c_void_p, c_int64, c_void_p)
    return library


def _declare(function: Any, result: Any, *arguments: Any) -> None:
    function.restype = result
    function.argtypes = arguments


def variants(library: ctypes.CDLL) -> tuple[str, ...]:
    """Instruction-set levels that this processor runs, best first."""
    names: list[str] = []
    while (name := library.metrale_variant(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


class NativeModel:
    """A model inside the library; the caller keeps the cache and the rotary tables alive as long as this object."""

    def __init__(
        self, shape: ShapeArgs, cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32], variant: str | None = None
    ) -> None:
        """`cos` and `sin` are `[max_context, head_dim / 2]`; `variant` None takes the best that runs here."""
        self.library = load()
        names = variants(self.library)
        if variant is not None and variant not in names:
            raise NativeError(f"the level {variant!r} does not run here: use {', '.join(names)}")
        wanted = (shape.max_context, shape.head_dim // 2)
        if cos.shape != wanted or sin.shape != wanted:
            raise NativeError(f"the rotary tables are {cos.shape} and {sin.shape} and should be {wanted}")
        self.variant = variant or names[0]
        self.shape = shape
        self._owner: NativeModel | None = None
        self._tables = (np.ascontiguousarray(cos, np.float32), np.ascontiguousarray(sin, np.float32))
        at = [table.ctypes.data for table in self._tables]
        self._handle: int | None = self.library.metrale_open(ctypes.byref(shape), names.index(self.variant), *at)
        if self._handle is None:
            raise NativeError("there is no memory for a model")
        self._raise_kept()

    def set_matrix(
        self,
        layer: int,
        name: str,
        quant: QuantType,
        blocks: npt.NDArray[np.uint8],
        cols: int,
        row_order: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Pack GGUF blocks `[rows, bytes per row]`; row `i` of the result is row `row_order[i]` of `blocks`."""
        bytes_per_row = {QuantType.Q4_0: 18, QuantType.Q4_1: 20, QuantType.Q8_0: 34}[quant] * (cols // 32)
        if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] != bytes_per_row:
            raise NativeError(f"{name}: blocks of shape {blocks.shape} do not hold rows of {cols} {quant.name} values")
        if row_order is not None and (row_order.dtype != np.int32 or row_order.shape != blocks.shape[:1]):
            raise NativeError(f"{name}: the row order of shape {row_order.shape} does not fit {blocks.shape[0]} rows")
        blocks = np.ascontiguousarray(blocks)
        order = None if row_order is None else row_order.ctypes.data
        args = MatrixArgs(layer, MATRICES.index(name), quant, blocks.shape[0], cols, blocks.ctypes.data, order)
        self._check(self.library.metrale_set_matrix(self.handle, ctypes.byref(args)))

    def set_vector(self, layer: int, name: str, values: npt.NDArray[np.float32]) -> None:
        values = np.ascontiguousarray(values, np.float32)
        slot = VECTORS.index(name)
        self._check(self.library.metrale_set_vector(self.handle, layer, slot, values.ctypes.data, values.size))

    def set_cache(self, layer: int, keys: int, values: int, block_stride: int) -> None:
        """Addresses of a layer's keys `[num_blocks, kv_heads, head_dim, block_size]` and values
        `[num_blocks, block_size, kv_heads, head_dim]`, whose blocks are contiguous and `block_stride` values apart."""
        self._check(self.library.metrale_set_cache(self.handle, layer, keys, values, block_stride))

    def borrow_threads(self, owner: NativeModel) -> None:
        """Work with the threads of `owner` instead of own ones; nothing runs here once `owner` is closed."""
        self._check(self.library.metrale_borrow_threads(self.handle, owner.handle))
        self._owner = owner

    def draft(self, target: NativeModel, first: NativeModel, again: NativeModel, args: DraftArgs) -> None:
        """Absorb rows into this one-layer model and draft from them; pointers are trusted as in `step`."""
        self._check(
            self.library.metrale_draft(self.handle, target.handle, first.handle, again.handle, ctypes.byref(args))
        )

    def step(self, args: StepArgs) -> None:
        """Run a step; pointers in `args` are trusted, every number behind them is checked."""
        self._check(self.library.metrale_step(self.handle, ctypes.byref(args)))

    def embed(self, tokens: int, count: int, out: int) -> None:
        self._check(self.library.metrale_embed(self.handle, tokens, count, out))

    def head(self, hidden: int, rows: int, logits: int) -> None:
        self._check(self.library.metrale_head(self.handle, hidden, rows, logits))

    def draw(self, plans: Sequence[DrawPlan], tokens: int) -> None:
        """One token per plan to `tokens`, int64; `logits` of each must have as many entries as the vocabulary."""
        self._check(self.library.metrale_draw(self.handle, (DrawPlan * len(plans))(*plans), len(plans), tokens))

    @property
    def handle(self) -> int:
        if self._handle is None or (self._owner is not None and self._owner._handle is None):
            raise NativeError("the model is closed")
        return self._handle

    def close(self) -> None:
        """Give all memory back; a second call does nothing."""
        if self._handle is not None:
            self.library.metrale_close(self._handle)
            self._handle = None

    def _check(self, code: int) -> None:
        if code != 0:
            raise NativeError(self.library.metrale_error(self.handle).decode())

    def _raise_kept(self) -> None:
        kept = self.library.metrale_error(self.handle).decode()
        if kept:
            self.close()
            raise NativeError(kept)
