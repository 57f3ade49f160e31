"""One layer of a method: its cache filled with random keys, its decode step and the stages of the step as calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cache.base import KVMethod, connected
from cache.calibration import RandomCalibration
from cache.grammar import parse_spec
from cache.spec import make_args, resolve
from kernels.native import in_huge_pages
from kv_methods.razor import Razor
from model import ModelArgs, Transformer
from runtime.errors import InputError
from runtime.machine import require_memory
from scripts.shared.options import shapes
from scripts.shared.timing import Call

LAYER = 8  # a layer that no paper leaves dense
STAGES = ("prefetch", "append", "score", "select", "attend")  # of a decode step, in order


def one_layer(spec: str) -> tuple[type[KVMethod], Any]:
    """Class and Args of a spec. Raises InputError if a name or a knob is wrong, or if layers differ in it."""
    part, *more = parse_spec(spec)
    if more or (part.first, part.last) != (0, None) or "skip_layers" in part.knobs:
        raise InputError(
            f"--method {spec} has different layers, but a single layer is timed here: give its methods one by one, "
            f"like --method {' '.join(dict.fromkeys(p.name for p in (part, *more)))}"
        )
    cls, preset = resolve(part.name)
    return cls, make_args(cls, preset | part.knobs)


def prompt(args: ModelArgs, batch: int, length: int, dtype: torch.dtype, device: torch.device
           ) -> tuple[tuple[Tensor, Tensor], Tensor]:  # fmt: skip
    """Random k and v [B, Hkv, S, D] to fill all methods of a size with, and q [B, Hq, D]."""
    gen = torch.Generator(device).manual_seed(0)
    size = (batch, args.n_kv_head, length, args.head_dim)
    need = 2 * batch * args.n_kv_head * length * args.head_dim * dtype.itemsize
    require_memory(need, device, "the dense cache", "lower --batch or --length")
    # in huge pages, like caches
    k, v = (in_huge_pages(torch.empty(size, device=device, dtype=dtype)).normal_(generator=gen) for _ in range(2))
    return (k, v), torch.randn(batch, args.n_head, args.head_dim, generator=gen, device=device, dtype=dtype)


@functools.cache
def _others(text: str, name: str) -> list[int]:
    """For razor, the number of KV heads that each layer gives to another method; for other methods, nothing."""
    (cls, own), args = one_layer(text), shapes(name)
    if not issubclass(cls, Razor):
        return []
    needs, rope = cls.needs(own), args.rotary(1, 1, "meta")
    calib = RandomCalibration(args, needs) if needs else None
    layers = (args.cache_shape(i, 1, 64, torch.float32, "meta") for i in range(args.n_layer))
    return [cls(own, shape, i, rope, calib).n_other for i, shape in enumerate(layers)]


def timed_layer(text: str, name: str) -> int:
    """Layer LAYER; for a method that splits heads, the closest layer to it whose split is nearest the model's mean."""
    layer, others = min(LAYER, shapes(name).n_layer // 2), _others(text, name)
    mean = sum(others) / max(1, len(others))
    return min(range(len(others)), key=lambda i: (abs(others[i] - mean), abs(i - layer))) if others else layer


def heads_of(text: str, name: str) -> dict[str, Any]:
    """For a method that splits heads: the KV heads that another method has, in the timed layer and on average."""
    others = _others(text, name)
    if not others:
        return {}
    return dict(heads=dict(other=others[timed_layer(text, name)], of=shapes(name).n_kv_head,
                           mean=sum(others) / len(others)))  # fmt: skip


def cache_bytes(text: str, name: str, batch: int, T: int, dtype: torch.dtype) -> int:
    """Bytes of one layer's cache, without allocating it; name: the model's shapes."""
    (cls, own), args, layer = one_layer(text), shapes(name), timed_layer(text, name)
    shape = args.cache_shape(layer, batch, T, dtype, "meta")
    return sum(connected([cls(own, shape, layer, args.rotary(batch, 1, "meta"))])[0].nbytes().values())


def build(
    text: str, name: str, batch: int, T: int, dtype: torch.dtype, device: torch.device, layers: int = 1
) -> KVMethod:
    """One layer's method with all its buffers, after checking that `layers` of them fit; name: the model's shapes."""
    (cls, own), args, layer = one_layer(text), shapes(name), timed_layer(text, name)
    need = layers * cache_bytes(text, name, batch, T, dtype)
    require_memory(need, device, f"{layers} layers of {text}", "lower --batch, --length or --layers")
    needs = cls.needs(own)
    calib = RandomCalibration(args, needs) if needs else None
    shape = args.cache_shape(layer, batch, T, dtype, device)
    return connected([cls(own, shape, layer, args.rotary(batch, T, device), calib)])[0]


def fill(method: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compresses k and v [B, Hkv, S, D] as a prompt whose queries are all q [B, Hq, 1, D], which takes no memory.

    The time of a step does not depend on which tokens are kept or chosen.
    """
    B, H, S, _ = k.shape
    method.rope.set_prompt(lengths := torch.full((B,), S, device=k.device))
    if (other := getattr(method, "other", None)) is not None:  # heads are split between two methods
        if not method.n_own:
            return fill(other, q, k, v)
        groups, (P, order) = q.unflatten(1, (H, -1)), (method.n_other, method.order)
        fill(other, groups[:, order[:P]].flatten(1, 2), k[:, order[:P]], v[:, order[:P]])
        q, k, v = groups[:, order[P:]].flatten(1, 2), k[:, order[P:]], v[:, order[P:]]
    if getattr(method, "lookback", 0) is None:  # h2o sums the attention of all queries, which are all the same here
        method.lookback = 1
    if hasattr(method, "votes"):  # kvzip: the scores of a second pass over the prompt
        method.votes = torch.zeros(B, H, S, device=k.device)
    method.compress(q.expand(-1, -1, S, -1), k, v, lengths)


def fill_layers(model: Transformer, k: Tensor, v: Tensor) -> None:
    """Fills every layer of the model's cache with k and v [B, Hkv, S, D]."""
    q = torch.randn(len(k), model.args.n_head, 1, k.shape[3], device=k.device, dtype=k.dtype)
    for method in model.cache or ():
        fill(method, q, k, v)


def score_function(method: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function (q, pos) with which a method scores all tokens, if it has one."""
    for owner in (method, getattr(method, "label", None)):
        for name in ("score", "scores", "_score", "_scores"):
            if callable(f := getattr(owner, name, None)):
                return f
    return None


def stage_calls(
    methods: list[KVMethod], q: Tensor, k: Tensor, v: Tensor, pos: Tensor, compile: bool, stages: bool
) -> dict[str, Call]:
    """The operator and its stages as calls that run all layers in turn. q [B, Hq, D], k and v [B, Hkv, D] before
    rotation, pos [B]."""
    wrap: Any = torch.compile(fullgraph=True, dynamic=False) if compile else lambda f: f
    method, raw = methods[0], (q, k, v)

    def all_layers(f: Callable[..., Any], *args: Any, each: list[Any] | None = None) -> Call:
        """Calls f(layer, *args) for every layer; `each` has further arguments by layer."""
        run = wrap(lambda *args: [f(m, *args, *x) for m, x in zip(methods, each or [()] * len(methods), strict=True)])
        return lambda: run(*args)

    def operator(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        for m in methods:
            if m.predicts:  # the previous layer calls it, but it is this layer's work
                m.prefetch(q, pos)
            q = m.decode(q, k, v, pos)
        return q

    step = wrap(operator)
    calls: dict[str, Call] = dict(operator=lambda: step(*raw, pos))
    # the stages of a method with its own decode (razor) do not add up to it; and if one stage starts a copy that
    # another waits for (offload), they cannot be captured into separate CUDA graphs
    copies = q.is_cuda and hasattr(method, "fetched")
    if not stages or type(method).decode is not KVMethod.decode or copies:
        return calls
    if not method.pre_rope:
        q, k = method.rope.rotate(q, pos), method.rope.rotate(k, pos)
    if method.predicts:
        calls["prefetch"] = all_layers(lambda m, *args: m.prefetch(*args), raw[0], pos)
    calls["append"] = all_layers(lambda m, *args: m.append(*args), k, v, pos)
    chosen = [m.select(q, pos) for m in methods]
    if chosen[0][0] is not None:
        if score_function(method) is not None:
            calls["score"] = all_layers(lambda m, *args: score_function(m)(*args), q, pos)  # type: ignore[misc]
        calls["select"] = all_layers(lambda m, *args: m.select(*args), q, pos)
    calls["attend"] = all_layers(lambda m, q, pos, idx, count: m.attend(q, idx, count, pos), q, pos, each=chosen)
    return calls
