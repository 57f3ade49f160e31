// Sums over tokens that lie side by side, with a row of memory for each channel. A few rows are read along at a time:
// all rows of a few tokens would be many short pieces, which memory delivers more slowly.
#pragma once
#include "softmax.h"

namespace {

constexpr int ALONG = 16;  // rows that are scored along

// Rows of numbers, `apart` from each other
template <class T> struct Apart {
    T* at;
    int apart;

    T* operator[](int i) const { return at + i * apart; }
};

// Adds the products of queries q, a row each, with n rows to C scores of V vectors of tokens from t on; prefetches the
// next n rows.
template <int C, int V, class T>
void add_scores(Apart<const float> q, const T* const* rows, int n, bool more, int t, Apart<float> to) {
    vf acc[C][V];
    for (int c = 0; c < C; c++)
        for (int j = 0; j < V; j++) acc[c][j] = load(to[c] + t + j * L);
    for (int r = 0; r < n; r++) {
        if (more) prefetch_row(rows[r + n] + t, V * L);
        for (int j = 0; j < V; j++) {
            vf x = load(rows[r] + t + j * L);
            for (int c = 0; c < C; c++) acc[c][j] += x * q[c][r];
        }
    }
    for (int c = 0; c < C; c++)
        for (int j = 0; j < V; j++) store(to[c] + t + j * L, acc[c][j]);
}

// Scores of n tokens, in whole vectors: C queries of R numbers times R rows.
template <int C, class T> void score_rows(Apart<const float> q, const T* const* rows, int R, Apart<float> to, int n) {
    constexpr int V = C > 2 ? L / 4 : L / 2;  // as many sums as registers allow
    for (int c = 0; c < C; c++) std::fill_n(to[c], n, 0.0f);
    for (int r = 0; r < R; r += ALONG) {
        int some = std::min(ALONG, R - r), t = 0;
        bool more = r + 2 * ALONG <= R;
        for (; t + V * L <= n; t += V * L) add_scores<C, V>({q.at + r, q.apart}, rows + r, some, more, t, to);
        for (; t < n; t += L) add_scores<C, 1>({q.at + r, q.apart}, rows + r, some, more, t, to);
    }
}

// Multiplies sums [C, R, L] by shrink [C], and adds the products of C rows of weights of n tokens, in whole vectors,
// with R rows.
template <int C, class T>
void weigh_rows(Apart<const float> weight, const T* const* rows, int R, const float* shrink, float* to, int n) {
    constexpr int W = L / C;  // rows at a time, as many sums as registers allow
    for (int r = 0; r < R; r += W) {
        const T *x[W], *next[W];
        for (int w = 0; w < W; w++)  // the last row may be repeated
            x[w] = rows[std::min(r + w, R - 1)], next[w] = rows[std::min(r + w + 2 * W, R - 1)];
        vf sum[C][W] = {};
        for (int t = 0; t < n; t += L) {
            if (t % (64 / (int)sizeof(T)) == 0)
                for (int w = 0; w < W; w++) prefetch_row(next[w] + t, 1);
            vf p[C];
            for (int c = 0; c < C; c++) p[c] = load(weight[c] + t), keep(p[c]);
            for (int w = 0; w < W; w++) {
                vf part = load(x[w] + t);
                for (int c = 0; c < C; c++) sum[c][w] += part * p[c];
            }
        }
        for (int c = 0; c < C; c++)
            for (int w = 0; w < W; w++)  // with a bound that is not constant, the sums would be kept in memory
                if (float* at = to + (c * R + r + w) * L; r + w < R) store(at, load(at) * shrink[c] + sum[c][w]);
    }
}

}  // namespace
