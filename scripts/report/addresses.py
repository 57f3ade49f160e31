"""Watches Triton's interpreter: every address that is loaded or stored lies in a tensor of the launch.

A GPU reads beside a tensor and says nothing, and so does the interpreter, as long as the memory is the process's own.
Here every masked-in address is held to the storages of the tensors that the kernel was launched with: in every
interpreted test (tests/conftest.py), and in `edges`, where lengths are least alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cache.harness import prompt, run, tiny
from cache.spec import method_class
from kernels import select

# how the rows of a selection are read: whole, by one program that lists candidates, by one a chunk
BLOCKS: dict[str, dict[str, int]] = dict(
    whole={},
    alone=dict(row=32, alone=1000, tile=32, sample=16, slack=2, listed=64),
    chunks=dict(row=32, alone=32, chunk=32, tile=32, sample=16, slack=2, listed=64),
)


class Addresses:
    """What was checked, a kernel: `loads` and `stores` (calls), `addresses` (masked in)."""

    def __init__(self) -> None:
        self.kernel = ""
        self.ranges: list[tuple[int, int]] = []  # first byte and end of each storage of the launch
        self.loads, self.stores, self.addresses = Counter[str](), Counter[str](), Counter[str]()

    def launch(self, kernel: str, args: list[Any]) -> None:
        self.kernel = kernel
        storages = [x.untyped_storage() for x in args if hasattr(x, "untyped_storage")]
        self.ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """pointers and mask are the interpreter's handles; AssertionError, which it passes on as one of its own."""
        at = pointers.data.astype(np.int64)[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        getattr(self, what)[self.kernel] += 1
        self.addresses[self.kernel] += at.size
        if not at.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        first, last = int(at.min()), int(at.max()) + size
        if any(lo <= first and last <= hi for lo, hi in self.ranges):  # nearly always: all in one tensor
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
    """Interpreted kernels are checked in here; within another, both check."""
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
    """A method under which its limits bind: a warm-up step at position 0, prompts of 61 and 3 tokens in one batch and
    steps behind them, which fall out of a window; in a cache of more rows and slots. -> what was checked."""
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
