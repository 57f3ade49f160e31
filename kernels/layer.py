"""A layer before and after its attention, for few rows on a CPU: two C++ calls instead of thirty of torch.

There the products take as long as what dispatches the norms, the gate and the residuals around them. Everywhere else
the blocks of model.py do the same one operation at a time, and a compiler fuses them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import version_for
from kernels.linear import MANY, packed_linear
from kernels.op import operation


class Matrix(NamedTuple):
    """The operands of a linear layer: those of `packed_linear`, or with bits = 0 a weight [out, in] that is not packed
    and its bias, in the dtype of x."""

    weight: Tensor
    scale: Tensor | None
    step: Tensor | None
    zero: Tensor | None
    minimum: Tensor | None
    min_step: Tensor | None
    bias: Tensor | None
    bits: int

    @classmethod
    def dense(cls, weight: Tensor, bias: Tensor | None) -> Matrix:
        return cls(weight, None, None, None, None, None, bias, 0)

    def times(self, x: Tensor) -> Tensor:
        return packed_linear.reference(x, *self) if self.bits else F.linear(x, self.weight, self.bias)


def has_few_rows(x: Tensor) -> bool:
    """Whether a layer should take the operations below for x [..., dim], if its sizes and matrices allow it."""
    few = 0 < x.numel() // x.shape[-1] < MANY
    return few and version_for(x.device, x.dtype) == "cpp" and not torch.is_grad_enabled()


@operation(
    cpp=True,
    fake=lambda x, norm, eps, w, q_norm, k_norm, n_head, n_kv_head, head_dim: x.new_empty(
        *x.shape[:-1], n_head + 2 * n_kv_head, head_dim
    ),
)
def project_heads(
    x: Tensor, norm: Tensor, eps: float, w: Matrix, q_norm: Tensor | None, k_norm: Tensor | None,
    n_head: int, n_kv_head: int, head_dim: int,
) -> Tensor:  # fmt: skip
    """RMSNorm of x [..., dim], its product with w, the query, key and value weights, and norms of query and key heads,
    if there are any: all heads [..., Hq + 2 Hkv, D], before rotation."""
    sizes = n_head, n_kv_head, n_kv_head
    heads = w.times(F.rms_norm(x, norm.shape, norm, eps)).unflatten(-1, (sum(sizes), head_dim))
    if q_norm is None or k_norm is None:
        return heads
    q, k, v = heads.split(sizes, -2)
    return torch.cat((F.rms_norm(q, q_norm.shape, q_norm, eps), F.rms_norm(k, k_norm.shape, k_norm, eps), v), -2)


@operation(cpp=True, fake=lambda x, *_: x.new_empty(x.shape))
def finish_layer(
    x: Tensor, y: Tensor, wo: Matrix, norm: Tensor, eps: float, w13: Matrix, w2: Matrix
) -> Tensor:  # fmt: skip
    """x [..., dim] + W_O of the heads' outputs y [..., Hq, D], and the gated MLP of its RMSNorm, W_2 (silu(W_1 h) *
    W_3 h), added to that: [..., dim]."""
    x = x + wo.times(y.flatten(-2))
    gate, up = w13.times(F.rms_norm(x, norm.shape, norm, eps)).chunk(2, -1)
    return x + w2.times(F.silu(gate) * up)
