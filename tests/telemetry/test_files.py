"""Files last: old schemas open, nothing grows for ever, and what is exported comes back the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from engine.bench.step_stream import StepStream, run_record
from telemetry.batch import pack
from telemetry.database import DatabaseUnreadableError, open_for_reading, open_owned
from telemetry.docs import markdown
from telemetry.migrations import MIGRATIONS, migrate, version_of
from telemetry.record import LeverRecord, TokenRecord
from telemetry.retention import Retention, compact, expire, size_of
from telemetry.schema import FINISHES, GATE_REASONS, K_REASONS, LANES, SCHEMA_VERSION, TABLES
from telemetry.setup import Telemetry
from telemetry.store import Store
from telemetry.transfer import TransferError, export, import_
from telemetry.views import STRUCTURE, VIEWS
from tests.telemetry import first_schema
from tests.telemetry.conftest import OpenStore

EVERY_TABLE = [name for name in TABLES if name != "schema_version"]


def recorded(path: Path, run_id: str, seed: int = 1, unix_ns: int = 0, steps: int = 400) -> Path:
    store = Store(path, retention=Retention(0, 0))
    lever = LeverRecord("c1", 5_000_000, 5, "num_drafts", 3, 5, "tui", "me", "why")
    token = TokenRecord("chat-x", 0, 1_000_000, 1, 42, "mtp", 1, -0.5)
    store.put(pack([run_record(run_id, unix_ns), *StepStream(seed).take(steps), lever, token]))
    store.close()
    return path


# ---- schema ---------------------------------------------------------------------------------------------------


def test_a_file_of_the_first_schema_opens_is_migrated_and_its_views_answer(tmp_path: Path) -> None:
    path = tmp_path / "old.duckdb"
    first_schema.write(path)
    reader = open_for_reading(path)
    assert version_of(reader) == SCHEMA_VERSION
    assert reader.execute("SELECT state, run_id FROM runs").fetchall() == [("interrupted", "old")]
    for view in (*VIEWS, *STRUCTURE):
        reader.execute(f"SELECT * FROM {view.name}").fetchall()
    assert reader.execute("SELECT request_id, emitted FROM step_sequences ORDER BY 1").fetchall() == [
        ("r1", 3),
        ("r2", 2),
    ]


def test_what_was_said_is_kept_with_its_request_also_in_a_file_of_the_first_schema(tmp_path: Path) -> None:
    path = tmp_path / "old.duckdb"
    first_schema.write(path)
    telemetry = Telemetry(path)
    telemetry.take(pack([run_record("new"), *StepStream().take(400)]))
    telemetry.store.flush()
    ended = str(telemetry.query("SELECT max(request_id) FROM requests WHERE run = 2").rows[0][0])
    telemetry.record_content(ended, '[{"role":"user","content":"hi"}]', "hello \u2603")
    telemetry.close()
    asked = open_for_reading(path).execute(
        "SELECT run, request_id, prompt ->> '$[0].content', reply, reason IS NOT NULL FROM conversations"
    )
    assert asked.fetchall() == [(2, ended, "hi", "hello \u2603", True)]


def test_new_records_go_into_a_file_of_the_first_schema(open_store: OpenStore, tmp_path: Path) -> None:
    path = tmp_path / "old.duckdb"
    first_schema.write(path)
    store = open_store(path)
    store.put(pack([run_record("new"), *StepStream().take(10)]))
    assert store.flush()
    rows = store.cursor().execute("SELECT run, count(*) FROM lane_steps GROUP BY 1 ORDER BY 1").fetchall()
    assert rows[-1] == (2, 10)


def test_every_table_and_view_is_described_and_no_description_lacks_its_table() -> None:
    connection = duckdb.connect(":memory:")
    migrate(connection)
    names = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    assert names == set(TABLES)
    assert all(sentence.endswith(".") for sentence in TABLES.values())
    assert all(view.sentence.endswith(".") and view.sentence.count(". ") == 0 for view in VIEWS)


def test_the_enums_of_the_file_are_those_of_the_code() -> None:
    connection = duckdb.connect(":memory:")
    migrate(connection)
    for name, words in (("lane_name", LANES), ("k_reason_name", K_REASONS), ("gate_reason_name", GATE_REASONS)):
        found = connection.execute(f"SELECT unnest(enum_range(NULL::{name}))::VARCHAR").fetchall()
        assert tuple(word for (word,) in found) == words
    assert "stop" in FINISHES


def test_the_page_of_tables_and_views_is_the_one_that_the_definitions_give() -> None:
    page = Path(__file__).parents[2] / "telemetry" / "TABLES.md"
    assert page.read_text() == markdown(), "run `python -m telemetry.docs > telemetry/TABLES.md`"


def test_a_file_of_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "new.duckdb"
    connection = duckdb.connect(str(path))
    migrate(connection)
    connection.execute("INSERT INTO schema_version VALUES (99, now()::TIMESTAMP)")
    connection.close()
    with pytest.raises(DatabaseUnreadableError, match="newer Metrale"):
        open_owned(path)


def _unfinished(path: Path, change: str) -> None:
    """A file that says it has the current schema, and has not."""
    connection = duckdb.connect(str(path))
    migrate(connection)
    connection.execute(change)
    connection.close()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE gate_decisions DROP COLUMN plain_tokens_per_s",
        "DROP TABLE runs",
        "DROP TABLE request_keys",
        "DROP TABLE schema_version; CREATE TABLE schema_version (other INTEGER)",
    ],
)
@pytest.mark.parametrize("opened", [Store, open_owned, open_for_reading])
def test_a_file_without_the_tables_of_its_schema_is_refused_in_a_sentence_with_what_to_do(
    tmp_path: Path, change: str, opened: Callable[[Path], Any]
) -> None:
    path = tmp_path / "unfinished.duckdb"
    _unfinished(path, change)
    with pytest.raises(DatabaseUnreadableError) as refused:
        opened(path)
    assert str(refused.value) == (
        f"{path} cannot be opened as the database: its tables are not those of this version, an unfinished or foreign "
        "program made them; move it away or choose another file with --db."
    )


def test_a_table_that_lacks_what_is_written_is_said_in_a_sentence_with_what_to_do(
    open_store: OpenStore, tmp_path: Path
) -> None:
    path = tmp_path / "unfinished.duckdb"
    _unfinished(path, "ALTER TABLE flushes DROP COLUMN queued")
    store = open_store(path)
    store.put(pack([run_record("r")]))
    store.flush(1.0)
    assert store.trouble == (
        f"The tables of {path} are not those of this version: move the file away, recording begins again in a new one."
    )


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(connection: Any) -> None:
        connection.execute("CREATE TABLE half (a INTEGER)")
        connection.execute("SELECT no_such_column")

    connection = duckdb.connect(str(tmp_path / "x.duckdb"))
    migrate(connection)
    monkeypatch.setattr("telemetry.migrations.MIGRATIONS", [*MIGRATIONS, broken])
    with pytest.raises(duckdb.Error):
        migrate(connection, SCHEMA_VERSION + 1)
    assert version_of(connection) == SCHEMA_VERSION
    assert not connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'half'").fetchall()


# ---- retention ------------------------------------------------------------------------------------------------


def test_what_is_too_old_goes_and_what_is_young_stays_whole(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    old_ns = int((now - timedelta(days=40)).timestamp() * 1e9)
    path = recorded(tmp_path / "m.duckdb", "old", unix_ns=old_ns)
    recorded(path, "young", seed=2)
    connection = open_owned(path)
    connection.execute("UPDATE runs SET ended = started, heartbeat = started WHERE run_id = 'old'")
    assert expire(connection, Retention(days=30, bytes=0), now.replace(tzinfo=None)) == 400
    assert connection.execute("SELECT run_id FROM runs").fetchall() == [("young",)]
    for table in sorted({*EVERY_TABLE} - {"flushes"}):  # those have the time of the test
        runs = {run for (run,) in connection.execute(f"SELECT DISTINCT run FROM {table}").fetchall()}
        assert runs <= {2}, table
    assert (
        connection.execute("SELECT sum(emitted) FROM step_sequences").fetchall()
        == connection.execute("SELECT sum(emitted) FROM lane_steps").fetchall()
    )


def test_a_file_that_is_too_large_loses_its_oldest_steps_and_compacting_shrinks_it(tmp_path: Path) -> None:
    path = recorded(tmp_path / "m.duckdb", "run", steps=60_000)
    before = path.stat().st_size
    connection = open_owned(path)
    limit = size_of(connection).used_bytes - 1
    gone = expire(connection, Retention(days=0, bytes=limit), datetime.now())
    assert gone > 0
    first = connection.execute("SELECT min(step_id) FROM lane_steps").fetchall()[0][0]
    assert first >= gone
    connection.execute("CHECKPOINT")
    connection.close()
    compact(path)
    assert path.stat().st_size < before
    reader = open_for_reading(path)
    assert reader.execute("SELECT count(*) FROM lane_steps").fetchall() == [(60_000 - gone,)]
    reader.execute("SELECT * FROM lanes").fetchall()


# ---- export and import ----------------------------------------------------------------------------------------


def test_an_export_comes_back_the_same_beside_other_runs(tmp_path: Path) -> None:
    source = open_for_reading(recorded(tmp_path / "a.duckdb", "a", seed=3))
    sent = export(source, tmp_path / "out")
    target = open_owned(recorded(tmp_path / "b.duckdb", "b", seed=4))
    got = import_(target, tmp_path / "out")
    assert got.runs == sent.runs == ("a",)
    assert got.rows == sent.rows
    sums = (
        "SELECT request_id, sum(emitted), sum(accepted) FROM step_sequences s JOIN runs r USING (run)"
        " WHERE run_id = 'a'"
    )
    assert sorted(target.execute(f"{sums} GROUP BY 1").fetchall()) == sorted(
        source.execute(f"{sums} GROUP BY 1").fetchall()
    )
    views = "SELECT lane, steps, tokens FROM lanes JOIN runs USING (run) WHERE run_id = 'a' ORDER BY 1"
    assert target.execute(views).fetchall() == source.execute(views).fetchall()
    assert target.execute("SELECT count(*), count(DISTINCT request_no) FROM request_keys").fetchall()[0][0] > 0
    links = (
        "SELECT list_sort(flatten(list(links))) FROM spans s JOIN runs r USING (run)"
        " WHERE run_id = 'a' AND name = 'lane.mtp'"
    )
    assert target.execute(links).fetchall() == source.execute(links).fetchall()


def test_a_run_that_is_there_already_is_not_imported_twice(tmp_path: Path) -> None:
    source = open_for_reading(recorded(tmp_path / "a.duckdb", "a"))
    export(source, tmp_path / "out")
    target = open_owned(tmp_path / "b.duckdb")
    assert import_(target, tmp_path / "out").runs == ("a",)
    assert import_(target, tmp_path / "out").runs == ()
    assert target.execute("SELECT count(*) FROM lane_steps").fetchall() == [(400,)]


def test_one_run_can_be_exported_alone_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    path = recorded(recorded(tmp_path / "a.duckdb", "a"), "b", seed=2)
    reader = open_for_reading(path)
    assert export(reader, tmp_path / "one", run=2).runs == ("b",)
    with pytest.raises(TransferError, match="no run 9"):
        export(reader, tmp_path / "none", run=9)


@pytest.mark.parametrize(
    "manifest", [None, "not json", "{}", '{"schema": 99, "rows": {}}', '{"schema": 1, "rows": {"x": 1}}']
)
def test_a_directory_that_is_no_export_is_refused_in_a_sentence(tmp_path: Path, manifest: str | None) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    target = open_owned(tmp_path / "b.duckdb")
    with pytest.raises(TransferError, match=r"export|missing"):
        import_(target, tmp_path)


def test_a_damaged_parquet_file_is_refused_and_nothing_is_half_imported(tmp_path: Path) -> None:
    export(open_for_reading(recorded(tmp_path / "a.duckdb", "a")), tmp_path / "out")
    (tmp_path / "out" / "lane_steps.parquet").write_bytes(b"PAR1 no more")
    target = open_owned(tmp_path / "b.duckdb")
    with pytest.raises(TransferError, match=r"lane_steps\.parquet"):
        import_(target, tmp_path / "out")
    assert target.execute("SELECT count(*) FROM runs").fetchall() == [(0,)]


def test_the_manifest_tells_schema_runs_and_rows(tmp_path: Path) -> None:
    export(open_for_reading(recorded(tmp_path / "a.duckdb", "a")), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["schema"] == SCHEMA_VERSION
    assert manifest["rows"]["lane_steps"] == 400
