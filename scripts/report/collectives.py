"""Counts the communication between ranks in a decode step, by method, and predicts a step's time on several H100s.

    python -m scripts.report.collectives --model llama-3.1-8b --batch 8 --length 32768 --out collectives.json

The sums and gathers of a whole model's step are counted on the meta device, which gives sizes but no times. The time is
a prediction: the bytes of a rank's weights (bf16) and of its cache's reads, over the memory's bandwidth, plus a latency
for every collective.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from cache.spec import method_files
from loading.allocate import empty_transformer
from model import NAMED, ModelArgs
from runtime.errors import InputError, Parser, run_cli
from runtime.parallel import Ranks
from scripts.report.markdown import runs, sources, table
from scripts.shared.options import SPECS_BY_LAYER, expand
from scripts.shared.results import check_out, record, write_json

BANDWIDTH = 3.35e12  # bytes/s: H100 SXM5, NVIDIA's data sheet
# s: an all-reduce of 64 KB, which is [8, 4096] in bf16, replayed from a CUDA graph, on four H100 SXM5 with NVSwitch and
# NCCL 2.18.3 (1 to 256 KB: 11.8 to 14.2 us). Measured by github.com/waynehacking8/nccl-collectives-bench, commit
# 38c093e, results/quiet/tp_latency.json. It is assumed that two and eight GPUs take as long.
LATENCY = 13.6e-6


class Counted:
    """Counts what ranks would send, without other ranks."""

    def __init__(self) -> None:
        self.sums, self.gathers, self.bytes = 0, 0, 0

    def sum(self, ranks: Ranks, x: Tensor) -> Tensor:
        if ranks.size > 1:
            self.sums, self.bytes = self.sums + 1, self.bytes + x.numel() * x.element_size()
        return x

    def gather(self, ranks: Ranks, x: Tensor) -> Tensor:
        if ranks.size == 1:
            return x
        self.gathers, self.bytes = self.gathers + 1, self.bytes + x.numel() * x.element_size()
        return torch.cat([x] * ranks.size, -1)


def step(name: str, method: str, n: int, batch: int, length: int) -> dict:
    """The first of n ranks: collectives of a step, the bytes that it sends in them, and the bytes that it reads."""
    args, counted = replace(ModelArgs.from_name(name), ranks=Ranks(0, n)), Counted()
    model = empty_transformer(args, "meta", torch.bfloat16).eval()
    model.setup_cache(method, batch, length, None)
    tokens = torch.zeros(batch, dtype=torch.int64, device="meta")
    with (mock.patch.object(Ranks, "sum", lambda r, x: counted.sum(r, x)),
          mock.patch.object(Ranks, "gather", lambda r, x: counted.gather(r, x))):  # fmt: skip
        model.decode(tokens, tokens)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.tok_embeddings.weight
    read = weights - (0 if model.tied else embedding.numel() * embedding.element_size())
    cache = sum(m.traffic(length - 1) for m in model.cache)
    collectives = counted.sums + counted.gathers
    return dict(method=method, ranks=n, sums=counted.sums, gathers=counted.gathers, bytes=counted.bytes,
                weight_bytes=read, cache_bytes=cache, kv_bytes=model.kv_bytes(),
                predicted_s=(read + cache) / BANDWIDTH + collectives * LATENCY)  # fmt: skip


def shown(data: dict) -> str:
    by = {(r["method"], r["ranks"]): r for r in data["rows"]}
    sizes = sorted({n for _, n in by})
    cells = []
    for method in dict.fromkeys(m for m, _ in by):
        some = next((by[method, n] for n in sizes if n > 1 and (method, n) in by), None)
        each = [f"{1e3 * by[method, n]['predicted_s']:.1f}" if (method, n) in by else "-" for n in sizes]
        told = ["-", "-"] if some is None else [f"{some['sums'] + some['gathers']}", f"{some['bytes'] / 2**20:.2f}"]
        cells.append([f"`{method}`", *told, *each])
    header = ["method", "collectives per step", "MiB per step", *(f"ms, {n} H100{'s' * (n > 1)}" for n in sizes)]
    s = data["settings"]
    return (f"{s['model']}, batch {s['batch']}, {s['length']:,} tokens, bf16; predicted, not measured: bytes over "
            f"{data['bandwidth'] / 1e12:g} TB/s, {1e6 * data['latency']:g} us per collective.\n\n"
            + table(header, cells))  # fmt: skip


def collectives() -> str:
    """The table of collectives.json."""
    return "\n\n".join([*(shown(run) for run in runs("collectives")), sources("collectives", root="../results/")])


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--model", default="llama-3.1-8b", choices=sorted(NAMED), help="shapes; default: llama-3.1-8b")
    a("--method", nargs="+", default=sorted(method_files()), help=f"{SPECS_BY_LAYER}; default: all methods")
    a("--ranks", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="numbers of ranks; default: 1 2 4 8")
    a("--batch", type=int, default=8, help="batch size; default: 8")
    a("--length", type=int, default=32768, help="tokens in the cache; default: 32768")
    a("--out", help="result file, e.g. collectives.json")
    a("--json", action="store_true", help="print the result object")
    opt = p.parse_args()
    check_out(opt.out)
    if min(opt.ranks, default=0) < 1 or min(opt.batch, opt.length) < 1:
        raise InputError("--ranks, --batch and --length must be at least 1")
    rows, refused = [], {}
    for method in tqdm(expand(opt.method)):
        for n in opt.ranks:
            try:
                rows.append(step(opt.model, method, n, opt.batch, opt.length))
            except InputError as e:
                refused[method] = str(e)
    settings = dict(model=opt.model, batch=opt.batch, length=opt.length)
    data = record("cpu", settings=settings, bandwidth=BANDWIDTH, latency=LATENCY, refused=refused, rows=rows)
    for method, why in refused.items():
        print(f"{method}: {why}", file=sys.stderr)
    if not rows:
        raise InputError("no method can be shared by so many ranks: give other --ranks")
    if opt.out:
        write_json(opt.out, data)
    print(json.dumps(data) if opt.json else shown(data))


if __name__ == "__main__":
    run_cli(main)
