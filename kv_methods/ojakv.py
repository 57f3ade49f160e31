"""Low-rank keys and values (OjaKV) in bases that follow the text by Oja's rule; first and last prompt tokens full-rank.

Every row and KV head has an orthonormal basis of r_k columns for its rotated keys and one of r_v for its values, from
the calibration. A prompt turns them towards its most attended tokens and is then attended to and stored as coordinates
in them, but for its first and last tokens. Decoded tokens wait in full rank; every `update_every` of them the bases
turn again and the tokens join the latents. Nothing is selected: every token is attended. 308 of 512 bytes a token at
D = 128 and rank 0.6 (r = 77). `adapt=False` is StaticPCA-H, without exemptions StaticPCA, in the latent space Eigen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import Attended, KVMethod, knob
from cache.budget import budget_cap, budget_tokens
from cache.statistic import Statistic, principal
from errors import InputError
from kernels.dense_attention import prefill_attention
from kernels.gather_attention import gather_rows
from kernels.lowrank import SLOTS, lowrank_attention, project, reconstruct
from kernels.oja import change_basis, oja_step, orthonormalize
from kernels.prompt_scores import snapkv_scores

PRESETS = {
    "ojakv-0.8": dict(rank=0.8),  # OjaKV 0.8x, Tables 2-4
    "ojakv-0.6": dict(rank=0.6),  # OjaKV 0.6x, Tables 2-4
    "static_pca_h": dict(adapt=False),  # StaticPCA-H 0.6x, Tables 2-4
    "static_pca": dict(adapt=False, n_start=0, n_recent=0, latent=False),  # StaticPCA 0.6x, Tables 2-4
    "eigen": dict(adapt=False, n_start=0, n_recent=0),  # Eigen-N 0.6x, Tables 2-4
    "ojakv-snapkv": dict(rank=0.6, keep=0.5),  # OjaKV + SnapKV, Table 6
}


class HeadMoments(Statistic):
    """Principal directions of K^T K + Q^T Q of the group after rotation, and of V^T V, for every KV head."""

    name = "oja"

    def measure(self, t):
        k, v = (torch.einsum("snd,sne->nde", x, x) for x in (t.k_rot, t.v))
        return dict(k=k, v=v, q=torch.einsum("sngd,snge->nde", t.groups, t.groups))

    def finish(self, mean):
        (k_values, k_basis), (v_values, v_basis) = principal(mean["k"] + mean["q"]), principal(mean["v"])
        return dict(k_eigenvalues=k_values, k_basis=k_basis, v_eigenvalues=v_values, v_basis=v_basis)


class OjaKV(KVMethod):
    paper = "Zhu, Yang et al. 2025, OjaKV: Context-Aware Online Low-Rank KV Cache Compression with Oja's Rule"
    lossless = dict(rank=1.0)
    stress = dict(n_start=5, n_recent=5, update_every=6, query_window=8)
    statistics = (HeadMoments(),)

    @dataclass
    class Args:
        rank: float = knob(0.6, "columns of a basis, as a share of head_dim (Tables 2-4)")
        energy: float | None = knob(
            None, "instead of rank: the share of calibration energy that keys, and values, hold (App. A.2)"
        )
        adapt: bool = knob(True, "False: the bases stay as calibrated (StaticPCA-H)")
        n_start: int = knob(32, "first prompt tokens in full rank (Table 5)")
        n_recent: int = knob(32, "last prompt tokens in full rank (Table 5)")
        update_every: int = knob(32, "decoded tokens between updates (Table 5: T = 32)")
        query_window: int = knob(32, "last queries that rate the prompt (Table 5: w = 32)", 1, 4096)
        important: float = knob(0.05, "share of the prompt in its update (Table 5)")
        eta_prefill: float = knob(0.1, "learning rate of the prompt's update (Table 5)", 0, 10)
        eta_decode: float = knob(0.05, "learning rate while decoding (Table 5)", 0, 10)
        rule: Literal["column", "sequential", "batch", "raw"] = knob(
            "sequential",
            "Sec. 5.2, token by token, each step over |x|^2 (the division is ours); raw: Algorithm 1, diverges; "
            "column (over each column's energy), batch (over all energy): ours",
        )
        stale: Literal["rotate", "keep"] = knob(
            "rotate", "latents of an older basis: carried over to the new one, or left"
        )
        latent: bool = knob(True, "attend in the latent space (Sec. 3.2); False: reconstruct (Sec. 3.3)")
        keep: int | float | None = knob(
            None, "prompt tokens stored per KV head, exempt ones and SnapKV's choice, or their share (Sec. 7)"
        )
        room: int = knob(512, "with keep, where max_new_tokens is not known: slots for decoded tokens (ours)")

        def __post_init__(self):
            for name in ("rank", "energy", "important"):
                if (x := getattr(self, name)) is not None and not 0 < x <= 1:
                    raise InputError(f"ojakv: {name} is a share in (0, 1], got {x}")
            for name, least in dict(
                n_start=0, n_recent=0, room=0, update_every=1, query_window=1, eta_prefill=0, eta_decode=0
            ).items():
                if getattr(self, name) < least:
                    raise InputError(f"ojakv: {name} must be at least {least}, got {getattr(self, name)}")
            if self.keep is not None and not (0 < self.keep <= 1 if isinstance(self.keep, float) else self.keep >= 1):
                raise InputError(f"ojakv: keep is a number of tokens >= 1, or a share in (0, 1], got {self.keep}")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        B, H, T, D = shape.kv
        ranks = {x: self._rank(calib, x) for x in "kv"}
        self.r_k, self.r_v = ranks.values()
        self.n_exempt, self.block = min(args.n_start + args.n_recent, T), min(args.update_every, T)
        # Without `keep` a slot for every token. With it, for what is kept of the longest prompt and for what is
        # decoded; where that is not known, it might be all of T: then for `room` tokens, see `maintain`.
        room = args.room if shape.max_new_tokens is None else shape.max_decoded
        cap = T if args.keep is None else min(T, self._kept_of(shape.max_prompt) + room)
        self.cap = -(-cap // SLOTS) * SLOTS
        u_k, u_v = (calib and calib.get(layer, f"oja.{x}_basis")[..., :r] for x, r in ranks.items())
        self.k_calibrated = self.constant("k_calibrated", (H, D, self.r_k), u_k, torch.float32)
        self.v_calibrated = self.constant("v_calibrated", (H, D, self.r_v), u_v, torch.float32)
        if args.adapt:
            bases = (self.buffer(f"{x}_basis", (B, H, D, r), torch.float32) for x, r in ranks.items())
            self.k_basis, self.v_basis = bases
        # tokens side by side: see kernels/lowrank.py
        self.k_lat, self.v_lat = (self.buffer(f"{x}_lat", (B, H, r, self.cap)) for x, r in ranks.items())
        # the exempt tokens of the prompt, then the tokens decoded since the last update
        self.k_full, self.v_full = (self.buffer(f"{x}_full", (B, H, self.n_exempt + self.block, D)) for x in "kv")
        self.prompt_len = self.buffer("prompt_len", (B,), torch.int64)
        self.stored = self.buffer("stored", (B,), torch.int64)  # latents in use
        self.reset()

    def _rank(self, calib, x: str) -> int:
        """Of x, k or v: a share of D, or the smallest that holds `energy` in every head of the layer, App. A.2."""
        D = self.shape.head_dim
        if self.args.energy is None:
            return max(1, round(self.args.rank * D))
        if calib is None:
            return D  # sizes only: the rank is in the calibration, this is its bound
        values = calib.get(self.layer, f"oja.{x}_eigenvalues").double()  # [H, D]
        held = values.cumsum(-1) / values.sum(-1, keepdim=True)
        return min(D, int((held < self.args.energy).sum(-1).max()) + 1)

    def _kept_of(self, n: int) -> int:
        """Latents that `keep` leaves of a prompt of n tokens, of which the exempt ones are counted, too."""
        return max(0, budget_cap(self.args.keep, n) - min(n, self.args.n_start + self.args.n_recent))

    def bases(self, B: int) -> tuple[Tensor, Tensor]:
        """Of keys and values, [B, Hkv, D, r_k] and [..., r_v]; [1, ...] where all rows share them."""
        if self.args.adapt:
            return self.k_basis[:B], self.v_basis[:B]
        return self.k_calibrated[None], self.v_calibrated[None]

    # ---- the prompt: Algorithm 1, lines 1-7 ----

    def prefill(self, q, k, v, lengths):
        """As the base's, but every token that is not exempt is attended to as it will be stored (Sec. 3.3)."""
        q, k = self.rope.rotate_prompt(q), self.rope.rotate_prompt(k)
        self.compress(q, k, v, lengths)
        t = torch.arange(k.shape[2], device=k.device)
        middle = ((t >= self.args.n_start) & (t < lengths[:, None] - self.args.n_recent))[:, None, :, None]
        k_basis, v_basis = self.bases(len(k))
        k_hat = torch.where(middle, reconstruct(project(k, k_basis), k_basis), k)
        v_hat = torch.where(middle, reconstruct(project(v, v_basis), v_basis), v)
        return prefill_attention(q, k_hat, v_hat)

    def compress(self, q, k, v, lengths):
        B, S, first, last = len(k), k.shape[2], self.args.n_start, self.args.n_recent
        self.reset()
        self._rows = B
        self.prompt_len[:B] = lengths
        if self.args.adapt:
            self._adapt_to_prompt(q, k, v, lengths)
        # line 7; where the first and last tokens overlap, the prompt once: slot i is token i, and then from its end
        slot = torch.arange(min(self.n_exempt, S), device=k.device)
        from_end = lengths[:, None] - lengths[:, None].clamp(max=first + last) + slot
        exempt = torch.where(slot < first, slot, from_end).clamp(max=S - 1)[:, None]  # [B, 1, n]
        middle = (lengths - first - last).clamp(min=0)
        n, (k_basis, v_basis) = len(slot), self.bases(B)
        self.k_full[:B, :, :n], self.v_full[:B, :, :n] = gather_rows(k, exempt), gather_rows(v, exempt)
        if self.args.keep is None:
            self.stored[:B] = middle
            k, v = (x[:, :, first : max(first, S - last)] for x in (k, v))
        else:
            chosen, self.stored[:B] = self._snapkv(q, k, lengths, middle)
            self._kept = self._kept_of(S)  # of the longest prompt, known without asking the device
            k, v = gather_rows(k, chosen), gather_rows(v, chosen)
        n = k.shape[2]
        self.k_lat[:B, ..., :n], self.v_lat[:B, ..., :n] = project(k, k_basis).mT, project(v, v_basis).mT

    def _adapt_to_prompt(self, q, k, v, lengths):
        """One step on the tokens that the last queries attend to most, one set per row for all heads (lines 2-6)."""
        S = k.shape[2]
        scores = snapkv_scores(q, k, lengths, self.args.query_window, pool=1).sum(1)  # [B, S]
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices[:, : budget_cap(self.args.important, S)]
        chosen = torch.arange(ranked.shape[1], device=k.device) < budget_tokens(self.args.important, lengths)[:, None]
        # in the order of the text, which `sequential` sees; a row with fewer tokens than the batch ends in zeros
        at = torch.where(chosen, ranked, S).sort(-1).values.clamp(max=S - 1)[:, None]
        for basis, x in zip(self.bases(len(k)), (k, v), strict=True):
            tokens = torch.where(chosen[:, None, :, None], gather_rows(x, at).float(), 0)
            basis.copy_(orthonormalize(oja_step(basis, tokens, self.args.eta_prefill, self.args.rule)))

    def _snapkv(self, q, k, lengths, middle):
        """Positions [B, Hkv, n] of the middle tokens to store, best first, and how many of them [B] (Sec. 7)."""
        first, last, t = self.args.n_start, self.args.n_recent, torch.arange(k.shape[2], device=k.device)
        outside = (t < first) | (t >= lengths[:, None] - last)
        scores = snapkv_scores(q, k, lengths, self.args.query_window).masked_fill(outside[:, None], float("-inf"))
        # pooling makes equal scores: a stable sort takes the same tokens of them, however far the batch is padded
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices[..., : budget_cap(self.args.keep, len(t))]
        # m counts the exempt tokens, as SnapKV's capacity counts its window (Table 6: half the tokens at 0.6 are 30 %)
        exempt = lengths.clamp(max=first + last)
        return ranked, (budget_tokens(self.args.keep, lengths) - exempt).clamp(min=0).minimum(middle)

    # ---- one token per row ----

    def append(self, k, v, pos):
        B = len(pos)
        row, slot = torch.arange(B, device=pos.device), self.n_exempt + (pos - self.prompt_len[:B]) % self.block
        self.k_full[row, :, slot], self.v_full[row, :, slot] = k, v

    def attend(self, q, idx, count, pos):
        B = len(pos)
        return lowrank_attention(
            q, self.k_lat[:B].mT, self.v_lat[:B].mT, *self.bases(B), self.stored[:B],
            self.k_full[:B], self.v_full[:B], self._filled(pos), self.args.latent)  # fmt: skip

    def _filled(self, pos):
        """Which full-rank slots hold a token, bool [B, slots]: the exempt ones, then those decoded since the update."""
        slot, prompt_len = torch.arange(self.n_exempt + self.block, device=pos.device), self.prompt_len[: len(pos)]
        newest = self.n_exempt + (pos - prompt_len) % self.block
        exempt = slot < prompt_len[:, None].clamp(max=self.n_exempt)
        return exempt | (slot >= self.n_exempt) & (slot <= newest[:, None])

    def attended(self, q, idx, count, pos):
        """Tokens that SnapKV chose (keep) are somewhere in the prompt: -1."""
        B, first, prompt_len = len(pos), self.args.n_start, self.prompt_len[: len(pos), None]
        lat, full = (torch.arange(x.shape[d], device=q.device) for x, d in ((self.k_lat, 3), (self.k_full, 2)))
        stored = self.stored[:B, None]
        decoded = prompt_len + lat - (stored - self._flushed)  # the last latents in use are the decoded ones
        of_prompt = (lat + first).expand_as(decoded) if self.args.keep is None else torch.full_like(decoded, -1)
        at_lat = torch.where(lat < stored - self._flushed, of_prompt, decoded)
        last = prompt_len - prompt_len.clamp(max=first + self.args.n_recent) + full
        of_prompt = torch.where(full < first, full, last)
        at_full = torch.where(full < self.n_exempt, of_prompt, prompt_len + self._flushed + full - self.n_exempt)
        at = torch.cat((torch.where(lat < stored, at_lat, -2), torch.where(self._filled(pos), at_full, -2)), 1)
        k_basis, v_basis = self.bases(B)
        k = torch.cat((reconstruct(self.k_lat[:B].mT, k_basis), self.k_full[:B]), 2)
        v = torch.cat((reconstruct(self.v_lat[:B].mT, v_basis), self.v_full[:B]), 2)
        return Attended(at[:, None].expand(k.shape[:3]), q, k, v)

    # ---- between steps: Algorithm 1, lines 12-18 ----

    def maintain(self, step):
        """Every `update_every` tokens turn the bases towards them, then compress them."""
        if step - self._flushed < self.block:
            return
        B, n = self._rows, self.block
        if self.args.keep is not None and self._kept + self._flushed + n > self.cap:
            raise InputError(
                f"ojakv: after {step} decoded tokens the store made for keep={self.args.keep} is full: set "
                f"the cache up with max_new_tokens, or with a room of more than {self.args.room}"
            )
        row = torch.arange(B, device=self.stored.device)[:, None]
        slots = self.stored[:B, None] + torch.arange(n, device=row.device)
        stores = (self.k_lat, self.k_full), (self.v_lat, self.v_full)
        for basis, (lat, full) in zip(self.bases(B), stores, strict=True):
            tokens = full[:B, :, self.n_exempt :]
            if self.args.adapt:
                new = orthonormalize(oja_step(basis, tokens.float(), self.args.eta_decode, self.args.rule))
                if self.args.stale == "rotate":  # the paper leaves them: coordinates of a basis that is gone
                    change_basis(lat[:B].mT, basis, new)
                basis.copy_(new)
            # advanced indices around slices put what is between behind: [B, n, H, r_k or r_v]
            lat[row, :, :, slots] = project(tokens, basis).transpose(1, 2)
        self.stored[:B] += n
        self._flushed += n

    def reset(self):
        self._flushed, self._kept, self._rows = 0, 0, self.shape.max_batch
        self.prompt_len.zero_()
        self.stored.zero_()
        if self.args.adapt:
            self.k_basis.copy_(self.k_calibrated.expand_as(self.k_basis))
            self.v_basis.copy_(self.v_calibrated.expand_as(self.v_basis))

    # ---- accounting ----

    def _basis_bytes(self):
        """Of the bases a decode step reads: per row where they adapt."""
        B, H, _, D = self.shape.kv
        return (B if self.args.adapt else 1) * H * D * (self.r_k + self.r_v) * 4

    def traffic(self, pos):
        """All of `pos` taken as prompt: decoded tokens of the buffer come on top, 2 D elements each."""
        B, H, _, D = self.shape.kv
        exempt = min(pos + 1, self.n_exempt)
        middle = pos + 1 - exempt
        if self.args.keep is not None:
            middle = min(middle, max(0, budget_cap(self.args.keep, pos + 1) - exempt))
        read = middle * (self.r_k + self.r_v) + exempt * 2 * D
        return B * H * read * self.shape.dtype.itemsize + self._basis_bytes()
