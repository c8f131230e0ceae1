"""Captured steps: one CUDA graph per number of rows (and context), all made before the first request."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from engine.model.cuda.inputs import InputArea, StepInputs
from engine.model.cuda.program import LOGIT_ROWS, Launch, ProgramBuilder, takes_in
from engine.model.cuda.program import SPLIT_ROWS as SPLIT

WIDTHS = (1, 2, 3, 4, 5, 8, 16, 24, 32, 64, 128, 256, 512, 1024)
"""Numbers of rows that are captured; a step runs in the smallest that holds it."""
CONTEXTS = (1024, 8192)
"""Contexts, besides the model's own, for which narrow steps are captured: fewer programs that find nothing to do."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A step of fixed width; replaying it is one call."""

    launches: tuple[Launch, ...]
    replay: Callable[[], None]


class GraphKey(NamedTuple):
    rows: int
    context: int
    """Positions that may be read; 0 for a head alone."""
    head: bool
    """Whether the LM head of all rows follows the layers."""
    layers: tuple[int, ...] | None = None


class StepGraphs:
    """Every program of a model, captured where the device is a GPU and run launch by launch elsewhere."""

    def __init__(
        self,
        builder: ProgramBuilder,
        device: torch.device,
        *,
        widths: Sequence[int] = WIDTHS,
        pdl: bool = True,
        table_entries: int,
    ) -> None:
        self.builder = builder
        self._device = device
        self._pdl = pdl and device.type == "cuda"
        self.widths = tuple(sorted(widths))
        config = builder.config
        self.contexts = (*(c for c in CONTEXTS if c < config.max_context), config.max_context)
        self._area = InputArea(self.widths[-1], table_entries, device)
        self.inputs = {width: StepInputs(width, self._area) for width in self.widths}
        self._captured: dict[GraphKey, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._all_layers = config.num_layers

    def width_of(self, rows: int) -> int:
        """The captured width that holds `rows`; the largest where none does."""
        return next((width for width in self.widths if rows <= width), self.widths[-1])

    def key(self, rows: int, context: int, head: bool, layers: tuple[int, ...] | None = None) -> GraphKey:
        width = self.width_of(rows)
        return GraphKey(width, self.contexts[-1] if width > SPLIT else self.reach(context), head, layers)

    def reach(self, context: int) -> int:
        """The captured context that holds `context` positions; the model's own where none does."""
        return next((bound for bound in self.contexts if context <= bound), self.contexts[-1])

    def takes_in(self, rows: int) -> bool:
        """Whether a step of this width takes its inputs in by itself."""
        return takes_in(rows)

    def head_key(self, rows: int) -> GraphKey:
        return GraphKey(self.width_of(rows), 0, True)

    def planned(self, draft_layers: tuple[int, ...] | None = None) -> list[GraphKey]:
        """Everything that a chat can need; drafting with fewer layers feeds one row per sequence."""
        keys = []
        for width in self.widths:
            contexts = self.contexts if width <= SPLIT else self.contexts[-1:]
            for context in contexts:
                keys.append(GraphKey(width, context, False))
                if width <= LOGIT_ROWS:
                    keys.append(GraphKey(width, context, True))
                    if draft_layers is not None:
                        keys.append(GraphKey(width, context, True, draft_layers))
            if width <= LOGIT_ROWS:
                keys.append(GraphKey(width, 0, True))
        return keys

    def prepare(self, keys: Sequence[GraphKey], done: Callable[[int], None] = lambda _: None) -> None:
        """Compile and capture; `done` is told how many of `keys` are ready."""
        for count, key in enumerate(keys, 1):
            self.get(key)
            done(count)

    def get(self, key: GraphKey) -> Captured:
        """The captured step, captured now where it was not planned."""
        found = self._captured.get(key)
        if found is None:
            found = self._captured[key] = self.capture(self.launches(key), key.rows)
        return found

    def launches(self, key: GraphKey) -> tuple[Launch, ...]:
        inputs, builder = self.inputs[key.rows], self.builder
        if key.context == 0:
            return tuple(builder.head(key.rows, inputs, self._all_layers))
        launches = builder.body(key.rows, inputs, key.context, key.layers)
        if key.head:
            last = self._all_layers if key.layers is None else key.layers[-1] + 1
            launches += builder.head(key.rows, inputs, last)
        return tuple(launches)

    def kinds(self, keys: Sequence[GraphKey]) -> list[Launch]:
        """One launch of every kernel that `keys` need, to compile them apart from each other."""
        return kinds_of(self.launches(key) for key in keys)

    def compile(self, launches: Sequence[Launch]) -> None:
        """Put the binaries into Triton's cache, on all processors."""
        if self._device.type == "cuda":
            with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
                for launch in launches:
                    launch.compile(self._pdl)

    def capture(self, launches: tuple[Launch, ...], rows: int) -> Captured:
        """Launches on the inputs of width `rows`; a step that was written already is still there afterwards."""
        if self._device.type != "cuda":
            return Captured(launches, lambda: _run(launches, False))
        written = self._area.data.clone()
        self.inputs[rows].clear()
        _compile(launches, self._pdl)
        self._area.data.copy_(written)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                _run(launches, self._pdl)
            finally:
                graph.capture_end()
        return Captured(launches, graph.replay)


def _run(launches: Sequence[Launch], pdl: bool) -> None:
    for launch in launches:
        launch(pdl)


def kinds_of(programs: Iterable[Sequence[Launch]]) -> list[Launch]:
    """One launch of every kernel that they need."""
    found: dict[object, Launch] = {}
    for launches in programs:
        for launch in launches:
            found.setdefault(kind_of(launch), launch)
    return list(found.values())


def kind_of(launch: Launch) -> object:
    """What decides the binary."""
    constants = {name: value for name, value in launch.constants.items() if name != "M"}
    numbers = tuple(argument for argument in launch.arguments if isinstance(argument, int))
    return launch.part, launch.warps, launch.registers, numbers, *sorted(constants.items())


def _compile(launches: Sequence[Launch], pdl: bool) -> None:
    """Compile and load every kernel once, on inputs whose positions are all -1, since a capture must not load code."""
    seen: set[object] = set()
    for launch in launches:
        kind = kind_of(launch)
        if kind not in seen:
            seen.add(kind)
            share_carveout(launch(pdl))
    torch.cuda.synchronize()


_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT."""


def share_carveout(kernel: Any) -> None:
    """Ask for the same split of cache and shared memory in all kernels: a processor that must change it drains first,
    and the next kernel could not start early."""
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), ctypes.c_int(_CARVEOUT), ctypes.c_int(100))
    if code != 0:
        raise RuntimeError(f"the CUDA driver refused a kernel attribute with code {code}: update the driver")
