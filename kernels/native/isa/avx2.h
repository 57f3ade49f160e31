// AVX2, which comes with FMA and F16C.
#include <immintrin.h>

#include "sixteen.h"

namespace {

using plain::coded, plain::low_bits, plain::multiplies_one_row, plain::two_words;

vu halves_at(const void* p) {  // gcc 12 converts halves of the vector and joins them
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
vu bytes_at(const uint8_t* p) {  // gcc 12 makes 70 instructions of the conversion, one by one
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
void keep(vf& x) { asm("" : "+v"(x)); }
void store(bf16* p, vf x) {
    vu u = (vu)x, rounded = (u + (0x7fff + ((u >> 16) & 1))) >> 16;
    __m256i y = (__m256i)(x != x ? vu{} + 0x7fc0 : rounded);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
bool any(vi mask) { return _mm256_movemask_ps((__m256)mask) != 0; }

__attribute__((always_inline)) inline vf sums(vf* x) {
    __m256 half[4], a, b;
    for (int i = 0; i < 4; i++) {  // in the order of `sum`: numbers that are 4 apart, 2 apart, neighbours
        a = (__m256)x[i], b = (__m256)x[i + 4];
        half[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 2; i++)  // of x[i], x[i + 2], x[i + 4] and x[i + 6] two numbers each
        half[i] =
            _mm256_add_ps(_mm256_shuffle_ps(half[i], half[i + 2], 0x44), _mm256_shuffle_ps(half[i], half[i + 2], 0xee));
    a = _mm256_unpacklo_ps(half[0], half[1]), b = _mm256_unpackhi_ps(half[0], half[1]);
    return (vf)_mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}

vf halves(const uint16_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
vf halves(Sixteen x, int part) {
    return (vf)_mm256_cvtph_ps(part ? _mm256_extracti128_si256((__m256i)x, 1) : _mm256_castsi256_si128((__m256i)x));
}
vf load(const int16_t* p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p))); }
float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
uint16_t to_half(float x) { return _cvtss_sh(x, 0); }

vf looked_up(vu x, const vf* table) {
    __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], (__m256i)x);
    __m256 high = _mm256_permutevar8x32_ps((__m256)table[1], (__m256i)x);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(x << 28));  // by bit 3
}
vi zeros_at(const uint8_t* p, int v) {
    const vu two = bytes_at(p);
    return (vi)(v ? two >> 4 : two & 15);
}

// ---- scores by look-up ----

constexpr int LOOKED_UP = 4;

// Bytes 0 of all words, then bytes 1, 2 and 3: each half of y[i] has those of the same halves of x[0] to x[3].
void bytes_apart(const __m256i* x, __m256i* y) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m256i a = _mm256_shuffle_epi8(x[0], order), b = _mm256_shuffle_epi8(x[1], order);
    __m256i c = _mm256_shuffle_epi8(x[2], order), d = _mm256_shuffle_epi8(x[3], order);
    __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    y[0] = _mm256_unpacklo_epi64(ab, cd), y[1] = _mm256_unpackhi_epi64(ab, cd);
    ab = _mm256_unpackhi_epi32(a, b), cd = _mm256_unpackhi_epi32(c, d);
    y[2] = _mm256_unpacklo_epi64(ab, cd), y[3] = _mm256_unpackhi_epi64(ab, cd);
}

// One instruction looks up 32 bytes in tables of 16, where 8 floats in 16 take three, two of them slow: so each byte of
// an entry is looked up by itself.
struct Tables {
    Room<vi> bytes;
    Tables(const float* entries, int64_t n) : bytes(4 * n) {
        for (int64_t i = 0; i < n; i++, entries += ENTRIES) {
            __m256i quarters[4];
            for (int j = 0; j < 4; j++)
                quarters[j] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(entries + 4 * j)));
            bytes_apart(quarters, (__m256i*)&bytes[4 * i]);
        }
    }

    void add_entries(int64_t word, const uint32_t* words, vf* score) const {
        __m256i x[4], codes[4];
        for (int i = 0; i < 4; i++) x[i] = load_as<__m256i>(words + i * L);
        bytes_apart(x, codes);
        const __m256i low = _mm256_set1_epi8(15);
        for (int c = 0; c < 8; c++) {
            const __m256i* table = (const __m256i*)bytes.at + (word * 8 + c) * 4;
            __m256i at = _mm256_and_si256(c % 2 ? _mm256_srli_epi16(codes[c / 2], 4) : codes[c / 2], low), byte[4];
            for (int i = 0; i < 4; i++) byte[i] = _mm256_shuffle_epi8(table[i], at);
            __m256i a = _mm256_unpacklo_epi8(byte[0], byte[1]), b = _mm256_unpacklo_epi8(byte[2], byte[3]);
            score[0] += (vf)_mm256_unpacklo_epi16(a, b), score[1] += (vf)_mm256_unpackhi_epi16(a, b);
            a = _mm256_unpackhi_epi8(byte[0], byte[1]), b = _mm256_unpackhi_epi8(byte[2], byte[3]);
            score[2] += (vf)_mm256_unpacklo_epi16(a, b), score[3] += (vf)_mm256_unpackhi_epi16(a, b);
        }
    }
};
__m256i apart(const uint8_t* p, int behind) {  // 16 bytes, and 16 more from `behind` on
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)),
                                   _mm_loadu_si128((const __m128i*)(p + behind)), 1);
}

