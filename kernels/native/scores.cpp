// Scores of tokens: by inner products, and by table look-up.
#include "channels.h"

namespace {

constexpr int64_t SCORED = 4096;  // tokens of a work item

// Prefetches what lies a page behind some bytes: a processor does not prefetch beyond the end of a page
void fetch_ahead(const void* from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)from + 4096 + b);
}

// The words of n tokens of W bytes each, the last word padded with zeros -> [words, n], `row` apart. `behind` more
// tokens after these may be read.
void words_of(const uint8_t* from, int64_t W, int n, int64_t behind, uint32_t* to, int64_t row) {
    int t = 0;
    if (W == 4) return (void)std::memcpy(to, from, n * 4);
    if (W == 16 || W == 8)  // 128 or 64 channels
        for (; t + L <= n; t += L) (W == 16 ? transpose4 : transpose2)(from + t * W, to + t, row);
    uint32_t last = W % 4 ? (1u << W % 4 * 8) - 1 : ~0u;
    for (int i = t; i < n; i++)
        for (int64_t w = 0; w * 4 < W; w++) {
            const uint8_t* at = from + i * W + w * 4;
            uint32_t word = 0;
            // a copy of 4 bytes is one instruction: it may reach into the tokens that follow, if there are any
            if (w * 4 + 4 <= W || i + 3 < n + behind) std::memcpy(&word, at, 4);
            else std::memcpy(&word, at, W - w * 4);
            to[w * row + i] = w * 4 + 4 < W ? word : word & last;
        }
}

// Scores [B, H, C, n] to write: strides in numbers
struct Scores {
    float* at;
    int64_t row, head, query;

    float* of(int64_t b, int64_t h, int64_t c) const { return at + b * row + h * head + c * query; }
};

// C queries [B * H, C, R] in fp32, contiguous, each padded with zeros to whole vectors, and the number of tokens to
// score: n, or only those up to pos [B] if it is given
struct Scored {
    const float* q;
    int64_t B, H, C, R, n;
    const int64_t* pos;
    int64_t threads;
};

int64_t whole(int64_t n) { return (n + L - 1) / L * L; }

// Inner products of the queries of each head with rows of R numbers. If these are not whole vectors, one lies at the
// end of the other
template <class T> void head_scores(const Scored& of, const Cache<T>& x, const Scores& out) {
    const int64_t B = of.B, H = of.H, C = of.C, n = of.n, threads = of.threads, R = whole(of.R);
    const int64_t over = (R - of.R + x.slot - 1) / x.slot;  // so many rows a vector reaches into
    int64_t parts = (n + SCORED - 1) / SCORED;
    static const Next<T> nothing{};  // for all query heads but the first few
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> products(C * N);
        std::vector<T> ends(over * R);  // the last rows, padded: what follows them may be NaN
        Next<T> block[2];
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, n, of.pos ? of.pos[b] + 1 : n});
            const T* from = x.of(b, h);
            const int64_t last = std::max<int64_t>(0, std::min(n, of.pos ? of.pos[b] + 1 : n) - over);
            for (int64_t t = last; t < last + over && t < hi; t++)
                std::copy_n(from + t * x.slot, of.R, ends.data() + (t - last) * R);
            auto rows = [&](int64_t first, Next<T>& to) {
                to.n = (int)std::max<int64_t>(0, std::min<int64_t>(N, hi - first));
                for (int i = 0; i < to.n; i++)
                    to.k[i] =
                        first + i < last || !over ? from + (first + i) * x.slot : ends.data() + (first + i - last) * R;
            };
            rows(lo, block[0]);
            for (int64_t first = lo, i = 0; first < hi; first += N, i ^= 1) {
                rows(first + N, block[i ^ 1]);
                by_heads((int)C, [&](auto m, int c) {
                    dots<m>(of.q + (group * C + c) * R, block[i].k, block[i].n, (int)R, &products[c * N],
                            c ? nothing : block[i ^ 1]);
                });
                for (int64_t c = 0; c < C; c++) std::copy_n(&products[c * N], block[i].n, out.of(b, h, c) + first);
            }
        }
    }
}

