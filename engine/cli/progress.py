"""A progress bar on standard error, for people; silent when nobody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback for (done, total, stage); the bar appears with the first real progress and goes at the end."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    shown = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    tasks: dict[str, Any] = {}

    def report(done: int, total: int, stage: str) -> None:
        if not tasks:
            shown.start()
        if stage not in tasks:
            tasks[stage] = shown.add_task(f"{title}: {stage}", total=total or None)
        shown.update(tasks[stage], completed=done, total=total or None)

    try:
        yield report
    finally:
        if tasks:
            shown.stop()


class _Lines:
    """One line per stage, for logs."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._stage = ""

    def __call__(self, done: int, total: int, stage: str) -> None:
        if stage != self._stage and total:
            self._stage = stage
            print(f"{self._title}: {stage} ({total / 1e6:.0f} MB)", file=sys.stderr)
