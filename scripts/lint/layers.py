"""import-linter's layers contract, extended to top-level files: it reads only packages, but many of ours are files.

`make lint` runs it; pyproject.toml holds the layers.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from importlinter.contracts.layers import LayersContract

ROOT = Path(__file__).resolve().parents[2]


def imported(file: Path) -> list[tuple[int, str]]:
    """Line and name of every module that a file imports; `from a import b` counts as a.b."""
    out = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            out += [(node.lineno, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            out += [(node.lineno, f"{node.module}.{a.name}") for a in node.names]
    return out


class FileLayers(LayersContract):
    def check(self, graph: Any, verbose: bool) -> Any:
        files = sorted(ROOT.glob("*.py"))
        names = {f.stem for f in files}
        edges = [(a, b) for b in names & graph.modules for a in graph.find_modules_that_directly_import(b)]
        for name in names:
            if name in graph.modules:  # as an external module, which has no imports
                graph.remove_module(name)
            graph.add_module(name)
        for importer, name in edges:
            graph.add_import(importer=importer, imported=name)
        for file in files:
            for line, name in imported(file):
                found = next((m for m in (name, name.rpartition(".")[0]) if m in graph.modules), None)
                if found and found != file.stem:
                    graph.add_import(
                        importer=file.stem, imported=found, line_number=line, line_contents=f"import {found}"
                    )
        return super().check(graph, verbose)
