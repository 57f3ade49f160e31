// Attention over tokens whose keys are joint latents of all heads (SALS), expanded and rotated a block at a time.
#include "expanded.h"

namespace {

// Slots of all rows of the batch, or of one row: keys as coordinates, the first ones in a buffer of their own, and the
// values of all heads, W channels in 2, 4, 8 or 16 bits (16: of T).
template <class T> struct LatentSlots {
    const T *lead, *rest;
    int64_t first, second;  // coordinates in either buffer
    const char* values;
    const uint16_t* params;
    int64_t bits, W, slots;

    LatentSlots row(int64_t b) const {
        LatentSlots x = *this;
        x.lead += b * slots * first, x.rest += b * slots * second, x.values += b * slots * value_bytes();
        if (params) x.params += b * slots * W / 16;
        return x;
    }
    int64_t value_bytes() const { return W * (bits == 16 ? (int64_t)sizeof(T) * 8 : bits) / 8; }
    template <class Row> void take(int64_t slot, Row* to, int64_t R) const {
        take(lead + slot * first, first, to), take(rest + slot * second, second, to + first);
        std::fill(to + first + second, to + R, Row{});
    }
    static void take(const T* from, int64_t n, T* to) { std::memcpy(to, from, n * sizeof(T)); }
    template <class Row> static void take(const T* from, int64_t n, Row* to) {
        for (int64_t r = 0; r < n; r++) to[r] = number(from[r]);
    }
    void fetch(int64_t slot) const {
        prefetch_row(lead + slot * first, (int)first), prefetch_row(rest + slot * second, (int)second);
        prefetch_row(values + slot * value_bytes(), (int)value_bytes());
        if (params) prefetch_row(params + slot * W / 16, (int)W / 16);
    }
};

// Coded values of a block of BLOCK tokens, with a scale and a zero for 32 channels of a token. The weights are
// multiplied with the scales; the zeros contribute the same sum to all 32 channels.
template <class T> struct Coded {
    const LatentSlots<T>& from;
    int64_t pairs, padded;         // of a token
    Room<uint32_t> rows, columns;  // scale and zero
    const uint8_t* codes[BLOCK];
    Room<float> weight;
    std::vector<float> plus;

    Coded(const LatentSlots<T>& from, int G)
        : from(from),
          pairs(from.W / 32),
          padded((pairs + L - 1) / L * L),
          rows(BLOCK * padded),
          columns(BLOCK * padded),
          weight(G * BLOCK),
          plus(G) {}

    void turn(const int64_t* slot, int n) {
        const void* at[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            at[i] = &rows[i * padded];
            if (i < n) std::memcpy(&rows[i * padded], from.params + slot[i] * pairs * 2, pairs * 4);
            else std::fill(&rows[i * padded], &rows[(i + 1) * padded], 0u);
            if (i < n) codes[i] = (const uint8_t*)from.values + slot[i] * from.value_bytes();
        }
        for (int64_t e = 0; e < padded; e += L)
            for (int i = 0; i < BLOCK; i += L) transpose(at + i, e * 4, &columns[e * BLOCK + i], BLOCK * 4);
    }

    // y [G, D] += p [G, BLOCK] . the values of a head's channels
    template <int BITS> void weigh(const float* p, int64_t channel, int64_t D, int G, int n, float* y) {
        for (int64_t d = 0; d < D; d += 32) {
            const uint32_t* pair = &columns[(channel + d) / 32 * BLOCK];
            for (int g = 0; g < G; g++) {
                vf zeros = {};
                for (int i = 0; i < BLOCK; i += L) {
                    vu both = load_as<vu>(pair + i);
                    vf w = load(p + g * BLOCK + i);
                    store(&weight[g * BLOCK + i], w * half_to_float(both & 0xffff));
                    zeros += w * half_to_float(both >> 16);
                }
                plus[g] = sum(zeros);
            }
            for (int64_t c = d; c < d + 32; c += 2 * L)
                by_heads(G, [&](auto m, int g) {
                    vf acc[m][2];
                    for (int k = 0; k < m; k++)
                        for (int j = 0; j < 2; j++) acc[k][j] = load(y + (g + k) * D + c + j * L) + plus[g + k];
                    for (int i = 0; i < n; i++) {
                        const uint8_t* at = codes[i] + (channel + c) * BITS / 8;
                        vf x = codes_of<BITS>(at), z = codes_of<BITS>(at + L * BITS / 8);
                        for (int k = 0; k < m; k++) {
                            vf w = all(weight[(g + k) * BLOCK + i]);
                            acc[k][0] += x * w, acc[k][1] += z * w;
                        }
                    }
                    for (int k = 0; k < m; k++)
                        for (int j = 0; j < 2; j++) store(y + (g + k) * D + c + j * L, acc[k][j]);
                });
        }
    }
};

// What is attended to: the newest tokens, the last at pos [B], `recent` of them in the ring, and the first count[b] of
// slots idx [B, K] of the store, or, without a list, of all slots
struct Tokens {
    const int64_t *pos, *idx, *count;
    int64_t K, recent;
};

// Keys of the ring have `rank` coordinates in the basis [rank, H * D]; keys of the store have the first of these
template <class Unit, class T> void attend_latents_with(const Heads<T>& heads, const T* basis,
                                                        const LatentSlots<T>& ring, const LatentSlots<T>& store,
                                                        const Tokens& tokens, const Angles& angles) {
    const int64_t B = heads.B, H = heads.H, G = heads.G, D = heads.D, threads = heads.threads, rank = ring.first;
    int64_t W = H * D, longest = *std::max_element(tokens.count, tokens.count + B), span = span_of(longest);
    int64_t parts = (longest + span - 1) / span;
    Basis<Unit> panels(basis, W, false, W, rank, threads);
    const Heads<T> inner{.out = heads.out, .B = B, .H = 1, .G = H * G, .D = D, .threads = threads};
    attention(inner, 1 + parts, [&](int64_t b, int64_t part, const float*, Seen& seen) {
        const LatentSlots<T> from = part ? store.row(b) : ring.row(b);
        Expanded<Unit> keys(panels, filled_up<Unit>(from.first + from.second), angles.of(b), 0, H, D);
        Room<float> query(H * G * D), weights(G * BLOCK);
        scaled_query(heads.of(b, 0), heads.head, (int)(H * G), (int)D, LOG2_E / std::sqrt((float)D), query.at);
        const bool coded = from.bits < 16;
        Coded<T> codes(from, (int)G);
        const Next<T> nothing{};
        auto none = [](float*, int64_t) {};
        // the ring's slots have their places, a list its slots: the first token of the item, and the last
        int64_t begin = part ? (part - 1) * span : std::max<int64_t>(0, tokens.pos[b] + 1 - tokens.recent);
        int64_t end = part ? std::min(tokens.count[b], part * span) : tokens.pos[b] + 1;
        int64_t slot[BLOCK];
        for (int64_t first = begin; first < end; first += BLOCK) {
            keys.n = (int)std::min<int64_t>(BLOCK, end - first);
            for (int i = 0; i < keys.n; i++) {
                int64_t t = keys.at[i] = part && tokens.idx ? tokens.idx[b * tokens.K + first + i] : first + i;
                slot[i] = part ? t : t % ring.slots;
                from.take(slot[i], keys.row(i), keys.R);
            }
            keys.turn();
            if (coded) codes.turn(slot, keys.n);
            int64_t more = part && tokens.idx ? std::max<int64_t>(0, std::min<int64_t>(BLOCK, end - first - BLOCK)) : 0;
            for (int64_t h = 0; h < H; h++) {
                // listed tokens may be anywhere in memory: prefetch those of the next block a few at a time
                for (int64_t i = h * more / H; i < (h + 1) * more / H; i++) {
                    int64_t next = tokens.idx[b * tokens.K + first + BLOCK + i];
                    from.fetch(next), keys.fetch(next);
                }
                keys.logits(h, &query[h * G * D], (int)G, weights.at, none);
                for (int64_t g = h * G; g < (h + 1) * G; g++) {
                    float shrink = seen.soften((int)g, &weights[(g - h * G) * BLOCK], keys.n, BLOCK);
                    if (shrink != 1)
                        for (int64_t d = 0; d < D; d += L)
                            ::store(&seen.y[g * D + d], load(&seen.y[g * D + d]) * shrink);
                }
                float* y = &seen.y[h * G * D];
                if (!coded) {
                    const T* values[BLOCK];
                    for (int i = 0; i < keys.n; i++) values[i] = (const T*)from.values + slot[i] * W + h * D;
                    by_heads((int)G, [&](auto m, int g) {
                        weigh<m, BLOCK>(weights.at + g * BLOCK, values, keys.n, (int)D, y + g * D, nothing);
                    });
                } else if (from.bits == 2) codes.template weigh<2>(weights.at, h * D, D, (int)G, keys.n, y);
                else if (from.bits == 4) codes.template weigh<4>(weights.at, h * D, D, (int)G, keys.n, y);
                else codes.template weigh<8>(weights.at, h * D, D, (int)G, keys.n, y);
            }
        }
    });
}

template <class T> void attend_latents(const Heads<T>& heads, const T* basis, const LatentSlots<T>& ring,
                                       const LatentSlots<T>& store, const Tokens& tokens, const Angles& angles) {
    with_unit<T>([&](auto unit) {
        attend_latents_with<typename decltype(unit)::type>(heads, basis, ring, store, tokens, angles);
    });
}

}  // namespace
