// Oja's rule, one token after the other (kernels/oja.py).
#include "vectors.h"

namespace {

// groups of m rows of D numbers, and for each a basis of `rank` directions
struct OjaSizes {
    int64_t groups, m, D, rank, threads;
};

// out = u [groups, D, rank] turned towards x [groups, m, D] token by token, u += (x - u y) y^T with y = u^T x
void oja_sequence(const float* x, const float* u, float* out, const OjaSizes& sizes) {
    const int64_t groups = sizes.groups, m = sizes.m, D = sizes.D, rank = sizes.rank;
    const int64_t R = (rank + L - 1) / L * L;
#pragma omp parallel for num_threads(sizes.threads) schedule(dynamic)
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

}  // namespace
