"""English and Python text that exists on every machine with this project: the training data of the shipped model, the
default data of calibration, and the text for perplexity.

Sources: the standard library's modules (code), `pydoc_data.topics` (the language reference), and the docstrings of
the standard library and of the packages that kv-fast itself installs (prose). A document belongs to the held-out
split by a hash of its name, so the split is the same on every machine and for every caller.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

DOCSTRING_PACKAGES = ("torch", "numpy", "sympy", "networkx", "jinja2", "triton", "mpmath", "fsspec", "safetensors")
MIN_DOCSTRING = 200  # characters: shorter ones are labels, not sentences


@dataclass
class Document:
    name: str
    kind: str  # "code" or "prose"
    held_out: bool
    text: str


def _held_out(name: str, percent: int) -> bool:
    return int(hashlib.md5(name.encode()).hexdigest(), 16) % 100 < percent


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _docstrings(text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [d for d in docs if d and len(d) > MIN_DOCSTRING and ">>>" not in d]


def _looks_like_data(text: str) -> bool:
    """Whether a text is a table of numbers or generated lines, which teach nothing about the language."""
    return sum(c.isdigit() for c in text) > 0.12 * len(text) or len(text) > 120 * (text.count("\n") + 1)


def _files(root: Path, skip: set[str]) -> list[tuple[str, Path]]:
    """Python files below a folder, with their relative names, outside folders named in `skip`."""
    found = ((p.relative_to(root), p) for p in sorted(root.rglob("*.py")))
    return [(str(name), p) for name, p in found if not skip & set(name.parts)]


@functools.cache
def _library() -> list[tuple[str, Path]]:
    skip = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "lib2to3", "idlelib"}
    return _files(Path(sysconfig.get_paths()["stdlib"]), skip)


@functools.cache
def _package(package: str) -> list[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    return [(f"{package}/{name}", p) for name, p in _files(root, {"test", "tests"})]


def _topics() -> dict[str, str]:
    return importlib.import_module("pydoc_data.topics").topics


def _of_library(name: str, path: Path) -> list[Document]:
    """The documents of a module of the standard library: its code and its docstrings."""
    text, out = _read(path), _held_out(name, 3)
    if not text or len(text) < 300 or _looks_like_data(text):
        return []
    return [Document(name, "code", out, text), *(Document(name, "prose", out, d) for d in _docstrings(text))]


def _of_package(name: str, path: Path, seen: set[str]) -> list[Document]:
    """A package module's docstrings that are not in `seen`; adds them to `seen`."""
    new = [d for d in dict.fromkeys(_docstrings(_read(path) or "")) if d not in seen and not _looks_like_data(d)]
    seen.update(new)
    return [Document(name, "prose", _held_out(name, 6), d) for d in new]


def _of_topic(name: str) -> list[Document]:
    return [Document(name, "prose", _held_out(name, 6), _topics()[name])]


def collect(
    packages: tuple[str, ...] = DOCSTRING_PACKAGES, progress: bool = False, only_held_out: bool = False
) -> list[Document]:
    """Every document, in a fixed order. Held out are 3 % of the library's files, and 6 % of topics and packages' files.

    only_held_out: read only the held-out files, which takes seconds.
    """
    docs: list[Document] = []
    for name, path in tqdm(_library(), desc="standard library", disable=not progress):
        if not only_held_out or _held_out(name, 3):
            docs += _of_library(name, path)
    for name in sorted(_topics()):
        if not only_held_out or _held_out(name, 6):
            docs += _of_topic(name)
    seen: set[str] = set()
    for package in packages:
        for name, path in tqdm(_package(package), desc=f"docstrings of {package}", disable=not progress):
            if not only_held_out or _held_out(name, 6):
                docs += _of_package(name, path, seen)
    return docs


def shuffled(kind: str, seed: int) -> Iterator[Document]:
    """Yields documents of a kind that are not held out, file by file in random order, reading files on demand."""
    seen: set[str] = set()
    files: list[Callable[[], list[Document]]] = [partial(_of_library, *file) for file in _library()]
    if kind == "prose":
        files += [partial(_of_topic, name) for name in sorted(_topics())]
        files += [partial(_of_package, *file, seen) for package in DOCSTRING_PACKAGES for file in _package(package)]
    random.Random(seed).shuffle(files)
    for read in files:
        yield from (d for d in read() if d.kind == kind and not d.held_out)
