// Every number that arrives from outside is checked here, so that the arithmetic never has to.
#include "tensors.h"

namespace {

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

}  // namespace

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
