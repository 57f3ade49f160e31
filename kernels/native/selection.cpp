// The largest scores of a row.
#include "vectors.h"

namespace {

// int32 of the same order as the scores. -0 is 0, NaN is the largest, whatever its sign.
int32_t key_of(float x) {
    x += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? INT32_MAX : bits ^ ((bits >> 31) & 0x7fffffff);
}

float of_key(int32_t key) {
    int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

constexpr int64_t SAMPLE = 512;
constexpr int BINS = 512, SORTED = 128;

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Places {  // of the bits of a byte that are set
    uint8_t of[256][L] = {};
    constexpr Places() {
        for (int mask = 0; mask < 256; mask++)
            for (int bit = 0, n = 0; bit < L; bit++)
                if (mask >> bit & 1) of[mask][n++] = (uint8_t)bit;
    }
};
#endif

// the places of the numbers x for which keep(x), in order, of n in whole vectors -> how many
template <class Keep> int64_t places(const int32_t* x, int64_t n, int32_t* out, Keep keep) {
    int64_t m = 0, i = 0;
#if defined(__AVX512F__)
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + L <= n; i += L, at = _mm512_add_epi32(at, _mm512_set1_epi32(L))) {
        vi kept = keep(load_as<vi>(x + i));  // -1 or 0
        __mmask16 mask = _mm512_movepi32_mask((__m512i)kept);
        _mm512_storeu_si512(out + m, _mm512_maskz_compress_epi32(mask, at));  // the rest is written over
        m += __builtin_popcount(mask);
    }
#elif defined(__AVX2__)
    static constexpr Places table;
    for (; i + L <= n; i += L) {
        int mask = _mm256_movemask_ps((__m256)keep(load_as<vi>(x + i)));
        vi at = (vi)bytes_at(table.of[mask]) + (int32_t)i;
        std::memcpy(out + m, &at, sizeof at);
        m += __builtin_popcount(mask);
    }
#endif
    for (; i < n; i++) out[m] = (int32_t)i, m += keep(x[i]) != 0;
    return m;
}

struct Picker {
    std::vector<int32_t> keys, some, slots, bins;

    // The want-th largest of the n numbers in `some`, which it reorders. Counts them in bins between the least and the
    // greatest, and goes on with the bin that it is in: no branch that cannot be predicted, of which nth_element is
    // made
    int32_t largest_but(int64_t n, int64_t want) {
        const int32_t finite = key_of(1e38f);  // those beyond are in the first and the last bin
        bins.resize(n), slots.resize(std::max<int64_t>(slots.size(), n + L));
        while (n > SORTED) {
            int32_t low = INT32_MAX, high = INT32_MIN;
            for (int64_t i = 0; i < n; i++) {
                int32_t key = std::min(std::max(some[i], -finite), finite);
                low = std::min(low, key), high = std::max(high, key);
            }
            float from = of_key(low), scale = (BINS - 1) / (of_key(high) - from);
            if (!(scale > 0 && scale < 3e38f)) break;
            for (int64_t i = 0; i < n; i++)
                bins[i] = (int32_t)((of_key(std::min(std::max(some[i], low), high)) - from) * scale);
            int32_t counts[2][BINS] = {};  // two, as a sum that is still being written makes the next wait
            for (int64_t i = 0; i + 1 < n; i += 2) counts[0][bins[i]]++, counts[1][bins[i + 1]]++;
            if (n % 2) counts[0][bins[n - 1]]++;
            int bin = BINS - 1;
            for (; counts[0][bin] + counts[1][bin] < want; bin--) want -= counts[0][bin] + counts[1][bin];
            if (counts[0][bin] + counts[1][bin] == n) break;
            n = places(bins.data(), n, slots.data(), [=](auto x) { return x == bin; });
            for (int64_t i = 0; i < n; i++) some[i] = some[slots[i]];
        }
        std::nth_element(some.begin(), some.begin() + (want - 1), some.begin() + n, std::greater<int32_t>());
        return some[want - 1];
    }

