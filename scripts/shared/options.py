"""Flags and checks that several command lines share: methods, models, sizes, result files to resume."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import time
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cache.calibration import beside
from cache.grammar import method_files, own_folders
from cache.spec import layer_methods, presets
from loading.checkpoint import load_checkpoint, random_transformer
from loading.config import args_from_hf, read_args
from loading.named import named_args
from model import ModelArgs, Transformer
from runtime.errors import InputError
from runtime.machine import pick_dtype
from scripts.shared.results import changed, check_out, edits
from scripts.shared.timing import reason
from weights import WeightFormat, open_checkpoint
from weights.shards import read_object as read_json


class Steps(tqdm):
    """A progress bar of steps that differ, which says what runs now."""

    def __init__(self, total: int):
        super().__init__(total=total, leave=False, dynamic_ncols=True, unit="step", delay=1.0)

    def now(self, what: str) -> None:
        self.set_description_str(what, refresh=False)
        self.update()
        if time.time() - self.start_t > self.delay:  # bad input is told before anything else
            self.refresh()


SPECS = "methods and presets, with knobs or without: full sals-12.5,budget=0.1"
SPECS_BY_LAYER = SPECS + ", or by layers: 0-1:full,2-:self_index"


def expand(specs: Iterable[str], with_presets: bool = False) -> list[str]:
    """Replaces `all` by every method, and every preset if `with_presets`; drops duplicates."""
    every = [*sorted(method_files()), *(sorted(presets()) if with_presets else ())]
    return list(dict.fromkeys(s for spec in specs for s in (every if spec == "all" else [spec])))


def checked(specs: Iterable[str], n_layer: int, with_presets: bool = False) -> list[str]:
    """`expand`. Raises InputError for a wrong name or knob, before a run starts."""
    out = expand(specs, with_presets)
    for spec in out:
        layer_methods(spec, n_layer, {})
    return out


def load_model(opt: argparse.Namespace, device: torch.device) -> Transformer:
    """The model of --checkpoint, or of --random-init if there is that flag, with its precision and calibration."""
    dtype, weight_format = pick_dtype(opt.dtype, device), WeightFormat.parse(opt.weights, opt.head)
    if getattr(opt, "transformers", None):
        from engine.transformers_backend import load_model  # transformers is optional

        model: Transformer = load_model(opt.checkpoint, device, dtype, weight_format)
    elif name := getattr(opt, "random_init", None):
        model = random_transformer(shapes(name), device, dtype, weight_format=weight_format)
    else:
        model = load_checkpoint(opt.checkpoint, device, dtype, weight_format)
    model.use_calibration(getattr(opt, "calibration", None))
    model.kv_dtype = pick_dtype(opt.kv_dtype, device) if opt.kv_dtype else None
    return model


def layers_of(opt: argparse.Namespace) -> int:
    """How many layers get a method, without reading the model's weights."""
    if not opt.transformers:
        return read_args(opt.checkpoint).n_layer
    from engine.transformers_backend import read_sizes  # transformers is optional

    return read_sizes(opt.checkpoint).n_layer


PRECISION = ("dtype", "engine", "weights", "head", "kv_dtype")  # what `precision` may have


