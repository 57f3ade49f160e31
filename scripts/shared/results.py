"""What every result file holds beside its numbers, and how it is written."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from runtime import ROOT, check_out, temporary


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """The revision, with +dirty if tracked files other than results differ from it."""
    try:
        changed = git("status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)results")
        return git("rev-parse", "--short", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def gpu(device: torch.device) -> dict[str, Any]:
    """What decides a GPU's speed: the card, and the driver, clocks and power limit as they are now."""
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
    """`python -m scripts.bench.bench_linear`, as it was started."""
    path = Path(os.path.relpath(sys.argv[0], ROOT))
    return f"python -m {'.'.join(path.with_suffix('').parts)}" if path.parts[0] == "scripts" else f"python {path}"


def record(device: torch.device | str, **numbers: Any) -> dict[str, Any]:
    """The command, device, versions, commit and date, then the numbers."""
    device = torch.device(device)
    packages = {}
    for name in ("torch", "triton", "transformers", "flash-attn", "flashinfer-python", "numpy"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cuda = device.type == "cuda"
    return dict(
        command=" ".join([program(), *sys.argv[1:]]),
        device=torch.cuda.get_device_name(device) if cuda else f"{cpu_name()}, {torch.get_num_threads()} threads",
        **(dict(gpu=gpu(device)) if cuda else {}),
        versions=dict(python=platform.python_version(), **packages),
        commit=commit(),
        date=time.strftime("%Y-%m-%d"),
        **numbers,
    )


def write_json(path: str | Path, data: Any) -> None:
    """Written to a temporary name, then renamed: an interrupted run leaves the old file."""
    path = Path(path)
    check_out(path)
    tmp = temporary(path)
    tmp.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(tmp, path)


def save_figure(fig: Any, path: str | Path) -> None:
    """A matplotlib figure, in the format that the name ends in, written as `write_json` writes."""
    path = Path(path)
    tmp = temporary(path)
    fig.savefig(tmp, dpi=110, format=path.suffix[1:].lower() or "png")
    os.replace(tmp, path)


def method_rows() -> list[dict[str, Any]]:
    """Rows of results/methods*.json; what was measured again, in a file later by name, replaces the first."""
    files = sorted((ROOT / "results").glob("methods*.json"))
    rows = [r for f in files for r in json.loads(f.read_text())["rows"]]
    return list({(r["seq_len"], r["method"], str(r["knobs"])): r for r in rows}.values())
