"""The MTP head on the compiled CPU path: its block is a model of one layer whose rows are given, not looked up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch.nn import functional

from engine.core.device import Draft, DrafterName
from engine.model.head_file import HeadFile
from engine.model.head_memory import cut_chains
from engine.model.heads import HeadItem, HeadRows
from engine.model.kv import PagedKV
from engine.model.load import rope_frequencies
from engine.model.mtp_head import MTPShape
from engine.model.native.library import DraftArgs, KvType, NativeModel, QuantType, ShapeArgs, StepArgs
from engine.model.native_backend import WIDE_ABOVE, NativeBackend

NATIVE_VOCABULARY = 8_192
"""Ids drafted from on a CPU, where reading their rows is half of a draft: three drafts of 16,384, 8,192 and 4,096 ids
accept 1.36, 1.31 and 1.19 tokens, and a pass takes .36, .25 and .19 ms beside other work (14 dev prompts)."""
FUSED_ROWS = 128
"""Rows that the kernels put together at a time; `kFusedRows` there."""

FloatArray = npt.NDArray[np.float32]


class _Arrays:
    """What the kernels read and write, made once: the call's arguments hold the addresses and stay as they are."""

    def __init__(self, sizes: Sequence[int], shape: MTPShape, token_part: FloatArray) -> None:
        """`sizes`: rows, items, blocks of all tables, drafts."""
        hidden, taps = shape.hidden_size, len(shape.taps)
        self.sizes = tuple(sizes)
        rows, items, blocks, drafts = sizes
        self.offsets, self.starts, self.newest = (np.zeros(n, np.int32) for n in (items + 1, items, items))
        self.tables, self.layer = np.zeros(blocks, np.int32), np.zeros(1, np.int32)
        self.following, self.argmax = np.zeros(rows, np.int64), np.zeros(items, np.int64)
        self.fused = np.zeros((max(min(rows, FUSED_ROWS), items), (taps + 1) * hidden), np.float32)
        self.inputs, self.hidden = (np.zeros((n, hidden), np.float32) for n in (rows, items))
        self.logits = np.zeros((items, len(token_part)), np.float32)
        self.drafted, self.chances = np.zeros(drafts * items, np.int64), np.zeros(drafts * items, np.float32)
        at = {name: array.ctypes.data for name, array in vars(self).items() if isinstance(array, np.ndarray)}
        step = StepArgs(
            rows, items, items, 1, 1, 0, at["following"], at["offsets"], at["starts"], at["tables"], at["newest"],
            at["layer"], at["layer"], at["hidden"], at["logits"], at["argmax"], None, at["inputs"],
        )  # fmt: skip
        self.args = DraftArgs(
            step, taps, drafts, 0.0, 0, None, token_part.ctypes.data, at["fused"], at["inputs"], at["offsets"],
            at["starts"], at["newest"], at["drafted"], at["chances"],
        )  # fmt: skip


