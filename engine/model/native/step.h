// One whole step, embedding to argmax, run by all threads together with a barrier wherever rows change hands.
#pragma once
#include <time.h>

#include "attention.h"
#include "linear.h"

namespace {

constexpr int64_t kOwnRows = 4;  // up to this many rows every thread quantises for itself: cheaper than a barrier

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// The token embedding of one row, dequantised.
inline void embed_row(const Matrix& w, int64_t token, float* out) {
    const int64_t tile = token / kTile, lane = token % kTile;
    for (int b = 0; b < w.blocks; ++b) {
        const int64_t block = tile * w.blocks + b;
        const uint8_t* q = w.quants + block * w.quant_bytes() + lane * 4;
        alignas(64) float scale[16], least[16];
        store(scale, load_half(w.scales + block * kTile));
        if (w.type == kQ4_1) store(least, load_half(w.mins + block * kTile));
        for (int k = 0; k < kBlock; ++k) {
            float* to = out + b * kBlock + k;
            const int part = w.type == kQ8_0 ? k / 4 : (k % 16) / 4;
            const int byte = q[part * 64 + k % 4], nibble = k < 16 ? byte & 15 : byte >> 4;
            if (w.type == kQ8_0) *to = scale[lane] * static_cast<float>(byte - 128);
            if (w.type == kQ4_0) *to = scale[lane] * static_cast<float>(nibble - 8);
            if (w.type == kQ4_1) *to = scale[lane] * static_cast<float>(nibble) + least[lane];
        }
    }
}

template <class Cache>
class Step {
  public:
    Step(Model& model, const StepArgs& args, int thread)
        : model_(model), args_(args), shape_(model.shape), s_(model.scratch), pool_(*model.pool), thread_(thread) {}

    void run() {
        last_ns_ = now_ns();
        embed();
        meet(kPartEmbed);
        int tap = 0;
        for (int i = 0; i < args_.layers_run; ++i) {
            const int id = args_.layer_ids[i];
            attention_half(model_.layers[id]);
            ffn_half(model_.layers[id]);
            while (tap < args_.taps && args_.tap_layers[tap] < id) ++tap;
            if (tap < args_.taps && args_.tap_layers[tap] == id) keep_hidden(tap++);
        }
        if (args_.logit_rows > 0) head();
    }

  private:
    Range mine(int64_t count) const { return share(count, pool_.threads(), thread_); }

    void lap(Part part) {
        if (thread_ != 0 || args_.part_ns == nullptr) return;
        const int64_t now = now_ns();
        args_.part_ns[part] += now - last_ns_;
        last_ns_ = now;
    }
    void meet(Part part) {
        lap(part);
        pool_.barrier();
        lap(kPartBarrier);
    }

    void embed() {
        const Range rows = mine(args_.rows);
        for (int64_t row = rows.begin; row < rows.end; ++row)
            embed_row(model_.embedding, args_.tokens[row], s_.x + row * shape_.hidden);
    }

    // Quantises `count` rows with fill(activations, row), each thread for itself or all together.
    template <class Fill>
    const Activations& quantised(int64_t count, int cols, Part part, Fill&& fill) {
        const bool alone = count <= kOwnRows || pool_.threads() == 1;
        Activations& to = alone && count <= kOwnRows ? s_.own[thread_] : s_.shared;
        // Every thread sets the same two numbers; they only differ from stage to stage, with a barrier between.
        view_ = to;
        view_.cols = cols;
        view_.blocks = cols / kBlock;
        const Range rows = alone ? Range{0, count} : mine(count);
        for (int64_t row = rows.begin; row < rows.end; ++row) fill(view_, row);
        if (!alone) meet(part);
        lap(part);
        return view_;
    }

