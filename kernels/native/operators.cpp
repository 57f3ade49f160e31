// What decode steps call for every layer, as torch operators: a call takes 10 to 20 us, where Python took 60 to 150;
// from a compiled step, which calls them as C functions, it takes 2 to 7 us less.
//
// They use torch's stable interface, which compiles in seconds. The files of kernels/ declare and document them.
#include "tensor.h"

namespace {

const Tensor* some(const Tensor* x) { return x; }
const Tensor* some(const Tensor& x) { return &x; }
const Tensor* some(const Maybe& x) { return x ? &*x : nullptr; }

template <class X> bool lies_whole(const X& x) { return !some(x) || some(x)->is_contiguous(); }

template <class X> void expect(ScalarType type, const X& x, const char* name) {
    STD_TORCH_CHECK(!some(x) || some(x)->scalar_type() == type, name, ": a tensor of dtype ",
                    torch::headeronly::toString(type), " is needed, not of ",
                    torch::headeronly::toString(some(x)->scalar_type()));
}

// torch's pointer is null for a tensor without elements, too: here null means a tensor that was not given
alignas(64) char no_elements[64];
template <class T, class X> T* data(const X& x) {
    if (!some(x)) return nullptr;
    void* at = some(x)->data_ptr();
    return (T*)(at ? at : no_elements);
}
template <class X> int64_t* ints(const X& x, const char* name) {
    return expect(ScalarType::Long, x, name), data<int64_t>(x);
}
template <class X> float* floats(const X& x, const char* name) {
    return expect(ScalarType::Float, x, name), data<float>(x);
}
template <class X> uint16_t* halves(const X& x, const char* name) {
    return expect(ScalarType::Half, x, name), data<uint16_t>(x);
}
template <class X> uint8_t* bytes(const X& x, const char* name) {
    return expect(ScalarType::Byte, x, name), data<uint8_t>(x);
}

void make_whole(Tensor& x) {
    if (x.is_contiguous()) return;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(x.get(), &handle));
    const auto copy = torch::stable::contiguous(torch::stable::Tensor(handle));
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(copy.get(), &handle));
    x = Tensor::made(handle);
}
void make_whole(Maybe& x) {
    if (x) make_whole(*x);
}
template <class X, class... Y> void make_whole(X& x, Y&... more) { make_whole(x), make_whole(more...); }

int64_t is_bf16(std::initializer_list<const Tensor*> some) {
    ScalarType type = (*some.begin())->scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "fp32 or bf16 is needed, not ",
                    torch::headeronly::toString(type));
    for (auto x : some) expect(type, *x, "queries, keys and values");
    return type == ScalarType::BFloat16;
}

// Without the dispatcher, which takes longer than the allocation
Tensor like(const Tensor& q, const std::vector<int64_t>& size, std::optional<ScalarType> type = {}) {
    std::vector<int64_t> strides(size.size());
    for (size_t i = size.size(), n = 1; i-- > 0; n *= size[i]) strides[i] = n;
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(size.size(), size.data(), strides.data(),
                                                    (int32_t)type.value_or(q.scalar_type()),
                                                    aoti_torch_device_type_cpu(), 0, &made));
    return Tensor::made(made);
}

// [..., T] of fp32, each row padded to whole vectors, as empty_scores makes it: a graph relies on these strides
Tensor rows_like(const Tensor& q, std::vector<int64_t> lead, int64_t T) {
    std::vector<int64_t> size = lead, strides(lead.size() + 1, 1);
    int64_t n = (T + WHOLE - 1) / WHOLE * WHOLE;
    size.push_back(T);
    for (size_t i = lead.size(); i-- > 0; n *= lead[i]) strides[i] = n;
    const Tensor rows = like(q, {n}, ScalarType::Float);
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(rows.get(), size.size(), size.data(), strides.data(), 0, &made));
    return Tensor::made(made);
}

int64_t threads() { return torch::stable::get_num_threads(); }

// Calls f with a number of the type that all of these have
template <class F> void by_type(std::initializer_list<const Tensor*> some, F f) {
    if (is_bf16(some)) f(bf16{});
    else f(0.0f);
}

// ---- operands, made of tensors whose type has been checked ----

template <class T> Heads<T> heads_of(const Tensor& q, int64_t H, const Tensor& out) {
    STD_TORCH_CHECK(q.stride(2) == 1, "the channels of queries must be contiguous");
    return {.q = data<const T>(q),
            .row = q.stride(0),
            .head = q.stride(1),
            .out = data<T>(out),
            .B = q.size(0),
            .H = H,
            .G = q.size(1) / H,
            .D = q.size(2),
            .threads = threads()};
}
template <class T> Cache<T> cache_of(const Tensor& x) {
    STD_TORCH_CHECK(x.stride(3) == 1, "the last dimension must be contiguous");
    return {.at = data<const T>(x), .row = x.stride(0), .head = x.stride(1), .slot = x.stride(2)};
}
// One row may be for the whole batch, and one list for all heads
template <class T> PerHead<T> per_head(T* at, const Tensor& x) {
    return {.at = at, .row = x.size(0) > 1 ? x.stride(0) : 0, .head = x.size(1) > 1 ? x.stride(1) : 0};
}
template <class T> PerHead<T> per_head(T* at, const Maybe& x) { return x ? per_head(at, *x) : PerHead<T>{}; }
List list_of(const Tensor& idx, const Tensor& count) {
    STD_TORCH_CHECK(idx.stride(2) == 1, "the last dimension must be contiguous");
    return {.idx = per_head<const int64_t>(ints(idx, "idx"), idx),
            .count = per_head<const int64_t>(ints(count, "count"), count),
            .K = idx.size(2)};
}
Angles angles_of(const Tensor& cos, const Tensor& sin) {
    return {.cos = floats(cos, "cos"), .sin = floats(sin, "sin"), .row = cos.size(0) > 1 ? cos.stride(0) : 0};
}

