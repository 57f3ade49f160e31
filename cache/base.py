"""The contract of a KV-cache method: it owns the storage of one layer's keys and values, and the attention over them.

A method is one file of kv_methods/. The smallest one that works:

    class Mine(KVMethod):
        def __init__(self, args, shape, layer, rope, calib=None):
            super().__init__(args, shape, layer, rope, calib)
            self.k, self.v = self.buffer("k", shape.kv), self.buffer("v", shape.kv)

        def compress(self, q, k, v, lengths): ...    # once per prompt: store
        def append(self, k, v, pos): ...             # one token per row, in place
        def attend(self, q, idx, count, pos): ...    # [B, Hq, D] -> [B, Hq, D]

A prompt is attended to and stored: `prefill` is `attend_prompt` and `store_prompt`, of which the latter is `compress`.
`decode` is one static graph: fixed shapes, no `.item()`, no branch on data, no allocation that outlives the step.
What cannot be so goes into `maintain`, which runs between steps. Two archetypes spare most methods the storage:
`Evicting` (fixed slots, evicting.py) and `Selecting` (all tokens kept, a few attended, selecting.py).

Shapes: B rows, S prompt tokens, T = max_seq_len slots, Hq query heads, Hkv KV heads, g = Hq / Hkv, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from cache.prompt import Prompt, Text
from errors import InputError
from kernels.dense_attention import attend_where, prefill_attention
from kernels.native import in_huge_pages
from kernels.rope import Rope
from kernels.rotate_append import rotate_token
from parallel import ONE, Ranks


@dataclass(frozen=True)
class CacheShape:
    """What a method needs to know to allocate: sizes, dtype and device of one layer's cache."""

    max_batch: int
    max_seq_len: int
    n_head: int
    n_kv_head: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None  # the layer's sliding window, if it is narrower than max_seq_len
    n_layer: int = 1
    max_new_tokens: int | None = None  # how many of max_seq_len are decoded at most; None: not known, perhaps all
    drafts: int = 0  # tokens that may be appended behind the text and taken back, at most
    ranks: Ranks = ONE  # those that share the layer's heads: n_head and n_kv_head are this one's
    all_kv_heads: int = 0  # of all ranks; 0: of this one

    @property
    def layer_heads(self) -> int:
        """KV heads of the layer, on all ranks."""
        return self.all_kv_heads or self.n_kv_head

    @property
    def own_heads(self) -> range:
        """Which of them are here."""
        return self.ranks.heads(self.layer_heads) if self.ranks.size > 1 else range(self.n_kv_head)

    @property
    def kv(self) -> tuple[int, int, int, int]:
        """[B, Hkv, T, D], the shape of a dense K or V."""
        return self.max_batch, self.n_kv_head, self.max_seq_len, self.head_dim

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt: what is not decoded."""
        return self.max_seq_len - (self.max_new_tokens or 0)

    @property
    def max_decoded(self) -> int:
        """Tokens that may be decoded after a prompt."""
        return self.max_seq_len if self.max_new_tokens is None else self.max_new_tokens

    def on(self, device: str | torch.device) -> CacheShape:
        return replace(self, device=torch.device(device))

    def zeros(self, size: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A cache's memory; dtype: by default that of keys and values."""
        return in_huge_pages(torch.empty(size, dtype=dtype or self.dtype, device=self.device)).zero_()


@dataclass
class Attended:
    """What one step of a method attended to, in the clear: how `observe` (trace.py) looks in. N is what is static.

    softmax(q . k / sqrt(D) + log(tokens)) @ v over the N places is the step's output, up to the method's own rounding.
    """

    position: Tensor  # [B, Hkv, N] int64, of the text; -1: a token that stands for several; -2: nothing is here
    q: Tensor  # [B, Hq, D] as it meets k
    k: Tensor  # [B, Hkv, N, D] as attended to: rebuilt, rotated
    v: Tensor  # [B, Hkv, N, D]
    tokens: Tensor | None = None  # [B, Hkv, N] fp32, how many tokens a place stands for, or counts as; None: one

    @classmethod
    def of(cls, q: Tensor, *parts: tuple[Tensor, Tensor, Tensor]) -> Attended:
        """Several stores under one softmax, each as position [B, N] or [B, Hkv, N], k and v [>= B, Hkv, N, D]."""
        B, Hkv = len(q), parts[0][1].shape[1]
        at = [(x if x.dim() == 3 else x[:, None]).expand(B, Hkv, -1) for x, _, _ in parts]
        k, v = (torch.cat([part[i][:B] for part in parts], 2) for i in (1, 2))
        return cls(torch.cat(at, 2), q, k, v)

    def weights(self) -> Tensor:
        """Softmax weights fp32 [B, Hq, N], 0 where nothing is."""
        B, Hkv, N, D = self.k.shape
        there = (self.position != -2)[:, :, None]
        k = torch.where(there.mT, self.k.float(), 0)  # what is not there may be NaN
        logits = self.q.float().view(B, Hkv, -1, D) @ k.mT * D**-0.5
        if self.tokens is not None:
            logits = logits + self.tokens.clamp(min=1e-30).log()[:, :, None]
        return logits.masked_fill(~there, float("-inf")).softmax(-1).flatten(1, 2)

    def output(self) -> Tensor:
        """The attention that follows from it, fp32 [B, Hq, D]."""
        B, Hkv, _, D = self.k.shape
        v = torch.where((self.position != -2)[..., None], self.v.float(), 0)
        return (self.weights().unflatten(1, (Hkv, -1)) @ v).flatten(1, 2)


