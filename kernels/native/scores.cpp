// Scores of tokens: by inner products, and by table look-up.
#include "channels.h"
#include "tiles.h"

namespace {

constexpr int64_t SCORED = 4096;  // tokens of a work item

constexpr int ENTRIES = 16;  // of a table, one for each value of 4 bits

// What each of a word's eight codes of 4 bits adds to a token's score, of LOOKED_UP * L tokens at once: tables are
// prepared once, for all tokens of a work item.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int LOOKED_UP = 4;

// Bytes 0 of all words, then bytes 1, 2 and 3: each half of y[i] has those of the same halves of x[0] to x[3].
void bytes_apart(const __m256i* x, __m256i* y) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m256i a = _mm256_shuffle_epi8(x[0], order), b = _mm256_shuffle_epi8(x[1], order);
    __m256i c = _mm256_shuffle_epi8(x[2], order), d = _mm256_shuffle_epi8(x[3], order);
    __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    y[0] = _mm256_unpacklo_epi64(ab, cd), y[1] = _mm256_unpackhi_epi64(ab, cd);
    ab = _mm256_unpackhi_epi32(a, b), cd = _mm256_unpackhi_epi32(c, d);
    y[2] = _mm256_unpacklo_epi64(ab, cd), y[3] = _mm256_unpackhi_epi64(ab, cd);
}

// One instruction looks up 32 bytes in 16, where 8 floats in 16 take two slow ones and a third: each byte of an entry
// is looked up for itself.
struct Tables {
    Room<vi> bytes;
    Tables(const float* entries, int64_t n) : bytes(4 * n) {
        for (int64_t i = 0; i < n; i++, entries += ENTRIES) {
            __m256i quarters[4];
            for (int j = 0; j < 4; j++)
                quarters[j] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(entries + 4 * j)));
            bytes_apart(quarters, (__m256i*)&bytes[4 * i]);
        }
    }

    void add_entries(int64_t word, const uint32_t* words, vf* score) const {
        __m256i x[4], codes[4];
        for (int i = 0; i < 4; i++) x[i] = load_as<__m256i>(words + i * L);
        bytes_apart(x, codes);
        const __m256i low = _mm256_set1_epi8(15);
        for (int c = 0; c < 8; c++) {
            const __m256i* table = (const __m256i*)bytes.at + (word * 8 + c) * 4;
            __m256i at = _mm256_and_si256(c % 2 ? _mm256_srli_epi16(codes[c / 2], 4) : codes[c / 2], low), byte[4];
            for (int i = 0; i < 4; i++) byte[i] = _mm256_shuffle_epi8(table[i], at);
            __m256i a = _mm256_unpacklo_epi8(byte[0], byte[1]), b = _mm256_unpacklo_epi8(byte[2], byte[3]);
            score[0] += (vf)_mm256_unpacklo_epi16(a, b), score[1] += (vf)_mm256_unpackhi_epi16(a, b);
            a = _mm256_unpackhi_epi8(byte[0], byte[1]), b = _mm256_unpackhi_epi8(byte[2], byte[3]);
            score[2] += (vf)_mm256_unpacklo_epi16(a, b), score[3] += (vf)_mm256_unpackhi_epi16(a, b);
        }
    }
};
#else
constexpr int LOOKED_UP = 2;

struct Tables {
    const float* entries;
    Tables(const float* entries, int64_t) : entries(entries) {}

    void add_entries(int64_t word, const uint32_t* words, vf* score) const {
        vu one = load_as<vu>(words), two = load_as<vu>(words + L);
        for (int c = 0; c < 8; c++) {
            const float* table = entries + (word * 8 + c) * ENTRIES;
#if defined(__AVX512F__)
            __m512 at = _mm512_loadu_ps(table);  // of an index, the lowest 4 bits count
            score[0] += (vf)_mm512_permutexvar_ps((__m512i)(one >> (4 * c)), at);
            score[1] += (vf)_mm512_permutexvar_ps((__m512i)(two >> (4 * c)), at);
#else
            for (int j = 0; j < L; j++)
                score[0][j] += table[one[j] >> (4 * c) & 15], score[1][j] += table[two[j] >> (4 * c) & 15];
#endif
        }
    }
};
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
__m256i apart(const uint8_t* p, int behind) {  // 16 bytes, and 16 from `behind` on
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)),
                                   _mm_loadu_si128((const __m128i*)(p + behind)), 1);
}

