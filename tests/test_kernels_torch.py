"""Properties of the torch versions in kernels/, the reference of every other version, against loops and brute force."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import causal_attention
from torch.backends.cuda import cudnn_sdp_enabled
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.backend
import kernels.rope
from kernels import dense_attention
from kernels.dense_attention import decode_attention, masked_attention, prefill_attention
from kernels.gather_attention import gather_attention
from kernels.observed_attention import observed_attention, prefill_attention_mass
from kernels.packed_attention import _packed_attention_masked, packed_attention
from kernels.packed_gather_attention import FullPrecisionTokens, PackedTokens, packed_gather_attention
from kernels.quantize import pack, unpack
from kernels.quantized_attention import QuantizedTokens, quantized_attention
from kernels.rope import Rope, RopeArgs
from kernels.sign_codes import pack_codes, sign_codes, sign_patterns
from kernels.verify_attention import verify_attention

quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31 - 1)
bits_ = st.sampled_from((2, 4, 8))


@pytest.fixture(autouse=True)
def in_torch(monkeypatch):
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")


def rand(seed, *size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def randint(seed, high, *size):
    return torch.randint(high, size, generator=torch.Generator().manual_seed(seed))


# ---- quantization ----


@quick
@given(seeds, bits_)
def test_every_code_survives_packing(seed, bits):
    codes = randint(seed, 2**bits, 2, 3, 32).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape[-1] == 32 * bits // 8 and torch.equal(unpack(packed, bits), codes)
    first = pack(torch.tensor([1] + [0] * (8 // bits - 1), dtype=torch.uint8), bits)
    assert first.item() == 1, "the first code stands in the lowest bits"


# ---- sign codes ----


def test_patterns_are_eq_3():
    for code, pattern in enumerate(sign_patterns().tolist()):
        assert sum((1 + s) / 2 * 2 ** (4 - i) for i, s in enumerate(pattern, 1)) == code
    assert torch.equal(sign_codes(sign_patterns()).flatten(), torch.arange(16, dtype=torch.uint8))


@quick
@given(seeds, st.sampled_from((32, 64, 96, 128)))
def test_signs_survive_packing(seed, d):
    x = rand(seed, 2, 3, d)
    x[0, 0, :5] = 0.0  # zero counts as positive
    want = torch.where(x >= 0, 1.0, -1.0)
    packed = pack_codes(sign_codes(x))
    assert packed.shape[-1] == d // 8 and torch.equal(sign_patterns()[unpack(packed, 4).long()].flatten(-2), want)


# ---- dense attention ----


def _of_a_list(q, k, v):
    B, H, n, _ = k.shape
    idx, count = torch.arange(n).expand(B, H, n), torch.full((B, H), n)
    return idx, count, torch.zeros(B, dtype=torch.int64)


def _packed(q, k, v):
    idx, count, none = _of_a_list(q, k, v)
    whole = FullPrecisionTokens(*(x[:, :, :0] for x in (k, v)), *(x[:, :, :1] for x in (k, v)))  # the tail is empty
    return packed_gather_attention(q, idx, count, PackedTokens(k, v, 16), whole, none - 1, none, torch.zeros(1))


def _quantized(q, k, v):
    side = [QuantizedTokens(x, None, x[:, :, -1:], 16, 0) for x in (k, v)]
    return quantized_attention(q, *side, torch.full((len(q),), k.shape[2] - 1))


ATTENTIONS = dict(
    masked=lambda q, k, v: masked_attention(q, k, v, torch.ones(len(k), 1, k.shape[2], dtype=torch.bool)),
    decode=lambda q, k, v: decode_attention(q, k, v, None, torch.full((len(k),), k.shape[2])),
    ragged=lambda q, k, v: decode_attention(q.repeat(2, 1, 1), k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1), None,
                                            torch.tensor([k.shape[2], 1]))[:1],
    packed=lambda q, k, v: packed_attention(q, k, v, torch.full((len(k),), k.shape[2])),
    packed_masked=lambda q, k, v: _packed_attention_masked(
        q, k, v, torch.full((len(k),), k.shape[2]), None, None, None),
    gather=lambda q, k, v: gather_attention(q, k, v, *_of_a_list(q, k, v)[:2]),
    packed_gather=_packed,
    quantized=_quantized,
    observed=lambda q, k, v: observed_attention(q, k, v, torch.full((len(k),), k.shape[2]))[0],
    verify=lambda q, k, v: verify_attention(q[:, :, None], k, v, None, torch.full((len(k),), k.shape[2]))[:, :, 0],
    prompt=lambda q, k, v: prefill_attention_mass(
        q[:, :, None].expand(-1, -1, k.shape[2], -1), k, v, torch.tensor([k.shape[2]]), None)[0][:, :, -1],
)  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_logits_are_not_rounded_to_the_dtype_of_keys(attention, dtype):
    """q . k of 10^6, where fp16 ends at 65,504; two keys lead, 8 apart, which bf16 does not tell there."""
    n, D = 40, 64
    q, k, v = torch.full((1, 4, D), 128.0), 100 * rand(0, 1, 2, n, D).sign(), rand(1, 1, 2, n, D)
    q[..., 0], k[:, :, [7, 19]], k[:, :, 7, 0], k[:, :, 19, 0] = 1, 128, 0, 8
    q, k, v = (x.to(dtype) for x in (q, k, v))
    p = (q.double().view(1, 2, 2, D) @ k.double().mT / D**0.5).softmax(-1)
    got = ATTENTIONS[attention](q, k, v)
    assert p[0, 0, 0, 7] > 0.2 and got.dtype == dtype
    assert (got.double() - (p @ v.double()).view(1, 4, D)).abs().max() < 0.02


@pytest.mark.parametrize("window", (None, 1, 2, 7, 16, 22, 23, 50))
@pytest.mark.parametrize("block", (1, 4, 5, 1024))
def test_prefill_attention_is_the_loop(window, block, monkeypatch):
    """In blocks of queries, that change nothing."""
    monkeypatch.setattr(dense_attention, "QUERY_BLOCK", block)
    q, k, v = rand(0, 2, 6, 23, 32), rand(1, 2, 2, 23, 32), rand(2, 2, 2, 23, 32)
    want = causal_attention(*(x.double().numpy() for x in (q, k, v)), window)
    assert np.abs(prefill_attention(q, k, v, window).double().numpy() - want).max() < 1e-5


@pytest.mark.parametrize("window", (None, 40))
def test_a_prompt_in_a_batch_has_the_numbers_that_it_has_alone(window):
    """To the bit, whatever stands behind it: else quantizing layers make another text of it."""
    lengths = torch.tensor([61, 333, 7, 100])
    q, k, v = rand(0, 4, 4, 333, 32), rand(1, 4, 2, 333, 32), rand(2, 4, 2, 333, 32)
    want = causal_attention(*(x.double().numpy() for x in (q, k, v)), window)
    for b, n in enumerate(lengths.tolist()):
        for x in (q, k, v):
            x[b, :, n:] = torch.nan
        alone = prefill_attention(*(x[b : b + 1, :, :n] for x in (q, k, v)), window)
        assert np.abs(alone[0].double().numpy() - want[b, :, :n]).max() < 1e-5
        assert torch.equal(prefill_attention(q, k, v, window, lengths)[b, :, :n], alone[0])


class Largest(TorchDispatchMode):
    """Notes the most bytes of memory that any operation gives back."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


