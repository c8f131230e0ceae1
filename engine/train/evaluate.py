"""Acceptance as a greedy decoder sees it: walk over each reply, draft, accept the leading hits, move on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.train.corpus import Corpus, Encode, Frame, loop_starts
from engine.train.features import Features, Window
from engine.train.fit import autocast
from engine.train.generate import Generator, Job

Hits = Callable[[Window], torch.Tensor]
"""bool `[batch, slots, depth]`: whether draft `d` after a slot is right, the drafts before it given."""


class Tally:
    """Counts of walks with up to `count` drafts a step."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.offered = [0] * count
        self.accepted = [0] * count
        self.steps = 0

    def walk(self, leading: Sequence[int]) -> None:
        """Decode one reply; `leading[s]` is the number of right drafts in a row after reply token `s`."""
        slot, last = 0, len(leading) - 1
        while slot < last:
            offered = min(self.count, last - slot)
            accepted = min(leading[slot], offered)
            for position in range(accepted):
                self.accepted[position] += 1
            for position in range(min(accepted + 1, offered)):  # a draft counts once all before it were accepted
                self.offered[position] += 1
            self.steps += 1
            slot += accepted + 1

    def __add__(self, other: Tally) -> Tally:
        total = Tally(self.count)
        total.steps = self.steps + other.steps
        total.offered = [a + b for a, b in zip(self.offered, other.offered, strict=True)]
        total.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]
        return total

    def summary(self) -> dict[str, Any]:
        by_position = [round(a / max(1, o), 4) for a, o in zip(self.accepted, self.offered, strict=True)]
        return {"steps": self.steps, "mean": round(sum(self.accepted) / max(1, self.steps), 4), "at": by_position}


def acceptance(features: Features, hits: Hits, tasks: Sequence[str], depth: int) -> dict[str, dict[str, Any]]:
    """Per task and over `all`: mean accepted and acceptance by position for each draft count up to `depth`."""
    tallies = {task: [Tally(k) for k in range(1, depth + 1)] for task in dict.fromkeys(tasks)}
    for rows in features.batches(8192, 60_000, 0):
        with autocast(features.target):
            leading = hits(features.window(rows)).int().cumprod(-1).sum(-1).tolist()
        for index, row in enumerate(rows):
            length = len(features.corpus.row(int(row))) - int(features.corpus.prompts[row])
            for tally in tallies[tasks[int(row)]]:
                tally.walk(leading[index][:length])
    everything = [sum(counts[1:], counts[0]) for counts in zip(*tallies.values(), strict=True)]
    named = {"all": everything, **tallies}
    return {name: {f"K={t.count}": t.summary() for t in counts} for name, counts in named.items()}


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts to evaluate on, never to train on."""

    tokens: list[tuple[int, ...]]
    tasks: list[str]


def read_prompts(path: Path, encode: Encode, frame: Frame, longest: int) -> Prompts:
    """The first turns of a JSON-lines file with `turns` and `task`, in the model's chat template."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    tokens = [(*frame.before, *encode(record["turns"][0]), *frame.after) for record in records]
    fitting = [i for i, prompt in enumerate(tokens) if len(prompt) <= longest]
    return Prompts([tokens[i] for i in fitting], [str(records[i]["task"]) for i in fitting])


def greedy_corpus(generator: Generator, prompts: Prompts, reply_tokens: int) -> tuple[Corpus, dict[str, float]]:
    """Greedy replies to all prompts, and per task the share of them that loop."""
    jobs = [Job(prompt, 0.0, reply_tokens) for prompt in prompts.tokens]
    replies = generator.run(jobs, len(jobs), cut_stragglers=False)
    loops = [n < len(r) for n, r in zip(loop_starts(replies, generator.device), replies, strict=True)]
    shares = {
        task: round(
            sum(x for x, t in zip(loops, prompts.tasks, strict=True) if t == task) / prompts.tasks.count(task), 4
        )
        for task in dict.fromkeys(prompts.tasks)
    }
    shares["all"] = round(sum(loops) / max(1, len(loops)), 4)
    return Corpus.of(list(zip(prompts.tokens, replies, strict=True))), shares
