"""Rules of the contract that deserve a sentence of their own (scheduler.md, 2, 3, 5, 6 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.core.device import DeviceError, DeviceFacts, Draft, DrafterName, DraftItem
from engine.lanes.park import choose_victim
from engine.protocol.commands import Shutdown, Switches
from engine.protocol.events import Delta, LeverChanged, Snapshot
from telemetry.record import GateRecord, LeverRecord, RungRecord, ShadowRecord, StepRecord
from tests.fakes.bench import Workbench
from tests.fakes.scripted_device import (
    EOS,
    THINKING_SPECIAL,
    Costs,
    ScriptedDevice,
    cyclic_next,
    hashed_next,
    vocabulary,
)

MTP = frozenset({DrafterName.MTP})


def refusals(bench: Workbench, lane: str) -> list[str]:
    return [dict(step.refusals).get(lane, "") for step in bench.sink.steps()]


# Admission


def test_a_prompt_that_can_never_fit_is_refused_with_a_sentence() -> None:
    bench = Workbench(ScriptedDevice(num_blocks=4))
    bench.submit("a", "x" * 16)
    bench.run()
    end = bench.finish("a")
    assert end.reason == "refused"
    assert "16 tokens" in end.error


def test_a_lone_request_larger_than_its_reservation_is_admitted_anyway() -> None:
    bench = Workbench(ScriptedDevice(num_blocks=4))
    bench.submit("a", "x" * 12, max_tokens=1000)
    bench.run()
    assert bench.finish("a").reason == "length"
    assert len(bench.ids("a")) == 4


def test_a_watermark_of_one_seats_more_than_the_full_reservation() -> None:
    def seated(watermark: object) -> int:
        bench = Workbench(ScriptedDevice(num_blocks=12), admit_watermark=watermark)
        for at in range(4):
            bench.submit(f"r{at}", "abcdefgh", max_tokens=16)
        bench.tick()
        return len(bench.engine.queues.committed)

    assert seated("auto") == 2
    assert seated(1) > 2


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    bench = Workbench()
    bench.submit("a")
    bench.submit("a")
    bench.run()
    assert [end.reason for end in bench.finishes("a")] == ["refused", "length"]


def test_the_tick_does_not_look_at_the_whole_queue() -> None:

    bench = Workbench(batch=1)
    for at in range(500):
        bench.submit(f"r{at}", max_tokens=400)
    bench.tick()
    waiting = bench.engine.queues.waiting
    assert len(waiting) == 499
    bench.engine.queues.waiting = Tripwire(waiting)
    bench.tick(3)


class Tripwire:
    """A queue that may be asked for its head and length only."""

    def __init__(self, waiting: object) -> None:
        self._waiting = waiting

    def __getitem__(self, index: int) -> object:
        assert index == 0
        return self._waiting[0]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._waiting)  # type: ignore[arg-type]

    def __iter__(self) -> object:
        raise AssertionError("the tick walked the queue")


def test_nobody_overtakes_a_parked_sequence() -> None:
    bench = Workbench(ScriptedDevice(num_blocks=8), admit_watermark=1)
    for name in "ab":
        bench.submit(name, name * 8, max_tokens=12)
    bench.tick(9)
    assert bench.engine.queues.preempted
    bench.submit("late", "c", max_tokens=1)
    bench.tick()
    late = bench.engine.queues.by_id["late"]
    while bench.engine.queues.parked:
        assert not late.times.admitted
        bench.tick()
    bench.run()
    assert bench.finish("late").reason == "length"


def test_the_victim_has_generated_the_fewest_tokens_and_was_not_just_resumed() -> None:
    bench = Workbench(ScriptedDevice(num_blocks=400, max_context=400))
    for name in "abc":
        bench.submit(name, name * 3, max_tokens=300)
    bench.tick(100)
    first, second, third = bench.engine.queues.active
    assert choose_victim(bench.engine, third) is first
    first.emitted_at_resume = len(first.emitted) - 63
    assert choose_victim(bench.engine, third) is second
    for seq in (second, third):
        seq.emitted_at_resume = len(seq.emitted)
    assert choose_victim(bench.engine, third) is first


# Levers


def test_a_lever_takes_effect_at_the_next_tick_and_is_recorded_before_it_is_told() -> None:
    bench = Workbench()
    bench.set("num_drafts", 5)
    assert bench.ctx.levers.int("num_drafts") == 3
    bench.tick()
    assert bench.ctx.levers.int("num_drafts") == 5
    (told,) = [event for event in bench.outbox.events if isinstance(event, LeverChanged)]
    (kept,) = [record for record in bench.sink.records if isinstance(record, LeverRecord)]
    assert (told.old, told.new, told.tick) == (kept.old, kept.new, kept.tick) == (3, 5, 1)


@pytest.mark.parametrize(
    ("name", "value", "more", "word"),
    [
        ("num_drafts", 99, {}, "1 to 15"),
        ("num_draft", 3, {}, "num_drafts"),
        ("num_drafts", 5, {"expected": 4}, "look again"),
        ("kv_tokens", 4096, {}, "restart"),
    ],
)
def test_a_lever_change_that_cannot_be_is_refused_with_a_sentence(
    name: str, value: int, more: dict[str, object], word: str
) -> None:
    bench = Workbench()
    before = bench.ctx.levers.snapshot()
    bench.set(name, value, **more)
    bench.tick()
    (told,) = [event for event in bench.outbox.events if isinstance(event, LeverChanged)]
    assert word in told.error
    assert bench.ctx.levers.snapshot() == before


def test_a_read_only_engine_refuses_every_change() -> None:
    bench = Workbench(read_only="on")
    bench.set("num_drafts", 5)
    bench.tick()
    assert bench.ctx.levers.int("num_drafts") == 3


def test_a_lever_never_changes_under_a_step_in_flight() -> None:
    bench = Workbench(ScriptedDevice(runs_ahead=True))
    bench.submit("a", max_tokens=20)
    bench.tick(3)
    assert bench.engine.flight is not None
    bench.set("num_drafts", 5)
    seen = len(bench.outbox.events)
    bench.tick()
    kinds = [type(event) for event in bench.outbox.events[seen:]]
    assert kinds.index(Delta) < kinds.index(LeverChanged)


# Endings


def test_a_failing_device_ends_its_requests_with_the_error_and_never_with_stop() -> None:
    bench = Workbench(ScriptedDevice(fail_at=3, drafters=MTP), drafter="mtp", mtp_gate="force")
    bench.submit("a", max_tokens=40)
    bench.run()
    end = bench.finish("a")
    assert (end.reason, end.error) == ("error", "The scripted device was told to fail.")
    bench.check_pool()


def test_a_failing_pipelined_step_fails_its_requests_too() -> None:
    bench = Workbench(ScriptedDevice(fail_at=4, runs_ahead=True))
    bench.submit("a", max_tokens=40)
    bench.run()
    assert bench.finish("a").reason == "error"
    bench.check_pool()


def test_a_failing_drafter_fails_its_requests_too() -> None:
    class Broken(ScriptedDevice):
        def draft(self, *args: object) -> list[Draft]:
            raise DeviceError("The head lost its mind.")

    bench = Workbench(Broken(drafters=MTP), drafter="mtp", mtp_gate="force")
    bench.submit("a", max_tokens=40)
    bench.run()
    assert (bench.finish("a").reason, bench.finish("a").error) == ("error", "The head lost its mind.")
    bench.check_pool()


def test_a_step_that_takes_minutes_ends_its_requests_as_stalled() -> None:
    device = ScriptedDevice()
    bench = Workbench(device)
    bench.submit("a", max_tokens=40)
    bench.tick(2)
    device.costs.step = 130e6
    bench.run()
    assert bench.finish("a").reason == "stalled"


def test_shutdown_tells_every_client() -> None:
    bench = Workbench(batch=1)
    bench.submit("a", max_tokens=40)
    bench.submit("b", max_tokens=40)
    bench.tick(2)
    bench.inbox.put(Shutdown())
    bench.run()
    assert [bench.finish(name).reason for name in "ab"] == ["shutdown", "shutdown"]


def test_the_deadline_of_a_waiting_request_is_kept() -> None:
    bench = Workbench(batch=1)
    bench.submit("a", max_tokens=60)
    bench.submit("b", max_tokens=5, deadline_ms=10)
    bench.run()
    assert bench.finish("b").reason == "deadline"
    assert bench.ids("b") == []


def test_a_stop_string_inside_an_accepted_draft_ends_the_reply_there() -> None:
    bench = Workbench(ScriptedDevice(next_token=cyclic_next, drafters=MTP), drafter="mtp", mtp_gate="force")
    bench.submit("a", "abc", max_tokens=40, stop=("fg",))
    bench.run()
    assert bench.text("a") == "de"
    assert bench.finish("a").reason == "stop"
    (last,) = [step for step in bench.sink.steps("mtp") if step.emitted][-1:]
    assert last.accepted + last.bonus == last.emitted == 3


def test_drafts_after_eos_are_not_counted_as_accepted() -> None:
    def ends_at_nine(context: tuple[int, ...]) -> int:
        return EOS if len(context) >= 9 else hashed_next(context)

    bench = Workbench(ScriptedDevice(next_token=ends_at_nine, drafters=MTP), drafter="mtp", mtp_gate="force")
    bench.submit("a", "hello", max_tokens=40)
    bench.run()
    usage = bench.finish("a").usage
    assert usage.accepted <= usage.output_tokens == 5
    assert sum(step.accepted for step in bench.sink.steps()) == usage.accepted


# Speculation


def test_one_request_in_thinking_stops_speculation_for_all_and_the_record_says_so() -> None:
    device = ScriptedDevice(drafters=MTP)
    bench = Workbench(device, words=vocabulary(THINKING_SPECIAL), drafter="mtp", mtp_gate="force")
    bench.submit("thinks", max_tokens=10, switches=Switches(thinking_open=True))
    bench.submit("talks", "other", max_tokens=10)
    bench.run()
    assert "thinking" in refusals(bench, "mtp")
    snapshots = [event for event in bench.outbox.events if isinstance(event, Snapshot)]
    assert any(event.refusals.get("mtp") == "thinking" for event in snapshots)


def test_a_resume_guard_is_always_reached_by_plain_decoding() -> None:
    bench = Workbench(ScriptedDevice(drafters=MTP), drafter="mtp", mtp_gate="force", dflash_resume_guard=4)
    bench.submit("a", max_tokens=12)
    bench.run()
    reasons = refusals(bench, "mtp")
    assert reasons.count("resume_guard") == 3
    assert bench.sink.steps("mtp")


def test_speculation_disabled_by_a_request_is_refused_with_that_reason() -> None:
    bench = Workbench(ScriptedDevice(drafters=MTP), drafter="mtp", mtp_gate="force")
    bench.submit("a", switches=Switches(speculate=False))
    bench.run()
    assert not bench.sink.steps("mtp")
    assert "disabled_by_request" in refusals(bench, "mtp")


def test_the_default_levers_leave_the_batched_verify_reachable() -> None:
    bench = Workbench(ScriptedDevice(drafters=MTP), drafter="mtp", mtp_gate="force")
    for name in "abcd":
        bench.submit(name, name * 3, max_tokens=12)
    bench.run()
    assert any(step.width == 4 and step.drafted > 4 for step in bench.sink.steps("mtp"))


def test_rejected_drafts_leave_no_block_behind() -> None:
    device = ScriptedDevice(drafters=MTP, accuracy=lambda position, at: False)
    bench = Workbench(device, drafter="mtp", mtp_gate="force", num_drafts=9, k_ladder="8:9")
    bench.submit("a", max_tokens=40)
    for _ in range(12):
        bench.tick()
        (seq,) = bench.engine.queues.active
        assert len(seq.blocks) == bench.engine.pool.blocks_for(seq.seq_len)


def test_a_draft_chain_has_blocks_for_all_its_rows() -> None:
    """A drafter writes KV rows above the history; where its blocks end it would have to stop short."""
    short: list[int] = []

    class Watching(ScriptedDevice):
        def draft(self, drafter: DrafterName, items: Sequence[DraftItem], conf_min: float) -> list[Draft]:
            short.extend(
                item.seq_len for item in items if len(item.blocks) * self.block_size < item.seq_len + 1 + item.count
            )
            return super().draft(drafter, items, conf_min)

    bench = Workbench(Watching(drafters=MTP), drafter="mtp", mtp_gate="force")
    bench.submit("a", max_tokens=60)
    bench.run()
    assert bench.sink.steps("mtp")
    assert not short


def test_auto_never_chooses_a_copy_where_there_is_nothing_to_copy() -> None:
    bench = Workbench(ScriptedDevice(max_context=600, num_blocks=200), drafter="auto")
    bench.submit("a", "abcabdabeabf", max_tokens=300)
    bench.run()
    chosen = [record for record in bench.sink.records if isinstance(record, GateRecord) and "ngram" in record.arm]
    assert chosen
    assert len(chosen) == len(bench.sink.steps("ngram"))


def test_combined_copies_where_that_promises_more_and_asks_the_head_elsewhere() -> None:
    bench = Workbench(
        ScriptedDevice(drafters=MTP, next_token=cyclic_next, accuracy=lambda position, at: at < 1, max_context=200),
        drafter="combined",
        mtp_gate="force",
    )
    bench.submit("a", max_tokens=120)
    bench.run()
    lanes = [step.lane for step in bench.sink.steps("mtp", "ngram")]
    assert lanes[0] == "mtp", "there is nothing to copy yet"
    assert lanes[-3:-1] == ["ngram", "ngram"], "the alphabet has come round"
    assert {reason for reason in refusals(bench, "ngram") if reason} == {"not_chosen"}
    assert max(step.accepted for step in bench.sink.steps("ngram")) > 8


def test_combined_without_a_head_or_for_a_wide_batch_is_what_is_left() -> None:
    headless = Workbench(ScriptedDevice(next_token=cyclic_next, max_context=200), drafter="combined", mtp_gate="force")
    headless.submit("a", max_tokens=80)
    headless.run()
    assert headless.sink.steps("ngram")
    wide = Workbench(ScriptedDevice(drafters=MTP, next_token=cyclic_next), drafter="combined", mtp_gate="force")
    for name in "ab":
        wide.submit(name, max_tokens=30)
    wide.run()
    assert any(step.width == 2 and step.drafted for step in wide.sink.steps("mtp"))


def test_each_flip_of_the_width_decision_is_an_event() -> None:
    bench = Workbench(ScriptedDevice(drafters=MTP), drafter="mtp", mtp_max_seqs=1)
    bench.submit("a", max_tokens=20)
    bench.tick(3)
    bench.submit("b", "second", max_tokens=4)
    bench.run()
    flips = [record.speculates for record in bench.sink.records if isinstance(record, RungRecord)]
    assert flips == [False, True]


def test_a_mixed_step_leaves_no_draft_behind() -> None:
    bench = Workbench(ScriptedDevice(drafters=MTP), drafter="mtp", mtp_gate="force", mixed_slice_tokens=4)
    bench.submit("a", max_tokens=30)
    bench.tick(2)
    bench.submit("b", "a long second prompt", max_tokens=3)
    bench.run()
    assert bench.sink.steps("mixed")
    assert all(step.drafted == 0 for step in bench.sink.steps("mixed"))


def test_the_shadow_check_reruns_its_share_of_verify_steps_and_finds_no_difference() -> None:
    bench = Workbench(ScriptedDevice(drafters=MTP), drafter="mtp", mtp_gate="force", shadow_check=0.5)
    bench.submit("a", max_tokens=40)
    bench.run()
    checks = [record for record in bench.sink.records if isinstance(record, ShadowRecord)]
    verifies = [step for step in bench.sink.steps("mtp") if step.drafted]
    assert abs(len(checks) - len(verifies) / 2) <= 1
    assert all(check.differing == 0 for check in checks)


def test_a_row_that_needs_the_host_is_not_run_ahead() -> None:
    bench = Workbench(ScriptedDevice(runs_ahead=True))
    bench.submit("a", min_tokens=3, max_tokens=6)
    bench.run()
    assert "host_sampling" in refusals(bench, "pipelined")
    assert bench.sink.steps("pipelined")


def test_what_auto_decodes_plainly_runs_ahead_and_says_the_same() -> None:
    replies = []
    for runs_ahead in (False, True):
        device = ScriptedDevice(runs_ahead=runs_ahead, drafters=MTP, max_context=1024, num_blocks=300)
        device.accuracy = lambda position, at: False
        device.costs = Costs(step=1000, row=2000, draft=500)
        bench = Workbench(device, drafter="auto")
        bench.submit("a", max_tokens=300)
        bench.run()
        replies.append([token.id for token in bench.tokens("a")])
        lanes = {step.lane for step in bench.sink.records if isinstance(step, StepRecord)}
        assert ("pipelined" in lanes) == runs_ahead
    assert replies[0] == replies[1]
    assert bench.sink.steps("mtp")


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("drafter", ["auto", "mtp"])
def test_a_plain_step_lists_running_ahead_as_refused_only_where_it_cannot(drafter: str, runs_ahead: bool) -> None:
    device = ScriptedDevice(runs_ahead=runs_ahead, drafters=MTP, max_context=1024, num_blocks=300)
    device.accuracy = lambda position, at: False
    device.costs = Costs(step=1000, row=2000, draft=500)
    bench = Workbench(device, drafter=drafter)
    bench.submit("a", max_tokens=300)
    bench.run()
    plain = bench.sink.steps("pipelined" if runs_ahead else "plain")
    assert len(plain) > 100
    assert {("pipelined", "speculation") in step.refusals for step in plain} == {not runs_ahead}


# Prompts


def test_a_second_prompt_reuses_the_blocks_of_a_shared_prefix() -> None:
    bench = Workbench()
    bench.submit("a", "you are a helpful assistant. hi", max_tokens=3)
    bench.run()
    bench.submit("b", "you are a helpful assistant. bye", max_tokens=3)
    bench.run()
    assert bench.finish("b").usage.cached_tokens == 28
    assert max(step.cached_tokens for step in bench.sink.steps("prefill")) == 28


def test_slai_seats_the_head_first_and_then_the_shortest() -> None:
    bench = Workbench(batch=2, policy="slai")
    for name, prompt in (("head", "a" * 20), ("long", "b" * 30), ("short", "cc")):
        bench.submit(name, prompt, max_tokens=9)
    bench.tick()
    seated = {seq.request_id for seq in bench.engine.queues.committed}
    assert seated == {"head", "short"}


def test_slai_holds_prefill_while_someone_waits_too_long_for_a_token() -> None:
    device = ScriptedDevice()
    bench = Workbench(device, policy="slai", tbt_deadline_ms=10, always_mixed="off")
    bench.submit("a", max_tokens=20)
    bench.tick(2)
    device.clock.advance_us(9_000)
    bench.submit("b", "later", max_tokens=2)
    bench.tick()
    assert device.calls[-1].startswith("forward decode s1")


def test_a_mixed_step_is_no_longer_than_its_cap() -> None:
    bench = Workbench(ScriptedDevice(), mixed_slice_tokens=5)
    bench.submit("a", max_tokens=20)
    bench.tick(2)
    bench.submit("b", "x" * 30, max_tokens=2)
    bench.run()
    assert max(step.prefill_tokens for step in bench.sink.steps("mixed")) == 5


def test_an_automatic_slice_keeps_a_mixed_step_within_its_stretch() -> None:
    device = ScriptedDevice(max_context=4096, num_blocks=2000)
    device.costs.step, device.costs.row = 5_000, 300
    bench = Workbench(device, mixed_slice_tokens="auto")
    bench.submit("a", max_tokens=400)
    bench.tick(4)
    bench.submit("b", "x" * 2000, max_tokens=2)
    bench.run()
    decode = 5_000 + 300
    steps = [(step.end_ns - step.start_ns) / 1000 for step in bench.sink.steps("mixed")]
    assert max(steps[3:]) < 3 * decode
    assert bench.sink.steps("mixed")[10].prefill_tokens > 16


class OnCpu(ScriptedDevice):
    @property
    def facts(self) -> DeviceFacts:
        return replace(super().facts, kind="cpu")


@pytest.mark.parametrize(
    ("device", "lever", "kept"), [(OnCpu, "auto", 16_384), (ScriptedDevice, "auto", 20_160), (OnCpu, 3000, 3000)]
)
def test_ended_requests_keep_so_many_tokens_for_later_prompts(
    device: type[ScriptedDevice], lever: object, kept: int
) -> None:
    bench = Workbench(device(max_context=4096, num_blocks=8000), prefix_cache_tokens=lever)
    for at in range(10):
        bench.submit(f"r{at}", chr(97 + at) * 2016, max_tokens=1)
        bench.run()
    assert bench.engine.pool.idle * bench.engine.pool.block_size == kept
    bench.submit("again", "j" * 2016, max_tokens=1)
    bench.submit("first", "a" * 2016, max_tokens=1)
    bench.run()
    assert bench.finish("again").usage.cached_tokens > 2000
    assert (bench.finish("first").usage.cached_tokens > 0) == (kept == 20_160)
    bench.check_pool()


def test_a_preempted_sequence_comes_back_through_the_prefix_cache() -> None:
    for length in range(4, 13):
        bench = Workbench(ScriptedDevice(num_blocks=8), admit_watermark=1)
        alone = Workbench()
        for name in "ab":
            for where in (bench, alone):
                where.submit(name, name * length, max_tokens=14)
        bench.run()
        alone.run()
        assert [bench.ids(name) for name in "ab"] == [alone.ids(name) for name in "ab"]
        bench.check_pool()


def test_a_spill_store_that_fails_costs_a_second_prefill_and_nothing_else() -> None:
    class Unreadable(ScriptedDevice):
        def restore(self, seq: int, blocks: Sequence[int]) -> None:
            raise DeviceError("The spill file cannot be read.")

    class Unwritable(ScriptedDevice):
        def spill(self, seq: int, blocks: Sequence[int]) -> bool:
            raise DeviceError("The spill file cannot be written.")

    alone = Workbench()
    for name in "ab":
        alone.submit(name, name * 8, max_tokens=12)
    alone.run()
    for device in (Unreadable(num_blocks=8, spill_blocks=8), Unwritable(num_blocks=8, spill_blocks=8)):
        bench = Workbench(device, admit_watermark=1)
        for name in "ab":
            bench.submit(name, name * 8, max_tokens=12)
        bench.run()
        assert [bench.ids(name) for name in "ab"] == [alone.ids(name) for name in "ab"]
        assert bench.sink.steps("preempt") or bench.sink.steps("swap")
        bench.check_pool()


def test_an_id_beyond_the_tokenizer_stands_for_no_text() -> None:
    bench = Workbench(ScriptedDevice(vocab_size=90, next_token=lambda context: 80 if len(context) == 6 else 0))
    bench.submit("a", "hello", max_tokens=3)
    bench.run()
    assert bench.ids("a") == [0, 80, 0]
    assert bench.text("a") == "aa"


def test_an_ngram_lever_reaches_replies_that_are_running() -> None:
    bench = Workbench(ScriptedDevice(next_token=cyclic_next), drafter="ngram", mtp_gate="force", ngram_copy_max=2)
    bench.submit("a", "abcdefghijklmnopqrstuvwxyz" * 2, max_tokens=60)
    bench.tick(4)
    assert max(step.drafted for step in bench.sink.steps("ngram")) == 2
    bench.set("ngram_copy_max", 8)
    bench.run()
    assert max(step.drafted for step in bench.sink.steps("ngram")) == 8


def test_the_time_of_a_shadow_check_is_not_the_steps() -> None:
    def longest(share: float) -> float:
        bench = Workbench(ScriptedDevice(drafters=MTP), drafter="mtp", mtp_gate="force", shadow_check=share)
        bench.submit("a", max_tokens=40)
        return max((step.end_ns - step.start_ns) for step in bench.run().sink.steps("mtp"))

    assert longest(1.0) == longest(0.0)


def test_nothing_is_emitted_twice_when_a_sequence_was_parked() -> None:
    device = ScriptedDevice(num_blocks=8)
    bench = Workbench(device, admit_watermark=1)
    for name in "ab":
        bench.submit(name, name * 8, max_tokens=12)
    bench.run()
    alone = Workbench()
    alone.submit("a", "a" * 8, max_tokens=12)
    assert bench.ids("a") == alone.run().ids("a")
    assert max(bench.finish(name).usage.preemptions for name in "ab") > 0
