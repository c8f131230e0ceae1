"""The device that the scheduler drives: a loaded model, its cache, sampling, drafting and spilling.

Where the host computes, a thread of its own runs what is launched, so `launch` returns at once and the host plans
meanwhile. Whatever the caller waits for anyway runs in the caller's thread, as soon as everything launched before is
done: a hop between threads costs up to a tenth of a step. Where launching only queues work on a GPU there is no thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from engine.core.device import (
    DeviceError,
    DeviceFacts,
    Draft,
    DrafterName,
    DraftItem,
    RowPlan,
    Sampled,
    Step,
    StepResult,
)
from engine.core.value import StepValue
from engine.model.backend import Backend, HostBatch, Output, Place
from engine.model.batching import batch_of, check_step
from engine.model.drafting import Drafting
from engine.model.heads import DraftHead
from engine.model.sampling import Drawing, SampledRows, draw, is_plain_greedy, sample_rows
from engine.model.self_spec import draft_layers, draft_with_layers
from engine.model.spill import SpillStore

_IN_FLIGHT = 2

T = TypeVar("T")


_Reader = Callable[[], tuple[list[Sampled], int]]
"""Waits for the tokens of a step's planned rows, and the microseconds that the device reports, 0 where it does not."""


class _Pending(StepValue, frozen=True):
    """A step whose work is queued."""

    step: Step
    read: _Reader
    device_us: int
    """How long it took to queue, which on a CPU is all of it."""


class TorchDevice:
    """Implements `engine.core.device.Device` on any backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        max_rows: int = 4096,
        spill_bytes: int = 0,
        heads: Sequence[DraftHead] = (),
    ) -> None:
        self._backend = backend
        self._drafting = Drafting(heads, backend.device)
        self._last: dict[int, Place] = {}
        self._spilled = SpillStore(spill_bytes)
        self._layers = draft_layers(backend.config)
        self._draw: Drawing = getattr(backend, "draw", draw)
        self._brings_tokens = bool(getattr(backend, "brings_tokens", False))
        self._worker = None if self._brings_tokens else ThreadPoolExecutor(1, thread_name_prefix="device")
        self._flying: deque[Future[_Pending] | _Pending] = deque()
        self._newest: Future[Any] | None = None
        """The last work given to the thread."""
        self.facts = self._describe(name, max_rows)
        if self._brings_tokens:
            self._warm_up()

    def forward(self, step: Step) -> StepResult:
        if self._flying:
            raise DeviceError("a step is still in flight: collect it before a waiting forward")
        with _as_device_error("a step failed"):
            self._settle()
            return _finish(self._run(step))

    def launch(self, step: Step) -> None:
        if len(self._flying) >= _IN_FLIGHT:
            raise DeviceError(f"{_IN_FLIGHT} steps are in flight already: collect one first")
        if self._worker is None:
            with _as_device_error("a step failed"):
                self._flying.append(self._run(step))
        else:
            self._newest = future = self._worker.submit(self._run, step)
            self._flying.append(future)

    def collect(self) -> StepResult:
        if not self._flying:
            raise DeviceError("no step is in flight: launch one first")
        with _as_device_error("a step failed"):
            pending = self._flying.popleft()
            return _finish(pending if isinstance(pending, _Pending) else pending.result())

    def draft(self, drafter: DrafterName, items: Sequence[DraftItem], conf_min: float) -> list[Draft]:
        if drafter not in self.facts.drafters:
            known = ", ".join(sorted(self.facts.drafters))
            raise DeviceError(f"this device has no drafter {drafter.value!r}: it has {known}")
        if not items:
            return []
        if drafter is DrafterName.SELF:
            return self._do(lambda: draft_with_layers(self._backend, self._layers, items, conf_min))
        with _as_device_error("drafting failed"):
            self._settle()
            return self._drafting.draft(drafter, items, conf_min)

    def saved_hidden(self, seq: int) -> int:
        self._settle()
        return self._drafting.oldest(seq)

    def release(self, seq: int) -> None:
        """Forget the last token, the hidden rows and a spilled copy of `seq`, once what is in flight is done."""
        if self._worker is None:
            self._forget(seq)
        else:
            self._newest = self._worker.submit(self._forget, seq)

    def spill(self, seq: int, blocks: Sequence[int]) -> bool:
        return self._do(lambda: self._spill(seq, list(blocks)))

    def restore(self, seq: int, blocks: Sequence[int]) -> None:
        self._do(lambda: self._restore(seq, list(blocks)))

    def sync_secondary(self) -> None:
        """No secondary stream is used."""

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self._flying.clear()
        self._spilled.close()
        self._backend.close()

    def _do(self, work: Callable[[], T]) -> T:
        """Run after everything launched before."""
        with _as_device_error("the device failed"), torch.inference_mode():
            self._settle()
            return work()

    def _settle(self) -> None:
        """Wait until the thread has nothing left to do; what failed there is reported by `collect`."""
        if self._newest is not None:
            self._newest.exception()
            self._newest = None

    def _describe(self, name: str, max_rows: int) -> DeviceFacts:
        backend, config, kv = self._backend, self._backend.config, self._backend.kv
        heads = self._drafting.heads
        heads_bytes = sum(head.kv.bytes_per_block for head in heads if head.kv is not None)
        return DeviceFacts(
            name=f"{name}, {backend.name}",
            kind="cuda" if backend.device.type == "cuda" else "cpu",
            model=config.name,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            max_context=min(config.max_context, kv.num_blocks * kv.block_size),
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            bytes_per_block=kv.bytes_per_block + heads_bytes,
            max_rows=max_rows,
            runs_ahead=True,
            drafters=frozenset({DrafterName.SELF, *(head.drafter for head in heads)}),
            dtype=str(kv.dtype).removeprefix("torch."),
            row_invariant=bool(getattr(backend, "row_invariant", False)),
            named_only=frozenset(_slow_drafters(heads, backend)),
        )

    def _run(self, step: Step) -> _Pending:
        began = time.perf_counter_ns()
        facts = self.facts
        check_step(step, facts.vocab_size, facts.max_rows, facts.max_context, facts.block_size, facts.num_blocks)
        greedy = all(is_plain_greedy(plan) for segment in step.segments for plan in segment.rows)
        taps, skips = self._drafting.plan(step, greedy)
        batch = batch_of(step, self._last, greedy, taps, skips)
        if self._brings_tokens and greedy and batch.logit_rows:
            read = self._run_greedy(step, batch)
        else:
            read = self._run_sampled(step, batch)
        return _Pending(step, read, (time.perf_counter_ns() - began) // 1000)

    def _run_greedy(self, step: Step, batch: HostBatch) -> _Reader:
        """A step whose tokens come to the host by themselves."""
        output = self._backend.run_host(batch)
        self._drafting.keep(step, batch, output)
        self._remember(step, output.places)
        arrival = output.arrival

        def read() -> tuple[list[Sampled], int]:
            tokens, device_us = arrival.wait() if arrival is not None else ([], 0)
            return [Sampled(token) for token in tokens], device_us

        return read

    @torch.inference_mode()
    def _run_sampled(self, step: Step, batch: HostBatch) -> _Reader:
        """A step whose tokens are chosen here and copied to the host."""
        clock = _DeviceClock() if self._backend.device.type == "cuda" else None
        output = self._backend.run_host(batch)
        self._drafting.keep(step, batch, output)
        rows = self._sample(step, output)
        self._remember(step, rows.tokens)
        host = _to_host(rows.tokens)
        if clock is not None:
            clock.stop()

        def read() -> tuple[list[Sampled], int]:
            device_us = 0 if clock is None else clock.wait_us()
            return rows.to_host(host.tolist()), device_us

        return read

    def _sample(self, step: Step, output: Output) -> SampledRows:
        plans = [plan for segment in step.segments for plan in segment.rows]
        if all(is_plain_greedy(plan) for plan in plans):
            return SampledRows(output.argmax, {})
        if output.logits is None:
            raise DeviceError("the backend returned no logits for sampled rows: use the reference backend")
        return sample_rows(output.logits, output.argmax, plans, self._draw)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Sample once from nothing: torch loads its kernels at first use, which takes tens of milliseconds."""
        logits = torch.zeros(1, self.facts.vocab_size, device=self._backend.device)
        sample_rows(logits, logits.argmax(-1), [RowPlan(1.0, 40, 0.9, 0.05, 0.5, top_logprobs=1)])

    def _remember(self, step: Step, tokens: torch.Tensor | Sequence[Place]) -> None:
        """Keep where each sequence's newest token is, for `from_previous`."""
        end = 0
        for segment in step.segments:
            end += len(segment.rows)
            if segment.rows:
                self._last[segment.seq] = tokens[end - 1]

    def _forget(self, seq: int) -> None:
        self._last.pop(seq, None)
        self._spilled.drop(seq)
        self._drafting.forget(seq)

    def _spill(self, seq: int, blocks: list[int]) -> bool:
        last = self._last.get(seq)
        bundle = {
            "kv": self._backend.kv.gather(blocks),
            "last": int(last) if isinstance(last, torch.Tensor) else -1,
            **self._drafting.bundle(seq, blocks),
        }
        if not self._spilled.put(seq, bundle):
            return False
        self._last.pop(seq, None)
        self._drafting.forget(seq)
        return True

    def _restore(self, seq: int, blocks: list[int]) -> None:
        try:
            bundle = self._spilled.take(seq)
        except KeyError:
            raise DeviceError(f"sequence {seq} was never spilled: prefill it again from its tokens") from None
        self._backend.kv.scatter(blocks, bundle["kv"])
        self._drafting.unbundle(seq, blocks, bundle)
        if bundle["last"] >= 0:
            self._last[seq] = torch.tensor(bundle["last"], device=self._backend.device)


