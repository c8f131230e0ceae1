"""The words of telemetry: lanes, refusal reasons, gate reasons and finish reasons, spelled in one place."""

from __future__ import annotations

from enum import StrEnum


class Lane(StrEnum):
    PREFILL = "prefill"
    MIXED = "mixed"
    NGRAM = "ngram"
    SELF_SPEC = "self_spec"
    MTP = "mtp"
    DFLASH = "dflash"
    PIPELINED = "pipelined"
    PLAIN = "plain"
    SWAP = "swap"
    PREEMPT = "preempt"


class Refusal(StrEnum):
    """Why a lane was not taken."""

    NO_DRAFTER = "no_drafter"
    GRAMMAR = "grammar"
    WIDTH = "width"
    SLOT = "slot"
    THINKING = "thinking"
    RESUME_GUARD = "resume_guard"
    DISABLED_BY_REQUEST = "disabled_by_request"
    GATE = "gate"
    MIXED_STEP = "mixed_step"
    LEVER_OFF = "lever_off"
    NO_MATCH = "no_match"
    SUSPENDED = "suspended"
    NOT_CHOSEN = "not_chosen"
    """Another drafter was preferred at this step."""
    CAPACITY = "capacity"
    HOST_SAMPLING = "host_sampling"
    """Pipelined only: the next row's plan needs the token before it on the host."""
    SPECULATION = "speculation"
    """Pipelined only: speculation is configured for the batch."""


DELIVERED = "delivered"
"""Among the arms of a gate decision: no arm, but what all steps of late brought; nobody knows its deviation."""


class GateReason(StrEnum):
    HOLD = "hold"
    PROBE = "probe"
    REFRESH = "refresh"
    SWITCH = "switch"
    ENTRY_PIN = "entry_pin"
    DFLASH_PIN = "dflash_pin"
    FORCE = "force"
    SETTLE = "settle"
    COLD = "cold"


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    LOOP = "loop"
    STALLED = "stalled"
    ERROR = "error"
    REFUSED = "refused"
    SHUTDOWN = "shutdown"


SUCCEEDED = (Finish.STOP, Finish.LENGTH, Finish.CANCELLED)
"""Every other end of a request is an error in spans and metrics."""
