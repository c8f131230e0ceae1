"""The MTP head on the compiled CPU path: its block is a model of one layer whose rows are given, not looked up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch.nn import functional

from engine.core.device import Draft, DrafterName
from engine.model.head_file import HeadFile
from engine.model.head_memory import drafts_of
from engine.model.heads import HeadItem, HeadRows
from engine.model.kv import PagedKV
from engine.model.load import rope_frequencies
from engine.model.mtp_head import DRAFT_VOCABULARY, MTPShape
from engine.model.native.library import KvType, NativeModel, QuantType, ShapeArgs, StepArgs
from engine.model.native_backend import NativeBackend


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of a call lie. Positions count from the first block that a sequence's head has no hole in: the
    rotation sees distances only, and the kernels read everything from position 0."""

    offsets: np.ndarray[tuple[int], np.dtype[np.int32]]
    starts: np.ndarray[tuple[int], np.dtype[np.int32]]
    tables: np.ndarray[tuple[int, int], np.dtype[np.int32]]


class NativeMTPHead:
    """Implements `engine.model.heads.DraftHead` beside a `NativeBackend`."""

    drafter = DrafterName.MTP

    def __init__(self, backend: NativeBackend, file: HeadFile, ids: int = DRAFT_VOCABULARY) -> None:
        self._shape = MTPShape(**{**file.shape, "taps": tuple(file.shape["taps"])})
        self._backend, config, target = backend, backend.config, backend.kv
        self._ids = file.vocab_ids[:ids]
        s = self._shape
        self._cache = PagedKV(1, target.num_blocks, target.block_size, s.num_kv_heads, s.head_dim, torch.float16)
        shape = ShapeArgs(
            1, s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads, s.head_dim, len(self._ids),
            config.max_context, target.block_size, target.num_blocks, KvType.F16, backend.model.shape.threads,
            s.rms_eps, 1.0 / math.sqrt(s.head_dim),
        )  # fmt: skip
        angles = torch.outer(torch.arange(config.max_context, dtype=torch.float32), rope_frequencies(config))
        self._model = NativeModel(shape, angles.cos().numpy(), angles.sin().numpy(), backend.model.variant)
        self._model.set_cache(0, self._cache.keys[0].data_ptr(), self._cache.values[0].data_ptr())
        embedded = backend.embed(self._ids)
        self._fill(file.tensors, embedded if config.tied_embeddings else _head_rows(backend, self._ids))
        self._set_fusion(file.tensors, embedded)
        self._layers = np.zeros(1, np.int32)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._shape.taps

    @property
    def kv(self) -> PagedKV | None:
        return self._cache

    def extend(self, rows: Sequence[HeadRows]) -> None:
        """Absorb rows without drafting."""
        self._step(self._fused(rows), self._places(rows), np.zeros(0, np.int32))

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        """Draft up to each item's `count`, stopping before a draft less sure than `conf_min`."""
        runs = [item.rows for item in items]
        places = self._places(runs)
        last = places.offsets[1:] - 1
        hidden, logits, index = self._step(self._fused(runs), places, last)
        hidden = hidden[torch.from_numpy(last).long()]
        ends = places.starts + np.diff(places.offsets)
        one_each = np.arange(len(items) + 1, dtype=np.int32)
        size = self._cache.block_size
        room = min(len(run.blocks) - run.kv_start // size for run in runs) * size  # positions count like `ends`
        tokens, sure = [], []
        for step in range(max(item.count for item in items)):
            if step:
                if int(ends.max()) + step > room:
                    break
                x = self._again(self._plain_norm(hidden)) + self._token_part[index]
                hidden, logits, index = self._step(
                    x, _Places(one_each, (ends + step - 1).astype(np.int32), places.tables), one_each[:-1]
                )
            tokens.append(self._ids[index])
            sure.append(_chance_of_best(logits, index))
            if bool((sure[-1] < conf_min).all()):
                break
        return drafts_of(items, tokens, sure, conf_min)

    def _fused(self, rows: Sequence[HeadRows]) -> torch.Tensor:
        """Inputs of the block for absorbed rows, `[rows, hidden]`."""
        hidden = rows[0].hidden if len(rows) == 1 else torch.cat([run.hidden for run in rows])
        following = torch.tensor([token for run in rows for token in run.next_tokens])
        taps = self._plain_norm(hidden.float()).flatten(1)
        return self._first(torch.cat((taps, self._plain_norm(self._backend.embed(following))), 1))

    def _places(self, rows: Sequence[HeadRows]) -> _Places:
        size = self._cache.block_size
        first = [run.kv_start // size for run in rows]
        width = max(len(run.blocks) - skip for run, skip in zip(rows, first, strict=True))
        tables = np.zeros((len(rows), width), np.int32)
        for table, run, skip in zip(tables, rows, first, strict=True):
            table[: len(run.blocks) - skip] = run.blocks[skip:]
        starts = [run.start - skip * size for run, skip in zip(rows, first, strict=True)]
        offsets = np.cumsum([0, *(run.hidden.shape[0] for run in rows)])
        return _Places(offsets.astype(np.int32), np.array(starts, np.int32), tables)

    def _step(
        self, inputs: torch.Tensor, places: _Places, wanted: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block over `inputs` `[rows, hidden]`: its output for all, logits and argmax for the wanted rows."""
        rows, count = inputs.shape[0], len(wanted)
        hidden = torch.empty(rows, self._shape.hidden_size)
        logits, argmax = torch.empty(count, len(self._ids)), torch.empty(count, dtype=torch.int64)
        inputs, wanted = inputs.contiguous(), np.ascontiguousarray(wanted)
        self._model.step(
            StepArgs(
                rows, len(places.starts), count, 1, 1, places.tables.shape[1], None, places.offsets.ctypes.data,
                places.starts.ctypes.data, places.tables.ctypes.data, wanted.ctypes.data, self._layers.ctypes.data,
                self._layers.ctypes.data, hidden.data_ptr(), logits.data_ptr(), argmax.data_ptr(), None,
                inputs.data_ptr(),
            )
        )  # fmt: skip
        return hidden, logits, argmax

    def _plain_norm(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numpy()
        scale = 1.0 / np.sqrt(np.square(rows).mean(-1, keepdims=True) + self._shape.rms_eps)
        return torch.from_numpy(rows * scale)

    def _set_fusion(self, tensors: dict[str, torch.Tensor], embedded: torch.Tensor) -> None:
        """Norm weights go into the matrices, and every drafted token's share of a later step is known beforehand."""
        d = self._shape.hidden_size
        norms = torch.cat((tensors["tap_norms"].flatten(), tensors["token_norm"]))
        self._first = _FewRows(tensors["first"] * norms, self._model.variant)
        self._again = _FewRows(tensors["again"][:, :d] * tensors["again_norm"], self._model.variant)
        self._token_part = self._plain_norm(embedded) @ (tensors["again"][:, d:] * tensors["token_norm"]).t()

    def _fill(self, tensors: dict[str, torch.Tensor], rows: torch.Tensor) -> None:
        s = self._shape
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        parts = dict(zip(("attn_q", "attn_k", "attn_v"), tensors["qkv_weight"].split((q, kv, kv)), strict=True))
        parts |= dict(zip(("ffn_gate", "ffn_up"), tensors["gate_up"].chunk(2), strict=True))
        parts |= {"attn_output": tensors["out"], "ffn_down": tensors["down"]}
        self._model.set_vector(0, "attn_norm.weight", tensors["attn_norm"].numpy())
        self._model.set_vector(0, "ffn_norm.weight", tensors["ffn_norm"].numpy())
        self._model.set_vector(-1, "output_norm.weight", tensors["final_norm"].numpy())
        matrices = {name: (0, matrix) for name, matrix in parts.items()} | {"token_embd": (-1, rows)}
        for name, (layer, matrix) in matrices.items():
            self._model.set_matrix(layer, name, QuantType.Q8_0, _q8(matrix), matrix.shape[1])


def _chance_of_best(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Softmax probability of the chosen ids `[rows]`; in numpy, since a torch reduction of this size wakes its own
    threads and waits for every one of them (17 ms instead of 0.02 ms where the cores are busy)."""
    rows = logits.numpy()
    best = rows[np.arange(len(rows)), index.numpy()]
    return torch.from_numpy(1.0 / np.exp(rows - best[:, None]).sum(1))


class _FewRows:
    """A matrix whose products with a few rows stay on this thread: waking a pool costs more than they do."""

    _MANY = 16

    def __init__(self, matrix: torch.Tensor, variant: str) -> None:
        self._matrix = matrix.contiguous()
        shape = ShapeArgs(1, matrix.shape[1], 32, 1, 1, 32, matrix.shape[0], 1, 16, 1, KvType.F32, 1, 1e-5, 1.0)
        table = np.zeros((1, 16), np.float32)
        self._model = NativeModel(shape, table, table, variant)
        self._model.set_matrix(-1, "token_embd", QuantType.Q8_0, _q8(matrix), matrix.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self._MANY:
            return functional.linear(x, self._matrix)
        x = x.contiguous()
        out = torch.empty(x.shape[0], self._matrix.shape[0])
        self._model.head(x.data_ptr(), x.shape[0], out.data_ptr())
        return out


def _q8(matrix: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = quantize(
        matrix.contiguous().numpy(), GGMLQuantizationType.Q8_0
    )
    return blocks


def _head_rows(backend: NativeBackend, ids: torch.Tensor) -> torch.Tensor:
    return backend.lm_head(torch.eye(backend.config.hidden_size))[:, ids].t().contiguous()
