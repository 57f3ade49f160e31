"""scripts/report/measure.py: a result is of one commit."""

import json

import pytest

from scripts.report import measure


@pytest.mark.parametrize("command, name", [("eval.compare --lengths 64", "q-0"), ("bench.bench_attention", "q-0.json")])
def test_a_part_of_another_commit_is_measured_anew(tmp_path, monkeypatch, command, name):
    now, found = ["first"], []
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "commit", lambda: now[0])

    def run(argv, limit):
        out = tmp_path / argv[argv.index("--out") + 1]
        found.append(out.is_file() or (out / "samples.jsonl").exists())
        if name.endswith(".json"):
            out.write_text(json.dumps(dict(commit=now[0])))
        else:
            out.mkdir(exist_ok=True)
            (out / "samples.jsonl").write_text("{}\n")
            (out / "compare.json").write_text(json.dumps(dict(commit=now[0], rows=[])))
        return 0

    monkeypatch.setattr(measure, "run", run)
    assert measure.part("q", 0, command, 60)["commit"] == "first"
    assert measure.part("q", 0, command, 60)["commit"] == "first" and len(found) == 1  # it is there
    now[0] = "second"
    assert measure.part("q", 0, command, 60)["commit"] == "second"
    assert found == [False, False]  # nothing of the first commit was left to go on with


def test_a_comparison_that_took_too_long_is_left_out(tmp_path, monkeypatch):
    """It writes its rows at its end; its samples stay, for the next run."""
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "commit", lambda: "first")

    def run(argv, limit):
        out = tmp_path / argv[argv.index("--out") + 1]
        out.mkdir(exist_ok=True)
        (out / "compare.json").write_text(json.dumps(dict(commit="first")))
        (out / "samples.jsonl").write_text("{}\n")

    monkeypatch.setattr(measure, "run", run)
    assert measure.part("q", 0, "eval.compare --lengths 64", 60) is None
    assert (tmp_path / "runs/q-0/samples.jsonl").read_text() == "{}\n"
