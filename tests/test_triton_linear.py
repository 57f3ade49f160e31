"""Products with packed weights by the Triton kernel, interpreted or native, against float64; compiled ahead of time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import linear as K
from tests.compiling import report
from tests.test_experts import product
from tests.test_weights import FORMS, product_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(seed, rows, out, n, bits, group, form, bias, dtype):
    layer, x, _, want = product_of(seed, rows, out, n, bits, group, form, bias, dtype, DEVICE)
    got = K._in_triton(x, *layer.weight, layer.bias, bits)[:, :out]
    assert got.dtype == dtype
    # a bf16 row meets weights that tensor cores round to bf16
    most = (3e-6 if dtype == torch.float32 else 1.2e-2) * np.abs(want).max()
    assert np.abs(got.double().cpu().numpy() - want).max() < most


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_products_are_float64s(data):
    """Any form, rows and sizes: inputs that end within a tile, and an odd number of blocks of 16 outputs."""
    d = lambda *args: data.draw(st.sampled_from(args))  # noqa: E731
    group, bits = d(16, 32, 48, 64, 128), d(16, 8, 4)
    n = group * d(1, 2, 3, 6)
    group = n if bits == 16 else d(group, n)
    seed, out, rows = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 150)), d(1, 2, 5, 16, 17, 40)
    check(seed, rows, out, n, bits, group, d(*FORMS), d(True, False), d(torch.float32, torch.bfloat16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 7])
def test_every_form(rows, bits, form):
    check(bits, rows, 16 * 5 + 3, 16 * 6, bits, 16, form, True, torch.float32)


@pytest.mark.parametrize("bits, sms, blocks, R", [(4, 1, 19, 4), (16, 2, 17, 2), (8, 400, 9, 1)])
def test_tiles_of_several_blocks(bits, sms, blocks, R, monkeypatch):
    """As on cards that are full, with blocks of the last program beyond the end, and on one that few blocks leave idle:
    there inputs are split, of which the last share ends within a tile."""
    monkeypatch.setattr(K, "multiprocessors", lambda device: sms)
    assert K.tile_of(1, bits, blocks, torch.float32, DEVICE)["R"] == R
    n = 64 * 32 // bits * (11 if sms == 400 else 1) + 64
    shares = K.share_count(-(-blocks // R), -(-n * bits // 32 // 64), DEVICE)
    assert (shares > 1) == (sms == 400)
    for rows in (1, 3):
        check(bits, rows, 16 * (blocks - 1) + 5, n, bits, n if bits == 16 else 64, "steps and minima", True,
              torch.float32)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_many_rows(bits, dtype):
    """Several tiles of 64 rows of x, the last of them not full."""
    check(bits, 200, 70, 208, bits, 208 if bits == 16 else 16, "zeros", True, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_prompts_unpack_some_blocks_at_a_time(bits, form, monkeypatch):
    monkeypatch.setattr(K, "UNPACKED", 20)
    monkeypatch.setattr(K, "UNPACK_TILE", 2 * 16 * 192)
    monkeypatch.setattr(K, "_packed_linear_kernel", None)
    for dtype in (torch.float32, torch.bfloat16):
        check(bits, 21, 16 * 4 + 7, 192, bits, 192 if bits == 16 else 32, form, True, dtype)


def test_nothing_is_unpacked_for_a_batch(monkeypatch):
    """As a matrix product of the whole weight would, for rows up to UNPACKED."""
    monkeypatch.setattr(K, "_unpack_rows", None)
    monkeypatch.setattr(K, "dequantize", None)
    check(0, 65, 40, 64, 4, 32, "zeros", True, torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_experts(bits, form, monkeypatch):
    """Every row by the weight of its expert, whose blocks a program's tile does not divide; with inputs in shares."""
    full = form == "zeros"  # of as many blocks that a program takes several
    monkeypatch.setattr(K, "multiprocessors", lambda device: 1 if full else 100)
    out = 16 * (19 if full else 3)
    product(bits, 5, bits, 64, form, torch.float32, "triton", monkeypatch, 3, out, 64 * 5, (3e-6, 0), DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_experts(dtype, monkeypatch):
    """Outputs and inputs that a program's tile does not divide."""
    product(0, 5, 32, 0, "", dtype, "triton", monkeypatch, 3, 41, 301, (3e-6, 4e-3), DEVICE)


@pytest.mark.slow  # tests/test_triton_compile.py compiles one launch of every kernel in every run
def test_a_row_converts_no_codes():
    """One row: a pipeline's two barriers, and no code is converted; products load vectors of 16 bytes."""
    sizes = ("--models", "llama-3.1-8b", "--sizes", "1x1000", "--methods", "--weights", "int4", "int8")
    rows, done = report("--files", "linear", "--cc", "80,90", *sizes)
    products = [r for r in rows if "ROWS_X 1," in r["args"]]
    assert done.returncode == 0 and products, done.stderr
    for r in products:
        assert r["spills"] == 0 and r["loads"]["16"] >= 1 and r["loop"]["BAR"] <= 2 and r["loop"]["LDGSTS"] >= 1, r
        assert not any(name.startswith("I2F") for name in r["loop"]), r
