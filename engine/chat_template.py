"""Chat templates as untrusted programs: rendered in Jinja's immutable sandbox with the usual helpers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_MAX_RENDERED = 16 << 20
"""Characters; no prompt that a model can read is longer."""


class ChatTemplateError(ValueError):
    """The template refused the messages or broke the sandbox; the text is one sentence for the user."""


class ChatTemplate:
    """A compiled template. The same messages give the same text, except for templates that print today's date."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Raises `ChatTemplateError` where the source is no valid template."""
        self.source = source
        self._specials = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template cannot be compiled ({error}): use another model file"
            ) from None

    @property
    def mentions_tools(self) -> bool:
        """Whether the template does anything with `tools`."""
        return "tools" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of these messages. Raises `ChatTemplateError` where the template refuses or fails."""
        values = {
            **variables,
            **self._specials,
            "messages": [_plain(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(values):
                length += len(piece)
                if length > _MAX_RENDERED:
                    raise ChatTemplateError(
                        f"the chat template wrote more than {_MAX_RENDERED} characters: shorten the chat"
                    )
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from None
        except (RecursionError, MemoryError):
            raise ChatTemplateError("the model's chat template does not end: use another model file") from None
        return "".join(pieces)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text content, and tool arguments as objects. Raises `ChatTemplateError`."""
    plain = dict(message)
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif isinstance(content, list):
        plain["content"] = "".join(map(_text_of, content))
    elif not isinstance(content, str):
        raise ChatTemplateError(f"the content of a message must be text, not {type(content).__name__}")
    if calls := plain.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise ChatTemplateError("tool_calls must be a list of calls")
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _text_of(part: Any) -> str:
    text = part.get("text", "") if isinstance(part, Mapping) else ""
    if not isinstance(text, str):
        raise ChatTemplateError(f"the text of a content part must be text, not {type(text).__name__}")
    return text


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatTemplateError("each of tool_calls must hold a function with a name and arguments")
    plain = dict(call)
    if isinstance(function.get("arguments"), str):
        try:
            plain["function"] = {**function, "arguments": json.loads(function["arguments"])}
        except ValueError:
            pass  # a model may have written them; the template shows the text
        except RecursionError:
            raise ChatTemplateError("the arguments of a tool call are nested too deeply") from None
    return plain


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also bounds repetition and powers, with which a template could fill the memory in one expression."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not allowed in a chat template")
        for sized, times in ((left, right), (right, left)):
            if isinstance(sized, str | list | tuple) and isinstance(times, int) and len(sized) * times > _MAX_RENDERED:
                raise jinja2.exceptions.SecurityError("a repetition in the chat template is too long")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    """Unlike Jinja's own filter this escapes no HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
