"""Observes what every layer attends to at every step, and with which weights.

    with observe(model) as trace:
        model.decode(tokens, pos)
    trace[0].position, trace[0].weight

Works for every method in eager mode. A compiled step is not traced, because its graph was compiled without a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cache.base import Attended, KVMethod


@dataclass
class Step:
    """One layer's attention at one decode step, over N slots of its cache.

    A method that treats heads in two ways (razor) makes two of them, each with its KV heads.
    """

    layer: int
    pos: Tensor  # [B] int64, position of the decoded token
    position: Tensor  # [B, Hkv, N] int64, in the text; -1: not one known position; -2: an empty slot
    weight: Tensor  # fp32 [B, Hq, N], softmax weights, 0 for empty slots
    heads: list[int] | None = None  # which KV heads of the layer these are; None: all

    def mass(self, length: int) -> Tensor:
        """The weights by position in the text, fp32 [B, Hq, length], without slots that have no single position."""
        B, Hq, N = self.weight.shape
        at = self.position.repeat_interleave(Hq // self.position.shape[1], 1)
        inside = (at >= 0) & (at < length)
        out = torch.zeros(B, Hq, length, device=self.weight.device)
        return out.scatter_add(2, torch.where(inside, at, 0), torch.where(inside, self.weight, 0.0))


@dataclass
class Trace:
    """The steps of all layers in the order in which they ran."""

    steps: list[Step] = field(default_factory=list)

    def step(self, method: KVMethod, attended: Attended, pos: Tensor) -> None:
        """Called by KVMethod.decode at every step."""
        heads = None if method.heads is None else method.heads.tolist()
        # copies, since both may be views of buffers that the next step overwrites
        self.steps.append(Step(method.layer, pos.clone(), attended.position.clone(), attended.weights().clone(), heads))

    def layer(self, layer: int) -> list[Step]:
        return [s for s in self.steps if s.layer == layer]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, i: int) -> Step:
        return self.steps[i]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)


@contextlib.contextmanager
def observe(model: Any) -> Iterator[Trace]:
    """Record every decode step within the context. model: a Transformer with a cache, or an LLM."""
    model = getattr(model, "model", model)
    trace = Trace()
    methods = [m for m in model.cache.modules() if isinstance(m, KVMethod)]
    for method in methods:
        method.trace = trace
    try:
        yield trace
    finally:
        for method in methods:
            method.trace = None
