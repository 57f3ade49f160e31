// What decode steps call for every layer, as operators of torch: a call takes 10 to 20 us, from Python it took 60 to
// 150, and from a compiled step, which calls them as functions in C, 2 to 7 us less.
//
// Through torch's stable interface, which compiles in seconds. The files of kernels/ declare them, and say what they
// give.
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

// torch's pointer of a tensor without elements is null, too: here null is a tensor that was not given, and nothing else
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

// Not by the dispatcher, which takes longer than to allocate
Tensor like(const Tensor& q, const std::vector<int64_t>& size, std::optional<ScalarType> type = {}) {
    std::vector<int64_t> strides(size.size());
    for (size_t i = size.size(), n = 1; i-- > 0; n *= size[i]) strides[i] = n;
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(size.size(), size.data(), strides.data(),
                                                    (int32_t)type.value_or(q.scalar_type()),
                                                    aoti_torch_device_type_cpu(), 0, &made));
    return Tensor::made(made);
}

// [..., T] of fp32, a row of whole vectors in memory, as empty_scores gives it: a graph counts on that
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

struct Lists {
    int64_t row, head;
};  // one list may serve all heads
Lists strides_of(const Tensor& x) { return {x.stride(0), x.size(1) > 1 ? x.stride(1) : 0}; }

Tensor attention_of_slots(Tensor q, Tensor k, Tensor v, Maybe start, Tensor stop, Maybe mean_k, Maybe mean_v,
                          Maybe count) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), H = k.size(1);
    STD_TORCH_CHECK(q.stride(2) == 1 && k.stride(3) == 1 && v.stride(3) == 1, "channels must be contiguous");
    make_whole(start, stop, mean_k, mean_v, count);
    Tensor out = like(q, {B, Hq, D});
    kvf_decode_attention(is_bf16({&q, &k, &v}), q.data_ptr(), k.data_ptr(), v.data_ptr(), ints(start, "start"),
                         ints(stop, "stop"), floats(mean_k, "mean_k"), floats(mean_v, "mean_v"), ints(count, "count"),
                         out.data_ptr(), q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0),
                         v.stride(1), v.stride(2), B, H, Hq / H, D, threads());
    return out;
}

Tensor decode_attention(Tensor q, Tensor k, Tensor v, Maybe start, Tensor stop) {
    return attention_of_slots(std::move(q), std::move(k), std::move(v), std::move(start), std::move(stop), {}, {}, {});
}

Tensor packed_attention(Tensor q, Tensor k, Tensor v, Tensor stop, Maybe mean_k, Maybe mean_v, Maybe count) {
    return attention_of_slots(std::move(q), std::move(k), std::move(v), {}, std::move(stop), std::move(mean_k),
                              std::move(mean_v), std::move(count));
}

std::tuple<Tensor, Tensor> observed_attention(Tensor q, Tensor k, Tensor v, Tensor stop) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), H = k.size(1), T = k.size(2);
    STD_TORCH_CHECK(q.stride(2) == 1 && k.stride(3) == 1 && v.stride(3) == 1, "channels must be contiguous");
    make_whole(stop);
    Tensor out = like(q, {B, Hq, D}), weights = like(q, {B, H, T}, ScalarType::Float);
    kvf_observed_attention(is_bf16({&q, &k, &v}), q.data_ptr(), k.data_ptr(), v.data_ptr(), ints(stop, "stop"),
                           out.data_ptr(), (float*)weights.data_ptr(), q.stride(0), q.stride(1), k.stride(0),
                           k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2), B, H, Hq / H, D, T,
                           threads());
    return {std::move(out), std::move(weights)};
}

