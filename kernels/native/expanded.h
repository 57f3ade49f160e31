// Keys that are coordinates in a basis, expanded and rotated at their positions: logits of a block of tokens.
//
// Tokens lie side by side in the lanes of a vector: angles are the same for all heads, and a logit needs no sum over a
// vector. To this end, coordinates and angles of a block are transposed once.
#pragma once
#include "softmax.h"

namespace {

// Tokens of a work item, in whole blocks, if a row has n: one token costs as much as many do elsewhere, so that a
// list's few hundred are work for several threads, too.
int64_t span_of(int64_t n) { return std::max<int64_t>(1, std::min<int64_t>(512, n / 8) / BLOCK) * BLOCK; }

template <class Unit> int64_t filled_up(int64_t R) {
    return (R + Unit::TOGETHER - 1) / Unit::TOGETHER * Unit::TOGETHER;
}

// One of the units declared in products.h
struct ByFloats {
    typedef float Row;                                // a panel is [R, PANEL]
    static constexpr int64_t TOGETHER = L, MORE = 0;  // R is a multiple; rows beside the R of a panel, or of columns
    template <class T> static void pack_coordinates(const T* from, int64_t step, int64_t rank, float* to) {
        for (int64_t r = 0; r < rank; r++) store(to + r * PANEL, load(from + r * step));
    }
    template <class T> static void pack_channels(const T* from, int64_t step, int64_t rank, float* to) {
        vf part[PANEL];
        const void* rows[PANEL];
        for (int c = 0; c < PANEL; c++) rows[c] = &part[c];
        for (int64_t r = 0; r < rank; r += L) {
            for (int c = 0; c < PANEL; c++) part[c] = load(from + c * step + r);
            transpose(rows, 0, to + r * PANEL, PANEL * 4);
        }
    }
    // rows of tokens -> columns [R, BLOCK]
    static void turn(const void* const* rows, int64_t R, float* columns) {
        for (int64_t r = 0; r < R; r += L)
            for (int i = 0; i < BLOCK; i += L) transpose(rows + i, r * 4, columns + r * BLOCK + i, BLOCK * 4);
    }
    __attribute__((noinline)) void multiply(const float* one, const float* two, const float* columns, int64_t R,
                                            float* out) {
        constexpr int M = L / 2, V = L == 16 ? 2 : 3;  // channels and vectors of tokens at a time, as registers allow
        for (int c = 0; c < 2 * PANEL; c += M)
            for (int i = 0; i < BLOCK; i += V * L) {
                const float *panel = (c < PANEL ? one : two) + c % PANEL, *at = columns + i;
                vf acc[M][V] = {};
                for (int64_t r = 0; r < R; r++, panel += PANEL, at += BLOCK) {
                    vf x[V];
                    for (int v = 0; v < V; v++) x[v] = load(at + v * L), keep(x[v]);
                    for (int j = 0; j < M; j++) {
                        vf y = all(panel[j]);
                        for (int v = 0; v < V; v++) acc[j][v] += x[v] * y;
                    }
                }
                for (int j = 0; j < M; j++)
                    for (int v = 0; v < V; v++) store(out + (c + j) * BLOCK + i + v * L, acc[j][v]);
            }
    }
};

// By integers of 16 bits: two products and their sum in one instruction, where a float's is one. Each channel of a
// basis has a scale, and each token: both keep 11 to 12 bits, so that 32 bits hold the sums; bf16 has 8.
struct ByIntegers {
    typedef bf16 Row;  // a panel is [PANEL] scales, then [R / 2, PANEL, 2]; columns are alike
    static constexpr int64_t TOGETHER = COORDINATES, MORE = 2;  // a scale has the size of two numbers

