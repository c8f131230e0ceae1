// Threads that take chunks, spin briefly for the next loop and then sleep.
#include "pool.h"

#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// A worker spins this long for work: longer than the pause between two steps of a busy engine, shorter than anything
// that another process would notice.
constexpr auto kWorkerSpin = std::chrono::microseconds(200);
constexpr int kSpinsPerLook = 64;
constexpr int kShortestRest = 8, kLongestRest = 256;  // steps

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Spins until ready() or the time is over; says whether it is ready.
template <class Ready>
bool spin(std::chrono::nanoseconds limit, Ready&& ready) {
    const auto end = std::chrono::steady_clock::now() + limit;
    do {
        for (int i = 0; i < kSpinsPerLook; ++i) {
            if (ready()) return true;
            pause_briefly();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads > kMaxThreads ? kMaxThreads : threads), resting_(threads_ == 1) {
    for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
    closing_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::run(int chunks, void (*body)(void*, int, int), void* context) {
    body_ = body;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(ticket_of(++loop_ & 0xffffffff, chunks), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0 && sleepers_.exchange(0) != 0) {
        wake_.fetch_add(1);
        wake_.notify_all();
    }
    while (help(0)) {
    }
    wait_for_others(static_cast<uint32_t>(chunks));
}

// Takes and runs one chunk of the current loop; false when none is left.
bool Pool::help(int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (has_chunk(ticket)) {
        if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        body_(context_, static_cast<int>(ticket & 0xffff), thread);
        const uint32_t finished = done_.fetch_add(1, std::memory_order_acq_rel) + 1;
        if (thread != 0 && finished == (ticket >> 16 & 0xffff)) done_.notify_one();
        return true;
    }
    return false;
}

void Pool::wait_for_others(uint32_t chunks) {
    const auto ready = [&] { return done_.load(std::memory_order_acquire) == chunks; };
    for (int i = 0; i < kSpinsPerLook; ++i) {  // the common wait is over before a clock would have been read
        if (ready()) return;
        pause_briefly();
    }
    const int64_t from = now_ns();
    if (!spin(kWorkerSpin, ready)) {
        uint32_t finished;
        while ((finished = done_.load(std::memory_order_acquire)) != chunks) done_.wait(finished, std::memory_order_acquire);
    }
    waited_ns_ += now_ns() - from;
}

void Pool::begin_step() {
    resting_ = threads_ == 1 || rest_left_ > 0;
    if (rest_left_ > 0) --rest_left_;
    waited_ns_ = 0;
    began_ns_ = now_ns();
}

void Pool::end_step() {
    if (resting_) return;
    if (waited_ns_ * 4 < now_ns() - began_ns_) {
        rest_length_ /= 2;
        return;
    }
    rest_length_ = rest_length_ < kShortestRest ? kShortestRest : rest_length_ < kLongestRest ? 2 * rest_length_ : kLongestRest;
    rest_left_ = rest_length_;
}

void Pool::work(int thread) {
    while (!closing_.load(std::memory_order_relaxed)) {
        if (help(thread)) continue;
        const auto ready = [this] { return has_chunk(ticket_.load(std::memory_order_acquire)) || closing_.load(); };
        if (!spin(kWorkerSpin, ready)) sleep_until_woken();
    }
}

void Pool::sleep_until_woken() {
    const uint32_t seen = wake_.load();
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    // A loop published before the count rose is seen here; one published after it sees the count.
    if (!has_chunk(ticket_.load(std::memory_order_seq_cst)) && !closing_.load()) wake_.wait(seen);
}
