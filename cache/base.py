"""The contract of a KV-cache method, which owns the storage of one layer's keys and values and the attention over them.

A method is one file of kv_methods/. The smallest working one:

    class Mine(KVMethod):
        def __init__(self, args, shape, layer, rope, calib=None):
            super().__init__(args, shape, layer, rope, calib)
            self.k, self.v = self.buffer("k", shape.kv), self.buffer("v", shape.kv)

        def compress(self, q, k, v, lengths): ...    # once per prompt: store
        def append(self, k, v, pos): ...             # one token per row, in place
        def attend(self, q, idx, count, pos): ...    # [B, Hq, D] -> [B, Hq, D]

`prefill` is `attend_prompt` followed by `store_prompt`, which by default calls `compress`. `decode` is a static graph:
fixed shapes, no `.item()`, no branch on data, no allocation that outlives the step. Work that cannot be written so goes
into `maintain`, which runs between steps. Two archetypes provide the storage for most methods: `Evicting` (fixed slots,
evicting.py) and `Selecting` (keeps all tokens, attends to a few, selecting.py).

Shapes: B rows, S prompt tokens, T = max_seq_len slots, Hq query heads, Hkv KV heads, g = Hq / Hkv, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from cache.prompt import Prompt, Text
from kernels.dense_attention import attend_where, prefill_attention
from kernels.native import in_huge_pages
from kernels.rope import Rope
from kernels.rotate_append import rotate_token, scale_heads
from runtime.errors import InputError
from runtime.parallel import ONE, Ranks


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
    slides: int | None = None  # the layer's sliding window, by the model
    n_layer: int = 1
    max_new_tokens: int | None = None  # the most tokens of max_seq_len that are decoded; None: unknown, perhaps all
    drafts: int = 0  # the most tokens that may be appended behind the text and taken back
    ranks: Ranks = ONE  # the processes that share the layer's heads; n_head and n_kv_head are those of this rank
    all_kv_heads: int = 0  # KV heads of the layer on all ranks; 0: as many as on this one

    @property
    def window(self) -> int | None:
        """The layer's sliding window, if it is narrower than max_seq_len. What a text becomes must not depend on it."""
        return self.slides if self.slides and self.slides < self.max_seq_len else None

    @property
    def layer_heads(self) -> int:
        """KV heads of the layer, on all ranks."""
        return self.all_kv_heads or self.n_kv_head

    @property
    def own_heads(self) -> range:
        """Which of the layer's KV heads this rank holds."""
        return self.ranks.heads(self.layer_heads) if self.ranks.size > 1 else range(self.n_kv_head)

    @property
    def kv(self) -> tuple[int, int, int, int]:
        """[B, Hkv, T, D], the shape of a dense K or V."""
        return self.max_batch, self.n_kv_head, self.max_seq_len, self.head_dim

    @property
    def max_prompt(self) -> int:
        """The longest prompt in tokens: all that are not reserved for decoding."""
        return self.max_seq_len - (self.max_new_tokens or 0)

    @property
    def max_decoded(self) -> int:
        """The most tokens that may be decoded after a prompt."""
        return self.max_seq_len if self.max_new_tokens is None else self.max_new_tokens

    def on(self, device: str | torch.device) -> CacheShape:
        return replace(self, device=torch.device(device))

    def zeros(self, size: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Zeroed cache memory; dtype: by default that of keys and values."""
        return in_huge_pages(torch.empty(size, dtype=dtype or self.dtype, device=self.device)).zero_()


class OncePerStep:
    """What is the same in all layers of a step, such as how many tokens a budget allows at this length, is computed by
    the first that asks. Within `with`, which surrounds a step; elsewhere, and in a graph that was compiled without it,
    each time."""

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Tensor, Tensor]] | None = None

    def __enter__(self) -> OncePerStep:
        self.made = {}
        return self

    def __exit__(self, *error: Any) -> None:
        self.made = None

    def __call__(self, pos: Tensor, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, whose result nobody may write to. key: what it depends on beside pos [B]; of that counts the tensor
        itself, as a check of drafts appends at several positions within a step."""
        if self.made is None:
            return make()
        known = self.made.get(key)
        if known is None or known[0] is not pos:
            known = self.made[key] = pos, make()
        return known[1]


@dataclass
class Attended:
    """What one step of a method attended to, dequantized, as `observe` (trace.py) sees it. N is fixed.

    The step's output is softmax(q . k / sqrt(D) + log(tokens)) @ v over the N slots, up to the method's own rounding.
    """

    position: Tensor  # [B, Hkv, N] int64, in the text; -1: not one known position; -2: an empty slot
    q: Tensor  # [B, Hq, D] in the same basis and rotation as k
    k: Tensor  # [B, Hkv, N, D] as attended to: reconstructed and rotated
    v: Tensor  # [B, Hkv, N, D]
    tokens: Tensor | None = None  # [B, Hkv, N] fp32, the number of tokens a slot counts as; None: one each

    @classmethod
    def of(cls, q: Tensor, *parts: tuple[Tensor, Tensor, Tensor]) -> Attended:
        """Join several stores under one softmax, each given as position [B, N] or [B, Hkv, N], k and v [>= B, Hkv, N,
        D]."""
        B, Hkv = len(q), parts[0][1].shape[1]
        at = [(x if x.dim() == 3 else x[:, None]).expand(B, Hkv, -1) for x, _, _ in parts]
        k, v = (torch.cat([part[i][:B] for part in parts], 2) for i in (1, 2))
        return cls(torch.cat(at, 2), q, k, v)

    def weights(self) -> Tensor:
        """Softmax weights fp32 [B, Hq, N], 0 for empty slots."""
        B, Hkv, N, D = self.k.shape
        there = (self.position != -2)[:, :, None]
        k = torch.where(there.mT, self.k.float(), 0)  # empty slots may hold NaN
        logits = self.q.float().view(B, Hkv, -1, D) @ k.mT * D**-0.5
        if self.tokens is not None:
            logits = logits + self.tokens.clamp(min=1e-30).log()[:, :, None]
        return logits.masked_fill(~there, float("-inf")).softmax(-1).flatten(1, 2)

    def output(self) -> Tensor:
        """The attention output that these weights give, fp32 [B, Hq, D]."""
        B, Hkv, _, D = self.k.shape
        v = torch.where((self.position != -2)[..., None], self.v.float(), 0)
        return (self.weights().unflatten(1, (Hkv, -1)) @ v).flatten(1, 2)


def knob(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    """A knob of a method's Args: its default and a help text that names the source; --list-methods shows both.

    low and high: the smallest and largest value allowed (default: those of LIMITS), checked before `__post_init__`.
    """
    return field(default=default, metadata=dict(help=help, low=low, high=high))


class Storage(nn.Module):
    """A module whose buffers count as cache memory: a method, or a part of one (packed.py, labels.py)."""

    def __init__(self, shape: CacheShape):
        super().__init__()
        self.shape = shape
        self.constants: set[str] = set()  # buffers set once and not by prompts, such as bases and lists of channels

    def buffer(self, name: str, size: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a buffer of zeros that counts as cache memory."""
        t = self.shape.zeros(size, dtype)
        self.register_buffer(name, t, persistent=False)
        return t

    def constant(
        self, name: str, size: tuple[int, ...], value: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Allocate a buffer that permanently holds `value`, taken from the calibration. value=None leaves it unset, for
        sizes only."""
        t = self.buffer(name, size, dtype)
        self.constants.add(name)
        if value is not None and t.device.type != "meta":
            assert tuple(value.shape) == tuple(size), f"{name}: {tuple(value.shape)} is not {tuple(size)}"
            t.copy_(value)
        return t

    def layout(self, tokens: int) -> dict[str, Any] | None:
        """Buffer name -> the size, in JSON, that decides in which slots `tokens` tokens lie, for buffers in which
        max_seq_len changes that. None, the default, does not say it: a cache with such buffers cannot be saved
        (engine/snapshot.py). The archetypes say it; a subclass that stores tokens elsewhere says so itself."""
        return None

    def first_slots(self, tokens: int) -> dict[str, Any]:
        """A `layout` for stores in which max_seq_len changes no slot: slot = position, or a ring that only short
        contexts make smaller. A larger cache then holds the same tokens in its first slots."""
        return {}

    def carry(self, name: str, saved: Mapping[str, Tensor], layout: Any, pos: Tensor) -> Tensor | None:
        """Convert buffer `name` of `saved`, the module's buffers under another `layout`, to this one, with the newest
        tokens at pos [B]. layout None: the file says none. Returns None, the default, if that is not possible."""
        return None


class KVMethod(Storage):
    """Base of every method: rotation, exact prefill, and a decode step of `append`, `select` and `attend`."""

    @dataclass
    class Args:
        """Knobs of the method. A subclass lists its own, each with default and source."""

    # Who it is, and what the contract checks (scripts/contract): knobs, and deviations that it has to know of
    paper: ClassVar[str] = ""  # authors, title, year
    lossless: ClassVar[dict[str, Any]] = {}  # Args at which the method equals dense attention to rounding
    stress: ClassVar[dict[str, Any] | None] = None  # Args at which its limits bind within 40 tokens
    deviates: frozenset[str] = frozenset()  # of "rereads": a step also reads keys to score them, or `maintain` reads
    # what is stored, so `traffic` may exceed the allocated bytes; "unequal steps": steps or layers read unequal
    # amounts, and `traffic` is their mean; "weighs queries": bases weigh queries against keys, so another scale of
    # both is another cache; "copies": a step copies the keys and values that it reads

    # Which layers it gets, and what for
    supports_window: ClassVar[bool] = False  # whether it honours a model's sliding window
    skip_layers: ClassVar[tuple[int, ...]] = ()  # layers the paper leaves dense, in models of 16 layers or more
    skip_knobs: ClassVar[dict[str, Any] | None] = None  # knobs of this method in those layers; None: `full` is used
    statistics: ClassVar[tuple[Any, ...]] = ()  # what its calibration must hold (calibration.py)

    # The prompt
    pre_rope: bool = False  # True: compress, append, select and attend get q and k before rotation
    units: ClassVar[str] = ""  # "k", "v" or "kv": compress, append and attend get these divided by `unit_of`
    exact_prefill: bool = True  # attention within a prompt is exact, whatever the method
    takes_chunks: bool = True  # a prompt may come in chunks
    reads_queries: ClassVar[bool] = True  # False: `compress` does not use q and gets none for a prompt in chunks
    prompt: Prompt | None = None  # the prompt that is being read in chunks

    # Drafts (engine/speculation.py), and queries predicted a layer ahead
    verifies: ClassVar[bool] = False  # keeps all keys and values in full precision, so that its drafts can be verified
    rewinds: ClassVar[bool] = False  # appending where a token was taken back leaves no trace of that token
    predicts: bool = False  # the previous layer calls `prefetch` with a predicted query

    # Heads, of several ranks too
    joins_heads: bool = False  # one decision covers all heads of a layer
    whole_calibration: ClassVar[bool] = False  # every rank needs that of all heads; else only that of its own heads
    heads: Tensor | None = None  # which KV heads of its layer the method holds; None: all
    output_weights: Callable[[], Tensor] | None = None  # set by the model: W_O by query head, [Hq, D, dim]

    once: OncePerStep = OncePerStep()  # set by the model: shared by all layers of a cache
    trace: Any = None  # set by `observe`: called with every step's attention
    noted: Tensor  # int64 [B, 2]: tokens read, and tokens there, summed over lists and steps (`note_read`)
    args: Any
    rope: Rope
    k_unit: Tensor  # [B, Hkv, 1], powers of two, 1 for keys of usual size
    v_unit: Tensor

    def __init__(self, args: Any, shape: CacheShape, layer: int, rope: Rope, calib: Any = None):
        super().__init__(shape)
        self.args, self.layer, self.calib = args, layer, calib
        # layers with the same compute the same of positions
        self.alike: tuple[Any, ...] = type(self), repr(args), shape.slides
        object.__setattr__(self, "rope", rope)  # shared by all layers: this module neither counts nor moves it
        if shape.window is not None and not self.supports_window:
            raise InputError(
                f"method {type(self).__name__} cannot honour this model's sliding window of {shape.window} tokens: "
                f"use full or streaming, or keep the context within {shape.window}"
            )
        for x in self.units:
            self.buffer(f"{x}_unit", (shape.max_batch, shape.n_kv_head, 1)).fill_(1)

    def connect(self, layers: Sequence[KVMethod]) -> None:
        """Called once per layer, in order, when all layers of a cache exist: for methods whose layers share state."""

    def shared_part(self, name: str, mates: Sequence[KVMethod], make: Callable[[], nn.Module]) -> None:
        """For `connect`: a part that several layers share. The first of `mates` makes it and counts its bytes."""
        if mates[0] is self:
            setattr(self, name, make())
        else:  # as a submodule it would be counted again in every layer
            object.__setattr__(self, name, getattr(mates[0], name))

    @classmethod
    def needs(cls, args: Any) -> tuple[Any, ...]:
        """The calibration statistics needed with these Args. Without them only sizes are available (meta device)."""
        return cls.statistics

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks that share the layer's heads; with one process, x itself."""
        return self.shape.ranks.sum(x)

    def of_all_heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather over ranks: x with this rank's KV heads in dimension `dim` -> those of all ranks, in layer order."""
        ranks = self.shape.ranks
        if ranks.size == 1:
            return x
        every = ranks.gather(x.movedim(dim, -1))[..., :: ranks.copies(self.shape.layer_heads)]
        return every.movedim(-1, dim)

    # ---- the prompt ----

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, start: int | None = None) -> Tensor:
        """Attend within right-padded prompts, then store them: `attend_prompt` and `store_prompt`.

        q [B, Hq, S, D], k and v [B, Hkv, S, D] before rotation, lengths [B] -> [B, Hq, S, D]. With `start`, called
        between `begin_prompt` and `end_prompt`, these are the S tokens of longer prompts from that position on;
        `store_prompt` then waits for the last chunk.
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
        """Attention within a prompt, by default exact and causal: q [B, Hq, n, D] of the last n tokens of k and v
        [B, Hkv, S, D], all rotated -> [B, Hq, n, D]. A subclass that approximates it sets exact_prefill = False."""
        return prefill_attention(q, k, v, self.shape.window, lengths)

    def store_prompt(self, q: Tensor, k: Tensor, q_rot: Tensor, k_rot: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Store whole prompts, with q and k before and after rotation. By default calls `compress` with those that
        `pre_rope` asks for."""
        q, k = (q, k) if self.pre_rope else (q_rot, k_rot)
        for name, x in (("k", k), ("v", v)):
            if name in self.units:
                self.get_buffer(f"{name}_unit")[: len(x)] = unit_of(x, lengths)
        self.compress(self.query_in_units(q), *self.kv_in_units(k, v), lengths)

    def compress(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Evict, quantize or index, once per prompt. Shapes as in `prefill`; rotated unless `pre_rope`."""
        raise NotImplementedError

    def begin_prompt(self, total: int) -> None:
        """Called before a prompt of `total` tokens, padding included, comes in chunks."""
        self.prompt = Prompt(total)

    def end_prompt(self, lengths: Tensor) -> None:
        """Called after all chunks of a prompt and all texts of a second pass."""
        p, self.prompt = self.prompt, None
        if p is not None:
            q = p.q if self.reads_queries else p.k.new_empty(len(p.k), self.shape.n_head, 0, self.shape.head_dim)
            self.store_prompt(q, p.k, self.rope.rotate_prompt(q), p.k_rot, p.v, lengths)

    # ---- units: scales and norms that a method stores in fp16 stay in its range, whatever the size of keys and values

    def kv_in_units(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [B, Hkv, ..., D] divided by their units."""
        k = scale_heads(k, self.k_unit, True) if "k" in self.units else k
        return k, scale_heads(v, self.v_unit, True) if "v" in self.units else v

    def query_in_units(self, q: Tensor) -> Tensor:
        """q [B, Hq, ..., D] times the unit of its keys: products with these stay as they are."""
        return scale_heads(q, self.k_unit) if "k" in self.units else q

    def out_of_units(self, y: Tensor) -> Tensor:
        """Attention outputs y [B, Hq, ..., D] times the unit of their values."""
        return scale_heads(y, self.v_unit) if "v" in self.units else y

    @property
    def unit_nbytes(self) -> int:
        return len(self.units) * self.shape.max_batch * self.shape.n_kv_head * self.shape.dtype.itemsize

    # ---- a second pass over the prompt, before it is compressed ----

    def second_pass(self, tokens: Tensor, lengths: Tensor, encode: Callable[[str], list[int]]) -> Sequence[Text]:
        """Texts to read behind the prompts, tokens [B, S] and lengths [B]; by default none. They go through all layers
        and reach their `reread`; layers must not ask for different ones. encode: the tokenizer's; without a tokenizer
        it returns no tokens."""
        return ()

    def reread(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, text: Text) -> Tensor:
        """Exact attention of a text to `self.prompt` and to itself. A method that asked for the text overrides this to
        look at it first. q [B, Hq, n, D], k and v [B, Hkv, n, D] rotated -> [B, Hq, n, D]."""
        if self.prompt is None:
            raise InputError(f"{type(self).__name__} has no prompt to read a second time")
        S, n = self.prompt.total, q.shape[2]
        slot, t = torch.arange(S, device=q.device), torch.arange(n, device=q.device)
        before = (slot < lengths[:, None])[:, None].expand(-1, n, S)
        own = (t <= t[:, None]).expand(len(q), n, n)
        if w := self.shape.slides:
            before, own = before & (slot > (lengths[:, None] + t - w)[..., None]), own & (t > t[:, None] - w)
        seen = torch.cat((before, own), 2)
        keys, values = torch.cat((self.prompt.k_rot, k), 2), torch.cat((self.prompt.v, v), 2)
        return attend_where(q, keys, values, seen)

    # ---- one token per row ----

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """One decode step: q [B, Hq, D], k and v [B, Hkv, D] before rotation, at positions pos [B] -> [B, Hq, D]."""
        q = self.rotate_append(q, k, v, pos)
        idx, count = self.select(q, pos)
        if self.trace is not None:
            self.trace.step(self, self.attended(q, idx, count, pos), pos)
        return self.out_of_units(self.attend(q, idx, count, pos))

    def rotate_append(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Rotate q and k, unless `pre_rope`, and append k and v -> q for `select` and `attend`."""
        if not self.pre_rope:
            q, k = rotate_token(q, k, self.rope.cos, self.rope.sin, pos)
        self.append(*self.kv_in_units(k, v), pos)
        return self.query_in_units(q)

    def once_a_step(self, pos: Tensor, name: str, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, which depends on pos [B], the prompts' lengths and this method's knobs and window alone: in an
        eager step one layer computes it for all that have the same."""
        return self.once(pos, (name, self.alike), make)

    def append(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store one token per row in place. Its slot need not equal its position."""
        raise NotImplementedError

    def select(self, q: Tensor, pos: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Slots to attend to: the first count [B, Hkv or 1] of idx [B, Hkv or 1, K] int, K fixed. None: all slots."""
        return None, None

    def attend(self, q: Tensor, idx: Tensor | None, count: Tensor | None, pos: Tensor) -> Tensor:
        """Attention of q [B, Hq, D] over the selection -> [B, Hq, D]."""
        raise NotImplementedError

    def attended(self, q: Tensor, idx: Tensor | None, count: Tensor | None, pos: Tensor) -> Attended:
        """What `attend` will attend to, dequantized. `observe` calls it in eager mode, so it may allocate freely."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it attends to")

    # ---- several tokens per row, to check what was drafted ----

    def verify(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Exact, causal attention of n tokens per row from pos [B] on: q [B, Hq, n, D], k and v [B, Hkv, n, D] before
        rotation -> [B, Hq, n, D]. The tokens are appended and replace those drafted at these positions."""
        raise NotImplementedError(f"{type(self).__name__} does not hold all keys and values")

    def rewind(self, pos: Tensor, end: Tensor) -> None:
        """Take back the tokens from pos [B] up to end [B]. Their slots may stay as they are, since the next tokens
        replace them. For methods that accumulate over appended tokens."""

    @property
    def takes_back(self) -> bool:
        """Whether `rewind` does something."""
        return type(self).rewind is not KVMethod.rewind

    def prefetch(self, q_hat: Tensor, pos: Tensor) -> None:
        """Called before the previous layer's decode, if `predicts`, with the query this layer is likely to get.

        q_hat [B, Hq, D] before rotation is the previous layer's input through this layer's norm and query weights.
        """

    @property
    def in_step(self) -> bool:
        """Whether all rows must have decoded equally many tokens."""
        return type(self).maintain is not KVMethod.maintain

    def maintain(self, step: int) -> None:
        """Called between steps, outside the graph, when `step` tokens have been decoded since the prompt."""

    def room(self) -> int:
        """The most tokens that may be decoded behind a prompt; `maintain` refuses more."""
        return self.shape.max_decoded

    @classmethod
    def room_if_unknown(cls, args: Any) -> int | None:
        """`room` of a cache that is set up without max_new_tokens, at the least; None: all of max_seq_len."""
        return None

    def reset(self) -> None:
        """Empty the cache and keep its buffers. Often there is nothing to do, as unwritten slots are never read."""
        if self.notes_reads:
            self.noted.zero_()

    # ---- accounting ----

    def nbytes(self) -> dict[str, int]:
        """Bytes of every buffer as allocated; works on the meta device."""
        return {name: b.numel() * b.element_size() for name, b in self.named_buffers(recurse=True)}

    card_nbytes: ClassVar[Any] = None  # if the paper states a formula: a method without arguments, the bytes by it

    def note_reads(self) -> None:
        """For `__init__` of a method whose steps read a number of tokens that depends on data: allocate `noted`."""
        self.buffer("noted", (self.shape.max_batch, 2), torch.int64)

    def note_read(self, tokens: Tensor, pos: Tensor, keys: bool = False) -> None:
        """Within a step, after `note_reads`: the tokens it reads by head or list, [B, H], of pos [B] + 1; or, with
        `keys`, those whose values it reads beside all keys, which counts as the mean of both."""
        H, read = tokens.shape[1], tokens.sum(1)
        there = self.once_a_step(pos, f"there {H}", lambda: (pos + 1) * H)
        if keys:
            read, there = read + there, self.once_a_step(pos, f"keys and values {H}", lambda: there * 2)
        rows(self.noted, len(pos)).add_(torch.stack((read, there), 1))

    @property
    def notes_reads(self) -> bool:
        return "noted" in self._buffers

    def tokens_read(self, pos: int) -> int | None:
        """The tokens that a step at `pos` reads if it reads the noted share of them, for `traffic`; None: not noted."""
        if not self.notes_reads or self.noted.is_meta or not (sums := self.noted.sum(0).tolist())[1]:
            return None
        return -(-sums[0] * (pos + 1) // sums[1])

    def traffic(self, pos: int) -> int:
        """Bytes of cache that one decode step reads, with all rows at position `pos`; by default all bytes."""
        return sum(self.nbytes().values())


UNIT_FROM, UNIT_TO = -3, 8  # exponents of the largest number of a head of usual size, which has the unit 1 (ours)


def unit_of(x: Tensor, lengths: Tensor) -> Tensor:
    """The power of two by which each head of prompts x [B, H, S, D] of lengths [B] is divided -> [B, H, 1].

    It brings the head's largest number into [1/16, 256): scales of 8-bit codes are normal fp16 numbers there, and
    tokens that come later, for which it stays, may be far larger or smaller. Divisions by it are exact.
    """
    there = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
    largest = x.abs().amax(3).masked_fill(~there[:, None], 0).amax(2, keepdim=True)
    exponent = torch.frexp(largest.float()).exponent
    exponent = (exponent - UNIT_FROM).clamp(-100, 0) + (exponent - UNIT_TO).clamp(0, 100)
    return (exponent + 127 << 23).view(torch.float32).to(x.dtype)  # a float's bits: no power function rounds it


def rows(x: Tensor, B: int) -> Tensor:
    """The first B rows of a buffer, itself if it has no more: a step saves a call of torch."""
    return x if len(x) == B else x[:B]


def connected(layers: Iterable[KVMethod]) -> list[KVMethod]:
    """Call `connect` on each method of a cache's layers and return them. A layer made alone connects with itself."""
    out = list(layers)
    for method in out:
        method.connect(out)
    return out
