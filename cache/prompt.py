"""A prompt that comes in chunks: what a layer keeps until the last chunk, and texts read after the prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from kernels.rope import Rope, apply_rope
from runtime.errors import InputError


class Prompt:
    """The chunks that one layer has read of prompts: q, k and v before rotation, and k_rot, [B, H, total, D] each."""

    def __init__(self, total: int):
        self.total, self.end = total, 0  # the length of the padded prompts, and how many tokens have come
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
    """A text of a second pass: tokens [B, n] right-padded, lengths [B], 0 for a row without one. It follows the prompt,
    so its first token has the position that the first decoded token will have."""

    tokens: Tensor
    lengths: Tensor


def second_pass(layers: Iterable[Any], *prompt: Any) -> Sequence[Text]:
    """The texts that methods ask for by `KVMethod.second_pass`, which go through all layers. Raises InputError if
    layers ask for different ones."""
    asked = {m.alike: texts for m in layers if (texts := m.second_pass(*prompt))}
    first = next(iter(asked.values()), ())
    for texts in [*asked.values()][1:]:
        for one, other in zip_longest(first, texts):
            if type(one) is not type(other) or any(
                not torch.equal(torch.as_tensor(x), torch.as_tensor(getattr(other, name)))
                for name, x in vars(one).items()
            ):
                names = " and ".join(dict.fromkeys(cls.__name__ for cls, *_ in asked))
                raise InputError(f"layers of {names} read a prompt again in different ways: give all that do the same "
                                 "method, and the same chunk")  # fmt: skip
    return first


class Angles:
    """Rotates texts that follow prompts of lengths [B], whose positions may exceed those of the cache."""

    def __init__(self, rope: Rope, lengths: Tensor, most: int):
        self.first, self.like, self.most = lengths, rope, most

    @functools.cached_property
    def rope(self) -> Rope:
        rope = Rope(*self.like.of, len(self.first), self.most, self.first.device, self.like.ahead)
        rope.set_prompt(self.first)
        return rope

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the tokens of a text, x [B, H, n, D]."""
        at = self.first[:, None] + torch.arange(x.shape[2], device=x.device)
        return apply_rope(x, *(t[:, None] for t in self.rope.at(at)))

    def rotated(self, read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`read(q, k, v, ...)` for q and k that are not rotated yet."""
        return lambda q, k, *rest: read(self.rotate(q), self.rotate(k), *rest)
