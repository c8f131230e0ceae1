// Causal attention over the paged cache with an online softmax in chunks of 64 positions.
//
// Chunks begin at multiples of 64 of the sequence, never of the batch, and every query runs the same operations alone
// or beside others: the result of a row is the same in a prompt chunk, a verify and a decode step. Queries that share
// keys go through a chunk together while it is in the first-level cache, and some of them share its registers.
#pragma once
#include "elementwise.h"

namespace {

constexpr int kChunk = 64;
constexpr int kKeyTiles = kChunk / 16;
constexpr int kQueryTile = 6;                 // queries that share one pass over keys in registers
constexpr int kQueryGroup = 6 * kQueryTile;  // queries that share a chunk in the first-level cache

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
    auto* to = static_cast<typename Cache::Type*>(layer.keys) + block * layer.block_stride + head * s.head_dim * s.block_size + slot;
    for (int d = 0; d < s.head_dim; ++d) to[static_cast<int64_t>(d) * s.block_size] = Cache::pack(x[d]);
}

template <class Cache>
void write_value(const Model& model, const Layer& layer, int block, int slot, int head, const float* x) {
    const ShapeArgs& s = model.shape;
    auto* to = static_cast<typename Cache::Type*>(layer.values) + block * layer.block_stride + (slot * s.kv_heads + head) * s.head_dim;
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
            const int64_t block = table[position / s.block_size] * layer.block_stride;
            const int slot = position % s.block_size;
            keys[t] = k + block + head * s.head_dim * s.block_size + slot;
            for (int i = 0; i < 16; ++i)
                values[16 * t + i] = v + block + ((slot + i) * s.kv_heads + head) * s.head_dim;
        }
    }
};

