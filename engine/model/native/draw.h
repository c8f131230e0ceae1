// One token from a row of logits: temperature, top-k, top-p, min-p, then the inverse of the distribution at `uniform`.
//
// Every truncation keeps a prefix of the tokens sorted by falling probability, so they are gathered and sorted from the
// largest logit downwards, a band at a time, until the draw is settled.
#pragma once
#include <math.h>

#include <algorithm>
#include <vector>

#include "elementwise.h"

namespace {

// Ends of the bands below the largest logit, in temperatures.
constexpr double kReach[] = {6.0, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0, 25.0, 32.0, HUGE_VAL};

struct Candidate {
    float logit;
    int32_t token;
    double weight;  // relative to the likeliest token
};

class Draw {
  public:
    Draw(const DrawPlan& plan, int64_t vocab) : plan_(plan), vocab_(vocab), whole_(vocab / kTile * kTile) {}

    // The token, or -1 where the row holds no number above minus infinity.
    int64_t token() {
        survey();
        int64_t found = -1;
        for (const double reach : kReach) {
            gather(reach);
            if (candidates_.empty()) continue;
            found = settle(reach == HUGE_VAL);
            if (found >= 0) break;
        }
        return found;
    }

  private:
    // The largest logit and the sum of all weights.
    void survey() {
        F most = splat(-HUGE_VALF);
        for (int64_t i = 0; i < whole_; i += kTile) most = max(load(plan_.logits + i), most);
        top_ = largest(most);
        for (int64_t i = whole_; i < vocab_; ++i) top_ = plan_.logits[i] > top_ ? plan_.logits[i] : top_;
        const F inverse = splat(static_cast<float>(1.0 / plan_.temperature)), top = splat(top_);
        F sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int64_t i = 0; i < whole_; i += kTile) {
            F& part = sums[i / kTile % 4];
            part = part + exponential((load(plan_.logits + i) - top) * inverse);
        }
        total_ = static_cast<double>(sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
        for (int64_t i = whole_; i < vocab_; ++i) total_ += weight(plan_.logits[i]);
    }

    double weight(float logit) const { return exp((static_cast<double>(logit) - top_) / plan_.temperature); }

    // Adds the next band, which ends `reach` below the largest logit: falling, equal logits by rising token.
    void gather(double reach) {
        const auto lowest = static_cast<float>(top_ - reach * plan_.temperature);
        const auto first = static_cast<int64_t>(candidates_.size());
        for (int64_t i = 0; i < vocab_; i += kTile) {
            const int64_t end = i < whole_ ? i + kTile : vocab_;
            if (i < whole_ && !(largest(load(plan_.logits + i)) >= lowest)) continue;
            for (int64_t token = i; token < end; ++token) {
                const float logit = plan_.logits[token];
                const bool belongs = logit >= lowest && logit < above_ && logit > -HUGE_VALF;
                if (belongs) candidates_.push_back({logit, static_cast<int32_t>(token), weight(logit)});
            }
        }
        std::sort(candidates_.begin() + first, candidates_.end(), [](const Candidate& a, const Candidate& b) {
            return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
        });
        above_ = lowest;
    }

    // The drawn token, or -1 where it may lie beyond the candidates; `all`: there are no others.
    int64_t settle(bool all) const {
        const auto count = static_cast<int64_t>(candidates_.size());
        const bool limits_k = plan_.top_k > 0 && plan_.top_k < vocab_;
        if (!limits_k && plan_.top_p >= 1.0 && plan_.min_p <= 0.0) return at(plan_.uniform * total_, count, all);
        if (limits_k && plan_.top_k > count && !all) return -1;
        const int64_t most = limits_k && plan_.top_k < count ? plan_.top_k : count;
        double mass = limits_k ? 0.0 : total_;
        for (int64_t i = 0; limits_k && i < most; ++i) mass += candidates_[i].weight;
        int64_t kept = 0;
        double sum = 0.0;
        while (kept < most && (plan_.top_p >= 1.0 || sum < plan_.top_p * mass) && candidates_[kept].weight >= plan_.min_p)
            sum += candidates_[kept++].weight;
        const bool end_is_known = kept < count || all || (limits_k && kept == plan_.top_k);
        if (kept == 0) return candidates_[0].token;  // a top-p of 0 keeps the likeliest
        return end_is_known ? at(plan_.uniform * sum, kept, true) : -1;
    }

    // The first of `count` candidates whose running sum exceeds `mark`; where none does the last, or -1.
    int64_t at(double mark, int64_t count, bool take_last) const {
        double sum = 0.0;
        for (int64_t i = 0; i < count; ++i) {
            sum += candidates_[i].weight;
            if (sum > mark) return candidates_[i].token;
        }
        return take_last ? candidates_[count - 1].token : -1;
    }

    const DrawPlan& plan_;
    const int64_t vocab_, whole_;
    float top_ = 0.0f, above_ = HUGE_VALF;
    double total_ = 0.0;
    std::vector<Candidate> candidates_;
};

}  // namespace
