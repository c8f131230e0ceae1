"""The OpenAI-compatible endpoints: from an HTTP request to engine requests, and their events back as a reply."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from engine.protocol.commands import Submit, Switches, Trace
from engine.protocol.events import Delta, Facts, Finished, Usage
from engine.server.api_reply import REASONS, ChoiceState, Stream, Style, event, whole
from engine.server.api_schema import (
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    Wish,
    check_chars,
    parse,
    prompts_of,
    trace_of,
    wish_of_chat,
    wish_of_completion,
)
from engine.server.bounds import OutOfBoundsError, check_limits, check_sampling
from engine.server.broker import Broker, NotReadyError, OverloadedError, TooLongError
from engine.server.ports import EncodedPrompt, PromptError
from engine.server.safety import Access, BodyTooLargeError, Role, bearer, problem
from engine.server.tool_calls import ToolCallFinder
from engine.server.views import Views

PING_S = 10.0
FIRST_LOOK_S = 0.2
"""A refusal by the engine within this time still gets a proper status instead of an error event."""
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that the engine needs of one HTTP request."""

    request_id: str
    model: str
    operation: str
    prompts: tuple[EncodedPrompt, ...]
    asked: tuple[Any, ...]
    """What each prompt was: messages, a text, or token ids."""
    wish: Wish
    trace: Trace
    style: Style
    with_tools: bool = False


