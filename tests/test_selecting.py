"""Quest, SparQ and Loki against float64 oracles and the formulas of their published code; budgets of p for all that
select by estimated logits."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle_double_sparsity import Probe, attended, random_keys
from oracle_selecting import LokiHead, QuestHead, SparqHead, fewest
from oracles import rotated, softmax

from cache.budget import TopP
from cache.calibration import Calibration
from cache.selecting import Selecting
from cache.spec import layer_methods, make_args, method_class
from kernels.gather_attention import gather_attention, weighted_gather_attention
from model import ModelArgs
from scripts.contract import checks, step_checks
from scripts.contract.checks import same
from scripts.contract.harness import prompt, run, teacher, tiny

N_LAYER, LAYER, STEPS = 5, 2, 10
ESTIMATING = ["oracle", "double_sparsity", "quest", "sparq", "loki", "sals"]  # methods with logits
CASES = {  # method, knobs, (g, Hkv, D), prompt lengths
    "quest": ("quest", dict(budget=48), (2, 2, 32), (70, 120)),
    "quest-short": ("quest", dict(budget=32), (1, 2, 32), (1, 15, 16, 30)),
    "quest-forced": ("quest", dict(budget=40, sinks=5, recent=12, page=4), (3, 1, 32), (3, 33, 60)),
    "quest-share": ("quest", dict(budget=0.3, page=3), (4, 1, 32), (50, 9)),
    "quest-per-query": ("quest", dict(budget=24, page=8, heads="query"), (3, 2, 32), (5, 50)),
    "quest-softmax": ("quest", dict(budget=24, page=8, heads="softmax"), (3, 2, 32), (5, 50)),
    "quest-max": ("quest", dict(budget=24, page=8, heads="max"), (3, 2, 32), (5, 50)),
    "sparq": ("sparq", dict(budget=20, recent=6, channels=8), (2, 2, 32), (70, 30)),
    "sparq-one-copy": ("sparq", dict(budget=20, recent=6, channels=8, copies=1), (2, 2, 32), (70, 30)),
    "sparq-no-mean": ("sparq", dict(budget=0.2, recent=3, mean_value=False), (3, 1, 64), (1, 40)),
    "loki": ("loki", dict(budget=0.25), (2, 2, 64), (60, 33)),
    "loki-forced": ("loki", dict(budget=20, sinks=4, recent=5, dims=5), (1, 2, 32), (2, 40)),
    "loki-before": ("loki", dict(budget=16, calibrated="before", dims=16), (4, 1, 32), (30, 50)),
    "loki-softmax": ("loki", dict(budget=14, heads="softmax"), (3, 1, 32), (45,)),
    "loki-max": ("loki", dict(budget=14, heads="max"), (3, 1, 32), (45,)),
    "loki-per-query": ("loki", dict(budget=14, heads="query"), (3, 1, 32), (45,)),
}


@functools.cache
def calibration(h: int, d: int) -> Calibration:
    gen = torch.Generator().manual_seed(0)
    bases = {f"layers.{i}.{name}.basis": torch.linalg.qr(torch.randn(h, d, d, generator=gen)).Q
             for i in range(N_LAYER) for name in ("pca", "pca_before")}  # fmt: skip
    return Calibration(bases, N_LAYER)


def layer(name, knobs, shape, batch, T, dtype=torch.float32, device="cpu"):
    g, h, d = shape
    args = ModelArgs(n_head=g * h, n_kv_head=h, head_dim=d, n_layer=N_LAYER)
    size, cls = args.cache_shape(LAYER, batch, T, dtype, device), method_class(name)
    calib = calibration(h, d) if device == "cpu" else None
    letter = {} if name == "full" else dict(min_tokens=0)
    return cls(make_args(cls, letter | knobs), size, LAYER, args.rotary(batch, T, device), calib)


def head_of(name, args, shape, i):
    """The oracle of a KV head."""
    h, d = shape[1:]
    common = dict(budget=args.budget, sinks=args.sinks, recent=args.recent)
    if name == "quest":
        return QuestHead(**common, page=args.page)
    if name == "sparq":
        r = args.channels if isinstance(args.channels, int) else round(args.channels * d)
        return SparqHead(**common, channels=r, mean_value=args.mean_value)
    kind = "pca" if args.calibrated == "after" else "pca_before"
    dims = args.dims if isinstance(args.dims, int) else round(args.dims * d)
    basis = calibration(h, d).get(LAYER, f"{kind}.basis")[i].double().numpy()
    return LokiHead(**common, dims=dims, basis=basis)


def compare(name, knobs, shape, lengths, seed=0, steps=STEPS):
    """Every step: a valid choice, and the output that follows from it."""
    g, h, d = shape
    B, n = len(lengths), max(lengths) + steps
    q, k, v = random_keys(seed, g, h, d, B, n)
    # the mean value gives every token a weight: what was chosen is seen without it
    blind = dict(mean_value=False) if name == "sparq" else {}
    method = layer(name, knobs | blind, shape, Probe.rows(B, n, d), n)
    probe, twin = Probe(method, q, k, v, lengths), layer(name, knobs, shape, B, n) if blind else None
    if twin is not None:
        keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        prompts = [torch.where(keep[:, None, :, None], x[:, :, : max(lengths)], 7.0) for x in (q, k, v)]
        twin.prefill(*prompts, torch.tensor(lengths))
    k64, v64, q64 = rotated(method.rope, k), v.double().numpy(), rotated(method.rope, q)
    args = make_args(method_class(name), knobs)
    heads = {(b, i): head_of(name, args, shape, i) for b, i in np.ndindex(B, h)}
    for (b, i), head in heads.items():
        head.by = getattr(args, "heads", "group")
        for t in range(lengths[b]):
            head.append(k64[b, i, t], v64[b, i, t])
    sparse = 0
    for step in range(steps):
        out, weights = probe.step(step)
        if twin is not None:
            pos = torch.tensor(lengths) + step
            now = [x[torch.arange(B), :, pos] for x in (q, k, v)]
            out = twin.decode(*now, pos).double().numpy()
        for b, i in np.ndindex(B, h):
            what, p, head = f"step {step} row {b} head {i}", lengths[b] + step, heads[b, i]
            group = slice(i * g, i * g + g)
            head.append(k64[b, i, p], v64[b, i, p])
            sets = [attended(w) for w in weights[b, group]]
            sparse += len(sets[0]) < p + 1
            queries = q64[b, group, p]
            if getattr(args, "heads", "group") == "query":
                for x, s in zip(queries, sets, strict=True):
                    head.check(x[None], s, what)
                want = np.concatenate([head.attend(x[None], s) for x, s in zip(queries, sets, strict=True)])
            else:
                assert all(s == sets[0] for s in sets), f"{what}: the query heads of a group see different tokens"
                head.check(queries, sets[0], what)
                want = head.attend(queries, sets[0])
            error = np.abs(out[b, group] - want).max()
            assert error <= 2e-4 * max(1, np.abs(want).max()), f"{what}: off by {error:.1e}"
    assert sparse, "the case selects nothing"


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case):
    compare(*CASES[case])


@pytest.mark.parametrize("case", ["quest-per-query", "sparq-no-mean", "loki-forced"])
def test_equals_the_oracle_in_torch(case, monkeypatch):
    """On a CPU the default is C++; of Triton is test_triton_contract.py."""
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    compare(*CASES[case], steps=6)


# ---- published code ----


def decoded(name, knobs, shape, n, seed=0):
    """A method with n - 1 tokens of prompt and the last decoded: it, its output, and q, k, v rotated in float64."""
    q, k, v = random_keys(seed, *shape, 1, n)
    method = layer(name, knobs, shape, 1, n)
    method.prefill(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], torch.tensor([n - 1]))
    out = method.decode(q[:, :, -1], k[:, :, -1], v[:, :, -1], torch.tensor([n - 1]))[0].double().numpy()
    rows = [rotated(method.rope, x)[0] for x in (q, k)] + [v[0].double().numpy()]
    return method, out, *rows


def test_the_mean_value_is_that_of_all_tokens():
    g, h, d = 1, 2, 32
    _, _, v = random_keys(3, g, h, d, 2, 40)
    method, lengths = layer("sparq", {}, (g, h, d), 2, 40), torch.tensor([1, 20])
    padded = torch.where((torch.arange(20) < lengths[:, None])[:, None, :, None], v[:, :, :20], float("nan"))
    method.compress(v[:, :, :20], v[:, :, :20], padded, lengths)
    for step in range(20):
        pos = lengths + step
        token = v[torch.arange(2), :, pos]
        method.append(token, token, pos)
        for row, n in enumerate((pos + 1).tolist()):
            assert torch.allclose(method.v_mean[row], v[row, :, :n].mean(1), atol=1e-5)


# ---- bytes ----


def test_bytes_and_reads():
    """Quest: 2 D numbers a page of 16; SparQ: K twice; Loki: nothing but the basis, and a quarter of K for scores."""
    T, D, names = 4096, 128, ("full", "quest", "sparq", "loki")
    methods = {n: layer(n, {}, (4, 8, 128), 1, T, torch.bfloat16, "meta") for n in names}
    held = {n: sum(m.nbytes().values()) for n, m in methods.items()}
    token = 8 * 2 * D * 2
    assert held["quest"] == held["full"] + T // 16 * token
    assert held["sparq"] == 1.5 * held["full"] + 4 * 8 * D + 4 * 32
    assert held["loki"] == held["full"] + 2 * 8 * D * D
    read = {n: m.traffic(T - 1) for n, m in methods.items()}
    assert read["quest"] == token * (T // 16 + 1024)
    assert read["sparq"] == token * 129 + 8 * (T * 32 * 2 + 4 * D)
    assert read["loki"] == 8 * T * 32 * 2 + token * T // 4 + 2 * 2 * 8 * D * D


def test_a_budget_of_p_leaves_layers_dense_as_the_method_does():
    """Twilight's published code leaves out 0 and 1 for every selector."""

    def dense(spec):
        return [i for i, (cls, _) in enumerate(layer_methods(spec, 32)) if cls.__name__ == "Full"]

    assert dense("loki,budget=p0.95") == [] and dense("quest,budget=p0.95") == [0, 1]
    assert dense("loki,budget=p0.95,skip_layers=0,1") == [0, 1]


