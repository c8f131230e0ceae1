"""Golden traces: the exact device calls of every scenario and the bytes that each client got.

`python -m tests.traces.test_golden` writes them anew; read the diff before you commit it.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.traces.scenarios import SCENARIOS, render

MOST_LINES = 40
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", SCENARIOS)
def test_trace_is_the_golden_one(name: str) -> None:
    bench = SCENARIOS[name]()
    golden, now = (GOLDEN / f"{name}.txt").read_text().splitlines(), render(bench).splitlines()
    difference = list(difflib.unified_diff(golden, now, "golden", "now", lineterm="", n=1))
    assert not difference, "\n".join(difference[:MOST_LINES])
    bench.check_pool()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(SCENARIOS)


if __name__ == "__main__":
    for scenario, play in SCENARIOS.items():
        (GOLDEN / f"{scenario}.txt").write_text(render(play()))
