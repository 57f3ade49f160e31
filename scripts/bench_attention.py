"""Time one layer's attention of a decode step, whole and by stage, beside the best dense attention in the same run.

    python scripts/bench_attention.py --length 32768 --threads 2                      # a CPU, Llama-3.1-8B shapes
    python scripts/bench_attention.py --model llama-2-7b --batch 8 16 --length 4096 --out results/attention.json
    compute-sanitizer python scripts/bench_attention.py --once --method all --batch 2 --length 300    # no timing

Caches are filled with random keys through the methods' own `compress`, at little more than the length asked for; no
weights are needed. A method may carry knobs: `sals-12.5,budget=512`. Every method is compiled with fullgraph at fixed
shapes, and on a GPU each call is one CUDA graph.

operator    the whole of `decode`: rotate, append, select, attend. It writes the same slot again and again. On a CPU,
            --layers layers with caches of their own in one graph, and the time of one: a real step runs all layers at
            one call, and calling from Python costs as much as a short layer. (A CUDA graph has no such cost.)
append, select, attend    the stages apart, each compiled by itself; `score` is the part of `select` before top-k,
            `prefetch` what an offloading method does a layer ahead (part of `operator` too).
dense       attention alone over the same number of tokens, without rotation and append: the baseline has less to do.
            The fastest of all that are installed counts, if it agrees with the definition; all are in the file.
limit       bytes of `traffic()` / the best bandwidth that reading or copying reaches in this run.

Calls take turns: a round times the baseline and every stage once, so that a noisy machine slows all alike. Before each
timed call a buffer several times the size of the last-level cache is read (not written: lines waiting to be written
back would slow what follows), because between two uses of a layer's cache a real step reads all other layers and
weights. `--cache warm` leaves that out. `floor_ms` is what the clock shows for an empty call; it is not subtracted.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from calibrate import RandomCalibration  # noqa: E402
from errors import InputError, Parser, run_cli  # noqa: E402
from generate import DTYPES, pick_device, pick_dtype  # noqa: E402
from kernels.dense_attention import decode_attention  # noqa: E402
from kernels.native import in_huge_pages  # noqa: E402
from kv_methods import make_args, method_files, resolve  # noqa: E402
from kv_methods.base import CacheShape, KVMethod  # noqa: E402
from model import ModelArgs, Rope, read_json, require_memory  # noqa: E402
from scripts.results import record, write_json  # noqa: E402

LAYER = 8  # a layer that no paper leaves dense
SPARE = 16  # slots beyond the filled ones
WARM_UP = 3
PROBE_BYTES = dict(cpu=1 << 28, cuda=1 << 30)  # of the bandwidth measurement
# of the difference between a baseline and the definition of attention
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}

Call = Callable[[], Any]


# ---- the clock ----


class Clock:
    """Milliseconds of calls that take turns; on a GPU each is captured into a CUDA graph and timed by events."""

    def __init__(self, device: torch.device, cold: bool):
        self.device = device
        self.scratch = torch.ones(flush_bytes(device) // 4, device=device) if cold else None
        self.sink = torch.zeros((), device=device)

    def prepare(self, call: Call) -> Call:
        """Warm up (compilation, autotuning) and, on a GPU, capture."""
        if self.device.type == "cpu":
            for _ in range(WARM_UP):
                call()
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        # `call` is kept with the graph, which reads the tensors that it holds
        return partial(lambda graph, _: graph.replay(), graph, call)

    def flush(self) -> None:
        if self.scratch is not None:
            torch.sum(self.scratch, 0, out=self.sink)
        elif self.device.type == "cuda":
            torch.cuda._sleep(200_000)  # cycles in which the host gets ahead, so that no launch is timed

    def rounds(self, calls: dict[str, Call], n: int) -> dict[str, list[float]]:
        """n rounds of prepared calls in turn -> milliseconds of each."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(n):
            for name, ms in (self._cpu_round if self.device.type == "cpu" else self._cuda_round)(calls).items():
                times[name].append(ms)
        return times

    def _cpu_round(self, calls: dict[str, Call]) -> dict[str, float]:
        out = {}
        for name, call in calls.items():
            self.flush()
            start = time.perf_counter()
            call()
            out[name] = 1e3 * (time.perf_counter() - start)
        return out

    def _cuda_round(self, calls: dict[str, Call]) -> dict[str, float]:
        """All is enqueued before anything is waited for: the device reads the scratch while the host launches."""
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
        for name, call in calls.items():
            self.flush()
            events[name][0].record()
            call()
            events[name][1].record()
        torch.cuda.synchronize()
        return {name: begin.elapsed_time(end) for name, (begin, end) in events.items()}


