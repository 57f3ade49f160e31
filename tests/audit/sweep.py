"""Tries other launch options and blocks of kernels, and writes what was faster to the table that launchers read.

    python -m tests.audit.sweep --methods sals-12.5 self_index --sizes 8x32832
    python -m tests.audit.sweep --cc 90 --kernels _page_score --methods quest --sizes 8x32832 --out tried.json

Each operation that a prompt, a step and its maintenance call is called again with other warps, stages and blocks of its
kernels, one change after the other as long as one is faster. --cc tries the sweep itself on any machine: what counts is
then how many warps a multiprocessor holds, which says nothing about time, and the table is of no card that exists.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported; an interpreted kernel cannot be compiled
import torch
import triton
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from cache.spec import layer_methods
from kernels.op import OPERATIONS
from kernels.tuned import ASKED, TABLE, chosen
from loading.checkpoint import random_transformer
from loading.named import named_args
from runtime.errors import InputError, run_cli
from scripts.shared.results import check_out, write_json
from tests.audit import kernel_report
from tests.audit.launches import LAYERS, NEW, converse, named, really, recording

Options = dict[str, int]
Calls = dict[str, list[Callable[[], Any]]]
GAIN = 0.98  # of the time before, or less: what repeats of a measurement do not differ by


@contextlib.contextmanager
def noting() -> Iterator[Calls]:
    """Within it, kernels -> calls of the operations that launch them, one of each form: shapes, strides and dtypes."""
    calls: Calls = defaultdict(list)
    seen = set()

    def noted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            ASKED.clear()
            out = launch(*args)
            form = (name, *((*x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
                            for x in tree_leaves(args)))  # fmt: skip
            if form not in seen:
                seen.add(form)
                for kernel in ASKED:
                    calls[kernel].append(functools.partial(launch, *args))
            return out

        return call

    with contextlib.ExitStack() as stack:
        for name, operation in OPERATIONS.items():
            if operation.launch:
                stack.enter_context(mock.patch.object(operation, "launch", noted(name, operation.launch)))
        yield calls


def neighbours(options: Options) -> Iterator[Options]:
    """Twice and half the warps and the blocks, one stage more and one less."""
    for name, x in options.items():
        if name == "num_stages":
            steps, low, high = (x - 1, x + 1), 1, 6
        elif name == "num_warps" or name.startswith("BLOCK"):
            steps, (low, high) = (x // 2, x * 2), (1, 16) if name == "num_warps" else (16, 4096)
        else:
            continue
        yield from ({name: y} for y in steps if low <= y <= high)


def best(default: Options, score: Callable[[Options], float]) -> Options:
    """The changes to `default` that no single further change makes faster."""
    changes: Options = {}
    least, tried = score({}), [{}]
    while True:
        for step in neighbours(default | changes):
            new = {n: x for n, x in (changes | step).items() if default[n] != x}
            if new not in tried:
                tried.append(new)
                if (x := score(new)) < least * GAIN:
                    changes, least = new, x
                    break
        else:
            return changes


def seconds(calls: list[Callable[[], Any]]) -> float:
    try:
        return sum(triton.testing.do_bench(call, return_mode="median") for call in calls)
    except Exception:  # whatever compiler or card refuse: too many registers, too much shared memory, a tile too small
        return math.inf


def needed(calls: list[Callable[[], Any]], kernel: str, launches: Any, cc: int) -> float:
    """The multiprocessors that a warp of each launch takes, in fake tensors."""
    launches.seen.clear()
    for call in calls:
        call()
    entries = [e for e in launches.seen.values() if e["kernel"] == kernel]
    rows = [really(kernel_report.launch)(e, cc) for e in entries]
    return sum(math.inf if kernel_report.problem(r) else 1 / (r["programs"] * r["warps"]) for r in rows)


def on_card(model: str, method: str, batch: int, length: int) -> None:
    args = named_args(model)
    args.n_layer, args.max_seq_len = LAYERS, max(args.max_seq_len, length)
    decoder = random_transformer(args, "cuda", torch.bfloat16).eval()
    decoder.setup_cache(method, batch, length, NEW)
    lengths = torch.full((batch,), length - NEW, device="cuda")
    logits = decoder.prefill(torch.zeros(batch, length - NEW, dtype=torch.int64, device="cuda"), lengths)
    decoder.decode(logits.argmax(-1), lengths)
    decoder.maintain(NEW)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="*", default=["llama-3.1-8b"], help="models with these shapes")
    p.add_argument("--methods", nargs="*", default=["full"], help="methods and presets, or files, with knobs")
    p.add_argument("--sizes", nargs="*", default=["8x32832"], metavar="BxT", help="rows x slots")
    p.add_argument("--kernels", nargs="*", help="only these (default: all that are launched)")
    p.add_argument("--cc", type=int, help="without a card: the compute capability to compile for, 90 = H100")
    p.add_argument("--out", default=str(TABLE), help="the table (default: what launchers read); others' rows are kept")
    a = p.parse_args(argv)
    if a.cc is None and not torch.cuda.is_available():
        raise InputError("a sweep measures on a GPU, and there is none: --cc 90 tries it without")
    check_out(a.out)
    card = torch.cuda.get_device_name() if a.cc is None else f"cc {a.cc}"
    found = json.loads(Path(a.out).read_text()) if Path(a.out).exists() else {}
    methods = named(a.methods)
    for method in methods:
        layer_methods(method, LAYERS)  # imports its file, and with it the operations that `noting` is to find
    runs = [(model, method, *map(int, size.split("x"))) for model in a.models for method in methods for size in a.sizes]
    with contextlib.ExitStack() as stack:
        launches = stack.enter_context(recording()) if a.cc else None
        stack.enter_context(torch.inference_mode())
        with noting() as calls:
            for model, method, batch, length in runs:
                if launches:
                    converse(launches, model, method, None, batch, length)
                else:
                    on_card(model, method, batch, length)
        if missing := set(a.kernels or ()) - set(calls):
            raise InputError(f"{missing.pop()} is launched by none of these methods; these are: {', '.join(calls)}")
        for kernel in tqdm(a.kernels or list(calls), disable=None, unit="kernel"):

            def score(changes: Options, kernel: str = kernel) -> float:
                with mock.patch.dict(chosen(), {kernel: changes}):
                    return needed(calls[kernel], kernel, launches, a.cc) if launches else seconds(calls[kernel])

            ASKED.clear()
            calls[kernel][0]()
            table = found.setdefault(card, {}).setdefault(triton.__version__, {})
            if changes := best(ASKED[kernel], score):
                table[kernel] = changes
            else:
                table.pop(kernel, None)
            print(f"{kernel}: {changes or 'as it is'}")
            write_json(a.out, found)


if __name__ == "__main__":
    run_cli(main)