Tensor attention_of_slots(Tensor q, Tensor k, Tensor v, Maybe start, Tensor stop, Maybe mean_k, Maybe mean_v,
                          Maybe count) {
    make_whole(start, stop, mean_k, mean_v, count);
    Tensor out = like(q, {q.size(0), q.size(1), q.size(2)});
    by_type({&q, &k, &v}, [&](auto zero) {
        typedef decltype(zero) T;
        const Range range{.start = ints(start, "start"), .stop = ints(stop, "stop")};
        const Means means{.k = floats(mean_k, "mean_k"), .v = floats(mean_v, "mean_v"), .count = ints(count, "count")};
        attend_range(heads_of<T>(q, k.size(1), out), cache_of<T>(k), cache_of<T>(v), range, means);
    });
    return out;
}

Tensor decode_attention(Tensor q, Tensor k, Tensor v, Maybe start, Tensor stop) {
    return attention_of_slots(std::move(q), std::move(k), std::move(v), std::move(start), std::move(stop), {}, {}, {});
}

Tensor verify_attention(Tensor q, Tensor k, Tensor v, Maybe start, Tensor stop) {
    const int64_t B = q.size(0), Hq = q.size(1), n = q.size(2), D = q.size(3), H = k.size(1);
    make_whole(q, start, stop);
    Tensor out = like(q, {B, Hq, n, D});
    by_type({&q, &k, &v}, [&](auto zero) {
        typedef decltype(zero) T;
        const Heads<T> heads{.q = data<const T>(q),
                             .row = Hq * n * D,
                             .head = D,
                             .out = data<T>(out),
                             .B = B,
                             .H = H,
                             .G = Hq / H * n,
                             .D = D,
                             .threads = threads()};
        const Range range{.start = ints(start, "start"), .stop = ints(stop, "stop")};
        attend_tokens(heads, cache_of<T>(k), cache_of<T>(v), range, n);
    });
    return out;
}

Tensor packed_attention(Tensor q, Tensor k, Tensor v, Tensor stop, Maybe mean_k, Maybe mean_v, Maybe count) {
    return attention_of_slots(std::move(q), std::move(k), std::move(v), {}, std::move(stop), std::move(mean_k),
                              std::move(mean_v), std::move(count));
}

Tensor ragged_attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor stop) {
    const int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), H = start.size(1), G = Hq / H;
    STD_TORCH_CHECK(k.stride(1) == 1 && v.stride(1) == 1, "channels must be contiguous");
    make_whole(q, start, stop);
    Tensor out = like(q, {B, Hq, D});
    by_type({&q, &k, &v}, [&](auto zero) {
        typedef decltype(zero) T;
        const Heads<T> heads{.q = data<const T>(q),
                             .row = G * D,
                             .head = D,
                             .out = data<T>(out),
                             .B = B * H,  // heads are rows over the same slots
                             .H = 1,
                             .G = G,
                             .D = D,
                             .threads = threads()};
        const auto slots = [](const Tensor& x) {
            return Cache<T>{.at = data<const T>(x), .row = 0, .head = 0, .slot = x.stride(0)};
        };
        const Range range{.start = ints(start, "start"), .stop = ints(stop, "stop")};
        attend_range(heads, slots(k), slots(v), range, Means{});
    });
    return out;
}

std::tuple<Tensor, Tensor> observed_attention(Tensor q, Tensor k, Tensor v, Tensor stop) {
    int64_t B = q.size(0), H = k.size(1), slots = k.size(2);
    make_whole(stop);
    Tensor out = like(q, {B, q.size(1), q.size(2)}), weights = like(q, {B, H, slots}, ScalarType::Float);
    by_type({&q, &k, &v}, [&](auto zero) {
        typedef decltype(zero) T;
        attend_observed(heads_of<T>(q, H, out), cache_of<T>(k), cache_of<T>(v), ints(stop, "stop"),
                        data<float>(weights), slots);
    });
    return {std::move(out), std::move(weights)};
}

Tensor gather_attention(Tensor q, Tensor k, Tensor v, Tensor idx, Tensor count) {
    Tensor out = like(q, {q.size(0), q.size(1), q.size(2)});
    by_type({&q, &k, &v}, [&](auto zero) {
        typedef decltype(zero) T;
        attend_list(heads_of<T>(q, k.size(1), out), cache_of<T>(k), cache_of<T>(v), list_of(idx, count));
    });
    return out;
}

