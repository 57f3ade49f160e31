// Attention over every token, in few bits but for the first and the newest, unpacked block by block.
#include "softmax.h"

namespace {

// Channels are unpacked in an order of their own, as many of 16 neighbouring bytes at once as a byte holds: the first
// ones of the bytes, then the second ones, and so on. Queries are put in it once for 2048 tokens, outputs back.
template <int BITS> constexpr int STORED = BITS == 3 ? 2 : BITS;  // bits in the first plane of a row
template <int BITS> constexpr int STEP = 16 * 8 / STORED<BITS>;   // channels of 16 bytes

// codes of a row of D channels, times scale plus zero of each group where params are given
template <int BITS> void unpack_in_order(const uint8_t* row, const uint16_t* params, int group, int D, float* out) {
    typedef uint8_t v16 __attribute__((vector_size(16)));
    constexpr int B = STORED<BITS>, C = STEP<BITS>;
    vf scale = vf{} + 1.0f, zero = {};
    const vu nibble = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    for (int d = 0; d < D; d += C) {
        vu w = __builtin_convertvector(load_as<v16>(row + d * B / 8), vu), third = {};
        if constexpr (BITS == 3) {  // channel 4 j + r of 64 has its third bit at 4 j + r
            uint32_t a = load_as<uint32_t>(row + D / 4 + d / 8), b = load_as<uint32_t>(row + D / 4 + d / 8 + 4);
            third = vu{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b} >> nibble;
        }
        if (params && (d == 0 || group < D)) {
            // a division takes longer than 16 channels do
            const uint16_t* one = params + (group == 32 ? d / 32 : d / group) * 2;
            const uint16_t* two = C < 64 ? one : params + (group == 32 ? d / 32 + 1 : (d + 32) / group) * 2;
            scale = vf{} + half_to_float(one[0]), zero = vf{} + half_to_float(one[1]);
            if (one != two) {
                float s = half_to_float(two[0]), z = half_to_float(two[1]);
                const vi upper = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};
                scale = upper ? vf{} + s : scale, zero = upper ? vf{} + z : zero;
            }
        }
        for (int r = 0; r < C / L; r++) {
            vu code = (w >> (B * r)) & ((1u << B) - 1);
            if constexpr (BITS == 3) code |= (third >> r & 1) << 2;
            vf x = __builtin_convertvector((vi)code, vf);
            store(out + d + r * L, params ? x * scale + zero : x);
        }
    }
}

// One head's keys or values: `packed` rows of slots = positions, `whole` rows of sinks and a ring.
template <class T> struct Quantized {
    const uint8_t* packed;
    const uint16_t* params;
    const T* whole;
    int64_t bits, group, sinks, ring;
    int D, per;  // channels that a byte of the first plane holds, where they are unpacked in that order; else 1

    Quantized(const void* packed, const uint16_t* params, const void* whole, int64_t head, int64_t slots, int64_t bits,
              int64_t group, bool channels, int64_t sinks, int64_t held, int D)
        : packed((const uint8_t*)packed + head * slots * D * (bits == 16 ? (int64_t)sizeof(T) * 8 : bits) / 8),
          params(params ? params + head * slots * D / (channels ? N : group) * 2 : nullptr),
          whole((const T*)whole + head * held * D), bits(bits), group(group), sinks(sinks), ring(held - sinks), D(D) {
        per = bits == 16 ? 1 : 8 / (bits == 3 ? 2 : (int)bits);
        if (D % (16 * per)) per = 1;
    }

    int64_t slot(int64_t t) const { return t < sinks ? t : sinks + (t - sinks) % ring; }
    int at(int c) const { return c / (16 * per) * (16 * per) + c % per * 16 + c % (16 * per) / per; }  // of channel c

    const uint16_t* params_of(int64_t t) const { return params + t * (D / group) * 2; }

    template <int BITS> void read(int64_t t, const uint16_t* given, float* out) const {
        const uint8_t* row = packed + t * D * BITS / 8;
        if (per > 1 || BITS == 8) return unpack_in_order<BITS>(row, given, (int)group, D, out);
        if (given) return unpack<BITS>(row, given, nullptr, D, out, (int)group);
        for (int d = 0; d < D; d += L) store(out + d, codes_at<BITS>(row, D, d));
    }

    void take(int64_t t, const uint16_t* given, float* out) const {  // one packed token; its codes, without params
        if (bits == 2) read<2>(t, given, out);
        else if (bits == 3) read<3>(t, given, out);
        else if (bits == 4) read<4>(t, given, out);
        else if (bits == 8) read<8>(t, given, out);
        else for (int d = 0; d < D; d += L) store(out + d, load((const T*)packed + t * D + d));
    }

    void take_whole(int64_t t, float* out) const {
        vf x;
        for (int d = 0; d < D; d += L) {
            x = load(whole + slot(t) * D + d);
            for (int j = 0; j < L; j++) out[at(d + j)] = x[j];
        }
    }
};

}  // namespace

