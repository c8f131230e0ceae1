"""Tiny random models of every family give the logits that `transformers` gives, however the prompt is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.model.config import ModelFileError
from engine.model.load import hf_name, open_source
from tests.parity.reference import continue_greedily, feed, open_reference
from tests.unit.model.tiny import tiny_tensors, write_tiny_gguf

_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_MODELS = {
    "llama": ("Llama", {}),
    "llama tied, biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def _save(directory: Path, family: str, more: dict[str, Any], shard: str = "5GB") -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, values in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(values, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


@pytest.fixture(params=_MODELS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    family, more = _MODELS[request.param]
    return _save(tmp_path, family, more), tmp_path


def _prompt(length: int) -> list[int]:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def test_logits_agree_with_transformers(pair: tuple[Any, Path]) -> None:
    theirs_model, path = pair
    tokens = _prompt(100)
    with torch.inference_mode():
        theirs = theirs_model(torch.tensor([tokens])).logits[0]
    ours = feed(open_reference(path), tokens)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_a_prompt_fed_in_chunks_gives_the_same_logits(pair: tuple[Any, Path]) -> None:
    _, path = pair
    tokens = _prompt(100)
    whole = feed(open_reference(path), tokens)
    backend, at, parts = open_reference(path), 0, []
    for size in (1, 15, 17, 40, 27):
        parts.append(feed(backend, tokens[at : at + size], at))
        at += size
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-4, rtol=1e-4)


def test_greedy_replies_agree_with_transformers(pair: tuple[Any, Path]) -> None:
    theirs_model, path = pair
    prompt = _prompt(20)
    theirs = theirs_model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    assert continue_greedily(open_reference(path), prompt, 40) == theirs


def test_sharded_weights_load_through_their_index(tmp_path: Path) -> None:
    model = _save(tmp_path, "Llama", {}, shard="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    tokens = _prompt(10)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(feed(open_reference(tmp_path), tokens), theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_and_a_hugging_face_model_of_the_same_weights_agree(tmp_path: Path, arch: str) -> None:
    """GGUF of the llama architecture interleaves q and k; the other families do not."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", arch)
    model = _hf_twin(path, arch)
    tokens = [token % 96 for token in _prompt(60)]
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(feed(open_reference(path), tokens), theirs, atol=2e-4, rtol=1e-4)


def _hf_twin(path: Path, arch: str) -> Any:
    """A `transformers` model with the file's weights, reordered here by hand."""
    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch]
    source = open_source(path)
    c = source.config
    config = getattr(transformers, f"{family}Config")(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.rms_eps, max_position_embeddings=c.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=False,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    stored = {name: torch.from_numpy(values) for name, values in tiny_tensors(arch).items()}
    if arch == "llama":
        for name, values in stored.items():
            if ".attn_q." in name or ".attn_k." in name:
                heads = c.num_heads if ".attn_q." in name else c.num_kv_heads
                rows = torch.arange(values.shape[0]).view(heads, -1, 2)
                stored[name] = values[torch.cat([rows[:, :, 0], rows[:, :, 1]], dim=1).flatten()]
    missing, unexpected = model.load_state_dict(
        {hf_name(name): values for name, values in stored.items()}, strict=False
    )
    assert not unexpected
    assert all("rotary" in name for name in missing)
    return model


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "architecture 'Gemma3ForCausalLM' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantisation 'gptq'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None}, "rope scaling 'yarn'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"num_hidden_layers": 10**9}, "not a usable count|outside"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"hidden_size": 65}, "damaged"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    _save(tmp_path, "Llama", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelFileError, match=sentence):
        open_reference(tmp_path)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    _save(tmp_path, "Mistral", {"sliding_window": 64})
    assert open_source(tmp_path).config.max_context == 64
