"""The device keeps the contract of `engine.core.device.Device` on a tiny real model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.core.device import (
    GREEDY,
    DeviceError,
    Draft,
    DrafterName,
    DraftItem,
    LogitEdits,
    RowPlan,
    Sampled,
    Segment,
    Step,
    StepKind,
)
from engine.model.backend import BackendRequest, BackendUnavailable
from engine.model.heads import HeadItem, HeadRows
from engine.model.kv import PagedKV
from engine.model.load import open_source
from engine.model.open import open_device
from engine.model.reference import open_backend
from engine.model.spill import SpillStore
from engine.model.torch_device import TorchDevice
from tests.unit.model.tiny import CONTEXT, LAYERS, VOCAB, write_tiny_gguf

_BLOCKS = 48
_PROMPT = tuple((7 * i + 3) % VOCAB for i in range(21))


class SpyHead:
    """Records what it is given and drafts the last token over and over."""

    drafter = DrafterName.MTP

    def __init__(self, taps: tuple[int, ...] = (LAYERS - 1,)) -> None:
        self.taps = taps
        self.kv: PagedKV | None = PagedKV(1, _BLOCKS, 16, 1, 8)
        self.seen: list[HeadRows] = []

    def extend(self, rows: Sequence[HeadRows]) -> None:
        self.seen.extend(rows)

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        self.seen.extend(item.rows for item in items)
        return [Draft((item.last_token,) * item.count) for item in items]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def _open(path: Path, *heads: SpyHead, spill_bytes: int = 1 << 20) -> TorchDevice:
    source = open_source(path)
    request = BackendRequest(path, source.config, _BLOCKS * 16, 16, 4, 4096, "float32", 1)
    return TorchDevice(open_backend(request), name="test", spill_bytes=spill_bytes, heads=heads)


@pytest.fixture
def device(path: Path) -> Iterator[TorchDevice]:
    opened = _open(path)
    yield opened
    opened.close()


def _step(*segments: Segment, kind: StepKind = StepKind.DECODE) -> Step:
    return Step(0, kind, segments)


def _blocks(seq: int) -> list[int]:
    return list(range(seq * 6, seq * 6 + 6))


def _prompt(seq: int = 0, **more: bool) -> Segment:
    return Segment(seq, seq, 0, _PROMPT, _blocks(seq), (GREEDY,), **more)


def _one(seq: int, start: int, token: int, plan: RowPlan = GREEDY, **more: bool) -> Segment:
    return Segment(seq, seq, start, (token,), _blocks(seq), (plan,), **more)


def _reply(device: TorchDevice, count: int, seq: int = 0) -> list[int]:
    tokens = [device.forward(_step(_prompt(seq))).sampled[0][0].token]
    while len(tokens) < count:
        result = device.forward(_step(_one(seq, len(_PROMPT) + len(tokens) - 1, tokens[-1])))
        tokens.append(result.sampled[0][0].token)
    return tokens


def test_facts_state_the_model_and_the_pool(device: TorchDevice) -> None:
    facts = device.facts
    assert (facts.model, facts.architecture, facts.vocab_size) == ("tiny llama", "llama", VOCAB)
    assert (facts.max_context, facts.num_blocks, facts.block_size) == (CONTEXT, _BLOCKS, 16)
    assert facts.bytes_per_block == LAYERS * 2 * 16 * 2 * 16 * 4
    assert facts.drafters == {DrafterName.SELF}


def test_replies_vary_enough_for_the_other_tests_to_mean_something(device: TorchDevice) -> None:
    assert len(set(_reply(device, 20))) > 5


def test_a_pipelined_reply_equals_the_waiting_one(device: TorchDevice) -> None:
    plain = _reply(device, 12)
    tokens = [device.forward(_step(_prompt())).sampled[0][0].token]
    device.launch(_step(_one(0, 21, 0, from_previous=True)))
    for i in range(1, 11):
        device.launch(_step(_one(0, 21 + i, 0, from_previous=True)))
        tokens.append(device.collect().sampled[0][0].token)
    tokens.append(device.collect().sampled[0][0].token)
    assert tokens == plain


def test_at_most_two_steps_are_in_flight(device: TorchDevice) -> None:
    for start in range(2):
        device.launch(_step(_one(0, start, 1)))
    with pytest.raises(DeviceError, match="collect one first"):
        device.launch(_step(_one(0, 2, 1)))
    with pytest.raises(DeviceError, match="still in flight"):
        device.forward(_step(_one(0, 2, 1)))
    device.collect()
    device.collect()
    with pytest.raises(DeviceError, match="launch one first"):
        device.collect()


@pytest.mark.parametrize("width", [1, 4, 8])
def test_tokens_and_logits_do_not_depend_on_the_width_of_a_step(path: Path, width: int) -> None:
    device = _open(path)
    alone = _reply(device, 8, seq=0)
    for seq in range(width):
        device.forward(_step(_prompt(seq)))
    for i in range(7):
        segments = [_one(seq, 21 + i, alone[i], RowPlan(top_logprobs=0)) for seq in range(width)]
        rows = device.forward(_step(*segments)).sampled
        assert {row[0].token for row in rows} == {alone[i + 1]}
        logprobs = [row[0].logprob or 0.0 for row in rows]
        assert max(logprobs) - min(logprobs) < 1e-5
    device.close()


def test_a_mixed_step_equals_its_parts(device: TorchDevice) -> None:
    """A prompt chunk, a verify of four rows and a decode row of different sequences, in one forward."""
    plain = _reply(device, 6, seq=0)
    assert _reply(device, 6, seq=1) == plain
    rows = (plain[0], *plain[1:4])
    verify = Segment(1, 1, 21, rows, _blocks(1), (GREEDY,) * 4)
    mixed = device.forward(_step(_prompt(2), verify, _one(0, 21, plain[0]), kind=StepKind.MIXED))
    assert [[row.token for row in segment] for segment in mixed.sampled] == [[plain[0]], plain[1:5], [plain[1]]]


def test_rows_without_a_plan_are_fed_and_not_sampled(device: TorchDevice) -> None:
    result = device.forward(_step(Segment(0, 0, 0, _PROMPT, _blocks(0)), _prompt(1)))
    assert [len(rows) for rows in result.sampled] == [0, 1]


def test_plans_reach_their_rows(device: TorchDevice) -> None:
    best = _reply(device, 2)[0]
    banned = RowPlan(edits=LogitEdits(banned=(best,)), top_logprobs=1)
    (row,) = device.forward(_step(Segment(0, 0, 0, _PROMPT, _blocks(0), (banned,)))).sampled[0]
    assert row.token != best
    assert row == Sampled(row.token, row.logprob, ((row.token, row.logprob),))  # type: ignore[arg-type]


def test_a_spilled_sequence_goes_on_in_other_blocks_as_if_nothing_had_happened(path: Path) -> None:
    for memory_bytes in (1 << 20, 0):  # in memory, then through a file
        device = _open(path)
        device._spilled = SpillStore(1 << 20, memory_bytes)
        plain = _reply(device, 7)
        _reply(device, 6)
        kv = device._backend.kv
        before = kv.gather(_blocks(0))
        assert device.spill(0, _blocks(0))
        _reply(device, 3, seq=1)
        kv.data[:, :, _blocks(0)] = 9.0
        moved = list(range(40, 46))
        device.restore(0, moved)
        assert torch.equal(kv.gather(moved), before)
        step = Segment(0, 0, 26, (0,), moved, (GREEDY,), from_previous=True)
        again = device.forward(Step(0, StepKind.DECODE, (step,))).sampled[0][0].token
        assert again == plain[6]
        device.close()


def test_memory_and_disk_share_one_limit_and_none_keeps_nothing() -> None:
    bundle = {"kv": torch.zeros(250)}  # 1000 bytes
    store = SpillStore(2500, memory_bytes=1200)
    assert [store.put(seq, bundle) for seq in range(3)] == [True, True, False]
    assert (list(store._memory), list(store._files)) == ([0], [1])
    store.drop(1)
    assert store.put(2, bundle)
    assert torch.equal(store.take(2)["kv"], bundle["kv"])
    assert store.put(3, bundle)
    store.close()
    assert not SpillStore(0).put(0, bundle)


def test_restoring_what_was_never_spilled_is_an_error(device: TorchDevice) -> None:
    with pytest.raises(DeviceError, match="never spilled"):
        device.restore(5, [0])
    device.spill(0, [0, 1])
    device.release(0)
    with pytest.raises(DeviceError, match="never spilled"):
        device.restore(0, [0, 1])


def test_a_released_sequence_has_nothing_to_continue_from(device: TorchDevice) -> None:
    device.forward(_step(_prompt()))
    device.release(0)
    with pytest.raises(DeviceError, match="no sampled token"):
        device.forward(_step(_one(0, 21, 0, from_previous=True)))


@pytest.mark.parametrize(
    ("segment", "sentence"),
    [
        (Segment(0, 0, 90, (1,) * 10, [0, 1]), "its 2 blocks hold 32"),
        (Segment(0, 0, CONTEXT - 1, (1, 1), list(range(20))), "beyond the context"),
        (Segment(0, 0, 0, (VOCAB,), [0]), "token outside"),
        (Segment(0, 0, 0, (1,), [_BLOCKS]), "block outside"),
        (Segment(0, 0, 0, (1,), [0], (GREEDY, GREEDY)), "plans 2 rows of 1 tokens"),
    ],
)
def test_a_step_outside_the_cache_is_refused_with_its_numbers(
    device: TorchDevice, segment: Segment, sentence: str
) -> None:
    with pytest.raises(DeviceError, match=sentence):
        device.forward(_step(segment))


def test_self_drafts_leave_the_reply_untouched(device: TorchDevice) -> None:
    plain = _reply(device, 12)
    device.forward(_step(_prompt()))
    item = DraftItem(0, 0, 21, plain[0], _PROMPT[-4:], _blocks(0), 3)
    (draft,) = device.draft(DrafterName.SELF, [item], 0.0)
    assert len(draft.tokens) == len(draft.confidences) == 3
    rows = (plain[0], *draft.tokens)
    result = device.forward(_step(Segment(0, 0, 21, rows, _blocks(0), (GREEDY,) * 4), kind=StepKind.VERIFY))
    assert result.sampled[0][0].token == plain[1]
    tokens = plain[:2]
    while len(tokens) < 12:
        tokens.append(device.forward(_step(_one(0, 20 + len(tokens), tokens[-1]))).sampled[0][0].token)
    assert tokens == plain


def test_a_self_draft_stops_below_the_asked_confidence_and_at_the_end_of_its_blocks(device: TorchDevice) -> None:
    device.forward(_step(_prompt()))
    unsure = DraftItem(0, 0, 21, 1, _PROMPT[-4:], _blocks(0), 4)
    assert device.draft(DrafterName.SELF, [unsure], 1.01)[0] == Draft()
    short = DraftItem(0, 0, 30, 1, _PROMPT[-4:], _blocks(0)[:2], 8)
    assert len(device.draft(DrafterName.SELF, [short], 0.0)[0].tokens) == 2


def test_an_absent_drafter_is_named(device: TorchDevice) -> None:
    with pytest.raises(DeviceError, match="no drafter 'mtp': it has self"):
        device.draft(DrafterName.MTP, [DraftItem(0, 0, 1, 1, (1,), [0], 1)], 0.0)


def test_a_head_sees_every_verified_row_once_with_its_successor(path: Path) -> None:
    head = SpyHead()
    device = _open(path, head)
    assert device.facts.drafters == {DrafterName.SELF, DrafterName.MTP}
    first = device.forward(_step(_prompt(save_hidden=frozenset({DrafterName.MTP})))).sampled[0][0].token
    assert device.saved_hidden(0) == 0
    item = DraftItem(0, 0, 21, first, _PROMPT, _blocks(0), 2)
    assert device.draft(DrafterName.MTP, [item], 0.0) == [Draft((first, first))]
    assert device.saved_hidden(0) == -1
    rows = (first, first, first)
    verify = Segment(0, 0, 21, rows, _blocks(0), (GREEDY,) * 3, save_hidden=frozenset({DrafterName.MTP}))
    verified = device.forward(_step(verify, kind=StepKind.VERIFY)).sampled[0][0].token
    assert device.saved_hidden(0) == 21
    device.draft(DrafterName.MTP, [DraftItem(0, 0, 22, verified, (first,), _blocks(0), 1)], 0.0)
    assert [(rows.start, rows.next_tokens) for rows in head.seen] == [(0, (*_PROMPT[1:], first)), (21, (verified,))]
    assert head.seen[1].kv_start == 0
    device.close()


def test_a_head_receives_the_layers_that_it_taps(path: Path) -> None:
    both, last = SpyHead((0, LAYERS - 1)), SpyHead()
    hidden = []
    for head in (both, last):
        device = _open(path, head)
        token = device.forward(_step(_prompt(save_hidden=frozenset({DrafterName.MTP})))).sampled[0][0].token
        device.draft(DrafterName.MTP, [DraftItem(0, 0, 21, token, _PROMPT, _blocks(0), 1)], 0.0)
        hidden.append(head.seen[0].hidden)
        device.close()
    assert hidden[0].shape == (21, 2, 64)
    assert torch.equal(hidden[0][:, 1], hidden[1][:, 0])
    assert not torch.equal(hidden[0][:, 0], hidden[0][:, 1])


def test_drafting_without_saved_rows_drafts_nothing(path: Path) -> None:
    device = _open(path, SpyHead())
    device.forward(_step(_prompt()))
    assert device.draft(DrafterName.MTP, [DraftItem(0, 0, 21, 1, _PROMPT, _blocks(0), 2)], 0.0) == [Draft()]
    device.close()


def test_hidden_rows_and_the_heads_own_cache_are_spilled_too(path: Path) -> None:
    head = SpyHead()
    device = _open(path, head)
    assert head.kv is not None
    head.kv.data.copy_(torch.rand_like(head.kv.data))
    before = head.kv.gather(_blocks(0))
    token = device.forward(_step(_prompt(save_hidden=frozenset({DrafterName.MTP})))).sampled[0][0].token
    assert device.spill(0, _blocks(0))
    assert device.saved_hidden(0) == -1
    device.restore(0, _blocks(1))
    assert torch.equal(head.kv.gather(_blocks(1)), before)
    assert device.saved_hidden(0) == 0
    device.draft(DrafterName.MTP, [DraftItem(0, 0, 21, token, _PROMPT, _blocks(1), 1)], 0.0)
    assert head.seen[0].hidden.shape == (21, 1, 64)
    device.close()


def test_a_failing_backend_ends_in_one_device_error(device: TorchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: object) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(device._backend, "run_host", broken)
    with pytest.raises(DeviceError, match=r"a step failed \(ValueError: boom\)"):
        device.forward(_step(_prompt()))


def test_open_device_sizes_the_pool_and_reports_progress(path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    device = open_device(path, backend="reference", threads=1, progress=lambda *now: seen.append(now))
    assert device.facts.num_blocks * 16 >= CONTEXT
    assert seen[-1][0] == seen[-1][1] > 0
    assert device.facts.dtype == "float32"
    device.close()


def test_an_unknown_backend_is_refused_with_the_known_ones(path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="'gpu9' is unknown: use auto, cuda, native or reference"):
        open_device(path, backend="gpu9")
