// What decode steps call for every layer, as torch operators: a call takes 10 to 20 us, where Python took 60 to 150;
// from a compiled step, which calls them as C functions, it takes 2 to 7 us less.
//
// They use torch's stable interface, which compiles in seconds. The files of kernels/ declare and document them; the
// classes of arguments, which check them, are those of tensor.h.
#include "tensor.h"

namespace {

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

Tensor like(const Tensor& q) { return like(q, {q.size(0), q.size(1), q.size(2)}); }

Tensor zero_counts(const Tensor& q, int64_t H) {  // int64 [B, H]
    Tensor made = like(q, {q.size(0), H}, ScalarType::Long);
    std::fill_n(data<int64_t>(made), made.numel(), 0);
    return made;
}

int64_t threads() { return torch::stable::get_num_threads(); }

// ---- operands, made of arguments ----

template <class T> Heads<T> heads_of(const InRows<T>& q, int64_t H, const Tensor& out) {
    return {.q = q.data(),
            .row = q.stride(0),
            .head = q.stride(1),
            .out = data<T>(out),
            .B = q.size(0),
            .H = H,
            .G = q.size(1) / H,
            .D = q.size(2),
            .threads = threads()};
}
template <class T> Cache<T> cache_of(const InRows<T>& x) {
    return {.at = x.data(), .row = x.stride(0), .head = x.stride(1), .slot = x.stride(2)};
}
// One row may be for the whole batch, and one list for all heads
template <class T> PerHead<T> per_head(T* at, const Tensor& x) {
    return {.at = at, .row = x.size(0) > 1 ? x.stride(0) : 0, .head = x.size(1) > 1 ? x.stride(1) : 0};
}
template <class T> PerHead<const T> per_head(const Strided<T>& x) { return per_head((const T*)x.data(), x); }
List list_of(const InRows<int64_t>& idx, const Strided<int64_t>& count) {
    return {.idx = per_head(idx), .count = per_head(count), .K = idx.size(2)};
}
Angles angles_of(const Strided<float>& cos, const Strided<float>& sin) {
    return {.cos = cos.data(), .sin = sin.data(), .row = cos.size(0) > 1 ? cos.stride(0) : 0};
}
ScoredRows rows_of(const InRows<float>& x, const int64_t* pos) {
    return {.at = per_head(x), .pos = pos, .B = x.size(0), .H = x.size(1), .T = x.size(2), .threads = threads()};
}

// Queries [B, H, C, R] of fp32 or bf16, converted to fp32 and padded with zeros to whole vectors
struct Queries : Tensor {
    Queries(Tensor&& x, Parameter of) : Tensor(std::move(x)) {
        const bool half = scalar_type() == ScalarType::BFloat16;
        numbers.resize(size(0) * size(1) * size(2) * whole(size(3)));
        if (half) convert(Small<bf16>(Tensor::lent(get()), of).data());
        else convert(Small<float>(Tensor::lent(get()), of).data());
    }
    Scored scored(int64_t n, const int64_t* pos) const {
        return {.q = numbers.data(),
                .B = size(0),
                .H = size(1),
                .C = size(2),
                .R = size(3),
                .n = n,
                .pos = pos,
                .threads = threads()};
    }

private:
    template <class T> void convert(const T* from) {
        const int64_t R = size(3);
        for (size_t i = 0; i < numbers.size(); i += whole(R))
            for (int64_t r = 0; r < R; r++) numbers[i + r] = number(*from++);
    }
    std::vector<float> numbers;
};

Logits logits_of(const InRows<float>& x, const Small<int64_t>& pos) {
    return {.at = x.data(),
            .row = x.stride(0),
            .head = x.stride(1),
            .query = x.stride(2),
            .B = x.size(0),
            .H = x.size(1),
            .G = x.size(2),
            .n = x.size(3),
            .pos = pos.data(),
            .threads = threads()};
}
Scores scores_of(const Tensor& out) {
    return {.at = data<float>(out), .row = out.stride(0), .head = out.stride(1), .query = out.stride(2)};
}

typedef std::tuple<Tensor, Tensor> Two;

}  // namespace

// ---- attention over a cache in full precision ----

template <class T>
static Tensor attend_slots(const InRows<T>& q, const InRows<T>& k, const InRows<T>& v, Range range, Means means) {
    Tensor out = like(q);
    attend_range(heads_of(q, k.size(1), out), cache_of(k), cache_of(v), range, means);
    return out;
}

OPERATOR(Tensor, decode_attention, InRows<T> q, InRows<T> k, InRows<T> v, Optional<Small<int64_t>> start,
         Small<int64_t> stop) {
    return attend_slots(q, k, v, Range{data(start), stop.data()}, Means{});
}

OPERATOR(Two, skipping_attention, InRows<T> q, InRows<T> k, InRows<T> v, Small<int64_t> stop, double scale,
         int64_t shortest) {
    Tensor out = like(q), read = zero_counts(q, k.size(1));
    const Skips skips{.read = data<int64_t>(read), .scale = scale, .shortest = shortest};
    if (q.size(0)) attend_skipping(heads_of(q, k.size(1), out), cache_of(k), cache_of(v), stop.data(), skips);
    return {std::move(out), std::move(read)};
}

OPERATOR(Tensor, packed_attention, InRows<T> q, InRows<T> k, InRows<T> v, Small<int64_t> stop,
         Optional<Small<float>> mean_k, Optional<Small<float>> mean_v, Optional<Small<int64_t>> count) {
    return attend_slots(q, k, v, Range{nullptr, stop.data()}, Means{data(mean_k), data(mean_v), data(count)});
}

OPERATOR(Tensor, verify_attention, Small<T> q, InRows<T> k, InRows<T> v, Optional<Small<int64_t>> start,
         Small<int64_t> stop) {
    const int64_t B = q.size(0), Hq = q.size(1), n = q.size(2), D = q.size(3), H = k.size(1);
    Tensor out = like(q, {B, Hq, n, D});
    const Heads<T> heads{.q = q.data(),
                         .row = Hq * n * D,
                         .head = D,
                         .out = data<T>(out),
                         .B = B,
                         .H = H,
                         .G = Hq / H * n,
                         .D = D,
                         .threads = threads()};
    attend_tokens(heads, cache_of(k), cache_of(v), Range{data(start), stop.data()}, n);
    return out;
}

// The slots of a row belong to one head after another: head h's begin at first[b, h], and the last N - filled[b] are
// free
static int64_t ragged_stop(const Stored<int64_t>& first, const Stored<int64_t>& filled, int64_t b, int64_t h,
                           int64_t N) {
    return first.data()[b * first.size(1) + h + 1] - N + filled.data()[b];
}

OPERATOR(void, ragged_append, SmallRows<T> k, SmallRows<T> v, Small<int64_t> pos, Stored<T> k_cache, Stored<T> v_cache,
         Stored<int32_t> place, Stored<int64_t> first, Stored<int64_t> filled) {
    const int64_t B = k.size(0), H = k.size(1), D = k.size(2), N = k_cache.size(2);
    for (int64_t b = 0; b < B; b++) {
        for (int64_t h = 0; h < H; h++) {
            const int64_t slot = b * H * N + std::min(ragged_stop(first, filled, b, h, N), H * N - 1);
            for (auto [cache, x] : {std::pair(&k_cache, &k), std::pair(&v_cache, &v)})
                std::memcpy(cache->data() + slot * D, x->data() + b * x->stride(0) + h * x->stride(1), D * sizeof(T));
            place.data()[slot] = (int32_t)pos.data()[b];
        }
        filled.data()[b]++;
    }
}

OPERATOR(Tensor, ragged_attention, Small<T> q, Stored<T> k, Stored<T> v, Stored<int64_t> first,
         Stored<int64_t> filled) {
    const int64_t B = q.size(0), D = q.size(2), H = k.size(1), N = k.size(2), G = q.size(1) / H;
    Tensor out = like(q);
    const Heads<T> heads{.q = q.data(),
                         .row = G * D,
                         .head = D,
                         .out = data<T>(out),
                         .B = B * H,  // heads are rows over the same slots
                         .H = 1,
                         .G = G,
                         .D = D,
                         .threads = threads()};
    std::vector<int64_t> start(B * H), stop(B * H);
    for (int64_t i = 0; i < B * H; i++) {
        const int64_t b = i / H, h = i % H;
        start[i] = b * H * N + first.data()[b * (H + 1) + h];
        stop[i] = b * H * N + ragged_stop(first, filled, b, h, N);
    }
    const auto slots = [D](const Stored<T>& x) { return Cache<T>{.at = x.data(), .row = 0, .head = 0, .slot = D}; };
    attend_range(heads, slots(k), slots(v), Range{start.data(), stop.data()}, Means{});
    return out;
}

