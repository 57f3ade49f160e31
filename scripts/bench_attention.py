"""Time one layer's attention of a decode step, whole and by stage, beside the best dense attention in the same run.

    python scripts/bench_attention.py --length 32768 --threads 2                      # a CPU, Llama-3.1-8B shapes
    python scripts/bench_attention.py --model llama-2-7b --batch 1 8 16 --length 1024 4096 --out results/attention.json

Caches are filled with random keys through the methods' own `compress`; no weights are needed. `operator` is the whole
of `decode` (rotate, append, select, attend), compiled; `select` and `attend` are timed apart. The dense baseline is the
fastest of torch's SDPA, a grouped matmul, our own decode_attention, and flash-attn and FlashInfer where installed.
`limit` is the time that the bytes of `traffic()` would take at the bandwidth measured in this run, and its share of the
operator's time says how much of the card or the memory bus is used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from calibrate import RandomCalibration  # noqa: E402
from errors import InputError, Parser, run_cli  # noqa: E402
from generate import DTYPES, pick_device  # noqa: E402
from kernels.dense_attention import decode_attention  # noqa: E402
from kv_methods import make_args, resolve  # noqa: E402
from kv_methods.base import CacheShape, KVMethod  # noqa: E402
from model import ModelArgs, Rope, require_memory  # noqa: E402
from scripts.results import record, write_json  # noqa: E402

LAYER = 8  # a layer that no paper leaves dense


class Timer:
    """Median and spread of repeated calls; on a GPU captured into a CUDA graph and timed by events."""

    def __init__(self, device: torch.device, rounds: int):
        self.device, self.rounds = device, rounds

    def __call__(self, call: Callable[[], object]) -> dict[str, object]:
        for _ in range(3):
            call()
        run, calls = (self._cpu, 1) if self.device.type == "cpu" else self._capture(call)
        run(call)
        times = [run(call) / calls for _ in range(self.rounds)]
        return dict(
            ms=statistics.median(times), spread=(max(times) - min(times)) / statistics.median(times), each=times
        )

    @staticmethod
    def _cpu(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def _capture(self, call: Callable[[], object], calls: int = 10) -> tuple[Callable[[object], float], int]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def run(_: object) -> float:
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end)

        return run, calls


def bandwidth(device: torch.device, timer: Timer) -> float:
    """Bytes a second that a read of a buffer much larger than any cache achieves."""
    n = (256 << 20) if device.type == "cpu" else (2 << 30)
    x = torch.ones(n // 4, device=device)
    return x.nbytes / (float(timer(x.sum)["ms"]) / 1e3)  # type: ignore[arg-type]


def dense(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every dense attention there is, over q [B, Hq, D] and k, v [B, Hkv, T, D], all of T filled."""
    B, Hq, D = q.shape
    Hkv, T = k.shape[1:3]
    grouped = q.view(B, Hkv, Hq // Hkv, D)
    start, stop = torch.zeros(B, dtype=torch.int64, device=q.device), torch.full((B,), T, device=q.device)
    out = {
        "sdpa": lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=Hq != Hkv),
        "sdpa, grouped queries": lambda: F.scaled_dot_product_attention(grouped, k, v),
        "matmul": lambda: ((grouped @ k.transpose(2, 3)).float() * D**-0.5).softmax(-1).to(v.dtype) @ v,
        "decode_attention": lambda: decode_attention(q, k, v, start, stop),
    }
    if q.device.type == "cuda":
        try:
            from flash_attn import flash_attn_with_kvcache

            kt, vt = k.transpose(1, 2), v.transpose(1, 2)
            out["flash-attn"] = lambda: flash_attn_with_kvcache(q[:, None], kt, vt)
        except ImportError:
            pass
        try:
            import flashinfer

            if B == 1:
                out["flashinfer"] = lambda: flashinfer.single_decode_with_kv_cache(q[0], k[0], v[0], kv_layout="HND")
        except ImportError:
            pass
    return out


def build(name: str, args: ModelArgs, batch: int, T: int, dtype: torch.dtype, device: torch.device) -> KVMethod:
    cls, knobs = resolve(name)
    shape = CacheShape.of(args, LAYER, batch, T, dtype, device)
    meta = cls(make_args(cls, knobs), shape.on("meta"), LAYER, Rope(args, batch, 1, "meta"))
    require_memory(sum(meta.nbytes().values()), device, f"one layer of {name}", "lower --batch or --length")
    calib = RandomCalibration(args) if cls.calibrated else None
    return cls(make_args(cls, knobs), shape, LAYER, Rope(args, batch, T, device), calib)


