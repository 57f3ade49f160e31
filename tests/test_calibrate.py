"""calibrate.py: every tensor of its file against loops in float64, the file's checks, and interrupting the command."""

from __future__ import annotations

import functools
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import rotate, softmax
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import calibrate as C
from errors import InputError, run_cli
from model import ModelArgs, load_checkpoint, random_transformer

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "models" / "tiny"
N_RANDOM = 12
SHAPES = [(2, 2, 16), (1, 3, 8), (4, 1, 32)]  # g, Hkv, D


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
    return model, C.calibrate(model, sequences, N_RANDOM), sequences


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
                    for query in (rotate(q[t, j * g + e], t) for e in range(g)):
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
        assert np.abs(get(i, "whiten.moments").numpy() - m["x"]).max() < 1e-4 * np.abs(m["x"]).max()
    heads = {"razor.induction", "razor.echo", "razor.after"}
    assert seen | heads == set(C.shapes(model.args)), "a tensor of the file is not tested"
    for name, size in C.shapes(model.args).items():
        assert tuple(calib.stack(name).shape) == (2, *size)


def random_tokens(model, monkeypatch, n=N_RANDOM):
    """What the head scores were measured on, seen at the embedding."""
    seen = []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0][0].clone()))
    scores = C.head_scores(model, n)
    hook.remove()
    return seen[0], scores


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [5, 256])
def test_head_scores_are_those_of_the_attention_maps(shape, block, monkeypatch):
    """Sec. 3.3: mass on earlier copies of the token, and right after them, over the second copy and those after it."""
    monkeypatch.setattr(C, "QUERY_BLOCK", block)
    model, calib, _ = small(*shape)
    tokens, (echo, after) = random_tokens(model, monkeypatch)
    n = N_RANDOM
    assert len(tokens) == 4 * n and all(torch.equal(tokens[:n], tokens[j * n : j * n + n]) for j in range(4))
    for i, (_, q, k, _) in enumerate(forward(model, tokens)):
        for h, p in enumerate(attention_map(q, k)):
            want = np.zeros(5)
            for m in range(n, 4 * n):
                for copy in range(m - n, -1, -n):
                    want += np.array(p[m, copy : copy + 5]) / (3 * n)
            assert abs(float(echo[i, h]) - want[0]) < 1e-5
            assert np.abs(after[i, h].numpy() - want[1:]).max() < 1e-5
    assert torch.allclose(calib.stack("razor.after").double(), after, atol=1e-6)
    assert torch.equal(calib.stack("razor.induction"), calib.stack("razor.after")[..., 0])
    assert torch.allclose(calib.stack("razor.echo").double(), echo, atol=1e-6)


def test_planted_heads_are_found():
    """A head that looks for what followed the token before, and one that looks for the token itself."""
    args = ModelArgs(
        dim=64, n_layer=2, n_head=4, n_kv_head=2, head_dim=64, ffn_dim=32, vocab_size=9000, max_seq_len=512
    )
    args.rope.theta = 1e30  # slow but for the first channel pairs, which the planted heads leave empty
    model = random_transformer(args, "cpu", torch.float32)
    attention, projection = model.layers[0].attention, torch.randn(64, 64)
    projection[:, [*range(6), *range(32, 38)]] = 0
    real = attention.qkv

    def planted(x):
        q, k, v = (t.clone() for t in real(x))
        code = x @ projection
        code = 12 * code / code.norm(dim=-1, keepdim=True)
        q[..., 1, :], k[..., 0, :] = code, code.roll(1, -2)  # k of token t is what t - 1 was
        q[..., 3, :], k[..., 1, :] = code, code
        return q, k, v

    attention.qkv = planted
    echo, after = C.head_scores(model, 60)
    induction = after[..., 0]
    assert induction[0, 1] > 0.95 and induction[0].argmax() == 1 and induction[0, [0, 2, 3]].max() < 0.1
    # it sees itself as well as its 1, 2 or 3 copies
    assert abs(echo[0, 3] - (1 / 2 + 2 / 3 + 3 / 4) / 3) < 0.03 and echo[0].argmax() == 3
    assert echo[1].max() < 0.1 and induction[1].max() < 0.1


