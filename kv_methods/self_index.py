"""Self-Indexing KVCache: the sign bits of the compressed keys are also the index that finds the keys to attend to.

A 4-bit code holds the signs of 4 centred channels. Codes score every token through a look-up table of the codebook's
centroids; the best tokens are unpacked (signs x 2-bit magnitudes, 2-bit values) and attended to, beside a few sink
tokens in full precision and all that was decoded: the newest in full precision, older ones compressed, but always
attended to, outside the budget. 112 of 512 bytes a token at D = 128 (Overhead Analysis).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import Attended, KVMethod, knob
from cache.budget import budget_cap, budget_tokens, check_budget
from errors import InputError
from kernels.packed_gather_attention import PackedTokens, WholeTokens, packed_gather_attention, read_packed
from kernels.prompt_scores import snapkv_scores
from kernels.quantize import GROUP, quantize
from kernels.select import budget_select
from kernels.sign_codes import SUB, lut_score, pack_codes, sign_codes, sign_patterns
from kernels.sign_encode import encode_keys, key_range

PRESETS = {
    "self_index-7.5": dict(budget=0.075),  # RULER, Table 2; int(0.075 * (L - 64)) tokens and 64 sinks (published code)
    # what the published code does otherwise than the paper or we: github.com/LfieLike/selfindexingkv
    "self_index-published": dict(budget=0.075, sink_queries=1, sinks_in_index=False, tail=1, flush=1),
    "self_index-16bit": dict(store_bits=16),  # "Ours (16 bits)", Tables 1 and 2
    "self_index-no-sign": dict(sign_in_quant=False),  # Table 5, w/o sign in quant
    "self_index-sign-only": dict(retrieval="sign"),  # Table 5, sign-only retrieval
    "self_index-no-sinks": dict(sinks=0),  # Table 5, w/o sink tokens
}


class SelfIndex(KVMethod):
    paper = "Yang, Zhang et al. 2025, Self-Indexing KVCache: Predicting Sparse Attention from Compressed Keys"
    lossless = dict(store_bits=16, budget=1.0)
    stress = dict(budget=24, sinks=4, tail=16, flush=6)

    codes: Tensor  # [B, Hkv, T, D / 8] sign codes, two to a byte
    k_packed: Tensor  # magnitudes and values of the compressed store, and their scales and zeros
    k_params: Tensor
    v_packed: Tensor
    v_params: Tensor
    k16: Tensor  # with store_bits=16
    v16: Tensor
    mean: Tensor  # [B, Hkv, D]: eq. 5, and eq. 12
    alpha: Tensor
    book: Tensor  # [B, Hkv, D / 4, 16, 4] centroids
    sink_k: Tensor
    sink_v: Tensor
    sink_idx: Tensor
    tail_k: Tensor  # decoded tokens, a ring
    tail_v: Tensor
    prompt_len: Tensor
    flushed: Tensor  # decoded tokens that moved to the compressed store

    @dataclass
    class Args:
        budget: int | float = knob(160, "tokens attended (LongBench: 160), or a share of those that are no sinks")
        sinks_in_budget: bool | None = knob(
            None, "the budget counts sinks; None: a number does (paper, LongBench), a share does not (published code)"
        )
        sinks: int = knob(64, "prompt tokens kept in full precision, chosen by SnapKV")
        sink_queries: int = knob(
            32, "last queries of the prompt that choose the sinks (ours; published code: 1)", 1, 4096
        )
        sinks_in_index: bool = knob(True, "codebook and alpha are of sinks, too (Eq. 4, 12; published code: False)")
        store_bits: Literal[2, 4, 8, 16] = knob(2, "bits of key magnitudes and values")
        sign_in_quant: bool = knob(True, "False: quantize signed keys (Table 5)")
        retrieval: Literal["codebook", "sign"] = knob("codebook", "score by centroids, or by signs alone (Table 5)")
        keep_decoded: bool = knob(True, "compressed decoded tokens stay attended (paper); False: they compete (ours)")
        tail: int = knob(512, "decoded tokens in full precision; older ones are compressed (ours; published code: 0)")
        flush: int = knob(64, "decoded tokens compressed at a time once the tail is full (ours)")

        def __post_init__(self):
            check_budget(self.budget)
            if self.sinks < 0 or self.sink_queries < 1 or not 1 <= self.flush <= self.tail:
                raise InputError(f"self_index needs sinks >= 0, sink_queries >= 1 and 1 <= flush <= tail, got {self}")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        if shape.head_dim % GROUP:
            raise InputError(f"self_index needs a head_dim divisible by {GROUP}, this model has {shape.head_dim}")
        number = isinstance(args.budget, int)
        self.counts_sinks = number if args.sinks_in_budget is None else args.sinks_in_budget
        if number and self.counts_sinks and args.budget < args.sinks:
            raise InputError(f"self_index: the budget of {args.budget} tokens is smaller than its {args.sinks} sinks")
        (B, H, T, D), P = shape.kv, shape.max_prompt
        self.bits, self.n_sink = args.store_bits, min(args.sinks, P)
        self.tail = max(1, min(args.tail, shape.max_decoded, T))
        # where the tail holds all that is decoded, the store holds prompts alone; where sinks hold those, it is empty
        self.flushes = shape.max_decoded > args.tail
        self.chooses = self.flushes or self.n_sink < P
        self.slots = T if self.flushes else P if self.chooses else 1
        # a share is topped up where a prompt is shorter than the sinks; 160 tokens mean 64 + 96, whatever the prompt
        sinks = self.n_sink if number and self.counts_sinks else 0
        self.k_chosen = max(1, min(self.slots, args.budget - sinks if sinks else budget_cap(args.budget, T)))
        # a list has room for the decoded tokens of the store: the fewer, the better max_new_tokens is known
        room = shape.max_decoded - args.tail + args.flush if self.flushes and args.keep_decoded else 0
        self.k_static = min(self.slots, self.k_chosen + room)
        self.buffer("codes", (B, H, self.slots, D // 8), torch.uint8)
        if self.bits < 16:
            for x in ("k", "v"):
                self.buffer(f"{x}_packed", (B, H, self.slots, D * self.bits // 8), torch.uint8)
                self.buffer(f"{x}_params", (B, H, self.slots, D // GROUP, 2), torch.float16)
        else:
            self.buffer("k16", (B, H, self.slots, D)), self.buffer("v16", (B, H, self.slots, D))
        self.buffer("mean", (B, H, D), torch.float32)
        self.buffer("alpha", (B, H, D), torch.float32)
        if self.chooses:
            self.buffer("book", (B, H, D // SUB, 16, SUB), torch.float32)
        for x in ("k", "v"):
            self.buffer(f"sink_{x}", (B, H, self.n_sink, D))
            self.buffer(f"tail_{x}", (B, H, self.tail, D))
        self.buffer("sink_idx", (B, H, self.n_sink), torch.int64)
        self.buffer("prompt_len", (B,), torch.int64)
        self.buffer("flushed", (1,), torch.int64)

    # ---- the prompt ----

    def compress(self, q, k, v, lengths):
        B, S = len(k), k.shape[2]
        self.reset()
        self.prompt_len[:B] = lengths
        # Eq. 5 and 12. Centring balances the signs; softmax does not see it if every key of the row is centred.
        mean, self.alpha[:B] = key_range(k, lengths)
        self.mean[:B] = mean
        self._choose_sinks(q, k, v, lengths)
        if self.chooses:
            codes, book = encode_keys(k, mean, lengths)
            if not self.args.sinks_in_index:
                book, self.alpha[:B] = self._index_without_sinks(k, mean, lengths)
            self.book[:B] = book if self.args.retrieval == "codebook" else sign_patterns(k.device)
            self._store((slice(B), slice(None), slice(S)), k, mean, codes, v)

    def _store(self, at, k, mean, codes, v):
        """Write keys k less their mean, their codes and values v [B, H, n, D] into the compressed store at an index."""
        self.codes[at] = codes
        if self.bits == 16:
            self.k16[at], self.v16[at] = k if mean is None else (k.float() - mean[:, :, None]).to(k.dtype), v
            return
        self.k_packed[at], self.k_params[at] = quantize(
            k, self.bits, mean, self.alpha[: len(k)], magnitude=self.args.sign_in_quant
        )
        self.v_packed[at], self.v_params[at] = quantize(v, self.bits)

    def _choose_sinks(self, q, k, v, lengths):
        """Full Precision Sink Tokens: SnapKV's choice per KV head. A prompt shorter than the sinks is all sinks."""
        B, H, S, D = k.shape
        n = min(self.n_sink, S)
        if n == 0:
            return
        # [B, H, n]; past a short prompt's end: padding. Pooling makes equal scores: a stable sort takes the same tokens
        # of them, the first, however far the batch is padded
        scores = snapkv_scores(q, k, lengths, self.args.sink_queries)
        idx = scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
        self.sink_idx[:B, :, :n] = idx.minimum(lengths.view(B, 1, 1) - 1)
        at = idx[..., None].expand(B, H, n, D)
        self.sink_k[:B, :, :n] = (k.gather(2, at).float() - self.mean[:B, :, None]).to(k.dtype)
        self.sink_v[:B, :, :n] = v.gather(2, at)
        self.sink_idx[:B, :, n:] = 0

    def _index_without_sinks(self, k, mean, lengths):
        """Eq. 4 and 12 over the keys that are no sinks, about the mean of all; a prompt of sinks alone keeps them."""
        idx, many = self.sink_idx[: len(k)], lengths > self.n_sink
        sink = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)
        sink.scatter_(2, idx, many[:, None, None].expand_as(idx))
        order = sink.sort(dim=-1, stable=True).indices  # sinks behind all others, even behind padding
        rest, n = k.gather(2, order[..., None].expand_as(k)), lengths - many * self.n_sink
        keep = (torch.arange(k.shape[2], device=k.device) < n[:, None])[:, None, :, None]
        largest = torch.where(keep, rest.abs(), 0).amax((2, 3)).float()[..., None]
        alpha = torch.where(keep, (rest.float() - mean[:, :, None]).abs(), 0).amax(2)
        return encode_keys(rest, mean, n)[1], alpha.maximum(1e-3 * largest).clamp(min=1e-8)  # floor as in key_range

    # ---- one token per row ----

    def append(self, k, v, pos):
        B = len(pos)
        row, slot = torch.arange(B, device=pos.device), (pos - self.prompt_len[:B]) % self.tail
        self.tail_k[row, :, slot] = (k.float() - self.mean[:B]).to(k.dtype)
        self.tail_v[row, :, slot] = v

    def select(self, q, pos):
        """The best of the compressed store, by the mean of a group's queries; sinks are attended anyway.

        With `keep_decoded` the best of the prompt, and behind them the decoded tokens of the store, all of them.
        """
        B = len(pos)
        if not self.chooses:
            none = torch.zeros(B, self.shape.n_kv_head, 1, dtype=torch.int64, device=q.device)
            return none, none[..., 0]
        prompt, rivals = self.prompt_len[:B], self._rivals(B)
        wanted = self._wanted(prompt, rivals, pos + 1)
        idx, count = budget_select(self.scores(q, pos), rivals - 1, wanted, self.k_chosen)
        if not (self.flushes and self.args.keep_decoded):
            return idx, count
        i, n = torch.arange(self.k_static, device=q.device), idx.shape[2]
        both = ((prompt[:, None] - count)[..., None] + i).clamp(max=self.slots - 1)
        both[..., :n] = torch.where(i[:n] < count[..., None], idx, both[..., :n])
        return both, count + self.flushed

    def _rivals(self, B):
        """[B] first slots of the store, sinks among them, that compete for the budget."""
        return self.prompt_len[:B] + (0 if self.args.keep_decoded else self.flushed)

    def _wanted(self, prompt, rivals, length):
        """How many rivals that are no sinks the budget leaves; prompt, rivals, length: tokens [B] -> [B]."""
        sinks, budget = prompt.clamp(max=self.n_sink), self.args.budget
        if isinstance(budget, int):
            wanted = torch.full_like(prompt, budget - self.n_sink * self.counts_sinks)
        elif self.counts_sinks:
            wanted = budget_tokens(budget, length) - sinks
        else:
            wanted = ((rivals - sinks).double() * budget + 1e-6).long()  # a hair more, as 0.7 of 10 tokens are 7
        return wanted.clamp(min=0).minimum(rivals - sinks)

    def scores(self, q, pos):
        """Eq. 8, of every token of the store that competes; -inf of the sinks."""
        B = len(pos)
        return lut_score(q, self.book[:B], self.codes[:B], self._rivals(B) - 1, self.sink_idx[:B])

    def attend(self, q, idx, count, pos):
        whole = WholeTokens(self.sink_k, self.sink_v, self.tail_k, self.tail_v)
        return packed_gather_attention(q, idx, count, self.store, whole, pos, self.prompt_len, self.flushed)

    @property
    def store(self):
        """The compressed tokens."""
        if self.bits == 16:
            return PackedTokens(self.k16, self.v16, 16)
        codes = self.codes if self.args.sign_in_quant else None
        return PackedTokens(self.k_packed, self.v_packed, self.bits, self.k_params, self.v_params, self.alpha, codes)

    def attended(self, q, idx, count, pos):
        B, H, n = len(pos), self.shape.n_kv_head, self.sink_k.shape[2]
        chosen = torch.arange(idx.shape[2], device=q.device) < count[..., None]
        newest = (pos - self.prompt_len[:B])[:, None]  # decoded tokens before this one
        tail = newest - (newest - torch.arange(self.tail, device=q.device)) % self.tail
        sinks = torch.arange(n, device=q.device) < self.prompt_len[:B, None]
        at = [
            torch.where(sinks[:, None], self.sink_idx[:B], -2),
            torch.where(chosen, idx, -2),
            torch.where(tail >= self.flushed, tail + self.prompt_len[:B, None], -2)[:, None].expand(B, H, -1),
        ]
        k, v = read_packed(self.store, torch.where(chosen, idx, 0))
        k, v = torch.cat((self.sink_k[:B], k, self.tail_k[:B]), 2), torch.cat((self.sink_v[:B], v, self.tail_v[:B]), 2)
        return Attended(torch.cat(at, 2), q, k, v)

    # ---- between steps ----

    def maintain(self, step):
        """Compress the oldest decoded tokens once the tail is full: the next one would overwrite the oldest."""
        if not self.flushes or step - self._flushed < self.tail:
            return
        n = self.args.flush
        ring = (torch.arange(n, device=self.tail_k.device) + self._flushed) % self.tail
        x, v = self.tail_k[:, :, ring], self.tail_v[:, :, ring]  # centred already
        slots = self.prompt_len[:, None] + self._flushed + torch.arange(n, device=ring.device)
        row, head = (torch.arange(x, device=ring.device) for x in self.shape.kv[:2])
        at = row[:, None, None], head[:, None], slots.clamp(max=self.slots - 1)[:, None]
        self._store(at, x, None, pack_codes(sign_codes(x)), v)
        self._flushed += n
        self.flushed.fill_(self._flushed)

    def reset(self):
        self._flushed = 0
        self.flushed.zero_()
        self.prompt_len.zero_()
        # slots that hold no token weigh 0, but 0 * NaN is NaN; sinks and ring are small
        self.sink_v.zero_(), self.tail_v.zero_()

    # ---- accounting ----

    def token_bytes(self):
        """Of one token and KV head in the compressed store."""
        D, b = self.shape.head_dim, self.shape.dtype.itemsize
        if self.bits == 16:
            return D // 8 + 2 * D * b
        return D // 8 + 2 * (D * self.bits // 8 + D // GROUP * 2 * 2)

    def _fixed_bytes(self):
        """Of one row and KV head: mean, alpha and the codebook, in fp32."""
        D = self.shape.head_dim
        return 4 * (D + D + (D // SUB * 16 * SUB if self.chooses else 0))

    def card_nbytes(self):
        """Overhead Analysis, with what it leaves out: sinks, tail, and the fixed costs."""
        B, H, _, D = self.shape.kv
        whole = 2 * (self.n_sink + self.tail) * D * self.shape.dtype.itemsize + 8 * self.n_sink
        return B * H * (self.slots * self.token_bytes() + self._fixed_bytes() + whole) + 8 * B + 8

    def traffic(self, pos):
        """All of `pos` taken as prompt: decoded tokens of the tail come on top, 2 D elements each."""
        B, H, T, D = self.shape.kv
        n = torch.tensor([pos + 1])
        chosen = int(self._wanted(n, n, n))
        whole = 2 * min(self.n_sink, pos + 1) * D * self.shape.dtype.itemsize
        codes = (pos + 1) * D // 8 if self.chooses else 0
        return B * H * (codes + chosen * self.token_bytes() + self._fixed_bytes() + whole)
