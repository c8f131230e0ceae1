// What every variant shares: quantised matrices in tiles of 16 output rows, quantised activations, model, scratch.
//
// A tile keeps the bits of the file and only interleaves them: per block of 32 inputs, 4 input bytes of each of the 16
// rows lie side by side, so that one 64-byte vector meets one broadcast of 4 int8 activations.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "arena.h"
#include "pool.h"

constexpr int kTile = 16;
constexpr int kBlock = 32;
constexpr int kRowGroup = 8;
constexpr int kMaxHeadChunks = 256;

struct Matrix {
    int32_t type = kQ4_0, rows = 0, cols = 0, tiles = 0, blocks = 0;
    uint8_t* quants = nullptr;   // [tiles, blocks, quant_bytes()]
    uint16_t* scales = nullptr;  // [tiles, blocks, 16] half floats
    uint16_t* mins = nullptr;    // the same, Q4_1 only
    size_t bytes = 0;

    int quant_bytes() const { return type == kQ8_0 ? kTile * kBlock : kTile * kBlock / 2; }
};

// 32 activations as int8. A block that stands out from its row by its largest value would carry most of the row's
// rounding error, so it is wide: 16 bits, as 256 * q + low.
struct QuantBlock {
    int8_t q[kBlock], low[kBlock];  // low: wide blocks only
    float scale;                    // of one unit of q, or of low where wide
    float sum;                      // the 32 values added up
    int16_t q_sum, low_sum;
    int32_t wide;
};

struct Activations {  // groups of 8 rows, block by block, so that one pointer reaches the same block of all 8
    int32_t blocks = 0;
    float wide_above = 0.0f;
    QuantBlock* data = nullptr;  // [rows / 8, blocks, 8]

    QuantBlock& at(int64_t row, int64_t block) const {
        return data[(row / kRowGroup * blocks + block) * kRowGroup + row % kRowGroup];
    }
};

struct Layer {
    Matrix matrix[kLayerMatrices];
    float* vector[kLayerVectors] = {};
    void* keys = nullptr;      // [num_blocks, kv_heads, head_dim, block_size]
    void* values = nullptr;    // [num_blocks, block_size, kv_heads, head_dim]
    int64_t block_stride = 0;  // values from one block to the next, of keys and of values
};

struct Best {
    float value;
    int64_t token;
};

struct Scratch {
    int32_t rows = 0, logit_rows = 0;
    void* memory = nullptr;
    float *x = nullptr, *qkv = nullptr, *attn = nullptr, *ffn = nullptr;
    int32_t *segment_of = nullptr, *position = nullptr;
    Activations shared;
    Activations own[kMaxThreads];  // a few rows are cheaper to quantise twice than to wait for
    int64_t own_stage[kMaxThreads] = {};  // which stage of which step a thread's own rows belong to
    int64_t stage = 0;
    Best* best = nullptr;  // [kHeadChunks, logit_rows]
};

struct Variant;

struct Model {
    ShapeArgs shape;
    const Variant* variant = nullptr;
    Layer* layers = nullptr;
    Matrix embedding, head;
    float* final_norm = nullptr;
    const float *cos = nullptr, *sin = nullptr;  // [max_context, head_dim / 2]
    Scratch scratch;
    Pool* pool = nullptr;
    bool borrows_pool = false;
    Arena arena;
    char error[256] = {};

    const Matrix& head_matrix() const { return head.quants ? head : embedding; }
    int q_size() const { return shape.heads * shape.head_dim; }
    int kv_size() const { return shape.kv_heads * shape.head_dim; }
    int qkv_size() const { return q_size() + 2 * kv_size(); }
};

// One instruction-set level: the same source compiled with other flags, the same bits out.
struct Variant {
    const char* name;
    void (*step)(Model&, const StepArgs&);
    void (*keep_keys)(Model&, const StepArgs&);
    void (*embed)(const Model&, const int64_t* tokens, int64_t count, float* out);
    void (*head)(Model&, const float* hidden, int64_t rows, float* logits);
    void (*norm)(const float* x, int count, float eps, float* to);  // x over its root mean square; `to` may be x
    float (*exponentials)(const float* x, int64_t count, float top);  // sum of exp(x - top)
    void (*draw)(Model&, const DrawPlan* plans, int64_t count, int64_t* tokens);  // -1 where a row allows none
};

struct Range {
    int64_t begin, end;
};

// The contiguous part `index` of `parts` of `count` items.
inline Range share(int64_t count, int parts, int index) {
    return {count * index / parts, count * (index + 1) / parts};
}

// Keeps a sentence for the caller and returns 1.
int fail(Model& model, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Packs one GGUF matrix into tiles; returns 0, or 1 with an error kept.
int pack(Model& model, const MatrixArgs& from, Matrix& to);
// Makes scratch memory for this many rows; returns 0, or 1 with an error kept.
int make_room(Model& model, int64_t rows, int64_t logit_rows);

// Checks return 0, or 1 with an error kept.
int check_shape(Model& model);
int check_ready(Model& model);  // all weights and caches are there
int check_tokens(Model& model, const int64_t* tokens, int64_t count);
int check_step(Model& model, const StepArgs& args);