Tensor gather_attention(Tensor q, Tensor k, Tensor v, Tensor idx, Tensor count) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), H = k.size(1);
    STD_TORCH_CHECK(q.stride(2) == 1 && k.stride(3) == 1 && v.stride(3) == 1 && idx.stride(2) == 1,
                    "the last dimension must be contiguous");
    Tensor out = like(q, {B, Hq, D});
    Lists at = strides_of(idx), n = strides_of(count);
    kvf_gather_attention(is_bf16({&q, &k, &v}), q.data_ptr(), k.data_ptr(), v.data_ptr(), ints(idx, "idx"),
                         ints(count, "count"), out.data_ptr(), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
                         k.stride(2), v.stride(0), v.stride(1), v.stride(2), at.row, at.head, n.row, n.head, B, H,
                         Hq / H, D, idx.size(2), threads());
    return out;
}

Tensor packed_gather_attention(Tensor q, Tensor idx, Tensor count, Tensor k, Tensor v, Maybe k_params, Maybe v_params,
                               Maybe alpha, Maybe codes, Tensor sink_k, Tensor sink_v, Tensor tail_k, Tensor tail_v,
                               Tensor pos, Tensor prompt_len, Tensor flushed, int64_t bits) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), H = idx.size(1);
    for (auto x : {&k, &v, &sink_k, &sink_v, &tail_k, &tail_v})
        STD_TORCH_CHECK(lies_whole(*x), "a cache must be contiguous");
    STD_TORCH_CHECK(
        lies_whole(k_params) && lies_whole(v_params) && lies_whole(alpha) && lies_whole(codes) && q.stride(2) == 1,
        "a cache must be contiguous");
    int64_t half = is_bf16({&q, &sink_k, &sink_v, &tail_k, &tail_v});
    if (bits == 16) is_bf16({&q, &k, &v});
    else bytes(k, "k"), bytes(v, "v");
    make_whole(idx, count, pos, prompt_len);
    Tensor out = like(q, {B, Hq, D});
    kvf_packed_gather_attention(half, bits, q.data_ptr(), ints(idx, "idx"), ints(count, "count"), k.data_ptr(),
                                v.data_ptr(), halves(k_params, "k_params"), halves(v_params, "v_params"),
                                floats(alpha, "alpha"), bytes(codes, "codes"), sink_k.data_ptr(), sink_v.data_ptr(),
                                tail_k.data_ptr(), tail_v.data_ptr(), ints(pos, "pos"), ints(prompt_len, "prompt_len"),
                                ints(flushed, "flushed"), out.data_ptr(), q.stride(0), q.stride(1), B, H, Hq / H, D,
                                k.size(2), idx.size(2), sink_k.size(2), tail_k.size(2), threads());
    return out;
}

std::tuple<Tensor, Tensor> select_tokens(Tensor scores, Maybe mask, Maybe pos, Tensor wanted, int64_t k, int64_t sinks,
                                         int64_t recent) {
    int64_t B = scores.size(0), H = scores.size(1), T = scores.size(2), K = std::min(k, T);
    expect(ScalarType::Bool, mask, "mask");
    if (scores.stride(2) != 1) make_whole(scores);
    make_whole(mask, pos);
    Tensor idx = like(scores, {B, H, K}, ScalarType::Long), count = like(scores, {B, H}, ScalarType::Long);
    // wanted is [B], or [B, H]; a mask may serve all heads
    int64_t wanted_head = wanted.dim() > 1 && wanted.size(1) > 1 ? wanted.stride(1) : 0;
    int64_t mask_row = mask ? mask->size(1) * T : 0, mask_head = mask && mask->size(1) > 1 ? T : 0;
    if (mask && mask->size(0) == 1) mask_row = 0;
    kvf_select(floats(scores, "scores"), data<uint8_t>(mask), ints(pos, "pos"), ints(wanted, "wanted"),
               ints(idx, "idx"), ints(count, "count"), scores.stride(0), scores.stride(1), mask_row, mask_head,
               wanted.stride(0), wanted_head, B, H, T, K, sinks, recent, threads());
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
    int64_t B = weights.size(0), H = weights.size(1), T = weights.size(2);
    if (weights.stride(2) != 1) make_whole(weights);
    make_whole(pos);
    Tensor count = like(weights, {B, H}, ScalarType::Long);
    kvf_top_p(floats(weights, "weights"), ints(pos, "pos"), &p, ints(count, "count"), weights.stride(0),
              weights.stride(1), B, H, T, sinks, recent, threads());
    return count;
}

