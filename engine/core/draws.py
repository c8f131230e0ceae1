"""The random draw of a token as a pure function of request seed and position.

No generator state exists, so a verify row, a re-run after preemption and a pipelined step all draw what plain
decoding would have drawn, and the stream at any temperature does not depend on the lane (scheduler.md, 3.4).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the `position`-th token of a reply (SplitMix64, Steele et al. 2014)."""
    state = (_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK
    return (_mix(state) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