def precision(opt: argparse.Namespace, model: Transformer) -> dict[str, str]:
    """The dtypes and weight formats that a result file records."""

    def name(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    out = dict(dtype=name(model.dtype)) | (dict(engine="transformers") if getattr(opt, "transformers", None) else {})
    if opt.weights:
        out |= dict(weights=opt.weights, head=opt.head or "as weights, at least int8")
    return out | (dict(kv_dtype=name(model.kv_dtype)) if model.kv_dtype else {})


def inputs(opt: argparse.Namespace, model: Transformer, *files: str | None, tokens: Any = None) -> dict[str, str]:
    """Hashes of what answers depend on beside the commit and the flags: calibrations, files and folders of text,
    methods of one's own, edits that no commit has, and `tokens`, which come from texts of this machine."""
    found = opt.calibration or ([beside(model.folder)] if model.folder else [])
    paths = [Path(f) for f in (*found, *files) if f]
    texts = [f for p in paths for f in ([p] if p.is_file() else sorted(p.rglob("*.txt")))]
    h = hashlib.sha256(json.dumps(tokens).encode())
    for f in (*texts, *(f for folder in own_folders() for f in sorted(folder.glob("*.py")))):
        h.update(hashlib.sha256(f.read_bytes()).digest())
    return dict(inputs=h.hexdigest()[:16], edits=edits())


def check_folder(checkpoint: str, who: str) -> None:
    """Raises InputError if the checkpoint is a GGUF file, for libraries that read only folders."""
    if (path := open_checkpoint(checkpoint).path).is_file():
        raise InputError(f"{who} needs a Hugging Face folder, {path} is a GGUF file: write one with python "
                         f"-m scripts.quantize {path} OUT --weights fp32, and give --checkpoint OUT")  # fmt: skip


@functools.cache
def shapes(name: str) -> ModelArgs:
    """The shapes of a known model, or of a checkpoint's config.json."""
    return args_from_hf(read_json(Path(name))) if name.endswith(".json") else named_args(name)


def parse_lengths(text: str) -> list[int]:
    """--lengths 1024,2048 as a list."""
    try:
        found = list(dict.fromkeys(int(n) for n in text.split(",")))
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise InputError(f"the length {text} is no whole number above 0, or list of them such as 512,1024")
    return found


def parse_shares(flag: str, text: str) -> list[Fraction]:
    """1/2,1/4 as a list."""
    try:
        wanted = [Fraction(part) for part in text.split(",") if part]
    except (ValueError, ZeroDivisionError):
        wanted = [Fraction(0)]
    if not wanted or not all(0 < w <= 1 for w in wanted):
        raise InputError(f"{flag} {text} is not a list such as 1/2,1/4, each above 0 and at most 1")
    return wanted


def add_run(p: argparse.ArgumentParser, resume: bool = True) -> None:
    """Flags of every measurement: device and threads, and the result file, which is written as it goes."""
    a = p.add_argument
    a("--device", help="cpu, cuda, cuda:1 ...; default: a GPU if there is one")
    a("--threads", type=int, help="CPU threads, default: torch's choice")
    if resume:
        a("--resume", action="store_true", help="keep what --out has and measure what is missing")
    a("--out", help="result file (of compare.py a folder), written after every part")
    a("--json", action="store_true", help="print the result's content and nothing else")


def check_out_of(opt: argparse.Namespace, in_folder: str = "") -> None:
    """Checks --resume, and --out, which may be no file that another flag names. in_folder: a file of the folder that
    --out names."""
    if "resume" in opt and opt.resume and not opt.out:
        raise InputError("--resume needs --out, the result to continue from")
    others = [x for flag, x in vars(opt).items() if flag != "out"]
    reads = [x for other in others for x in (other if isinstance(other, list) else [other]) if isinstance(x, str)]
    check_out(Path(opt.out) / in_folder if opt.out and in_folder and Path(opt.out).is_dir() else opt.out, reads=reads)


def check_run(opt: argparse.Namespace) -> None:
    """Checks the flags of both benchmarks; --size becomes [(batch, length), ...]."""
    if opt.size is None:
        opt.size = [(b, n) for b in opt.batch for n in opt.length]
    else:
        for text in opt.size:
            if not re.fullmatch(r"\d+x\d+", text):
                raise InputError(f"--size {text} is no batch x tokens: write 8x4096")
        opt.size = [(int(b), int(n)) for b, n in (text.split("x") for text in opt.size)]
    if min(opt.rounds, *(n for size in opt.size for n in size)) < 1:
        raise InputError("--batch, --length, --size and --rounds must be at least 1")
    opt.size = list(dict.fromkeys(opt.size))
    if opt.time_limit is not None and not opt.time_limit > 0:
        raise InputError(f"--time-limit {opt.time_limit:g} leaves no time: give seconds above 0, or leave it out")
    check_out_of(opt)


def earlier(
    out: str, data: dict[str, Any], same: tuple[str, ...], lists: tuple[str, ...], free: tuple[str, ...] = ()
) -> dict[str, list[Any]]:
    """The lists of a result file to continue from; raises InputError if its run differs from this one.

    same: keys whose values must equal those in `data`, which this run would write; free: settings that need not.
    Commits may differ, if the hot path (results.py) does not: the older one goes into `data`, and so do the devices of
    both runs.
    """
    if not Path(out).exists():
        return {}
    try:
        old = json.loads(Path(out).read_text())
        other = [k for k in same if k not in ("commit", "settings") and old.get(k) != data.get(k)]
        if "settings" in same:  # a flag that one of both had is missing in the other's
            theirs, ours = old["settings"], data["settings"]
            other += [k for k in theirs | ours if theirs.get(k) != ours.get(k) and k not in free]
        other += [f"version of {f}" for f in changed(old["commit"], data["command"], "gpu" in data)]
        found = {k: list(old[k]) for k in lists}
        devices = old["device"].split(" and ")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as e:
        raise InputError(f"--resume: {out} is no result of this script ({reason(e)})") from None
    if other:
        raise InputError(f"--resume: {out} has another {other[0]}: drop --resume, or give another --out")
    data["commit"] = old["commit"]
    data["device"] = " and ".join(dict.fromkeys([*devices, data["device"]]))
    return found
