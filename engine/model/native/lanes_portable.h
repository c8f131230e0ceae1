// Sixteen float lanes as plain loops: the definition that the vector variants must match bit for bit.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

struct F {
    float v[16];
};
#define METRALE_UNROLL  // loops are left to the compiler
constexpr int kRowTile = 4;    // activation rows that share one pass over a tile
constexpr int kAccumulators = 24;  // vectors of attention that stay in registers

#define METRALE_EACH(expression) \
    F r;                         \
    for (int i = 0; i < 16; ++i) r.v[i] = expression; \
    return r

inline F load(const float* p) { METRALE_EACH(p[i]); }
inline void store(float* p, F a) { memcpy(p, a.v, sizeof a.v); }
inline F splat(float x) { METRALE_EACH(x); }
inline F operator+(F a, F b) { METRALE_EACH(a.v[i] + b.v[i]); }
inline F operator-(F a, F b) { METRALE_EACH(a.v[i] - b.v[i]); }
inline F operator*(F a, F b) { METRALE_EACH(a.v[i] * b.v[i]); }
inline F operator/(F a, F b) { METRALE_EACH(a.v[i] / b.v[i]); }
inline F fma(F a, F b, F c) { METRALE_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F max(F a, F b) { METRALE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F abs(F a) { METRALE_EACH(__builtin_fabsf(a.v[i])); }
inline F round(F a) {  // to nearest even, for |a| < 2^22; needs a compiler that does not reassociate
    METRALE_EACH((a.v[i] + 12582912.0f) - 12582912.0f);
}
// Lanes from `valid` on become `other`.
inline F keep_first(F a, int valid, float other) { METRALE_EACH(i < valid ? a.v[i] : other); }
inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline F times_power_of_two(F a, F n) {  // a * 2^n, n a whole number in [-126, 127]
    METRALE_EACH(a.v[i] * from_bits(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23));
}
inline float sum(F a) {  // lanes i + (i+8), then +4, +2, +1: every variant adds in this order
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
    return a.v[0];
}
inline float largest(F a) {
    float best = a.v[0];
    for (int i = 1; i < 16; ++i) best = a.v[i] > best ? a.v[i] : best;
    return best;
}
inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000u | ((rest & 0x3ff) << 13));
    if (rest < 0x400) {  // zero and subnormal numbers: multiples of 2^-24
        const float magnitude = static_cast<float>(rest) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return from_bits(sign | ((rest << 13) + (112u << 23)));
}
inline F load_half(const uint16_t* p) { METRALE_EACH(half_to_float(p[i])); }
inline F load_brain(const uint16_t* p) { METRALE_EACH(from_bits(static_cast<uint32_t>(p[i]) << 16)); }
// Whole numbers in [-127, 127] to bytes; returns their sum.
inline int32_t store_bytes(int8_t* p, F a) {
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int8_t>(static_cast<int32_t>(a.v[i]));
        total += p[i];
    }
    return total;
}

struct I {  // sixteen sums, one for each of a tile's rows
    int32_t v[16];
};
inline I splat_int(int32_t x) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
}
inline I operator+(I a, I b) {
    for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
    return a;
}
inline I times_256(I a) {
    for (int i = 0; i < 16; ++i) a.v[i] *= 256;
    return a;
}
inline F to_float(I a) { METRALE_EACH(static_cast<float>(a.v[i])); }

struct Weights {  // a block of 32 weights of each of 16 rows as unsigned bytes, four inputs of all rows side by side
    uint8_t v[512];
};
struct Nibbles : Weights {
    explicit Nibbles(const uint8_t* p) {
        for (int i = 0; i < 256; ++i) {
            v[i] = p[i] & 15;
            v[i + 256] = p[i] >> 4;
        }
    }
};
// Weights of 8 bits are stored with 128 added, which is taken off afterwards.
constexpr int32_t kByteOffset = 128;
struct Bytes : Weights {
    explicit Bytes(const uint8_t* p) { memcpy(v, p, sizeof v); }
};

// Adds to sums[n] the block times the 32 activations at x + n * stride.
template <int N>
inline void dot(const Weights& w, const int8_t* x, int stride, I* sums) {
    for (int n = 0; n < N; ++n)
        for (int g = 0; g < 8; ++g)
            for (int i = 0; i < 16; ++i)
                for (int j = 0; j < 4; ++j)
                    sums[n].v[i] += static_cast<int32_t>(w.v[64 * g + 4 * i + j]) * x[n * stride + 4 * g + j];
}

#undef METRALE_EACH

}  // namespace
