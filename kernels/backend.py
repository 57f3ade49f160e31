"""Which version of an operation runs: its Triton kernels, C++, or torch.

Every operation of this folder (op.py) calls its Triton version for CUDA tensors. For CPU tensors it calls C++ (native/)
where torch is slow, and its torch version otherwise or without a C++ compiler. KV_FAST_BACKEND=torch turns all kernels
off; KV_FAST_BACKEND=triton asks for Triton everywhere: on CPU tensors it then runs in its interpreter, which needs
TRITON_INTERPRET=1 before the first import. What Triton kernels share is in tiles.py and splits.py. The strides of a
tensor are one argument of theirs, a tuple: `k_strides` is k.stride().
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from kernels import native
from runtime.errors import InputError

# the kernels are written for fused multiply-adds, which Triton 3.10 turns off by default
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class _Absent:
    """Stands in for Triton where it is not installed (macOS): kernels can be defined and decorated, but not run."""

    def __getattr__(self, name: str) -> _Absent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()  # type: ignore[assignment]

HIP = torch.version.hip is not None  # for AMD, Triton has neither TF32 nor a register limit
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def chosen_backend() -> str:
    backend = os.environ.get("KV_FAST_BACKEND", "")
    if backend not in ("", "torch", "triton"):
        raise InputError(f"KV_FAST_BACKEND={backend}: use torch or triton, or leave it unset")
    return backend


def use_triton(x: Tensor) -> bool:
    """Whether operations on tensors like x run as Triton kernels. Decided while tracing: a graph holds one version."""
    backend = chosen_backend()
    on_gpu = x.device.type in ("cuda", "meta")  # `meta` tensors give shapes and bytes as on a GPU
    wanted = backend != "torch" if on_gpu else backend == "triton"
    if wanted and isinstance(triton, _Absent) and x.device.type != "meta":
        raise InputError("the kernels need triton: install it, or set KV_FAST_BACKEND=torch")
    if wanted and x.device.type == "cpu" and not INTERPRETED:
        raise InputError("KV_FAST_BACKEND=triton on a CPU runs in Triton's interpreter: set TRITON_INTERPRET=1, too")
    return wanted


def use_native(x: Tensor, channels: int = native.VECTOR) -> bool:
    """Whether operations on tensors like x, with rows of `channels` numbers, run in C++."""
    fits = x.device.type == "cpu" and x.dtype in native.DTYPES and channels % native.VECTOR == 0
    return fits and chosen_backend() == "" and native.available()
