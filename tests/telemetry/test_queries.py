"""Queries only read, one statement at a time, within limits, and say in a sentence what is wrong."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine.bench.step_stream import StepStream, run_record
from telemetry import queries
from telemetry.batch import pack
from telemetry.formats import plain, to_csv, to_json, to_parquet, to_table
from telemetry.queries import Limits, QueryError, Result
from telemetry.setup import Telemetry

Ask = Callable[..., Result]


@pytest.fixture(scope="module")
def telemetry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Telemetry]:
    owner = Telemetry(tmp_path_factory.mktemp("db") / "metrale.duckdb")
    owner.take(pack([run_record("one"), *StepStream(1).take(300)]))
    owner.take(pack([run_record("two"), *StepStream(2).take(500)]))
    assert owner.store.flush()
    yield owner
    owner.close()


@pytest.fixture
def ask(telemetry: Telemetry) -> Ask:
    return lambda sql, **limits: telemetry.query(sql, Limits(**limits))


ESCAPES = [
    "COPY lane_steps TO '/tmp/stolen.csv'",
    "COPY lane_steps FROM '/etc/passwd'",
    "ATTACH '/tmp/other.db'",
    "DETACH memory",
    "PRAGMA database_size",
    "PRAGMA enable_profiling",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET memory_limit = '100GB'",
    "RESET lock_configuration",
    "CALL checkpoint()",
    "EXPORT DATABASE '/tmp/x'",
    "IMPORT DATABASE '/tmp/x'",
    "CREATE TABLE t (a INT)",
    "CREATE TEMP TABLE t AS SELECT 1",
    "INSERT INTO runs (run) VALUES (9)",
    "UPDATE runs SET model = 'x'",
    "DELETE FROM runs",
    "DROP TABLE runs",
    "ALTER TABLE runs ADD COLUMN x INT",
    "BEGIN",
    "COMMIT",
    "VACUUM",
    "USE memory",
    "PREPARE p AS SELECT 1",
    "EXPLAIN ANALYZE DELETE FROM runs",
    "WITH gone AS (DELETE FROM runs RETURNING *) SELECT * FROM gone",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_blob('/etc/passwd')",
    "SELECT * FROM read_parquet('/tmp/x.parquet')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM '/etc/passwd'",
    'SELECT * FROM "/etc/passwd"',
    "SELECT * FROM 'https://example.com/x.csv'",
    "SELECT * FROM checkpoint()",
    "SELECT * FROM force_checkpoint()",
    "SELECT * FROM enable_logging()",
    "SELECT * FROM query('DROP TABLE runs')",
    "SELECT * FROM query_table(['runs'])",
    "SELECT * FROM (SELECT * FROM (FROM checkpoint()))",
    "SELECT (SELECT count(*) FROM read_text('/etc/passwd'))",
    "SELECT repeat('x', 2000000000)",
    "SELECT range(3000000000)",
    "SELECT length(format('{:>1500000000}', 'x'))",
    "SELECT '{:>1500000000}'.format('x')",
    "SELECT length(printf('%1500000000d', 1))",
    "SELECT bitstring('1', 2000000000)",
    "SELECT list_reduce(['x', 'x', 'x'], lambda a, b: a || a)",
    "SELECT getenv('HOME')",
]


@pytest.mark.parametrize("sql", ESCAPES)
def test_nothing_but_reading_goes_through(ask: Ask, sql: str) -> None:
    with pytest.raises(QueryError) as caught:
        ask(sql)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert ask("SELECT count(*) FROM runs").rows == ((2,),)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "FROM lanes",
        "DESCRIBE lane_steps",
        "SHOW TABLES",
        "SUMMARIZE requests",
        "WITH a AS (SELECT 1 AS x) SELECT * FROM a",
        "VALUES (1), (2)",
        "EXPLAIN SELECT * FROM lanes",
        "SELECT * FROM lanes -- the end",
        "SELECT * FROM lanes;",
        "SELECT * FROM range(3)",
        "SELECT * FROM duckdb_tables()",
        "SELECT [x * 2 FOR x IN [1, 2]]",
    ],
)
def test_every_form_of_reading_goes_through(ask: Ask, sql: str) -> None:
    assert ask(sql).columns


def test_two_statements_are_refused(ask: Ask) -> None:
    with pytest.raises(QueryError, match="One statement at a time"):
        ask("SELECT 1; SELECT 2")


def test_an_unknown_table_gets_the_nearest_right_name(ask: Ask) -> None:
    with pytest.raises(QueryError, match="lane_steps"):
        ask("SELECT * FROM lane_stepz")


def test_a_query_that_takes_too_long_is_stopped_in_time(ask: Ask) -> None:
    begun = time.monotonic()
    with pytest.raises(QueryError, match=r"longer than 0\.3 s"):
        ask("SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b", seconds=0.3)
    assert time.monotonic() - begun < 30, "unhindered it takes hours"


def test_a_query_that_wants_too_much_memory_ends_with_a_sentence_and_the_owner_lives(ask: Ask) -> None:
    with pytest.raises(QueryError, match=r"memory|longer"):
        ask("SELECT count(*) FROM (SELECT DISTINCT range, md5(range::VARCHAR) FROM range(100000000))", seconds=8)
    assert ask("SELECT count(*) FROM runs").rows == ((2,),)


def test_rows_beyond_the_limit_are_cut_and_said(ask: Ask) -> None:
    result = ask("SELECT step_id FROM lane_steps ORDER BY step_id", max_rows=5)
    assert [row[0] for row in result.rows] == [0, 0, 1, 1, 2]
    assert result.truncated
    assert not ask("SELECT 1", max_rows=1).truncated


def test_a_run_can_be_looked_at_alone_in_tables_and_views(ask: Ask) -> None:
    assert ask("SELECT count(*) FROM lane_steps", run=1).rows == ((300,),)
    assert ask("SELECT sum(steps)::INTEGER FROM lanes", run=2).rows == ((500,),)
    assert ask("SELECT count(DISTINCT run) FROM spans", run=2).rows == ((1,),)
    assert ask("SELECT count(*) FROM runs r JOIN lane_steps USING (run)", run=3).rows == ((0,),)


def test_a_query_sees_what_was_recorded_a_moment_ago(telemetry: Telemetry) -> None:
    telemetry.take(pack(StepStream(3, first_step=10_000).take(10)))
    deadline = time.monotonic() + 30
    while telemetry.query("SELECT max(step_id) FROM lane_steps").rows != ((10_009,),):
        assert time.monotonic() < deadline


def test_a_query_that_breaks_the_database_engine_does_not_stop_recording(tmp_path: Path) -> None:
    owner = Telemetry(tmp_path / "metrale.duckdb")
    owner.take(pack([run_record("one"), *StepStream().take(10)]))
    assert owner.store.flush()
    each = "(SELECT key FROM json_each((SELECT levers FROM runs)))"
    try:
        owner.query(f"SELECT a.key FROM {each} a JOIN {each} b USING (key)")
    except QueryError:
        pass  # an internal error of this DuckDB version, after which it refuses everything
    owner.take(pack(StepStream(first_step=10).take(10)))
    assert owner.store.flush()
    assert owner.query("SELECT count(*), count(DISTINCT run) FROM lane_steps").rows == ((20, 1),)
    assert owner.query("SELECT run_id, state FROM runs").rows == (("one", "running"),)
    assert not owner.trouble
    owner.close()


def test_many_queries_at_once_do_not_disturb_one_another_or_the_writer(telemetry: Telemetry) -> None:
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(5):
                assert telemetry.query("SELECT count(*) FROM runs").rows == ((2,),)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- formats --------------------------------------------------------------------------------------------------


def test_csv_begins_with_the_names_and_json_is_a_list_of_objects(ask: Ask) -> None:
    result = ask("SELECT 1 AS a, 'x,\"y' AS b, NULL AS c, TIMESTAMP '2026-01-02 03:04:05' AS d, [1, 2] AS e")
    header, row = csv.reader(io.StringIO(to_csv(result)))
    assert header == ["a", "b", "c", "d", "e"]
    assert row == ["1", 'x,"y', "", "2026-01-02T03:04:05", "[1, 2]"]
    assert json.loads(to_json(result)) == [{"a": 1, "b": 'x,"y', "c": None, "d": "2026-01-02T03:04:05", "e": [1, 2]}]


def test_sums_stay_whole_numbers_and_nan_becomes_null(ask: Ask) -> None:
    result = ask("SELECT sum(emitted) AS tokens, 'nan'::DOUBLE AS nothing, 1.5::DECIMAL(5,2) AS half FROM lane_steps")
    [row] = json.loads(to_json(result))
    assert isinstance(row["tokens"], int)
    assert row["nothing"] is None
    assert row["half"] == 1.5


def test_a_table_shows_text_as_it_is_and_says_how_many_rows(ask: Ask) -> None:
    text = to_table(ask("SELECT '[red]not markup[/red]' AS a"), width=80)
    assert "[red]not markup[/red]" in text
    assert "1 row in" in text


def test_a_row_that_is_too_wide_is_shown_field_below_field(ask: Ask) -> None:
    text = to_table(ask("SELECT * FROM lane_steps LIMIT 1"), width=80)
    assert any(line.split() == ["step_id", "0"] for line in text.splitlines())


def test_parquet_holds_the_same_rows(ask: Ask, tmp_path: Path) -> None:
    result = ask("SELECT step_id, lane, shares, start FROM lane_steps ORDER BY run, step_id LIMIT 3")
    to_parquet(result, tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["step_id", "lane", "shares", "start"]
    assert table["step_id"].to_pylist() == [0, 1, 2]


def test_names_that_occur_twice_are_told_apart_in_parquet(ask: Ask, tmp_path: Path) -> None:
    to_parquet(Result(("a", "a"), ("INTEGER", "INTEGER"), ((1, 2),), False, 0.0), tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet").column_names == ["a", "a_2"]


def test_plain_values_are_those_of_json() -> None:
    json.dumps(plain({"bytes": b"\x01", "inf": float("inf"), "nested": [{"x": (1, 2)}]}), allow_nan=False)


def _doubled(times: int) -> str:
    names = [f"a{at}" for at in range(times + 1)]
    steps = (f"{name} AS (SELECT s || s AS s FROM {before})" for before, name in pairwise(names))
    return f"WITH a0 AS (SELECT run_id AS s FROM runs), {', '.join(steps)} SELECT length(s) FROM {names[-1]}"


def test_text_that_doubles_itself_again_and_again_is_refused_before_it_runs(telemetry: Telemetry) -> None:
    with pytest.raises(QueryError, match="joins texts or lists 40 times"):
        telemetry.query(_doubled(40))
    assert telemetry.query(_doubled(4)).rows[0][0] == 16 * len("one")
    with pytest.raises(QueryError, match="not as columns"):
        telemetry.query("SELECT replace(run_id, 'o', run_id) FROM runs")
    assert telemetry.query("SELECT replace(run_id, 'o', 'O') FROM runs ORDER BY run").rows[0][0] == "One"


def test_a_query_with_which_the_process_grows_too_much_is_stopped_and_says_so(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_MEMORY_MB", 100)
    begun = time.monotonic()
    with pytest.raises(QueryError, match="more memory"):
        telemetry.query(f"SELECT string_agg(run_id || '{'y' * 2000}') FROM runs, range(100000000)", Limits(seconds=30))
    assert time.monotonic() - begun < 20
