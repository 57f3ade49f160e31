// Attention over coordinates shared by groups of KV heads (Palu): keys are rebuilt and rotated a block at a time.
#include "encode.h"
#include "expanded.h"

namespace {

void store_exact(float* to, vf x) { store(to, x); }
void store_exact(bf16* to, vf x) {  // numbers that bf16 holds exactly, such as codes
    typedef uint16_t some __attribute__((vector_size(L * 2)));
    some half = __builtin_convertvector((vu)x >> 16, some);
    std::memcpy(to, &half, sizeof half);
}

// One group's keys or values: rows of R coordinates, in `bits` with a scale and a zero per row, or in T.
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
        else
            for (int r = 0; r < R; r += L) store_exact(to + r, load((const T*)data + t * R + r));
    }
    float scale(int64_t t) const { return params ? half_to_float(params[2 * t]) : 1.0f; }
    float zero(int64_t t) const { return params ? half_to_float(params[2 * t + 1]) : 0.0f; }
};

// Keys or values of `groups` groups [B, groups, slots, R], and the basis that expands them: [groups * s * D, R]
template <class T> struct Grouped {
    const char* data;        // of `bits`, or of T
    const uint16_t* params;  // [B, groups, slots, 2], or none
    const T* basis;
    const float* bias;  // [groups * s * D]
    int64_t slots, R, bits;

    Coordinates<T> of(int64_t item) const {
        const int64_t row_bytes = R * (bits == 16 ? (int64_t)sizeof(T) * 8 : bits) / 8;
        return {data + item * slots * row_bytes, params ? params + item * slots * 2 : nullptr, (int)R, (int)bits};
    }
};

// mean [B, H * G, R] gets the weighted coordinates of the values, before they are expanded. H = groups * s
template <class Unit, class T> void attend_coordinates(const Heads<T>& heads, int64_t groups, const Grouped<T>& k,
                                                       const Grouped<T>& v, const int64_t* pos, const Angles& angles,
                                                       float* mean) {
    const int64_t B = heads.B, s = heads.H / groups, G = heads.G, D = heads.D, R = k.R, bits = k.bits;
    const int64_t threads = heads.threads;
    int64_t channels = groups * s * D;
    Basis<Unit> panels(k.basis, R, true, channels, R, threads);
    std::vector<float> ones(channels);  // the product for coordinates of 1: a zero is added to each coordinate
#pragma omp parallel for num_threads(threads)
    for (int64_t c = 0; c < channels; c++) {
        vf total = {};
        for (int64_t r = 0; r < R; r += L) total += load(k.basis + c * R + r);
        ones[c] = sum(total);
    }
    float softness = LOG2_E / std::sqrt((float)D);
    int64_t longest = *std::max_element(pos, pos + B) + 1, span = span_of(longest), parts = (longest + span - 1) / span;
    const Heads<float> inner{.out = mean, .B = B, .H = groups, .G = s * G, .D = R, .threads = threads};
    attention(inner, parts, [&](int64_t item, int64_t part, const float*, Seen& seen) {
        int64_t b = item / groups, first_head = item % groups * s;
        Expanded<Unit> keys(panels, panels.R, angles.of(b), first_head, s, D);
        const Coordinates<T> latents = k.of(item), values = v.of(item);
        Room<float> query(s * G * D), weights(s * G * BLOCK), scale(BLOCK), zero(BLOCK), v_scale(BLOCK), v_zero(BLOCK);
        Room<T> held(bits == 16 ? 0 : BLOCK * R);
        std::vector<float> zeros(s * G);
        scaled_query(heads.of(b, first_head), heads.head, (int)(s * G), (int)D, softness, query.at);
        const T* vs[BLOCK];
        const Next<T> none{};
        auto mend = [&](float* x, int64_t channel) {
            for (int d = 0; d < PANEL; d++)
                for (int i = 0; i < BLOCK; i += L) {
                    float *at = x + d * BLOCK + i, one = ones[channel + d], plus = k.bias[channel + d];
                    store(at, load(at) * load(&scale[i]) + (load(&zero[i]) * one + plus));
                }
        };
        int64_t stop = std::min(pos[b] + 1, (part + 1) * span);
        for (int64_t first = part * span; first < stop; first += BLOCK) {
            int n = keys.n = (int)std::min<int64_t>(BLOCK, stop - first);
            for (int i = 0; i < n; i++) {
                int64_t t = keys.at[i] = first + i;
                latents.take(t, keys.row(i)), scale[i] = latents.scale(t), zero[i] = latents.zero(t);
                v_scale[i] = values.scale(t), v_zero[i] = values.zero(t);
                if (bits == 16) vs[i] = (const T*)values.data + t * R;
                else values.take(t, &held[i * R]), vs[i] = &held[i * R];
            }
            keys.turn();
            for (int64_t h = 0; h < s; h++) keys.logits(h, &query[h * G * D], (int)G, &weights[h * G * BLOCK], mend);
            for (int64_t g = 0; g < s * G; g++) {
                float *p = &weights[g * BLOCK], *y = &seen.y[g * R], shrink = seen.soften((int)g, p, n, BLOCK);
                if (shrink != 1)
                    for (int64_t r = 0; r < R; r += L) store(y + r, load(y + r) * shrink);
                if (!values.params) continue;
                vf zero = {};
                for (int i = 0; i < BLOCK; i += L) {
                    vf w = load(p + i);
                    zero += w * load(&v_zero[i]), store(p + i, w * load(&v_scale[i]));
                }
                zeros[g] = zeros[g] * shrink + sum(zero);
            }
            by_heads((int)(s * G),
                     [&](auto m, int g) { weigh<m, BLOCK>(&weights[g * BLOCK], vs, n, (int)R, &seen.y[g * R], none); });
        }
        for (int64_t g = 0; g < s * G; g++)
            for (int64_t r = 0; r < R; r++) seen.y[g * R + r] += zeros[g];
    });
}

