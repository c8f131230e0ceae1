"""Messages of the wire as a server would send them: deterministic, for the fake server, the snapshots and the bench."""

from __future__ import annotations

import math
import re

from engine.levers.catalog import LEVERS
from engine.protocol import wire
from engine.protocol.events import Facts, Token, Usage

START = 1_800_000_000.0
FACTS = Facts(
    run_id="0198c0ffee00",
    model="SmolLM2-135M-Instruct",
    device="cpu",
    dtype="bfloat16",
    vocab_size=49152,
    max_context=2048,
    kv_tokens=16384,
    block_size=16,
    max_batch_size=8,
    drafters=("ngram", "self"),
)
ANSWER = """Speculative decoding lets a cheap **drafter** guess several tokens and the model check them in one step.

1. The drafter proposes `k` tokens.
2. The model verifies all of them at once.
3. The longest correct prefix is kept, so the output is *the same*.

```python
def accept(drafts, verified):
    for n, (draft, token) in enumerate(zip(drafts, verified)):
        if draft != token:
            return n
    return len(drafts)
```

It pays off when acceptance is high and verification is cheap."""


def levers() -> tuple[wire.LeverView, ...]:
    return tuple(
        wire.LeverView(
            name=lever.name,
            group=lever.group,
            kind=lever.kind.value,
            value=lever.default,
            default=lever.default,
            help=lever.help,
            source="default",
            applies=lever.applies.value,
            lossless=lever.lossless,
            bounds=lever.bounds,
            unit=lever.unit,
            minimum=lever.minimum,
            maximum=lever.maximum,
            choices=lever.choices,
            none_word=lever.none_word,
            env=lever.env,
        )
        for lever in LEVERS.values()
    )


def welcome(state: str = "ready", role: str = "control", session: str = "s1") -> wire.Welcome:
    return wire.Welcome(
        version=wire.WIRE_VERSION,
        session=session,
        state=state,
        role=role,
        facts=FACTS if state == "ready" else None,
        levers=levers(),
    )


def pieces(text: str = ANSWER) -> list[str]:
    """Text cut as a tokenizer might."""
    return re.findall(r"\s?\w+|[^\w\s]|\s+", text)