@torch.inference_mode()
def fill(method: KVMethod, args: ModelArgs, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
    gen = torch.Generator(device).manual_seed(0)
    size = (batch, args.n_kv_head, length, args.head_dim)
    k, v = (torch.randn(size, generator=gen, device=device, dtype=dtype) for _ in range(2))
    # only the last queries of a prompt matter to any method: one stands for all, and takes no memory
    q = torch.randn(batch, args.n_head, 1, args.head_dim, generator=gen, device=device, dtype=dtype)
    lengths = torch.full((batch,), length, device=device)
    method.compress(q.expand(-1, -1, length, -1), k, v, lengths)


@torch.inference_mode()
def measure(name: str, args: ModelArgs, batch: int, length: int, opt: argparse.Namespace, timer: Timer) -> dict:
    """One row: a method at a batch and a length."""
    device, dtype = timer.device, DTYPES[opt.dtype]
    method = build(name, args, batch, length + 16, dtype, device)
    fill(method, args, batch, length, dtype, device)
    gen = torch.Generator(device).manual_seed(1)
    q = torch.randn(batch, args.n_head, args.head_dim, generator=gen, device=device, dtype=dtype)
    k, v = (
        torch.randn(batch, args.n_kv_head, args.head_dim, generator=gen, device=device, dtype=dtype) for _ in range(2)
    )
    pos = torch.full((batch,), length, device=device)
    torch._dynamo.reset()
    wrap = torch.compile(fullgraph=True, dynamic=False) if opt.compile else (lambda f: f)
    step = wrap(method.decode)
    row = dict(method=name, batch=batch, length=length, operator=timer(lambda: step(q, k, v, pos)))
    rotated = q if method.pre_rope else method.rope.rotate(q, pos)
    select, attend = wrap(method.select), wrap(method.attend)
    idx, count = select(rotated, pos)
    if idx is not None:
        idx, count = idx.clone(), count.clone()
        row["select"] = timer(lambda: select(rotated, pos))
    row["attend"] = timer(lambda: attend(rotated, idx, count, pos))
    row["traffic"] = method.traffic(length)
    row["nbytes"] = sum(method.nbytes().values())
    return row


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--model", nargs="+", default=["llama-3.1-8b"], help="shapes, as --random-init of generate.py")
    a("--method", nargs="+", default=["full", "double_sparsity", "sals-12.5", "self_index-7.5"])
    a("--batch", type=int, nargs="+", default=[1])
    a("--length", type=int, nargs="+", default=[8192, 32768], help="tokens in the cache")
    a("--rounds", type=int, default=15)
    a("--device")
    a("--dtype", choices=sorted(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    a("--compile", action=argparse.BooleanOptionalAction, default=True)
    a("--threads", type=int, default=0)
    a("--out", help="result file, e.g. results/attention_cpu.json")
    a("--json", action="store_true")
    opt = p.parse_args()
    if min([*opt.batch, *opt.length, opt.rounds]) < 1:
        raise InputError("--batch, --length and --rounds must be at least 1")
    if opt.threads:
        torch.set_num_threads(opt.threads)
    device = pick_device(opt.device)
    opt.dtype = opt.dtype or ("bf16" if device.type == "cuda" else "fp32")
    timer = Timer(device, opt.rounds)
    speed, rows = bandwidth(device, timer), []
    for name in opt.model:
        args = ModelArgs.from_name(name)
        for batch in opt.batch:
            for length in opt.length:
                group = baseline(args, batch, length, DTYPES[opt.dtype], timer)
                best = min(r["ms"] for r in group.values())
                for method in tqdm(opt.method, desc=f"{name} {batch} x {length}", leave=False):
                    row = dict(model=name, **measure(method, args, batch, length, opt, timer))
                    row["dense"], row["times_dense"] = group, best / row["operator"]["ms"]
                    row["limit_ms"] = 1e3 * row["traffic"] / speed
                    row["limit_share"] = row["limit_ms"] / row["operator"]["ms"]
                    rows.append(row)
                    data = record(device, dtype=opt.dtype, bandwidth=speed, rows=rows)
                    if opt.out:
                        write_json(opt.out, data)  # after every row: an interrupted run keeps what it has
                    if not opt.json:
                        parts = "".join(f" {s} {row[s]['ms']:.3f}" for s in ("select", "attend") if s in row)
                        print(
                            f"{name} batch {batch} length {length} {method}: {row['operator']['ms']:.3f} ms"
                            f" ({row['times_dense']:.2f}x the best dense, {best:.3f} ms;{parts};"
                            f" {100 * row['limit_share']:.0f} % of the byte limit)",
                            flush=True,
                        )
    if opt.json:
        print(json.dumps(data))


@torch.inference_mode()
def baseline(args: ModelArgs, batch: int, length: int, dtype: torch.dtype, timer: Timer) -> dict[str, dict]:
    """Every dense attention at this size, timed."""
    gen = torch.Generator(timer.device).manual_seed(0)
    size = (batch, args.n_kv_head, length, args.head_dim)
    need = 2 * batch * args.n_kv_head * length * args.head_dim * dtype.itemsize
    require_memory(need, timer.device, "the dense cache", "lower --batch or --length")
    k, v = (torch.randn(size, generator=gen, device=timer.device, dtype=dtype) for _ in range(2))
    q = torch.randn(batch, args.n_head, args.head_dim, generator=gen, device=timer.device, dtype=dtype)
    return {name: timer(call) for name, call in dense(q, k, v).items()}


if __name__ == "__main__":
    run_cli(main)
