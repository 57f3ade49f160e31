// Scores of tokens: by inner products, and by table look-up.
#include "channels.h"

namespace {

constexpr int64_t SCORED = 4096;  // tokens of a work item

constexpr int ENTRIES = 16;  // of a table, one for each value of 4 bits

struct Table {
#if defined(__AVX512F__)
    __m512 at;
    Table(const float* p) : at(_mm512_loadu_ps(p)) {}
    vf operator()(vu i) const { return (vf)_mm512_permutexvar_ps((__m512i)i, at); }  // of i % 16; i has other bits above
#elif defined(__AVX2__)
    __m256 low, high;
    Table(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
    vf operator()(vu i) const {
        return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, (__m256i)i), _mm256_permutevar8x32_ps(high, (__m256i)i),
                                    (__m256)(i << 28));
    }
#else
    const float* at;
    Table(const float* p) : at(p) {}
    vf operator()(vu i) const { vf y; for (int j = 0; j < L; j++) y[j] = at[i[j] & 15]; return y; }
#endif
};

void transpose2(const uint8_t* from, uint32_t* to, int64_t row) {  // [L, 2] words -> [2, L], `row` apart
    vu x = load_as<vu>(from), y = load_as<vu>(from + sizeof x);
    vu first = two_of(x, y, 2 * LANE), second = two_of(x, y, 2 * LANE + 1);
    std::memcpy(to, &first, sizeof first), std::memcpy(to + row, &second, sizeof second);
}

void transpose4(const uint8_t* from, uint32_t* to, int64_t row) {  // [L, 4] words -> [4, L]
    constexpr int HALF = L / 2;
    const vi upper = LANE / HALF, rest = LANE % HALF;
    vu x[4], y[4];
    for (int i = 0; i < 4; i++) x[i] = load_as<vu>(from + i * sizeof x[0]);  // L / 4 tokens each
    for (int i = 0; i < 4; i += 2)  // half of the tokens' words 0 and 1, or 2 and 3
        for (int j = 0; j < 2; j++) y[i + j] = two_of(x[i], x[i + 1], 4 * rest + upper + 2 * j);
    for (int i = 0; i < 2; i++) {
        vu first = two_of(y[i], y[i + 2], upper * L + rest), second = two_of(y[i], y[i + 2], upper * L + rest + HALF);
        std::memcpy(to + 2 * i * row, &first, sizeof first), std::memcpy(to + (2 * i + 1) * row, &second, sizeof second);
    }
}

// Inner products of C queries q [B * H, C, R] of each head with rows of R numbers that are `slot` apart.
template <class T>
void head_scores(const float* q, const T* x, const int64_t* pos, float* out, int64_t row, int64_t head, int64_t slot,
                 int64_t out_row, int64_t out_head, int64_t out_query, int64_t B, int64_t H, int64_t C, int64_t n, int64_t R,
                 int64_t threads) {
    int64_t parts = (n + SCORED - 1) / SCORED;
    static const Next<T> nothing{};  // for all query heads but the first few
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> products(C * N);
        Next<T> block[2];
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, n, pos ? pos[b] + 1 : n});
            const T* from = x + b * row + h * head;
            auto rows = [&](int64_t first, Next<T>& to) {
                to.n = (int)std::max<int64_t>(0, std::min<int64_t>(N, hi - first));
                for (int i = 0; i < to.n; i++) to.k[i] = from + (first + i) * slot;
            };
            rows(lo, block[0]);
            for (int64_t first = lo, i = 0; first < hi; first += N, i ^= 1) {
                rows(first + N, block[i ^ 1]);
                by_heads((int)C, [&](auto m, int c) {
                    dots<m>(q + (group * C + c) * R, block[i].k, block[i].n, (int)R, &products[c * N],
                            c ? nothing : block[i ^ 1]);
                });
                for (int64_t c = 0; c < C; c++)
                    std::copy_n(&products[c * N], block[i].n, out + b * out_row + h * out_head + c * out_query + first);
            }
        }
    }
}

// Sums over R channels of C queries q [B * H, C, R] times keys that lie channel by channel.
template <class T>
void channel_scores(const float* q, const int64_t* channels, const T* keys, const int64_t* pos, float* out, int64_t row,
                    int64_t head, int64_t channel, int64_t out_row, int64_t out_head, int64_t out_query, int64_t B,
                    int64_t H, int64_t C, int64_t n, int64_t R, int64_t threads) {
    constexpr int64_t RUN = 512;  // tokens whose scores stay in a first-level cache while the channels pass by
    int64_t parts = (n + SCORED - 1) / SCORED;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> sums(C * RUN);
        std::vector<const T*> rows(R);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, n, pos[b] + 1});
            const T* from = keys + b * row + h * head;
            for (int64_t first = lo; first < hi; first += RUN) {
                int64_t m = std::min(RUN, hi - first), whole = m / L * L;
                for (int64_t r = 0; r < R; r++) rows[r] = from + channels[group * R + r] * channel + first;
                by_heads((int)C, [&](auto m, int c) {
                    score_rows<m>(q + (group * C + c) * R, (int)R, rows.data(), (int)R, &sums[c * RUN], (int)RUN, (int)whole);
                });
                for (int64_t t = whole; t < m; t++)
                    for (int64_t c = 0; c < C; c++) {
                        float score = 0;
                        for (int64_t r = 0; r < R; r++) score += number(rows[r][t]) * q[(group * C + c) * R + r];
                        sums[c * RUN + t] = score;
                    }
                for (int64_t c = 0; c < C; c++)
                    std::copy_n(&sums[c * RUN], m, out + b * out_row + h * out_head + c * out_query + first);
            }
        }
    }
}

}  // namespace

