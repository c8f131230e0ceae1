"""Writes a database as the first schema had it, with its own frozen statements: such a file opens for ever."""

from __future__ import annotations

from pathlib import Path

import duckdb

from telemetry.migrations import MIGRATIONS

ROWS = """
INSERT INTO runs (run, run_id, state, started, model, device, dtype, levers, versions, kv_tokens, block_size, clock_ns,
  unix_ns, trace_id, span_base) VALUES (1, 'old', 'running', TIMESTAMP '2026-01-01 00:00:00', 'm', 'cpu', 'bf16', '{}',
  '{}', 100, 16, 0, 1767225600000000000, 'aa', 'bb');
INSERT INTO request_keys (request_no, run, request_id) VALUES (1, 1, 'r1'), (2, 1, 'r2');
INSERT INTO batches (batch_no, run, requests) VALUES (1, 1, [1, 2]);
INSERT INTO lane_steps (run, step_id, tick, lane, start, dur_us, width, rows, prefill_tokens, drafted, accepted, bonus,
  emitted, drafted_at, accepted_at, k, k_reason, refusals, kv_used, kv_total, depth, draft_us, device_us, commit_us,
  cached_tokens, batch_no, shares) VALUES (1, 0, 0, 'mtp', TIMESTAMP '2026-01-01 00:00:01', 900, 2, 8, 0, 6, 3, 2, 5,
  [2, 2, 2], [2, 1, 0], 3, 'num_drafts', 'ngram:no_match', 1, 10, 50, 90, 700, 50, 0, 1,
  [{'drafted': 3, 'accepted': 2, 'emitted': 3, 'prefill_tokens': 0},
   {'drafted': 3, 'accepted': 1, 'emitted': 2, 'prefill_tokens': 0}]);
INSERT INTO step_rollup (run, second, lane, width_bucket, steps, width_sum, rows, prefill_tokens, cached_tokens,
  drafted, accepted, bonus, emitted, busy_us, draft_us, device_us, commit_us, kv_used_max, kv_total, depth_max) VALUES
  (1, TIMESTAMP '2026-01-01 00:00:01', 'mtp', 2, 1, 2, 8, 0, 0, 6, 3, 2, 5, 900, 90, 700, 50, 1, 10, 50);
INSERT INTO flushes (run, session, seq, time, records, queued, encode_us, write_us) VALUES
  (1, 1, 1, TIMESTAMP '2026-01-01 00:00:02', 2, 0, 10, 10)
"""


def write(path: Path) -> None:
    """A run that was cut off, with one step for two requests."""
    connection = duckdb.connect(str(path))
    MIGRATIONS[0](connection)
    connection.execute("INSERT INTO schema_version VALUES (1, TIMESTAMP '2026-01-01 00:00:00')")
    for statement in ROWS.split(";\n"):
        connection.execute(statement)
    connection.close()
