"""Compiled steps kept on disk: inductor's graphs for a CPU, with the names of the tensors that each takes.

Another process runs them without tracing or a compiler. They are kept beside the C++ library (kernels/native/build.py),
under a key of all that determines a graph: our code, torch, the processor, the model, the method and the cache's size.
With KV_FAST_STEPS=0 none is kept or used, nor with methods of the user's, which may import what no key knows of.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from engine.inductor import CompiledCall
from kernels import backend, native
from kernels.native.build import cache_path, library, ours, workshop
from runtime.machine import ROOT, SpareCores

CODE = ("model.py", "cache", "engine", "kernels", "kv_methods", "runtime", "weights")
MOST = 64  # steps kept; the least recently used is removed


@functools.cache
def code() -> str:
    """A hash of our code, torch and the C++ library, which is of this processor."""
    files = [file for x in CODE for file in sorted((ROOT / x).rglob("*.py") if (ROOT / x).is_dir() else [ROOT / x])]
    made_of = [*(f.read_text() for f in files), torch.__version__, library()._name]
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()


def allowed() -> bool:
    off = os.environ.get("KV_FAST_STEPS") == "0" or os.environ.get("KV_FAST_METHODS") or backend.BACKEND == "torch"
    return not off and native.available()


def made_of(model: nn.Module, identity: Any) -> str:
    """A hash of what a model's steps have in common, whatever a cache's size. identity: of weights and methods."""
    weights = [(name, *described(x)) for name, x in [*model.named_parameters(), *model.named_buffers()]
               if not name.startswith("cache.")]  # fmt: skip
    return key_of(code(), SpareCores.usual(), backend.BACKEND, weights, identity)


def key_of(*of: Any) -> str:
    """A hash of JSON, as the key of a step: `made_of`, size and sampling."""
    return hashlib.sha256(json.dumps(of, default=str).encode()).hexdigest()[:32]


class StoredStep:
    """The step of a key, on disk or not yet."""

    def __init__(self, key: str):
        self.folder = cache_path("steps") / key

    @property
    def there(self) -> bool:
        return (self.folder / "step.json").is_file()

    def load(self, model: nn.Module, given: Sequence[Tensor]) -> native.Graphs | None:
        """The graphs, on the tensors of this model and its cache, for arguments like `given`; None if there is no
        such step, or if it is damaged or not ours alone to write."""
        try:
            meta = json.loads((self.folder / "step.json").read_text())
            files = [self.folder / f"{i}.so" for i in range(len(meta["libraries"]))]
            if not all(map(ours, (self.folder, *files))) or list(map(digest, files)) != meta["libraries"]:
                return None
            tensors = named(model)
            if meta["given"] != [described(x) for x in given]:
                return None
            if any(name not in tensors or described(tensors[name]) != of for name, of in meta["tensors"].items()):
                return None
            links = [(str(files[i]), [tensors[x] if isinstance(x, str) else x for x in inputs])
                     for i, inputs in meta["links"]]  # fmt: skip
            with contextlib.suppress(OSError):  # a file system that is only read
                os.utime(self.folder)
            return native.Graphs(links)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None

    def keep(self, model: nn.Module, calls: Sequence[CompiledCall], given: Sequence[Tensor]) -> None:
        """Store the graphs of these calls, unless one takes a tensor that has no name."""
        tensors = named(model)
        name_of = {placed(x): name for name, x in tensors.items()}
        links, files = [], list[str]()
        for file, inputs in filter(None, (call.link() for call in calls)):
            names = [name_of.get(placed(x)) if isinstance(x, Tensor) else x for x in inputs]
            if None in names:
                return
            files += [] if file in files else [file]
            links.append((files.index(file), names))
        used = {x for _, names in links for x in names if isinstance(x, str)}
        steps = self.folder.parent
        try:
            meta = dict(links=links, libraries=[digest(Path(f)) for f in files], given=[described(x) for x in given],
                        tensors={name: described(tensors[name]) for name in used})  # fmt: skip
            steps.mkdir(mode=0o700, exist_ok=True)
            with workshop(steps.parent) as own:
                made = Path(own) / "step"
                made.mkdir(mode=0o700)
                for i, file in enumerate(files):
                    shutil.copyfile(file, made / f"{i}.so")
                    (made / f"{i}.so").chmod(0o700)
                (made / "step.json").write_text(json.dumps(meta))
                shutil.rmtree(self.folder, ignore_errors=True)
                made.rename(self.folder)
                for old in sorted(steps.iterdir(), key=lambda f: f.stat().st_mtime)[:-MOST]:
                    shutil.rmtree(old, ignore_errors=True)
        except OSError:  # a full disk, or inductor's files are gone: the next run compiles again
            pass


def named(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a step may read, parameters, buffers and plain attributes, also of ropes, which are no
    submodules, by name."""
    out = dict[str, Tensor]()
    for name, m in model.named_modules():
        rope = vars(m).get("rope")
        for part, of in ((name, m), (f"{name}.rope", rope)):
            if isinstance(of, nn.Module):
                for tensors in (of._parameters, of._buffers, vars(of)):
                    out |= {f"{part}.{key}": x for key, x in tensors.items() if isinstance(x, Tensor)}
    return out


def described(x: Tensor) -> list[Any]:
    return [[*x.shape], [*x.stride()], str(x.dtype)]


def placed(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
