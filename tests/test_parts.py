"""Parts of methods: where a token is, and what comes back of it, against a list that remembers."""

from __future__ import annotations

import pytest
import torch

from cache.base import CacheShape, unit_of
from cache.full_precision import Exempt, Tail
from cache.packed import PackedVectors, check_groups
from kernels.packed_gather_attention import PackedTokens, read_packed
from kernels.prompt_scores import best_in_order
from kernels.ring import ring_positions
from kernels.select import with_run
from kv_methods.ojakv import BesideExempt
from runtime.errors import InputError
from scripts.contract.harness import tiny

LENGTHS = torch.tensor([1, 5, 9])


def shape(T=64):
    return CacheShape(3, T, 4, 2, 32, torch.float32, torch.device("cpu"))


def tokens(position):
    """k and v [B, Hkv, ..., D] whose numbers are their positions [B, ...]."""
    x = position[:, None, ..., None].float().expand(-1, 2, *position.shape[1:], 32)
    return x, -x


@pytest.mark.parametrize("size", [1, 4, 7])
def test_a_ring_holds_the_newest(size):
    for newest in range(20):
        got = ring_positions(torch.tensor([newest]), size)[0].tolist()
        assert [p % size for p in got] == list(range(size))
        assert sorted(got) == list(range(newest - size + 1, newest + 1))


@pytest.mark.parametrize(("size", "flush"), [(1, 1), (4, 4), (6, 4), (8, 1)])
def test_a_tail_loses_nothing(size, flush):
    """Every decoded token is in the ring or has moved, and what it holds is what stands at its positions."""
    tail, moved = Tail(shape(), size, flush), []
    tail.prompt_len[:] = LENGTHS
    for step in range(25):
        pos = LENGTHS + step
        tail.put(*tokens(pos), tail.newest(pos))
        at = tail.position(pos)
        for b, n in enumerate(LENGTHS.tolist()):
            there = at[b][at[b] >= 0]
            assert sorted(there.tolist()) == list(range(n + len(moved), n + step + 1))
            assert torch.equal(tail.k[b, 0, at[b] >= 0, 0], there.float())
        if tail.due(step + 1):
            k, v, steps = tail.take()
            assert torch.equal(k[:, 0, :, 0], (LENGTHS[:, None] + steps).float()) and torch.equal(v, -k)
            moved += steps.tolist()
    assert moved == list(range(len(moved))) and len(moved) >= 25 - size


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 3), (4, 0), (0, 4), (6, 6)])
def test_exempt_tokens_are_where_it_says(first, last):
    exempt, S = Exempt(shape(), first, last, 4), 12
    exempt.put_prompt(*tokens(torch.arange(S).expand(3, -1)), LENGTHS)
    mask = exempt.mask(LENGTHS, S)
    for step in range(4):
        pos = LENGTHS + step
        exempt.put(*tokens(pos), exempt.newest(pos))
        at, filled = exempt.position(pos), exempt.filled(pos)
        assert torch.equal(at >= 0, filled) and torch.equal(exempt.k[:, 1, :, 3][filled], at[filled].float())
        for b, n in enumerate(LENGTHS.tolist()):
            whole = [t for t in range(n) if mask[b, t]]
            assert sorted(at[b][filled[b]].tolist()) == whole + list(range(n, n + step + 1))
            assert n - len(whole) == BesideExempt(None, first + last).of(n)


