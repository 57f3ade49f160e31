"""RazorAttention: retrieval heads keep every token, the others sinks, a recent window and one mean of all the rest.

Retrieval heads are found before any prompt, by their attention on repeated random tokens (calibrate.py). A KV head
whose group holds one is protected. The others drop what leaves their window into a compensation token: the mean key and
value, counted by the softmax as the N_d tokens it stands for (Eq. 4-5). Storage is packed: 2 D elements per token in
protected heads, a fifth of that in the others once a prompt is long. Another method stores and reads the protected
heads, `full` by default; self_index or sals multiply the two savings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from errors import InputError
from kernels.gather_attention import gather_rows
from kernels.packed_attention import packed_attention, replace_token
from kv_methods import make_args, resolve
from kv_methods.base import KVMethod, budget_cap, budget_tokens

PRESETS = {
    "razor-28": dict(induction=0.28, echo=0.02),  # GLM-9B-1M, Figure 5; Llama-3.1-8B, Tables 5 and 6
    "razor-places": dict(places=4),  # beyond the paper: heads that read the next token two to four places on
    "razor-places-random": dict(places=4, protect="random"),
    "razor-random": dict(protect="random"),  # Table 1, 15 % of the heads at random
    "razor-none": dict(induction=0.0, echo=0.0),  # Table 1, 0 % of the heads
    "razor-no-echo": dict(echo=0.0),  # Figure 7
    "razor-no-compensation": dict(compensation=False),  # Figure 8
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
    """As many KV heads as in `protected` bool [L, Hkv], drawn over the whole model: the control of Table 1."""
    drawn = torch.randperm(protected.numel(), generator=torch.Generator().manual_seed(seed))
    out = torch.zeros(protected.numel(), dtype=torch.bool)
    out[drawn[: int(protected.sum())]] = True
    return out.view_as(protected)


class Razor(KVMethod):
    paper = "Tang et al. 2024, RazorAttention: Efficient KV Cache Compression Through Retrieval Heads"
    lossless = dict(induction=1.0)
    calibrated = True
    k: Tensor
    v: Tensor
    mean_k: Tensor
    mean_v: Tensor
    scope: Tensor
    order: Tensor

    @dataclass
    class Args:
        induction: float = field(
            default=0.14, metadata=dict(help="share of query heads protected by induction (Table 2)")
        )
        echo: float = field(default=0.01, metadata=dict(help="share of query heads protected by echo score (Table 2)"))
        places: int = field(
            default=1, metadata=dict(help="places after a copy, 1 to 4, whose best is the induction score (paper: 1)")
        )
        sinks: int = field(default=4, metadata=dict(help="first tokens kept by the other heads (Table 2)"))
        window: int = field(default=4000, metadata=dict(help="least tokens in their recent window (Table 2)"))
        share: float = field(default=0.2, metadata=dict(help="of the prompt that their window holds if more (Table 2)"))
        compensation: bool = field(default=True, metadata=dict(help="False: dropped tokens are forgotten (Figure 8)"))
        protect: Literal["retrieval", "random"] = field(
            default="retrieval", metadata=dict(help="protect by score, or as many KV heads at random (Table 1)")
        )
        seed: int = field(default=0, metadata=dict(help="of protect=random"))
        retrieval_method: str = field(
            default="full", metadata=dict(help="method or preset that holds the protected heads, in every layer")
        )

        def __post_init__(self):
            for name in ("induction", "echo", "share"):
                if not 0 <= getattr(self, name) <= 1:
                    raise InputError(f"razor: {name}={getattr(self, name)} is not a share from 0 to 1")
            if not 1 <= self.places <= 4:
                raise InputError(f"razor: places={self.places} is not from 1 to 4")
            if self.sinks < 0 or self.window < 1:
                raise InputError(f"razor needs sinks >= 0 and window >= 1, got {self.sinks} and {self.window}")
            if resolve(self.retrieval_method)[0] is Razor:
                raise InputError("razor: retrieval_method must be another method than razor itself")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        H, T, D = shape.kv[1:]
        protected = self._protected().nonzero().flatten().tolist()
        local = [h for h in range(H) if h not in protected]
        self.n_protected, self.n_local = len(protected), len(local)
        if protected and local:
            self.constant("order", (H,), torch.tensor(protected + local), torch.int64)
        self.retrieval: KVMethod | None = None
        if protected:
            cls, knobs = resolve(args.retrieval_method)
            part = replace(shape, n_head=shape.n_head // H * len(protected), n_kv_head=len(protected))
            if calib is not None and local and cls.calibrated:
                calib = calib.heads(layer, protected)
            self.retrieval = cls(make_args(cls, knobs), part, layer, rope, calib)
            self.predicts = self.retrieval.predicts  # what the class says for all, layers may not
        # the sinks stand in front of the ring, so a window longer than the rest of the context needs no slot for them
        self.sinks = min(args.sinks, T)
        self.ring = max(1, min(T - self.sinks, max(args.window, budget_cap(float(args.share), T))))
        if local:
            for x in ("k", "v"):
                self.buffer(x, (shape.max_batch, len(local), self.sinks + self.ring, D))
                if args.compensation:
                    self.buffer(f"mean_{x}", (shape.max_batch, len(local), D), torch.float32)
            self.buffer("scope", (shape.max_batch,), torch.int64)  # L_h, fixed by each row's prompt
            self.reset()

    def _protected(self) -> Tensor:
        """Which KV heads of this layer keep everything, bool [Hkv]."""
        a, H = self.args, self.shape.n_kv_head
        if self.calib is None:  # sizes only: the share alone
            return torch.arange(H) < math.ceil((a.induction + a.echo) * H - 1e-6)
        induction = self.calib.stack("razor.induction" if a.places == 1 else "razor.after")
        induction = induction if a.places == 1 else induction[..., : a.places].amax(-1)
        echo = self.calib.stack("razor.echo")
        heads = protected_heads(induction, echo, a.induction, a.echo, H)
        return (random_heads(heads, a.seed) if a.protect == "random" else heads)[self.layer]

    # ---- both kinds of heads ----

    def prefill(self, q, k, v, lengths):
        return self._by_kind("prefill", super().prefill, q, k, v, lengths)

    def decode(self, q, k, v, pos):
        return self._by_kind("decode", super().decode, q, k, v, pos)

    def _by_kind(self, step: str, local: Callable, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """The retrieval method's `step` on the protected heads, `local` on the others; heads stay in their order.

        q [B, Hq, ..., D], k and v [B, Hkv, ..., D], none of them rotated: the methods may differ in what they rotate.
        """
        if self.retrieval is None:
            return local(q, k, v, at)
        protected = getattr(self.retrieval, step)
        if not self.n_local:
            return protected(q, k, v, at)
        H, P = self.shape.n_kv_head, self.n_protected
        y = torch.empty_like(q, memory_format=torch.contiguous_format).unflatten(1, (H, -1))
        for run, heads in ((protected, self.order[:P]), (local, self.order[P:])):
            parts = [x.unflatten(1, (H, -1)).index_select(1, heads).flatten(1, 2) for x in (q, k, v)]
            y.index_copy_(1, heads, run(*parts, at).unflatten(1, (len(heads), -1)))
        return y.flatten(1, 2)

    def prefetch(self, q_hat, pos):
        if self.retrieval is not None:
            if self.n_local:
                groups = q_hat.unflatten(1, (self.shape.n_kv_head, -1))
                q_hat = groups.index_select(1, self.order[: self.n_protected]).flatten(1, 2)
            self.retrieval.prefetch(q_hat, pos)

    # ---- the heads that drop tokens: q, k and v are theirs alone, rotated ----

    def compress(self, q, k, v, lengths):
        """Algorithm 1: keep the sinks and the last L_h = max(S_0, N / C) tokens, the mean of the others (Eq. 4)."""
        B, _, S, _ = k.shape
        window = budget_tokens(float(self.args.share), lengths).clamp(min=self.args.window, max=self.ring)
        self.scope[:B] = window
        slots, last, window = torch.arange(self.k.shape[2], device=k.device), lengths[:, None] - 1, window[:, None]
        # the newest position that each slot would hold at the end of each row's prompt
        held = torch.where(slots < self.sinks, slots, last - (last - slots) % window).clamp(0, S - 1)
        self.k[:B], self.v[:B] = gather_rows(k, held[:, None]), gather_rows(v, held[:, None])
        if self.args.compensation:
            n = self.dropped(lengths - 1)[:, None]
            t = torch.arange(S, device=k.device) - self.sinks
            gone = ((t >= 0) & (t < n))[:, None, :, None]
            for mean, x in ((self.mean_k, k), (self.mean_v, v)):
                mean[:B] = torch.where(gone, x, 0).sum(2, dtype=torch.float32) / n.clamp(min=1)[..., None]

    def dropped(self, pos):
        """N_d with the newest token at pos [B]: all but the sinks and the window. Not above 0: none."""
        return pos + 1 - self.sinks - self.scope[: len(pos)]

    def append(self, k, v, pos):
        B = len(pos)
        # a row's ring is its first L_h slots: the new token takes the slot of the one that leaves the window
        slot = torch.where(pos < self.sinks, pos, self.sinks + (pos - self.sinks) % self.scope[:B])
        left_k, left_v = replace_token(self.k, slot, k), replace_token(self.v, slot, v)
        if self.args.compensation:
            n = self.dropped(pos)[:, None, None]
            for mean, left in ((self.mean_k, left_k), (self.mean_v, left_v)):
                moved = mean[:B] + (left.float() - mean[:B]) / n.clamp(min=1)  # Eq. 4, one token more
                mean[:B] = torch.where(n > 0, moved, mean[:B])

    def attend(self, q, idx, count, pos):
        filled = (pos + 1).minimum(self.sinks + self.scope[: len(pos)])
        if not self.args.compensation:
            return packed_attention(q, self.k, self.v, filled)
        n = self.dropped(pos).clamp(min=0)
        return packed_attention(q, self.k, self.v, filled, self.mean_k, self.mean_v, n)  # Eq. 5

    # ---- between steps ----

    def maintain(self, step):
        if self.retrieval is not None:
            self.retrieval.maintain(step)

    def reset(self):
        if self.retrieval is not None:
            self.retrieval.reset()
        if self.n_local:
            self.scope.fill_(self.ring)
            if self.args.compensation:
                self.mean_k.zero_(), self.mean_v.zero_()

    # ---- accounting ----

    def _bytes(self, tokens: int, means: bool) -> int:
        """Of `tokens` per head, the compensation token if `means`, L_h, and the order of the heads."""
        s = self.shape
        head = 2 * s.head_dim * (tokens * s.dtype.itemsize + 4 * means)
        order = 8 * s.n_kv_head if self.n_local and self.n_protected else 0
        return s.max_batch * (self.n_local * head + 8 * bool(self.n_local)) + order

    def card_nbytes(self):
        other = self.retrieval.card_nbytes() if self.retrieval is not None else 0
        return other + self._bytes(self.sinks + self.ring, self.args.compensation)

    def traffic(self, pos):
        """All of `pos` taken as prompt, which sets L_h."""
        window = max(self.args.window, budget_cap(float(self.args.share), pos + 1))
        kept = min(pos + 1, self.sinks + min(window, self.ring))
        other = self.retrieval.traffic(pos) if self.retrieval is not None else 0
        return other + self._bytes(kept, self.args.compensation and kept < pos + 1)


# ---- ALiBi models ----


def alibi_scope(
    wq: Tensor,
    wk: Tensor,
    gamma: Tensor,
    bias: Tensor | None,
    slope: Tensor,
    epsilon: float,
    head_dim: int,
    scale: float = 1.0,
    bound: Literal["paper", "sound"] = "paper",
) -> Tensor:
    """L_h of every head of an ALiBi layer: tokens further back get less than `epsilon` attention (Sec. 3.1, Theorem 1).

    wq [Hq * head_dim, d], wk [Hkv * head_dim, d] as Linear holds them; gamma and bias [d] of the norm before attention
    (None: RMSNorm); slope [Hq] -> fp32 [Hq]. Eq. 1 has no `scale`: give head_dim ** -0.5 where the model divides.
    The projections have no biases. No model of this engine uses ALiBi.

    bound="paper" is Eq. 2, which is no bound. Eq. 7 takes |gamma * x|^2 <= |gamma|^2 for a normalized x, as if no
    channel of it exceeded 1; but |x|^2 = d may stand in the channel of the largest gamma. And the appendix drops the
    query's own logit from the denominator, though it can be as negative as the other one is positive. bound="sound"
    takes d * max(gamma)^2 for |gamma|^2 and the logit twice, and so is longer, for most heads beyond any context.
    """
    if not 0 < epsilon < 1 or slope.min() <= 0:
        raise InputError(f"alibi_scope needs 0 < epsilon < 1 and positive slopes, got {epsilon} and {slope.tolist()}")
    # |W_Q^T W_K|_2 [d, d] is that of R_Q R_K^T [head_dim, head_dim], from the QR of both: orthogonal factors drop out
    rq, rk = (torch.linalg.qr(w.float().unflatten(0, (-1, head_dim)).mT).R for w in (wq, wk))
    rk = rk.repeat_interleave(len(rq) // len(rk), 0)
    norm = scale * torch.linalg.matrix_norm(rq @ rk.mT, 2)  # [Hq]
    offset = bias.float().square().sum() if bias is not None else 0.0
    if bound == "paper":
        logit = 2 * norm * (gamma.float().square().sum() + offset)
    else:
        logit = 2 * 2 * norm * (len(gamma) * gamma.float().abs().max() ** 2 + offset)
    return (logit - math.log(epsilon)) / slope.float()