// Scores [B, H, T]
Tensor looked_up(const Tensor& like_this, const float* table, int64_t B, int64_t H, const Tensor& codes,
                 const Tensor* params, const float* total, const Maybe& pos, const Maybe& skip) {
    int64_t T = codes.size(2), W = codes.size(3);
    STD_TORCH_CHECK(codes.stride(3) == 1 && codes.stride(2) == W, "the codes of a head must be contiguous");
    STD_TORCH_CHECK(!params || (params->stride(3) == 1 && params->stride(2) == 2),
                    "params of a head must be contiguous");
    Tensor out = rows_like(like_this, {B, H}, T);
    kvf_look_up(table, bytes(codes, "codes"), halves(params, "params"), total, ints(pos, "pos"), ints(skip, "skip"),
                (float*)out.data_ptr(), codes.stride(0), codes.stride(1), params ? params->stride(0) : 0,
                params ? params->stride(1) : 0, out.stride(0), out.stride(1), B, H, T, W, skip ? skip->size(2) : 0,
                threads());
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
    return looked_up(q, table.data(), B, H, packed, nullptr, nullptr, pos, skip);
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
    return looked_up(q, table.data(), B, H, labels, &params, total.data(), pos, {});
}

std::vector<float> as_floats(const Tensor& x) {  // x lies whole
    std::vector<float> out(x.numel());
    if (is_bf16({&x}))
        for (size_t i = 0; i < out.size(); i++) out[i] = number(((const bf16*)x.data_ptr())[i]);
    else std::copy_n((const float*)x.data_ptr(), out.size(), out.begin());
    return out;
}

Tensor score_heads(Tensor q, Tensor x, Maybe pos) {
    int64_t B = q.size(0), H = q.size(1), C = q.size(2), R = q.size(3), T = x.size(2);
    STD_TORCH_CHECK(x.stride(3) == 1 && R % WHOLE == 0, "rows must be contiguous, and whole vectors");
    make_whole(q, pos);
    Tensor out = rows_like(q, {B, H, C}, T);
    kvf_head_scores(is_bf16({&x}), as_floats(q).data(), x.data_ptr(), ints(pos, "pos"), (float*)out.data_ptr(),
                    x.stride(0), x.stride(1), x.stride(2), out.stride(0), out.stride(1), out.stride(2), B, H, C, T, R,
                    threads());
    return out;
}

Tensor score_channels(Tensor q, Tensor channels, Tensor keys, Tensor pos) {
    int64_t B = q.size(0), H = q.size(1), C = q.size(2), R = q.size(3), T = keys.size(3);
    STD_TORCH_CHECK(keys.stride(3) == 1, "the tokens of a channel must be contiguous");
    make_whole(q, channels, pos);
    Tensor out = rows_like(q, {B, H, C}, T);
    kvf_channel_scores(is_bf16({&keys}), as_floats(q).data(), ints(channels, "channels"), keys.data_ptr(),
                       ints(pos, "pos"), (float*)out.data_ptr(), keys.stride(0), keys.stride(1), keys.stride(2),
                       out.stride(0), out.stride(1), out.stride(2), B, H, C, T, R, threads());
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
    int64_t half = bias ? is_bf16({&x, &weight, &*bias}) : is_bf16({&x, &weight});
    kvf_dense_linear(half, x.data_ptr(), weight.data_ptr(), data<char>(bias), y.data_ptr(), M, n, out, threads());
    return y;
}

constexpr int64_t FROM_TILES = 8;  // rows from which tiles of bf16 weights are faster than vectors
constexpr int64_t MANY = 32;  // rows from which a matrix product of unpacked rows is faster than unpacking in registers
constexpr int64_t UNPACKED_AT_ONCE =
    1 << 21;  // numbers that are unpacked for one matrix product: 8 MB in fp32, which caches hold

