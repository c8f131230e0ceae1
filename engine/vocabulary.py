"""Rebuilds a tokenizer from what a model file carries: GGUF metadata or `tokenizer.json`. No tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine.model.config import ModelFileError

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
"""Token types of the GGUF specification."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a byte-level vocabulary cuts text before merging."""

    patterns: tuple[str, ...] = ()
    """Applied one after the other; empty: the pattern of GPT-2."""
    digits: bool = False
    """Every digit stands alone."""
    whole_words: bool = False
    """A piece that is a token as it stands is not merged up from bytes."""
    compose: bool = False
    """Text is brought to NFC first."""


_KINDS = {
    "gpt-2": _Kind(),
    "smollm": _Kind(digits=True),
    "llama-bpe": _Kind(_LLAMA3, whole_words=True),
    "llama3": _Kind(_LLAMA3, whole_words=True),
    "llama-v3": _Kind(_LLAMA3, whole_words=True),
    "smaug-bpe": _Kind(_LLAMA3, whole_words=True),
    "qwen2": _Kind(_QWEN2, compose=True),
    "deepseek-r1-qwen": _Kind(_QWEN2),
    "tekken": _Kind(_TEKKEN, whole_words=True),
    "default": _Kind(_DEFAULT),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer with everything that the model file says about its tokens."""

    tokenizer: Tokenizer
    token_bytes: list[bytes]
    """What each id stands for; a special token for its own name."""
    control: frozenset[int]
    """Ids that are never part of a text (`<|im_end|>`)."""
    added: dict[str, int]
    """Tokens matched as a whole before anything else, by name; control tokens and user-defined ones (`<think>`)."""
    bos: int | None
    eos: tuple[int, ...]
    """The one that the file names first comes first: it is the template's `eos_token`."""
    add_bos: bool
    template: str | None


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises `ModelFileError` where the file has no tokenizer or one of an unsupported kind."""
    tokens = _listed(metadata, "tokenizer.ggml.tokens", str)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelFileError(f"the file types {len(types)} of its {len(tokens)} tokens: it is damaged; fetch it again")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, text_bytes = _byte_level(metadata, tokens), _byte_level_bytes
    elif model == "llama":
        tokenizer, text_bytes = _sentence_piece(metadata, tokens), _sentence_piece_bytes
    else:
        raise ModelFileError(f"tokenizer model {model!r} is not supported, only gpt2 and llama: use another model")
    added = {token: i for i, token in enumerate(tokens) if types[i] in (_CONTROL, _USER_DEFINED)}
    control = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL)
    _add(tokenizer, [(token, i in control) for token, i in added.items()])
    pre = metadata.get("tokenizer.ggml.pre", "")
    return Vocabulary(
        tokenizer=tokenizer,
        token_bytes=[
            token.encode() if types[i] in (_CONTROL, _USER_DEFINED) else text_bytes(token)
            for i, token in enumerate(tokens)
        ],
        control=control,
        added=added,
        bos=_token_id(metadata.get("tokenizer.ggml.bos_token_id"), len(tokens)),
        eos=_known_ids(
            [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")], len(tokens)
        ),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in ("llama-bpe", "llama3"))),
        template=_text(metadata.get("tokenizer.chat_template")),
    )


def vocabulary_from_hf(directory: Path) -> Vocabulary:
    """The vocabulary of a Hugging Face directory; `tokenizer.json` must be there."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelFileError(f"{directory} has no tokenizer.json: fetch the model with its fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        raw = json.loads(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path} is no usable tokenizer ({error}): fetch the model again") from None
    settings = _read_json(directory / "tokenizer_config.json")
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    control = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    text_bytes = _sentence_piece_bytes if "ByteFallback" in json.dumps(raw.get("decoder")) else _byte_level_bytes
    names = [tokenizer.id_to_token(i) or "" for i in range(size)]
    bos = tokenizer.token_to_id(_content(settings.get("bos_token")))
    eos = [tokenizer.token_to_id(_content(settings.get("eos_token")))]
    for file in ("generation_config.json", "config.json"):
        stated = _read_json(directory / file).get("eos_token_id")
        eos.extend(stated if isinstance(stated, list) else [stated])
    return Vocabulary(
        tokenizer=tokenizer,
        token_bytes=[name.encode() if name in added else text_bytes(name) for name in names],
        control=control,
        added=added,
        bos=bos,
        eos=_known_ids(eos, size),
        add_bos=bos is not None and tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos],
        template=_hf_template(directory, settings),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    kind = _KINDS.get(str(pre))
    if kind is None:
        raise ModelFileError(f"pre-tokenizer {pre!r} is not supported, only {', '.join(_KINDS)}: use another model")
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(metadata, "tokenizer.ggml.merges", str)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if any(len(merge) != 2 or merge[0] not in vocab or merge[1] not in vocab for merge in merges):
        raise ModelFileError("the file's merges do not fit its vocabulary: it is damaged; fetch it again")
    tokenizer = _bpe(vocab, merges, ignore_merges=kind.whole_words)
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
    steps.extend(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.patterns)
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.compose:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece BPE states scores; the merges are every split of a token, best score first."""
    scores = _listed(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"the file scores {len(scores)} of its {len(tokens)} tokens: it is damaged; fetch it again"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score, left, right, token[:cut], token[cut:]))
    ranked.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    index = _token_id(unknown, len(tokens))
    tokenizer = _bpe(
        vocab,
        [(left, right) for *_, left, right in ranked],
        unk_token=None if index is None else tokens[index],
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _bpe(vocab: dict[str, int], merges: list[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"the file's vocabulary is not usable ({error}): fetch it again") from None


def _add(tokenizer: Tokenizer, tokens: Sequence[tuple[str, bool]]) -> None:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, control in tokens if control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, control in tokens if not control])


def _printable_bytes() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for letters from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table


_BYTE_OF = _printable_bytes()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _sentence_piece_bytes(token: str) -> bytes:
    stated = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(stated[1], 16)]) if stated else token.replace("▁", " ").encode()


def _listed(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        raise ModelFileError(f"the file has no usable {key}: fetch a GGUF file with its tokenizer")
    return value


def _token_id(value: Any, size: int) -> int | None:
    return value if isinstance(value, int) and 0 <= value < size else None


def _known_ids(values: Sequence[Any], size: int) -> tuple[int, ...]:
    """The valid ids in the order stated, each once."""
    return tuple(dict.fromkeys(value for value in values if _token_id(value, size) is not None))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _content(token: Any) -> str:
    """A token in `tokenizer_config.json` is a string or an object."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error}): fetch the model again") from None
    return raw if isinstance(raw, dict) else {}


def _hf_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    stated = settings.get("chat_template")
    if isinstance(stated, list):
        named = {item.get("name"): item.get("template") for item in stated if isinstance(item, Mapping)}
        stated = named.get("default")
    return _text(stated)
