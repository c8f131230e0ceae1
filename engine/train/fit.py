"""The optimisation loop that both heads share: Muon for matrices, AdamW for the rest, a budget in seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from engine.train.features import Features, Window
from engine.train.target import FrozenTarget

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FitPlan:
    seconds: float
    steps: int = 1_000_000
    """Ends the run too, whichever comes first."""
    slots: int = 32_768
    """Reply positions of a batch."""
    time: int = 160_000
    """Positions of a batch, prompts included."""
    matrix_rate: float = 2e-3
    vector_rate: float = 1e-3
    warmup: int = 60
    report_every: int = 100
    checkpoint_seconds: float = 90.0
    seed: int = 3


@dataclass(frozen=True, slots=True)
class FitResult:
    steps: int
    slots: int
    """Reply positions seen, repetitions included."""
    seconds: float
    first_loss: float
    last_loss: float


def fit(
    net: nn.Module,
    loss: Callable[[Window], torch.Tensor],
    features: Features,
    plan: FitPlan,
    report: Report,
    checkpoint: Callable[[], None] | None = None,
) -> FitResult:
    """Minimise `loss` until the time or the steps are used up; the rate falls linearly to zero on the way."""
    matrices = [p for p in net.parameters() if p.ndim == 2 and p.shape[0] > 8]
    vectors = [p for p in net.parameters() if not (p.ndim == 2 and p.shape[0] > 8)]
    muon = torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(vectors, lr=plan.vector_rate, weight_decay=0.0, betas=(0.9, 0.98))
    base = [(group, float(group["lr"])) for optimizer in (muon, adam) for group in optimizer.param_groups]
    began, slots, step = time.monotonic(), 0, 0
    saved = began
    recent: list[torch.Tensor] = []
    first = last = math.nan
    for window in _forever(features, plan):
        used = max((time.monotonic() - began) / plan.seconds, step / plan.steps)
        if used >= 1:
            break
        for group, rate in base:
            group["lr"] = rate * min(1.0, (step + 1) / plan.warmup) * (1.0 - used)
        with autocast(features.target):
            value = loss(window)
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        muon.step()
        adam.step()
        net.zero_grad(set_to_none=True)
        recent.append(value.detach())
        slots += window.slots * len(window.start)
        step += 1
        if step % plan.report_every == 0 or step == 1:
            last = float(torch.stack(recent).mean())  # the only wait for the device, so that the clock is honest
            first = last if math.isnan(first) else first
            recent = []
            report(f"step {step}, loss {last:.4f}, {slots / (time.monotonic() - began):,.0f} slots/s")
            if checkpoint is not None and time.monotonic() - saved > plan.checkpoint_seconds:
                checkpoint()
                saved = time.monotonic()
    if recent:
        last = float(torch.stack(recent).mean())
    return FitResult(step, slots, time.monotonic() - began, first, last)


def autocast(target: FrozenTarget) -> torch.autocast:
    """bfloat16 products where the target is bfloat16; does nothing in float32."""
    return torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16)


def _forever(features: Features, plan: FitPlan) -> Iterator[Window]:
    epoch = 0
    while True:
        for rows in features.batches(plan.slots, plan.time, plan.seed + epoch):
            yield features.window(rows)
        epoch += 1
