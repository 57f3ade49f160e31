"""One pass over text -> calibration.safetensors: what the methods want to know about a model, beside its weights.

    python calibrate.py --checkpoint models/tiny                  # default text: English and Python on this machine
    python calibrate.py --checkpoint CKPT --data notes.txt --samples 128 --seq-len 4096
    python calibrate.py --checkpoint CKPT --method sals mine      # what these need; what the file has of others is kept
    python calibrate.py --checkpoint CKPT --import-channels F     # Double Sparsity's published channel lists (JSON)

A method's file declares its statistics (cache/statistic.py); without --method those of all methods are measured, the
ones in the folders of KV_FAST_METHODS too. Ctrl-C keeps what is done in a .partial file, and the same command continues
from it; the result is written under another name and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from cache.calibration import FILE, VERSION, Calibration, LayerTokens, Sums, collect, fingerprint, repeated_sums
from cache.channels import read_channels, shared
from cache.spec import all_statistics
from cache.statistic import REPEATS, RepeatedTokens, Statistic, Tokens
from checkpoint import args_from_hf, load_checkpoint
from corpus import collect as read_corpus
from errors import InputError, Parser, run_cli
from formats.shards import read_object as read_json
from model import ModelArgs, Transformer
from runtime import DTYPES, TINY, add_weights, pick_device, read_text
from tokenizer import load_tokenizer
from weights import WeightFormat

PARTIAL = "calibration.partial.safetensors"
SAVE_EVERY = 60  # seconds


# ---- the pass ----


def layer_tokens(model: Transformer) -> LayerTokens:
    """Teacher forcing of tokens [1, S], layer by layer."""

    @torch.inference_mode()
    def run(tokens: Tensor) -> Iterator[Tokens]:
        tokens = tokens.to(model.device)
        cos, sin = model.rope_tables(tokens.shape[1])
        for i, (block, x) in enumerate(zip(model.layers, model.hidden_states(tokens), strict=False)):
            x = block.attention_norm(x)
            biases: Sequence[Tensor] = ()  # a norm of keys behind the projection leaves no bias to take off
            if block.attention.wqkv.bias is not None and not model.args.qk_norm:
                heads = block.attention.wqkv.bias.float().view(-1, model.args.head_dim)
                biases = heads[model.args.n_head :].chunk(2)
            yield Tokens(i, *(t[0] for t in (x, *block.attention.qkv(x), cos, sin)), *biases)

    return run


def calibrate(
    model: Transformer,
    sequences: Sequence[Tensor],
    n_random: int,
    statistics: Iterable[Statistic] | None = None,
    progress: bool = False,
    vocabulary: Sequence[int] | None = None,
) -> Calibration:
    """In memory, from token sequences [S]: what tests and scripts call. statistics None: those of all methods.

    vocabulary: what random tokens are drawn from, a tokenizer's `text_ids`; None: all ids.
    """
    statistics = all_statistics() if statistics is None else statistics
    return collect(model.args, layer_tokens(model), sequences, statistics, n_random, progress, vocabulary)


# ---- text ----


def default_text(tokenizer: Any) -> np.ndarray:
    """English and Python that is on every machine, without the held-out documents of the evaluations."""
    docs = [d for d in read_corpus(progress=True) if not d.held_out]
    rng = np.random.default_rng(0)
    picked = [docs[i] for i in rng.permutation(len(docs))]
    ids: list[int] = []
    for d in tqdm(picked, desc="tokens"):
        ids += tokenizer.encode(d.text, bos=True)
        if len(ids) > 4_000_000:
            break
    return np.array(ids)


def tokens_of(tokenizer: Any, files: list[str]) -> np.ndarray:
    return np.array([i for file in files for i in tokenizer.encode(read_text(file), bos=True)])


def draw(ids: np.ndarray, samples: int, seq_len: int, seed: int) -> np.ndarray:
    """`samples` windows [samples, seq_len] at random places of the text."""
    if len(ids) <= seq_len:
        raise InputError(f"the text has {len(ids)} tokens, --seq-len wants {seq_len}: lower it or give more --data")
    starts = np.random.default_rng(seed).integers(0, len(ids) - seq_len, samples)
    return np.stack([ids[s : s + seq_len] for s in starts])


# ---- an interrupted pass ----


def load_partial(path: Path, settings: dict, sums: Sums, device: torch.device | str = "cpu") -> int:
    """Continue an interrupted pass if it had the same settings -> sequences done."""
    try:
        with safe_open(path, framework="pt") as f:
            meta = json.loads((f.metadata() or {}).get("partial", "{}"))
            if not isinstance(meta, dict) or meta.get("settings") != settings:
                return 0
            kept, tokens, done = {n: f.get_tensor(n).to(device) for n in meta["sums"]}, meta["tokens"], meta["done"]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    sums.sums, sums.tokens = kept, tokens
    return done


def save_partial(path: Path, settings: dict, sums: Sums, done: int) -> None:
    tmp = path.with_name(path.name + ".tmp")
    meta = json.dumps(dict(settings=settings, done=done, tokens=sums.tokens, sums=list(sums.sums)))
    save_file({k: t.cpu() for k, t in sums.sums.items()}, tmp, metadata={"partial": meta})
    os.replace(tmp, path)


def text_sums(
    model: Transformer, windows: np.ndarray, statistics: Iterable[Statistic], partial: Path, settings: dict
) -> Sums:
    """Sums over windows [samples, seq_len], continued from a partial file and left in one by Ctrl-C."""
    sums, run = Sums(statistics), layer_tokens(model)
    done, samples = load_partial(partial, settings, sums, model.device), len(windows)
    stop: list[int] = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda number, frame: stop.append(number))
    saved = time.time()
    for i in tqdm(range(done, samples), initial=done, total=samples, desc="calibration", unit="seq"):
        sums.add(run(torch.from_numpy(windows[i])[None]))
        if stop or time.time() - saved > SAVE_EVERY:
            save_partial(partial, settings, sums, i + 1)
            saved = time.time()
        if stop:
            raise KeyboardInterrupt
    return sums


# ---- the command ----


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", default=str(TINY), help="Hugging Face folder; the result is written into it")
    a("--method", nargs="+", metavar="NAME", help="methods, presets or specs: measure what they need; default: all")
    a("--data", nargs="+", metavar="FILE", help="UTF-8 text files; default: English and Python on this machine")
    a("--samples", type=int, default=64, help="sequences (the papers: 128-512)")
    a("--seq-len", type=int, default=0, help="tokens of a sequence, default: 2048 or the model's context if shorter")
    n_help = f"random tokens, repeated {REPEATS} times (razor), default: 2500, or a quarter of a shorter context"
    a("--random-tokens", type=int, default=0, help=n_help)
    a("--seed", type=int, default=0, help="of the sequences' places in the text")
    a("--import-channels", metavar="FILE", help="no pass: take Double Sparsity's published channel lists (JSON)")
    a("--device")
    a("--dtype", choices=sorted(DTYPES), default="fp32")
    add_weights(p)
    a("--json", action="store_true", help="print the file's metadata as JSON")
    opt = p.parse_args()
    folder, device, kind = Path(opt.checkpoint), pick_device(opt.device), WeightFormat.parse(opt.weights, opt.head)
    args = args_from_hf(read_json(folder / "config.json"))
    if opt.import_channels:
        if opt.method or opt.data:
            raise InputError("--import-channels measures nothing: drop --method and --data")
        check_writable(folder)
        save(folder, args, *imported(Path(opt.import_channels), args), json_only=opt.json)
        return
    seq_len = opt.seq_len or min(2048, args.context)
    n_random = opt.random_tokens or min(2500, args.context // REPEATS)
    limits = {"--seq-len": (seq_len, 2, args.context), "--samples": (opt.samples, 1, 1 << 30),
              "--seed": (opt.seed, 0, 1 << 62), "--random-tokens": (n_random, 2, args.context // REPEATS)}  # fmt: skip
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise InputError(f"{name} {value} is out of range: this model takes {low} to {high}")
    statistics = all_statistics(opt.method, args.n_layer)
    if not statistics:
        raise InputError(f"--method {' '.join(opt.method or [])}: no calibration is needed")
    for s in statistics:
        s.layout(args)  # what is wrong in it is told before the pass
    check_writable(folder)

    tokenizer = load_tokenizer(folder)
    model, partial = load_checkpoint(folder, device, DTYPES[opt.dtype], kind), folder / PARTIAL
    numbers = dict(dtype=opt.dtype) | ({} if kind is None else dict(weights=opt.weights, head=opt.head))
    tensors: dict[str, Tensor] = {}
    how: dict[str, dict] = {}
    if of_text := [s for s in statistics if not isinstance(s, RepeatedTokens)]:
        ids = tokens_of(tokenizer, opt.data) if opt.data else default_text(tokenizer)
        windows = draw(ids, opt.samples, seq_len, opt.seed)
        text = dict(data=hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(),
                    files=[Path(f).name for f in opt.data] if opt.data else "default",
                    samples=opt.samples, seq_len=seq_len, seed=opt.seed, **numbers)  # fmt: skip
        settings = dict(version=VERSION, fingerprint=fingerprint(folder), **text)
        sums = text_sums(model, windows, of_text, partial, settings | dict(statistics=sources(of_text)))
        tensors |= sums.finish(args.n_layer)
        how |= {s.name: dict(tokens=sums.tokens, **text) for s in of_text}
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.default_int_handler)
    repeated = repeated_sums(args, layer_tokens(model), statistics, n_random, True, tokenizer.text_ids)
    tensors |= repeated.finish(args.n_layer)
    how |= {s.name: dict(random_tokens=n_random, **numbers) for s in repeated.statistics}

    save(folder, args, tensors, how, json_only=opt.json)
    for left in (partial, partial.with_name(partial.name + ".tmp")):
        left.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write into {folder}: copy the checkpoint to a folder of your own")


def save(folder: Path, args: ModelArgs, tensors: dict[str, Tensor], how: dict[str, dict], json_only: bool) -> None:
    """The checkpoint's file with what is new in it, and a line about it."""
    calibration = merged(folder, args, tensors, how)
    calibration.save(folder / FILE)
    size = (folder / FILE).stat().st_size / 2**20
    print(json.dumps(calibration.meta) if json_only else f"{folder / FILE}: {size:.1f} MiB, new: {', '.join(how)}")


