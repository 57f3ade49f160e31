"""scripts/report: tables, figures and sentences from result files; the papers' commands."""

import json
import math
import re

import made_up
import pytest
from test_bench import CONFIG, attention, generated

from runtime.errors import InputError
from runtime.machine import ROOT
from scripts.eval import compare, perplexity
from scripts.report import claims, data, measure, papers, plots, tables, update_readme
from scripts.shared import markdown


@pytest.fixture
def results(tmp_path, monkeypatch):
    made_up.write(tmp_path)
    monkeypatch.setattr(data, "RESULTS", tmp_path)
    return tmp_path


# ---- differences ----


def test_paired_intervals():
    """Agresti and Min's, and as wide as half a sample a cell where nothing differs."""
    assert markdown.paired([1] * 20, [1] * 20) == (0, pytest.approx(-1.96 / 22), pytest.approx(1.96 / 22))
    each, full = [1] * 10 + [0] * 30, [1] * 30 + [0] * 10  # 20 of 40 lost
    half = 1.96 * math.sqrt(21 - 400 / 42) / 42
    assert markdown.paired(each, full) == (-0.5, pytest.approx(-20 / 42 - half), pytest.approx(-20 / 42 + half))
    assert markdown.signed((-0.5, -0.6, -0.3)) == "-50 (-60 to -30)" and markdown.signed((0.1, -0.1, 0.2)) == "="
    middle, low, high = markdown.resampled([1, 2, 3, 4])
    assert middle == 2.5 and 1.25 <= low < 2 and 3 < high <= 3.75


# ---- from made-up files ----


def test_parts_make_cells_of_equal_samples(results):
    rows, cells = data.answers("bytes")
    assert len(data.cell("full", "held 1/4", 2048)) == len(data.cell("snapkv", "held 1/4", 2048)) == 2 * 2 * 20
    assert len(data.cell("quest", "read 1/8", 4096)) == 20 and ("snapkv: kv 1/4", 2048) in rows
    known, unknown = (data.cell("snapkv", "held 1/4", 2048, known=known) for known in (True, False))
    assert known.keys() == unknown.keys() == {(t, i) for t in made_up.TASKS for i in range(40)}  # of 1 and of 2 parts
    each = json.loads((results / "a" / "bytes.json").read_text())["runs"][1]["rows"][0]["niah_single_1_each"]
    assert [data.cell("full", "held 1/4", 2048)["niah_single_1", i] for i in range(1, 40, 2)] == each
    file = results / "a" / "bytes.json"
    runs = json.loads(file.read_text())["runs"]
    lost = "snapkv,kv=4,of=1"  # the cell lacks the samples of a part
    runs[0]["rows"] = [r for r in runs[0]["rows"] if r["method"] != lost]
    file.write_text(json.dumps(dict(runs=runs)))
    data._read.cache_clear()
    rows, cells = data.answers("bytes")
    assert ("snapkv: kv 1/4", 2048) not in rows and not [c for c in cells if (c["spec"], c["seq_len"]) not in rows]
    with pytest.raises(data.NotMeasured):
        data.cell("snapkv", "held 1/4", 2048)
    with pytest.raises(data.NotMeasured):
        data.predicted("h2o", tokens=4096)


def test_the_sections_of_made_up_results(results):
    text = {name: made() for name, (_, made) in tables.SECTIONS.items() if name not in ("figure", "figures")}
    assert not [name for name, said in text.items() if tables.NONE in said]
    assert "| 2K | `random` | - | - | - | 0 (" in text["accuracy"]
    assert "2K: niah_single_1 and niah_multikey_1-style, 80 samples of 1,958 to 2,048 tokens" in text["accuracy"]
    assert text["methods"].count("20 (2.00x)") == 2 * len(measure.PAPERS.split()) and " =" in text["methods"]
    assert "| `full` | 10/s (2 %)" in text["speed"] and "llama.cpp Q4_0 | - | 0.50x" in text["speed"]
    assert text["gpu"] == tables.ON_A_GPU and "0.7 to 0.7 times" in text["speculation"]
    assert all("commit abc1234" in said and "**Stale**" in said for name, said in text.items() if name != "gpu")


def test_the_figures_of_made_up_results(results, monkeypatch):
    monkeypatch.setattr(update_readme, "ROOT", results)
    update_readme.draw()
    for name in ("accuracy", "distances"):
        assert (results / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "(results/accuracy.png)" in tables.SECTIONS["figure"][1]()
    assert "](accuracy.png)" in tables.SECTIONS["figures"][1]()


def test_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "RESULTS", tmp_path)
    text = {name: made() for name, (_, made) in tables.SECTIONS.items()}
    assert all(text[name] == tables.NONE for name in text.keys() - {"gpu", "methods", "papers"})
    assert "kv_methods/sals.py) |" in text["methods"] and "SALS, Table 5" in text["papers"]
    assert claims.holding() == ([], []) and plots.accuracy() is None and plots.distances() is None


# ---- claims ----


def test_every_claim_can_be_evaluated(results):
    hold, broken = claims.holding()
    assert len(hold) + len(broken) == len(claims.claims()) > 15
    assert {section for section, *_ in claims.claims()} == {"found", "newer", "kvpress", "speed", "speculation"}
    assert not [text for text in hold + broken if "{" in text]