// The same memory as a matrix [rows, columns], a row `stride` numbers behind the one before it
Tensor matrix(const Tensor& x, int64_t rows, int64_t columns, int64_t stride, int64_t first = 0) {
    const int64_t size[] = {rows, columns}, strides[] = {stride, 1};
    AtenTensorHandle view;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), 2, size, strides, first, &view));
    return Tensor::made(view);
}

// Of numbers a group in fp16, or int8 that counts steps in fp16: how many groups share a step
int64_t sharing(const Maybe& x, const Maybe& step, const char* name) {
    STD_TORCH_CHECK(lies_whole(x) && lies_whole(step), name, " must be contiguous");
    expect(ScalarType::Half, step, name), expect(step ? ScalarType::Char : ScalarType::Half, x, name);
    const int64_t n = step ? x->size(1) / step->size(1) : 1;
    STD_TORCH_CHECK(!step || (n * step->size(1) == x->size(1) && !(n & (n - 1))), name,
                    ": 1, 2, 4, 8 ... groups share a step");
    return n;
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
    const int64_t shared = sharing(scale, step, "scale"), min_shared = sharing(minimum, min_step, "minimum");
    Tensor y = products_like(x, blocks * SIDE);
    const int64_t half = is_bf16({&x}), group = n / groups;
    const auto codes = bytes(packed, "packed"), per = data<uint8_t>(scale), zeros = bytes(zero, "zero"),
               least = data<uint8_t>(minimum);
    const auto steps = data<uint16_t>(step), min_steps = data<uint16_t>(min_step);
    const float* more = floats(bias, "bias");
    const bool own = M >= MANY ? kvf_own_ways && kvf_has_many_rows(bits) : bits == 16 && M >= FROM_TILES && has_tiles();
    if (own || M < MANY) {
        (own ? kvf_many_rows : kvf_linear)(half, bits, x.data_ptr(), codes, per, steps, zeros, least, min_steps, more,
                                           y.data_ptr(), M, n, blocks, group, shared, min_shared, threads());
        return y;
    }
    const int64_t out = blocks * SIDE, most = std::max<int64_t>(1, UNPACKED_AT_ONCE / (n * SIDE));
    const Tensor rows = like(x, {n, std::min(most, blocks) * SIDE}), from = matrix(x, M, n, n);
    for (int64_t first = 0; first < blocks; first += most) {
        const int64_t count = std::min(most, blocks - first);
        kvf_unpack_rows(half, bits, codes, per, steps, zeros, least, min_steps, rows.data_ptr(), n, group, shared,
                        min_shared, first, count, threads());
        const Tensor part = matrix(rows, n, count * SIDE, count * SIDE),
                     to = matrix(y, M, count * SIDE, out, first * SIDE);
        TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(to.get(), from.get(), part.get()));
    }
    const auto add = [&](auto* at) {
#pragma omp parallel for num_threads(threads())
        for (int64_t m = 0; m < M; m++)
            for (int64_t o = 0; o < out; o += L) store(at + m * out + o, load(at + m * out + o) + load(more + o));
    };
    if (more && half) add((bf16*)y.data_ptr());
    else if (more) add((float*)y.data_ptr());
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
    auto run = [&](auto zero) {
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
    };
    if (is_bf16({&k})) run(bf16{});
    else run(0.0f);
}

