"""What acceptance counts, where replies loop, and what a head file keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.config import ModelFileError
from engine.model.head_file import HeadFile, load_head, rounded_as_stored, save_head
from engine.train.corpus import Corpus, frequent_ids, loop_starts
from engine.train.evaluate import Tally
from engine.train.loss import head_loss, soft_targets


def test_a_walk_counts_what_a_decoder_would_accept() -> None:
    tally = Tally(2)
    tally.walk([2, 0, 1, 0, 1, 0])
    # After token 0 both drafts (1, 2) hold and token 3 follows; its draft fails and 4 follows; its draft, 5, holds.
    assert (tally.steps, tally.accepted, tally.offered) == (3, [2, 1], [3, 1])


def test_a_walk_offers_no_draft_beyond_the_end() -> None:
    tally = Tally(4)
    tally.walk([3, 3, 3])
    assert tally.summary() == {"steps": 1, "mean": 2.0, "at": [1.0, 1.0, 0.0, 0.0]}


def test_a_final_loop_is_cut_after_its_second_round() -> None:
    plain = list(range(100, 160))
    loop = [1, 2, 3, 4, 5] * 8
    assert loop_starts([plain, plain + loop, [9] * 30, plain[:3]], torch.device("cpu")) == [60, 70, 2, 3]


def test_the_most_used_ids_of_replies_come_first() -> None:
    corpus = Corpus.of([([7, 7, 7, 7], [5, 5, 3]), ([7], [5, 3, 2])])
    assert frequent_ids(corpus, 10, 4, [9]).tolist() == [9, 5, 3, 2]


def test_a_corpus_survives_its_file(tmp_path: Path) -> None:
    Corpus.of([([1, 2], [3]), ([4], [5, 6])]).save(tmp_path / "c.npz")
    again = Corpus.load(tmp_path / "c.npz")
    assert (again.row(1).tolist(), again.prompts.tolist()) == ([4, 5, 6], [2, 1])
    assert again.slice(1, 2).row(0).tolist() == [4, 5, 6]


def test_the_loss_and_its_gradient_are_those_of_plain_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=generator, requires_grad=True)
    head, normed = torch.randn(11, 8, generator=generator), torch.randn(4, 8, generator=generator)
    targets = soft_targets(normed, head, 0.3)
    torch.testing.assert_close(targets.sum(1), torch.ones(4))
    index, weights = torch.tensor([0, 3, 1, 1, 2, 0]), torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0])
    expected = -(targets[index] * (hidden @ head.t()).log_softmax(1)).sum(1) @ weights
    (gradient,) = torch.autograd.grad(expected, hidden)
    value = head_loss(hidden, head, targets, index, weights)
    (ours,) = torch.autograd.grad(value, hidden)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours, gradient)


def test_a_head_file_keeps_everything_and_rounds_only_matrices(tmp_path: Path) -> None:
    tensors = {"matrix": torch.randn(16, 8), "norm": torch.randn(8), "taps": torch.randn(3, 8)}
    head = HeadFile("mtp", "key", "model", {"taps": [1]}, tensors, torch.tensor([4, 2]), {"command": "train"})
    size = save_head(tmp_path / "h.safetensors", head)
    again = load_head(tmp_path / "h.safetensors")
    assert size == (tmp_path / "h.safetensors").stat().st_size
    assert (again.kind, again.model_key, again.shape, again.provenance) == (
        "mtp",
        "key",
        {"taps": [1]},
        head.provenance,
    )
    assert again.vocab_ids.tolist() == [4, 2]
    torch.testing.assert_close(again.tensors["matrix"], rounded_as_stored(tensors["matrix"]))
    torch.testing.assert_close(again.tensors["matrix"], tensors["matrix"], atol=0.02, rtol=0)
    assert torch.equal(again.tensors["norm"], tensors["norm"])
    assert torch.equal(again.tensors["taps"], tensors["taps"])


def test_a_damaged_head_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "h.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ModelFileError, match=r"h\.safetensors is damaged"):
        load_head(tmp_path / "h.safetensors")