def test_a_claim_that_does_not_hold_fails_the_check(results, monkeypatch, tmp_path):
    file = tmp_path / "claims.txt"
    monkeypatch.setattr(claims, "FILE", file)
    file.write_text(
        '# what\nfound | It is {found("full", "held 1/4", 2048)}. | found("full", "held 1/4", 2048) > 0.5\n'
    )
    assert claims.holding("found") == ([f"It is {data.found('full', 'held 1/4', 2048):.3g}."], [])
    file.write_text('found | All of it. | found("random", "read 1/4", 2048) == 1\nfound | Later. | kl("kvzip")\n')
    assert claims.holding() == ([], ["All of it."])
    with pytest.raises(InputError, match=r"1 sentences no longer hold: All of it\."):
        update_readme.update(ROOT, check=True)
    for line, why in (
        ("found | no condition", "a line is section"),
        ("found | x | nothing > 1", "'nothing' is not def"),
    ):
        file.write_text(line)
        with pytest.raises(InputError, match=why):
            claims.holding()


# ---- stale files ----


def test_the_check_names_stale_files_and_the_pages_mark_them(cli, monkeypatch, tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    made_up.write(folder)
    monkeypatch.setattr(data, "RESULTS", folder)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    status, out, err = cli(measure, "--check")
    assert status == 2 and "results/a/attention.json: measure has another command\n" in out
    assert err.startswith("error: 10 of 10 ")
    monkeypatch.setattr(tables, "stale", lambda run: "")
    assert "**Stale**" not in tables.speed("README.md")


def test_result_files_are_of_clean_commits():
    """results/<machine>/<question>.json; no run of changed files, and no file that no command makes."""
    for file in (ROOT / "results").rglob("*.json"):
        runs = json.loads(file.read_text())["runs"]
        assert all(re.fullmatch("[0-9a-f]{7,}", run["commit"]) for run in runs), file
        assert all(run["command"].startswith("python ") and run["versions"]["torch"] for run in runs), file
        assert file.stem in measure.commands() or file.stem in measure.gpu_commands(), file
        assert len(file.relative_to(ROOT).parts) == 3, file


# ---- the papers' tables ----


TEXT = "The key lay under a stone. Nobody saw the tall man who came by night, and left before the morning. " * 40
SMALL = dict(checkpoint="models/tiny", samples=1, lengths=2048)


def tried(command, folder):
    """A command with the shipped model, one short sample, and data of a few lines in a folder -> module, arguments."""
    docs = [f"{i}. {TEXT[:99]}" for i in range(20)]
    asked = dict(question="Where was the key?", answers=[dict(text="under a stone")], is_impossible=False)
    squad = dict(data=[dict(paragraphs=[dict(context=doc, qas=[asked]) for doc in docs])])
    hotpot = [dict(question="Who came?", answer="a man", context=[[f"Title {i}", [doc]] for i, doc in enumerate(docs)])]
    (folder / "essays").mkdir()
    for name, text in (("essays/a.txt", TEXT), ("text", TEXT), ("squad", squad), ("hotpotqa", hotpot)):
        (folder / name).write_text(text if isinstance(text, str) else json.dumps(text))
    values = SMALL | {name: folder / name for name in ("essays", "text", "squad", "hotpotqa")}
    for flag, value in values.items():
        command = re.sub(rf"--{flag} \S+", f"--{flag} {value}", command)
    short = "--max-new-tokens 2" if "eval.compare" in command else "--length 160 --decoded 4 --windows 1"
    return f"{command} {short} --device cpu --json".split()[2:]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "whole"])
@pytest.mark.parametrize("command", [c for *_, c in papers.ACCURACY if c])
def test_a_command_of_a_papers_table_runs_to_its_end(cli, command, whole, tmp_path, few_texts):
    """quick: with two of its tasks, and full and another method."""
    module, *argv = tried(command, tmp_path)
    script = {"scripts.eval.compare": compare, "scripts.eval.perplexity": perplexity}[module]
    methods = script.parser().parse_args(argv).method
    if not whole:
        argv = [",".join(x.split(",")[2::99]) + ",qa_1" if x.startswith("niah") else x for x in argv]
        argv = [x for x in argv if x not in methods[2:]]
    status, out, err = cli(script, *argv)
    assert status == 0, err
    assert [r["method"] for r in json.loads(out)["rows"]] == (methods if whole else methods[:2])


# ---- a GPU's table ----


def test_the_table_of_a_gpu_has_the_papers_figures(cli, tmp_path, monkeypatch):
    """Beside the shapes that they have; the table of a processor is another one."""
    monkeypatch.setattr(data, "RESULTS", tmp_path)
    for name, heads in (("llama-2-7b", 4), ("llama-3.1-8b", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps(CONFIG | dict(num_key_value_heads=heads)))
    (tmp_path / "h100").mkdir()
    both, mha, gqa = ("full", "sals-12.5"), str(tmp_path / "llama-2-7b.json"), str(tmp_path / "llama-3.1-8b.json")
    found = dict(
        attention=attention(cli, mha, "--size", "8x1024", "--method", *both),
        speed=generated(cli, gqa, "--synthetic", "--mode", "eager", "--size", "8x4096", "--method", *both),
        prompt=generated(cli, gqa, "--prefill", "--size", "1x512", "--method", "sals-12.5"),
    )
    for question, run in found.items():
        run |= dict(gpu=dict(name="H100"))
        run |= {"model": "llama-3.1-8b"} if "model" in run else {}
        for row in run["rows"]:
            row |= {"model": "llama-2-7b"} if "model" in row else {}
        (tmp_path / "h100" / f"{question}.json").write_text(json.dumps(dict(runs=[run])))
    text = tables.speed("results/README.md", gpu=True)
    assert "0.64x (SALS, Table 6)" in text and "1.39x (SALS, Table 7)" in text and "on full" in text
    assert text.count("h100/") == 3 * 2 and tables.speed("results/README.md") == tables.NONE