void latent_append(Tensor latents, Tensor values, Tensor pos, Tensor ring_k, Tensor ring_v, Maybe ring_params,
                   Tensor lead, Tensor rest, Tensor v, Maybe params, int64_t bits) {
    for (auto x : {&ring_k, &ring_v, &lead, &rest, &v}) STD_TORCH_CHECK(lies_whole(*x), "a cache must be contiguous");
    STD_TORCH_CHECK(lies_whole(ring_params) && lies_whole(params), "a cache must be contiguous");
    make_whole(latents, values, pos);
    int64_t is_half = is_bf16({&latents, &values, &ring_k, &lead, &rest});
    if (bits < 16) bytes(ring_v, "ring_v"), bytes(v, "v");
    else is_bf16({&values, &ring_v, &v});
    const int64_t* at = ints(pos, "pos");
    uint16_t *ring_pairs = halves(ring_params, "ring_params"), *pairs = halves(params, "params");
    auto run = [&](auto zero) {
        typedef decltype(zero) T;
        append_token<T>((const T*)latents.data_ptr(), (const T*)values.data_ptr(), at, (T*)ring_k.data_ptr(),
                        ring_v.data_ptr(), ring_pairs, (T*)lead.data_ptr(), (T*)rest.data_ptr(), v.data_ptr(), pairs,
                        bits, pos.size(0), ring_k.size(1), lead.size(1), ring_k.size(2), lead.size(2), rest.size(2),
                        values.size(1));
    };
    if (is_half) run(bf16{});
    else run(0.0f);
}

Tensor latent_attention(Tensor q, Tensor basis, Tensor ring_k, Tensor ring_v, Maybe ring_params, Tensor lead,
                        Tensor rest, Tensor v, Maybe params, Tensor pos, Maybe idx, Maybe count, Tensor cos, Tensor sin,
                        int64_t ring_bits, int64_t bits) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), R = ring_k.size(1), T = lead.size(1), H = basis.size(1) / D;
    for (auto x : {&basis, &ring_k, &ring_v, &lead, &rest, &v, &cos, &sin})
        STD_TORCH_CHECK(lies_whole(*x), "the basis, caches and tables must be contiguous");
    STD_TORCH_CHECK(lies_whole(ring_params) && lies_whole(params) && q.stride(2) == 1, "caches must be contiguous");
    int64_t is_half = is_bf16({&q, &basis, &ring_k, &lead, &rest});
    if (ring_bits < 16) bytes(ring_v, "ring_v");
    else is_bf16({&q, &ring_v});
    if (bits < 16) bytes(v, "v");
    else is_bf16({&q, &v});
    make_whole(idx, count, pos);
    const int64_t *at = ints(pos, "pos"), *list = ints(idx, "idx"), *many = ints(count, "count");
    STD_TORCH_CHECK(idx.has_value() == count.has_value(), "a list has a count");
    std::vector<int64_t> stored(B);  // without a list: all but the last R slots, which never hold anything
    int64_t K = idx ? idx->size(1) : T - R;
    for (int64_t b = 0; b < B; b++) stored[b] = std::max<int64_t>(0, std::min(K, idx ? many[b] : at[b] + 1 - R));
    Tensor out = like(q, {B, Hq, D});
    if (B)
        kvf_latent_attention(is_half, ring_bits, bits, q.data_ptr(), basis.data_ptr(), ring_k.data_ptr(),
                             ring_v.data_ptr(), halves(ring_params, "ring_params"), lead.data_ptr(), rest.data_ptr(),
                             v.data_ptr(), halves(params, "params"), at, list, stored.data(), floats(cos, "cos"),
                             floats(sin, "sin"), out.data_ptr(), q.stride(0), q.stride(1),
                             cos.size(0) > 1 ? cos.stride(0) : 0, B, H, Hq / H, D, T, R, K, ring_k.size(2),
                             lead.size(2), rest.size(2), threads());
    return out;
}

