"""Methods at equal bytes: results/equal_bytes*.json by target and length."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from scripts.report.tables.markdown import NONE, files, folded, source, table, wilson

OPEN = 2048  # the length that is shown unfolded
TASKS = ("needle", "key_value")
BOUNDS = ("oracle", "random")
Cell = dict[str, Any]


def measured() -> dict[tuple[int, str], dict[str, Any]]:
    """(tokens, spec) -> what was measured, of each task from the file with the most samples."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for row in (r for _, data in files("equal_bytes*.json") for r in data["rows"]):
        known = rows.setdefault((row["seq_len"], row["method"]), {})
        fewer = {t for t in TASKS if len(row.get(f"{t}_each", ())) < len(known.get(f"{t}_each", ()))}
        known |= {k: v for k, v in row.items() if k.removesuffix("_each") not in fewer}
    return rows


def cells() -> list[Cell]:
    """Every cell with the row of its setting."""
    every = (c for _, data in files("equal_bytes*.json") for c in data["cells"])
    once = {(c["axis"], c["target"], c["method"], c["seq_len"]): c for c in every}.values()
    rows = measured()
    return [c | dict(row=rows[at]) for c in once if (at := (c["seq_len"], c["spec"])) in rows]


def missing() -> dict[tuple[Any, ...], float]:
    """(axis, target, method, tokens) -> the least share there is, of cells that cannot be."""
    return {
        (m["axis"], m["target"], m["method"], m["seq_len"]): m["least"]
        for _, data in files("equal_bytes*.json")
        for m in data["missing"]
    }


def share_of(cell: Cell) -> float:
    """The bytes of a cell's axis, as a share of full's; of bounds the tokens that they attend to."""
    if cell["method"] in BOUNDS:
        return float(Fraction(cell["target"]))
    return cell["row"]["kv_share" if cell["axis"] == "kv" else "read_share"]


def read_cells(every: list[Cell]) -> list[Cell]:
    """Those of bytes read, and the settings of bytes held of methods that read all they hold."""
    chosen = [c for c in every if c["axis"] == "read"]
    own = {c["method"] for c in chosen}
    return chosen + [c | dict(axis="read") for c in every if c["axis"] == "kv" and c["method"] not in own]


def text(row: dict[str, Any], tasks: list[str]) -> str:
    parts = []
    for each in (row.get(f"{t}_each") for t in tasks):
        if not each:
            parts.append("-")
            continue
        low, high = wilson(sum(each), len(each))
        parts.append(f"{100 * sum(each) / len(each):.0f} ({100 * low:.0f}-{100 * high:.0f})")
    return " / ".join(parts)


def by_target(found: list[Cell], axis: str, T: int, tasks: list[str]) -> str:
    here = [c for c in found if c["seq_len"] == T]
    targets = sorted({c["target"] for c in here}, key=Fraction, reverse=True)
    cell = {(c["method"], c["target"]): text(c["row"], tasks) for c in here}
    least = missing()
    rows = []
    for method in sorted({c["method"] for c in here}):
        row = [f"`{method}`"]
        for target in targets:
            none = least.get((axis, target, method, T))
            row.append(cell.get((method, target)) or (f"least {none:.2f}" if none else "-"))
        rows.append(row)
    what = "bytes held" if axis == "kv" else "bytes read"
    return table([f"{what}, {T} tokens", *targets], rows)


def equal_bytes() -> str:
    """Two tables a length: at equal bytes held and at equal bytes read."""
    every = cells()
    if not every:
        return NONE
    rows, out = measured(), []
    for T in sorted({c["seq_len"] for c in every}):
        tasks = [t for t in TASKS if any(t in c["row"] for c in every if c["seq_len"] == T)]
        kv, read = [c for c in every if c["axis"] == "kv"], read_cells(every)
        body = "\n\n".join(by_target(found, axis, T, tasks) for axis, found in (("kv", kv), ("read", read)))
        body = f"Found of {' / '.join(tasks)}, in %.\n\n" + body
        if (T, "full") in rows:
            body += f"\n\n`full` at {T} tokens: {text(rows[T, 'full'], tasks)}."
        out.append(body if T == OPEN else folded(f"{T} tokens", body))
    told = (
        "Behind each share is Wilson's 95 % interval. A setting is the largest within the target; "
        "where even the smallest is above it, its share stands. -: the setting of the next larger target is within "
        "this one, too. In the tables of bytes read, methods that read all they hold stand with their setting for as "
        "many bytes held. What `oracle` and `random` read to choose is not counted."
    )
    return "\n\n".join(out) + f"\n\n{told}\n\n" + "\n\n".join(source(*f) for f in files("equal_bytes*.json"))
