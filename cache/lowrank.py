"""Keys, or values, as coordinates in an orthonormal basis per KV head, which is calibrated and may follow the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cache.base import CacheShape, Storage
from kernels.lowrank import SLOTS, project, reconstruct
from kernels.oja import change_basis, oja_step, orthonormalize


class LowRank(Storage):
    """r numbers a token. They lie tokens side by side, slots a multiple of SLOTS, as kernels/lowrank.py wants it."""

    latents: Tensor  # [B, Hkv, r, slots]
    calibrated: Tensor  # [Hkv, D, r] fp32
    current: Tensor | None  # [B, Hkv, D, r] fp32, where it follows the text

    def __init__(
        self,
        shape: CacheShape,
        slots: int,
        layer: int,
        calib: Any,
        name: str,
        share: float,
        energy: float | None,
        follows: bool,
    ):
        """calib holds `name`_basis [Hkv, D, D] of the layer, its columns by their `name`_eigenvalues [Hkv, D], falling;
        None: sizes only. share and energy: see `rank_of`. follows: whether the basis will turn."""
        super().__init__(shape)
        B, H, _, D = shape.kv
        values = calib.get(layer, f"{name}_eigenvalues") if calib and energy is not None else None
        self.rank, self.slots = rank_of(D, share, energy, values), -(-slots // SLOTS) * SLOTS
        basis = calib.get(layer, f"{name}_basis")[..., : self.rank] if calib else None
        self.constant("calibrated", (H, D, self.rank), basis, torch.float32)
        self.current = self.buffer("current", (B, H, D, self.rank), torch.float32) if follows else None
        self.buffer("latents", (B, H, self.rank, self.slots))

    def basis(self, B: int) -> Tensor:
        """[B, Hkv, D, r], or [1, ...] where all rows share it."""
        return self.calibrated[None] if self.current is None else self.current[:B]

    def stored(self, B: int) -> Tensor:
        """All slots, [B, Hkv, slots, r]."""
        return self.latents[:B].mT

    def restored(self, B: int) -> Tensor:
        """The tokens of all slots, [B, Hkv, slots, D]."""
        return reconstruct(self.stored(B), self.basis(B))

    def seen(self, x: Tensor) -> Tensor:
        """Tokens [B, Hkv, n, D] as they would come back."""
        basis = self.basis(len(x))
        return reconstruct(project(x, basis), basis)

    def put_prompt(self, x: Tensor) -> None:
        """Tokens [B, Hkv, n, D] to the first n slots."""
        self.latents[: len(x), ..., : x.shape[2]] = project(x, self.basis(len(x))).mT

    def put(self, x: Tensor, slots: Tensor) -> None:
        """Tokens [B, Hkv, n, D] to slots [B, n]."""
        row = torch.arange(len(x), device=x.device)[:, None]
        # advanced indices around slices put what is between behind: [B, n, Hkv, r]
        self.latents[row, :, :, slots] = project(x, self.basis(len(x))).transpose(1, 2)

    def turn(self, x: Tensor, eta: float, rule: str, carry: bool = False) -> None:
        """A step of Oja's rule towards tokens x [B, Hkv, n, D]; carry: stored latents follow, else they stay as they
        are, coordinates of a basis that is gone."""
        basis = self.basis(len(x))
        new = orthonormalize(oja_step(basis, x.float(), eta, rule))
        if carry:
            change_basis(self.stored(len(x)), basis, new)
        basis.copy_(new)

    def reset(self) -> None:
        if self.current is not None:
            self.current.copy_(self.calibrated.expand_as(self.current))

    def basis_bytes(self) -> int:
        """Of what a decode step reads: per row where it follows the text."""
        return 4 * self.basis(self.shape.max_batch).numel()


def rank_of(head_dim: int, share: float, energy: float | None, eigenvalues: Tensor | None) -> int:
    """A share of head_dim; or the smallest rank that holds a share of the energy in every head, if that is given.

    eigenvalues [Hkv, D], falling; None: sizes only, without a calibration that tells more than the bound.
    """
    if energy is None or eigenvalues is None:
        return head_dim if energy is not None else max(1, round(share * head_dim))
    values = eigenvalues.double()
    held = values.cumsum(-1) / values.sum(-1, keepdim=True)
    return min(head_dim, int((held < energy).sum(-1).max()) + 1)
