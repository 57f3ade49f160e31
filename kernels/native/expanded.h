// Keys that are coordinates in a basis, expanded and rotated at their positions: logits of a block of tokens.
//
// Tokens lie side by side in the lanes of a vector: angles are the same for all heads, and a logit needs no sum over a
// vector. For that, coordinates and angles of a block are turned once.
#pragma once
#include "softmax.h"
#include "tiles.h"

namespace {

constexpr int PANEL = L;                  // channels that are expanded at a time, of each half of a head
constexpr int64_t COORDINATES = 32;       // whose multiple a row is filled up to with zeros
constexpr int BLOCK = L == 16 ? 64 : 48;  // tokens: a basis comes out of the second-level cache once for them

// Tokens of a work item, whole blocks, of n of a row: each costs as much as many tokens do elsewhere, and a few
// hundred, which a list has, are work for several threads, too.
int64_t span_of(int64_t n) { return std::max<int64_t>(1, std::min<int64_t>(512, n / 8) / BLOCK) * BLOCK; }

int64_t filled_up(int64_t R) { return (R + COORDINATES - 1) / COORDINATES * COORDINATES; }

// L numbers of 4 bytes of L rows, `at` bytes into each: number j of row i becomes number i of row j of `to`.
inline void transpose(const void* const* rows, int64_t at, void* to, int64_t to_row) {
    vi x[L];
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) x[i] = load_as<vi>((const char*)rows[i] + at);
#pragma GCC unroll 4
    for (int s = 1; s < L; s *= 2) {  // swaps bit s of a number's row with that of its column
        const vi odd = (LANE & s) != 0, low = odd ? L + (LANE ^ s) : LANE, high = odd ? L + LANE : LANE ^ s;
#pragma GCC unroll 16
        for (int i = 0; i < L; i++)
            if (!(i & s)) {
                vi a = x[i], b = x[i | s];
                x[i] = two_of(a, b, low), x[i | s] = two_of(a, b, high);
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) std::memcpy((char*)to + i * to_row, &x[i], sizeof x[i]);
}

// Products of a basis' channels, PANEL of each of two panels, with a block's coordinates, R of them, a multiple of 32:
// out [2 * PANEL, BLOCK]. A panel is packed from a basis whose rows, `step` apart, are its `rank` coordinates, or
// channels (then rank is a multiple of 32).
struct ByFloats {
    typedef float Row;  // a panel is [R, PANEL]
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

#ifdef __AVX512BF16__
struct InPairs {       // lanes of two coordinates, for processors that multiply such
    typedef bf16 Row;  // a panel is [R / 32, PANEL, 32]
    static void pack_coordinates(const bf16* from, int64_t step, int64_t rank, bf16* to) {
        vu pairs[L];
        const void* rows[L];
        for (int i = 0; i < L; i++) rows[i] = &pairs[i];
        for (int64_t r = 0; r < rank; r += 32) {
            auto halves = [&](int64_t r) { return r < rank ? halves_at(from + r * step) : vu{}; };
            for (int i = 0; i < L; i++) pairs[i] = halves(r + 2 * i) | halves(r + 2 * i + 1) << 16;
            transpose(rows, 0, to + r * PANEL, 64);
        }
    }
    static void pack_channels(const bf16* from, int64_t step, int64_t rank, bf16* to) {
        for (int64_t r = 0; r < rank; r += 32)
            for (int c = 0; c < PANEL; c++) std::memcpy(to + r * PANEL + c * 32, from + c * step + r, 64);
    }
    // rows of tokens -> columns [R / 32, BLOCK / 16, 16 pairs, 16 tokens]
    static void turn(const void* const* rows, int64_t R, bf16* columns) {
        for (int64_t r = 0; r < R; r += 32)
            for (int i = 0; i < BLOCK; i += L) transpose(rows + i, r * 2, columns + r * BLOCK + i * 32, 64);
    }
};

#ifdef __AMX_BF16__
struct ByTiles : InPairs {
    Tiles registers;

