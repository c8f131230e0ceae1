// Compiled once per instruction-set level: METRALE_VARIANT names it, METRALE_TITLE is shown to the user.
#if defined(METRALE_AVX512)
#include "lanes_avx512.h"
#elif defined(METRALE_AVX2)
#include "lanes_avx2.h"
#else
#include "lanes_portable.h"
#endif
#include "draw.h"
#include "step.h"

namespace {

void run_step(Model& model, const StepArgs& args) {
    if (model.shape.kv_type == kKvF32) Step<CacheF32>(model, args).run();
    if (model.shape.kv_type == kKvF16) Step<CacheF16>(model, args).run();
    if (model.shape.kv_type == kKvBF16) Step<CacheBF16>(model, args).run();
}

void run_keep_keys(Model& model, const StepArgs& args) {
    if (model.shape.kv_type == kKvF32) Step<CacheF32>(model, args).keep_keys();
    if (model.shape.kv_type == kKvF16) Step<CacheF16>(model, args).keep_keys();
    if (model.shape.kv_type == kKvBF16) Step<CacheBF16>(model, args).keep_keys();
}

void run_embed(const Model& model, const int64_t* tokens, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) embed_row(model.embedding, tokens[i], out + i * model.shape.hidden);
}

// Logits of rows that are already normed.
void run_head(Model& model, const float* hidden, int64_t rows, float* logits) {
    Activations x = model.scratch.shared;
    x.blocks = model.shape.hidden / kBlock;
    const int portions = rows <= kOwnRows ? 1 : 4 * model.pool->threads();
    model.pool->each(portions, [&](int portion, int) {
        const Range part = share(rows, portions, portion);
        for (int64_t row = part.begin; row < part.end; ++row) quantise_plain(x, row, hidden + row * model.shape.hidden);
    });
    const Matrix& w = model.head_matrix();
    const int chunks = chunks_for(w.tiles, rows, model.pool->threads());
    model.pool->each(chunks, [&](int chunk, int) {
        multiply_into(w, x, rows, share(w.tiles, chunks, chunk), nullptr, logits, model.shape.vocab);
    });
}

void run_norm(const float* x, int count, float eps, float* to) {
    const F scale = splat(inverse_rms(x, count, eps));
    for (int i = 0; i < count; i += kTile) store(to + i, load(x + i) * scale);
}

float run_exponentials(const float* x, int64_t count, float top) {
    F total = splat(0.0f);
    const int64_t whole = count / kTile * kTile;
    for (int64_t i = 0; i < whole; i += kTile) total = total + exponential(load(x + i) - splat(top));
    float rest = 0.0f;
    for (int64_t i = whole; i < count; ++i) rest += __builtin_expf(x[i] - top);
    return sum(total) + rest;
}

void run_draw(Model& model, const DrawPlan* plans, int64_t count, int64_t* tokens) {
    model.pool->each(static_cast<int>(count), [&](int row, int) { tokens[row] = Draw(plans[row], model.shape.vocab).token(); });
}

}  // namespace

extern const Variant METRALE_VARIANT;
const Variant METRALE_VARIANT = {METRALE_TITLE, run_step, run_keep_keys, run_embed, run_head, run_norm, run_exponentials, run_draw};
