"""Ask rows of questions under any KV-cache methods of one model, with one prefill of a context for all methods."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from cache import evicting
from cache.base import KVMethod
from cache.calibration import fingerprint
from engine.decode import Session, make_step, pad
from engine.sampling import NO_TOKEN, Sampling
from engine.snapshot import Snapshot
from kernels.dense_attention import prefill_attention
from loading.checkpoint import load_checkpoint
from loading.tokenizer import load_tokenizer
from model import Transformer
from models.tiny.training.tasks import Tasks
from runtime.corpus import collect
from runtime.errors import InputError
from runtime.machine import TINY, pick_device, set_threads
from runtime.options import add_calibration, add_precision
from runtime.parallel import ONE, PATIENCE, start, started_by_torchrun
from scripts.eval.rows import Context, Row, score
from scripts.shared.options import add_run, check_out_of, load_model, parse_lengths
from weights import WeightFormat, open_checkpoint

WORDS = TINY / "words.json"


class Shared(KVMethod):
    """One layer of several caches, all filled by the same exact prefill."""

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
    """Caches a function of a module on the same tensors: here, for all methods that evict."""
    compute, known = getattr(module, name), {}

    def look_up(*args, **kwargs):
        key = tuple(id(a) if isinstance(a, Tensor) else a for a in (*args, *kwargs.items()))
        if key not in known:
            known[key] = args, compute(*args, **kwargs)  # keeps args alive, so that their ids stay unique
        return known[key][1]

    setattr(module, name, look_up)
    try:
        yield
    finally:
        setattr(module, name, compute)


@functools.cache
def held_out(checkpoint: Path) -> dict[str, np.ndarray]:
    """Tokens of the texts held out from training, by kind."""
    tk, docs = load_tokenizer(checkpoint), [d for d in collect(only_held_out=True) if d.held_out]
    return {
        kind: np.array([i for d in docs if d.kind == kind for i in tk.encode(d.text, bos=True)])
        for kind in ("code", "prose")
    }


class Evaluation:
    def __init__(self, checkpoint: Path, device: torch.device, batch: int, query_in_prompt: bool, seed: int,
                 model: Transformer | None = None):  # fmt: skip
        self.model = model or load_checkpoint(checkpoint, device)
        self.tk = load_tokenizer(checkpoint)
        self.model.encode = functools.partial(self.tk.encode, bos=False)  # of methods that ask the model something
        self.device, self.batch, self.query_in_prompt, self.seed = device, batch, query_in_prompt, seed
        self.stops = self.tk.eos_ids | frozenset(self.model.args.eos_ids)
        self.checkpoint = checkpoint

    @functools.cached_property
    def texts(self) -> dict[str, np.ndarray]:
        return held_out(self.checkpoint)

    def text_hashes(self) -> list[str]:
        """Hashes of the held-out texts, which are of the packages that this machine has."""
        return [hashlib.sha256(ids.tobytes()).hexdigest() for ids in self.texts.values()]

    @functools.cached_property
    def words(self) -> list[str]:
        return json.loads(WORDS.read_text())["held_out"]

    def tasks(self, *seed: int) -> Tasks:
        return Tasks(self.tk, list(self.texts.values()), [0.5, 0.5], self.words, [self.seed, *seed])

    def setup(self, methods: dict[str, tuple[str, dict]], size: int, new: int | None = None) -> None:
        """Sets up a cache for every label -> (method, knobs): `size` tokens per row, at most `new` of them decoded."""
        self.caches, self.size = {}, size
        for label, (method, knobs) in methods.items():
            self.model.setup_cache(method, self.batch, size, new, **knobs)
            self.caches[label] = self.model.cache

    def noting(self) -> list[str]:
        """The labels of caches with a method that notes what its steps read, because it depends on data."""
        return [name for name, cache in self.caches.items()
                if any(isinstance(m, KVMethod) and m.notes_reads for m in cache.modules())]  # fmt: skip

    def bytes(self, label: str, pos: int) -> dict[str, float]:
        """A cache's bytes, their share of full's, and the share of full's bytes that one step reads at `pos`."""
        self.model.cache = self.caches[label]
        used, dense = self.model.kv_bytes(), self.model.kv_bytes_full(self.batch, self.size)
        read = sum(m.traffic(pos) for m in self.model.cache)
        whole = self.model.kv_bytes_full(self.batch, pos + 1)
        return dict(kv_bytes=used, kv_share=round(used / dense, 4), read_share=round(read / whole, 4))

    def prefill(self, prompts: list[list[int]]) -> tuple[dict[str, Tensor], Tensor]:
        """Fill every cache with the prompts -> the last token's logits by method, and the lengths [B]."""
        tokens, lengths = pad(prompts, self.device)
        for cache in self.caches.values():
            for m in cache:
                m.reset()
            for rope in {m.rope for m in cache}:  # the tables of dynamic NTK depend on it
                rope.set_prompt(lengths)
        exact: dict[object, list[str]] = {}  # by what they get: rotated keys, or those before rotation
        for name, cache in self.caches.items():
            if all(m.exact_prefill for m in cache):
                exact.setdefault(tuple(m.rope.of for m in cache), []).append(name)
        logits: dict[str, Tensor] = {}
        for names in exact.values():
            self.model.cache = nn.ModuleList(
                Shared([m for m in same]) for same in zip(*(self.caches[n] for n in names), strict=True)
            )
            logits |= dict.fromkeys(names, self.model.prefill(tokens, lengths))
        for name in self.caches.keys() - logits.keys():
            self.model.cache = self.caches[name]
            logits[name] = self.model.prefill(tokens, lengths)
        return logits, lengths

    @torch.inference_mode()
    def decode(self, logits: Tensor, pos: Tensor, forced: list[list[int]], n_new: list[int],
               stops: frozenset[int] = frozenset()) -> list[list[int]]:  # fmt: skip
        """Decodes with the current cache, after a prefill that ended in logits [B, V] at pos [B]: feeds each row its
        `forced` tokens, then continues greedily for n_new tokens or up to a stop. Returns for each row the argmax after
        the prompt and after every forced token but the last, then its greedy tokens."""
        greedy, out = Sampling(), [list[int]() for _ in forced]
        session = Session(self.model, make_step(self.model, greedy, compile=False), greedy)
        session.begin(logits.argmax(-1), pos)
        done = [len(f) + n == 0 for f, n in zip(forced, n_new, strict=True)]
        while not all(done):
            drawn = session.next.tolist()
            if NO_TOKEN in drawn:
                raise InputError("logits are NaN or infinite: try --dtype fp32, or leave that method out")
            fed = []
            for row, (token, ids, n) in enumerate(zip(drawn, forced, n_new, strict=True)):
                at = len(out[row])
                if not done[row]:
                    out[row].append(token)
                    done[row] = at + 1 == len(ids) + n or (at >= len(ids) and token in stops)
                fed.append(ids[at] if at < len(ids) else token)
            if not all(done):
                session.advance(torch.tensor(fed, device=self.device))
        return out

    @torch.inference_mode()
    def ask(self, batch: Sequence[Context]) -> Iterator[tuple[str, Row, str, float]]:
        """Asks the rows of up to `batch` contexts; yields the answer and its score by method and row. One prefill
        serves all methods whose prefill is exact, and all questions, each of which starts from the state after it."""
        first, lengths = self.prefill([c.prompt for c in batch])
        most = max(len(c.rows) for c in batch)
        for label, cache in self.caches.items():
            self.model.cache = cache
            state = Snapshot(cache) if most > 1 else None
            for i in range(most):
                if i and state:
                    state.restore()
                here = [(c.rows[i], c.asked[i]) if i < len(c.rows) else (None, list[int]()) for c in batch]
                n_new = [row["max_new_tokens"] if row else 0 for row, _ in here]
                outs = self.decode(first[label], lengths, [ids for _, ids in here], n_new, self.stops)
                for (row, ids), out in zip(here, outs, strict=True):
                    if row and row["max_new_tokens"]:
                        said = [t for t in out[len(ids) :] if t not in self.stops]
                        text = self.tk.decode(said)
                        yield label, row, text, score(row, text)
                    elif row:  # a text to predict; its first token cannot be known, and is not counted
                        yield label, row, "", float(np.mean(np.array(out[1:]) == np.array(ids[1:])))


