"""All dense attentions, the baseline of bench_attention.py, and the check that they compute attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.dense_attention import decode_attention
from runtime.errors import InputError
from runtime.machine import require_memory
from scripts.shared.timing import Call, Clock, reason, recover

# of the difference between a baseline and attention by definition
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def dense_calls(q: Tensor, k: Tensor, v: Tensor, compile: bool) -> dict[str, Callable[[], Call]]:
    """All dense attentions over q [B, Hq, D] and k, v [B, Hkv, T, D]: name -> a function that makes the call.

    "grouped queries" puts the query heads of a group where SDPA expects query positions. K and V are then read once
    per group without being repeated, however a backend implements enable_gqa.
    """
    B, Hq, D = q.shape
    Hkv, T = k.shape[1:3]
    grouped = q.view(B, Hkv, Hq // Hkv, D)
    start, stop = torch.zeros(B, dtype=torch.int64, device=q.device), torch.full((B,), T, device=q.device)
    wrap: Any = torch.compile(fullgraph=True, dynamic=False) if compile else lambda f: f

    def matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(2, 3)).float() * D**-0.5).softmax(-1).to(v.dtype) @ v

    def sdpa(q: Tensor, backend: SDPBackend | None, gqa: bool) -> Call:
        def call() -> Tensor:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)

        return call

    compiled = wrap(matmul)
    out: dict[str, Callable[[], Call]] = {
        "matmul": lambda: lambda: compiled(grouped, k, v),
        "decode_attention": lambda: lambda: decode_attention(q, k, v, start, stop),
    }
    backends: dict[str, SDPBackend | None] = {"": None}
    if q.is_cuda:
        backends = {" flash": SDPBackend.FLASH_ATTENTION, " efficient": SDPBackend.EFFICIENT_ATTENTION,
                    " cudnn": SDPBackend.CUDNN_ATTENTION, " math": SDPBackend.MATH}  # fmt: skip
    for name, backend in backends.items():
        out[f"sdpa{name}"] = partial(sdpa, q[:, :, None], backend, Hq != Hkv)
        if Hq != Hkv:
            out[f"sdpa{name}, grouped queries"] = partial(sdpa, grouped, backend, False)
    if q.is_cuda:
        out |= {"flash-attn": partial(flash_attn, q, k, v), "flashinfer": partial(flashinfer, q, k, v)}
        if compile:
            out["flex_attention"] = partial(flex, q, k, v)
    return out


def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Call:
    from flash_attn import flash_attn_with_kvcache

    return lambda: flash_attn_with_kvcache(q[:, None], k.transpose(1, 2), v.transpose(1, 2))


def flashinfer(q: Tensor, k: Tensor, v: Tensor, page: int = 16) -> Call:
    """FlashInfer's batch decode over pages, as servers call it."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    (B, Hq, D), (Hkv, T) = q.shape, k.shape[1:3]
    if T % page:
        raise InputError(f"{T} tokens are not a multiple of the page of {page}")
    pages = T // page
    kp, vp = (x.unflatten(2, (pages, page)).transpose(1, 2).reshape(-1, Hkv, page, D) for x in (k, v))
    space = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=Hq // Hkv >= 4)
    table = torch.arange(B * pages + 1, dtype=torch.int32, device=q.device)
    last = torch.full((B,), page, dtype=torch.int32, device=q.device)
    wrapper.plan(table[::pages].contiguous(), table[:-1], last, Hq, Hkv, D, page, q_data_type=q.dtype)
    return lambda: wrapper.run(q, (kp, vp))


def flex(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """FlexAttention, which gpt-fast calls; compiled, it has a split-K decode kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    f = torch.compile(flex_attention, dynamic=False)
    return lambda: f(q[:, :, None], k, v, enable_gqa=q.shape[1] != k.shape[1])


def difference(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Largest deviation of the last row's output from attention by definition, as a share of the largest output."""
    g = q.shape[1] // k.shape[1]
    ref = torch.cat([(qh.float() @ kh.float().T * q.shape[2] ** -0.5).softmax(-1) @ vh.float()
                     for qh, kh, vh in zip(q[-1].split(g), k[-1], v[-1], strict=True)])  # fmt: skip
    return float((out.reshape(q.shape)[-1].float() - ref).abs().max() / ref.abs().max())


@torch.inference_mode()
def prepare_dense(
    q: Tensor, k: Tensor, v: Tensor, compile: bool, clock: Clock, layers: int
) -> tuple[dict[str, Call], list[dict[str, Any]]]:
    """All dense attentions that work here, ready to be timed, `layers` layers per call; and one row per one tried."""
    ready: dict[str, Call] = {}
    rows: list[dict[str, Any]] = []
    # each layer of a method has a cache of its own
    need = (layers - 1) * 2 * k.nbytes
    require_memory(need, k.device, f"{layers} dense layers", "lower --batch, --length or --layers")
    others = [dense_calls(q, k.clone(), v.clone(), compile) for _ in range(layers - 1)]
    for name, make in dense_calls(q, k, v, compile).items():
        row: dict[str, Any] = dict(name=name)
        rows.append(row)
        try:
            call = make()
            row["difference"] = difference(call(), q, k, v)
            if not row["difference"] <= TOLERANCE[q.dtype]:
                raise InputError(f"it does not compute attention: off by {row['difference']:.2g}")
            ready[name] = in_turn([clock.prepare(x) for x in (call, *(layer[name]() for layer in others))])
        except ImportError:
            row["error"] = "not installed"
        except Exception as e:  # backends refuse sizes with many kinds of errors
            row["error"] = reason(e)
            recover(clock.device)
    return ready, rows


def in_turn(calls: list[Call]) -> Call:
    return calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
