// Tensors through torch's stable C interface, and operators of them. A call lends its tensors, which costs nothing;
// torch's own class for this interface allocates twice for each tensor.

#pragma once
#include <cstring>
#include <string>

#include "vectors.h"

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
    // not inlined: with its error it is most of the code of an operator
    template <class T, class F, class... A> __attribute__((noinline)) T asked(F* f, A... args) const {
        T answer;
        TORCH_ERROR_CODE_CHECK(f(handle, args..., &answer));
        return answer;
    }

    AtenTensorHandle handle;
    bool own;
};

typedef std::optional<Tensor> Maybe;

// ---- arguments: a class says which numbers an operator takes, and how they may lie; a call checks it ----

template <class T> constexpr ScalarType TYPE = ScalarType::Undefined;
template <> constexpr ScalarType TYPE<float> = ScalarType::Float;
template <> constexpr ScalarType TYPE<bf16> = ScalarType::BFloat16;
template <> constexpr ScalarType TYPE<uint16_t> = ScalarType::Half;
template <> constexpr ScalarType TYPE<uint8_t> = ScalarType::Byte;
template <> constexpr ScalarType TYPE<int32_t> = ScalarType::Int;
template <> constexpr ScalarType TYPE<int64_t> = ScalarType::Long;
template <> constexpr ScalarType TYPE<bool> = ScalarType::Bool;

// Parameter i of a list as it is written: "InRows<T> q, Small<int64_t> pos"
struct Parameter {
    const char* list;
    size_t i;

    std::string name() const {
        const char *at = list, *end;
        for (size_t left = i; left; left--) at = strchr(at, ',') + 1;
        for (end = at; *end && *end != ','; end++)
            if (*end == ' ') at = end + 1;
        return std::string(at, end);
    }
};

// torch's pointer is null for a tensor without elements, too: here null means a tensor that was not given
alignas(64) char no_elements[64];
template <class T> T* data(const Tensor& x) {
    void* at = x.data_ptr();
    return (T*)(at ? at : no_elements);
}

enum Layout { STRIDED, IN_ROWS, CONTIGUOUS };

// Not inlined, because every argument of every operator is checked
__attribute__((noinline)) void check(const Tensor& x, Parameter of, ScalarType type, Layout layout) {
    STD_TORCH_CHECK(x.scalar_type() == type, of.name(), ": a tensor of dtype ", torch::headeronly::toString(type),
                    " is needed, not of ", torch::headeronly::toString(x.scalar_type()));
    STD_TORCH_CHECK(layout != IN_ROWS || x.stride(x.dim() - 1) == 1, of.name(), ": rows must be contiguous");
    STD_TORCH_CHECK(layout != CONTIGUOUS || x.is_contiguous(), of.name(), " must be contiguous");
}

// Numbers T with any strides; rows, contiguous in the last dimension; and what is refused if it is not contiguous
template <class T> struct Strided : Tensor {
    Strided(Tensor&& x, Parameter of, Layout layout = STRIDED) : Tensor(std::move(x)) {
        check(*this, of, TYPE<T>, layout);
    }
    T* data() const { return ::data<T>(*this); }
};
template <class T> struct InRows : Strided<T> {
    InRows(Tensor&& x, Parameter of) : Strided<T>(std::move(x), of, IN_ROWS) {}
};
template <class T> struct Stored : Strided<T> {
    Stored(Tensor&& x, Parameter of) : Strided<T>(std::move(x), of, CONTIGUOUS) {}
};

// Stored in `bits`: bytes, or numbers T at 16 bits
template <class T> struct InBits : Tensor {
    InBits(Tensor&& x, Parameter of) : Tensor(std::move(x)), of(of) {}

    char* data(int64_t bits) const {
        check(*this, of, bits < 16 ? ScalarType::Byte : TYPE<T>, CONTIGUOUS);
        return ::data<char>(*this);
    }
    Parameter of;
};

__attribute__((noinline)) Tensor contiguous(Tensor x) {
    if (x.is_contiguous()) return x;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(x.get(), &handle));
    const auto copy = torch::stable::contiguous(torch::stable::Tensor(handle));
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(copy.get(), &handle));
    return Tensor::made(handle);
}

// What is copied if it, or a row of it, is not contiguous
template <class T> struct Small : Strided<T> {
    Small(Tensor&& x, Parameter of) : Strided<T>(contiguous(std::move(x)), of) {}
};
template <class T> struct SmallRows : InRows<T> {
    SmallRows(Tensor&& x, Parameter of)
        : InRows<T>(x.stride(x.dim() - 1) == 1 ? std::move(x) : contiguous(std::move(x)), of) {}
};

template <class X> using Optional = std::optional<X>;
template <class X> auto data(const Optional<X>& x) { return x ? x->data() : nullptr; }

// ---- how torch calls an operator ----

