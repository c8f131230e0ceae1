"""A recording server beside an engine in this process: what the benchmarks of telemetry decode against.

The engine ticks here, as in `bench decode`; the second process decodes every batch, keeps the live view and writes the
database, on the same cores.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import psutil  # type: ignore[import-untyped]

from engine.bench.local import LocalEngine, open_text
from engine.bench.step_stream import run_record
from engine.model.open import open_device
from engine.runtime.outbox import RECORDS_S
from telemetry.batch import message, pack
from telemetry.setup import Telemetry

TELL_S = 0.1
PROMPT = "Tell me about the harbour in the early morning, the boats, the nets and the weather."
_HEAD = struct.Struct("<I")


class Recorder:
    """The process that records; use it as a context."""

    def __init__(self, database: Path, collector: str = "") -> None:
        self._command = [sys.executable, "-m", "engine.bench.telemetry_recorder", str(database), collector]
        self.trouble = ""
        """What the process says is wrong now, in one sentence."""
        self.lost: dict[str, int] = {}

    def __enter__(self) -> Recorder:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._ready = threading.Event()
        self._reader.start()
        if not self._ready.wait(30):
            raise RuntimeError("the recording process did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)
        self._reader.join(5)

    @property
    def cpu_s(self) -> float:
        """Processor time that the process used so far."""
        user, system, *_ = psutil.Process(self._process.pid).cpu_times()
        return float(user + system)

    def send(self, payload: bytes) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the recording process has no input")
        self._process.stdin.write(_HEAD.pack(len(payload)) + payload)
        self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            told = json.loads(line)
            self.trouble, self.lost = told["trouble"], told["lost"]
            self._ready.set()


class Speaker:
    """Decodes the same reply again and again, at any trace level, and sends what was recorded to a recorder."""

    def __init__(self, model: Path, tokens: int) -> None:
        text, self._vocabulary = open_text(model)
        self._device = open_device(model, kv_tokens=4096, max_batch_size=1)
        self._prompt = tuple(text.encode_chat([{"role": "user", "content": PROMPT}]))
        self._tokens = tokens

    def tokens_per_s(self, recorder: Recorder, level: int) -> float:
        """From the first token on."""
        first, *_, last = self.speak(recorder, level)
        return (self._tokens - 1) * 1e9 / (last - first)

    def speak(self, recorder: Recorder, level: int) -> list[int]:
        """Clock readings in ns at which the tokens of one reply were emitted."""
        engine = LocalEngine(
            self._device, self._vocabulary, batch=1, drafter="off", prefix_cache="off", trace_level=level
        )
        engine.submit("r", self._prompt, self._tokens, ignore_eos=True)
        done = threading.Event()
        sender = threading.Thread(target=_send, args=(engine, recorder, done))
        sender.start()
        out = engine.run()
        done.set()
        sender.join()
        return [at for _, at, _ in out.emitted_at]


def _send(engine: LocalEngine, recorder: Recorder, done: threading.Event) -> None:
    """What the flush of the engine process does: take what was recorded, pack it, send it."""
    last = False
    while not last:
        last = done.wait(RECORDS_S)
        records = engine.out.ring.drain()
        if records:
            recorder.send(message(records))


def serve(database: Path, collector: str) -> None:
    """The other process: take in batches until the input ends, and tell what is wrong when that changes."""
    telemetry = Telemetry(database, collector)
    telemetry.take(pack([run_record()]))
    threading.Thread(target=_tell, args=(telemetry,), daemon=True).start()
    while len(head := os.read(0, _HEAD.size)) == _HEAD.size:
        (length,) = _HEAD.unpack(head)
        payload = b""
        while len(payload) < length:
            payload += os.read(0, length - len(payload))
        telemetry.ingest(payload)
    telemetry.close()


def _tell(telemetry: Telemetry) -> None:
    told = None
    while True:
        state = {"trouble": telemetry.trouble, "lost": dict(telemetry.store.losses)}
        if state != told:
            print(json.dumps(state), flush=True)
            told = state
        time.sleep(TELL_S)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
