"""Tables of a GPU run, results/h100/*.json, beside what the papers report: a section of results/README.md.

    python -m scripts.report.speed_tables results/h100      # prints it; update_readme.py puts it into the page

A paper's figure is a ratio to its own baseline on its own card. It stands beside ours of the same shapes, batch, length
and method.
"""

from __future__ import annotations

import json
from pathlib import Path

from errors import InputError, Parser, run_cli
from scripts.report.tables.gpu import load, section


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("folder", help="where gpu_suite.sh wrote")
    p.add_argument("--json", action="store_true", help="print the rows that the tables are made of")
    opt = p.parse_args()
    folder = Path(opt.folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give the one that scripts/bench/gpu_suite.sh wrote to")
    print(json.dumps(load(folder)) if opt.json else section(folder))


if __name__ == "__main__":
    run_cli(main)
