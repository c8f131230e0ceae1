"""A row's result is bitwise the same alone and in any company, on any number of threads, on every variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.model.native.library import load, variants
from engine.model.native_backend import NativeBackend
from tests.unit.native.models import Piece, Shape, open_native, run, tokens_of, write_model

SHAPES = {
    "Q4_1": Shape(heads=6, kv_heads=2, hidden=96),
    "Q4_0, 7 to 1": Shape(arch="qwen2", kind=Kind.Q4_0, hidden=224, heads=7, kv_heads=1),
    "Q8_0, qk-norm": Shape(arch="qwen3", kind=Kind.Q8_0, heads=4, kv_heads=2, head_dim=64),
}
LENGTH = 140


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", request.param)


def one_by_one(backend: NativeBackend, tokens: list[int], first_block: int = 0) -> torch.Tensor:
    rows = [run(backend, Piece([token], at, first_block)).logits for at, token in enumerate(tokens)]
    return torch.cat([row for row in rows if row is not None])


def in_chunks(backend: NativeBackend, tokens: list[int], size: int) -> torch.Tensor:
    rows = [run(backend, Piece(tokens[at : at + size], at)).logits for at in range(0, len(tokens), size)]
    return torch.cat([row for row in rows if row is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_cut_of_a_prompt_gives_the_logits_and_the_cache_of_one_token_at_a_time(
    path: Path, dtype: torch.dtype
) -> None:
    tokens = tokens_of(LENGTH)
    alone = open_native(path, threads=1, kv_dtype=dtype)
    wanted = one_by_one(alone, tokens)
    assert wanted.std() > 0.1
    for size in (2, 3, 4, 5, 7, 8, 16, 32, 77, LENGTH):
        for threads in (1, 2):
            backend = open_native(path, threads=threads, kv_dtype=dtype)
            assert torch.equal(in_chunks(backend, tokens, size), wanted), (size, threads)
            assert torch.equal(backend.kv.data, alone.kv.data), (size, threads)


def test_a_mixed_step_gives_every_sequence_what_it_gets_alone(path: Path) -> None:
    tokens = tokens_of(100)
    wanted = one_by_one(open_native(path), tokens)
    backend = open_native(path, threads=2)
    # Even blocks hold sequence a, odd ones b and c: decode, verify of 5 rows and a prompt chunk in one step.
    run(backend, Piece(tokens[:40], 0, 0), Piece(tokens[:20], 0, 1))
    mixed = run(backend, Piece(tokens[40:41], 40, 0), Piece(tokens[20:25], 20, 1), Piece(tokens[:70], 0, 17)).logits
    assert mixed is not None
    assert torch.equal(mixed, torch.cat([wanted[40:41], wanted[20:25], wanted[:70]]))


def test_many_sequences_side_by_side_change_nothing(path: Path) -> None:
    tokens = tokens_of(9)
    backend = open_native(path, threads=2)
    wanted = one_by_one(open_native(path), tokens)
    for at, token in enumerate(tokens):
        rows = run(backend, *(Piece([token], at, block) for block in range(32))).logits
        assert rows is not None
        assert torch.equal(rows, wanted[at].expand(32, -1))


def test_greedy_tokens_are_the_argmax_of_the_logits(path: Path) -> None:
    tokens = tokens_of(33)
    with_logits, greedy = (
        run(open_native(path), Piece(tokens)),
        run(open_native(path, threads=2), Piece(tokens), greedy=True),
    )
    assert greedy.logits is None
    assert with_logits.logits is not None
    assert torch.equal(greedy.argmax, with_logits.logits.argmax(-1))
    assert torch.equal(greedy.argmax, with_logits.argmax)


def test_wanting_fewer_rows_does_not_change_them(path: Path) -> None:
    tokens = tokens_of(50)
    every = run(open_native(path), Piece(tokens)).logits
    some = run(open_native(path, threads=2), Piece(tokens), logit_rows=(3, 17, 49)).logits
    assert every is not None
    assert some is not None
    assert torch.equal(some, every[[3, 17, 49]])


def test_all_variants_agree_bit_for_bit(path: Path) -> None:
    tokens = tokens_of(LENGTH)
    backends = [open_native(path, variant=name) for name in variants(load())]
    first, *others = [in_chunks(backend, tokens, 33) for backend in backends]
    for backend, logits in zip(backends[1:], others, strict=True):
        assert torch.equal(logits, first), backend.name
        assert torch.equal(backend.kv.data, backends[0].kv.data), backend.name


def test_the_order_of_the_cache_changes_nothing(path: Path) -> None:
    tokens = tokens_of(LENGTH)
    by_block, by_layer = open_native(path), open_native(path, by_block=False)
    assert torch.equal(in_chunks(by_block, tokens, 33), in_chunks(by_layer, tokens, 33))
    assert torch.equal(by_block.kv.data, by_layer.kv.data)
