"""double_sparsity and double_sparsity_offload against a float64 oracle written from the paper, layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_double_sparsity import LabelHead, Probe, attended, random_keys
from oracles import rotated

from cache.base import connected
from cache.calibration import Calibration
from cache.spec import make_args, method_class
from kernels import native
from model import ModelArgs
from runtime.errors import InputError
from scripts.contract.harness import prompt, run, tiny

CASES = {  # knobs, (g, Hkv, D), prompt lengths
    "default": ({}, (2, 2, 64), (70, 120)),
    "shorter-than-the-budget": (dict(budget=24), (1, 2, 32), (1, 2, 23)),
    "budget-over-the-context": (dict(budget=500), (3, 1, 32), (15, 47)),
    "sinks-and-recent": (dict(budget=20, sinks=4, recent=9), (4, 2, 32), (3, 12, 60)),
    "only-forced": (dict(budget=9, sinks=4, recent=5), (2, 1, 32), (1, 5, 40)),
    "fraction-below-forced": (dict(budget=0.05, sinks=3, recent=6), (8, 1, 32), (40, 9)),
    "one-token": (dict(budget=1), (2, 2, 32), (30, 1)),
    "q-ranking": (dict(budget=12, ranking="q"), (2, 2, 64), (50,)),
    "k-ranking": (dict(budget=12, ranking="k", channels=8), (3, 1, 96), (50, 33)),
    "2-bits": (dict(budget=16, label_bits=2, channels=0.5), (2, 2, 32), (41, 8)),
    "16-bits": (dict(budget=16, label_bits=16), (4, 1, 128), (64, 5)),
    "a-selection-per-query-head": (dict(budget=14, recent=3, heads="query"), (3, 2, 32), (5, 50)),
    "the-mean-softmax": (dict(budget=14, recent=3, heads="softmax"), (3, 2, 32), (5, 50)),
    "the-largest-logit": (dict(budget=14, recent=3, heads="max"), (5, 1, 64), (5, 50)),
    "all-channels": (dict(budget=0.3, channels=1.0), (1, 1, 32), (31, 64)),
}
STEPS, N_LAYER, LAYER = 40, 5, 2  # a layer in the middle: neither the first two nor the last


def calibration(h: int, d: int, n_layer: int = N_LAYER, seed: int = 0) -> Calibration:
    """Other channels for every layer, ranking and head."""
    gen = torch.Generator().manual_seed(seed)
    return Calibration({f"layers.{i}.channels.{kind}": torch.rand(h, d, generator=gen).argsort(-1)
                        for i in range(n_layer) for kind in ("qk", "q", "k")}, n_layer)  # fmt: skip


def layer(knobs, shape, batch, T, layer=LAYER, calib=None, name="double_sparsity", dtype=torch.float32, device="cpu"):
    g, h, d = shape
    args = ModelArgs(n_head=g * h, n_kv_head=h, head_dim=d, n_layer=N_LAYER)
    size = args.cache_shape(layer, batch, T, dtype, device)
    cls = method_class(name)
    made = make_args(cls, dict(min_tokens=0) | knobs)
    return connected([cls(made, size, layer, args.rotary(batch, T), calib or calibration(h, d))])[0]


def heads(args, lengths, shape, k, v, calib=None) -> dict[tuple[int, int], LabelHead]:
    """The oracle of every row and KV head, with its prompt. k, v [B, Hkv, n, D] float64, rotated."""
    _, h, d = shape
    ranking = (calib or calibration(h, d)).get(LAYER, f"channels.{args.ranking}")
    r = args.channels if isinstance(args.channels, int) else int(args.channels * d + 0.5)
    out = {}
    for b, i in np.ndindex(len(lengths), h):
        head = LabelHead(ranking[i, :r].tolist(), args.label_bits, args.budget, args.sinks, args.recent)
        head.by = args.heads
        for t in range(lengths[b]):
            head.append(k[b, i, t], v[b, i, t])
        out[b, i] = head
    return out


def compare(knobs, shape, lengths, seed=0, calib=None, name="double_sparsity", predicted=None, steps=STEPS):
    """Every step: what was attended to is a valid choice, the weights and the outputs are those of exact attention.

    predicted: how far the query that `prefetch` is told lies
    from the true one; None: it is not called.
    """
    g, h, d = shape
    B, n = len(lengths), max(lengths) + steps
    q, k, v = random_keys(seed, g, h, d, B, n)
    method = layer(knobs, shape, Probe.rows(B, n, d), n, name=name)
    q_hat = None
    if predicted is not None:
        q_hat = q + predicted * q.std() * torch.randn(q.shape, generator=torch.Generator().manual_seed(seed + 1))
    probe = Probe(method, q, k, v, lengths, q_hat)
    k64, v64, q64 = rotated(method.rope, k), v.double().numpy(), rotated(method.rope, q)
    asked = q64 if q_hat is None else rotated(method.rope, q_hat)
    args = make_args(method_class(name), knobs)
    oracles = heads(args, lengths, shape, k64, v64, calib)
    sparse = 0
    for step in range(steps):
        out, weights = probe.step(step)
        for b, i in np.ndindex(B, h):
            what, p = f"step {step} row {b} head {i}", lengths[b] + step
            group, head = slice(i * g, i * g + g), oracles[b, i]
            head.append(k64[b, i, p], v64[b, i, p])
            sets = [attended(w) for w in weights[b, group]]
            sparse += len(sets[0]) < p + 1
            if args.heads == "query":
                for j, s in enumerate(sets):
                    head.check(asked[b, group, p][j : j + 1], s, f"{what} query {j}")
                want = np.concatenate([head.attend(q64[b, i * g + j, p][None], s) for j, s in enumerate(sets)])
            else:
                assert all(s == sets[0] for s in sets), f"{what}: the query heads of a group see different tokens"
                head.check(asked[b, group, p], sets[0], what)
                want = head.attend(q64[b, group, p], sets[0])
            error = np.abs(out[b, group] - want).max()
            assert error <= 1e-4 * max(1, np.abs(want).max()), f"{what}: off by {error:.1e}"
    return method, sparse


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case):
    knobs, shape, lengths = CASES[case]
    _, sparse = compare(knobs, shape, lengths)
    assert (sparse > 0) == (case != "budget-over-the-context"), "the case does not test what its name says"


def test_query_heads_of_a_group_choose_for_themselves():
    """heads="query": what a group reads is g lists; compiled, as everywhere, it is the same."""
    knobs, shape = dict(budget=10, heads="query"), (3, 2, 32)
    method, group = (layer(dict(knobs, heads=heads), shape, 2, 64) for heads in ("query", "group"))
    q, k, v = random_keys(0, *shape, 2, 60)
    for m in (method, group):
        m.prefill(q[:, :, :59], k[:, :, :59], v[:, :, :59], torch.tensor([59, 40]))
    step = q[:, :, 59], k[:, :, 59], v[:, :, 59], torch.tensor([59, 40])
    want = method.decode(*step)
    idx, count = method.select(method.rope.rotate(step[0], step[3]), step[3])
    assert idx.shape[1] == 6 and (count == 10).all()
    lists = [set(x.tolist()) for x in idx[0]]
    assert len({frozenset(s) for s in lists}) > 2
    compiled = torch.compile(method.decode, fullgraph=True, backend="aot_eager")(*step)
    assert torch.allclose(compiled, want, atol=1e-5)
    assert method.traffic(59) - method.label.constant_bytes == 3 * (group.traffic(59) - group.label.constant_bytes)
    with pytest.raises(InputError, match="heads=group"):
        layer(dict(heads="query"), shape, 1, 8, name="double_sparsity_offload")


@pytest.mark.parametrize("case", ["default", "sinks-and-recent", "2-bits"])
def test_equals_the_oracle_in_torch(case, monkeypatch):
    """On a CPU the default is C++."""
    monkeypatch.setattr("kernels.backend.BACKEND", "torch")
    compare(*CASES[case])


@pytest.mark.parametrize("r", [1, 3, 5, 31])
def test_an_odd_number_of_channels_works_or_is_refused(r):
    """Two 4-bit labels make a byte."""
    try:
        layer(dict(channels=r), (1, 1, 32), 1, 8)
    except InputError:
        return
    compare(dict(channels=r, budget=12), (2, 1, 32), (20, 40), steps=8)


def test_labels_survive_outliers_and_constant_keys():
    """fp16 ends at 65504; a token whose label channels are all equal has no range."""
    for scale in (0.0, 1e6):
        method = layer(dict(budget=8), (1, 1, 32), 1, 40)
        q, k, v = random_keys(0, 1, 1, 32, 1, 40)
        k = torch.full_like(k, scale)
        method.prefill(q[:, :, :20], k[:, :, :20], v[:, :, :20], torch.tensor([20]))
        for p in range(20, 40):
            assert method.decode(q[:, :, p], k[:, :, p], v[:, :, p], torch.tensor([p])).isfinite().all()


# ---- what the paper promises ----


@pytest.mark.parametrize(("bits", "label"), [(2, 8), (4, 16), (16, 64)])
def test_bytes_per_token(bits, label):
    """Sec. 4.2: 32 of 128 channels at 4 bits are 1/16 of K in 16 bits, beside an fp16 scale and zero per token."""
    small, large = (layer(dict(label_bits=bits), (4, 8, 128), 2, T, dtype=torch.bfloat16) for T in (1024, 2048))
    grown = sum(large.nbytes().values()) - sum(small.nbytes().values())
    scales = 4 if bits < 16 else 0
    assert grown == 1024 * 2 * 8 * (2 * 256 + label + scales)
    assert bits != 4 or label / 256 == 1 / 16
    # Sec. 5.3: a step reads all labels and the chosen tokens' keys and values
    read = large.traffic(2047)
    assert read == pytest.approx(2 * 8 * (2048 * (label + scales) + 128 * 512), rel=0.02)


# ---- offload ----


@pytest.mark.parametrize(
    "knobs", [dict(), dict(budget=24, recent=8, sinks=4), dict(budget=0.15, recent=5, label_bits=2)], ids=str
)
def test_offload_without_prediction_is_double_sparsity(knobs):
    """Over a whole model's run, every layer's output of every step: where the keys lie changes nothing.

    Both see what the model computes with double_sparsity: on its own, a last bit that differs, as the tokens are summed
    in another order, puts some key of the next layer on the other side of a rounding border now and then.
    """
    knobs = dict(recent=16) | knobs
    model, prompts, gaps = tiny(4, 64), [prompt(n) for n in (1, 7, 33, 100)], []

    def beside(method, other, name):
        real = getattr(method, name)

        def call(*inputs):
            out = real(*inputs)
            gaps.append((out - getattr(other, name)(*inputs)).abs().max() / out.abs().max().clamp(min=1))
            return out

        setattr(method, name, call)

    model.setup_cache("double_sparsity", 4, 150, **knobs)
    dense = model.cache
    model.setup_cache("double_sparsity_offload", 4, 150, predict=False, **knobs)
    offload, model.cache = model.cache, dense
    for method, other in zip(model.cache, offload, strict=True):
        beside(method, other, "prefill")
        beside(method, other, "decode")
    # greedy text repeats itself, and its equal labels tie exactly: of those, either may be taken
    run(model, prompts, 48, torch.stack([prompt(48, seed) for seed in (5, 6, 7, 8)]))
    assert len(gaps) == 2 * 49 and max(gaps) <= (1e-6 if native.available() else 2e-6)  # torch adds in another order


def test_prediction_changes_what_is_attended():
    model, prompts, knobs = tiny(4, 64), [prompt(n) for n in (33, 100)], dict(budget=0.15, recent=5, min_tokens=0)
    model.setup_cache("double_sparsity_offload", 2, 150, predict=False, **knobs)
    want, fed = run(model, prompts, 10)
    model.setup_cache("double_sparsity_offload", 2, 150, predict=True, **knobs)
    got = run(model, prompts, 10, fed)[0]
    assert torch.equal(got[:, 0], want[:, 0]) and (got - want).abs().max() > 1e-3


def test_the_first_two_layers_and_the_last_fetch_by_the_true_query():
    """Sec. 5.2, in a model of 16 layers or more; a small one has only its first without a layer before it."""
    cls = method_class("double_sparsity_offload")
    for n_layer, own in ((16, {0, 1, 15}), (32, {0, 1, 31}), (4, {0})):
        args = ModelArgs(n_head=2, n_kv_head=1, head_dim=32, n_layer=n_layer)
        rope = args.rotary(1, 64)
        for i in range(n_layer):
            for predict in (True, False):
                shape = args.cache_shape(i, 1, 64, torch.float32, "cpu")
                method = cls(cls.Args(predict=predict), shape, i, rope, calibration(1, 32, n_layer))
                assert method.predicts == (predict and i not in own)


PREDICTED = {  # knobs, (g, Hkv, D), prompt lengths
    "default": ({}, (2, 2, 64), (90, 130)),
    "short-prompts": (dict(budget=24, recent=6), (3, 1, 32), (1, 2, 7, 30)),
    "sinks": (dict(budget=20, sinks=4, recent=9), (4, 2, 32), (3, 60)),
    "recent-of-one": (dict(budget=12, recent=1), (1, 1, 128), (40, 11)),
    "fraction-below-recent": (dict(budget=0.05, recent=16), (8, 1, 32), (60, 15, 16, 17)),
}


@pytest.mark.parametrize("far", [0.0, 0.7])
@pytest.mark.parametrize("case", PREDICTED)
def test_offload_attends_to_what_the_predicted_query_chose(case, far):
    """And to the newest tokens, the current one among them, which no prefetch can have brought."""
    compare(*PREDICTED[case], name="double_sparsity_offload", predicted=far)
