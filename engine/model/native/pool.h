// Persistent threads that help with the chunks of a loop; nobody waits for a thread that has not taken a chunk.
//
// A worker whose core is busy with another process simply takes none, and the caller does its share. A worker that
// lost its core in the middle of a chunk is waited for; when that took a quarter of a step, the next steps run on the
// caller alone, for longer each time it happens again.
#pragma once
#include <stdint.h>

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

    // Calls body(chunk, thread) once for every chunk in [0, chunks), on whichever thread is free, the caller being
    // thread 0; returns when all are done. What the caller wrote before is visible to the body, and the reverse.
    template <class Body>
    void each(int chunks, Body&& body) {
        if (resting_ || chunks <= 1) {
            for (int chunk = 0; chunk < chunks; ++chunk) body(chunk, 0);
            return;
        }
        run(chunks, [](void* context, int chunk, int thread) { (*static_cast<Body*>(context))(chunk, thread); }, &body);
    }

    // Around every step: decide whether the workers help with it, and learn from how long it waited for them.
    void begin_step();
    void end_step();
    // Time that the caller waited for chunks of others since the step began.
    int64_t waited_ns() const { return waited_ns_; }

  private:
    // Loop number, chunks and next chunk in one word, so that a chunk is never taken from a loop that has ended.
    static uint64_t ticket_of(uint64_t loop, int chunks) { return loop << 32 | static_cast<uint64_t>(chunks) << 16; }
    static bool has_chunk(uint64_t ticket) { return (ticket & 0xffff) < (ticket >> 16 & 0xffff); }

    void run(int chunks, void (*body)(void*, int, int), void* context);
    bool help(int thread);
    void wait_for_others(uint32_t chunks);
    void work(int thread);
    void sleep_until_woken();

    const int threads_;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};
    alignas(64) std::atomic<uint32_t> wake_{0};
    std::atomic<bool> closing_{false};
    void (*body_)(void*, int, int) = nullptr;
    void* context_ = nullptr;
    uint64_t loop_ = 0;
    bool resting_;
    int rest_left_ = 0, rest_length_ = 0;  // in steps
    int64_t waited_ns_ = 0, began_ns_ = 0;
    std::vector<std::thread> workers_;
};
