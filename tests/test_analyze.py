"""analyze.py: measures with known answers, analyses where theory says what they must find, and the command."""

import argparse
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cache.calibration import Calibration
from kernels.rope import apply_rope
from loading.checkpoint import random_transformer, save_checkpoint_tensors
from loading.config import args_from_hf
from model import Block, ModelArgs
from runtime.corpus import Document
from scripts.eval import analyze as A
from scripts.eval.analyses import bases, heads, shift
from scripts.eval.analyses import measures as M
from scripts.eval.analyses.capture import Capture, Layer
from tests.oracles import softmax

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"
CONFIG = dict(model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=16, vocab_size=2048, max_position_embeddings=128,
              torch_dtype="float32")  # fmt: skip


def capture(S=64, n=2, g=2, D=16):
    """Random vectors."""
    rope = ModelArgs(head_dim=D).rotary(1, S)
    cos, sin = (t[0, :, None] for t in (rope.cos, rope.sin))
    q, k, v = (torch.randn(S, heads, D) for heads in (n * g, n, n))
    return Capture(q, k, v, apply_rope(q, cos, sin), apply_rope(k, cos, sin))


def layer(captures, calib=None, **text):
    c = captures[0]
    args = ModelArgs(dim=32, n_head=c.q.shape[1], n_kv_head=c.k.shape[1], head_dim=c.k.shape[2], ffn_dim=8)
    return Layer(1, Block(args, 1), calib, dict(code=captures, prose=captures) | text)


# ---- measures ----


def test_a_diagonal_covariance():
    """Tokens +-sqrt(lambda_i) e_i: the eigenvalues are lambda / m, and the mean is zero."""
    eigenvalues = torch.tensor([60.0, 25, 10, 5])
    x = torch.diag(eigenvalues.sqrt())
    for centred in (True, False):
        c = M.covariance(torch.cat((x, -x)), centred)
        assert torch.allclose(c, torch.diag(eigenvalues / 4).double())
    assert torch.allclose(M.covariance(x + 100), M.covariance(x), atol=1e-6)


