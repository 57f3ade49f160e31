// Runs the graphs of a compiled step one after another. From Python a call took 30 us, because Python's code has left
// the processor's caches by the time a layer's weights have been read.
#include "tensor.h"

#include <exception>
#include <string>

namespace {

// The signature that inductor generates: takes ownership of its arguments and returns one tensor
typedef void Graph(AtenTensorHandle* given, AtenTensorHandle* made);

}  // namespace

// The first graph gets args[0], each later one the result of the graph before it instead; `out` gets the result of the
// last one, int64. tensors: for each graph in turn, n_given[i] addresses of torch's TensorImpl, or indices of args.
// Called with Python's lock, which a graph releases while it runs. Returns the text of an error, or null.
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
