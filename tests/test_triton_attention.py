"""The attention kernels over ranges and lists of slots against float64, interpreted where there is no GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import sampled
from test_contract import prompt, run, same, tiny

import kernels.backend as backend_module
from kernels import dense_attention
from kernels.backend import version_for
from kernels.dense_attention import _decode_attention_masked, decode_attention, split_attention
from kernels.gather_attention import gather_attention, launch
from kernels.packed_attention import packed_attention
from kernels.splits import ASSUMED_SMS, MAX_SPLITS, combine, split_count
from kernels.window_append import window_append
from runtime.errors import InputError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def empty_is_nan(monkeypatch):
    """What a kernel leaves unwritten is NaN: partial outputs that no program writes must not be read."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: fill_nan(empty(*size, **kw)))


def fill_nan(x):
    return x.fill_(float("nan")) if x.is_floating_point() else x


def rand(seed, *size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def want(q, k, v, spans, mean=None):
    """In float64, row by row and head by head; spans [B][2] or [B][Hkv][2]; the extra token as `count` copies of it."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    g = q.shape[1] // k.shape[1]
    for b, h in ((b, h) for b in range(len(q)) for h in range(q.shape[1])):
        lo, hi = spans[b] if isinstance(spans[b][0], int) else spans[b][h // g]
        keys, values = (x[b, h // g, lo:hi].double().cpu() for x in (k, v))
        if mean is not None:
            n = int(mean[2].reshape(len(q), -1)[b, (h // g) if mean[2].dim() == 2 else 0])
            copies = [x[b, h // g].double().cpu().expand(n, -1) for x in mean[:2]]
            keys, values = torch.cat((keys, copies[0])), torch.cat((values, copies[1]))
        if len(keys):
            out[b, h] = (keys @ q[b, h].double().cpu() * q.shape[2] ** -0.5).softmax(0) @ values
    return out


def problem(seed, spans, T, g, D, dtype, spare=1, heads=2):
    """q, k, v, start, stop; NaN in every slot outside the spans, and in `spare` rows more than the batch has."""
    B = len(spans)
    q = rand(seed, B, heads * g, D, dtype=dtype)
    k, v = (rand(seed + i, B + spare, heads, T, D, dtype=dtype) for i in (1, 2))
    start, stop = torch.tensor(spans, device=DEVICE).unbind(1)
    t = torch.arange(T, device=DEVICE)
    inside = (t >= start[:, None]) & (t < stop[:, None])
    for x in (k, v):
        x[:B].masked_fill_(~inside[:, None, :, None], float("nan"))
        x[B:] = float("nan")
    return q, k, v, start, stop


def check(got, expected, dtype):
    assert got.dtype == dtype and got.is_contiguous()
    error = (got.double().cpu() - expected).abs().max().item()
    assert error <= TOLERANCE[dtype], error


@st.composite
def cases(draw, large=False):
    """large: more rows than the interpreter is quick with, more query heads than a tensor-core tile, any head_dim."""
    T = draw(st.integers(1, 70))
    spans = st.tuples(st.integers(0, T), st.integers(0, T)).map(lambda s: (min(s), max(s)))
    return dict(
        seed=draw(st.integers(0, 2**31 - 3)),
        spans=draw(st.lists(spans, min_size=1, max_size=5 if large else 3)),
        T=T,
        g=draw(st.sampled_from((1, 3, 4, 5, 8, 17) if large else (1, 3, 4, 5))),
        D=draw(st.sampled_from((32, 64, 96, 128, 16 * 13) if large else (32, 96))),
        dtype=draw(st.sampled_from(tuple(TOLERANCE))),
        spare=draw(st.integers(0, 2)),
        heads=draw(st.integers(1, 2)),
    )


# ---- the kernel ----


def decode_is_float64(case, block, programs):
    q, k, v, start, stop = problem(**case)
    got = split_attention(q, k, v, stop, start, block=block, programs=programs)
    check(got, want(q, k, v, case["spans"]), case["dtype"])


@settings(max_examples=6, deadline=None)
@given(cases(), st.sampled_from((16, 32)), st.integers(1, 12))
def test_decode(case, block, programs):
    """Any range of any row, the empty one included; shares of many heads and of a part of one; blocks partly filled."""
    decode_is_float64(case, block, programs)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(cases(large=True), st.sampled_from((16, 32, 64)), st.integers(1, 60))
def test_decode_matrix(case, block, programs):
    decode_is_float64(case, block, programs)


@pytest.mark.parametrize(("g", "D"), [(8, 128), (17, 32), (1, 16 * 5)])
def test_shapes(g, D):
    """Groups larger than a tile, head dimensions that fill none."""
    spans = [(3, 21)]
    q, k, v, start, stop = problem(5, spans, 30, g, D, torch.float32, heads=1)
    check(split_attention(q, k, v, stop, start, block=16, programs=2), want(q, k, v, spans), torch.float32)
    args = gather_problem(6, 1, 30, 20, g, D, torch.float32, (True, True), (19,), heads=1)
    check(launch(*args, block=16, splits=2), gather_want(*args), torch.float32)


@pytest.mark.parametrize(
    "programs, dtype", sampled(product((1, 3), TOLERANCE), [(1, torch.float16), (3, torch.bfloat16)])
)
def test_each_dtype_at_the_block_of_launches(programs, dtype):
    spans = [(0, 40), (17, 33)]
    q, k, v, start, stop = problem(3, spans, 41, 4, 64, dtype)
    check(split_attention(q, k, v, stop, start, programs=programs), want(q, k, v, spans), dtype)


def packed_is_float64(case, block, programs, counts):
    """Where count is 0 the mean is NaN; other counts are as many copies of the mean."""
    case = case | dict(spans=[(0, hi) for _, hi in case["spans"]])
    q, k, v, _, stop = problem(**case)
    B, heads = len(q), case["heads"]
    count = torch.tensor([counts[b % len(counts)] for b in range(B)], device=DEVICE)
    means = [rand(case["seed"] % 1000 + i, len(k), heads, case["D"]) for i in (8, 9)]
    for x in means:
        x[:B][count == 0] = float("nan")
    got = split_attention(q, k, v, stop, mean=(*means, count), block=block, programs=programs)
    check(got, want(q, k, v, case["spans"], (*means, count)), case["dtype"])


@settings(max_examples=6, deadline=None)
@given(cases(), st.sampled_from((16, 32)), st.integers(1, 12), st.lists(st.sampled_from((0, 1, 7, 100)), min_size=1))
def test_packed(case, block, programs, counts):
    """The extra token weighs `count`, once whatever the shares, also where there is no slot beside it."""
    packed_is_float64(case, block, programs, counts)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases(large=True), st.sampled_from((16, 32, 64)), st.integers(1, 60), st.lists(st.integers(0, 300), min_size=1))
def test_packed_matrix(case, block, programs, counts):
    packed_is_float64(case, block, programs, counts)


def test_strides():
    """q out of a fused projection, K and V side by side with tokens before heads."""
    B, H, g, T, D = 2, 2, 3, 20, 32
    fused, store = rand(0, B, H * g + 5, D + 16), rand(1, B, T, 2, H, D)
    q, (k, v) = fused[:, 2:-3, :D], store.permute(2, 0, 3, 1, 4)
    assert not q.is_contiguous() and k.stride()[1:3] == (D, 2 * H * D)
    stop = torch.tensor([20, 7, 13], device=DEVICE)[::2]
    check(split_attention(q, k, v, stop, block=16, programs=2), want(q, k, v, [(0, 20), (0, 13)]), torch.float32)


def test_large_logits():
    """Logits in the thousands, of both signs: the running maximum carries them, in one block and over several."""
    q, k, v = 300 * rand(0, 1, 4, 32), 3 * rand(1, 1, 1, 40, 32), rand(2, 1, 1, 40, 32)
    stop = torch.tensor([40], device=DEVICE)
    for programs in (1, 3):
        check(split_attention(q, k, v, stop, block=16, programs=programs), want(q, k, v, [(0, 40)]), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("far", (0, 1, 2), ids=("row", "head", "slot"))
def test_offsets_beyond_32_bits(far):
    """Three rows, heads or slots 2^30 elements apart; of these 4 GB only the pages that hold tokens are touched."""
    T, D = 3, 32
    size, stride = [1, 1, T, D], [T * D, T * D, D, 1]
    size[far], stride[far] = 3, 2**30
    k = torch.empty(2**31 + T * D, dtype=torch.float16, device=DEVICE).as_strided(size, stride)
    k.copy_(rand(0, *size))
    q, stop = rand(1, size[0], 2 * size[1], D, dtype=k.dtype), torch.tensor([T] * size[0], device=DEVICE)
    expected = want(q, k, k, [(0, T)] * size[0])
    check(split_attention(q, k, k, stop, block=16, programs=2), expected, torch.float16)
    idx = torch.arange(T, device=DEVICE).expand(size[0], 1, -1).contiguous()
    check(launch(q, k, k, idx, stop[:, None], block=16, splits=1), expected, torch.float16)


@pytest.mark.parametrize("programs", sampled((1, 3, 8, 30), (3, 8)))
@pytest.mark.parametrize("ends", [[64, 0, 5], [160, 1, 1, 17], [33]])
def test_programs_take_equal_shares_of_the_real_lengths(monkeypatch, programs, ends):
    """Blocks of all heads end to end, cut into equal shares: which parts are written tells who read what."""
    block, heads = 16, 2
    seen = []

    class Spy:
        def __getitem__(self, grid):
            return lambda part, lse, *args, **kw: seen.append(lse)

    monkeypatch.setattr(dense_attention, "_combine_shares", Spy())
    spans = [(0, n) for n in ends]
    q, k, v, _, stop = problem(0, spans, max(ends), 2, 32, torch.float32)
    split_attention(q, k, v, stop, block=block, programs=programs)
    # a unit is a head's block, an empty row has one; who takes which: (program, head) in order
    units = [h + heads * b for b, n in enumerate(ends) for h in range(heads) for _ in range(max(1, -(-n // block)))]
    share = -(-len(units) // programs)
    parts = sorted({(i // share, head) for i, head in enumerate(units)})
    written = (~seen[0].isnan().any(-1)).nonzero().flatten().tolist()
    assert written == [program + head for program, head in parts] and len(written) == len(set(written))


# ---- lists of slots ----


def gather_problem(seed, B, T, K, g, D, dtype, lists, counts, heads=2):
    """q, k, v, idx, count: NaN in slots that are not chosen and in spare rows; entries past the count are any slots."""
    gen = torch.Generator().manual_seed(seed)
    q = rand(seed, B, heads * g, D, dtype=dtype)
    k, v = (rand(seed + i, B + 1, heads, T, D, dtype=dtype) for i in (1, 2))
    n_lists, n_counts = (heads if per_head else 1 for per_head in lists)
    idx = torch.stack([torch.randperm(T, generator=gen)[:K] for _ in range(B * n_lists)]).view(B, n_lists, K)
    count = torch.tensor([counts[i % len(counts)] for i in range(B * n_counts)]).view(B, n_counts)
    unchosen = torch.ones(B + 1, heads, T, dtype=torch.bool)
    for b, h in ((b, h) for b in range(B) for h in range(heads)):
        unchosen[b, h, idx[b, h % n_lists, : count[b, h % n_counts]]] = False
    for x in (k, v):
        x[unchosen.to(DEVICE)] = float("nan")
    return q, k, v, idx.to(DEVICE), count.to(DEVICE)


def gather_want(q, k, v, idx, count):
    out = torch.zeros(q.shape, dtype=torch.float64)
    heads, g = k.shape[1], q.shape[1] // k.shape[1]
    for b, h in ((b, h) for b in range(len(q)) for h in range(heads)):
        slots = idx[b, h % idx.shape[1], : count[b, h % count.shape[1]]]
        keys, values = (x[b, h, slots].double().cpu() for x in (k, v))
        if len(slots):
            logits = q[b, h * g : (h + 1) * g].double().cpu() @ keys.T * q.shape[2] ** -0.5
            out[b, h * g : (h + 1) * g] = logits.softmax(-1) @ values
    return out


@st.composite
def gather_cases(draw, large=False):
    T = draw(st.integers(1, 60))
    K = draw(st.integers(1, T))
    return dict(
        seed=draw(st.integers(0, 2**31 - 3)),
        B=draw(st.integers(1, 3)),
        T=T,
        K=K,
        g=draw(st.sampled_from((1, 3, 4, 5, 8, 17) if large else (1, 3, 4, 5))),
        D=draw(st.sampled_from((32, 64, 96, 128, 16 * 13) if large else (32, 96))),
        dtype=draw(st.sampled_from(tuple(TOLERANCE))),
        lists=(draw(st.booleans()), draw(st.booleans())),
        counts=draw(st.lists(st.one_of(st.sampled_from((0, 1, K)), st.integers(0, K)), min_size=1, max_size=5)),
        heads=draw(st.integers(1, 2)),
    )


def gather_is_float64(case, block, splits):
    args = gather_problem(**case)
    check(launch(*args, block=block, splits=splits), gather_want(*args), case["dtype"])


@settings(max_examples=6, deadline=None)
@given(gather_cases(), st.sampled_from((16, 32)), st.integers(1, 5))
def test_gather(case, block, splits):
    """One list or count for all heads or one a head; none of it, all of it; more splits than blocks."""
    gather_is_float64(case, block, splits)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(gather_cases(large=True), st.sampled_from((16, 32, 64)), st.integers(1, 9))
def test_gather_matrix(case, block, splits):
    gather_is_float64(case, block, splits)


@pytest.mark.parametrize("lists, counts", sampled(product((False, True), repeat=2), [(True, False), (False, True)]))
def test_gather_is_its_torch_version(monkeypatch, lists, counts):
    """Through the dispatcher at the blocks of launches; counts 1 and K, a count above K counts as K."""
    q, k, v, idx, count = gather_problem(1, 2, 40, 23, 4, 64, torch.float32, (lists, counts), (23, 1, 9))
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")
    got, more = gather_attention(q, k, v, idx, count), gather_attention(q, k, v, idx, count + 25 * (count == 23))
    monkeypatch.setenv("KV_FAST_BACKEND", "torch")
    assert (got - gather_attention(q, k, v, idx, count)).abs().max() < 1e-5 and torch.equal(got, more)
    check(got, gather_want(q, k, v, idx, count), torch.float32)


def test_gather_strides():
    """q out of a fused projection, K and V side by side, int32 lists that are part of longer ones."""
    B, H, g, T, D, K = 2, 2, 3, 20, 32, 7
    fused, store = rand(0, B, H * g + 5, D + 16), rand(1, B, T, 2, H, D)
    q, (k, v) = fused[:, 2:-3, :D], store.permute(2, 0, 3, 1, 4)
    idx = torch.randint(T, (B, H, 12), generator=torch.Generator().manual_seed(0), dtype=torch.int32)[..., :K]
    count = torch.tensor([[5, 7, 0], [6, 1, 0]], device=DEVICE)[:, :2]
    check(launch(q, k, v, idx.to(DEVICE), count, block=16, splits=2), gather_want(q, k, v, idx, count), torch.float32)


# ---- the operators ----


@pytest.fixture
def triton_backend(monkeypatch):
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")


def test_operators_dispatch(triton_backend, monkeypatch):
    """Both versions of both operators agree, and KV_FAST_BACKEND chooses between them."""
    ran = []
    for module in ("dense_attention", "packed_attention"):

        def spy(*args, **kwargs):
            ran.append(args)
            return split_attention(*args, **kwargs)

        monkeypatch.setattr(f"kernels.{module}.split_attention", spy)  # fmt: skip
    q, k, v, start, stop = problem(0, [(3, 19), (0, 30)], 33, 4, 64, torch.float32)
    mean = rand(5, 3, 2, 64), rand(6, 3, 2, 64), torch.tensor([0, 12], device=DEVICE)
    k[:2, :, :3], v[:2, :, :3] = 0, 0  # packed slots start at 0
    calls = (lambda: decode_attention(q, k, v, start, stop), lambda: packed_attention(q, k, v, stop),
             lambda: packed_attention(q, k, v, stop, *mean))  # fmt: skip
    kernel = [call() for call in calls]
    assert len(ran) == 3
    monkeypatch.setenv("KV_FAST_BACKEND", "torch")
    for call, got in zip(calls, kernel, strict=True):
        assert (call() - got).abs().max() < 1e-5
    assert len(ran) == 3
    assert (_decode_attention_masked(q, k, v, start, stop) - kernel[0]).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ("triton", "torch"))
@pytest.mark.parametrize("extra", (True, False))
def test_packed_heads_of_different_lengths(monkeypatch, backend, extra):
    monkeypatch.setenv("KV_FAST_BACKEND", backend)
    ends = [[5, 20], [17, 1]]
    q, k, v = rand(0, 2, 6, 32), rand(1, 3, 2, 20, 32), rand(2, 3, 2, 20, 32)
    for (b, h), x in (((b, h), x) for b in range(2) for h in range(2) for x in (k, v)):
        x[b, h, ends[b][h] :] = float("nan")
    stop, spans = torch.tensor(ends, device=DEVICE), [[(0, n) for n in row] for row in ends]
    mean = rand(3, 3, 2, 32), rand(4, 3, 2, 32), torch.tensor([[0, 9], [30, 0]], device=DEVICE)
    got = packed_attention(q, k, v, stop, *(mean if extra else ()))
    check(got, want(q, k, v, spans, mean if extra else None), torch.float32)


@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("dtype, compensation", ((torch.float32, True), (torch.bfloat16, False)))
def test_window_append(monkeypatch, backend, dtype, compensation):
    """A list for each row: 2 sinks, then a window that grows by some tokens and drops the oldest at the others; it
    fills its ring, and so a token's place is at last that of the one that leaves."""
    monkeypatch.setenv("KV_FAST_BACKEND", backend)
    B, H, D, sinks, ring = 2, 2, 24, 2, 5
    caches = [torch.full((B + 1, H, sinks + ring, D), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
    means = [torch.zeros(B + 1, H, D, device=DEVICE) for _ in range(2)]
    slot_of = torch.zeros(B + 1, ring, dtype=torch.int32, device=DEVICE)
    kept, gone = [[[], []] for _ in range(B)], [[[], []] for _ in range(B)]
    for t in range(16):
        fresh, dropped = [], []
        x = [rand(2 * t + i, B, 2 * H, D, dtype=dtype)[:, H * i : H * i + H] for i in range(2)]  # strided
        for b in range(B):
            grows = len(kept[b][0]) < min(sinks + ring, sinks + 2 + (t + b) // 3)
            fresh.append(len(kept[b][0]) if grows else -1)
            for i in range(2):
                kept[b][i].append(x[i][b])
                if not grows:
                    gone[b][i].append(kept[b][i].pop(sinks))
            dropped.append(len(gone[b][0]) or -2)
        place = torch.full((B,), t - sinks, device=DEVICE)
        table = [torch.tensor(n, device=DEVICE) for n in (fresh, dropped)]
        window_append(*caches, slot_of, *(means if compensation else (None, None)), *x, place, *table)
        for b, i in ((b, i) for b in range(B) for i in range(2)):
            some = caches[i][b, :, : len(kept[b][i])].float().transpose(0, 1).flatten(1)
            held = torch.stack(kept[b][i]).float().flatten(1)
            assert torch.equal(some.sort(0).values, held.sort(0).values) and caches[i][b, :, len(held) :].isnan().all()
            mean = torch.stack(gone[b][i]).double().mean(0) if gone[b][i] and compensation else torch.zeros(H, D)
            assert (means[i][b].double().cpu() - mean.cpu()).abs().max() < 1e-5
    assert len(gone[0][0]) > 6 and all(x[B:].float().nan_to_num().eq(0).all() for x in (*caches, *means, slot_of))


@pytest.mark.parametrize("which", ("decode_attention", "packed_attention", "gather_attention"))
def test_registered(triton_backend, which):
    """Schema and fake tensors, with a q whose layout the output must not take over."""
    q, k, v, start, stop = problem(0, [(0, 9), (0, 4)], 9, 2, 32, torch.float32)
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    lists = torch.arange(9, device=DEVICE).expand(2, 1, 9).contiguous()
    args = dict(decode_attention=(start, stop), packed_attention=(stop, None, None, None))
    args["gather_attention"] = (lists, stop[:, None].contiguous())
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.kv_fast, which).default, (q, k, v, *args[which]), test_utils=checks)


@pytest.mark.parametrize("which", ["triton", "torch", ""])
def test_without_a_start(which, monkeypatch):
    """None is the first slot of every row: to the bit what zeros give, by every version."""
    monkeypatch.setenv("KV_FAST_BACKEND", which)
    q, k, v, start, stop = problem(0, [(0, 70), (0, 4), (0, 33)], 80, 2, 32, torch.float32)
    assert not start.any()
    assert torch.equal(decode_attention(q, k, v, None, stop), decode_attention(q, k, v, start, stop))
    masked = _decode_attention_masked
    assert torch.equal(masked(q, k, v, None, stop), masked(q, k, v, start, stop))


def test_one_graph(triton_backend):
    """The operators trace with fixed shapes; lengths that change later change no graph."""
    q, k, v, start, stop = problem(0, [(0, 9), (0, 4)], 9, 2, 32, torch.float32)
    start, stop = start.clone(), stop.clone()  # their strides would be guarded
    idx = torch.arange(4, device=DEVICE).expand(2, 2, 4).contiguous()

    def step(stop):
        count = stop.clamp(max=3)[:, None]
        parts = (
            decode_attention(q, k, v, start, stop),
            packed_attention(q, k, v, stop),
            gather_attention(q, k, v, idx, count),
        )
        return torch.stack(parts)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (stop, stop - 2):
            torch.testing.assert_close(compiled(n), step(n))


def test_which_version_runs(monkeypatch):
    """Kernels on a GPU, torch elsewhere; KV_FAST_BACKEND forces either."""
    gpu, cpu = ((torch.device(name), torch.float32) for name in ("cuda", "cpu"))
    for backend, expected in (("", (True, False)), ("torch", (False, False)), ("triton", (True, True))):
        monkeypatch.setenv("KV_FAST_BACKEND", backend)
        assert (version_for(*gpu) == "triton", version_for(*cpu) == "triton") == expected
    version = backend_module._version_for.__wrapped__  # not cached
    monkeypatch.setattr(backend_module, "INTERPRETED", False)
    with pytest.raises(InputError, match="TRITON_INTERPRET=1"):
        version("triton", "cpu", torch.float32)
    monkeypatch.setattr(backend_module, "triton", backend_module._Absent())
    with pytest.raises(InputError, match="need triton"):
        version("", "cuda", torch.float32)
    monkeypatch.setenv("KV_FAST_BACKEND", "cuda")
    with pytest.raises(InputError, match="use torch or triton"):
        version_for(*cpu)


METHODS = {
    "full": {},
    "streaming": dict(sinks=2, recent=9),
    "razor": dict(sinks=2, window=6, induction=0.2, echo=0.0),
    "oracle": dict(budget=9, sinks=2, recent=3),
    "random": dict(budget=0.4, sinks=2, recent=3),
}


def logits_of(monkeypatch, backend, name, shape, steps, feed=None, **model):
    monkeypatch.setenv("KV_FAST_BACKEND", backend)
    model, prompts = tiny(*shape, device=DEVICE, **model), [prompt(n).to(DEVICE) for n in (1, 19)]
    model.setup_cache(name, 3, 32, **METHODS[name])
    return run(model, prompts, steps, feed)


@pytest.mark.parametrize("name", sampled(METHODS, ("razor", "random")))
def test_methods_by_kernels(monkeypatch, name, shape=(3, 32), steps=2):
    """Whole models on ragged prompts give with the kernels what they give without."""
    want, fed = logits_of(monkeypatch, "torch", name, shape, steps)
    same(logits_of(monkeypatch, "triton", name, shape, steps, fed)[0], want, name)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 64), (4, 96), (8, 128)], ids=lambda s: f"g{s[0]}-d{s[1]}")
