"""h2o, tova, snapkv, pyramidkv, rkv and rocket against float64 oracles: what each head holds, and its output."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_evicting import H2ORow, PyramidKVRow, RKVRow, RocketRow, Row, SnapKVRow, TOVARow
from oracles import rotate

from cache.spec import make_args, method_class, presets, resolve
from errors import InputError
from kernels.observed_attention import last_mass
from kernels.prompt_scores import pooled
from model import ModelArgs

N_LAYER, STEPS = 5, 24
ORACLES: dict[str, type[Row]] = dict(h2o=H2ORow, tova=TOVARow, snapkv=SnapKVRow, pyramidkv=PyramidKVRow, rkv=RKVRow,
                                     rocket=RocketRow)  # fmt: skip
CASES = {  # method, knobs, (g, Hkv, D), prompt lengths
    "h2o-default": ("h2o", {}, (2, 2, 32), (40, 61)),
    "h2o-numbers": ("h2o", dict(heavy=9, recent=4), (3, 1, 32), (1, 12, 13, 14, 40)),
    "h2o-mixed": ("h2o", dict(heavy=0.3, recent=5), (1, 2, 64), (3, 30)),
    "h2o-of-one": ("h2o", dict(heavy=1, recent=1), (4, 1, 32), (1, 2, 25)),
    "h2o-all": ("h2o", dict(heavy=0.9, recent=0.2), (2, 1, 32), (11, 30)),
    "tova-default": ("tova", {}, (2, 2, 32), (40, 61)),
    "tova-states": ("tova", dict(budget=16), (3, 2, 32), (1, 15, 16, 17, 50)),
    "tova-recent": ("tova", dict(budget=12, recent=5), (1, 3, 64), (4, 30)),
    "tova-per-head": ("tova", dict(budget=0.3, heads="kv"), (4, 2, 32), (9, 50)),
    "tova-of-one": ("tova", dict(budget=1), (2, 2, 32), (1, 20)),
    "snapkv-default": ("snapkv", {}, (2, 2, 32), (31, 60)),
    "snapkv-number": ("snapkv", dict(budget=20, recent=6), (3, 2, 32), (1, 5, 19, 21, 60)),
    "snapkv-share": ("snapkv", dict(budget=0.3, recent=8, kernel=3), (2, 1, 64), (10, 60)),
    "snapkv-average": ("snapkv", dict(budget=24, recent=5, kernel=5, pool="avg"), (4, 1, 32), (40, 60)),
    "snapkv-largest": ("snapkv", dict(budget=18, recent=7, group="max"), (3, 2, 32), (40, 60)),
    "snapkv-no-pooling": ("snapkv", dict(budget=18, recent=7, kernel=1), (1, 2, 32), (40, 60)),
    "snapkv-window-alone": ("snapkv", dict(budget=9, recent=9), (2, 1, 32), (8, 40)),
    "pyramidkv-default": ("pyramidkv", {}, (2, 2, 32), (31, 60)),
    "pyramidkv-number": ("pyramidkv", dict(budget=24, recent=6), (2, 2, 32), (5, 23, 24, 30, 45, 70)),
    "pyramidkv-share": ("pyramidkv", dict(budget=0.25, recent=4, beta=4.0), (3, 1, 32), (3, 16, 70)),
    "pyramidkv-most": ("pyramidkv", dict(budget=0.7, recent=4), (1, 2, 32), (20, 70)),
    "snapkv-later": ("snapkv", dict(budget=20, recent=4, decode_budget=7, decode_every=5), (3, 2, 32), (1, 5, 19, 60)),
    "snapkv-later-largest": (
        "snapkv",
        dict(budget=9, recent=3, kernel=3, pool="avg", group="max", decode_budget=3, decode_every=8),
        (2, 1, 64),
        (40,),
    ),
    "pyramidkv-later": ("pyramidkv", dict(budget=24, recent=6, decode_budget=8, decode_every=6), (2, 2, 32), (5, 70)),
    "rkv-default": ("rkv", {}, (2, 2, 32), (31, 60)),
    "rkv-number": ("rkv", dict(budget=20, recent=4, buffer=6), (3, 2, 32), (1, 3, 15, 19, 20, 21, 60)),
    "rkv-share": ("rkv", dict(budget=0.4, recent=5, buffer=8, mix=0.5, kernel=3), (2, 1, 64), (10, 60)),
    "rkv-alike": ("rkv", dict(budget=18, recent=3, buffer=7, alike=0.1, spared=3), (1, 2, 32), (40, 50)),
    "rkv-none-spared": ("rkv", dict(budget=18, recent=3, buffer=5, alike=0.1, spared=0, mix=0.0), (4, 1, 32), (40,)),
    "rocket-default": ("rocket", {}, (2, 2, 32), (31, 60)),
    "rocket-number": ("rocket", dict(budget=16, recent=4, page=2, kernel=7), (3, 2, 32), (1, 5, 15, 16, 17, 60)),
    "rocket-share": ("rocket", dict(budget=0.3, recent=4, kernel=5, channels=9), (2, 1, 64), (10, 60)),
    "rocket-kept": (
        "rocket",
        dict(budget=10, kept=25, attended=9, recent=5, page=1, channels=0.25),
        (1, 2, 32),
        (40, 50),
    ),
    "rocket-later": ("rocket", dict(budget=14, recent=4, decode_budget=6, decode_every=5), (4, 1, 32), (40, 50)),
}
FULL = [
    *(("h2o", dict(heavy=a, recent=b)) for a in (1, 10, 0.05, 0.25) for b in (1, 7, 0.1)),
    *(("tova", dict(budget=b, recent=r, heads=h)) for b in (8, 0.1, 0.5) for r in (0, 1, 6) for h in ("layer", "kv")),
    *(("snapkv", dict(budget=b, recent=r, kernel=n, pool=p, group=x)) for b, r in ((16, 8), (0.2, 5), (40, 32))
      for n in (1, 5, 7) for p in ("max", "avg") for x in ("mean", "max")),
    *((name, dict(budget=b, recent=4, decode_budget=d, decode_every=n)) for name in ("snapkv", "pyramidkv", "rocket")
      for b in (12, 0.3) for d, n in ((4, 3), (9, 7))),
    *(("rkv", dict(budget=b, recent=r, buffer=n, alike=s)) for b in (16, 0.3) for r, n in ((2, 3), (8, 10))
      for s in (0.0, 0.5)),
    *(("rocket", dict(budget=b, recent=4, page=p, channels=c)) for b in (12, 0.2) for p in (1, 3) for c in (4, 0.5)),
    *(("pyramidkv", dict(budget=b, recent=4, beta=beta)) for b in (16, 0.2, 0.6) for beta in (1.0, 2.5, 20.0)),
]  # fmt: skip


def layer(name, knobs, shape, batch, T, at=3, new=None, dtype=torch.float32):
    g, h, d = shape
    args = ModelArgs(n_head=g * h, n_kv_head=h, head_dim=d, n_layer=N_LAYER)
    size = args.cache_shape(at, batch, T, dtype, "cpu", new)
    cls, preset = resolve(name)
    return cls(make_args(cls, preset | knobs), size, at, args.rotary(batch, T))


def oracle(name, knobs, at, q, k, v):
    args = vars(method_class(name).Args(**knobs))
    args.pop("room", None)
    if name == "pyramidkv":
        args |= dict(layer=at, n_layer=N_LAYER)
    return ORACLES[name](q, k, v, **args)


def rotated(x):
    """[H, n, D], each token at its own position, in float64."""
    return np.stack([rotate(x[:, t].double().numpy(), t) for t in range(x.shape[1])], 1)


def kept(method, b, head):
    return sorted(method.place[b, head, : int(method.filled[b])].tolist())


def compare(name, knobs, shape, lengths, seed=0, at=3, told=None, steps=STEPS):
    """-> how many tokens were lost. told: knobs of the oracle that are to differ."""
    gen, (g, h, d), n = torch.Generator().manual_seed(seed), shape, max(lengths) + steps
    q, k, v = (torch.randn(len(lengths), heads, n, d, generator=gen) * 1.5 for heads in (g * h, h, h))
    method, S = layer(name, knobs, shape, len(lengths), n, at), max(lengths)
    there = torch.arange(S) < torch.tensor(lengths)[:, None]
    method.prefill(*(torch.where(there[:, None, :, None], x[:, :, :S], 7.0) for x in (q, k, v)), torch.tensor(lengths))
    rows, lost = [], 0
    for b, length in enumerate(lengths):
        q64, k64 = rotated(q[b]), rotated(k[b])
        v64 = v[b].double().numpy()
        one = oracle(name, {**knobs, **(told or {})}, at, q64[:, :length], k64[:, :length], v64[:, :length])
        rows.append((one, q64, k64, v64))
    for step in range(steps + 1):
        for b, (one, *_) in enumerate(rows):
            for head in range(h):
                want = sorted(one.score[head])
                assert kept(method, b, head) == want, f"{name} step {step} row {b} head {head}"
                lost += lengths[b] + step - len(want)
        if step == steps:
            return lost
        pos = torch.tensor(lengths) + step
        now = [x[torch.arange(len(lengths)), :, pos] for x in (q, k, v)]
        out = method.decode(*now, pos)
        method.maintain(step + 1)
        for b, (one, q64, k64, v64) in enumerate(rows):
            p = lengths[b] + step
            want = one.step(q64[:, p], k64[:, p], v64[:, p])
            assert np.abs(out[b].double().numpy() - want).max() < 2e-5, f"{name} step {step} row {b}"


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case):
    lost = compare(*CASES[case])
    none = ("h2o-all", "snapkv-default", "pyramidkv-default", "rkv-default", "rocket-default")
    assert (lost > 0) != (case in none)


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(FULL)))
def test_equals_the_oracle_full_matrix(i):
    name, knobs = FULL[i]
    for shape in ((1, 2, 32), (3, 1, 64), (4, 2, 96)):
        compare(name, knobs, shape, (1, 7, 33, 64), seed=i, at=i % N_LAYER)


@pytest.mark.parametrize("name", ORACLES)
def test_in_torch_it_is_the_same(name, monkeypatch):
    """On a CPU the default is C++."""
    monkeypatch.setenv("KV_FAST_BACKEND", "torch")
    compare(*CASES[f"{name}-{dict(h2o='numbers', tova='states').get(name, 'number')}"])


WRONG = {
    "h2o": [dict(heavy=8), dict(recent=5), dict(heavy=0.2)],
    "tova": [dict(budget=15), dict(recent=3), dict(heads="kv")],
    "snapkv": [dict(budget=19), dict(recent=7), dict(kernel=5), dict(pool="avg"), dict(group="max")],
    "pyramidkv": [dict(beta=10.0), dict(recent=5), dict(budget=20)],
    "rkv": [dict(mix=0.5), dict(recent=5), dict(buffer=8), dict(kernel=1), dict(alike=0.9), dict(spared=0)],
    "rocket": [dict(page=3), dict(channels=4), dict(budget=24), dict(kernel=3)],
}
RIGHT = dict(h2o=dict(heavy=9, recent=4), tova=dict(budget=16), snapkv=dict(budget=20, recent=6),
             pyramidkv=dict(budget=24, recent=6), rkv=dict(budget=20, recent=4, buffer=6, alike=0.0, spared=4),
             rocket=dict(budget=16, recent=4, page=2, kernel=7))  # fmt: skip


@pytest.mark.parametrize("name, told", [(name, told) for name, each in WRONG.items() for told in each], ids=str)
def test_the_oracle_catches(name, told):
    with pytest.raises(AssertionError):
        compare(name, RIGHT[name], (3, 2, 32), (60,), told=told)


# ---- what the papers say ----


def test_defaults_are_the_papers():
    args = {name: vars(method_class(name).Args()) for name in ORACLES}
    assert args["h2o"] == dict(heavy=0.1, recent=0.1)
    assert args["tova"] == dict(budget=0.125, recent=0, heads="layer")
    snapkv = dict(budget=1024, recent=32, kernel=7, pool="max", group="mean", room=512, decode_budget=None,
                  decode_every=64)  # fmt: skip
    assert args["snapkv"] == snapkv
    assert args["pyramidkv"] == snapkv | dict(budget=2048, recent=8, beta=20.0)
    assert args["rkv"] == dict(budget=1024, recent=8, buffer=128, mix=0.1, kernel=7, alike=0.5, spared=1)
    assert args["rocket"] == snapkv | dict(kernel=63, kept=None, attended=None, page=3, channels=0.5)
    named = {preset: knobs for preset, (name, knobs) in presets().items() if name in ORACLES}
    assert named["snapkv-50"] == dict(budget=0.5) and named["snapkv-160"] == dict(budget=160)


def test_h2o_holds_a_fifth():
    """Double Sparsity, Table 1: an on-device cache of 1/5."""
    a_fifth, full = (layer(name, {}, (4, 2, 64), 1, 10_000) for name in ("h2o", "full"))
    assert a_fifth.k.shape[2] == 2000 and a_fifth.nbytes()["k"] * 5 == full.nbytes()["k"]


def test_tova_keeps_the_same_tokens_in_every_head():
    for heads, same in (("layer", True), ("kv", False)):
        method = layer("tova", dict(budget=12, heads=heads), (2, 3, 32), 1, 64)
        method.prefill(torch.randn(1, 6, 50, 32), torch.randn(1, 3, 50, 32), torch.randn(1, 3, 50, 32),
                       torch.tensor([50]))  # fmt: skip
        for p in range(50, 60):
            assert (len({tuple(kept(method, 0, head)) for head in range(3)}) == 1) == same
            method.decode(torch.randn(1, 6, 32), torch.randn(1, 3, 32), torch.randn(1, 3, 32), torch.tensor([p]))


@pytest.mark.parametrize("budget, beta", [(256, 20.0), (0.25, 20.0), (0.1, 5.0), (0.8, 20.0), (1.0, 20.0)])
def test_pyramidkv_holds_what_snapkv_holds(budget, beta):
    """In all layers together, falling by steps of one size (PyramidKV)."""
    sizes = []
    for i in range(N_LAYER):
        method = layer("pyramidkv", dict(budget=budget, beta=beta), (1, 1, 32), 1, 2048, at=i)
        sizes.append([int(method.held(torch.tensor([n]))) for n in (100, 300, 400, 1000, 2048)])
        assert max(sizes[-1]) <= method.k.shape[2]
    for n, layers in zip((100, 300, 400, 1000, 2048), zip(*sizes, strict=True), strict=True):
        k = min(n, budget if isinstance(budget, int) else int(np.ceil(budget * n - 1e-6)))
        assert abs(sum(layers) - N_LAYER * k) <= N_LAYER / 2 and max(layers) <= n
        steps = np.diff(layers)
        assert (steps <= 0).all() and np.ptp(steps) <= 2
        if k == n:
            assert set(layers) == {n}


def test_pyramidkv_has_no_pyramid_below_twice_its_budget():
    """Published code, 32 layers, 2048 tokens of which 8 are the window: up to 2 * 2040 - 1 all layers keep as much."""
    args = ModelArgs(n_head=1, n_kv_head=1, head_dim=32, n_layer=32)
    cls = method_class("pyramidkv")
    for at, pyramid in ((0, 3986), (31, 110)):
        method = cls(cls.Args(), args.cache_shape(at, 1, 9000, torch.float32, "meta"), at, args.rotary(1, 1, "meta"))
        held = method.held(torch.tensor([2047, 2048, 2500, 4079, 4080, 9000])).tolist()
        assert held == [2047, 2048, 2048, 2048, pyramid, pyramid]


def test_what_snapkv_decodes_stays():
    """And needs slots: where none are left the run ends, it does not forget."""
    for new, T in ((None, 400), (20, 400)):
        method = layer("snapkv", dict(budget=16, recent=4, room=20), (2, 1, 32), 1, T, new=new)
        assert method.k.shape[2] == 36
        method.prefill(torch.randn(1, 2, 100, 32), torch.randn(1, 1, 100, 32), torch.randn(1, 1, 100, 32),
                       torch.tensor([100]))  # fmt: skip
        first = kept(method, 0, 0)
        for step in range(21):
            x = torch.randn(1, 2, 32), torch.randn(1, 1, 32), torch.randn(1, 1, 32)
            method.decode(*x, torch.tensor([100 + step]))
            if step == 20:
                with pytest.raises(InputError, match="max_new_tokens"):
                    method.maintain(step + 1)
                break
            method.maintain(step + 1)
            assert kept(method, 0, 0) == first + list(range(100, 101 + step))


@pytest.mark.parametrize("at", range(N_LAYER))
def test_what_pyramidkv_decodes_after_a_short_prompt_stays(at):
    """In the last layers a longer prompt would keep less than a short one: what is decoded does not count as prompt."""
    method, n, steps = layer("pyramidkv", dict(budget=12, recent=4), (2, 1, 32), 1, 70, at, new=30), 9, 30
    method.prefill(torch.randn(1, 2, n, 32), *torch.randn(2, 1, 1, n, 32), torch.tensor([n]))
    assert kept(method, 0, 0) == list(range(n))
    for pos in range(n, n + steps):
        method.decode(torch.randn(1, 2, 32), *torch.randn(2, 1, 1, 32), torch.tensor([pos]))
        assert kept(method, 0, 0) == list(range(pos + 1))


def test_snapkv_allocates_what_it_may_need():
    known = layer("snapkv", dict(budget=0.25), (4, 2, 64), 1, 4096 + 128, new=128)
    assert known.k.shape[2] == 0.25 * (4096 + 128) + 128 and "score" not in known.nbytes()


# ---- operations ----


@pytest.mark.parametrize("how", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 7, 31])
def test_pooling(kernel, how):
    x = torch.rand(2, 3, 20)
    got = pooled(x, kernel, how)
    for b, h, t in np.ndindex(*x.shape):
        near = [float(x[b, h, j]) if 0 <= j < 20 else 0.0 for j in range(t - kernel // 2, t + kernel // 2 + 1)]
        assert abs(float(got[b, h, t]) - (max(near) if how == "max" else sum(near) / kernel)) < 1e-6


def test_the_largest_of_a_group():
    """Each query head's mass by itself, as heads without a group."""
    q, k, lengths = torch.randn(2, 6, 30, 32), torch.randn(2, 2, 30, 32), torch.tensor([30, 11])
    each = last_mass(q, k.repeat_interleave(3, 1), lengths, 8).unflatten(1, (2, 3))
    assert torch.allclose(last_mass(q, k, lengths, 8, group="max"), each.amax(2), atol=1e-6)
    assert torch.allclose(last_mass(q, k, lengths, 8), each.sum(2), atol=1e-5)
