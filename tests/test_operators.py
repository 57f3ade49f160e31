"""Every operation in each version that it has, torch, C++ and Triton, against the answers of tests/operators.py.

Triton kernels are interpreted where there is no GPU. Quick tests have the same problems in every run; SEED draws those
of the slow ones.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from operators import DTYPES, PROBLEMS, call, draw, finite, serves

from kernels import native
from kernels.op import OPERATIONS

SEED = int(os.environ.get("SEED") or 0)
# Operations that are tested where their methods or formats are.
ELSEWHERE = {
    "dense_linear": "test_weights.py", "packed_linear": "test_weights.py, test_triton_linear.py",
    "dense_experts": "test_experts.py", "packed_experts": "test_experts.py, test_triton_linear.py",
    "quantized_append": "test_quantized.py, test_native.py", "quantized_attention": "test_quantized.py",
    "skipping_quantized_attention": "test_quantized.py",
    "group_attention": "test_palu.py", "window_append": "test_triton_attention.py",
    "change_basis": "test_triton_lowrank.py",
    "key_range": "test_triton_self_index.py", "encode_keys": "test_triton_self_index.py",
}  # fmt: skip
# whose versions agree to the bit
EXACT = {"quantize", "store_labels", "rotate_token", "rotate_query", "rotate_append", "scale_heads"}
READS_ALL = {"packed_gather_attention"}  # whose torch version multiplies what is not chosen, at weight 0
if torch.cpu._is_amx_tile_supported():  # torch's product of bf16 rows of odd length multiplies the number behind by 0
    READS_ALL |= {"latent_attention"}


def versions(name: str) -> list[str]:
    return ["torch", *OPERATIONS[name].versions]


VERSIONS = [(name, version) for name in PROBLEMS for version in versions(name)]
every_version = pytest.mark.parametrize("name, version", VERSIONS)


def check(name: str, version: str, seed: int, size: str = "usual") -> None:
    operation, (args, answers) = OPERATIONS[name], draw(name, version, seed, size)
    if not serves(operation, version, args):
        return
    got = call(operation, version, finite(args) if version == "torch" and name in READS_ALL else args)
    assert len(got) == len(answers)
    for i, answer in enumerate(answers):
        if answer is not None:
            answer.check(got[i:], version)
    if version == "cpp":
        threads = torch.get_num_threads()
        torch.set_num_threads(3 - min(threads, 2))  # two threads give the bits of one
        try:
            again = call(operation, version, args)
        finally:
            torch.set_num_threads(threads)
        assert all(same_bits(x, y, answer) for x, y, answer in zip(got, again, answers, strict=True))
    if version != "torch" and name in EXACT:
        assert all(map(torch.equal, got, call(operation, "torch", args)))


def same_bits(x: torch.Tensor | None, y: torch.Tensor | None, answer: Any) -> bool:
    """Of scores those that matter: the others are whatever memory held."""
    there = getattr(answer, "there", slice(None))
    return x is y is None or torch.equal(x[there].nan_to_num(7), y[there].nan_to_num(7))


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch):
    """No choice of a version by the environment; what a kernel leaves unwritten is NaN."""
    monkeypatch.setattr("kernels.backend.BACKEND", "")
    empty = torch.empty
    filled = lambda x: x.fill_(float("nan")) if x.is_floating_point() else x  # noqa: E731
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: filled(empty(*size, **kw)))


def skip_without(version: str) -> None:
    if version == "cpp" and not native.available():
        pytest.skip("no C++ compiler")


@every_version
def test_it_is_float64(name, version):
    skip_without(version)
    for seed in range(4 if version == "triton" else 24):
        check(name, version, seed)
    for seed in range(2 if version == "cpp" else 0):
        check(name, version, seed, "long")


@pytest.mark.slow
@every_version
def test_it_is_float64_of_other_draws(name, version):
    skip_without(version)
    for seed in range(4 if version == "triton" else 30):
        check(name, version, 1000 + 1000 * SEED + seed)
    for seed in range(0 if version == "triton" else 3):
        check(name, version, 1000 + 1000 * SEED + seed, "long")


# whole steps are traced for CUDA tensors in test_cuda_path.py: of Triton's operators some here in every run
COMPILED = [x for x in VERSIONS if x[1] != "torch"]
OFTEN = [x for x in COMPILED if x[1] == "cpp" or x[0] in ("quantize", "topk_select", "rotate_append")]


@pytest.mark.parametrize("name, version", [
    pytest.param(*x, marks=() if x in OFTEN else pytest.mark.slow) for x in COMPILED
])  # fmt: skip
def test_a_graph_calls_what_it_expects(name, version, monkeypatch):
    """A compiled step is one graph and gives what the eager step gives; the operator's schema and shapes are true."""
    skip_without(version)
    operation, served = OPERATIONS[name], iter(range(0, 600, len(DTYPES[version])))
    while True:
        args, answers = draw(name, version, next(served), "small")
        args = finite(args)
        if serves(operation, version, args):
            break
    monkeypatch.setattr("kernels.backend.BACKEND", "" if version == "cpp" else "triton")
    want, op = call(operation, version, args), operation.cpp if version == "cpp" else operation.op
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()

    def step(*given):
        left = iter(given)
        return operation(*operation.grouped(next(left) if torch.is_tensor(x) else x for x in args))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    out = compiled(*(x.clone() for x in args if torch.is_tensor(x)))
    for x, y, answer in zip([out] if torch.is_tensor(out) else out or [], want, answers, strict=False):
        assert x.dtype == y.dtype and same_bits(x.cpu(), y, answer)


def test_every_operation_is_tested():
    both = {name for name, operation in OPERATIONS.items() if operation.versions}
    assert PROBLEMS.keys() | ELSEWHERE.keys() == {x for x in both if not x.startswith("toy_")}
