"""What one streamed token costs the screen: `python -m tests.tui.bench_stream [TOKENS] [TOKENS_PER_S]`.

Prints processor time per token of this process (the screen's whole share: reducer, Markdown, layout, painting),
less what the same screen uses in the same time with nothing streaming.
"""

from __future__ import annotations

import asyncio
import sys
import time

from textual.widgets import Markdown

from tests.tui import scenes
from tests.tui.staged import staged
from tui.state import Said

LIMIT_MS = 2.0


def stream(length: int) -> list[list[scenes.Token]]:
    """`length` tokens of ordinary prose, lists and code, one per delta as at low load."""
    said = scenes.tokens((scenes.ANSWER + "\n\n") * (length // 100 + 1))[:length]
    return [[token] for token in said]


async def measure(length: int, tokens_per_s: float, size: tuple[int, int] = (120, 40)) -> tuple[float, float]:
    """Milliseconds of processor time per token, and the idle share that was taken off."""
    app = staged("empty")
    async with app.run_test(size=size) as pilot:
        await pilot.pause(0.5)
        idle_from = time.process_time()
        await asyncio.sleep(1.0)
        idle = time.process_time() - idle_from
        app.receive(Said("go", "r1"))
        await pilot.pause(0.3)
        parts = stream(length)
        started, wall = time.process_time(), time.monotonic()
        for number, part in enumerate(parts, start=1):
            app.receive(scenes.delta("r1", part))
            await asyncio.sleep(max(0.0, wall + number / tokens_per_s - time.monotonic()))
        app.receive(scenes.done("r1", [token for part in parts for token in part]))
        whole = "".join(token.text for part in parts for token in part)
        while app.query(Markdown).first().source != whole:
            await asyncio.sleep(0.02)
        await pilot.pause()
        used = time.process_time() - started - idle * (time.monotonic() - wall)
    return used / length * 1000, idle


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    rate = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    per_token, idle = asyncio.run(measure(length, rate))
    print(f"{per_token:.2f} ms of processor time per token ({length} tokens at {rate:g}/s; idle {idle:.1%} of a core)")


if __name__ == "__main__":
    main()
