"""Every Triton kernel compiles for GPUs that are not there: no register spills, shared memory that there is."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface, MockTensor

from tests.audit.kernel_report import Card, kernels, problem
from tests.compiling import EXPERTS, FEW, report

ROOT = Path(__file__).resolve().parent.parent


def sound(rows):
    """Fails with the name of each kernel that has a problem."""
    wrong = [f"{r['kernel']} ({r['model']}, cc {r['cc']}): {problem(r)}" for r in rows if problem(r)]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def rows():
    """A launch of every kernel for an H100: at the shapes of Llama-3.1-8B, that of dense experts at Qwen3-30B-A3B's."""
    found = []
    for args in (FEW, EXPERTS):
        each, done = report("--one", "--cc", "90", *args)
        assert done.returncode == any(map(problem, each)), done.stderr
        found += each
    return {(r["file"], r["kernel"]): r for r in found}


@pytest.mark.slow
@pytest.mark.parametrize("file, kernel", list(kernels()))
def test_every_kernel_compiles_for_an_h100(rows, file, kernel):
    r = rows[file, kernel]
    sound([r])
    assert max(map(int, r["loads"]), default=0) >= 4, f"loads single bytes: {r['loads']}"


# programs a multiprocessor, loads of 16 bytes: what dense_attention.PROGRAMS and splits.split_count count on
@pytest.mark.slow
@pytest.mark.parametrize("file, kernel, programs, wide", [
    ("dense_attention", "_split_attention", 2, 16), ("gather_attention", "_gather_attention", 2, 16),
    ("lowrank", "_attend", 2, 16), ("sign_codes", "_lut_score", 2, 1), ("quantize", "_quantize", 2, 1),
    ("packed_gather_attention", "_packed_gather_attention_kernel", 2, 1), ("label_score", "_label_score_kernel", 2, 1),
    ("select", "_select_alone", 1, 1), ("select", "_list_chunk", 1, 1), ("offload", "_fetch", 4, 8),
    ("latent_attention", "_latent_attention_kernel", 1, 16),
])  # fmt: skip
def test_the_memory_is_read_in_whole_vectors(rows, file, kernel, programs, wide):
    r = rows[file, kernel]
    assert r["programs"] >= programs and r["loads"].get("16", 0) >= wide, r


@pytest.mark.slow
def test_packed_experts_compile_for_an_h100():
    """The products with packed weights, by the experts that rows chose."""
    packed = ("--models", "qwen3-30b-a3b", "--methods", "--weights", "int4", "--sizes", "1x1000", "--files", "linear")
    found, done = report("--cc", "90", *packed)
    sound(found)
    assert done.returncode == 0 and any("expert int64" in r["args"] for r in found), done.stderr


@pytest.mark.slow
def test_kernels_that_skip_values_compile_for_an_h100():
    """A name that a branch gives another shape fails here alone: the interpreter takes it."""
    found, done = report("--cc", "90", "--models", "llama-3.1-8b", "--sizes", "8x32832", "--methods", "kivi-2,skip=8",
                         "fp8,skip=8", "ojakv-0.6,skip=8", "--files", "quantized_attention", "lowrank")  # fmt: skip
    sound(found)
    assert done.returncode == 0 and {r["kernel"] for r in found} >= {"_attend", "_quantized_attention_kernel"}


# ---- the launcher ----


@pytest.fixture
def launcher(monkeypatch):
    """Arguments go through what Triton generates for a kernel's launch; nothing is compiled."""
    monkeypatch.setattr(driver, "_active", Card(90))
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *args: None)
    return lambda kernel, *args: JITFunction(kernel.fn).run(*args, grid=(1,), warmup=True, num_warps=4)


@triton.jit
def unlaunchable(x, params):
    tl.store(x, params)


def test_a_name_that_the_launcher_takes_is_found(launcher):
    """It is a function of the kernel's arguments, with locals of its own, which neither the interpreter nor a
    compilation ahead of time has."""
    with pytest.raises(TypeError, match="failed to specialize"):
        launcher(unlaunchable, MockTensor(torch.float32), MockTensor(torch.float32))


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_kernel_can_be_launched(path, launcher):
    """Those that kernels call, too: one of them is soon a kernel."""
    module = importlib.import_module(f"kernels.{path.stem}")
    for name, kernel in vars(module).items():
        if isinstance(kernel, KernelInterface) and kernel.fn.__module__ == module.__name__:
            params = JITFunction(kernel.fn).params
            try:
                launcher(kernel, *(2 if p.is_constexpr else MockTensor(torch.float32) for p in params))
            except TypeError as e:
                pytest.fail(f"{path.name}: {name} cannot be launched: {e}")
