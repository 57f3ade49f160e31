"""Retrieval and perplexity of a checkpoint under any KV-cache methods, side by side on the same samples.

    python -m scripts.eval.eval_retrieval                                   # the shipped model, full cache
    python -m scripts.eval.eval_retrieval --method full self_index --lengths 1024,2048 --samples 50
    python -m scripts.eval.eval_retrieval --method all --out results/methods.json         # every method and preset
    python -m scripts.eval.eval_retrieval --tasks perplexity --out results/perplexity.json

Tasks: needle (one plain statement in a haystack of held-out text), needle4 (four of them, one asked), ruler (one, in
RULER's wording), ruler4, key_value (nothing but `"key": value` lines, one asked), repeats (random tokens twice;
predicted on the second copy), perplexity (held-out code and prose). Keys are made of words that training never saw,
values are fresh digits.

The default is query-agnostic: the context is prefilled and compressed, then the question comes through decode, so no
method knows it when it compresses. --query-in-prompt prefills context and question together.

Prompts are prefilled once for all methods whose prefill is exact attention; the others prefill for themselves. Samples
come in a random order and --out is written after every batch: Ctrl-C keeps what is done, --resume goes on with it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cache.spec import layer_methods
from checkpoint import read_args
from errors import InputError, Parser, run_cli
from runtime import TINY, pick_device, set_threads
from scripts.eval.evaluation import NEEDLES, Evaluation, evaluate, parse_flags
from scripts.shared.options import (
    SPECS_BY_LAYER,
    earlier,
    expand,
    load_model,
    parse_knobs,
    precision,
    takes,
)
from scripts.shared.results import check_out, record, write_json
from weights import WeightFormat


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder or GGUF file")
    a("--method", nargs="+", default=["full"], help=f"{SPECS_BY_LAYER}; `all`: every method and preset")
    a("--method-arg", action="append", default=[], metavar="K=V", help="a knob, given to every method that has it")
    a("--lengths", default="512,1024,2048,4096")
    a("--tasks", default="needle,needle4,ruler,ruler4,repeats,perplexity")
    a("--samples", type=int, default=100, help="of every needle and key-value cell")
    a("--text-samples", type=int, default=10, help="sequences of repeats, and of perplexity for each kind of text")
    a("--decoded", type=int, default=512, help="at most this many tokens of a sequence go through decode")
    a("--batch-size", type=int, default=4)
    opt = parse_flags(p, "retrieval")
    opt.tasks, known = opt.tasks.split(","), [*NEEDLES, "key_value", "repeats", "perplexity"]
    if unknown := set(opt.tasks) - set(known):
        raise InputError(f"unknown task {sorted(unknown)[0]!r}: use {', '.join(known)}")
    if min(opt.samples, opt.text_samples, opt.batch_size) < 1 or opt.decoded < 2:
        raise InputError("--samples, --text-samples and --batch-size must be at least 1, --decoded at least 2")
    args = read_args(opt.checkpoint)
    if min(opt.lengths) < 32:
        raise InputError(f"--lengths {min(opt.lengths)} is below 32: there is no room for a task")
    check_out(opt.out)
    WeightFormat.parse(opt.weights, opt.head)
    knobs = parse_knobs(opt.method_arg)
    opt.method = {n: (n, {k: v for k, v in knobs.items() if takes(n, k)}) for n in expand(opt.method, True)}
    for spec, own in opt.method.values():
        layer_methods(spec, args.n_layer, own)  # a wrong name or knob ends the run before it starts
    if unused := knobs.keys() - {k for _, own in opt.method.values() for k in own}:
        raise InputError(f"--method-arg {min(unused)}: none of the methods has this knob")
    set_threads(opt.threads)
    return opt


SETTINGS = ("samples", "text_samples", "decoded", "seed", "batch_size")  # under which samples are the same ones


def main() -> None:
    opt = parse_args()
    device = pick_device(opt.device)
    opt.dtype = opt.dtype or "fp32"
    model = load_model(opt, device)
    settings = {k: getattr(opt, k) for k in SETTINGS} | precision(opt, model)
    data = record(device, checkpoint=Path(opt.checkpoint).name, settings=settings)
    old = earlier(opt.out, data, ("device", "commit", "checkpoint", "settings"), ("rows",)) if opt.resume else {}
    data["rows"] = kept = old.get("rows", [])
    ev = Evaluation(Path(opt.checkpoint), device, opt.batch_size, opt.query_in_prompt, opt.seed, model)
    for T in opt.lengths:
        same = (T, opt.query_in_prompt)
        mine = {label: r for label, (name, knobs) in opt.method.items() for r in kept
                if (r["method"], r["knobs"], r["seq_len"], r["query_in_prompt"]) == (name, knobs, *same)}  # fmt: skip
        others = [r for r in kept if r not in mine.values()]

        def save(others: list[dict] = others, mine: dict[str, dict] = mine) -> None:
            data["rows"] = others + list(mine.values())
            if opt.out:
                write_json(opt.out, data)

        evaluate(ev, opt.method, opt.tasks, T, opt, mine, save)
        save()
        kept = data["rows"]
        if not opt.json:
            for row in mine.values():
                print(" ".join(f"{k}={v}" for k, v in row.items() if not isinstance(v, list)), flush=True)
    if opt.json:
        print(json.dumps(data))


if __name__ == "__main__":
    run_cli(main)
