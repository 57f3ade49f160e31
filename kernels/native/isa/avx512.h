// AVX-512, with words and double words (BW, DQ).
#include <immintrin.h>

#include "sixteen.h"

namespace {

using plain::transpose2, plain::transpose4, plain::store;

vu halves_at(const void* p) {  // gcc 12 converts halves of the vector and joins them
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
vu bytes_at(const uint8_t* p) {  // gcc 12 makes 70 instructions of the conversion, one by one
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
vu two_words(uint32_t a, uint32_t b) {  // gcc 12 builds a list of them on the stack, a word at a time
    return (vu)_mm512_mask_set1_epi32(_mm512_set1_epi32((int)a), 0xff00, (int)b);
}
void keep(vf& x) { asm("" : "+v"(x)); }
bool any(vi mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }

// all 16 in 45 operations, where one alone takes 10
__attribute__((always_inline)) inline vf sums(vf* x) { return joined<1>(x); }

vf halves(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
vf halves(Sixteen x, int) { return (vf)_mm512_cvtph_ps((__m256i)x); }
vf load(const int16_t* p) {
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p)));
}
float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
uint16_t to_half(float x) { return _cvtss_sh(x, 0); }

// ---- codes: a table's index is taken from the lowest bits of a lane, with neither a mask nor a conversion ----

template <int BITS> vf low_bits(vu x) {
    const vf number = LANES;
    if constexpr (BITS == 4) return (vf)_mm512_permutexvar_ps((__m512i)x, (__m512)number);
    const vf four = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
    if constexpr (BITS == 2) return (vf)_mm512_permutevar_ps((__m512)four, (__m512i)x);
    return plain::low_bits<BITS>(x);
}
vf coded(vu x, vf table) { return (vf)_mm512_permutexvar_ps((__m512i)x, (__m512)table); }
vf looked_up(vu x, const vf* table) { return coded(x, *table); }
vi zeros_at(const uint8_t* p, int) {
    return (vi)((vu)_mm512_cvtepu8_epi32(_mm_set1_epi64x(load_as<int64_t>(p))) >> (vu)(LANE / 8 * 4) & 15);
}

// ---- scores by look-up ----

constexpr int LOOKED_UP = 2;

struct Tables {
    const float* entries;
    Tables(const float* entries, int64_t) : entries(entries) {}

    void add_entries(int64_t word, const uint32_t* words, vf* score) const {
        vu one = load_as<vu>(words), two = load_as<vu>(words + L);
        for (int c = 0; c < 8; c++) {
            __m512 at = _mm512_loadu_ps(entries + (word * 8 + c) * ENTRIES);
            score[0] += (vf)_mm512_permutexvar_ps((__m512i)(one >> (4 * c)), at);
            score[1] += (vf)_mm512_permutexvar_ps((__m512i)(two >> (4 * c)), at);
        }
    }
};

// ---- selection ----

template <class Keep> int64_t whole_places(const int32_t* x, int64_t n, int64_t& i, int32_t* out, Keep keep) {
    int64_t m = 0;
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (i = 0; i + L <= n; i += L, at = _mm512_add_epi32(at, _mm512_set1_epi32(L))) {
        vi kept = keep(load_as<vi>(x + i));  // -1 or 0
        __mmask16 mask = _mm512_movepi32_mask((__m512i)kept);
        _mm512_storeu_si512(out + m, _mm512_maskz_compress_epi32(mask, at));  // the rest is overwritten later
        m += __builtin_popcount(mask);
    }
    return m;
}

// ---- products of integers ----

typedef int16_t Halves __attribute__((vector_size(L * 4)));
typedef int8_t Bytes __attribute__((vector_size(L * 4)));

__m512i everywhere(int32_t x) { return _mm512_set1_epi32(x); }
void keep(Halves& x) { asm("" : "+v"(x)); }
vi add_dots(vi sum, Halves a, Halves b) {
#if VNNI
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}
void interleave(Halves a, Halves b, Halves* to) {
    to[0] = (Halves)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    to[1] = (Halves)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}
vi dot(Halves w, int32_t two) { return (vi)_mm512_madd_epi16((__m512i)w, everywhere(two)); }
// unsigned bytes times signed ones, two sums of two products a lane
Halves dot_bytes(vu w, int32_t four) { return (Halves)_mm512_maddubs_epi16((__m512i)w, everywhere(four)); }
Halves narrowed(vi a, vi b) { return (Halves)_mm512_packs_epi32((__m512i)a, (__m512i)b); }  // in turns of 4 of either
Halves narrowed_in_order(vi a, vi b) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return (Halves)_mm512_permutexvar_epi64(order, (__m512i)narrowed(a, b));
}
vi rounded_numbers(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
Bytes narrowed(Halves a, Halves b) { return (Bytes)_mm512_packs_epi16((__m512i)a, (__m512i)b); }

// torch's library (MKL) is optimized for Intel processors with AVX-512
bool multiplies_one_row() { return !__builtin_cpu_is("intel"); }

}  // namespace
