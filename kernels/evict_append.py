"""Puts a token into a cache of fixed slots: into the next free one or, in each head, into that of the lowest score."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.op import operation
from kernels.rotate_append import append_token


@operation(cpp=True, mutates=("k_cache", "v_cache", "place", "filled", "score"))
def evict_append(
    k: Tensor, v: Tensor, pos: Tensor, k_cache: Tensor, v_cache: Tensor, place: Tensor, filled: Tensor,
    score: Tensor | None = None, most: Tensor | None = None, since: Tensor | None = None,
    new_score: Tensor | None = None,
) -> None:  # fmt: skip
    """In place, k and v [B, H, D] of the tokens at pos [B] into caches [>= B, H, N, D], in which the first filled
    [>= B] slots of a row hold the tokens at place int32 [>= B, H, N].

    With score fp32 [>= B, H, N] a row holds `most` [B] tokens: then the lowest score of those up to position `since`
    [B] leaves, of equal ones that in the first slot. The new token's is new_score fp32 [B, H]; None: 0. Without score
    all slots may fill, and what comes then goes to the last one.
    """
    (B, H), N = k.shape[:2], k_cache.shape[2]
    n = filled[:B]
    grows = n < (N if most is None else most)
    slot = n[:, None].clamp(max=N - 1)
    if score is not None:
        assert since is not None, "tokens leave up to a position"
        fixed = (place[:B] > since[:, None, None]) | (torch.arange(N, device=k.device) >= n[:, None])[:, None]
        slot = torch.where(grows[:, None], slot, score[:B].masked_fill(fixed, float("inf")).argmin(-1))  # [B, H]
    row, head = torch.arange(B, device=k.device)[:, None], torch.arange(H, device=k.device)
    append_token(k, v, slot.expand(B, H), k_cache, v_cache)
    place[row, head, slot] = pos[:, None].int().expand(B, H)
    if score is not None:
        score[row, head, slot] = k.new_zeros(B, H, dtype=torch.float32) if new_score is None else new_score
    filled[:B] = n + grows
