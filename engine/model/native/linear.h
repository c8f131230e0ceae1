// Quantised matrix times rows: exact int8 products per block of 32, then float32 over the blocks in order.
//
// An output element sees the same operations in the same order whatever the number of rows and threads, so a row's
// result never depends on its neighbours (tests/unit/native/test_row_invariance.py).
#pragma once
#include "elementwise.h"

namespace {

constexpr int kRowBlock = 128;  // rows whose activations stay in the second-level cache over all tiles

// Weights are asked for this many bytes ahead, about one tile: the hardware's own prefetch stops at pages and at tiles.
// Default model, one thread: a step of 1 row 3.5 -> 2.9 ms, of 4 rows 5.1 -> 3.7, of 8 rows 8.3 -> 5.9.
constexpr int kQuantsAhead = 4096, kScalesAhead = 1024;

inline void prefetch(const void* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

struct Q40 {
    using Weights = Nibbles;
    static constexpr int kBytes = kTile * kBlock / 2, kOffset = 8;
    static constexpr bool kMin = false;
};
struct Q41 {
    using Weights = Nibbles;
    static constexpr int kBytes = kTile * kBlock / 2, kOffset = 0;
    static constexpr bool kMin = true;
};
struct Q80 {
    using Weights = Bytes;
    static constexpr int kBytes = kTile * kBlock, kOffset = kByteOffset;
    static constexpr bool kMin = false;
};

// out[m][0..15] = the tile's 16 rows times activation row row0 + m, for N rows. The `first` rows of a tile ask for the
// next one's weights; to the others they are there already.
template <class Format, int N>
void tile_times_rows(const Matrix& w, int64_t tile, const Activations& x, int64_t row0, bool first, float (*out)[kTile]) {
    const int blocks = w.blocks;
    const QuantBlock* rows = &x.at(row0, 0);
    const uint8_t* quants = w.quants + tile * blocks * Format::kBytes;
    const uint16_t* scales = w.scales + tile * blocks * kTile;
    const uint16_t* mins = Format::kMin ? w.mins + tile * blocks * kTile : nullptr;
    F acc[N];
    for (int m = 0; m < N; ++m) acc[m] = splat(0.0f);
    for (int b = 0; b < blocks; ++b) {
        const uint8_t* here = quants + static_cast<int64_t>(b) * Format::kBytes;
        if (first) {
            prefetch(here + kQuantsAhead, Format::kBytes);
            prefetch(scales + b * kTile + kScalesAhead / 2, 1);
            if constexpr (Format::kMin) prefetch(mins + b * kTile + kScalesAhead / 2, 1);
        }
        const QuantBlock* block = rows + b * kRowGroup;
        const typename Format::Weights weights(here);
        I sums[N];
        METRALE_UNROLL
        for (int m = 0; m < N; ++m) sums[m] = splat_int(-Format::kOffset * block[m].q_sum);
        dot<N>(weights, block->q, sizeof(QuantBlock), sums);
        const F scale = load_half(scales + b * kTile);
        F least;
        if constexpr (Format::kMin) least = load_half(mins + b * kTile);
        METRALE_UNROLL
        for (int m = 0; m < N; ++m) {
            if (block[m].wide) {
                sums[m] = times_256(sums[m]) + splat_int(-Format::kOffset * block[m].low_sum);
                dot<1>(weights, block[m].low, 0, sums + m);
            }
            acc[m] = fma(to_float(sums[m]), scale * splat(block[m].scale), acc[m]);
            if constexpr (Format::kMin) acc[m] = fma(least, splat(block[m].sum), acc[m]);
        }
    }
    for (int m = 0; m < N; ++m) store(out[m], acc[m]);
}

using TileKernel = void (*)(const Matrix&, int64_t, const Activations&, int64_t, bool, float (*)[kTile]);

template <class Format>
TileKernel kernel_for(int rows) {
    static_assert(kRowTile == 4 || kRowTile == 8);
    static constexpr TileKernel few[] = {tile_times_rows<Format, 1>, tile_times_rows<Format, 2>,
                                         tile_times_rows<Format, 3>, tile_times_rows<Format, 4>};
    if (rows <= 4) return few[rows - 1];
    if constexpr (kRowTile == 8) {
        static constexpr TileKernel more[] = {tile_times_rows<Format, 5>, tile_times_rows<Format, 6>,
                                              tile_times_rows<Format, 7>, tile_times_rows<Format, 8>};
        return more[rows - 5];
    }
    return nullptr;
}

inline TileKernel kernel_for(const Matrix& w, int rows) {
    if (w.type == kQ4_0) return kernel_for<Q40>(rows);
    if (w.type == kQ4_1) return kernel_for<Q41>(rows);
    return kernel_for<Q80>(rows);
}

// Calls done(tile, row0, n, out) for every tile of `tiles` and every group of n rows.
template <class Done>
void multiply(const Matrix& w, const Activations& x, int64_t rows, Range tiles, Done&& done) {
    alignas(64) float out[kRowTile][kTile];
    for (int64_t from = 0; from < rows; from += kRowBlock) {
        const int64_t to = from + kRowBlock < rows ? from + kRowBlock : rows;
        for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
            for (int64_t row = from; row < to; row += kRowTile) {
                const int n = to - row < kRowTile ? static_cast<int>(to - row) : kRowTile;
                kernel_for(w, n)(w, tile, x, row, row == 0, out);
                done(tile, row, n, out);
            }
        }
    }
}

inline int tile_width(const Matrix& w, int64_t tile) {
    const int64_t left = w.rows - tile * kTile;
    return left < kTile ? static_cast<int>(left) : kTile;
}

inline void add_bias(float* out, const float* bias, int64_t tile, int width) {
    if (bias != nullptr)
        for (int i = 0; i < width; ++i) out[i] += bias[tile * kTile + i];
}

// The result of w times x at to + row * stride.
inline void multiply_into(const Matrix& w, const Activations& x, int64_t rows, Range tiles, const float* bias, float* to,
                          int64_t stride) {
    multiply(w, x, rows, tiles, [&](int64_t tile, int64_t row, int n, float(*out)[kTile]) {
        const int width = tile_width(w, tile);
        for (int m = 0; m < n; ++m) {
            add_bias(out[m], bias, tile, width);
            __builtin_memcpy(to + (row + m) * stride + tile * kTile, out[m], static_cast<size_t>(width) * 4);
        }
    });
}

// The same, added to what is there.
inline void multiply_onto(const Matrix& w, const Activations& x, int64_t rows, Range tiles, const float* bias, float* to,
                          int64_t stride) {
    multiply(w, x, rows, tiles, [&](int64_t tile, int64_t row, int n, float(*out)[kTile]) {
        const int width = tile_width(w, tile);
        for (int m = 0; m < n; ++m) {
            add_bias(out[m], bias, tile, width);
            float* at = to + (row + m) * stride + tile * kTile;
            for (int i = 0; i < width; ++i) at[i] += out[m][i];
        }
    });
}

// silu(gate times x) * (up times x).
inline void multiply_gated(const Layer& layer, const Activations& x, int64_t rows, Range tiles, float* to, int64_t stride) {
    const Matrix &gate = layer.matrix[kWgate], &up = layer.matrix[kWup];
    multiply(gate, x, rows, tiles, [&](int64_t tile, int64_t row, int n, float(*out)[kTile]) {
        alignas(64) float upper[kRowTile][kTile];
        kernel_for(up, n)(up, tile, x, row, row == 0, upper);
        const int width = tile_width(gate, tile);
        for (int m = 0; m < n; ++m) {
            add_bias(out[m], layer.vector[kBgate], tile, width);
            add_bias(upper[m], layer.vector[kBup], tile, width);
            store(out[m], silu(load(out[m])) * load(upper[m]));
            __builtin_memcpy(to + (row + m) * stride + tile * kTile, out[m], static_cast<size_t>(width) * 4);
        }
    });
}

}  // namespace
