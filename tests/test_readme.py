"""What the README says is so: its tables are those of results/, its code runs, its examples keep the contract."""

import os
import re
import subprocess
import sys

import pytest
from helps import helps

from cache.spec import method_files
from runtime import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- tested: (\w+) -->\n```python\n(.*?)```", README, re.S)
EXAMPLES = [code for kind, code in BLOCKS if kind == "method"]


def run(*command, **env):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."} | env
    )


def test_it_is_one_page():
    assert len(README.splitlines()) <= 200


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
    done = run("-m", "cache.testing", str(file), *some)
    assert done.returncode == 0, done.stdout + done.stderr


def test_linked_files_exist():
    for file in ("README.md", "results/README.md", "docs/design.md"):
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