    template <class T> static void pack_coordinates(const T* from, int64_t step, int64_t rank, bf16* to) {
        Room<float> x(rank * PANEL);
        ByFloats::pack_coordinates(from, step, rank, x.at);
        pack(x.at, rank, to);
    }
    template <class T> static void pack_channels(const T* from, int64_t step, int64_t rank, bf16* to) {
        Room<float> x(rank * PANEL);
        ByFloats::pack_channels(from, step, rank, x.at);
        pack(x.at, rank, to);
    }
    // rows of tokens -> scales [BLOCK] and columns [R / 2, BLOCK, 2]
    static void turn(const void* const* rows, int64_t R, bf16* columns) {
        float *scale = (float*)columns, *at = scale + BLOCK;
        for (int64_t r = 0; r < R; r += 2 * L)
            for (int i = 0; i < BLOCK; i += L) transpose(rows + i, r * 2, at + r / 2 * BLOCK + i, BLOCK * 4);
        for (int i = 0; i < BLOCK; i += L) {
            vf most = vf{} + 1e-30f;
            for (int64_t r = 0; r < R / 2; r++) {
                const vu pair = load_as<vu>(at + r * BLOCK + i);
                most = larger(most, larger(size((vf)(pair << 16)), size((vf)(pair & 0xffff0000u))));
            }
            const vf times = limit(R) / most;
            store(scale + i, most / limit(R));
            for (int64_t r = 0; r < R / 2; r++) {
                const vu pair = load_as<vu>(at + r * BLOCK + i);
                put((vf)(pair << 16) * times, (vf)(pair & 0xffff0000u) * times, at + r * BLOCK + i);
            }
        }
    }
    __attribute__((noinline)) void multiply(const bf16* one, const bf16* two, const bf16* columns, int64_t R,
                                            float* out) {
        constexpr int M = L / 2, V = 2;  // channels and vectors of tokens at a time, as registers allow
        const float* token = (const float*)columns;
        for (int c = 0; c < 2 * PANEL; c += M)
            for (int i = 0; i < BLOCK; i += V * L) {
                const float* scale = (const float*)(c < PANEL ? one : two) + c % PANEL;
                const int32_t *panel = (const int32_t*)scale + PANEL, *at = (const int32_t*)token + BLOCK + i;
                vi acc[M][V] = {};
                for (int64_t r = 0; r < R / 2; r++, panel += PANEL, at += BLOCK) {
                    Halves x[V];
                    for (int v = 0; v < V; v++) x[v] = load_as<Halves>(at + v * L), keep(x[v]);
                    for (int j = 0; j < M; j++) {
                        const Halves y = (Halves)(vi{} + panel[j]);
                        for (int v = 0; v < V; v++) acc[j][v] = add_dots(acc[j][v], x[v], y);
                    }
                }
                for (int j = 0; j < M; j++)
                    for (int v = 0; v < V; v++)
                        store(out + (c + j) * BLOCK + i + v * L,
                              __builtin_convertvector(acc[j][v], vf) * load(token + i + v * L) * scale[j]);
            }
    }

private:
    static float limit(int64_t R) { return std::floor(std::sqrt(0x1p31f / (float)R)) - 1; }
    static void put(vf a, vf b, float* to) {
        store(to, (vf)(((vu)rounded_numbers(a) & 0xffff) | (vu)rounded_numbers(b) << 16));
    }
    static void pack(const float* x, int64_t rank, bf16* to) {
        const int64_t R = filled_up<ByIntegers>(rank);
        float *scale = (float*)to, *at = scale + PANEL;
        vf most = vf{} + 1e-30f;
        for (int64_t r = 0; r < rank; r++) most = larger(most, size(load(x + r * PANEL)));
        const vf times = limit(R) / most;
        store(scale, most / limit(R));
        for (int64_t r = 0; r < R; r += 2) {
            const vf a = r < rank ? load(x + r * PANEL) : vf{}, b = r + 1 < rank ? load(x + (r + 1) * PANEL) : vf{};
            put(a * times, b * times, at + r / 2 * PANEL);
        }
    }
};

// A basis in the layout of the products: panels of PANEL channels, each of R coordinates, padded with zeros.
template <class Unit> struct Basis {
    typedef typename Unit::Row Row;
    int64_t R;
    Room<Row> panels;
    template <class T>
    Basis(const T* from, int64_t step, bool by_channels, int64_t channels, int64_t rank, int64_t threads)
        : R(filled_up<Unit>(rank)), panels(channels * (R + Unit::MORE)) {
#pragma omp parallel for num_threads(threads)
        for (int64_t first = 0; first < channels; first += PANEL)
            if (by_channels) Unit::pack_channels(from + first * step, step, rank, panel(first));
            else Unit::pack_coordinates(from + first, step, rank, panel(first));
    }
    Row* panel(int64_t channel) const { return panels.at + channel * (R + Unit::MORE); }  // a multiple of PANEL
};

// Adds to logits [M, BLOCK] of M queries what PANEL channels of each half give: keys [2 * PANEL, BLOCK], not rotated,
// and the angles [PANEL, BLOCK] to rotate them by
template <int M>
void rotated_dots(const float* q, int64_t D, const float* keys, const float* cos, const float* sin, float* logits) {
    for (int i = 0; i < BLOCK; i += 2 * L, keys += 2 * L, cos += 2 * L, sin += 2 * L, logits += 2 * L) {
        vf acc[M][2];
        for (int g = 0; g < M; g++)
            for (int j = 0; j < 2; j++) acc[g][j] = load(logits + g * BLOCK + j * L);
        for (int d = 0; d < PANEL; d++) {
            vf one[2], two[2];
            for (int j = 0; j < 2; j++) {
                vf a = load(keys + d * BLOCK + j * L), b = load(keys + (PANEL + d) * BLOCK + j * L);
                vf c = load(cos + d * BLOCK + j * L), s = load(sin + d * BLOCK + j * L);
                one[j] = a * c - b * s, two[j] = b * c + a * s;
            }
            for (int g = 0; g < M; g++) {
                vf x = all(q[g * D + d]), y = all(q[g * D + D / 2 + d]);
                for (int j = 0; j < 2; j++) acc[g][j] += one[j] * x + two[j] * y;
            }
        }
        for (int g = 0; g < M; g++)
            for (int j = 0; j < 2; j++) store(logits + g * BLOCK + j * L, acc[g][j]);
    }
}

// Tables of angles [B or 1, positions, D / 2]; or those of one row of the batch
struct Angles {
    const float *cos, *sin;
    int64_t row;

