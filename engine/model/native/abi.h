// The plain-C face of the native decoder: what Python passes through ctypes, field for field.
#pragma once
#include <stdint.h>

#if defined(__GNUC__)
#define METRALE_API extern "C" __attribute__((visibility("default")))
#else
#define METRALE_API extern "C"
#endif

enum QuantType : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2 };
enum KvType : int32_t { kKvF32 = 0, kKvF16 = 1, kKvBF16 = 2 };

// Slots of a layer's matrices and vectors; the last ones belong to the whole model (layer -1).
enum MatrixSlot : int32_t { kWq, kWk, kWv, kWo, kWgate, kWup, kWdown, kLayerMatrices, kEmbedding = kLayerMatrices, kHead, kMatrixSlots };
enum VectorSlot : int32_t { kAttnNorm, kFfnNorm, kQNorm, kKNorm, kBq, kBk, kBv, kBo, kBgate, kBup, kBdown, kLayerVectors, kFinalNorm = kLayerVectors, kVectorSlots };

struct ShapeArgs {
    int32_t layers, hidden, ffn, heads, kv_heads, head_dim, vocab, max_context;
    int32_t block_size, num_blocks, kv_type, threads;
    float rms_eps, attention_scale, wide_above;
};

struct MatrixArgs {
    int32_t layer, slot, type, rows, cols;
    const uint8_t* data;       // GGUF blocks, row by row
    const int32_t* row_order;  // row i of the result is row row_order[i] of `data`; null: as stored
};

struct StepArgs {
    int32_t rows, segments, logit_rows, taps, layers_run, table_width;
    const int64_t* tokens;         // [rows]
    const int32_t* row_offsets;    // [segments + 1]
    const int32_t* starts;         // [segments]
    const int32_t* block_tables;   // [segments, table_width]
    const int32_t* logit_row_ids;  // [logit_rows]
    const int32_t* tap_layers;     // [taps], ascending
    const int32_t* layer_ids;      // [layers_run]
    float* hidden;                 // [rows, taps, hidden] or null
    float* logits;                 // [logit_rows, vocab] or null
    int64_t* argmax;               // [logit_rows]
    int64_t* part_ns;              // [kParts] time by part on the calling thread, added to; null: not measured
    const float* inputs;           // [rows, hidden] in place of the tokens' embeddings (draft heads); null: embed
};

// All drafts of a head. The arrays that `step` reads are written between its steps, hence once more without const.
struct DraftArgs {
    StepArgs step;            // of the absorbed rows; `tokens` is what followed each of them, `hidden` has a row a segment
    int32_t taps, drafts;     // target layers per row; drafts wanted per segment, 0: absorb only
    float chance_min;
    int32_t made;             // out
    const float* tap_rows;    // [rows, taps, hidden]
    const float* token_part;  // [vocab, hidden] what a drafted token adds to the next input
    float* fused;             // [at most 128 rows and at least segments, (taps + 1) * hidden]
    float* inputs;            // = step.inputs
    int32_t *offsets, *starts, *newest;  // = step.row_offsets, step.starts, step.logit_row_ids
    int64_t* drafted;         // [drafts, segments]
    float* chances;           // [drafts, segments]
};

// How one row becomes a token. `top_k` 0, `top_p` 1 and `min_p` 0 keep everything.
struct DrawPlan {
    const float* logits;  // [vocab]
    double temperature, top_p, min_p, uniform;
    int64_t top_k;
};

// Parts of a step that the profile tells apart.
enum Part : int32_t { kPartEmbed, kPartNorm, kPartQkv, kPartRope, kPartAttention, kPartOut, kPartGateUp, kPartDown, kPartHead, kPartWait, kParts };
