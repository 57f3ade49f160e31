"""Finds methods by file name, parses their knobs, and builds the cache of a model.

A method is a file of this folder, or of a folder named in KV_FAST_METHODS (separated like PATH): `mine.py` holding one
subclass of KVMethod is `--method mine`, and its PRESETS, {name: knobs}, are names too.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from calibrate import Calibration, RandomCalibration
from errors import InputError
from kv_methods.base import CacheShape, KVMethod
from model import Rope, Transformer, require_memory

HERE = Path(__file__).parent


def method_files() -> dict[str, Path]:
    """Every method file by name; this folder first, then those of KV_FAST_METHODS."""
    folders = [HERE, *map(Path, filter(None, os.environ.get("KV_FAST_METHODS", "").split(os.pathsep)))]
    files = [f for folder in folders for f in sorted(folder.glob("*.py")) if f.stem not in ("__init__", "base")]
    return {f.stem: f for f in reversed(files) if not f.stem.startswith("_")}


def _load(name: str, path: Path) -> types.ModuleType:
    full = f"kv_methods.{name}"
    if path.parent == HERE:
        return importlib.import_module(full)
    loaded = sys.modules.get(full)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def method_class(name: str) -> type[KVMethod]:
    """The one KVMethod subclass that the file `name` defines."""
    module = _load(name, method_files()[name])
    found = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, KVMethod)]
    found = [c for c in found if c.__module__ == module.__name__ and not c.__name__.startswith("_")]
    if len(found) != 1:
        raise InputError(f"{module.__file__} must define one KVMethod subclass, found {len(found)}")
    return found[0]


def presets() -> dict[str, tuple[str, dict[str, Any]]]:
    """Preset name -> (method, knobs)."""
    out = {}
    for name, path in method_files().items():
        for preset, knobs in getattr(_load(name, path), "PRESETS", {}).items():
            out[preset] = (name, knobs)
    return out


def resolve(name: str) -> tuple[type[KVMethod], dict[str, Any]]:
    """A method's or preset's name -> its class and the preset's knobs. InputError if there is none."""
    if name in method_files():
        return method_class(name), {}
    known = presets()
    if name in known:
        method, knobs = known[name]
        return method_class(method), dict(knobs)
    raise InputError(f"unknown method {name!r}: use one of {', '.join(sorted([*method_files(), *known]))}")


def parse_knob(cls: type[KVMethod], key: str, value: Any) -> Any:
    """A knob's value, from text if it is text, checked against the annotation of its field."""
    hint = typing.get_type_hints(cls.Args, vars(sys.modules[cls.__module__]))[key]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            for choice in typing.get_args(kind):
                if value == choice or (isinstance(value, str) and value == str(choice)):
                    return choice
        elif isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
    if isinstance(value, int) and float in kinds and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        if bool in kinds and value.lower() in ("true", "false", "1", "0", "yes", "no"):
            return value.lower() in ("true", "1", "yes")
        if type(None) in kinds and value.lower() == "none":
            return None
        for kind in (k for k in (int, float) if k in kinds):
            try:
                return kind(value)
            except ValueError:
                continue
    names = [
        " or ".join(map(repr, typing.get_args(k))) if typing.get_origin(k) is typing.Literal else k.__name__
        for k in kinds
    ]
    raise InputError(f"{cls.__module__.split('.')[-1]}: {key}={value!r} is not {' or '.join(names)}")


def make_args(cls: type[KVMethod], knobs: dict[str, Any]) -> Any:
    """The method's Args from knobs given as values or as text; its own checks (`__post_init__`) raise InputError."""
    return cls.Args(**{k: parse_knob(cls, k, v) for k, v in knobs.items()})


def parse_spec(spec: str, n_layer: int) -> list[str]:
    """`name`, or `0-1:full,2-:quest` -> a method name for each layer. Ranges are inclusive, later parts win."""
    if ":" not in spec:
        return [spec] * n_layer
    names: list[str | None] = [None] * n_layer
    for part in spec.split(","):
        where, _, name = part.partition(":")
        first, dash, last = where.strip().partition("-")
        if not (name and first.isdigit() and (not last or last.isdigit())):
            raise InputError(f"cannot read {part!r} in --method {spec!r}: write it like 0-1:full,2-:quest")
        i, j = int(first), (int(last) if last else n_layer - 1 if dash else int(first))
        if not i <= j < n_layer:
            raise InputError(f"layers {where} in --method {spec!r} are outside 0-{n_layer - 1}")
        names[i : j + 1] = [name.strip()] * (j - i + 1)
    if None in names:
        raise InputError(f"--method {spec!r} names no method for layer {names.index(None)}")
    return typing.cast("list[str]", names)


