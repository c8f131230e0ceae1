// Exponential, norm, rotary embedding and int8 quantisation of single rows, in one fixed order of operations.
#pragma once
#include "tensors.h"

namespace {

// exp(x) with relative error below 2e-7 for x in [-87, 88]; values outside are clamped; exp(0) is exactly 1.
inline F exponential(F x) {
    const F high = splat(88.0f), low = splat(-87.0f);
    x = splat(0.0f) - max(splat(0.0f) - max(x, low), splat(0.0f) - high);
    const F n = round(x * splat(1.44269504088896341f));
    F r = fma(n, splat(-0.693145751953125f), x);
    r = fma(n, splat(-1.42860682030941723e-6f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(0.5f));
    p = fma(p * r, r, r) + splat(1.0f);
    return times_power_of_two(p, n);
}

inline F silu(F x) { return x / (splat(1.0f) + exponential(splat(0.0f) - x)); }

// 1 / sqrt(mean of squares + eps); `count` is a multiple of 32.
inline float inverse_rms(const float* x, int count, float eps) {
    F even = splat(0.0f), odd = splat(0.0f);
    for (int i = 0; i < count; i += 32) {
        const F a = load(x + i), b = load(x + i + 16);
        even = fma(a, a, even);
        odd = fma(b, b, odd);
    }
    return 1.0f / __builtin_sqrtf(sum(even + odd) / static_cast<float>(count) + eps);
}

// What rounding left over, in 256ths, kept within [-127, 127]: half a unit would be 128.
inline F rest_of(F exact, F whole) {
    const F zero = splat(0.0f), bound = splat(-127.0f);
    return zero - max(zero - max(round((exact - whole) * splat(256.0f)), bound), bound);
}

// Quantises a block whose largest absolute value is `top`.
inline void quantise_block(QuantBlock& to, F first, F second, float top, bool wide) {
    const F inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
    const F a = first * inverse, b = second * inverse, whole_a = round(a), whole_b = round(b);
    int32_t total = store_bytes(to.q, whole_a) + store_bytes(to.q + 16, whole_b);
    to.q_sum = static_cast<int16_t>(total);
    to.wide = wide;
    to.scale = top / 127.0f;
    if (wide) {
        const int32_t rest = store_bytes(to.low, rest_of(a, whole_a)) + store_bytes(to.low + 16, rest_of(b, whole_b));
        to.low_sum = static_cast<int16_t>(rest);
        to.scale /= 256.0f;
        total = total * 256 + rest;
    }
    to.sum = to.scale * static_cast<float>(total);
}

// Quantises one row, 32 values a block; `value(i)` gives lanes i..i+15 of the row. A block is wide where its largest
// value exceeds `to.wide_above` times the root mean square of those of the row.
template <class Value>
inline void quantise(Activations& to, int64_t row, Value&& value) {
    float squares = 0.0f;
    for (int b = 0; b < to.blocks; ++b) {
        const float top = largest(max(abs(value(b * kBlock)), abs(value(b * kBlock + 16))));
        to.at(row, b).scale = top;
        squares += top * top;
    }
    const float limit = to.wide_above * __builtin_sqrtf(squares / static_cast<float>(to.blocks));
    for (int b = 0; b < to.blocks; ++b) {
        QuantBlock& block = to.at(row, b);
        quantise_block(block, value(b * kBlock), value(b * kBlock + 16), block.scale, block.scale > limit);
    }
}

inline void quantise_plain(Activations& to, int64_t row, const float* x) {
    quantise(to, row, [x](int i) { return load(x + i); });
}

inline void quantise_normed(Activations& to, int64_t row, const float* x, const float* weight, float eps) {
    const F factor = splat(inverse_rms(x, to.blocks * kBlock, eps));
    quantise(to, row, [x, weight, factor](int i) { return load(x + i) * factor * load(weight + i); });
}

// Rms-norms one head in place; `weight` has head_dim entries.
inline void norm_head(float* x, const float* weight, int count, float eps) {
    const F factor = splat(inverse_rms(x, count, eps));
    for (int i = 0; i < count; i += 16) store(x + i, load(x + i) * factor * load(weight + i));
}

// Rotates the two halves of a head and scales; `count` is a multiple of 32, cos and sin have count / 2 entries.
inline void rotate(float* x, const float* cos, const float* sin, int count, float scale) {
    const int half = count / 2;
    for (int i = 0; i < half; i += 16) {
        const F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, (a * c - b * s) * splat(scale));
        store(x + half + i, (b * c + a * s) * splat(scale));
    }
}

}  // namespace