extern "C" {

void kvf_channel_scores(int64_t is_bf16, const float* q, const int64_t* channels, const void* keys, const int64_t* pos,
                        float* out, int64_t row, int64_t head, int64_t channel, int64_t out_row, int64_t out_head,
                        int64_t out_query, int64_t B, int64_t H, int64_t C, int64_t n, int64_t R, int64_t threads) {
    FLOAT_OR_BF16(channel_scores(q, channels, (const T*)keys, pos, out, row, head, channel, out_row, out_head, out_query,
                                 B, H, C, n, R, threads))
}

void kvf_head_scores(int64_t is_bf16, const float* q, const void* x, const int64_t* pos, float* out, int64_t row,
                     int64_t head, int64_t slot, int64_t out_row, int64_t out_head, int64_t out_query, int64_t B,
                     int64_t H, int64_t C, int64_t n, int64_t R, int64_t threads) {
    FLOAT_OR_BF16(head_scores(q, (const T*)x, pos, out, row, head, slot, out_row, out_head, out_query, B, H, C, n, R,
                              threads))
}

// table [B * H, words * 8, 16]: what each value of each of a token's 4-bit codes adds to its score; W bytes a token
void kvf_look_up(const float* table, const uint8_t* codes, const uint16_t* params, const float* total, const int64_t* pos,
                 const int64_t* skip, float* out, int64_t code_row, int64_t code_head, int64_t param_row,
                 int64_t param_head, int64_t out_row, int64_t out_head, int64_t B, int64_t H, int64_t T, int64_t W,
                 int64_t n_skip, int64_t threads) {
    int64_t words = (W + 3) / 4, parts = (T + SCORED - 1) / SCORED;
    constexpr int BATCH = 256;  // tokens whose words are transposed at a time
#pragma omp parallel num_threads(threads)
    {
        std::vector<uint32_t> turned(words * BATCH);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, T, pos ? pos[b] + 1 : T});
            const uint8_t* from = codes + b * code_row + h * code_head;
            const uint16_t* pairs = params ? params + b * param_row + h * param_head : nullptr;
            const float* entries = table + group * words * 8 * ENTRIES;
            float* to = out + b * out_row + h * out_head;
            for (int64_t first = lo; first < hi; first += BATCH) {
                int n = (int)std::min<int64_t>(BATCH, hi - first);
                int t = 0;
                if (W == 16 || W == 8)  // 128 or 64 channels
                    for (; t + L <= n; t += L)
                        (W == 16 ? transpose4 : transpose2)(from + (first + t) * W, &turned[t], BATCH);
                for (; t < n; t++)
                    for (int64_t w = 0; w < words; w++) {
                        uint32_t word = 0;
                        std::memcpy(&word, from + (first + t) * W + w * 4, std::min<int64_t>(4, W - w * 4));
                        turned[w * BATCH + t] = word;
                    }
                for (int t = 0; t < n; t += 2 * L) {  // two vectors: a table is loaded once for them
                    vf score[2] = {};
                    for (int64_t w = 0; w < words; w++) {
                        vu one = load_as<vu>(&turned[w * BATCH + t]), two = load_as<vu>(&turned[w * BATCH + t + L]);
                        for (int c = 0; c < 8; c++) {
                            const Table entry(entries + (w * 8 + c) * ENTRIES);
                            score[0] += entry(one >> (4 * c)), score[1] += entry(two >> (4 * c));
                        }
                    }
                    for (int i = 0; i < 2 && t + i * L < n; i++) {
                        int64_t at = first + t + i * L;
                        int some = std::min(L, n - t - i * L);
                        if (pairs) {  // fp16 scale, then zero
                            vu both = load_some<vu>(pairs + at * 2, some);
                            score[i] = half_to_float(both & 0xffff) * score[i] + half_to_float(both >> 16) * total[group];
                        }
                        if (some == L) store(to + at, score[i]);
                        else std::memcpy(to + at, &score[i], some * 4);
                    }
                }
            }
            for (int64_t i = 0; i < n_skip; i++) {
                int64_t slot = skip[group * n_skip + i];
                if (slot >= lo && slot < hi) to[slot] = -INFINITY;
            }
        }
    }
}
}
