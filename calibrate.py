"""Measure in one pass over text what the methods need to know about a model: calibration.safetensors.

    python calibrate.py --checkpoint models/tiny                  # default text: English and Python on this machine
    python calibrate.py --checkpoint m.gguf                       # writes m.calibration.safetensors beside it
    python calibrate.py --transformers NAME_OR_FOLDER             # a model of any architecture, run by transformers
    python calibrate.py --checkpoint CKPT --data notes.txt --samples 128 --seq-len 4096
    python calibrate.py --checkpoint CKPT --method sals mine      # what these need; the rest of the file is kept
    python calibrate.py --checkpoint CKPT --method sals --bases fp16 --calibration small.safetensors    # half the size
    python calibrate.py --checkpoint CKPT --calibration F         # another place, for a folder that cannot be written
    python calibrate.py --checkpoint CKPT --import-channels F     # Double Sparsity's published channel lists (JSON)
    torchrun --nproc-per-node 8 calibrate.py --checkpoint CKPT    # one sequence per process at a time: the same file

A method's file declares its statistics (cache/statistic.py). Without --method, those are measured that methods need at
their defaults, also methods in the folders that KV_FAST_METHODS names. Ctrl-C ends the run within seconds and keeps the
sums so far in .partial files; the same command continues from them and gives the same result, bit for bit. The result
replaces an older file only when it is complete.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import InputError, need_torch, run_cli

if __name__ == "__main__":
    need_torch()  # before what needs it is imported
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from cache.calibration import (
    VERSION,
    Calibration,
    LayerTokens,
    Sums,
    beside,
    collect,
    fingerprint,
    is_of,
    of_model,
    repeated_tokens,
    write_tensors,
)
from cache.channels import read_channels, shared
from cache.spec import all_statistics
from cache.statistic import REPEATS, RepeatedTokens, Statistic, Tokens
from loading.checkpoint import load_checkpoint
from loading.config import args_from_hf
from loading.tokenizer import load_tokenizer
from model import ModelArgs, Transformer
from runtime.corpus import shuffled
from runtime.hub import add_checkpoint
from runtime.machine import DTYPES, check_out, pick_device, read_text, temporary
from runtime.options import Parser, add_weights
from runtime.parallel import ONE, PATIENCE, Ranks, start
from weights import WeightFormat, open_checkpoint

SAMPLES = 12  # sequences of text (ours; the SALS paper takes 512)
RANDOM = 2500  # random tokens (RazorAttention, Sec. 3.3)
QUICK_SAMPLES, QUICK_RANDOM = 4, 256
SAVE_EVERY = 60  # seconds


# ---- the pass ----


def layer_tokens(model: Transformer, first: int = 0, x: Tensor | None = None) -> LayerTokens:
    """Runs tokens [1, S] layer by layer, teacher-forced; x [1, S, dim] is the input of layer `first`, if not 0."""

    if own := getattr(model, "layer_tokens", None):  # of transformers
        return functools.partial(own, first=first)

    @torch.inference_mode()
    def run(tokens: Tensor) -> Iterator[Tokens]:
        into: Any = model.embed(tokens.to(model.device)) if x is None else x.to(model.device)
        for i in range(first, model.args.n_layer):
            block, seen = model.layers[i], list[Tensor]()
            cos, sin = model.rope_tables(tokens.shape[1], i)
            dense = block.attention.uncached(cos, sin)

            def attend(q: Tensor, k: Tensor, v: Tensor, seen: list = seen, dense: Any = dense) -> Tensor:
                seen += (q, k, v)
                return dense(q, k, v)

            normed, after = block.attention_norm(into), None
            if i + 1 < model.args.n_layer:
                after = block(into, attend)
            else:
                seen += block.attention.qkv(normed)
            seen[0] = block.attention.grown(seen[0], 0)
            biases: Sequence[Tensor] = ()  # with a norm of the keys after the projection, no bias can be subtracted
            if block.attention.wqkv.bias is not None and not model.args.qk_norm:
                heads = block.attention.wqkv.bias.float().view(-1, model.args.head_dim)
                biases = heads[model.args.n_head :].chunk(2)
            tokens_of_layer = Tokens(i, *(t[0] for t in (normed, *seen, cos, sin)), *biases)
            tokens_of_layer.after, tokens_of_layer.window = after, block.attention.window
            yield tokens_of_layer
            into = after

    return run


def calibrate(
    model: Transformer,
    sequences: Sequence[Tensor],
    n_random: int,
    statistics: Iterable[Statistic] | None = None,
    progress: bool = False,
    vocabulary: Sequence[int] | None = None,
) -> Calibration:
    """Calibrates in memory on token sequences [S], for tests and scripts. statistics None: those of all methods.

    vocabulary: the ids that random tokens are drawn from, a tokenizer's `text_ids`; None: all ids.
    """
    statistics = all_statistics() if statistics is None else statistics
    return collect(model.args, layer_tokens(model), sequences, statistics, n_random, progress, vocabulary)


# ---- text ----


def endless(kind: str, seed: int) -> Iterator[str]:
    """This machine's texts of a kind, without those held out for evaluation; each round has another order."""
    for again in itertools.count(seed):
        doc = None
        for doc in shuffled(kind, again):
            yield doc.text
        if doc is None:
            raise InputError("no Python library with its sources is on this machine: give --data")


