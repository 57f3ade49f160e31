// Attention over the filled slots that also returns its weights: logits go to a buffer, and become weights at the end.
#include <memory>

#include "softmax.h"

namespace {

// weights [B, H, T_]: the softmax weights of each slot, summed over a group's query heads; 0 from stop [B] on
template <class T> void attend_observed(const Heads<T>& heads, const Cache<T>& k, const Cache<T>& v,
                                        const int64_t* stop, float* weights, int64_t T_) {
    const int64_t B = heads.B, H = heads.H, G = heads.G, threads = heads.threads;
    int64_t longest = 0;
    for (int64_t b = 0; b < B; b++) longest = std::max(longest, stop[b]);
    std::unique_ptr<float[]> logits(new float[B * H * G * longest]);
    std::vector<float> lse(B * H * G);
    const auto work = [&](int64_t group, int64_t part, const float* query, Seen& seen) {
        int64_t b = group / H, h = group % H, lo = part * CHUNK, hi = std::min(stop[b], lo + CHUNK);
        float* to = &logits[group * G * longest];
        const auto look = [&](int64_t first, int n) {
            for (int64_t g = 0; g < G; g++)
                for (int i = 0; i < n; i++) to[g * longest + first + i] = seen.p[g * N + i] * seen.scale;
        };
        seen.add_slots(query, Slots<T>{k.of(b, h), v.of(b, h), k.slot, v.slot}, lo, hi, look);
    };
    attention(heads, parts_of(longest), work, 0, lse.data());
    int64_t parts = parts_of(T_);
#pragma omp parallel for num_threads(threads)
    for (int64_t item = 0; item < B * H * parts; item++) {
        int64_t group = item / parts, lo = item % parts * CHUNK, hi = std::min(T_, lo + CHUNK);
        int64_t filled = std::max(lo, std::min(stop[group / H], hi));
        float* to = weights + group * T_;
        for (int64_t t = lo; t < filled; t += L) {
            int n = (int)std::min<int64_t>(L, filled - t);
            vf total = {};
            for (int64_t head = group * G; head < (group + 1) * G; head++)
                total += exp2_of(load_some<vf>(&logits[head * longest + t], n) - lse[head] * LOG2_E);
            std::memcpy(to + t, &total, n * 4);
        }
        std::fill(to + filled, to + hi, 0.0f);
    }
}

}  // namespace
