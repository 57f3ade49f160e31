"""A line of text (cache/grammar.py) -> methods by layer -> the cache of a model."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from cache.base import CacheShape, KVMethod, connected
from cache.grammar import HERE, Part, method_files, own_folders, parse_spec, unknown_method
from cache.kept import kept
from cache.statistic import Statistic, unique
from kernels.rope import Rope
from runtime.errors import InputError, did_you_mean, note_once, short, warn_once
from runtime.machine import require_memory

LIMITS = (-(10**9), 10**9)  # of a knob that states none; the sum of two still fits an int32

# ---- methods, by file ----

REPLACED: dict[str, types.ModuleType] = {}  # modules of ours in whose place a user's file of that name is loaded


def _module(name: str) -> types.ModuleType:
    """Import the file of a method. Raises InputError with the reason in one line if it cannot be imported."""
    path, full = method_files()[name], f"kv_methods.{name}"
    package = importlib.import_module("kv_methods")
    package.__path__ = [*map(str, own_folders()), str(HERE)]
    importlib.invalidate_caches()
    loaded = sys.modules.get(full)
    if loaded is not None and loaded.__file__ != str(path):  # another folder's file of the same name
        del sys.modules[full]
        if loaded.__file__ is not None and Path(loaded.__file__).parent == HERE:
            REPLACED[name] = loaded
    if full not in sys.modules and path.parent == HERE and name in REPLACED:
        sys.modules[full] = REPLACED.pop(name)  # ours again, with the classes that others have imported
    try:
        return importlib.import_module(full)
    except InputError:
        raise
    except Exception as e:
        where = _line_of(e, path)
        raise InputError(f"{path}{where} does not import: {type(e).__name__}: {e}") from e


def _line_of(e: BaseException, path: Path) -> str:
    """The last line of the file that ran, as `:12`."""
    lines, tb = [getattr(e, "lineno", None)] if getattr(e, "filename", None) == str(path) else [], e.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == str(path):
            lines.append(tb.tb_lineno)
        tb = tb.tb_next
    return f":{lines[-1]}" if lines and lines[-1] else ""


def method_class(name: str) -> type[KVMethod]:
    """The single KVMethod subclass that the file `name` defines."""
    module = _module(name)
    found = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, KVMethod)]
    found = [c for c in found if c.__module__ == module.__name__ and not c.__name__.startswith("_")]
    if len(found) != 1:
        raise InputError(f"{module.__file__} must define one KVMethod subclass, found {len(found)}")
    if not isinstance(found[0].statistics, tuple):  # the comma is easily forgotten
        raise InputError(f"{module.__file__}: statistics must be a tuple, such as statistics = (Mine(),)")
    return found[0]


def presets() -> dict[str, tuple[str, dict[str, Any]]]:
    """Preset name -> (method, knobs), of every file that imports."""
    out = {}
    for name in sorted(method_files(), key=lambda name: (HERE / f"{name}.py").exists()):  # a copy's presets do not win
        try:
            table = getattr(_module(name), "PRESETS", {})
        except InputError:
            continue  # a broken file raises when it is named, and breaks nothing else
        out.update({preset: (name, knobs) for preset, knobs in table.items()})
    return out


def resolve(name: str) -> tuple[type[KVMethod], dict[str, Any]]:
    """A method's or preset's name -> its class and the preset's knobs. Raises InputError for an unknown name."""
    files = method_files()
    if (own := name.partition("-")[0]) in files:
        method_class(own)  # says what is wrong with a broken file, whose presets are not known
    known = {} if name in files else presets()
    if name in files or name in known:
        method, knobs = known.get(name, (name, {}))
        if (HERE / f"{method}.py").exists() and files[method].parent != HERE:
            warn_once(f"{files[method]} takes the place of kv-fast's own method {method}")
        return method_class(method), dict(knobs)
    raise unknown_method(name, [*files, *known])


# ---- knobs ----


def knob_names(cls: type[KVMethod]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls.Args)]


def parse_knob(cls: type[KVMethod], key: str, value: Any) -> Any:
    """A knob's value, parsed if it is text, and checked against the annotation of its field."""
    hint = _hints(cls)[key]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            for choice in typing.get_args(kind):
                if value == choice or (isinstance(value, str) and value == str(choice)):
                    return choice
        elif isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
    if isinstance(value, int) and float in kinds and not isinstance(value, bool):
        return float(value) if abs(value) <= LIMITS[1] else value  # beyond any limits: `check_limits` raises
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
        for kind in (k for k in kinds if hasattr(k, "parse")):  # TopP
            if (parsed := kind.parse(value)) is not None:
                return parsed
    names = [
        " or ".join(map(repr, typing.get_args(k)))
        if typing.get_origin(k) is typing.Literal
        else getattr(k, "form", k.__name__)
        for k in kinds
    ]
    raise InputError(f"{method_name(cls)}: {key}={short(value)} is not {' or '.join(names)}")


