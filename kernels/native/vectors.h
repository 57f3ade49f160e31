// Vectors of floats as wide as the processor's: 16 with AVX-512, otherwise 8. Numbers of 16, 8, 4 and 2 bits become
// fp32.
//
// Code in a processor's own instructions is in one file per instruction set (isa/), included here and, for products, by
// products.h.
//
// (gcc splits vectors that are wider than the processor's, and copies them through memory: three times as slow.)
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "isa/isa.h"

namespace {

#if AVX512
constexpr int L = 16;  // floats of a vector. Kernels have as many sums at once: half of the processor's registers
#define LANES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
constexpr int L = 8;
#define LANES {0, 1, 2, 3, 4, 5, 6, 7}
#endif
constexpr int WHOLE = 16;    // rows have a multiple of this many numbers: VECTOR of kernels/native/__init__.py
constexpr int ENTRIES = 16;  // entries of a table, one for each value of 4 bits
typedef float vf __attribute__((vector_size(L * 4)));
typedef int32_t vi __attribute__((vector_size(L * 4)));
typedef uint32_t vu __attribute__((vector_size(L * 4)));
typedef int16_t Sixteen __attribute__((vector_size(32)));
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
    if (n == L) return load_as<V>(p);                         // a copy of a constant size is one instruction
    V x = {};
    std::memcpy(&x, p, n * 4);
    return x;
}
vf load(const float* p) { return load_as<vf>(p); }
vf all(float x) { return x - vf{}; }  // adding zero would not be free: -0 + 0 is 0
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

vf size(vf x) { return (vf)((vu)x & 0x7fffffff); }
vf larger(vf a, vf b) { return a > b ? a : b; }

template <class V> V two_of(V a, V b, vi i) {  // number i[j] of a's L and b's behind them
#if defined(__clang__)
    V y;
    for (int j = 0; j < L; j++) y[j] = i[j] & L ? b[i[j] & (L - 1)] : a[i[j] & (L - 1)];
    return y;
#else
    return __builtin_shuffle(a, b, i);
#endif
}

// For vectors x[0], x[S], ...: adds numbers whose lanes differ in bits from S to M, so that M / S vectors become one
template <int S, int M = L> __attribute__((always_inline)) inline vf joined(const vf* x) {
    if constexpr (S == M) return *x;
    else {
        const vi odd = (LANE & S) != 0, own = odd ? L + LANE : LANE, other = own ^ S;
        const vf a = joined<2 * S, M>(x), b = joined<2 * S, M>(x + S);
        return two_of(a, b, own) + two_of(a, b, other);
    }
}

// L numbers of 4 bytes of L rows, `at` bytes into each: number j of row i becomes number i of row j of `to`.
inline void transpose(const void* const* rows, int64_t at, void* to, int64_t to_row) {
    vi x[L];
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) x[i] = load_as<vi>((const char*)rows[i] + at);
#pragma GCC unroll 4
    for (int s = 1; s < L; s *= 2) {  // swaps bit s of a number's row with that of its column
        const vi odd = (LANE & s) != 0, low = odd ? L + (LANE ^ s) : LANE, high = odd ? L + LANE : LANE ^ s;
#pragma GCC unroll 16
        for (int i = 0; i < L; i++)
            if (!(i & s)) {
                vi a = x[i], b = x[i | s];
                x[i] = two_of(a, b, low), x[i | s] = two_of(a, b, high);
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) std::memcpy((char*)to + i * to_row, &x[i], sizeof x[i]);
}

vf half_to_float(vu h) {  // finite fp16, subnormals too: a multiplication corrects the exponent's bias
    vf x = (vf)((h & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)x | (h & 0x8000) << 16);
}

typedef std::conditional_t<L == 16, uint16_t, uint8_t> Bits;  // a bit for each number of a vector

// Room for n numbers, aligned to whole vectors: a vector that lies across two cache lines costs twice.
template <class T> struct Room {
    std::vector<vf> lines;
    T* at;
    Room(int64_t n) : lines((n * sizeof(T) + sizeof(vf) - 1) / sizeof(vf)), at((T*)lines.data()) {}
    T& operator[](int64_t i) { return at[i]; }
};

}  // namespace

#include "isa/plain.h"
#if AVX512
#include "isa/avx512.h"
#elif AVX2
#include "isa/avx2.h"
#else
namespace {
using namespace plain;
}
#endif

namespace {

vf load(const bf16* p) { return (vf)(halves_at(p) << 16); }

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

template <int BITS> vf codes_of(const uint8_t* p) {  // L channels
    if constexpr (BITS == 8) return __builtin_convertvector((vi)bytes_at(p), vf);
    vu word;
    vu shift = (vu)LANE * BITS & 31;
    if constexpr (BITS == 1) word = vu{} + load_as<Bits>(p);
    if constexpr (BITS == 2) word = vu{} + load_as<std::conditional_t<L == 16, uint32_t, uint16_t>>(p);
    if constexpr (BITS == 4) word = two_words(load_as<uint32_t>(p), L == 16 ? load_as<uint32_t>(p + 4) : 0);
    return low_bits<BITS>(word >> shift);
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
