"""The pure parts beside the reducer: words, windows, charts, actions, settings, sessions, levers, the token flow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.levers.spec import LeverError
from engine.protocol import wire
from engine.protocol.events import Token
from telemetry.names import Finish, GateReason, Lane, Refusal
from tests.tui import scenes
from tui import actions, charts, words
from tui.change import Change, parse_change
from tui.conversation import Conversation, Reply, Turn
from tui.panels.chat.reply_line import reply_line
from tui.panels.levers.values import parse_value, show_value, stepped
from tui.panels.provenance.token_map import Piece, flow
from tui.sessions import SessionError, Store, new_conversation
from tui.settings import SettingError, Settings
from tui.windows import effect, window

LEVERS = {lever.name: lever for lever in scenes.levers()}


# ---- words


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x1b]52;c;aGk=\x07", "\x9b31m", "a\x00b", "\x7f", "\u202eevil"])
def test_nothing_that_steers_a_terminal_survives(hostile: str) -> None:
    shown = words.harmless(hostile)
    assert all(char.isprintable() for char in shown)


def test_ordinary_text_stays_as_it_is() -> None:
    text = "Grüße, 世界 👋\n\tcode"
    assert words.harmless(text) == text


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (words.LANE_WORDS, Lane),
        (words.REFUSAL_WORDS, Refusal),
        (words.GATE_WORDS, GateReason),
        (words.FINISH_WORDS, Finish),
    ],
)
def test_every_word_of_telemetry_has_words_for_people(table: dict[str, str], names: type) -> None:
    assert set(table) == {str(name) for name in names}


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0.0, "0.0"), (38.24, "38.2"), (1234.5, "1234"), (41234.0, "41 234")]
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    assert words.number(value) == shown


# ---- windows


def test_a_window_sums_only_its_frames() -> None:
    frames = [scenes.stats(i) for i in range(100)]
    seen = window(frames, 5.0)
    assert seen.frames == 20
    assert seen.tokens == sum(lane.tokens for frame in frames[-20:] for lane in frame.lanes.values())
    assert seen.lanes["ngram"].drafted_at == tuple(
        sum(frame.lanes["ngram"].drafted_at[i] for frame in frames[-20:]) for i in range(3)
    )


def test_an_empty_window_has_no_acceptance() -> None:
    assert window([]).acceptance is None
    assert window([]).tokens_per_s == 0.0


def test_the_effect_of_a_lever_compares_after_with_before() -> None:
    frames = [_rated(i, 50.0 if i <= 40 else 100.0 + i % 2) for i in range(80)]
    seen = effect(frames, scenes.lever_event("num_drafts", 3, 5, scenes.START + 10), float("inf"))
    assert seen is not None
    assert seen.change == pytest.approx(1.01, abs=0.01)
    assert seen.certain


def test_an_effect_within_the_noise_is_not_certain() -> None:
    frames = [_rated(i, 50.0 + (i * 7919 % 13)) for i in range(80)]
    seen = effect(frames, scenes.lever_event("num_drafts", 3, 5, scenes.START + 10), float("inf"))
    assert seen is not None
    assert not seen.certain


def test_too_few_busy_frames_say_nothing() -> None:
    frames = [scenes.stats(i, busy=False) for i in range(80)]
    assert effect(frames, scenes.lever_event("num_drafts", 3, 5, scenes.START + 10), float("inf")) is None


def _rated(frame: int, rate: float) -> wire.Stats:
    stats = scenes.stats(frame)
    fields = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return wire.Stats(**(fields | {"tokens_per_s": rate}))


# ---- charts


def test_a_chart_has_its_height_its_width_and_its_marks() -> None:
    frames = [scenes.stats(i) for i in range(240)]
    frame = charts.bucket(frames, lambda s: s.tokens_per_s, 30, 60.0)
    picture = charts.chart(frame, 4, marks=[charts.Mark(scenes.START + 30, "num_drafts")], base=34.2).plain
    lines = picture.split("\n")
    assert len(lines) == 5
    assert all(len(line) == 30 + charts.AXIS - 1 for line in lines)
    assert lines[0].index("▾") - (charts.AXIS - 1) == frame.column(scenes.START + 30)
    assert "num_drafts" in lines[0]


def test_a_chart_of_nothing_is_empty() -> None:
    frame = charts.bucket([], lambda s: s.tokens_per_s, 10, 60.0)
    assert set(charts.chart(frame, 2).plain) <= set(" 01.\n")


def test_a_mark_outside_of_the_chart_is_left_out() -> None:
    frame = charts.bucket([scenes.stats(0)], lambda s: 1.0, 10, 60.0)
    assert "▾" not in charts.chart(frame, 2, marks=[charts.Mark(scenes.START - 999, "old")]).plain


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.3, 0.3), (41, 50), (80, 80), (81, 100), (1230, 1500)])
def test_an_axis_ends_at_a_round_number(value: float, top: float) -> None:
    assert charts.nice_ceiling(value) == pytest.approx(top)


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.37, 1.0, 7.0])
def test_a_bar_keeps_its_width(share: float) -> None:
    assert sum(len(text) for text, _ in charts.bar(share, 12)) == 12


# ---- actions


def test_no_key_and_no_command_means_two_things() -> None:
    keys = [(key, action.where) for action in actions.ACTIONS for key in action.key.split(",") if key]
    assert len(keys) == len(set(keys))
    slashes = [action.slash for action in actions.ACTIONS if action.slash]
    assert len(slashes) == len(set(slashes))


def test_every_action_says_what_it_does_in_a_sentence() -> None:
    assert all(action.sentence.endswith(".") and action.label for action in actions.ACTIONS)


def test_slash_commands_complete_by_prefix() -> None:
    assert [insert for insert, _ in actions.complete("/re", [])] == ["/requests", "/regenerate", "/rename "]
    assert [insert for insert, _ in actions.complete("/set num", ["num_drafts", "drafter"])] == ["/set num_drafts "]
    assert actions.complete("hello", []) == []
    assert actions.complete("/set num_drafts 4", ["num_drafts"]) == []


def test_a_slash_command_is_split_from_its_argument() -> None:
    found = actions.parse_slash("/system Be brief. ")
    assert found is not None
    assert (found[0].name, found[1]) == ("system", "Be brief.")
    assert actions.parse_slash("/nonsense") is None


# ---- settings and levers


def test_settings_refuse_with_the_range() -> None:
    settings = Settings().with_value("temperature", "0.2").with_value("max_tokens", "50").with_value("seed", "7")
    assert (settings.sampling.temperature, settings.limits.max_tokens, settings.sampling.seed) == (0.2, 50, 7)
    assert settings.with_value("seed", "none").sampling.seed is None
    assert settings.with_value("speculate", "off").speculate is False
    for name, value in (("temperature", "9"), ("top_p", "x"), ("seed", "-1"), ("speculate", "maybe")):
        with pytest.raises(SettingError, match=name):
            settings.with_value(name, value)


def test_levers_step_within_their_bounds() -> None:
    assert stepped(LEVERS["num_drafts"], 1) == 4
    assert stepped(LEVERS["pipelined_decode"], 1) is False
    assert stepped(LEVERS["mtp_gate"], -1) == "off"
    assert stepped(LEVERS["think_budget"], -1) in (0, -1)
    assert stepped(LEVERS["k_ladder"], 1) is None


def test_lever_values_are_shown_with_unit_and_parsed_with_bounds() -> None:
    assert show_value(LEVERS["num_drafts"], 3) == "3 drafts"
    assert show_value(LEVERS["think_budget"], -1) == "none"
    assert parse_value(LEVERS["think_budget"], "none") == -1
    with pytest.raises(LeverError, match="1 to 15"):
        parse_value(LEVERS["num_drafts"], "99")


@pytest.mark.parametrize(
    ("typed", "change"),
    [
        ("6", Change("6")),
        ("6 for 60s", Change("6", 60.0)),
        ("6 for 2 min guard 5%", Change("6", 120.0, 0.05)),
        ("auto --guard 10 --for 30", Change("auto", 30.0, 0.1)),
        ("4:3,8:1 for 9", Change("4:3,8:1", 9.0)),
    ],
)
def test_a_change_may_be_told_how_to_take_itself_back(typed: str, change: Change) -> None:
    assert parse_change(typed) == change


def test_a_guard_of_everything_is_refused() -> None:
    with pytest.raises(LeverError, match="below 100"):
        parse_change("6 guard 200%")


# ---- the line under a reply


@pytest.mark.parametrize(("speedup", "said"), [(1.374, "1.37x plain"), (0.81, "0.81x plain"), (None, "unmeasured")])
def test_the_speed_up_may_be_below_one_and_may_be_unmeasured(speedup: float | None, said: str) -> None:
    usage = scenes.done("r", scenes.tokens()).usage
    reply = Reply(request_id="r", status="done", reason="stop", usage=usage, speedup=speedup)
    assert said in reply_line(reply, 0.0).plain


def test_a_stopped_reply_says_so() -> None:
    reply = Reply(request_id="r", status="done", reason="cancelled", tokens=tuple(scenes.tokens("a b c")))
    assert reply_line(reply, 0.0).plain.startswith("stopped")


# ---- sessions


def spoken() -> Conversation:
    said = tuple(scenes.tokens("Hello there"))
    reply = Reply(request_id="r", status="done", tokens=said, decisions=((0, scenes.gate()),))
    return replace(new_conversation(5.0), turns=(Turn("user", "hi you"), Turn("assistant", "Hello there", reply)))


def test_a_conversation_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path), spoken()
    store.write(conversation)
    assert store.read(conversation.id) == conversation
    assert store.read("hi you") == conversation
    assert [path.suffix for path in (tmp_path / "sessions").iterdir()] == [".json"]


def test_a_reply_that_ran_when_the_file_was_written_is_over_when_it_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cut = replace(spoken(), turns=(Turn("user", "hi"), Turn("assistant", "He", Reply("r", status="streaming"))))
    store.write(cut)
    reply = store.read(cut.id).last_reply
    assert reply is not None
    assert reply.status == "done"


def test_a_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path), spoken()
    store.write(conversation)
    (tmp_path / "sessions" / "broken.json").write_text("{")
    assert [c.id for c in store.saved()] == [conversation.id]
    store.delete(conversation)
    with pytest.raises(SessionError, match="no saved conversation 'nope'"):
        store.read("nope")


def test_an_export_is_markdown_with_both_voices(tmp_path: Path) -> None:
    path = Store(tmp_path).export(replace(spoken(), system="Be kind."), str(tmp_path / "out.md"))
    assert path.read_text() == "# hi you\n\n> Be kind.\n\n## You\n\nhi you\n\n## Model\n\nHello there\n"


def test_typed_lines_are_remembered_with_their_line_breaks(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.history() == []
    store.remember("one\ntwo")
    store.remember("three")
    assert Store(tmp_path).history() == ["one\ntwo", "three"]


# ---- the token flow


def laid_out(said: list[Token], width: int) -> list[list[Piece]]:
    lines: list[list[Piece]] = []
    flow(said, width, lines, 0)
    return lines


def test_tokens_wrap_at_the_width_and_at_line_breaks() -> None:
    said = [
        Token(id=i, lane="plain", draft=0, step=i, text=t) for i, t in enumerate(["Hello", " big", " world", "\nx"])
    ]
    lines = laid_out(said, 10)
    assert ["".join(p.text for p in line) for line in lines] == ["Hello big", " world⏎", "x"]
    assert lines[2][0].index == 3


def test_a_token_wider_than_the_screen_is_cut_and_an_empty_one_can_be_reached() -> None:
    said = [Token(id=0, lane="plain", draft=0, step=0, text="x" * 25), Token(id=1, lane="plain", draft=0, step=1)]
    lines = laid_out(said, 10)
    assert [sum(len(p.text) for p in line) for line in lines] == [10, 10, 6]
    assert lines[-1][-1] == Piece(1, "·")


def test_laying_out_step_by_step_gives_the_same_lines_as_at_once() -> None:
    said = scenes.tokens()
    grown: list[list[Piece]] = []
    for end in range(0, len(said), 7):
        flow(said[: end + 7], 40, grown, end)
    assert grown == laid_out(said, 40)
