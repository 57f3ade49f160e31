"""Every kernel that a model of a real size launches, through Triton's own launcher: no GPU is needed.

    python -m scripts.report.launches
    python -m scripts.report.launches --cc 90 --models llama-3.1-8b --sizes 8x32768 --methods sals-12.5 kivi-2
    python -m scripts.report.launches --bind

A prompt, a step and the maintenance behind it run on tensors without numbers, and each launch is noted as the launcher
sees it: dtypes, what is None, sizes of 1, alignment. Then each goes through `kernel.run(..., warmup=True)` for every
card: what cannot be launched, spills registers or asks for more shared memory than there is is told, and the script
exits with 1. kernel_report.py compiles kernels from lists; this says which of their forms are launched, and by whom.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported; an interpreted kernel cannot be compiled
os.environ["KV_FAST_BACKEND"] = "triton"
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from tqdm import tqdm
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface, MockTensor

from cache import lowrank
from cache.calibration import RandomCalibration
from cache.evicting import Evicting
from errors import InputError, run_cli
from kernels import observed_attention, offload, splits
from kv_methods import double_sparsity_offload
from kv_methods.razor import Razor
from model import ModelArgs, empty_transformer
from scripts.report.kernel_report import MODELS, aligned, needs, problem
from scripts.shared.results import check_out, record, write_json
from weights import WeightFormat

METHODS = (
    "full", "streaming", "double_sparsity", "double_sparsity,label_bits=2", "double_sparsity,label_bits=16",
    "self_index", "self_index-7.5", "self_index-16bit", "self_index,store_bits=4", "self_index,store_bits=8", "sals-25",
    "sals-12.5", "sals,budget=1.0", "sals,score=softmax", "sals,budget=p0.9", "ojakv-0.6", "ojakv-snapkv", "razor",
    "razor-none", "quest", "sparq", "loki", "loki,budget=0.5", "h2o", "tova", "snapkv", "pyramidkv", "kivi-2", "kivi-4",
    "hadamard", "hadamard-3", "palu-30", "palu-50", "hshare", "double_sparsity_offload", "flexgen", "oracle", "random",
)  # fmt: skip
# with `full`, as what is cached makes no difference to them
WEIGHTS = ("bf16", "int8", "int4")
# rows x slots, of which the last NEW are for a reply: each way of selecting (kernels/select.py) is taken
SIZES = ("8x32768", "1x32768", "8x12288", "1x1000")
NEW, LAYERS = 64, 2


class Launches:
    """Distinct launches: what the launcher specializes on -> arguments, who makes them, and how often."""

    def __init__(self) -> None:
        self.seen: dict[Any, dict[str, Any]] = {}
        self.by: tuple[Any, ...] = ()  # model, method, rows, slots

    def note(self, kernel: Any, grid: tuple[int, ...], args: Any, kwargs: Any) -> None:
        def noted(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return ("tensor", str(x.dtype).removeprefix("torch."), x.storage_offset() * x.element_size() % 16)

        def key(x: Any) -> Any:  # of an integer the launcher knows whether it is 1, a multiple of 16, and its width
            special = isinstance(x, int) and not isinstance(x, bool)
            return (x == 1, x % 16 == 0, abs(x) < 2**31) if special else x

        names = kernel.arg_names
        constant = {p.name for p in kernel.params if p.is_constexpr}
        given = dict(zip(names, args, strict=False)) | {n: x for n, x in kwargs.items() if n in names}
        named = {n: noted(x) for n, x in given.items()}
        options = {n: x for n, x in kwargs.items() if n not in names}
        if not all(0 < n <= most for n, most in zip(grid, (2**31 - 1, 65535, 65535), strict=False)):
            raise InputError(f"{kernel.fn.__name__}: a grid of {grid}")
        form = tuple((n, x if n in constant else key(x)) for n, x in named.items())
        at = (kernel.__module__, kernel.fn.__name__, form, tuple(options.items()))
        empty = dict(file=at[0].rpartition(".")[2], kernel=at[1], args=named, options=options, launches=0, by=[])
        entry = self.seen.setdefault(at, empty)
        entry["launches"] += 1
        if self.by not in entry["by"]:
            entry["by"].append(self.by)


class Operators(TorchDispatchMode):
    """Runs what is registered for CUDA beside an operator's fake version."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "kv_fast":
            rest = [kwargs.get(a.name, a.default_value) for a in func._schema.arguments[len(args) :]]
            kernel = torch.library.get_kernel(func, "CUDA")
            kernel.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, *rest)
        return out