void transpose2(const uint8_t* from, uint32_t* to, int64_t row) {  // [L, 2] words -> [2, L], `row` apart
    __m256 x = (__m256)apart(from, 32), y = (__m256)apart(from + 16, 32);
    _mm256_storeu_ps((float*)to, _mm256_shuffle_ps(x, y, 0x88));
    _mm256_storeu_ps((float*)(to + row), _mm256_shuffle_ps(x, y, 0xdd));
}

void transpose4(const uint8_t* from, uint32_t* to, int64_t row) {  // [L, 4] words -> [4, L]
    __m256i x[4], low[2], high[2];
    for (int i = 0; i < 4; i++) x[i] = apart(from + 16 * i, 64);  // a token, and the fourth behind it
    for (int i = 0; i < 2; i++)                                   // words 0 and 1, or 2 and 3, of two tokens
        low[i] = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]), high[i] = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    _mm256_storeu_si256((__m256i*)to, _mm256_unpacklo_epi64(low[0], low[1]));
    _mm256_storeu_si256((__m256i*)(to + row), _mm256_unpackhi_epi64(low[0], low[1]));
    _mm256_storeu_si256((__m256i*)(to + 2 * row), _mm256_unpacklo_epi64(high[0], high[1]));
    _mm256_storeu_si256((__m256i*)(to + 3 * row), _mm256_unpackhi_epi64(high[0], high[1]));
}

// ---- selection ----

struct Places {  // places of the set bits of a byte
    uint8_t of[256][L] = {};
    constexpr Places() {
        for (int mask = 0; mask < 256; mask++)
            for (int bit = 0, n = 0; bit < L; bit++)
                if (mask >> bit & 1) of[mask][n++] = (uint8_t)bit;
    }
};

template <class Keep> int64_t whole_places(const int32_t* x, int64_t n, int64_t& i, int32_t* out, Keep keep) {
    static constexpr Places table;
    int64_t m = 0;
    for (i = 0; i + L <= n; i += L) {
        int mask = _mm256_movemask_ps((__m256)keep(load_as<vi>(x + i)));
        vi at = (vi)bytes_at(table.of[mask]) + (int32_t)i;
        std::memcpy(out + m, &at, sizeof at);
        m += __builtin_popcount(mask);
    }
    return m;
}

// ---- products of integers ----

typedef int16_t Halves __attribute__((vector_size(L * 4)));
typedef int8_t Bytes __attribute__((vector_size(L * 4)));

__m256i everywhere(int32_t x) { return _mm256_set1_epi32(x); }
void keep(Halves& x) { asm("" : "+v"(x)); }
vi add_dots(vi sum, Halves a, Halves b) {
#if VNNI
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
void interleave(Halves a, Halves b, Halves* to) {
    to[0] = (Halves)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
    to[1] = (Halves)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
}
vi dot(Halves w, int32_t two) { return (vi)_mm256_madd_epi16((__m256i)w, everywhere(two)); }
// unsigned bytes times signed ones, two sums of two products a lane
Halves dot_bytes(vu w, int32_t four) { return (Halves)_mm256_maddubs_epi16((__m256i)w, everywhere(four)); }
Halves narrowed(vi a, vi b) { return (Halves)_mm256_packs_epi32((__m256i)a, (__m256i)b); }  // in turns of 4 of either
Halves narrowed_in_order(vi a, vi b) { return (Halves)_mm256_permute4x64_epi64((__m256i)narrowed(a, b), 0xd8); }
vi rounded_numbers(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }
Bytes narrowed(Halves a, Halves b) { return (Bytes)_mm256_packs_epi16((__m256i)a, (__m256i)b); }

}  // namespace