def knob(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    """A knob of a method's Args: its default and where both come from; --list-methods shows it.

    low and high: the least and the largest number it may be (default: those of LIMITS), checked before `__post_init__`.
    """
    return field(default=default, metadata=dict(help=help, low=low, high=high))


class Storage(nn.Module):
    """What has buffers that count as cache memory: a method, or a part of one (packed.py, whole.py, labels.py)."""

    def __init__(self, shape: CacheShape):
        super().__init__()
        self.shape = shape
        self.constants: set[str] = set()  # buffers that are set once, not by prompts: bases, lists of channels

    def buffer(self, name: str, size: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a buffer of zeros that counts as cache memory."""
        t = self.shape.zeros(size, dtype)
        self.register_buffer(name, t, persistent=False)
        return t

    def constant(
        self, name: str, size: tuple[int, ...], value: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A buffer that holds `value` (of the calibration) for good. Without one it is uninitialized: sizes only."""
        t = self.buffer(name, size, dtype)
        self.constants.add(name)
        if value is not None and t.device.type != "meta":
            assert tuple(value.shape) == tuple(size), f"{name}: {tuple(value.shape)} is not {tuple(size)}"
            t.copy_(value)
        return t

    def layout(self, tokens: int) -> dict[str, Any]:
        """Of buffers in which max_seq_len decides not only how many slots there are, but where `tokens` tokens lie:
        what decides, in JSON. By default none, as where slot = position, or in a ring that only a short context makes
        smaller: a larger cache holds the same in its first slots (snapshot.py)."""
        return {}

    def carry(self, name: str, saved: Tensor, layout: Any, pos: Tensor) -> Tensor | None:
        """A buffer that was saved by another `layout`, as it lies in this one, the newest tokens at pos [B]. None, as
        by default: it cannot be told."""
        return None


class KVMethod(Storage):
    """Base of every method: rotation, exact prefill, and a decode step of append, select, attend."""

    @dataclass
    class Args:
        """Knobs of the method; a subclass lists its own, with default and source."""

    paper: ClassVar[str] = ""  # authors, title, year
    lossless: ClassVar[dict[str, Any]] = {}  # Args at which the method equals dense attention to rounding
    stress: ClassVar[dict[str, Any] | None] = None  # Args under which its limits bind within 40 tokens: tests use them
    pre_rope: bool = False  # True: compress, append, select and attend get q and k before rotation
    supports_window: ClassVar[bool] = False  # honours a model's sliding window
    skip_layers: ClassVar[tuple[int, ...]] = ()  # layers the paper leaves dense, in models of 16 layers or more
    skip_knobs: ClassVar[dict[str, Any] | None] = None  # knobs of this method in those layers; None: `full` is used
    statistics: ClassVar[tuple[Any, ...]] = ()  # what its calibration holds (calibration.py)
    exact_prefill: bool = True  # what a prompt's attention gives does not depend on the method: it is exact
    takes_chunks: bool = True  # a prompt may come in chunks
    joins_heads: bool = False  # decides for all heads of a layer together
    whole_calibration: ClassVar[bool] = False  # of several ranks, too; else that of the rank's heads
    rereads: ClassVar[bool] = False  # a step reads keys to score them, too: `traffic` may be more than is held
    reads_queries: ClassVar[bool] = True  # False: `compress` does not look at q; of chunks it then gets none
    steps_alike: ClassVar[bool] = True  # False: a step or a layer reads more than another, `traffic` is their mean
    prompt: Prompt | None = None  # while one is read in chunks
    verifies: ClassVar[bool] = False  # holds all keys and values as they are: what it drafts can be checked
    rewinds: ClassVar[bool] = False  # a token appended where one was taken back leaves what it alone would
    predicts: bool = False  # the layer before calls `prefetch` with a predicted query
    trace: Any = None  # what `observe` sets: told of every step
    heads: Tensor | None = None  # which KV heads of its layer the method holds; None: all
    output_weights: Callable[[], Tensor] | None = None  # set by a model: W_O by query head of the layer, [Hq, D, dim]

    args: Any
    rope: Rope

    def __init__(self, args: Any, shape: CacheShape, layer: int, rope: Rope, calib: Any = None):
        super().__init__(shape)
        self.args, self.layer, self.calib = args, layer, calib
        object.__setattr__(self, "rope", rope)  # shared by all layers: not this module's to count or move
        if shape.window is not None and not self.supports_window:
            raise InputError(
                f"method {type(self).__name__} cannot honour this model's sliding window of {shape.window} tokens: "
                f"use full or streaming, or keep the context within {shape.window}"
            )

    def connect(self, layers: Sequence[KVMethod]) -> None:
        """Called once, in the order of layers, when those of a whole cache are made: for methods whose layers meet."""

    def shared_part(self, name: str, mates: Sequence[KVMethod], make: Callable[[], nn.Module]) -> None:
        """For `connect`: a part that layers have in common. The first of `mates` makes it, and counts it as its own."""
        if mates[0] is self:
            setattr(self, name, make())
        else:  # as a submodule it would be counted again in every layer
            object.__setattr__(self, name, getattr(mates[0], name))

    @classmethod
    def needs(cls, args: Any) -> tuple[Any, ...]:
        """The statistics needed with these Args. Without a calibration only sizes may be asked (meta device)."""
        return cls.statistics

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """What joins the heads of a layer: x of all ranks that share it, added. With one process x itself."""
        return self.shape.ranks.sum(x)

    def of_all_heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """What KV heads have, this rank's in dimension `dim` -> those of all ranks, in the layer's order."""
        ranks = self.shape.ranks
        if ranks.size == 1:
            return x
        every = ranks.gather(x.movedim(dim, -1))[..., :: ranks.copies(self.shape.layer_heads)]
        return every.movedim(-1, dim)

    # ---- the prompt ----

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, start: int | None = None) -> Tensor:
        """Right-padded prompts: `attend_prompt`, then `store_prompt`.

        q [B, Hq, S, D], k and v [B, Hkv, S, D] before rotation, lengths [B] -> [B, Hq, S, D]. With a start, between
        `begin_prompt` and `end_prompt`: S tokens of longer prompts, from that position on; what is stored waits for
        the last of them.
        """
        q_rot, k_rot = (self.rope.rotate_prompt(x, start or 0) for x in (q, k))
        if start is None:
            y = self.attend_prompt(q_rot, k_rot, v, lengths)
            self.store_prompt(q, k, q_rot, k_rot, v, lengths)
            return y
        assert self.prompt is not None, "begin_prompt comes first"
        self.prompt.put(start, **(dict(q=q) if self.reads_queries else {}), k=k, v=v, k_rot=k_rot)
        return self.attend_prompt(q_rot, self.prompt.k_rot, self.prompt.v, lengths)

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Attention within a prompt, by default exact and causal: q [B, Hq, n, D], the last n tokens of k and v
        [B, Hkv, S, D], all rotated -> [B, Hq, n, D]. A subclass that changes it says exact_prefill = False."""
        return prefill_attention(q, k, v, self.shape.window, lengths)

    def store_prompt(self, q: Tensor, k: Tensor, q_rot: Tensor, k_rot: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Take in whole prompts, q and k before and after rotation: by default `compress` the ones of `pre_rope`."""
        self.compress(*((q, k) if self.pre_rope else (q_rot, k_rot)), v, lengths)

    def compress(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Once per prompt: evict, quantize, build the index. Shapes as in `prefill`; rotated unless `pre_rope`."""
        raise NotImplementedError

    def begin_prompt(self, total: int) -> None:
        """A prompt of `total` tokens, padding included, is about to come in chunks."""
        self.prompt = Prompt(total)

    def end_prompt(self, lengths: Tensor) -> None:
        """All chunks have come, and all texts of a second pass."""
        p, self.prompt = self.prompt, None
        if p is not None:
            q = p.q if self.reads_queries else p.k.new_empty(len(p.k), self.shape.n_head, 0, self.shape.head_dim)
            self.store_prompt(q, p.k, self.rope.rotate_prompt(q), p.k_rot, p.v, lengths)

    # ---- a second pass over the prompt, before it is compressed ----

    def second_pass(self, tokens: Tensor, lengths: Tensor, encode: Callable[[str], list[int]]) -> Sequence[Text]:
        """Texts to be read behind the prompts, tokens [B, S] and lengths [B]: by default none. Those of the first layer
        that asks go through all layers, whose `reread` sees them. encode: of the model's tokenizer; without one it
        gives no tokens."""
        return ()

    def reread(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, text: Text) -> Tensor:
        """Exact attention of a text to `self.prompt` and to itself; a method that asked for it looks at what it wants
        first. q [B, Hq, n, D], k and v [B, Hkv, n, D] rotated -> [B, Hq, n, D]."""
        if self.prompt is None:
            raise InputError(f"{type(self).__name__} holds no prompt that could be read a second time")
        S, n = self.prompt.total, q.shape[2]
        slot, t = torch.arange(S, device=q.device), torch.arange(n, device=q.device)
        before = (slot < lengths[:, None])[:, None].expand(-1, n, S)
        seen = torch.cat((before, (t <= t[:, None]).expand(len(q), n, n)), 2)
        keys, values = torch.cat((self.prompt.k_rot, k), 2), torch.cat((self.prompt.v, v), 2)
        return attend_where(q, keys, values, seen)

    # ---- one token per row ----

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q [B, Hq, D], k and v [B, Hkv, D] before rotation, pos [B] where the token stands -> [B, Hq, D]."""
        q = self.rotate_append(q, k, v, pos)
        idx, count = self.select(q, pos)
        if self.trace is not None:
            self.trace.step(self, self.attended(q, idx, count, pos), pos)
        return self.attend(q, idx, count, pos)

    def rotate_append(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Rotate q and k, unless `pre_rope`, and `append` -> q as `select` and `attend` get it."""
        if not self.pre_rope:
            q, k = rotate_token(self.rope, q, k, pos)
        self.append(k, v, pos)
        return q

    def append(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store one token per row, in place; a slot need not equal the position."""
        raise NotImplementedError

    def select(self, q: Tensor, pos: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What to attend to: idx [B, Hkv or 1, K] int, K fixed, of which the first count [B, Hkv or 1]; None: all."""
        return None, None

    def attend(self, q: Tensor, idx: Tensor | None, count: Tensor | None, pos: Tensor) -> Tensor:
        """Attention of q [B, Hq, D] over the selection -> [B, Hq, D]."""
        raise NotImplementedError

    def attended(self, q: Tensor, idx: Tensor | None, count: Tensor | None, pos: Tensor) -> Attended:
        """What `attend` will attend to, in the clear; for `observe`, in eager mode: it may allocate what it likes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it attends to")

    # ---- several tokens per row, to check what was drafted ----

    def verify(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Exact attention of n tokens a row from pos [B] on, causal among themselves, which are appended in place of
        what was drafted there: q [B, Hq, n, D], k and v [B, Hkv, n, D] before rotation -> [B, Hq, n, D]."""
        raise NotImplementedError(f"{type(self).__name__} does not hold all keys and values")

    def rewind(self, pos: Tensor, end: Tensor) -> None:
        """Tokens from pos [B] up to end [B] are no longer part of the text. Their slots may stay as they are: what is
        appended next replaces them. For methods that sum up what was appended."""

    @property
    def takes_back(self) -> bool:
        """Whether `rewind` does something."""
        return type(self).rewind is not KVMethod.rewind

    def prefetch(self, q_hat: Tensor, pos: Tensor) -> None:
        """Called before the previous layer's decode, if `predicts`, with the query that this layer is likely to see.

        q_hat [B, Hq, D] before rotation, from the previous layer's input through this layer's norm and query weights.
        """

    @property
    def in_step(self) -> bool:
        """Whether all rows must have decoded equally many tokens."""
        return type(self).maintain is not KVMethod.maintain

    def maintain(self, step: int) -> None:
        """Between steps, outside the graph; `step` tokens have been decoded since the prompt."""

    def reset(self) -> None:
        """Empty the cache, same buffers. Slots that were not written are never read: often nothing to do."""

    # ---- accounting ----

    def nbytes(self) -> dict[str, int]:
        """Bytes of every buffer as allocated; works on the meta device."""
        return {name: b.numel() * b.element_size() for name, b in self.named_buffers(recurse=True)}

    card_nbytes: ClassVar[Any] = None  # a method of no arguments, where the paper states a formula: the bytes by it

    def traffic(self, pos: int) -> int:
        """Bytes of cache that one decode step reads, all rows at position `pos`; by default all of them."""
        return sum(self.nbytes().values())


def connected(layers: Iterable[KVMethod]) -> list[KVMethod]:
    """The methods of a cache's layers, each of which has met the others; a layer that is made alone meets itself."""
    out = list(layers)
    for method in out:
        method.connect(out)
    return out
