"""Attention of one query per row where each KV head holds its own number of tokens, stored one head after another.

Heads become rows of `decode_attention`'s kernels, with one list of slots for all: only what each head holds is read,
and programs are shared out accordingly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dense_attention import decode_attention, split_attention
from kernels.op import operation, whole_vectors


def spans(first: Tensor, filled: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Each head's first slot and the end of its filled slots, [B, H], among the H * N of its row: first [B, H + 1] is
    where heads begin, then H * N; the last N - filled [B] of each head's slots are free."""
    return first[:, :-1], first[:, 1:] - N + filled[:, None]


@operation(cpp=True, mutates=("k_cache", "v_cache", "place", "filled"))
def ragged_append(
    k: Tensor, v: Tensor, pos: Tensor, k_cache: Tensor, v_cache: Tensor, place: Tensor, first: Tensor, filled: Tensor
) -> None:
    """In place, k and v [B, H, D] of the tokens at pos [B] into each head's next free slot, the last of the row if
    there is none: caches [>= B, H, N, D], place int32 [>= B, H, N]; first and filled [>= B] as in `spans`."""
    (B, H), N = k.shape[:2], k_cache.shape[2]
    row, slot = torch.arange(B, device=k.device)[:, None], spans(first[:B], filled[:B], N)[1].clamp(max=H * N - 1)
    for store, x in ((k_cache, k), (v_cache, v), (place, pos[:, None].int().expand(B, H))):
        store.flatten(1, 2)[row, slot] = x
    filled[:B] += 1


@operation(cpp=whole_vectors, opaque=True)
def ragged_attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor, filled: Tensor) -> Tensor:
    """Softmax attention of each KV head's query heads over the slots that it has filled.

    q [B, Hq, D], k and v [>= B, Hkv, N, D] (rotated, contiguous), first and filled [>= B] as in `spans`, no head empty
    -> [B, Hq, D]. Scale 1/sqrt(D). Free slots may hold anything.
    """
    q_rows, k, v, start, stop = _as_rows(q, k, v, first, filled)
    return decode_attention.reference(q_rows, k, v, start, stop).view(q.shape)


@ragged_attention.triton
def _(q: Tensor, k: Tensor, v: Tensor, first: Tensor, filled: Tensor) -> Tensor:
    q_rows, k, v, start, stop = _as_rows(q, k, v, first, filled)
    return split_attention(q_rows, k, v, stop, start).view(q.shape)


def _as_rows(q: Tensor, k: Tensor, v: Tensor, first: Tensor, filled: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values with one row for each KV head, all of which have the same slots; starts and stops."""
    B, (H, N) = len(q), k.shape[1:3]
    row = torch.arange(B, device=q.device)[:, None] * (H * N)
    start, stop = ((x + row).flatten() for x in spans(first[:B], filled[:B], N))
    k, v = (x.flatten(0, 2).expand(B * H, 1, -1, -1) for x in (k, v))
    return q.reshape(B * H, -1, q.shape[2]), k, v, start, stop
