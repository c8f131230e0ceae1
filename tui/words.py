"""How values are said on the screen: numbers with units, lanes and refusals in words, model text made harmless."""

from __future__ import annotations

from telemetry.names import Finish, GateReason, Lane, Refusal

DASH = "–"

LANE_WORDS: dict[str, str] = {
    Lane.PREFILL: "prefill",
    Lane.MIXED: "mixed",
    Lane.NGRAM: "n-gram",
    Lane.SELF_SPEC: "self-spec",
    Lane.MTP: "MTP",
    Lane.DFLASH: "DFlash",
    Lane.PIPELINED: "pipelined",
    Lane.PLAIN: "plain",
    Lane.SWAP: "swap",
    Lane.PREEMPT: "preempt",
}

LANE_MARKS: dict[str, str] = {
    Lane.PREFILL: "P",
    Lane.MIXED: "x",
    Lane.NGRAM: "n",
    Lane.SELF_SPEC: "s",
    Lane.MTP: "m",
    Lane.DFLASH: "d",
    Lane.PIPELINED: "|",
    Lane.PLAIN: ".",
}
"""One letter for each lane, for screens without colour."""

REFUSAL_WORDS: dict[str, str] = {
    Refusal.NO_DRAFTER: "no drafter of this kind is loaded",
    Refusal.GRAMMAR: "a grammar constrains the answer",
    Refusal.WIDTH: "the batch is too wide",
    Refusal.SLOT: "no draft slot is free",
    Refusal.THINKING: "the model is thinking",
    Refusal.RESUME_GUARD: "thinking has only just closed",
    Refusal.DISABLED_BY_REQUEST: "the request asked for no speculation",
    Refusal.GATE: "the gate measured plain decoding to be faster",
    Refusal.MIXED_STEP: "the step also carries prompt tokens",
    Refusal.LEVER_OFF: "a lever turned it off",
    Refusal.NO_MATCH: "no earlier text matches",
    Refusal.SUSPENDED: "too few drafts were accepted lately",
    Refusal.NOT_CHOSEN: "another drafter was preferred",
    Refusal.CAPACITY: "not enough KV memory is free",
    Refusal.HOST_SAMPLING: "sampling needs the last token on the host",
    Refusal.SPECULATION: "speculation is configured for the batch",
}

GATE_WORDS: dict[str, str] = {
    GateReason.HOLD: "the present arm stays ahead",
    GateReason.PROBE: "measuring the other arm",
    GateReason.REFRESH: "measuring plain decoding again",
    GateReason.SWITCH: "the other arm won",
    GateReason.ENTRY_PIN: "the first answer tokens always verify",
    GateReason.DFLASH_PIN: "DFlash is pinned at this width",
    GateReason.FORCE: "the operator forced it",
    GateReason.SETTLE: "settling after a switch",
    GateReason.COLD: "nothing has been measured yet",
}

FINISH_WORDS: dict[str, str] = {
    Finish.STOP: "finished",
    Finish.LENGTH: "reached the token limit",
    Finish.CANCELLED: "stopped",
    Finish.DEADLINE: "ran out of time",
    Finish.LOOP: "ended: it repeated itself",
    Finish.STALLED: "ended: no progress",
    Finish.ERROR: "failed",
    Finish.REFUSED: "refused",
    Finish.SHUTDOWN: "ended: the engine shut down",
}

_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_HARMLESS: dict[int, str] = (
    {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
    | {ord(mark): "\ufffd" for mark in _BIDI}
    | {0x0D: ""}
)


def harmless(text: str) -> str:
    """`text` with every character that could steer a terminal replaced by a visible stand-in.

    Works character by character, so a sequence split over two deltas is harmless too."""
    return text if text.isascii() and text.isprintable() else text.translate(_HARMLESS)


def lane(name: str) -> str:
    return LANE_WORDS.get(name, name)


def refusal(reason: str) -> str:
    return REFUSAL_WORDS.get(reason, reason.replace("_", " "))


def gate_reason(reason: str) -> str:
    return GATE_WORDS.get(reason, reason.replace("_", " "))


def finish(reason: str) -> str:
    return FINISH_WORDS.get(reason, reason)


def number(value: float | None, digits: int = 1) -> str:
    """Three or more significant figures, thousands separated; a dash for None."""
    if value is None:
        return DASH
    if abs(value) >= 10_000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if abs(value) >= 1000 or digits == 0 else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    return DASH if value is None else f"{value:,}".replace(",", " ")


def milliseconds(value: float | None) -> str:
    if value is None:
        return DASH
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def seconds(value: float | None) -> str:
    """A duration or an age, in the largest unit that keeps it short."""
    if value is None:
        return DASH
    if value < 10:
        return f"{max(value, 0.0):.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def percent(part: float | None, whole: float = 1.0) -> str:
    if part is None or not whole:
        return DASH
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "<0.1 %"
    return f"{share:.1f} %" if 0 < share < 10 else f"{share:.0f} %"


def size(amount: int, unit: str) -> str:
    """An amount of loading progress; bytes in MB, other units as they are."""
    return f"{amount / 1e6:.0f} MB" if unit == "bytes" else f"{count(amount)} {unit}"


def speedup(value: float | None) -> str:
    return "speed-up unmeasured" if value is None else f"{value:.2f}x plain"
