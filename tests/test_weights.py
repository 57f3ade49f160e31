"""Packed weights: products against float64, and models against the same model with what the codes stand for."""

from __future__ import annotations

import ctypes
import functools
import json
import re
import sys
from itertools import pairwise, product
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from formats_files import model_tensors, pack_gptq, random_codes, sentencepiece_vocab, write_folder, write_gguf
from gguf import GGMLQuantizationType as Q
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cache.grammar import method_files
from cache.spec import method_class
from engine import LLM
from kernels import linear as K
from kernels import native
from kernels.native import build
from loading.allocate import empty_transformer
from loading.checkpoint import load_checkpoint, random_transformer, save_checkpoint_tensors, tensors_of
from loading.config import args_from_hf
from model import ModelArgs
from runtime.errors import InputError
from runtime.machine import TINY
from scripts import quantize as quantize_script
from weights import Codes, Joined, Layout, Linear, PackedLinear, WeightFormat, first_outputs, open_checkpoint, quantize

BACKENDS = ["", "torch"]  # C++ where there is a compiler


FORMS = ("symmetric", "zeros", "minima", "steps", "steps and minima", "floats")  # floats: of 8 bits alone


def codes(gen, out, n, bits, group, form):
    """Random ones of a form; 8-bit codes have minima in steps of a group each where 4-bit ones have zeros."""
    low, high = (-127, 128) if bits == 8 else (0, 16)
    c = torch.randint(low, high, (out, n), generator=gen, dtype=torch.int8 if bits == 8 else torch.uint8)
    groups = n // group
    halves = lambda k: (torch.rand(out, k, generator=gen) * 0.02 + 1e-3).half()  # noqa: E731
    bytes_ = lambda: torch.randint(-128, 128, (out, groups), generator=gen, dtype=torch.int8)  # noqa: E731
    shared = 2 if groups % 2 == 0 else 1
    got = Codes(c, halves(groups), None, bits)
    if form == "floats" and bits == 8:
        c[(c & 127) == 127] = 0  # NaN
        return Codes(c.view(torch.float8_e4m3fn), torch.rand(out, groups, generator=gen) * 1e-3, None, 8)
    if form == "zeros" and bits == 4:
        got.zero = torch.randint(0, 16, (out, groups), generator=gen, dtype=torch.uint8)
    if form.startswith("steps"):
        got.scale, got.step = bytes_() | 1, halves(groups // shared) / 64
    if form == "minima":
        got.minimum = -halves(groups)
    elif form == "steps and minima":
        got.minimum, got.min_step = bytes_(), halves(groups // shared) / -64
    elif form == "zeros" and bits == 8:
        got.minimum, got.min_step = bytes_(), -got.scale
    return got


def by_hand(c: Codes) -> np.ndarray:
    """w = scale * (code - zero), or scale * code + minimum, in float64."""

    def wide(x, step):  # [out, groups] -> [out, in]
        x = x.double().numpy() if step is None else x.double().numpy() * np.repeat(
            step.double().numpy(), x.shape[1] // step.shape[1], 1)  # fmt: skip
        return np.repeat(x, c.group, 1)

    if c.minimum is not None:
        return wide(c.scale, c.step) * c.codes.numpy().astype(int) + wide(c.minimum, c.min_step)
    zero = np.full(c.scale.shape, 8 if c.bits == 4 else 0) if c.zero is None else c.zero.numpy().astype(int)
    return wide(c.scale, c.step) * (c.codes.double().numpy() - np.repeat(zero, c.group, 1))


def product_of(seed, rows, out, n, bits, group, form, bias, dtype, device="cpu"):
    """A packed layer, x, the weights that it stands for, and their product with x, in float64."""
    gen = torch.Generator().manual_seed(seed)
    c = None if bits == 16 else codes(gen, out, n, bits, group, form)
    layer = PackedLinear(n, out, bias, c.layout if c else Layout(16))
    w = torch.randn(out, n, generator=gen) if c is None else c
    layer.put(0, w)
    w = w.bfloat16().double().numpy() if c is None else by_hand(c)
    b = torch.randn(out, generator=gen)
    if bias:
        layer.bias.zero_()[:out] = b
    x = torch.randn(rows, n, generator=gen).to(dtype)
    want = x.double().numpy() @ w.T + (b.double().numpy() if bias else 0)
    return layer.to(device), x.to(device), w, want


def rounding(x, w, group):
    """The error of x @ w.T [rows, out] if x has 16 bits of the largest of its group: sqrt(3) standard deviations."""
    parts = [slice(i, i + group) for i in range(0, x.shape[1], group)]
    return 2**-16 * sum(np.outer((x[:, g] ** 2).max(1), (w[:, g] ** 2).sum(1)) for g in parts) ** 0.5


def check_product(seed, rows, out, n, bits, group, form, bias, dtype, backend):
    layer, x, w, want = product_of(seed, rows, out, n, bits, group, form, bias, dtype)
    got, x = layer(x), x.double().numpy()
    assert got.shape == (rows, out) and got.dtype == dtype
    error = np.abs(got.double().numpy() - want)
    spread = (x**2 @ (w**2).T) ** 0.5  # of the sums if signs were random: what is left of one may be next to nothing
    size = max(np.abs(want).max(), 4 * spread.max())
    if dtype == torch.float32:  # x in 16 bits of the largest of its group, or x and W in two bf16 parts
        noise = rounding(x, w, group)
        assert error.max() < 2e-6 * size + (3 * noise.max() if backend == "" else 0)
        mean = 0.5 + 1.6 / rows**0.5  # weights of one sign share a row's error
        assert (error / (noise + 2e-7 * spread)).mean() < mean
    else:
        assert error.max() < (8e-3 if backend == "" and rows < K.MANY else 2e-2) * size


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_products_are_float64s(backend, data):
    """Any number of rows of x, groups of 16 to 128 or a whole row, 8 and 4 bits of every form, and bf16."""
    d = lambda *args: data.draw(st.sampled_from(args))  # noqa: E731
    group = d(16, 32, 64, 128)
    n = group * d(1, 2, 3, 4, 5)
    bits, dtype = d(16, 8, 4), d(torch.float32, torch.bfloat16)
    rows, out = data.draw(st.integers(1, 45)), data.draw(st.integers(1, 70))
    with pytest.MonkeyPatch.context() as m:
        m.setattr("kernels.backend.BACKEND", backend)
        group, form = n if bits == 16 else d(group, n), d(*FORMS)
        seed, bias = data.draw(st.integers(0, 99)), d(True, False)
        check_product(seed, rows, out, n, bits, group, form, bias, dtype, backend)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([32, 16, 8, 4]), st.integers(1, 9), st.integers(1, 1500), st.sampled_from([2, 3, 7, 40]))
def test_threads_share_a_product(bits, rows, out, threads):
    """What one takes from another's share is there once: the bits of one thread, however many rows each has. Only
    rounding may differ where a library multiplies, whose threads may sum in another order."""
    gen = torch.Generator().manual_seed(out)
    layer = Linear(64, out, bias=False) if bits == 32 else PackedLinear(64, out, False, Layout(bits, 32))
    layer.weight.data.normal_(generator=gen) if bits == 32 else layer.put(0, torch.randn(out, 64, generator=gen))
    x, before = torch.randn(rows, 64, generator=gen), torch.get_num_threads()
    ours = native.available() and (bits != 32 or rows > 1 or native.ask("multiplies_one_row"))
    try:
        torch.set_num_threads(1)
        with torch.no_grad():
            want = layer(x)
            weight = layer.weight if bits == 32 else layer.dense(0, out)
            torch.testing.assert_close(want.double(), x.double() @ weight.double().T, rtol=0, atol=2e-3)
            torch.set_num_threads(threads)
            for _ in range(20):
                torch.full_like(want, torch.nan)  # freed at once: the memory in which what is not written would show
                torch.testing.assert_close(layer(x), want, rtol=0, atol=0 if ours else 1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.cpp
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_products_with_weights_as_they_are(data):
    """Any rows and outputs; in C++, where few rows run, one gives the same beside any others, to the bit."""
    d = lambda *args: data.draw(st.sampled_from(args))  # noqa: E731
    rows, out, n, dtype = d(1, 2, 3, 4, 7, 8, 17, 31), d(1, 3, 4, 66, 300), d(16, 48, 272, 1040), d(*native.DTYPES)
    gen = torch.Generator().manual_seed(rows * out + n)
    x, w, b = (torch.randn(*size, generator=gen).to(dtype) for size in ((rows, n), (out, n), (out,)))
    want = x.double() @ w.double().T + b.double()
    with torch.no_grad():
        got, alone = K.dense_linear(x, w, b), K.dense_linear(x[[-1, -1]], w, b)[:1]
    many = K.MANY_BF16 if dtype == torch.bfloat16 and native.ask("has_tiles") else K.MANY
    few = (rows > 1 or native.ask("multiplies_one_row")) and rows < many
    assert native.available() and got.dtype == dtype and (not few or torch.equal(got[-1:], alone))
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 8e-3), error


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_with_rows_of_a_wide_range(bits):
    """Zeros, a number that dwarfs its group, tiny and huge ones, NaN and infinity: a row harms no other."""
    gen = torch.Generator().manual_seed(bits)
    layer, c = PackedLinear(256, 40, False, Layout(bits, 64)), codes(gen, 40, 256, bits, 64, "zeros")
    layer.put(0, c)
    w = torch.from_numpy(by_hand(c))
    x = torch.randn(9, 256, generator=gen)
    x[1], x[2, 70], x[3], x[4] = 0, 1e6, x[3] * 1e-35, x[4] * 1e30
    x[5, 7], x[6, 200], x[7, 255] = torch.nan, torch.inf, -torch.inf
    got, want = layer(x), x.double() @ w.T
    assert torch.equal(got[1], torch.zeros(40)) and not got[5:8].isfinite().any()
    for i in (0, 2, 3, 4, 8):  # every group has its own step: what is far from the large number keeps its precision
        off = torch.zeros(256, dtype=torch.float64)
        for g in range(0, 256, 64):
            off[g : g + 64] = x[i, g : g + 64].double().abs().max() * 2**-15
        least = 1e-6 * want[i].abs().max() + 1e-30 * w.abs().sum(1)
        assert ((got[i].double() - want[i]).abs() <= off @ w.abs().T + least).all(), i
    # one row may be summed in another order than nine
    torch.testing.assert_close(layer(x[8:]), got[8:], rtol=0, atol=2e-6 * want[8].abs().max().item())


def test_gradients_flow_through_weights_as_they_are():
    layer, x = Linear(16, 3), torch.ones(2, 16)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 16), 2.0))


