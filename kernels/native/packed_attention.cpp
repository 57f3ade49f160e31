// Attention over sinks, a list of packed tokens, unpacked block by block, and the newest tokens.
#include "softmax.h"

namespace {

template <int BITS> void add_packed(Seen& seen, const float* q, const uint8_t* k, const uint8_t* v,
                                    const uint16_t* k_params, const uint16_t* v_params, const uint8_t* codes,
                                    const int64_t* idx, int64_t lo, int64_t hi) {
    int D = seen.D, bytes = D * BITS / 8, pairs = D / 32 * 2;
    std::vector<float> rows(2 * N * D);
    const float *ks[N], *vs[N];
    for (int i = 0; i < N; i++) ks[i] = &rows[i * D], vs[i] = &rows[(N + i) * D];
    for (int64_t first = lo; first < hi; first += N) {
        int n = (int)std::min<int64_t>(N, hi - first);
        for (int i = 0; i < n; i++) {
            if (first + i + N < hi) {
                int64_t next = idx[first + i + N];
                __builtin_prefetch(k + next * bytes), __builtin_prefetch(v + next * bytes);
                __builtin_prefetch(k_params + next * pairs), __builtin_prefetch(v_params + next * pairs);
                if (codes) __builtin_prefetch(codes + next * D / 8);
            }
            int64_t t = idx[first + i];
            unpack<BITS>(k + t * bytes, k_params + t * pairs, codes ? codes + t * D / 8 : nullptr, D, (float*)ks[i]);
            unpack<BITS>(v + t * bytes, v_params + t * pairs, nullptr, D, (float*)vs[i]);
        }
        seen.add(Plain{q}, ks, vs, n, Next<float>{}, [] {});
    }
}

}  // namespace

extern "C" {

void kvf_packed_gather_attention(int64_t is_bf16, int64_t bits, const void* q, const int64_t* idx, const int64_t* count,
                                 const void* k, const void* v, const uint16_t* k_params, const uint16_t* v_params,
                                 const float* alpha, const uint8_t* codes, const void* sink_k, const void* sink_v,
                                 const void* tail_k, const void* tail_v, const int64_t* pos, const int64_t* prompt_len,
                                 const int64_t* flushed, void* out, int64_t q_row, int64_t q_head, int64_t B, int64_t H,
                                 int64_t G, int64_t D, int64_t T_, int64_t K, int64_t sinks, int64_t ring,
                                 int64_t threads) {
    int64_t listed = parts_of(K);
    FLOAT_OR_BF16(attention(
        (const T*)q, q_row, q_head, (T*)out, B, H, G, D, listed + 1, threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H;
            if (part == listed) {  // sinks, and the decoded tokens that the ring holds
                int64_t newest = pos[b] - prompt_len[b], oldest = std::max(*flushed, newest - ring + 1);
                seen.add_slots(query, (const T*)sink_k + group * sinks * D, (const T*)sink_v + group * sinks * D, D, D,
                               nullptr, 0, std::min(sinks, prompt_len[b]));
                std::vector<int64_t> slots;
                for (int64_t i = oldest; i <= newest; i++) slots.push_back((i % ring + ring) % ring);
                seen.add_slots(query, (const T*)tail_k + group * ring * D, (const T*)tail_v + group * ring * D, D, D,
                               slots.data(), 0, (int64_t)slots.size());
                return;
            }
            const int64_t* list = idx + group * K;
            int64_t lo = part * CHUNK, hi = std::min({K, count[group], lo + CHUNK});
            if (bits == 16)
                return seen.add_slots(query, (const T*)k + group * T_ * D, (const T*)v + group * T_ * D, D, D, list, lo,
                                      hi);
            std::vector<float> x(query, query + G * D);
            for (int64_t i = 0; alpha && i < G * D; i++) x[i] *= alpha[group * D + i % D];
            int64_t bytes = group * T_ * D * bits / 8, pairs = group * T_ * (D / 32) * 2;
            (bits == 2   ? add_packed<2>
             : bits == 4 ? add_packed<4>
                         : add_packed<8>)(seen, x.data(), (const uint8_t*)k + bytes, (const uint8_t*)v + bytes,
                                          k_params + pairs, v_params + pairs,
                                          codes ? codes + group * T_ * D / 8 : nullptr, list, lo, hi);
        }))
}
}
