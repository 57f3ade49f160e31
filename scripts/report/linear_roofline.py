"""Predicted times of products with packed weights on an H100, at the shapes of Llama-3.1-8B: no GPU is needed.

    python scripts/report/linear_roofline.py --out results/linear_h100_prediction.json

A prediction from machine code and sizes, not a measurement: a product takes the longest of what its bytes take at the
memory's full rate, what the instructions of its loop take in the issue slots of the multiprocessor with most programs,
and what its multiplications take on tensor cores, and a launch. bf16 is what its bytes and a launch take (cuBLAS).
Every product, the head's, too, has the same weights, in groups of 32. Left out: what loads and barriers wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported; an interpreted kernel cannot be compiled
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch  # noqa: E402

from errors import run_cli  # noqa: E402
from kernels.linear import ROWS, Weight, _in_triton, share_count, tile_of  # noqa: E402
from model import ModelArgs  # noqa: E402
from scripts.report.kernel_report import BANDWIDTH, LAUNCH, aligned, launch  # noqa: E402
from scripts.report.launches import recording  # noqa: E402
from scripts.shared.results import check_out, record, write_json  # noqa: E402

SMS, CLOCK, ISSUE = 132, 1.755e9, 4  # multiprocessors of an H100 SXM5, its boost clock in Hz, warps that issue a clock
TENSOR = 989e12  # bf16 operations/s without sparsity (data sheet)
BITS_A_WEIGHT = {"4 bits": 4 + 20 / 32, "4 bits in steps": 4 + 16 / 32 + 32 / 256, "8 bits": 8 + 16 / 32, "16 bits": 16}
GROUP, SHARED = 32, 8  # inputs of a scale; scales that share a step, where they are in steps, as of GGUF's Q4_K


def shapes(a: ModelArgs) -> dict[str, tuple[int, int, int]]:
    """Product -> outputs, inputs, how many a token needs."""
    q, kv = a.n_head * a.head_dim, a.n_kv_head * a.head_dim
    return dict(
        qkv=(q + 2 * kv, a.dim, a.n_layer),
        o=(a.dim, q, a.n_layer),
        gate_up=(2 * a.ffn_dim, a.dim, a.n_layer),
        down=(a.dim, a.ffn_dim, a.n_layer),
        head=(a.vocab_size, a.dim, 1),
    )


def weight(form: str, bits: int, blocks: int, n: int) -> Weight:
    """A packed weight without numbers."""

    def empty(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.empty(blocks, *size, dtype=dtype, device="meta")

    packed, groups = empty(torch.uint8, n * bits // 32, ROWS, 4), n // GROUP
    if bits == 16:
        return Weight(packed)
    if form.endswith("in steps"):
        parts = empty(torch.int8, groups, ROWS), empty(torch.float16, groups // SHARED, ROWS)
        return Weight(packed, *parts, None, *parts)
    zero = empty(torch.uint8, groups, ROWS // 2) if bits == 4 else None
    return Weight(packed, empty(torch.float16, groups, ROWS), None, zero)


def loop_of(form: str, bits: int, M: int, blocks: int, n: int) -> int:
    """Instructions of the loop of a product, as it is launched and compiled for an H100."""
    with recording() as launches:
        x = torch.empty(M, n, dtype=torch.bfloat16, device="meta")
        _in_triton(x, *weight(form, bits, blocks, n), None, bits)
    (entry,) = launches.seen.values()
    return sum(launch(entry, 90)["loop"].values())


def predict(form: str, M: int, out: int, n: int, loops: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    """Seconds of one product, each limit of its own; loops: instructions of loops that are already compiled."""
    bits, blocks = int(form.split()[0]), -(-out // ROWS)
    tile = tile_of(M, bits, blocks, torch.bfloat16, torch.device("cpu"))  # an H100's where there is no GPU
    key = (form, *tile.values())
    if key not in loops:
        loops[key] = loop_of(form, bits, M, blocks, n)
    tiles = -(-n * bits // 32 // tile["C"])
    programs = -(-blocks // tile["R"]) * -(-M // tile["ROWS_X"])
    shares = share_count(programs, tiles, torch.device("cpu"))
    turns = -(-programs * shares // SMS) * -(-tiles // shares)  # of the loop, where most programs are
    size = out * n * BITS_A_WEIGHT[form] / 8 + 2 * M * (n + out)
    limits = dict(
        memory=size / BANDWIDTH,
        issue=turns * loops[key] * tile["num_warps"] / ISSUE / CLOCK,
        tensor=0.0 if M == 1 else 2 * max(16, M) * out * n / TENSOR,
    )
    launches = 1 if shares == 1 else 3  # the sum of shares, and its dtype
    words = tile["R"] * tile["C"] * 16
    return dict(
        bytes=int(size),
        programs=programs * shares,
        shares=shares,
        limits=limits,
        bound=max(limits, key=lambda name: limits[name]),
        instructions_a_weight=loops[key] * tile["num_warps"] * 32 / (words * 32 // bits),
        seconds=max(limits.values()) + launches * LAUNCH,
        bf16_seconds=(2 * out * n + 2 * M * (n + out)) / BANDWIDTH + LAUNCH,
    )


def print_table(rows: list[dict[str, Any]], totals: list[dict[str, Any]]) -> None:
    """The rows of products, and a line a total."""
    lines: list[tuple[str, ...]] = [
        ("weights", "rows", "product", "programs", "instr/weight", "bound", "us", "bf16 us")
    ]
    for r in rows:
        numbers = (f"{r['instructions_a_weight']:.2f}", r["bound"], f"{r['seconds'] * 1e6:.1f}")
        head = (r["weights"], str(r["rows"]), r["product"], str(r["programs"]))
        lines.append((*head, *numbers, f"{r['bf16_seconds'] * 1e6:.1f}"))
    print("Predicted, H100, not measured\n" + aligned(lines))
    for t in totals:
        print(
            f"{t['weights']}, rows {t['rows']}: {t['seconds'] * 1e3:.2f} ms a step, bf16 {t['bf16_seconds'] * 1e3:.2f}"
        )


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", default="1,8,64", help="rows of x (default: %(default)s)")
    p.add_argument("--out", help="write the table as JSON")
    p.add_argument("--json", action="store_true", help="print the table as JSON, nothing else")
    a = p.parse_args(argv)
    check_out(a.out)
    loops: dict[tuple[Any, ...], int] = {}
    rows, totals = [], []
    for form in BITS_A_WEIGHT:
        for M in map(int, a.rows.split(",")):
            every = [
                dict(
                    weights=form,
                    rows=M,
                    product=name,
                    out=out,
                    inputs=n,
                    count=count,
                    **predict(form, M, out, n, loops),
                )
                for name, (out, n, count) in shapes(ModelArgs.from_name("llama-3.1-8b")).items()
            ]
            rows += every
            sums = {k: sum(r["count"] * r[k] for r in every) for k in ("seconds", "bf16_seconds")}
            totals.append(dict(weights=form, rows=M, **sums))
    if a.json:
        print(json.dumps(dict(rows=rows, totals=totals)))
    else:
        print_table(rows, totals)
    if a.out:
        assumed = dict(bandwidth=BANDWIDTH, launch=LAUNCH, sms=SMS, clock=CLOCK, issue=ISSUE, tensor=TENSOR)
        write_json(a.out, record("cpu", prediction=True, rows=rows, totals=totals, assumed=assumed))


if __name__ == "__main__":
    run_cli(main)
