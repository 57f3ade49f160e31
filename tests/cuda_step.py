"""Inductor's code of a rank's decode step for an H100, made without a GPU: argv METHOD. No kernel is compiled.

Tensors are fake ones on `cuda`; the other rank is torch's fake process group; what is asked of a card is answered for
an H100. A build of torch for CPUs has no guard of CUDA's devices: GUARD, compiled here, is one that does nothing.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["KV_FAST_BACKEND"] = "triton"
import torch
import torch._inductor.scheduler as scheduler
import triton.runtime
from torch import nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget

import runtime
from compiled import compiler_options
from model import ModelArgs, empty_transformer
from parallel import Ranks

GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
const c10::impl::DeviceGuardImplRegistrar of_cuda(c10::DeviceType::CUDA, &guard);
"""
H100 = dict(multi_processor_count=132, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
            warp_size=32)  # fmt: skip


class Done(Exception):
    """The code is there: it cannot run."""


def load_guard():
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD)
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", str(source), "-o", str(library),
                        f"-L{root}/lib", "-lc10"], check=True)  # fmt: skip
        ctypes.CDLL(str(library))


def code_of(method, n_layer=2):
    model = empty_transformer(replace(ModelArgs.from_name("llama-3.1-8b"), n_layer=n_layer, ranks=Ranks(0, 2)), "meta",
                              torch.bfloat16).eval()  # fmt: skip
    card, found = SimpleNamespace(name="H100", minor=0, total_memory=80 << 30, gcnArchName="", **H100), []

    def keep(graph):
        found.append(graph.codegen()[0].value)
        raise Done

    yes = lambda *args, **kwargs: True  # noqa: E731
    patches = [
        (runtime, "available_memory", lambda device: 2**60), (torch.cuda, "get_device_properties", lambda d=None: card),
        (torch.cuda, "get_device_capability", lambda d=None: (9, 0)), (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "_lazy_init", lambda: None), (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "is_bf16_supported", yes), (CudaInterface, "is_bf16_supported", yes),
        (DeviceProperties, "create", lambda *a: DeviceProperties(type="cuda", index=0, cc=90, **H100)),
        (CudaInterface.Worker, "get_device_properties", lambda *a: card), (scheduler, "has_triton", yes),
        (CudaInterface, "get_device_properties", lambda *a: card), (GraphLowering, "compile_to_module", keep),
        (CudaInterface, "get_compute_capability", lambda *a, **k: 90), (CudaInterface, "is_triton_capable", yes),
        (CudaInterface, "raise_if_triton_unavailable", yes),
    ]  # fmt: skip
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda d=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0), map_python_to_cpp_type=str))  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(*patches[0]))
        stack.enter_context(mock.patch.object(*patches[1]))
        for m in model.modules():
            for name, p in list(m.named_parameters(recurse=False)):
                m.register_parameter(name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cuda"), False))
        model.setup(method, 8, 4096, None, {})
        for owner, name, value in patches[2:]:
            stack.enter_context(mock.patch.object(owner, name, value))
        tokens = torch.zeros(8, dtype=torch.int64, device="cuda")
        stack.enter_context(torch.inference_mode())
        options = compiler_options(torch.device("cuda"), graphs=False)
        step = torch.compile(model.decode, fullgraph=True, dynamic=False, options=options)
        with contextlib.suppress(torch._inductor.exc.InductorError):  # Done, in its words
            step(tokens, tokens.clone())
    return found


if __name__ == "__main__":
    load_guard()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    codes = code_of(sys.argv[1])
    assert len(codes) == 1, "one graph"
    print(codes[0])
