"""Checks an installation: the environment, every operation's Triton kernels, and a step of methods with them.

    python -m scripts.doctor                       # on a GPU; without one, kernels run in Triton's interpreter
    python -m scripts.doctor --methods sals razor  # default: all on a GPU, a few without one

Operations are held to float64, steps to those of the torch versions. On a GPU, steps of a long cache are checked, too,
and each is captured in a CUDA graph. A line each; the exit code is 2 if one fails.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are imported

from cache.grammar import method_files
from cache.spec import resolve
from engine.compiled import CapturedStep
from kernels import backend, native
from kernels.op import OPERATIONS
from runtime.errors import InputError, run_cli
from runtime.machine import available_memory
from runtime.options import Parser
from scripts.contract.checks import same, settings
from scripts.contract.harness import prompt, rounds, run, tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = ("full", "sals", "ojakv", "double_sparsity", "razor", "self_index", "kivi")  # interpreted in half a minute
# query heads a KV head, head dimension, KV heads; tokens of each prompt. With 3, keydiff would hold 2, always a tie
SMALL = (3, 32, 2), (13, 21)
LARGE = (4, 128, 8), (4093, 3000)
DTYPES = ("fp32", "fp16", "bf16")  # of an operation's draws 0, 1, 2

Check = tuple[str, Callable[[], str]]  # its name, and what says how it went, or raises


def environment() -> Iterator[Check]:
    def python() -> str:
        return f"{platform.python_version()}, torch {torch.__version__}"

    def compiler() -> str:
        if not native.available():
            raise InputError(
                "no C++ compiler, or its build failed: install g++; until then a CPU runs torch's versions"
            )
        return "C++ kernels are built"

    def triton() -> str:
        version = getattr(backend.triton, "__version__", None)
        if version is None:
            raise InputError("not installed: pip install triton")
        if DEVICE.type == "cpu":
            return f"{version}, interpreted, as torch sees no GPU"
        if not shutil.which(os.environ.get("CC", "gcc")):
            raise InputError("it builds its launchers with gcc: install it, or set CC")
        if not (header := Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            raise InputError(f"its launchers need {header}: install Python's headers (python3-dev)")
        return str(version)

    def card() -> str:
        major, minor = torch.cuda.get_device_capability()
        free = available_memory(DEVICE) / 2**30
        return f"{torch.cuda.get_device_name()}, {major}.{minor}, {free:.0f} GiB free, CUDA {torch.version.cuda}"

    yield "python", python
    yield "compiler", compiler
    yield "triton", triton
    if DEVICE.type == "cuda":
        yield "card", card


def operations() -> Iterator[Check]:
    from tests.operators import PROBLEMS, call, draw, serves

    def check(name: str) -> str:
        operation, done = OPERATIONS[name], []
        for seed in range(3):
            args, answers = draw(name, "triton", seed)
            if not serves(operation, "triton", args):
                continue
            got = call(operation, "triton", args)
            for i, answer in enumerate(answers):
                if answer is not None:
                    answer.check(got[i:], "triton")
            done.append(DTYPES[seed])
        return ", ".join(done)

    for name in PROBLEMS:
        if OPERATIONS[name].launch:
            yield name, lambda name=name: check(name)  # type: ignore[misc]


def steps(names: list[str]) -> Iterator[Check]:
    def check(name: str, heads: tuple[int, int, int], lengths: tuple[int, ...]) -> str:
        g, head_dim, n_kv_head = heads
        dtype = torch.bfloat16 if DEVICE.type == "cuda" and head_dim == 128 else torch.float32
        model = tiny(g, head_dim, n_kv_head, dtype=dtype, device=DEVICE)
        prompts, n = [prompt(n).to(DEVICE) for n in lengths], 6 if DEVICE.type == "cuda" else 2
        loose = 0.1 if dtype == torch.bfloat16 else 2e-2 if DEVICE.type == "cuda" else 1e-3

        def set_up(version: str) -> None:
            backend.BACKEND = version
            model.setup_cache(name, len(prompts), max(lengths) + 16, **settings(name)[-1])

        start = time.perf_counter()
        set_up("torch")
        want, fed = run(model, prompts, n)
        tolerance = max(loose, 2e-2 if rounds(model) else 0)
        set_up("triton")
        got, _ = run(model, prompts, n, fed)
        same(got, want, "kernels against torch", tolerance, tokens=False)
        if DEVICE.type == "cuda":
            head: Callable[..., torch.Tensor] = lambda x, pos: model.logits(x)  # noqa: E731
            step = CapturedStep(model, head, None, compiled=False)
            for _ in range(2):  # runs, captures
                step(*(torch.zeros(len(prompts), dtype=torch.int64, device=DEVICE) for _ in range(2)))
            model.reset_cache()
            same(run(model, prompts, n, fed, step)[0], got, "captured against eager", tolerance, tokens=False)
        return f"{time.perf_counter() - start:.1f} s"

    for name in names:
        yield f"{name}, short", lambda name=name: check(name, *SMALL)  # type: ignore[misc]
        if DEVICE.type == "cuda":
            yield f"{name}, long", lambda name=name: check(name, *LARGE)  # type: ignore[misc]


def main() -> int:
    p = Parser(__doc__)
    p.add_argument("--methods", nargs="+", help="methods whose steps are checked, or all")
    p.add_argument("--json", action="store_true", help="print one JSON list instead of lines")
    opt = p.parse_args()
    every = sorted(method_files())
    names = opt.methods or (every if DEVICE.type == "cuda" else FEW)
    names = every if names == ["all"] else list(names)
    for name in names:
        resolve(name)  # raises InputError
    rows = list[dict[str, Any]]()
    for what, check in itertools.chain(environment(), operations(), steps(names)):
        try:
            ok, said = True, check()
        except Exception as e:  # whatever a kernel, a compiler or a driver raises
            ok, said = False, "" if isinstance(e, InputError) else f"{type(e).__name__}: "
            said += next(iter(str(e).splitlines()), "")
        rows.append(dict(what=what, ok=ok, said=said))
        if not opt.json:
            print(f"{'ok' if ok else 'FAIL':5} {what:26} {said}", flush=True)
    if opt.json:
        print(json.dumps(rows))
    failed = sum(not row["ok"] for row in rows)
    if failed:
        print(f"failed checks: {failed}; with KV_FAST_BACKEND=torch no kernel of ours runs", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    run_cli(main)
