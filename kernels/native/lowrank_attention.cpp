// Attention over latents in their own space (OjaKV). Tokens lie side by side: coordinate c of token t at c * chan + t.
#include "channels.h"
#include "tiles.h"

namespace {

// What a part has seen of latents. The weighted coordinates stay L sums each until the end.
struct Latents {
    int G, R_K, R_V;  // coordinates of a key and of a value
    int M;            // tokens of a block: long runs of each row, and logits that stay in a first-level cache
    std::vector<float> p, wide, shrink;

    Latents(int G, int R_K, int R_V)
        : G(G),
          R_K(R_K),
          R_V(R_V),
          M(std::max(128, std::min(1024, 4096 / G / WHOLE * WHOLE))),
          p(G * M),
          wide(G * R_V * L),
          shrink(G) {}

    // tokens lo..hi of one head; q [G, D], of which R_K coordinates count
    template <class T>
    void see(const float* q, const T* k, const T* v, int64_t chan, int64_t lo, int64_t hi, Seen& seen) {
        int64_t whole = lo + std::max<int64_t>(0, hi - lo) / L * L;
        for (int64_t first = lo; first < whole; first += M)
            block(q, k + first, v + first, chan, (int)std::min<int64_t>(M, whole - first), seen);
        if (whole < hi) {  // behind the last token may be anything, and the end of the buffer
            int n = (int)(hi - whole);
            std::vector<T> end((R_K + R_V) * L, T{});
            for (int r = 0; r < R_K; r++) std::copy_n(k + r * chan + whole, n, &end[r * L]);
            for (int r = 0; r < R_V; r++) std::copy_n(v + r * chan + whole, n, &end[(R_K + r) * L]);
            block(q, end.data(), end.data() + R_K * L, L, n, seen);
        }
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R_V; r++) seen.y[g * seen.D + r] = sum(load(&wide[(g * R_V + r) * L]));
    }

    template <class T> void block(const float* q, const T* k, const T* v, int64_t chan, int n, Seen& seen) {
        int width = (n + L - 1) / L * L;
        std::vector<const T*> rows(std::max(R_K, R_V));
        for (int r = 0; r < R_K; r++) rows[r] = k + r * chan;
        by_heads(G,
                 [&](auto m, int g) { score_rows<m>(q + g * seen.D, seen.D, rows.data(), R_K, &p[g * M], M, width); });
        for (int g = 0; g < G; g++) shrink[g] = seen.soften(g, &p[g * M], n, width);
        for (int r = 0; r < R_V; r++) rows[r] = v + r * chan;
        by_heads(G, [&](auto m, int g) {
            weigh_rows<m>(&p[g * M], M, rows.data(), R_V, &shrink[g], &wide[g * R_V * L], width);
        });
    }
};

}  // namespace

extern "C" {

// q [B, H * G, D]; latents of which row b holds the first stored[b]; bases [B or 1, H, D, R], a row stride of 0 where
// all rows share one; full-rank tokens [B, H, F, D] of which those are there that `filled` [B, F] tells.
void kvf_lowrank_attention(int64_t is_bf16, const void* q, const void* k, const void* v, const float* k_basis,
                           const float* v_basis, const int64_t* stored, const void* k_full, const void* v_full,
                           const uint8_t* filled, void* out, int64_t q_row, int64_t q_head, int64_t k_row,
                           int64_t k_head, int64_t v_row, int64_t v_head, int64_t chan, int64_t k_basis_row,
                           int64_t v_basis_row, int64_t B, int64_t H, int64_t G, int64_t D, int64_t R_K, int64_t R_V,
                           int64_t F, int64_t threads) {
    int64_t W = (std::max(R_K, R_V) + L - 1) / L * L, longest = *std::max_element(stored, stored + B);
    Room<float> folded(B * H * G * W), mean(B * H * G * W);  // queries in the key basis, outputs in the value basis
    std::vector<float> lse(B * H * G);
    FLOAT_OR_BF16(
        _Pragma("omp parallel for num_threads(threads)")
        for (int64_t head = 0; head < B * H * G; head++) {
            int64_t b = head / (H * G), h = head % (H * G) / G;
            const T* x = (const T*)q + b * q_row + head % (H * G) * q_head;
            const float* u = k_basis + b * k_basis_row + h * D * R_K;
            for (int64_t d = 0; d < D; d++)
                for (int64_t r = 0; r < R_K; r++) folded[head * W + r] += number(x[d]) * u[d * R_K + r];
        }
        attention(folded.at, H * G * W, W, mean.at, (int)B, (int)H, (int)G, (int)W, parts_of(longest), threads,
            [&](int64_t group, int64_t part, const float* query, Seen& seen) {
                int64_t b = group / H, h = group % H, lo = part * CHUNK;
                Latents((int)G, (int)R_K, (int)R_V).see(query, (const T*)k + b * k_row + h * k_head,
                                                        (const T*)v + b * v_row + h * v_head, chan, lo,
                                                        std::min(stored[b], lo + CHUNK), seen);
            }, (int)D, lse.data());
        _Pragma("omp parallel for num_threads(threads)")
        for (int64_t group = 0; group < B * H; group++) {
            int64_t b = group / H, h = group % H;
            Seen seen((int)G, (int)D);
            seen.clear();
            std::vector<float> query(G * D);
            scaled_query((const T*)q + b * q_row + h * G * q_head, q_head, (int)G, (int)D, LOG2_E / std::sqrt((float)D),
                         query.data());
            const float* u = v_basis + b * v_basis_row + h * D * R_V;
            for (int64_t g = 0; g < G; g++) {  // all latents are as one token, whose value is what was attended to
                int64_t head = group * G + g;
                if (lse[head] == -INFINITY) continue;
                seen.top[g] = lse[head] * LOG2_E, seen.sum_parts[g * L] = 1;
                for (int64_t d = 0; d < D; d++) {
                    vf acc = {};
                    for (int64_t r = 0; r < R_V; r += L)
                        acc += load_some<vf>(u + d * R_V + r, (int)std::min<int64_t>(L, R_V - r)) * load(&mean[head * W + r]);
                    seen.y[g * D + d] = sum(acc);
                }
            }
            std::vector<int64_t> slots;
            for (int64_t f = 0; f < F; f++)
                if (filled[b * F + f]) slots.push_back(f);
            seen.add_slots(query.data(), (const T*)k_full + group * F * D, (const T*)v_full + group * F * D, D, D,
                           slots.data(), 0, (int64_t)slots.size());
            for (int64_t g = 0; g < G; g++)
                for (int64_t d = 0; d < D; d += L)
                    store((T*)out + (group * G + g) * D + d, load(&seen.y[g * D + d]) / std::max(seen.total((int)g), 1e-30f));
        })
}
}
