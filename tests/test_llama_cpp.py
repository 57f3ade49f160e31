"""llama.cpp as a peer: the GGUF that is written for it holds our model, and its program is run as said."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from formats_files import sentencepiece_vocab
from formats_files import write_gguf as converted
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file

from engine import LLM
from loading.checkpoint import load_checkpoint, random_transformer
from model import ModelArgs
from runtime.machine import TINY
from scripts.bench import bench_generate
from scripts.bench.llama_cpp import LlamaCpp, kind_of, write_gguf
from scripts.bench.peer_runs import Work
from scripts.shared import timing
from weights import WeightFormat

SIZES = dict(dim=64, n_layer=2, n_head=4, n_kv_head=2, head_dim=32, ffn_dim=96, vocab_size=128, max_seq_len=64)
MODELS = {"llama": {}, "tied": dict(tie_embeddings=True), "qwen2": dict(qkv_bias=True), "qwen3": dict(qk_norm=True)}


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gguf_is_our_model(name, weights, tmp_path):
    """Read back by weights/gguf.py, which is tested on llama.cpp's own files: the same logits."""
    weight_format = None if weights == "fp32" else WeightFormat.parse(weights)
    model = random_transformer(
        ModelArgs(**SIZES, **MODELS[name]), "cpu", torch.float32, seed=1, weight_format=weight_format
    )
    file = tmp_path / "model.gguf"
    write_gguf(model, file)
    assert kind_of(model) == dict(fp32="F32", bf16="BF16", int8="Q8_0", int4="Q4_0")[weights]
    again = load_checkpoint(file, weight_format=WeightFormat.parse("fp32"))
    tokens = torch.randint(128, (1, 40))
    with torch.inference_mode():
        want, got = model(tokens), again(tokens)
    # random codes seldom reach 127, so that Q8_0 has other scales, and rounds; our int4 has zeros, Q4_0 has none
    assert (got - want).std() <= dict(fp32=1e-5, bf16=1e-5, int8=0.03, int4=0.3)[weights] * want.std()


FAKE = """#!{python}
import json, os, sys
a = sys.argv
open({log!r}, "a").write(json.dumps([os.getpid(), *a[1:]]) + "\\n")
assert open(a[a.index("-m") + 1], "rb").read(4) == b"GGUF"
for n in map(int, a[a.index("-n") + 1].split(",")):
    {fault}
    row = dict(samples_ns=[(n or 3) * 10**6], build_commit="abc", cpu_info="a processor" * 300)
    # many fill the pipe: a process that is not awaited does not end. One is written whole, being shorter than a page:
    # of longer ones, interrupted by a signal, CPython 3.11 lost up to a page
    print(json.dumps(row), flush=True)
"""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(timing, "PROBE_BYTES", dict(cpu=1 << 16, cuda=1 << 20))
    with torch._dynamo.config.patch(recompile_limit=8):
        yield


@pytest.fixture
def program(tmp_path):
    def write(fault=""):
        file = tmp_path / "llama-bench"
        file.write_text(FAKE.format(python=sys.executable, log=str(tmp_path / "log"), fault=fault))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return file, tmp_path / "log"

    return write


RUN = ("--mode", "eager", "--new", "4", "--rounds", "2", "--json")


def test_it_takes_turns_with_ours(program, cli):
    file, log = program()
    argv = ["--peer", f"llama.cpp:{file}", "--batch", "1", "2", "--length", "32", "--weights", "int8"]
    argv += ["--kv-dtype", "bf16"]
    code, out, err = cli(bench_generate, *argv, *RUN)
    assert code == 0, err
    rows = {(r["batch"], r["run"]): r for r in json.loads(out)["rows"]}
    theirs = rows[1, "llama.cpp Q8_0"]
    assert theirs["tokens_per_s"] == pytest.approx(1000) and theirs["build"] == "abc" and theirs["gguf_bytes"] > 5e6
    speed = bench_generate.speed_of(rows[1, "full eager"])  # tokens_per_s is rounded
    assert rows[1, "full eager"]["times_llama_cpp"] == round(speed / 1000, 2)
    assert "one sequence" in rows[2, "llama.cpp Q8_0"]["error"] and "times_llama_cpp" not in rows[2, "full eager"]
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(calls) == 4, "one that decodes, three prompts: of a warm-up and two rounds"
    assert calls[0][-8:-6] == ["-p", "0"] and calls[0][-5].startswith("1,4,4,4,") and calls[0][-4:-2] == ["-d", "32"]
    assert all(call[-4:] == ["-p", "32", "-n", "0"] for call in calls[1:])
    assert [calls[0][calls[0].index(flag) + 1] for flag in ("-ctk", "-ctv", "-fa")] == ["bf16", "bf16", "off"]
    with pytest.raises(ProcessLookupError):
        os.kill(calls[0][0], 0)


def test_its_process_is_stopped_while_others_have_their_turn(program):
    file, log = program()
    model = random_transformer(ModelArgs(**SIZES), "cpu", torch.float32, seed=1)
    run = LlamaCpp(Work(model, 1, 16, 5, True), str(file), 1)

    def state():
        return Path(f"/proc/{json.loads(log.read_text())[0]}/stat").read_text().rpartition(")")[2].split()[0]

    def stopped():
        for _ in range(500):  # the signal may take a moment
            if state() == "T":
                return True
            time.sleep(0.01)
        return False

    try:
        run.open()
        assert stopped()
        for _ in range(3):
            assert run() == dict(step=1e-3) and stopped()
    finally:
        run.close()
    with pytest.raises(FileNotFoundError):
        state()


def test_one_that_fails_is_a_line(program, cli):
    file, _ = program("sys.exit('error: no such model')")
    code, out, _ = cli(bench_generate, "--peer", f"llama.cpp:{file}", "--batch", "1", "--length", "16", *RUN)
    rows = {r["run"]: r for r in json.loads(out)["rows"]}
    assert code == 0 and rows["llama.cpp F32"]["error"].endswith("llama-bench ended: error: no such model")
    assert "tokens_per_s" in rows["full eager"]


def test_what_is_no_program_is_refused(refused):
    assert "llama-bench" in refused(bench_generate, "--peer", f"llama.cpp:{TINY}")


PROGRAM = Path(os.environ.get("KV_FAST_LLAMA_CPP", ""), "llama-completion")


@pytest.mark.real
@pytest.mark.skipif(not PROGRAM.is_file(), reason="KV_FAST_LLAMA_CPP names no folder with llama.cpp's llama-completion")
@pytest.mark.parametrize(
    "prompt", ["import os", "def main():\n    ", "The code for red-door is 5371. The code for red-door"]
)
def test_llama_cpp_itself_writes_the_same_text(prompt, tmp_path):
    """The shipped model in fp32 as a GGUF, greedy, in llama.cpp's reader and tokenizer and in ours."""
    file = tmp_path / "tiny.gguf"
    config, tensors = json.loads((TINY / "config.json").read_text()), load_file(TINY / "model.safetensors")
    converted(file, config, tensors, Q.F32, lambda w: (sentencepiece_vocab(w, TINY), w.add_add_space_prefix(False)))
    command = [PROGRAM, "-m", file, "-t", "1", "-ngl", "0", "--temp", "0", "-n", "24", "-no-cnv", "--no-warmup",
               "--no-display-prompt", "-ctk", "f32", "-ctv", "f32", "-p", prompt]  # fmt: skip
    theirs = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True).stdout
    (ours,) = LLM(file).generate(prompt, max_new_tokens=24)
    assert len(ours.tokens) == 24 and theirs.rstrip("\n") == ours.text.rstrip("\n")
