"""Numbers that do not fit are refused with a sentence; none of them reaches memory that is not ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.model.backend import BackendRequest, BackendUnavailable, Batch
from engine.model.gguf import GGUFFile
from engine.model.native import open_backend
from engine.model.native.library import NativeError, QuantType
from engine.model.native_backend import NativeBackend
from tests.unit.native.models import NUM_BLOCKS, Piece, Shape, open_native, run, tokens_of, write_model


@pytest.fixture
def backend(tmp_path: Path) -> NativeBackend:
    return open_native(write_model(tmp_path / "m.gguf", Shape()), threads=2)


GOOD = Batch(
    tokens=torch.tensor([1, 2, 3]),
    positions=torch.tensor([0, 1, 2]),
    row_offsets=(0, 3),
    starts=(0,),
    block_tables=torch.tensor([[0]], dtype=torch.int32),
    logit_rows=(2,),
)
BAD = {
    "a token beyond the vocabulary": (replace(GOOD, tokens=torch.tensor([1, 2, 101])), "token 101"),
    "a negative token": (replace(GOOD, tokens=torch.tensor([-1, 2, 3])), "token -1"),
    "a block beyond the pool": (replace(GOOD, block_tables=torch.tensor([[48]], dtype=torch.int32)), "block 48 of 48"),
    "a negative block": (replace(GOOD, block_tables=torch.tensor([[-1]], dtype=torch.int32)), "block -1"),
    "a table that is too short": (replace(GOOD, starts=(15,)), "needs 2 blocks"),
    "a negative position": (replace(GOOD, starts=(-1,)), "position"),
    "a position beyond the context": (replace(GOOD, starts=(510,)), "position 513 of 512"),
    "offsets that do not end at the rows": (replace(GOOD, row_offsets=(0, 2)), "from 0 to 3"),
    "offsets that fall": (
        replace(GOOD, row_offsets=(0, 4, 3), starts=(0, 0), block_tables=torch.zeros(2, 1, dtype=torch.int32)),
        "rows",
    ),
    "an empty segment": (
        replace(GOOD, row_offsets=(0, 0, 3), starts=(0, 0), block_tables=torch.zeros(2, 1, dtype=torch.int32)),
        "0 rows",
    ),
    "logits of a row that is not there": (replace(GOOD, logit_rows=(3,)), "row 3 of 3"),
    "a layer that is not there": (replace(GOOD, layers=(0, 2)), "layer 2 of 2"),
    "tables for too few segments": (replace(GOOD, row_offsets=(0, 1, 3), starts=(0, 1)), "block table"),
    "more starts than segments": (replace(GOOD, starts=(0, 1)), "starts"),
    "tokens that are not int64": (replace(GOOD, tokens=torch.tensor([1, 2, 3], dtype=torch.int32)), "int64"),
    "tables that are not int32": (replace(GOOD, block_tables=torch.tensor([[0]])), "int32"),
    "a tap that is not there": (replace(GOOD, taps=(5,)), "tap"),
}


@pytest.mark.parametrize(("batch", "reason"), BAD.values(), ids=BAD)
def test_a_batch_that_does_not_fit_is_refused(backend: NativeBackend, batch: Batch, reason: str) -> None:
    with pytest.raises(NativeError, match=reason):
        backend.run(batch)
    assert int(backend.run(GOOD).argmax[0]) >= 0


def test_blocks_that_overlap_are_refused(backend: NativeBackend) -> None:
    keys, values = backend.kv.keys[0], backend.kv.values[0]
    size = keys[0].numel()
    with pytest.raises(NativeError, match=f"blocks of {size} values cannot lie {size - 1} apart"):
        backend.model.set_cache(0, keys.data_ptr(), values.data_ptr(), size - 1)


def test_a_closed_model_says_so(backend: NativeBackend) -> None:
    backend.close()
    backend.close()
    with pytest.raises(NativeError, match="closed"):
        backend.run(GOOD)


def test_an_unknown_token_has_no_embedding(backend: NativeBackend) -> None:
    with pytest.raises(NativeError, match="token 500"):
        backend.embed(torch.tensor([500]))


def test_blocks_of_the_wrong_size_are_refused(backend: NativeBackend) -> None:
    with pytest.raises(NativeError, match="do not hold rows of 96 Q4_1 values"):
        backend.model.set_matrix(0, "attn_q", QuantType.Q4_1, np.zeros((96, 59), np.uint8), 96)
    with pytest.raises(NativeError, match="is 32 by 96 and should be 96 by 96"):
        backend.model.set_matrix(0, "attn_q", QuantType.Q4_1, np.zeros((32, 60), np.uint8), 96)
    order = np.full(96, 96, np.int32)
    with pytest.raises(NativeError, match="row order names row 96"):
        backend.model.set_matrix(0, "attn_q", QuantType.Q4_1, np.zeros((96, 60), np.uint8), 96, order)


def test_an_unknown_variant_is_refused_by_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Shape())
    with pytest.raises(NativeError, match=r"'AVX-1024' does not run here: use .*portable"):
        open_native(path, variant="AVX-1024")


def _request(path: Path) -> BackendRequest:
    return BackendRequest(path, GGUFFile(path).config(), 256, 16, 1, 1024, "auto", 1)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [(Shape(kind=Kind.F16), "is F16 and the native kernels take"), (Shape(head_dim=16, heads=2), "head size 16")],
)
def test_a_file_without_kernels_is_left_to_another_backend(shape: Shape, reason: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", shape)
    with pytest.raises(BackendUnavailable, match=reason):
        open_backend(_request(path))


def test_the_backend_opens_with_a_cache_in_half_precision(tmp_path: Path) -> None:
    opened = open_backend(_request(write_model(tmp_path / "m.gguf", Shape())))
    assert opened.kv.dtype == torch.float16
    assert opened.kv.num_blocks == 16
    assert opened.name.startswith("native Q4_1 ")


def test_a_step_larger_than_any_before_finds_room(backend: NativeBackend) -> None:
    for count in (1, 5, 300, 2):
        assert run(backend, Piece(tokens_of(count))).argmax.numel() == count
    assert NUM_BLOCKS * 16 >= 300
