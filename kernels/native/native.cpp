// What decode does with a KV cache on a CPU: all files of this folder as one unit, which build.py compiles.
//
// The files of kernels/ document every argument. Work is cut by sizes alone, never by the number of threads, so that
// results do not depend on it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "attention.cpp"
#include "dense_linear.cpp"
#include "group_attention.cpp"
#include "latent.cpp"
#include "latent_attention.cpp"
#include "layer.cpp"
#include "linear.cpp"
#include "lowrank_attention.cpp"
#include "many_rows.cpp"
#include "observed.cpp"
#include "oja.cpp"
#include "packed_attention.cpp"
#include "quantized_attention.cpp"
#include "scores.cpp"
#include "selection.cpp"
#include "operators.cpp"
#include "graphs.cpp"
