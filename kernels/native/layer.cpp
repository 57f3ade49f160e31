// What stands between the products of a layer, for few rows: norms, rotations, the gate.
#include "vectors.h"

namespace {

constexpr int64_t ONE_THREAD = 4096;  // numbers that one thread goes over sooner than threads can synchronize

// y [n] = x / (root of x's mean square) * weight
template <class T> void rms_norm(const T* x, const T* weight, T* y, int64_t n, float eps) {
    vf squares = {};
    for (int64_t i = 0; i < n; i += L) {
        const vf a = load(x + i);
        squares += a * a;
    }
    const float scale = 1 / std::sqrt(sum(squares) / n + eps);
    for (int64_t i = 0; i < n; i += L) store(y + i, load(x + i) * scale * load(weight + i));
}

vf silu(vf x) {
    const vf e = exp2_of((x > 0 ? -x : x) * 1.44269504f);
    return x * (x > 0 ? vf{} + 1.0f : e) / (1.0f + e);
}

// y [M][n] = silu(the first half of x [M][2 n]) * the second
template <class T> void gate(const T* x, T* y, int64_t M, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (M * n > ONE_THREAD)
    for (int64_t at = 0; at < M * n; at += L) {
        const T* from = x + at / n * 2 * n + at % n;
        store(y + at, silu(load(from)) * load(from + n));
    }
}

template <class T> void add(const T* x, T* y, int64_t n) {
    for (int64_t i = 0; i < n; i += L) store(y + i, load(y + i) + load(x + i));
}

void put_number(float* y, float x) { *y = x; }
void put_number(bf16* y, float x) { *y = rounded(x); }

// x [D] by the angles of its position, cos and sin [D / 2]: channel i with channel i + D / 2. Rounded after each
// operation, as torch and Triton do: all write the same bits
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((noinline, optimize("fp-contract=off")))
#endif
void rotate(float* x, const float* cos, const float* sin, int64_t D) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    for (int64_t i = 0, j = D / 2; i < D / 2; i++, j++) {
        const float a = x[i], b = x[j];
        x[i] = a * cos[i] - b * sin[i];
        x[j] = b * cos[i] + a * sin[i];
    }
}

}  // namespace