class _DeviceClock:
    """Events around the work of one step on a GPU: when its tokens are on the host, and how long the GPU took."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def wait_us(self) -> int:
        self._end.synchronize()
        return int(self._begin.elapsed_time(self._end) * 1000)


def _to_host(tokens: torch.Tensor) -> torch.Tensor:
    """Start copying tokens to the host without waiting."""
    if not tokens.is_cuda:
        return tokens
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    return host


def _finish(pending: _Pending) -> StepResult:
    sampled, device_us = pending.read()
    rows = iter(sampled)
    per_segment = tuple(tuple(next(rows) for _ in segment.rows) for segment in pending.step.segments)
    return StepResult(per_segment, device_us or pending.device_us)


@contextmanager
def _as_device_error(what: str) -> Iterator[None]:
    """Turn whatever a backend raises into the one error that ends requests with a sentence."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        raise DeviceError(f"{what} ({type(error).__name__}: {error}): see the log and retry") from error


def _slow_drafters(heads: Sequence[DraftHead], backend: Backend) -> Iterator[DrafterName]:
    """Drafters whose every probe costs more than it can tell: a head in plain torch beside a target on kernels of its
    own takes several target steps a pass; on a GPU, where rows cost next to nothing, most of a step a draft."""
    for head in heads:
        if not getattr(head, "is_compiled", backend.name.startswith("reference")):
            yield head.drafter
    if backend.device.type == "cuda":
        yield DrafterName.SELF
