// The largest scores of a row.
#include "vectors.h"

namespace {

// int32 of the same order as the scores. -0 is 0, NaN is the largest, whatever its sign.
int32_t key_of(float x) {
    x += 0.0f;
    int32_t bits; std::memcpy(&bits, &x, 4);
    return x != x ? INT32_MAX : bits ^ ((bits >> 31) & 0x7fffffff);
}

constexpr int64_t SAMPLE = 1024;

struct Picker {
    std::vector<int32_t> keys, some;
    std::vector<int64_t> slots;

    int64_t not_below(int32_t floor) {
        int64_t n = 0;
        for (int32_t key : keys) n += key >= floor;
        return n;
    }

    // the slots of the `want` largest keys, the first of equal ones, in ascending order -> idx
    void pick(int64_t want, int64_t* idx) {
        int64_t n = (int64_t)keys.size();
        if (want <= 0) return;
        // A sample tells roughly where the lowest key to be taken is. Four standard deviations below that, all but a few
        // of the others are left out before anything is sorted; if too many are, all are kept
        int32_t floor = INT32_MIN;
        if (n >= 4 * SAMPLE) {
            some.clear();
            for (int64_t i = 0; i < SAMPLE; i++) some.push_back(keys[i * n / SAMPLE]);
            double share = (double)want / n;
            int64_t rank = (int64_t)(share * SAMPLE + 4 * std::sqrt(share * (1 - share) * SAMPLE)) + 1;
            if (rank < SAMPLE) {
                std::nth_element(some.begin(), some.begin() + rank, some.end(), std::greater<int32_t>());
                if (not_below(some[rank]) >= want) floor = some[rank];
            }
        }
        slots.resize(n + 1);
        int64_t m = 0;
        for (int64_t t = 0; t < n; t++) slots[m] = t, m += keys[t] >= floor;
        some.resize(m);
        for (int64_t i = 0; i < m; i++) some[i] = keys[slots[i]];
        std::nth_element(some.begin(), some.begin() + (want - 1), some.end(), std::greater<int32_t>());
        int32_t lowest = some[want - 1];
        int64_t equal = want;  // how many of those that equal the lowest are taken
        for (int64_t i = 0; i < m; i++) equal -= some[i] > lowest;
        for (int64_t i = 0, found = 0; found < want; i++) {
            int32_t key = keys[slots[i]];
            idx[found] = slots[i], found += key > lowest || (key == lowest && equal-- > 0);
        }
    }
};

// How many of the largest weights of a row sum to p or more, those of forced slots first. Weights are >= 0.
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
        auto bin = [](float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return (int)(bits >> SHIFT); };
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
        Picker picker;
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
                for (int64_t t = 0; t < n; t++) allowed += may[t] != 0, picker.keys[t] = may[t] ? picker.keys[t] : INT32_MIN;
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
