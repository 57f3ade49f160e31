// Tensors through torch's stable C interface. A call lends its tensors, which costs nothing; torch's own class for this
// interface allocates twice for each tensor.

#pragma once

namespace {

using torch::headeronly::ScalarType;

class Tensor {
public:
    static Tensor lent(AtenTensorHandle handle) { return {handle, false}; }
    static Tensor made(AtenTensorHandle handle) { return {handle, true}; }
    Tensor(Tensor&& from) : handle(from.handle), own(std::exchange(from.own, false)) {}
    Tensor& operator=(Tensor&& from) { return std::swap(handle, from.handle), std::swap(own, from.own), *this; }
    ~Tensor() {
        if (own) aoti_torch_delete_tensor_object(handle);
    }

    AtenTensorHandle get() const { return handle; }
    AtenTensorHandle give() { return own = false, handle; }  // only for one that was made
    int64_t size(int64_t d) const { return asked<int64_t>(aoti_torch_get_size, d); }
    int64_t stride(int64_t d) const { return asked<int64_t>(aoti_torch_get_stride, d); }
    int64_t dim() const { return asked<int64_t>(aoti_torch_get_dim); }
    int64_t numel() const { return asked<int64_t>(aoti_torch_get_numel); }
    bool is_contiguous() const { return asked<bool>(aoti_torch_is_contiguous); }
    ScalarType scalar_type() const { return (ScalarType)asked<int32_t>(aoti_torch_get_dtype); }
    void* data_ptr() const { return asked<void*>(aoti_torch_get_data_ptr); }

private:
    Tensor(AtenTensorHandle handle, bool own) : handle(handle), own(own) {}
    template <class T, class F, class... A> T asked(F* f, A... args) const {
        T answer;
        TORCH_ERROR_CODE_CHECK(f(handle, args..., &answer));
        return answer;
    }

    AtenTensorHandle handle;
    bool own;
};

typedef std::optional<Tensor> Maybe;

// How torch calls an operator f: through its dispatcher; or, from a compiled step, directly (op.py, `Declarations`)
template <auto f> struct Operator;
template <class R, class... A, R (*f)(A...)> struct Operator<f> {
    typedef AtenTensorHandle Handle;

    static void boxed(StableIValue* stack, uint64_t, uint64_t) { put(stack, std::make_index_sequence<sizeof...(A)>()); }

    template <class T> using Passed = std::conditional_t<
        std::is_same_v<T, Tensor>, Handle,
        std::conditional_t<std::is_same_v<T, Maybe>, Handle*, std::conditional_t<std::is_same_v<T, bool>, int32_t, T>>>;

    static AOTITorchError one(Passed<A>... given, Handle* out) {
        if constexpr (std::is_void_v<R>) {  // inductor passes a place for the missing result, or null
            f(lent<A>(given)...);
            if (out) *out = nullptr;
        } else *out = f(lent<A>(given)...).give();
        return AOTI_TORCH_SUCCESS;
    }
    static AOTITorchError two(Passed<A>... given, Handle* first, Handle* second) {
        auto [x, y] = f(lent<A>(given)...);
        *first = x.give(), *second = y.give();
        return AOTI_TORCH_SUCCESS;
    }
    static constexpr auto* direct() {
        if constexpr (std::is_same_v<R, std::tuple<Tensor, Tensor>>) return &two;
        else return &one;
    }

private:
    template <class T> static T lent(Passed<T> x) {
        if constexpr (std::is_same_v<T, Tensor>) return Tensor::lent(x);
        else if constexpr (std::is_same_v<T, Maybe>) return x ? Maybe(Tensor::lent(*x)) : Maybe();
        else return x;
    }
    template <class T> static T unboxed(StableIValue x) {
        if constexpr (std::is_same_v<T, Tensor>) return Tensor::made(torch::stable::detail::to<Handle>(x));
        else if constexpr (std::is_same_v<T, Maybe>) {
            auto some = torch::stable::detail::to<std::optional<Handle>>(x);
            return some ? Maybe(Tensor::made(*some)) : Maybe();
        } else return torch::stable::detail::to<T>(x);
    }
    template <size_t... i> static void put(StableIValue* stack, std::index_sequence<i...>) {
        if constexpr (std::is_void_v<R>) f(unboxed<A>(stack[i])...);
        else if constexpr (std::is_same_v<R, Tensor>)
            stack[0] = torch::stable::detail::from(f(unboxed<A>(stack[i])...).give());
        else {
            auto [x, y] = f(unboxed<A>(stack[i])...);
            stack[0] = torch::stable::detail::from(x.give()), stack[1] = torch::stable::detail::from(y.give());
        }
    }
};

}  // namespace
