"""kernels/native against float64 oracles and the torch versions; how it is compiled; builds for other instruction sets.

The oracles are written from the docstrings of kernels/: loops over rows and heads in numpy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled import sampled
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from engine.compiled import compiler_options
from kernels import backend, latent_attention, native
from kernels.codebook import e4m3, lloyd_max
from kernels.dense_attention import decode_attention
from kernels.gather_attention import gather_attention
from kernels.label_score import label_score, store_labels
from kernels.latent import LatentTokens, append_token
from kernels.native import build
from kernels.op import OPERATIONS, Declarations
from kernels.packed_attention import packed_attention
from kernels.packed_gather_attention import FullPrecisionTokens, PackedTokens, packed_gather_attention
from kernels.quantize import unpack
from kernels.quantized_attention import QuantizedTokens, quantized_append
from kernels.select import budget_select, topk_select
from kernels.sign_codes import lut_score
from tests.test_weights import check_product

ROOT = Path(__file__).resolve().parent.parent
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
# around the borders of C++: N = 32 tokens of a block, BATCH = 256, CHUNK = 2048, SCORED = 4096, 4 * SAMPLE = 4096
SHORT = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 255, 256, 257)
LONG = (2047, 2048, 2049, 2081, 4095, 4096, 4097, 4353, 6200, 8193)

quick = settings(max_examples=20, deadline=None, derandomize=True)
many = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 2**31 - 1)


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch):
    monkeypatch.delenv("KV_FAST_BACKEND", raising=False)
    if not native.available():
        pytest.skip("no C++ compiler")


@contextmanager
def torch_versions():
    with pytest.MonkeyPatch.context() as m:
        m.setenv("KV_FAST_BACKEND", "torch")
        with Operators() as operators:
            yield
        assert not operators.called


class Operators(TorchDispatchMode):
    """Notes our operators in C++, and what they are called with."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kv_fast" and func._overloadname == "cpp":
            self.called.append((func, args))
        return func(*args, **(kwargs or {}))


@contextmanager
def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(before)


def rand(gen, *size, dtype=torch.float32):
    return torch.randn(size, generator=gen).to(dtype)


def randint(gen, low, high, *size):
    return torch.randint(low, high, size, generator=gen)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def strided(x, layout):
    """The same numbers, with other strides of all dimensions but the last; what is between them is NaN."""
    if layout == "heads inside":  # as a projection leaves them: [B, T, H, D]
        return x.transpose(1, -2).contiguous().transpose(1, -2)
    if layout == "part":  # of wider rows, at an address that is no multiple of a vector
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 7), NAN)
        wide[..., 3:-4] = x
        return wide[..., 3:-4]
    return x


LAYOUTS = ("whole", "heads inside", "part")


def array(x):
    return x.double().numpy()


def softmax_mean(q, keys, values, weights=None):
    """One query [D] over [n, D] keys and values, of which each counts as often as its weight; zeros of none."""
    if len(keys) == 0:
        return np.zeros(len(q))
    with np.errstate(divide="ignore"):
        logits = keys @ q / np.sqrt(len(q)) + (0 if weights is None else np.log(weights))
    p = np.exp(logits - logits.max())
    return p @ values / p.sum()


def check(got, want, dtype, size=1.0):
    """size: of the logits; an error of theirs is one of the result."""
    assert got.dtype == dtype and got.isfinite().all()
    tol = 3e-5 * size * (1 + np.abs(want)) + (2**-8 * np.abs(want) if dtype == torch.bfloat16 else 0)
    error = np.abs(array(got) - want)
    assert (error <= tol).all(), f"off by {(error / tol).max():.3g} times the tolerance"


def check_torch(got, by_torch, rows, dtype, size):
    """rows [B] or [B, Hq] bool: where torch gives numbers. It rounds weights to bf16."""
    tol = size * (1e-4 if dtype == torch.float32 else 0.05)
    assert torch.allclose(got[rows].float(), by_torch[rows].float(), atol=tol, rtol=tol)


def check_bits(run, tensors):
    """Two threads give the bits of one; of bf16 the result is that of fp32, rounded to the nearest, ties to even.

    Where bf16 is multiplied as it is, what lies in the middle may be rounded the other way.
    """
    with threads(1):
        one = run(*tensors)
    with threads(2):
        two = run(*tensors)
    assert torch.equal(one, two)
    if one.dtype == torch.bfloat16:
        exact = run(*(x.float() for x in tensors))
        if not build.library().kvf_multiplies_pairs():
            assert torch.equal(one, exact.bfloat16())
            return one
        half_a_step = 2.0 ** (exact.frexp().exponent - 9)
        assert ((one.float() - exact).abs() <= half_a_step + 3e-5 * (1 + exact.abs())).all()
    return one


# ---- attention over a range of slots ----


@st.composite
def shapes(draw, lengths=SHORT):
    return dict(
        seed=draw(seeds), B=draw(st.integers(1, 3)), H=draw(st.integers(1, 3)), g=draw(st.integers(1, 8)),
        D=draw(st.sampled_from(HEAD_DIMS)), T=draw(st.sampled_from(lengths)), dtype=draw(st.sampled_from(DTYPES)),
        size=draw(st.sampled_from((1.0, 8.0))), spare=draw(st.integers(0, 1)),
    )  # fmt: skip


