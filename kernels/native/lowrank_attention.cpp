// Attention over latents in their own space (OjaKV). Tokens lie side by side: coordinate c of token t at c * chan + t.
#include "channels.h"

namespace {

// One head's latents: coordinates of a token lie `chan` apart
template <class T> struct Block {
    const T *k, *v;
    int64_t chan;
};

// The running result of a part over latents. Each weighted coordinate stays L partial sums until the end.
struct Weighted {
    int G, R_K, R_V;  // coordinates of a key and of a value
    int M;            // tokens of a block: long runs of each row, and logits that stay in L1
    std::vector<float> p, wide, shrink;
    std::vector<std::pair<int, int>> runs;  // of a block's tokens, whose values are read
    bool skips = false;
    float least = 0;     // as Skips::least
    int64_t n_read = 0;  // tokens whose values were read

    Weighted(int G, int R_K, int R_V)
        : G(G),
          R_K(R_K),
          R_V(R_V),
          M(std::max(128, std::min(1024, 4096 / G / WHOLE * WHOLE))),
          p(G * M),
          wide(G * R_V * L),
          shrink(G) {}

    // tokens lo..hi of one head; q [G, D], the first R_K coordinates of which count
    template <class T> void see(const float* q, const Block<T>& of, int64_t lo, int64_t hi, Seen& seen) {
        int64_t whole = lo + std::max<int64_t>(0, hi - lo) / N * N;
        for (int64_t first = lo; first < whole; first += M)
            block(q, Block<T>{of.k + first, of.v + first, of.chan}, (int)std::min<int64_t>(M, whole - first), seen);
        if (whole < hi) {  // past the last token there may be anything, or the end of the buffer
            int n = (int)(hi - whole);
            std::vector<T> end((R_K + R_V) * N, T{});
            for (int r = 0; r < R_K; r++) std::copy_n(of.k + r * of.chan + whole, n, &end[r * N]);
            for (int r = 0; r < R_V; r++) std::copy_n(of.v + r * of.chan + whole, n, &end[(R_K + r) * N]);
            block(q, Block<T>{end.data(), end.data() + R_K * N, N}, n, seen);
        }
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R_V; r++) seen.y[g * seen.D + r] = sum(load(&wide[(g * R_V + r) * L]));
    }

    template <class T> void block(const float* q, const Block<T>& of, int n, Seen& seen) {
        int width = (n + L - 1) / L * L;
        std::vector<const T*> rows(std::max(R_K, R_V));
        for (int r = 0; r < R_K; r++) rows[r] = of.k + r * of.chan;
        by_heads(G, [&](auto m, int g) {
            score_rows<m>({q + g * seen.D, seen.D}, rows.data(), R_K, {&p[g * M], M}, width);
        });
        runs.assign(1, {0, n});
        if (skips) leave_out(n, seen);
        for (int g = 0; g < G; g++) shrink[g] = seen.soften(g, &p[g * M], n, width);
        for (auto [first, end] : runs) {
            for (int r = 0; r < R_V; r++) rows[r] = of.v + r * of.chan + first;
            by_heads(G, [&](auto m, int g) {
                weigh_rows<m>({&p[g * M + first], M}, rows.data(), R_V, &shrink[g], &wide[g * R_V * L],
                              (end - first + L - 1) / L * L);
            });
            std::fill(shrink.begin(), shrink.end(), 1.0f);
        }
    }

    // Of n products, those of N tokens that weigh next to nothing become -inf, and they are in no run
    void leave_out(int n, const Seen& seen) {
        runs.clear();
        std::vector<float> top = seen.top, most(G);
        for (int first = 0; first < n; first += N) {
            const int end = std::min(n, first + N);
            bool weighs = false;
            for (int g = 0; g < G; g++) {
                most[g] = *std::max_element(&p[g * M + first], &p[g * M] + end) * seen.scale;
                weighs |= !(most[g] < top[g] + least);  // NaN, too
            }
            for (int g = 0; g < G; g++)
                if (weighs) top[g] = std::max(top[g], most[g]);
                else std::fill(&p[g * M + first], &p[g * M] + end, -INFINITY);
            if (!weighs) continue;
            n_read += end - first;
            if (runs.empty() || runs.back().second < first) runs.emplace_back(first, end);
            else runs.back().second = end;
        }
    }
};