# ---- budgets of p ----


def test_a_budget_of_p_is_read_and_written():
    args = make_args(method_class("quest"), dict(budget="p0.95", cap="0.5"))
    assert args.budget == TopP(0.95) and str(args.budget) == "p0.95" and args.cap == 0.5
    assert make_args(method_class("sals"), dict(budget=TopP(0.5))).budget.p == 0.5


@pytest.mark.parametrize("name", ESTIMATING)
def test_p_of_one_is_dense_attention(name):
    knobs = method_class(name).lossless | dict(budget="p1", cap=1.0)
    model, prompts = tiny(4, 64), [prompt(n) for n in (1, 17, 64)]
    model.setup_cache(name, 3, 90, **knobs)
    got, fed = run(model, prompts, 20)
    same(got, teacher(model, prompts, fed), f"{name} at p1")


@pytest.mark.parametrize("name", ESTIMATING)
def test_a_budget_of_p_keeps_the_contract(name):
    knobs = method_class(name).stress | dict(budget="p0.9", cap=40)
    checks.check_poison(name, knobs)
    checks.check_ragged(name, knobs, lengths=(3, 64), steps=10)
    checks.check_attended(name, knobs)
    step_checks.check_traffic(name, knobs)


@pytest.mark.parametrize(("p", "cap"), [(0.3, 1.0), (0.9, 1.0), (0.99, 25), (0.95, 0.2)])
def test_p_of_the_true_attention(p, cap):
    """`oracle` estimates exactly: as many tokens as the float64 weights say, and they hold p unless the cap binds."""
    g, h, n, sinks, recent = 2, 2, 90, 3, 5
    method, _, q, k, _ = decoded("oracle", dict(budget=TopP(p), cap=cap, sinks=sinks, recent=recent), (g, h, 32), n)
    x, pos = torch.from_numpy(q[:, -1]).float()[None], torch.tensor([n - 1])
    idx, count = method.select(x, pos)
    most = max(sinks + recent, int(np.ceil(cap * n - 1e-6)) if isinstance(cap, float) else cap)
    for i in range(h):
        weights = np.mean([softmax(k[i] @ q[i * g + j, -1] / np.sqrt(32)) for j in range(g)], 0)
        forced = {t for t in range(n) if t < sinks or t >= n - recent}
        chosen = idx[0, i, : count[0, i]].tolist()
        assert len(chosen) == fewest(weights, p, forced, most) and forced <= set(chosen)
        assert weights[chosen].sum() >= p - 1e-6 or len(chosen) == most
        worst = min((weights[t] for t in set(chosen) - forced), default=1)
        assert all(weights[t] <= worst + 1e-6 for t in set(range(n)) - set(chosen))


