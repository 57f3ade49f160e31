"""A decode step compiled by torch.compile and inductor.

One graph serves all layers of a kind, so that the slow parts, tracing and inductor, run for one of SmolLM2's 30 layers,
for the embedding and for the choice of a token. On a CPU, C++ calls the graphs of a step (kernels/native/graphs.cpp).
On CUDA, all kernels of a step are captured in one CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cache.base import OncePerStep
from engine import inductor
from engine.inductor import CompiledCall, compiling, in_native_code, many_kinds
from engine.stored import StoredStep
from kernels import native, op
from kernels.native.build import compiler
from model import Transformer, layer_step
from runtime.errors import InputError
from runtime.machine import pick_device, side_stream

# A graph takes the C++ compiler 4 s on a core, mostly for headers. If there are more kinds of layers than this, as when
# each has its own budget, GROUP of the further layers share a graph.
KINDS = 5
GROUP = 4
Step = Callable[..., Tensor]  # tokens and pos [B], then Sampling.draw's other arguments -> the next tokens [B]


def eager_step(model: Transformer, choose: Step) -> Step:
    """`Transformer.decode` followed by the choice of a token: choose(logits [B, V], pos, *given) -> tokens [B]. With
    tokens [B, n], to check drafts, logits are [B, n, V] and the choice is [B, n]."""

    def step(tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        # NO_TOKEN, which marks an error, is negative and is fed before the host reads it
        return choose(model.decode(tokens.clamp(min=0), pos), pos, *given)

    return step


def compile_step(model: Transformer, choose: Step, like: Step | None = None, stored: StoredStep | None = None) -> Step:
    """`eager_step`, compiled for the current cache.

    like: a compiled step on the same cache with another `choose`; its layer graphs are reused. stored: where the graphs
    are kept for other processes, or come from.
    """

    def head(x: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        return choose(model.logits(x), pos, *given)

    compiled = torch_compile(head, model.device)
    if model.device.type == "cuda":
        return CapturedStep(model, compiled, like if isinstance(like, CapturedStep) else None)
    return CompiledStep(model, compiled, like if isinstance(like, CompiledStep) else None, stored)


def torch_compile(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """torch.compile with fullgraph, so that a graph break is an error instead of a slowdown."""
    # a code object of its own, so that graphs compiled for one cache are never tried for another
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)

    @functools.cache  # called first when a graph is needed: importing the compiler takes seconds
    def compiled() -> Callable[..., Any]:
        check_compiler(device.type)
        # not dynamic: a cache of another size, as for a run's last batch, gets another static graph
        return torch.compile(own, fullgraph=True, dynamic=False, options=compiler_options(device))

    return lambda *args: compiled()(*args)


def check_compiler(device: str | None) -> None:
    """Raises InputError if a graph for the device of this name needs a C++ compiler and there is none."""
    try:
        if pick_device(device).type != "cuda":
            compiler()
    except OSError:
        raise InputError("a compiled step on a CPU needs a C++ compiler: install g++, or leave --compile out") from None


def compiler_options(device: torch.device) -> dict[str, Any]:
    """Inductor's options for a decode step.

    On CUDA, inductor's own tuned kernels compute products of one row: they reach the memory bandwidth, and a library's
    do not. On a CPU a graph calls its operators from C++, compiled separately with little optimization: from Python, a
    step of the shipped model took 0.5 ms longer. Sizes are not asserted, because they are fixed by compilation and each
    step took 0.13 ms longer. Headers are not precompiled: that takes 10 s, and 0.3 s at every start, and saves 1 s per
    file.
    """
    if device.type != "cuda":
        options = inductor.vector_options()
        if not inductor.KNOWN:
            return options
        options |= {
            "cpp_wrapper": True,
            "cpp_wrapper_build_separate": True,
            "cpp_cache_precompile_headers": False,
            "size_asserts": False,
        }
        if native.available():
            options["aot_inductor.custom_ops_to_c_shims"] = op.Declarations()
        return options
    return {"coordinate_descent_tuning": True, "triton.cudagraphs": False}  # `CapturedStep` captures


def embed(model: Transformer, tokens: Tensor, pos: Tensor) -> Tensor:
    """tokens [B] -> the first layer's input. NO_TOKEN, which marks an error, is negative."""
    return model.embed(tokens.clamp(min=0))


def layer_group(layers: list[Any], x: Tensor, pos: Tensor, once: OncePerStep | None = None) -> Tensor:
    """Apply `layer_step` to each of these parts of `Transformer.decode_parts`. once: the methods', which a graph reads
    and adds to: given here so that torch.compile checks what it holds."""
    for part in layers:
        x = layer_step(part, x, pos)
    return x


