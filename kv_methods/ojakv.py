"""Low-rank keys and values (OjaKV) in bases that follow the text by Oja's rule; first and last prompt tokens full-rank.

Every row and KV head has an orthonormal basis of r_k columns for its rotated keys and one of r_v for its values, which
start as calibrated. A prompt turns them towards its most attended tokens; then all but its first and last tokens are
attended to and stored as coordinates in them. Decoded tokens wait in full rank; every `update_every` of them, the bases
turn again and the tokens join the latents. Nothing is selected: every token is attended to. 308 of 512 bytes per token
at D = 128 and rank 0.6 (r = 77). `adapt=False` is StaticPCA-H; without exemptions, too, it is StaticPCA, or Eigen if
attention is computed in the latent space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cache.base import Attended, CacheShape, KVMethod, Storage, knob, rows
from cache.budget import budget_cap, budget_tokens, min_tokens
from cache.full_precision import Exempt
from cache.quantized import skip
from cache.statistic import Statistic, principal
from kernels.gather_attention import gather_rows
from kernels.lowrank import SLOTS, lowrank_attention, project, reconstruct, skipping_lowrank_attention, values_read
from kernels.oja import change_basis, oja_step, orthonormalize
from kernels.prompt_scores import best_in_order, best_tokens, snapkv_scores
from runtime.errors import InputError

PRESETS = {
    "ojakv-0.8": dict(rank=0.8),  # OjaKV 0.8x, Tables 2-4
    "ojakv-0.6": dict(rank=0.6),  # OjaKV 0.6x, Tables 2-4
    "static_pca_h": dict(adapt=False),  # StaticPCA-H 0.6x, Tables 2-4
    "static_pca": dict(adapt=False, n_start=0, n_recent=0, latent=False),  # StaticPCA 0.6x, Tables 2-4
    "eigen": dict(adapt=False, n_start=0, n_recent=0),  # Eigen-N 0.6x, Table 4 (out of memory in Tables 2 and 3)
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


class LowRank(Storage):
    """Keys, or values, as coordinates in an orthonormal basis per KV head, which is calibrated and may follow the text.

    r numbers per token, laid out with tokens side by side and padded to a multiple of SLOTS (see kernels/lowrank.py).
    """

    latents: Tensor  # [B, Hkv, r, slots]
    calibrated: Tensor  # [Hkv, D, r] fp32
    current: Tensor | None  # [B, Hkv, D, r] fp32; None if the basis stays as calibrated
    layout = Storage.first_slots

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
        """calib holds the layer's `name`_basis [Hkv, D, D], columns by falling `name`_eigenvalues [Hkv, D]; None: sizes
        only. share and energy: see `rank_of`. follows: whether the basis follows the text."""
        super().__init__(shape)
        B, H, _, D = shape.kv
        values = calib.get(layer, f"{name}_eigenvalues") if calib and energy is not None else None
        self.rank, self.slots = rank_of(D, share, energy, values), -(-slots // SLOTS) * SLOTS
        basis = calib.get(layer, f"{name}_basis")[..., : self.rank] if calib else None
        self.constant("calibrated", (H, D, self.rank), basis, torch.float32)
        self.current = self.buffer("current", (B, H, D, self.rank), torch.float32) if follows else None
        self.buffer("latents", (B, H, self.rank, self.slots))

    def basis(self, B: int) -> Tensor:
        """The basis [B, Hkv, D, r], or [1, ...] if all rows share it."""
        return self.calibrated[None] if self.current is None else rows(self.current, B)

    def stored(self, B: int) -> Tensor:
        """The latents of all slots, [B, Hkv, slots, r]."""
        return rows(self.latents, B).mT

    def restored(self, B: int) -> Tensor:
        """The reconstructed tokens of all slots, [B, Hkv, slots, D]."""
        return reconstruct(self.stored(B), self.basis(B))

    def seen(self, x: Tensor) -> Tensor:
        """Tokens [B, Hkv, n, D] projected and reconstructed, as attention sees them once they are stored."""
        basis = self.basis(len(x))
        return reconstruct(project(x, basis), basis)

    def put_prompt(self, x: Tensor) -> None:
        """Store tokens [B, Hkv, n, D] in the first n slots."""
        self.latents[: len(x), ..., : x.shape[2]] = project(x, self.basis(len(x))).mT

    def put(self, x: Tensor, slots: Tensor) -> None:
        """Store tokens [B, Hkv, n, D] in slots [B, n]."""
        row = torch.arange(len(x), device=x.device)[:, None]
        # with slices between advanced indices, the dimensions of the indices come first: [B, n, Hkv, r]
        self.latents[row, :, :, slots] = project(x, self.basis(len(x))).transpose(1, 2)

    def turn(self, x: Tensor, eta: float, rule: str, carry: Tensor | None = None) -> None:
        """A step of Oja's rule towards tokens x [B, Hkv, n, D]. carry: of each row so many latents [B] are converted to
        the new basis; None: they stay coordinates of the old one."""
        basis = self.basis(len(x))
        new = orthonormalize(oja_step(basis, x.float(), eta, rule))
        if carry is not None:
            change_basis(self.stored(len(x)), basis, new, carry)
        basis.copy_(new)

    def reset(self) -> None:
        if self.current is not None:
            self.current.copy_(self.calibrated.expand_as(self.current))

    def basis_bytes(self) -> int:
        """Bytes of the bases that a decode step reads: one per row if the basis follows the text."""
        return 4 * self.basis(self.shape.max_batch).numel()


def rank_of(head_dim: int, share: float, energy: float | None, eigenvalues: Tensor | None) -> int:
    """`share` of head_dim; or, with `energy`, the smallest rank that keeps this share of it in every head (App. A.2).

    eigenvalues [Hkv, D], falling; None: sizes only, and head_dim stands for a rank by energy, as its upper bound.
    """
    if energy is None or eigenvalues is None:
        return head_dim if energy is not None else max(1, round(share * head_dim))
    values = eigenvalues.double()
    held = values.cumsum(-1) / values.sum(-1, keepdim=True)
    return min(head_dim, int((held < energy).sum(-1).max()) + 1)


@dataclass(frozen=True)
class BesideExempt:
    """The number of prompt tokens that are compressed beside `exempt` ones: all others, or the rest of a budget."""

    budget: int | float | None
    exempt: int
    min_tokens: int = 0  # of a budget that is a share

    def of(self, length: int) -> int:
        kept = length if self.budget is None else budget_cap(self.budget, length, self.min_tokens)
        return max(0, kept - min(length, self.exempt))

    def at(self, length: Tensor) -> Tensor:
        """`of` for lengths [B] -> int64 [B]."""
        kept = length if self.budget is None else budget_tokens(self.budget, length, self.min_tokens)
        return (kept - length.clamp(max=self.exempt)).clamp(min=0)


class OjaKV(KVMethod):
    paper = "Zhu, Yang et al. 2025, OjaKV: Context-Aware Online Low-Rank KV Cache Compression with Oja's Rule"
    lossless = dict(rank=1.0)
    stress = dict(n_start=5, n_recent=5, update_every=6, query_window=8)
    statistics = (HeadMoments(),)
    exact_prefill = False  # Sec. 3.3
    joins_heads = True
    deviates = frozenset({"rereads", "weighs queries"})  # latents are read again where bases turn
    takes_chunks = False  # the bases turn towards the whole prompt before it is attended to
    layout = KVMethod.first_slots

    @dataclass
    class Args:
        rank: float = knob(0.6, "columns of a basis, as a share of head_dim (Tables 2-4)")
        energy: float | None = knob(
            None, "instead of rank: the share of the calibration's energy to keep, for keys and for values (App. A.2)"
        )
        adapt: bool = knob(True, "False: the bases stay as calibrated (StaticPCA-H)")
        n_start: int = knob(32, "first prompt tokens in full rank (Table 5)", low=0)
        n_recent: int = knob(32, "last prompt tokens in full rank (Table 5)", low=0)
        update_every: int = knob(32, "decoded tokens between updates (Table 5: T = 32)", low=1)
        query_window: int = knob(32, "last queries, whose attention rates the prompt (Table 5: w = 32)", 1, 4096)
        important: float = knob(0.05, "share of the prompt's tokens that its update uses (Table 5)")
        eta_prefill: float = knob(0.1, "learning rate of the prompt's update (Table 5)", 0, 10)
        eta_decode: float = knob(0.05, "learning rate while decoding (Table 5)", 0, 10)
        rule: Literal["column", "sequential", "batch", "raw"] = knob(
            "sequential",
            "token by token (Sec. 5.2), each step divided by |x|^2 (ours); raw: Algorithm 1, which diverges; "
            "column and batch: its sum divided by each column's energy, or by all energy (ours)",
        )
        stale: Literal["rotate", "keep"] = knob(
            "rotate", "latents of an older basis: converted to the new one (ours), or kept as they are (paper)"
        )
        latent: bool = knob(True, "attend in the latent space (Sec. 3.2, and with skip); False: reconstruct (Sec. 3.3)")
        keep: int | float | None = knob(
            None, "prompt tokens stored per KV head, or their share: exempt ones and SnapKV's choice (Sec. 7)"
        )
        decode_slots: int = knob(512, "slots for decoded tokens with keep, if max_new_tokens is not known (ours)", 0)
        min_tokens: int = min_tokens()
        skip: float = skip()

        def __post_init__(self):
            for name in ("rank", "energy", "important"):
                if (x := getattr(self, name)) is not None and not 0 < x <= 1:
                    raise InputError(f"ojakv: {name} is a share in (0, 1], got {x}")
            if self.keep is not None and not (0 < self.keep <= 1 if isinstance(self.keep, float) else self.keep >= 1):
                raise InputError(f"ojakv: keep is a number of tokens >= 1, or a share in (0, 1], got {self.keep}")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        if args.skip:
            self.note_reads()
        T = shape.max_seq_len
        self.exempt = Exempt(shape, args.n_start, args.n_recent, min(args.update_every, T))
        # Sec. 7: m counts the exempt tokens, as SnapKV's capacity counts its window (Table 6: half at 0.6 are 30 %)
        self.middle = BesideExempt(args.keep, args.n_start + args.n_recent, args.min_tokens)
        # Without `keep`, every token has a slot. With it, there are slots for what is kept of the longest prompt and
        # for decoded tokens. If their number is not known, it might be all of T: then `decode_slots`, see `maintain`.
        decode_slots = args.decode_slots if shape.max_new_tokens is None else shape.max_decoded
        slots = T if args.keep is None else min(T, self.middle.of(shape.max_prompt) + decode_slots)
        self.keys, self.values = (
            LowRank(shape, slots, layer, calib, f"oja.{x}", args.rank, args.energy, args.adapt) for x in "kv"
        )
        self.stored = self.buffer("stored", (shape.max_batch,), torch.int64)  # latents in use
        self.reset()

    # ---- the prompt: Algorithm 1, lines 1-7 ----

    def prefill(self, q, k, v, lengths, start=None):
        """As in the base class, but tokens that are not exempt are attended to as they will be stored (Sec. 3.3)."""
        q, k = self.rope.rotate_prompt(q), self.rope.rotate_prompt(k)
        self.compress(q, k, v, lengths)
        exempt = self.exempt.mask(lengths, k.shape[2])[:, None, :, None]
        k, v = (torch.where(exempt, x, store.seen(x)) for store, x in ((self.keys, k), (self.values, v)))
        return self.attend_prompt(q, k, v, lengths)

    def begin_prompt(self, total):
        """Nothing to prepare: a prompt comes whole and is stored by `prefill`."""

    def compress(self, q, k, v, lengths):
        B, S, a = len(k), k.shape[2], self.args
        self.reset()
        self._rows = B
        if a.adapt:
            self._adapt_to_prompt(q, k, v, lengths)
        self.exempt.put_prompt(k, v, lengths)  # line 7
        self.stored[:B], self._longest = self.middle.at(lengths), self.middle.of(S)
        if a.keep is None:
            k, v = (x[:, :, a.n_start : max(a.n_start, S - a.n_recent)] for x in (k, v))
        else:
            scores = snapkv_scores(q, k, lengths, a.query_window)
            scores = scores.masked_fill(self.exempt.mask(lengths, S)[:, None], float("-inf"))
            chosen = best_tokens(scores, self._longest)  # [B, Hkv, n]
            k, v = gather_rows(k, chosen), gather_rows(v, chosen)
        for store, x in ((self.keys, k), (self.values, v)):
            store.put_prompt(x)  # Sec. 5.1

    def _adapt_to_prompt(self, q, k, v, lengths):
        """One step on the tokens that the last queries attend to most, one set per row for all heads (lines 2-6)."""
        a, S = self.args, k.shape[2]
        scores = self.sum_over_ranks(snapkv_scores(q, k, lengths, a.query_window, pool=1).sum(1))  # [B, S]
        # in the order of the text, which matters to `sequential`; rows with fewer tokens than others end in zeros
        at, there = best_in_order(scores, budget_cap(a.important, S), budget_tokens(a.important, lengths))
        for store, x in ((self.keys, k), (self.values, v)):
            tokens = torch.where(there[:, None, :, None], gather_rows(x, at[:, None]), 0)
            store.turn(tokens, a.eta_prefill, a.rule)

    # ---- one token per row ----

    def append(self, k, v, pos):
        self.exempt.put(k, v, self.once_a_step(pos, "newest", lambda: self.exempt.newest(pos)))

    def attend(self, q, idx, count, pos):
        B, keys, values, exempt = len(pos), self.keys, self.values, self.exempt
        given = (q, keys.stored(B), values.stored(B), keys.basis(B), values.basis(B), rows(self.stored, B),
                 rows(exempt.k, B), rows(exempt.v, B),
                 self.once_a_step(pos, "filled", lambda: exempt.filled(pos)))  # fmt: skip
        if not self.args.skip:
            return lowrank_attention(*given, self.args.latent)
        end = self.once_a_step(pos, "end", lambda: pos + 1)
        y, n_read = skipping_lowrank_attention(*given, end, self.args.skip)
        self.note_read(n_read, pos, keys=True)
        return y

    def attended(self, q, idx, count, pos):
        """With `keep`, the positions of the stored prompt tokens are not recorded: -1."""
        B, slot, stored = len(pos), torch.arange(self.keys.slots, device=q.device), self.stored[: len(pos), None]
        of_prompt = slot + self.args.n_start if self.args.keep is None else torch.full_like(slot, -1)
        first = stored - self.exempt.moved  # the last latents in use are the decoded ones
        at = torch.where(slot < first, of_prompt, self.exempt.prompt_len[:B, None] + slot - first)
        at = torch.where(slot < stored, at, -2)
        if self.args.skip:
            basis, stored = self.keys.basis(B), rows(self.stored, B)
            read = values_read(q, self.keys.stored(B), basis, stored, pos + 1, self.args.skip)
            at = at[:, None].where(read, -2)
        latents = at, self.keys.restored(B), self.values.restored(B)
        return Attended.of(q, latents, (self.exempt.position(pos), self.exempt.k, self.exempt.v))

    # ---- between steps: Algorithm 1, lines 12-18 ----

    def room(self):
        known = self.args.keep is None or self.shape.max_new_tokens is not None
        return self.shape.max_decoded if known else self.args.decode_slots

    @classmethod
    def room_if_unknown(cls, args):
        return None if args.keep is None else args.decode_slots

    def maintain(self, step):
        """After every `update_every` tokens, turn the bases towards them, then compress them."""
        a, B, n = self.args, self._rows, self.exempt.flush
        if not self.exempt.due(step):
            return
        if a.keep is not None and self._longest + self.exempt.moved + n > self.keys.slots:
            raise InputError(
                f"ojakv: after {step} decoded tokens the store made for keep={a.keep} is full: set "
                f"the cache up with max_new_tokens, or with decode_slots above {a.decode_slots}"
            )
        slots = self.stored[:B, None] + torch.arange(n, device=self.stored.device)
        for store, tokens in zip((self.keys, self.values), self.exempt.take()[:2], strict=True):
            if a.adapt:  # carry is ours: the paper leaves latents as coordinates of the old basis
                store.turn(tokens[:B], a.eta_decode, a.rule, self.stored[:B] if a.stale == "rotate" else None)
            store.put(tokens[:B], slots)
        self.stored[:B] += n

    def reset(self):
        super().reset()
        self._longest, self._rows = 0, self.shape.max_batch
        self.stored.zero_()
        for part in (self.exempt, self.keys, self.values):
            part.reset()

    # ---- accounting ----

    def traffic(self, pos):
        """All tokens up to pos counted as prompt: decoded ones in the buffer add 2 D elements each. Latents are read
        once more where the bases turn, in one of `update_every` steps."""
        B, H, _, D = self.shape.kv
        latents = self.middle.of(self.tokens_read(pos) or pos + 1) * (self.keys.rank + self.values.rank)
        if self.args.adapt and self.args.stale == "rotate":
            latents += latents // self.args.update_every
        read = B * H * (latents + min(pos + 1, self.exempt.lead) * 2 * D) * self.shape.dtype.itemsize
        return read + self.keys.basis_bytes() + self.values.basis_bytes()
