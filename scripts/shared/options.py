"""What several command lines take: --method as cache/spec.py reads it, --method-arg, sizes, files to go on with."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cache.spec import knob_names, method_files, parse_spec, presets, resolve
from errors import InputError
from scripts.shared.results import check_out
from scripts.shared.timing import reason

SPECS = "methods and presets, with knobs or without: full sals-12.5,budget=0.1"
SPECS_BY_LAYER = SPECS + ", or by layers: 0-1:full,2-:self_index"


def expand(specs: Iterable[str], with_presets: bool = False) -> list[str]:
    """`all` becomes every method, and every preset if wanted; what is named twice counts once."""
    every = [*sorted(method_files()), *(sorted(presets()) if with_presets else ())]
    return list(dict.fromkeys(s for spec in specs for s in (every if spec == "all" else [spec])))


def parse_knobs(items: Iterable[str]) -> dict[str, str]:
    """--method-arg K=V, as often as given."""
    out = {}
    for item in items:
        key, eq, value = item.partition("=")
        if not eq or not key:
            raise InputError(f"--method-arg {item!r} is not of the form K=V")
        out[key] = value
    return out


def takes(spec: str, knob: str) -> bool:
    """Whether a part of a spec has this knob; skip_layers is one of all."""
    return knob == "skip_layers" or any(knob in knob_names(resolve(p.name)[0]) for p in parse_spec(spec))


def check_run(opt: argparse.Namespace) -> None:
    """What both benchmarks take: --size becomes [(batch, length), ...], and what cannot be is an InputError."""
    if opt.size is None:
        opt.size = [(b, n) for b in opt.batch for n in opt.length]
    else:
        for text in opt.size:
            if not re.fullmatch(r"\d+x\d+", text):
                raise InputError(f"--size {text} is no batch x tokens: write 8x4096")
        opt.size = [(int(b), int(n)) for b, n in (text.split("x") for text in opt.size)]
    if min(opt.rounds, *(n for size in opt.size for n in size)) < 1:
        raise InputError("--batch, --length, --size and --rounds must be at least 1")
    if opt.resume and not opt.out:
        raise InputError("--resume needs --out, the file to go on with")
    check_out(opt.out)


def earlier(out: str, data: dict[str, Any], same: tuple[str, ...], lists: tuple[str, ...]) -> dict[str, list[Any]]:
    """The lists of a result file to go on with; InputError if it was measured elsewhere or otherwise.

    same: keys that must be as in data, what this run would write.
    """
    if not Path(out).exists():
        return {}
    try:
        old = json.loads(Path(out).read_text())
        changed = [k for k in same if old[k] != data[k]]
        found = {k: list(old[k]) for k in lists}
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as e:
        raise InputError(f"--resume: {out} is no result of this script ({reason(e)})") from None
    if changed:
        raise InputError(f"--resume: {out} has another {changed[0]}: drop --resume, or give another --out")
    return found
