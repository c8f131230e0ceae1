"""The report finds effects that are there and none that are not, and its page stands alone."""

from __future__ import annotations

import html.parser
import random
import time
from pathlib import Path

import numpy as np
import pytest

from engine.bench.step_stream import StepStream, run_record
from telemetry import report_html, report_text
from telemetry.batch import pack
from telemetry.compare import compare, render
from telemetry.database import Connection, open_for_reading
from telemetry.effects import effect
from telemetry.record import AnyRecord, LeverRecord, RunRecord, StepRecord
from telemetry.replay import Replay
from telemetry.report import NoSuchRunError, Report, find_run, report
from telemetry.setup import Telemetry
from telemetry.svg import chart


def steps(speed: float, width: int = 1, count: int = 400, seed: int = 1) -> np.ndarray:
    """[count, 3]: decode steps that deliver about `speed` tokens a second with noise."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, 5, count) * width
    micros = tokens / speed * 1e6 * generator.uniform(0.7, 1.3, count)
    return np.column_stack([np.full(count, width), tokens, micros])


def test_a_change_that_helps_is_found_with_an_interval_around_the_truth() -> None:
    found = effect(steps(100.0), steps(120.0, seed=2))
    assert found.verdict == "faster"
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.2 < found.high


def test_a_change_that_does_nothing_is_seldom_called_an_effect() -> None:
    verdicts = [effect(steps(100.0, seed=seed), steps(100.0, seed=1000 + seed)).verdict for seed in range(20)]
    assert verdicts.count("no clear effect") >= 16


def test_a_change_of_load_is_not_mistaken_for_an_effect() -> None:
    before = np.vstack([steps(100.0, 1, 300), steps(400.0, 4, 100)])
    after = np.vstack([steps(100.0, 1, 100, seed=5), steps(400.0, 4, 300, seed=6)])
    found = effect(before, after)
    assert found.change is not None
    assert abs(found.change) < 0.06
    assert found.widths == (1, 4)


@pytest.mark.parametrize("count", [0, 1, 15, 63])
def test_too_few_steps_are_said_and_nothing_is_claimed(count: int) -> None:
    found = effect(steps(100.0, count=count), steps(300.0))
    assert (found.verdict, found.change) == ("too few steps", None)


# ---- a recorded run -------------------------------------------------------------------------------------------


def a_story(run: RunRecord) -> list[AnyRecord]:
    """Twelve seconds at 8 ms a step, then a lever change, then faster ones; one refused change with markup in it."""
    stream = StepStream(step_ns=8_000_000)
    records: list[AnyRecord] = [run, *stream.take(1500)]
    now = max(record.end_ns for record in records if isinstance(record, StepRecord))
    records.append(LeverRecord("c1", now, 1500, "num_drafts", 3, 5, "tui", "me", "faster?"))
    records.append(LeverRecord("c2", now, 1500, "num_drafts", 5, 99, "tui", "me", "", "<b>99</b> is too much & more"))
    stream._step_ns = 5_000_000
    return [*records, *stream.take(1500)]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    owner = Telemetry(tmp_path_factory.mktemp("db") / "metrale.duckdb")
    start = time.time_ns() - 3_600_000_000_000
    owner.take(pack(a_story(run_record("story-1", start))))
    owner.take(pack([run_record("empty-run", start)]))
    assert owner.store.flush()
    owner.close()
    return owner.path


@pytest.fixture
def cursor(database: Path) -> Connection:
    return open_for_reading(database)


@pytest.fixture
def told(cursor: Connection) -> Report:
    return report(cursor, find_run(cursor, "story"))


def test_the_lever_change_is_marked_and_its_effect_is_stated(told: Report) -> None:
    applied, refused = told.changes
    assert applied.effect is not None
    assert applied.effect.verdict == "faster"
    assert applied.effect.change == pytest.approx(0.6, abs=0.15)
    assert refused.effect is None
    assert len(told.marks) == 1
    assert 10 < told.marks[0].second < 14


def test_every_section_of_the_report_is_there_and_losses_are_stated(told: Report) -> None:
    titles = [section.title for section in told.sections]
    for title in ("Lanes", "Acceptance by position", "Gate decisions", "Why not speculating", "Latency",
                  "Slowest requests", "Losses", "Overhead of telemetry"):  # fmt: skip
        assert title in titles
    lanes = told.section("Lanes")
    assert lanes is not None
    assert sum(row[1] for row in lanes.rows) == 3000
    assert told.bands
    assert all(band.start <= band.end for band in told.bands)
    assert told.bands[-1].end > 15


def test_a_run_without_steps_is_a_report_too(cursor: Connection) -> None:
    nothing = report(cursor, find_run(cursor, "empty-run"))
    assert "0" in dict(nothing.facts)["requests"]
    assert "Nothing was measured" in report_html.render(nothing)
    assert report_text.to_text(nothing)


def test_the_page_is_one_file_without_scripts_or_requests_and_escapes_what_it_shows(told: Report) -> None:
    page = report_html.render(told)

    class Reader(html.parser.HTMLParser):
        void = {"meta", "br"}
        stack: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe", "object", "b")
            assert not {name for name, _ in attrs} & {"src", "href", "onclick", "onload"}
            if tag not in self.void:
                self.stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.stack.pop() == tag

    reader = Reader()
    reader.feed(page)
    assert reader.stack == []
    assert "&lt;b&gt;99&lt;/b&gt;" in page
    assert "width=device-width" in page
    assert page.count("<svg") >= 4
    assert "http:" not in page
    assert "https:" not in page
    assert len(page) < 600_000


def test_numbers_in_the_pictures_stay_inside_them(told: Report) -> None:
    import re

    for picture in told.charts:
        for points in re.findall(r'points="([^"]*)"', chart(picture, told.marks)):
            for x, y in (pair.split(",") for pair in points.split()):
                assert 0 <= float(x) <= 760
                assert 0 <= float(y) <= 270


def test_the_text_says_the_same_in_eighty_columns(told: Report) -> None:
    text = report_text.to_text(told, width=80)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("story-1", "num_drafts", "faster", "acceptance", "Slowest requests"):
        assert word in text


def test_a_run_is_found_by_number_id_or_beginning_and_others_are_named(cursor: Connection) -> None:
    assert find_run(cursor) == 2
    assert find_run(cursor, "1") == find_run(cursor, "story-1") == find_run(cursor, "st") == 1
    with pytest.raises(NoSuchRunError, match=r"'nosuch'.*story-1"):
        find_run(cursor, "nosuch")


def test_two_runs_compare_side_by_side_and_a_run_with_itself_shows_no_difference(cursor: Connection) -> None:
    same = compare(cursor, 1, 1)
    assert same.throughput.verdict == "no clear effect"
    assert all(figure.change in (None, 0.0) for figure in same.figures)
    other = compare(cursor, 1, 2)
    assert other.runs == ("story-1", "empty-run")
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(render(other))
    assert "delivered" in capture.get()


# ---- replay ---------------------------------------------------------------------------------------------------


def test_a_replay_played_in_any_pieces_shows_every_step_once(cursor: Connection) -> None:
    replay = Replay(cursor, 1)
    screen = replay.hub.subscribe()
    rng, seen, tokens = random.Random(3), 0, 0
    going = True
    while going:
        going = replay.advance(rng.uniform(0.05, 1.5))
        window = screen.read()
        seen += sum(lane.steps for lane in window.lanes.values())
        tokens += sum(lane.tokens for lane in window.lanes.values())
    assert seen == 3000
    assert tokens == cursor.execute("SELECT sum(emitted) FROM lane_steps WHERE run = 1").fetchall()[0][0]
    assert replay.position_s == pytest.approx(replay.duration_s)


def test_a_seek_fills_the_windows_and_shows_the_gate_of_that_moment(cursor: Connection) -> None:
    replay = Replay(cursor, 1)
    replay.seek(10.0)
    assert replay.position_s == pytest.approx(10.0)
    gate = replay.hub.gate()
    assert gate is not None
    assert gate.time == pytest.approx(replay.time, abs=1.0)
    assert replay.hub.latencies()[0].count > 0
    replay.seek(1.0)
    assert replay.hub.levers.maxlen
    assert not replay.hub.levers
    replay.seek(1e9)
    assert replay.position_s == replay.duration_s


def test_a_replay_knows_the_levers_of_every_moment(cursor: Connection) -> None:
    replay = Replay(cursor, 1)
    changed_s = (
        cursor.execute(
            "SELECT epoch(min(time)) FROM lever_changes WHERE run = 1 AND name = 'num_drafts' AND error = ''"
        ).fetchall()[0][0]
        - replay.time
    )
    start = run_record().levers
    for position_s, drafts in (
        (0.0, start["num_drafts"]),
        (changed_s - 0.1, start["num_drafts"]),
        (changed_s + 0.1, 5),
    ):
        replay.seek(position_s)
        assert replay.levers == {**start, "num_drafts": drafts}
    replay.seek(0.0)
    while replay.position_s < changed_s + 0.1:
        replay.advance(0.05)
    assert replay.levers["num_drafts"] == 5


def test_a_replay_of_an_empty_run_ends_at_once(cursor: Connection) -> None:
    replay = Replay(cursor, 2)
    assert replay.duration_s == 0
    assert not replay.advance(1.0)
