"""A thousand requests through the real scheduler and the real store: every count of their tokens is the same count."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.bench.step_stream import run_record
from engine.core.device import DrafterName
from engine.protocol.commands import Sampling
from engine.protocol.events import Delta, Finished
from telemetry.batch import decode, encode, pack
from telemetry.database import open_for_reading
from telemetry.record import AnyRecord, LeverRecord, RequestRecord, SeqShare, StepRecord
from telemetry.store import Store
from tests.fakes.bench import Workbench
from tests.fakes.scripted_device import EOS, LETTERS, ScriptedDevice, hashed_next

REQUESTS, IN_FLIGHT = 1000, 10
LEVERS: dict[str, Sequence[str]] = {
    "drafter": ("off", "ngram", "self", "mtp", "dflash", "combined", "auto"),
    "num_drafts": ("1", "3", "7"),
    "mtp_gate": ("auto", "force", "off"),
    "prefix_cache": ("on", "off"),
    "always_mixed": ("on", "off"),
    "pipelined_decode": ("on", "off"),
    "policy": ("fifo", "slai"),
    "shadow_check": ("0", "0.5"),
    "admit_watermark": ("1", "auto"),
}


@dataclass(frozen=True)
class Told:
    """What one client was told."""

    tokens: int
    reason: str
    usage_tokens: int
    usage_drafted: int
    usage_accepted: int


@dataclass(frozen=True)
class Played:
    records: list[AnyRecord]
    clients: dict[str, Told]


def repetitive(context: tuple[int, ...]) -> int:
    """Turns from a circle of letters to a hash and back, with an EOS now and then: every drafter is sometimes right."""
    token = (context[-1] + 1) % 6 if len(context) % 32 < 24 else hashed_next(context)
    return EOS if token == 3 and len(context) % 17 == 0 else token


def play(requests: int, seed: int) -> Played:
    """Waves of random requests into a KV pool that is too small for them, while levers flip and clients leave."""
    rng = random.Random(seed)
    device = ScriptedDevice(
        next_token=repetitive,
        num_blocks=28,
        spill_blocks=8,
        runs_ahead=True,
        drafters=frozenset({DrafterName.SELF, DrafterName.MTP, DrafterName.DFLASH}),
        accuracy=lambda position, at: position % 4 != 0,
    )
    bench = Workbench(device, batch=6, drafter="auto", admit_watermark=1)
    for number in range(requests):
        while len(bench.engine.queues.active) + len(bench.engine.queues.waiting) > IN_FLIGHT:
            bench.tick()
        bench.submit(
            f"r{number}",
            [rng.randrange(6) for _ in range(rng.randint(1, 24))],
            max_tokens=rng.randint(1, 48),
            sampling=Sampling(temperature=rng.choice((0.0, 0.0, 0.8)), seed=number),
            stop=(rng.choice(LETTERS) + rng.choice(LETTERS),) if rng.random() < 0.2 else (),
            deadline_ms=rng.choice((0, 0, 0, 60)),
        )
        if rng.random() < 0.1:
            bench.cancel(f"r{rng.randint(max(0, number - IN_FLIGHT), number)}")
        if rng.random() < 0.2:
            name = rng.choice(sorted(LEVERS))
            bench.set(name, rng.choice(LEVERS[name]))
        bench.tick(rng.randint(0, 6))
    bench.run()
    tokens: Counter[str] = Counter()
    ends: dict[str, Finished] = {}
    for event in bench.outbox.events:
        if isinstance(event, Delta):
            tokens[event.request_id] += len(event.tokens)
        elif isinstance(event, Finished):
            assert event.request_id not in ends
            ends[event.request_id] = event
    clients = {
        name: Told(tokens[name], end.reason, end.usage.output_tokens, end.usage.drafted, end.usage.accepted)
        for name, end in ends.items()
    }
    return Played(bench.sink.records, clients)


def recorded(records: Sequence[AnyRecord], path: Path) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """Through the link and the store into a file; what each of `CLAIMS` finds wrong there."""
    store = Store(path, flush_s=0.01)
    store.put(decode(encode(pack([run_record("r"), *records]))))
    store.close()
    reader = open_for_reading(path)
    assert not store.losses
    return [(claim, found) for claim, sql in CLAIMS.items() if (found := reader.execute(sql).fetchall())]


_SHARES = """
SELECT step_id, coalesce(sum(share.drafted), 0) AS drafted, coalesce(sum(share.accepted), 0) AS accepted,
  coalesce(sum(share.emitted), 0) AS emitted, coalesce(sum(share.prefill_tokens), 0) AS prefill_tokens
