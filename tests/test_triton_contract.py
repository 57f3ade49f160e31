"""Every method's contract with its Triton kernels: natively on a GPU, in Triton's interpreter without one.

The contexts are short, because a program takes milliseconds to interpret; the kernels' own tests have the odd shapes.
"""

from __future__ import annotations

import pytest
import torch

from cache.grammar import method_files
from engine.compiled import CapturedStep
from scripts.contract.checks import same, settings
from scripts.contract.harness import poison, prompt, rounds, run, tiny

every_method = pytest.mark.parametrize("name", sorted(method_files()))
LENGTHS, STEPS = (3, 21), 2
SHAPE = (3, 32)  # query heads a KV head, head dimension


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr("kernels.backend.BACKEND", "triton")


def model_and_prompts(device, shape=SHAPE):
    return tiny(*shape, device=device), [prompt(n).to(device) for n in LENGTHS]


def check_torch(name, knobs, device, monkeypatch, lengths=LENGTHS, steps=STEPS, shape=SHAPE):
    """What the kernels give is what torch gives, in a cache larger than the batch, with NaN in what is not filled."""
    model, prompts = tiny(*shape, device=device), [prompt(n).to(device) for n in lengths]
    with monkeypatch.context() as m:
        m.setattr("kernels.backend.BACKEND", "torch")
        model.setup_cache(name, len(prompts) + 1, 64, **knobs)
        want, fed = run(model, prompts, steps)
    model.setup_cache(name, len(prompts) + 1, 64, **knobs)
    poison(model)
    model.reset_cache()
    got = run(model, prompts, steps, fed)[0]
    assert not got.isnan().any(), f"{name} {knobs}: NaN, a kernel reads slots that were not filled"
    # sums are taken in another order, so a value on a rounding border may fall to its other side
    same(got, want, f"{name} {knobs}: kernels against torch", 2e-2 if rounds(model) else 1e-4)


@every_method
def test_kernels_are_torch(name, kernel_device, monkeypatch):
    check_torch(name, settings(name)[-1], kernel_device, monkeypatch)


# Kernels that a knob asks for: how many tokens reach p; keys and values of every width; a list for each query head
BY_KNOBS = {
    "oracle-p": ("oracle", dict(budget="p0.9", sinks=2, recent=4)),
    "quest-p": ("quest", dict(budget="p0.9", page=4)),
    "sparq-p": ("sparq", dict(budget="p0.9", recent=4)),
    "loki-query": ("loki", dict(budget=16, heads="query")),
    "sparq-1xk": ("sparq", dict(budget=16, recent=4, copies=1)),
    **{f"kivi-{bits}": ("kivi", dict(residual=32, bits=bits)) for bits in (2, 3)},
    "kivi-mixed": ("kivi", dict(residual=32, k_bits=4, v_bits=2)),
    **{f"hadamard-{bits}": ("hadamard", dict(recent=4, sinks=2, bits=bits)) for bits in (3, 8)},
    **{f"turboquant-{bits}": ("turboquant", dict(recent=2, sinks=2, bits=bits)) for bits in (2, 4)},
    "fp8-64": ("fp8", dict(residual=64)),
    **{f"palu-{bits}": ("palu", dict(rank=0.5, bits=bits)) for bits in (3, 16)},
}


@pytest.mark.parametrize("case", BY_KNOBS)
def test_kernels_that_a_knob_asks_for_are_torch(case, kernel_device, monkeypatch):
    check_torch(*BY_KNOBS[case], kernel_device, monkeypatch, (3, 37))


# 32 channels do not divide a head: the last group is smaller
ODD = [
    ("self_index", dict(budget=12, sinks=2, tail=4, flush=2)), ("kivi", dict(residual=32, bits=3)),
    ("sals", dict(budget=12, sinks=2, recent=4, value_bits=2)), ("hadamard", dict(recent=4, bits=3)),
    ("turboquant", dict(bits=3)), ("fp8", {}),
]  # fmt: skip


@pytest.mark.parametrize("name, knobs", ODD)
def test_heads_of_no_whole_groups(name, knobs, kernel_device, monkeypatch):
    check_torch(name, knobs, kernel_device, monkeypatch, (3, 37), shape=(3, 40))


@every_method
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_is_one_cuda_graph(name, kernel_device):
    """Compiled, captured and replayed as in generate.py: no kernel waits for the host or allocates."""
    torch._dynamo.reset()
    model, _ = model_and_prompts(kernel_device)
    prompts = [prompt(n).to(kernel_device) for n in (13, 21)]  # of 3, keydiff would hold 2, which always tie
    model.setup_cache(name, len(prompts), 64, **settings(name)[-1])
    want, fed = run(model, prompts, 20)
    model.reset_cache()
    step = CapturedStep(model, lambda x, pos: model.logits(x), None)
    for _ in range(2):  # compiles, captures
        step(*(torch.zeros(len(prompts), dtype=torch.int64, device=kernel_device) for _ in range(2)))
    model.reset_cache()
    same(run(model, prompts, 20, fed, step)[0], want, f"{name}, as a CUDA graph", 2e-2 if rounds(model) else 1e-4)
