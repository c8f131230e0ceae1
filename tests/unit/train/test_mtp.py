"""The MTP head that training measures is the one that the engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.backend import BackendRequest
from engine.model.head_file import load_head
from engine.model.heads import HeadItem, HeadRows
from engine.model.load import open_source
from engine.model.mtp_head import MTPHead
from engine.model.reference import open_backend
from engine.train.corpus import CorpusPlan
from engine.train.fit import FitPlan
from engine.train.mtp import run_mtp
from engine.train.mtp_fit import MTPPlan, MTPTraining, new_net
from engine.train.session import Session, TrainRequest
from tests.unit.model.tiny import write_tiny_gguf

CORPUS = CorpusPlan(12, 64, 40, 24, 8, 150, 32, wave_rows=32)


def request(folder: Path, steps: int) -> TrainRequest:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"task": task, "turns": [f"Say {task}"]}) for task in ("a", "b", "c")))
    fit = FitPlan(0.0, steps=steps, slots=512, time=4000, report_every=5, warmup=2)
    return TrainRequest(
        write_tiny_gguf(folder / "tiny.gguf"), folder / "head.safetensors", 1.0, "cpu", prompts_path=prompts,
        corpus=CORPUS, fit=fit, held_out=4, vocabulary=80, reply_tokens=24,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mtp")
    return folder, run_mtp(request(folder, 30), MTPPlan(intermediate_size=128), lambda _: None)


def test_training_lowers_the_loss(trained: tuple[Path, dict[str, Any]]) -> None:
    fitted = trained[1]["fit"]
    assert fitted["steps"] == 30
    assert fitted["last_loss"] < fitted["first_loss"] - 0.3


def test_the_drafts_of_the_engine_hit_where_the_measurement_says_so(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = trained[0]
    request_again = request(folder, 0)
    session = Session(request_again, lambda _: (1, 2), lambda _: None)
    file = load_head(folder / "head.safetensors")
    net = new_net(session.target, MTPPlan(intermediate_size=128), (1, 2))
    net.load_state_dict(file.tensors)
    rows = torch.arange(3).numpy()
    window = session.features.window(rows)
    hits = MTPTraining(session.target, net, file.vocab_ids, MTPPlan()).hits(window, 4, 60)
    source = open_source(folder / "tiny.gguf")
    backend = open_backend(BackendRequest(folder / "tiny.gguf", source.config, 1024, 16, 4, 512, "float32", 1))
    head = MTPHead(backend, file, torch.float32, ids=60)
    for row in range(3):
        walked = _leading_hits(head, session, row, 4)
        assert walked == hits[row].int().cumprod(-1).sum(-1).tolist()[: len(walked)]
    assert hits.any()


def _leading_hits(head: MTPHead, session: Session, row: int, count: int) -> list[int]:
    """Drive the head as the device does: new hidden rows in, drafts out, one position at a time."""
    tokens = session.training.row(row).tolist()
    prompt = int(session.training.prompts[row])
    hidden = session.target.hidden_states(torch.tensor([tokens]), (1, 2))[0]
    blocks = list(range(row * 16, row * 16 + 16))
    leading, seen = [], 0
    for length in range(prompt, len(tokens)):  # `length` is the position of the last emitted token
        run = HeadRows(row, seen, hidden[seen:length], tuple(tokens[seen + 1 : length + 1]), blocks, 0)
        (draft,) = head.propose([HeadItem(row, length, tokens[length], run, blocks, count)], 0.0)
        right = [a == b for a, b in zip(draft.tokens, tokens[length + 1 :], strict=False)]
        leading.append(right.index(False) if False in right else len(right))
        seen = length
    return leading
