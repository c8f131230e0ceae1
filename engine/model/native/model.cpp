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
    if (!model->borrows_pool) delete model->pool;
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

METRALE_API int metrale_set_cache(Model* model, int32_t layer, void* keys, void* values, int64_t block_stride) {
    if (layer < 0 || layer >= model->shape.layers) return fail(*model, "there is no layer %d", layer);
    const ShapeArgs& s = model->shape;
    const int64_t block = static_cast<int64_t>(s.kv_heads) * s.head_dim * s.block_size;
    if (block_stride < block)
        return fail(*model, "blocks of %lld values cannot lie %lld apart", static_cast<long long>(block), static_cast<long long>(block_stride));
    model->layers[layer].keys = keys;
    model->layers[layer].values = values;
    model->layers[layer].block_stride = block_stride;
    return 0;
}

// From now on the threads of `owner`, which outlives `model`, do its work: two sets would keep each other off the cores.
METRALE_API int metrale_borrow_threads(Model* model, const Model* owner) {
    if (model->scratch.memory != nullptr || model->borrows_pool) return fail(*model, "threads are borrowed once, before any step");
    delete model->pool;
    model->pool = owner->pool;
    model->borrows_pool = true;
    return 0;
}

METRALE_API int metrale_step(Model* model, const StepArgs* args) {
    if (check_ready(*model) || check_step(*model, *args) || make_room(*model, args->rows, args->logit_rows)) return 1;
    locate_rows(*model, *args);
    // Whether workers help is learnt from the steps of their owner alone: a draft's are too short to judge by.
    if (!model->borrows_pool) model->pool->begin_step();
    model->variant->step(*model, *args);
    if (!model->borrows_pool) model->pool->end_step();
    return 0;
}

// The keys and values that a step of one layer would leave behind for rows that are given.
METRALE_API int metrale_keep_keys(Model* model, const StepArgs* args) {
    if (check_ready(*model) || check_step(*model, *args) || make_room(*model, args->rows, 0)) return 1;
    locate_rows(*model, *args);
    model->variant->keep_keys(*model, *args);
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

// One token per plan.
METRALE_API int metrale_draw(Model* model, const DrawPlan* plans, int64_t count, int64_t* tokens) {
    constexpr int64_t kMostChunks = 0xffff;
    if (count > kMostChunks) return fail(*model, "at most %d rows are drawn at once", static_cast<int>(kMostChunks));
    for (int64_t i = 0; i < count; ++i)
        if (!(plans[i].temperature > 0.0)) return fail(*model, "row %d has no temperature to draw at", static_cast<int>(i));
    model->variant->draw(*model, plans, count, tokens);
    for (int64_t i = 0; i < count; ++i)
        if (tokens[i] < 0) return fail(*model, "row %d holds no logit that is a number", static_cast<int>(i));
    return 0;
}