def really(f: Callable[..., Any]) -> Callable[..., Any]:
    """f without fake tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), unset_fake_temporarily():
            return f(*args, **kwargs)

    return call


@contextlib.contextmanager
def recording() -> Iterator[Launches]:
    """Tensors are fake ones on `meta`, launches are noted, and what is asked of a card is answered for an H100."""
    launches = Launches()
    stream = SimpleNamespace(wait_stream=lambda stream: None, wait_event=lambda event: None)
    card = SimpleNamespace(multi_processor_count=splits.ASSUMED_SMS, major=9, minor=0)
    heads = really(lambda method, mask=Razor._protected: mask(method).nonzero().flatten().tolist())
    path = "nonzero.return_value.flatten.return_value.tolist.return_value"
    rotary, new = ModelArgs.rotary, torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Any:  # torch.tensor is not faked on `meta`
        return new(*args, **kwargs).to(device) if device else new(*args, **kwargs)

    real = really(RandomCalibration.get)

    def statistic(calib: RandomCalibration, layer: int, name: str) -> torch.Tensor:
        # eigenvalues and rankings decide about shapes and are real; a random basis of 4096 channels takes seconds
        whole = not name.endswith(("basis", "moments"))
        return real(calib, layer, name) if whole else torch.empty(calib.layouts[name].shape)

    patches = [
        (KernelInterface, "__getitem__", lambda k, grid: lambda *a, **kw: launches.note(k, grid, a, kw)),
        (torch.cuda, "get_device_properties", lambda device: card),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (importlib.import_module("runtime"), "available_memory", lambda device: 2**60),
        (offload, "_side_stream", lambda device: stream),
        (offload, "_arrival", lambda *at: SimpleNamespace(record=lambda stream: None)),
        (torch.Tensor, "data_ptr", lambda self: 0),
        (double_sparsity_offload, "host_buffer", lambda n, dtype, device: torch.zeros(n, dtype=dtype, device=device)),
        (RandomCalibration, "get", statistic),
        *((o, n, really(getattr(o, n))) for o, n in ((lowrank, "rank_of"), (Evicting, "most_held"))),
        (Razor, "_protected", lambda method: mock.MagicMock(**{path: heads(method)})),
        # h2o's prompt: hundreds of thousands of torch's products, and no kernel
        (observed_attention, "_attention_and_mass", lambda q, k, v, lengths, window: (
            torch.empty_like(q), torch.empty(k.shape[:3], dtype=torch.float32, device=k.device))),
        # on `meta`, a cache is asked for its size alone, and has no angles
        (ModelArgs, "rotary", lambda a, batch, n, device=None: rotary(a, batch, launches.by[-1], device)),
        (torch, "tensor", tensor),
    ]  # fmt: skip
    splits.multiprocessors.cache_clear()
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Operators())
        stack.enter_context(torch.inference_mode())
        yield launches
    splits.multiprocessors.cache_clear()


def converse(launches: Launches, model: str, method: str, weights: str | None, batch: int, length: int) -> None:
    """A prompt of all slots but NEW, a step and its maintenance."""
    args = ModelArgs.from_name(model)
    args.n_layer, args.max_seq_len = LAYERS, max(args.max_seq_len, length)
    launches.by = (model, f"{method}, {weights} weights" if weights else method, batch, length)
    packed = WeightFormat.parse(weights)
    decoder = really(empty_transformer)(args, "meta", torch.bfloat16, packed.choose if packed else None).eval()
    decoder.setup_cache(method, batch, length, NEW)
    lengths = torch.full((batch,), length - NEW, device="meta")
    logits = decoder.prefill(torch.zeros(batch, length - NEW, dtype=torch.int64, device="meta"), lengths)
    decoder.decode(logits.argmax(-1), lengths)
    decoder.maintain(NEW)


def recorded(models: list[str], methods: list[str], weights: list[str], sizes: list[str]) -> list[dict[str, Any]]:
    caches = [*((m, None) for m in methods), *(("full", w) for w in weights)]
    work = [(m, *c, *map(int, size.split("x"))) for m in models for size in sizes for c in caches]
    with recording() as launches:
        for each in tqdm(work, disable=None, unit="run"):
            converse(launches, *each)
    return list(launches.seen.values())


class Card:
    """What Triton asks of a driver before a launch: a card that is not there."""

    def __init__(self, cc: int):
        self.get_current_target = lambda: GPUTarget("cuda", cc, 32)

    get_current_device = get_current_stream = staticmethod(lambda *device: 0)


def launch(entry: dict[str, Any], cc: int, bind: bool = False) -> dict[str, Any]:
    """Through the launcher, up to the machine code -> what kernel_report.py says of a kernel, or its error.

    bind: no further than the launcher, nothing is compiled.
    """

    def given(x: Any) -> Any:
        if not isinstance(x, tuple):
            return x
        tensor = MockTensor(getattr(torch, x[1]))
        tensor.data_ptr = lambda: x[2]  # type: ignore[method-assign]
        return tensor

    kernel = getattr(importlib.import_module(f"kernels.{entry['file']}"), entry["kernel"])
    kernel.device_caches.clear()  # of another card
    with (
        mock.patch.object(driver, "_active", Card(cc)),
        mock.patch.object(knobs.runtime, "jit_cache_hook", (lambda **_: True) if bind else None),
    ):
        try:
            args = {n: given(x) for n, x in entry["args"].items()}
            compiled = kernel.run(grid=(1,), warmup=True, **args, **entry["options"])
            return {} if compiled is None else needs(compiled, cc)
        except Exception as e:  # whatever the launcher or the compiler throws, the others are still to be seen
            return dict(error=f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")


def counts(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a kernel: its distinct launches, how often they are made, and by which methods."""
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for e in entries:
        row = out.setdefault((e["file"], e["kernel"]), dict(file=e["file"], kernel=e["kernel"], forms=0, launches=0))
        row["forms"] += 1
        row["launches"] += e["launches"]
        row["methods"] = sorted({*row.get("methods", ()), *(method for _, method, _, _ in e["by"])})
    return [out[at] for at in sorted(out)]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cc", default="80,89,90,100", help="compute capabilities, 90 = H100 (default: %(default)s)")
    p.add_argument("--models", nargs="*", default=list(MODELS), help="whose shapes (default: %(default)s)")
    p.add_argument("--methods", nargs="*", default=list(METHODS), help="methods and presets, with knobs")
    p.add_argument("--weights", nargs="*", default=list(WEIGHTS), help="packed weights, with the method full")
    p.add_argument("--sizes", nargs="*", default=list(SIZES), metavar="BxT", help="rows x slots (default: %(default)s)")
    p.add_argument("--bind", action="store_true", help="no further than the launcher: nothing is compiled")
    p.add_argument("--one", action="store_true", help="of each kernel one launch alone")
    p.add_argument("--out", help="write as JSON")
    p.add_argument("--json", action="store_true", help="print the launches as JSON, nothing else")
    a = p.parse_args(argv)
    check_out(a.out)
    entries = recorded(a.models, a.methods, a.weights, a.sizes)
    kernels = counts(entries)
    if a.one:
        entries = list({(e["file"], e["kernel"]): e for e in reversed(entries)}.values())
    cards = [int(cc) for cc in a.cc.split(",")]
    problems: list[str] = []

    def write(complete: bool) -> None:
        if a.out:
            write_json(a.out, record("cpu", kernels=kernels, launches=entries, complete=complete))

    for cc in cards:  # a card at a time: what is cut short is whole cards
        for i, entry in enumerate(tqdm(entries, disable=None, unit=f"launch for cc {cc}")):
            row = launch(entry, cc, a.bind)
            wrong = row.get("error") if a.bind else problem(row)
            kept = {k: row[k] for k in ("registers", "spills", "shared", "warps", "programs") if k in row}
            entry.setdefault("cards", {})[cc] = kept | (dict(problem=wrong) if wrong else {})
            if wrong:
                problems.append(f"{entry['file']}: {entry['kernel']} (cc {cc}, {entry['by'][0]}): {wrong}")
            if i % 50 == 49:
                write(False)
    write(True)
    if a.json:
        print(json.dumps(entries))
    else:
        head = ("file", "kernel", "forms", "launches")
        print(aligned([(*head, "methods"), *((*(str(r[c]) for c in head), str(len(r["methods"]))) for r in kernels)]))
        print(f"{len(entries)} launches for {len(cards)} cards: {len(problems)} problems")
    for line in problems:
        print(line, file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    run_cli(main)