    __attribute__((noinline)) void multiply(const bf16* one, const bf16* two, const bf16* columns, int64_t R,
                                            float* out) {
        asm volatile("" ::: "memory");  // gcc does not know that tiles are loaded from it
        for (int i = 0; i < BLOCK; i += 2 * L) {
            const bf16* tokens = columns + i * 32;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t r = 0; r < R; r += 32) {
                _tile_loadd(4, one + r * PANEL, 64);
                _tile_loadd(5, two + r * PANEL, 64);
                _tile_loadd(6, tokens + r * BLOCK, 64);
                _tile_loadd(7, tokens + r * BLOCK + 512, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, out + i, BLOCK * 4);
            _tile_stored(1, out + i + L, BLOCK * 4);
            _tile_stored(2, out + PANEL * BLOCK + i, BLOCK * 4);
            _tile_stored(3, out + PANEL * BLOCK + i + L, BLOCK * 4);
        }
    }
};
#endif

struct ByPairs : InPairs {
    __attribute__((noinline)) void multiply(const bf16* one, const bf16* two, const bf16* columns, int64_t R,
                                            float* out) {
        constexpr int M = L / 2, V = 2;  // channels and vectors of tokens at a time: half of the registers
        for (int c = 0; c < 2 * PANEL; c += M)
            for (int i = 0; i < BLOCK; i += V * L) {
                const bf16 *panel = (c < PANEL ? one : two) + c % PANEL * 32, *tokens = columns + i * 32;
                __m512 acc[M][V] = {};
                for (int64_t r = 0; r < R; r += 32, panel += PANEL * 32, tokens += BLOCK * 32)
                    for (int j = 0; j < 32; j += 2) {
                        __m512bh x[V];
                        for (int v = 0; v < V; v++) x[v] = (__m512bh)_mm512_loadu_si512(tokens + v * 512 + j * L);
                        for (int m = 0; m < M; m++) {
                            const __m512bh y = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(panel + m * 32 + j));
                            for (int v = 0; v < V; v++) acc[m][v] = _mm512_dpbf16_ps(acc[m][v], x[v], y);
                        }
                    }
                for (int m = 0; m < M; m++)
                    for (int v = 0; v < V; v++) store(out + (c + m) * BLOCK + i + v * L, (vf)acc[m][v]);
            }
    }
};
#endif

// A basis as the products take it: panels of R coordinates, filled up with zeros, of PANEL channels each.
template <class Unit> struct Basis {
    typedef typename Unit::Row Row;
    int64_t R;
    Room<Row> panels;
    template <class T>
    Basis(const T* from, int64_t step, bool by_channels, int64_t channels, int64_t rank, int64_t threads)
        : R(filled_up(rank)), panels(channels * R) {
#pragma omp parallel for num_threads(threads)
        for (int64_t first = 0; first < channels; first += PANEL)
            if (by_channels) Unit::pack_channels(from + first * step, step, rank, &panels[first * R]);
            else Unit::pack_coordinates(from + first, step, rank, &panels[first * R]);
    }
    const Row* panel(int64_t channel) const { return panels.at + channel * R; }  // a multiple of PANEL
};

// logits [M, BLOCK] of M queries from PANEL channels of each half, keys [2 * PANEL, BLOCK] before rotation by the
// angles [PANEL, BLOCK]
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

// A block of n <= BLOCK tokens of `heads` heads from `first` on, filled by its owner: `row` i and the position `at` i;
// then `turn`, and `logits` of one head after the other. Panels are expanded one ahead: products come out of the matrix
// unit late.
template <class Unit> struct Expanded {
    typedef typename Unit::Row Row;
    Unit unit;
    const Basis<Unit>& basis;
    const float *cos_table, *sin_table;
    int64_t first, heads, D, half, R;  // coordinates of a row, filled up
    int n = 0;
    int64_t at[BLOCK];
    Room<Row> rows, columns;
    Room<float> cos, sin, keys;

    Expanded(const Basis<Unit>& basis, int64_t R, const float* cos, const float* sin, int64_t first, int64_t heads,
             int64_t D)
        : basis(basis),
          cos_table(cos),
          sin_table(sin),
          first(first),
          heads(heads),
          D(D),
          half(D / 2),
          R(R),
          rows(BLOCK * R),
          columns(BLOCK * R),
          cos(half * BLOCK),
          sin(half * BLOCK),
          keys(2 * 2 * PANEL * BLOCK) {}

    Row* row(int i) { return &rows[i * R]; }
    void fetch(int64_t position) const {
        prefetch_row(cos_table + position * half, (int)half), prefetch_row(sin_table + position * half, (int)half);
    }

    void turn() {
        for (int i = n; i < BLOCK; i++) std::fill(row(i), row(i) + R, Row{}), at[i] = at[0];
        const void* from[BLOCK];
        for (int i = 0; i < BLOCK; i++) from[i] = row(i);
        Unit::turn(from, R, columns.at);
        for (auto [table, to] : {std::make_pair(cos_table, cos.at), std::make_pair(sin_table, sin.at)}) {
            for (int i = 0; i < BLOCK; i++) from[i] = table + at[i] * half;
            for (int64_t d = 0; d < half; d += L)
                for (int i = 0; i < BLOCK; i += L) transpose(from + i, d * 4, to + d * BLOCK + i, BLOCK * 4);
        }
    }

    // logits [G, BLOCK] of head h's queries [G, D]; mend(keys, channel) has its say on a panel
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

// f(unit, zero of the cache's type): a unit in a type of its own, as it may be too large to hand over
template <class F> void with_unit(int64_t is_bf16, F f) {
    struct Floats {
        typedef ByFloats type;
    };
#ifdef __AMX_BF16__
    struct InTiles {
        typedef ByTiles type;
    };
    if (is_bf16 && has_tiles()) return f(InTiles{}, bf16{});
#endif
#ifdef __AVX512BF16__
    struct InLanes {
        typedef ByPairs type;
    };
    if (is_bf16) return f(InLanes{}, bf16{});
#else
    if (is_bf16) return f(Floats{}, bf16{});
#endif
    f(Floats{}, 0.0f);
}

}  // namespace
