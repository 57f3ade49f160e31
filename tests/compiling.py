"""Kernels compiled without a GPU, by tests/audit/kernel_report.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# methods that launch every kernel between them
COVER = (
    "sals,budget=p0.9", "sals-25", "ojakv-0.6", "double_sparsity_offload", "razor", "razor,induction=0,echo=0",
    "self_index", "quest", "palu-30", "h2o", "kivi-2", "sparq", "skip_softmax",
)  # fmt: skip
FEW = ("--models", "llama-3.1-8b", "--sizes", "8x32832", "8x12288", "--methods", *COVER, "--weights", "int4")
EXPERTS = ("--models", "qwen3-30b-a3b", "--methods", "full", "--weights", "--sizes", "1x1000", "--files", "experts")


def report(*args: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Its rows, and how it ended: in a process of its own, because in this one kernels may be interpreted."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KV_FAST_BACKEND")}
    command = [sys.executable, "-m", "tests.audit.kernel_report", "--json", *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done
