"""The words of the page: what each lane, reason and figure means in a sentence, served to the browser as JSON."""

from __future__ import annotations

from typing import Final

from telemetry.names import Finish, GateReason, Lane, Refusal

LANES: Final[dict[Lane, tuple[str, str]]] = {
    Lane.PREFILL: ("PF", "Reads prompt tokens; emits the first token of a reply."),
    Lane.MIXED: ("MX", "A prompt chunk and the running replies in one pass."),
    Lane.NGRAM: ("NG", "Drafts copied from the text so far, verified by the model."),
    Lane.SELF_SPEC: ("SS", "Drafts by the model's own early layers, verified by all of them."),
    Lane.MTP: ("MT", "Drafts by a multi-token head, verified by the model."),
    Lane.DFLASH: ("DF", "A block of drafts in one pass of a small head, verified by the model."),
    Lane.PIPELINED: ("PI", "Plain decoding, run one step ahead of the host."),
    Lane.PLAIN: ("PL", "One token per pass and sequence, no drafts."),
    Lane.SWAP: ("SW", "Moves the KV of a sequence out or back in."),
    Lane.PREEMPT: ("PR", "Frees the KV of a sequence, which is read again later."),
}
"""Code of two letters (the cue beside the colour) and meaning."""

REFUSALS: Final[dict[Refusal, str]] = {
    Refusal.NO_DRAFTER: "no drafter is loaded for it",
    Refusal.GRAMMAR: "a grammar decides the next token",
    Refusal.WIDTH: "the batch is too wide to speculate",
    Refusal.SLOT: "no slot for drafts is free",
    Refusal.THINKING: "the reply is thinking",
    Refusal.RESUME_GUARD: "thinking has only just closed",
    Refusal.DISABLED_BY_REQUEST: "a request asked for no speculation",
    Refusal.GATE: "the gate measured plain decoding as faster",
    Refusal.MIXED_STEP: "a prompt chunk shares the step",
    Refusal.LEVER_OFF: "its lever is off",
    Refusal.NO_MATCH: "nothing in the text matches",
    Refusal.SUSPENDED: "it accepted too little and is suspended",
    Refusal.NOT_CHOSEN: "another drafter was preferred",
    Refusal.CAPACITY: "the KV pool has no room for drafts",
    Refusal.HOST_SAMPLING: "the next step needs this token on the host first",
    Refusal.SPECULATION: "speculation is configured for the batch",
}
"""Why a lane was not taken: completes "Not taken, because ..."."""

GATE: Final[dict[GateReason, str]] = {
    GateReason.HOLD: "Keeping the arm that measured faster.",
    GateReason.PROBE: "Trying speculation again, to see whether it pays by now.",
    GateReason.REFRESH: "Measuring plain decoding again, so that the comparison stays fresh.",
    GateReason.SWITCH: "The other arm won often enough in a row: switched.",
    GateReason.ENTRY_PIN: "The first tokens of a reply always speculate.",
    GateReason.DFLASH_PIN: "Pinned to speculation for DFlash at one or two sequences.",
    GateReason.FORCE: "Set by the lever mtp_gate; nothing is measured.",
    GateReason.SETTLE: "The batch changed: waiting until the measurement settles.",
    GateReason.COLD: "Nothing measured yet at this batch width.",
}

FINISHES: Final[dict[Finish, str]] = {
    Finish.STOP: "finished",
    Finish.LENGTH: "reached its token limit",
    Finish.CANCELLED: "stopped",
    Finish.DEADLINE: "ran out of time",
    Finish.LOOP: "ended because it repeated itself",
    Finish.STALLED: "stalled",
    Finish.ERROR: "failed",
    Finish.REFUSED: "refused",
    Finish.SHUTDOWN: "ended by a shutdown",
}

FIGURES: Final[dict[str, tuple[str, str, str]]] = {
    "throughput": ("Throughput", "tok/s", "Tokens delivered to all replies, mean of the last 2 s."),
    "prefill": ("Prefill", "tok/s", "Prompt tokens read, mean of the last 2 s."),
    "ttft": ("TTFT", "ms", "Time to first token of replies begun in the last 60 s, queueing included."),
    "tpot": ("TPOT", "ms", "Time per output token after the first, last 60 s."),
    "batch": ("Batch", "seq", "Sequences decoding now, and those that wait, read their prompt or are parked."),
    "kv": ("KV", "%", "Share of the KV pool in use, and the tokens that it holds."),
    "lane": ("Lane", "", "Lane of the last decode step."),
    "speedup": (
        "Speed-up",
        "x",
        "Delivered over measured plain decoding; below 1.0 speculation does not pay.",
    ),
    "acceptance": ("Acceptance", "%", "Drafted tokens that the model accepted."),
}
"""Title, unit and definition of each figure on the page."""


def words() -> dict[str, object]:
    """Everything above, as the browser gets it."""
    return {
        "lanes": {lane.value: {"code": code, "means": means} for lane, (code, means) in LANES.items()},
        "refusals": {reason.value: text for reason, text in REFUSALS.items()},
        "gate": {reason.value: text for reason, text in GATE.items()},
        "finishes": {reason.value: text for reason, text in FINISHES.items()},
        "figures": {
            name: {"title": title, "unit": unit, "means": means} for name, (title, unit, means) in FIGURES.items()
        },
    }
