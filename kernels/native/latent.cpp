// A token joins a ring of the newest; the one that leaves it goes to a store at fewer coordinates and bits.
#include "encode.h"

namespace {

// A ring [B, R] of the newest tokens and a store [B, slots] of those before, contiguous in memory. A key is `rank`
// numbers; the store keeps the `leading` ones and the `others` in separate buffers. Values are `width` numbers: of T,
// or codes of 8 bits in the ring and of `bits` in the store.
template <class T> struct Latents {
    struct {
        T* k;
        void* v;
        uint16_t* params;
        int64_t slots, rank;
    } ring;
    struct {
        T *lead, *rest;
        void* v;
        uint16_t* params;
        int64_t slots, leading, others;  // numbers of either part of a key
    } store;
    int64_t bits, width;
};

// The token of each of B rows at pos [B]: keys [B, rank], values [B, width]
template <class T>
void append_token(const Latents<T>& to, const T* keys, const T* values, const int64_t* pos, int64_t B) {
    const auto &ring = to.ring, &old = to.store;
    const int64_t width = to.width, groups = width / GROUP;
    for (int64_t b = 0; b < B; b++) {
        int64_t in = b * ring.slots + pos[b] % ring.slots,
                out = b * old.slots + ((pos[b] - ring.slots) % old.slots + old.slots) % old.slots;
        T* token = ring.k + in * ring.rank;
        std::copy_n(token, old.leading, old.lead + out * old.leading);
        std::copy_n(token + old.leading, old.others, old.rest + out * old.others);
        std::copy_n(keys + b * ring.rank, ring.rank, token);
        const T* x = values + b * width;
        if (to.bits == 16) {
            std::copy_n((const T*)ring.v + in * width, width, (T*)old.v + out * width);
            std::copy_n(x, width, (T*)ring.v + in * width);
            continue;
        }
        for (int64_t g = 0; g < groups; g++) {
            float numbers[GROUP];
            uint8_t codes[GROUP];
            uint8_t* held = (uint8_t*)ring.v + in * width + g * GROUP;
            uint16_t* pair = ring.params + (in * groups + g) * 2;
            float scale = half_to_float(pair[0]), zero = half_to_float(pair[1]);
            for (int i = 0; i < GROUP; i++) numbers[i] = held[i] * scale + zero;
            codes_of(numbers, GROUP, 1, to.bits, 1, codes, old.params + (out * groups + g) * 2);
            pack_codes(codes, GROUP, to.bits, (uint8_t*)old.v + (out * width + g * GROUP) * to.bits / 8);
            for (int i = 0; i < GROUP; i += L) store(numbers + i, load(x + g * GROUP + i));
            codes_of(numbers, GROUP, 1, 8, 1, held, pair);
        }
    }
}

}  // namespace
