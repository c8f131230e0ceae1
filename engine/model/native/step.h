// One whole step, embedding to argmax: the caller's thread goes through it, the others help with each loop.
#pragma once
#include <time.h>

#include <numeric>

#include "attention.h"
#include "embedding.h"
#include "linear.h"

namespace {

constexpr int64_t kOwnRows = 4;  // up to this many rows every thread quantises for itself: cheaper than to wait

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// How many chunks a loop over tiles is cut into: two a thread once they outweigh taking one (some 50 ns), so that a slow
// thread costs little. Not more, for only inside a chunk is the next tile asked for ahead of use. Default model, two
// threads, ratio to eight a thread: a verify of 8 rows 0.87, 13 rows 0.86, 512 rows 0.99.
inline int chunks_for(int64_t tiles, int64_t rows, int threads) {
    const int64_t wanted = static_cast<int64_t>(threads) * (tiles * rows < 96 ? 1 : 2);
    const int64_t most = tiles < kMaxHeadChunks ? tiles : kMaxHeadChunks;
    return static_cast<int>(wanted < most ? wanted : most);
}

template <class Cache>
class Step {
  public:
    Step(Model& model, const StepArgs& args)
        : model_(model), args_(args), shape_(model.shape), s_(model.scratch), pool_(*model.pool) {}

