"""Runs the tests of the page's pure modules in node, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
OLDEST = 20
"""`Array.prototype.with` and `toReversed` came with it; every browser of today has them."""


def _major() -> int:
    if NODE is None:
        return 0
    answer = subprocess.run([NODE, "--version"], capture_output=True, text=True, timeout=20, check=True)
    return int(answer.stdout.strip().lstrip("v").split(".")[0])


@pytest.mark.skipif(_major() < OLDEST, reason=f"node {OLDEST} or newer is not installed")
def test_reducer_history_formats_and_connection_pass_their_tests_in_node() -> None:
    assert NODE is not None
    file = Path(__file__).with_name("state.test.mjs")
    done = subprocess.run([NODE, "--test", str(file)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "# tests 0" not in done.stdout