// Sums over R channels [B * H, R] of queries times keys that lie channel by channel: channels are the slots of a Cache
template <class T>
void channel_scores(const Scored& of, const int64_t* channels, const Cache<T>& keys, const Scores& out) {
    const int64_t B = of.B, H = of.H, C = of.C, R = of.R, n = of.n, threads = of.threads, apart = whole(R);
    constexpr int64_t RUN = 512;  // tokens whose scores stay in L1 while all channels are added
    int64_t parts = (n + SCORED - 1) / SCORED;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> sums(C * RUN);
        std::vector<const T*> rows(R);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, n, of.pos[b] + 1});
            const T* from = keys.of(b, h);
            for (int64_t first = lo; first < hi; first += RUN) {
                int64_t m = std::min(RUN, hi - first), vectors = m / L * L;
                for (int64_t r = 0; r < R; r++) rows[r] = from + channels[group * R + r] * keys.slot + first;
                by_heads((int)C, [&](auto m, int c) {
                    score_rows<m>({of.q + (group * C + c) * apart, (int)apart}, rows.data(), (int)R,
                                  {&sums[c * RUN], (int)RUN}, (int)vectors);
                });
                for (int64_t t = vectors; t < m; t++)
                    for (int64_t c = 0; c < C; c++) {
                        float score = 0;
                        for (int64_t r = 0; r < R; r++) score += number(rows[r][t]) * of.q[(group * C + c) * apart + r];
                        sums[c * RUN + t] = score;
                    }
                for (int64_t c = 0; c < C; c++) std::copy_n(&sums[c * RUN], m, out.of(b, h, c) + first);
            }
        }
    }
}

// e^(x - most) of n numbers, of which `most` is the largest; `to` has whole vectors -> the sum
float soften(const float* x, int64_t n, float* to) {
    if (n % L) std::fill_n(to + n / L * L, L, -INFINITY);
    std::copy_n(x, n, to);
    vf high = all(-INFINITY), sums = {};
    for (int64_t t = 0; t < n; t += L) {
        const vf y = load(to + t);
        high = y > high ? y : high;
    }
    const vf most = all(largest(high));
    for (int64_t t = 0; t < n; t += L) {
        const vf y = load(to + t), e = y == -INFINITY ? vf{} : exp2_of((y - most) * LOG2_E);
        store(to + t, e), sums += e;
    }
    return sum(sums);
}

// Logits [B, H, G, n] of tokens up to pos [B]: strides in numbers
struct Logits {
    const float* at;
    int64_t row, head, query, B, H, G, n;
    const int64_t* pos;
    int64_t threads;

    const float* of(int64_t b, int64_t h, int64_t g) const { return at + b * row + h * head + g * query; }
    int64_t there(int64_t b) const { return std::max<int64_t>(0, std::min(pos[b] + 1, n)); }
};

// The softmax of each query, averaged over a group, and zeros behind pos -> [B, H, n]
void mean_softmax(const Logits& of, float* out) {
    std::fill_n(out, of.B * of.H * of.n, 0.0f);
#pragma omp parallel for num_threads(of.threads)
    for (int64_t i = 0; i < of.B * of.H; i++) {
        const int64_t n = of.there(i / of.H);
        std::vector<float> weight(whole(n));
        for (int64_t g = 0; g < of.G && n; g++) {
            const float by = 1 / (soften(of.of(i / of.H, i % of.H, g), n, weight.data()) * (float)of.G);
            for (int64_t t = 0; t < n; t++) out[i * of.n + t] += weight[t] * by;
        }
    }
}

// The share of each query's softmax that a list of its tokens has, each list for G queries -> [B * H, G]
void listed_share(const Logits& of, const List& list, float* out) {
#pragma omp parallel for num_threads(of.threads)
    for (int64_t i = 0; i < of.B * of.H * of.G; i++) {
        const int64_t b = i / of.G / of.H, h = i / of.G % of.H, n = of.there(b), *idx = list.idx.of(b, h);
        std::vector<float> weight(whole(n));
        const float total = soften(of.of(b, h, i % of.G), n, weight.data());
        float own = 0;
        for (int64_t c = 0; c < *list.count.of(b, h); c++) own += weight[idx[c]];
        out[i] = std::min(1.0f, own / total);
    }
}

// Upper bounds of the products of the queries of each head with the keys of pages: a positive channel of a query takes
// the highest number of a page, a negative one the lowest. Pages up to last [B] if it is given
template <class T> void page_scores(const Heads<T>& q, const Cache<T>& low, const Cache<T>& high, int64_t pages,
                                    const int64_t* last, const PerHead<float>& out) {
#pragma omp parallel for num_threads(q.threads) if (q.B * q.H * pages > 64)
    for (int64_t i = 0; i < q.B * q.H; i++) {
        const int64_t b = i / q.H, h = i % q.H, n = last ? std::min(last[b] + 1, pages) : pages;
        std::vector<float> up(q.D), down(q.D);
        for (int64_t g = 0; g < q.G; g++)
            for (int64_t d = 0; d < q.D; d++) {
                const float x = number(q.of(b, h)[g * q.head + d]);
                (x > 0 ? up : down)[d] += x;
            }
        const T *lowest = low.of(b, h), *highest = high.of(b, h);
        for (int64_t p = 0; p < n; p++, lowest += low.slot, highest += high.slot) {
            vf score = {};
            for (int64_t d = 0; d < q.D; d += L)
                score += load(&up[d]) * load(highest + d) + load(&down[d]) * load(lowest + d);
            out.of(b, h)[p] = sum(score);
        }
    }
}

