"""What the README says is so: its tables are those of results/, its code runs, its examples keep the contract."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from gguf.constants import GGMLQuantizationType
from helps import helps

from cache.grammar import method_files
from cache.spec import layer_methods
from loading.config import FAMILIES, ROPE_KEYS
from runtime.machine import ROOT
from scripts.eval.ruler import TASKS
from scripts.report.papers import ACCURACY
from weights.gguf import LAYOUTS
from weights.gguf_config import ARCHITECTURES
from weights.reader import METHODS

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- tested: (\w+) -->\n```python\n(.*?)```", README, re.S)
EXAMPLES = [code for kind, code in BLOCKS if kind == "method"]


def run(*command, **env):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."} | env
    )


def test_every_block_of_python_is_tested():
    assert README.count("```python") == len(BLOCKS) == 4


def test_generated_sections_are_current():
    done = run("-m", "scripts.report.update_readme", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.cpp  # without a compiler, a note says so
def test_the_library_section_runs():
    code = dict(BLOCKS)["library"]
    assert code.count("max_new_tokens=16") == 2
    done = run("-c", code.replace("max_new_tokens=16", "max_new_tokens=4"))
    assert done.returncode == 0 and not done.stderr.replace("\n", ""), done.stderr


def test_the_decoder_section_runs():
    scope: dict = {}
    exec(compile(dict(BLOCKS)["decoder"].replace("range(15)", "range(3)"), "README.md", "exec"), scope)
    assert not scope["logits"].requires_grad and len(scope["trace"]) >= 3


@pytest.mark.parametrize("i", range(3))
def test_the_example_methods_keep_the_contract(tmp_path, i):
    """Quick checks of the window and of design.md's; all run on the other example, H2O, in tests/test_contract.py."""
    imports = "import torch\n\nfrom cache.calibration import Statistic\nfrom cache.selecting import Selecting\n\n"
    more = re.findall(r"```python\n(class .*?)```", (ROOT / "docs" / "design.md").read_text(), re.S)
    file = tmp_path / "example.py"
    file.write_text([EXAMPLES[0], *(imports + code for code in more)][i])
    assert len(more) == 2
    done = run("-m", "scripts.contract", str(file), "--only", "lossless,stress,ragged,window,traffic")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_models_and_formats_is_complete():
    section = README[README.index("## Models and file formats") :]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    table = table.replace("Q2_K to Q6_K", "Q2_K Q3_K Q4_K Q5_K Q6_K")
    types = [GGMLQuantizationType(t).name for t in LAYOUTS]
    for name in (*FAMILIES, *ROPE_KEYS, *ARCHITECTURES, *METHODS, *types):
        assert re.search(rf"\b{re.escape(name)}\b", table, re.I), name


def test_every_paper_is_linked():
    """A method's paper stands in the README's table; fp8, full and the controls have none."""
    listed = set(re.findall(r"`(\w+)`", README[README.index("| paper | method |") : README.index("## Models")]))
    variants = {"double_sparsity_offload"}
    assert set(method_files()) - listed == {"fp8", "full", "oracle", "random"} | variants


def test_an_installation_has_every_module():
    """pyproject.toml lists what stands at the top level, in the order of imports too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules, packages = (set(project["tool"]["setuptools"][k]) for k in ("py-modules", "packages"))
    assert modules == {f.stem for f in ROOT.glob("*.py")}
    assert (
        packages
        == {f.parent.name for f in ROOT.glob("*/__init__.py")}
        == set(project["tool"]["importlinter"]["root_packages"])
    )


# ---- no figure is typed beside the file that holds it ----

PAGES = ("README.md", "results/README.md", "docs/design.md", "docs/parallel.md",
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


def test_linked_files_exist():
    for file in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / file).read_text()):
            assert ((ROOT / file).parent / target).exists(), (file, target)


FILES = re.findall(r"python ((?:examples/)?\w+\.py)([^\n`]*)", README)
MODULES = re.findall(r"python -m (scripts[\w.]+)([^\n`]*)", README)
TABLES = [(re.search(r"-m (scripts[\w.]+)", command)[1], command) for *_, command in ACCURACY if command]


@pytest.fixture(scope="module")
def texts():
    """The --help of all scripts that the README and the papers' tables name."""
    assert len(FILES) >= 6 and len(MODULES) >= 4
    modules = sorted({script for script, _ in (*MODULES, *TABLES)})
    return helps(sorted({str(ROOT / file) for file, _ in FILES})) | helps(modules)


def test_commands_name_flags_that_exist(texts):
    for script, rest in (*((str(ROOT / f), rest) for f, rest in FILES), *MODULES, *TABLES):
        for flag in re.findall(r"(?<!\S)--[a-z-]+", rest.split("#")[0]):
            assert flag in re.findall(r"--[a-z-]+", texts[script]), (script, flag)


def test_commands_of_the_papers_tables_exist():
    """Their settings and tasks are known."""
    for spec, *_, command in ACCURACY:
        for method in (spec, *(command or "").partition("--method ")[2].split()):
            layer_methods(method, 32, {})
        tasks = re.search(r"--tasks (\S+)", command or "")
        assert not tasks or set(tasks[1].split(",")) <= {*TASKS}
