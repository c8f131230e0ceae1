"""What recording costs a chat: the same decode with trace level 2 and 0 in turn, a server process taking it all in.

The engine ticks in this process, as in `bench decode`; a second process decodes every batch, keeps the live view and
writes the database, on the same cores. What it takes from the engine is part of the figure.
"""

from __future__ import annotations

import os
import statistics
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from engine.bench.local import LocalEngine, open_text
from engine.bench.result import BenchResult
from engine.bench.step_stream import run_record
from engine.core.device import Device
from engine.core.vocabulary import Vocabulary
from engine.model.open import open_device
from telemetry.batch import encode, pack
from telemetry.setup import Telemetry

LEVEL = 2
FLUSH_S = 0.05
_HEAD = struct.Struct("<I")
_PROMPT = "Tell me about the harbour in the early morning, the boats, the nets and the weather."


def measure(model: Path, directory: Path, result: BenchResult, pairs: int = 20, tokens: int = 128) -> None:
    """Add the paired cost, as a share of the throughput at level 0, to the result."""
    text, vocabulary = open_text(model)
    device = open_device(model, kv_tokens=4096, max_batch_size=1)
    prompt = tuple(text.encode_chat([{"role": "user", "content": _PROMPT}]))
    command = [sys.executable, "-m", "engine.bench.telemetry_cost", str(directory / "cost.duckdb")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        if server.stdin is None:
            raise RuntimeError("the server process has no input")
        time.sleep(3.0)
        costs = [_pair(device, vocabulary, prompt, tokens, server.stdin, at % 2 == 0) for at in range(pairs + 1)][1:]
    finally:
        if server.stdin is not None:
            server.stdin.close()
        server.wait()
    result.add("level_2_cost_percent_of_decode", [cost * 100 for cost in costs])
    middle = sorted(costs)[len(costs) // 4 : -(len(costs) // 4) or None]
    result.figures["level_2_cost_percent_mean_of_middle_half"] = statistics.mean(middle) * 100


def _pair(
    device: Device, vocabulary: Vocabulary, prompt: tuple[int, ...], tokens: int, pipe: IO[bytes], level_first: bool
) -> float:
    order = (LEVEL, 0) if level_first else (0, LEVEL)
    speed = {level: _decode(device, vocabulary, prompt, tokens, pipe, level) for level in order}
    return 1 - speed[LEVEL] / speed[0]


def _decode(
    device: Device, vocabulary: Vocabulary, prompt: tuple[int, ...], tokens: int, pipe: IO[bytes], level: int
) -> float:
    """Tokens per second from the first token on."""
    engine = LocalEngine(device, vocabulary, batch=1, drafter="off", prefix_cache="off", trace_level=level)
    engine.submit("r", prompt, tokens, ignore_eos=True)
    done = threading.Event()
    sender = threading.Thread(target=_send, args=(engine, pipe, done))
    sender.start()
    out = engine.run()
    done.set()
    sender.join()
    stamps = [(at, count) for _, at, count in out.emitted_at]
    return sum(count for _, count in stamps[1:]) * 1e9 / (stamps[-1][0] - stamps[0][0])


def _send(engine: LocalEngine, pipe: IO[bytes], done: threading.Event) -> None:
    """What the flush of the engine process does: take what was recorded, encode it, send it."""
    while not done.wait(FLUSH_S):
        records, engine.out.records = engine.out.records, []
        if records:
            payload = encode(pack(records))
            pipe.write(_HEAD.pack(len(payload)) + payload)
            pipe.flush()


def serve(path: Path) -> None:
    """The other process: take in batches until the input ends."""
    telemetry = Telemetry(path)
    telemetry.take(pack([run_record()]))
    while len(head := os.read(0, _HEAD.size)) == _HEAD.size:
        (length,) = _HEAD.unpack(head)
        payload = b""
        while len(payload) < length:
            payload += os.read(0, length - len(payload))
        telemetry.ingest(payload)
    telemetry.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