    Angles of(int64_t b) const { return {cos + b * row, sin + b * row, 0}; }
};

// A block of n <= BLOCK tokens of `heads` heads from `first` on. Its owner fills `row` i and the position `at` i, then
// calls `turn`, and `logits` for one head after another. Panels are expanded one ahead, as the matrix unit's products
// come late.
template <class Unit> struct Expanded {
    typedef typename Unit::Row Row;
    Unit unit;
    const Basis<Unit>& basis;
    const Angles angles;
    int64_t first, heads, D, half, R;  // R: coordinates of a row, padded
    int n = 0;
    int64_t at[BLOCK];
    Room<Row> rows, columns;
    Room<float> cos, sin, keys;

    Expanded(const Basis<Unit>& basis, int64_t R, const Angles& angles, int64_t first, int64_t heads, int64_t D)
        : basis(basis),
          angles(angles),
          first(first),
          heads(heads),
          D(D),
          half(D / 2),
          R(R),
          rows(BLOCK * R),
          columns(BLOCK * (R + Unit::MORE)),
          cos(half * BLOCK),
          sin(half * BLOCK),
          keys(2 * 2 * PANEL * BLOCK) {}

    Row* row(int i) { return &rows[i * R]; }
    void fetch(int64_t position) const {
        prefetch_row(angles.cos + position * half, (int)half), prefetch_row(angles.sin + position * half, (int)half);
    }

    void turn() {
        for (int i = n; i < BLOCK; i++) std::fill(row(i), row(i) + R, Row{}), at[i] = at[0];
        const void* from[BLOCK];
        for (int i = 0; i < BLOCK; i++) from[i] = row(i);
        Unit::turn(from, R, columns.at);
        for (auto [table, to] : {std::make_pair(angles.cos, cos.at), std::make_pair(angles.sin, sin.at)}) {
            for (int i = 0; i < BLOCK; i++) from[i] = table + at[i] * half;
            for (int64_t d = 0; d < half; d += L)
                for (int i = 0; i < BLOCK; i += L) transpose(from + i, d * 4, to + d * BLOCK + i, BLOCK * 4);
        }
    }

    // logits [G, BLOCK] of head h's queries [G, D]; mend(keys, channel) may change the keys of a panel
    template <class Mend> void logits(int64_t h, const float* q, int G, float* out, Mend mend) {
        std::fill(out, out + G * BLOCK, 0.0f);
        int64_t panels = half / PANEL;
        if (!h) expand(0, mend);
        for (int64_t i = 0; i < panels; i++) {
            int64_t panel = h * panels + i, d = i * PANEL;
            if (panel + 1 < heads * panels) expand(panel + 1, mend);
            by_heads(G, [&](auto m, int g) {
                rotated_dots<m>(q + g * D + d, D, buffer(panel), &cos[d * BLOCK], &sin[d * BLOCK], out + g * BLOCK);
            });
        }
    }

private:
    float* buffer(int64_t panel) { return &keys[panel % 2 * 2 * PANEL * BLOCK]; }
    template <class Mend> void expand(int64_t panel, Mend mend) {
        int64_t panels = half / PANEL, channel = (first + panel / panels) * D + panel % panels * PANEL;
        float* to = buffer(panel);
        unit.multiply(basis.panel(channel), basis.panel(channel + half), columns.at, R, to);
        mend(to, channel), mend(to + PANEL * BLOCK, channel + half);
    }
};

// Calls f with the unit for a cache of T, as a type, since the unit may be too large to pass
template <class Unit> struct Named {
    typedef Unit type;
};
template <class T, class F> void with_unit(F f) {
    if constexpr (std::is_same_v<T, float>) f(Named<ByFloats>{});
    else {
        if constexpr (TILES)
            if (has_tiles()) return f(Named<ByTiles>{});
        f(Named<std::conditional_t<PAIRS, ByPairs, std::conditional_t<AVX2 || AVX512, ByIntegers, ByFloats>>>{});
    }
}

}  // namespace
