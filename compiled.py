"""A decode step compiled by torch.compile and inductor.

On CUDA the whole step is one graph. On a CPU one graph serves all layers of a kind: what takes the time, tracing and
inductor, is done for one of SmolLM2's 30 layers, and for the embedding and the choice of a token. C++ calls the graphs
of a step (kernels/native/graphs.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from kernels import native, op
from model import Transformer, decode_layer, verify_layer

# A graph costs the C++ compiler 4 s of a core, most of it for headers. So where there are more kinds of layers than
# this, as where each has a budget of its own, GROUP further layers share a graph.
KINDS = 5
GROUP = 4
Step = Callable[..., Tensor]  # tokens and pos [B], then what Sampling.draw takes besides -> the next tokens [B]


def eager_step(model: Transformer, choose: Step) -> Step:
    """`Transformer.decode`, and the choice of a token: choose(logits [B, V], pos, *given) -> tokens [B]."""

    def step(tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        # a token that stands for an error may be negative, and is fed before it is read
        return choose(model.decode(tokens.clamp(min=0), pos), pos, *given)

    return step


def compile_step(model: Transformer, choose: Step, like: Step | None = None) -> Step:
    """`eager_step`, compiled on the cache that is set up.

    like: a compiled step on the same cache that chooses otherwise: its layers serve this one, too.
    """
    if model.device.type == "cuda":
        return torch_compile(eager_step(model, choose), model.device, guard_filter_fn=arguments_alone)

    def head(x: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        return choose(model.logits(x), pos, *given)

    return CompiledStep(model, torch_compile(head, model.device), like if isinstance(like, CompiledStep) else None)


def compile_verify(model: Transformer, choose: Step) -> Step:
    """Of n tokens a row, by exact attention: tokens [B, n] at pos [B] on, then what `choose` takes besides ->
    choose(logits [B, n, V], pos, *given), [B, n]. On a CPU compiled by kinds of layers, as a step is."""

    def whole(tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        return choose(model.verify(tokens.clamp(min=0), pos), pos, *given)

    def head(x: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        return choose(model.logits(x), pos, *given)

    if model.device.type == "cuda":
        return torch_compile(whole, model.device, guard_filter_fn=arguments_alone)
    return CompiledStep(model, torch_compile(head, model.device), None, verify_group)


def torch_compile(function: Callable[..., Any], device: torch.device, **options: Any) -> Callable[..., Any]:
    """torch.compile with fullgraph, so that a graph break is an error and not a slowdown."""
    # code of its own: what is compiled for one cache is never tried for another
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    # a cache of another size, as the last batch of a run may have, is another static graph, not one of any size
    return torch.compile(own, fullgraph=True, dynamic=False, options=compiler_options(device) | options)


def compiler_options(device: torch.device, graphs: bool = True) -> dict[str, Any]:
    """Inductor's options for a decode step. graphs: on CUDA, whether inductor captures CUDA graphs.

    On CUDA, products of one row are inductor's own, tuned: they reach the bandwidth of memory, a library's do not. On a
    CPU a graph calls its operators from C++, compiled apart with little optimization: from Python, a step of the
    shipped model took 0.5 ms longer, and 0.13 ms longer where sizes, which are part of what was compiled, are asserted
    at every step. Headers are not precompiled: that takes 10 s and saves 1 s a file, and 0.3 s go at every start.
    """
    if device.type != "cuda":
        options: dict[str, Any] = {
            "cpp_wrapper": True,
            "cpp_wrapper_build_separate": True,
            "cpp_cache_precompile_headers": False,
            "size_asserts": False,
        }
        if native.available():
            options["aot_inductor.custom_ops_to_c_shims"] = op.Declarations()
        return options
    return {"coordinate_descent_tuning": True, "triton.cudagraphs": graphs}


def arguments_alone(guards: Sequence[Any]) -> list[bool]:
    """Which of torch.compile's guards a whole step checks: those of its arguments' shapes and of torch's settings.

    The rest, over 1000, took 0.4 ms a step. They ask whether model and cache are what was compiled: they are, since
    every step is compiled for its own, and the contract of a method is that one graph serves all steps.
    """
    return [g.name in ("", "tokens", "pos") or g.name.startswith("given") for g in guards]


def embed(model: Transformer, tokens: Tensor, pos: Tensor) -> Tensor:
    """tokens [B] -> the first layer's input; one that stands for an error may be negative."""
    return model.embed(tokens.clamp(min=0))


def decode_group(layers: list[Any], x: Tensor, pos: Tensor) -> Tensor:
    """`decode_layer` of each of these parts of `Transformer.decode_parts`."""
    for block, method, ahead in layers:
        x = decode_layer(block, method, ahead, x, pos)
    return x


