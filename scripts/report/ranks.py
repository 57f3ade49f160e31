"""What sharing a model costs on this machine's CPU: the memory of each rank, and the speed beside one process.

    python -m scripts.report.ranks --out ranks.json
    python -m scripts.report.ranks --model llama-3.2-1b --weights int4 --length 2048 --new 24 --rounds 3

A checkpoint of the model's shapes, random numbers in bf16, is written to a temporary folder. All load it packed in
--weights, set up a cache of --length tokens, and decode --new tokens greedily behind a prompt of 16: 1 process on 2
threads and 2 ranks on a thread each, in turns, round by round; then 4 ranks, for the memory alone. The ratio of speeds
is that of the medians of a round's steps, which says what gloo's sums cost, since the cores are the same.

Memory is that of the process alone (RssAnon, looked at every millisecond; a mapped file's pages are the system's),
beyond what it has when torch and what a model takes of it are imported and the ranks have met; `expected` is what the
rank has to hold: its share of the weights, what is replicated, its cache.
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

from checkpoint import load_checkpoint, random_transformer, save_checkpoint_tensors
from errors import InputError, Parser, run_cli
from model import NAMED, ModelArgs, Transformer, empty_transformer
from parallel import start
from runtime import ROOT, set_threads
from scripts.report.markdown import runs, sources, table
from scripts.shared.results import check_out, record, write_json
from weights import WeightFormat

PROMPT, WARM_UP = 16, 4  # tokens; steps that do not count


# ---- one rank ----


def private_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


class Peak:
    """The most private bytes while it is looked at."""

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
    """Bytes of its tensors, each once."""
    tensors = {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())


@torch.inference_mode()
def steps(model: Transformer, n: int) -> list[float]:
    """Seconds of n greedy steps, behind a prompt and those that warm up."""
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
    """Writes OUT.RANK."""
    set_threads(job["threads"])
    ranks, device = start("cpu")
    empty_transformer(ModelArgs(n_layer=1), "meta", torch.float32)  # imports 33 MiB of modules, which are no model's
    before = private_bytes()
    with Peak() as loading:
        model = load_checkpoint(
            job["folder"], device or "cpu", torch.float32, WeightFormat.parse(job["weights"]), ranks
        )
    weights, replicated = held(model), held(model.tok_embeddings)
    with Peak() as all_of_it:
        model.setup("full", 1, job["length"], None, {})
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
        raise InputError(f"--model {name} is no Llama: give another one")
    config = dict(model_type="llama", hidden_size=a.dim, num_hidden_layers=a.n_layer, num_attention_heads=a.n_head,
                  num_key_value_heads=a.n_kv_head, head_dim=a.head_dim, intermediate_size=a.ffn_dim,
                  vocab_size=a.vocab_size, max_position_embeddings=a.max_seq_len, rms_norm_eps=a.norm_eps,
                  rope_theta=a.rope.theta, tie_word_embeddings=a.tie_embeddings, torch_dtype="bfloat16")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    model = random_transformer(a, "cpu", torch.bfloat16)
    save_file(save_checkpoint_tensors(model, torch.bfloat16), folder / "model.safetensors", metadata={"format": "pt"})


def run(n: int, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    """n ranks of so many threads -> what each says."""
    alone = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
    argv = [*alone, "-m", "scripts.report.ranks", "--work", json.dumps(job | dict(threads=threads))]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise InputError(f"{n} ranks failed: {done.stderr.strip()[-300:]}")
    each = [json.loads(Path(f"{job['out']}.{rank}").read_text()) for rank in range(n)]
    return dict(ranks=n, threads=threads, each=each)


def summary(raw: list[dict[str, Any]]) -> dict[str, Any]:
    """By number of ranks: of the fullest rank the largest peak over what is expected; and the ratio of speeds."""
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
    """ranks.json."""
    return "\n\n".join([*(shown(run) for run in runs("ranks")), sources("ranks", root="../results/")])


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--model", default="llama-3.2-1b", choices=sorted(NAMED), help="shapes, of a Llama")
    a("--weights", default="int4", metavar="W", help="int8, int4; with a group: int4:64")
    a("--length", type=int, default=2048, help="tokens of the cache")
    a("--new", type=int, default=24, help="steps that are timed")
    a("--rounds", type=int, default=3)
    a("--work", metavar="JSON", help="what this script calls itself with: be one rank")
    a("--out", help="result file, e.g. ranks.json")
    a("--json", action="store_true", help="print the result object")
    opt = p.parse_args()
    if opt.work:
        work(json.loads(opt.work))
        return
    check_out(opt.out)
    WeightFormat.parse(opt.weights)
    if opt.rounds < 1 or not 1 <= opt.new <= opt.length - PROMPT - WARM_UP:
        raise InputError(f"--rounds must be at least 1, --new fit in --length with {PROMPT + WARM_UP} tokens more")
    settings = {k: getattr(opt, k) for k in ("model", "weights", "length", "new")}
    raw = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(opt.model, folder)
        job = dict(folder=name, out=str(folder / "rank"), **{k: settings[k] for k in ("weights", "length", "new")})
        for n, threads in tqdm([(1, 2), (2, 1)] * opt.rounds + [(4, 1)]):
            raw.append(run(n, threads, job))
    torch.set_num_threads(2)  # of each run in all
    data = record("cpu", settings=settings, **summary(raw), raw=raw)
    if opt.out:
        write_json(opt.out, data)
    print(json.dumps(data) if opt.json else shown(data))


if __name__ == "__main__":
    run_cli(main)
