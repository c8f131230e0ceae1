"""What may be asked of the engine: typed messages that travel down the link, and the parts clients fill in."""

from __future__ import annotations

import msgspec

Value = bool | int | float | str


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of every message; the tag names its type on the wire."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: the engine draws one and reports it."""
    logprobs: int = -1
    """-1 none, 0 the token's own, n also the n most likely (at most 20)."""


CHAT_SAMPLING = Sampling(temperature=0.7, top_p=0.95)
"""What a person's chat begins with: drawing from all of a small model's distribution wanders off within a sentence."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a reply ends."""

    max_tokens: int = 0
    """0: what the context leaves."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    deadline_ms: int = 0
    """Wall time from arrival; 0 is none."""


class Switches(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Per-request exceptions to the levers."""

    speculate: bool = True
    suppress_tools: bool = False
    require_tool: bool = False
    thinking_open: bool = False
    """The prompt itself ends inside an opened thinking block."""
    grammar: str = ""
    """A JSON schema (`{}` for any object) that the answer must match; empty: no grammar."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The caller's W3C trace context; empty strings when there is none."""

    trace_id: str = ""
    parent_span_id: str = ""
    sampled: bool = True


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """Run a prompt."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    switches: Switches = Switches()
    trace: Trace = Trace()
    operation: str = "chat"
    conversation_id: str = ""


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    request_id: str
    reason: str = "client"


class ChangeLever(Message, frozen=True, kw_only=True, tag="change_lever"):
    """A validated lever change on its way to the next tick."""

    change_id: str
    name: str
    value: Value
    origin: str
    """tui, web, cli, api, guard, ttl, undo, experiment."""
    actor: str = ""
    """Session and role."""
    reason: str = ""
    expected: Value | None = None
    """The value that the operator saw; a stale write is refused with the current one."""


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """Finish nothing more, tell every client, leave."""


Command = Submit | Cancel | ChangeLever | Shutdown
