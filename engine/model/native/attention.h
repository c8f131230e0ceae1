// Causal attention over the paged cache with an online softmax in chunks of 64 positions.
//
// Chunks begin at multiples of 64 of the sequence, never of the batch, and every query runs the same operations alone
// or beside others: the result of a row is the same in a prompt chunk, a verify and a decode step.
#pragma once
#include "elementwise.h"

namespace {

constexpr int kChunk = 64;
constexpr int kKeyTiles = kChunk / 16;

inline float from_word(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t to_word(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

struct CacheF32 {
    using Type = float;
    static F read(const float* p) { return load(p); }
    static float pack(float x) { return x; }
};
struct CacheF16 {
    using Type = uint16_t;
    static F read(const uint16_t* p) { return load_half(p); }
    static uint16_t pack(float x) {  // to nearest even; beyond the range to infinity
        const uint32_t bits = to_word(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
        if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
        if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
        if (rest < 0x38800000) return static_cast<uint16_t>(sign | (to_word(from_word(rest) + 0.5f) - 0x3f000000));
        return static_cast<uint16_t>(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
    }
};
struct CacheBF16 {
    using Type = uint16_t;
    static F read(const uint16_t* p) { return load_brain(p); }
    static uint16_t pack(float x) {
        const uint32_t bits = to_word(x);
        if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
        return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

template <class Cache>
void write_key(const Model& model, const Layer& layer, int block, int slot, int head, const float* x) {
    const ShapeArgs& s = model.shape;
    auto* to = static_cast<typename Cache::Type*>(layer.keys) +
               (static_cast<int64_t>(block) * s.kv_heads + head) * s.head_dim * s.block_size + slot;
    for (int d = 0; d < s.head_dim; ++d) to[static_cast<int64_t>(d) * s.block_size] = Cache::pack(x[d]);
}

template <class Cache>
void write_value(const Model& model, const Layer& layer, int block, int slot, int head, const float* x) {
    const ShapeArgs& s = model.shape;
    auto* to = static_cast<typename Cache::Type*>(layer.values) +
               ((static_cast<int64_t>(block) * s.block_size + slot) * s.kv_heads + head) * s.head_dim;
    for (int d = 0; d < s.head_dim; ++d) to[d] = Cache::pack(x[d]);
}

struct Query {
    const float* q;  // rotated and scaled
    float* out;
    int32_t limit;  // positions that it sees
};

// One chunk of one head's keys and values in the cache; tiles and rows beyond `count` repeat valid ones.
template <class Cache>
struct Chunk {
    const typename Cache::Type* keys[kKeyTiles];
    const typename Cache::Type* values[kChunk];
    int start, count;

    Chunk(const Model& model, const Layer& layer, const int32_t* table, int head, int from, int longest) {
        const ShapeArgs& s = model.shape;
        const auto* k = static_cast<const typename Cache::Type*>(layer.keys);
        const auto* v = static_cast<const typename Cache::Type*>(layer.values);
        start = from;
        count = longest - from < kChunk ? longest - from : kChunk;
        for (int t = 0; t < kKeyTiles; ++t) {
            const int position = 16 * t < count ? from + 16 * t : from;
            const int64_t block = table[position / s.block_size];
            const int slot = position % s.block_size;
            keys[t] = k + (block * s.kv_heads + head) * s.head_dim * s.block_size + slot;
            for (int i = 0; i < 16; ++i)
                values[16 * t + i] = v + ((block * s.block_size + slot + i) * s.kv_heads + head) * s.head_dim;
        }
    }
};

template <class Cache, int N>
void scores(const Chunk<Cache>& chunk, const Query* queries, int head_dim, int block_size, F out[N][kKeyTiles]) {
    F acc[N][kKeyTiles];
    for (int n = 0; n < N; ++n)
        for (int t = 0; t < kKeyTiles; ++t) acc[n][t] = splat(0.0f);
    for (int d = 0; d < head_dim; ++d) {
        const int64_t at = static_cast<int64_t>(d) * block_size;
        const auto* ahead = chunk.values[d % kChunk];  // blocks lie anywhere, so the hardware cannot foresee them
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + head_dim / 2);
        F key[kKeyTiles];
        for (int t = 0; t < kKeyTiles; ++t) key[t] = Cache::read(chunk.keys[t] + at);
        for (int n = 0; n < N; ++n) {
            const F q = splat(queries[n].q[d]);
            for (int t = 0; t < kKeyTiles; ++t) acc[n][t] = fma(q, key[t], acc[n][t]);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int t = 0; t < kKeyTiles; ++t) out[n][t] = acc[n][t];
}

struct Softmax {
    float top = -1e30f, total = 0.0f;

    // Turns scores into weights relative to the new maximum; returns the factor for what was summed before.
    float take(F s[kKeyTiles], int valid, float* weights) {
        for (int t = 0; t < kKeyTiles; ++t) s[t] = keep_first(s[t], valid - 16 * t, -1e30f);
        const float now = largest(max(max(s[0], s[1]), max(s[2], s[3])));
        const float next = now > top ? now : top;
        alignas(64) float factor[16];
        store(factor, exponential(splat(top - next)));
        F all = splat(0.0f);
        for (int t = 0; t < kKeyTiles; ++t) {
            const F weight = keep_first(exponential(s[t] - splat(next)), valid - 16 * t, 0.0f);
            store(weights + 16 * t, weight);
            all = all + weight;
        }
        total = __builtin_fmaf(total, factor[0], sum(all));
        top = next;
        return factor[0];
    }
};

template <class Cache, int N, int Wide>
void add_values(const Chunk<Cache>& chunk, const Chunk<Cache>& next, int key_stride, const Query* queries,
                const float (*weights)[kChunk], const float* factor, int dim) {
    F acc[N][Wide];
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < Wide; ++i) acc[n][i] = load(queries[n].out + dim + 16 * i) * splat(factor[n]);
    for (int j = 0; j < chunk.count; ++j) {
        for (int t = 0; t < kKeyTiles; ++t) __builtin_prefetch(next.keys[t] + j * key_stride);
        F value[Wide];
        for (int i = 0; i < Wide; ++i) value[i] = Cache::read(chunk.values[j] + dim + 16 * i);
        for (int n = 0; n < N; ++n) {
            const F weight = splat(weights[n][j]);
            for (int i = 0; i < Wide; ++i) acc[n][i] = fma(weight, value[i], acc[n][i]);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < Wide; ++i) store(queries[n].out + dim + 16 * i, acc[n][i]);
}

template <class Cache, int N>
void attend(const Model& model, const Layer& layer, const int32_t* table, int head, const Query* queries) {
    const int head_dim = model.shape.head_dim;
    int longest = 0;
    for (int n = 0; n < N; ++n) {
        longest = queries[n].limit > longest ? queries[n].limit : longest;
        for (int d = 0; d < head_dim; d += 16) store(queries[n].out + d, splat(0.0f));
    }
    Softmax softmax[N];
    alignas(64) float weights[N][kChunk];
    float factor[N];
    Chunk<Cache> chunk(model, layer, table, head, 0, longest);
    for (int start = 0; start < longest; start += kChunk) {
        const Chunk<Cache> next(model, layer, table, head, start + kChunk < longest ? start + kChunk : start, longest);
        F s[N][kKeyTiles];
        scores<Cache, N>(chunk, queries, head_dim, model.shape.block_size, s);
        for (int n = 0; n < N; ++n) factor[n] = softmax[n].take(s[n], queries[n].limit - start, weights[n]);
        int dim = 0;
        const int stride = head_dim * model.shape.block_size / kChunk;
        for (; dim + 64 <= head_dim; dim += 64) add_values<Cache, N, 4>(chunk, next, stride, queries, weights, factor, dim);
        if (dim < head_dim) add_values<Cache, N, 2>(chunk, next, stride, queries, weights, factor, dim);
        chunk = next;
    }
    for (int n = 0; n < N; ++n) {
        const F inverse = splat(1.0f / softmax[n].total);
        for (int d = 0; d < head_dim; d += 16) store(queries[n].out + d, load(queries[n].out + d) * inverse);
    }
}

template <class Cache>
void attend_some(const Model& model, const Layer& layer, const int32_t* table, int head, const Query* queries, int count) {
    using Kernel = void (*)(const Model&, const Layer&, const int32_t*, int, const Query*);
    static constexpr Kernel few[] = {attend<Cache, 1>, attend<Cache, 2>};
    if (count <= 2) return few[count - 1](model, layer, table, head, queries);
    if constexpr (kQueryTile == 6) {
        static constexpr Kernel more[] = {attend<Cache, 3>, attend<Cache, 4>, attend<Cache, 5>, attend<Cache, 6>};
        more[count - 3](model, layer, table, head, queries);
    }
}

}  // namespace
