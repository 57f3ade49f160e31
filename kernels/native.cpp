// What decode does with a KV cache on a CPU: attention over ranges, lists and packed tokens, scores by look-up, selection.
//
// Compiled once by native.py, which says what every argument is. All arithmetic is in fp32; caches are fp32 or bf16
// (template argument T). Vectors are of 16 floats whatever the machine has: the compiler splits them. Work is cut by
// sizes alone, never by the number of threads: the same numbers come out with any.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE __builtin_shufflevector
#else
#define SHUFFLE(X, Y, ...) __builtin_shuffle(X, Y, vi{__VA_ARGS__})
#endif

namespace {

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
struct bf16 { uint16_t bits; };

constexpr int L = 16;             // floats of a vector
constexpr int N = 32;             // tokens of a block: keys and values of 128 channels fill a first-level cache
constexpr int64_t CHUNK = 2048;   // tokens of a work item of attention
constexpr int64_t SCORED = 4096;  // and of a score
constexpr float LOG2_E = 1.44269504f;

template <class V, class P> V load_as(const P* p) { V x; std::memcpy(&x, p, sizeof x); return x; }
template <class V, class P> V load_some(const P* p, int n) {  // n of 16 numbers of 4 bytes, then zeros
    if (n == L) return load_as<V>(p);  // a copy of a size that is known is one instruction
    V x = {}; std::memcpy(&x, p, n * 4); return x;
}
vf load(const float* p) { return load_as<vf>(p); }
vf load(const bf16* p) {
    typedef uint16_t half_vector __attribute__((vector_size(32)));
    return (vf)(__builtin_convertvector(load_as<half_vector>(p), vu) << 16);
}
void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
void store(bf16* p, vf x) {  // to nearest, ties to even
    vu u = (vu)x, rounded = (u + (0x7fff + ((u >> 16) & 1))) >> 16;
    for (int i = 0; i < L; i++) p[i].bits = x[i] != x[i] ? 0x7fc0 : (uint16_t)rounded[i];
}

template <class Op> float fold(vf x, Op op) {  // op over all 16 numbers
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    v8 half[2]; std::memcpy(half, &x, sizeof x);
    v8 a = op(half[0], half[1]);
    v4 quarter[2]; std::memcpy(quarter, &a, sizeof a);
    v4 b = op(quarter[0], quarter[1]);
    return op(op(b[0], b[2]), op(b[1], b[3]));
}
float sum(vf x) { return fold(x, [](auto a, auto b) { return a + b; }); }
float largest(vf x) { return fold(x, [](auto a, auto b) { return a > b ? a : b; }); }

vf exp2_of(vf x) {  // x <= 0; below -126 it stays at 2^-126, which adds to nothing
    x = x < -126.0f ? vf{} - 126.0f : x;
    vf whole = (x + 12582912.0f) - 12582912.0f, f = x - whole;  // 1.5 * 2^23: rounds to integers
    vf y = ((((((1.54035304e-4f * f + 1.33335581e-3f) * f + 9.61812911e-3f) * f + 5.55041087e-2f) * f +
              2.40226507e-1f) * f + 6.93147181e-1f) * f + 1.0f);
    return (vf)((vu)y + ((vu)__builtin_convertvector(whole, vi) << 23));
}

vf half_to_float(vu h) {  // finite fp16, subnormals too: the exponent's bias is made up by a multiplication
    vf x = (vf)((h & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)x | (h & 0x8000) << 16);
}
float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    return half_to_float(vu{h})[0];
#endif
}

vf look_up(vf table, vu i) {  // table[i % 16]; i has other bits above
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)i, (__m512)table);
#elif defined(__AVX2__)
    __m256 half[2], out[2]; __m256i at[2];
    std::memcpy(half, &table, sizeof table); std::memcpy(at, &i, sizeof i);
    for (int j = 0; j < 2; j++)
        out[j] = _mm256_blendv_ps(_mm256_permutevar8x32_ps(half[0], at[j]), _mm256_permutevar8x32_ps(half[1], at[j]),
                                  _mm256_castsi256_ps(_mm256_slli_epi32(at[j], 28)));
    vf y; std::memcpy(&y, out, sizeof y); return y;
#else
    vf y; for (int j = 0; j < L; j++) y[j] = table[i[j] & 15]; return y;
#endif
}

