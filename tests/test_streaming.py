"""streaming against an oracle that keeps every token and picks: the first few, and the newest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import streaming

from cache.spec import make_args
from kv_methods.streaming import Streaming
from model import ModelArgs

CASES = {  # sinks, recent, prompt lengths, steps
    "paper-shaped": (4, 28, (40, 3, 31, 33), 20),
    "ring-wraps-often": (2, 5, (1, 2, 3, 50), 60),
    "no-sinks": (0, 7, (1, 6, 7, 8, 23), 25),
    "recent-of-one": (3, 1, (2, 5), 12),
    "only-sinks-filled": (30, 10, (2, 9), 12),
    "over-the-context": (4, 1000, (5, 64), 20),
    "prompt-far-over": (4, 8, (100, 12, 13), 20),
}


def layer(knobs, g, h, d, batch, T, window=None):
    args = ModelArgs(n_head=g * h, n_kv_head=h, head_dim=d, n_layer=1, windows=(window,))
    shape = args.cache_shape(0, batch, T, torch.float32, "cpu")
    return Streaming(make_args(Streaming, knobs), shape, 0, args.rotary(batch, T))


def drive(method, q, k, v, lengths, steps):
    """Prefill and decode -> [steps, B, Hq, D]."""
    S, length, out = max(lengths), torch.tensor(lengths), []
    method.prefill(q[:, :, :S], k[:, :, :S], v[:, :, :S], length)
    for step in range(steps):
        pos = length + step
        now = [torch.stack([x[b, :, p] for b, p in enumerate(pos.tolist())]) for x in (q, k, v)]
        out.append(method.decode(*now, pos))
        method.maintain(step + 1)
    return torch.stack(out)


def compare(knobs, lengths, steps, shape=(2, 2, 32), window=None):
    g, h, d = shape
    B, T = len(lengths), max(lengths) + steps
    q, k, v = torch.randn(B, g * h, T, d), torch.randn(B, h, T, d), torch.randn(B, h, T, d)
    method = layer(knobs, g, h, d, B, T, window)
    out = drive(method, q, k, v, lengths, steps)
    q, k, v = (x.double().numpy() for x in (q, k, v))
    for step, b, i in np.ndindex(steps, B, h):
        p, group = lengths[b] + step, slice(i * g, i * g + g)
        want = streaming(q[b, group, p], k[b, i, : p + 1], v[b, i, : p + 1], p, knobs["sinks"], knobs["recent"],
                         knobs.get("positions", "original"), window)  # fmt: skip
        error = np.abs(out[step, b, group].double().numpy() - want).max()
        assert error < 1e-4, f"step {step} row {b} head {i}: off by {error:.1e}"
    return method


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case, positions):
    sinks, recent, lengths, steps = CASES[case]
    compare(dict(sinks=sinks, recent=recent, positions=positions), lengths, steps)


@pytest.mark.parametrize("g, d, positions", [(1, 128, "original"), (3, 64, "cache"), (8, 96, "original")])
def test_shapes(g, d, positions):
    compare(dict(sinks=3, recent=9, positions=positions), (1, 12, 30), 15, (g, 1, d))


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("recent", [5, 16, 100])
def test_model_window_bounds_the_ring_and_hides_the_sinks(recent, positions):
    method = compare(dict(sinks=4, recent=recent, positions=positions), (3, 15, 17, 40), 20, window=16)
    assert method.k.shape[2] == 4 + min(recent, 16)


def test_cache_positions_differ_only_once_tokens_are_forgotten():
    """Before that a token's place in the cache is its place in the text."""
    q, k, v = torch.randn(1, 2, 60, 32), torch.randn(1, 1, 60, 32), torch.randn(1, 1, 60, 32)
    a, b = (drive(layer(dict(sinks=4, recent=16, positions=p), 2, 1, 32, 1, 60), q, k, v, [10], 50)[:, 0]
            for p in ("original", "cache"))  # fmt: skip
    assert torch.allclose(a[:10], b[:10], atol=1e-5)
    assert all(not torch.allclose(x, y, atol=1e-3) for x, y in zip(a[12:], b[12:], strict=True))