def flush_bytes(device: torch.device) -> int:
    """How much must be read until nothing older is left in the last-level cache."""
    if device.type == "cuda":
        return 4 * torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number, unit = re.fullmatch(r"(\d+)([KM]?)", file.read_text().strip()).groups()  # type: ignore[union-attr]
        sizes.append(int(number) << {"": 0, "K": 10, "M": 20}[unit])
    return 2 * max([32 << 20, *sizes])


def summary(times: list[float]) -> dict[str, Any]:
    median = statistics.median(times)
    return dict(ms=median, spread=(max(times) - min(times)) / median if median else 0.0, each=times)


@torch.inference_mode()
def ceilings(device: torch.device, dtype: torch.dtype, rounds: int = 5) -> dict[str, Any]:
    """Measured here and now: bytes/s of reading and of copying (each byte read and written counts), matmul FLOP/s.

    `bandwidth`, what byte limits are taken from, is the better of the two.
    """
    clock, gpu = Clock(device, cold=False), device.type == "cuda"
    x = torch.ones(PROBE_BYTES[device.type] // 4, device=device)
    y = torch.empty_like(x)
    n = 8192 if gpu else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    calls: dict[str, Call] = dict(
        sum=x.sum, max=x.max, copy=lambda: y.copy_(x), matmul=lambda: a @ b, floor=clock.sink.zero_
    )
    raw = clock.rounds({k: clock.prepare(c) for k, c in calls.items()}, rounds)
    ms = {k: statistics.median(t) for k, t in raw.items()}
    read, copy = x.nbytes / min(ms["sum"], ms["max"]) * 1e3, 2 * x.nbytes / ms["copy"] * 1e3
    return dict(bandwidth=max(read, copy), read_bytes_per_s=read, copy_bytes_per_s=copy,
                matmul_flops=2 * n**3 / ms["matmul"] * 1e3, matmul_dtype=str(dtype).removeprefix("torch."),
                floor_ms=ms["floor"], raw_ms=raw)  # fmt: skip


# ---- what may fail is recorded, not raised ----


def reason(e: BaseException) -> str:
    """Why something was not measured, in one line."""
    text = " ".join(str(e).split())[:300]
    return text if isinstance(e, InputError) else f"{type(e).__name__}: {text}"


def recover(device: torch.device) -> None:
    """Free what a row left behind. A device that does not answer any more ends the run: all rows are written."""
    if device.type == "cuda":
        gc.collect()
        try:
            torch.cuda.synchronize()
        except RuntimeError as e:
            raise SystemExit(f"error: the device is lost: {reason(e)}") from None
        torch.cuda.empty_cache()


# ---- the baseline ----


def dense_calls(q: Tensor, k: Tensor, v: Tensor, compile: bool) -> dict[str, Callable[[], Call]]:
    """Every dense attention there is over q [B, Hq, D] and k, v [B, Hkv, T, D]: name -> what makes the call.

    "grouped queries" puts the query heads of a group where SDPA expects query positions: K and V are then read once
    per group without being repeated, whatever a backend makes of enable_gqa.
    """
    B, Hq, D = q.shape
    Hkv, T = k.shape[1:3]
    grouped = q.view(B, Hkv, Hq // Hkv, D)
    start, stop = torch.zeros(B, dtype=torch.int64, device=q.device), torch.full((B,), T, device=q.device)
    wrap: Any = torch.compile(fullgraph=True, dynamic=False) if compile else lambda f: f

    def matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(2, 3)).float() * D**-0.5).softmax(-1).to(v.dtype) @ v

    def sdpa(q: Tensor, backend: SDPBackend | None, gqa: bool) -> Call:
        def call() -> Tensor:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)

        return call

    compiled = wrap(matmul)
    out: dict[str, Callable[[], Call]] = {
        "matmul": lambda: lambda: compiled(grouped, k, v),
        "decode_attention": lambda: lambda: decode_attention(q, k, v, start, stop),
    }
    backends: dict[str, SDPBackend | None] = {"": None}
    if q.is_cuda:
        backends = {" flash": SDPBackend.FLASH_ATTENTION, " efficient": SDPBackend.EFFICIENT_ATTENTION,
                    " cudnn": SDPBackend.CUDNN_ATTENTION, " math": SDPBackend.MATH}  # fmt: skip
    for name, backend in backends.items():
        out[f"sdpa{name}"] = partial(sdpa, q[:, :, None], backend, Hq != Hkv)
        if Hq != Hkv:
            out[f"sdpa{name}, grouped queries"] = partial(sdpa, grouped, backend, False)
    if q.is_cuda:
        out |= {"flash-attn": partial(flash_attn, q, k, v), "flashinfer": partial(flashinfer, q, k, v)}
        if compile:
            out["flex_attention"] = partial(flex, q, k, v)
    return out


