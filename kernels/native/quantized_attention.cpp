// Attention over every token, quantized but for the first and the newest. A block of tokens is unpacked into L1: for a
// cache of fp32 to fp32, and for one of bf16 to integers of 16 bits, which are multiplied with queries and weights
// rounded to 16 bits, too. Their products are added up exactly.
#include "encode.h"
#include "softmax.h"

namespace {

constexpr int STEP = GROUP;  // channels that are unpacked at a time, in the order of `place`: even ones, then odd ones
int place(int d) { return d / STEP * STEP + d % 2 * 16 + d % STEP / 2; }

template <int BITS> void codes_of_step(const uint8_t* row, int D, int s, Sixteen* two) {
    constexpr int B = BITS == 3 ? 2 : BITS;  // bits in the first plane of a row
    constexpr int16_t MASK = (1 << B) - 1;
    const Sixteen w = two_codes_at<B>(row + s * STEP * B / 8);
    two[0] = w & MASK, two[1] = B == 4 ? w >> B : w >> B & MASK;  // 4 bits: nothing follows
    if constexpr (BITS == 3) {
        const Sixteen third = two_codes_at<1>(row + D / 4 + s * STEP / 8);
        two[0] |= (third & 1) << 2, two[1] |= (third & 2) << 1;
    }
}

// What codes of a step stand for, in fp32; without a book, the codes themselves
struct InFloats {
    typedef float Row;
    static constexpr float unit = 1;  // of what is unpacked
    static constexpr int64_t most = 1;
    vf entries[ENTRIES / L];
    InFloats(const float* book, int64_t bits) {
        float all[ENTRIES] = {};
        for (int i = 0; book && bits < 8 && i < 1 << bits; i++) all[i] = book[i];
        std::memcpy(entries, all, sizeof all);
    }
    template <bool BOOK, bool E4M3_CODES> void put(Sixteen* two, float* to) const {
        for (int f = 0; f < 2; f++)
            for (int part = 0; part < 16 / L; part++) {
                vf x;
                if constexpr (E4M3_CODES)  // fp16 has one bit more for exponents, and another bias
                    x = halves(two[f] << 8 >> 1 & (int16_t)0xbf80, part) * 256.0f;
                else if constexpr (!BOOK) x = load((const int16_t*)&two[f] + part * L);
                else x = looked_up(halves_at((const int16_t*)&two[f] + part * L), entries);
                store(to + f * 16 + part * L, x);
            }
    }
};

// The same in integers of 16 bits. Those of e4m3, 32 times as large, are a product of what the upper half of a code
// stands for, the sign and all but the lowest bit of the exponent, and the lower half, that bit and the mantissa;
// the smallest numbers are rounded to zero.
struct InIntegers {
    typedef int16_t Row;
    float unit;
    int64_t most;  // the largest number
    Table one, two;
    InIntegers(const float* book, int64_t bits)
        : unit(1), most((1 << bits) - 1), one(entries(book, bits, true)), two(entries(book, bits, false)) {
        if (!book) return;
        unit = bits == 8 ? 1 / 32.0f : largest_of(book, bits) / BOOK_MOST;
        most = bits == 8 ? 448 * 32 : BOOK_MOST;
    }
    template <bool BOOK, bool E4M3_CODES> void put(Sixteen* codes, int16_t* to) const {
        if constexpr (BOOK) one.look_up(codes);
        if constexpr (E4M3_CODES) {
            Sixteen upper[2] = {codes[0] >> 4, codes[1] >> 4}, lower[2] = {codes[0] & 15, codes[1] & 15};
            one.look_up(upper), two.look_up(lower);
            for (int f = 0; f < 2; f++) codes[f] = rounded_product(upper[f], lower[f]);
        }
        for (int f = 0; f < 2; f++) std::memcpy(to + f * 16, &codes[f], sizeof *codes);
    }

private:
    static constexpr int64_t BOOK_MOST = 4095;
    static float largest_of(const float* book, int64_t bits) {
        float most = 1e-30f;
        for (int i = 0; i < 1 << bits; i++) most = std::max(most, std::fabs(book[i]));
        return most;
    }
    static Table entries(const float* book, int64_t bits, bool first) {
        int16_t all[ENTRIES] = {};
        for (int i = 0; book && i < ENTRIES; i++)
            if (bits == 8)
                all[i] = (int16_t)(first ? (i & 8 ? -1 : 1) * (1 << (i & 7) * 2) : ((i & 7) + 8) << (i >> 3) << 10);
            else if (i < 1 << bits) all[i] = (int16_t)std::rint(book[i] / largest_of(book, bits) * BOOK_MOST);
        return Table(all);
    }
};

// Products of integers: queries q [G, D] . n rows, `apart` from each other, -> [G, N]
template <int G>
__attribute__((noinline)) void dots(const int16_t* q, const int16_t* rows, int apart, int n, int D, float* logits) {
    constexpr int M = L / G, TOGETHER = M < 4 ? M : 4;
    for (int i = 0; i < n; i += M) {
        vf sum[L];
        for (int first = 0; first < M; first += TOGETHER) {
            const int16_t* row = rows + (i + first) * apart;
            vi acc[G][TOGETHER] = {};
            for (int d = 0; d < D; d += 2 * L) {
                Halves x[TOGETHER];
                for (int m = 0; m < TOGETHER; m++) x[m] = load_as<Halves>(row + m * apart + d), keep(x[m]);
                for (int g = 0; g < G; g++) {
                    Halves query = load_as<Halves>(q + g * D + d);
                    keep(query);
                    for (int m = 0; m < TOGETHER; m++) acc[g][m] = add_dots(acc[g][m], x[m], query);
                }
            }
            for (int g = 0; g < G; g++)
                for (int m = 0; m < TOGETHER; m++) sum[g * M + first + m] = __builtin_convertvector(acc[g][m], vf);
        }
        const vf y = sums(sum);
        for (int g = 0; g < G; g++) std::memcpy(logits + g * N + i, (const char*)&y + g * M * 4, M * 4);
    }
}

// y [G, D] += pairs of weights [G, N / 2] . n rows, two at a time, times the weights' units. Each pair has 8 bytes
template <int G> __attribute__((noinline)) void weigh(const int32_t* weights, const float* unit, const int16_t* rows,
                                                      int apart, int n, int D, float* y) {
    const vi one = LANE / 4 % 2 * L + LANE / 8 * 4 + LANE % 4, two = one + L / 2;  // channels in their order
    for (int d = 0; d < D; d += 2 * L) {
        vi acc[G][2] = {};  // by fours of channels in turns
        for (int i = 0; i < n; i += 2) {
            Halves x[2];
            interleave(load_as<Halves>(rows + i * apart + d), load_as<Halves>(rows + (i + 1) * apart + d), x);
            for (int g = 0; g < G; g++) {
                const Halves weight = (Halves)(vi{} + weights[g * N + i]);
                for (int j = 0; j < 2; j++) acc[g][j] = add_dots(acc[g][j], x[j], weight);
            }
        }
        for (int g = 0; g < G; g++) {
            float* to = y + g * D + d;
            store(to, load(to) + __builtin_convertvector(two_of(acc[g][0], acc[g][1], one), vf) * unit[g]);
            store(to + L, load(to + L) + __builtin_convertvector(two_of(acc[g][0], acc[g][1], two), vf) * unit[g]);
        }
    }
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

void split_pairs(vu pairs, float* scale, float* zero) {  // of fp16
    store(scale, half_to_float(pairs & 0xffff)), store(zero, half_to_float(pairs >> 16));
}

// Keys or values of one head
template <class T> struct Quantized : QuantizedCache<T> {
    typedef std::conditional_t<std::is_same_v<T, float>, InFloats, InIntegers> Codes;
    typedef typename Codes::Row Row;
    int D, groups, each;  // groups of `each` channels of a token that have a scale
    Codes codes;

    Quantized(const QuantizedCache<T>& of, int64_t head, int D)
        : QuantizedCache<T>(of),
          D(D),
          groups(of.bits == 16 || of.by_channel ? 1 : D / (int)of.group),
          each(D / groups),
          codes(of.book, of.bits) {
        this->packed = (const char*)of.packed + head * of.slots * row_bytes();
        if (of.book) this->params += head * (of.slots / of.share);
        else if (of.params) this->params += head * of.slots * D / (of.by_channel ? N : of.group) * 2;
        this->full_precision += head * of.held * D;
    }
    int64_t row_bytes() const { return D * (this->bits == 16 ? (int64_t)sizeof(T) * 8 : this->bits) / 8; }
    int64_t slot(int64_t t) const {
        return t < this->sinks ? t : this->sinks + (t - this->sinks) % (this->held - this->sinks);
    }
    const T* whole(int64_t t) const { return this->full_precision + slot(t) * D; }
    const T* unpacked(int64_t t) const { return (const T*)this->packed + t * D; }  // in 16 bits

    // Of n tokens from t on, scales and zeros of each group: [groups, N] each
    void scales_of(int64_t t, int n, float* scale, float* zero) const {
        if (this->book) {
            for (int i = 0; i < n; i++) scale[i] = half_to_float(this->params[(t + i) / this->share]) * codes.unit;
            return;
        }
        const uint16_t* from = this->params + t * groups * 2;
        uint32_t* pairs = (uint32_t*)scale;  // for a while
        if (groups == 4 && n == N)
            for (int i = 0; i < N; i += L) transpose4((const uint8_t*)(from + i * 8), pairs + i, N);
        else
            for (int e = 0; e < groups; e++)
                for (int i = 0; i < N; i++)
                    pairs[e * N + i] = i < n ? load_as<uint32_t>(from + (i * groups + e) * 2) : 0;
        for (int i = 0; i < groups * N; i += L) split_pairs(load_as<vu>(pairs + i), scale + i, zero + i);
    }

    void unpack(int64_t t, int n, Row* to) const {  // n tokens from t on
        Row* codes = to;
        const bool book = this->book;
        if (this->bits == 2) book ? unpack_bits<2, true>(t, n, to) : unpack_bits<2>(t, n, codes);
        else if (this->bits == 3) book ? unpack_bits<3, true>(t, n, to) : unpack_bits<3>(t, n, codes);
        else if (this->bits == 4) book ? unpack_bits<4, true>(t, n, to) : unpack_bits<4>(t, n, codes);
        else book ? unpack_bits<8, false, true>(t, n, to) : unpack_bits<8>(t, n, codes);
    }
    // f(rows of what was unpacked, from a channel on), to be multiplied in fp32
    template <class F> void in_floats(const Row* page, int first, int n, F f) const {
        const auto rows = [&](const auto* at) {
            std::decay_t<decltype(at)> each[N];
            for (int i = 0; i < n; i++) each[i] = at + i * D + first;
            f(each);
        };
        rows(page);
    }

private:
    template <int BITS, bool BOOK = false, bool E4M3_CODES = false, class To>
    void unpack_bits(int64_t t, int n, To* to) const {
        const int bytes = D * BITS / 8, steps = D / STEP;
        const uint8_t* row = (const uint8_t*)this->packed + t * bytes;
        const Codes own = codes;
        for (int i = 0; i < n; i++, row += bytes) {
            for (int b = 0; b < bytes; b += 64) __builtin_prefetch(row + N * bytes + b, 0, 2);  // of the next block
            for (int s = 0; s < steps; s++, to += STEP) {
                Sixteen two[2];
                codes_of_step<BITS>(row, D, s, two);
                own.template put<BOOK, E4M3_CODES>(two, to);
            }
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

// What is added to the products of a query head [B, Hq] with the key at each position; or null
struct Biases {
    const float* at;
    int64_t row;

    // to products p [G, N] of a KV head's queries with n keys, whose positions are where(0) to where(n - 1)
    template <class F> void add(int64_t head, int G, int n, float* p, F where) const {
        for (int g = 0; at && g < G; g++)
            for (int i = 0; i < n; i++) p[g * N + i] += at[(head * G + g) * row + where(i)];
    }
};

constexpr bool is_exact(float) { return true; }
constexpr bool is_exact(int16_t) { return false; }

// The largest of 16 bits that D products with numbers up to `most` do not exceed 32 bits with, on any lane
float most_of(int64_t most, int64_t products) {
    return (float)std::min<int64_t>(32767, ((int64_t)1 << 31) / (most * products) - 1);
}

// Logits of packed keys of one head, for queries q [G, D]
template <class T> struct PackedKeys {
    typedef typename Quantized<T>::Row Row;
    const Quantized<T>& keys;
    const int G, D;
    Room<float> turned, scaled, sums, scale, zero, part, unit;  // queries: [groups, G, channels of a group]
    Room<Row> numbers;
    const float limit;  // of queries as integers

    PackedKeys(const Quantized<T>& keys, const float* q, int G)
        : keys(keys),
          G(G),
          D(keys.D),
          turned(G * D),
          scaled(D),
          sums(keys.groups * G),
          scale(std::max(D, keys.groups * N)),
          zero(std::max(D, keys.groups * N)),
          part(G * N),
          unit(keys.groups * G),
          numbers(G * D),
          limit(most_of(keys.codes.most, D / 8)) {
        for (int e = 0; e < keys.groups; e++)
            for (int g = 0; g < G; g++) {
                float *to = &turned[(e * G + g) * keys.each], most = 0;
                for (int d = 0; d < keys.each; d++) {
                    const float x = q[g * D + e * keys.each + d];
                    to[place(d)] = x, sums[e * G + g] += x, most = std::max(most, std::fabs(x));
                }
                set_queries(e * G + g, to, most);
            }
    }

    // q . (scale * code + zero) = scale * (q . code) + zero * (the sum of q), for the channels of a group
    void logits(int64_t t, int n, Row* page, float* p) {
        if (keys.by_channel) scale_queries(keys.params + t / N * D * 2);
        else keys.scales_of(t, n, scale.at, zero.at);
        keys.unpack(t, n, page);
        for (int e = 0; e < keys.groups; e++) {
            float* to = e ? part.at : p;
            const int first = e * keys.each;
            const Row* own = &numbers[e * G * keys.each];
            if constexpr (is_exact(Row()))
                keys.in_floats(page, first, n, [&](const auto* rows) {
                    by_heads(G,
                             [&](auto m, int g) { dots<m>(own + g * keys.each, rows, n, keys.each, to + g * N, {}); });
                });
            else
                by_heads(
                    G, [&](auto m, int g) { dots<m>(own + g * keys.each, page + first, D, n, keys.each, to + g * N); });
            for (int g = 0; g < G; g++)
                for (int i = 0; i < N; i += L) {
                    float* at = p + g * N + i;
                    const float sum = sums[e * G + g];
                    vf x = load(to + g * N + i) * (is_exact(Row()) ? 1.0f : unit[e * G + g]);
                    if (keys.by_channel) x += sum;
                    else x = x * load(&scale[e * N + i]) + load(&zero[e * N + i]) * sum;
                    store(at, e ? load(at) + x : x);
                }
        }
    }

private:
    void set_queries(int i, const float* x, float largest) {  // of head i % G, for group i / G
        Row* to = &numbers[i * keys.each];
        if constexpr (is_exact(Row())) std::copy_n(x, keys.each, to);
        else {
            largest = std::max(largest, 1e-30f), unit[i] = largest / limit;
            for (int d = 0; d < keys.each; d += 2 * L) {
                const vf times = all(limit / largest), one = load(x + d) * times, two = load(x + d + L) * times;
                const Halves both = narrowed_in_order(rounded_numbers(one), rounded_numbers(two));
                std::memcpy(to + d, &both, sizeof both);
            }
        }
    }
    // The same if a channel has a scale for N tokens: it is multiplied with the query
    void scale_queries(const uint16_t* pairs) {
        uint32_t* in_order = (uint32_t*)scale.at;  // for a while
        for (int d = 0; d < D; d += 2 * L) transpose2((const uint8_t*)(pairs + d * 2), in_order + place(d), 16);
        for (int d = 0; d < D; d += L) split_pairs(load_as<vu>(in_order + d), &scale[d], &zero[d]);
        for (int g = 0; g < G; g++) {
            vf total = {}, most = {};
            for (int d = 0; d < D; d += L) {
                const vf x = load(&turned[g * D + d]), y = x * load(&scale[d]);
                store(&scaled[d], y), total += x * load(&zero[d]), most = larger(most, size(y));
            }
            sums[g] = sum(total);
            set_queries(g, scaled.at, largest(most));
        }
    }
};

// Weighted sums of packed values of one head
template <class T> struct PackedValues {
    typedef typename Quantized<T>::Row Row;
    const Quantized<T>& values;
    const int G, D;
    Room<float> y, zeros;  // [groups, G, channels of a group] and [groups, G, L]
    Room<float> scale, zero, weight, unit, most;
    const float limit;  // of weights as integers

    PackedValues(const Quantized<T>& values, int G)
        : values(values),
          G(G),
          D(values.D),
          y(G * D),
          zeros(values.groups * G * L),
          scale(values.groups * N),
          zero(values.groups * N),
          weight(G * N),
          unit(G),
          most(G),
          limit(most_of(values.codes.most, N)) {}

    void shrink(int g, float by) {
        const int each = values.each;
        for (int e = 0; e < values.groups; e++) {
            float *at = &zeros[(e * G + g) * L], *own = &y[(e * G + g) * each];
            store(at, load(at) * by);
            for (int d = 0; d < each; d += L) store(own + d, load(own + d) * by);
        }
    }
    void add(const float* p, int64_t t, int n, Row* page) {
        values.scales_of(t, n, scale.at, zero.at);
        values.unpack(t, n, page);
        const int each = values.each;
        for (int g = 0; g < G && !is_exact(Row()); g++) most[g] = std::max(largest_of(p + g * N), 1e-20f);
        for (int e = 0; e < values.groups; e++) {
            const float *own = &scale[e * N], *zero_of = &zero[e * N];
            const float top = is_exact(Row()) ? 1 : std::max(largest_of(own), 1e-10f);
            for (int g = 0; g < G; g++) {
                vf more = load(&zeros[(e * G + g) * L]);
                const float times = is_exact(Row()) ? 1 : limit / (most[g] * top);
                unit[g] = most[g] * top / limit;
                for (int i = 0; i < N; i += L) {
                    const vf x = load(p + g * N + i), w = x * load(own + i);
                    more += x * load(zero_of + i);
                    if constexpr (is_exact(Row())) store(&weight[g * N + i], w);
                    else store(&weight[g * N + i], (vf)in_pairs(rounded_numbers(w * times)));
                }
                store(&zeros[(e * G + g) * L], more);
            }
            float* to = &y[e * G * each];
            if constexpr (is_exact(Row()))
                values.in_floats(page, e * each, n, [&](const auto* rows) {
                    by_heads(G, [&](auto m, int g) { weigh<m>(&weight[g * N], rows, n, each, to + g * each, {}); });
                });
            else
                by_heads(G, [&](auto m, int g) {
                    weigh<m>((const int32_t*)&weight[g * N], &unit[g], page + e * each, D, n, each, to + g * each);
                });
        }
    }
    void finish(float* to) {  // adds everything to [G, D]
        const int each = values.each;
        for (int e = 0; e < values.groups; e++)
            for (int g = 0; g < G; g++) {
                const float more = sum(load(&zeros[(e * G + g) * L]));
                for (int d = 0; d < each; d++) to[g * D + e * each + d] += y[(e * G + g) * each + place(d)] + more;
            }
    }

private:
    static float largest_of(const float* x) {
        vf most = load(x);
        for (int i = L; i < N; i += L) most = load(x + i) > most ? load(x + i) : most;
        return largest(most);
    }
    static vi in_pairs(vi x) {  // a lane, and above it the next: of every second lane
        typedef uint64_t Long __attribute__((vector_size(L * 4)));
        return (vi)((Long)x | (Long)x >> 16);
    }
};

template <class T> void attend_quantized(const Heads<T>& heads, const QuantizedCache<T>& k, const QuantizedCache<T>& v,
                                         const Ends& ends, const Biases& biases, const Skips& skips = {}) {
    const int G = (int)heads.G, D = (int)heads.D;
    int64_t packed = parts_of(*std::max_element(ends.k, ends.k + heads.B));
    attention(heads, packed + 1, [&](int64_t head, int64_t part, const float* query, Seen& seen) {
        int64_t b = head / heads.H;
        const Quantized<T> keys(k, head, D), values(v, head, D);
        if (part == packed) {  // the whole tokens
            std::vector<int64_t> at, slots;
            for (int64_t t = 0; t < std::min(k.sinks, ends.pos[b] + 1); t++) at.push_back(t);
            for (int64_t t = std::max(k.sinks, ends.k[b]); t <= ends.pos[b]; t++) at.push_back(t);
            for (int64_t t : at) slots.push_back(keys.slot(t));
            if (skips.read) count(skips.read[head], (int64_t)slots.size());
            return seen.add_slots(query, Slots<T>{keys.full_precision, values.full_precision, D, D, slots.data()}, 0,
                                  (int64_t)slots.size(), [&](int64_t first, int n) {
                                      biases.add(head, G, n, seen.p.data(), [&](int i) { return at[first + i]; });
                                  });
        }
        PackedKeys<T> packed_keys(keys, query, G);
        PackedValues<T> packed_values(values, G);
        Room<typename Quantized<T>::Row> page(N * D);
        const Next<T> nothing{};
        const T* rows[N];
        int64_t hi = std::min(ends.k[b], (part + 1) * CHUNK), n_read = 0;
        const float least = skips.least(ends.pos[b] + 1);
        for (int64_t first = std::max(k.sinks, part * CHUNK), next; first < hi; first = next) {
            next = std::min(hi, (first / N + 1) * N);  // tokens that share scales
            if (first < ends.v[b]) next = std::min(next, ends.v[b]);
            int n = (int)(next - first);
            if (k.bits < 16) packed_keys.logits(first, n, page.at, seen.p.data());
            else {
                for (int i = 0; i < n; i++) rows[i] = keys.unpacked(first + i);
                by_heads(G, [&](auto m, int g) { dots<m>(query + g * D, rows, n, D, &seen.p[g * N], nothing); });
            }
            biases.add(head, G, n, seen.p.data(), [&](int i) { return first + i; });
            if (skips.read && (first / N + 1) * N <= ends.v[b] && seen.weighs_nothing(n, least)) continue;
            n_read += n;
            for (int g = 0; g < G; g++) {
                float shrink = seen.soften(g, &seen.p[g * N], n, N);
                if (shrink == 1) continue;
                for (int d = 0; d < D; d += L) store(&seen.y[g * D + d], load(&seen.y[g * D + d]) * shrink);
                packed_values.shrink(g, shrink);
            }
            if (v.bits < 16 && first < ends.v[b]) {
                packed_values.add(seen.p.data(), first, n, page.at);
                continue;
            }
            for (int i = 0; i < n; i++)
                rows[i] = first < ends.v[b] ? values.unpacked(first + i) : values.whole(first + i);
            by_heads(G, [&](auto m, int g) { weigh<m>(&seen.p[g * N], rows, n, D, &seen.y[g * D], nothing); });
        }
        packed_values.finish(seen.y.data());
        if (skips.read) count(skips.read[head], n_read);
    });
}

}  // namespace
