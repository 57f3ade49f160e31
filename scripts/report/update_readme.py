"""Writes the generated sections of README.md, results/README.md and docs/ from code and results.

    python -m scripts.report.update_readme            # the tables and figures
    python -m scripts.report.update_readme --demo     # also run `make demo` and show its output
    python -m scripts.report.update_readme --check    # exit with 2 if a page or a claim is not up to date

A section is between `<!-- begin:NAME -->` and `<!-- end:NAME -->`; the text around it is written by hand. A claim
(results/claims.txt) that no longer holds is left out; with --check it is an error. --check does not look at the
marks of stale results, which depend on later commits: `python -m scripts.report.measure --check` does.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from runtime.errors import InputError, run_cli
from runtime.machine import ROOT, check_out, written
from runtime.options import Parser
from scripts.report import claims, data
from scripts.report.tables import SECTIONS
from scripts.shared.results import save_figure

PAGES = {page: [name for name, (at, _) in SECTIONS.items() if at == page] for page, _ in SECTIONS.values()}
MARK = re.compile(r" \*\*Stale\*\*: .*$", re.M)


def demo() -> str:
    run = subprocess.run(["make", "-s", "demo"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise InputError(f"make demo failed: {run.stdout[-300:]}")
    return "```\n" + run.stdout.strip() + "\n```"


def draw() -> None:
    from scripts.report import plots  # matplotlib takes seconds

    check_out(data.RESULTS / "accuracy.png", "update_readme")
    for name in ("accuracy", "distances"):
        if figure := getattr(plots, name)():
            save_figure(figure, data.RESULTS / f"{name}.png")


def fill(text: str, name: str, body: str, page: str) -> str:
    """Replaces the text between the two markers of a section."""
    pattern = re.compile(rf"(<!-- begin:{name} -->\n).*?(<!-- end:{name} -->)", re.S)
    if not pattern.search(text):
        raise InputError(f"{page}: no section {name}: put back its begin and end markers")
    return pattern.sub(lambda m: f"{m[1]}{body}\n{m[2]}", text)


def update(root: Path, with_demo: bool = False, check: bool = False) -> list[str]:
    """Writes the pages below root -> those that changed. check: only raises InputError if one would change."""
    changed: dict[Path, str] = {}
    for page in () if check else PAGES:  # all of them or none
        if (root / page).parent.is_dir():
            check_out(root / page, "update_readme")
    for page, names in PAGES.items():
        path = root / page
        if not path.is_file():
            raise InputError(f"{page} does not exist: write its text, around the sections {', '.join(names)}")
        text = old = path.read_text()
        bodies = {name: SECTIONS[name][1]() for name in names}
        if with_demo and page == "README.md":
            bodies["demo"] = demo()
        for name, body in bodies.items():
            text = fill(text, name, body, page)
        if (MARK.sub("", text) != MARK.sub("", old)) if check else text != old:
            changed[path] = text
    if check and (broken := claims.holding()[1]):
        raise InputError(f"results/claims.txt: {len(broken)} sentences no longer hold: {' '.join(broken)}")
    if check and changed:
        first = next(iter(changed)).relative_to(root)
        raise InputError(f"{first} is not up to date: run python -m scripts.report.update_readme")
    for path, text in changed.items():
        with written(path) as tmp:
            tmp.write_text(text)
    return [str(path.relative_to(root)) for path in changed]


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--demo", action="store_true", help="run `make demo` for the README's first section")
    p.add_argument("--check", action="store_true", help="write nothing")
    p.add_argument("--json", action="store_true", help="print the pages that changed as JSON")
    opt = p.parse_args()
    if not opt.check:
        draw()
    changed = update(ROOT, opt.demo, opt.check)
    if opt.json:
        print(json.dumps(changed))
    else:
        print("\n".join(f"wrote {page}" for page in changed) or "all pages are up to date")


if __name__ == "__main__":
    run_cli(main)
