"""Copies of a session: snapshots in memory to return to, and files from which another process continues.

A file is a safetensors file with every buffer that prompts write, cut to its filled part. Methods do not declare that
part: a cache of the same methods with capacity for just these tokens, made on the meta device, has buffers of its size,
and the first slots of a larger cache hold the same, or `Storage.layout` names the exceptions. A file also holds every
number attribute that differs from an empty cache's. Constants follow from the calibration and are not stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cache.base import Storage, connected
from cache.calibration import Calibration, RandomCalibration, fingerprint, of_model, write_tensors
from cache.spec import Methods, method_name
from engine.decode import Session
from engine.pack import pack, unpack
from engine.sampling import noise_keys
from model import Transformer
from runtime.errors import InputError
from runtime.machine import DTYPES, as_path, check_fetched, require_memory
from weights import WeightFormat

VERSION = 2  # version of the file
TEXT = "text."  # prefix of tensors that belong to no method
PARTS = {"weights", "source", "dtype", "kv_dtype", "layers", "method", "calibration", "lengths", "step", "numbers",
         "layouts", "max_seq_len", "more", "packed", "text.prompts", "text.fed", "text.next"}  # fmt: skip


@dataclass
class State:
    """The state of a session beside its cache: the text of B rows in the cache, and the next token."""

    prompts: list[list[int]]
    fed: Tensor  # [B, n] int64, tokens decoded since the prompts
    next: Tensor  # [B] int64, drawn and not fed yet
    logits: Tensor | None  # [B, V] that `next` was drawn from; only right after a prompt

    @property
    def decoded(self) -> int:
        return self.fed.shape[1]


def state_of(session: Session) -> State:
    """All that `resume` needs beside the cache itself. Raises InputError if there is nothing in the cache, or if rows
    have gone on unevenly."""
    if not session.owns_cache:
        raise InputError("there is nothing in the cache to save: read a prompt first")
    if session.uneven:
        raise InputError("rows that speculate have gone on unevenly: save the cache after the prompt, or a row alone")
    fed = torch.stack(session.fed, 1) if session.fed else session.next.new_empty(len(session.next), 0)
    return State(session.prompts, fed, session.next, session.logits)


@torch.inference_mode()
def resume(session: Session, state: State) -> None:
    """Continue from a state, in a cache with the contents of that time. If a prompt's logits are known, the next token
    is drawn again, since the Sampling may differ; after decoded tokens it is the one drawn by the run that saved."""
    sampling, device = session.sampling, session.device
    lengths = torch.tensor([len(p) for p in state.prompts], device=device)
    fed, tokens, pos = state.fed.to(device), state.next.to(device), lengths + state.decoded
    texts = [p + row for p, row in zip(state.prompts, fed.tolist(), strict=True)]
    keys = torch.tensor(noise_keys(sampling.seed, state.prompts), device=device)
    given = sampling.given(keys, texts, session.model.args.vocab_size)
    logits = None if state.logits is None else state.logits.to(device)
    if logits is not None:
        tokens = sampling.draw(logits, pos - 1, *given)
    for rope in ropes_of(session.model.cache):
        rope.set_prompt(lengths)
    session.begin(tokens, pos, *given)
    session.prompts, session.fed, session.logits = state.prompts, list(fed.unbind(1)), logits
    session.decoded = state.decoded


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers that prompts write, which are all but its constants."""
    constants = getattr(module, "constants", ())
    return {name: b for name, b in module.named_buffers(recurse=False) if name not in constants}


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are numbers or flags, including a method's counters."""
    return {name: x for name, x in vars(module).items() if type(x) in (int, bool, float) and name != "training"}


class Snapshot:
    """A copy of a cache that can be restored any number of times: its buffers and its methods' number attributes."""

    def __init__(self, cache: nn.Module):
        every = [(m, buffers_of(m)) for m in cache.modules()]
        device = first_of(cache).shape.device
        on_device = (b.nbytes for _, buffers in every for name, b in buffers.items() if not name.startswith("host_"))
        require_memory(sum(on_device), device, "a second copy of the KV cache", "ask one question at a time")
        self.saved = [
            (m, {name: b.to("cpu" if name.startswith("host_") else b.device, copy=True) for name, b in buffers.items()},
             numbers_of(m))
            for m, buffers in every
        ]  # fmt: skip

    def restore(self) -> None:
        for m, buffers, numbers in self.saved:
            for name, b in buffers.items():
                m.get_buffer(name).copy_(b)
            vars(m).update(numbers)


# ---- the filled parts of buffers ----


def first_of(cache: nn.Module) -> Any:
    """The method of the first layer."""
    return next(cache.children())


def ropes_of(cache: nn.Module) -> set[Any]:
    return {m.rope for m in cache.children()}