@pytest.mark.parametrize(("budget", "exempt"), [(None, 5), (0.3, 4), (7, 4), (3, 4), (1.0, 0)])
def test_a_budget_beside_exempt_tokens_is_one_for_numbers_and_tensors(budget, exempt):
    lengths = torch.arange(1, 60)
    assert BesideExempt(budget, exempt).at(lengths).tolist() == [
        BesideExempt(budget, exempt).of(n) for n in range(1, 60)
    ]


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_packed_vectors_come_back(bits):
    s, gen = shape(), torch.Generator().manual_seed(0)
    k, v = (PackedVectors(s, (3, 2, 8), 32, bits) for _ in "kv")
    x = torch.randn(3, 2, 8, 32, generator=gen)
    mean = x.mean(2)
    k.put((slice(3), slice(None), slice(8)), x, mean)
    v.put((slice(3), slice(None), slice(8)), x)
    assert k.vector_bytes * 48 == sum(b.numel() * b.element_size() for b in k.buffers())
    assert len(k.parts()) == (1 if bits == 16 else 2)
    slots = torch.arange(8).expand(3, 2, 8)
    centred, whole = read_packed(PackedTokens(k.data, v.data, bits, k.params, v.params), slots)
    step = (x.amax(3) - x.amin(3)).max() / (2**bits - 1)
    assert (whole - x).abs().max() <= 0.5 * step + 2e-3 and (centred + mean[:, :, None] - x).abs().max() <= step + 2e-3


def test_packed_vectors_want_whole_groups():
    check_groups("mine", 64)
    with pytest.raises(InputError, match="mine needs a head_dim divisible by 8, this model has 44: use 16 bits"):
        check_groups("mine", 44, ": use 16 bits")


def test_a_run_follows_the_list():
    idx, count = torch.tensor([[[7, 3, 5], [2, 9, 9]]]), torch.tensor([[3, 1]])
    got = with_run(idx, count, torch.tensor([20]), 22, 6)
    assert got.tolist() == [[[7, 3, 5, 20, 21, 22], [2, 20, 21, 22, 22, 22]]]


def test_the_best_in_order():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.9, 0.2], [0.3, 0.1, 0.2, 0.0, 0.4]])
    at, there = best_in_order(scores, 3, torch.tensor([3, 1]))
    assert at[0].tolist() == [1, 2, 3] and at[1, :1].tolist() == [4] and there.sum(1).tolist() == [3, 1]


# ---- units ----


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_a_unit_is_a_power_of_two_for_a_heads_tokens(dtype):
    lengths = torch.tensor([6, 3])
    for size in (0.0, *(2.0**e for e in (range(-24, 15) if dtype == torch.float16 else range(-100, 100, 5)))):
        x = (torch.tensor([1.0, 3.5])[:, None, None] * size).expand(2, 2, 6, 8).to(dtype).clone()
        x[1, :, 3:] = float("nan")  # padding
        unit = unit_of(x, lengths)
        assert unit.shape == (2, 2, 1) and unit.dtype == dtype and (unit.float().log2() % 1 == 0).all()
        largest = (x[:, :, :3] / unit[..., None]).float().amax((2, 3))
        assert not size or (largest >= 1 / 16).all() and (largest < 256).all()
        assert torch.equal(largest * unit[..., 0].float(), x[:, :, 0, 0].float())
        assert (unit == 1).all() or not 1 / 8 <= size < 64


def test_tokens_that_come_later_may_be_far_larger_or_smaller():
    """Values of 10 to 14 exponents above or below those of the prompt, whose unit they are stored in."""
    gen = torch.Generator().manual_seed(0)
    for prompt_size, later in ((2.0**-14, 1.0), (2.0**-3, 2.0**9), (2.0**7, 2.0**-3)):
        model = tiny(1, 64, 1)
        model.setup_cache("turboquant", 1, 60)
        method, pos = model.cache[0], torch.tensor([8])
        q, k, v = (torch.randn(1, 1, 40, 64, generator=gen) for _ in "qkv")
        v[:, :, :8] *= prompt_size
        v[:, :, 8:] *= later
        q *= 0  # every token weighs the same
        method.prefill(q[:, :, :8], k[:, :, :8], v[:, :, :8], pos)
        for t in range(8, 40):
            y = method.decode(q[:, :, t], k[:, :, t], v[:, :, t], torch.tensor([t]))
        want = v.mean(2)
        assert (y - want).norm() < 0.3 * want.norm(), (prompt_size, later)
