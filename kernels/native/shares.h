// Loops over memory that is read once.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>
#include "vectors.h"

namespace {

// Pieces 0..n of a loop, shared by threads. Each thread takes a stretch of its own in order, round by round: one piece
// from each of STREAMS parts of the stretch, since a core that reads at several places in turns gets more memory
// bandwidth than one that reads at one. The last pieces of a stretch are rounds by themselves, and a thread that is
// done takes the last rounds of others' stretches: threads get unequal shares of the bandwidth, and of a core.
class Shares {
    struct alignas(64) Stretch {
        std::atomic<uint64_t>
            left;              // rounds not taken yet: the first one, and in the upper half the one after the last
        int64_t first, whole;  // first piece; number of rounds of several pieces
    };
    std::vector<Stretch> stretches;
    const int64_t streams;

    static bool take(std::atomic<uint64_t>& left, bool last, int64_t& round) {
        for (uint64_t now = left.load(std::memory_order_relaxed);;) {
            const uint64_t from = now & 0xffffffffu, to = now >> 32;
            if (from >= to) return false;
            const uint64_t then = last ? (to - 1) << 32 | from : to << 32 | (from + 1);
            round = last ? to - 1 : from;
            if (left.compare_exchange_weak(now, then, std::memory_order_relaxed)) return true;
        }
    }

public:
    // 4 are slower: parts of 2^n bytes collide in caches and memory. With AVX-512, a core that reads in order, a page
    // ahead, has enough in flight: on Zen 5 it reads 8 to 27 % more bytes a second than at 3 places
    static constexpr int64_t STREAMS = L == 8 ? 3 : 1;
    static constexpr int64_t ENOUGH = 8;  // pieces of a part; with fewer, there is only one part

    Shares(int64_t n, int threads, int64_t most = STREAMS)
        : stretches(threads), streams(n / threads < most * ENOUGH ? 1 : most) {
        for (int64_t t = 0; t < threads; t++) {
            Stretch& s = stretches[t];
            s.first = n * t / threads;
            const int64_t pieces = n * (t + 1) / threads - s.first;
            s.whole = streams > 1 ? pieces / streams - 1 : 0;  // one round fewer than there could be
            s.left.store((uint64_t)(s.whole + pieces - s.whole * streams) << 32);
        }
    }

    template <class F>
    void each(F&& f) {  // f(pieces, their number), by a team: all its threads must come here; none waits
        const int threads = stretches.size();
#pragma omp for schedule(static, 1) nowait
        for (int t = 0; t < threads; t++)
            for (int k = 0; k < threads; k++) {
                Stretch& s = stretches[(t + k) % threads];
                for (int64_t round; take(s.left, k > 0, round);) {
                    const bool several = round < s.whole;  // otherwise one of the last pieces
                    const int64_t count = several ? streams : 1;
                    int64_t pieces[STREAMS];
                    for (int64_t i = 0; i < count; i++)
                        pieces[i] = s.first + round + (several ? i : streams - 1) * s.whole;
                    f(pieces, count);
                }
            }
    }
};

}  // namespace
