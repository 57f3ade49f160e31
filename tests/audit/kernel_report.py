"""Registers, spills, shared memory and occupancy of every launched Triton kernel, without a GPU.

    python -m tests.audit.kernel_report --one
    python -m tests.audit.kernel_report --cc 90 --models llama-3.1-8b --sizes 8x32832 --methods sals-12.5 kivi-2
    python -m tests.audit.kernel_report --methods mine.py                          # a method's file, anywhere

Another Triton, in a folder of its own (pip install --target), is compared with the one that is installed:

    python -m tests.audit.kernel_report --one --cc 90 --out newest.json
    PYTHONPATH=FOLDER python -m tests.audit.kernel_report --one --cc 90 --beside newest.json

Records every launch of methods and weights (launches.py) and passes each through Triton's own launcher, up to the
machine code of each GPU. The exit code is 1 if a kernel cannot be launched, spills registers or needs more shared
memory than a program may have on the GPU.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported; an interpreted kernel cannot be compiled
import torch
import triton
from tqdm import tqdm
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from runtime.errors import InputError, run_cli
from runtime.machine import ROOT
from scripts.shared.results import check_out, record, write_json
from scripts.shared.timing import reason
from tests.audit.launches import METHODS, MODELS, SIZES, WEIGHTS, is_tensor, named, recorded

KERNELS = ROOT / "kernels"
# compute capability -> a multiprocessor's shared memory in KB, most threads and most programs (CUDA C++ Programming
# Guide, table of technical specifications). A program may have all of it except 1 KB, which the system keeps.
CARDS = {80: (164, 2048, 32), 86: (100, 1536, 16), 89: (100, 1536, 24), 90: (228, 2048, 32), 100: (228, 2048, 32),
         120: (100, 1536, 24)}  # fmt: skip
REGISTERS, WARP_REGISTERS = 65536, 256  # of a multiprocessor; the unit in which a warp allocates them


class Card:
    """A driver as Triton queries it before a launch, of a GPU that need not exist."""

    def __init__(self, cc: int):
        self.get_current_target = lambda: GPUTarget("cuda", cc, 32)

    get_current_device = get_current_stream = staticmethod(lambda *device: 0)


def launch(entry: dict[str, Any], cc: int, bind: bool = False) -> dict[str, Any]:
    """Passes a recorded launch through the launcher, up to the machine code for compute capability `cc` (90 = H100).

    bind: only the launcher, nothing is compiled -> {}, or an error. Otherwise -> registers per thread; spills, bytes a
    thread keeps in local memory; shared, bytes per program; warps; the programs that a multiprocessor can hold and what
    limits them; loads, bytes that a thread reads at once -> number of global loads; loop, instruction -> its number in
    the body of the longest loop.
    """
    if cc not in CARDS:
        raise InputError(f"compute capability {cc} is not known: use one of {', '.join(map(str, CARDS))}")

    def given(x: Any) -> Any:
        if not is_tensor(x):
            return x
        tensor = MockTensor(getattr(torch, x[1]))
        tensor.data_ptr = lambda: x[2]  # type: ignore[method-assign]
        return tensor

    kernel = getattr(importlib.import_module(entry["module"]), entry["kernel"])
    if not isinstance(kernel, triton.JITFunction):
        raise InputError(f"{entry['kernel']} is interpreted: unset TRITON_INTERPRET before triton is imported")
    kernel.device_caches.clear()  # may be of another GPU
    with (
        mock.patch.object(driver, "_active", Card(cc)),
        mock.patch.object(knobs.runtime, "jit_cache_hook", (lambda **_: True) if bind else None),
    ):
        try:
            args = {n: given(x) for n, x in entry["args"].items()}
            compiled = kernel.run(grid=(1,), warmup=True, **args, **entry["options"])
            return {} if compiled is None else needs(compiled, cc)
        except Exception as e:  # record all errors of launcher and compiler, and go on with the other kernels
            return dict(error=f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")


def in_words(args: dict[str, Any]) -> str:
    """The arguments of a recorded launch on one line; a tensor is its dtype, and its offset from a multiple of 16."""
    said = {n: f"{x[1]}{f'+{x[2]}' if x[2] else ''}" if is_tensor(x) else x for n, x in args.items()}
    return ", ".join(f"{n} {x}" for n, x in said.items())


def needs(compiled: Any, cc: int) -> dict[str, Any]:
    """The resources of a compiled kernel's machine code, as in `launch`."""
    # REG:88 STACK:0 SHARED:1024 LOCAL:0 ...: spilled registers are on the stack; on cc >= 90 SHARED has the kilobyte
    # that the system keeps, and the kernel's own shared memory is set at launch
    usage = _dumped(compiled, "--dump-resource-usage")
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    meta = compiled.metadata
    return dict(
        registers=used["REG"],
        spills=used["STACK"] + used["LOCAL"],
        shared=meta.shared,
        warps=meta.num_warps,
        **occupancy(used["REG"], meta.shared, meta.num_warps, cc),
        loads=load_widths(compiled.asm["ptx"]),
        loop=longest_loop(_dumped(compiled, "--dump-sass")),
    )


