"""Measures what quantizing the weights costs under any methods: perplexity, needles, and unchanged greedy tokens.

    python -m scripts.eval.weights_quality                                       # the shipped model
    python -m scripts.eval.weights_quality --weights fp32 int8 int4 int4:128 --method full self_index --samples 50
    python -m scripts.eval.weights_quality --out weights.json
    torchrun --nproc-per-node 8 -m scripts.eval.weights_quality --parallel data --out weights.json

All weights are compared to the first ones under the same method. `greedy_agreement` is the share of the `--new` tokens
after each prompt that come before the first different one. `logits_off` is the standard deviation of the difference of
logits over that of the logits (no cache, one text). Samples are those of compare.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from cache.spec import layer_methods
from loading.checkpoint import load_checkpoint, read_args
from loading.tokenizer.turns import ChatParts
from runtime.errors import InputError, Parser, run_cli
from runtime.machine import TINY, add_calibration, pick_device, set_threads
from runtime.parallel import Ranks
from scripts.eval.evaluation import Evaluation, add_parallel, contexts, join
from scripts.eval.perplexity import predict, summary, windows_of
from scripts.eval.samples import rows_of
from scripts.shared.options import SPECS_BY_LAYER, expand
from scripts.shared.results import check_out, record, write_json
from weights import WeightFormat

Found = TypeVar("Found")


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder or GGUF file")
    a(
        "--weights",
        nargs="+",
        default=["fp32", "int8", "int4"],
        help="formats as in generate.py; all are compared to the first one",
    )
    a("--method", nargs="+", default=["full", "self_index", "sals"], help=f"{SPECS_BY_LAYER}; `all`: every one")
    a("--length", type=int, default=1024, help="tokens of a needle's context, and of a text")
    a("--samples", type=int, default=100, help="number of needles")
    a("--texts", type=int, default=10, help="texts of each kind for perplexity, and prompts to continue")
    a("--new", type=int, default=64, help="tokens to generate, and tokens that perplexity is measured on")
    a("--batch-size", type=int, default=10, help="samples that run at a time; default: 10")
    a("--seed", type=int, default=1, help="seed of the samples; default: 1")
    a("--device", help="cpu, cuda, cuda:1 ...; default: a GPU if there is one")
    add_calibration(p)
    a("--threads", type=int, help="CPU threads, default: torch's choice")
    add_parallel(p)
    a("--out", help="result file, e.g. weights.json; written after every kind of weights")
    a("--json", action="store_true", help="print the result object")
    opt = p.parse_args()
    join(opt)
    if min(opt.samples, opt.texts, opt.batch_size) < 1 or opt.new < 2:
        raise InputError("--samples, --texts and --batch-size must be at least 1, --new at least 2")
    args = read_args(opt.checkpoint)
    if not 64 <= opt.length <= args.max_seq_len:
        raise InputError(f"--length {opt.length} is not between 64 and the {args.max_seq_len} tokens of this model")
    for weights in opt.weights:
        WeightFormat.parse(weights)
    opt.method = expand(opt.method, True)
    for spec in opt.method:
        layer_methods(spec, args.n_layer)  # a wrong name or knob ends the run before it starts
    check_out(opt.out)
    set_threads(opt.threads)
    return opt


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens before the first different one, over all rows."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(ours, theirs, strict=True)
    ]
    return sum(same) / sum(map(len, ours))


def shared(what: str, samples: list, batch: int, ranks: Ranks, work: Callable[[Any], Found]) -> Iterator[Found]:
    """The results of `work` on each batch of samples, in their order; ranks share the batches."""
    batches = [samples[i : i + batch] for i in range(0, len(samples), batch)]
    yield from tqdm(ranks.in_turns(batches, work), desc=what, total=len(batches), leave=False)


def measure(ev: Evaluation, opt: argparse.Namespace, firsts: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    """One row per method for the model's weights. firsts: the first weights' tokens by method, filled in if missing."""
    T, new = opt.length, opt.new
    ev.setup({m: (m, {}) for m in opt.method}, T + max(64, new))
    needles: dict[str, list[float]] = {m: [] for m in opt.method}
    asked = contexts(list(rows_of(ev, "needle", T, opt.samples, opt, 0)), ev.tk, ChatParts(), False, False)
    for scores in shared("needles", asked, ev.batch, opt.ranks, lambda batch: [(m, s) for m, *_, s in ev.ask(batch)]):
        for m, score in scores:
            needles[m].append(score)
    perplexity: dict[str, dict[str, float]] = {m: {} for m in opt.method}
    for kind in ev.texts:
        windows, decoded = windows_of(ev, kind, T, opt.texts), min(new, T // 2)
        predicted = partial(predict, ev, decoded=decoded, recall=0)
        parts = list(shared(f"perplexity of {kind}", windows, ev.batch, opt.ranks, predicted))
        for m in opt.method:
            perplexity[m][f"perplexity_{kind}"] = round(summary([p[m] for p in parts])["perplexity"], 3)
    prompts = [
        ids[i * T : i * T + T].tolist() for ids in ev.texts.values() for i in range(min(opt.texts, len(ids) // T))
    ]
    tokens: dict[str, list[list[int]]] = {m: [] for m in opt.method}
    for outs in shared("greedy", prompts, ev.batch, opt.ranks, lambda rows: ev.run_rows(rows, [[] for _ in rows], new)):
        for m, out in outs.items():
            tokens[m] += out
    first = {m: firsts.setdefault(m, tokens[m]) for m in opt.method}
    return [
        dict(method=m, needle=round(sum(needles[m]) / len(needles[m]), 4), needle_each=needles[m], **perplexity[m],
             greedy_agreement=round(agreement(tokens[m], first[m]), 4), prompts=len(prompts))
        for m in opt.method
    ]  # fmt: skip


@torch.inference_mode()
def logits_of(ev: Evaluation, T: int) -> Tensor:
    return ev.model(torch.tensor(ev.texts["prose"][None, :T], device=ev.device))[0].float()


def main() -> None:
    opt = parse_args()
    ranks, device = opt.ranks, pick_device(opt.device)
    settings = {k: getattr(opt, k) for k in ("length", "samples", "texts", "new", "batch_size", "seed")}
    data = record(device, checkpoint=Path(opt.checkpoint).name, settings=settings, rows=[])
    firsts: dict[str, list[list[int]]] = {}
    want = None
    for weights in opt.weights:
        with ranks.agreed():
            model = load_checkpoint(opt.checkpoint, device, torch.float32, WeightFormat.parse(weights))
            model.use_calibration(opt.calibration)
        ev = Evaluation(Path(opt.checkpoint), device, opt.batch_size, False, opt.seed, model)
        logits = logits_of(ev, opt.length)
        want = logits if want is None else want
        off = ((logits - want).std() / want.std()).item()
        rows = [dict(weights=weights, logits_off=round(off, 5), **row) for row in measure(ev, opt, firsts)]
        data["rows"] += rows
        if opt.out and ranks.rank == 0:
            write_json(opt.out, data)
        if not opt.json:
            for row in rows:
                print(" ".join(f"{k}={v}" for k, v in row.items() if not isinstance(v, list)), flush=True)
    if opt.json:
        print(json.dumps(data))


if __name__ == "__main__":
    run_cli(main)