def check_limits(cls: type[KVMethod], key: str, value: Any) -> None:
    """Raises InputError unless a knob's number is within its `low` and `high`, or else LIMITS; NaN never is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    meta = next(f for f in dataclasses.fields(cls.Args) if f.name == key).metadata
    low, high = (LIMITS[i] if meta.get(end) is None else meta[end] for i, end in enumerate(("low", "high")))
    if not low <= value <= high:
        raise InputError(f"{method_name(cls)}: {key}={short(value)} is out of range: give {low:,} to {high:,}")


def _hints(cls: type[KVMethod]) -> dict[str, Any]:
    """Annotations of all knobs, each evaluated in the module of the class that declares it."""
    out: dict[str, Any] = {}
    for base in reversed(cls.Args.__mro__):
        if base is not object:  # only its own annotations: inherited ones belong to other modules
            out |= inspect.get_annotations(base, globals=vars(sys.modules[base.__module__]), eval_str=True)
    return out


def method_name(cls: type[KVMethod]) -> str:
    return cls.__module__.rpartition(".")[2]


def make_args(cls: type[KVMethod], knobs: Mapping[str, Any]) -> Any:
    """The method's Args, from knobs given as values or text. Raises InputError, also from its own `__post_init__`."""
    known = knob_names(cls)
    if unknown := [k for k in knobs if k not in known]:
        raise InputError(f"method {method_name(cls)} has no knob {short(unknown[0])}: {did_you_mean(unknown[0], known)}"
                         f"it takes {', '.join(known) or 'none'}")  # fmt: skip
    try:
        values = {k: parse_knob(cls, k, v) for k, v in knobs.items()}
        for key, value in values.items():
            check_limits(cls, key, value)
        return cls.Args(**values)
    except InputError as e:
        name = method_name(cls)
        raise InputError(str(e) if name in str(e) else f"{name}: {e}") from None


def inner_method(text: str) -> tuple[type[KVMethod], Any]:
    """A method used inside another, `quest` or `quest:budget=64:recent=8` -> its class and Args.

    Colons separate the inner method's knobs, because a comma ends a knob of the outer method.
    """
    name, *items = text.split(":")
    cls, knobs = resolve(name)
    for item in items:
        key, eq, value = item.partition("=")
        if not eq:
            raise InputError(f"cannot read {item!r} in {text!r}: write it like quest:budget=64:recent=8")
        knobs[key] = value
    return cls, make_args(cls, knobs)


# ---- the grammar ----

Methods = Sequence[tuple[type[KVMethod], Any]]  # the class and Args of every layer


def layer_parts(spec: str, n_layer: int) -> list[Part]:
    """The part for each layer; later parts win. Raises InputError for layers outside the model, or without a part."""
    out: list[Part | None] = [None] * n_layer
    for part in parse_spec(spec):
        last = n_layer - 1 if part.last is None else part.last
        if not part.first <= last < n_layer:
            raise InputError(f"layers {part.first}-{last} in --method {spec!r} are outside 0-{n_layer - 1}")
        out[part.first : last + 1] = [part] * (last - part.first + 1)
    if None in out:
        raise InputError(f"--method {spec!r} names no method for layer {out.index(None)}")
    return typing.cast("list[Part]", out)


def layer_methods(spec: str, n_layer: int, knobs: Mapping[str, Any] | None = None) -> list[tuple[type[KVMethod], Any]]:
    """The class and Args of every layer. `knobs` go to all parts that have them; a part's own knobs win.

    Two knobs apply to every method. skip_layers are layers that stay dense: "auto" (the paper's choice, in models of 16
    layers or more), "none", or a list like "0,1,-1". keep=full stores all keys and values beside it (kept.py).
    """
    given = dict(knobs or {})
    parts = layer_parts(spec, n_layer)
    all_keep = given.get("keep") == "full" and given.pop("keep")
    found = {name: resolve(name) for name in {part.name for part in parts}}  # reads folders: once for all layers
    taken = {"skip_layers"}.union(*(knob_names(cls) for cls, _ in found.values()))
    if unknown := sorted(set(given) - taken):
        inner = [f"{k}={v}" for part in parts for k, v in part.knobs.items() if k.endswith("_method")]
        hint = f"; a knob of {inner[0]} stands behind it, {inner[0]}:{unknown[0]}={given[unknown[0]]}" if inner else ""
        raise InputError(f"method {spec} has no knob {short(unknown[0])}: {did_you_mean(unknown[0], taken)}"
                         f"it takes {', '.join(sorted(taken))}{hint}")  # fmt: skip
    out = []
    for layer, part in enumerate(parts):
        cls, preset = found[part.name]
        own = {k: v for k, v in given.items() if k in knob_names(cls)} | part.knobs
        skip_layers = str(own.pop("skip_layers", given.get("skip_layers", "auto")))
        keep = (own.get("keep") == "full" and own.pop("keep")) or all_keep
        args = {**preset, **own}
        make_args(cls, args)  # reports wrong knobs even if every layer is skipped
        if layer in _skipped(cls, skip_layers, n_layer):
            cls, args = resolve("full") if cls.skip_knobs is None else (cls, args | cls.skip_knobs)
        made = make_args(cls, args)
        out.append((kept(cls) if keep and not cls.verifies else cls, made))  # type: ignore[arg-type]
    return out


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


