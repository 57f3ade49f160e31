"""Every launch at real sizes goes through Triton's own launcher, for cards that are not there.

The interpreter calls a kernel as it stands and an ahead-of-time compilation never calls it: neither has seen that five
kernels could not be launched at all, because of an argument's name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit.kernel_report import kernels
from tests.audit.launches import MODELS
from tests.compiling import FEW

ROOT = Path(__file__).resolve().parent.parent
KERNELS = set(kernels())


def process(*command, cwd=ROOT):
    """In a process of its own: in this one, kernels may be interpreted."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KV_FAST_BACKEND")}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True)


def launches(*argv):
    done = process("-m", "tests.audit.kernel_report", "--json", *argv)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_kernel_is_launched_by_some_method_and_can_be():
    """On every card; nothing is compiled."""
    found = launches("--bind", *FEW)
    assert {(x["file"], x["kernel"]) for x in found} == KERNELS
    assert {x["cc"] for x in found} == {80, 89, 90, 100}
    assert all(x["problem"] is None and x["launches"] > 0 and x["methods"] for x in found)
    forms = [json.dumps([x["kernel"], x["args"], x["options"]], sort_keys=True) for x in found if x["cc"] == 90]
    assert len(set(forms)) == len(forms), "no launch is there twice"


LAUNCHING = """
import json, sys
import torch, triton
from triton import language as tl
from tests.audit import kernel_report, launches


@triton.jit
def params_is_taken(x, params):
    tl.store(x, tl.load(params))


@triton.jit
def sound(x, n, other, N: tl.constexpr):
    tl.store(x + tl.arange(0, N) * n, 1.0)


@triton.jit
def strided(x, strides, N: tl.constexpr):
    tl.store(x + tl.arange(0, N) * strides[0] + strides[1], 1.0)


seen = launches.Launches()
x = torch.zeros(64)
for by, kernel, args in (
    ("a", params_is_taken, (x, x)), ("a", sound, (x, 1, None, 16)), ("b", sound, (x[4:], 1, None, 16)),
    ("b", sound, (x[1:], 1, None, 16)), ("b", sound, (x, 3, None, 16)), ("b", sound, (x, 5, None, 16)),
    ("a", strided, (x, (16, 1), 4)), ("b", strided, (x, (32, 1), 4)), ("a", strided, (x, (8, 1), 4)),
    ("a", strided, (x, (16, 3), 4)),
):
    seen.by = ("m", by, 1, 1)
    seen.note(kernel, (1,), args, dict(num_warps=4))
rows = list(seen.seen.values())
for row in rows:
    row["problem"] = kernel_report.problem(row | kernel_report.launch(row, 89))
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_what_cannot_be_launched_is_found(tmp_path):
    """And launches are told apart as the launcher does: by alignment, sizes of 1 and None, not by other numbers; so are
    strides, a tuple."""
    (tmp_path / "mine.py").write_text(LAUNCHING)
    done = process(tmp_path / "mine.py")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    taken, *sound = rows[:4]
    assert taken["kernel"] == "params_is_taken" and taken["problem"].startswith("TypeError: failed to specialize")
    assert [(r["args"]["x"][2], r["args"]["n"], r["launches"], [b[1] for b in r["by"]]) for r in sound] == [
        (0, 1, 2, ["a", "b"]), (4, 1, 1, ["b"]), (0, 3, 2, ["b"])]  # fmt: skip
    assert [(r["args"]["strides"], r["launches"]) for r in rows[4:]] == [([16, 1], 2), ([8, 1], 1), ([16, 3], 1)]
    assert all(r["problem"] is None for r in rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize("cc", [80, 89, 90, 100])
@pytest.mark.parametrize("model", MODELS)
def test_every_launch_compiles(model, cc):
    """No method, in any form, at batch 1 or 8, spills registers or asks for more shared memory than there is."""
    assert {(x["file"], x["kernel"]) for x in launches("--models", model, "--cc", str(cc))} == KERNELS
