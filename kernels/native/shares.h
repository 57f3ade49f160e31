// Loops over memory that is read once.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace {

// Pieces 0..n of a loop, shared by threads. Each takes a stretch of its own in order, a round at a time: a piece of each of
// STREAMS parts of the stretch, since a core that reads at some places in turns gets more of a memory's bandwidth than one that
// reads at one. Then it takes the last rounds of others' stretches: threads get unequal parts of the bandwidth, and of a core.
class Shares {
    struct alignas(64) Stretch {
        std::atomic<uint64_t> left;  // rounds that are not taken: the first one, and in the upper half the one after the last
        int64_t first, end, rounds;  // pieces; a part has as many of them as there are rounds, the last part perhaps fewer
    };
    std::vector<Stretch> stretches;

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
    static constexpr int STREAMS = 3;  // 4 are slower: parts of 2^n bytes meet in the same places of caches and memory
    static constexpr int ROUNDS = 8;   // at least: fewer streams where pieces are few

    Shares(int64_t n, int threads, int streams = STREAMS) : stretches(threads) {
        for (int64_t t = 0; t < threads; t++) {
            Stretch& s = stretches[t];
            s.first = n * t / threads, s.end = n * (t + 1) / threads;
            const int64_t parts = std::clamp<int64_t>((s.end - s.first) / ROUNDS, 1, streams);
            s.rounds = (s.end - s.first + parts - 1) / parts;
            s.left.store((uint64_t)s.rounds << 32);
        }
    }

    template <class F> void each(F&& f) {  // f(pieces, how many of them), by a team: all its threads are to come here
        const int threads = stretches.size();
#pragma omp for schedule(static, 1)
        for (int t = 0; t < threads; t++)
            for (int k = 0; k < threads; k++) {
                Stretch& s = stretches[(t + k) % threads];
                for (int64_t round; take(s.left, k > 0, round);) {
                    int64_t pieces[STREAMS], count = 0;
                    for (int64_t p = s.first + round; p < s.end; p += s.rounds) pieces[count++] = p;
                    f(pieces, count);
                }
            }
    }
};

}  // namespace
