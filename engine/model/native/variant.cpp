// Compiled once per instruction-set level: METRALE_VARIANT names it, METRALE_TITLE is shown to the user.
#if defined(METRALE_AVX512)
#include "lanes_avx512.h"
#elif defined(METRALE_AVX2)
#include "lanes_avx2.h"
#else
#include "lanes_portable.h"
#endif
#include "step.h"

namespace {

void run_step(Model& model, const StepArgs& args, int thread) {
    if (model.shape.kv_type == kKvF32) Step<CacheF32>(model, args, thread).run();
    if (model.shape.kv_type == kKvF16) Step<CacheF16>(model, args, thread).run();
    if (model.shape.kv_type == kKvBF16) Step<CacheBF16>(model, args, thread).run();
}

void run_embed(const Model& model, const int64_t* tokens, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) embed_row(model.embedding, tokens[i], out + i * model.shape.hidden);
}

// Logits of rows that are already normed; every thread fills its share of the vocabulary.
void run_head(Model& model, const float* hidden, int64_t rows, float* logits, int thread) {
    const int64_t width = model.shape.hidden;
    Activations x = model.scratch.shared;
    x.cols = model.shape.hidden;
    x.blocks = x.cols / kBlock;
    const Range mine = share(rows, model.pool->threads(), thread);
    for (int64_t row = mine.begin; row < mine.end; ++row) quantise_plain(x, row, hidden + row * width);
    model.pool->barrier();
    const Matrix& w = model.head_matrix();
    multiply_into(w, x, rows, share(w.tiles, model.pool->threads(), thread), nullptr, logits, model.shape.vocab);
}

}  // namespace

extern const Variant METRALE_VARIANT;
const Variant METRALE_VARIANT = {METRALE_TITLE, run_step, run_embed, run_head};