Tensor packed_gather_attention(Tensor q, Tensor idx, Tensor count, Tensor k, Tensor v, Maybe k_params, Maybe v_params,
                               Maybe alpha, Maybe codes, Tensor sink_k, Tensor sink_v, Tensor tail_k, Tensor tail_v,
                               Tensor pos, Tensor prompt_len, Tensor flushed, int64_t bits) {
    for (auto x : {&k, &v, &sink_k, &sink_v, &tail_k, &tail_v})
        STD_TORCH_CHECK(lies_whole(*x), "a cache must be contiguous");
    STD_TORCH_CHECK(lies_whole(k_params) && lies_whole(v_params) && lies_whole(alpha) && lies_whole(codes),
                    "a cache must be contiguous");
    if (bits == 16) is_bf16({&q, &k, &v});
    else bytes(k, "k"), bytes(v, "v");
    make_whole(idx, count, pos, prompt_len);
    Tensor out = like(q, {q.size(0), q.size(1), q.size(2)});
    by_type({&q, &sink_k, &sink_v, &tail_k, &tail_v}, [&](auto zero) {
        typedef decltype(zero) T;
        const Listed<T> listed{.bits = bits,
                               .packed = {.k = data<uint8_t>(k),
                                          .v = data<uint8_t>(v),
                                          .k_params = halves(k_params, "k_params"),
                                          .v_params = halves(v_params, "v_params"),
                                          .signs = bytes(codes, "codes")},
                               .full_precision = {.k = data<T>(k), .v = data<T>(v), .slots = k.size(2)},
                               .alpha = floats(alpha, "alpha")};
        const FullPrecision<T> sinks{.k = data<T>(sink_k), .v = data<T>(sink_v), .slots = sink_k.size(2)},
            ring{.k = data<T>(tail_k), .v = data<T>(tail_v), .slots = tail_k.size(2)};
        attend_packed(
            heads_of<T>(q, idx.size(1), out), list_of(idx, count), listed, sinks, ring,
            {.pos = ints(pos, "pos"), .prompt = ints(prompt_len, "prompt_len"), .flushed = ints(flushed, "flushed")});
    });
    return out;
}

std::tuple<Tensor, Tensor> select_tokens(Tensor scores, Maybe mask, Maybe pos, Tensor wanted, int64_t k, int64_t sinks,
                                         int64_t recent) {
    int64_t B = scores.size(0), H = scores.size(1), T = scores.size(2), K = std::min(k, T);
    expect(ScalarType::Bool, mask, "mask");
    if (scores.stride(2) != 1) make_whole(scores);
    make_whole(mask, pos);
    Tensor idx = like(scores, {B, H, K}, ScalarType::Long), count = like(scores, {B, H}, ScalarType::Long);
    const ScoredRows rows{.at = per_head<const float>(floats(scores, "scores"), scores),
                          .pos = ints(pos, "pos"),
                          .B = B,
                          .H = H,
                          .T = T,
                          .threads = threads()};
    PerHead<const int64_t> want{.at = ints(wanted, "wanted"), .row = wanted.stride(0)};  // [B], or [B, H]
    if (wanted.dim() > 1) want = per_head(want.at, wanted);
    select_largest(rows, per_head<const uint8_t>(data<uint8_t>(mask), mask), want, {.sinks = sinks, .recent = recent},
                   {.idx = data<int64_t>(idx), .count = data<int64_t>(count), .K = K});
    return {std::move(idx), std::move(count)};
}

std::tuple<Tensor, Tensor> topk_select(Tensor scores, Tensor mask, int64_t k, Tensor count) {
    return select_tokens(std::move(scores), std::move(mask), {}, std::move(count), k, 0, 0);
}

std::tuple<Tensor, Tensor> budget_select(Tensor scores, Tensor pos, Tensor wanted, int64_t k, int64_t sinks,
                                         int64_t recent) {
    return select_tokens(std::move(scores), {}, std::move(pos), std::move(wanted), k, sinks, recent);
}

Tensor top_p_count(Tensor weights, Tensor pos, double p, int64_t sinks, int64_t recent) {
    if (weights.stride(2) != 1) make_whole(weights);
    make_whole(pos);
    Tensor count = like(weights, {weights.size(0), weights.size(1)}, ScalarType::Long);
    const ScoredRows rows{.at = per_head<const float>(floats(weights, "weights"), weights),
                          .pos = ints(pos, "pos"),
                          .B = weights.size(0),
                          .H = weights.size(1),
                          .T = weights.size(2),
                          .threads = threads()};
    count_nucleus(rows, p, {.sinks = sinks, .recent = recent}, data<int64_t>(count));
    return count;
}

// Scores [B, H, T] of codes [B, H, T, W]; `of` has the table and its parameters
Tensor looked_up(LookedUp of, const Tensor& like_this, const Tensor& codes) {
    STD_TORCH_CHECK(codes.stride(3) == 1 && codes.stride(2) == codes.size(3), "the codes of a head must be contiguous");
    of.codes = per_head<const uint8_t>(bytes(codes, "codes"), codes);
    of.T = codes.size(2), of.W = codes.size(3), of.threads = threads();
    Tensor out = rows_like(like_this, {of.B, of.H}, of.T);
    look_up(of, per_head(data<float>(out), out));
    return out;
}

int64_t entries_of(int64_t codes) { return (codes + 7) / 8 * 8 * ENTRIES; }  // of a table: codes are read 8 at a time

template <class T> void mean_of_group(const T* q, int64_t head, int64_t G, int64_t D, float* out) {
    std::fill(out, out + D, 0.0f);
    for (int64_t g = 0; g < G; g++)
        for (int64_t d = 0; d < D; d++) out[d] += number(q[g * head + d]);
    for (int64_t d = 0; d < D; d++) out[d] /= G;
}

