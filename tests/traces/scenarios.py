"""The scenarios whose exact device calls and client bytes are pinned (scheduler.md, section 7)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from engine.core.device import DrafterName
from engine.protocol.commands import Switches
from engine.protocol.events import Token
from telemetry.record import GateRecord, StepRecord
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

MTP, DFLASH, SELF = DrafterName.MTP, DrafterName.DFLASH, DrafterName.SELF


def head(name: DrafterName = MTP, **device: object) -> ScriptedDevice:
    return ScriptedDevice(drafters=frozenset({name}), **device)  # type: ignore[arg-type]


def plain() -> Workbench:
    bench = Workbench()
    bench.submit("a", max_tokens=4)
    return bench.run()


def chunked_prefill() -> Workbench:
    bench = Workbench(max_prefill_tokens=16)
    bench.submit("a", "the quick brown fox jumps over a lazy dog", max_tokens=2)
    return bench.run()


def mixed() -> Workbench:
    bench = Workbench(mixed_slice_tokens=6)
    bench.submit("a", max_tokens=8)
    bench.tick(2)
    bench.submit("b", "a prompt of some length", max_tokens=2)
    return bench.run()


def batched_mixed() -> Workbench:
    bench = Workbench(mixed_slice_tokens=16)
    bench.submit("a", max_tokens=7)
    bench.submit("b", "other", max_tokens=7)
    bench.tick(2)
    bench.submit("c", "short", max_tokens=2)
    bench.submit("d", "a longer prompt", max_tokens=2)
    return bench.run()


def unmixed_prefill_decodes_in_the_same_tick() -> Workbench:
    bench = Workbench(always_mixed="off")
    bench.submit("a", max_tokens=5)
    bench.tick(2)
    bench.submit("b", "later", max_tokens=2)
    return bench.run()


def ngram() -> Workbench:
    bench = Workbench(ScriptedDevice(next_token=cyclic_next), drafter="ngram", mtp_gate="force")
    bench.submit("a", "abcdefghijabcdef", max_tokens=14)
    return bench.run()


def combined() -> Workbench:
    """Copies where the alphabet has come round, the head's drafts before."""
    device = head(next_token=cyclic_next, accuracy=lambda position, at: at < 1)
    bench = Workbench(device, drafter="combined", mtp_gate="force")
    bench.submit("a", "qrstuv", max_tokens=34)
    return bench.run()


def self_spec() -> Workbench:
    bench = Workbench(head(SELF), drafter="self", mtp_gate="force")
    bench.submit("a", max_tokens=8)
    return bench.run()


def mtp_bootstrap() -> Workbench:
    """No hidden row was saved while the lever was off: the first step with a head is plain and saves one."""
    bench = Workbench(head(), drafter="off", mtp_gate="force")
    bench.submit("a", max_tokens=9)
    bench.tick(3)
    bench.set("drafter", "mtp")
    return bench.run()


def mtp_full_accept() -> Workbench:
    bench = Workbench(head(), drafter="mtp", mtp_gate="force")
    bench.submit("a", max_tokens=9)
    return bench.run()


def mtp_partial_accept() -> Workbench:
    bench = Workbench(head(accuracy=lambda position, at: at == 0), drafter="mtp", mtp_gate="force")
    bench.submit("a", max_tokens=7)
    return bench.run()


def batched_verify() -> Workbench:
    device = head(accuracy=lambda position, at: position % 4 != 0)
    bench = Workbench(device, drafter="mtp", mtp_gate="force")
    for name, prompt in (("a", "first"), ("b", "second one"), ("c", "third")):
        bench.submit(name, prompt, max_tokens=6)
    return bench.run()


def dflash_single() -> Workbench:
    bench = Workbench(head(DFLASH), drafter="dflash", num_drafts=7, k_ladder="1:7,8:3")
    bench.submit("a", max_tokens=17)
    return bench.run()


