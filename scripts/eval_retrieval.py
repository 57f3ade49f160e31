"""Retrieval and perplexity of a checkpoint under any KV-cache method.

    python scripts/eval_retrieval.py                                   # the shipped model, full cache
    python scripts/eval_retrieval.py --method full self_index --lengths 1024,2048 --samples 50
    python scripts/eval_retrieval.py --tasks perplexity --out results/perplexity.json

Tasks: needle (one plain statement in a haystack of held-out text), needle4 (four of them, one asked), ruler (one, in
RULER's wording), ruler4, repeats (random tokens twice; predicted on the second copy), perplexity (held-out code and
prose). Keys are made of words that training never saw, values are fresh digits.

The default is query-agnostic: the context is prefilled and compressed, then the question comes through decode, so no
method knows it when it compresses. --query-in-prompt prefills context and question together.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from errors import InputError, run_cli  # noqa: E402
from generate import TINY, kv_bytes, kv_bytes_full, pad, pick_device  # noqa: E402
from model import load_checkpoint  # noqa: E402
from scripts.corpus import collect  # noqa: E402
from scripts.results import record, write_json  # noqa: E402
from scripts.tasks import FIRST_PLAIN_ID, PLAIN, RULER, Tasks  # noqa: E402
from tokenizer import load_tokenizer  # noqa: E402

NEEDLES = dict(needle=dict(n=1, fmt=PLAIN), needle4=dict(n=4, fmt=PLAIN),
               ruler=dict(n=1, fmt=RULER), ruler4=dict(n=4, fmt=RULER))  # fmt: skip
WORDS = Path(__file__).resolve().parent.parent / "models" / "tiny" / "words.json"


class Evaluation:
    def __init__(self, checkpoint: Path, device: torch.device, batch: int, query_in_prompt: bool, seed: int):
        self.model = load_checkpoint(checkpoint, device)
        self.tk = load_tokenizer(checkpoint)
        self.device, self.batch, self.query_in_prompt, self.seed = device, batch, query_in_prompt, seed
        docs = [d for d in collect(only_held_out=True) if d.held_out]
        self.texts = {
            kind: np.array([i for d in docs if d.kind == kind for i in self.tk.encode(d.text, bos=True)])
            for kind in ("code", "prose")
        }
        self.words = json.loads(WORDS.read_text())["held_out"]

    def tasks(self, *seed: int) -> Tasks:
        return Tasks(self.tk, list(self.texts.values()), [0.5, 0.5], self.words, [self.seed, *seed])

    @torch.inference_mode()
    def run_rows(self, prompts: list[list[int]], forced: list[list[int]], n_new: int) -> tuple[list[list[int]], float]:
        """Prefill, feed each row its `forced` tokens through decode, then n_new greedy tokens.

        Returns the argmax after each of forced[:-1] and the greedy tokens that follow, and the sum of the forced
        tokens' log-probabilities. Rows may have prompts and forced parts of different lengths.
        """
        model, B = self.model, len(prompts)
        tokens, lengths = pad(prompts, self.device)
        logits = model.prefill(tokens, lengths)
        out: list[list[int]] = [[] for _ in range(B)]
        logp, pos = 0.0, lengths
        for step in range(max(map(len, forced)) + n_new):
            best = logits.argmax(-1)
            given = [f[step] if step < len(f) else None for f in forced]
            known = [b for b, g in enumerate(given) if g is not None]
            if known:
                picked = torch.tensor([given[b] for b in known], device=self.device)
                logp += F.log_softmax(logits[known].float(), -1).gather(1, picked[:, None]).sum().item()
            host = best.tolist()
            for b in range(B):
                out[b].append(host[b])
            nxt = torch.tensor([h if g is None else g for h, g in zip(host, given, strict=True)], device=self.device)
            logits = model.decode(nxt, pos)
            pos = pos + 1
            model.maintain(step + 1)
        return out, logp

    def setup(self, method: str, knobs: dict, size: int) -> dict[str, float]:
        self.model.setup_cache(method, self.batch, size, **knobs)
        used, dense = kv_bytes(self.model), kv_bytes_full(self.model, self.batch, size)
        return dict(kv_bytes=used, kv_share=round(used / dense, 4))

    def needles(self, name: str, T: int, samples: int) -> list[int]:
        """1 for each sample whose whole value is generated, else 0; depths are spread evenly for single needles."""
        kw, hits = NEEDLES[name], []
        for first in tqdm(range(0, samples, self.batch), desc=f"{name} {T}", leave=False):
            cases = []
            for i in range(first, min(first + self.batch, samples)):
                depth = (i + 0.5) / samples if kw["n"] == 1 else None
                case = self.tasks(T, i, list(NEEDLES).index(name)).needle_case(T, depth=depth, digits_only=True, **kw)
                if case is None:
                    raise InputError(f"a length of {T} has no room for the needles of {name}")
                cases.append((case[0].ids, self.tk.encode("\n", bos=False) + case[1][0].query, case[1][0].value))
            if self.query_in_prompt:
                prompts, forced = [c + q for c, q, _ in cases], [[] for _ in cases]
            else:
                prompts, forced = [c for c, _, _ in cases], [q for _, q, _ in cases]
            out, _ = self.run_rows(prompts, forced, max(len(v) for *_, v in cases))
            for row, f, (_, _, value) in zip(out, forced, cases, strict=True):
                hits.append(int(row[len(f) : len(f) + len(value)] == value))
        return hits

    def repeats(self, T: int, samples: int) -> list[float]:
        """Share of a random second copy predicted, for copies of T / 2 tokens; its first token cannot be."""
        shares = []
        for first in tqdm(range(0, samples, self.batch), desc=f"repeats {T}", leave=False):
            rows = range(first, min(first + self.batch, samples))
            copies = [
                self.tasks(T, i).rng.integers(FIRST_PLAIN_ID, self.tk.vocab_size, T // 2 - 1).tolist() for i in rows
            ]
            bos = [self.tk.bos_id] if self.tk.bos_id is not None else []
            out, _ = self.run_rows([bos + c for c in copies], copies, 0)
            shares += [float(np.mean(np.array(o[1:]) == np.array(c[1:]))) for o, c in zip(out, copies, strict=True)]
        return shares

    def perplexity(self, T: int, samples: int) -> dict[str, float]:
        """Of the second half of windows of T tokens, fed through decode after the first half was compressed."""
        out = {}
        for kind, ids in self.texts.items():
            n = max(1, min(samples, (len(ids) - 1) // T))
            starts = np.linspace(0, len(ids) - T, n).astype(int)
            logp = count = 0.0
            for first in tqdm(range(0, n, self.batch), desc=f"perplexity {kind} {T}", leave=False):
                rows = [ids[s : s + T].tolist() for s in starts[first : first + self.batch]]
                _, lp = self.run_rows([r[: T // 2] for r in rows], [r[T // 2 :] for r in rows], 0)
                logp, count = logp + lp, count + len(rows) * (T - T // 2)
            out[f"perplexity_{kind}"] = round(math.exp(-logp / count), 3)
        return out


def evaluate(ev: Evaluation, method: str, knobs: dict, tasks: list[str], T: int, samples: int) -> dict:
    """One row of the table: a method at a length."""
    slack = 64 if set(tasks) & set(NEEDLES) else 8
    row: dict = dict(method=method, knobs=knobs, seq_len=T, samples=samples, query_in_prompt=ev.query_in_prompt)
    row |= ev.setup(method, knobs, T + slack)
    for task in tasks:
        if task in NEEDLES:
            hits = ev.needles(task, T, samples)
            row |= {task: round(float(np.mean(hits)), 4), f"{task}_hits": hits}
        elif task == "repeats":
            shares = ev.repeats(T, max(2, samples // 10))
            row |= {task: round(float(np.mean(shares)), 4), "repeats_shares": shares}
        else:
            row |= ev.perplexity(T, max(4, samples // 5))
    return row


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a = p.add_argument
    a("--checkpoint", default=str(TINY))
    a("--method", nargs="+", default=["full"], help="one or more methods, presets or per-layer specs")
    a("--method-arg", action="append", default=[], metavar="K=V", help="a knob, given to every method that has it")
    a("--lengths", default="512,1024,2048,4096")
    a("--tasks", default="needle,needle4,ruler,ruler4,repeats,perplexity")
    a("--samples", type=int, default=100)
    a("--batch-size", type=int, default=4)
    a("--seed", type=int, default=1)
    a("--query-in-prompt", action="store_true", help="the question is known when the context is compressed")
    a("--device")
    a("--threads", type=int, default=0, help="CPU threads, 0: all")
    a("--out", help="result file, e.g. results/retrieval.json")
    a("--json", action="store_true", help="print the result object")
    opt = p.parse_args()
    if opt.threads:
        torch.set_num_threads(opt.threads)
    tasks = opt.tasks.split(",")
    if unknown := set(tasks) - set(NEEDLES) - {"repeats", "perplexity"}:
        raise InputError(f"unknown task {sorted(unknown)[0]!r}: use {', '.join([*NEEDLES, 'repeats', 'perplexity'])}")
    device = pick_device(opt.device)
    ev = Evaluation(Path(opt.checkpoint), device, opt.batch_size, opt.query_in_prompt, opt.seed)
    knobs = dict(item.split("=", 1) for item in opt.method_arg)
    rows = []
    for method in opt.method:
        own = {k: v for k, v in knobs.items() if takes(method, k)}
        for T in map(int, opt.lengths.split(",")):
            rows.append(evaluate(ev, method, own, tasks, T, opt.samples))
            data = record(device, checkpoint=Path(opt.checkpoint).name, rows=rows)
            if opt.out:
                write_json(opt.out, data)  # after every row: an interrupted run keeps what it has
            if not opt.json:
                shown = {k: v for k, v in rows[-1].items() if not isinstance(v, list)}
                print(" ".join(f"{k}={v}" for k, v in shown.items()), flush=True)
    if opt.json:
        print(json.dumps(data))


def takes(method: str, knob: str) -> bool:
    """Whether any layer's method of a spec has this knob."""
    from kv_methods import resolve

    names = [part.partition(":")[2] or part for part in method.split(",")]
    return any(knob in resolve(n)[0].Args.__dataclass_fields__ for n in names)


if __name__ == "__main__":
    run_cli(main)
