"""`metrale verify-lossless`: greedy replies through every lane, width and lever flip against plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.bench.local import LocalEngine, Prompt, load_prompts, open_text
from engine.core.device import Device
from engine.core.vocabulary import Vocabulary

Levers = Mapping[str, object]
PLAIN: Levers = {
    "drafter": "off",
    "pipelined_decode": "off",
    "prefix_cache": "off",
    "always_mixed": "off",
    "trace_level": 0,
}
FLIPS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("drafter", ("off", "ngram", "self", "mtp", "dflash", "combined", "auto")),
    ("num_drafts", (1, 2, 3, 5, 7)),
    ("mtp_gate", ("auto", "force")),
    ("k_ladder", ("1:7,4:3,16:1", "16:3")),
    ("always_mixed", (True, False)),
    ("mixed_slice_tokens", (-1, 0, 48)),
    ("max_prefill_tokens", (64, 512)),
    ("pipelined_decode", (True, False)),
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode the same prompts."""

    name: str
    batch: int
    levers: Levers
    flips: bool = False
    pool_share: float = 1.0
    """Below 1: the pool holds only this share of what the batch needs, so sequences are parked."""


@dataclass(slots=True)
class Finding:
    """How one way compares with plain decoding."""

    way: str
    replies: int = 0
    tokens: int = 0
    differing: int = 0
    compared: int = 0
    """Tokens up to the first difference of each reply, that one included: what follows it is another text."""
    widest_margin: float = 0.0
    """Nats between the two tokens most likely to plain decoding at a first difference, at most: 0.01 is a near-tie."""
    first: str = ""
    lanes: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0

    def add(self, other: Finding) -> None:
        """Take in what another process found about the same way."""
        self.replies += other.replies
        self.tokens += other.tokens
        self.differing += other.differing
        self.compared += other.compared
        self.widest_margin = max(self.widest_margin, other.widest_margin)
        self.first = self.first or other.first
        for lane, count in other.lanes.items():
            self.lanes[lane] = self.lanes.get(lane, 0) + count
        self.preemptions += other.preemptions


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """One finding a way, in the order in which the ways first come."""
    by_way: dict[str, Finding] = {}
    for finding in findings:
        if finding.way in by_way:
            by_way[finding.way].add(finding)
        else:
            by_way[finding.way] = finding
    return list(by_way.values())


def ways(drafters: Sequence[str], batches: Sequence[int]) -> Iterator[Way]:
    """Every lane and mix that the loaded drafters allow."""
    for batch in batches:
        yield Way(f"plain b{batch}", batch, PLAIN)
        yield Way(f"pipelined b{batch}", batch, {**PLAIN, "pipelined_decode": True})
        yield Way(f"mixed b{batch}", batch, {**PLAIN, "always_mixed": True, "max_prefill_tokens": 64})
        yield Way(f"prefix-cached b{batch}", batch, {**PLAIN, "prefix_cache": True})
        for drafter in drafters:
            if batch == 1 or drafter in ("mtp", "dflash"):
                for drafts in (1, 3, 7):
                    levers = {"drafter": drafter, "mtp_gate": "force", "num_drafts": drafts, "k_ladder": "64:7"}
                    yield Way(f"{drafter} x{drafts} b{batch}", batch, levers)
            yield Way(f"{drafter} gated b{batch}", batch, {"drafter": drafter})
        if "mtp" in drafters:
            for drafts in (1, 3, 7):
                levers = {"drafter": "combined", "mtp_gate": "force", "num_drafts": drafts, "k_ladder": "64:7"}
                yield Way(f"combined x{drafts} b{batch}", batch, levers)
        yield Way(f"auto b{batch}", batch, {"drafter": "auto"})
        yield Way(f"flips b{batch}", batch, {"drafter": "auto"}, flips=True)
        if batch > 1:
            yield Way(f"parked b{batch}", batch, {**PLAIN, "admit_watermark": 1}, pool_share=0.3)
            yield Way(f"parked and flips b{batch}", batch, {"admit_watermark": 1}, flips=True, pool_share=0.3)


