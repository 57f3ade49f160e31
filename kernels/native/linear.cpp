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
template <int BITS, int M> void few(const Weight& w, int64_t block, const float* x, const float* sums, vf* y) {
    const int64_t groups = w.in / w.group;
    const uint8_t* p = w.codes + block * w.in * BITS * 2;
    const vf table = table_of<BITS>(w);
    constexpr int A = M < 3 ? 4 / M : 1;  // sums of one row in turns: an addition waits for the one before
    for (int m = 0; m < M; m++) y[m] = vf{};
    for (int64_t g = 0; g < groups; g++) {
        vf part[M][A];
        for (int m = 0; m < M; m++) for (int a = 0; a < A; a++) part[m][a] = vf{};
        for (int64_t i = g * w.group; i < (g + 1) * w.group; i += UNIT, p += BITS * 16) {
            vf q[UNIT];
            fetch_ahead<BITS>(p);
            Unit<BITS>::read(p, table, q);
            for (int j = 0; j < UNIT; j++)
                for (int m = 0; m < M; m++) part[m][j % A] += q[j] * x[m * w.in + i + j];
        }
        for (int m = 0; m < M; m++) for (int a = 1; a < A; a++) part[m][0] += part[m][a];
        if constexpr (BITS == 16) {
            for (int m = 0; m < M; m++) y[m] += part[m][0];
        } else {
            const int64_t at = (block * groups + g) * L;
            vf scale = halves(w.scale + at);
            if (w.zero) {
                vf zero = codes_of<8>(w.zero + at);
                for (int m = 0; m < M; m++) part[m][0] -= zero * sums[m * groups + g];
            }
            for (int m = 0; m < M; m++) y[m] += part[m][0] * scale;
        }
    }
}

template <int BITS> void unpack_block(const Weight& w, int64_t block, float* out) {  // -> [in][16]
    const int64_t groups = w.in / w.group;
    const uint8_t* p = w.codes + block * w.in * BITS * 2;
    const vf table = table_of<BITS>(w);
    for (int64_t g = 0; g < groups; g++) {
        vf scale = {}, zero = {};
        if constexpr (BITS != 16) {
            scale = halves(w.scale + (block * groups + g) * L);
            if (w.zero) zero = codes_of<8>(w.zero + (block * groups + g) * L);
        }
        for (int64_t i = g * w.group; i < (g + 1) * w.group; i += UNIT, p += BITS * 16) {
            vf q[UNIT];
            Unit<BITS>::read(p, table, q);
            for (int j = 0; j < UNIT; j++) store(out + (i + j) * L, BITS == 16 ? q[j] : (q[j] - zero) * scale);
        }
    }
}

template <int M> void many(const float* unpacked, int64_t in, const float* x, vf* y) {
    for (int m = 0; m < M; m++) y[m] = vf{};
    for (int64_t i = 0; i < in; i++) {
        vf q = load(unpacked + i * L);
        for (int m = 0; m < M; m++) y[m] += q * x[m * in + i];
    }
}

// M rows of x are taken 8 at a time, the last ones 4, 2 and 1
struct Together {
    int64_t first, count;
    Together(int64_t row, int64_t M) : first(row - row % 8), count(8) {  // those of which `row` is one
        if (first + 8 <= M) return;
        for (count = 4; !(M & count) || row >= first + count; count /= 2) first += M & count;
    }
};