@pytest.mark.parametrize("name", METHODS)
def test_methods_by_kernels_matrix(monkeypatch, name, shape):
    test_methods_by_kernels(monkeypatch, name, shape, 8)


def test_a_sliding_window_by_kernels(monkeypatch):
    """A window narrower than the prompts: ranges that start behind slot 0."""
    want, fed = logits_of(monkeypatch, "torch", "full", (2, 32), 2, windows=(8, None))
    same(logits_of(monkeypatch, "triton", "full", (2, 32), 2, fed, windows=(8, None))[0], want, "full")


# ---- what all kernels share ----


@pytest.mark.parametrize("S, D", sampled(product((1, 2, 5, 64), (32, 48, 128)), 4))
def test_combine(S, D):
    """A part that saw no token may hold anything; a row in which none saw one gives zeros."""
    part, lse = rand(S, 2, 3, S, D), 100 * rand(D, 2, 3, S)
    empty = rand(1, 2, 3, S) > 0.5
    empty[0, 0], empty[1, 1] = True, False
    lse[empty] = float("-inf")
    part[empty] = float("nan")
    weight = (lse.double() * torch.tensor(2.0).log()).softmax(-1).nan_to_num(0)
    expected = (weight[..., None] * part.double().nan_to_num(0)).sum(-2)
    for dtype in (torch.float32, torch.bfloat16):
        check(combine(part, lse, dtype), expected.cpu(), dtype)


def test_split_count():
    cpu = torch.device("cpu")  # counts as ASSUMED_SMS multiprocessors
    assert split_count(8, 10**6, 64, cpu) * 8 >= 2 * ASSUMED_SMS * 0.85, "batch 1 fills the card"
    assert split_count(8, 128, 64, cpu) == 2 and split_count(8, 1, 64, cpu) == 1, "a part is a block at least"
    assert split_count(1, 10**6, 64, cpu) >= MAX_SPLITS * 0.95
    assert split_count(2 * ASSUMED_SMS, 10**6, 64, cpu) == 1, "a full wave is not split"
    for programs in range(1, 3000, 7):
        s = split_count(programs, 32768, 64, cpu)
        waves = programs * s / (2 * ASSUMED_SMS)
        assert 1 <= s <= MAX_SPLITS and (waves / -(-waves // 1) > 0.8 or s >= MAX_SPLITS * 0.95), (programs, s)
