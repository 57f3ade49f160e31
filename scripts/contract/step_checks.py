"""Checks of a decode step beside its numbers: bytes allocated and read, one compiled graph, writes in place."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cache.base import connected
from cache.selecting import Selecting
from cache.spec import layer_methods
from engine.snapshot import numbers_of
from kernels.op import bytes_read
from scripts.contract.checks import ROUNDED, Knobs, at_knobs, same
from scripts.contract.explain import Broken
from scripts.contract.harness import (
    LLAMA,
    TOL,
    VOCAB,
    buffers,
    class_of,
    methods_of,
    now_doing,
    prompt,
    rounding_explains,
    rounds,
    run,
    tiny,
)

# ---- bytes ----

READ_MORE = 1.1  # bytes that a step may read over those of `traffic`: lengths are unknown on the meta device


def meta_method(
    name: str,
    args: Any,
    batch: int,
    T: int,
    dtype: torch.dtype,
    knobs: Knobs,
    calib: Any = None,
    new: int | None = None,
) -> Any:
    """One layer's method on the meta device, for its sizes. new: the most tokens that are decoded."""
    (cls, made), shape = layer_methods(name, 1, knobs)[0], args.cache_shape(0, batch, T, dtype, "cpu", new).on("meta")
    now_doing(f"a set-up on the meta device, for {args.n_kv_head} KV heads of {args.head_dim} channels")
    return connected([cls(made, shape, 0, args.rotary(batch, 1, shape.device), calib)])[0]


def check_nbytes(name: str, knobs: Knobs) -> None:
    """nbytes() equals the bytes allocated and the card's formula, if there is one, also on the meta device."""
    model = tiny()

    def compare(method: Any, sizes: dict[str, int] | None, setting: str) -> None:
        reported = method.nbytes()
        if sizes is not None and reported != sizes:
            wrong = sorted(k for k in reported.keys() | sizes if reported.get(k) != sizes.get(k))
            raise Broken(
                f"nbytes() of {wrong[0]} is {reported.get(wrong[0])}, {sizes.get(wrong[0])} are allocated",
                "every buffer is made by self.buffer(name, size), is no view of another, and nbytes() is the base's",
            )
        total = sum(reported.values())
        if method.card_nbytes is not None and method.card_nbytes() != total:
            raise Broken(
                f"card_nbytes() is {method.card_nbytes()}, its buffers have {total} bytes {setting}",
                "correct the formula, or leave it out: it is for methods whose paper states one",
            )

    model.setup_cache(name, 3, 77, **knobs)
    for method in model.cache:
        storages = {k: b.untyped_storage() for k, b in method.named_buffers()}
        compare(method, {k: x.nbytes() for k, x in storages.items()}, at_knobs(knobs))
        at_home = {x.data_ptr(): k for k, x in storages.items() if x.nbytes()}
        if shared := [k for k, x in storages.items() if x.nbytes() and at_home[x.data_ptr()] != k]:
            raise Broken(
                f"buffers {shared[0]} and {at_home[storages[shared[0]].data_ptr()]} share memory: counted twice"
            )
    if not model.kv_bytes():
        raise Broken("no layer has buffers", "allocate with self.buffer(name, size) in __init__")
    (cls, made), real = layer_methods(name, 1, knobs)[0], model.cache[0]
    calib = model.measured(needed) if (needed := cls.needs(made)) else None
    meta = meta_method(name, model.args, 3, 77, torch.float32, knobs, calib)
    if meta.nbytes() != real.nbytes():
        raise Broken(f"its bytes are {meta.nbytes()} on the meta device and {real.nbytes()} on the CPU")
    compare(meta, None, "on the meta device")
    for batch, T in ((1, 4096), (8, 32768)):
        large = meta_method(name, LLAMA, batch, T, torch.bfloat16, knobs)
        compare(large, None, f"for Llama-3.1-8B, {batch} x {T} tokens")


