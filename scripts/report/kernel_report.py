"""Registers, spills, shared memory and occupancy of every Triton kernel, compiled ahead of time: no GPU is needed.

    python -m scripts.report.kernel_report
    python -m scripts.report.kernel_report --cc 90 --models llama-3.1-8b --files dense_attention packed_attention
    python -m scripts.report.kernel_report --cc 80,89,90,100 --out results/kernels.json

Compiles what `aot` lists in the file of scripts/report/kernels/ that goes by the name of one of kernels/. Exits with 1
if a kernel spills registers, needs more shared memory than a program may have on the card, or does not compile.

A second table is the static account, where the file has an `account`: the bytes that one decode step of a layer moves
by each of its operations, the kernels it launches, and the time that follows on an H100. It is an estimate from sizes,
not a measurement.
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

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported; an interpreted kernel cannot be compiled
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from errors import InputError, run_cli
from model import ModelArgs
from runtime import ROOT
from scripts.shared.results import check_out, record, write_json

KERNELS = ROOT / "kernels"
MODELS = ("llama-2-7b", "llama-3.1-8b")
# compute capability -> shared memory of a multiprocessor in KB, its most threads, its most programs (CUDA C++
# Programming Guide, table of technical specifications). A program may have 1 KB less than all: the system keeps that.
CARDS = {80: (164, 2048, 32), 86: (100, 1536, 16), 89: (100, 1536, 24), 90: (228, 2048, 32), 100: (228, 2048, 32),
         120: (100, 1536, 24)}  # fmt: skip
REGISTERS, WARP_REGISTERS = 65536, 256  # of a multiprocessor; a warp takes them in multiples of
BANDWIDTH = 3.35e12  # bytes/s: H100 SXM5, NVIDIA's data sheet
LAUNCH = (
    2e-6  # s, an assumption: what a kernel of a captured graph adds to its bytes, to start, fill and drain the card
)


def compile_kernel(
    fn: Any, signature: dict[str, str], constexprs: dict[str, Any], options: dict[str, int], cc: int
) -> dict[str, Any]:
    """Compile one kernel for compute capability `cc` (90 = H100) and read what it needs from its machine code.

    signature: argument -> Triton type or "constexpr". Pointers count as aligned to 16 bytes, as tensors of torch are;
    an integer that is a multiple of 16 says so, as in "i32:16": launches specialize on both, and without them no load
    is vectorized.

    -> registers a thread; spills, bytes a thread keeps in local memory; shared, bytes a program; warps; programs a
    multiprocessor can hold and what limits them; loads, bytes a thread reads at once -> how many global loads; loop,
    instruction -> how many in the longest loop's body.
    """
    if not isinstance(fn, triton.JITFunction):
        raise InputError(f"{fn.__name__} is interpreted: unset TRITON_INTERPRET before triton is imported")
    if cc not in CARDS:
        raise InputError(f"compute capability {cc} is not known: use one of {', '.join(map(str, CARDS))}")
    if missing := set(fn.arg_names) ^ set(signature):
        raise InputError(f"{fn.__name__}: the signature and the arguments differ in {', '.join(sorted(missing))}")
    if unset := {a for a, t in signature.items() if t == "constexpr"} ^ set(constexprs):
        raise InputError(f"{fn.__name__}: {', '.join(sorted(unset))} must be both a constexpr and have a value")
    signature = {a: signature[a] for a in fn.arg_names}
    aligned = [i for i, t in enumerate(signature.values()) if t.startswith("*") or t.endswith(":16")]
    source = ASTSource(
        fn,
        {a: t.removesuffix(":16") for a, t in signature.items()},
        constexprs,
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    return needs(compiled, cc) | dict(
        loads=load_widths(compiled.asm["ptx"]), loop=longest_loop(_dumped(compiled, "--dump-sass"))
    )


def needs(compiled: Any, cc: int) -> dict[str, Any]:
    """registers, spills, shared, warps, programs and limit of a compiled kernel: see `compile_kernel`."""
    # REG:88 STACK:0 SHARED:1024 LOCAL:0 ...: spilled registers are on the stack; on cc >= 90 the kilobyte that the
    # system keeps is in SHARED, while the kernel's own is given at launch
    usage = _dumped(compiled, "--dump-resource-usage")
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    meta = compiled.metadata
    return dict(
        registers=used["REG"],
        spills=used["STACK"] + used["LOCAL"],
        shared=meta.shared,
        warps=meta.num_warps,
        **occupancy(used["REG"], meta.shared, meta.num_warps, cc),
    )


def _dumped(compiled: Any, what: str) -> str:
    """What cuobjdump says of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, f.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def occupancy(registers: int, shared: int, warps: int, cc: int) -> dict[str, Any]:
    """How many programs one multiprocessor holds at once, and what limits it."""
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
    """Instruction without its modifiers -> how many stand between the branch that goes farthest back and its target."""
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


def kernel_files(names: list[str]) -> Iterator[tuple[str, Any]]:
    """Files of kernels/ with kernels, and what is to be reported of each; all of them, or those named."""
    files = {p.stem: p for p in sorted(KERNELS.glob("[!_]*.py"))}
    known = [name for name in files if Path(__file__).with_name("kernels").joinpath(f"{name}.py").exists()]
    asked = {name: path for name, path in files.items() if name in names or not names}
    if missing := [name for name in asked if name not in known and launched(asked[name].read_text())]:
        raise InputError(f"kernels/{missing[0]}.py has kernels: list them in scripts/report/kernels/{missing[0]}.py")
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no kernels in kernels/{unknown[0]}.py: use some of {', '.join(known)}")
    for name in names or known:
        yield name, importlib.import_module(f"scripts.report.kernels.{name}")


