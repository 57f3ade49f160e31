// Attention over latents in their own space, and over keys that were expanded from latents, rotated here.
#include "softmax.h"

namespace {

// ---- in the latent space, tokens side by side: coordinate c of token t at c * chan + t ----

// What a part has seen of latents. The weighted coordinates stay 16 sums each until the end.
struct Latents {
    static constexpr int V = 4, M = V * L;  // vectors, tokens of a block
    int G, R_K, R_V;  // coordinates of a key and of a value
    std::vector<float> p, wide;

    Latents(int G, int R_K, int R_V) : G(G), R_K(R_K), R_V(R_V), p(G * M), wide(G * R_V * L) {}

    template <int N_Q, class T> void score(const float* q, int D, const T* k, int64_t chan, float* out, bool more) {
        vf acc[N_Q][V] = {};
        for (int r = 0; r < R_K; r++, k += chan) {
            if (more) prefetch_row(k + M, M);
            for (int j = 0; j < V; j++) {
                vf x = load(k + j * L);
                for (int g = 0; g < N_Q; g++) acc[g][j] += x * q[g * D + r];
            }
        }
        for (int g = 0; g < N_Q; g++)
            for (int j = 0; j < V; j++) store(out + g * M + j * L, acc[g][j]);
    }

    template <int N_Q, class T> void weigh(const float* weight, const T* v, int64_t chan, float* to, bool more) {
        vf w[N_Q][V];
        for (int g = 0; g < N_Q; g++)
            for (int j = 0; j < V; j++) w[g][j] = load(weight + g * M + j * L);
        for (int r = 0; r < R_V; r++, v += chan) {
            if (more) prefetch_row(v + M, M);
            vf x[V];
            for (int j = 0; j < V; j++) x[j] = load(v + j * L);
            for (int g = 0; g < N_Q; g++) {
                float* at = to + (g * R_V + r) * L;
                store(at, load(at) + (x[0] * w[g][0] + x[1] * w[g][1] + (x[2] * w[g][2] + x[3] * w[g][3])));
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

// ---- expanded keys ----

constexpr int SOON = 8;  // tokens: what a list names lies anywhere in the tables

// Tokens one by one, each of a key that is rotated at its position and a value of 2, 4, 8 or 16 (T's) bits.
template <class T> struct Rotated {
    Seen& seen;
    const float *q, *cos, *sin;
    int n = 0;
    std::vector<float> rows;
    const float *ks[N], *vs[N];

    Rotated(Seen& seen, const float* q, const float* cos, const float* sin)
        : seen(seen), q(q), cos(cos), sin(sin), rows(2 * N * seen.D) {
        for (int i = 0; i < N; i++) ks[i] = &rows[i * seen.D], vs[i] = &rows[(N + i) * seen.D];
    }

    // the value is row `at` of D channels in `values`
    void add(const T* key, int64_t position, const void* values, const uint16_t* params, int64_t bits, int64_t at) {
        int D = seen.D, half = D / 2;
        float *k = (float*)ks[n], *v = (float*)vs[n];
        for (int d = 0; d < half; d += L) {
            vf a = load(key + d), b = load(key + half + d);
            vf c = load(cos + position * half + d), s = load(sin + position * half + d);
            store(k + d, a * c - b * s), store(k + half + d, b * c + a * s);
        }
        if (bits == 16)
            for (int d = 0; d < D; d += L) store(v + d, load((const T*)values + at * D + d));
        else
            (bits == 2 ? unpack<2> : bits == 4 ? unpack<4> : unpack<8>)(
                (const uint8_t*)values + at * D * bits / 8, params + at * (D / 32) * 2, nullptr, D, v, 32);
        if (++n == N) flush();
    }

    void fetch(int64_t position, const void* values, const uint16_t* params, int64_t bits, int64_t at) const {
        int D = seen.D;
        prefetch_row(cos + position * D / 2, D / 2), prefetch_row(sin + position * D / 2, D / 2);
        const int bytes = bits == 16 ? D * (int)sizeof(T) : (int)(D * bits / 8);
        prefetch_row((const uint8_t*)values + at * bytes, bytes);
        if (bits < 16) __builtin_prefetch(params + at * (D / 32) * 2);
    }

    void flush() {
        if (n) seen.add<float>(q, ks, vs, n);
        n = 0;
    }
};

}  // namespace

extern "C" {

// q [B, H * G, D] fp32 of which R_K coordinates count and the rest is 0; out [B, H * G, D] of which R_V are of use,
// lse [B, H * G]
void kvf_latent_space_attention(int64_t is_bf16, const float* q, const void* k, const void* v, const int64_t* stored,
                                float* out, float* lse, int64_t k_row, int64_t k_head, int64_t v_row, int64_t v_head,
                                int64_t chan, int64_t B, int64_t H, int64_t G, int64_t D, int64_t R_K, int64_t R_V,
                                int64_t channels, int64_t threads) {
    int64_t longest = *std::max_element(stored, stored + B);
    FLOAT_OR_BF16(attention(q, H * G * D, D, out, B, H, G, D, parts_of(longest), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H, h = group % H, lo = part * CHUNK;
            Latents(G, R_K, R_V).see(query, (const T*)k + b * k_row + h * k_head, (const T*)v + b * v_row + h * v_head,
                                     chan, lo, std::min(stored[b], lo + CHUNK), seen);
        }, (int)channels, lse))
}

// Keys in `held` [B, ring, H * D] and `listed` [B, K, H * D] are not rotated yet; the ring's slots and slots idx of the
// store, T_ a row, have the values.
void kvf_latent_attention(int64_t is_bf16, int64_t ring_bits, int64_t bits, const void* q, const void* held,
                          const void* listed, const void* ring_v, const uint16_t* ring_params, const void* v,
                          const uint16_t* params, const int64_t* pos, const int64_t* idx, const int64_t* count,
                          const float* cos, const float* sin, void* out, int64_t q_row, int64_t q_head, int64_t table_row,
                          int64_t B, int64_t H, int64_t G, int64_t D, int64_t T_, int64_t ring, int64_t K,
                          int64_t threads) {
    FLOAT_OR_BF16(attention((const T*)q, q_row, q_head, (T*)out, B, H, G, D, 1 + parts_of(K), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H, h = group % H;
            Rotated<T> to(seen, query, cos + b * table_row, sin + b * table_row);
            if (part == 0)
                for (int64_t s = 0; s < ring; s++) {
                    int64_t at = pos[b] - ((pos[b] - s) % ring + ring) % ring;  // the position that the slot holds
                    if (at >= 0) to.add((const T*)held + ((b * ring + s) * H + h) * D, at, ring_v, ring_params, ring_bits,
                                        (b * ring + s) * H + h);
                }
            else
                for (int64_t i = (part - 1) * CHUNK, stop = std::min({K, count[b], part * CHUNK}); i < stop; i++) {
                    int64_t slot = idx ? idx[b * K + i] : i;
                    if (idx && i + SOON < stop)
                        to.fetch(idx[b * K + i + SOON], v, params, bits, (b * T_ + idx[b * K + i + SOON]) * H + h);
                    to.add((const T*)listed + ((b * K + i) * H + h) * D, slot, v, params, bits, (b * T_ + slot) * H + h);
                }
            to.flush();
        }))
}
}
