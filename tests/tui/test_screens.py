"""The operator screens as a user drives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.widgets import DataTable, Input

from engine.protocol import wire
from tests.tui import scenes
from tests.tui.conftest import type_text, until
from tests.tui.fake_server import FakeServer
from tests.tui.staged import staged
from tui.actions import ACTIONS
from tui.panels import PANES
from tui.panels.levers.lever_list import LeverList
from tui.panels.provenance.token_map import TokenMap
from tui.panels.sql import SqlEditor
from tui.program import MetraleApp
from tui.widgets import Cell

Make = Callable[..., MetraleApp]
SIZES = [(80, 24), (120, 40), (200, 55)]


def text(app: MetraleApp, selector: str) -> str:
    return str(app.query_one(selector, Cell).render())


@pytest.mark.parametrize("size", SIZES)
async def test_every_screen_opens_at_every_size(size: tuple[int, int]) -> None:
    app = staged("talk", mode="top")
    async with app.run_test(size=size) as pilot:
        for digit, name in enumerate(list(PANES)[2:], start=1):
            app.set_focus(None)
            await pilot.press(str(digit))
            await until(pilot, lambda name=name: app.pane == name)  # type: ignore[misc]


@pytest.mark.parametrize("scene", ["connecting", "loading", "empty", "down"])
async def test_every_screen_opens_when_there_is_nothing_to_show(scene: str) -> None:
    app = staged(scene, mode="chat")
    async with app.run_test(size=(100, 30)) as pilot:
        for number, name in enumerate(list(PANES)[1:], start=2):
            await pilot.press(f"f{number}")
            await until(pilot, lambda name=name: app.pane == name)  # type: ignore[misc]


def test_every_action_has_exactly_one_handler() -> None:
    app = staged("empty")
    handled = [*app.chat.handlers, *app.sessions.handlers, *app.screens.handlers]
    assert sorted(handled) == sorted(action.name for action in ACTIONS)


async def test_holding_the_picture_loses_nothing(connected: Make) -> None:
    app = connected("top")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: len(app.state.stats) > 1)
        await pilot.press("p")
        assert app.held is not None
        held = app.held[0]
        await until(pilot, lambda: len(app.state.stats) > len(held.stats) + 1)
        assert "HELD" in text(app, "#top")
        await pilot.press("p")
        assert app.held is None


async def test_a_lever_is_edited_in_place(connected: Make, server: FakeServer) -> None:
    app = connected("top")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.state.ready)
        await pilot.press("4")
        levers = app.query_one("#all-levers", LeverList)
        await until(pilot, lambda: levers.lever is not None and levers.has_focus)
        await pilot.press("down", "7")
        assert levers.editing
        await pilot.press("enter")
        await until(pilot, lambda: app.state.levers["num_drafts"].value == 7)
        await pilot.press("right")
        await until(pilot, lambda: app.state.levers["num_drafts"].value == 8)
        await pilot.press("backspace")
        await until(pilot, lambda: app.state.levers["num_drafts"].value == 3)
        await pilot.press("u")
        await until(pilot, lambda: app.state.levers["num_drafts"].value == 8)
        assert "num_drafts" in text(app, "#lever-changes")


async def test_a_value_out_of_bounds_is_not_sent(connected: Make, server: FakeServer) -> None:
    app = connected("top")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.state.ready)
        await pilot.press("4")
        await until(pilot, lambda: app.query_one("#all-levers", LeverList).has_focus)
        await pilot.press("down", "9", "9", "enter")
        await pilot.pause(0.1)
        assert not server.said(wire.SetLever)


async def test_leaving_an_edit_with_escape_sends_nothing(connected: Make, server: FakeServer) -> None:
    app = connected("top")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.state.ready)
        await pilot.press("4")
        levers = app.query_one("#all-levers", LeverList)
        await until(pilot, lambda: levers.has_focus)
        await pilot.press("down", "9", "escape")
        await until(pilot, lambda: not levers.editing)
        assert not server.said(wire.SetLever)


async def test_requests_sort_filter_and_cancel(connected: Make, server: FakeServer) -> None:
    app = connected("top")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.state.requests)
        await pilot.press("5")
        table = app.query_one("#req-table", DataTable)
        await until(pilot, lambda: table.row_count == 4)
        first = str(table.get_row_at(0)[0])
        await pilot.press("r")
        await until(pilot, lambda: str(table.get_row_at(0)[0]) != first)
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.focused, Input))
        await type_text(pilot, "waiting")
        await pilot.press("enter")
        await until(pilot, lambda: table.row_count == 1)
        await pilot.press("x")
        await until(pilot, lambda: server.said(wire.Stop))
        stop = server.said(wire.Stop)[0]
        assert isinstance(stop, wire.Stop)
        assert stop.request_id == "r-5e6f"


async def test_sql_runs_shows_rows_and_shows_errors(connected: Make, server: FakeServer) -> None:
    app = connected("top")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.state.ready)
        await pilot.press("7")
        await until(pilot, lambda: isinstance(app.focused, SqlEditor))
        editor = app.query_one(SqlEditor)
        editor.load_text("SELECT lane FROM steps;")
        editor.move_cursor(editor.document.end)
        await pilot.press("enter")
        table = app.query_one("#sql-table", DataTable)
        await until(pilot, lambda: table.row_count == 30)
        assert "30 rows" in text(app, "#sql-note")
        editor.load_text("SELECT boom")
        await pilot.press("ctrl+j")
        await until(pilot, lambda: "no table called boom" in text(app, "#sql-note"))


async def test_the_origins_screen_tells_all_about_the_token_at_the_cursor() -> None:
    app = staged("talk")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(app.focused, TokenMap))
        await pilot.press("n")
        await until(pilot, lambda: "drafted here" in text(app, "#origin-token"))
        said = text(app, "#origin-token")
        assert "step" in said
        assert "about this time" in said
        assert "likelihood" in said
        assert "the present arm stays ahead" in said
        before = app.query_one(TokenMap).cursor
        await pilot.press("down")
        assert app.query_one(TokenMap).cursor > before
        await pilot.press("escape")
        await until(pilot, lambda: app.pane == "chat")


async def test_panes_do_not_paint_again_what_did_not_change() -> None:
    app = staged("talk", mode="top")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.5)
        painted: list[str] = []
        for cell in app.query(Cell):
            cell.update = lambda *a, name=cell.id, **k: painted.append(str(name))  # type: ignore[method-assign]
        for _ in range(5):
            app.repaint()
        await pilot.pause()
        assert painted == []


async def test_a_replay_is_started_paused_moved_and_hastened(connected: Make, server: FakeServer) -> None:
    app = connected("replay", replay_run="run-a")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.state.stats)
        await pilot.press("space", "right", "plus")
        await until(pilot, lambda: len(server.said(wire.Replay)) == 4)
        sent = [message for message in server.said(wire.Replay) if isinstance(message, wire.Replay)]
        assert [message.action for message in sent] == ["start", "pause", "seek", "pause"]
        assert sent[0].run == "run-a"
        assert (sent[2].position, sent[3].speed) == (10.0, 2.0)


async def test_a_replay_shows_how_far_it_is() -> None:
    app = staged("talk", mode="replay")
    async with app.run_test(size=(120, 40)) as pilot:
        past = scenes.stats(260)
        fields = {name: getattr(past, name) for name in past.__struct_fields__}
        app.receive(wire.Stats(**(fields | {"replay_run": "0123456789ab", "replay_position": 30.0})))
        await until(pilot, lambda: "at 30 s" in text(app, "#top"))
        app.receive(wire.QueryResult(query_id="replay length", rows=((120.0,),)))
        await until(pilot, lambda: "30 s of 2 min" in text(app, "#top"))
        assert "Play/pause" in text(app, "#keys")


async def test_the_step_of_a_token_is_asked_of_the_telemetry_once(connected: Make, server: FakeServer) -> None:
    app = connected()
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "hi")
        await pilot.press("enter")
        await until(pilot, lambda: app.state.reply is not None and app.state.reply.status == "done")
        await pilot.press("f2")
        await until(pilot, lambda: "2 of 3 drafts accepted" in text(app, "#origin-token"))
        said = text(app, "#origin-token")
        assert "36.3 ms, batch 1" in said
        assert "MTP, DFlash another drafter was preferred" in said
        assert "ngram:3: measuring the other arm" in said
        await pilot.press("right", "left")
        await pilot.pause(0.5)
        asked = [m for m in server.said(wire.Query) if isinstance(m, wire.Query) and "lane_steps" in m.sql]
        assert len({m.query_id for m in asked}) == len(asked)