    void attention_half(const Layer& layer) {
        const int64_t hidden = shape_.hidden;
        const Activations& normed = quantised(args_.rows, shape_.hidden, kPartNorm, [&](Activations& to, int64_t row) {
            quantise_normed(to, row, s_.x + row * hidden, layer.vector[kAttnNorm], shape_.rms_eps);
        });
        project_qkv(layer, normed);
        meet(kPartQkv);
        rotate_and_write(layer);
        if (thread_ == 0) pool_.restart_counter();
        meet(kPartRope);
        attention(layer);
        meet(kPartAttention);
        const int64_t width = model_.q_size();
        const Activations& mixed = quantised(args_.rows, model_.q_size(), kPartNorm, [&](Activations& to, int64_t row) {
            quantise_plain(to, row, s_.attn + row * width);
        });
        const Matrix& out = layer.matrix[kWo];
        multiply_onto(out, mixed, args_.rows, mine(out.tiles), layer.vector[kBo], s_.x, hidden);
        meet(kPartOut);
    }

    void ffn_half(const Layer& layer) {
        const int64_t hidden = shape_.hidden, width = shape_.ffn;
        const Activations& normed = quantised(args_.rows, shape_.hidden, kPartNorm, [&](Activations& to, int64_t row) {
            quantise_normed(to, row, s_.x + row * hidden, layer.vector[kFfnNorm], shape_.rms_eps);
        });
        multiply_gated(layer, normed, args_.rows, mine(layer.matrix[kWgate].tiles), s_.ffn, width);
        meet(kPartGateUp);
        const Activations& gated = quantised(args_.rows, shape_.ffn, kPartNorm, [&](Activations& to, int64_t row) {
            quantise_plain(to, row, s_.ffn + row * width);
        });
        const Matrix& down = layer.matrix[kWdown];
        multiply_onto(down, gated, args_.rows, mine(down.tiles), layer.vector[kBdown], s_.x, hidden);
        meet(kPartDown);
    }

    void project_qkv(const Layer& layer, const Activations& x) {
        const int64_t offsets[3] = {0, model_.q_size(), model_.q_size() + model_.kv_size()};
        int64_t all = 0;
        for (int i = 0; i < 3; ++i) all += layer.matrix[kWq + i].tiles;
        const Range tiles = mine(all);
        int64_t before = 0;
        for (int i = 0; i < 3; ++i) {
            const Matrix& w = layer.matrix[kWq + i];
            const int64_t from = tiles.begin > before ? tiles.begin - before : 0;
            const int64_t to = tiles.end - before < w.tiles ? tiles.end - before : w.tiles;
            if (from < to)
                multiply_into(w, x, args_.rows, {from, to}, layer.vector[kBq + i], s_.qkv + offsets[i], model_.qkv_size());
            before += w.tiles;
        }
    }

    void rotate_and_write(const Layer& layer) {
        const int64_t heads = shape_.heads + 2 * shape_.kv_heads;
        const Range units = mine(args_.rows * heads);
        for (int64_t unit = units.begin; unit < units.end; ++unit) {
            const int64_t row = unit / heads;
            const int head = static_cast<int>(unit % heads);
            rotate_one(layer, row, head, s_.qkv + row * model_.qkv_size() + static_cast<int64_t>(head) * shape_.head_dim);
        }
    }

    void rotate_one(const Layer& layer, int64_t row, int head, float* x) {
        const int position = s_.position[row], kv_head = head - shape_.heads;
        const int64_t at = static_cast<int64_t>(position) * (shape_.head_dim / 2);
        const bool is_query = kv_head < 0, is_key = !is_query && kv_head < shape_.kv_heads;
        if (is_query || is_key) {
            const float* norm = layer.vector[is_query ? kQNorm : kKNorm];
            if (norm != nullptr) norm_head(x, norm, shape_.head_dim, shape_.rms_eps);
            rotate(x, model_.cos + at, model_.sin + at, shape_.head_dim, is_query ? shape_.attention_scale : 1.0f);
        }
        if (is_query) return;
        const int block = table_of(s_.segment_of[row])[position / shape_.block_size];
        const int slot = position % shape_.block_size;
        if (is_key) write_key<Cache>(model_, layer, block, slot, kv_head, x);
        if (!is_key) write_value<Cache>(model_, layer, block, slot, kv_head - shape_.kv_heads, x);
    }

