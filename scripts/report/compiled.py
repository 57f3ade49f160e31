"""Tables of the GPU side without a GPU: compiled Triton kernels, and checked addresses."""

from __future__ import annotations

from scripts.report.markdown import NONE, Row, runs, sources, table

CARD = 90  # compute capability in the table; the others are in the file
FILES = 12  # files in the table, those with the most registers


def kernels() -> str:
    """kernels.json: of each file, the kernel with the most registers."""
    out = []
    for run in runs("kernels"):
        rows = run["rows"]
        bad = sum(bool(r["problem"]) for r in rows)
        cards = ", ".join(f"{cc / 10:g}" for cc in sorted({r["cc"] for r in rows}))
        most: dict[str, Row] = {}
        for r in rows:
            known = most.get(r["file"])
            if r["cc"] == CARD and "registers" in r and (known is None or r["registers"] > known["registers"]):
                most[r["file"]] = r
        largest = sorted(most.items(), key=lambda x: -x[1]["registers"])[:FILES]
        header = ["file", "its largest kernel", "registers", "spills", "shared", "programs per multiprocessor", "limit"]
        keys = ("kernel", "registers", "spills", "shared", "programs", "limit")
        out += [
            f"The launches of {len({(r['file'], r['kernel']) for r in rows})} kernels were compiled for compute "
            f"capabilities {cards}: of {len(rows)} compilations, {bad} have a spill, too much shared memory or an "
            f"error. These are the {len(largest)} files with the most registers at compute capability {CARD / 10:g}:",
            table(header, [[f, *(str(r[k]) for k in keys)] for f, r in largest]),
        ]
    return "\n\n".join(out) or NONE


def addresses() -> str:
    """addresses.json: how many addresses of interpreted kernels were checked against the tensors of their launch."""
    return "\n\n".join(
        f"{sum(r.get('addresses', 0) for r in run['rows']):,} addresses of interpreted kernels are in a tensor of "
        f"their launch; {sum('problem' in r for r in run['rows'])} methods read or wrote outside of one."
        for run in runs("addresses")
    )


def compiled() -> str:
    return "\n\n".join(x for x in (kernels(), addresses(), sources("kernels", "addresses")) if x)
