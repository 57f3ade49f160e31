"""A decoder of two layers to test KV-cache methods with: random weights, the protocol of the model, runs of it.

It stands below model.py, and its attention without a cache is written out here: what a method is held to shares no
line with what it is made of. Weights are scaled so that attention is far from uniform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from cache.base import CacheShape, KVMethod
from cache.calibration import Calibration, collect
from cache.spec import build_cache, layer_methods
from cache.statistic import Statistic, Tokens
from kernels.backend import use_native
from kernels.rope import Rope, RopeArgs

VOCAB, TOL, THETA = 96, 1e-4, 10_000.0
Run = tuple[Tensor, Tensor]  # logits [B, steps + 1, V], the tokens that were fed [B, steps]


@dataclass(frozen=True)
class Sizes:
    """Of a model: what a method and a calibration ask for."""

    n_head: int = 4
    n_kv_head: int = 2
    head_dim: int = 32
    n_layer: int = 2
    dim: int = 64
    vocab_size: int = VOCAB
    windows: tuple[int | None, ...] = ()  # sliding window of each layer

    def rotary(self, max_batch: int, max_seq_len: int, device: Any = "cpu") -> Rope:
        return Rope(RopeArgs(theta=THETA), self.head_dim, 1 << 20, max_batch, max_seq_len, device)

    def cache_shape(
        self, layer: int, max_batch: int, max_seq_len: int, dtype: torch.dtype, device: Any, new: int | None = None
    ) -> CacheShape:
        window = self.windows[layer] if self.windows else None
        window = None if window is None or window >= max_seq_len else window
        return CacheShape(max_batch, max_seq_len, self.n_head, self.n_kv_head, self.head_dim, dtype,
                          torch.device(device), window, self.n_layer, new)  # fmt: skip


LLAMA = Sizes(n_head=32, n_kv_head=8, head_dim=128, n_layer=32, dim=4096, vocab_size=128256)  # Llama-3.1-8B


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Layer(nn.Module):
    def __init__(self, a: Sizes):
        super().__init__()
        self.heads = a.n_head, a.n_kv_head, a.n_kv_head
        self.wqkv = nn.Linear(a.dim, sum(self.heads) * a.head_dim, bias=False)
        self.wo = nn.Linear(a.n_head * a.head_dim, a.dim, bias=False)

    def qkv(self, x: Tensor) -> Sequence[Tensor]:
        """x [..., dim] -> q [..., Hq, D], k and v [..., Hkv, D], before rotation."""
        return self.wqkv(norm(x)).unflatten(-1, (sum(self.heads), -1)).split(self.heads, -2)


class Decoder(nn.Module):
    """Embedding, layers of attention on a residual path, logits. As model.Transformer: setup_cache, prefill, decode."""

    def __init__(self, args: Sizes, dtype: torch.dtype = torch.float32, device: Any = "cpu", seed: int = 1):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers: Any = nn.ModuleList(Layer(args) for _ in range(args.n_layer))
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.cache: Any = None
        self.calibration: Any = None  # by default what the method's statistics measure
        self.calibrations: dict[Any, Calibration] = {}
        gen = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 1.3 * p.shape[1] ** -0.5, generator=gen)
        self.to(device, dtype)

    def logits(self, x: Tensor) -> Tensor:
        return self.output(norm(x))

    def forward(self, tokens: Tensor, told: Callable[[Tokens], None] | None = None) -> Tensor:
        """Teacher forcing, without a cache: tokens [B, S] -> logits [B, S, V]. `told` of each layer, if B is 1."""
        x, S, D = self.tok_embeddings(tokens), tokens.shape[1], self.args.head_dim
        t = torch.arange(S, device=x.device)
        angle = t[:, None] * THETA ** (-torch.arange(0, D, 2, device=x.device) / D)
        turn = torch.polar(torch.ones_like(angle), angle)  # channel i turns with channel i + D / 2

        def rotate(x: Tensor) -> Tensor:
            z = torch.complex(*(half.contiguous() for half in x.float().chunk(2, -1))) * turn
            return torch.cat((z.real, z.imag), -1).to(x.dtype)

        for i, layer in enumerate(self.layers):
            q, k, v = layer.qkv(x)
            if told is not None:
                told(Tokens(i, norm(x)[0], q[0], k[0], v[0], angle.cos()[:, None], angle.sin()[:, None]))
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [B, H, S, D]
            g = q.shape[1] // k.shape[1]
            q, k, v = rotate(q), rotate(k).repeat_interleave(g, 1), v.repeat_interleave(g, 1)
            seen = t <= t[:, None]
            if self.args.windows and (window := self.args.windows[i]):
                seen = seen & (t > t[:, None] - window)
            weights = (q @ k.mT * D**-0.5).masked_fill(~seen, float("-inf")).softmax(-1)
            x = x + layer.wo((weights @ v).transpose(1, 2).flatten(2))
        return self.logits(x)

    def setup_cache(
        self, method: str, max_batch: int, max_seq_len: int, max_new_tokens: int | None = None, **knobs: Any
    ) -> None:
        a, w = self.args, self.output.weight
        at(f"setup_cache({', '.join([repr(method), str(max_batch), str(max_seq_len), *knob_text(knobs)])})")
        use_native(w)  # kernels that are still to be compiled are not compiled within a step
        shapes = [a.cache_shape(i, max_batch, max_seq_len, w.dtype, w.device, max_new_tokens) for i in range(a.n_layer)]
        needed = [s for cls, args in layer_methods(method, a.n_layer, knobs) for s in cls.needs(args)]
        rope = functools.partial(a.rotary, max_batch, max_seq_len)
        self.cache = build_cache(method, shapes, rope, lambda: self.calibration or self.measured(needed), knobs)

    def layer_tokens(self, tokens: Tensor) -> Iterator[Tokens]:
        """What statistics measure, of tokens [1, S]."""
        layers: list[Tokens] = []
        self(tokens.to(self.output.weight.device), layers.append)
        return iter(layers)

    def measured(self, statistics: Sequence[Statistic]) -> Calibration:
        """A calibration that holds these, measured once."""
        key = tuple((type(s), s.name) for s in statistics)
        if key not in self.calibrations:
            text = [prompt(200, seed) for seed in (11, 12)]
            self.calibrations[key] = collect(self.args, self.layer_tokens, text, statistics, 40)
        return self.calibrations[key]

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Right-padded prompts [B, S], lengths [B] -> logits of each row's last token [B, V]."""
        x = self.tok_embeddings(tokens)
        for layer, method in zip(self.layers, self.cache, strict=True):
            q, k, v = (y.transpose(1, 2) for y in layer.qkv(x))
            x = x + layer.wo(method.prefill(q, k, v, lengths).transpose(1, 2).flatten(2))
        return self.logits(x[torch.arange(len(x), device=x.device), lengths - 1])

    def decode(self, tokens: Tensor, pos: Tensor) -> Tensor:
        """One step: tokens [B] at positions pos [B] -> logits [B, V]. In inference mode, which a graph cannot enter."""
        x = self.tok_embeddings(tokens)
        for i, (layer, method) in enumerate(zip(self.layers, self.cache, strict=True)):
            if i + 1 < len(self.layers) and self.cache[i + 1].predicts:
                self.cache[i + 1].prefetch(self.layers[i + 1].qkv(x)[0], pos)
            x = x + layer.wo(method.decode(*layer.qkv(x), pos).flatten(1))
        return self.logits(x)

    @torch.inference_mode()
    def maintain(self, step: int) -> None:
        for method in self.cache:
            method.maintain(step)

    @torch.inference_mode()
    def reset_cache(self) -> None:
        for method in self.cache:
            method.reset()

    def cache_nbytes(self) -> dict[int, dict[str, int]]:
        return {layer: method.nbytes() for layer, method in enumerate(self.cache)}