def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Call:
    from flash_attn import flash_attn_with_kvcache

    return lambda: flash_attn_with_kvcache(q[:, None], k.transpose(1, 2), v.transpose(1, 2))


def flashinfer(q: Tensor, k: Tensor, v: Tensor, page: int = 16) -> Call:
    """Its batch decode over pages, the way servers call it."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    (B, Hq, D), (Hkv, T) = q.shape, k.shape[1:3]
    if T % page:
        raise InputError(f"{T} tokens are no whole number of pages of {page}")
    pages = T // page
    kp, vp = (x.unflatten(2, (pages, page)).transpose(1, 2).reshape(-1, Hkv, page, D) for x in (k, v))
    space = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=Hq // Hkv >= 4)
    table = torch.arange(B * pages + 1, dtype=torch.int32, device=q.device)
    last = torch.full((B,), page, dtype=torch.int32, device=q.device)
    wrapper.plan(table[::pages].contiguous(), table[:-1], last, Hq, Hkv, D, page, q_data_type=q.dtype)
    return lambda: wrapper.run(q, (kp, vp))


def flex(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """What gpt-fast calls; compiled, it has a split-K decode kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    f = torch.compile(flex_attention, dynamic=False)
    return lambda: f(q[:, :, None], k, v, enable_gqa=q.shape[1] != k.shape[1])


