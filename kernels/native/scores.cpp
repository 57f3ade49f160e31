// Scores of tokens: by inner products, and by table look-up.
#include "softmax.h"

namespace {

constexpr int64_t SCORED = 4096;  // tokens of a work item

vf look_up(vf table, vu i) {  // table[i % 16]; i has other bits above
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)i, (__m512)table);
#elif defined(__AVX2__)
    __m256 half[2], out[2]; __m256i at[2];
    std::memcpy(half, &table, sizeof table); std::memcpy(at, &i, sizeof i);
    for (int j = 0; j < 2; j++)
        out[j] = _mm256_blendv_ps(_mm256_permutevar8x32_ps(half[0], at[j]), _mm256_permutevar8x32_ps(half[1], at[j]),
                                  _mm256_castsi256_ps(_mm256_slli_epi32(at[j], 28)));
    vf y; std::memcpy(&y, out, sizeof y); return y;
#else
    vf y; for (int j = 0; j < L; j++) y[j] = table[i[j] & 15]; return y;
#endif
}

void transpose2(const uint8_t* from, uint32_t* to, int64_t row) {  // [16, 2] words -> [2, 16], `row` apart
    vu x = load_as<vu>(from), y = load_as<vu>(from + 64);
    vu first = two_of(x, y, vi{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30});
    vu second = two_of(x, y, vi{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
    std::memcpy(to, &first, 64), std::memcpy(to + row, &second, 64);
}

void transpose4(const uint8_t* from, uint32_t* to, int64_t row) {  // [16, 4] words -> [4, 16]
    vu x[4], y[4];
    for (int i = 0; i < 4; i++) x[i] = load_as<vu>(from + i * 64);  // four tokens each
    for (int i = 0; i < 4; i += 2) {
        y[i] = two_of(x[i], x[i + 1], vi{0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29});
        y[i + 1] = two_of(x[i], x[i + 1], vi{2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31});
    }
    for (int i = 0; i < 2; i++) {
        vu first = two_of(y[i], y[i + 2], vi{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
        vu second = two_of(y[i], y[i + 2], vi{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
        std::memcpy(to + 2 * i * row, &first, 64), std::memcpy(to + (2 * i + 1) * row, &second, 64);
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
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, n, pos[b] + 1});
            const T* from = keys + b * row + h * head;
            for (int64_t first = lo; first < hi; first += RUN) {
                int64_t m = std::min(RUN, hi - first), whole = m / L * L;
                std::fill(sums.begin(), sums.end(), 0.0f);
                for (int64_t r = 0; r < R; r++) {
                    const T* x = from + channels[group * R + r] * channel + first;
                    for (int64_t t = 0; t < whole; t += L) {
                        vf part = load(x + t);
                        for (int64_t c = 0; c < C; c++) {
                            float* to = &sums[c * RUN + t];
                            store(to, load(to) + part * q[(group * C + c) * R + r]);
                        }
                    }
                    for (int64_t t = whole; t < m; t++)
                        for (int64_t c = 0; c < C; c++) sums[c * RUN + t] += number(x[t]) * q[(group * C + c) * R + r];
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
    constexpr int BATCH = 16 * L;  // tokens whose words are transposed at a time
#pragma omp parallel num_threads(threads)
    {
        std::vector<uint32_t> turned(words * BATCH);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, T, pos ? pos[b] + 1 : T});
            const uint8_t* from = codes + b * code_row + h * code_head;
            const uint16_t* pairs = params ? params + b * param_row + h * param_head : nullptr;
            const float* entries = table + group * words * 8 * L;
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
                            vf entry = load(entries + (w * 8 + c) * L);
                            score[0] += look_up(entry, one >> (4 * c)), score[1] += look_up(entry, two >> (4 * c));
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
