"""What a decoder looks like, read from GGUF metadata or a Hugging Face `config.json` before any weight."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that the decoder runs."""

_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_MAX_COUNT = 1 << 20
"""No dimension of a decoder that anyone runs is larger; a larger number is a damaged header."""


class ModelFileError(ValueError):
    """A model file that cannot be used; the text is one sentence that says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was trained on."""

    kind: str
    """`linear`, `llama3` or `factors`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama, Mistral, Qwen2 or Qwen3 family."""

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    interleaved_qk: bool = False
    """The file stores q and k rows for rotation of neighbouring pairs (GGUF of the llama architecture); loading
    undoes that order, so the decoder always rotates halves."""

    @property
    def key(self) -> str:
        """Short hash of everything that shapes the network; its name and its context are not part of it."""
        shape = asdict(self)
        for free in ("name", "max_context", "interleaved_qk"):
            del shape[free]
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