def test_a_long_prompt_is_rotated_in_place_of_its_copies(monkeypatch):
    """What is made in fp32 is of a chunk's size, and the numbers are those of one call."""
    rope, x = Rope(RopeArgs(), 32, 64, 2, 41), rand(0, 2, 3, 41, 32).bfloat16()
    want = rope.rotate_prompt(x.mT.contiguous().mT)
    monkeypatch.setattr(kernels.rope, "PROMPT_CHUNK", 8)
    with Largest() as largest:
        got = rope.rotate_prompt(x)
    assert torch.equal(got, want) and got.is_contiguous()
    assert largest.nbytes == got.nbytes, "no more at a time than the result"


def test_angles_of_many_tokens_have_16_bits_on_a_gpu(monkeypatch):
    """They follow the prompts, too; caches of fp32, and a CPU, read fp32."""
    args, lengths = RopeArgs(type="dynamic", factor=4.0), torch.tensor([30, 60])
    for backend, dtype in (("triton", torch.bfloat16), ("triton", torch.float32), ("torch", torch.bfloat16)):
        monkeypatch.setattr(kernels.backend, "BACKEND", backend)
        rope = Rope(args, 32, 32, 2, 64)
        rope.shorten(dtype)
        rope.set_prompt(lengths)
        short = torch.float16 if (backend, dtype) == ("triton", torch.bfloat16) else torch.float32
        for table, of in zip(rope.tables, (rope.cos, rope.sin), strict=True):
            assert table.dtype == short and torch.equal(table, of.to(short))
        assert not torch.equal(rope.cos[0], rope.cos[1])


CARDS = {"T4": (7, 5), "A100": (8, 0), "H100": (9, 0)}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("window", (None, 7))
@pytest.mark.parametrize("kv_heads", (2, 6))
def test_on_a_gpu_no_prompt_is_quadratic_in_memory(kv_heads, window, dtype, card, monkeypatch):
    """Torch is asked for what its fused kernels take alone, with its plain version closed to it. So is the CPU's."""
    attend = dense_attention._attend_on
    fake = SimpleNamespace(is_cuda=True, device=None, shape=(2, 6, 23, 32))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CARDS[card])
    monkeypatch.setattr(dense_attention, "CUDNN_FROM", 23)
    monkeypatch.setattr(dense_attention, "QUERY_BLOCK", 16)
    monkeypatch.setattr(dense_attention, "_attend_on", lambda q: attend(fake))
    real, calls, cudnn = F.scaled_dot_product_attention, [], int(SDPBackend.CUDNN_ATTENTION)

    def fused(q, k, v, mask=None, is_causal=False, enable_gqa=False):
        """What torch's kernels take: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
        assert not torch.backends.cuda.math_sdp_enabled()
        assert (torch._C._get_sdp_priority_order()[0] == cudnn) == (card == "H100") == cudnn_sdp_enabled()
        grouped = q.shape[1] != k.shape[1]
        flash = card != "T4" and dtype == torch.bfloat16 and mask is None
        assert enable_gqa == grouped and is_causal == (mask is None) and (flash or not grouped)
        calls.append(k.untyped_storage().data_ptr())
        return real(q, k, v, mask, is_causal=is_causal, enable_gqa=enable_gqa)

    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
    q, k, v = (x.to(dtype) for x in (rand(0, 2, 6, 23, 32), *(rand(i, 2, kv_heads, 23, 32) for i in (1, 2))))
    want = causal_attention(*(x.double().numpy() for x in (q, k, v)), window)
    got = prefill_attention(q, k, v, window)
    assert got.shape == q.shape and got.dtype == dtype
    assert np.abs(got.double().numpy() - want).max() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert calls and set(calls) == {k.untyped_storage().data_ptr()}, "keys are read where they are"
