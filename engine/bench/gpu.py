"""Benchmark of the CUDA backend: exactness, step times by width, batches, larger shapes, and where a step's time goes.

`python -m engine.bench.gpu --out FILE [--seconds N] [--only a,b]` runs sections in order of importance until the time
is used up, prints one table and writes JSON. Weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.bench.random_model import BLOCK_SIZE, SHAPES, make_kv, ragged_batch, random_weights
from engine.bench.result import Spread, provenance
from engine.model import graphs
from engine.model.backend import Backend, Batch
from engine.model.config import ModelConfig
from engine.model.cuda.program import LOGIT_ROWS, AttentionTiling, Launch
from engine.model.cuda.tiling import Tiling, cut, tiling
from engine.model.cuda_backend import CudaBackend
from engine.model.graphs import WIDTHS, Captured, GraphKey, kind_of
from engine.model.load import LayerWeights, Weights
from engine.model.reference import ReferenceBackend

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
NARROW = (1, 2, 4, 8)


@dataclass(slots=True)
class Report:
    """Figures as they come; written after every section, so that a cut run keeps what it has."""

    path: Path
    deadline: float
    figures: dict[str, object] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: object) -> None:
        self.figures[name] = value
        shown = value.show() if isinstance(value, Spread) else f"{value:,.4g}" if isinstance(value, float) else value
        print(f"[{time.perf_counter():7.1f}] {name:<44} {shown}", flush=True)

    def write(self) -> None:
        plain = {
            name: [value.median, value.low, value.high, value.count] if isinstance(value, Spread) else value
            for name, value in self.figures.items()
        }
        everything = {"figures": plain, "failures": self.failures, **provenance()}
        self.path.write_text(json.dumps(everything, indent=1, default=str), encoding="utf-8")

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()


def timed_us(run: Callable[[], object], count: int = 30, rounds: int = 7) -> Spread:
    """Microseconds of one `run` on the device: the mean of `count` in a row, several times."""
    run()
    torch.cuda.synchronize()
    values = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        values.append(begin.elapsed_time(end) * 1000 / count)
    return Spread.of(values)


def copy_bandwidth() -> float:
    """Bytes read plus written per second of a large device-to-device copy; the median of 10."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    took = [timed_us(lambda: target.copy_(source), 1, 1).median for _ in range(10)]
    return 2 * source.numel() / (statistics.median(took) * 1e-6)


