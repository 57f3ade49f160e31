// A token joins a ring of the newest; the one that leaves it goes to a store at fewer coordinates and bits.
#include "vectors.h"

namespace {

uint16_t to_half(float x) {  // to nearest, ties to even
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    uint32_t bits; std::memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, f = bits & 0x7fffffff;
    if (f > 0x7f800000) return sign | 0x7e00;
    if (f >= 0x477ff000) return sign | 0x7c00;
    if (f < 0x38800000) {  // subnormal: the sum's rounding is the one that is wanted
        float y; std::memcpy(&y, &f, 4); y += 0.5f; std::memcpy(&f, &y, 4);
        return sign | (f - 0x3f000000);
    }
    return sign | ((f + 0xc8000fff + (f >> 13 & 1)) >> 13);
#endif
}

constexpr int GROUP = 32;  // channels that share a scale and a zero

// As kernels/quantize.py: codes against the scale and zero as they are stored
template <int BITS> void encode(const float* x, uint8_t* packed, uint16_t* pair) {
    constexpr int LEVELS = (1 << BITS) - 1, PER = 8 / BITS;
    float low = x[0], high = x[0];
    for (int i = 1; i < GROUP; i++) low = std::min(low, x[i]), high = std::max(high, x[i]);
    pair[1] = to_half(std::min(std::max(low, -65504.0f), 65504.0f));
    float zero = half_to_float(pair[1]), scale = (high - zero) / LEVELS;
    pair[0] = to_half(scale > 0 ? std::min(scale, 65504.0f) : 0.0f);
    float step = std::max(half_to_float(pair[0]), 1e-8f);
    uint8_t codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        float code = std::rint((x[i] - zero) / step);
        codes[i] = code > 0 ? (uint8_t)std::min(code, (float)LEVELS) : 0;
    }
    for (int i = 0; i < GROUP / PER; i++) {
        packed[i] = 0;
        for (int j = 0; j < PER; j++) packed[i] |= codes[i * PER + j] << (BITS * j);
    }
}

template <class T>
void append_token(const T* latents, const T* values, const int64_t* pos, T* ring_k, void* ring_v, uint16_t* ring_params,
                  T* lead, T* rest, void* v, uint16_t* params, int64_t bits, int64_t B, int64_t R, int64_t slots,
                  int64_t rank, int64_t first, int64_t second, int64_t width) {
    int64_t groups = width / GROUP;
    auto to_store = bits == 2 ? encode<2> : bits == 4 ? encode<4> : encode<8>;
    for (int64_t b = 0; b < B; b++) {
        int64_t in = b * R + pos[b] % R, out = b * slots + ((pos[b] - R) % slots + slots) % slots;
        T* token = ring_k + in * rank;
        std::copy_n(token, first, lead + out * first);
        std::copy_n(token + first, second, rest + out * second);
        std::copy_n(latents + b * rank, rank, token);
        const T* x = values + b * width;
        if (bits == 16) {
            std::copy_n((const T*)ring_v + in * width, width, (T*)v + out * width);
            std::copy_n(x, width, (T*)ring_v + in * width);
            continue;
        }
        for (int64_t g = 0; g < groups; g++) {
            float numbers[GROUP];
            uint8_t* held = (uint8_t*)ring_v + in * width + g * GROUP;
            uint16_t* pair = ring_params + (in * groups + g) * 2;
            float scale = half_to_float(pair[0]), zero = half_to_float(pair[1]);
            for (int i = 0; i < GROUP; i++) numbers[i] = held[i] * scale + zero;
            to_store(numbers, (uint8_t*)v + (out * width + g * GROUP) * bits / 8, params + (out * groups + g) * 2);
            for (int i = 0; i < GROUP; i += L) store(numbers + i, load(x + g * GROUP + i));
            encode<8>(numbers, held, pair);
        }
    }
}

}  // namespace