class NativeMTPHead:
    """Implements `engine.model.heads.DraftHead` beside a `NativeBackend`."""

    drafter = DrafterName.MTP
    is_compiled = True

    def __init__(self, backend: NativeBackend, file: HeadFile, ids: int = NATIVE_VOCABULARY) -> None:
        self._shape = MTPShape(**{**file.shape, "taps": tuple(file.shape["taps"])})
        self._backend, config, target = backend, backend.config, backend.kv
        self._ids = file.vocab_ids[:ids]
        s = self._shape
        self._cache = PagedKV(1, target.num_blocks, target.block_size, s.num_kv_heads, s.head_dim, torch.float16)
        shape = ShapeArgs(
            1, s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads, s.head_dim, len(self._ids),
            config.max_context, target.block_size, target.num_blocks, KvType.F16, backend.model.shape.threads,
            s.rms_eps, 1.0 / math.sqrt(s.head_dim), WIDE_ABOVE,
        )  # fmt: skip
        angles = torch.outer(torch.arange(config.max_context, dtype=torch.float32), rope_frequencies(config))
        self._model = NativeModel(shape, angles.cos().numpy(), angles.sin().numpy(), backend.model.variant)
        self._model.borrow_threads(backend.model)
        keys, values = self._cache.keys[0], self._cache.values[0]
        self._model.set_cache(0, keys.data_ptr(), values.data_ptr(), keys.stride(0))
        embedded = backend.embed(self._ids)
        self._fill(file.tensors, embedded if config.tied_embeddings else _head_rows(backend, self._ids))
        self._set_fusion(file.tensors, embedded)
        self._numbers: list[int] = self._ids.tolist()
        self._arrays = _Arrays((16, 1, 64, 8), s, self._token_part)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._shape.taps

    @property
    def kv(self) -> PagedKV | None:
        return self._cache

    def extend(self, rows: Sequence[HeadRows]) -> None:
        """Absorb rows without drafting."""
        self._draft(rows, 0, 0.0)

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        """Draft up to each item's `count`, stopping before a draft less sure than `conf_min`."""
        runs, size = [item.rows for item in items], self._cache.block_size
        room = min(len(run.blocks) * size - run.start - len(run.next_tokens) for run in runs)
        a = self._draft(runs, min(max(item.count for item in items), room + 1), conf_min)
        made, count = a.args.made, len(items)
        ids, sure = a.drafted[: made * count].tolist(), a.chances[: made * count].tolist()
        tokens = [self._numbers[i] for i in ids]
        return cut_chains(
            items, [tokens[i::count] for i in range(count)], [sure[i::count] for i in range(count)], conf_min
        )

    def _draft(self, runs: Sequence[HeadRows], drafts: int, chance_min: float) -> _Arrays:
        """Absorb `runs` and draft from the newest row of each."""
        size = self._cache.block_size
        skipped = [run.kv_start // size for run in runs]
        width = max(len(run.blocks) - skip for run, skip in zip(runs, skipped, strict=True))
        rows = sum(len(run.next_tokens) for run in runs)
        a = self._sized(rows, len(runs), width * len(runs), drafts)
        end = at = 0
        for i, (run, skip) in enumerate(zip(runs, skipped, strict=True)):
            used = len(run.blocks) - skip
            a.tables[at : at + used] = run.blocks[skip:]
            a.tables[at + used : at + width] = 0
            a.following[end : end + len(run.next_tokens)] = run.next_tokens
            a.starts[i] = run.start - skip * size  # the rotation sees distances only, so positions may start anywhere
            end, at = end + len(run.next_tokens), at + width
            a.offsets[i + 1], a.newest[i] = end, end - 1
        hidden = (runs[0].hidden if len(runs) == 1 else torch.cat([run.hidden for run in runs])).float().contiguous()
        args, step = a.args, a.args.step
        args.tap_rows, args.drafts, args.chance_min = hidden.data_ptr(), drafts, chance_min
        step.rows, step.segments, step.table_width = rows, len(runs), width
        step.logit_rows = len(runs) if drafts else 0
        self._model.draft(self._backend.model, self._first, self._again, args)
        return a

    def _sized(self, *wanted: int) -> _Arrays:
        """The arrays for rows, items, blocks and drafts, grown where they are too small."""
        had = self._arrays.sizes
        if any(new > old for new, old in zip(wanted, had, strict=True)):
            sizes = [old if new <= old else 2 * new for new, old in zip(wanted, had, strict=True)]
            self._arrays = _Arrays(sizes, self._shape, self._token_part)
        return self._arrays

    def _set_fusion(self, tensors: dict[str, torch.Tensor], embedded: torch.Tensor) -> None:
        """Norm weights go into the matrices, and every drafted token's share of a later step is known beforehand."""
        d = self._shape.hidden_size
        norms = torch.cat((tensors["tap_norms"].flatten(), tensors["token_norm"]))
        self._first = _matrix(tensors["first"] * norms, self._backend.model)
        self._again = _matrix(tensors["again"][:, :d] * tensors["again_norm"], self._backend.model)
        normed = functional.rms_norm(embedded, (d,), None, self._shape.rms_eps)
        self._token_part: FloatArray = (normed @ (tensors["again"][:, d:] * tensors["token_norm"]).t()).numpy()

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


def _matrix(matrix: torch.Tensor, target: NativeModel) -> NativeModel:
    """A model that is nothing but this matrix `[out, in]`, as its head."""
    shape = ShapeArgs(1, matrix.shape[1], 32, 1, 1, 32, matrix.shape[0], 1, 16, 1, KvType.F32, 1, 1e-5, 1.0, WIDE_ABOVE)
    table = np.zeros((1, 16), np.float32)
    model = NativeModel(shape, table, table, target.variant)
    model.set_matrix(-1, "token_embd", QuantType.Q8_0, _q8(matrix), matrix.shape[1])
    model.borrow_threads(target)
    return model


def _q8(matrix: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = quantize(
        matrix.contiguous().numpy(), GGMLQuantizationType.Q8_0
    )
    return blocks


def _head_rows(backend: NativeBackend, ids: torch.Tensor) -> torch.Tensor:
    return backend.lm_head(torch.eye(backend.config.hidden_size))[:, ids].t().contiguous()
