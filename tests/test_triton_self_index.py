"""Kernels of Self-Indexing KVCache beside test_operators.py: the index of a prompt, borders of codes, even shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import DEVICE, NAN, TOLERANCE, Codes, rand, randint

from kernels.packed_gather_attention import FullPrecisionTokens, PackedTokens, launch
from kernels.quantize import dequantize, quantize
from kernels.quantize import launch as quantize_triton
from kernels.sign_encode import encode_keys, key_range
from kernels.sign_encode import launch as encode_triton

DTYPES, DIMS = tuple(TOLERANCE), (32, 64, 96, 128)
seeds = st.integers(0, 2**31 - 100)


def numbers(x):
    return x.detach().double().cpu().numpy()


# ---- quantize ----


def check_bytes(x, bits):
    """The kernel's bytes are those of the torch version, and code * scale + zero is x to half a step."""
    got, want = quantize_triton(x, bits), quantize(x, bits)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1].view(torch.int16), want[1].view(torch.int16))
    Codes(x.double().cpu().unflatten(-1, (-1, 32)), bits).check([y.cpu() for y in got], "triton")


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_quantize_at_borders(bits):
    """Multiples of half a step, where rounding halves to even decides; outliers beyond fp16; no token; any shape."""
    x = torch.arange(64, device=DEVICE).float().repeat(3, 1) * torch.tensor([[0.5], [1.0], [2**bits / 6]]).to(DEVICE)
    x[:, 31] = x[:, 0] + (2**bits - 1)
    check_bytes(x, bits)
    check_bytes(x[0], bits)
    wild = torch.tensor([1e30, -1e30, 65504, 65519, 65520, 0, -0.0, 1e-30] * 8, device=DEVICE)
    for part in (wild, wild.bfloat16(), wild.abs(), -wild.abs(), wild * 1e-8):
        for a, b in zip(quantize_triton(part, bits), quantize(part, bits), strict=True):
            assert torch.equal(a, b) and a.float().isfinite().all()
    assert quantize_triton(rand(0, 2, 0, 64), bits)[0].shape == (2, 0, 64 * bits // 8)


@pytest.mark.slow
def test_compiled_quantize_is_eager_bit_for_bit():
    """Inductor drops roundings to fp16 inside what it fuses: the operator of scale and zero keeps them."""

    def both(x, bits):
        packed, params = quantize(x * 1.0, bits)
        return packed, params, dequantize(packed, params, bits)

    for bits in (2, 8):
        torch._dynamo.reset()
        compiled, x = torch.compile(both, fullgraph=True), 3 * rand(bits, 64, 8, 128) + 1
        for got, want in zip(compiled(x, bits), both(x, bits), strict=True):
            assert (got - want).abs().max() < 1e-6 if want.dtype == torch.float32 else torch.equal(got, want)


# ---- the index of a prompt ----

prompts = st.fixed_dictionaries(
    dict(seed=seeds, lengths=st.lists(st.integers(1, 50), min_size=1, max_size=2), extra=st.integers(0, 20),
         H=st.integers(1, 2), D=st.sampled_from((*DIMS, 256)), dtype=st.sampled_from(DTYPES), parts=st.integers(1, 4))
)  # fmt: skip


def projected(seed, lengths, extra, H, D, dtype):
    """Keys [B, H, S, D] as views of a fused projection: tokens before heads; channels have a mean and a spread each."""
    S, B = max(lengths) + extra, len(lengths)
    k = rand(seed, B, S, H + 3, D) * (0.2 + rand(seed + 1, H + 3, D).abs()) + 2 * rand(seed + 2, H + 3, D)
    return k.to(dtype)[:, :, 1 : H + 1].transpose(1, 2), torch.tensor(lengths, device=DEVICE)


def check_index(seed, lengths, extra, H, D, dtype, parts):
    from kernels.sign_encode import _key_range_triton

    k, n = projected(seed, lengths, extra, H, D, dtype)
    want_mean, want_alpha = key_range(k, n)
    mean, low, high = _key_range_triton(k, n, parts)
    packed, book = encode_triton(k, want_mean, n, parts)
    for b, h in np.ndindex(len(lengths), H):
        x = numbers(k[b, h, : lengths[b]])
        for got in (mean, want_mean):
            assert np.allclose(numbers(got[b, h]), x.mean(0), atol=1e-5)
        assert np.array_equal(numbers(low[b, h]), x.min(0)) and np.array_equal(numbers(high[b, h]), x.max(0))
        x = numbers(k[b, h]) - numbers(want_mean[b, h])
        # the mean in fp32 leaves channels that are constant at either side of zero; the sign is that of fp32
        x = np.where(np.abs(x) < 1e-6, numbers(k[b, h].float() - want_mean[b, h]), x)
        alpha = np.maximum(np.abs(x[: lengths[b]]).max(0), 1e-3 * np.abs(numbers(k[b, h, : lengths[b]])).max())
        assert np.allclose(numbers(want_alpha[b, h]), alpha, rtol=1e-5)
        bits = (x >= 0).reshape(len(x), -1, 4)
        codes = bits[..., 0] * 8 + bits[..., 1] * 4 + bits[..., 2] * 2 + bits[..., 3]
        assert np.array_equal(packed[b, h].cpu().numpy(), codes[:, 0::2] + 16 * codes[:, 1::2])
        x, codes = x[: lengths[b]], codes[: lengths[b]]
        for g, c in np.ndindex(D // 4, 16):
            part, signs = x[:, 4 * g : 4 * g + 4], np.array([1 if c >> (3 - i) & 1 else -1 for i in range(4)])
            cell = part[codes[:, g] == c]
            want = cell.mean(0) if len(cell) else signs * np.abs(part).mean(0)
            assert np.allclose(numbers(book[b, h, g, c]), want, atol=1e-5, rtol=1e-5)
    other = encode_keys(k, want_mean, n)
    assert torch.equal(other[0], packed) and torch.allclose(other[1], book, atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(prompts)
def test_index_of_a_prompt(case):
    check_index(**case)


def test_range_of_the_kernel_is_the_torch_versions(monkeypatch):
    """Also of channels that are constant, where the floor holds, and whatever the padding holds."""
    k, n = projected(0, [9, 40, 1], 3, 2, 64, torch.float32)
    k[..., 5] = 3.0
    want = key_range(k, n)
    for b, length in enumerate(n.tolist()):
        k[b, :, length:] = NAN
    monkeypatch.setattr("kernels.backend.BACKEND", "triton")
    for got, expected in zip(key_range(k, n), want, strict=True):
        assert torch.allclose(got, expected, atol=1e-5, rtol=1e-4)


def test_the_index_is_the_same_every_time():
    k, n = projected(0, [40], 0, 1, 64, torch.bfloat16)
    mean = key_range(k, n)[0]
    a, b = (encode_triton(k, mean, n, 3) for _ in range(2))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# ---- attention ----


def test_a_query_times_alpha_beyond_fp16():
    v, v_params = quantize(rand(0, 1, 1, 45, 64), 2)
    none = torch.zeros_like(v), torch.zeros_like(v_params)  # keys of 0: their product with an infinite query is NaN
    alpha, signs = torch.full((1, 1, 64), 2.0**13, device=DEVICE), v.new_zeros(1, 1, 45, 8)
    packed = PackedTokens(none[0], v, 2, none[1], v_params, alpha, signs)
    whole = FullPrecisionTokens(*(torch.zeros(1, 1, n, 64, dtype=torch.float16, device=DEVICE) for n in (0, 0, 1, 1)))
    slots, n = torch.arange(45, device=DEVICE)[None, None], torch.tensor([45], device=DEVICE)
    given = (packed, whole, n - 1, n, n * 0)
    y = launch(torch.full((1, 2, 64), 64.0, device=DEVICE).half(), slots, n[None], *given)
    assert np.abs(numbers(y) - numbers(dequantize(v, v_params, 2)).mean(2)).max() < TOLERANCE[torch.float16]


def test_shares_are_even(monkeypatch):
    """By what a row holds, not by what it could: a query of zeros gives every token a weight of 1, a share's lse their
    number. Lists, prompts and rings from empty to full, flushed in part."""
    B, H, D, K, sinks, ring, T, S, block = 4, 1, 32, 150, 20, 60, 256, 3, 16
    seen = []
    monkeypatch.setattr("kernels.packed_gather_attention.combine", lambda part, lse, dtype: seen.append(lse) or part)
    store = PackedTokens(rand(0, B, H, T, D), rand(1, B, H, T, D), 16)
    whole = FullPrecisionTokens(*(rand(2 + i, B, H, (sinks, ring)[i // 2], D) for i in range(4)))
    prompt, decoded = (torch.tensor(n, device=DEVICE) for n in ([900, 900, 7, 1], [1, 200, 59, 1]))
    count, idx = randint(7, 0, K + 1, B, H), randint(8, 0, T, B, H, K)
    count[0], count[2] = K, 0
    for flushed in (0, 10):
        there, q = torch.tensor([flushed], device=DEVICE), torch.zeros(B, H, D, device=DEVICE)
        launch(q, idx, count, store, whole, prompt + decoded - 1, prompt, there, block, S)
        tokens = seen.pop().exp2().round().view(B, H, S)
        tail = (decoded - flushed).clamp(0, ring)
        held = count + (prompt.clamp(max=sinks) + tail)[:, None]
        assert torch.equal(tokens.sum(2).long(), held)
        assert (tokens.amax(2) < tokens.mean(2) + block).all()
        assert torch.equal((tokens > 0).sum(2), held.add(block - 1).div(block, rounding_mode="floor").clamp(max=S))