def all_statistics(specs: Sequence[str] | None = None, n_layer: int = 1) -> list[Statistic]:
    """The statistics that the methods of `specs` need, each once; None: those of every file that imports."""
    if specs is not None:
        return unique(s for spec in specs for cls, args in layer_methods(spec, n_layer) for s in cls.needs(args))
    found: list[Statistic] = []
    for name in method_files():
        try:
            found += method_class(name).statistics
        except InputError:
            continue  # a broken file raises when it is named, and breaks nothing else
    return unique(found)


# ---- the cache of a model ----


def within_windows(layers: Methods, shapes: Sequence[CacheShape]) -> Methods:
    """`full` for the layers with a sliding window that their method cannot honour, also in a context that fits in it. A
    method that would get no layer stays, and refuses a window that is narrower than the context."""
    windows = [s.slides if not cls.supports_window else None for (cls, _), s in zip(layers, shapes, strict=True)]
    taken = {cls for (cls, _), window in zip(layers, windows, strict=True) if window is None}
    moved = {i: w for i, ((cls, _), w) in enumerate(zip(layers, windows, strict=True)) if w and cls in taken}
    if moved:
        sizes = ", ".join(map(str, sorted(set(moved.values()))))
        names = ", ".join(dict.fromkeys(method_name(layers[i][0]) for i in moved))
        note_once(f"{len(moved)} of {len(layers)} layers have a sliding window of {sizes} tokens and keep it with "
                  f"full: {names} takes the others")  # fmt: skip
    full = resolve("full")[0]
    return [(full, full.Args()) if i in moved else layer for i, layer in enumerate(layers)]


def build_cache(
    layers: Methods,
    shapes: Sequence[CacheShape],
    make_ropes: Callable[[torch.device], Sequence[Rope]],
    calibration: Callable[[], Any],
) -> nn.ModuleList:
    """One method per layer with all buffers allocated, after a check on the meta device that they fit.

    shapes: one per layer; make_ropes: makes the tables of each layer, on a device; calibration: called if a method
    needs one. A layer whose sliding window its method cannot honour gets `full`, if others have the method.
    """
    layers = within_windows(layers, shapes)
    needed = [s for cls, args in layers for s in cls.needs(args)]
    calib = calibration().require(needed) if needed else None

    def build(device: torch.device) -> nn.ModuleList:
        made = (
            cls(args, shape.on(device), i, rope, calibration_of(calib, cls, args, i, shape))
            for i, ((cls, args), shape, rope) in enumerate(zip(layers, shapes, make_ropes(device), strict=True))
        )
        return nn.ModuleList(connected(made))

    s = shapes[0]
    # methods that offload keep buffers named host_* in host memory
    need = {True: 0, False: 0}
    for buffer, b in build(torch.device("meta")).named_buffers():
        need[buffer.rpartition(".")[2].startswith("host_")] += b.numel() * b.element_size()
    spec = ", ".join(dict.fromkeys(method_name(cls) for cls, _ in layers))
    what = f"the KV cache of {spec} for batch {s.max_batch} and {s.max_seq_len} tokens"
    if s.device.type != "cpu":
        require_memory(need[True], torch.device("cpu"), f"{what}, its part on the host,", "lower --batch-size")
        need[True] = 0
    require_memory(
        sum(need.values()), s.device, what, "lower --batch-size, --max-new-tokens or the prompt, or compress more"
    )
    return build(s.device)


def calibration_of(calib: Any, cls: type[KVMethod], args: Any, layer: int, shape: CacheShape) -> Any:
    """The calibration for one layer: with several ranks only that of its own heads, unless the method needs all."""
    if calib is None or shape.ranks.size == 1 or cls.whole_calibration:
        return calib
    return calib.heads(layer, list(shape.own_heads), shape.layer_heads, cls.needs(args))


def describe() -> str:
    """The text of --list-methods: each method, its paper and its knobs with defaults, or why it does not import."""
    out = []
    for name in sorted(method_files()):
        try:
            cls = method_class(name)
        except InputError as e:
            out.append(f"{name}: broken: {e}")
            continue
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
