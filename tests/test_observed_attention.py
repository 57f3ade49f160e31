"""Attention that also tells its weights, in torch and in C++, against float64: one decode step, and whole prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native, observed_attention
from kernels.dense_attention import decode_attention, prefill_attention
from kernels.observed_attention import prefill_attention_mass
from kernels.prompt_scores import snapkv_scores

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16)
SLOTS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129)
LONG = (2047, 2048, 2049, 4097)  # around the C++ version's work items
GROUPS, HEAD_DIMS = (1, 3, 5, 8), (32, 64, 96, 128)
BACKENDS = ("torch", "")  # the latter is C++ where there is a compiler


def observe(*args):
    return observed_attention.observed_attention(*args)


def rand(seed, *size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def array(x):
    return x.double().numpy()


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


# ---- one query per row ----


def step(seed, B, H, g, D, N, stops, dtype, spare=1):
    """q, k, v, stop; NaN in every slot that is not filled and in `spare` rows more than the batch has."""
    q, k, v = rand(seed, B, H * g, D, dtype=dtype), *(rand(seed + i, B + spare, H, N, D, dtype=dtype) for i in (1, 2))
    for x in (k, v):
        for b, n in enumerate(stops):
            x[b, :, n:] = NAN
        x[B:] = NAN
    return q, k, v, torch.tensor(stops)


def step_oracle(q, k, v, stop):
    """y and weights, one query head at a time."""
    g, (B, H, N) = q.shape[1] // k.shape[1], (len(q), *k.shape[1:3])
    y, weights = np.zeros(q.shape), np.zeros((B, H, N))
    for b, head in np.ndindex(q.shape[:2]):
        n = int(stop[b])
        keys, values = array(k[b, head // g, :n]), array(v[b, head // g, :n])
        p = softmax(keys @ array(q[b, head]) / math.sqrt(q.shape[2]))
        y[b, head] = p @ values
        weights[b, head // g, :n] += p
    return y, weights


def check_step(got, q, k, v, stop):
    (y, weights), (want_y, want_weights) = got, step_oracle(q, k, v, stop)
    assert y.dtype == q.dtype and weights.dtype == torch.float32 and y.is_contiguous() and weights.is_contiguous()
    assert np.abs(array(y) - want_y).max() < (1e-5 if q.dtype == torch.float32 else 2e-2)
    assert np.abs(array(weights) - want_weights).max() < 1e-5, "in fp32 whatever the dtype of keys"
    for b, n in enumerate(stop.tolist()):
        assert (weights[b, :, n:] == 0).all(), "slots that are not filled"
    assert torch.allclose(weights.sum(-1), torch.full(weights.shape[:2], q.shape[1] / k.shape[1]), rtol=1e-5)


@st.composite
def steps(draw, slots=SLOTS):
    N, B = draw(st.sampled_from(slots)), draw(st.integers(1, 3))
    return dict(
        seed=draw(st.integers(0, 2**31 - 3)), B=B, H=draw(st.integers(1, 2)), g=draw(st.sampled_from(GROUPS)),
        D=draw(st.sampled_from(HEAD_DIMS)), N=N, dtype=draw(st.sampled_from(DTYPES)), spare=draw(st.integers(0, 1)),
        stops=draw(st.lists(st.one_of(st.just(N), st.integers(1, N)), min_size=B, max_size=B)),
    )  # fmt: skip


def step_is_float64(case, backend):
    with pytest.MonkeyPatch.context() as m:
        m.setenv("KV_FAST_BACKEND", backend)
        args = step(**case)
        check_step(observe(*args), *args)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=steps())
def test_step(backend, case):
    step_is_float64(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=400, deadline=None)
@given(case=steps(SLOTS + LONG))
def test_step_matrix(backend, case):
    step_is_float64(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16))
def test_long_rows_and_other_layouts(backend, dtype, monkeypatch):
    """More than one work item a row; keys as a projection leaves them, [B, N, H, D]; queries that are part of more."""
    monkeypatch.setenv("KV_FAST_BACKEND", backend)
    q, k, v, stop = step(1, 2, 2, 3, 32, 2100, [2100, 2049], dtype)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    q = torch.stack((q, q), 2)[:, :, 1]
    check_step(observe(q, k, v, stop), q, k, v, stop)


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_is_decode_attention(backend, monkeypatch):
    monkeypatch.setenv("KV_FAST_BACKEND", backend)
    q, k, v, stop = step(2, 3, 2, 4, 64, 100, [100, 1, 64], torch.float32)
    before = [x.clone() for x in (q, k, v, stop)]
    y, _ = observe(q, k, v, stop)
    want = decode_attention(q, k, v, torch.zeros_like(stop), stop)
    assert torch.allclose(y, want, atol=1e-5)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, (q, k, v, stop), strict=True))


def test_cpp_is_called_and_any_number_of_threads_gives_the_same_bits(monkeypatch):
    if not native.available():
        pytest.skip("no C++ compiler")
    monkeypatch.delenv("KV_FAST_BACKEND", raising=False)
    operation, called, threads = observed_attention.observed_attention, [], torch.get_num_threads()
    noted = lambda *args: called.append(len(args)) or operation.cpp(*args)  # noqa: E731
    monkeypatch.setitem(operation.versions, "cpp", (noted, None))
    args = step(3, 2, 2, 4, 64, 2500, [2500, 2100], torch.bfloat16)
    got = []
    for n in (1, 2):
        torch.set_num_threads(n)
        got.append(observe(*args))
    torch.set_num_threads(threads)
    assert called == [4, 4]
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step_is_one_graph(backend, monkeypatch):
    """Lengths change without another compilation."""
    monkeypatch.setenv("KV_FAST_BACKEND", backend)
    torch._dynamo.reset()
    compiled = torch.compile(observe, fullgraph=True, backend="aot_eager")
    for stops in ([40, 3], [41, 4]):
        args = step(4, 2, 2, 4, 32, 65, stops, torch.float32)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for a, b in zip(compiled(*args), observe(*args), strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_is_registered_right(backend, monkeypatch):
    monkeypatch.setenv("KV_FAST_BACKEND", backend)
    args = step(5, 2, 2, 4, 32, 20, [20, 7], torch.bfloat16)
    torch.library.opcheck(
        torch.ops.kv_fast.observed_attention.default, args, test_utils=("test_schema", "test_faketensor")
    )


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


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(prompt_cases(longest=150), LASTS, WINDOWS, CUTS)
def test_prompt_matrix(case, last, window, cut):
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
