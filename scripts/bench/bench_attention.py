"""Times one layer's attention of a decode step, whole and by stage, with the best dense attention in the same run.

    python -m scripts.bench.bench_attention --length 32768 --threads 2                      # a CPU, Llama-3.1-8B shapes
    python -m scripts.bench.bench_attention --model llama-2-7b --batch 8 16 --length 4096 --out attention.json
    compute-sanitizer python -m scripts.bench.bench_attention --once --method all --batch 2 --length 300    # no timing

Caches are filled with random keys through the methods' own `compress`, and have slightly more slots than the length; no
weights are needed. A method may have knobs: `sals-12.5,budget=512`. One layer is timed, so specs by layers are refused.
If a method gives KV heads to another one (razor), the layer whose split is nearest the model's mean is timed; the split
is in the file. Every method is compiled with fullgraph at fixed shapes; on a GPU each call is one CUDA graph.

operator    all of `decode`: rotate, append, select, attend. It writes the same slot every time. On a CPU it runs
            --layers layers with their own caches in one graph, and the time is that of one layer: a real step runs all
            layers in one call, and a call from Python costs as much as a short layer. (A CUDA graph has no such cost.)
append, select, attend    the stages, each compiled separately; `score` is the part of `select` before top-k, and
            `prefetch` the work of an offloading method one layer ahead (also part of `operator`).
dense       attention over the same number of tokens, without rotation and append: the baseline has less to do. The
            fastest installed version that agrees with the definition counts; all are in the file.
limit       bytes of `traffic()` / the best bandwidth that reading or copying reaches in this run.

Calls take turns: every round calls each dense attention, and each method with its stages, once. So a noisy machine
slows all of them equally, and all rows of a size have the same baseline. `times_dense` is the median over rounds of
dense / method of the same round; its spread is given, too. Methods whose caches do not fit into memory together are
timed in groups, each with the baseline in its rounds. Ctrl-C times the methods that are ready, and keeps the results.

Before each timed call a buffer several times the size of the last-level cache is read, because a real step reads all
other layers and weights between two uses of a layer's cache. (It is not written, since lines waiting to be written back
would slow the call.) `floor_ms` is the measured time of an empty call; it is not subtracted.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cache.base import KVMethod
from model import ModelArgs
from runtime.errors import InputError, run_cli
from runtime.machine import DTYPES, available_memory, pick_device, pick_dtype, set_threads
from runtime.options import Parser
from scripts.bench.dense import prepare_dense
from scripts.bench.layer import STAGES, build, cache_bytes, fill, heads_of, one_layer, prompt, stage_calls
from scripts.shared.options import SPECS, Steps, add_run, check_run, earlier, expand, shapes
from scripts.shared.results import record, write_json
from scripts.shared.timing import (
    Call,
    Clock,
    ceilings,
    end,
    flush_bytes,
    reason,
    recover,
    settled,
    spread,
    summary,
)  # fmt: skip

SPARE = 16  # slots beyond the filled ones
MEMORY = 0.8  # share of the free memory that the caches of methods timed together may take
Row = dict[str, Any]


# ---- a size ----


@dataclasses.dataclass
class Size:
    """A model's shapes, batch and length, with the keys and values for every method and all dense attentions."""

    model: str
    batch: int
    length: int
    args: ModelArgs
    opt: argparse.Namespace
    clock: Clock
    kv: tuple[Tensor, Tensor] | None = None  # [B, Hkv, S, D]
    q: Tensor | None = None  # [B, Hq, D]
    failed: str = ""  # why there are no keys and values
    dense: dict[str, Call] = dataclasses.field(default_factory=dict)
    tried: list[Row] = dataclasses.field(default_factory=list)  # one row per dense attention

    @property
    def where(self) -> Row:
        return dict(model=self.model, batch=self.batch, length=self.length)

    def __str__(self) -> str:
        return f"{self.model} batch {self.batch} length {self.length}"

    def fill(self) -> None:
        """Allocates keys and values, and prepares the baseline."""
        clock, opt = self.clock, self.opt
        try:
            self.kv, self.q = prompt(self.args, self.batch, self.length, opt.dtype, clock.device)
            if not opt.once:
                self.dense, self.tried = prepare_dense(self.q, *self.kv, opt.compile, clock, opt.layers)
        except Exception as e:  # out of memory, before or within an allocation
            self.failed = reason(e)

    def method(self, text: str) -> tuple[list[KVMethod], tuple[Tensor, Tensor, Tensor, Tensor]]:
        """`opt.layers` filled layers of a method, and q, k, v, pos of the next step."""
        if self.kv is None:
            raise InputError(self.failed)
        a, opt, device = self.args, self.opt, self.clock.device
        T = self.length + SPARE
        methods = [build(text, self.model, self.batch, T, opt.dtype, device, opt.layers) for _ in range(opt.layers)]
        gen = torch.Generator(device).manual_seed(1)
        q, k, v = (torch.randn(self.batch, n, a.head_dim, generator=gen, device=device, dtype=opt.dtype)
                   for n in (a.n_head, a.n_kv_head, a.n_kv_head))  # fmt: skip
        for method in methods:
            fill(method, q[:, :, None], *self.kv)
        return methods, (q, k, v, torch.full((self.batch,), self.length, device=device))

    def groups(self, texts: list[str]) -> Iterator[list[str]]:
        """Methods whose caches fit into memory together."""
        free = MEMORY * available_memory(self.clock.device)
        group: list[str] = []
        used = 0
        for text in texts:
            try:
                need = self.opt.layers * cache_bytes(text, self.model, self.batch, self.length + SPARE, self.opt.dtype)
            except InputError:  # building the method reports the reason
                need = 0
            if group and used + need > free:
                yield group
                group, used = [], 0
            group, used = [*group, text], used + need
        yield group


