"""Ordered steps from any older schema to the current one; a step that was released is never edited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import duckdb

from telemetry.schema import SCHEMA_VERSION

Connection = duckdb.DuckDBPyConnection


class SchemaTooNewError(RuntimeError):
    """The file was written by a newer version of this program."""


def scalar(connection: Connection, sql: str, parameters: Sequence[Any] = ()) -> Any:
    """The one value of a query; None for no row. The result is read to its end, which frees the connection."""
    rows = connection.execute(sql, parameters).fetchall()
    return rows[0][0] if rows else None


def version_of(connection: Connection) -> int:
    """The schema version of an open file; 0 for an empty one."""
    found = scalar(
        connection,
        "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'main' AND table_name = 'schema_version'",
    )
    return int(scalar(connection, "SELECT max(version) FROM schema_version") or 0) if found else 0


def migrate(connection: Connection, target: int = SCHEMA_VERSION) -> list[int]:
    """Bring the file to `target` and return the versions applied. Raises `SchemaTooNewError`."""
    current = version_of(connection)
    if current > target:
        raise SchemaTooNewError(
            f"The database has schema {current}, this program knows up to {target}: use the newer Metrale to read it."
        )
    applied = []
    for version, step in enumerate(MIGRATIONS[current:target], start=current + 1):
        connection.execute("BEGIN")
        try:
            step(connection)
            connection.execute("INSERT INTO schema_version VALUES (?, now()::TIMESTAMP)", [version])
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        applied.append(version)
    return applied


def first_schema(connection: Connection) -> None:
    """Typed tables of runs, requests, steps, gate, levers, tokens and their rollups."""
    for statement in _FIRST.split(";"):
        if statement.strip():
            connection.execute(statement)


def contents(connection: Connection) -> None:
    """Prompts and replies, which are kept only when the operator asks for it."""
    connection.execute(
        "CREATE TABLE contents (run INTEGER, time TIMESTAMP, request_id VARCHAR, prompt VARCHAR, reply VARCHAR)"
    )


MIGRATIONS: list[Callable[[Connection], None]] = [first_schema, contents]

_FIRST = """
CREATE TABLE schema_version (version INTEGER, applied TIMESTAMP);

CREATE TYPE lane_name AS ENUM (
  'prefill', 'mixed', 'ngram', 'self_spec', 'mtp', 'dflash', 'pipelined', 'plain', 'swap', 'preempt', 'other');
CREATE TYPE k_reason_name AS ENUM (
  '', 'num_drafts', 'ladder', 'adaptive', 'capacity', 'confidence', 'match', 'grammar', 'gate', 'other');
CREATE TYPE gate_reason_name AS ENUM (
  'hold', 'probe', 'refresh', 'switch', 'entry_pin', 'dflash_pin', 'force', 'settle', 'cold', 'other');

CREATE TABLE runs (
  run INTEGER, run_id VARCHAR, state VARCHAR, end_reason VARCHAR,
  started TIMESTAMP, ended TIMESTAMP, last_record TIMESTAMP, heartbeat TIMESTAMP, gap_ms DOUBLE, missing BIGINT,
  records BIGINT, model VARCHAR, device VARCHAR, dtype VARCHAR, levers VARCHAR, versions VARCHAR,
  kv_tokens BIGINT, block_size INTEGER, clock_ns BIGINT, unix_ns BIGINT, trace_id VARCHAR, span_base VARCHAR);

CREATE TABLE request_keys (request_no UINTEGER, run INTEGER, request_id VARCHAR);
CREATE TABLE batches (
  batch_no UINTEGER, run INTEGER, requests UINTEGER[], links STRUCT(trace UUID, span UBIGINT)[]);

CREATE TABLE requests (
  run INTEGER, request_no UINTEGER, request_id VARCHAR, operation VARCHAR, conversation_id VARCHAR,
  trace_id VARCHAR, span_id VARCHAR, parent_span_id VARCHAR, sampled BOOLEAN,
  arrived TIMESTAMP, admitted TIMESTAMP, prefill_end TIMESTAMP, first_token TIMESTAMP, finished TIMESTAMP,
  reason VARCHAR, error VARCHAR,
  prompt_tokens UINTEGER, cached_tokens UINTEGER, output_tokens UINTEGER, drafted UINTEGER, accepted UINTEGER,
  prefill_chunks UINTEGER, preemptions UINTEGER,
  queue_ms DOUBLE, prefill_ms DOUBLE, decode_ms DOUBLE, total_ms DOUBLE, ttft_ms DOUBLE, tpot_ms DOUBLE,
  temperature FLOAT, top_p FLOAT, top_k INTEGER, max_tokens INTEGER, seed BIGINT, stream BOOLEAN);

CREATE TABLE request_lanes (run INTEGER, request_no UINTEGER, lane lane_name, steps UINTEGER, tokens UINTEGER);

