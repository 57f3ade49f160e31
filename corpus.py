"""English and Python text that is on every machine this project runs on: what the shipped model is trained on,
what calibration uses by default, and what perplexity is measured on.

Sources: the standard library's modules (code), `pydoc_data.topics` (the language reference), and the docstrings of
the standard library and of the packages that kv-fast itself installs (prose). A document belongs to the held-out
split by a hash of its name, so the split is the same on every machine and for every caller.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
from dataclasses import dataclass
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
    """Tables of numbers and generated lines teach nothing about the language."""
    return sum(c.isdigit() for c in text) > 0.12 * len(text) or len(text) > 120 * (text.count("\n") + 1)


def collect(
    packages: tuple[str, ...] = DOCSTRING_PACKAGES, progress: bool = False, only_held_out: bool = False
) -> list[Document]:
    """Every document, in a fixed order. Code: 3 % held out by file; prose: 6 % by topic or by file.

    only_held_out reads those files alone, in seconds.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    docs: list[Document] = []
    skip = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "lib2to3", "idlelib"}
    files = [p for p in sorted(stdlib.rglob("*.py")) if not skip & set(p.relative_to(stdlib).parts)]
    for path in tqdm(files, desc="standard library", disable=not progress):
        name = str(path.relative_to(stdlib))
        if only_held_out and not _held_out(name, 3):
            continue
        text = _read(path)
        if not text or len(text) < 300 or _looks_like_data(text):
            continue
        out = _held_out(name, 3)
        docs.append(Document(name, "code", out, text))
        docs += [Document(name, "prose", out, d) for d in _docstrings(text)]
    topics = importlib.import_module("pydoc_data.topics").topics
    docs += [
        Document(k, "prose", _held_out(k, 6), topics[k]) for k in sorted(topics) if not only_held_out or _held_out(k, 6)
    ]
    seen: set[str] = set()
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        root = Path(next(iter(spec.submodule_search_locations)))
        files = [p for p in sorted(root.rglob("*.py")) if not {"test", "tests"} & set(p.relative_to(root).parts)]
        for path in tqdm(files, desc=f"docstrings of {package}", disable=not progress):
            name = f"{package}/{path.relative_to(root)}"
            if only_held_out and not _held_out(name, 6):
                continue
            for d in _docstrings(_read(path) or ""):
                if d not in seen and not _looks_like_data(d):
                    seen.add(d)
                    docs.append(Document(name, "prose", _held_out(name, 6), d))
    return docs
