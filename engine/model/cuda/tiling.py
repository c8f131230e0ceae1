"""Tile sizes of the matrix kernels: the part of the inner dimension that a warp takes, the rows that share a weight."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.config import ModelConfig

MMA_INNER = 16
"""Inner size of one tensor-core instruction; a slice is a whole number of them."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The inner dimension is cut into `slices`; each is walked in `iterations` of `width` and a rest of `tail`."""

    slices: int
    width: int
    iterations: int
    tail: int
    outputs: int
    rows: int
    registers: int | None = None
    """Most registers of a thread; fewer let more programs of one processor load at the same time."""

    stages: int = 1
    """Above 1: weights stream through that many buffers in shared memory instead of registers."""

    @property
    def warps(self) -> int:
        return self.slices

    def constants(self) -> dict[str, int]:
        """As the kernels' compile-time arguments."""
        return {
            "S": self.slices, "BKS": self.width, "ITERS": self.iterations, "TAIL": self.tail, "BN": self.outputs,
            "R": self.rows, "STAGES": self.stages,
        }  # fmt: skip


def slices_of(inner: int) -> int:
    """How many warps share the inner dimension: at most 8, each with whole instructions. Never depends on rows."""
    return next((count for count in (8, 4, 2, 1) if inner % (count * MMA_INNER) == 0), 0)


def row_tile(rows: int) -> int:
    """Rows that share one read of the weights; measured on an H200."""
    if rows <= 24:
        return 8
    return 16 if rows <= 32 else 32


def tiling(inner: int, outputs: int, rows: int, *, normed: bool, most: int = 64) -> Tiling:
    """Sizes for `rows` rows, chosen by measurement; `most` bounds the outputs of a program."""
    slices, tile, stages = slices_of(inner), row_tile(rows), 1
    if inner >= 2048:
        wide, budget, stages = _long(inner, outputs, tile, normed)
    else:
        wide, tile, budget = _short(inner, outputs, tile)
    wide = min(wide, most)
    if outputs % wide:
        wide = 32 if outputs % 32 == 0 else 16
    width, iterations, tail = cut(inner // slices, budget // slices)
    return Tiling(slices, width, iterations, tail, wide, tile, stages=1 if tail else stages)


def _short(inner: int, outputs: int, tile: int) -> tuple[int, int, int]:
    """Outputs, rows and inner elements of a tile whose weights go through registers. Shapes of the default model, step
    of 256 rows: 3,290 us with 32 by 32 throughout, 2,734 so; of 32 rows 760 with 16 outputs where there are few, 706
    with 32; of 16 rows 602 with tiles of 16 rows, 505 with two of 8, which more processors share."""
    if tile == 8:
        return (32 if outputs >= 2048 else 16), tile, 1024
    if tile == 16:
        return 32, 8 if inner >= 1024 else tile, 1024
    if outputs >= 2048:
        return 64, tile, 512
    return (32, tile, 1024) if inner >= 1024 else (64, 16, 512)


def _long(inner: int, outputs: int, tile: int, normed: bool) -> tuple[int, int, int]:
    """Outputs, inner elements and stages where an inner dimension is long enough to stream. Shape of 1B, one row:
    974 us with three stages for gate and up and none for q, k and v, 947 so."""
    if tile > 8:
        return 32, 512, 3
    if inner >= 4096:
        return 16, 1024, 3
    if not normed:
        return 16, 1024, 1
    return (32, 512, 4) if outputs <= 4096 else (32, 1024, 2)


def cut(share: int, most: int) -> tuple[int, int, int]:
    """Width, iterations and tail of a slice of `share`: powers of two, the width at most `most`."""
    width = 1 << (min(share, most).bit_length() - 1)
    iterations, tail = divmod(share, width)
    while tail & (tail - 1):
        width //= 2
        iterations, tail = divmod(share, width)
    return width, iterations, tail


def fits(config: ModelConfig) -> str | None:
    """Why the kernels cannot run this model, in one sentence, or None."""
    c = config
    if c.qk_norm or c.output_bias or c.mlp_bias:
        return "the CUDA kernels run no query and key norms and no biases but those of q, k and v"
    if c.head_dim not in (16, 32, 64, 128, 256):
        return f"the CUDA kernels need a head size that is a power of two from 16 to 256, not {c.head_dim}"
    sizes = {"hidden size": c.hidden_size, "attention width": c.num_heads * c.head_dim, "FFN": c.intermediate_size}
    for name, size in sizes.items():
        if size % MMA_INNER:
            return f"the CUDA kernels need a {name} in multiples of {MMA_INNER}, not {size}"
    return None