Tensor lut_score(Tensor q, Tensor book, Tensor packed, Maybe pos, Maybe skip) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), H = book.size(1), C = D / 4, n = entries_of(C);
    int64_t half = is_bf16({&q});
    STD_TORCH_CHECK(q.stride(2) == 1 && packed.size(3) * 8 == D, "q must be contiguous, and have 8 channels a byte");
    make_whole(book);
    std::vector<float> table(B * H * n), query(D);
    const float* centroids = floats(book, "book");
    for (int64_t group = 0; group < B * H; group++) {
        int64_t b = group / H, h = group % H, G = Hq / H, at = b * q.stride(0) + h * G * q.stride(1);
        if (half) mean_of_group((const bf16*)q.data_ptr() + at, q.stride(1), G, D, query.data());
        else mean_of_group((const float*)q.data_ptr() + at, q.stride(1), G, D, query.data());
        for (int64_t c = 0; c < C; c++)
            for (int i = 0; i < ENTRIES; i++) {
                const float *of = centroids + ((group * C + c) * ENTRIES + i) * 4, *x = &query[c * 4];
                table[group * n + c * ENTRIES + i] = of[0] * x[0] + of[1] * x[1] + of[2] * x[2] + of[3] * x[3];
            }
    }
    make_whole(pos, skip);
    const LookedUp of{.table = table.data(),
                      .pos = ints(pos, "pos"),
                      .skip = ints(skip, "skip"),
                      .n_skip = skip ? skip->size(2) : 0,
                      .B = B,
                      .H = H};
    return looked_up(of, q, packed);
}

// A label of 4 bits looks up its product with the query, one of 2 bits together with its neighbour's
Tensor label_score(Tensor q, Tensor labels, Tensor params, int64_t bits, Maybe pos) {
    int64_t B = q.size(0), H = q.size(1), r = q.size(2), C = labels.size(3) * 2, n = entries_of(C);
    STD_TORCH_CHECK((bits == 2 || bits == 4) && r * bits == labels.size(3) * 8, "labels of 2 or 4 bits are needed");
    make_whole(q);
    std::vector<float> table(B * H * n), total(B * H);
    const float* from = floats(q, "q");
    for (int64_t group = 0; group < B * H; group++) {
        const float* x = from + group * r;
        for (int64_t i = 0; i < r; i++) total[group] += x[i];
        for (int64_t c = 0; c < C; c++)
            for (int i = 0; i < ENTRIES; i++)
                table[group * n + c * ENTRIES + i] =
                    bits == 4 ? x[c] * i : x[2 * c] * (i & 3) + x[2 * c + 1] * (i >> 2);
    }
    make_whole(pos);
    STD_TORCH_CHECK(params.stride(3) == 1 && params.stride(2) == 2, "params of a head must be contiguous");
    const LookedUp of{.table = table.data(),
                      .params = per_head<const uint16_t>(halves(params, "params"), params),
                      .total = total.data(),
                      .pos = ints(pos, "pos"),
                      .B = B,
                      .H = H};
    return looked_up(of, q, labels);
}

std::vector<float> as_floats(const Tensor& x) {  // x is contiguous
    std::vector<float> out(x.numel());
    if (is_bf16({&x}))
        for (size_t i = 0; i < out.size(); i++) out[i] = number(((const bf16*)x.data_ptr())[i]);
    else std::copy_n((const float*)x.data_ptr(), out.size(), out.begin());
    return out;
}

// Queries [B, H, C, R], converted to fp32 in `numbers`, for n tokens
Scored scored(const Tensor& q, std::vector<float>& numbers, const int64_t* pos, int64_t n) {
    numbers = as_floats(q);
    return {.q = numbers.data(),
            .B = q.size(0),
            .H = q.size(1),
            .C = q.size(2),
            .R = q.size(3),
            .n = n,
            .pos = pos,
            .threads = threads()};
}
Scores scores_of(const Tensor& out) {
    return {.at = data<float>(out), .row = out.stride(0), .head = out.stride(1), .query = out.stride(2)};
}

Tensor score_heads(Tensor q, Tensor x, Maybe pos) {
    STD_TORCH_CHECK(x.stride(3) == 1 && q.size(3) % WHOLE == 0, "rows must be contiguous, and whole vectors");
    make_whole(q, pos);
    Tensor out = rows_like(q, {q.size(0), q.size(1), q.size(2)}, x.size(2));
    std::vector<float> numbers;
    const Scored of = scored(q, numbers, ints(pos, "pos"), x.size(2));
    by_type({&x}, [&](auto zero) { head_scores(of, cache_of<decltype(zero)>(x), scores_of(out)); });
    return out;
}

Tensor score_channels(Tensor q, Tensor channels, Tensor keys, Tensor pos) {
    STD_TORCH_CHECK(keys.stride(3) == 1, "the tokens of a channel must be contiguous");
    make_whole(q, channels, pos);
    Tensor out = rows_like(q, {q.size(0), q.size(1), q.size(2)}, keys.size(3));
    std::vector<float> numbers;
    const Scored of = scored(q, numbers, ints(pos, "pos"), keys.size(3));
    const int64_t* which = ints(channels, "channels");
    by_type({&keys}, [&](auto zero) { channel_scores(of, which, cache_of<decltype(zero)>(keys), scores_of(out)); });
    return out;
}

// [..., outputs] for x [..., inputs]
Tensor products_like(const Tensor& x, int64_t outputs) {
    std::vector<int64_t> size;
    for (int64_t d = 0; d < x.dim() - 1; d++) size.push_back(x.size(d));
    size.push_back(outputs);
    return like(x, size);
}

