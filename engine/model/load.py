"""Weights of one decoder as torch tensors, out of a GGUF file or a Hugging Face directory."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.model.backend import Progress
from engine.model.config import ModelConfig, ModelFileError, RopeScaling, read_hf_config
from engine.model.gguf import GGUFFile

_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HF_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices are `[out, in]`, projections that share an input are stacked."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    """`[(heads + 2 * kv_heads) * head_dim, hidden]`: q, then k, then v."""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    """`[2 * intermediate, hidden]`: gate, then up."""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor
    """`[vocab, hidden]`."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    """`[vocab, hidden]`; the embedding itself where the model ties them."""
    inverse_frequencies: torch.Tensor
    """float32 `[head_dim / 2]`, rope scaling applied."""


class WeightSource(Protocol):
    """Tensors by their GGUF names (`blk.0.attn_q.weight`), whatever the file calls them."""

    @property
    def config(self) -> ModelConfig: ...

    def sizes(self) -> dict[str, int]:
        """Stored bytes per tensor."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """The tensor in the order that the decoder wants, float32 or its stored float type."""
        ...

    def close(self) -> None: ...


def open_source(path: Path) -> WeightSource:
    """A GGUF file or a Hugging Face directory, headers checked and nothing big read."""
    return HFSource(path) if path.is_dir() else GGUFSource(path)


class GGUFSource:
    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self.config = self._file.config()

    def sizes(self) -> dict[str, int]:
        return {name: info.nbytes for name, info in self._file.tensors.items()}

    def load(self, name: str) -> torch.Tensor:
        tensor = torch.from_numpy(self._file.dequantize(name))
        if self.config.interleaved_qk and ".attn_q." in name:
            return deinterleave(tensor, self.config.num_heads)
        if self.config.interleaved_qk and ".attn_k." in name:
            return deinterleave(tensor, self.config.num_kv_heads)
        return tensor

    def close(self) -> None:
        """The mapping ends with the last view on it."""


class HFSource:
    """Safetensors of one file or of several with an index."""

    def __init__(self, directory: Path) -> None:
        self.config = read_hf_config(directory)
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        for shard in self._shards():
            self._open(shard)

    def sizes(self) -> dict[str, int]:
        return dict(self._sizes)

    def load(self, name: str) -> torch.Tensor:
        stored = hf_name(name)
        file = self._files.get(stored)
        if file is None:
            raise ModelFileError(f"{self._directory} has no tensor {stored!r}: fetch the model again")
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def _shards(self) -> list[Path]:
        index = self._directory / "model.safetensors.index.json"
        if not index.exists():
            return [self._directory / "model.safetensors"]
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelFileError(f"{index} cannot be read ({error}): fetch the model again") from None
        for name in named:
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelFileError(f"{index} points outside its directory ({name!r}): do not use this model")
        return [self._directory / name for name in sorted(named)]

    def _open(self, shard: Path) -> None:
        if not shard.exists():
            raise ModelFileError(
                f"{self._directory} has no {shard.name}: fetch the model again (only safetensors weights load)"
            )
        try:
            file = self._stack.enter_context(safe_open(str(shard), framework="pt"))
            for stored in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_slice(stored)
                self._record(shard, stored, part.get_dtype(), tuple(part.get_shape()))
                self._files[stored] = file
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{shard} is damaged ({error}): fetch the model again") from None

    def _record(self, shard: Path, stored: str, dtype: str, shape: tuple[int, ...]) -> None:
        if dtype not in _FLOATS:
            raise ModelFileError(
                f"{shard.name}: tensor {stored!r} is stored as {dtype}, which is not supported: use a model in "
                f"{', '.join(_FLOATS)}"
            )
        nbytes = {"F64": 8, "F32": 4}.get(dtype, 2)
        for dim in shape:
            nbytes *= dim
        self._sizes[gguf_name(stored)] = nbytes


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor that GGUF calls `name`."""
    if name in _HF_MODEL_NAMES:
        return _HF_MODEL_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_HF_LAYER_NAMES[part]}.{suffix}"