def build_cache(
    model: Transformer, spec: str, max_batch: int, max_seq_len: int, skip_layers: str = "auto", **knobs: Any
) -> nn.ModuleList:
    """One method per layer, all buffers allocated, after checking on the meta device that they fit.

    skip_layers: layers that stay dense, "auto" (the paper's choice in models of 16 layers or more), "none", or a list
    like "0,1,-1".
    """
    if max_batch < 1 or max_seq_len < 1:
        raise InputError(f"the cache needs a batch and a length of at least 1, got {max_batch} and {max_seq_len}")
    args, p = model.args, model.tok_embeddings.weight
    names = parse_spec(spec, args.n_layer)
    layers: list[tuple[type[KVMethod], Any]] = []
    calib = None
    resolved = {name: resolve(name) for name in set(names)}
    fields = {f.name for cls, _ in resolved.values() for f in dataclasses.fields(cls.Args)}
    if unknown := sorted(set(knobs) - fields):
        raise InputError(f"method {spec} has no knob {unknown[0]!r}: it takes {', '.join(sorted(fields)) or 'none'}")
    for layer, name in enumerate(names):
        cls, preset = resolved[name]
        skip: dict[str, Any] = {}
        if layer in _skipped(cls, skip_layers, args.n_layer):
            if cls.skip_knobs is None:
                cls, preset = resolve("full")
            else:
                skip = cls.skip_knobs
        own = {k: v for k, v in knobs.items() if k in {f.name for f in dataclasses.fields(cls.Args)}}
        layers.append((cls, make_args(cls, {**preset, **own, **skip})))
    if any(cls.calibrated for cls, _ in layers):
        calib = calibration_of(model)

    def build(device: torch.device) -> nn.ModuleList:
        rope = Rope(args, max_batch, max_seq_len if device.type != "meta" else 1, device)
        shapes = (CacheShape.of(args, i, max_batch, max_seq_len, p.dtype, device) for i in range(args.n_layer))
        return nn.ModuleList(
            cls(a, s, i, rope, calib) for i, ((cls, a), s) in enumerate(zip(layers, shapes, strict=True))
        )

    # methods that offload keep buffers named host_* in the memory of the host
    need = {True: 0, False: 0}
    for buffer, b in build(torch.device("meta")).named_buffers():
        need[buffer.rpartition(".")[2].startswith("host_")] += b.numel() * b.element_size()
    what = f"the KV cache of {spec} for batch {max_batch} and {max_seq_len} tokens"
    if p.device.type != "cpu":
        require_memory(need[True], torch.device("cpu"), f"{what}, its part on the host,", "lower --batch-size")
        need[True] = 0
    require_memory(
        sum(need.values()), p.device, what, "lower --batch-size, --max-new-tokens or the prompt, or compress more"
    )
    return build(p.device)


def calibration_of(model: Transformer) -> Calibration:
    """The model's calibration: the one set on it, or the file in its checkpoint's folder. InputError if there is none.

    Random weights have no keys worth a calibration: they get random bases, which cost the same time.
    """
    if model.calibration is None:
        if model.folder is None:
            return RandomCalibration(model.args)
        model.calibration = Calibration.load(model.folder, model.args)
    return model.calibration


def _skipped(cls: type[KVMethod], skip_layers: str, n_layer: int) -> set[int]:
    if skip_layers == "none":
        return set()
    if skip_layers == "auto":
        return {i % n_layer for i in cls.skip_layers} if n_layer >= 16 else set()
    try:
        layers = [int(i) for i in skip_layers.split(",")]
    except ValueError:
        raise InputError(f"skip_layers={skip_layers!r} is neither auto, none, nor a list like 0,1,-1") from None
    if bad := [i for i in layers if not -n_layer <= i < n_layer]:
        raise InputError(f"skip_layers names layer {bad[0]}, the model has {n_layer}")
    return {i % n_layer for i in layers}


def describe() -> str:
    """What --list-methods prints: each method, its paper, and its knobs with their defaults."""
    out = []
    for name in sorted(method_files()):
        cls = method_class(name)
        first = (sys.modules[cls.__module__].__doc__ or "").strip().split("\n")[0]
        out.append(f"{name}: {first}")
        if cls.paper:
            out.append(f"    paper: {cls.paper}")
        for f in dataclasses.fields(cls.Args):
            out.append(f"    {f.name}={f.default}  {f.metadata.get('help', '')}".rstrip())
        for preset, (method, knobs) in presets().items():
            if method == name:
                out.append(f"    preset {preset}: {', '.join(f'{k}={v}' for k, v in knobs.items())}")
    return "\n".join(out)