@pytest.mark.parametrize("kv_heads", [[0], [2], [0, 2], [2, 0], [0, 1, 2]], ids=str)
def test_heads_is_the_calibration_of_those_heads(kv_heads):
    """The joint basis comes from a sub-block; everything else of the layer is the heads' own."""
    shape = (1, 3, 8)
    _, calib, _ = small(*shape)
    part = calib.heads(1, kv_heads)
    m, rows = moments(*shape)[1]["joint"], np.concatenate([np.arange(j * 8, j * 8 + 8) for j in kv_heads])
    check_eigen(part.get(1, "sals.basis"), part.get(1, "sals.eigenvalues"), m[np.ix_(rows, rows)], "sub-block")
    for name in C.shapes(small(*shape)[0].args):
        if name.split(".")[0] in ("oja", "channels", "pca"):
            assert torch.equal(part.get(1, name), calib.get(1, name)[kv_heads]), name
        elif not name.startswith("sals"):
            assert torch.equal(part.get(1, name), calib.get(1, name)), name
        assert torch.equal(part.get(0, name), calib.get(0, name)), "another layer has changed"


# ---- the file ----

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=24, intermediate_size=32,
              num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=80,
              max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu",
              tie_word_embeddings=False, torch_dtype="float32")  # fmt: skip


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A checkpoint folder with its calibration."""
    from model import save_checkpoint_tensors

    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = small(2, 2, 16)[0]
    save_file(save_checkpoint_tensors(model, torch.float32), folder / "model.safetensors")
    calib = small(2, 2, 16)[1]
    meta = dict(version=C.VERSION, fingerprint=C.fingerprint(folder))
    C.Calibration(calib.tensors, 2, meta).save(folder / C.FILE)
    return folder


@pytest.fixture
def folder(calibrated, tmp_path):
    return shutil.copytree(calibrated, tmp_path / "checkpoint")


def test_what_is_saved_is_loaded(folder):
    model, want = load_checkpoint(folder), small(2, 2, 16)[1]
    got = C.Calibration.load(folder, model.args)
    assert set(got.tensors) == set(want.tensors)
    assert all(torch.equal(got.tensors[k], t) and got.tensors[k].dtype == t.dtype for k, t in want.tensors.items())
    assert not list(folder.glob("*.tmp")) and (folder / C.FILE).stat().st_mode & 0o444 == 0o444


def rewrite(folder, change=None, version=C.VERSION, **meta):
    """The file again, with a change to its tensors or metadata."""
    with safe_open(folder / C.FILE, framework="pt") as f:
        kept = json.loads(f.metadata()["calibration"])
    tensors = load_file(folder / C.FILE)
    if change is not None:
        change(tensors)
    save_file(tensors, folder / C.FILE, metadata={"calibration": json.dumps(kept | dict(version=version) | meta)})


def set_entry(name, value):
    def change(tensors):
        tensors[name].view(-1)[3] = value

    return change


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][..., :-1].contiguous()})


def bytes_of(folder, change):
    path = folder / C.FILE
    path.write_bytes(change(path.read_bytes()))


def other_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, folder / "model.safetensors")


def other_config(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(rope_theta=5e5)))


def raw_metadata(text):
    return lambda f: save_file(load_file(f / C.FILE), f / C.FILE, metadata={"calibration": text})


BASIS, CHANNELS = "layers.1.sals.basis", "layers.0.channels.qk"
BAD = {  # what happened to the folder -> what the error says
    "missing": (lambda f: (f / C.FILE).unlink(), "has none"),
    "a folder": (lambda f: ((f / C.FILE).unlink(), (f / C.FILE).mkdir()), "has none"),
    "empty": (lambda f: bytes_of(f, lambda b: b""), "cannot read"),
    "half of it": (lambda f: bytes_of(f, lambda b: b[: len(b) // 2]), "cannot read"),
    "a byte short": (lambda f: bytes_of(f, lambda b: b[:-1]), "cannot read"),
    "a header of a few bytes": (lambda f: bytes_of(f, lambda b: b[:12]), "cannot read"),
    "noise": (lambda f: bytes_of(f, lambda b: bytes(range(256)) * 40), "cannot read"),
    "NaN": (lambda f: rewrite(f, set_entry(BASIS, math.nan)), f"{BASIS} holds NaN"),
    "infinity": (lambda f: rewrite(f, set_entry("layers.0.razor.echo", math.inf)), "layers.0.razor.echo holds NaN"),
    "a wrong shape": (lambda f: rewrite(f, cut(BASIS)), f"{BASIS} is of shape"),
    "a shape of another rank": (lambda f: rewrite(f, lambda t: t.update({BASIS: t[BASIS][0].clone()})), "of shape"),
    "a tensor missing": (lambda f: rewrite(f, lambda t: t.pop(CHANNELS)), f"{CHANNELS} is missing"),
    "a channel twice": (lambda f: rewrite(f, lambda t: t[CHANNELS].copy_(0 * t[CHANNELS])), "no ranking"),
    "a channel out of range": (lambda f: rewrite(f, lambda t: t[CHANNELS].add_(1)), "no ranking"),
    "a ranking of floats": (lambda f: rewrite(f, lambda t: t.update({CHANNELS: 0.5 * t[CHANNELS]})), "ranking"),
    "an older version": (lambda f: rewrite(f, version=C.VERSION - 1), "of version"),
    "a newer version": (lambda f: rewrite(f, version=C.VERSION + 1), "of version"),
    "no metadata": (lambda f: save_file(load_file(f / C.FILE), f / C.FILE), "of version"),
    "metadata that is no JSON": (raw_metadata("{"), "cannot read"),
    "metadata that is no object": (raw_metadata("[1]"), ""),
    "another fingerprint": (lambda f: rewrite(f, fingerprint="0" * 64), "another checkpoint"),
    "other weights beside it": (other_weights, "another checkpoint"),
    "another config beside it": (other_config, "another checkpoint"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_error_that_says_what_to_run(what, folder):
    spoil, says = BAD[what]
    spoil(folder)
    model = load_checkpoint(folder)
    with pytest.raises(InputError) as e:
        C.Calibration.load(folder, model.args)
    text = str(e.value)
    assert says in text and str(folder) in text and f"python calibrate.py --checkpoint {folder}" in text, text
    with pytest.raises(InputError):  # and so it reaches the user
        model.setup_cache("double_sparsity", 1, 32)


def test_a_damaged_file_never_gives_a_traceback(folder):
    """Random bytes changed, in the header above all: refused, or it still is a calibration."""
    args, path = load_checkpoint(folder).args, folder / C.FILE
    good, rng = path.read_bytes(), np.random.default_rng(0)
    header = 8 + int.from_bytes(good[:8], "little")
    for i in range(150):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(0, header if i % 3 else len(data))] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            got = C.Calibration.load(folder, args)
        except InputError:
            continue
        assert {k.split(".", 2)[2] for k in got.tensors} >= set(C.shapes(args))


def test_random_weights_get_random_bases():
    """For throughput: of the right shapes, orthogonal, the same every time."""
    args = small(1, 3, 8)[0].args
    calib, again = C.RandomCalibration(args), C.RandomCalibration(args)
    for name, size in C.shapes(args).items():
        t = calib.stack(name)
        assert tuple(t.shape) == (2, *size) and torch.equal(t, again.stack(name)), name
        assert name == "whiten.moments" or not torch.equal(t[0], t[1]), f"{name}: layers are alike"
        assert t.dtype == (torch.int64 if name.startswith("channels") else torch.float32)
        if name.startswith("channels"):
            assert torch.equal(t.sort(-1).values, torch.arange(size[-1]).expand_as(t))
        if name.endswith("basis"):
            assert torch.allclose(t.mT @ t, torch.eye(size[-1]).expand_as(t), atol=1e-5)
        part = ModelArgs(dim=24, n_head=2, n_kv_head=2, head_dim=8)
        assert calib.heads(1, [2, 0]).get(1, name).shape == C.shapes(part)[name]


# ---- the command ----


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((ROOT / "model.py").read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.fixture
def checkpoint(tmp_path):
    """The shipped model in a folder of its own, without a calibration."""
    return shutil.copytree(TINY, tmp_path / "tiny", ignore=shutil.ignore_patterns("calibration*"))


def flags(checkpoint, text, samples=2):
    return ["--checkpoint", str(checkpoint), "--data", str(text), "--samples", str(samples), "--seq-len", "64",
            "--random-tokens", "16"]  # fmt: skip


def here(capsys, monkeypatch, argv):
    """`calibrate.py argv` in this process -> exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["calibrate.py", *argv])
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as e:
            run_cli(C.main)
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)
    out = capsys.readouterr()
    return e.value.code, out.out, out.err


