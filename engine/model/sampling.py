"""From logits to tokens: edits, temperature, truncation and one draw per row.

A row's token depends on its own logits and plan alone, so a replayed row draws the same token in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.device import DeviceError, LogitEdits, RowPlan, Sampled

_CANDIDATES = (256, 4096)
"""How many of the largest logits are sorted first, and second: sorting all of a vocabulary takes milliseconds."""


Drawing = Callable[[Sequence[torch.Tensor], Sequence[RowPlan]], torch.Tensor]
"""How one token of each row is drawn at its plan's temperature."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Tokens of the planned rows, still on the device that sampled them."""

    tokens: torch.Tensor
    """int64 `[rows]`."""
    logprobs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Per row that asked: its token's log probability `[]`, the top log probabilities and their ids `[n]`."""

    def to_host(self, host_tokens: Sequence[int]) -> list[Sampled]:
        """Plain values; `host_tokens` is `tokens`, copied to the host by the caller."""
        rows = []
        for index, token in enumerate(host_tokens):
            if index not in self.logprobs:
                rows.append(Sampled(token))
                continue
            own, values, ids = self.logprobs[index]
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            rows.append(Sampled(token, float(own), top))
        return rows


def is_plain_greedy(plan: RowPlan) -> bool:
    """Whether the argmax of the raw logits is all that the row needs."""
    return plan.temperature <= 0 and plan.edits is None and plan.top_logprobs < 0


def draw(rows: Sequence[torch.Tensor], plans: Sequence[RowPlan]) -> torch.Tensor:
    """One token per row of logits `[vocab]`: temperature, top-k, top-p, min-p, then the inverse CDF at `uniform`.

    On a CPU only the largest logits are sorted first; a row whose draw they do not settle sorts more of them, with
    the same result.
    """
    logits = torch.stack(list(rows))
    vocab = logits.shape[-1]
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    left = list(range(logits.shape[0]))
    for candidates in (vocab,) if logits.is_cuda else (*_CANDIDATES, vocab):
        part = logits if len(left) == logits.shape[0] else logits[left]
        tokens[left], settled = _draw(part, [plans[row] for row in left], min(candidates, vocab))
        left = [row for row, done in zip(left, settled.tolist(), strict=True) if not done]
        if not left:
            break
    return tokens


def sample_rows(
    logits: torch.Tensor, argmax: torch.Tensor, plans: Sequence[RowPlan], draw: Drawing = draw
) -> SampledRows:
    """Choose one token per row of float32 `logits` `[rows, vocab]`, whose argmax is already known.

    `draw` may be a backend's own. Raises `DeviceError` where the edits of a row leave no token.
    """
    tokens = argmax.clone()
    logprobs = {}
    edited = {index: edit_logits(logits[index], plan.edits) for index, plan in enumerate(plans) if plan.edits}
    for index, row in edited.items():
        tokens[index] = row.argmax()
    drawn = [index for index, plan in enumerate(plans) if plan.temperature > 0]
    if drawn:
        chosen = draw([edited.get(index, logits[index]) for index in drawn], [plans[index] for index in drawn])
        if len(drawn) == len(plans):
            tokens = chosen
        else:
            tokens[drawn] = chosen
    for index, plan in enumerate(plans):
        if plan.top_logprobs >= 0:
            row = torch.log_softmax(edited.get(index, logits[index]), -1)
            top = row.topk(min(plan.top_logprobs, row.shape[-1]))
            logprobs[index] = (row[tokens[index]], top.values, top.indices)
    return SampledRows(tokens, logprobs)


