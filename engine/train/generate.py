"""Replies of the target model for thousands of prompts at once, the raw material of every draft head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.train.target import FrozenTarget

PREFILL_TOKENS = 1 << 16
"""Tokens of one prefill product; bounds the activations."""

CACHE_TOKENS = 3 << 19
"""Cache rows of one wave on a GPU: 36 GB of bfloat16 for the default model."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to continue."""

    tokens: tuple[int, ...]
    temperature: float
    """0 is greedy."""
    max_new: int


class Generator:
    """Samples continuations in waves of equal cache length; on CUDA each wave replays one captured step."""

    def __init__(self, target: FrozenTarget, stop: Sequence[int], min_p: float = 0.03) -> None:
        self._target = target
        self._stop = torch.tensor(list(stop), device=target.device)
        self._min_p = min_p

    @property
    def device(self) -> torch.device:
        return self._target.device

    @torch.no_grad()
    def run(self, jobs: Sequence[Job], wave_rows: int, *, cut_stragglers: bool = True) -> list[list[int]]:
        """New tokens per job, the stop token included where one was reached.

        With `cut_stragglers` a wave ends when 98 % of its rows have; the others are cut there.
        """
        order = sorted(range(len(jobs)), key=lambda i: (len(jobs[i].tokens) + jobs[i].max_new, len(jobs[i].tokens)))
        replies: list[list[int]] = [[] for _ in jobs]
        at = 0
        while at < len(order):
            wave = self._next_wave(jobs, order, at, wave_rows)
            for index, reply in zip(wave, self._wave([jobs[i] for i in wave], cut_stragglers), strict=True):
                replies[index] = reply
            at += len(wave)
        return replies

    def _next_wave(self, jobs: Sequence[Job], order: list[int], at: int, wave_rows: int) -> list[int]:
        """As many of the sorted jobs as the cache holds at the length of the longest among them."""
        wave: list[int] = []
        for index in order[at : at + wave_rows]:
            length = _cache_length(jobs[index])
            if wave and (len(wave) + 1) * length > CACHE_TOKENS:
                break
            wave.append(index)
        return wave

    def _wave(self, jobs: list[Job], cut_stragglers: bool) -> list[list[int]]:
        state = _Wave(self._target, jobs, self._stop, self._min_p)
        steps = max(job.max_new for job in jobs)
        out = torch.zeros(len(jobs), steps, dtype=torch.int32, device=self._target.device)
        state.prefill()
        step = state.captured_step() if self._target.device.type == "cuda" else state.step
        for index in range(steps):
            out[:, index] = state.token
            if index % 16 == 15 and int(state.alive.sum()) * 50 < (len(jobs) if cut_stragglers else 1):
                break
            step()
        made = out[:, : index + 1]
        stopped = torch.isin(made, self._stop)
        ends = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, index + 1).tolist()
        return [row[: min(end, job.max_new)] for job, row, end in zip(jobs, made.tolist(), ends, strict=True)]


class _Wave:
    def __init__(self, target: FrozenTarget, jobs: list[Job], stop: torch.Tensor, min_p: float) -> None:
        c, device = target.config, target.device
        self.target, self.stop = target, stop
        self.length = max(_cache_length(job) for job in jobs)
        rows = len(jobs)
        shape = (c.num_layers, rows, c.num_kv_heads, self.length, c.head_dim)
        self.keys = torch.zeros(shape, dtype=target.dtype, device=device)
        self.values = torch.zeros(shape, dtype=target.dtype, device=device)
        self.prompts = [job.tokens for job in jobs]
        self.position = torch.tensor([len(job.tokens) for job in jobs], device=device)
        self.temperature = torch.tensor([[job.temperature] for job in jobs], device=device)
        self.log_min_p = float(torch.tensor(min_p).log())
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.alive = torch.ones(rows, dtype=torch.bool, device=device)
        self.row = torch.arange(rows, device=device)
        self.column = torch.arange(self.length, device=device)

    def prefill(self) -> None:
        """Fill the cache with the prompts and sample each row's first token."""
        longest = max(len(p) for p in self.prompts)
        rows_at_once = max(1, PREFILL_TOKENS // longest)
        for start in range(0, len(self.prompts), rows_at_once):
            part = self.prompts[start : start + rows_at_once]
            width = max(len(p) for p in part)
            padded = torch.tensor([list(p) + [0] * (width - len(p)) for p in part], device=self.token.device)
            rows = slice(start, start + len(part))
            hidden = self._prefill_rows(padded, rows)
            last = hidden[torch.arange(len(part), device=hidden.device), self.position[rows] - 1]
            self.token[rows] = self._sample(last, rows)
        self.alive &= ~torch.isin(self.token, self.stop)

    def _prefill_rows(self, tokens: torch.Tensor, rows: slice) -> torch.Tensor:
        target, width = self.target, tokens.shape[1]
        angles = target.angles(torch.arange(width, device=tokens.device).expand_as(tokens))
        x = target.embed(tokens)
        for index, layer in enumerate(target.weights.layers):
            q, k, v = (t.transpose(1, 2) for t in target.qkv(layer, x, angles))
            self.keys[index, rows, :, :width] = k
            self.values[index, rows, :, :width] = v
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = target.finish(layer, x, attended.transpose(1, 2).flatten(2))
        return x

    def step(self) -> None:
        """Feed every row's last token and sample the next; rows that stopped run on and are cut later."""
        target, c = self.target, self.target.config
        group = c.num_heads // c.num_kv_heads
        seen = (self.column <= self.position[:, None])[:, None, None]  # [rows, 1, 1, length]
        mask = torch.zeros(seen.shape, dtype=target.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        angles = target.angles(self.position)
        x = target.embed(self.token)
        for index, layer in enumerate(target.weights.layers):
            q, k, v = target.qkv(layer, x, angles)
            self.keys[index, self.row, :, self.position] = k
            self.values[index, self.row, :, self.position] = v
            grouped = q.unflatten(1, (c.num_kv_heads, group))  # the group's queries are rows of one key head
            attended = functional.scaled_dot_product_attention(
                grouped, self.keys[index], self.values[index], attn_mask=mask.expand(-1, c.num_kv_heads, group, -1)
            )
            x = target.finish(layer, x, attended.flatten(1))
        self.token.copy_(self._sample(x, slice(None)))
        self.alive &= ~torch.isin(self.token, self.stop)
        self.position.add_(1).clamp_(max=self.length - 1)

    def captured_step(self) -> Callable[[], None]:
        """The same step as one CUDA graph; the warm-up's effects on the state are undone."""
        saved = [t.clone() for t in (self.token, self.alive, self.position)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for tensor, value in zip((self.token, self.alive, self.position), saved, strict=True):
            tensor.copy_(value)
        return graph.replay

    def _sample(self, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        """Gumbel sampling among tokens of at least `min_p` of the best one's probability."""
        logits = functional.linear(self.target.norm(hidden), self.target.weights.head).float()
        temperature = self.temperature[rows]
        floor = logits.amax(-1, keepdim=True) + self.log_min_p * temperature
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-10).log_().neg_()
        return torch.where(logits < floor, float("-inf"), logits + temperature * noise).argmax(-1)


def _cache_length(job: Job) -> int:
    return -(-(len(job.tokens) + job.max_new + 1) // 64) * 64
