// Attention over coordinates that groups of KV heads share (Palu): keys are rebuilt and rotated a block at a time.
#include "softmax.h"
#include "tiles.h"

namespace {

constexpr int PANEL = 2 * L;    // channels that are rebuilt at a time
constexpr int64_t SPAN = 512;   // tokens of a work item: each costs as much as many tokens do elsewhere

// Products of N rows of R coordinates with a panel [R, PANEL] of a basis, R a multiple of 32.
struct ByFloats {
    typedef float Row;
    static int64_t at(int64_t r, int c) { return r * PANEL + c; }  // where a panel has coordinate r of channel c

    __attribute__((noinline)) static void multiply(const float* rows, const float* panel, int R, float* out, int stride) {
        constexpr int M = 8;  // rows at a time: 16 sums, and two vectors of the basis
        for (int i = 0; i < N; i += M) {
            vf acc[M][2] = {};
            for (int r = 0; r < R; r++) {
                vf a = load(panel + r * PANEL), b = load(panel + r * PANEL + L);
                for (int j = 0; j < M; j++) {
                    vf x = vf{} + rows[(i + j) * R + r];
                    acc[j][0] += a * x, acc[j][1] += b * x;
                }
            }
            for (int j = 0; j < M; j++)
                for (int h = 0; h < 2; h++) store(out + (i + j) * stride + h * L, acc[j][h]);
        }
    }
};

#ifdef __AMX_BF16__
struct ByTiles {
    typedef bf16 Row;
    static int64_t at(int64_t r, int c) { return (r / 2 * PANEL + c) * 2 + r % 2; }  // pairs of coordinates

    Tiles registers;

    __attribute__((noinline)) static void multiply(const bf16* rows, const bf16* panel, int R, float* out, int stride) {
        static_assert(N == 32, "two tiles of rows");
        asm volatile("" ::: "memory");  // gcc does not know that tiles are loaded from it
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int r = 0; r < R; r += 32) {
            _tile_loadd(4, rows + r, R * 2);
            _tile_loadd(5, rows + 16 * R + r, R * 2);
            _tile_loadd(6, panel + r * PANEL, PANEL * 4);
            _tile_loadd(7, panel + r * PANEL + 2 * L, PANEL * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, stride * 4);
        _tile_stored(1, out + L, stride * 4);
        _tile_stored(2, out + 16 * stride, stride * 4);
        _tile_stored(3, out + 16 * stride + L, stride * 4);
    }
};
#endif

void put(float* to, float x) { *to = x; }
void put(bf16* to, float x) { uint32_t u; std::memcpy(&u, &x, 4); to->bits = (uint16_t)(u >> 16); }  // of a bf16 number
void store_exact(float* to, vf x) { store(to, x); }
void store_exact(bf16* to, vf x) {  // of numbers that are bf16, as codes are
    typedef uint16_t v16 __attribute__((vector_size(32)));
    v16 half = __builtin_convertvector((vu)x >> 16, v16);
    std::memcpy(to, &half, sizeof half);
}

// One group's keys or values: rows of R coordinates, of `bits` with a scale and a zero each, or of T.
template <class T> struct Coordinates {
    const void* data;
    const uint16_t* params;
    int R, bits;

    template <int BITS, class Row> void codes(int64_t t, Row* to) const {
        const uint8_t* row = (const uint8_t*)data + t * R * BITS / 8;
        for (int r = 0; r < R; r += L) store_exact(to + r, codes_at<BITS>(row, R, r));
    }
    template <class Row> void take(int64_t t, Row* to) const {
        if (bits == 2) codes<2>(t, to);
        else if (bits == 3) codes<3>(t, to);
        else if (bits == 4) codes<4>(t, to);
        else if (bits == 8) codes<8>(t, to);
        else for (int r = 0; r < R; r += L) store_exact(to + r, load((const T*)data + t * R + r));
    }
    float scale(int64_t t) const { return params ? half_to_float(params[2 * t]) : 1.0f; }
    float zero(int64_t t) const { return params ? half_to_float(params[2 * t + 1]) : 0.0f; }
};

template <class Multiply, class T>
void attend_groups(const T* q, int64_t q_row, int64_t q_head, const char* k, const uint16_t* k_params, const char* v,
                     const uint16_t* v_params, const T* basis, const float* bias, const int64_t* pos, const float* cos,
                     const float* sin, int64_t table_row, float* out, int64_t B, int64_t groups, int64_t s, int64_t G,
                     int64_t D, int64_t slots, int64_t R, int64_t bits, int64_t threads) {
    typedef typename Multiply::Row Row;
    int64_t channels = groups * s * D, half = D / 2, row_bytes = R * (bits == 16 ? (int64_t)sizeof(T) * 8 : bits) / 8;
    Room<Row> panels(channels * R);
    Room<float> ones(channels);  // what coordinates of 1 give: a zero is added to every one of them
#pragma omp parallel for num_threads(threads)
    for (int64_t c = 0; c < channels; c++)
        for (int64_t r = 0; r < R; r++) {
            float x = number(basis[c * R + r]);
            put(&panels[c / PANEL * PANEL * R + Multiply::at(r, (int)(c % PANEL))], x), ones[c] += x;
        }
    float softness = LOG2_E / std::sqrt((float)D);
    int64_t parts = (*std::max_element(pos, pos + B) + SPAN) / SPAN;
    attention((const float*)nullptr, 0, 0, out, (int)B, (int)groups, (int)(s * G), (int)R, parts, threads,
        [&](int64_t item, int64_t part, const float*, Seen& seen) {
            Multiply unit;
            int64_t b = item / groups, first_head = item % groups * s;
            Coordinates<T> keys{k + item * slots * row_bytes, k_params ? k_params + item * slots * 2 : nullptr, (int)R, (int)bits};
            Coordinates<T> values{v + item * slots * row_bytes, v_params ? v_params + item * slots * 2 : nullptr, (int)R, (int)bits};
            const float *c = cos + b * table_row, *d_sin = sin + b * table_row;
            Room<float> query(s * G * D), whole(N * D);
            Room<Row> rows(N * R);
            Room<T> held(bits == 16 ? 0 : N * R);
            std::vector<float> zeros(s * G), k_scale(N), k_zero(N);
            for (int64_t i = 0; i < s * G; i++)
                scaled_query(q + b * q_row + (first_head * G + i) * q_head, q_head, 1, (int)D, softness, &query[i * D]);
            const float* ks[N];
            const T* vs[N];
            for (int i = 0; i < N; i++) ks[i] = &whole[i * D];
            const Next<float> nothing{};
            const Next<T> none{};
            int64_t stop = std::min(pos[b] + 1, (part + 1) * SPAN);
            for (int64_t first = part * SPAN; first < stop; first += N) {
                int n = (int)std::min<int64_t>(N, stop - first);
                for (int i = 0; i < n; i++) {
                    int64_t t = first + i;
                    keys.take(t, &rows[i * R]), k_scale[i] = keys.scale(t), k_zero[i] = keys.zero(t);
                    if (bits == 16) vs[i] = (const T*)values.data + t * R;
                    else values.take(t, &held[i * R]), vs[i] = &held[i * R];
                }
                for (int64_t h = 0; h < s; h++) {
                    int64_t channel = (first_head + h) * D;
                    for (int64_t d = 0; d < D; d += PANEL)
                        unit.multiply(rows.at, &panels[(channel + d) * R], (int)R, &whole[d], (int)D);
                    for (int i = 0; i < n; i++) {
                        float *x = &whole[i * D], scale = k_scale[i], zero = k_zero[i];
                        for (int64_t d = 0; d < half; d += L) {
                            const float *at = &ones[channel + d], *plus = bias + channel + d;
                            vf one = load(x + d) * scale + (load(at) * zero + load(plus));
                            vf two = load(x + half + d) * scale + (load(at + half) * zero + load(plus + half));
                            vf a = load(c + (first + i) * half + d), e = load(d_sin + (first + i) * half + d);
                            store(x + d, one * a - two * e), store(x + half + d, two * a + one * e);
                        }
                    }
                    by_heads((int)G, [&](auto m, int g) {
                        dots<m>(&query[(h * G + g) * D], ks, n, (int)D, &seen.p[(h * G + g) * N], nothing);
                    });
                }
                for (int64_t g = 0; g < s * G; g++) {
                    float *p = &seen.p[g * N], *y = &seen.y[g * R], shrink = seen.soften((int)g, p, n, N);
                    if (shrink != 1)
                        for (int64_t r = 0; r < R; r += L) store(y + r, load(y + r) * shrink);
                    if (!values.params) continue;
                    zeros[g] *= shrink;
                    for (int i = 0; i < n; i++) zeros[g] += p[i] * values.zero(first + i), p[i] *= values.scale(first + i);
                }
                by_heads((int)(s * G), [&](auto m, int g) { weigh<m>(&seen.p[g * N], vs, n, (int)R, &seen.y[g * R], none); });
            }
            for (int64_t g = 0; g < s * G; g++)
                for (int64_t r = 0; r < R; r++) seen.y[g * R + r] += zeros[g];
        });
}

}  // namespace

