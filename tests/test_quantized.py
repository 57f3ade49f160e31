"""kivi, hadamard, fp8 and turboquant against oracles from the papers (oracle_quantized.py), and their parts."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from oracle_quantized import codebook, e4m3_numbers, fp8, hadamard, kivi, quarot, turboquant
from oracles import rotate
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cache.key_bias import KEY_BIAS
from cache.spec import make_args, method_class
from kernels import native
from kernels.backend import tl, triton
from kernels.codebook import e4m3, lloyd_max, quantize_book, read_book
from kernels.hadamard import hadamard_matrix
from kernels.quantize import groups_of
from kernels.quantized_attention import (
    QuantizedTokens,
    launch,
    launch_skipping,
    quantized_append,
    quantized_attention,
    read_tokens,
    skipping_quantized_attention,
    store_prompt,
)
from kernels.tiles import unpack_codes
from loading.checkpoint import random_transformer
from model import ModelArgs
from runtime import errors
from runtime.errors import InputError
from weights import WeightFormat

CASES = {  # method, knobs, (g, Hkv, D), prompt lengths, steps
    "kivi-2": ("kivi", dict(residual=32), (2, 2, 32), (1, 31, 32, 33, 70), 40),
    "kivi-4": ("kivi", dict(bits=4, residual=64), (4, 1, 64), (5, 100), 34),
    "kivi-3-grouped-by-3": ("kivi", dict(bits=3, residual=32), (3, 2, 64), (20, 63), 10),
    "kivi-8-keys-alone": ("kivi", dict(k_bits=8, v_bits=16, residual=32), (1, 1, 128), (70,), 4),
    "kivi-before": ("kivi", dict(residual=32, packed="before"), (2, 2, 32), (1, 31, 32, 33, 63), 40),
    "kivi-values-alone": ("kivi", dict(k_bits=16, v_bits=4, residual=32), (2, 1, 96), (40,), 4),
    "hadamard-4": ("hadamard", dict(recent=8), (2, 2, 32), (1, 7, 8, 9, 40), 20),
    "hadamard-2-sinks": ("hadamard", dict(bits=2, recent=1, sinks=4), (4, 1, 64), (2, 30), 8),
    "hadamard-3-groups": ("hadamard", dict(bits=3, group=32, recent=5, sinks=3), (1, 2, 128), (3, 20), 8),
    "hadamard-96": ("hadamard", dict(k_bits=4, v_bits=3, recent=4, clip=1.0), (2, 1, 96), (12,), 4),
    "kivi-of-80": ("kivi", dict(k_bits=2, v_bits=3, residual=32), (2, 2, 80), (1, 33, 70), 10),
    "kivi-of-40": ("kivi", dict(k_bits=3, v_bits=4, residual=32), (1, 2, 40), (20, 40), 14),
    "hadamard-of-80": ("hadamard", dict(recent=4), (2, 1, 80), (12,), 4),
    "hadamard-of-40": ("hadamard", dict(bits=3, recent=4, sinks=2), (2, 1, 40), (12,), 4),
    "fp8": ("fp8", {}, (2, 2, 32), (1, 31, 32, 63), 34),
    "fp8-64": ("fp8", dict(residual=64), (3, 1, 64), (70,), 60),
    "fp8-of-80": ("fp8", {}, (2, 1, 80), (40,), 4),
    "turboquant-4": ("turboquant", {}, (2, 2, 32), (1, 2, 40), 10),
    "turboquant-2-sinks": ("turboquant", dict(bits=2, recent=8, sinks=3), (4, 1, 64), (2, 30), 8),
    "turboquant-3": ("turboquant", dict(bits=3, recent=2), (1, 2, 128), (20,), 4),
    "turboquant-of-40": ("turboquant", dict(k_bits=3, v_bits=2), (2, 1, 40), (12,), 4),
    "turboquant-of-80": ("turboquant", dict(k_bits=16, v_bits=4, seed=3), (2, 1, 80), (12,), 4),
}


def numbers(seed: int, g: int, h: int, d: int, rows: int, n: int):
    """q [B, Hq, n, D], k, v [B, Hkv, n, D] before rotation; some channels of keys are large at every token."""
    gen = torch.Generator().manual_seed(seed)
    k, v = torch.randn(rows, h, n, d, generator=gen), torch.randn(rows, h, n, d, generator=gen)
    k[..., 3] += 8
    return torch.randn(rows, g * h, n, d, generator=gen), k, v


def layer(name, knobs, g, h, d, batch, T):
    args = ModelArgs(n_head=g * h, n_kv_head=h, head_dim=d, n_layer=1)
    shape = args.cache_shape(0, batch, T, torch.float32, torch.device("cpu"))
    cls = method_class(name)
    return cls(make_args(cls, knobs), shape, 0, args.rotary(batch, T, "cpu"))


def compare(name, knobs, shape, lengths, steps, seed=0, bias=None):
    g, h, d = shape
    B, S, T = len(lengths), max(lengths), max(lengths) + steps
    q, k, v = numbers(seed, g, h, d, B, T)
    method, length = layer(name, knobs, g, h, d, B, T + 3), torch.tensor(lengths)
    if bias is not None:
        method.key_bias = bias
        k = k + bias[:, None]
    method.prefill(q[:, :, :S], k[:, :, :S], v[:, :, :S], length)
    a = method.args
    told = dict(residual=a.residual) if name == "fp8" else dict(k_bits=a.k_bits or a.bits, v_bits=a.v_bits or a.bits)
    if name == "fp8":
        oracle = fp8
    elif name == "turboquant":
        oracle = turboquant
        told |= dict(recent=a.recent, sinks=a.sinks, rotation=method.matrix.double().numpy())
    elif name == "kivi":
        oracle, told = kivi, told | dict(residual=a.residual, packed=a.packed)
    else:
        oracle, told = quarot, told | dict(group=a.group or d, clip=a.clip, recent=a.recent, sinks=a.sinks)
    Q, K = (np.stack([rotate(x[:, :, i].double().numpy(), i) for i in range(T)], 2) for x in (q, k))
    V, off = v.double().numpy(), []
    shift = np.zeros((h, T, d))
    if bias is not None:
        shift = np.stack([rotate(bias.double().numpy(), i) for i in range(T)], 1)
    for step in range(steps):
        pos = length + step
        row = torch.arange(B)
        got = method.decode(q[row, :, pos], k[row, :, pos], v[row, :, pos], pos).numpy()
        if step % 7 and step + 1 < steps:  # every step writes, some are looked at
            continue
        for b in range(B):
            n = lengths[b] + step + 1
            for head in range(h):
                group = slice(head * g, head * g + g)
                want = oracle(Q[b, group, n - 1], K[b, head, :n], V[b, head, :n], **told, shift=shift[head, :n])
                off.append(np.abs(got[b, group] - want).max())
    # kivi rounds the very numbers that the oracle does. What is turned first, or has one scale for many, may fall
    # on the other side of a border in float32: a code of one token, which moves the output by less than 0.01
    off = np.array(off)
    assert np.median(off) < 2e-4 and off.max() < (2e-4 if name == "kivi" else 1e-2), f"{off.max()}, {np.median(off)}"


@pytest.mark.parametrize("backend", ["", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_oracle(case, backend, monkeypatch):
    monkeypatch.setattr("kernels.backend.BACKEND", backend)
    compare(*CASES[case])


@pytest.mark.parametrize("backend", ["", "torch"])
@pytest.mark.parametrize(
    "case", ["kivi-4", "kivi-before", "hadamard-4", "hadamard-96", "hadamard-of-40", "fp8", "turboquant-2-sinks"]
)
def test_centered_keys_are_the_oracles(case, backend, monkeypatch):
    """The bias is up to 60 in a fast pair of channels, a slow one and one alone."""
    monkeypatch.setattr("kernels.backend.BACKEND", backend)
    g, h, d = CASES[case][2]
    bias = torch.zeros(h, d)
    bias[:, [0, d // 2, d // 2 - 1, d - 2]] = torch.tensor([40.0, -60.0, 20.0, 50.0])
    bias[0] *= -0.5
    compare(*CASES[case], bias=bias)


@pytest.mark.parametrize(
    "bits, published", [(1, (0.7979,)), (2, (0.4528, 1.5104)), (3, (0.2451, 0.7560, 1.3439, 2.1520))]
)
def test_codebooks_are_those_of_the_density(bits, published):
    """TurboQuant states them for many channels: those of a normal number over sqrt(D)."""
    assert np.abs(lloyd_max(40, bits).numpy() - codebook(40, bits)).max() < 1e-5
    many = lloyd_max(4096, bits).numpy()
    assert np.abs(many[len(many) // 2 :] * 64 - published).max() < 2e-3 and np.allclose(many, -many[::-1])


def test_codebooks_are_numbers_whoever_asks_first():
    """A process that first makes one while tracing, or in inference mode, keeps no fake or inference tensor."""
    with FakeTensorMode(), torch.inference_mode():
        assert isinstance(lloyd_max(33, 2), FakeTensor)
    book = lloyd_max(33, 2)
    assert not isinstance(book, FakeTensor) and not book.is_inference() and book[-1] > 0.2


@pytest.mark.parametrize("bits, loss", [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_turboquant_loses_what_its_paper_says(bits, loss):
    """Theorem 1, of unit vectors: about 0.117, 0.03 and 0.009, which are Max's numbers of 1960."""
    method = layer("turboquant", dict(bits=bits), 1, 1, 128, 1, 8)
    assert torch.allclose(method.matrix @ method.matrix.T, torch.eye(128), atol=1e-5)
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0)) ** 3  # nothing like the sphere
    x = x / x.norm(dim=-1, keepdim=True)
    y = read_book(*quantize_book(method.turn(x), bits, method.keys.book), bits, method.keys.book)
    assert abs(float((y - method.turn(x)).square().sum(-1).mean()) / loss - 1) < 0.03
    other = layer("turboquant", dict(bits=bits, seed=1), 1, 1, 128, 1, 8)
    assert not torch.equal(method.matrix, other.matrix)


