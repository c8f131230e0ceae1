"""The whole system with the real model: chat, levers, SQL, concurrent users."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import psutil
import pytest

from engine.protocol.client import WireClient
from engine.protocol.commands import Limits, Sampling
from engine.protocol.wire import ChatTurn, Delta, Done, LeverEvent, Queued, Stats, Subscribe
from tests.e2e.processes import Home, Serving, serving

pytestmark = [pytest.mark.model, pytest.mark.timeout(420)]

GREEDY = Sampling(temperature=0.0)
STORY = [ChatTurn(role="user", content="Write a long story about a lighthouse keeper and the sea.")]


async def ask(client: WireClient, tokens: int, turns: list[ChatTurn] = STORY) -> tuple[str, Done, list[float]]:
    """Text, end and the arrival times of one reply."""
    text, times = "", []
    async for message in client.chat(turns, GREEDY, Limits(max_tokens=tokens, ignore_eos=True)):
        if isinstance(message, Delta):
            times.append(time.monotonic())
            text += message.text
        if isinstance(message, Done):
            return text + message.text, message, times
    raise AssertionError("the reply never ended")


async def test_a_chat_with_a_lever_flipped_while_it_speaks_and_sql_during_and_afterwards(served: Serving) -> None:
    async with WireClient(served.url) as client:
        emitted, flipped = 0, None
        async for message in client.chat(STORY, GREEDY, Limits(max_tokens=120, ignore_eos=True)):
            if isinstance(message, Queued):
                assert message.max_context >= 2048
            if isinstance(message, Delta):
                emitted += len(message.tokens)
                if flipped is None:
                    flipped = await client.set_lever("drafter", "off", reason="e2e")
            last = message
        assert isinstance(last, Done)
        assert (last.reason, last.usage.output_tokens, emitted) == ("length", 120, 120)
        assert isinstance(flipped, LeverEvent)
        assert flipped.new == "off"
        await asyncio.sleep(0.6)
        live = await client.query("SELECT sum(emitted) FROM lane_steps")
        assert live.error == ""
        assert live.rows[0][0] == 120

    cli = served.home.run("query", "SELECT name, new FROM lever_changes", "--format", "csv")
    assert cli.stdout.splitlines()[0] == "name,new"
    assert any(line.startswith("drafter,") for line in cli.stdout.splitlines())

    served.process.terminate()
    assert served.process.wait(20) == 0
    after = served.home.run("query", "SELECT sum(emitted) AS n FROM lane_steps", "--json")
    assert json.loads(after.stdout) == [{"n": 120}]
    counted = served.home.run("query", "SELECT output_tokens FROM requests", "--format", "csv")
    assert counted.stdout.split() == ["output_tokens", "120"]


async def speed_alone(client: WireClient) -> float:
    begun = time.monotonic()
    _, done, _ = await ask(client, 64)
    return done.usage.output_tokens / (time.monotonic() - begun)


async def speed_of_eight(client: WireClient) -> float:
    """Tokens per second of eight chats; every one must stream, and none may wait for the others to end."""
    begun = time.monotonic()
    questions = [[ChatTurn(role="user", content=f"Tell me {count + 2} facts about birds.")] for count in range(8)]
    replies = await asyncio.gather(*(ask(client, 64, turns) for turns in questions))
    assert all(done.usage.output_tokens == 64 for _, done, _ in replies)
    assert all(len(times) > 1 for _, _, times in replies)
    assert max(times[0] for _, _, times in replies) < min(times[-1] for _, _, times in replies)
    return sum(done.usage.output_tokens for _, done, _ in replies) / (time.monotonic() - begun)


async def test_eight_chats_at_once_all_stream_and_together_outrun_one(served: Serving) -> None:
    async with WireClient(served.url) as client:
        await ask(client, 8)
        ratios = [await speed_of_eight(client) / await speed_alone(client) for _ in range(3)]
        assert sorted(ratios)[1] > 1


async def test_the_same_question_has_the_same_greedy_answer_alone_and_in_company(served: Serving) -> None:
    async with WireClient(served.url) as client:
        alone, _, _ = await ask(client, 48)
        others = [[ChatTurn(role="user", content=f"Count to {count}.")] for count in range(4, 8)]
        replies = await asyncio.gather(ask(client, 48), *(ask(client, 48, turns) for turns in others))
        assert replies[0][0] == alone


async def test_later_turns_reuse_the_prefix_and_every_drafter_speaks_the_same(served: Serving) -> None:
    async with WireClient(served.url) as client:
        await client.set_lever("mtp_gate", "force")
        assert client.welcome is not None
        assert client.welcome.facts is not None
        replies = set()
        for drafter in ("off", *client.welcome.facts.drafters, "auto"):
            await client.set_lever("drafter", drafter)
            turns, said = [], ""
            for question in ("Name three birds.", "Which of them swims?", "And which flies highest?"):
                turns.append(ChatTurn(role="user", content=question))
                text, done, _ = await ask(client, 40, turns)
                assert done.reason == "length"
                turns.append(ChatTurn(role="assistant", content=text))
                said += text
            assert done.usage.cached_tokens > 0
            replies.add(said)
        assert len(replies) == 1


async def test_statistics_of_a_running_chat_come_over_the_wire(served: Serving) -> None:
    async with WireClient(served.url) as client, WireClient(served.url) as watcher:
        await watcher.send(Subscribe(topics=("stats", "requests", "gate"), rate_hz=20))
        reply = asyncio.create_task(ask(client, 100))
        seen = []
        async for message in watcher.messages():
            if isinstance(message, Stats):
                seen.append(message)
            if reply.done():
                break
        assert max(stats.tokens_per_s for stats in seen) > 0
        assert max(stats.active for stats in seen) == 1
        assert max(stats.kv_used_tokens for stats in seen) > 0
        assert all(stats.database == "ok" for stats in seen)
        assert all(not stats.lost for stats in seen)


async def test_the_api_answers_with_the_real_model_and_stops_where_it_is_told(served: Serving) -> None:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False, timeout=60) as http:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "Count from 1 to 9, digits and commas only."}],
            "temperature": 0,
            "max_tokens": 60,
        }
        free = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
        assert len(free) > 8
        stop = free[5:8]
        cut = (await http.post("/v1/chat/completions", json={**body, "stop": [stop]})).json()["choices"][0]
        assert cut["finish_reason"] == "stop"
        assert cut["message"]["content"] == free[: free.index(stop)]
        logs = (await http.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 3})).json()
        content = logs["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content).startswith(free[:8])
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 3 for entry in content)
        page = await http.get("/")
        assert page.status_code == 200
        assert "<script" in page.text
        assert "text/plain" in (await http.get("/metrics")).headers["content-type"]


async def test_a_disconnect_frees_the_slot(served: Serving) -> None:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False, timeout=60) as http:
        body = {"messages": [{"role": "user", "content": "Write a book."}], "stream": True, "max_tokens": 2000}
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                break
        async with WireClient(served.url) as client:
            for _ in range(100):
                rows = (await client.query("SELECT reason FROM requests")).rows
                if rows:
                    break
                await asyncio.sleep(0.05)
            assert [tuple(row) for row in rows] == [("cancelled",)]


async def test_the_engine_stays_below_its_memory(served: Serving) -> None:
    async with WireClient(served.url) as client:
        await ask(client, 32)
    memory = psutil.Process(served.engine_pid).memory_info()
    assert memory.rss - memory.shared < 500e6, "pages of libraries, which the system may drop, come on top"
    maps = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "libtorch" not in maps, "the server must not load torch"


def test_the_first_answer_of_a_fresh_start_is_quick(home: Home, model: object) -> None:
    begun = time.monotonic()
    answer = home.run("chat", "-p", "Say hello.", "--max-tokens", "8")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    assert time.monotonic() - begun < 30


def test_levers_from_a_script(home: Home, model: object) -> None:
    with serving(home, "--num-drafts", "2"):
        assert home.run("levers", "get", "num_drafts").stdout.strip() == "2"
        changed = home.run("levers", "set", "num-drafts", "5", "--reason", "test", "--json")
        assert json.loads(changed.stdout)["new"] == 5
        assert home.run("levers", "get", "num_drafts").stdout.strip() == "5"
        stale = home.run("levers", "set", "num_drafts", "6", "--expect", "2")
        assert (stale.returncode, stale.stderr.count("\n")) == (1, 1)
        assert home.run("levers", "preset", "save", "mine").returncode == 0
        assert home.run("levers", "undo").returncode == 0
        assert home.run("levers", "get", "num_drafts").stdout.strip() == "2"
        assert "num_drafts: 5 | 2" in home.run("levers", "diff", "mine").stdout
        assert home.run("levers", "preset", "apply", "mine").returncode == 0
        assert home.run("levers", "get", "num_drafts").stdout.strip() == "5"
        time.sleep(0.5)
        history = json.loads(home.run("levers", "history", "--json").stdout)
        assert [row["origin"] for row in history].count("undo") == 1