Tensor dense_linear(Tensor x, Tensor weight, Maybe bias) {
    int64_t n = x.size(x.dim() - 1), M = x.numel() / n, out = weight.size(0);
    make_whole(x);
    STD_TORCH_CHECK(lies_whole(weight) && lies_whole(bias), "the weight must be contiguous");
    STD_TORCH_CHECK(weight.size(1) == n && n % WHOLE == 0 && (!bias || bias->size(0) == out), "no weight of ", n,
                    " inputs");
    Tensor y = products_like(x, out);
    if (bias) is_bf16({&x, &*bias});
    by_type({&x, &weight}, [&](auto zero) {
        typedef decltype(zero) T;
        const DenseWeight<T> of{.w = data<T>(weight), .bias = data<T>(bias), .in = n, .out = out};
        dense(of, data<const T>(x), data<T>(y), M, (int)threads());
    });
    return y;
}

constexpr int64_t FROM_TILES = 8;  // rows from which tiles of bf16 weights are faster than vectors
constexpr int64_t MANY = 32;  // rows from which a matrix product of unpacked rows is faster than unpacking in registers
constexpr int64_t UNPACKED_AT_ONCE =
    1 << 21;  // numbers that are unpacked for one matrix product: 8 MB in fp32, which caches hold

// The same memory as a matrix [rows, columns] with rows `stride` numbers apart
Tensor matrix(const Tensor& x, int64_t rows, int64_t columns, int64_t stride, int64_t first = 0) {
    const int64_t size[] = {rows, columns}, strides[] = {stride, 1};
    AtenTensorHandle view;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), 2, size, strides, first, &view));
    return Tensor::made(view);
}

// The groups' numbers, fp16 or int8 that counts fp16 steps: how many groups share a step
int64_t sharing(const Maybe& x, const Maybe& step, const char* name) {
    STD_TORCH_CHECK(lies_whole(x) && lies_whole(step), name, " must be contiguous");
    expect(ScalarType::Half, step, name), expect(step ? ScalarType::Char : ScalarType::Half, x, name);
    const int64_t n = step ? x->size(1) / step->size(1) : 1;
    STD_TORCH_CHECK(!step || (n * step->size(1) == x->size(1) && !(n & (n - 1))), name,
                    ": 1, 2, 4, 8 ... groups share a step");
    return n;
}

// y = x W^T + bias by torch's product with unpacked rows, some blocks at a time
template <class T>
void multiply_unpacked(const Weight& w, int64_t bits, const Tensor& x, const float* bias, Tensor& y, int64_t blocks) {
    const int64_t n = w.in, M = x.numel() / n, out = blocks * SIDE;
    const int64_t most = std::max<int64_t>(1, UNPACKED_AT_ONCE / (n * SIDE));
    const Tensor rows = like(x, {n, std::min(most, blocks) * SIDE}), from = matrix(x, M, n, n);
    for (int64_t first = 0; first < blocks; first += most) {
        const int64_t count = std::min(most, blocks - first);
        by_bits(bits, [&](auto constant) { unpack_rows<constant>(w, data<T>(rows), first, count, (int)threads()); });
        const Tensor part = matrix(rows, n, count * SIDE, count * SIDE),
                     to = matrix(y, M, count * SIDE, out, first * SIDE);
        TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(to.get(), from.get(), part.get()));
    }
    if (!bias) return;
    T* at = data<T>(y);
#pragma omp parallel for num_threads(threads())
    for (int64_t m = 0; m < M; m++)
        for (int64_t o = 0; o < out; o += L) store(at + m * out + o, load(at + m * out + o) + load(bias + o));
}

Tensor packed_linear(Tensor x, Tensor packed, Maybe scale, Maybe step, Maybe zero, Maybe minimum, Maybe min_step,
                     Maybe bias, int64_t bits) {
    make_whole(x);
    int64_t n = x.size(x.dim() - 1), M = x.numel() / n, blocks = packed.size(0), groups = scale ? scale->size(1) : 1;
    STD_TORCH_CHECK(lies_whole(packed) && lies_whole(zero) && lies_whole(bias), "the packed weight must be contiguous");
    STD_TORCH_CHECK(packed.numel() * 8 == blocks * n * SIDE * bits, "the packed weight is not one of ", n,
                    " inputs in ", bits, " bits");
    STD_TORCH_CHECK(!zero || (bits == 4 && zero->numel() * 2 == scale->numel()),
                    "a zero is of 4-bit codes, and has 4 bits");
    STD_TORCH_CHECK(!minimum || (scale && minimum->numel() == scale->numel() && !zero),
                    "a group has one minimum, or a zero");
    const auto per_group = [](const Maybe& x, const Maybe& step, const char* name) {
        return PerGroup{
            .at = data<char>(x), .step = data<uint16_t>(step), .shift = __builtin_ctzll(sharing(x, step, name))};
    };
    Tensor y = products_like(x, blocks * SIDE);
    const Weight w{.codes = bytes(packed, "packed"),
                   .scale = per_group(scale, step, "scale"),
                   .zero = bytes(zero, "zero"),
                   .minimum = per_group(minimum, min_step, "minimum"),
                   .in = n,
                   .group = n / groups};
    const float* more = floats(bias, "bias");
    const bool own = M >= MANY ? kvf_own_ways && kvf_has_many_rows(bits) : bits == 16 && M >= FROM_TILES && has_tiles();
    by_type({&x}, [&](auto zero) {
        typedef decltype(zero) T;
        if (!own && M >= MANY) return multiply_unpacked<T>(w, bits, x, more, y, blocks);
        const Product<T> of{
            .x = data<T>(x), .bias = more, .y = data<T>(y), .M = M, .blocks = blocks, .threads = threads()};
        by_bits(bits, [&](auto constant) { own ? many_rows<constant>(w, of) : linear<constant>(w, of); });
    });
    return y;
}

