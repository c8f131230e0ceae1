"""The DFlash head that training measures is the one that the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model import dflash_head
from engine.model.dflash_head import DFlashHead
from engine.model.head_file import load_head
from engine.model.heads import HeadItem, HeadRows
from engine.train.dflash import run_dflash
from engine.train.dflash_fit import DFlashPlan, DFlashTraining, new_net
from engine.train.mtp_fit import default_taps
from engine.train.session import Session
from tests.unit.train.driving import leading_hits, tiny_backend, tiny_request

PLAN = DFlashPlan(layers=2, chain_size=32, candidates=dflash_head.CANDIDATES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dflash")
    return folder, run_dflash(tiny_request(folder, 90), PLAN, lambda _: None)


def test_training_lowers_the_loss(trained: tuple[Path, dict[str, Any]]) -> None:
    fitted = trained[1]["fit"]
    assert fitted["last_loss"] < fitted["first_loss"] - 0.5


def test_the_drafts_of_the_engine_hit_where_the_measurement_says_so(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = trained[0]
    session = Session(tiny_request(folder, 0), default_taps, lambda _: None)
    file = load_head(folder / "head.safetensors")
    net = new_net(session.target, PLAN, session.taps)
    net.load_state_dict(file.tensors)
    window = session.features.window(torch.arange(3).numpy())
    training = DFlashTraining(session.target, net, file.vocab_ids, PLAN)
    measured = training.hits(window, 60, chain=True).int().cumprod(-1).sum(-1)
    head = DFlashHead(tiny_backend(folder), file, torch.float32, ids=60)
    for row in range(3):
        walked = leading_hits(head, session, row, 7)
        assert walked == measured[row].tolist()[: len(walked)]
    assert int(measured.max()) >= 1, "no draft was right, so nothing was compared"


def test_sequences_drafted_together_get_what_they_get_alone(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = trained[0]
    file = load_head(folder / "head.safetensors")
    hidden = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(1))

    def item(seq: int, length: int, count: int) -> HeadItem:
        tokens = tuple(range(1, length + 1))
        blocks = list(range(seq * 4, seq * 4 + 4))
        run = HeadRows(seq, 0, hidden[:length], tokens, blocks, 0)
        return HeadItem(seq, length, tokens[-1], run, blocks, count)

    items = [item(0, 9, 7), item(1, 23, 2), item(2, 1, 30)]
    together = DFlashHead(tiny_backend(folder), file, torch.float32).propose(items, 0.0)
    alone = [DFlashHead(tiny_backend(folder), file, torch.float32).propose([i], 0.0)[0] for i in items]
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    assert [len(d.tokens) for d in together] == [7, 2, 7]
