"""Statistics: every tensor of the file against loops in float64, a user's own, the file's checks, interruptions."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from oracles import rotate, softmax
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import cache.statistic as S
import calibrate as C
import generate
from cache.calibration import FILE, VERSION, Calibration, RandomCalibration, fingerprint, is_of, of_model
from cache.spec import all_statistics
from engine.snapshot import calibration_id
from kv_methods.razor import HeadScores
from loading.checkpoint import load_checkpoint, random_transformer, save_checkpoint_tensors
from loading.tokenizer import load_tokenizer
from model import ModelArgs
from runtime.corpus import shuffled
from runtime.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "models" / "tiny"
UNCALIBRATED = shutil.ignore_patterns("calibration*")
N_RANDOM = 40
SHAPES = [(2, 2, 16), (1, 3, 8), (4, 1, 32)]  # g, Hkv, D


class Whiten(S.Statistic):
    """Palu's: second moments of the attention's input."""

    name = "whiten"

    def measure(self, t):
        return dict(moments=t.x.T @ t.x)

    def take_heads(self, tensors, kv_heads, n_kv_head):
        return tensors  # no heads here


def statistics():
    return [*all_statistics(), Whiten()]


def parts(args):
    """Name -> shape and dtype on the meta device of every tensor of one layer."""
    return {f"{s.name}.{part}": t for s in statistics() for part, t in s.layout(args).items()}


# ---- the numbers ----


@functools.lru_cache(4)
def small(g, h, d):
    """A random model, its calibration from two sequences, and those."""
    args = ModelArgs(
        dim=24, n_layer=2, n_head=g * h, n_kv_head=h, head_dim=d, ffn_dim=32, vocab_size=80, max_seq_len=256
    )
    model = random_transformer(args, "cpu", torch.float32, seed=g)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p *= 1.3 / (0.02 * p.shape[1] ** 0.5)
            else:
                p.copy_(0.5 + torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    gen = torch.Generator().manual_seed(0)
    sequences = [torch.randint(80, (n,), generator=gen) for n in (19, 30)]
    with pytest.MonkeyPatch.context() as m:
        m.delenv("KV_FAST_METHODS", raising=False)  # it is kept, whatever test asks first
        return model, C.calibrate(model, sequences, N_RANDOM, statistics()), sequences


def forward(model, tokens):
    """Teacher forcing in float64, token by token -> each layer's x [S, dim], q [S, Hq, D], k and v [S, Hkv, D]."""
    a = model.args
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}

    def norm(x, weight):
        return np.stack([row / math.sqrt(row @ row / len(row) + a.norm_eps) * weight for row in x])

    g, S, out = a.n_head // a.n_kv_head, len(tokens), []
    x = w["tok_embeddings.weight"][tokens.numpy()]
    for i in range(a.n_layer):
        pre = f"layers.{i}."
        into = norm(x, w[pre + "attention_norm.weight"])
        heads = (into @ w[pre + "attention.wqkv.weight"].T).reshape(S, -1, a.head_dim)
        q, k, v = heads[:, : a.n_head], heads[:, a.n_head : a.n_head + a.n_kv_head], heads[:, a.n_head + a.n_kv_head :]
        out.append((into, q, k, v))
        weights = attention_map(q, k)
        y = np.zeros((S, a.n_head, a.head_dim))
        for h in range(a.n_head):
            y[:, h] = weights[h] @ v[:, h // g]
        x = x + y.reshape(S, -1) @ w[pre + "attention.wo.weight"].T
        mid = norm(x, w[pre + "ffn_norm.weight"]) @ w[pre + "feed_forward.w13.weight"].T
        gate, up = np.split(mid, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[pre + "feed_forward.w2.weight"].T
    return out


def attention_map(q, k):
    """q [S, Hq, D], k [S, Hkv, D] not rotated -> causal attention [Hq, S, S]."""
    S, hq, d = q.shape
    g, out = hq // k.shape[1], np.zeros((hq, S, S))
    for h in range(hq):
        qr = [rotate(q[t, h], t) for t in range(S)]
        kr = np.stack([rotate(k[t, h // g], t) for t in range(S)])
        for m in range(S):
            out[h, m, : m + 1] = softmax(kr[: m + 1] @ qr[m] / math.sqrt(d))
    return out


@functools.lru_cache(4)
def moments(g, h, d):
    """Means over tokens by loops, one dictionary per layer."""
    model, _, sequences = small(g, h, d)
    out = []
    runs = [forward(model, s) for s in sequences]
    n = sum(len(s) for s in sequences)
    for i in range(model.args.n_layer):
        zero = {name: np.zeros((h, d, d)) for name in ("k_rot", "q_rot", "v")}
        zero |= {name: np.zeros((h, d)) for name in ("mean", "qk", "q", "k")}
        zero |= dict(centre=np.zeros((h, g, d)), size=np.zeros((h, g, d // 2)))  # of queries before rotation
        zero |= dict(each_q=np.zeros((h, g, d)), each_qq=np.zeros((h, g, d, d)))  # and after it
        m = zero | dict(joint=np.zeros((h * d, h * d)), x=np.zeros((24, 24)))
        for x, q, k, v in (r[i] for r in runs):
            for t in range(len(x)):
                m["x"] += np.outer(x[t], x[t]) / n
                m["joint"] += np.outer(k[t].ravel(), k[t].ravel()) / n
                for j in range(h):
                    key = rotate(k[t, j], t)
                    m["k_rot"][j] += np.outer(key, key) / n
                    m["v"][j] += np.outer(v[t, j], v[t, j]) / n
                    m["mean"][j] += key / n
                    m["k"][j] += np.abs(key) / n
                    for e in range(g):
                        before, query = q[t, j * g + e], rotate(q[t, j * g + e], t)
                        m["centre"][j, e] += before / n
                        m["size"][j, e] += np.abs(before[: d // 2] + 1j * before[d // 2 :]) / n
                        m["each_q"][j, e] += query / n
                        m["each_qq"][j, e] += np.outer(query, query) / n
                        m["q_rot"][j] += np.outer(query, query) / n
                        m["q"][j] += np.abs(query) / n / g
                        m["qk"][j] += np.abs(query * key) / n / g
        out.append(m)
    return out


def check_eigen(basis, values, m, what):
    """Columns of basis diagonalize m: orthonormal, falling, largest entry positive."""
    basis, values = basis.double().numpy(), values.double().numpy()
    size = np.trace(m)
    assert np.abs(basis.T @ basis - np.eye(len(m))).max() < 1e-5, f"{what}: not orthonormal"
    assert (values >= 0).all() and (np.diff(values) <= 0).all(), f"{what}: eigenvalues do not fall"
    assert np.abs(basis.T @ m @ basis - np.diag(values)).max() < 1e-5 * size, f"{what}: not diagonal"
    assert abs(values.sum() - size) < 1e-4 * size
    top = basis[np.abs(basis).argmax(0), np.arange(len(m))]
    assert (top > 0).all(), f"{what}: signs are not fixed"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tensor_is_the_float64_loop(shape):
    model, calib, _ = small(*shape)
    seen = set()

    def get(i, name):
        seen.add(name)
        return calib.get(i, name)

    for i, m in enumerate(moments(*shape)):
        check_eigen(get(i, "sals.basis"), get(i, "sals.eigenvalues"), m["joint"], f"sals {i}")
        for j in range(shape[1]):
            covariance = m["k_rot"][j] - np.outer(m["mean"][j], m["mean"][j])
            for name, sep, want in (("oja.k", "_", m["k_rot"][j] + m["q_rot"][j]), ("oja.v", "_", m["v"][j]),
                                    ("pca", ".", covariance)):  # fmt: skip
                basis, values = get(i, f"{name}{sep}basis")[j], get(i, f"{name}{sep}eigenvalues")[j]
                check_eigen(basis, values, want, f"{name} of layer {i} head {j}")
            assert np.abs(get(i, "pca.mean")[j].numpy() - m["mean"][j]).max() < 1e-5
            for kind in ("qk", "q", "k"):
                ranking = get(i, f"channels.{kind}")[j].tolist()
                scores = [m[kind][j][c] for c in ranking]
                assert sorted(ranking) == list(range(shape[2]))
                assert all(a >= b - 1e-5 for a, b in zip(scores, scores[1:], strict=False)), f"{kind}: not by size"
            along = []
            for e in range(shape[0]):
                first = np.linalg.eigh(m["each_qq"][j, e])[1][:, -1]
                along.append(first * np.sign(first @ m["each_q"][j, e]))
            assert np.abs(get(i, "qfilters.direction")[j].numpy() - np.mean(along, 0)).max() < 1e-4
            for name, want in (("mean", m["centre"]), ("size", m["size"])):
                assert np.abs(get(i, f"triattention.{name}")[j].numpy() - want[j]).max() < 1e-5
        assert np.abs(get(i, "whiten.moments").numpy() - m["x"]).max() < 1e-4 * np.abs(m["x"]).max()
    heads = {"razor.induction", "razor.echo", "razor.after"}
    elsewhere = {name for name in parts(model.args) if name.startswith("palu.")}  # test_palu.py
    assert seen | heads | elsewhere == set(parts(model.args)), "a tensor of the file is not tested"
    assert {k.split(".", 2)[2] for k in calib.tensors} == set(parts(model.args))
    for name, like in parts(model.args).items():
        t = calib.stack(name)
        assert t.shape[1:] == like.shape and t.dtype == (torch.float32 if like.is_floating_point() else torch.int64)


def random_tokens(model, n=N_RANDOM):
    """What the head scores were measured on, seen at the embedding."""
    seen = []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0][0].clone()))
    calib = C.calibrate(model, [], n, [HeadScores()])
    hook.remove()
    return seen[0], calib.stack("razor.echo"), calib.stack("razor.after")


def test_heads_of_a_sliding_layer_score_what_their_window_shows():
    """Copies lie N_RANDOM tokens apart: behind a window as long, none is seen; the next layer is as without windows."""
    model = small(2, 2, 16)[0]
    scores = []
    for windows in (None, (N_RANDOM - 1, None)):
        args = replace(model.args, windows=windows)
        other = random_transformer(args, "cpu", torch.float32, seed=2)
        scores.append(C.calibrate(other, [], N_RANDOM, [HeadScores()]).stack("razor.echo"))
    assert (scores[0] > 0).all() and (scores[1][0] == 0).all() and (scores[1][1] > 0).all()


def test_statistics_see_queries_that_grow_with_their_position():
    """As methods do (Ministral 3)."""
    model, _, (tokens, _) = small(2, 2, 16)
    args = replace(model.args, query_growth=0.5, rope=replace(model.args.rope, original_max_position_embeddings=8))
    other = random_transformer(args, "cpu", torch.float32, seed=2)
    plain = random_transformer(model.args, "cpu", torch.float32, seed=2)
    (a, *_), (b, *_) = (list(C.layer_tokens(m)(tokens[None])) for m in (other, plain))
    assert torch.allclose(a.q[:8], b.q[:8]) and torch.allclose(a.q[8:16], b.q[8:16] * (1 + 0.5 * math.log(2)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [1, 1 << 21])  # 16 queries at a time, or all
def test_head_scores_are_those_of_the_attention_maps(shape, block, monkeypatch):
    """Sec. 3.3: mass on earlier copies of the token, and right after them, of every third query behind copy one."""
    monkeypatch.setattr(S, "ATTENTION_BLOCK", block)
    model, calib, _ = small(*shape)
    tokens, echo, after = random_tokens(model)
    n = N_RANDOM
    assert len(tokens) == 4 * n and all(torch.equal(tokens[:n], tokens[j * n : j * n + n]) for j in range(4))
    for i, (_, q, k, _) in enumerate(forward(model, tokens)):
        for h, p in enumerate(attention_map(q, k)):
            want = np.zeros(5)
            for m in range(n, 4 * n, 3):
                for copy in range(m - n, -1, -n):
                    want += np.array(p[m, copy : copy + 5]) / n
            assert abs(float(echo[i, h]) - want[0]) < 1e-5
            assert np.abs(after[i, h].numpy() - want[1:]).max() < 1e-5
    assert torch.allclose(calib.stack("razor.after"), after, atol=1e-6)
    assert torch.equal(calib.stack("razor.induction"), calib.stack("razor.after")[..., 0])
    assert torch.allclose(calib.stack("razor.echo"), echo, atol=1e-6)


def test_random_tokens_are_pieces_of_text():
    """No special tokens, no bytes that stand for what has no piece, and nothing that only pads the vocabulary."""
    tk = load_tokenizer(TINY)
    ids = tk.text_ids
    assert len(ids) == 2048 - 3 - 256 and not set(ids) & ({0, 1, 2} | set(range(4, 260))) and 3 in ids  # a line's end
    model = small(2, 2, 16)[0]  # of 80 ids; two of the tokenizer's are beyond them
    seen, vocabulary = [], [*range(10, 30), 80, 81]
    hook = model.tok_embeddings.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0][0].clone()))
    C.calibrate(model, [], N_RANDOM, [HeadScores()], vocabulary=vocabulary)
    hook.remove()
    drawn = set(seen[0].tolist())
    assert drawn <= set(range(10, 30)) and len(drawn) > 9


@pytest.mark.parametrize("kv_heads", [[0], [2], [0, 2], [2, 0], [0, 1, 2]], ids=str)
def test_heads_is_the_calibration_of_those_heads(kv_heads):
    """The joint basis comes from a sub-block; everything else of the layer is the heads' own."""
    shape = (1, 3, 8)
    _, calib, _ = small(*shape)
    part = calib.heads(1, kv_heads, 3, [s for s in statistics() if s.name != "razor"])
    m, rows = moments(*shape)[1]["joint"], np.concatenate([np.arange(j * 8, j * 8 + 8) for j in kv_heads])
    check_eigen(part.get(1, "sals.basis"), part.get(1, "sals.eigenvalues"), m[np.ix_(rows, rows)], "sub-block")
    for name in parts(small(*shape)[0].args):
        if name.split(".")[0] in ("oja", "channels", "pca"):
            assert torch.equal(part.get(1, name), calib.get(1, name)[kv_heads]), name
        elif name.startswith("whiten"):
            assert torch.equal(part.get(1, name), calib.get(1, name)), name
        elif name.startswith("razor"):
            with pytest.raises(InputError):  # not asked for: it would be of other heads
                part.get(1, name)
        assert torch.equal(part.get(0, name), calib.get(0, name)), "another layer has changed"


# ---- the file ----

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=24, intermediate_size=32,
              num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=80,
              max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu",
              tie_word_embeddings=False, torch_dtype="float32")  # fmt: skip


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A checkpoint folder with its calibration."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = small(2, 2, 16)[0]
    save_file(save_checkpoint_tensors(model, torch.float32), folder / "model.safetensors")
    calib = small(2, 2, 16)[1]
    meta = dict(version=VERSION, model=of_model(model.args), fingerprint=fingerprint(folder))
    Calibration(calib.tensors, 2, meta).save(folder / FILE)
    return folder


@pytest.fixture
def folder(calibrated, tmp_path):
    return shutil.copytree(calibrated, tmp_path / "checkpoint")


def test_what_is_saved_is_loaded(folder):
    model, want = load_checkpoint(folder), small(2, 2, 16)[1]
    got = Calibration.load(folder, model.args)
    assert set(got.tensors) == set(want.tensors)
    assert all(torch.equal(got.tensors[k], t) and got.tensors[k].dtype == t.dtype for k, t in want.tensors.items())
    assert not list(folder.glob("*.tmp"))


def test_files_with_different_statistics_are_joined(folder, tmp_path):
    model = load_checkpoint(folder)
    whole = Calibration.load(folder, model.args)
    names, files = sorted(whole.names), dict[str, Path]()
    for name in names:
        files[name] = tmp_path / f"{name}.safetensors"
        part = {k: t for k, t in whole.tensors.items() if k.split(".")[2] == name}
        Calibration(part, 2, whole.meta).save(files[name])
    model.use_calibration([folder / FILE, files[names[0]]])  # the same statistic twice is no contradiction
    model.use_calibration(str(files[names[0]]))
    assert model.find_calibration().names == {names[0]}
    model.use_calibration(list(files.values()))
    got = model.find_calibration()
    assert set(got.tensors) == set(whole.tensors)
    assert calibration_id(got) == calibration_id(Calibration(whole.tensors, 2))  # of all files
    changed = {k: t + 1 if t.is_floating_point() else t.flip(-1) for k, t in whole.tensors.items()}
    Calibration({k: changed[k] for k in changed if f".{names[0]}." in k}, 2, whole.meta).save(files[names[0]])
    with pytest.raises(InputError, match=f"{files[names[0]]} has another {names[0]} than the files before it: leave"):
        model.use_calibration([folder / FILE, files[names[0]]])


def rewrite(folder, change=None, version=VERSION, **meta):
    """The file again, with a change to its tensors or metadata."""
    with safe_open(folder / FILE, framework="pt") as f:
        kept = json.loads(f.metadata()["calibration"])
    tensors = load_file(folder / FILE)
    if change is not None:
        change(tensors)
    save_file(tensors, folder / FILE, metadata={"calibration": json.dumps(kept | dict(version=version) | meta)})


def set_entry(name, value):
    def change(tensors):
        tensors[name].view(-1)[3] = value

    return change


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][..., :-1].contiguous()})


def drop(name):
    return lambda tensors: [tensors.pop(k) for k in list(tensors) if f".{name}." in k]


def bytes_of(folder, change):
    path = folder / FILE
    path.write_bytes(change(path.read_bytes()))


def other_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, folder / "model.safetensors")


def other_config(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(rope_theta=5e5)))