@functools.lru_cache(8)
def tiny(
    g: int = 2,
    head_dim: int = 32,
    n_kv_head: int = 2,
    windows: tuple[int | None, ...] = (),
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    n_layer: int = 2,
) -> Decoder:
    """The decoder, g query heads a KV head; the same weights everywhere."""
    return Decoder(Sizes(g * n_kv_head, n_kv_head, head_dim, n_layer, windows=windows), dtype, device)


# ---- runs ----

_DOING = [""]


def at(what: str) -> None:
    """Note what is being done, for the report of what goes wrong in it."""
    _DOING[0] = what


def doing() -> str:
    return _DOING[0]


def knob_text(knobs: Mapping[str, Any]) -> list[str]:
    return [f"{k}={v!r}" for k, v in knobs.items()]


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(1000 * seed + n))


@torch.inference_mode()
def run(
    model: Any,
    prompts: Sequence[Tensor],
    steps: int = 40,
    feed: Tensor | None = None,
    decode: Callable[[Tensor, Tensor], Tensor] | None = None,
    pad: int = 0,
) -> Run:
    """Prefill right-padded prompts (by `pad` more than the longest), decode `feed` [B, steps] or greedily."""
    device = prompts[0].device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    # padding is no token 0 but anything: it must not matter
    tokens = torch.randint(VOCAB, (len(prompts), int(lengths.max()) + pad), device=device)
    for row, p in enumerate(prompts):
        tokens[row, : len(p)] = p
    at(f"the prefill of prompts of {lengths.tolist()} tokens")
    logits, fed = [model.prefill(tokens, lengths)], []
    for step in range(steps):
        at(f"decode step {step + 1} after prompts of {lengths.tolist()} tokens")
        fed.append(logits[-1].argmax(-1) if feed is None else feed[:, step].contiguous())
        logits.append((decode or model.decode)(fed[-1], lengths + step).clone())
        at(f"maintain({step + 1})")
        model.maintain(step + 1)
    return torch.stack(logits, 1), torch.stack(fed, 1) if fed else torch.empty(len(prompts), 0, dtype=torch.int64)


