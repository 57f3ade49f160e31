"""Kernels compiled without a GPU, by scripts/report/kernel_report.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def report(*args: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Its rows, and how it ended: in a process of its own, because in this one kernels may be interpreted."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KV_FAST_BACKEND")}
    command = [sys.executable, "-m", "scripts.report.kernel_report", "--json", *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done


def compiled(*args: str) -> list[dict[str, Any]]:
    """The rows of kernels none of which has a problem."""
    rows, done = report(*args)
    assert done.returncode == 0, done.stderr
    return rows
