"""The MTP head that training measures is the one that the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.head_file import load_head
from engine.model.heads import HeadItem, HeadRows
from engine.model.mtp_head import MTPHead
from engine.train.mtp import run_mtp
from engine.train.mtp_fit import MTPPlan, MTPTraining, default_taps, new_net
from engine.train.session import Session
from tests.unit.train.driving import leading_hits, tiny_backend, tiny_request

PLAN = MTPPlan(intermediate_size=128)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mtp")
    return folder, run_mtp(tiny_request(folder, 60), PLAN, lambda _: None)


def test_training_lowers_the_loss_and_writes_its_figures_into_the_file(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, figures = trained
    assert figures["fit"]["steps"] == 60
    assert figures["fit"]["last_loss"] < figures["fit"]["first_loss"] - 0.5
    file = load_head(folder / "head.safetensors")
    assert file.kind == "mtp"
    assert file.provenance["acceptance"] == figures["acceptance"]
    assert set(file.provenance["acceptance"]["ids=80"]["prompts"]) == {"all", "a", "b", "c"}


def test_the_drafts_of_the_engine_hit_where_the_measurement_says_so(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = trained[0]
    session = Session(tiny_request(folder, 0), default_taps, lambda _: None)
    file = load_head(folder / "head.safetensors")
    net = new_net(session.target, PLAN, session.taps)
    net.load_state_dict(file.tensors)
    rows = 4
    window = session.features.window(torch.arange(rows).numpy())
    measured = MTPTraining(session.target, net, file.vocab_ids, PLAN).hits(window, 4, 60).int().cumprod(-1).sum(-1)
    head = MTPHead(tiny_backend(folder), file, torch.float32, ids=60)
    for row in range(rows):
        walked = leading_hits(head, session, row, 4)
        assert walked == measured[row].tolist()[: len(walked)]
    assert int(measured.sum()) >= 3, "hardly a draft was right, so nothing was compared"


def test_sequences_drafted_together_get_what_they_get_alone(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = trained[0]
    file = load_head(folder / "head.safetensors")
    hidden = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(1))

    def item(seq: int, length: int, count: int) -> HeadItem:
        tokens = tuple(range(1, length + 1))
        blocks = list(range(seq * 4, seq * 4 + 4))
        run = HeadRows(seq, 0, hidden[:length], tokens, blocks, 0)
        return HeadItem(seq, length, tokens[-1], run, blocks, count)

    items = [item(0, 9, 4), item(1, 23, 2), item(2, 1, 3)]
    together = MTPHead(tiny_backend(folder), file, torch.float32).propose(items, 0.0)
    alone = [MTPHead(tiny_backend(folder), file, torch.float32).propose([i], 0.0)[0] for i in items]
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    assert [len(d.tokens) for d in together] == [4, 2, 3]


def test_a_chain_stops_before_a_draft_that_is_not_sure_enough(trained: tuple[Path, dict[str, Any]]) -> None:
    head = MTPHead(tiny_backend(trained[0]), load_head(trained[0] / "head.safetensors"), torch.float32)
    run = HeadRows(0, 0, torch.zeros(3, 2, 64), (1, 2, 3), [0], 0)
    (free,) = head.propose([HeadItem(0, 3, 3, run, [0], 4)], 0.0)
    lowest = min(free.confidences)
    (strict,) = head.propose([HeadItem(0, 3, 3, run, [0], 4)], lowest + 1e-6)
    assert len(strict.tokens) == free.confidences.index(lowest)
    assert strict.tokens == free.tokens[: len(strict.tokens)]