// Latents [B, H, slots, R_K or R_V], stored coordinate by coordinate, `chan` apart; row b holds the first stored[b]
template <class T> struct Latent {
    const T* at;
    int64_t row, head, chan, rank;
    PerHead<const float> basis;  // [B or 1, H, D, rank]

    const T* of(int64_t b, int64_t h) const { return at + b * row + h * head; }
};

// Full-rank tokens [B, H, F, D], contiguous; those in use are flagged by `filled` [B, F]
template <class T> struct Filled {
    const T *k, *v;
    const uint8_t* filled;
    int64_t F;
};

template <class T> void attend_lowrank(const Heads<T>& heads, const Latent<T>& k, const Latent<T>& v,
                                       const int64_t* stored, const Filled<T>& full, const Skips& skips = {}) {
    const int64_t B = heads.B, H = heads.H, G = heads.G, D = heads.D, threads = heads.threads;
    const int64_t R_K = k.rank, R_V = v.rank, F = full.F;
    int64_t W = (std::max(R_K, R_V) + L - 1) / L * L, longest = *std::max_element(stored, stored + B);
    Room<float> folded(B * H * G * W), mean(B * H * G * W);  // queries in the key basis, outputs in the value basis
    std::vector<float> lse(B * H * G);
#pragma omp parallel for num_threads(threads)
    for (int64_t head = 0; head < B * H * G; head++) {
        int64_t b = head / (H * G), h = head % (H * G) / G;
        const T* x = heads.q + b * heads.row + head % (H * G) * heads.head;
        const float* u = k.basis.of(b, h);
        for (int64_t d = 0; d < D; d++)
            for (int64_t r = 0; r < R_K; r++) folded[head * W + r] += number(x[d]) * u[d * R_K + r];
    }
    const Heads<float> inner{.q = folded.at,
                             .row = H * G * W,
                             .head = W,
                             .out = mean.at,
                             .B = B,
                             .H = H,
                             .G = G,
                             .D = W,
                             .threads = threads};
    const auto work = [&](int64_t group, int64_t part, const float* query, Seen& seen) {
        int64_t b = group / H, h = group % H, lo = part * CHUNK;
        Weighted own((int)G, (int)R_K, (int)R_V);
        if (skips.read) own.skips = true, own.least = skips.least(skips.length[b]);
        own.see(query, Block<T>{k.of(b, h), v.of(b, h), k.chan}, lo, std::min(stored[b], lo + CHUNK), seen);
        if (skips.read) count(skips.read[group], own.n_read);
    };
    attention(inner, parts_of(longest), work, D, lse.data());
#pragma omp parallel for num_threads(threads)
    for (int64_t group = 0; group < B * H; group++) {
        int64_t b = group / H, h = group % H;
        Seen seen((int)G, (int)D);
        seen.clear();
        std::vector<float> query(G * D);
        scaled_query(heads.of(b, h), heads.head, (int)G, (int)D, LOG2_E / std::sqrt((float)D), query.data());
        const float* u = v.basis.of(b, h);
        for (int64_t g = 0; g < G; g++) {  // all latents count as one token, whose value is their weighted mean
            int64_t head = group * G + g;
            if (lse[head] == -INFINITY) continue;
            seen.top[g] = lse[head] * LOG2_E, seen.sum_parts[g * L] = 1;
            for (int64_t d = 0; d < D; d++) {
                vf acc = {};
                for (int64_t r = 0; r < R_V; r += L)
                    acc +=
                        load_some<vf>(u + d * R_V + r, (int)std::min<int64_t>(L, R_V - r)) * load(&mean[head * W + r]);
                seen.y[g * D + d] = sum(acc);
            }
        }
        std::vector<int64_t> slots;
        for (int64_t f = 0; f < F; f++)
            if (full.filled[b * F + f]) slots.push_back(f);
        const Slots<T> of{full.k + group * F * D, full.v + group * F * D, D, D, slots.data()};
        seen.add_slots(query.data(), of, 0, (int64_t)slots.size());
        if (skips.read) skips.read[group] += (int64_t)slots.size();
        for (int64_t g = 0; g < G; g++)
            for (int64_t d = 0; d < D; d += L)
                store(heads.out + (group * G + g) * D + d,
                      load(&seen.y[g * D + d]) / std::max(seen.total((int)g), 1e-30f));
    }
}

}  // namespace