class Replies:
    """The running replies of one HTTP request; their events come in order through `next`."""

    def __init__(self, broker: Broker, job: Job) -> None:
        self._broker = broker
        self._queue: asyncio.Queue[tuple[ChoiceState, Delta | Finished]] = asyncio.Queue()
        self._ids: list[str] = []
        self.choices: list[ChoiceState] = []
        for prompt, asked in zip(job.prompts, job.asked, strict=True):
            for _ in range(job.wish.n):
                self._start(job, prompt, asked)

    @property
    def is_done(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def usages(self) -> list[Usage]:
        return [choice.finished.usage for choice in self.choices if choice.finished]

    async def next(self) -> tuple[ChoiceState, Delta | Finished]:
        return await self._queue.get()

    def peeked(self) -> bool:
        return not self._queue.empty()

    def put_back(self, item: tuple[ChoiceState, Delta | Finished]) -> None:
        """Return an item that was looked at, before any other came."""
        rest = [item]
        while not self._queue.empty():
            rest.append(self._queue.get_nowait())
        for one in rest:
            self._queue.put_nowait(one)

    def cancel(self) -> None:
        for request_id in self._ids:
            self._broker.cancel(request_id, "disconnect")

    def _start(self, job: Job, prompt: EncodedPrompt, asked: Any) -> None:
        index = len(self.choices)
        choice = ChoiceState(index, ToolCallFinder() if job.with_tools else None)
        engine_id = job.request_id if index == 0 else f"{job.request_id}-{index}"
        try:
            self._broker.submit(_submit(job, prompt, engine_id, index), _Into(self._queue, choice), asked)
        except (NotReadyError, OverloadedError, TooLongError):
            self.cancel()
            raise
        self._ids.append(engine_id)
        self.choices.append(choice)


@dataclass(frozen=True, slots=True)
class _Into:
    queue: asyncio.Queue[tuple[ChoiceState, Delta | Finished]]
    choice: ChoiceState

    def on_delta(self, delta: Delta) -> None:
        self.queue.put_nowait((self.choice, delta))

    def on_finished(self, finished: Finished) -> None:
        self.queue.put_nowait((self.choice, finished))


class Api:
    """Handlers of `/v1`."""

    def __init__(self, broker: Broker, views: Views, access: Access) -> None:
        self._broker = broker
        self._views = views
        self._access = access
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, ChatBody)

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, CompletionBody)

    async def models(self, request: Request) -> Response:
        try:
            _require(request, self._access, Role.READ)
        except ApiError as error:
            return _refusal(error)
        facts = self._broker.facts
        return JSONResponse({"object": "list", "data": [self._model(facts)] if facts else []})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            _require(request, self._access, Role.READ)
            return JSONResponse(self._model(self._facts_for(name)))
        except (ApiError, NotReadyError) as error:
            return _refusal(error)

    def _model(self, facts: Facts) -> dict[str, Any]:
        return {
            "id": facts.model,
            "object": "model",
            "created": self._started,
            "owned_by": "metrale",
            "context_length": facts.max_context,
            "aliases": ["default", *facts.aliases],
        }

    def _facts_for(self, name: str | None) -> Facts:
        facts = self._broker.check(0)
        if name not in (None, "", "default", facts.model, *facts.aliases):
            raise ApiError(404, f"The model {name!r} is not loaded; it is {facts.model!r}.", "model_not_found", "model")
        return facts

    async def _answered(self, request: Request, kind: type[ChatBody] | type[CompletionBody]) -> Response:
        request_id = _request_id(request)
        try:
            _require(request, self._access, Role.CONTROL)
            body = parse(await request.body(), kind)
            job = await self._job(body, request)
            response = await self._reply(job, body, request)
        except (
            ApiError,
            OutOfBoundsError,
            NotReadyError,
            OverloadedError,
            TooLongError,
            PromptError,
            BodyTooLargeError,
        ) as error:
            response = _refusal(error)
        response.headers["x-request-id"] = request_id
        return response

    async def _job(self, body: ChatBody | CompletionBody, request: Request) -> Job:
        facts = self._facts_for(body.model)
        wish = wish_of_chat(body) if isinstance(body, ChatBody) else wish_of_completion(body)
        check_sampling(wish.sampling, facts.vocab_size)
        check_limits(wish.limits)
        prompts = await self._prompts(body, facts)
        for prompt in prompts:
            self._broker.check(len(prompt.tokens))
        is_chat = isinstance(body, ChatBody)
        return Job(
            request_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex[:24]}",
            model=facts.model,
            operation="chat" if is_chat else "text_completion",
            prompts=prompts,
            asked=(_checked(body.messages),) if isinstance(body, ChatBody) else tuple(prompts_of(body)),
            wish=wish,
            trace=trace_of(request.headers.get("traceparent", "")),
            style=Style(is_chat, wish.sampling.logprobs >= 0, self._views.text.token_bytes),
            with_tools=isinstance(body, ChatBody) and bool(body.tools) and not wish.switches.suppress_tools,
        )

    async def _prompts(self, body: ChatBody | CompletionBody, facts: Facts) -> tuple[EncodedPrompt, ...]:
        if isinstance(body, ChatBody):
            check_chars(*(str(message.get("content", "")) for message in body.messages))
            if body.tools and not self._views.text.renders_tools:
                raise ApiError(400, f"{facts.model} knows no tools; leave them out.", "unsupported_parameter", "tools")
            return (await self._views.encode_chat(_checked(body.messages), body.tools or ()),)
        texts = prompts_of(body)
        check_chars(*(text for text in texts if isinstance(text, str)))
        return tuple([await self._encoded(text, facts.vocab_size) for text in texts])

    async def _encoded(self, prompt: str | tuple[int, ...], vocab_size: int) -> EncodedPrompt:
        if isinstance(prompt, str):
            tokens = await asyncio.to_thread(self._views.text.encode, prompt)
        else:
            tokens = prompt
        if not tokens:
            raise OutOfBoundsError("The prompt is empty.", "prompt")
        if not all(0 <= token < vocab_size for token in tokens):
            raise OutOfBoundsError(f"prompt holds token ids that are not below {vocab_size}.", "prompt")
        return EncodedPrompt(tuple(tokens))

    async def _reply(self, job: Job, body: Body, request: Request) -> Response:
        replies = Replies(self._broker, job)
        gone = asyncio.create_task(_disconnected(request))
        head = {"id": job.request_id, "created": int(time.time()), "model": job.model}
        try:
            if body.stream:
                await _first_look(replies, gone)
                spelled = Stream(head, job.style, body.includes_usage)
                return _EventStream(_stream(replies, spelled, gone), replies, gone)
            return JSONResponse(await _collected(replies, head, job.style, gone))
        except BaseException:
            replies.cancel()
            gone.cancel()
            raise


async def _collected(replies: Replies, head: dict[str, Any], style: Style, gone: asyncio.Task[None]) -> dict[str, Any]:
    async for choice, item in _items(replies, gone, None):
        if isinstance(item, Delta):
            choice.take(item)
        elif item is not None:
            choice.end(item)
            if item.reason not in REASONS:
                raise _error_of(item)
    gone.cancel()
    return whole(head, style, replies.choices)


async def _stream(replies: Replies, spelled: Stream, gone: asyncio.Task[None]) -> AsyncIterator[bytes]:
    for choice in replies.choices:
        for chunk in spelled.opening(choice):
            yield chunk
    async for choice, item in _items(replies, gone, PING_S):
        if item is None:
            yield b": ping\n\n"
        elif isinstance(item, Delta):
            for chunk in spelled.pieces(choice, choice.take(item), item.tokens):
                yield chunk
        elif item.reason not in REASONS:
            yield event({"error": _shape(_error_of(item))})
            return
        else:
            for chunk in (*spelled.pieces(choice, choice.end(item), ()), *spelled.closing(choice)):
                yield chunk
    for chunk in spelled.usage(replies.usages):
        yield chunk
    yield b"data: [DONE]\n\n"


