// Products of 16-bit integers with codes, for AVX2 and AVX-512: their layout, and products two at a time without VNNI.
namespace {

// L inputs, in L / 2 lanes, each two of them `apart`
template <int BITS> int32_t* put_lanes(vi q, int64_t apart, int32_t* to) {
    typedef int64_t Twos __attribute__((vector_size(L * 4)));
    const vi in_8 = LANE % 8, in_4 = LANE % 4;
    Twos words;
    if constexpr (BY_BYTES<BITS>) {  // of four bytes: the upper ones, the lower ones
        // of 4-bit codes, a word has the inputs of even places of 8, the next one those of odd places
        if (BITS == 4) q = two_of(q, q, LANE - in_8 + (in_8 * 2 + in_8 / 4) % 8);
        const vi upper = (q + 128) >> 8;
        const Halves both = narrowed(upper, q - (upper << 8));
        words = (Twos)narrowed(both, both);
    } else {  // bytes two apart are taken together
        q = two_of(q, q, LANE - in_4 + (in_4 * 2 + in_4 / 2) % 4);
        words = (Twos)narrowed(q, q);
    }
    for (int j = 0; j < L / 4; j++, to += apart) {
        const int64_t pair = words[2 * j];
        std::memcpy(to, &pair, sizeof pair);
    }
    return to;
}

// Sums of 4-bit codes fit into 16 bits for a while. 8-bit codes are multiplied with whole integers, not with bytes.
template <int BITS, int M> struct ByTwo {
    vi sum[VECTORS][M] = {};

    template <int UNITS> void add(const uint8_t* p, const int32_t* x) {
        constexpr int AT_ONCE = M < 4 ? VECTORS : 1;  // vectors, as registers allow
        for (int v = 0; v < VECTORS; v += AT_ONCE) {
            if constexpr (BITS == 4) {
                Halves high[AT_ONCE][M] = {}, rest[AT_ONCE][M] = {};  // 8 sums of two products of 15 and 128 at most
                const int32_t* from = x;
                for (int u = 0; u < UNITS; u++)
                    for (int h = 0; h < 2; h++)
                        for (int m = 0; m < M; m++, from += 2)
                            for (int j = 0; j < AT_ONCE; j++) {
                                const vu w = load_as<vu>(p + u * BITS * 16 + (v + j) * L * 4) >> (4 * h) & 0x0f0f0f0fu;
                                high[j][m] += dot_bytes(w, from[0]);
                                rest[j][m] += dot_bytes(w, from[1]);
                                asm("" : "+v"(high[j][m]), "+v"(rest[j][m]));  // as in_order, for any M
                            }
                for (int j = 0; j < AT_ONCE; j++)
                    for (int m = 0; m < M; m++)
                        sum[v + j][m] += dot(high[j][m], 256 | 256 << 16) + dot(rest[j][m], 1 | 1 << 16);
            } else {
                const int32_t* from = x;
                for (int u = 0; u < 2 * UNITS; u++)
                    for (int m = 0; m < M; m++, from += 2)
                        for (int j = 0; j < AT_ONCE; j++) {
                            const Halves w = load_as<Halves>(p + u * WORDS + (v + j) * L * 4);
                            vi& to = sum[v + j][m];
                            to += dot(w << 8 >> 8, from[0]);
                            in_order<M>(to);
                            to += dot(w >> 8, from[1]);
                            in_order<M>(to);
                        }
            }
        }
    }
    void begin(int v, int m, vi x) { sum[v][m] = x; }
    vi total(int v, int m) const { return sum[v][m]; }
    static constexpr int ZERO = BITS == 8 ? 0 : 8;

private:
    template <int ROWS>
    static void in_order(vi& sum) {  // otherwise gcc adds up in another order and runs out of registers
        if (ROWS < 4) asm("" : "+v"(sum));
    }
};

}  // namespace
