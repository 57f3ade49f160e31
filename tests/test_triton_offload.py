"""The copy out of host memory and the attention over what it brought, interpreted without a GPU, and compiled."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import DEVICE, NAN, TOLERANCE, attend, heads, rand, randint

from kernels import offload
from kernels.offload import await_rows, fetch_rows, fetched_attention, host_buffer, launch, rows_of
from scripts.contract.harness import prompt, run, tiny
from scripts.contract.step_checks import step_code


@pytest.fixture
def triton_backend(monkeypatch):
    monkeypatch.setattr("kernels.backend.BACKEND", "triton")


# ---- the copy ----


def host(seed, B, H, T, D, dtype):
    """K and V in host memory, the last of whose rows is none of the batch's."""
    both = []
    for i in (0, 1):
        x = host_buffer((B + 1, H, T, D), dtype, DEVICE)
        x.copy_(rand(seed + i, B + 1, H, T, D, dtype=dtype))
        x[B] = NAN
        both.append(x)
    return both


def check_copy(sources, idx, outs, before):
    """Every row that was asked for is there, bit by bit, and nothing else was written."""
    B, H, K = idx.shape
    for source, out in zip(sources, outs, strict=True):
        assert out[B:].eq(before).all(), "a row beyond the batch was written"
        for b, h, i in ((b, h, i) for b in range(B) for h in range(H) for i in range(K)):
            slot = int(idx[b, h, i])
            wanted = source[b, h, slot] if slot >= 0 else torch.full_like(out[b, h, i], before)
            assert torch.equal(out[b, h, i], wanted), (b, h, i)


def copies(case, programs, rows):
    B, H, T, K, D = (case[x] for x in "BHTKD")
    sources = host(case["seed"], B, H, T, D, case["dtype"])
    idx = randint(case["seed"], -1 if case["missing"] else 0, T, B, H, K)
    if case["missing"] == "all":
        idx.fill_(-1)
    outs = [torch.full((B + 1, H, K, D), 7.0, dtype=case["dtype"], device=DEVICE) for _ in "kv"]
    launch(*sources, idx, *outs, programs=programs, rows=rows)
    check_copy(sources, idx, outs, 7.0)


cases = st.fixed_dictionaries(dict(
    seed=st.integers(0, 2**31 - 3), B=st.integers(1, 3), H=st.integers(1, 3), T=st.integers(1, 50),
    K=st.integers(1, 20), D=st.sampled_from((32, 48, 64, 96, 128, 256)), dtype=st.sampled_from(tuple(TOLERANCE)),
    missing=st.sampled_from(("none", "some", "all", "")),
))  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(cases, st.integers(1, 5), st.sampled_from((1, 4, 16)))
def test_fetch(case, programs, rows):
    """Any number of programs and rows of theirs, lists that fill neither; entries of -1 ask for nothing."""
    copies(case, programs, rows)


def fetch_problem():
    sources, idx = host(3, 2, 2, 40, 64, torch.float32), randint(3, -1, 40, 2, 2, 9)
    asked = torch.full((3, 2, 9), -5, device=DEVICE)
    return sources, idx, asked, [torch.full((3, 2, 9, 64), 7.0, device=DEVICE) for _ in "kv"]