OPERATOR(Two, observed_attention, InRows<T> q, InRows<T> k, InRows<T> v, Small<int64_t> stop) {
    const int64_t H = k.size(1), slots = k.size(2);
    Tensor out = like(q), weights = like(q, {q.size(0), H, slots}, ScalarType::Float);
    attend_observed(heads_of(q, H, out), cache_of(k), cache_of(v), stop.data(), data<float>(weights), slots);
    return {std::move(out), std::move(weights)};
}

OPERATOR(Tensor, gather_attention, InRows<T> q, InRows<T> k, InRows<T> v, InRows<int64_t> idx, Strided<int64_t> count) {
    Tensor out = like(q);
    attend_list(heads_of(q, k.size(1), out), cache_of(k), cache_of(v), list_of(idx, count));
    return out;
}

// ---- attention over compressed tokens ----

OPERATOR(Tensor, packed_gather_attention, InRows<T> q, Small<int64_t> idx, Small<int64_t> count, InBits<T> k,
         InBits<T> v, int64_t bits, Optional<Stored<uint16_t>> k_params, Optional<Stored<uint16_t>> v_params,
         Optional<Stored<float>> alpha, Optional<Stored<uint8_t>> codes, Stored<T> sink_k, Stored<T> sink_v,
         Stored<T> tail_k, Stored<T> tail_v, Small<int64_t> pos, Small<int64_t> prompt_len, Strided<int64_t> flushed) {
    Tensor out = like(q);
    const char *keys = k.data(bits), *values = v.data(bits);
    const Listed<T> listed{.bits = bits,
                           .packed = {.k = (const uint8_t*)keys,
                                      .v = (const uint8_t*)values,
                                      .k_params = data(k_params),
                                      .v_params = data(v_params),
                                      .signs = data(codes)},
                           .full_precision = {.k = (const T*)keys, .v = (const T*)values, .slots = k.size(2)},
                           .alpha = data(alpha)};
    const FullPrecision<T> sinks{.k = sink_k.data(), .v = sink_v.data(), .slots = sink_k.size(2)},
        ring{.k = tail_k.data(), .v = tail_v.data(), .slots = tail_k.size(2)};
    const List list{.idx = per_head(idx), .count = per_head(count), .K = idx.size(2)};
    attend_packed(heads_of(q, idx.size(1), out), list, listed, sinks, ring,
                  {.pos = pos.data(), .prompt = prompt_len.data(), .flushed = flushed.data()});
    return out;
}

OPERATOR(Tensor, latent_attention, InRows<T> q, Stored<T> basis, Stored<T> ring_k, InBits<T> ring_v,
         Optional<Stored<uint16_t>> ring_params, Stored<T> lead, Stored<T> rest, InBits<T> v,
         Optional<Stored<uint16_t>> params, Small<int64_t> pos, Optional<Small<int64_t>> idx,
         Optional<Small<int64_t>> count, Stored<float> cos, Stored<float> sin, int64_t ring_bits, int64_t bits,
         int64_t recent) {
    const int64_t B = q.size(0), R = ring_k.size(1), slots = lead.size(1), W = basis.size(1), H = W / q.size(2);
    STD_TORCH_CHECK(idx.has_value() == count.has_value(), "a list has a count");
    const int64_t *at = pos.data(), *many = data(count);
    std::vector<int64_t> stored(B);
    // without a list: all but the last slots, `recent` of them, which never hold anything
    const int64_t K = idx ? idx->size(2) : slots - recent;
    for (int64_t b = 0; b < B; b++) stored[b] = std::max<int64_t>(0, std::min(K, idx ? many[b] : at[b] + 1 - recent));
    Tensor out = like(q);
    const LatentSlots<T> ring{.lead = ring_k.data(),
                              .rest = ring_k.data(),  // none of it
                              .first = ring_k.size(2),
                              .second = 0,
                              .values = ring_v.data(ring_bits),
                              .params = data(ring_params),
                              .bits = ring_bits,
                              .W = W,
                              .slots = R},
        store{.lead = lead.data(),
              .rest = rest.data(),
              .first = lead.size(2),
              .second = rest.size(2),
              .values = v.data(bits),
              .params = data(params),
              .bits = bits,
              .W = W,
              .slots = slots};
    const Tokens tokens{.pos = at, .idx = data(idx), .count = stored.data(), .K = K, .recent = recent};
    if (B) attend_latents(heads_of(q, H, out), (const T*)basis.data(), ring, store, tokens, angles_of(cos, sin));
    return out;
}

OPERATOR(void, latent_append, Small<T> latents, Small<T> values, Small<int64_t> pos, Stored<T> ring_k, InBits<T> ring_v,
         Optional<Stored<uint16_t>> ring_params, Stored<T> lead, Stored<T> rest, InBits<T> v,
         Optional<Stored<uint16_t>> params, int64_t bits, int64_t recent) {
    const Latents<T> to{.ring = {.k = ring_k.data(),
                                 .v = ring_v.data(bits),
                                 .params = data(ring_params),
                                 .slots = ring_k.size(1),
                                 .rank = ring_k.size(2)},
                        .store = {.lead = lead.data(),
                                  .rest = rest.data(),
                                  .v = v.data(bits),
                                  .params = data(params),
                                  .slots = lead.size(1),
                                  .leading = lead.size(2),
                                  .others = rest.size(2)},
                        .bits = bits,
                        .width = values.size(1) * (values.dim() > 2 ? values.size(2) : 1),
                        .recent = recent};
    append_token(to, (const T*)latents.data(), (const T*)values.data(), pos.data(), pos.size(0));
}

// What codes stand for, or null: integers
static const float* book_of(const Optional<Stored<float>>& book, int64_t bits) {
    STD_TORCH_CHECK(!book || book->numel() == 1 << bits, "a book has an entry for each code");
    return data(book);
}