extern "C" {

// out [B, groups * s * G, D]; mean [.., R] is room for the weighted coordinates, which are expanded once
void kvf_group_attention(int64_t is_bf16, const void* q, const void* k, const uint16_t* k_params, const void* v,
                         const uint16_t* v_params, const void* k_basis, const void* v_basis, const float* k_bias,
                         const float* v_bias, const int64_t* pos, const float* cos, const float* sin, float* mean, void* out,
                         int64_t q_row, int64_t q_head, int64_t table_row, int64_t B, int64_t groups, int64_t s, int64_t G,
                         int64_t D, int64_t slots, int64_t R, int64_t bits, int64_t threads) {
    auto run = [&](auto multiply, auto zero) {
        typedef decltype(zero) T;
        attend_groups<typename decltype(multiply)::type>(
            (const T*)q, q_row, q_head, (const char*)k, k_params, (const char*)v, v_params, (const T*)k_basis, k_bias, pos,
            cos, sin, table_row, mean, B, groups, s, G, D, slots, R, bits, threads);
    };
    struct Floats { typedef ByFloats type; };
    bool done = false;
#ifdef __AMX_BF16__
    struct Tiles { typedef ByTiles type; };
    if (is_bf16 && has_tiles()) run(Tiles{}, bf16{}), done = true;
#endif
    if (!done && is_bf16) run(Floats{}, bf16{});
    else if (!done) run(Floats{}, 0.0f);
    int64_t heads = groups * s * G;
    FLOAT_OR_BF16(
        _Pragma("omp parallel for num_threads(threads)")
        for (int64_t i = 0; i < B * heads; i++) {
            int64_t channel = i % heads / G * D;
            std::vector<float> y(D);
            for (int64_t d = 0; d < D; d++) {
                const T* u = (const T*)v_basis + (channel + d) * R;
                vf acc = {};
                for (int64_t r = 0; r < R; r += L) acc += load(u + r) * load(mean + i * R + r);
                y[d] = sum(acc) + v_bias[channel + d];  // weights add up to 1
            }
            for (int64_t d = 0; d < D; d += L) store((T*)out + i * D + d, load(&y[d]));
        })
}
}
