"""A mixture of experts in place of a block's MLP: Mixtral, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

from kernels.experts import dense_experts, packed_experts
from kernels.linear import dense_linear, packed_linear
from runtime.parallel import Ranks
from weights.linear import ExpertsLinear, Linear, PackedLinear

FEW = 64  # tokens, a decode step's, for which each gathers its experts; a prompt's are grouped by expert


def of_each(linear: nn.Module, x: Tensor, expert: Tensor, experts: int) -> Tensor:
    """x [N, in], expert [N] int64 -> [N, out]: each row with the weight of its expert."""
    if isinstance(linear, PackedLinear):
        return packed_experts(x, expert, *linear.weight, linear.bits, experts)
    return dense_experts(x, expert, linear.weight, experts)  # type: ignore[arg-type]


def of_one(linear: nn.Module, x: Tensor, expert: int, experts: int) -> Tensor:
    """x [..., in] -> [..., out] by the weight of one expert."""
    w = linear.weight
    n = len(w.packed if isinstance(w, tuple) else w) // experts  # type: ignore[arg-type]
    own = slice(expert * n, (expert + 1) * n)
    if isinstance(linear, PackedLinear):
        return packed_linear(x, *linear.weight.blocks(own), None, linear.bits)
    return dense_linear(x, w[own])  # type: ignore[index]


class Experts(nn.Module):
    """Each token goes through `active` of the experts, and through one that all share, if there is one."""

    def __init__(self, dim: int, experts: int, active: int, expert_dim: int, norm: bool,
                 act: Callable[[Tensor], Tensor], ranks: Ranks, shared: nn.Module | None):  # fmt: skip
        """expert_dim: the width of an expert on this rank. norm: the weights of a token's experts sum to 1."""
        super().__init__()
        self.experts, self.active, self.norm, self.act, self.ranks = experts, active, norm, act, ranks
        self.router = Linear(dim, experts, bias=False)
        self.w13 = ExpertsLinear(dim, [expert_dim] * 2 * experts, bias=False)  # of each expert gate and up
        self.w2 = ExpertsLinear(expert_dim, [dim] * experts, bias=False)
        self.shared = shared
        if shared is not None:
            self.shared_gate = Linear(dim, 1, bias=False)

    def nbytes(self) -> int:
        """Bytes of all experts but the shared one."""
        return sum(t.nbytes for m in (self.w13, self.w2) for t in (*m.parameters(), *m.buffers()))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, dim] -> weights and numbers of each token's experts [N, active]."""
        weight, chosen = self.router(x).float().softmax(-1).topk(self.active)
        if self.norm:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight.to(x.dtype), chosen

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        tokens = x.flatten(0, -2)
        few = len(tokens) <= FEW or torch.compiler.is_compiling()
        y = self.ranks.sum((self.gathered if few else self.grouped)(tokens, *self.route(tokens)))
        if self.shared is not None:
            y = y + self.shared_gate(tokens).sigmoid() * self.shared(tokens)
        return y.view(x.shape)

    def gathered(self, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """x [N, dim] token by token: shapes depend on no data, so that a step is one graph."""
        expert = chosen.flatten()
        gate, up = of_each(self.w13, x.repeat_interleave(self.active, 0), expert, self.experts).chunk(2, -1)
        y = of_each(self.w2, self.act(gate) * up, expert, self.experts)
        return (y.view(*chosen.shape, -1) * weight[..., None]).sum(1)

    def grouped(self, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """x [N, dim] expert by expert, each with all of its tokens."""
        order, y = chosen.flatten().argsort(stable=True), torch.zeros_like(x)
        for expert, pairs in enumerate(order.split(chosen.flatten().bincount(minlength=self.experts).tolist())):
            if len(pairs):
                token = pairs // self.active
                gate, up = of_one(self.w13, x[token], expert, self.experts).chunk(2, -1)
                part = of_one(self.w2, self.act(gate) * up, expert, self.experts)
                y.index_add_(0, token, part * weight.flatten()[pairs, None])
        return y