def test_attention_mass_is_causal_softmax_per_group():
    c = capture(S=20)
    at = torch.tensor([3, 19])
    mass = M.attention_mass(c.q_rot[at], c.k_rot, at)
    for i, h in np.ndindex(2, 4):
        t = int(at[i])
        logits = c.k_rot[: t + 1, h // 2].double() @ c.q_rot[t, h].double() / 4
        assert np.allclose(mass[i, h // 2, h % 2, : t + 1], softmax(logits.numpy()), atol=1e-6)
        assert mass[i, h // 2, h % 2, t + 1 :].sum() == 0


def test_top_takes_as_many_as_each_row_wants():
    chosen = M.top(torch.tensor([[1.0, 4, 3, 2], [4, 3, 2, 1]]), torch.tensor([2, 1]))
    assert chosen.tolist() == [[False, True, True, False], [True, False, False, False]]
    assert M.covered(torch.tensor([[1.0, 2, 3, 4], [7, 1, 1, 1]]), chosen) == pytest.approx((0.5 + 0.7) / 2)


def test_residual_energy_and_subspace_overlap():
    e = torch.eye(4)[None]
    x = torch.tensor([[[3.0, 0, 0, 0], [0, 4, 0, 0]]])
    assert M.residual_energy(x, e[..., :2]) == 0 and M.residual_energy(x, e[..., 2:]) == 1
    assert M.residual_energy(x, e[..., :1]) == pytest.approx(16 / 25)
    u = torch.linalg.qr(torch.randn(3, 8, 4)).Q
    turned = u @ torch.linalg.qr(torch.randn(3, 4, 4)).Q
    assert M.subspace_overlap(u, u) == pytest.approx(1, abs=1e-5) == M.subspace_overlap(u, turned)
    assert M.subspace_overlap(e[..., :2], e[..., 1:3]) == 0.5
    assert M.subspace_overlap(e[..., :2], e[..., 2:]) == 0


# ---- analyses ----


def test_latent_scores_of_all_coordinates_are_inner_products_before_rotation():
    c = capture()
    basis = torch.linalg.qr(torch.randn(32, 32)).Q
    scores = c.latent_scores(basis, 32)
    for i, t in enumerate(c.at.tolist()):
        expected = torch.einsum("ngd,snd->s", c.q[t].view(2, 2, 16), c.k[: t + 1])
        assert torch.allclose(scores[i, : t + 1], expected, atol=1e-4) and scores[i, t + 1 :].isneginf().all()


def test_a_basis_of_the_test_text_itself_is_the_oracle():
    c = capture(S=128)
    r = shift.shift(layer([c], calibration=[c]))
    for name in ("keys", "values"):
        for rank in shift.OJA_RANKS:
            x = r[f"{name}, {rank}"]
            assert x["rer_static"] == pytest.approx(x["rer_oracle"], rel=1e-4) == x["rer_in_domain"]
            assert x["so_static"] == pytest.approx(1, abs=1e-4)
            for rule in shift.RULES:
                assert x[f"rer_{rule}"] > x["rer_oracle"] and x[f"so_{rule}"] < 1
        assert r[f"{name}, 0.8"]["rer_static"] < r[f"{name}, 0.6"]["rer_static"]


def test_adaptation_finds_the_directions_of_new_text():
    """Values of prose lie in 8 of 16 channels, those of code in part in others: one step helps, never past the best."""
    prose, code = capture(S=256), capture(S=256)
    prose.v[..., 8:] *= 0.05
    code.v[..., 4:12] *= 2
    x = shift.shift(layer([code], prose=[prose], calibration=[prose]))["values, 0.6"]
    for rule in set(shift.RULES) - {"raw"}:  # which diverges
        assert x["rer_in_domain"] < x["rer_oracle"] < x[f"rer_{rule}"] < x["rer_static"]
        assert x["so_static"] < x[f"so_{rule}"] < 1


def test_important_tokens_are_those_that_the_last_queries_look_at():
    c = capture(S=128)
    c.k_rot = 0.01 * c.k_rot
    c.q_rot = c.q_rot.abs()
    c.k_rot[[5, 20, 31, 90]] = 3.0  # 90 is in the second half: not of the prompt
    chosen = shift.important(c).tolist()
    assert chosen == sorted(chosen), "in the order of the text"
    assert len(chosen) == math.ceil(0.05 * 64) and {5, 20, 31} <= set(chosen) and max(chosen) < 64


def test_a_basis_moves_attention_by_what_it_leaves_out():
    """Keys that lie in as many directions as the rank: nothing moves. The text's own basis beats one of another text,
    and none beats the best of its rank."""
    c, flat = capture(), torch.einsum("snr,nrd->snd", torch.randn(64, 2, 9), torch.randn(2, 9, 16))
    c = Capture(c.q, flat, c.v, c.q_rot, flat)
    other = torch.linalg.qr(torch.randn(2, 16, 16)).Q
    assert bases.OJA_RANK * 16 > 9
    assert bases.ojakv(c, other)["text, K alone"] < 1e-5 < bases.ojakv(c, other)["moved: calibrated"]
    rows = [bases.ojakv(capture(), other) for _ in range(20)]
    mean = {name: sum(r[name] for r in rows) / 20 for name in rows[0]}
    assert 0 < mean["best possible"] < mean["text, K and Q"] < mean["moved: calibrated"] < 1


def test_heads_marks_what_razor_protects():
    induction = torch.zeros(2, 4)
    induction[1, 2] = 0.9
    calib = Calibration({f"layers.{i}.razor.{n}": induction[i] for i in range(2) for n in ("induction", "echo")}, 2)
    after = torch.stack((induction, torch.zeros(2, 4), induction.roll(1, -1) * 1.1, torch.zeros(2, 4)), -1)
    calib.tensors |= {f"layers.{i}.razor.after": after[i] for i in range(2)}
    found = heads.heads(layer([capture()], calib))
    assert found["protected"] == [1] and found["protected_by_best_place"] == [1] and found["place"][3] == 3


# ---- the command ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = random_transformer(args_from_hf(CONFIG), "cpu", torch.float32)
    save_file(save_checkpoint_tensors(model, torch.float32), folder / "model.safetensors")
    for file in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return folder


@pytest.fixture
def short_corpus(monkeypatch):
    """One file, instead of seconds of reading."""
    text = Path(argparse.__file__).read_text()[:20_000]
    docs = [Document(f"{kind}{out}", kind, out, text) for kind in ("code", "prose") for out in (True, False)]
    monkeypatch.setattr(A, "collect", lambda **kw: docs)


def test_two_analyses_with_plots(tmp_path, checkpoint, short_corpus, cli):
    pytest.importorskip("matplotlib")
    out = tmp_path / "analysis.json"
    code, text, err = cli(A, "--checkpoint", checkpoint, "--only", "shift,heads", "--samples", "1",
                          "--seq-len", "64", "--out", out, "--plots", tmp_path / "plots")  # fmt: skip
    assert code == 0, err
    data = json.loads(out.read_text())
    assert list(data["analyses"]) == ["shift", "heads"] and data["seq_len"] == 64
    for name, result in data["analyses"].items():
        assert len(result["layers"]) == 2 and f"\n{name}: " in text
        assert (tmp_path / "plots" / f"analysis_{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_all_analyses_calibrate_in_memory(checkpoint, short_corpus, cli):
    code, text, err = cli(A, "--checkpoint", checkpoint, "--samples", "1", "--seq-len", "64", "--json",
                          "--weights", "int8:channel")  # fmt: skip
    assert code == 0 and "in memory" in err
    data = json.loads(text)
    assert data["weights"] == "int8:channel"
    assert list(data["analyses"]) == list(A.ANALYSES) and "in memory" in data["calibration"]
    assert all(0 <= x <= 1 for r in data["analyses"]["bases"]["layers"] for x in r.values())
    assert not (checkpoint / "calibration.safetensors").exists()


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--only", "bases,base"], "unknown analysis 'base'"),
        (["--seq-len", "129"], "--seq-len 129 is out of range: this model takes 64 to 128"),
        (["--seq-len", "0"], "--seq-len 0 is out of range"),
        (["--samples", "0"], "--samples 0 is out of range"),
        (["--weights", "int3"], "--weights int3: use"),
        (["--plots", "/nowhere/plots"], "/nowhere/plots does not exist"),
        (["--out", "/nowhere/x.json"], "/nowhere does not exist"),
        (["--out", __file__, "--calibration", __file__], "is a file that this run reads"),
    ],
)
def test_bad_input_is_one_line(checkpoint, argv, said, refused):
    assert said in refused(A, "--checkpoint", checkpoint, *argv)
