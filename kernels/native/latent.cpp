// A token joins a ring of the newest; the one that leaves it goes to a store at fewer coordinates and bits.
#include "encode.h"

namespace {

template <class T> void append_token(const T* latents, const T* values, const int64_t* pos, T* ring_k, void* ring_v,
                                     uint16_t* ring_params, T* lead, T* rest, void* v, uint16_t* params, int64_t bits,
                                     int64_t B, int64_t R, int64_t slots, int64_t rank, int64_t first, int64_t second,
                                     int64_t width) {
    int64_t groups = width / GROUP;
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
            uint8_t codes[GROUP];
            uint8_t* held = (uint8_t*)ring_v + in * width + g * GROUP;
            uint16_t* pair = ring_params + (in * groups + g) * 2;
            float scale = half_to_float(pair[0]), zero = half_to_float(pair[1]);
            for (int i = 0; i < GROUP; i++) numbers[i] = held[i] * scale + zero;
            codes_of(numbers, GROUP, 1, bits, 1, codes, params + (out * groups + g) * 2);
            pack_codes(codes, GROUP, bits, (uint8_t*)v + (out * width + g * GROUP) * bits / 8);
            for (int i = 0; i < GROUP; i += L) store(numbers + i, load(x + g * GROUP + i));
            codes_of(numbers, GROUP, 1, 8, 1, held, pair);
        }
    }
}

}  // namespace
