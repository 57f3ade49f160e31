"""Inductor's code of a rank's decode step for an H100, made without a GPU: argv RANKS METHOD... No kernel is compiled.

Tensors are fake ones on `cuda`, but for those that decide about sizes; the other ranks are torch's fake process group;
what is asked of a card is answered for an H100. A build of torch for CPUs has no guard of CUDA's devices: GUARD,
compiled here, is one that does nothing. A line of JSON for each method: its graphs, and the sums and gathers in them.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
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

from engine.compiled import compiler_options, embed, layer_group
from loading.allocate import empty_transformer
from loading.named import named_args
from model import ModelArgs
from runtime.parallel import Ranks

GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
const c10::impl::DeviceGuardImplRegistrar of_cuda(c10::DeviceType::CUDA, &guard);
"""
H100 = dict(multi_processor_count=132, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
            warp_size=32)  # fmt: skip


FAKE = FakeTensorMode(allow_non_fake_inputs=True)


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


def on_cuda(model, method, batch, length):
    """Set a cache up on `meta`, where what decides about sizes is real; then all tensors are fake ones on `cuda`."""
    rotary = ModelArgs.rotary  # on `meta` a cache is asked for its size alone, and has no angles
    with mock.patch.object(ModelArgs, "rotary", lambda a, batch, n, *rest: rotary(a, batch, length, *rest)):
        model.setup_cache(method, batch, length, None)
    fakes = {}

    def fake(t):
        if id(t) not in fakes:
            with FAKE:
                like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            fakes[id(t)] = t, nn.Parameter(like, False) if isinstance(t, nn.Parameter) else like
        return fakes[id(t)][1]

    for whole in (model, *(method.rope for method in model.cache)):
        for module in whole.modules():
            for tensors in (module._parameters, module._buffers, module.__dict__):
                tensors |= {name: fake(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)}


def code_of(method, ranks, n_layer=2):
    """Inductor's code of the embedding, the layers and the logits."""
    args = replace(named_args("llama-3.1-8b"), n_layer=n_layer, ranks=Ranks(0, ranks))
    model = empty_transformer(args, "meta", torch.bfloat16).eval()
    card, found = SimpleNamespace(name="H100", minor=0, total_memory=80 << 30, gcnArchName="", **H100), []

    def keep(graph):
        found.append(graph.codegen()[0].value)
        raise Done

    yes = lambda *args, **kwargs: True  # noqa: E731
    patches = [
        (torch.cuda, "get_device_properties", lambda d=None: card),
        (torch.cuda, "get_device_capability", lambda d=None: (9, 0)), (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "_lazy_init", lambda: None), (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "is_bf16_supported", yes), (CudaInterface, "is_bf16_supported", yes),
        (DeviceProperties, "create", lambda *a: DeviceProperties(type="cuda", index=0, cc=90, **H100)),
        (CudaInterface.Worker, "get_device_properties", lambda *a: card), (scheduler, "has_triton", yes),
        (CudaInterface, "get_device_properties", lambda *a: card), (GraphLowering, "compile_to_module", keep),
        (CudaInterface, "get_compute_capability", lambda *a, **k: 90), (CudaInterface, "is_triton_capable", yes),
        (CudaInterface, "raise_if_triton_unavailable", yes),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("runtime.machine.available_memory", lambda device: 2**60))
        on_cuda(model, method, 8, 4096)
        stack.enter_context(FAKE)
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        tokens, pos = (torch.zeros(8, dtype=torch.int64, device="cuda") for _ in range(2))
        x = torch.empty(8, args.dim, dtype=torch.bfloat16, device="cuda")
        once = stack.enter_context(model.once)
        stack.enter_context(torch.inference_mode())
        # inductor folds constants by making them on the card
        options = compiler_options(torch.device("cuda")) | dict(joint_graph_constant_folding=False)
        for function, given in (
            (embed, (model, tokens, pos)), (layer_group, (model.decode_parts(), x, pos, once)), (model.logits, (x,))
        ):  # fmt: skip
            try:
                torch.compile(function, fullgraph=True, dynamic=False, options=options)(*given)
            except torch._inductor.exc.InductorError as e:
                if not isinstance(e.inner_exception, Done):
                    raise
    return found


def main(ranks, methods):
    load_guard()
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda d=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0), map_python_to_cpp_type=str))  # fmt: skip
    if ranks > 1:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    for method in methods:
        torch._dynamo.reset()
        codes = code_of(method, ranks)
        sums, gathers = (sum(code.count(f"_c10d_functional.{name}.default(") for code in codes)
                         for name in ("all_reduce_", "all_gather_into_tensor"))  # fmt: skip
        print(json.dumps(dict(method=method, graphs=len(codes), sums=sums, gathers=gathers)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
