"""Times the decoder's matrix products by rows, inputs, outputs and bits of the weights, together with torch's own.

    python -m scripts.bench.bench_linear --threads 2 --out linear_cpu.json

The product is y = x W^T in the layers of known models, with M rows of x: 1 to 16 occur in a step, 512 in a prompt (the
head is timed only with the rows of a step). Ours takes fp32 rows; weights in 8 and 4 bits have groups of 32. torch's
are `linear` in fp32 and bf16, and its packed operators for CPUs, which take bf16 rows: `_weight_int8pack_mm` with one
scale per row, and `_weight_int4pack_mm_for_cpu` with groups of 32. Calls of a shape take turns, with caches emptied
before each.

`share` is the bytes of the weight, scales included, over the median time, as a share of the measured bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from kernels.backend import version_for
from kernels.linear import MANY, dense_linear
from kernels.native import VECTOR
from kernels.op import OPERATIONS
from model import NAMED, ModelArgs
from runtime.errors import InputError, Parser, run_cli
from runtime.machine import check_out, set_threads
from scripts.shared.options import add_run
from scripts.shared.progress import Progress
from scripts.shared.results import record, write_json
from scripts.shared.timing import Call, Clock, ceilings, reason, summary
from weights import Layout, Linear, PackedLinear

CPU = torch.device("cpu")
GROUP = 32
OURS = {"ours fp32": 32, "ours bf16": 16, "ours int8": 8, "ours int4": 4}
Product = tuple[Call, int]  # the call, and the bytes of its weight


def shapes(a: ModelArgs) -> dict[str, tuple[int, int]]:
    """Layer -> (inputs, outputs)."""
    heads = a.n_head * a.head_dim
    return dict(qkv=(a.dim, heads + 2 * a.n_kv_head * a.head_dim), out=(heads, a.dim), gate_up=(a.dim, 2 * a.ffn_dim),
                down=(a.ffn_dim, a.dim), head=(a.dim, a.vocab_size))  # fmt: skip


def ours(n: int, out: int, bits: int, gen: torch.Generator) -> tuple[Any, int]:
    """A function of x, and the bytes of its weight. Few rows call the operator directly, as in a compiled step, so that
    no Python is timed."""
    layer: Any
    if bits == 32:
        layer = Linear(n, out, bias=False)
        layer.weight.data.normal_(generator=gen)
        few = lambda x: dense_linear.cpp(x, layer.weight, None)  # noqa: E731
    else:
        layer = PackedLinear(n, out, False, Layout(bits, GROUP))
        layer.fill_random(0.02, gen)
        few = lambda x: OPERATIONS["packed_linear"].cpp(x, *layer.weight, None, bits)  # noqa: E731
    size = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
    here = version_for(torch.device("cpu"), torch.float32) == "cpp" and n % VECTOR == 0
    return (lambda x: few(x) if here and len(x) < MANY else layer(x)), size


def theirs(n: int, out: int, gen: torch.Generator) -> Iterator[tuple[str, Any, int]]:
    """torch's products: name, function of x, bytes of the weight."""
    for name, dtype in (("torch fp32", torch.float32), ("torch bf16", torch.bfloat16)):
        w = torch.randn(out, n, generator=gen).to(dtype)
        yield name, lambda x, w=w: F.linear(x.to(w.dtype), w), w.nbytes
    codes = torch.randint(-127, 128, (out, n), generator=gen, dtype=torch.int8)
    scale = torch.full((out,), 0.01, dtype=torch.bfloat16)
    yield ("torch int8", lambda x: torch._weight_int8pack_mm(x.bfloat16(), codes, scale), codes.nbytes + scale.nbytes)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.int() & 15, 1)
    both = torch.full((n // GROUP, out, 2), 0.01, dtype=torch.bfloat16)
    yield ("torch int4", lambda x: torch._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, GROUP, both),
           packed.nbytes + both.nbytes)  # fmt: skip


def products(n: int, out: int, rows: list[int]) -> tuple[dict[tuple[str, int], Product], dict[str, str]]:
    """(name, M) -> call and bytes; and name -> the reason, for products that torch cannot do at this shape."""
    gen = torch.Generator().manual_seed(0)
    calls: dict[str, tuple[Any, int]] = {}
    for name, bits in OURS.items():
        calls[name] = ours(n, out, bits, gen)
    failed: dict[str, str] = {}
    source = theirs(n, out, gen)
    for name in ("torch fp32", "torch bf16", "torch int8", "torch int4"):
        try:
            _, call, size = next(source)
            call(torch.randn(1, n, generator=gen))
            calls[name] = call, size
        except (RuntimeError, StopIteration) as e:
            failed.setdefault(name, reason(e))
    x = {m: torch.randn(m, n, generator=gen) for m in rows}
    bf16 = {m: t.bfloat16() for m, t in x.items()}  # converted here, so that conversion is not timed
    made: dict[tuple[str, int], Product] = {}
    for m in rows:
        for name, (call, size) in calls.items():
            given = x[m] if name in OURS or name == "torch fp32" else bf16[m]
            made[name, m] = functools.partial(call, given), size
    return made, failed


@torch.inference_mode()
def measure(opt: argparse.Namespace, data: dict[str, Any], progress: Progress) -> None:
    clock = Clock(CPU, cold=True)
    todo = [(model, part, *size) for model in opt.model for part, size in shapes(ModelArgs.from_name(model)).items()]
    progress.plan |= dict(round=len(todo) * opt.rounds)
    for model, part, n, out in todo:
        rows = [m for m in opt.rows if part != "head" or m <= 16]
        progress.now("prepare", f"{model}, {part}: {n} x {out}")
        made, failed = products(n, out, rows)
        calls = {key: clock.prepare(call) for key, (call, _) in made.items()}
        times = clock.rounds(calls, opt.rounds, say=lambda i: progress.now("round", f"{model} {part}"))  # noqa: B023
        for (name, m), each in times.items():
            size = made[name, m][1]
            row = dict(model=model, part=part, M=m, K=n, N=out, product=name, bytes=size, **summary(each))
            data["rows"].append(row | dict(share=size / row["ms"] * 1e3 / data["bandwidth"]))
        data["failed"] += [dict(model=model, part=part, product=p, reason=why) for p, why in failed.items()]
        if opt.out:
            write_json(opt.out, data)


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--model", nargs="+", default=["llama-3.2-1b", "qwen2.5-0.5b"], help=f"some of {', '.join(NAMED)}")
    a("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 512], help="M, the rows of x")
    a("--rounds", type=int, default=5, help="rounds; default: 5")
    add_run(p, resume=False)
    opt = p.parse_args()
    for name in opt.model:
        ModelArgs.from_name(name)
    if min(opt.rows) < 1 or opt.rounds < 1:
        raise InputError("--rows and --rounds must be at least 1")
    check_out(opt.out)
    set_threads(opt.threads)
    with Progress() as progress:
        progress.now("ceilings", "bandwidth and matrix products of this machine")
        data = record(CPU, **ceilings(CPU, torch.float32, 5), group=GROUP, rows=[], failed=[])
        measure(opt, data, progress)
    if opt.json:
        print(json.dumps(data))
        return
    for r in data["rows"]:
        print(f"{r['model']:14s} {r['part']:8s} M {r['M']:3d} {r['product']:12s} {r['ms']:9.3f} ms "
              f"{100 * r['share']:4.0f} % of the bandwidth")  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
