// y = x W^T for few rows of x: W is read once, packed in bf16 or in 8 or 4 bits, and unpacked in registers.
#include <algorithm>
#include <vector>
#include "products.h"
#include "shares.h"

namespace {

constexpr int64_t SPAN = 64;  // inputs of a bf16 block that are multiplied before turning to another block
constexpr int FEW = 4;        // rows of x that are multiplied while W is unpacked; more rows share what was unpacked

// Prefetches a page ahead, since a processor does not prefetch beyond the end of a page: 15 to 40 % more bytes a second
// on an Intel Xeon. On an AMD EPYC without AVX-512 a quarter of a page: 10 % more for bf16, and a few percent in any
// format if a thread reads at three places. Without prefetching, Zen 4 (with BF16, but not yet the narrow VNNI) reads
// 8 bits for one row 5 to 8 % faster, but 4 bits up to 13 % slower
template <int BITS, int M> void fetch_ahead(const uint8_t* p) {
    constexpr int AHEAD = L == 8 ? 1024 : 4096;
    if (ZEN_4 && BITS == 8 && M == 1) return;
    for (int i = 0; i < SIZE<BITS> * 16; i += 64) __builtin_prefetch(p + AHEAD + i);
}

typedef const int64_t* Blocks;  // some blocks of 16 rows of W, multiplied a span of inputs at a time in turns

// `count` blocks times M rows of x [M][in] -> y[count][M]; sums [M][groups] of x, if there are zeros or minima
template <int BITS, int M>
void few(const Weight& w, Blocks blocks, int64_t count, const float* x, const float* sums, vf (*y)[M][VECTORS]) {
    const int64_t groups = w.in / w.group, span = BITS == 16 ? SPAN : w.group;
    const vf table = table_of<BITS>(w);
    constexpr int A = L == 16 && M < 3 ? 4 / M
                      : M < 2          ? 2
                                       : 1;  // sums of one row in turns, as an addition waits for the one before
    for (int64_t from = 0, g = 0; from < w.in; from += span, g++)
        for (int64_t k = 0; k < count; k++) {
            const uint8_t* p = w.codes + (blocks[k] * w.in + from) * SIZE<BITS> * 2;
            vf part[M][VECTORS][A];
            for (int m = 0; m < M; m++)
                for (int v = 0; v < VECTORS; v++)
                    for (int a = 0; a < A; a++) part[m][v][a] = vf{};
            for (int64_t i = from; i < std::min(from + span, w.in); i += UNIT, p += SIZE<BITS> * 16) {
                fetch_ahead<BITS, M>(p);
                for (int v = 0; v < VECTORS; v++) {
                    vf q[UNIT];
                    Unit<BITS>::read(p + v * L * 4, table, q);
                    for (int j = 0; j < UNIT; j++)
                        for (int m = 0; m < M; m++) part[m][v][j % A] += q[j] * x[m * w.in + i + j];
                }
            }
            for (int v = 0; v < VECTORS; v++) {
                for (int m = 0; m < M; m++)
                    for (int a = 1; a < A; a++) part[m][v][0] += part[m][v][a];
                if constexpr (BITS != 16) {
                    const int64_t row = blocks[k] * groups + g;
                    const vf scale = w.scale.read(row, v);
                    if (w.zero) {
                        const vf zero = __builtin_convertvector(zeros_at(w.zero + row * SIDE / 2, v), vf);
                        for (int m = 0; m < M; m++) part[m][v][0] -= zero * sums[m * groups + g];
                    }
                    for (int m = 0; m < M; m++) part[m][v][0] *= scale;
                    if (w.minimum) {
                        const vf minimum = w.minimum.read(row, v);
                        for (int m = 0; m < M; m++) part[m][v][0] += minimum * sums[m * groups + g];
                    }
                }
                for (int m = 0; m < M; m++) y[k][m][v] = from ? y[k][m][v] + part[m][v][0] : part[m][v][0];
            }
        }
}

template <int M> void many(const float* unpacked, int64_t in, const float* x, vf (*y)[VECTORS]) {
    for (int m = 0; m < M; m++)
        for (int v = 0; v < VECTORS; v++) y[m][v] = vf{};
    for (int64_t i = 0; i < in; i++)
        for (int v = 0; v < VECTORS; v++) {
            vf q = load(unpacked + i * SIDE + v * L);
            for (int m = 0; m < M; m++) y[m][v] += q * x[m * in + i];
        }
}

// M rows of x are taken MOST at a time, as registers allow; for the last ones, that is halved repeatedly
template <int MOST> struct Together {
    int64_t first, count;
    Together(int64_t row, int64_t M) : first(row - row % MOST), count(MOST) {  // the rows taken together with `row`
        if (first + MOST <= M) return;
        for (count = MOST / 2; !(M & count) || row >= first + count; count /= 2) first += M & count;
    }
};

template <int MOST, class F> void by_rows(int64_t M, F&& f) {  // f(count, first) with a constant count
    for (int64_t m = 0, count; m < M; m += count) {
        count = Together<MOST>(m, M).count;
        if constexpr (MOST == 8)
            if (count == 8) {
                f(std::integral_constant<int, 8>{}, m);
                continue;
            }
        if constexpr (MOST >= 4)
            if (count == 4) {
                f(std::integral_constant<int, 4>{}, m);
                continue;
            }
        if (count == 2) f(std::integral_constant<int, 2>{}, m);
        else f(std::integral_constant<int, 1>{}, m);
    }
}

// Sums of some blocks -> M rows of y from `row` on
template <int M, class T>
void put_all(const Product<T>& of, int64_t row, Blocks blocks, int64_t count, const vf (*part)[M][VECTORS]) {
    for (int64_t k = 0; k < count; k++)
        for (int m = 0; m < M; m++)
            for (int v = 0; v < VECTORS; v++) of.put(row + m, blocks[k], v, part[k][m][v]);
}

// ---- codes of 8 and 4 bits as integers ----
//
// x becomes 16-bit integers, with a step for up to 128 inputs. Sums are integers and exact.

constexpr int64_t ALONE = 4096;       // inputs that one thread converts sooner than threads can synchronize
constexpr float LARGEST = 127 * 256;  // largest integer; its upper byte is rounded to nearest, the lower one is signed

struct Integers {                // integers for M rows of x
    int64_t M, in, span, spans;  // inputs of a row, inputs that share a step, and spans of a row
    // [rows together][in / 4, in lane order][row][upper, lower bytes; or pairs of integers]
    int32_t* lanes;
    float* step;         // [M][spans]
    int32_t* minus_sum;  // minus the sum of the integers

