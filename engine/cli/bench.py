"""`metrale bench` and `metrale verify-lossless`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from engine.cli.errors import Failure
from engine.cli.options import DEFAULT_MODEL, json_option
from engine.cli.serve import find_model

BATCHES = (1, 8)


@click.group(epilog="Example: metrale bench decode --vs llama.cpp --json")
def bench() -> None:
    """Benchmarks: ours and peers in the same session, in alternating runs, with ratios and spread."""


def _speed(name: str, sentence: str, prompt_tokens: int, new_tokens: int) -> None:
    """One of the speed benchmarks, which differ in what they time."""

    @bench.command(name, help=sentence, epilog=f"Example: metrale bench {name} --vs llama.cpp --rounds 5")
    @click.argument("model", default=DEFAULT_MODEL)
    @click.option("--vs", "versus", multiple=True, metavar="PEER", help="llama.cpp or transformers; may be repeated.")
    @click.option("--rounds", type=click.IntRange(1, 1000), default=5, help="Measurements of each, in turn.")
    @click.option("--prompt-tokens", type=click.IntRange(1), default=prompt_tokens, help="Tokens of the prompt.")
    @click.option("--new-tokens", type=click.IntRange(1), default=new_tokens, help="Tokens of the reply.")
    @click.option("--chats", type=click.IntRange(1, 256), default=8, help="Chats at once (serve).")
    @click.option("--threads", type=click.IntRange(0), default=0, help="0: all cores.")
    @json_option
    def command(model: str, versus: tuple[str, ...], as_json: bool, **numbers: int) -> None:
        from engine.bench import speed
        from engine.bench.peers import PEERS

        peers = [peer for text in versus for peer in text.replace(",", " ").split()]
        unknown = [peer for peer in peers if peer not in PEERS]
        if unknown:
            raise click.UsageError(f"There is no peer {unknown[0]!r}; peers are {', '.join(PEERS)}.")
        options = speed.SpeedOptions(model=find_model(model), versus=tuple(peers), **numbers)
        run = {"decode": speed.bench_decode, "prefill": speed.bench_prefill, "serve": speed.bench_serve}[name]
        _print(run(options, _note), as_json)


_speed("decode", "Tokens per second of one reply.", 64, 128)
_speed("prefill", "Prompt tokens per second.", 512, 1)
_speed("serve", "Tokens per second of several chats together.", 64, 64)


@bench.command(epilog="Example: metrale bench spec --limit 24 --json")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), help="JSON lines with id, task and turns.")
@click.option("--limit", type=click.IntRange(0), default=48, help="Prompts taken, spread over the file; 0: all.")
@click.option("--new-tokens", type=click.IntRange(1), default=256, help="Tokens of each reply at most.")
@click.option("--drafter", "drafters", multiple=True, help="Only this one; may be repeated. Default: all, and auto.")
@click.option("--num-drafts", type=click.IntRange(1, 15), default=3, help="Drafts per verify step.")
@click.option("--threads", type=click.IntRange(0), default=0, help="0: all cores.")
@json_option
def spec(
    model: str, prompts: Path | None, drafters: tuple[str, ...], as_json: bool, **numbers: int
) -> None:  # fmt: skip
    """Speculation by task and drafter: acceptance by position, mean accepted, speed-up over plain decoding."""
    from engine.bench.spec import SpecOptions, bench_spec

    options = SpecOptions(find_model(model), prompts or shipped_prompts(), drafters=drafters, **numbers)
    _print(bench_spec(options, _note), as_json)


@bench.command(epilog="Example: metrale bench off --pairs 1600")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--pairs", type=click.IntRange(1), default=1600, help="Turns of each engine.")
@click.option("--new-tokens", type=click.IntRange(2), default=8, help="Steps of each turn.")
@click.option("--threads", type=click.IntRange(0), default=0, help="0: all cores.")
@json_option
def off(model: str, as_json: bool, **numbers: int) -> None:
    """What speculation costs while it is off, against an engine without draft heads."""
    from engine.bench.off_cost import OffOptions, bench_off

    _print(bench_off(OffOptions(find_model(model), **numbers), _note), as_json)


@bench.command(epilog="Example: metrale bench scheduler --rounds 3")
@click.argument("model", default=DEFAULT_MODEL)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["long", "queue", "pool"]),
    help="May be repeated; default: all.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, help="Repetitions.")
@click.option("--prompt-tokens", type=click.IntRange(64), default=4000, help="Tokens of the long prompt.")
@click.option("--threads", type=click.IntRange(0), default=0, help="0: all cores.")
@json_option
def scheduler(model: str, parts: tuple[str, ...], as_json: bool, **numbers: int) -> None:
    """What sharing costs: a chat beside a long prompt, a tight KV pool, a long queue."""
    from engine.bench.scheduling import SchedulingOptions, bench_scheduler

    _print(bench_scheduler(SchedulingOptions(find_model(model), parts, **numbers), _note), as_json)


@bench.command(epilog="Example: metrale bench gate --traces 500")
@click.option("--traces", type=click.IntRange(1), default=5000, help="Simulated traces.")
@click.option("--workers", type=click.IntRange(1), default=1, help="Processes.")
@json_option
def gate(traces: int, workers: int, as_json: bool) -> None:
    """Regret of the gate over simulated traces with changing costs, acceptance, width and depth."""
    from engine.bench.gate_sim import bench_gate

    _print(bench_gate(traces, workers, _note), as_json)


@bench.command(epilog="Example: metrale bench telemetry --part ingest --seconds 10")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--part", "parts", multiple=True, help="Only this part; may be repeated. Default: all.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, help="Of sustained ingest.")
@click.option("--rate", type=click.IntRange(1), default=110_000, help="Records a second of the producer.")
@click.option("--steps", type=click.IntRange(1), default=5_000_000, help="Lane steps in the measured file.")
@click.option("--kills", type=click.IntRange(1), default=200, help="Recorders that are killed.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Repetitions.")
@click.option("--pairs", type=click.IntRange(1), default=20, help="Alternating replies (cost, each trouble).")
@json_option
def telemetry(model: str, parts: tuple[str, ...], as_json: bool, **numbers: Any) -> None:
    """What recording costs and what it survives; the parts are record, idle, ingest, file, kill, cost and trouble."""
    from engine.bench.telemetry_bench import DECODING, PARTS, TelemetryOptions, bench_telemetry

    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise click.UsageError(f"There is no part {unknown[0]!r}; parts are {', '.join(PARTS)}.")
    chosen = parts or PARTS
    path = find_model(model) if set(chosen) & set(DECODING) else None
    _print(bench_telemetry(TelemetryOptions(parts=chosen, model=path, **numbers), _note), as_json)


@click.command("verify-lossless", epilog="Example: metrale verify-lossless --limit 8 --new-tokens 64")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), help="JSON lines with id, task and turns.")
@click.option("--limit", type=click.IntRange(0), default=0, help="Prompts taken, spread over the file; 0: all.")
@click.option("--new-tokens", type=click.IntRange(1), default=128, help="Tokens of each reply.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1, 64), help="Widths; may be repeated.")
@click.option("--backend", type=click.Choice(["auto", "native", "cuda", "reference"]), default="auto", help="Kernels.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", help="Arithmetic.")
@click.option("--threads", type=click.IntRange(0), default=0, help="0: all cores.")
@click.option("--way", "wanted", multiple=True, help="Only ways whose name contains this; may be repeated.")
@click.option("--shard", default="1/1", help="I/N: every N-th prompt from the I-th on, for N processes side by side.")
@click.option(
    "--merge",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Print what shards have found, from their --json; may be repeated. Decodes nothing.",
)
@json_option
def verify_lossless(
    model: str, prompts: Path | None, limit: int, new_tokens: int, batches: tuple[int, ...], backend: str, dtype: str,
    threads: int, wanted: tuple[str, ...], shard: str, merge: tuple[Path, ...], as_json: bool,
) -> int:  # fmt: skip
    """Every lane, width and lever flip against plain decoding, token for token; exit code 1 on any difference."""
    from engine.bench.lossless import Finding, compare, prepare, ways
    from engine.bench.lossless import merge as merged
    from engine.model.open import open_device

    if merge:
        found = [Finding(**raw) for file in merge for raw in json.loads(file.read_text())]
        return _print_findings(merged(found), as_json)
    path = find_model(model)
    vocabulary, chosen = prepare(path, prompts or shipped_prompts(), limit, _shard(shard))

    def open_pool(tokens: int) -> Any:
        return open_device(
            path, kv_tokens=tokens, max_batch_size=16, dtype=dtype, backend=backend, threads=threads or None
        )

    device = open_pool(16 * (2048 + new_tokens))
    drafters = ("ngram", *sorted(str(drafter) for drafter in device.facts.drafters))
    plan = [way for way in ways(drafters, batches or BATCHES) if not wanted or any(text in way.name for text in wanted)]
    return _print_findings(compare(device, vocabulary, chosen, new_tokens, plan, open_pool, _note), as_json)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise click.UsageError(f"A shard is I/N with I from 1 to N, not {text!r}.")
    return int(part), int(parts)


def shipped_prompts() -> Path:
    """The prompts that come with the package."""
    path = Path(__file__).parents[1] / "bench" / "prompts.jsonl"
    if not path.is_file():
        raise Failure("No prompts are shipped with this installation; name a file with --prompts.")
    return path


def _print_findings(findings: Sequence[Any], as_json: bool) -> int:
    """Print them; the exit code is 1 where any reply differs."""
    differing = sum(finding.differing for finding in findings)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return 1 if differing else 0
    for finding in findings:
        verdict = "equal"
        if finding.differing:
            often = f"{finding.differing} DIFFER, {1000 * finding.differing / finding.compared:.2f} in 1,000 tokens"
            verdict = f"{often}, margin at most {finding.widest_margin:.3f}, first: {finding.first}"
        click.echo(f"{finding.way:24} {finding.replies:4} replies {finding.tokens:7} tokens  {verdict}")
    replies, tokens = (sum(getattr(finding, name) for finding in findings) for name in ("replies", "tokens"))
    click.echo(f"{len(findings)} ways, {replies:,} replies, {tokens:,} tokens, {differing} differ")
    return 1 if differing else 0


def _print(result: Any, as_json: bool) -> None:
    click.echo(result.to_json() if as_json else result.text())


def _note(line: str) -> None:
    click.echo(line, err=True)