extern "C" {

// Keys are packed from `sinks` to k_stop [B], values to v_stop [B] <= k_stop; all others are whole.
void kvf_quantized_attention(int64_t is_bf16, int64_t k_bits, int64_t v_bits, int64_t channels, const void* q, const void* k,
                             const uint16_t* k_params, const void* k_whole, const void* v, const uint16_t* v_params,
                             const void* v_whole, const int64_t* pos, const int64_t* k_stop, const int64_t* v_stop,
                             void* out, int64_t q_row, int64_t q_head, int64_t B, int64_t H, int64_t G, int64_t D,
                             int64_t k_slots, int64_t v_slots, int64_t sinks, int64_t held, int64_t k_group,
                             int64_t v_group, int64_t threads) {
    int64_t listed = parts_of(*std::max_element(k_stop, k_stop + B));
    FLOAT_OR_BF16(attention((const T*)q, q_row, q_head, (T*)out, B, H, G, D, listed + 1, threads,
        [&](int64_t head, int64_t part, const float* query, Seen& seen) {
            int64_t b = head / H;
            Quantized<T> keys(k, k_params, k_whole, head, k_slots, k_bits, k_group, channels, sinks, held, D);
            Quantized<T> values(v, v_params, v_whole, head, v_slots, v_bits, v_group, false, sinks, held, D);
            if (part == listed) {  // what is whole
                std::vector<int64_t> slots;
                for (int64_t t = 0; t < std::min(sinks, pos[b] + 1); t++) slots.push_back(t);
                for (int64_t t = std::max(sinks, k_stop[b]); t <= pos[b]; t++) slots.push_back(keys.slot(t));
                return seen.add_slots(query, keys.whole, values.whole, D, D, slots.data(), 0, (int64_t)slots.size());
            }
            std::vector<float> rows(2 * N * D), turned(G * D), scaled(G * D), sums(G), scale(D), zero(D), y(D);
            std::vector<int> order(D);
            for (int d = 0; d < D; d++) order[d] = keys.at(d);
            const float *ks[N], *vs[N];
            for (int i = 0; i < N; i++) ks[i] = &rows[i * D], vs[i] = &rows[(N + i) * D];
            for (int g = 0; g < G; g++)
                for (int d = 0; d < D; d++) turned[g * D + order[d]] = query[g * D + d], sums[g] += query[g * D + d];
            // q . (scale * code + zero): where all of a key, or of a channel, has one scale, codes alone are unpacked
            bool by_channel = channels && k_bits < 16, by_token = k_bits < 16 && !channels && k_group == D;
            const Next<float> nothing{};
            int64_t hi = std::min(k_stop[b], (part + 1) * CHUNK);
            for (int64_t first = std::max(sinks, part * CHUNK); first < hi; first += N) {
                int n = (int)std::min<int64_t>(N, hi - first);
                for (int i = 0; i < n; i++) {
                    int64_t t = first + i;
                    keys.take(t, by_channel || by_token || k_bits == 16 ? nullptr : keys.params_of(t), (float*)ks[i]);
                    if (t >= v_stop[b]) values.take_whole(t, (float*)vs[i]);
                    else values.take(t, v_bits == 16 ? nullptr : values.params_of(t), (float*)vs[i]);
                }
                const float* x = turned.data();
                if (by_channel) {
                    const uint16_t* pairs = keys.params + first / N * D * 2;
                    for (int d = 0; d < D; d++) {
                        int at = order[d];  // divisions here would take longer than the block
                        scale[at] = half_to_float(pairs[2 * d]), zero[at] = half_to_float(pairs[2 * d + 1]);
                    }
                    for (int g = 0; g < G; g++) {
                        vf total = {};
                        for (int d = 0; d < D; d += L) {
                            vf from = load(&turned[g * D + d]);
                            store(&scaled[g * D + d], from * load(&scale[d])), total += from * load(&zero[d]);
                        }
                        sums[g] = sum(total);
                    }
                    x = scaled.data();
                }
                by_heads(G, [&](auto m, int g) { dots<m>(x + g * D, ks, n, D, &seen.p[g * N], nothing); });
                for (int g = 0; g < G; g++) {
                    float* p = &seen.p[g * N];
                    for (int i = 0; i < n; i++) {
                        if (by_channel) p[i] += sums[g];
                        if (by_token) {
                            const uint16_t* pair = keys.params_of(first + i);
                            p[i] = p[i] * half_to_float(pair[0]) + sums[g] * half_to_float(pair[1]);
                        }
                    }
                    float shrink = seen.soften(g, p, n, N);
                    for (int d = 0; d < D; d += L) store(&seen.y[g * D + d], load(&seen.y[g * D + d]) * shrink);
                }
                by_heads(G, [&](auto m, int g) { weigh<m>(&seen.p[g * N], vs, n, D, &seen.y[g * D], nothing); });
            }
            for (int g = 0; g < G; g++) {
                std::copy(&seen.y[g * D], &seen.y[g * D] + D, y.data());
                for (int d = 0; d < D; d++) seen.y[g * D + d] = y[values.at(d)];
            }
        }))
}
}
