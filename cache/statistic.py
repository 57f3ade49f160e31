"""Statistics that a method needs of a model before the first prompt, declared in the method's own file.

    class Keys(Statistic):
        name = "mine"

        def measure(self, t):            # one sequence, one layer -> sums over its tokens
            return dict(kk=torch.einsum("snd,sne->nde", t.k_rot, t.k_rot))

        def finish(self, mean):          # means of these sums over all tokens -> the tensors of the file
            return dict(basis=principal(mean["kk"])[1])

    class Mine(KVMethod):
        statistics = (Keys(),)           # and later self.calib.get(layer, "mine.basis")

`python calibrate.py --method mine` measures it in a pass over text; calibration.py reads and writes the file.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.rope import apply_rope
from runtime.errors import InputError

REPEATS = 4  # copies of the random tokens (RazorAttention, Sec. 3.3)
EVERY = REPEATS - 1  # every third query behind the first copy is measured: as many queries as random tokens
ATTENTION_BLOCK = 1 << 21  # attention weights of repeated tokens computed at a time: they fit a CPU's cache


class Sizes(Protocol):
    """The sizes of a model; ModelArgs has them."""

    @property
    def n_layer(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_kv_head(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


# ---- statistics ----


@dataclass
class Tokens:
    """One sequence in one layer, in fp32 on the model's device: what a statistic measures."""

    layer: int
    x: Tensor  # [S, dim], the input of the attention
    q: Tensor  # [S, Hq, D], before rotation
    k: Tensor  # [S, Hkv, D], before rotation
    v: Tensor  # [S, Hkv, D]
    cos: Tensor  # [S, 1, D/2]
    sin: Tensor
    k_bias: Tensor | None = None  # [Hkv, D], bias of the key and value projections (Qwen2); None: no bias
    v_bias: Tensor | None = None
    after: Tensor | None = None  # [1, S, dim] in the model's dtype, the next layer's input; None: not recorded
    window: int | None = field(default=None, init=False)  # the layer's sliding window

    def __post_init__(self) -> None:
        self.x, self.q, self.k, self.v = (t.float() for t in (self.x, self.q, self.k, self.v))

    @cached_property
    def q_rot(self) -> Tensor:
        """[S, Hq, D], rotated."""
        return apply_rope(self.q, self.cos, self.sin)

    @cached_property
    def k_rot(self) -> Tensor:
        """[S, Hkv, D], rotated."""
        return apply_rope(self.k, self.cos, self.sin)

    @cached_property
    def groups(self) -> Tensor:
        """[S, Hkv, g, D], rotated queries grouped by KV head."""
        return self.q_rot.unflatten(1, (self.v.shape[1], -1))

    @classmethod
    def meta(cls, args: Sizes, S: int) -> Tokens:
        """Tokens on the meta device, for shapes only."""
        D, kv = args.head_dim, (S, args.n_kv_head, args.head_dim)
        sizes = (S, args.dim), (S, args.n_head, D), kv, kv, (S, 1, D // 2), (S, 1, D // 2)
        return cls(0, *(torch.empty(size, device="meta") for size in sizes))


class Rotated(Tokens):
    """Tokens of a model whose rotation is not known: q and k only after it."""

    def __init__(self, layer: int, x: Tensor, q_rot: Tensor, k_rot: Tensor, v: Tensor, *tables: Tensor):
        self.layer, self.x, self.q_rot, self.k_rot, self.v = layer, x.float(), q_rot, k_rot, v.float()

    @property
    def k(self):  # type: ignore[override]
        raise InputError("this model's keys and queries cannot be turned back to those before rotation")

    q = cos = sin = k


Step = Callable[[Any], dict[str, Tensor]]


class Statistic:
    """A statistic of a model's layers from one pass over text: `measure` sums over tokens, `finish` uses the means.

    A subclass defines the two steps, or functions do: Statistic("mine", lambda t: dict(size=t.k_rot.abs().sum(0))).

    Both steps also run on the meta device, where tensors have no values, so create tensors on the device of the input.
    With random weights nothing is measured: a part whose name ends in `basis` then has orthonormal columns, one in
    `eigenvalues` is descending, one in `moments` is the identity, and any other is uniform in [0, 1).
    """

    name: str  # its tensors are named `{name}.{part}`
    knobs: str = ""  # knobs at which its method needs it, if the defaults do not, as "queries=calibration"

    def __init__(self, name: str = "", measure: Step | None = None, finish: Step | None = None):
        for key, value in dict(name=name, measure=measure, finish=finish).items():
            if value:
                setattr(self, key, value)

    def measure(self, t: Tokens) -> dict[str, Tensor]:
        """Sums over the tokens of a sequence; fp32 is precise enough here."""
        raise NotImplementedError

    def finish(self, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """One layer's means over all tokens, fp64 on the CPU -> tensors of the file; integers rank channels."""
        return mean

    def take_heads(self, tensors: dict[str, Tensor], kv_heads: list[int], n_kv_head: int) -> dict[str, Tensor]:
        """One layer's tensors restricted to some KV heads; by default heads are the first dimension of each tensor."""
        return {part: t[kv_heads] for part, t in tensors.items()}

    def layout(self, args: Sizes) -> dict[str, Tensor]:
        """The tensors of one layer on the meta device."""
        given = Tokens.meta(args, 16 * REPEATS)
        return self._step("finish", {k: t.double() for k, t in self._step("measure", given).items()})

    def _step(self, step: str, given: Any, layer: int = 0) -> dict[str, Tensor]:
        """Run `measure` or `finish` and check the result. An InputError names the statistic and its line."""
        try:
            out = getattr(self, step)(given)
        except InputError:
            raise
        except Exception as e:
            lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == self.file]
            where = f" (line {lines[-1]})" if lines else ""
            raise InputError(f"{self}: {step} raised {type(e).__name__}{where}: {e}") from e
        if not isinstance(out, dict) or not out or not all(isinstance(t, Tensor) for t in out.values()):
            raise InputError(f"{self}: {step} must return a dictionary of tensors, found {type(out).__name__}")
        for part, t in out.items():
            if not t.is_meta and not t.isfinite().all():
                raise InputError(f"{self}: {step} gives NaN or infinity in {part!r} of layer {layer}")
            if step == "finish" and not t.is_meta and not is_ranking(t):
                raise InputError(f"{self}: {part!r} holds integers that are not a ranking: return floats, or a ranking")
        return out

    @property
    def _module(self) -> str:
        """The module of its class, or of the function it was made from."""
        return vars(self).get("measure", type(self)).__module__

    @property
    def file(self) -> str:
        return getattr(sys.modules.get(self._module), "__file__", None) or ""

    @property
    def method(self) -> str | None:
        """The method whose file declares it."""
        package, _, name = self._module.rpartition(".")
        return name if package == "kv_methods" else None

    @property
    def spec(self) -> str | None:
        """What --method has to name for it."""
        return self.method and ",".join(filter(None, (self.method, self.knobs)))

    @property
    def code(self) -> str:
        """A hash of what it measures: of its class, or its functions, without spaces and lines that are comments; "" if
        their text is not known."""
        classes = [c for c in type(self).__mro__ if c not in (Statistic, object)]
        try:
            texts = [inspect.getsource(x) for x in (*classes, *(x for x in vars(self).values() if callable(x)))]
        except (OSError, TypeError):  # typed in
            return ""
        return hashlib.sha256(re.sub(r"(?m)^\s*#.*$|\s+", "", "".join(texts)).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"statistic {self.name!r} of {self.file or 'this program'}"


class RepeatedTokens(Statistic):
    """A statistic of attention to repetition, measured on random tokens repeated REPEATS times.

    It uses as many queries as there are random tokens, from all copies but the first: each token once, if EVERY does
    not divide their number.
    """

    def measure_attention(self, p: Tensor, rows: Tensor, n_random: int) -> dict[str, Tensor]:
        """Sums over some of these queries.

        p [Hq, Q, K]: causal attention, within the layer's window if it slides, of the queries at positions rows [Q] of
        the REPEATS * n_random tokens to the first K of them, which end at the last query.
        """
        raise NotImplementedError

    def measure(self, t):
        S, D = len(t.v), t.v.shape[2]
        q, k = t.q_rot.transpose(0, 1) * D**-0.5, t.k_rot.transpose(0, 1)
        step = EVERY * max(16, ATTENTION_BLOCK // (len(q) * S))
        q, out = q.unflatten(0, (len(k), -1)), dict[str, Tensor]()  # [Hkv, g, S, D]
        for first in range(S // REPEATS, S, step):
            rows = torch.arange(first, min(first + step, S), EVERY, device=k.device)
            n, end = len(rows), first + EVERY * (len(rows) - 1) + 1
            logits = (q[:, :, first:end:EVERY].flatten(1, 2) @ k[:, :end].mT).view(-1, n, end)  # [Hq, Q, K]
            later = torch.arange(first, end, device=k.device) > rows[:, None]
            logits[:, :, first:].masked_fill_(later, float("-inf"))
            if t.window:
                gone = torch.arange(end, device=k.device) <= rows[:, None] - t.window
                logits.masked_fill_(gone, float("-inf"))
            for part, total in self.measure_attention(logits.softmax(-1), rows, S // REPEATS).items():
                out[part] = out.get(part, 0) + total.double()
        return out


def _alike(a: Statistic, b: Statistic) -> bool:
    """Whether two statistics are the same: a method file may be a copy of another, with its statistics."""
    if type(a) is type(b) and vars(a) == vars(b):
        return True
    written = [[inspect.getsource(x) if callable(x) else x for x in (type(s), *vars(s).values())] for s in (a, b)]
    return written[0] == written[1]


def unique(statistics: Iterable[Statistic]) -> list[Statistic]:
    """The statistics, each name once. Raises InputError if one is no Statistic or if two differ under one name."""
    out: dict[str, Statistic] = {}
    for s in statistics:
        if not isinstance(s, Statistic):
            raise InputError(f"a method's `statistics` holds {s!r}: expected instances of subclasses of Statistic")
        if not str(getattr(s, "name", "")).isidentifier():
            raise InputError(f"{type(s).__name__} in {s.file} needs a name, such as name = 'mine'")
        other = out.setdefault(s.name, s)
        if not _alike(s, other):
            raise InputError(f"{other} and {s} have the same name and differ: rename one, or choose with --method")
    return list(out.values())


# ---- for `finish` ----


def principal(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric [..., m, m] -> descending eigenvalues [..., m], eigenvectors as columns [..., m, m] with fixed signs.

    The largest entry of every eigenvector is positive, so that two runs give the same file.
    """
    values, vectors = torch.linalg.eigh(moments.double())
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values, vectors * torch.where(largest < 0, -1.0, 1.0)


def principal_of_heads(values: Tensor, basis: Tensor, heads: list[int], n_head: int) -> tuple[Tensor, Tensor]:
    """`principal` of some heads, from the joint values [m] and basis [m, m] of all n_head heads.

    Basis and eigenvalues determine the moments exactly, and with them the block of these heads.
    """
    basis = basis.double()
    whole = ((basis * values.double()) @ basis.T).unflatten(0, (n_head, -1)).unflatten(2, (n_head, -1))
    return principal(whole[heads][:, :, heads].flatten(2).flatten(0, 1))


def is_ranking(t: Tensor) -> bool:
    """Whether every row of an integer tensor is a permutation. True for floats, which are no ranking."""
    if t.is_floating_point():
        return True
    return t.dim() > 0 and torch.equal(t.long().sort(-1).values, torch.arange(t.shape[-1]).expand(t.shape))
