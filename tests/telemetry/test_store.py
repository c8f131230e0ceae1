"""The store never raises into its caller, loses nothing in silence, and says what is wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from engine.bench.step_stream import StepStream, run_record
from telemetry import beat, journal
from telemetry.batch import pack
from telemetry.database import DatabaseLockedError, DatabaseUnreadableError, open_for_reading
from telemetry.record import GateRecord, LeverRecord, StepRecord
from telemetry.store import Store
from telemetry.writer import Writer
from tests.telemetry.conftest import OpenStore


def ask(store: Store, sql: str) -> list[tuple[Any, ...]]:
    return store.cursor().execute(sql).fetchall()


def wait_until(claim: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_every_record_put_becomes_a_row(open_store: OpenStore) -> None:
    store = open_store()
    records = StepStream().take(500)
    store.put(pack([run_record(), *records]))
    assert store.flush()
    steps = sum(isinstance(record, StepRecord) for record in records)
    gates = sum(isinstance(record, GateRecord) for record in records)
    assert ask(store, "SELECT count(*) FROM lane_steps") == [(steps,)]
    assert ask(store, "SELECT count(*) FROM gate_decisions") == [(gates,)]
    assert ask(store, "SELECT sum(records) FROM flushes") == [(len(records) + 1,)]


def test_a_full_queue_drops_what_does_not_fit_and_counts_it_by_kind(
    open_store: OpenStore,
) -> None:
    store = open_store(capacity=100, flush_s=30.0, commit_s=30.0)
    records = [record for record in StepStream().take(200) if isinstance(record, StepRecord)]
    for batch in ([run_record()], records[:60], records[60:120], records[120:140], records[140:]):
        store.put(pack(batch))
    assert store.losses == {"StepRecord": 120}
    assert store.flush()
    assert ask(store, "SELECT kind, lost FROM losses") == [("StepRecord", 120)]
    assert ask(store, "SELECT count(*), max(step_id) FROM lane_steps") == [(80, 139)]


def test_losses_of_the_ring_are_counted(open_store: OpenStore) -> None:
    store = open_store()
    store.put(pack([run_record()]), lost=7)
    assert store.flush()
    assert ask(store, "SELECT kind, lost::INTEGER FROM losses_by_kind") == [("ring", 7)]


def test_a_record_that_no_column_can_hold_is_counted_and_its_neighbours_are_kept(open_store: OpenStore) -> None:
    store = open_store()
    good = [record for record in StepStream().take(20) if isinstance(record, StepRecord)]
    bad = StepRecord(99, 99, "plain", 0, 1, width=-3, rows=1)
    store.put(pack([run_record(), *good[:10], bad, *good[10:]]))
    assert store.flush()
    assert ask(store, "SELECT count(*), min(width) > 0 FROM lane_steps") == [(20, True)]
    assert store.losses["malformed StepRecord"] == 1


def test_rows_that_the_database_refuses_are_counted_and_recording_goes_on(open_store: OpenStore) -> None:
    store = open_store()
    good = LeverRecord("good", 1, 1, "num_drafts", 3, 5, "tui", "me", "")
    bad = LeverRecord("bad", 1, 2**64 - 1, "num_drafts", 3, 5, "tui", "me", "")
    store.put(pack([run_record(), *StepStream().take(20), good, bad, good]))
    store.put_rows("metrics", [(time.time_ns() // 1000, "name", "", 1.0), ("not a time", "name", "", 1.0)])
    assert store.flush()
    assert ask(store, "SELECT count(*) FROM lane_steps") == [(20,)]
    assert ask(store, "SELECT change_id FROM lever_changes") == [("good",), ("good",)]
    assert ask(store, "SELECT count(*) FROM metrics") == [(1,)]
    assert store.losses == {"malformed LeverRecord": 1, "malformed metrics": 1}
    assert store.flush()
    assert ask(store, "SELECT sum(lost)::INTEGER FROM losses") == [(2,)]
    assert not store.trouble


def test_a_word_that_this_version_does_not_know_is_kept_as_other(open_store: OpenStore) -> None:
    store = open_store()
    store.put(pack([run_record(), StepRecord(1, 1, "teleport", 0, 1000, 1, 1)]))
    assert store.flush()
    assert ask(store, "SELECT lane::VARCHAR FROM lane_steps") == [("other",)]


def test_records_without_a_run_get_one_with_times_of_today(open_store: OpenStore) -> None:
    store = open_store()
    store.put(pack(StepStream().take(10)))
    assert store.flush()
    [(run_id, age)] = ask(
        store,
        "SELECT run_id, epoch(now()::TIMESTAMP) - epoch(max(start)) FROM lane_steps JOIN runs USING (run) GROUP BY 1",
    )
    assert run_id.startswith("unknown-")
    assert abs(age) < 5


def test_two_runs_in_one_batch_are_kept_apart(open_store: OpenStore) -> None:
    store = open_store()
    store.put(pack([run_record("a"), *StepStream(1).take(30), run_record("b"), *StepStream(2).take(50)]))
    assert store.flush()
    assert ask(store, "SELECT run_id, count(*) FROM lane_steps JOIN runs USING (run) GROUP BY 1 ORDER BY 1") == [
        ("a", 30),
        ("b", 50),
    ]
    assert ask(store, "SELECT run_id, state FROM runs ORDER BY run") == [("a", "ended"), ("b", "running")]
    assert ask(
        store, "SELECT count(*) FROM step_sequences s JOIN request_keys k USING (request_no) WHERE k.run <> s.run"
    ) == [(0,)]


def test_closing_states_the_end_of_the_run(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    store.put(pack([run_record(), *StepStream().take(10)]))
    store.close("asked to")
    reader = open_for_reading(store.path)
    assert reader.execute("SELECT state, end_reason, missing FROM runs").fetchall() == [("ended", "asked to", 0)]
    assert not beat.path_of(store.path).exists()


# ---- the file in trouble --------------------------------------------------------------------------------------


def test_a_database_locked_by_another_program_is_named_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "locked.duckdb"
    code = f"import duckdb, time; c = duckdb.connect({str(path)!r}); print('open', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(DatabaseLockedError, match=f"process {other.pid}.*--db"):
            Store(path)
    finally:
        other.kill()
        other.wait()


def test_a_file_that_is_no_database_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, " * 1000)
    with pytest.raises(DatabaseUnreadableError, match=r"letter\.txt"):
        Store(path)
    assert path.read_text().startswith("Dear reader")


def test_a_directory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnreadableError, match="directory"):
        Store(tmp_path)


def test_a_deleted_file_is_noticed_and_recording_begins_anew_at_the_path(open_store: OpenStore) -> None:
    store = open_store()
    store.put(pack([run_record("first"), *StepStream().take(50)]))
    assert store.flush()
    store.path.unlink()
    assert wait_until(lambda: "deleted" in store.trouble or store.path.exists())
    store.put(pack(StepStream(first_step=50).take(30)))
    assert wait_until(lambda: not store.trouble and store.path.exists())
    assert store.flush()
    assert ask(store, "SELECT run_id FROM runs") == [("first",)]
    assert ask(store, "SELECT min(step_id), count(*) FROM lane_steps") == [(50, 30)]
    assert store.losses["database deleted"] > 50
    assert ask(store, "SELECT kind FROM losses") == [("database deleted",)]


def test_a_file_replaced_by_rubbish_is_said_in_a_sentence_and_records_wait(open_store: OpenStore) -> None:
    store = open_store()
    store.put(pack([run_record(), *StepStream().take(50)]))
    assert store.flush()
    rubbish = store.path.with_name("rubbish")
    rubbish.write_bytes(b"not a database" * 1000)
    os.replace(rubbish, store.path)
    assert wait_until(lambda: "cannot be opened" in store.trouble)
    store.put(pack(StepStream(first_step=50).take(30)))
    with pytest.raises(RuntimeError, match="cannot be opened"):
        store.cursor()
    store.path.unlink()
    assert wait_until(lambda: not store.trouble, 20)
    assert store.flush()
    assert ask(store, "SELECT count(*) FROM lane_steps") == [(30,)]


def test_a_file_replaced_by_another_database_of_ours_takes_the_rest_of_the_run(
    open_store: OpenStore, tmp_path: Path
) -> None:
    other = Store(tmp_path / "other.duckdb")
    other.put(pack([run_record("older"), *StepStream(7).take(40)]))
    other.close()
    store = open_store()
    store.put(pack([run_record("mine"), *StepStream(8).take(50)]))
    assert store.flush()
    os.replace(other.path, store.path)
    assert wait_until(lambda: store.losses["database replaced"] > 0)
    store.put(pack(StepStream(8, first_step=50).take(30)))
    assert wait_until(lambda: not store.trouble), store.trouble
    assert store.flush()
    rows = ask(store, "SELECT run_id, count(*) FROM lane_steps JOIN runs USING (run) GROUP BY 1 ORDER BY 1")
    assert rows == [("mine", 30), ("older", 40)]
    numbers = ask(store, "SELECT count(*), count(DISTINCT request_no) FROM request_keys")
    assert numbers[0][0] == numbers[0][1]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    """A file system of eight megabytes, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_full_disk_is_said_records_wait_in_bounded_memory_and_recording_resumes(
    open_store: OpenStore, tiny_disk: Path
) -> None:
    store = open_store(tiny_disk / "metrale.duckdb", capacity=30_000)
    store.put(pack([run_record()]))
    assert store.flush()
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(tiny_disk).free - 150_000))
    stream = StepStream()
    begun = time.monotonic()
    for _ in range(60):
        store.put(pack(stream.take(500)))
        time.sleep(0.02)
    assert time.monotonic() - begun < 30
    assert "full" in store.trouble
    assert store.queued <= 30_000 + 65_536
    ballast.unlink()
    assert wait_until(lambda: not store.trouble, 20)
    assert store.flush(20)
    [(steps,)] = ask(store, "SELECT count(*) FROM lane_steps")
    [(lost,)] = ask(store, "SELECT coalesce(sum(lost), 0)::INTEGER FROM losses WHERE kind = 'StepRecord'")
    assert steps + lost == 30_000


