"""Self-Indexing KVCache: the sign bits of the compressed keys are also the index that finds the keys to attend to.

A 4-bit code holds the signs of 4 centred channels. Codes score every token through a look-up table of the codebook's
centroids; the best tokens are unpacked (signs x 2-bit magnitudes, 2-bit values) and attended to, beside a few sink
tokens in full precision and all decoded tokens, which are outside the budget: the newest in full precision, older ones
compressed. 112 of 512 bytes per token at D = 128 (Overhead Analysis).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import Attended, CacheShape, KVMethod, Storage, knob, rows
from cache.budget import budget_cap, budget_tokens, check_budget, min_tokens
from cache.full_precision import Tail
from cache.packed import PackedVectors, check_groups
from kernels.gather_attention import gather_rows
from kernels.packed_gather_attention import FullPrecisionTokens, PackedTokens, packed_gather_attention, read_packed
from kernels.prompt_scores import best_tokens, snapkv_scores
from kernels.select import budget_select, with_run
from kernels.sign_codes import SUB, lut_score, pack_codes, sign_codes, sign_patterns
from kernels.sign_encode import encode_keys, encode_others, key_range
from runtime.errors import InputError

PRESETS = {
    "self_index-7.5": dict(budget=0.075),  # RULER, Table 2; int(0.075 * (L - 64)) tokens and 64 sinks (published code)
    # where the published code differs from the paper or from us, but for how sinks are scored, its budget of 100
    # decoded tokens, the sign of 0 and exact scales: github.com/LfieLike/selfindexingkv
    "self_index-published": dict(
        budget=0.075, min_tokens=0, center="median", sink_queries=1, sinks_in_index=False, tail=1, flush=1
    ),
    "self_index-16bit": dict(store_bits=16),  # "Ours (16 bits)", Tables 1 and 2
    "self_index-no-sign": dict(sign_in_quant=False),  # Table 5, w/o sign in quant
    "self_index-sign-only": dict(retrieval="sign"),  # Table 5, sign-only retrieval
    "self_index-no-sinks": dict(sinks=0),  # Table 5, w/o sink tokens
}


@dataclass(frozen=True)
class BesideSinks:
    """The number of tokens that a step chooses beside `sinks` tokens of the prompt, which are always attended to.

    counted: the budget includes the sinks, and a share is one of the whole length. Not counted: the budget is for
    tokens that are no sinks, and a share is one of these, rounded down as in the published code. None: a number is
    counted, a share is not.
    """

    budget: int | float
    sinks: int
    counted: bool | None = None
    min_tokens: int = 0  # of a budget that is a share

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if isinstance(self.budget, int) and self.budget < self._inside:
            raise InputError(f"the budget of {self.budget} tokens is smaller than its {self.sinks} sinks")

    @property
    def _inside(self) -> int:
        """Sinks that are part of the budget."""
        counted = isinstance(self.budget, int) if self.counted is None else self.counted
        return self.sinks if counted else 0

    def of(self, length: int) -> int:
        """The most that are chosen of `length` tokens. 160 tokens mean 64 + 96 whatever the prompt; of a share, nothing
        is taken off for sinks, as a prompt may have fewer."""
        if isinstance(self.budget, int):
            return min(length, self.budget - self._inside)
        return budget_cap(self.budget, length, self.min_tokens)

    def at(self, prompt: Tensor, rivals: Tensor, length: Tensor) -> Tensor:
        """The number chosen, int64 [B]; prompt: its tokens, rivals: those that compete, sinks among them, length: all
        tokens so far, each [B]."""
        sinks = prompt.clamp(max=self.sinks)
        if isinstance(self.budget, int):
            wanted = torch.full_like(prompt, self.budget - self._inside)
        elif self.counted:
            wanted = budget_tokens(self.budget, length, self.min_tokens) - sinks
        else:
            # + 1e-6, so that 0.7 of 10 tokens are 7
            wanted = ((rivals - sinks).double() * self.budget + 1e-6).long().clamp(min=self.min_tokens)
        return wanted.clamp(min=0).minimum(rivals - sinks)


class Sinks(Storage):
    """Sink tokens of a prompt: the same number for every KV head, which has a choice of its own."""

    k: Tensor  # [B, Hkv, n, D]; a shorter prompt fills the first slots, and the others must weigh 0
    v: Tensor
    idx: Tensor  # [B, Hkv, n] int64, their positions
    layout = Storage.first_slots

    def __init__(self, shape: CacheShape, n: int):
        super().__init__(shape)
        size = (shape.max_batch, shape.n_kv_head, n, shape.head_dim)
        self.n = n
        self.buffer("k", size), self.buffer("v", size), self.buffer("idx", size[:3], torch.int64)

    def put(self, idx: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Store tokens idx [B, Hkv, <= n], those past a prompt's end last, with their k and v [B, Hkv, <= n, D]."""
        B, _, n = idx.shape
        self.idx[:B, :, :n], self.idx[:B, :, n:] = idx.minimum(lengths.view(B, 1, 1) - 1), 0
        self.k[:B, :, :n], self.v[:B, :, :n] = k, v

    def position(self, prompt_len: Tensor) -> Tensor:
        """Positions [B, Hkv, n], -2 in empty slots."""
        there = torch.arange(self.n, device=prompt_len.device) < prompt_len[:, None]
        return torch.where(there[:, None], self.idx[: len(prompt_len)], -2)


