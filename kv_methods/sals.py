"""SALS: keys in a low-rank latent space before rotation; scores there choose the few tokens that are expanded.

One basis for all KV heads of a layer turns a key of n*D channels into r coordinates, those of the largest eigenvalues
first (PCA of unrotated keys; rotation would spread them over more directions). Every token is scored by its first r/2
coordinates; the best tokens are expanded, rotated at their own positions and attended to exactly. Values are quantized.
The newest tokens are in a ring at half compression. At D = 128: 144 of 512 bytes per token and KV head (sals-25), 80
(sals-12.5), besides the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cache.base import Attended, CacheShape, KVMethod, Storage, knob
from cache.budget import Selection, TopP, min_tokens
from cache.packed import PackedVectors, check_groups
from cache.statistic import Statistic, principal, principal_of_heads
from kernels.latent import LatentTokens, append_token, store_newest, store_prompt
from kernels.latent_attention import expand_tokens, latent_attention
from kernels.latent_score import joint_score, latent_mass, latent_score
from kernels.linear import dense_linear
from kernels.ring import ring_positions
from kernels.select import budget_select
from kernels.top_p import top_p_count
from runtime.errors import InputError

SIZES = {
    "sals-25": dict(rank=0.25, value_bits=4),  # Sec. 5.1, "SALS-25%" of Tables 2-7
    "sals-12.5": dict(rank=0.125, value_bits=2),  # "SALS-12.5%"
}
BUDGETS: dict[str, dict[str, Any]] = {
    "": {},  # 1/8 of the text, Tables 5-7
    # GSM8K and CoQA, Table 2 (Sec. 5.2)
    "-gsm8k": dict(budget=0.25, budget_of="rest", sinks=0, recent=128, min_tokens=0),
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
        values, basis = principal_of_heads(tensors["eigenvalues"], tensors["basis"], kv_heads, n_kv_head)
        return dict(eigenvalues=values.float(), basis=basis.float())


class LatentStore(Storage):
    """Slots for tokens of all KV heads together: keys as coordinates in one basis, values in a few bits.

    `ranks`: the number of coordinates in each buffer, so that a pass over the first ones reads nothing else.
    """

    k0: Tensor
    vectors: ClassVar[type[PackedVectors]] = PackedVectors
    layout = Storage.first_slots

    def __init__(self, shape: CacheShape, slots: int, ranks: tuple[int, ...], bits: int):
        super().__init__(shape)
        where = (shape.max_batch, slots)
        self.slots, self.rank = slots, sum(ranks)
        for i, r in enumerate(ranks):
            self.buffer(f"k{i}", (*where, r))
        self.values = self.vectors(shape, where, shape.n_kv_head * shape.head_dim, bits)
        self.token_bytes = self.rank * shape.dtype.itemsize + self.values.vector_bytes  # all KV heads together

    @property
    def lead(self) -> Tensor:
        """The first coordinates of all slots, [B, slots, ranks[0]]."""
        return self.k0

    @property
    def tokens(self) -> LatentTokens:
        """The slots in the form that the kernels take."""
        latents, values = tuple(self._buffers.values()), self.values
        return LatentTokens(latents, values.parts(), values.bits)  # type: ignore[arg-type]


class Ring(Storage):
    """Slots by position modulo their number, which is larger if appended tokens may be taken back."""

    def layout(self, tokens):
        slots = {name: b.shape[1] for name, b in self.named_buffers(recurse=False)}
        return {name: n for name, n in slots.items() if n < tokens}

    def carry(self, name, saved, layout, pos):
        """The tokens of a ring of `layout` slots, or of all its slots. Those that it has overwritten are never read."""
        x = saved[name]
        slot = ring_positions(pos, self.get_buffer(name).shape[1]).clamp(min=0) % (layout or x.shape[1])
        return x[torch.arange(len(x), device=x.device)[:, None], slot]


class RingVectors(Ring, PackedVectors):
    """Values of a ring."""


class LatentRing(Ring, LatentStore):
    """The newest tokens."""

    vectors = RingVectors


class Sals(KVMethod):
    paper = "Mu et al. 2025, SALS: Sparse Attention in Latent Space for KV cache Compression"
    lossless = dict(rank=1.0, score_rank=1.0, value_bits=16, budget=1.0)
    stress = dict(budget=24, sinks=4, recent=16)
    pre_rope = True
    units = "v"
    layout = KVMethod.first_slots
    reads_queries = False
    rewinds = True
    joins_heads = whole_calibration = True  # latents are sums over the heads of all ranks; each rank stores all of them
    statistics = (JointKeys(),)
    skip_layers = (0, 1, -1)  # Sec. 5.1: "we skip the sparsification", not the compression:
    skip_knobs = dict(budget=1.0)  # with these layers uncompressed, the memory access of Table 2 would be out of reach

    @dataclass
    class Args:
        rank: float = knob(0.25, "latent coordinates of a key, share of n*D (Sec. 5.1)", 0, 1)
        score_rank: float = knob(0.5, "coordinates that score, share of those (Sec. 5.1)", 0, 1)
        value_bits: Literal[2, 4, 8, 16] = knob(4, "bits of values (Sec. 5.1: 4 or 2)")
        budget: int | float | TopP = knob(0.125, "tokens attended (Sec. 5.2: 1/8, 512 of 4K)")
        budget_of: Literal["all", "rest"] = knob(
            "all", "sinks and recent tokens are in the budget; rest: it is of the others (Sec. 5.2, GSM8K)"
        )
        sinks: int = knob(16, "first tokens always attended (Sec. 5.2, x)", low=0)
        recent: int = knob(64, "newest tokens, half compressed, always attended (z)", low=1)
        score: Literal["sum", "softmax"] = knob(
            "sum",
            "sum of all heads' products, or of each head's softmax over the tokens (ours; with budget=p0.95 always)",
        )
        cap: int | float = knob(0.25, "most tokens attended with budget=p0.95 (ours; Twilight: 8192 of 32K)")
        min_tokens: int = min_tokens()

        def __post_init__(self):
            if not (0 < self.rank <= 1 and 0 < self.score_rank <= 1):
                raise InputError(f"sals needs rank and score_rank in (0, 1], got {self.rank} and {self.score_rank}")
            self.selection()

        def selection(self) -> Selection:
            budget = self.cap if isinstance(self.budget, TopP) else self.budget
            return Selection(budget, self.sinks, self.recent, self.budget_of == "rest", self.min_tokens)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        if args.value_bits < 16:
            check_groups(f"sals with {args.value_bits}-bit values", shape.head_dim, ": use value_bits=16")
        width, T = shape.layer_heads * shape.head_dim, shape.max_seq_len  # n*D
        rank = round(args.rank * width)  # r
        self.score_rank = max(1, round(rank * args.score_rank))  # r*
        if not rank:
            raise InputError(f"sals: rank {args.rank} of {width} channels leaves no coordinate, raise it")
        self.selection = args.selection()
        self.p = args.budget.p if isinstance(args.budget, TopP) else None
        self.k_static = self.selection.of(T)
        if self.p is not None:
            self.note_reads()
        self.dense = self.p is None and self.selection.is_all(T)  # nothing to score
        # tokens that are no longer recent, slot = position; the last `recent` slots never hold a token
        self.recent = min(args.recent, T)
        self.store = LatentStore(shape, T, (self.score_rank, rank - self.score_rank), args.value_bits)
        # the newest tokens, slot = position mod the ring's slots; Sec. 5.1: they "are compressed by only 50%". A check
        # appends its drafts and the token before them, all of which may be taken back: with spare slots they
        # overwrite no token that is then read again
        ring_rank, spare = round(max(args.rank, 0.5) * width), shape.drafts + 1 if shape.drafts else 0
        self.ring = LatentRing(shape, min(self.recent + spare, T), (ring_rank,), max(8, args.value_bits))
        # U^T, leading eigenvectors in rows: the first r rows are the basis of rank r
        U = calib.get(layer, "sals.basis")[:, :ring_rank] if calib else None
        own = shape.own_heads  # each rank has the columns of its own heads
        U = None if U is None else U.unflatten(0, (-1, shape.head_dim))[own.start : own.stop].flatten(0, 1).T
        self.basis = self.constant("basis", (ring_rank, len(own) * shape.head_dim), U)
        self.copies = shape.ranks.copies(shape.layer_heads)
        rope.shorten(shape.dtype)

    # ---- the prompt ----

    def compress(self, q, k, v, lengths):
        basis = self.basis
        if self.shape.ranks.size > 1:  # latents are sums over ranks: the kernels below only have to store them
            k = self._latents(k.transpose(1, 2).flatten(2))[:, None]
            basis = torch.eye(len(basis), dtype=k.dtype, device=k.device)
        store_prompt(self.store.tokens, basis, k, v, lengths)  # eq. 1
        store_newest(self.ring.tokens, basis, k, v, lengths)

    def _latents(self, k):
        """Keys [..., n*D] of this rank's heads -> coordinates [..., r] of the keys of all heads together."""
        latents = self.sum_over_ranks(dense_linear(k, self.basis))
        return latents / self.copies if self.copies > 1 else latents

    # ---- one token per row: Algorithm 1 ----

    def append(self, k, v, pos):
        latents = self._latents(k.flatten(1))  # lines 2-3
        append_token(self.ring.tokens, self.store.tokens, latents, v, pos, self.recent)

    def select(self, q, pos):
        """Positions chosen in the store, one set for all heads; None: all. Recent tokens are always attended to."""
        if self.dense:
            return None, None
        n, scores = self.recent, self._scores(q, pos)
        if self.p is None:
            wanted = self.once_a_step(pos, "wanted", lambda: (self.selection.at(pos + 1) - n).clamp(min=0))
        else:  # scores are attention weights: those of the whole ring are entered at pos
            ring = 1 - scores.sum(-1, keepdim=True)
            mass = scores.scatter(2, pos[:, None, None], ring)
            need = top_p_count(mass, pos, self.p, self.args.sinks, n).minimum(self.selection.at(pos + 1)[:, None])
            self.note_read(need.clamp(min=n).minimum(pos[:, None] + 1), pos)
            wanted = (need - n).clamp(min=0)
        return budget_select(scores, self._old(pos), wanted, self.k_static - n, self.args.sinks)  # line 5

    def _old(self, pos):
        """The newest position that is not recent, [B]."""
        return self.once_a_step(pos, "old", lambda: pos - self.recent)

    def _scores(self, q, pos):
        """Line 4 and Sec. 4.3: products of latent queries and keys in the first r* coordinates -> [B, 1, T]."""
        by_sum, one = self.p is None and self.args.score == "sum", self.shape.ranks.size == 1
        if by_sum and one:
            return joint_score(q, self.basis, self.store.lead, self._old(pos))
        H, D = self.shape.n_kv_head, self.shape.head_dim
        groups, basis = q.unflatten(1, (H, -1)), self.basis[: self.score_rank]
        if by_sum:
            latent_q = self.sum_over_ranks(dense_linear(groups.sum(2).flatten(1), basis)) / self.copies
            return latent_score(latent_q[:, None], self.store.lead, self._old(pos))
        latent_q = torch.einsum("bhgd,rhd->bhgr", groups, basis.view(-1, H, D)).flatten(1, 2)
        mass = latent_mass(latent_q, self.store.lead, self.ring.lead[..., : self.score_rank], pos, self.recent, D**-0.5)
        return self.sum_over_ranks(mass) / (q.shape[1] * self.shape.ranks.size)

    def attend(self, q, idx, count, pos):
        return latent_attention(self.rope.rotate(q, pos), **self._read(idx, count, pos))  # lines 6-9

    def attended(self, q, idx, count, pos):
        k, v, at, there = expand_tokens(**self._read(idx, count, pos), head_dim=q.shape[2])
        return Attended.of(self.rope.rotate(q, pos), (torch.where(there, at, -2), k, v))

    def _read(self, idx, count, pos):
        """What a step reads of the cache, in the form that the kernels take: one list for all heads."""
        stored = dict(basis=self.basis, ring=self.ring.tokens, store=self.store.tokens)
        cos, sin = self.rope.tables
        return dict(**stored, pos=pos, idx=idx, count=count, cos=cos, sin=sin, recent=self.recent)

    # ---- accounting ----

    def card_nbytes(self):
        row = sum(part.slots * part.token_bytes for part in (self.store, self.ring))
        noted = 16 * self.shape.max_batch if self.p is not None else 0
        return self.shape.max_batch * row + self._basis_bytes() + self.unit_nbytes + noted

    def _basis_bytes(self):
        return self.ring.rank * self.shape.n_kv_head * self.shape.head_dim * self.shape.dtype.itemsize

    def traffic(self, pos):
        """Sec. 4.5: r* coordinates of every token, then the whole chosen tokens, and the ring; the basis, for the new
        key, for the query that scores, and to expand the attended keys.

        A budget of p sets no number of tokens: those noted count, or before any step `cap`, the most there can be.
        """
        s, recent = self.shape, min(pos + 1, self.recent)
        by_sum = self.p is None and self.args.score == "sum"
        scored = 0 if self.dense else pos + 1 - (recent if by_sum else 0)
        row = scored * self.score_rank * s.dtype.itemsize
        attended = self.tokens_read(pos) or self.selection.of(pos + 1)
        row += max(0, attended - recent) * self.store.token_bytes
        row += min(pos + 1, self.recent + 1) * self.ring.token_bytes  # one goes to the store
        scoring = 0 if self.dense else self.score_rank
        return s.max_batch * row + self._basis_bytes() * (2 * self.ring.rank + scoring) // self.ring.rank