def test_a_full_disk_is_not_tried_again_before_there_is_room(
    open_store: OpenStore, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stream, tried = open_store(tiny_disk / "metrale.duckdb"), StepStream(), []
    store.put(pack([run_record()]))
    assert store.flush()
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(tiny_disk).free))
    commit = Writer.commit
    monkeypatch.setattr(Writer, "commit", lambda self, flush, now: (tried.append(now), commit(self, flush, now)))
    for _ in range(100):
        store.put(pack(stream.take(20)))
        time.sleep(0.02)
    assert "full" in store.trouble
    assert len(tried) <= 1
    ballast.unlink()
    assert wait_until(lambda: not store.trouble)
    assert store.flush()
    assert ask(store, "SELECT count(*) FROM lane_steps") == [(2000,)]
    assert not store.losses


def test_a_file_system_made_read_only_is_said_and_recording_resumes(open_store: OpenStore, tiny_disk: Path) -> None:
    store = open_store(tiny_disk / "metrale.duckdb")
    store.put(pack([run_record(), *StepStream().take(10)]))
    assert store.flush()
    remount = ["mount", "-o", "remount,{},size=8m", str(tiny_disk)]
    if subprocess.run([part.format("ro") for part in remount], capture_output=True, check=False).returncode:
        pytest.skip("this kernel keeps a file system writable while a file on it is open for writing")
    store.put(pack(StepStream(first_step=10).take(10)))
    assert wait_until(lambda: store.trouble)
    subprocess.run([part.format("rw") for part in remount], check=True)
    assert wait_until(lambda: not store.trouble, 20)
    assert ask(store, "SELECT count(*) FROM lane_steps") == [(20,)]


