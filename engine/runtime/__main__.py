"""`python -m engine.runtime --socket PATH`, with the engine's options as JSON on standard input."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from engine.runtime.build import EngineOptions, build_from
from engine.runtime.process import run


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] != "--socket":
        print("usage: python -m engine.runtime --socket PATH < options.json", file=sys.stderr)
        return 2
    try:
        options = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineOptions)
    except msgspec.DecodeError as error:
        print(f"The engine's options cannot be read: {error}", file=sys.stderr)
        return 2
    if options.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, options.cpus)
    return run(Path(argv[1]), build_from(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