def compare(
    device: Device,
    vocabulary: Vocabulary,
    prompts: Sequence[Prompt],
    new_tokens: int,
    chosen: Sequence[Way],
    small_pool: Callable[[int], Device],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Decode `prompts` plainly once, then in every way, and count the replies that differ.

    `small_pool(tokens)` opens the same model with a pool of that many tokens."""
    plain = {
        prompt.name: _decode(device, vocabulary, [prompt], new_tokens, Way("plain", 1, PLAIN), progress)[0][prompt.name]
        for prompt in prompts
    }
    findings = []
    small: dict[int, Device] = {}
    for way in chosen:
        progress(way.name)
        runs_on = device
        if way.pool_share < 1:
            need = sum(len(prompt.ids) + new_tokens for prompt in prompts[: way.batch])
            tokens = max(int(need * way.pool_share), max(len(p.ids) for p in prompts) + new_tokens + 64)
            runs_on = small.setdefault(tokens, small.get(tokens) or small_pool(tokens))
        replies, finding = _decode(runs_on, vocabulary, prompts, new_tokens, way, progress)
        for prompt in prompts:
            at = _compare_reply(finding, prompt.name, replies[prompt.name], plain[prompt.name])
            if at is not None:
                before = (*prompt.ids, *plain[prompt.name][:at])
                finding.widest_margin = max(finding.widest_margin, _margin(device, vocabulary, before))
        findings.append(finding)
    return findings


def _decode(
    device: Device,
    vocabulary: Vocabulary,
    prompts: Sequence[Prompt],
    new_tokens: int,
    way: Way,
    progress: Callable[[str], None],
) -> tuple[dict[str, list[int]], Finding]:
    engine = LocalEngine(device, vocabulary, way.batch, **way.levers)
    for prompt in prompts:
        engine.submit(prompt.name, prompt.ids, new_tokens)
    dice = random.Random(way.name)

    def flip(tick: int) -> None:
        if way.flips and tick % 3 == 0:
            name, values = dice.choice(FLIPS)
            engine.set(name, dice.choice(values))  # type: ignore[arg-type]

    out = engine.run(flip)
    finding = Finding(way.name)
    for reply in out.replies.values():
        if reply.finished is None or reply.finished.error:
            raise RuntimeError(f"{way.name}: a reply ended with an error: {reply.finished}")
        finding.preemptions += reply.finished.usage.preemptions
        for lane, count in reply.finished.usage.tokens_by_lane.items():
            finding.lanes[lane] = finding.lanes.get(lane, 0) + count
    return {name: reply.ids for name, reply in out.replies.items()}, finding


def _compare_reply(finding: Finding, name: str, ids: list[int], plain: list[int]) -> int | None:
    """Count a reply; returns where it first differs."""
    finding.replies += 1
    finding.tokens += len(ids)
    if ids == plain:
        finding.compared += len(ids)
        return None
    finding.differing += 1
    at = next((i for i, (a, b) in enumerate(zip(ids, plain, strict=False)) if a != b), min(len(ids), len(plain)))
    finding.compared += at + 1
    finding.first = finding.first or f"prompt {name}, token {at}: {ids[at : at + 3]} is not {plain[at : at + 3]}"
    return at


def _margin(device: Device, vocabulary: Vocabulary, tokens: Sequence[int]) -> float:
    """Nats by which the likeliest token after `tokens` leads the second."""
    engine = LocalEngine(device, vocabulary, 1, **PLAIN)
    engine.submit("margin", tokens, 1, logprobs=2)
    (first, second), *_ = (token.top for token in engine.run().replies["margin"].tokens)
    return first[1] - second[1]


def prepare(
    model: Path, prompts_file: Path, limit: int, shard: tuple[int, int] = (1, 1)
) -> tuple[Vocabulary, list[Prompt]]:
    """The vocabulary, and the prompts of one of several equal shards, numbered from 1."""
    text, vocabulary = open_text(model)
    part, parts = shard
    return vocabulary, load_prompts(prompts_file, text, most_tokens=2048, limit=limit)[part - 1 :: parts]
