"""Between text and tokens: encode, decode, special tokens by name, chat prompts. Loads no torch and no tensor."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.chat_template import CHATML, PLAIN, ChatTemplate, ChatTemplateError
from engine.model.config import ModelFileError
from engine.model.gguf import GGUFFile
from engine.vocabulary import Vocabulary, vocabulary_from_gguf, vocabulary_from_hf

__all__ = ["ChatTemplate", "ChatTemplateError", "Detokenizer", "ModelFileError", "Text", "load_text"]

_END_NAMES = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)
"""Tokens that end a reply in some family; those that the vocabulary has count, whatever the file says."""


class Text:
    """Tokenizer and chat template of one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.token_bytes)

    @property
    def token_bytes(self) -> list[bytes]:
        """The bytes of every id; a special token stands for its own name."""
        return self._vocabulary.token_bytes

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that never belong to a text: they are hidden from replies."""
        return self._vocabulary.control

    @property
    def added_ids(self) -> dict[str, int]:
        """Every token that is matched as a whole, by name (`<|im_end|>`, `<think>`)."""
        return self._vocabulary.added

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a reply: what the file states and the family's usual ones that the vocabulary has."""
        named = (self._vocabulary.added.get(name) for name in _END_NAMES)
        return frozenset(self._vocabulary.eos) | {token for token in named if token is not None}

    def special_id(self, name: str) -> int | None:
        """The id of the token that is exactly `name` (`</think>`, `<tool_call>`), None where the model has none."""
        found: int | None = self._tokenizer.token_to_id(name)
        return found

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Token ids; names of special tokens in `text` become those tokens. `add_bos` opens a plain completion as the
        model was trained to be opened (no effect where it was not, or where the text opens so already)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        bos = self._vocabulary.bos
        if add_bos and self._vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, show_control: bool = False) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, show_control=show_control).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int], *, show_control: bool = False) -> bytes:
        pieces, hidden = self._vocabulary.token_bytes, self._vocabulary.control
        return b"".join(pieces[i] for i in ids if show_control or i not in hidden)

    def detokenizer(self, *, show_control: bool = False) -> Detokenizer:
        """A fresh stream decoder for one reply."""
        return Detokenizer(self, show_control=show_control)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's own template; without one ChatML where the vocabulary knows it, else plain roles."""
        chatml = "<|im_start|>" in self._vocabulary.added
        source = self._vocabulary.template or (CHATML if chatml else PLAIN)
        return ChatTemplate(
            source, self._name(self._vocabulary.bos), self._name(next(iter(self._vocabulary.eos), None))
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a chat. Raises `ChatTemplateError` where the template refuses it."""
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The prompt tokens of a chat, ready for the reply."""
        return self.encode(self.render_chat(messages, tools=tools, **variables))

    def _name(self, token: int | None) -> str:
        return "" if token is None else self._vocabulary.token_bytes[token].decode("utf-8", "replace")


class Detokenizer:
    """Turns a stream of tokens into text; a character that is split over tokens waits for its last byte."""

    def __init__(self, text: Text, *, show_control: bool = False) -> None:
        self._text = text
        self._show_control = show_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that this token completes, possibly empty."""
        return self._decoder.decode(self._text.decode_bytes((token,), show_control=self._show_control))

    def flush(self) -> str:
        """What is left of an incomplete character, as U+FFFD; the stream starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def load_text(path: Path | str) -> Text:
    """Tokenizer and template of a GGUF file or a Hugging Face directory, in well under a second.

    Raises `ModelFileError` where there is none or it is of an unsupported kind.
    """
    path = Path(path)
    if path.is_dir():
        return Text(vocabulary_from_hf(path))
    return Text(vocabulary_from_gguf(GGUFFile(path).metadata))
