"""Decode tokens/s end to end, each method eager and compiled, beside a peer in the same run.

    python scripts/bench_generate.py --peer transformers
    python scripts/bench_generate.py --method full self_index --batch 1 8 --length 2048 --out results/generate.json

Rounds are interleaved (ours, peer, ours, peer, ...) so that a noisy machine slows all alike; medians and ratios of
medians are reported, the raw times of every round are in the JSON. Compilation and prefill are not counted.
`--peer transformers` times its generate() with the dynamic and the static cache and keeps the faster; its prefill is
subtracted by timing a run of one token.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from errors import InputError, Parser, run_cli  # noqa: E402
from generate import DTYPES, TINY, Sampling, Session, generate, kv_bytes, make_step, pick_device, pick_dtype  # noqa: E402
from model import ModelArgs, Transformer, load_checkpoint, random_transformer  # noqa: E402
from scripts.results import record, write_json  # noqa: E402

Run = Callable[[], float]  # seconds per decode step


def ours(model: Transformer, method: str, prompts: list[list[int]], n: int, compile: bool) -> Run:
    """A timed run of our decode loop: seconds per step."""
    # The cache is set up inside, because several runs share one model.
    sampling = Sampling()
    step = make_step(model, sampling, compile)
    state: dict[str, torch.nn.ModuleList] = {}

    def run() -> float:
        if "cache" not in state:
            torch._dynamo.reset()
            model.setup_cache(method, len(prompts), len(prompts[0]) + n)
            assert model.cache is not None
            state["cache"] = model.cache
            Session(model, step, sampling).warm_up(len(prompts))
        model.cache = state["cache"]
        result = generate(Session(model, step, sampling), prompts, n)
        return result.decode_s / result.steps

    return run


def transformers_run(folder: str, device: torch.device, dtype: torch.dtype, prompts: list[list[int]], n: int,
                     cache: str) -> Run:  # fmt: skip
    """transformers' greedy generate(): seconds per step, its prefill and first token subtracted."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    hf.generation_config.eos_token_id = None
    ids, kind = torch.tensor(prompts, device=device), None if cache == "dynamic" else cache

    def timed(new: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                        do_sample=False, pad_token_id=0, cache_implementation=kind)  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return lambda: (timed(n) - timed(1)) / (n - 1)


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY))
    a("--random-init", metavar="NAME", help="random weights of a known model instead")
    a("--method", nargs="+", default=["full"])
    a("--batch", nargs="+", type=int, default=[1, 8])
    a("--length", type=int, default=512, help="prompt tokens")
    a("--new", type=int, default=128, help="tokens decoded")
    a("--rounds", type=int, default=5)
    a("--peer", choices=["transformers"])
    a("--eager-only", action="store_true", help="do not compile ours")
    a("--device")
    a("--dtype", choices=DTYPES)
    a("--threads", type=int, default=0)
    a("--out", help="result file")
    a("--json", action="store_true")
    opt = p.parse_args()
    if opt.threads:
        torch.set_num_threads(opt.threads)
    if opt.peer and opt.random_init:
        raise InputError("--peer transformers needs a --checkpoint, not --random-init")
    device = pick_device(opt.device)
    dtype = pick_dtype(opt.dtype, device)
    if opt.random_init:
        model = random_transformer(ModelArgs.from_name(opt.random_init), device, dtype)
    else:
        model = load_checkpoint(opt.checkpoint, device, dtype)
    rows = []
    for batch in opt.batch:
        gen = torch.Generator().manual_seed(batch)
        prompts = torch.randint(3, model.args.vocab_size, (batch, opt.length), generator=gen).tolist()
        runs: dict[str, Run] = {}
        for method in opt.method:
            for compile in (False,) if opt.eager_only else (False, True):
                runs[f"{method} {'compiled' if compile else 'eager'}"] = ours(model, method, prompts, opt.new, compile)
        if opt.peer:
            for cache in ("dynamic", "static"):
                key = f"transformers {cache}"
                runs[key] = transformers_run(opt.checkpoint, device, dtype, prompts, opt.new, cache)
        times: dict[str, list[float]] = {k: [] for k in runs}
        memory = {}
        for i in tqdm(range(opt.rounds + 1), desc=f"batch {batch}"):
            for key, run in runs.items():
                t = run()
                if i:  # the first round warms up
                    times[key].append(t)
                if key.split()[0] in opt.method:
                    memory[key] = kv_bytes(model)
        speed = {k: batch / statistics.median(t) for k, t in times.items()}
        peer = max((v for k, v in speed.items() if k.startswith("transformers ")), default=None)
        for key, t in times.items():
            row = dict(batch=batch, run=key, tokens_per_s=round(speed[key], 1), seconds_per_step=t,
                       spread=round((max(t) - min(t)) / statistics.median(t), 3), kv_bytes=memory.get(key))  # fmt: skip
            if peer and not key.startswith("transformers "):
                row["times_peer"] = round(speed[key] / peer, 2)
            rows.append(row)
            if not opt.json:
                ratio = f"  {row['times_peer']:.2f}x the best transformers" if "times_peer" in row else ""
                print(f"batch {batch:3d}  {key:32s} {speed[key]:10.1f} tokens/s{ratio}", flush=True)
        data = record(device, prompt_tokens=opt.length, new_tokens=opt.new, dtype=str(dtype).removeprefix("torch."),
                      model=opt.random_init or Path(opt.checkpoint).name, rows=rows)  # fmt: skip
        if opt.out:
            write_json(opt.out, data)
    if opt.json:
        print(json.dumps(data))


if __name__ == "__main__":
    run_cli(main)
