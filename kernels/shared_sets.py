"""Sets of tokens that layers, heads and steps share (HShare): who chooses one in a step, and who takes whose.

Every `steps` steps a set is due. `source` [L, >= B] says which layer's set a layer takes, its own or an earlier one's;
`heads` [>= B, H] which head's, of all heads of the layer; `number` [1] is the layer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.op import operation
from kernels.select import with_run


@operation(cpp=True, fake=lambda pos, heads, *_: pos.new_empty(len(pos), heads.shape[1]))
def choosers_last(
    pos: Tensor, heads: Tensor, source: Tensor, number: Tensor, first_head: int, steps: int, recent: int
) -> Tensor:
    """The last token that each head may choose in this step, with the newest at pos [B]: the one before the `recent`
    ones, or -1 if the head takes another's set, or if none is due -> int64 [B, H]. The heads begin at first_head."""
    B, H = len(pos), heads.shape[1]
    own = torch.arange(first_head, first_head + H, device=pos.device) == heads[:B]
    chooses = ((pos + 1) % steps == 0) & (source[number, :B][0] == number)
    return torch.where(chooses[:, None] & own, (pos - recent).clamp(min=-1)[:, None], -1)


@operation(
    cpp=True,
    mutates=("sets", "counts", "newer"),
    reads=lambda idx, *_: dict(sets=idx.numel() * idx.element_size()),
    fake=lambda idx, count, pos, heads, source, number, sets, counts, newer, steps, recent, last, k: (
        idx.new_empty(len(pos), heads.shape[1], k), idx.new_empty(len(pos), heads.shape[1])
    ),
)  # fmt: skip
def take_sets(
    idx: Tensor, count: Tensor, pos: Tensor, heads: Tensor, source: Tensor, number: Tensor,
    sets: Tensor, counts: Tensor, newer: Tensor, steps: int, recent: int, last: int, k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The set of each head, followed by all tokens newer than those it was chosen from -> idx [B, H, k], count [B, H].

    idx [B, all heads, n] and count [B, all heads]: what the layer's heads chose. In place, where a set is due: sets
    [L, >= B, H, n] and counts [L, >= B, H] of the layer, and newer [>= B], where newer tokens begin. Tokens that left
    the recent window since are still attended to (published code). No slot is above `last`.
    """
    B, row, heads = len(pos), torch.arange(len(pos), device=pos.device), heads[: len(pos)]
    due, of = (pos + 1) % steps == 0, source[number, :B][0]
    idx, count = idx.gather(1, heads[..., None].expand(-1, -1, idx.shape[2])), count.gather(1, heads)
    follows = (of != number)[:, None]
    idx = torch.where(follows[..., None], sets[of, row], idx)
    count = torch.where(follows, counts[of, row], count)
    idx = torch.where(due[:, None, None], idx, sets[number, :B][0])
    count = torch.where(due[:, None], count, counts[number, :B][0])
    first = torch.where(due, (pos + 1 - recent).clamp(min=0), newer[:B])
    sets[number, :B], counts[number, :B], newer[:B] = idx[None], count[None], first
    return with_run(idx, count, first, last, k), count + (pos - first + 1)[:, None]
