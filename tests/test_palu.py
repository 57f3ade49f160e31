"""palu against an oracle that cuts the weights themselves, by the whitened SVD of the paper, and runs them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_quantized import hadamard, through_bits
from oracles import attention, causal_attention, rotate
from torch.utils._pytree import tree_map

from cache.calibration import Calibration
from cache.spec import make_args, method_class
from cache.statistic import Tokens
from kernels.group_attention import group_attention
from kernels.quantize import quantize
from model import ModelArgs

DIM = 80  # of the model's stream

CASES = {  # knobs, (g, Hkv, D), prompt lengths, steps, the rank that follows
    "half": (dict(rank=0.5), (2, 4, 32), (1, 20), 4, 64),
    "thirty": (dict(rank=0.7), (1, 8, 32), (9,), 3, 96),
    "per-head": (dict(rank=0.5, group=1), (2, 2, 64), (3, 12), 3, 32),
    "all-of-40": (dict(rank=1.0, group=1), (2, 2, 40), (3, 12), 3, 40),  # no multiple of 32
    "joint": (dict(rank=0.25, group=100), (1, 4, 32), (12,), 3, 32),
    "fewer-heads": (dict(rank=0.5), (4, 2, 32), (7,), 3, 32),
    "3-bits": (dict(rank=0.5, bits=3), (1, 4, 32), (2, 15), 4, 64),
    "4-bits": (dict(rank=0.5, bits=4, group=2), (2, 2, 64), (8,), 3, 64),
    "2-bits-of-two-groups": (dict(rank=0.5, bits=2, group=2), (1, 4, 64), (8,), 3, 64),
    "3-bits-orthonormal": (dict(rank=0.5, bits=3, factors="orthonormal"), (1, 4, 32), (2, 15), 4, 64),
}


def model(seed: int, g: int, h: int, d: int):
    """Weights of keys and values [DIM, h * d], their biases, and what makes inputs of other than equal directions."""
    gen = torch.Generator().manual_seed(seed)
    weights = [torch.randn(DIM, h * d, generator=gen, dtype=torch.float64) * DIM**-0.5 for _ in "kv"]
    biases = [2 * torch.randn(h * d, generator=gen, dtype=torch.float64) for _ in "kv"]
    mix = torch.randn(DIM, DIM, generator=gen, dtype=torch.float64) * torch.linspace(0.3, 0.03, DIM)[:, None]
    return weights, biases, mix, gen


def cut(w: np.ndarray, m: np.ndarray, rank: int) -> np.ndarray:
    """W [dim, width] of rank `rank`: m = L L^T, the SVD of L^T W is cut and multiplied by the inverse."""
    half = np.linalg.cholesky(m).T
    u, s, vt = np.linalg.svd(half @ w, full_matrices=False)
    return np.linalg.solve(half, u[:, :rank] * s[:rank]) @ vt[:rank]


def factors(w: np.ndarray, m: np.ndarray, rank: int, balanced: bool) -> tuple[np.ndarray, np.ndarray]:
    """The same as two factors: published code gives each the square root of S; else the first has all of it. A vector's
    sign, which an SVD leaves open, makes its largest channel positive."""
    half = np.linalg.cholesky(m).T
    u, s, vt = np.linalg.svd(half @ w, full_matrices=False)
    sign = np.array([np.sign(row[np.abs(row).argmax()]) for row in vt])
    first, second = (np.sqrt(s), np.sqrt(s)) if balanced else (s, np.ones_like(s))
    return (np.linalg.solve(half, u * first) * sign)[:, :rank], (vt * (second * sign)[:, None])[:rank]


def setting(knobs, shape, lengths, steps, seed=0):
    """The method, its inputs x [B, T, DIM], q [B, Hq, T, D], and the weights."""
    g, h, d = shape
    (wk, wv), (bk, bv), mix, gen = model(seed, g, h, d)
    sample = torch.randn(600, DIM, generator=gen, dtype=torch.float64) @ mix
    k, v = ((sample @ w + b).view(-1, h, d) for w, b in ((wk, bk), (wv, bv)))
    cls, none = method_class("palu"), torch.zeros(600, 1, d // 2)
    t = Tokens(0, sample, k, k, v, none, none, bk.view(h, d).float(), bv.view(h, d).float())
    statistic = cls.statistics[0]
    parts = statistic.finish({name: x.double() / 600 for name, x in statistic.measure(t).items()})
    calib = Calibration({f"layers.0.palu.{name}": x.float() for name, x in parts.items()}, 1)
    B, T = len(lengths), max(lengths) + steps
    args = ModelArgs(n_head=g * h, n_kv_head=h, head_dim=d, n_layer=1)
    cache = args.cache_shape(0, B, T + 2, torch.float32, torch.device("cpu"))
    method = cls(make_args(cls, knobs), cache, 0, args.rotary(B, T + 2, "cpu"), calib)
    x = torch.randn(B, T, DIM, generator=gen, dtype=torch.float64) @ mix
    q = torch.randn(B, g * h, T, d, generator=gen)
    return method, x, q, (wk, wv), (bk, bv), sample.T @ sample / 600, calib


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_with_its_weights_cut(case):
    """Prompt and steps. Quantized, what is rounded is x times the first factor of the weights, turned."""
    knobs, (g, h, d), lengths, steps, rank = CASES[case]
    method, x, q, weights, biases, m, calib = setting(knobs, (g, h, d), lengths, steps)
    assert method.rank == rank
    bits, s = knobs.get("bits", 16), min(knobs.get("group", 4), h)
    full = [(x @ w + b).view(*x.shape[:2], h, d).transpose(1, 2).float() for w, b in zip(weights, biases, strict=True)]
    seen = []
    for w, b in zip(weights, biases, strict=True):
        out = np.zeros((*x.shape[:2], h * d))
        for i in range(0, h * d, s * d):
            at = slice(i, i + s * d)
            if bits == 16:
                out[..., at] = x.numpy() @ cut(w[:, at].numpy(), m.numpy(), rank) + b[at].numpy()
                continue
            down, up = factors(w[:, at].numpy(), m.numpy(), rank, knobs.get("factors") != "orthonormal")
            assert np.abs(down @ up - cut(w[:, at].numpy(), m.numpy(), rank)).max() < 1e-9
            for row, t in np.ndindex(*x.shape[:2]):
                coded = through_bits(x[row, t].numpy() @ down @ hadamard(rank), bits)
                out[row, t, at] = coded @ hadamard(rank).T @ up + b[at].numpy()
        seen.append(out.reshape(*x.shape[:2], h, d).transpose(0, 2, 1, 3))
    T = x.shape[1]
    Q, K = (np.stack([rotate(y[:, :, i], i) for i in range(T)], 2) for y in (q.double().numpy(), seen[0]))
    S, length = max(lengths), torch.tensor(lengths)
    tol = 2e-4 if bits == 16 else 2e-2  # a coordinate on a border of codes
    y = method.prefill(q[:, :, :S], full[0][:, :, :S], full[1][:, :, :S], length).numpy()
    want = causal_attention(Q[:, :, :S], K[:, :, :S], seen[1][:, :, :S])
    for b, n in enumerate(lengths):
        assert np.abs(y[b, :, :n] - want[b, :, :n]).max() < tol
    row, off = torch.arange(len(lengths)), []
    for step in range(steps):
        pos = length + step
        got = method.decode(q[row, :, pos], full[0][row, :, pos], full[1][row, :, pos], pos).numpy()
        for b, head in np.ndindex(len(lengths), g * h):
            n = lengths[b] + step + 1
            keys, values = K[b, head // g, :n], seen[1][b, head // g, :n]
            off.append(np.abs(got[b, head] - attention(Q[b, head, n - 1], list(keys), list(values))).max())
    assert max(off) < tol and np.median(off) < 2e-4, f"{max(off)}, {np.median(off)}"


def test_coordinates_are_turned_before_they_are_quantized():
    """By factors of which one divides by what the other multiplies with; whole ones need a single basis."""
    whole, alike, method = (
        setting(dict(rank=0.5) | more, (1, 4, 32), (4,), 1)[0].keys
        for more in ({}, dict(bits=3, factors="orthonormal"), dict(bits=3))
    )
    u, one, down, up = (x[0].double().numpy() for x in (whole.basis, alike.basis, method.down, method.basis))
    assert np.abs(one - u @ hadamard(64)).max() < 1e-5 and whole.down is whole.basis and alike.down is alike.basis
    assert np.abs(down.T @ up - np.eye(64)).max() < 1e-4 and np.abs(down @ up.T - u @ u.T).max() < 1e-4
    root = np.linalg.norm(u.T @ up, axis=1)
    assert (np.diff(root) < 0).all() and root[0] > 1.5 * root[-1]


def test_some_heads_alone():
    """What `razor` asks for: the statistic as if there were no other heads."""
    calib = setting({}, (1, 4, 32), (4,), 1)[-1]
    statistic = method_class("palu").statistics[0]
    got = statistic.take_heads(calib.parts(0, "palu"), [2, 0], 4)
    assert got["k_basis"].shape == (64, 64) and got["v_bias"].shape == (2, 32)
    whole = calib.parts(0, "palu")
    m = (whole["k_basis"].double() * whole["k_eigenvalues"].double()) @ whole["k_basis"].double().T
    rows = torch.cat((torch.arange(64, 96), torch.arange(0, 32)))
    want = m[rows][:, rows]
    back = (got["k_basis"].double() * got["k_eigenvalues"].double()) @ got["k_basis"].double().T
    assert (back - want).abs().max() < 1e-3 * want.abs().max()


@pytest.mark.parametrize("name, share", [("palu-30", 0.13), ("palu-50", 0.09)])
def test_bytes_are_those_of_the_paper(name, share):
    """SALS, Table 3 (Llama-2-7B): 0.13 and 0.09 of a cache in 16 bits; the ranks are multiples of 32."""
    args = ModelArgs(n_head=32, n_kv_head=32, head_dim=128, n_layer=1)
    cls = method_class("palu")
    knobs = dict(rank=0.7 if name == "palu-30" else 0.5, bits=3)
    shape = args.cache_shape(0, 1, 4096, torch.bfloat16, torch.device("meta"))
    method = cls(make_args(cls, knobs), shape, 0, args.rotary(1, 1, "meta"))
    assert abs(method._tokens(1) / (2 * 32 * 128 * 2) - share) < 0.008  # scales included


# ---- the operator: C++ and Triton against torch ----

OPERATOR = [  # bits, groups, KV heads a group, g, D, r, T, positions
    (16, 2, 4, 4, 64, 96, 70, (0, 69)),
    (16, 2, 1, 2, 40, 40, 33, (32,)),
    (3, 1, 2, 3, 32, 32, 40, (33,)),
    (4, 2, 1, 1, 128, 64, 600, (31, 599)),
    (2, 1, 2, 2, 96, 160, 50, (49,)),
    (8, 1, 4, 1, 32, 128, 33, (32,)),
]


def operands(bits, groups, s, g, d, r, T, places, dtype=torch.float32):
    """Of `group_attention`, with NaN in what was not written."""
    gen, B = torch.Generator().manual_seed(bits), len(places)
    pos, width = torch.tensor(places), s * d
    stored = []
    for _ in "kv":
        x = torch.randn(B + 1, groups, T, r, generator=gen)
        parts = quantize(x, bits, group=r) if bits < 16 else (x.to(dtype),)
        for b, p in enumerate(places):
            parts[-1][b, :, p + 1 :] = torch.nan
        stored.append(parts)
    bases = [torch.linalg.qr(torch.randn(groups, width, r, generator=gen))[0].contiguous().to(dtype) for _ in "kv"]
    biases = [torch.randn(groups, width, generator=gen) for _ in "kv"]
    angles = torch.rand(1 if T % 2 else B, T, d // 2, generator=gen) * 6
    q = torch.randn(B, groups * s * g, d, generator=gen).to(dtype)
    return q, *stored, bits, *bases, *biases, pos, angles.cos(), angles.sin()


def check_operator(case, dtype, backend, monkeypatch, device="cpu"):
    given = operands(*case, dtype=dtype)
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    want = group_attention(*given).float()
    monkeypatch.setattr("kernels.backend.BACKEND", backend)
    got = group_attention(*tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, given)).float().cpu()
    assert (got - want).abs().max() < (1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.cpp
@pytest.mark.parametrize("case", OPERATOR, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cpp_is_torch(case, dtype, monkeypatch):
    """In bf16 by the processor's matrix unit, where it has one."""
    monkeypatch.setattr("kernels.backend.BACKEND", "")
    check_operator(case, dtype, "", monkeypatch)


@pytest.mark.parametrize("case", OPERATOR, ids=str)
def test_triton_is_torch(case, kernel_device, monkeypatch):
    check_operator(case, torch.float32, "triton", monkeypatch, kernel_device)
