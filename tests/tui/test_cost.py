"""What the screen costs: nothing heavy is imported, and a streamed token costs little more than Markdown itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Markdown

from tests.tui.bench_stream import measure, stream

TOKENS, TOKENS_PER_S = 200, 100.0
HEAVY = ("torch", "numpy", "duckdb", "starlette", "uvicorn", "opentelemetry", "pyarrow", "transformers", "websockets")


def test_importing_the_screen_loads_nothing_heavy() -> None:
    code = f"import sys, tui.app, tui.program, tui.panels.chat.panel; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_opening_every_pane_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom tui.panels import PANES, make_pane\n"
        f"[make_pane(name) for name in PANES]; print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Bare(App[None]):
    """Nothing but Markdown that follows a stream: the least that a streamed token can cost here."""

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            yield Markdown()
        self.scroll = scroll


async def bare_cost() -> float:
    """Milliseconds of processor time per token."""
    app = Bare()
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.5)
        app.scroll.anchor()
        flow = Markdown.get_stream(app.query_one(Markdown))
        started, wall = time.process_time(), time.monotonic()
        for number, part in enumerate(stream(TOKENS), start=1):
            await flow.write(part[0].text)
            await asyncio.sleep(max(0.0, wall + number / TOKENS_PER_S - time.monotonic()))
        await flow.stop()
        await pilot.pause()
        return (time.process_time() - started) / TOKENS * 1000


async def test_a_streamed_token_costs_little_more_than_markdown_alone() -> None:
    """Compared within one run because processor time itself stretches on a busy machine; see `bench_stream` for ms."""
    ratios: list[float] = []
    while len(ratios) < 4 and min(ratios, default=9.0) >= 1.6:
        (ours, _), bare = await measure(TOKENS, TOKENS_PER_S), await bare_cost()
        ratios.append(ours / bare)
    assert min(ratios) < 1.6, ratios


async def test_an_idle_screen_sleeps() -> None:
    shares: list[float] = []
    while len(shares) < 4 and min(shares, default=9.0) >= 0.15:
        _, idle = await measure(10, TOKENS_PER_S)
        shares.append(idle)
    assert min(shares) < 0.15, shares
