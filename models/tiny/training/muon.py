"""Muon, the optimizer for the matrices."""

from __future__ import annotations

import numpy as np
import torch

from model import Transformer

WEIGHT_DECAY = 0.02


class Muon:
    """Momentum orthogonalized by Newton-Schulz (Jordan et al. 2024), with q, k, v, gate and up as separate matrices.

    Matrices of one shape are updated as one batch, which on a CPU is several times faster than one by one.
    """

    def __init__(self, model: Transformer, beta: float = 0.95):
        a, self.beta = model.args, beta
        self.views: list[tuple[torch.nn.Parameter, slice]] = []
        for name, p in model.named_parameters():
            if p.dim() != 2 or "tok_embeddings" in name:
                continue
            q, kv = a.n_head * a.head_dim, a.n_kv_head * a.head_dim
            sizes = [q, kv, kv] if "wqkv" in name else [a.ffn_dim] * 2 if "w13" in name else [p.shape[0]]
            ends = np.cumsum([0, *sizes])
            self.views += [(p, slice(int(i), int(j))) for i, j in zip(ends[:-1], ends[1:], strict=True)]
        self.groups: dict[tuple[int, int], list[tuple[torch.nn.Parameter, slice]]] = {}
        for p, s in self.views:
            r, c = s.stop - s.start, p.shape[1]
            self.groups.setdefault((min(r, c), max(r, c)), []).append((p, s))
        dev = self.views[0][0].device
        self.momentum = {k: torch.zeros(len(v), *k, device=dev) for k, v in self.groups.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, views in self.groups.items():
            views = [(p, s) for p, s in views if p.grad is not None]  # layers before their first stage have none
            if not views:
                continue
            grads = [p.grad[s] for p, s in views]  # type: ignore[index]
            G = torch.stack([g if g.shape[0] <= g.shape[1] else g.T for g in grads])
            m = self.momentum[shape][: len(views)].lerp_(G, 1 - self.beta)
            X = G.lerp(m, self.beta)
            X = (X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
            for _ in range(5):
                A = X @ X.mT
                X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
            for (p, s), x, g in zip(views, X, grads, strict=True):
                w = p.data[s]
                w.mul_(1 - lr * WEIGHT_DECAY)
                tall = max(1.0, g.shape[0] / g.shape[1]) ** 0.5
                w.add_(x if g.shape[0] <= g.shape[1] else x.T, alpha=-lr * tall)
