"""On real text the native path picks the tokens that float32 picks, and every cut of the text gives the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import engine.bench
from engine.model.backend import BackendRequest
from engine.model.gguf import GGUFFile
from engine.model.kv import PagedKV
from engine.model.native_backend import NativeBackend
from engine.model.reference import open_backend as open_reference
from engine.text import load_text
from tests.unit.native.models import Piece, run

pytestmark = pytest.mark.model

PROMPTS = Path(engine.bench.__file__).parent / "prompts.jsonl"
LENGTH = 320


def _texts(model: Path, count: int) -> list[list[int]]:
    text = load_text(model)
    rows = (json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines())
    long = (ids[:LENGTH] for row in rows if len(ids := text.encode(row["turns"][0])) >= LENGTH)
    return [ids for _, ids in zip(range(count), long, strict=False)]


def _open(model: Path, wide_above: float = 1.0) -> NativeBackend:
    file = GGUFFile(model)
    config = file.config()
    kv = PagedKV(config.num_layers, 48, 16, config.num_kv_heads, config.head_dim, torch.float16)
    return NativeBackend(config, file, kv, 2, wide_above=wide_above)


@pytest.mark.slow
def test_argmax_agrees_with_float32_on_real_text(default_model: Path) -> None:
    """0.985 over 6,272 positions was measured (0.999 with all activations in 16 bits); a flip is a near tie."""
    texts = _texts(default_model, 3)
    request = BackendRequest(default_model, GGUFFile(default_model).config(), 768, 16, 1, 1024, "float32", 2)
    reference = open_reference(request)
    wanted = [run(reference, Piece(ids)).logits for ids in texts]
    for wide_above, least in ((1.0, 0.97), (0.0, 0.995)):
        native = _open(default_model, wide_above)
        same, gap = 0, 0.0
        for ids, logits in zip(texts, wanted, strict=True):
            assert logits is not None
            best, got = logits.argmax(-1), run(native, Piece(ids)).argmax
            same += int((got == best).sum())
            gap = max(gap, float((logits.max(-1).values - logits.gather(1, got[:, None])[:, 0]).max()))
        assert same / (len(texts) * LENGTH) >= least
        assert gap < 0.5, "a token that float32 finds clearly worse was chosen"


def test_a_prompt_in_one_piece_and_token_by_token_leave_the_same_cache(default_model: Path) -> None:
    ids = _texts(default_model, 1)[0][:64]
    whole, cut = _open(default_model), _open(default_model)
    at_once = run(whole, Piece(ids)).argmax
    one_by_one = [int(run(cut, Piece([token], at)).argmax[0]) for at, token in enumerate(ids)]
    assert at_once.tolist() == one_by_one
    assert torch.equal(whole.kv.data, cut.kv.data)
    verify = [run(cut, Piece(ids[at : at + 4], at)).argmax for at in range(0, 64, 4)]
    assert torch.cat(verify).tolist() == one_by_one
