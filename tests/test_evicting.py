"""The methods that evict against float64 oracles: what each head holds after every step, and its output."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle_evicting import ORACLES, KVzipRow, MatchingRow, most_attention
from oracles import rotate

from cache.calibration import Calibration, RandomCalibration, collect
from cache.spec import knob_names, make_args, method_class, resolve
from kernels.prompt_scores import pooled
from kv_methods import kvzip
from model import ModelArgs, Transformer
from runtime.errors import InputError
from runtime.parallel import Ranks
from scripts.contract import checks as c
from scripts.contract import step_checks as s
from scripts.contract.harness import prompt, run, tiny
from scripts.contract.reference import forward

N_LAYER, STEPS = 5, 24
EXPECTED = dict(budget=12, sinks=2, future=16)
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
    "snapkv-adaptive": ("snapkv", dict(budget=12, recent=4, adaptive=True), (3, 3, 32), (1, 11, 12, 13, 60)),
    "snapkv-adaptive-share": ("snapkv", dict(budget=0.3, recent=4, adaptive=True), (2, 5, 80), (10, 60)),
    "snapkv-unguarded": ("snapkv", dict(budget=12, recent=1, adaptive=True, safeguard=0.0), (5, 4, 32), (40, 60)),
    "snapkv-value-aware": ("snapkv", dict(budget=14, recent=4, value_aware=True), (3, 2, 32), (1, 14, 15, 60)),
    "snapkv-by-value": ("snapkv", dict(budget=14, recent=4, value_aware=True, first_stage=0.0), (8, 1, 128), (40,)),
    "pyramidkv-both": ("pyramidkv", dict(budget=20, recent=4, adaptive=True, value_aware=True), (2, 3, 96), (5, 60)),
    "expected_attention-default": ("expected_attention", dict(future=32), (2, 2, 32), (3, 60)),
    "expected_attention-number": ("expected_attention", EXPECTED, (3, 2, 64), (1, 3, 12, 13, 50)),
    "expected_attention-mean": (
        "expected_attention",
        EXPECTED | dict(covariance=False, value_norm=False, recent=3),
        (5, 1, 32),
        (40,),
    ),
    # sinks and the newest tokens do not all fit: the newest stay
    "expected_attention-full": ("expected_attention", dict(budget=0.3, recent=4), (1, 2, 32), (7, 40)),
    "expected_attention-full-alike": (
        "expected_attention",
        EXPECTED | dict(budget=6, recent=4, adaptive=False),
        (2, 2, 32),
        (7, 40),
    ),
    "expected_attention-value-aware": ("expected_attention", EXPECTED | dict(value_aware=True), (8, 2, 96), (40,)),
    "keydiff-default": ("keydiff", {}, (2, 2, 32), (31, 60)),
    "keydiff-number": ("keydiff", dict(budget=16), (3, 2, 32), (1, 15, 16, 17, 60)),
    "keydiff-share": ("keydiff", dict(budget=0.3), (5, 1, 64), (20, 50)),
    "keydiff-recent": ("keydiff", dict(budget=12, recent=5), (8, 2, 96), (4, 40)),
    "keydiff-of-one": ("keydiff", dict(budget=1), (1, 1, 128), (1, 20)),
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
    "knorm-default": ("knorm", {}, (2, 2, 32), (31, 60)),
    "knorm-number": ("knorm", dict(budget=16), (3, 2, 32), (1, 15, 16, 17, 60)),
    "knorm-recent": ("knorm", dict(budget=0.3, recent=5), (1, 1, 64), (4, 40)),
    "qfilters-default": ("qfilters", {}, (2, 2, 32), (31, 60)),
    "qfilters-number": ("qfilters", dict(budget=16, recent=4), (3, 2, 32), (1, 15, 16, 17, 60)),
    "lagkv-default": ("lagkv", {}, (2, 2, 32), (31, 60)),
    "lagkv-number": ("lagkv", dict(ratio=0.4, sinks=3, lag=7), (2, 2, 32), (1, 3, 16, 17, 18, 60)),
    "lagkv-no-sinks": ("lagkv", dict(ratio=0.25, sinks=0, lag=8), (1, 1, 64), (15, 16, 40)),
    "compactor-default": ("compactor", {}, (2, 2, 32), (3, 60)),
    "compactor-number": ("compactor", dict(budget=12, sinks=2, recent=3, block=16), (3, 2, 32), (1, 5, 12, 13, 60)),
    "compactor-alone": (
        "compactor",
        dict(budget=0.4, block=7, sketch=6, blend=1.5, adaptive=False),
        (1, 2, 64),
        (20, 50),
    ),
    "triattention-default": ("triattention", {}, (2, 2, 32), (31, 60)),
    "triattention-number": ("triattention", dict(budget=20, buffer=6), (3, 2, 32), (1, 3, 19, 20, 21, 50)),
    "triattention-share": ("triattention", dict(budget=0.4, recent=5, buffer=8, reach=100), (2, 1, 64), (10, 40)),
    "triattention-prompt": ("triattention", dict(budget=18, buffer=7, queries="prompt"), (2, 2, 32), (1, 30, 40)),
    "attention_matching-default": ("attention_matching", {}, (2, 2, 32), (31, 60)),
    "attention_matching-number": ("attention_matching", dict(budget=12, samples=20), (3, 2, 32), (1, 12, 13, 60)),
    "attention_matching-omp": ("attention_matching", dict(budget=0.3, keys="omp"), (2, 1, 64), (10, 50)),
    "attention_matching-recent": ("attention_matching", dict(budget=14, keys="omp", recent=6), (1, 2, 32), (5, 40)),
    "snapkv-chunks": ("snapkv", dict(budget=24, recent=4, chunk_length=5), (3, 2, 32), (1, 5, 23, 24, 25, 60)),
    "snapkv-one-chunk": ("snapkv", dict(budget=24, recent=4, chunk_length=10**9), (3, 2, 32), (25, 60)),
    "snapkv-chunks-cut": ("snapkv", dict(budget=0.3, recent=3, chunk_length=4, pool="avg"), (2, 1, 64), (10, 60)),
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


def output_weights(n_head, head_dim):
    """Of a model of 40 channels."""
    return torch.randn(n_head, head_dim, 40, generator=torch.Generator().manual_seed(5))


def layer(name, knobs, shape, batch, T, at=3, new=None, dtype=torch.float32):
    g, h, d = shape
    args = ModelArgs(n_head=g * h, n_kv_head=h, head_dim=d, n_layer=N_LAYER)
    size = args.cache_shape(at, batch, T, dtype, "cpu", new)
    cls, preset = resolve(name)
    letter = dict(min_tokens=0) if "min_tokens" in knob_names(cls) else {}
    args_of = make_args(cls, letter | preset | knobs)
    method = cls(args_of, size, at, args.rotary(batch, T), RandomCalibration(args, cls.needs(args_of)))
    method.output_weights = lambda: output_weights(g * h, d)
    return method


def oracle(name, knobs, at, q, k, v):
    args = vars(method_class(name).Args(**knobs))
    args.pop("min_tokens", None)  # test_budget.py
    if "decode_slots" in args:
        if name != "attention_matching":
            args |= dict(weights=output_weights(len(q), q.shape[2]).double().numpy())
        args.pop("decode_slots"), args.pop("queries", None)  # of the prompt, if a method asks
    if name == "compactor":
        gen = torch.Generator().manual_seed(args.pop("seed"))
        args |= dict(drawn=torch.randn(q.shape[2], args.pop("sketch"), generator=gen).double().numpy())
    if name in ("qfilters", "triattention") and args.pop("queries", None) != "prompt":
        model = ModelArgs(n_head=len(q), n_kv_head=len(k), head_dim=q.shape[2], n_layer=N_LAYER)
        parts = RandomCalibration(model, method_class(name).statistics).parts(at, name)
        heads = len(k) if name == "qfilters" else len(q)
        args |= {part: x.reshape(heads, -1).double().numpy() for part, x in parts.items()}
    if name == "pyramidkv":
        args |= dict(layer=at, n_layer=N_LAYER)
    return ORACLES[name](q, k, v, **args)


def rotated(x):
    """[H, n, D], each token at its own position, in float64."""
    return np.stack([rotate(x[:, t].double().numpy(), t) for t in range(x.shape[1])], 1)


def kept(method, b, head):
    if getattr(method.args, "adaptive", False):
        start, stop = (int(x[b, head]) for x in method.spans(b + 1))
        return sorted(method.place[b].flatten()[start:stop].tolist())
    return sorted(method.place[b, head, : int(method.filled[b])].tolist())


def compare(name, knobs, shape, lengths, seed=0, at=3, steps=STEPS):
    """-> how many tokens were lost."""
    gen, (g, h, d), n = torch.Generator().manual_seed(seed), shape, max(lengths) + steps
    q, k, v = (torch.randn(len(lengths), heads, n, d, generator=gen) * 1.5 for heads in (g * h, h, h))
    method, S = layer(name, knobs, shape, len(lengths), n, at), max(lengths)
    there = torch.arange(S) < torch.tensor(lengths)[:, None]
    method.prefill(*(torch.where(there[:, None, :, None], x[:, :, :S], 7.0) for x in (q, k, v)), torch.tensor(lengths))
    rows, lost = [], 0
    for b, length in enumerate(lengths):
        q64, k64 = rotated(q[b]), rotated(k[b])
        v64 = v[b].double().numpy()
        one = oracle(name, knobs, at, q64[:, :length], k64[:, :length], v64[:, :length])
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
    whole = ("snapkv", "pyramidkv", "keydiff", "rkv", "rocket", "qfilters", "lagkv", "triattention")
    none = ("h2o-all", *(f"{name}-default" for name in whole))
    assert (lost > 0) != (case in none)


@pytest.mark.parametrize("name", ORACLES)
def test_in_torch_it_is_the_same(name, monkeypatch):
    """On a CPU the default is C++."""
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    compare(*CASES[f"{name}-{dict(h2o='numbers', tova='states').get(name, 'number')}"])


# ---- what the papers say ----


@pytest.mark.parametrize("budget, beta", [(256, 20.0), (0.25, 20.0), (0.1, 5.0), (0.8, 20.0), (1.0, 20.0)])
def test_pyramidkv_holds_what_snapkv_holds(budget, beta):
    """In all layers together, falling by steps of one size (PyramidKV)."""
    sizes = []
    for i in range(N_LAYER):
        method = layer("pyramidkv", dict(budget=budget, beta=beta), (1, 1, 32), 1, 2048, at=i)
        sizes.append([int(method.num_kept(torch.tensor([n]))) for n in (100, 300, 400, 1000, 2048)])
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
        held = method.num_kept(torch.tensor([2047, 2048, 2500, 4079, 4080, 9000])).tolist()
        assert held == [2047, 2048, 2048, 2048, pyramid, pyramid]


def test_what_snapkv_decodes_stays():
    """And needs slots: where none are left the run ends, it does not forget."""
    for new, T in ((None, 400), (20, 400)):
        method = layer("snapkv", dict(budget=16, recent=4, decode_slots=20), (2, 1, 32), 1, T, new=new)
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


# ---- operations ----


@pytest.mark.parametrize("how", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 7, 31])
def test_pooling(kernel, how):
    x = torch.rand(2, 3, 20)
    got = pooled(x, kernel, how)
    for b, h, t in np.ndindex(*x.shape):
        near = [float(x[b, h, j]) if 0 <= j < 20 else 0.0 for j in range(t - kernel // 2, t + kernel // 2 + 1)]
        assert abs(float(got[b, h, t]) - (max(near) if how == "max" else sum(near) / kernel)) < 1e-6


# ---- budgets that heads share ----


BOTH = dict(budget=12, recent=4, adaptive=True, value_aware=True)


def test_heads_that_share_a_budget_hold_as_much_as_those_that_do_not():
    """To the byte, but for where each head begins; and every head has its safeguard."""
    alike, shared = (
        layer("snapkv", dict(budget=64, recent=8, adaptive=on), (2, 4, 32), 2, 400, new=20) for on in (False, True)
    )
    first = shared.nbytes().pop("first")
    assert first == 8 * 2 * 5 and sum(shared.nbytes().values()) == sum(alike.nbytes().values()) + first
    lengths = torch.tensor([300, 200])
    shared.prefill(torch.randn(2, 8, 300, 32) * 3, *torch.randn(2, 2, 4, 300, 32), lengths)
    start, stop = shared.spans(2)
    held = stop - start
    assert (held.sum(1) == 4 * 64).all() and (held >= 8 + int(0.2 * 56)).all() and (held != 64).any()
    assert (start[:, 1:] - stop[:, :-1] == 20).all(), "each has slots for all tokens that may be decoded"


@pytest.mark.slow
def test_the_contract_is_kept_with_both_knobs():
    for check in (c.check_poison, c.check_ragged, c.check_reset, c.check_store, c.check_chunks,
                  c.check_sizes, c.check_attended, c.check_half, s.check_nbytes, s.check_traffic,
                  s.check_compiled):  # fmt: skip
        check("snapkv", BOTH)
        knobs = ":".join(["snapkv", *(f"{k}={v}" for k, v in BOTH.items())])
        check("razor", dict(induction=0.4, echo=0.0, window=16, retrieval_method=knobs))


def test_scores_below_0_are_weighed_by_values_as_others_are():
    held = []
    k, v, scores = torch.randn(1, 2, 60, 32), torch.randn(1, 2, 60, 32), torch.randn(1, 2, 60)
    for less in (0, scores[..., :56].amin(-1, keepdim=True)):  # the others are recent
        method = layer("snapkv", dict(budget=14, recent=4, value_aware=True), (2, 2, 32), 1, 80)
        method.keep(k, v, scores - less, torch.tensor([60]))
        held.append(method.place.clone())
    assert torch.equal(*held)


def test_what_cannot_be_shared_is_said():
    args = ModelArgs(n_head=8, n_kv_head=4, head_dim=32, n_layer=N_LAYER, ranks=Ranks(0, 2))
    cls, shape = method_class("snapkv"), args.cache_shape(0, 1, 64, torch.float32, "cpu")
    with pytest.raises(InputError, match="use adaptive=False"):
        cls(cls.Args(adaptive=True), shape, 0, args.rotary(1, 64))
    method = layer("snapkv", dict(budget=16, recent=4, value_aware=True), (2, 1, 32), 1, 64)
    for weights, says in ((None, "needs the model's W_O"), (lambda: torch.ones(1, 32, 8), "no more processes")):
        method.output_weights = weights
        with pytest.raises(InputError, match=says):
            method.prefill(torch.randn(1, 2, 30, 32), *torch.randn(2, 1, 1, 30, 32), torch.tensor([30]))


@pytest.mark.parametrize("bias", [False, True])
def test_output_weights_are_those_of_the_layer(bias):
    """By query head, of packed weights too, to what these are."""
    model = Transformer(ModelArgs(dim=64, n_layer=1, n_head=4, n_kv_head=2, head_dim=32, ffn_dim=64, vocab_size=32,
                                  o_bias=bias))  # fmt: skip
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    model.setup_cache("snapkv", 1, 64)
    with torch.inference_mode():
        got = model.cache[0].output_weights()
    assert torch.allclose(got.flatten(0, 1), model.layers[0].attention.wo.weight.T, atol=1e-6)


# ---- expected_attention ----


@torch.inference_mode()
def test_statistics_of_the_prompt_itself_keep_what_its_queries_keep(monkeypatch):
    """A calibration measured on nothing but the prompt; on another text it keeps something else."""
    model, knobs = tiny(3, 32), dict(budget=12, future=40)
    held = {}
    for text in (None, prompt(50), prompt(60, seed=5)):
        monkeypatch.setattr(model, "calibration", text if text is None else calibrated(model, text))
        model.setup_cache("expected_attention", 1, 60, queries="prompt" if text is None else "calibration", **knobs)
        run(model, [prompt(50)], 3)
        held[0 if text is None else len(text)] = [kept(m, 0, head) for m in model.cache for head in range(2)]
    assert held[0] == held[50] != held[60]
    made = model.cache[0].nbytes()
    assert made["mean"] == 6 * 32 * 4 and made["moments"] == 6 * 32 * 32 * 4


def calibrated(model, text):
    statistics = method_class("expected_attention").needs(SimpleNamespace(queries="calibration"))
    return collect(model.args, model.layer_tokens, [text], statistics, 40)


def test_a_calibration_without_queries_says_how_they_are_measured():
    needed = method_class("expected_attention").needs(SimpleNamespace(queries="calibration"))
    with pytest.raises(InputError, match="calibrate.py .* --method expected_attention,queries=calibration"):
        Calibration({}, 2).require(needed)


# ---- kvzip ----


@pytest.mark.parametrize("g, d, knobs, chunk", [
    (2, 32, dict(budget=12, sinks=2, chunk=16, tail=3), None),
    (1, 64, dict(budget=12, sinks=0, chunk=16, adaptive=False), 10),
    (3, 80, dict(budget=0.3, chunk=50, safeguard=0.2), None),
    (5, 96, dict(budget=14, recent=4, chunk=20, value_aware=True), 7),
    (8, 128, dict(budget=10, chunk=7, tail=2), None),
])  # fmt: skip
@pytest.mark.parametrize("ask", [[], [5, 6]], ids=["no tokenizer", "asked"])
@torch.inference_mode()
def test_kvzip_keeps_what_a_repetition_looks_at(g, d, knobs, chunk, ask, monkeypatch):
    """Scores and choice in float64 from teacher forcing over the prompt and each repetition behind it."""
    model, prompts = tiny(g, d), [prompt(30), prompt(19), prompt(3)]
    monkeypatch.setattr(model, "encode", lambda text: [*ask, len(text) % 50] if ask else [])
    model.setup_cache("kvzip", 3, 60, min_tokens=0, **knobs)
    got, fed = run(model, prompts, 8, chunk=chunk)
    args = vars(model.cache[0].args)
    size, tail, sinks = args["chunk"], args["tail"], args["sinks"]
    own = {k: args[k] for k in ("budget", "recent", "adaptive", "safeguard", "value_aware", "first_stage")}
    for b, p in enumerate(prompts):
        votes: list[list[list[float]]] = [[[], []], [[], []]]
        for start in range(0, len(p), size):
            part = range(start, min(start + size, len(p)))
            request = model.encode(kvzip.GO_ON if start else kvzip.ASK)
            text = torch.cat((torch.tensor(request, dtype=torch.int64), p[max(0, start - tail) : part.stop]))
            told = []
            forward(model, torch.cat((p, text))[None], told.append)
            for layer_votes, t in zip(votes, told, strict=True):
                q, k = (x.double().transpose(0, 1).numpy() for x in (t.q_rot, t.k_rot))
                n = len(p)
                found = most_attention(q[:, n:], k[:, n:], k[:, :n], part, sinks)
                for head, more in zip(layer_votes, found, strict=True):
                    head += more
        for layer_votes, method, t in zip(votes, model.cache, told, strict=True):
            n, v = len(p), t.v.double().transpose(0, 1).numpy()[:, : len(p)]
            w = method.output_weights().double().detach().numpy()
            one = KVzipRow(q[:, :n], k[:, :n], v, votes=layer_votes, sinks=sinks, weights=w, **own)
            for head in range(2):
                want = [*sorted(one.score[head]), *range(n, n + 8)]
                assert kept(method, b, head) == want, (b, head)


def test_keys_that_are_no_numbers_reach_the_logits():
    """Which say so in one line, as with every method."""
    method = layer("attention_matching", dict(budget=8, min_tokens=0), (2, 2, 32), 1, 40)
    q, k, v = (torch.randn(1, 2, 20, 32) for _ in range(3))
    k[0, 0, 3, 5] = float("inf")
    method.prefill(q, k, v, torch.tensor([20]))
    assert not method.k[0, 0].isfinite().all() or not method.bias[0, 0].isfinite().all()


def test_attention_is_matched_for_no_more_queries_than_there_are():
    method = layer("attention_matching", dict(budget=8, samples=50_000), (2, 2, 32), 1, 40)
    some, there = method.references(torch.randn(1, 4, 30, 32), torch.tensor([20]), 2)
    assert some.shape == (1, 2, 60, 32) and there.sum() == 40


@torch.inference_mode()
def test_attention_is_matched_for_the_queries_of_a_repetition(monkeypatch):
    """Whose keys, biases and values are those of teacher forcing over the prompt, the request and the prompt again."""
    model, prompts = tiny(2, 32), [prompt(30), prompt(19)]
    monkeypatch.setattr(model, "encode", lambda text: [5, 6])
    model.setup_cache("attention_matching", 2, 60, min_tokens=0, budget=8, queries="repeat", samples=12)
    run(model, prompts, 3)
    for b, p in enumerate(prompts):
        told, n = [], len(p)
        forward(model, torch.cat((p, torch.tensor([5, 6]), p))[None], told.append)
        for method, t in zip(model.cache, told, strict=True):
            q, k, v = (x.double().transpose(0, 1).numpy() for x in (t.q_rot, t.k_rot, t.v))
            one = MatchingRow(q[:, :n], k[:, :n], v[:, :n], budget=8, recent=0, keys="attention", samples=12,
                              asked=q[:, n:])  # fmt: skip
            for head in range(2):
                want = sorted(one.score[head])
                assert kept(method, b, head) == [*want, *range(n, n + 3)], (b, head)
                assert method.place[b, head, :8].tolist() == want
                bias, values = ([of[t] for t in want] for of in (one.bias[head], one.v[head]))
                assert np.abs(method.bias[b, head, :8].numpy() - bias).max() < 1e-3
                assert np.abs(method.v[b, head, :8].numpy() - values).max() < 1e-3 * np.abs(values).max()


def test_kvzip_asks_in_words():
    """The requests of the paper, and the end of the chunk before; rows that have no such chunk get none."""
    method = layer("kvzip", dict(chunk=16, tail=3), (1, 1, 32), 2, 64)
    tokens = torch.arange(80).view(2, 40)
    texts = method.second_pass(tokens, torch.tensor([40, 20]), lambda text: [1000 + len(text)])
    assert [t.start for t in texts] == [0, 16, 32] and [t.lengths.tolist() for t in texts] == [
        [17, 17],
        [20, 8],
        [12, 0],
    ]
    assert texts[0].tokens[0].tolist() == [1000 + len(kvzip.ASK), *range(16)]
    assert texts[1].tokens[1].tolist() == [1000 + len(kvzip.GO_ON), *range(53, 72)]