@torch.inference_mode()
def run_once(size: Size, text: str) -> Row:
    """Runs every kernel of a method, untimed."""
    methods, (q, k, v, pos) = size.method(text)
    for step in range(SPARE):  # settings with short intervals let `maintain` run its kernels, too
        y = methods[0].decode(q, k, v, pos + step)
        methods[0].maintain(step + 1)
    return account(size, text, methods[0]) | dict(finite=bool(y.isfinite().all()))


def account(size: Size, text: str, method: KVMethod) -> Row:
    row = dict(nbytes=sum(method.nbytes().values()), traffic=method.traffic(size.length), layer=method.layer)
    return row | heads_of(text, size.model)


@torch.inference_mode()
def prepare(size: Size, text: str) -> tuple[Row, dict[tuple[str, str], Call]]:
    """A method's row without times, and its stages, ready to be timed."""
    methods, step = size.method(text)
    ready = stage_calls(methods, *step, size.opt.compile, size.opt.stages)
    calls = {(text, stage): size.clock.prepare(call) for stage, call in ready.items()}
    return account(size, text, methods[0]), calls


@torch.inference_mode()
def measure(
    size: Size, group: list[str], bandwidth: float, late: Callable[[], bool], progress: Steps,
    enter: Callable[[list[Row]], None],
) -> tuple[list[Row], bool]:  # fmt: skip
    """Times methods and all dense attentions in turns -> one row per method, and whether Ctrl-C ended it.

    late(): whether to prepare no more methods. Methods that were left out, or were in no round, have no row. enter:
    takes the row of a method that crashes the device.
    """
    n, interrupted = size.opt.rounds, False
    rows: dict[str, Row] = {}
    calls: dict[tuple[str, str], Call] = {("dense", name): call for name, call in size.dense.items()}
    try:
        for text in group:
            if late():
                break
            progress.now(f"{size}: {text}, {'compiling and ' * size.opt.compile}filling its cache")
            try:
                row, ready = prepare(size, text)
                calls |= ready
                rows[text] = row
            except Exception as e:  # recorded in the row: the grid goes on
                rows[text] = dict(error=reason(e))
                fatal = size.where | dict(method=text, lost=True) | rows[text]
                recover(size.clock.device, lambda fatal=fatal: enter([fatal]))  # type: ignore[misc]
    except KeyboardInterrupt:
        interrupted = True
    timed = [text for text, row in rows.items() if "error" not in row]
    what = f"{size}: {len(size.dense)} dense attentions and {len(timed)} methods in turns"
    if interrupted:
        what = f"interrupted, once more ends it at once; {what}"
    times: dict[tuple[str, str], list[float]] = {}
    try:
        if timed:
            size.clock.rounds(calls, n, times, lambda i: progress.now(f"{what}, round {i + 1} of {n}"))
    except KeyboardInterrupt:
        interrupted = True
    except Exception as e:
        rows |= {text: dict(error=reason(e)) for text in timed}
    if times:
        judge(size, {text: row for text, row in rows.items() if "error" not in row}, times, bandwidth)
    found = {text: row for text, row in rows.items() if "operator" in row or "error" in row}
    return [size.where | dict(method=text) | row for text, row in found.items()], interrupted


