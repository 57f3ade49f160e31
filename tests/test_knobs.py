"""Knobs out of range, and models that a method cannot hold: one line that says what to do, before anything is made."""

from __future__ import annotations

import pytest
import torch

from cache.grammar import method_files, parse_spec
from cache.spec import knob_names, make_args, method_class, resolve
from model import ModelArgs
from runtime.errors import InputError
from scripts.contract.harness import prompt, run, tiny

LABELS = [dict(channels=0), dict(channels=0.0), dict(channels=1.5), dict(channels=-4), dict(channels=33),
          dict(label_bits=3), dict(label_bits=8), dict(budget=0), dict(budget=0.0), dict(recent=0), dict(sinks=-1),
          dict(ranking="v"), dict(budget=4, sinks=4)]  # fmt: skip
WRONG = dict(
    double_sparsity=LABELS,
    double_sparsity_offload=[*LABELS, dict(budget="p0.9")],
    expected_attention=[dict(budget=2), dict(budget=0), dict(sinks=-1), dict(future=0), dict(epsilon=-1.0),
                        dict(safeguard=1.5)],
    h2o=[dict(heavy=0), dict(recent=0.0), dict(heavy=1.5), dict(budget=10)],
    hshare=[dict(steps=0), dict(layer_ratio=1.5), dict(head_ratio=-0.1), dict(heads="max"), dict(budget=70),
            dict(budget="p0.9")],
    kivi=[dict(k_bits=5), dict(residual=40)],
    kvzip=[dict(budget=3), dict(budget=0.0), dict(chunk=0), dict(tail=-1), dict(adaptive="some"),
           dict(first_stage=2.0)],
    loki=[dict(dims=0.0), dict(dims=40), dict(calibrated="later"), dict(budget="p1.5")],
    ojakv=[dict(rank=0.0), dict(rank=1.1), dict(energy=0.0), dict(energy=1.5), dict(n_start=-1), dict(n_recent=-1),
           dict(update_every=0), dict(query_window=0), dict(important=0.0), dict(important=1.5), dict(eta_prefill=-0.1),
           dict(eta_decode=-1.0), dict(decode_slots=-1), dict(rule="oja"), dict(stale="drop"), dict(keep=0),
           dict(keep=1.5)],
    palu=[dict(rank=0.0)],
    pyramidkv=[dict(beta=0.5), dict(budget=4)],
    quest=[dict(page=0), dict(budget=0), dict(recent=0), dict(budget="p0"), dict(budget="p0.9", cap=0.0)],
    random=[dict(budget="p0.9")],
    razor=[dict(induction=-0.1), dict(induction=1.5), dict(echo=2.0), dict(sinks=-1), dict(window=0), dict(share=-0.5),
           dict(share=1.5), dict(full_up_to=-1), dict(protect="some"), dict(retrieval_method="nope"),
           dict(retrieval_method="razor"), dict(gates="no/such.tsv")],
    sals=[dict(rank=0.0), dict(rank=1.5), dict(score_rank=0.0), dict(score_rank=1.1), dict(value_bits=3),
          dict(budget=0), dict(budget=79, sinks=16, recent=64), dict(sinks=-1), dict(recent=0), dict(score="mean")],
    self_index=[dict(budget=32), dict(sinks=-1), dict(flush=0), dict(tail=8, flush=9), dict(store_bits=3),
                dict(sink_queries=0), dict(budget="p0.9")],
    snapkv=[dict(budget=16), dict(kernel=4), dict(kernel=0), dict(pool="sum"), dict(recent=0), dict(group="sum"),
            dict(decode_slots=-1), dict(safeguard=-0.1), dict(first_stage=1.1), dict(adaptive=2)],
    sparq=[dict(channels=0), dict(channels=1.5), dict(channels=33), dict(copies=3), dict(budget="pp")],
    streaming=[dict(sinks=-1), dict(recent=0), dict(positions="rank"), dict(recent="many")],
    keydiff=[dict(budget=0), dict(recent=-1), dict(budget=4, recent=5)],
    attention_matching=[dict(keys="all"), dict(queries="some"), dict(samples=0), dict(budget=4, recent=5)],
    knorm=[dict(budget=0), dict(recent=-1), dict(budget=4, recent=5)],
    lagkv=[dict(ratio=1.5), dict(sinks=-1), dict(lag=1), dict(ratio=0.01, lag=10)],
    compactor=[dict(budget=8), dict(sketch=0), dict(sketch=10**9), dict(block=1), dict(blend=-1.0),
               dict(chunk_length=8)],
    triattention=[dict(buffer=0), dict(reach=0), dict(queries="some"), dict(budget=4, recent=5)],
    tova=[dict(budget=0), dict(recent=-1), dict(budget=4, recent=5), dict(heads="q")],
)  # fmt: skip


