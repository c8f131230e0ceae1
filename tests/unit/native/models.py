"""Tiny random quantised models and a plain numpy decoder that says what they should compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from engine.model.backend import Backend, Batch, Output
from engine.model.gguf import GGUFFile
from engine.model.kv import PagedKV
from engine.model.native_backend import WIDE_ABOVE, NativeBackend

Floats = npt.NDArray[np.float32]
BLOCK_SIZE, NUM_BLOCKS = 16, 48


@dataclass(frozen=True, slots=True)
class Shape:
    arch: str = "llama"
    kind: Kind = Kind.Q4_1
    head_kind: Kind = Kind.Q8_0
    hidden: int = 96
    ffn: int = 160
    layers: int = 2
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 32
    vocab: int = 101
    tied: bool = True
    context: int = 512


def write_model(path: Path, shape: Shape, seed: int = 0) -> Path:
    """A GGUF file of random weights; norms and biases are F32."""
    writer = gguf.GGUFWriter(str(path), shape.arch)
    writer.add_name("tiny")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocab)
    for name, values in _tensors(shape, np.random.default_rng(seed)).items():
        big = name in ("token_embd.weight", "output.weight")
        kind = Kind.F32 if values.ndim == 1 else shape.head_kind if big else shape.kind
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(shape: Shape, rng: np.random.Generator) -> dict[str, Floats]:
    def matrix(rows: int, cols: int, scale: float = 1.5) -> Floats:
        return (rng.standard_normal((rows, cols)) * scale * cols**-0.5).astype(np.float32)

    def vector(size: int, around: float) -> Floats:
        return (around + 0.2 * rng.standard_normal(size)).astype(np.float32)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {
        "token_embd.weight": matrix(shape.vocab, shape.hidden, 8.0),
        "output_norm.weight": vector(shape.hidden, 1.0),
    }
    if not shape.tied:
        tensors["output.weight"] = matrix(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        for part in ("attn_norm", "ffn_norm"):
            tensors[f"{at}{part}.weight"] = vector(shape.hidden, 1.0)
        for part, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            tensors[f"{at}{part}.weight"] = matrix(rows, shape.hidden)
            if shape.arch == "qwen2":
                tensors[f"{at}{part}.bias"] = vector(rows, 0.0)
        if shape.arch == "qwen3":
            tensors[f"{at}attn_q_norm.weight"] = vector(shape.head_dim, 1.0)
            tensors[f"{at}attn_k_norm.weight"] = vector(shape.head_dim, 1.0)
        tensors[f"{at}attn_output.weight"] = matrix(shape.hidden, q)
        tensors[f"{at}ffn_gate.weight"] = matrix(shape.ffn, shape.hidden)
        tensors[f"{at}ffn_up.weight"] = matrix(shape.ffn, shape.hidden)
        tensors[f"{at}ffn_down.weight"] = matrix(shape.hidden, shape.ffn)
    return tensors


def open_native(
    path: Path,
    threads: int = 1,
    variant: str | None = None,
    kv_dtype: torch.dtype = torch.float32,
    wide_above: float = WIDE_ABOVE,
    by_block: bool = True,
) -> NativeBackend:
    file = GGUFFile(path)
    config = file.config()
    block = (BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv = PagedKV(config.num_layers, NUM_BLOCKS, *block, kv_dtype, by_block=by_block)
    return NativeBackend(config, file, kv, threads, variant, wide_above)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence in a batch; its blocks begin at `first_block`, every other block of the pool."""

    tokens: list[int]
    start: int = 0
    first_block: int = 0


def run(backend: Backend, *pieces: Piece, greedy: bool = False, **more: tuple[int, ...]) -> Output:
    """Run pieces as one batch, with logits of every row unless `logit_rows` says otherwise."""
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece.tokens))
    width = max(-(-(p.start + len(p.tokens)) // BLOCK_SIZE) for p in pieces)
    tables = [[(p.first_block + 2 * i) % NUM_BLOCKS for i in range(width)] for p in pieces]
    return backend.run(
        Batch(
            tokens=torch.tensor([token for piece in pieces for token in piece.tokens]),
            positions=torch.tensor([p.start + i for p in pieces for i in range(len(p.tokens))]),
            row_offsets=tuple(offsets),
            starts=tuple(piece.start for piece in pieces),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            logit_rows=more.get("logit_rows", tuple(range(offsets[-1]))),
            greedy=greedy,
            taps=more.get("taps", ()),
            layers=more.get("layers"),
        )
    )


def tokens_of(count: int, vocab: int = 101, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


class NumpyDecoder:
    """The decoder in float32, one whole sequence at a time, straight from the dequantised file."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.config = self.file.config()

    def logits(self, tokens: list[int]) -> tuple[Floats, list[Floats]]:
        """Logits `[len(tokens), vocab]` and the residual stream after every layer."""
        x = self.file.dequantize("token_embd.weight")[tokens]
        after = []
        for layer in range(self.config.num_layers):
            at = f"blk.{layer}."
            x = x + self._attention(self._norm(x, f"{at}attn_norm.weight"), at)
            h = self._norm(x, f"{at}ffn_norm.weight")
            gate = self._linear(h, f"{at}ffn_gate")
            x = x + self._linear(gate / (1 + np.exp(-gate)) * self._linear(h, f"{at}ffn_up"), f"{at}ffn_down")
            after.append(x)
        head = "token_embd" if self.config.tied_embeddings else "output"
        return self._linear(self._norm(x, "output_norm.weight"), head), after

    def _attention(self, x: Floats, at: str) -> Floats:
        c = self.config
        q = self._heads(self._linear(x, f"{at}attn_q"), c.num_heads, f"{at}attn_q_norm.weight")
        k = self._heads(self._linear(x, f"{at}attn_k"), c.num_kv_heads, f"{at}attn_k_norm.weight")
        v = self._linear(x, f"{at}attn_v").reshape(len(x), c.num_kv_heads, c.head_dim)
        k, v = (np.repeat(part, c.num_heads // c.num_kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(c.head_dim)
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
        return self._linear(mixed.astype(np.float32), f"{at}attn_output")

    def _heads(self, x: Floats, heads: int, norm: str) -> Floats:
        c = self.config
        x = x.reshape(len(x), heads, c.head_dim)
        if c.interleaved_qk:
            x = x.reshape(len(x), heads, -1, 2).transpose(0, 1, 3, 2).reshape(x.shape)
        if norm in self.file.tensors:
            x = self._norm(x, norm)
        half = c.head_dim // 2
        angle = np.outer(np.arange(len(x)), c.rope_theta ** (-np.arange(half) / half))[:, None]
        a, b = x[..., :half], x[..., half:]
        turned = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
        return np.concatenate(turned, -1).astype(np.float32)

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_eps)
        return (x * scale * self.file.dequantize(name)).astype(np.float32)

    def _linear(self, x: Floats, name: str) -> Floats:
        out = x @ self.file.dequantize(f"{name}.weight").T
        return out + self.file.dequantize(f"{name}.bias") if f"{name}.bias" in self.file.tensors else out