CREATE TABLE lane_steps (
  run INTEGER, step_id BIGINT, tick BIGINT, lane lane_name, start TIMESTAMP, dur_us UINTEGER,
  width USMALLINT, rows UINTEGER, prefill_tokens UINTEGER,
  drafted USMALLINT, accepted USMALLINT, bonus USMALLINT, emitted USMALLINT,
  drafted_at USMALLINT[], accepted_at USMALLINT[],
  k UTINYINT, k_reason k_reason_name, refusals VARCHAR,
  kv_used UINTEGER, kv_total UINTEGER, depth UINTEGER,
  draft_us UINTEGER, device_us UINTEGER, commit_us UINTEGER, cached_tokens UINTEGER,
  batch_no UINTEGER,
  shares STRUCT(drafted UTINYINT, accepted UTINYINT, emitted UTINYINT, prefill_tokens UINTEGER)[]);

CREATE TABLE gate_decisions (
  run INTEGER, step_id BIGINT, time TIMESTAMP, mode VARCHAR, arm VARCHAR, reason gate_reason_name,
  arms STRUCT("name" VARCHAR, tokens_per_s FLOAT, deviation FLOAT, age INTEGER, stale BOOLEAN)[],
  margin FLOAT, losses UTINYINT, depth UINTEGER, width_bucket USMALLINT, tokens_until_probe INTEGER, pinned BOOLEAN,
  is_change BOOLEAN, plain_tokens_per_s FLOAT, spec_tokens_per_s FLOAT);

CREATE TABLE lever_changes (
  run INTEGER, change_id VARCHAR, time TIMESTAMP, tick BIGINT, name VARCHAR, old VARCHAR, new VARCHAR,
  origin VARCHAR, actor VARCHAR, reason VARCHAR, error VARCHAR);

CREATE TABLE tokens (
  run INTEGER, request_no UINTEGER, index UINTEGER, time TIMESTAMP, step_id BIGINT, token_id INTEGER,
  lane lane_name, draft UTINYINT, logprob FLOAT);

CREATE TABLE loads (run INTEGER, stage VARCHAR, start TIMESTAMP, dur_us UBIGINT, what VARCHAR, bytes BIGINT);
CREATE TABLE rungs (run INTEGER, time TIMESTAMP, tick BIGINT, width USMALLINT, max_width USMALLINT, speculates BOOLEAN);
CREATE TABLE shadow_checks (run INTEGER, step_id BIGINT, time TIMESTAMP, rows UINTEGER, differing UINTEGER);
CREATE TABLE health (
  run INTEGER, time TIMESTAMP, tick_us UBIGINT, recording_us UBIGINT, records UBIGINT, lost UBIGINT,
  resident_bytes UBIGINT);
CREATE TABLE metrics (run INTEGER, time TIMESTAMP, name VARCHAR, labels VARCHAR, value DOUBLE);
CREATE TABLE losses (run INTEGER, time TIMESTAMP, kind VARCHAR, lost UBIGINT);
CREATE TABLE flushes (
  run INTEGER, session BIGINT, seq BIGINT, time TIMESTAMP, records UINTEGER, queued UINTEGER, encode_us UINTEGER,
  write_us UINTEGER);
CREATE TABLE spans_recorded (
  run INTEGER, trace_id VARCHAR, span_id VARCHAR, parent_span_id VARCHAR, name VARCHAR, kind VARCHAR,
  start TIMESTAMP, dur_us UBIGINT, status VARCHAR, attributes VARCHAR, events VARCHAR,
  links STRUCT(trace_id VARCHAR, span_id VARCHAR)[]);

CREATE TABLE step_rollup (
  run INTEGER, second TIMESTAMP, lane lane_name, width_bucket USMALLINT, steps UINTEGER, width_sum UBIGINT,
  rows UBIGINT, prefill_tokens UBIGINT, cached_tokens UBIGINT, drafted UBIGINT, accepted UBIGINT, bonus UBIGINT,
  emitted UBIGINT, busy_us UBIGINT, draft_us UBIGINT, device_us UBIGINT, commit_us UBIGINT,
  kv_used_max UINTEGER, kv_total UINTEGER, depth_max UINTEGER);
CREATE TABLE position_rollup (
  run INTEGER, second TIMESTAMP, lane lane_name, position UTINYINT, drafted UBIGINT, accepted UBIGINT);
CREATE TABLE refusal_rollup (
  run INTEGER, second TIMESTAMP, taken lane_name, lane VARCHAR, reason VARCHAR, steps UINTEGER);
CREATE TABLE gate_rollup (
  run INTEGER, second TIMESTAMP, mode VARCHAR, arm VARCHAR, reason gate_reason_name, decisions UINTEGER);
CREATE TABLE step_time_rollup (run INTEGER, minute TIMESTAMP, lane lane_name, bucket USMALLINT, steps UINTEGER)
"""
