// Blocks of tokens: a group's G query heads times rows of keys, and their weights times rows of values.
//
// Rows are fp32 or bf16 (template argument T), sums are in fp32.
#pragma once
#include "vectors.h"

namespace {

constexpr int N = 32;  // tokens of a block: keys and values of 128 channels fill a first-level cache

// f(n, g) for the n query heads from g on, n a constant: as many at a time as leave registers for the rows.
template <class F> void by_heads(int G, F f) {
    int g = 0;
    for (; G - g >= 4; g += 4) f(std::integral_constant<int, 4>(), g);
    for (; G - g >= 2; g += 2) f(std::integral_constant<int, 2>(), g);
    for (; G - g >= 1; g += 1) f(std::integral_constant<int, 1>(), g);
}

// The rows of the block that follows. They are fetched a few at a time between computations: all at once, the processor
// would wait for them first and compute then.
template <class T> struct Next {
    const T *k[N], *v[N];
    int n = 0;
};

template <class T>
void prefetch_row(const T* row, int D) {  // into the second level: more may be under way than to the first
    for (int b = 0; b < D * (int)sizeof(T); b += 64) __builtin_prefetch((const char*)row + b, 0, 2);
}

template <int G, class T> void dots(const float* q, const T* const* k, int n, int D, float* logits,
                                    const Next<T>& next) {  // [G, D] . n rows -> [G, N]
    constexpr int M = L / G;                                // rows at a time, so that a vector holds their logits
    for (int i = 0; i < n; i += M) {
        const T* rows[M];
        for (int m = 0; m < M; m++) rows[m] = k[std::min(i + m, n - 1)];
        for (int j = i; j < std::min(i + M, next.n); j++) prefetch_row(next.k[j], D);
        vf acc[L] = {};
        for (int d = 0; d < D; d += L) {
            vf query[G];
            for (int g = 0; g < G; g++) query[g] = load(q + g * D + d), keep(query[g]);
            for (int m = 0; m < M; m++) {
                vf x = load(rows[m] + d);
                for (int g = 0; g < G; g++) acc[g * M + m] += x * query[g];
            }
        }
        vf y = sums(acc);
        for (int g = 0; g < G; g++) std::memcpy(logits + g * N + i, (const char*)&y + g * M * 4, M * 4);
    }
}

template <int G, int WIDTH = N, class T> void weigh(const float* p, const T* const* v, int n, int D, float* y,
                                                    const Next<T>& next) {  // y [G, D] += p [G, WIDTH] . n rows
    constexpr int M = 2;  // vectors of a row at a time, so that a weight is loaded once for them. D is a multiple of L
    int steps = (D + M * L - 1) / (M * L), each = (N + steps - 1) / steps;
    for (int d = 0, from = 0; d < D; d += M * L, from += each) {
        int second = d + L < D ? L : 0;  // an odd last vector is computed twice
        for (int j = from; j < std::min(from + each, next.n); j++) prefetch_row(next.v[j], D);
        vf acc[M][G];
        for (int g = 0; g < G; g++) acc[0][g] = load(y + g * D + d), acc[1][g] = load(y + g * D + d + second);
        for (int i = 0; i < n; i++) {
            vf x = load(v[i] + d), z = load(v[i] + d + second);
            for (int g = 0; g < G; g++) {
                vf weight = all(p[g * WIDTH + i]);
                acc[0][g] += x * weight, acc[1][g] += z * weight;
            }
        }
        for (int g = 0; g < G; g++) store(y + g * D + d, acc[0][g]), store(y + g * D + d + second, acc[1][g]);
    }
}

// A group's queries [G, D] in fp32, and how they, and softmax's weights, are multiplied with rows
struct Plain {
    const float* q;

    template <int G, class T>
    void products(int first, const T* const* k, int n, int D, float* logits, const Next<T>& next) const {
        dots<G>(q + first * D, k, n, D, logits, next);
    }
    template <int G, class T>
    void weigh(const float* p, const T* const* v, int n, int D, float* y, const Next<T>& next) const {
        ::weigh<G>(p, v, n, D, y, next);
    }
};

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
// ---- two numbers of bf16 at a time ----
//
// Rows of bf16 as they are, where they became fp32 half a vector at a time. What they are multiplied with is a sum of
// two numbers of bf16, so that 16 of fp32's 24 bits count. Measured on Zen 4; where there are tiles not tried.
#define PAIRED

const int PAIR = 2 * L;  // numbers of a vector
typedef uint16_t Each __attribute__((vector_size(L * 4)));

__mmask32 those(int n) { return n < PAIR ? (1u << n) - 1 : ~0u; }  // the first n, more than 0
Each load_pairs(const bf16* p, __mmask32 some) { return (Each)_mm512_maskz_loadu_epi16(some, p); }
vf add_products(vf sum, Each x, Each y) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y); }

void two_parts(vf a, vf b, bf16* high, bf16* low) {  // of L numbers each
    for (bf16* to : {high, low}) {
        const auto both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(to, &both, sizeof both);
        a -= load(to), b -= load(to + L);
    }
}

// A group's queries [G, D] as two parts of bf16; of one if nothing is left for the other, as of queries that were bf16.
// M = L / n lanes of a vector belong to each of n heads that are multiplied at a time, for 2 M channels: a row's are
// spread over all lanes, and what a lane adds up is only to be added to its M - 1 neighbours' of the same head.
struct Paired {
    int64_t size;
    bool two = false;
    std::vector<bf16> parts;  // [2, as by_heads splits G, channels / 2 M, n, 2 M], channels filled up with zeros

