"""Bounds of pages and their scores against loops in float64; the kernel interpreted, or native on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.page_score import _page_score_triton, join_page, page_bounds, page_score

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rand(seed, *size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def bounds(k, lengths, page):
    """(b, h, p) -> least and greatest key of the page, channel by channel; pages without a token are left out."""
    out = {}
    for b, n in enumerate(lengths.tolist()):
        for h in range(k.shape[1]):
            for p in range(-(-n // page)):
                keys = [k[b, h, t].double() for t in range(p * page, min(n, (p + 1) * page))]
                out[b, h, p] = [torch.stack([f(x) for x in torch.stack(keys).unbind(1)]) for f in (min_of, max_of)]
    return out


def min_of(x):
    return x.sort().values[0]


def max_of(x):
    return x.sort().values[-1]


def score(q, low, high):
    """Channel by channel and query by query: the bound takes whichever corner is higher."""
    total = 0.0
    for x in q.double():
        for c, value in enumerate(x.tolist()):
            total += value * (high[c] if value > 0 else low[c]).item()
    return total


@st.composite
def cases(draw):
    return dict(
        seed=draw(st.integers(0, 2**31 - 9)), B=draw(st.integers(1, 2)), H=draw(st.integers(1, 2)),
        G=draw(st.sampled_from((1, 3, 5, 8))), D=draw(st.sampled_from((32, 64, 96, 128))),
        P=draw(st.integers(1, 21)), dtype=draw(st.sampled_from(DTYPES)), spare=draw(st.integers(0, 1)),
    )  # fmt: skip


def check(case, block):
    seed, B, H, G, D, P, dtype = (case[x] for x in ("seed", "B", "H", "G", "D", "P", "dtype"))
    q = rand(seed, B, H * G, D, dtype=dtype)
    a, b = (rand(seed + i, B + case["spare"], H, P, D, dtype=dtype) for i in (1, 2))
    low, high = a.minimum(b), a.maximum(b)
    last = torch.randint(P, (B,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    beyond = torch.arange(P, device=DEVICE) > last[:, None]
    for x in (low, high):
        x[:B].masked_fill_(beyond[:, None, :, None], float("nan"))
        x[B:] = float("nan")
    kernel, torch_version = _page_score_triton(q, low, high, last, block), page_score(q, low, high, last)
    assert kernel.shape == torch_version.shape == (B, H, P)
    for i in range(B):
        for h in range(H):
            for p in range(int(last[i]) + 1):
                want = score(q[i, h * G : (h + 1) * G].cpu(), low[i, h, p].cpu(), high[i, h, p].cpu())
                assert float(kernel[i, h, p]) == pytest.approx(want, abs=1e-3, rel=1e-5)
                assert float(torch_version[i, h, p]) == pytest.approx(want, abs=1e-3, rel=1e-5)


@settings(max_examples=8, deadline=None)
@given(cases(), st.sampled_from((1, 4, 16)))
def test_score(case, block):
    check(case, block)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from((1, 4, 16, 32)))
def test_score_matrix(case, block):
    check(case, block)


def test_no_key_is_above_its_bound():
    k, q = rand(1, 2, 2, 50, 32), rand(2, 2, 6, 32)
    low, high = page_bounds(k, torch.tensor([50, 50], device=DEVICE), 16)
    products = torch.einsum("bhgd,bhtd->bht", q.view(2, 2, 3, 32), k)  # of the group's queries, summed
    highest = torch.stack([products[..., i : i + 16].amax(-1) for i in range(0, 50, 16)], -1)
    assert (page_score(q, low, high) >= highest - 1e-4).all()
    one = page_score(q, k[:, :, :1], k[:, :, :1])  # a page of one token: the bound is the product
    torch.testing.assert_close(one[..., 0], products[..., 0])


@pytest.mark.parametrize("page", (1, 3, 16))
@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_of_a_prompt_and_of_tokens_that_join(page, dtype):
    """Ragged prompts, NaN behind their ends; decoded tokens complete a page and begin new ones."""
    lengths, steps = torch.tensor([1, 17, 33], device=DEVICE), 20
    k = rand(3, 3, 2, 33 + steps, 64, dtype=dtype)
    prompt = k[:, :, :33].clone()
    for b, n in enumerate(lengths.tolist()):
        prompt[b, :, n:] = float("nan")
    size = -(-(33 + steps) // page)
    low, high = (torch.full((3, 2, size, 64), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    for x, y in zip((low, high), page_bounds(prompt, lengths, page), strict=True):
        x[:, :, : y.shape[2]] = y
    for i in range(steps):
        token = torch.stack([k[b, :, n + i] for b, n in enumerate(lengths.tolist())])
        join_page(low, high, token, lengths + i, page)
    for (b, h, p), (least, greatest) in bounds(k.cpu(), lengths.cpu() + steps, page).items():
        assert torch.equal(low[b, h, p].double().cpu(), least) and torch.equal(high[b, h, p].double().cpu(), greatest)


def test_it_is_registered(monkeypatch):
    q, low = rand(5, 1, 4, 32), rand(6, 1, 2, 7, 32)
    want = page_score(q, low, low + 1)
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")
    step = torch.compile(lambda *x: page_score(*x) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(q, low, low + 1), 2 * want)