// Through its dispatcher (`boxed`); or, from a compiled step, directly (op.py, `Declarations`). It is a template that
// is made for fp32, f, and for bf16, g: the first tensor whose class differs decides
template <auto f, auto g> struct Operator;
template <class R, class... A, class... B, R (*f)(A...), R (*g)(B...)> struct Operator<f, g> {
    typedef AtenTensorHandle Handle;

    static void boxed(StableIValue* stack, uint64_t, uint64_t) { put(stack, each()); }

    // an argument before it is checked, and as a compiled step passes it
    template <class X> static constexpr int kind = std::is_base_of_v<Tensor, X> ? 0 : std::is_class_v<X> ? 1 : 2;
    template <class X> using Raw = std::tuple_element_t<kind<X>, std::tuple<Tensor, Maybe, X>>;
    template <class X> using Number = std::conditional_t<std::is_same_v<X, bool>, int32_t, X>;
    template <class X> using Passed = std::tuple_element_t<kind<X>, std::tuple<Handle, Handle*, Number<X>>>;

    static AOTITorchError one(Passed<A>... given, Handle* out) {
        if constexpr (std::is_void_v<R>) {  // inductor passes a place for the missing result, or null
            call(each(), lent<A>(given)...);
            if (out) *out = nullptr;
        } else *out = call(each(), lent<A>(given)...).give();
        return AOTI_TORCH_SUCCESS;
    }
    static AOTITorchError two(Passed<A>... given, Handle* first, Handle* second) {
        auto [x, y] = call(each(), lent<A>(given)...);
        *first = x.give(), *second = y.give();
        return AOTI_TORCH_SUCCESS;
    }
    static constexpr auto* direct() {
        if constexpr (std::is_same_v<R, std::tuple<Tensor, Tensor>>) return &two;
        else return &one;
    }

    static inline const char* parameters;  // as they are written

private:
    typedef std::make_index_sequence<sizeof...(A)> each;

    template <size_t... i> static R call(std::index_sequence<i...>, Raw<A>... x) {
        constexpr bool same[] = {std::is_same_v<A, B>...};
        bool in_bf16 = false;
        for (auto [decides, type] : {std::pair(!same[i], type_of(x))...})
            if (decides) {
                in_bf16 = type == ScalarType::BFloat16;
                break;
            }
        return in_bf16 ? g(checked<B>(x, i)...) : f(checked<A>(x, i)...);
    }
    template <class X> static ScalarType type_of(const X&) { return ScalarType::Undefined; }
    static ScalarType type_of(const Tensor& x) { return x.scalar_type(); }

    template <class X> static X checked(Raw<X>& x, size_t i) {
        if constexpr (std::is_same_v<X, Raw<X>>) return std::move(x);
        else if constexpr (kind<X> == 0) return X(std::move(x), Parameter{parameters, i});
        else return x ? X(typename X::value_type(std::move(*x), Parameter{parameters, i})) : X();
    }
    template <class X> static Raw<X> lent(Passed<X> x) {
        if constexpr (kind<X> == 0) return Tensor::lent(x);
        else if constexpr (kind<X> == 1) return x ? Maybe(Tensor::lent(*x)) : Maybe();
        else return x;
    }
    template <class X> static Raw<X> unboxed(StableIValue x) {
        using torch::stable::detail::to;
        if constexpr (kind<X> == 0) return Tensor::made(to<Handle>(x));
        else if constexpr (kind<X> == 1) {
            auto some = to<std::optional<Handle>>(x);
            return some ? Maybe(Tensor::made(*some)) : Maybe();
        } else return to<X>(x);
    }
    template <size_t... i> static void put(StableIValue* stack, std::index_sequence<i...>) {
        namespace stable = torch::stable::detail;
        if constexpr (std::is_void_v<R>) call(each(), unboxed<A>(stack[i])...);
        else if constexpr (std::is_same_v<R, Tensor>)
            stack[0] = stable::from(call(each(), unboxed<A>(stack[i])...).give());
        else {
            auto [x, y] = call(each(), unboxed<A>(stack[i])...);
            stack[0] = stable::from(x.give()), stack[1] = stable::from(y.give());
        }
    }
};

// Operators by the names of their overloads
std::vector<std::pair<const char*, void (*)(StableIValue*, uint64_t, uint64_t)>> operators;

}  // namespace

// OPERATOR(Tensor, name, parameters) { ... } defines the operator `name` of op.py, for T of fp32 and bf16. The pointer
// is under the name by which inductor calls declared operators
#define OPERATOR(R, name, ...)                                                                                       \
    template <class T> static R name##_operator(__VA_ARGS__);                                                        \
    typedef Operator<&name##_operator<float>, &name##_operator<bf16>> name##_calls;                                  \
    static const bool name##_is_listed =                                                                             \
        (name##_calls::parameters = #__VA_ARGS__, operators.emplace_back(#name ".cpp", &name##_calls::boxed), true); \
    extern "C" auto* const aoti_torch_cpu_##name = name##_calls::direct();                                           \
    template <class T> static R name##_operator(__VA_ARGS__)