def difference(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Largest deviation of the last row's output from attention as it is defined, share of the largest output."""
    g = q.shape[1] // k.shape[1]
    ref = torch.cat([(qh.float() @ kh.float().T * q.shape[2] ** -0.5).softmax(-1) @ vh.float()
                     for qh, kh, vh in zip(q[-1].split(g), k[-1], v[-1], strict=True)])  # fmt: skip
    return float((out.reshape(q.shape)[-1].float() - ref).abs().max() / ref.abs().max())


@torch.inference_mode()
def baseline(q: Tensor, k: Tensor, v: Tensor, opt: argparse.Namespace, clock: Clock) -> tuple[Call | None, list[dict]]:
    """The fastest dense attention at this size, prepared, and a row for each that was tried."""
    ready: dict[str, Call] = {}
    rows: dict[str, dict] = {}
    for name, make in dense_calls(q, k, v, opt.compile).items():
        row: dict[str, Any] = dict(name=name)
        rows[name] = row
        try:
            call = make()
            row["difference"] = difference(call(), q, k, v)
            if not row["difference"] <= TOLERANCE[q.dtype]:
                raise InputError(f"computes something else, off by {row['difference']:.2g}")
            ready[name] = clock.prepare(call)
        except ImportError:
            row["error"] = "not installed"
        except Exception as e:  # a backend may refuse a size in any way it likes
            row["error"] = reason(e)
            recover(clock.device)
    for name, times in clock.rounds(ready, opt.rounds).items():
        rows[name] |= summary(times)
        rows[name]["bytes_per_s"] = (k.nbytes + v.nbytes) / rows[name]["ms"] * 1e3
    best = min(ready, key=lambda name: rows[name]["ms"], default=None)
    for row in rows.values():
        row["best"] = row["name"] == best
    return (ready[best] if best else None), list(rows.values())


# ---- a method at a size ----


def split_knobs(text: str) -> tuple[str, dict[str, str]]:
    """`sals-12.5,budget=512` -> the name and its knobs as text."""
    name, *knobs = re.split(r",(?=\w+=)", text)
    return name, dict(k.split("=", 1) for k in knobs)


def make_method(text: str, args: ModelArgs) -> tuple[type[KVMethod], Any]:
    """Class and Args; InputError if the name or a knob is wrong."""
    name, knobs = split_knobs(text)
    cls, preset = resolve(name)
    if unknown := set(knobs) - (fields := {f.name for f in dataclasses.fields(cls.Args)}):
        raise InputError(f"method {name} has no knob {min(unknown)!r}: it takes {', '.join(sorted(fields)) or 'none'}")
    return cls, make_args(cls, preset | knobs)


def build(
    text: str, args: ModelArgs, batch: int, T: int, dtype: torch.dtype, device: torch.device, layers: int = 1
) -> KVMethod:
    """One layer's method with all its buffers, after checking that those of as many layers fit."""
    cls, own = make_method(text, args)
    layer = min(LAYER, args.n_layer // 2)
    shape = CacheShape.of(args, layer, batch, T, dtype, device)
    meta = cls(own, shape.on("meta"), layer, Rope(args, batch, 1, "meta"))
    lower = "lower --batch, --length or --layers"
    require_memory(layers * sum(meta.nbytes().values()), device, f"{layers} layers of {text}", lower)
    calib = RandomCalibration(args) if cls.calibrated else None
    return cls(own, shape, layer, Rope(args, batch, T, device), calib)


def fill(method: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compress k and v [B, Hkv, S, D] as a prompt whose queries are all q [B, Hq, 1, D]: they take no memory.

    Only the last few queries of a prompt matter to any method.
    """
    B, H, S, _ = k.shape
    method.rope.set_prompt(lengths := torch.full((B,), S, device=k.device))
    if (inner := getattr(method, "retrieval", None)) is not None:  # razor: heads are split between two methods
        if not method.n_local:
            return fill(inner, q, k, v)
        groups, (P, order) = q.unflatten(1, (H, -1)), (method.n_protected, method.order)
        fill(inner, groups[:, order[:P]].flatten(1, 2), k[:, order[:P]], v[:, order[:P]])
        q, k, v = groups[:, order[P:]].flatten(1, 2), k[:, order[P:]], v[:, order[P:]]
    method.compress(q.expand(-1, -1, S, -1), k, v, lengths)


def score_function(method: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What a method scores all tokens with, where that is a function (q, pos) of its own."""
    for owner in (method, getattr(method, "label", None)):
        for name in ("score", "scores", "_score", "_scores"):
            if callable(f := getattr(owner, name, None)):
                return f
    return None


def stages(
    methods: list[KVMethod], q: Tensor, k: Tensor, v: Tensor, pos: Tensor, opt: argparse.Namespace
) -> dict[str, Call]:
    """The operator and its stages as calls, of all layers one after the other. q [B, Hq, D], k and v [B, Hkv, D] before
    rotation, pos [B]."""
    wrap: Any = torch.compile(fullgraph=True, dynamic=False) if opt.compile else lambda f: f
    method, raw = methods[0], (q, k, v)

    def all_layers(f: Callable[..., Any], *args: Any, each: list[Any] | None = None) -> Call:
        """f(layer, *args), and with `each` what belongs to that layer besides."""
        run = wrap(lambda *args: [f(m, *args, *x) for m, x in zip(methods, each or [()] * len(methods), strict=True)])
        return lambda: run(*args)

    def operator(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        for m in methods:
            if m.predicts:  # what the layer before calls belongs to this layer's work
                m.prefetch(q, pos)
            q = m.decode(q, k, v, pos)
        return q

    step = wrap(operator)
    calls: dict[str, Call] = dict(operator=lambda: step(*raw, pos))
    # a method with a decode of its own (razor) has no stages that add up to it; and where one stage starts a copy that
    # another waits for (offload), a CUDA graph must hold both: apart they cannot be captured
    copies = q.is_cuda and hasattr(method, "fetched")
    if not opt.stages or type(method).decode is not KVMethod.decode or copies:
        return calls
    if not method.pre_rope:
        q, k = method.rope.rotate(q, pos), method.rope.rotate(k, pos)
    if method.predicts:
        calls["prefetch"] = all_layers(lambda m, *args: m.prefetch(*args), raw[0], pos)
    calls["append"] = all_layers(lambda m, *args: m.append(*args), k, v, pos)
    chosen = [m.select(q, pos) for m in methods]
    if chosen[0][0] is not None:
        if score_function(method) is not None:
            calls["score"] = all_layers(lambda m, *args: score_function(m)(*args), q, pos)  # type: ignore[misc]
        calls["select"] = all_layers(lambda m, *args: m.select(*args), q, pos)
    calls["attend"] = all_layers(lambda m, q, pos, idx, count: m.attend(q, idx, count, pos), q, pos, each=chosen)
    return calls


@torch.inference_mode()
def measure(text: str, args: ModelArgs, kv: tuple[Tensor, Tensor], dense: Call | None, opt: argparse.Namespace,
            clock: Clock, bandwidth: float) -> dict[str, Any]:  # fmt: skip
    """A row: one method, filled with kv, in turns with the best dense attention."""
    (batch, _, length, D), dtype, device = kv[0].shape, kv[0].dtype, kv[0].device
    gen = torch.Generator(device).manual_seed(1)
    q, k, v = (torch.randn(batch, n, D, generator=gen, device=device, dtype=dtype)
               for n in (args.n_head, args.n_kv_head, args.n_kv_head))  # fmt: skip
    methods = [build(text, args, batch, length + SPARE, dtype, device, opt.layers) for _ in range(opt.layers)]
    for method in methods:
        fill(method, q[:, :, None], *kv)
    pos = torch.full((batch,), length, device=device)
    row: dict[str, Any] = dict(nbytes=sum(method.nbytes().values()), traffic=method.traffic(length))
    if opt.once:
        for step in range(SPARE):  # with settings that are due by then, `maintain` has its kernels to run
            y = method.decode(q, k, v, pos + step)
            method.maintain(step + 1)
        return row | dict(finite=bool(y.isfinite().all()))
    calls = {name: clock.prepare(call) for name, call in stages(methods, q, k, v, pos, opt).items()}
    if dense is not None:
        calls["dense"] = dense if opt.layers == 1 else lambda: [dense() for _ in methods]
    times = clock.rounds(calls, opt.rounds)
    row |= {name: summary([ms / opt.layers for ms in t]) for name, t in times.items()}
    ms = row["operator"]["ms"]
    if dense:
        row["times_dense"] = row["dense"]["ms"] / ms
    row["bytes_per_s"] = row["traffic"] / ms * 1e3
    row["limit_ms"] = 1e3 * row["traffic"] / bandwidth
    row["limit_share"] = row["limit_ms"] / ms
    return row


# ---- the grid ----


def shapes(name: str) -> ModelArgs:
    """Of a known model, or of a config.json as checkpoints have it."""
    return ModelArgs.from_hf(read_json(Path(name))) if name.endswith(".json") else ModelArgs.from_name(name)


def line(row: dict[str, Any]) -> str:
    where = f"{row['model']} batch {row['batch']} length {row['length']} {row['method']}"
    if "error" in row:
        return f"{where}: {row['error']}"
    if "operator" not in row:
        return f"{where}: ran, {'finite' if row['finite'] else 'NOT finite'}"
    parts = "".join(f" {s} {row[s]['ms']:.3f}" for s in ("prefetch", "append", "score", "select", "attend") if s in row)
    dense = f"{row['times_dense']:.2f}x the best dense, {row['dense']['ms']:.3f} ms; " if "dense" in row else ""
    return (f"{where}: {row['operator']['ms']:.3f} ms ({dense}{parts.strip()};"
            f" {row['bytes_per_s'] / 1e9:.0f} GB/s, {100 * row['limit_share']:.0f} % of the byte limit)")  # fmt: skip


def check_run(opt: argparse.Namespace) -> None:
    """What both benchmarks take: --size becomes [(batch, length), ...], and what cannot be is an InputError."""
    if opt.size is None:
        opt.size = [(b, n) for b in opt.batch for n in opt.length]
    else:
        for text in opt.size:
            if not re.fullmatch(r"\d+x\d+", text):
                raise InputError(f"--size {text} is no batch x tokens: write 8x4096")
        opt.size = [(int(b), int(n)) for b, n in (text.split("x") for text in opt.size)]
    if min(opt.rounds, *(n for size in opt.size for n in size)) < 1:
        raise InputError("--batch, --length, --size and --rounds must be at least 1")
    if opt.resume and not opt.out:
        raise InputError("--resume needs --out, the file to go on with")
    if opt.out and not Path(opt.out).parent.is_dir():
        raise InputError(f"cannot write {opt.out}: the folder {Path(opt.out).parent} does not exist")


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--model", nargs="+", default=["llama-3.1-8b"], help="shapes: a known model, or a path to a config.json")
    a(
        "--method",
        nargs="+",
        default=["full", "double_sparsity", "sals-12.5", "self_index-7.5"],
        help="names and presets, with knobs or without; `all` is every method",
    )
    a("--batch", type=int, nargs="+", default=[1])
    a("--length", type=int, nargs="+", default=[8192, 32768], help="tokens in the cache")
    a("--size", nargs="+", metavar="BxT", help="batch x tokens, in this order, instead of --batch and --length")
    a("--layers", type=int, help="layers in one graph, default: 4 on a CPU, 1 on a GPU")
    a("--rounds", type=int, default=15)
    a("--cache", choices=["cold", "warm"], default="cold", help="warm: do not flush the last-level cache between calls")
    a("--stages", action=argparse.BooleanOptionalAction, default=True, help="time the stages too")
    a("--once", action="store_true", help="run every method's compress and decode, time nothing")
    a("--ceilings", action="store_true", help="measure bandwidth and matmul alone")
    a("--device")
    a("--dtype", choices=sorted(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    a("--compile", action=argparse.BooleanOptionalAction, default=True)
    a("--threads", type=int, default=0)
    a("--time-limit", type=float, metavar="S", help="start no further row after S seconds")
    a("--resume", action="store_true", help="keep the rows that --out has and measure the missing ones")
    a("--out", help="result file, e.g. results/attention_cpu.json; written after every row")
    a("--json", action="store_true", help="print the result file's content and nothing else")
    opt = p.parse_args()
    check_run(opt)
    opt.method = [m for name in opt.method for m in (sorted(method_files()) if name == "all" else [name])]
    for name in opt.model:
        for text in opt.method:
            make_method(text, shapes(name))  # a wrong name or knob ends the run before it starts
    return opt


def earlier(out: str, data: dict[str, Any]) -> dict[str, Any]:
    """The file to go on with, if there is one; InputError if it was measured elsewhere or on another revision."""
    if not Path(out).exists():
        return data
    try:
        old = json.loads(Path(out).read_text())
        changed = [k for k in ("device", "commit", "dtype", "cache", "layers") if old[k] != data[k]]
        rows = dict(rows=[r for r in old["rows"] if "error" not in r], dense=old["dense"])
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise InputError(f"--resume: {out} is no result of this script ({reason(e)})") from None
    if changed:
        raise InputError(f"--resume: {out} has another {changed[0]}: drop --resume, or give another --out")
    return data | rows


def main() -> None:
    opt, begin = parse_args(), time.monotonic()
    if opt.threads:
        torch.set_num_threads(opt.threads)
    device = pick_device(opt.device)
    opt.layers = opt.layers or (4 if device.type == "cpu" and not opt.once else 1)
    dtype = pick_dtype(opt.dtype, device)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000  # one a size
    limits = {} if opt.once else ceilings(device, dtype)
    clock = Clock(device, opt.cache == "cold" and not opt.once)
    data = record(device, dtype=str(dtype).removeprefix("torch."), cache=opt.cache, layers=opt.layers,
                  flush_bytes=flush_bytes(device),
                  **limits, rows=[], dense=[])  # fmt: skip
    if opt.resume:
        data = earlier(opt.out, data)
    done = {(r["model"], r["batch"], r["length"], r["method"]) for r in data["rows"]}

    def save() -> None:
        if opt.out:
            write_json(opt.out, data)

    save()
    grid = [(m, b, n) for m in opt.model for b, n in opt.size if not opt.ceilings]
    bar = tqdm(total=len(grid) * len(opt.method), desc="attention", unit="row")
    for name, batch, length in grid:
        where = dict(model=name, batch=batch, length=length)
        todo = [m for m in opt.method if (name, batch, length, m) not in done]
        bar.update(len(opt.method) - len(todo))
        if not todo:
            continue
        if opt.time_limit and time.monotonic() - begin > opt.time_limit:
            data["stopped"] = f"the time limit of {opt.time_limit:g} s"
            break
        torch._dynamo.reset()
        recover(device)
        args = shapes(name)
        kv, dense, failed = None, None, ""
        try:
            kv, q = prompt(args, batch, length, dtype, device)
            if not opt.once:
                dense, tried = baseline(q, *kv, opt, clock)
                data["dense"] = [r for r in data["dense"] if any(r[k] != where[k] for k in where)]
                data["dense"] += [where | r for r in tried]
        except Exception as e:  # out of memory, before or within an allocation
            failed = reason(e)
        for text in todo:
            if opt.time_limit and time.monotonic() - begin > opt.time_limit:
                data["stopped"] = f"the time limit of {opt.time_limit:g} s"
                break
            row = where | dict(method=text)
            try:
                if kv is None:
                    raise InputError(failed)
                row |= measure(text, args, kv, dense, opt, clock, limits.get("bandwidth", 0.0))
            except Exception as e:  # recorded in the row: the grid goes on
                row["error"] = reason(e)
            data["rows"].append(row)
            save()
            bar.update()
            if not opt.json:
                tqdm.write(line(row))
            recover(device)
        del kv, dense
    bar.close()
    save()
    if opt.json:
        print(json.dumps(data))
    elif opt.ceilings:
        print(f"read {data['read_bytes_per_s'] / 1e9:.1f} GB/s, copy {data['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
              f"matmul {data['matmul_flops'] / 1e12:.2f} TFLOP/s in {data['matmul_dtype']}")  # fmt: skip
    if opt.once and any("error" in r or not r["finite"] for r in data["rows"]):
        raise SystemExit(1)


def prompt(args: ModelArgs, batch: int, length: int, dtype: torch.dtype, device: torch.device
           ) -> tuple[tuple[Tensor, Tensor], Tensor]:  # fmt: skip
    """Random k and v [B, Hkv, S, D], which all methods of a size are filled with, and q [B, Hq, D]."""
    gen = torch.Generator(device).manual_seed(0)
    size = (batch, args.n_kv_head, length, args.head_dim)
    need = 2 * batch * args.n_kv_head * length * args.head_dim * dtype.itemsize
    require_memory(need, device, "the dense cache", "lower --batch or --length")
    # as caches have them
    k, v = (in_huge_pages(torch.empty(size, device=device, dtype=dtype)).normal_(generator=gen) for _ in range(2))
    return (k, v), torch.randn(batch, args.n_head, args.head_dim, generator=gen, device=device, dtype=dtype)


if __name__ == "__main__":
    run_cli(main)
