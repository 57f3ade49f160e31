// y = x W^T for few rows of x: W is read once, packed in bf16 or in 8 or 4 bits, and unpacked in registers.
//
// 16 rows of W lie side by side, so that a vector has the same inputs of 16 outputs, and needs no sum over its lanes. A group
// of inputs shares a scale, and a zero if the codes are not symmetric.
#include <algorithm>
#include <vector>
#include "vectors.h"

namespace {

constexpr int UNIT = 8;  // inputs that are unpacked at a time
constexpr int FEW = 4;  // rows of x that are multiplied while W is unpacked; more of them share what was unpacked

vf halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    typedef uint16_t half_vector __attribute__((vector_size(32)));
    return half_to_float(__builtin_convertvector(load_as<half_vector>(p), vu));
#endif
}

template <int BITS> struct Unit;  // 8 inputs of 16 outputs, as integers or bf16 -> 8 vectors

template <> struct Unit<16> {  // lanes of two inputs
    static void read(const uint8_t* p, vf, vf* w) {
        for (int j = 0; j < UNIT; j += 2) {
            vu v = load_as<vu>(p + j * 32);
            w[j] = (vf)(v << 16);
            w[j + 1] = (vf)(v & 0xffff0000u);
        }
    }
};

template <> struct Unit<8> {  // lanes of four inputs
    static void read(const uint8_t* p, vf, vf* w) {
        for (int j = 0; j < UNIT; j++) {
            vi v = load_as<vi>(p + j / 4 * 64);
            w[j] = __builtin_convertvector((vi)((vu)v << (24 - j % 4 * 8)) >> 24, vf);
        }
    }
};

template <> struct Unit<4> {  // lanes of eight inputs
    static void read(const uint8_t* p, vf table, vf* w) {
        vu v = load_as<vu>(p);
        for (int j = 0; j < UNIT; j++) {
#if defined(__AVX512F__)  // a look-up takes the lowest four bits of a lane: no mask, no conversion
            w[j] = (vf)_mm512_permutexvar_ps((__m512i)(v >> (4 * j)), (__m512)table);
#else
            w[j] = __builtin_convertvector((vi)((v >> (4 * j)) & 15), vf) + table[0];
#endif
        }
    }
};

struct Weight {
    const uint8_t* codes;   // [blocks of 16 rows][inputs], laid out as Unit reads them
    const uint16_t* scale;  // fp16 [blocks][groups][16]; none in bf16
    const uint8_t* zero;    // [blocks][groups][16], or none
    int64_t in, group;
};

// A page ahead, beyond whose end a processor does not fetch by itself: 15 to 40 % more bytes a second on an Intel Xeon
template <int BITS> void fetch_ahead(const uint8_t* p) {
    for (int i = 0; i < BITS * 16; i += 64) __builtin_prefetch(p + 4096 + i);
}

template <int BITS> vf table_of(const Weight& w) {  // symmetric codes of four bits are around 8
    vf t = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return w.zero ? t : t - 8.0f;
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
            if (BITS == 4) q = __builtin_shuffle(q, vi{0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15});
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
                for (int k = 0; k < count; k++)
                    store(y + ((first + k) * blocks + b) * L, bias ? part[k] + load(bias + b * L) : part[k]);
            });
    }
}
#endif

template <int BITS, class T>
void linear(const Weight& w, const T* x, const float* bias, T* y, int64_t M, int64_t blocks, int threads) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    if constexpr (BITS < 16) return linear_by_bytes<BITS>(w, x, bias, y, M, blocks, threads);
#endif
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
                for (int k = 0; k < count; k++)
                    store(y + ((first + k) * blocks + b) * L, bias ? part[k] + load(bias + b * L) : part[k]);
            });
        }
    }
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

#define BY_BITS(CALL) \
    if (bits == 16) { constexpr int BITS = 16; CALL; } else if (bits == 8) { constexpr int BITS = 8; CALL; } \
    else { constexpr int BITS = 4; CALL; }

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