// Minus the cosine of each of the first filled[b] keys with their anchor, the mean of their directions; then zeros, to
// [B, H, N]
template <class T> void distinct(const Cache<T>& keys, const int64_t* filled, int64_t B, int64_t H, int64_t N,
                                 int64_t D, int64_t threads, float* out) {
    const auto dot = [D](const auto* x, const auto* y) {
        vf product = {};
        for (int64_t d = 0; d < D; d += L) product += load(x + d) * load(y + d);
        return sum(product);
    };
    const auto inverse_norm = [&](const auto* x) { return 1 / std::max(std::sqrt(dot(x, x)), 1e-12f); };
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < B * H; i++) {
        const int64_t b = i / H, n = filled[b], slot = keys.slot;
        const T* k = keys.of(b, i % H);
        float* score = out + i * N;
        std::vector<float> anchor(D);
        for (int64_t t = 0; t < n; t++) {
            score[t] = inverse_norm(k + t * slot);
            for (int64_t d = 0; d < D; d += L) store(&anchor[d], load(&anchor[d]) + load(k + t * slot + d) * score[t]);
        }
        const float scale = -inverse_norm(anchor.data());
        for (int64_t t = 0; t < n; t++) score[t] *= dot(k + t * slot, anchor.data()) * scale;
        std::fill(score + n, score + N, 0.0f);
    }
}

// Codes of 4 bits [B, H, T, W bytes], scored by look-up
struct LookedUp {
    const float* table;  // [B * H, words * 8, 16]: what each value of each code adds to a token's score
    PerHead<const uint8_t> codes;
    PerHead<const uint16_t> params;  // [B, H, T, 2], or null: a score is scale * sum + zero * total
    const float* total;              // [B * H], with params
    const int64_t *pos, *skip;       // pos [B], or null; skip [B, H, n_skip]: slots whose score is -infinity
    int64_t n_skip, B, H, T, W, threads;
};

void look_up(const LookedUp& of, const PerHead<float>& out) {
    const int64_t B = of.B, H = of.H, T = of.T, W = of.W, threads = of.threads;
    int64_t words = (W + 3) / 4, parts = (T + SCORED - 1) / SCORED;
    constexpr int BATCH = 256;  // tokens whose words are transposed at a time
#pragma omp parallel num_threads(threads)
    {
        std::vector<uint32_t> turned(words * BATCH);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, T, of.pos ? of.pos[b] + 1 : T});
            const uint8_t* from = of.codes.of(b, h);
            const uint16_t* pairs = of.params ? of.params.of(b, h) : nullptr;
            const Tables tables(of.table + group * words * 8 * ENTRIES, words * 8);
            float* to = out.of(b, h);
            for (int64_t first = lo; first < hi; first += BATCH) {
                int n = (int)std::min<int64_t>(BATCH, hi - first);
                fetch_ahead(from + first * W, n * W);
                if (pairs) fetch_ahead(pairs + first * 2, n * 4);
                words_of(from + first * W, W, n, hi - first - n, turned.data(), BATCH);
                for (int t = 0; t < n; t += LOOKED_UP * L) {
                    vf score[LOOKED_UP] = {};
                    for (int64_t w = 0; w < words; w++) tables.add_entries(w, &turned[w * BATCH + t], score);
                    for (int i = 0; i < LOOKED_UP && t + i * L < n; i++) {
                        int64_t at = first + t + i * L;
                        int some = std::min(L, n - t - i * L);
                        if (pairs) {  // fp16 scale, then zero
                            vu both = load_some<vu>(pairs + at * 2, some);
                            score[i] =
                                half_to_float(both & 0xffff) * score[i] + half_to_float(both >> 16) * of.total[group];
                        }
                        if (some == L) store(to + at, score[i]);
                        else std::memcpy(to + at, &score[i], some * 4);
                    }
                }
            }
            for (int64_t i = 0; i < of.n_skip; i++) {
                int64_t slot = of.skip[group * of.n_skip + i];
                if (slot >= lo && slot < hi) to[slot] = -INFINITY;
            }
        }
    }
}

}  // namespace
