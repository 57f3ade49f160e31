"""Run the quick tests as other machines would: one factor at a time, then the worst combination.

python -m tests.audit.matrix --out results/matrix.json    # hours on two cores; a quarter with --share 6
python -m tests.audit.matrix --only seed-1 avx2 --tests tests/test_weights.py
python -m tests.audit.matrix --python /path/to/venv/bin/python --only base    # another torch, another Python

Factors: the order of the tests and work stealing; the instruction sets of torch (ATEN_CPU_CAPABILITY) and of our C++;
threads; no C++ compiler; a load of twice the cores. A run that is already in the file is not repeated. Below AVX-512 on
a processor with AMX, torch refuses to multiply bf16, which no such processor does: those failures are told apart.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from runtime.errors import InputError, run_cli
from runtime.machine import ROOT, check_out, written
from runtime.options import Parser
from scripts.shared.results import commit, cpu_name

TORCHS = "pack_vnni2 is only supported when avx512 is supported"
ORDER = ["--random-order-bucket=module"]
STEAL = ["--dist", "worksteal"]
# name -> environment, pytest's arguments; "march" and "load" are not of the environment
FACTORS: dict[str, tuple[dict[str, str], list[str]]] = {
    "base": ({}, []),
    **{f"seed-{n}": ({}, [*ORDER, f"--random-order-seed={n}"]) for n in (1, 2, 3)},
    "worksteal": ({}, [*ORDER, "--random-order-seed=4", *STEAL]),
    **{name: ({"ATEN_CPU_CAPABILITY": name}, []) for name in ("default", "avx2", "avx512")},
    "ours-v2": ({"march": "x86-64-v2"}, []),
    "ours-v3": ({"march": "x86-64-v3"}, []),
    "ours-no-amx": ({"march": "native -mno-amx-tile -mno-amx-bf16 -mno-amx-int8"}, []),
    "threads-2": ({"OMP_NUM_THREADS": "2"}, []),
    "threads-4": ({"OMP_NUM_THREADS": "4"}, []),
    "no-compiler": ({"CXX": "false", "PATH": ""}, []),
    "load": ({"load": "2"}, []),
    "worst": (
        {"ATEN_CPU_CAPABILITY": "default", "march": "x86-64-v2", "OMP_NUM_THREADS": "4", "load": "2"},
        [*ORDER, "--random-order-seed=5", *STEAL],
    ),
}


@contextmanager
def surroundings(env: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a run: with a compiler for `march`, beside `load` busy processes per core."""
    env, busy = dict(env), []
    with tempfile.TemporaryDirectory() as folder:
        if march := env.pop("march", None):
            cxx = Path(folder, "cxx")  # the last -march wins
            cxx.write_text(f'#!/bin/sh\nexec g++ "$@" -march={march}\n')
            cxx.chmod(0o755)
            env["CXX"] = str(cxx)
        if "PATH" in env:  # nothing but Python, so that no compiler is found
            env["PATH"] = str(Path(sys.executable).parent)
        try:
            for _ in range(int(env.pop("load", 0)) * (os.cpu_count() or 1)):
                busy.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            yield {"OMP_NUM_THREADS": "1"} | env
        finally:
            for process in busy:
                process.kill()
                process.wait()


def run(python: str, name: str, tests: list[str], share: int) -> dict[str, Any]:
    env, more = FACTORS[name]
    env = dict(SEED=str(list(FACTORS).index(name))) | env  # so that each run draws other cases
    threads = int(env.get("OMP_NUM_THREADS", "1"))  # workers whose threads share a core wait for each other
    workers = max(1, (os.cpu_count() or 1) // threads)
    command = [python, *f"-m pytest -n {workers} --share {share} -p no:cacheprovider -m".split(), "not slow"]
    command += [*([] if STEAL[0] in more else ["--dist", "loadfile"]), *more, *tests]
    start = time.monotonic()
    with surroundings(env) as around:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | around | dict(COLUMNS="400"), capture_output=True, text=True
        )
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout[-300:])}
    failed = dict(re.findall(r"^(?:FAILED|ERROR) (\S+)(.*)", done.stdout, re.M))
    torchs = [test for test, why in failed.items() if TORCHS in why]
    rc = 0 if torchs and len(torchs) == len(failed) else done.returncode
    return dict(factor=name, counts=counts, failed=[t for t in failed if t not in torchs], torchs=torchs,
                seconds=round(time.monotonic() - start), rc=rc)  # fmt: skip


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--only", nargs="+", choices=FACTORS, default=list(FACTORS), metavar="NAME", help=", ".join(FACTORS))
    p.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="these alone")
    p.add_argument("--share", type=int, default=1, metavar="N", help="one in N of each test's cases, drawn by factor")
    p.add_argument("--python", default=sys.executable, help="of another environment")
    p.add_argument("--out", metavar="F", help="a JSON file, written after each run; its runs are not repeated")
    opt = p.parse_args()
    check_out(opt.out)
    ask = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"
    asked = subprocess.run([opt.python, "-c", ask], capture_output=True, text=True)
    if asked.returncode:
        raise InputError(f"--python {opt.python} has no torch: name the Python of an environment with the requirements")
    of = dict(zip(("python", "torch"), json.loads(asked.stdout), strict=True))
    of |= dict(cpu=cpu_name(), capability=torch.backends.cpu.get_cpu_capability(), commit=commit(), tests=opt.tests,
              share=opt.share)  # fmt: skip
    runs = json.loads(Path(opt.out).read_text())["runs"] if opt.out and Path(opt.out).exists() else []
    for name in tqdm(opt.only, unit="run", disable=None):
        if any(r["factor"] == name and all(r.get(k) == x for k, x in of.items()) for r in runs):
            continue
        runs.append(of | run(opt.python, name, opt.tests, opt.share))
        print(name, runs[-1]["counts"], *runs[-1]["failed"], sep="\n    ", flush=True)
        if opt.out:
            with written(opt.out) as f:
                f.write_text(json.dumps(dict(command=sys.argv, runs=runs), indent=1) + "\n")
    if any(r["rc"] for r in runs):
        sys.exit(1)


if __name__ == "__main__":
    run_cli(main)