    void run() {
        last_ns_ = now_ns();
        if (args_.inputs != nullptr) {
            __builtin_memcpy(s_.x, args_.inputs, static_cast<size_t>(args_.rows) * static_cast<size_t>(shape_.hidden) * 4);
        } else {
            for (int64_t row = 0; row < args_.rows; ++row)
                embed_row(model_.embedding, args_.tokens[row], s_.x + row * shape_.hidden);
        }
        lap(kPartEmbed);
        plan_attention();
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

    // Keys and values of the first layer for rows that are given, and nothing else: what a draft head needs of rows that
    // it does not draft from.
    void keep_keys() {
        const Layer& layer = model_.layers[0];
        const int64_t before = layer.matrix[kWq].tiles, tiles = layer.matrix[kWk].tiles + layer.matrix[kWv].tiles;
        over_tiles(
            tiles, args_.rows, shape_.hidden,
            [&](Activations& to, int64_t row) {
                quantise_normed(to, row, args_.inputs + row * shape_.hidden, layer.vector[kAttnNorm], shape_.rms_eps);
            },
            [&](const Activations& x, Range part, int) { project_qkv(layer, x, {before + part.begin, before + part.end}); });
        rotate_and_write(layer, shape_.heads);
    }

  private:
    // Books the time since the last lap under `part`, less what was spent waiting for other threads.
    void lap(Part part) {
        if (args_.part_ns == nullptr) return;
        const int64_t now = now_ns(), waited = pool_.waited_ns();
        args_.part_ns[part] += (now - last_ns_) - (waited - last_waited_);
        args_.part_ns[kPartWait] += waited - last_waited_;
        last_ns_ = now;
        last_waited_ = waited;
    }

    // Runs body(activations, tiles) for all tiles; the `count` activation rows are quantised by fill(activations, row),
    // by every thread for itself when they are few, else by all together first.
    template <class Fill, class Body>
    void over_tiles(int64_t tiles, int64_t count, int cols, Fill&& fill, Body&& body) {
        const bool alone = count <= kOwnRows;
        const int64_t stage = ++s_.stage;
        if (!alone) {
            Activations shared = view(s_.shared, cols);
            const int most = 2 * pool_.threads(), portions = count < most ? static_cast<int>(count) : most;
            pool_.each(portions, [&](int portion, int) {
                const Range rows = share(count, portions, portion);
                for (int64_t row = rows.begin; row < rows.end; ++row) fill(shared, row);
            });
            lap(kPartNorm);
        }
        const int chunks = chunks_for(tiles, count, pool_.threads());
        pool_.each(chunks, [&](int chunk, int thread) {
            Activations x = view(alone ? s_.own[thread] : s_.shared, cols);
            if (alone && s_.own_stage[thread] != stage) {
                for (int64_t row = 0; row < count; ++row) fill(x, row);
                s_.own_stage[thread] = stage;
            }
            body(x, share(tiles, chunks, chunk), chunk);
        });
    }

    static Activations view(const Activations& memory, int cols) {
        Activations x = memory;
        x.blocks = cols / kBlock;
        return x;
    }

    void attention_half(const Layer& layer) {
        const int64_t hidden = shape_.hidden, width = model_.q_size();
        const int64_t tiles = layer.matrix[kWq].tiles + layer.matrix[kWk].tiles + layer.matrix[kWv].tiles;
        over_tiles(
            tiles, args_.rows, shape_.hidden,
            [&](Activations& to, int64_t row) {
                quantise_normed(to, row, s_.x + row * hidden, layer.vector[kAttnNorm], shape_.rms_eps);
            },
            [&](const Activations& x, Range part, int) { project_qkv(layer, x, part); });
        lap(kPartQkv);
        rotate_and_write(layer);
        lap(kPartRope);
        attention(layer);
        lap(kPartAttention);
        const Matrix& out = layer.matrix[kWo];
        over_tiles(
            out.tiles, args_.rows, model_.q_size(),
            [&](Activations& to, int64_t row) { quantise_plain(to, row, s_.attn + row * width); },
            [&](const Activations& x, Range part, int) {
                multiply_onto(out, x, args_.rows, part, layer.vector[kBo], s_.x, hidden);
            });
        lap(kPartOut);
    }

    void ffn_half(const Layer& layer) {
        const int64_t hidden = shape_.hidden, width = shape_.ffn;
        over_tiles(
            layer.matrix[kWgate].tiles, args_.rows, shape_.hidden,
            [&](Activations& to, int64_t row) {
                quantise_normed(to, row, s_.x + row * hidden, layer.vector[kFfnNorm], shape_.rms_eps);
            },
            [&](const Activations& x, Range part, int) { multiply_gated(layer, x, args_.rows, part, s_.ffn, width); });
        lap(kPartGateUp);
        const Matrix& down = layer.matrix[kWdown];
        over_tiles(
            down.tiles, args_.rows, shape_.ffn,
            [&](Activations& to, int64_t row) { quantise_plain(to, row, s_.ffn + row * width); },
            [&](const Activations& x, Range part, int) {
                multiply_onto(down, x, args_.rows, part, layer.vector[kBdown], s_.x, hidden);
            });
        lap(kPartDown);
    }

    void project_qkv(const Layer& layer, const Activations& x, Range tiles) {
        const int64_t offsets[3] = {0, model_.q_size(), model_.q_size() + model_.kv_size()};
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

    // Of the heads from `first` on: queries, then keys, then values.
    void rotate_and_write(const Layer& layer, int first = 0) {
        const int64_t heads = shape_.heads + 2 * shape_.kv_heads;
        const int portions = args_.rows <= kOwnRows ? 1 : 2 * pool_.threads();
        pool_.each(portions, [&](int portion, int) {
            const Range rows = share(args_.rows, portions, portion);
            for (int64_t row = rows.begin; row < rows.end; ++row)
                for (int head = first; head < heads; ++head)
                    rotate_one(layer, row, head, s_.qkv + row * model_.qkv_size() + static_cast<int64_t>(head) * shape_.head_dim);
        });
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

    // Queries are numbered by segment, then KV head, then row, then head of the group; a portion is a run of them.
    void attention(const Layer& layer) {
        pool_.each(portions_, [&](int portion, int) { attend_range(layer, cuts_[portion], cuts_[portion + 1]); });
    }

    // Cuts the queries into portions of like work, between those that share registers.
    void plan_attention() {
        const int64_t group = shape_.heads / shape_.kv_heads, all = static_cast<int64_t>(args_.rows) * shape_.heads;
        const int64_t wanted = is_short(all) ? 1 : wanted_portions(all);
        int64_t work = 0, done = 0, query = 0;
        for (int row = 0; row < args_.rows; ++row) work += shape_.heads * (s_.position[row] + 1);
        portions_ = 0;
        for (int segment = 0; segment < args_.segments; ++segment) {
            const int64_t first_row = args_.row_offsets[segment], rows = args_.row_offsets[segment + 1] - first_row;
            for (int head = 0; head < shape_.kv_heads; ++head)
                for (int64_t at = 0; at < rows * group; at += kQueryTile) {
                    const int64_t count = rows * group - at < kQueryTile ? rows * group - at : kQueryTile;
                    const int64_t tile = count * (s_.position[first_row + at / group] + 1);
                    if (portions_ == 0 || (done + tile / 2) * wanted >= work * portions_) cuts_[portions_++] = query;
                    done += tile;
                    query += count;
                }
        }
        cuts_[portions_] = all;
    }

    // Every head in equal parts for all threads, small enough to share a chunk of keys and to make up for a slow thread.
    int64_t wanted_portions(int64_t queries) const {
        const int64_t threads = pool_.threads();
        int64_t portions = std::lcm<int64_t>(shape_.kv_heads, threads);
        while (portions < 3 * threads || queries > portions * kQueryGroup) portions *= 2;
        return portions < kMaxPortions ? portions : kMaxPortions;
    }

    // Whether one thread is done before another would have begun: a query-key pair takes some 6 ns.
    bool is_short(int64_t queries) const {
        constexpr int64_t kWorthSharing = 600;
        return args_.rows <= 2 && queries * (s_.position[args_.rows - 1] + 1) < kWorthSharing;
    }

    void attend_range(const Layer& layer, int64_t from, int64_t to) {
        const int64_t group = shape_.heads / shape_.kv_heads;
        while (from < to) {
            const int segment = s_.segment_of[from / shape_.heads];
            const int64_t first_row = args_.row_offsets[segment], rows = args_.row_offsets[segment + 1] - first_row;
            const int64_t inside = from - first_row * shape_.heads, head = inside / (rows * group);
            int64_t at = inside % (rows * group);
            Query queries[kQueryGroup];
            int count = 0;
            for (; count < kQueryGroup && from < to && at < rows * group; ++count, ++from, ++at) {
                const int64_t row = first_row + at / group, column = (head * group + at % group) * shape_.head_dim;
                queries[count] = {s_.qkv + row * model_.qkv_size() + column, s_.attn + row * model_.q_size() + column,
                                  s_.position[row] + 1};
            }
            attend<Cache>(model_, layer, table_of(segment), static_cast<int>(head), queries, count);
        }
    }

    void keep_hidden(int tap) {
        for (int64_t row = 0; row < args_.rows; ++row)
            __builtin_memcpy(args_.hidden + (row * args_.taps + tap) * shape_.hidden, s_.x + row * shape_.hidden,
                             static_cast<size_t>(shape_.hidden) * 4);
    }

    void head() {
        const int64_t count = args_.logit_rows, hidden = shape_.hidden, vocab = shape_.vocab;
        const Matrix& w = model_.head_matrix();
        over_tiles(
            w.tiles, count, shape_.hidden,
            [&](Activations& to, int64_t i) {
                quantise_normed(to, i, s_.x + args_.logit_row_ids[i] * hidden, model_.final_norm, shape_.rms_eps);
            },
            [&](const Activations& x, Range part, int chunk) {
                Best* best = s_.best + chunk * count;
                for (int64_t i = 0; i < count; ++i) best[i] = {-__builtin_inff(), part.begin * kTile};
                multiply(w, x, count, part, [&](int64_t tile, int64_t row, int n, float(*out)[kTile]) {
                    const int width = tile_width(w, tile);
                    for (int m = 0; m < n; ++m) {
                        improve(best[row + m], out[m], tile * kTile, width);
                        if (args_.logits == nullptr) continue;
                        float* to = args_.logits + (row + m) * vocab + tile * kTile;
                        __builtin_memcpy(to, out[m], static_cast<size_t>(width) * 4);
                    }
                });
            });
        merge_best(count, chunks_for(w.tiles, count, pool_.threads()));
        lap(kPartHead);
    }

    static void improve(Best& best, const float* out, int64_t token, int width) {
        if (width == kTile && !(largest(load(out)) > best.value)) return;
        for (int i = 0; i < width; ++i)
            if (out[i] > best.value) best = {out[i], token + i};
    }

    void merge_best(int64_t count, int chunks) {  // chunks hold rising tokens, so the first of equals has the least id
        for (int64_t i = 0; i < count; ++i) {
            Best winner = s_.best[i];
            for (int chunk = 1; chunk < chunks; ++chunk) {
                const Best& other = s_.best[chunk * count + i];
                if (other.value > winner.value) winner = other;
            }
            args_.argmax[i] = winner.token;
        }
    }

    static constexpr int kMaxPortions = 1024;

    Model& model_;
    const StepArgs& args_;
    const ShapeArgs& shape_;
    Scratch& s_;
    Pool& pool_;
    int portions_ = 0;  // of attention
    int64_t cuts_[kMaxPortions + 1];
    int64_t last_ns_ = 0, last_waited_ = 0;
};

}  // namespace
