"""The page in a real headless Chromium against a scripted wire server: live figures, levers, requests, states."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from engine.protocol import wire
from engine.protocol.commands import CHAT_SAMPLING
from engine.protocol.events import Token
from telemetry.names import GateReason
from tests.dashboards.chromium import Page
from tests.dashboards.fake_server import REQUESTS, FakeServer, gate, live, requests, running, stats

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

CONDITION = "document.documentElement.dataset.condition"


async def opened(page: Page, server: FakeServer, view: str = "overview", fragment: str = "") -> None:
    await page.goto(f"{server.url}#view={view}{fragment}")
    await page.until(f"{CONDITION} !== 'connecting' && {CONDITION} !== 'disconnected'")


def figure(name: str) -> str:
    return f"document.querySelector('[data-figure={name}] .value').textContent"


def lever_input(name: str) -> str:
    return f'[data-lever="{name}"] .control > *'


async def set_lever(page: Page, name: str, value: str) -> None:
    """Type a value as a person does: click, select all, write, Enter."""
    await page.click(lever_input(name))
    await page.run(f"document.querySelector('{lever_input(name)}').select()")
    await page.type(value)
    await page.key("Enter")


# ---- live figures -------------------------------------------------------------------------------------------


async def test_the_figures_are_those_that_were_sent(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    now = time.time()
    await server.send(stats(when=now, tokens_per_s=123.4), gate())
    await page.until(f"{figure('throughput')} === '123'")
    assert await page.run(figure("ttft")) == "182"
    assert await page.run(figure("tpot")) == "21.3"
    assert await page.run(figure("batch")) == "3"
    assert await page.run(figure("kv")) == "25"
    assert "4,096 of 16,384 tok" in await page.text("[data-figure=kv]")
    assert "ngram" in await page.text("[data-figure=lane]")
    assert "plain 41.2 tok/s" in await page.text("[data-figure=throughput]")
    assert await page.text("#model") == "SmolLM2-135M-Instruct"


async def test_every_headline_figure_has_a_unit_and_all_have_an_age(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    await server.send(stats())
    await page.until(f"{CONDITION} === 'live'")
    units = await page.run("[...document.querySelectorAll('[data-figure] .unit')].map(e => e.textContent)")
    assert units == ["tok/s", "ms", "ms", "seq", "%", ""]
    assert "updated" in await page.text(".strip > .age")


async def test_a_chart_draws_pixels_and_its_table_holds_the_same_numbers(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    now = time.time()
    for index in range(100):
        await server.send(stats(index, when=now - 10 + index / 10, tokens_per_s=50.0))
    await page.until("document.querySelector('#c-throughput-data')")
    await page.click("#c-throughput-data > summary")
    await page.until("document.querySelectorAll('#c-throughput-data tbody tr').length >= 10")
    assert "50" in await page.text("#c-throughput-data tbody tr:nth-child(2) td")
    inked = await page.run(
        "(() => { const c = document.querySelector('.chart canvas'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0;"
        " for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"
    )
    assert inked > 500


async def test_a_lever_change_is_marked_in_the_table_behind_the_chart(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    now = time.time()
    for index in range(40):
        await server.send(stats(index, when=now - 4 + index / 10))
    event = server.change(wire.SetLever(change_id="c1", name="num_drafts", value=7))
    await server.send(event, stats(41, when=time.time() + 0.6), stats(42, when=time.time() + 1.2))
    await page.click("#c-throughput-data > summary")
    await page.until("document.querySelector('#c-throughput-data tbody').textContent.includes('num_drafts')")


async def test_lanes_show_acceptance_by_position_and_why_not_in_words(page: Page, server: FakeServer) -> None:
    await opened(page, server, "lanes")
    await server.send(stats(), stats())
    await page.until("document.querySelector('#panel-lanes').textContent.includes('67 %')")
    words = await page.text("#panel-lanes")
    assert "the gate measured plain decoding as faster" in words
    assert "its lever is off" in words


async def test_the_gate_shows_both_arms_with_spread_and_its_reason_in_words(page: Page, server: FakeServer) -> None:
    await opened(page, server, "gate")
    await server.send(gate(), gate(reason=GateReason.PROBE, mode="plain"))
    await page.until("document.querySelector('#panel-gate').textContent.includes('Trying speculation')")
    words = await page.text("#panel-gate")
    assert "52.6" in words
    assert "± 3.10" in words
    assert "384" in words
    assert "stale" in words
    assert "2.60 tok/s" in words
    assert "Prefers plain, ran verify last" in words


async def test_losses_cost_and_a_database_problem_are_shown(page: Page, server: FakeServer) -> None:
    await opened(page, server, "telemetry")
    await server.send(stats(lost={"records": 1234}, database="The disk is full.", skipped=3))
    await server.send(wire.Log(time=time.time(), level="warning", message="<b>slow</b> disk"))
    await page.until("document.querySelector('#panel-telemetry').textContent.includes('1,234')")
    words = await page.text("#panel-telemetry")
    assert "The disk is full." in words
    assert "0.42" in words
    assert "<b>slow</b> disk" in words


# ---- levers -------------------------------------------------------------------------------------------------


async def test_a_lever_is_pending_until_the_engine_says_it_took_effect(page: Page, server: FakeServer) -> None:
    server.hold_levers = True
    await opened(page, server, "levers")
    await set_lever(page, "num_drafts", "5")
    await page.until("document.querySelector('[data-lever=num_drafts] .lever-note').textContent === 'pending'")
    assert "default" in await page.text("[data-lever=num_drafts] .source")
    await page.key("Tab")  # leaving the field must not ask again
    await asyncio.sleep(0.2)
    [asked] = server.held
    assert (asked.name, asked.value, asked.expected) == ("num_drafts", 5, 3)
    await server.send(server.change(asked))
    await page.until("document.querySelector('[data-lever=num_drafts] .source').textContent === 'set by operator'")
    assert await page.text("[data-lever=num_drafts] .lever-note") == ""
    assert "num_drafts" in await page.text("#panel-levers tbody")


async def test_a_refused_value_shows_the_sentence_and_the_value_in_force(page: Page, server: FakeServer) -> None:
    await opened(page, server, "levers")
    await set_lever(page, "num_drafts", "99")
    await page.until("document.querySelector('[data-lever=num_drafts] .lever-note').textContent.includes('1 to 15')")
    await page.until(f"document.querySelector('{lever_input('num_drafts')}').value === '3'")


async def test_a_switch_a_choice_and_a_word_for_none_reach_the_wire(page: Page, server: FakeServer) -> None:
    await opened(page, server, "levers")
    await page.click(lever_input("pipelined_decode"))
    await page.until("document.querySelector('[data-lever=pipelined_decode] [role=switch]').ariaChecked === 'false'")
    await page.run(
        f"(() => {{ const s = document.querySelector('{lever_input('mtp_gate')}'); s.value = 'force';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    await set_lever(page, "think_budget", "200")
    await page.until("document.querySelector('[data-lever=think_budget] .source').textContent.includes('operator')")
    await set_lever(page, "think_budget", "none")
    await asyncio.sleep(0.2)
    asked = [(message.name, message.value) for message in server.of(wire.SetLever)]
    assert asked == [("pipelined_decode", False), ("mtp_gate", "force"), ("think_budget", 200), ("think_budget", -1)]


async def test_the_options_of_the_next_change_go_with_it_and_are_used_once(page: Page, server: FakeServer) -> None:
    await opened(page, server, "levers")
    for selector, value in (("#lever-for", "60"), ("#lever-guard", "10"), ("#lever-reason", "to see")):
        await page.click(selector)
        await page.type(value)
    await set_lever(page, "num_drafts", "4")
    await page.until("document.querySelector('[data-lever=num_drafts] .source').textContent.includes('reverts in')")
    [asked] = server.of(wire.SetLever)
    assert isinstance(asked, wire.SetLever)
    assert (asked.for_seconds, asked.guard, asked.reason) == (60, 0.1, "to see")
    assert await page.run("document.querySelector('#lever-for').value") == ""


async def test_undo_asks_for_the_value_before(page: Page, server: FakeServer) -> None:
    await opened(page, server, "levers")
    await set_lever(page, "num_drafts", "4")
    await page.until("document.querySelector('#panel-levers tbody button')")
    await page.click("#panel-levers tbody button")
    await page.until(f"document.querySelector('{lever_input('num_drafts')}').value === '3'")
    [undo] = server.of(wire.UndoLever)
    [asked] = server.of(wire.SetLever)
    assert undo.of == asked.change_id


async def test_lossy_levers_are_marked_and_those_of_the_start_cannot_be_edited(page: Page, server: FakeServer) -> None:
    await opened(page, server, "levers")
    assert "lossy" in await page.text("[data-lever=think_budget] .lever-head")
    assert "lossy" not in await page.text("[data-lever=num_drafts] .lever-head")
    assert await page.run(f"document.querySelector('{lever_input('kv_tokens')}').disabled")


async def test_with_read_access_nothing_can_be_changed(page: Page, server: FakeServer) -> None:
    server.role = "read"
    await opened(page, server, "levers")
    await page.until(f"document.querySelector('{lever_input('num_drafts')}').disabled")
    await page.click("#tab-chat")
    await page.until("document.querySelector('.composer button[type=submit]').disabled")
    assert "may read" in await page.text("#banner")


# ---- requests, SQL ------------------------------------------------------------------------------------------


async def test_requests_sort_filter_and_cancel(page: Page, server: FakeServer) -> None:
    await opened(page, server, "requests")
    await server.send(requests())
    ids = "[...document.querySelectorAll('#panel-requests tbody th')].map(e => e.textContent).join()"
    await page.until(f"{ids} === 'req-c,req-b,req-a,req-d'")
    await page.click("[data-key=output_tokens] button")
    await page.until(f"{ids} === 'req-d,req-a,req-b,req-c'")
    assert await page.run("document.querySelector('[data-key=output_tokens]').ariaSort") == "descending"
    await page.click("#request-running")
    await page.until(f"{ids} === 'req-a,req-b,req-c'")
    await page.click("#request-search")
    await page.type("mixed")
    await page.until(f"{ids} === 'req-b'")
    await page.click("#panel-requests tbody button")
    await asyncio.sleep(0.2)
    assert [message.request_id for message in server.of(wire.Stop)] == ["req-b"]


async def test_a_query_fills_the_table_and_an_error_is_a_sentence(page: Page, server: FakeServer) -> None:
    await opened(page, server, "sql")
    await page.until("document.querySelector('.views').textContent.includes('throughput_by_lane')")
    await page.click(".views button")
    await page.until("document.querySelectorAll('.result tbody tr').length === 40")
    assert await page.run("document.querySelector('#sql-input').value") == "SELECT * FROM throughput_by_lane LIMIT 200"
    assert "NULL" in await page.text(".result tbody tr")
    assert "40 rows in 12.3 ms" in await page.text("#panel-sql")
    await page.run("document.querySelector('#sql-input').value = 'SELECT * FROM nonsense'")
    await page.click("#sql-input")
    await page.key("Enter", modifiers=2)
    await page.until("document.querySelector('#panel-sql .error').textContent.includes('Did you mean')")


async def test_a_replay_that_the_server_refuses_leaves_the_page_live(page: Page, server: FakeServer) -> None:
    await opened(page, server, "runs")
    await page.click("[data-run=run-7] button")
    await page.until(f"{CONDITION} === 'replay'")
    await server.send(wire.Problem(message="This server cannot replay runs."), stats())
    await page.until(f"{CONDITION} === 'live'")
    assert "cannot replay" in await page.text("#message")


async def test_a_report_has_a_section_for_each_view_and_says_when_one_is_empty(page: Page, server: FakeServer) -> None:
    await opened(page, server, "runs")
    await page.click("[data-run=run-7] button[aria-label^=Report]")
    await page.until("document.querySelectorAll('.report section').length === 10")
    await page.until("document.querySelectorAll('.report [data-view=lanes] tbody tr').length === 20")
    losses = "document.querySelector('.report [data-view=losses_by_kind]')"  # answers come one by one
    await page.until(f"{losses}.textContent.includes('Nothing of this kind')")
    await page.until("!document.querySelector('.report').textContent.includes('Asking')")
    asked = [query.sql for query in server.of(wire.Query) if "WHERE run = 7" in query.sql]
    assert len(asked) == 10


# ---- states -------------------------------------------------------------------------------------------------


async def test_loading_shows_stage_and_progress_until_the_engine_is_ready(page: Page, server: FakeServer) -> None:
    server.state = "loading"
    await opened(page, server)
    await server.send(wire.Load(state="loading", stage="weights", done=49_000_000, total=98_000_000))
    await page.until("document.querySelector('#banner').textContent.includes('49.0 MB of 98.0 MB')")
    assert await page.run("document.querySelector('#progress').value / document.querySelector('#progress').max") == 0.5
    await server.send(wire.Load(state="ready"))
    await page.until(f"{CONDITION} === 'empty'")
    await page.until("document.querySelector('#progress').hidden")


async def test_a_failed_load_shows_its_sentence(page: Page, server: FakeServer) -> None:
    server.state = "loading"
    await opened(page, server)
    await server.send(wire.Load(state="failed", message="The model file is truncated: fetch it again."))
    await page.until("document.querySelector('#banner').textContent.includes('fetch it again')")


async def test_figures_that_stop_coming_are_called_stale(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    await server.send(stats())
    await page.until(f"{CONDITION} === 'live'")
    await page.until(f"{CONDITION} === 'stale'", within=8)
    assert "No new figures" in await page.text("#banner")


async def test_a_lost_connection_is_said_and_comes_back_by_itself(page: Page, server: FakeServer) -> None:
    page.excuse("WebSocket connection")
    await opened(page, server)
    await server.send(stats())
    await page.until(f"{CONDITION} === 'live'")
    await server.drop()
    await page.until(f"{CONDITION} === 'disconnected'")
    assert "What you see is" in await page.text("#banner")
    await page.until(f"{CONDITION} !== 'disconnected'")
    await server.send(stats(1))
    await page.until(f"{CONDITION} === 'live'")
    [first, second] = server.of(wire.Hello)
    assert (first.resume, second.resume) == ("", "session-1")


async def test_the_page_survives_a_restart_of_the_server(page: Page, server: FakeServer) -> None:
    page.excuse("WebSocket connection")
    async with running(FakeServer()) as first:
        await opened(page, first)
        port = first.port
    await page.until(f"{CONDITION} === 'disconnected'")
    async with running(FakeServer(port=port, sessions=5)):
        await page.run("document.querySelector('#retry').click()")
        await page.until(f"{CONDITION} === 'empty'")


async def test_a_refusal_is_shown_and_a_new_token_in_the_address_tries_again(page: Page, server: FakeServer) -> None:
    server.refusal = "The token is wrong: open the address that the server printed."
    await opened(page, server, fragment="&token=old")
    await page.until(f"{CONDITION} === 'refused'")
    assert "open the address" in await page.text("#banner")
    server.refusal = ""
    await page.run("location.hash = '#view=overview&token=new'")
    await page.until(f"{CONDITION} === 'empty'")
    assert [hello.token for hello in server.of(wire.Hello)] == ["old", "new"]
    assert not any("old" in url or "new" in url for url in page.sockets)


async def test_another_wire_version_asks_for_a_reload(page: Page, server: FakeServer) -> None:
    server.version = 99
    await opened(page, server)
    await page.until("document.querySelector('#banner').textContent.includes('reload the page')")


async def test_pause_keeps_the_figures_still_and_goes_on_collecting(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    now = time.time()
    for index in range(30):
        await server.send(stats(when=now + index / 10, tokens_per_s=40.0))
    await page.until(f"{figure('throughput')} === '40.0'")
    await page.click("#pause")
    await page.until("document.querySelector('#banner').textContent.includes('Paused')")
    for index in range(30, 80):
        await server.send(stats(when=now + index / 10, tokens_per_s=90.0))
    await asyncio.sleep(0.7)
    assert await page.run(figure("throughput")) == "40.0"
    await page.click("#pause")
    await page.until(f"{figure('throughput')} === '90.0'")
    await page.click("#c-throughput-data > summary")
    table = "document.querySelector('#c-throughput-data tbody').textContent"
    await page.until(f"{table}.includes('90') && {table}.includes('40')")


async def test_a_replay_shows_the_past_and_ends_with_the_present(page: Page, server: FakeServer) -> None:
    await opened(page, server, "runs")
    await page.click("[data-run=run-7] button")
    await page.until(f"{CONDITION} === 'replay'")
    await server.send(stats(tokens_per_s=999.0))
    past = time.time() - 5000
    for index in range(30):
        await server.send(
            stats(when=past + index / 10, tokens_per_s=77.0, replay_run="run-7", replay_position=index / 10)
        )
    await page.until(f"{figure('throughput')} === '77.0'")
    assert "Replay of run-7" in await page.text("#banner")
    await page.run(
        "(() => { const r = document.querySelector('#replay-position'); r.value = '45';"
        " r.dispatchEvent(new Event('input')); r.dispatchEvent(new Event('change')); })()"
    )
    await page.run("document.querySelector('.player button:nth-of-type(2)').click()")
    await server.send(stats(tokens_per_s=55.0))
    await page.until(f"{figure('throughput')} === '55'")
    actions = [(message.action, message.position) for message in server.of(wire.Replay)]
    assert actions == [("start", 0), ("seek", 45), ("stop", 0)]


# ---- chat ---------------------------------------------------------------------------------------------------


async def ask(page: Page, question: str = "Why is the sky blue?") -> None:
    await page.click("#chat-input")
    await page.type(question)
    await page.key("Enter")


async def test_a_reply_streams_as_text_and_ends_with_its_line(page: Page, server: FakeServer) -> None:
    await opened(page, server, "chat")
    await ask(page)
    await page.until("document.querySelector('.reply .reply-line')?.textContent.includes('finished')")
    assert await page.text(".reply .words strong") == "short waves"
    assert await page.text(".reply .words pre") == "print(4)"
    assert "<b>no markup</b>" in await page.text(".reply .words")
    assert await page.run("document.querySelector('.reply .words b')") is None
    line = await page.text(".reply .reply-line")
    for part in ("TTFT 182 ms", "24 tok", "12 of 18 drafts accepted (67 %)", "0.94× plain decoding"):
        assert part in line
    [chat] = server.of(wire.Chat)
    assert isinstance(chat, wire.Chat)
    assert [turn.content for turn in chat.messages] == ["Why is the sky blue?"]
    assert (chat.sampling.temperature, chat.sampling.top_p) == (CHAT_SAMPLING.temperature, CHAT_SAMPLING.top_p)


async def test_the_second_question_carries_the_conversation(page: Page, server: FakeServer) -> None:
    await opened(page, server, "chat")
    await ask(page)
    await page.until("document.querySelector('.reply .reply-line')?.textContent.includes('finished')")
    await ask(page, "And at night?")
    await page.until("document.querySelectorAll('.reply .actions:not([hidden])').length === 2")
    chat = server.of(wire.Chat)[1]
    assert [turn.role for turn in chat.messages] == ["user", "assistant", "user"]


async def test_escape_stops_the_reply_and_keeps_its_text(page: Page, server: FakeServer) -> None:
    server.auto_chat = False
    await opened(page, server, "chat")
    await ask(page)
    await page.until("document.querySelector('.reply')")
    chat = server.of(wire.Chat)[0]
    token = Token(id=1, lane="plain", draft=0, step=1, text="Half a")
    await server.send(wire.Delta(request_id=chat.request_id, text="", tokens=(token,)))
    await page.until("document.querySelector('.reply .words').textContent === 'Half a'")
    await page.key("Escape")
    await page.until("document.querySelector('.reply .reply-line').textContent.includes('stopped')")
    assert await page.text(".reply .words") == "Half a"
    assert len(server.of(wire.Stop)) == 1


async def test_a_refused_question_shows_why(page: Page, server: FakeServer) -> None:
    server.auto_chat = False
    await opened(page, server, "chat")
    await ask(page)
    await page.until("document.querySelector('.reply')")
    request_id = server.of(wire.Chat)[0].request_id
    await server.send(wire.Problem(message="The prompt is longer than the context.", request_id=request_id))
    await page.until("document.querySelector('.reply .error').textContent.includes('longer than the context')")


async def test_provenance_names_lane_draft_alternatives_and_what_was_refused(page: Page, server: FakeServer) -> None:
    await opened(page, server, "chat")
    await server.send(gate())
    await ask(page)
    await page.until("document.querySelector('.reply .reply-line')?.textContent.includes('finished')")
    await page.run("document.activeElement.blur()")
    await page.key("v")
    await page.until("document.querySelectorAll('.tok').length === 24")
    await page.run("document.querySelector('.tok').focus()")
    await page.key("ArrowRight")
    await page.key("ArrowRight")
    words = await page.until("document.querySelector('.inspector').textContent")
    assert "1st draft of its step, accepted" in words
    assert "80 %" in words
    assert "Keeping the arm" in words
    await page.run("document.querySelector('.tok[data-rejected]').focus()")
    words = await page.text(".inspector")
    assert "Refused here" in words
    assert '#17 " no17"' in words
    looks = (
        "(s => { const c = getComputedStyle(document.querySelector(s));"
        " return [c.textDecorationLine, c.backgroundColor]; })"
    )
    drafted = await page.run(f"{looks}('.tok[data-draft]')")
    own = await page.run(f"{looks}('.tok:not([data-draft])')")
    assert drafted[0] == "underline"
    assert own[0] == "none"
    assert (
        await page.run("[...document.querySelectorAll('.tokens .code')].map(e => e.textContent).join()")
        == "NG,PL,NG,PL"
    )
    assert "rgba(0, 0, 0, 0)" not in (drafted[1], own[1])


# ---- keyboard, narrow, accessible ---------------------------------------------------------------------------


async def test_tabs_are_one_stop_and_arrows_move_among_them(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    await page.run("document.querySelector('#tab-overview').focus()")
    await page.key("ArrowRight")
    await page.until("document.activeElement.id === 'tab-chat' && !document.querySelector('#panel-chat').hidden")
    await page.key("End")
    await page.until("document.activeElement.id === 'tab-telemetry'")
    stops = await page.run("[...document.querySelectorAll('[role=tab]')].filter(e => e.tabIndex === 0).length")
    assert stops == 1
    assert "view=telemetry" in await page.run("location.hash")


async def test_single_keys_open_panels_but_not_while_writing(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    await page.key("5")
    await page.until("!document.querySelector('#panel-lanes').hidden")
    await page.key("?")
    await page.until("document.querySelector('#keys').open")
    await page.key("Escape")
    await page.until("!document.querySelector('#keys').open")
    await page.key("/")
    await page.until("document.activeElement.id === 'chat-input'")
    await page.key("5")
    assert await page.run("document.querySelector('#chat-input').value") == "5"
    assert await page.run("document.querySelector('#panel-lanes').hidden")


async def test_the_keyboard_alone_reaches_a_lever_and_changes_it(page: Page, server: FakeServer) -> None:
    await opened(page, server, "levers")
    for _ in range(60):
        await page.key("Tab")
        if await page.run("document.activeElement.closest('[data-lever=num_drafts]') !== null"):
            break
    await page.key("ArrowUp")
    await page.key("Enter")
    await page.until("document.querySelector('[data-lever=num_drafts] .source').textContent.includes('operator')")
    assert server.levers["num_drafts"] == 4


@pytest.mark.parametrize(
    "view", ["overview", "chat", "levers", "requests", "lanes", "gate", "sql", "runs", "telemetry"]
)
async def test_nothing_overflows_a_narrow_screen(page: Page, server: FakeServer, view: str) -> None:
    await page.size(360, 740)
    await opened(page, server, view)
    await server.send(stats(), gate(), requests(*REQUESTS))
    await page.until(f"{CONDITION} === 'live'")
    assert await page.run("document.documentElement.scrollWidth") <= 360


async def test_every_control_has_a_name(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    await server.send(stats(), gate(), requests())
    await ask_in_all_panels(page)
    tree = await page.call("Accessibility.getFullAXTree")
    roles = {
        "button",
        "textbox",
        "combobox",
        "switch",
        "checkbox",
        "radio",
        "slider",
        "tab",
        "searchbox",
        "spinbutton",
        "figure",
        "table",
    }
    nameless = [
        node["role"]["value"]
        for node in tree["nodes"]
        if not node.get("ignored")
        and node.get("role", {}).get("value") in roles
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []


async def ask_in_all_panels(page: Page) -> None:
    """Every panel open at once, so that one look at the tree sees all controls."""
    for view in ("chat", "levers", "requests", "lanes", "gate", "sql", "runs", "telemetry", "overview"):
        await page.run(f"document.querySelector('#tab-{view}').click()")
    await page.run(
        "document.querySelectorAll('[role=tabpanel], details').forEach(e => { e.hidden = false; e.open = true; })"
    )


async def test_every_chart_is_a_figure_with_a_table_of_its_data(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    found = await page.run(
        "[...document.querySelectorAll('.chart')].map(f => [f.getAttribute('role'),"
        " document.getElementById(f.getAttribute('aria-details'))?.querySelector('table') !== null,"
        " document.getElementById(f.getAttribute('aria-labelledby'))?.textContent])"
    )
    assert len(found) >= 9
    assert all(role == "figure" and has_table and title for role, has_table, title in found)


LUMINANCE = """
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05); };
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
  const context = canvas.getContext('2d', {willReadFrequently: true});
  const paint = (...layers) => { context.clearRect(0, 0, 1, 1);
    for (const layer of layers) { context.fillStyle = layer; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const value = name => { const probe = document.body.appendChild(document.createElement('i'));
    probe.style.color = `var(${name})`; const found = getComputedStyle(probe).color; probe.remove(); return found; };
"""


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_text_has_a_contrast_of_four_and_a_half_in_both_themes(
    page: Page, server: FakeServer, scheme: str
) -> None:
    await page.prefer(scheme)
    await opened(page, server)
    assert await page.run("getComputedStyle(document.documentElement).colorScheme") == scheme
    pairs = [
        (text, ground)
        for text in ("--text", "--muted", "--accent", "--bad", "--warn")
        for ground in ("--bg", "--card", "--sunk")
    ]
    pairs += [("--accent-text", "--accent"), ("--text", "--warn-bg"), ("--text", "--bad-bg"), ("--good", "--card")]
    contrast = "([a, b]) => ratio(paint(value(a)), paint(value(b)))"
    ratios = await page.run(f"(() => {{ {LUMINANCE} return {json.dumps(pairs)}.map({contrast}); }})()")
    weak = {pair: round(ratio, 2) for pair, ratio in zip(pairs, ratios, strict=True) if ratio < 4.5}
    assert weak == {}
    lanes = (
        "[...document.styleSheets].flatMap(s => [...s.cssRules]).flatMap(r => [...(r.style ?? [])])"
        ".filter(n => n.startsWith('--lane-'))"
    )
    tint = "n => paint(value('--bg'), `color-mix(in srgb, ${value(n)} 26%, transparent)`)"
    tinted = await page.run(
        f"(() => {{ {LUMINANCE} const tint = {tint};"
        f" return {lanes}.map(n => [n, ratio(paint(value('--text')), tint(n))]); }})()"
    )
    assert len(tinted) >= 10
    assert {name: round(ratio, 2) for name, ratio in tinted if ratio < 4.5} == {}


async def test_the_theme_button_overrides_the_system_and_is_remembered(page: Page, server: FakeServer) -> None:
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    ground = "getComputedStyle(document.body).backgroundColor"
    grounds = {}
    for system in ("dark", "light"):
        await page.prefer(system)
        await opened(page, server)
        grounds[system] = await page.run(ground)
    assert grounds["dark"] != grounds["light"]
    await page.click("#theme")
    assert (await page.run(scheme), await page.run(ground)) == ("dark", grounds["dark"])
    await page.reload()
    await page.until(f"{CONDITION} !== 'connecting' && {scheme} === 'dark'")
    await page.prefer("dark")
    await page.click("#theme")
    assert (await page.run(scheme), await page.run(ground)) == ("light", grounds["light"])


async def test_the_charts_are_drawn_in_the_colours_of_the_theme(page: Page, server: FakeServer) -> None:
    page.excuse("willReadFrequently")  # the canvas is read here, not by the page
    await page.prefer("light")
    await opened(page, server)
    now = time.time()
    for index in range(100):
        await server.send(stats(index, when=now - 10 + index / 10, tokens_per_s=50.0))
    drawn = (
        "(() => { const canvas = document.querySelector('.chart canvas'); const probe = document.createElement('i');"
        " document.body.append(probe); probe.style.color = 'var(--series-1)';"
        " const line = getComputedStyle(probe).color.match(/\\d+/g).map(Number); probe.remove();"
        " const d = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data; let n = 0;"
        " for (let i = 0; i < d.length; i += 4)"
        " n += d[i + 3] > 200 && line.every((channel, at) => Math.abs(d[i + at] - channel) < 8);"
        " return n > 20; })()"
    )
    await page.until(drawn)
    await page.click("#theme")
    await page.until(drawn)


async def test_with_reduced_motion_nothing_moves(page: Page, server: FakeServer) -> None:
    await page.prefer("light", "reduce")
    await opened(page, server, "lanes")
    await server.send(stats(), gate(), requests())
    await page.until("document.querySelector('.bar .fill')")
    await ask_in_all_panels(page)
    moving = await page.run(
        "[...document.querySelectorAll('*')].filter(e => { const c = getComputedStyle(e); return"
        " c.transitionDuration !== '0s' || c.animationName !== 'none' || c.scrollBehavior !== 'auto'; })"
        ".map(e => e.className || e.tagName)"
    )
    assert moving == []


# ---- for an hour --------------------------------------------------------------------------------------------


async def test_two_thousand_frames_leave_the_heap_as_flat_as_the_first(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    start = time.time() - 3600

    async def feed(first: int, last: int) -> None:
        for index in range(first, last):
            await server.send(stats(index, when=start + index / 10), requests(), gate())
            if index % 50 == 0:
                await asyncio.sleep(0.02)
        # The page has taken every frame when it shows the last one, however busy the machine is.
        await server.send(stats(last, when=start + last / 10, kv_used_tokens=0))
        await page.until(f"/^0/.test({figure('kv')}) && {CONDITION} === 'live'", within=60)
        await asyncio.sleep(0.6)

    await feed(0, 700)
    nodes = "document.getElementsByTagName('*').length"
    before, before_nodes = await page.heap_bytes(), await page.run(nodes)
    await feed(700, 2700)
    after, after_nodes = await page.heap_bytes(), await page.run(nodes)
    assert after - before < 400_000, f"{before} -> {after} bytes"
    assert after_nodes - before_nodes < 20, f"{before_nodes} -> {after_nodes} elements"


SHARE = 0.05
"""Of a core, all that the page may take of it."""


@pytest.mark.parametrize("view", ["overview", "chat", "levers", "lanes"])
async def test_live_at_ten_hertz_costs_a_small_share_of_a_core(page: Page, server: FakeServer, view: str) -> None:
    await page.size(1440, 900)  # all charts are in view
    await opened(page, server, view)
    shares: list[float] = []
    async with live(server):
        await asyncio.sleep(2)
        while len(shares) < 5 and min(shares, default=1.0) >= SHARE:  # processor time stretches on a busy machine
            before, start = await page.metrics(), time.monotonic()
            await asyncio.sleep(3)
            after, end = await page.metrics(), time.monotonic()
            shares.append((after["TaskDuration"] - before["TaskDuration"]) / (end - start))
        assert await page.run(CONDITION) == "live"
    assert min(shares) < SHARE, f"{shares} of a core in the main thread of the tab"


async def test_figures_are_drawn_a_few_times_a_second_however_many_come(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    await page.run(
        "(() => { window.drawn = 0; const value = document.querySelector('[data-figure=throughput] .value');"
        " new MutationObserver(() => { window.drawn += 1; })"
        ".observe(value, {characterData: true, childList: true, subtree: true}); })()"
    )
    start = time.monotonic()
    for index in range(100):
        await server.send(stats(index, when=1000 + index / 10, tokens_per_s=float(index)))
        await asyncio.sleep(0.03)
    drawn, seconds = await page.run("window.drawn"), time.monotonic() - start
    assert 3 <= drawn <= 4 * seconds + 2


async def test_a_lever_change_does_not_wait_for_the_next_figures(page: Page, server: FakeServer) -> None:
    await opened(page, server, "levers")
    control = f"document.querySelector('{lever_input('num_drafts')}')"
    waits: list[float] = []
    for value in (4, 5, 6, 7, 8):
        await server.send(stats(tokens_per_s=100.0 + value))
        await page.until(f"{figure('throughput')} !== '–'")
        change = server.change(wire.SetLever(change_id=f"c{value}", name="num_drafts", value=value))
        start = time.monotonic()
        await server.send(stats(), change)
        await page.run(
            f"new Promise(done => {{ const look = () => {control}.value === '{value}' ? done() : setTimeout(look, 2);"
            " look(); })"
        )
        waits.append(time.monotonic() - start)
    assert min(waits) < 0.15, waits


async def test_a_chart_out_of_view_is_drawn_when_it_comes_into_view(page: Page, server: FakeServer) -> None:
    await page.size(1280, 600)
    await opened(page, server)
    now = time.time()
    await server.send(*(stats(index, when=now - 10 + index / 10) for index in range(100)))
    await page.until("document.querySelector('#c-throughput-title').closest('.chart').querySelector('canvas')")
    last = "document.querySelector('#c-prefill-title').closest('.chart')"
    assert await page.run(f"{last}.querySelector('canvas')") is None
    await page.run("document.querySelector('#pause').click()")
    await page.until("document.querySelector('#banner').textContent.includes('Paused')")
    await server.send(*(stats(index, when=now + index / 10, prefill_tokens_per_s=7777.0) for index in range(1, 40)))
    await page.run(f"{last}.querySelector('details').open = true; {last}.scrollIntoView()")
    await page.until(f"{last}.querySelector('canvas') && {last}.querySelectorAll('tbody tr').length >= 10")
    assert "7,777" not in await page.text("#c-prefill-data")


async def test_nothing_is_drawn_while_the_tab_is_hidden(page: Page, server: FakeServer) -> None:
    await opened(page, server)
    await server.send(stats(when=1000.0, tokens_per_s=40.0))
    await page.until(f"{figure('throughput')} === '40'")
    await page.run("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    await asyncio.sleep(0.3)
    await server.send(*(stats(when=1003 + index / 10, tokens_per_s=80.0) for index in range(20)))
    await asyncio.sleep(0.5)
    assert await page.run(figure("throughput")) == "40"
    await page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    await page.until(f"{figure('throughput')} === '80.0'")