def edit_logits(row: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """A copy of one row `[vocab]` with the edits applied in the order of their fields."""
    row = row.clone()
    if edits.only:
        kept = _index(edits.only, row)
        values = row[kept]
        row.fill_(-torch.inf)
        row[kept] = values
    if edits.banned:
        row[_index(edits.banned, row)] = -torch.inf
    if edits.mask:
        row.masked_fill_(~_legal(edits.mask, row), -torch.inf)
    if edits.repeated and edits.repetition != 1.0:
        touched = _index(edits.repeated, row)
        values = row[touched]
        row[touched] = torch.where(values > 0, values / edits.repetition, values * edits.repetition)
    if edits.added:
        ids, amounts = zip(*edits.added, strict=True)
        row[_index(ids, row)] += torch.tensor(amounts, dtype=row.dtype, device=row.device)
    if not bool(row.max() > -torch.inf):
        raise DeviceError("the masks of a row leave no legal token: loosen the grammar or the banned tokens")
    return row


def _index(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=row.device)


def _legal(mask: bytes, row: torch.Tensor) -> torch.Tensor:
    """The grammar's bitmask as bool `[vocab]`; ids beyond the mask are illegal."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: row.shape[-1]]
    legal = np.zeros(row.shape[-1], dtype=bool)
    legal[: bits.shape[0]] = bits
    return torch.from_numpy(legal).to(row.device)


def _draw(logits: torch.Tensor, plans: Sequence[RowPlan], candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[rows]` and whether `candidates` sorted logits settle each of them.

    Every truncation keeps a prefix of the tokens sorted by falling probability, so a draw is settled as soon as the
    end of that prefix, or without truncation the drawn token itself, lies among the candidates.
    """
    column = _Columns(plans, logits)
    values, ids = _largest(logits, candidates)
    complete = candidates == logits.shape[-1]
    known = torch.full_like(column.top_k, candidates) if complete else (values > values[:, -1:]).sum(-1, keepdim=True)
    log_total = (logits / column.temperature.float()).logsumexp(-1, keepdim=True)
    probs = torch.exp(values.double() / column.temperature - log_total)  # [rows, candidates]
    cumulative = probs.cumsum(-1)
    rank = torch.arange(candidates, device=logits.device)
    mass = torch.where(
        column.limits_k, cumulative.gather(-1, (column.top_k - 1).clamp(0, candidates - 1)), 1.0
    )  # what top-k leaves, to which top-p is relative
    keep = (rank < column.top_k) & (cumulative - probs < column.top_p * mass) & (probs >= column.min_p * probs[:, :1])
    kept = (keep & (probs > 0)).sum(-1, keepdim=True).clamp(min=1)
    total = torch.where(column.limits, cumulative.gather(-1, kept - 1), 1.0)
    index = (cumulative <= column.uniform * total).sum(-1, keepdim=True)
    k_known = ~column.limits_k | (column.top_k <= known)
    settled = torch.where(column.limits, k_known & (kept < known), index < known)
    index = torch.minimum(index, kept - 1)
    settled = settled | complete
    return ids.gather(-1, index).squeeze(-1), settled.squeeze(-1)


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values and ids per row, falling, equal values by rising id."""
    if count == logits.shape[-1]:
        return logits.sort(stable=True, dim=-1, descending=True)
    ids = logits.topk(count, dim=-1).indices.sort(-1).values
    values, order = logits.gather(-1, ids).sort(stable=True, dim=-1, descending=True)
    return values, ids.gather(-1, order)


class _Columns:
    """The plans' numbers as columns `[rows, 1]`."""

    def __init__(self, plans: Sequence[RowPlan], logits: torch.Tensor) -> None:
        vocab, device = logits.shape[-1], logits.device

        def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)

        self.temperature = column([plan.temperature for plan in plans])
        self.top_k = column([min(plan.top_k, vocab) if plan.top_k > 0 else vocab for plan in plans], torch.int64)
        self.top_p = column([plan.top_p if plan.top_p < 1 else 2.0 for plan in plans])
        self.min_p = column([plan.min_p for plan in plans])
        self.uniform = column([plan.uniform for plan in plans])
        self.limits_k = self.top_k < vocab
        self.limits = self.limits_k | (self.top_p < 1) | (self.min_p > 0)
