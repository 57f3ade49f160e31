"""python -m scripts.doctor, and an engine whose kernel fails."""

import pytest

import tests.operators
from engine import LLM
from kernels import backend
from kernels.op import OPERATIONS
from scripts import doctor


@pytest.fixture
def broken(monkeypatch):
    """decode_attention's kernel cannot be launched."""

    def launch(*args):
        raise RuntimeError("Triton Error [CUDA]: invalid argument\nmore")

    operation = OPERATIONS["decode_attention"]
    monkeypatch.setattr(operation, "launch", launch)
    monkeypatch.setitem(operation.versions, "triton", operation.versions["triton"])  # restored
    monkeypatch.setattr(backend, "BACKEND", "triton")


@pytest.fixture
def few(monkeypatch):
    few = {name: tests.operators.PROBLEMS[name] for name in ("decode_attention", "rotate_token")}
    monkeypatch.setattr(tests.operators, "PROBLEMS", few)
    monkeypatch.setattr(backend, "BACKEND", backend.BACKEND)  # restored


@pytest.mark.cpp
def test_all_is_well(cli, few):
    status, out, err = cli(doctor, "--methods", "full")
    assert (status, err) == (0, "") and all(line.startswith("ok    ") for line in out.splitlines())
    assert "decode_attention           fp32, fp16, bf16\n" in out and "full, short" in out


@pytest.mark.cpp
def test_a_broken_kernel_is_named(cli, few, broken):
    status, out, err = cli(doctor, "--methods", "full")
    failed = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("FAIL")]
    assert status == 2 and "failed checks: 2" in err
    why = "RuntimeError: Triton Error [CUDA]: invalid argument"
    assert [" ".join(line.split()) for line in failed] == [f"decode_attention {why}", f"full, short {why}"]


def test_a_misspelt_method(cli):
    status, out, err = cli(doctor, "--methods", "ful")
    assert status == 2 and "did you mean full" in err and not out


def test_the_engine_goes_on_without_a_broken_kernel(broken, monkeypatch, capsys):
    """With one line on stderr; where nobody asked to go on, as in tests and benchmarks, it is an error."""
    llm = LLM("models/tiny", method="full", compile=False)
    with pytest.raises(RuntimeError, match="invalid argument"):
        llm.generate("import os", 3)
    monkeypatch.setattr(backend, "FALL_BACK", True)
    tokens = llm.generate("import os", 3)[0].tokens
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the Triton kernel of decode_attention failed (RuntimeError: Triton Error [CUDA]: ")
    assert "torch computes it" in line and "scripts.doctor" in line
    monkeypatch.setattr(backend, "BACKEND", "torch")
    assert tokens == llm.generate("import os", 3)[0].tokens
