// Blocks of tokens: a group's G query heads times rows of keys, and their weights times rows of values.
//
// Rows are fp32 or bf16 (template argument T), sums are in fp32.
#pragma once
#include "vectors.h"

namespace {

constexpr int N = 32;  // tokens of a block: keys and values of 128 channels fill L1

// f(n, g) for the n query heads from g on, n a constant: as many at a time as leave enough registers for the rows.
template <class F> void by_heads(int G, F f) {
    int g = 0;
    for (; G - g >= 4; g += 4) f(std::integral_constant<int, 4>(), g);
    for (; G - g >= 2; g += 2) f(std::integral_constant<int, 2>(), g);
    for (; G - g >= 1; g += 1) f(std::integral_constant<int, 1>(), g);
}

// The rows of the next block. They are prefetched a few at a time between computations: if all were requested at once,
// the processor would wait for them before computing.
template <class T> struct Next {
    const T *k[N], *v[N];
    int n = 0;
};

template <class T> void prefetch_row(const T* row, int D) {  // into L2, to which more may be in flight than to L1
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

// A group's queries [G, D] in fp32, and how they, and the softmax weights, are multiplied with rows
struct Plain {
    const float* q;
    explicit Plain(const float* q, int = 0, int = 0) : q(q) {}

    template <int G, class T>
    void products(int first, const T* const* k, int n, int D, float* logits, const Next<T>& next) const {
        dots<G>(q + first * D, k, n, D, logits, next);
    }
    template <int G, class T>
    void weigh(const float* p, const T* const* v, int n, int D, float* y, const Next<T>& next) const {
        ::weigh<G>(p, v, n, D, y, next);
    }
};

}  // namespace
