// Sixteen float lanes in two registers and the int8 dot product on AVX2, with AVX-VNNI where the flags allow it.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

struct F {
    __m256 a, b;
};
#define METRALE_UNROLL _Pragma("GCC unroll 8")     // keep accumulators in registers
#define METRALE_KEEP_LOOP _Pragma("GCC unroll 1")  // unrolled, its sums would be reordered and need more registers
constexpr int kRowTile = 4;    // activation rows that share one pass over a tile
constexpr int kAccumulators = 5;  // vectors of attention that stay in registers beside those of keys

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
inline __m256 eight_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F load_half(const uint16_t* p) { return {eight_half(p), eight_half(p + 8)}; }
inline __m256 eight_brain(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load_brain(const uint16_t* p) { return {eight_brain(p), eight_brain(p + 8)}; }
// Whole numbers in [-127, 127] to bytes; returns their sum.
inline int32_t store_bytes(int8_t* p, F x) {
    const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    const __m256i words = _mm256_packs_epi32(a, b), bytes = _mm256_packs_epi16(words, words);  // each half of a, then of b
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
    const __m256i eight = _mm256_add_epi32(a, b);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

struct I {  // sixteen sums, one for each of a tile's rows
    __m256i a, b;
};
inline I splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I times_256(I x) { return {_mm256_slli_epi32(x.a, 8), _mm256_slli_epi32(x.b, 8)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i four_of(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

// A block of 32 weights of each of 16 rows, read anew for every few activation rows: sixteen registers hold the sums of
// four rows and little else.
struct Nibbles {
    const uint8_t* p;
};
struct Bytes {
    const uint8_t* p;
};
struct Halves {  // of 32 bytes with two weights each
    __m256i low, high;
    explicit Halves(const uint8_t* p) {
        const __m256i both = load_32(p), mask = _mm256_set1_epi8(15);
        low = _mm256_and_si256(both, mask);
        high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    }
};

#if defined(__AVXVNNI__)
// Adds to sums[n] the block times the 32 activations at x + n * stride.
template <int N>
inline void dot(Nibbles w, const int8_t* x, int stride, I* sums) {
    METRALE_KEEP_LOOP
    for (int g = 0; g < 4; ++g) {
        const Halves a(w.p + 64 * g), b(w.p + 64 * g + 32);
        METRALE_UNROLL
        for (int n = 0; n < N; ++n) {
            const __m256i first = four_of(x + n * stride + 4 * g), second = four_of(x + n * stride + 4 * g + 16);
            sums[n].a = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sums[n].a, a.low, first), a.high, second);
            sums[n].b = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sums[n].b, b.low, first), b.high, second);
        }
    }
}
// Weights of 8 bits are stored with 128 added, which is taken off afterwards.
constexpr int32_t kByteOffset = 128;
template <int N>
inline void dot(Bytes w, const int8_t* x, int stride, I* sums) {
    METRALE_KEEP_LOOP
    for (int g = 0; g < 8; ++g) {
        const __m256i a = load_32(w.p + 64 * g), b = load_32(w.p + 64 * g + 32);
        METRALE_UNROLL
        for (int n = 0; n < N; ++n) {
            const __m256i four = four_of(x + n * stride + 4 * g);
            sums[n].a = _mm256_dpbusd_avx_epi32(sums[n].a, a, four);
            sums[n].b = _mm256_dpbusd_avx_epi32(sums[n].b, b, four);
        }
    }
}
#else
inline __m256i add_pairs(__m256i sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// Adds to sums[n] the block times the 32 activations at x + n * stride. All 16 products of a 16-bit lane fit it: 16 * 15 * 127.
template <int N>
inline void dot(Nibbles w, const int8_t* x, int stride, I* sums) {
    I pairs[N];
    METRALE_UNROLL
    for (int n = 0; n < N; ++n) pairs[n] = splat_int(0);
    METRALE_KEEP_LOOP
    for (int g = 0; g < 4; ++g) {
        const Halves a(w.p + 64 * g), b(w.p + 64 * g + 32);
        METRALE_UNROLL
        for (int n = 0; n < N; ++n) {
            const __m256i first = four_of(x + n * stride + 4 * g), second = four_of(x + n * stride + 4 * g + 16);
            pairs[n].a = _mm256_add_epi16(pairs[n].a, _mm256_maddubs_epi16(a.low, first));
            pairs[n].b = _mm256_add_epi16(pairs[n].b, _mm256_maddubs_epi16(b.low, first));
            pairs[n].a = _mm256_add_epi16(pairs[n].a, _mm256_maddubs_epi16(a.high, second));
            pairs[n].b = _mm256_add_epi16(pairs[n].b, _mm256_maddubs_epi16(b.high, second));
        }
    }
    METRALE_UNROLL
    for (int n = 0; n < N; ++n) sums[n] = {add_pairs(sums[n].a, pairs[n].a), add_pairs(sums[n].b, pairs[n].b)};
}
// Signed again, and |w| times x with w's sign: 2 * 128 * 127 still fits 16 bits, 2 * 255 * 127 would saturate.
constexpr int32_t kByteOffset = 0;
template <int N>
inline void dot(Bytes w, const int8_t* x, int stride, I* sums) {
    const __m256i top_bit = _mm256_set1_epi8(-128);
    METRALE_KEEP_LOOP
    for (int g = 0; g < 8; ++g) {
        const __m256i a = _mm256_xor_si256(load_32(w.p + 64 * g), top_bit);
        const __m256i b = _mm256_xor_si256(load_32(w.p + 64 * g + 32), top_bit);
        METRALE_UNROLL
        for (int n = 0; n < N; ++n) {
            const __m256i four = four_of(x + n * stride + 4 * g);
            sums[n].a = add_pairs(sums[n].a, _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(four, a)));
            sums[n].b = add_pairs(sums[n].b, _mm256_maddubs_epi16(_mm256_abs_epi8(b), _mm256_sign_epi8(four, b)));
        }
    }
}
#endif

}  // namespace