def check_traffic(name: str, knobs: Knobs) -> None:
    """traffic() grows along the text, up to the bytes allocated; it may fall once if short texts are kept in full."""
    for args, T in ((tiny().args, 128), (LLAMA, 8192)):
        method = meta_method(name, args, 2, T, torch.bfloat16, knobs)
        read = [method.traffic(pos) for pos in range(0, T, max(1, T // 200))] + [method.traffic(T - 1)]
        falls = sum(b < a for a, b in pairwise(read))
        if read[0] <= 0 or falls > 1 or read[-1] < read[0]:
            raise Broken(
                f"traffic(pos) falls along the text {at_knobs(knobs)}, or is not above 0: {read[0]} ... {read[-1]}"
            )
        allocated, again = sum(method.nbytes().values()), "rereads" in method.deviates
        if isinstance(method, Selecting):  # lists of their own for query heads; or all tokens, after they were scored
            again |= method.by_query or method.chosen(T - 1) == T
        if read[-1] > (2.1 if again else 1.05) * allocated:
            raise Broken(
                f"traffic({T - 1}) is {read[-1]} bytes {at_knobs(knobs)}, its buffers have {allocated}",
                "it counts what one step reads of the cache, all rows and KV heads of one layer; leave it out to count "
                "all of them",
            )
    method, B = meta_method(name, LLAMA, 2, 32768, torch.bfloat16, knobs, new=1), 2
    q, k, v = (torch.empty(B, n, LLAMA.head_dim, dtype=torch.bfloat16, device="meta")
               for n in (LLAMA.n_head, LLAMA.n_kv_head, LLAMA.n_kv_head))  # fmt: skip
    pos = torch.empty(B, dtype=torch.int64, device="meta")
    takes, said = bytes_read(lambda: method.decode(q, k, v, pos), method.buffers()), method.traffic(32767)
    if takes > READ_MORE * said and "unequal steps" not in method.deviates:
        raise Broken(
            f"a step of 32768 tokens reads {takes} bytes {at_knobs(knobs)}, traffic(32767) says {said}",
            "count in `traffic`, or in a Selecting's `score_bytes`, all that a step reads; a tensor that is read twice "
            "counts twice",
        )


# ---- the compiled step ----


def check_compiled(name: str, knobs: Knobs, backend: str = "aot_eager", steps: int = 100) -> None:
    """A compiled step equals the eager one: one graph, no recompilation, buffers that stay in place."""
    from torch._dynamo.testing import CompileCounterWithBackend  # imported here, because it takes seconds

    torch._dynamo.reset()
    model, prompts, feed, second = tiny(), [prompt(n) for n in (5, 40)], None, [prompt(9), prompt(3)]
    if backend == "inductor":
        # In the first layer a repeated token has the score of its copy, and the last bit decides between them. Inductor
        # sums in another order, so no token comes twice.
        tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
        prompts, feed, steps = [tokens[:5], tokens[-40:]], torch.stack((tokens[5:45], tokens[:40])), 40
    counter = CompileCounterWithBackend(backend)
    model.setup_cache(name, 2, 40 + steps, **knobs)
    want, fed = run(model, prompts, steps, feed)
    model.reset_cache()
    want_second, fed_second = run(model, second, 5)
    counts_nothing(model, torch.tensor([14, 8]), knobs)
    model.reset_cache()
    places = {k: b.data_ptr() for k, b in buffers(model).items()}
    decode = torch.compile(model.decode, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = run(model, prompts, steps, fed, decode)[0]
        model.reset_cache()  # a second conversation runs the same graph
        got_second = run(model, second, 5, fed_second, decode)[0]
    if counter.frame_count != 1:
        raise Broken(f"{counter.frame_count} graphs were compiled {at_knobs(knobs)}", "a step has fixed shapes")
    moved = [k for k, b in buffers(model).items() if places.get(k) != b.data_ptr()]
    if moved:
        raise Broken(f"buffer {moved[0]} moved", "write into it (x.copy_, x[...] = ), never assign another tensor")
    tol = ROUNDED if backend == "inductor" and rounds(model) else TOL
    todo = "a step may not depend on what Python remembers: a graph is traced once"

    def agree(got: Tensor, want: Tensor, prompts: list[Tensor], fed: Tensor, what: str) -> None:
        """Inductor's sums, in another order, may swap two equal scores: those of two keys are to keydiff."""

        def swapped(row: int) -> bool:
            off, one = (got[row] - want[row]).abs().max() > tol, fed[row : row + 1]
            return bool(off) and rounding_explains(model, prompts[row], one, want[row], got[row])

        if backend == "inductor":
            got = torch.stack([want[row] if swapped(row) else got[row] for row in range(len(prompts))])
        same(got, want, f"{what} differs from eager mode {at_knobs(knobs)}", tol, todo)

    agree(got, want, prompts, fed, "compiled, it")
    agree(got_second, want_second, second, fed_second, "compiled, a second prompt")


def counts_nothing(model: Any, pos: Tensor, knobs: Knobs) -> None:
    """A step changes no number of a method. torch 2.11 does not compile it again for another number: it keeps the first
    one, without a word."""
    before = {m: numbers_of(m) for m in methods_of(model)}
    model.decode(torch.ones_like(pos), pos)
    for m, was in before.items():
        if changed := [name for name, x in numbers_of(m).items() if was.get(name) != x]:
            raise Broken(
                f"a step changes {type(m).__name__}.{changed[0]} {at_knobs(knobs)}",
                "a graph is traced once: count in a buffer, or between steps, in `maintain`",
            )


class _Seen(Exception):
    """Raised to end a compilation."""


def step_code(model: Any, *args: Tensor) -> str:
    """The code that inductor generates for a step, without compiling it."""
    from torch._functorch import config as functorch
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.graph import GraphLowering

    code: list[str] = []

    def stop(graph: Any) -> None:
        code.append(graph.codegen()[0].value)
        raise _Seen

    torch._dynamo.reset()
    with (
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", list),  # else a compiler tries each kind
        config.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False),
        torch.inference_mode(),
    ):
        try:
            torch.compile(model.decode, fullgraph=True, dynamic=False)(*args)
        except Exception:
            if not code:
                raise
    torch._dynamo.reset()
    return code[0]


def check_copies(name: str, T: int = 2053) -> str | None:
    """A compiled step writes in place and allocates no tensor as large as a cache buffer."""
    if "copies" in class_of(name).deviates:
        return "a step copies what it reads, as `deviates` says"
    model, B = tiny(2, 64), 2
    # T is prime and the batch smaller than the cache, so that no other tensor of a step has the size of a buffer
    for knobs in ({}, class_of(name).lossless):
        model.setup_cache(name, B + 1, T, **knobs)
        large: dict[Any, set[str]] = {}
        for k, b in buffers(model).items():
            if b.shape[:1] == (B + 1,) and b.numel() > (B + 1) * model.args.n_head * T:  # larger than scores
                for rows in (B, B + 1):
                    large.setdefault((b.numel() // (B + 1) * rows, b.dtype), set()).add(k.partition(".")[2])
        if large:
            break
    else:
        return None  # no buffer grows with the text
    run(model, [prompt(50), prompt(9)], 1)
    now_doing("compiling a step")
    layers, cache = model.layers, model.cache
    if len({(m.predicts, tuple(b.shape for b in m.buffers())) for m in cache}) == 1:  # all layers are alike
        model.layers, model.cache = layers[-1:], cache[-1:]
    code = step_code(model, torch.tensor([1, 2]), torch.tensor([51, 10]))
    model.layers, model.cache = layers, cache
    made = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\), \([\d, ]*\), (torch\.\w+)\)", code)
    if not made:
        raise Broken("cannot read inductor's code: torch is newer than this check")
    for size, dtype in made:
        n = 1
        for x in filter(str.strip, size.split(",")):
            n *= int(x)
        if names := large.get((n, getattr(torch, dtype.removeprefix("torch.")))):
            of = " or ".join(sorted(names))
            raise Broken(
                f"a compiled step makes a tensor of [{size.strip(', ')}], as large as its buffer {of}",
                "a slot that is read before it is written costs a copy of the whole cache (use replace_token of "
                "kernels/packed_attention.py); so do roll, cat, where, masked_fill, float() and contiguous() on all of "
                "it (use the operators of kernels/, which read what is filled)",
            )
    return None
