"""The chat as a user drives it, against a server that speaks the real wire."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from textual import events
from textual.widgets import Markdown

from engine.protocol import wire
from tests.tui import scenes
from tests.tui.conftest import type_text, until
from tests.tui.fake_server import FakeServer
from tui.panels.chat.prompt import Editor, Prompt
from tui.panels.chat.side import Side
from tui.panels.chat.transcript import Answer, Note, Transcript
from tui.panels.levers.lever_list import LeverList
from tui.pickers import HelpScreen, Picker
from tui.program import MetraleApp
from tui.sessions import Store

Make = Callable[..., MetraleApp]
WIDE = (120, 40)


def answered(app: MetraleApp) -> bool:
    reply = app.state.reply
    return reply is not None and reply.status == "done"


def drawn(app: MetraleApp) -> str:
    """The Markdown of the first reply on the screen; nothing while it is not there."""
    found = app.query(Markdown)
    return found.first().source if found else ""


async def test_a_message_streams_back_as_markdown_with_its_numbers(connected: Make, server: FakeServer) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "hi there")
        await pilot.press("enter")
        await until(pilot, lambda: answered(app))
        await until(pilot, lambda: drawn(app) == scenes.ANSWER, "all text on the screen")
        numbers = app.query(Answer).first().numbers
        await until(pilot, lambda: str(numbers.render()).endswith("1.37x plain"))
        chat = server.said(wire.Chat)[0]
        assert isinstance(chat, wire.Chat)
        assert [(m.role, m.content) for m in chat.messages] == [("user", "hi there")]


async def test_escape_stops_at_once_keeps_the_text_and_gives_the_input_back(
    connected: Make, server: FakeServer
) -> None:
    server.tokens_per_s = 30
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "go")
        await pilot.press("enter")
        await until(pilot, lambda: len(app.state.conversation.last_answer) > 20)
        await pilot.press("escape")
        await until(pilot, lambda: answered(app))
        kept = app.state.conversation.last_answer
        assert kept
        assert scenes.ANSWER.startswith(kept)
        assert server.said(wire.Stop)
        assert app.state.reply is not None
        assert app.state.reply.reason == "cancelled"
        assert isinstance(app.focused, Editor)


async def test_enter_sends_but_a_pasted_line_break_does_not(connected: Make, server: FakeServer) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        app.post_message(events.Paste("first\nsecond\n"))
        await until(pilot, lambda: "second" in app.query_one(Editor).text)
        assert not server.said(wire.Chat)
        await pilot.press("ctrl+j", "x", "enter")
        await until(pilot, lambda: server.said(wire.Chat))
        chat = server.said(wire.Chat)[0]
        assert isinstance(chat, wire.Chat)
        assert chat.messages[0].content == "first\nsecond\n\nx"


async def test_what_was_typed_comes_back_with_the_arrows_and_the_draft_is_kept(connected: Make, store: Store) -> None:
    store.remember("older")
    store.remember("newer")
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        editor = app.query_one(Editor)
        await type_text(pilot, "draft")
        await pilot.press("up")
        assert editor.text == "newer"
        await pilot.press("up", "up")
        assert editor.text == "older"
        await pilot.press("down", "down")
        assert editor.text == "draft"


async def test_history_is_searched(connected: Make, store: Store) -> None:
    for line in ("tell a joke", "write a poem", "explain jokes"):
        store.remember(line)
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, Picker))
        await type_text(pilot, "poem")
        await pilot.press("enter")
        await until(pilot, lambda: app.query_one(Editor).text == "write a poem")


async def test_slash_commands_complete_with_tab(connected: Make) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.levers)
        await pilot.pause(0.3)
        await type_text(pilot, "/se")
        await pilot.press("tab")
        await type_text(pilot, "num_dr")
        await pilot.press("tab")
        assert app.query_one(Editor).text == "/set num_drafts "


async def test_set_asks_for_a_lever_and_shows_the_new_value_when_the_engine_has_it(
    connected: Make, server: FakeServer
) -> None:
    server.hold_levers = True
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "/set num_drafts 6")
        await pilot.press("enter")
        await until(pilot, lambda: "num_drafts" in app.state.pending)
        await until(pilot, lambda: "→ 6 drafts" in side_levers(app))
        assert app.state.levers["num_drafts"].value == 3
        server.hold_levers = False
        await until(pilot, lambda: app.state.levers["num_drafts"].value == 6)
        await until(pilot, lambda: "6 drafts" in side_levers(app))
        change = server.said(wire.SetLever)[0]
        assert isinstance(change, wire.SetLever)
        assert change.expected == 3
        await type_text(pilot, "/undo")
        await pilot.press("enter")
        await until(pilot, lambda: app.state.levers["num_drafts"].value == 3)


def side_levers(app: MetraleApp) -> str:
    levers = app.query_one("#side-levers", LeverList)
    return "\n".join(levers.render_line(y).text for y in range(levers.size.height))


async def test_set_changes_how_the_chat_asks(connected: Make, server: FakeServer) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        for line in ("/set temperature 0", "/set max_tokens 7", "/set logprobs 3", "/system Be brief.", "hello"):
            await type_text(pilot, line)
            await pilot.press("enter")
        await until(pilot, lambda: server.said(wire.Chat))
        chat = server.said(wire.Chat)[0]
        assert isinstance(chat, wire.Chat)
        assert (chat.sampling.temperature, chat.sampling.logprobs, chat.limits.max_tokens) == (0.0, 3, 7)
        assert chat.messages[0] == wire.ChatTurn(role="system", content="Be brief.")


async def test_regenerate_asks_again_and_edit_takes_the_message_back(connected: Make, server: FakeServer) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "hi")
        await pilot.press("enter")
        await until(pilot, lambda: answered(app))
        await pilot.press("ctrl+g")
        await until(pilot, lambda: len(server.said(wire.Chat)) == 2)
        await until(pilot, lambda: answered(app))
        assert len(app.state.conversation.turns) == 2
        await until(pilot, lambda: len(app.query(Answer)) == 1)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: not app.state.conversation.turns)
        assert app.query_one(Editor).text == "hi"
        await until(pilot, lambda: len(app.query(Answer)) == 0)


async def test_a_conversation_is_saved_by_itself_and_opened_again(connected: Make, store: Store) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "remember me")
        await pilot.press("enter")
        await until(pilot, lambda: answered(app))
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not app.state.conversation.turns)
        await until(pilot, lambda: len(app.query(Answer)) == 0)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(app.screen, Picker))
        await pilot.press("enter")
        await until(pilot, lambda: app.state.conversation.name == "remember me")
        await until(pilot, lambda: len(app.query(Answer)) == 1)
        await type_text(pilot, "/rename first talk")
        await pilot.press("enter")
        await until(pilot, lambda: store.read("first talk"))


async def test_an_export_lands_where_it_was_asked_for(connected: Make, tmp_path: Path) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "hi")
        await pilot.press("enter")
        await until(pilot, lambda: answered(app))
        await app.perform("export", str(tmp_path / "talk.md"))
        assert scenes.ANSWER in (tmp_path / "talk.md").read_text()


async def test_the_last_reply_and_its_code_are_copied(connected: Make) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "hi")
        await pilot.press("enter")
        await until(pilot, lambda: answered(app))
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.clipboard == scenes.ANSWER)
        await app.perform("copy_code", "")
        assert app.clipboard.startswith("def accept(drafts, verified):\n")
        assert app.clipboard.endswith("return len(drafts)\n")


async def test_escape_sequences_of_the_model_reach_neither_screen_nor_file(
    connected: Make, server: FakeServer, store: Store
) -> None:
    server.answer = "before \x1b]52;c;aGFja2Vk\x07\x1b[2J after"
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "hi")
        await pilot.press("enter")
        await until(pilot, lambda: answered(app))
        await until(pilot, lambda: "after" in drawn(app))
        assert "\x1b" not in drawn(app)
        assert "\x1b" not in store.read("hi").last_answer
        assert "\x1b]52" not in app.export_screenshot()


async def test_a_message_before_the_model_is_ready_is_sent_once_it_is(connected: Make, server: FakeServer) -> None:
    server.load_s = 3
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.loading.stage == "reading weights")
        await type_text(pilot, "hi")
        await pilot.press("enter")
        await pilot.pause(0.1)
        assert app.query_one(Editor).text == "hi"
        assert not server.said(wire.Chat)
        await until(pilot, lambda: server.said(wire.Chat))
        await until(pilot, lambda: not app.query_one(Editor).text)


async def test_a_cut_connection_is_told_resumed_and_not_repeated(connected: Make, server: FakeServer) -> None:
    server.tokens_per_s = 20
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "hi")
        await pilot.press("enter")
        await until(pilot, lambda: app.state.reply is not None and len(app.state.reply.tokens) >= 6)
        await server.drop()
        await until(pilot, lambda: app.state.link.drops == 1)
        await until(pilot, lambda: app.state.ready)
        reply = app.state.reply
        assert reply is not None
        hello = server.said(wire.Hello)[-1]
        assert isinstance(hello, wire.Hello)
        assert hello.resume == "s1"
        assert hello.received == {reply.request_id: len(reply.tokens)}


async def test_a_refusal_is_final_and_says_why(connected: Make, server: FakeServer) -> None:
    server.refuse = "The token is missing or wrong."
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.link.phase == "refused")
        await until(pilot, lambda: "token is missing" in app.query_one("#welcome").render().plain)  # type: ignore[union-attr]
        assert len(server.said(wire.Hello)) == 1


async def test_a_reader_cannot_change_levers(connected: Make, server: FakeServer) -> None:
    server.role = "read"
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "/set num_drafts 6")
        await pilot.press("enter")
        await pilot.pause(0.2)
        assert not server.said(wire.SetLever)
        assert not app.state.pending


async def test_the_side_panel_yields_on_a_small_terminal_and_can_be_had_back(connected: Make) -> None:
    app = connected()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert not app.query_one(Side).display
        await pilot.press("ctrl+b")
        await until(pilot, lambda: app.query_one(Side).display)


async def test_help_lists_every_action_and_escape_only_closes_it(connected: Make) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, HelpScreen))


async def test_notes_stand_in_the_transcript_but_not_in_the_conversation(connected: Make) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.stats)
        await app.perform("stats", "")
        await app.perform("model", "")
        assert len(app.query_one(Transcript).query(Note)) == 2
        assert not app.state.conversation.turns


async def test_a_question_mark_is_only_a_question_mark_while_typing(connected: Make) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await type_text(pilot, "p")
        await pilot.press("question_mark", "3")
        assert app.query_one(Prompt).editor.text == "p?3"


async def test_ctrl_c_stops_then_clears_then_leaves(connected: Make, server: FakeServer) -> None:
    server.tokens_per_s = 20
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.state.ready)
        await type_text(pilot, "hi")
        await pilot.press("enter")
        await until(pilot, lambda: app.state.conversation.last_answer)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: answered(app))
        await type_text(pilot, "words")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.query_one(Editor).text)
        await pilot.press("ctrl+c", "ctrl+c")
        await until(pilot, lambda: not app.is_running)


async def test_ctrl_d_leaves_only_an_empty_input(connected: Make) -> None:
    app = connected()
    async with app.run_test(size=WIDE) as pilot:
        await type_text(pilot, "ab")
        await pilot.press("left", "ctrl+d")
        assert app.query_one(Editor).text == "a"
        assert app.is_running
        await pilot.press("backspace", "ctrl+d")
        await until(pilot, lambda: not app.is_running)