class Layers:
    """Compiled calls up to the last layer, shared by all steps on one cache. key: that of their last lookup."""

    def __init__(self, model: Transformer):
        self.hidden, self.parts = (model.args.dim, model.dtype), model.decode_parts()
        self.group = torch_compile(layer_group, model.device)
        self.calls = [CompiledCall(torch_compile(embed, model.device), model)]
        self.key: Any = None

    def compile(self, tokens: Tensor, pos: Tensor, progress: Any) -> Tensor:
        """Compile the missing calls without running them. Returns a tensor like the last layer's output."""
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
    """A decode step on a CPU as compiled graphs: the embedding, one per kind of layer, and the choice of a token.

    In eager mode the embedding alone takes 0.2 ms, because a step evicts eager code from the processor's cache.
    """

    def __init__(self, model: Transformer, head: Step, like: CompiledStep | None, stored: StoredStep | None = None):
        self.model, self.stored = model, stored
        self.head = CompiledCall(head)
        self.layers: Layers = like.layers if like else Layers(model)
        self.key: Any = None  # that of the last lookup of graphs
        self.graphs: Step | None = None

    def __call__(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self(tokens, pos, *given)
        # not of the number of threads, which `SpareCores` changes: a graph's own stays
        key: Any = tuple(x.shape for x in (tokens, pos, *given))
        if key != self.key or self.key is not self.layers.key:
            return self.look_up(key, tokens, pos, *given)
        if self.graphs is not None:
            return self.graphs(tokens, pos, *given)
        x = tokens
        for call in self.layers.calls:
            x = call(x, pos)
        return self.head(x, pos, *given)

    def keep_key(self, key: Any) -> None:
        if key != self.layers.key:
            self.layers.key = key
        self.key = self.layers.key  # the same object, until a lookup for another key

    def look_up(self, key: Any, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        """Run a step through torch.compile, which first compiles missing graphs: g++ runs while the next is traced. Or
        run the stored graphs, if there are any."""
        layers = self.layers
        if self.stored and (graphs := self.stored.load(self.model, (tokens, pos, *given))):
            self.keep_key(key)
            self.graphs = graphs
            return graphs(tokens, pos, *given)
        bar = tqdm(desc="tracing", total=len(layers.parts), unit="layer", disable=None, leave=False)
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
        self.keep_key(key)
        self.graphs = in_native_code([*layers.calls, self.head])
        if self.stored and self.graphs:
            self.stored.keep(self.model, [*layers.calls, self.head], (tokens, pos, *given))
        return out


class CapturedStep:
    """A decode step on CUDA: compiled part by part, then captured in a CUDA graph for each shape of its arguments.

    The first call of a shape compiles what is missing and runs, which loads all kernels; the second is captured, and
    further ones replay it. So a call is one step. The result lies in the graph's memory: the next call overwrites it.
    Raises InputError if the step cannot be captured. compiled: whether inductor writes the kernels between ours.
    """

    def __init__(self, model: Transformer, head: Step, like: CapturedStep | None, compiled: bool = True):
        self.model, self.head, self.parts = model, head, model.decode_parts()
        make = functools.partial(torch_compile, device=model.device) if compiled else lambda function: function
        self.embed: Step = like.embed if like else make(embed)
        self.group: Step = like.group if like else make(layer_group)
        # by shapes: what a step reads, and from the second call on the graph and what it writes
        self.inputs: dict[Any, list[Tensor]] = {}
        self.captured: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def __call__(self, *args: Tensor) -> Tensor:
        key = tuple(x.shape for x in args)
        if key not in self.inputs:
            # made in inference mode, which given ones may not be: torch.compile would compile again in the capture
            inputs = [x.clone() for x in args]
            with side_stream():
                out = self.run(tqdm(self.parts, "compiling", unit="layer", disable=None, leave=False), *inputs)
            self.inputs[key] = inputs  # not before: after Ctrl-C, nothing may be captured that is not compiled
            return out
        for x, given in zip(self.inputs[key], args, strict=True):
            x.copy_(given)
        if key not in self.captured:
            self.captured[key] = self.capture(self.inputs[key])
        graph, out = self.captured[key]
        graph.replay()
        return out

    def run(self, parts: Iterable[Any], tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        """A step through torch.compile."""
        with many_kinds(), self.model.once as once:
            x = self.embed(self.model, tokens, pos)
            for part in parts:
                x = self.group([part], x, pos, once)
            return self.head(x, pos, *given)

    def capture(self, inputs: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                out = self.run(self.parts, *inputs)
        except RuntimeError as e:  # such as a copy to the host
            torch.cuda.set_stream(stream)  # torch leaves the capture's
            why = next(iter(str(e.__context__ or e).splitlines()), "")  # an error in it ends in a second one
            raise InputError(
                f"the decode step cannot be captured in a CUDA graph ({why}): run with --no-compile"
            ) from e
        return graph, out
