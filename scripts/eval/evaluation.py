"""Samples of the tasks through any KV-cache methods of one model: what eval_retrieval.py and its kin measure."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cache import evicting
from cache.base import KVMethod
from checkpoint import load_checkpoint
from corpus import collect
from engine import Sampling, Session, make_step, pad
from errors import InputError
from kernels.dense_attention import prefill_attention
from model import Transformer
from runtime import TINY, add_calibration, add_precision
from scripts.eval.tasks import FIRST_PLAIN_ID, PLAIN, RULER, Tasks
from tokenizer import load_tokenizer

NEEDLES = dict(needle=dict(n=1, fmt=PLAIN), needle4=dict(n=4, fmt=PLAIN),
               ruler=dict(n=1, fmt=RULER), ruler4=dict(n=4, fmt=RULER))  # fmt: skip
WORDS = TINY / "words.json"
NEW = 64  # tokens of a question and an answer, at most


class Shared(KVMethod):
    """One layer of several caches that are filled by the same exact prefill."""

    def __init__(self, members: list[KVMethod]):
        nn.Module.__init__(self)
        self.members, self.rope, self.shape = members, members[0].rope, members[0].shape

    def prefill(self, q, k, v, lengths, start=None):
        q_rot, k_rot = self.rope.rotate_prompt(q), self.rope.rotate_prompt(k)
        with once(evicting, "prefill_attention_mass"), once(evicting, "last_mass"):
            for m in self.members:
                m.store_prompt(q, k, q_rot, k_rot, v, lengths)
        return prefill_attention(q_rot, k_rot, v, self.shape.window, lengths)


@contextlib.contextmanager
def once(module: ModuleType, name: str) -> Iterator[None]:
    """A function of a module computes once what it is asked again of the same tensors: here, by all that evict."""
    compute, known = getattr(module, name), {}

    def look_up(*args, **kwargs):
        key = tuple(id(a) if isinstance(a, Tensor) else a for a in (*args, *kwargs.items()))
        if key not in known:
            known[key] = args, compute(*args, **kwargs)  # with what it was asked of: an id is of a tensor that lives
        return known[key][1]

    setattr(module, name, look_up)
    try:
        yield
    finally:
        setattr(module, name, compute)


@functools.cache
def held_out(checkpoint: Path) -> dict[str, np.ndarray]:
    """Tokens of the texts that training never saw, by kind."""
    tk, docs = load_tokenizer(checkpoint), [d for d in collect(only_held_out=True) if d.held_out]
    return {
        kind: np.array([i for d in docs if d.kind == kind for i in tk.encode(d.text, bos=True)])
        for kind in ("code", "prose")
    }


class Forced(Sampling):
    """Greedy decoding of rows that are given their first tokens, with what the model thought of these."""

    def __init__(self, tokens: list[list[int]], device: torch.device):
        super().__init__()
        self.left = deque(itertools.zip_longest(*tokens))  # of every step: a token of each row, or None
        self.device, self.logp = device, 0.0
        self.best: list[Tensor] = []  # the argmax of every step [B]

    def draw(self, logits: Tensor, pos: Tensor, *_: Tensor) -> Tensor:
        self.best.append(logits.argmax(-1))
        given = self.left.popleft() if self.left else ()
        known = [row for row, token in enumerate(given) if token is not None]
        if not known:
            return self.best[-1]
        tokens = torch.tensor([given[row] for row in known], device=self.device)
        self.logp += F.log_softmax(logits[known].float(), -1).gather(1, tokens[:, None]).sum().item()
        return self.best[-1].index_copy(0, torch.tensor(known, device=self.device), tokens)


class Evaluation:
    def __init__(self, checkpoint: Path, device: torch.device, batch: int, query_in_prompt: bool, seed: int,
                 model: Transformer | None = None):  # fmt: skip
        self.model = model or load_checkpoint(checkpoint, device)
        self.tk = load_tokenizer(checkpoint)
        self.device, self.batch, self.query_in_prompt, self.seed = device, batch, query_in_prompt, seed
        self.checkpoint = checkpoint

    @functools.cached_property
    def texts(self) -> dict[str, np.ndarray]:
        return held_out(self.checkpoint)

    @functools.cached_property
    def words(self) -> list[str]:
        return json.loads(WORDS.read_text())["held_out"]

    def tasks(self, *seed: int) -> Tasks:
        return Tasks(self.tk, list(self.texts.values()), [0.5, 0.5], self.words, [self.seed, *seed])

    def prefill(self, prompts: list[list[int]]) -> tuple[dict[str, Tensor], Tensor]:
        """Fill every cache with the prompts -> the last token's logits by method, and the lengths [B]."""
        tokens, lengths = pad(prompts, self.device)
        exact = [n for n, c in self.caches.items() if all(m.exact_prefill for m in c)]
        logits = {}
        if exact:
            self.model.cache = nn.ModuleList(
                Shared([m for m in same]) for same in zip(*(self.caches[n] for n in exact), strict=True)
            )
            logits = dict.fromkeys(exact, self.model.prefill(tokens, lengths))
        for name in self.caches.keys() - set(exact):
            self.model.cache = self.caches[name]
            logits[name] = self.model.prefill(tokens, lengths)
        return logits, lengths

    @torch.inference_mode()
    def run_rows(
        self, prompts: list[list[int]], forced: list[list[int]], n_new: int
    ) -> dict[str, tuple[list[list[int]], float]]:
        """Prefill, feed each row its `forced` tokens through decode, then n_new greedy tokens; for each method:

        the argmax after each of forced[:-1] and the greedy tokens that follow, and the sum of the forced tokens'
        log-probabilities. Rows may have prompts and forced parts of different lengths.
        """
        for cache in self.caches.values():
            for m in cache:
                m.reset()
        first, lengths = self.prefill(prompts)
        results = {}
        for name, cache in self.caches.items():
            self.model.cache = cache
            results[name] = self.decode(first[name], lengths, forced, n_new)
        return results

    def decode(self, logits: Tensor, pos: Tensor, forced: list[list[int]], n_new: int) -> tuple[list[list[int]], float]:
        """By the cache in use, after a prefill that ended in logits at pos [B]; returns what `run_rows` does."""
        scored, steps = Forced(forced, self.device), max(map(len, forced)) + n_new
        session = Session(self.model, make_step(self.model, scored, compile=False), scored)
        session.begin(scored.draw(logits, pos - 1), pos)
        for _ in session.rows(steps):
            pass
        return torch.stack(scored.best, 1).tolist(), scored.logp

    def setup(self, methods: dict[str, tuple[str, dict]], size: int, new: int | None = None) -> None:
        """Caches of `size` tokens a row, of which at most `new` are decoded, for every label: (method, knobs)."""
        self.caches, self.size = {}, size
        for label, (method, knobs) in methods.items():
            self.model.setup(method, self.batch, size, new, knobs)
            self.caches[label] = self.model.cache

    def bytes(self, label: str, pos: int) -> dict[str, float]:
        """Of a cache: bytes, their share of full's, and of the bytes that one step reads at `pos`."""
        self.model.cache = self.caches[label]
        used, dense = self.model.kv_bytes(), self.model.kv_bytes_full(self.batch, self.size)
        s = self.caches[label][0].shape
        read = sum(m.traffic(pos) for m in self.model.cache)
        whole = 2 * s.max_batch * s.n_kv_head * (pos + 1) * s.head_dim * s.dtype.itemsize * len(self.model.cache)
        return dict(kv_bytes=used, kv_share=round(used / dense, 4), read_share=round(read / whole, 4))

    def batches(self, task: str, T: int, samples: int, done: int, decoded: int) -> Iterator[dict[str, list[float]]]:
        """The samples of a task from `done` on, a batch at a time: by method, a number from 0 to 1 for each sample."""
        steps = range(done, samples, self.batch)
        what = dict(desc=f"{task} {T}", initial=done // self.batch, total=-(-samples // self.batch), leave=False)
        if task == "repeats":
            yield from (self.repeats(T, rows_of(i, self.batch, samples), decoded) for i in tqdm(steps, **what))
        else:
            # in a random order: what an interruption leaves is of all depths
            order = np.random.default_rng(0).permutation(samples)
            rows = (order[i : i + self.batch].tolist() for i in steps)
            yield from (self.needles(task, T, r, samples) for r in tqdm(rows, **what))

    def needles(self, name: str, T: int, rows: list[int], samples: int) -> dict[str, list[float]]:
        """By method, 1 for each sample whose whole value is generated, else 0; single needles at even depths."""
        cases = [self.case(name, T, i, samples) for i in rows]
        forced: list[list[int]]
        if self.query_in_prompt:
            prompts, forced = [c + q for c, q, _ in cases], [[] for _ in cases]
        else:
            prompts, forced = [c for c, _, _ in cases], [q for _, q, _ in cases]
        results = self.run_rows(prompts, forced, max(len(v) for *_, v in cases))
        return {
            label: [
                float(row[len(f) : len(f) + len(v)] == v) for row, f, (*_, v) in zip(out, forced, cases, strict=True)
            ]
            for label, (out, _) in results.items()
        }

    def case(self, name: str, T: int, i: int, samples: int) -> tuple[list[int], list[int], list[int]]:
        """Sample i of a task: context, question, answer."""
        tasks = self.tasks(T, i, [*NEEDLES, "key_value"].index(name))
        if name == "key_value":
            context, asked = tasks.key_value_case(T)
            return context.ids, asked.query, asked.value
        kw = NEEDLES[name]
        depth = (i + 0.5) / samples if kw["n"] == 1 else None
        made = tasks.needle_case(T, depth=depth, digits_only=True, **kw)
        if made is None:
            raise InputError(f"a length of {T} has no room for the needles of {name}")
        return made[0].ids, self.tk.encode("\n", bos=False) + made[1][0].query, made[1][0].value

    def repeats(self, T: int, rows: range, decoded: int) -> dict[str, list[float]]:
        """By method, the share predicted of a second copy of T / 2 random tokens, or of its first `decoded` tokens."""
        copies = [self.tasks(T, i).rng.integers(FIRST_PLAIN_ID, self.tk.vocab_size, T // 2 - 1).tolist() for i in rows]
        bos = self.tk.encode("", bos=True)
        second = [c[:decoded] for c in copies]
        results = self.run_rows([bos + c for c in copies], second, 0)
        # that there is a second copy shows from its first token, which cannot be predicted
        return {
            label: [float(np.mean(np.array(o[1:]) == np.array(c[1:]))) for o, c in zip(out, second, strict=True)]
            for label, (out, _) in results.items()
        }

    def perplexity(self, T: int, samples: int, decoded: int) -> dict[str, dict[str, float]]:
        """By method, of the last `decoded` tokens, at most half, of windows of T: what stands before is compressed."""
        out: dict[str, dict[str, float]] = {label: {} for label in self.caches}
        for kind, ids in self.texts.items():
            n = max(1, min(samples, (len(ids) - 1) // T))
            starts = np.linspace(0, len(ids) - T, n).astype(int)
            logp, count, cut = dict.fromkeys(self.caches, 0.0), 0, T - min(decoded, T // 2)
            for first in tqdm(range(0, n, self.batch), desc=f"perplexity {kind} {T}", leave=False):
                rows = [ids[s : s + T].tolist() for s in starts[first : first + self.batch]]
                count += len(rows) * (T - cut)
                for label, (_, lp) in self.run_rows([r[:cut] for r in rows], [r[cut:] for r in rows], 0).items():
                    logp[label] += lp
            for label in self.caches:
                out[label][f"perplexity_{kind}"] = round(math.exp(-logp[label] / count), 3)
        return out


def rows_of(first: int, batch: int, samples: int) -> range:
    return range(first, min(first + batch, samples))


def evaluate(
    ev: Evaluation,
    methods: dict[str, tuple[str, dict]],
    tasks: list[str],
    T: int,
    opt: argparse.Namespace,
    rows: dict[str, dict],
    save: Callable[[], None],
) -> None:
    """Fill the rows of the table at one length, one per method; `save` is called after every batch of samples.

    rows: by method, what an earlier run has measured; nothing of it is measured again.
    """
    asks = {*NEEDLES, "key_value"}
    ev.setup(methods, T + (NEW if asks & set(tasks) else 8), NEW if asks >= set(tasks) else None)
    for label, (name, knobs) in methods.items():
        given = dict(samples=opt.samples, text_samples=opt.text_samples, query_in_prompt=ev.query_in_prompt)
        rows[label] = dict(method=name, knobs=knobs, seq_len=T, **given) | ev.bytes(label, T - 1) | rows.get(label, {})
    for task in tasks:
        if task == "perplexity":
            if not all("perplexity_prose" in row for row in rows.values()):
                for label, numbers in ev.perplexity(T, opt.text_samples, opt.decoded).items():
                    rows[label] |= numbers
                save()
            continue
        each = {label: row.setdefault(f"{task}_each", []) for label, row in rows.items()}
        done = min(map(len, each.values()))
        for values in each.values():
            del values[done:]
        for part in ev.batches(task, T, opt.text_samples if task == "repeats" else opt.samples, done, opt.decoded):
            for label, values in part.items():
                each[label] += values
                rows[label][task] = round(float(np.mean(each[label])), 4)
            save()


def parse_flags(p: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """What evaluations take beside their own flags, of which one is --lengths; that becomes a list of numbers."""
    a = p.add_argument
    a("--seed", type=int, default=1)
    a("--query-in-prompt", action="store_true", help="the question is known when the context is compressed")
    a("--device")
    add_precision(p)
    add_calibration(p)
    a("--threads", type=int, help="CPU threads, default: torch's choice")
    a("--resume", action="store_true", help="go on with what --out has: samples that are there are not run again")
    a("--out", help=f"result file, e.g. {name}.json; written after every batch")
    a("--json", action="store_true", help="print the result object")
    opt = p.parse_args()
    if opt.resume and not opt.out:
        raise InputError("--resume needs --out, the file to go on with")
    try:
        opt.lengths = [int(n) for n in opt.lengths.split(",")]
    except ValueError:
        raise InputError(f"--lengths {opt.lengths} is not a list such as 512,1024") from None
    return opt