void transpose2(const uint8_t* from, uint32_t* to, int64_t row) {  // [16, 2] words -> [2, 16], `row` apart
    vu x = load_as<vu>(from), y = load_as<vu>(from + 64);
    vu first = SHUFFLE(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    vu second = SHUFFLE(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    std::memcpy(to, &first, 64), std::memcpy(to + row, &second, 64);
}

void transpose4(const uint8_t* from, uint32_t* to, int64_t row) {  // [16, 4] words -> [4, 16]
    vu x[4], y[4];
    for (int i = 0; i < 4; i++) x[i] = load_as<vu>(from + i * 64);  // four tokens each
    for (int i = 0; i < 4; i += 2) {
        y[i] = SHUFFLE(x[i], x[i + 1], 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        y[i + 1] = SHUFFLE(x[i], x[i + 1], 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
    }
    for (int i = 0; i < 2; i++) {
        vu first = SHUFFLE(y[i], y[i + 2], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        vu second = SHUFFLE(y[i], y[i + 2], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        std::memcpy(to + 2 * i * row, &first, 64), std::memcpy(to + (2 * i + 1) * row, &second, 64);
    }
}

// ---- softmax attention of a group's G query heads over blocks of tokens ----

// f(n, g) for the n query heads from g on, n a constant: as many at a time as leave registers for the rows.
template <class F> void by_heads(int G, F f) {
    int g = 0;
    for (; G - g >= 4; g += 4) f(std::integral_constant<int, 4>(), g);
    for (; G - g >= 2; g += 2) f(std::integral_constant<int, 2>(), g);
    for (; G - g >= 1; g += 1) f(std::integral_constant<int, 1>(), g);
}

// The rows of the block that follows. They are fetched a few at a time between computations: all at once, the processor
// would wait for them first and compute then.
template <class T> struct Next {
    const T *k[N], *v[N];
    int n = 0;
};

template <class T> void prefetch_row(const T* row, int D) {  // into the second level: more may be under way than to the first
    for (int b = 0; b < D * (int)sizeof(T); b += 64) __builtin_prefetch((const char*)row + b, 0, 2);
}

template <int G, class T>
void dots(const float* q, const T* const* k, int n, int D, float* logits, const Next<T>& next) {  // [G, D] . n rows -> [G, N]
    constexpr int M = 2;  // rows at a time, so that a query is loaded once for them
    for (int i = 0; i < n; i += M) {
        const T *one = k[i], *two = k[std::min(i + 1, n - 1)];
        for (int j = i; j < std::min(i + M, next.n); j++) prefetch_row(next.k[j], D);
        vf acc[M][G] = {};
        for (int d = 0; d < D; d += L) {
            vf x = load(one + d), y = load(two + d);
            for (int g = 0; g < G; g++) {
                vf query = load(q + g * D + d);
                acc[0][g] += x * query, acc[1][g] += y * query;
            }
        }
        for (int g = 0; g < G; g++)
            for (int j = 0; j < M; j++) logits[g * N + i + j] = sum(acc[j][g]);
    }
}

template <int G, class T>
void weigh(const float* p, const T* const* v, int n, int D, float* y, const Next<T>& next) {  // y [G, D] += p [G, n] . n rows
    constexpr int M = 2;  // vectors of a row at a time, so that a weight is loaded once for them. D is a multiple of L
    int steps = (D + M * L - 1) / (M * L), each = (N + steps - 1) / steps;
    for (int d = 0, from = 0; d < D; d += M * L, from += each) {
        int second = d + L < D ? L : 0;  // an odd last vector is computed twice
        for (int j = from; j < std::min(from + each, next.n); j++) prefetch_row(next.v[j], D);
        vf acc[M][G];
        for (int g = 0; g < G; g++) acc[0][g] = load(y + g * D + d), acc[1][g] = load(y + g * D + d + second);
        for (int i = 0; i < n; i++) {
            vf x = load(v[i] + d), z = load(v[i] + d + second);
            for (int g = 0; g < G; g++) {
                vf weight = vf{} + p[g * N + i];
                acc[0][g] += x * weight, acc[1][g] += z * weight;
            }
        }
        for (int g = 0; g < G; g++) store(y + g * D + d, acc[0][g]), store(y + g * D + d + second, acc[1][g]);
    }
}

// What a work item has seen: per query head the largest logit, the sum of 2^(logit - largest), the weighted values.
struct Seen {
    int G, D;
    std::vector<float> top, total, y, p;
    Seen(int G, int D) : G(G), D(D), top(G), total(G), y(G * D), p(G * N) {}

    void clear() {
        std::fill(top.begin(), top.end(), -INFINITY);
        std::fill(total.begin(), total.end(), 0.0f);
        std::fill(y.begin(), y.end(), 0.0f);
    }

    // Of query head g, turns the first n of `width` logits into weights, the others into zeros. Returns by what is to be
    // multiplied that was added up before.
    float soften(int g, float* row, int n, int width) {
        for (int i = n; i < width; i++) row[i] = -INFINITY;
        vf high = vf{} - INFINITY, part = {};
        for (int i = 0; i < width; i += L) {
            vf x = load(row + i);
            high = x > high ? x : high;
        }
        float most = std::max(top[g], largest(high));
        float base = most == -INFINITY ? 0.0f : most;  // of infinite keys alone: -inf less itself would be NaN
        for (int i = 0; i < width; i += L) {
            vf x = load(row + i), e = exp2_of(x - base);
            e = x == -INFINITY ? vf{} : e;
            store(row + i, e);
            part += e;
        }
        float shrink = exp2_of(vf{} + (top[g] - base))[0];
        total[g] = total[g] * shrink + sum(part);
        top[g] = most;
        return shrink;
    }

    // n <= N rows of keys and values; more: 2-logarithm of how many tokens each of them stands for
    template <class T>
    void add(const float* q, const T* const* k, const T* const* v, int n, const Next<T>& next = {}, float more = 0) {
        static const Next<T> nothing{};  // for all query heads but the first few
        by_heads(G, [&](auto m, int g) { dots<m>(q + g * D, k, n, D, &p[g * N], g ? nothing : next); });
        for (int g = 0; g < G; g++) {
            for (int i = 0; i < n; i++) p[g * N + i] += more;
            float shrink = soften(g, &p[g * N], n, N);
            for (int d = 0; d < D; d += L) store(&y[g * D + d], load(&y[g * D + d]) * shrink);
        }
        by_heads(G, [&](auto m, int g) { weigh<m>(&p[g * N], v, n, D, &y[g * D], g ? nothing : next); });
    }

    // slots idx[lo..hi), or lo..hi themselves, of one head's cache
    template <class T>
    void add_slots(const float* q, const T* k, const T* v, int64_t k_slot, int64_t v_slot, const int64_t* idx, int64_t lo,
                   int64_t hi) {
        Next<T> block[2];
        auto rows = [&](int64_t first, Next<T>& to) {
            to.n = (int)std::max<int64_t>(0, std::min<int64_t>(N, hi - first));
            for (int i = 0; i < to.n; i++) {
                int64_t slot = idx ? idx[first + i] : first + i;
                to.k[i] = k + slot * k_slot, to.v[i] = v + slot * v_slot;
            }
        };
        rows(lo, block[0]);
        for (int64_t first = lo, i = 0; first < hi; first += N, i ^= 1) {
            rows(first + N, block[i ^ 1]);
            add(q, block[i].k, block[i].v, block[i].n, block[i ^ 1]);
        }
    }
};

template <class T> void scaled_query(const T* q, int64_t head, int G, int D, float scale, float* out) {
    for (int g = 0; g < G; g++)
        for (int d = 0; d < D; d += L) store(out + g * D + d, load(q + g * head + d) * scale);
}

// Runs work(group, part, q [G, D] fp32, seen) for `parts` parts of each of B * H groups, and joins the parts. Queries are
// scaled by 1 / sqrt(channels), logits are in log 2. lse, if given, gets the logarithm of what each softmax summed up to.
template <class T, class Work>
void attention(const T* q, int64_t q_row, int64_t q_head, T* out, int B, int H, int G, int D, int64_t parts, int64_t threads,
               Work work, int channels = 0, float* lse = nullptr) {
    float scale = LOG2_E / std::sqrt((float)(channels ? channels : D));
    int64_t groups = (int64_t)B * H;
    std::vector<float> all(groups * parts * G * (D + 2));  // y, then largest logit and sum of each query head
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> query(G * D);
        Seen seen(G, D);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < groups * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            scaled_query(q + b * q_row + h * G * q_head, q_head, G, D, scale, query.data());
            seen.clear();
            work(group, item % parts, query.data(), seen);
            float* to = &all[item * G * (D + 2)];
            std::copy(seen.y.begin(), seen.y.end(), to);
            std::copy(seen.top.begin(), seen.top.end(), to + G * D);
            std::copy(seen.total.begin(), seen.total.end(), to + G * D + G);
        }
#pragma omp for
        for (int64_t head = 0; head < groups * G; head++) {
            const float* from = &all[head / G * parts * G * (D + 2)];
            int g = (int)(head % G);
            float most = -INFINITY, total = 0;
            for (int64_t s = 0; s < parts; s++) most = std::max(most, from[s * G * (D + 2) + G * D + g]);
            std::vector<float> weight(parts);
            for (int64_t s = 0; s < parts; s++) {
                const float* at = from + s * G * (D + 2) + G * D + g;
                weight[s] = at[0] == -INFINITY ? 0.0f : std::exp2(at[0] - most);
                total += weight[s] * at[G];
            }
            if (lse) lse[head] = (most + std::log2(total)) / LOG2_E;
            for (int d = 0; d < D; d += L) {
                vf y = {};
                for (int64_t s = 0; s < parts; s++)
                    if (weight[s] > 0) y += load(from + s * G * (D + 2) + g * D + d) * weight[s];
                store(out + head * D + d, y / std::max(total, 1e-30f));
            }
        }
    }
}

int64_t parts_of(int64_t n) { return std::max<int64_t>(1, (n + CHUNK - 1) / CHUNK); }

// ---- tokens side by side: coordinate c of token t at c * chan + t ----

// What a part has seen of latents. The weighted coordinates stay 16 sums each until the end.
struct Latents {
    static constexpr int V = 4, M = V * L;  // vectors, tokens of a block
    int G, R;
    std::vector<float> p, wide;

    Latents(int G, int R) : G(G), R(R), p(G * M), wide(G * R * L) {}

    template <int N_Q, class T> void score(const float* q, int D, const T* k, int64_t chan, float* out, bool more) {
        vf acc[N_Q][V] = {};
        for (int r = 0; r < R; r++, k += chan) {
            if (more) prefetch_row(k + M, M);
            for (int j = 0; j < V; j++) {
                vf x = load(k + j * L);
                for (int g = 0; g < N_Q; g++) acc[g][j] += x * q[g * D + r];
            }
        }
        for (int g = 0; g < N_Q; g++)
            for (int j = 0; j < V; j++) store(out + g * M + j * L, acc[g][j]);
    }

    template <int N_Q, class T> void weigh(const float* weight, const T* v, int64_t chan, float* to, bool more) {
        vf w[N_Q][V];
        for (int g = 0; g < N_Q; g++)
            for (int j = 0; j < V; j++) w[g][j] = load(weight + g * M + j * L);
        for (int r = 0; r < R; r++, v += chan) {
            if (more) prefetch_row(v + M, M);
            vf x[V];
            for (int j = 0; j < V; j++) x[j] = load(v + j * L);
            for (int g = 0; g < N_Q; g++) {
                float* at = to + (g * R + r) * L;
                store(at, load(at) + (x[0] * w[g][0] + x[1] * w[g][1] + (x[2] * w[g][2] + x[3] * w[g][3])));
            }
        }
    }

    // tokens lo..hi of one head; q [G, D], of which R coordinates count
    template <class T> void see(const float* q, const T* k, const T* v, int64_t chan, int64_t lo, int64_t hi, Seen& seen) {
        std::fill(wide.begin(), wide.end(), 0.0f);
        for (int64_t first = lo; first < hi; first += M) {
            if (first + M <= hi)
                block(q, k + first, v + first, chan, M, first + 2 * M <= hi, seen);
            else {  // behind the last token may be anything, and the end of the buffer
                int n = (int)(hi - first);
                std::vector<T> end(2 * R * M, T{});
                for (int r = 0; r < R; r++) {
                    std::copy(k + r * chan + first, k + r * chan + hi, &end[r * M]);
                    std::copy(v + r * chan + first, v + r * chan + hi, &end[(R + r) * M]);
                }
                block(q, end.data(), end.data() + R * M, M, n, false, seen);
            }
        }
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++) seen.y[g * seen.D + r] = sum(load(&wide[(g * R + r) * L]));
    }

    template <class T>
    void block(const float* q, const T* k, const T* v, int64_t chan, int n, bool more, Seen& seen) {
        by_heads(G, [&](auto m, int g) { score<m>(q + g * seen.D, seen.D, k, chan, &p[g * M], more && !g); });
        for (int g = 0; g < G; g++) {
            float shrink = seen.soften(g, &p[g * M], n, M);
            if (shrink != 1)
                for (int r = 0; r < R; r++) store(&wide[(g * R + r) * L], load(&wide[(g * R + r) * L]) * shrink);
        }
        by_heads(G, [&](auto m, int g) { weigh<m>(&p[g * M], v, chan, &wide[g * R * L], more && !g); });
    }
};

// ---- packed tokens ----

template <int BITS> vf codes_of(const uint8_t* p) {  // 16 channels
    if constexpr (BITS == 8) {
        typedef uint8_t v16 __attribute__((vector_size(16)));
        return __builtin_convertvector(load_as<v16>(p), vf);
    }
    vu word;
    vu shift = vu{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * BITS;
    if constexpr (BITS == 2) word = vu{} + load_as<uint32_t>(p);
    if constexpr (BITS == 4) {
        uint32_t a = load_as<uint32_t>(p), b = load_as<uint32_t>(p + 4);
        word = vu{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
        shift &= 31;
    }
    return __builtin_convertvector((vi)((word >> shift) & ((1u << BITS) - 1)), vf);
}

template <int BITS> void unpack(const uint8_t* packed, const uint16_t* params, const uint8_t* signs, int D, float* out) {
    // the even subvector's code is in the low half of a byte, its first channel in the highest bit of the half
    const vu up = {28, 29, 30, 31, 24, 25, 26, 27, 20, 21, 22, 23, 16, 17, 18, 19};
    for (int d = 0; d < D; d += L) {
        const uint16_t* pair = params + d / 32 * 2;
        vf x = codes_of<BITS>(packed + d * BITS / 8) * half_to_float(pair[0]) + half_to_float(pair[1]);
        if (signs) x = (vf)((vu)x ^ (((vu{} + ~(uint32_t)load_as<uint16_t>(signs + d / 8)) << up) & 0x80000000u));
        store(out + d, x);
    }
}

template <int BITS>
void add_packed(Seen& seen, const float* q, const uint8_t* k, const uint8_t* v, const uint16_t* k_params,
                const uint16_t* v_params, const uint8_t* codes, const int64_t* idx, int64_t lo, int64_t hi) {
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
        seen.add<float>(q, ks, vs, n);
    }
}

// Tokens one by one, each of a key that is rotated at its position and a value of 2, 4, 8 or 16 (T's) bits.
template <class T> struct Rotated {
    Seen& seen;
    const float *q, *cos, *sin;
    int n = 0;
    std::vector<float> rows;
    const float *ks[N], *vs[N];

    Rotated(Seen& seen, const float* q, const float* cos, const float* sin)
        : seen(seen), q(q), cos(cos), sin(sin), rows(2 * N * seen.D) {
        for (int i = 0; i < N; i++) ks[i] = &rows[i * seen.D], vs[i] = &rows[(N + i) * seen.D];
    }

    // the value is row `at` of D channels in `values`
    void add(const T* key, int64_t position, const void* values, const uint16_t* params, int64_t bits, int64_t at) {
        int D = seen.D, half = D / 2;
        float *k = (float*)ks[n], *v = (float*)vs[n];
        for (int d = 0; d < half; d += L) {
            vf a = load(key + d), b = load(key + half + d);
            vf c = load(cos + position * half + d), s = load(sin + position * half + d);
            store(k + d, a * c - b * s), store(k + half + d, b * c + a * s);
        }
        if (bits == 16)
            for (int d = 0; d < D; d += L) store(v + d, load((const T*)values + at * D + d));
        else
            (bits == 2 ? unpack<2> : bits == 4 ? unpack<4> : unpack<8>)(
                (const uint8_t*)values + at * D * bits / 8, params + at * (D / 32) * 2, nullptr, D, v);
        if (++n == N) flush();
    }

    void flush() {
        if (n) seen.add<float>(q, ks, vs, n);
        n = 0;
    }
};

// ---- selection ----

// int32 of the same order as the scores. -0 is 0, NaN is the largest, whatever its sign.
int32_t key_of(float x) {
    x += 0.0f;
    int32_t bits; std::memcpy(&bits, &x, 4);
    return x != x ? INT32_MAX : bits ^ ((bits >> 31) & 0x7fffffff);
}

constexpr int64_t SAMPLE = 1024;

struct Picker {
    std::vector<int32_t> keys, some;
    std::vector<int64_t> slots;

    int64_t not_below(int32_t floor) {
        int64_t n = 0;
        for (int32_t key : keys) n += key >= floor;
        return n;
    }

    // the slots of the `want` largest keys, the first of equal ones, in ascending order -> idx
    void pick(int64_t want, int64_t* idx) {
        int64_t n = (int64_t)keys.size();
        if (want <= 0) return;
        // A sample tells roughly where the lowest key to be taken is. Four standard deviations below that, all but a few
        // of the others are left out before anything is sorted; if too many are, all are kept
        int32_t floor = INT32_MIN;
        if (n >= 4 * SAMPLE) {
            some.clear();
            for (int64_t i = 0; i < SAMPLE; i++) some.push_back(keys[i * n / SAMPLE]);
            double share = (double)want / n;
            int64_t rank = (int64_t)(share * SAMPLE + 4 * std::sqrt(share * (1 - share) * SAMPLE)) + 1;
            if (rank < SAMPLE) {
                std::nth_element(some.begin(), some.begin() + rank, some.end(), std::greater<int32_t>());
                if (not_below(some[rank]) >= want) floor = some[rank];
            }
        }
        slots.resize(n + 1);
        int64_t m = 0;
        for (int64_t t = 0; t < n; t++) slots[m] = t, m += keys[t] >= floor;
        some.resize(m);
        for (int64_t i = 0; i < m; i++) some[i] = keys[slots[i]];
        std::nth_element(some.begin(), some.begin() + (want - 1), some.end(), std::greater<int32_t>());
        int32_t lowest = some[want - 1];
        int64_t equal = want;  // how many of those that equal the lowest are taken
        for (int64_t i = 0; i < m; i++) equal -= some[i] > lowest;
        for (int64_t i = 0, found = 0; found < want; i++) {
            int32_t key = keys[slots[i]];
            idx[found] = slots[i], found += key > lowest || (key == lowest && equal-- > 0);
        }
    }
};

}  // namespace

extern "C" {

#define FLOAT_OR_BF16(CALL) if (is_bf16) { typedef bf16 T; CALL; } else { typedef float T; CALL; }

void kvf_decode_attention(int64_t is_bf16, const void* q, const void* k, const void* v, const int64_t* start,
                          const int64_t* stop, const float* mean_k, const float* mean_v, const int64_t* count, void* out,
                          int64_t q_row, int64_t q_head, int64_t k_row, int64_t k_head, int64_t k_slot, int64_t v_row,
                          int64_t v_head, int64_t v_slot, int64_t B, int64_t H, int64_t G, int64_t D, int64_t threads) {
    int64_t longest = 0;
    for (int64_t b = 0; b < B; b++) longest = std::max(longest, stop[b] - (start ? start[b] : 0));
    FLOAT_OR_BF16(attention((const T*)q, q_row, q_head, (T*)out, B, H, G, D, parts_of(longest), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H, h = group % H, lo = (start ? start[b] : 0) + part * CHUNK;
            seen.add_slots(query, (const T*)k + b * k_row + h * k_head, (const T*)v + b * v_row + h * v_head, k_slot,
                           v_slot, nullptr, lo, std::min(stop[b], lo + CHUNK));
            if (part == 0 && count && count[b] > 0) {
                const float *extra_k = mean_k + group * D, *extra_v = mean_v + group * D;
                seen.add<float>(query, &extra_k, &extra_v, 1, {}, std::log2((float)count[b]));
            }
        }))
}

void kvf_gather_attention(int64_t is_bf16, const void* q, const void* k, const void* v, const int64_t* idx,
                          const int64_t* count, void* out, int64_t q_row, int64_t q_head, int64_t k_row, int64_t k_head,
                          int64_t k_slot, int64_t v_row, int64_t v_head, int64_t v_slot, int64_t idx_row,
                          int64_t idx_head, int64_t count_row, int64_t count_head, int64_t B, int64_t H, int64_t G,
                          int64_t D, int64_t K, int64_t threads) {
    FLOAT_OR_BF16(attention((const T*)q, q_row, q_head, (T*)out, B, H, G, D, parts_of(K), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H, h = group % H, n = std::min(K, count[b * count_row + h * count_head]);
            seen.add_slots(query, (const T*)k + b * k_row + h * k_head, (const T*)v + b * v_row + h * v_head, k_slot,
                           v_slot, idx + b * idx_row + h * idx_head, part * CHUNK, std::min(n, (part + 1) * CHUNK));
        }))
}

void kvf_packed_gather_attention(int64_t is_bf16, int64_t bits, const void* q, const int64_t* idx, const int64_t* count,
                                 const void* k, const void* v, const uint16_t* k_params, const uint16_t* v_params,
                                 const float* alpha, const uint8_t* codes, const void* sink_k, const void* sink_v,
                                 const void* tail_k, const void* tail_v, const int64_t* pos, const int64_t* prompt_len,
                                 const int64_t* flushed, void* out, int64_t q_row, int64_t q_head, int64_t B, int64_t H,
                                 int64_t G, int64_t D, int64_t T_, int64_t K, int64_t sinks, int64_t ring, int64_t threads) {
    int64_t listed = parts_of(K);
    FLOAT_OR_BF16(attention((const T*)q, q_row, q_head, (T*)out, B, H, G, D, listed + 1, threads,
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
                return seen.add_slots(query, (const T*)k + group * T_ * D, (const T*)v + group * T_ * D, D, D, list, lo, hi);
            std::vector<float> x(query, query + G * D);
            for (int64_t i = 0; alpha && i < G * D; i++) x[i] *= alpha[group * D + i % D];
            int64_t bytes = group * T_ * D * bits / 8, pairs = group * T_ * (D / 32) * 2;
            (bits == 2 ? add_packed<2> : bits == 4 ? add_packed<4> : add_packed<8>)(
                seen, x.data(), (const uint8_t*)k + bytes, (const uint8_t*)v + bytes, k_params + pairs, v_params + pairs,
                codes ? codes + group * T_ * D / 8 : nullptr, list, lo, hi);
        }))
}

// q [B, H * G, D] fp32 of which R coordinates count and the rest is 0; out [B, H * G, D], lse [B, H * G]
void kvf_latent_space_attention(int64_t is_bf16, const float* q, const void* k, const void* v, const int64_t* stored,
                                float* out, float* lse, int64_t lat_row, int64_t lat_head, int64_t chan, int64_t B,
                                int64_t H, int64_t G, int64_t D, int64_t R, int64_t channels, int64_t threads) {
    int64_t longest = *std::max_element(stored, stored + B);
    FLOAT_OR_BF16(attention(q, H * G * D, D, out, B, H, G, D, parts_of(longest), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t at = group / H * lat_row + group % H * lat_head, lo = part * CHUNK;
            Latents(G, R).see(query, (const T*)k + at, (const T*)v + at, chan, lo, std::min(stored[group / H], lo + CHUNK),
                              seen);
        }, (int)channels, lse))
}