void quantized_append(Tensor x, Tensor pos, Tensor kept, Tensor data, Maybe params, Maybe, int64_t bits, int64_t sinks,
                      int64_t block, double clip) {
    int64_t B = x.size(0), H = x.size(1), D = x.size(2), slots = data.size(2), ring = kept.size(2) - sinks;
    STD_TORCH_CHECK(lies_whole(kept) && lies_whole(data) && lies_whole(params), "a cache must be contiguous");
    STD_TORCH_CHECK(D % WHOLE == 0 && data.size(3) * 8 == D * (bits == 16 ? 8 : bits), "no rows of ", D, " channels");
    make_whole(x, pos);
    int64_t is_half = is_bf16({&x, &kept}), group = params && !block ? D / params->size(3) : D;
    if (bits < 16) bytes(data, "data");
    else is_bf16({&x, &data});
    const int64_t* at = ints(pos, "pos");
    uint16_t* pairs = halves(params, "params");
    auto run = [&](auto zero) {
        typedef decltype(zero) T;
        int64_t row = D * (bits == 16 ? (int64_t)sizeof(T) * 8 : bits) / 8,
                each = params ? params->numel() / params->size(0) / H : 0;
#pragma omp parallel for num_threads(threads()) if (block)
        for (int64_t i = 0; i < B * H; i++)
            append_quantized<T>((const T*)x.data_ptr() + i * D, at[i / H], (T*)kept.data_ptr() + i * (sinks + ring) * D,
                                (char*)data.data_ptr() + i * slots * row, pairs ? pairs + i * each : nullptr, bits,
                                sinks, ring, block, (float)clip, D, group, slots);
    };
    if (is_half) run(bf16{});
    else run(0.0f);
}

Tensor quantized_attention(Tensor q, Tensor k, Maybe k_params, Tensor k_kept, Tensor v, Maybe v_params, Tensor v_kept,
                           Tensor pos, Tensor k_stop, Tensor v_stop, Maybe, Maybe, int64_t sinks, int64_t k_bits,
                           int64_t v_bits, bool channels) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), H = k_kept.size(1);
    for (auto x : {&k, &k_kept, &v, &v_kept}) STD_TORCH_CHECK(lies_whole(*x), "a cache must be contiguous");
    STD_TORCH_CHECK(lies_whole(k_params) && lies_whole(v_params) && q.stride(2) == 1, "caches must be contiguous");
    int64_t half = is_bf16({&q, &k_kept, &v_kept});
    if (k_bits < 16) bytes(k, "k");
    else is_bf16({&q, &k});
    if (v_bits < 16) bytes(v, "v");
    else is_bf16({&q, &v});
    make_whole(pos, k_stop, v_stop);
    auto group = [&](const Maybe& x) { return x ? D / x->size(3) : D; };
    Tensor out = like(q, {B, Hq, D});
    if (B)
        kvf_quantized_attention(
            half, k_bits, v_bits, channels, q.data_ptr(), k.data_ptr(), halves(k_params, "k_params"), k_kept.data_ptr(),
            v.data_ptr(), halves(v_params, "v_params"), v_kept.data_ptr(), ints(pos, "pos"), ints(k_stop, "k_stop"),
            ints(v_stop, "v_stop"), out.data_ptr(), q.stride(0), q.stride(1), B, H, Hq / H, D, k.size(2), v.size(2),
            sinks, k_kept.size(2), channels ? D : group(k_params), group(v_params), threads());
    return out;
}

Tensor lowrank_attention(Tensor q, Tensor k, Tensor v, Tensor k_basis, Tensor v_basis, Tensor stored, Tensor k_full,
                         Tensor v_full, Tensor filled) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), H = k.size(1), F = k_full.size(2);
    for (auto x : {&k_basis, &v_basis, &k_full, &v_full})
        STD_TORCH_CHECK(lies_whole(*x), "bases and full-rank tokens must be contiguous");
    STD_TORCH_CHECK(k.stride(2) == 1 && v.stride(2) == 1 && k.stride(3) == v.stride(3) && q.stride(2) == 1,
                    "tokens must lie side by side");
    int64_t half = is_bf16({&q, &k, &v, &k_full, &v_full});
    make_whole(stored, filled);
    expect(ScalarType::Bool, filled, "filled");
    auto row = [](const Tensor& x) { return x.size(0) > 1 ? x.stride(0) : 0; };
    Tensor out = like(q, {B, Hq, D});
    if (B)
        kvf_lowrank_attention(half, q.data_ptr(), k.data_ptr(), v.data_ptr(), floats(k_basis, "k_basis"),
                              floats(v_basis, "v_basis"), ints(stored, "stored"), k_full.data_ptr(), v_full.data_ptr(),
                              (const uint8_t*)filled.data_ptr(), out.data_ptr(), q.stride(0), q.stride(1), k.stride(0),
                              k.stride(1), v.stride(0), v.stride(1), k.stride(3), row(k_basis), row(v_basis), B, H,
                              Hq / H, D, k.size(3), v.size(3), F, threads());
    return out;
}

