"""GGUF files are untrusted: what is read is right, and what is wrong ends in one sentence."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.model.config import ModelFileError
from engine.model.gguf import SUPPORTED_TYPES, GGUFFile
from tests.unit.model.tiny import CONTEXT, LAYERS, VOCAB, tiny_tensors, write_tiny_gguf

_Q = gguf.GGMLQuantizationType
_WRITABLE = [_Q.F32, _Q.F16, _Q.BF16, _Q.Q8_0, _Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1]
_K_QUANTS = [_Q.Q4_K, _Q.Q5_K, _Q.Q6_K]
_LARGEST_ERROR = {
    "F32": 0,
    "F16": 1e-3,
    "BF16": 1e-2,
    "Q8_0": 1e-2,
    "Q5_0": 0.1,
    "Q5_1": 0.06,
    "Q4_0": 0.2,
    "Q4_1": 0.11,
}
"""Relative to the largest weight of the matrix."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def test_metadata_and_shapes_are_read(tiny: Path) -> None:
    config = GGUFFile(tiny).config()
    assert (config.architecture, config.vocab_size, config.num_layers, config.max_context) == (
        "llama",
        VOCAB,
        LAYERS,
        CONTEXT,
    )
    assert not config.tied_embeddings
    assert config.interleaved_qk


@pytest.mark.parametrize("kind", _WRITABLE, ids=lambda kind: kind.name)
def test_every_writable_type_dequantises_to_what_the_gguf_library_says(tmp_path: Path, kind: _Q) -> None:
    file = GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", quant=kind))
    for name, values in tiny_tensors("llama").items():
        ours = file.dequantize(name)
        if values.ndim == 1:
            np.testing.assert_array_equal(ours, values)
            continue
        theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        np.testing.assert_array_equal(ours, theirs)
        assert np.abs(ours - values).max() <= _LARGEST_ERROR[kind.name] * np.abs(values).max()
    assert file.info("output.weight").type_name == kind.name


@pytest.mark.parametrize("kind", _K_QUANTS, ids=lambda kind: kind.name)
def test_k_quants_dequantise_block_by_block(tmp_path: Path, kind: _Q) -> None:
    per_block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (3, 2 * nbytes), dtype=np.uint8)
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("w", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.info("w").shape == (3, 2 * per_block)
    np.testing.assert_array_equal(file.raw("w"), blocks)
    np.testing.assert_array_equal(file.dequantize("w"), gguf.quants.dequantize(blocks, kind).reshape(3, -1))


def test_every_supported_type_is_covered_by_a_test() -> None:
    assert {kind.name for kind in [*_WRITABLE, *_K_QUANTS]} == set(SUPPORTED_TYPES)


def test_raw_blocks_are_a_view_on_the_file(tmp_path: Path) -> None:
    file = GGUFFile(write_tiny_gguf(tmp_path / "m.gguf", quant=_Q.Q4_1))
    raw = file.raw("blk.0.ffn_gate.weight")
    assert raw.shape == (96, 64 // 32 * 20)
    assert not raw.flags.owndata
    assert not raw.flags.writeable


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"does not exist: check the path"):
        GGUFFile(tmp_path / "none.gguf")


def test_a_wrong_magic_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFileError, match="is no GGUF file"):
        GGUFFile(path)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_an_unknown_version_is_refused(tiny: Path, version: int) -> None:
    data = bytearray(tiny.read_bytes())
    data[4:8] = struct.pack("<I", version)
    tiny.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"version|big-endian"):
        GGUFFile(tiny)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 0.9, 0.999])
def test_a_truncated_file_says_so(tiny: Path, share: float) -> None:
    data = tiny.read_bytes()
    tiny.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFileError, match=r"truncated|only"):
        GGUFFile(tiny)


@pytest.mark.parametrize("at", [8, 16])
def test_an_absurd_count_is_refused_at_once(tiny: Path, at: int) -> None:
    data = bytearray(tiny.read_bytes())
    data[at : at + 8] = struct.pack("<Q", 1 << 60)
    tiny.write_bytes(data)
    with pytest.raises(ModelFileError, match="it claims 1152921504606846976"):
        GGUFFile(tiny)


def test_an_unsupported_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 66), dtype=np.uint8), raw_dtype=_Q.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"'blk.0.attn_q.weight' is quantised as IQ2_XXS, .* use a file of F32"):
        GGUFFile(path)


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", "gemma3")
    with pytest.raises(ModelFileError, match="architecture 'gemma3' is not supported: use a model of llama"):
        GGUFFile(path).config()


def test_200_random_header_mutations_never_crash_or_hang(tiny: Path, tmp_path: Path) -> None:
    original = tiny.read_bytes()
    header = original.index(b"blk.2.ffn_down.weight") + 80
    rng = random.Random(7)
    refused: list[str] = []
    for _ in range(200):
        data = bytearray(original)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(header)
            if rng.random() < 0.3:
                data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)]))
            else:
                data[at] = rng.randrange(256)
        path = tmp_path / "mutant.gguf"
        path.write_bytes(data[: len(original)])
        try:
            file = GGUFFile(path)
            file.config()
            file.dequantize("output.weight")
        except ModelFileError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert not [sentence for sentence in refused if "\n" in sentence]