def dflash_batched() -> Workbench:
    bench = Workbench(head(DFLASH), drafter="dflash", num_drafts=7, k_ladder="1:7,8:3", mtp_gate="force")
    bench.submit("a", "one", max_tokens=9)
    bench.submit("b", "two", max_tokens=9)
    bench.submit("c", "three", max_tokens=9)
    return bench.run()


def gate_probe_switch_and_back() -> Workbench:
    """Verifying costs more than it delivers until rows become cheap: the gate leaves and comes back."""
    device = head(max_context=4096, num_blocks=1200, accuracy=lambda position, at: False)
    device.costs = Costs(step=1000, row=500, draft=200)
    bench = Workbench(device, drafter="mtp", spec_entry_pin_tokens=0)
    bench.submit("a", max_tokens=1500)
    for _ in range(500):
        bench.tick()
    device.accuracy = lambda position, at: True
    device.costs = Costs(step=1000, row=1, draft=1)
    return bench.run()


def gate_plain_runs_ahead() -> Workbench:
    """A gate that decodes plainly runs ahead; a probe reads what is in flight first."""
    device = head(max_context=1024, num_blocks=600, runs_ahead=True, accuracy=lambda position, at: False)
    device.costs = Costs(step=1000, row=2000, draft=500)
    bench = Workbench(device, drafter="mtp", spec_entry_pin_tokens=0)
    bench.submit("a", max_tokens=400)
    return bench.run()


def entry_pin() -> Workbench:
    """The gate believes in plain decoding, yet the first answer tokens of a new reply run the verify arm."""
    device = head(max_context=1024, num_blocks=600, accuracy=lambda position, at: False)
    device.costs = Costs(step=1000, row=2000, draft=500)
    bench = Workbench(device, drafter="mtp", spec_entry_pin_tokens=0)
    bench.submit("warm", max_tokens=300)
    bench.run()
    bench.set("spec_entry_pin_tokens", 8)
    bench.device.calls.clear()
    bench.submit("a", "again", max_tokens=12)
    return bench.run()


def preempt_requeue() -> Workbench:
    bench = Workbench(ScriptedDevice(num_blocks=8), admit_watermark=1, prefix_cache="off")
    bench.submit("a", "abcdefgh", max_tokens=12)
    bench.submit("b", "stuvwxyz", max_tokens=12)
    return bench.run()


def spill_out_and_in() -> Workbench:
    bench = Workbench(ScriptedDevice(num_blocks=8, spill_blocks=8), admit_watermark=1)
    bench.submit("a", "abcdefgh", max_tokens=12)
    bench.submit("b", "stuvwxyz", max_tokens=12)
    return bench.run()


def cancel_mid_stream() -> Workbench:
    bench = Workbench()
    bench.submit("a", max_tokens=50)
    bench.submit("b", "other", max_tokens=5)
    bench.tick(3)
    bench.cancel("a")
    return bench.run()


def deadline() -> Workbench:
    bench = Workbench()
    bench.submit("a", max_tokens=50, deadline_ms=5)
    bench.submit("b", "other", max_tokens=8)
    return bench.run()


def pipelined() -> Workbench:
    bench = Workbench(ScriptedDevice(runs_ahead=True))
    bench.submit("a", max_tokens=5)
    return bench.run()


def pipelined_over_run() -> Workbench:
    """`a` meets EOS at a step whose successor is already in flight; `b` goes on."""

    def stops_early(context: tuple[int, ...]) -> int:
        return EOS if context[0] == 0 and len(context) == 8 else hashed_next(context)

    bench = Workbench(ScriptedDevice(runs_ahead=True, next_token=stops_early))
    bench.submit("a", "abcde", max_tokens=30)
    bench.submit("b", "other", max_tokens=8)
    return bench.run()


def pipelined_settles_for_new_work() -> Workbench:
    bench = Workbench(ScriptedDevice(runs_ahead=True), mixed_slice_tokens=8)
    bench.submit("a", max_tokens=8)
    bench.tick(3)
    bench.submit("b", "news", max_tokens=3)
    return bench.run()