Tensor group_attention(Tensor q, Tensor k, Maybe k_params, Tensor v, Maybe v_params, Tensor k_basis, Tensor v_basis,
                       Tensor k_bias, Tensor v_bias, Tensor pos, Tensor cos, Tensor sin, int64_t bits) {
    int64_t B = q.size(0), Hq = q.size(1), D = q.size(2), groups = k.size(1), R = k_basis.size(2);
    int64_t s = k_basis.size(1) / D, G = Hq / (groups * s);
    for (auto x : {&k, &v, &k_basis, &v_basis, &k_bias, &v_bias, &cos, &sin})
        STD_TORCH_CHECK(lies_whole(*x), "caches, bases and tables must be contiguous");
    STD_TORCH_CHECK(lies_whole(k_params) && lies_whole(v_params) && q.stride(2) == 1, "caches must be contiguous");
    int64_t half = is_bf16({&q, &k_basis, &v_basis});
    if (bits == 16) is_bf16({&q, &k, &v});
    else bytes(k, "k"), bytes(v, "v");
    make_whole(pos);
    Tensor out = like(q, {B, Hq, D}), mean = like(q, {B, Hq, R}, ScalarType::Float);
    if (B)
        kvf_group_attention(half, q.data_ptr(), k.data_ptr(), halves(k_params, "k_params"), v.data_ptr(),
                            halves(v_params, "v_params"), k_basis.data_ptr(), v_basis.data_ptr(),
                            floats(k_bias, "k_bias"), floats(v_bias, "v_bias"), ints(pos, "pos"), floats(cos, "cos"),
                            floats(sin, "sin"), (float*)mean.data_ptr(), out.data_ptr(), q.stride(0), q.stride(1),
                            cos.size(0) > 1 ? cos.stride(0) : 0, B, groups, s, G, D, k.size(2), R, bits, threads());
    return out;
}

Tensor oja_sequential(Tensor basis, Tensor x) {
    int64_t N = basis.size(0), D = basis.size(1), r = basis.size(2);
    make_whole(basis, x);
    Tensor out = like(basis, {N, D, r});
    kvf_oja_sequential(floats(x, "x"), floats(basis, "basis"), (float*)out.data_ptr(), N, x.size(1), D, r, threads());
    return out;
}

}  // namespace

#define OPERATORS(EACH)                                    \
    EACH(budget_select, budget_select)                     \
    EACH(channel_score, score_channels)                    \
    EACH(decode_attention, decode_attention)               \
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
    EACH(sequential, oja_sequential)                       \
    EACH(store_labels, store_labels)                       \
    EACH(top_p_count, top_p_count)                         \
    EACH(topk_select, topk_select)

// Under the names by which inductor calls what it is told of
#define DIRECT(name, f) extern "C" auto* const aoti_torch_cpu_##name = Operator<&f>::direct();
OPERATORS(DIRECT)

extern "C" void kvf_register() {  // they stay registered until the next library is loaded, and it registers its own
    using torch::stable::detail::StableLibrary;
    auto& lib = *new StableLibrary(StableLibrary::Kind::IMPL, "kv_fast", "CPU", __FILE__, __LINE__);
#define BOXED(name, f) lib.impl(#name ".cpp", &Operator<&f>::boxed);
    OPERATORS(BOXED)
}
