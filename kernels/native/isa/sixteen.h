// Vectors of sixteen numbers of 16 bits, in AVX2's instructions, which processors with AVX-512 have, too.
namespace {

__m128i sixteen_bytes(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }

template <int BITS> struct Spread {  // each lane gets its byte, and by a multiplication its two codes at the byte's top
    int8_t byte[32] = {};
    int16_t times[16] = {};
    constexpr Spread() {
        constexpr int LANES_OF_BYTE = 4 / BITS;
        for (int j = 0; j < 16; j++) {
            byte[2 * j] = (int8_t)(j / LANES_OF_BYTE), byte[2 * j + 1] = -1;
            times[j] = (int16_t)(1 << (8 - 2 * BITS) >> j % LANES_OF_BYTE * BITS * 2);
        }
    }
};
template <int BITS> Sixteen two_codes_at(const uint8_t* p) {
    if constexpr (BITS == 8) return load_as<Sixteen>(p);
    else if constexpr (BITS == 4) return (Sixteen)_mm256_cvtepu8_epi16(sixteen_bytes(p));
    else {
        static constexpr Spread<BITS> to;
        const __m128i all = BITS == 2 ? _mm_loadl_epi64((const __m128i*)p) : _mm_cvtsi32_si128(load_as<int32_t>(p));
        const __m256i own = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), load_as<__m256i>(to.byte));
        return load_as<Sixteen>(to.times) * (Sixteen)own >> (8 - 2 * BITS);
    }
}
struct Table {
    __m256i low, high;  // bytes
    Table(const int16_t* from) {
        uint8_t bytes[2][16];
        for (int i = 0; i < ENTRIES; i++) bytes[0][i] = (uint8_t)from[i], bytes[1][i] = (uint8_t)(from[i] >> 8);
        low = _mm256_broadcastsi128_si256(sixteen_bytes(bytes[0]));
        high = _mm256_broadcastsi128_si256(sixteen_bytes(bytes[1]));
    }
    void look_up(Sixteen* two) const {
        const __m256i at = _mm256_packus_epi16((__m256i)two[0], (__m256i)two[1]);
        const __m256i one = _mm256_shuffle_epi8(low, at), other = _mm256_shuffle_epi8(high, at);
        two[0] = (Sixteen)_mm256_unpacklo_epi8(one, other), two[1] = (Sixteen)_mm256_unpackhi_epi8(one, other);
    }
};
Sixteen rounded_product(Sixteen a, Sixteen b) { return (Sixteen)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b); }

}  // namespace