    Integers(int64_t M, int64_t in, int64_t group) : M(M), in(in), span(group) {
        for (int64_t size : {16, 32, 64, 128})
            if (group > 128 && group % size == 0) span = size;
        spans = in / span;
        // kept for the next product: a step has some hundred products, and allocating these sizes takes long
        thread_local std::vector<int32_t> kept;
        if ((int64_t)kept.size() < M * in / 2 + 2 * M * spans) kept.resize(M * in / 2 + 2 * M * spans);
        lanes = kept.data(), minus_sum = lanes + M * in / 2, step = (float*)(minus_sum + M * spans);
    }

    template <int BITS, class T> void take(const T* x, int64_t row, int64_t s) {  // span s
        const Together<MOST> own(row, M);
        int32_t* to = &lanes[own.first * in / 2 + (s * span / 4 * own.count + row - own.first) * 2];
        x += row * in + s * span;
        vi most = {};
        for (int64_t i = 0; i < span; i += L) {
            const vi size = (vi)load(x + i) & 0x7fffffff;  // compared as bits: NaN and infinity are the largest
            most = size > most ? size : most;
        }
        const int32_t bits = largest(most);
        const float top = bits < 0x7f800000 ? load_as<float>(&bits) : NAN, per = top > 1e-30f ? LARGEST / top : 0.0f;
        vi total = {};
        for (int64_t i = 0; i < span; i += L) {                         // L inputs, in L / 2 lanes
            vi q = (vi)(load(x + i) * per + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23: rounds to integers
            total += q;
            to = put_lanes<BITS>(q, own.count * 2, to);
        }
        step[row * spans + s] = top / LARGEST;
        minus_sum[row * spans + s] = -sum(total);
    }
};

// COUNT blocks times M rows of x from `first` on. ONCE: a group is UNITS long and is one span. PLAIN: scales are fp16,
// and there are no minima
template <int BITS, int M, int COUNT, int UNITS, bool ONCE, bool PLAIN>
__attribute__((noinline))  // inlined, it would run out of registers
void few_by_integers(const Weight& w, Blocks blocks, const Integers& x, int64_t first, vf (*y)[M][VECTORS]) {
    const int64_t groups = w.in / w.group, spans = x.spans;
    const int64_t span = ONCE ? UNITS * UNIT : x.span, group = ONCE ? span : w.group;
    const int32_t *lanes = &x.lanes[first * w.in / 2], *minus_sum = &x.minus_sum[first * spans];
    const float* step = &x.step[first * spans];
    constexpr int ZERO = Products<BITS, M>::ZERO;
    const uint8_t *codes[COUNT], *zero[COUNT] = {};
    const uint8_t* scale[COUNT];
    const int64_t size = PLAIN || !w.scale.step ? 2 : 1;  // bytes of a scale
    for (int k = 0; k < COUNT; k++) {
        codes[k] = w.codes + blocks[k] * w.in * BITS * 2;
        scale[k] = (const uint8_t*)w.scale.at + blocks[k] * groups * SIDE * size;
        if (w.zero) zero[k] = w.zero + blocks[k] * groups * SIDE / 2;
        for (int m = 0; m < M; m++)
            for (int v = 0; v < VECTORS; v++) y[k][m][v] = vf{};
    }
    for (int64_t g = 0, i = 0; g < groups; g++)
        for (const int64_t to = i + group; i < to; i += span, lanes += span / 2 * M, minus_sum++, step++)
#pragma GCC unroll 4
            for (int k = 0; k < COUNT; k++) {
                asm volatile("" ::: "memory");  // one block after the other: there are not enough registers for two
                const uint8_t* p = codes[k] + i * BITS * 2;
                __builtin_prefetch(scale[k] + (g + 8) * SIDE * size);
                if (zero[k]) __builtin_prefetch(zero[k] + (g + 16) * SIDE / 2);
                Products<BITS, M> products;
                for (int m = 0; m < M; m++)
                    for (int v = 0; v < VECTORS; v++) {
                        const int32_t less = minus_sum[m * spans];
                        if (BITS == 4 && zero[k]) products.begin(v, m, zeros_at(zero[k] + g * SIDE / 2, v) * less);
                        else if (PLAIN || BITS == 8 || !w.minimum) products.begin(v, m, vi{} + ZERO * less);
                    }
                const int32_t* from = lanes;
                for (int64_t j = 0; j < span; j += UNITS * UNIT, p += UNITS * BITS * 16, from += UNITS * 4 * M) {
                    for (int u = 0; u < UNITS; u++) fetch_ahead<BITS, M>(p + u * BITS * 16);
                    products.template add<UNITS>(p, from);
                }
                for (int v = 0; v < VECTORS; v++) {
                    const int64_t row = blocks[k] * groups + g;
                    const vf per = PLAIN ? halves((const uint16_t*)scale[k] + g * SIDE + v * L) : w.scale.read(row, v);
                    for (int m = 0; m < M; m++)
                        y[k][m][v] += __builtin_convertvector(products.total(v, m), vf) * (per * step[m * spans]);
                    if (PLAIN || !w.minimum) continue;
                    const vf minimum = w.minimum.read(row, v);
                    for (int m = 0; m < M; m++) y[k][m][v] -= minimum * (minus_sum[m * spans] * step[m * spans]);
                }
            }
}

template <int BITS, int M, int COUNT>
void few_by_integers(const Weight& w, Blocks blocks, const Integers& x, int64_t first, vf (*y)[M][VECTORS]) {
    const auto by_units = [&](auto plain) {
        if (x.span % 32) few_by_integers<BITS, M, COUNT, 2, false, plain>(w, blocks, x, first, y);
        else if (w.group > 32) few_by_integers<BITS, M, COUNT, 4, false, plain>(w, blocks, x, first, y);
        else few_by_integers<BITS, M, COUNT, 4, true, plain>(w, blocks, x, first, y);
    };
    if (w.plain()) by_units(std::true_type{});
    else by_units(std::false_type{});
}

template <int BITS, class T> void linear_by_integers(const Weight& w, const Product<T>& of) {
    const int64_t M = of.M;
    const int threads = of.threads;
    Integers rows(M, w.in, w.group);
    Shares shares(of.blocks, threads);
    const auto take = [&](int64_t i) { rows.take<BITS>(of.x, i / rows.spans, i % rows.spans); };
    const bool alone = M * w.in <= ALONE;
    if (alone)
        for (int64_t i = 0; i < M * rows.spans; i++) take(i);
#pragma omp parallel num_threads(threads)
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < M * rows.spans; i++) take(i);
        }
        shares.each([&](Blocks own, int64_t count) {
            by_rows<MOST>(M, [&](auto m, int64_t first) {
                vf part[Shares::STREAMS][m][VECTORS];
                if (count == 1) few_by_integers<BITS, m, 1>(w, own, rows, first, part);
                else few_by_integers<BITS, m, Shares::STREAMS>(w, own, rows, first, part);
                put_all<m>(of, first, own, count, part);
            });
        });
    }
}

