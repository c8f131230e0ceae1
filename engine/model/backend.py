"""The seam between device and arithmetic: one ragged batch in, logits and hidden rows out.

The torch reference (`reference.py`), the compiled CPU path and the graph-captured CUDA path are backends; the
device above them owns sequences, sampling, drafting and spilling and never looks at a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.core.value import StepValue
from engine.model.config import ModelConfig
from engine.model.kv import PagedKV


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat rows of several sequences; rows `row_offsets[i]..row_offsets[i+1]-1` belong to segment `i`.

    A row reads all KV of its own segment at positions up to its own (causal) and writes its own. All rows of a
    batch are written before any is read, so that rows of one segment see each other.
    """

    tokens: torch.Tensor
    """int64 `[rows]` on the backend's device."""
    positions: torch.Tensor
    """int64 `[rows]` on the backend's device; consecutive within a segment."""
    row_offsets: tuple[int, ...]
    """Host numbers, `segments + 1` of them, from 0 to `rows`."""
    starts: tuple[int, ...]
    """Host numbers `[segments]`: the position of each segment's first row."""
    block_tables: torch.Tensor
    """int32 `[segments, max_blocks]` on the backend's device, padded with 0. The KV row of position `p` is
    `[table[p // block_size], p % block_size]`."""
    logit_rows: tuple[int, ...]
    """Row indices (ascending) whose logits are wanted; empty for a prompt chunk."""
    greedy: bool = False
    """Only the argmax of the logit rows is wanted; `Output.logits` may then stay None."""
    taps: tuple[int, ...] = ()
    """Layers (0-based, ascending) after which the residual stream is returned for every row."""
    layers: tuple[int, ...] | None = None
    """Run only these layers (self-speculation); None: all. Skipped layers write no KV."""


Place = torch.Tensor | int
"""Where a token is on the device: a 0-d int64 tensor, or a number in the ring of a backend that keeps one."""


class HostBatch(StepValue, frozen=True):
    """A batch as plain numbers, before anything is on a device. Fields as in `Batch`."""

    tokens: Sequence[int]
    row_offsets: tuple[int, ...]
    starts: tuple[int, ...]
    block_tables: Sequence[Sequence[int]]
    """Per segment, as long as they are."""
    logit_rows: tuple[int, ...]
    greedy: bool = False
    taps: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    previous: tuple[tuple[int, Place], ...] = ()
    """Rows whose token is on the device already instead of in `tokens`."""
    draft_skips: tuple[int, ...] | None = None
    """Per segment the blocks at the beginning of its table that a draft head does not read, where one follows."""

    def on(self, device: torch.device) -> Batch:
        """The same in tensors on `device`."""
        tokens = torch.tensor(self.tokens, device=device)
        if self.previous:
            tokens[[row for row, _ in self.previous]] = torch.stack(
                [torch.as_tensor(token) for _, token in self.previous]
            )
        counts = zip(self.starts, self.row_offsets, self.row_offsets[1:], strict=False)
        positions = [position for start, at, end in counts for position in range(start, start + end - at)]
        widest = max(len(table) for table in self.block_tables)
        tables = [[*table, *([0] * (widest - len(table)))] for table in self.block_tables]
        return Batch(
            tokens=tokens,
            positions=torch.tensor(positions, device=device),
            row_offsets=self.row_offsets,
            starts=self.starts,
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            logit_rows=self.logit_rows,
            greedy=self.greedy,
            taps=self.taps,
            layers=self.layers,
        )


class Arrival(Protocol):
    """Tokens of a step on their way to the host."""

    def wait(self) -> tuple[list[int], int]:
        """The tokens of all wanted rows, and the microseconds that the step took on the device."""
        ...


class Behind(StepValue, frozen=True):
    """Where a draft head finds the step that it follows."""

    rows: int
    """Width of the step's inputs."""
    stamp: int
    drafts_at: int
    """Where its drafts go."""


class Output(StepValue, frozen=True):
    argmax: torch.Tensor
    """int64 `[len(logit_rows)]`: first index of the largest float32 logit."""
    logits: torch.Tensor | None
    """float32 `[len(logit_rows), vocab]`; always there unless `Batch.greedy`."""
    hidden: torch.Tensor | None
    """`[rows, len(taps), hidden_size]` before the final norm, in the backend's dtype; None without taps. The
    caller copies it before the next `run`: a backend may reuse the memory."""
    arrival: Arrival | None = None
    """Of a backend that brings `argmax` to the host by itself."""
    places: Sequence[Place] = ()
    """Of such a backend: where on the device each token is."""
    behind: Behind | None = None
    """Of a step with `draft_skips`."""


class Backend(Protocol):
    """Runs the decoder. Called from one thread at a time, in order.

    In float32 the argmax of a row does not depend on which other rows run with it, nor on `greedy`.
    """

    @property
    def name(self) -> str:
        """Shown to the user, e.g. `reference float32` or `native Q4_1 AVX-512 VNNI`."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def kv(self) -> PagedKV:
        """The cache that `run` reads and writes; spilling and draft heads share its block numbers."""
        ...

    def run(self, batch: Batch) -> Output: ...

    def run_host(self, batch: HostBatch) -> Output:
        """The same from plain numbers; a backend that stages its own inputs makes no tensors of them."""
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token embeddings `[n, hidden_size]` of int64 `[n]`, for draft heads that share them."""
        ...

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[n, vocab]` of rows that are already normed, for draft heads that share the head."""
        ...

    def close(self) -> None: ...


Progress = Callable[[int, int, str], None]
"""Called with done bytes, total bytes and the stage while a model loads: `weights`, or `building kernels` and
`graphs`, which count no bytes; a total of 0 is unknown."""


class BackendUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, not a fault
    """This backend cannot run here (no compiler, unsupported tensor type ...); the text says why in one sentence."""


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a backend is opened with. A backend module exposes `open_backend(request) -> Backend`, raises
    `BackendUnavailable` before it reads weights where it cannot run, and allocates its own `PagedKV`."""

    path: Path
    """A GGUF file or a Hugging Face directory."""
    config: ModelConfig
    kv_tokens: int | None
    """Size of the pool; None: `kv.default_kv_tokens` of what the backend stores per token."""
    block_size: int
    max_batch_size: int
    max_rows: int
    dtype: str
    """`float32`, `bfloat16` or `auto` (the backend's best)."""
    threads: int
    progress: Progress | None = None
