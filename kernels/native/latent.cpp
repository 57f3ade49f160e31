// A token joins a ring of the newest; the one that is no longer recent goes to a store at fewer coordinates and bits.
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
    int64_t bits, width, recent;
};

// The token of each of B rows at pos [B]: keys [B, rank], values [B, width]. That at pos - recent goes to the store.
template <class T>
void append_token(const Latents<T>& to, const T* keys, const T* values, const int64_t* pos, int64_t B) {
    const auto &ring = to.ring, &old = to.store;
    const int64_t width = to.width, groups = width / GROUP;
    for (int64_t b = 0; b < B; b++) {
        auto slot = [&](int64_t n, int64_t t) { return b * n + (t % n + n) % n; };
        int64_t in = slot(ring.slots, pos[b]), from = slot(ring.slots, pos[b] - to.recent),
                out = slot(old.slots, pos[b] - to.recent);
        const T* token = ring.k + from * ring.rank;
        std::copy_n(token, old.leading, old.lead + out * old.leading);
        std::copy_n(token + old.leading, old.others, old.rest + out * old.others);
        std::copy_n(keys + b * ring.rank, ring.rank, ring.k + in * ring.rank);
        const T* x = values + b * width;
        if (to.bits == 16) {
            std::copy_n((const T*)ring.v + from * width, width, (T*)old.v + out * width);
            std::copy_n(x, width, (T*)ring.v + in * width);
            continue;
        }
        for (int64_t g = 0; g < groups; g++) {
            float numbers[GROUP];
            uint8_t codes[GROUP];
            const uint8_t* held = (const uint8_t*)ring.v + from * width + g * GROUP;
            const uint16_t* pair = ring.params + (from * groups + g) * 2;
            float scale = half_to_float(pair[0]), zero = half_to_float(pair[1]);
            for (int i = 0; i < GROUP; i++) numbers[i] = held[i] * scale + zero;
            codes_of(numbers, GROUP, 1, to.bits, 1, codes, old.params + (out * groups + g) * 2);
            pack_codes(codes, GROUP, to.bits, (uint8_t*)old.v + (out * width + g * GROUP) * to.bits / 8);
            for (int i = 0; i < GROUP; i += L) store(numbers + i, load(x + g * GROUP + i));
            codes_of(numbers, GROUP, 1, 8, 1, (uint8_t*)ring.v + in * width + g * GROUP,
                     ring.params + (in * groups + g) * 2);
        }
    }
}

}  // namespace