def default_text(tokenizer: Any, samples: int, seq_len: int, seed: int) -> np.ndarray:
    """Windows [samples, seq_len] of code and English by turns, from texts that are on every machine. Tokenizes no
    more text than it needs."""
    rng, texts = random.Random(seed), [endless(kind, seed) for kind in ("code", "prose")]
    rows = []
    for i in tqdm(range(samples), desc="tokens", unit="seq"):
        ids: list[int] = []
        while (missing := seq_len - len(ids)) > 0:
            text, most = next(texts[i % 2]), 8 * missing  # in characters; `missing` tokens rarely have more
            if len(text) > most:  # start at the beginning of a line
                start = text.find("\n", rng.randrange(len(text) - most)) + 1
                text = text[start : start + most]
            ids += tokenizer.encode(text, bos=True)[:missing]
        rows.append(ids)
    return np.array(rows)


def windows_of(tokenizer: Any, files: list[str], samples: int, seq_len: int, seed: int) -> np.ndarray:
    ids = np.array([i for file in files for i in tokenizer.encode(read_text(file), bos=True)])
    return draw(ids, samples, seq_len, seed)


def draw(ids: np.ndarray, samples: int, seq_len: int, seed: int) -> np.ndarray:
    """Windows [samples, seq_len] at random places of the text."""
    if len(ids) <= seq_len:
        raise InputError(f"the text has {len(ids)} tokens, --seq-len is {seq_len}: lower it or give more --data")
    starts = np.random.default_rng(seed).integers(0, len(ids) - seq_len, samples)
    return np.stack([ids[s : s + seq_len] for s in starts])


def digest(ids: np.ndarray) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


# ---- an interrupted pass ----