async def _items(
    replies: Replies, gone: asyncio.Task[None], ping_s: float | None
) -> AsyncIterator[tuple[ChoiceState, Delta | Finished | None]]:
    """Events until all choices ended; None for a silence of `ping_s`. Raises `ApiError` when the client left."""
    while not replies.is_done:
        if replies.peeked():
            yield await replies.next()
            continue
        get = asyncio.ensure_future(replies.next())
        try:
            await asyncio.wait({get, gone}, timeout=ping_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ApiError(499, "The client closed the connection.", "client_closed")
            item = get.result() if get.done() else None
        finally:
            get.cancel()
        yield item if item is not None else (replies.choices[0], None)


async def _first_look(replies: Replies, gone: asyncio.Task[None]) -> None:
    """Wait a moment for the first event. Raises `ApiError` when the engine refused the request."""
    get = asyncio.ensure_future(replies.next())
    await asyncio.wait({get, gone}, timeout=FIRST_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    if not get.done():
        get.cancel()
        return
    _, item = get.result()
    if isinstance(item, Finished) and item.reason not in REASONS:
        raise _error_of(item)
    replies.put_back(get.result())


class _EventStream(Response):
    """Server-sent events; a client that leaves cancels its requests at once."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], replies: Replies, gone: asyncio.Task[None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._replies = replies
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ApiError, OSError):
            pass  # the client left
        finally:
            self._gone.cancel()
            self._replies.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _submit(job: Job, prompt: EncodedPrompt, engine_id: str, index: int) -> Submit:
    wish = job.wish
    seed = wish.sampling.seed
    return Submit(
        request_id=engine_id,
        prompt=prompt.tokens,
        sampling=wish.sampling if seed is None or index == 0 else _reseeded(wish.sampling, seed + index),
        limits=wish.limits,
        switches=_opened(wish.switches) if prompt.thinking_open else wish.switches,
        trace=job.trace,
        operation=job.operation,
    )


def _reseeded(sampling: Any, seed: int) -> Any:
    from msgspec.structs import replace

    return replace(sampling, seed=seed)


def _opened(switches: Switches) -> Switches:
    from msgspec.structs import replace

    return replace(switches, thinking_open=True)


def _checked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a role and text content each. Raises `OutOfBoundsError` or `ApiError`."""
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise OutOfBoundsError(f"messages[{index}] has no role.", "messages")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise OutOfBoundsError(f"messages[{index}].content must be text.", "messages")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ApiError(
                    400, f"messages[{index}] holds a part that is no text.", "unsupported_parameter", "messages"
                )
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _require(request: Request, access: Access, role: Role) -> None:
    if access.role_of(bearer(request.headers)) < role:
        raise ApiError(
            401, "The token is missing or not allowed to do this; send it as a bearer token.", "invalid_api_key"
        )


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if re.fullmatch(r"[\w.:-]{1,128}", given) else f"req-{uuid.uuid4().hex}"


def _error_of(finished: Finished) -> ApiError:
    message = finished.error or f"The request ended early: {finished.reason}."
    if finished.reason == "refused":
        return ApiError(400, message, "request_refused")
    if finished.reason == "shutdown":
        return ApiError(503, message, "shutting_down", retry_after=RETRY_AFTER_S)
    return ApiError(500, message, finished.reason)


def _shape(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


def _refusal(error: Exception) -> Response:
    match error:
        case ApiError():
            response = problem(error.status, error.message, error.code, error.param)
            if error.retry_after:
                response.headers["retry-after"] = str(error.retry_after)
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
        case OutOfBoundsError():
            response = problem(400, str(error), "invalid_value", error.field)
        case TooLongError():
            response = problem(400, str(error), "context_length_exceeded", "messages")
        case OverloadedError():
            response = problem(429, str(error), "queue_full", kind="rate_limit_error")
            response.headers["retry-after"] = str(RETRY_AFTER_S)
        case NotReadyError():
            response = problem(503, str(error), "not_ready")
            response.headers["retry-after"] = str(RETRY_AFTER_S)
        case BodyTooLargeError():
            response = problem(413, str(error), "body_too_large")
        case _:
            response = problem(400, str(error), "invalid_value", "messages")
    return response
