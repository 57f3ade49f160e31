"""SALS: keys in a low-rank latent space before rotation; scores there choose the few tokens that are expanded.

One basis for all KV heads of a layer together turns a key of n*D channels into r coordinates, the most telling first
(PCA of unrotated keys, which rotation would spread over many directions). Every token is scored by its first r/2
coordinates, the best are expanded, rotated at their own positions and attended to exactly. Values are quantized. The
newest tokens wait in a ring at half compression. At D = 128: 144 of 512 bytes a token and KV head (sals-25), 80
(sals-12.5), beside the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cache.base import Attended, KVMethod, knob
from cache.budget import Selection
from cache.statistic import Statistic, principal
from errors import InputError
from kernels.latent import LatentTokens, append_token, store_prompt, write_tokens
from kernels.latent_attention import expand_tokens, latent_attention
from kernels.latent_score import latent_score
from kernels.quantize import GROUP
from kernels.select import budget_select

SIZES = {
    "sals-25": dict(rank=0.25, value_bits=4),  # Sec. 5.1, "SALS-25%" of Tables 2-7
    "sals-12.5": dict(rank=0.125, value_bits=2),  # "SALS-12.5%"
}
BUDGETS = {
    "": {},  # 1/8 of the text, Tables 5-7
    "-gsm8k": dict(budget=0.25, budget_of="rest", sinks=0, recent=128),  # GSM8K and CoQA, Table 2 (Sec. 5.2)
    "-4k": dict(budget=512, sinks=16, recent=64),  # LLaMA2-7B, Tables 3 and 4 (Sec. 5.2)
    "-32k": dict(budget=1024, sinks=32, recent=128),  # Mistral-7B, Table 3 (Sec. 5.2)
}
PRESETS = {f"{size}{row}": SIZES[size] | BUDGETS[row] for row in BUDGETS for size in SIZES}


class JointKeys(Statistic):
    """Principal directions of the keys of all heads together, before rotation, not centred (Sec. 4.2)."""

    name = "sals"

    def measure(self, t):
        keys = t.k.flatten(1)  # [S, n*D]
        return dict(k=keys.T @ keys)

    def finish(self, mean):
        values, basis = principal(mean["k"])
        return dict(eigenvalues=values, basis=basis)

    def take_heads(self, tensors, kv_heads, n_kv_head):
        """From the sub-block of K^T K, which basis and eigenvalues hold exactly."""
        values, basis = tensors["eigenvalues"].double(), tensors["basis"].double()
        blocks = ((basis * values) @ basis.T).unflatten(0, (n_kv_head, -1)).unflatten(2, (n_kv_head, -1))
        out = self.finish(dict(k=blocks[kv_heads][:, :, kv_heads].flatten(2).flatten(0, 1)))
        return {part: t.float() for part, t in out.items()}


class Sals(KVMethod):
    paper = "Mu et al. 2025, SALS: Sparse Attention in Latent Space for KV cache Compression"
    lossless = dict(rank=1.0, score_rank=1.0, value_bits=16, budget=1.0)
    stress = dict(budget=24, sinks=4, recent=16)
    pre_rope = True
    statistics = (JointKeys(),)
    skip_layers = (0, 1, -1)  # Sec. 5.1: "we skip the sparsification", not the compression:
    skip_knobs = dict(budget=1.0)  # with these layers uncompressed, the memory access of Table 2 would be out of reach

    @dataclass
    class Args:
        rank: float = knob(0.25, "latent coordinates of a key, share of n*D (Sec. 5.1)", 0, 1)
        score_rank: float = knob(0.5, "coordinates that score, share of those (Sec. 5.1)", 0, 1)
        value_bits: Literal[2, 4, 8, 16] = knob(4, "bits of values (Sec. 5.1: 4 or 2)")
        budget: int | float = knob(0.125, "tokens attended (Sec. 5.2: 1/8, 512 of 4K)")
        budget_of: Literal["all", "rest"] = knob(
            "all", "sinks and recent tokens are in the budget; rest: it is of the others (Sec. 5.2, GSM8K)"
        )
        sinks: int = knob(16, "first tokens always attended (Sec. 5.2, x)", low=0)
        recent: int = knob(64, "newest tokens, half compressed, always attended (z)", low=1)
        score: Literal["sum", "softmax"] = knob(
            "sum", "sum of all heads' products, or of each head's softmax over the tokens (ours)"
        )

        def __post_init__(self):
            if not (0 < self.rank <= 1 and 0 < self.score_rank <= 1):
                raise InputError(f"sals needs rank and score_rank in (0, 1], got {self.rank} and {self.score_rank}")
            self.selection()

        def selection(self) -> Selection:
            return Selection(self.budget, self.sinks, self.recent, beside=self.budget_of == "rest")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.width = shape.n_kv_head * shape.head_dim  # n*D
        if args.value_bits < 16 and shape.head_dim % GROUP:
            raise InputError(
                f"sals with {args.value_bits}-bit values needs a head_dim divisible by {GROUP}, this model has "
                f"{shape.head_dim}: use value_bits=16"
            )
        self.rank = round(args.rank * self.width)  # r
        self.score_rank = max(1, round(self.rank * args.score_rank))  # r*
        if not self.rank:
            raise InputError(f"sals: rank {args.rank} of {self.width} channels leaves no coordinate, raise it")
        T = shape.max_seq_len
        # Sec. 5.1: the most recent tokens "are compressed by only 50%"
        self.ring_slots, self.ring_rank = min(args.recent, T), round(max(args.rank, 0.5) * self.width)
        self.ring_bits = max(8, args.value_bits)
        self.selection = args.selection()
        self.k_static, self.dense = self.selection.of(T), self.selection.is_all(T)  # dense: nothing to score
        # r* and r - r* apart: the score pass reads whole rows of the first, and nothing else
        where, ring = (shape.max_batch, T), (shape.max_batch, self.ring_slots)
        self.k_lead = self.buffer("k_lead", (*where, self.score_rank))
        self.k_rest = self.buffer("k_rest", (*where, self.rank - self.score_rank))
        self.ring_k = self.buffer("ring_k", (*ring, self.ring_rank))
        for name, slots, bits in (("v", where, args.value_bits), ("ring_v", ring, self.ring_bits)):
            if bits == 16:
                self.buffer(name, (*slots, self.width))
            else:
                self.buffer(name, (*slots, self.width * bits // 8), torch.uint8)
                self.buffer(f"{name}_params", (*slots, self.width // GROUP, 2), torch.float16)
        # U^T, leading eigenvectors in rows: the first r rows are the basis of rank r
        U = calib.get(layer, "sals.basis")[:, : self.ring_rank] if calib else None
        self.basis = self.constant("basis", (self.ring_rank, self.width), None if U is None else U.T)

    @property
    def store(self):
        """Tokens that have left the ring; slot = position. The last `recent` slots are never of use to a token."""
        return LatentTokens((self.k_lead, self.k_rest), self._values("v"), self.args.value_bits)

    @property
    def ring(self):
        """The newest tokens; slot = position mod ring_slots."""
        return LatentTokens((self.ring_k,), self._values("ring_v"), self.ring_bits)

    def _values(self, name):
        names = (name, f"{name}_params")
        return tuple(self.get_buffer(n) for n in names if n in self._buffers)

    # ---- the prompt ----

    def compress(self, q, k, v, lengths):
        store_prompt(self.store, self.basis, k, v, lengths)  # eq. 1
        # in a prompt shorter than the ring, the slots of negative positions hold what is not attended to
        newest = lengths[:, None] - 1 - torch.arange(self.ring_slots, device=k.device)
        row, at = torch.arange(len(k), device=k.device)[:, None], newest.clamp(min=0)
        k, v = (x.transpose(1, 2)[row, at].flatten(2) for x in (k, v))
        write_tokens(self.ring, row, newest % self.ring_slots, k @ self.basis.T, v)

    # ---- one token per row: Algorithm 1 ----

    def append(self, k, v, pos):
        append_token(self.ring, self.store, k.flatten(1) @ self.basis.T, v.flatten(1), pos)  # lines 2-3

    def select(self, q, pos):
        """Positions in the store, beside which all of the ring is attended to; None: all. One set for all heads."""
        if self.dense:
            return None, None
        n = self.ring_slots
        wanted = (self.selection.at(pos + 1) - n).clamp(min=0)
        return budget_select(self._scores(q, pos), pos - n, wanted, self.k_static - n, self.args.sinks)  # line 5

    def _scores(self, q, pos):
        """Line 4 and Sec. 4.3: products of latent queries and keys in the first r* coordinates -> [B, 1, T]."""
        B, H, D = len(pos), self.shape.n_kv_head, self.shape.head_dim
        groups, basis = q.view(B, H, -1, D), self.basis[: self.score_rank]
        if self.args.score == "sum":  # the sum over heads of q . k(of its group) = (sum over each group of q) . k
            return latent_score(groups.sum(2).flatten(1)[:, None] @ basis.T, self.k_lead, pos - self.ring_slots)
        latent_q = torch.einsum("bhgd,rhd->bhgr", groups, basis.view(-1, H, D)).flatten(1, 2)
        T, t = self.shape.max_seq_len, torch.arange(self.shape.max_seq_len + self.ring_slots, device=q.device)
        stored = latent_score(latent_q, self.k_lead, pos - self.ring_slots)
        products = torch.cat((stored, latent_score(latent_q, self.ring_k[..., : self.score_rank])), -1)
        held = torch.where(t < T, t <= pos[:, None] - self.ring_slots, t - T <= pos[:, None])[:, None]
        logits = torch.where(held, products * D**-0.5, float("-inf"))
        return logits.softmax(-1)[..., :T].sum(1, keepdim=True)

    def attend(self, q, idx, count, pos):
        if idx is not None:
            idx, count = idx[:, 0], count[:, 0]
        q, cos, sin = self.rope.rotate(q, pos), self.rope.cos, self.rope.sin
        return latent_attention(q, self.basis, self.ring, self.store, pos, idx, count, cos, sin)  # lines 6-9

    def attended(self, q, idx, count, pos):
        if idx is not None:
            idx, count = idx[:, 0], count[:, 0]
        tables = self.rope.cos, self.rope.sin
        k, v, at, there = expand_tokens(self.basis, self.ring, self.store, pos, idx, count, *tables, q.shape[2])
        at = torch.where(there, at, -2)[:, None].expand(k.shape[:3])
        return Attended(at, self.rope.rotate(q, pos), k, v)

    # ---- accounting ----

    def token_bytes(self, rank, bits):
        """Of one token, all KV heads."""
        b = self.shape.dtype.itemsize
        return rank * b + (self.width * b if bits == 16 else self.width * bits // 8 + self.width // GROUP * 2 * 2)

    def card_nbytes(self):
        s = self.shape
        stored = s.max_seq_len * self.token_bytes(self.rank, self.args.value_bits)
        ring = self.ring_slots * self.token_bytes(self.ring_rank, self.ring_bits)
        return s.max_batch * (stored + ring) + self.ring_rank * self.width * s.dtype.itemsize

    def traffic(self, pos):
        """Sec. 4.5: r* coordinates of every token, then the chosen ones whole; the ring, and the basis once."""
        s, a = self.shape, self.args
        recent = min(pos + 1, self.ring_slots)
        chosen = self.selection.of(pos + 1) - recent
        scored = 0 if self.dense else pos + 1 - (recent if a.score == "sum" else 0)
        row = scored * self.score_rank * s.dtype.itemsize
        row += chosen * self.token_bytes(self.rank, a.value_bits)
        row += min(pos + 1, self.ring_slots + 1) * self.token_bytes(self.ring_rank, self.ring_bits)  # one leaves it
        return s.max_batch * row + self.ring_rank * self.width * s.dtype.itemsize