def open_evaluation(opt: argparse.Namespace, batch: int) -> Evaluation:
    """The evaluation for a command line read by `check_flags`; in fp32 on every device, unless --dtype is given."""
    with opt.ranks.agreed():
        device, opt.dtype = pick_device(opt.device), opt.dtype or "fp32"
        model = load_model(opt, device)
        return Evaluation(Path(opt.checkpoint), device, batch, opt.query_in_prompt, opt.seed, model)


def names_of(opt: argparse.Namespace) -> dict[str, str]:
    """A result's fields about the model: its file's name, and the fingerprint of its weights."""
    name = Path(opt.transformers or opt.checkpoint).name
    return dict(checkpoint=name, fingerprint=fingerprint(open_checkpoint(opt.checkpoint).path)[:16])


def join(opt: argparse.Namespace) -> None:
    """Sets opt.ranks from --parallel, and opt.device to this rank's. Raises InputError under torchrun without it."""
    if started_by_torchrun() and not opt.parallel:
        opt.ranks, _ = start(opt.device)  # so that only the first rank prints the error
        raise InputError("torchrun started several processes, which would all do the same: add --parallel data")
    opt.ranks, opt.device = start(opt.device, PATIENCE) if opt.parallel else (ONE, opt.device)


def add_flags(p: argparse.ArgumentParser, questions: bool = True) -> None:
    """The flags that evaluations share. questions: whether there are some, which may be known."""
    a = p.add_argument
    p.set_defaults(query_in_prompt=False, seed=0)
    if questions:
        a("--seed", type=int, default=42, help="seed of the samples; default: 42")
        a("--query-in-prompt", action="store_true", help="the question is known when the context is compressed")
    add_precision(p)
    add_calibration(p)
    a("--parallel", choices=["data"], help="under torchrun: each process evaluates its share")
    add_run(p)


def check_flags(opt: argparse.Namespace, in_folder: str = "") -> argparse.Namespace:
    """Checks them, and joins other ranks; --lengths, if there is one, becomes a list of numbers. in_folder: a file of
    the folder that --out names."""
    join(opt)
    if "lengths" in opt:
        opt.lengths = parse_lengths(opt.lengths)
    check_out_of(opt, in_folder)
    WeightFormat.parse(opt.weights, opt.head)
    set_threads(opt.threads)
    return opt
