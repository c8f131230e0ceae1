"""The reducer: what each message does to the state, and that no stream of messages breaks it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import wire
from engine.protocol.events import Token, Usage
from tests.tui import scenes
from tui.conversation import Conversation
from tui.reducer import reduce
from tui.sessions import new_conversation
from tui.state import Dropped, Event, Opened, Phase, Retold, Said, Sent, State, Told
from tui.windows import window

NOW = scenes.START


def after(*events: Event, state: State | None = None, now: float = NOW) -> State:
    state = state or State(conversation=new_conversation(NOW))
    for event in events:
        state = reduce(state, event, now)
    return state


def talking(*events: Event) -> State:
    return after(scenes.welcome(), Said("hi", "r1"), *events)


def delta(text: str, request_id: str = "r1") -> wire.Delta:
    return wire.Delta(request_id=request_id, text=text, tokens=(Token(id=1, lane="plain", draft=0, step=1, text=text),))


def test_a_welcome_opens_the_connection_and_brings_the_levers() -> None:
    state = after(scenes.welcome())
    assert state.link.phase is Phase.OPEN
    assert state.ready
    assert state.levers["num_drafts"].value == 3
    assert state.facts == scenes.FACTS


def test_loading_becomes_ready_when_the_server_says_so() -> None:
    state = after(scenes.welcome("loading"), wire.Load(state="loading", stage="weights", done=5, total=10))
    assert not state.ready
    assert (state.loading.done, state.loading.total) == (5, 10)
    state = after(wire.Load(state="ready", facts=scenes.FACTS), state=state)
    assert state.ready
    assert state.facts == scenes.FACTS


def test_a_lever_keeps_its_value_until_the_engine_says_it_changed() -> None:
    state = after(scenes.welcome(), Sent(wire.SetLever(change_id="c1", name="num_drafts", value=7, expected=3)))
    assert state.levers["num_drafts"].value == 3
    assert state.pending["num_drafts"].value == 7
    state = after(scenes.lever_event("num_drafts", 3, 7, NOW), state=state)
    assert state.levers["num_drafts"].value == 7
    assert state.levers["num_drafts"].source == "operator"
    assert not state.pending
    assert state.changes[-1].new == 7


def test_a_refused_lever_says_why_and_shows_the_current_value() -> None:
    state = after(
        scenes.welcome(),
        Sent(wire.SetLever(change_id="c1", name="num_drafts", value=7, expected=3)),
        wire.LeverRefused(change_id="c1", name="num_drafts", message="It is 5 by now.", current=5),
    )
    assert state.levers["num_drafts"].value == 5
    assert state.refusals["num_drafts"].message == "It is 5 by now."
    assert not state.pending


def test_a_sent_change_takes_the_old_refusal_away() -> None:
    state = after(
        scenes.welcome(),
        wire.LeverRefused(change_id="c1", name="num_drafts", message="No."),
        Sent(wire.SetLever(change_id="c2", name="num_drafts", value=4)),
    )
    assert "num_drafts" not in state.refusals


def test_undo_waits_on_the_lever_that_changed_last() -> None:
    state = after(
        scenes.welcome(), scenes.lever_event("mtp_gate", "auto", "off", NOW), Sent(wire.UndoLever(change_id="u"))
    )
    assert state.pending["mtp_gate"].value is None


def test_a_reply_grows_with_its_deltas_and_ends_with_its_numbers() -> None:
    state = talking(wire.Queued(request_id="r1", prompt_tokens=9, max_context=64), delta("Hel"), delta("lo"))
    assert state.conversation.last_answer == "Hello"
    assert state.reply is not None
    assert state.reply.status == "streaming"
    usage = Usage(prompt_tokens=9, output_tokens=2, ttft_us=5000, decode_us=100_000)
    state = after(wire.Done(request_id="r1", reason="stop", usage=usage, text="!", speedup=0.9), state=state)
    assert state.conversation.last_answer == "Hello!"
    assert state.reply is not None
    assert (state.reply.status, state.reply.speedup, state.reply.ttft_ms) == ("done", 0.9, 5.0)


def test_what_was_shown_when_stop_was_pressed_is_what_stays() -> None:
    state = talking(delta("one "), Sent(wire.Stop(request_id="r1")), delta("two"))
    assert state.conversation.last_answer == "one "
    state = after(wire.Done(request_id="r1", reason="cancelled", usage=Usage(), text="three"), state=state)
    assert state.conversation.last_answer == "one "
    assert state.reply is not None
    assert state.reply.reason == "cancelled"


def test_a_new_message_may_be_sent_before_the_stopped_reply_reports() -> None:
    state = talking(delta("a"), Sent(wire.Stop(request_id="r1")), Said("again", "r2"), delta("b", "r2"))
    state = after(wire.Done(request_id="r1", reason="cancelled", usage=Usage(output_tokens=1)), state=state)
    replies = [turn.reply for turn in state.conversation.turns if turn.reply]
    assert [reply.status for reply in replies] == ["done", "streaming"]


def test_deltas_of_somebody_elses_request_change_nothing() -> None:
    state = talking()
    assert after(delta("x", "other"), state=state).conversation is state.conversation


def test_a_problem_with_the_request_ends_its_reply() -> None:
    state = talking(wire.Problem(message="The prompt is too long.", request_id="r1"))
    assert state.reply is not None
    assert state.reply.error == "The prompt is too long."
    assert not state.reply.running


def test_a_retold_reply_replaces_the_old_one() -> None:
    state = talking(delta("bad"), Retold("r2"), delta("good", "r2"))
    assert [turn.content for turn in state.conversation.turns] == ["hi", "good"]


def test_the_model_is_given_everything_but_the_reply_that_is_awaited() -> None:
    state = after(Opened(replace(Conversation(id="x"), system="Be brief.")), Said("hi", "r1"))
    assert [(m.role, m.content) for m in state.conversation.messages()] == [("system", "Be brief."), ("user", "hi")]


def test_a_reply_is_lost_when_the_server_does_not_know_the_session_any_more() -> None:
    state = talking(delta("part"), Dropped("cut"), scenes.welcome(session="s2"))
    assert state.reply is not None
    assert "lost" in state.reply.error
    assert state.conversation.last_answer == "part"


def test_a_reply_goes_on_when_the_session_is_resumed() -> None:
    state = talking(delta("part"), Dropped("cut"), scenes.welcome(), delta("ly"))
    assert state.conversation.last_answer == "partly"


def test_the_gate_decision_is_kept_with_the_tokens_that_came_under_it() -> None:
    probe, hold = scenes.gate(1, "probe"), scenes.gate(2, "hold")
    state = talking(probe, delta("a"), delta("b"), hold, delta("c"))
    reply = state.reply
    assert reply is not None
    assert [getattr(reply.decision_at(i), "reason", "") for i in range(3)] == ["probe", "probe", "hold"]


def test_losing_the_connection_is_down_but_never_having_had_one_is_connecting() -> None:
    assert after(Dropped("nobody there")).link.phase is Phase.CONNECTING
    assert after(scenes.welcome(), Dropped("cut")).link.phase is Phase.DOWN
    assert after(Dropped("The engine ended.", final=True)).link.phase is Phase.REFUSED
    ended = after(scenes.welcome(), Dropped("cut"), Dropped("The engine ended.", final=True))
    assert (ended.link.phase, ended.link.reason) == (Phase.REFUSED, "The engine ended.")


def test_pending_changes_do_not_outlive_the_connection() -> None:
    state = after(scenes.welcome(), Sent(wire.SetLever(change_id="c", name="num_drafts", value=4)), Dropped("cut"))
    assert not state.pending


def test_frames_that_go_back_in_time_start_a_new_history() -> None:
    state = after(*(scenes.stats(i) for i in range(10)), replace_run(scenes.stats(2), "run-a"))
    assert len(state.stats) == 1


def replace_run(stats: wire.Stats, run: str) -> wire.Stats:
    fields = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return wire.Stats(**(fields | {"replay_run": run}))


def test_a_query_result_finds_its_query() -> None:
    state = after(Sent(wire.Query(query_id="q", sql="SELECT 1")), wire.QueryResult(query_id="q", rows=((1,),)))
    assert state.queries["q"].result is not None
    assert after(wire.QueryResult(query_id="unknown")).queries == {}


words = st.text(max_size=8)
ids = st.sampled_from(["r1", "r2", "zz"])
levers = st.sampled_from(["num_drafts", "mtp_gate", "drafter", "nonsense"])
streams = st.lists(
    st.one_of(
        st.builds(scenes.welcome, st.sampled_from(["loading", "ready", "failed"]), st.just("control"), words),
        st.builds(lambda m: wire.Refused(message=m), words),
        st.builds(Dropped, words, st.booleans()),
        st.builds(Told, st.just("info"), words),
        st.builds(Said, words, ids),
        st.builds(Retold, ids),
        st.builds(lambda i: Sent(wire.Stop(request_id=i)), ids),
        st.builds(lambda n, v: Sent(wire.SetLever(change_id=n, name=n, value=v)), levers, st.integers()),
        st.builds(lambda n: Sent(wire.UndoLever(change_id="u", of=n)), words),
        st.builds(lambda q: Sent(wire.Query(query_id=q, sql=q)), words),
        st.builds(lambda i, n: wire.Queued(request_id=i, prompt_tokens=n, max_context=n), ids, st.integers(0, 99)),
        st.builds(lambda t, i: delta(t, i), words, ids),
        st.builds(
            lambda i, r, t: wire.Done(request_id=i, reason=r, usage=Usage(output_tokens=3, decode_us=7), text=t),
            ids, words, words,
        ),
        st.builds(lambda i: wire.Problem(message="no", request_id=i), ids),
        st.builds(scenes.stats, st.integers(0, 50), busy=st.booleans()),
        st.builds(scenes.gate, st.integers(0, 50), words, words),
        st.builds(scenes.requests, st.integers(0, 50)),
        st.builds(lambda n, v: scenes.lever_event(n, 1, v, NOW, n), levers, st.integers()),
        st.builds(lambda n, v: wire.LeverRefused(change_id=n, name=n, message="no", current=v), levers, st.integers()),
        st.builds(lambda q: wire.QueryResult(query_id=q), words),
        st.builds(lambda m: wire.Log(time=NOW, level="info", message=m), words),
        st.just(wire.Load(state="loading", done=1, total=2)),
        st.just(wire.Pong()),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(streams)
def test_no_stream_of_messages_raises_and_its_numbers_agree(events: list[Event]) -> None:
    state = State(conversation=new_conversation(NOW))
    for number, event in enumerate(events):
        state = reduce(state, event, NOW + number)
        seen = window(state.stats)
        assert seen.tokens == sum(lane.tokens for frame in state.stats for lane in frame.lanes.values())
        assert all(early.time <= late.time for early, late in zip(state.stats, state.stats[1:], strict=False))
        for reply in (turn.reply for turn in state.conversation.turns if turn.reply):
            assert reply.status in ("sent", "queued", "streaming", "stopping", "done")
            assert all(0 <= first <= len(reply.tokens) for first, _ in reply.decisions)
        assert not (state.pending.keys() & state.refusals.keys())


@settings(max_examples=50, deadline=None)
@given(streams)
def test_reducing_is_a_function_of_its_arguments(events: list[Event]) -> None:
    first = after(*events, state=State())
    assert after(*events, state=State()) == first
