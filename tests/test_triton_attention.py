"""Attention kernels beside test_operators.py: shares of programs, far addresses, and whole methods by kernels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from operators import DEVICE, TOLERANCE, attend, heads, rand

import kernels.backend as backend_module
from kernels import dense_attention
from kernels.backend import version_for
from kernels.dense_attention import split_attention
from kernels.gather_attention import launch
from kernels.packed_attention import packed_attention
from kernels.splits import ASSUMED_SMS, MAX_SPLITS, combine, split_count
from kernels.window_append import window_append
from runtime.errors import InputError
from scripts.contract.checks import same
from scripts.contract.harness import prompt, run, tiny


@pytest.fixture(autouse=True)
def empty_is_nan(monkeypatch):
    """What a kernel leaves unwritten is NaN: partial outputs that no program writes must not be read."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: fill_nan(empty(*size, **kw)))


def fill_nan(x):
    return x.fill_(float("nan")) if x.is_floating_point() else x


def want(q, k, v, stop):
    """Slots from 0 to `stop` of each row."""
    q, k, v = (x.cpu() for x in (q, k, v))
    return heads(q, k.shape[1], lambda b, h, x: attend(x, *(y[b, h, : stop[b]] for y in (k, v)))).value


def check(got, expected, dtype):
    assert got.dtype == dtype and got.is_contiguous()
    error = (got.double().cpu() - expected).abs().max().item()
    assert error <= TOLERANCE[dtype], error


# ---- the kernel ----


def test_large_logits():
    """Logits in the thousands, of both signs: the running maximum carries them, in one block and over several."""
    q, k, v = 300 * rand(0, 1, 4, 32), 3 * rand(1, 1, 1, 40, 32), rand(2, 1, 1, 40, 32)
    stop = torch.tensor([40], device=DEVICE)
    for programs in (1, 3):
        check(split_attention(q, k, v, stop, block=16, programs=programs), want(q, k, v, [40]), torch.float32)


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
    expected = want(q, k, k, [T] * size[0])
    check(split_attention(q, k, k, stop, block=16, programs=2), expected, torch.float16)
    idx = torch.arange(T, device=DEVICE).expand(size[0], 1, -1).contiguous()
    check(launch(q, k, k, idx, stop[:, None], block=16, splits=1), expected, torch.float16)


@pytest.mark.parametrize("programs", (1, 3, 8, 30))
@pytest.mark.parametrize("ends", [[64, 0, 5], [160, 1, 1, 17], [33]])
def test_programs_take_equal_shares_of_the_real_lengths(monkeypatch, programs, ends):
    """Blocks of all heads end to end, cut into equal shares: which parts are written tells who read what."""
    block, heads = 16, 2
    seen = []

    class Spy:
        def __getitem__(self, grid):
            return lambda part, lse, *args, **kw: seen.append(lse)

    monkeypatch.setattr(dense_attention, "_combine_shares", Spy())
    q, (k, v) = rand(0, len(ends), 4, 32), (rand(i, len(ends), heads, max(ends), 32) for i in (1, 2))
    stop = torch.tensor(ends, device=DEVICE)
    split_attention(q, k, v, stop, block=block, programs=programs)
    # a unit is a head's block, an empty row has one; who takes which: (program, head) in order
    units = [h + heads * b for b, n in enumerate(ends) for h in range(heads) for _ in range(max(1, -(-n // block)))]
    share = -(-len(units) // programs)
    parts = sorted({(i // share, head) for i, head in enumerate(units)})
    written = (~seen[0].isnan().any(-1)).nonzero().flatten().tolist()
    assert written == [program + head for program, head in parts] and len(written) == len(set(written))


# ---- the operators ----


@pytest.mark.parametrize("backend", ("triton", "torch"))
@pytest.mark.parametrize("extra", (True, False))
def test_packed_heads_of_different_lengths(monkeypatch, backend, extra):
    """As each head alone, of which test_operators.py has the numbers."""
    monkeypatch.setattr("kernels.backend.BACKEND", backend)
    stop, (q, k, v) = (
        torch.tensor([[5, 20], [17, 1]], device=DEVICE),
        (rand(i, 2, n, 20, 32) for i, n in enumerate((6, 2, 2))),
    )
    q, mean = q[:, :, 0], (rand(3, 2, 2, 32), rand(4, 2, 2, 32), torch.tensor([[0, 9], [30, 0]], device=DEVICE))
    for x in (k, v):
        x[torch.arange(20, device=DEVICE) >= stop[..., None]] = float("nan")
    got = packed_attention(q, k, v, stop, *(mean if extra else ()))
    for b, h in product(range(2), range(2)):
        head = (x[b, h][None, None] for x in (k, v))
        more = (mean[0][b, h][None, None], mean[1][b, h][None, None], mean[2][b, h][None]) if extra else ()
        alone = packed_attention(q[b, 3 * h : 3 * h + 3][None], *head, stop[b, h][None], *more)
        assert torch.allclose(got[b, 3 * h : 3 * h + 3], alone[0], atol=1e-6)


@pytest.mark.parametrize("backend", ("torch", "triton", ""))  # "": C++ on a CPU
@pytest.mark.parametrize("dtype, compensation", ((torch.float32, True), (torch.bfloat16, False)))
def test_window_append(monkeypatch, backend, dtype, compensation):
    """A list for each row: 2 sinks, then a window that grows by some tokens and drops the oldest at the others; it
    fills its ring, and so a token's place is at last that of the one that leaves."""
    monkeypatch.setattr("kernels.backend.BACKEND", backend)
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


def test_which_version_runs(monkeypatch):
    """Kernels on a GPU, torch elsewhere; KV_FAST_BACKEND forces either."""
    gpu, cpu = ((torch.device(name), torch.float32) for name in ("cuda", "cpu"))
    forced = [("triton", (True, True))] if backend_module.INTERPRETED else []
    for backend, expected in (("", (True, False)), ("torch", (False, False)), *forced):
        monkeypatch.setattr("kernels.backend.BACKEND", backend)
        assert (version_for(*gpu) == "triton", version_for(*cpu) == "triton") == expected
    version = backend_module._version_for.__wrapped__  # not cached
    monkeypatch.setattr(backend_module, "INTERPRETED", False)
    with pytest.raises(InputError, match="TRITON_INTERPRET=1"):
        version("triton", "cpu", torch.float32)
    monkeypatch.setattr(backend_module, "triton", backend_module._Absent())
    with pytest.raises(InputError, match="need triton"):
        version("", "cuda", torch.float32)
    monkeypatch.setattr("kernels.backend.BACKEND", "cuda")
    with pytest.raises(InputError, match="use torch or triton"):
        version_for(*cpu)


def test_a_sliding_window_by_kernels(monkeypatch):
    """A window narrower than the prompts: ranges that start behind slot 0."""
    model, prompts = tiny(2, 32, device=DEVICE, windows=(8, None)), [prompt(n).to(DEVICE) for n in (1, 19)]
    model.setup_cache("full", 3, 32)
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    want, fed = run(model, prompts, 2)
    model.reset_cache()
    monkeypatch.setattr("kernels.backend.BACKEND", "triton")
    same(run(model, prompts, 2, fed)[0], want, "full")


# ---- what all kernels share ----


@pytest.mark.parametrize("S, D", list(product((1, 2, 5, 64), (32, 48, 128))))
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
