"""What low-rank attention has beside its operator (test_operators.py): how it is split, and changes of bases."""

from __future__ import annotations

import pytest
import torch
from operators import DEVICE, NAN, rand

from kernels import backend
from kernels.lowrank import split_counts
from kernels.oja import change_basis, cholesky_qr, oja_step, orthonormalize


def test_split_counts():
    """The latents fill the card; the full-rank tokens are one part beside them, or more where the latents are few."""
    cpu = torch.device("cpu")
    for groups, C, parts in ((8, 32768, (32, 1)), (64, 32768, (4, 1)), (256, 131072, (1, 1)), (8, 256, (4, 2))):
        assert split_counts(groups, C, 77, 96, 128, 64, cpu) == parts
    assert split_counts(8, 4096, 77, 512, 128, 64, cpu)[1] == 7, "parts of about the same size"


# ---- what stays torch ----


@pytest.mark.parametrize("side_by_side", (True, False))
@pytest.mark.parametrize("dtype, D, r, n", [
    (torch.float32, 32, 20, 11), (torch.bfloat16, 96, 77, 140), (torch.float16, 16, 9, 16),
    (torch.bfloat16, 200, 150, 64),
])  # fmt: skip
def test_change_basis(monkeypatch, side_by_side, dtype, D, r, n):
    """In either layout and place, without what 16 bits of a turn would round; slots that hold nothing may be NaN."""
    old, new = (torch.linalg.qr(rand(i, 2, 3, D, r)).Q for i in (1, 2))
    memory = rand(3, 2, 3, r, n, dtype=dtype)
    lat = memory.mT if side_by_side else memory.mT.contiguous()
    stored = torch.tensor([n, n * 2 // 3], device=DEVICE)
    want = (lat.double() @ old.double().mT) @ new.double()
    for version in ("torch", "triton"):
        monkeypatch.setattr(backend, "BACKEND", version)
        got = lat.clone()  # of the same strides
        got[1, :, stored[1] :] = NAN
        change_basis(got, old, new, stored)
        for b, m in enumerate(stored):
            error = (got[b, :, :m].double() - want[b, :, :m]).abs().max()
            # as exact as a result of 16 bits can be: half of a unit in the last place of the largest one
            assert error < want.abs().max() * torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.6), version


def test_orthonormal_without_the_host():
    """What a GPU does, against QR in fp64: bases of any condition that fp32 can hold; dependent columns stay finite."""
    D, r = 96, 58
    turn = torch.linalg.qr(rand(5, 3, r, r).double()).Q
    for digits in (0, 1, 4, 7):
        sizes = torch.logspace(0, -digits, r, dtype=torch.float64, device=DEVICE)
        basis = torch.linalg.qr(rand(6, 3, D, r).double()).Q * sizes @ turn
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