def test_fetch_and_await(triton_backend):
    """Through the registered operators, with the grid of launches."""
    sources, idx, asked, outs = fetch_problem()
    fetch_rows(*sources, idx, idx, asked, *outs)
    await_rows(asked, *outs)
    check_copy(sources, idx, outs, 7.0)
    assert torch.equal(asked[:2], idx) and asked[2:].eq(-5).all()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_side_stream_reads_no_temporary(backend, monkeypatch):
    """What runs on it sees memory that was freed, and taken by others, since it was asked for."""
    monkeypatch.setattr("kernels.backend.BACKEND", backend)
    (k, v), idx, asked, outs = fetch_problem()
    wanted = idx.clamp_(min=0).clone()

    @contextlib.contextmanager
    def side_stream(stream):
        idx.fill_(39)
        yield

    stream = SimpleNamespace(wait_stream=lambda stream: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", side_stream)
    monkeypatch.setattr(offload, "_side_stream", lambda device: stream)
    monkeypatch.setattr(offload, "_arrival", lambda device, address: SimpleNamespace(record=lambda stream: None))
    offload._fetch_rows_cuda(k, v, idx, asked, *outs)
    check_copy((k, v), wanted, outs, 7.0)


@pytest.mark.slow
def test_a_compiled_step_fetches_between_buffers():
    """In inductor's code, every fetch copies between graph inputs, which nobody frees, and none is asked for before
    the last one of its half of the double buffer was awaited. Three layers: two of them use one half by turns."""
    model, n_layer = tiny(n_layer=3), 3
    model.setup_cache("flexgen", 2, 32, recent=4)
    run(model, [prompt(9), prompt(9)], 1)
    code = step_code(model, torch.tensor([1, 2]), torch.tensor([10, 10]))
    calls = re.findall(r"kv_fast\.(fetch|await)_rows\.default\((.*)\)", code)
    under_way = set()
    for what, args in calls:
        args = re.sub(r"reinterpret_tensor\((\w+),[^()]*(\([^()]*\)[^()]*)*\)", r"\1", args).split(", ")
        half, sources = args[-3:], args[:2] if what == "fetch" else []
        assert all(re.fullmatch(r"arg\d+_1", x) for x in sources + half), f"{what}: temporaries among {args}"
        assert (what == "await") == (tuple(half) in under_way)
        under_way ^= {tuple(half)}
    assert [what for what, _ in calls].count("fetch") == n_layer and not under_way


def test_bytes_on_the_way():
    """PCIe 5 x16 at 64 GB/s and 2 us: 128 KB, at any head dimension of 64 and more."""
    for D, itemsize in ((64, 2), (96, 2), (128, 2), (128, 4), (256, 2)):
        assert offload.PROGRAMS * rows_of(D, itemsize) * 2 * D * itemsize >= 2 * 128 * 1024


# ---- attention over what was fetched and the ring ----


def attention_problem(seed, pos, K, R, counts, g, D, dtype, H=2):
    B = len(pos)
    k, v = (rand(seed + i, B + 1, H, K, D, dtype=dtype) for i in (1, 2))
    ring_k, ring_v = (rand(seed + i, B + 1, H, R, D, dtype=dtype) for i in (3, 4))
    count = torch.tensor([[min(K, counts[(b + h) % len(counts)]) for h in range(H)] for b in range(B)]).to(DEVICE)
    behind = torch.arange(K, device=DEVICE) >= count[..., None]
    idx = randint(seed, 0, 1000, B, H, K).masked_fill(behind, -1)
    pos = torch.tensor(pos, device=DEVICE)
    for x in (k, v):
        x[:B][behind] = NAN
        x[B:] = NAN
    for x in (ring_k, ring_v):
        x[:B].masked_fill_((torch.arange(R, device=DEVICE) > pos[:, None])[:, None, :, None], NAN)
        x[B:] = NAN
    return rand(seed, B, H * g, D, dtype=dtype), k, v, idx, count, ring_k, ring_v, pos


def attention_want(q, k, v, idx, count, ring_k, ring_v, pos):
    def one(b, h, x):
        n, held = int(count[b, h]), min(int(pos[b]) + 1, ring_k.shape[2])
        both = (torch.cat((y[b, h, :n], ring[b, h, :held])).cpu() for y, ring in ((k, ring_k), (v, ring_v)))
        return attend(x.cpu(), *both)

    return heads(q, k.shape[1], one).value


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**31 - 6), st.lists(st.integers(0, 60), min_size=1, max_size=3), st.integers(1, 40),
    st.integers(1, 20), st.lists(st.integers(0, 40), min_size=1, max_size=3), st.sampled_from((1, 3, 4, 8)),
    st.sampled_from((32, 64, 96)), st.sampled_from(tuple(TOLERANCE)),
)  # fmt: skip
def test_attention(seed, pos, K, R, counts, g, D, dtype):
    """Nothing fetched, all of it; a ring that is filled in part; both versions. Other slots are NaN."""
    args = attention_problem(seed, pos, K, R, counts, g, D, dtype)
    expected = attention_want(*args)
    for backend in ("triton", "torch"):
        with pytest.MonkeyPatch.context() as m:
            m.setattr("kernels.backend.BACKEND", backend)
            got = fetched_attention(*args)
        assert got.dtype == dtype and (got.double().cpu() - expected).abs().max() <= TOLERANCE[dtype], backend
