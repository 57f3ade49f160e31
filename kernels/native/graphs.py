"""Inductor's graphs for a CPU, called one after another from C++ (graphs.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.native.build import library

ENTRY = "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"  # inductor_entry_impl, as g++ and clang call it


class Graphs:
    """Graphs, each of which takes the result of the one before; the last one returns int64.

    links: for each graph its library, and the tensors that it takes, or indices of arguments. Argument 0 is for the
    first graph; the others get the previous result instead. Raises AttributeError if a library has no such graph.
    """

    def __init__(self, links: Sequence[tuple[str, Sequence[Tensor | int]]]):
        # PyDLL keeps Python's lock: a graph releases it itself
        self.run = ctypes.PyDLL(library()._name).kvf_run_graphs
        self.run.restype = ctypes.c_char_p
        self.libraries = [ctypes.CDLL(file) for file, _ in links]
        given = [x for _, tensors in links for x in tensors]
        self.tensors = [x for x in given if isinstance(x, Tensor)]  # keeps them alive
        entries = [ctypes.cast(getattr(lib, ENTRY), ctypes.c_void_p).value for lib in self.libraries]
        self.links = (
            ctypes.c_int64(len(links)),
            int64s(entries),
            int64s([len(tensors) for _, tensors in links]),
            int64s([x._cdata if isinstance(x, Tensor) else x for x in given]),
        )

    def __call__(self, *args: Tensor) -> Tensor:
        """Run the graphs; args[0] is int64, like the result."""
        out = torch.empty_like(args[0])
        given = ctypes.c_int64(len(args)), int64s([x._cdata for x in args])
        if error := self.run(*self.links, *given, ctypes.c_void_p(out.data_ptr())):
            raise RuntimeError(error.decode())
        return out


def int64s(numbers: Sequence[Any]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)
