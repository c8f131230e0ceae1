"""Puts a real engine together: device, vocabulary, levers and scheduler, from what the server passed."""

from __future__ import annotations

import platform
import secrets
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import engine
from engine.core.clock import Clock
from engine.core.context import Context
from engine.core.device import DeviceFacts
from engine.core.vocabulary import Vocabulary
from engine.fetch import known_as
from engine.levers.resolve import LeverState, Source
from engine.levers.spec import Value
from engine.protocol.events import Facts
from engine.runtime.loop import WakingInbox
from engine.runtime.outbox import BatchOutbox
from engine.runtime.process import Built, Progress
from telemetry.record import LoadRecord, RunRecord
from telemetry.ring import Ring

if TYPE_CHECKING:
    from engine.text import Text

CPU_BATCH, GPU_BATCH = 16, 256


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the server tells its engine at start, as one JSON object on standard input."""

    model: str
    levers: dict[str, Value]
    sources: dict[str, str]
    dtype: str = "auto"
    backend: str = "auto"
    threads: int = 0
    cpus: tuple[int, ...] = ()
    """Cores of the engine; empty: all."""


def build_from(options: EngineOptions, run_id: str = "") -> _Builder:
    return _Builder(options, run_id or uuid.uuid4().hex)


class _Builder:
    def __init__(self, options: EngineOptions, run_id: str) -> None:
        self._options = options
        self._run_id = run_id

    def __call__(self, inbox: WakingInbox, outbox: BatchOutbox, ring: Ring, clock: Clock, progress: Progress) -> Built:
        from engine.grammar import grammar_factory
        from engine.model.open import open_device
        from engine.scheduler import Scheduler
        from engine.text import load_text

        options = self._options
        levers = LeverState(options.levers, {name: Source(source) for name, source in options.sources.items()})
        start_ns = clock.now_ns()
        width, kv_tokens = _width(levers.int("max_batch_size")), levers.int("kv_tokens")
        device = open_device(
            Path(options.model),
            kv_tokens=kv_tokens if kv_tokens > 0 else None,
            max_batch_size=width,
            dtype=options.dtype,
            backend=options.backend,
            threads=options.threads or None,
            swap_gb=levers.float("swap_gb"),
            progress=progress,
        )
        loaded_ns = clock.now_ns()
        vocabulary = vocabulary_of(load_text(Path(options.model)))
        facts = self._facts(device.facts, width)
        self._record_start(ring, clock, facts, levers, (start_ns, loaded_ns))
        context = Context(
            device=device,
            clock=clock,
            levers=levers,
            inbox=inbox,
            outbox=outbox,
            vocabulary=vocabulary,
            telemetry=ring,
            grammars=grammar_factory(vocabulary),
            max_batch_size=width,
            draw_seed=lambda: secrets.randbits(48),
            unix_ns=time.time_ns,
        )
        return Built(context, Scheduler(context), facts)

    def _facts(self, device: DeviceFacts, width: int) -> Facts:
        title, aliases = known_as(Path(self._options.model))
        return Facts(
            run_id=self._run_id,
            model=title or device.model,
            aliases=aliases,
            device=device.name,
            dtype=device.dtype,
            vocab_size=device.vocab_size,
            max_context=device.max_context,
            kv_tokens=device.num_blocks * device.block_size,
            block_size=device.block_size,
            max_batch_size=width,
            drafters=("ngram", *sorted(device.drafters)),
            versions={"metrale": engine.__version__, "python": platform.python_version()},
        )

    def _record_start(self, ring: Ring, clock: Clock, facts: Facts, levers: LeverState, load: tuple[int, int]) -> None:
        ring.append(
            RunRecord(
                run_id=facts.run_id,
                clock_ns=clock.now_ns(),
                unix_ns=time.time_ns(),
                model=facts.model,
                device=facts.device,
                dtype=facts.dtype,
                levers=levers.snapshot(),
                versions=facts.versions,
                kv_tokens=facts.kv_tokens,
                block_size=facts.block_size,
            )
        )
        ring.append(LoadRecord(stage="load", start_ns=load[0], end_ns=load[1], what=facts.model))


def _width(asked: int) -> int:
    """Sequences decoded together: as asked, else what the machine is good for."""
    if asked > 0:
        return asked
    import torch

    return GPU_BATCH if torch.cuda.is_available() else CPU_BATCH


def vocabulary_of(text: Text) -> Vocabulary:
    """What the scheduler must know of the tokenizer; ids that belong to no text stand for no bytes."""
    hidden = text.control_ids
    pieces = tuple(b"" if token in hidden else piece for token, piece in enumerate(text.token_bytes))
    return Vocabulary(token_bytes=pieces, eos_ids=text.eos_ids, special=text.added_ids)
