"""Runs a draft head as the device does, one emitted token at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.model.backend import Backend, BackendRequest
from engine.model.heads import DraftHead, HeadItem, HeadRows
from engine.model.load import open_source
from engine.model.reference import open_backend
from engine.train.corpus import CorpusPlan
from engine.train.fit import FitPlan
from engine.train.session import Session, TrainRequest
from tests.unit.model.tiny import write_tiny_gguf

MINUTES = 10_000.0
"""So many that only the number of steps ends a run, however busy the machine is."""
CORPUS = CorpusPlan(12, 64, 40, 24, 8, 150, 32, wave_rows=32)


def tiny_request(folder: Path, steps: int) -> TrainRequest:
    """A run of a few seconds on a random model of three layers."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"task": task, "turns": [f"Say {task}"]}) for task in ("a", "b", "c")))
    fit = FitPlan(0.0, steps=steps, slots=512, time=4000, report_every=5, warmup=2)
    return TrainRequest(
        write_tiny_gguf(folder / "tiny.gguf"), folder / "head.safetensors", MINUTES, "cpu",
        corpus_path=folder / "corpus.npz", prompts_path=prompts, corpus=CORPUS, fit=fit, held_out=4, vocabulary=80,
        reply_tokens=24,
    )  # fmt: skip


def tiny_backend(folder: Path) -> Backend:
    config = open_source(folder / "tiny.gguf").config
    return open_backend(BackendRequest(folder / "tiny.gguf", config, 1024, 16, 4, 512, "float32", 1))


def leading_hits(head: DraftHead, session: Session, row: int, count: int) -> list[int]:
    """Per reply token of a corpus row: how many of the head's drafts after it are right in a row."""
    tokens = session.training.row(row).tolist()
    hidden = session.target.hidden_states(torch.tensor([tokens]), head.taps)[0]
    blocks = list(range(row * 16, row * 16 + 16))
    leading, seen = [], 0
    for length in range(int(session.training.prompts[row]), len(tokens)):  # position of the last emitted token
        run = HeadRows(row, seen, hidden[seen:length], tuple(tokens[seen + 1 : length + 1]), blocks, 0)
        (draft,) = head.propose([HeadItem(row, length, tokens[length], run, blocks, count)], 0.0)
        right = [a == b for a, b in zip(draft.tokens, tokens[length + 1 :], strict=False)]
        leading.append(right.index(False) if False in right else len(right))
        seen = length
    return leading
