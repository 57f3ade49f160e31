"""The selection kernels' ways of long rows, at sizes that an interpreter is quick with: beside test_operators.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from operators import DEVICE, KINDS, NAN, Chosen, rand, randint

from kernels import select as module
from kernels.select import select
from kernels.splits import empty_scores

# blocks for short rows: above 32 slots a row goes to one program that lists candidates, or to several
ALONE = dict(row=32, alone=1000, tile=32, sample=16, slack=2, listed=64)
SMALL = ALONE | dict(alone=32, chunk=32)
SIZES = dict(row={}, alone=ALONE, chunks=SMALL)


# ---- selection ----


def check_selection(got, scores, allowed, forced, wanted, k):
    scores, allowed, forced, wanted = (x.cpu() for x in (scores, allowed, forced, wanted))
    Chosen(scores, allowed, forced, wanted.expand(scores.shape[:2]), k).check([x.cpu() for x in got], "triton")


def check_budget(seed, B, H, T, k, kind, sizes, sinks=2, recent=3, pos=None, wanted=None):
    scores, t = KINDS[kind](rand(seed, B, H, T)), torch.arange(T, device=DEVICE)
    pos = randint(seed, 0, T + 1, B) - 1 if pos is None else torch.tensor(pos, device=DEVICE)
    wanted = randint(seed, 0, T + 4, B) if wanted is None else torch.full((B,), wanted, device=DEVICE)
    allowed = (t <= pos[:, None])[:, None]
    forced = ((t < sinks) | (t > pos[:, None] - recent))[:, None]
    padded = empty_scores(B, H, T, device=DEVICE).fill_(NAN)
    padded.copy_(torch.where(allowed, scores, NAN))
    got = select(padded, None, pos, wanted, k, sinks, recent, **sizes)
    wanted = torch.maximum(wanted, (pos + 1).clamp(max=sinks + recent))[:, None].expand(B, H)
    check_selection(got, scores, allowed, forced, wanted, k)


@pytest.mark.parametrize("kind", ["normal", "few values", "constant", "tiny", "minus infinity"])
@pytest.mark.parametrize("by", ("alone", "chunks"))
def test_long_rows_are_brute_force(by, kind):
    check_budget(1, 1, 2, 90, 31, kind, SIZES[by])


@pytest.mark.parametrize("by, kind", list(product(SIZES, ("normal", "constant"))))
def test_edges_of_a_selection(by, kind):
    """No slot filled, one, all; nothing wanted, everything. Equal scores also overflow what is held in registers."""
    sizes = SIZES[by]
    for pos, wanted in (([-1, 0], 0), ([40, -5], 41), ([40, 30], 17)):
        check_budget(3, 2, 1, 41, 41, kind, sizes, sinks=0, recent=1, pos=pos, wanted=wanted)
    if sizes:  # the tightest bracket
        check_budget(4, 1, 1, 70, 61, kind, sizes | dict(slack=0), sinks=0, recent=1, pos=[69], wanted=31)


@pytest.mark.parametrize("sizes", (ALONE, SMALL | dict(listed=32)), ids=("alone", "chunks"))
def test_a_sample_that_misleads(sizes):
    """Every slot that is looked at has a high score, and no other one: the floor is too high, and nothing is lost."""
    scores, mask = rand(1, 1, 1, 80), torch.ones(1, 1, 80, dtype=torch.bool, device=DEVICE)
    scores[..., :: 80 // sizes["sample"]] += 100
    wanted = torch.full((1, 1), 40, device=DEVICE)
    check_selection(select(scores, mask, None, wanted, 40, **sizes), scores, mask, ~mask, wanted, 40)


@pytest.mark.parametrize("T, chunks", [(16385, 2), (32768, 4), (32832, 4), (131072, 16)])
def test_chunks_are_even(T, chunks):
    """32768 tokens and those of an answer need no fifth program, and none has much less to do than the others."""
    S, size = module._chunks(T, module.ALONE, module.CHUNK, module.TILE)
    assert chunks == S and size % module.TILE == 0 and (S - 1) * size < T <= S * size
    assert S * size - T < S * module.TILE


@pytest.mark.parametrize("by", SIZES)
def test_order_of_extreme_scores(by):
    """Every float has its place; NaN, which scores should not have, is the largest, as in torch.topk."""
    sizes = SIZES[by]
    tiny, huge, inf = 1e-45, 3e38, float("inf")
    order = [NAN, inf, huge, 1.0, 1e-38, tiny, 0.0, -tiny, -1e-38, -1.0, -huge, -inf]
    shuffled = torch.randperm(len(order)).tolist()
    row = torch.tensor([order[i] for i in shuffled] + [-inf] * 30, device=DEVICE)
    for n in (1, 2, 5, 7, 11):
        idx, _ = select(row[None, None], torch.ones(1, 1, 42, dtype=torch.bool, device=DEVICE), None,
                        torch.full((1, 1), n, device=DEVICE), n, **sizes)  # fmt: skip
        assert sorted(shuffled[t] for t in idx.flatten().tolist()) == list(range(n))
    both_zeros = torch.tensor([-0.0, 0.0] * 21, device=DEVICE)[None, None]  # are equal: the first slots
    idx, _ = select(both_zeros, torch.ones(1, 1, 42, dtype=torch.bool, device=DEVICE), None,
                    torch.full((1, 1), 5, device=DEVICE), 5, **sizes)  # fmt: skip
    assert sorted(idx.flatten().tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("drift", (0, 4))
def test_candidates_are_few(drift):
    """What is listed of a row is little more than is wanted, also where scores drift along the row."""
    T, k, listed = 8192, 512, {}
    launch = module._take_row

    class Spy:
        def __getitem__(self, grid):
            def run(*args, **sizes):
                listed["n"] = int(args[5].sum())
                return launch[grid](*args, **sizes)

            return run

    scores = (rand(0, 1, 1, T) + torch.linspace(0, drift, T, device=DEVICE)).contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_take_row", Spy())
        pos, wanted = torch.tensor([T - 1], device=DEVICE), torch.tensor([k], device=DEVICE)
        idx, _ = select(scores, None, pos, wanted, k, alone=4096, chunk=4096)
    assert set(idx.flatten().tolist()) == set(scores.topk(k).indices.flatten().tolist())
    assert k <= listed["n"] < module._listed(T, k, module.SAMPLE)


@pytest.mark.parametrize("T", [4160, 16384, 16385, 33000])
def test_the_blocks_of_launches(T):
    """One program at its longest, and chunks of which the last is short; the highest scores are those of torch."""
    scores, pos = rand(T, 1, 2, T), torch.tensor([T - 3], device=DEVICE)
    scores[0, 1] = (8 * scores[0, 1]).round()  # many candidates, many ties
    n, k = 1000, 1200
    idx, count = select(scores, None, pos, torch.tensor([n], device=DEVICE), k, sinks=5, recent=9)
    assert idx.shape == (1, 2, k) and (count == n).all()
    want = scores.clone()
    want[..., :5], want[..., T - 11 :], want[..., T - 2 :] = NAN, NAN, float("-inf")  # forced in, not yet there
    want = want.topk(n).values[..., 14:]  # of NaN, which is forced in, torch.topk makes the highest
    for h in range(2):
        taken = idx[0, h, :n].tolist()
        assert len(set(taken)) == n and max(taken) <= T - 3
        forced = {*range(5), *range(T - 11, T - 2)}
        assert forced <= set(taken)
        free = torch.tensor([t for t in taken if t not in forced], device=DEVICE)
        assert torch.equal(scores[0, h, free].sort(descending=True).values, want[0, h])


@pytest.mark.parametrize("by", SIZES)
def test_more_is_forced_or_wanted_than_fits(by):
    """Fewer slots than what is forced in; more wanted than is allowed; more slots than tokens; nothing allowed."""
    sizes, n = SIZES[by], dict(device=DEVICE)
    scores = rand(0, 2, 1, 90)
    idx, count = select(scores, None, torch.tensor([80, 3], **n), torch.tensor([2, 2], **n), 4, 6, 6, **sizes)
    assert (count == 4).all()
    for b, forced in enumerate(({*range(6), *range(75, 81)}, {*range(4)})):
        assert all(len(set(row)) == 4 and set(row) <= forced for row in idx[b].tolist())
    mask = torch.zeros(2, 1, 90, dtype=torch.bool, **n)
    mask[0, :, 7:12] = True
    idx, count = select(torch.where(mask, scores, NAN), mask, None, torch.full((2, 1), 99, **n), 120, **sizes)
    assert idx.shape == (2, 1, 90) and idx.min() >= 0 and idx.max() < 90
    assert (count[0] == 5).all() and (count[1] == 0).all()
    assert all(sorted(row[:5]) == [7, 8, 9, 10, 11] for row in idx[0].tolist())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_scores_of_16_bits(dtype):
    scores = rand(3, 1, 1, 70, dtype=dtype)
    mask, wanted = randint(4, 0, 2, 1, 1, 70).bool(), torch.full((1, 1), 9, device=DEVICE)
    for sizes in ({}, ALONE, SMALL):
        got = select(scores, mask, None, wanted, 9, **sizes)
        check_selection(got, scores.float(), mask, torch.zeros_like(mask), wanted, 9)


def test_strided_scores_and_counts():
    scores, mask = rand(0, 2, 50, 3), randint(1, 0, 2, 2, 50, 1).bool()
    wanted = torch.tensor([4, 9], device=DEVICE)[:, None].expand(2, 3)
    got = select(scores.mT, mask.mT, None, wanted, 9)
    check_selection(got, scores.mT, mask.mT, torch.zeros_like(mask.mT), wanted, 9)
    part = rand(2, 2, 3, 64)[:, :, 1:48]  # rows that end in other memory, and begin where loads cannot be wide
    got = select(part, None, torch.tensor([46, 20], device=DEVICE), wanted[:, 0], 9)
    t = torch.arange(47, device=DEVICE)
    allowed = (t <= torch.tensor([[46], [20]], device=DEVICE))[:, None]
    check_selection(got, part, allowed, torch.zeros_like(allowed), wanted, 9)
