"""kernels/native: what test_operators.py does not draw; how it is compiled; builds for other instruction sets."""

from __future__ import annotations

import contextlib
import platform
import re
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from operators import PROBLEMS, Near, attend
from test_operators import check as check_operator
from test_operators import draw, finite
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from engine.compiled import compiler_options
from kernels import backend, native
from kernels.codebook import e4m3, lloyd_max
from kernels.dense_attention import decode_attention
from kernels.gather_attention import gather_attention
from kernels.label_score import label_score
from kernels.native import build
from kernels.op import OPERATIONS, Declarations
from kernels.packed_attention import packed_attention
from kernels.quantize import unpack
from kernels.quantized_attention import QuantizedTokens, quantized_append
from kernels.select import budget_select, topk_select
from tests.test_weights import check_product

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.cpp


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch):
    monkeypatch.setattr("kernels.backend.BACKEND", "")


@contextmanager
def torch_versions():
    with pytest.MonkeyPatch.context() as m:
        m.setattr("kernels.backend.BACKEND", "torch")
        with Operators() as operators:
            yield
        assert not operators.called


class Operators(TorchDispatchMode):
    """Notes our operators in C++, and what they are called with."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kv_fast" and func._overloadname == "cpp":
            self.called.append((func, args))
        return func(*args, **(kwargs or {}))


@contextmanager
def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(before)


def rand(gen, *size, dtype=torch.float32):
    return torch.randn(size, generator=gen).to(dtype)


def randint(gen, low, high, *size):
    return torch.randint(low, high, size, generator=gen)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_logits_that_rise_and_fall_by_more_than_a_float_holds():
    """Each block's largest logit is far above, or far below, that of the one before: what was summed is rescaled."""
    q, k, v = torch.zeros(1, 2, 32), torch.zeros(1, 1, 200, 32), rand(generator(0), 1, 1, 200, 32)
    q[:, 0, 0], q[:, 1, 0] = 1, -1
    for steps in (1.0, 5.0, 40.0, 1000.0):
        k[..., 0] = torch.arange(200) * steps
        got = decode_attention(q, k, v, torch.tensor([0]), torch.tensor([200]))
        Near(torch.stack([attend(x, k[0, 0], v[0, 0]) for x in q[0]]), 30.0).check([got[0]], "cpp")


def test_infinite_and_nan_keys():
    """Keys at minus infinity weigh nothing, wherever they are; NaN is not hidden."""
    gen = generator(0)
    q, k, v = rand(gen, 1, 1, 16).abs(), rand(gen, 1, 1, 100, 16), rand(gen, 1, 1, 100, 16)
    span = torch.tensor([0]), torch.tensor([100])
    for low in (slice(0, 40), slice(32, 64), slice(50, 100)):
        x = k.clone()
        x[0, 0, low] = -INF
        rest = [t for t in range(100) if t not in range(*low.indices(100))]
        want = Near(attend(q[0, 0], k[0, 0, rest], v[0, 0, rest]))
        want.check([decode_attention(q, x, v, *span)[0, 0]], "cpp")
    for dtype, at in product(DTYPES, (0, 31, 99)):
        x = k.clone()
        x[0, 0, at, 3] = NAN
        assert decode_attention(*(y.to(dtype) for y in (q, x, v)), *span).isnan().all()
    assert decode_attention(q * NAN, k, v, *span).isnan().all()


def test_exponential_is_accurate():
    """Two keys: the share of one is 1 / (1 + 2^x), measured down to what fp32 holds."""
    x = torch.linspace(0, 80, 5001, dtype=torch.float64)
    q = torch.zeros(5001, 1, 16)
    q[:, 0, 0] = x.float() * 4  # sqrt(16)
    k, v = torch.zeros(5001, 1, 2, 16), torch.zeros(5001, 1, 2, 16)
    k[:, 0, 1, 0], v[:, 0, 1, 0] = -1, 1
    got = decode_attention(q, k, v, torch.zeros(5001, dtype=torch.int64), torch.full((5001,), 2))[:, 0, 0].double()
    want = 1 / (1 + (q[:, 0, 0].double() / 4).exp())
    # of the exponent itself, which is a product of fp32: half a unit in its last place
    assert ((got / want - 1).abs() <= 4e-7 + 1.5e-7 * x).all()