    Paired(const float* q, int G, int D) : size(G * filled(D)), parts(2 * size) {
        alignas(64) bf16 part[2][PAIR];
        by_heads(G, [&](auto n, int g) {
            constexpr int C = PAIR / n;
            for (int k = 0; k < n; k++)
                for (int d = 0; d < D; d += PAIR) {
                    const float* from = q + (g + k) * D + d;
                    two_parts(load(from), d + L < D ? load(from + L) : vf{}, part[0], part[1]);
                    two |= any((load_as<vu>(part[1]) & 0x7fff7fff) != 0);
                    for (int i = 0; i < PAIR; i += C) {
                        bf16* to = at(g, D) + (d + i) * n + k * C;
                        std::memcpy(to, part[0] + i, C * sizeof *to),
                            std::memcpy(to + size, part[1] + i, C * sizeof *to);
                    }
                }
        });
    }
    static int64_t filled(int D) { return (D + PAIR - 1) / PAIR * PAIR; }
    bf16* at(int g, int D) { return &parts[g * filled(D)]; }

    template <int G>
    void products(int first, const bf16* const* k, int n, int D, float* logits, const Next<bf16>& next) const {
        const bf16* q = &parts[first * filled(D)];
        two ? dots<G, true>(q, k, n, D, logits, next) : dots<G, false>(q, k, n, D, logits, next);
    }
    template <int G, bool TWO>
    void dots(const bf16* q, const bf16* const* k, int n, int D, float* logits, const Next<bf16>& next) const;
    template <int G>
    void weigh(const float* p, const bf16* const* v, int n, int D, float* y, const Next<bf16>& next) const;
};

template <int M> Each spread(const bf16* p, __mmask32 some) {  // 2 M numbers over all lanes
    if constexpr (M == 4) return (Each)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
    else if constexpr (M == 8) return (Each)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
    else return load_pairs(p, some);
}

template <int G, bool TWO> __attribute__((noinline))  // or its pointers do not stay in registers
void Paired::dots(const bf16* q, const bf16* const* k, int n, int D, float* logits, const Next<bf16>& next) const {
    constexpr int M = L / G, ROWS = M > 8 ? M : 8;  // as many sums at a time as hide how late a product comes
    for (int i = 0; i < n; i += ROWS) {
        const bf16* rows[ROWS];
        for (int m = 0; m < ROWS; m++) rows[m] = k[std::min(i + m, n - 1)];
        const int more = std::min(ROWS, next.n - i);
        vf acc[ROWS] = {};
        const bf16* query = q;
        for (int d = 0; d < D; d += 2 * M, query += PAIR) {
            const Each high = load_pairs(query, ~0u), low = TWO ? load_pairs(query + size, ~0u) : Each{};
            const __mmask32 some = M == L ? those(D - d) : ~0u;
            if (d % PAIR == 0)
                for (int m = 0; m < more; m++) prefetch_row(next.k[i + m] + d, 1);
            for (int m = 0; m < ROWS; m++) {
                const Each row = spread<M>(rows[m] + d, some);
                acc[m] = add_products(acc[m], row, high);
                if (TWO) acc[m] = add_products(acc[m], row, low);
            }
        }
        for (int m = 0; m < ROWS; m += M) {
            vf y = joined<1, M>(acc + m);
            for (int g = 0; g < G; g++) std::memcpy(logits + g * N + i + m, (const char*)&y + g * M * 4, M * 4);
        }
    }
}

// y [G, D] += p [G, N] . n rows, two of them at a time. Weights behind the first n are 0
template <int G> __attribute__((noinline)) void Paired::weigh(const float* p, const bf16* const* v, int n, int D,
                                                              float* y, const Next<bf16>& next) const {
    static_assert(N == PAIR);
    alignas(64) bf16 weights[G][2][N];
    for (int g = 0; g < G; g++) two_parts(load(p + g * N), load(p + g * N + L), weights[g][0], weights[g][1]);
    const vi one = LANE / 4 % 2 * L + LANE / 8 * 4 + LANE % 4, two = one + 8;  // channels in their order
    for (int d = 0; d < D; d += PAIR) {
        const __mmask32 some = those(D - d);
        vf acc[G][2] = {};  // by fours of channels in turns
        for (int i = 0; i < n; i += 2) {
            for (int j = i; j < std::min(i + 2, next.n); j++) prefetch_row(next.v[j] + d, 1);
            const __m512i a = (__m512i)load_pairs(v[i] + d, some),
                          b = (__m512i)load_pairs(v[std::min(i + 1, n - 1)] + d, some);
            const Each x[2] = {(Each)_mm512_unpacklo_epi16(a, b), (Each)_mm512_unpackhi_epi16(a, b)};
            for (int g = 0; g < G; g++)
                for (int part = 0; part < 2; part++) {
                    const Each w = (Each)_mm512_set1_epi32(load_as<int32_t>(&weights[g][part][i]));
                    for (int j = 0; j < 2; j++) acc[g][j] = add_products(acc[g][j], x[j], w);
                }
        }
        for (int g = 0; g < G; g++) {
            float* to = y + g * D + d;
            store(to, load(to) + two_of(acc[g][0], acc[g][1], one));
            if (d + L < D) store(to + L, load(to + L) + two_of(acc[g][0], acc[g][1], two));
        }
    }
}
#endif

}  // namespace
