"""Products with packed weights by the Triton kernel, interpreted or native, against float64; compiled ahead of time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import linear as K
from tests.compiling import compiled
from tests.test_weights import FORMS, by_hand, codes
from weights import Layout, PackedLinear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(seed, rows, out, n, bits, group, form, bias, dtype):
    gen = torch.Generator().manual_seed(seed)
    c = None if bits == 16 else codes(gen, out, n, bits, group, form)
    layer = PackedLinear(n, out, bias, c.layout if c else Layout(16))
    if bits == 16:
        w = torch.randn(out, n, generator=gen)
        layer.put(0, w)
        w = w.bfloat16().double()
    else:
        layer.put(0, c)
        w = torch.from_numpy(by_hand(c))
    b = torch.randn(out, generator=gen)
    if bias:
        layer.bias.zero_()
        layer.put_bias(0, b)
    layer.to(DEVICE)
    x = torch.randn(rows, n, generator=gen).to(DEVICE, dtype)
    got = K._in_triton(x, *layer.weight, layer.bias, bits)[:, :out]
    want = x.double().cpu() @ w.T + (b.double() if bias else 0)
    assert got.dtype == dtype
    # a bf16 row meets weights that tensor cores round to bf16
    assert (got.double().cpu() - want).abs().max() < (3e-6 if dtype == torch.float32 else 1.2e-2) * want.abs().max()


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_products_are_float64s(data):
    d = lambda *args: data.draw(st.sampled_from(args))  # noqa: E731
    group, bits = d(16, 32, 64, 128), d(16, 8, 4)
    n = group * d(2, 4, 6)
    group = n if bits == 16 else d(group, n)
    seed, out = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 100))
    check(seed, d(1, 2, 5, 16), out, n, bits, group, d(*FORMS), d(True, False), d(torch.float32, torch.bfloat16))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_tiles_of_several_blocks(bits, monkeypatch):
    """As on a card whose multiprocessors are all busy: four blocks a program, the last of them beyond the end."""
    monkeypatch.setattr(K, "multiprocessors", lambda device: 1)
    for rows in (1, 3):
        check(bits, rows, 16 * 9 + 5, 256, bits, 256 if bits == 16 else 64, "steps and minima", True, torch.float32)


def test_more_rows_are_unpacked():
    check(0, 17, 40, 64, 4, 32, "zeros", True, torch.float32)


@pytest.mark.slow  # tests/test_triton_compile.py compiles the main kernel of every file in every run
def test_compiles_for_an_h100_without_spills():
    rows = compiled("--cc", "90", "--models", "llama-3.1-8b", "--files", "linear")
    assert len(rows) == 8 and all(r["spills"] == 0 for r in rows), rows
