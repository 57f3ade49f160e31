"""RazorAttention: retrieval heads keep every token, the others sinks, a recent window and one mean of all the rest.

Retrieval heads are found before any prompt, by their attention on repeated random tokens (calibrate.py). A KV head
whose group holds one is protected. In the others, tokens that leave the window are merged into a compensation token:
their mean key and value, which the softmax counts as the N_d tokens it stands for (Eq. 4-5). Storage is packed: 2 D
elements per token in protected heads, a fifth of that in the others once a text is long, as their window grows with it.
Another method stores and reads the protected heads, `full` by default; with self_index or sals, both savings multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cache.base import Attended, KVMethod, knob
from cache.budget import budget_cap, budget_tokens
from cache.spec import inner_method
from cache.statistic import REPEATS, RepeatedTokens
from kernels.backend import version_for
from kernels.gather_attention import gather_rows
from kernels.mixed_heads import mixed_decode
from kernels.packed_attention import packed_attention
from kernels.ring import ring_positions
from kernels.rotate_append import rotate_token
from kernels.window_append import window_append
from kv_methods.full import Full
from runtime.errors import InputError, warn_once
from runtime.machine import read_text
from runtime.parallel import ONE

PLACES = 4  # places after an earlier copy at which attention is measured

PRESETS = {
    "razor-28": dict(induction=0.28, echo=0.02),  # GLM-9B-1M, Figure 5
    # Llama-3.1-8B, Tables 5 and 6 (App. A.2): a fifth of every text above 4K tokens, where Table 2 has at least 4000
    "razor-ruler": dict(induction=0.28, echo=0.02, window=1, full_up_to=4096),
    "razor-places": dict(places=4),  # beyond the paper: heads that read the next token two to four places on
    "razor-places-random": dict(places=4, protect="random"),
    # Table 1: 15 % of the heads at random, and none. The others keep recent tokens only
    "razor-random": dict(protect="random", compensation=False, share=0.0, sinks=0),
    "razor-none": dict(induction=0.0, echo=0.0, compensation=False, share=0.0, sinks=0),
    "razor-no-echo": dict(echo=0.0),  # Figure 7
    "razor-no-compensation": dict(compensation=False),  # Figure 8
    # DuoAttention (Xiao et al. 2024): half of the KV heads keep all tokens (a quarter if queries are not grouped,
    # induction=0.25), the others sinks and recent ones, as many as its published gates come with (gates=FILE)
    "duo": dict(gates="scores", induction=0.5, echo=0.0, sinks=128, window=256, share=0.0, compensation=False),
}


def protected_heads(
    calib_induction: Tensor, calib_echo: Tensor, induction: float, echo: float, n_kv_head: int
) -> Tensor:
    """The KV heads that keep everything: scores [L, Hq] of all layers and query heads -> bool [L, Hkv] (Sec. 3.3).

    The top share `induction` by induction score and the top share `echo` by echo score, each over the whole model and
    rounded up; a KV head is protected if any query head of its group is (Sec. 4.1.1).
    """
    heads = torch.zeros(calib_induction.numel(), dtype=torch.bool, device=calib_induction.device)
    for scores, share in ((calib_induction, induction), (calib_echo, echo)):
        n = max(1, budget_cap(float(share), len(heads))) if share else 0
        heads[scores.flatten().sort(descending=True, stable=True).indices[:n]] = True
    return heads.view(len(calib_induction), n_kv_head, -1).any(-1)


def random_heads(protected: Tensor, seed: int) -> Tensor:
    """As many random KV heads of the whole model as `protected` bool [L, Hkv] has: the control of Table 1."""
    drawn = torch.randperm(protected.numel(), generator=torch.Generator().manual_seed(seed))
    out = torch.zeros(protected.numel(), dtype=torch.bool)
    out[drawn[: int(protected.sum())]] = True
    return out.view_as(protected)


def read_gates(path: str, n_layer: int, n_kv_head: int) -> Tensor:
    """Gates [L, Hkv] from DuoAttention's full_attention_heads.tsv: a line per layer, a number per KV head.

    Raises InputError if it holds another number of either."""
    lines = [line.split() for line in read_text(path).splitlines() if line.strip()]
    try:
        gates = torch.tensor([[float(x) for x in line] for line in lines])
    except ValueError as e:
        raise InputError(f"gates={path}: expected a line of numbers for each layer: {e}") from None
    if gates.shape != (n_layer, n_kv_head):
        raise InputError(f"gates={path} holds gates of {list(gates.shape)} layers and KV heads, this model has "
                         f"{[n_layer, n_kv_head]}: give the file of this model, or gates=scores")  # fmt: skip
    return gates


class HeadScores(RepeatedTokens):
    """Attention to earlier copies of the current token (echo) and to what follows them (induction), Sec. 3.3.

    A head may look further: the token two places after the copy can carry the one between, moved there by a head that
    looks one token back. So the mass on PLACES places is kept; the first is the paper's score.
    """

    name = "razor"

    def measure_attention(self, p, rows, n_random):
        place, back = (torch.arange(n, device=p.device) for n in (1 + PLACES, REPEATS))
        at = rows[:, None, None] - n_random * back[1:, None] + place  # [Q, copies, places]
        there = (at >= place) & (at <= rows[:, None, None])  # with few random tokens, places may lie behind the query
        mass = p[:, torch.arange(len(rows), device=p.device)[:, None, None], at.clamp(0, p.shape[2] - 1)]
        return dict(mass=(mass.double() * there).sum((1, 2)))  # [Hq, places]

    def finish(self, mean):
        echo, induction = mean["mass"][:, 0], mean["mass"][:, 1]
        return dict(echo=echo, induction=induction, after=mean["mass"][:, 1:])


class Razor(KVMethod):
    paper = "Tang et al. 2024, RazorAttention: Efficient KV Cache Compression Through Retrieval Heads"
    lossless = dict(induction=1.0)
    stress = dict(window=16)
    statistics = (HeadScores(),)
    reads_queries = False
    whole_calibration = True  # heads are protected by their rank among all of the model
    k: Tensor  # [B, heads that drop tokens, sinks + ring, D], rotated; filled from the first slot on, in no order
    v: Tensor
    mean_k: Tensor  # fp32 [B, heads that drop tokens, D]: the compensation token
    mean_v: Tensor
    slot_of: Tensor  # int32 [B, ring]: the slot of the window's token at position sinks + i (mod ring)
    least: Tensor  # int64 [B]: S_0, the least L_h of each row
    order: Tensor  # int64 [Hkv]: the protected heads, then those that drop tokens
    q_order: Tensor  # int64 [Hq]: their query heads
    place: Tensor  # int64 [Hq]: of each query head in that order
    k_all: Tensor | None = None  # [slots of all rows and heads, D] in that order: what the buffers k are parts of
    v_all: Tensor | None = None

    @dataclass
    class Args:
        induction: float = knob(0.14, "share of query heads protected by induction (Table 2)", 0, 1)
        echo: float = knob(0.01, "share of query heads protected by echo score (Table 2)", 0, 1)
        places: int = knob(1, "places after a copy, the best of which is the induction score (paper: 1)", 1, PLACES)
        sinks: int = knob(4, "first tokens kept by the other heads (Table 2)", low=0)
        window: int = knob(4000, "least tokens in their recent window (Table 2)", low=1)
        share: float = knob(0.2, "share of all tokens so far that their window holds, if that is more (Table 2)", 0, 1)
        full_up_to: int = knob(0, "prompts up to this length have a window of at least this size (App. A.2: 4K)", low=0)
        compensation: bool = knob(True, "False: dropped tokens are forgotten (Figure 8)")
        protect: Literal["retrieval", "random"] = knob(
            "retrieval", "protect by score, or as many KV heads at random (Table 1)"
        )
        seed: int = knob(0, "seed of protect=random", low=0)
        gates: str = knob(
            "", "shares are of KV heads: `scores`, by a group's best score, or a file's gates (DuoAttention's tsv)"
        )
        retrieval_method: str = knob(
            "full", "method or preset that holds the protected heads, in every layer; its knobs: quest:budget=64"
        )

        def __post_init__(self):
            if inner_method(self.retrieval_method)[0] is Razor:
                raise InputError("razor: retrieval_method must be another method than razor itself")

    @classmethod
    def needs(cls, args):
        inner, knobs = inner_method(args.retrieval_method)
        return (cls.statistics if args.gates in ("", "scores") else ()) + inner.needs(knobs)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        T, D = shape.max_seq_len, shape.head_dim
        self._route(self._protected().nonzero().flatten().tolist())
        # sinks have slots of their own in front of the ring, so a ring as long as the rest of the context suffices
        self.sinks = min(args.sinks, T)
        self.ring = max(1, min(T - self.sinks, max(args.window, args.full_up_to, budget_cap(float(args.share), T))))
        if self.n_own:
            if self.ring >= T - self.sinks and shape.device.type != "meta":
                warn_once(f"razor drops nothing of texts up to {self.sinks + max(args.window, args.full_up_to)} "
                          "tokens, its sinks and window (window=): no bytes are saved")  # fmt: skip
            for x in ("k", "v"):
                self.buffer(x, (shape.max_batch, self.n_own, self.sinks + self.ring, D))
                if args.compensation:
                    self.buffer(f"mean_{x}", (shape.max_batch, self.n_own, D), torch.float32)
            self.buffer("slot_of", (shape.max_batch, self.ring), torch.int32)
            self.buffer("least", (shape.max_batch,), torch.int64)
            self.least.fill_(max(args.window, args.full_up_to))
        if self.n_own and type(self.other) is Full and version_for(shape.device, shape.dtype) == "triton":
            self.k_all, self.v_all = self._in_one_list("k"), self._in_one_list("v")

    def _in_one_list(self, name: str) -> Tensor:
        """The keys or values of all heads in one tensor, for `mixed_decode`; both methods' buffers become views."""
        methods = [m for m in (self.other, self) if m is not None]
        sizes = [m.get_buffer(name).numel() // self.shape.head_dim for m in methods]
        every = self.shape.zeros((sum(sizes), self.shape.head_dim))
        for method, part in zip(methods, every.split(sizes), strict=True):
            setattr(method, name, part.view(method.get_buffer(name).shape))
        return every

    def _protected(self) -> Tensor:
        """Which KV heads of this layer keep everything, bool [Hkv]."""
        a, H = self.args, self.shape.n_kv_head
        if a.gates not in ("", "scores"):
            induction = echo = read_gates(a.gates, self.shape.n_layer, self.shape.layer_heads)
        elif self.calib is None:  # sizes only: which heads does not matter, only how many
            return torch.arange(H) < math.ceil((a.induction + a.echo) * H - 1e-6)
        else:
            induction = self.calib.stack("razor.induction" if a.places == 1 else "razor.after")
            induction = induction if a.places == 1 else induction[..., : a.places].amax(-1)
            echo = self.calib.stack("razor.echo")
        if a.gates == "scores":
            induction, echo = (x.unflatten(1, (self.shape.layer_heads, -1)).amax(-1) for x in (induction, echo))
        heads = protected_heads(induction, echo, a.induction, a.echo, self.shape.layer_heads)
        heads = (random_heads(heads, a.seed) if a.protect == "random" else heads)[self.layer]
        return heads[self.shape.own_heads.start : self.shape.own_heads.stop]

    # ---- two methods in one layer: `other` holds the protected heads ----

    def _route(self, theirs: list[int]) -> None:
        shape = self.shape
        own = [h for h in range(shape.n_kv_head) if h not in theirs]
        self.n_other, self.n_own, self.other = len(theirs), len(own), None
        if not theirs:
            return
        if own:
            order, group = torch.tensor(theirs + own), torch.arange(shape.n_head // shape.n_kv_head)
            queries = (order[:, None] * len(group) + group).flatten()
            self.constant("order", order.shape, order, torch.int64)
            self.constant("q_order", queries.shape, queries, torch.int64)
            self.constant("place", queries.shape, queries.argsort(), torch.int64)  # of query heads in that order
        (cls, args), calib = inner_method(self.args.retrieval_method), self.calib
        part = replace(shape, n_head=shape.n_head // shape.n_kv_head * len(theirs), n_kv_head=len(theirs),
                       ranks=ONE, all_kv_heads=0)  # fmt: skip
        if calib is not None and (own or shape.ranks.size > 1):
            at = [shape.own_heads[h] for h in theirs]
            calib = calib.heads(self.layer, at, shape.layer_heads, cls.needs(args))
        self.other = cls(args, part, self.layer, self.rope, calib)
        if shape.ranks.size > 1 and self.other.joins_heads:
            raise InputError(f"razor: {shape.ranks.size} processes hold other heads each, so retrieval_method "
                             f"{self.args.retrieval_method} cannot join them: use full")  # fmt: skip
        self.predicts, self.deviates = self.other.predicts, self.other.deviates  # differ between layers
        self.exact_prefill, self.takes_chunks = self.other.exact_prefill, self.other.takes_chunks
        if own:
            self.other.heads, self.heads = torch.tensor(theirs), torch.tensor(own)

    @classmethod
    def room_if_unknown(cls, args):
        inner, knobs = inner_method(args.retrieval_method)
        return inner.room_if_unknown(knobs)

    def connect(self, layers):
        if self.other is not None:
            self.other.connect([m.other for m in layers if isinstance(m, Razor) and m.other is not None])

    def prefill(self, q, k, v, lengths, start=None):
        return self._by_head("prefill", super().prefill, q, k, v, lengths, start)

    def store_prompt(self, q, k, q_rot, k_rot, v, lengths):
        if self.other is None or k.shape[1] == self.n_own:  # the heads given are all our own
            super().store_prompt(q, k, q_rot, k_rot, v, lengths)
        elif not self.n_own:
            self.other.store_prompt(q, k, q_rot, k_rot, v, lengths)
        else:
            stores: tuple[Callable[..., None], ...] = self.other.store_prompt, super().store_prompt
            for run, part in zip(stores, self._split(q, k, q_rot, k_rot, v), strict=True):
                run(*part, lengths)

    def begin_prompt(self, total):
        for begin in self._each("begin_prompt", super().begin_prompt):
            begin(total)

    def end_prompt(self, lengths):
        for end in self._each("end_prompt", super().end_prompt):
            end(lengths)

    def _each(self, name, ours):
        return ([getattr(self.other, name)] if self.other is not None else []) + [ours] * bool(self.n_own)

    def second_pass(self, tokens, lengths, encode):
        return () if self.other is None else self.other.second_pass(tokens, lengths, encode)

    def reread(self, q, k, v, lengths, text):
        return self._by_head("reread", super().reread, q, k, v, lengths, text)

    def decode(self, q, k, v, pos):
        if self.k_all is None or self.v_all is None or self.trace is not None:
            return self._by_head("decode", super().decode, q, k, v, pos)
        q, k = rotate_token(q, k, self.rope.cos, self.rope.sin, pos)
        mean_k, mean_v = (self.mean_k, self.mean_v) if self.args.compensation else (None, None)
        place, fresh, dropped = self.places(pos)
        filled = self.once_a_step(pos, "filled", lambda: self.filled(pos))
        return mixed_decode(q, k, v, self.k_all, self.v_all, self.slot_of, mean_k, mean_v, self.order, self.n_other,
                            self.sinks + self.ring, pos, place, fresh, dropped, filled)  # fmt: skip

    def _by_head(self, step: str, ours: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *at: Any) -> Tensor:
        """Run the other method's `step` on its heads and `ours` on the rest; the output has heads in their order.

        q [B, Hq, ..., D], k and v [B, Hkv, ..., D], none of them rotated: the methods may differ in what they rotate.
        """
        if self.other is None:
            return ours(q, k, v, *at)
        theirs = getattr(self.other, step)
        if not self.n_own:
            return theirs(q, k, v, *at)
        y = torch.cat([run(*part, *at) for run, part in zip((theirs, ours), self._split(q, k, v), strict=True)], 1)
        return y.index_select(1, self.place)

    def _split(self, *heads_of: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The other method's part of every tensor [B, heads, ...], then ours: views of a copy in the order of both."""
        out = []
        for x in heads_of:
            g = x.shape[1] // self.shape.n_kv_head
            order = self.order if g == 1 else self.q_order
            out.append(x.index_select(1, order).split((g * self.n_other, g * self.n_own), 1))
        return zip(*out, strict=True)

    def prefetch(self, q_hat, pos):
        if self.other is not None:
            if self.n_own:
                q_hat = q_hat.index_select(1, self.q_order[: self.n_other * self.shape.n_head // self.shape.n_kv_head])
            self.other.prefetch(q_hat, pos)

    def maintain(self, step):
        if self.other is not None:
            self.other.maintain(step)

    # ---- the heads that drop tokens: q, k and v are theirs alone, rotated ----

    def scope(self, n):
        """L_h = max(S_0, N / C) for n [B] tokens so far (Algorithm 1, line 2), at most the ring. Grows by 0 or 1."""
        grown = budget_tokens(float(self.args.share), n)
        return torch.maximum(grown, self.least[: len(n)]).clamp(max=self.ring)

    def dropped(self, pos):
        """N_d with the newest token at pos [B]: all but the sinks and the window. At or below 0: none are dropped."""
        return pos + 1 - self.sinks - self.scope(pos + 1)

    def filled(self, pos):
        """The number of slots in use with the newest token at pos [B]."""
        return (pos + 1).minimum(self.sinks + self.scope(pos + 1))

    def compress(self, q, k, v, lengths):
        """Algorithm 1: keep the sinks, the last L_h tokens, and the mean of the others (Eq. 4)."""
        B, _, S, _ = k.shape
        a, slots = self.args, torch.arange(self.k.shape[2], device=k.device)
        self.least[:B] = torch.where(lengths > a.full_up_to, a.window, max(a.window, a.full_up_to))
        gone = self.dropped(lengths - 1).clamp(min=0)[:, None]
        at = torch.where(slots < self.sinks, slots, slots + gone).clamp(max=S - 1)  # the position in each slot
        self.k[:B], self.v[:B] = gather_rows(k, at[:, None]), gather_rows(v, at[:, None])
        newest = self._newest(lengths - 1)
        self.slot_of[:B] = (newest - gone).clamp(min=0).int()
        if a.compensation:
            t = torch.arange(S, device=k.device) - self.sinks
            out = ((t >= 0) & (t < gone))[:, None, :, None]
            for mean, x in ((self.mean_k, k), (self.mean_v, v)):
                mean[:B] = torch.where(out, x, 0).sum(2, dtype=torch.float32) / gone.clamp(min=1)[..., None]

    def _newest(self, pos):
        """The newest position of each entry of slot_of, [B, ring], with the newest token at pos [B]."""
        return self.sinks + ring_positions(pos - self.sinks, self.ring)

    def append(self, k, v, pos):
        """While the window grows, nothing leaves it; otherwise the new token takes the slot of the oldest one."""
        mean_k, mean_v = (self.mean_k, self.mean_v) if self.args.compensation else (None, None)  # Eq. 4
        place, fresh, dropped = self.places(pos)
        window_append(self.k, self.v, self.slot_of, mean_k, mean_v, k, v, place, fresh, dropped)

    def places(self, pos):
        """`window_append`'s place, fresh and dropped of the tokens at pos [B]."""
        place = self.once_a_step(pos, "place", lambda: pos - self.sinks)
        fresh = self.once_a_step(pos, "fresh", lambda: self.fresh(pos))
        return place, fresh, self.once_a_step(pos, "dropped", lambda: self.dropped(pos))

    def fresh(self, pos):
        """The slot that a growing window gets for the token at pos [B]; -1: it does not grow."""
        filled = self.filled(pos)
        return torch.where(filled > self.filled(pos - 1), filled - 1, -1)

    def attend(self, q, idx, count, pos):
        filled = self.once_a_step(pos, "filled", lambda: self.filled(pos))
        if not self.args.compensation:
            return packed_attention(q, self.k, self.v, filled)
        n = self.once_a_step(pos, "gone", lambda: self.dropped(pos).clamp(min=0))
        return packed_attention(q, self.k, self.v, filled, self.mean_k, self.mean_v, n)  # Eq. 5

    def attended(self, q, idx, count, pos):
        B, H, slot = len(pos), self.n_own, torch.arange(self.k.shape[2], device=q.device)
        at, newest = slot.repeat(B, 1), self._newest(pos)
        for b, first in enumerate((self.sinks + self.dropped(pos).clamp(min=0)).tolist()):
            there = newest[b] >= first
            at[b, self.slot_of[b, there].long()] = newest[b, there]
        at = torch.where(slot < self.filled(pos)[:, None], at, -2)[:, None].expand(B, H, -1)
        k, v, tokens = self.k[:B], self.v[:B], torch.ones(B, H, at.shape[2], device=q.device)
        if self.args.compensation:
            n = self.dropped(pos).clamp(min=0)[:, None, None].expand(B, H, 1)
            at, tokens = torch.cat((at, torch.where(n > 0, -1, -2)), 2), torch.cat((tokens, n), 2)
            k, v = (torch.cat((x, m[:B, :, None]), 2) for x, m in ((k, self.mean_k), (v, self.mean_v)))
        return Attended(at, q, k, v, tokens)

    def reset(self):
        if self.other is not None:
            self.other.reset()
        if self.n_own:
            self.least.fill_(max(self.args.window, self.args.full_up_to))
            if self.args.compensation:
                self.mean_k.zero_(), self.mean_v.zero_()

    def layout(self, tokens):
        """max_seq_len decides the ring's size, and entries of slot_of are positions modulo that size."""
        return dict(slot_of=self.ring) if self.n_own and tokens > self.sinks + self.ring else {}

    def carry(self, name, saved, layout, pos):
        """slot_of re-indexed from a ring of another size; entries of tokens outside both windows may hold anything."""
        place = (self._newest(pos) - self.sinks).clamp(min=0)
        return saved[name].gather(1, place % (layout or saved[name].shape[1]))

    def traffic(self, pos):
        """Kept tokens, the mean token, a slot number, S_0 and the orders of heads; all up to pos counts as prompt."""
        s, a, n = self.shape, self.args, pos + 1
        least = a.window if n > a.full_up_to else max(a.window, a.full_up_to)
        kept = min(n, self.sinks + min(max(least, budget_cap(float(a.share), n)), self.ring))
        means = a.compensation and kept < n
        head = 2 * s.head_dim * (kept * s.dtype.itemsize + 4 * means)
        order = 8 * s.n_kv_head + 16 * s.n_head * (self.k_all is None) if self.n_own and self.n_other else 0
        other = self.other.traffic(pos) if self.other is not None else 0
        return other + s.max_batch * (self.n_own * head + 12 * bool(self.n_own)) + order
