// Attention over a range or a list of tokens in full precision.
#include "softmax.h"

extern "C" {

int64_t kvf_multiplies_pairs() {  // of bf16, as they are
#ifdef PAIRED
    return true;
#else
    return false;
#endif
}

void kvf_decode_attention(int64_t is_bf16, const void* q, const void* k, const void* v, const int64_t* start,
                          const int64_t* stop, const float* mean_k, const float* mean_v, const int64_t* count,
                          void* out, int64_t q_row, int64_t q_head, int64_t k_row, int64_t k_head, int64_t k_slot,
                          int64_t v_row, int64_t v_head, int64_t v_slot, int64_t B, int64_t H, int64_t G, int64_t D,
                          int64_t threads) {
    int64_t longest = 0;
    for (int64_t b = 0; b < B; b++) longest = std::max(longest, stop[b] - (start ? start[b] : 0));
    FLOAT_OR_BF16(attention(
        (const T*)q, q_row, q_head, (T*)out, B, H, G, D, parts_of(longest), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H, h = group % H, lo = (start ? start[b] : 0) + part * CHUNK;
            seen.add_slots(query, (const T*)k + b * k_row + h * k_head, (const T*)v + b * v_row + h * v_head, k_slot,
                           v_slot, nullptr, lo, std::min(stop[b], lo + CHUNK));
            if (part == 0 && count && count[b] > 0) {
                const float *extra_k = mean_k + group * D, *extra_v = mean_v + group * D;
                const float more = std::log2((float)count[b]) / seen.scale;  // for as many tokens as it stands for
                seen.add(Plain{query}, &extra_k, &extra_v, 1, Next<float>{}, [&] {
                    for (int64_t g = 0; g < G; g++) seen.p[g * N] += more;
                });
            }
        }))
}

// n tokens of a row, each G / n query heads: head g is token g % n, which sees from start + g % n on and stops at
// stop - (n - 1) + g % n.
void kvf_verify_attention(int64_t is_bf16, const void* q, const void* k, const void* v, const int64_t* start,
                          const int64_t* stop, void* out, int64_t q_row, int64_t q_head, int64_t k_row, int64_t k_head,
                          int64_t k_slot, int64_t v_row, int64_t v_head, int64_t v_slot, int64_t B, int64_t H,
                          int64_t G, int64_t D, int64_t n, int64_t threads) {
    int64_t longest = 0;
    for (int64_t b = 0; b < B; b++) longest = std::max(longest, stop[b] - (start ? start[b] : 0));
    FLOAT_OR_BF16(attention(
        (const T*)q, q_row, q_head, (T*)out, B, H, G, D, parts_of(longest), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H, h = group % H, from = start ? start[b] : 0, lo = from + part * CHUNK;
            seen.add_slots(query, (const T*)k + b * k_row + h * k_head, (const T*)v + b * v_row + h * v_head, k_slot,
                           v_slot, nullptr, lo, std::min(stop[b], lo + CHUNK), [&](int64_t first, int count) {
                               if (first + count <= stop[b] - n + 1 && (!start || first >= from + n - 1)) return;
                               for (int64_t g = 0; g < G; g++)
                                   for (int64_t i = 0, at = first; i < count; i++, at++)
                                       if (at >= stop[b] - n + 1 + g % n || (start && at < from + g % n))
                                           seen.p[g * N + i] = -INFINITY;
                           });
        }))
}

void kvf_gather_attention(int64_t is_bf16, const void* q, const void* k, const void* v, const int64_t* idx,
                          const int64_t* count, void* out, int64_t q_row, int64_t q_head, int64_t k_row, int64_t k_head,
                          int64_t k_slot, int64_t v_row, int64_t v_head, int64_t v_slot, int64_t idx_row,
                          int64_t idx_head, int64_t count_row, int64_t count_head, int64_t B, int64_t H, int64_t G,
                          int64_t D, int64_t K, int64_t threads) {
    FLOAT_OR_BF16(attention(
        (const T*)q, q_row, q_head, (T*)out, B, H, G, D, parts_of(K), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H, h = group % H, n = std::min(K, count[b * count_row + h * count_head]);
            seen.add_slots(query, (const T*)k + b * k_row + h * k_head, (const T*)v + b * v_row + h * v_head, k_slot,
                           v_slot, idx + b * idx_row + h * idx_head, part * CHUNK, std::min(n, (part + 1) * CHUNK));
        }))
}
}