def report(
    files: list[str], models: list[str], ccs: list[int], only: str = "", first: int | None = None
) -> list[dict[str, Any]]:
    """One row per kernel, model and card: file, kernel, model, cc, then what `compile_kernel` says or an error.

    only: a regular expression that names of kernels match; first: so many of each file's list, for each model.
    """
    work = []
    for file, module in kernel_files(files):
        for model in models:
            a = ModelArgs.from_name(model)
            for name, *kernel in module.aot(a.n_head, a.n_kv_head, a.head_dim)[:first]:
                if re.search(only, name):
                    work += [(dict(file=file, kernel=name, model=model, cc=cc), kernel) for cc in ccs]
    rows = []
    for head, (fn, signature, constexprs, options) in tqdm(work, disable=None, unit="kernel"):
        try:
            row = head | compile_kernel(fn, signature, constexprs, options, head["cc"])
        except InputError:
            raise
        except Exception as e:  # whatever the compiler throws, the others are still to be seen
            row = head | dict(error=f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")
        rows.append(row | dict(problem=problem(row)))
    return rows


def problem(row: dict[str, Any]) -> str | None:
    if "error" in row:
        return row["error"]
    if row["spills"]:
        return f"spills {row['spills']} bytes a thread"
    if not row["programs"]:
        return f"does not fit: {row['limit']}"
    return None


def accounts(files: list[str], models: list[str], batch: int, length: int) -> list[dict[str, Any]]:
    """One row per operation and model of the files that have an `account`: bytes, launches and seconds on an H100.

    Sizes are those of bf16 unless the file says otherwise; seconds are bytes at full bandwidth and LAUNCH a kernel.
    """
    rows = []
    for file, module in kernel_files(files):
        if not hasattr(module, "account"):
            continue
        for model in models:
            a = ModelArgs.from_name(model)
            for row in module.account(a.n_head, a.n_kv_head, a.head_dim, batch, length):
                head = dict(file=file, model=model, batch=batch, length=length)
                rows.append(
                    head | row | dict(seconds=row["bytes"] / row.get("bandwidth", BANDWIDTH) + row["launches"] * LAUNCH)
                )
    return rows


def account_table(rows: list[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [
        ("file", "operation", "model", "batch", "length", "MB", "launches", "us at the limit")
    ]
    for r in rows:
        sizes = (str(r[c]) for c in ("batch", "length"))
        numbers = (f"{r['bytes'] / 1e6:.2f}", str(r["launches"]), f"{r['seconds'] * 1e6:.1f}")
        lines.append((r["file"], r["op"], r["model"], *sizes, *numbers))
    return aligned(lines)


def aligned(lines: list[tuple[str, ...]], width: list[int] | None = None) -> str:
    width = width or [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, width, strict=True)).rstrip() for line in lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns; loads as width x count."""
    head: tuple[str, ...] = (
        "file",
        "kernel",
        "model",
        "cc",
        "registers",
        "spills",
        "shared",
        "warps",
        "programs",
        "limit",
        "loads",
    )
    lines = [head]
    for r in rows:
        if "error" in r:
            lines.append((*(str(r[c]) for c in head[:4]), r["error"], *("",) * 6))
        else:
            loads = " ".join(f"{width}Bx{n}" for width, n in r["loads"].items())
            lines.append((*(str(r[c]) for c in head[:-1]), loads))
    # an error may run on over the columns that its row has not
    return aligned(lines, [max(len(line[i]) for line in lines if i != 4 or line[5]) for i in range(len(head))])


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cc", default="80,89,90,100", help="compute capabilities, 90 = H100 (default: %(default)s)")
    p.add_argument("--models", default=",".join(MODELS), help="whose shapes (default: %(default)s)")
    p.add_argument("--files", nargs="*", default=[], help="of kernels/, without .py (default: all that list kernels)")
    p.add_argument("--only", default="", metavar="REGEX", help="kernels whose name matches")
    p.add_argument(
        "--first", type=int, metavar="N", help="the first N kernels of each file: it lists the main one first"
    )
    p.add_argument("--batch", type=int, default=8, help="rows of the static account (default: %(default)s)")
    p.add_argument("--length", type=int, default=32768, help="tokens of each (default: %(default)s)")
    p.add_argument("--out", help="write both tables as JSON")
    p.add_argument("--json", action="store_true", help="print the kernels' rows as JSON, nothing else")
    a = p.parse_args(argv)
    try:
        ccs = [int(cc) for cc in a.cc.split(",")]
    except ValueError:
        raise InputError(f"--cc {a.cc} is not a list such as 80,89,90,100") from None
    if a.batch < 1 or a.length < 1:
        raise InputError(f"--batch {a.batch} and --length {a.length} must be at least 1")
    check_out(a.out)
    models = a.models.split(",")
    rows = report(a.files, models, ccs, a.only, a.first)
    if not rows:
        raise InputError("no kernel matches: see --files and --only")
    account = accounts(a.files, models, a.batch, a.length)
    if a.out:
        assumed = dict(bandwidth=BANDWIDTH, launch=LAUNCH)
        write_json(a.out, record("cpu", rows=rows, account=account, assumed=assumed))
    print(json.dumps(rows) if a.json else table(rows))
    if account and not a.json:
        print(f"\nStatic account, H100: {BANDWIDTH / 1e12} TB/s, {LAUNCH * 1e6:g} us a launch assumed")
        print(account_table(account))
    problems = [r for r in rows if r["problem"]]
    for r in problems:
        print(f"{r['file']}: {r['kernel']} ({r['model']}, cc {r['cc']}): {r['problem']}", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    run_cli(main)
