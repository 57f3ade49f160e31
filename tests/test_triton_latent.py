"""Kernels of SALS against float64: attention over expanded keys, a token into the ring, prompts into latents."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import sampled
from test_sals import compare

import kernels.latent as latent
from kernels.latent import LatentTokens, append_token, store_prompt
from kernels.latent_attention import _launch as attention_launch
from kernels.latent_attention import block_size, latent_attention
from kernels.quantize import dequantize, quantize

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest value


@pytest.fixture
def triton_backend(monkeypatch):
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")


def rand(gen, *size, dtype=torch.float32):
    return torch.randn(size, generator=gen).to(DEVICE, dtype)


def fill(gen, rows, slots, ranks, width, bits, dtype):
    """Random tokens in all slots."""
    latents = tuple(rand(gen, rows, slots, r, dtype=dtype) for r in ranks)
    values = rand(gen, rows, slots, width, dtype=dtype)
    return LatentTokens(latents, (values,) if bits == 16 else quantize(values, bits), bits)


def whole(tokens, row, slot):
    """One slot in float64: its coordinates, its values."""
    x = torch.cat([part[row, slot].double().cpu() for part in tokens.latents])
    if tokens.bits == 16:
        return x, tokens.values[0][row, slot].double().cpu()
    packed, params = (part[row, slot].cpu() for part in tokens.values)
    codes = [(int(byte) >> shift) & (2**tokens.bits - 1) for byte in packed for shift in range(0, 8, tokens.bits)]
    scale, zero = params.double().repeat_interleave(32, 0).unbind(1)
    return x, torch.tensor(codes).double() * scale + zero


def poison(tokens, keep):
    """NaN in every slot that is not kept, keep [rows, slots]; codes have none, but their scales and zeros do."""
    for part in (*tokens.latents, *tokens.values):
        if part.is_floating_point():
            part[~keep] = float("nan")


def attention_problem(
    seed, lengths, T, R, g, heads, D, ranks, ring_rank, bits, dtype, listed, spare=1, per_row=False, back=0
):
    """Arguments of `latent_attention`, and per row the tokens that it is to attend to. back: slots of the ring beside
    those of the R newest tokens."""
    gen, B, width = torch.Generator().manual_seed(seed), len(lengths), heads * D
    q = rand(gen, B, heads * g, D, dtype=dtype)
    basis = rand(gen, max(ring_rank, sum(ranks)), width, dtype=dtype) * sum(ranks) ** -0.5
    ring = fill(gen, B + spare, R + back, (ring_rank,), width, max(8, bits), dtype)
    store = fill(gen, B + spare, T, ranks, width, bits, dtype)
    pos = torch.tensor(lengths, device=DEVICE) - 1
    t = torch.arange(T, device=DEVICE)
    kept_ring, kept = (torch.zeros(B + spare, n, dtype=torch.bool, device=DEVICE) for n in (R + back, T))
    for b, n in enumerate(lengths):
        kept_ring[b, [t % (R + back) for t in range(max(0, n - R), n)]] = True
    kept[:B] = t <= pos[:, None] - R
    idx = count = None
    attended = [list(range(n)) for n in lengths]
    if listed is not None:  # a share of the tokens in the store, in any order; what is not chosen may not matter
        idx = torch.randint(T, (B, max(1, round(listed * T))), generator=gen).to(DEVICE)
        counts = []
        kept[:B] = False
        for b, n in enumerate(lengths):
            chosen = torch.randperm(max(0, n - R), generator=gen)[: round(listed * max(0, n - R))][: idx.shape[1]]
            idx[b, : len(chosen)] = chosen
            kept[b, chosen] = True
            counts.append(len(chosen))
            attended[b] = chosen.tolist() + list(range(max(0, n - R), n))
        count = torch.tensor(counts, device=DEVICE)
    poison(ring, kept_ring)
    poison(store, kept)
    angle = rand(gen, B if per_row else 1, T, D // 2) * 3
    return (q, basis, ring, store, pos, idx, count, angle.cos(), angle.sin(), R), attended


def attention_oracle(args, attended):
    q, basis, ring, store, pos, _, _, cos, sin, recent = args
    B, Hq, D = q.shape
    R, out = ring.latents[0].shape[1], torch.zeros(q.shape, dtype=torch.float64)
    g = Hq * D // basis.shape[1]
    for b in range(B):
        keys, values = [], []
        for t in attended[b]:
            x, v = whole(ring, b, t % R) if t > pos[b] - recent else whole(store, b, t)
            key = (x @ basis[: len(x)].double().cpu()).view(-1, D)
            a, s = (c[b if len(c) > 1 else 0, t].double().cpu() for c in (cos, sin))
            k1, k2 = key.chunk(2, -1)
            keys.append(torch.cat((k1 * a - k2 * s, k2 * a + k1 * s), -1))
            values.append(v.view(-1, D))
        k, v = torch.stack(keys, 1), torch.stack(values, 1)  # [heads, K, D]
        for h in range(Hq):
            out[b, h] = (k[h // g] @ q[b, h].double().cpu() * D**-0.5).softmax(0) @ v[h // g]
    return out


def launch(args, block=None, splits=None):
    q, basis, ring, store, *rest, recent = args
    return attention_launch(
        q, basis, ring.latents[0], *ring.coded(), *store.latents, *store.coded(), *rest, ring.bits, store.bits, recent,
        block=block, splits=splits,
    )  # fmt: skip


def close(got, want, dtype):
    error = (got.double().cpu() - want).abs().max().item()
    assert error <= TOLERANCE[dtype] * max(1, want.abs().max().item()), error


@st.composite
def attention_cases(draw):
    bits, R = draw(st.sampled_from((2, 4, 8, 16))), draw(st.integers(1, 20))
    D = draw(st.sampled_from((32, 64, 96, 128) if bits < 16 else (32, 48, 64, 96)))
    heads, T = draw(st.integers(1, 2)), draw(st.integers(R, 70))
    rank = draw(st.integers(1, heads * D // 2))
    lead = draw(st.integers(1, rank))
    return dict(
        seed=draw(st.integers(0, 2**31)), lengths=draw(st.lists(st.integers(1, T), min_size=1, max_size=2)), T=T, R=R,
        g=draw(st.sampled_from((1, 3, 4, 5, 8, 17))), heads=heads, D=D, ranks=(lead, rank - lead),
        ring_rank=draw(st.integers(rank, heads * D)), bits=bits, dtype=draw(st.sampled_from(tuple(TOLERANCE))),
        listed=draw(st.sampled_from((None, 0.0, 0.3, 1.0))), spare=draw(st.integers(0, 1)),
        per_row=draw(st.booleans()), back=draw(st.sampled_from((0, 3))),
    )  # fmt: skip


def attention_is_float64(case, block, splits):
    args, attended = attention_problem(**case)
    close(launch(args, block, splits), attention_oracle(args, attended), case["dtype"])


@settings(max_examples=10, deadline=None)
@given(attention_cases(), st.sampled_from((16, 32)), st.integers(1, 4))
def test_attention(case, block, splits):
    """Chosen tokens or all, none in the store, ring not full, more splits than blocks; NaN in all else."""
    attention_is_float64(case, block, splits)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(attention_cases(), st.sampled_from((16, 32, 64)), st.integers(1, 7))
def test_attention_matrix(case, block, splits):
    attention_is_float64(case, block, splits)


CASE = dict(seed=1, lengths=(40, 7), T=44, R=6, g=4, heads=2, D=64, ranks=(20, 12), ring_rank=64, bits=4,
            dtype=torch.float32, listed=0.5)  # fmt: skip


@pytest.mark.parametrize("bits, listed", sampled(product((2, 16), (0.5, None)), [(2, None), (16, 0.5)]))
def test_attention_as_launched(monkeypatch, bits, listed):
    """Tiles and splits of real launches; the torch version agrees with both."""
    args, attended = attention_problem(**CASE | dict(bits=bits, listed=listed))
    want = attention_oracle(args, attended)
    for backend in ("triton", "torch"):
        monkeypatch.setenv("KV_FAST_BACKEND", backend)
        close(latent_attention(*args), want, torch.float32)


def test_block_size():
    cpu = torch.device("cpu")
    assert block_size(64, 4096, 128, 2, 4, cpu) == 128 and block_size(8, 512, 128, 2, 4, cpu) == 32
    assert block_size(256, 448, 128, 2, 4, cpu) == 128, "Llama-2-7B, batch 8 at 4K"


# ---- one token ----


def append_is_exact(seed, recent, R, T, heads, ranks, ring_rank, bits, dtype, at, part):
    """Latents move as they are, values to the bytes that torch gives; nothing else changes."""
    gen, B, width = torch.Generator().manual_seed(seed), len(at), heads * 32
    ring = fill(gen, B + 1, R, (ring_rank,), width, max(8, bits), dtype)
    store = fill(gen, B + 1, T, ranks, width, bits, dtype)
    x, v, pos = rand(gen, B, ring_rank, dtype=dtype), rand(gen, B, 2, width, dtype=dtype)[:, 1], torch.tensor(at)
    want_ring, want_store = (t._replace(latents=tuple(x.clone() for x in t.latents),
                                        values=tuple(x.clone() for x in t.values)) for t in (ring, store))  # fmt: skip
    for b, p in enumerate(at):
        old, left = (p - recent) % R, (p - recent) % T
        old_x, old_v = want_ring.latents[0][b, old].clone(), [y[b, old].clone() for y in want_ring.values]
        for part_, new in zip(want_store.latents, old_x[: sum(ranks)].split(ranks), strict=True):
            part_[b, left] = new
        if bits == 16:
            want_store.values[0][b, left], want_ring.values[0][b, p % R] = old_v[0], v[b]
        else:
            for y, new in zip(want_store.values, quantize(dequantize(*old_v, 8), bits), strict=True):
                y[b, left] = new
            for y, new in zip(want_ring.values, quantize(v[b], 8), strict=True):
                y[b, p % R] = new
        want_ring.latents[0][b, p % R] = x[b]
    latent._append_launch(
        x,
        v,
        pos.to(DEVICE),
        ring.latents[0],
        *ring.coded(),
        *store.latents,
        *store.coded(),
        bits,
        recent,
        part=part,
    )
    for got, want in ((ring, want_ring), (store, want_store)):
        for a, b in zip((*got.latents, *got.values), (*want.latents, *want.values), strict=True):
            assert torch.equal(a, b)


@st.composite
def append_cases(draw):
    R = draw(st.integers(1, 5))
    T, heads, recent = draw(st.integers(R, 12)), draw(st.integers(1, 5)), draw(st.integers(1, R))
    rank = draw(st.integers(1, heads * 32))
    lead = draw(st.integers(1, rank))
    return dict(
        seed=draw(st.integers(0, 2**31)), recent=recent, R=R, T=T, heads=heads, ranks=(lead, rank - lead),
        ring_rank=draw(st.integers(rank, heads * 32)), bits=draw(st.sampled_from((2, 4, 8, 16))),
        dtype=draw(st.sampled_from(tuple(TOLERANCE))), part=draw(st.sampled_from((32, 64, 1024))),
        at=draw(st.lists(st.integers(0, T - 1), min_size=1, max_size=3)),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(append_cases())
def test_append(case):
    append_is_exact(**case)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(append_cases())
def test_append_matrix(case):
    append_is_exact(**case)


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


def test_append_dispatches(monkeypatch):
    """Both backends leave the same bytes."""
    out = []
    for backend in ("triton", "torch"):
        monkeypatch.setenv("KV_FAST_BACKEND", backend)
        gen = torch.Generator().manual_seed(0)
        ring, store = fill(gen, 2, 3, (40,), 64, 8, torch.float32), fill(gen, 2, 9, (20, 12), 64, 4, torch.float32)
        append_token(ring, store, rand(gen, 2, 40), rand(gen, 2, 64), torch.tensor([1, 8], device=DEVICE), 2)
        out.append([*ring.latents, *ring.values, *store.latents, *store.values])
    assert all(torch.equal(a, b) for a, b in zip(*out, strict=True))


# ---- a prompt ----


def project_is_float64(seed, lengths, heads, D, ranks, dtype, tile):
    gen, B, S, width = torch.Generator().manual_seed(seed), len(lengths), max(lengths), heads * D
    x = rand(gen, B, S + 1, width + 16, dtype=dtype)[:, :S, :width]
    basis = rand(gen, sum(ranks) + 3, width, dtype=dtype) * width**-0.5
    buffers = [torch.full((B + 1, S + 2, r), 7.0, dtype=dtype, device=DEVICE) for r in ranks]
    latent._project_launch(x, basis, torch.tensor(lengths, device=DEVICE), *buffers, tile=tile)
    want = x.double().cpu() @ basis[: sum(ranks)].double().cpu().T
    got = torch.cat(buffers, 2)
    assert (got[B:] == 7).all() and (got[:, S:] == 7).all()
    for b, n in enumerate(lengths):
        close(got[b, :n], want[b, :n], dtype)


project_cases = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 2**31), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
        heads=st.integers(1, 2),
        D=st.sampled_from((32, 48, 96)), ranks=st.tuples(st.integers(1, 20), st.integers(0, 28)),
        dtype=st.sampled_from(tuple(TOLERANCE)), tile=st.sampled_from((16, 32, None)),
    )
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(project_cases)
def test_project(case):
    project_is_float64(**case)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(project_cases)
def test_project_matrix(case):
    project_is_float64(**case)


@pytest.mark.parametrize("bits", (4, 16))
def test_prompt_dispatches(monkeypatch, bits):
    gen = torch.Generator().manual_seed(0)
    fused, basis, lengths = rand(gen, 2, 9, 8, 32), rand(gen, 40, 64), torch.tensor([9, 4], device=DEVICE)
    k, v = fused[:, :, 2:4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2)
    out = []
    for backend in ("triton", "torch"):
        monkeypatch.setenv("KV_FAST_BACKEND", backend)
        store = fill(gen, 3, 12, (20, 12), 64, bits, torch.float32)
        store_prompt(store, basis, k, v, lengths)
        out.append(store)
    for b, n in enumerate(lengths.tolist()):
        for a, w in zip((*out[0].latents, *out[0].values), (*out[1].latents, *out[1].values), strict=True):
            assert torch.allclose(a[b, :n].float(), w[b, :n].float(), atol=1e-4)


# ---- the method, and what scoring and selection add ----


@pytest.mark.parametrize(
    ("knobs", "lengths"),
    [
        (dict(budget=8, sinks=1, recent=3), (4, 12)),
        pytest.param(dict(budget=1.0, value_bits=2, rank=0.125, recent=3), (2, 9), marks=pytest.mark.slow),
        pytest.param(dict(budget=7, sinks=2, recent=5, value_bits=16), (6,), marks=pytest.mark.slow),
        pytest.param(dict(budget=8, sinks=1, recent=3, score="softmax"), (12,), marks=pytest.mark.slow),
    ],
)
def test_sals_equals_its_oracle(triton_backend, knobs, lengths):
    """Prompts shorter and longer than the ring, and steps in which a token leaves it; all operations as kernels."""
    compare(knobs, (2, 1, 32), lengths, steps=3)


# ---- operators, compilation ----


def test_registered(triton_backend):
    args, _ = attention_problem(**CASE)
    q, basis, ring, store, *rest, recent = args
    checks = ("test_schema", "test_faketensor")
    flat = (ring.latents[0], *ring.coded(), *store.latents, *store.coded())
    # schemas are compared by value: NaN would differ from itself
    q, basis, *flat = (torch.nan_to_num(x) if x.is_floating_point() else x for x in (q, basis, *flat))
    attention, append = torch.ops.kv_fast.latent_attention.default, torch.ops.kv_fast.latent_append.default
    torch.library.opcheck(attention, (q, basis, *flat, *rest, 8, 4, recent), test_utils=checks)
    B, width = len(q), basis.shape[1]
    new = torch.ones(B, basis.shape[0], device=DEVICE), torch.ones(B, width, device=DEVICE)
    torch.library.opcheck(append, (*new, rest[0], *flat, 4, recent), test_utils=checks)
    x, lengths = torch.ones(B, 5, width, device=DEVICE), torch.tensor([5, 3], device=DEVICE)
    torch.library.opcheck(torch.ops.kv_fast.project.default, (x, basis, lengths, *flat[3:5]), test_utils=checks)


@pytest.mark.slow
def test_offsets_beyond_32_bits():
    """2^21 slots of 1040 coordinates; of these 4 GB only the pages that hold tokens are touched."""
    T, D, r, gen = 2**21, 32, 1040, torch.Generator().manual_seed(0)
    lead, values = (torch.empty(1, T, n, dtype=torch.float16, device=DEVICE) for n in (r, D))
    cos, sin = (torch.empty(1, T, D // 2, device=DEVICE) for _ in range(2))
    ring = fill(gen, 1, 1, (r,), D, 16, torch.float16)
    slots = torch.tensor([3, 17, T - 40, T - 2, T - 1], device=DEVICE)
    for x in (lead, values, cos, sin):
        x[0, slots] = rand(gen, 5, x.shape[2], dtype=x.dtype)
    q, basis = rand(gen, 1, 2, D, dtype=torch.float16), rand(gen, r, D, dtype=torch.float16) * 0.03
    store = LatentTokens((lead, lead.new_empty(1, T, 0)), (values,), 16)
    args = (q, basis, ring, store, slots[-1:], slots[None, :4], torch.tensor([4], device=DEVICE), cos, sin)
    close(launch(args, 16, 1), attention_oracle(args, [slots.tolist()]), torch.float16)