// How many vectors of 16 positions or values N queries can hold in registers at once.
constexpr int vectors_for(int queries) {
    const int most = kAccumulators / queries;
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// Scores of the positions of tiles `tile` to `tile + Tiles`; the first queries of a group ask for the values meanwhile.
template <class Cache, int N, int Tiles>
void score_tiles(const Chunk<Cache>& chunk, const Query* queries, int head_dim, int block_size, int tile, bool first,
                 F (*out)[kKeyTiles]) {
    F acc[N][Tiles];
    for (int n = 0; n < N; ++n)
        for (int t = 0; t < Tiles; ++t) acc[n][t] = splat(0.0f);
    for (int d = 0; d < head_dim; ++d) {
        const int64_t at = static_cast<int64_t>(d) * block_size;
        if (first) {  // blocks lie anywhere, so the hardware cannot foresee them
            const auto* ahead = chunk.values[(16 * tile + d * Tiles / kKeyTiles) % kChunk];
            __builtin_prefetch(ahead);
            __builtin_prefetch(ahead + head_dim / 2);
        }
        F key[Tiles];
        for (int t = 0; t < Tiles; ++t) key[t] = Cache::read(chunk.keys[tile + t] + at);
        for (int n = 0; n < N; ++n) {
            const F q = splat(queries[n].q[d]);
            for (int t = 0; t < Tiles; ++t) acc[n][t] = fma(q, key[t], acc[n][t]);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int t = 0; t < Tiles; ++t) out[n][tile + t] = acc[n][t];
}

struct Softmax {
    float top = -1e30f, total = 0.0f;

    // Turns scores into weights relative to the new maximum; returns the factor for what was summed before.
    float take(F s[kKeyTiles], int valid, float* weights) {
        if (valid < kChunk)
            for (int t = 0; t < kKeyTiles; ++t) s[t] = keep_first(s[t], valid - 16 * t, -1e30f);
        const float now = largest(max(max(s[0], s[1]), max(s[2], s[3])));
        const float factor = now > top ? rescale(now) : 1.0f;
        F all = splat(0.0f);
        for (int t = 0; t < kKeyTiles; ++t) {
            F weight = exponential(s[t] - splat(top));
            if (valid < kChunk) weight = keep_first(weight, valid - 16 * t, 0.0f);
            store(weights + 16 * t, weight);
            all = all + weight;
        }
        total = __builtin_fmaf(total, factor, sum(all));
        return factor;
    }

  private:
    float rescale(float next) {
        alignas(64) float factor[16];
        store(factor, exponential(splat(top - next)));
        top = next;
        return factor[0];
    }
};

// Adds the weighted values of dimensions `dim` to `dim + 16 * Wide`; the first of a chunk asks for the next one's keys.
template <class Cache, int N, int Wide>
void add_values(const Chunk<Cache>& chunk, const Chunk<Cache>& next, int key_stride, const Query* queries,
                const float (*weights)[kChunk], const float* factor, int dim, bool first) {
    F acc[N][Wide];
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < Wide; ++i) acc[n][i] = load(queries[n].out + dim + 16 * i) * splat(factor[n]);
    for (int j = 0; j < chunk.count; ++j) {
        if (first)
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

// Takes N queries through one chunk; returns N.
template <class Cache, int N>
int attend_chunk(const ShapeArgs& shape, const Chunk<Cache>& chunk, const Chunk<Cache>& next, const Query* queries,
                 Softmax* softmax, bool first) {
    constexpr int kVectors = vectors_for(N), kRest = kVectors < 2 ? 1 : 2;
    const int head_dim = shape.head_dim, stride = head_dim * shape.block_size / kChunk;
    F s[N][kKeyTiles];
    for (int tile = 0; tile < kKeyTiles; tile += kVectors)
        score_tiles<Cache, N, kVectors>(chunk, queries, head_dim, shape.block_size, tile, first, s);
    alignas(64) float weights[N][kChunk];
    float factor[N];
    for (int n = 0; n < N; ++n) factor[n] = softmax[n].take(s[n], queries[n].limit - chunk.start, weights[n]);
    int dim = 0;
    for (; dim + 16 * kVectors <= head_dim; dim += 16 * kVectors)
        add_values<Cache, N, kVectors>(chunk, next, stride, queries, weights, factor, dim, first && dim == 0);
    if (dim < head_dim) add_values<Cache, N, kRest>(chunk, next, stride, queries, weights, factor, dim, first && dim == 0);
    return N;
}

// Takes some of `left` queries through one chunk; returns how many.
template <class Cache>
int attend_some(const ShapeArgs& shape, const Chunk<Cache>& chunk, const Chunk<Cache>& next, const Query* queries,
                Softmax* softmax, int left, bool first) {
    if (left >= kQueryTile) return attend_chunk<Cache, kQueryTile>(shape, chunk, next, queries, softmax, first);
    if (left >= 3) return attend_chunk<Cache, 3>(shape, chunk, next, queries, softmax, first);
    if (left == 2) return attend_chunk<Cache, 2>(shape, chunk, next, queries, softmax, first);
    return attend_chunk<Cache, 1>(shape, chunk, next, queries, softmax, first);
}

// Up to kQueryGroup queries of one sequence that share a head of keys and values.
template <class Cache>
void attend(const Model& model, const Layer& layer, const int32_t* table, int head, const Query* queries, int count) {
    const ShapeArgs& shape = model.shape;
    int longest = 0;
    for (int n = 0; n < count; ++n) {
        longest = queries[n].limit > longest ? queries[n].limit : longest;
        for (int d = 0; d < shape.head_dim; d += 16) store(queries[n].out + d, splat(0.0f));
    }
    Softmax softmax[kQueryGroup];
    Chunk<Cache> chunk(model, layer, table, head, 0, longest);
    for (int start = 0; start < longest; start += kChunk) {
        const Chunk<Cache> next(model, layer, table, head, start + kChunk < longest ? start + kChunk : start, longest);
        for (int n = 0; n < count;)
            n += attend_some<Cache>(shape, chunk, next, queries + n, softmax + n, count - n, n == 0);
        chunk = next;
    }
    for (int n = 0; n < count; ++n) {
        const F inverse = splat(1.0f / softmax[n].total);
        for (int d = 0; d < shape.head_dim; d += 16) store(queries[n].out + d, load(queries[n].out + d) * inverse);
    }
}

}  // namespace
