// Looks tokens up in the packed embedding.
#pragma once
#include "tensors.h"

namespace {

// The token embedding of one row, dequantised.
inline void embed_row(const Matrix& w, int64_t token, float* out) {
    const int64_t tile = token / kTile, lane = token % kTile;
    for (int b = 0; b < w.blocks; ++b) {
        const int64_t block = tile * w.blocks + b;
        const uint8_t* q = w.quants + block * w.quant_bytes() + lane * 4;
        alignas(64) float scale[16], least[16];
        store(scale, load_half(w.scales + block * kTile));
        if (w.type == kQ4_1) store(least, load_half(w.mins + block * kTile));
        for (int k = 0; k < kBlock; ++k) {
            float* to = out + b * kBlock + k;
            const int part = w.type == kQ8_0 ? k / 4 : (k % 16) / 4;
            const int byte = q[part * 64 + k % 4], nibble = k < 16 ? byte & 15 : byte >> 4;
            if (w.type == kQ8_0) *to = scale[lane] * static_cast<float>(byte - 128);
            if (w.type == kQ4_0) *to = scale[lane] * static_cast<float>(nibble - 8);
            if (w.type == kQ4_1) *to = scale[lane] * static_cast<float>(nibble) + least[lane];
        }
    }
}

}  // namespace
