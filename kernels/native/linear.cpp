// y = x W^T for few rows of x: W is read once, packed in bf16 or in 8 or 4 bits, and unpacked in registers.
#include <algorithm>
#include <vector>
#include "packed_weight.h"

namespace {

constexpr int FEW = 4;  // rows of x that are multiplied while W is unpacked; more of them share what was unpacked

// A page ahead, beyond whose end a processor does not fetch by itself: 15 to 40 % more bytes a second on an Intel Xeon
template <int BITS> void fetch_ahead(const uint8_t* p) {
    for (int i = 0; i < BITS * 16; i += 64) __builtin_prefetch(p + 4096 + i);
}

// one block of 16 rows times M rows of x [M][in] -> y[M]; sums [M][groups] of x, if there are zeros
template <int BITS, int M> void few(const Weight& w, int64_t block, const float* x, const float* sums, vf (*y)[VECTORS]) {
    const int64_t groups = w.in / w.group;
    const uint8_t* p = w.codes + block * w.in * BITS * 2;
    const vf table = table_of<BITS>(w);
    constexpr int A = L == 16 && M < 3 ? 4 / M : M < 2 ? 2 : 1;  // sums of one row in turns: an addition waits for the one before
    for (int m = 0; m < M; m++) for (int v = 0; v < VECTORS; v++) y[m][v] = vf{};
    for (int64_t g = 0; g < groups; g++) {
        vf part[M][VECTORS][A];
        for (int m = 0; m < M; m++) for (int v = 0; v < VECTORS; v++) for (int a = 0; a < A; a++) part[m][v][a] = vf{};
        for (int64_t i = g * w.group; i < (g + 1) * w.group; i += UNIT, p += BITS * 16) {
            fetch_ahead<BITS>(p);
            for (int v = 0; v < VECTORS; v++) {
                vf q[UNIT];
                Unit<BITS>::read(p + v * L * 4, table, q);
                for (int j = 0; j < UNIT; j++)
                    for (int m = 0; m < M; m++) part[m][v][j % A] += q[j] * x[m * w.in + i + j];
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            for (int m = 0; m < M; m++) for (int a = 1; a < A; a++) part[m][v][0] += part[m][v][a];
            if constexpr (BITS == 16) {
                for (int m = 0; m < M; m++) y[m][v] += part[m][v][0];
            } else {
                const int64_t at = (block * groups + g) * SIDE + v * L;
                vf scale = halves(w.scale + at);
                if (w.zero) {
                    vf zero = codes_of<8>(w.zero + at);
                    for (int m = 0; m < M; m++) part[m][v][0] -= zero * sums[m * groups + g];
                }
                for (int m = 0; m < M; m++) y[m][v] += part[m][v][0] * scale;
            }
        }
    }
}

template <int BITS> void unpack_block(const Weight& w, int64_t block, float* out) {  // -> [in][16]
    const int64_t groups = w.in / w.group;
    const uint8_t* p = w.codes + block * w.in * BITS * 2;
    const vf table = table_of<BITS>(w);
    for (int64_t g = 0; g < groups; g++) {
        vf scale[VECTORS] = {}, zero[VECTORS] = {};
        for (int v = 0; v < VECTORS && BITS != 16; v++) {
            const int64_t at = (block * groups + g) * SIDE + v * L;
            scale[v] = halves(w.scale + at);
            if (w.zero) zero[v] = codes_of<8>(w.zero + at);
        }
        for (int64_t i = g * w.group; i < (g + 1) * w.group; i += UNIT, p += BITS * 16)
            for (int v = 0; v < VECTORS; v++) {
                vf q[UNIT];
                Unit<BITS>::read(p + v * L * 4, table, q);
                for (int j = 0; j < UNIT; j++)
                    store(out + (i + j) * SIDE + v * L, BITS == 16 ? q[j] : (q[j] - zero[v]) * scale[v]);
            }
    }
}

template <int M> void many(const float* unpacked, int64_t in, const float* x, vf (*y)[VECTORS]) {
    for (int m = 0; m < M; m++) for (int v = 0; v < VECTORS; v++) y[m][v] = vf{};
    for (int64_t i = 0; i < in; i++)
        for (int v = 0; v < VECTORS; v++) {
            vf q = load(unpacked + i * SIDE + v * L);
            for (int m = 0; m < M; m++) y[m][v] += q * x[m * in + i];
        }
}

// M rows of x are taken 8 at a time, or 4 where registers hold half as much, the last ones by halves of that
constexpr int MOST = L / 2;
struct Together {
    int64_t first, count;
    Together(int64_t row, int64_t M) : first(row - row % MOST), count(MOST) {  // those of which `row` is one
        if (first + MOST <= M) return;
        for (count = MOST / 2; !(M & count) || row >= first + count; count /= 2) first += M & count;
    }
};

template <class F> void by_rows(int64_t M, F&& f) {  // f(count, first), the count a constant
    for (int64_t m = 0, count; m < M; m += count) {
        count = Together(m, M).count;
        if (MOST == 8 && count == 8) f(std::integral_constant<int, MOST>{}, m);
        else if (count == 4) f(std::integral_constant<int, 4>{}, m);
        else if (count == 2) f(std::integral_constant<int, 2>{}, m);
        else f(std::integral_constant<int, 1>{}, m);
    }
}

#if (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__AVX512BW__)
#define INTEGERS
// ---- codes of 8 and 4 bits as integers ----
//
// x becomes integers of 16 bits, with a step for up to 128 inputs. Sums are integers, and exact. Where the processor multiplies
// bytes four by four (VNNI), a code is multiplied with the two bytes of an integer, else as 16 bits itself, two by two.

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define BYTES 1
#else
#define BYTES 0
#endif

constexpr float LARGEST = 127 * 256;  // of an integer; its upper byte is rounded to nearest, the lower one has a sign

#if BYTES
vi dot(vi acc, vu w, int32_t four) {  // four unsigned bytes of each lane of w times four with a sign
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(four));
#endif
}

template <int BITS, int M> struct Products {  // of codes with M rows of x, added up
    vi high[M][2] = {}, rest[M][2] = {};

    void add(const uint8_t* p, const int32_t* x) {  // of UNIT inputs
        const vu low = vu{} + 0x0f0f0f0fu, sign = vu{} + 0x80808080u;
        vu two[2];
        if constexpr (BITS == 4) {
            vu v = load_as<vu>(p);
            two[0] = v & low, two[1] = (v >> 4) & low;
        } else for (int h = 0; h < 2; h++) two[h] = load_as<vu>(p + h * WORDS) ^ sign;
        for (int h = 0; h < 2; h++)
            for (int m = 0; m < M; m++, x += 2) {
                int a = M < 4 ? h : 0;  // sums of one row in turns: an addition waits for the one before
                high[m][a] = dot(high[m][a], two[h], x[0]);
                rest[m][a] = dot(rest[m][a], two[h], x[1]);
            }
    }
    vi total(int m) const {
        vi a = high[m][0], b = rest[m][0];
        if (M < 4) a += high[m][1], b += rest[m][1];
        return (a << 8) + b;
    }
    static constexpr int ZERO = BITS == 8 ? 128 : 0;  // is added to codes: bytes have no sign here
};
#else
typedef int16_t Halves __attribute__((vector_size(L * 4)));
typedef uint16_t UnsignedHalves __attribute__((vector_size(L * 4)));

vi dot(Halves w, int32_t two) {  // two of each lane of w times two
#if defined(__AVX512F__)
    return (vi)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(two));
#else
    return (vi)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(two));
