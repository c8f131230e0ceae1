"""Whatever arrives, in whatever order, with whatever levers: every reply is the one that plain decoding gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from engine.core.device import DrafterName
from engine.core.draws import uniform
from engine.protocol.commands import Sampling
from telemetry.record import RequestRecord, StepRecord
from telemetry.ring import composed
from tests.fakes.bench import Workbench
from tests.fakes.scripted_device import EOS, LETTERS, ScriptedDevice, hashed_next

SEED = 7


def often_stops(context: tuple[int, ...]) -> int:
    """`hashed_next` with an EOS about every thirty tokens."""
    token = hashed_next(context)
    return EOS if token == 3 and len(context) % 2 else token


def expected(prompt: tuple[int, ...], max_tokens: int, temperature: float, limit: int) -> list[int]:
    """What the scripted model says to a prompt when it is alone, without any scheduler."""
    reply: list[int] = []
    while len(reply) < min(max_tokens, limit - len(prompt)):
        token = often_stops((*prompt, *reply))
        if temperature:
            token = (token + int(uniform(SEED, len(reply)) * 3)) % len(LETTERS)
        reply.append(token)
        if token == EOS:
            break
    return reply


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    deadline_ms: int


@dataclass(frozen=True)
class CancelIt:
    which: int


@dataclass(frozen=True)
class Flip:
    name: str
    value: str


@dataclass(frozen=True)
class Ticks:
    count: int


@dataclass(frozen=True)
class World:
    num_blocks: int
    spill_blocks: int
    runs_ahead: bool
    batch: int
    wrong_every: int
    levers: dict[str, str] = field(default_factory=dict)


FLIPS = {
    "drafter": ["off", "ngram", "self", "mtp", "dflash", "combined", "auto"],
    "num_drafts": ["1", "3", "7"],
    "mtp_gate": ["auto", "force", "off"],
    "k_ladder": ["1:7,8:3", "4:3,8:1"],
    "prefix_cache": ["on", "off"],
    "always_mixed": ["on", "off"],
    "mixed_slice_tokens": ["auto", "0", "3"],
    "max_prefill_tokens": ["16", "64"],
    "admit_watermark": ["1", "16", "auto"],
    "policy": ["fifo", "slai"],
    "pipelined_decode": ["on", "off"],
    "dflash_adaptive": ["on", "off"],
    "shadow_check": ["0", "0.5"],
    "spec_entry_pin_tokens": ["0", "8"],
    "mtp_max_seqs": ["1", "32"],
}
flips = st.sampled_from(sorted(FLIPS)).flatmap(
    lambda name: st.builds(Flip, st.just(name), st.sampled_from(FLIPS[name]))
)
prompts = st.lists(st.integers(0, 5), min_size=1, max_size=24).map(tuple)
asks = st.builds(
    Ask,
    prompts,
    st.integers(1, 24),
    st.sampled_from([0.0, 0.0, 0.8]),
    st.sampled_from([0, 0, 0, 12]),
)
actions = st.lists(
    st.one_of(asks, asks, flips, st.builds(CancelIt, st.integers(0, 9)), st.builds(Ticks, st.integers(1, 9))),
    min_size=1,
    max_size=24,
)
worlds = st.builds(
    World,
    num_blocks=st.sampled_from([13, 16, 24, 80]),
    spill_blocks=st.sampled_from([0, 6, 100]),
    runs_ahead=st.booleans(),
    batch=st.sampled_from([1, 3, 8]),
    wrong_every=st.integers(1, 5),
    levers=st.fixed_dictionaries({"drafter": st.sampled_from(FLIPS["drafter"])}),
)


def play(world: World, script: list[object]) -> tuple[Workbench, dict[str, Ask]]:
    device = ScriptedDevice(
        next_token=often_stops,
        num_blocks=world.num_blocks,
        spill_blocks=world.spill_blocks,
        runs_ahead=world.runs_ahead,
        drafters=frozenset({DrafterName.SELF, DrafterName.MTP, DrafterName.DFLASH}),
        accuracy=lambda position, at: position % world.wrong_every != 0,
    )
    bench = Workbench(device, batch=world.batch, **world.levers)
    asked: dict[str, Ask] = {}
    for action in script:
        match action:
            case Ask():
                name = f"r{len(asked)}"
                asked[name] = action
                sampling = Sampling(temperature=action.temperature, seed=SEED)
                bench.submit(
                    name, action.prompt, max_tokens=action.max_tokens, sampling=sampling, deadline_ms=action.deadline_ms
                )
            case CancelIt(which):
                bench.cancel(f"r{which}")
            case Flip(name, value):
                bench.set(name, value)
            case Ticks(count):
                bench.tick(count)
    return bench.run(), asked


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds, actions)
def test_any_mix_of_work_and_levers_gives_plain_replies_and_leaks_nothing(world: World, script: list[object]) -> None:
    bench, asked = play(world, script)
    limit = bench.engine.context_limit
    for name, ask in asked.items():
        end, got = bench.finish(name), bench.ids(name)
        whole = expected(ask.prompt, ask.max_tokens, ask.temperature, limit)
        if end.reason in ("stop", "length"):
            assert got == whole
            assert end.reason == ("stop" if whole[-1] == EOS else "length")
        else:
            assert end.reason in ("cancelled", "deadline")
            assert got == whole[: len(got)]
        assert bench.text(name) == "".join(LETTERS[token] for token in got if token != EOS)
        assert end.usage.output_tokens == len(got)
        assert sum(end.usage.tokens_by_lane.values()) == len(got)
    bench.check_pool()
    check_records(bench, asked)


def check_records(bench: Workbench, asked: dict[str, Ask]) -> None:
    """Steps, shares and requests count the same tokens that the clients got, however late their records are made."""
    assert [composed(entry) for entry in bench.sink.entries] == bench.sink.records
    given_to = dict.fromkeys(asked, 0)
    for record in bench.sink.records:
        if isinstance(record, StepRecord):
            assert record.emitted == record.accepted + record.bonus
            assert record.emitted == sum(share.emitted for share in record.shares)
            assert record.drafted == sum(record.drafted_at) >= record.accepted == sum(record.accepted_at)
            for share in record.shares:
                given_to[share.request_id] += share.emitted
    assert given_to == {name: len(bench.ids(name)) for name in asked}
    ends = [record for record in bench.sink.records if isinstance(record, RequestRecord)]
    assert sorted(record.request_id for record in ends) == sorted(asked)


@settings(max_examples=60, deadline=None)
@given(st.lists(asks, min_size=2, max_size=12), st.sampled_from([13, 20, 80]), st.sampled_from([1, 2, 4]))
def test_first_come_is_first_served(work: list[Ask], num_blocks: int, batch: int) -> None:
    bench, _ = play(World(num_blocks, 0, False, batch, 1, {"drafter": "off"}), list(work))
    admitted = {r.request_id: r.admitted_ns for r in bench.sink.records if isinstance(r, RequestRecord)}
    order = [admitted[f"r{at}"] for at in range(len(work)) if admitted[f"r{at}"]]
    assert order == sorted(order)
