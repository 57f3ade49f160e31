// Softmax attention of a group's G query heads over blocks of tokens, cut into work items and joined.
//
// Caches are fp32 or bf16 (template argument T), all arithmetic is in fp32.
#pragma once
#include "vectors.h"

namespace {

constexpr int N = 32;            // tokens of a block: keys and values of 128 channels fill a first-level cache
constexpr int64_t CHUNK = 2048;  // tokens of a work item
constexpr float LOG2_E = 1.44269504f;

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
    constexpr int M = L / G;  // rows at a time, so that a vector holds their logits
    for (int i = 0; i < n; i += M) {
        const T* rows[M];
        for (int m = 0; m < M; m++) rows[m] = k[std::min(i + m, n - 1)];
        for (int j = i; j < std::min(i + M, next.n); j++) prefetch_row(next.k[j], D);
        vf acc[L] = {};
        for (int d = 0; d < D; d += L) {
            vf query[G];
            for (int g = 0; g < G; g++) query[g] = load(q + g * D + d), keep(query[g]);
            for (int m = 0; m < M; m++) {
                vf x = load(rows[m] + d);
                for (int g = 0; g < G; g++) acc[g * M + m] += x * query[g];
            }
        }
        vf y = sums(acc);
        for (int g = 0; g < G; g++) std::memcpy(logits + g * N + i, (const char*)&y + g * M * 4, M * 4);
    }
}

template <int G, int WIDTH = N, class T>
void weigh(const float* p, const T* const* v, int n, int D, float* y, const Next<T>& next) {  // y [G, D] += p [G, WIDTH] . n rows
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
                vf weight = all(p[g * WIDTH + i]);
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
        float shrink = exp2_of(all(top[g] - base))[0];
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
            if (more) for (int i = 0; i < n; i++) p[g * N + i] += more;
            float shrink = soften(g, &p[g * N], n, N);
            if (shrink != 1) for (int d = 0; d < D; d += L) store(&y[g * D + d], load(&y[g * D + d]) * shrink);
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
// scaled by 1 / sqrt(channels), logits are in log 2; without q, work has its own. lse, if given, gets the logarithm of what each softmax summed up to.
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
            if (q) scaled_query(q + b * q_row + h * G * q_head, q_head, G, D, scale, query.data());
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

}  // namespace