def gguf_name(stored: str) -> str:
    """The GGUF name of a Hugging Face tensor; names of no decoder weight come back unchanged."""
    for ours, theirs in _HF_MODEL_NAMES.items():
        if stored == theirs:
            return ours
    head, _, suffix = stored.rpartition(".")
    for ours, theirs in _HF_LAYER_NAMES.items():
        prefix = head.removesuffix(theirs)
        if prefix != head and prefix.startswith("model.layers."):
            return f"blk.{prefix.split('.')[2]}.{ours}.{suffix}"
    return stored


def deinterleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder q or k rows (weights or bias) from neighbouring rotation pairs to rotated halves."""
    paired = rows.view(heads, rows.shape[0] // heads // 2, 2, -1)
    return paired.transpose(1, 2).reshape(rows.shape)


def load_weights(
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Weights:
    """Read, reorder and convert all weights of a decoder.

    Raises `ModelFileError` where a tensor is missing or of another shape than the config says.
    """
    return _Loader(source, dtype, torch.device(device), progress).run()


class _Loader:
    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, progress: Progress | None
    ) -> None:
        self._source = source
        self._config = source.config
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._sizes = source.sizes()
        self._total = sum(self._sizes.values())
        self._done = 0

    def run(self) -> Weights:
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        embedding = self._tensor("token_embd.weight", table)
        return Weights(
            embedding=embedding,
            layers=tuple(self._layer(f"blk.{index}.") for index in range(config.num_layers)),
            final_norm=self._tensor("output_norm.weight", (config.hidden_size,)),
            head=embedding if config.tied_embeddings else self._tensor("output.weight", table),
            inverse_frequencies=self._frequencies(),
        )

    def _layer(self, at: str) -> LayerWeights:
        c = self._config
        d, f, hd = c.hidden_size, c.intermediate_size, c.head_dim
        q, kv = c.num_heads * hd, c.num_kv_heads * hd
        qkv = {"attn_q": q, "attn_k": kv, "attn_v": kv}
        gate_up = {"ffn_gate": f, "ffn_up": f}
        return LayerWeights(
            attn_norm=self._tensor(f"{at}attn_norm.weight", (d,)),
            qkv=self._stacked(at, qkv, "weight", d),
            qkv_bias=self._stacked(at, qkv, "bias") if c.qkv_bias else None,
            q_norm=self._tensor(f"{at}attn_q_norm.weight", (hd,)) if c.qk_norm else None,
            k_norm=self._tensor(f"{at}attn_k_norm.weight", (hd,)) if c.qk_norm else None,
            out=self._tensor(f"{at}attn_output.weight", (d, q)),
            out_bias=self._tensor(f"{at}attn_output.bias", (d,)) if c.output_bias else None,
            ffn_norm=self._tensor(f"{at}ffn_norm.weight", (d,)),
            gate_up=self._stacked(at, gate_up, "weight", d),
            gate_up_bias=self._stacked(at, gate_up, "bias") if c.mlp_bias else None,
            down=self._tensor(f"{at}ffn_down.weight", (d, f)),
            down_bias=self._tensor(f"{at}ffn_down.bias", (d,)) if c.mlp_bias else None,
        )

    def _stacked(self, at: str, parts: dict[str, int], suffix: str, *inner: int) -> torch.Tensor:
        return torch.cat([self._tensor(f"{at}{part}.{suffix}", (rows, *inner)) for part, rows in parts.items()])

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._sizes:
            raise ModelFileError(f"the model has no tensor {name!r}: the file is incomplete; fetch it again")
        tensor = self._source.load(name)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"tensor {name!r} has the shape {tuple(tensor.shape)} instead of {shape}: the file is damaged; "
                "fetch it again"
            )
        self._done += self._sizes[name]
        if self._progress is not None:
            self._progress(self._done, self._total, "weights")
        return tensor.to(self._device, self._dtype)

    def _frequencies(self) -> torch.Tensor:
        scaling = self._config.rope_scaling
        factors = None
        if scaling is not None and scaling.kind == "factors":
            factors = self._source.load("rope_freqs.weight").float()
        return rope_frequencies(self._config, factors).to(self._device)


def rope_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse frequencies `[head_dim / 2]` after linear or Llama 3 scaling (Llama 3.1 model card), float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        if factors is None or factors.shape != frequencies.shape:
            raise ModelFileError("rope_freqs.weight does not fit the head size: fetch the file again")
        return frequencies / factors
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    turns = scaling.original_context * frequencies / (2 * torch.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