class Signals:
    """Makes Ctrl-C and SIGTERM raise KeyboardInterrupt: at once, or inside `deferred` at its end."""

    def __enter__(self) -> Signals:
        self.deferring = self.late = False
        self.before = {s: signal.signal(s, self._raise) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def _raise(self, *_: Any) -> None:
        if not self.deferring:
            raise KeyboardInterrupt
        self.late = True

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self.deferring = True
        yield
        self.deferring = False
        if self.late:
            self.late = False
            raise KeyboardInterrupt


class Pass:
    """Sums over sequences [N, S], layer by layer, which continue from a partial file of the same settings.

    done: the number of whole sequences in the sums. `layer` layers of the next sequence are in them, too, and
    x [1, S, dim] is the input of its layer `layer`.
    """

    def __init__(self, name: str, sequences: Tensor, statistics: Iterable[Statistic], path: Path, settings: dict):
        self.name, self.sequences = name, sequences
        self.sums, self.done, self.layer = Sums(statistics), 0, 0
        self.x: Tensor | None = None
        self.settings = settings | dict(statistics=sources(self.sums.statistics))
        # a file for each: other settings must not end what these have begun
        key = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]
        self.path = path.with_name(f"{path.name}.{key}.partial.safetensors")

    def load(self, device: torch.device | str = "cpu") -> None:
        """Takes the sums of a partial file of these settings; starts from nothing if it cannot be read whole."""
        try:
            with safe_open(self.path, framework="pt") as f:
                meta = json.loads((f.metadata() or {}).get("partial", "{}"))
                if not isinstance(meta, dict) or meta.get("settings") != self.settings:
                    return
                kept = {n: f.get_tensor(n).to(device) for n in meta["sums"]}
                done, layer, tokens = meta["done"], meta["layer"], meta["tokens"]
                x = f.get_tensor("x") if "x" in f.keys() else None  # noqa: SIM118, a safe_open is no dict
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        self.sums.sums, self.sums.tokens, self.done, self.layer, self.x = kept, tokens, done, layer, x

    def save(self) -> None:
        here = dict(done=self.done, layer=self.layer, tokens=self.sums.tokens, sums=list(self.sums.sums))
        tensors = self.sums.sums | ({} if self.x is None else dict(x=self.x))
        write_tensors(self.path, tensors, {"partial": json.dumps(dict(settings=self.settings) | here)})

    def run_shared(self, model: Transformer, ranks: Ranks) -> Sums:
        """Measures the sequences left, one per rank at a time. Sums are added in the order of the sequences, so they
        equal those of one process bit for bit. The first rank saves them, after whole sequences only."""
        n, N, saved = model.args.n_layer, len(self.sequences), time.time()
        if self.layer:  # a run of one process stopped within a sequence
            self.sums.sums, self.sums.tokens, self.done, self.layer, self.x = {}, 0, 0, 0, None
        self.done = ranks.all(self.done)[0]  # another machine may not have the file
        for first in tqdm(range(self.done, N, ranks.size), desc=self.name, unit=f"{ranks.size} sequences"):
            mine = first + ranks.rank
            layers = layer_tokens(model)(self.sequences[mine][None]) if mine < N else iter(())
            for _ in range(n):
                t = next(layers, None)
                measured = {} if t is None else {k: x.cpu() for k, x in self.sums.measure(t).items()}
                for found in ranks.all(measured):
                    self.sums.put({k: x.to(model.device) for k, x in found.items()})
            self.done = min(N, first + ranks.size)
            self.sums.tokens = self.done * self.sequences.shape[1]
            if ranks.rank == 0 and (self.done == N or time.time() - saved > SAVE_EVERY):
                self.save()
                saved = time.time()
        return self.sums

    def run(self, model: Transformer, ranks: Ranks = ONE) -> Sums:
        """Measures the sequences left. Raises KeyboardInterrupt after writing the partial file."""
        if ranks.size > 1:
            return self.run_shared(model, ranks)
        n, N = model.args.n_layer, len(self.sequences)
        saved = time.time()
        with Signals() as signals, tqdm(total=N * n, initial=self.done * n + self.layer, desc=self.name,
                                        unit="layer") as bar:  # fmt: skip
            try:
                while self.done < N:
                    tokens = self.sequences[self.done][None]
                    for t in layer_tokens(model, self.layer, self.x)(tokens):
                        measured = self.sums.measure(t)
                        with signals.deferred():
                            self.sums.put(measured)
                            self.layer, self.x = t.layer + 1, t.after
                            if self.layer == n:
                                self.done, self.layer, self.x = self.done + 1, 0, None
                                self.sums.tokens += tokens.numel()
                        bar.update()
                        if time.time() - saved > SAVE_EVERY:
                            with signals.deferred():
                                self.save()
                            saved = time.time()
                with signals.deferred():
                    self.save()
            except KeyboardInterrupt:
                signals.deferring = True  # and never released: write the file, then end
                if self.done or self.layer:
                    self.save()
                bar.close()
                raise
        return self.sums

    def kept(self) -> str:
        """A line that says how much is done."""
        N = len(self.sequences)
        if not self.done and not self.layer:
            return f"{self.name}: nothing is done yet"
        part = f"{self.done} of {N} sequences" if N > 1 else "all" if self.done else ""
        layers = f"{self.layer} layers of {'the next' if N > 1 else 'it'}" if self.layer else ""
        return f"{self.name}: {' and '.join(filter(None, (part, layers)))} kept in {self.path}"


# ---- the command ----


def parse_args() -> Any:
    p = Parser(__doc__, shares=True)
    a = p.add_argument
    add_checkpoint(p)
    a("--calibration", metavar="FILE", help="output; default: in the checkpoint folder, or beside the GGUF file")
    a("--method", nargs="+", metavar="NAME", help="methods, presets or specs: measure what they need; default: all")
    a("--data", nargs="+", metavar="FILE", help="UTF-8 text files; default: English and Python on this machine")
    a("--samples", type=int, metavar="N", help=f"number of sequences; default: {SAMPLES} (the SALS paper: 512)")
    a("--seq-len", type=int, metavar="N", help="tokens of a sequence; default: 2048, or the model's context "
      "if shorter")  # fmt: skip
    n_help = f"random tokens, repeated {REPEATS} times (for razor); default: {RANDOM}, or 1/8 of a shorter context"
    a("--random-tokens", type=int, metavar="N", help=n_help)
    a("--quick", action="store_true", help=f"by default {QUICK_SAMPLES} sequences and {QUICK_RANDOM} random tokens")
    a("--seed", type=int, default=0, help="seed that places the sequences in the text; default: 0")
    a("--import-channels", metavar="FILE", help="no pass: take Double Sparsity's published channel lists (JSON)")
    a("--device", help="cpu, cuda, cuda:1 ...; default: a GPU if there is one")
    a("--dtype", choices=sorted(DTYPES), default="fp32", help="dtype of the computation; default: fp32")
    add_weights(p)
    a("--bases", choices=("fp32", "fp16"), default="fp32", help="dtype of the bases in the file; fp16 halves its size")
    a("--json", action="store_true", help="print the file's metadata as JSON")
    return p.parse_args()