@pytest.fixture
def immutable(tmp_path: Path) -> Iterator[Callable[[bool], None]]:
    """Makes everything in the directory immutable, also for root, where this user and file system can."""

    def make(on: bool) -> None:
        files = [str(path) for path in (tmp_path, *tmp_path.iterdir())]
        done = subprocess.run(["chattr", "+i" if on else "-i", *files], capture_output=True, check=False)
        if done.returncode and on:
            pytest.skip("needs the right to make files immutable")

    yield make
    make(False)


def test_files_made_read_only_while_in_use_are_said_and_recording_resumes(
    open_store: OpenStore, immutable: Callable[[bool], None]
) -> None:
    store = open_store()
    store.put(pack([run_record(), *StepStream().take(10)]))
    assert store.flush()
    immutable(True)
    store.put(pack(StepStream(first_step=10).take(10)))
    assert wait_until(lambda: "may not be written" in store.trouble)
    immutable(False)
    assert wait_until(lambda: not store.trouble, 20)
    assert store.flush()
    assert ask(store, "SELECT count(*) FROM lane_steps") == [(20,)]
    assert not store.losses


def test_the_pulse_of_a_store_ends_no_process_on_a_full_disk(tiny_disk: Path) -> None:
    (tiny_disk / "ballast").write_bytes(bytes(shutil.disk_usage(tiny_disk).free))
    code = (
        "import sys; from pathlib import Path; from telemetry.beat import Beat; Beat(Path(sys.argv[1]), 1).write(5, 7)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_disk / "m.duckdb")], check=True)


# ---- kill -9 --------------------------------------------------------------------------------------------------

_VICTIM = """
import sys, time
from pathlib import Path
from engine.bench.step_stream import StepStream, run_record
from telemetry.batch import pack
from telemetry.store import Store
store = Store(Path(sys.argv[1]))
stream = StepStream()
store.put(pack([run_record("victim", time.time_ns())]))
put = 1
while True:
    records = stream.take(50)
    store.put(pack(records))
    put += len(records)
    print(put, time.time_ns(), flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.42, 0.9, 1.3])
def test_after_kill_9_the_file_opens_and_states_what_is_missing(tmp_path: Path, after_s: float) -> None:
    path = tmp_path / "victim.duckdb"
    victim = subprocess.Popen([sys.executable, "-c", _VICTIM, str(path)], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    lines = [victim.stdout.readline()]
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline:
        lines.append(victim.stdout.readline())
    victim.send_signal(signal.SIGKILL)
    rest = victim.communicate()[0].splitlines()
    put, _ = (rest or lines)[-1].split()
    reader = open_for_reading(path)
    state, missing, gap_ms = (
        reader.execute("SELECT state, missing, gap_ms FROM runs").fetchall()[0]
        if _has_run(reader)
        else ("interrupted", None, 0.0)
    )
    committed = reader.execute("SELECT coalesce(sum(records), 0)::BIGINT FROM flushes").fetchall()[0][0]
    assert state == "interrupted"
    assert gap_ms <= 250 + 250  # one flush interval, and as much for a busy machine
    if missing is not None:
        assert committed + missing >= int(put)
        assert committed + missing <= int(put) + 200


def _has_run(reader: duckdb.DuckDBPyConnection) -> bool:
    return bool(reader.execute("SELECT count(*) FROM runs").fetchall()[0][0])


def test_a_run_that_was_cut_off_stays_readable_beside_the_next_one(open_store: OpenStore, tmp_path: Path) -> None:
    path = tmp_path / "victim.duckdb"
    victim = subprocess.Popen([sys.executable, "-c", _VICTIM, str(path)], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    victim.stdout.readline()
    time.sleep(1.0)
    victim.kill()
    victim.wait()
    store = open_store(path)
    store.put(pack([run_record("next"), *StepStream(9).take(20)]))
    assert store.flush()
    assert ask(store, "SELECT run_id, state FROM runs ORDER BY run") == [("victim", "interrupted"), ("next", "running")]
    assert ask(store, "SELECT missing >= 0, heartbeat >= last_record - INTERVAL 1 HOUR FROM runs WHERE run = 1") == [
        (True, True)
    ]


def test_changes_of_the_gate_and_the_speeds_of_its_arms_are_columns(open_store: OpenStore) -> None:
    store = open_store()

    def decision(number: int, arm: str, reason: str, plain: float, *others: float) -> GateRecord:
        arms = (
            ("plain", plain, 1.0, 0, False),
            *((f"spec{at}", speed, 1.0, 0, False) for at, speed in enumerate(others)),
            ("delivered", 99.0, -1.0, 0, False),  # no arm
        )
        return GateRecord(number, number, "verify", arm, reason, arms, 1.0, 0, 9, 1, 5)

    store.put(
        pack([run_record(), decision(1, "verify", "cold", -1.0, 80.0), decision(2, "verify", "cold", -1.0, 80.0)])
    )
    assert store.flush()
    store.put(pack([decision(3, "verify", "cold", -1.0), decision(4, "plain", "probe", 50.0, 70.0, 90.0)]))
    assert store.flush()
    rows = ask(store, "SELECT is_change, plain_tokens_per_s, spec_tokens_per_s FROM gate_decisions ORDER BY step_id")
    assert rows == [(True, None, 80.0), (False, None, 80.0), (False, None, None), (True, 50.0, 90.0)]


def test_the_journal_does_not_wait_for_a_slow_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    commit = Writer.commit
    monkeypatch.setattr(Writer, "commit", lambda self, flush, now: (released.wait(10), commit(self, flush, now)))
    store = Store(tmp_path / "m.duckdb", flush_s=0.02, commit_s=0.0)
    try:
        store.put(pack([run_record()]))
        time.sleep(0.2)
        store.put(pack(StepStream().take(30)))
        time.sleep(0.5)
        waiting = [batch for batches, _ in journal.read(store.path, 0).values() for batch in batches]
        assert sum(batch.rows("steps") for batch in waiting) == 30
    finally:
        released.set()
        store.close()
    assert open_for_reading(store.path).execute("SELECT count(*) FROM lane_steps").fetchall() == [(30,)]


def test_what_was_said_survives_a_kill_too(tmp_path: Path) -> None:
    path = tmp_path / "victim.duckdb"
    code = (
        _VICTIM.split("while True")[0]
        + """
store.put_rows("contents", [(time.time_ns() // 1000, "a", "[]", "so be it")])
time.sleep(0.4)
print("said", flush=True)
time.sleep(60)
"""
    )
    victim = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    victim.stdout.readline()
    victim.kill()
    victim.communicate()
    reader = open_for_reading(path)
    assert reader.execute("SELECT run, request_id, reply FROM contents").fetchall() == [(1, "a", "so be it")]


def test_a_journal_that_ends_in_the_middle_of_a_frame_gives_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "m.duckdb"
    writing = journal.Journal(path)
    writing.append(1, pack([run_record()]))
    writing.append(2, pack(StepStream().take(5)))
    file, _ = journal.paths_of(path)
    data = file.read_bytes()
    for cut in (len(data), len(data) - 1, len(data) // 2, 3, 0):
        file.write_bytes(data[:cut])
        got = journal.read(path, 0)
        assert len(got) == (2 if cut == len(data) else 1 if cut > 300 else 0)
    file.write_bytes(data[:-5] + b"wrong")
    assert list(journal.read(path, 0)) == [1]
    assert journal.read(path, 1) == {}


def test_what_comes_during_a_commit_stays_in_the_journal_and_what_was_committed_leaves_it(tmp_path: Path) -> None:
    path, stream = tmp_path / "m.duckdb", StepStream()
    writing = journal.Journal(path)

    def append(*numbers: int) -> None:
        for number in numbers:
            writing.append(number, pack(stream.take(5)))

    append(1, 2)
    writing.turn()
    append(3)
    assert list(journal.read(path, 0)) == [1, 2, 3]
    writing.clear(2)
    assert list(journal.read(path, 0)) == [3]
    writing.turn()
    append(4)
    writing.turn()  # the commit of 3 failed, and is tried again with 4
    append(5)
    assert list(journal.read(path, 0)) == [3, 4, 5]
    writing.clear(4)
    assert list(journal.read(path, 0)) == [4, 5]  # 4 shares its file with 5 and the database knows that it has it
    writing.turn()
    append(6)
    writing.clear(6)
    assert journal.read(path, 0) == {}