def make(name, knobs, n_kv_head=1, head_dim=32):
    args = ModelArgs(n_head=2 * n_kv_head, n_kv_head=n_kv_head, head_dim=head_dim, n_layer=2)
    cls, shape = method_class(name), args.cache_shape(0, 1, 64, torch.float32, "meta")
    return cls(make_args(cls, knobs), shape, 0, args.rotary(1, 1, "meta"))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_knobs_are_input_errors(name):
    for knobs in WRONG[name]:
        with pytest.raises(InputError) as e:
            make(name, knobs)
        assert "\n" not in str(e.value), knobs


SNAPKV = ("pool=max,group=mean,decode_slots=512,decode_budget=None,decode_every=64,safeguard=0.2,value_aware=False,"
          "first_stage=0.5,chunk_length=0,min_tokens=128")  # fmt: skip
ADAPTIVE = "adaptive=True,decode_slots=512,value_aware=False,first_stage=0.5,chunk_length=0,min_tokens=128"


@pytest.mark.parametrize("spec", [  # ours: min_tokens
    "h2o,heavy=0.1,recent=0.1,min_tokens=128", "tova,budget=0.125,recent=0,heads=layer,min_tokens=128",
    f"snapkv,budget=1024,recent=32,kernel=7,adaptive=False,{SNAPKV}",
    f"pyramidkv,budget=2048,recent=8,beta=20.0,kernel=7,adaptive=False,{SNAPKV}",
    f"rocket,budget=1024,recent=32,kernel=63,kept=None,attended=None,page=3,channels=0.5,adaptive=False,{SNAPKV}",
    f"expected_attention,budget=0.5,recent=0,sinks=4,future=512,covariance=True,value_norm=True,epsilon=0.01,"
    f"queries=prompt,safeguard=0.2,{ADAPTIVE}",
    f"kvzip,budget=0.3,recent=0,sinks=4,chunk=2048,tail=8,safeguard=0.0,{ADAPTIVE}",
    f"compactor,budget=0.5,recent=4,sinks=8,block=256,sketch=48,blend=0.5,seed=0,safeguard=0.0,{ADAPTIVE}",
    "attention_matching,budget=0.1,recent=0,keys=attention,queries=prompt,samples=512,decode_slots=512,min_tokens=128",
    "rkv,budget=1024,recent=8,buffer=128,mix=0.1,kernel=7,alike=0.5,spared=1,min_tokens=128",
    "keydiff,budget=2048,recent=0,min_tokens=128", "knorm,budget=0.5,recent=0,min_tokens=128",
    "qfilters,budget=512,recent=64,min_tokens=128", "lagkv,ratio=0.5,sinks=16,lag=1024",
    "triattention,budget=2048,recent=0,buffer=128,reach=65536,queries=calibration,min_tokens=128",
    "double_sparsity,channels=0.25,ranking=qk,label_bits=4,budget=0.0625,sinks=0,recent=1",
    "double_sparsity_offload,channels=0.25,ranking=qk,label_bits=4,budget=0.0625,sinks=0,recent=16,predict=True",
    "razor,induction=0.14,echo=0.01,sinks=4,window=4000,share=0.2,compensation=True,protect=retrieval,"
    "retrieval_method=full,full_up_to=0", "quest,page=16,sinks=0,recent=1,budget=1024",
    "sparq,budget=129,recent=33,channels=0.25,copies=2", "loki,budget=0.25,dims=0.25,calibrated=after",
])  # fmt: skip
def test_defaults_are_the_papers(spec):
    (part,) = parse_spec(spec)
    cls = method_class(part.name)
    assert make_args(cls, part.knobs) == cls.Args()


OJAKV = ("adapt=True,n_start=32,n_recent=32,update_every=32,query_window=32,rule=sequential,important=0.05,"
         "eta_prefill=0.1,eta_decode=0.05")  # fmt: skip


