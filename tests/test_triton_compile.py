"""Every Triton kernel compiles for GPUs that are not there: no register spills, shared memory that there is."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface, MockTensor

from tests.audit import kernel_report
from tests.audit.kernel_report import Card, kernels, launched, load_widths, longest_loop, occupancy, problem
from tests.compiling import EXPERTS, FEW, report

ROOT = Path(__file__).resolve().parent.parent
SOUND = dict(file="f", kernel="k", model="m", cc=90, registers=64, spills=0, shared=1024, programs=8, limit="threads")


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
    found, done = report("--cc", "90", "--models", "llama-3.1-8b", "--sizes", "8x32768", "--methods", "kivi-2,skip=8",
                         "fp8,skip=8", "ojakv-0.6,skip=8", "--files", "quantized_attention", "lowrank")  # fmt: skip
    sound(found)
    assert done.returncode == 0 and {r["kernel"] for r in found} >= {"_attend", "_quantized_attention_kernel"}


# ---- which kernels there are ----

LAUNCHING = """
@triton.jit
def helper(x):
    return x


@triton.jit
def _kernel(x):
    helper(x)


def launch(x, table):
    _kernel[(1,)](x)
    table[0](x)
"""


def test_what_is_launched_is_read_from_the_source():
    assert launched(LAUNCHING) == {"_kernel"}, "functions that kernels share are none"


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


# ---- two versions of Triton ----


def test_a_report_is_shown_beside_an_earlier_one(cli, monkeypatch, tmp_path):
    entry = dict(file="rope", kernel="k", by=[("m", "full", 1, 8)], args=dict(x=1), options={}, launches=1)
    needs = dict(spills=0, shared=0, warps=4, programs=8, limit="threads", loads={})
    monkeypatch.setattr(kernel_report, "recorded", lambda *_: SimpleNamespace(seen={0: entry}))
    for version, registers in (("3.9.0", 32), ("3.6.0", 255)):
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(kernel_report, "launch", lambda *_, n=registers: dict(registers=n) | needs)
        beside = ("--beside", tmp_path / "3.9.0.json") if version == "3.6.0" else ()
        status, out, _ = cli(kernel_report, "--cc", 90, "--out", tmp_path / f"{version}.json", *beside)
        assert status == 0
    assert [line.split()[4:7] for line in out.splitlines()[1:]] == [["90", "3.6.0", "255"], ["90", "3.9.0", "32"]]
    status, _, err = cli(kernel_report, "--beside", tmp_path / "none.json")
    assert status == 2 and "none.json is no file that --out wrote" in err


# ---- what the report calls a problem ----


def test_problems_are_told():
    assert problem(SOUND) is None
    assert problem(SOUND | dict(spills=48)) == "spills 48 bytes a thread"
    assert problem(SOUND | occupancy(64, 228 * 1024, 4, 90)) == "does not fit: shared"
    assert problem(SOUND | occupancy(255, 1024, 16, 90)) == "does not fit: registers"
    assert problem(SOUND | dict(error="CompilationError: at 3:4")) == "CompilationError: at 3:4"
    with pytest.raises(AssertionError, match=r"k \(m, cc 90\): spills 48 bytes a thread"):
        sound([SOUND, SOUND | dict(spills=48)])


SPILLING = """
import sys

import triton
import triton.language as tl
from tests.audit import kernel_report


@triton.jit
def many(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    i = i[:, None] * N + i
    a, b, c = tl.load(x + i), tl.load(x + N * N + i), tl.load(x + 2 * N * N + i)
    s = tl.sum(a, 1)[:, None] + tl.sum(b, 0)[None, :] + tl.sum(c)
    tl.store(out + i, (a + s) * (b + s) * (c + s))


args = dict(x=("tensor", "float32", 0), out=("tensor", "float32", 0), N=128)
row = kernel_report.launch(dict(module="__main__", kernel="many", args=args, options=dict(num_warps=4)), 90)
print(kernel_report.problem(row))
"""


@pytest.mark.slow
def test_a_kernel_that_spills_is_found(tmp_path):
    """Three times 128 x 128 numbers in 4 warps until their sums are known: 384 registers a thread, where 255 are."""
    (tmp_path / "spilling.py").write_text(SPILLING)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, tmp_path / "spilling.py"], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("spills ") and done.stdout.endswith(" bytes a thread\n"), done.stdout + done.stderr


def test_programs_of_a_multiprocessor():
    """65536 registers, 228 KB less one a program, 2048 threads on an H100."""
    assert occupancy(32, 0, 4, 90) == dict(programs=16, limit="registers")
    assert occupancy(129, 0, 4, 90) == dict(programs=3, limit="registers"), "136 registers a thread are taken"
    assert occupancy(64, 71680, 4, 90) == dict(programs=3, limit="shared")
    assert occupancy(64, 71680, 4, 89) == dict(programs=1, limit="shared")
    assert occupancy(16, 0, 8, 90) == dict(programs=8, limit="threads")


def test_load_widths_are_read_from_ptx():
    ptx = """
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    @%p1 ld.global.L1::evict_last.b64 { %rd2 }, [ %rd3 + 0 ];
    ld.global.b8 %rs1, [ %rd4 ];
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd5 + 0 ], 0x10, %r6;
    ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r7 ];
    """
    assert load_widths(ptx) == {16: 2, 8: 1, 1: 1}


def test_the_longest_loop_is_read_from_sass():
    sass = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x00000a0000017a02 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   FFMA R0, R1, R2, R0 ;
        /*0030*/               @P1 BRA 0x20 ;
        /*0040*/                   FFMA R0, R1, R2, R0 ;
        /*0050*/               @P0 BRA 0x10 ;
        /*0060*/                   EXIT ;
        /*0070*/                   BRA 0x70;
    """
    assert longest_loop(sass) == dict(FFMA=2, BRA=2, LDG=1)
    assert longest_loop("/*0000*/ EXIT ;") == {}