@pytest.mark.parametrize("own", [True, False])
def test_a_prompt_takes_a_way_of_its_own(own, monkeypatch):
    """More rows than are multiplied in registers, more of W than one tile."""
    if native.available():
        monkeypatch.setattr(ctypes.c_int64.in_dll(build.library(), "kvf_own_ways"), "value", own)
    check_product(0, 70, 9000, 256, 4, 64, "zeros", False, torch.float32, "")
    check_product(0, 70, 1000, 256, 4, 32, "steps and minima", False, torch.float32, "")
    wide = native.available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if own and wide and not native.ask("has_tiles"):
        return  # rows of x in 16 bits
    gen = torch.Generator().manual_seed(0)
    layer, c = PackedLinear(256, 1000, False, Layout(4, 64)), codes(gen, 1000, 256, 4, 64, "zeros")
    layer.put(0, c)
    x = torch.randn(70, 256, generator=gen)
    want = x.double() @ torch.from_numpy(by_hand(c)).T
    assert (layer(x).double() - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("sizes", [dict(ffn_dim=72), dict(dim=72), dict(head_dim=24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_of_sizes_that_are_no_whole_vectors(sizes, dtype):
    args = dict(dim=64, n_layer=1, n_head=2, n_kv_head=2, head_dim=32, ffn_dim=64, vocab_size=96) | sizes
    model = random_transformer(ModelArgs(**args), "cpu", dtype)
    tokens = torch.arange(8).view(1, -1)
    with torch.inference_mode():
        got = model(tokens)
        model.layers[0].plain = False
        assert (got - model(tokens)).abs().max() < 1e-2 and all(model(tokens[:, :n]).isfinite().all() for n in (1, 2))
        model.layers[0].plain = True
        assert model(tokens[:, :0]).shape == (1, 0, 96)


@pytest.mark.parametrize(
    "bits, dtype", [(4, torch.float32), (8, torch.bfloat16), (16, torch.float32), (16, torch.bfloat16)]
)
def test_long_prompts(bits, dtype):
    """More rows than W is unpacked for at once, inputs that are no whole chunks, an odd number of blocks."""
    n, rows, out = 592, 1060, 150
    for form in FORMS[:1] if bits == 16 else ("zeros", "steps and minima"):
        check_product(0, rows, out, n, bits, n if bits == 16 else 16, form, True, dtype, "")


@pytest.mark.parametrize(
    "bits, group, forms",
    [(8, 32, "sss"), (8, 32, "szs"), (8, 96, "ssz"), (4, 32, "zzz"), (4, 32, "sss"), (4, 32, "szs"), (4, 96, "ssz"),
     (4, 32, "mmm"), (8, 16, "mmm"), (8, 16, "ttt"), (4, 16, "bbb"), (8, 32, "bbb")],
)  # fmt: skip
def test_what_is_put_is_there(bits, group, forms):
    """Parts of a fused layer, the last of them ending within a block of 16 rows; zeros are held if a part has some."""
    gen = torch.Generator().manual_seed(1)
    said = dict(s="symmetric", z="zeros", m="minima", t="steps", b="steps and minima")
    parts = [codes(gen, n, 96, bits, group, said[f]) for n, f in zip((16, 48, 5), forms, strict=True)]
    layer = PackedLinear(96, 16 + 48 + 5, False, parts[0].layout)
    for first, c in zip((0, 16, 64), parts, strict=True):
        layer.put(first, c)
    for first, c in zip((0, 16, 64), parts, strict=True):
        got = layer.rows(first, len(c.codes))
        for name in ("codes", "scale", "step", "zero", "minimum", "min_step", "bits"):
            want = getattr(c, name)
            assert want is None or (torch.equal(getattr(got, name), want) if name != "bits" else got.bits == want), name
        assert layer.takes(c) and np.array_equal(by_hand(got), by_hand(c))
    assert (layer.zero is not None) == (bits == 4 and "z" in forms)
    x = torch.randn(3, 96, generator=gen)
    assert torch.equal(first_outputs(layer, x, 48), layer(x)[:, :48])
    with pytest.raises(InputError, match="blocks of 16 rows"):
        layer.put(8, parts[0])


@pytest.mark.parametrize("bits", [8, 4])
def test_quantization_rounds_to_nearest(bits):
    """No weight is further from its code than half a step, and what a group's codes are follows from its ends."""
    w = torch.randn(24, 128, generator=torch.Generator().manual_seed(2)) * torch.rand(24, 1)
    w[3], w[4, :64], w[5, :32] = 0, 0.25, w[5, :32].abs() + 1
    c = quantize(w, bits, 32)
    assert (
        c.group == 32 and c.scale.dtype == torch.float16 and c.codes.dtype == (torch.uint8 if bits == 4 else torch.int8)
    )
    error = (c.dequantize() - w).abs().view(24, 4, 32).amax(-1)
    # half a step, and what the fp16 scale and the whole zero lose at the ends of the range
    assert (error <= c.scale.float() * (0.51 + 0.07 * (bits == 8) + 0.5 * (bits == 4))).all()
    assert (c.dequantize()[3] == 0).all()
    again = quantize(c.dequantize(), bits, 32)
    assert (again.dequantize() - c.dequantize()).abs().max() < 2e-3 * w.abs().max()


# ---- models ----

ARGS = dict(dim=64, n_layer=2, n_head=4, n_kv_head=2, head_dim=32, ffn_dim=96, vocab_size=96, max_seq_len=256)
KINDS = ["bf16", "int8", "int4", "int8:channel"]


def pair(kind, head=None, dtype=torch.float32, seed=0, **more):
    """A model of packed weights, and a dense one of what they stand for."""
    args = ModelArgs(**ARGS | more)
    dense = random_transformer(args, "cpu", torch.float32, seed)
    with torch.no_grad():
        for p in dense.parameters():
            if p.dim() == 2:
                p *= 3
    packed = empty_transformer(args, "cpu", dtype, WeightFormat.parse(kind, head).choose)
    theirs = tensors_of(dense)
    assert theirs.keys() == tensors_of(packed).keys()
    for name, to in tensors_of(packed).items():
        to.put(theirs[name].read().clone())
        theirs[name].put(to.read().float())
        assert to.shape == theirs[name].shape, name
    return packed.eval(), dense.eval()


def advised(x):
    """Whether the kernel was asked for huge pages where x lies."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(n, 16) for n in place.groups())
            here = start <= x.data_ptr() + x.nbytes // 2 < stop
        elif here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the tensor lies nowhere")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@pytest.mark.parametrize("kind", ["fp32", *KINDS])
def test_weights_and_caches_lie_in_huge_pages(kind):
    """A model is made without memory first: what is asked of the tensors of then is lost."""
    model = random_transformer(
        ModelArgs(**ARGS | dict(dim=1024, ffn_dim=2048)), "cpu", torch.float32, weight_format=WeightFormat.parse(kind)
    )
    model.setup_cache("full", 32, 256)
    weights = [t for t in (*model.parameters(), *model.buffers()) if t.nbytes >= 1 << 20]
    caches = [t for method in model.cache for t in method.buffers() if t.nbytes >= 1 << 20]
    assert len(weights) >= 4 and len(caches) >= 4 and all(advised(t) for t in weights + caches)
    layers = [t for t in (*model.layers.parameters(), *model.layers.buffers()) if t.numel()]
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in layers)
    assert all(start % 64 == 0 and 0 <= start - stop < 64 for (_, stop), (start, _) in pairwise(ends))


SHAPES = [dict(), dict(tie_embeddings=True), dict(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)]


@pytest.mark.parametrize("shape, kind", list(product(SHAPES, KINDS)))
def test_logits_are_those_of_the_dequantized_weights(kind, shape):
    torch._dynamo.reset()
    packed, dense = pair(kind, **shape)
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(3))
    got, want = packed(tokens), dense(tokens)
    assert (got - want).abs().max() < 1.5e-4 * want.abs().max()
    for model in (packed, dense):
        model.setup_cache("full", 2, 64)
    lengths, pos = torch.tensor([40, 13]), torch.tensor([40, 13])
    got, want = (m.prefill(tokens, lengths) for m in (packed, dense))
    assert (got - want).abs().max() < 1.5e-4 * want.abs().max()
    compiled = kind == "int4"  # one graph, as of any other layer
    step = torch.compile(packed.decode, fullgraph=True, backend="aot_eager") if compiled else packed.decode
    for _ in range(3):
        token = want.argmax(-1)
        with torch.inference_mode():
            got, want = step(token, pos), dense.decode(token, pos)
        assert (got - want).abs().max() < 1.5e-4 * want.abs().max()
        pos = pos + 1


def test_the_head_has_bits_of_its_own():
    packed, _ = pair("int4")
    assert packed.output.bits == 8 and packed.layers[0].feed_forward.w2.bits == 4
    packed, dense = pair("int4", "int4", tie_embeddings=True)
    assert packed.output.bits == 4
    x = torch.randint(0, 96, (5,))
    assert torch.equal(packed.embed(x), dense.embed(x))
    assert pair("int8", "bf16")[0].output.bits == 16


@pytest.mark.parametrize("method", sorted(method_files()))
def test_a_cache_has_a_dtype_of_its_own(method):
    """An fp32 step with a bf16 cache gives what a bf16 cache can, a bf16 step with an fp32 cache runs, too."""
    args = ModelArgs(**ARGS)
    model = random_transformer(args, "cpu", torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p *= 8
    tokens, lengths = torch.randint(0, 96, (2, 40)), torch.tensor([40, 25])
    out = {}
    for compute, cached in ((torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        model.to(compute).kv_dtype = cached
        model.setup_cache(method, 2, 64, **method_class(method).lossless)
        assert {t.dtype for name, t in model.cache[0].named_buffers() if name in ("k", "v", "k_lat")} <= {cached}
        model.prefill(tokens, lengths)
        out[compute, cached] = model.decode(tokens[:, 0], lengths).float()
        assert model.kv_bytes_full(2, 64) == 2 * 2 * 2 * 2 * 64 * 32 * cached.itemsize
    exact = out.pop((torch.float32, torch.float32))
    for got in out.values():
        assert 0 < (got - exact).abs().max() < 0.1 * exact.abs().max()


# ---- checkpoints ----


CONFIG = dict(model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=32, vocab_size=90, max_position_embeddings=128,
              attention_bias=True)  # fmt: skip


def write(folder, change=None, config=CONFIG):
    """A checkpoint with random weights."""
    tensors = save_checkpoint_tensors(random_transformer(args_from_hf(config), "cpu", torch.float32), torch.float32)
    if change:
        change(tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_packed_while_it_is_read(folder, kind):
    dense = save_checkpoint_tensors(load_checkpoint(folder), torch.float32)
    weight_format = WeightFormat.parse(kind)
    model = load_checkpoint(folder, weight_format=weight_format)
    packed = save_checkpoint_tensors(model, torch.float32)
    assert packed.keys() == dense.keys()
    for name, w in dense.items():
        bits = weight_format.bits if w.dim() == 2 and "embed" not in name else 0
        bits = weight_format.head_bits if "lm_head" in name else bits
        want = w
        if bits in (4, 8):
            want = quantize(w, bits, weight_format.group_of(w.shape[1], bits)).dequantize()
        elif bits == 16 or w.dim() == 2:
            want = w.bfloat16().float()
        assert torch.equal(packed[name], want), name


def test_what_cannot_be_packed_is_one_line(folder, tmp_path):
    for text in ("int3", "int4:48", "bf16:32", "int8:", "", "4"):
        with pytest.raises(InputError, match="--weights"):
            WeightFormat.parse(text)
    for head in ("int2", "fp32x"):
        with pytest.raises(InputError, match="--head"):
            WeightFormat.parse("int4", head)
    with pytest.raises(InputError, match="--head"):
        WeightFormat.parse(None, "int8")
    with pytest.raises(InputError, match="no groups of 128"):
        load_checkpoint(folder, weight_format=WeightFormat.parse("int4:128"))
    write(tmp_path, lambda t: t["model.layers.0.mlp.up_proj.weight"][3].fill_(float("nan")))
    for kind in KINDS:
        with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj\.weight"):
            load_checkpoint(tmp_path, weight_format=WeightFormat.parse(kind))


# ---- what users have on disk ----


@pytest.fixture(scope="module")
def as_gguf(tmp_path_factory):
    """The shipped model as GGUF of a kind -> its path."""
    config, tensors = json.loads((TINY / "config.json").read_text()), load_file(TINY / "model.safetensors")

    @functools.cache
    def make(kind):
        path = tmp_path_factory.mktemp("gguf") / f"{kind.name}.gguf"
        vocab = lambda w: (sentencepiece_vocab(w, TINY), w.add_add_space_prefix(False))  # noqa: E731
        return write_gguf(path, config, tensors, kind, vocab)

    return make


def test_a_gguf_says_what_its_folder_says(as_gguf):
    """Same greedy tokens and text; a method with a calibration is refused, as the file has no place for it."""
    llms = [LLM(x) for x in (TINY, as_gguf(Q.F32))]
    assert LLM(as_gguf(Q.F32).parent).tokenizer.encode("import os") == llms[0].tokenizer.encode("import os")
    prompts = ["import os", "def main():\n    ", "The code for the red door is 5371."]
    want, got = ([(c.text, c.tokens) for c in llm.generate(prompts, max_new_tokens=24)] for llm in llms)
    assert got == want and len(got[0][1]) == 24
    llms[1].use("sals")
    with pytest.raises(InputError, match=r"calibrate.py --checkpoint"):
        llms[1].generate("import os", max_new_tokens=2)


WIDE = dict(model_type="llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, vocab_size=90, max_position_embeddings=128, rms_norm_eps=1e-5,
            rope_theta=1e4, torch_dtype="float32", tie_word_embeddings=False)  # fmt: skip
# Of two layers' q, k, v, o, gate, up, down: what quantizers mix, and more than they do.
MIXED = (
    [Q.Q4_K, Q.Q4_K, Q.Q6_K, Q.Q5_K, Q.Q3_K, Q.Q3_K, Q.Q2_K],
    [Q.Q4_0, Q.Q8_0, Q.Q4_1, Q.Q5_0, Q.F16, Q.Q5_1, Q.IQ4_XS],
)


def mixed_gguf(path, tied=False, kinds=MIXED, ends=(Q.Q6_K, Q.F16)):
    """A model of matrices of many types -> path, and Hugging Face's names with the weights, by the gguf package."""
    config, rng = WIDE | dict(tie_word_embeddings=tied), np.random.default_rng(0)
    names = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    types = {
        f"model.layers.{i}.{n}.weight": k for i, layer in enumerate(kinds) for n, k in zip(names, layer, strict=True)
    }
    types |= {"model.embed_tokens.weight": ends[0], "lm_head.weight": ends[1]}
    tensors, want = model_tensors(config), {}
    for name, t in tensors.items():
        kind = types.get(name, Q.F32)
        want[name] = t
        if t.dim() == 2:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if kind in (Q.F16, Q.BF16):
                data = gguf.quants.quantize(t.numpy() * 0.05, kind)
            else:  # random bytes; a block's fp16 numbers are small
                data = rng.integers(0, 256, (len(t), t.shape[1] // block, size), dtype=np.uint8)
                for at in SMALL[kind]:
                    data[..., at + 1] = data[..., at + 1] % 8 + 8 + data[..., at + 1] // 128 * 128
                data = data.reshape(len(t), -1)
            tensors[name] = torch.from_numpy(data.view(np.uint8))
            w = torch.from_numpy(gguf.quants.dequantize(data, kind))
            heads = dict(q_proj=4, k_proj=2).get(name.split(".")[-2])
            want[name] = w.view(heads, 32, 2, -1).transpose(1, 2).reshape(w.shape) if heads else w
    write_gguf(path, config, tensors, types)
    return path, want


# Where a block has fp16 numbers
SMALL = {Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q2_K: [80, 82], Q.Q3_K: [108],
         Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_NL: [0], Q.IQ4_XS: [0], Q.IQ2_S: [0]}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_a_mixed_gguf_is_held_as_it_is(tied, tmp_path, capsys):
    """Every matrix in the bits of its own type, parts of a fused one apart; nothing is rounded again, or it is said."""
    path, want = mixed_gguf(tmp_path / "mixed.gguf", tied)
    model = load_checkpoint(path)
    assert capsys.readouterr().err == ""
    held = save_checkpoint_tensors(model, torch.float32)
    assert held.keys() == want.keys()
    for name, w in want.items():
        assert torch.equal(held[name], w.float()), name
    first, second = model.layers[0], model.layers[1]
    assert [part.layout for part in first.attention.wqkv.parts] == [Layout(4, 32, 8, True), Layout(8, 16, 16)]
    assert first.feed_forward.w13.layout == Layout(4, 16, 16) and len(second.attention.wqkv.parts) == 3
    assert [type(part) for part in second.feed_forward.w13.parts] == [Linear, PackedLinear]
    dense, ids = load_checkpoint(path, weight_format=WeightFormat.parse("fp32")), torch.randint(0, 90, (2, 40))
    assert not any(isinstance(m, PackedLinear) for m in dense.modules())
    got, exact = model(ids), dense(ids)
    assert (got - exact).abs().max() < 2e-4 * exact.abs().max()
    x = torch.randn(3, 256)
    for block in model.layers:
        assert torch.equal(first_outputs(block.attention.wqkv, x, 256), block.attention.wqkv(x)[:, :256])
    model.setup_cache("full", 2, 64)
    step = torch.compile(model.decode, fullgraph=True, backend="aot_eager")
    pos = torch.tensor([40, 17])
    model.prefill(ids, pos)
    with torch.inference_mode():
        assert (step(ids[:, 0], pos) - model.decode(ids[:, 0], pos)).abs().max() < 1e-4 * exact.abs().max()
    load_checkpoint(path, weight_format=WeightFormat.parse("int4"))
    assert re.search(r"note: 13 tensors of .*mixed.gguf are quantized already", capsys.readouterr().err)


def test_parts_held_in_different_ways_are_one_layer():
    """Outputs, biases and the first outputs alone, of a part that ends within a block of 16 rows, too."""
    gen = torch.Generator().manual_seed(0)
    parts, sizes = [], (32, 20, 5)
    for n, layout in zip(sizes, (Layout(4, 32, None, True), Layout(8, 32), None), strict=True):
        part = Linear(64, n) if layout is None else PackedLinear(64, n, True, layout)
        if layout is None:
            torch.nn.init.normal_(part.weight, generator=gen)
        else:
            part.put(0, codes(gen, n, 64, layout.bits, 32, "minima" if layout.minimum else "symmetric"))
            part.bias.copy_(torch.randn(part.bias.shape, generator=gen))
        parts.append(part)
    layer, x = Joined(parts), torch.randn(3, 64, generator=gen)
    weight = torch.cat(
        [p.weight if isinstance(p, Linear) else p.dense(0, n) for p, n in zip(parts, sizes, strict=True)]
    )
    with torch.no_grad():
        want = x.double() @ weight.double().T + layer.bias.double()
        assert layer.bias.shape == (57,) and (layer(x) - want).abs().max() < 2e-4 * want.abs().max()
        for n in (32, 48, 52, 57):
            assert torch.equal(first_outputs(layer, x, n), layer(x)[:, :n])
    assert Joined([Linear(64, 3, bias=False)]).bias is None


def test_types_that_no_codes_hold_are_unpacked_and_said(tmp_path, capsys):
    path, want = mixed_gguf(
        tmp_path / "a.gguf", kinds=([Q.Q8_0] * 4 + [Q.IQ2_S] * 3, [Q.BF16] * 7), ends=(Q.BF16, Q.F16)
    )
    model = load_checkpoint(path)
    assert re.search(r"note: .*a.gguf: 3 tensors are of IQ2_S, which .* held unpacked", capsys.readouterr().err)
    held = save_checkpoint_tensors(model, torch.float32)
    assert all(torch.equal(held[name], w.float()) for name, w in want.items())
    assert model.layers[1].attention.wqkv.layout == Layout(16) and isinstance(model.layers[0].feed_forward.w2, Linear)


def test_gptq_runs_in_its_own_groups(tmp_path):
    """4 bits in groups of 32 with zeros."""
    dense = save_checkpoint_tensors(random_transformer(args_from_hf(CONFIG), "cpu", torch.float32), torch.float32)
    tensors, want = {}, {}
    for i, (name, w) in enumerate(dense.items()):
        if ".layers." in name and w.dim() == 2:
            codes, zeros, scales, w = random_codes(w.shape[1], w.shape[0], 32, 4, False, seed=i)
            tensors[name.removesuffix(".weight")] = pack_gptq(codes, zeros, scales * 0.1, 32, 4, 1)
        else:
            tensors[name] = w
    said = dict(quant_method="gptq", bits=4, group_size=32, sym=False, desc_act=False, checkpoint_format="gptq")
    folder = write_folder(tmp_path / "gptq", CONFIG, said, tensors)
    model, file = load_checkpoint(folder), dict(open_checkpoint(folder).tensors())
    want = {n: t.dequantize() if isinstance(t, Codes) else t.float() for n, t in file.items()}
    held = save_checkpoint_tensors(model, torch.float32)
    for name, w in want.items():
        assert torch.equal(held[name], w), name
    assert isinstance(model.output, Linear)  # the head, which is not quantized, as it is
    exact = save_checkpoint_tensors(load_checkpoint(folder, weight_format=WeightFormat.parse("fp32")), torch.float32)
    assert all(torch.equal(exact[name], w) for name, w in want.items())


# ---- scripts/quantize.py ----


def quantized(source, out, *argv):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", ["quantize.py", str(source), str(out), *argv])
        quantize_script.main()
    return out


@pytest.mark.parametrize(
    "flags",
    [(), ("--weights", "int8:channel"), ("--head", "bf16"), ("--weights", "int4:64", "--head", "int4")],
    ids=" ".join,
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_folder_loads_without_the_original(tied, flags, tmp_path):
    """The same weights, to the bit, as packing while the original is read."""
    source = write(tmp_path, config=CONFIG | dict(tie_word_embeddings=tied, intermediate_size=128))
    out = quantized(source, tmp_path / "out", *flags)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    weight_format = WeightFormat.parse(given.get("--weights", "int4"), given.get("--head"))
    want, got = load_checkpoint(source, weight_format=weight_format), load_checkpoint(out)
    for name, t in save_checkpoint_tensors(want, torch.float32).items():
        held = save_checkpoint_tensors(got, torch.float32)[name]
        assert torch.equal(held, t if t.dim() == 2 else t.bfloat16().float()), name
    assert got.output.bits == want.output.bits and not list(tmp_path.glob("*.tmp"))
    (tmp_path / "new").touch()
    assert {f.stat().st_mode for f in out.iterdir()} == {(tmp_path / "new").stat().st_mode}  # by the umask
    assert (out / "config.json").is_file() and sum(f.stat().st_size for f in out.glob("*.safetensors")) < sum(
        f.stat().st_size for f in source.glob("*.safetensors")
    )


def test_a_head_that_is_stored_beside_its_embedding(tmp_path):
    config = CONFIG | dict(tie_word_embeddings=True)
    other = lambda by: lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + by})  # noqa: E731
    source = write(tmp_path, other(0), config)
    (source / "tokenizer.model.v3").write_text("a tokenizer")
    out = quantized(source, tmp_path / "out")
    assert "lm_head.weight" not in load_file(out / "model.safetensors") and (out / "tokenizer.model.v3").exists()
    assert load_checkpoint(out).tied
    with pytest.raises(InputError, match="is not the embedding"):
        quantized(write(tmp_path, other(1), config), tmp_path / "out2")


def test_an_infinite_weight_stays_one():
    for bits in (4, 8):
        assert quantize(torch.tensor([[float("inf")] + [0.1] * 31]), bits, 32).scale.isinf().all()


@pytest.mark.slow
def test_transformers_reads_a_quantized_folder(tmp_path):
    """By compressed-tensors' own reader: the same logits. (Of 4 bits, transformers expects zero points unpacked.)"""
    transformers = pytest.importorskip("transformers")
    source = write(tmp_path, config=CONFIG | dict(attention_bias=False))
    out = quantized(source, tmp_path / "out", "--weights", "int8", "--head", "bf16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.randint(0, 90, (1, 20))
    with torch.no_grad():
        want = theirs(ids).logits
    assert (load_checkpoint(out)(ids) - want).abs().max() < 1e-4 * want.abs().max()


def test_what_quantize_refuses_is_one_line(folder, tmp_path):
    for argv, says in (
        ((folder, folder), "exists already"),
        ((folder, tmp_path / "a" / "b"), "is not a folder"),
        ((tmp_path / "none", tmp_path / "out"), "not found"),
        ((folder, tmp_path / "out", "--weights", "int4:128"), "no groups of 128"),
    ):
        with pytest.raises(InputError, match=says):
            quantized(*argv)
    bad = write(tmp_path, lambda t: t["model.norm.weight"].fill_(float("inf")))
    with pytest.raises(InputError, match=r"model\.norm\.weight"):
        quantized(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp"))