// ---- in floats ----

template <class T> const float* floats_of(const T* x, int64_t n, std::vector<float>& wide) {
    if constexpr (std::is_same_v<T, float>) return x;
    else {
        wide.resize(n);
        for (int64_t i = 0; i < n; i += L) store(wide.data() + i, load(x + i));
        return wide.data();
    }
}

template <int BITS, class T> void linear_by_floats(const Weight& w, const Product<T>& of) {
    const int64_t M = of.M;
    const int threads = of.threads;
    const int64_t groups = w.in / w.group;
    std::vector<float> wide, sums;
    const float* rows = floats_of(of.x, M * w.in, wide);
    const bool summed = w.zero || w.minimum;
    if (summed) {
        sums.resize(M * groups);
        for (int64_t g = 0; g < M * groups; g++) {
            vf s = {};
            for (int64_t i = 0; i < w.group; i += L) s += load(rows + g * w.group + i);
            sums[g] = sum(s);
        }
    }
    Shares shares(of.blocks, threads);
    // bf16 becomes fp32 by a shift, which is faster than reading unpacked numbers back: cached blocks are unpacked
    // again for every few rows
    constexpr int AT_ONCE = BITS == 16 ? FEW : L / 2;
    const bool shared = BITS != 16 && M > FEW;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> unpacked(shared ? w.in * SIDE : 0);
        shares.each([&](Blocks own, int64_t count) {
            const int64_t at_once = M > FEW ? 1 : count;
            for (int64_t k = 0; k < count; k += at_once, own += at_once) {
                if (shared) unpack_chunk<BITS>(w, *own, 0, w.in, unpacked.data());
                by_rows<AT_ONCE>(M, [&](auto m, int64_t first) {
                    vf part[Shares::STREAMS][m][VECTORS];
                    const float *at = rows + first * w.in, *total = sums.data() + (summed ? first * groups : 0);
                    if (shared) many<m>(unpacked.data(), w.in, at, part[0]);
                    else if constexpr (m <= FEW) few<BITS, m>(w, own, at_once, at, total, part);
                    put_all<m>(of, first, own, at_once, part);
                });
            }
        });
    }
}

