// Sixteen float lanes in two registers and the int8 dot product on AVX2, with AVX-VNNI where the flags allow it.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

struct LaneF {  // as many of a tile's 16 rows as one register holds
    __m256 v;
};
struct F {
    __m256 a, b;
};
constexpr int kLanes = 8;
#define METRALE_UNROLL _Pragma("GCC unroll 8")  // keep accumulators in registers
constexpr int kRowTile = 4;    // activation rows that share one pass over a tile
constexpr int kQueryTile = 2;  // query vectors that share one pass over keys

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F round(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
// Lanes from `valid` on become `other`.
inline F keep_first(F x, int valid, float other) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 fill = _mm256_set1_ps(other);
    const __m256 keep_a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(valid), index));
    const __m256 keep_b = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(valid - 8), index));
    return {_mm256_blendv_ps(fill, x.a, keep_a), _mm256_blendv_ps(fill, x.b, keep_b)};
}
inline __m256 times_power_of_two(__m256 x, __m256 n) {
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
inline F times_power_of_two(F x, F n) {  // x * 2^n, n a whole number in [-126, 127]
    return {times_power_of_two(x.a, n.a), times_power_of_two(x.b, n.b)};
}
inline float sum(F x) {  // lanes i + (i+8), then +4, +2, +1: every variant adds in this order
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline LaneF lane_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F load_half(const uint16_t* p) { return {lane_half(p).v, lane_half(p + 8).v}; }
inline __m256 eight_brain(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load_brain(const uint16_t* p) { return {eight_brain(p), eight_brain(p + 8)}; }
// Whole numbers in [-127, 127] to bytes; returns their sum.
inline int32_t store_bytes(int8_t* p, F x) {
    alignas(32) int32_t whole[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(whole), _mm256_cvtps_epi32(x.a));
    _mm256_store_si256(reinterpret_cast<__m256i*>(whole + 8), _mm256_cvtps_epi32(x.b));
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int8_t>(whole[i]);
        total += whole[i];
    }
    return total;
}

struct LaneI {
    __m256i v;
};
struct LaneW {  // 4 weights of each lane's row, unsigned bytes
    __m256i v;
};
inline LaneF operator*(LaneF x, LaneF y) { return {_mm256_mul_ps(x.v, y.v)}; }
inline LaneF fma(LaneF x, LaneF y, LaneF z) { return {_mm256_fmadd_ps(x.v, y.v, z.v)}; }
inline LaneF lane_splat(float x) { return {_mm256_set1_ps(x)}; }
inline void lane_store(float* p, LaneF x) { _mm256_storeu_ps(p, x.v); }
inline LaneI lane_splat_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline LaneI lane_times_256_plus(LaneI a, int32_t more) {
    return {_mm256_add_epi32(_mm256_slli_epi32(a.v, 8), _mm256_set1_epi32(more))};
}
inline LaneF to_float(LaneI x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline void lane_nibbles(const uint8_t* p, LaneW& low, LaneW& high) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask = _mm256_set1_epi8(15);
    low.v = _mm256_and_si256(both, mask);
    high.v = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
}
inline __m256i four_of(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
// A block's 32 weights of each lane times the block's 32 activations, added to `acc`.
#if defined(__AVXVNNI__)
inline LaneI dot_nibbles(LaneI acc, const LaneW w[8], const int8_t* x) {
    METRALE_UNROLL
    for (int g = 0; g < 8; ++g) acc.v = _mm256_dpbusd_avx_epi32(acc.v, w[g].v, four_of(x + 4 * g));
    return acc;
}
// Weights of 8 bits are stored with 128 added, which is taken off afterwards.
constexpr int32_t kByteOffset = 128;
inline LaneW lane_bytes(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline LaneI dot_bytes(LaneI acc, const LaneW w[8], const int8_t* x) { return dot_nibbles(acc, w, x); }
#else
inline LaneI add_pairs(LaneI acc, __m256i pairs) {
    return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}
inline LaneI dot_nibbles(LaneI acc, const LaneW w[8], const int8_t* x) {  // 16 * 15 * 127 fits 16 bits
    __m256i pairs = _mm256_maddubs_epi16(w[0].v, four_of(x));
    METRALE_UNROLL
    for (int g = 1; g < 8; ++g) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[g].v, four_of(x + 4 * g)));
    return add_pairs(acc, pairs);
}
// Signed again, and |w| times x with w's sign: 2 * 128 * 127 still fits 16 bits, 2 * 255 * 127 would saturate.
constexpr int32_t kByteOffset = 0;
inline LaneW lane_bytes(const uint8_t* p) {
    const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_xor_si256(stored, _mm256_set1_epi8(-128))};
}
inline LaneI dot_bytes(LaneI acc, const LaneW w[8], const int8_t* x) {
    METRALE_UNROLL
    for (int g = 0; g < 8; ++g) {
        const __m256i signed_x = _mm256_sign_epi8(four_of(x + 4 * g), w[g].v);
        acc = add_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(w[g].v), signed_x));
    }
    return acc;
}
#endif

}  // namespace
