// Softmax attention of a group's G query heads over blocks of tokens, cut into work items and joined.
//
// Caches are fp32 or bf16 (template argument T), sums and weights are in fp32.
#pragma once
#include "operands.h"
#include "products.h"

namespace {

constexpr int64_t CHUNK = 2048;  // tokens of a work item
constexpr float LOG2_E = 1.44269504f;

// Keys and values of one head, for a list of slots or for all
template <class T> struct Slots {
    const T *k, *v;
    int64_t k_slot, v_slot;  // numbers from one slot to the next
    const int64_t* idx = nullptr;
};

// Blocks of N tokens whose weights are all below `scale` over the length or `shortest` of the largest before them in
// their chunk are left out; read [B, H], or null for none: adds the number of tokens whose values were read
struct Skips {
    int64_t* read;
    double scale;
    int64_t shortest;
    const int64_t* length = nullptr;  // [B], where it is not seen otherwise

    // the threshold of a row in log 2; above 1, blocks would be left out that weigh more than those that are not
    float least(int64_t tokens) const {
        return std::min(0.0f, std::log2((float)(scale / (double)std::max(tokens, shortest))));
    }
};

// The running softmax of a work item: per query head the largest logit, the sum of 2^(logit - largest), weighted
// values.
struct Seen {
    int G, D;
    float scale = 1;  // factor from products of queries and keys to logits in log 2
    std::vector<float> top, sum_parts, y, p;
    Seen(int G, int D) : G(G), D(D), top(G), sum_parts(G * L), y(G * D), p(G * N) {}

    void clear() {
        std::fill(top.begin(), top.end(), -INFINITY);
        std::fill(sum_parts.begin(), sum_parts.end(), 0.0f);
        std::fill(y.begin(), y.end(), 0.0f);
    }
    float total(int g) const { return sum(load(&sum_parts[g * L])); }

    // For query head g, turns the first n of `width` products into weights, the others into zeros. Returns the factor
    // for what was added up before.
    float soften(int g, float* row, int n, int width) {
        for (int i = n; i < width; i++) row[i] = -INFINITY;
        vf high = all(top[g]), part = {};
        for (int i = 0; i < width; i += L) {
            vf x = load(row + i) * scale;
            high = x > high ? x : high;
        }
        const float most = any(high > all(top[g])) ? largest(high) : top[g];  // rare after the first few blocks
        const float base = most == -INFINITY ? 0.0f : most;  // all logits may be -inf, and -inf less itself is NaN
        for (int i = 0; i < width; i += L) {
            vf x = load(row + i) * scale, e = exp2_of(x - base);
            e = x == -INFINITY ? vf{} : e;
            store(row + i, e);
            part += e;
        }
        const float shrink = most == top[g] ? 1.0f : exp2_of(all(top[g] - base))[0];
        store(&sum_parts[g * L], load(&sum_parts[g * L]) * shrink + part);
        top[g] = most;
        return shrink;
    }

    // Whether the weights of all of n products are below 2^least times the largest before, for each query head
    bool weighs_nothing(int n, float least) {
        for (int g = 0; g < G; g++) {
            const float* row = &p[g * N];
            if (!(*std::max_element(row, row + n) * scale < top[g] + least)) return false;  // nor if it is NaN
        }
        return true;
    }

    // n <= N rows of keys and values; look() may read and change the products in p. If it returns false, the rows are
    // left out and no value is read
    template <class Query, class T, class Look>
    void add(const Query& q, const T* const* k, const T* const* v, int n, const Next<T>& next, Look look) {
        static const Next<T> nothing{};  // for all query heads but the first few
        by_heads(G, [&](auto m, int g) { q.template products<m>(g, k, n, D, &p[g * N], g ? nothing : next); });
        if constexpr (std::is_same_v<decltype(look()), bool>) {
            if (!look()) return;
        } else look();
        for (int g = 0; g < G; g++) {
            float shrink = soften(g, &p[g * N], n, N);
            if (shrink != 1)
                for (int d = 0; d < D; d += L) store(&y[g * D + d], load(&y[g * D + d]) * shrink);
        }
        by_heads(G, [&](auto m, int g) { q.template weigh<m>(&p[g * N], v, n, D, &y[g * D], g ? nothing : next); });
    }

    // slots idx[lo..hi), or lo..hi themselves, of one head's cache; look(first, n) as above
    template <class T, class Look>
    void add_slots(const float* q, const Slots<T>& of, int64_t lo, int64_t hi, Look look) {
        Next<T> block[2];
        auto rows = [&](int64_t first, Next<T>& to) {
            to.n = (int)std::max<int64_t>(0, std::min<int64_t>(N, hi - first));
            for (int i = 0; i < to.n; i++) {
                int64_t slot = of.idx ? of.idx[first + i] : first + i;
                to.k[i] = of.k + slot * of.k_slot, to.v[i] = of.v + slot * of.v_slot;
            }
        };
        auto each = [&](const auto& query) {
            rows(lo, block[0]);
            for (int64_t first = lo, i = 0; first < hi; first += N, i ^= 1) {
                rows(first + N, block[i ^ 1]);
                const Next<T>& own = block[i];
                add(query, own.k, own.v, own.n, block[i ^ 1], [&] { return look(first, own.n); });
            }
        };
        each(typename QueriesFor<T>::type(q, G, D));
    }
    template <class T> void add_slots(const float* q, const Slots<T>& of, int64_t lo, int64_t hi) {
        add_slots(q, of, lo, hi, [](int64_t, int) {});
    }
};

template <class T> void scaled_query(const T* q, int64_t head, int G, int D, float scale, float* out) {
    for (int g = 0; g < G; g++)
        for (int d = 0; d < D; d += L) store(out + g * D + d, load(q + g * head + d) * scale);
}

// Runs work(group, part, q [G, D] fp32, seen) for `parts` parts of each of B * H groups, and joins the parts. Products
// are scaled by 1 / sqrt(channels), by default D, and logits are in log 2; without q, work makes its own. lse, if
// given, gets the logarithm of each softmax's sum.
template <class T, class Work>
void attention(const Heads<T>& heads, int64_t parts, Work work, int64_t channels = 0, float* lse = nullptr) {
    const int B = (int)heads.B, H = (int)heads.H, G = (int)heads.G, D = (int)heads.D;
    const int64_t threads = heads.threads;
    float scale = LOG2_E / std::sqrt((float)(channels ? channels : D));
    int64_t groups = (int64_t)B * H;
    std::vector<float> all(groups * parts * G * (D + 2));  // y, then largest logit and sum of each query head
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> query(G * D);
        Seen seen(G, D);
        if (heads.q) seen.scale = scale;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < groups * parts; item++) {
            int64_t group = item / parts, b = group / H, h = group % H;
            if (heads.q) scaled_query(heads.of(b, h), heads.head, G, D, 1.0f, query.data());
            seen.clear();
            work(group, item % parts, query.data(), seen);
            float* to = &all[item * G * (D + 2)];
            std::copy(seen.y.begin(), seen.y.end(), to);
            std::copy(seen.top.begin(), seen.top.end(), to + G * D);
            for (int g = 0; g < G; g++) to[G * D + G + g] = seen.total(g);
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
                store(heads.out + head * D + d, y / std::max(total, 1e-30f));
            }
        }
    }
}

void count(int64_t& all, int64_t own) {  // of a work item, others of which may count at the same time
#pragma omp atomic
    all += own;
}

int64_t parts_of(int64_t n) { return std::max<int64_t>(1, (n + CHUNK - 1) / CHUNK); }

}  // namespace
