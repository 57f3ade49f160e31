"""Records every kernel that a model of a real size launches, without a GPU; kernel_report.py compiles them.

A prompt, a step and its maintenance run on fake tensors, and each launch is recorded as Triton's launcher sees it:
dtypes, which arguments are None, sizes of 1, alignment.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from tqdm import tqdm
from triton.runtime.jit import KernelInterface

from cache.calibration import RandomCalibration
from cache.evicting import Evicting
from kernels import backend, observed_attention, offload, splits
from kernels.op import OPERATIONS
from kv_methods import double_sparsity_offload, ojakv
from kv_methods.razor import Razor
from loading.allocate import empty_transformer
from loading.named import named_args
from model import ModelArgs
from runtime.errors import InputError
from scripts.contract.__main__ import load
from weights import WeightFormat

MODELS = ("llama-2-7b", "llama-3.1-8b")
METHODS = (
    "full", "streaming", "double_sparsity", "double_sparsity,label_bits=2", "double_sparsity,label_bits=16",
    "self_index", "self_index-7.5", "self_index-16bit", "self_index,store_bits=4", "self_index,store_bits=8", "sals-25",
    "sals-12.5", "sals,budget=1.0", "sals,score=softmax", "sals,budget=p0.9", "ojakv-0.6", "ojakv-snapkv", "razor",
    "razor,induction=0,echo=0", "quest", "sparq", "loki", "loki,budget=0.5", "h2o", "tova", "snapkv", "pyramidkv",
    "kivi-2", "kivi-4", "hadamard", "hadamard-3", "turboquant", "turboquant,bits=3", "fp8", "rkv", "rocket", "palu-30",
    "palu-50", "hshare", "keydiff", "expected_attention", "kvzip", "snapkv,adaptive=True", "snapkv,value_aware=True",
    "knorm", "qfilters", "lagkv", "compactor", "triattention", "attention_matching", "chunkkv", "duo",
    "double_sparsity_offload", "flexgen", "oracle", "random", "skip_softmax", "kivi-2,skip=8", "ojakv-0.6,skip=8",
)  # fmt: skip
# with `full` only, since the method makes no difference to the kernels of weights
WEIGHTS = ("bf16", "int8", "int4")
# rows x slots, the last NEW of which are for a reply; together they take every path of kernels/select.py
SIZES = ("8x32832", "1x32832", "8x12288", "1x1000")
NEW, LAYERS = 64, 2
CHECKED = (3, 5, 9)  # tokens of a check: a GPU reads K and V once for each 64 query heads of a group


def is_tensor(noted: Any) -> bool:
    """Whether an argument of a noted launch is a tensor: ("tensor", dtype, bytes beyond 16). Strides are tuples too."""
    return isinstance(noted, tuple) and noted[:1] == ("tensor",)


class Launches:
    """Distinct launches: what the launcher specializes on -> the arguments, which runs launch them, and how often."""

    def __init__(self) -> None:
        self.seen: dict[Any, dict[str, Any]] = {}
        self.by: tuple[Any, ...] = ()  # model, method, rows, slots

    def note(self, kernel: Any, grid: tuple[int, ...], args: Any, kwargs: Any) -> None:
        def noted(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return ("tensor", str(x.dtype).removeprefix("torch."), x.storage_offset() * x.element_size() % 16)

        def key(x: Any) -> Any:  # the launcher distinguishes integers that are 1, multiples of 16, and their width
            if isinstance(x, tuple) and not is_tensor(x):
                return tuple(map(key, x))
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
        empty = dict(module=at[0], file=at[0].rpartition(".")[2], kernel=at[1], args=named, options=options, launches=0,
                     by=[])  # fmt: skip
        entry = self.seen.setdefault(at, empty)
        entry["launches"] += 1
        if self.by not in entry["by"]:
            entry["by"].append(self.by)


class Operators(TorchDispatchMode):
    """Runs an operator's CUDA version in addition to its fake version."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "kv_fast":
            kernel = torch.library.get_kernel(func, "CUDA")
            cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
            kernel.call_boxed(cuda, *OPERATIONS[func._opname].filled(args, kwargs))
        return out


def really(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, run without fake tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), unset_fake_temporarily():
            return f(*args, **kwargs)

    return call