OPERATOR(void, quantized_append, Small<T> x, Small<int64_t> pos, InBits<T> packed, Optional<Stored<uint16_t>> params,
         Stored<T> kept, int64_t bits, int64_t sinks, int64_t block, double clip, Optional<Stored<float>> book) {
    const int64_t H = x.size(1), D = x.size(2), slots = packed.size(2), ring = kept.size(2) - sinks;
    STD_TORCH_CHECK(D % WHOLE == 0 && packed.size(3) * 8 == D * (bits == 16 ? 8 : bits), "no rows of ", D, " channels");
    const QuantizedHead<T> first{.packed = packed.data(bits),
                                 .params = data(params),
                                 .full_precision = kept.data(),
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
                  each = params ? params->numel() / params->size(0) / H : 0, *at = pos.data();
    const T* from = x.data();
#pragma omp parallel for num_threads(threads()) if (block)
    for (int64_t i = 0; i < x.size(0) * H; i++) {
        QuantizedHead<T> to = first;
        to.packed += i * slots * row, to.full_precision += i * (sinks + ring) * D;
        if (to.params) to.params += i * each;
        append_quantized(to, from + i * D, at[i / H]);
    }
}

template <class T>
static QuantizedCache<T> quantized_cache(const InBits<T>& x, const Optional<Stored<uint16_t>>& params,
                                         const Stored<T>& kept, int64_t bits, int64_t sinks, bool by_channel,
                                         const Optional<Stored<float>>& book, int64_t D) {
    return {.packed = x.data(bits),
            .params = data(params),
            .full_precision = kept.data(),
            .slots = x.size(2),
            .bits = bits,
            .group = params && !book && !by_channel ? D / params->size(3) : D,
            .sinks = sinks,
            .held = kept.size(2),
            .by_channel = by_channel,
            .book = book_of(book, bits),
            .share = book ? x.size(2) / params->size(2) : 1};
}

OPERATOR(Tensor, quantized_attention, InRows<T> q, InBits<T> k, Optional<Stored<uint16_t>> k_params, Stored<T> k_kept,
         int64_t k_bits, int64_t sinks, int64_t k_block, double, Optional<Stored<float>> k_book, InBits<T> v,
         Optional<Stored<uint16_t>> v_params, Stored<T> v_kept, int64_t v_bits, int64_t, int64_t, double,
         Optional<Stored<float>> v_book, Small<int64_t> pos, Small<int64_t> k_stop, Small<int64_t> v_stop,
         Optional<Stored<float>> bias) {
    Tensor out = like(q);
    const auto keys = quantized_cache(k, k_params, k_kept, k_bits, sinks, k_block && !k_book, k_book, q.size(2)),
               values = quantized_cache(v, v_params, v_kept, v_bits, sinks, false, v_book, q.size(2));
    const Ends ends{.pos = pos.data(), .k = k_stop.data(), .v = v_stop.data()};
    const Biases biases{.at = data(bias), .row = bias ? bias->size(2) : 0};
    if (q.size(0)) attend_quantized(heads_of(q, k_kept.size(1), out), keys, values, ends, biases);
    return out;
}

OPERATOR(Two, skipping_quantized_attention, InRows<T> q, InBits<T> k, Optional<Stored<uint16_t>> k_params,
         Stored<T> k_kept, int64_t k_bits, int64_t sinks, int64_t k_block, double, Optional<Stored<float>> k_book,
         InBits<T> v, Optional<Stored<uint16_t>> v_params, Stored<T> v_kept, int64_t v_bits, int64_t, int64_t, double,
         Optional<Stored<float>> v_book, Small<int64_t> pos, Small<int64_t> k_stop, Small<int64_t> v_stop,
         Optional<Stored<float>> bias, double scale, int64_t shortest) {
    Tensor out = like(q), read = zero_counts(q, k_kept.size(1));
    const auto keys = quantized_cache(k, k_params, k_kept, k_bits, sinks, k_block && !k_book, k_book, q.size(2)),
               values = quantized_cache(v, v_params, v_kept, v_bits, sinks, false, v_book, q.size(2));
    const Ends ends{.pos = pos.data(), .k = k_stop.data(), .v = v_stop.data()};
    const Biases biases{.at = data(bias), .row = bias ? bias->size(2) : 0};
    const Skips skips{.read = data<int64_t>(read), .scale = scale, .shortest = shortest};
    if (q.size(0)) attend_quantized(heads_of(q, k_kept.size(1), out), keys, values, ends, biases, skips);
    return {std::move(out), std::move(read)};
}

template <class T> static Tensor lowrank(const InRows<T>& q, const Strided<T>& k, const Strided<T>& v,
                                         const Stored<float>& k_basis, const Stored<float>& v_basis,
                                         const int64_t* stored, const Stored<T>& k_full, const Stored<T>& v_full,
                                         const bool* filled, const Skips& skips = {}) {
    STD_TORCH_CHECK(k.stride(2) == 1 && v.stride(2) == 1 && k.stride(3) == v.stride(3), "tokens must lie side by side");
    Tensor out = like(q);
    const auto latent = [](const Strided<T>& x, const Stored<float>& basis) {
        return Latent<T>{.at = x.data(),
                         .row = x.stride(0),
                         .head = x.stride(1),
                         .chan = x.stride(3),
                         .rank = x.size(3),
                         .basis = per_head(basis)};
    };
    const Filled<T> full{.k = k_full.data(), .v = v_full.data(), .filled = (const uint8_t*)filled, .F = k_full.size(2)};
    if (q.size(0))
        attend_lowrank(heads_of(q, k.size(1), out), latent(k, k_basis), latent(v, v_basis), stored, full, skips);
    return out;
}

OPERATOR(Tensor, lowrank_attention, InRows<T> q, Strided<T> k, Strided<T> v, Stored<float> k_basis,
         Stored<float> v_basis, Small<int64_t> stored, Stored<T> k_full, Stored<T> v_full, Small<bool> filled) {
    return lowrank(q, k, v, k_basis, v_basis, stored.data(), k_full, v_full, filled.data());
}

OPERATOR(Two, skipping_lowrank_attention, InRows<T> q, Strided<T> k, Strided<T> v, Stored<float> k_basis,
         Stored<float> v_basis, Small<int64_t> stored, Stored<T> k_full, Stored<T> v_full, Small<bool> filled,
         Small<int64_t> length, double scale, int64_t shortest) {
    Tensor read = zero_counts(q, k.size(1));
    const Skips skips{.read = data<int64_t>(read), .scale = scale, .shortest = shortest, .length = length.data()};
    return {lowrank(q, k, v, k_basis, v_basis, stored.data(), k_full, v_full, filled.data(), skips), std::move(read)};
}

OPERATOR(Tensor, group_attention, InRows<T> q, InBits<T> k, Optional<Stored<uint16_t>> k_params, InBits<T> v,
         Optional<Stored<uint16_t>> v_params, Stored<T> k_basis, Stored<T> v_basis, Stored<float> k_bias,
         Stored<float> v_bias, Small<int64_t> pos, Stored<float> cos, Stored<float> sin, int64_t bits) {
    const int64_t B = q.size(0), groups = k.size(1), R = k_basis.size(2);
    const int64_t H = groups * (k_basis.size(1) / q.size(2));  // heads whose keys are made from coordinates
    Tensor out = like(q), mean = like(q, {B, q.size(1), R}, ScalarType::Float);
    const auto grouped = [&](const InBits<T>& x, const uint16_t* pairs, const Stored<T>& basis, const float* bias) {
        return Grouped<T>{.data = x.data(bits),
                          .params = pairs,
                          .basis = basis.data(),
                          .bias = bias,
                          .slots = x.size(2),
                          .R = R,
                          .bits = bits};
    };
    const auto keys = grouped(k, data(k_params), k_basis, k_bias.data()),
               values = grouped(v, data(v_params), v_basis, v_bias.data());
    if (B) attend_groups(heads_of(q, H, out), groups, keys, values, pos.data(), angles_of(cos, sin), data<float>(mean));
    return out;
}

// ---- selection ----

template <class Mask> static Two select_tokens(const ScoredRows& rows, const Tensor& scores, const Mask& mask,
                                               const Strided<int64_t>& wanted, int64_t k, Forced forced) {
    const int64_t K = std::min(k, rows.T);
    Tensor idx = like(scores, {rows.B, rows.H, K}, ScalarType::Long),
           count = like(scores, {rows.B, rows.H}, ScalarType::Long);
    PerHead<const int64_t> want{.at = wanted.data(), .row = wanted.stride(0)};  // [B], or [B, H]
    if (wanted.dim() > 1) want = per_head(wanted);
    select_largest(rows, mask, want, forced, {.idx = data<int64_t>(idx), .count = data<int64_t>(count), .K = K});
    return {std::move(idx), std::move(count)};
}

OPERATOR(Two, topk_select, SmallRows<float> scores, Small<bool> mask, int64_t k, Strided<int64_t> count) {
    const auto allowed = per_head((const uint8_t*)mask.data(), mask);
    return select_tokens(rows_of(scores, nullptr), scores, allowed, count, k, {.sinks = 0, .recent = 0});
}

OPERATOR(Two, budget_select, SmallRows<float> scores, Small<int64_t> pos, Strided<int64_t> wanted, int64_t k,
         int64_t sinks, int64_t recent) {
    return select_tokens(rows_of(scores, pos.data()), scores, PerHead<const uint8_t>{}, wanted, k,
                         {.sinks = sinks, .recent = recent});
}

OPERATOR(Two, page_select, SmallRows<float> scores, Small<int64_t> pos, Strided<int64_t> wanted, int64_t page,
         int64_t k, int64_t last, int64_t sinks, int64_t recent) {
    const int64_t B = scores.size(0), H = scores.size(1), most = std::max<int64_t>(1, k / page - 1);
    std::vector<int64_t> before(B), others(B * H);  // the newest page comes last, whatever its score
    for (int64_t b = 0; b < B; b++) {
        before[b] = pos.data()[b] / page - 1;
        for (int64_t h = 0; h < H; h++) {
            const int64_t head = wanted.dim() > 1 && wanted.size(1) > 1 ? h * wanted.stride(1) : 0;
            others[b * H + h] = wanted.data()[b * wanted.stride(0) + head] - 1;
        }
    }
    const int64_t K = std::min(most, scores.size(2));
    std::vector<int64_t> pages(B * H * K);
    Tensor idx = like(scores, {B, H, k}, ScalarType::Long), count = like(scores, {B, H}, ScalarType::Long);
    int64_t *slots = data<int64_t>(idx), *n = data<int64_t>(count);
    select_largest(rows_of(scores, before.data()), {}, {.at = others.data(), .row = H, .head = 1},
                   {.sinks = sinks, .recent = recent}, {.idx = pages.data(), .count = n, .K = K});
    for (int64_t i = 0; i < B * H; i++, slots += k) {
        const int64_t at = pos.data()[i / H], first = n[i] * page, start = at / page * page;
        for (int64_t t = 0; t < k; t++)
            slots[t] = t < first ? pages[i * K + t / page] * page + t % page : std::min(start + t - first, last);
        n[i] = first + at % page + 1;
    }
    return {std::move(idx), std::move(count)};
}

OPERATOR(Tensor, choosers_last, Small<int64_t> pos, Stored<int64_t> heads, Stored<int64_t> source,
         Stored<int64_t> number, int64_t first_head, int64_t steps, int64_t recent) {
    const int64_t B = pos.numel(), H = heads.size(1), layer = *number.data();
    Tensor last = like(pos, {B, H});
    for (int64_t i = 0; i < B * H; i++) {
        const int64_t b = i / H, at = pos.data()[b];
        const bool chooses = (at + 1) % steps == 0 && source.data()[layer * source.size(1) + b] == layer &&
                             heads.data()[i] == first_head + i % H;
        data<int64_t>(last)[i] = chooses ? std::max<int64_t>(at - recent, -1) : -1;
    }
    return last;
}

OPERATOR(Two, take_sets, SmallRows<int64_t> idx, Small<int64_t> count, Small<int64_t> pos, Stored<int64_t> heads,
         Stored<int64_t> source, Stored<int64_t> number, Stored<int64_t> sets, Stored<int64_t> counts,
         Stored<int64_t> newer, int64_t steps, int64_t recent, int64_t last, int64_t k) {
    const int64_t B = pos.numel(), H = heads.size(1), n = sets.size(3), layer = *number.data();
    const auto place = [&](int64_t of, int64_t b, int64_t h) { return (of * sets.size(1) + b) * H + h; };
    Tensor run = like(pos, {B, H, k}), taken = like(pos, {B, H});
    int64_t *to = data<int64_t>(run), *many = data<int64_t>(taken);
    for (int64_t b = 0; b < B; b++) {
        const int64_t at = pos.data()[b], of = source.data()[layer * source.size(1) + b];
        const bool due = (at + 1) % steps == 0;
        int64_t& first = newer.data()[b];
        if (due) first = std::max<int64_t>(at + 1 - recent, 0);
        for (int64_t h = 0; h < H; h++, to += k, many++) {
            int64_t *set = sets.data() + place(layer, b, h) * n, &size = counts.data()[place(layer, b, h)];
            if (due && of != layer) {
                std::copy_n(sets.data() + place(of, b, h) * n, n, set), size = counts.data()[place(of, b, h)];
            } else if (due) {
                const int64_t head = heads.data()[b * H + h];
                std::copy_n(idx.data() + b * idx.stride(0) + head * idx.stride(1), n, set);
                size = count.data()[b * count.size(1) + head];
            }
            for (int64_t t = 0; t < k; t++) to[t] = t < size ? set[t] : std::min(first + t - size, last);
            *many = size + at - first + 1;
        }
    }
    return {std::move(run), std::move(taken)};
}

OPERATOR(Tensor, top_p_count, SmallRows<float> weights, Small<int64_t> pos, double p, int64_t sinks, int64_t recent) {
    Tensor count = like(weights, {weights.size(0), weights.size(1)}, ScalarType::Long);
    count_nucleus(rows_of(weights, pos.data()), p, {.sinks = sinks, .recent = recent}, data<int64_t>(count));
    return count;
}

// ---- scores ----

// Scores [B, H, T] of codes [B, H, T, W]; `of` has the table and its parameters
static Tensor looked_up(LookedUp of, const Tensor& like_this, const Strided<uint8_t>& codes) {
    STD_TORCH_CHECK(codes.stride(3) == 1 && codes.stride(2) == codes.size(3), "the codes of a head must be contiguous");
    of.codes = per_head(codes);
    of.T = codes.size(2), of.W = codes.size(3), of.threads = threads();
    Tensor out = rows_like(like_this, {of.B, of.H}, of.T);
    look_up(of, per_head(data<float>(out), out));
    return out;
}

static int64_t entries_of(int64_t codes) { return (codes + 7) / 8 * 8 * ENTRIES; }  // of a table, for 8 codes at a time

OPERATOR(Tensor, lut_score, InRows<T> q, Small<float> book, Strided<uint8_t> packed, Optional<Small<int64_t>> pos,
         Optional<Small<int64_t>> skip) {
    const int64_t B = q.size(0), D = q.size(2), H = book.size(1), G = q.size(1) / H, C = D / 4, n = entries_of(C);
    STD_TORCH_CHECK(packed.size(3) * 8 == D, "q must have 8 channels for a byte of codes");
    std::vector<float> table(B * H * n), query(D);
    for (int64_t group = 0; group < B * H; group++) {
        const T* from = q.data() + group / H * q.stride(0) + group % H * G * q.stride(1);
        std::fill(query.begin(), query.end(), 0.0f);
        for (int64_t g = 0; g < G; g++)
            for (int64_t d = 0; d < D; d++) query[d] += number(from[g * q.stride(1) + d]);
        for (float& x : query) x /= G;
        for (int64_t c = 0; c < C; c++)
            for (int i = 0; i < ENTRIES; i++) {
                const float *of = book.data() + ((group * C + c) * ENTRIES + i) * 4, *x = &query[c * 4];
                table[group * n + c * ENTRIES + i] = of[0] * x[0] + of[1] * x[1] + of[2] * x[2] + of[3] * x[3];
            }
    }
    const LookedUp of{.table = table.data(),
                      .pos = data(pos),
                      .skip = data(skip),
                      .n_skip = skip ? skip->size(2) : 0,
                      .B = B,
                      .H = H};
    return looked_up(of, q, packed);
}

// A label of 4 bits looks up its product with the query, one of 2 bits together with its neighbour's
OPERATOR(Tensor, label_score, Small<float> q, Strided<uint8_t> labels, Strided<uint16_t> params, int64_t bits,
         Optional<Small<int64_t>> pos) {
    const int64_t B = q.size(0), H = q.size(1), r = q.size(2), C = labels.size(3) * 2, n = entries_of(C);
    STD_TORCH_CHECK((bits == 2 || bits == 4) && r * bits == labels.size(3) * 8, "labels of 2 or 4 bits are needed");
    STD_TORCH_CHECK(params.stride(3) == 1 && params.stride(2) == 2, "params of a head must be contiguous");
    std::vector<float> table(B * H * n), total(B * H);
    for (int64_t group = 0; group < B * H; group++) {
        const float* x = q.data() + group * r;
        for (int64_t i = 0; i < r; i++) total[group] += x[i];
        for (int64_t c = 0; c < C; c++)
            for (int i = 0; i < ENTRIES; i++)
                table[group * n + c * ENTRIES + i] =
                    bits == 4 ? x[c] * i : x[2 * c] * (i & 3) + x[2 * c + 1] * (i >> 2);
    }
    const LookedUp of{
        .table = table.data(), .params = per_head(params), .total = total.data(), .pos = data(pos), .B = B, .H = H};
    return looked_up(of, q, labels);
}

OPERATOR(Tensor, label_queries, SmallRows<T> q, Small<int64_t> channels) {
    const int64_t B = q.size(0), H = channels.size(0), r = channels.size(1), G = q.size(1) / H;
    Tensor out = like(q, {B, H, r}, ScalarType::Float);
    for (int64_t i = 0; i < B * H * r; i++) {
        const int64_t h = i / r % H;
        const T* from = q.data() + i / (H * r) * q.stride(0) + h * G * q.stride(1) + channels.data()[i % (H * r)];
        float x = 0;
        for (int64_t g = 0; g < G; g++) x += number(from[g * q.stride(1)]);
        data<float>(out)[i] = x;
    }
    return out;
}

OPERATOR(void, store_labels, InRows<T> k, Small<int64_t> channels, Optional<Small<int64_t>> start,
         Strided<uint8_t> labels, Strided<uint16_t> params, int64_t bits) {
    const int64_t H = k.size(1), S = k.size(2), r = channels.size(1), W = labels.size(3), *at = data(start);
    STD_TORCH_CHECK(labels.stride(3) == 1 && labels.stride(2) == W && W * 8 == r * bits,
                    "the labels of a head must be contiguous, of ", r, " channels");
    STD_TORCH_CHECK(params.stride(3) == 1 && params.stride(2) == 2, "params of a head must be contiguous");
#pragma omp parallel for num_threads(threads()) if (S > 1)
    for (int64_t i = 0; i < k.size(0) * H; i++) {
        int64_t b = i / H, h = i % H, first = at ? at[b] : 0;
        const T* from = k.data() + b * k.stride(0) + h * k.stride(1);
        const int64_t* which = channels.data() + h * r;
        std::vector<float> x(r);
        std::vector<uint8_t> codes(r);
        for (int64_t s = 0; s < S; s++, from += k.stride(2)) {
            for (int64_t c = 0; c < r; c++) x[c] = number(from[which[c]]);
            codes_of(x.data(), r, 1, bits, 1, codes.data(),
                     params.data() + b * params.stride(0) + h * params.stride(1) + (first + s) * 2);
            pack_codes(codes.data(), r, bits,
                       labels.data() + b * labels.stride(0) + h * labels.stride(1) + (first + s) * W);
        }
    }
}

OPERATOR(Tensor, head_scores, Queries q, InRows<T> x, Optional<Small<int64_t>> pos) {
    STD_TORCH_CHECK(q.size(3) % WHOLE == 0 || x.stride(2) == q.size(3), "rows must be whole vectors, or contiguous");
    Tensor out = rows_like(q, {q.size(0), q.size(1), q.size(2)}, x.size(2));
    head_scores(q.scored(x.size(2), data(pos)), cache_of(x), scores_of(out));
    return out;
}

OPERATOR(Tensor, joint_score, SmallRows<T> q, Stored<T> basis, InRows<T> latents, Small<int64_t> pos) {
    const int64_t B = q.size(0), D = q.size(2), W = basis.size(1), H = W / D, G = q.size(1) / H, R = latents.size(2);
    STD_TORCH_CHECK(latents.stride(1) == R && basis.size(0) >= R, "a query of ", R, " coordinates is needed");
    Tensor out = rows_like(q, {B, 1}, latents.size(1));
    std::vector<float> sums(W), latent_q(B * whole(R));
    for (int64_t b = 0; b < B; b++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t i = 0; i < H * G; i++) {
            const T* from = q.data() + b * q.stride(0) + i * q.stride(1);
            float* to = &sums[i / G * D];
            for (int64_t d = 0; d < D; d++) to[d] += number(from[d]);
        }
        for (int64_t r = 0; r < R; r++) {
            vf product = {};
            for (int64_t w = 0; w < W; w += L) product += load(&sums[w]) * load(basis.data() + r * W + w);
            latent_q[b * whole(R) + r] = sum(product);
        }
    }
    const Scored of{.q = latent_q.data(),
                    .B = B,
                    .H = 1,
                    .C = 1,
                    .R = R,
                    .n = latents.size(1),
                    .pos = pos.data(),
                    .threads = threads()};
    const Cache<T> rows{.at = latents.data(), .row = latents.stride(0), .head = 0, .slot = R};
    head_scores(of, rows, {.at = data<float>(out), .row = out.stride(0), .head = 0, .query = 0});
    return out;
}

