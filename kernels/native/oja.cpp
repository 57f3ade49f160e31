// Oja's rule, one token after the other (kernels/oja.py).
#include "vectors.h"

extern "C" {

// out = u [groups, D, R] turned towards x [groups, m, D] token by token, u += (x - u y) y^T with y = u^T x
void kvf_oja_sequential(const float* x, const float* u, float* out, int64_t groups, int64_t m, int64_t D, int64_t rank,
                        int64_t threads) {
    const int64_t R = (rank + L - 1) / L * L;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t group = 0; group < groups; group++) {
        std::vector<float> y(R), basis(D * R);
        for (int64_t d = 0; d < D; d++) std::copy_n(u + (group * D + d) * rank, rank, &basis[d * R]);
        for (const float *at = x + group * m * D, *end = at + m * D; at < end; at += D) {
            std::fill(y.begin(), y.end(), 0.0f);
            for (int64_t d = 0; d < D; d++)
                for (int64_t r = 0; r < R; r += L) store(&y[r], load(&y[r]) + load(&basis[d * R + r]) * at[d]);
            for (int64_t d = 0; d < D; d++) {
                vf along = {};
                for (int64_t r = 0; r < R; r += L) along += load(&basis[d * R + r]) * load(&y[r]);
                float rest = at[d] - sum(along);
                for (int64_t r = 0; r < R; r += L)
                    store(&basis[d * R + r], load(&basis[d * R + r]) + load(&y[r]) * rest);
            }
        }
        for (int64_t d = 0; d < D; d++) std::copy_n(&basis[d * R], rank, out + (group * D + d) * rank);
    }
}
}
