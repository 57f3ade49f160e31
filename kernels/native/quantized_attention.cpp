// Attention over every token, quantized but for the first and the newest, unpacked block by block.
#include "encode.h"
#include "softmax.h"

namespace {

// Channels are unpacked in an order of their own, L neighbouring bytes at once: the first channel of each byte, then
// the second, and so on. Queries are put into this order once per 2048 tokens, and outputs back.
template <int BITS> constexpr int STORED = BITS == 3 ? 2 : BITS;  // bits in the first plane of a row
template <int BITS> constexpr int STEP = L * 8 / STORED<BITS>;    // channels in L bytes

// What codes stand for.
struct IntegerCodes {
    template <int BITS> vf numbers(vu code) const {
        if constexpr (BITS == 3) return __builtin_convertvector((vi)code, vf);
        else return low_bits<BITS>(code);
    }
    vf of(vf code) const { return code; }
};
struct BookCodes {  // an entry for each code, repeated up to 16: bits above a code do not matter
    vf entries[ENTRIES / L];
    BookCodes(const float* book, int bits) {
        float all[ENTRIES];
        for (int i = 0; i < ENTRIES; i++) all[i] = book[i & ((1 << bits) - 1)];
        std::memcpy(entries, all, sizeof all);
    }
    template <int BITS> vf numbers(vu code) const { return looked_up(code, entries); }
    vf of(vf code) const { return looked_up((vu) __builtin_convertvector(code, vi), entries); }
};
struct E4M3Codes {  // as in half_to_float
    template <int BITS> vf numbers(vu code) const {
        vf x = (vf)((code & 0x7f) << 20) * 0x1p120f;
        return (vf)((vu)x | (code & 0x80) << 24);
    }
};

// Codes in L bytes of a row of D channels, from channel d on, as numbers.
template <int BITS, class Of> void codes_in_order(const Of& of, const uint8_t* row, int D, int d, vf* out) {
    constexpr int B = STORED<BITS>;
    vu w = bytes_at(row + d * B / 8), third = {};
    if constexpr (BITS == 3) {  // channel 4 j + r has its third bit at 4 j + r of the second plane
        const uint8_t* at = row + D / 4 + d / 8;
        third = two_words(load_as<uint32_t>(at), L == 16 ? load_as<uint32_t>(at + 4) : 0) >> (vu)(LANE % 8 * 4);
    }
    for (int r = 0; r < STEP<BITS> / L; r++) {
        vu code = w >> (B * r);
        if constexpr (BITS == 3) code = (code & 3) | (third >> r & 1) << 2;
        out[r] = of.template numbers<BITS>(code);
    }
}

// Consecutive packed rows of D channels. They are read in that order; or, if L bytes do not divide a row, in the order
// of channels.
template <int BITS, bool IN_ORDER, class Codes = IntegerCodes> struct Rows {
    static constexpr int C = IN_ORDER && STEP<BITS> > 32 ? STEP<BITS> : 32;  // channels at a time, a divisor of D
    static constexpr int V = C / L;
    const uint8_t* at;
    const float* pairs;  // scale and zero of each group, or null
    int D, group, bytes, groups;
    Codes codes;

    Rows(const uint8_t* at, const float* pairs, int D, int group, Codes codes = {})
        : at(at), pairs(pairs), D(D), group(group), bytes(D * BITS / 8), groups(D / group), codes(codes) {}

    void prefetch(int i) const {  // the row of the next block
        for (int b = 0; b < bytes; b += 64) __builtin_prefetch(at + (N + i) * bytes + b, 0, 2);
    }

    struct Groups {
        int one, two;
    };  // of the first and the last of the C channels from d on
    Groups groups_of(int d) const {  // a division takes longer than 16 channels do
        if (group == D || !pairs) return {0, 0};
        if (group == 32) return {d / 32 * 2, (d + C - 1) / 32 * 2};
        return {d / group * 2, (d + C - 1) / group * 2};
    }

    void read(int i, int d, Groups g, vf* out) const {
        const uint8_t* row = at + i * bytes;
        if constexpr (IN_ORDER)
            for (int c = 0; c < C; c += STEP<BITS>) codes_in_order<BITS>(codes, row, D, d + c, out + c / L);
        else
            for (int c = 0; c < C; c += L) out[c / L] = codes.of(codes_at<BITS>(row, D, d + c));
        if (!pairs) return;
        const float* pair = pairs + i * groups * 2;
        vf scale = all(pair[g.one]), zero = all(pair[g.one + 1]);
        if (C > 32 && g.one != g.two) {
            const vi upper = LANE >= L / 2;  // channels of the last bytes
            scale = upper ? all(pair[g.two]) : scale, zero = upper ? all(pair[g.two + 1]) : zero;
        }
        for (int v = 0; v < V; v++) out[v] = out[v] * scale + zero;
    }

    template <int G>
    __attribute__((noinline)) void dots(const float* q, int n, float* logits) const {  // as the dots of softmax.h
        for (int i = 0; i < n; i += 2) {
            int j = std::min(i + 1, n - 1);
            prefetch(i), prefetch(i + 1);
            vf acc[2][G] = {}, x[V], y[V];
            for (int d = 0; d < D; d += C) {
                Groups at = groups_of(d);
                read(i, d, at, x), read(j, d, at, y);
                for (int v = 0; v < V; v++)
                    for (int g = 0; g < G; g++) {
                        vf query = load(q + g * D + d + v * L);
                        acc[0][g] += x[v] * query, acc[1][g] += y[v] * query;
                    }
            }
            for (int g = 0; g < G; g++)
                for (int m = 0; m < 2; m++) logits[g * N + i + m] = sum(acc[m][g]);
        }
    }

    template <int G> __attribute__((noinline)) void weigh(const float* p, int n, float* y) const {
        for (int i = 0; i < n; i++) prefetch(i);
        for (int d = 0; d < D; d += C) {
            Groups at = groups_of(d);
            vf acc[V][G], x[V];
            for (int v = 0; v < V; v++)
                for (int g = 0; g < G; g++) acc[v][g] = load(y + g * D + d + v * L);
            for (int i = 0; i < n; i++) {
                read(i, d, at, x);
                for (int g = 0; g < G; g++) {
                    vf weight = all(p[g * N + i]);
                    for (int v = 0; v < V; v++) acc[v][g] += x[v] * weight;
                }
            }
            for (int v = 0; v < V; v++)
                for (int g = 0; g < G; g++) store(y + g * D + d + v * L, acc[v][g]);
        }
    }
};

void floats_of(const uint16_t* halves, int n, float* out) {
    int i = 0;
    for (; i + L <= n; i += L) store(out + i, half_to_float(halves_at(halves + i)));
    for (; i < n; i++) out[i] = half_to_float(halves[i]);
}

// Keys or values of all heads: packed ones in `slots` = positions, and `held` whole ones, first sinks, then a ring
template <class T> struct QuantizedCache {
    const void* packed;  // [B, H, slots, D] in `bits`
    const uint16_t*
        params;  // scales and zeros: of `group` channels of a token, or, by_channel, of a channel of N tokens
    const T* full_precision;  // [B, H, held, D]
    int64_t slots, bits, group, sinks, held;
    bool by_channel;
    const float* book;  // or null: what codes stand for; then a scale without a zero is for `share` tokens
    int64_t share;
};

// Keys or values of one head
template <class T> struct Quantized {
    const uint8_t* packed;
    const uint16_t* params;
    const T* full_precision;
    int64_t bits, group, sinks, ring;
    const float* book;
    int64_t share;
    int D, per;  // channels in a byte of the first plane, if they are unpacked in that order; otherwise 1

    Quantized(const QuantizedCache<T>& of, int64_t head, int D)
        : packed((const uint8_t*)of.packed +
                 head * of.slots * D * (of.bits == 16 ? (int64_t)sizeof(T) * 8 : of.bits) / 8),
          params(!of.params ? nullptr
                 : of.book  ? of.params + head * (of.slots / of.share)
                            : of.params + head * of.slots * D / (of.by_channel ? N : of.group) * 2),
          full_precision(of.full_precision + head * of.held * D),
          bits(of.bits),
          group(of.group),
          sinks(of.sinks),
          ring(of.held - of.sinks),
          book(of.book),
          share(of.share),
          D(D) {
        per = bits == 16 ? 1 : 8 / (bits == 3 ? 2 : (int)bits);
        if (D % (L * per)) per = 1;
    }

    int64_t slot(int64_t t) const { return t < sinks ? t : sinks + (t - sinks) % ring; }
    int at(int c) const { return c / (L * per) * (L * per) + c % per * L + c % (L * per) / per; }  // place of channel c

    void pairs_of(int64_t t, int n, float* out) const {  // of n tokens that are quantized by themselves
        if (!book) return floats_of(params + t * (D / group) * 2, n * (int)(D / group) * 2, out);
        for (int i = 0; i < n; i++) out[2 * i] = half_to_float(params[(t + i) / share]), out[2 * i + 1] = 0;
    }

    // f(packed rows from t on); pairs as in Rows
    template <class F> void packed_rows(int64_t t, const float* pairs, F f) const {
        const uint8_t* at = packed + t * D * bits / 8;
        const auto rows = [&](auto width, auto codes) {
            constexpr int BITS = decltype(width)::value;
            if (per > 1) f(Rows<BITS, true, decltype(codes)>(at, pairs, D, (int)group, codes));
            else f(Rows<BITS, false, decltype(codes)>(at, pairs, D, (int)group, codes));
        };
        const auto few_bits = [&](auto codes) {
            if (bits == 2) rows(std::integral_constant<int, 2>(), codes);
            else if (bits == 3) rows(std::integral_constant<int, 3>(), codes);
            else rows(std::integral_constant<int, 4>(), codes);
        };
        if (bits == 8 && book) f(Rows<8, true, E4M3Codes>(at, pairs, D, (int)group));
        else if (bits == 8) f(Rows<8, true>(at, pairs, D, (int)group));
        else if (book) few_bits(BookCodes(book, (int)bits));
        else few_bits(IntegerCodes());
    }

    void take(int64_t t, float* out) const {  // a token of 16 bits
        for (int d = 0; d < D; d += L) store(out + d, load((const T*)packed + t * D + d));
    }

    void take_whole(int64_t t, float* out) const {
        vf x;
        for (int d = 0; d < D; d += L) {
            x = load(full_precision + slot(t) * D + d);
            for (int j = 0; j < L; j++) out[at(d + j)] = x[j];
        }
    }
};

// One head's keys or values for writing, as in QuantizedCache. `block` tokens leave the ring together; each GROUP of
// them share a scale and a zero per channel, or with a book a scale. Otherwise groups of a token's channels do, or all
template <class T> struct QuantizedHead {
    char* packed;
    uint16_t* params;
    T* full_precision;
    int64_t slots, bits, group, sinks, ring, block, D;
    float clip;
    const float* book;
};

// Puts a token of one head, x [D] at pos, into the ring and packs what leaves it: the token that x replaces or, if
// tokens share scales, a block of tokens that ends with x, or just before x if the ring has room for one more.
template <class T> void append_quantized(const QuantizedHead<T>& to, const T* x, int64_t pos) {
    const int64_t bits = to.bits, sinks = to.sinks, ring = to.ring, block = to.block, D = to.D, group = to.group;
    auto slot_of = [&](int64_t t) { return to.full_precision + (t < sinks ? t : sinks + (t - sinks) % ring) * D; };
    T* slot = slot_of(pos);
    int64_t row_bytes = D * (bits == 16 ? (int64_t)sizeof(T) * 8 : bits) / 8;
    int64_t end = pos + 1 - (ring - block), n = block ? block : 1;  // end of the block that leaves, if one does
    // if nothing leaves, the slot's contents go to a slot that is never read
    int64_t first = block ? end - block : ((pos - ring) % to.slots + to.slots) % to.slots;
    if (block) std::copy_n(x, D, slot);
    if (bits == 16) std::copy_n(slot, D, (T*)(to.packed + first * row_bytes));
    else if (!block || (end > 0 && end % block == 0)) {
        std::vector<float> numbers(n * D);
        std::vector<uint8_t> codes(n * D);
        for (int64_t i = 0; i < n; i++) {
            const T* from = block ? slot_of(first + i) : slot;
            for (int64_t d = 0; d < D; d += L) store(&numbers[i * D + d], load(from + d));
        }
        if (to.book)
            for (int64_t i = 0, share = block ? GROUP : 1; i < n; i += share)
                codes_of_book(&numbers[i * D], share * D, bits, to.book, &codes[i * D],
                              to.params + (first + i) / share);
        else if (block)
            for (int64_t i = 0; i < n; i += GROUP)
                for (int64_t d = 0; d < D; d++)
                    codes_of(&numbers[i * D + d], GROUP, D, bits, to.clip, &codes[i * D + d],
                             to.params + ((first + i) / GROUP * D + d) * 2);
        else
            for (int64_t d = 0; d < D; d += group)
                codes_of(&numbers[d], group, 1, bits, to.clip, &codes[d], to.params + (first * D + d) / group * 2);
        for (int64_t i = 0; i < n; i++)
            pack_codes(&codes[i * D], D, bits, (uint8_t*)to.packed + (first + i) * row_bytes);
    }
    if (!block) std::copy_n(x, D, slot);
}

// Keys are packed from the sinks up to k [B], values up to v [B] <= k; all others up to pos [B] are whole
struct Ends {
    const int64_t *pos, *k, *v;
};

template <class T>
void attend_quantized(const Heads<T>& heads, const QuantizedCache<T>& k, const QuantizedCache<T>& v, const Ends& ends) {
    const int64_t H = heads.H, G = heads.G, D = heads.D;
    int64_t packed = parts_of(*std::max_element(ends.k, ends.k + heads.B));
    attention(heads, packed + 1, [&](int64_t head, int64_t part, const float* query, Seen& seen) {
        int64_t b = head / H;
        Quantized<T> keys(k, head, D), values(v, head, D);
        if (part == packed) {  // the whole tokens
            std::vector<int64_t> slots;
            for (int64_t t = 0; t < std::min(k.sinks, ends.pos[b] + 1); t++) slots.push_back(t);
            for (int64_t t = std::max(k.sinks, ends.k[b]); t <= ends.pos[b]; t++) slots.push_back(keys.slot(t));
            return seen.add_slots(query, Slots<T>{keys.full_precision, values.full_precision, D, D, slots.data()}, 0,
                                  (int64_t)slots.size());
        }
        std::vector<float> rows(2 * N * D), turned(G * D), scaled(G * D), sums(G), scale(D), zero(D), y(D);
        std::vector<float> k_pairs(N * D / k.group * 2), v_pairs(N * D / v.group * 2), pairs(D * 2);
        std::vector<int> order(D);
        for (int d = 0; d < D; d++) order[d] = keys.at(d);
        const float *ks[N], *vs[N];
        for (int i = 0; i < N; i++) ks[i] = &rows[i * D], vs[i] = &rows[(N + i) * D];
        for (int g = 0; g < G; g++)
            for (int d = 0; d < D; d++) turned[g * D + order[d]] = query[g * D + d], sums[g] += query[g * D + d];
        // q . (scale * code + zero): if all of a key, or of a channel, has one scale, only codes are multiplied
        bool by_channel = k.by_channel && k.bits < 16, by_token = k.bits < 16 && !k.by_channel && k.group == D;
        const Next<float> nothing{};
        int64_t hi = std::min(ends.k[b], (part + 1) * CHUNK);
        for (int64_t first = std::max(k.sinks, part * CHUNK), next; first < hi; first = next) {
            next = std::min(hi, (first / N + 1) * N);  // tokens that share scales
            if (first < ends.v[b]) next = std::min(next, ends.v[b]);
            int n = (int)(next - first);
            const float* x = turned.data();
            if (by_channel) {
                floats_of(keys.params + first / N * D * 2, (int)D * 2, pairs.data());
                for (int d = 0; d < D; d++) scale[order[d]] = pairs[2 * d], zero[order[d]] = pairs[2 * d + 1];
                for (int g = 0; g < G; g++) {
                    vf total = {};
                    for (int d = 0; d < D; d += L) {
                        vf from = load(&turned[g * D + d]);
                        store(&scaled[g * D + d], from * load(&scale[d])), total += from * load(&zero[d]);
                    }
                    sums[g] = sum(total);
                }
                x = scaled.data();
            } else if (k.bits < 16) keys.pairs_of(first, n, k_pairs.data());
            if (k.bits == 16) {
                for (int i = 0; i < n; i++) keys.take(first + i, (float*)ks[i]);
                by_heads(G, [&](auto m, int g) { dots<m>(x + g * D, ks, n, D, &seen.p[g * N], nothing); });
            } else
                keys.packed_rows(first, by_channel || by_token ? nullptr : k_pairs.data(), [&](const auto& of) {
                    by_heads(G, [&](auto m, int g) { of.template dots<m>(x + g * D, n, &seen.p[g * N]); });
                });
            for (int g = 0; g < G; g++) {
                float *p = &seen.p[g * N], more = sums[g];
                if (by_channel)
                    for (int i = 0; i < n; i++) p[i] += more;
                if (by_token)
                    for (int i = 0; i < n; i++) p[i] = p[i] * k_pairs[2 * i] + more * k_pairs[2 * i + 1];
                float shrink = seen.soften(g, p, n, N);
                if (shrink != 1)
                    for (int d = 0; d < D; d += L) store(&seen.y[g * D + d], load(&seen.y[g * D + d]) * shrink);
            }
            if (v.bits < 16 && first < ends.v[b]) {
                values.pairs_of(first, n, v_pairs.data());
                values.packed_rows(first, v_pairs.data(), [&](const auto& of) {
                    by_heads(G, [&](auto m, int g) { of.template weigh<m>(&seen.p[g * N], n, &seen.y[g * D]); });
                });
                continue;
            }
            for (int i = 0; i < n; i++)
                if (first < ends.v[b]) values.take(first + i, (float*)vs[i]);
                else values.take_whole(first + i, (float*)vs[i]);
            by_heads(G, [&](auto m, int g) { weigh<m>(&seen.p[g * N], vs, n, D, &seen.y[g * D], nothing); });
        }
        for (int g = 0; g < G; g++) {
            std::copy(&seen.y[g * D], &seen.y[g * D] + D, y.data());
            for (int d = 0; d < D; d++) seen.y[g * D + d] = y[values.at(d)];
        }
    });
}

}  // namespace
