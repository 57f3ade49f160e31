// Attention over a range or a list of tokens in full precision.
#include "softmax.h"

namespace {

// Slots start[b], or 0, to stop[b] of a row
struct Range {
    const int64_t *start, *stop;

    int64_t first(int64_t b) const { return start ? start[b] : 0; }
};

// Tokens [B, H, D] that stand for count[b] others each; or none
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
            const float more = std::log2((float)means.count[b]) / seen.scale;  // for as many tokens as it stands for
            seen.add(Plain{query}, &extra_k, &extra_v, 1, Next<float>{}, [&] {
                for (int64_t g = 0; g < G; g++) seen.p[g * N] += more;
            });
        }
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

extern "C" int64_t kvf_multiplies_pairs() { return !std::is_same_v<QueriesFor<bf16>::type, Plain>; }  // as they are
