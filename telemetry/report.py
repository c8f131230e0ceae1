"""What happened in a run, as data: the terminal and the page show the same `Report`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from telemetry.database import Connection
from telemetry.effects import Change, lever_changes
from telemetry.migrations import scalar

BINS = 240
SLOWEST = 12
_TIMELINE = 400

Row = tuple[Any, ...]


class NoSuchRunError(ValueError):
    """The run does not exist; the sentence names those that do."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the report."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; None where nothing was measured."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: str
    seconds: tuple[float, ...]
    """Seconds since the start of the run."""
    series: tuple[Series, ...]
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A lever change on the time axis."""

    second: float
    label: str


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch in which the gate did the same."""

    start: float
    end: float
    arm: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    run: int
    run_id: str
    facts: tuple[tuple[str, str], ...]
    charts: tuple[Chart, ...]
    marks: tuple[Mark, ...]
    bands: tuple[Band, ...]
    changes: tuple[Change, ...]
    sections: tuple[Section, ...]

    def section(self, title: str) -> Section | None:
        return next((section for section in self.sections if section.title == title), None)


def find_run(cursor: Connection, name: str | None = None) -> int:
    """A run by number, id or unique beginning of its id; the newest for None. Raises `NoSuchRunError`."""
    known = cursor.execute("SELECT run, run_id FROM runs ORDER BY run DESC").fetchall()
    if not known:
        raise NoSuchRunError("This database holds no run yet: start the engine once, or name a file with --db.")
    if not name:
        return int(known[0][0])
    found = [run for run, run_id in known if name in (str(run), run_id)] or [
        run for run, run_id in known if run_id.startswith(name)
    ]
    if len(found) == 1 or (found and name == str(found[0])):
        return int(found[0])
    names = ", ".join(f"{run} ({run_id})" for run, run_id in known[:8])
    raise NoSuchRunError(f"{'Several runs match' if found else 'No run matches'} {name!r}; there are: {names}.")


def report(cursor: Connection, run: int) -> Report:
    """Read everything that the report shows; the cursor stays open."""
    start, end, run_id = _span(cursor, run)
    changes = lever_changes(cursor, run)
    return Report(
        run,
        run_id,
        _facts(cursor, run, (end - start).total_seconds()),
        (*_throughput(cursor, run, start, end), _latency(cursor, run, start, end), _arms(cursor, run, start, end)),
        tuple(Mark((change.time - start).total_seconds(), f"{change.name} {change.old} → {change.new}")
              for change in changes if not change.error),
        _bands(cursor, run, start, end),
        changes,
        tuple(_section(cursor, run, *entry) for entry in _SECTIONS),
    )  # fmt: skip


def _span(cursor: Connection, run: int) -> tuple[datetime, datetime, str]:
    """First and last moment with a step or request; the engine's start where nothing ran."""
    start, end, run_id = cursor.execute(
        "SELECT coalesce((SELECT min(second) FROM step_rollup WHERE run = $run), started),"
        " coalesce((SELECT max(second) + INTERVAL 1 SECOND FROM step_rollup WHERE run = $run),"
        " ended, last_record, started), run_id FROM runs WHERE run = $run",
        {"run": run},
    ).fetchall()[0]
    return start, max(start, end), run_id


def _facts(cursor: Connection, run: int, seconds: float) -> tuple[tuple[str, str], ...]:
    row = cursor.execute(
        "SELECT run_id, state, coalesce(end_reason, ''), started, model, device, dtype, missing, gap_ms FROM runs"
        " WHERE run = ?",
        [run],
    ).fetchall()[0]
    tokens, steps = cursor.execute(
        "SELECT coalesce(sum(emitted), 0), coalesce(sum(steps), 0) FROM step_rollup WHERE run = ?", [run]
    ).fetchall()[0]
    requests = scalar(cursor, "SELECT count(*) FROM requests WHERE run = ?", [run])
    speedup = scalar(cursor, _SPEEDUP, [run])
    missing = f", {row[7]} records missing over {row[8]:.0f} ms" if row[7] else ""
    return (
        ("run", f"{row[0]} ({row[1]}{': ' + row[2] if row[2] else ''}{missing})"),
        ("model", f"{row[4]} on {row[5]}, {row[6]}"),
        ("started", f"{row[3]:%Y-%m-%d %H:%M:%S} UTC"),
        ("with steps for", f"{seconds:.0f} s"),
        ("requests", str(requests)),
        ("tokens emitted", str(tokens)),
        ("lane steps", str(steps)),
        ("against plain decoding", "not measured" if speedup is None else f"{speedup:.2f} times, at equal batch width"),
    )


