// y = x W^T for few rows of x: W is read once, as it is, or packed in bf16 or in 8 or 4 bits and unpacked in registers.
//
// Packed, 16 rows of W lie side by side, so that a vector has one input of 16 outputs, and needs no sum over its lanes. A group
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

template <> struct Unit<8> {
    static void read(const uint8_t* p, vf, vf* w) {
        for (int j = 0; j < UNIT; j++) {
#if defined(__AVX512F__)
            w[j] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + j * L))));
#else
            typedef int8_t bytes __attribute__((vector_size(16)));
            w[j] = __builtin_convertvector(__builtin_convertvector(load_as<bytes>(p + j * L), vi), vf);
#endif
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

template <int BITS, class T>
void linear(const Weight& w, const T* x, const float* bias, T* y, int64_t M, int64_t out, int threads) {
    const int64_t blocks = (out + L - 1) / L, groups = w.in / w.group;
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
            const int n = std::min<int64_t>(L, out - b * L);
            vf own = bias ? load_some<vf>(bias + b * L, n) : vf{};
            if (M > FEW) unpack_block<BITS>(w, b, unpacked.data());
            for (int64_t m = 0; m < M;) {
                vf part[8];
                const float *at = rows + m * w.in, *total = sums.data() + (w.zero ? m * groups : 0);
                int done = std::min<int64_t>(M - m, M > FEW ? 8 : FEW);
                if (M > FEW) {
                    if (done == 8) many<8>(unpacked.data(), w.in, at, part);
                    else for (int k = 0; k < done; k++) many<1>(unpacked.data(), w.in, at + k * w.in, part + k);
                } else if (done == 4) few<BITS, 4>(w, b, at, total, part);
                else if (done == 3) few<BITS, 3>(w, b, at, total, part);
                else if (done == 2) few<BITS, 2>(w, b, at, total, part);
                else few<BITS, 1>(w, b, at, total, part);
                for (int k = 0; k < done; k++, m++) {
                    vf z = part[k] + own;
                    T* to = y + m * out + b * L;
                    if (n == L) { store(to, z); continue; }
                    T last[L];
                    store(last, z);
                    std::copy(last, last + n, to);
                }
            }
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

// ---- W as it is, fp32 or bf16 [out][in] ----

constexpr int SHORT = 4096;  // bytes of a row, a page, below which the processor fetches too little ahead by itself
constexpr int TILE_ROWS = 4;  // of W, for as many of x: 16 sums, which are added up together

// Lanes i of a and then of b for which i & N is 0: half of the 16 from each
template <int N> struct Lanes {
    int32_t at[L];
    constexpr Lanes() : at() {
        for (int i = 0; i < L; i++) at[i] = i % (L / 2) / N * 2 * N + i % N + i / (L / 2) * L;
    }
};

#if defined(__AVX512F__)
template <int N> vf join(vf a, vf b) {  // lanes that are N apart added up, those of a and then those of b
    static constexpr Lanes<N> lanes;
    vi at = load_as<vi>(lanes.at);
    __m512 one = (__m512)a, two = (__m512)b;
    return (vf)_mm512_permutex2var_ps(one, (__m512i)at, two) + (vf)_mm512_permutex2var_ps(one, (__m512i)(at + N), two);
}
#else
template <int N> vf join(vf a, vf b) {
    static constexpr Lanes<N> lanes;
    float both[2 * L];
    store(both, a), store(both + L, b);
    vf y;
    for (int i = 0; i < L; i++) y[i] = both[lanes.at[i]] + both[lanes.at[i] + N];
    return y;
}
#endif

vf sums(const vf* x) {  // over the lanes of 16 vectors, each in the order of `sum`
    vf a[L / 2];
    for (int i = 0; i < 8; i++) a[i] = join<8>(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 4; i++) a[i] = join<4>(a[2 * i], a[2 * i + 1]);
    return join<1>(join<2>(a[0], a[1]), join<2>(a[2], a[3]));
}

// R rows of W times M rows of x -> y[m][r]; W is read from memory by the first rows of x, which fetch what follows
template <int M, int R, class T>
void dense_tile(const T* w, const float* x, int64_t in, bool fetch, float* y) {
    vf acc[L] = {};
    const char* next = (const char*)(w + 8 * R * in);
    for (int64_t i = 0; i < in; i += L) {
        vf q[R];
        for (int r = 0; r < R; r++) q[r] = load(w + r * in + i);
        if (fetch) for (int b = 0; b < R * L * (int)sizeof(T); b += 64) __builtin_prefetch(next + i * R * sizeof(T) + b, 0, 2);
        for (int m = 0; m < M; m++) {
            vf at = load(x + m * in + i);
            for (int r = 0; r < R; r++) acc[m * R + r] += q[r] * at;
        }
    }
    if constexpr (M * R == L) store(y, sums(acc));
    else for (int i = 0; i < M * R; i++) y[i] = sum(acc[i]);
}

template <class T>
void dense(const T* w, const T* x, const T* bias, T* y, int64_t M, int64_t in, int64_t out, int threads) {
    std::vector<float> wide;
    const float* rows;
    if constexpr (std::is_same_v<T, float>) rows = x;
    else {
        wide.resize(M * in);
        for (int64_t i = 0; i < M * in; i += L) store(wide.data() + i, load(x + i));
        rows = wide.data();
    }
    const bool few_bytes = in * (int64_t)sizeof(T) <= SHORT;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t o = 0; o < out; o += TILE_ROWS) {
        const int R = std::min<int64_t>(TILE_ROWS, out - o);
        for (int64_t m = 0; m < M;) {
            const float* at = rows + m * in;
            const bool fetch = few_bytes && m == 0 && out - o > 16 * TILE_ROWS;
            float part[L];
            int done = M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
            if (R < TILE_ROWS) {
                done = 1;
                for (int r = 0; r < R; r++) dense_tile<1, 1>(w + (o + r) * in, at, in, false, part + r);
            } else if (done == 4) dense_tile<4, TILE_ROWS>(w + o * in, at, in, fetch, part);
            else if (done == 2) dense_tile<2, TILE_ROWS>(w + o * in, at, in, fetch, part);
            else dense_tile<1, TILE_ROWS>(w + o * in, at, in, fetch, part);
            for (int k = 0; k < done; k++, m++) {
                vf z = load_some<vf>(part + k * R, R);
                if (bias) for (int r = 0; r < R; r++) z[r] += number(bias[o + r]);
                T last[L];
                store(last, z);
                std::copy(last, last + R, y + m * out + o);
            }
        }
    }
}

}  // namespace

