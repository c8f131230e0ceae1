// Sixteen float lanes and the int8 dot product on AVX-512 with VNNI.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

struct F {
    __m512 v;
};
#define METRALE_UNROLL _Pragma("GCC unroll 8")  // keep accumulators in registers
constexpr int kRowTile = 8;    // activation rows that share one pass over a tile
constexpr int kAccumulators = 24;  // vectors of attention that stay in registers

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F splat(float x) { return {_mm512_set1_ps(x)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F round(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// Lanes from `valid` on become `other`.
inline F keep_first(F a, int valid, float other) {
    const __mmask16 mask = valid >= 16 ? 0xffff : valid <= 0 ? 0 : static_cast<__mmask16>((1u << valid) - 1);
    return {_mm512_mask_blend_ps(mask, _mm512_set1_ps(other), a.v)};
}
inline F times_power_of_two(F a, F n) {  // a * 2^n, n a whole number in [-126, 127]
    const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(bits))};
}
inline float sum(F a) {  // lanes i + (i+8), then +4, +2, +1: every variant adds in this order
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }
inline F load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F load_brain(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Whole numbers in [-127, 127] to bytes; returns their sum.
inline int32_t store_bytes(int8_t* p, F a) {
    const __m512i whole = _mm512_cvtps_epi32(a.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
    return _mm512_reduce_add_epi32(whole);
}

struct I {  // sixteen sums, one for each of a tile's rows
    __m512i v;
};
inline I splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I times_256(I a) { return {_mm512_slli_epi32(a.v, 8)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }

struct Weights {  // a block of 32 weights of each of 16 rows as unsigned bytes, four inputs a register
    __m512i v[8];
};
struct Nibbles : Weights {
    explicit Nibbles(const uint8_t* p) {
        const __m512i mask = _mm512_set1_epi8(15);
        METRALE_UNROLL
        for (int g = 0; g < 4; ++g) {
            const __m512i both = _mm512_loadu_si512(p + 64 * g);
            v[g] = _mm512_and_si512(both, mask);
            v[g + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        }
    }
};
// Weights of 8 bits are stored with 128 added, which is taken off afterwards.
constexpr int32_t kByteOffset = 128;
struct Bytes : Weights {
    explicit Bytes(const uint8_t* p) {
        METRALE_UNROLL
        for (int g = 0; g < 8; ++g) v[g] = _mm512_loadu_si512(p + 64 * g);
    }
};

// Adds to sums[n] the block times the 32 activations at x + n * stride.
template <int N>
inline void dot(const Weights& w, const int8_t* x, int stride, I* sums) {
    METRALE_UNROLL
    for (int n = 0; n < N; ++n) {
        METRALE_UNROLL
        for (int g = 0; g < 8; ++g) {
            int32_t four;
            __builtin_memcpy(&four, x + n * stride + 4 * g, 4);
            sums[n].v = _mm512_dpbusd_epi32(sums[n].v, w.v[g], _mm512_set1_epi32(four));
        }
    }
}

}  // namespace
