"""A cache of fixed slots: a subclass scores the prompt's tokens, and each new token evicts the one of the lowest score.

    class Mine(Evicting):
        def prompt_scores(self, q, k, v, mass, lengths):    # mass [B, Hkv, S]: attention of the prompt's last queries
            return mass

        def observe(self, weights):                # [B, Hkv, N], attention of this step; leave it out to freeze scores
            self.score[: len(weights)] += weights

        def token_score(self, k):                  # of keys alone, also of each new token; by default new tokens have 0
            return -k.float().norm(dim=-1)

Neither a prompt nor a step computes the attention weights twice; lookback = 0 needs none of the prompt. With evicts =
False decoded tokens stay and only the prompt is compressed, once. With evicts_while_reading = True a prompt in chunks
is evicted from after each chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cache.base import Attended, KVMethod, knob, rows
from cache.budget import budget_tokens, check_budget, min_tokens
from kernels.dense_attention import attend_where, decode_attention
from kernels.evict_append import evict_append
from kernels.gather_attention import gather_attention, gather_rows
from kernels.observed_attention import last_mass, observed_attention, prefill_attention_mass
from kernels.prompt_scores import best_tokens, newest_first
from runtime.errors import InputError


class Evicting(KVMethod):
    lossless = dict(budget=1.0)
    stress = dict(budget=24, recent=8)
    lookback: int | None = 32  # how many of the prompt's last queries give `mass`; None: all; 0: none
    group: Literal["sum", "max"] = "sum"  # how `mass` reduces over a group's query heads
    scores_pre_rope: ClassVar[bool] = False  # True: `prompt_scores` gets q and k before rotation
    evicts: ClassVar[bool] = True  # False: only prompts lose tokens; decoded tokens fill the `decode_slots`
    evicts_while_reading: ClassVar[bool] = False  # True: a prompt's chunk attends to the kept tokens of earlier chunks
    layout = KVMethod.first_slots

    k: Tensor  # [B, Hkv, N, D] rotated, in any order
    v: Tensor
    score: Tensor  # fp32 [B, Hkv, N]: the lowest is evicted; only if `evicts`
    place: Tensor  # int32 [B, Hkv, N]: positions in the text
    filled: Tensor  # int64 [B]: slots in use, the first ones

    @dataclass
    class Args:
        budget: int | float = knob(0.25, "tokens kept, or their share of the length; recent included")
        recent: int = knob(32, "newest tokens, never evicted", low=1)
        min_tokens: int = min_tokens()

        def __post_init__(self):
            check_budget(self.budget)
            if isinstance(self.budget, int) and self.budget < self.forced:
                sinks = f"{self.forced - self.recent} sinks and " if self.forced > self.recent else ""
                raise InputError(
                    f"the budget of {self.budget} tokens is smaller than its {sinks}{self.recent} recent ones"
                )

        @property
        def forced(self) -> int:
            """Tokens that stay whatever their scores: the recent ones, and sinks if the method has them."""
            return self.recent + getattr(self, "sinks", 0)

    # ---- what a subclass defines ----

    def prompt_scores(self, q: Tensor, k: Tensor, v: Tensor, mass: Tensor, lengths: Tensor) -> Tensor:
        """How much each token of the prompts, of lengths [B], is worth -> scores [B, Hkv or 1, S].

        q [B, Hq, n, D] of the last n of S tokens, k and v [B, Hkv, S, D]. mass fp32 [B, Hkv, S] is the attention that
        the last `lookback` queries pay to each token, reduced over heads by `group`; it is empty if lookback is 0.
        While reading in chunks, the S tokens are those kept so far, in any order, followed by those of the chunk.
        """
        return mass

    def token_score(self, k: Tensor) -> Tensor | None:
        """The score with which a new token is stored: k [B, Hkv, D] rotated -> [B, Hkv]; None: 0."""
        return None

    # optional method (self, weights): weights fp32 [B, Hkv, N] of a step, summed over the group; updates self.score
    observe: ClassVar[Any] = None

    def recent(self, length: Tensor) -> Tensor:
        """The number of newest tokens that are never evicted, at lengths [B] -> [B] int64."""
        return budget_tokens(self.args.recent, length)

    def num_kept(self, length: Tensor) -> Tensor:
        """The most tokens a row keeps, not counting `decode_slots`: lengths [B] -> [B] int64, at most the length.

        A layer may have a budget of its own, by self.layer of self.shape.n_layer.
        """
        return budget_tokens(self.args.budget, length, self.args.min_tokens).maximum(self.recent(length))

    def max_kept(self, n: int) -> int:
        """The largest `num_kept` of all lengths up to n."""
        return max(self.all_kept(n))

    def all_kept(self, n: int) -> list[int]:
        """`num_kept` at all lengths up to n."""
        return self.num_kept(torch.arange(1, n + 1)).tolist()

    def decode_slots(self) -> int:
        """Extra slots for decoded tokens beside the budget; nothing is evicted before they are full."""
        return 0

    # ---- storage ----

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        B, H, T, D = shape.kv
        kept = self.all_kept(T)
        self.alike = *self.alike, hash(tuple(kept))  # for `once_a_step`, as layers may have budgets of their own
        N = min(T, max(kept) + self.decode_slots())
        self.buffer("k", (B, H, N, D)), self.buffer("v", (B, H, N, D))
        if self.evicts:
            self.buffer("score", (B, H, N), torch.float32)
        self.buffer("place", (B, H, N), torch.int32)
        self.buffer("filled", (B,), torch.int64)

    def prefill(self, q, k, v, lengths, start=None):
        if start is not None and self.evicts_while_reading:
            return self._read(self.rope.rotate_prompt(q, start), self.rope.rotate_prompt(k, start), v, lengths, start)
        if start is not None or self.lookback is not None or type(self).attend_prompt is not KVMethod.attend_prompt:
            return super().prefill(q, k, v, lengths, start)
        q_rot, k_rot = self.rope.rotate_prompt(q), self.rope.rotate_prompt(k)
        y, mass = prefill_attention_mass(q_rot, k_rot, v, lengths, None)
        q, k = (q, k) if self.scores_pre_rope else (q_rot, k_rot)
        self.keep(k_rot, v, self.prompt_scores(q, k, v, mass, lengths), lengths)
        return y

    def store_prompt(self, q, k, q_rot, k_rot, v, lengths):
        if self.lookback is None:
            mass = prefill_attention_mass(q_rot, k_rot, v, lengths, None)[1]
        elif self.lookback:
            mass = last_mass(q_rot, k_rot, lengths, self.lookback, group=self.group)
        else:
            mass = k.new_empty(0)
        q, k = (q, k) if self.scores_pre_rope else (q_rot, k_rot)
        self.keep(k_rot, v, self.prompt_scores(q, k, v, mass, lengths), lengths)

    def compress(self, q, k, v, lengths):
        self.store_prompt(q, k, q, k, v, lengths)

    def keep(self, k, v, scores, lengths, place=None, read=None):
        """Store the newest tokens and, of the others, those of the highest scores [B, Hkv or 1, S].

        k (rotated) and v [B, Hkv, S, D] hold lengths [B] tokens. place [B, Hkv, S] are their positions in a text of
        which read [B] tokens have come; by default they are the whole text."""
        (B, H, S, _), t = k.shape, torch.arange(k.shape[2], device=k.device)
        read = lengths if read is None else read
        newest = (t if place is None else place) >= (read - self.recent(read)).view(B, 1, 1)
        outside = t >= lengths.view(B, 1, 1)
        rank = newest_first(scores.expand(B, H, S), newest).masked_fill(outside, float("-inf"))
        chosen = best_tokens(rank, self.k.shape[2])
        n = chosen.shape[2]
        self.k[:B, :, :n], self.v[:B, :, :n] = gather_rows(k, chosen), gather_rows(v, chosen)
        self.place[:B, :, :n] = (chosen if place is None else place.gather(2, chosen)).int()
        if self.evicts:
            self.score[:B, :, :n] = scores.expand(B, H, S).gather(2, chosen)
        self.filled[:B] = self.num_kept(read).minimum(lengths)

    # ---- a prompt in chunks, of which only the kept tokens are stored ----

    def begin_prompt(self, total):
        if not self.evicts_while_reading:
            return super().begin_prompt(total)
        if self.scores_pre_rope:
            raise InputError(
                f"{type(self).__name__} keeps rotated keys and cannot score them while reading: leave out "
                "--prefill-chunk"
            )
        self.filled.zero_()

    def _read(self, q, k, v, lengths, start):
        """Read a chunk, q [B, Hq, n, D], k and v [B, Hkv, n, D], rotated: it attends to the kept tokens and to itself;
        then the tokens of the lowest scores among both are evicted."""
        (B, H, n, D), N, device = k.shape, self.k.shape[2], k.device
        new = (lengths - start).clamp(0, n)
        slot, t = torch.arange(N, device=device), torch.arange(n, device=device)
        there = torch.cat((slot < self.filled[:B, None], t < new[:, None]), 1)  # [B, N + n]
        keys, values = (torch.cat((kept[:B], x), 2).masked_fill(~there[:, None, :, None], 0)
                        for kept, x in ((self.k, k), (self.v, v)))  # fmt: skip
        causal = torch.cat((torch.ones(n, N, dtype=torch.bool, device=device), t <= t[:, None]), 1)
        seen = there[:, None] & causal  # [B, n, N + n]
        y = attend_where(q, keys, values, seen)
        at = torch.cat((self.place[:B].long(), (start + t).expand(B, H, n)), 2)
        # valid tokens first: the kept ones, then those of the chunk
        order = (~there).int().sort(dim=1, stable=True).indices[:, None].expand(B, H, -1)
        keys, values, at = gather_rows(keys, order), gather_rows(values, order), at.gather(2, order)
        mass = k.new_empty(0)
        if self.lookback != 0:
            last = n if self.lookback is None else self.lookback
            counts = (t < new[:, None]) & (t >= new[:, None] - last)  # [B, n]
            logits = q.unflatten(1, (H, -1)).float() @ keys.float().mT[:, :, None] * D**-0.5
            seen = seen.gather(2, order[:, :1].expand(B, n, -1))[:, None, None]
            weights = logits.masked_fill(~seen, float("-inf")).softmax(-1) * counts[:, None, None, :, None]
            mass = weights.sum(3).sum(2) if self.group == "sum" else weights.sum(3).amax(2)
        stored, read, ended = self.filled[:B] + new, lengths.clamp(max=start + n), (new == 0).nonzero().flatten()
        before = [(b, b[ended]) for b in self.buffers() if len(b) == self.shape.max_batch]
        self.keep(keys, values, self.prompt_scores(q, keys, values, mass, stored), stored, at, read)
        for buffer, old in before:  # prompts that ended before this chunk stay as they are
            buffer[ended] = old
        return y

    # ---- one token per row ----

    def append(self, k, v, pos):
        """Store the token in the next free slot or, if the row is full, in place of the token of the lowest score."""
        slots = self.k, self.v, self.place, self.filled
        if not self.evicts:  # all slots may fill, even where a longer prompt would keep fewer tokens
            return evict_append(k, v, pos, *slots)
        N = self.k.shape[2]
        most = self.once_a_step(pos, "most", lambda: (self.num_kept(pos + 1) + self.decode_slots()).clamp(max=N))
        since = self.once_a_step(pos, "since", lambda: pos - self.recent(pos + 1))
        evict_append(k, v, pos, *slots, self.score, most, since, self.token_score(k))

    def attend(self, q, idx, count, pos):
        """Attend to all slots, or to those that a subclass's `select` returns."""
        filled = rows(self.filled, len(q))
        if idx is not None:
            return gather_attention(q, self.k, self.v, idx, count)
        if self.observe is None:
            return decode_attention(q, self.k, self.v, None, filled)
        y, weights = observed_attention(q, self.k, self.v, filled)
        self.observe(weights)
        return y

    def attended(self, q, idx, count, pos):
        B, slot = len(q), torch.arange(self.k.shape[2], device=q.device)
        there = (slot < self.filled[:B, None])[:, None]
        if idx is not None:
            chosen = torch.zeros_like(self.place[:B], dtype=torch.bool)
            given = torch.arange(idx.shape[2], device=q.device) < count[..., None]
            at = torch.where(given, idx, idx[..., :1]).expand(B, chosen.shape[1], -1)
            there = there & chosen.scatter(2, at, True)
        return Attended(torch.where(there, self.place[:B].long(), -2), q, self.k[:B], self.v[:B])

    def room(self):
        whole = self.evicts or self.k.shape[2] == self.shape.max_seq_len
        return self.shape.max_decoded if whole else self.decode_slots()

    @classmethod
    def room_if_unknown(cls, args):
        return getattr(args, "decode_slots", None)

    def maintain(self, step):
        if step > self.room():
            raise InputError(
                f"{type(self).__name__}: after {step} decoded tokens their {self.decode_slots()} slots are full: set "
                "the cache up with max_new_tokens, or give more decode_slots"
            )

    def reset(self):
        self.filled.zero_()

    def traffic(self, pos):
        """Counts all of `pos` as prompt; tokens in `decode_slots` come on top."""
        s, tokens = self.shape, int(self.num_kept(torch.tensor([pos + 1])))
        ranks = 8 if self.evicts else 0  # score and place
        return s.max_batch * (s.n_kv_head * tokens * (2 * s.head_dim * s.dtype.itemsize + ranks) + 8)
