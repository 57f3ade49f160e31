"""The tables of results/README.md, and the rows behind each.

python -m scripts.report.tables                 # the names of the tables, and their files
python -m scripts.report.tables speed           # every row of its files: machine, commit, and all single values
python -m scripts.report.tables gpu --folder results/h100
python -m scripts.report.tables weights --json  # the whole rows, with all repetitions
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.errors import InputError, Parser, run_cli
from scripts.report.accuracy import accuracy
from scripts.report.collectives import collectives
from scripts.report.compiled import compiled
from scripts.report.gpu import load, section
from scripts.report.markdown import RESULTS, runs
from scripts.report.published import OF_RULER, claims, kvpress, published, ruler
from scripts.report.ranks import of_ranks
from scripts.report.speculation import speculation
from scripts.report.speed import attention, restore, speed, weights

# table -> the function that writes it, and the questions whose files it reads
TABLES: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = dict(
    speed=(speed, ("speed",)),
    attention=(attention, ("attention",)),
    weights=(weights, ("weights", "linear")),
    accuracy=(accuracy, ("accuracy*", "equal_bytes*")),
    published=(published, ("smollm2", "answers", "real_files")),
    ruler=(ruler, (*OF_RULER, "bases")),
    claims=(claims, ("ruler_defaults",)),
    restore=(restore, ("restore",)),
    kvpress=(kvpress, ("kvpress",)),
    collectives=(collectives, ("collectives",)),
    speculation=(speculation, ("speculate", "acceptance")),
    ranks=(of_ranks, ("ranks",)),
    compiled=(compiled, ("kernels", "addresses")),
    gpu=(section, ()),
)


def rows(name: str) -> list[dict[str, Any]]:
    """Every row of a table's files, with the machine, commit and other fields of its run."""
    out = []
    for question in TABLES[name][1]:
        for run in runs(question):
            once = {k: run[k] for k in ("machine", "commit", "model", "checkpoint", "weights", "dtype") if k in run}
            out += [once | r for r in run.get("rows", ())]  # an analysis has no rows
    return out


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("table", nargs="?", help=f"one of {', '.join(TABLES)}")
    p.add_argument("--folder", default=str(RESULTS / "h100"), help="for gpu: the folder of scripts/bench/gpu_suite.sh")
    p.add_argument("--json", action="store_true", help="print the rows as JSON")
    opt = p.parse_args()
    if opt.table is None:
        print(
            json.dumps(sorted(TABLES))
            if opt.json
            else "\n".join(f"{t}: {', '.join(q)}" for t, (_, q) in TABLES.items())
        )
        return
    if opt.table not in TABLES:
        raise InputError(f"there is no table {opt.table}: give one of {', '.join(TABLES)}")
    if opt.table == "gpu":
        if not (folder := Path(opt.folder)).is_dir():
            raise InputError(f"{folder} is not a folder: give the one that scripts/bench/gpu_suite.sh wrote to")
        print(json.dumps(load(folder)) if opt.json else section(folder))
        return
    found = rows(opt.table)
    if opt.json:
        print(json.dumps(found))
        return
    for row in found:
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                        if isinstance(v, str | int | float)))  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
