"""A random decoder small enough to run in a millisecond, written as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 96, 64, 96, 3, 4, 2, 256
HEAD_DIM = HIDDEN // HEADS


def write_tiny_gguf(
    path: Path,
    arch: str = "llama",
    *,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write a tiny model of `arch`; matrices are stored as `quant`, norms and biases as F32."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(f"tiny {arch}")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    if tokenizer:
        _add_tokenizer(writer)
    for key, value in (extra or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, values in tiny_tensors(arch, seed).items():
        kind = quant if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tensors(arch: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights with enough spread that greedy replies do not settle on one token."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * columns**-0.5 * 1.5).astype(np.float32)

    def vector(size: int, around: float) -> np.ndarray:
        return (around + 0.1 * rng.standard_normal(size)).astype(np.float32)

    kv = KV_HEADS * HEAD_DIM
    tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN) * 4, "output_norm.weight": vector(HIDDEN, 1.0)}
    tensors["output.weight"] = matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        tensors[f"{at}attn_norm.weight"] = vector(HIDDEN, 1.0)
        tensors[f"{at}ffn_norm.weight"] = vector(HIDDEN, 1.0)
        for part, rows in (("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv)):
            tensors[f"{at}{part}.weight"] = matrix(rows, HIDDEN)
            if arch == "qwen2":
                tensors[f"{at}{part}.bias"] = vector(rows, 0.0)
        if arch == "qwen3":
            tensors[f"{at}attn_q_norm.weight"] = vector(HEAD_DIM, 1.0)
            tensors[f"{at}attn_k_norm.weight"] = vector(HEAD_DIM, 1.0)
        tensors[f"{at}attn_output.weight"] = matrix(HIDDEN, HIDDEN)
        tensors[f"{at}ffn_gate.weight"] = matrix(FFN, HIDDEN)
        tensors[f"{at}ffn_up.weight"] = matrix(FFN, HIDDEN)
        tensors[f"{at}ffn_down.weight"] = matrix(HIDDEN, FFN)
    return tensors


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Byte tokens of printable ASCII and one control token are enough to encode and decode plain text."""
    tokens = [chr(code) for code in range(0x22, 0x7F)] + ["Ġ", "th", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(tokens) - 1)
