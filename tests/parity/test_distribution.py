"""At a temperature speculation emits the target's own distribution: chi-square against exact probabilities.

A reply of four tokens from a tiny model, sampled among the four most likely: the first comes with the prompt, the next
two from a verify. Their joint distribution has 64 cells, whose probabilities are computed from the logits.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.bench.local import LocalEngine, Reply
from engine.core.device import (
    Device,
    Draft,
    DrafterName,
    RowPlan,
    Sampled,
    Segment,
    Step,
    StepKind,
    StepResult,
)
from engine.core.vocabulary import Vocabulary
from engine.model.backend import BackendRequest
from engine.model.heads import HeadItem, HeadRows
from engine.model.kv import PagedKV
from engine.model.load import open_source
from engine.model.reference import open_backend
from engine.model.torch_device import TorchDevice
from engine.protocol.commands import Limits, Sampling, Submit
from tests.unit.model.tiny import LAYERS, VOCAB, write_tiny_gguf

TEMPERATURE, TOP_K, NEW_TOKENS, DRAFTS = 0.8, 4, 4, 2
LEAST_EXPECTED = 5.0
ALPHA = 0.001
REPLIES = int(os.environ.get("METRALE_CHI_SQUARE_REPLIES", "120"))
"""Of each drafter; 20,000 take minutes: `METRALE_CHI_SQUARE_REPLIES=20000 python -m pytest -s FILE`."""
DRAFTERS = ("ngram", "self", "mtp", "dflash", "combined", "auto")
WORDS = Vocabulary(token_bytes=(b"x",) * VOCAB, eos_ids=frozenset(), special={})

Opening = tuple[int, ...]
"""The first three tokens of a reply."""


@dataclass
class Setting:
    """A tiny model with heads, and a prompt after which copies of it are sometimes right."""

    device: Device
    prompt: tuple[int, ...]
    expected: dict[Opening, float]


class LikelyHead:
    """Drafts after each first token what is most likely to follow it: often right, often wrong."""

    taps = (LAYERS - 1,)
    kv: PagedKV | None = None

    def __init__(self, drafter: DrafterName) -> None:
        self.drafter = drafter
        self.next: dict[int, tuple[int, ...]] = {}

    def extend(self, rows: Sequence[HeadRows]) -> None:
        """It needs no past."""

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        return [Draft(self.next.get(item.last_token, (0,))[: item.count]) for item in items]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = write_tiny_gguf(tmp_path_factory.mktemp("distribution") / "tiny.gguf")
    heads = [LikelyHead(DrafterName.MTP), LikelyHead(DrafterName.DFLASH)]
    request = BackendRequest(path, open_source(path).config, 1024, 16, 8, 512, "float32", 1)
    device = TorchDevice(open_backend(request), name="tiny", spill_bytes=1 << 20, heads=heads)
    prompt = max((_prompt(seed) for seed in range(40)), key=lambda prompt: _copied_share(device, prompt))
    expected = _probabilities(device, prompt)
    for first in {opening[0] for opening in expected}:
        likeliest = max((opening for opening in expected if opening[0] == first), key=expected.__getitem__)
        for head in heads:
            head.next[first] = likeliest[1:]
    yield Setting(device, prompt, expected)
    device.close()
    torch.set_num_threads(threads)


def _prompt(seed: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).permutation(VOCAB)[:30])


def _likely(device: Device, tokens: Sequence[int]) -> dict[int, float]:
    """What may follow `tokens` and how probable it is, from the logits of one forward."""
    plan = RowPlan(temperature=TEMPERATURE, top_k=TOP_K, top_logprobs=TOP_K)
    result = device.forward(Step(0, StepKind.PREFILL, (Segment(9999, 0, 0, tuple(tokens), list(range(8)), (plan,)),)))
    top = result.sampled[0][0].top
    weights = np.exp(np.array([logprob for _, logprob in top]) / TEMPERATURE)
    return dict(zip((token for token, _ in top), (weights / weights.sum()).tolist(), strict=True))


def _copied_share(device: Device, prompt: tuple[int, ...]) -> float:
    """How often the token that followed the first one in the prompt follows it again."""
    follows = dict(pairwise(prompt))
    return sum(
        share * _likely(device, (*prompt, first)).get(follows.get(first, -1), 0.0)
        for first, share in _likely(device, prompt).items()
    )


def _probabilities(device: Device, prompt: tuple[int, ...]) -> dict[Opening, float]:
    found: dict[Opening, float] = {(): 1.0}
    for _ in range(NEW_TOKENS - 1):
        found = {
            (*before, token): share * next_share
            for before, share in found.items()
            for token, next_share in _likely(device, (*prompt, *before)).items()
        }
    return found


@dataclass
class Drawn:
    replies: Counter[Opening] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0


def _draw(setting: Setting, device: Device, drafter: str, count: int, logprobs: int = -1) -> Drawn:
    """`count` replies, each with a seed of its own, one at a time: some drafters want to be alone."""
    engine = LocalEngine(
        device, WORDS, 1, drafter=drafter, mtp_gate="auto" if drafter == "auto" else "force", num_drafts=DRAFTS,
        ngram_min=1, spec_entry_pin_tokens=0, trace_level=0,
    )  # fmt: skip
    drawn = Drawn()
    for seed in range(count):
        engine.out.replies["a"] = Reply()
        engine.inbox.put(
            Submit(
                request_id="a",
                prompt=setting.prompt,
                sampling=Sampling(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, logprobs=logprobs),
                limits=Limits(max_tokens=NEW_TOKENS),
            )
        )
        engine.run()
        reply = engine.out.replies["a"]
        assert reply.finished is not None
        assert not reply.finished.error
        drawn.replies[tuple(reply.ids[: NEW_TOKENS - 1])] += 1
        drawn.drafted += reply.finished.usage.drafted
        drawn.accepted += reply.finished.usage.accepted
        engine.out.emitted_at.clear()
        engine.out.records.clear()
    return drawn


def _p_value(drawn: Counter[Opening], expected: dict[Opening, float]) -> float:
    """Chi-square of the counts against the probabilities; cells expected fewer than five times are one cell."""
    count = sum(drawn.values())
    large = [opening for opening, share in expected.items() if share * count >= LEAST_EXPECTED]
    shares = [expected[opening] for opening in large]
    counts = [drawn[opening] for opening in large]
    rest = count - sum(counts)
    if 1 - sum(shares) > 1e-9:
        shares.append(1 - sum(shares))
        counts.append(rest)
    elif rest:
        return 0.0
    wanted = np.array(shares) * count
    statistic = float(((np.array(counts) - wanted) ** 2 / wanted).sum())
    freedom = torch.tensor((len(shares) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


class TooEager:
    """A device with a wrong acceptance rule: it takes every draft that is among the likely tokens."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def forward(self, step: Step) -> StepResult:
        result = self._device.forward(step)
        if step.kind is not StepKind.VERIFY:
            return result
        (segment,), (sampled,) = step.segments, result.sampled
        drafts = (*segment.tokens[1:], -1)
        return StepResult((tuple(map(_take_likely, sampled, drafts)),))