void store_labels(Tensor k, Tensor channels, Maybe start, Tensor labels, Tensor params, int64_t bits) {
    int64_t B = k.size(0), H = k.size(1), S = k.size(2), r = channels.size(1), W = labels.size(3);
    STD_TORCH_CHECK(k.stride(3) == 1 && labels.stride(3) == 1 && labels.stride(2) == W && W * 8 == r * bits,
                    "the labels of a head must be contiguous, of ", r, " channels");
    STD_TORCH_CHECK(params.stride(3) == 1 && params.stride(2) == 2, "params of a head must be contiguous");
    make_whole(channels, start);
    const int64_t *at = ints(start, "start"), *which = ints(channels, "channels");
    uint8_t* to = bytes(labels, "labels");
    uint16_t* pairs = halves(params, "params");
    by_type({&k}, [&](auto zero) {
        typedef decltype(zero) T;
#pragma omp parallel for num_threads(threads()) if (S > 1)
        for (int64_t i = 0; i < B * H; i++) {
            int64_t b = i / H, h = i % H, first = at ? at[b] : 0;
            const T* from = (const T*)k.data_ptr() + b * k.stride(0) + h * k.stride(1);
            std::vector<float> x(r);
            std::vector<uint8_t> codes(r);
            for (int64_t s = 0; s < S; s++, from += k.stride(2)) {
                for (int64_t c = 0; c < r; c++) x[c] = number(from[which[h * r + c]]);
                codes_of(x.data(), r, 1, bits, 1, codes.data(),
                         pairs + b * params.stride(0) + h * params.stride(1) + (first + s) * 2);
                pack_codes(codes.data(), r, bits, to + b * labels.stride(0) + h * labels.stride(1) + (first + s) * W);
            }
        }
    });
}

void latent_append(Tensor latents, Tensor values, Tensor pos, Tensor ring_k, Tensor ring_v, Maybe ring_params,
                   Tensor lead, Tensor rest, Tensor v, Maybe params, int64_t bits, int64_t recent) {
    for (auto x : {&ring_k, &ring_v, &lead, &rest, &v}) STD_TORCH_CHECK(lies_whole(*x), "a cache must be contiguous");
    STD_TORCH_CHECK(lies_whole(ring_params) && lies_whole(params), "a cache must be contiguous");
    make_whole(latents, values, pos);
    if (bits < 16) bytes(ring_v, "ring_v"), bytes(v, "v");
    else is_bf16({&values, &ring_v, &v});
    by_type({&latents, &values, &ring_k, &lead, &rest}, [&](auto zero) {
        typedef decltype(zero) T;
        const Latents<T> to{.ring = {.k = data<T>(ring_k),
                                     .v = data<char>(ring_v),
                                     .params = halves(ring_params, "ring_params"),
                                     .slots = ring_k.size(1),
                                     .rank = ring_k.size(2)},
                            .store = {.lead = data<T>(lead),
                                      .rest = data<T>(rest),
                                      .v = data<char>(v),
                                      .params = halves(params, "params"),
                                      .slots = lead.size(1),
                                      .leading = lead.size(2),
                                      .others = rest.size(2)},
                            .bits = bits,
                            .width = values.size(1),
                            .recent = recent};
        append_token(to, data<const T>(latents), data<const T>(values), ints(pos, "pos"), pos.size(0));
    });
}

Tensor latent_attention(Tensor q, Tensor basis, Tensor ring_k, Tensor ring_v, Maybe ring_params, Tensor lead,
                        Tensor rest, Tensor v, Maybe params, Tensor pos, Maybe idx, Maybe count, Tensor cos, Tensor sin,
                        int64_t ring_bits, int64_t bits, int64_t recent) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), R = ring_k.size(1), slots = lead.size(1),
            H = basis.size(1) / D;
    for (auto x : {&basis, &ring_k, &ring_v, &lead, &rest, &v, &cos, &sin})
        STD_TORCH_CHECK(lies_whole(*x), "the basis, caches and tables must be contiguous");
    STD_TORCH_CHECK(lies_whole(ring_params) && lies_whole(params) && q.stride(2) == 1, "caches must be contiguous");
    if (ring_bits < 16) bytes(ring_v, "ring_v");
    else is_bf16({&q, &ring_v});
    if (bits < 16) bytes(v, "v");
    else is_bf16({&q, &v});
    make_whole(idx, count, pos);
    const int64_t *at = ints(pos, "pos"), *many = ints(count, "count");
    STD_TORCH_CHECK(idx.has_value() == count.has_value(), "a list has a count");
    std::vector<int64_t> stored(
        B);  // without a list: all but the last slots, `recent` of them, which never hold anything
    int64_t K = idx ? idx->size(1) : slots - recent;
    for (int64_t b = 0; b < B; b++) stored[b] = std::max<int64_t>(0, std::min(K, idx ? many[b] : at[b] + 1 - recent));
    Tensor out = like(q, {B, Hq, D});
    by_type({&q, &basis, &ring_k, &lead, &rest}, [&](auto zero) {
        typedef decltype(zero) T;
        const LatentSlots<T> ring{.lead = data<T>(ring_k),
                                  .rest = data<T>(ring_k),  // none of it
                                  .first = ring_k.size(2),
                                  .second = 0,
                                  .values = data<char>(ring_v),
                                  .params = halves(ring_params, "ring_params"),
                                  .bits = ring_bits,
                                  .W = H * D,
                                  .slots = R},
            store{.lead = data<T>(lead),
                  .rest = data<T>(rest),
                  .first = lead.size(2),
                  .second = rest.size(2),
                  .values = data<char>(v),
                  .params = halves(params, "params"),
                  .bits = bits,
                  .W = H * D,
                  .slots = slots};
        const Tokens tokens{.pos = at, .idx = ints(idx, "idx"), .count = stored.data(), .K = K, .recent = recent};
        if (B) attend_latents(heads_of<T>(q, H, out), data<const T>(basis), ring, store, tokens, angles_of(cos, sin));
    });
    return out;
}