    // the slots of the `want` largest keys, the first of equal ones, in ascending order -> idx
    void pick(int64_t want, int64_t* idx) {
        int64_t n = (int64_t)keys.size(), m = n;
        if (want <= 0) return;
        slots.resize(n + L);
        some.assign(keys.begin(), n < 4 * SAMPLE ? keys.end() : keys.begin());
        // A sample tells roughly where the lowest key to be taken is. Four standard deviations below that, all but a
        // few of the others are left out; if too many are, all are kept
        if (n >= 4 * SAMPLE) {
            int32_t floor = INT32_MIN;
            for (int64_t i = 0; i < SAMPLE; i++) some.push_back(keys[i * n / SAMPLE]);
            double share = (double)want / n;
            int64_t rank = (int64_t)(share * SAMPLE + 4 * std::sqrt(share * (1 - share) * SAMPLE)) + 1;
            if (rank < SAMPLE) floor = largest_but(SAMPLE, rank + 1);
            m = places(keys.data(), n, slots.data(), [=](auto x) { return x >= floor; });
            if (m < want) m = places(keys.data(), n, slots.data(), [=](auto x) { return x >= INT32_MIN; });
            some.resize(m);
            for (int64_t i = 0; i < m; i++) some[i] = keys[slots[i]];
        }
        int32_t lowest = largest_but(m, want);
        m = places(keys.data(), n, slots.data(), [=](auto x) { return x >= lowest; });
        int64_t equal = want;  // how many of those that equal the lowest are taken
        for (int64_t i = 0; i < m; i++) equal -= keys[slots[i]] > lowest;
        for (int64_t i = 0, found = 0; found < want; i++) {
            int32_t key = keys[slots[i]];
            idx[found] = slots[i], found += key > lowest || (key == lowest && equal-- > 0);
        }
    }
};

// How many of the largest weights of a row sum to p or more, those of forced slots first. Weights are >= 0, or NaN.
struct Nucleus {
    static constexpr int BINS = 4096, SHIFT = 19;  // of the bits of a weight: 16 to an octave
    std::vector<double> mass;
    std::vector<int64_t> many;
    std::vector<float> rest;

    int64_t count(const float* weights, int64_t n, double p, int64_t sinks, int64_t recent) {
        int64_t forced = std::min(n, sinks + recent), first = std::min(sinks, n), last = std::max(first, n - recent);
        double sum = 0;
        for (int64_t t = 0; t < first; t++) sum += weights[t];
        for (int64_t t = last; t < n; t++) sum += weights[t];
        if (p >= 1) return n;
        if (sum >= p || forced == n) return forced;
        mass.assign(BINS, 0), many.assign(BINS, 0);
        auto bin = [](float x) {
            uint32_t bits;
            std::memcpy(&bits, &x, 4);
            return (int)(bits >> SHIFT & (BINS - 1));
        };
        for (int64_t t = first; t < last; t++) mass[bin(weights[t])] += weights[t], many[bin(weights[t])]++;
        int64_t taken = forced;
        int at = BINS - 1;
        for (; at > 0 && sum + mass[at] < p; at--) sum += mass[at], taken += many[at];
        rest.clear();  // the bin in which p is reached, by falling weight
        for (int64_t t = first; t < last; t++)
            if (bin(weights[t]) == at) rest.push_back(weights[t]);
        std::sort(rest.begin(), rest.end(), std::greater<float>());
        for (size_t i = 0; i < rest.size() && sum < p; i++) sum += rest[i], taken++;
        return taken;
    }
};

}  // namespace

extern "C" {

void kvf_top_p(const float* weights, const int64_t* pos, const double* p, int64_t* count, int64_t row, int64_t head,
               int64_t B, int64_t H, int64_t T, int64_t sinks, int64_t recent, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        Nucleus nucleus;
#pragma omp for schedule(dynamic)
        for (int64_t group = 0; group < B * H; group++) {
            int64_t b = group / H, n = std::max<int64_t>(0, std::min(pos[b] + 1, T));
            count[group] = nucleus.count(weights + b * row + group % H * head, n, *p, sinks, recent);
        }
    }
}

void kvf_select(const float* scores, const uint8_t* mask, const int64_t* pos, const int64_t* wanted, int64_t* idx,
                int64_t* count, int64_t row, int64_t head, int64_t mask_row, int64_t mask_head, int64_t wanted_row,
                int64_t wanted_head, int64_t B, int64_t H, int64_t T, int64_t K, int64_t sinks, int64_t recent,
                int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        static thread_local Picker picker;  // its memory is kept for the next call
#pragma omp for schedule(dynamic)
        for (int64_t group = 0; group < B * H; group++) {
            int64_t b = group / H, h = group % H, n = pos ? std::max<int64_t>(0, std::min(pos[b] + 1, T)) : T;
            int64_t want = wanted[b * wanted_row + h * wanted_head], allowed = n;
            const float* from = scores + b * row + h * head;
            picker.keys.resize(n);
            for (int64_t t = 0; t < n; t++)
                picker.keys[t] = std::min(std::max(key_of(from[t]), INT32_MIN + 1), INT32_MAX - 1);
            if (mask) {
                const uint8_t* may = mask + b * mask_row + h * mask_head;
                allowed = 0;
                for (int64_t t = 0; t < n; t++)
                    allowed += may[t] != 0, picker.keys[t] = may[t] ? picker.keys[t] : INT32_MIN;
            } else {
                want = std::max(want, std::min(sinks + recent, n));
                for (int64_t t = 0; t < std::min(sinks, n); t++) picker.keys[t] = INT32_MAX;
                for (int64_t t = std::max<int64_t>(0, n - recent); t < n; t++) picker.keys[t] = INT32_MAX;
            }
            want = std::max<int64_t>(0, std::min({want, allowed, K}));
            std::fill(idx + group * K, idx + (group + 1) * K, 0);
            picker.pick(want, idx + group * K);
            count[group] = want;
        }
    }
}
}
