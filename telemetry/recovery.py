"""What to do with a file whose owner was killed: take in its journal, end its runs, state what is missing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from telemetry import beat, journal
from telemetry.migrations import Connection, scalar
from telemetry.record import RunRecord
from telemetry.writer import Flush, RunContext, Writer

_LAST_RECORD = """
SELECT max(t) FROM (
  SELECT max(start + to_microseconds(dur_us)) t FROM lane_steps WHERE run = $run
  UNION ALL SELECT max(finished) FROM requests WHERE run = $run
  UNION ALL SELECT max(time) FROM health WHERE run = $run
  UNION ALL SELECT max(time) FROM lever_changes WHERE run = $run
  UNION ALL SELECT started FROM runs WHERE run = $run)
"""


def is_unsettled(connection: Connection, path: Path) -> bool:
    """The last owner of the file left without a word."""
    return beat.path_of(path).exists() or bool(scalar(connection, "SELECT count(*) FROM runs WHERE state = 'running'"))


def settle(connection: Connection, path: Path) -> None:
    """Bring in the journal, then mark runs without an end as interrupted and state what is missing."""
    pulse = beat.read(path)
    _take_journal(connection, path, pulse)
    running = [run for (run,) in connection.execute("SELECT run FROM runs WHERE state = 'running'").fetchall()]
    for run in running:
        connection.execute(
            f"UPDATE runs SET state = 'interrupted', last_record = ({_LAST_RECORD}),"
            " records = (SELECT coalesce(sum(records), 0) FROM flushes WHERE run = $run),"
            " heartbeat = (SELECT max(time) FROM flushes WHERE run = $run) WHERE run = $run",
            {"run": run},
        )
    if running and pulse is not None:
        _state_gap(connection, max(running), pulse)
    for left in (beat.path_of(path), *journal.paths_of(path)):
        with contextlib.suppress(OSError):
            left.unlink()


def _take_journal(connection: Connection, path: Path, pulse: beat.Pulse | None) -> None:
    last = scalar(connection, "SELECT coalesce(max(seq), 0) FROM flushes")
    frames = journal.read(path, last)
    if not frames:
        return
    writer = Writer(connection, pulse.session if pulse else 0)
    running = scalar(connection, "SELECT max(run) FROM runs WHERE state = 'running'")
    if running is not None:
        writer.adopt(context_of(connection, running))
    batches = [batch for batches, _ in frames.values() for batch in batches]
    rows = [row for _, rows in frames.values() for row in rows]
    written = pulse.journal_us if pulse else scalar(connection, "SELECT epoch_us(now())")
    writer.commit(Flush(batches, rows, seq=max(frames)), written)


def _state_gap(connection: Connection, run: int, pulse: beat.Pulse) -> None:
    committed = scalar(connection, "SELECT coalesce(sum(records), 0) FROM flushes WHERE session = ?", [pulse.session])
    connection.execute(
        "UPDATE runs SET missing = greatest(0, ? - ?), heartbeat = make_timestamp(?), gap_ms = ? WHERE run = ?",
        [pulse.accepted, committed, pulse.time_us, max(0, pulse.time_us - pulse.journal_us) / 1000, run],
    )


def context_of(connection: Connection, run: int) -> RunContext:
    """The context of a run that is in the file, to go on writing to it."""
    columns = "run_id, clock_ns, unix_ns, model, device, dtype, levers, versions, kv_tokens, block_size"
    row = connection.execute(f"SELECT {columns} FROM runs WHERE run = ?", [run]).fetchall()[0]
    run_id, clock_ns, unix_ns, model, device, dtype, levers, versions, kv_tokens, block_size = row
    record = RunRecord(
        run_id, clock_ns, unix_ns, model, device, dtype, json.loads(levers), json.loads(versions),
        kv_tokens=kv_tokens, block_size=block_size,
    )  # fmt: skip
    return RunContext(run, record, (unix_ns - clock_ns) // 1000)