// What codes stand for, or null: integers
const float* book_of(const Maybe& book, int64_t bits) {
    STD_TORCH_CHECK(!book || (lies_whole(book) && book->numel() == 1 << bits), "a book has an entry for each code");
    return floats(book, "book");
}

void quantized_append(Tensor x, Tensor pos, Tensor kept, Tensor packed, Maybe params, Maybe book, int64_t bits,
                      int64_t sinks, int64_t block, double clip) {
    int64_t B = x.size(0), H = x.size(1), D = x.size(2), slots = packed.size(2), ring = kept.size(2) - sinks;
    STD_TORCH_CHECK(lies_whole(kept) && lies_whole(packed) && lies_whole(params), "a cache must be contiguous");
    STD_TORCH_CHECK(D % WHOLE == 0 && packed.size(3) * 8 == D * (bits == 16 ? 8 : bits), "no rows of ", D, " channels");
    make_whole(x, pos);
    if (bits < 16) bytes(packed, "data");
    else is_bf16({&x, &packed});
    const int64_t* at = ints(pos, "pos");
    by_type({&x, &kept}, [&](auto zero) {
        typedef decltype(zero) T;
        const QuantizedHead<T> first{.packed = data<char>(packed),
                                     .params = halves(params, "params"),
                                     .full_precision = data<T>(kept),
                                     .slots = slots,
                                     .bits = bits,
                                     .group = params && !block && !book ? D / params->size(3) : D,
                                     .sinks = sinks,
                                     .ring = ring,
                                     .block = block,
                                     .D = D,
                                     .clip = (float)clip,
                                     .book = book_of(book, bits)};
        const int64_t row = D * (bits == 16 ? (int64_t)sizeof(T) * 8 : bits) / 8,
                      each = params ? params->numel() / params->size(0) / H : 0;
        const T* from = data<const T>(x);
#pragma omp parallel for num_threads(threads()) if (block)
        for (int64_t i = 0; i < B * H; i++) {
            QuantizedHead<T> to = first;
            to.packed += i * slots * row, to.full_precision += i * (sinks + ring) * D;
            if (to.params) to.params += i * each;
            append_quantized(to, from + i * D, at[i / H]);
        }
    });
}

Tensor quantized_attention(Tensor q, Tensor k, Maybe k_params, Tensor k_kept, Tensor v, Maybe v_params, Tensor v_kept,
                           Tensor pos, Tensor k_stop, Tensor v_stop, Maybe k_book, Maybe v_book, int64_t sinks,
                           int64_t k_bits, int64_t v_bits, bool channels) {
    const int64_t D = q.size(2);
    for (auto x : {&k, &k_kept, &v, &v_kept}) STD_TORCH_CHECK(lies_whole(*x), "a cache must be contiguous");
    STD_TORCH_CHECK(lies_whole(k_params) && lies_whole(v_params), "caches must be contiguous");
    if (k_bits < 16) bytes(k, "k");
    else is_bf16({&q, &k});
    if (v_bits < 16) bytes(v, "v");
    else is_bf16({&q, &v});
    make_whole(pos, k_stop, v_stop);
    Tensor out = like(q, {q.size(0), q.size(1), D});
    by_type({&q, &k_kept, &v_kept}, [&](auto zero) {
        typedef decltype(zero) T;
        const auto cache = [&](const Tensor& x, const Tensor& kept, const Maybe& params, const Maybe& book,
                               int64_t bits, bool by_channel) {
            return QuantizedCache<T>{.packed = data<char>(x),
                                     .params = halves(params, "params"),
                                     .full_precision = data<T>(kept),
                                     .slots = x.size(2),
                                     .bits = bits,
                                     .group = params && !book && !by_channel ? D / params->size(3) : D,
                                     .sinks = sinks,
                                     .held = kept.size(2),
                                     .by_channel = by_channel,
                                     .book = book_of(book, bits),
                                     .share = book ? x.size(2) / params->size(2) : 1};
        };
        const auto keys = cache(k, k_kept, k_params, k_book, k_bits, channels),
                   values = cache(v, v_kept, v_params, v_book, v_bits, false);
        const Ends ends{.pos = ints(pos, "pos"), .k = ints(k_stop, "k_stop"), .v = ints(v_stop, "v_stop")};
        if (q.size(0)) attend_quantized(heads_of<T>(q, k_kept.size(1), out), keys, values, ends);
    });
    return out;
}

