// AVX-512 that multiplies pairs of bf16, and adds them up in fp32.
namespace {

// ---- two numbers of bf16 at a time ----
//
// Rows of bf16 are multiplied as they are, not converted to fp32 half a vector at a time. The other factor is a sum of
// two bf16 numbers, which keep 16 of fp32's 24 bits. Measured on Zen 4; not tried on processors with tiles.

const int PAIR = 2 * L;  // numbers of a vector
typedef uint16_t Each __attribute__((vector_size(L * 4)));

__mmask32 those(int n) { return n < PAIR ? (1u << n) - 1 : ~0u; }  // the first n, more than 0
Each load_pairs(const bf16* p, __mmask32 some) { return (Each)_mm512_maskz_loadu_epi16(some, p); }
vf add_products(vf sum, Each x, Each y) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y); }

void two_parts(vf a, vf b, bf16* high, bf16* low) {  // L numbers each
    for (bf16* to : {high, low}) {
        const auto both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(to, &both, sizeof both);
        a -= load(to), b -= load(to + L);
    }
}

// A group's queries [G, D] as two bf16 parts, or one if the other would be zero, as for queries that were bf16. Of n
// heads that are multiplied at a time, each has M = L / n lanes of a vector, for 2 M channels: these channels of a row
// are repeated over all lanes, and the sum of a lane only has to be added to its M - 1 neighbours' of the same head.
struct Paired {
    int64_t size;
    bool two = false;
    std::vector<bf16> parts;  // [2, as by_heads splits G, channels / 2 M, n, 2 M], channels filled up with zeros

    Paired(const float* q, int G, int D) : size(G * filled(D)), parts(2 * size) {
        alignas(64) bf16 part[2][PAIR];
        by_heads(G, [&](auto n, int g) {
            constexpr int C = PAIR / n;
            for (int k = 0; k < n; k++)
                for (int d = 0; d < D; d += PAIR) {
                    const float* from = q + (g + k) * D + d;
                    two_parts(load(from), d + L < D ? load(from + L) : vf{}, part[0], part[1]);
                    two |= any((load_as<vu>(part[1]) & 0x7fff7fff) != 0);
                    for (int i = 0; i < PAIR; i += C) {
                        bf16* to = at(g, D) + (d + i) * n + k * C;
                        std::memcpy(to, part[0] + i, C * sizeof *to),
                            std::memcpy(to + size, part[1] + i, C * sizeof *to);
                    }
                }
        });
    }
    static int64_t filled(int D) { return (D + PAIR - 1) / PAIR * PAIR; }
    bf16* at(int g, int D) { return &parts[g * filled(D)]; }

    template <int G>
    void products(int first, const bf16* const* k, int n, int D, float* logits, const Next<bf16>& next) const {
        const bf16* q = &parts[first * filled(D)];
        two ? dots<G, true>(q, k, n, D, logits, next) : dots<G, false>(q, k, n, D, logits, next);
    }
    template <int G, bool TWO>
    void dots(const bf16* q, const bf16* const* k, int n, int D, float* logits, const Next<bf16>& next) const;
    template <int G>
    void weigh(const float* p, const bf16* const* v, int n, int D, float* y, const Next<bf16>& next) const;
};

template <int M> Each spread(const bf16* p, __mmask32 some) {  // 2 M numbers over all lanes
    if constexpr (M == 4) return (Each)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
    else if constexpr (M == 8) return (Each)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
    else return load_pairs(p, some);
}

template <int G, bool TWO> __attribute__((noinline))  // or its pointers do not stay in registers
void Paired::dots(const bf16* q, const bf16* const* k, int n, int D, float* logits, const Next<bf16>& next) const {
    constexpr int M = L / G, ROWS = M > 8 ? M : 8;  // as many sums at a time as hide a product's latency
    for (int i = 0; i < n; i += ROWS) {
        const bf16* rows[ROWS];
        for (int m = 0; m < ROWS; m++) rows[m] = k[std::min(i + m, n - 1)];
        const int more = std::min(ROWS, next.n - i);
        vf acc[ROWS] = {};
        const bf16* query = q;
        for (int d = 0; d < D; d += 2 * M, query += PAIR) {
            const Each high = load_pairs(query, ~0u), low = TWO ? load_pairs(query + size, ~0u) : Each{};
            const __mmask32 some = M == L ? those(D - d) : ~0u;
            if (d % PAIR == 0)
                for (int m = 0; m < more; m++) prefetch_row(next.k[i + m] + d, 1);
            for (int m = 0; m < ROWS; m++) {
                const Each row = spread<M>(rows[m] + d, some);
                acc[m] = add_products(acc[m], row, high);
                if (TWO) acc[m] = add_products(acc[m], row, low);
            }
        }
        for (int m = 0; m < ROWS; m += M) {
            vf y = joined<1, M>(acc + m);
            for (int g = 0; g < G; g++) std::memcpy(logits + g * N + i + m, (const char*)&y + g * M * 4, M * 4);
        }
    }
}

