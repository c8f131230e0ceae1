"""The draft head on the fused kernels drafts what the head in plain torch drafts, asked for or behind a verify."""

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

from engine.bench.local import Collector, LocalEngine  # noqa: E402
from engine.core.vocabulary import Vocabulary  # noqa: E402
from engine.model.cuda_backend import CudaBackend  # noqa: E402
from engine.model.head_file import HeadFile  # noqa: E402
from engine.model.heads import HeadItem, HeadRows  # noqa: E402
from engine.model.mtp_cuda import CudaMTPHead  # noqa: E402
from engine.model.mtp_head import MTPHead, MTPNet, MTPShape  # noqa: E402
from engine.model.torch_device import TorchDevice  # noqa: E402
from tests.gpu.models import pair, tiny_config  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
TAPS = (0, 1)
VOCAB = 4
CONFIG = tiny_config(
    max_context=96, vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1
)
"""In float32 on a GPU too (with products in tf32): random heads are so unsure that bf16 would choose for them."""


def _head_file(seed: int = 3) -> HeadFile:
    shape = MTPShape(32, 2, 1, 16, 32, TAPS, 1e-5)
    made = torch.Generator().manual_seed(seed)
    net = MTPNet(shape, None)  # type: ignore[arg-type]
    tensors = {}
    for name, tensor in net.state_dict().items():
        noise = torch.randn(tensor.shape, generator=made)
        tensors[name] = 1 + 0.1 * noise if tensor.ndim == 1 or name == "tap_norms" else noise * tensor.shape[-1] ** -0.5
    ids = torch.randperm(VOCAB, generator=made)
    return HeadFile("mtp", "", "tiny", shape.as_dict(), tensors, ids, {})


def _heads(widths: tuple[int, ...], seed: int = 3) -> tuple[CudaBackend, CudaMTPHead, MTPHead]:
    fused, reference = pair(CONFIG, torch.float32, DEVICE, widths, blocks=40)
    head = CudaMTPHead(fused, _head_file(seed))
    if GPU:
        head.prepare()
    return fused, head, MTPHead(reference, _head_file(seed), torch.float32)


def _rows(seq: int, start: int, count: int, blocks: list[int], kv_start: int = 0) -> HeadRows:
    made = torch.Generator().manual_seed(100 * seq + start)
    hidden = torch.randn(count, len(TAPS), 32, generator=made).to(DEVICE)
    tokens = tuple(random.Random(100 * seq + start).choices(range(VOCAB), k=count))
    return HeadRows(seq, start, hidden, tokens, blocks, kv_start)


def _item(rows: HeadRows, count: int) -> HeadItem:
    end = rows.start + len(rows.next_tokens)
    return HeadItem(rows.seq, end, rows.next_tokens[-1], rows, rows.blocks, count)


def test_drafts_are_those_of_the_head_in_plain_torch() -> None:
    _, fused, plain = _heads((1, 2, 8))
    before = [_rows(0, 0, 11, [3, 1]), _rows(1, 16, 7, [5, 2], kv_start=16)]
    items = [_item(_rows(0, 11, 3, [3, 1]), 4), _item(_rows(1, 23, 2, [5, 2], kv_start=16), 3)]
    for head in (fused, plain):
        head.extend(before)
    ours, theirs = fused.propose(items, 0.0), plain.propose(items, 0.0)
    assert [draft.tokens for draft in ours] == [draft.tokens for draft in theirs]
    assert [len(draft.tokens) for draft in ours] == [4, 3]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.confidences == pytest.approx(other.confidences, rel=0.02 if GPU else 1e-3)


def test_many_rows_are_taken_in_before_the_newest_is_drafted_from() -> None:
    _, fused, plain = _heads((1, 8))
    item = _item(_rows(0, 0, 21, [3, 1]), 2)
    assert fused.propose([item], 0.0)[0].tokens == plain.propose([item], 0.0)[0].tokens


def test_a_chain_that_leaves_its_blocks_touches_nobody_elses() -> None:
    _, fused, plain = _heads((1, 8))
    for head in (fused, plain):
        head.extend([_rows(0, 0, 8, [3])])
    assert fused.kv is not None
    others = [block for block in range(40) if block != 3]
    fused.kv.data[:, :, others] = 7.0
    items = [_item(_rows(0, 8, 8, [3]), 4)]
    assert fused.propose(items, 0.0)[0].tokens == plain.propose(items, 0.0)[0].tokens
    assert bool((fused.kv.data[:, :, others] == 7.0).all())


def test_drafts_made_behind_a_verify_are_those_made_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[int] = []
    follow = CudaMTPHead.follow
    monkeypatch.setattr(CudaMTPHead, "follow", lambda *given: followed.append(1) or follow(*given))
    fused, head, _ = _heads((1, 2, 4, 8), seed=11)
    plain = _replies(fused, head, drafter="off")
    behind = _replies(fused, head, drafter="mtp", mtp_gate="force")
    monkeypatch.setattr(CudaMTPHead, "follow", None)
    monkeypatch.setattr(CudaMTPHead, "follows", lambda head, rows: False)
    asked = _replies(fused, head, drafter="mtp", mtp_gate="force")
    for name in ("a", "b"):
        # Near its end one reply bounds the drafts of all; the next step may then ask for more than were made behind.
        assert behind.replies[name].tokens[:6] == asked.replies[name].tokens[:6]
        assert behind.replies[name].ids == plain.replies[name].ids
    assert followed
    assert any(token.draft for token in behind.replies["a"].tokens + behind.replies["b"].tokens)


def _replies(fused: CudaBackend, head: CudaMTPHead, **levers: object) -> Collector:
    device = TorchDevice(fused, name="test", max_rows=64, heads=[head])
    vocabulary = Vocabulary((b"a",) * VOCAB, frozenset())
    engine = LocalEngine(device, vocabulary, batch=2, prefix_cache="off", trace_level=0, num_drafts=2, **levers)
    for name in ("a", "b"):
        engine.submit(name, random.Random(name).choices(range(VOCAB), k=3), 12, ignore_eos=True)
    return engine.run()