#endif
}

template <int BITS, int M> struct Products {
    vi sum[M] = {};

    void add(const uint8_t* p, const int32_t* x) {
        Halves two[4];
        if constexpr (BITS == 4) {
            UnsignedHalves v = load_as<UnsignedHalves>(p);
            for (int i = 0; i < 4; i++) two[i] = (Halves)(v >> (4 * i) & 15);
        } else for (int i = 0; i < 4; i++) {
            Halves v = load_as<Halves>(p + i / 2 * WORDS);
            two[i] = i % 2 ? v >> 8 : v << 8 >> 8;
        }
        for (int i = 0; i < 4; i++)
            for (int m = 0; m < M; m++) sum[m] += dot(two[i], x[(i / 2 * M + m) * 2 + i % 2]);
    }
    vi total(int m) const { return sum[m]; }
    static constexpr int ZERO = 0;
};
#endif

struct Integers {  // of M rows of x
    int64_t M, in, span, spans;  // inputs of a row, and that share a step
    // [rows together][in / 4, in the order in which a lane has them][row][upper, lower bytes; or two pairs of integers]
    std::vector<int32_t> lanes;
    std::vector<float> step;     // [M][spans]
    std::vector<int32_t> sum;    // of the integers

    Integers(int64_t M, int64_t in, int64_t group) : M(M), in(in), span(group) {
        for (int64_t size : {16, 32, 64, 128})
            if (group > 128 && group % size == 0) span = size;
        spans = in / span;
        lanes.resize(M * in / 2), step.resize(M * spans), sum.resize(M * spans);
    }