#define BY_BITS(CALL) \
    if (bits == 16) { constexpr int BITS = 16; CALL; } else if (bits == 8) { constexpr int BITS = 8; CALL; } \
    else { constexpr int BITS = 4; CALL; }

extern "C" void kvf_dense_linear(int64_t is_bf16, const void* x, const void* w, const void* bias, void* y, int64_t M,
                                 int64_t in, int64_t out, int64_t threads) {
    FLOAT_OR_BF16((dense((const T*)w, (const T*)x, (const T*)bias, (T*)y, M, in, out, threads)))
}

extern "C" void kvf_linear(int64_t is_bf16, int64_t bits, const void* x, const uint8_t* codes, const uint16_t* scale,
                           const uint8_t* zero, const float* bias, void* y, int64_t M, int64_t in, int64_t out,
                           int64_t group, int64_t threads) {
    Weight w{codes, scale, zero, in, group};
    FLOAT_OR_BF16(BY_BITS((linear<BITS>(w, (const T*)x, bias, (T*)y, M, out, threads))))
}

extern "C" void kvf_unpack_rows(int64_t is_bf16, int64_t bits, const uint8_t* codes, const uint16_t* scale,
                                const uint8_t* zero, void* y, int64_t in, int64_t group, int64_t first, int64_t blocks,
                                int64_t threads) {
    Weight w{codes, scale, zero, in, group};
    FLOAT_OR_BF16(BY_BITS((unpack_rows<BITS>(w, (T*)y, first, blocks, threads))))
}
