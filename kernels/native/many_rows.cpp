// y = x W^T for many rows of x, a prompt's, and packed W: by the matrix unit for bf16, or by vectors: of 8 numbers; of
// 16 where the processor multiplies bytes (VNNI) and, for W in bf16, pairs of bf16.
//
// For the unit, and for pairs, a number in fp32 is the sum of two in bf16, but for its last bits: a larger part that is
// rounded to nearest, and a smaller one. All products of parts are added up in fp32 but those of two smaller ones: what
// is left out is below 2^-16 of a product. In bf16, x has one part, and a weight is rounded to one.
#include <algorithm>
#include "packed_weight.h"
#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
namespace {

constexpr int TILE = 16;  // rows of x, and of W, in a register
constexpr int DEEP = 32;  // inputs of a register
constexpr int64_t TILE_SIZE = TILE * DEEP;
constexpr int64_t AT_ONCE = 512;     // inputs that are multiplied at a time: what is unpacked of W stays in a cache
constexpr int64_t MOST_ROWS = 1024;  // of x for which W is unpacked once
constexpr int64_t PANEL_BLOCKS = 8;  // blocks of 16 rows of W that a thread unpacks at a time

// fp32 numbers of inputs i and i + 1 -> one lane of both in bf16, and in `rest` what is lost
template <int PARTS> void split(vf a, vf b, uint16_t* to, uint16_t* rest) {
    const vu half = vu{} + 0x7fff, one = vu{} + 1, upper = vu{} + 0xffff0000u;
    vu x = (vu)a, y = (vu)b;
    x = (x + half + ((x >> 16) & one)) & upper, y = (y + half + ((y >> 16) & one)) & upper;
    store((float*)to, (vf)((x >> 16) | y));
    if (PARTS == 1) return;
    vu p = (vu)(a - (vf)x), q = (vu)(b - (vf)y);
    p = (p + half + ((p >> 16) & one)) & upper, q = (q + half + ((q >> 16) & one)) & upper;
    store((float*)rest, (vf)((p >> 16) | q));
}

// Blocks first.. of W and inputs from.. -> registers [part][block][inputs / 32][input pair][16 rows][2], zeros beyond
// the end
template <int BITS, int PARTS> void unpack_panel(const Weight& w, int64_t first, int64_t count, int64_t room,
                                                 int64_t from, int64_t chunk, uint16_t* to) {
    const int64_t deep = (chunk + DEEP - 1) / DEEP * DEEP, groups = w.in / w.group;
    const vf table = table_of<BITS>(w);
    for (int64_t b = 0; b < room; b++) {
        uint16_t *at = to + b * deep * TILE, *rest = at + room * deep * TILE;
        int64_t i = 0;
        if (b < count)
            for (; i < chunk;) {
                const int64_t g = (from + i) / w.group, end = std::min(chunk, (g + 1) * w.group - from);
                const int64_t row = (first + b) * groups + g;
                vf scale = vf{} + 1.0f, zero = {}, minimum = {};
                if constexpr (BITS != 16) {
                    scale = w.scale.read(row, 0);
                    if (w.zero) zero = __builtin_convertvector(zeros_at(w.zero + row * SIDE / 2, 0), vf);
                    if (w.minimum) minimum = w.minimum.read(row, 0);
                }
                for (; i < end; i += UNIT) {
                    vf q[UNIT];
                    Unit<BITS>::read(w.codes + ((first + b) * w.in + from + i) * BITS * 2, table, q);
                    if (BITS != 16)
                        for (int j = 0; j < UNIT; j++) q[j] = (q[j] - zero) * scale + minimum;
                    for (int j = 0; j < UNIT; j += 2)
                        split<PARTS>(q[j], q[j + 1], at + (i + j) * TILE, rest + (i + j) * TILE);
                }
            }
        std::fill(at + i * TILE, at + deep * TILE, 0);
        if (PARTS == 2) std::fill(rest + i * TILE, rest + deep * TILE, 0);
    }
}

// x [M][in] -> registers [part][16 rows][inputs / 32][row][32] of each chunk of inputs, one after the other
template <class T, int PARTS> void split_rows(const T* x, int64_t M, int64_t in, int64_t tile, int64_t tiles,
                                              int64_t from, int64_t chunk, uint16_t* to) {
    const int64_t deep = (chunk + DEEP - 1) / DEEP * DEEP, part = tiles * TILE * deep;
    uint16_t* at = to + tile * TILE * deep;
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t i = 0; i < deep; i += L) {
            const bool there = tile * TILE + r < M && i < chunk;
            vf v = there ? load(x + (tile * TILE + r) * in + from + i) : vf{};
            bf16* cell = (bf16*)(at + i / DEEP * TILE_SIZE + r * DEEP + i % DEEP);
            _mm256_storeu_si256((__m256i*)cell, (__m256i)_mm512_cvtneps_pbh((__m512)v));
            if (PARTS == 1) continue;
            v -= load(cell);
            _mm256_storeu_si256((__m256i*)(cell + part), (__m256i)_mm512_cvtneps_pbh((__m512)v));
        }
}

