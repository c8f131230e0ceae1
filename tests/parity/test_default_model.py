"""The default model gives the logits, the tokens and the replies that `transformers` gives with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from engine.core.device import GREEDY, DrafterName, DraftItem, RowPlan, Segment, Step, StepKind
from engine.model.load import hf_name, open_source
from engine.model.open import open_device
from engine.model.torch_device import TorchDevice
from engine.text import Text, load_text
from tests.parity.reference import continue_greedily, feed, open_reference

pytestmark = pytest.mark.model

_QUESTIONS = ("What is the capital of Italy?", "Write a short poem about rain.", "Explain why the sky is blue.")


@pytest.fixture(scope="module")
def theirs(default_model: Path) -> transformers.LlamaForCausalLM:
    """A Hugging Face Llama with the dequantised weights of the GGUF file."""
    source = open_source(default_model)
    c = source.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_context, rms_norm_eps=c.rms_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict({hf_name(name): source.load(name) for name in source.sizes()}, strict=False)
    return model


@pytest.fixture(scope="module")
def text(default_model: Path) -> Text:
    return load_text(default_model)


@pytest.fixture(scope="module")
def device(default_model: Path) -> Iterator[TorchDevice]:
    opened = open_device(default_model, kv_tokens=4096, backend="reference", threads=2)
    assert isinstance(opened, TorchDevice)
    yield opened
    opened.close()


def _prompts(text: Text) -> list[list[int]]:
    return [text.encode_chat([{"role": "user", "content": question}]) for question in _QUESTIONS]


def test_logits_agree(default_model: Path, theirs: transformers.LlamaForCausalLM, text: Text) -> None:
    backend = open_reference(default_model)
    for prompt in _prompts(text):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        ours = feed(backend, prompt)
        torch.testing.assert_close(ours, expected, atol=5e-3, rtol=1e-3)
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_64_greedy_tokens_agree(default_model: Path, theirs: transformers.LlamaForCausalLM, text: Text) -> None:
    prompt = _prompts(text)[1]
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=2
    )[0, len(prompt) :].tolist()
    assert continue_greedily(open_reference(default_model), prompt, 64) == expected


def test_bfloat16_mostly_agrees(default_model: Path, theirs: transformers.LlamaForCausalLM, text: Text) -> None:
    prompt = _prompts(text)[1]
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0].argmax(-1)
    ours = feed(open_reference(default_model, dtype="bfloat16"), prompt).argmax(-1)
    assert (ours == expected).float().mean() > 0.85


def _blocks(seq: int) -> list[int]:
    return list(range(seq * 16, seq * 16 + 16))


def _prefill(device: TorchDevice, seqs: int, prompts: list[list[int]]) -> None:
    for seq in range(seqs):
        prompt = tuple(prompts[seq % len(prompts)])
        device.forward(Step(0, StepKind.PREFILL, (Segment(seq, seq, 0, prompt, _blocks(seq)),)))


def _decode(device: TorchDevice, seqs: range, prompts: list[list[int]], count: int) -> dict[int, list[int]]:
    """`count` greedy tokens of every sequence, all in the same steps."""
    plan = RowPlan(top_logprobs=0)
    fed = {seq: prompts[seq % len(prompts)][-1] for seq in seqs}
    replies: dict[int, list[int]] = {seq: [] for seq in seqs}
    for i in range(count):
        segments = tuple(
            Segment(seq, seq, len(prompts[seq % len(prompts)]) - 1 + i, (fed[seq],), _blocks(seq), (plan,))
            for seq in seqs
        )
        result = device.forward(Step(i, StepKind.DECODE, segments))
        for seq, (row,) in zip(seqs, result.sampled, strict=True):
            fed[seq] = row.token
            replies[seq].append(row.token)
    return replies


def test_greedy_replies_do_not_depend_on_how_many_sequences_run(device: TorchDevice, text: Text) -> None:
    prompts = _prompts(text)
    _prefill(device, 16, prompts)
    alone = {seq: _decode(device, range(seq, seq + 1), prompts, 24)[seq] for seq in range(3)}
    for width in (4, 16):
        together = _decode(device, range(width), prompts, 24)
        assert all(together[seq] == alone[seq % 3] for seq in range(width))


def test_verify_rows_equal_decode_rows(device: TorchDevice, text: Text) -> None:
    """Drafts of the self drafter, verified in one step, leave exactly the plain reply."""
    prompts = _prompts(text)
    _prefill(device, 3, prompts)
    for seq in range(3):
        plain = _decode(device, range(seq, seq + 1), prompts, 40)[seq]
        reply, steps, prompt = _speculate(device, seq, prompts[seq], 40)
        assert reply == plain
        assert steps < 30, f"{len(prompt)} prompt tokens, {steps} steps: self drafts were hardly ever accepted"


def _speculate(device: TorchDevice, seq: int, prompt: list[int], count: int) -> tuple[list[int], int, list[int]]:
    fed, last, reply, steps = prompt[:-1], prompt[-1], [], 0
    while len(reply) < count:
        item = DraftItem(seq, seq, len(fed), last, tuple(fed[-8:]), _blocks(seq), 4)
        drafted = device.draft(DrafterName.SELF, [item], 0.0)[0].tokens
        rows = (last, *drafted)
        step = Step(steps, StepKind.VERIFY, (Segment(seq, seq, len(fed), rows, _blocks(seq), (GREEDY,) * len(rows)),))
        verified = [row.token for row in device.forward(step).sampled[0]]
        agreed = next((i for i, token in enumerate(drafted) if token != verified[i]), len(drafted))
        reply += verified[: agreed + 1]
        fed += rows[: agreed + 1]
        last = verified[agreed]
        steps += 1
    return reply[:count], steps, prompt
