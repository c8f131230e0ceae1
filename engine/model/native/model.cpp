// The C functions that Python calls: build a model, hand it weights and cache, run steps.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <new>

#include "tensors.h"

extern const Variant metrale_portable;
#if defined(__x86_64__)
extern const Variant metrale_avx2, metrale_avxvnni, metrale_avx512;
#endif

namespace {

struct Runnable {  // the levels that this processor runs, best first
    const Variant* list[4] = {};
    int count = 0;

    Runnable() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        if (avx2 && avx512 && __builtin_cpu_supports("avx512vnni")) list[count++] = &metrale_avx512;
        if (avx2 && __builtin_cpu_supports("avxvnni")) list[count++] = &metrale_avxvnni;
        if (avx2) list[count++] = &metrale_avx2;
#endif
        list[count++] = &metrale_portable;
    }
};

const Runnable& runnable() {
    static const Runnable found;
    return found;
}

int check_shape(Model& model) {
    const ShapeArgs& s = model.shape;
    if (s.hidden % kBlock || s.ffn % kBlock || s.head_dim % kBlock || s.block_size % 16 || s.block_size < 16)
        return fail(model, "hidden size %d, feed-forward size %d and head size %d must be multiples of 32 and block size %d of 16",
                    s.hidden, s.ffn, s.head_dim, s.block_size);
    if (s.layers < 1 || s.heads < 1 || s.kv_heads < 1 || s.heads % s.kv_heads || s.vocab < 1 || s.num_blocks < 1)
        return fail(model, "a model of %d layers, %d heads, %d KV heads and %d tokens cannot run", s.layers, s.heads,
                    s.kv_heads, s.vocab);
    return 0;
}

int check_table(Model& model, const StepArgs& a, int segment, int64_t end) {
    const ShapeArgs& s = model.shape;
    const int64_t used = (end + s.block_size - 1) / s.block_size;
    if (used > a.table_width)
        return fail(model, "segment %d needs %d blocks and its table has %d", segment, static_cast<int>(used), a.table_width);
    for (int64_t i = 0; i < used; ++i) {
        const int block = a.block_tables[static_cast<int64_t>(segment) * a.table_width + i];
        if (block < 0 || block >= s.num_blocks)
            return fail(model, "segment %d names block %d of %d", segment, block, s.num_blocks);
    }
    return 0;
}

int check_segments(Model& model, const StepArgs& a) {
    if (a.row_offsets[0] != 0 || a.row_offsets[a.segments] != a.rows) return fail(model, "row offsets must run from 0 to %d", a.rows);
    for (int i = 0; i < a.segments; ++i) {
        const int64_t count = static_cast<int64_t>(a.row_offsets[i + 1]) - a.row_offsets[i];
        const int64_t end = a.starts[i] + count;
        if (count < 1 || a.row_offsets[i + 1] > a.rows) return fail(model, "segment %d has %d rows", i, static_cast<int>(count));
        if (a.starts[i] < 0 || end > model.shape.max_context)
            return fail(model, "segment %d ends at position %lld of %d", i, static_cast<long long>(end), model.shape.max_context);
        if (check_table(model, a, i, end)) return 1;
    }
    return 0;
}

int check_tokens(Model& model, const int64_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (tokens[i] < 0 || tokens[i] >= model.shape.vocab)
            return fail(model, "token %lld is outside the vocabulary of %d", static_cast<long long>(tokens[i]), model.shape.vocab);
    return 0;
}

int check_step(Model& model, const StepArgs& a) {
    if (a.rows < 1 || a.segments < 1) return fail(model, "a step needs rows; this one has %d", a.rows);
    if (check_segments(model, a) || (a.inputs == nullptr && check_tokens(model, a.tokens, a.rows))) return 1;
    for (int i = 0; i < a.logit_rows; ++i)
        if (a.logit_row_ids[i] < 0 || a.logit_row_ids[i] >= a.rows)
            return fail(model, "logits are wanted of row %d of %d", a.logit_row_ids[i], a.rows);
    for (int i = 0; i < a.layers_run; ++i)
        if (a.layer_ids[i] < 0 || a.layer_ids[i] >= model.shape.layers)
            return fail(model, "layer %d of %d cannot run", a.layer_ids[i], model.shape.layers);
    return 0;
}

int check_ready(Model& model) {
    const int required[] = {kWq, kWk, kWv, kWo, kWgate, kWup, kWdown};
    for (int i = 0; i < model.shape.layers; ++i) {
        const Layer& layer = model.layers[i];
        for (const int slot : required)
            if (!layer.matrix[slot].quants) return fail(model, "layer %d has no matrix %d", i, slot);
        if (!layer.vector[kAttnNorm] || !layer.vector[kFfnNorm]) return fail(model, "layer %d has no norm", i);
        if (!layer.keys || !layer.values) return fail(model, "layer %d has no cache", i);
    }
    if (!model.embedding.quants || !model.final_norm || !model.cos || !model.sin)
        return fail(model, "the model has no embedding, final norm or rotary table");
    return 0;
}

