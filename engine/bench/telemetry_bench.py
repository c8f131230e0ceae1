"""What telemetry costs and holds: recording, ingest, bytes per step, view latency, survival of `kill -9`.

Every part can run alone: `python -m engine.bench.telemetry_bench ingest --seconds 60`.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]

from engine.bench.result import BenchResult
from engine.bench.step_stream import StepStream, run_record
from engine.runtime.outbox import RECORDS_S
from telemetry.batch import encode, message, pack
from telemetry.database import open_for_reading
from telemetry.retention import Retention
from telemetry.ring import Ring
from telemetry.setup import Telemetry
from telemetry.store import Store
from telemetry.views import VIEWS

Progress = Callable[[str], None]
TROUBLES = ("none", "disk full", "file read-only", "file replaced", "collector down", "collector slow")
_LENGTH = struct.Struct("<II")
_CHUNK = 5_000
_RESIDENT_EVERY_S = 2.0
_FOREVER = Retention(0, 0)
PARTS = ("record", "idle", "ingest", "file", "kill", "cost", "trouble")
DECODING = ("cost", "trouble")
"""Parts that decode with a model, and are left out without one."""


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    parts: tuple[str, ...] = PARTS
    seconds: float = 60.0
    """Of sustained ingest."""
    rate: int = 110_000
    """Records a second that the producer sends."""
    steps: int = 5_000_000
    """In the file whose size and views are measured."""
    kills: int = 200
    rounds: int = 5
    model: Path | None = None
    pairs: int = 20
    """Alternating replies of `cost`, and of each kind of `trouble`."""
    troubles: tuple[str, ...] = TROUBLES


def bench_telemetry(options: TelemetryOptions = TelemetryOptions(), progress: Progress = print) -> BenchResult:
    """Run the chosen parts and say what each measured."""
    result = BenchResult("telemetry")
    parts = {
        "record": _record, "idle": _idle, "ingest": _ingest, "file": _file, "kill": _kill, "cost": _cost,
        "trouble": _trouble,
    }  # fmt: skip
    for name in options.parts:
        progress(f"telemetry: {name}")
        with tempfile.TemporaryDirectory() as directory:
            parts[name](options, result, Path(directory), progress)
    return result


# ---- the tick thread ------------------------------------------------------------------------------------------


def _record(options: TelemetryOptions, result: BenchResult, directory: Path, progress: Progress) -> None:
    """Microseconds of the tick thread for one step record of one sequence: in a loop, and in the midst of decoding."""
    result.add("record_in_a_loop_us", [_record_once() for _ in range(options.rounds * 4)])
    if options.model is None:
        result.notes.append("record: its cost in the midst of decoding was left out, since no model was named")
        return
    from engine.bench.telemetry_record import measure

    measure(options.model, result, options.pairs)


def _record_once(count: int = 20_000) -> float:
    ring = Ring(count)
    refusals = (("ngram", "no_match"),)
    begun = time.thread_time_ns()
    for number in range(count):
        ring.append(
            (_record_once, number, number, "mtp", None, number, [], 1, 4, 3, "num_drafts", refusals, None, 40, 0)
        )
    return (time.thread_time_ns() - begun) / count / 1e3


# ---- a server beside a chatting engine -------------------------------------------------------------------------


def _idle(options: TelemetryOptions, result: BenchResult, directory: Path, progress: Progress) -> None:
    """Share of one core that taking in 100 steps a second costs the server: decode, hub, store, spans, metrics."""
    telemetry = Telemetry(directory / "idle.duckdb")
    stream = StepStream(step_ns=10_000_000)
    telemetry.take(pack([run_record()]))
    time.sleep(3.0)
    shares = []
    for _ in range(options.rounds):
        used, begun = time.process_time(), time.perf_counter()
        payloads = [message(stream.take(round(100 * RECORDS_S))) for _ in range(50)]
        made = time.process_time() - used
        for payload in payloads:
            telemetry.ingest(payload)
            time.sleep(RECORDS_S)
        shares.append((time.process_time() - used - made) / (time.perf_counter() - begun) * 100)
    telemetry.close()
    result.add("server_cpu_percent_of_a_core_at_100_steps_per_s", shares)


# ---- sustained ingest -----------------------------------------------------------------------------------------


def _ingest(options: TelemetryOptions, result: BenchResult, directory: Path, progress: Progress) -> None:
    """Records packed and sent by another process, as the engine does it, through decode, hub, store and spans."""
    telemetry = Telemetry(directory / "ingest.duckdb")
    telemetry.take(pack([run_record()]))
    command = [sys.executable, "-m", __spec__.name, "produce", "--rate", str(options.rate),
               "--seconds", str(options.seconds)]  # fmt: skip
    producer = subprocess.Popen(command, stdout=subprocess.PIPE)
    server = psutil.Process()
    records, begun, cpu = 0, 0.0, 0.0
    resident: list[float] = []
    for count, payload in _frames(producer.stdout):
        if not begun:
            begun, cpu = time.perf_counter(), time.process_time()
        telemetry.ingest(payload)
        records += count
        if len(resident) * _RESIDENT_EVERY_S <= time.perf_counter() - begun:
            resident.append(server.memory_info().rss / 1e6)
    elapsed = time.perf_counter() - begun
    busy = (time.process_time() - cpu) / elapsed
    producer.wait()
    caught_up = telemetry.store.flush(60)
    behind = time.perf_counter() - begun - elapsed
    lost = dict(telemetry.store.losses)
    telemetry.close()
    half = resident[len(resident) // 2 :]
    result.figures |= {
        "ingest_records_per_s": records / elapsed,
        "ingest_seconds": elapsed,
        "ingest_seconds_behind_at_the_end": behind,
        "ingest_lost": float(sum(lost.values())),
        "ingest_server_cores": busy,
        "ingest_resident_mb_growth_of_second_half": max(half[-5:], default=0.0) - max(half[:5], default=0.0),
        "ingest_resident_mb_highest": max(resident, default=0.0),
    }
    samples = " ".join(f"{megabytes:.0f}" for megabytes in resident)
    result.notes.append(f"ingest: resident MB every {_RESIDENT_EVERY_S:g} s: {samples}")
    if lost or not caught_up:
        result.notes.append(f"ingest: lost {lost}, caught up: {caught_up}")


def _frames(stream: IO[bytes] | None) -> Iterator[tuple[int, bytes]]:
    while stream is not None and len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        count, length = _LENGTH.unpack(head)
        yield count, stream.read(length)


def produce(rate: int, seconds: float) -> None:
    """Write frames at a steady rate; the records are made beforehand, they are packed when they are sent."""
    stream = StepStream()
    parts = [stream.take(_CHUNK * 4 // 7) for _ in range(40)]
    gc.freeze()
    begun, sent, at = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - begun) < seconds:
        if sent > elapsed * rate:
            time.sleep(0.002)
            continue
        records = parts[at % len(parts)]
        payload = encode(pack(records))
        sys.stdout.buffer.write(_LENGTH.pack(len(records), len(payload)) + payload)
        sent, at = sent + len(records), at + 1
    sys.stdout.buffer.flush()


# ---- a large file ---------------------------------------------------------------------------------------------


def _file(options: TelemetryOptions, result: BenchResult, directory: Path, progress: Progress) -> None:
    path = directory / "large.duckdb"
    store = Store(path, retention=_FOREVER)
    store.put(pack([run_record()]))
    stream, at_once = StepStream(), 20_000
    for made in range(0, options.steps, at_once):
        while store.queued > 400_000:  # more than a transaction takes, or each would wait for its time
            time.sleep(0.02)
        store.put(pack(stream.take(min(at_once, options.steps - made))))
        if made % 500_000 == 0:
            progress(f"telemetry: {made} of {options.steps} steps")
    store.close(timeout_s=120)
    result.figures["file_bytes_per_step"] = path.stat().st_size / options.steps
    reader = open_for_reading(path)
    slowest = 0.0
    for view in VIEWS:
        times = [_view_ms(reader.cursor(), view.name) for _ in range(options.rounds + 1)][1:]
        result.rows.append({"view": view.name, "median_ms": sorted(times)[len(times) // 2], "max_ms": max(times)})
        slowest = max(slowest, sorted(times)[len(times) // 2])
    result.figures["slowest_view_ms"] = slowest
    reader.close()


def _view_ms(cursor: object, name: str) -> float:
    from telemetry.queries import Limits, run_query

    begun = time.perf_counter()
    run_query(cursor, f"SELECT * FROM {name}", Limits(max_rows=1000, seconds=60))  # type: ignore[arg-type]
    return (time.perf_counter() - begun) * 1e3


# ---- kill -9 --------------------------------------------------------------------------------------------------


def _kill(options: TelemetryOptions, result: BenchResult, directory: Path, progress: Progress) -> None:
    """Kill a recording process at random moments; every file must open and state what is missing."""
    rng, gaps, missing, opened = random.Random(5), [], [], 0
    for number in range(options.kills):
        path = directory / f"victim-{number}.duckdb"
        gap, lost = _kill_once(path, rng.uniform(0.0, 3.0))
        opened += 1
        gaps.append(gap)
        missing.append(float(lost))
        for left in directory.glob(f"victim-{number}.*"):
            left.unlink()
        if number % 20 == 0:
            progress(f"telemetry: killed {number} of {options.kills}")
    result.figures["kill_files_that_opened"] = opened
    result.add("kill_gap_ms", gaps)
    result.add("kill_records_missing", missing)


def _kill_once(path: Path, after_s: float) -> tuple[float, int]:
    victim = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "victim", "--path", str(path)], stdout=subprocess.PIPE
    )
    if victim.stdout is None:
        raise RuntimeError("the victim has no output")
    victim.stdout.readline()
    time.sleep(after_s)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    reader = open_for_reading(path)
    rows = reader.execute("SELECT state, gap_ms, missing FROM runs").fetchall()
    reader.close()
    if not rows:
        return 0.0, 0
    state, gap, lost = rows[0]
    if state != "interrupted":
        raise RuntimeError(f"the run of a killed process is {state}")
    return float(gap), int(lost)


def _cost(options: TelemetryOptions, result: BenchResult, directory: Path, progress: Progress) -> None:
    """Decode throughput with and without recording, in alternating pairs."""
    if options.model is None:
        result.notes.append("cost: left out, since no model was named")
        return
    from engine.bench.telemetry_cost import measure

    measure(options.model, directory, result, options.pairs)


def _trouble(options: TelemetryOptions, result: BenchResult, directory: Path, progress: Progress) -> None:
    """Decode throughput while the database or the collector is in trouble, against healthy replies in turn."""
    if options.model is None:
        result.notes.append("trouble: left out, since no model was named")
        return
    from engine.bench.telemetry_trouble import measure

    measure(options.model, directory, result, options.pairs, options.troubles, progress)


def victim(path: Path) -> None:
    """Record 5,000 records a second until killed."""
    store = Store(path, retention=_FOREVER)
    stream = StepStream()
    store.put(pack([run_record()]))
    print("recording", flush=True)
    while True:
        store.put(pack(stream.take(30)))
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=(*PARTS, "all", "produce", "victim"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=int, default=110_000)
    parser.add_argument("--steps", type=int, default=5_000_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--trouble", action="append", choices=TROUBLES)
    parser.add_argument("--path", type=Path, default=Path("victim.duckdb"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.part == "produce":
        produce(args.rate, args.seconds)
    elif args.part == "victim":
        victim(args.path)
    else:
        parts = PARTS if args.part == "all" else (args.part,)
        options = TelemetryOptions(
            parts, args.seconds, args.rate, args.steps, args.kills, model=args.model, pairs=args.pairs,
            troubles=tuple(args.trouble or TROUBLES),
        )  # fmt: skip
        result = bench_telemetry(options, lambda line: print(line, file=sys.stderr))
        print(result.to_json().decode() if args.json else result.text())


if __name__ == "__main__":
    main()