QUANTIZED = dict(  # bits, tokens that leave together and share scales, else channels that do, sinks, ring, clip; a book
    whole=(16, 0, 32, 3, 5, 1.0), bytes=(8, 0, 96, 0, 1, 0.95), three=(3, 0, 32, 2, 7, 1.0),
    head=(4, 0, 96, 3, 40, 0.95), two=(2, 0, 32, 0, 5, 1.0), keys=(2, 32, 0, 0, 33, 1.0),
    more_keys=(4, 64, 0, 0, 64, 1.0), odd_keys=(3, 32, 0, 0, 32, 1.0),
    e4m3=(8, 32, 96, 0, 32, 1.0, e4m3()), more_e4m3=(8, 64, 96, 0, 64, 1.0, e4m3()),
    lloyd_4=(4, 0, 96, 3, 5, 1.0, lloyd_max(96, 4)), lloyd_3=(3, 0, 96, 0, 1, 1.0, lloyd_max(96, 3)),
    lloyd_2=(2, 0, 96, 2, 7, 1.0, lloyd_max(96, 2)),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", QUANTIZED)
def test_a_token_joins_a_ring_of_whole_ones(case, dtype):
    """As the torch version, to the bit but for codes on a rounding border: rows at positions of their own."""
    bits, block, group, sinks, ring, clip, *books = QUANTIZED[case]
    gen, B, H, T, D, book = generator(bits), 2, 2, 160, 96, next(iter(books), None)

    def empty():
        whole = torch.zeros(B + 1, H, sinks + ring, D, dtype=dtype)
        if bits == 16:
            return QuantizedTokens(torch.zeros(B + 1, H, T, D, dtype=dtype), None, whole, bits, sinks)
        data = torch.zeros(B + 1, H, T, D * bits // 8, dtype=torch.uint8)
        scales = (T // 32 if block else T, 1) if books else (T // 32, D, 2) if block else (T, D // group, 2)
        params = torch.zeros(B + 1, H, *scales, dtype=torch.float16)
        return QuantizedTokens(data, params, whole, bits, sinks, block, clip, book)

    ours, theirs = empty(), empty()
    start = torch.tensor([0, 3])
    for step in range(T - 4):
        token = rand(gen, B, H, D, dtype=dtype) * 10 ** (step % 3 - 1)
        if step == 7:
            token[1] = 2.5  # constant groups
        if step == 9:
            token[0, :, 5] = 3e5  # more than fp16 holds
        x = torch.cat((token, token), -1)[..., :D] if step % 2 else token
        with Operators() as operators:
            quantized_append(x, start + step, ours)
        assert [str(f) for f, _ in operators.called] == ["kv_fast.quantized_append.cpp"]
        with torch_versions():
            quantized_append(token, start + step, theirs)
    assert torch.equal(ours.full_precision, theirs.full_precision)
    if bits == 16:
        assert torch.equal(ours.data, theirs.data)
    else:
        x, y = (unpack(t.data, bits).int() for t in (ours, theirs))
        assert (x - y).abs().max() <= 1 and (x != y).float().mean() < 2e-3 and x.any()
        assert torch.allclose(ours.params.float(), theirs.params.float(), rtol=1e-3, atol=0)
    assert not ours.full_precision[B:].any() and not ours.data[B:].any(), "a row that is not of the batch"


def test_e4m3_numbers_are_those_of_torch():
    """To the bit: every number, the middle between two, what lies next to it, and NaN, in blocks of scale 1."""
    known = e4m3()[:127]
    middles = (known[1:] + known[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (torch.inf, -torch.inf))
    x = torch.cat([known, middles, up, down])
    x = torch.cat([x, -x])
    x = torch.cat([x, torch.zeros(32 * 64 - len(x))])
    numbers = x.view(32, 64)[torch.randperm(32, generator=generator(0))].clone()
    numbers[:, 0], bad = 448.0, numbers.clone()
    bad[3, 5] = torch.nan
    blocks = torch.stack([numbers, bad])[:, None]  # [B, H, 32, D]
    stores = []
    for versions in (contextlib.nullcontext(), torch_versions()):
        whole, params = torch.zeros(2, 1, 32, 64), torch.zeros(2, 1, 2, 1, dtype=torch.float16)
        store = QuantizedTokens(torch.zeros(2, 1, 64, 64, dtype=torch.uint8), params, whole, 8, 0, 32, book=e4m3())
        with versions:
            for t in range(32):
                quantized_append(blocks[:, :, t], torch.tensor([t, t]), store)
        stores.append(store)
    ours, theirs = stores
    assert torch.equal(ours.data[0, 0, :32], theirs.data[0, 0, :32]) and len(ours.data[0, 0, :32].unique()) > 250
    assert (
        torch.equal(ours.params[0], theirs.params[0])
        and ours.params[1, 0, 0].isnan()
        and theirs.params[1, 0, 0].isnan()
    )


def test_a_sample_that_misleads():
    """What is sampled is not what there is: every sampled slot is among the highest scores, or among the lowest."""
    T = 4 * 1024
    for high in (1.0, -1.0):
        scores = rand(generator(0), 1, 1, T)
        scores[..., ::4] += 100 * high
        for k in (5, 1000, 1024, 1025, 3000):
            idx, count = budget_select(scores, torch.tensor([T - 1]), torch.tensor([k]), k)
            assert count.item() == k and torch.equal(idx[0, 0], scores[0, 0].topk(k).indices.sort().values)


def test_nan_scores_are_the_largest():
    scores = rand(generator(0), 1, 1, 50)
    scores[..., 20], scores[..., 7], scores[..., 30] = NAN, -torch.tensor(NAN), INF
    one = torch.ones(1, dtype=torch.int64)
    assert budget_select(scores, 49 * one, 3 * one, 3)[0].flatten().tolist() == [7, 20, 30]
    assert budget_select(scores, 49 * one, 3 * one, 3, 1, 1)[0].flatten().tolist() == [0, 7, 49], (
        "forced ones come first"
    )


def test_selection_takes_what_torch_takes():
    """Scores of 16 bits, strides of every dimension, a count a row, a mask for all rows."""
    scores, count = rand(generator(0), 2, 40, 3).transpose(1, 2), torch.tensor([[3], [9]])
    mask = torch.rand(1, 1, 40, generator=generator(1)) < 0.5
    want = topk_select(scores.contiguous(), mask.expand(2, 3, 40), 12, count.expand(2, 3))
    for got in (topk_select(scores, mask, 12, count), topk_select(scores, mask.expand(2, 3, 40), 12, count)):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for dtype in (torch.bfloat16, torch.float16):
        x = scores.to(dtype)
        with torch_versions():
            want = topk_select(x, mask, 12, count.expand(2, 3))
        got = topk_select(x, mask, 12, count.expand(2, 3))
        assert torch.equal(got[1], want[1])
        for b, h in np.ndindex(2, 3):
            one, other = (x[b, h, y[0][b, h, : int(y[1][b, h])]].sort().values for y in (got, want))
            assert torch.equal(one, other)


# ---- as operators ----


@pytest.mark.slow
def test_compiled_steps_call_operators_directly(tmp_path):
    """What inductor is told of them is what they are in C++; an error is the eager one."""
    told = sum(Declarations().values(), [])
    for declaration in told:
        assert hasattr(build.library(), re.findall(r"aoti_\w+", declaration)[0])
    file = tmp_path / "told.cpp"  # a second declaration of another type is an error
    file.write_text('#include "native.cpp"\nextern "C" {\n' + "".join(f"extern {x};\n" for x in told) + "}\n")
    flags = ["-fsyntax-only", f"-I{build.FOLDER}", f"-I{build.TORCH / 'include'}", "-fopenmp", *build.FLAGS]
    build.run(build.compiler(), *flags, str(file))
    file.write_text(file.read_text().replace("int64_t, AtenTensorHandle*);", "double, AtenTensorHandle*);", 1))
    with pytest.raises(OSError, match="conflicting declaration"):
        build.run(build.compiler(), *flags, str(file))

    def function(x, labels, params):
        return label_score(x, labels, params, 4)

    step = torch.compile(function, options=compiler_options(torch.device("cpu")))
    x, params = rand(generator(0), 1, 2, 16), rand(generator(1), 1, 2, 20, 2).half()
    labels = randint(generator(0), 0, 256, 1, 2, 20, 8).byte()
    got, (code,) = run_and_get_code(step, x, labels, params)
    assert torch.equal(got, function(x, labels, params)) and got.count_nonzero() == 40
    assert "aoti_torch_cpu_label_score(" in code and "call_dispatcher" not in code
    with pytest.raises(RuntimeError, match="labels of 2 or 4 bits are needed"):
        step(x, labels[..., :4].contiguous(), params)


def test_empty_batches_and_lists():
    gen = generator(0)
    k, none = rand(gen, 2, 2, 9, 32), torch.zeros(0, dtype=torch.int64)
    assert decode_attention(rand(gen, 0, 4, 32), k, k, none, none).shape == (0, 4, 32)
    q, zero = rand(gen, 1, 4, 32), torch.zeros(1, 2, dtype=torch.int64)
    assert (gather_attention(q, k, k, zero[..., None][..., :0], zero) == 0).all()
    assert (gather_attention(q, k, k, zero[..., None], zero - 1) == 0).all()
    assert budget_select(rand(gen, 1, 2, 9), zero[0, :1], zero[0, :1], 0)[0].shape == (1, 2, 0)


# ---- the library ----


def test_torch_is_asked_for(fresh, monkeypatch):
    """Nothing is compiled or loaded then, nor where a tensor is not for C++."""
    monkeypatch.setattr(build, "library", lambda: pytest.fail("the library was asked for"))
    monkeypatch.setattr(build, "_available", lambda: pytest.fail("the library was asked for"))
    x = torch.zeros(2, 32)
    assert backend.version_for(x.device, torch.float16) == "torch"
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    assert backend.version_for(x.device, x.dtype) == "torch"
    for name, operation in OPERATIONS.items():
        if name in PROBLEMS and operation.cpp is not None:
            operation(*operation.grouped(finite(draw(name, "torch", 0)[0])))


def test_wrong_types_are_refused():
    """C++ would read other memory than is meant."""
    gen = generator(0)
    q, k, v = rand(gen, 1, 2, 32), rand(gen, 1, 1, 40, 32), rand(gen, 1, 1, 40, 32)
    stop = torch.tensor([40])
    with pytest.raises(RuntimeError, match="dtype Long is needed, not of Int"):
        decode_attention(q, k, v, None, stop.int())
    with pytest.raises(RuntimeError, match="dtype Float is needed, not of Double"):
        packed_attention(q, k, v, stop, k[:, :, 0].double(), v[:, :, 0].double(), stop)
    with pytest.raises(RuntimeError, match="idx: a tensor of dtype Long"):
        gather_attention(q, k, v, torch.zeros(1, 1, 4, dtype=torch.int32), stop[:, None])
    with pytest.raises(RuntimeError, match="mask: a tensor of dtype Bool"):
        topk_select(rand(gen, 1, 1, 40), torch.ones(1, 1, 40), 4, stop[:, None])


# ---- other instruction sets ----

EXTENSIONS = {
    "x86-64-v3": {"avx2", "fma", "bmi2", "f16c"},
    "alderlake": {"avx2", "fma", "bmi2", "f16c", "avx_vnni"},  # bytes are multiplied, but no tiles and no AVX-512
    "x86-64-v2": {"sse4_2", "popcnt"},
}


def runs_here(march):
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    return EXTENSIONS[march] <= set(flags)


@pytest.mark.slow
@pytest.mark.parametrize("march", EXTENSIONS)
def test_other_instruction_sets(march, fresh, monkeypatch):
    """Tables of 16 numbers are looked up in another way with AVX2, and in a third without."""
    if not runs_here(march):
        pytest.skip(f"not a processor of {march}")
    flags = [f"-march={march}" if x == "-march=native" else "-O1" if x == "-O3" else x for x in build.FLAGS]
    assert flags != list(build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    assert native.available() and build.library()._name != str(fresh)
    for name, operation in OPERATIONS.items():
        for seed in range(8) if name in PROBLEMS and operation.cpp is not None else ():
            check_operator(name, "cpp", seed)
    for bits, rows in product((16, 8, 4), (1, 2, 3, 7, 20, 40)):
        check_product(rows, rows, 37, 192, bits, 192 if bits == 16 else 64, "zeros", True, torch.float32, "")
