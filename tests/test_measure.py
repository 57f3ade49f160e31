"""scripts/report/measure.py: results are kept and continued while their hot path is unchanged, also side by side."""

import json
import signal
import sys
import threading

import pytest

from runtime.errors import InputError
from scripts.report import measure, verify
from scripts.shared import options, results


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """measure in an empty folder: `commit` and `changed` are what the test says, commands write what it says."""
    state = dict(commit="first", changed=[], rows=[1], status=0, found=[])
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "commit", lambda: state["commit"])
    monkeypatch.setattr(measure, "changed", lambda *a: state["changed"] if a[0] != state["commit"] else [])

    def run(argv, limit, log):
        out = tmp_path / argv[argv.index("--out") + 1]
        path = out if out.suffix else out / "compare.json"
        state["found"].append(path.exists())
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(dict(commit=state["commit"], command=" ".join(argv[1:]), rows=state["rows"])))
        return state["status"]

    monkeypatch.setattr(measure, "run", run)
    return state


@pytest.mark.parametrize("command", ["eval.compare --lengths 64", "bench.bench_attention"])
def test_a_part_is_kept_while_its_hot_path_is_unchanged(fake, command):
    def part():
        return measure.part("q-0", command, 60)

    assert part()["commit"] == "first" and fake["found"] == [False]
    fake["commit"] = "second"
    assert part()["commit"] == "first" and len(fake["found"]) == 1
    fake["changed"] = ["model.py"]
    assert part()["commit"] == "second" and fake["found"] == [False, False]  # nothing of the first was left
    assert measure.part("q-0", command + " --rounds 2", 60) and fake["found"] == [False] * 3  # another command


def test_an_interrupted_part_goes_on_and_is_left_out_until_then(fake):
    fake["status"] = None
    assert measure.part("q-0", "eval.compare --lengths 64", 60) is None
    assert measure.part("q-1", "bench.bench_attention", 60)["rows"] == [1]  # the rows that are there
    fake |= dict(status=0, commit="second")
    assert measure.part("q-0", "eval.compare --lengths 64", 60)["rows"] == [1]
    assert fake["found"] == [False, False, True]
    fake["status"] = 2
    with pytest.raises(InputError, match="failed with 2"):
        measure.part("q-2", "bench.bench_attention", 60)


def test_a_committed_result_is_not_measured_again(fake, monkeypatch):
    line = "eval.compare --lengths 64 --checkpoint x/y/m.gguf"
    there = dict(
        command="python -m scripts.eval.compare --lengths 64 --checkpoint m.gguf --out a --resume", commit="first"
    )
    monkeypatch.setattr(measure, "known_commands", lambda: frozenset([measure.plain(line)]))
    assert measure.part("q-0", line, 60, [there]) is there
    fake |= dict(commit="second", changed=["model.py"])
    assert measure.part("q-0", line, 60, [there])["commit"] == "second"


def test_two_at_a_time_but_not_what_is_timed(cli, fake, monkeypatch, tmp_path):
    (tmp_path / "results").mkdir()
    both = threading.Barrier(2, timeout=20)
    one = measure.run
    monkeypatch.setattr(measure, "run", lambda *a: both.wait() and 0 or one(*a))
    lines = ["eval.compare --part 1/2", "eval.compare --part 2/2"]
    monkeypatch.setattr(measure, "commands", lambda *a: dict(found=lines, speed=["bench.bench_attention"]))
    status, out, err = cli(measure, "--only", "found", "--jobs", "2", "--json")
    assert status == 0 and json.loads(out) == ["results/accuracy/found.json"], err
    assert len(json.loads((tmp_path / "results/accuracy/found.json").read_text())["runs"]) == 2
    status, _, err = cli(measure, "--jobs", "2")
    assert status == 2 and "the times of speed: give --only found" in err


