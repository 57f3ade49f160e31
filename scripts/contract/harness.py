"""A small real Transformer with random weights to test KV-cache methods in, and functions that run it.

Its weights are scaled so that attention is far from uniform. reference.py computes what a run should give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cache.base import KVMethod
from cache.calibration import Calibration, collect
from cache.spec import layer_methods
from cache.statistic import Statistic, Tokens
from loading.named import named_args
from model import ModelArgs, Transformer
from scripts.contract.reference import forward

VOCAB, TOL = 96, 1e-4
Run = tuple[Tensor, Tensor]  # logits [B, steps + 1, V], the tokens that were fed [B, steps]
LLAMA = named_args("llama-3.1-8b")


class Model(Transformer):
    """A Transformer that notes each set-up for error reports and measures the calibration on its own weights."""

    def __init__(self, args: ModelArgs, dtype: torch.dtype = torch.float32, device: Any = "cpu", seed: int = 1):
        super().__init__(args)
        self.calibrations: dict[Any, Calibration] = {}
        self.needed: list[Statistic] = []
        gen = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 1.3 * p.shape[1] ** -0.5, generator=gen) if p.dim() == 2 else p.fill_(1)
        self.to(device, dtype).eval()

    def setup_cache(self, method, max_batch, max_seq_len, max_new_tokens=None, *, drafts=0, **knobs):
        now_doing(f"setup_cache({', '.join([repr(method), str(max_batch), str(max_seq_len), *knob_text(knobs)])})")
        layers = layer_methods(method, self.args.n_layer, knobs)
        self.needed = [s for cls, args in layers for s in cls.needs(args)]
        super().setup_cache(layers, max_batch, max_seq_len, max_new_tokens, drafts=drafts)

    def find_calibration(self) -> Calibration:
        return self.calibration or self.measured(self.needed)

    def layer_tokens(self, tokens: Tensor) -> Iterator[Tokens]:
        """The input of statistics for tokens [1, S], layer by layer."""
        layers: list[Tokens] = []
        forward(self, tokens.to(self.device), layers.append)
        return iter(layers)

    @torch.inference_mode(False)  # it is kept: the next caller may want gradients
    @torch.no_grad()
    def measured(self, statistics: Sequence[Statistic]) -> Calibration:
        """A calibration with these statistics, measured once."""
        key = tuple((type(s), s.name) for s in statistics)
        if key not in self.calibrations:
            text = [prompt(200, seed) for seed in (11, 12)]
            self.calibrations[key] = collect(self.args, self.layer_tokens, text, statistics, 40)
        return self.calibrations[key]


@functools.lru_cache(8)
@torch.inference_mode(False)
def tiny(
    g: int = 2,
    head_dim: int = 32,
    n_kv_head: int = 2,
    windows: tuple[int | None, ...] = (),
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    n_layer: int = 2,
    sizes: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Model:
    """The model with g query heads per KV head; its weights are the same in every call. sizes: powers of two by which
    queries, keys and values are multiplied; outputs are divided by that of the values."""
    args = ModelArgs(dim=64, n_layer=n_layer, n_head=g * n_kv_head, n_kv_head=n_kv_head, head_dim=head_dim, ffn_dim=96,
                     vocab_size=VOCAB, max_seq_len=1 << 20, windows=windows)  # fmt: skip
    model = Model(args, dtype, device)
    for block in model.layers:
        attention, heads = block.attention, (args.n_head, n_kv_head, n_kv_head)
        weights = (*attention.wqkv.weight.data.split([n * head_dim for n in heads]), attention.wo.weight.data)
        for weight, factor in zip(weights, (*sizes, 1 / sizes[2]), strict=True):
            weight *= factor
    return model


def class_of(name: str) -> type[KVMethod]:
    """Of a method's name, knobs behind it or none, as `snapkv,adaptive=True`."""
    return layer_methods(name, 1)[0][0]


# ---- runs ----

_DOING = [""]


def now_doing(what: str) -> None:
    """Note the current action, for the report of an error in it."""
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
    chunk: int | None = None,
) -> Run:
    """Prefill right-padded prompts (by `pad` more than the longest), decode `feed` [B, steps] or greedily."""
    device = prompts[0].device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    # padding is random tokens, which must not matter
    tokens = torch.randint(VOCAB, (len(prompts), int(lengths.max()) + pad), device=device)
    for row, p in enumerate(prompts):
        tokens[row, : len(p)] = p
    now_doing(f"the prefill of prompts of {lengths.tolist()} tokens")
    logits, fed = [model.prefill(tokens, lengths, chunk)], []
    for step in range(steps):
        now_doing(f"decode step {step + 1} after prompts of {lengths.tolist()} tokens")
        fed.append(logits[-1].argmax(-1) if feed is None else feed[:, step].contiguous())
        logits.append((decode or model.decode)(fed[-1], lengths + step).clone())
        now_doing(f"maintain({step + 1})")
        model.maintain(step + 1)
    return torch.stack(logits, 1), torch.stack(fed, 1) if fed else torch.empty(len(prompts), 0, dtype=torch.int64)


@torch.inference_mode()
def teacher(model: Any, prompts: Sequence[Tensor], fed: Tensor) -> Tensor:
    """The logits that `run` should give with a lossless cache, computed row by row without a cache."""
    rows = [forward(model, torch.cat((p, f))[None])[0, len(p) - 1 :] for p, f in zip(prompts, fed, strict=True)]
    return torch.stack(rows)


def buffers(model: Any) -> dict[str, Tensor]:
    return dict(model.cache.named_buffers())


def methods_of(model: Any) -> list[KVMethod]:
    """Every method in the cache, including those inside others."""
    return [m for m in model.cache.modules() if isinstance(m, KVMethod)]


def rounds(model: Any) -> bool:
    """Whether the cache holds codes, so that a value on a rounding border may round either way."""
    return any(b.dtype in (torch.uint8, torch.int8, torch.float16) for b in buffers(model).values())


def poison(model: Any) -> None:
    """Fill every buffer that prompts write with values that must not be read."""
    constants = {id(m.get_buffer(c)) for m in model.cache.modules() for c in getattr(m, "constants", ())}
    for b in buffers(model).values():
        if id(b) in constants:
            continue
        if b.is_floating_point():
            b.fill_(float("nan"))
        elif b.dtype == torch.uint8:
            b.fill_(255)


# Relative noise on the embeddings, which moves layer 1's keys as much as products of other shapes do (MKL on an AMD
# EPYC: 4e-7 of the largest key).
NOISE = 2e-6


@torch.no_grad()
def rounding_explains(
    model: Any, p: Tensor, fed: Tensor, want: Tensor, got: Tensor, chunk: int | None = None, tries: int = 32
) -> bool:
    """Whether noise of a few float32 roundings also moves one prompt's logits in the same cache, because a code is on
    its rounding border or two tokens compete for a slot. At every step that is off by more than TOL, the noise must
    move them at least a third as far.
    """
    w, off = model.tok_embeddings.weight, (got - want).abs().amax(-1)
    clean, moved = w.clone(), torch.zeros_like(off)
    try:
        for _ in range(tries):
            w.copy_(clean * (1 + NOISE * torch.randn_like(w)))
            model.reset_cache()
            moved = moved.maximum((run(model, [p], fed.shape[1], fed, chunk=chunk)[0][0] - want).abs().amax(-1))
            if ((off <= TOL) | (off <= 3 * moved)).all():
                return True
        return False
    finally:
        w.copy_(clean)