@st.composite
def decode_cases(draw, lengths=SHORT):
    case = draw(shapes(lengths))
    T = case["T"]
    # equal, ragged, full and empty rows
    spans = st.sampled_from(((0, T), (0, 1), (T - 1, T), (0, 0), (T, T), (T // 2, T // 3), (T // 3, T)))
    case["spans"] = draw(st.lists(spans, min_size=case["B"], max_size=case["B"]))
    extra = st.lists(st.sampled_from((0, 1, 7, 100_000)), min_size=case["B"], max_size=case["B"])
    return case | dict(extra=draw(st.none() | extra), layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)))


def decode_is_float64(seed, B, H, g, D, T, dtype, size, spare, spans, extra, layouts=LAYOUTS[:1] * 3):
    """`decode_attention`, or, with numbers of tokens `extra`, `packed_attention`."""
    gen = generator(seed)
    q = rand(gen, B, H * g, D, dtype=dtype) * size
    k, v = rand(gen, B + spare, H, T, D, dtype=dtype), rand(gen, B + spare, H, T, D, dtype=dtype)
    spans = spans if extra is None else [(0, hi) for _, hi in spans]
    start, stop = torch.tensor(spans).unbind(1)
    t = torch.arange(T)
    filled = ((t >= start[:, None]) & (t < stop[:, None]))[:, None, :, None]
    for x, y in ((k, NAN), (v, INF)):
        x[:B] = torch.where(filled, x[:B], y)
        x[B:] = NAN
    q, k, v = (strided(x, layout) for x, layout in zip((q, k, v), layouts, strict=True))
    mean = ()
    if extra is not None:
        count = torch.tensor(extra)
        mean = [rand(gen, B + spare, H, D).masked_fill((count == 0).repeat(2)[: B + spare, None, None], NAN)
                for _ in range(2)] + [count]  # fmt: skip

    def run(q, k, v, least=0):
        last = stop.clamp(min=least)
        return decode_attention(q, k, v, start, stop) if extra is None else packed_attention(q, k, v, last, *mean)

    got = check_bits(run, (q, k, v))
    want = np.zeros(q.shape)
    for b, i in np.ndindex(B, H * g):
        span = slice(*spans[b]) if spans[b][0] < spans[b][1] else slice(0)
        keys, values, weights = array(k[b, i // g, span]), array(v[b, i // g, span]), None
        if extra is not None and extra[b]:
            keys, values = (np.concatenate((x, array(y[b, i // g])[None]))
                            for x, y in ((keys, mean[0]), (values, mean[1])))  # fmt: skip
            weights = np.ones(len(keys))
            weights[-1] = extra[b]
        want[b, i] = softmax_mean(array(q[b, i]), keys, values, weights)
    check(got, want, dtype, size)
    with torch_versions():
        check_torch(got, run(q, k, v, 1), stop > start, dtype, size)


@quick
@given(decode_cases())
def test_decode(case):
    decode_is_float64(**case)


@pytest.mark.parametrize(("T", "extra"), [(2049, None), (4200, None), (4097, [3, 0]), (2048, [100_000, 1])])
def test_decode_in_parts(T, extra):
    spans = [(0, T), (T // 4, T - 1)]  # the parts of a row begin where it does
    decode_is_float64(0, 2, 1, 3, 64, T, torch.float32, 8.0, 1, spans, extra)
    decode_is_float64(1, 2, 2, 1, 16, T, torch.bfloat16, 1.0, 0, spans, extra)


@pytest.mark.slow
@many
@given(decode_cases(SHORT + LONG))
def test_decode_matrix(case):
    decode_is_float64(**case)


@pytest.mark.parametrize("g", (12, 16, 17))
def test_many_heads_a_group(g):
    decode_is_float64(0, 1, 2, g, 256, 70, torch.float32, 1.0, 0, [(0, 70)], None)


def test_heads_of_different_lengths():
    """stop and count [B, Hkv]: every head a row of its own."""
    gen = generator(0)
    q, k, v = rand(gen, 2, 6, 32), rand(gen, 3, 2, 40, 32), rand(gen, 3, 2, 40, 32)
    mean = rand(gen, 3, 2, 32), rand(gen, 3, 2, 32), torch.tensor([[0, 2], [9, 1]])
    stop = torch.tensor([[1, 40], [33, 7]])
    got = packed_attention(q, k, v, stop, *mean)
    for b, h in np.ndindex(2, 2):
        heads, row, head = slice(3 * h, 3 * h + 3), slice(b, b + 1), slice(h, h + 1)
        parts = (x[row, head] for x in (k, v))
        one = packed_attention(
            q[row, heads], *parts, stop[b, head], mean[0][row, head], mean[1][row, head], mean[2][b, head]
        )
        assert torch.equal(got[b, heads], one[0])
    with torch_versions():
        assert torch.allclose(got, packed_attention(q, k, v, stop, *mean), atol=1e-5)


def test_logits_that_rise_and_fall_by_more_than_a_float_holds():
    """Each block's largest logit is far above, or far below, that of the one before: what was summed is rescaled."""
    q, k, v = torch.zeros(1, 2, 32), torch.zeros(1, 1, 200, 32), rand(generator(0), 1, 1, 200, 32)
    q[:, 0, 0], q[:, 1, 0] = 1, -1
    for steps in (1.0, 5.0, 40.0, 1000.0):
        k[..., 0] = torch.arange(200) * steps
        got = decode_attention(q, k, v, torch.tensor([0]), torch.tensor([200]))
        want = [softmax_mean(array(x), array(k[0, 0]), array(v[0, 0])) for x in q[0]]
        check(got[0], np.stack(want), torch.float32, 30.0)


def test_infinite_and_nan_keys():
    """Keys at minus infinity weigh nothing, wherever they are; NaN is not hidden."""
    gen = generator(0)
    q, k, v = rand(gen, 1, 1, 16).abs(), rand(gen, 1, 1, 100, 16), rand(gen, 1, 1, 100, 16)
    span = torch.tensor([0]), torch.tensor([100])
    for low in (slice(0, 40), slice(32, 64), slice(50, 100)):
        x = k.clone()
        x[0, 0, low] = -INF
        rest = [t for t in range(100) if t not in range(*low.indices(100))]
        want = softmax_mean(array(q[0, 0]), array(k[0, 0, rest]), array(v[0, 0, rest]))
        check(decode_attention(q, x, v, *span)[0, 0], want, torch.float32)
    for dtype, at in product(DTYPES, (0, 31, 99)):
        x = k.clone()
        x[0, 0, at, 3] = NAN
        assert decode_attention(*(y.to(dtype) for y in (q, x, v)), *span).isnan().all()
    assert decode_attention(q * NAN, k, v, *span).isnan().all()


def test_exponential_is_accurate():
    """Two keys: the share of one is 1 / (1 + 2^x), measured down to what fp32 holds."""
    x = torch.linspace(0, 80, 5001, dtype=torch.float64)
    q = torch.zeros(5001, 1, 16)
    q[:, 0, 0] = x.float() * 4  # sqrt(16)
    k, v = torch.zeros(5001, 1, 2, 16), torch.zeros(5001, 1, 2, 16)
    k[:, 0, 1, 0], v[:, 0, 1, 0] = -1, 1
    got = decode_attention(q, k, v, torch.zeros(5001, dtype=torch.int64), torch.full((5001,), 2))[:, 0, 0].double()
    want = 1 / (1 + (q[:, 0, 0].double() / 4).exp())
    # of the exponent itself, which is a product of fp32: half a unit in its last place
    assert ((got / want - 1).abs() <= 4e-7 + 1.5e-7 * x).all()


# ---- attention over a list ----


@st.composite
def gather_cases(draw, lengths=SHORT):
    case = draw(shapes(lengths))
    K = draw(st.sampled_from([n for n in (0, 1, 5, 31, 32, 33, 64, 100, *LONG) if n <= case["T"] + 3]))
    return case | dict(
        K=K, counts=draw(st.lists(st.sampled_from((0, 1, K // 2, K, K + 5)), min_size=9, max_size=9)),
        one_list=draw(st.booleans()), one_count=draw(st.booleans()),
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
    )  # fmt: skip


def gather_is_float64(seed, B, H, g, D, T, dtype, size, spare, K, counts, one_list, one_count, layouts=LAYOUTS[:1] * 3):
    gen = generator(seed)
    q = rand(gen, B, H * g, D, dtype=dtype) * size
    k, v = rand(gen, B + spare, H, T, D, dtype=dtype), rand(gen, B + spare, H, T, D, dtype=dtype)
    idx = torch.rand(B, 1 if one_list else H, T, generator=gen).argsort(-1)
    idx = idx.repeat(1, 1, 4)[..., :K]  # a view of wider rows; slots may repeat
    count = torch.tensor(counts[: B * H]).view(B, H)[:, : 1 if one_count else H]
    lists, numbers = idx.expand(B, H, K), count.expand(B, H).clamp(max=K)
    listed = torch.zeros(B + spare, H, T, dtype=torch.bool)
    for b, h in np.ndindex(B, H):
        listed[b, h, lists[b, h, : numbers[b, h]]] = True
    k, v = k.masked_fill(~listed[..., None], NAN), v.masked_fill(~listed[..., None], INF)
    q, k, v = (strided(x, layout) for x, layout in zip((q, k, v), layouts, strict=True))
    if not (one_list and not one_count):  # else one head may read further than another
        past = (
            torch.arange(K) >= count.amax(1, keepdim=True)[..., None]
            if one_list
            else torch.arange(K) >= count[..., None]
        )
        idx = torch.where(past, 10**15, idx)

    got = check_bits(lambda q, k, v: gather_attention(q, k, v, idx, count), (q, k, v))
    want = np.zeros(q.shape)
    for b, i in np.ndindex(B, H * g):
        slots = lists[b, i // g, : numbers[b, i // g]]
        want[b, i] = softmax_mean(array(q[b, i]), array(k[b, i // g, slots]), array(v[b, i // g, slots]))
    check(got, want, dtype, size)
    if K:
        with torch_versions():
            by_torch = gather_attention(q.contiguous(), k, v, idx.clamp(max=0) if not count.all() else idx, count)
        if count.all():
            check_torch(got, by_torch, slice(None), dtype, size)


@quick
@given(gather_cases())
def test_gather(case):
    gather_is_float64(**case)


@pytest.mark.slow
@many
@given(gather_cases(SHORT + LONG))
def test_gather_matrix(case):
    gather_is_float64(**case)


def test_gather_in_parts():
    gather_is_float64(0, 2, 2, 3, 64, 2100, torch.float32, 8.0, 1, 2090, [2090, 2049, 2048, 7], False, False)


# ---- attention over packed tokens ----


# ---- attention in latent spaces ----


RANKS = (1, 2, 7, 16, 31, 77, 128)


@st.composite
def latent_cases(draw, lengths=SHORT):
    return dict(
        seed=draw(seeds), B=draw(st.integers(1, 3)), H=draw(st.integers(1, 3)), g=draw(st.integers(1, 8)),
        r=draw(st.sampled_from(RANKS)), dtype=draw(st.sampled_from(DTYPES)), C=draw(st.sampled_from(lengths)),
        places=draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)),
    )  # fmt: skip


def lowrank_is_float64(seed, B, H, g, r, dtype, C, places, r_v, F=5, D=32, shared=False):
    gen = generator(seed)
    q = rand(gen, B, H * g, D, dtype=dtype)
    # coordinate by coordinate in a buffer that ends with the last slot, and a row of it more than the batch
    k, v = (rand(gen, B + 1, H, n, C, dtype=dtype)[:B].mT for n in (r, r_v))
    bases = [rand(gen, 1 if shared else B, H, D, n) / n**0.5 for n in (r, r_v)]
    k_full, v_full = (rand(gen, B + 1, H, F, D, dtype=dtype)[:B] for _ in range(2))
    filled = torch.rand(B, F, generator=gen) < 0.6
    filled[:, F // 2] = True
    stored = torch.tensor([round(x * C) for x in places[:B]])
    for b, n in enumerate(stored.tolist()):
        k[b, :, n:] = v[b, :, n:] = NAN
        k_full[b, :, ~filled[b]] = v_full[b, :, ~filled[b]] = NAN
    args = (q, k, v, *bases, stored, k_full, v_full, filled)
    y = OPERATIONS["lowrank_attention"].cpp(*args)
    with threads(1):
        assert torch.equal(y, OPERATIONS["lowrank_attention"].cpp(*args))
    for b, h in product(range(B), range(H * g)):
        n, at, there = stored[b].item(), 0 if shared else b, filled[b].numpy()
        keys, values = (
            np.concatenate((array(x[b, h // g, :n]) @ array(u[at, h // g]).T, array(full[b, h // g])[there]))
            for x, u, full in zip((k, v), bases, (k_full, v_full), strict=True)
        )
        tol = 1e-4 if dtype == torch.float32 else 0.02
        assert np.allclose(array(y[b, h]), softmax_mean(array(q[b, h]), keys, values), atol=tol, rtol=tol)


@quick
@given(latent_cases(), st.sampled_from(RANKS), st.sampled_from((1, 5, 70)), st.sampled_from((16, 96)), st.booleans())
def test_lowrank(case, r_v, F, D, shared):
    lowrank_is_float64(**case, r_v=r_v, F=F, D=D, shared=shared)


@pytest.mark.parametrize("g", (1, 2, 3, 4, 5, 8, 17))
def test_lowrank_in_parts(g):
    lowrank_is_float64(g, 2, 2, g, 77, torch.float32, 4200, [1.0, 0.493], 50 if g % 2 else 90)


@pytest.mark.slow
@many
@given(latent_cases(SHORT + LONG), st.sampled_from(RANKS))
def test_lowrank_matrix(case, r_v):
    lowrank_is_float64(**case, r_v=r_v)


def rotated_at(x, angles):
    a, b = np.split(x, 2, -1)
    return np.concatenate((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", (2, 4, 8, 16))
@pytest.mark.parametrize("recent", (3, 5))
def test_a_token_joins_the_ring_and_one_leaves_it(bits, dtype, recent):
    """As the torch version, to the bit but for codes on a rounding border: products are fused with sums here."""
    gen, B, R, T, ranks, W, ring_bits = generator(bits), 2, 5, 20, (9, 8), 96, max(8, bits)

    def empty(slots, widths, bits):
        latents = tuple(torch.zeros(B + 1, slots, r, dtype=dtype) for r in widths)
        if bits == 16:
            return LatentTokens(latents, (torch.zeros(B + 1, slots, W, dtype=dtype),), bits)
        packed = torch.zeros(B + 1, slots, W * bits // 8, dtype=torch.uint8)
        return LatentTokens(latents, (packed, torch.zeros(B + 1, slots, W // 32, 2, dtype=torch.float16)), bits)

    ours, theirs = ([empty(R, (30,), ring_bits), empty(T, ranks, bits)] for _ in range(2))
    start = torch.tensor([0, 3])
    for step in range(T - 4):
        token = rand(gen, B, 30, dtype=dtype), rand(gen, B, W, dtype=dtype) * 10 ** (step % 3 - 1)
        if step == 7:
            token[1][:, :32] = 2.5  # a constant group
        if step == 9:
            token[1][0, 5] = 3e5  # more than fp16 holds
        append_token(*ours, *token, start + step, recent)
        with torch_versions():
            append_token(*theirs, *token, start + step, recent)
    for got, want in zip(ours, theirs, strict=True):
        for x, y in zip((*got.latents, *got.values[1:]), (*want.latents, *want.values[1:]), strict=True):
            assert torch.allclose(x.float(), y.float(), rtol=1e-3, atol=0)
        if got.bits == 16:
            assert torch.equal(got.values[0], want.values[0])
        else:
            x, y = (unpack(t.values[0], t.bits).int() for t in (got, want))
            assert (x - y).abs().max() <= 1 and (x != y).float().mean() < 2e-3
    assert not ours[0].latents[0][B:].any() and not ours[1].values[0][B:].any(), "a row that is not of the batch"


QUANTIZED = dict(  # bits, tokens that leave together and share scales, else channels that do, sinks, ring, clip; a book
    whole=(16, 0, 32, 3, 5, 1.0), bytes=(8, 0, 96, 0, 1, 0.95), three=(3, 0, 32, 2, 7, 1.0),
    head=(4, 0, 96, 3, 40, 0.95), two=(2, 0, 32, 0, 5, 1.0), keys=(2, 32, 0, 0, 33, 1.0),
    more_keys=(4, 64, 0, 0, 64, 1.0), odd_keys=(3, 32, 0, 0, 32, 1.0),
    e4m3=(8, 32, 96, 0, 32, 1.0, e4m3()), more_e4m3=(8, 64, 96, 0, 64, 1.0, e4m3()),
    lloyd_4=(4, 0, 96, 3, 5, 1.0, lloyd_max(96, 4)), lloyd_3=(3, 0, 96, 0, 1, 1.0, lloyd_max(96, 3)),
    lloyd_2=(2, 0, 96, 2, 7, 1.0, lloyd_max(96, 2)),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", QUANTIZED)
def test_a_token_joins_a_ring_of_whole_ones(case, dtype):
    """As the torch version, to the bit but for codes on a rounding border: rows at positions of their own."""
    bits, block, group, sinks, ring, clip, *books = QUANTIZED[case]
    gen, B, H, T, D, book = generator(bits), 2, 2, 160, 96, next(iter(books), None)

    def empty():
        whole = torch.zeros(B + 1, H, sinks + ring, D, dtype=dtype)
        if bits == 16:
            return QuantizedTokens(torch.zeros(B + 1, H, T, D, dtype=dtype), None, whole, bits, sinks)
        data = torch.zeros(B + 1, H, T, D * bits // 8, dtype=torch.uint8)
        scales = (T // 32 if block else T, 1) if books else (T // 32, D, 2) if block else (T, D // group, 2)
        params = torch.zeros(B + 1, H, *scales, dtype=torch.float16)
        return QuantizedTokens(data, params, whole, bits, sinks, block, clip, book)

    ours, theirs = empty(), empty()
    start = torch.tensor([0, 3])
    for step in range(T - 4):
        token = rand(gen, B, H, D, dtype=dtype) * 10 ** (step % 3 - 1)
        if step == 7:
            token[1] = 2.5  # constant groups
        if step == 9:
            token[0, :, 5] = 3e5  # more than fp16 holds
        x = strided(token, "part") if step % 2 else token
        with Operators() as operators:
            quantized_append(x, start + step, ours)
        assert [str(f) for f, _ in operators.called] == ["kv_fast.quantized_append.cpp"]
        with torch_versions():
            quantized_append(token, start + step, theirs)
    assert torch.equal(ours.full_precision, theirs.full_precision)
    if bits == 16:
        assert torch.equal(ours.data, theirs.data)
    else:
        x, y = (unpack(t.data, bits).int() for t in (ours, theirs))
        assert (x - y).abs().max() <= 1 and (x != y).float().mean() < 2e-3 and x.any()
        assert torch.allclose(ours.params.float(), theirs.params.float(), rtol=1e-3, atol=0)
    assert not ours.full_precision[B:].any() and not ours.data[B:].any(), "a row that is not of the batch"


def test_e4m3_numbers_are_those_of_torch():
    """To the bit: every number, the middle between two, what lies next to it, and NaN, in blocks of scale 1."""
    known = e4m3()[:127]
    middles = (known[1:] + known[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (torch.inf, -torch.inf))
    x = torch.cat([known, middles, up, down])
    x = torch.cat([x, -x])
    x = torch.cat([x, torch.zeros(32 * 64 - len(x))])
    numbers = x.view(32, 64)[torch.randperm(32, generator=generator(0))].clone()
    numbers[:, 0], bad = 448.0, numbers.clone()
    bad[3, 5] = torch.nan
    blocks = torch.stack([numbers, bad])[:, None]  # [B, H, 32, D]
    stores = []
    for versions in (contextlib.nullcontext(), torch_versions()):
        whole, params = torch.zeros(2, 1, 32, 64), torch.zeros(2, 1, 2, 1, dtype=torch.float16)
        store = QuantizedTokens(torch.zeros(2, 1, 64, 64, dtype=torch.uint8), params, whole, 8, 0, 32, book=e4m3())
        with versions:
            for t in range(32):
                quantized_append(blocks[:, :, t], torch.tensor([t, t]), store)
        stores.append(store)
    ours, theirs = stores
    assert torch.equal(ours.data[0, 0, :32], theirs.data[0, 0, :32]) and len(ours.data[0, 0, :32].unique()) > 250
    assert (
        torch.equal(ours.params[0], theirs.params[0])
        and ours.params[1, 0, 0].isnan()
        and theirs.params[1, 0, 0].isnan()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start, S", [(None, 37), ((3, 0), 1), ((4, 1), 9)])
@pytest.mark.parametrize("bits, r", [(4, 2), (4, 16), (4, 30), (2, 4), (2, 32)])
def test_labels_are_those_of_torch(bits, r, start, S, dtype):
    """To the bit; slots that are not meant stay."""
    gen, B, H, D = generator(bits + r), 2, 3, 48
    k = rand(gen, B, S, H, D, dtype=dtype).transpose(1, 2)
    k[0, 0, 0], k[1, 1, 0, 5], k[1, 2, 0] = 0.7, 3e5, k[1, 2, 0] * 1e-6  # constant, too large, tiny
    channels = torch.stack([torch.randperm(D, generator=gen)[:r] for _ in range(H)])
    channels[1, 0] = 5
    at = None if start is None else torch.tensor(start)

    def empty():
        labels = torch.full((B + 1, H, 40, r * bits // 8), 77, dtype=torch.uint8)
        return labels, torch.full((B + 1, H, 40, 2), 7.0, dtype=torch.float16)

    ours, theirs = empty(), empty()
    with Operators() as operators:
        store_labels(k, channels, at, *ours, bits)
    assert [str(f) for f, _ in operators.called] == ["kv_fast.store_labels.cpp"]
    with torch_versions():
        store_labels(k, channels, at, *theirs, bits)
    assert all(map(torch.equal, ours, theirs)) and not torch.equal(ours[0], empty()[0])


def latent_attention_is_float64(
    seed, B, g, r, dtype, C, places, bits, ring_bits, recent, listed, tables, spare=0, H=2, D=32
):
    """C slots of a store beside `recent` tokens, in a ring of `spare` slots more; `listed`: a share of C is
    chosen, 0 of them too; None: all."""
    gen, W, T, ring = generator(seed), H * D, C + recent, recent + spare
    pos = torch.tensor([round(x * (T - 1)) for x in places[:B]])
    many, rank = min(W, r + 5), min(r, W)  # of the ring, whose rank is higher
    split = rank // 2
    basis = rand(gen, many, W, dtype=dtype) / W**0.5

    def tokens(slots, width, bits):
        latents = rand(gen, B + 1, slots, width, dtype=dtype)
        if bits == 16:
            v = rand(gen, B + 1, slots, W, dtype=dtype)
            return latents, v, None, array(v)
        codes = randint(gen, 0, 2**bits, B + 1, slots, W).to(torch.uint8)
        params = torch.stack((torch.rand(B + 1, slots, W // 32, generator=gen), rand(gen, B + 1, slots, W // 32)), -1)
        scale, zero = (np.repeat(array(x), 32, -1) for x in params.half().unbind(-1))
        return latents, torch.tensor(bytes_of(codes.numpy(), bits)), params.half(), array(codes) * scale + zero

    ring_k, ring_v, ring_params, ring_values = tokens(ring, many, ring_bits)
    latents, v, params, values = tokens(T, rank, bits)
    angles = torch.rand(tables if tables == 1 else B, T, D // 2, generator=gen) * 6
    q = rand(gen, B, H * g, D, dtype=dtype)
    gone = (pos + 1 - recent).clamp(min=0)  # tokens in the store
    idx = count = None
    if listed is not None:
        idx = torch.stack([torch.randperm(T, generator=gen) for _ in range(B)])
        for b in range(B):  # what is stored first: those that count
            idx[b] = idx[b][(idx[b] >= gone[b]).long().sort(stable=True).indices]
        count = (gone * listed).long()
    for b in range(B):  # nothing has been written where no token is
        latents[b, gone[b] :] = NAN
        held = {t % ring for t in range(max(0, int(pos[b]) + 1 - recent), int(pos[b]) + 1)}
        ring_k[b, [i for i in range(ring) if i not in held]] = NAN
    lead, rest = latents[..., :split].contiguous(), latents[..., split:].contiguous()
    args = (q, basis, ring_k, ring_v, ring_params, lead, rest, v, params, pos, idx, count, angles.cos(), angles.sin())
    y = latent_attention._latent_attention.cpp(*args, ring_bits, bits, recent)
    for b in range(B):
        at = [(pos[b].item() - i, "ring") for i in range(min(recent, pos[b].item() + 1))]
        chosen = range(gone[b]) if idx is None else idx[b, : count[b]].tolist()
        at += [(t, "store") for t in chosen]
        keys, vals = [], []
        for t, where in at:
            x = ring_k[b, t % ring] if where == "ring" else latents[b, t]
            key = array(x) @ array(basis[: len(x)])
            if dtype == torch.bfloat16:  # as a product in bf16 is stored
                key = array(torch.from_numpy(key).bfloat16())
            turn = array(angles[b if len(angles) > 1 else 0, t])
            keys.append(rotated_at(key.reshape(H, D), turn))
            vals.append((ring_values[b, t % ring] if where == "ring" else values[b, t]).reshape(H, D))
        for h in range(H * g):
            want = softmax_mean(array(q[b, h]), *(np.stack(x)[:, h // g] for x in (keys, vals)))
            tol = 1e-4 if dtype == torch.float32 else 0.05
            assert np.allclose(array(y[b, h]), want, atol=tol, rtol=tol)


@quick
@given(latent_cases((1, 2, 31, 32, 33, 65, 100)), st.sampled_from((2, 4, 8, 16)), st.sampled_from((8, 16)),
       st.sampled_from((1, 3, 32, 40)), st.sampled_from((None, 0.0, 0.3, 1.0)), st.integers(1, 2),
       st.sampled_from((0, 4)))  # fmt: skip
def test_latent_attention(case, bits, ring_bits, recent, listed, tables, spare):
    del case["H"]
    given = dict(recent=recent, listed=listed, tables=tables, spare=spare)
    latent_attention_is_float64(**case, bits=bits, ring_bits=ring_bits, **given)


def test_latent_attention_in_parts():
    latent_attention_is_float64(1, 1, 3, 16, torch.float32, 2300, [1.0], 4, 8, 16, 1.0, 1)


def bytes_of(codes, bits):
    """Codes [..., n] -> bytes, the first code of a byte in its lowest bits."""
    per = 8 // bits
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // per), np.uint8)
    for i in range(codes.shape[-1]):
        out[..., i // per] |= (codes[..., i] << bits * (i % per)).astype(np.uint8)
    return out


def sign_bytes(positive):
    """bool [..., D] -> bytes: the sign of a subvector's first of 4 channels is the highest bit of its code."""
    codes = np.zeros((*positive.shape[:-1], positive.shape[-1] // 4), np.uint8)
    for d in range(positive.shape[-1]):
        codes[..., d // 4] |= (positive[..., d] << 3 - d % 4).astype(np.uint8)
    return bytes_of(codes, 4)


PACKED_DIMS = tuple(d for d in HEAD_DIMS if d % 32 == 0)


@st.composite
def packed_cases(draw, lengths=SHORT):
    case = draw(shapes(lengths))
    bits = draw(st.sampled_from((2, 4, 8, 16)))
    if bits < 16:
        case["D"] = draw(st.sampled_from(PACKED_DIMS))
    K = draw(st.sampled_from([n for n in (0, 1, 31, 32, 33, 64, 100, *LONG) if n <= case["T"]]))
    rows = case["B"]
    ring = draw(st.sampled_from((1, 5, 32, 40)))
    return case | dict(
        bits=bits, signed=draw(st.booleans()), alpha=draw(st.booleans()), K=K,
        counts=draw(st.lists(st.sampled_from((0, 1, K // 2, K, K + 2)), min_size=9, max_size=9)),
        sinks=draw(st.sampled_from((0, 1, 4, 33))), ring=ring,
        prompts=draw(st.lists(st.sampled_from((0, 1, 3, 40, 1000)), min_size=rows, max_size=rows)),
        # decoded tokens, the newest included; negative: the position is inside the prompt, or before it
        decoded=draw(st.lists(st.sampled_from((-41, -1, 0, 1, 7, ring, ring + 1, 3 * ring + 2)), min_size=rows,
                              max_size=rows)),
        flushed=draw(st.sampled_from((0, 1, 6))),
    )  # fmt: skip


def packed_is_float64(
    seed, B, H, g, D, T, dtype, size, spare, bits, signed, alpha, K, counts, sinks, ring, prompts, decoded, flushed
):
    gen = generator(seed)
    rng, n = np.random.default_rng(seed), B + spare
    q = rand(gen, B, H * g, D, dtype=dtype) * size
    sink_k, sink_v = (rand(gen, n, H, sinks, D, dtype=dtype) for _ in range(2))
    tail_k, tail_v = (rand(gen, n, H, ring, D, dtype=dtype) for _ in range(2))
    idx = torch.rand(B, H, T, generator=gen).argsort(-1)[..., :K]
    count = torch.tensor(counts[: B * H]).view(B, H)
    listed = np.zeros((n, H, T), bool)
    for b, h in np.ndindex(B, H):
        listed[b, h, idx[b, h, : count[b, h]]] = True
    if bits == 16:
        k, v = (rand(gen, n, H, T, D, dtype=dtype).masked_fill(~torch.tensor(listed)[..., None], NAN) for _ in range(2))
        packed, keys, values = PackedTokens(k, v, 16), array(k), array(v)
    else:
        parts, numbers = [], []
        for _ in range(2):
            codes = rng.integers(0, 2**bits, (n, H, T, D))
            params = np.stack(
                (rng.uniform(0, 2 / 2**bits, (n, H, T, D // 32)), rng.normal(size=(n, H, T, D // 32))), -1
            )
            params = params.astype(np.float16)
            params[..., 0, :] = np.where(
                rng.random((n, H, T, 1)) < 0.2, np.float16(3e-7), params[..., 0, :]
            )  # subnormal
            params[~listed] = np.nan
            wide = np.repeat(params.astype(np.float64), 32, -2)
            numbers.append(codes * wide[..., 0] + wide[..., 1])
            parts.append((torch.tensor(bytes_of(codes, bits)), torch.tensor(params)))
        keys, values = numbers
        positive = rng.random(keys.shape) < 0.5
        keys = np.where(positive, keys, -keys) if signed else keys
        spread = torch.tensor(rng.uniform(0.1, 2, (n, H, D)), dtype=torch.float32)
        keys = keys * array(spread)[:, :, None] if alpha else keys
        packed = PackedTokens(parts[0][0], parts[1][0], bits, parts[0][1], parts[1][1], spread if alpha else None,
                              torch.tensor(sign_bytes(positive)) if signed else None)  # fmt: skip
    prompt = torch.tensor(prompts + [77] * spare)
    pos = prompt[:B] + torch.tensor(decoded) - 1
    want, some = np.zeros(q.shape), torch.zeros(B, H * g, dtype=torch.bool)
    held = torch.zeros(n, ring, dtype=torch.bool)
    for b, i in np.ndindex(B, H * g):
        h = i // g
        first = prompts[b] + max(flushed, int(pos[b]) - prompts[b] - ring + 1)
        slots = [(p - prompts[b]) % ring for p in range(first, int(pos[b]) + 1)]
        held[b, slots] = True
        whole = min(sinks, prompts[b])
        chosen = idx[b, h, : count[b, h]].numpy()
        x = np.concatenate((array(sink_k[b, h, :whole]), keys[b, h, chosen], array(tail_k[b, h, slots])))
        y = np.concatenate((array(sink_v[b, h, :whole]), values[b, h, chosen], array(tail_v[b, h, slots])))
        want[b, i], some[b, i] = softmax_mean(array(q[b, i]), x, y), len(x) > 0
    dead_tail, dead_sink = ~held[:, None, :, None], (torch.arange(sinks) >= prompt[:, None])[:, None, :, None]
    whole = FullPrecisionTokens(sink_k.masked_fill(dead_sink, NAN), sink_v.masked_fill(dead_sink, INF),
                        tail_k.masked_fill(dead_tail, NAN), tail_v.masked_fill(dead_tail, NAN))  # fmt: skip
    finite = whole._replace(sink_v=sink_v, tail_v=tail_v)
    flushed, last = torch.tensor([flushed]), idx.clone()
    last[torch.arange(K) >= count[..., None]] = 10**15

    def run(*tensors):
        q, stored, whole = tensors[0], packed, FullPrecisionTokens(*tensors[1:5])
        if bits == 16:
            stored = PackedTokens(*tensors[5:], 16)
        return packed_gather_attention(q, last, count, stored, whole, pos, prompt, flushed)

    got = check_bits(run, (q, *whole, *packed[:2]) if bits == 16 else (q, *whole))
    check(got, want, dtype, size)
    with torch_versions():
        by_torch = packed_gather_attention(q, idx, count, _finite(packed), finite, pos, prompt, flushed)
    check_torch(got, by_torch, some, dtype, size)


def _finite(packed):
    """torch multiplies what is not chosen, too, and masks it later."""
    return packed._replace(
        **{name: x.nan_to_num() for name, x in packed._asdict().items() if isinstance(x, torch.Tensor)}
    )


@settings(quick, max_examples=30)
@given(packed_cases())
def test_packed_gather(case):
    packed_is_float64(**case)


PACKED = dict(B=2, H=2, g=3, T=70, size=1.0, spare=1, alpha=True, K=66, counts=[66, 1, 0, 33], sinks=4, ring=5,
              prompts=[40, 3], decoded=[3, 17], flushed=1)  # fmt: skip


@pytest.mark.parametrize("signed", (True, False))
@pytest.mark.parametrize("bits", (2, 4, 8, 16))
def test_packed_gather_at_all_widths(bits, signed):
    for seed, (D, dtype) in enumerate(((128, torch.float32), (256, torch.float32), (96, torch.bfloat16))):
        packed_is_float64(seed=seed, D=D, dtype=dtype, bits=bits, signed=signed, **PACKED)


def test_packed_gather_in_parts():
    for bits in (2, 16):
        case = PACKED | dict(T=2100, K=2090, counts=[2090, 2049, 2048, 7], H=1, g=5)
        packed_is_float64(seed=0, D=32, dtype=torch.float32, bits=bits, signed=True, **case)


@pytest.mark.slow
@many
@given(packed_cases(SHORT + LONG))
def test_packed_gather_matrix(case):
    packed_is_float64(**case)


# ---- scores by look-up ----

WIDTHS = (1, 2, 3, 4, 5, 8, 16, 17)  # bytes a token


@st.composite
def look_up_cases(draw, lengths=SHORT):
    B, T = draw(st.integers(1, 3)), draw(st.sampled_from(lengths))
    pos = st.sampled_from((-3, -1, 0, T // 2, T - 1, T - 2, T + 5))
    return dict(
        seed=draw(seeds), B=B, H=draw(st.integers(1, 3)), W=draw(st.sampled_from(WIDTHS)), T=T,
        spare=draw(st.integers(0, 1)), part=draw(st.booleans()),
        pos=draw(st.none() | st.lists(pos, min_size=B, max_size=B)),
    )  # fmt: skip


def scored(pos, b, T):
    return T if pos is None else max(0, min(T, pos[b] + 1))


def stored(x, part):
    """A buffer, or the first heads and rows of a larger one."""
    if not part:
        return x
    wide = x.new_full((x.shape[0] + 1, x.shape[1] + 2, *x.shape[2:]), 77)
    wide[: x.shape[0], 1:-1] = x
    return wide[: x.shape[0], 1:-1]


def lut_is_float64(seed, B, H, W, T, spare, pos, part, g=3, skip=None, dtype=torch.float32):
    gen, rng, D = generator(seed), np.random.default_rng(seed), 8 * W
    q, book = rand(gen, B, H * g, D, dtype=dtype), rand(gen, B, H, D // 4, 16, 4)
    codes = rng.integers(0, 16, (B + spare, H, T, D // 4))
    packed = stored(torch.tensor(bytes_of(codes, 4)), part)[:B]
    skip = rng.integers(0, T, (B, H, 4)) if skip is None else skip
    at = None if pos is None else torch.tensor(pos)
    slots = torch.tensor(skip)

    def run(q, book):
        return lut_score(q, book, packed, at, slots)

    with threads(1):
        got = run(q, book)
    with threads(2):
        again = run(q, book)
    with torch_versions():
        by_torch = run(q, book)
    assert got.shape == (B, H, T) and got.dtype == torch.float32
    for b, h in np.ndindex(B, H):
        query, centroids = array(q[b, h * g : h * g + g]).mean(0), array(book[b, h])
        n = scored(pos, b, T)
        each = np.stack([centroids[c] @ query[4 * c : 4 * c + 4] for c in range(D // 4)])  # [D / 4, 16]
        want = each[np.arange(D // 4), codes[b, h, :n]].sum(-1)
        want[[t for t in skip[b, h] if t < n]] = -INF
        assert torch.equal(got[b, h, :n], again[b, h, :n])
        np.testing.assert_allclose(got[b, h, :n], want, atol=1e-5 * W**0.5, rtol=1e-5)
        np.testing.assert_allclose(got[b, h, :n], by_torch[b, h, :n], atol=1e-5 * W**0.5, rtol=1e-5)


def label_is_float64(seed, B, H, W, T, spare, pos, part, bits):
    gen, rng, r = generator(seed), np.random.default_rng(seed), W * 8 // bits
    q, codes = rand(gen, B, H, r), rng.integers(0, 2**bits, (B + spare, H, T, r))
    params = np.stack((rng.uniform(0, 1, (B + spare, H, T)), rng.normal(size=(B + spare, H, T))), -1).astype(np.float16)
    params[:, :, ::3, 0] = np.float16(2e-7)  # subnormal
    for b in range(B):
        params[b, :, scored(pos, b, T) :] = np.nan
    labels = stored(torch.tensor(bytes_of(codes, bits)), part)[:B]
    pairs, at = stored(torch.tensor(params), part)[:B], None if pos is None else torch.tensor(pos)
    with threads(1):
        got = label_score(q, labels, pairs, bits, at)
    with threads(2):
        again = label_score(q, labels, pairs, bits, at)
    with torch_versions():
        by_torch = label_score(q, labels, pairs, bits, at)
    assert got.shape == (B, H, T) and got.dtype == torch.float32
    for b, h in np.ndindex(B, H):
        n = scored(pos, b, T)
        scale, zero = params[b, h, :n].astype(np.float64).T
        want = (codes[b, h, :n] * scale[:, None] + zero[:, None]) @ array(q[b, h])
        assert torch.equal(got[b, h, :n], again[b, h, :n])
        np.testing.assert_allclose(got[b, h, :n], want, atol=3e-5 * r**0.5, rtol=1e-5)
        np.testing.assert_allclose(got[b, h, :n], by_torch[b, h, :n], atol=3e-5 * r**0.5, rtol=1e-5)


@quick
@given(look_up_cases(), st.integers(1, 8), st.sampled_from(DTYPES))
def test_lut_score(case, g, dtype):
    lut_is_float64(**case, g=g, dtype=dtype)


@quick
@given(look_up_cases(), st.sampled_from((2, 4)))
def test_label_score(case, bits):
    label_is_float64(**case, bits=bits)


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("T", (4095, 4353))
def test_scores_in_parts(W, T):
    lut_is_float64(W, 1, 2, W, T, 0, None, False)
    label_is_float64(W, 2, 1, W, T, 1, [T - 1, T - 2], True, 4)
    label_is_float64(W, 1, 1, W, T, 0, [4096], False, 2)


@pytest.mark.slow
@many
@given(look_up_cases(SHORT + LONG), st.integers(1, 8), st.sampled_from(DTYPES), st.sampled_from((2, 4)))
def test_scores_matrix(case, g, dtype, bits):
    lut_is_float64(**case, g=g, dtype=dtype)
    label_is_float64(**case, bits=bits)


def test_nothing_and_everything_is_skipped():
    case = dict(seed=0, B=2, H=2, W=16, T=40, spare=0, pos=[39, 7], part=False)
    lut_is_float64(**case, skip=np.zeros((2, 2, 0), np.int64))
    lut_is_float64(**case, skip=np.broadcast_to(np.arange(40), (2, 2, 40)).copy())


# ---- selection ----

KINDS = {
    "normal": lambda x: x,
    "constant": lambda x: torch.full_like(x, -2.5),
    "ascending": lambda x: x.sort(-1).values,
    "descending": lambda x: x.sort(-1, descending=True).values,
    "few values": lambda x: (2 * x).round(),
    "two values": lambda x: (x > 1.5).float(),
    "heavy tails": lambda x: x.sign() * (3 * x.abs()).exp().exp().clamp(max=3e38),
    "tiny": lambda x: x * 1e-42,
    "infinities": lambda x: torch.where(x > 1, INF, torch.where(x < -0.3, -INF, x)),
    "minus infinity": lambda x: torch.full_like(x, -INF),
    "zeros of both signs": lambda x: torch.where(x > 2, x, 0.0 * x),
    "sorted but one": lambda x: torch.cat((x[..., :1] + 9, x[..., 1:].sort(-1).values), -1),
}


@st.composite
def selections(draw, lengths=SHORT):
    T = draw(st.sampled_from(lengths))
    return dict(
        seed=draw(seeds), B=draw(st.integers(1, 3)), H=draw(st.integers(1, 3)), T=T,
        kind=draw(st.sampled_from(sorted(KINDS))), part=draw(st.booleans()),
        k=draw(st.sampled_from((0, 1, T // 16 + 1, T // 2, T, T + 3))),
        wanted=draw(st.lists(st.sampled_from((-1, 0, 1, T // 16, T // 2, T - 1, T, T + 9)), min_size=9, max_size=9)),
    )  # fmt: skip


def best(scores, allowed, forced, want):
    """Of one row: the forced slots, then the highest scores, the first of equal ones; in ascending order."""
    order = np.lexsort((np.arange(len(scores)), np.where(forced, 0, -scores), ~forced))
    order = order[allowed[order]]
    return sorted(order[: max(0, want)].tolist())


def check_selection(got, again, scores, allowed, forced, wanted, k):
    B, H, T = scores.shape
    idx, count = got
    assert idx.shape == (B, H, min(k, T)) and count.shape == (B, H) and idx.dtype == count.dtype == torch.int64
    assert ((idx >= 0) & (idx < T)).all(), "entries past the count must be slots, too"
    assert torch.equal(idx, again[0]) and torch.equal(count, again[1])
    for b, h in np.ndindex(B, H):
        want = best(scores[b, h].numpy(), allowed[b, h], forced[b, h], min(int(wanted[b, h]), k))
        assert int(count[b, h]) == len(want) and idx[b, h, : len(want)].tolist() == want


def other_threads(run):
    with threads(1):
        one = run()
    with threads(2):
        return one, run()


def mask_is_brute_force(seed, B, H, T, kind, k, part, wanted, per_head=True, share=0.7):
    gen = generator(seed)
    scores = KINDS[kind](rand(gen, B, H, T))
    mask = torch.rand(B, H if per_head else 1, T, generator=gen) < share
    wanted = torch.tensor(wanted[: B * H]).view(B, H)
    given = stored(torch.where(mask, scores, NAN), part)
    got, again = other_threads(lambda: topk_select(given, mask, k, wanted))
    allowed = mask.expand(B, H, T).numpy()
    check_selection(got, again, scores, allowed, np.zeros_like(allowed), wanted, k)
    with torch_versions():
        count = topk_select(scores, mask, k, wanted)[1]
    assert torch.equal(got[1], count.clamp(min=0))


def budget_is_brute_force(seed, B, H, T, kind, k, part, wanted, sinks, recent, pos):
    gen = generator(seed)
    scores = KINDS[kind](rand(gen, B, H, T))
    pos, wanted = torch.tensor(pos[:B]), torch.tensor(wanted[:B])
    t = torch.arange(T)
    allowed = (t <= pos[:, None])[:, None].expand(B, H, T)
    forced = ((t < sinks) | (t > pos[:, None] - recent))[:, None].expand(B, H, T)
    given = stored(torch.where(allowed, scores, NAN), part)
    got, again = other_threads(lambda: budget_select(given, pos, wanted, k, sinks, recent))
    least = (pos + 1).clamp(min=0, max=sinks + recent)
    numbers = torch.maximum(wanted, least)[:, None].expand(B, H)
    check_selection(got, again, scores, allowed.numpy(), forced.numpy(), numbers, k)
    if (pos >= 0).all():
        with torch_versions():
            idx, count = budget_select(scores, pos, wanted, k, sinks, recent)
        assert torch.equal(got[1], count.clamp(min=0))
        for b, h in np.ndindex(B, H):  # torch takes any of equal scores, and of -inf even what is not filled
            n, inf = int(got[1][b, h]), scores[b, h].masked_fill(forced[b, h], INF)
            one, other = (inf[x[b, h, :n]].sort().values for x in (got[0], idx))
            assert torch.equal(one, other) or one.min() == -INF


places = st.lists(st.sampled_from((-5, -1, 0, 1, 0.5, 0.99, 1.0)), min_size=3, max_size=3)


def positions(places, T):
    return [round(x * (T - 1)) if isinstance(x, float) else x if x < T else 0 for x in places]


@settings(quick, max_examples=60)
@given(selections(), st.booleans(), st.sampled_from((0.0, 0.05, 0.7, 1.0)))
def test_select_under_a_mask(case, per_head, share):
    mask_is_brute_force(**case, per_head=per_head, share=share)


@settings(quick, max_examples=60)
@given(selections(), st.sampled_from((0, 1, 4, 70)), st.sampled_from((0, 1, 9, 70)), places)
def test_select_by_budget(case, sinks, recent, places):
    budget_is_brute_force(**case, sinks=sinks, recent=recent, pos=positions(places, case["T"]))


@pytest.mark.parametrize("kind", KINDS)
def test_select_of_long_rows(kind):
    """From 4096 slots on a sample tells what to leave out."""
    for T in (4095, 4096, 5000):
        for k in (1, 300, T - 1, T):
            case = dict(seed=k, B=1, H=1, T=T, kind=kind, k=k, part=False, wanted=[k])
            budget_is_brute_force(**case, sinks=2, recent=3, pos=[T - 1])
        mask_is_brute_force(seed=1, B=1, H=2, T=T, kind=kind, k=400, part=False, wanted=[400, 7])
    mask_is_brute_force(seed=2, B=1, H=1, T=5000, kind=kind, k=400, part=False, wanted=[400], share=0.05)


@pytest.mark.slow
@many
@given(selections(SHORT + LONG), st.booleans(), st.sampled_from((0.0, 0.01, 0.3, 1.0)), st.sampled_from((0, 4, 2100)),
       st.sampled_from((0, 1, 64, 2100)), places)  # fmt: skip
def test_select_matrix(case, per_head, share, sinks, recent, places):
    mask_is_brute_force(**case, per_head=per_head, share=share)
    budget_is_brute_force(**case, sinks=sinks, recent=recent, pos=positions(places, case["T"]))


def test_a_sample_that_misleads():
    """What is sampled is not what there is: every sampled slot is among the highest scores, or among the lowest."""
    T = 4 * 1024
    for high in (1.0, -1.0):
        scores = rand(generator(0), 1, 1, T)
        scores[..., ::4] += 100 * high
        for k in (5, 1000, 1024, 1025, 3000):
            got = budget_select(scores, torch.tensor([T - 1]), torch.tensor([k]), k)
            allowed = np.ones((1, 1, T), bool)
            check_selection(got, got, scores, allowed, ~allowed, torch.tensor([[k]]), k)


def test_nan_scores_are_the_largest():
    scores = rand(generator(0), 1, 1, 50)
    scores[..., 20], scores[..., 7], scores[..., 30] = NAN, -torch.tensor(NAN), INF
    one = torch.ones(1, dtype=torch.int64)
    assert budget_select(scores, 49 * one, 3 * one, 3)[0].flatten().tolist() == [7, 20, 30]
    assert budget_select(scores, 49 * one, 3 * one, 3, 1, 1)[0].flatten().tolist() == [0, 7, 49], (
        "forced ones come first"
    )


def test_selection_takes_what_torch_takes():
    """Scores of 16 bits, strides of every dimension, a count a row, a mask for all rows."""
    scores, count = rand(generator(0), 2, 40, 3).transpose(1, 2), torch.tensor([[3], [9]])
    mask = torch.rand(1, 1, 40, generator=generator(1)) < 0.5
    want = topk_select(scores.contiguous(), mask.expand(2, 3, 40), 12, count.expand(2, 3))
    for got in (topk_select(scores, mask, 12, count), topk_select(scores, mask.expand(2, 3, 40), 12, count)):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for dtype in (torch.bfloat16, torch.float16):
        x = scores.to(dtype)
        with torch_versions():
            want = topk_select(x, mask, 12, count.expand(2, 3))
        got = topk_select(x, mask, 12, count.expand(2, 3))
        assert torch.equal(got[1], want[1])
        for b, h in np.ndindex(2, 3):
            one, other = (x[b, h, y[0][b, h, : int(y[1][b, h])]].sort().values for y in (got, want))
            assert torch.equal(one, other)


# ---- as operators ----


def operations():
    """name -> (function, tensors) of every operation, at sizes that are no multiple of anything."""
    gen, T, W = generator(0), 77, 4
    q, k, v = rand(gen, 2, 6, 32), rand(gen, 3, 2, T, 32), rand(gen, 3, 2, T, 32)
    stop, count = torch.tensor([50, T]), torch.tensor([[5, 0], [9, 7]])
    idx = torch.rand(2, 2, T, generator=gen).argsort(-1)[..., :9].contiguous()
    codes = randint(gen, 0, 256, 3, 2, T, W).byte()
    params = rand(gen, 3, 2, T, 2).half()
    wide = randint(gen, 0, 256, 3, 2, T, 16).byte(), randint(gen, 0, 256, 3, 2, T, 16).byte()
    pairs = rand(gen, 3, 2, T, 1, 2).half(), rand(gen, 3, 2, T, 1, 2).half()
    whole = tuple(rand(gen, 3, 2, n, 32) for n in (4, 4, 6, 6))
    mean = rand(gen, 3, 2, 32), rand(gen, 3, 2, 32)
    scores, pos = rand(gen, 2, 2, T), torch.tensor([20, T - 1])

    def packed(q, idx, count, k, v, kp, vp, alpha, codes, *rest):
        whole, (pos, prompt, flushed) = rest[:4], rest[4:]
        store = PackedTokens(k, v, 4, kp, vp, alpha, codes)
        return packed_gather_attention(q, idx, count, store, FullPrecisionTokens(*whole), pos, prompt, flushed)

    return {
        "decode": (decode_attention, (q, k, v, stop - 40, stop)),
        "packed": (packed_attention, (q, k, v, stop, *mean, torch.tensor([0, 8]))),
        "gather": (gather_attention, (q, k, v, idx, count)),
        "packed gather": (packed, (q, idx, count, *wide, *pairs, mean[0].abs(), codes, *whole, pos,
                                   torch.tensor([18, 70, 3]), torch.tensor([1]))),
        "lut": (lut_score, (q, rand(gen, 2, 2, 8, 16, 4), codes[:2], None, idx)),
        "label": (lambda q, labels, params: label_score(q, labels, params, 4), (q[:, :2, :8], codes[:2], params[:2])),
        "topk": (lambda s, m, n: topk_select(s, m, 9, n), (scores, scores[:, :1] > 0, count)),
        "budget": (lambda s, p, n: budget_select(s, p, n, 9, 1, 2), (scores, pos, stop)),
    }  # fmt: skip


@pytest.mark.parametrize("name", operations())
def test_compiled_is_eager(name):
    """One operator in C++, eager and in a graph, with the shapes, dtypes and strides that the graph was told."""
    function, tensors = operations()[name]
    graphs = []
    keep = aot_autograd(fw_compiler=lambda graph, inputs: graphs.append(graph) or graph)
    with Operators() as operators:
        want = function(*tensors)
    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True, backend=keep)(*tensors)
    (graph,), (called,) = graphs, operators.called
    in_graph = [node.target for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "kv_fast"]
    assert in_graph == [called[0]]
    for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    torch.library.opcheck(*called, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_compiled_steps_call_operators_directly(tmp_path):
    """What inductor is told of them is what they are in C++; an error is the eager one."""
    told = sum(Declarations().values(), [])
    for declaration in told:
        assert hasattr(build.library(), re.findall(r"aoti_\w+", declaration)[0])
    file = tmp_path / "told.cpp"  # a second declaration of another type is an error
    file.write_text('#include "native.cpp"\nextern "C" {\n' + "".join(f"extern {x};\n" for x in told) + "}\n")
    flags = ["-fsyntax-only", f"-I{build.FOLDER}", f"-I{build.TORCH / 'include'}", "-fopenmp", *build.FLAGS]
    build.run(build.compiler(), *flags, str(file))
    file.write_text(file.read_text().replace("int64_t, AtenTensorHandle*);", "double, AtenTensorHandle*);", 1))
    with pytest.raises(OSError, match="conflicting declaration"):
        build.run(build.compiler(), *flags, str(file))

    def function(x, labels, params):
        return label_score(x, labels, params, 4)

    step = torch.compile(function, options=compiler_options(torch.device("cpu")))
    x, params = rand(generator(0), 1, 2, 16), rand(generator(1), 1, 2, 20, 2).half()
    labels = randint(generator(0), 0, 256, 1, 2, 20, 8).byte()
    got, (code,) = run_and_get_code(step, x, labels, params)
    assert torch.equal(got, function(x, labels, params)) and got.count_nonzero() == 40
    assert "aoti_torch_cpu_label_score(" in code and "call_dispatcher" not in code
    with pytest.raises(RuntimeError, match="labels of 2 or 4 bits are needed"):
        step(x, labels[..., :4].contiguous(), params)


def test_empty_batches_and_lists():
    gen = generator(0)
    k, none = rand(gen, 2, 2, 9, 32), torch.zeros(0, dtype=torch.int64)
    assert decode_attention(rand(gen, 0, 4, 32), k, k, none, none).shape == (0, 4, 32)
    q, zero = rand(gen, 1, 4, 32), torch.zeros(1, 2, dtype=torch.int64)
    assert (gather_attention(q, k, k, zero[..., None][..., :0], zero) == 0).all()
    assert (gather_attention(q, k, k, zero[..., None], zero - 1) == 0).all()
    assert budget_select(rand(gen, 1, 2, 9), zero[0, :1], zero[0, :1], 0)[0].shape == (1, 2, 0)


# ---- the library ----

SAY = """
import sys, torch
from kernels.dense_attention import decode_attention
from kernels.native import build
from kernels.select import budget_select
torch.manual_seed(0)
q, k, v = torch.randn(1, 2, 32), torch.randn(1, 1, 50, 32), torch.randn(1, 1, 50, 32)
for _ in range(2):
    y = decode_attention(q, k, v, torch.tensor([3]), torch.tensor([50]))
    w = (q @ k[0, :, 3:].mT / 32**0.5).softmax(-1) @ v[0, :, 3:]
    idx, count = budget_select(q[:, :, :20], torch.tensor([19]), torch.tensor([4]), 4)
    assert (y - w).abs().max() < 1e-5 and count.tolist() == [[4, 4]]
    assert idx[0, 0].sort().values.tolist() == q[0, 0, :20].topk(4).indices.sort().values.tolist()
print(build.available(), build._available.cache_info().currsize)
"""


def process(**env):
    env = {x: y for x, y in os.environ.items() if x != "KV_FAST_BACKEND"} | env
    return subprocess.Popen([sys.executable, "-c", SAY], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_torch_runs(tmp_path):
    """In a process of its own, as a user meets it."""
    out, err = (child := process(PATH=str(tmp_path), CXX="nonsense", XDG_CACHE_HOME=str(tmp_path))).communicate()
    assert child.returncode == 0, err
    assert out.split() == ["False", "1"] and err.count("note: ") == 1 and "no C++ compiler found" in err


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The library not loaded yet, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = build.library()
    monkeypatch.setattr(build, "library", functools.cache(build.library.__wrapped__))
    monkeypatch.setattr(build, "_available", functools.cache(build._available.__wrapped__))
    monkeypatch.setattr(backend, "_version_for", functools.cache(backend._version_for.__wrapped__))
    yield Path(loaded._name)
    loaded.kvf_register()  # operators of another build would serve all tests that follow


@pytest.fixture
def copier(fresh, monkeypatch, tmp_path):
    """A compiler that takes its time, writes a log, and gives the library that there is."""
    log = tmp_path / "log"
    text = f'echo "$@" >> {log}\nfor x; do out=$x; done\ncase "$*" in *-dM*) ;; *-shared*) head -c 99 {fresh} > $out; '
    text += f"sleep 0.2; cp {fresh} $out;; *) touch $out;; esac"
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    return lambda: log.read_text().count("-shared")


def forget():
    build.library.cache_clear()
    build._available.cache_clear()
    backend._version_for.cache_clear()


def works():
    gen = generator(0)
    q, k, v = rand(gen, 1, 2, 32), rand(gen, 1, 1, 40, 32), rand(gen, 1, 1, 40, 32)
    want = np.stack([softmax_mean(array(x), array(k[0, 0, 1:]), array(v[0, 0, 1:])) for x in q[0]])
    return np.abs(array(decode_attention(q, k, v, torch.tensor([1]), torch.tensor([40]))[0]) - want).max() < 1e-5


def libraries(tmp_path):
    return sorted(x.name for x in (tmp_path / "cache").glob("kv_fast/*") if x.name != "lock")


@pytest.mark.parametrize("fails", ("always", "at the source", "by a file that is no library"))
def test_a_compiler_that_fails(fails, fresh, monkeypatch, tmp_path, capfd):
    """One note, which says why; torch runs, and nothing is left that the next process would take for a library."""
    text = {
        "always": "echo 'x.cpp:1: error: it is late' >&2; exit 1",
        "at the source": 'case "$*" in *-dM*) ;; *) echo "error: it is late" >&2; exit 1;; esac',
        "by a file that is no library": 'for x; do out=$x; done; case "$*" in *-dM*) ;; *) echo text > $out;; esac',
    }[fails]
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    assert not native.available() and works() and not native.available() and works()
    err = capfd.readouterr().err
    assert [x[:5] for x in err.splitlines() if not x.startswith("compiling ")] == ["note:"]
    if fails != "by a file that is no library":
        assert "it is late" in err and libraries(tmp_path) == []


def test_a_cache_that_cannot_be_written(copier, monkeypatch, tmp_path):
    """The library is made in a folder that goes with the process."""
    (tmp_path / "cache").write_text("a file")
    assert native.available() and works() and copier() == 1
    path = Path(build.library()._name)
    assert tmp_path not in path.parents and path.exists()
    (tmp_path / "cache").unlink()
    (tmp_path / "cache").mkdir()
    forget()
    access = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: mode != os.W_OK and access(at, mode))  # root may write anywhere
    assert works() and libraries(tmp_path) == []
    assert build.openmp() != "-lgomp", "torch brings its own"


def test_without_a_home(copier, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path.cwd() / Path(os.devnull) / "nobody")
    assert native.available() and works()

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    forget()
    monkeypatch.setattr(Path, "home", homeless)
    assert native.available() and works() and copier() == 2


def test_it_is_compiled_once(copier, tmp_path):
    assert works() and works() and copier() == 1
    forget()
    assert works() and copier() == 1, "the next process finds it"


def test_the_name_tells_what_it_was_made_of(copier, monkeypatch, tmp_path):
    assert works()
    names = [libraries(tmp_path)]
    sources = [x.relative_to(build.FOLDER) for x in build.FOLDER.rglob("*") if x.suffix in (".h", ".cpp")]
    assert len(sources) >= 7 and Path("isa/avx2.h") in sources
    folders = [shutil.copytree(build.FOLDER, tmp_path / f"edited {name.name}") for name in sources]
    for folder, name in zip(folders, sources, strict=True):
        with (folder / name).open("a") as f:
            f.write("// another\n")
    changes = [("FOLDER", folder) for folder in folders]
    for name, value in (*changes, ("FLAGS", (*build.FLAGS, "-g")), ("openmp", lambda: "-lanother")):
        monkeypatch.setattr(build, name, value)
        forget()
        assert works()
        names.append(libraries(tmp_path))
    assert [len(x) for x in names] == list(range(1, len(sources) + 4)) and copier() == len(sources) + 3


def test_two_at_once_leave_one_complete_file(copier, tmp_path, fresh):
    got = []
    each = [threading.Thread(target=lambda: got.append(build.library.__wrapped__())) for _ in range(2)]
    [x.start() for x in each], [x.join() for x in each]
    assert len(got) == 2 and all(hasattr(x, "kvf_register") for x in got) and copier() == 1
    (name,) = libraries(tmp_path)
    assert (tmp_path / "cache" / "kv_fast" / name).read_bytes().startswith(fresh.read_bytes())


def at_once(n):
    """How often `compiling ..., once` is said by n processes that start together."""
    children, said = [process() for _ in range(n)], 0
    for child in children:
        out, err = child.communicate()
        assert child.returncode == 0 and out.split() == ["True", "1"] and "note" not in err, err
        said += err.count("compiling kernels/native")
    return said


def test_two_processes_compile_once(copier, tmp_path):
    assert at_once(2) == 1 == copier() and at_once(1) == 0
    assert len(libraries(tmp_path)) == 1


@pytest.mark.slow
def test_two_processes_compile_the_sources_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    assert at_once(2) == 1 and len(libraries(tmp_path)) == 1


def test_what_a_killed_build_left_is_removed(copier, tmp_path, monkeypatch):
    """It may end at any time, by a signal that cannot be caught, and no later build waits for it."""
    begun = tmp_path / "begun"
    never = f'case "$*" in *-dM*) ;; *) echo $$ > {begun}; exec sleep 600;; esac'
    with monkeypatch.context() as m:
        m.setenv("CXX", script(tmp_path / "never", never))
        child = process()
    while not (begun.exists() and begun.read_text().strip()):
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.05)
    (left,) = libraries(tmp_path)
    assert left.startswith("tmp")
    child.kill()
    os.kill(int(begun.read_text()), signal.SIGKILL)  # its compiler
    child.communicate()
    assert libraries(tmp_path) == [left]
    assert works() and copier() == 1
    (name,) = libraries(tmp_path)
    assert name.startswith("native-")


@pytest.mark.slow
def test_a_failing_compiler_in_a_process(tmp_path):
    out, err = (child := process(CXX="/bin/false", XDG_CACHE_HOME=str(tmp_path))).communicate()
    assert child.returncode == 0 and out.split() == ["False", "1"] and err.count("note: ") == 1, err


def test_torch_is_asked_for(fresh, monkeypatch):
    """Nothing is compiled or loaded then, nor where a tensor is not for C++."""
    monkeypatch.setattr(build, "library", lambda: pytest.fail("the library was asked for"))
    monkeypatch.setattr(build, "_available", lambda: pytest.fail("the library was asked for"))
    x = torch.zeros(2, 32)
    assert backend.version_for(x.device, torch.float16) == "torch"
    monkeypatch.setenv("KV_FAST_BACKEND", "torch")
    assert backend.version_for(x.device, x.dtype) == "torch"
    for function, tensors in operations().values():
        function(*tensors)


def test_wrong_types_are_refused():
    """C++ would read other memory than is meant."""
    gen = generator(0)
    q, k, v = rand(gen, 1, 2, 32), rand(gen, 1, 1, 40, 32), rand(gen, 1, 1, 40, 32)
    stop = torch.tensor([40])
    with pytest.raises(RuntimeError, match="dtype Long is needed, not of Int"):
        decode_attention(q, k, v, None, stop.int())
    with pytest.raises(RuntimeError, match="dtype Float is needed, not of Double"):
        packed_attention(q, k, v, stop, k[:, :, 0].double(), v[:, :, 0].double(), stop)
    with pytest.raises(RuntimeError, match="idx: a tensor of dtype Long"):
        gather_attention(q, k, v, torch.zeros(1, 1, 4, dtype=torch.int32), stop[:, None])
    with pytest.raises(RuntimeError, match="mask: a tensor of dtype Bool"):
        topk_select(rand(gen, 1, 1, 40), torch.ones(1, 1, 40), 4, stop[:, None])


# ---- other instruction sets ----

EXTENSIONS = {
    "x86-64-v3": {"avx2", "fma", "bmi2", "f16c"},
    "alderlake": {"avx2", "fma", "bmi2", "f16c", "avx_vnni"},  # bytes are multiplied, but no tiles and no AVX-512
    "x86-64-v2": {"sse4_2", "popcnt"},
}


def runs_here(march):
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    return EXTENSIONS[march] <= set(flags)


# what the compiler does itself with the instructions is for the slow ones: to optimize takes it three times as long
@pytest.mark.parametrize("march, level", sampled(product(EXTENSIONS, ("-O0", "-O1")), [("x86-64-v3", "-O0")]))
def test_other_instruction_sets(march, level, fresh, monkeypatch):
    """Tables of 16 numbers are looked up in another way with AVX2, and in a third without."""
    if not runs_here(march):
        pytest.skip(f"not a processor of {march}")
    flags = [f"-march={march}" if x == "-march=native" else level if x == "-O3" else x for x in build.FLAGS]
    assert flags != list(build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    assert native.available() and build.library()._name != str(fresh)
    decode_is_float64(0, 2, 1, 7, 80, 70, torch.float32, 8.0, 1, [(0, 70), (5, 69)], None)
    decode_is_float64(1, 2, 2, 3, 64, 70, torch.bfloat16, 1.0, 0, [(0, 70), (0, 33)], [9, 0])
    gather_is_float64(0, 2, 2, 5, 96, 70, torch.float32, 1.0, 1, 40, [40, 33, 1, 0], False, False)
    for bits in (2, 4, 8, 16):
        packed_is_float64(seed=0, D=128, dtype=torch.float32, bits=bits, signed=True, **PACKED)
    for W in WIDTHS:
        lut_is_float64(W, 2, 2, W, 300, 1, [299, 100], True)
        label_is_float64(W, 1, 1, W, 300, 0, None, False, 4)
        label_is_float64(W, 1, 1, W, 300, 0, None, False, 2)
    for bits, rows in product((16, 8, 4), (1, 2, 3, 7, 20, 40)):
        check_product(rows, rows, 37, 192, bits, 192 if bits == 16 else 64, "zeros", True, torch.float32, "")
    for kind in ("normal", "few values", "infinities", "zeros of both signs"):
        budget_is_brute_force(0, 1, 2, 4500, kind, 300, False, [300], 2, 3, [4499])
