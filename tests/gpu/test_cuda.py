"""What only a GPU can show: captured steps of the default model's shape keep every row's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.bench.random_model import SHAPES, host_batch, make_kv, ragged_batch, random_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BF16 = torch.bfloat16


def test_a_row_of_the_default_shape_has_the_same_bits_at_every_width() -> None:
    from engine.model.cuda_backend import CudaBackend

    device = torch.device("cuda")
    config = replace(SHAPES["default"], num_layers=4)
    fused = CudaBackend(config, random_weights(config, BF16, device), make_kv(config, 4000, BF16, device))
    blocks = list(range(64))
    fused.run(ragged_batch(device, [(0, list(range(700)), blocks)], logit_rows=()))
    alone = fused.run(ragged_batch(device, [(700, [5], blocks)])).logits
    assert alone is not None
    kept = alone[0].clone()
    for rows in (2, 8, 9, 16, 17, 32, 33, 64, 128, 256):
        others = [(0, [at], [100 + at]) for at in range(rows - 1)]
        logits = fused.run(ragged_batch(device, [*others, (700, [5], blocks)])).logits
        assert logits is not None
        assert torch.equal(kept, logits[rows - 1]), rows


def test_a_replayed_step_takes_its_token_from_the_device() -> None:
    from engine.model.cuda_backend import CudaBackend

    device = torch.device("cuda")
    config = replace(SHAPES["default"], num_layers=2)
    fused = CudaBackend(config, random_weights(config, BF16, device), make_kv(config, 64, BF16, device), widths=(1,))
    first = fused.run(ragged_batch(device, [(0, [5], [3])])).argmax
    told = fused.run(ragged_batch(device, [(1, [int(first[0])], [3])])).argmax.tolist()
    chained = host_batch([(1, [0], [3])], previous=((0, first[0]),))
    assert fused.run_host(chained).argmax.tolist() == told