def process(argv, driver=None, **kw):
    """`python calibrate.py argv`, or with lines of Python run first, which may put faults into the module."""
    if driver is None:
        command = [sys.executable, "calibrate.py", *argv]
    else:
        code = f"import os, signal, sys\nimport calibrate as C\n{driver}\nfrom errors import run_cli\nrun_cli(C.main)"
        command = [sys.executable, "-c", code, *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)


def ended(p):
    """-> exit code, stdout, stderr"""
    out, err = p.communicate(timeout=300)
    return p.returncode, out, err


def test_the_command_writes_what_calibrate_computes(checkpoint, text, capsys, monkeypatch):
    before = {f.name for f in checkpoint.iterdir()}
    code, out, _ = here(capsys, monkeypatch, [*flags(checkpoint, text), "--json"])
    meta = json.loads(out)
    assert code == 0 and meta["tokens"] == 128 and meta["random_tokens"] == 16 and meta["samples"] == 2
    assert {f.name for f in checkpoint.iterdir()} == before | {C.FILE}
    model = load_checkpoint(checkpoint)
    got = C.Calibration.load(checkpoint, model.args)
    from tokenizer import load_tokenizer

    ids = np.array(load_tokenizer(checkpoint).encode(text.read_text(encoding="utf-8"), bos=True))
    want = C.calibrate(model, [torch.from_numpy(w) for w in C.draw(ids, 2, 64, 0)], 16)
    assert all(torch.equal(got.tensors[k], t) for k, t in want.tensors.items())
    first = (checkpoint / C.FILE).read_bytes()
    assert here(capsys, monkeypatch, flags(checkpoint, text))[0] == 0
    assert (checkpoint / C.FILE).read_bytes() == first, "the same command gives another file"