@pytest.mark.parametrize("preset, spec", [
    ("sals-25", "sals,rank=0.25,score_rank=0.5,value_bits=4"),
    ("sals-12.5", "sals,rank=0.125,score_rank=0.5,value_bits=2"),
    ("sals-25-4k", "sals,rank=0.25,value_bits=4,budget=512,budget_of=all,sinks=16,recent=64"),
    ("sals-25-32k", "sals,rank=0.25,value_bits=4,budget=1024,budget_of=all,sinks=32,recent=128"),
    ("sals-25-gsm8k", "sals,rank=0.25,value_bits=4,budget=0.25,budget_of=rest,sinks=0,recent=128,min_tokens=0"),
    ("ojakv-0.8", f"ojakv,rank=0.8,{OJAKV}"), ("ojakv-0.6", f"ojakv,rank=0.6,{OJAKV}"),
    ("ojakv-snapkv", f"ojakv,rank=0.6,keep=0.5,{OJAKV}"), ("static_pca_h", "ojakv,adapt=False,n_start=32,n_recent=32"),
    ("static_pca", "ojakv,adapt=False,n_start=0,n_recent=0,latent=False"),
    ("eigen", "ojakv,adapt=False,n_start=0,n_recent=0,latent=True"),
    ("hshare-4k", "hshare,budget=512,sinks=16,recent=64,layer_ratio=0.75,head_ratio=0.75,steps=2"),
    ("hshare-128", "hshare,budget=128,sinks=8,recent=32,layer_ratio=0.5,head_ratio=0.5,steps=2"),  # GSM8K and CoQA
    ("quest-160", "quest,budget=160"), ("quest-7.5", "quest,budget=0.075"), ("snapkv-50", "snapkv,budget=0.5"),
    ("snapkv-160", "snapkv,budget=160"), ("loki-4k", "loki,budget=512,sinks=16,recent=64"),
    ("double_sparsity-4k", "double_sparsity,budget=512,sinks=16,recent=64"),
])  # fmt: skip
def test_presets_are_rows_of_the_papers(preset, spec):
    (cls, knobs), (part,) = resolve(preset), parse_spec(spec)
    assert cls is method_class(part.name) and make_args(cls, knobs) == make_args(cls, part.knobs)


def test_layers_that_the_papers_leave_dense():
    sals = method_class("sals")
    assert sals.skip_layers == (0, 1, -1) and sals.skip_knobs["budget"] == 1.0
    assert method_class("double_sparsity").skip_layers == (0, 1)


@pytest.mark.parametrize("name, knobs, sizes, says", [
    ("sals", {}, (1, 36), "divisible by 8"), ("self_index", {}, (1, 36), "divisible by 8"),
    ("kivi", {}, (1, 36), "divisible by 8"), ("hadamard", dict(group=48), (1, 96), "group=48"),
    ("hadamard", dict(group=64), (1, 96), "group=64"), ("palu", {}, (6, 32), "groups of 4 heads do not divide the 6"),
    ("palu", dict(group=32, rank=0.461, bits=3), (32, 128), "a rank of 1888 cannot be packed in 3 bits"),
])  # fmt: skip
def test_models_that_a_method_cannot_hold_are_input_errors(name, knobs, sizes, says):
    with pytest.raises(InputError, match=says):
        make(name, knobs, *sizes)


# the knob that is a budget, and how a share differs from a number beside that
SHARES = {"h2o": ("heavy", {}), "ojakv": ("keep", {}), "self_index": ("budget", dict(sinks_in_budget=False))}
FLOORED = sorted(n for n in method_files() if "min_tokens" in knob_names(method_class(n)))


@pytest.mark.parametrize("name", FLOORED)
def test_a_share_of_a_short_text_is_not_two_tokens(name):
    """A share has a floor: below it, it is the budget of that number; with min_tokens=0 it is less."""
    (knob, more), model = SHARES.get(name, ("budget", {})), tiny(2, 32)
    knobs = (method_class(name).stress or {}) | more
    logits, fed = [], None
    for budget, floor in ((22, 0), (0.1, 22), (0.1, 0)):
        model.setup_cache(name, 2, 70, 8, **knobs | {knob: budget, "min_tokens": floor})
        got, fed = run(model, [prompt(60), prompt(9)], 8, fed)
        logits.append(got)
    assert (logits[0] - logits[1]).abs().max() < 1e-4 < (logits[1] - logits[2]).abs().max()
