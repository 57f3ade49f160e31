"""Measures what sharing a model costs on this machine's CPU: each rank's memory, and the speed against one process.

    python -m scripts.report.ranks --out ranks.json
    python -m scripts.report.ranks --model llama-3.2-1b --weights int4 --length 2048 --new 24 --rounds 3

A checkpoint of the model's shapes with random weights in bf16 is written to a temporary folder. Every run loads it
packed as --weights, sets up a cache of --length tokens, and decodes --new tokens greedily after a prompt of 16 tokens.
One process with 2 threads and 2 ranks with one thread each take turns, round by round; then 4 ranks run, only for their
memory. The ratio of speeds is that of the medians of a round's steps. It shows what gloo's sums cost, because the cores
are the same.

Memory is that of the process alone (RssAnon, sampled every millisecond; pages of a mapped file belong to the system),
minus what the process has after importing torch and the modules that a model needs, and meeting the other ranks.
`expected` is what the rank must hold: its share of the weights, the replicated ones, and its cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from loading.allocate import empty_transformer
from loading.checkpoint import load_checkpoint, random_transformer, save_checkpoint_tensors
from model import NAMED, ModelArgs, Transformer
from runtime.errors import InputError, Parser, run_cli
from runtime.machine import ROOT, set_threads
from runtime.parallel import start
from scripts.report.markdown import runs, sources, table
from scripts.shared.results import check_out, record, write_json
from weights import WeightFormat

PROMPT, WARM_UP = 16, 4  # tokens; steps that are not timed


# ---- one rank ----


def private_bytes() -> int:
    """This process's memory, without mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


class Peak:
    """The most private bytes within it."""

    def __enter__(self) -> Peak:
        self.most, self.ended = private_bytes(), threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.ended.wait(1e-3):
            self.most = max(self.most, private_bytes())

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join()


def held(module: torch.nn.Module) -> int:
    """Bytes of a module's tensors, each counted once."""
    tensors = {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())


@torch.inference_mode()
def steps(model: Transformer, n: int) -> list[float]:
    """Seconds of n greedy steps, after a prompt and warm-up steps."""
    pos = torch.tensor([PROMPT])
    token, took = model.prefill(torch.arange(10, 10 + PROMPT)[None], pos).argmax(-1), []
    for i in range(WARM_UP + n):
        begin = time.perf_counter()
        token = model.decode(token, pos).argmax(-1)
        took.append(time.perf_counter() - begin)
        pos = pos + 1
        model.maintain(i + 1)
    return took[WARM_UP:]


def work(job: dict[str, Any]) -> None:
    """Runs one rank, and writes its result to OUT.RANK."""
    set_threads(job["threads"])
    ranks, device = start("cpu")
    empty_transformer(ModelArgs(n_layer=1), "meta", torch.float32)  # imports 33 MiB of modules
    before = private_bytes()
    with Peak() as loading:
        model = load_checkpoint(
            job["folder"], device or "cpu", torch.float32, WeightFormat.parse(job["weights"]), ranks
        )
    weights, replicated = held(model), held(model.tok_embeddings)
    with Peak() as all_of_it:
        model.setup_cache("full", 1, job["length"], None)
        took = steps(model, job["new"])
    cache = model.kv_bytes()
    row = dict(rank=ranks.rank, weight_bytes=weights, embedding_bytes=replicated, cache_bytes=cache,
               expected=weights + cache, load_peak=loading.most - before,
               peak=max(loading.most, all_of_it.most) - before, before=before, step_s=took)  # fmt: skip
    Path(f"{job['out']}.{ranks.rank}").write_text(json.dumps(row))


# ---- all of them ----


def write_checkpoint(name: str, folder: Path) -> None:
    a = ModelArgs.from_name(name)
    if a.qkv_bias or a.qk_norm:
        raise InputError(f"--model {name} is not a Llama: give another one")
    config = dict(model_type="llama", hidden_size=a.dim, num_hidden_layers=a.n_layer, num_attention_heads=a.n_head,
                  num_key_value_heads=a.n_kv_head, head_dim=a.head_dim, intermediate_size=a.ffn_dim,
                  vocab_size=a.vocab_size, max_position_embeddings=a.max_seq_len, rms_norm_eps=a.norm_eps,
                  rope_theta=a.rope.theta, tie_word_embeddings=a.tie_embeddings, torch_dtype="bfloat16")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    model = random_transformer(a, "cpu", torch.bfloat16)
    save_file(save_checkpoint_tensors(model, torch.bfloat16), folder / "model.safetensors", metadata={"format": "pt"})


