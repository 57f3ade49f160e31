"""The low-rank attention kernels against float64, interpreted without a GPU, and compiled for an H100."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import sampled
from test_contract import TOL, check_poison, check_second_turn, method_class, prompt, run, same, teacher, tiny

from kernels import oja
from kernels.lowrank import launch, lowrank_attention, split_counts
from kernels.oja import change_basis, cholesky_qr, oja_step, orthonormalize

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NAN = float("nan")


def rand(seed, *size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def want(q, k_lat, v_lat, k_basis, v_basis, stored, k_full, v_full, filled):
    """In float64, head by head: reconstruct what is stored, put the full-rank tokens beside it, attend."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    g = q.shape[1] // k_lat.shape[1]
    for b, h in ((b, h) for b in range(len(q)) for h in range(q.shape[1])):
        n, row, both = int(stored[b]), b if len(k_basis) > 1 else 0, []
        for lat, basis, full in ((k_lat, k_basis, k_full), (v_lat, v_basis, v_full)):
            back = lat[b, h // g, :n].double().cpu() @ basis[row, h // g].double().cpu().T
            both.append(torch.cat((back, full[b, h // g][filled[b]].double().cpu())))
        if len(both[0]):
            out[b, h] = (both[0] @ q[b, h].double().cpu() * q.shape[2] ** -0.5).softmax(0) @ both[1]
    return out


def problem(seed, stored, C, F, held, g, D, r, dtype, shared, side_by_side, heads=2, spare=1, r_v=None):
    """Arguments of `launch`. NaN in every slot that holds nothing, and in `spare` rows more than the batch has.

    held: share of the full-rank slots that are filled; side_by_side: the layout of ojakv's cache, or rows as long as
    the higher rank; r_v: the rank of values, where it is not r.
    """
    B, ranks = len(stored), (r, r_v or r)
    lat = [rand(seed + i, B + spare, heads, max(ranks), C, dtype=dtype) for i in (1, 2)]
    if not side_by_side:
        lat = [x.mT.contiguous().mT for x in lat]
    k, v = (x[:, :, :n] for x, n in zip(lat, ranks, strict=True))
    lat = [x.clone().mT if side_by_side else x.mT for x in (k, v)]
    rows = 1 if shared else B
    bases = [torch.linalg.qr(rand(seed + 3 + i, rows, heads, D, n)).Q.contiguous() for i, n in enumerate(ranks)]
    full = [rand(seed + i, B + spare, heads, F, D, dtype=dtype) for i in (5, 6)]
    filled = torch.rand(B, F, generator=torch.Generator().manual_seed(seed)).to(DEVICE) < held
    stored = torch.tensor([min(n, C) for n in stored], device=DEVICE)
    for x in lat:
        x[:B].masked_fill_((torch.arange(C, device=DEVICE) >= stored[:, None])[:, None, :, None], NAN)
    for x in full:
        x[:B].masked_fill_(~filled[:, None, :, None], NAN)
    for x in (*lat, *full):
        x[B:] = NAN
    q = rand(seed, B, heads * g, D, dtype=dtype)
    return q, *(x[:B] for x in lat), *bases, stored, *(x[:B] for x in full), filled


def check(got, expected, dtype):
    assert got.dtype == dtype and got.is_contiguous()
    error = (got.double().cpu() - expected).abs().max().item()
    assert error <= TOLERANCE[dtype], error


@st.composite
def cases(draw, most=70):
    D = draw(st.sampled_from((32, 64, 96, 128)))
    return dict(
        seed=draw(st.integers(0, 2**31 - 8)),
        stored=draw(st.lists(st.integers(0, most), min_size=1, max_size=3)),
        C=draw(st.integers(1, most)),
        F=draw(st.integers(1, 40)),
        held=draw(st.sampled_from((0.0, 0.1, 0.6, 1.0))),
        g=draw(st.sampled_from((1, 3, 4, 5, 8, 17))),
        D=D,
        r=draw(st.one_of(st.sampled_from((round(0.6 * D), round(0.8 * D), D)), st.integers(1, D))),
        r_v=draw(st.one_of(st.none(), st.integers(1, D))),
        dtype=draw(st.sampled_from(tuple(TOLERANCE))),
        shared=draw(st.booleans()),
        side_by_side=draw(st.booleans()),
        heads=draw(st.integers(1, 2)),
    )


splits = st.tuples(st.integers(1, 4), st.integers(1, 3))


def is_float64(case, block, parts):
    args = problem(**case)
    check(launch(*args, block=block, splits=parts), want(*args), case["dtype"])


@settings(max_examples=8, deadline=None)
@given(cases(40), st.just(16), splits)
def test_attention(case, block, parts):
    """Any rank, any number of latents and of full-rank tokens, none of either included; more splits than blocks."""
    is_float64(case, block, parts)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from((16, 32, 64)), splits)
def test_attention_matrix(case, block, parts):
    is_float64(case, block, parts)


# whole blocks and a rest in both layouts, blocks and splits as in launches, at a rank of 0.6 D of each dtype
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_dtype_as_it_is_launched(dtype):
    side_by_side = dtype != torch.float16
    args = problem(5, [130, 0, 128], 144, 20, 0.7, 4, 64, 38, dtype, False, side_by_side, heads=1)
    check(launch(*args), want(*args), dtype)


@pytest.mark.parametrize("ranks", [(50, 37), (9, 64)])
def test_keys_and_values_have_their_own_ranks(ranks):
    """Of the shipped model's layer 5 at energy 0.95, and in blocks of different widths."""
    args = problem(6, [40, 0, 33], 48, 12, 0.6, 2, 64, ranks[0], torch.float32, False, True, r_v=ranks[1])
    assert (args[1].shape[3], args[2].shape[3]) == ranks
    check(launch(*args, block=16, splits=(2, 1)), want(*args), torch.float32)


@pytest.mark.parametrize("r_v", sampled([19, 7, 30], [30]))
def test_equals_both_torch_forms(monkeypatch, r_v):
    args = problem(7, [33, 5], 48, 12, 0.5, 3, 32, 19, torch.float32, False, True, r_v=r_v)
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")
    got = lowrank_attention(*args)
    for backend, latent in (("torch", False), ("torch", True), ("", True)):
        monkeypatch.setenv("KV_FAST_BACKEND", backend)
        assert torch.allclose(got, lowrank_attention(*args, latent=latent), atol=2e-6)


def test_large_logits():
    """Latents in the hundreds: the weights of parts differ by thousands of powers of two."""
    args = list(problem(9, [40, 17], 48, 9, 0.8, 2, 32, 20, torch.float32, True, True))
    args[0] *= 50
    args[1] *= 20
    got, expected = launch(*args, block=16, splits=(3, 1)), want(*args)
    assert (got.double().cpu() - expected).abs().max() < 1e-3


def test_split_counts():
    """The latents fill the card; the full-rank tokens are one part beside them, or more where the latents are few."""
    cpu = torch.device("cpu")
    for groups, C, parts in ((8, 32768, (32, 1)), (64, 32768, (4, 1)), (256, 131072, (1, 1)), (8, 256, (4, 2))):
        assert split_counts(groups, C, 77, 96, 128, 64, cpu) == parts
    assert split_counts(8, 4096, 77, 512, 128, 64, cpu)[1] == 7, "parts of about the same size"


def test_registered():
    """Schema and fake tensors, with a q whose layout the output must not take over."""
    args = list(problem(0, [9, 4], 16, 6, 0.6, 2, 32, 20, torch.float32, False, True))
    args[0] = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    os.environ["KV_FAST_BACKEND"] = "triton"
    try:
        torch.library.opcheck(
            torch.ops.kv_fast.lowrank_attention.default, tuple(args), test_utils=("test_schema", "test_faketensor")
        )
    finally:
        del os.environ["KV_FAST_BACKEND"]


# ---- the update of the bases ----


@pytest.mark.parametrize(("D", "r", "m"), [(32, 19, 7), (96, 58, 5), (64, 64, 3)])
def test_token_by_token(D, r, m):
    """In Triton as in torch in float64; a row with fewer tokens ends in zeros."""
    basis, x = torch.linalg.qr(rand(1, 2, 2, D, r)).Q, rand(2, 2, 2, m, D) * 30
    x[1, :, 2:] = 0
    x = x * (0.1**0.5 / x.norm(dim=3, keepdim=True).clamp(min=1e-30))
    basis, x = basis.flatten(0, 1), x.flatten(0, 1)
    expected = basis.double()
    for token in x.double().split(1, 1):
        y = token @ expected
        expected = expected + (token - y @ expected.mT).mT @ y
    assert torch.allclose(oja.launch(basis, x).double(), expected, atol=1e-6)


# ---- what stays torch ----


@pytest.mark.parametrize("side_by_side", (True, False))
def test_change_basis(side_by_side):
    """In either layout, in place, and slots that hold nothing cost nothing."""
    old, new = (torch.linalg.qr(rand(i, 2, 3, 32, 20)).Q for i in (1, 2))
    lat = rand(3, 2, 3, 20, 11).mT if side_by_side else rand(3, 2, 3, 11, 20)
    lat[1, :, 7:] = NAN
    expected = (lat.double() @ old.double().mT) @ new.double()
    change_basis(lat, old, new)
    assert torch.allclose(lat.double(), expected, atol=1e-5, equal_nan=True)


def test_orthonormal_without_the_host():
    """What a GPU does, against QR in fp64: bases of any condition that fp32 can hold; dependent columns stay finite."""
    D, r = 96, 58
    turn = torch.linalg.qr(rand(5, 3, r, r).double()).Q
    for digits in (0, 1, 4, 7):
        basis = (torch.linalg.qr(rand(6, 3, D, r).double()).Q * torch.logspace(0, -digits, r).double()) @ turn
        basis = (1e3 * basis).float()
        want = orthonormalize(basis.double().cpu())
        got = cholesky_qr(basis)
        assert got.dtype == torch.float32 and (got.cpu() - want).abs().max() < 2e-7, digits
        assert (orthonormalize(basis).cpu() - want).abs().max() < 2e-7 * max(10, 10**digits)
    basis[..., 5], basis[..., 7] = basis[..., 2], 0
    got = cholesky_qr(basis)
    kept = [i for i in range(r) if i not in (5, 7)]
    assert got.isfinite().all() and got.norm(dim=1).max() < 1 + 1e-6
    q = got[..., kept].double()
    assert (q.mT @ q - torch.eye(len(kept), dtype=torch.float64, device=q.device)).abs().max() < 1e-6


def test_one_token_does_not_take_the_basis_over():
    """By `column`, what a token has next to nothing of is not turned by the full eta, and fp32 does as float64."""
    basis, x = torch.linalg.qr(rand(1, 1, 1, 64, 38)).Q, rand(2, 1, 1, 1, 64)
    got, exact = (
        orthonormalize(oja_step(basis.to(t), x.to(t), 0.1, "column")).double() for t in (torch.float32, torch.float64)
    )
    assert (got @ got.mT - exact @ exact.mT).abs().max() < 1e-6
    kept = (basis.mT @ got.to(basis.dtype)).square().sum() / 38
    assert kept > 1 - 0.1 / 38, f"a token of 64 channels moved {38 * (1 - kept):.2f} of 38 dimensions"


def test_padding_is_no_token():
    """`column` counts tokens: a row with fewer than the batch's has zeros behind them."""
    basis, x = torch.linalg.qr(rand(1, 1, 2, 32, 19)).Q, rand(2, 1, 2, 3, 32)
    padded = torch.cat((x, torch.zeros(1, 2, 5, 32, device=DEVICE)), 2)
    assert torch.allclose(oja_step(basis, x, 0.1, "column"), oja_step(basis, padded, 0.1, "column"), atol=1e-7)
    assert torch.equal(oja_step(basis, 0 * x, 0.1, "column"), basis)


# ---- the method, with every operation in Triton ----


@pytest.fixture
def triton_backend(monkeypatch):
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")


KNOBS = dict(n_start=2, n_recent=2, update_every=4, query_window=4)


@pytest.mark.slow  # that ojakv's kernels give what torch gives, tests/test_triton_contract.py sees in every run
def test_ojakv_loses_nothing_at_full_rank(triton_backend):
    model, prompts = tiny(2, 32, device=DEVICE), [prompt(n).to(DEVICE) for n in (1, 20)]
    model.setup_cache("ojakv", 3, 40, **KNOBS | method_class("ojakv").lossless)
    got, fed = run(model, prompts, 6)
    same(got, teacher(model, prompts, fed), "ojakv in Triton")


@pytest.mark.slow
def test_ojakv_is_what_it_is_in_torch(triton_backend, monkeypatch):
    model, prompts = tiny(2, 32, device=DEVICE), [prompt(n).to(DEVICE) for n in (3, 21)]
    model.setup_cache("ojakv", 2, 33, **KNOBS)
    got, fed = run(model, prompts, 6)
    monkeypatch.setenv("KV_FAST_BACKEND", "torch")
    model.reset_cache()
    same(got, run(model, prompts, 6, fed)[0], "Triton and torch", TOL)


@pytest.mark.slow
def test_ojakv_keeps_the_contract(triton_backend):
    check_poison("ojakv", KNOBS, (1, 7, 20), device=DEVICE)
    check_second_turn("ojakv", KNOBS, False, device=DEVICE)


@pytest.mark.slow
def test_ojakv_traces_to_one_graph(triton_backend):
    model, prompts = tiny(2, 32, device=DEVICE), [prompt(n).to(DEVICE) for n in (3, 12)]
    model.setup_cache("ojakv", 2, 33, **KNOBS)
    eager, fed = run(model, prompts, 6)
    model.reset_cache()
    torch._dynamo.reset()
    decode = torch.compile(model.decode, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(run(model, prompts, 6, fed, decode)[0], eager, "compiled")