def verify_group(layers: list[Any], x: Tensor, pos: Tensor) -> Tensor:
    """`verify_layer` of each."""
    for block, method, _ in layers:
        x = verify_layer(block, method, x, pos)
    return x


class Layers:
    """Compiled calls up to the last layer, for all steps on one cache. key: what they were looked up for last."""

    def __init__(self, model: Transformer, group: Callable[..., Tensor]):
        self.hidden, self.parts = (model.args.dim, model.dtype), model.decode_parts()
        self.group = torch_compile(group, model.device)
        self.calls = [CompiledCall(torch_compile(embed, model.device), model)]
        self.key: Any = None

    def compile(self, tokens: Tensor, pos: Tensor, progress: Any) -> Tensor:
        """Those that are missing; they are not run. The result is like what the last layer gives."""
        dim, dtype = self.hidden
        x = torch.empty(*tokens.shape, dim, dtype=dtype)
        self.calls[0].compile(tokens, pos)
        for call in self.calls[1:]:
            call.compile(x, pos)
        kinds, rest = set[int](), self.parts if len(self.calls) == 1 else []
        while rest:
            few = rest[: 1 if len(kinds) <= KINDS else GROUP]
            self.calls.append(CompiledCall(self.group, few))
            kinds.add(id(self.calls[-1].compile(x, pos)))
            rest = rest[len(few) :]
            progress.update(len(few))
        return x