def test_a_measurement_that_takes_too_long_is_interrupted(tmp_path):
    """As by Ctrl-C: it keeps what it has. Until it is ready, the signal is held back."""
    code = (  # a shell that starts this in the background has Ctrl-C ignored
        "import pathlib, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})\n time.sleep(99)\n"
        "except KeyboardInterrupt:\n pathlib.Path('kept').touch()"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits it
    try:
        assert measure.run([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{code}"], 1) is None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (tmp_path / "kept").exists() and measure.run([sys.executable, "-c", "exit(3)"], 60) == 3


# ---- hot paths ----

BEFORE = (
    '"""What it is."""\nimport triton\n\ndef f(x):  # why\n    return x\n\n@triton.jit\ndef kernel(x):\n    return x\n'
)


@pytest.mark.parametrize(
    ("now", "cpu", "gpu"),
    [
        (BEFORE.replace("What it is", "Other words").replace("# why", "# because"), False, False),
        (BEFORE.replace("kernel(x):\n    return x", "kernel(x):\n    return 2 * x"), False, True),
        (BEFORE.replace("f(x):  # why\n    return x", "f(x):\n    return 2 * x"), True, True),
    ],
    ids=["words", "a Triton kernel", "code"],
)
def test_words_change_no_result_and_triton_none_of_a_cpu(now, cpu, gpu):
    assert (results.code(now, False) != results.code(BEFORE, False)) == cpu
    assert (results.code(now, True) != results.code(BEFORE, True)) == gpu


def test_comments_of_cpp_change_no_result():
    before = 'f("https://a", x);  // why\n// and how\ng(y);\n'
    assert results.cpp_code(before) == 'f("https://a", x);\ng(y);\n'
    assert results.cpp_code(before.replace("g(y)", "g(z)")) != results.cpp_code(before)


def test_changed_names_the_files_of_the_hot_path(monkeypatch, tmp_path):
    def git(*args):
        if args[0] == "diff":
            assert "scripts/eval/perplexity.py" in args and "scripts" not in args
            return "model.py\nkernels/x.cpp\nkernels/new.py"
        name = args[1].partition(":")[2]
        return (tmp_path / name).read_text() + "# words"

    (tmp_path / "kernels").mkdir()
    for name in ("model.py", "kernels/x.cpp", "kernels/new.py"):
        (tmp_path / name).write_text(BEFORE)
    monkeypatch.setattr(results, "git", git)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "commit", lambda: "abc1234")
    command = f"python -m scripts.eval.perplexity {tmp_path}"  # results.changed remembers
    assert results.changed("abc1234", command) == []
    assert results.changed("abc1233", command) == ["kernels/x.cpp"]
    assert results.changed("abc1233+dirty", command) == ["files without a commit (abc1233+dirty)"]


def test_resuming_looks_at_the_hot_path_and_not_at_the_commit(monkeypatch, tmp_path):
    old = dict(commit="first", device="A", settings=dict(seed=1), rows=[1])
    (tmp_path / "x.json").write_text(json.dumps(old))
    data = old | dict(commit="second", device="B", command="")
    monkeypatch.setattr(options, "changed", lambda *a: [])
    assert options.earlier(str(tmp_path / "x.json"), data, ("commit", "settings"), ("rows",)) == dict(rows=[1])
    assert data["commit"] == "first" and data["device"] == "A and B"
    monkeypatch.setattr(options, "changed", lambda *a: ["model.py"])
    with pytest.raises(InputError, match=r"has another version of model\.py"):
        options.earlier(str(tmp_path / "x.json"), data, ("commit", "settings"), ("rows",))


# ---- verified against an earlier commit ----


@pytest.fixture
def verified(tmp_path, monkeypatch):
    """verify in a folder with a result of accuracy and one of speed; `numbers` of each folder are as the test says."""
    state = dict(now={}, then={})
    for name in ("accuracy/known", "box/speed"):
        (tmp_path / "results" / name).parent.mkdir(parents=True, exist_ok=True)
        runs = [dict(commit="old", command="of this"), dict(commit="older", command="of another")]
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(dict(runs=runs)))
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    monkeypatch.setattr(verify, "git", lambda *a: "")
    monkeypatch.setattr(verify, "commit", lambda: "new")
    monkeypatch.setattr(verify, "changed", lambda since, command, until=None: ["model.py"] * (since == "older"))
    monkeypatch.setattr(verify, "numbers", lambda tree, *_: state["now" if tree == tmp_path else "then"])
    state["marks"] = lambda name: [
        run.get("same_as") for run in json.loads((tmp_path / "results" / f"{name}.json").read_text())["runs"]
    ]
    return state


def test_results_of_equal_numbers_are_marked(verified):
    verified["now"] = verified["then"] = {"sals, 1: kl": 0.25, "sals, 1: tokens": 64}
    assert verify.verify("base", False) == 1
    assert verified["marks"]("accuracy/known") == ["new", None] and verified["marks"]("box/speed") == [None, None]
    verified["now"] = verified["then"] | {"sals, 1: kl": 0.2500001}
    with pytest.raises(InputError, match=r"1 of 2 numbers have changed: sals, 1: kl is 0.2500001 and was 0.25"):
        verify.verify("base", False)
    verified["now"] = {"sals, 1: kl": 0.25}
    with pytest.raises(InputError, match=r"sals, 1: tokens is None and was 64"):
        verify.verify("base", False)


def test_results_of_the_same_speed_are_marked(verified):
    verified["then"] = {
        "sals, 1: seconds_per_step": [0.02, 0.01, 0.09],
        "full, 0: operator": dict(each=[2.0, 9.0]),
        "full, 0: dense": dict(each=[3.0, 9.0]),
    }
    verified["now"] = {
        "sals, 1: seconds_per_step": [0.0208, 0.03, 0.02],
        "full, 0: operator": dict(each=[3.8, 18.0]),
        "full, 0: dense": dict(each=[6.0, 18.0]),
    }
    assert verify.verify("base", True) == 1
    assert verified["marks"]("accuracy/known") == [None, None] and verified["marks"]("box/speed") == ["new", None]
    verified["now"]["sals, 1: seconds_per_step"] = [0.0228]
    with pytest.raises(InputError, match=r"0.946 times as fast, sals 0.877"):
        verify.verify("base", True)


def test_only_what_seems_slower_gets_a_second_look(verified, monkeypatch):
    asked = []  # of the code that is verified, whose sals is slow at first

    def numbers(tree, command, out):
        methods = command.partition(" --method ")[2]
        asked.extend([methods] * (tree == verify.ROOT))
        slow = 1.12 if tree == verify.ROOT and len(asked) < 5 else 1.0
        return {f"{m}, 0: seconds_per_step": [slow if m == "sals" else 1.0] for m in methods.split()}

    monkeypatch.setattr(verify, "TIMED", {"bench --method full sals quest kivi": 2})
    monkeypatch.setattr(verify, "numbers", numbers)
    assert verify.verify("base", True) == 1
    assert asked == ["full sals quest kivi"] * 2 + ["sals"] * 6
