// Threads that wait for each other without burning a core that somebody else needs.
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// About 50 us on current processors: longer than any imbalance inside a step and than the pause between two steps of a
// busy engine, far shorter than a scheduler slice when the other thread lost its core.
constexpr int kSpins = 3000;

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause_briefly();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads > kMaxThreads ? kMaxThreads : threads) {
    for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
    closing_.store(true);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::run(void (*job)(void*, int), void* context) {
    job_ = job;
    context_ = context;
    if (threads_ > 1) {
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
    }
    job(context, 0);
    barrier();
}

void Pool::barrier() {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.fetch_add(1, std::memory_order_release);
        phase_.notify_all();
    } else {
        wait_while(phase_, phase);
    }
}

void Pool::work(int thread) {
    uint32_t seen = 0;
    for (;;) {
        wait_while(generation_, seen);
        seen = generation_.load(std::memory_order_acquire);
        if (closing_.load()) return;
        job_(context_, thread);
        barrier();
    }
}