    const int32_t* table_of(int segment) const {
        return args_.block_tables + static_cast<int64_t>(segment) * args_.table_width;
    }

    // Few queries are dealt out evenly, many in small portions to whoever is free.
    void attention(const Layer& layer) {
        const int64_t all = static_cast<int64_t>(args_.rows) * shape_.heads;
        if (all <= 2 * kQueryTile * pool_.threads()) {
            const Range part = mine(all);
            attend_range(layer, part.begin, part.end);
            return;
        }
        for (;;) {
            const int64_t from = pool_.next_item() * kQueryTile;
            if (from >= all) return;
            attend_range(layer, from, from + kQueryTile < all ? from + kQueryTile : all);
        }
    }

    // Queries are numbered by segment, then KV head, then row, then head of the group.
    void attend_range(const Layer& layer, int64_t from, int64_t to) {
        const int64_t group = shape_.heads / shape_.kv_heads;
        while (from < to) {
            const int segment = s_.segment_of[from / shape_.heads];
            const int64_t first_row = args_.row_offsets[segment], rows = args_.row_offsets[segment + 1] - first_row;
            const int64_t inside = from - first_row * shape_.heads, head = inside / (rows * group);
            int64_t at = inside % (rows * group);
            Query queries[kQueryTile];
            int count = 0;
            for (; count < kQueryTile && from < to && at < rows * group; ++count, ++from, ++at) {
                const int64_t row = first_row + at / group, column = (head * group + at % group) * shape_.head_dim;
                queries[count] = {s_.qkv + row * model_.qkv_size() + column, s_.attn + row * model_.q_size() + column,
                                  s_.position[row] + 1};
            }
            attend_some<Cache>(model_, layer, table_of(segment), static_cast<int>(head), queries, count);
        }
    }

    void keep_hidden(int tap) {
        const Range rows = mine(args_.rows);
        for (int64_t row = rows.begin; row < rows.end; ++row)
            __builtin_memcpy(args_.hidden + (row * args_.taps + tap) * shape_.hidden, s_.x + row * shape_.hidden,
                             static_cast<size_t>(shape_.hidden) * 4);
    }

    void head() {
        const int64_t count = args_.logit_rows, hidden = shape_.hidden, vocab = shape_.vocab;
        const Activations& normed = quantised(count, shape_.hidden, kPartNorm, [&](Activations& to, int64_t i) {
            quantise_normed(to, i, s_.x + args_.logit_row_ids[i] * hidden, model_.final_norm, shape_.rms_eps);
        });
        Best* best = s_.best + thread_ * count;
        for (int64_t i = 0; i < count; ++i) best[i] = {-__builtin_inff(), 0};
        const Matrix& w = model_.head_matrix();
        multiply(w, normed, count, mine(w.tiles), [&](int64_t tile, int64_t row, int n, float(*out)[kTile]) {
            const int width = tile_width(w, tile);
            for (int m = 0; m < n; ++m) {
                improve(best[row + m], out[m], tile * kTile, width);
                if (args_.logits != nullptr)
                    __builtin_memcpy(args_.logits + (row + m) * vocab + tile * kTile, out[m], static_cast<size_t>(width) * 4);
            }
        });
        meet(kPartHead);
        if (thread_ == 0) merge_best(count);
    }

    static void improve(Best& best, const float* out, int64_t token, int width) {
        for (int i = 0; i < width; ++i)
            if (out[i] > best.value) best = {out[i], token + i};
    }

    void merge_best(int64_t count) {  // threads own rising ranges of tokens, so the first of equals has the least id
        for (int64_t i = 0; i < count; ++i) {
            Best winner = s_.best[i];
            for (int t = 1; t < pool_.threads(); ++t) {
                const Best& other = s_.best[t * count + i];
                if (other.value > winner.value) winner = other;
            }
            args_.argmax[i] = winner.token;
        }
    }

    Model& model_;
    const StepArgs& args_;
    const ShapeArgs& shape_;
    Scratch& s_;
    Pool& pool_;
    const int thread_;
    Activations view_;
    int64_t last_ns_ = 0;
};

}  // namespace