def main() -> None:
    opt = parse_args()
    ranks, given = start(opt.device, PATIENCE)
    weight_format, device = WeightFormat.parse(opt.weights, opt.head), pick_device(given)
    reader = open_checkpoint(opt.checkpoint)
    source = reader.path
    if opt.transformers:
        from engine.transformers_backend import load_model, read_sizes  # transformers is optional

        args = read_sizes(source)
    else:
        args = args_from_hf(reader.config)
    out = Path(opt.calibration) if opt.calibration else beside(source)
    if opt.import_channels:
        of_pass = {k: vars(opt)[k] for k in ("method", "data", "samples", "seq_len", "random_tokens")}
        of_pass["quick"] = opt.quick or None
        if idle := [f"--{k.replace('_', '-')}" for k, value in of_pass.items() if value is not None]:
            raise InputError(f"--import-channels measures nothing: drop {', '.join(idle)}")
        check_place(out, source, args)
        found = imported(Path(opt.import_channels), args)
        if ranks.rank == 0:
            save(out, source, args, *found, opt.bases, opt.json)
        return
    seq_len = min(2048, args.context) if opt.seq_len is None else opt.seq_len
    samples = (QUICK_SAMPLES if opt.quick else SAMPLES) if opt.samples is None else opt.samples
    n_random = opt.random_tokens
    if n_random is None:
        n_random = min(QUICK_RANDOM if opt.quick else RANDOM, args.context // (2 * REPEATS))
    limits = {"--seq-len": (seq_len, 2, args.context), "--samples": (samples, 1, 1 << 30),
              "--seed": (opt.seed, 0, 1 << 62), "--random-tokens": (n_random, 2, args.context // REPEATS)}  # fmt: skip
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise InputError(f"{name} {value} is out of range: this model takes {low} to {high}")
    statistics = all_statistics(opt.method, args.n_layer)
    if not statistics:
        raise InputError(f"--method {' '.join(opt.method or [])}: no calibration is needed")
    for s in statistics:
        s.layout(args)  # reports a wrong statistic before the pass
    check_place(out, source, args)
    model: Transformer | None = None
    if opt.transformers:
        model = load_model(source, device, DTYPES[opt.dtype], weight_format)
        statistics = model.measurable(statistics)

    tokenizer = load_tokenizer(reader.tokenizer)
    numbers = dict(dtype=opt.dtype) | ({} if weight_format is None else dict(weights=opt.weights, head=opt.head))
    same = dict(version=VERSION, fingerprint=fingerprint(source), **numbers)
    passes, settings = list[Pass](), dict[str, dict]()
    if of_text := [s for s in statistics if not isinstance(s, RepeatedTokens)]:
        size = (samples, seq_len, opt.seed)
        windows = windows_of(tokenizer, opt.data, *size) if opt.data else default_text(tokenizer, *size)
        text = dict(data=digest(windows), files=[Path(f).name for f in opt.data] if opt.data else "default",
                    samples=samples, seq_len=seq_len, seed=opt.seed)  # fmt: skip
        passes.append(Pass("text", torch.from_numpy(windows), of_text, partial(out, "text"), same | text))
        settings |= {s.name: dict(tokens=windows.size, **text, **numbers, code=s.code) for s in of_text}
    if of_random := [s for s in statistics if isinstance(s, RepeatedTokens)]:
        repeated = repeated_tokens(args, n_random, tokenizer.text_ids)[None]
        said = same | dict(data=digest(repeated.numpy()))
        passes.append(Pass("random tokens", repeated, of_random, partial(out, "random"), said))
        settings |= {s.name: dict(random_tokens=n_random, **numbers, code=s.code) for s in of_random}
    for p in passes:
        args.check_ids(p.sequences.flatten().tolist())
    try:
        with ranks.agreed():
            for p in passes:
                p.load(device)
            model = model or load_checkpoint(reader, device, DTYPES[opt.dtype], weight_format)
        tensors: dict[str, Tensor] = {}
        for p in passes:
            sums = p.run(model, ranks)
            if ranks.rank == 0:
                tensors |= sums.finish(args.n_layer)
        if ranks.rank:
            return
        save(out, source, args, tensors, settings, opt.bases, opt.json)
    except KeyboardInterrupt:
        kept = "; ".join(p.kept() for p in passes)
        raise KeyboardInterrupt(f"{kept}; the same command goes on from there") from None
    for left in (path for p in passes for path in (p.path, temporary(p.path))):
        left.unlink(missing_ok=True)


def partial(out: Path, name: str) -> Path:
    """The beginning of the name of the file that keeps an unfinished pass."""
    return out.with_name(f"{out.name.removesuffix('.safetensors')}.{name}")


def check_place(out: Path, source: Path, args: ModelArgs) -> None:
    """Raises InputError, before anything is computed, if `out` cannot be written, or is a file of another kind or of
    another model."""
    try:
        check_out(out, "--calibration")
    except InputError as e:
        raise InputError(f"{e}; name another place with --calibration FILE") from None
    if out == beside(source):
        return
    if source.is_dir() and out.resolve().parent == source.resolve() and not out.name.startswith("calibration"):
        raise InputError(f"--calibration {out}: in this folder *.safetensors are weights: call it calibration-...")
    try:
        with safe_open(out, framework="pt") as f:
            meta = json.loads((f.metadata() or {})["calibration"])
    except (SafetensorError, OSError, KeyError, ValueError):
        if out.exists():
            raise InputError(f"--calibration {out}: this file exists and is no calibration: name another one") from None
        return
    if isinstance(meta, dict) and meta.get("model", of_model(args)) != of_model(args):
        raise InputError(f"--calibration {out} is of another model than {source}: name another file, or none")


def save(
    out: Path, source: Path, args: ModelArgs, tensors: dict[str, Tensor], settings: dict[str, dict], bases: str,
    json_only: bool,
) -> None:  # fmt: skip
    """Writes the file with the new tensors merged in and all bases in this dtype; prints a line about it."""
    calibration = merged(out, source, args, tensors, settings)
    calibration.save(out, DTYPES[bases])
    print(json.dumps(calibration.meta) if json_only else
          f"{out}: {out.stat().st_size / 2**20:.1f} MiB, new: {', '.join(settings)}")  # fmt: skip


def imported(file: Path, args: ModelArgs) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """Published channel lists and their source; warns on stderr if the qk lists look mixed up between heads."""
    tensors = read_channels(file, args)
    qk, k = (shared(tensors, kind) for kind in ("qk", "k"))
    if qk is not None and k is not None:
        print(f"warning: the published qk lists mix the heads of a layer: two of them share {qk:.0%} of their best "
              f"channels here (k lists: {k:.0%}). Use ranking=k or ranking=q with them, or measure qk: "
              "python calibrate.py --method double_sparsity", file=sys.stderr)  # fmt: skip
    return tensors, dict(channels=dict(imported=file.name, sha256=hashlib.sha256(file.read_bytes()).hexdigest()))


def sources(statistics: Iterable[Statistic]) -> dict[str, str]:
    """A hash of each statistic's source file: sums that other code began are not continued."""
    files = {s.name: Path(s.file) for s in statistics}
    return {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()}


def merged(
    out: Path, source: Path, args: ModelArgs, tensors: dict[str, Tensor], settings: dict[str, dict]
) -> Calibration:
    """The new tensors with the file's other statistics: of the same weights, or, in a named file, of the same model in
    other bits. settings: those of each new statistic."""
    meta = dict(version=VERSION, model=of_model(args), fingerprint=fingerprint(source))
    old = Calibration({}, args.n_layer)
    if out.exists():
        try:
            old = Calibration.load(source, args, out)
            if out == beside(source) and not is_of(old.meta.get("fingerprint"), source):
                raise InputError(f"{out} was measured on other weights")
        except InputError as e:
            print(f"nothing of the existing file is kept: {e}", file=sys.stderr)
            old = Calibration({}, args.n_layer)
    again = tuple(f"layers.{i}.{name}." for i in range(args.n_layer) for name in settings)
    kept = {key: t for key, t in old.tensors.items() if not key.startswith(again)}
    meta["statistics"] = dict(sorted((old.meta.get("statistics", {}) | settings).items()))
    return Calibration(kept | tensors, args.n_layer, meta, args)


if __name__ == "__main__":
    run_cli(main)