def _dumped(compiled: Any, what: str) -> str:
    """cuobjdump's output for a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, f.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def occupancy(registers: int, shared: int, warps: int, cc: int) -> dict[str, Any]:
    """The number of programs that one multiprocessor holds at once, and what limits it."""
    kilobytes, threads, programs = CARDS[cc]
    per_warp = -(-registers * 32 // WARP_REGISTERS) * WARP_REGISTERS
    limits = {
        "registers": REGISTERS // (per_warp * warps),
        "shared": kilobytes * 1024 // (shared + 1024),
        "threads": threads // (32 * warps),
        "programs": programs,
    }
    limit = min(limits, key=lambda name: limits[name])
    return dict(programs=limits[limit], limit=limit)


def load_widths(ptx: str) -> dict[int, int]:
    """Bytes that a thread reads from global memory at once -> number of such instructions."""
    widths = Counter(int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (0x\w+|\d+)", ptx))
    for vector, bits in re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx):
        widths[int(vector or 1) * int(bits) // 8] += 1
    return dict(sorted(widths.items(), reverse=True))


def longest_loop(sass: str) -> dict[str, int]:
    """Instruction without modifiers -> its number between the branch that jumps back farthest and its target."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)([^;]*);", sass)
    code = [(int(at, 16), name, rest) for at, name, rest in lines]
    jumps = [(at, int(m[1], 16)) for at, name, rest in code if name == "BRA" and (m := re.search(r"0x(\w+)", rest))]
    back = [(to, at) for at, to in jumps if to < at]
    if not back:
        return {}
    first, last = max(back, key=lambda loop: loop[1] - loop[0])
    return dict(Counter(name for at, name, _ in code if first <= at <= last).most_common())