def sized(cache: nn.Module, tokens: int, decoded: int | None) -> nn.ModuleList:
    """A cache of the same methods for this many tokens, at most `decoded` of them decoded, on the meta device."""

    def small(m: Any) -> Any:
        shape = replace(m.shape.on("meta"), max_seq_len=tokens, max_new_tokens=decoded)
        return type(m)(m.args, shape, m.layer, m.rope, m.calib)

    return nn.ModuleList(connected(small(m) for m in cache.children()))


def layout_of(m: nn.Module, tokens: int) -> dict[str, Any]:
    """A module's `layout`. Raises InputError if it has buffers and does not say how tokens lie in them."""
    if (said := m.layout(tokens) if isinstance(m, Storage) else None) is None and (names := list(buffers_of(m))):
        raise InputError(f"{type(m).__name__} does not say how tokens lie in its buffer {names[0]}, so it cannot be "
                         "saved or loaded: give it a `layout` (cache/base.py)")  # fmt: skip
    return said or {}


def check_layouts(cache: nn.Module) -> None:
    """Raises InputError if a cache cannot be saved."""
    for m in cache.modules():
        layout_of(m, 1)


def filled(cache: nn.Module, pos: Tensor, decoded: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The filled parts of a cache's buffers, by name, and their layouts. pos [B]: the rows' newest tokens."""
    tokens, out, layouts = int(pos.max()) + 1, dict[str, Tensor](), dict[str, Any]()
    # one token more, the next: methods that moved tokens to make room for it need slots for the moved ones
    small = dict(sized(cache, tokens + 1, decoded + 1).named_modules())
    for name, m in cache.named_modules():
        here, twin, buffers = layout_of(m, tokens), small.get(name, nn.Module()), buffers_of(m)
        there, sizes = layout_of(twin, tokens), {buffer: b.shape for buffer, b in buffers_of(twin).items()}
        for buffer, b in buffers.items():
            rule, size = here.get(buffer), sizes.get(buffer, b.shape)
            if buffer in sizes and rule != there.get(buffer):
                if (carried := twin.carry(buffer, buffers, rule, pos.to(b.device))) is None:
                    size = b.shape  # as it is, all of it
                else:
                    b, rule = carried, there.get(buffer)
            out[f"{name}.{buffer}"] = b[tuple(slice(min(n, most)) for n, most in zip(size, b.shape, strict=True))]
            layouts |= {} if rule is None else {f"{name}.{buffer}": rule}
    return out, layouts


def counted(cache: nn.Module) -> dict[str, dict[str, Any]]:
    """For each module, the number attributes that differ from those of an empty cache."""
    shape, out = first_of(cache).shape, {}
    fresh = dict(sized(cache, shape.max_seq_len, shape.max_new_tokens).named_modules())
    for name, m in cache.named_modules():
        was = numbers_of(fresh[name])
        if changed := {k: v for k, v in numbers_of(m).items() if was.get(k) != v}:
            out[name] = changed
    return out


# ---- the identity of a cache ----


def identity(model: Transformer, spec: str, layers: Methods, source: str, form: WeightFormat | None) -> dict:
    """Everything but the tokens that determines a cache's contents. spec: the text of `layers`; source: the checkpoint
    and the format of its weights, in the user's words."""
    if model.args.ranks.size > 1:
        raise InputError(f"a cache of {model.args.ranks.size} processes cannot be saved or loaded: use one process")
    calib = model.find_calibration() if any(cls.needs(args) for cls, args in layers) else None
    weights, older = ((fingerprint(model.folder, v) if model.folder is not None else source) for v in (2, 1))
    out = dict(
        version=VERSION,
        source=source,
        weights=[weights, of_model(model.args), None if form is None else asdict(form)],
        dtype=dtype_name(model.dtype),
        kv_dtype=dtype_name(model.kv_dtype or model.dtype),
        method=spec,
        layers=[[method_name(cls), asdict(args)] for cls, args in layers],
        calibration=calib and calibration_id(calib),
        older=[older, calib and calibration_id(calib, 1)],
    )
    knobs = [str(x) for _, args in layers for x in asdict(args).values() if isinstance(x, str)]
    if files := [x for x in dict.fromkeys(knobs) if x and Path(x).is_file()]:  # such as gates
        out["files"] = [hashlib.sha256(Path(x).read_bytes()).hexdigest() for x in files]
    return json.loads(json.dumps(out, default=str))


def dtype_name(dtype: torch.dtype) -> str:
    return next((name for name, d in DTYPES.items() if d == dtype), str(dtype))


def calibration_id(calib: Calibration, version: int = 2) -> str:
    if isinstance(calib, RandomCalibration):
        return f"random {calib.seed}"
    if calib.path is not None:
        return fingerprint(calib.path, version)
    return digest("", calib.tensors)


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    """A hash of a text and of the names, dtypes, shapes and bytes of tensors."""
    h = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)  # of any stride, [1] too
        h.update(f"{name} {t.dtype} {[*t.shape]}".encode())
        h.update(t.flatten().view(torch.uint8).numpy().data)
    return h.hexdigest()


