// The processor's matrix unit for bf16: eight registers, tiles, of 16 rows of 64 bytes.
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// The system grants the unit's registers on request (ARCH_REQ_XCOMP_PERM).
bool has_tiles() {
    static const bool given = !syscall(SYS_arch_prctl, 0x1023, 18);
    return given;
}

struct Tiles {  // a thread's registers, all of their whole size, while this lives
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } all;
        for (int i = 0; i < 8; i++) all.bytes[i] = 64, all.rows[i] = 16;
        _tile_loadconfig(&all);
    }
    ~Tiles() { _tile_release(); }
};

// ---- keys that are coordinates in a basis ----

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

// ---- many rows of x ----
//
// A number in fp32 is the sum of two bf16 parts, as for pairs (many_rows.cpp).

constexpr int TILE = 16;  // rows of x, and of W, in a register
constexpr int DEEP = 32;  // inputs of a register
constexpr int64_t TILE_SIZE = TILE * DEEP;

// fp32 numbers of inputs i and i + 1 -> one lane of both in bf16; `rest` gets the rounding errors
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
                    Unit<BITS>::read(w.codes + ((first + b) * w.in + from + i) * SIZE<BITS> * 2, table, q);
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
struct Registers {  // in memory: numbers from one part, and from one register, to the next
    const uint16_t* at;
    int64_t part, tile;
};
template <int XP, int WP> __attribute__((noinline)) void multiply_tiles(Registers from_x, Registers from_w,
                                                                        int64_t steps, float* sums, int64_t stride,
                                                                        bool fetch) {
    const uint16_t *x = from_x.at, *w = from_w.at;
    const int64_t x_part = from_x.part, x_tile = from_x.tile, w_part = from_w.part, w_tile = from_w.tile;
    asm volatile("" ::: "memory");  // gcc does not know that registers are loaded from it
    _tile_loadd(0, sums, stride * 4);
    _tile_loadd(1, sums + TILE, stride * 4);
    _tile_loadd(2, sums + TILE * stride, stride * 4);
    _tile_loadd(3, sums + TILE * stride + TILE, stride * 4);
    for (int64_t s = 0; s < steps; s++, x += TILE_SIZE, w += TILE_SIZE) {  // loading a tile takes longer than a product
        if (fetch)
            for (int i = 0; i < TILE_SIZE; i += 32)  // as for few rows of packed weights
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

template <int BITS, class T> void many_by_tiles(const Weight& w, const Product<T>& of) {
    constexpr int64_t AT_ONCE = 512;     // inputs multiplied at a time: what is unpacked of W stays in a cache
    constexpr int64_t MOST_ROWS = 1024;  // rows of x for which W is unpacked once
    constexpr int64_t PANEL_BLOCKS = 8;  // blocks of 16 rows of W that a thread unpacks at a time
    constexpr int XP = std::is_same_v<T, float> ? 2 : 1, WP = XP == 2 && BITS < 16 ? 2 : 1;
    const int64_t deep = (w.in + DEEP - 1) / DEEP * DEEP, panels = (of.blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS,
                  rows = of.M;
    const int64_t most = (std::min(rows, MOST_ROWS) + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
    const bool in_place = BITS == 16 && w.in % DEEP == 0;  // in bf16, W already has the layout of tiles
    const uint16_t* as_it_is = (const uint16_t*)w.codes;
    Room<uint16_t> split_x(XP * most * deep);
#pragma omp parallel num_threads(of.threads)
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
                split_rows<T, XP>(of.x + row * w.in, M, w.in, i % tiles, tiles, from, chunk,
                                  &split_x[XP * tiles * TILE * from]);
            }
#pragma omp for schedule(dynamic)
            for (int64_t p = 0; p < panels; p++) {
                const int64_t first = p * PANEL_BLOCKS, count = std::min(PANEL_BLOCKS, of.blocks - first),
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
                            multiply_tiles<XP, WP>({&split_x[XP * tiles * TILE * from + t * tile], tiles * tile, tile},
                                                   {at, room * tile, next}, steps, &sums[t * TILE * WIDE + b * TILE],
                                                   WIDE, in_place && t == 0);
                        }
                }
                for (int64_t m = 0; m < M; m++)
                    for (int64_t b = 0; b < count; b++) of.put(row + m, first + b, 0, load(&sums[m * WIDE + b * L]));
            }
        }
    }
}

}  // namespace
