"""Which version of an operation runs: its Triton kernels, C++, or torch.

Every operation of this folder (op.py) takes its Triton version for CUDA tensors. For CPU tensors it takes C++ (native/)
where torch is slow, and its torch version otherwise or without a C++ compiler. KV_FAST_BACKEND=torch turns all kernels
off; KV_FAST_BACKEND=triton asks for Triton everywhere: on CPU tensors it then runs in its interpreter, which needs
TRITON_INTERPRET=1. Both are read once, at the first import; to choose again, assign to BACKEND. What Triton kernels
share is in tiles.py and splits.py. The strides of a tensor are one argument of theirs, a tuple: `k_strides` is
k.stride().
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

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


BACKEND = os.environ.get("KV_FAST_BACKEND", "")
FALL_BACK = False  # whether an operation's torch version runs if its Triton version fails: engine/llm.py sets it


def version_for(device: torch.device, dtype: torch.dtype) -> str:
    """Which version of operations tensors like this take: "triton", "cpp" or "torch". A graph holds one version."""
    return _version_for(BACKEND, device.type, dtype)


version_for._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as native.available


@functools.cache
def _version_for(backend: str, device: str, dtype: torch.dtype) -> str:
    if backend not in ("", "torch", "triton"):
        raise InputError(f"KV_FAST_BACKEND={backend}: use torch or triton, or leave it unset")
    on_gpu = device in ("cuda", "meta")  # `meta` tensors give shapes and bytes as on a GPU
    if backend != "torch" if on_gpu else backend == "triton":
        if isinstance(triton, _Absent) and device != "meta":
            raise InputError("the kernels need triton: install it, or set KV_FAST_BACKEND=torch")
        if device == "cpu" and not INTERPRETED:
            raise InputError(
                "KV_FAST_BACKEND=triton on a CPU runs in Triton's interpreter: set TRITON_INTERPRET=1, too"
            )
        return "triton"
    served = dtype in native.DTYPES or dtype == torch.int64  # positions, where no operand is of the cache's dtype
    in_cpp = device == "cpu" and backend == "" and served and native.available()
    return "cpp" if in_cpp else "torch"
