// Loops over memory that is read once.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace {

// Pieces 0..n of a loop, shared by threads. Each takes a stretch of its own in order, ahead of which a processor fetches, and
// then the last pieces of others' stretches: threads get unequal parts of a memory's bandwidth, and of a core.
class Shares {
    struct alignas(64) Stretch {
        std::atomic<uint64_t> left;  // what is not taken: the first piece, and in the upper half the one after the last
    };
    std::vector<Stretch> stretches;

    static bool take(std::atomic<uint64_t>& left, bool last, int64_t& piece) {
        for (uint64_t now = left.load(std::memory_order_relaxed);;) {
            const uint64_t from = now & 0xffffffffu, to = now >> 32;
            if (from >= to) return false;
            const uint64_t then = last ? (to - 1) << 32 | from : to << 32 | (from + 1);
            piece = last ? to - 1 : from;
            if (left.compare_exchange_weak(now, then, std::memory_order_relaxed)) return true;
        }
    }

  public:
    Shares(int64_t n, int threads) : stretches(threads) {
        for (int64_t t = 0; t < threads; t++)
            stretches[t].left.store((uint64_t)(n * (t + 1) / threads) << 32 | (uint64_t)(n * t / threads));
    }

    template <class F> void each(F&& f) {  // f(piece), by a team: all its threads are to come here
        const int threads = stretches.size();
#pragma omp for schedule(static, 1)
        for (int t = 0; t < threads; t++)
            for (int k = 0; k < threads; k++)
                for (int64_t piece; take(stretches[(t + k) % threads].left, k > 0, piece);) f(piece);
    }
};

}  // namespace
