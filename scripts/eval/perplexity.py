"""Measures how a method changes the model's predictions. A context is prefilled and compressed; the rest of the text
comes through decode, teacher-forced.

    python -m scripts.eval.perplexity --method full sals-12.5 --length 1024 --decoded 64
    python -m scripts.eval.perplexity --checkpoint CKPT --method kivi snapkv --text book.txt --length 4096 --recall 4
    python -m scripts.eval.perplexity --transformers NAME --method kivi    # a model of transformers
    python -m scripts.eval.perplexity --method all --text code --windows 8 --out results/perplexity.json

--text is a UTF-8 file, or `prose` or `code` for held-out text of this machine. Windows of --length tokens are evenly
spaced in it, and the last --decoded tokens of each are predicted. The results, in total and by distance from the
prompt, are perplexity, the mean Kullback-Leibler divergence of the method's distribution from full's (nats), and how
often both have the same most likely token. --recall N adds the share of full's attention mass on the tokens that the
method attends to, by layer, between N equal parts of every window's decoded tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cache.trace import Trace, observe
from model import SILENT, ModelArgs
from runtime.errors import InputError, check_range, run_cli
from runtime.hub import add_checkpoint
from runtime.machine import read_text
from runtime.options import Parser
from scripts.eval.evaluation import Evaluation, add_flags, check_flags, names_of, open_evaluation
from scripts.shared.options import SPECS_BY_LAYER, checked, earlier, inputs, layers_of, precision
from scripts.shared.results import record, write_json

BINS = (1, 4, 16, 64, 256, 1024, 4096)  # distances from the prompt at which a bin begins
SUMS = ("nll", "kl", "same", "tokens")


def parser() -> Parser:
    p = Parser(__doc__)
    a = p.add_argument
    add_checkpoint(p)
    a("--method", nargs="+", default=["full"], help=f"{SPECS_BY_LAYER}; `all`: every method and preset")
    a("--text", default="prose", help="a UTF-8 file, or prose or code: held-out text of this machine")
    a("--length", dest="lengths", metavar="N", default="1024", help="tokens of a window")
    a("--decoded", type=int, default=256, help="how many of them, at the end, are predicted")
    a("--windows", type=int, default=4, help="the most windows; a short text has fewer")
    a("--batch-size", type=int, default=4, help="windows at a time")
    a("--recall", type=int, default=0, metavar="N", help="record attention between N equal parts of the decoded tokens")
    add_flags(p, questions=False)
    return p


def parse_args() -> argparse.Namespace:
    opt = check_flags(parser().parse_args())
    check_range("--decoded", opt.decoded, 1, opt.lengths[0] - 1, "the tokens before them are the context")
    check_range("--windows", min(opt.windows, opt.batch_size), 1, 10**6)
    check_range("--recall", opt.recall, 0, opt.decoded)
    if opt.recall == 1:
        raise InputError("--recall 1 has no step between its parts: give 2 or more")
    opt.method = checked(["full", *opt.method], layers_of(opt), True)
    return opt


def windows_of(ev: Evaluation, text: str, length: int, most: int) -> list[list[int]]:
    """Evenly spaced windows without overlap, each behind the token that begins a text, if the model has one. Raises
    InputError if the text is shorter than one window."""
    begin = ev.tk.encode("")
    ids = ev.texts[text].tolist() if text in ("prose", "code") else ev.tk.encode(read_text(text))
    ids, size = ids[len(begin) if ids[: len(begin)] == begin else 0 :], length - len(begin)
    n = min(most, len(ids) // size)
    if not n:
        there = len(begin) + len(ids)
        raise InputError(f"--text {text} has {there} tokens: give a longer one, or --length {there} or less")
    return [begin + ids[s : s + size] for s in torch.linspace(0, len(ids) - size, n).long().tolist()]


def seen(trace: Trace, args: ModelArgs, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """One step's attention by layer: weights by position [B, Hq, length], and which positions a head attends to."""
    group = args.n_head // args.n_kv_head
    weights, looked = [], []
    for steps in map(trace.layer, range(args.n_layer)):
        mass = torch.zeros(len(steps[0].weight), args.n_head, length)
        there = torch.zeros(len(mass), args.n_head, length + 1, dtype=torch.bool)
        for s in steps:  # one for each kind of heads in the layer
            heads = range(args.n_kv_head) if s.heads is None else s.heads
            own = torch.tensor([h * group + g for h in heads for g in range(group)])
            at = s.position.repeat_interleave(s.weight.shape[1] // s.position.shape[1], 1).cpu()
            mass[:, own] = s.mass(length).cpu()
            there[:, own] = there[:, own].scatter(2, torch.where((at >= 0) & (at < length), at, length), True)
        weights.append(mass)
        looked.append(there[..., :length])
    return weights, looked


@torch.inference_mode()
def predict(ev: Evaluation, windows: list[list[int]], decoded: int, recall: int) -> dict[str, dict[str, Any]]:
    """By method: each window's sums by bin of distance [windows, bins, 4] (SUMS), and the recall of every layer at each
    recorded step."""
    reference = next(iter(ev.caches))  # full, if it runs
    model, n, cut = ev.model, len(windows), len(windows[0]) - decoded
    ids = torch.tensor(windows, device=ev.device)
    first, lengths = ev.prefill([w[:cut] for w in windows])
    looks = {round(i * (decoded - 1) / max(1, recall)) for i in range(1, recall + 1)}
    known: dict[int, Tensor] = {}  # the reference's log-probabilities of every step [B, V]
    masses: dict[int, list[Tensor]] = {}
    out: dict[str, dict[str, Any]] = {}
    bar = tqdm(total=len(ev.caches) * decoded, desc="tokens", delay=SILENT, leave=False, disable=None)
    for label, cache in ev.caches.items():
        model.cache, logits, pos = cache, first[label], lengths.clone()
        sums, shares = torch.zeros(n, len(BINS), len(SUMS), dtype=torch.float64), []
        for i in range(decoded):
            bar.update()
            logp = F.log_softmax(logits.float(), -1)
            if label == reference:
                known[i] = logp.cpu()
            base = known[i].to(logp.device)
            token = ids[:, cut + i]
            nll, kl = -logp.gather(1, token[:, None])[:, 0], (base.exp() * (base - logp)).sum(-1)
            each = torch.stack([nll, kl, base.argmax(-1) == logp.argmax(-1), torch.ones_like(nll)], -1)
            sums[:, max(b for b, start in enumerate(BINS) if start <= i + 1)] += each.double().cpu()
            if i + 1 == decoded:
                break
            if i in looks:
                with observe(model) as trace:
                    logits = model.decode(token, pos)
                weights, looked = seen(trace, model.args, cut + i + 1)
                if label == reference:
                    masses[i] = weights
                shares.append([(m * there).sum(-1).mean().item() for m, there in zip(masses[i], looked, strict=True)])
            else:
                logits = model.decode(token, pos)
            pos = pos + 1
            model.maintain(i + 1)
        out[label] = dict(sums=sums.tolist(), recall=shares)
    for label in ev.noting():
        out[label]["read"] = ev.bytes(label, cut - 1)["read_share"]
    bar.close()
    return out


def summary(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over all windows, in total and by distance, and the sums of each window, for intervals."""
    sums = torch.cat([torch.tensor(p["sums"]) for p in parts])  # [windows, bins, 4]

    def means(row: Tensor) -> dict[str, float]:
        nll, kl, same, tokens = row.tolist()
        return dict(perplexity=round(math.exp(nll / tokens), 4), kl=round(max(0.0, kl / tokens), 5),
                    same_top=round(same / tokens, 4), tokens=int(tokens))  # fmt: skip

    out: dict[str, Any] = means(sums.sum((0, 1)))
    out["by_distance"] = {str(start): means(row) for start, row in zip(BINS, sums.sum(0), strict=True) if row[3]}
    out["windows"] = {k: [round(x, 4) for x in v] for k, v in zip(SUMS, sums.sum(1).T.tolist(), strict=True)}
    if noted := [p["read"] for p in parts if "read" in p]:
        out["read_share"] = round(mean(noted), 4)  # what steps read, not the most that they may
    looked = [step for p in parts for step in p["recall"]]
    if looked:
        out["recall_by_layer"] = [round(x, 4) for x in torch.tensor(looked).mean(0).tolist()]
        out["recall"] = round(torch.tensor(looked).mean().item(), 4)
    return out


def main() -> None:
    opt = parse_args()
    ev, ranks = open_evaluation(opt, opt.batch_size), opt.ranks
    if len(opt.lengths) > 1:
        raise InputError("--length takes one number here: run the command for each")
    (length,) = opt.lengths
    if length > (most := ev.model.args.context):
        raise InputError(f"--length {length} exceeds the model's context of {most}")
    with ranks.agreed():
        windows = windows_of(ev, opt.text, length, opt.windows)
    settings = {k: getattr(opt, k) for k in ("method", "text", "decoded", "windows", "batch_size", "recall")}
    settings |= dict(length=length) | precision(opt, ev.model) | inputs(opt, ev.model, tokens=windows)
    data = record(ev.device, **names_of(opt), settings=settings)
    resume = opt.resume and ranks.rank == 0
    old = earlier(opt.out, data, ("commit", "fingerprint", "settings"), ("parts",)) if resume else {}
    data["parts"] = ranks.all(old.get("parts", []))[0]  # results by method, for each batch of windows
    ev.setup({m: (m, {}) for m in opt.method}, length, opt.decoded)
    batches, done = (
        [windows[i : i + opt.batch_size] for i in range(0, len(windows), opt.batch_size)],
        len(data["parts"]),
    )
    parts = ranks.in_turns(batches[done:], lambda batch: predict(ev, batch, opt.decoded, opt.recall))
    for part in tqdm(parts, desc="windows", initial=done, total=len(batches)):
        data["parts"].append(part)
        if opt.out and ranks.rank == 0:
            write_json(opt.out, data)
    if ranks.rank:
        return
    data["rows"] = [
        dict(method=m, seq_len=length) | ev.bytes(m, length - opt.decoded - 1) | summary([p[m] for p in data["parts"]])
        for m in opt.method
    ]
    if opt.out:
        write_json(opt.out, data)
    if opt.json:
        print(json.dumps(data))
        return
    for r in data["rows"]:
        recall = f" recall {r['recall']:.3f}" if "recall" in r else ""
        print(f"{r['method']}: perplexity {r['perplexity']:.3f} KL {r['kl']:.4f} same top {100 * r['same_top']:.1f} % "
              f"held {r['kv_share']:.3f} read {r['read_share']:.3f}{recall}")  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