class CompiledStep:
    """A decode step on a CPU, of compiled graphs: the embedding, one for each kind of layer, the choice of a token.

    The embedding alone takes 0.2 ms in eager mode, whose code is no longer in the processor's cache after a step.
    """

    def __init__(
        self, model: Transformer, head: Step, like: CompiledStep | None, group: Callable[..., Tensor] = decode_group
    ):
        self.head = CompiledCall(head)
        self.layers: Layers = like.layers if like else Layers(model, group)
        self.key: Any = None  # what the graphs were looked up for
        self.graphs: Step | None = None

    def __call__(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self(tokens, pos, *given)
        key: Any = (*(x.shape for x in (tokens, pos, *given)), torch.get_num_threads())
        if key != self.key or self.key is not self.layers.key:
            return self.look_up(key, tokens, pos, *given)
        if self.graphs is not None:
            return self.graphs(tokens, pos, *given)
        x = tokens
        for call in self.layers.calls:
            x = call(x, pos)
        return self.head(x, pos, *given)

    def look_up(self, key: Any, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        """A step through torch.compile. It compiles what is missing: first it traces all of it, meanwhile g++ runs."""
        layers, bar = (
            self.layers,
            tqdm(desc="tracing", total=len(self.layers.parts), unit="layer", disable=None, leave=False),
        )
        with compiling() as finish:
            with bar:
                x = layers.compile(tokens, pos, bar)
                bar.set_description_str("tracing the choice of a token")
                self.head.compile(x, pos, *given)
                bar.set_description_str("waiting for the C++ compiler")
                finish()
            x = tokens
            for call in layers.calls:
                x = call.look_up(x, pos)
            out = self.head.look_up(x, pos, *given)
        if key != layers.key:
            layers.key = key
        self.key = layers.key  # the same object, until they are looked up for another key
        self.graphs = in_native_code([*layers.calls, self.head])
        return out


def in_native_code(calls: list[CompiledCall]) -> Step | None:
    """These calls, one after another, without Python; None if one of them needs it."""
    links = [link for call in calls if (link := call.link())]
    if not native.available() or len(links) < len(calls):
        return None
    try:
        return native.Graphs(links)
    except AttributeError:  # another release of torch may call them otherwise
        return None


class CompiledCall:
    """A compiled function and its first arguments, called as inductor made it with the tensors that belong to them.

    torch.compile looks at its arguments again at every call: at their types and numbers, to choose a graph, and for all
    weights and buffers by their names. Between the steps of one cache nothing of that changes, so it is asked once, and
    what it passed on to the graph is kept. A function that changes what Python remembers is asked for at each call.
    """

    def __init__(self, function: Step, *fixed: Any):
        self.function, self.fixed = function, fixed
        self.graph: Callable[[list[Tensor]], Any] | None = None
        self.tensors: list[Tensor] = []  # that the graph gets
        self.places: list[int | None] = []  # of the arguments among them; None: the graph does not read it

    def __call__(self, *args: Tensor) -> Tensor:
        if self.graph is None:
            return self.look_up(*args)
        tensors = self.tensors.copy()
        for place, x in zip(self.places, args, strict=True):
            if place is not None:
                tensors[place] = x
        return self.graph(tensors)[0]

    def compile(self, *args: Tensor) -> Any:
        """The graph for such arguments, which is compiled if there is none, and not run."""
        try:
            with graph_calls(run=False):
                self.function(*self.fixed, *args)
        except NotRun as e:
            return e.graph

    def look_up(self, *args: Tensor) -> Tensor:
        """Through torch.compile, which compiles a graph if none fits."""
        self.graph = None
        with graph_calls() as calls:
            out = self.function(*self.fixed, *args)
        if len(calls) != 1 or len(set(map(id, args))) != len(args):
            return out
        (graph, self.tensors, outputs), at = calls[0], {id(x): i for i, x in enumerate(calls[0][1])}
        if len(outputs) == 1 and outputs[0] is out:  # else torch.compile assigns the rest to attributes
            self.graph, self.places = graph.current_callable, [at.get(id(x)) for x in args]
        return out

    def link(self) -> tuple[str, list[Tensor | int]] | None:
        """The library of the graph, and the tensors that it gets, or the number of the argument; None if Python has to
        do more than to call it."""
        parts = getattr(self.graph, "__closure__", None) or ()
        entry = next((part.cell_contents for part in parts if isinstance(part.cell_contents, Entry)), None)
        if entry is None or entry.n_given != len(self.tensors):  # it gets constants, too
            return None
        given: list[Tensor | int] = list(self.tensors)
        for number, place in enumerate(self.places):
            if place is not None:
                given[place] = number
        return entry.file, given


class NotRun(Exception):
    """A graph was called that was not to be run."""

    def __init__(self, graph: Any):
        self.graph = graph


@contextmanager
def graph_calls(run: bool = True) -> Iterator[list[tuple[Any, list[Tensor], Sequence[Any]]]]:
    """Inductor's graphs that are called inside, each with the tensors it got and those it gave. run=False: NotRun at
    the first one."""
    from torch import _dynamo
    from torch._inductor.output_code import CompiledFxGraph

    calls, original = [], CompiledFxGraph.__call__

    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        if not run:
            raise NotRun(graph)
        tensors = list(inputs)  # the graph clears its own
        outputs = original(graph, inputs)
        calls.append((graph, tensors, outputs))
        return outputs

    # layers may be of as many kinds as there are
    limits = _dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=100_000)
    with limits, mock.patch.object(CompiledFxGraph, "__call__", call):
        yield calls


class Entry:
    """A graph of inductor as its C++ code is called; the first call waits for the compiler."""

    def __init__(self, load: Callable[[], Any]):
        self.load = load
        self.n_given = 0  # tensors of the last call

    def __call__(self, handles: list[Any]) -> Any:
        self.n_given = len(handles)
        return self.load()(handles)

    @property
    def file(self) -> str:
        return self.load().__self__.__file__  # the module that it is a function of


@contextmanager
def compiling() -> Iterator[Callable[[], None]]:
    """Inside, what needs no lock of Python runs beside the tracing: the C++ compiler, which is waited for where a graph
    is called, and half a second's work that inductor asks for first. What is yielded waits for all compilers."""
    from torch._dynamo import symbolic_convert
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401, imported before threads do

    wrappers, entries = codecache.CppWrapperCodeCache, []
    start: Callable[..., Any] = wrappers.load_pybinding_async

    def load(*args: Any, **kwargs: Any) -> Entry:
        entries.append(Entry(start(*args, submit_fn=submit, **kwargs)))
        return entries[-1]

    def submit(job: Any) -> Future[None]:
        """What inductor compiles one after another for a graph, beside each other; then the job, which links it."""
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

    with ThreadPoolExecutor(torch.get_num_threads()) as pool, ThreadPoolExecutor() as linkers:
        sets = pool.submit(instruction_sets, cpu_vec_isa.valid_vec_isa_list)
        with contextlib.ExitStack() as stack:
            # what another release of torch may not have is created, and not asked for
            replace = lambda *what: stack.enter_context(mock.patch.object(*what, create=True))  # noqa: E731
            replace(cpu_vec_isa, "valid_vec_isa_list", sets.result)
            replace(wrappers, "load_pybinding", load)
            replace(symbolic_convert, "get_funcname", lambda *line: None)  # for a log: it reads all sources, 0.2 s
            if not torch.cuda.is_available():
                replace(codecache, "triton_key", lambda: None)  # a hash of 0.3 s, for kernels that there are not
            yield finish


def instruction_sets(ask: Callable[[], list[Any]]) -> list[Any]:
    """What inductor may use of this processor: without trials of those that our library was compiled with, which take
    7 s. A trial changes flags that others read."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": native.available() or None}):
        return ask()
