"""A prompt's cache in a file, by method: the size of the file, and the time to write it and to restore the cache.

    python -m scripts.bench.bench_restore --method full self_index --length 8192
    python -m scripts.bench.bench_restore --method all --synthetic --out restore.json

Prompts are random tokens. `--synthetic` skips the prefill: caches are filled with random keys and values. The file is
still in the page cache when it is read, because it was just written. The time to restore is that of `LLM.restore`:
reading, the checksum, an empty cache and its filling. The time of a prefill includes setting up the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Sampling
from engine.snapshot import CacheFile
from runtime.errors import InputError, Parser, run_cli
from runtime.machine import TINY, add_calibration, add_precision, check_out, set_threads
from scripts.bench.layer import fill_layers
from scripts.bench.peer_runs import Work
from scripts.shared.options import SPECS_BY_LAYER, add_run, expand, precision
from scripts.shared.progress import Progress
from scripts.shared.results import record, write_json


@torch.inference_mode()
def fill_cache(llm: LLM, work: Work) -> None:
    """Fills every layer with random keys and values, as if a prompt had been read."""
    session = llm.session(work.batch, work.length + work.new, work.new, Sampling())
    fill_layers(llm.model, *work.random_kv())
    pos = torch.full((work.batch,), work.length, device=work.device)
    session.begin(torch.zeros_like(pos), pos)
    session.prompts = [[0] * work.length] * work.batch


def measure(llm: LLM, method: str, opt: argparse.Namespace, file: Path, progress: Progress) -> dict[str, Any]:
    llm.use(method)
    row = dict[str, Any](method=method, batch=opt.batch, length=opt.length)
    progress.now("prepare", f"{method}: {'filling' if opt.synthetic else 'prefill'}")
    work = Work(llm.model, opt.batch, opt.length, opt.new, opt.synthetic)
    if opt.synthetic:
        fill_cache(llm, work)
    else:
        tokens = work.tokens.tolist()
        start = time.perf_counter()
        llm.read(tokens, opt.new)
        work.sync()
        row["prefill_s"] = time.perf_counter() - start
    row["kv_bytes"] = llm.model.kv_bytes()
    start = time.perf_counter()
    llm.save(file)
    row |= dict(save_s=time.perf_counter() - start, file_bytes=file.stat().st_size)
    row["tensor_bytes"] = sum(t.nbytes for t in CacheFile(file).tensors.values())
    row["restore_s"] = []
    for _ in range(opt.rounds):
        progress.now("round", f"{method}: restoring")
        llm.use(method)  # drops the previous cache
        start = time.perf_counter()
        llm.restore(file, opt.new)
        work.sync()
        row["restore_s"].append(time.perf_counter() - start)
    return row


def line(row: dict[str, Any]) -> str:
    text = f"{row['method']:32s} {row['file_bytes'] / 2**20:9.1f} MiB, written in {row['save_s']:.2f} s, restored in "
    text += f"{statistics.median(row['restore_s']):.2f} s"
    return text + (f", prefill {row['prefill_s']:.1f} s" if "prefill_s" in row else "")


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder or GGUF file")
    a("--method", nargs="+", default=["full"], help=SPECS_BY_LAYER)
    a("--batch", type=int, default=1, help="batch size; default: 1")
    a("--length", type=int, default=2048, help="prompt tokens; default: 2048")
    a("--new", type=int, default=128, help="further tokens that the cache has room for; default: 128")
    a("--synthetic", action="store_true", help="fill the caches with random keys and values instead of a prefill")
    a("--rounds", type=int, default=3, help="times each file is restored; default: 3")
    a("--device", help="cpu, cuda, cuda:1 ...; default: a GPU if there is one")
    add_precision(p)
    add_calibration(p)
    add_run(p, resume=False)
    opt = p.parse_args()
    if min(opt.batch, opt.length, opt.new, opt.rounds) < 1:
        raise InputError("--batch, --length, --new and --rounds must be at least 1")
    check_out(opt.out)
    set_threads(opt.threads)
    return opt


def main() -> None:
    opt = parse_args()
    llm = LLM(opt.checkpoint, device=opt.device, dtype=opt.dtype, weights=opt.weights, head=opt.head,
              kv_dtype=opt.kv_dtype, calibration=opt.calibration, compile=False)  # fmt: skip
    known = dict(model=Path(opt.checkpoint).name, synthetic=opt.synthetic, **precision(opt, llm.model))
    methods = expand(opt.method)
    for method in methods:
        llm.use(method)  # a wrong name or knob ends the run before it starts
    data = record(llm.model.device, **known, rows=[])
    plan = dict(prepare=len(methods), round=len(methods) * opt.rounds)
    with tempfile.TemporaryDirectory() as folder, Progress(plan) as progress:
        for method in methods:
            data["rows"].append(measure(llm, method, opt, Path(folder) / "cache", progress))
            if opt.out:
                write_json(opt.out, data)
            if not opt.json:
                progress.write(line(data["rows"][-1]))
    if opt.json:
        print(json.dumps(data))


if __name__ == "__main__":
    run_cli(main)
