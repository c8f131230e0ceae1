"""The MTP head on the fused CUDA kernels: absorbing and drafting are captured, and drafts can follow a verify unasked.

What a verify accepts is known on the device before the host has read it, so the head takes the rows in and drafts on
while the host still emits the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.core.device import Draft, DrafterName
from engine.model.backend import Behind, HostBatch
from engine.model.cuda.draft_program import MOST_ROWS, MOST_SEQUENCES, DraftBuilder, DraftWeights
from engine.model.cuda.inputs import DRAFT_WORDS
from engine.model.cuda.packing import PackedLayer, PackedWeights, interleave, pack_heads
from engine.model.cuda.program import Launch
from engine.model.cuda_backend import CudaBackend, StepRows
from engine.model.graphs import Captured, kinds_of
from engine.model.head_file import HeadFile
from engine.model.head_memory import cut_chains, drafted_rows
from engine.model.heads import Followed, HeadItem, HeadRows
from engine.model.kv import PagedKV
from engine.model.mtp_head import MTPShape

CUDA_VOCABULARY = 8_192
"""Ids drafted from, as on a CPU."""
MOST_DRAFTS = 7
"""Drafts of one chain; of the eighth hardly one in a hundred is accepted."""
SEQUENCES = (1, 2, 4, 8, 16, MOST_SEQUENCES)
FOLLOWED_ROWS = 64
"""Rows of a step, of all its sequences together, that the head takes in while it drafts."""


class CudaMTPHead:
    """Implements `engine.model.heads.DraftHead` and `FollowingHead` beside a `CudaBackend`."""

    drafter = DrafterName.MTP
    is_compiled = True

    def __init__(self, backend: CudaBackend, file: HeadFile, ids: int = CUDA_VOCABULARY) -> None:
        self._shape = shape = MTPShape(**{**file.shape, "taps": tuple(file.shape["taps"])})
        self._backend, self._graphs = backend, backend.graphs
        target, dtype, device = backend.kv, backend.kv.dtype, backend.device
        chosen = file.vocab_ids[:ids].to(device)
        config = replace(
            backend.config, num_layers=1, vocab_size=len(chosen), hidden_size=shape.hidden_size, qkv_bias=False,
            intermediate_size=shape.intermediate_size, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, rms_eps=shape.rms_eps,
        )  # fmt: skip
        self._kv = PagedKV(
            1, target.num_blocks + MOST_SEQUENCES, target.block_size, shape.num_kv_heads, shape.head_dim, dtype, device
        )
        rows = self._graphs.widths[-1]
        self._builder = DraftBuilder(
            config, _pack(backend, shape, file.tensors, chosen), self._kv,
            torch.tensor(shape.taps, dtype=torch.int32, device=device), backend.buffers, rows,
            self._graphs.inputs[rows].tables, dtype, device,
        )  # fmt: skip
        self._captured: dict[tuple[int, ...], Captured] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self._shape.taps

    @property
    def kv(self) -> PagedKV | None:
        return self._kv

    def prepare(self) -> None:
        """Compile and capture everything that a chat can need."""
        self._graphs.compile(kinds_of(self._launches(key) for key in self._planned()))
        for key in self._planned():
            self._get(key)
        self._warm_up()

    def extend(self, rows: Sequence[HeadRows]) -> None:
        """Absorb rows without drafting."""
        widest = self._graphs.widths[-1]
        for run in rows:
            for at in range(0, len(run.next_tokens), widest):
                part = replace(
                    run, start=run.start + at, hidden=run.hidden[at : at + widest],
                    next_tokens=run.next_tokens[at : at + widest],
                )  # fmt: skip
                self._absorb([part], 0, 0)

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        """Draft up to each item's `count`, stopping before a draft less sure than `conf_min`."""
        drafts: list[Draft] = []
        for at in range(0, len(items), MOST_SEQUENCES):
            some = items[at : at + MOST_SEQUENCES]
            if sum(len(item.rows.next_tokens) for item in some) > min(FOLLOWED_ROWS, self._graphs.widths[-1]):
                self.extend([_all_but_newest(item.rows) for item in some if len(item.rows.next_tokens) > 1])
                some = [replace(item, rows=_newest(item.rows)) for item in some]
            count = min(MOST_DRAFTS, max(item.count for item in some))
            behind = self._absorb([item.rows for item in some], len(some), count)
            read = [self._read(behind, at, count) for at in range(len(some))]
            drafts += cut_chains(some, [ids for _, ids, _ in read], [chances for _, _, chances in read], conf_min)
        return drafts

    def skip(self, kv_start: int) -> int:
        """Blocks at the beginning of a table that hold nothing of this head's."""
        return kv_start // self._kv.block_size

    def follows(self, rows: Sequence[int]) -> bool:
        """Whether it can follow a step of so many rows in each segment."""
        limit = min(FOLLOWED_ROWS, self._graphs.widths[-1])
        return len(rows) <= MOST_SEQUENCES and max(rows) <= MOST_ROWS and sum(rows) <= limit

    def follow(self, behind: Behind, segments: int, context: int, count: int) -> None:
        """Queue `count` drafts for every segment of the step that was just queued, after what it will accept."""
        self._draft(behind.rows, segments, context, min(count, MOST_DRAFTS))

    def followed(self, behind: Behind, segment: int, count: int) -> Followed:
        """Wait for what `follow` drafted."""
        return Followed(*self._read(behind, segment, min(count, MOST_DRAFTS)))

    def _warm_up(self) -> None:
        """Draft once from nothing: torch loads its kernels at first use, which takes tens of milliseconds."""
        rows = torch.stack([self._backend.buffers.streams[tap, :1] for tap in self.taps], 1).clone()
        hidden = torch.cat((rows, rows))
        self.propose([HeadItem(0, 2, 0, HeadRows(0, 0, hidden, (0, 0), [0], 0), [0], 1)], 0.0)

    def _absorb(self, runs: Sequence[HeadRows], sequences: int, count: int) -> Behind:
        """Bring rows and their next tokens to the device, take them in, and draft."""
        ends = [0]
        for run in runs:
            ends.append(ends[-1] + len(run.next_tokens))
        batch = HostBatch(
            tokens=[token for run in runs for token in run.next_tokens],
            row_offsets=tuple(ends),
            starts=tuple(run.start for run in runs),
            block_tables=[run.blocks for run in runs],
            logit_rows=(),
            draft_skips=tuple(self.skip(run.kv_start) for run in runs),
        )
        laid_out = StepRows(batch, self._kv.block_size, self._backend.kv.num_blocks)
        rows = self._graphs.width_of(ends[-1])
        inputs = self._graphs.inputs[rows]
        behind = Behind(rows, self._backend.next_stamp(), self._backend.reserve(DRAFT_WORDS * MOST_SEQUENCES))
        header = (0, behind.stamp, ends[-1], len(runs), 0, behind.drafts_at)
        inputs.write(header, laid_out.columns(0, ends[-1], [-1] * ends[-1], (), batch), laid_out.tables)
        streams = self._backend.buffers.streams
        hidden = runs[0].hidden if len(runs) == 1 else torch.cat([run.hidden for run in runs])
        for at, tap in enumerate(self._shape.taps):
            streams[tap + 1, : ends[-1]].copy_(hidden[:, at])
        self._draft(rows, sequences, max(laid_out.positions) + 1, count)
        return behind

    def _draft(self, rows: int, sequences: int, context: int, count: int) -> None:
        """Replay: take in the rows of the inputs of that width, and draft from the newest of each sequence."""
        some = next((bound for bound in SEQUENCES if sequences <= bound), SEQUENCES[-1]) if sequences else 0
        reach = self._graphs.reach(context + MOST_DRAFTS)
        self._get((rows, some, reach)).replay()
        if count > 1:
            self._get((0, some, reach, count)).replay()

    def _read(self, behind: Behind, segment: int, count: int) -> tuple[int, list[int], list[float]]:
        """Accepted rows, ids and probabilities from the tape."""
        at = behind.drafts_at + segment * DRAFT_WORDS
        accepted, *words = self._backend.buffers.tape.wait(at, 1 + 2 * count, behind.stamp)
        return accepted, words[::2], list(struct.unpack(f"{count}f", struct.pack(f"{count}I", *words[1::2])))

    def _planned(self) -> list[tuple[int, ...]]:
        graphs = self._graphs
        sequences = [count for count in SEQUENCES if count <= graphs.widths[-1]]
        keys: list[tuple[int, ...]] = []
        for reach in graphs.contexts:
            for rows in graphs.widths:
                keys += [(rows, 0, reach)]
                keys += [(rows, some, reach) for some in sequences if some // 2 < rows <= FOLLOWED_ROWS]
            keys += [(0, some, reach, count) for some in sequences for count in range(2, MOST_DRAFTS + 1)]
        return keys

    def _get(self, key: tuple[int, ...]) -> Captured:
        found = self._captured.get(key)
        if found is None:
            found = self._captured[key] = self._graphs.capture(self._launches(key), key[0] or self._graphs.widths[0])
        return found

    def _launches(self, key: tuple[int, ...]) -> tuple[Launch, ...]:
        rows, sequences, reach, *more = key
        if more:
            return tuple(self._builder.chain(sequences, reach, more[0]))
        return tuple(self._builder.absorb(rows, self._graphs.inputs[rows], reach, sequences))


def _newest(rows: HeadRows) -> HeadRows:
    last = len(rows.next_tokens) - 1
    return replace(rows, start=rows.start + last, hidden=rows.hidden[last:], next_tokens=rows.next_tokens[last:])


def _all_but_newest(rows: HeadRows) -> HeadRows:
    return replace(rows, hidden=rows.hidden[:-1], next_tokens=rows.next_tokens[:-1])


def _pack(backend: CudaBackend, shape: MTPShape, tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> DraftWeights:
    """Weights in the kernels' order; a norm before a product goes into its matrix."""
    target, dtype = backend.graphs.builder.weights, backend.kv.dtype

    def ready(matrix: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
        return (matrix if norm is None else matrix * norm).to(backend.device, dtype).contiguous()

    t = tensors
    gate, up = ready(t["gate_up"], t["ffn_norm"]).chunk(2)
    layer = PackedLayer(
        pack_heads(ready(t["qkv_weight"], t["attn_norm"]), shape.head_dim), None, ready(t["out"]),
        interleave(gate, up), ready(t["down"]),
    )  # fmt: skip
    head = (drafted_rows(backend, ids, torch.float32) * t["final_norm"].to(backend.device)).to(dtype)
    block = PackedWeights(target.embedding, (layer,), head, target.cos, target.sin)
    first = ready(t["first"], torch.cat((t["tap_norms"].flatten(), t["token_norm"])))
    again = ready(t["again"], torch.cat((t["again_norm"], t["token_norm"])))
    return DraftWeights(block, first, again, ids.to(torch.int32))