def raw_metadata(text):
    return lambda f: save_file(load_file(f / FILE), f / FILE, metadata={"calibration": text})


BASIS, CHANNELS = "layers.1.sals.basis", "layers.0.channels.qk"
BAD = {  # what happened to the folder -> what the error says
    "missing": (lambda f: (f / FILE).unlink(), "has none"),
    "half of it": (lambda f: bytes_of(f, lambda b: b[: len(b) // 2]), "cannot read"),
    "an LFS pointer": (
        lambda f: bytes_of(f, lambda b: b"version https://git-lfs.github.com/spec/v1\n"),
        "git LFS pointer",
    ),
    "NaN": (lambda f: rewrite(f, set_entry(BASIS, math.nan)), f"{BASIS} holds NaN"),
    "a wrong shape": (lambda f: rewrite(f, cut(BASIS)), f"{BASIS} is of shape"),
    "a tensor missing": (lambda f: rewrite(f, lambda t: t.pop(CHANNELS)), f"{CHANNELS} is missing"),
    "a statistic missing": (lambda f: rewrite(f, drop("channels")), "--method double_sparsity"),
    "a channel twice": (lambda f: rewrite(f, lambda t: t[CHANNELS].copy_(0 * t[CHANNELS])), "not a ranking"),
    "a statistic of nobody spoilt": (lambda f: rewrite(f, set_entry("layers.0.pca.mean", math.nan)), "pca.mean holds"),
    "a ranking of floats": (lambda f: rewrite(f, lambda t: t.update({CHANNELS: 0.5 * t[CHANNELS]})), "ranking"),
    "a newer version": (lambda f: rewrite(f, version=VERSION + 1), "has version"),
    "no metadata": (lambda f: save_file(load_file(f / FILE), f / FILE), "has version"),
    "metadata that is no JSON": (raw_metadata("{"), "cannot read"),
    "an exotic dtype": (
        lambda f: rewrite(f, lambda t: t.update({BASIS: t[BASIS].to(torch.float8_e4m3fn)})),
        f"{BASIS} is F8_E4M3",
    ),
    "another model": (lambda f: rewrite(f, model="0" * 64), "another model"),
    "another config beside it": (other_config, "another model"),
    "settings that are no object": (lambda f: rewrite(f, statistics=[1]), "has version"),
    "metadata that is no object": (raw_metadata("[1]"), ""),
    "metadata of many brackets": (raw_metadata("[" * 10_000), "cannot read"),
}


def test_a_fingerprint_sees_every_matrix(tmp_path):
    """And one of v0.4, which is in the shipped files, is known as such."""
    weights = load_file(TINY / "model.safetensors")
    shutil.copy(TINY / "config.json", tmp_path)
    prints = {fingerprint(TINY)}
    for name in (matrices := [name for name, t in weights.items() if t.nbytes >= 1 << 14]):
        save_file(weights | {name: weights[name] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
        prints.add(fingerprint(tmp_path))
    assert len(prints) == 1 + len(matrices) > 30
    assert is_of(fingerprint(TINY, 1), TINY) and is_of(fingerprint(TINY), TINY) and not is_of(None, TINY)
    assert not is_of(fingerprint(TINY), tmp_path)


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_error_that_says_what_to_run(what, folder):
    spoil, says = BAD[what]
    spoil(folder)
    model = load_checkpoint(folder)
    with pytest.raises(InputError) as e:
        Calibration.load(folder, model.args).require(all_statistics())
    text = str(e.value)
    assert says in text and str(folder) in text and f"python calibrate.py --checkpoint {folder}" in text, text
    with pytest.raises(InputError):  # and so it reaches the user
        model.setup_cache("0:double_sparsity,1:sals,value_bits=16", 1, 32)


def test_other_weights_are_a_warning_unless_the_file_is_named(folder, capsys):
    """A calibration fits every quantization of a model; that these are other bits of it, the user has to know."""
    other_weights(folder)
    model = load_checkpoint(folder)
    model.setup_cache("sals,value_bits=16", 1, 64)
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {folder / FILE} was measured on other weights") and err.count("\n") == 1
    assert "--calibration" in err
    model.use_calibration(folder / FILE)
    model.setup_cache("sals,value_bits=16", 1, 64)
    assert not capsys.readouterr().err
    named = (folder / FILE).rename(folder / "calibration-of-the-other.safetensors")
    with pytest.raises(InputError, match="has none.*--calibration"):
        Calibration.load(folder, model.args)
    assert Calibration.load(folder, model.args, named).path == named
    with pytest.raises(
        InputError, match=rf"--calibration \S*model.safetensors is not a calibration.*--checkpoint {folder}$"
    ):
        Calibration.load(folder, model.args, folder / "model.safetensors")
    load_checkpoint(folder)  # what is named so is not taken for weights
    with pytest.raises(InputError, match="no such file"):
        model.use_calibration(folder / "calibration-2.safetensors")
    other_config(folder)
    with pytest.raises(
        InputError, match=f"another model than {folder}; run: python calibrate.py --checkpoint {folder}$"
    ):
        load_checkpoint(folder).use_calibration(named)
    with pytest.raises(InputError, match="random weights"):
        small(2, 2, 16)[0].use_calibration(named)


def test_a_named_file_is_never_lost_to_another_model(folder):
    """It serves the same model in other bits, whose statistics join it; another model needs a file of its own."""
    named, model = (folder / FILE).rename(folder / "calibration-of-both.safetensors"), load_checkpoint(folder)
    other_weights(folder)
    C.check_place(named, folder, model.args)
    new = {"layers.0.mine.x": torch.ones(3)}
    joined = C.merged(named, folder, model.args, new, dict(mine={}))
    assert joined.tensors.keys() == new.keys() | small(2, 2, 16)[1].tensors.keys()
    shutil.copy(named, folder / FILE)  # beside its weights, it is of these weights
    assert C.merged(folder / FILE, folder, model.args, new, dict(mine={})).tensors.keys() == new.keys()
    other_config(folder)
    with pytest.raises(InputError, match="calibration-of-both.safetensors is of another model than .*: name another"):
        C.check_place(named, folder, load_checkpoint(folder).args)


def test_a_damaged_file_never_gives_a_traceback(folder):
    """Random bytes changed, in the header above all: refused, or it still is a calibration."""
    args, path = load_checkpoint(folder).args, folder / FILE
    good, rng = path.read_bytes(), np.random.default_rng(0)
    header = 8 + int.from_bytes(good[:8], "little")
    for i in range(60):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(0, header if i % 3 else len(data))] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            got = Calibration.load(folder, args).require(statistics())
        except InputError:
            continue
        assert {k.split(".", 2)[2] for k in got.tensors} >= set(parts(args))


def test_random_weights_get_random_bases():
    """For throughput: of the right shapes, orthogonal, the same every time."""
    args = small(1, 3, 8)[0].args
    calib, again = RandomCalibration(args, statistics()), RandomCalibration(args).require(statistics())
    part = ModelArgs(dim=24, n_head=2, n_kv_head=2, head_dim=8)
    for name, like in parts(args).items():
        t, size = calib.stack(name), like.shape
        assert tuple(t.shape) == (2, *size) and torch.equal(t, again.stack(name)), name
        assert name == "whiten.moments" or not torch.equal(t[0], t[1]), f"{name}: layers are alike"
        assert t.dtype == (torch.int64 if name.startswith("channels") else torch.float32)
        if name.startswith("channels"):
            assert torch.equal(t.sort(-1).values, torch.arange(size[-1]).expand_as(t))
        if name.endswith("basis"):
            assert torch.allclose(t.mT @ t, torch.eye(size[-1]).expand_as(t), atol=1e-5)
        assert calib.heads(1, [2, 0], 3, statistics()).get(1, name).shape == parts(part)[name].shape


# ---- a user's own ----

TOY = '''"""Attends to the tokens that meet the query in the channels in which keys are large."""

from cache.selecting import Selecting
from cache.statistic import Statistic


class Toy(Selecting):
    statistics = (Statistic("toy", lambda t: dict(weight=t.k_rot.abs().sum(0))),)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.constant("weight", shape.kv[1::2], calib and calib.get(layer, "toy.weight"))

    def scores(self, q, pos):
        q = q.unflatten(1, (len(self.weight), -1)).sum(2) * self.weight  # [B, Hkv, D]
        return (self.k[: len(q)] @ q[..., None])[..., 0].float()
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a method file into a folder of KV_FAST_METHODS."""
    folder = tmp_path / "methods"
    folder.mkdir()
    monkeypatch.setenv("KV_FAST_METHODS", str(folder))

    def write(text=TOY, name="toy"):
        (folder / f"{name}.py").write_text(text)
        sys.modules.pop(f"kv_methods.{name}", None)

    yield write
    for file in folder.glob("*.py"):
        sys.modules.pop(f"kv_methods.{file.stem}", None)


def test_a_method_of_ones_own_with_its_statistic_is_one_file(own, checkpoint, text, cli, refused):
    """Twenty lines. It is told what to run, runs it, and generates; the file keeps what it held of others."""
    assert len(TOY.splitlines()) <= 20
    own()
    shutil.copy(TINY / FILE, checkpoint)
    before = load_file(checkpoint / FILE)
    prompt = ["--checkpoint", checkpoint, "--method", "toy", "--prompt", "import argparse", "--max-new-tokens", 4]
    says = f"run: python calibrate.py --checkpoint {checkpoint} --method toy"
    assert "has no 'toy'" in (said := refused(generate, *prompt)) and says in said
    code, out, _ = cli(C, *flags(checkpoint, text), "--method", "toy", "--json")
    assert code == 0
    how, after = json.loads(out)["statistics"], load_file(checkpoint / FILE)
    assert how["toy"]["tokens"] == 128 and how["sals"]["tokens"] == 64 * 2048 and how["razor"]["random_tokens"] == 1024
    assert {k for k in after if k not in before} == {f"layers.{i}.toy.weight" for i in range(6)}
    assert all(torch.equal(after[k], t) and after[k].dtype == t.dtype for k, t in before.items())
    model = load_checkpoint(checkpoint)
    model.setup_cache("toy", 1, 32)
    assert torch.equal(model.cache[2].weight, after["layers.2.toy.weight"])
    code, out, err = cli(generate, *prompt)
    assert code == 0 and out and "other code" not in err, err
    own(TOY.replace("abs()", "square()"))
    code, out, err = cli(generate, *prompt)
    assert code == 0 and "'toy' was measured by other code than " in err and says in err


def test_functions_measure_what_a_class_would(own):
    """The toy's weights are mean |k|; a random model, and a file that has one with the same weights."""
    own()
    for shape in SHAPES:
        model, _, sequences = small(*shape)
        calib = C.calibrate(model, sequences, N_RANDOM, all_statistics(["toy"]))
        assert set(calib.tensors) == {"layers.0.toy.weight", "layers.1.toy.weight"}
        for i, m in enumerate(moments(*shape)):
            assert np.abs(calib.get(i, "toy.weight").numpy() - m["k"]).max() < 1e-5
        model.setup_cache("toy", 1, 32)  # random weights: random bases
        assert model.cache[0].weight.any()


SUM = "t.k_rot.abs().sum(0)"
BROKEN = {  # a change to the toy's statistic -> what the one line says
    "it raises": (SUM, "t.k_rot @ t.v", ["'toy'", "toy.py", "line 8", "measure raised"]),
    "it raises in the pass": (SUM, f"{SUM} / (1 if t.k.is_meta else t.none)", ["'toy'", "line 8"]),
    "NaN": (SUM, "t.k_rot.log().sum(0)", ["'toy'", "NaN", "'weight' of layer 0"]),
    "no dictionary": (f"dict(weight={SUM})", SUM, ["'toy'", "must return a dictionary"]),
    "no tensors": (SUM, "1.0", ["'toy'", "must return a dictionary of tensors"]),
    "integers that rank nothing": (
        f"{SUM}))", f"{SUM}), lambda m: dict(n=m['weight'].long()))", ["'n'", "not a ranking"],
    ),
    "finish raises": (f"{SUM}))", f"{SUM}), lambda m: m.weight)", ["'toy'", "finish raised"]),
    "a comma forgotten": (")),)", ")))", ["toy.py", "tuple"]),
    "no statistic": ("statistics = (", "statistics = ('toy', ", ["holds 'toy'"]),
    "no name": ('"toy", lambda', '"", lambda', ["needs a name"]),
    "the name of another": ('"toy", lambda', '"sals", lambda', ["toy.py", "sals.py", "rename"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_statistic_is_one_line_that_names_it(what, own, checkpoint, text, refused):
    old, new, says = BROKEN[what]
    assert old in TOY
    own(TOY.replace(old, new))
    argv = flags(checkpoint, text) + ["--method", "toy", "sals"]
    said = refused(C, *argv)
    assert all(x in said for x in says), said
    assert not (checkpoint / FILE).exists()
    load_checkpoint(checkpoint).setup_cache("full", 1, 32)  # broken for itself alone
    shutil.copy(TINY / FILE, checkpoint)
    load_checkpoint(checkpoint).setup_cache("sals", 1, 128)


def test_what_a_spec_needs():
    def names(*specs, n_layer=6):
        return sorted(s.name for s in all_statistics(specs, n_layer))

    assert names("full") == names("self_index") == names("flexgen") == []
    assert names("sals-12.5") == ["sals"] and names("ojakv-0.6", "double_sparsity-q") == ["channels", "oja"]
    assert names("razor") == ["razor"] and names("razor,retrieval_method=sals") == ["razor", "sals"]
    assert names("0-1:full,2-:double_sparsity") == ["channels"]
    assert sorted(s.name for s in all_statistics()) == [
        "channels", "oja", "palu", "pca", "qfilters", "razor", "sals", "triattention",
    ]  # fmt: skip


# ---- the command ----


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((ROOT / "model.py").read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.fixture
def checkpoint(tmp_path):
    """The shipped model in a folder of its own, without a calibration."""
    return shutil.copytree(TINY, tmp_path / "tiny", ignore=UNCALIBRATED)


def flags(checkpoint, text, samples=2):
    return ["--checkpoint", str(checkpoint), "--data", str(text), "--samples", str(samples), "--seq-len", "64",
            "--random-tokens", "16"]  # fmt: skip


def test_text_with_tokens_that_the_model_does_not_embed(checkpoint, refused):
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"2048": dict(content="<more>", special=True)}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint / "text.txt").write_text("<more> word" * 100)
    said = refused(C, *flags(checkpoint, checkpoint / "text.txt"))
    assert said.startswith("error: the text has token 2048, the model embeds 2048")


def process(argv, driver=None, **kw):
    """`python calibrate.py argv`, or with lines of Python run first, which may put faults into the module."""
    if driver is None:
        command = [sys.executable, "calibrate.py", *argv]
    else:
        code = f"import os, signal, sys\nimport calibrate as C\n{driver}\nC.run_cli(C.main)"
        command = [sys.executable, "-c", code, *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)


def ended(p):
    """-> exit code, stdout, stderr"""
    out, err = p.communicate(timeout=300)
    return p.returncode, out, err


def test_the_command_writes_what_calibrate_computes(checkpoint, text, cli):
    before = {f.name for f in checkpoint.iterdir()}
    code, out, _ = cli(C, *flags(checkpoint, text), "--json")
    meta = json.loads(out)
    how = meta["statistics"]
    assert code == 0 and list(how) == ["channels", "oja", "palu", "pca", "qfilters", "razor", "sals", "triattention"]
    assert all(how[name]["tokens"] == 128 and how[name]["samples"] == 2 for name in ("channels", "oja", "sals"))
    assert meta["model"] == of_model(load_checkpoint(checkpoint).args)
    assert how["razor"] == dict(random_tokens=16, dtype="fp32", code=HeadScores().code)
    assert {f.name for f in checkpoint.iterdir()} == before | {FILE}
    model = load_checkpoint(checkpoint)
    got = Calibration.load(checkpoint, model.args)
    ids = np.array(load_tokenizer(checkpoint).encode(text.read_text(encoding="utf-8"), bos=True))
    vocabulary = load_tokenizer(checkpoint).text_ids
    want = C.calibrate(model, [torch.from_numpy(w) for w in C.draw(ids, 2, 64, 0)], 16, vocabulary=vocabulary)
    assert all(torch.equal(got.tensors[k], t) for k, t in want.tensors.items())
    first = (checkpoint / FILE).read_bytes()
    assert cli(C, *flags(checkpoint, text))[0] == 0
    assert (checkpoint / FILE).read_bytes() == first, "the same command gives another file"
    assert cli(C, *flags(checkpoint, text), "--weights", "int4")[0] == 0
    packed = Calibration.load(checkpoint, model.args)
    assert packed.meta["statistics"]["razor"] == dict(
        random_tokens=16, dtype="fp32", weights="int4", head=None, code=HeadScores().code
    )
    assert not torch.equal(packed.get(3, "sals.basis"), got.get(3, "sals.basis"))


# ---- published channel lists ----


def published(args, seed=0):
    """A file as Double Sparsity's authors publish them: a ranking for every query head, k for every KV head."""
    rng, D = np.random.default_rng(seed), args.head_dim
    return {f"model.layers.{i}.self_attn.{kind}_proj": [rng.permutation(D).tolist() for _ in range(heads)]
            for i in range(args.n_layer)
            for kind, heads in (("q", args.n_head), ("k", args.n_kv_head), ("v", args.n_kv_head), ("qk", args.n_head))
            }  # fmt: skip


def test_bases_in_16_bits(checkpoint, text, cli):
    """Half of the file, for the methods that are named; what is no basis is as it was."""
    argv, files = [*flags(checkpoint, text), "--method", "sals", "loki", "razor"], {}
    for bases in ("fp32", "fp16"):
        files[bases] = checkpoint / f"calibration-{bases}.safetensors"
        more = ["--bases", bases, "--calibration", str(files[bases])]
        assert cli(C, *argv, *more)[0] == 0
    model = load_checkpoint(checkpoint)
    needed = all_statistics(["sals", "loki", "razor"])
    full, half = (Calibration.load(checkpoint, model.args, f).require(needed).tensors for f in files.values())
    assert files["fp16"].stat().st_size < 0.52 * files["fp32"].stat().st_size
    assert full.keys() == half.keys() and {k.split(".")[2] for k in full} == {"sals", "pca", "razor"}
    for key, t in full.items():
        assert torch.equal(t, half[key]) or (key.endswith("basis") and (t - half[key]).abs().max() < 2**-12), key
    stored = load_file(files["fp16"])
    assert all((t.dtype == torch.float16) == key.endswith("basis") for key, t in stored.items())


def test_published_channel_lists_are_imported(checkpoint, text, cli):
    assert cli(C, *flags(checkpoint, text), "--method", "razor", "double_sparsity")[0] == 0
    args = load_checkpoint(checkpoint).args
    before = Calibration.load(checkpoint, args).tensors
    data = published(args)
    for i in range(args.n_layer):  # the published qk lists of two heads hardly differ
        same = data[f"model.layers.{i}.self_attn.qk_proj"]
        same[:] = [same[0]] * len(same)
    file = checkpoint.parent / "lists.json"
    file.write_text(json.dumps(data))
    code, out, err = cli(C, "--checkpoint", str(checkpoint), "--import-channels", str(file))
    assert code == 0 and "channels" in out
    assert err.startswith("warning: ") and "share 100%" in err and "ranking=k" in err and err.count("\n") == 1
    calib = Calibration.load(checkpoint, args)
    assert calib.meta["statistics"]["channels"]["imported"] == "lists.json"
    g, D = args.n_head // args.n_kv_head, args.head_dim
    for i, kind in np.ndindex(args.n_layer, 3):
        kind = ("qk", "q", "k")[kind]
        lists, got = data[f"model.layers.{i}.self_attn.{kind}_proj"], calib.get(i, f"channels.{kind}").tolist()
        for h, ranking in enumerate(got):
            mine = [lists[h]] if kind == "k" else lists[h * g : h * g + g]
            place = [sum(x.index(c) for x in mine) / len(mine) for c in range(D)]
            assert ranking == sorted(range(D), key=lambda c: place[c]), (i, kind, h)
    assert {k for k in before if "razor" in k} <= set(calib.tensors), "what is of others is lost"
    model = load_checkpoint(checkpoint)
    model.setup_cache("double_sparsity", 1, 32, ranking="k")
    assert model.cache[1].label.channels.tolist() == calib.get(1, "channels.k")[:, : model.cache[1].label.r].tolist()


BAD_LISTS = {
    "not there": (None, "not found"),
    "no JSON": (lambda d: "{", "as JSON"),
    "empty": (lambda d: {}, "has no model.layers.0.self_attn.qk_proj"),
    "a layer fewer": (lambda d: {k: x for k, x in d.items() if "layers.5" not in k}, "layers.5"),
    "a layer more": (lambda d: d | {k.replace("layers.0", "layers.6"): x for k, x in d.items()}, "more than"),
    "a head fewer": (lambda d: {k: x[:-1] for k, x in d.items()}, "heads"),
    "a channel twice": (lambda d: {k: [[y[1], *y[1:]] for y in x] for k, x in d.items()}, "rank"),
    "a huge channel": (lambda d: {k: [[10**30, *y[1:]] for y in x] for k, x in d.items()}, "rank"),
    "a list": (lambda d: [1], "expected an object"),
    "numbers": (lambda d: dict.fromkeys(d, 3), "rank"),
    "a channel of text": (lambda d: {k: [["a", *y[1:]] for y in x] for k, x in d.items()}, "rank"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_lists_of_another_model_are_one_line(name, checkpoint, refused):
    change, says = BAD_LISTS[name]
    file = checkpoint.parent / "lists.json"
    if change is not None:
        got = change(published(load_checkpoint(checkpoint).args))
        file.write_text(got if isinstance(got, str) else json.dumps(got))
    said = refused(C, "--checkpoint", checkpoint, "--import-channels", file)
    assert says in said and len(said) < 400 and not (checkpoint / FILE).exists()


BAD_FLAGS = {
    "lists and a method": (["--import-channels", "x.json", "--method", "sals"], "drop --method, --data"),
    "lists and no tokens": (["--import-channels", "x.json", "--random-tokens", "0"], "--seq-len, --random-tokens"),
    "no samples": (["--samples", "0"], "--samples"),
    "seq-len over the context": (["--seq-len", "5000"], "--seq-len"),
    "no tokens": (["--seq-len", "0"], "--seq-len 0"),
    "no random tokens": (["--random-tokens", "0"], "--random-tokens 0"),
    "too many random tokens": (["--random-tokens", "1025"], "--random-tokens"),
    "missing text": (["--data", "/no/such.txt"], "/no/such.txt"),
    "a method that needs none": (["--method", "full"], "no calibration"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_are_one_line_and_exit_code_2(name, checkpoint, text, refused):
    argv, says = BAD_FLAGS[name]
    assert says in refused(C, *flags(checkpoint, text), *argv) and not (checkpoint / FILE).exists()


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self):
        self.tk, self.seen = load_tokenizer(TINY), 0

    def encode(self, text, bos):
        self.seen += len(text)
        return self.tk.encode(text, bos=bos)


def test_default_text_reads_and_tokenizes_little():
    """Code and prose by turns, the same every time, none of it held out for evaluations."""
    tk = Counting()
    rows = C.default_text(tk, 4, 200, 0)
    assert rows.shape == (4, 200) and tk.seen < 16 * rows.size
    assert np.array_equal(rows, C.default_text(tk, 4, 200, 0)) and not np.array_equal(
        rows, C.default_text(tk, 4, 200, 1)
    )
    code, prose = ([tk.tk.decode(row.tolist()) for row in rows[i::2]] for i in (0, 1))
    words = [sum(text.count(w) for text in some for w in ("self", "import", "def ")) for some in (code, prose)]
    assert words[0] > words[1]  # a row alone may have none, by the Python whose library it is
    assert not any("import " in text and "def " in text for text in prose)
    for kind in ("code", "prose"):
        assert all(d.kind == kind and not d.held_out for d in itertools.islice(shuffled(kind, 3), 40))
        first, other = (
            [name for name, _ in itertools.islice(itertools.groupby(shuffled(kind, seed), lambda d: d.name), 6)]
            for seed in (3, 4)
        )
        assert len(set(first)) == 6 and first != other


def test_a_machine_without_sources_says_so(monkeypatch):
    monkeypatch.setattr(C, "shuffled", lambda kind, seed: iter(()))
    with pytest.raises(InputError, match="give --data"):
        C.default_text(Counting(), 1, 20, 0)


def test_text_that_is_too_short_or_not_utf8(checkpoint, tmp_path, refused):
    for data, says in ((b"too short", "--seq-len"), (b"", "--seq-len"), (b"caf\xe9" * 200, "UTF-8")):
        (tmp_path / "t.txt").write_bytes(data)
        assert says in refused(C, *flags(checkpoint, tmp_path / "t.txt"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory, text):
    """samples -> the bytes that an uninterrupted run gives; each is run once."""

    @functools.cache
    def run(samples):
        folder = shutil.copytree(TINY, tmp_path_factory.mktemp("clean") / "tiny", ignore=UNCALIBRATED)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["calibrate.py", *flags(folder, text, samples)])
            C.main()
        return (folder / FILE).read_bytes()

    return run


def interrupt(after, what="put", number=signal.SIGINT):
    """Behind a number of layers: while they are added to the sums, or before they are measured."""
    real, seen = getattr(C.Sums, what), []

    def counted(*args):
        if what == "measure" and len(seen) == after:
            os.kill(os.getpid(), number)
        out = real(*args)
        seen.append(1)
        if what == "put" and len(seen) == after:
            os.kill(os.getpid(), number)
        return out

    return counted


# six layers a sequence; the fifth "sequence" of four is the random tokens
@pytest.mark.parametrize(
    ("after", "what", "number"),
    [(15, "put", signal.SIGINT), (15, "measure", signal.SIGTERM), (24, "put", signal.SIGINT),
     (27, "measure", signal.SIGTERM)])  # fmt: skip
def test_interrupted_then_continued_gives_the_same_file(checkpoint, text, clean, after, what, number, monkeypatch, cli):
    want, argv = clean(4), flags(checkpoint, text, 4)
    with monkeypatch.context() as m:
        m.setattr(C.Sums, what, interrupt(after, what, number))
        code, _, err = cli(C, *argv)
    last = err.strip().splitlines()[-1]
    assert code == 130 and "Traceback" not in err and last.startswith("interrupted: "), err
    assert "the same command goes on" in last and not (checkpoint / FILE).exists()
    text_file, random_file = (next(checkpoint.glob(f"{C.partial(checkpoint / FILE, name).name}.*"), None)
                              for name in ("text", "random"))  # fmt: skip
    assert text_file and bool(random_file) == (after > 24)
    if after == 15:
        assert f"text: 2 of 4 sequences and 3 layers of the next kept in {text_file}; random tokens: nothing" in last
    if after == 27:
        assert (
            f"text: 4 of 4 sequences kept in {text_file}; random tokens: 3 layers of it kept in {random_file};" in last
        )
    kept = text_file.read_bytes()
    with monkeypatch.context() as m:  # again, while the model is loaded: it tells what is there from before
        m.setattr(C, "load_checkpoint", Mock(side_effect=KeyboardInterrupt))
        code, _, err = cli(C, *argv)
    assert code == 130 and err.splitlines()[-1] == last and text_file.read_bytes() == kept
    load_checkpoint(checkpoint)  # what is kept is not taken for weights
    if not random_file:  # of other settings; these are the same
        assert cli(C, *flags(checkpoint, text, 1))[0] == 0 and text_file.read_bytes() == kept
        (checkpoint / FILE).unlink()
    done, put = [], C.Sums.put
    monkeypatch.setattr(C.Sums, "put", lambda *a: (put(*a), done.append(1)))
    assert cli(C, *argv)[0] == 0
    assert len(done) == 30 - after, "it did not continue where it was"
    assert (checkpoint / FILE).read_bytes() == want
    assert not list(checkpoint.glob("*partial*")) and not list(checkpoint.glob("*.tmp"))


@pytest.mark.slow
def test_a_signal_from_outside_acts_within_seconds(checkpoint, text):
    p = process([*flags(checkpoint, text), "--random-tokens", "1024"])
    seen = ""
    while "random tokens:" not in seen:  # the bar of the longest sequence
        assert (more := p.stderr.read(1)), seen
        seen += more
    p.send_signal(signal.SIGINT)
    started = time.time()
    code, _, err = ended(p)
    assert code == 130 and time.time() - started < 30 and "text: 2 of 2 sequences kept in" in err.splitlines()[-1]


def test_interrupted_before_anything_is_done(checkpoint, text, monkeypatch, cli):
    monkeypatch.setattr(C.Sums, "measure", interrupt(0, "measure"))
    code, _, err = cli(C, *flags(checkpoint, text, 4))
    assert code == 130 and "text: nothing is done yet; random" in err and not list(checkpoint.glob("*partial*"))


def test_an_edited_statistic_does_not_continue_from_the_partial_file(own, checkpoint, text, monkeypatch, cli):
    own()
    argv = [*flags(checkpoint, text, 3), "--method", "toy"]
    with monkeypatch.context() as m:
        m.setattr(C.Sums, "put", interrupt(9))
        assert cli(C, *argv)[0] == 130
    own(TOY.replace("abs()", "square()"))
    assert cli(C, *argv)[0] == 0
    got = load_file(checkpoint / FILE)
    (checkpoint / FILE).unlink()
    assert cli(C, *argv)[0] == 0
    assert all(torch.equal(got[k], t) for k, t in load_file(checkpoint / FILE).items())


def test_a_partial_file_with_a_tensor_missing_leaves_nothing_in_the_sums(tmp_path):
    """What cannot be continued starts from zero: not from the half that could be read."""
    model, path = small(2, 2, 16)[0], tmp_path / "partial"

    def new(**settings):
        return C.Pass("text", torch.arange(14).view(2, 7), statistics(), path, settings)

    whole = new(a=1)
    whole.run(model)
    again = new(a=1)
    again.load()
    assert (again.done, again.layer, again.sums.tokens) == (2, 0, 14)
    assert again.sums.sums.keys() == whole.sums.sums.keys()
    assert all(torch.equal(again.sums.sums[k], t) for k, t in whole.sums.sums.items())
    other = new(a=2)
    other.load()
    assert not other.done and not other.sums.sums
    path = whole.path
    with safe_open(path, framework="pt") as f:
        meta = f.metadata()
    tensors = load_file(path)
    tensors.pop("layers.1.whiten.moments")
    save_file(tensors, path, metadata=meta)
    for _ in "ab":
        empty = new(a=1)
        empty.load()
        assert not empty.done and empty.sums.tokens == 0 and not empty.sums.sums
        path.write_bytes(path.read_bytes()[:-1000])  # and half a file


# where SIGKILL strikes: before, in the middle of and after each of the writes
KILL = """
import cache.calibration as K
def die():
    os.kill(os.getpid(), signal.SIGKILL)
C.SAVE_EVERY = {every}
real_save, real_replace, calls = K.save_file, os.replace, []
def save(tensors, path, metadata=None):
    calls.append(1)
    at = len(calls) == {write}
    if at and {where!r} == "before":
        die()
    real_save(tensors, path, metadata=metadata)
    if at and {where!r} == "middle":
        os.truncate(path, os.path.getsize(path) // 2)
        die()
    if at and {where!r} == "written":
        die()
def replace(a, b):
    real_replace(a, b)
    if len(calls) == {write} and {where!r} == "renamed":
        die()
K.save_file = save
os.replace = replace
"""


RESULT = 15  # of the writes: one after each of 12 layers and of two passes come before it


@pytest.mark.slow
@pytest.mark.parametrize(("write", "where"), [(7, "middle"), (7, "written"), (RESULT, "middle"), (RESULT, "renamed")])
def test_killed_in_a_write_leaves_the_old_file_or_the_new_one(checkpoint, text, clean, write, where, cli):
    """A partial file after each layer, then the result; an old calibration is there."""
    new, old = clean(1), b"the file of before"
    (checkpoint / FILE).write_bytes(old)
    p = process(flags(checkpoint, text, 1), KILL.format(every=-1, write=write, where=where))
    assert ended(p)[0] == -signal.SIGKILL
    assert (checkpoint / FILE).read_bytes() == (new if (write, where) == (RESULT, "renamed") else old)
    assert cli(C, *flags(checkpoint, text, 1))[0] == 0
    assert (checkpoint / FILE).read_bytes() == new
    assert not list(checkpoint.glob("*partial*")) and not list(checkpoint.glob("*.tmp")), (
        "a kill leaves litter for good"
    )
    load_checkpoint(checkpoint)  # what lies beside the weights is not taken for weights