    template <int BITS, class T> void take(const T* x, int64_t row, int64_t s) {  // span s
        const Together own(row, M);
        int32_t* to = &lanes[own.first * in / 2 + (s * span / 4 * own.count + row - own.first) * 2];
        x += row * in + s * span;
        vf most = {}, wrong = {};
        for (int64_t i = 0; i < span; i += L) {
            vf v = load(x + i), size = (vf)((vu)v & 0x7fffffffu);
            most = size > most ? size : most, wrong += v * 0.0f;  // NaN and infinity become NaN
        }
        const float top = largest(most), per = top > 1e-30f ? LARGEST / top : 0.0f;
        vi total = {};
        for (int64_t i = 0; i < span; i += L) {  // L inputs, half of them as many lanes
            vi q = (vi)(load(x + i) * per + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23: rounds to integers
            total += q;
#if BYTES
            if (BITS == 4) {  // a word has the inputs of even places of 8, the next one those of odd places
                const vi within = LANE % 8;
                q = two_of(q, q, LANE - within + (within * 2 + within / 4) % 8);
            }
            const vi upper = (q + 128) >> 8;
            const Words a = bytes_of(upper), b = bytes_of(q - (upper << 8));
            for (int j = 0; j < L / 4; j++, to += own.count * 2) to[0] = a[j], to[1] = b[j];
#else
            constexpr int APART = BITS == 4 ? 4 : 2;  // inputs of a pair: their codes are 16 bits apart
            for (int j = 0; j < L / 4; j++, to += own.count * 2)
                for (int k = 0; k < 2; k++) {
                    const int a = BITS == 4 ? j / 2 * 8 + j % 2 * 2 + k : j * 4 + k;
                    to[k] = (q[a] & 0xffff) | (int32_t)((uint32_t)q[a + APART] << 16);
                }
#endif
        }
        step[row * spans + s] = top / LARGEST + ::sum(wrong);
        int32_t& all = sum[row * spans + s] = 0;
        for (int i = 0; i < L; i++) all += total[i];
    }

#if BYTES
    typedef int32_t Words __attribute__((vector_size(L)));
    static Words bytes_of(vi x) {  // the lowest byte of each lane, four by four
#if defined(__AVX512F__)
        return (Words)_mm512_cvtepi32_epi8((__m512i)x);
#else
        typedef int8_t some __attribute__((vector_size(L)));
        return (Words)__builtin_convertvector(x, some);
#endif
    }
#endif
};

template <int BITS, int M>
void few_by_integers(const Weight& w, int64_t block, const Integers& x, int64_t first, vf (*y)[VECTORS]) {
    const int64_t groups = w.in / w.group;
    const uint8_t* p = w.codes + block * w.in * BITS * 2;
    const int32_t* at_x = &x.lanes[first * w.in / 2];
    for (int m = 0; m < M; m++) for (int v = 0; v < VECTORS; v++) y[m][v] = vf{};
    for (int64_t g = 0, s = 0, i = 0; g < groups; g++) {
        const int64_t at = (block * groups + g) * SIDE;
        vf scale[VECTORS];
        vi zero[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            scale[v] = halves(w.scale + at + v * L);
            zero[v] = Products<BITS, M>::ZERO + (w.zero ? (vi)bytes_at(w.zero + at + v * L) : vi{} + (BITS == 8 ? 0 : 8));
        }
        for (; i < (g + 1) * w.group; s++) {
            Products<BITS, M> products[VECTORS];
            for (int64_t end = i + x.span; i < end; i += UNIT, p += BITS * 16, at_x += 4 * M) {
                fetch_ahead<BITS>(p);
                for (int v = 0; v < VECTORS; v++) products[v].add(p + v * L * 4, at_x);
            }
            for (int m = 0; m < M; m++) {
                const int64_t own = (first + m) * x.spans + s;
                for (int v = 0; v < VECTORS; v++) {
                    const vi total = products[v].total(m) - zero[v] * x.sum[own];
                    y[m][v] += __builtin_convertvector(total, vf) * (scale[v] * x.step[own]);
                }
            }
        }
    }
}

template <int BITS, class T>
void linear_by_integers(const Weight& w, const T* x, const float* bias, T* y, int64_t M, int64_t blocks, int threads) {
    Integers rows(M, w.in, w.group);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < M * rows.spans; i++) rows.take<BITS>(x, i / rows.spans, i % rows.spans);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++)
            by_rows(M, [&](auto count, int64_t first) {
                vf part[count][VECTORS];
                few_by_integers<BITS, count>(w, b, rows, first, part);
                for (int k = 0; k < count; k++)
                    for (int v = 0; v < VECTORS; v++) put(y, first + k, blocks, b, v, part[k][v], bias);
            });
    }
}
#endif

