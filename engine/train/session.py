"""What both training commands share: target, corpus, hidden states, the prompts to measure on, and the result file."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import __version__
from engine.model.head_file import HeadFile, save_head
from engine.text import Text, load_text
from engine.train.corpus import Corpus, CorpusMaker, CorpusPlan, Frame, frequent_ids
from engine.train.evaluate import Hits, acceptance, greedy_corpus, read_prompts
from engine.train.features import Features, Window
from engine.train.fit import FitPlan, Report, fit
from engine.train.generate import Generator
from engine.train.target import FrozenTarget, load_target


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """One run of `metrale train`."""

    model_path: Path
    out: Path
    """The head file; `<name>.json` beside it gets the figures."""
    minutes: float
    """Time for the optimisation itself; making data and measuring come on top."""
    device: str = "auto"
    corpus_path: Path | None = None
    """Where the self-made corpus is kept: read when there, written otherwise."""
    prompts_path: Path | None = None
    """JSON-lines prompts to measure acceptance on (never trained on)."""
    corpus: CorpusPlan = field(default_factory=CorpusPlan)
    fit: FitPlan = field(default_factory=lambda: FitPlan(seconds=0.0))
    held_out: int = 256
    """Rows of the corpus to measure on."""
    vocabulary: int = 16_384
    """Ids that the head may draft at most."""
    reply_tokens: int = 256
    longest_prompt: int = 1900


class Session:
    """A loaded target with its corpus and hidden states."""

    def __init__(self, request: TrainRequest, taps: Callable[[int], tuple[int, ...]], report: Report) -> None:
        self.request, self._began = request, time.monotonic()
        self._report = report
        self.target, self.text = _load(request)
        self.taps = taps(self.target.config.num_layers)
        self._frame = chat_frame(self.text)
        self._generator = Generator(self.target, sorted(self.text.eos_ids))
        self.corpus = self._corpus()
        split = max(1, len(self.corpus) - request.held_out)
        self.training = self.corpus.slice(0, split)
        self.held_out = self.corpus.slice(split, len(self.corpus))
        vocab = self.target.config.vocab_size
        self.vocab_ids = frequent_ids(self.training, vocab, min(request.vocabulary, vocab), sorted(self.text.eos_ids))
        self.dev, self._dev_tasks, self.loops = self._prompts()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()
        self.features = Features(self.target, self.training, self.taps)
        self.report(f"hidden states of {len(self.training.tokens):,} tokens")

    def report(self, text: str) -> None:
        self._report(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def fit_plan(self) -> FitPlan:
        values = asdict(self.request.fit)
        return FitPlan(**{**values, "seconds": self.request.minutes * 60})

    def train(
        self,
        kind: str,
        net: nn.Module,
        shape: dict[str, Any],
        loss: Callable[[Window], torch.Tensor],
        plan: Any,
        measure: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """Fit a head, write it on the way, at the end and with what `measure` found; returns its figures."""

        def write(figures: dict[str, Any]) -> None:
            self.write(kind, shape, net.state_dict(), figures)

        size = sum(p.numel() for p in net.parameters())
        self.report(f"{size:,} parameters, taps {self.taps}")
        unfinished = partial(write, {"unfinished": True})
        result = fit(net, loss, self.features, self.fit_plan(), self.report, unfinished)
        figures: dict[str, Any] = {"plan": asdict(plan), "fit": asdict(result), "parameters": size}
        write(figures)
        figures["acceptance"] = measure()
        write(figures)
        return figures

    def measure(self, hits: Hits, depth: int) -> dict[str, Any]:
        """Acceptance on held-out rows of the corpus and on the prompts, where given."""
        own = acceptance(Features(self.target, self.held_out, self.taps), hits, ["own"] * len(self.held_out), depth)
        result: dict[str, Any] = {"held_out": own["all"]}
        if self.dev is not None:
            result["prompts"] = acceptance(Features(self.target, self.dev, self.taps), hits, self._dev_tasks, depth)
        return result

    def write(self, kind: str, shape: dict[str, Any], state: dict[str, torch.Tensor], figures: dict[str, Any]) -> int:
        """Write the head and its figures; returns the size in bytes."""
        provenance: dict[str, Any] = {
            "command": f"metrale train {kind} {self.request.model_path.name} --minutes {self.request.minutes:g}",
            "engine": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if self.target.device.type == "cuda" else "CPU",
            "model_file": self.request.model_path.name,
            "data": "prompts and replies made by the target model itself; no external text",
            "rows": len(self.training),
            "tokens": len(self.training.tokens),
            "corpus": asdict(self.request.corpus),
            "looping_reply_share": self.loops,
            "seconds": round(time.monotonic() - self._began, 1),
            **figures,
        }
        config = self.target.config
        tensors = {name: tensor.detach().float() for name, tensor in state.items()}
        head = HeadFile(kind, config.key, config.name, shape, tensors, self.vocab_ids, provenance)
        size = save_head(self.request.out, head)
        self.request.out.with_suffix(".json").write_text(json.dumps(provenance, indent=1), encoding="utf-8")
        return size

    def _corpus(self) -> Corpus:
        path = self.request.corpus_path
        if path is not None and path.exists():
            return Corpus.load(path)
        maker = CorpusMaker(self._generator, self.text.encode, self.text.decode, self._frame, self.request.corpus)
        corpus = maker.make(self.report)
        if path is not None:
            corpus.save(path)
        return corpus

    def _prompts(self) -> tuple[Corpus | None, list[str], dict[str, float]]:
        if self.request.prompts_path is None:
            return None, [], {}
        prompts = read_prompts(self.request.prompts_path, self.text.encode, self._frame, self.request.longest_prompt)
        corpus, loops = greedy_corpus(self._generator, prompts, self.request.reply_tokens)
        self.report(f"{len(corpus)} replies to measure on, {loops['all']:.0%} loop")
        return corpus, prompts.tasks, loops


def chat_frame(text: Text) -> Frame:
    """What the model's chat template puts around a first user turn."""
    mark = "@turn@"
    before, after = text.render_chat([{"role": "user", "content": mark}]).split(mark)
    return Frame(text.encode(before), text.encode(after), tuple(sorted(text.eos_ids)))


def _load(request: TrainRequest) -> tuple[FrozenTarget, Text]:
    name = request.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return load_target(request.model_path, dtype, device), load_text(request.model_path)
