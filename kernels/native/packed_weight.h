// Weights packed in bf16 or in 8 or 4 bits, or 8-bit floats, and what unpacks them in registers.
//
// A block is 16 rows of W side by side, one or two vectors: a vector has the same inputs of L outputs, and needs no sum
// over its lanes. A group of inputs shares a scale, and a zero or a minimum if the codes are not symmetric.
#pragma once
#include "vectors.h"

namespace {

constexpr int SIDE = 16;           // rows of W side by side
constexpr int VECTORS = SIDE / L;  // vectors that hold them
constexpr int WORDS = SIDE * 4;    // bytes from a word of 32 bits to the next one of the same rows
constexpr int UNIT = 8;            // inputs that are unpacked at a time
constexpr int E4M3 = 9;            // where others have their bits: 8-bit floats

template <int BITS> constexpr int SIZE = BITS == E4M3 ? 8 : BITS;  // bits of a code

template <int BITS> struct Unit;  // 8 inputs of L outputs, as integers or bf16 -> 8 vectors

template <> struct Unit<16> {  // lanes of two inputs
    static void read(const uint8_t* p, vf, vf* w) {
        for (int j = 0; j < UNIT; j += 2) {
            vu v = load_as<vu>(p + j / 2 * WORDS);
            w[j] = (vf)(v << 16);
            w[j + 1] = (vf)(v & 0xffff0000u);
        }
    }
};

template <> struct Unit<8> {  // lanes of four inputs
    static void read(const uint8_t* p, vf, vf* w) {
        for (int j = 0; j < UNIT; j++) {
            vi v = load_as<vi>(p + j / 4 * WORDS);
            w[j] = __builtin_convertvector((vi)((vu)v << (24 - j % 4 * 8)) >> 24, vf);
        }
    }
};

template <> struct Unit<E4M3> {  // lanes of four inputs
    static void read(const uint8_t* p, vf, vf* w) {
        for (int j = 0; j < UNIT; j++) {
            const vu v = load_as<vu>(p + j / 4 * WORDS) << (24 - j % 4 * 8);
            // a sign, 4 bits of exponent and 3 of mantissa, in their places in fp32: the number times 2^-120
            w[j] = (vf)((v & 0x80000000u) | (v >> 4 & 0x07f00000u)) * 0x1p120f;
        }
    }
};

template <> struct Unit<4> {  // lanes of eight inputs
    static void read(const uint8_t* p, vf table, vf* w) {
        vu v = load_as<vu>(p);
        for (int j = 0; j < UNIT; j++) w[j] = coded(v >> (4 * j), table);
    }
};

vf signed_at(const int8_t* p) {  // L signed bytes
    return __builtin_convertvector((vi)(bytes_at((const uint8_t*)p) << 24) >> 24, vf);
}

// One number per group of inputs and row: fp16, or 8 bits that count fp16 steps, which several groups share; or fp32
struct PerGroup {
    const void* at;        // [blocks][groups][16]
    const uint16_t* step;  // [blocks][groups / 2^shift][16], or none
    int shift;
    bool wide = false;  // fp32

    explicit operator bool() const { return at; }
    vf read(int64_t g, int v) const {  // group g, counted over all blocks, and vector v of a block
        if (wide) return load((const float*)at + g * SIDE + v * L);
        if (!step) return halves((const uint16_t*)at + g * SIDE + v * L);
        return signed_at((const int8_t*)at + g * SIDE + v * L) * halves(step + (g >> shift) * SIDE + v * L);
    }
    PerGroup from(int64_t g) const {
        if (!at) return *this;
        const int64_t size = step ? 1 : wide ? 4 : 2;
        return {(const char*)at + g * SIDE * size, step ? step + (g >> shift) * SIDE : nullptr, shift, wide};
    }
};

struct Weight {
    const uint8_t* codes;  // [blocks of 16 rows][inputs], laid out as Unit reads them
    PerGroup scale;        // null in bf16
    const uint8_t* zero;   // [blocks][groups][8] of 4-bit codes, a byte those of two rows 8 apart; or none
    PerGroup minimum;      // w = scale * code + minimum; or none
    int64_t in, group;

    bool plain() const { return !scale.step && !minimum; }
    Weight from(int64_t block, int64_t bytes) const {  // of a block's codes
        const int64_t g = block * (in / group);
        return {codes + block * bytes, scale.from(g), zero ? zero + g * SIDE / 2 : nullptr, minimum.from(g), in, group};
    }
};

// y [M][blocks][16] = x [M][inputs] W^T + bias, if there is one
template <class T> struct Product {
    const T* x;
    const float* bias;
    T* y;
    int64_t M, blocks, threads;

    void put(int64_t row, int64_t b, int v, vf z) const {  // vector v of a block
        const int64_t at = b * SIDE + v * L;
        store(y + row * blocks * SIDE + at, bias ? z + load(bias + at) : z);
    }
};

template <int BITS> vf table_of(const Weight& w) {  // symmetric 4-bit codes are centred at 8
    vf t = LANES;
    return w.zero || w.minimum ? t : t - 8.0f;
}

// Inputs `from` and on of a block -> fp32 [inputs][16]
template <int BITS> void unpack_chunk(const Weight& w, int64_t block, int64_t from, int64_t chunk, float* to) {
    const vf table = table_of<BITS>(w);
    for (int64_t i = from; i < from + chunk;) {
        const int64_t g = i / w.group, end = std::min(from + chunk, (g + 1) * w.group);
        vf scale[VECTORS] = {}, zero[VECTORS] = {}, minimum[VECTORS] = {};
        if constexpr (BITS != 16)
            for (int v = 0; v < VECTORS; v++) {
                const int64_t row = block * (w.in / w.group) + g;
                scale[v] = w.scale.read(row, v);
                if (w.zero) zero[v] = __builtin_convertvector(zeros_at(w.zero + row * SIDE / 2, v), vf);
                if (w.minimum) minimum[v] = w.minimum.read(row, v);
            }
        for (; i < end; i += UNIT, to += UNIT * SIDE)
            for (int v = 0; v < VECTORS; v++) {
                vf q[UNIT];
                Unit<BITS>::read(w.codes + (block * w.in + i) * SIZE<BITS> * 2 + v * L * 4, table, q);
                for (int j = 0; j < UNIT; j++)
                    store(to + j * SIDE + v * L, BITS == 16 ? q[j] : (q[j] - zero[v]) * scale[v] + minimum[v]);
            }
    }
}

template <class F> void by_bits(int64_t bits, F f) {  // f(bits as a constant)
    if (bits == 16) f(std::integral_constant<int, 16>{});
    else if (bits == E4M3) f(std::integral_constant<int, E4M3>{});
    else if (bits == 8) f(std::integral_constant<int, 8>{});
    else f(std::integral_constant<int, 4>{});
}

}  // namespace
