"""Attention of one query per row where each KV head holds its own number of tokens, stored one head after another.

Heads become rows of `decode_attention`'s kernels, with one list of slots for all: only what each head holds is read,
and programs are shared out accordingly.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernels.dense_attention import decode_attention, split_attention
from kernels.op import operation, whole_vectors


@operation(cpp=whole_vectors, opaque=True)
def ragged_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Softmax attention of each KV head's query heads over its own slots start <= t < stop.

    q [B, Hq, D], k and v [N, D] (rotated), the slots of all rows and heads, start and stop [B, Hkv] int64, start < stop
    -> [B, Hq, D]. Scale 1/sqrt(D). Slots that no head has may hold anything.
    """
    return _of_rows(lambda q, k, v, stop, start: decode_attention.reference(q, k, v, start, stop), q, k, v, start, stop)


@ragged_attention.triton
def _(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    return _of_rows(split_attention, q, k, v, start, stop)


def _of_rows(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Call `attend` with one row for each KV head; all rows have the same slots."""
    n = start.numel()
    k, v = (x.expand(n, 1, *x.shape) for x in (k, v))
    return attend(q.reshape(n, -1, q.shape[2]), k, v, stop.flatten(), start.flatten()).view(q.shape)