template <class F> void by_rows(int64_t M, F&& f) {  // f(count, first), the count a constant
    for (int64_t m = 0, count; m < M; m += count) {
        count = Together(m, M).count;
        if (count == 8) f(std::integral_constant<int, 8>{}, m);
        else if (count == 4) f(std::integral_constant<int, 4>{}, m);
        else if (count == 2) f(std::integral_constant<int, 2>{}, m);
        else f(std::integral_constant<int, 1>{}, m);
    }
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// ---- codes of 8 and 4 bits where the processor multiplies bytes ----
//
// x becomes integers of 16 bits, with a step for up to 128 inputs: what a code is multiplied with are their two bytes. Sums
// are integers, and exact.

constexpr float LARGEST = 127 * 256;  // of an integer; its upper byte is rounded to nearest, the lower one has a sign

vi dot(vi acc, vu w, int32_t four) {  // four unsigned bytes of each lane of w times four with a sign
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
#else
    __m256i sum[2], two[2], all = _mm256_set1_epi32(four);
    std::memcpy(sum, &acc, sizeof acc), std::memcpy(two, &w, sizeof w);
    for (int i = 0; i < 2; i++) sum[i] = _mm256_dpbusd_avx_epi32(sum[i], two[i], all);
    return load_as<vi>(sum);
#endif
}

struct Integers {  // of M rows of x
    int64_t M, in, span, spans;  // inputs of a row, and that share a step
    std::vector<int32_t> bytes;  // [rows together][in / 4, in the order in which a lane has them][row][upper, lower]
    std::vector<float> step;     // [M][spans]
    std::vector<int32_t> sum;    // of the integers

    Integers(int64_t M, int64_t in, int64_t group) : M(M), in(in), span(group) {
        for (int64_t size : {16, 32, 64, 128})
            if (group > 128 && group % size == 0) span = size;
        spans = in / span;
        bytes.resize(M * in / 2), step.resize(M * spans), sum.resize(M * spans);
    }

    template <int BITS, class T> void take(const T* x, int64_t row, int64_t s) {  // span s
        const Together own(row, M);
        int32_t* to = &bytes[own.first * in / 2 + (s * span / 4 * own.count + row - own.first) * 2];
        x += row * in + s * span;
        vf most = {}, wrong = {};
        for (int64_t i = 0; i < span; i += L) {
            vf v = load(x + i), size = (vf)((vu)v & 0x7fffffffu);
            most = size > most ? size : most, wrong += v * 0.0f;  // NaN and infinity become NaN
        }
        const float top = largest(most), per = top > 1e-30f ? LARGEST / top : 0.0f;
        vi total = {};
        for (int64_t i = 0; i < span; i += L) {
            vi q = (vi)(load(x + i) * per + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23: rounds to integers
            total += q;
            if (BITS == 4) q = two_of(q, q, vi{0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15});
            const vi upper = (q + 128) >> 8;
            const auto a = four_bytes(upper), b = four_bytes(q - (upper << 8));
            for (int j = 0; j < 4; j++, to += own.count * 2) to[0] = a[j], to[1] = b[j];
        }
        step[row * spans + s] = top / LARGEST + ::sum(wrong);
        int32_t& all = sum[row * spans + s] = 0;
        for (int i = 0; i < L; i++) all += total[i];
    }

    typedef int32_t v4 __attribute__((vector_size(16)));
    static v4 four_bytes(vi x) {  // the lowest byte of 16 lanes, four by four
#if defined(__AVX512F__)
        return (v4)_mm512_cvtepi32_epi8((__m512i)x);
#else
        typedef int8_t v16 __attribute__((vector_size(16)));
        return (v4)__builtin_convertvector(x, v16);
#endif
    }
};

template <int BITS, int M> void few_by_bytes(const Weight& w, int64_t block, const Integers& x, int64_t first, vf* y) {
    const int64_t groups = w.in / w.group;
    const uint8_t* p = w.codes + block * w.in * BITS * 2;
    const int32_t* at_x = &x.bytes[first * w.in / 2];
    const vu low = vu{} + 0x0f0f0f0fu, sign = vu{} + 0x80808080u;
    for (int m = 0; m < M; m++) y[m] = vf{};
    for (int64_t g = 0, s = 0, i = 0; g < groups; g++) {
        const int64_t at = (block * groups + g) * L;
        vf scale = halves(w.scale + at);
        vi zero = vi{} + (BITS == 8 ? 128 : 8);  // what makes codes unsigned
        if (w.zero) zero = (vi)bytes_at(w.zero + at) + (BITS == 8 ? 128 : 0);
        for (; i < (g + 1) * w.group; s++) {
            vi high[M][2] = {}, rest[M][2] = {};
            for (int64_t end = i + x.span; i < end; i += UNIT) {
                vu two[2];
                if constexpr (BITS == 4) {
                    vu v = load_as<vu>(p);
                    two[0] = v & low, two[1] = (v >> 4) & low;
                } else for (int h = 0; h < 2; h++) two[h] = load_as<vu>(p + h * 64) ^ sign;
                fetch_ahead<BITS>(p), p += BITS * 16;
                for (int h = 0; h < 2; h++)
                    for (int m = 0; m < M; m++, at_x += 2) {
                        int a = M < 4 ? h : 0;  // sums of one row in turns: an addition waits for the one before
                        high[m][a] = dot(high[m][a], two[h], at_x[0]);
                        rest[m][a] = dot(rest[m][a], two[h], at_x[1]);
                    }
            }
            for (int m = 0; m < M; m++) {
                const int64_t own = (first + m) * x.spans + s;
                if (M < 4) high[m][0] += high[m][1], rest[m][0] += rest[m][1];
                vi total = (high[m][0] << 8) + rest[m][0] - zero * x.sum[own];
                y[m] += __builtin_convertvector(total, vf) * (scale * x.step[own]);
            }
        }
    }
}

template <int BITS, class T>
void linear_by_bytes(const Weight& w, const T* x, const float* bias, T* y, int64_t M, int64_t blocks, int threads) {
    Integers rows(M, w.in, w.group);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < M * rows.spans; i++) rows.take<BITS>(x, i / rows.spans, i % rows.spans);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++)
            by_rows(M, [&](auto count, int64_t first) {
                vf part[count];
                few_by_bytes<BITS, count>(w, b, rows, first, part);
                for (int k = 0; k < count; k++) put(y, first + k, blocks, b, part[k], bias);
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
        std::vector<float> unpacked(M > FEW ? w.in * L : 0);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            if (M > FEW) unpack_block<BITS>(w, b, unpacked.data());
            by_rows(M, [&](auto count, int64_t first) {
                vf part[count];
                const float *at = rows + first * w.in, *total = sums.data() + (w.zero ? first * groups : 0);
                if (M > FEW) many<count>(unpacked.data(), w.in, at, part);
                else if constexpr (count <= FEW) few<BITS, count>(w, b, at, total, part);
                for (int k = 0; k < count; k++) put(y, first + k, blocks, b, part[k], bias);
            });
        }
    }
}

template <int BITS, class T>
void linear(const Weight& w, const T* x, const float* bias, T* y, int64_t M, int64_t blocks, int threads) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    if constexpr (BITS < 16) linear_by_bytes<BITS>(w, x, bias, y, M, blocks, threads);
    else
#endif
    linear_by_floats<BITS>(w, x, bias, y, M, blocks, threads);
}

template <int BITS, class T> void unpack_rows(const Weight& w, T* y, int64_t first, int64_t blocks, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> unpacked(w.in * L);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {  // -> [in][blocks * 16]: what a matrix product takes as W^T
            unpack_block<BITS>(w, first + b, unpacked.data());
            for (int64_t i = 0; i < w.in; i++) store(y + (i * blocks + b) * L, load(unpacked.data() + i * L));
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
