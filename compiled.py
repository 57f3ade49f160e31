"""A decode step compiled by torch.compile and inductor.

On CUDA the whole step is one graph. On a CPU a graph of a few layers serves all layers of their kind and is called for
each few: what takes the time, tracing and inductor, is done for 3 of SmolLM2's 30 layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from kernels import native, op
from model import Transformer, decode_layer, verify_layer

# Layers in a graph, at most. A call takes about 30 us, because its Python code has left the processor's caches by the
# time that a layer's weights have been read: 5 % of a step of SmolLM2 for each layer alone, below 3 % for three.
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
    choose(logits [B, n, V], pos, *given), [B, n]. On a CPU compiled by groups of layers, as a step is."""

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
    at every step.
    """
    if device.type != "cuda":
        options: dict[str, Any] = {"cpp_wrapper": True, "cpp_wrapper_build_separate": True, "size_asserts": False}
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


def groups(parts: list[Any]) -> Iterator[list[Any]]:
    """Neighbours with methods of one class, in groups of the same size where that is possible."""
    for _, run in itertools.groupby(parts, lambda part: (type(part[1]), part[2] is None)):
        layers = list(run)
        size = next((n for n in range(GROUP, 1, -1) if len(layers) % n == 0), GROUP)
        yield from (layers[i : i + size] for i in range(0, len(layers), size))


class CompiledStep:
    """A decode step on a CPU, of compiled graphs: the embedding, one for each few layers, the choice of a token.

    The embedding alone takes 0.2 ms in eager mode, whose code is no longer in the processor's cache after a step.
    """

    def __init__(
        self, model: Transformer, head: Step, like: CompiledStep | None, layers: Callable[..., Tensor] = decode_group
    ):
        self.head = CompiledCall(head)
        self.layers: list[CompiledCall]
        self.key: Any = None  # what the graphs were looked up for
        self.layers_key: list[Any] = [None]  # and the layers last, by whichever step
        if like is not None:
            self.layers, self.layers_key = like.layers, like.layers_key
            return
        group = torch_compile(layers, model.device)
        first = CompiledCall(torch_compile(embed, model.device), model)
        self.layers = [first, *(CompiledCall(group, few) for few in groups(model.decode_parts()))]

    def __call__(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self(tokens, pos, *given)
        key: Any = (*(x.shape for x in (tokens, pos, *given)), torch.get_num_threads())
        x = tokens
        if key == self.key == self.layers_key[0]:
            for layer in self.layers:
                x = layer(x, pos)
            return self.head(x, pos, *given)
        self.key = self.layers_key[0] = key
        with tqdm(self.layers, "compiling layers", unit="group", disable=None, leave=False) as layers:
            for layer in layers:
                x = layer.look_up(x, pos)
            layers.set_description_str("compiling the choice of a token")
            return self.head.look_up(x, pos, *given)


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

    def look_up(self, *args: Tensor) -> Tensor:
        """Through torch.compile, which compiles a graph if none fits."""
        from torch import _dynamo  # takes seconds, which an eager step need not

        self.graph = None
        # layers may be of as many kinds as there are
        with _dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=100_000), graph_calls() as calls:
            out = self.function(*self.fixed, *args)
        if len(calls) != 1 or len(set(map(id, args))) != len(args):
            return out
        (graph, self.tensors, outputs), at = calls[0], {id(x): i for i, x in enumerate(calls[0][1])}
        if len(outputs) == 1 and outputs[0] is out:  # else torch.compile assigns the rest to attributes
            self.graph, self.places = graph.current_callable, [at.get(id(x)) for x in args]
        return out


@contextmanager
def graph_calls() -> Iterator[list[tuple[Any, list[Tensor], Sequence[Any]]]]:
    """Inductor's graphs that are called inside, each with the tensors it got and those it gave."""
    from torch._inductor.output_code import CompiledFxGraph

    calls, original = [], CompiledFxGraph.__call__

    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        tensors = list(inputs)  # the graph clears its own
        outputs = original(graph, inputs)
        calls.append((graph, tensors, outputs))
        return outputs

    with mock.patch.object(CompiledFxGraph, "__call__", call):
        yield calls
