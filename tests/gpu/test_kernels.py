"""The fused kernels compute what the reference computes, and a row does not depend on its neighbours.

Without a GPU they run in Triton's interpreter on a tiny model, with one compiled and in bf16.
"""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported as a compiler already", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from engine.bench.local import LocalEngine  # noqa: E402
from engine.bench.random_model import host_batch  # noqa: E402
from engine.core.vocabulary import Vocabulary  # noqa: E402
from engine.model.torch_device import TorchDevice  # noqa: E402
from tests.gpu.models import batch_on, pair, tiny_config  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
TOLERANCE = 0.02 if GPU else 1e-5


def _tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(112), k=count)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit on a GPU; the interpreter's products come from a library with its own order of additions."""
    return torch.equal(one, other) if GPU else torch.allclose(one, other, atol=1e-4)


def test_a_ragged_step_gives_the_logits_of_the_reference() -> None:
    fused, reference = pair(tiny_config(qkv_bias=True), DTYPE, DEVICE, (4, 8, 32))
    prompt = batch_on(DEVICE, [(0, _tokens(20), [3, 1]), (0, _tokens(5, 1), [2])], logit_rows=(19,))
    step = batch_on(DEVICE, [(20, _tokens(3, 2), [3, 1]), (5, _tokens(1, 3), [2])])
    for batch in (prompt, step):
        ours, theirs = fused.run(batch), reference.run(batch)
        assert ours.logits is not None
        assert theirs.logits is not None
        assert _error(ours.logits, theirs.logits) < TOLERANCE
        if not GPU:
            assert ours.argmax.tolist() == theirs.argmax.tolist()


def test_a_context_of_several_chunks_is_merged_in_either_way_of_splitting() -> None:
    config = tiny_config(num_layers=1)
    fused, reference = pair(config, DTYPE, DEVICE, (1, 32, 64))
    blocks = list(range(40, 80))
    fused.kv.data.normal_()
    reference.kv.data.copy_(fused.kv.data)
    alone = batch_on(DEVICE, [(600, [7], blocks)])
    crowd = batch_on(DEVICE, [(600, [7], blocks), *[(0, [9], [at]) for at in range(20)]])
    split, wanted = fused.run(alone).logits, reference.run(alone).logits
    assert split is not None
    assert wanted is not None
    assert _error(split, wanted) < TOLERANCE
    kept = split.clone()
    whole = fused.run(crowd).logits
    assert whole is not None
    assert _same(kept[0], whole[0])


def test_a_step_with_more_numbers_than_one_fetch_is_taken_in_whole() -> None:
    fused, reference = pair(tiny_config(num_layers=1), DTYPE, DEVICE, (16,), blocks=600)
    fused.kv.data.normal_()
    reference.kv.data.copy_(fused.kv.data)
    crowd = batch_on(DEVICE, [(600, [at], list(range(40 * at, 40 * at + 40))) for at in range(15)])
    for _ in range(2):
        ours, theirs = fused.run(crowd).logits, reference.run(crowd).logits
        assert ours is not None
        assert theirs is not None
        assert _error(ours, theirs) < TOLERANCE


def test_a_row_is_bitwise_the_same_alone_in_a_verify_and_in_a_batch() -> None:
    fused, _ = pair(tiny_config(), DTYPE, DEVICE, (1, 4, 16, 32))
    tokens, blocks = _tokens(40), [5, 9, 7]
    fused.run(batch_on(DEVICE, [(0, tokens[:30], blocks)], logit_rows=()))
    alone = []
    for at in range(30, 34):
        logits = fused.run(batch_on(DEVICE, [(at, [tokens[at]], blocks)])).logits
        assert logits is not None
        alone.append(logits[0].clone())
    for others in (0, 8, 20):
        crowd = [(0, [at], [20 + at]) for at in range(others)]
        logits = fused.run(batch_on(DEVICE, [*crowd, (30, tokens[30:34], blocks)])).logits
        assert logits is not None
        for row in range(4):
            assert _same(alone[row], logits[others + row])


def test_a_prompt_leaves_the_same_cache_in_one_slice_and_in_many() -> None:
    fused, _ = pair(tiny_config(), DTYPE, DEVICE, (8, 16, 64))
    tokens = _tokens(40)
    fused.run(batch_on(DEVICE, [(0, tokens, [1, 2, 3])], logit_rows=()))
    for at in range(0, 40, 8):
        fused.run(batch_on(DEVICE, [(at, tokens[at : at + 8], [4, 5, 6])], logit_rows=()))
    data = fused.kv.data
    assert _same(data[:, :, [1, 2, 3]], data[:, :, [4, 5, 6]])
    assert data[:, :, 1].abs().sum() > 0


def test_rows_beyond_the_widest_program_run_in_slices() -> None:
    fused, reference = pair(tiny_config(), DTYPE, DEVICE, (8,))
    batch = batch_on(DEVICE, [(0, _tokens(19), [3, 1])])
    ours, theirs = fused.run(batch), reference.run(batch)
    assert ours.logits is not None
    assert theirs.logits is not None
    assert _error(ours.logits[-3:], theirs.logits[-3:]) < TOLERANCE


def test_a_token_that_the_device_sampled_is_fed_without_the_host() -> None:
    fused, _ = pair(tiny_config(), DTYPE, DEVICE, (1, 2))
    first = fused.run(batch_on(DEVICE, [(0, [5], [3])]))
    token = int(first.argmax[0])
    wanted = fused.run(batch_on(DEVICE, [(1, [token], [3])])).logits
    assert wanted is not None
    kept = wanted.clone()
    chained = host_batch([(1, [0], [3])], previous=((0, first.argmax[0]),))
    got = fused.run_host(chained).logits
    assert got is not None
    assert torch.equal(got, kept)
    elsewhere = host_batch([(1, [0], [3])], previous=((0, first.argmax[0].clone()),))
    got = fused.run_host(elsewhere).logits
    assert got is not None
    assert torch.equal(got, kept)


def test_hidden_rows_and_skipped_layers_are_those_of_the_reference() -> None:
    fused, reference = pair(tiny_config(num_layers=3), DTYPE, DEVICE, (4,))
    tapped = batch_on(DEVICE, [(0, _tokens(4), [3])], taps=(0, 2))
    ours, theirs = fused.run(tapped).hidden, reference.run(tapped).hidden
    assert ours is not None
    assert theirs is not None
    assert _error(ours, theirs) < TOLERANCE
    shallow = batch_on(DEVICE, [(4, [5], [3])], layers=(0, 2))
    few, wanted = fused.run(shallow).logits, reference.run(shallow).logits
    assert few is not None
    assert wanted is not None
    assert _error(few, wanted) < TOLERANCE


def test_replies_are_the_same_with_and_without_running_ahead() -> None:
    fused, _ = pair(tiny_config(num_layers=1), DTYPE, DEVICE, (1, 2, 8))
    device = TorchDevice(fused, name="test", max_rows=64)
    vocabulary = Vocabulary((b"a",) * 112, frozenset())
    replies = []
    for pipelined in ("off", "on"):
        engine = LocalEngine(device, vocabulary, batch=2, drafter="off", prefix_cache="off", pipelined_decode=pipelined)
        for name in ("a", "b"):
            engine.submit(name, _tokens(5, ord(name)), 6, ignore_eos=True)
        out = engine.run()
        replies.append([out.replies[name].ids for name in ("a", "b")])
    device.close()
    assert replies[0] == replies[1]
    assert [len(reply) for reply in replies[0]] == [6, 6]