def differences(saved: Sequence[Any], ours: Sequence[Any]) -> Iterator[str]:
    """Yields the differences between two lists of [method, knobs] by layer, as text."""
    for layer, ((name, knobs), (our_name, our_knobs)) in enumerate(zip(saved, ours, strict=True)):
        if name != our_name:
            yield f"layer {layer} is {name} there and {our_name} here"
        else:
            yield from (f"layer {layer} has {k}={knobs.get(k)} there and {k}={our_knobs.get(k)} here"
                        for k in knobs | our_knobs if our_knobs.get(k) != knobs.get(k))  # fmt: skip


# ---- the file ----


def save(
    path: Path,
    cache: nn.Module,
    state: State,
    of: dict[str, Any],
    packed: tuple[float, Calibration] | None = None,
    **more: Any,
) -> None:
    """Write a cache and the state of its session, under another name that is then renamed. of: its `identity`; packed:
    the step and the calibration of a small file (pack.py); more: metadata for the caller. Raises InputError if it
    cannot be written."""
    pos = torch.tensor([len(p) for p in state.prompts]) + state.decoded - 1
    tensors, layouts = filled(cache, pos, state.decoded)
    how = None
    if packed is not None:
        tensors, buffers = pack(tensors, cache, (pos + 1).tolist(), *packed)
        how = dict(calibration=calibration_id(packed[1]), buffers=buffers)
    S = max(map(len, state.prompts))
    tokens = [p + [0] * (S - len(p)) for p in state.prompts]
    tensors |= {f"{TEXT}prompts": torch.tensor(tokens, dtype=torch.int32), f"{TEXT}fed": state.fed.int()}
    tensors |= {f"{TEXT}next": state.next} | ({} if state.logits is None else {f"{TEXT}logits": state.logits})
    shape, ahead = first_of(cache).shape, max(rope.ahead for rope in ropes_of(cache))
    meta = {k: x for k, x in of.items() if k != "older"}
    meta |= dict(lengths=[len(p) for p in state.prompts], step=state.decoded, max_seq_len=shape.max_seq_len,
                     numbers=counted(cache), layouts=layouts, more=more, packed=how, ahead=ahead)  # fmt: skip
    text = json.dumps(meta)
    write_tensors(path, tensors, {"cache": text, "checksum": digest(text, tensors)})


