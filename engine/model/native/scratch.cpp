// One allocation for everything that a step keeps between its parts, grown when a step has more rows than any before.
#include <stdlib.h>

#include "tensors.h"

namespace {

constexpr int64_t kOwnRoom = 4;

class Layout {  // measures on the first pass (base null), hands out pointers on the second
  public:
    explicit Layout(char* base) : base_(base) {}
    template <class T>
    T* take(int64_t count) {
        char* at = base_ ? base_ + used_ : nullptr;
        used_ += (static_cast<size_t>(count) * sizeof(T) + 127) / 128 * 128;
        return reinterpret_cast<T*>(at);
    }
    size_t used() const { return used_; }

  private:
    char* base_;
    size_t used_ = 0;
};

void lay_out_activations(Layout& layout, const Model& model, Activations& a, int64_t rows, int64_t cols) {
    a.wide_above = model.shape.wide_above;
    a.data = layout.take<QuantBlock>((rows + kRowGroup - 1) / kRowGroup * kRowGroup * (cols / kBlock));
}

void lay_out(Layout& layout, const Model& model, Scratch& s, int64_t rows, int64_t logit_rows) {
    const ShapeArgs& shape = model.shape;
    int64_t widest = shape.hidden > shape.ffn ? shape.hidden : shape.ffn;
    if (model.q_size() > widest) widest = model.q_size();
    s.x = layout.take<float>(rows * shape.hidden);
    s.qkv = layout.take<float>(rows * model.qkv_size());
    s.attn = layout.take<float>(rows * model.q_size());
    s.ffn = layout.take<float>(rows * shape.ffn);
    s.segment_of = layout.take<int32_t>(rows);
    s.position = layout.take<int32_t>(rows);
    s.best = layout.take<Best>(kMaxHeadChunks * logit_rows);
    lay_out_activations(layout, model, s.shared, rows, widest);
    for (int t = 0; t < model.pool->threads(); ++t) lay_out_activations(layout, model, s.own[t], kOwnRoom, widest);
}

int64_t rounded(int64_t wanted, int64_t had) {
    if (wanted <= had) return had;
    int64_t size = 16;
    while (size < wanted) size *= 2;
    return size;
}

}  // namespace

int make_room(Model& model, int64_t rows, int64_t logit_rows) {
    Scratch& s = model.scratch;
    if (s.memory && rows <= s.rows && logit_rows <= s.logit_rows) return 0;
    const int64_t new_rows = rounded(rows > logit_rows ? rows : logit_rows, s.rows), new_logits = rounded(logit_rows, s.logit_rows);
    Layout measure(nullptr);
    Scratch next;
    lay_out(measure, model, next, new_rows, new_logits);
    void* memory = aligned_alloc(128, measure.used());
    if (memory == nullptr) return fail(model, "there is no memory for a step of %lld rows", static_cast<long long>(rows));
    free(s.memory);
    Layout real(static_cast<char*>(memory));
    lay_out(real, model, next, new_rows, new_logits);
    next.memory = memory;
    next.rows = static_cast<int32_t>(new_rows);
    next.logit_rows = static_cast<int32_t>(new_logits);
    s = next;
    return 0;
}