def _take_likely(choice: Sampled, draft: int) -> Sampled:
    likely = [token for token, _ in choice.top[:TOP_K]]
    return Sampled(draft, choice.logprob, choice.top) if draft in likely else choice


def test_the_probabilities_are_those_of_plain_decoding(setting: Setting) -> None:
    assert len(setting.expected) == TOP_K ** (NEW_TOKENS - 1)
    assert sum(setting.expected.values()) == pytest.approx(1)
    assert _p_value(_draw(setting, setting.device, "off", REPLIES).replies, setting.expected) > ALPHA


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_draws_from_the_targets_own_distribution(setting: Setting, drafter: str) -> None:
    drawn = _draw(setting, setting.device, drafter, REPLIES)
    assert 0 < drawn.accepted < drawn.drafted, "drafts must be accepted and refused for this to say anything"
    p_value = _p_value(drawn.replies, setting.expected)
    print(f"{drafter}: {REPLIES:,} replies, {drawn.accepted:,} of {drawn.drafted:,} drafts accepted, p = {p_value:.3f}")
    assert p_value > ALPHA


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_a_rule_that_accepts_every_likely_draft_is_found_out(setting: Setting, drafter: str) -> None:
    eager: Device = TooEager(setting.device)  # type: ignore[assignment]
    assert _p_value(_draw(setting, eager, drafter, REPLIES, TOP_K).replies, setting.expected) < ALPHA
