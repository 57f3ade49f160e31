// Products of integers by bytes, four by four (VNNI).
namespace {

vi dot(vi acc, vu w, int32_t four) {  // four unsigned bytes of each lane of w times four signed ones
#if AVX512
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, everywhere(four));
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, everywhere(four));
#endif
}

template <int BITS, int M> struct ByFour {
    vi high[VECTORS][M][2] = {}, rest[VECTORS][M][2] = {};

    template <int UNITS> void add(const uint8_t* p, const int32_t* x) {
        const vu low = vu{} + 0x0f0f0f0fu, sign = vu{} + 0x80808080u;
        for (int u = 0; u < UNITS; u++, p += BITS * 16, x += 4 * M)
            for (int v = 0; v < VECTORS; v++) {
                const uint8_t* at = p + v * L * 4;
                vu two[2];
                if constexpr (BITS == 4) {
                    vu w = load_as<vu>(at);
                    two[0] = w & low, two[1] = (w >> 4) & low;
                } else
                    for (int h = 0; h < 2; h++) two[h] = load_as<vu>(at + h * WORDS) ^ sign;
                for (int h = 0; h < 2; h++)
                    for (int m = 0; m < M; m++) {
                        const int32_t* from = x + (h * M + m) * 2;
                        int a = M < 4 ? h : 0;  // sums of one row in turns, as an addition waits for the one before
                        high[v][m][a] = dot(high[v][m][a], two[h], from[0]);
                        rest[v][m][a] = dot(rest[v][m][a], two[h], from[1]);
                    }
            }
    }
    void begin(int v, int m, vi x) { rest[v][m][0] = x; }
    vi total(int v, int m) const {
        vi a = high[v][m][0], b = rest[v][m][0];
        if (M < 4) a += high[v][m][1], b += rest[v][m][1];
        return (a << 8) + b;
    }
    static constexpr int ZERO = BITS == 8 ? 128 : 8;  // of symmetric codes: bytes have no sign here
};

}  // namespace