def test_e4m3_is_the_format():
    numbers = e4m3().double().numpy()
    assert numbers[:127].tolist() == e4m3_numbers() and np.isnan(numbers[[127, 255]]).all()
    assert (numbers[128:255] == -numbers[:127]).all()


@pytest.mark.parametrize("n", [1, 2, 12, 20, 32, 64, 80, 96, 128, 160, 224, 352])
def test_hadamard_matrices(n):
    h = hadamard_matrix(n).double()
    assert torch.allclose(h @ h.T, torch.eye(n, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(h.abs(), torch.full_like(h, n**-0.5))
    if n in (32, 80, 96, 128):
        assert np.abs(h.numpy() - hadamard(n)).max() < 1e-6


@pytest.mark.parametrize(
    "name, share",
    [
        ("kivi-4", 160 / 512), ("kivi-2", 96 / 512), ("hadamard-3", 104 / 512), ("turboquant-4", 132 / 512),
        ("turboquant-2", 68 / 512), ("fp8-8", 256.125 / 512),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_papers(name, share):
    """SALS, Table 2: 0.31 and 0.19 of the cache (16-bit numbers, D = 128); beside them the residual."""
    knobs = {} if name == "fp8-8" else dict(bits=int(name[-1]))
    method = layer(name.split("-")[0], knobs, 1, 1, 128, 1, 4096)
    assert (method.keys.vector_bytes + method.values.vector_bytes) / 512 == share


@pytest.mark.parametrize("name", ["kivi", "hadamard"])
def test_a_ring_is_no_longer_than_the_context(name):
    """And nothing changes by it: prompts and steps up to the last slot."""
    q, k, v = numbers(0, 2, 1, 32, 1, 40)
    got = []
    for T in (40, 300):
        method, y = layer(name, {}, 2, 1, 32, 1, T), []
        method.prefill(q[:, :, :30], k[:, :, :30], v[:, :, :30], torch.tensor([30]))
        for t in range(30, 40):
            y.append(method.decode(q[:, :, t], k[:, :, t], v[:, :, t], torch.tensor([t])))
        got.append(torch.stack(y))
        assert method.keys.full_precision.shape[2] == (
            min(128, -(-T // 32) * 32) + 1 if name == "kivi" else min(128, T)
        )
    assert torch.equal(*got)


# ---- the operator: C++ and Triton against torch ----

OPERATOR = [  # k_bits, v_bits, block, sinks, ring, (g, h, d)
    (2, 2, 32, 0, 33, (4, 1, 64)),
    (4, 4, 0, 3, 5, (2, 2, 32)),
    (3, 2, 0, 0, 1, (1, 1, 128)),
    (8, 3, 64, 0, 64, (3, 1, 96)),
    (16, 16, 0, 2, 7, (2, 1, 64)),
]
# the same, with codebooks; and heads of no whole groups
MORE = [
    (4, 2, 0, 3, 5, (2, 2, 32), True), (3, 3, 0, 0, 1, (3, 1, 80), True), (8, 8, 32, 0, 32, (4, 1, 64), True),
    (8, 8, 64, 0, 64, (2, 2, 40), True), (2, 3, 0, 0, 1, (4, 1, 128), True), (3, 16, 0, 2, 4, (1, 2, 96), True),
    (3, 3, 0, 2, 7, (2, 1, 40)), (2, 4, 32, 0, 33, (1, 2, 80)), (8, 2, 0, 0, 3, (2, 1, 40)),
]  # fmt: skip


def filled(k_bits, v_bits, block, sinks, ring, shape, book=False, dtype=torch.float32, lengths=(2, 40, 75)):
    """Keys and values after prompts and some appended tokens; NaN where nothing was written."""
    g, h, d = shape
    B, T = len(lengths), 96
    q, k, v = (x.to(dtype) for x in numbers(2, g, h, d, B, T))
    stores = []
    for bits, per, x in ((k_bits, block if k_bits < 16 else 0, k), (v_bits, block if book else 0, v)):
        data = torch.full((B, h, T, d), torch.nan, dtype=dtype)
        params = None
        if bits < 16:
            data = torch.full((B, h, T, d * bits // 8), 255, dtype=torch.uint8)
            scales = (1,) if book else (d, 2) if per else (groups_of(d), 2)
            params = torch.full((B, h, T // 32 if per else T, *scales), torch.nan, dtype=torch.float16)
        whole = torch.full((B, h, sinks + ring, d), torch.nan, dtype=dtype)
        codes = (e4m3() if bits == 8 else lloyd_max(d, bits)) if book and bits < 16 else None
        tokens = QuantizedTokens(data, params, whole, bits, sinks, per, book=codes)
        store_prompt(tokens, x[:, :, :75], torch.tensor(lengths))
        for i in range(3):
            pos = torch.tensor(lengths) + i
            quantized_append(x[torch.arange(B), :, pos], pos, tokens)
        stores.append(tokens)
    return q[:, :, 0], *stores, torch.tensor(lengths) + 2


BIASED = [(*case, "bias") for case in OPERATOR + MORE[-2:]]  # with what is added to the products


def arguments(case, dtype=torch.float32):
    """q, k, v, pos and the bias of a case."""
    q, k, v, pos = filled(*(x for x in case if x != "bias"), dtype=dtype)
    bias = 9 * torch.randn(*q.shape[:2], 80, generator=torch.Generator().manual_seed(5))  # of fewer than all slots
    return q, k, v, pos, bias if case[-1] == "bias" else None


@pytest.mark.cpp
@pytest.mark.parametrize("case", OPERATOR + MORE + BIASED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cpp_is_torch(case, dtype, monkeypatch):
    """Of the same codes in fp32. With a bf16 cache, queries and weights are integers of 12 to 16 bits."""
    q, k, v, pos, bias = arguments(case, dtype)
    got = quantized_attention(q, k, v, pos, bias=bias).float()
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    k, v = (x._replace(full_precision=x.full_precision.float(), data=x.data.float() if x.bits == 16 else x.data)
            for x in (k, v))  # fmt: skip
    want = quantized_attention(q.float(), k, v, pos, bias=bias)
    if dtype == torch.float32:
        bound = torch.tensor(1e-5)
    elif q.shape[2] % 32:  # not served: torch rounds what it reads
        bound = torch.tensor(3e-2)
    else:  # bf16 rounds the result to 8 bits
        bound = want.abs() / 2**8 + 2e-4
    assert ((got - want).abs() < bound).all()


@pytest.mark.parametrize("splits, case", list(product([(1, 1), (3, 2)], OPERATOR + MORE)) +
                         list(product([(3, 2)], BIASED)), ids=str)  # fmt: skip
def test_triton_is_torch(case, splits, kernel_device, monkeypatch):
    q, k, v, pos, bias = arguments(case)
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    want = quantized_attention(q, k, v, pos, bias=bias)
    at = (x.to(kernel_device) for x in (pos, k.packed_until(pos), v.packed_until(pos)))
    sides = (QuantizedTokens(*(x.to(kernel_device) if isinstance(x, torch.Tensor) else x for x in y)) for y in (k, v))
    bias = None if bias is None else bias.to(kernel_device)
    got = launch(q.to(kernel_device), *sides, *at, bias, splits=splits)
    assert (got.cpu() - want).abs().max() < 1e-4


def loops_that_skip(q, k, v, pos, bias, scale, shortest):
    """In float64, a block at a time, of dequantized tokens: the output, and how many tokens' values count."""
    (B, Hq, D), H, n = q.shape, k.full_precision.shape[1], 80
    y, count = torch.zeros(B, Hq, D, dtype=torch.float64), torch.zeros(B, H, dtype=torch.int64)
    keys, values = (read_tokens(x, pos, n).double() for x in (k, v))
    for b, h in product(range(B), range(H)):
        heads, end = slice(h * Hq // H, (h + 1) * Hq // H), int(pos[b]) + 1
        logits = q[b, heads].double() @ keys[b, h, :end].T
        logits = (logits if bias is None else logits + bias[b, heads, :end].double()) / D**0.5
        k_stop, v_stop = (int(x.packed_until(pos)[b]) for x in (k, v))
        packed = range(k.sinks, max(k.sinks, k_stop))
        there, before = [t for t in range(end) if t not in packed], torch.full((Hq // H,), -float("inf")).double()
        for block in range(3):
            own = [t for t in packed if t // 32 == block]
            if not own:
                continue
            most = logits[:, own].amax(1)
            if block * 32 + 32 > v_stop or (most >= before + min(0, math.log(scale / max(end, shortest)))).any():
                there, before = there + own, before.maximum(most)
        y[b, heads] = logits[:, there].softmax(-1) @ values[b, h, there]
        count[b, h] = len(there)
    return y, count


@pytest.mark.parametrize("backend", ["torch", "cpp", "triton"])
def test_values_that_weigh_nothing_are_left_out(backend, kernel_device, monkeypatch):
    monkeypatch.setattr("kernels.backend.BACKEND", "torch" if backend == "torch" else "")
    if backend == "cpp" and not native.available():
        pytest.skip("no C++ compiler")
    skipped = 0
    for case, scale, shortest in product(OPERATOR + MORE[:5] + BIASED[:3], (1e-9, 60.0), (1, 70)):
        if backend == "triton" and (scale < 1) == (shortest == 1):
            continue  # interpreted: slow
        q, k, v, pos, bias = arguments(case)
        want, count = loops_that_skip(q, k, v, pos, bias, scale, shortest)
        at = pos, k.packed_until(pos), v.packed_until(pos)
        if backend == "triton":
            on = lambda x: x.to(kernel_device) if isinstance(x, torch.Tensor) else x  # noqa: E731
            k, v = (QuantizedTokens(*map(on, x)) for x in (k, v))
            got, read = launch_skipping(on(q), k, v, *map(on, at), on(bias), scale, shortest)
        else:
            got, read = skipping_quantized_attention(q, k, v, *at, bias, scale, shortest)
        assert (got.cpu() - want).abs().max() < 1e-4
        assert torch.equal(read.cpu(), count)
        skipped += int((pos + 1).sum() * count.shape[1] - count.sum()) * (scale > 1)
    assert skipped > 60


# ---- key biases ----


def biased(bias: float, weights: str = "fp32", layers: int = 3, dtype=torch.float32):
    """As Qwen2.5's first and last layers have it, 50 to 200 in a few channels."""
    args = ModelArgs(
        dim=64, n_layer=layers, n_head=4, n_kv_head=2, head_dim=32, ffn_dim=64, vocab_size=96, qkv_bias=True
    )
    model = random_transformer(args, "cpu", dtype, 0, WeightFormat.parse(weights))
    for i in range(layers):
        wqkv = model.layers[i].attention.wqkv
        wqkv.bias.data.zero_()
        wqkv.bias.data[4 * 32 + torch.tensor([24, 30])] = bias * (i in (0, layers - 1))  # of the first KV head
    return model


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_large_key_bias_is_subtracted(weights, capsys):
    """By default where it is large, and keys are coded; elsewhere on request. Refusing it is warned of."""
    ways = {"hadamard": "02", "kivi": "02", "fp8": "02", "turboquant,bits=16": "", "hadamard,k_bits=16": "",
            "hadamard,v_bits=16": "02", "hadamard,bits=16,center=True": "012", "0-1:full,2:fp8": "2",
            "razor,induction=1.0,retrieval_method=turboquant": "02", "fp8,center=False": "",
            "self_index": ""}  # fmt: skip
    for bias in (0, 2, 200):
        model = biased(bias, weights)
        for method, layers in ways.items():
            errors.warn_once.cache_clear()
            capsys.readouterr()
            model.setup_cache(method, 1, 64)
            found = {str(i) for i, layer in enumerate(model.cache) for part in layer.modules()
                     if getattr(part, "key_bias", None) is not None}  # fmt: skip
            forced = method.endswith("center=True")
            assert found == set(layers if bias == 200 or forced else ""), (method, bias)
            said = [line for line in capsys.readouterr().err.splitlines() if "bias" in line]
            if bias < 200 or not method.endswith("center=False"):
                assert not said, (method, bias)
                continue
            assert len(said) == 1 and said[0].startswith("warning: fp8 with center=False rounds keys")
            assert "layers 0, 2 is up to " in said[0] and float(said[0].split("up to ")[1].split()[0]) > KEY_BIAS


def test_center_needs_a_bias():
    args = ModelArgs(dim=64, n_layer=2, n_head=2, n_kv_head=2, head_dim=32, ffn_dim=64, vocab_size=96)
    model = random_transformer(args, "cpu", torch.float32, 0)
    model.setup_cache("hadamard", 1, 64)
    with pytest.raises(InputError, match="hadamard: center=True subtracts .* leave it out"):
        model.setup_cache("hadamard,center=True", 1, 64)


@torch.inference_mode()
@pytest.mark.parametrize("method", ["hadamard,recent=1", "hadamard-8,recent=1", "turboquant", "fp8"])
def test_a_centered_cache_loses_about_what_it_does_without_a_bias(method):
    """Mean KL to `full` over 40 steps. The bias makes attention sharper, and other losses somewhat larger."""
    tokens = torch.randint(0, 96, (2, 100), generator=torch.Generator().manual_seed(3))

    def kl(model, method):
        out = []
        for name in ("full", method):
            model.setup_cache(name, 2, 100)
            model.prefill(tokens[:, :60], torch.tensor([60, 60]))
            steps = [model.decode(tokens[:, i], torch.tensor([i, i])) for i in range(60, 100)]
            out.append(torch.stack(steps).log_softmax(-1))
        return float((out[0].exp() * (out[0] - out[1])).sum(-1).mean())

    models = biased(0), biased(200)
    for model in models:
        for block in model.layers:
            block.attention.wqkv.weight.data[: 6 * 32] *= 4
            block.attention.wo.weight.data *= 4
        model.output.weight.data *= 8
    plain, centered = (kl(model, method) for model in models)
    with_bias = kl(models[1], f"{method},center=False")
    assert centered < 5 * plain and with_bias > 8 * centered, (plain, centered, with_bias)


@triton.jit
def _unpacked_codes(words, out, BITS: tl.constexpr, DTYPE: tl.constexpr):
    offs_n = tl.arange(0, 16)[:, None]
    codes = unpack_codes(tl.load(words + offs_n * 4 + tl.arange(0, 4)), BITS, DTYPE)
    tl.store(out + offs_n * 32 + tl.arange(0, 32), codes.to(tl.float32))


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16], ids=str)
@pytest.mark.parametrize("bits, words", [(4, torch.int32), (2, torch.int16)])
def test_codes_unpacked_without_conversion(bits, words, dtype, kernel_device):
    range_ = torch.iinfo(words)
    packed = torch.randint(range_.min, range_.max, (16, 4), dtype=words, device=kernel_device)
    out = torch.empty(16, 32, device=kernel_device)
    _unpacked_codes[(1,)](packed, out, bits, dtype)
    codes = (packed.long()[..., None] >> (bits * torch.arange(8, device=kernel_device))) & (2**bits - 1)
    assert torch.equal(out, codes.flatten(1).float())