def tokens(text: str = ANSWER, first_step: int = 100) -> list[Token]:
    """Tokens of `text` with origins: runs of n-gram drafts (one refused now and then) between pipelined tokens."""
    made: list[Token] = []
    step, draft = first_step, 0
    for index, piece in enumerate(pieces(text)):
        drafting = (index // 9) % 2 == 1
        draft = (draft % 3) + 1 if drafting and draft < 3 else 0
        if draft == 0 or not drafting:
            step += 1
        corrected = drafting and draft == 0 and index % 4 == 0
        made.append(
            Token(
                id=1000 + index % 97,
                lane="ngram" if drafting else "mixed" if index < 2 else "pipelined" if index % 5 else "plain",
                draft=draft if drafting else 0,
                step=step,
                text=piece,
                logprob=-0.05 - (index * 37 % 100) / 60,
                top=((1000 + index % 97, -0.05), (1007, -1.9), (1031, -3.2)),
                rejected=(1007, 1031) if corrected else (),
            )
        )
    return made


def delta(request_id: str, part: list[Token]) -> wire.Delta:
    text = "".join(token.text for token in part)
    return wire.Delta(request_id=request_id, text=text, tokens=tuple(part), spelled={1007: " quite", 1031: "\n"})


def done(request_id: str, said: list[Token], reason: str = "stop", speedup: float | None = 1.37) -> wire.Done:
    lanes: dict[str, int] = {}
    for token in said:
        lanes[token.lane] = lanes.get(token.lane, 0) + 1
    drafted = sum(1 for token in said if token.draft) + sum(len(token.rejected) for token in said)
    return wire.Done(
        request_id=request_id,
        reason=reason,
        usage=Usage(
            prompt_tokens=38,
            output_tokens=len(said),
            drafted=drafted,
            accepted=sum(1 for token in said if token.draft),
            ttft_us=118_000,
            decode_us=len(said) * 17_500,
            tokens_by_lane=lanes,
        ),
        speedup=speedup,
    )


def stats(frame: int, *, busy: bool = True, time: float | None = None) -> wire.Stats:
    """Frame number `frame` at four a second."""
    rate = 46 + 14 * math.sin(frame / 9) + 5 * math.sin(frame / 2.3) if busy else 0.0
    made = round(rate / 4)
    ngram = made * 6 // 10
    lanes = {
        "ngram": wire.LaneStats(
            steps=max(1, ngram // 2), tokens=ngram, seconds=0.12, drafted=ngram + 3, accepted=ngram - ngram // 3,
            drafted_at=(ngram // 2 + 1, ngram // 3 + 1, ngram // 4 + 1),
            accepted_at=(ngram // 2, ngram // 4, ngram // 8),
        ),
        "pipelined": wire.LaneStats(steps=made - ngram, tokens=made - ngram, seconds=0.1),
        "plain": wire.LaneStats(steps=frame % 2, tokens=frame % 2, seconds=0.02),
    }  # fmt: skip
    return wire.Stats(
        time=START + frame / 4 if time is None else time,
        window_s=0.25,
        tick=frame * 12,
        tokens_per_s=rate,
        prefill_tokens_per_s=120.0 if busy and frame % 40 < 3 else 0.0,
        lanes=lanes if busy else {},
        ttft=wire.Quantiles(p50=118.0, p95=241.5, p99=410.2, count=24) if busy else wire.Quantiles(),
        tpot=wire.Quantiles(p50=17.4, p95=28.9, p99=44.0, count=2100) if busy else wire.Quantiles(),
        waiting=1 if busy and frame % 30 < 6 else 0,
        prefilling=0,
        active=3 if busy else 0,
        swapped=0,
        preempted=0,
        kv_used_tokens=1536 + frame % 64 if busy else 0,
        kv_total_tokens=16384,
        cached_tokens=412,
        lane="ngram" if busy else "",
        refusals={"mtp": "no_drafter", "dflash": "no_drafter", "pipelined": "speculation"} if busy else {},
        total_tokens=41_234 + frame * 12,
        total_requests=57,
        lost={"spans": 0, "records": 0},
        telemetry_cost=0.0041,
        database="ok",
        plain_tokens_per_s=34.2,
    )


def gate(frame: int = 0, reason: str = "hold", arm: str = "verify") -> wire.GateView:
    return wire.GateView(
        time=START + frame / 4,
        mode="auto",
        arm=arm,
        reason=reason,
        arms=(
            wire.ArmView(name="verify", tokens_per_s=46.8, deviation=3.1, age_tokens=12),
            wire.ArmView(name="plain", tokens_per_s=34.2, deviation=1.4, age_tokens=388, stale=False),
        ),
        margin=2.4,
        losses=0,
        depth=512,
        width_bucket=4,
        tokens_until_probe=636,
        switches=2,
    )


def requests(frame: int = 0) -> wire.Requests:
    rows = [
        wire.RequestView(request_id="r-1a2b", state="active", age_s=4.2, prompt_tokens=38, output_tokens=171,
                         tokens_per_s=44.1, ttft_ms=118.0, drafted=96, accepted=61, lane="ngram", conversation_id="c1"),
        wire.RequestView(request_id="r-3c4d", state="active", age_s=9.0, prompt_tokens=812, output_tokens=320,
                         tokens_per_s=38.9, ttft_ms=402.0, drafted=210, accepted=120, lane="ngram"),
        wire.RequestView(request_id="r-5e6f", state="waiting", age_s=0.4, prompt_tokens=64, output_tokens=0),
        wire.RequestView(request_id="r-0099", state="finished", age_s=31.5, prompt_tokens=22, output_tokens=96,
                         tokens_per_s=33.0, ttft_ms=97.0, reason="stop"),
    ]  # fmt: skip
    return wire.Requests(time=START + frame / 4, rows=tuple(rows))


def lever_event(name: str, old: object, new: object, time: float, change_id: str = "c1") -> wire.LeverEvent:
    return wire.LeverEvent(
        change_id=change_id,
        name=name,
        old=old,  # type: ignore[arg-type]
        new=new,  # type: ignore[arg-type]
        tick=4711,
        time=time,
        origin="tui",
        actor="s1",
    )