def backend_of(
    config: ModelConfig,
    widths: Sequence[int] = WIDTHS,
    pdl: bool = True,
    layers: int | None = None,
    tokens: int = 300_000,
    attention: AttentionTiling | None = None,
) -> CudaBackend:
    if layers is not None:
        config = replace(config, num_layers=layers)
    kv = make_kv(config, tokens // BLOCK_SIZE, BF16, DEVICE)
    kv.data.normal_()
    return CudaBackend(config, random_weights(config, BF16, DEVICE), kv, widths=widths, pdl=pdl, attention=attention)


def feed(backend: CudaBackend, rows: int, context: int, per_segment: int = 1) -> None:
    """Inputs of a step of `rows` rows at `context`: sequences of `per_segment` rows, blocks of their own."""
    inputs = backend.graphs.inputs[rows]
    blocks = -(-(context + per_segment) // BLOCK_SIZE)
    sequences = -(-rows // per_segment)
    tables = [at % backend.kv.num_blocks for at in range(sequences * blocks)]
    starts = [row // per_segment * blocks for row in range(rows)]
    positions = [context + row % per_segment for row in range(rows)]
    slots = [
        tables[start + position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for start, position in zip(starts, positions, strict=True)
    ]
    tokens = np.random.default_rng(0).integers(0, backend.config.vocab_size, rows).tolist()
    inputs.write((0, 1, rows), [tokens, [-1] * rows, positions, slots, [context] * rows, starts, range(rows)], tables)


def step_us(backend: CudaBackend, rows: int, context: int = 256, per_segment: int = 1) -> Spread:
    captured = backend.graphs.get(backend.graphs.key(rows, context + per_segment, True))
    feed(backend, rows, context, per_segment)
    return timed_us(captured.replay)


def weight_bytes(config: ModelConfig) -> int:
    """Bytes that a step must read at least: every matrix and the LM head once."""
    c = config
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    layer = c.hidden_size * (heads + c.num_heads * c.head_dim + 3 * c.intermediate_size)
    return 2 * (c.num_layers * layer + c.vocab_size * c.hidden_size)


def exactness(report: Report) -> None:
    """Error against float32, and whether a row has the same bits at every width."""
    config = replace(SHAPES["default"], num_layers=6)
    weights = random_weights(config, BF16, DEVICE)
    fused = CudaBackend(config, weights, make_kv(config, 4000, BF16, DEVICE))
    plain = ReferenceBackend(config, weights, make_kv(config, 4000, BF16, DEVICE))
    wide = ReferenceBackend(config, _floats(weights), make_kv(config, 4000, torch.float32, DEVICE))
    made = np.random.default_rng(1)
    prompt = made.integers(0, config.vocab_size, 700).tolist()
    blocks = list(range(100, 100 + 64))
    first = ragged_batch(DEVICE, [(0, prompt, blocks)], logit_rows=(699,))
    step = ragged_batch(DEVICE, [(700, prompt[:4], blocks), (0, prompt[5:9], [7])])
    errors: dict[str, list[float]] = {"fused": [], "torch bf16": []}
    for batch in (first, step):
        exact = _logits(wide, batch)
        for name, backend in (("fused", fused), ("torch bf16", plain)):
            got = _logits(backend, batch)
            errors[name].append(float((got - exact).norm() / exact.norm()))
    for name, values in errors.items():
        report.add(f"error against float32, {name}", max(values))
    report.add("row invariant", _invariance(fused, prompt, blocks))


def _logits(backend: Backend, batch: Batch) -> torch.Tensor:
    logits = backend.run(batch).logits
    if logits is None:
        raise RuntimeError(f"Backend {backend.name} returned no logits.")
    return logits


def _invariance(fused: CudaBackend, prompt: list[int], blocks: list[int]) -> str:
    """The bits of rows at position 700 at every width against one row alone, and of a prompt in slices."""
    alone = []
    for at in range(8):
        alone.append(_logits(fused, ragged_batch(DEVICE, [(700 + at, [prompt[at]], blocks)]))[0].clone())
    bad = []
    for rows in (2, 3, 4, 5, 6, 8, 9, 16, 17, 32, 33, 64, 100, 128, 256):
        verify = min(rows, 8)
        crowd = [(at % 200, [prompt[at % 700]], list(range(200 + at, 200 + at + 13))) for at in range(rows - verify)]
        batch = ragged_batch(DEVICE, [*crowd, (700, prompt[:verify], blocks)])
        logits = _logits(fused, batch)
        same = [bool(torch.equal(alone[at], logits[rows - verify + at])) for at in range(verify)]
        if not all(same):
            bad.append(f"{rows} rows: {sum(same)}/{verify}")
    other = list(range(3000, 3064))
    fused.run(ragged_batch(DEVICE, [(0, prompt[:700], other)], logit_rows=()))
    cut = list(range(3100, 3164))
    for at in range(0, 700, 100):
        fused.run(ragged_batch(DEVICE, [(at, prompt[at : at + 100], cut)], logit_rows=()))
    if not torch.equal(fused.kv.data[:, :, other[:43]], fused.kv.data[:, :, cut[:43]]):
        bad.append("prompt in slices of 100")
    return "yes, 1 to 256 rows and prompt slices" if not bad else "NO: " + ", ".join(bad)


def _floats(weights: Weights) -> Weights:
    """The same weights in float32."""

    def wide(layer: LayerWeights) -> LayerWeights:
        named: dict[str, Any] = {f.name: getattr(layer, f.name) for f in fields(layer)}
        floats: dict[str, Any] = {name: None if value is None else value.float() for name, value in named.items()}
        return LayerWeights(**floats)

    return Weights(
        weights.embedding.float(), tuple(wide(layer) for layer in weights.layers), weights.final_norm.float(),
        weights.head.float(), weights.inverse_frequencies,
    )  # fmt: skip


def default_steps(report: Report) -> None:
    """Step time of the default shape by width, context and drafts, and the start-up of the whole set of graphs."""
    backend = backend_of(SHAPES["default"])
    began = time.perf_counter()
    backend.prepare()
    report.add("seconds to capture all graphs (kernels cached)", time.perf_counter() - began)
    report.add("graphs", len(backend.graphs.planned(())))
    base = 0.0
    for rows in (1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256):
        took = step_us(backend, rows)
        report.add(f"step us, {rows} rows of as many sequences, context 256", took)
        base = base or took.median
        report.add(f"  tokens/s at {rows}", rows * 1e6 / took.median)
        if 1 < rows <= 8:
            verify = step_us(backend, rows, per_segment=rows)
            report.add(f"  verify of {rows} rows, us", verify)
            report.add(f"  verify of {rows} rows over a plain step", verify.median / base)
    for context in (1, 120, 250, 500, 1000, 2000, 8000):
        report.add(f"step us, 1 row, context {context}", step_us(backend, 1, context))
    for rows in (32, 256):
        took = step_us(backend, rows, 200)
        report.add(f"step us, {rows} rows of as many sequences, context 200", took)
        report.add(f"  tokens/s at {rows}, context 200", rows * 1e6 / took.median)
    for rows in (512, 1024):
        captured = backend.graphs.get(backend.graphs.key(rows, rows, False))
        feed(backend, rows, 0, rows)
        took = timed_us(captured.replay, 5)
        report.add(f"prompt of {rows} tokens, us", took)
        report.add(f"  prompt tokens/s at {rows}", rows * 1e6 / took.median)
    _loop(report, backend)


def _loop(report: Report, backend: CudaBackend) -> None:
    """One row through `run` with its token brought to the host each step: what the host adds."""
    batch = ragged_batch(torch.device("cpu"), [(256, [5], list(range(20)))], greedy=True)
    host = torch.empty(1, dtype=torch.int64, pin_memory=True)

    def once() -> None:
        host.copy_(backend.run(batch).argmax, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    for _ in range(20):
        once()
    values = []
    for _ in range(200):
        began = time.perf_counter()
        once()
        values.append((time.perf_counter() - began) * 1e6)
    report.add("run and token on the host, us of wall time", Spread.of(values))


def profile(report: Report) -> None:
    """Where a step goes: each kernel of all layers alone, and the step without it."""
    backend = backend_of(SHAPES["default"], widths=NARROW)
    for rows in (1, 4, 8):
        key = backend.graphs.key(rows, 260, True)
        launches = backend.graphs.launches(key)

        def took(some: Sequence[Launch], rows: int = rows) -> float:
            captured = backend.graphs.capture(tuple(some), rows)
            feed(backend, rows, 256, rows)
            return timed_us(captured.replay).median

        whole = took(launches)
        report.add(f"profile {rows} rows: whole step us", whole)
        for part in dict.fromkeys(launch.part for launch in launches):
            report.add(f"  {part}: alone, us", took([one for one in launches if one.part == part]))
            rest = took([one for one in launches if one.part != part])
            report.add(f"  {part}: share (step less step without it), us", whole - rest)
    plain = backend_of(SHAPES["default"], widths=NARROW, pdl=False)
    for rows in (1, 8):
        report.add(f"step us without programmatic launch, {rows} rows", step_us(plain, rows))


def carveout(report: Report) -> None:
    """Step time when every kernel has the split of cache and shared memory that the driver picks. Runs first: the
    attribute stays with a kernel once set."""
    kept, graphs.share_carveout = graphs.share_carveout, lambda kernel: None
    try:
        backend = backend_of(SHAPES["default"], widths=NARROW)
        for rows in (1, 8):
            report.add(f"step us with the driver's carveouts, {rows} rows, context 120", step_us(backend, rows, 120))
    finally:
        graphs.share_carveout = kept
    backend = backend_of(SHAPES["default"], widths=NARROW)
    for rows in (1, 8):
        report.add(f"step us with one carveout, {rows} rows, context 120", step_us(backend, rows, 120))


def widths(report: Report) -> None:
    """Step times by rows, of all shapes."""
    for name, rows in (("default", (1, 2, 4, 8, 16, 32, 64, 128, 256)), ("1b", (1, 4, 8)), ("8b", (1, 4, 8))):
        backend = backend_of(SHAPES[name], widths=rows, tokens=120_000)
        for count in rows:
            took = step_us(backend, count, 200)
            report.add(f"{name}: step us, {count} rows of as many sequences, context 200", took)
            report.add("  tokens/s", count * 1e6 / took.median)
        bandwidth = report.figures.get("copy bandwidth, TB/s")
        if isinstance(bandwidth, float):
            alone = step_us(backend, 1, 200).median
            report.add(
                f"{name}: share of copy bandwidth", weight_bytes(SHAPES[name]) / (alone * 1e-6) / 1e12 / bandwidth
            )
        del backend
        torch.cuda.empty_cache()


def larger(report: Report, name: str) -> None:
    """Batch 1 (and few rows) in a larger shape: share of the copy bandwidth."""
    config = SHAPES[name]
    backend = backend_of(config, widths=NARROW, tokens=40_000)
    bandwidth = report.figures.get("copy bandwidth, TB/s")
    for rows in NARROW:
        took = step_us(backend, rows)
        report.add(f"{name}: step us, {rows} rows", took)
        if rows == 1 and isinstance(bandwidth, float):
            reached = weight_bytes(config) / (took.median * 1e-6) / 1e12
            report.add(f"{name}: weights read, TB/s", reached)
            report.add(f"{name}: share of copy bandwidth", reached / bandwidth)
    _parts(report, name, backend, 1)


def _parts(report: Report, name: str, backend: CudaBackend, rows: int) -> None:
    launches = backend.graphs.launches(backend.graphs.key(rows, 260, True))
    for part in dict.fromkeys(launch.part for launch in launches):
        captured = backend.graphs.capture(tuple(one for one in launches if one.part == part), rows)
        feed(backend, rows, 256)
        report.add(f"{name}: {part} alone, {rows} rows, us", timed_us(captured.replay, 10, 3).median)


MATRICES = ("qkv", "out", "gate_up", "down", "head")
Tile = tuple[int, int, int, int | None, int]
"""Outputs, rows, inner elements, registers and stages of a tile."""

_SMALL: tuple[Tile, ...] = tuple((n, r, 1024, None, 1) for n in (16, 32) for r in (16, 32))
_LARGE: tuple[Tile, ...] = (
    (32, 8, 512, None, 3), (16, 8, 1024, None, 3), (32, 8, 512, None, 4), (16, 8, 1024, None, 1), (64, 8, 512, None, 2),
    (32, 8, 1024, None, 1), (32, 8, 256, None, 6),
)  # fmt: skip
SWEEPS: dict[str, tuple[tuple[int, int | None, tuple[Tile, ...]], ...]] = {
    "default": (
        (1, None, ((16, 8, 1024, None, 1), (32, 8, 1024, None, 1))),
        (256, None, (*_SMALL[1:], (64, 32, 1024, None, 1))),
    ),
    "1b": ((1, 6, _LARGE),),
    "8b": ((1, 6, _LARGE),),
}
"""Per shape: rows, layers and tiles."""

ATTENTION = (AttentionTiling(256, 4), AttentionTiling(128, 4), AttentionTiling(256, 8))


def forced(
    outputs: int, rows: int, budget: int, registers: int | None = None, stages: int = 1
) -> Callable[..., Tiling]:
    """A tiling with these sizes; slices and their order stay those of `tiling`."""

    def tile(inner: int, wide: int, count: int, *, normed: bool, most: int = 64) -> Tiling:
        base = tiling(inner, wide, count, normed=normed, most=most)
        width, iterations, tail = cut(inner // base.slices, budget // base.slices)
        size = min(outputs, most) if wide % outputs == 0 else 16
        return replace(
            base, width=width, iterations=iterations, tail=tail, outputs=size, rows=rows, registers=registers,
            stages=1 if tail else stages,
        )  # fmt: skip

    return tile


def sweep(report: Report, name: str) -> None:
    """Time of every matrix kernel under other tile sizes."""
    for rows, layers, tiles in SWEEPS[name]:
        backend = backend_of(SHAPES[name], widths=(rows,), layers=layers)
        for tile in tiles:
            if report.left < 5:
                return
            backend.graphs.builder.tile = forced(*tile)
            launches = backend.graphs.launches(backend.graphs.key(rows, 260, rows <= LOGIT_ROWS))
            shown = []
            for part in dict.fromkeys(one.part for one in launches if one.part in MATRICES):
                try:
                    alone = tuple(one for one in launches if one.part == part)
                    captured: Captured = backend.graphs.capture(alone, rows)
                    feed(backend, rows, 256)
                    shown.append(f"{part} {timed_us(captured.replay, 10, 3).median:.1f}")
                except Exception as error:  # a tile too large for the chip is a result too
                    shown.append(f"{part} {type(error).__name__}")
            report.add(f"sweep {name} {rows} rows, tile {tile}, us of all layers", ", ".join(shown))


def sweep_attention(report: Report) -> None:
    """Step time under other chunks and warps of attention."""
    for tile in ATTENTION:
        backend = backend_of(SHAPES["default"], widths=(1, 8, 32, 256), attention=tile)
        cases = ((1, 1), (1, 120), (1, 250), (1, 500), (1, 1000), (1, 4000), (8, 250), (8, 1000), (32, 250), (256, 250))
        shown = [f"{rows}@{context} {step_us(backend, rows, context).median:.0f}" for rows, context in cases]
        report.add(f"attention {tile.chunk} positions, {tile.warps} warps: step us", ", ".join(shown))
        del backend
        torch.cuda.empty_cache()


def engine_section(report: Report) -> None:
    """The whole engine in this process: scheduler, device thread, graphs; one prompt of 64 tokens per sequence."""
    from engine.bench.local import LocalEngine
    from engine.core.vocabulary import Vocabulary
    from engine.model.torch_device import TorchDevice

    config = SHAPES["default"]
    backend = backend_of(config)
    backend.prepare()
    gc.freeze()  # as the engine's process does
    gc.set_threshold(50_000, 20, 50)
    device = TorchDevice(backend, name="bench", max_rows=4096)
    vocabulary = Vocabulary((b"a",) * config.vocab_size, frozenset())
    made = np.random.default_rng(0)
    for batch, count in ((1, 256), (8, 128), (32, 128), (256, 96)):
        for pipelined in ("off", "on"):
            if report.left < 10:
                return
            values, busy, gaps = [], [], []
            for repeat in range(4 if batch == 1 else 2):
                engine = LocalEngine(
                    device, vocabulary, batch=batch, drafter="off", prefix_cache="off", pipelined_decode=pipelined
                )
                for at in range(batch):
                    prompt = made.integers(0, config.vocab_size, 64).tolist()
                    engine.submit(f"r{repeat}-{at}", prompt, count, ignore_eos=True)
                out = engine.run()
                times = sorted({at for _, at, _ in out.emitted_at})
                steady = times[len(times) // 4 :]
                tokens = sum(n for _, at, n in out.emitted_at if at > steady[0])
                values.append(tokens * 1e9 / (steady[-1] - steady[0]))
                decode = [step for step in out.steps if step.device_us][len(out.steps) // 4 :]
                busy.append(sum(step.device_us for step in decode) * 1000 / max(1, steady[-1] - steady[0]))
                gaps += [(b - a) / 1e6 for a, b in pairwise(steady)]
            name = f"engine, {batch} sequences, pipelined {pipelined}"
            report.add(f"{name}: tokens/s", Spread.of(values[1:]))
            report.add(f"{name}: device busy", max(busy))
            shown = f"{np.median(gaps):.3f}, {np.quantile(gaps, 0.99):.3f}"
            report.add(f"{name}: ms between deltas, median and p99", shown)
    device.close()


def peer(report: Report) -> None:
    """`transformers` generate on random weights of the same config: dynamic cache, then static cache and compile."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = SHAPES["default"]
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_context, tie_word_embeddings=True, bos_token_id=1, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(DEVICE, BF16).eval()
    prompt = torch.randint(0, c.vocab_size, (1, 64), device=DEVICE)

    def rate(count: int, **more: object) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, **more)
        torch.cuda.synchronize()
        return count / (time.perf_counter() - began)

    rate(8)
    report.add("transformers, dynamic cache: tokens/s", Spread.of([rate(64) for _ in range(2)]))
    report.write()
    if report.left > 45:
        rate(96, cache_implementation="static")
        values = [rate(96, cache_implementation="static") for _ in range(3)]
        report.add("transformers, static cache and compile: tokens/s", Spread.of(values))


SECTIONS: dict[str, Callable[[Report], None]] = {
    "carveout": carveout,
    "widths": widths,
    "exact": exactness,
    "default": default_steps,
    "profile": profile,
    "1b": lambda report: larger(report, "1b"),
    "8b": lambda report: larger(report, "8b"),
    "engine": engine_section,
    "peer": peer,
    "attention": sweep_attention,
    "sweep-default": lambda report: sweep(report, "default"),
    "sweep-1b": lambda report: sweep(report, "1b"),
    "sweep-8b": lambda report: sweep(report, "8b"),
}


@dataclass(frozen=True, slots=True)
class _Job:
    """Kernels to compile before anything is measured."""

    shape: str
    widths: tuple[int, ...]
    tile: Tile | None = None
    attention: AttentionTiling | None = None
    pdl: bool = True


def _needed(names: Sequence[str]) -> list[_Job]:
    """What the sections compile."""
    jobs: list[_Job] = []
    if {"carveout", "exact", "default", "profile", "engine"} & set(names):
        jobs.append(_Job("default", (8, 16, 64, 256)))
    if "profile" in names:
        jobs.append(_Job("default", (8,), pdl=False))
    if "widths" in names:
        jobs += [_Job("default", (8, 32, 256)), _Job("1b", (8,)), _Job("8b", (8,))]
    if "attention" in names:
        jobs += [_Job("default", (8, 32), attention=tile) for tile in ATTENTION]
    jobs += [_Job(name, (8,)) for name in ("1b", "8b") if name in names]
    for name in names:
        if name.startswith("sweep-"):
            shape = name.removeprefix("sweep-")
            jobs += [_Job(shape, (rows,), tile) for rows, _, tiles in SWEEPS[shape] for tile in tiles]
    return jobs


def compile_part(names: Sequence[str], part: int, parts: int) -> None:
    """Compile every `parts`-th kernel into Triton's cache."""
    launches: dict[object, tuple[Launch, bool]] = {}
    hollow: dict[object, CudaBackend] = {}
    for job in _needed(names):
        config = replace(SHAPES[job.shape], num_layers=1)
        key = (job.shape, job.widths, job.attention)
        if key not in hollow:
            hollow[key] = _hollow(config, job.widths, job.attention)
        backend = hollow[key]
        backend.graphs.builder.tile = tiling if job.tile is None else forced(*job.tile)
        keys = [GraphKey(width, config.max_context, width <= LOGIT_ROWS) for width in job.widths]
        for launch in backend.graphs.kinds(keys):
            launches.setdefault((kind_of(launch), job.pdl), (launch, job.pdl))
    for launch, pdl in list(launches.values())[part::parts]:
        try:
            launch.compile(pdl)
        except Exception as error:
            print(f"compile {launch.part} {launch.constants}: {type(error).__name__} {str(error)[:300]}", flush=True)


def _hollow(config: ModelConfig, widths: Sequence[int], attention: AttentionTiling | None) -> CudaBackend:
    """A backend of one layer whose weights were never set: enough to compile for."""
    kv = make_kv(config, 64, BF16, DEVICE)
    return CudaBackend(config, random_weights(config, BF16, DEVICE), kv, widths=widths, attention=attention)


def _compile_all(names: Sequence[str], report: Report, workers: int) -> None:
    began = time.perf_counter()
    command = [sys.executable, "-m", "engine.bench.gpu", "--only", ",".join(names)]
    running = [subprocess.Popen([*command, "--compile", f"{at}/{workers}"]) for at in range(workers)]
    for process in running:
        process.wait(timeout=max(5.0, report.left))
    report.add(f"seconds to compile kernels in {workers} processes", time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--compile", default="")
    chosen = parser.parse_args()
    names = chosen.only.split(",")
    if chosen.compile:
        part, parts = map(int, chosen.compile.split("/"))
        compile_part(names, part, parts)
        return
    report = Report(chosen.out, time.perf_counter() + chosen.seconds)
    report.add("gpu", torch.cuda.get_device_name())
    _compile_all(names, report, chosen.workers)
    report.add("copy bandwidth, TB/s", copy_bandwidth() / 1e12)
    torch.cuda.empty_cache()
    for name in names:
        if report.left < 8:
            report.failures[name] = "no time left"
            continue
        try:
            SECTIONS[name](report)
        except Exception as error:  # one failed section must not cost the others
            import traceback

            traceback.print_exc()
            report.failures[name] = f"{type(error).__name__}: {error}"
        torch.cuda.empty_cache()
        report.write()
    print(json.dumps(report.failures), flush=True)


if __name__ == "__main__":
    main()