// Two by two registers of sums, [32 rows of x][32 of W] in fp32, plus the products of a chunk
template <int XP, int WP> __attribute__((noinline)) void multiply_tiles(const uint16_t* x, int64_t x_part,
                                                                        int64_t x_tile, const uint16_t* w,
                                                                        int64_t w_part, int64_t w_tile, int64_t steps,
                                                                        float* sums, int64_t stride, bool fetch) {
    asm volatile("" ::: "memory");  // gcc does not know that registers are loaded from it
    _tile_loadd(0, sums, stride * 4);
    _tile_loadd(1, sums + TILE, stride * 4);
    _tile_loadd(2, sums + TILE * stride, stride * 4);
    _tile_loadd(3, sums + TILE * stride + TILE, stride * 4);
    for (int64_t s = 0; s < steps;
         s++, x += TILE_SIZE, w += TILE_SIZE) {  // loading a register takes longer than a product
        if (fetch)
            for (int i = 0; i < TILE_SIZE; i += 32)  // as of packed weights for few rows
                __builtin_prefetch(w + 2048 + i), __builtin_prefetch(w + w_tile + 2048 + i);
        _tile_loadd(4, x, 64);
        _tile_loadd(5, x + x_tile, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (WP == 2) {
            _tile_loadd(7, w + w_part, 64);
            _tile_dpbf16ps(0, 4, 7);
            _tile_dpbf16ps(2, 5, 7);
        }
        if (XP == 2) {
            _tile_loadd(7, x + x_part, 64);
            _tile_dpbf16ps(0, 7, 6);
            _tile_loadd(7, x + x_part + x_tile, 64);
            _tile_dpbf16ps(2, 7, 6);
        }
        _tile_loadd(6, w + w_tile, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
        if (XP == 2) {
            _tile_dpbf16ps(3, 7, 6);
            _tile_loadd(7, x + x_part, 64);
            _tile_dpbf16ps(1, 7, 6);
        }
        if (WP == 2) {
            _tile_loadd(7, w + w_part + w_tile, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride * 4);
    _tile_stored(1, sums + TILE, stride * 4);
    _tile_stored(2, sums + TILE * stride, stride * 4);
    _tile_stored(3, sums + TILE * stride + TILE, stride * 4);
    asm volatile("" ::: "memory");
}

template <int BITS, class T>
void many_rows(const Weight& w, const T* x, const float* bias, T* y, int64_t rows, int64_t blocks, int threads) {
    constexpr int XP = std::is_same_v<T, float> ? 2 : 1, WP = XP == 2 && BITS < 16 ? 2 : 1;
    const int64_t deep = (w.in + DEEP - 1) / DEEP * DEEP, panels = (blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS;
    const int64_t most = (std::min(rows, MOST_ROWS) + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
    const bool in_place = BITS == 16 && w.in % DEEP == 0;  // in bf16, W lies as registers want it
    const uint16_t* as_it_is = (const uint16_t*)w.codes;
    Room<uint16_t> split_x(XP * most * deep);
#pragma omp parallel num_threads(threads)
    {
        constexpr int64_t WIDE = PANEL_BLOCKS * TILE;
        Tiles registers;
        Room<uint16_t> panel(WP * WIDE * std::min(AT_ONCE, deep));
        Room<float> sums(most * WIDE);
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            const int64_t M = std::min(MOST_ROWS, rows - row), tiles = (M + 2 * TILE - 1) / (2 * TILE) * 2;
            const int64_t chunks = (w.in + AT_ONCE - 1) / AT_ONCE;
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tiles * chunks; i++) {
                const int64_t from = i / tiles * AT_ONCE, chunk = std::min(AT_ONCE, w.in - from);
                split_rows<T, XP>(x + row * w.in, M, w.in, i % tiles, tiles, from, chunk,
                                  &split_x[XP * tiles * TILE * from]);
            }
#pragma omp for schedule(dynamic)
            for (int64_t p = 0; p < panels; p++) {
                const int64_t first = p * PANEL_BLOCKS, count = std::min(PANEL_BLOCKS, blocks - first),
                              room = (count + 1) / 2 * 2;
                std::fill(&sums[0], &sums[0] + tiles * TILE * WIDE, 0.0f);
                for (int64_t from = 0; from < w.in; from += AT_ONCE) {
                    const int64_t chunk = std::min(AT_ONCE, w.in - from), steps = (chunk + DEEP - 1) / DEEP,
                                  tile = steps * TILE_SIZE;
                    if (!in_place) unpack_panel<BITS, WP>(w, first, count, room, from, chunk, &panel[0]);
                    for (int64_t t = 0; t < tiles; t += 2)
                        for (int64_t b = 0; b < room; b += 2) {
                            const uint16_t* at = &panel[b * tile];
                            int64_t next = tile;
                            if (in_place)
                                at = as_it_is + ((first + b) * w.in + from) * TILE,
                                next = b + 1 < count ? w.in * TILE : 0;
                            multiply_tiles<XP, WP>(&split_x[XP * tiles * TILE * from + t * tile], tiles * tile, tile,
                                                   at, room * tile, next, steps, &sums[t * TILE * WIDE + b * TILE],
                                                   WIDE, in_place && t == 0);
                        }
                }
                for (int64_t m = 0; m < M; m++)
                    for (int64_t b = 0; b < count; b++)
                        put(y, row + m, blocks, first + b, 0, load(&sums[m * WIDE + b * L]), bias);
            }
        }
    }
}

}  // namespace
#elif defined(__AVX2__) && !defined(__AVX512F__)
namespace {

constexpr int TOGETHER = 6;  // rows of x that are multiplied with a block: 12 sums of 16 registers
constexpr int64_t AT_ONCE =
    256;  // inputs that are multiplied at a time: what is unpacked of a block stays in the first-level cache
constexpr int64_t MOST_ROWS = 384;   // of x for which W is unpacked once
constexpr int64_t PANEL_BLOCKS = 8;  // blocks of 16 rows of W that a thread unpacks at a time

// sums [R][16], `stride` apart, plus the products of a chunk of R rows of x with a block
template <int R>
void add_products(const float* x, int64_t in, const float* block, int64_t chunk, float* sums, int64_t stride) {
    vf acc[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = load(sums + r * stride + v * L);
    for (int64_t i = 0; i < chunk; i++) {
        vf q[VECTORS];
        for (int v = 0; v < VECTORS; v++) q[v] = load(block + i * SIDE + v * L);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) acc[r][v] += q[v] * x[r * in + i];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * stride + v * L, acc[r][v]);
}

template <int BITS, class T>
void many_rows(const Weight& w, const T* x, const float* bias, T* y, int64_t rows, int64_t blocks, int threads) {
    constexpr int64_t WIDE = PANEL_BLOCKS * SIDE;
    const int64_t panels = (blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS, most = std::min(rows, MOST_ROWS);
    constexpr bool wide = !std::is_same_v<T, float>;
    Room<float> floats(wide ? most * w.in : 0);
#pragma omp parallel num_threads(threads)
    {
        Room<float> panel(WIDE * AT_ONCE), sums(most * WIDE);
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            const int64_t M = std::min(MOST_ROWS, rows - row);
            const float* from_x;
            if constexpr (wide) {
#pragma omp for schedule(static)
                for (int64_t m = 0; m < M; m++)
                    for (int64_t i = 0; i < w.in; i += L) store(&floats[m * w.in + i], load(x + (row + m) * w.in + i));
                from_x = floats.at;
            } else from_x = x + row * w.in;
#pragma omp for schedule(dynamic)
            for (int64_t p = 0; p < panels; p++) {
                const int64_t first = p * PANEL_BLOCKS, count = std::min(PANEL_BLOCKS, blocks - first);
                std::fill(&sums[0], &sums[0] + M * WIDE, 0.0f);
                for (int64_t from = 0; from < w.in; from += AT_ONCE) {
                    const int64_t chunk = std::min(AT_ONCE, w.in - from);
                    for (int64_t b = 0; b < count; b++)
                        unpack_chunk<BITS>(w, first + b, from, chunk, &panel[b * SIDE * AT_ONCE]);
                    for (int64_t m = 0; m < M; m += TOGETHER)
                        for (int64_t b = 0; b < count; b++) {
                            const float *at = from_x + m * w.in + from, *block = &panel[b * SIDE * AT_ONCE];
                            float* to = &sums[m * WIDE + b * SIDE];
                            if (M - m >= TOGETHER) add_products<TOGETHER>(at, w.in, block, chunk, to, WIDE);
                            else if (M - m == 5) add_products<5>(at, w.in, block, chunk, to, WIDE);
                            else if (M - m == 4) add_products<4>(at, w.in, block, chunk, to, WIDE);
                            else if (M - m == 3) add_products<3>(at, w.in, block, chunk, to, WIDE);
                            else if (M - m == 2) add_products<2>(at, w.in, block, chunk, to, WIDE);
                            else add_products<1>(at, w.in, block, chunk, to, WIDE);
                        }
                }
                for (int64_t m = 0; m < M; m++)
                    for (int64_t b = 0; b < count; b++)
                        for (int v = 0; v < VECTORS; v++)
                            put(y, row + m, blocks, first + b, v, load(&sums[m * WIDE + b * SIDE + v * L]), bias);
            }
        }
    }
}

}  // namespace
#define BY_VECTORS true
#elif defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
namespace {

constexpr int64_t MOST_ROWS = 512;  // of x that are integers, or pairs, at a time

#ifdef __AVX512BF16__
constexpr int TOGETHER = 8;  // rows of x that are multiplied with two blocks: 16 sums

// x [rows][in] -> lanes of two inputs [in / 2][part][TOGETHER]: numbers in bf16, and what is lost
template <int PARTS, class T> void pairs_of(const T* x, int64_t rows, int64_t in, uint32_t* to) {
    for (int64_t i = 0; i < in; i += L)
        for (int r = 0; r < TOGETHER; r++) {
            vf v = r < rows ? load(x + r * in + i) : vf{};
            for (int p = 0; p < PARTS; p++) {
                const __m256bh part = _mm512_cvtneps_pbh((__m512)v);
                uint32_t pair[L / 2];
                std::memcpy(pair, &part, sizeof part);
                for (int j = 0; j < L / 2; j++) to[((i / 2 + j) * PARTS + p) * TOGETHER + r] = pair[j];
                if (p + 1 < PARTS) v -= load((const bf16*)pair);
            }
        }
}

template <int PARTS, int COUNT>
void multiply_pairs(const uint32_t* x, const uint8_t* w, int64_t in, __m512 (*sum)[TOGETHER]) {
    for (int k = 0; k < COUNT; k++)
        for (int r = 0; r < TOGETHER; r++) sum[k][r] = __m512{};
    for (int64_t i = 0; i < in / 2; i++, w += WORDS) {
        __m512bh q[COUNT];
        for (int k = 0; k < COUNT; k++) q[k] = (__m512bh)_mm512_loadu_si512(w + k * in * SIDE * 2);
        for (int p = 0; p < PARTS; p++)
            for (int r = 0; r < TOGETHER; r++, x++)
                for (int k = 0; k < COUNT; k++)
                    sum[k][r] = _mm512_dpbf16_ps(sum[k][r], (__m512bh)_mm512_set1_epi32(*x), q[k]);
    }
}

template <class T>
void many_by_pairs(const Weight& w, const T* x, const float* bias, T* y, int64_t rows, int64_t blocks, int threads) {
    constexpr int PARTS = std::is_same_v<T, float> ? 2 : 1;
    const int64_t tiles = (rows + TOGETHER - 1) / TOGETHER, tile = w.in / 2 * PARTS * TOGETHER;
    Room<uint32_t> pairs(tiles * tile);
    Shares shares((blocks + 1) / 2, threads, 1);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++)
            pairs_of<PARTS>(x + t * TOGETHER * w.in, std::min<int64_t>(TOGETHER, rows - t * TOGETHER), w.in,
                            &pairs[t * tile]);
        shares.each([&](const int64_t* two, int64_t) {
            const int64_t first = *two * 2, count = std::min<int64_t>(2, blocks - first);
            const uint8_t* at = w.codes + first * w.in * SIDE * 2;
            for (int64_t t = 0; t < tiles; t++) {
                __m512 sum[2][TOGETHER];
                if (count == 2) multiply_pairs<PARTS, 2>(&pairs[t * tile], at, w.in, sum);
                else multiply_pairs<PARTS, 1>(&pairs[t * tile], at, w.in, sum);
                for (int64_t r = 0; r < std::min<int64_t>(TOGETHER, rows - t * TOGETHER); r++)
                    for (int64_t k = 0; k < count; k++)
                        put(y, t * TOGETHER + r, blocks, first + k, 0, (vf)sum[k][r], bias);
            }
        });
    }
}
#endif

template <int BITS, class T>
void many_rows(const Weight& w, const T* x, const float* bias, T* y, int64_t rows, int64_t blocks, int threads) {
    for (int64_t row = 0; row < rows; row += MOST_ROWS, x += MOST_ROWS * w.in, y += MOST_ROWS * blocks * SIDE) {
        const int64_t M = std::min(MOST_ROWS, rows - row);
#ifdef __AVX512BF16__
        if constexpr (BITS == 16) many_by_pairs(w, x, bias, y, M, blocks, threads);
        else
#endif
            linear<BITS>(w, x, bias, y, M, blocks, threads);
    }
}

}  // namespace
#ifdef __AVX512BF16__
#define BY_VECTORS true
#else
#define BY_VECTORS (bits < 16)
#endif
#endif

extern "C" {
int64_t kvf_own_ways = true;
}  // tests turn them off

extern "C" int64_t kvf_has_tiles() { return has_tiles(); }

extern "C" int64_t kvf_has_many_rows([[maybe_unused]] int64_t bits) {
#ifdef BY_VECTORS
    return BY_VECTORS;
#else
    return has_tiles();
#endif
}

extern "C" void kvf_many_rows(int64_t is_bf16, int64_t bits, const void* x, WEIGHT_ARGUMENTS, const float* bias,
                              void* y, int64_t M, int64_t in, int64_t blocks, int64_t group, int64_t shared,
                              int64_t min_shared, int64_t threads) {
#if defined(BY_VECTORS) || (defined(__AMX_BF16__) && defined(__AVX512BF16__))
    FLOAT_OR_BF16(BY_BITS((many_rows<BITS>(WEIGHT, (const T*)x, bias, (T*)y, M, blocks, threads))))
#endif
}