// COUNT blocks beside each other in bf16 times M rows of x -> y [COUNT][M]: a number of x is spread over a vector once
// for all blocks
template <int COUNT, int M> __attribute__((noinline))  // or its registers do not suffice
void few_of_blocks(const uint8_t* codes, int64_t in, const float* x, vf (*y)[M]) {
    constexpr int64_t INPUTS = 512;  // that are added up before they come to the others
    for (int64_t from = 0; from < in; from += INPUTS) {
        vf part[COUNT][M] = {};
        for (int64_t i = from; i < std::min(from + INPUTS, in); i += 2) {
            vf q[COUNT][2];
            for (int k = 0; k < COUNT; k++) {
                const uint8_t* p = codes + (k * in + i) * SIDE * 2;
                __builtin_prefetch(p + 4096);
                const vu both = load_as<vu>(p);
                q[k][0] = (vf)(both << 16), q[k][1] = (vf)(both & 0xffff0000u);
            }
            for (int j = 0; j < 2; j++)
                for (int m = 0; m < M; m++) {
                    const vf at = all(x[m * in + i + j]);
                    for (int k = 0; k < COUNT; k++) part[k][m] += q[k][j] * at;
                }
        }
        for (int k = 0; k < COUNT; k++)
            for (int m = 0; m < M; m++) y[k][m] = from ? y[k][m] + part[k][m] : part[k][m];
    }
}

