"""A decode step of heads that keep every token beside heads with a window, stored in one list of slots.

Keys and values of all rows lie in tensors [N, D], a head's slots one behind the other: those of the heads that keep
every token, then those with a window. A Triton kernel appends to both kinds, and heads become rows of
`decode_attention`'s kernels, which share out programs by the tokens that each holds: three launches in a layer, where
two caches take seven and four copies that bring heads into their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.dense_attention import decode_attention, split_attention
from kernels.op import nbytes, operation
from kernels.packed_attention import _packed_attention
from kernels.rotate_append import append_token
from kernels.tuned import tuned
from kernels.window_append import put, slot_in_window, window_append


def _reads(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_of: Tensor, mean_k: Tensor | None,
           mean_v: Tensor | None, *rest: object) -> dict[str, int]:  # fmt: skip
    return dict(k_cache=nbytes(k_cache), v_cache=nbytes(v_cache), mean_k=nbytes(mean_k), mean_v=nbytes(mean_v))


@operation(opaque=True, mutates=("k_cache", "v_cache", "slot_of", "mean_k", "mean_v"), reads=_reads)
def mixed_decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_of: Tensor, mean_k: Tensor | None,
    mean_v: Tensor | None, order: Tensor, whole: int, window: int, pos: Tensor, place: Tensor, fresh: Tensor,
    dropped: Tensor, filled: Tensor,
) -> Tensor:  # fmt: skip
    """Append a token of each row and attend: q [B, Hq, D], k and v [B, H, D], rotated -> [B, Hq, D].

    order int64 [H]: first the `whole` > 0 heads that keep every token, then those with a window of `window` slots.
    Caches [N, D] of R rows are [R, whole, T, D], slot = position, and behind it [R, H - whole, window, D]. slot_of
    [R, ring] and mean_k and mean_v [R, H - whole, D] or None are `window_append`'s, and so are place, fresh and dropped
    of the tokens at pos [B]. The first `filled` [B] slots of a window hold tokens; if there are means, those that were
    dropped count as in `packed_attention`.
    """
    H, R, (_, Hq, D) = len(order), len(slot_of), q.shape
    g, edge, sizes = Hq // H, len(k_cache) - R * (H - whole) * window, (whole, H - whole)
    every = [x[:edge].view(R, whole, -1, D) for x in (k_cache, v_cache)]
    some = [x[edge:].view(R, H - whole, window, D) for x in (k_cache, v_cache)]
    q_order = (order[:, None] * g + torch.arange(g, device=q.device)).flatten()
    q1, q2 = q[:, q_order].split((g * whole, g * (H - whole)), 1)
    (k1, k2), (v1, v2) = (x[:, order].split(sizes, 1) for x in (k, v))
    append_token.reference(k1, v1, pos, *every)
    window_append.reference(*some, slot_of, mean_k, mean_v, k2, v2, place, fresh, dropped)
    count = None if mean_k is None else dropped.clamp(min=0)
    y1 = decode_attention.reference(q1, *every, None, pos + 1)
    y2 = _packed_attention.reference(q2, *some, filled, mean_k, mean_v, count)
    return torch.cat((y1, y2), 1)[:, q_order.argsort()]


@triton.jit
def _mixed_append_kernel(
    k_cache, v_cache, slot_of, mean_k, mean_v, k, v, order, pos, place, fresh, dropped, filled,
    start, stop, count, mean_k_out, mean_v_out,
    k_strides, v_strides, R, H, whole, T, C, ring, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program: a head of a row, by its place in `order`. Of each head, in the model's order, it also writes what
    attention needs: where its slots start and stop, and the mean of how many others."""
    pid = tl.program_id(0).to(tl.int64)
    pid_b, at = pid // H, pid % H
    head = tl.load(order + at)
    to = pid_b * H + head
    k += pid_b * k_strides[0] + head * k_strides[1]
    v += pid_b * v_strides[0] + head * v_strides[1]
    if at < whole:
        first, last = (pid_b * whole + at) * T, tl.load(pos + pid_b)
        put(k_cache + (first + last) * D, None, None, k, 1, False, D, BLOCK_D)
        put(v_cache + (first + last) * D, None, None, v, 1, False, D, BLOCK_D)
        tl.store(start + to, first)
        tl.store(stop + to, first + last + 1)
        tl.store(count + to, 0)
    else:
        own = pid_b * (H - whole) + at - whole
        first, n_gone = R * whole * T + own * C, tl.load(dropped + pid_b)
        slot, leaves, n_dropped = slot_in_window(
            slot_of + pid_b * ring, tl.load(place + pid_b), tl.load(fresh + pid_b), n_gone, ring, at == whole
        )
        if mean_k is not None:
            mean_k += own * D
            mean_v += own * D
        put(k_cache + (first + slot) * D, mean_k, mean_k_out + to * D, k, n_dropped, leaves, D, BLOCK_D)
        put(v_cache + (first + slot) * D, mean_v, mean_v_out + to * D, v, n_dropped, leaves, D, BLOCK_D)
        tl.store(start + to, first)
        tl.store(stop + to, first + tl.load(filled + pid_b))
        tl.store(count + to, tl.maximum(n_gone, 0))


@mixed_decode.triton
def _(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_of: Tensor, mean_k: Tensor | None,
    mean_v: Tensor | None, order: Tensor, whole: int, window: int, *at: Tensor,
) -> Tensor:  # fmt: skip
    (B, H, D), R = k.shape, len(slot_of)
    buffers, at = (k_cache, v_cache, slot_of, mean_k, mean_v, order), tuple(x.contiguous() for x in at)
    assert all(x is None or x.is_contiguous() for x in buffers) and k.stride(2) == v.stride(2) == 1
    T = (len(k_cache) // R - (H - whole) * window) // whole
    start, stop, count = (torch.empty(B * H, dtype=torch.int64, device=q.device) for _ in range(3))
    mean_of = [torch.empty(B * H, D, dtype=torch.float32, device=q.device) for _ in range(2)]
    _mixed_append_kernel[(B * H,)](
        k_cache, v_cache, slot_of, mean_k, mean_v, k, v, order, *at, start, stop, count, *mean_of,
        k.stride(), v.stride(), R, H, whole, T, window, slot_of.shape[1], D=D, BLOCK_D=triton.next_power_of_2(D),
        **tuned("_mixed_append_kernel", num_warps=1),
    )  # fmt: skip
    mean = None if mean_k is None else (mean_of[0], mean_of[1], count)
    keys, values = (x.expand(B * H, 1, -1, -1) for x in (k_cache, v_cache))
    return split_attention(q.reshape(B * H, -1, D), keys, values, stop, start, mean).view(q.shape)