void transpose2(const uint8_t* from, uint32_t* to, int64_t row) {  // [L, 2] words -> [2, L], `row` apart
    __m256 x = (__m256)apart(from, 32), y = (__m256)apart(from + 16, 32);
    _mm256_storeu_ps((float*)to, _mm256_shuffle_ps(x, y, 0x88));
    _mm256_storeu_ps((float*)(to + row), _mm256_shuffle_ps(x, y, 0xdd));
}

void transpose4(const uint8_t* from, uint32_t* to, int64_t row) {  // [L, 4] words -> [4, L]
    __m256i x[4], low[2], high[2];
    for (int i = 0; i < 4; i++) x[i] = apart(from + 16 * i, 64);  // a token, and the fourth behind it
    for (int i = 0; i < 2; i++)                                   // words 0 and 1, or 2 and 3, of two tokens
        low[i] = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]), high[i] = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    _mm256_storeu_si256((__m256i*)to, _mm256_unpacklo_epi64(low[0], low[1]));
    _mm256_storeu_si256((__m256i*)(to + row), _mm256_unpackhi_epi64(low[0], low[1]));
    _mm256_storeu_si256((__m256i*)(to + 2 * row), _mm256_unpacklo_epi64(high[0], high[1]));
    _mm256_storeu_si256((__m256i*)(to + 3 * row), _mm256_unpackhi_epi64(high[0], high[1]));
}
#else
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
        std::memcpy(to + 2 * i * row, &first, sizeof first),
            std::memcpy(to + (2 * i + 1) * row, &second, sizeof second);
    }
}
#endif

// What lies a page behind some bytes: a processor does not fetch beyond the end of a page by itself
void fetch_ahead(const void* from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)from + 4096 + b);
}

// The words of n tokens of W bytes each, the last filled up with zeros -> [words, n], `row` apart. Behind the n tokens
// `behind` more may be read.
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

// Inner products of C queries q [B * H, C, R] of each head with rows of R numbers that are `slot` apart.
template <class T> void head_scores(const float* q, const T* x, const int64_t* pos, float* out, int64_t row,
                                    int64_t head, int64_t slot, int64_t out_row, int64_t out_head, int64_t out_query,
                                    int64_t B, int64_t H, int64_t C, int64_t n, int64_t R, int64_t threads) {
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
template <class T> void channel_scores(const float* q, const int64_t* channels, const T* keys, const int64_t* pos,
                                       float* out, int64_t row, int64_t head, int64_t channel, int64_t out_row,
                                       int64_t out_head, int64_t out_query, int64_t B, int64_t H, int64_t C, int64_t n,
                                       int64_t R, int64_t threads) {
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
                    score_rows<m>(q + (group * C + c) * R, (int)R, rows.data(), (int)R, &sums[c * RUN], (int)RUN,
                                  (int)whole);
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
    FLOAT_OR_BF16(channel_scores(q, channels, (const T*)keys, pos, out, row, head, channel, out_row, out_head,
                                 out_query, B, H, C, n, R, threads))
}

void kvf_head_scores(int64_t is_bf16, const float* q, const void* x, const int64_t* pos, float* out, int64_t row,
                     int64_t head, int64_t slot, int64_t out_row, int64_t out_head, int64_t out_query, int64_t B,
                     int64_t H, int64_t C, int64_t n, int64_t R, int64_t threads) {
    FLOAT_OR_BF16(
        head_scores(q, (const T*)x, pos, out, row, head, slot, out_row, out_head, out_query, B, H, C, n, R, threads))
}

// table [B * H, words * 8, 16]: what each value of each of a token's 4-bit codes adds to its score; W bytes a token
void kvf_look_up(const float* table, const uint8_t* codes, const uint16_t* params, const float* total,
                 const int64_t* pos, const int64_t* skip, float* out, int64_t code_row, int64_t code_head,
                 int64_t param_row, int64_t param_head, int64_t out_row, int64_t out_head, int64_t B, int64_t H,
                 int64_t T, int64_t W, int64_t n_skip, int64_t threads) {
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
            const Tables tables(table + group * words * 8 * ENTRIES, words * 8);
            float* to = out + b * out_row + h * out_head;
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
                                half_to_float(both & 0xffff) * score[i] + half_to_float(both >> 16) * total[group];
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