OPERATOR(Tensor, page_score, InRows<T> q, InRows<T> low, InRows<T> high, Optional<Small<int64_t>> last) {
    const int64_t H = low.size(1), pages = low.size(2);
    Tensor out = rows_like(q, {q.size(0), H}, pages);
    page_scores(heads_of(q, H, q), cache_of(low), cache_of(high), pages, data(last), per_head(data<float>(out), out));
    return out;
}

OPERATOR(Tensor, distinct_keys, InRows<T> k, Small<int64_t> filled) {
    const int64_t B = filled.numel(), H = k.size(1), N = k.size(2);
    Tensor out = like(k, {B, H, N}, ScalarType::Float);
    distinct(cache_of(k), filled.data(), B, H, N, k.size(3), threads(), data<float>(out));
    return out;
}

OPERATOR(Tensor, channel_score, Queries q, Small<int64_t> channels, InRows<T> keys, Small<int64_t> pos) {
    Tensor out = rows_like(q, {q.size(0), q.size(1), q.size(2)}, keys.size(3));
    channel_scores(q.scored(keys.size(3), pos.data()), channels.data(), cache_of(keys), scores_of(out));
    return out;
}

OPERATOR(Two, largest_channels, SmallRows<T> q, int64_t H, int64_t r, bool bounds) {
    const int64_t B = q.size(0), G = q.size(1) / H, D = q.size(2);
    STD_TORCH_CHECK(r > 0 && r <= D, r, " channels of ", D);
    Tensor few = like(q, {B, H, G, r}, ScalarType::Float), channels = like(q, {B, H, r}, ScalarType::Long);
    int64_t* at = data<int64_t>(channels);
    float* to = data<float>(few);
    std::vector<float> size(D);
    std::vector<int64_t> order(D);
    for (int64_t i = 0; i < B * H; i++, at += r) {
        const T* group = q.data() + i / H * q.stride(0) + i % H * G * q.stride(1);
        std::fill(size.begin(), size.end(), 0.0f);
        for (int64_t g = 0; g < G; g++)
            for (int64_t d = 0; d < D; d++) size[d] += std::fabs(number(group[g * q.stride(1) + d]));
        for (int64_t d = 0; d < D; d++) order[d] = d;
        std::nth_element(order.begin(), order.begin() + (r - 1), order.end(),
                         [&](int64_t a, int64_t b) { return size[a] != size[b] ? size[a] > size[b] : a < b; });
        std::copy_n(order.begin(), r, at);
        for (int64_t g = 0; g < G; g++, to += r) {
            const T* x = group + g * q.stride(1);
            float all = 0, own = 0;
            for (int64_t d = 0; d < D; d++) all += std::fabs(number(x[d]));
            for (int64_t c = 0; c < r; c++) to[c] = number(x[at[c]]), own += std::fabs(to[c]);
            const float by = std::sqrt(std::max(own / std::max(all, 1e-30f) * D, 1e-30f));
            for (int64_t c = 0; c < r; c++) to[c] /= by;
        }
        for (int64_t c = 0; bounds && c < r; c++) {
            float sum = 0;
            for (int64_t g = 0; g < G; g++) sum += number(group[g * q.stride(1) + at[c]]);
            if (sum > 0) at[c] += D;
        }
    }
    return {std::move(few), std::move(channels)};
}

