"""What the README says is so: its tables are those of results/, its code runs, its examples keep the contract."""

import json
import os
import re
import subprocess
import sys

import pytest
from helps import helps

from cache.spec import layer_methods, method_files
from runtime.machine import ROOT
from scripts.eval.ruler import TASKS
from scripts.report.papers import ACCURACY

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- tested: (\w+) -->\n```python\n(.*?)```", README, re.S)
EXAMPLES = [code for kind, code in BLOCKS if kind == "method"]


def run(*command, **env):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."} | env
    )


@pytest.mark.parametrize(
    ("page", "most"),
    [("README.md", 300), ("docs/design.md", 400)],
)
def test_a_page_can_be_read(page, most):
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_every_block_of_python_is_tested():
    assert README.count("```python") == len(BLOCKS) == 4


def test_generated_sections_are_current():
    done = run("-m", "scripts.report.update_readme", "--check")
    assert done.returncode == 0, done.stderr


def test_the_library_section_runs():
    code = dict(BLOCKS)["library"]
    assert code.count("max_new_tokens=16") == 2
    done = run("-c", code.replace("max_new_tokens=16", "max_new_tokens=4"))
    assert done.returncode == 0 and not done.stderr.replace("\n", ""), done.stderr


@pytest.mark.parametrize("method", sorted(method_files()))
def test_the_decoder_section_runs_with_every_method(method):
    code = dict(BLOCKS)["decoder"].replace("range(15)", "range(3)")
    scope: dict = {}
    exec(compile(code.replace('"self_index"', repr(method)), "README.md", "exec"), scope)
    assert not scope["logits"].requires_grad and len(scope["trace"]) >= 3


# H2O is in tests/test_contract.py in every run
@pytest.mark.parametrize(
    "code", [EXAMPLES[0], pytest.param(EXAMPLES[1], marks=pytest.mark.slow)], ids=["window", "h2o"]
)
def test_the_example_methods_keep_the_contract(code, tmp_path):
    file = tmp_path / "readme_example.py"
    file.write_text(code)
    # all checks run on every method of the repository, and on H2O, in tests/test_contract.py
    some = () if "lookback" in code else [x for c in ("lossless", "stress", "ragged", "window") for x in ("--only", c)]
    done = run("-m", "scripts.contract", str(file), *some)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- no figure is typed beside the file that holds it ----

PAGES = ("README.md", "results/README.md", "results/published/README.md", "docs/design.md", "docs/parallel.md",
         "docs/speculation.md", "models/tiny/README.md")  # fmt: skip
SCALES = {"%": [100], "x": [1], "ms": [1, 1e3], "us": [1e3, 1e6], "s": [1], "GB/s": [1e-9], "tokens/s": [1],
          "MiB": [2**-20], "GiB": [2**-30], "million": [1e-6], "GFLOP": [1e-9], "TFLOP": [1e-12]}  # fmt: skip
FIGURE = re.compile(rf"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?) ?({'|'.join(map(re.escape, SCALES))})(?!\w)")
NO_RESULTS = {  # hand-written figures that nobody measures: what they are
    "94 MiB": "the size of a Python package, of its index",
    "95 %": "Wilson's interval",
    "5.2 million": "parameters of the shipped model",
    "7.8 million": "tokens that it was trained on: its training.json",
    "3 %": "of the code files are held out, by the recipe",
    "6 %": "of the prose documents, too",
}


def paragraphs(page):
    """What is written by hand: no generated section, no code, and no table of what papers say."""
    text = re.sub(r"<!-- begin:(\w+) -->.*?<!-- end:\1 -->|```.*?```|^    .*?$|`[^`]*`", "", page, flags=re.S | re.M)
    text = re.sub(r"^## \d. Differences from the papers$.*?(?=^## )", "", text, flags=re.S | re.M)
    return text.split("\n\n")


def held(figure, unit, files):
    """Whether a file has a number that is rounded to the figure."""
    decimals = len(figure.partition(".")[2])
    wanted = float(figure.replace(",", ""))

    def numbers(x):
        if isinstance(x, dict | list):
            for y in x.values() if isinstance(x, dict) else x:
                yield from numbers(y)
        elif isinstance(x, int | float) and not isinstance(x, bool):
            yield x

    found = (n for file in files for n in numbers(json.loads(file.read_text())))
    return any(round(n * scale, decimals) == wanted for n in found for scale in SCALES[unit])


def unfounded(page, folder):
    """Figures with a unit that are no exception, and that no result file linked in their paragraph holds."""
    out = []
    for text in paragraphs(page):
        files = [folder / f for f in re.findall(r"\]\(([^)#:]+\.json)\)", text)]
        found = [(m[1], m[2]) for m in FIGURE.finditer(text)]
        out += [f"{a} {b}" for a, b in found if f"{a} {b}" not in NO_RESULTS and not held(a, b, files)]
    return out


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_typed(page):
    assert not unfounded((ROOT / page).read_text(), (ROOT / page).parent)


def test_a_typed_figure_is_found():
    """One that no file has, and one whose file is linked but has another."""
    known = json.loads((ROOT / "results/zen5/speed.json").read_text())["runs"][0]["rows"][0]["tokens_per_s"]
    text = "It decodes {:.1f} tokens/s ([file](results/zen5/speed.json)).\n\nIn `12 ms`, or 3.4x."
    assert unfounded(text.format(known), ROOT) == ["3.4 x"]
    assert unfounded(text.format(known + 1000), ROOT) == [f"{known + 1000:.1f} tokens/s", "3.4 x"]


def test_linked_files_exist():
    for file in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / file).read_text()):
            assert ((ROOT / file).parent / target).exists(), (file, target)


def test_commands_name_flags_that_exist():
    files = [(str(ROOT / f), rest) for f, rest in re.findall(r"python ((?:examples/)?\w+\.py)([^\n`]*)", README)]
    modules = re.findall(r"python -m (scripts[\w.]+)([^\n`]*)", README)
    assert len(files) >= 6 and len(modules) >= 4
    for commands in (files, modules):
        texts = helps(sorted({script for script, _ in commands}))
        for script, rest in commands:
            for flag in re.findall(r"(?<!\S)--[a-z-]+", rest.split("#")[0]):
                assert flag in texts[script], (script, flag)


def test_commands_of_the_papers_tables_exist():
    """Their settings are known, their flags too."""
    for spec, *_, command in ACCURACY:
        layer_methods(spec, 32, {})
        if command:
            module = re.search(r"-m (scripts[\w.]+)", command)[1]
            assert set(re.findall(r"(?<!\S)--[a-z-]+", command)) <= set(
                re.findall(r"--[a-z-]+", helps([module])[module])
            )
            for method in command.partition("--method ")[2].split():
                layer_methods(method, 32, {})
            tasks = re.search(r"--tasks (\S+)", command)
            assert not tasks or set(tasks[1].split(",")) <= {*TASKS}