class CacheFile:
    """A file that `save` wrote, read and verified. An InputError says what is wrong with it and what to do."""

    def __init__(self, path: str | Path):
        self.path = as_path(path, "a saved cache")
        if not self.path.is_file():
            raise InputError(f"there is no file {path}: generate.py --save-cache {path} writes one")
        check_fetched(self.path)
        try:
            with safe_open(self.path, framework="pt") as f:
                metadata = f.metadata() or {}
                self.tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118, a safe_open is no dict
            text = metadata.get("cache")
            meta = None if text is None else json.loads(text)
        except (SafetensorError, OSError, ValueError, RecursionError) as e:
            raise InputError(f"cannot read {path}: {e}; save it again") from None
        if text is None or not isinstance(meta, dict):
            raise InputError(f"{path} is no saved cache: name a file that --save-cache wrote")
        self.meta: dict[str, Any] = meta
        if (version := self.meta.get("version")) != VERSION:
            raise InputError(f"{path} is of version {version}, expected {VERSION}: save it again")
        if digest(text, self.tensors) != metadata.get("checksum"):
            raise InputError(f"{path} is damaged, its checksum is not that of its contents: save it again")
        if missing := PARTS - meta.keys() - self.tensors.keys():
            raise InputError(f"{path} has no {min(missing)}: save it again")

    def check(self, of: dict[str, Any]) -> None:
        """Raises InputError unless the file's cache has this `identity`."""
        path, meta = self.path, self.meta
        if not str(meta["weights"][0]).startswith("2-"):  # of v0.4 or before, or of random weights
            of = of | dict(weights=[of["older"][0], *of["weights"][1:]], calibration=of["older"][1])
        if meta["weights"] != of["weights"]:
            raise InputError(f"{path} was saved with the weights of {meta['source']}, not of {of['source']}: give the "
                             "--checkpoint and --weights that it was saved with")  # fmt: skip
        for key, flag, what in (("dtype", "--dtype", "computed"), ("kv_dtype", "--kv-dtype", "held")):
            if meta[key] != of[key]:
                raise InputError(f"{path} was {what} in {meta[key]}, this run is in {of[key]}: give {flag} {meta[key]}")
        if meta["layers"] != of["layers"]:
            raise InputError(f"{path} was saved with --method {meta['method']}, not {of['method']} "
                             f"({next(differences(meta['layers'], of['layers']))}): give the same")  # fmt: skip
        if meta.get("files", of.get("files")) != of.get("files"):  # older files do not say
            raise InputError(f"{path} was saved with other contents of the file that a knob of {meta['method']} names: "
                             "save it again")  # fmt: skip
        if meta["calibration"] != of["calibration"]:
            raise InputError(
                f"{path} was saved with another calibration: give the --calibration that it was saved with"
            )

    @property
    def given(self) -> tuple[str, dict[str, str]]:
        """The method and its further knobs, as text."""
        method, knobs = self.meta.get("given", (self.meta["method"], {}))  # older files do not say
        return str(method), knobs

    def check_chat(self, chat: bool) -> None:
        """Raises InputError unless the prompt was, or was not, written by a chat template."""
        if (was := self.meta["more"].get("chat", False)) != chat:
            raise InputError(f"{self.path} was saved with{'' if was else 'out'} a chat template: "
                             f"{'add' if was else 'drop'} --chat")  # fmt: skip

    @property
    def state(self) -> State:
        text = {name.removeprefix(TEXT): t for name, t in self.tensors.items() if name.startswith(TEXT)}
        prompts = [p[:n].tolist() for p, n in zip(text["prompts"], self.meta["lengths"], strict=True)]
        return State(prompts, text["fed"].long(), text["next"], text.get("logits"))

    def follow(self, cache: nn.Module) -> None:
        """Take the saved keys' rotary frequencies, where they depend on the length of a text. Raises InputError if this
        run's tokens need others."""
        for rope in ropes_of(cache) if "ahead" in self.meta else ():  # older files do not say
            rope.follow(self.meta["lengths"], self.meta["ahead"])

    def unpack(self, cache: nn.Module, calib: Calibration) -> None:
        """Of a small file (pack.py): restore the buffers of this cache's methods. Raises InputError if it was packed
        with another calibration."""
        how = self.meta["packed"]
        if calibration_id(calib, 2 if how["calibration"].startswith("2-") else 1) != how["calibration"]:
            raise InputError(f"{self.path} was packed with another calibration: give the --calibration that it was "
                             "saved with")  # fmt: skip
        for rope in ropes_of(cache):
            rope.set_prompt(torch.tensor(self.meta["lengths"]))
        self.tensors |= unpack(self.tensors, how["buffers"], cache, calib)

    def fill(self, cache: nn.Module) -> None:
        """Fill an empty cache, which may be larger, from the file. Raises InputError if it does not fit."""
        tokens, room = max(self.meta["lengths"]) + self.meta["step"], first_of(cache).shape.max_seq_len
        named = dict(cache.named_modules())
        found = [(name, f"{name}.{buffer}", m, buffer) for name, m in named.items() for buffer in buffers_of(m)]
        left = {key for key in self.tensors if not key.startswith(TEXT)} - {key for _, key, _, _ in found}
        if left:
            raise InputError(f"{self.path} holds {min(left)}, which no method of this cache has: save it again")
        known = {(name, k) for name, m in named.items() for k in numbers_of(m)}
        if not known >= {(name, k) for name, numbers in self.meta["numbers"].items() for k in numbers}:
            raise InputError(f"{self.path} counts what its methods do not: save it again")
        saved, pos = dict(self.tensors), torch.tensor(self.meta["lengths"]) + self.meta["step"] - 1
        for name, key, m, buffer in found:  # check everything before writing anything
            b, was = m.get_buffer(buffer), self.meta["layouts"].get(key)
            method = type(named[name.partition(".")[0]]).__name__
            if key in saved and layout_of(m, tokens).get(buffer) != was:
                own = {x: self.tensors[k].to(b.device) for n, k, _, x in found if n == name and k in self.tensors}
                carried = m.carry(buffer, own, was, pos.to(b.device))
                del saved[key]
                saved |= {} if carried is None else {key: carried}
            if key not in saved:
                raise InputError(f"{self.path} is of a cache for {self.meta['max_seq_len']} tokens, and {method} lays "
                                 f"out {buffer} differently in {room}: save with --max-seq-len {room}")  # fmt: skip
            size, most = saved[key].shape, b.shape
            same = len(size) == len(most) and saved[key].dtype == b.dtype
            if not same or any(n > slots for n, slots in zip(size, most, strict=True)):
                raise InputError(f"{self.path} holds {tokens} tokens, {key} is {[*size]}, and the cache has room for "
                                 f"{[*most]}: give a larger --max-seq-len")  # fmt: skip
        for _, key, m, buffer in found:
            m.get_buffer(buffer)[tuple(map(slice, saved[key].shape))].copy_(saved[key])
        for name, numbers in self.meta["numbers"].items():
            named[name].__dict__.update(numbers)