// Keys in `held` [B, ring, H * D] and `listed` [B, K, H * D] are not rotated yet; the ring's slots and slots idx of the
// store, T_ a row, have the values.
void kvf_latent_attention(int64_t is_bf16, int64_t ring_bits, int64_t bits, const void* q, const void* held,
                          const void* listed, const void* ring_v, const uint16_t* ring_params, const void* v,
                          const uint16_t* params, const int64_t* pos, const int64_t* idx, const int64_t* count,
                          const float* cos, const float* sin, void* out, int64_t q_row, int64_t q_head, int64_t table_row,
                          int64_t B, int64_t H, int64_t G, int64_t D, int64_t T_, int64_t ring, int64_t K,
                          int64_t threads) {
    FLOAT_OR_BF16(attention((const T*)q, q_row, q_head, (T*)out, B, H, G, D, 1 + parts_of(K), threads,
        [&](int64_t group, int64_t part, const float* query, Seen& seen) {
            int64_t b = group / H, h = group % H;
            Rotated<T> to(seen, query, cos + b * table_row, sin + b * table_row);
            if (part == 0)
                for (int64_t s = 0; s < ring; s++) {
                    int64_t at = pos[b] - ((pos[b] - s) % ring + ring) % ring;  // the position that the slot holds
                    if (at >= 0) to.add((const T*)held + ((b * ring + s) * H + h) * D, at, ring_v, ring_params, ring_bits,
                                        (b * ring + s) * H + h);
                }
            else
                for (int64_t i = (part - 1) * CHUNK; i < std::min({K, count[b], part * CHUNK}); i++) {
                    int64_t slot = idx ? idx[b * K + i] : i;
                    to.add((const T*)listed + ((b * K + i) * H + h) * D, slot, v, params, bits, (b * T_ + slot) * H + h);
                }
            to.flush();
        }))
}