BAD_FLAGS = {
    "unknown flag": (["--bogus"], "--bogus"),
    "samples of text": (["--samples", "many"], "--samples"),
    "no samples": (["--samples", "0"], "--samples"),
    "negative samples": (["--samples", "-3"], "--samples"),
    "seq-len over the context": (["--seq-len", "5000"], "--seq-len"),
    "seq-len of one": (["--seq-len", "1"], "--seq-len"),
    "negative seq-len": (["--seq-len", "-5"], "--seq-len"),
    "too many random tokens": (["--random-tokens", "1025"], "--random-tokens"),
    "one random token": (["--random-tokens", "1"], "--random-tokens"),
    "negative seed": (["--seed", "-1"], "seed"),
    "missing checkpoint": (["--checkpoint", "/no/such"], "/no/such"),
    "missing text": (["--data", "/no/such.txt"], "/no/such.txt"),
    "a folder for text": (["--data", str(ROOT)], str(ROOT)),
    "device": (["--device", "abacus"], "abacus"),
    "dtype": (["--dtype", "int1"], "--dtype"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_are_one_line_and_exit_code_2(name, checkpoint, text, capsys, monkeypatch):
    argv, says = BAD_FLAGS[name]
    code, out, err = here(capsys, monkeypatch, [*flags(checkpoint, text), *argv])
    lines = [line for line in err.splitlines() if line]
    assert code == 2 and not out and len(lines) == 1, err
    assert lines[0].startswith("error: ") and says in lines[0]
    assert not (checkpoint / C.FILE).exists()


def test_text_that_is_too_short_or_not_utf8(checkpoint, tmp_path, capsys, monkeypatch):
    for data, says in ((b"too short", "--seq-len"), (b"", "--seq-len"), (b"caf\xe9" * 200, "UTF-8")):
        (tmp_path / "t.txt").write_bytes(data)
        code, _, err = here(capsys, monkeypatch, flags(checkpoint, tmp_path / "t.txt"))
        assert code == 2 and says in err and err.count("\n") == 1 and err.startswith("error: ")


@pytest.fixture(scope="module")
def clean(tmp_path_factory, text):
    """samples -> the bytes that an uninterrupted run gives; each is run once."""

    @functools.cache
    def run(samples):
        folder = shutil.copytree(TINY, tmp_path_factory.mktemp("clean") / "tiny")
        code, _, err = ended(process(flags(folder, text, samples)))
        assert code == 0, err
        return (folder / C.FILE).read_bytes()

    return run


INTERRUPT = """
real, seen = C.add_sequence, []
def counted(*a):
    real(*a)
    seen.append(1)
    if len(seen) == {after}:
        os.kill(os.getpid(), signal.{number})
C.add_sequence = counted
"""


@pytest.mark.parametrize("number", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_interrupted_then_continued_gives_the_same_file(checkpoint, text, clean, number):
    want = clean(4)
    code, _, err = ended(process(flags(checkpoint, text, 4), INTERRUPT.format(after=2, number=number)))
    assert code == 130 and "Traceback" not in err
    assert (checkpoint / C.PARTIAL).exists() and not (checkpoint / C.FILE).exists()
    counted = "n = []\nreal = C.add_sequence\nC.add_sequence = lambda *a: (real(*a), n.append(1))\n"
    counted += "import atexit\natexit.register(lambda: print('sequences', len(n)))"
    code, out, err = ended(process(flags(checkpoint, text, 4), counted))
    assert code == 0 and "sequences 2" in out, "it did not continue where it was"
    assert (checkpoint / C.FILE).read_bytes() == want
    assert not (checkpoint / C.PARTIAL).exists() and not list(checkpoint.glob("*.tmp"))


@pytest.mark.slow
def test_interrupted_at_every_sequence_gives_the_same_file(checkpoint, text, clean):
    want = clean(4)
    for _ in range(3):  # one sequence each time
        assert ended(process(flags(checkpoint, text, 4), INTERRUPT.format(after=1, number="SIGINT")))[0] == 130
    assert ended(process(flags(checkpoint, text, 4)))[0] == 0
    assert (checkpoint / C.FILE).read_bytes() == want


@pytest.mark.slow
def test_another_command_does_not_continue_from_the_partial_file(checkpoint, text, clean):
    want = clean(3)
    assert ended(process(flags(checkpoint, text, 4), INTERRUPT.format(after=2, number="SIGINT")))[0] == 130
    assert ended(process(flags(checkpoint, text, 3)))[0] == 0
    assert (checkpoint / C.FILE).read_bytes() == want


@pytest.mark.slow
def test_a_spoilt_partial_file_is_ignored(checkpoint, text, clean):
    want = clean(3)
    assert ended(process(flags(checkpoint, text, 3), INTERRUPT.format(after=2, number="SIGINT")))[0] == 130
    partial = checkpoint / C.PARTIAL
    partial.write_bytes(partial.read_bytes()[:-1000])
    assert ended(process(flags(checkpoint, text, 3)))[0] == 0
    assert (checkpoint / C.FILE).read_bytes() == want


def test_a_partial_file_with_a_tensor_missing_leaves_nothing_in_the_sums(tmp_path):
    """What cannot be continued starts from zero: not from the half that could be read."""
    args, settings, path = small(2, 2, 16)[0].args, dict(a=1), tmp_path / "partial"
    full = C.Moments(args, "cpu")
    for total in full.sums.values():
        total += 1
    full.tokens = 7
    C.save_partial(path, settings, full, 3)
    again = C.Moments(args, "cpu")
    assert C.load_partial(path, settings, again) == 3 and again.tokens == 7
    with safe_open(path, framework="pt") as f:
        meta = f.metadata()
    tensors = load_file(path)
    tensors.pop("x")
    save_file(tensors, path, metadata=meta)
    empty = C.Moments(args, "cpu")
    assert C.load_partial(path, settings, empty) == 0 and empty.tokens == 0
    assert not any(total.any() for total in empty.sums.values())


# where SIGKILL strikes: before, in the middle of and after each of the writes
KILL = """
import safetensors.torch
def die():
    os.kill(os.getpid(), signal.SIGKILL)
C.SAVE_EVERY = {every}
real_save, real_replace, calls = C.save_file, os.replace, []
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
C.save_file, C.os.replace = save, replace
"""


@pytest.mark.parametrize(
    ("write", "where"),
    [(5, "middle"), *(pytest.param(w, at, marks=pytest.mark.slow) for w in (1, 2, 5)
                      for at in ("before", "middle", "written", "renamed") if (w, at) != (5, "middle"))],
)  # fmt: skip
def test_killed_in_a_write_leaves_the_old_file_or_the_new_one(checkpoint, text, clean, write, where):
    """A partial file after each of four sequences, then the result; an old calibration is there."""
    new, old = clean(4), b"the file of before"
    (checkpoint / C.FILE).write_bytes(old)
    p = process(flags(checkpoint, text, 4), KILL.format(every=-1, write=write, where=where))
    assert ended(p)[0] == -signal.SIGKILL
    assert (checkpoint / C.FILE).read_bytes() == (new if (write, where) == (5, "renamed") else old)
    if (write, where) == (5, "middle"):
        return  # that the command can be given again is for the slow tests
    assert ended(process(flags(checkpoint, text, 4)))[0] == 0
    assert (checkpoint / C.FILE).read_bytes() == new
    assert not list(checkpoint.glob("*partial*")) and not list(checkpoint.glob("*.tmp")), (
        "a kill leaves litter for good"
    )
    load_checkpoint(checkpoint)  # what lies beside the weights is not taken for weights


@pytest.mark.slow
def test_killed_at_any_moment_leaves_the_old_file_or_the_new_one(checkpoint, text, clean):
    new = clean(6)
    started = time.time()
    assert ended(process(flags(checkpoint, text, 6)))[0] == 0
    whole, old = time.time() - started, b"the file of before"
    for share in np.linspace(0.3, 1.0, 8):
        (checkpoint / C.FILE).write_bytes(old)
        p = process(flags(checkpoint, text, 6))
        time.sleep(whole * share)
        p.kill()
        ended(p)
        assert (checkpoint / C.FILE).read_bytes() in (old, new)
        load_checkpoint(checkpoint)


@pytest.mark.slow
def test_a_real_process_with_the_default_text_and_bad_flags(checkpoint):
    code, _, err = ended(process(["--checkpoint", str(checkpoint), "--samples", "2", "--seq-len", "64",
                                  "--random-tokens", "16"]))  # fmt: skip
    assert code == 0, err
    assert C.Calibration.load(checkpoint, load_checkpoint(checkpoint).args).meta["files"] == "default"
    code, _, err = ended(process(["--checkpoint", "/no/such"]))
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err
