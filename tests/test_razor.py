"""razor against a float64 oracle written from the paper, layer by layer; its choice of heads; the scope of ALiBi."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle_double_sparsity import Probe, random_keys
from oracle_razor import RazorHead, alibi_weights, normalized, protected_heads
from oracles import rotated

from cache.calibration import Calibration
from cache.spec import make_args, resolve
from engine import LLM
from kernels.alibi import alibi_scope
from kv_methods.razor import Razor
from loading.named import named_args
from model import ModelArgs
from runtime import errors
from runtime.errors import InputError
from scripts.contract.harness import tiny

N_LAYER, LAYER, STEPS = 4, 1, 40
HALF = dict(induction=0.2, echo=0.1)
CASES = {  # knobs, (g, Hkv, D), prompt lengths, seed of the head scores
    "window": (dict(window=16, **HALF), (2, 3, 64), (3, 17, 64, 110), 0),
    "borders": (dict(window=16, sinks=4, **HALF), (1, 4, 32), (1, 19, 20, 21, 22), 0),
    "share-of-all-tokens": (dict(window=4, share=0.35, **HALF), (3, 2, 32), (10, 11, 12, 100), 0),
    "grows-in-decode": (dict(window=6, share=0.45, sinks=3, **HALF), (2, 3, 32), (1, 5, 14, 40), 0),
    "grows-late": (dict(window=16, share=0.34, **HALF), (1, 3, 64), (2, 30, 60), 0),
    "every-token-stays": (dict(window=2, share=1.0, **HALF), (2, 3, 32), (1, 20), 0),
    "full-up-to": (dict(window=1, share=0.2, full_up_to=30, **HALF), (2, 3, 32), (3, 29, 30, 31, 80), 0),
    "no-compensation": (dict(window=9, compensation=False, **HALF), (2, 3, 32), (5, 50), 0),
    "no-sinks": (dict(window=12, sinks=0, induction=0.1, echo=0.05), (4, 3, 32), (11, 12, 13, 40), 0),
    "window-of-one": (dict(window=1, share=0.01, sinks=2, **HALF), (2, 3, 32), (1, 2, 3, 30), 0),
    "window-over-the-context": (dict(**HALF), (2, 3, 32), (5, 60), 0),
    "nothing-protected": (dict(window=16, induction=0.0, echo=0.0), (8, 2, 32), (30, 45), 0),
    "all-protected": (dict(window=16, induction=1.0), (2, 2, 128), (30, 45), 0),
    "duo": (dict(window=9, sinks=2, share=0.0, compensation=False, **HALF), (2, 3, 32), (5, 50), 0),
    "one-query-head-of-eight": (dict(window=10, induction=1 / 64, echo=0.0), (8, 2, 96), (50, 10), 1),
}


def calibration(args: ModelArgs, seed: int = 0) -> Calibration:
    """Random head scores, and what the methods need that protected heads may be given to."""
    gen, n, d, out = torch.Generator().manual_seed(seed), args.n_kv_head, args.head_dim, {}
    for i in range(args.n_layer):
        sizes = {"razor.induction": (args.n_head,), "razor.echo": (args.n_head,), "sals.eigenvalues": (n * d,)}
        out |= {f"layers.{i}.{name}": torch.rand(size, generator=gen) for name, size in sizes.items()}
        out |= {f"layers.{i}.channels.{c}": torch.rand(n, d, generator=gen).argsort(-1) for c in ("qk", "q", "k")}
        out[f"layers.{i}.sals.basis"] = torch.linalg.qr(torch.randn(n * d, n * d, generator=gen)).Q
    return Calibration(out, args.n_layer)


def model_args(shape, n_layer: int = N_LAYER) -> ModelArgs:
    g, h, d = shape
    return ModelArgs(dim=32, n_head=g * h, n_kv_head=h, head_dim=d, n_layer=n_layer)


def layer(knobs, args, batch, T, at=LAYER, calib=None, dtype=torch.float32):
    size = args.cache_shape(at, batch, T, dtype, "cpu")
    return Razor(make_args(Razor, knobs), size, at, args.rotary(batch, T), calib or calibration(args))


def scores(calib: Calibration) -> tuple[np.ndarray, np.ndarray]:
    return tuple(calib.stack(f"razor.{kind}").double().numpy() for kind in ("induction", "echo"))


def compare(knobs, shape, lengths, seed=0, steps=STEPS, protected=None):
    """Every step and head: the weight that each token of the text has in the output is that of eq. 5."""
    g, h, d = shape
    args, B, n = model_args(shape), len(lengths), max(lengths) + steps
    calib = calibration(args, seed)
    q, k, v = random_keys(seed, g, h, d, B, n)
    method = layer(knobs, args, Probe.rows(B, n, d), n, calib=calib)
    probe = Probe(method, q, k, v, lengths)
    q64, k64, v64 = rotated(method.rope, q), rotated(method.rope, k), v.double().numpy()
    a = make_args(Razor, knobs)
    if protected is None:
        protected = protected_heads(*scores(calib), (a.induction, a.echo), g)
    heads = {}
    for b, i in np.ndindex(B, h):
        prompt = slice(0, lengths[b])
        heads[b, i] = RazorHead(k64[b, i, prompt], v64[b, i, prompt], protected=(LAYER, i) in protected,
                                sinks=a.sinks, window=a.window, share=a.share, compensation=a.compensation,
                                full_up_to=a.full_up_to)  # fmt: skip
    dropped = 0
    for step in range(steps):
        out, weights = probe.step(step)
        for b, i in np.ndindex(B, h):
            p, head = lengths[b] + step, heads[b, i]
            head.append(k64[b, i, p], v64[b, i, p])
            dropped += len(head.dropped())
            for j in range(i * g, i * g + g):
                what = f"step {step} row {b} query head {j}{' (protected)' if head.protected else ''}"
                got, want = weights[b, j], head.weights(q64[b, j, p])
                assert not got[p + 1 :].any(), f"{what}: sees the future"
                wrong = np.flatnonzero(np.abs(got[: p + 1] - want) > 1e-3 * want + 1e-7)
                assert len(wrong) == 0, (
                    f"{what}: tokens {wrong.tolist()} of {p + 1} have {got[wrong]}, want {want[wrong]}"
                )
                value = sum(w * x for w, x in zip(want, head.v, strict=True))
                assert np.abs(out[b, j] - value).max() <= 1e-4 * max(1, np.abs(value).max()), f"{what}: other values"
    return protected, dropped


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case):
    knobs, shape, lengths, seed = CASES[case]
    protected, dropped = compare(knobs, shape, lengths, seed)
    here = sum(at == LAYER for at, _ in protected)
    if case == "nothing-protected":
        assert here == 0
    elif case == "all-protected":
        assert here == shape[1]
    else:
        assert 0 < here < shape[1], "the case does not test a layer of both kinds of heads"
    assert (dropped > 0) == (case not in ("all-protected", "window-over-the-context", "every-token-stays"))


@pytest.mark.parametrize("case", ["window", "borders", "no-compensation"])
def test_equals_the_oracle_in_torch(case, monkeypatch):
    """On a CPU the default is C++."""
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    compare(*CASES[case])


@pytest.mark.parametrize("case", ["window", "grows-in-decode", "no-compensation"])
def test_one_list_of_slots_gives_what_two_caches_give(case, monkeypatch):
    """On a GPU: both kinds of heads in three launches; here in the interpreter, with rows to spare."""
    knobs, shape, lengths, seed = CASES[case]
    lengths, (g, h, d), steps = (lengths[0], min(lengths[-1], 40)), shape, 5
    q, k, v = random_keys(seed, g, h, d, 2, max(lengths) + steps)
    methods, args = [], model_args(shape)
    for backend in ("torch", "triton"):
        monkeypatch.setattr("kernels.backend.BACKEND", backend)
        methods.append(layer(knobs, args, 3, max(lengths) + steps, calib=calibration(args, seed)))
        prompt = (x[:, :, : max(lengths)] for x in (q, k, v))
        methods[-1].prefill(*prompt, torch.tensor(lengths))
    assert methods[0].k_all is None and methods[1].n_other and methods[1].k_all is not None
    for step in range(steps):
        pos = torch.tensor(lengths) + step
        token = [torch.stack([x[b, :, p] for b, p in enumerate(pos)]) for x in (q, k, v)]
        out = []
        for method, backend in zip(methods, ("torch", "triton"), strict=True):
            monkeypatch.setattr("kernels.backend.BACKEND", backend)
            out.append(method.decode(*token, pos))
        assert torch.allclose(*out, atol=1e-5), f"step {step}"
    for (name, one), (_, other) in zip(*(m.named_buffers() for m in methods), strict=True):
        assert torch.allclose(one, other, atol=1e-6), name


def test_the_window_is_a_share_of_all_tokens_not_of_the_prompt():
    """Table 2, N / 5: 10 tokens and 1990 decoded ones keep as many as a prompt of 2000, and give the same output."""
    g, h, d, n, short = 2, 1, 32, 2000, 10
    q, k, v = random_keys(0, g, h, d, 1, n + 1)
    knobs = dict(window=128, share=0.2, induction=0.0, echo=0.0)
    decoded, prompted = (layer(knobs, model_args((g, h, d)), 1, n + 1) for _ in range(2))
    decoded.prefill(q[:, :, :short], k[:, :, :short], v[:, :, :short], torch.tensor([short]))
    for p in range(short, n):
        decoded.decode(q[:, :, p], k[:, :, p], v[:, :, p], torch.tensor([p]))
    prompted.prefill(q[:, :, :n], k[:, :, :n], v[:, :, :n], torch.tensor([n]))
    last = torch.tensor([n - 1])
    seen = [m.attended(q[:, :, n - 1], None, None, last) for m in (decoded, prompted)]
    for a in seen:
        at = a.position[0, 0]
        assert sorted(at[at >= 0].tolist()) == [*range(4), *range(n - 400, n)]
        assert a.tokens[0, 0][at == -1].tolist() == [n - 404]
    assert torch.allclose(decoded.mean_k, prompted.mean_k, atol=2e-5)  # summed up in another order
    assert torch.allclose(decoded.mean_v, prompted.mean_v, atol=2e-5)
    out = [m.decode(q[:, :, n], k[:, :, n], v[:, :, n], torch.tensor([n])) for m in (decoded, prompted)]
    assert torch.allclose(*out, atol=1e-5)


def test_the_running_mean_is_kept_in_fp32():
    """In bf16 an increment of 1/N_d of a mean is lost after some 250 tokens, and the oldest would dominate."""
    g, h, d, n = 1, 1, 64, 600
    q, k, v = random_keys(0, g, h, d, 1, n)
    args = model_args((g, h, d))
    knobs = dict(window=4, share=0.0, sinks=0, induction=0.0, echo=0.0)
    method = layer(knobs, args, Probe.rows(1, n, d), n, dtype=torch.bfloat16)
    probe = Probe(method, *(x.bfloat16() for x in (q, k, v)), [6])
    for i in range(n - 7):
        probe.step(i)
    weights = probe.step(n - 7)[1][0, 0, : n - 4]
    assert weights.min() > 0 and weights.max() / weights.min() < 1.03


# ---- which heads are protected ----


def seen_whole(knobs, args, calib) -> set[tuple[int, int]]:
    """(layer, KV head) that gives tokens of the middle weights of their own: nothing of them was averaged."""
    g, h, d, n, out = args.n_head // args.n_kv_head, args.n_kv_head, args.head_dim, 30, set()
    for i in range(args.n_layer):
        q, k, v = random_keys(i, g, h, d, 1, n)
        method = layer({"window": 4, "share": 0.01, **knobs}, args, Probe.rows(1, n, d), n, at=i, calib=calib)
        weights = Probe(method, q, k, v, [n - 1]).step(0)[1][0, :, 6:20]
        for head in range(h):
            own = weights[head * g : head * g + g]
            spread = own.max(1) / own.min(1)
            assert (spread > 1.5).all() or (spread < 1.001).all(), "some heads of a group are compressed, some are not"
            if spread[0] > 1.5:
                out.add((i, head))
    return out


@pytest.mark.parametrize("shares", [(0.14, 0.01), (0.25, 0.0), (0.0, 0.05), (0.1, 0.1), (0.5, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("g", [1, 4])
def test_protected_heads_are_the_top_of_the_whole_model(shares, g):
    """Not of each layer; and a KV head is, if any query head of its group is."""
    args = model_args((g, 4, 32), n_layer=5)
    calib = calibration(args, seed=3)
    for i in range(5):  # layers that differ as real ones do: whole layers have none
        calib.tensors[f"layers.{i}.razor.induction"] *= 0.3 + 0.2 * i
        calib.tensors[f"layers.{i}.razor.echo"] *= 1.1 - 0.2 * i
    want = protected_heads(*scores(calib), shares, g)
    assert seen_whole(dict(induction=shares[0], echo=shares[1]), args, calib) == want


def test_random_protection_has_as_many_heads_anywhere():
    """Table 1's control."""
    args = model_args((2, 4, 32), n_layer=5)
    calib = calibration(args, seed=2)
    sets = [seen_whole(dict(protect="random", seed=seed, **HALF), args, calib) for seed in (0, 0, 1, 2)]
    retrieval = seen_whole(HALF, args, calib)
    assert {len(s) for s in sets} == {len(retrieval)} and sets[0] == sets[1]
    assert len({frozenset(s) for s in [*sets[1:], retrieval]}) == 4
    assert max(sum(at == i for at, _ in s) for i in range(5) for s in sets) > min(
        sum(at == i for at, _ in s) for i in range(5) for s in sets
    ), "every layer has the same number: they were not drawn over the whole model"


