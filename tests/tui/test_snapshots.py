"""Pictures of the main states, compared with those that a person has looked at (`--snapshot-update` renews them)."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from pytest_textual_snapshot import normalize_svg
from textual.pilot import Pilot
from textual.widgets import Markdown, TextArea

from tests.tui.conftest import until
from tests.tui.staged import staged
from tui.program import MetraleApp

Compare = Callable[..., bool]
SMALL, LARGE = (80, 24), (120, 40)


@pytest.fixture(autouse=True)
def _greenwich() -> Iterator[None]:
    """Log lines carry the time of day."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


def settled(scene: str, keys: tuple[str, ...]) -> Callable[[Pilot[None]], Awaitable[None]]:
    """Waits for the streamed text, stops the cursor from blinking, and presses the keys one after the other."""

    async def prepare(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, MetraleApp)
        if scene in ("talk", "streaming", "down") and app.mode_name == "chat":
            await until(pilot, lambda: app.query(Markdown) and app.query(Markdown).first().source)
            spoken = app.state.conversation.last_answer
            await until(pilot, lambda: app.query(Markdown).first().source == spoken)
        for key in keys:
            await pilot.press(key)
            await still(pilot)  # what a key opens may have to arrive before the next one finds it
        for editor in app.screen.query(TextArea):
            editor.cursor_blink = False
        await still(pilot)

    return prepare


async def still(pilot: Pilot[None]) -> None:
    """Waits until three pictures in a row are the same."""
    app, seen = pilot.app, [""]
    for _ in range(40):
        assert isinstance(app, MetraleApp)
        app.repaint()
        await pilot.pause(0.1)
        seen.append(normalize_svg(app.export_screenshot()))
        if len(seen) > 3 and seen[-1] == seen[-2] == seen[-3]:
            return
    raise AssertionError("the screen does not come to rest")


CHAT = [
    ("connecting", SMALL, ()),
    ("loading", LARGE, ()),
    ("empty", SMALL, ()),
    ("talk", SMALL, ()),
    ("talk", LARGE, ()),
    ("streaming", LARGE, ()),
    ("down", LARGE, ()),
    ("talk", LARGE, ("f2", "n")),
    ("talk", SMALL, ("f2",)),
    ("talk", SMALL, ("f1",)),
    ("empty", SMALL, ("slash", "s")),
]
TOP = [
    ("talk", SMALL, ("1",)),
    ("talk", LARGE, ("1",)),
    ("talk", LARGE, ("2",)),
    ("talk", SMALL, ("3",)),
    ("talk", LARGE, ("4", "down")),
    ("talk", SMALL, ("4",)),
    ("talk", LARGE, ("5",)),
    ("talk", SMALL, ("6",)),
    ("talk", SMALL, ("8",)),
    ("down", SMALL, ("1",)),
    ("empty", SMALL, ("2",)),
]


def _name(case: object) -> str:
    if isinstance(case, tuple):
        return "x".join(map(str, case)) if case and isinstance(case[0], int) else "-".join(case)
    return str(case)


@pytest.mark.parametrize(("scene", "size", "keys"), CHAT, ids=_name)
def test_the_chat_looks_as_it_did(
    snap_compare: Compare, scene: str, size: tuple[int, int], keys: tuple[str, ...]
) -> None:
    assert snap_compare(staged(scene), terminal_size=size, run_before=settled(scene, keys))


@pytest.mark.parametrize(("scene", "size", "keys"), TOP, ids=_name)
def test_the_operator_screens_look_as_they_did(
    snap_compare: Compare, scene: str, size: tuple[int, int], keys: tuple[str, ...]
) -> None:
    assert snap_compare(staged(scene, mode="top"), terminal_size=size, run_before=settled(scene, keys))


def test_no_colour_still_tells_lanes_and_drafts_apart(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = staged("talk")
    assert app.no_color
    assert snap_compare(app, terminal_size=SMALL, run_before=settled("talk", ("f2",)))


def test_the_light_theme_is_a_theme_too(snap_compare: Compare) -> None:
    app = staged("talk")
    app.store.prefer(app.store.preferences().__class__(theme="metrale-light"))
    assert snap_compare(app, terminal_size=LARGE, run_before=settled("talk", ()))
