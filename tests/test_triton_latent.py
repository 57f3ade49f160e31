"""Kernels of SALS beside test_operators.py: values that move from 8 bits to fewer, prompts, and whole models."""

from __future__ import annotations

import pytest
import torch
from operators import call, draw

import kernels.latent as latent
from kernels.latent import LatentTokens, store_prompt
from kernels.latent_attention import block_size
from kernels.op import OPERATIONS
from kernels.quantize import dequantize, quantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rand(gen, *size, dtype=torch.float32):
    return torch.randn(size, generator=gen).to(DEVICE, dtype)


def fill(gen, rows, slots, ranks, width, bits, dtype):
    """Random tokens in all slots."""
    latents = tuple(rand(gen, rows, slots, r, dtype=dtype) for r in ranks)
    values = rand(gen, rows, slots, width, dtype=dtype)
    return LatentTokens(latents, (values,) if bits == 16 else quantize(values, bits), bits)


def test_block_size():
    cpu = torch.device("cpu")
    assert block_size(64, 4096, 128, 2, 4, cpu) == 128 and block_size(8, 512, 128, 2, 4, cpu) == 32
    assert block_size(256, 448, 128, 2, 4, cpu) == 128, "Llama-2-7B, batch 8 at 4K"


@pytest.mark.parametrize("seed", range(3))
def test_attention_whose_basis_is_not_kept(seed, monkeypatch):
    """As for high ranks; test_operators draws low ones."""
    monkeypatch.setattr("kernels.latent_attention.KEPT", 0)
    args, (answer,) = draw("latent_attention", "triton", 40 + seed, "usual")
    answer.check(call(OPERATIONS["latent_attention"], "triton", args), "triton")


# ---- one token ----


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_requantized_as_torch_does(bits):
    """Groups that are constant, of a wide range, of tiny steps, beyond fp16, and many random ones."""
    gen = torch.Generator().manual_seed(bits)
    x = torch.randn(64, 32, generator=gen) * torch.logspace(-6, 5, 64)[:, None]
    x[0], x[1], x[2] = 0, 3.7, torch.linspace(-(2.0**bits), 2.0**bits, 32)
    ring = LatentTokens((torch.zeros(1, 1, 1),), tuple(y[None] for y in quantize(x.view(1, -1), 8)), 8)
    values = tuple(y.to(DEVICE) for y in ring.values)
    ring = LatentTokens((torch.zeros(1, 1, 1, device=DEVICE),), values, 8)
    empty = quantize(torch.zeros(1, 2, 64 * 32, device=DEVICE), bits)
    store = LatentTokens((torch.zeros(1, 2, 1, device=DEVICE), torch.zeros(1, 2, 0, device=DEVICE)), empty, bits)
    want = quantize(dequantize(values[0][0, 0], values[1][0, 0], 8), bits)
    new = torch.randn(1, 64 * 32, generator=gen).to(DEVICE)
    latent._append_launch(torch.ones(1, 1, device=DEVICE), new, torch.tensor([1], device=DEVICE), ring.latents[0],
                          *ring.coded(), *store.latents, *store.coded(), bits, 1)  # fmt: skip
    for got, expected in zip(store.values, want, strict=True):
        assert torch.equal(got[0, 0], expected)
    for got, expected in zip(ring.values, quantize(new[0], 8), strict=True):
        assert torch.equal(got[0, 0], expected)


# ---- a prompt ----


@pytest.mark.parametrize("bits", (4, 16))
def test_prompt_dispatches(monkeypatch, bits):
    gen = torch.Generator().manual_seed(0)
    fused, basis, lengths = rand(gen, 2, 9, 8, 32), rand(gen, 40, 64), torch.tensor([9, 4], device=DEVICE)
    k, v = fused[:, :, 2:4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2)
    out = []
    for backend in ("triton", "torch"):
        monkeypatch.setattr("kernels.backend.BACKEND", backend)
        store = fill(gen, 3, 12, (20, 12), 64, bits, torch.float32)
        store_prompt(store, basis, k, v, lengths)
        out.append(store)
    for b, n in enumerate(lengths.tolist()):
        for a, w in zip((*out[0].latents, *out[0].values), (*out[1].latents, *out[1].values), strict=True):
            assert torch.allclose(a[b, :n].float(), w[b, :n].float(), atol=1e-4)
