// y = x W^T for many rows of x, a prompt's, and packed W: by the matrix unit for bf16, or by vectors of 8 numbers; or
// of 16 if the processor multiplies bytes (VNNI) and, for W in bf16, pairs of bf16.
//
// For the unit and for pairs, a number in fp32 is the sum of two in bf16, but for its last bits: a larger part that is
// rounded to nearest, and a smaller one. All products of parts are added up in fp32 except those of two smaller parts:
// what is left out is below 2^-16 of a product. In bf16, x has one part, and a weight is rounded to one.
#include <algorithm>
#include "products.h"

namespace {

// sums [R][16], `stride` apart, plus the products of a chunk of R rows of x with a block
template <int R>
void add_products(const float* x, int64_t in, const float* block, int64_t chunk, float* sums, int64_t stride) {
    vf acc[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = load(sums + r * stride + v * L);
    for (int64_t i = 0; i < chunk; i++) {
        vf q[VECTORS];
        for (int v = 0; v < VECTORS; v++) q[v] = load(block + i * SIDE + v * L);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) acc[r][v] += q[v] * x[r * in + i];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * stride + v * L, acc[r][v]);
}

template <int BITS, class T> void many_by_vectors(const Weight& w, const Product<T>& of) {
    constexpr int TOGETHER = 6;         // rows of x that are multiplied with a block: 12 sums of 16 registers
    constexpr int64_t AT_ONCE = 256;    // inputs that are multiplied at a time: what is unpacked of a block stays in L1
    constexpr int64_t MOST_ROWS = 384;  // rows of x for which W is unpacked once
    constexpr int64_t PANEL_BLOCKS = 8;  // blocks of 16 rows of W that a thread unpacks at a time
    constexpr int64_t WIDE = PANEL_BLOCKS * SIDE;
    const int64_t rows = of.M, most = std::min(rows, MOST_ROWS), panels = (of.blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS;
    constexpr bool wide = !std::is_same_v<T, float>;
    Room<float> floats(wide ? most * w.in : 0);
#pragma omp parallel num_threads(of.threads)
    {
        Room<float> panel(WIDE * AT_ONCE), sums(most * WIDE);
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            const int64_t M = std::min(MOST_ROWS, rows - row);
            const float* from_x;
            if constexpr (wide) {
#pragma omp for schedule(static)
                for (int64_t m = 0; m < M; m++)
                    for (int64_t i = 0; i < w.in; i += L)
                        store(&floats[m * w.in + i], load(of.x + (row + m) * w.in + i));
                from_x = floats.at;
            } else from_x = of.x + row * w.in;
#pragma omp for schedule(dynamic)
            for (int64_t p = 0; p < panels; p++) {
                const int64_t first = p * PANEL_BLOCKS, count = std::min(PANEL_BLOCKS, of.blocks - first);
                std::fill(&sums[0], &sums[0] + M * WIDE, 0.0f);
                for (int64_t from = 0; from < w.in; from += AT_ONCE) {
                    const int64_t chunk = std::min(AT_ONCE, w.in - from);
                    for (int64_t b = 0; b < count; b++)
                        unpack_chunk<BITS>(w, first + b, from, chunk, &panel[b * SIDE * AT_ONCE]);
                    for (int64_t m = 0; m < M; m += TOGETHER)
                        for (int64_t b = 0; b < count; b++) {
                            const float *at = from_x + m * w.in + from, *block = &panel[b * SIDE * AT_ONCE];
                            float* to = &sums[m * WIDE + b * SIDE];
                            if (M - m >= TOGETHER) add_products<TOGETHER>(at, w.in, block, chunk, to, WIDE);
                            else if (M - m == 5) add_products<5>(at, w.in, block, chunk, to, WIDE);
                            else if (M - m == 4) add_products<4>(at, w.in, block, chunk, to, WIDE);
                            else if (M - m == 3) add_products<3>(at, w.in, block, chunk, to, WIDE);
                            else if (M - m == 2) add_products<2>(at, w.in, block, chunk, to, WIDE);
                            else add_products<1>(at, w.in, block, chunk, to, WIDE);
                        }
                }
                for (int64_t m = 0; m < M; m++)
                    for (int64_t b = 0; b < count; b++)
                        for (int v = 0; v < VECTORS; v++)
                            of.put(row + m, first + b, v, load(&sums[m * WIDE + b * SIDE + v * L]));
            }
        }
    }
}

template <int BITS, class T> void many_by_products(const Weight& w, const Product<T>& of) {
    constexpr int64_t MOST_ROWS = 512;  // rows of x that are converted to integers, or pairs, at a time
    for (int64_t row = 0; row < of.M; row += MOST_ROWS) {
        Product<T> some = of;
        some.x += row * w.in, some.y += row * of.blocks * SIDE, some.M = std::min(MOST_ROWS, of.M - row);
        if constexpr (BITS == 16) many_by_pairs(w, some);
        else linear<BITS>(w, some);
    }
}

// Whether codes of so many bits are multiplied here. If not, torch multiplies unpacked rows
template <int BITS> constexpr bool BY_PRODUCTS = AVX512 && VNNI && (BITS <= 8 || (PAIRS && BITS == 16));
template <int BITS> constexpr bool HAS_MANY_ROWS = TILES || AVX2 || BY_PRODUCTS<BITS>;

template <int BITS, class T> void many_rows(const Weight& w, const Product<T>& of) {
    if constexpr (TILES) many_by_tiles<BITS>(w, of);
    else if constexpr (BY_PRODUCTS<BITS>) many_by_products<BITS>(w, of);
    else if constexpr (HAS_MANY_ROWS<BITS>) many_by_vectors<BITS>(w, of);
}

}  // namespace

extern "C" {

int64_t kvf_own_ways = true;  // tests turn them off

int64_t kvf_has_tiles() { return has_tiles(); }

int64_t kvf_has_many_rows(int64_t bits) {
    if (TILES) return has_tiles();
    bool has;
    by_bits(bits, [&](auto constant) { has = HAS_MANY_ROWS<constant>; });
    return has;
}
}
