// y = x W^T for few rows of x and an unpacked W, fp32 or bf16 [out][in].
#include <algorithm>
#include <vector>
#include "shares.h"
#include "vectors.h"

namespace {

constexpr int SHORT = 4096;                // bytes of a row, one page: below, the processor prefetches too little
constexpr int TILE_ROWS = 4;               // rows of W, with as many of x as make L sums, which are added up together
constexpr int PIECE_ROWS = 4 * TILE_ROWS;  // rows that a thread takes at a time

// R rows of W times M rows of x -> y[m][r]; the first rows of x read W from memory and prefetch what follows
template <int M, int R, class T> void dense_tile(const T* w, const float* x, int64_t in, bool fetch, float* y) {
    vf acc[L] = {};
    const char* next = (const char*)(w + 8 * R * in);
    for (int64_t i = 0; i < in; i += L) {
        vf q[R];
        for (int r = 0; r < R; r++) q[r] = load(w + r * in + i);
        if (fetch)
            for (int b = 0; b < R * L * (int)sizeof(T); b += 64) __builtin_prefetch(next + i * R * sizeof(T) + b, 0, 2);
        for (int m = 0; m < M; m++) {
            vf at = load(x + m * in + i);
            for (int r = 0; r < R; r++) acc[m * R + r] += q[r] * at;
        }
    }
    if constexpr (M * R == L) store(y, sums(acc));
    else
        for (int i = 0; i < M * R; i++) y[i] = sum(acc[i]);
}

// Sums of R rows of W, and the bias -> y
template <class T> void put_rows(const float* sums, int R, const T* bias, T* y) {
    const auto put = [&](int rows) {  // with a constant `rows`: otherwise the loop becomes a call
        for (int r = 0; r < rows; r++) {
            const float z = bias ? sums[r] + number(bias[r]) : sums[r];
            if constexpr (std::is_same_v<T, float>) y[r] = z;
            else y[r] = rounded(z);
        }
    };
    if (R == TILE_ROWS) put(TILE_ROWS);
    else put(R);
}

template <class T> struct DenseWeight {
    const T *w, *bias;  // [out][in], [out] or none
    int64_t in, out;
};

template <class T> void dense(const DenseWeight<T>& weight, const T* x, T* y, int64_t M, int threads) {
    const T *w = weight.w, *bias = weight.bias;
    const int64_t in = weight.in, out = weight.out;
    std::vector<float> wide;
    const float* rows;
    if constexpr (std::is_same_v<T, float>) rows = x;
    else {
        wide.resize(M * in);
        for (int64_t i = 0; i < M * in; i += L) store(wide.data() + i, load(x + i));
        rows = wide.data();
    }
    const bool few_bytes = in * (int64_t)sizeof(T) <= SHORT;
    Shares shares((out + PIECE_ROWS - 1) / PIECE_ROWS, threads, 1);  // a tile already reads at several places
    const auto tile = [&](int64_t o) {
        const int R = std::min<int64_t>(TILE_ROWS, out - o);
        for (int64_t m = 0; m < M;) {
            const float* at = rows + m * in;
            const bool fetch = few_bytes && m == 0 && out - o > 16 * TILE_ROWS;
            float part[L];
            int done = L == 16 && M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
            if (R < TILE_ROWS) {
                done = 1;
                for (int r = 0; r < R; r++) dense_tile<1, 1>(w + (o + r) * in, at, in, false, part + r);
            } else if (done == 4) dense_tile<L / TILE_ROWS, TILE_ROWS>(w + o * in, at, in, fetch, part);
            else if (done == 2) dense_tile<2, TILE_ROWS>(w + o * in, at, in, fetch, part);
            else dense_tile<1, TILE_ROWS>(w + o * in, at, in, fetch, part);
            for (int k = 0; k < done; k++, m++) put_rows(part + k * R, R, bias ? bias + o : nullptr, y + m * out + o);
        }
    };
#pragma omp parallel num_threads(threads)
    shares.each([&](const int64_t* piece, int64_t) {
        const int64_t first = *piece * PIECE_ROWS, last = std::min(first + PIECE_ROWS, out);
        for (int64_t o = first; o < last; o += TILE_ROWS) tile(o);
    });
}

}  // namespace

extern "C" int64_t kvf_multiplies_one_row() { return multiplies_one_row(); }