template <int BITS, class T>
void linear_by_floats(const Weight& w, const T* x, const float* bias, T* y, int64_t M, int64_t blocks, int threads) {
    const int64_t groups = w.in / w.group;
    std::vector<float> wide, sums;
    const float* rows;
    if constexpr (std::is_same_v<T, float>) rows = x;
    else {
        wide.resize(M * w.in);
        for (int64_t i = 0; i < M * w.in; i += L) store(wide.data() + i, load(x + i));
        rows = wide.data();
    }
    if (w.zero) {
        sums.resize(M * groups);
        for (int64_t g = 0; g < M * groups; g++) {
            vf s = {};
            for (int64_t i = 0; i < w.group; i += L) s += load(rows + g * w.group + i);
            sums[g] = sum(s);
        }
    }
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> unpacked(M > FEW ? w.in * SIDE : 0);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            if (M > FEW) unpack_block<BITS>(w, b, unpacked.data());
            by_rows(M, [&](auto count, int64_t first) {
                vf part[count][VECTORS];
                const float *at = rows + first * w.in, *total = sums.data() + (w.zero ? first * groups : 0);
                if (M > FEW) many<count>(unpacked.data(), w.in, at, part);
                else if constexpr (count <= FEW) few<BITS, count>(w, b, at, total, part);
                for (int k = 0; k < count; k++)
                    for (int v = 0; v < VECTORS; v++) put(y, first + k, blocks, b, v, part[k][v], bias);
            });
        }
    }
}

template <int BITS, class T>
void linear(const Weight& w, const T* x, const float* bias, T* y, int64_t M, int64_t blocks, int threads) {
#ifdef INTEGERS
    if constexpr (BITS < 16) linear_by_integers<BITS>(w, x, bias, y, M, blocks, threads);
    else
#endif
    linear_by_floats<BITS>(w, x, bias, y, M, blocks, threads);
}

template <int BITS, class T> void unpack_rows(const Weight& w, T* y, int64_t first, int64_t blocks, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> unpacked(w.in * SIDE);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {  // -> [in][blocks * 16]: what a matrix product takes as W^T
            unpack_block<BITS>(w, first + b, unpacked.data());
            for (int64_t i = 0; i < w.in; i++)
                for (int v = 0; v < VECTORS; v++)
                    store(y + (i * blocks + b) * SIDE + v * L, load(unpacked.data() + i * SIDE + v * L));
        }
    }
}

}  // namespace

extern "C" void kvf_linear(int64_t is_bf16, int64_t bits, const void* x, const uint8_t* codes, const uint16_t* scale,
                           const uint8_t* zero, const float* bias, void* y, int64_t M, int64_t in, int64_t blocks,
                           int64_t group, int64_t threads) {
    Weight w{codes, scale, zero, in, group};
    FLOAT_OR_BF16(BY_BITS((linear<BITS>(w, (const T*)x, bias, (T*)y, M, blocks, threads))))
}

extern "C" void kvf_unpack_rows(int64_t is_bf16, int64_t bits, const uint8_t* codes, const uint16_t* scale,
                                const uint8_t* zero, void* y, int64_t in, int64_t group, int64_t first, int64_t blocks,
                                int64_t threads) {
    Weight w{codes, scale, zero, in, group};
    FLOAT_OR_BF16(BY_BITS((unpack_rows<BITS>(w, (T*)y, first, blocks, threads))))
}
