"""scripts/eval/equal_bytes.py: the setting of a method at a target is the largest of its ladder that stays within."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch

from checkpoint import load_checkpoint
from runtime import TINY
from scripts.eval import equal_bytes, evaluation
from scripts.eval.equal_bytes import BOUNDS, BY_AXIS, HELD, READ, Sizes
from scripts.eval.evaluation import NEW
from scripts.report import accuracy
from scripts.shared import options

T = 480  # where `palu`, whose bases weigh on short contexts, rises, too
CELLS = [(axis, method) for axis, methods in BY_AXIS.items() for method in methods]


@pytest.fixture(scope="module")
def sizes():
    model = load_checkpoint(TINY)
    model.kv_dtype = torch.bfloat16
    return Sizes(model, 8)


@pytest.mark.parametrize(("axis", "method"), CELLS)
def test_ladders_rise(sizes, axis, method):
    """From few bytes to many: what a search by halves needs."""
    ladder = BY_AXIS[axis][method](T, 0.25)
    some = ladder[:: max(1, len(ladder) // 5)]
    found = [sizes.share(axis, method, spec, T) for spec in some]
    assert found == sorted(found) and found[0] < found[-1]


@pytest.mark.parametrize("target", ["1/2", "1/8"])
@pytest.mark.parametrize(("axis", "method"), [("kv", "hadamard"), ("kv", "kivi"), ("read", "quest")])
def test_the_largest_setting_within(sizes, axis, method, target):
    target, ladder = Fraction(target), BY_AXIS[axis][method](T, float(Fraction(target)))
    spec, share = sizes.best(axis, method, target, T)
    every = [sizes.share(axis, method, s, T) for s in ladder]
    within = [i for i, s in enumerate(every) if s <= target]
    assert spec == (ladder[within[-1]] if within else None)
    assert share == round(every[within[-1] if within else 0], 4)


@pytest.mark.parametrize("spec", ["full", "snapkv,budget=100", "self_index", "sals,budget=100", "quest,budget=64"])
def test_sizes_are_those_of_real_caches(sizes, spec):
    model = load_checkpoint(TINY)
    model.kv_dtype = torch.bfloat16
    read = []
    for name in ("full", spec):
        model.setup(name, sizes.batch, T + NEW, NEW, {})
        read.append((model.kv_bytes(), sum(m.traffic(T - 1) for m in model.cache)))
    held, full = read[1], read[0]
    assert sizes.of(spec, T) == ((held[0] / full[0], held[1] / full[1]) if spec != "full" else full)


def test_cells_have_rows_and_nothing_runs_twice(cli, tmp_path, monkeypatch, few_texts):
    out = tmp_path / "x.json"
    argv = ("--method", "streaming", "random", "kivi", "--kv", "3/4,1/16", "--read", "1/4", "--lengths", 160, "--tasks",
            "needle", "--samples", 3, "--batch-size", 2, "--at-once", 2, "--device", "cpu", "--out", out)  # fmt: skip
    status, printed, _ = cli(equal_bytes, *argv)
    data = json.loads(out.read_text())
    rows = {r["method"]: r for r in data["rows"]}
    assert status == 0 and all(spec in printed for spec in rows)
    assert rows.keys() == {"full", *(c["spec"] for c in data["cells"])}
    assert all(len(r["needle_each"]) == 3 for r in rows.values())
    for c in data["cells"]:
        row = rows[c["spec"]]
        share = row["kv_share" if c["axis"] == "kv" else "read_share"]
        assert c["method"] in BOUNDS or share <= float(Fraction(c["target"]))
    assert [(m["method"], m["target"]) for m in data["missing"]] == [("kivi", "1/16")]
    assert all(m["least"] > float(Fraction(m["target"])) for m in data["missing"])

    monkeypatch.setattr(evaluation.Evaluation, "run_rows", None)  # would not be callable
    assert cli(equal_bytes, *argv, "--resume")[0] == 0 and json.loads(out.read_text())["rows"] == data["rows"]


def test_tasks_of_several_files_stand_together(monkeypatch):
    """A setting that two files measured, one a task, is one cell of the table; so is full."""
    held = dict(axis="kv", target="1/2", method="tova", seq_len=64, spec="tova,budget=32")
    spec, known = held["spec"], dict(seq_len=64, kv_share=0.5, read_share=0.5)

    def file(task, found, full):
        rows = [
            dict(known, method=m, **{task: sum(x) / 4, f"{task}_each": x}) for m, x in ((spec, found), ("full", full))
        ]
        return dict(rows=rows, cells=[held])

    both = [file("needle", [1, 1, 0, 0], [1, 1, 1, 1]), file("key_value", [1, 0, 0, 0], [1, 1, 1, 0])]
    monkeypatch.setattr(accuracy, "runs", lambda question: both)
    monkeypatch.setattr(accuracy, "TOKENS", 64)
    (cell,) = accuracy.cells()
    assert (cell["row"]["needle"], cell["row"]["key_value"]) == (0.5, 0.25)
    text = accuracy.equal_bytes()
    assert "50 (15-85) / 25 (5-70)" in text and "found of needle / key_value" in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--method", "full"], ["--kv", "2"], ["--read", "x"], ["--read", "1/0"], ["--lengths", "a"], ["--lengths", 64],
        ["--tasks", "perplexity"], ["--samples", 0], ["--resume"], ["--out", "/no/such/folder/x.json"],
    ],
    ids=str,
)  # fmt: skip
def test_wrong_use(cli, argv, monkeypatch):
    monkeypatch.setattr(options, "load_checkpoint", None)  # what is wrong is told before anything is read
    status, out, err = cli(equal_bytes, *argv)
    assert status == 2 and not out and err.startswith("error: ") and err.count("\n") == 1, err


def test_settings_alone(cli):
    status, out, _ = cli(equal_bytes, "--settings", "--lengths", 256, "--method", "tova", "loki", "--device", "cpu")
    assert status == 0 and "tova,budget=" in out and "loki,dims=" in out
    assert {line.split()[0] for line in out.splitlines()} == {"256"}
    assert {*HELD, *READ} >= {"tova", "loki"}