@pytest.mark.parametrize("share", [0.5, 0.25, 0.3])
def test_duo_takes_its_share_of_kv_heads(share, tmp_path):
    """By a group's best score, or by the gates of a file, for which no calibration is needed; nothing is averaged."""
    args = model_args((2, 4, 32), n_layer=5)
    calib, n = calibration(args, seed=2), math.ceil(share * 20 - 1e-6)
    gates = scores(calib)[0].reshape(5, 4, 2).max(2)
    other = np.random.default_rng(0).random((5, 4))
    file = tmp_path / "full_attention_heads.tsv"
    np.savetxt(file, other, delimiter="\t")
    for knobs, of in (({}, gates), (dict(gates=str(file)), other)):
        knobs = resolve("duo")[1] | dict(induction=share, sinks=2, window=9) | knobs
        assert Razor.needs(make_args(Razor, knobs)) == (() if "tsv" in knobs["gates"] else Razor.statistics)
        want = {(int(i) // 4, int(i) % 4) for i in np.argsort(-of, axis=None)[:n]}
        held = set()
        for i in range(5):
            method = layer(knobs, args, 1, 40, at=i, calib=calib)
            whole = (
                method.order[: method.n_other].tolist() if method.n_own and method.n_other else range(method.n_other)
            )
            held |= {(i, head) for head in whole}
        assert held == want


def test_a_saved_cache_knows_the_gates_that_its_file_had(tmp_path):
    file, llm = tmp_path / "gates.tsv", LLM(compile=False)
    n_layer, heads = llm.model.args.n_layer, llm.model.args.n_kv_head
    file.write_text("\n".join(["\t".join(["1"] + ["0"] * (heads - 1))] * n_layer))
    llm.use("duo", gates=str(file), window=16, induction=1 / heads)
    llm.read([list(range(300, 360))], 8)
    llm.save(tmp_path / "a")
    llm.restore(tmp_path / "a", 8)
    file.write_text("\n".join(["\t".join(["0"] * (heads - 1) + ["1"])] * n_layer))
    with pytest.raises(InputError, match="other contents of the file that a knob"):
        llm.restore(tmp_path / "a", 8)


def test_gates_of_another_model_are_an_input_error(tmp_path):
    file, args = tmp_path / "gates.tsv", model_args((2, 4, 32), n_layer=5)
    for text, says in (("1 0\n0 1\n", r"\[2, 2\] layers and KV heads, this model has \[5, 4\]"), ("1 x\n", "numbers")):
        file.write_text(text)
        with pytest.raises(errors.InputError, match=says):
            layer(resolve("duo")[1] | dict(gates=str(file)), args, 1, 40)


# ---- another method for the protected heads ----


@pytest.mark.parametrize("name", ["self_index", "double_sparsity", "oracle", "self_index-7.5"])
def test_protected_heads_through_another_method_are_as_with_it_alone(name):
    g, h, d, n, steps = 2, 4, 64, 230, 6
    args = model_args((g, h, d))
    calib = calibration(args, seed=5)
    protected = sorted(i for at, i in protected_heads(*scores(calib), (0.15, 0.1), g) if at == LAYER)
    assert 0 < len(protected) < h and protected != list(range(len(protected)))
    q, k, v = random_keys(1, g, h, d, 2, n + steps)
    knobs = dict(window=16, induction=0.15, echo=0.1)
    whole = layer(knobs, args, 2, n + steps, calib=calib)
    mixed = layer(knobs | dict(retrieval_method=name), args, 2, n + steps, calib=calib)
    cls, preset = resolve(name)
    own = ModelArgs(dim=32, n_head=g * len(protected), n_kv_head=len(protected), head_dim=d, n_layer=N_LAYER)
    size = own.cache_shape(LAYER, 2, n + steps, torch.float32, "cpu")
    some = calib.heads(LAYER, protected, h, cls.statistics)
    alone = cls(make_args(cls, preset), size, LAYER, mixed.rope, some)
    queries = [i * g + j for i in protected for j in range(g)]
    lengths, outs = torch.tensor([n, 57]), []
    every = slice(None)
    for method, qs, kvs in ((whole, every, every), (mixed, every, every), (alone, queries, protected)):
        method.prefill(q[:, qs, :n], k[:, kvs, :n], v[:, kvs, :n], lengths)
        steps_out = []
        for step in range(steps):
            pos = lengths + step
            row = torch.arange(2)
            now = (x[row, :, pos][:, heads] for x, heads in ((q, qs), (k, kvs), (v, kvs)))
            steps_out.append(method.decode(*now, pos))
            method.maintain(step + 1)
        outs.append(torch.stack(steps_out))
    others = [j for j in range(g * h) if j not in queries]
    assert (outs[1][:, :, queries] - outs[2]).abs().max() <= 1e-6
    assert (outs[1][:, :, others] - outs[0][:, :, others]).abs().max() <= 1e-6
    assert (outs[1][:, :, queries] - outs[0][:, :, queries]).abs().max() > 1e-4, f"{name} changes nothing here"


# ---- what the paper promises ----


def test_compression_at_long_context():
    """Table 2: 15 % of the heads whole and a fifth of the text in the rest is 3.125x. Llama-2-7B, no memory needed."""
    args, T = replace(named_args("llama-2-7b"), max_seq_len=1 << 17), 100_000
    gen = torch.Generator().manual_seed(0)
    draws = torch.rand(2, 32, 32, generator=gen)
    calib = Calibration({f"layers.{i}.razor.{kind}": draws[j, i] for i in range(32)
                         for j, kind in enumerate(("induction", "echo"))}, 32)  # fmt: skip
    protected = protected_heads(*scores(calib), (0.14, 0.01), 1)
    dense = 2 * T * 32 * 32 * 128 * 2
    for given, share, tol in ((calib, len(protected) / 1024, 0.003), (None, 5 / 32, 0.003)):
        used = 0
        for i in range(32):
            shape = args.cache_shape(i, 1, T, torch.bfloat16, "cpu").on("meta")
            method = Razor(Razor.Args(), shape, i, args.rotary(1, 1, shape.device), given)
            used += sum(method.nbytes().values())
        assert dense / used == pytest.approx(1 / (share + 0.2 * (1 - share)), rel=tol)
        if given is not None:
            assert 0.14 <= share <= 0.1501 and 3.10 < dense / used < 3.21


def test_a_window_that_drops_nothing_is_said_once(capsys):
    """The defaults save nothing below 4004 tokens; a run with them ends as `full` does, in time and bytes."""
    errors.warn_once.cache_clear()
    model = tiny()
    for _ in range(2):  # as an evaluation of several lengths does
        model.setup_cache("razor", 1, 512)
    model.setup_cache("0:full,1-:razor", 1, 300)
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert err.startswith("warning: razor drops nothing of texts up to 4004 tokens") and "window=" in err
    model.setup_cache("razor", 1, 512, window=128)
    model.setup_cache("razor", 1, 512, induction=1.0)  # nothing is to be dropped: all heads are protected
    assert not capsys.readouterr().err


def test_the_preset_of_appendix_a2_keeps_a_fifth_above_4k():
    """Table 5 is RULER at 16K, where a window of at least 4000 would be a quarter."""
    cls, knobs = resolve("razor-ruler")
    for preset, kept in ((knobs, 3277), (resolve("razor-28")[1], 4000)):
        args = model_args((1, 1, 32))
        method = layer(preset | dict(induction=0.0, echo=0.0), args, 1, 1 << 14)
        bytes_kept = method.traffic((1 << 14) - 1) - 12 - 2 * 32 * 4
        assert bytes_kept == 2 * 32 * 4 * (4 + kept)
    assert cls is Razor and (knobs["induction"], knobs["echo"]) == (0.28, 0.02)


# ---- ALiBi, Section 3.1 ----


def alibi(seed, hq, hkv, dim, d, n, layer_norm, weight, peak=1.0):
    """Random projections, norm and inputs -> wq, wk, gamma, bias, normalized inputs [n, dim]; gamma has one `peak`."""
    rng = np.random.default_rng(seed)
    wq, wk = weight * rng.standard_normal((hq * d, dim)), weight * rng.standard_normal((hkv * d, dim))
    gamma = 0.5 + rng.random(dim)
    gamma[0] *= peak
    bias = 0.3 * rng.standard_normal(dim) if layer_norm else None
    return wq, wk, gamma, bias, normalized(rng.standard_normal((n, dim)) * 3 + 1, gamma, bias)


def scope(wq, wk, gamma, bias, slope, epsilon, d, **kw):
    tensors = [None if x is None else torch.tensor(x, dtype=torch.float32) for x in (wq, wk, gamma, bias, slope)]
    return alibi_scope(*tensors, epsilon, d, **kw).double().numpy()


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_alibi_scope_bounds_the_attention(layer_norm, scaled):
    """Brute force on random matrices: no token further away than the sound L_h gets more than epsilon."""
    hq, hkv, dim, d, n, epsilon = 4, 2, 24, 8, 90, 0.01
    slope, beyond = np.array([0.5, 1.0, 2.0, 4.0]), 0
    for seed in range(4):
        wq, wk, gamma, bias, x = alibi(seed, hq, hkv, dim, d, n, layer_norm, 0.05)
        scale = d**-0.5 if scaled else 1.0
        lengths = scope(wq, wk, gamma, bias, slope, epsilon, d, scale=scale, bound="sound")
        for h in range(hq):
            kv = h // (hq // hkv)
            q, k = x @ wq[h * d : h * d + d].T, x @ wk[kv * d : kv * d + d].T
            weights = alibi_weights(q, k, slope[h], scale)
            far = np.subtract.outer(np.arange(n), np.arange(n)) > lengths[h]
            beyond += far.sum()
            assert (weights[far] <= epsilon).all()
            # sound by the factors that docs/design.md (RazorAttention) names, no longer than that
            norm = np.linalg.norm(wq[h * d : h * d + d].T @ wk[kv * d : kv * d + d], 2) * scale
            square = 2 * (dim * gamma.max() ** 2 + (0 if bias is None else bias @ bias))
            assert lengths[h] <= (2 * norm * square - math.log(epsilon)) / slope[h] * 1.001
    assert beyond > 1000, "nothing lies beyond the scope: the test says nothing"


def test_alibi_scope_holds_in_the_worst_case_and_eq_2_does_not():
    """One channel holds all of a token's energy, the newest query dislikes itself as much as it likes one far token."""
    dim, d, epsilon, slope, n = 16, 4, 0.001, 1.0, 80
    gamma, peak = np.full(dim, 0.1), 1.0
    gamma[3] = peak
    wq, wk = np.zeros((d, dim)), np.zeros((d, dim))
    wq[0, 3], wk[0, 3] = 0.8, -0.8  # q . k = -0.64 x3 y3, |x3| up to sqrt(dim): 10.24
    one = np.eye(dim)[3]
    sound, paper = (scope(wq, wk, gamma, None, np.array([slope]), epsilon, d, bound=b)[0] for b in ("sound", "paper"))

    def at(distance):
        x = np.stack([-one if t == n - 1 - distance else one for t in range(n)])
        x = normalized(x, gamma, None)
        return alibi_weights(x @ wq.T, x @ wk.T, slope, 1.0)[n - 1, n - 1 - distance]

    assert paper < 16 and at(math.floor(paper) + 1) > epsilon, "Eq. 2 would be a bound after all"
    assert sound < n - 2 and all(at(m) <= epsilon for m in range(math.floor(sound) + 1, n))


@pytest.mark.parametrize("layer_norm", [False, True])
def test_alibi_scope_of_the_paper_is_eq_2(layer_norm):
    hq, hkv, dim, d, epsilon = 4, 2, 24, 8, 0.001
    wq, wk, gamma, bias, _ = alibi(0, hq, hkv, dim, d, 2, layer_norm, 0.2)
    slope = np.array([2.0 ** -(i + 1) for i in range(hq)])
    got = scope(wq, wk, gamma, bias, slope, epsilon, d, bound="paper")
    for h in range(hq):
        kv = h // (hq // hkv)
        norm = np.linalg.norm(wq[h * d : h * d + d].T @ wk[kv * d : kv * d + d], 2)
        square = gamma @ gamma + (0 if bias is None else bias @ bias)
        assert got[h] == pytest.approx((2 * norm * square - math.log(epsilon)) / slope[h], rel=1e-4)