# the time that plain decoding would have taken for the same tokens, over the time taken, where plain was measured
_SPEEDUP = """
SELECT sum(b.emitted * p.us) / nullif(sum(b.busy), 0) FROM (
  SELECT width_bucket, sum(emitted) AS emitted, sum(busy_us) AS busy
  FROM step_rollup WHERE run = $1 AND emitted > 0 AND prefill_tokens = 0 GROUP BY 1) b
JOIN (
  SELECT width_bucket, sum(busy_us) / sum(emitted) AS us FROM step_rollup
  WHERE run = $1 AND lane IN ('plain', 'pipelined') AND prefill_tokens = 0 AND emitted > 0
  GROUP BY 1 HAVING sum(steps) >= 8) p USING (width_bucket)
"""


def _bin_s(start: datetime, end: datetime) -> int:
    return max(1, -(-int((end - start).total_seconds()) // BINS))


def _throughput(cursor: Connection, run: int, start: datetime, end: datetime) -> tuple[Chart, ...]:
    width = _bin_s(start, end)
    rows = cursor.execute(
        "SELECT (epoch(second) - epoch(?))::BIGINT // ? AS bin, lane::VARCHAR, sum(emitted)::DOUBLE,"
        " sum(drafted)::DOUBLE, sum(accepted)::DOUBLE FROM step_rollup WHERE run = ? GROUP BY 1, 2",
        [start, width, run],
    ).fetchall()
    bins = range(int((end - start).total_seconds()) // width + 1)
    by_lane: dict[str, dict[int, Row]] = {}
    for at, lane, *sums in rows:
        by_lane.setdefault(lane, {})[at] = tuple(sums)
    seconds = tuple(float(at * width) for at in bins)
    tokens = {lane: cells for lane, cells in by_lane.items() if any(cell[0] for cell in cells.values())}
    speed = tuple(
        Series(lane, tuple(cells[at][0] / width if at in cells else 0.0 for at in bins))
        for lane, cells in tokens.items()
    )
    drafting = {lane: cells for lane, cells in by_lane.items() if any(cell[1] for cell in cells.values())}
    acceptance = tuple(Series(lane, tuple(_share(cells.get(at)) for at in bins)) for lane, cells in drafting.items())
    return (
        Chart("Tokens per second, by lane", "tokens/s", seconds, speed, is_stacked=True),
        Chart("Acceptance", "%", seconds, acceptance),
    )


def _share(cell: Row | None) -> float | None:
    return cell[2] / cell[1] * 100 if cell and cell[1] else None


def _latency(cursor: Connection, run: int, start: datetime, end: datetime) -> Chart:
    width = _bin_s(start, end)
    rows = cursor.execute(
        "SELECT (epoch(finished) - epoch(?))::BIGINT // ? AS bin, quantile_cont(ttft_ms, 0.5),"
        " quantile_cont(ttft_ms, 0.95), quantile_cont(tpot_ms, 0.5), quantile_cont(tpot_ms, 0.95)"
        " FROM requests WHERE run = ? GROUP BY 1 ORDER BY 1",
        [start, width, run],
    ).fetchall()
    names = ("TTFT p50", "TTFT p95", "time per token p50", "time per token p95")
    series = tuple(Series(name, tuple(row[at + 1] for row in rows)) for at, name in enumerate(names))
    return Chart("Latency of requests that ended", "ms", tuple(float(row[0] * width) for row in rows), series)


def _arms(cursor: Connection, run: int, start: datetime, end: datetime) -> Chart:
    """What the gate measured of each arm, by bin."""
    width = _bin_s(start, end)
    rows = cursor.execute(
        "SELECT (epoch(time) - epoch(?))::BIGINT // ? AS bin, arm.name, avg(arm.tokens_per_s)"
        " FROM (SELECT time, unnest(arms) AS arm FROM gate_decisions WHERE run = ? AND is_change)"
        " GROUP BY 1, 2 ORDER BY 1",
        [start, width, run],
    ).fetchall()
    bins = sorted({row[0] for row in rows})
    cells = {(at, name): speed for at, name, speed in rows}
    series = tuple(
        Series(name, tuple(cells.get((at, name)) for at in bins)) for name in sorted({row[1] for row in rows})
    )
    return Chart("What the gate measured of its arms", "tokens/s", tuple(float(at * width) for at in bins), series)


def _bands(cursor: Connection, run: int, start: datetime, end: datetime) -> tuple[Band, ...]:
    """Every stretch of the gate; where there are too many to draw, what it did most in each bin."""
    seconds = (end - start).total_seconds()
    rows = cursor.execute(
        "SELECT epoch(time) - epoch(?), arm, reason::VARCHAR FROM gate_decisions WHERE run = ? AND is_change"
        f" ORDER BY step_id LIMIT {_TIMELINE + 1}",
        [start, run],
    ).fetchall()
    if len(rows) > _TIMELINE:
        width = _bin_s(start, end)
        rows = cursor.execute(
            "SELECT bin * ?, arg_max(arm, decisions), arg_max(reason, decisions)::VARCHAR FROM ("
            " SELECT (epoch(second) - epoch(?))::BIGINT // ? AS bin, arm, reason, sum(decisions) AS decisions"
            " FROM gate_rollup WHERE run = ? GROUP BY ALL) GROUP BY bin ORDER BY bin",
            [width, start, width, run],
        ).fetchall()
    ends = [*(row[0] for row in rows[1:]), seconds][: len(rows)]
    return tuple(Band(at, until, arm, reason) for (at, arm, reason), until in zip(rows, ends, strict=True))


_SECTIONS = (
    ("Lanes", "What ran, for how long, and what came of it.",
     "SELECT * EXCLUDE (run) FROM lanes WHERE run = ?"),
    ("Acceptance by position", "How often the draft at each position was accepted.",
     "SELECT * EXCLUDE (run) FROM acceptance_by_position WHERE run = ?"),
    ("Gate decisions", "Which arm the gate ran, and why.",
     "SELECT * EXCLUDE (run) FROM gate_reasons WHERE run = ?"),
    ("Why not speculating", "Lanes that were refused, with the reason.",
     "SELECT * EXCLUDE (run) FROM why_not_speculating WHERE run = ? LIMIT 20"),
    ("Latency", "Milliseconds of requests, by phase.",
     "SELECT * EXCLUDE (run) FROM latency_percentiles WHERE run = ?"),
    ("Slowest requests", "Where their time went.",
     "SELECT request_id, total_ms, queue_ms, prefill_ms, decode_ms, mostly, prompt_tokens, output_tokens, preemptions,"
     f" reason FROM slowest_requests WHERE run = ? LIMIT {SLOWEST}"),
    ("How requests ended", "By finish reason.",
     "SELECT * EXCLUDE (run) FROM finish_reasons WHERE run = ?"),
    ("Time of a step", "Microseconds per step, by lane and part.",
     "SELECT * EXCLUDE (run) FROM host_time_by_part WHERE run = ?"),
    ("Losses", "Telemetry that was dropped; an empty table means none.",
     "SELECT * EXCLUDE (run) FROM losses_by_kind WHERE run = ?"),
    ("Overhead of telemetry", "Share of tick time spent on recording, and what the writer needed.",
     "SELECT * EXCLUDE (run, run_id) FROM overhead WHERE run = ?"),
)  # fmt: skip


def _section(cursor: Connection, run: int, title: str, note: str, sql: str) -> Section:
    rows = cursor.execute(sql, [run]).fetchall()
    columns = tuple(str(column[0]) for column in cursor.description or ())
    return Section(title, note, columns, tuple(rows))
