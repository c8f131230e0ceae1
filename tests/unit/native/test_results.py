"""The native decoder computes what a plain float32 decoder computes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.unit.native.models import NumpyDecoder, Piece, Shape, open_native, run, tokens_of, write_model

SHAPES = {
    "llama Q4_1, tied Q8_0": Shape(),
    "llama Q4_0, own head": Shape(kind=Kind.Q4_0, head_kind=Kind.Q4_0, tied=False),
    "llama Q8_0": Shape(kind=Kind.Q8_0, hidden=64, heads=4, kv_heads=2),
    "wide heads": Shape(head_dim=128, heads=2, kv_heads=2, vocab=64),
    "odd heads": Shape(head_dim=96, heads=2, kv_heads=1),
    "a group of 7": Shape(arch="qwen2", kind=Kind.Q4_0, hidden=224, heads=7, kv_heads=1),
    "qwen2": Shape(arch="qwen2", heads=4, kv_heads=2, hidden=128),
    "qwen3": Shape(arch="qwen3", heads=4, kv_heads=2, hidden=128, head_kind=Kind.Q4_1),
}


def _error(got: torch.Tensor | None, wanted: np.ndarray) -> float:
    assert got is not None
    return float(np.abs(got.numpy() - wanted).max() / wanted.std())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_with_16_bit_activations_logits_are_those_of_a_float32_decoder(shape: Shape, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", shape)
    tokens = tokens_of(150, shape.vocab)
    wanted, _ = NumpyDecoder(path).logits(tokens)
    out = run(open_native(path, threads=2, wide_above=0.0), Piece(tokens))
    assert _error(out.logits, wanted) < 0.002
    assert (out.argmax.numpy() == wanted.argmax(-1)).mean() >= 0.99


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_mostly_8_bit_activations_change_few_tokens(shape: Shape, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", shape)
    tokens = tokens_of(150, shape.vocab)
    wanted, _ = NumpyDecoder(path).logits(tokens)
    out = run(open_native(path, threads=2), Piece(tokens))
    assert _error(out.logits, wanted) < 0.25
    assert (out.argmax.numpy() == wanted.argmax(-1)).mean() >= 0.95


def test_every_variant_is_as_close(variant: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Shape(arch="qwen3", kind=Kind.Q8_0))
    tokens = tokens_of(70)
    wanted, _ = NumpyDecoder(path).logits(tokens)
    got = run(open_native(path, variant=variant, wide_above=0.0), Piece(tokens)).logits
    assert _error(got, wanted) < 0.002


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_a_linear_layer_multiplies_the_files_own_weights(kind: Kind, variant: str, tmp_path: Path) -> None:
    """Rows whose values are whole multiples of their block's 127th part lose nothing to quantisation."""
    path = write_model(tmp_path / "m.gguf", Shape(head_kind=kind, vocab=50))
    backend = open_native(path, variant=variant)
    rng = np.random.default_rng(3)
    x = rng.integers(-127, 128, (5, 96)).astype(np.float32)
    x[:, ::32] = 127.0
    weights = gguf.quants.dequantize(backend_blocks(path), kind).astype(np.float64)
    wanted = x.astype(np.float64) @ weights.T
    got = backend.lm_head(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(x.astype(np.float64)).sum())


def backend_blocks(path: Path) -> np.ndarray:
    from engine.model.gguf import GGUFFile

    return GGUFFile(path).raw("token_embd.weight")


def test_an_outlier_does_not_drown_the_rest_of_its_block(variant: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Shape(head_kind=Kind.Q8_0))
    backend = open_native(path, variant=variant)
    x = np.random.default_rng(5).standard_normal((1, 96)).astype(np.float32)
    x[0, 40] = 500.0
    wanted = x @ gguf.quants.dequantize(backend_blocks(path), Kind.Q8_0).T
    got = backend.lm_head(torch.from_numpy(x)).numpy()
    one_step_of_int8 = 500.0 / 127 * 0.82
    assert np.abs(got - wanted).max() < 0.05 * one_step_of_int8


def test_embeddings_are_the_files_rows(tmp_path: Path) -> None:
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        path = write_model(tmp_path / f"{kind.name}.gguf", Shape(head_kind=kind))
        tokens = torch.tensor([0, 15, 16, 100])
        wanted = gguf.quants.dequantize(backend_blocks(path), kind)[tokens.numpy()]
        got = open_native(path).embed(tokens).numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 0.01), (torch.bfloat16, 0.06)])
def test_narrow_caches_cost_little(dtype: torch.dtype, limit: float, variant: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Shape(heads=4, kv_heads=2, hidden=128))
    tokens = tokens_of(80)
    wanted, _ = NumpyDecoder(path).logits(tokens)
    got = run(open_native(path, variant=variant, kv_dtype=dtype, wide_above=0.0), Piece(tokens)).logits
    assert _error(got, wanted) < limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cached_values_are_rounded_to_nearest(dtype: torch.dtype, tmp_path: Path) -> None:
    """The narrow caches hold what torch makes of the wide one."""
    path = write_model(tmp_path / "m.gguf", Shape(layers=1))
    wide, narrow = open_native(path), open_native(path, kv_dtype=dtype)
    for backend in (wide, narrow):
        run(backend, Piece(tokens_of(60)))
    assert wide.kv.data.abs().max() > 0
    assert torch.equal(wide.kv.data.to(dtype), narrow.kv.data)


def test_taps_return_the_residual_stream(tmp_path: Path) -> None:
    shape = Shape(layers=3)
    path = write_model(tmp_path / "m.gguf", shape)
    tokens = tokens_of(20)
    _, after = NumpyDecoder(path).logits(tokens)
    hidden = run(open_native(path, wide_above=0.0), Piece(tokens), taps=(0, 2)).hidden
    assert hidden is not None
    for tap, layer in enumerate((0, 2)):
        assert _error(hidden[:, tap], after[layer]) < 0.002, layer


def test_a_subset_of_layers_skips_the_others_and_their_cache(tmp_path: Path) -> None:
    shape = Shape(layers=3)
    path = write_model(tmp_path / "m.gguf", shape)
    backend = open_native(path)
    all_layers = run(backend, Piece(tokens_of(5))).logits
    fresh = open_native(path)
    some = run(fresh, Piece(tokens_of(5)), layers=(0, 2)).logits
    assert some is not None
    assert all_layers is not None
    assert not torch.equal(some, all_layers)
    assert fresh.kv.keys[1].abs().max() == 0
    assert fresh.kv.keys[2].abs().max() > 0


def test_the_parts_of_a_step_add_up_to_its_time(tmp_path: Path) -> None:
    backend = open_native(write_model(tmp_path / "m.gguf", Shape()), threads=2)
    assert backend.part_seconds() == {}
    backend.profile(True)
    run(backend, Piece(tokens_of(40)))
    parts = backend.part_seconds()
    assert parts["gate_up"] > 0
    assert parts["head"] > 0
    backend.profile(False)
    assert backend.part_seconds() == {}