def test_traffic_of_a_budget_of_p_is_what_its_steps_read():
    method, _, q, *_ = decoded("oracle", dict(budget=TopP(0.5), cap=1.0, sinks=1, recent=1), (2, 2, 32), 90)
    x, pos = torch.from_numpy(q[:, -1]).float()[None], torch.tensor([89])
    _, count = method.select(x, pos)
    assert method.chosen(89) == int(-(-count.sum() // 2)) < 90
    method.note_read(torch.tensor([[10, 11]]), pos)  # the mean of all steps, decode's, the one above and this
    share = (2 * int(count.sum()) + 21) / (3 * 180)
    assert [method.chosen(n - 1) for n in (90, 45)] == [int(np.ceil(share * n - 1e-9)) for n in (90, 45)]
    method.note_read(torch.tensor([[10, 11]]), pos, keys=True)  # and all keys
    share = (2 * int(count.sum()) + 21 + 21 + 180) / (5 * 180)
    assert [method.chosen(n - 1) for n in (90, 45)] == [int(np.ceil(share * n - 1e-9)) for n in (90, 45)]
    method.reset()
    assert method.chosen(89) == 90  # the cap, before any step


# ---- weights of tokens ----


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_token_that_counts_n_times_is_n_tokens(dtype, tol):
    q, k, v = (torch.randn(2, heads, *n, 32).to(dtype) for heads, n in ((4, ()), (2, (9,)), (2, (9,))))
    idx, count, times = torch.tensor([3, 5, 0, 8]).expand(2, 2, 4), torch.full((2, 2), 3), torch.tensor([1, 4, 2, 9])
    again = torch.tensor([3, 5, 5, 5, 5, 0, 0]).expand(2, 2, 7)
    got = weighted_gather_attention(q, k, v, idx, count, times.log().expand(2, 2, 4))
    assert got.dtype == dtype
    assert (got - gather_attention(q, k, v, again, torch.full((2, 2), 7))).abs().max() < tol


@pytest.mark.parametrize("by_query", [False, True])
def test_drawn_tokens_stand_for_those_that_were_not(by_query):
    """A selecting method whose tokens weigh 1 / p: attention over the drawn ones is their weighted mean."""

    class Drawn(Selecting):
        def scores(self, q, pos):
            heads = q.shape[1] if by_query else self.k.shape[1]
            return (torch.arange(self.k.shape[2]) % 3).float().expand(len(q), heads, -1)

        def log_weights(self, idx, count, pos):
            return torch.where(idx < pos[:, None, None] - 1, 3.0, 1.0).log()

    args = ModelArgs(n_head=4, n_kv_head=2, head_dim=32, n_layer=1)
    method = Drawn(Drawn.Args(budget=9, sinks=0, recent=2), args.cache_shape(0, 1, 40, torch.float32), 0,
                   args.rotary(1, 40))  # fmt: skip
    method.by_query = by_query
    q, k, v = torch.randn(1, 4, 21, 32), *torch.randn(2, 1, 2, 21, 32)
    method.prefill(q[:, :, :20], k[:, :, :20], v[:, :, :20], torch.tensor([20]))
    pos, told = torch.tensor([20]), []
    method.trace = SimpleNamespace(step=lambda method, attended, pos: told.append(attended))
    got = method.decode(q[:, :, 20], k[:, :, 20], v[:, :, 20], pos)
    at = [2, 5, 8, 11, 14, 17, 1, 19, 20]
    weight = torch.tensor([3.0 if t < 19 else 1.0 for t in at])
    q = method.rope.rotate(q[:, :, 20], pos).view(2, 2, 32)
    p = (q @ method.k[0, :, at].mT * 32**-0.5).exp() * weight
    want = (p / p.sum(-1, keepdim=True) @ method.v[0, :, at]).view(1, 4, 32)
    assert torch.allclose(got, want, atol=1e-5) and torch.allclose(told[0].output().float(), want, atol=1e-5)
