"""Scores by channels, by leading coordinates, and how many tokens reach p: each version against loops in float64.

In Triton interpreted, or native on a GPU; in C++; in torch.
"""

from __future__ import annotations

import pytest
import torch
from oracle_selecting import fewest

from kernels import channel_score as channels_module
from kernels import latent_score, native, top_p
from kernels.channel_score import channel_score
from kernels.top_p import top_p_count

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VERSIONS = ["torch", "native", "triton"]
DTYPES = (torch.float32, torch.bfloat16)


def rand(seed, *size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def pick(version, by_torch, by_native, by_triton, monkeypatch):
    """The function of a version."""
    if version == "torch":
        monkeypatch.setenv("KV_FAST_BACKEND", "torch")
        return by_torch
    if version == "native" and (DEVICE.type == "cuda" or not native.available()):
        pytest.skip("no C++ here")
    return by_native if version == "native" else by_triton


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("g, d, r, T", [(1, 32, 1, 1), (3, 64, 7, 50), (5, 32, 4, 530)])
def test_channel_score(version, dtype, g, d, r, T, monkeypatch):
    score = pick(version, channel_score, channel_score.cpp, lambda *x: channels_module.launch(*x, 256), monkeypatch)
    q, keys = rand(1, 2, 2, g, r), rand(2, 3, 2, d, T, dtype=dtype)
    channels = rand(3, 2, 2, d).argsort(-1)[..., :r]
    pos = torch.tensor([T - 1, T // 2], device=DEVICE)
    keys[1, ..., T // 2 + 1 :] = float("nan")
    got = score(q, channels, keys, pos)
    assert got.shape == (2, 2, g, T)
    for b in range(2):
        n = int(pos[b]) + 1
        for h in range(2):
            want = sum(q[b, h, :, i, None].double() * keys[b, h, c, :n].double() for i, c in enumerate(channels[b, h]))
            torch.testing.assert_close(got[b, h, :, :n].double(), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C, R, D, T", [(1, 16, 64, 1), (4, 32, 128, 77), (7, 64, 64, 4100)])
def test_head_scores_of_leading_coordinates(C, R, D, T, dtype, monkeypatch):
    """Rows lie D apart, of which R are read."""
    q, x = rand(1, 2, 2, C, R), rand(2, 3, 2, T, D, dtype=dtype)
    pos = torch.tensor([T - 1, T // 3], device=DEVICE)
    x[1, :, T // 3 + 1 :] = float("nan")
    got = latent_score.head_scores(q, x[..., :R], pos)
    assert got.shape == (2, 2, C, T)
    for b, n in enumerate((pos + 1).tolist()):
        want = q[b].double() @ x[b, :, :n, :R].double().mT
        torch.testing.assert_close(got[b, ..., :n].double(), want, atol=1e-4, rtol=1e-5)
    monkeypatch.setenv("KV_FAST_BACKEND", "torch")
    by_torch = latent_score.head_scores(q, x[..., :R], pos)
    torch.testing.assert_close(got[0], by_torch[0], atol=1e-4, rtol=1e-5)


def weights_of(seed, T, last, sharp):
    """Two rows of two heads that sum to 1 up to `last`, NaN behind."""
    x = rand(seed, 2, 2, T) * sharp
    inside = torch.arange(T, device=DEVICE) <= last[:, None, None]
    return torch.where(inside, torch.where(inside, x, float("-inf")).softmax(-1), float("nan"))


ROWS = [(1, 1.0), (37, 3.0), (200, 0.0), (300, 12.0)]
SLOW = [pytest.param("triton", T, sharp, marks=pytest.mark.slow) for T, sharp in ROWS[:3]]  # interpreted


@pytest.mark.parametrize(
    "version, T, sharp", [*((v, *row) for v in VERSIONS[:2] for row in ROWS), *SLOW, ("triton", 300, 12.0)]
)
def test_top_p_count(version, T, sharp, monkeypatch):
    """Peaked, flat and tied rows; weights so small that they are zero."""
    count = pick(version, top_p_count, top_p_count.cpp, lambda *x: top_p.launch(*x, 256), monkeypatch)
    pos = torch.tensor([T - 1, T // 2], device=DEVICE)
    weights = weights_of(T, T, pos, sharp)
    for p, sinks, recent in ((0.901, 3, 20), (0.05, 0, 0), (0.5, 0, 1), (0.99, 0, 1), (1.0, 3, 0)):
        got = count(weights, pos, p, sinks, recent)
        for b, n in enumerate((pos + 1).tolist()):
            forced = {t for t in range(n) if t < sinks or t >= n - recent}
            for h in range(2):
                row = weights[b, h, :n].double().tolist()
                lower, upper = (fewest(row, q, forced, n) for q in (p - 1e-6, min(1.0, p + 1e-6)))
                assert lower <= int(got[b, h]) <= upper, (p, sinks, recent, b, h)
        if version == "triton" and T == 300:
            break  # interpreted, every step of the bisection takes long


@pytest.mark.parametrize("T", [4096, 20000])
def test_top_p_count_of_long_rows(T):
    """Where C++ fills its bins; on a GPU, where Triton takes several blocks."""
    weights, pos = weights_of(T, T, torch.tensor([T - 1, T - 100], device=DEVICE), 3.0), torch.tensor([T - 1, T - 100])
    sorted_ = weights.nan_to_num(0).sort(-1, descending=True).values.double().cumsum(-1)
    for p in (0.3, 0.95):
        want = (sorted_ < p).sum(-1) + 1
        assert (top_p_count(weights, pos.to(DEVICE), p, 0, 0) - want).abs().max() <= 1


def test_they_are_registered(monkeypatch):
    q, keys, pos = rand(1, 1, 2, 3, 4), rand(2, 1, 2, 32, 40), torch.tensor([39], device=DEVICE)
    channels, weights = rand(3, 1, 2, 32).argsort(-1)[..., :4], rand(4, 1, 2, 40).softmax(-1)
    wants = channel_score(q, channels, keys, pos) * 2, top_p_count(weights, pos, 0.8, 1, 2) + 1
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")
    steps = [lambda *x: channel_score(*x) * 2, lambda *x: top_p_count(*x, 0.8, 1, 2) + 1]
    for step, given, want in zip(steps, ((q, channels, keys, pos), (weights, pos)), wants, strict=True):
        torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(*given), want)