OPERATOR(Tensor, group_weights, SmallRows<float> logits, Small<int64_t> pos) {
    const Logits of = logits_of(logits, pos);
    Tensor out = like(logits, {of.B, of.H, of.n});
    mean_softmax(of, data<float>(out));
    return out;
}

// ---- the mean value ----

OPERATOR(void, join_mean, SmallRows<T> x, Stored<float> mean, Small<int64_t> pos) {
    float* to = mean.data();
    for (int64_t i = 0, H = x.size(1), D = x.size(2); i < x.size(0) * H; i++, to += D) {
        const int64_t b = i / H, n = pos.data()[b];
        const T* from = x.data() + b * x.stride(0) + i % H * x.stride(1);
        for (int64_t d = 0; d < D; d++) {
            const float old = n > 0 ? to[d] : 0;
            to[d] = old + (number(from[d]) - old) / (float)(n + 1);
        }
    }
}

OPERATOR(void, attended_share, SmallRows<float> logits, SmallRows<int64_t> idx, Strided<int64_t> count,
         Small<int64_t> pos, Stored<float> share) {
    listed_share(logits_of(logits, pos), list_of(idx, count), share.data());
}

OPERATOR(Tensor, with_mean, SmallRows<T> y, Stored<float> share, Stored<float> mean) {
    const int64_t heads = y.size(1), D = y.size(2), each = heads / mean.size(1);
    Tensor out = like(y);
    for (int64_t i = 0; i < y.size(0) * heads; i++) {
        const T* from = y.data() + i / heads * y.stride(0) + i % heads * y.stride(1);
        const float own = share.data()[i], *rest = mean.data() + i / each * D;
        T* to = data<T>(out) + i * D;
        for (int64_t d = 0; d < D; d++) put_number(to + d, own * number(from[d]) + (1 - own) * rest[d]);
    }
    return out;
}

// ---- products with weights ----

// [..., outputs] for x [..., inputs]; outputs may be of several dimensions
static Tensor products_like(const Tensor& x, std::initializer_list<int64_t> outputs) {
    std::vector<int64_t> size;
    for (int64_t d = 0; d < x.dim() - 1; d++) size.push_back(x.size(d));
    size.insert(size.end(), outputs);
    return like(x, size);
}

OPERATOR(Tensor, dense_linear, Small<T> x, Stored<T> weight, Optional<Stored<T>> bias) {
    const int64_t n = x.size(x.dim() - 1), out = weight.size(0);
    STD_TORCH_CHECK(weight.size(1) == n && n % WHOLE == 0 && (!bias || bias->size(0) == out), "no weight of ", n,
                    " inputs");
    Tensor y = products_like(x, {out});
    const DenseWeight<T> of{.w = weight.data(), .bias = data(bias), .in = n, .out = out};
    dense(of, (const T*)x.data(), data<T>(y), x.numel() / n, (int)threads());
    return y;
}

constexpr int64_t FROM_TILES = 8;  // rows from which tiles of bf16 weights are faster than vectors
constexpr int64_t MANY = 32;  // rows from which a matrix product of unpacked rows is faster than unpacking in registers
// numbers that are unpacked for one matrix product: 8 MB in fp32, which caches hold
constexpr int64_t UNPACKED_AT_ONCE = 1 << 21;

// The same memory as a matrix [rows, columns] with rows `stride` numbers apart
static Tensor matrix(const Tensor& x, int64_t rows, int64_t columns, int64_t stride, int64_t first = 0) {
    const int64_t size[] = {rows, columns}, strides[] = {stride, 1};
    AtenTensorHandle view;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), 2, size, strides, first, &view));
    return Tensor::made(view);
}

