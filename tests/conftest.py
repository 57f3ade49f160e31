"""Every test starts from the same random state. Without a GPU, Triton kernels run in Triton's interpreter.

With `--share N`, as in `make test`, one case in N of each test runs, but three at least: SEED draws which.
"""

from __future__ import annotations

import functools
import io
import math
import os
import random
import signal
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from runtime.errors import run_cli

# The same examples in every run, so that a change is what makes a test fail; HYPOTHESIS_PROFILE=default draws others.
settings.register_profile("fixed", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


# Files that take minutes, the longest first: no process is left alone with one at the end (--no-loadscope-reorder)
LONG = [
    f"test_{name}.py"
    for name in ("parallel", "contract", "compiled", "bench", "triton_contract", "native", "triton_compile", "launches")
]


def pytest_addoption(parser):
    parser.addoption("--share", type=int, metavar="N", help="run one in N of the cases of each test")


@pytest.hookimpl(trylast=True)  # once what `-m` leaves out is gone
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONG.index(name) if (name := item.path.name) in LONG else len(LONG))
    share, cases, drawn = config.getoption("--share"), defaultdict(list), set()
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for name, some in cases.items():
        n = min(len(some), max(3, math.ceil(len(some) / share))) if share else len(some)
        drawn |= set(random.Random(f"{os.environ.get('SEED')} {name}").sample(some, n))
    config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
    items[:] = [item for item in items if item in drawn]


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported
os.environ["KV_FAST_STEPS"] = "0"  # what a test compiles is not what another runs
from kernels import backend, native  # noqa: E402
from runtime.errors import InputError  # noqa: E402


def pytest_runtest_setup(item):
    if item.get_closest_marker("cpp") and not native.available():
        pytest.skip("no C++ compiler")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except InputError as e:
        if "needs a C++ compiler" in str(e) and not native.available():
            pytest.skip("no C++ compiler")
        raise


@pytest.fixture(autouse=True, scope="session")
def _built():
    """Our C++ is there before the first test: compiling takes up to a minute, and says so on stderr."""
    native.available()


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1", scope="session")
def _rounded():
    """Triton's interpreter cuts numbers off to bf16, which loses up to twice as much as rounding, and always downwards:
    here it rounds to the nearest, as a GPU does."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        data = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(data, dst_type.scalar)

    InterpreterBuilder.cast_impl = rounded
    yield
    InterpreterBuilder.cast_impl = cast


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1", scope="session")
def addresses():
    """Every interpreted kernel, in any test: what it loads and stores lies in the tensors that it was launched with."""
    from tests.audit.addresses import watched

    with watched() as seen:
        yield seen


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    backend.FALL_BACK = False  # a kernel that fails is an error here


@pytest.fixture
def kernel_device() -> torch.device:
    """Where kernels are tested: natively if there is a GPU, interpreted otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run a script's main in this process -> exit status, standard output, standard error; stdin: bytes."""

    def call(script, *argv, stdin=None):
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, argv)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
        with pytest.raises(SystemExit) as e:
            run_cli(script.main)
        for x, handler in handlers.items():  # calibrate.py has its own
            signal.signal(x, handler)
        return (e.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def refused(cli):
    """Run a script that refuses its input -> its one line, which is all that it says."""

    def call(script, *argv, **given):
        code, out, err = cli(script, *argv, **given)
        lines = [line for line in err.splitlines() if line and "%|" not in line]  # but for progress bars
        assert code == 2 and not out and len(lines) == 1 and lines[0].startswith("error: "), err
        return lines[0]

    return call


@pytest.fixture
def compiled_inputs(monkeypatch):
    """What inductor is given to compile, the inputs of each graph; the graph runs as it is."""
    from torch._inductor import compile_fx  # takes seconds

    seen = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, *_, **__: seen.append(inputs) or graph)
    torch._dynamo.reset()
    return seen


@pytest.fixture
def few_texts(monkeypatch):
    """Of the held-out texts enough for a short evaluation, and soon read."""
    from scripts.eval import evaluation  # imports kernels

    every, held_out = evaluation.collect((), only_held_out=True), evaluation.held_out  # of no package: seconds less
    texts = [d for d in every if d.held_out]
    few = [d for kind in ("code", "prose") for d in [d for d in texts if d.kind == kind][:8]]
    monkeypatch.setattr(evaluation, "collect", lambda only_held_out: few)
    monkeypatch.setattr(evaluation, "held_out", functools.cache(held_out.__wrapped__))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The C++ library not loaded yet, and an empty cache; its file."""
    from kernels import backend
    from kernels.native import build

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = build.library()
    monkeypatch.setattr(build, "library", functools.cache(build.library.__wrapped__))
    monkeypatch.setattr(build, "_available", functools.cache(build._available.__wrapped__))
    monkeypatch.setattr(backend, "_version_for", functools.cache(backend._version_for.__wrapped__))
    yield Path(loaded._name)
    loaded.kvf_register()  # operators of another build would serve all tests that follow