@torch.inference_mode()
def teacher(model: Any, prompts: Sequence[Tensor], fed: Tensor) -> Tensor:
    """What `run` should give a lossless cache: logits without any cache, row by row."""
    rows = [model(torch.cat((p, f))[None])[0, len(p) - 1 :] for p, f in zip(prompts, fed, strict=True)]
    return torch.stack(rows)


def buffers(model: Any) -> dict[str, Tensor]:
    return dict(model.cache.named_buffers())


def methods_of(model: Any) -> list[KVMethod]:
    """Every method in the cache, those inside of others too."""
    return [m for m in model.cache.modules() if isinstance(m, KVMethod)]


def rounds(model: Any) -> bool:
    """Whether the cache holds codes. Then a value on a rounding border may fall to either side."""
    return any(b.dtype in (torch.uint8, torch.int8, torch.float16) for b in buffers(model).values())


def poison(model: Any) -> None:
    """Fill every buffer that prompts write with what must not be read."""
    constants = {id(m.get_buffer(c)) for m in model.cache.modules() for c in getattr(m, "constants", ())}
    for b in buffers(model).values():
        if id(b) in constants:
            continue
        if b.is_floating_point():
            b.fill_(float("nan"))
        elif b.dtype == torch.uint8:
            b.fill_(255)


# Of the embeddings: by as much are layer 1's keys apart in products of other shapes (MKL on an AMD EPYC: 4e-7 of the
# largest key)
NOISE = 2e-6


@torch.no_grad()
def rounding_explains(model: Any, p: Tensor, fed: Tensor, want: Tensor, got: Tensor, tries: int = 32) -> bool:
    """Whether noise of a few float32 roundings moves one prompt's logits in the same cache, too: a code is on its
    rounding border, or two tokens compete for one place. Every step that is off by more than TOL, by a third as much.
    """
    w, off = model.tok_embeddings.weight, (got - want).abs().amax(-1)
    clean, moved = w.clone(), torch.zeros_like(off)
    try:
        for _ in range(tries):
            w.copy_(clean * (1 + NOISE * torch.randn_like(w)))
            model.reset_cache()
            moved = moved.maximum((run(model, [p], fed.shape[1], fed)[0][0] - want).abs().amax(-1))
            if ((off <= TOL) | (off <= 3 * moved)).all():
                return True
        return False
    finally:
        w.copy_(clean)
