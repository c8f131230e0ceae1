"""Draft head files: safetensors with int8 rows, the ids that the head may draft, and where it all came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.model.config import ModelConfig, ModelFileError

_SCALE = ".scale"
_IDS = "vocab_ids"


@dataclass(frozen=True, slots=True)
class HeadFile:
    """What a trained head consists of."""

    kind: str
    """`mtp` or `dflash`."""
    model_key: str
    """`ModelConfig.key` of the target that it was trained for."""
    model_name: str
    shape: dict[str, Any]
    """Constructor arguments of the network."""
    tensors: dict[str, torch.Tensor]
    """float32."""
    vocab_ids: torch.Tensor
    """int64, most frequent first; a head drafts from a prefix of it."""
    provenance: dict[str, Any]
    """How it was trained and what it measured."""


def save_head(path: Path, head: HeadFile) -> int:
    """Write `head`; matrices become int8 rows with one scale each. Returns the size in bytes."""
    stored: dict[str, torch.Tensor] = {_IDS: head.vocab_ids.to(torch.int32).contiguous()}
    for name, tensor in head.tensors.items():
        if tensor.ndim == 2 and tensor.shape[0] > 8:
            stored[name], stored[name + _SCALE] = quantized_rows(tensor)
        else:
            stored[name] = tensor.float().contiguous()
    about = {"kind": head.kind, "model_key": head.model_key, "model_name": head.model_name}
    encoded = {"shape": json.dumps(head.shape), "provenance": json.dumps(head.provenance)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu() for name, tensor in stored.items()}, path, metadata={**about, **encoded})
    return path.stat().st_size


def load_head(path: Path) -> HeadFile:
    """Read and check a head file; raises `ModelFileError` for anything damaged."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about: Mapping[str, str] = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        names = [name for name in stored if name != _IDS and not name.endswith(_SCALE)]
        tensors = {name: _widened(stored[name], stored.get(name + _SCALE)) for name in names}
        return HeadFile(
            about["kind"],
            about["model_key"],
            about["model_name"],
            json.loads(about["shape"]),
            tensors,
            stored[_IDS].long(),
            json.loads(about["provenance"]),
        )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ModelFileError(
            f"draft head {path.name} is damaged ({error}): install it again or train it anew"
        ) from None


def find_head(kind: str, config: ModelConfig) -> HeadFile | None:
    """The shipped head of this kind for this model; weights alone decide nothing, so name and shape must both fit."""
    folder = Path(str(files("engine.model"))) / "heads"
    for path in sorted(folder.glob(f"{kind}-*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
        if about.get("model_key") == config.key and about.get("model_name") == config.name:
            return load_head(path)
    return None


def quantized_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and float32 scales `[rows]`, symmetric."""
    wide = matrix.float()
    scale = wide.abs().amax(1).clamp(min=1e-12) / 127
    return (wide / scale[:, None]).round().to(torch.int8).contiguous(), scale


def rounded_as_stored(matrix: torch.Tensor) -> torch.Tensor:
    """What `load_head` gives back for a matrix, float32."""
    rows, scale = quantized_rows(matrix)
    return rows.float() * scale[:, None]


def _widened(tensor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return tensor.float() if scale is None else tensor.float() * scale[:, None]
