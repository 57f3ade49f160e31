"""Puts a token into a window whose slots are in no order: into a fresh slot, or into that of the oldest, which leaves.

In Triton and in C++ this is one operator, where torch takes two dozen that move a few numbers each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import operation
from kernels.packed_attention import replace_token
from kernels.tuned import tuned


@operation(cpp=True, mutates=("k_cache", "v_cache", "slot_of", "mean_k", "mean_v"))
def window_append(
    k_cache: Tensor, v_cache: Tensor, slot_of: Tensor, mean_k: Tensor | None, mean_v: Tensor | None,
    k: Tensor, v: Tensor, place: Tensor, fresh: Tensor, dropped: Tensor,
) -> None:  # fmt: skip
    """In place, k and v [B, H, D] into caches [>= B, H, C, D]; place, fresh and dropped are int64 [B].

    slot_of int32 [>= B, ring] is the slot of the token at each place, modulo ring. A token at `place` goes into slot
    `fresh` or, where that is -1, into that of the oldest one, at place dropped - 1. The oldest then joins the means
    (fp32 [>= B, H, D], or None) of the `dropped` tokens that have left, itself included: RazorAttention, Eq. 4.
    """
    B, ring = len(place), slot_of.shape[1]
    oldest = slot_of[:B].gather(1, ((dropped - 1) % ring)[:, None])[:, 0]
    slot = torch.where(fresh < 0, oldest, fresh)
    left_k, left_v = replace_token(k_cache, slot, k), replace_token(v_cache, slot, v)
    slot_of[:B].scatter_(1, (place % ring)[:, None], slot.int()[:, None])
    leaves, n = (fresh < 0)[:, None, None], dropped.clamp(min=1)[:, None, None]
    for moving, left in ((mean_k, left_k), (mean_v, left_v)):
        if moving is not None:
            moved = moving[:B] + (left.float() - moving[:B]) / n
            moving[:B] = torch.where(leaves, moved, moving[:B])


# ---- Triton ----


@triton.jit
def put(at, mean, mean_out, x, n_dropped, leaves, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """x [D] into a slot at `at`. What was there joins the mean of n_dropped tokens if it leaves; mean_out, if it is not
    None, gets the mean, too."""
    offs_d = tl.arange(0, BLOCK_D)
    if mean is not None:
        left = tl.load(at + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        old = tl.load(mean + offs_d, mask=offs_d < D, other=0.0)
        moved = old + tl.div_rn(left - old, tl.zeros_like(old) + n_dropped.to(tl.float32))
        moved = tl.where(leaves, moved, old)
        tl.store(mean + offs_d, moved, mask=offs_d < D)
        if mean_out is not None:
            tl.store(mean_out + offs_d, moved, mask=offs_d < D)
    tl.store(at + offs_d, tl.load(x + offs_d, mask=offs_d < D, other=0.0), mask=offs_d < D)


@triton.jit
def slot_in_window(table, place, fresh, dropped, ring, writes):
    """The slot of a row's new token, whether the oldest leaves it, and of how many the mean is then; table [ring] gets
    the slot if this program `writes`."""
    n_dropped, slot = tl.maximum(dropped, 1), fresh
    leaves = slot < 0
    slot = tl.where(leaves, tl.load(table + (n_dropped - 1) % ring).to(tl.int64), slot)
    if writes:
        # other programs may read this place before or after: where it is the oldest's, too, the slot is the same
        tl.store(table + (place % ring + ring) % ring, slot.to(tl.int32))
    return slot, leaves, n_dropped


@triton.jit
def _window_append_kernel(
    k_cache, v_cache, slot_of, mean_k, mean_v, k, v, place, fresh, dropped,
    k_strides, v_strides, H, C, ring, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program: one head of a row."""
    pid_bh = tl.program_id(0).to(tl.int64)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    to, slot, n_gone = tl.load(place + pid_b), tl.load(fresh + pid_b), tl.load(dropped + pid_b)
    slot, leaves, n_dropped = slot_in_window(slot_of + pid_b * ring, to, slot, n_gone, ring, pid_h == 0)
    k += pid_b * k_strides[0] + pid_h * k_strides[1]
    v += pid_b * v_strides[0] + pid_h * v_strides[1]
    if mean_k is not None:
        mean_k += pid_bh * D
        mean_v += pid_bh * D
    put(k_cache + (pid_bh * C + slot) * D, mean_k, None, k, n_dropped, leaves, D, BLOCK_D)
    put(v_cache + (pid_bh * C + slot) * D, mean_v, None, v, n_dropped, leaves, D, BLOCK_D)


@window_append.triton
def launch(
    k_cache: Tensor, v_cache: Tensor, slot_of: Tensor, mean_k: Tensor | None, mean_v: Tensor | None,
    k: Tensor, v: Tensor, place: Tensor, fresh: Tensor, dropped: Tensor,
) -> None:  # fmt: skip
    B, H, D = k.shape
    buffers = (k_cache, v_cache, slot_of, mean_k, mean_v, place, fresh, dropped)
    assert all(x is None or x.is_contiguous() for x in buffers) and k.stride(2) == v.stride(2) == 1
    _window_append_kernel[(B * H,)](
        k_cache, v_cache, slot_of, mean_k, mean_v, k, v, place, fresh, dropped, k.stride(), v.stride(),
        H, k_cache.shape[2], slot_of.shape[1], D=D, BLOCK_D=triton.next_power_of_2(D),
        **tuned("_window_append_kernel", num_warps=1),
    )  # fmt: skip