// The groups' numbers, fp16 or int8 that counts fp16 steps, which 1, 2, 4, 8 ... groups share; fp32 of 8-bit floats
static PerGroup per_group(const Maybe& x, const Optional<Stored<uint16_t>>& step, const char* name, bool wide = false) {
    const int64_t n = step ? x->size(1) / step->size(1) : 1;
    const ScalarType type = step ? ScalarType::Char : wide ? ScalarType::Float : ScalarType::Half;
    STD_TORCH_CHECK(!x || (x->is_contiguous() && x->scalar_type() == type), name, " must be contiguous, of dtype ",
                    torch::headeronly::toString(type));
    STD_TORCH_CHECK(!step || (n * step->size(1) == x->size(1) && !(n & (n - 1))), name,
                    ": 1, 2, 4, 8 ... groups share a step");
    return {.at = x ? data<char>(*x) : nullptr, .step = data(step), .shift = __builtin_ctzll(n), .wide = wide};
}

// y = x W^T + bias by torch's product with unpacked rows, some blocks at a time
template <class T> static void multiply_unpacked(const Weight& w, int64_t bits, const Tensor& x, const float* bias,
                                                 Tensor& y, int64_t blocks) {
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

// The packed weight of n inputs; bits become E4M3 for 8-bit floats
static Weight packed_weight(const Tensor& packed, const Maybe& scale, const Optional<Stored<uint16_t>>& step,
                            const Optional<Stored<uint8_t>>& zero, const Maybe& minimum,
                            const Optional<Stored<uint16_t>>& min_step, int64_t n, int64_t& bits) {
    const int64_t blocks = packed.size(0), groups = scale ? scale->size(1) : 1;
    STD_TORCH_CHECK(packed.numel() * 8 == blocks * n * SIDE * bits, "the packed weight is not one of ", n,
                    " inputs in ", bits, " bits");
    STD_TORCH_CHECK(!zero || (bits == 4 && zero->numel() * 2 == scale->numel()),
                    "a zero is of 4-bit codes, and has 4 bits");
    STD_TORCH_CHECK(!minimum || (scale && minimum->numel() == scale->numel() && !zero),
                    "a group has one minimum, or a zero");
    const bool floats = packed.scalar_type() == ScalarType::Float8_e4m3fn;
    STD_TORCH_CHECK(packed.is_contiguous() && (floats || packed.scalar_type() == ScalarType::Byte),
                    "packed must be contiguous, bytes or 8-bit floats");
    if (floats) bits = E4M3;
    return {.codes = data<uint8_t>(packed),
            .scale = per_group(scale, step, "scale", floats),
            .zero = data(zero),
            .minimum = per_group(minimum, min_step, "minimum"),
            .in = n,
            .group = n / groups};
}

OPERATOR(Tensor, packed_linear, Small<T> x, Tensor packed, Maybe scale, Optional<Stored<uint16_t>> step,
         Optional<Stored<uint8_t>> zero, Maybe minimum, Optional<Stored<uint16_t>> min_step,
         Optional<Stored<float>> bias, int64_t bits) {
    const int64_t n = x.size(x.dim() - 1), M = x.numel() / n, blocks = packed.size(0);
    Tensor y = products_like(x, {blocks * SIDE});
    const Weight w = packed_weight(packed, scale, step, zero, minimum, min_step, n, bits);
    const bool own = M >= MANY ? kvf_own_ways && kvf_has_many_rows(bits) : bits == 16 && M >= FROM_TILES && has_tiles();
    if (!own && M >= MANY) multiply_unpacked<T>(w, bits, x, data(bias), y, blocks);
    else {
        const Product<T> of{
            .x = x.data(), .bias = data(bias), .y = data<T>(y), .M = M, .blocks = blocks, .threads = threads()};
        by_bits(bits, [&](auto constant) { own ? many_rows<constant>(w, of) : linear<constant>(w, of); });
    }
    return y;
}

// f(expert, its rows of x and of y, their number), for each expert that a row is for
template <class T, class F>
static void by_expert(const Stored<int64_t>& expert, int64_t experts, const Small<T>& x, Tensor& y, F f) {
    const int64_t N = x.size(0), in = x.size(1), out = y.size(1);
    STD_TORCH_CHECK(expert.numel() == N, "an expert is needed for each of ", N, " rows");
    std::vector<std::vector<int64_t>> rows(experts);
    for (int64_t n = 0; n < N; n++) {
        const int64_t e = expert.data()[n];
        STD_TORCH_CHECK(e >= 0 && e < experts, "there is no expert ", e);
        rows[e].push_back(n);
    }
    const T* from = x.data();
    T* to = data<T>(y);
    std::vector<T> xs, ys;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t count = rows[e].size();
        if (count == 1) f(e, from + rows[e][0] * in, to + rows[e][0] * out, count);
        if (count < 2) continue;
        xs.resize(count * in), ys.resize(count * out);
        for (int64_t i = 0; i < count; i++) std::copy_n(from + rows[e][i] * in, in, xs.data() + i * in);
        f(e, (const T*)xs.data(), ys.data(), count);
        for (int64_t i = 0; i < count; i++) std::copy_n(ys.data() + i * out, out, to + rows[e][i] * out);
    }
}

OPERATOR(Tensor, dense_experts, Small<T> x, Stored<int64_t> expert, Stored<T> weight, int64_t experts) {
    const int64_t n = x.size(1), out = weight.size(0) / experts;
    STD_TORCH_CHECK(weight.size(1) == n && n % WHOLE == 0, "no weight of ", n, " inputs");
    Tensor y = products_like(x, {out});
    by_expert(expert, experts, x, y, [&](int64_t e, const T* from, T* to, int64_t M) {
        dense(DenseWeight<T>{.w = weight.data() + e * out * n, .bias = nullptr, .in = n, .out = out}, from, to, M,
              (int)threads());
    });
    return y;
}

OPERATOR(Tensor, packed_experts, Small<T> x, Stored<int64_t> expert, Tensor packed, Maybe scale,
         Optional<Stored<uint16_t>> step, Optional<Stored<uint8_t>> zero, Maybe minimum,
         Optional<Stored<uint16_t>> min_step, int64_t bits, int64_t experts) {
    const int64_t n = x.size(1), blocks = packed.size(0) / experts, bytes = n * SIDE * bits / 8;
    Tensor y = products_like(x, {blocks * SIDE});
    const Weight all = packed_weight(packed, scale, step, zero, minimum, min_step, n, bits);
    by_expert(expert, experts, x, y, [&](int64_t e, const T* from, T* to, int64_t M) {
        const Weight w = all.from(e * blocks, bytes);
        const Product<T> of{.x = from, .bias = nullptr, .y = to, .M = M, .blocks = blocks, .threads = threads()};
        by_bits(bits, [&](auto constant) { linear<constant>(w, of); });
    });
    return y;
}

// ---- a layer's products with what stands between them ----

namespace {

// A matrix of a layer, packed in `bits`, or with bits = 0 of numbers T
template <class T> struct Matrix {
    int64_t in, out, bits;
    Weight packed = {};
    DenseWeight<T> dense = {};
    const float* bias = nullptr;

    Matrix(int64_t n, int64_t bits, const Tensor& weight, const Maybe& scale, const Optional<Stored<uint16_t>>& step,
           const Optional<Stored<uint8_t>>& zero, const Maybe& minimum, const Optional<Stored<uint16_t>>& min_step,
           const Maybe& bias)
        : in(n), out(weight.size(0) * (bits ? SIDE : 1)), bits(bits) {
        if (bias) check(*bias, {"bias", 0}, bits ? TYPE<float> : TYPE<T>, CONTIGUOUS);
        STD_TORCH_CHECK(n % WHOLE == 0 && (!bias || bias->numel() >= out), "no weight and bias of ", n, " inputs");
        if (bits) {
            packed = packed_weight(weight, scale, step, zero, minimum, min_step, n, this->bits);
            this->bias = bias ? data<float>(*bias) : nullptr;
        } else {
            check(weight, {"weight", 0}, TYPE<T>, CONTIGUOUS);
            STD_TORCH_CHECK(weight.size(1) == n, "no weight of ", n, " inputs");
            dense = {.w = data<T>(weight), .bias = bias ? data<T>(*bias) : nullptr, .in = n, .out = out};
        }
    }

    void multiply(const T* x, T* y, int64_t M) const {  // y [M][out] = x [M][in] W^T + bias
        if (!bits) return ::dense(dense, x, y, M, (int)threads());
        const Product<T> of{.x = x, .bias = bias, .y = y, .M = M, .blocks = out / SIDE, .threads = threads()};
        const bool tiles = bits == 16 && M >= FROM_TILES && has_tiles();
        by_bits(bits, [&](auto constant) { tiles ? many_rows<constant>(packed, of) : linear<constant>(packed, of); });
    }
};

// Room for a layer's intermediate numbers, kept for the next layer
template <class T> T* kept(int which, int64_t n) {
    thread_local std::vector<T> rooms[2];
    if ((int64_t)rooms[which].size() < n) rooms[which].resize(n);
    return rooms[which].data();
}

template <class T> void norm_rows(const T* x, const Stored<T>& weight, T* y, int64_t M, int64_t n, double eps) {
    STD_TORCH_CHECK(weight.numel() == n && n % WHOLE == 0, "a norm of ", weight.numel(), " numbers, not of ", n);
    for (int64_t m = 0; m < M; m++) rms_norm(x + m * n, weight.data(), y + m * n, n, (float)eps);
}

}  // namespace

