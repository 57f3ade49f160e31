// Attention over a range or a list of tokens in full precision.
#include "softmax.h"

namespace {

// Slots start[b] (0 without a start) to stop[b] of a row
struct Range {
    const int64_t *start, *stop;

    int64_t first(int64_t b) const { return start ? start[b] : 0; }
};

// Tokens [B, H, D], each of which stands for count[b] others; or null
struct Means {
    const float *k, *v;
    const int64_t* count;
};

template <class T>
void attend_range(const Heads<T>& heads, const Cache<T>& k, const Cache<T>& v, Range range, Means means) {
    const int64_t H = heads.H, G = heads.G, D = heads.D;
    int64_t longest = 0;
    for (int64_t b = 0; b < heads.B; b++) longest = std::max(longest, range.stop[b] - range.first(b));
    attention(heads, parts_of(longest), [&](int64_t group, int64_t part, const float* query, Seen& seen) {
        int64_t b = group / H, h = group % H, lo = range.first(b) + part * CHUNK;
        seen.add_slots(query, Slots<T>{k.of(b, h), v.of(b, h), k.slot, v.slot}, lo,
                       std::min(range.stop[b], lo + CHUNK));
        if (part == 0 && means.count && means.count[b] > 0) {
            const float *extra_k = means.k + group * D, *extra_v = means.v + group * D;
            const float more = std::log2((float)means.count[b]) / seen.scale;  // it counts as that many tokens
            seen.add(Plain{query}, &extra_k, &extra_v, 1, Next<float>{}, [&] {
                for (int64_t g = 0; g < G; g++) seen.p[g * N] += more;
            });
        }
    });
}

// Slots 0 to stop[b], without the values of blocks that weigh next to nothing
template <class T> void attend_skipping(const Heads<T>& heads, const Cache<T>& k, const Cache<T>& v,
                                        const int64_t* stop, const Skips& skips) {
    const int64_t H = heads.H, longest = *std::max_element(stop, stop + heads.B);
    attention(heads, parts_of(longest), [&](int64_t group, int64_t part, const float* query, Seen& seen) {
        const int64_t b = group / H, h = group % H, lo = part * CHUNK;
        const float least = skips.least(stop[b]);
        int64_t own = 0;
        seen.add_slots(query, Slots<T>{k.of(b, h), v.of(b, h), k.slot, v.slot}, lo, std::min(stop[b], lo + CHUNK),
                       [&](int64_t, int n) {
                           const bool some = !seen.weighs_nothing(n, least);
                           own += some ? n : 0;
                           return some;
                       });
        count(skips.read[group], own);
    });
}

// n tokens of a row as separate query heads: head g of a group is token g % n, whose slots are those of the first one
// shifted by its place. range.stop is where the slots of the last one end
template <class T>
void attend_tokens(const Heads<T>& heads, const Cache<T>& k, const Cache<T>& v, Range range, int64_t n) {
    const int64_t H = heads.H, G = heads.G;
    const auto begin = [&](int64_t b) { return std::max<int64_t>(range.first(b), 0); };  // a window may begin before it
    int64_t longest = 0;
    for (int64_t b = 0; b < heads.B; b++) longest = std::max(longest, range.stop[b] - begin(b));
    attention(heads, parts_of(longest), [&](int64_t group, int64_t part, const float* query, Seen& seen) {
        int64_t b = group / H, h = group % H, from = range.first(b), lo = begin(b) + part * CHUNK;
        int64_t all_begin = range.start ? from + n - 1 : 0, first_ends = range.stop[b] - n + 1;
        seen.add_slots(query, Slots<T>{k.of(b, h), v.of(b, h), k.slot, v.slot}, lo, std::min(range.stop[b], lo + CHUNK),
                       [&](int64_t at, int count) {
                           if (at >= all_begin && at + count <= first_ends) return;
                           for (int64_t g = 0; g < G; g++)
                               for (int64_t i = 0; i < count; i++)
                                   if (at + i >= first_ends + g % n || (range.start && at + i < from + g % n))
                                       seen.p[g * N + i] = -INFINITY;
                       });
    });
}

template <class T> void attend_list(const Heads<T>& heads, const Cache<T>& k, const Cache<T>& v, const List& list) {
    const int64_t H = heads.H;
    attention(heads, parts_of(list.K), [&](int64_t group, int64_t part, const float* query, Seen& seen) {
        int64_t b = group / H, h = group % H, n = std::min(list.K, *list.count.of(b, h));
        seen.add_slots(query, Slots<T>{k.of(b, h), v.of(b, h), k.slot, v.slot, list.idx.of(b, h)}, part * CHUNK,
                       std::min(n, (part + 1) * CHUNK));
    });
}

}  // namespace

extern "C" int64_t kvf_multiplies_pairs() { return !std::is_same_v<QueriesFor<bf16>::type, Plain>; }  // as is
