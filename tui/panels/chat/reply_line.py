"""The line under a reply: speed, time to first token, tokens, accepted drafts, and speed-up over plain decoding."""

from __future__ import annotations

from textual.content import Content

from tui import words
from tui.charts import Part
from tui.conversation import Reply

_WAITING = {"sent": "sending", "queued": "in the queue", "streaming": "speaking", "stopping": "stopping"}


def reply_line(reply: Reply, now: float) -> Content:
    if reply.error:
        return Content.styled(f"✗ {words.harmless(reply.error)}", "$text-error")
    parts: list[Part] = [_state(reply, now)]
    if reply.tokens or reply.usage:
        parts += _speed(reply)
    if reply.usage is not None and reply.status == "done":
        parts += _drafts(reply)
    return Content.assemble(*parts)


def _state(reply: Reply, now: float) -> Part:
    if reply.status == "done":
        ordinary = reply.reason == "stop"
        return ("" if ordinary else f"{words.finish(reply.reason)} · ", "" if ordinary else "$text-warning")
    waited = "" if reply.first_at else f" {words.seconds(now - reply.asked)}"
    return (f"{_WAITING[reply.status]}{waited} · ", "$text-accent")


def _speed(reply: Reply) -> list[Part]:
    output = reply.usage.output_tokens if reply.usage else len(reply.tokens)
    return [
        (f"{words.number(reply.tokens_per_s)} tok/s", "$foreground"),
        (f" · TTFT {words.milliseconds(reply.ttft_ms)} · {words.count(output)} tokens", "$quiet"),
    ]


def _drafts(reply: Reply) -> list[Part]:
    usage = reply.usage
    if usage is None:
        return []
    drafts = f"{usage.accepted}/{usage.drafted} drafts" if usage.drafted else "no drafts"
    gain = reply.speedup
    style = "$quiet" if gain is None else "$text-success" if gain >= 1 else "$text-warning"
    return [(f" · {drafts} · ", "$quiet"), (words.speedup(gain), style)]
