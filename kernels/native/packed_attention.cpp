// Attention over sinks, a list of packed tokens, which are unpacked block by block, and the newest tokens.
#include "softmax.h"

namespace {

// Tokens in 2, 4 or 8 bits, [B, H, slots, ...] contiguous, or those of one head
struct Packed {
    const uint8_t *k, *v;
    const uint16_t *k_params, *v_params;  // scale and zero per 32 channels
    const uint8_t* signs;                 // a bit for each channel of a key; or null

    Packed of(int64_t first, int64_t D, int64_t bits) const {  // from token `first` on
        const int64_t bytes = first * D * bits / 8, pairs = first * (D / 32) * 2;
        return {k + bytes, v + bytes, k_params + pairs, v_params + pairs, signs ? signs + first * D / 8 : nullptr};
    }
};

template <int BITS>
void add_packed(Seen& seen, const float* q, const Packed& of, const int64_t* idx, int64_t lo, int64_t hi) {
    int D = seen.D, bytes = D * BITS / 8, pairs = D / 32 * 2;
    std::vector<float> rows(2 * N * D);
    const float *ks[N], *vs[N];
    for (int i = 0; i < N; i++) ks[i] = &rows[i * D], vs[i] = &rows[(N + i) * D];
    for (int64_t first = lo; first < hi; first += N) {
        int n = (int)std::min<int64_t>(N, hi - first);
        for (int i = 0; i < n; i++) {
            if (first + i + N < hi) {
                int64_t next = idx[first + i + N];
                __builtin_prefetch(of.k + next * bytes), __builtin_prefetch(of.v + next * bytes);
                __builtin_prefetch(of.k_params + next * pairs), __builtin_prefetch(of.v_params + next * pairs);
                if (of.signs) __builtin_prefetch(of.signs + next * D / 8);
            }
            int64_t t = idx[first + i];
            const uint8_t* signs = of.signs ? of.signs + t * D / 8 : nullptr;
            unpack<BITS>(of.k + t * bytes, of.k_params + t * pairs, signs, D, (float*)ks[i]);
            unpack<BITS>(of.v + t * bytes, of.v_params + t * pairs, nullptr, D, (float*)vs[i]);
        }
        seen.add(Plain{q}, ks, vs, n, Next<float>{}, [] {});
    }
}

// Tokens in full precision, [B, H, slots, D] contiguous
template <class T> struct FullPrecision {
    const T *k, *v;
    int64_t slots;

    Slots<T> of(int64_t group, int64_t D, const int64_t* idx) const {
        return {k + group * slots * D, v + group * slots * D, D, D, idx};
    }
};

// Tokens that a list refers to: packed, or whole at 16 bits. alpha [B, H, D]: factors of the keys, or null
template <class T> struct Listed {
    int64_t bits;
    Packed packed;
    FullPrecision<T> full_precision;
    const float* alpha;
};

// Positions, each [B]; the ring has the tokens decoded from `flushed` [1] on
struct Lengths {
    const int64_t *pos, *prompt, *flushed;
};

template <class T> void attend_packed(const Heads<T>& heads, const List& list, const Listed<T>& listed,
                                      const FullPrecision<T>& sinks, const FullPrecision<T>& ring,
                                      const Lengths& lengths) {
    const int64_t H = heads.H, G = heads.G, D = heads.D, bits = listed.bits, parts = parts_of(list.K);
    attention(heads, parts + 1, [&](int64_t group, int64_t part, const float* query, Seen& seen) {
        int64_t b = group / H;
        if (part == parts) {  // sinks, and the decoded tokens that the ring holds
            int64_t prompt = lengths.prompt[b], newest = lengths.pos[b] - prompt,
                    oldest = std::max(*lengths.flushed, newest - ring.slots + 1);
            seen.add_slots(query, sinks.of(group, D, nullptr), 0, std::min(sinks.slots, prompt));
            std::vector<int64_t> slots;
            for (int64_t i = oldest; i <= newest; i++) slots.push_back((i % ring.slots + ring.slots) % ring.slots);
            seen.add_slots(query, ring.of(group, D, slots.data()), 0, (int64_t)slots.size());
            return;
        }
        const int64_t *idx = list.idx.of(b, group % H), n = *list.count.of(b, group % H);
        int64_t lo = part * CHUNK, hi = std::min({list.K, n, lo + CHUNK});
        if (bits == 16) return seen.add_slots(query, listed.full_precision.of(group, D, idx), lo, hi);
        std::vector<float> x(query, query + G * D);
        for (int64_t i = 0; listed.alpha && i < G * D; i++) x[i] *= listed.alpha[group * D + i % D];
        const Packed own = listed.packed.of(group * listed.full_precision.slots, D, bits);
        (bits == 2 ? add_packed<2> : bits == 4 ? add_packed<4> : add_packed<8>)(seen, x.data(), own, idx, lo, hi);
    });
}

}  // namespace