@contextlib.contextmanager
def recording() -> Iterator[Launches]:
    """Within it, tensors are fake ones on `meta`, launches are recorded, and queries about the GPU return an H100's."""
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
        # eigenvalues and rankings determine shapes, so they are real; random bases of 4096 channels would take seconds
        whole = not name.endswith(("basis", "moments"))
        return real(calib, layer, name) if whole else torch.empty(calib.layouts[name].shape)

    patches = [
        (KernelInterface, "__getitem__", lambda k, grid: lambda *a, **kw: launches.note(k, grid, a, kw)),
        (torch.cuda, "get_device_properties", lambda device: card),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (importlib.import_module("runtime.machine"), "available_memory", lambda device: 2**60),
        (offload, "_side_stream", lambda device: stream),
        (offload, "_arrival", lambda *at: SimpleNamespace(record=lambda stream: None)),
        (torch.Tensor, "data_ptr", lambda self: 0),
        (double_sparsity_offload, "host_buffer", lambda n, dtype, device: torch.zeros(n, dtype=dtype, device=device)),
        (RandomCalibration, "get", statistic),
        *((o, n, really(getattr(o, n))) for o, n in ((ojakv, "rank_of"), (Evicting, "all_kept"))),
        (Razor, "_protected", lambda method: mock.MagicMock(**{path: heads(method)})),
        # h2o's prompt makes hundreds of thousands of torch products, and launches no kernel of ours
        (observed_attention, "_attention_and_mass", lambda q, k, v, lengths, window: (
            torch.empty_like(q), torch.empty(k.shape[:3], dtype=torch.float32, device=k.device))),
        # on `meta`, caches are normally only asked for their sizes, and have no rotary tables
        (ModelArgs, "rotary", lambda a, batch, n, device=None, *more: rotary(a, batch, launches.by[-1], device, *more)),
        (torch, "tensor", tensor),
        # which experts a prompt's tokens choose is data: here all choose one, as each launches the same kernels
        (torch.Tensor, "bincount", lambda x, minlength: SimpleNamespace(
            tolist=lambda: [len(x)] + [0] * (minlength - 1))),
    ]  # fmt: skip
    splits.multiprocessors.cache_clear()
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(backend, "BACKEND", "triton"))
        stack.enter_context(Operators())
        stack.enter_context(torch.inference_mode())
        yield launches
    splits.multiprocessors.cache_clear()


def named(methods: list[str]) -> list[str]:
    """Specs of methods, of which some may be files anywhere: these are made known by their names."""
    return [load(m) if m.partition(",")[0].endswith(".py") else m for m in methods]


def converse(launches: Launches, model: str, method: str, weights: str | None, batch: int, length: int) -> None:
    """Runs a prompt that fills all slots except NEW, a step and its maintenance."""
    args = named_args(model)
    args.n_layer, args.max_seq_len = LAYERS, max(args.max_seq_len, length)
    launches.by = (model, f"{method}, {weights} weights" if weights else method, batch, length)
    packed = WeightFormat.parse(weights)
    decoder = really(empty_transformer)(args, "meta", torch.bfloat16, packed.choose if packed else None).eval()
    decoder.setup_cache(method, batch, length, NEW)
    lengths = torch.full((batch,), length - NEW, device="meta")
    logits = decoder.prefill(torch.zeros(batch, length - NEW, dtype=torch.int64, device="meta"), lengths)
    decoder.decode(logits.argmax(-1), lengths)
    if method == "full":  # the same kernels check the drafts of every method
        for n in CHECKED:
            decoder.decode(torch.zeros(batch, n, dtype=torch.int64, device="meta"), lengths)
    decoder.maintain(NEW)


def recorded(models: list[str], methods: list[str], weights: list[str], sizes: list[str]) -> Launches:
    """The launches of every model with every method, and with the packed weights, at sizes such as "8x32832"."""
    caches = [*((m, None) for m in methods), *(("full", w) for w in weights)]
    work = [(m, *c, *map(int, size.split("x"))) for m in models for size in sizes for c in caches]
    with recording() as launches:
        for each in tqdm(work, disable=None, unit="run"):
            converse(launches, *each)
    return launches
