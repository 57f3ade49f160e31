"""What touches inductor's private names, for the releases of torch that it was tested on.

A compiled step on a CPU then starts faster, since the C++ compiler runs while the next graph is traced, and runs
faster: graphs are called directly, and from C++ (kernels/native/graphs.cpp), without torch.compile's checks at every
call. With another release (`KNOWN`), a step is torch.compile's functions, one after another: the same tokens, slower.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels import native

RELEASES = ("2.11", "2.12", "2.13")
KNOWN = torch.__version__.rpartition(".")[0] in RELEASES  # 2.13.0+cpu


def vector_options() -> dict[str, Any]:
    """The width of vectors that inductor chooses for this processor, as an option, and so in the key of its cache:
    else a cache filled on another processor gives code for wider vectors, which are then half written."""
    try:
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        return {"cpp.simdlen": pick_vec_isa().bit_width()}
    except (ImportError, AttributeError):  # a release that is not known
        return {}


def in_native_code(calls: list[CompiledCall]) -> Callable[..., Tensor] | None:
    """The calls in sequence, run without Python; None if one of them needs Python."""
    links = [link for call in calls if (link := call.link())]
    if not native.available() or len(links) < len(calls):
        return None
    try:
        return native.Graphs(links)
    except AttributeError:  # another release of torch may name them differently
        return None


class CompiledCall:
    """A compiled function with fixed first arguments, whose inductor graph is called directly with its tensors.

    At every call torch.compile checks types and numbers of its arguments to choose a graph, and looks up all weights
    and buffers by name. None of that changes between the steps on one cache, so it is done once and the tensors passed
    to the graph are kept. A function that assigns Python attributes goes through torch.compile at each call.
    """

    def __init__(self, function: Callable[..., Tensor], *fixed: Any):
        self.function, self.fixed = function, fixed
        self.graph: Callable[[list[Tensor]], Any] | None = None
        self.tensors: list[Tensor] = []  # inputs of the graph
        self.places: list[int | None] = []  # index of each argument among them; None: the graph does not read it

    def __call__(self, *args: Tensor) -> Tensor:
        if self.graph is None:
            return self.look_up(*args)
        tensors = self.tensors.copy()
        for place, x in zip(self.places, args, strict=True):
            if place is not None:
                tensors[place] = x
        return self.graph(tensors)[0]

    def compile(self, *args: Tensor) -> Any:
        """The graph for these arguments, compiled if there is none, and not run; None if torch.compile must run it."""
        if not KNOWN:
            return None
        try:
            with graph_calls(run=False):
                self.function(*self.fixed, *args)
        except NotRun as e:
            return e.graph

    def look_up(self, *args: Tensor) -> Tensor:
        """Call through torch.compile, which compiles a graph if none fits."""
        self.graph = None
        if not KNOWN:
            with many_kinds():
                return self.function(*self.fixed, *args)
        with graph_calls() as calls:
            out = self.function(*self.fixed, *args)
        if len(calls) != 1 or len(set(map(id, args))) != len(args):
            return out
        (graph, self.tensors, outputs), at = calls[0], {id(x): i for i, x in enumerate(calls[0][1])}
        if len(outputs) == 1 and outputs[0] is out:  # other outputs are assigned to attributes by torch.compile
            self.graph, self.places = graph.current_callable, [at.get(id(x)) for x in args]
        return out

    def link(self) -> tuple[str, list[Tensor | int]] | None:
        """The graph's library and its inputs: tensors, or the index of an argument. None if Python has to do more than
        call it."""
        parts = getattr(self.graph, "__closure__", None) or ()
        entry = next((part.cell_contents for part in parts if isinstance(part.cell_contents, Entry)), None)
        if entry is None or entry.n_given != len(self.tensors):  # it also gets constants
            return None
        given: list[Tensor | int] = list(self.tensors)
        for number, place in enumerate(self.places):
            if place is not None:
                given[place] = number
        return entry.file, given


_ONE = threading.RLock()  # what is replaced below is the process's: one thread compiles at a time


class NotRun(Exception):
    """Raised in place of running a graph."""

    def __init__(self, graph: Any):
        self.graph = graph


@contextmanager
def graph_calls(run: bool = True) -> Iterator[list[tuple[Any, list[Tensor], Sequence[Any]]]]:
    """Records inductor's graphs called within, each with its inputs and outputs. run=False: the first call raises
    NotRun."""
    from torch._inductor.output_code import CompiledFxGraph

    calls, original = [], CompiledFxGraph.__call__

    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        if not run:
            raise NotRun(graph)
        tensors = list(inputs)  # a copy, as the graph clears its list
        outputs = original(graph, inputs)
        calls.append((graph, tensors, outputs))
        return outputs

    with many_kinds(), mock.patch.object(CompiledFxGraph, "__call__", call):
        yield calls


def many_kinds() -> Any:
    """Within, a function may have a graph for every layer: there may be as many kinds of layers as layers."""
    from torch import _dynamo

    return _dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=100_000)


class Entry:
    """The C++ entry of an inductor graph; the first call waits for the compiler."""

    def __init__(self, load: Callable[[], Any]):
        self.load = load
        self.n_given = 0  # number of tensors of the last call

    def __call__(self, handles: list[Any]) -> Any:
        self.n_given = len(handles)
        return self.load()(handles)

    @property
    def file(self) -> str:
        return self.load().__self__.__file__  # the extension module of the function


@contextmanager
def compiling() -> Iterator[Callable[[], None]]:
    """Within, work that needs no Python lock runs in parallel to tracing: the C++ compiler, which a call of the graph
    waits for, and half a second of set-up in inductor. Yields a function that waits for all compilers."""
    with _ONE:
        yield from _compiling()


def _compiling() -> Iterator[Callable[[], None]]:
    if not KNOWN:
        yield lambda: None
        return
    from torch._dynamo import symbolic_convert
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401, imported before threads do

    wrappers, entries = codecache.CppWrapperCodeCache, []
    start: Callable[..., Any] = wrappers.load_pybinding_async

    def load(*args: Any, **kwargs: Any) -> Entry:
        entries.append(Entry(start(*args, submit_fn=submit, **kwargs)))
        return entries[-1]

    def submit(job: Any) -> Future[None]:
        """Compile a graph's parts in parallel, which inductor does one by one; then run the job, which links them."""
        lock, parts = job.args
        objects = [pool.submit(job.func, f"{lock}.{i}", (part,)) for i, part in enumerate(parts[:-1])]

        def link() -> None:
            for made in objects:
                made.result()
            job()

        return linkers.submit(link)

    def finish() -> None:
        for entry in entries:
            entry.load()

    with (
        ThreadPoolExecutor(torch.get_num_threads()) as pool,
        ThreadPoolExecutor() as linkers,
        contextlib.ExitStack() as stack,
    ):
        # create=True: names that another release of torch lacks are created and never called
        replace = lambda *what: stack.enter_context(mock.patch.object(*what, create=True))  # noqa: E731
        if native.available():  # its compiler knows this processor: a trial, of 3 s and more, tells nothing new
            replace(cpu_vec_isa.VecISA, "check_build", lambda *trial: True)
        replace(cpu_vec_isa, "valid_vec_isa_list", pool.submit(cpu_vec_isa.valid_vec_isa_list).result)
        replace(wrappers, "load_pybinding", load)
        replace(symbolic_convert, "get_funcname", lambda *line: None)  # for a log: it reads all sources, 0.2 s
        if not torch.cuda.is_available():
            replace(codecache, "triton_key", lambda: None)  # a hash of 0.3 s for absent kernels
        yield finish
