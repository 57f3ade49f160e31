// Vectors of floats as wide as the processor's, 16 with AVX-512, else 8. Numbers of 16, 8, 4 and 2 bits become fp32.
//
// (gcc takes vectors apart that are wider than the processor's, and copies them through memory: three times as slow.)
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int L = 16;  // floats of a vector. Kernels have as many sums at once: half of the processor's registers
#define LANES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
constexpr int L = 8;
#define LANES {0, 1, 2, 3, 4, 5, 6, 7}
#endif
constexpr int WHOLE = 16;  // numbers that rows are multiples of: VECTOR of ops.py
typedef float vf __attribute__((vector_size(L * 4)));
typedef int32_t vi __attribute__((vector_size(L * 4)));
typedef uint32_t vu __attribute__((vector_size(L * 4)));
struct bf16 {
    uint16_t bits;
};

const vi LANE = LANES;

template <class V, class P> V load_as(const P* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
template <class V, class P> V load_some(const P* p, int n) {  // n of L numbers of 4 bytes, then zeros
    if (n == L) return load_as<V>(p);                         // a copy of a size that is known is one instruction
    V x = {};
    std::memcpy(&x, p, n * 4);
    return x;
}
vf load(const float* p) { return load_as<vf>(p); }
vu halves_at(const void* p) {  // L numbers of 2 bytes; gcc 12 converts halves of the vector and joins them
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    typedef uint16_t half_vector __attribute__((vector_size(L * 2)));
    return __builtin_convertvector(load_as<half_vector>(p), vu);
#endif
}
vf load(const bf16* p) { return (vf)(halves_at(p) << 16); }
vf all(float x) { return x - vf{}; }  // plus zero would be computed: -0 + 0 is 0
void keep(vf& x) {  // in a register: gcc would read it from memory again for each product, and a processor reads two at
                    // a time
#if defined(__AVX2__)
    asm("" : "+v"(x));
#endif
}
float number(float x) { return x; }
float number(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float y;
    std::memcpy(&y, &u, 4);
    return y;
}
bf16 rounded(float x) {  // to nearest, ties to even
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return {x != x ? (uint16_t)0x7fc0 : (uint16_t)((u + (0x7fff + ((u >> 16) & 1))) >> 16)};
}
void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
void store(bf16* p, vf x) {  // to nearest, ties to even
    vu u = (vu)x, rounded = (u + (0x7fff + ((u >> 16) & 1))) >> 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i y = (__m256i)(x != x ? vu{} + 0x7fc0 : rounded);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
#else
    for (int i = 0; i < L; i++) p[i].bits = x[i] != x[i] ? 0x7fc0 : (uint16_t)rounded[i];
#endif
}

template <class V, class Op> auto fold(V x, Op op) {  // op over all numbers
    typedef std::decay_t<decltype(x[0])> E;
    typedef E v8 __attribute__((vector_size(32)));
    typedef E v4 __attribute__((vector_size(16)));
    v8 half[L / 8];
    std::memcpy(half, &x, sizeof x);
    v8 a = half[0];
    if (L == 16) a = op(a, half[L / 8 - 1]);
    v4 quarter[2];
    std::memcpy(quarter, &a, sizeof a);
    v4 b = op(quarter[0], quarter[1]);
    return op(op(b[0], b[2]), op(b[1], b[3]));
}
template <class V> auto sum(V x) {
    return fold(x, [](auto a, auto b) { return a + b; });
}
template <class V> auto largest(V x) {
    return fold(x, [](auto a, auto b) { return a > b ? a : b; });
}

bool any(vi mask) {  // of a comparison
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    return largest(-mask) != 0;
#endif
}

template <class V> V two_of(V a, V b, vi i) {  // number i[j] of a's L and b's behind them
#if defined(__clang__)
    V y;
    for (int j = 0; j < L; j++) y[j] = i[j] & L ? b[i[j] & (L - 1)] : a[i[j] & (L - 1)];
    return y;
#else
    return __builtin_shuffle(a, b, i);
#endif
}

// Of vectors x[0], x[S], ...: numbers whose lanes differ in bits from S to M are added, and M / S vectors become one
template <int S, int M = L> __attribute__((always_inline)) inline vf joined(const vf* x) {
    if constexpr (S == M) return *x;
    else {
        const vi odd = (LANE & S) != 0, own = odd ? L + LANE : LANE, other = own ^ S;
        const vf a = joined<2 * S, M>(x), b = joined<2 * S, M>(x + S);
        return two_of(a, b, own) + two_of(a, b, other);
    }
}

// Number i of the result is the sum over x[i]: all 16 in 45 operations, where one alone takes 10. x is used up.
__attribute__((always_inline)) inline vf sums(vf* x) {
#if defined(__AVX512F__)
    return joined<1>(x);
#elif defined(__AVX2__)
    __m256 half[4], a, b;
    for (int i = 0; i < 4; i++) {  // in the order of `sum`: numbers that are 4 apart, 2 apart, neighbours
        a = (__m256)x[i], b = (__m256)x[i + 4];
        half[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 2; i++)  // of x[i], x[i + 2], x[i + 4] and x[i + 6] two numbers each
        half[i] =
            _mm256_add_ps(_mm256_shuffle_ps(half[i], half[i + 2], 0x44), _mm256_shuffle_ps(half[i], half[i + 2], 0xee));
    a = _mm256_unpacklo_ps(half[0], half[1]), b = _mm256_unpackhi_ps(half[0], half[1]);
    return (vf)_mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
#else
    vf y;
    for (int i = 0; i < L; i++) y[i] = sum(x[i]);
    return y;
#endif
}

vf exp2_of(vf x) {  // x <= 0; below -126 it stays at 2^-126, which adds to nothing
    x = x < -126.0f ? vf{} - 126.0f : x;
    vf whole = (x + 12582912.0f) - 12582912.0f, f = x - whole;  // 1.5 * 2^23: rounds to integers
    vf y =
        ((((((1.54035304e-4f * f + 1.33335581e-3f) * f + 9.61812911e-3f) * f + 5.55041087e-2f) * f + 2.40226507e-1f) *
              f +
          6.93147181e-1f) *
             f +
         1.0f);
    return (vf)((vu)y + ((vu) __builtin_convertvector(whole, vi) << 23));
}

vf half_to_float(vu h) {  // finite fp16, subnormals too: the exponent's bias is made up by a multiplication
    vf x = (vf)((h & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)x | (h & 0x8000) << 16);
}
vf halves(const uint16_t* p) {  // L numbers
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return half_to_float(halves_at(p));
#endif
}
float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    return half_to_float(vu{h})[0];
#endif
}

vu bytes_at(const uint8_t* p) {  // L bytes; gcc 12 makes 70 instructions of the conversion, one by one
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef uint8_t some __attribute__((vector_size(L)));
    return __builtin_convertvector(load_as<some>(p), vu);
#endif
}

#if defined(__AVX512F__)
typedef uint16_t Bits;  // a bit for each number of a vector
vu two_words(uint32_t a, uint32_t b) { return vu{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b}; }
#else
typedef uint8_t Bits;
vu two_words(uint32_t a, uint32_t) { return vu{} + a; }  // the second one is for numbers from the ninth on
#endif

template <int BITS> vf codes_of(const uint8_t* p) {  // L channels
    if constexpr (BITS == 8) return __builtin_convertvector((vi)bytes_at(p), vf);
    vu word;
    vu shift = (vu)LANE * BITS & 31;
    if constexpr (BITS == 1) word = vu{} + load_as<Bits>(p);
    if constexpr (BITS == 2) word = vu{} + load_as<std::conditional_t<L == 16, uint32_t, uint16_t>>(p);
    if constexpr (BITS == 4) word = two_words(load_as<uint32_t>(p), L == 16 ? load_as<uint32_t>(p + 4) : 0);
#if defined(__AVX512F__)  // a table's index is taken from the lowest bits: neither mask nor conversion
    const vf number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if constexpr (BITS == 4) return (vf)_mm512_permutexvar_ps((__m512i)(word >> shift), (__m512)number);
    const vf four = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
    if constexpr (BITS == 2) return (vf)_mm512_permutevar_ps((__m512)four, (__m512i)(word >> shift));
#endif
    return __builtin_convertvector((vi)((word >> shift) & ((1u << BITS) - 1)), vf);
}

template <int BITS> vf codes_at(const uint8_t* row, int D, int d) {  // of channels d.. of a row of D
    if constexpr (BITS == 3) return codes_of<2>(row + d / 4) + codes_of<1>(row + D / 4 + d / 8) * 4.0f;
    else return codes_of<BITS>(row + d * BITS / 8);
}

template <int BITS>
void unpack(const uint8_t* packed, const uint16_t* params, const uint8_t* signs, int D, float* out, int group = 32) {
    // the even subvector's code is in the low half of a byte, its first channel in the highest bit of the half
    const vu up = (vu)(28 - LANE / 4 * 4 + LANE % 4);
    for (int first = 0; first < D; first += group, params += 2) {
        float scale = half_to_float(params[0]), zero = half_to_float(params[1]);
        for (int d = first; d < first + group; d += L) {
            vf x = codes_at<BITS>(packed, D, d) * scale + zero;
            if (signs) x = (vf)((vu)x ^ (((vu{} + ~(uint32_t)load_as<Bits>(signs + d / 8)) << up) & 0x80000000u));
            store(out + d, x);
        }
    }
}

}  // namespace

// A call with T as the type of a cache
#define FLOAT_OR_BF16(...) \
    if (is_bf16) {         \
        typedef bf16 T;    \
        __VA_ARGS__;       \
    } else {               \
        typedef float T;   \
        __VA_ARGS__;       \
    }
