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
from engine.model.mtp_head import DRAFT_VOCABULARY, MTPShape
from engine.model.native.library import KvType, NativeModel, QuantType, ShapeArgs, StepArgs
from engine.model.native_backend import NativeBackend

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class _Arrays:
    """What the kernels read and write, made once: the call's arguments hold the addresses and stay as they are."""

    def __init__(self, rows: int, items: int, blocks: int, hidden: int, taps: int, ids: int) -> None:
        self.rows, self.items, self.blocks = rows, items, blocks
        self.offsets, self.starts, self.last = (np.zeros(n, np.int32) for n in (items + 1, items, items))
        self.table = np.zeros(blocks, np.int32)
        self.following = np.zeros(rows, np.int64)
        self.embedded = np.zeros((rows, hidden), np.float32)
        self.fused = np.zeros((rows, (taps + 1) * hidden), np.float32)
        self.inputs, self.hidden = (np.zeros((rows, hidden), np.float32) for _ in range(2))
        self.normed = np.zeros((items, hidden), np.float32)
        self.logits = np.zeros((items, ids), np.float32)
        self.argmax = np.zeros(items, np.int64)
        self.layer = np.zeros(1, np.int32)
        at = {name: array.ctypes.data for name, array in vars(self).items() if isinstance(array, np.ndarray)}
        self.at = at
        self.args = StepArgs(
            rows, items, items, 1, 1, 0, None, at["offsets"], at["starts"], at["table"], at["last"], at["layer"],
            at["layer"], at["hidden"], at["logits"], at["argmax"], None, at["inputs"],
        )  # fmt: skip


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
        self._numbers: IntArray = self._ids.numpy()
        self._arrays = _Arrays(16, 1, 64, s.hidden_size, len(s.taps), len(self._ids))

    @property
    def taps(self) -> tuple[int, ...]:
        return self._shape.taps

    @property
    def kv(self) -> PagedKV | None:
        return self._cache

    def extend(self, rows: Sequence[HeadRows]) -> None:
        """Absorb rows without drafting."""
        self._absorb(rows, wanted=0)

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        """Draft up to each item's `count`, stopping before a draft less sure than `conf_min`."""
        runs, count, size = [item.rows for item in items], len(items), self._cache.block_size
        room = min(len(run.blocks) - run.kv_start // size for run in runs) * size
        a, width = self._absorb(runs, wanted=count)
        newest = a.hidden[a.last[:count]]
        a.starts[:count] += np.diff(a.offsets[: count + 1])  # from here on the position after the newest row
        a.offsets[: count + 1], a.last[:count] = np.arange(count + 1), np.arange(count)
        tokens, sure = [], []
        for step in range(max(item.count for item in items)):
            if step:
                if int(a.starts[:count].max()) >= room:
                    break
                self._draft_again(a, newest, count, width)
                newest = a.hidden[:count]
                a.starts[:count] += 1
            tokens.append(self._numbers[a.argmax[:count]])
            sure.append(_chance_of_best(a.logits[:count], a.argmax[:count]))
            if conf_min > 0 and bool((sure[-1] < conf_min).all()):
                break
        chains, chances = np.stack(tokens, 1).tolist(), np.stack(sure, 1).tolist()
        return cut_chains(items, chains, chances, conf_min)

    def _absorb(self, runs: Sequence[HeadRows], wanted: int) -> tuple[_Arrays, int]:
        """The block over all rows of `runs`: hidden rows of all, with `wanted` the logits of each run's last; also
        returns the width of the block tables."""
        size = self._cache.block_size
        skipped = [run.kv_start // size for run in runs]
        width = max(len(run.blocks) - skip for run, skip in zip(runs, skipped, strict=True))
        rows = sum(len(run.next_tokens) for run in runs)
        a = self._sized(rows, len(runs), width * len(runs))
        end, tables = 0, a.table[: width * len(runs)].reshape(len(runs), width)
        for i, (run, skip) in enumerate(zip(runs, skipped, strict=True)):
            a.following[end : end + len(run.next_tokens)] = run.next_tokens
            self._norm_taps(run.hidden, a.fused[end : end + len(run.next_tokens)])
            tables[i, : len(run.blocks) - skip] = run.blocks[skip:]
            tables[i, len(run.blocks) - skip :] = 0
            a.starts[i] = run.start - skip * size  # the rotation sees distances only, so positions may start anywhere
            end += len(run.next_tokens)
            a.offsets[i + 1], a.last[i] = end, end - 1
        self._backend.model.embed(a.at["following"], rows, a.at["embedded"])
        _norm(a.embedded[:rows], a.fused[:rows, -self._shape.hidden_size :], self._shape.rms_eps)
        self._first(a.fused, a.inputs, rows)
        self._step(a, rows, len(runs), wanted, width)
        return a, width

    def _draft_again(self, a: _Arrays, newest: FloatArray, count: int, width: int) -> None:
        """One more draft per item after those in `a.argmax`, from the block's own output."""
        _norm(newest, a.normed[:count], self._shape.rms_eps)
        self._again(a.normed, a.inputs, count)
        a.inputs[:count] += self._token_part[a.argmax[:count]]
        self._step(a, count, count, count, width)

    def _norm_taps(self, hidden: torch.Tensor, to: FloatArray) -> None:
        taps = hidden.numpy()
        _norm(taps, to[:, : taps.shape[1] * taps.shape[2]].reshape(taps.shape), self._shape.rms_eps)

    def _step(self, a: _Arrays, rows: int, segments: int, wanted: int, width: int) -> None:
        args = a.args
        args.rows, args.segments, args.logit_rows, args.table_width = rows, segments, wanted, width
        self._model.step(args)

    def _sized(self, rows: int, items: int, blocks: int) -> _Arrays:
        """The arrays, grown where they are too small."""
        had = self._arrays
        if rows > had.rows or items > had.items or blocks > had.blocks:
            wider = [max(old, 2 * new) for old, new in ((had.rows, rows), (had.items, items), (had.blocks, blocks))]
            self._arrays = _Arrays(*wider, self._shape.hidden_size, len(self._shape.taps), len(self._ids))
        return self._arrays

    def _set_fusion(self, tensors: dict[str, torch.Tensor], embedded: torch.Tensor) -> None:
        """Norm weights go into the matrices, and every drafted token's share of a later step is known beforehand."""
        d = self._shape.hidden_size
        norms = torch.cat((tensors["tap_norms"].flatten(), tensors["token_norm"]))
        self._first = _FewRows(tensors["first"] * norms, self._model.variant)
        self._again = _FewRows(tensors["again"][:, :d] * tensors["again_norm"], self._model.variant)
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


def _norm(x: FloatArray, to: FloatArray, eps: float) -> None:
    """Rows of `x` `[..., hidden]` over their root mean square, into `to`."""
    scale = 1.0 / np.sqrt(np.einsum("...i,...i->...", x, x) / x.shape[-1] + eps)
    np.multiply(x, scale[..., None], out=to)


def _chance_of_best(logits: FloatArray, chosen: IntArray) -> FloatArray:
    """Softmax probability of the chosen ids `[rows]`; in numpy, since a torch reduction of this size wakes its own
    threads and waits for every one of them (17 ms instead of 0.02 ms where the cores are busy)."""
    rest = logits - logits[np.arange(len(chosen)), chosen][:, None]
    np.exp(rest, out=rest)
    chances: FloatArray = 1.0 / rest.sum(1)
    return chances


class _FewRows:
    """A matrix whose products with a few rows stay on this thread: waking a pool costs more than they do."""

    _MANY = 16

    def __init__(self, matrix: torch.Tensor, variant: str) -> None:
        self._matrix = matrix.contiguous()
        shape = ShapeArgs(1, matrix.shape[1], 32, 1, 1, 32, matrix.shape[0], 1, 16, 1, KvType.F32, 1, 1e-5, 1.0)
        table = np.zeros((1, 16), np.float32)
        self._model = NativeModel(shape, table, table, variant)
        self._model.set_matrix(-1, "token_embd", QuantType.Q8_0, _q8(matrix), matrix.shape[1])

    def __call__(self, x: FloatArray, to: FloatArray, rows: int) -> None:
        """The first `rows` rows of both, which are contiguous."""
        if rows > self._MANY:
            to[:rows] = functional.linear(torch.from_numpy(x[:rows]), self._matrix).numpy()
        else:
            self._model.head(x.ctypes.data, rows, to.ctypes.data)


def _q8(matrix: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = quantize(
        matrix.contiguous().numpy(), GGMLQuantizationType.Q8_0
    )
    return blocks


def _head_rows(backend: NativeBackend, ids: torch.Tensor) -> torch.Tensor:
    return backend.lm_head(torch.eye(backend.config.hidden_size))[:, ids].t().contiguous()