// mean: room for the weighted coordinates, which are expanded once
template <class T> void attend_groups(const Heads<T>& heads, int64_t groups, const Grouped<T>& k, const Grouped<T>& v,
                                      const int64_t* pos, const Angles& angles, float* mean) {
    with_unit<T>(
        [&](auto unit) { attend_coordinates<typename decltype(unit)::type>(heads, groups, k, v, pos, angles, mean); });
    const int64_t query_heads = heads.H * heads.G, G = heads.G, D = heads.D, R = v.R;
#pragma omp parallel for num_threads(heads.threads)
    for (int64_t i = 0; i < heads.B * query_heads; i++) {
        int64_t channel = i % query_heads / G * D;
        std::vector<float> y(D);
        for (int64_t d = 0; d < D; d++) {
            const T* u = v.basis + (channel + d) * R;
            vf acc = {};
            for (int64_t r = 0; r < R; r += L) acc += load(u + r) * load(mean + i * R + r);
            y[d] = sum(acc) + v.bias[channel + d];  // weights add up to 1
        }
        for (int64_t d = 0; d < D; d += L) store(heads.out + i * D + d, load(&y[d]));
    }
}

// A group's token x [width], less its bias, as coordinates of `down` [width, R]: R numbers T, which below 16 bits are
// quantized with one scale and zero, `pair`
template <class T> void put_coordinates(const T* x, const float* bias, const T* down, int64_t width, int64_t R,
                                        int64_t bits, char* to, uint16_t* pair) {
    std::vector<float> y(R);
    for (int64_t w = 0; w < width; w++) {
        const vf by = all(number(x[w]) - bias[w]);
        for (int64_t r = 0; r < R; r += L) store(&y[r], load(&y[r]) + by * load(down + w * R + r));
    }
    std::vector<T> coordinates(R);
    for (int64_t r = 0; r < R; r += L) store(&coordinates[r], load(&y[r]));
    if (bits == 16) return (void)std::memcpy(to, coordinates.data(), R * sizeof(T));
    std::vector<uint8_t> codes(R);
    for (int64_t r = 0; r < R; r++) y[r] = number(coordinates[r]);
    codes_of(y.data(), R, 1, bits, 1, codes.data(), pair);
    pack_codes(codes.data(), R, bits, (uint8_t*)to);
}

}  // namespace