OPERATOR(Tensor, project_heads, Small<T> x, Stored<T> norm, double eps, Tensor w_weight, Maybe w_scale,
         Optional<Stored<uint16_t>> w_step, Optional<Stored<uint8_t>> w_zero, Maybe w_minimum,
         Optional<Stored<uint16_t>> w_min_step, Maybe w_bias, int64_t w_bits, Optional<Stored<T>> q_norm,
         Optional<Stored<T>> k_norm, int64_t n_head, int64_t n_kv_head, int64_t head_dim) {
    const int64_t n = x.size(x.dim() - 1), M = x.numel() / n, heads = n_head + 2 * n_kv_head, D = head_dim;
    const Matrix<T> w(n, w_bits, w_weight, w_scale, w_step, w_zero, w_minimum, w_min_step, w_bias);
    STD_TORCH_CHECK(w.out == heads * D, "the weight has ", w.out, " outputs, not ", heads, " heads of ", D);
    Tensor y = products_like(x, {heads, D});
    T *h = kept<T>(0, M * n), *at = data<T>(y);
    norm_rows(x.data(), norm, h, M, n, eps);
    w.multiply(h, at, M);
    for (int64_t m = 0; q_norm && m < M; m++) {
        norm_rows<T>(at + m * heads * D, *q_norm, at + m * heads * D, n_head, D, eps);
        T* k = at + (m * heads + n_head) * D;
        norm_rows<T>(k, *k_norm, k, n_kv_head, D, eps);
    }
    return y;
}

OPERATOR(Tensor, finish_layer, Small<T> x, Small<T> y, Tensor wo_weight, Maybe wo_scale,
         Optional<Stored<uint16_t>> wo_step, Optional<Stored<uint8_t>> wo_zero, Maybe wo_minimum,
         Optional<Stored<uint16_t>> wo_min_step, Maybe wo_bias, int64_t wo_bits, Stored<T> norm, double eps,
         Tensor w13_weight, Maybe w13_scale, Optional<Stored<uint16_t>> w13_step, Optional<Stored<uint8_t>> w13_zero,
         Maybe w13_minimum, Optional<Stored<uint16_t>> w13_min_step, Maybe w13_bias, int64_t w13_bits, Tensor w2_weight,
         Maybe w2_scale, Optional<Stored<uint16_t>> w2_step, Optional<Stored<uint8_t>> w2_zero, Maybe w2_minimum,
         Optional<Stored<uint16_t>> w2_min_step, Maybe w2_bias, int64_t w2_bits) {
    const int64_t n = x.size(x.dim() - 1), M = x.numel() / n;
    const Matrix<T> wo(y.numel() / M, wo_bits, wo_weight, wo_scale, wo_step, wo_zero, wo_minimum, wo_min_step, wo_bias);
    const Matrix<T> w13(n, w13_bits, w13_weight, w13_scale, w13_step, w13_zero, w13_minimum, w13_min_step, w13_bias);
    const Matrix<T> w2(w13.out / 2, w2_bits, w2_weight, w2_scale, w2_step, w2_zero, w2_minimum, w2_min_step, w2_bias);
    STD_TORCH_CHECK(wo.out == n && w2.out == n, "the layer's outputs are not its inputs");
    Tensor out = products_like(x, {n});
    const int64_t ffn = w2.in;
    T *to = data<T>(out), *h = kept<T>(0, M * std::max(n, ffn)), *both = kept<T>(1, M * std::max(n, 2 * ffn));
    wo.multiply(y.data(), to, M);
    add(x.data(), to, M * n);
    norm_rows<T>(to, norm, h, M, n, eps);
    w13.multiply(h, both, M);
    gate(both, h, M, ffn, (int)threads());
    w2.multiply(h, both, M);
    add(both, to, M * n);
    return out;
}

// ---- a token of each row into the cache ----

// x [B, H, D], rotated at pos [B] -> y, whose rows, heads and slots are so far apart
template <class T> static void put_heads(const InRows<T>& x, const Angles& angles, const int64_t* at, T* y, int64_t row,
                                         int64_t head, int64_t slot) {
    const int64_t D = x.size(2);
    std::vector<float> one(D);
    for (int64_t b = 0; b < x.size(0); b++)
        for (int64_t h = 0; h < x.size(1); h++) {
            const Angles of = angles.of(b);
            const T* from = x.data() + b * x.stride(0) + h * x.stride(1);
            for (int64_t d = 0; d < D; d++) one[d] = number(from[d]);
            rotate(one.data(), of.cos + at[b] * (D / 2), of.sin + at[b] * (D / 2), D);
            T* to = y + b * row + h * head + at[b] * slot;
            for (int64_t d = 0; d < D; d++) put_number(to + d, one[d]);
        }
}

template <class T> static void rotate_new(const InRows<T>& x, const Angles& angles, const int64_t* at, Tensor& y) {
    put_heads(x, angles, at, data<T>(y), x.size(1) * x.size(2), x.size(2), 0);
}

static void check_slots(const Small<int64_t>& slot, int64_t slots) {
    for (int64_t i = 0; i < slot.numel(); i++)
        STD_TORCH_CHECK(slot.data()[i] >= 0 && slot.data()[i] < slots, "slot ", slot.data()[i], " of ", slots);
}

template <class T> static void put_slots(const InRows<T>& x, const Small<int64_t>& slot, const InRows<T>& y) {
    const int64_t B = x.size(0), H = x.size(1), each = slot.dim() > 1 ? H : 1;
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            std::memcpy(y.data() + b * y.stride(0) + h * y.stride(1) + slot.data()[b * each + h % each] * y.stride(2),
                        x.data() + b * x.stride(0) + h * x.stride(1), x.size(2) * sizeof(T));
}

OPERATOR(Two, rotate_token, SmallRows<T> q, SmallRows<T> k, Stored<float> cos, Stored<float> sin, Small<int64_t> pos) {
    const Angles angles = angles_of(cos, sin);
    Tensor q_out = like(q), k_out = like(k);
    check_slots(pos, cos.size(1));
    rotate_new(q, angles, pos.data(), q_out);
    rotate_new(k, angles, pos.data(), k_out);
    return {std::move(q_out), std::move(k_out)};
}

OPERATOR(Tensor, rotate_query, SmallRows<T> q, Stored<float> cos, Stored<float> sin, Small<int64_t> pos) {
    Tensor out = like(q);
    check_slots(pos, cos.size(1));
    rotate_new(q, angles_of(cos, sin), pos.data(), out);
    return out;
}

OPERATOR(Tensor, rotate_append, SmallRows<T> q, SmallRows<T> k, SmallRows<T> v, Stored<float> cos, Stored<float> sin,
         Small<int64_t> pos, InRows<T> k_cache, InRows<T> v_cache) {
    const Angles angles = angles_of(cos, sin);
    Tensor out = like(q);
    check_slots(pos, std::min(cos.size(1), k_cache.size(2)));
    rotate_new(q, angles, pos.data(), out);
    put_heads(k, angles, pos.data(), k_cache.data(), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2));
    put_slots(v, pos, v_cache);
    return out;
}

OPERATOR(void, append_token, SmallRows<T> k, SmallRows<T> v, Small<int64_t> slot, InRows<T> k_cache,
         InRows<T> v_cache) {
    check_slots(slot, k_cache.size(2));
    put_slots(k, slot, k_cache);
    put_slots(v, slot, v_cache);
}

OPERATOR(void, evict_append, SmallRows<T> k, SmallRows<T> v, Small<int64_t> pos, InRows<T> k_cache, InRows<T> v_cache,
         Stored<int32_t> place, Stored<int64_t> filled, Optional<Stored<float>> score, Optional<Small<int64_t>> most,
         Optional<Small<int64_t>> since, Optional<Small<float>> new_score) {
    const int64_t B = k.size(0), H = k.size(1), N = k_cache.size(2);
    const Tensor at = like(k, {B, H}, ScalarType::Long);
    for (int64_t b = 0; b < B; b++) {
        const int64_t n = filled.data()[b];
        const bool grows = n < (most ? most->data()[b] : N);
        for (int64_t h = 0, i = b * H; h < H; h++, i++) {
            int32_t* places = place.data() + i * N;
            float *scores = score ? score->data() + i * N : nullptr, lowest = INFINITY;
            int64_t slot = grows || !score ? std::min(n, N - 1) : 0;
            for (int64_t t = 0; !grows && score && t < n; t++)
                if (scores[t] < lowest && places[t] <= since->data()[b]) lowest = scores[t], slot = t;
            data<int64_t>(at)[i] = slot, places[slot] = (int32_t)pos.data()[b];
            if (score) scores[slot] = new_score ? new_score->data()[i] : 0;
        }
        filled.data()[b] = n + grows;
    }
    const Small<int64_t> slots(Tensor::lent(at.get()), {"slot", 0});
    put_slots(k, slots, k_cache);
    put_slots(v, slots, v_cache);
}