FROM lane_steps LEFT JOIN LATERAL (SELECT unnest(shares) AS share) ON true GROUP BY step_id
"""
CLAIMS = {
    "what a step emitted is what was accepted and the target's own": """
        SELECT step_id, emitted, accepted, bonus FROM lane_steps WHERE emitted <> accepted + bonus""",
    "positions of a step add up to its drafts": """
        SELECT step_id FROM lane_steps
        WHERE drafted <> coalesce(list_sum(drafted_at), 0) OR accepted <> coalesce(list_sum(accepted_at), 0)""",
    "shares of a step add up to the step": f"""
        SELECT s.step_id FROM lane_steps s JOIN ({_SHARES}) p USING (step_id)
        WHERE (s.drafted, s.accepted, s.emitted, s.prefill_tokens)
          <> (p.drafted, p.accepted, p.emitted, p.prefill_tokens)""",
    "steps are numbered without gap or repetition": """
        SELECT max(step_id) - min(step_id) + 1, count(*), count(DISTINCT step_id) FROM lane_steps
        HAVING max(step_id) - min(step_id) + 1 <> count(*) OR count(*) <> count(DISTINCT step_id)""",
    "steps add up to the requests": """
        SELECT request_id FROM requests FULL JOIN (
          SELECT request_id, sum(emitted) AS emitted, sum(drafted) AS in_drafts, sum(accepted) AS in_accepted
          FROM step_sequences GROUP BY request_id) USING (request_id)
        WHERE output_tokens <> coalesce(emitted, 0) OR drafted <> coalesce(in_drafts, 0)
          OR accepted <> coalesce(in_accepted, 0) OR output_tokens IS NULL""",
    "lanes of a request add up to it": """
        SELECT request_no FROM requests JOIN (
          SELECT request_no, sum(tokens) AS tokens FROM request_lanes GROUP BY request_no) USING (request_no)
        WHERE output_tokens <> tokens""",
    "rollups add up to the steps": """
        SELECT * FROM (SELECT sum(emitted), sum(drafted), sum(accepted), sum(bonus), sum(prefill_tokens), count(*)
          FROM lane_steps)
        EXCEPT SELECT sum(emitted), sum(drafted), sum(accepted), sum(bonus), sum(prefill_tokens), sum(steps)
        FROM step_rollup""",
    "positions add up to the steps": """
        SELECT * FROM (SELECT sum(drafted), sum(accepted) FROM lane_steps)
        EXCEPT SELECT sum(drafted), sum(accepted) FROM position_rollup""",
}


@pytest.fixture(scope="module")
def played() -> Played:
    return play(REQUESTS, seed=11)


def test_the_run_holds_everything_that_could_upset_a_count(played: Played) -> None:
    reasons = Counter(told.reason for told in played.clients.values())
    assert set(reasons) >= {"stop", "length", "cancelled", "deadline"}
    lanes = Counter(record.lane for record in played.records if isinstance(record, StepRecord))
    assert set(lanes) >= {"prefill", "mixed", "plain", "pipelined", "ngram", "mtp", "dflash", "self_spec", "preempt"}
    assert any(record.preemptions for record in played.records if isinstance(record, RequestRecord))
    assert sum(isinstance(record, LeverRecord) for record in played.records) > 50
    accepted = [r for r in played.records if isinstance(r, StepRecord) and 0 < r.accepted < r.drafted]
    assert len(accepted) > 100


def test_clients_steps_and_requests_count_the_same_tokens(played: Played, tmp_path: Path) -> None:
    path = tmp_path / "m.duckdb"
    assert recorded(played.records, path) == []
    assert len(played.clients) == REQUESTS
    rows = (
        open_for_reading(path)
        .execute("SELECT request_id, output_tokens, reason, drafted, accepted FROM requests")
        .fetchall()
    )
    assert {row[0]: Told(row[1], row[2], row[1], row[3], row[4]) for row in rows} == played.clients


# ---- a falsified record is found ------------------------------------------------------------------------------

Falsify = Callable[[StepRecord], StepRecord | None]


def _more(name: str) -> Falsify:
    return lambda step: msgspec.structs.replace(step, **{name: getattr(step, name) + 1})


def _other_share(step: StepRecord) -> StepRecord:
    first, *rest = step.shares
    less = msgspec.structs.replace(first, emitted=first.emitted - 1)
    return msgspec.structs.replace(step, shares=(less, *rest))


def _other_request(step: StepRecord) -> StepRecord:
    """Sums of the step stay right, the tokens go to somebody else."""
    first, *rest = step.shares
    return msgspec.structs.replace(step, shares=(SeqShare("r0", *msgspec.structs.astuple(first)[1:]), *rest))


def _later_position(step: StepRecord) -> StepRecord:
    return msgspec.structs.replace(step, accepted_at=(*step.accepted_at, 1))


@pytest.mark.parametrize(
    "falsify",
    [
        *map(_more, ("emitted", "accepted", "bonus", "drafted", "prefill_tokens", "step_id")),
        _other_share, _other_request, _later_position, lambda step: None,
    ],
    ids=["emitted", "accepted", "bonus", "drafted", "prefill", "step id", "share", "request", "position", "lost"],
)  # fmt: skip
def test_one_falsified_step_is_found(falsify: Falsify, tmp_path: Path) -> None:
    played = play(40, seed=3)
    steps = [at for at, r in enumerate(played.records) if isinstance(r, StepRecord) and r.accepted]
    at = steps[len(steps) // 2]
    false = falsify(played.records[at])  # type: ignore[arg-type]
    records = [*played.records[:at], *([false] if false else []), *played.records[at + 1 :]]
    assert recorded(records, tmp_path / "m.duckdb")


def test_one_falsified_request_is_found(tmp_path: Path) -> None:
    played = play(40, seed=3)
    at = next(at for at, record in enumerate(played.records) if isinstance(record, RequestRecord))
    for name in ("output_tokens", "drafted", "accepted"):
        record = played.records[at]
        false = msgspec.structs.replace(record, **{name: getattr(record, name) + 1})
        records = [*played.records[:at], false, *played.records[at + 1 :]]
        assert recorded(records, tmp_path / f"{name}.duckdb")
