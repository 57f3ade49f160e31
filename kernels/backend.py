"""Which version of an operation runs, and what all Triton kernels share: matmul, number of splits, their reduction.

Every operation of this folder is a function that calls its Triton kernel for CUDA tensors. For CPU tensors it calls
C++ (native.py) where torch is slow at it, else, and without a C++ compiler, its torch version. KV_FAST_BACKEND=torch
turns all kernels off; KV_FAST_BACKEND=triton asks for Triton everywhere: on CPU tensors it then runs in its
interpreter, which needs TRITON_INTERPRET=1 before the first import.

A file with kernels has a function `aot(n_head, n_kv_head, head_dim)`: its kernels as a model of that shape launches
them, the main one first, each (name, function, signature, constexprs, options), for scripts/kernel_report.py to compile
without a GPU. It may have `account(n_head, n_kv_head, head_dim, batch, length)`: of each operation that one decode step
of a layer does with them, dict(op=its name, bytes=read and written in bf16, launches=kernels), from sizes alone; and
bandwidth= bytes/s where they do not go through the GPU's memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from kernels import native

# the kernels are written for fused multiply-adds, which Triton 3.10 turns off by default
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class _Absent:
    """In place of Triton where there is none (macOS): kernels can be defined, as decorators leave them, but not run."""

    def __getattr__(self, name: str) -> _Absent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()  # type: ignore[assignment]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ASSUMED_SMS = 132  # where there is no GPU to ask: an H100's
MAX_SPLITS = 64

# (name, function, argument -> type or "constexpr", constexprs, options)
Aot = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]


def chosen_backend() -> str:
    backend = os.environ.get("KV_FAST_BACKEND", "")
    if backend not in ("", "torch", "triton"):
        raise InputError(f"KV_FAST_BACKEND={backend}: use torch or triton, or leave it unset")
    return backend


def use_triton(x: Tensor) -> bool:
    """Whether operations on tensors like x run as Triton kernels. Decided while tracing: a graph holds one version."""
    backend = chosen_backend()
    wanted = backend == "triton" if x.device.type != "cuda" else backend != "torch"
    if wanted and isinstance(triton, _Absent):
        raise InputError("the kernels need triton: install it, or set KV_FAST_BACKEND=torch")
    if wanted and x.device.type == "cpu" and not INTERPRETED:
        raise InputError("KV_FAST_BACKEND=triton on a CPU runs in Triton's interpreter: set TRITON_INTERPRET=1, too")
    return wanted


def use_native(x: Tensor, channels: int = native.VECTOR) -> bool:
    """Whether operations on tensors like x, with rows of `channels` numbers, run in C++; the others do not take it."""
    fits = x.device.type == "cpu" and x.dtype in native.DTYPES and channels % native.VECTOR == 0
    return fits and chosen_backend() == "" and native.available()


def on_cpu(in_triton: Callable[..., Any], in_cpp: Callable[..., Any]) -> Callable[..., Any]:
    """What an operator is on a CPU, of tensors of which the first says which version is taken."""
    return lambda *args: (in_cpp if use_native(args[0]) else in_triton)(*args)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else ASSUMED_SMS


def split_count(programs: int, n: int, block: int, device: torch.device) -> int:
    """Into how many parts to split n tokens, so that `programs` x parts fill the card.

    Two programs per multiprocessor are a wave. The fewest parts whose waves are full to 95 % of the best that any
    number of parts reaches (FlashDecoding's rule): a part costs its partial output, an idle multiprocessor costs more.
    A part is at least one block of `block` tokens. From sizes alone: a captured graph keeps it.
    """
    wave = 2 * multiprocessors(device)
    most = max(1, min(triton.cdiv(n, block), MAX_SPLITS))
    full = [programs * s / (wave * triton.cdiv(programs * s, wave)) for s in range(1, most + 1)]
    return next(s for s, share in enumerate(full, 1) if share >= 0.95 * max(full))


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc=None):
    """a @ b + acc on tensor cores, to fp32; fp32 operands as three TF32 products, which keep fp32's precision."""
    if _INTERPRETED:  # the interpreter would multiply the bit patterns of bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _combine(part, lse, out, S, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    weight = tl.load(lse + row * S + s, mask=s < S, other=float("-inf"))
    y = tl.load(part + (row * S + s[:, None]) * D + d, mask=(s[:, None] < S) & (d < D), other=0.0)
    top = tl.max(weight)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))  # a part that saw no token weighs nothing
    y = tl.sum(tl.where(weight[:, None] > 0, y, 0.0) * weight[:, None], 0) / tl.maximum(tl.sum(weight), 1e-30)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty), mask=d < D)


_COMBINE_D = 32  # channels per program: a full line of 128 bytes, and enough programs to fill the card at batch 1


def combine(part: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax-weighted mean of partial attention outputs.

    part [..., S, D] fp32, each normalized by its own part; lse [..., S] fp32 the log2 of each part's sum of
    exp2(logit), -inf where it saw no token -> [..., D]. Zeros where no part saw one.
    """
    *lead, S, D = part.shape
    out = torch.empty(*lead, D, dtype=dtype, device=part.device)
    grid = (lse.numel() // S, triton.cdiv(D, _COMBINE_D))
    _combine[grid](part, lse, out, S, D=D, BLOCK_S=triton.next_power_of_2(S), BLOCK_D=_COMBINE_D, num_warps=2)
    return out


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """The combine at its largest and at a usual number of parts."""
    pointers = dict(part="*fp32", lse="*fp32", out="*bf16", S="i32", D="constexpr", BLOCK_S="constexpr")
    return [
        (f"combine {S} parts", _combine, pointers | dict(BLOCK_D="constexpr"),
         dict(D=head_dim, BLOCK_S=S, BLOCK_D=_COMBINE_D), dict(num_warps=2, num_stages=1))
        for S in (8, MAX_SPLITS)
    ]  # fmt: skip
