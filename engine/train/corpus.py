"""The training corpus: prompts that the model writes itself, its own replies, and where they start to loop."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.train import openers
from engine.train.generate import Generator, Job

Encode = Callable[[str], list[int]]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Frame:
    """The chat template around one user turn, as tokens."""

    before: list[int]
    after: list[int]
    """From the end of the turn to where the reply begins."""
    stop: tuple[int, ...]
    """Ids that end a turn."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows of prompt and reply in one flat array."""

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    """`[rows + 1]`; row `i` is `tokens[offsets[i]:offsets[i + 1]]`."""
    prompts: npt.NDArray[np.int64]
    """Prompt length per row."""

    def __len__(self) -> int:
        return len(self.prompts)

    def row(self, index: int) -> npt.NDArray[np.int32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def slice(self, start: int, stop: int) -> Corpus:
        low, high = self.offsets[start], self.offsets[stop]
        return Corpus(self.tokens[low:high], self.offsets[start : stop + 1] - low, self.prompts[start:stop])

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, tokens=self.tokens, offsets=self.offsets, prompts=self.prompts)

    @staticmethod
    def load(path: Path) -> Corpus:
        with np.load(path) as file:
            return Corpus(file["tokens"], file["offsets"], file["prompts"])

    @staticmethod
    def of(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Corpus:
        """From pairs of prompt and reply."""
        lengths = [len(p) + len(r) for p, r in rows]
        flat = np.fromiter(chain.from_iterable(chain(p, r) for p, r in rows), np.int32, sum(lengths))
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        return Corpus(flat, offsets, np.array([len(p) for p, _ in rows], np.int64))


@dataclass(frozen=True, slots=True)
class CorpusPlan:
    """How much to make."""

    documents: int = 8_000
    document_tokens: int = 720
    turns: int = 40_000
    turn_tokens: int = 128
    long_prompts: int = 11_000
    longest_prompt: int = 1700
    reply_tokens: int = 256
    greedy_share: float = 0.65
    wave_rows: int = 4096
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Document:
    """Self-made text; `after_space` is the same with a space before its first word."""

    tokens: list[int]
    after_space: list[int]


class CorpusMaker:
    """Documents, then user turns, then prompts about documents, then a reply to every prompt."""

    def __init__(
        self,
        generator: Generator,
        encode: Encode,
        decode: Callable[[list[int]], str],
        frame: Frame,
        plan: CorpusPlan,
    ) -> None:
        self._generator, self._encode, self._decode, self._plan = generator, encode, decode, plan
        self._frame = frame
        self._random = random.Random(plan.seed)

    def make(self, report: Report) -> Corpus:
        documents = self._documents()
        report(f"{len(documents)} documents")
        prompts = self._turns()
        report(f"{len(prompts)} user turns")
        prompts += self._long_prompts(documents)
        prompts = [p for p in dict.fromkeys(prompts) if len(p) <= self._plan.longest_prompt]
        self._random.shuffle(prompts)
        report(f"{len(prompts)} distinct prompts")
        jobs = [Job(p, self._reply_temperature(), self._plan.reply_tokens) for p in prompts]
        replies = self._generator.run(jobs, self._plan.wave_rows)
        lengths = loop_starts(replies, self._generator.device)
        rows = [(p, r[:n]) for p, r, n in zip(prompts, replies, lengths, strict=True) if n >= 4]
        corpus = Corpus.of(rows)
        looped = sum(n < len(r) for n, r in zip(lengths, replies, strict=True))
        report(f"{len(corpus)} rows, {len(corpus.tokens)} tokens, {looped} replies cut where they loop")
        return corpus

    def _reply_temperature(self) -> float:
        return 0.0 if self._random.random() < self._plan.greedy_share else self._random.uniform(0.4, 0.9)

    def _documents(self) -> list[Document]:
        """Raw text without the chat template, so that it reads like pages and not like replies."""
        jobs, spaced = [], []
        for _ in range(self._plan.documents):
            opener = self._random.choice(openers.DOCUMENTS)
            length = self._random.randint(self._plan.document_tokens // 4, self._plan.document_tokens)
            jobs.append(Job(tuple(self._encode(opener)), self._random.uniform(0.7, 1.0), length))
            spaced.append(self._encode(" " + opener))
        texts = [t[:-1] if t[-1] in self._frame.stop else t for t in self._generator.run(jobs, self._plan.wave_rows)]
        lengths = loop_starts(texts, self._generator.device)
        return [
            Document(list(job.tokens) + text, opener + text)
            for job, opener, text, length in zip(jobs, spaced, texts, lengths, strict=True)
            if length == len(text) >= 24
        ]

    def _turns(self) -> list[tuple[int, ...]]:
        kinds = self._random.choices(
            ("chat", "free", "question", "german", "math"), (30, 12, 20, 19, 19), k=self._plan.turns
        )
        heads = [self._frame.before + (self._encode(text) if (text := self._opener(kind)) else []) for kind in kinds]
        return self._continued(heads, self._plan.turn_tokens)

    def _opener(self, kind: str) -> str:
        choose = self._random.choice
        if kind == "chat":
            return choose(openers.CHAT)
        if kind == "question":
            return choose(openers.QUESTIONS)
        if kind == "german":
            return choose(openers.TRANSLATE) + choose(openers.GERMAN)
        return choose(openers.NAMES) + choose(openers.MATH) if kind == "math" else ""

    def _long_prompts(self, documents: list[Document]) -> list[tuple[int, ...]]:
        closed: list[tuple[int, ...]] = []
        opened: list[list[int]] = []
        for index in range(self._plan.long_prompts if documents else 0):
            pair = self._random.choice(documents), self._random.choice(documents)
            if index % 2:
                closed.append(
                    tuple(
                        self._frame.before
                        + self._filled(self._random.choice(openers.CLOSED), *pair)
                        + self._frame.after
                    )
                )
            else:
                question = self._random.choice(openers.QUESTIONS) if self._random.random() < 0.5 else ""
                opened.append(self._frame.before + self._filled(self._random.choice(openers.OPEN) + question, *pair))
        return closed + self._continued(opened, 48)

    def _filled(self, form: str, doc: Document, other: Document) -> list[int]:
        """The form's text and the documents' tokens, with the space of `: {doc}` inside the document's first token."""
        tokens: list[int] = []
        for piece in re.split(r"( ?\{(?:doc|other)\})", form):
            if not piece.endswith(("{doc}", "{other}")):
                tokens += self._encode(piece) if piece else []
                continue
            source = doc if piece.endswith("{doc}") else other
            tokens += source.after_space if piece.startswith(" ") else source.tokens
        return tokens

    def _continued(self, heads: list[list[int]], limit: int) -> list[tuple[int, ...]]:
        """User turns that the model writes on from `heads`; one that never ends is cut at its last sentence."""
        jobs = [Job(tuple(head), self._random.uniform(0.7, 1.05), limit) for head in heads]
        turns = self._generator.run(jobs, self._plan.wave_rows)
        lengths = loop_starts(turns, self._generator.device)
        ended = [(h, self._ending(t)) for h, t, n in zip(heads, turns, lengths, strict=True) if n == len(t)]
        return [tuple(h + t + self._frame.after) for h, t in ended if t is not None]

    def _ending(self, turn: list[int]) -> list[int] | None:
        if turn and turn[-1] in self._frame.stop:
            return turn[:-1]
        text = self._decode(turn)
        last = max(text.rfind(mark) for mark in ".?!\n")
        return self._encode(text[: last + 1]) if last > 0 else None


def loop_starts(rows: Sequence[Sequence[int]], device: torch.device, longest_period: int = 64) -> list[int]:
    """Per row the length of the part worth learning from: all of it, or up to the second round of a final loop.

    A loop is a tail of at least three rounds and 24 tokens that repeats with one period.
    """
    lengths: list[int] = []
    for start in range(0, len(rows), 8192):
        part = rows[start : start + 8192]
        width = max((len(row) for row in part), default=0)
        aligned = torch.tensor(
            [[-1] * (width - len(row)) + list(row) for row in part], dtype=torch.int32, device=device
        )
        lengths += _loop_starts(aligned, [len(row) for row in part], longest_period)
    return lengths


def _loop_starts(aligned: torch.Tensor, sizes: list[int], longest_period: int) -> list[int]:
    """`aligned` is `[rows, width]`, padded with -1 on the left."""
    size = torch.tensor(sizes, device=aligned.device)
    keep = size.clone()
    for period in range(1, min(longest_period, aligned.shape[1] // 3) + 1):
        equal = (aligned[:, period:] == aligned[:, :-period]) & (aligned[:, :-period] >= 0)
        same = equal.flip(1).to(torch.int32).cumprod(1).sum(1)  # length of the tail that repeats
        loops = (same >= max(2 * period, 24)) & (keep == size)
        keep = torch.where(loops, size - same + period, keep)
    return [int(value) for value in keep.tolist()]


def frequent_ids(corpus: Corpus, vocab_size: int, count: int, always: Sequence[int]) -> torch.Tensor:
    """The ids that replies use most, most frequent first, after those in `always`; int64 `[count]`."""
    sizes = np.diff(corpus.offsets)
    column = np.arange(len(corpus.tokens)) - np.repeat(corpus.offsets[:-1], sizes)
    weight = np.where(column >= np.repeat(corpus.prompts, sizes), 1.0, 0.05)
    counts = np.bincount(corpus.tokens, weights=weight, minlength=vocab_size)
    counts[list(always)] = np.inf
    return torch.from_numpy(np.argsort(-counts, kind="stable")[:count].copy())
