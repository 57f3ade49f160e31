// Attention over latents in their own space (OjaKV). Tokens lie side by side: coordinate c of token t at c * chan + t.
#include "softmax.h"
#include "tiles.h"

namespace {

// What a part has seen of latents. The weighted coordinates stay L sums each until the end.
//
// Every coordinate of a block lies in a page of its own: a block is long, so that there is much to read in each.
struct Latents {
    static constexpr int M = 128;  // tokens of a block
    template <int N_Q> static constexpr int AT_ONCE = N_Q > 2 ? L / 4 : L / 2;  // vectors, as registers allow
    int G, R_K, R_V;  // coordinates of a key and of a value
    std::vector<float> p, wide;

    Latents(int G, int R_K, int R_V) : G(G), R_K(R_K), R_V(R_V), p(G * M), wide(G * R_V * L) {}

    template <int N_Q, class T> void score(const float* q, int D, const T* k, int64_t chan, float* out, bool more) {
        constexpr int W = AT_ONCE<N_Q>;
        for (int i = 0; i < M; i += W * L) {
            vf acc[N_Q][W] = {};
            for (int r = 0; r < R_K; r++) {
                const T* x = k + r * chan + i;
                if (more) prefetch_row(x + M, W * L);
                for (int j = 0; j < W; j++) {
                    vf y = load(x + j * L);
                    for (int g = 0; g < N_Q; g++) acc[g][j] += y * q[g * D + r];
                }
            }
            for (int g = 0; g < N_Q; g++)
                for (int j = 0; j < W; j++) store(out + g * M + i + j * L, acc[g][j]);
        }
    }

    template <int N_Q, class T> void weigh(const float* weight, const T* v, int64_t chan, float* to, bool more) {
        constexpr int W = AT_ONCE<N_Q>;
        for (int i = 0; i < M; i += W * L) {
            vf w[N_Q][W];
            for (int g = 0; g < N_Q; g++)
                for (int j = 0; j < W; j++) w[g][j] = load(weight + g * M + i + j * L);
            for (int r = 0; r < R_V; r++) {
                const T* x = v + r * chan + i;
                if (more) prefetch_row(x + M, W * L);
                vf y[W];
                for (int j = 0; j < W; j++) y[j] = load(x + j * L);
                for (int g = 0; g < N_Q; g++) {
                    vf two[2] = {load(to + (g * R_V + r) * L), {}};  // two sums: an addition waits for the one before
                    for (int j = 0; j < W; j++) two[j % 2] += y[j] * w[g][j];
                    store(to + (g * R_V + r) * L, two[0] + two[1]);
                }
            }
        }
    }

    // tokens lo..hi of one head; q [G, D], of which R_K coordinates count
    template <class T> void see(const float* q, const T* k, const T* v, int64_t chan, int64_t lo, int64_t hi, Seen& seen) {
        std::fill(wide.begin(), wide.end(), 0.0f);
        for (int64_t first = lo; first < hi; first += M) {
            if (first + M <= hi)
                block(q, k + first, v + first, chan, M, first + 2 * M <= hi, seen);
            else {  // behind the last token may be anything, and the end of the buffer
                int n = (int)(hi - first);
                std::vector<T> end((R_K + R_V) * M, T{});
                for (int r = 0; r < R_K; r++) std::copy(k + r * chan + first, k + r * chan + hi, &end[r * M]);
                for (int r = 0; r < R_V; r++) std::copy(v + r * chan + first, v + r * chan + hi, &end[(R_K + r) * M]);
                block(q, end.data(), end.data() + R_K * M, M, n, false, seen);
            }
        }
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R_V; r++) seen.y[g * seen.D + r] = sum(load(&wide[(g * R_V + r) * L]));
    }

    template <class T>
    void block(const float* q, const T* k, const T* v, int64_t chan, int n, bool more, Seen& seen) {
        by_heads(G, [&](auto m, int g) { score<m>(q + g * seen.D, seen.D, k, chan, &p[g * M], more && !g); });
        for (int g = 0; g < G; g++) {
            float shrink = seen.soften(g, &p[g * M], n, M);
            if (shrink != 1)
                for (int r = 0; r < R_V; r++) store(&wide[(g * R_V + r) * L], load(&wide[(g * R_V + r) * L]) * shrink);
        }
        by_heads(G, [&](auto m, int g) { weigh<m>(&p[g * M], v, chan, &wide[g * R_V * L], more && !g); });
    }
};

}  // namespace

extern "C" {

// q [B, H * G, D]; latents of which row b holds the first stored[b]; bases [B or 1, H, D, R], a row stride of 0 where all
// rows share one; full-rank tokens [B, H, F, D] of which those are there that `filled` [B, F] tells.
void kvf_lowrank_attention(int64_t is_bf16, const void* q, const void* k, const void* v, const float* k_basis,
                           const float* v_basis, const int64_t* stored, const void* k_full, const void* v_full,
                           const uint8_t* filled, void* out, int64_t q_row, int64_t q_head, int64_t k_row, int64_t k_head,
                           int64_t v_row, int64_t v_head, int64_t chan, int64_t k_basis_row, int64_t v_basis_row,
                           int64_t B, int64_t H, int64_t G, int64_t D, int64_t R_K, int64_t R_V, int64_t F,
                           int64_t threads) {
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
                seen.top[g] = lse[head] * LOG2_E, seen.total[g] = 1;
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
                    store((T*)out + (group * G + g) * D + d, load(&seen.y[g * D + d]) / std::max(seen.total[g], 1e-30f));
        })
}
}
