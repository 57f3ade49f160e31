"""A prompt that is read in pieces: what a layer holds of it until it is whole, and what is read behind it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rope import Rope, apply_rope


class Prompt:
    """What one layer has read of prompts that come in chunks: q, k and v as they came and k_rot, [B, H, total, D]."""

    def __init__(self, total: int):
        self.total, self.end = total, 0  # tokens of the padded prompts, and how many have come
        self._parts: dict[str, Tensor] = {}

    def put(self, start: int, **parts: Tensor) -> None:
        for name, x in parts.items():
            if name not in self._parts:
                self._parts[name] = x.new_empty(*x.shape[:2], self.total, x.shape[3])
            self.end = start + x.shape[2]
            self._parts[name][:, :, start : self.end] = x

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._parts[name][:, :, : self.end]
        except KeyError:
            raise AttributeError(f"{name} of a prompt: it has k, v, k_rot, and q if queries are read") from None


@dataclass
class Text:
    """A text of a second pass: tokens [B, n] right-padded, lengths [B], 0 where a row has none. It stands behind the
    prompt: its first token has the position that the first decoded one will have."""

    tokens: Tensor
    lengths: Tensor


class Angles:
    """The rotation of texts behind prompts of lengths [B], whose positions may be beyond those of a cache."""

    def __init__(self, rope: Rope, lengths: Tensor, most: int):
        self.first, self.of, self.most = lengths, rope.of, most

    @functools.cached_property
    def rope(self) -> Rope:
        rope = Rope(*self.of, len(self.first), self.most, self.first.device)
        rope.set_prompt(self.first)
        return rope

    def rotate(self, x: Tensor) -> Tensor:
        """x [B, H, n, D], the tokens of a text."""
        at = self.first[:, None] + torch.arange(x.shape[2], device=x.device)
        return apply_rope(x, *(t[:, None] for t in self.rope.at(at)))
