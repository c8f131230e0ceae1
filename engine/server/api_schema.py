"""What an OpenAI client may send: bodies decoded, bounded, and turned into requests for the engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from engine.protocol.commands import Limits, Sampling, Switches, Trace
from engine.server.bounds import MAX_LOGPROBS, MAX_MESSAGES, MAX_N, MAX_PROMPT_CHARS, OutOfBoundsError

B = TypeVar("B", bound="Body")


class ApiError(Exception):
    """An answer in the error shape of the API."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints share; `null` means the default, as clients send it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    speculate: bool | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class JsonSchema(msgspec.Struct, frozen=True):
    name: str = ""
    schema: dict[str, Any] = {}
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: JsonSchema | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A validated request, before its prompt is encoded."""

    sampling: Sampling
    limits: Limits
    switches: Switches
    n: int


_Unwanted = Callable[[Any], bool]


def _present(value: Any) -> bool:
    return value not in (None, False, [], {}, "")


_UNSUPPORTED: Mapping[str, tuple[_Unwanted, str]] = {
    "functions": (_present, "use tools"),
    "function_call": (_present, "use tool_choice"),
    "audio": (_present, "this server speaks text only"),
    "modalities": (lambda value: value not in (None, ["text"]), "this server speaks text only"),
    "prediction": (_present, "leave it out"),
    "web_search_options": (_present, "leave it out"),
    "store": (lambda value: value is True, "replies are not stored"),
    "suffix": (_present, "leave it out"),
    "echo": (lambda value: value is True, "leave it out"),
    "best_of": (lambda value: value not in (None, 1), "use n"),
}
"""Fields that would change the answer and are not served; refused, not ignored. What is not listed is tolerated."""


def parse(raw: bytes, kind: type[B]) -> B:
    """A decoded body. Raises `ApiError` with the field that is wrong."""
    try:
        plain = msgspec.json.decode(raw, type=dict[str, Any])
        for name, (is_wanted, instead) in _UNSUPPORTED.items():
            if name in plain and is_wanted(plain[name]):
                raise ApiError(400, f"{name} is not supported; {instead}.", "unsupported_parameter", name)
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        field = re.search(r"`\$\.?(\w*)", str(error))
        missing = re.search(r"required field `(\w+)`", str(error))
        param = missing[1] if missing else field[1] if field else None
        raise ApiError(400, f"The request body is not valid: {error}.", "invalid_value", param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.", "invalid_json") from None


def wish_of_chat(body: ChatBody) -> Wish:
    if not body.messages:
        raise OutOfBoundsError("messages must hold at least one message.", "messages")
    if len(body.messages) > MAX_MESSAGES:
        raise OutOfBoundsError(f"messages may hold at most {MAX_MESSAGES}.", "messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise OutOfBoundsError("top_logprobs needs logprobs to be true.", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise OutOfBoundsError(f"top_logprobs takes 0 to {MAX_LOGPROBS}.", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    budget = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _wish(body, logprobs, budget, "max_completion_tokens", _switches(body))


def wish_of_completion(body: CompletionBody) -> Wish:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise OutOfBoundsError(f"logprobs takes 0 to {MAX_LOGPROBS}.", "logprobs")
    logprobs = -1 if body.logprobs is None else body.logprobs
    budget = 16 if body.max_tokens is None else body.max_tokens
    return _wish(body, logprobs, budget, "max_tokens", Switches(speculate=body.speculate is not False))


def prompts_of(body: CompletionBody) -> list[str | tuple[int, ...]]:
    """Each prompt as text or tokens. Raises `OutOfBoundsError`."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(type(item) is int for item in prompt):
        return [tuple(prompt)]
    found: list[str | tuple[int, ...]] = []
    for item in prompt:
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list) and item and all(type(token) is int for token in item):
            found.append(tuple(item))
        else:
            raise OutOfBoundsError("prompt must be a text, a list of texts, or token ids.", "prompt")
    if not 1 <= len(found) * body.choices <= MAX_N:
        raise OutOfBoundsError(f"prompt and n together may ask for 1 to {MAX_N} replies.", "prompt")
    return found


def check_chars(*texts: str) -> None:
    """Raises `OutOfBoundsError` for a prompt that no context could hold."""
    if sum(map(len, texts)) > MAX_PROMPT_CHARS:
        raise OutOfBoundsError(f"A prompt may have at most {MAX_PROMPT_CHARS} characters.", "messages")


def trace_of(traceparent: str) -> Trace:
    """The caller's W3C trace context; none when the header is absent or malformed, as the standard asks."""
    match = re.fullmatch(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", traceparent.strip())
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return Trace()
    return Trace(trace_id=match[1], parent_span_id=match[2], sampled=bool(int(match[3], 16) & 1))


def _wish(body: Body, logprobs: int, budget: int | None, budget_name: str, switches: Switches) -> Wish:
    if not 1 <= body.choices <= MAX_N:
        raise OutOfBoundsError(f"n takes 1 to {MAX_N}.", "n")
    if budget is not None and budget < 1:
        raise OutOfBoundsError(f"{budget_name} must be at least 1.", budget_name)
    if body.temperature is not None and not 0 <= body.temperature <= 2:
        raise OutOfBoundsError(f"temperature cannot be {body.temperature:g}: it takes 0 to 2.", "temperature")
    stop = body.stop if isinstance(body.stop, list) else [body.stop] if body.stop else []
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "seed": body.seed,
    }
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Wish(
        Sampling(**sampling, logit_bias=_bias(body.logit_bias or {}), logprobs=logprobs),
        Limits(
            max_tokens=budget or 0,
            min_tokens=body.min_tokens or 0,
            stop=tuple(stop),
            ignore_eos=body.ignore_eos is True,
        ),
        switches,
        body.choices,
    )


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise OutOfBoundsError("logit_bias maps token ids to values.", "logit_bias") from None


def _switches(body: ChatBody) -> Switches:
    choice = body.tool_choice
    if isinstance(choice, dict) or choice not in (None, "auto", "none", "required"):
        raise ApiError(400, "tool_choice takes auto, none or required.", "unsupported_parameter", "tool_choice")
    return Switches(
        speculate=body.speculate is not False,
        suppress_tools=choice == "none",
        require_tool=choice == "required",
        grammar=_grammar(body.response_format),
    )


def _grammar(format: ResponseFormat | None) -> str:
    if format is None or format.type == "text":
        return ""
    if format.type == "json_object":
        return '{"type":"object"}'
    if format.type == "json_schema" and format.json_schema is not None:
        return msgspec.json.encode(format.json_schema.schema).decode()
    raise OutOfBoundsError("response_format takes text, json_object, or json_schema with a schema.", "response_format")