def prompt_median(k: Tensor, lengths: Tensor) -> Tensor:
    """The median of every channel over prompts' keys, the lower one of two: k [B, H, S, D] of lengths [B] -> fp32
    [B, H, D]."""
    there = (torch.arange(k.shape[2], device=k.device) < lengths[:, None])[:, None, :, None]
    middle = ((lengths - 1) // 2)[:, None, None, None].expand(-1, k.shape[1], 1, k.shape[3])
    return k.float().masked_fill(~there, float("inf")).sort(2).values.gather(2, middle)[:, :, 0]


class SelfIndex(KVMethod):
    paper = "Yang, Zhang et al. 2025, Self-Indexing KVCache: Predicting Sparse Attention from Compressed Keys"
    lossless = dict(store_bits=16, budget=1.0)
    stress = dict(budget=24, sinks=4, tail=16, flush=6)
    rewinds = True
    layout = KVMethod.first_slots
    units = "v"

    codes: Tensor  # [B, Hkv, slots, D / 8] sign codes, two to a byte
    mean: Tensor  # [B, Hkv, D], eq. 5
    alpha: Tensor  # [B, Hkv, D], eq. 12
    book: Tensor  # [B, Hkv, D / 4, 16, 4] centroids
    flushed: Tensor  # [1], the number of decoded tokens that moved from the tail to the compressed store

    @dataclass
    class Args:
        budget: int | float = knob(160, "tokens attended (LongBench: 160), or a share of those that are no sinks")
        sinks_in_budget: bool | None = knob(
            None,
            "the budget includes sinks; None: a number does (paper, LongBench), a share does not (published code)",
        )
        sinks: int = knob(64, "prompt tokens kept in full precision, chosen by SnapKV", low=0)
        center: Literal["mean", "median"] = knob(
            "mean", "of a prompt's keys, taken off (Eq. 5; published code: median)"
        )
        sink_queries: int = knob(
            32, "last queries of the prompt that choose the sinks (ours; published code: 1)", 1, 4096
        )
        sinks_in_index: bool = knob(
            True, "codebook and alpha are taken over sinks, too (Eq. 4, 12; published code: False)"
        )
        store_bits: Literal[2, 4, 8, 16] = knob(2, "bits of key magnitudes and values")
        sign_in_quant: bool = knob(True, "False: quantize signed keys (Table 5)")
        retrieval: Literal["codebook", "sign"] = knob("codebook", "score by centroids, or by signs alone (Table 5)")
        heads: Literal["mean", "softmax", "max"] = knob(
            "mean", "what ranks a list: the group's mean query (published code), or its mean softmax or max (ours)"
        )
        keep_decoded: bool = knob(True, "compressed decoded tokens stay attended (paper); False: they compete (ours)")
        tail: int = knob(512, "decoded tokens in full precision, older ones compressed (ours; published code: 0)", 1)
        flush: int = knob(64, "decoded tokens compressed at a time once the tail is full (ours)", 1)
        min_tokens: int = min_tokens()

        def __post_init__(self):
            BesideSinks(self.budget, self.sinks, self.sinks_in_budget, self.min_tokens)
            if self.flush > self.tail:
                raise InputError(f"self_index: flush={self.flush} tokens are more than tail={self.tail} holds")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        check_groups("self_index", shape.head_dim)
        (B, H, T, D), P, bits = shape.kv, shape.max_prompt, args.store_bits
        self.sinks = Sinks(shape, min(args.sinks, P))
        self.tail = Tail(shape, max(1, min(args.tail, shape.max_decoded, T)), args.flush)
        # if the tail holds all decoded tokens, the store holds prompts alone; if the sinks hold those, it is empty
        self.flushes = shape.max_decoded > args.tail
        self.chooses = self.flushes or self.sinks.n < P
        self.slots = T if self.flushes else P if self.chooses else 1
        self.budget = BesideSinks(args.budget, args.sinks, args.sinks_in_budget, args.min_tokens)
        self.k_chosen = max(1, min(self.slots, self.budget.of(T)))
        # a list has room for the decoded tokens of the store, fewer of them if max_new_tokens is known
        room = shape.max_decoded - args.tail + args.flush if self.flushes and args.keep_decoded else 0
        self.k_static = min(self.slots, self.k_chosen + room)
        self.buffer("codes", (B, H, self.slots, D // 8), torch.uint8)
        self.k, self.v = (PackedVectors(shape, (B, H, self.slots), D, bits) for _ in "kv")
        self.buffer("mean", (B, H, D), torch.float32), self.buffer("alpha", (B, H, D), torch.float32)
        if self.chooses:
            self.buffer("book", (B, H, D // SUB, 16, SUB), torch.float32)
        self.buffer("flushed", (1,), torch.int64)
        self.token_bytes = D // 8 + self.k.vector_bytes + self.v.vector_bytes  # of a token in the compressed store
        self.fixed_bytes = 4 * D * (2 + 16 * self.chooses)  # of a row and KV head: mean, alpha, codebook

    # ---- the prompt ----

    def compress(self, q, k, v, lengths):
        B, S, a = len(k), k.shape[2], self.args
        self.reset()
        self.tail.prompt_len[:B] = lengths
        # Eq. 5 and 12. Centring balances the signs, and softmax is invariant to it if all keys are centred (Eq. 7).
        center = prompt_median(k, lengths) if a.center == "median" else None
        self.mean[:B], self.alpha[:B] = key_range(k, lengths, center)
        mean = self.mean[:B]
        if self.sinks.n:  # Full Precision Sink Tokens: SnapKV's choice; a prompt shorter than the sinks is all sinks
            idx = best_tokens(snapkv_scores(q, k, lengths, a.sink_queries), self.sinks.n)
            sink_k = (gather_rows(k, idx).float() - mean[:, :, None]).to(k.dtype)
            self.sinks.put(idx, sink_k, gather_rows(v, idx), lengths)
        if self.chooses:
            codes, book = encode_keys(k, mean, lengths)  # Eq. 2 to 4
            if not a.sinks_in_index:
                book, self.alpha[:B] = encode_others(k, mean, lengths, self.sinks.idx[:B])
            self.book[:B] = book if a.retrieval == "codebook" else sign_patterns(k.device)
            self._store((slice(B), slice(None), slice(S)), k, mean, codes, v)

    def _store(self, at, k, mean, codes, v):
        """Write keys less their mean, sign codes and values [B, H, n, D] to the compressed store (Eq. 9, 10 and 12)."""
        self.codes[at] = codes
        self.k.put(at, k, mean, self.alpha[: len(k)], magnitude=self.args.sign_in_quant)
        self.v.put(at, v)

    # ---- one token per row ----

    def append(self, k, v, pos):
        newest = self.once_a_step(pos, "newest", lambda: self.tail.newest(pos))
        self.tail.put((k - rows(self.mean, len(k))).to(k.dtype), v, newest)

    def select(self, q, pos):
        """The best tokens of the compressed store, by a group's queries together; sinks are attended to in any case.

        With `keep_decoded`, the best of the prompt, followed by all decoded tokens of the store.
        """
        B, keep = len(pos), self.args.keep_decoded
        if not self.chooses:
            none = torch.zeros(B, self.shape.n_kv_head, 1, dtype=torch.int64, device=q.device)
            return none, none[..., 0]
        prompt = rows(self.tail.prompt_len, B)

        def rivals():  # these first slots compete, sinks among them
            return prompt if keep else prompt + self.flushed

        last = self.once_a_step(pos, "last", lambda: rivals() - 1)
        wanted = self.once_a_step(pos, "wanted", lambda: self.budget.at(prompt, rivals(), pos + 1))
        idx, count = budget_select(self._scores(q, last), last, wanted, self.k_chosen)
        if not (self.flushes and keep):
            return idx, count
        return with_run(idx, count, prompt, self.slots - 1, self.k_static), count + self.flushed

    def _scores(self, q, last):
        """Eq. 8 for the slots up to last [B] -> [B, Hkv, T]; sinks score -inf."""
        B = len(q)
        book = (rows(self.book, B), rows(self.codes, B), last, rows(self.sinks.idx, B))
        if self.args.heads == "mean":
            return lut_score(q, *book)
        groups = q.unflatten(1, (self.shape.n_kv_head, -1))
        each = torch.stack([lut_score(x.contiguous(), *book) for x in groups.unbind(2)])
        if self.args.heads == "max":
            return each.amax(0)
        there = torch.arange(self.slots, device=q.device) <= last[:, None, None]
        y = torch.where(there, each * q.shape[2] ** -0.5, float("-inf")).softmax(-1).nan_to_num(0).mean(0)
        return y.masked_fill(each[0] == float("-inf"), float("-inf"))  # a token's weight may be 0, too

    def attend(self, q, idx, count, pos):
        sinks, tail = self.sinks, self.tail
        whole = FullPrecisionTokens(sinks.k, sinks.v, tail.k, tail.v)
        return packed_gather_attention(q, idx, count, self.store, whole, pos, tail.prompt_len, self.flushed)

    @property
    def store(self):
        """The compressed tokens in the form that the kernel takes."""
        k, v, packed = self.k, self.v, self.k.bits < 16
        signs = self.codes if packed and self.args.sign_in_quant else None
        return PackedTokens(k.data, v.data, k.bits, k.params, v.params, self.alpha if packed else None, signs)

    def attended(self, q, idx, count, pos):
        chosen = torch.arange(idx.shape[2], device=q.device) < count[..., None]
        return Attended.of(
            q,
            (self.sinks.position(self.tail.prompt_len[: len(pos)]), self.sinks.k, self.sinks.v),
            (torch.where(chosen, idx, -2), *read_packed(self.store, torch.where(chosen, idx, 0))),
            (self.tail.position(pos), self.tail.k, self.tail.v),
        )

    # ---- between steps ----

    def maintain(self, step):
        """Compress the oldest decoded tokens once the tail is full: the next one would overwrite the oldest."""
        while self.flushes and self.tail.due(step):
            x, v, steps = self.tail.take()  # x is centred already
            row, head = (torch.arange(n, device=x.device) for n in x.shape[:2])
            slots = (self.tail.prompt_len[:, None] + steps).clamp(max=self.slots - 1)
            self._store((row[:, None, None], head[:, None], slots[:, None]), x, None, pack_codes(sign_codes(x)), v)
            self.flushed.fill_(self.tail.moved)

    def reset(self):
        self.flushed.zero_()
        self.tail.reset()
        # empty slots weigh 0, but 0 * NaN is NaN; sinks and tail are small
        self.sinks.v.zero_(), self.tail.v.zero_()

    # ---- accounting ----

    def card_nbytes(self):
        """The bytes of the Overhead Analysis, and what it leaves out: sinks, tail, and the fixed costs."""
        B, H, _, D = self.shape.kv
        whole = 2 * (self.sinks.n + self.tail.size) * D * self.shape.dtype.itemsize + 8 * self.sinks.n
        return B * H * (self.slots * self.token_bytes + self.fixed_bytes + whole) + 8 * B + 8 + self.unit_nbytes

    def traffic(self, pos):
        """All tokens up to pos counted as prompt: decoded ones in the tail add 2 D elements each."""
        (B, H, _, D), n = self.shape.kv, torch.tensor([pos + 1])
        chosen = int(self.budget.at(n, n, n))
        whole = 2 * min(self.sinks.n, pos + 1) * D * self.shape.dtype.itemsize
        scorings = 1 if self.args.heads == "mean" else self.shape.n_head // H
        codes = (pos + 1) * D // 8 * scorings if self.chooses else 0
        return B * H * (codes + chosen * self.token_bytes + self.fixed_bytes + whole)