def imported(file: Path, args: ModelArgs) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """Published channel lists, and where they are from; says on stderr what they are worth."""
    tensors = read_channels(file, args)
    qk, k = (shared(tensors, kind) for kind in ("qk", "k"))
    if qk is not None and k is not None:
        print(f"warning: the published qk lists mix the heads of a layer: two of them share {qk:.0%} of their best "
              f"channels here (k lists: {k:.0%}). Use ranking=k or ranking=q with them, or measure qk: "
              "python calibrate.py --method double_sparsity", file=sys.stderr)  # fmt: skip
    return tensors, dict(channels=dict(imported=file.name, sha256=hashlib.sha256(file.read_bytes()).hexdigest()))


def sources(statistics: Iterable[Statistic]) -> dict[str, str]:
    """What they are computed by: sums of another code are not continued."""
    files = {s.name: Path(s.file) for s in statistics}
    return {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()}


def merged(folder: Path, args: ModelArgs, tensors: dict[str, Tensor], how: dict[str, dict]) -> Calibration:
    """What was measured, and what the checkpoint's file holds of other statistics; `how`: the settings of each."""
    try:
        old = Calibration.load(folder, args)
    except InputError as e:
        old = Calibration({}, args.n_layer)
        if (folder / FILE).exists():
            print(f"nothing is kept of the file that is there: {e}", file=sys.stderr)
    again = tuple(f"layers.{i}.{name}." for i in range(args.n_layer) for name in how)
    kept = {key: t for key, t in old.tensors.items() if not key.startswith(again)}
    how = dict(sorted((old.meta.get("statistics", {}) | how).items()))
    meta = dict(version=VERSION, fingerprint=fingerprint(folder), statistics=how)
    return Calibration(kept | tensors, args.n_layer, meta, args)


if __name__ == "__main__":
    run_cli(main)
