"""The GPU side without a GPU: what kernels are compiled to, and what goes through Triton's launcher."""

from __future__ import annotations

from scripts.report.markdown import NONE, Row, runs, sources, table

CARD = 90  # compute capability of the table; the others are in the file
FILES = 12  # of the table, by registers


def kernels() -> str:
    """kernels.json: the kernel of each file with the most registers."""
    out = []
    for run in runs("kernels"):
        rows = run["rows"]
        bad = sum(bool(r["problem"]) for r in rows)
        cards = ", ".join(f"{cc / 10:g}" for cc in sorted({r["cc"] for r in rows}))
        most: dict[str, Row] = {}
        for r in rows:
            known = most.get(r["file"])
            if r["cc"] == CARD and (known is None or r["registers"] > known["registers"]):
                most[r["file"]] = r
        largest = sorted(most.items(), key=lambda x: -x[1]["registers"])[:FILES]
        header = ["file", "its largest kernel", "registers", "spills", "shared", "programs a multiprocessor", "limit"]
        keys = ("kernel", "registers", "spills", "shared", "programs", "limit")
        out += [
            f"{len({(r['file'], r['kernel']) for r in rows})} kernels, {len(rows)} compilations for compute "
            f"capabilities {cards}: {bad} with a spill, too much shared memory or an error. "
            f"Of compute capability {CARD / 10:g}, the {len(largest)} files with the most registers:",
            table(header, [[f, *(str(r[k]) for k in keys)] for f, r in largest]),
        ]
    return "\n\n".join(out) or NONE


def launches() -> str:
    """launches.json and addresses.json: what has gone through Triton's launcher, and what was held to tensors."""
    out = []
    for run in runs("launches"):
        cards = [card for e in run["launches"] for card in e["cards"].items()]
        bad, compiled = (sum(what in c for _, c in cards) for what in ("problem", "registers"))
        names = ", ".join(f"{int(cc) / 10:g}" for cc in sorted({cc for cc, _ in cards}, key=int))
        out.append(f"{len(run['launches'])} forms of launches of {len(run['kernels'])} kernels, through Triton's "
                   f"launcher for compute capabilities {names}: {compiled} of {len(cards)} were compiled, "
                   f"{bad} have a problem."
                   )  # fmt: skip
    for run in runs("addresses"):
        out.append(f"{sum(r.get('addresses', 0) for r in run['rows']):,} addresses of interpreted kernels lie in a "
                   f"tensor of their launch; {sum('problem' in r for r in run['rows'])} methods read or wrote "
                   "beside one."
                   )  # fmt: skip
    return "\n\n".join(out)


def compiled() -> str:
    return "\n\n".join(x for x in (kernels(), launches(), sources("kernels", "launches", "addresses")) if x)