// table [B * H, words * 8, 16]: what each value of each of a token's 4-bit codes adds to its score; W bytes a token
void kvf_look_up(const float* table, const uint8_t* codes, const uint16_t* params, const float* total, const int64_t* pos,
                 const int64_t* skip, float* out, int64_t code_row, int64_t code_head, int64_t param_row,
                 int64_t param_head, int64_t out_row, int64_t out_head, int64_t B, int64_t H, int64_t T, int64_t W,
                 int64_t n_skip, int64_t threads) {
    int64_t words = (W + 3) / 4, parts = (T + SCORED - 1) / SCORED;
    constexpr int BATCH = 16 * L;  // tokens whose words are transposed at a time
#pragma omp parallel num_threads(threads)
    {
        std::vector<uint32_t> turned(words * BATCH);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < B * H * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            int64_t lo = item % parts * SCORED, hi = std::min({lo + SCORED, T, pos ? pos[b] + 1 : T});
            const uint8_t* from = codes + b * code_row + h * code_head;
            const uint16_t* pairs = params ? params + b * param_row + h * param_head : nullptr;
            const float* entries = table + group * words * 8 * L;
            float* to = out + b * out_row + h * out_head;
            for (int64_t first = lo; first < hi; first += BATCH) {
                int n = (int)std::min<int64_t>(BATCH, hi - first);
                int t = 0;
                if (W == 16 || W == 8)  // 128 or 64 channels
                    for (; t + L <= n; t += L)
                        (W == 16 ? transpose4 : transpose2)(from + (first + t) * W, &turned[t], BATCH);
                for (; t < n; t++)
                    for (int64_t w = 0; w < words; w++) {
                        uint32_t word = 0;
                        std::memcpy(&word, from + (first + t) * W + w * 4, std::min<int64_t>(4, W - w * 4));
                        turned[w * BATCH + t] = word;
                    }
                for (int t = 0; t < n; t += 2 * L) {  // two vectors: a table is loaded once for them
                    vf score[2] = {};
                    for (int64_t w = 0; w < words; w++) {
                        vu one = load_as<vu>(&turned[w * BATCH + t]), two = load_as<vu>(&turned[w * BATCH + t + L]);
                        for (int c = 0; c < 8; c++) {
                            vf entry = load(entries + (w * 8 + c) * L);
                            score[0] += look_up(entry, one >> (4 * c)), score[1] += look_up(entry, two >> (4 * c));
                        }
                    }
                    for (int i = 0; i < 2 && t + i * L < n; i++) {
                        int64_t at = first + t + i * L;
                        int some = std::min(L, n - t - i * L);
                        if (pairs) {  // fp16 scale, then zero
                            vu both = load_some<vu>(pairs + at * 2, some);
                            score[i] = half_to_float(both & 0xffff) * score[i] + half_to_float(both >> 16) * total[group];
                        }
                        if (some == L) store(to + at, score[i]);
                        else std::memcpy(to + at, &score[i], some * 4);
                    }
                }
            }
            for (int64_t i = 0; i < n_skip; i++) {
                int64_t slot = skip[group * n_skip + i];
                if (slot >= lo && slot < hi) to[slot] = -INFINITY;
            }
        }
    }
}