def launched(source: str) -> set[str]:
    """The Triton kernels that a file defines and launches: kernel[grid](...)."""
    nodes = list(ast.walk(ast.parse(source)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    kernels = {f.name for f in functions if any(ast.unparse(d) == "triton.jit" for d in f.decorator_list)}
    targets = (n.func.value for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript))
    return kernels & {x.id for x in targets if isinstance(x, ast.Name)}


def kernels() -> Iterator[tuple[str, str]]:
    """File and name of every kernel of kernels/ that is launched."""
    for path in sorted(KERNELS.glob("[!_]*.py")):
        yield from ((path.stem, name) for name in sorted(launched(path.read_text())))


def problem(row: dict[str, Any]) -> str | None:
    if "error" in row or not row:
        return row.get("error")
    if row["spills"]:
        return f"spills {row['spills']} bytes a thread"
    if not row["programs"]:
        return f"does not fit: {row['limit']}"
    return None


def aligned(lines: list[tuple[str, ...]], width: list[int] | None = None) -> str:
    width = width or [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, width, strict=True)).rstrip() for line in lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns; loads as width x count. An error may extend over the columns that its row lacks."""
    head = (
        "file",
        "kernel",
        "model",
        "method",
        "cc",
        "triton",
        "registers",
        "spills",
        "shared",
        "warps",
        "programs",
        "limit",
    )
    lines: list[tuple[str, ...]] = [(*head, "loads")]
    for r in rows:
        if "error" in r or "loads" not in r:
            lines.append((*(str(r[c]) for c in head[:6]), r.get("error", ""), *("",) * 6))
        else:
            loads = " ".join(f"{width}Bx{n}" for width, n in r["loads"].items())
            lines.append((*(str(r[c]) for c in head), loads))
    return aligned(lines, [max(len(line[i]) for line in lines if i != 6 or line[7]) for i in range(len(lines[0]))])


def in_order(row: dict[str, Any]) -> list[Any]:
    """The order of a table: the same launch under two versions of Triton is on two lines that follow each other."""
    return [str(row[c]) for c in ("file", "kernel", "model", "method", "cc", "args", "options", "triton")]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cc", default="80,89,90,100", help="compute capabilities, 90 = H100 (default: %(default)s)")
    p.add_argument("--models", nargs="*", default=list(MODELS), help="models with these shapes (default: %(default)s)")
    p.add_argument("--methods", nargs="*", default=list(METHODS), help="methods and presets, or files, with knobs")
    p.add_argument("--weights", nargs="*", default=list(WEIGHTS), help="packed weights, with the method full")
    p.add_argument("--sizes", nargs="*", default=list(SIZES), metavar="BxT", help="rows x slots (default: %(default)s)")
    p.add_argument("--files", nargs="*", default=[], help="only kernels of these files of kernels/, without .py")
    p.add_argument("--bind", action="store_true", help="stop after the launcher: nothing is compiled")
    p.add_argument("--one", action="store_true", help="only one launch of each kernel")
    p.add_argument("--out", help="result file, as JSON")
    p.add_argument("--beside", metavar="FILE", help="an earlier --out, whose rows the table shows, too")
    p.add_argument("--json", action="store_true", help="print the kernels' rows as JSON, nothing else")
    a = p.parse_args(argv)
    try:
        cards = [int(cc) for cc in a.cc.split(",")]
    except ValueError:
        raise InputError(f"--cc {a.cc} is not a list such as 80,89,90,100") from None
    if unknown := set(a.files) - {file for file, _ in kernels()}:
        raise InputError(f"no kernels in kernels/{unknown.pop()}.py")
    check_out(a.out)
    try:
        beside = json.loads(Path(a.beside).read_text())["rows"] if a.beside else []
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"--beside {a.beside} is no file that --out wrote ({reason(e)})") from None
    found = recorded(a.models, named(a.methods), a.weights, a.sizes)
    entries = [e for e in found.seen.values() if not a.files or e["file"] in a.files]
    if a.one:
        entries = list({(e["file"], e["kernel"]): e for e in reversed(entries)}.values())
    rows: list[dict[str, Any]] = []

    def write(complete: bool) -> None:
        if a.out:
            write_json(a.out, record("cpu", rows=rows, complete=complete))

    for cc in cards:  # one GPU after the other, so that an interrupted run has some of them complete
        for i, e in enumerate(tqdm(entries, disable=None, unit=f"launch for cc {cc}")):
            model, method, *_ = e["by"][0]
            methods = sorted({by[1] for by in e["by"]})
            head = dict(file=e["file"], kernel=e["kernel"], model=model, method=method, methods=methods, cc=cc)
            row = launch(e, cc, a.bind)
            form = dict(
                triton=triton.__version__, args=in_words(e["args"]), options=e["options"], launches=e["launches"]
            )
            rows.append(head | form | row | dict(problem=problem(row)))
            if i % 50 == 49:
                write(False)
    write(True)
    print(json.dumps(rows) if a.json else table(sorted(rows + beside, key=in_order)))
    problems = [r for r in rows if r["problem"]]
    for r in problems:
        print(
            f"{r['file']}: {r['kernel']} (cc {r['cc']}, {r['model']}, {r['method']}): {r['problem']}", file=sys.stderr
        )
    return bool(problems)


if __name__ == "__main__":
    run_cli(main)