template <int MOST, class F> void by_count(int64_t count, F&& f) {  // f(count, from 1 to MOST, as a constant)
    if (count == MOST) f(std::integral_constant<int, MOST>{});
    else if constexpr (MOST > 1) by_count<MOST - 1>(count, f);
}

// Two blocks at a time, for W in bf16 and AVX-512. On a busy Zen 4, one thread, a row took 0.7 to 0.8 of the time of
// one block after the other; 4 rows as long as one, 5 rows 1.2 times as long, and 8 rows 1.7 to 1.9 times, which is
// what their multiplications take
template <class T> void linear_by_two(const Weight& w, const Product<T>& of) {
    constexpr int64_t AT_ONCE = 8;  // rows of x: 16 sums
    std::vector<float> wide;
    const float* rows = floats_of(of.x, of.M * w.in, wide);
    Shares shares((of.blocks + 1) / 2, (int)of.threads, 1);
#pragma omp parallel num_threads(of.threads)
    shares.each([&](Blocks two, int64_t) {
        const int64_t first = *two * 2, count = std::min<int64_t>(2, of.blocks - first);
        const uint8_t* codes = w.codes + first * w.in * SIDE * 2;
        for (int64_t row = 0; row < of.M; row += AT_ONCE)
            by_count<AT_ONCE>(std::min(AT_ONCE, of.M - row), [&](auto m) {
                vf y[2][m];
                if (count == 2) few_of_blocks<2, m>(codes, w.in, rows + row * w.in, y);
                else few_of_blocks<1, m>(codes, w.in, rows + row * w.in, y);
                for (int64_t k = 0; k < count; k++)
                    for (int r = 0; r < m; r++) of.put(row + r, first + k, 0, y[k][r]);
            });
    });
}

template <int BITS, class T> void linear(const Weight& w, const Product<T>& of) {
    if constexpr ((AVX2 || AVX512) && BITS <= 8) linear_by_integers<BITS>(w, of);
    else {
        if constexpr (BITS == 16 && L == 16)
            if (of.M > 1 || ZEN_4) return linear_by_two(w, of);  // Zen 5 reads one row's W sooner at one place
        linear_by_floats<BITS>(w, of);
    }
}

template <int BITS, class T> void unpack_rows(const Weight& w, T* y, int64_t first, int64_t blocks, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> unpacked(w.in * SIDE);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {  // -> [in][blocks * 16], W^T for a matrix product
            unpack_chunk<BITS>(w, first + b, 0, w.in, unpacked.data());
            for (int64_t i = 0; i < w.in; i++)
                for (int v = 0; v < VECTORS; v++)
                    store(y + (i * blocks + b) * SIDE + v * L, load(unpacked.data() + i * SIDE + v * L));
        }
    }
}

}  // namespace
