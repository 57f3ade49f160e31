"""The fields that every result file has besides its numbers, and how it is written."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from runtime.machine import ROOT, check_out, written


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """The git revision, with +dirty if tracked files outside results/ differ from it."""
    try:
        changed = git("status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)results")
        return git("rev-parse", "--short", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def edits() -> str:
    """A hash of what this clone has beyond its commit, in tracked files and new methods; empty for a clean one."""
    try:
        changed = git("diff", "HEAD", "--", ":/", ":(top,exclude)results")
        new = git("ls-files", "--others", "--exclude-standard", "--", "kv_methods").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ""
    text = changed + "".join((ROOT / f).read_text(errors="replace") for f in new)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


# ---- which results are still of this code ----

STEP = ("kernels", "cache", "kv_methods")
WHOLE = (*STEP, "model.py", "weights", "engine")
ANSWERS = (*STEP, "model.py", "weights", "loading", "engine/decode.py", "engine/sampling.py", "engine/snapshot.py",
           "runtime/corpus.py", "scripts/eval/evaluation.py")  # fmt: skip
ROWS = (*ANSWERS, "scripts/eval/rows.py", "scripts/eval/ruler.py")
# a script -> its hot path: the files that determine its numbers
HOT = {
    "scripts.bench.bench_attention": STEP,
    "scripts.bench.bench_generate": WHOLE,
    "scripts.eval.perplexity": (*ANSWERS, "scripts/eval/perplexity.py"),
    "scripts.eval.compare": (*ROWS, "scripts/eval/ladders.py", "scripts/eval/compare.py"),
    "tests.audit.compare_kvpress": (*ROWS, "tests/audit/compare_kvpress.py"),
}


def cpp_code(text: str) -> str:
    """A C++ file without its comments."""
    return re.sub(r'"(?:\\.|[^"\\\n])*"|\s*//.*', lambda m: m[0] if m[0][0] == '"' else "", text)


def code(text: str, gpu: bool) -> str:
    """What runs of a Python file: not its comments and docstrings and, on a CPU, not what Triton compiles."""

    def runs(node: ast.AST) -> bool:
        if isinstance(node, ast.FunctionDef) and not gpu:
            return not any("triton" in ast.unparse(d) for d in node.decorator_list)
        return not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = list(filter(runs, body))  # type: ignore[attr-defined]
    return ast.dump(tree)


@functools.cache
def changed(since: str, command: str, gpu: bool = False, until: str | None = None) -> list[str]:
    """The files of a command's hot path that run otherwise at a commit and here, or at the commit `until`."""
    if since == (until or commit()):
        return []
    if not re.fullmatch("[0-9a-f]{7,}", since):
        return [f"files without a commit ({since})"]
    script = next((s for s in HOT if re.search(rf"{s}\b", command)), "")
    try:
        to = [until] if until else []
        names = git("diff", "--name-only", "--no-renames", since, *to, "--", *HOT.get(script, (*WHOLE, "scripts")))
    except (OSError, subprocess.CalledProcessError):
        return [f"files since commit {since}, which is not in this clone"]

    def differs(name: str) -> bool:
        runs = functools.partial(code, gpu=gpu) if name.endswith(".py") else cpp_code
        try:
            now = git("show", f"{until}:{name}") if until else (ROOT / name).read_text()
            return runs(git("show", f"{since}:{name}")) != runs(now.strip())
        except (OSError, subprocess.CalledProcessError, SyntaxError):  # one of them has no such file
            return True

    return list(filter(differs, names.splitlines()))


# ---- the machine ----


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> str:
    """This CPU's folder in results/: its family (zen3, xeon), or its own name for other CPUs."""
    try:
        lines = dict(x.split(":", 1) for x in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
        found = {k.strip(): v.strip() for k, v in lines.items()}
        flags = found["flags"].split()
        if found["vendor_id"] == "AuthenticAMD":
            family = {"23": "zen2", "25": "zen4" if "avx512f" in flags else "zen3", "26": "zen5"}
            return family.get(found["cpu family"], f"amd-{found['cpu family']}")
        if "Xeon" in found["model name"]:
            return "xeon" if "amx_tile" in flags else "xeon-without-amx"
    except (OSError, KeyError, ValueError):
        pass
    return "-".join(re.findall(r"[a-z0-9]+", cpu_name().lower())) or "unknown"


def gpu(device: torch.device) -> dict[str, Any]:
    """What determines a GPU's speed: the card, and its current driver, clocks and power limit."""
    p = torch.cuda.get_device_properties(device)
    out = dict(name=p.name, capability=f"{p.major}.{p.minor}", memory=p.total_memory, l2_cache=p.L2_cache_size,
               multiprocessors=p.multi_processor_count, cuda=torch.version.cuda)  # fmt: skip
    fields = "driver_version,power.limit,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id=GPU-{p.uuid}"]
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        return out | dict(zip(fields.split(","), line.split(", "), strict=True))
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as e:
        return out | dict(nvidia_smi=f"{type(e).__name__}: {e}")


def program() -> str:
    """`python -m scripts.bench.bench_attention`, as it was started."""
    path = Path(os.path.relpath(sys.argv[0], ROOT))
    return f"python -m {'.'.join(path.with_suffix('').parts)}" if path.parts[0] == "scripts" else f"python {path}"


def record(device: torch.device | str, **numbers: Any) -> dict[str, Any]:
    """A result's command, device, versions, commit and date, followed by `numbers`."""
    device = torch.device(device)
    packages = {}
    for name in ("torch", "triton", "transformers", "flash-attn", "flashinfer-python", "numpy"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"{cpu_name()}, {torch.get_num_threads()} threads"
    return dict(command=" ".join([program(), *sys.argv[1:]]), device=name, **(dict(gpu=gpu(device)) if cuda else {}),
                versions=dict(python=platform.python_version(), **packages), commit=commit(),
                date=time.strftime("%Y-%m-%d"), **numbers)  # fmt: skip


def write_json(path: str | Path, data: Any) -> None:
    """Writes to a temporary name, then renames: an interrupted run leaves the old file."""
    check_out(path)
    with written(path) as tmp:
        tmp.write_text(json.dumps(data, indent=1) + "\n")


def save_figure(fig: Any, path: str | Path) -> None:
    """Saves a matplotlib figure in the format of the file's suffix, safely like `write_json`."""
    with written(path) as tmp:
        fig.savefig(tmp, dpi=110, format=Path(path).suffix[1:].lower() or "png")
