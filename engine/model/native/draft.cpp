// All drafts of a recurrent draft head in one call: between two of its small steps nothing goes back to Python.
#include <string.h>

#include "tensors.h"

METRALE_API int metrale_step(Model* model, const StepArgs* args);
METRALE_API int metrale_keep_keys(Model* model, const StepArgs* args);
METRALE_API int metrale_head(Model* model, const float* hidden, int64_t rows, float* logits);

namespace {

constexpr int kFewRows = 4;  // so many more rows cost less than to wait for the other threads once more
constexpr int64_t kFusedRows = 128;  // whose inputs stay in the second-level cache until they are multiplied

int pass_on(Model& to, const Model& from) { return fail(to, "%s", from.error); }

// Everything of one row that goes into the matrix, normed.
void fuse_row(const Model& head, const Model& target, const DraftArgs& a, int64_t row, float* to) {
    const int64_t hidden = head.shape.hidden, taps = a.taps;
    for (int64_t tap = 0; tap < taps; ++tap)
        head.variant->norm(a.tap_rows + (row * taps + tap) * hidden, head.shape.hidden, head.shape.rms_eps, to + tap * hidden);
    float* embedded = to + taps * hidden;
    target.variant->embed(target, a.step.tokens + row, 1, embedded);
    head.variant->norm(embedded, head.shape.hidden, head.shape.rms_eps, embedded);
}

// Inputs of the block for the absorbed rows: what the target computed there and the token that followed.
int fuse(Model& head, Model& target, Model& first, const DraftArgs& a) {
    if (check_ready(target) || check_tokens(target, a.step.tokens, a.step.rows)) return pass_on(head, target);
    const int64_t hidden = head.shape.hidden, width = (a.taps + 1) * hidden;
    for (int64_t begin = 0; begin < a.step.rows; begin += kFusedRows) {
        const int64_t count = a.step.rows - begin < kFusedRows ? a.step.rows - begin : kFusedRows;
        const int portions = count <= kFewRows ? 1 : 4 * head.pool->threads();
        head.pool->each(portions, [&](int portion, int) {
            const Range rows = share(count, portions, portion);
            for (int64_t row = rows.begin; row < rows.end; ++row) fuse_row(head, target, a, begin + row, a.fused + row * width);
        });
        if (metrale_head(&first, a.fused, count, a.inputs + begin * hidden)) return pass_on(head, first);
    }
    return 0;
}

// From the inputs of the absorbed rows to those of one row per segment, its newest.
void narrow(const Model& head, DraftArgs& a) {
    const int64_t hidden = head.shape.hidden;
    for (int s = 0; s < a.step.segments; ++s) {  // no newest row lies before its segment's number
        memmove(a.inputs + s * hidden, a.inputs + a.newest[s] * hidden, static_cast<size_t>(hidden) * 4);
        a.starts[s] += a.offsets[s + 1] - a.offsets[s] - 1;
    }
    for (int s = 0; s < a.step.segments; ++s) {
        a.newest[s] = s;
        a.offsets[s + 1] = s + 1;
    }
    a.step.rows = a.step.segments;
}

// Absorbs the rows and runs the block on the newest of each segment, if drafts are wanted. Of the others only keys and
// values are ever read, so nothing else is computed: of 770 rows 3.7 ms instead of 16.7, of 3 rows 0.10 instead of 0.13.
int absorb(Model& head, DraftArgs& a) {
    const bool only_newest = a.drafts > 0 && a.step.rows == a.step.segments;
    if (!only_newest && metrale_keep_keys(&head, &a.step)) return 1;
    if (a.drafts < 1) return 0;
    narrow(head, a);
    if (metrale_step(&head, &a.step)) return 1;
    for (int s = 0; s < a.step.segments; ++s) ++a.starts[s];
    return 0;
}

// One more draft per segment, from the block's own output and the token drafted from it.
int again(Model& head, Model& matrix, DraftArgs& a) {
    const int64_t hidden = head.shape.hidden, count = a.step.segments;
    for (int64_t s = 0; s < count; ++s)
        head.variant->norm(a.step.hidden + s * hidden, head.shape.hidden, head.shape.rms_eps, a.fused + s * hidden);
    if (metrale_head(&matrix, a.fused, count, a.inputs)) return pass_on(head, matrix);
    for (int64_t s = 0; s < count; ++s)
        for (int64_t i = 0; i < hidden; ++i) a.inputs[s * hidden + i] += a.token_part[a.step.argmax[s] * hidden + i];
    if (metrale_step(&head, &a.step)) return 1;
    for (int64_t s = 0; s < count; ++s) ++a.starts[s];
    return 0;
}

// Books a step's drafts; says whether one of them is sure enough to go on from.
bool book(const Model& head, const DraftArgs& a, int draft) {
    const int count = a.step.segments, vocab = head.shape.vocab;
    bool sure = false;
    for (int s = 0; s < count; ++s) {
        const int64_t token = a.step.argmax[s];
        const float* logits = a.step.logits + static_cast<int64_t>(s) * vocab;
        const float chance = 1.0f / head.variant->exponentials(logits, vocab, logits[token]);
        a.drafted[draft * count + s] = token;
        a.chances[draft * count + s] = chance;
        sure |= chance >= a.chance_min;
    }
    return sure;
}

}  // namespace

// Absorbs rows, then drafts up to `drafts` tokens per segment, until none is sure enough. `head` is a model of one layer
// whose rows are given, `first` and `next` are the matrices that make them, `target` has the embeddings. Leaves in
// `made` how many drafts there are.
METRALE_API int metrale_draft(Model* head, Model* target, Model* first, Model* next, DraftArgs* args) {
    DraftArgs& a = *args;
    a.made = 0;
    if (target->shape.hidden != head->shape.hidden || first->shape.vocab != head->shape.hidden ||
        next->shape.vocab != head->shape.hidden || next->shape.hidden != head->shape.hidden ||
        first->shape.hidden != (a.taps + 1) * head->shape.hidden)
        return fail(*head, "the matrices of the draft head do not fit %d hidden values and %d taps", head->shape.hidden, a.taps);
    if (fuse(*head, *target, *first, a) || absorb(*head, a)) return 1;
    if (a.drafts < 1) return 0;
    while (book(*head, a, a.made++) && a.made < a.drafts)
        if (again(*head, *next, a)) return 1;
    return 0;
}
