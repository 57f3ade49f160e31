"""Loki: keys in the basis of their principal components, the first quarter of which scores all tokens.

The basis is orthonormal and of full rank, and queries are transformed into it too, so their products with keys do not
change. No second copy of the keys is needed: scoring reads the first d of D coordinates in place, and the best quarter
of the tokens is attended to exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import knob
from cache.budget import TopP, check_part, part_of
from cache.selecting import Heads, Selecting
from cache.statistic import Statistic, principal
from kernels.latent_score import head_scores
from kernels.rotate_append import turn_heads
from runtime.errors import InputError

PRESETS = {
    "loki-12.5": dict(budget=0.125, dims=0.25),  # k_f = 0.125, d_f = 0.25 of Loki
    "loki-12.5-50": dict(budget=0.125, dims=0.5),  # k_f = 0.125, d_f = 0.5
    "loki-4k": dict(budget=512, sinks=16, recent=64),  # SALS, Table 4
}


class KeyComponents(Statistic):
    """Centred PCA of the keys of every head: after rotation, or with `rotated` False before it."""

    rotated = True
    name = "pca"

    def measure(self, t):
        k = t.k_rot if self.rotated else t.k
        return dict(kk=torch.einsum("snd,sne->nde", k, k), k=k.sum(0))

    def finish(self, mean):
        values, basis = principal(mean["kk"] - mean["k"][:, :, None] * mean["k"][:, None])
        return dict(eigenvalues=values, basis=basis, mean=mean["k"])


class KeyComponentsBefore(KeyComponents):
    """Components of keys before rotation; Loki applies them to rotated keys all the same."""

    rotated = False
    name, knobs = "pca_before", "calibrated=before"


class Loki(Selecting):
    paper = "Singhania et al. 2024, Loki: Low-rank Keys for Efficient Sparse Attention"
    statistics = (KeyComponents(),)
    deviates = frozenset({"rereads"})
    own_basis = True

    basis: Tensor  # [Hkv, D, D], components in columns, the largest first

    @dataclass
    class Args(Selecting.Args):
        budget: int | float | TopP = knob(0.25, "tokens attended, k_f of Loki")
        sinks: int = knob(0, "first tokens always attended; the paper forces none", low=0)
        recent: int = knob(1, "newest tokens always attended: 1 is the current one (ours)", low=1)
        dims: int | float = knob(0.25, "coordinates that score, d_f: a number or a share of head_dim", 0, 10**6)
        calibrated: Literal["after", "before"] = knob(
            "after", "components of keys after rotation, or before it, applied after it in both cases (published code)"
        )
        heads: Heads = knob(
            "group",
            "a list per KV head by its group's sum, softmax or max (ours), or per query head (published code)",
        )

        def __post_init__(self):
            super().__post_init__()
            check_part("dims", self.dims)

    @classmethod
    def needs(cls, args):
        return (KeyComponents() if args.calibrated == "after" else KeyComponentsBefore(),)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        H, D = shape.n_kv_head, shape.head_dim
        self.d = part_of(args.dims, D)
        if self.d > D:
            raise InputError(f"loki: {self.d} coordinates are more than the head_dim of {D}: lower dims")
        name = self.needs(args)[0].name
        self.constant("basis", (H, D, D), calib.get(layer, f"{name}.basis") if calib else None)

    # ---- everything in the basis: q . k does not change ----

    def rotate_append(self, q, k, v, pos):
        return turn_heads(super().rotate_append(q, k, v, pos), self.basis)

    def compress(self, q, k, v, lengths):
        super().compress(q, k @ self.basis, v, lengths)

    def append(self, k, v, pos):
        super().append(turn_heads(k, self.basis), v, pos)

    def scores(self, q, pos):
        """Approximate scores: products in the first d coordinates, of the group's sum or of each query."""
        if self.by_query:
            return self._products(q, pos)
        groups = q.unflatten(1, (self.shape.n_kv_head, -1)).sum(2, keepdim=True)
        return head_scores(groups[..., : self.d], self.k[..., : self.d], pos)[:, :, 0]

    def _products(self, q, pos):
        groups = q.unflatten(1, (self.shape.n_kv_head, -1))[..., : self.d]
        return head_scores(groups.contiguous(), self.k[..., : self.d], pos).flatten(1, 2)

    def logits(self, q, pos):
        return self._products(q, pos) * q.shape[2] ** -0.5

    # ---- accounting ----

    def score_bytes(self, pos):
        """d coordinates of every key; the chosen keys are read again, whole."""
        return (pos + 1) * self.d * self.shape.dtype.itemsize

    def traffic(self, pos):
        """The basis is read twice: for the new key, and for the query."""
        return super().traffic(pos) + 2 * self.basis.numel() * self.basis.element_size()
