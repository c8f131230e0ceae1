"""The MTP head on the native kernels drafts what the torch one drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.head_file import HeadFile
from engine.model.heads import HeadItem, HeadRows
from engine.model.mtp_head import MTPHead, MTPNet, MTPShape
from engine.model.mtp_native import NativeMTPHead
from engine.model.native_backend import NativeBackend
from tests.unit.native.models import Shape, open_native, write_model

SHAPE = MTPShape(96, 3, 1, 32, 192, (0, 1), 1e-5)


@pytest.fixture
def backend(tmp_path: Path) -> NativeBackend:
    return open_native(write_model(tmp_path / "m.gguf", Shape()), threads=2)


def _file() -> HeadFile:
    """A random head, its matrices wide enough that best and second best are far apart."""
    generator = torch.Generator().manual_seed(5)
    net = MTPNet(SHAPE, None)  # type: ignore[arg-type]  # only its names and shapes are used
    tensors = {
        name: torch.randn(value.shape, generator=generator) * (value.shape[-1] ** -0.5 if value.shape[0] > 8 else 0.1)
        + (1.0 if value.ndim == 1 or value.shape[0] <= 8 else 0.0)
        for name, value in net.state_dict().items()
    }
    ids = torch.randperm(101, generator=generator)[:80]
    return HeadFile("mtp", "key", "tiny", SHAPE.as_dict(), tensors, ids, {})


def _item(seq: int, start: int, length: int, count: int, kv_start: int = 0) -> HeadItem:
    hidden = torch.randn(200, 2, 96, generator=torch.Generator().manual_seed(seq))
    tokens = [(7 * seq + 3 * p) % 101 for p in range(length + 1)]
    blocks = list(range(seq * 6, seq * 6 + 6))
    rows = HeadRows(seq, start, hidden[start:length], tuple(tokens[start + 1 :]), blocks, kv_start)
    return HeadItem(seq, length, tokens[-1], rows, blocks, count)


CALLS = {
    "one sequence": [[_item(0, 0, 20, 4)]],
    "rows in two parts": [[_item(0, 0, 20, 2)], [_item(0, 20, 23, 4)]],
    "after rejected drafts": [[_item(0, 0, 20, 4)], [_item(0, 20, 21, 4)]],
    "three sequences": [[_item(0, 0, 20, 4), _item(1, 0, 37, 2), _item(2, 0, 5, 3)]],
    "a past that begins at a later block": [[_item(0, 32, 40, 4, 32)], [_item(0, 40, 42, 4, 32)]],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS.keys())
def test_both_heads_draft_the_same(backend: NativeBackend, calls: list[list[HeadItem]]) -> None:
    file = _file()
    exact, native = MTPHead(backend, file, torch.float32), NativeMTPHead(backend, file)
    with torch.inference_mode():
        for items in calls:
            ours, theirs = native.propose(items, 0.0), exact.propose(items, 0.0)
            assert [draft.tokens for draft in ours] == [draft.tokens for draft in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.confidences == pytest.approx(other.confidences, abs=0.08)


def test_rows_absorbed_early_are_the_past_of_later_drafts(backend: NativeBackend) -> None:
    file = _file()
    (whole,) = NativeMTPHead(backend, file).propose([_item(0, 0, 30, 4)], 0.0)
    parts = NativeMTPHead(backend, file)
    parts.extend([_item(0, 0, 12, 4).rows])
    (later,) = parts.propose([_item(0, 12, 30, 4)], 0.0)
    assert later.tokens == whole.tokens
    assert later.confidences == pytest.approx(whole.confidences, abs=0.01)


@pytest.mark.parametrize("size", [1, 3, 7, 127])
def test_a_long_prompt_leaves_the_same_bits_whole_and_in_slices(backend: NativeBackend, size: int) -> None:
    file, length, blocks = _file(), 190, list(range(12))
    item = _item(0, 0, length, 4)
    rows = HeadRows(0, 0, item.rows.hidden, item.rows.next_tokens, blocks, 0)
    whole, parts = NativeMTPHead(backend, file), NativeMTPHead(backend, file)
    (at_once,) = whole.propose([HeadItem(0, length, item.last_token, rows, blocks, 4)], 0.0)
    for start in range(0, length, size):
        end = min(start + size, length)
        rows = HeadRows(0, start, item.rows.hidden[start:end], item.rows.next_tokens[start:end], blocks, 0)
        if end < length:
            parts.extend([rows])
    (sliced,) = parts.propose([HeadItem(0, length, item.last_token, rows, blocks, 4)], 0.0)
    assert sliced == at_once
    assert whole.kv is not None
    assert parts.kv is not None
    assert torch.equal(parts.kv.data, whole.kv.data)


def test_drafts_end_where_the_block_table_ends(backend: NativeBackend) -> None:
    item = _item(0, 0, 31, 8)
    short = HeadItem(
        0, 31, item.last_token, HeadRows(0, 0, item.rows.hidden, item.rows.next_tokens, [4, 2], 0), [4, 2], 8
    )
    (draft,) = NativeMTPHead(backend, _file()).propose([short], 0.0)
    assert len(draft.tokens) == 2


def test_a_chain_stops_before_a_draft_that_is_not_sure_enough(backend: NativeBackend) -> None:
    (draft,) = NativeMTPHead(backend, _file()).propose([_item(0, 0, 20, 4)], 1.1)
    assert draft.tokens == ()
