// Quantizing and packing, as in kernels/quantize.py.
#pragma once
#include "vectors.h"

namespace {

constexpr int GROUP = 32;  // channels of a token that share a scale and a zero, or tokens of a channel

// Codes of n numbers that share a scale and a zero, fp16 `pair`, against both as stored. Numbers and codes lie `apart`
// from each other.
void codes_of(const float* x, int64_t n, int64_t apart, int64_t bits, float clip, uint8_t* codes, uint16_t* pair) {
    const float levels = (float)((1 << bits) - 1);
    float low = x[0], high = x[0];
    for (int64_t i = apart; i < n * apart; i += apart) low = std::min(low, x[i]), high = std::max(high, x[i]);
    pair[1] = to_half(std::min(std::max(low * clip, -65504.0f), 65504.0f));
    float zero = half_to_float(pair[1]), scale = (high * clip - zero) / levels;
    pair[0] = to_half(scale > 0 ? std::min(scale, 65504.0f) : 0.0f);
    float step = std::max(half_to_float(pair[0]), 1e-8f);
    for (int64_t i = 0; i < n * apart; i += apart) {
        float code = std::rint((x[i] - zero) / step);
        codes[i] = code > 0 ? (uint8_t)std::min(code, levels) : 0;
    }
}

uint8_t e4m3_of(float x) {  // |x| <= 448, to nearest, ties to even
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const uint32_t sign = u >> 24 & 0x80, size = u & 0x7fffffff;
    if (size < 0x3c800000) {  // below 2^-6 steps are of 2^-9, as of a float above 2^14: the sum rounds as needed
        float y;
        std::memcpy(&y, &size, 4);
        y += 0x1p14f;
        std::memcpy(&u, &y, 4);
        return (uint8_t)(sign | (u & 15));
    }
    return (uint8_t)(sign | ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - 120 * 8);
}

// Codes of n numbers that share an fp16 scale, against the scale as stored; as quantize_book in kernels/codebook.py.
void codes_of_book(const float* x, int64_t n, int64_t bits, const float* book, uint8_t* codes, uint16_t* scale) {
    float size = 0;
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++)
            if (float y = std::fabs(x[i]); y > size || y != y) size = y;  // NaN stays
        size /= 448.0f;
    } else {
        double squares = 0;
        for (int64_t i = 0; i < n; i++) squares += (double)x[i] * x[i];
        size = (float)std::sqrt(squares);
    }
    *scale = to_half(std::min(size, 65504.0f));
    const float unit = std::max(half_to_float(*scale), 1e-8f);
    for (int64_t i = 0; i < n; i++) {
        const float y = x[i] / unit;
        if (bits == 8) codes[i] = e4m3_of(std::min(std::max(y, -448.0f), 448.0f));
        else {
            codes[i] = 0;
            for (int c = 0; c + 1 < 1 << bits; c++) codes[i] += (book[c + 1] + book[c]) / 2 < y;
        }
    }
}

// Packs n codes that fill whole bytes, the first in the lowest bits; 3-bit codes as all low 2 bits, then all third bits
void pack_codes(const uint8_t* codes, int64_t n, int64_t bits, uint8_t* to) {
    auto plane = [&](int width, int shift, uint8_t* at) {
        for (int64_t i = 0, per = 8 / width; i < n / per; i++) {
            at[i] = 0;
            for (int64_t j = 0; j < per; j++)
                at[i] |= (codes[i * per + j] >> shift & ((1 << width) - 1)) << (width * j);
        }
    };
    if (bits == 3) plane(2, 0, to), plane(1, 2, to + n / 4);
    else plane((int)bits, 0, to);
}

}  // namespace
