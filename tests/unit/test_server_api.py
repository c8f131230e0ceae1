"""The OpenAI-compatible API as its clients use it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.levers.resolve import resolve
from engine.protocol import wire
from engine.protocol.client import WireClient
from engine.protocol.commands import Cancel, ChangeLever, Submit
from tests.fakes.live_server import LiveServer, live, until
from tests.fakes.server_parts import FakeEngine, FakeText

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": "hi"}], **more}


def events(body: str) -> list[Any]:
    """The data of each event; comments are dropped."""
    data = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


async def post(served: LiveServer, path: str, body: Any, **more: Any) -> httpx.Response:
    async with served.http() as http:
        return await http.post(path, json=body, **more)


async def test_a_reply_has_the_shape_that_clients_read_and_our_metrics_beside_it() -> None:
    async with live() as served:
        answer = (await post(served, CHAT, ask())).json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["usage"]["total_tokens"] == 8
        assert answer["metrics"]["tokens_by_lane"] == {"plain": 5}
        assert {"ttft_ms", "drafted", "accepted"} <= set(answer["metrics"])


async def test_a_stream_gives_the_role_first_one_id_and_its_reason_at_the_end_alone() -> None:
    async with live() as served:
        answer = await post(served, CHAT, ask(stream=True))
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(answer.text)
        assert done == "[DONE]"
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello"
        assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_as_one_extra_chunk_without_choices_when_asked_for() -> None:
    async with live() as served:
        answer = await post(served, CHAT, ask(stream=True, stream_options={"include_usage": True}))
        *chunks, usage, done = events(answer.text)
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 5
        assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_text_completion_streams_text() -> None:
    async with live() as served:
        whole = (await post(served, TEXT, {"prompt": "abc", "max_tokens": 9})).json()
        assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", "hello")
        *chunks, _ = events((await post(served, TEXT, {"prompt": "abc", "stream": True})).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
        assert served.engine.of_kind(Submit)[0].limits.max_tokens == 9
        assert served.engine.of_kind(Submit)[1].limits.max_tokens == 16


async def test_n_replies_come_back_in_order_with_seeds_of_their_own() -> None:
    async with live() as served:
        answer = (await post(served, CHAT, ask(n=3, seed=7))).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [submit.sampling.seed for submit in served.engine.of_kind(Submit)] == [7, 8, 9]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 15


async def test_probabilities_come_with_token_bytes_and_alternatives() -> None:
    async with live() as served:
        answer = (await post(served, CHAT, ask(logprobs=True, top_logprobs=2))).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == list("hello")
        assert content[0]["bytes"] == [104]
        assert [other["token"] for other in content[0]["top_logprobs"]] == ["a", "b"]
        legacy = (await post(served, TEXT, {"prompt": "x", "logprobs": 1})).json()["choices"][0]["logprobs"]
        assert legacy["text_offset"] == [0, 1, 2, 3, 4]
        assert legacy["top_logprobs"][0] == {"a": -0.5}


async def test_streamed_probabilities_cover_every_token_once() -> None:
    async with live() as served:
        *chunks, _ = events((await post(served, CHAT, ask(stream=True, logprobs=True))).text)
        found = [
            entry["token"]
            for chunk in chunks
            if (logprobs := chunk["choices"][0]["logprobs"])
            for entry in logprobs["content"]
        ]
        assert found == list("hello")


async def test_every_sampling_field_reaches_the_engine() -> None:
    body = ask(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1, seed=3,
        repetition_penalty=1.2, logit_bias={"65": -100}, stop=["a", "b"], max_completion_tokens=7, max_tokens=99,
        min_tokens=2, ignore_eos=True, speculate=False,
    )  # fmt: skip
    async with live() as served:
        assert (await post(served, CHAT, body)).status_code == 200
        submit = served.engine.of_kind(Submit)[0]
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.top_k) == (0.5, 0.9, 5)
        assert submit.sampling.logit_bias == {65: -100}
        assert submit.limits.stop == ("a", "b")
        assert (submit.limits.max_tokens, submit.limits.min_tokens, submit.limits.ignore_eos) == (7, 2, True)
        assert submit.switches.speculate is False


async def test_a_response_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with live() as served:
        await post(served, CHAT, ask(response_format={"type": "json_object"}))
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        await post(served, CHAT, ask(response_format=named))
        first, second = served.engine.of_kind(Submit)
        assert json.loads(first.switches.grammar) == {"type": "object"}
        assert json.loads(second.switches.grammar) == schema


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"max_tokens": 0}, "max_completion_tokens"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"model": "gpt-4"}, "model"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_field(more: dict[str, Any], param: str) -> None:
    async with live() as served:
        answer = await post(served, CHAT, ask() | more)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert error["message"].endswith(".")
        assert not served.engine.commands


async def test_unknown_fields_and_nulls_are_tolerated() -> None:
    async with live() as served:
        body = ask(user="me", metadata={"a": 1}, from_the_future=7, temperature=None, stop=None, n=None, tools=None)
        assert (await post(served, CHAT, body)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"x"', b"{}", b"[" * 100_000])
async def test_a_body_that_is_no_request_is_one_sentence(body: bytes) -> None:
    async with live() as served, served.http() as http:
        answer = await http.post(CHAT, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].endswith(".")


async def test_a_prompt_longer_than_the_context_has_its_code() -> None:
    async with live() as served:
        answer = await post(served, CHAT, ask(messages=[{"role": "user", "content": "x" * 100}]))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "100 tokens" in error["message"]
        assert "64" in error["message"]


async def test_token_ids_are_a_prompt_too_and_are_checked() -> None:
    async with live() as served:
        assert (await post(served, TEXT, {"prompt": [1, 2, 3]})).status_code == 200
        assert served.engine.of_kind(Submit)[0].prompt == (1, 2, 3)
        assert (await post(served, TEXT, {"prompt": [1, 999]})).status_code == 400
        assert (await post(served, TEXT, {"prompt": ""})).status_code == 400
        assert (await post(served, TEXT, {"prompt": [[1], "x"]})).json()["choices"][1]["index"] == 1


async def test_a_full_queue_answers_429_with_a_time() -> None:
    async with live(FakeEngine(holds=True), max_in_flight=2) as served:
        first = asyncio.create_task(post(served, CHAT, ask(n=2)))
        await until(lambda: len(served.engine.held) == 2)
        refused = await post(served, CHAT, ask())
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        served.engine.release()
        assert (await first).status_code == 200


async def test_n_replies_that_do_not_all_fit_the_queue_leave_nothing_behind() -> None:
    async with live(FakeEngine(holds=True), max_in_flight=2) as served:
        assert (await post(served, CHAT, ask(n=3))).status_code == 429
        await until(lambda: not served.server.broker.flights)


async def test_before_the_model_is_ready_the_api_says_so() -> None:
    async with live(FakeEngine(loads=False)) as served, served.http() as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.post(CHAT, json=ask())).status_code == 503
        served.engine.become_ready()
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.post(CHAT, json=ask())).status_code == 200


async def test_prompts_and_replies_are_kept_while_the_lever_is_on_and_never_when_it_is_off() -> None:
    async with live() as served, served.http() as http:
        await http.post(CHAT, json=ask())
        await http.post(TEXT, json={"prompt": "before"})
        served.engine.send(ChangeLever(change_id="on", name="record_content", value=True, origin="tui"))
        await until(lambda: served.server.broker.levers["record_content"] is True)
        await http.post(CHAT, json=ask(messages=[{"role": "user", "content": "why?"}], n=2))
        await http.post(TEXT, json={"prompt": ["one", "two"]})
        served.engine.send(ChangeLever(change_id="off", name="record_content", value=False, origin="tui"))
        await until(lambda: served.server.broker.levers["record_content"] is False)
        await http.post(CHAT, json=ask())
        messages = '[{"role":"user","content":"why?"}]'
        assert [(prompt, reply) for _, prompt, reply in served.telemetry.contents] == [
            (messages, "hello"),
            (messages, "hello"),
            ('"one"', "hello"),
            ('"two"', "hello"),
        ]


async def test_a_chat_on_the_wire_is_kept_too_and_a_refused_request_is_not() -> None:
    engine = FakeEngine(levers=resolve(flags={"record_content": True})[0])
    async with live(engine) as served, WireClient(served.url) as client:
        async for _ in client.chat([wire.ChatTurn(role="user", content="hi")]):
            pass
        engine.refuses = "No room."
        ended = [message async for message in client.chat([wire.ChatTurn(role="user", content="again")])][-1]
        assert isinstance(ended, wire.Done)
        assert ended.reason == "refused"
        assert [said[1:] for said in served.telemetry.contents] == [('[{"role":"user","content":"hi"}]', "hello")]


async def test_a_client_that_leaves_frees_its_slot_at_once() -> None:
    for stream in (True, False):
        async with live(FakeEngine(holds=True)) as served, served.http() as http:
            task = asyncio.create_task(http.post(CHAT, json=ask(stream=stream)))
            await until(lambda engine=served.engine: bool(engine.held))  # type: ignore[misc]
            task.cancel()
            await until(lambda engine=served.engine: bool(engine.of_kind(Cancel)))  # type: ignore[misc]
            await until(lambda broker=served.server.broker: not broker.flights)  # type: ignore[misc]


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.api.PING_S", 0.05)
    async with live(FakeEngine(holds=True)) as served, served.http() as http:
        async with http.stream("POST", CHAT, json=ask(stream=True)) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if line == ": ping":
                    break
            served.engine.release()
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in rest


async def test_an_error_in_the_middle_of_a_stream_is_an_event_before_the_end() -> None:
    async with live(FakeEngine(holds=True)) as served, served.http() as http:
        async with http.stream("POST", CHAT, json=ask(stream=True)) as answer:
            engine_id = served.engine.held[0].request_id
            served.engine.say(engine_id, "hel")
            served.engine.finish(engine_id, "error", error="The device failed.")
            body = "".join([text async for text in answer.aiter_text()])
        last = events(body)[-1]
        assert last["error"]["message"] == "The device failed."
        assert last["error"]["type"] == "server_error"


async def test_a_refusal_by_the_engine_is_a_status_and_not_a_stream() -> None:
    for stream in (True, False):
        async with live(FakeEngine(refuses="The grammar cannot be read.")) as served:
            answer = await post(served, CHAT, ask(stream=stream))
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "The grammar cannot be read."


async def test_the_death_of_the_engine_is_an_error_for_who_waits() -> None:
    async with live(FakeEngine(holds=True)) as served:
        waiting = asyncio.create_task(post(served, CHAT, ask()))
        await until(lambda: bool(served.engine.held))
        served.engine.die("The engine process was ended by SIGKILL; start it again.")
        answer = await waiting
        assert answer.status_code == 500
        assert "SIGKILL" in answer.json()["error"]["message"]
        assert (await post(served, CHAT, ask())).status_code == 503


async def test_the_trace_context_of_the_caller_goes_along_and_an_invalid_one_does_not() -> None:
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with live() as served:
        for header in (f"00-{trace}-{span}-01", f"00-{trace}-{span}-00", "00-0-0-01", f"00-{'0' * 32}-{span}-01"):
            await post(served, CHAT, ask(), headers={"traceparent": header})
        first, unsampled, short, zero = (submit.trace for submit in served.engine.of_kind(Submit))
        assert (first.trace_id, first.parent_span_id, first.sampled) == (trace, span, True)
        assert unsampled.sampled is False
        assert short.trace_id == zero.trace_id == ""


async def test_a_request_id_comes_back() -> None:
    async with live() as served:
        given = await post(served, CHAT, ask(), headers={"x-request-id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        assert (await post(served, CHAT, ask())).headers["x-request-id"].startswith("req-")
        hostile = await post(served, CHAT, ask(), headers={"x-request-id": "a b\t<script>"})
        assert hostile.headers["x-request-id"].startswith("req-")


async def test_models_are_listed_and_found_by_name() -> None:
    async with live() as served, served.http() as http:
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["letters"]
        assert (await http.get("/v1/models/default")).json()["id"] == "letters"
        assert (await http.get("/v1/models/letters")).json()["context_length"] == 64
        assert (await http.get("/v1/models/abc")).json()["aliases"] == ["default", "abc"]
        assert (await http.get("/v1/models/other")).status_code == 404
        assert (await post(served, CHAT, ask(model="abc"))).json()["model"] == "letters"


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def test_a_tool_call_in_the_text_becomes_a_tool_call() -> None:
    async with live(FakeEngine(reply=CALL)) as served:
        choice = (await post(served, CHAT, ask(tools=TOOLS))).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        function = choice["message"]["tool_calls"][0]["function"]
        assert (function["name"], json.loads(function["arguments"])) == ("weather", {"city": "Rome"})


async def test_a_streamed_tool_call_never_shows_its_marks_as_text() -> None:
    async with live(FakeEngine(reply=CALL)) as served:
        *chunks, _ = events((await post(served, CHAT, ask(tools=TOOLS, stream=True))).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [(call["index"], call["type"], call["function"]["name"]) for call in calls] == [
            (0, "function", "weather")
        ]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_tools_are_refused_for_a_model_that_knows_none() -> None:
    async with live(text=FakeText(renders_tools=False)) as served:
        answer = await post(served, CHAT, ask(tools=TOOLS))
        assert answer.json()["error"]["param"] == "tools"


async def test_probes_metrics_and_schema_answer() -> None:
    async with live() as served, served.http() as http:
        assert (await http.get("/metrics")).text.startswith("# TYPE")
        schema = (await http.get("/schema")).json()
        assert schema["version"] == 1
        assert "hello" in json.dumps(schema)
        assert (await http.get("/nowhere")).json()["error"]["code"] == "not_found"
        assert (await http.get(CHAT)).status_code == 405


async def test_the_python_client_of_openai_reads_replies_streams_and_errors() -> None:
    openai = pytest.importorskip("openai")
    async with live() as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="default", messages=messages)
        assert whole.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(
            model="default", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
        assert chunks[-1].usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="default", messages=messages, temperature=9)
        assert [model.id async for model in client.models.list()] == ["letters"]
        await client.close()