def run(n: int, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    """Runs n ranks with `threads` threads each -> their results."""
    alone = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
    argv = [*alone, "-m", "scripts.report.ranks", "--work", json.dumps(job | dict(threads=threads))]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise InputError(f"{n} ranks failed: {done.stderr.strip()[-300:]}")
    each = [json.loads(Path(f"{job['out']}.{rank}").read_text()) for rank in range(n)]
    return dict(ranks=n, threads=threads, each=each)


def summary(raw: list[dict[str, Any]]) -> dict[str, Any]:
    """For each number of ranks, the rank with the largest peak over its expected memory; and the ratio of speeds."""
    speed = {n: [median(r["each"][0]["step_s"]) for r in raw if r["ranks"] == n] for n in (1, 2)}
    rows = []
    for n in sorted({r["ranks"] for r in raw}):
        each = [e for r in raw if r["ranks"] == n for e in r["each"]]
        worst = max(each, key=lambda e: e["peak"] / e["expected"])
        rows.append({k: worst[k] for k in ("weight_bytes", "embedding_bytes", "cache_bytes", "expected", "peak")}
                    | dict(ranks=n, over=round(worst["peak"] / worst["expected"], 3)))  # fmt: skip
        if n in speed:
            rows[-1]["tokens_per_s"] = round(1 / median(speed[n]), 2)
    ratios = [one / two for one, two in zip(speed[1], speed[2], strict=True)]
    return dict(rows=rows, ratios=[round(r, 3) for r in ratios], ratio=round(median(ratios), 3))


def shown(data: dict[str, Any]) -> str:
    s, mib = data["settings"], 2**20
    cells = [[str(r["ranks"]), *(f"{r[k] / mib:,.0f}" for k in ("weight_bytes", "cache_bytes", "peak")),
              f"{r['over']:.2f}", f"{r['tokens_per_s']:.1f}" if "tokens_per_s" in r else "-"]
             for r in data["rows"]]  # fmt: skip
    header = ["ranks", "weights, MiB", "cache, MiB", "peak, MiB", "peak / held", "tokens/s"]
    return (f"{s['model']} in {s['weights']}, {s['length']:,} tokens, gloo; of the rank whose peak is the most beyond "
            "what it holds.\n\n" + table(header, cells) + "\n\nTwo ranks of one thread decode at "
            f"{data['ratio']:.2f} of the speed of one process of two threads; by rounds "
            f"{', '.join(map(str, data['ratios']))}.")  # fmt: skip


def of_ranks() -> str:
    """The table of ranks.json."""
    return "\n\n".join([*(shown(run) for run in runs("ranks")), sources("ranks", root="../results/")])


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--model", default="llama-3.2-1b", choices=sorted(NAMED), help="shapes of a Llama; default: llama-3.2-1b")
    a("--weights", default="int4", metavar="W", help="int8, int4; with a group: int4:64; default: int4")
    a("--length", type=int, default=2048, help="tokens of the cache; default: 2048")
    a("--new", type=int, default=24, help="steps that are timed; default: 24")
    a("--rounds", type=int, default=3, help="rounds; default: 3")
    a("--work", metavar="JSON", help="used by the script itself: run as one rank")
    a("--out", help="result file, e.g. ranks.json")
    a("--json", action="store_true", help="print the result object")
    opt = p.parse_args()
    if opt.work:
        work(json.loads(opt.work))
        return
    check_out(opt.out)
    WeightFormat.parse(opt.weights)
    if opt.rounds < 1 or not 1 <= opt.new <= opt.length - PROMPT - WARM_UP:
        raise InputError(f"--rounds must be at least 1, and --new must be at most --length minus {PROMPT + WARM_UP}")
    settings = {k: getattr(opt, k) for k in ("model", "weights", "length", "new")}
    raw = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(opt.model, folder)
        job = dict(folder=name, out=str(folder / "rank"), **{k: settings[k] for k in ("weights", "length", "new")})
        for n, threads in tqdm([(1, 2), (2, 1)] * opt.rounds + [(4, 1)]):
            raw.append(run(n, threads, job))
    torch.set_num_threads(2)  # the threads of a run in total, for the record
    data = record("cpu", settings=settings, **summary(raw), raw=raw)
    if opt.out:
        write_json(opt.out, data)
    print(json.dumps(data) if opt.json else shown(data))


if __name__ == "__main__":
    run_cli(main)
