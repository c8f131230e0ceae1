"""What a decoder looks like, read from GGUF metadata or a Hugging Face `config.json` before any weight."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
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

_MAX_COUNT = 1 << 22
"""No dimension of a decoder that anyone runs is larger; a larger number is a damaged header."""


class ModelFileError(ValueError):
    """A model file that cannot be used; the text is one sentence that says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was trained on."""

    kind: str
    """`linear`, `llama3`, or `factors` where the file carries one divisor per frequency (GGUF of Llama 3)."""
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
    """No longer than a sliding window: up to its width windowed and full attention are the same."""
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    interleaved_qk: bool = False
    """The file stores q and k rows for the rotation of neighbouring pairs (GGUF of the llama architecture); loading
    undoes that order, so that the decoder always rotates halves."""

    def __post_init__(self) -> None:
        for field in _COUNTS:
            value = getattr(self, field)
            if not isinstance(value, int) or not 1 <= value <= _MAX_COUNT:
                raise ModelFileError(
                    f"the model's {field} is {value!r}, outside 1..{_MAX_COUNT}: the file is damaged; fetch it again"
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads: the file is damaged; "
                "fetch it again"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"head size {self.head_dim} is odd and cannot be rotated: use another model")
        if not (math.isfinite(self.rms_eps) and 0 <= self.rms_eps < 1):
            raise ModelFileError(f"the norm epsilon {self.rms_eps} is not in 0..1: fetch the file again")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ModelFileError(f"the rope base {self.rope_theta} is not above 0: fetch the file again")

    @property
    def key(self) -> str:
        """Short hash of everything that shapes the network; its name and its context are not part of it."""
        shape = asdict(self)
        for free in ("name", "max_context", "interleaved_qk"):
            del shape[free]
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_context",
)


def config_from_gguf(metadata: Mapping[str, Any], tensors: Collection[str], name: str) -> ModelConfig:
    """The config of a GGUF file with these metadata and tensor names; `name` where the file states none."""
    arch = metadata.get("general.architecture")
    if arch not in ("llama", "qwen2", "qwen3"):
        raise _unsupported_architecture(arch)
    read = _Fields(metadata, f"{arch}.")
    if read.optional("expert_count", 0):
        raise ModelFileError(
            f"{arch} with {read.optional('expert_count', 0)} experts is a mixture of experts, which is not "
            f"supported: use a dense model of {', '.join(ARCHITECTURES)}"
        )
    heads = read.count("attention.head_count")
    head_dim = read.optional("attention.key_length", 0) or read.count("embedding_length") // max(heads, 1)
    rotated = read.optional("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelFileError(
            f"only {rotated} of {head_dim} head dimensions are rotated, which is not supported: use another model"
        )
    window = read.optional("attention.sliding_window", 0)
    context = read.count("context_length")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab = read.optional("vocab_size", 0) or (len(tokens) if isinstance(tokens, list) else 0)
    return ModelConfig(
        architecture=str(arch),
        name=str(metadata.get("general.name") or name),
        vocab_size=vocab,
        hidden_size=read.count("embedding_length"),
        intermediate_size=read.count("feed_forward_length"),
        num_layers=read.count("block_count"),
        num_heads=heads,
        num_kv_heads=read.optional("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=min(context, window) if window else context,
        rms_eps=read.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=read.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(read, tensors),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied_embeddings="output.weight" not in tensors,
        interleaved_qk=arch == "llama",
    )


def config_from_hf(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """The config of a Hugging Face directory whose `config.json` says `raw`."""
    stated = raw.get("architectures")
    class_name = stated[0] if isinstance(stated, list) and stated else None
    arch = _HF_ARCHITECTURES.get(str(class_name)) if class_name else raw.get("model_type")
    if arch not in ARCHITECTURES:
        raise _unsupported_architecture(class_name or raw.get("model_type"))
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "unknown")
        raise ModelFileError(
            f"quantisation {method!r} of Hugging Face weights is not supported: "
            "use the unquantised model or a GGUF file"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFileError(f"activation {activation!r} is not supported, only silu: use another model")
    read = _Fields(raw, "")
    heads = read.count("num_attention_heads")
    context = read.count("max_position_embeddings")
    window = read.optional("sliding_window", 0) if raw.get("use_sliding_window", arch == "mistral") else 0
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return ModelConfig(
        architecture=str(arch),
        name=name,
        vocab_size=read.count("vocab_size"),
        hidden_size=read.count("hidden_size"),
        intermediate_size=read.count("intermediate_size"),
        num_layers=read.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.optional("num_key_value_heads", heads),
        head_dim=read.optional("head_dim", 0) or read.count("hidden_size") // max(heads, 1),
        max_context=min(context, window) if window else context,
        rms_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=_Fields(rope, "").number("rope_theta", read.number("rope_theta", 10000.0)),
        rope_scaling=_hf_scaling(rope, context),
        qkv_bias=bool(raw.get("attention_bias", False)) or arch == "qwen2",
        output_bias=bool(raw.get("attention_bias", False)) and arch != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=arch == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def read_hf_config(directory: Path) -> ModelConfig:
    """Parse `config.json` of a Hugging Face directory."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(
            f"{directory} has no config.json: give a Hugging Face model directory or a GGUF file"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFileError(f"{path} cannot be read ({error}): fetch the model again") from None
    if not isinstance(raw, dict):
        raise ModelFileError(f"{path} holds no JSON object: fetch the model again")
    return config_from_hf(raw, directory.resolve().name)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to untrusted metadata."""

    raw: Mapping[str, Any]
    prefix: str

    def count(self, key: str) -> int:
        value = self.raw.get(self.prefix + key)
        if value is None:
            raise ModelFileError(f"the model states no {self.prefix + key}: the file is incomplete; fetch it again")
        return self._int(key, value)

    def optional(self, key: str, default: int) -> int:
        value = self.raw.get(self.prefix + key)
        return default if value is None else self._int(key, value)

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(self.prefix + key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(f"{self.prefix + key} is {value!r} and not a number: fetch the file again")
        return float(value)

    def _int(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT * 64:
            shown = repr(value)[:60]
            raise ModelFileError(f"{self.prefix + key} is {shown} and not a usable count: fetch the file again")
        return value


def _gguf_scaling(read: _Fields, tensors: Collection[str]) -> RopeScaling | None:
    if "rope_freqs.weight" in tensors:
        return RopeScaling("factors")
    kind = read.raw.get(read.prefix + "rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise _unsupported_scaling(kind)
    return RopeScaling("linear", factor=_positive(read.number("rope.scaling.factor", 1.0)))


def _hf_scaling(rope: Mapping[str, Any], context: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    read = _Fields(rope, "")
    factor = _positive(read.number("factor", 1.0))
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    if kind != "llama3":
        raise _unsupported_scaling(kind)
    low, high = read.number("low_freq_factor", 1.0), read.number("high_freq_factor", 4.0)
    if not 0 < low < high:
        raise ModelFileError(f"llama3 rope factors {low} and {high} are not rising: fetch the file again")
    return RopeScaling("llama3", factor, low, high, read.optional("original_max_position_embeddings", context))


def _positive(factor: float) -> float:
    if not (math.isfinite(factor) and factor > 0):
        raise ModelFileError(f"the rope scaling factor {factor} is not above 0: fetch the file again")
    return factor


def _unsupported_scaling(kind: object) -> ModelFileError:
    return ModelFileError(f"rope scaling {kind!r} is not supported, only linear and llama3: use another model")


def _unsupported_architecture(arch: object) -> ModelFileError:
    return ModelFileError(
        f"architecture {arch!r} is not supported: use a model of {', '.join(ARCHITECTURES[:-1])} or {ARCHITECTURES[-1]}"
    )
