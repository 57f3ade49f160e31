"""Problems for the operations of kernels/, each with its answer in float64, from loops that import nothing of ours.

A problem is a function of a `Draw` -> the operator's arguments, and its answers: one for each result, then one for each
argument that is written. Slots that the operation must not read hold NaN, in rows beyond the batch too; tensors are
views of larger ones, tokens before heads, or neither.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kernels.op import OPERATIONS, Operation
from runtime.machine import ROOT
from weights import Layout, PackedLinear

for path in (ROOT / "kernels").glob("[!_]*.py"):
    importlib.import_module(f"kernels.{path.stem}")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"torch": (torch.float32, torch.bfloat16), "cpp": (torch.float32, torch.bfloat16),
          "triton": (torch.float32, torch.float16, torch.bfloat16)}  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of one kernel, beside float64
NAN = float("nan")
SHORT = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129, 200, 257)
LONG = (2047, 2049, 4095, 4096, 4353)  # around what the C++ versions do at a time
Problem = tuple[tuple[Any, ...], list[Any]]
PROBLEMS: dict[str, Callable[[Draw], Problem]] = {}


def problem(function: Callable[[Draw], Problem]) -> Callable[[Draw], Problem]:
    PROBLEMS[function.__name__] = function
    return function


def rand(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def randint(seed: int, low: int, high: int, *size: int) -> Tensor:
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# An answer checks the results from its own on: `check(got, version)`.


@dataclass
class Near:
    """In float64, up to rounding; size: of the logits, errors of which are errors of the result."""

    value: Tensor
    size: float = 1.0

    def check(self, got: list[Tensor], version: str) -> None:
        (x, *_), want = got, self.value
        assert x.shape == want.shape and x.isfinite().all()
        error, scale = (x.double() - want).abs(), 1 + want.abs()
        most = 3e-5 * self.size * scale
        if x.dtype != torch.float32 and version == "cpp":  # sums in fp32, rounded once
            most = most + 2**-8 * want.abs()
        elif x.dtype != torch.float32:  # weights are rounded, too
            largest = max([1.0, *want.abs().flatten().tolist()])
            most = most + self.size * (2e-2 if x.dtype == torch.bfloat16 else 3e-3) * largest
        assert (error <= most).all(), f"off by {(error / most).max():.3g} times the tolerance"


@dataclass
class Same:
    """To the bit, NaN where the answer has it."""

    value: Tensor

    def check(self, got: list[Tensor], version: str) -> None:
        assert torch.equal(got[0].isnan(), self.value.isnan())
        assert torch.equal(got[0].nan_to_num(), self.value.nan_to_num())


class Draw:
    """The sizes and tensors of one problem, for a version: "torch", "cpp" or "triton"."""

    def __init__(self, seed: int, version: str, dtype: torch.dtype, size: str = "usual"):
        self.random, self.gen = random.Random(seed), torch.Generator().manual_seed(seed)
        self.version, self.dtype, self.size = version, dtype, size
        self.empty = version != "torch"  # torch's softmax over no token is NaN

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def some(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, generator=self.gen).to(self.dtype if dtype is None else dtype)

    def fp32(self, *size: int) -> Tensor:
        return self.normal(*size, dtype=torch.float32)

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=self.gen)

    def below(self, n: int, rows: int, least: int = 0) -> list[int]:
        """Numbers of tokens, 0 and n among the likeliest."""
        return [max(least, self.pick(n, n, least, 1, n // 2, self.some(least, n))) for _ in range(rows)]

    def sizes(self, dims: tuple[int, ...] = (16, 32, 64, 80, 96, 128), lengths: tuple[int, ...] = SHORT) -> Any:
        most = 33 if self.size == "small" else 130 if self.version == "triton" else 1000  # interpreted: slow
        lengths = LONG if self.size == "long" else tuple(n for n in lengths if n <= most)
        return SimpleNamespace(
            B=self.some(1, 3 if most == 1000 else 2), H=self.some(1, 2), g=self.pick(1, 3, 4, 5, 8, 17),
            D=self.pick(*dims), T=self.pick(*lengths), spare=self.some(0, 1), size=self.pick(1.0, 8.0),
        )  # fmt: skip

    def view(self, x: Tensor) -> Tensor:
        """The same numbers with other strides of all dimensions but the last; what is between them is NaN."""
        match self.pick("plain", "tokens before heads", "part"):
            case "tokens before heads" if x.dim() > 2:
                return x.transpose(1, -2).contiguous().transpose(1, -2)
            case "part":
                wide = x.new_full((*x.shape[:-1], x.shape[-1] + 16), NAN if x.is_floating_point() else 77)
                wide[..., 8:-8] = x
                return wide[..., 8:-8]
        return x

    def cache(self, s: Any, filled: Tensor, D: int | None = None) -> tuple[Tensor, Tensor]:
        """k and v [B + spare, H, T, D], NaN where filled [B, H or 1, T] is False."""
        there = torch.zeros(s.B + s.spare, s.H, filled.shape[-1], dtype=torch.bool)
        there[: s.B] = filled
        k, v = (self.normal(*there.shape, D or s.D).masked_fill(~there[..., None], NAN) for _ in "kv")
        return self.view(k), self.view(v)


def attend(q: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None = None) -> Tensor:
    """One query [D] over [n, D], of which each counts as often as its weight; zeros over none."""
    if not len(keys):
        return torch.zeros(values.shape[1], dtype=torch.float64)
    logits = keys.double() @ q.double() * len(q) ** -0.5
    return (logits if weights is None else logits + weights.double().log()).softmax(0) @ values.double()


def heads(q: Tensor, H: int, one: Callable[[int, int, Tensor], Tensor]) -> Near:
    """one(b, h, query) for every query head."""
    rows = [[one(b, i * H // q.shape[1], q[b, i]) for i in range(q.shape[1])] for b in range(len(q))]
    return Near(torch.stack([torch.stack(row) for row in rows]), max(1.0, q.double().abs().max().item()))


def spans(d: Draw, s: Any, rows: int) -> list[tuple[int, int]]:
    ends = [d.pick((0, s.T), (0, 1), (s.T - 1, s.T), (s.T // 3, s.T), (0, s.T // 2 + 1)) for _ in range(rows)]
    return [d.pick(x, (0, 0), (s.T, s.T)) if d.empty and d.some(0, 4) == 0 else x for x in ends]


def inside(ends: list[tuple[int, int]], T: int) -> Tensor:
    lo, hi = torch.tensor(ends).unbind(1)
    return (torch.arange(T) >= lo[:, None]) & (torch.arange(T) < hi[:, None])


# ---- attention over ranges and lists of slots ----


@problem
def decode_attention(d: Draw) -> Problem:
    s = d.sizes()
    ends = spans(d, s, s.B)
    k, v = d.cache(s, inside(ends, s.T)[:, None])
    q = d.view(d.normal(s.B, s.H * s.g, s.D) * s.size)
    want = heads(q, s.H, lambda b, h, x: attend(x, *(y[b, h, slice(*ends[b])] for y in (k, v))))
    start, stop = torch.tensor(ends).unbind(1)
    return (q, k, v, None if not start.any() and d.pick(True, False) else start, stop), [want]


def ragged_heads(d: Draw) -> Any:
    """Sizes; the slots of each row shared out to its heads, `first` and `filled`; where each head begins and ends."""
    s = d.sizes(lengths=SHORT[3:])
    free = [d.pick(0, d.some(0, s.T - 1)) for _ in range(s.B + 1)]
    cuts = [sorted(d.random.sample(range(1, s.H * (s.T - n)), s.H - 1)) for n in free]
    first = [[0, *(c + (h + 1) * n for h, c in enumerate(row)), s.H * s.T] for n, row in zip(free, cuts, strict=True)]
    ends = [[(lo, hi - n) for lo, hi in zip(row, row[1:], strict=False)] for n, row in zip(free, first, strict=True)]
    return s, torch.tensor(first), torch.tensor([s.T - n for n in free]), ends


@problem
def ragged_attention(d: Draw) -> Problem:
    s, first, filled, ends = ragged_heads(d)
    there = torch.stack([inside(row, s.H * s.T).any(0) for row in ends]).view(-1, s.H, s.T, 1)
    k, v = (d.normal(s.B + 1, s.H, s.T, s.D).masked_fill(~there, NAN) for _ in "kv")
    q = d.normal(s.B, s.H * s.g, s.D)
    want = heads(q, s.H, lambda b, h, x: attend(x, *(y[b].flatten(0, 1)[slice(*ends[b][h])] for y in (k, v))))
    return (q, k, v, first, filled), [want]


@problem
def ragged_append(d: Draw) -> Problem:
    s, first, filled, ends = ragged_heads(d)
    given = [
        d.normal(s.B + 1, s.H, s.T, s.D),
        d.normal(s.B + 1, s.H, s.T, s.D),
        d.integers(0, 99, s.B + 1, s.H, s.T).int(),
    ]
    k, v, pos = d.view(d.normal(s.B, s.H, s.D)), d.normal(s.B, s.H, s.D), d.integers(0, 99, s.B)
    after = [x.clone() for x in (*given, filled)]
    for b, h in ((b, h) for b in range(s.B) for h in range(s.H)):
        slot = min(ends[b][h][1], s.H * s.T - 1)
        for x, new in zip(after, (k[b, h], v[b, h], pos[b]), strict=False):
            x[b].flatten(0, 1)[slot] = new
        after[3][b] += h == 0
    return (k, v, pos, *given, first, filled), [Same(x) for x in after]


@problem
def verify_attention(d: Draw) -> Problem:
    """Token i of n sees one slot more than token i - 1, and begins one later if there is a window, whose first slot may
    lie before the text."""
    s, n = d.sizes(lengths=SHORT[3:]), d.some(1, 7 if d.version != "triton" else 3)
    stop = [max(n, x) for x in d.below(s.T, s.B, n)]
    start = d.pick(None, [d.some(-n - 2, x - n) for x in stop], [d.some(-n, 0) for _ in stop])
    seen = [[(max(0, start[b] + i) if start else 0, stop[b] - n + 1 + i) for i in range(n)] for b in range(s.B)]
    k, v = d.cache(s, torch.stack([inside(rows, s.T).any(0) for rows in seen])[:, None])
    q = d.normal(s.B, s.H * s.g, n, s.D)
    want = heads(q, s.H, lambda b, h, x: torch.stack(
        [attend(x[i], *(y[b, h, slice(*seen[b][i])] for y in (k, v))) for i in range(n)]))  # fmt: skip
    return (q, k, v, None if start is None else torch.tensor(start), torch.tensor(stop)), [want]


@problem
def packed_attention(d: Draw) -> Problem:
    """Slots from 0 on, and a mean that counts as `count` tokens, which is NaN where there are none."""
    s = d.sizes()
    ends = [(0, hi) for _, hi in spans(d, s, s.B)]
    k, v = d.cache(s, inside(ends, s.T)[:, None])
    q, stop = d.view(d.normal(s.B, s.H * s.g, s.D)), torch.tensor([hi for _, hi in ends])
    if d.pick(True, False):
        want = heads(q, s.H, lambda b, h, x: attend(x, *(y[b, h, : stop[b]] for y in (k, v))))
        return (q, k, v, stop, None, None, None), [want]
    count = torch.tensor([d.pick(0, 1, 7, 100_000) for _ in range(s.B)])
    means = [d.fp32(s.B + s.spare, s.H, s.D) for _ in "kv"]
    for x in means:
        x[: s.B][count == 0] = NAN

    def one(b: int, h: int, x: Tensor) -> Tensor:
        n = stop[b]
        keys, values = (y[b, h, :n].double() for y in (k, v))
        if not count[b]:
            return attend(x, keys, values)
        keys, values = (torch.cat((y, m[b, h, None].double())) for y, m in zip((keys, values), means, strict=True))
        return attend(x, keys, values, torch.cat((torch.ones(n), count[b, None])))

    return (q, k, v, stop, *means, count), [heads(q, s.H, one)]


@problem
def mixed_decode(d: Draw) -> Problem:
    """Heads that keep every token and heads with a window, in any order: a window grows by a slot, or the oldest token
    of its ring leaves for the mean."""
    s, means = d.sizes(), d.pick(True, False)
    H, R, C = s.H + 1, s.B + s.spare, d.some(2, 40)
    whole, ring = d.some(1, H - 1), d.some(1, C)
    order = torch.tensor(d.random.sample(range(H), H))
    pos = [d.pick(0, s.T - 1, d.some(0, s.T - 1)) for _ in range(s.B)]
    grows = [d.pick(True, False) for _ in pos]
    dropped = [d.pick(-5, 0, 1, 9) if g else d.pick(1, 2, 999) for g in grows]
    filled = [d.some(1, C) if g else C for g in grows]
    slot_of = torch.tensor([d.random.sample(range(C), ring) for _ in range(R)], dtype=torch.int32)
    fresh = [n - 1 if g else -1 for g, n in zip(grows, filled, strict=True)]
    slot = [fresh[b] if grows[b] else int(slot_of[b, (dropped[b] - 1) % ring]) for b in range(s.B)]
    place = [d.some(-3, 99) for _ in pos]
    k, v = (d.view(d.normal(s.B, H, s.D)) for _ in "kv")
    q, after_slots = d.view(d.normal(s.B, H * s.g, s.D) * s.size), slot_of.clone()
    mean = [d.fp32(R, H - whole, s.D) for _ in "kv"]
    caches, after, after_mean = [], [], [x.double() for x in mean]
    for x, m, am in zip((k, v), mean, after_mean, strict=True):
        every, some = d.normal(R, whole, s.T, s.D), d.normal(R, H - whole, C, s.D)
        for b in range(R):
            n = (pos[b], filled[b] - grows[b]) if b < s.B else (0, 0)
            every[b, :, n[0] :], some[b, :, n[1] :] = NAN, NAN
            if b < s.B and dropped[b] <= 0:
                m[b] = am[b] = 1e30
        caches.append(torch.cat((every.flatten(0, 2), some.flatten(0, 2))))
        for b in range(s.B):
            every[b, :, pos[b]] = x[b, order[:whole]]
            if not grows[b] and means:
                am[b] += (some[b, :, slot[b]].double() - m[b]) / dropped[b]
            some[b, :, slot[b]] = x[b, order[whole:]]
            after_slots[b, place[b] % ring] = slot[b]
        after.append((every, some))

    def one(b: int, h: int, x: Tensor) -> Tensor:
        at = order.tolist().index(h)
        if at < whole:
            return attend(x, *(every[b, at, : pos[b] + 1] for every, _ in after))
        keys, values = (some[b, at - whole, : filled[b]].double() for _, some in after)
        if not means or dropped[b] <= 0:
            return attend(x, keys, values)
        mk, mv = (m[b, at - whole, None].float().double() for m in after_mean)
        weights = torch.tensor([1.0] * len(keys) + [float(dropped[b])])
        return attend(x, torch.cat((keys, mk)), torch.cat((values, mv)), weights)

    written = [Same(torch.cat((every.flatten(0, 2), some.flatten(0, 2)))) for every, some in after]
    written += [Same(after_slots), *(Near(m) if means else None for m in after_mean)]
    numbers = map(torch.tensor, (pos, place, fresh, dropped, filled))
    given = (q, k, v, *caches, slot_of, *(x if means else None for x in mean), order, whole, C, *numbers)
    return given, [heads(q, H, one), *written]


def lists(d: Draw, s: Any, K: int) -> tuple[Tensor, Tensor, Callable[[int, int], Tensor], Tensor]:
    """idx and count, the slots of a row and head, and those that any list has, [B, H, T]."""
    n_lists, n_counts = d.pick(1, s.H), d.pick(1, s.H)
    idx = torch.rand(s.B, n_lists, s.T, generator=d.gen).argsort(-1).repeat(1, 1, 2)[..., :K]  # slots may repeat
    least = 0 if d.empty else 1
    count = torch.tensor(d.below(K, s.B * n_counts, least)).view(s.B, n_counts)
    filled = torch.zeros(s.B, s.H, s.T, dtype=torch.bool)
    chosen = lambda b, h: idx[b, h % n_lists, : count[b, h % n_counts]]  # noqa: E731
    for b in range(s.B):
        for h in range(s.H):
            filled[b, h, chosen(b, h)] = True
    return idx, count, chosen, filled


@problem
def gather_attention(d: Draw) -> Problem:
    s = d.sizes()
    idx, count, chosen, filled = lists(d, s, d.pick(1, s.T, s.T // 2 + 1, s.T + 3))
    k, v = d.cache(s, filled)
    q = d.view(d.normal(s.B, s.H * s.g, s.D) * s.size)
    want = heads(q, s.H, lambda b, h, x: attend(x, k[b, h, chosen(b, h)], v[b, h, chosen(b, h)]))
    if d.version == "cpp" and idx.shape[1] == count.shape[1]:  # else one head may read further than another
        idx = idx.masked_fill(torch.arange(idx.shape[2]) >= count[..., None], 10**15)
    return (q, k, v, idx, count), [want]


@problem
def observed_attention(d: Draw) -> Problem:
    """And the weights of all slots, summed over a group."""
    s = d.sizes()
    stop = d.below(s.T, s.B, 1)
    k, v = d.cache(s, inside([(0, n) for n in stop], s.T)[:, None])
    q, weights = d.view(d.normal(s.B, s.H * s.g, s.D)), torch.zeros(s.B, s.H, s.T, dtype=torch.float64)
    for b, n in enumerate(stop):
        logits = q[b].double().view(s.H, s.g, s.D) @ k[b, :, :n].double().mT * s.D**-0.5
        weights[b, :, :n] = logits.softmax(-1).sum(1)
    want = heads(q, s.H, lambda b, h, x: attend(x, k[b, h, : stop[b]], v[b, h, : stop[b]]))
    return (q, k, v, torch.tensor(stop)), [want, Near(weights)]


def that_weigh(d: Draw, s: Any, logits: Tensor, stop: list[int], length: list[int], apart: float = 1e-3) -> Any:
    """By row and KV head the slots below stop that count, of logits [B, H, g, T]; a scale that no block is near; and
    the shortest length."""
    shortest = d.pick(1, 100)
    for scale in (d.pick(0.0, 1.0, 20.0, 300.0) * (1 + i / 10) for i in range(20)):
        slots, nearest = {}, float("inf")
        for b, h in ((b, h) for b in range(s.B) for h in range(s.H)):
            least = math.log(min(1, scale / max(length[b], shortest))) if scale else -float("inf")
            slots[b, h] = list[int]()
            for first in range(0, stop[b], 32):
                block = logits[b, h, :, first : min(stop[b], first + 32)].amax(-1)
                before = logits[b, h, :, first // 2048 * 2048 : first]
                over = block - before.amax(-1) - least if before.shape[1] else torch.full((s.g,), float("inf"))
                nearest = min(nearest, over.abs().min().item())
                slots[b, h] += range(first, min(stop[b], first + 32)) if (over >= 0).any() else ()
        if nearest > apart:
            break
    return slots, scale, shortest


@problem
def skipping_attention(d: Draw) -> Problem:
    """Blocks of 32 slots whose largest logit is far below that of the blocks before, of those among 2,048, do not
    count; a threshold is one that no block is near."""
    s = d.sizes()
    stop = d.below(s.T, s.B, 1)
    k, v = d.cache(s, inside([(0, n) for n in stop], s.T)[:, None])
    k = k * (0.1 + 1.5 * torch.rand(*k.shape[:2], -(-s.T // 32), 1, generator=d.gen)).repeat_interleave(32, 2)[
        :, :, : s.T
    ].to(d.dtype)
    q = d.view(d.normal(s.B, s.H * s.g, s.D) * s.size)
    logits = torch.einsum("bhgd,bhnd->bhgn", q.double().view(s.B, s.H, s.g, s.D), k[: s.B].double()) * s.D**-0.5
    slots, scale, shortest = that_weigh(d, s, logits, stop, stop)
    want = heads(q, s.H, lambda b, h, x: attend(x, k[b, h, slots[b, h]], v[b, h, slots[b, h]]))
    count = torch.tensor([[len(slots[b, h]) for h in range(s.H)] for b in range(s.B)])
    return (q, k, v, torch.tensor(stop), scale, shortest), [want, Same(count)]


# ---- codes ----


def packed_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] -> bytes, the first code of a byte in its lowest bits; 3 bits as the low 2, then the third."""
    if bits == 3:
        return torch.cat((packed_bytes(codes & 3, 2), packed_bytes(codes >> 2, 1)), -1)
    each = codes.unflatten(-1, (-1, 8 // bits)) << bits * torch.arange(8 // bits)
    return each.sum(-1).to(torch.uint8)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    if bits == 3:
        n = packed.shape[-1] // 3 * 2
        return codes_of(packed[..., :n], 2) | codes_of(packed[..., n:], 1) << 2
    return (packed.int()[..., None] >> bits * torch.arange(8 // bits) & 2**bits - 1).flatten(-2)


def coded(d: Draw, bits: int, *size: int, group: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [..., n * bits / 8], params fp16 [..., n / group, 2], and the numbers in float64; some scales subnormal."""
    codes, groups = d.integers(0, 2**bits, *size), (*size[:-1], size[-1] // group)
    scale = torch.rand(groups, generator=d.gen) * 2 / 2**bits
    scale[..., 0] = torch.where(torch.rand(groups[:-1], generator=d.gen) < 0.2, 3e-7, scale[..., 0])
    params = torch.stack((scale, d.fp32(*groups)), -1).half()
    wide = params.double().repeat_interleave(group, -2)
    return packed_bytes(codes, bits), params, codes * wide[..., 0] + wide[..., 1]


@problem
def packed_gather_attention(d: Draw) -> Problem:
    """Chosen tokens of a packed store, sinks, and a ring of decoded tokens, some of which are in the store already."""
    bits = d.pick(2, 4, 8, 16)
    s = d.sizes((32, 64, 96, 128) if bits < 16 else (16, 32, 80, 128))
    n, signed, scaled = s.B + s.spare, d.pick(True, False), d.version == "triton" or d.pick(True, False)
    s.g = min(s.g, 8)
    K, sinks, ring, flushed = d.pick(1, s.T, s.T // 2 + 1), d.pick(0, 1, 4, 33), d.pick(1, 5, 40), d.pick(0, 1, 6)
    q = d.normal(s.B, s.H * s.g, s.D) * s.size
    idx = torch.rand(s.B, s.H, s.T, generator=d.gen).argsort(-1)[..., :K].contiguous()
    count = torch.tensor(d.below(K, s.B * s.H, 0 if d.empty else 1)).view(s.B, s.H)
    listed = torch.zeros(n, s.H, s.T, dtype=torch.bool)
    for b in range(s.B):
        for h in range(s.H):
            listed[b, h, idx[b, h, : count[b, h]]] = True
    if bits == 16:
        k, v = (d.normal(n, s.H, s.T, s.D).masked_fill(~listed[..., None], NAN) for _ in "kv")
        store, keys, values = (k, v, None, None, None, None), k.double(), v.double()
    else:
        (k, k_params, keys), (v, v_params, values) = (coded(d, bits, n, s.H, s.T, s.D) for _ in "kv")
        for x in (k_params, v_params):
            x[~listed] = NAN
        signs, alpha = d.fp32(n, s.H, s.T, s.D) >= 0, d.fp32(n, s.H, s.D).abs() + 0.1
        keys = torch.where(signs, keys, -keys) if signed else keys
        keys = keys * alpha[:, :, None].double() if scaled else keys
        # a subvector's first channel is the highest bit of its code
        of_signs = packed_bytes((signs.unflatten(-1, (-1, 4)).int() << torch.tensor([3, 2, 1, 0])).sum(-1), 4)
        store = (k, v, k_params, v_params, alpha if scaled else None, of_signs if signed else None)
    prompt = torch.tensor([d.pick(0, 1, 3, 40, 1000) for _ in range(n)])
    decoded = [d.pick(1, 7, ring, ring + 1, 3 * ring + 2, *((0, -1) if d.empty else ())) for _ in range(s.B)]
    pos = prompt[: s.B] + torch.tensor(decoded) - 1
    slots = [[t % ring for t in range(max(flushed, x - ring), x)] for x in decoded]
    whole = [d.normal(n, s.H, slots_, s.D) for slots_ in (sinks, sinks, ring, ring)]

    def one(b: int, h: int, x: Tensor) -> Tensor:
        first, at = min(sinks, int(prompt[b])), idx[b, h, : count[b, h]]
        both = (
            (whole[i][b, h, :first], y[b, h, at], whole[2 + i][b, h, slots[b]]) for i, y in enumerate((keys, values))
        )
        return attend(x, *(torch.cat([p.double() for p in parts]) for parts in both))

    want = heads(q, s.H, one)
    for b in range(s.B):  # finite values are the contract's, of keys nothing is asked
        whole[0][b, :, int(prompt[b]) :] = NAN if d.empty else 0
        whole[2][b, :, [i for i in range(ring) if i not in slots[b]]] = NAN if d.empty else 0
    store = *store[:2], bits, *store[2:]
    return (q, idx, count, *store, *whole, pos, prompt, torch.tensor([flushed])), [want]


@problem
def quantize(d: Draw) -> Problem:
    """As projected, tokens before heads; a token that is constant; codes against scale and zero as stored."""
    B, S, H, D, bits = d.some(1, 2), d.some(1, 40), d.some(1, 3), d.pick(32, 64, 96, 128), d.pick(2, 4, 8)
    size, magnitude = d.pick(1e-3, 1.0, 300.0), d.pick(True, False)
    x = size * (d.fp32(B, S, H, D) + 0.5)
    x[:, S // 2] = x[:, S // 2, :, :1]
    x = x.to(d.dtype).transpose(1, 2)
    mean, alpha = (d.pick(None, size * (d.fp32(B, H, D).abs() + 0.1)) for _ in "ma")
    y = x.double()
    y = y if mean is None else y - mean[:, :, None].double()
    y = y if alpha is None else y / alpha[:, :, None].double()
    y = (y.abs() if magnitude else y).unflatten(-1, (-1, 32))
    return (x, bits, mean, alpha, magnitude), [Codes(y, bits), None]


class Codes:
    """Packed codes whose params follow: the zero is the least number of a group; none is off by over half a step."""

    def __init__(self, x: Tensor, bits: int):
        self.x, self.bits = x, bits

    def check(self, got: list[Tensor], version: str) -> None:
        packed, params = got[:2]
        scale, zero = (y[..., None] for y in params.double().unbind(-1))
        x, steps = self.x, 2**self.bits - 1
        lo, hi = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        assert ((zero - lo).abs() <= 2**-10 * lo.abs() + 1e-7).all()
        assert ((scale - (hi - zero).clamp(min=0) / steps).abs() <= 2**-10 * scale + 1e-7).all()
        back = codes_of(packed, self.bits).reshape(x.shape) * scale + zero
        # of scale and zero in fp16, subnormals included: the ends may lie outside all steps
        lost = 2**-9 * ((hi - lo) + lo.abs()) + 2**self.bits * 2**-25 + 1e-7
        assert ((back - x).abs() <= 0.501 * scale + lost).all()


@problem
def store_labels(d: Draw) -> Problem:
    """Channels of a prompt from slot 0 on, or of tokens at a place of each row; other slots stay."""
    B, H, S, D, bits = d.some(1, 2), d.some(1, 3), d.some(1, 40), d.pick(32, 48, 96, 128), d.pick(2, 4)
    r = 8 // bits * d.some(1, D * bits // 8)
    k = (3 * d.fp32(B, S, H, D) + d.fp32(B, 1, H, 1)).to(d.dtype).transpose(1, 2)
    if d.pick(True, False):
        k[:, :, ::2] = 0.7  # of scale 0
    channels = torch.stack([torch.randperm(D, generator=d.gen)[:r] for _ in range(H)])
    start = d.pick(None, torch.tensor([d.some(0, 45 - S) for _ in range(B)]))
    labels = torch.full((B + 1, H, 45, r * bits // 8), 77, dtype=torch.uint8)
    params = torch.full((B + 1, H, 45, 2), 7.0, dtype=torch.float16)
    chosen = torch.stack([k[:, h][..., channels[h]] for h in range(H)], 1).double()
    return (k, channels, start, labels, params, bits), [Labels(chosen, start, bits), None]


class Labels(Codes):
    def __init__(self, x: Tensor, start: Tensor | None, bits: int):
        super().__init__(x[..., None, :], bits)
        self.first = torch.zeros(len(x), dtype=torch.int64) if start is None else start

    def check(self, got: list[Tensor], version: str) -> None:
        labels, params = got
        B, S = len(self.x), self.x.shape[2]
        there = torch.zeros(labels.shape[0], labels.shape[2], dtype=torch.bool)
        there[torch.arange(B)[:, None], self.first[:, None] + torch.arange(S)] = True
        there = there[:, None].expand(labels.shape[:3])
        assert labels[~there].eq(77).all() and params[~there].eq(7).all(), "a slot that is not meant"
        super().check([x[there].view(*self.x.shape[:3], *x.shape[3:]) for x in (labels, params[..., None, :])], version)


# ---- latent spaces ----


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def lowrank_cache(d: Draw) -> Any:
    """Latents in bases of a row or of all, beside full-rank tokens; coordinate by coordinate, or side by side: sizes,
    an operation's arguments, and keys and values of a row and head in float64."""
    s = d.sizes((32, 64, 96, 128))
    s.spare = 1
    ranks, F, rows = [d.some(1, s.D) for _ in "kv"], d.pick(1, 5, 40, 70), d.pick(1, s.B)
    stored = torch.tensor(d.below(s.T, s.B))
    filled = torch.rand(s.B, F, generator=d.gen) < 0.6
    if not d.empty:
        filled[:, 0] = True
    held = inside([(0, int(n)) for n in stored], s.T)
    lat = [d.normal(s.B + 1, s.H, max(ranks), s.T)[: s.B].masked_fill(~held[:, None, None], NAN) for _ in "kv"]
    if d.pick(True, False):
        lat = [x.mT.contiguous().mT for x in lat]
    lat = [x[:, :, :r].mT for x, r in zip(lat, ranks, strict=True)]
    bases = [torch.linalg.qr(d.fp32(rows, s.H, s.D, r)).Q.contiguous() for r in ranks]
    full = [d.normal(s.B + 1, s.H, F, s.D)[: s.B].masked_fill(~filled[:, None, :, None], NAN) for _ in "kv"]
    q = d.normal(s.B, s.H * s.g, s.D)

    def both(b: int, h: int, slots: Any = slice(None)) -> list[Tensor]:
        row = b if rows > 1 else 0
        return [torch.cat(((lat[i][b, h, : stored[b]].double() @ bases[i][row, h].double().T)[slots],
                           full[i][b, h][filled[b]].double())) for i in (0, 1)]  # fmt: skip

    return s, (q, *lat, *bases, stored, *full, filled), both


@problem
def lowrank_attention(d: Draw) -> Problem:
    s, given, both = lowrank_cache(d)
    return given, [heads(given[0], s.H, lambda b, h, x: attend(x, *both(b, h)))]


@problem
def skipping_lowrank_attention(d: Draw) -> Problem:
    """Of the latents, blocks as in `skipping_attention`."""
    s, given, both = lowrank_cache(d)
    q, stored, filled = given[0], given[5].tolist(), given[8]
    length = [n + int(x.sum()) for n, x in zip(stored, filled, strict=True)]
    logits = torch.full((s.B, s.H, s.g, s.T), -float("inf"), dtype=torch.float64)
    for b, h in ((b, h) for b in range(s.B) for h in range(s.H)):
        keys = both(b, h)[0][: stored[b]]
        logits[b, h, :, : stored[b]] = q[b].double().view(s.H, s.g, s.D)[h] @ keys.T * s.D**-0.5
    slots, scale, shortest = that_weigh(d, s, logits, stored, length, 1e-3 if d.dtype == torch.float32 else 0.05)
    want = heads(q, s.H, lambda b, h, x: attend(x, *both(b, h, slots[b, h])))
    count = torch.tensor([[len(slots[b, h]) + int(filled[b].sum()) for h in range(s.H)] for b in range(s.B)])
    return (*given, torch.tensor(length), scale, shortest), [want, Same(count)]


def latent_tokens(d: Draw, rows: int, slots: int, rank: int, width: int, bits: int) -> Any:
    """Coordinates and values of all slots, and the values in float64."""
    x = d.normal(rows, slots, rank)
    if bits == 16:
        v = d.normal(rows, slots, width)
        return SimpleNamespace(x=x, v=v, params=None, values=v.double())
    v, params, values = coded(d, bits, rows, slots, width)
    return SimpleNamespace(x=x, v=v, params=params, values=values)


@problem
def latent_attention(d: Draw) -> Problem:
    """Chosen tokens of a store of latents, or all, beside a ring of a higher rank; rotated where they stand."""
    bits = d.pick(2, 4, 8, 16)
    s = d.sizes((16, 32, 64, 96), (31, 33, 65, 100))
    s.g, recent = min(s.g, 8), d.pick(1, 3, 20)
    bits = bits if s.H * s.D >= 32 else 16  # codes have a scale for 32 numbers
    W, T, R, n = s.H * s.D, s.T + recent, recent + d.pick(0, 4), s.B + s.spare
    rank = d.some(2, W // 2)
    many, lead = d.some(rank, W), d.some(1, rank - 1)
    ring_bits = max(8, bits)
    basis, q = d.normal(many, W) * W**-0.5, d.normal(s.B, s.H * s.g, s.D)
    ring, store = latent_tokens(d, n, R, many, W, ring_bits), latent_tokens(d, n, T, rank, W, bits)
    pos = torch.tensor([d.pick(0, T - 1, d.some(0, T - 1)) for _ in range(s.B)])
    gone = (pos + 1 - recent).clamp(min=0).tolist()  # tokens in the store
    idx = count = None
    chosen = [list(range(x)) for x in gone]
    if d.pick(True, False):
        share = d.pick(0.0, 0.3, 1.0)
        idx = torch.randint(T, (s.B, T), generator=d.gen)
        chosen = [torch.randperm(x, generator=d.gen)[: round(share * x)].tolist() for x in gone]
        for b, x in enumerate(chosen):
            idx[b, : len(x)] = torch.tensor(x, dtype=torch.int64)
        idx, count = idx[:, None], torch.tensor([[len(x)] for x in chosen])
    angle = torch.rand(d.pick(1, s.B), T, s.D // 2, generator=d.gen) * 6
    short = d.version == "triton" and d.dtype.itemsize == 2  # `Rope.tables`
    cos, sin = (x.half() if short else x for x in (angle.cos(), angle.sin()))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for b in range(s.B):
        newest = range(gone[b], int(pos[b]) + 1)
        places = [(store, t, t) for t in chosen[b]] + [(ring, t % R, t) for t in newest]
        k = torch.stack([p.x[b, at].double() @ basis[: p.x.shape[2]].double() for p, at, _ in places])
        a, b_ = (c[b if len(c) > 1 else 0, [t for *_, t in places]].double()[:, None] for c in (cos, sin))
        keys.append(turned(k.view(-1, s.H, s.D), a, b_))
        values.append(torch.stack([p.values[b, at] for p, at, _ in places]).view(-1, s.H, s.D))
        for p, there in ((store, chosen[b]), (ring, [t % R for t in newest])):
            unused = [i for i in range(p.x.shape[1]) if i not in set(there)]
            p.x[b, unused] = NAN
            (p.v if p.params is None else p.params)[b, unused] = NAN
    want = heads(q, s.H, lambda b, h, x: attend(x, keys[b][:, h], values[b][:, h]))
    want.size *= 3  # keys are rounded to the dtype of the latents
    parts = store.x[..., :lead].contiguous(), store.x[..., lead:].contiguous()
    return (q, basis, ring.x, ring.v, ring.params, *parts, store.v, store.params, pos, idx, count, cos, sin, ring_bits,
            bits, recent), [want]  # fmt: skip


@problem
def project(d: Draw) -> Problem:
    """Prompts as part of a fused projection; rows and slots beyond them stay."""
    H, D, ranks = d.some(1, 2), d.pick(32, 48, 96), (d.some(1, 20), d.some(0, 28))
    lengths = [d.some(1, 40) for _ in range(d.some(1, 3))]
    B, S, W = len(lengths), max(lengths), H * D
    x, basis = d.normal(B, S + 1, W + 16)[:, :S, :W], d.normal(sum(ranks) + 3, W) * W**-0.5
    buffers = [torch.full((B + 1, S + 2, r), 7.0, dtype=d.dtype) for r in ranks]
    want = (x.double() @ basis[: sum(ranks)].double().T).split(ranks, -1)
    return (x, basis, torch.tensor(lengths), *buffers), [Prompts(y, lengths) for y in want]


class Prompts:
    def __init__(self, value: Tensor, lengths: list[int]):
        self.value, self.lengths = value, lengths

    def check(self, got: list[Tensor], version: str) -> None:
        (x, *_), (B, S) = got, self.value.shape[:2]
        assert (x[B:] == 7).all() and (x[:, S:] == 7).all(), "a slot that is not meant"
        for b, n in enumerate(self.lengths):
            Near(self.value[b, :n]).check([x[b, :n]], version)


@problem
def sequential(d: Draw) -> Problem:
    """Oja's rule token by token; a row with fewer tokens ends in zeros."""
    D, m = d.pick(32, 64, 96), d.some(1, 40)
    r = d.some(1, D)
    basis, x = torch.linalg.qr(d.fp32(4, D, r)).Q.contiguous(), d.fp32(4, m, D) * 30
    x[2:, m // 2 :] = 0
    x = x * (0.1**0.5 / x.norm(dim=2, keepdim=True).clamp(min=1e-30))
    want = basis.double()
    for token in x.double().split(1, 1):
        y = token @ want
        want = want + (token - y @ want.mT).mT @ y
    return (basis, x), [Near(want)]


# ---- scores ----


class Scores:
    """Of slots up to pos of each row; others may be anything. size: the sum of magnitudes, to which fp32 rounds."""

    def __init__(self, value: Tensor, size: Tensor, pos: Tensor | None):
        self.value, self.size = value, size
        self.there = torch.ones(value.shape, dtype=torch.bool)
        if pos is not None:
            self.there &= torch.arange(value.shape[-1]) <= pos.view(-1, *[1] * (value.dim() - 1))

    def check(self, got: list[Tensor], version: str) -> None:
        assert got[0].shape == self.value.shape and got[0].dtype == torch.float32
        want, x, size = (y.double()[self.there] for y in (self.value, got[0], self.size))
        assert (x.isinf() == want.isinf()).all()
        off = torch.where(want.isinf(), 0, (x - want).abs())
        assert (off <= 3e-6 * (size + 1)).all(), f"off by {off.max()}"


def places(d: Draw, s: Any) -> Tensor | None:
    """The last slot that matters: none, any, all."""
    return d.pick(None, torch.tensor([d.pick(-2, s.T - 1, d.some(-1, s.T - 1)) for _ in range(s.B)]))


def beyond(pos: Tensor | None, s: Any) -> Tensor:
    """[B, T], the slots past pos."""
    return torch.zeros(s.B, s.T, dtype=torch.bool) if pos is None else torch.arange(s.T) > pos[:, None]


@problem
def head_scores(d: Draw) -> Problem:
    s, C, r = d.sizes(), d.pick(1, 1, 3, 8, 33), d.some(1, 200)
    pos, q = places(d, s), d.normal(s.B, s.H, C, r)
    x = d.normal(s.B + s.spare, s.H, s.T, r + 5)[..., :r]
    want, size = (f(q.double()) @ f(x[: s.B].double()).mT for f in (torch.positive, torch.abs))
    x[: s.B].masked_fill_(beyond(pos, s)[:, None, :, None], NAN)
    return (q, x, pos), [Scores(want, size, pos)]


@problem
def joint_score(d: Draw) -> Problem:
    s = d.sizes()
    r, pos = d.some(1, s.H * s.D), torch.tensor([d.pick(-2, s.T - 1, d.some(-1, s.T - 1)) for _ in range(s.B)])
    q, basis = d.normal(s.B, s.H * s.g + 1, s.D)[:, 1:], d.normal(r + d.pick(0, 3), s.H * s.D)
    x = d.normal(s.B + s.spare, s.T, r)
    latent = q.double().view(s.B, s.H, s.g, -1).sum(2).flatten(1) @ basis[:r].double().mT
    size = q.double().abs().view(s.B, s.H, s.g, -1).sum(2).flatten(1) @ basis[:r].double().abs().mT
    want, size = ((a[:, None] @ b[: s.B].double().mT) for a, b in ((latent, x), (size, x.abs())))
    if d.dtype.itemsize == 2 and d.version != "cpp":  # which rounds the query twice
        size = size * 2**12
    x[: s.B].masked_fill_(beyond(pos, s)[..., None], NAN)
    return (q, basis, x, pos), [Scores(want, size, pos)]


@problem
def channel_score(d: Draw) -> Problem:
    s = d.sizes()
    r, pos = d.some(1, s.D), places(d, s)
    pos = torch.full((s.B,), s.T - 1) if pos is None else pos
    q, keys = d.fp32(s.B, s.H, s.g, r), d.normal(s.B + s.spare, s.H, s.D, s.T)
    channels = torch.rand(s.B, s.H, s.D, generator=d.gen).argsort(-1)[..., :r].contiguous()
    chosen = torch.stack([torch.stack([keys[b, h, channels[b, h]] for h in range(s.H)]) for b in range(s.B)]).double()
    want, size = (f(q.double()) @ f(chosen) for f in (torch.positive, torch.abs))
    keys[: s.B].masked_fill_(beyond(pos, s)[:, None, None], NAN)
    return (q, channels, keys, pos), [Scores(want, size, pos)]


class Largest:
    """The queries in the largest channels, and these: of equal ones any."""

    def __init__(self, q: Tensor, r: int, bounds: bool):
        self.q, self.r, self.bounds = q.double(), r, bounds  # [B, H, G, D]

    def check(self, got: list[Tensor], version: str) -> None:
        few, channels = got
        (B, H, _, D), size = self.q.shape, self.q.abs().sum(2)
        assert few.dtype == torch.float32 and channels.dtype == torch.int64
        for b in range(B):
            for h in range(H):
                at, x = channels[b, h] % D, self.q[b, h]
                assert len(set(at.tolist())) == self.r == len(at)
                assert torch.allclose(size[b, h, at].sort().values, size[b, h].sort().values[-self.r :], rtol=1e-5)
                high = x[:, at].sum(0) > 0 if self.bounds else torch.zeros(self.r)
                near = x[:, at].sum(0).abs() < 1e-6  # its sign is that of a rounding error
                assert (near | (channels[b, h] // D == high)).all()
                covered = x[:, at].abs().sum(1) / x.abs().sum(1)
                Near(x[:, at] / (covered * D).sqrt()[:, None]).check([few[b, h]], version)


@problem
def largest_channels(d: Draw) -> Problem:
    s, bounds = d.sizes((2, 6, 16, 64, 80, 128)), d.pick(True, False)
    r, q = d.some(1, s.D), d.normal(s.B, (s.g + 1) * s.H, s.D)[:, : s.g * s.H] * s.size
    return (q, s.H, r, bounds), [Largest(q.unflatten(1, (s.H, s.g)), r, bounds), None]


@problem
def append_channels(d: Draw) -> Problem:
    s = d.sizes((2, 6, 64, 80), (1, 9, 40))
    keys, k = d.view(d.normal(s.B + s.spare, s.H, s.D, s.T)), d.normal(s.B, 2 * s.H, s.D)[:, s.H :]
    pos, want = d.integers(0, s.T, s.B), keys.clone()
    for b, at in enumerate(pos.tolist()):
        want[b, :, :, at] = k[b]
    return (keys, k, pos), [Same(want)]


@problem
def label_score(d: Draw) -> Problem:
    s, bits = d.sizes(), d.pick(2, 4)
    r, pos = 8 // bits * d.some(1, 20), places(d, s)
    labels, params, x = coded(d, bits, s.B + s.spare, s.H, s.T, r, group=r)
    params, q = params[..., 0, :].contiguous(), d.pick(1.0, 1e-9, 1e6) * d.fp32(s.B, s.H, r)
    scale, zero = params[: s.B].double().unbind(-1)
    most = scale.abs()[..., None] * codes_of(labels[: s.B], bits) + zero.abs()[..., None]
    want = (x[: s.B] @ q.double()[..., None])[..., 0]
    size = (most @ q.double().abs()[..., None])[..., 0]
    params[: s.B].masked_fill_(beyond(pos, s)[:, None, :, None], NAN)
    return (q, labels[: s.B], params[: s.B], bits, pos), [Scores(want, size, pos)]


@problem
def lut_score(d: Draw) -> Problem:
    s = d.sizes((32, 64, 96, 128, 256))
    pos, skip = places(d, s), d.pick(None, d.integers(0, s.T, s.B, s.H, d.pick(0, 2, 5)))
    if skip is not None and skip.numel():  # the borders of blocks, too
        skip[..., 0], skip[..., 1] = 0, s.T // 2 // 32 * 32
    q, book = d.normal(s.B, s.H * s.g, s.D), d.fp32(s.B, s.H, s.D // 4, 16, 4)
    packed = d.integers(0, 256, s.B + 1, s.H, s.T, s.D // 8).to(torch.uint8)[: s.B]
    mean = q.double().view(s.B, s.H, s.g, s.D // 4, 4).mean(2)
    table = (book.double() * mean[..., None, :]).sum(-1)  # [B, H, D / 4, 16]
    each = table[:, :, None].expand(-1, -1, s.T, -1, -1).gather(4, codes_of(packed, 4).long()[..., None])[..., 0]
    want, size = each.sum(-1), each.abs().sum(-1)
    if skip is not None:
        want = want.scatter(2, skip, float("-inf"))
    return (q, book, packed, pos, skip), [Scores(want, size, pos)]


@problem
def page_score(d: Draw) -> Problem:
    """Channel by channel and query by query the corner that is higher."""
    s = d.sizes((32, 64, 96, 128), (1, 2, 5, 16, 21, 70))
    last, q = places(d, s), d.normal(s.B, s.H * s.g, s.D)
    a, b = (d.normal(s.B + s.spare, s.H, s.T, s.D) for _ in "ab")
    low, high = a.minimum(b), a.maximum(b)
    x = q.double().view(s.B, s.H, s.g, 1, s.D)
    bound = torch.where(x > 0, x * high[: s.B, :, None].double(), x * low[: s.B, :, None].double())
    for y in (low, high):
        y[: s.B].masked_fill_(beyond(last, s)[:, None, :, None], NAN)
    return (q, low, high, last), [Scores(bound.sum((2, 4)), bound.abs().sum((2, 4)), last)]


# ---- selection ----

KINDS = {
    "normal": lambda x: x,
    "constant": lambda x: torch.full_like(x, -2.5),
    "ascending": lambda x: x.sort(-1).values,
    "descending": lambda x: x.sort(-1, descending=True).values,
    "few values": lambda x: (2 * x).round(),
    "heavy tails": lambda x: x.sign() * (3 * x.abs()).exp().exp().clamp(max=3e38),
    "tiny": lambda x: x * 1e-42,
    "minus infinity": lambda x: torch.where(x > 0.5, x, float("-inf")),
    "zeros of both signs": lambda x: torch.where(x > 2, x, 0.0 * x),
}


class Chosen:
    """idx, and count after it. scores NaN where a slot may not be chosen; of equal ones the first slots, ascending."""

    def __init__(self, scores: Tensor, allowed: Tensor, forced: Tensor, wanted: Tensor, k: int):
        self.scores, self.wanted, self.k = scores, wanted, k
        self.allowed, self.forced = allowed.expand(scores.shape), forced.expand(scores.shape)

    def check(self, got: list[Tensor], version: str) -> None:
        (idx, count), (B, H, T) = got, self.scores.shape
        assert idx.shape == (B, H, min(self.k, T)) and idx.dtype == count.dtype == torch.int64
        assert ((idx >= 0) & (idx < T)).all(), "entries past the count must be slots, too"
        for b in range(B):
            for h in range(H):
                scores, forced = self.scores[b, h].tolist(), self.forced[b, h].tolist()
                slots = [t for t, may in enumerate(self.allowed[b, h].tolist()) if may]
                slots.sort(key=lambda t: (not forced[t], 0.0 if forced[t] else -scores[t], t))
                n, taken = int(count[b, h]), idx[b, h, : max(0, int(count[b, h]))].tolist()
                want = slots[: max(0, min(int(self.wanted[b, h]), self.k))]
                assert max(0, n) == len(want)
                if version != "torch":
                    assert taken == sorted(want)
                else:  # torch takes any of equal scores
                    worth = [float("inf") if must else x for x, must in zip(scores, forced, strict=True)]
                    assert len(set(taken)) == n
                    assert sorted(worth[t] for t in taken) == sorted(worth[t] for t in want)


def ranked(d: Draw) -> tuple[Any, Tensor, int]:
    s = d.sizes(lengths=(1, 2, 15, 33, 64, 100))
    kinds = [x for x in KINDS if d.empty or x != "minus infinity"]  # torch takes even what may not be chosen then
    return s, KINDS[d.pick(*kinds)](d.fp32(s.B, s.H, s.T)), d.pick(1, s.T // 16 + 1, s.T // 2 + 1, s.T, s.T + 3)


@problem
def topk_select(d: Draw) -> Problem:
    s, scores, k = ranked(d)
    mask = torch.rand(s.B, d.pick(1, s.H), s.T, generator=d.gen) < d.pick(0.0, 0.05, 0.7, 1.0)
    count = d.integers(0, k + 3, s.B, s.H)
    given = d.view(torch.where(mask, scores, NAN))
    return (given, mask, k, count), [Chosen(scores, mask, torch.zeros_like(mask), count, k), None]


@problem
def budget_select(d: Draw) -> Problem:
    s, scores, k = ranked(d)
    sinks, recent, t = d.pick(0, 1, 4, 70), d.pick(0, 1, 9, 70), torch.arange(s.T)
    pos = torch.tensor([d.pick(0, s.T - 1, d.some(0, s.T - 1), *((-1,) if d.empty else ())) for _ in range(s.B)])
    wanted = d.integers(0, s.T + 4, s.B)
    allowed = (t <= pos[:, None])[:, None]
    forced = ((t < sinks) | (t > pos[:, None] - recent))[:, None]
    least = torch.maximum(wanted, (pos + 1).clamp(max=sinks + recent))[:, None].expand(s.B, s.H)
    given = d.view(torch.where(allowed, scores, NAN))
    return (given, pos, wanted, k, sinks, recent), [Chosen(scores, allowed, forced, least, k), None]


@problem
def page_select(d: Draw) -> Problem:
    """Pages of one token to five, behind which the newest lies, as far as it is filled."""
    s, scores, most = ranked(d)
    page, (sinks, recent) = d.some(1, 5), d.pick((0, 0), (1, 0), (2, 3))
    pos = torch.tensor([d.some(0, s.T * page - 1) for _ in range(s.B)])
    wanted, newest, t = d.integers(1, s.T + 4, s.B, *d.pick([], [1], [s.H])), pos // page, torch.arange(s.T)
    allowed = (t < newest[:, None])[:, None]
    forced = ((t < sinks) | (t > newest[:, None] - 1 - recent))[:, None]
    least = torch.maximum(wanted.view(s.B, -1) - 1, newest.clamp(max=sinks + recent)[:, None]).expand(s.B, s.H)
    pages = Chosen(scores, allowed, forced, least, most)
    given = d.view(torch.where(allowed, scores, NAN)) if d.empty else torch.where(allowed, scores, 0.0)
    return (given, pos, wanted, page, (most + 1) * page, s.T * page - 1, sinks, recent), [Pages(pages, pos, page), None]


class Pages:
    def __init__(self, pages: Chosen, pos: Tensor, page: int):
        self.pages, self.pos, self.page = pages, pos, page

    def check(self, got: list[Tensor], version: str) -> None:
        idx, count = got
        tail = self.pos % self.page + 1
        n = (count - tail[:, None]) // self.page
        assert idx.shape[2] == (self.pages.k + 1) * self.page and (count == n * self.page + tail[:, None]).all()
        whole = idx.unflatten(2, (-1, self.page))
        size = min(self.pages.k, self.pages.scores.shape[2])
        self.pages.check([whole[:, :, :size, 0] // self.page, n], version)
        for b, at in enumerate(self.pos.tolist()):
            for h in range(idx.shape[1]):
                taken, m = idx[b, h, : int(count[b, h])].tolist(), int(n[b, h])
                each = [first + i for first in whole[b, h, :m, 0].tolist() for i in range(self.page)]
                assert taken == each + list(range(at // self.page * self.page, at + 1))
                assert all(first % self.page == 0 for first in each[:: self.page])


def sharing(d: Draw) -> Any:
    """Sizes, and who takes whose set: an earlier layer's, an earlier head's, or its own."""
    s, L = d.sizes(lengths=(9, 40)), d.some(1, 3)
    s.layer, s.steps, s.recent, s.first = d.some(0, L - 1), d.some(1, 3), d.some(1, 8), d.pick(0, 2)
    s.pos, s.source = d.integers(0, s.T, s.B), d.integers(0, s.layer + 1, L, s.B + s.spare)
    s.heads = d.integers(0, s.first + s.H, s.B + s.spare, s.H)
    return s


@problem
def choosers_last(d: Draw) -> Problem:
    s = sharing(d)
    want = torch.full((s.B, s.H), -1)
    for b, pos in enumerate(s.pos.tolist()):
        for h in range(s.H):
            if s.source[s.layer, b] == s.layer and s.heads[b, h] == s.first + h and (pos + 1) % s.steps == 0:
                want[b, h] = max(pos - s.recent, -1)
    return (s.pos, s.heads, s.source, torch.tensor([s.layer]), s.first, s.steps, s.recent), [Same(want)]


@problem
def take_sets(d: Draw) -> Problem:
    """Those of other layers and rows stay; so do all where none is due."""
    s, n = sharing(d), d.some(1, 7)
    rows = len(s.source), s.B + s.spare, s.H
    sets, counts, newer = d.integers(0, s.T, *rows, n), d.integers(0, n + 1, *rows), s.pos - d.integers(0, 5, s.B)
    newer = torch.cat((newer.clamp(min=0), torch.full((s.spare,), 77)))
    idx, count = d.integers(0, s.T, s.B, s.first + s.H, n), d.integers(0, n + 1, s.B, s.first + s.H)
    k, left = n + s.recent + 5, [x.clone() for x in (sets, counts, newer)]
    run, many = torch.zeros(s.B, s.H, k, dtype=torch.int64), torch.zeros(s.B, s.H, dtype=torch.int64)
    for b, pos in enumerate(s.pos.tolist()):
        of, due = int(s.source[s.layer, b]), (pos + 1) % s.steps == 0
        left[2][b] = max(0, pos + 1 - s.recent) if due else newer[b]
        for h in range(s.H):
            if due:
                taken = (idx[b, s.heads[b, h]], count[b, s.heads[b, h]])
                taken = taken if of == s.layer else (sets[of, b, h], counts[of, b, h])
                left[0][s.layer, b, h], left[1][s.layer, b, h] = taken
            chosen = left[0][s.layer, b, h, : left[1][s.layer, b, h]].tolist()
            each = chosen + list(range(int(left[2][b]), pos + 1))
            many[b, h] = len(each)
            run[b, h] = torch.tensor((each + [min(pos + 1 + i, s.T - 1) for i in range(k)])[:k])
    given = (idx, count, s.pos, s.heads, s.source, torch.tensor([s.layer]), sets, counts, newer)
    return (*given, s.steps, s.recent, s.T - 1, k), [Same(x) for x in (run, many, *left)]


@problem
def top_p_count(d: Draw) -> Problem:
    """Peaked, flat and tied rows; weights so small that they are zero."""
    s = d.sizes(lengths=(1, 37, 200, 300))
    pos = torch.tensor([d.some(0, s.T - 1) for _ in range(s.B)])
    p, sinks, recent = d.pick((0.901, 3, 20), (0.05, 0, 0), (0.5, 0, 1), (0.99, 0, 1), (1.0, 3, 0))
    there = torch.arange(s.T) <= pos[:, None, None]
    x = torch.where(there, d.fp32(s.B, s.H, s.T) * d.pick(0.0, 1.0, 3.0, 12.0), float("-inf")).softmax(-1)
    return (torch.where(there, x, NAN), pos, p, sinks, recent), [Fewest(x, pos, p, sinks, recent)]


class Fewest:
    def __init__(self, weights: Tensor, pos: Tensor, p: float, sinks: int, recent: int):
        self.given = weights, pos, p, sinks, recent

    def check(self, got: list[Tensor], version: str) -> None:
        weights, pos, p, sinks, recent = self.given
        for b, n in enumerate((pos + 1).tolist()):
            forced = [t < sinks or t >= n - recent for t in range(n)]
            for h in range(weights.shape[1]):
                row = weights[b, h, :n].double().tolist()
                free = sorted((w for w, f in zip(row, forced, strict=True) if not f), reverse=True)

                def fewest(p: float, free: list[float] = free, row: list[float] = row, forced: Any = forced) -> int:
                    held, taken = sum(w for w, f in zip(row, forced, strict=True) if f), 0
                    while taken < len(free) and held < p:
                        held, taken = held + free[taken], taken + 1
                    return sum(forced) + taken

                least, most = (n, n) if p == 1 else (fewest(p - 1e-6), fewest(p + 1e-6))
                assert least <= int(got[0][b, h]) <= most


def logits(d: Draw) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Sizes, logits [B, H, g, T] with NaN past pos, pos, and the softmax of what counts in float64."""
    s = d.sizes()
    pos = torch.tensor([d.pick(0, s.T - 1, d.some(0, s.T - 1)) for _ in range(s.B)])
    x = d.fp32(s.B, s.H, s.g, s.T) * d.pick(0.0, 1.0, 12.0) + d.pick(0.0, -200.0)
    late = (torch.arange(s.T) > pos[:, None])[:, None, None]
    return s, d.view(x.masked_fill(late, NAN)), pos, x.double().masked_fill(late, float("-inf")).softmax(-1)


@problem
def group_weights(d: Draw) -> Problem:
    _, x, pos, weights = logits(d)
    return (x, pos), [Near(weights.mean(2))]


@problem
def attended_share(d: Draw) -> Problem:
    """Of a list that begins anywhere among the slots, each of which it has once."""
    s, x, pos, weights = logits(d)
    order = torch.stack([torch.stack([torch.randperm(n + 1, generator=d.gen).repeat(s.T)[: s.T] for _ in range(s.H)])
                         for n in pos.tolist()])  # fmt: skip
    count = torch.stack([d.integers(1, n + 2, s.H) for n in pos.tolist()])
    share, want = torch.full((s.B + s.spare, s.H * s.g), 7.0), torch.full((s.B + s.spare, s.H * s.g), 7.0).double()
    for b in range(s.B):
        for h in range(s.H):
            want[b, h * s.g : (h + 1) * s.g] = weights[b, h][:, order[b, h, : count[b, h]]].sum(-1)
    return (x, order, count, pos, share), [Near(want)]


@problem
def with_mean(d: Draw) -> Problem:
    s = d.sizes((2, 6, 64, 80, 128))
    y, share = d.normal(s.B, (s.g + 1) * s.H, s.D)[:, : s.g * s.H], d.fp32(s.B + s.spare, s.H * s.g).sigmoid()
    mean, by = d.fp32(s.B + s.spare, s.H, s.D), share[: s.B, :, None].double()
    return (y, share, mean), [Near(by * y.double() + (1 - by) * mean[: s.B].double().repeat_interleave(s.g, 1))]


# ---- one token ----


@problem
def latent_append(d: Draw) -> Problem:
    """The token at pos joins the ring; the one that leaves goes to the store, whose values have fewer bits."""
    bits, R, H = d.pick(2, 4, 8, 16), d.some(1, 5), d.some(1, 5)
    T, recent, W, ring_bits = d.some(R, 12), d.some(1, R), 32 * H, max(8, bits)
    rank = d.some(1, W)
    many, lead, at = d.some(rank, W), d.some(1, rank), [d.some(0, T - 1) for _ in range(d.some(1, 3))]
    B = len(at)
    ring, store = latent_tokens(d, B + 1, R, many, W, ring_bits), latent_tokens(d, B + 1, T, rank, W, bits)
    x, v = d.normal(B, many), d.normal(B, 2, H, 32)[:, 1]
    want_ring, want_lat = ring.x.clone(), store.x.clone()
    ring_values, values = ring.values.clone(), store.values.clone()
    for b, pos in enumerate(at):
        old, left = (pos - recent) % R, (pos - recent) % T
        want_lat[b, left], values[b, left] = ring.x[b, old, :rank], ring.values[b, old]
        want_ring[b, pos % R], ring_values[b, pos % R] = x[b], v[b].flatten().double()
    both = [(ring, ring_values, ring_bits), (store, values, bits)]
    (a, a_params), (c, c_params) = ([Latents(y, z, n), None] for y, z, n in both)
    parts = want_lat[..., :lead], want_lat[..., lead:]
    lat = [y.contiguous() for y in (store.x[..., :lead], store.x[..., lead:])]
    args = (x, v, torch.tensor(at), ring.x, ring.v, ring.params, *lat, store.v, store.params, bits, recent)
    return args, [Same(want_ring), a, a_params, *map(Same, parts), c, c_params]


class Latents:
    """Values of whole numbers, or codes whose params follow: those that were there stay, new ones are near."""

    def __init__(self, before: Any, values: Tensor, bits: int):
        self.before, self.values, self.bits = before.values.clone(), values, bits

    def check(self, got: list[Tensor], version: str) -> None:
        v, params = got[:2]
        if params is None:
            assert torch.equal(v.double(), self.values)
            return
        group = self.values.shape[-1] // params.shape[-2]
        wide = params.double().repeat_interleave(group, -2)
        got = codes_of(v, self.bits) * wide[..., 0] + wide[..., 1]
        stays = (self.values == self.before).all(-1)
        assert torch.equal(got[stays], self.before[stays])
        groups = self.values.unflatten(-1, (-1, group))
        span = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(group, -1)
        most = span / (2**self.bits - 1) * 0.51 + 2**-9 * (self.values.abs() + span) + 1e-6
        assert ((got - self.values).abs() <= most)[~stays].all()


@problem
def group_append(d: Draw) -> Problem:
    """Coordinates of each group's heads, in numbers, or in codes with one scale for all of a token."""
    bits, s, groups = d.pick(2, 3, 4, 8, 16), d.sizes((8, 16, 64), (1, 9, 40)), d.some(1, 3)
    r = d.pick(16, 32, 96)
    x = d.normal(s.B, groups * s.H + 1, s.D)[:, 1:]
    down, bias = d.normal(groups, s.H * s.D, r) * s.D**-0.5, d.fp32(groups, s.H * s.D)
    pos, rows = d.integers(0, s.T, s.B), (s.B + s.spare, groups, s.T, r)
    if bits == 16:
        stored = d.normal(*rows)
        params, values = None, stored.double()
    else:
        stored, params, values = coded(d, bits, *rows, group=r)
    want = values.clone()
    for b, at in enumerate(pos.tolist()):
        for g in range(groups):
            less = x[b, g * s.H : (g + 1) * s.H].double().flatten() - bias[g].double()
            want[b, g, at] = less @ down[g].double()
    answer: Any = Near(want) if bits == 16 else Latents(SimpleNamespace(values=values), want, bits)
    return (x, pos, down, bias, stored, params, bits), [answer, None]


def tables(d: Draw, s: Any) -> tuple[Tensor, Tensor]:
    angle = torch.rand(d.pick(1, s.B + s.spare), s.T, s.D // 2, generator=d.gen) * 6
    return angle.cos(), angle.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor) -> Near:
    rows = torch.arange(len(pos)) if len(cos) > 1 else torch.zeros_like(pos)
    return Near(turned(x.double(), cos[rows, pos].double()[:, None], sin[rows, pos].double()[:, None]))


@problem
def rotate_token(d: Draw) -> Problem:
    s = d.sizes((2, 6, 10, 64, 80, 128), (1, 9, 40))
    cos, sin = tables(d, s)
    q, k, _ = d.normal(s.B, (s.g + 2) * s.H, s.D).split((s.g * s.H, s.H, s.H), 1)
    pos = d.integers(0, s.T, s.B)
    return (q, k, cos, sin, pos), [rotated(x, cos, sin, pos) for x in (q, k)]


@problem
def rotate_append(d: Draw) -> Problem:
    """q, k and v of one projection; nothing else of the caches is written."""
    s = d.sizes((2, 6, 10, 64, 80, 128), (1, 9, 40))
    cos, sin = tables(d, s)
    q, k, v = d.normal(s.B, (s.g + 2) * s.H, s.D).split((s.g * s.H, s.H, s.H), 1)
    pos, row = d.integers(0, s.T, s.B), torch.arange(s.B)
    caches = [torch.full((s.B + s.spare, s.H, s.T, s.D), 7.0, dtype=d.dtype) for _ in "kv"]
    k_cache, v_cache = caches[0].double(), caches[1].clone()
    k_cache[row, :, pos], v_cache[row, :, pos] = rotated(k, cos, sin, pos).value, v
    return (q, k, v, cos, sin, pos, *caches), [rotated(q, cos, sin, pos), Near(k_cache), Same(v_cache)]


@problem
def rotate_query(d: Draw) -> Problem:
    (q, _, *at), (want, _) = rotate_token(d)
    return (q, *at), [want]


@problem
def append_token(d: Draw) -> Problem:
    """One slot for all heads of a row, or one for each; nothing else of the caches is written."""
    s = d.sizes((2, 6, 10, 64, 80, 128), (1, 9, 40))
    k, v = d.normal(s.B, 3 * s.H, s.D).split((s.H, 2 * s.H), 1)
    v, by_head = v[:, s.H :], d.pick(True, False)
    slot = d.integers(0, s.T, s.B, *[s.H] * by_head)
    caches = [d.view(torch.full((s.B + s.spare, s.H, s.T, s.D), 7.0, dtype=d.dtype)) for _ in "kv"]
    answers = [x.clone() for x in caches]
    for b in range(s.B):
        for h in range(s.H):
            for answer, x in zip(answers, (k, v), strict=True):
                answer[b, h, slot[b, h] if by_head else slot[b]] = x[b, h]
    return (k, v, slot, *caches), [Same(x) for x in answers]


@problem
def evict_append(d: Draw) -> Problem:
    """Into the next free slot, or into that of the lowest score of each head; ties, and rows whose tokens all stay."""
    s, scored = d.sizes((2, 6, 64, 80), (1, 9, 40)), d.pick(True, False)
    n, pos = [d.pick(0, s.T, d.some(0, s.T)) for _ in range(s.B)], d.integers(50, 90, s.B)
    k, v = d.normal(s.B, 2 * s.H, s.D).split((s.H, s.H), 1)
    most, since = d.integers(1, s.T + 1, s.B), pos - d.pick(0, 5, 60)
    new = d.pick(None, d.fp32(s.B, s.H))
    rows = s.B + s.spare, s.H, s.T
    caches = [d.view(torch.full((*rows, s.D), 7.0, dtype=d.dtype)) for _ in "kv"]
    place, filled = d.integers(0, 50, *rows).int(), torch.tensor([*n, *[3] * s.spare])
    score = d.fp32(*rows).round() if scored else None
    answers = [x.clone() for x in (*caches, place, filled)]
    scores = None if score is None else score.clone()
    for b in range(s.B):
        grows = n[b] < (most[b] if scored else s.T)
        for h in range(s.H):
            slot = min(n[b], s.T - 1)
            if score is not None and not grows:
                free = [t for t in range(n[b]) if place[b, h, t] <= since[b]]
                slot = min(free, key=lambda t: (score[b, h, t], t)) if free else 0
            for answer, x in zip(answers, (k[b, h], v[b, h], pos[b]), strict=False):
                answer[b, h, slot] = x
            if scores is not None:
                scores[b, h, slot] = 0 if new is None else new[b, h]
        answers[3][b] += grows
    given = (score, most, since, new) if scored else (None,) * 4
    return (k, v, pos, *caches, place, filled, *given), [*map(Same, answers), *([Same(scores)] if scored else [None])]


@problem
def distinct_keys(d: Draw) -> Problem:
    """Of keys that are held, a few of which have no direction; a row may hold none."""
    s = d.sizes()
    n = d.below(s.T, s.B)
    k = d.cache(s, inside([(0, x) for x in n], s.T)[:, None])[0]
    k = torch.where(torch.rand(*k.shape[:3], 1, generator=d.gen) < 0.1, 0 * k, k + d.pick(0, 2) * d.normal(s.D))
    want = torch.zeros(s.B, s.H, s.T, dtype=torch.float64)
    for b in range(s.B):
        for h in range(s.H):
            keys = k[b, h, : n[b]].double()
            directions = keys / keys.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            anchor = directions.sum(0)
            want[b, h, : n[b]] = -(directions @ anchor) / anchor.norm().clamp(min=1e-30)
    return (k, torch.tensor(n)), [Near(want)]


@problem
def join_page(d: Draw) -> Problem:
    s, page = d.sizes((2, 6, 64, 80), (1, 9)), d.pick(1, 4, 16)
    bounds = [d.normal(s.B + s.spare, s.H, s.T, s.D) for _ in "lh"]
    if d.pick(True, False):  # channel by channel
        bounds = [x.mT.contiguous().mT for x in bounds]
    k = d.normal(s.B, 2 * s.H, s.D)[:, s.H :]
    pos = torch.tensor([d.pick(0, d.some(0, s.T * page - 1)) for _ in range(s.B)])
    answers = [x.clone() for x in bounds]
    for b, at in enumerate(pos.tolist()):
        for answer, wider in zip(answers, (torch.minimum, torch.maximum), strict=True):
            held = answer[b, :, at // page]
            held.copy_(k[b] if at % page == 0 else wider(held, k[b]))
    return (*bounds, k, pos, page), [Same(x) for x in answers]


@problem
def join_mean(d: Draw) -> Problem:
    """Before the first token it is NaN."""
    s, pos = d.sizes((2, 6, 64, 80)), d.integers(0, 3, 3)
    x, mean, pos = d.normal(s.B, 2 * s.H, s.D)[:, s.H :], d.fp32(s.B + s.spare, s.H, s.D), pos[: s.B] * 1000
    want = mean.double()
    for b, n in enumerate(pos.tolist()):
        want[b] = (want[b] * n + x[b].double()) / (n + 1)
        mean[b] = mean[b] if n else NAN
    return (x, mean, pos), [Near(want)]


@problem
def turn_heads(d: Draw) -> Problem:
    """A matrix for all heads or one for each KV head, its transpose, with and without units."""
    s, by_head, wide = d.sizes((2, 6, 64, 80, 128)), d.pick(True, False), d.pick(True, False)
    x, lead = d.normal(s.B, (s.g + 1) * s.H, s.D)[:, : s.g * s.H], [s.H] * by_head
    matrix = d.normal(*lead, s.D, s.D, dtype=torch.float32 if wide else None) * s.D**-0.5
    matrix = d.pick(matrix, matrix.mT)
    unit, divide = (2.0 ** d.integers(-3, 3, s.B + s.spare, s.H, 1)).to(d.dtype), d.pick(True, False)
    unit = d.pick(unit, None)
    by = 1 if unit is None else unit[: s.B].double().repeat_interleave(s.g, 1)
    each = matrix.double().repeat_interleave(s.g, 0) if by_head else matrix.double()
    want = ((x.double() / by if divide else x.double() * by)[:, :, None] @ each)[:, :, 0]
    return (x, matrix, unit, divide), [Near(want, 8 * s.D**0.5)]


@problem
def scale_heads(d: Draw) -> Problem:
    s, divide = d.sizes((2, 6, 64, 80, 128)), d.pick(True, False)
    x = d.normal(s.B, (s.g + 1) * s.H, s.D)[:, : s.g * s.H]
    unit = (2.0 ** d.integers(-20, 20, s.B + s.spare, s.H, 1)).to(d.dtype)
    by = unit[: s.B].double().repeat_interleave(s.g, 1)
    return (x, unit, divide), [Near(x.double() / by if divide else x.double() * by)]


@problem
def label_queries(d: Draw) -> Problem:
    s = d.sizes()
    q, r = d.view(d.normal(s.B, s.H * s.g, s.D)), d.some(1, s.D)
    channels = torch.stack([torch.randperm(s.D, generator=d.gen)[:r] for _ in range(s.H)])
    want = [[q[b, h * s.g : (h + 1) * s.g, channels[h]].double().sum(0) for h in range(s.H)] for b in range(s.B)]
    return (q, channels), [Near(torch.stack([torch.stack(row) for row in want]), s.g)]


# ---- a layer around its attention ----


def matrix(d: Draw, n: int, out: int) -> tuple[tuple[Any, ...], Callable[[Tensor], Tensor]]:
    """A linear layer of small numbers, in bf16, 8 or 4 bits or not packed: its operands, and its product in float64."""
    weight, bias = d.normal(out, n) / n**0.5, d.pick(None, d.normal(out))
    if not (bits := d.pick(0, 16, 8, 4)):
        operands: tuple[Any, ...] = (weight, *[None] * 5, bias, 0)
        wide = weight.double()
    else:  # how they are packed is tested in test_weights.py
        layer = PackedLinear(n, out, bias is not None, Layout(bits, 32))
        layer.put(0, weight)
        if bias is not None:
            layer.bias[:out] = bias
        operands, wide = (*layer.matrix,), layer.dense(0, out).double()
    return operands, lambda x: x @ wide.T + (0 if bias is None else bias.double())


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


class Roughly(Near):
    """Products of rounded numbers: x becomes 16-bit integers for codes, and bf16 rounds between products."""

    def check(self, got: list[Tensor], version: str) -> None:
        error = (got[0].double() - self.value).abs().max() / self.value.abs().max()
        assert got[0].shape == self.value.shape and error < (1e-3 if got[0].dtype == torch.float32 else 4e-2), error


@problem
def project_heads(d: Draw) -> Problem:
    n, D, H, g, eps = d.pick(32, 64, 128), d.pick(16, 32, 64), d.some(1, 2), d.pick(1, 3, 4), 1e-5
    x, norm, sizes = d.normal(*d.pick((1,), (3,), (2, 5), (31,)), n), d.normal(n) + 1, (g * H, H, H)
    w, product = matrix(d, n, sum(sizes) * D)
    heads_ = product(normed(x.double(), norm, eps)).unflatten(-1, (-1, D))
    norms = (d.normal(D) + 1, d.normal(D) + 1) if d.pick(True, False) else (None, None)
    if norms[0] is not None:
        q, k, v = heads_.split(sizes, -2)
        heads_ = torch.cat((normed(q, norms[0], eps), normed(k, norms[1], eps), v), -2)
    return (x, norm, eps, *w, *norms, *sizes[:2], D), [Roughly(heads_)]


@problem
def finish_layer(d: Draw) -> Problem:
    n, heads_, D, ffn, eps = d.pick(32, 64, 128), d.some(1, 3), d.pick(32, 64), d.pick(32, 96, 512), 1e-5
    rows = d.pick((1,), (3,), (2, 5), (31,))
    x, y, norm = d.normal(*rows, n), d.normal(*rows, heads_, D), d.normal(n) + 1
    (wo, out), (w13, both), (w2, down) = (matrix(d, *size) for size in ((heads_ * D, n), (n, 2 * ffn), (ffn, n)))
    z = x.double() + out(y.double().flatten(-2))
    gate, up = both(normed(z, norm, eps)).chunk(2, -1)
    return (x, y, *wo, norm, eps, *w13, *w2), [Roughly(z + down(gate / (1 + (-gate).exp()) * up))]


# ---- a version's results ----


def serves(operation: Operation[Any, Any], version: str, args: tuple[Any, ...]) -> bool:
    """Whether the version takes such shapes; torch runs if it does not."""
    _, check = operation.versions.get(version, (None, None))
    return check is None or check(*operation.grouped(args))


def tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    return tree_map(lambda x: function(x) if torch.is_tensor(x) else x, tree)


def finite(args: Any) -> Any:
    return tensors(lambda x: torch.where(x.isnan(), 0, x) if x.is_floating_point() and x.isnan().any() else x, args)


def call(operation: Operation[Any, Any], version: str, args: tuple[Any, ...]) -> list[Any]:
    """A version's results, then the arguments that it wrote."""
    written = [name in operation.mutates for name, _ in operation.defaults]
    args = tuple(
        x.clone() if w and torch.is_tensor(x) else x for x, w in zip(operation.filled(args, {}), written, strict=True)
    )
    if version == "triton":
        args = tensors(lambda x: x.to(DEVICE), args)
    run = dict(torch=operation.reference, cpp=operation.cpp, triton=operation.launch)[version]
    out = run(*args) if version == "cpp" else run(*operation.grouped(args))
    results = [] if out is None else [out] if torch.is_tensor(out) else list(out)
    return tensors(Tensor.cpu, results + [x for x, w in zip(args, written, strict=True) if w])


def draw(name: str, version: str, seed: int, size: str = "usual") -> tuple[tuple[Any, ...], list[Any]]:
    dtypes = DTYPES[version]
    args, answers = PROBLEMS[name](Draw(seed, version, dtypes[seed % len(dtypes)], size))
    return OPERATIONS[name].filled(args, {}), answers
