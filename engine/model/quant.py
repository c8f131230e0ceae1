"""Which GGUF tensors the native kernels take as they are, and how their rows are ordered."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.model.backend import Progress
from engine.model.config import ModelConfig
from engine.model.gguf import GGUFFile
from engine.model.native.library import MATRICES, VECTORS, NativeModel, QuantType

LAYER_MATRICES = MATRICES[:7]
LAYER_VECTORS = VECTORS[:-1]


def unsupported(file: GGUFFile) -> str | None:
    """Why the native kernels cannot run this file, or None."""
    config = file.config()
    for name in matrix_names(config):
        info = file.info(name)
        if info.type_name not in QuantType.__members__:
            return f"tensor {name} is {info.type_name} and the native kernels take {', '.join(QuantType.__members__)}"
    sizes = {"hidden": config.hidden_size, "feed-forward": config.intermediate_size, "head": config.head_dim}
    for what, size in sizes.items():
        if size % 32:
            return f"the {what} size {size} is no multiple of 32, which the native kernels need"
    return None


def matrix_names(config: ModelConfig) -> list[str]:
    """GGUF names of all matrices that a model multiplies with or looks tokens up in."""
    layers = [f"blk.{layer}.{part}.weight" for layer in range(config.num_layers) for part in LAYER_MATRICES]
    return ["token_embd.weight", *([] if config.tied_embeddings else ["output.weight"]), *layers]


def halves_order(heads: int, head_dim: int) -> npt.NDArray[np.int32]:
    """Row order `[heads * head_dim]` that turns neighbouring rotation pairs into rotated halves."""
    pairs = np.arange(heads * head_dim, dtype=np.int32).reshape(heads, head_dim // 2, 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1).reshape(-1))


def fill(model: NativeModel, file: GGUFFile, progress: Progress | None = None) -> None:
    """Hand every weight of the file to the library, which keeps packed copies."""
    config = file.config()
    done, total = 0, sum(file.info(name).nbytes for name in matrix_names(config))
    for layer in range(config.num_layers):
        for part in LAYER_MATRICES:
            _matrix(model, file, layer, part, f"blk.{layer}.{part}.weight", _order(config, part))
        for part in LAYER_VECTORS:
            _vector(model, file, layer, part, f"blk.{layer}.{part}", _order(config, part.removesuffix(".bias")))
        if progress is not None:
            done += sum(file.info(f"blk.{layer}.{part}.weight").nbytes for part in LAYER_MATRICES)
            progress(done, total, "weights")
    _matrix(model, file, -1, "token_embd", "token_embd.weight", None)
    if not config.tied_embeddings:
        _matrix(model, file, -1, "output", "output.weight", None)
    _vector(model, file, -1, "output_norm.weight", "output_norm.weight", None)
    if progress is not None:
        progress(total, total, "weights")


def _order(config: ModelConfig, part: str) -> npt.NDArray[np.int32] | None:
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part)
    return halves_order(heads, config.head_dim) if heads and config.interleaved_qk else None


def _matrix(
    model: NativeModel, file: GGUFFile, layer: int, slot: str, name: str, order: npt.NDArray[np.int32] | None
) -> None:
    info = file.info(name)
    model.set_matrix(layer, slot, QuantType[info.type_name], file.raw(name), info.shape[-1], order)


def _vector(
    model: NativeModel, file: GGUFFile, layer: int, slot: str, name: str, order: npt.NDArray[np.int32] | None
) -> None:
    if name in file.tensors:
        values = file.dequantize(name)
        model.set_vector(layer, slot, values if order is None else values[order])