def judge(size: Size, rows: dict[str, Row], times: dict[tuple[str, str], list[float]], bandwidth: float) -> None:
    """Adds the times of the rounds to the methods' rows and to the rows of the dense attentions."""
    layers = size.opt.layers
    each = {key: [ms / layers for ms in t] for key, t in times.items()}
    dense = {name: t for (kind, name), t in each.items() if kind == "dense"}
    best = min(dense, key=lambda name: statistics.median(dense[name]), default=None)
    for row in size.tried:
        if (name := row["name"]) in dense:
            row |= summary(row.get("each", []) + dense[name])
            row["bytes_per_s"] = sum(x.nbytes for x in size.kv or ()) / row["ms"] * 1e3
    fastest = min((r["ms"] for r in size.tried if "ms" in r), default=None)
    for row in size.tried:
        row["best"] = row.get("ms") == fastest and fastest is not None
    for text, row in rows.items():
        row |= {stage: summary(t) for (kind, stage), t in each.items() if kind == text}
        ms = row["operator"]["ms"]
        if best is not None:
            ratios = [d / o for d, o in zip(dense[best], row["operator"]["each"], strict=True)]
            row |= dict(dense=dict(name=best) | summary(dense[best]), times_dense=statistics.median(ratios),
                        times_dense_spread=spread(ratios))  # fmt: skip
        row["bytes_per_s"] = row["traffic"] / ms * 1e3
        row["limit_ms"] = 1e3 * row["traffic"] / bandwidth
        row["limit_share"] = row["limit_ms"] / ms


# ---- the command ----


def line(row: Row) -> str:
    where = f"{row['model']} batch {row['batch']} length {row['length']} {row['method']}"
    if "error" in row:
        return f"{where}: {row['error']}"
    if "operator" not in row:
        return f"{where}: ran, {'finite' if row['finite'] else 'NOT finite'}"
    figures = []
    if "dense" in row:
        d = row["dense"]
        figures.append(f"{row['times_dense']:.2f}x the best dense, spread {100 * row['times_dense_spread']:.0f} % "
                       f"({d['name']}, {d['ms']:.3f} ms)")  # fmt: skip
    if any(s in row for s in STAGES):
        figures.append(" ".join(f"{s} {row[s]['ms']:.3f}" for s in STAGES if s in row))
    figures.append(f"{row['bytes_per_s'] / 1e9:.0f} GB/s, {100 * row['limit_share']:.0f} % of the byte limit")
    if "heads" in row:
        h = row["heads"]
        where += f" ({h['other']} of {h['of']} KV heads are another method's, mean {h['mean']:.2f})"
    return f"{where}: {row['operator']['ms']:.3f} ms ({'; '.join(figures)})"


