"""What an arbiter or a gate says of its last choice, as the record that it becomes."""

from __future__ import annotations

from itertools import count

from msgspec.structs import replace

from engine.drafters.arbiter import Arbiter
from engine.drafters.evidence import SHOWN_NS
from engine.drafters.gate import Gate
from telemetry.record import AnyRecord, GateRecord
from telemetry.ring import composed

_late = count(SHOWN_NS, SHOWN_NS)


def explained(decider: Arbiter | Gate) -> GateRecord:
    """The record of a step so late that its evidence is laid out anew."""
    record: AnyRecord = composed(decider.explain(0, next(_late)))
    assert isinstance(record, GateRecord)
    return replace(record, time_ns=0)
