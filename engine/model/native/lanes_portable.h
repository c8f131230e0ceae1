// Sixteen float lanes as plain loops: the definition that the vector variants must match bit for bit.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

struct F {
    float v[16];
};
using LaneF = F;
constexpr int kLanes = 16;
#define METRALE_UNROLL  // loops are left to the compiler
constexpr int kRowTile = 4;    // activation rows that share one pass over a tile
constexpr int kQueryTile = 2;  // query vectors that share one pass over keys

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

struct LaneI {
    int32_t v[16];
};
struct LaneW {  // 4 weights of each lane's row
    uint8_t v[64];
};
inline LaneF lane_splat(float x) { return splat(x); }
inline LaneF lane_half(const uint16_t* p) { return load_half(p); }
inline void lane_store(float* p, LaneF a) { store(p, a); }
inline LaneI lane_splat_int(int32_t x) {
    LaneI r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
}
inline LaneI lane_times_256_plus(LaneI a, int32_t more) {
    for (int i = 0; i < 16; ++i) a.v[i] = a.v[i] * 256 + more;
    return a;
}
inline LaneF to_float(LaneI a) { METRALE_EACH(static_cast<float>(a.v[i])); }
inline void lane_nibbles(const uint8_t* p, LaneW& low, LaneW& high) {
    for (int i = 0; i < 64; ++i) {
        low.v[i] = p[i] & 15;
        high.v[i] = p[i] >> 4;
    }
}
inline LaneW lane_bytes(const uint8_t* p) {
    LaneW r;
    memcpy(r.v, p, 64);
    return r;
}
// Weights of 8 bits are stored with 128 added, which is taken off afterwards.
constexpr int32_t kByteOffset = 128;
// A block's 32 weights of each lane times the block's 32 activations, added to `acc`.
inline LaneI dot_nibbles(LaneI acc, const LaneW w[8], const int8_t* x) {
    for (int g = 0; g < 8; ++g)
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<int32_t>(w[g].v[4 * i + j]) * x[4 * g + j];
    return acc;
}
inline LaneI dot_bytes(LaneI acc, const LaneW w[8], const int8_t* x) { return dot_nibbles(acc, w, x); }

#undef METRALE_EACH

}  // namespace
