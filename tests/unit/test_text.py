"""Text goes to the tokens that the model was trained on and back, and a chat template stays in its sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.model.config import ModelFileError
from engine.text import Text, load_text
from engine.vocabulary import vocabulary_from_gguf

_SAMPLES = (
    "Hello, world!",
    "  two  spaces,\ttab\n\n\nlines \r\n and trailing   ",
    "naïve café, Straße, Ελλάδα, Россия, 日本語テキスト, العربية",
    "emoji 👩‍🚀👍🏽🇮🇹 and zero width \u200b\u200d",
    "numbers 1234567890 3.14159 1,000,000 ½ ²",
    "it's I'LL we've DON'T can't",
    "def f(x):\n    return {'a': [1, 2]}  # comment\n",
    "\x00\x01 control \x7f and \ufeff mark",
    "e\u0301 composed or not",
    "",
    " ",
    "\n",
)


@pytest.fixture(scope="module")
def text(default_model: Path) -> Text:
    return load_text(default_model)


def _train(pieces: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pieces
    trainer = BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SAMPLES * 3, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gguf_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    model = json.loads(tokenizer.to_str())["model"]
    names = sorted(model["vocab"], key=model["vocab"].get)
    special = {"<|im_start|>", "<|im_end|>"}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3 if name in special else 1 for name in names],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": names.index("<|im_end|>"),
    }


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("gpt-2", _BYTES), ("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]))],
)
def test_a_tokenizer_rebuilt_from_gguf_metadata_cuts_as_the_original(
    pre: str, pieces: pre_tokenizers.PreTokenizer
) -> None:
    original = _train(pieces)
    rebuilt = Text(vocabulary_from_gguf(_gguf_metadata(original, pre)))
    for sample in _SAMPLES:
        ids = rebuilt.encode(f"<|im_start|>{sample}<|im_end|>")
        assert ids == original.encode(f"<|im_start|>{sample}<|im_end|>").ids
        assert rebuilt.decode(ids) == sample


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "default"])
def test_every_pre_tokenizer_kind_loses_nothing(pre: str) -> None:
    rebuilt = Text(vocabulary_from_gguf(_gguf_metadata(_train(_BYTES), pre)))
    for sample in _SAMPLES:
        expected = normalizers.NFC().normalize_str(sample) if pre == "qwen2" else sample
        assert rebuilt.decode(rebuilt.encode(sample)) == expected


def test_llama_and_qwen_cut_numbers_and_contractions_as_their_families_do() -> None:
    def pieces(pre: str, sample: str) -> list[str]:
        tokenizer = vocabulary_from_gguf(_gguf_metadata(_train(_BYTES), pre)).tokenizer
        return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(sample)]

    assert pieces("llama-bpe", "a 12345 I'LL\n\nb") == ["a", "Ġ", "123", "45", "ĠI", "'LL", "ĊĊ", "b"]
    assert pieces("qwen2", "a 123 I'LL") == ["a", "Ġ", "1", "2", "3", "ĠI", "'LL"]
    assert pieces("default", "a 12345") == ["a", "Ġ", "123", "45"]


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ModelFileError, match="pre-tokenizer 'weird' is not supported, only gpt-2"):
        vocabulary_from_gguf(_gguf_metadata(_train(_BYTES), "weird"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert'"),
        ({"tokenizer.ggml.tokens": None}, "no usable tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["nope"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "types 1 of its"),
    ],
)
def test_damaged_tokenizer_metadata_is_one_sentence(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ModelFileError, match=sentence):
        vocabulary_from_gguf({**_gguf_metadata(_train(_BYTES), "gpt-2"), **change})


def test_sentencepiece_scores_become_merges_with_byte_fallback() -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "l", "o", "he", "ll",
              "hell", "hello", "▁hello"]  # fmt: skip
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * (len(pieces) - 259))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    text = Text(vocabulary_from_gguf(metadata))
    ids = text.encode("hello é", add_bos=True)
    assert ids == [1, pieces.index("▁hello"), pieces.index("▁"), pieces.index("<0xC3>"), pieces.index("<0xA9>")]
    assert text.decode(ids) == " hello é"
    assert text.eos_ids == {2}


def test_a_hugging_face_directory_gives_the_same_tokens(tmp_path: Path) -> None:
    original = _train(_BYTES)
    original.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    original.save(str(tmp_path / "tokenizer.json"))
    settings_file = {
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_file))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    text = load_text(tmp_path)
    for sample in _SAMPLES:
        ids = text.encode(f"{sample}<think>")
        assert ids == original.encode(f"{sample}<think>").ids
        assert text.decode(ids) == f"{sample}<think>"
    assert text.special_id("<think>") == text.vocab_size - 1
    assert text.special_id("</think>") is None
    assert text.eos_ids == {0, 1}
    assert text.control_ids == {0, 1}
    assert text.render_chat([{"role": "user", "content": "hi"}]) == "hi<|im_end|>"


def test_a_directory_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no tokenizer.json: fetch the model"):
        load_text(tmp_path)


@pytest.mark.model
def test_the_default_model_loads_in_well_under_a_second(default_model: Path) -> None:
    def seconds() -> float:
        """Of the processor, which a busy machine stretches less than those of the clock."""
        began = time.process_time()
        load_text(default_model)
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 0.8


@pytest.mark.model
def test_loading_text_loads_no_torch(default_model: Path) -> None:
    code = f"import sys, engine.text as t; t.load_text({str(default_model)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.model
def test_the_default_models_special_tokens_are_found_by_name(text: Text) -> None:
    assert text.eos_ids == {text.special_id("<|im_end|>"), text.special_id("<|endoftext|>")}
    assert text.special_id("<think>") is None
    assert len(text.token_bytes) == text.vocab_size == 49152
    assert len(text.control_ids) == 17


@pytest.mark.model
def test_the_default_models_prompt_is_chatml(text: Text) -> None:
    prompt = text.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = text.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert text.decode(ids, show_control=True) == prompt


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(st.text(max_size=100))
def test_any_text_survives_the_default_tokenizer(default_model: Path, sample: str) -> None:
    """But for rare bytes that this vocabulary has no token for, which its original drops as well."""
    text = _cached(default_model)
    known = {piece for piece in text.token_bytes if len(piece) == 1}
    expected = b"".join(byte for byte in (bytes([value]) for value in sample.encode()) if byte in known)
    ids = text.encode(sample)
    assert text.decode_bytes(ids, show_control=True) == expected
    stream = text.detokenizer(show_control=True)
    streamed = "".join([stream.push(token) for token in ids] + [stream.flush()])
    assert streamed == expected.decode("utf-8", "replace")


@cache
def _cached(path: Path) -> Text:
    return load_text(path)


@pytest.mark.model
def test_a_split_character_waits_for_its_last_byte(text: Text) -> None:
    ids = text.encode("👩‍🚀")
    stream = text.detokenizer()
    pieces = [stream.push(token) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == "👩‍🚀"
    assert stream.push(ids[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(text.encode("a")[0]) == "a"


_MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ raise_exception('no system role') }}",
        "{{ undefined_function() }}",
        "{{ messages[5].content.missing }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_misbehaves_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError) as refused:
        ChatTemplate(source).render(_MESSAGES)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "part",
    [
        {"tool_calls": "x"},
        {"tool_calls": 5},
        {"tool_calls": ["x"]},
        {"tool_calls": {"a": 1}},
        {"tool_calls": [{"function": "f"}]},
        {"tool_calls": [{}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
        {"content": 5},
        {"content": [{"type": "text", "text": None}]},
    ],
)
def test_a_malformed_message_is_refused_in_a_sentence(part: dict[str, Any]) -> None:
    with pytest.raises(ChatTemplateError, match=r"must|nested"):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "", **part}])


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate("{% if %}")


def test_templates_have_the_usual_helpers() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ strftime_now('%Y') | length }}{{ thinking }}"
    )
    rendered = ChatTemplate(source).render(_MESSAGES, tools=[{"name": "é<b>"}], thinking=False)
    assert rendered == '[{"name": "é<b>"}]hi4False'


def test_content_parts_and_tool_arguments_arrive_as_templates_expect_them() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
    ]
    source = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %};{% endfor %}"
    )
    assert ChatTemplate(source).render(messages) == "ab;1;"
