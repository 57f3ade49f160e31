"""The grammar of --method: names, knobs and layers in a line of text. It needs no torch.

    self_index                              a method
    sals-12.5                               a preset: a method with knobs that reproduce a row of its paper
    self_index,budget=160                   a method with a knob
    0-1:full,2-:sals-12.5,budget=0.1        by layers; knobs belong to the part they follow, and later parts win
    razor,retrieval_method=quest:budget=64  a method inside another, with its own knobs

A method is a file of kv_methods/, or of a folder named in KV_FAST_METHODS, and has the file's name.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import InputError, did_you_mean, short
from runtime.folders import ROOT, cache_folder

HERE = ROOT / "kv_methods"


def own_folders() -> list[Path]:
    """The folders of KV_FAST_METHODS. Raises InputError if one does not exist."""
    folders = [Path(f) for f in os.environ.get("KV_FAST_METHODS", "").split(os.pathsep) if f]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"KV_FAST_METHODS: {folder} is not a folder: create it, or correct the variable")
    return [folder.resolve() for folder in folders]


def method_files() -> dict[str, Path]:
    """Every method file by name. A file of KV_FAST_METHODS wins over one of this repository."""
    files = [f for folder in (*own_folders(), HERE) for f in sorted(folder.glob("*.py"))]
    return {f.stem: f for f in reversed(files) if not f.stem.startswith("_")}


def unknown_method(name: str, known: Iterable[str]) -> InputError:
    return InputError(f"unknown method {short(name)}: {did_you_mean(name, known)}generate.py --list-methods prints all")


def check_names(spec: str) -> None:
    """Raises InputError, before torch is imported, for text that cannot be read or a name that no file can have: a
    preset's name begins with its file's name, or is a key of a table there, which may have to be run to be known."""
    files = method_files()
    names = {part.name for part in parse_spec(spec)}
    if all(name in files or name.partition("-")[0] in files for name in names):
        return
    known = [*files]
    for file in files.values():
        with contextlib.suppress(OSError, ValueError, SyntaxError):  # a broken file breaks nothing but itself
            for line in ast.parse(file.read_text()).body:
                table = getattr(line, "value", None)
                keys: list[Any] = [getattr(key, "value", None) for key in getattr(table, "keys", ())]
                keys += [word.arg for word in getattr(table, "keywords", ())]  # of dict(name=...)
                if file.parent != HERE and (not keys or None in keys) and re.match(r"PRESETS\b", ast.unparse(line)):
                    return
                known += [key for key in keys if isinstance(key, str)]
    for name in names:
        if name not in known and name.partition("-")[0] not in files:
            raise unknown_method(name, known)


def listing() -> Path:
    """Where the text of --list-methods is kept once it was printed, by what it was made from."""
    sources = [*method_files().values(), *sorted(Path(__file__).parent.glob("*.py"))]
    key = hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest()[:32]
    return cache_folder() / f"methods-{key}.txt"


@dataclass
class Part:
    """Layers from first to last (None: to the end), a method's or preset's name, and the knobs that follow it."""

    name: str
    first: int = 0
    last: int | None = None
    knobs: dict[str, str] = field(default_factory=dict)


def parse_spec(spec: str) -> list[Part]:
    """The text of --method -> its parts. Raises InputError for what it cannot read; `layer_parts` checks layers."""
    if not isinstance(spec, str):
        raise InputError(f"a method is a {type(spec).__name__}: give its name, as text")
    parts: list[Part] = []
    last_knob = ""
    for item in (x.strip() for x in spec.split(",")):
        key, eq, value = item.partition("=")
        if eq and key.isidentifier() and parts:
            parts[-1].knobs[key] = value
            last_knob = key
        elif last_knob and re.fullmatch(r"-?\d+", item):  # skip_layers=0,1,-1
            parts[-1].knobs[last_knob] += f",{item}"
        elif m := re.fullmatch(r"(\d{1,9})(-(\d{0,9}))?:([^:=]+)", item):
            first = int(m[1])
            last = first if m[2] is None else int(m[3]) if m[3] else None
            parts.append(Part(m[4].strip(), first, last))
            last_knob = ""
        elif item and not parts and ":" not in item and not eq:
            parts.append(Part(item))
            last_knob = ""
        else:
            raise InputError(
                f"cannot read {item!r} in --method {spec!r}: write it like self_index,budget=160 or "
                "0-1:full,2-:sals-12.5,budget=0.1"
            )
    return parts


def parse_knobs(items: Iterable[str]) -> dict[str, str]:
    """The values of all --method-arg K=V."""
    out = {}
    for item in items:
        key, eq, value = item.partition("=")
        if not eq or not key:
            raise InputError(f"--method-arg {item!r} is not of the form K=V")
        out[key] = value
    return out