def loop_watchdog() -> Workbench:
    bench = Workbench(ScriptedDevice(next_token=lambda context: context[-1] ^ 1), loop_watchdog="on")
    bench.submit("a", "ab", max_tokens=100)
    return bench.run()


def prefix_reuse() -> Workbench:
    bench = Workbench()
    bench.submit("a", "you are a helpful assistant. hi", max_tokens=3)
    bench.run()
    bench.submit("b", "you are a helpful assistant. bye", max_tokens=3)
    return bench.run()


def thinking_budget() -> Workbench:
    """Thinking is closed by force at the first boundary past its budget; speculation waits for the answer."""
    device = head(next_token=lambda context: len("abcdefghijklmnopqrstuvwxyz ") + 26 if len(context) % 5 == 0 else 1)
    words = vocabulary(THINKING_SPECIAL)
    bench = Workbench(device, words=words, drafter="mtp", mtp_gate="force", think_budget=6)
    bench.submit("a", "think", max_tokens=16, switches=Switches(thinking_open=True))
    return bench.run()


SCENARIOS: dict[str, Callable[[], Workbench]] = {
    scenario.__name__: scenario
    for scenario in (
        plain,
        chunked_prefill,
        mixed,
        batched_mixed,
        unmixed_prefill_decodes_in_the_same_tick,
        ngram,
        combined,
        self_spec,
        mtp_bootstrap,
        mtp_full_accept,
        mtp_partial_accept,
        batched_verify,
        dflash_single,
        dflash_batched,
        gate_probe_switch_and_back,
        gate_plain_runs_ahead,
        entry_pin,
        preempt_requeue,
        spill_out_and_in,
        cancel_mid_stream,
        deadline,
        pipelined,
        pipelined_over_run,
        pipelined_settles_for_new_work,
        loop_watchdog,
        prefix_reuse,
        thinking_budget,
    )
}


MAX_CALLS = 60
"""A longer list of calls is pinned by its beginning and a digest."""


def render(bench: Workbench) -> str:
    """The trace of a finished scenario: device calls, then steps, then what each client got."""
    calls = _squeeze(bench.device.calls)
    if len(calls) > MAX_CALLS:
        digest = hashlib.blake2b("\n".join(calls).encode(), digest_size=8).hexdigest()
        calls = [*calls[:MAX_CALLS], f"... {len(calls)} lines in all, digest {digest}"]
    lines = ["# device calls", *calls, "", "# steps"]
    lines += _squeeze([_step(record) for record in bench.sink.steps()])
    gate = [record for record in bench.sink.records if isinstance(record, GateRecord)]
    if gate:
        lines += ["", "# gate", *_squeeze([f"{record.mode} runs {record.arm}: {record.reason}" for record in gate])]
    lines += ["", "# clients"]
    for name in sorted({event.request_id for event in bench.outbox.events if hasattr(event, "usage")}):
        end = bench.finish(name)
        lines.append(f"{name}: {bench.text(name)!r} {end.reason} {end.error}".rstrip())
        lines += [f"   {line}" for line in _squeeze([_origin(token) for token in bench.tokens(name)])]
    return "\n".join(lines) + "\n"


def _origin(token: Token) -> str:
    return f"{token.lane} draft {token.draft}" if token.draft else token.lane


def _step(record: StepRecord) -> str:
    why = " ".join(f"{lane}:{reason}" for lane, reason in record.refusals)
    counts = f"width={record.width} rows={record.rows} drafted={record.drafted} accepted={record.accepted}"
    return f"{record.lane} {counts} bonus={record.bonus} emitted={record.emitted} [{why}]"


def _squeeze(lines: list[str]) -> list[str]:
    """Equal neighbours as one line with a count, so that long runs stay readable."""
    out: list[tuple[str, int]] = []
    for line in lines:
        if out and out[-1][0] == line:
            out[-1] = (line, out[-1][1] + 1)
        else:
            out.append((line, 1))
    return [line if count == 1 else f"{line}  x{count}" for line, count in out]
