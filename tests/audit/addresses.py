"""Checks in Triton's interpreter that every loaded or stored address is in a tensor of the launch.

    python -m tests.audit.addresses
    python -m tests.audit.addresses --methods sals loki mine.py     # a file, too

A GPU can read outside a tensor without an error, and so can the interpreter, as long as the process owns the memory.
Here every unmasked address is compared to the storages of the tensors that the kernel was launched with. This happens
in every interpreted test (tests/conftest.py), and in `edges`, where lengths differ most. For each method and way of
selecting, the script prints how much was checked. If an address is outside, it names the kernel and exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":  # read when triton is imported
    os.environ |= dict(TRITON_INTERPRET="1", KV_FAST_BACKEND="triton")
import numpy as np
import torch
from tqdm import tqdm

from cache.grammar import method_files
from cache.spec import method_class
from kernels import select
from runtime.errors import run_cli
from scripts.contract.harness import prompt, run, tiny
from tests.audit.kernel_report import aligned
from tests.audit.launches import named

# how the rows of a selection are read: whole, by one program that lists candidates, or by one program per chunk
BLOCKS: dict[str, dict[str, int]] = dict(
    whole={},
    alone=dict(row=32, alone=1000, tile=32, sample=16, slack=2, listed=64),
    chunks=dict(row=32, alone=32, chunk=32, tile=32, sample=16, slack=2, listed=64),
)


class Addresses:
    """Counts of what was checked, by kernel: `launches`, `loads` and `stores` (calls), `addresses` (unmasked)."""

    def __init__(self) -> None:
        self.kernel = ""
        self.ranges: list[tuple[int, int]] = []  # first byte and end of each storage of the launch
        self.launches, self.loads, self.stores, self.addresses = (Counter[str]() for _ in range(4))

    def launch(self, kernel: str, args: list[Any]) -> None:
        self.kernel = kernel
        self.launches[kernel] += 1
        storages = [x.untyped_storage() for x in args if hasattr(x, "untyped_storage")]
        self.ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """pointers and mask are the interpreter's handles. Raises AssertionError, which the interpreter wraps."""
        at = pointers.data.astype(np.int64)[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        getattr(self, what)[self.kernel] += 1
        self.addresses[self.kernel] += at.size
        if not at.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        first, last = int(at.min()), int(at.max()) + size
        if any(lo <= first and last <= hi for lo, hi in self.ranges):  # nearly always, all are in one tensor
            return
        outside = np.logical_and.reduce([(at < lo) | (at + size > hi) for lo, hi in self.ranges])
        if outside.any():
            x = int(at[outside][0])
            lo, hi = min(self.ranges, key=lambda r: min(abs(x - r[0]), abs(x - r[1])))
            raise AssertionError(
                f"{self.kernel}: {outside.sum()} of the addresses that it {what} are in no tensor of the launch, "
                f"the first at byte {x - lo} of one of {hi - lo}"
            )


@contextlib.contextmanager
def watched() -> Iterator[Addresses]:
    """Within it, interpreted kernels are checked; if nested, both contexts check."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    seen = Addresses()
    launch, load, store = (
        GridExecutor._init_args_hst, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    )  # fmt: skip

    def launched(self: Any, args: Any, kwargs: Any) -> Any:
        out = launch(self, args, kwargs)
        seen.launch(self.fn.__name__, [*out[0], *out[1].values()])
        return out

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        seen.check("loads", pointers, mask)
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.check("stores", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    GridExecutor._init_args_hst = launched
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loaded, stored
    try:
        yield seen
    finally:
        GridExecutor._init_args_hst = launch
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store


def edges(name: str, blocks: str = "whole") -> Addresses:
    """Runs a method at its `stress` knobs: a warm-up step at position 0, prompts of 61 and 3 tokens in one batch, and
    steps after them that leave a window, in a cache with more rows and slots. -> what was checked."""
    model, whole = tiny(3, 32, dtype=torch.bfloat16), select.select
    model.setup_cache(name, 3, 80, **method_class(name).stress or {})
    select.select = functools.partial(whole, **BLOCKS[blocks])
    try:
        with watched() as seen, torch.inference_mode():
            model.decode(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
            model.reset_cache()
            logits = run(model, [prompt(61), prompt(3)], 2)[0]
    finally:
        select.select = whole
    assert logits.isfinite().all(), name
    return seen


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--methods", nargs="*", default=sorted(method_files()), help="methods (default: all)")
    p.add_argument("--blocks", nargs="*", default=list(BLOCKS), choices=BLOCKS, help="ways of selecting (default: all)")
    p.add_argument("--json", action="store_true", help="print the rows as JSON, nothing else")
    a = p.parse_args(argv)
    torch.manual_seed(0)
    rows, problems, total = [], 0, ("launches", "loads", "stores", "addresses")
    for name, blocks in tqdm([(m, b) for m in named(a.methods) for b in a.blocks], disable=None, unit="run"):
        row = dict(method=name, blocks=blocks)
        try:
            seen = edges(name, blocks)
        except Exception as e:  # the interpreter's error, which wraps ours
            problems += 1
            print(f"{name}, {blocks}: {e}", file=sys.stderr)
            rows.append(row | dict(problem=str(e)))
            continue
        rows.append(row | {what: getattr(seen, what).total() for what in total} | dict(kernels=sorted(seen.launches)))
    if a.json:
        print(json.dumps(rows))
    else:
        head = ("method", "blocks", "kernels", *total)
        cells = [[r["method"], r["blocks"], str(len(r.get("kernels", ()))), *(f"{r.get(c, 0):,}" for c in total)]
                 for r in rows]  # fmt: skip
        print(aligned([head, *map(tuple, cells)]))
    return bool(problems)


if __name__ == "__main__":
    run_cli(main)