void kvf_select(const float* scores, const uint8_t* mask, const int64_t* pos, const int64_t* wanted, int64_t* idx,
                int64_t* count, int64_t row, int64_t head, int64_t mask_row, int64_t mask_head, int64_t wanted_row,
                int64_t wanted_head, int64_t B, int64_t H, int64_t T, int64_t K, int64_t sinks, int64_t recent,
                int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        Picker picker;
#pragma omp for schedule(dynamic)
        for (int64_t group = 0; group < B * H; group++) {
            int64_t b = group / H, h = group % H, n = pos ? std::max<int64_t>(0, std::min(pos[b] + 1, T)) : T;
            int64_t want = wanted[b * wanted_row + h * wanted_head], allowed = n;
            const float* from = scores + b * row + h * head;
            picker.keys.resize(n);
            for (int64_t t = 0; t < n; t++)
                picker.keys[t] = std::min(std::max(key_of(from[t]), INT32_MIN + 1), INT32_MAX - 1);
            if (mask) {
                const uint8_t* may = mask + b * mask_row + h * mask_head;
                allowed = 0;
                for (int64_t t = 0; t < n; t++) allowed += may[t] != 0, picker.keys[t] = may[t] ? picker.keys[t] : INT32_MIN;
            } else {
                want = std::max(want, std::min(sinks + recent, n));
                for (int64_t t = 0; t < std::min(sinks, n); t++) picker.keys[t] = INT32_MAX;
                for (int64_t t = std::max<int64_t>(0, n - recent); t < n; t++) picker.keys[t] = INT32_MAX;
            }
            want = std::max<int64_t>(0, std::min({want, allowed, K}));
            std::fill(idx + group * K, idx + (group + 1) * K, 0);
            picker.pick(want, idx + group * K);
            count[group] = want;
        }
    }
}
}
