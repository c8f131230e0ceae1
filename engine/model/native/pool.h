// A few persistent threads that run one function together and meet at barriers: spin briefly, then sleep.
#pragma once
#include <atomic>
#include <thread>
#include <vector>

constexpr int kMaxThreads = 64;

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    // Runs job(context, thread) on every thread, the caller being thread 0; returns when all are done.
    void run(void (*job)(void*, int), void* context);
    // Inside a job: waits until every thread is here. Memory written before is visible after.
    void barrier();
    // Inside a job: hands out 0, 1, 2... once each; restart_counter before the barrier that precedes its use.
    int64_t next_item() { return counter_.fetch_add(1, std::memory_order_relaxed); }
    void restart_counter() { counter_.store(0, std::memory_order_relaxed); }

  private:
    void work(int thread);

    const int threads_;
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int64_t> counter_{0};
    std::atomic<bool> closing_{false};
    void (*job_)(void*, int) = nullptr;
    void* context_ = nullptr;
    std::vector<std::thread> workers_;
};