Tensor lowrank_attention(Tensor q, Tensor k, Tensor v, Tensor k_basis, Tensor v_basis, Tensor stored, Tensor k_full,
                         Tensor v_full, Tensor filled) {
    for (auto x : {&k_basis, &v_basis, &k_full, &v_full})
        STD_TORCH_CHECK(lies_whole(*x), "bases and full-rank tokens must be contiguous");
    STD_TORCH_CHECK(k.stride(2) == 1 && v.stride(2) == 1 && k.stride(3) == v.stride(3), "tokens must lie side by side");
    make_whole(stored, filled);
    expect(ScalarType::Bool, filled, "filled");
    Tensor out = like(q, {q.size(0), q.size(1), q.size(2)});
    by_type({&q, &k, &v, &k_full, &v_full}, [&](auto zero) {
        typedef decltype(zero) T;
        const auto latent = [](const Tensor& x, const Tensor& basis, const char* name) {
            return Latent<T>{.at = data<T>(x),
                             .row = x.stride(0),
                             .head = x.stride(1),
                             .chan = x.stride(3),
                             .rank = x.size(3),
                             .basis = per_head<const float>(floats(basis, name), basis)};
        };
        const Filled<T> full{
            .k = data<T>(k_full), .v = data<T>(v_full), .filled = data<const uint8_t>(filled), .F = k_full.size(2)};
        if (q.size(0))
            attend_lowrank(heads_of<T>(q, k.size(1), out), latent(k, k_basis, "k_basis"), latent(v, v_basis, "v_basis"),
                           ints(stored, "stored"), full);
    });
    return out;
}

Tensor group_attention(Tensor q, Tensor k, Maybe k_params, Tensor v, Maybe v_params, Tensor k_basis, Tensor v_basis,
                       Tensor k_bias, Tensor v_bias, Tensor pos, Tensor cos, Tensor sin, int64_t bits) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), groups = k.size(1), R = k_basis.size(2);
    int64_t H = groups * (k_basis.size(1) / D);  // heads whose keys are made from coordinates
    for (auto x : {&k, &v, &k_basis, &v_basis, &k_bias, &v_bias, &cos, &sin})
        STD_TORCH_CHECK(lies_whole(*x), "caches, bases and tables must be contiguous");
    STD_TORCH_CHECK(lies_whole(k_params) && lies_whole(v_params), "caches must be contiguous");
    if (bits == 16) is_bf16({&q, &k, &v});
    else bytes(k, "k"), bytes(v, "v");
    make_whole(pos);
    Tensor out = like(q, {B, Hq, D}), mean = like(q, {B, Hq, R}, ScalarType::Float);
    by_type({&q, &k_basis, &v_basis}, [&](auto zero) {
        typedef decltype(zero) T;
        const auto grouped = [&](const Tensor& x, const uint16_t* pairs, const Tensor& basis, const float* bias) {
            return Grouped<T>{.data = data<char>(x),
                              .params = pairs,
                              .basis = data<T>(basis),
                              .bias = bias,
                              .slots = x.size(2),
                              .R = R,
                              .bits = bits};
        };
        const auto keys = grouped(k, halves(k_params, "k_params"), k_basis, floats(k_bias, "k_bias")),
                   values = grouped(v, halves(v_params, "v_params"), v_basis, floats(v_bias, "v_bias"));
        if (B)
            attend_groups(heads_of<T>(q, H, out), groups, keys, values, ints(pos, "pos"), angles_of(cos, sin),
                          data<float>(mean));
    });
    return out;
}

Tensor oja_sequential(Tensor basis, Tensor x) {
    make_whole(basis, x);
    Tensor out = like(basis, {basis.size(0), basis.size(1), basis.size(2)});
    oja_sequence(
        floats(x, "x"), floats(basis, "basis"), data<float>(out),
        {.groups = basis.size(0), .m = x.size(1), .D = basis.size(1), .rank = basis.size(2), .threads = threads()});
    return out;
}

}  // namespace

#define OPERATORS(EACH)                                    \
    EACH(budget_select, budget_select)                     \
    EACH(channel_score, score_channels)                    \
    EACH(decode_attention, decode_attention)               \
    EACH(verify_attention, verify_attention)               \
    EACH(dense_linear, dense_linear)                       \
    EACH(gather_attention, gather_attention)               \
    EACH(group_attention, group_attention)                 \
    EACH(head_scores, score_heads)                         \
    EACH(label_score, label_score)                         \
    EACH(latent_append, latent_append)                     \
    EACH(latent_attention, latent_attention)               \
    EACH(lowrank_attention, lowrank_attention)             \
    EACH(lut_score, lut_score)                             \
    EACH(observed_attention, observed_attention)           \
    EACH(packed_attention, packed_attention)               \
    EACH(packed_gather_attention, packed_gather_attention) \
    EACH(packed_linear, packed_linear)                     \
    EACH(quantized_append, quantized_append)               \
    EACH(quantized_attention, quantized_attention)         \
    EACH(ragged_attention, ragged_attention)               \
    EACH(sequential, oja_sequential)                       \
    EACH(store_labels, store_labels)                       \
    EACH(top_p_count, top_p_count)                         \
    EACH(topk_select, topk_select)

// Under the names by which inductor calls declared operators
#define DIRECT(name, f) extern "C" auto* const aoti_torch_cpu_##name = Operator<&f>::direct();
OPERATORS(DIRECT)

extern "C" void kvf_register() {  // they stay registered until the next library loads and registers its own
    using torch::stable::detail::StableLibrary;
    auto& lib = *new StableLibrary(StableLibrary::Kind::IMPL, "kv_fast", "CPU", __FILE__, __LINE__);
#define BOXED(name, f) lib.impl(#name ".cpp", &Operator<&f>::boxed);
    OPERATORS(BOXED)
}
