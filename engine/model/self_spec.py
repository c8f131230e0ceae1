"""Which layers of the target draft for it, and the drafting itself: a chain of cheap rows on the target's own cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import numpy as np
import torch

from engine.core.device import Draft, DraftItem
from engine.model.backend import Backend, HostBatch
from engine.model.config import ModelConfig

_SKIPPED = 5
_SHALLOW = 12
"""Below this many layers skipping five leaves too little: one in six is skipped instead."""


def draft_layers(config: ModelConfig) -> tuple[int, ...]:
    """The set stored for this model (by name, then by config hash), else all but a few evenly spread middle layers."""
    stored = _stored()
    skipped = stored.get(config.name, stored.get(config.key))
    if skipped is None:
        skipped = default_skip(config.num_layers)
    return tuple(layer for layer in range(config.num_layers) if layer not in skipped)


def default_skip(num_layers: int) -> list[int]:
    """Five layers (fewer in shallow models) spread evenly over the middle two thirds."""
    count = _SKIPPED if num_layers >= _SHALLOW else num_layers // 6
    first, middle = num_layers // 6, num_layers - 2 * (num_layers // 6)
    return [first + int((i + 0.5) * middle / count) for i in range(count)]


@cache
def _stored() -> dict[str, list[int]]:
    raw = json.loads((files("engine.model") / "self_spec_layers.json").read_text(encoding="utf-8"))
    return {str(name): [int(layer) for layer in skipped] for name, skipped in raw.items()}


@dataclass(slots=True)
class _Chain:
    item: DraftItem
    wanted: int
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.item.seq_len + len(self.tokens)

    @property
    def newest(self) -> int:
        return self.tokens[-1] if self.tokens else self.item.last_token


def draft_with_layers(
    backend: Backend, layers: tuple[int, ...], items: Sequence[DraftItem], conf_min: float
) -> list[Draft]:
    """Draft greedily with a subset of layers, all items together.

    Writes KV rows of those layers at `seq_len..`, which the verify overwrites; a chain stops where its blocks end.
    """
    chains = [_Chain(item, min(item.count, _room(backend, item))) for item in items]
    running = [chain for chain in chains if chain.wanted > 0]
    while running:
        output = backend.run_host(_batch(running, layers))
        if output.logits is None:
            raise RuntimeError(f"backend {backend.name} returned no logits for a draft")
        drafted = zip(running, output.argmax.tolist(), _chances(output.logits, output.argmax), strict=True)
        running = [chain for chain, token, prob in drafted if _grow(chain, token, prob, conf_min)]
    return [Draft(tuple(chain.tokens), tuple(chain.confidences)) for chain in chains]


def _grow(chain: _Chain, token: int, prob: float, conf_min: float) -> bool:
    """Append a confident draft; whether the chain goes on."""
    if prob < conf_min:
        return False
    chain.tokens.append(token)
    chain.confidences.append(prob)
    return len(chain.tokens) < chain.wanted


def _chances(logits: torch.Tensor, chosen: torch.Tensor) -> list[float]:
    """Softmax probability of each row's chosen id; on a CPU in numpy, where no pool of threads is woken for it."""
    best = logits.gather(-1, chosen[:, None])
    if logits.is_cuda:
        return [float(chance) for chance in (1.0 / (logits - best).exp().sum(-1)).tolist()]
    rest = logits.numpy() - best.numpy()
    np.exp(rest, out=rest)
    return [float(chance) for chance in 1.0 / rest.sum(1)]


def _room(backend: Backend, item: DraftItem) -> int:
    return len(item.blocks) * backend.kv.block_size - item.seq_len


def _batch(chains: list[_Chain], layers: tuple[int, ...]) -> HostBatch:
    count = len(chains)
    return HostBatch(
        tokens=[chain.newest for chain in chains],
        row_offsets=tuple(range(count + 1)),
        starts=tuple(chain.position for chain in chains),
        block_tables=[chain.item.blocks for chain in chains],
        logit_rows=tuple(range(count)),
        layers=layers,
    )
