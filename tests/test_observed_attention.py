"""Attention of whole prompts that also gives its weights, against float64; a step's is in test_operators.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import softmax

from kernels import observed_attention
from kernels.dense_attention import prefill_attention
from kernels.observed_attention import prefill_attention_mass
from kernels.prompt_scores import snapkv_scores

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16)
GROUPS, HEAD_DIMS = (1, 3, 5, 8), (32, 64, 96, 128)


def rand(seed, *size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def array(x):
    return x.double().numpy()


# ---- prompts ----


def prompts(seed, lengths, S, H, g, D, dtype):
    """q, k, v, lengths; NaN past each prompt's end."""
    q, k, v = (rand(seed + i, len(lengths), n, S, D, dtype=dtype) for i, n in enumerate((H * g, H, H)))
    for x in (q, k, v):
        for b, n in enumerate(lengths):
            x[b, :, n:] = NAN
    return q, k, v, torch.tensor(lengths)


def prompt_oracle(q, k, v, lengths, last, window):
    """y and mass, one query at a time."""
    B, H, S = k.shape[:3]
    g, y, mass = q.shape[1] // H, np.zeros(q.shape), np.zeros((B, H, S))
    for b, head in np.ndindex(q.shape[:2]):
        n = int(lengths[b])
        queries, keys, values = array(q[b, head]), array(k[b, head // g]), array(v[b, head // g])
        for i in range(n):
            lo = 0 if window is None else max(0, i - window + 1)
            p = softmax(keys[lo : i + 1] @ queries[i] / math.sqrt(q.shape[3]))
            y[b, head, i] = p @ values[lo : i + 1]
            if last is None or i >= n - last:
                mass[b, head // g, lo : i + 1] += p
    return y, mass


def prompt_is_float64(case, last, window, cut=None):
    """cut: (queries of a block, weights held at a time), smaller than a launch has them."""
    q, k, v, lengths = prompts(**case)
    with pytest.MonkeyPatch.context() as m:
        if cut is not None:
            m.setattr(observed_attention, "QUERY_BLOCK", cut[0])
            m.setattr(observed_attention, "WEIGHTS", dict(cpu=cut[1]))
        y, mass = prefill_attention_mass(q, k, v, lengths, last, window)
    want_y, want_mass = prompt_oracle(q, k, v, lengths, last, window)
    assert y.dtype == q.dtype and mass.dtype == torch.float32 and y.shape == q.shape
    exact = last is not None or q.dtype == torch.float32  # the last queries' weights are in fp32 whatever the dtype
    tol = 1e-5 if exact else 2e-2
    assert (np.abs(array(mass) - want_mass) <= tol * (1 + want_mass)).all()
    for b, n in enumerate(lengths.tolist()):
        assert (mass[b, :, n:] == 0).all()
        if last is None:  # the other y is that of prefill_attention
            error = np.abs(array(y[b, :, :n]) - want_y[b, :, :n]).max()
            assert error < (1e-5 if q.dtype == torch.float32 else 4e-2), error


@st.composite
def prompt_cases(draw, longest=70):
    S, B = draw(st.integers(1, longest)), draw(st.integers(1, 3))
    return dict(
        seed=draw(st.integers(0, 2**31 - 3)), S=S, H=draw(st.integers(1, 2)), g=draw(st.sampled_from(GROUPS)),
        D=draw(st.sampled_from(HEAD_DIMS)), dtype=draw(st.sampled_from(DTYPES)),
        lengths=draw(st.lists(st.one_of(st.just(S), st.integers(1, S)), min_size=B, max_size=B)),
    )  # fmt: skip


LASTS = st.sampled_from((None, 1, 7, 32, 100))
WINDOWS = st.sampled_from((None, 1, 9, 40))
CUTS = st.sampled_from((None, (16, 1 << 22), (5, 1 << 22), (64, 1), (32, 6000), (16, 50_000)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(prompt_cases(), LASTS, WINDOWS, CUTS)
def test_prompt(case, last, window, cut):
    prompt_is_float64(case, last, window, cut)


@pytest.mark.parametrize("window", (None, 100))
def test_a_prompt_of_several_blocks(window):
    """As launches cut it; y and mass as by other ways."""
    q, k, v, lengths = prompts(6, [600, 513], 600, 2, 2, 32, torch.float32)
    y, mass = prefill_attention_mass(q, k, v, lengths, None, window)
    same = prefill_attention(*(x.nan_to_num() for x in (q, k, v)), window)
    for b, n in enumerate(lengths.tolist()):
        assert torch.allclose(y[b, :, :n], same[b, :, :n], atol=1e-5)
        assert torch.allclose(mass[b].sum(-1), torch.tensor(2.0 * n)), "each query gives a mass of 1"
    every = prefill_attention_mass(q, k, v, lengths, 600, window)[1]
    assert torch.allclose(mass, every, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("last", (1, 32))
def test_mass_is_that_of_snapkv(last):
    q, k, v, lengths = prompts(7, [90, 32, 60], 90, 2, 3, 64, torch.bfloat16)
    _, mass = prefill_attention_mass(q, k, v, lengths, last)
    want = snapkv_scores(q, k, lengths, window=last, pool=1)
    assert torch.allclose(mass, want.nan_to_num(neginf=0), atol=1e-5)


def test_short_prompts_count_their_own_queries():
    """Fewer than `last`: what queries that are not there would see counts for nothing."""
    q, k, v, lengths = prompts(8, [5, 1, 40], 40, 1, 2, 32, torch.float32)
    _, mass = prefill_attention_mass(q, k, v, lengths, 32)
    assert torch.allclose(mass.sum((1, 2)), torch.tensor([5.0, 1.0, 32.0]) * 2)


def test_other_layouts_and_a_row_alone():
    """[B, S, H, D] as a projection leaves it; padding changes no bit of what does not depend on the block's size."""
    q, k, v, lengths = prompts(9, [50, 33], 50, 2, 2, 32, torch.float32)
    y, mass = prefill_attention_mass(q, k, v, lengths, None)
    moved = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    again = prefill_attention_mass(*moved, lengths, None)
    alone = prefill_attention_mass(*(x[1:, :, :33] for x in (q, k, v)), lengths[1:], None)
    for b, n in ((0, 50), (1, 33)):
        assert torch.allclose(y[b, :, :n], again[0][b, :, :n], atol=1e-6)
    assert torch.allclose(mass, again[1], atol=1e-5)
    assert torch.allclose(y[1:, :, :33], alone[0], atol=1e-6) and torch.allclose(mass[1:, :, :33], alone[1], atol=1e-5)


def test_memory_of_a_prompt_is_bounded(monkeypatch):
    """No weights of more than WEIGHTS at a time: 4,000 tokens, 8 query heads."""
    largest, softmax = [], torch.Tensor.softmax
    monkeypatch.setattr(observed_attention, "WEIGHTS", dict(cpu=1 << 18))
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *a, **kw: largest.append(x.numel()) or softmax(x, *a, **kw))
    q, k, v = rand(1, 2, 8, 4000, 16), rand(2, 2, 2, 4000, 16), rand(3, 2, 2, 4000, 16)
    lengths = torch.tensor([4000, 3000])
    for last in (None, 16):
        prefill_attention_mass(q, k, v, lengths, last)
    assert max(largest) <= 1 << 18
