"""Bounds of what a client may ask for, the same for wire and API; each refusal names the field and its range."""

from __future__ import annotations

import math

from engine.protocol.commands import Limits, Sampling

MAX_N = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIAS = 1024
MAX_LOGPROBS = 20
MAX_PROMPT_CHARS = 4_000_000
MAX_MESSAGES = 4096


class OutOfBoundsError(ValueError):
    """One sentence, and the field it is about."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (0, 1_000_000),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logprobs": (-1, MAX_LOGPROBS),
}


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises `OutOfBoundsError`."""
    for field, (low, high) in _RANGES.items():
        value = getattr(sampling, field)
        if not (math.isfinite(value) and low <= value <= high):
            raise OutOfBoundsError(f"{field} cannot be {value:g}: it takes {low:g} to {high:g}.", field)
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
        raise OutOfBoundsError("seed must fit in 64 bits.", "seed")
    if len(sampling.logit_bias) > MAX_BIAS:
        raise OutOfBoundsError(f"logit_bias takes at most {MAX_BIAS} tokens.", "logit_bias")
    for token, bias in sampling.logit_bias.items():
        if not (0 <= token < vocab_size and math.isfinite(bias) and -100 <= bias <= 100):
            raise OutOfBoundsError(
                f"logit_bias takes token ids below {vocab_size} and values of -100 to 100, not {token}: {bias:g}.",
                "logit_bias",
            )


def check_limits(limits: Limits) -> None:
    """Raises `OutOfBoundsError`."""
    for field in ("max_tokens", "min_tokens", "deadline_ms"):
        value = getattr(limits, field)
        if not 0 <= value <= 2**31:
            raise OutOfBoundsError(f"{field} cannot be {value}: it takes 0 or more.", field)
    if len(limits.stop) > MAX_STOPS:
        raise OutOfBoundsError(f"stop takes at most {MAX_STOPS} strings.", "stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in limits.stop):
        raise OutOfBoundsError(f"Each stop string has 1 to {MAX_STOP_CHARS} characters.", "stop")
