"""How many threads a step should run on: one per physical core that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores(topology: Path = _TOPOLOGY) -> int:
    """Cores of the affinity mask, hyper-threads of one core counted once; at least 1.

    Two threads of one core share its vector units and its caches, so the second one only adds waiting.
    """
    if not hasattr(os, "sched_getaffinity"):
        return usable_processors()
    return max(1, len({_siblings(topology, cpu) for cpu in os.sched_getaffinity(0)}))


def usable_processors() -> int:
    """Processors that this process may run on, hyper-threads counted each."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _siblings(topology: Path, cpu: int) -> str:
    try:
        return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
