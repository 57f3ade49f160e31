"""Tokens in full precision beside a compressed store: the newest ones, and a prompt's first and last tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cache.base import CacheShape, Storage
from kernels.gather_attention import gather_rows
from kernels.ring import ring_positions
from kernels.rotate_append import append_token
from runtime.errors import InputError


class Tail(Storage):
    """A ring of decoded tokens, behind `lead` slots for tokens of the prompt.

    When the ring is full, its oldest tokens move to a compressed store between steps, `flush` at a time.
    """

    k: Tensor  # [B, Hkv, lead + size, D]: the s-th decoded token is in slot lead + s % size
    v: Tensor
    prompt_len: Tensor  # [B] int64
    layout = Storage.first_slots

    def __init__(self, shape: CacheShape, size: int, flush: int, lead: int = 0):
        super().__init__(shape)
        self.lead, self.size, self.flush = lead, size, flush
        # behind a token that moves, as many may be taken back, and as many drafted
        if size - 2 * shape.drafts < flush and size < shape.max_decoded:
            raise InputError(f"{flush} tokens that move at a time and twice {shape.drafts} drafts exceed the {size} "
                             "slots in full precision: give more of these, or draft fewer")  # fmt: skip
        for name in "kv":
            self.buffer(name, (shape.max_batch, shape.n_kv_head, lead + size, shape.head_dim))
        self.buffer("prompt_len", (shape.max_batch,), torch.int64)
        self.moved = 0  # decoded tokens that have left the ring

    def put(self, k: Tensor, v: Tensor, newest: Tensor) -> None:
        """Store one token per row in place of the oldest: k and v [B, Hkv, D] in the slots `newest` [B]."""
        append_token(k, v, newest, self.k, self.v)

    def newest(self, pos: Tensor) -> Tensor:
        """The slot of the token at pos [B]."""
        return self.lead + (pos - self.prompt_len[: len(pos)]) % self.size

    def position(self, pos: Tensor) -> Tensor:
        """Positions of the ring's tokens [B, size], with the newest at pos [B]; -2 for empty slots and moved tokens."""
        prompt_len = self.prompt_len[: len(pos)]
        step = ring_positions(pos - prompt_len, self.size)
        return torch.where(step >= self.moved, step + prompt_len[:, None], -2)

    def due(self, step: int) -> bool:
        """Whether tokens must move after `step` decoded ones, because the next tokens would overwrite the oldest."""
        return step + self.shape.drafts - self.moved >= self.size

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Remove the oldest `flush` tokens -> their k and v [max_batch, Hkv, flush, D], and steps since the prompt
        [flush]."""
        step = torch.arange(self.flush, device=self.k.device) + self.moved
        slot = self.lead + step % self.size
        self.moved += self.flush
        return self.k[:, :, slot], self.v[:, :, slot], step

    def reset(self) -> None:
        self.moved = 0
        self.prompt_len.zero_()


class Exempt(Tail):
    """A prompt's first and last tokens, followed by a block of decoded tokens, which all move at once."""

    def __init__(self, shape: CacheShape, first: int, last: int, block: int):
        super().__init__(shape, block, block, lead=min(first + last, shape.max_seq_len))
        self.first, self.last = first, last

    def layout(self, tokens: int) -> dict[str, Any]:
        return dict(k=self.lead, v=self.lead)  # decoded tokens come after the lead

    def mask(self, lengths: Tensor, S: int) -> Tensor:
        """Which tokens of prompts of lengths [B], padded to S, are among the first or last: bool [B, S]."""
        t = torch.arange(S, device=lengths.device)
        return (t < self.first) | (t >= lengths[:, None] - self.last)

    def put_prompt(self, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Store the first and last tokens of prompts: k, v [B, Hkv, S, D], lengths [B]."""
        B, S = len(k), k.shape[2]
        self.prompt_len[:B] = lengths
        at = self._place(min(self.lead, S), lengths).clamp(max=S - 1)[:, None]
        n = at.shape[2]
        self.k[:B, :, :n], self.v[:B, :, :n] = gather_rows(k, at), gather_rows(v, at)

    def _place(self, n: int, lengths: Tensor) -> Tensor:
        """The prompt token in each of the first n slots, [B, n]: first ones, then last ones, none twice."""
        slot, middle = torch.arange(n, device=lengths.device), (lengths - self.first - self.last).clamp(min=0)
        return torch.where(slot < self.first, slot, slot + middle[:, None])

    def filled(self, pos: Tensor) -> Tensor:
        """Which slots hold a token, the newest at pos [B]: bool [B, lead + size]."""
        slot = torch.arange(self.lead + self.size, device=pos.device)
        exempt = slot < self.prompt_len[: len(pos), None].clamp(max=self.lead)
        return exempt | (slot >= self.lead) & (slot <= self.newest(pos)[:, None])

    def position(self, pos: Tensor) -> Tensor:
        """[B, lead + size], as in Tail."""
        at = torch.cat((self._place(self.lead, self.prompt_len[: len(pos)]), super().position(pos)), 1)
        return torch.where(self.filled(pos), at, -2)