OPERATOR(void, group_append, Small<T> x, Small<int64_t> pos, Stored<T> down, Stored<float> bias, InBits<T> stored,
         Optional<Stored<uint16_t>> params, int64_t bits) {
    const int64_t groups = down.size(0), width = down.size(1), R = down.size(2), slots = stored.size(2);
    STD_TORCH_CHECK(x.numel() == pos.numel() * groups * width && stored.size(3) * 8 == R * (bits == 16 ? 8 : bits),
                    "no tokens of ", groups, " groups of ", width, " channels");
    check_slots(pos, slots);
    const int64_t row = R * (bits == 16 ? (int64_t)sizeof(T) * 8 : bits) / 8;
    char* rows = stored.data(bits);
#pragma omp parallel for num_threads(threads())
    for (int64_t i = 0; i < pos.numel() * groups; i++) {
        const int64_t g = i % groups, slot = i * slots + pos.data()[i / groups];
        put_coordinates((const T*)x.data() + i * width, bias.data() + g * width, down.data() + g * width * R, width, R,
                        bits, rows + slot * row, params ? params->data() + slot * 2 : nullptr);
    }
}

// The token of each row widens its page; the first one of a page replaces what its bounds held
OPERATOR(void, join_page, Strided<T> low, Strided<T> high, SmallRows<T> k, Small<int64_t> pos, int64_t page) {
    const int64_t apart[] = {low.stride(3), high.stride(3)};  // numbers from one channel to the next
    for (int64_t i = 0, H = k.size(1); i < k.size(0) * H; i++) {
        const int64_t b = i / H, h = i % H, at = pos.data()[b] / page;
        STD_TORCH_CHECK(at >= 0 && at < low.size(2), "page ", at, " of ", low.size(2));
        const bool first = pos.data()[b] % page == 0;
        const T* x = k.data() + b * k.stride(0) + h * k.stride(1);
        T *least = low.data() + b * low.stride(0) + h * low.stride(1) + at * low.stride(2),
          *most = high.data() + b * high.stride(0) + h * high.stride(1) + at * high.stride(2);
        for (int64_t d = 0; d < k.size(2); d++, least += apart[0], most += apart[1]) {
            if (first || number(x[d]) < number(*least)) *least = x[d];
            if (first || number(x[d]) > number(*most)) *most = x[d];
        }
    }
}

OPERATOR(void, append_channels, InRows<T> keys, SmallRows<T> k, Small<int64_t> pos) {
    check_slots(pos, keys.size(3));
    for (int64_t i = 0, H = k.size(1), D = k.size(2); i < k.size(0) * H; i++) {
        const int64_t b = i / H, h = i % H;
        const T* x = k.data() + b * k.stride(0) + h * k.stride(1);
        T* to = keys.data() + b * keys.stride(0) + h * keys.stride(1) + pos.data()[b];
        for (int64_t d = 0; d < D; d++) to[d * keys.stride(2)] = x[d];
    }
}

// x [H, D] of row b replaces what `slot` of a cache holds, which joins the mean of n tokens, if there is one
template <class T>
static void replace_slot(const InRows<T>& cache, int64_t b, int64_t slot, const InRows<T>& x, float* mean, int64_t n) {
    for (int64_t h = 0, H = x.size(1), D = x.size(2); h < H; h++) {
        T* at = cache.data() + b * cache.stride(0) + h * cache.stride(1) + slot * cache.stride(2);
        float* m = mean + (b * H + h) * D;
        for (int64_t d = 0; mean && d < D; d++) m[d] += (number(at[d]) - m[d]) / (float)n;
        std::memcpy(at, x.data() + b * x.stride(0) + h * x.stride(1), D * sizeof(T));
    }
}

OPERATOR(void, window_append, InRows<T> k_cache, InRows<T> v_cache, Stored<int32_t> slot_of,
         Optional<Stored<float>> mean_k, Optional<Stored<float>> mean_v, SmallRows<T> k, SmallRows<T> v,
         Small<int64_t> place, Small<int64_t> fresh, Small<int64_t> dropped) {
    const int64_t ring = slot_of.size(1);
    for (int64_t b = 0; b < place.numel(); b++) {
        const int64_t n = std::max<int64_t>(1, dropped.data()[b]), free = fresh.data()[b];
        const bool leaves = free < 0;
        const int64_t slot = leaves ? slot_of.data()[b * ring + (n - 1) % ring] : free;
        STD_TORCH_CHECK(slot >= 0 && slot < k_cache.size(2), "slot ", slot, " of ", k_cache.size(2));
        replace_slot(k_cache, b, slot, k, leaves ? data(mean_k) : nullptr, n);
        replace_slot(v_cache, b, slot, v, leaves ? data(mean_v) : nullptr, n);
        slot_of.data()[b * ring + (place.data()[b] % ring + ring) % ring] = (int32_t)slot;
    }
}

OPERATOR(Tensor, scale_heads, SmallRows<T> x, Small<T> unit, bool divide) {
    const int64_t B = x.size(0), heads = x.size(1), D = x.size(2), H = unit.size(1);
    Tensor y = like(x);
    for (int64_t i = 0; i < B * heads; i++) {
        const T* from = x.data() + i / heads * x.stride(0) + i % heads * x.stride(1);
        const float by = number(unit.data()[i / (heads / H)]);
        T* to = data<T>(y) + i * D;
        for (int64_t d = 0; d < D; d++) put_number(to + d, divide ? number(from[d]) / by : number(from[d]) * by);
    }
    return y;
}

// y [D] = x [D] times a matrix whose rows, or columns, are contiguous
template <class W> static void turn(const float* x, const W* matrix, int64_t row, int64_t column, float* y, int64_t D) {
    if (column > 1) {
        for (int64_t e = 0; e < D; e++) {
            vf product = {};
            for (int64_t d = 0; d < D; d += L) product += load(x + d) * load(matrix + e * column + d);
            y[e] = sum(product);
        }
        return;
    }
    std::fill_n(y, D, 0.0f);
    for (int64_t d = 0; d < D; d++) {
        const vf by = all(x[d]);
        for (int64_t e = 0; e < D; e += L) store(y + e, load(y + e) + by * load(matrix + d * row + e));
    }
}

OPERATOR(Tensor, turn_heads, SmallRows<T> x, Tensor matrix, Optional<Small<T>> unit, bool divide) {
    const int64_t B = x.size(0), heads = x.size(1), D = x.size(2), dim = matrix.dim();
    const int64_t row = matrix.stride(dim - 2), column = matrix.stride(dim - 1), bases = dim > 2 ? matrix.size(0) : 1;
    const bool wide = matrix.scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(D % WHOLE == 0 && (row == 1 || column == 1), "a matrix with contiguous rows or columns is needed");
    check(matrix, {"matrix", 0}, wide ? ScalarType::Float : TYPE<T>, STRIDED);
    Tensor y = like(x);
    std::vector<float> one(D), turned(D);
    for (int64_t i = 0; i < B * heads; i++) {
        const int64_t b = i / heads, h = i % heads, first = dim > 2 ? h / (heads / bases) * matrix.stride(0) : 0;
        const T* from = x.data() + b * x.stride(0) + h * x.stride(1);
        float by = unit ? number(unit->data()[i / (heads / unit->size(1))]) : 1;
        if (divide) by = 1 / by;  // exact for powers of two
        for (int64_t d = 0; d < D; d++) one[d] = number(from[d]) * by;
        if (wide) turn(one.data(), data<float>(matrix) + first, row, column, turned.data(), D);
        else turn(one.data(), data<T>(matrix) + first, row, column, turned.data(), D);
        for (int64_t d = 0; d < D; d++) put_number(data<T>(y) + i * D + d, turned[d]);
    }
    return y;
}

OPERATOR(Tensor, sequential, Small<float> basis, Small<float> x) {
    Tensor out = like(basis);
    oja_sequence(
        x.data(), basis.data(), data<float>(out),
        {.groups = basis.size(0), .m = x.size(1), .D = basis.size(1), .rank = basis.size(2), .threads = threads()});
    return out;
}

extern "C" void kvf_register() {  // they stay registered until the next library loads and registers its own
    using torch::stable::detail::StableLibrary;
    auto& lib = *new StableLibrary(StableLibrary::Kind::IMPL, "kv_fast", "CPU", __FILE__, __LINE__);
    for (const auto& [name, call] : operators) lib.impl(name, call);
}