def parser() -> Parser:
    p = Parser(__doc__)
    a = p.add_argument
    a("--model", nargs="+", default=["llama-3.1-8b"], help="shapes: a known model, or a path to a config.json")
    a("--method", nargs="+", default=["full", "double_sparsity", "sals-12.5", "self_index-7.5"],
      help=f"{SPECS}; `all` is every method")  # fmt: skip
    a("--batch", type=int, nargs="+", default=[1], help="batch sizes; default: 1")
    a("--length", type=int, nargs="+", default=[8192, 32768], help="tokens in the cache; default: 8192 32768")
    a("--size", nargs="+", metavar="BxT", help="batch x tokens, in this order, instead of --batch and --length")
    a("--layers", type=int, help="layers in one graph; default: 4 on a CPU, 1 on a GPU")
    a("--rounds", type=int, default=15, help="rounds; default: 15")
    a("--stages", action=argparse.BooleanOptionalAction, default=True, help="time the stages, too (default: yes)")
    a("--once", action="store_true", help="run every method's compress and decode, time nothing")
    a("--time-limit", type=float, metavar="S", help="start nothing new after S seconds")
    a("--dtype", choices=sorted(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    a("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile methods (default: yes)")
    add_run(p)
    return p


def parse_args() -> argparse.Namespace:
    opt = parser().parse_args()
    check_run(opt)
    if opt.layers is not None and opt.layers < 1:
        raise InputError(f"--layers {opt.layers} is below 1")
    opt.method = expand(opt.method)
    for text in opt.method:
        one_layer(text)  # a wrong name or knob ends the run before it starts
    for name in opt.model:
        shapes(name)
    set_threads(opt.threads)
    opt.device = pick_device(opt.device)
    opt.dtype = pick_dtype(opt.dtype, opt.device)
    opt.layers = opt.layers or (4 if opt.device.type == "cpu" and not opt.once else 1)
    return opt


def main() -> None:
    opt, begin = parse_args(), time.monotonic()
    device = opt.device
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000  # one a size
    known = dict(dtype=str(opt.dtype).removeprefix("torch."), layers=opt.layers, compile=opt.compile, once=opt.once)
    old: dict[str, list[Any]] = {}
    if opt.resume:
        old = earlier(opt.out, record(device, **known), ("device", "commit", *known), ("rows", "dense"))
        wanted = {*itertools.product(opt.model, opt.size, opt.method)}  # with as many rounds, and with stages

        def less(r: dict[str, Any]) -> bool:
            few = len(r["operator"]["each"]) < opt.rounds or (opt.stages and "append" not in r)
            return few and (r["model"], (r["batch"], r["length"]), r["method"]) in wanted

        old["rows"] = [
            r for r in old.get("rows", []) if settled(r) and (opt.once or "operator" not in r or not less(r))
        ]
    done = {(r["model"], r["batch"], r["length"], r["method"]) for r in old.get("rows", [])}
    grid = [(m, b, n, [t for t in opt.method if (m, b, n, t) not in done])
            for m in opt.model for b, n in opt.size]  # fmt: skip
    grid = [g for g in grid if g[3]]
    steps = 1 + sum(1 + len(todo) + (0 if opt.once else opt.rounds) for *_, todo in grid)

    def late() -> bool:
        stop = opt.time_limit is not None and time.monotonic() - begin > opt.time_limit
        if stop:
            data["stopped"] = f"the time limit of {opt.time_limit:g} s"
        return stop

    with Steps(total=steps) as progress:
        progress.now("bandwidth and matrix products of this machine")
        limits = {} if opt.once else ceilings(device, opt.dtype)
        clock = Clock(device, not opt.once)
        data = record(device, **known, flush_bytes=flush_bytes(device), **limits, rows=[], dense=[]) | old

        def enter(rows: list[Row]) -> None:
            data["rows"] += rows
            if opt.out:
                write_json(opt.out, data)
            if not opt.json:
                for row in rows:
                    progress.write(line(row), file=sys.stdout)

        def enter_lost(rows: list[Row]) -> None:
            for row in rows:
                row |= dict(lost=True) if "error" in row else {}
            enter([])

        enter([])
        for name, batch, length, todo in grid:
            if late():
                break
            torch._dynamo.reset()
            recover(device)
            size = Size(name, batch, length, shapes(name), opt, clock)
            progress.now(f"{size}: keys and values, and every dense attention over them")
            size.fill()
            if opt.once:
                for text in todo:
                    progress.now(f"{size}: {text}")
                    attempt(size, text, enter)
                continue
            for group in size.groups(todo):
                rows, interrupted = measure(size, group, limits["bandwidth"], late, progress, enter)
                data["dense"] = [r for r in data["dense"] if any(r[k] != v for k, v in size.where.items())]
                data["dense"] += [size.where | r for r in size.tried]
                enter(rows)
                recover(device, lambda rows=rows: enter_lost(rows))  # type: ignore[misc]
                if interrupted:
                    raise KeyboardInterrupt
    if opt.json:
        print(json.dumps(data))
    if opt.once and any("error" in r or not r["finite"] for r in data["rows"]):
        raise SystemExit(1)
    end(data["rows"])


def attempt(size: Size, text: str, enter: Callable[[list[Row]], None]) -> None:
    row = size.where | dict(method=text)
    try:
        row |= run_once(size, text)
    except Exception as e:  # recorded in the row: the grid goes on
        row |= dict(error=reason(e))
    recover(size.clock.device, lambda: enter([row | dict(error="it crashes the device") | row | dict(lost=True)]))
    enter([row])


if __name__ == "__main__":
    run_cli(main)
