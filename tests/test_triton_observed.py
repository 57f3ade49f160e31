"""The kernels of attention that also tells its weights against float64, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_observed_attention import step, step_oracle, steps

from kernels.observed_attention import launch, observed_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def empty_is_nan(monkeypatch):
    """What a kernel leaves unwritten is NaN: logits of slots that are not filled must not be read."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: fill_nan(empty(*size, **kw)))


def fill_nan(x):
    return x.fill_(float("nan")) if x.is_floating_point() else x


def check(got, args):
    (y, weights), (want_y, want_weights) = got, (torch.from_numpy(x) for x in step_oracle(*args))
    assert y.dtype == args[0].dtype and weights.dtype == torch.float32
    assert (y.double().cpu() - want_y).abs().max() < TOLERANCE[y.dtype]
    assert (weights.double().cpu() - want_weights).abs().max() < 1e-5, "in fp32 whatever the dtype of keys"
    assert (weights.cpu()[want_weights == 0] == 0).all(), "slots that are not filled"


def step_is_float64(case, block, splits):
    args = step(**case)
    check(launch(*(x.to(DEVICE) for x in args), block=block, splits=splits), args)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(steps(), st.sampled_from((16, 64)), st.integers(1, 5))
def test_step(case, block, splits):
    """Blocks that are partly filled, more parts than blocks, groups and heads that fill no tile."""
    step_is_float64(case, block, splits)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from((16, 32, 64)), st.integers(1, 20))
def test_step_matrix(case, block, splits):
    step_is_float64(case, block, splits)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_dtype_at_the_sizes_of_launches(dtype, monkeypatch):
    """By the operator, which calls the kernels; keys as a projection leaves them, [B, N, H, D]."""
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")
    q, k, v, stop = step(1, 2, 2, 4, 64, 129, [129, 65], dtype)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    check(observed_attention(*(x.to(DEVICE) for x in (q, k, v, stop))), (q, k, v, stop))


@pytest.mark.parametrize(("g", "D"), [(17, 32), (1, 16 * 13)])
def test_shapes(g, D):
    """More query heads than a tensor-core tile has rows; any head_dim; weights of several programs."""
    args = step(2, 1, 1, g, D, 150, [150], torch.float32)
    check(launch(*(x.to(DEVICE) for x in args), block=32, splits=2), args)


def test_a_compiled_step_is_one_graph(monkeypatch):
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")
    torch._dynamo.reset()
    args = [x.to(DEVICE) for x in step(3, 2, 1, 3, 32, 40, [40, 3], torch.float32)]
    compiled = torch.compile(lambda *a: observed_attention(*a), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*args), observed_attention(*args), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