void locate_rows(Model& model, const StepArgs& a) {
    for (int segment = 0; segment < a.segments; ++segment)
        for (int row = a.row_offsets[segment]; row < a.row_offsets[segment + 1]; ++row) {
            model.scratch.segment_of[row] = segment;
            model.scratch.position[row] = a.starts[segment] + row - a.row_offsets[segment];
        }
}

void matrix_shape(const ShapeArgs& s, int slot, int& rows, int& cols) {
    const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    const int table[kMatrixSlots][2] = {{q, s.hidden},   {kv, s.hidden},  {kv, s.hidden},    {s.hidden, q},     {s.ffn, s.hidden},
                                        {s.ffn, s.hidden}, {s.hidden, s.ffn}, {s.vocab, s.hidden}, {s.vocab, s.hidden}};
    rows = table[slot][0];
    cols = table[slot][1];
}

int vector_size(const ShapeArgs& s, int slot) {
    const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    const int table[kVectorSlots] = {s.hidden, s.hidden, s.head_dim, s.head_dim, q, kv, kv, s.hidden, s.ffn, s.ffn, s.hidden, s.hidden};
    return table[slot];
}

}  // namespace

int fail(Model& model, const char* format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(model.error, sizeof model.error, format, values);
    va_end(values);
    return 1;
}

// The names of the levels that this processor runs, best first, by index; null past the last.
METRALE_API const char* metrale_variant(int32_t index) {
    return index >= 0 && index < runnable().count ? runnable().list[index]->name : nullptr;
}

METRALE_API const char* metrale_error(const Model* model) { return model->error; }

// A model without weights at level `variant`; always returned, with an error kept when the shape cannot run.
METRALE_API Model* metrale_open(const ShapeArgs* shape, int32_t variant, const float* cos, const float* sin) {
    auto* model = new (std::nothrow) Model{};
    if (model == nullptr) return nullptr;
    model->shape = *shape;
    model->cos = cos;
    model->sin = sin;
    if (check_shape(*model)) return model;
    if (metrale_variant(variant) == nullptr) {
        fail(*model, "variant %d does not run on this processor", variant);
        return model;
    }
    model->variant = runnable().list[variant];
    model->layers = new Layer[static_cast<size_t>(shape->layers)];
    model->pool = new Pool(shape->threads);
    return model;
}

METRALE_API void metrale_close(Model* model) {
    delete model->pool;
    delete[] model->layers;
    free(model->scratch.memory);
    delete model;
}

METRALE_API int metrale_set_matrix(Model* model, const MatrixArgs* from) {
    if (from->slot < 0 || from->slot >= kMatrixSlots || from->layer < -1 || from->layer >= model->shape.layers ||
        (from->layer < 0) != (from->slot >= kLayerMatrices))
        return fail(*model, "there is no matrix %d in layer %d", from->slot, from->layer);
    int rows, cols;
    matrix_shape(model->shape, from->slot, rows, cols);
    if (from->rows != rows || from->cols != cols)
        return fail(*model, "matrix %d is %d by %d and should be %d by %d", from->slot, from->rows, from->cols, rows, cols);
    Matrix& to = from->slot == kEmbedding ? model->embedding
                 : from->slot == kHead    ? model->head
                                          : model->layers[from->layer].matrix[from->slot];
    return pack(*model, *from, to);
}

METRALE_API int metrale_set_vector(Model* model, int32_t layer, int32_t slot, const float* from, int32_t count) {
    if (slot < 0 || slot >= kVectorSlots || layer < -1 || layer >= model->shape.layers || (layer < 0) != (slot >= kLayerVectors))
        return fail(*model, "there is no vector %d in layer %d", slot, layer);
    if (count != vector_size(model->shape, slot))
        return fail(*model, "vector %d has %d entries and should have %d", slot, count, vector_size(model->shape, slot));
    auto* to = static_cast<float*>(model->arena.take(static_cast<size_t>(count) * 4));
    if (to == nullptr) return fail(*model, "there is no memory for a vector of %d entries", count);
    memcpy(to, from, static_cast<size_t>(count) * 4);
    (layer < 0 ? model->final_norm : model->layers[layer].vector[slot]) = to;
    return 0;
}

METRALE_API int metrale_set_cache(Model* model, int32_t layer, void* keys, void* values) {
    if (layer < 0 || layer >= model->shape.layers) return fail(*model, "there is no layer %d", layer);
    model->layers[layer].keys = keys;
    model->layers[layer].values = values;
    return 0;
}

METRALE_API int metrale_step(Model* model, const StepArgs* args) {
    if (check_ready(*model) || check_step(*model, *args) || make_room(*model, args->rows, args->logit_rows)) return 1;
    locate_rows(*model, *args);
    model->variant->step(*model, *args);
    return 0;
}

METRALE_API int metrale_embed(Model* model, const int64_t* tokens, int64_t count, float* out) {
    if (check_ready(*model) || check_tokens(*model, tokens, count)) return 1;
    model->variant->embed(*model, tokens, count, out);
    return 0;
}

METRALE_API int metrale_head(Model* model, const float* hidden, int64_t rows, float* logits) {
    if (!model->head_matrix().quants) return fail(*model, "the model has no head");
    if (make_room(*model, rows, rows)) return 1;
    model->variant->head(*model, hidden, rows, logits);
    return 0;
}
