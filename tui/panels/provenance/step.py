"""The step that made a token, asked of the telemetry: how long it took, what it drafted, and why no other lane ran."""

from __future__ import annotations

from engine.protocol import wire
from tui import words
from tui.charts import Part
from tui.conversation import Reply
from tui.state import Phase, State
from tui.widgets import muted

COLUMNS = ("lane", "width", "k", "k_reason", "refusals", "drafted", "accepted", "dur_us", "mode", "arm", "reason")
DEPTH_WORDS = {
    "num_drafts": "the lever num_drafts",
    "ladder": "the ladder for this width",
    "adaptive": "what was accepted lately",
    "capacity": "the memory that is free",
    "confidence": "the drafter's confidence",
    "match": "the length of the match",
    "grammar": "the grammar",
    "gate": "the gate",
}


def query_id(reply: Reply, step: int) -> str:
    return f"step {reply.run} {step}"


def query(reply: Reply, step: int) -> wire.Query:
    """Asks for the step and the gate's decision on it."""
    chosen = ", ".join(("g." if name in ("mode", "arm", "reason") else "s.") + name for name in COLUMNS)
    sql = (
        f"SELECT {chosen} FROM lane_steps s LEFT JOIN gate_decisions g ON g.run = s.run AND g.step_id = s.step_id "
        f"WHERE s.step_id = {int(step)} AND s.run = (SELECT max(run) FROM runs WHERE run_id = '{_plain(reply.run)}')"
    )
    return wire.Query(query_id=query_id(reply, step), sql=sql, max_rows=1)


def _plain(run: str) -> str:
    return "".join(char for char in run if char.isalnum() or char in "-_")


def known(state: State, reply: Reply, step: int) -> dict[str, object] | None:
    """What the telemetry answered about the step; None while it has not."""
    run = state.queries.get(query_id(reply, step))
    if run is None or run.result is None or not run.result.rows:
        return None
    return dict(zip(run.result.columns, run.result.rows[0], strict=False))


def wanted(state: State, reply: Reply, step: int) -> bool:
    """Whether to ask: the reply is of this run, and nothing was asked or the records had not arrived yet."""
    here = state.facts is not None and reply.run == state.facts.run_id and state.link.phase is Phase.OPEN
    if not reply.run or not here:
        return False
    run = state.queries.get(query_id(reply, step))
    return run is None or (run.result is not None and not run.result.rows and not run.result.error)


def step_line(row: dict[str, object] | None, step: int) -> list[Part]:
    head: list[Part] = [muted("step       "), (words.count(step), "bold")]
    if row is None:
        return head
    drafted = _int(row, "drafted")
    parts = [*head, muted(f", {words.milliseconds(_int(row, 'dur_us') / 1000)}, batch {_int(row, 'width')}")]
    if drafted:
        parts += [(f", {_int(row, 'accepted')} of {drafted} drafts accepted", "")]
    why = DEPTH_WORDS.get(str(row.get("k_reason") or ""))
    return [*parts, muted(f"; at most {_int(row, 'k')} by {why}")] if why and drafted else parts


def passed_over(row: dict[str, object] | None) -> list[Part]:
    """Lanes that did not run at this step, those with the same reason together."""
    lanes: dict[str, list[str]] = {}
    for item in str(row.get("refusals") or "").split() if row else ():
        lane, _, reason = item.partition(":")
        lanes.setdefault(reason, []).append(words.lane(lane))
    parts: list[Part] = [muted("not taken  ")]
    for reason, names in lanes.items():
        parts += [(", ".join(names), ""), muted(f" {words.refusal(reason)}  ")]
    return parts if lanes else [*parts, muted("nothing else was at hand" if row else "not known yet")]


def gate_line(row: dict[str, object] | None, reply: Reply, index: int) -> list[Part]:
    """The gate's decision on this very step; before it is recorded, the last one that was told."""
    head = muted("gate       ")
    if row is not None and row.get("arm"):
        return [head, (str(row["arm"]), "bold"), muted(": "), (words.gate_reason(str(row["reason"])), "")]
    gate = reply.decision_at(index)
    if gate is None:
        return [head, muted("was not asked for this step" if row is not None else "not known yet")]
    return [head, (gate.arm, "bold"), muted(": "), (words.gate_reason(gate.reason), ""), muted("  (about this time)")]


def _int(row: dict[str, object], name: str) -> int:
    value = row.get(name)
    return int(value) if isinstance(value, int | float) else 0
