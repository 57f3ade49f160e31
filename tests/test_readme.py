"""What the README says is so: its tables are those of results/, its example method keeps the contract."""

import re
import subprocess
import sys
from pathlib import Path

from tests.test_contract import checks

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_generated_sections_are_current():
    r = subprocess.run(
        [sys.executable, "scripts/update_readme.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert r.returncode == 0, r.stderr


def test_the_example_method_keeps_the_contract(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    (tmp_path / "readme_window.py").write_text(code)
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
    checks("readme_window")


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_commands_name_flags_that_exist():
    helps = {}
    for script, rest in re.findall(r"python ((?:scripts/)?\w+\.py)([^\n`]*)", README):
        if script not in helps:
            run = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True)
            helps[script] = run.stdout
            assert run.returncode == 0, run.stderr
        for flag in re.findall(r"(?<!\S)--[a-z-]+", rest.split("#")[0]):
            assert flag in helps[script], (script, flag)
