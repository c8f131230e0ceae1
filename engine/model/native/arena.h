// Memory for weights in large chunks on huge pages, freed all at once.
#pragma once
#include <stddef.h>
#include <stdlib.h>

#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

class Arena {
  public:
    Arena() = default;
    ~Arena() {
        for (void* chunk : chunks_) free(chunk);
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // 64-byte aligned memory that lives as long as the arena; null when there is none left.
    void* take(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > left_ && !grow(bytes)) return nullptr;
        void* memory = next_;
        next_ += bytes;
        left_ -= bytes;
        return memory;
    }

  private:
    static constexpr size_t kHugePage = 2u << 20, kChunk = 8 * kHugePage;

    bool grow(size_t bytes) {
        const size_t size = bytes < kChunk ? kChunk : (bytes + kHugePage - 1) / kHugePage * kHugePage;
        void* chunk = aligned_alloc(kHugePage, size);
        if (chunk == nullptr) return false;
#if defined(__linux__)
        madvise(chunk, size, MADV_HUGEPAGE);
#endif
        chunks_.push_back(chunk);
        next_ = static_cast<char*>(chunk);
        left_ = size;
        return true;
    }

    std::vector<void*> chunks_;
    char* next_ = nullptr;
    size_t left_ = 0;
};
