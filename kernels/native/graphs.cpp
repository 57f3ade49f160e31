// The graphs of a compiled step, one after another. From Python a call took 30 us: its code has left the processor's
// caches by the time that a layer's weights have been read.
#include "tensor.h"

#include <exception>
#include <string>

namespace {

// As inductor makes it: it takes over the tensors that it gets, and gives one
typedef void Graph(AtenTensorHandle* given, AtenTensorHandle* made);

}  // namespace

// The first graph gets args[0], each further one what the graph before it made in its place; `out` is filled with what
// the last one made, of int64. tensors: of all graphs, n_given[i] for each, the addresses of torch's TensorImpl, or
// numbers of args. Called with Python's lock, which a graph gives back while it runs. The result is an error's text.
extern "C" const char* kvf_run_graphs(int64_t n, Graph* const* graphs, const int64_t* n_given, const int64_t* tensors,
                                      int64_t n_args, const int64_t* args, int64_t* out) {
    static thread_local std::string error;
    static thread_local std::vector<AtenTensorHandle> given;
    std::optional<Tensor> x;
    try {
        for (int64_t i = 0; i < n; tensors += n_given[i++]) {
            given.resize(n_given[i]);
            for (int64_t j = 0; j < n_given[i]; j++) {
                // a handle is a pointer to torch's Tensor, which is a pointer to TensorImpl
                const int64_t* one = tensors[j] < n_args ? args + tensors[j] : tensors + j;
                AtenTensorHandle handle = x && !tensors[j] ? x->get() : (AtenTensorHandle)one;
                TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &given[j]));
            }
            AtenTensorHandle made = nullptr;
            graphs[i](given.data(), &made);
            x = Tensor::made(made);
        }
        memcpy(out, x->data_ptr(), x->numel() * sizeof *out);
        return nullptr;
    } catch (const std::exception& e) { error = e.what(); } catch (...) {
        error = "unknown";
    }
    return error.c_str();
}
