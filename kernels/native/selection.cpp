// The largest scores of a row.
#include "operands.h"

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

// places of those of n numbers x for which keep(x), in order -> their number
template <class Keep> int64_t places(const int32_t* x, int64_t n, int32_t* out, Keep keep) {
    int64_t i, m = whole_places(x, n, i, out, keep);
    for (; i < n; i++) out[m] = (int32_t)i, m += keep(x[i]) != 0;
    return m;
}

struct Picker {
    std::vector<int32_t> keys, some, slots, bins;

    // The want-th largest of the n numbers in `some`, which it reorders. Counts them in bins between the least and the
    // greatest, and goes on within the bin of the wanted one: this avoids unpredictable branches, of which nth_element
    // has many
    int32_t largest_but(int64_t n, int64_t want) {
        const int32_t finite = key_of(1e38f);  // larger ones go to the first and the last bin
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
            int32_t counts[2][BINS] = {};  // two sets, as adding to a count that is still being written waits
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
        // A sample tells roughly where the lowest key to select is. A floor four standard deviations below that drops
        // almost all others; if it drops too many, all keys are kept
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
        int64_t equal = want;  // how many keys equal to the lowest are taken
        for (int64_t i = 0; i < m; i++) equal -= keys[slots[i]] > lowest;
        for (int64_t i = 0, found = 0; found < want; i++) {
            int32_t key = keys[slots[i]];
            idx[found] = slots[i], found += key > lowest || (key == lowest && equal-- > 0);
        }
    }
};

// The number of a row's largest weights that sum to p or more, forced slots first. Weights are >= 0, or NaN.
struct Nucleus {
    static constexpr int BINS = 4096, SHIFT = 19;  // bins by the bits of a weight: 16 per octave
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
        rest.clear();  // the weights of the bin in which p is reached, in falling order
        for (int64_t t = first; t < last; t++)
            if (bin(weights[t]) == at) rest.push_back(weights[t]);
        std::sort(rest.begin(), rest.end(), std::greater<float>());
        for (size_t i = 0; i < rest.size() && sum < p; i++) sum += rest[i], taken++;
        return taken;
    }
};

// Scores, or weights, [B, H, T]; those past pos [B] do not count, if it is given
struct ScoredRows {
    PerHead<const float> at;
    const int64_t* pos;
    int64_t B, H, T, threads;
};

// Tokens that are always taken
struct Forced {
    int64_t sinks, recent;
};

// The slots chosen for each head [B, H, K], the first count [B, H] of them
struct Chosen {
    int64_t *idx, *count;
    int64_t K;
};

// count [B, H]: the number of a row's largest weights that sum to p or more
void count_nucleus(const ScoredRows& rows, double p, Forced forced, int64_t* count) {
    const int64_t H = rows.H;
#pragma omp parallel num_threads(rows.threads)
    {
        Nucleus nucleus;
#pragma omp for schedule(dynamic)
        for (int64_t group = 0; group < rows.B * H; group++) {
            int64_t b = group / H, n = std::max<int64_t>(0, std::min(rows.pos[b] + 1, rows.T));
            count[group] = nucleus.count(rows.at.of(b, group % H), n, p, forced.sinks, forced.recent);
        }
    }
}

// The slots of the `wanted` largest scores that the mask allows; or, without a mask, with some slots forced in
void select_largest(const ScoredRows& rows, const PerHead<const uint8_t>& mask, const PerHead<const int64_t>& wanted,
                    Forced forced, const Chosen& chosen) {
    const int64_t H = rows.H, T = rows.T;
#pragma omp parallel num_threads(rows.threads)
    {
        static thread_local Picker picker;  // its memory is kept for the next call
#pragma omp for schedule(dynamic)
        for (int64_t group = 0; group < rows.B * H; group++) {
            int64_t b = group / H, h = group % H, n = rows.pos ? std::max<int64_t>(0, std::min(rows.pos[b] + 1, T)) : T;
            int64_t want = *wanted.of(b, h), allowed = n;
            const float* from = rows.at.of(b, h);
            picker.keys.resize(n);
            for (int64_t t = 0; t < n; t++)
                picker.keys[t] = std::min(std::max(key_of(from[t]), INT32_MIN + 1), INT32_MAX - 1);
            if (mask) {
                const uint8_t* may = mask.of(b, h);
                allowed = 0;
                for (int64_t t = 0; t < n; t++)
                    allowed += may[t] != 0, picker.keys[t] = may[t] ? picker.keys[t] : INT32_MIN;
            } else {
                want = std::max(want, std::min(forced.sinks + forced.recent, n));
                for (int64_t t = 0; t < std::min(forced.sinks, n); t++) picker.keys[t] = INT32_MAX;
                for (int64_t t = std::max<int64_t>(0, n - forced.recent); t < n; t++) picker.keys[t] = INT32_MAX;
            }
            want = std::max<int64_t>(0, std::min({want, allowed, chosen.K}));
            int64_t* idx = chosen.idx + group * chosen.K;
            std::fill(idx, idx + chosen.K, 0);
            picker.pick(want, idx);
            chosen.count[group] = want;
        }
    }
}

}  // namespace