// y [G, D] += p [G, N] . n rows, two of them at a time. Weights behind the first n are 0
template <int G> __attribute__((noinline)) void Paired::weigh(const float* p, const bf16* const* v, int n, int D,
                                                              float* y, const Next<bf16>& next) const {
    static_assert(N == PAIR);
    alignas(64) bf16 weights[G][2][N];
    for (int g = 0; g < G; g++) two_parts(load(p + g * N), load(p + g * N + L), weights[g][0], weights[g][1]);
    const vi one = LANE / 4 % 2 * L + LANE / 8 * 4 + LANE % 4, two = one + 8;  // channels in their order
    for (int d = 0; d < D; d += PAIR) {
        const __mmask32 some = those(D - d);
        vf acc[G][2] = {};  // by fours of channels in turns
        for (int i = 0; i < n; i += 2) {
            for (int j = i; j < std::min(i + 2, next.n); j++) prefetch_row(next.v[j] + d, 1);
            const __m512i a = (__m512i)load_pairs(v[i] + d, some),
                          b = (__m512i)load_pairs(v[std::min(i + 1, n - 1)] + d, some);
            const Each x[2] = {(Each)_mm512_unpacklo_epi16(a, b), (Each)_mm512_unpackhi_epi16(a, b)};
            for (int g = 0; g < G; g++)
                for (int part = 0; part < 2; part++) {
                    const Each w = (Each)_mm512_set1_epi32(load_as<int32_t>(&weights[g][part][i]));
                    for (int j = 0; j < 2; j++) acc[g][j] = add_products(acc[g][j], x[j], w);
                }
        }
        for (int g = 0; g < G; g++) {
            float* to = y + g * D + d;
            store(to, load(to) + two_of(acc[g][0], acc[g][1], one));
            if (d + L < D) store(to + L, load(to + L) + two_of(acc[g][0], acc[g][1], two));
        }
    }
}

// On processors that also have tiles, rows become fp32: there, pairs took a fifth to a half longer (rows in a cache)
template <> struct QueriesFor<bf16> {
    typedef std::conditional_t<TILES, Plain, Paired> type;
};

// ---- keys that are coordinates in a basis ----

struct InPairs {       // lanes of two coordinates, for processors that multiply pairs
    typedef bf16 Row;  // a panel is [R / 32, PANEL, 32]
    static constexpr int64_t TOGETHER = COORDINATES, MORE = 0;
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

// ---- many rows of x, and W in bf16 ----

constexpr int PAIRED_ROWS = 8;  // rows of x that are multiplied with two blocks: 16 sums

// x [rows][in] -> lanes of two inputs [in / 2][part][PAIRED_ROWS]: bf16 numbers, and their rounding errors
template <int PARTS, class T> void pairs_of(const T* x, int64_t rows, int64_t in, uint32_t* to) {
    for (int64_t i = 0; i < in; i += L)
        for (int r = 0; r < PAIRED_ROWS; r++) {
            vf v = r < rows ? load(x + r * in + i) : vf{};
            for (int p = 0; p < PARTS; p++) {
                const __m256bh part = _mm512_cvtneps_pbh((__m512)v);
                uint32_t pair[L / 2];
                std::memcpy(pair, &part, sizeof part);
                for (int j = 0; j < L / 2; j++) to[((i / 2 + j) * PARTS + p) * PAIRED_ROWS + r] = pair[j];
                if (p + 1 < PARTS) v -= load((const bf16*)pair);
            }
        }
}

template <int PARTS, int COUNT>
void multiply_pairs(const uint32_t* x, const uint8_t* w, int64_t in, __m512 (*sum)[PAIRED_ROWS]) {
    for (int k = 0; k < COUNT; k++)
        for (int r = 0; r < PAIRED_ROWS; r++) sum[k][r] = __m512{};
    for (int64_t i = 0; i < in / 2; i++, w += WORDS) {
        __m512bh q[COUNT];
        for (int k = 0; k < COUNT; k++) q[k] = (__m512bh)_mm512_loadu_si512(w + k * in * SIDE * 2);
        for (int p = 0; p < PARTS; p++)
            for (int r = 0; r < PAIRED_ROWS; r++, x++)
                for (int k = 0; k < COUNT; k++)
                    sum[k][r] = _mm512_dpbf16_ps(sum[k][r], (__m512bh)_mm512_set1_epi32(*x), q[k]);
    }
}

template <class T> void many_by_pairs(const Weight& w, const Product<T>& of) {
    constexpr int PARTS = std::is_same_v<T, float> ? 2 : 1;
    const int64_t rows = of.M, blocks = of.blocks, tiles = (rows + PAIRED_ROWS - 1) / PAIRED_ROWS,
                  tile = w.in / 2 * PARTS * PAIRED_ROWS;
    Room<uint32_t> pairs(tiles * tile);
    Shares shares((blocks + 1) / 2, (int)of.threads, 1);
#pragma omp parallel num_threads(of.threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++)
            pairs_of<PARTS>(of.x + t * PAIRED_ROWS * w.in, std::min<int64_t>(PAIRED_ROWS, rows - t * PAIRED_ROWS), w.in,
                            &pairs[t * tile]);
        shares.each([&](const int64_t* two, int64_t) {
            const int64_t first = *two * 2, count = std::min<int64_t>(2, blocks - first);
            const uint8_t* at = w.codes + first * w.in * SIDE * 2;
            for (int64_t t = 0; t < tiles; t++) {
                __m512 sum[2][PAIRED_ROWS];
                if (count == 2) multiply_pairs<PARTS, 2>(&pairs[t * tile], at, w.in, sum);
                else multiply_pairs<PARTS, 1>(&pairs[t * tile], at, w.in, sum);
                for (int64_t r = 0; r < std::min<int64_t>(PAIRED_ROWS, rows - t * PAIRED_ROWS); r++)
                    for (int64_t k = 0; k < count; k++) of.put(t * PAIRED_ROWS + r, first + k, 0, (vf)sum[k][r]);
            }
        });
    }
}

}  // namespace
