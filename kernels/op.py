"""Operations are declared once, each in its file: arguments, results, and versions in torch, Triton and C++.

    @operation(cpp=whole_vectors)
    def score(q: Tensor, keys: Tensor, pos: Tensor | None = None) -> Tensor:
        ...  # the torch version, the reference

    @score.triton
    def launch(q: Tensor, keys: Tensor, pos: Tensor | None) -> Tensor: ...

The declared object is what callers call. `version_for` (backend.py) says which version its first argument takes: Triton
for CUDA tensors, C++ for CPU tensors, or torch's. Where an operation has no such version, or that one does not serve
these shapes, torch's runs. That is all there is to the choice.

The operator `kv_fast::score` has the schema of the function's annotations, with the fields of a NamedTuple `x` as
arguments `x_field`: a compiled graph calls it where a version is opaque to the compiler, and a TorchDispatchMode sees
every call. Its overload `cpp` is the C++ function of the same name
(kernels/native/).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast, get_type_hints

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import backend
from kernels.backend import version_for
from kernels.native import VECTOR
from runtime.errors import InputError, warn_once

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Serves = Callable[..., bool]  # whether a version serves these arguments, of which it sees all
_LIB = torch.library.Library("kv_fast", "DEF")
OPERATIONS: dict[str, Operation] = {}  # by name, in the order of their files' imports
_IN_C = {"Tensor": "AtenTensorHandle", "Optional[Tensor]": "AtenTensorHandle*", "int": "int64_t", "bool": "int32_t",
         "float": "double"}  # fmt: skip


class Operation(Generic[P, R]):
    """See `operation`. reference: the torch version; op: the operator; cpp: its overload in C++; versions: by the name
    that `version_for` gives, how to call it, and what it serves (None: all)."""

    def __init__(
        self,
        reference: Callable[P, R],
        cpp: bool | Serves,
        fake: Callable[..., Any] | None,
        opaque: bool,
        mutates: tuple[str, ...],
        reads: Callable[..., dict[str, int]] | None,
    ):
        functools.update_wrapper(self, reference)
        self.reference: Callable[..., R] = reference
        self.opaque, self.mutates, self.parts = opaque, mutates, reads
        self.name = reference.__name__.lstrip("_")
        flat = _flat(reference)
        self.defaults = [(p.name, p.default) for p in inspect.signature(flat).parameters.values()]
        self.types = [x if hasattr(x, "_fields") else None for x in get_type_hints(reference).values()]
        self.flattens = any(self.types[:-1])
        schema = torch.library.infer_schema(flat, mutates_args=mutates).replace("SymInt", "int")
        if fake is None:
            fake = _nothing if schema.endswith("()") else _like_the_first
        shapes = lambda *args, fake=fake, **kwargs: fake(*self.grouped(self.filled(args, kwargs)))  # noqa: E731
        for overload in ("", ".cpp") if cpp else ("",):
            _LIB.define(self.name + overload + schema)
            torch.library.register_fake(f"kv_fast::{self.name}{overload}", shapes, lib=_LIB)
        for device in ("CPU", "CUDA"):
            _LIB.impl(self.name, self._run, device)
        packet = getattr(torch.ops.kv_fast, self.name)
        self.op: Any = packet.default
        self.cpp: Any = packet.cpp if cpp else None
        self.versions: dict[str, tuple[Any, Serves | None]] = {}
        if cpp:
            self.versions["cpp"] = self.cpp, cpp if callable(cpp) else None
        self.fake = fake
        self.otherwise = self.op if opaque else reference
        self.launch: Callable[..., R] | None = None
        OPERATIONS[self.name] = self

    def triton(self, launch: F | None = None, serves: Serves | None = None) -> Any:
        """Declare the decorated function, of the same arguments, to be the Triton version. serves: which shapes."""
        if launch is None:
            return functools.partial(self.triton, serves=serves)
        self.launch = launch
        self.versions["triton"] = self.op, serves
        return launch

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x: Any = args[0]
        run, serves = self.versions.get(version_for(x.device, x.dtype), (self.otherwise, None))
        if serves is not None and not serves(*args, **kwargs):
            run = self.otherwise
        if not self.flattens or run is self.reference:
            return run(*args, **kwargs)
        flat: list[Any] = []
        for of, given in zip(self.types, args, strict=False):
            flat += [*given] if of else [given]  # type: ignore[misc]  # torch 2.11 adds no NamedTuple to a list
        return run(*flat, **kwargs)

    def filled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments in order: torch leaves out trailing ones that equal their defaults."""
        if len(args) == len(self.defaults):
            return args
        return (*args, *[kwargs.get(name, default) for name, default in self.defaults[len(args) :]])

    def grouped(self, flat: Iterable[Any]) -> list[Any]:
        """The operator's arguments as those of the function, whose NamedTuples are flat in a schema."""
        left = iter(flat)
        return [of(*itertools.islice(left, len(of._fields))) if of else next(left) for of in self.types[:-1]]

    def reads(self, *args: Any) -> dict[str, int]:
        """Bytes that are read of each tensor argument."""
        names, args = [name for name, _ in self.defaults], self.filled(args, {})
        given = {name: x for name, x in zip(names, args, strict=False) if isinstance(x, Tensor)}
        whole = {name: 0 if name in self.mutates else nbytes(x) for name, x in given.items()}
        parts = {} if self.parts is None else self.parts(*self.grouped(args))
        return whole | {name: size for name, size in parts.items() if name in whole}

    def _run(self, *args: Any, **kwargs: Any) -> R:
        """The operator's Python implementation, on any device."""
        args = self.filled(args, kwargs)
        if self.launch and "triton" in self.versions and version_for(args[0].device, args[0].dtype) == "triton":
            try:
                return self.launch(*self.grouped(args))
            except (InputError, torch.OutOfMemoryError):
                raise
            except Exception as e:  # of Triton's compiler, its launcher or the driver
                if not backend.FALL_BACK:
                    raise
                del self.versions["triton"]
                why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
                warn_once(f"the Triton kernel of {self.name} failed ({why}): from here on torch computes it, slower; "
                          "python -m scripts.doctor checks all kernels")  # fmt: skip
        given = self.grouped(args)
        out = self.reference(*given)
        if self.launch is None or "triton" in self.versions:
            return out
        # a compiled graph was promised the kernel's strides
        both: Any = [x if isinstance(x, tuple) else (x,) for x in (out, self.fake(*given))]
        laid = [x if x is None or x.stride() == y.stride() else y.copy_(x) for x, y in zip(*both, strict=True)]
        return cast(R, tuple(laid) if isinstance(out, tuple) else laid[0])


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the signature that the operator has: in place of a NamedTuple `x` its fields, `x_field`."""
    hints, parameters = get_type_hints(function), list[inspect.Parameter]()
    for p in inspect.signature(function).parameters.values():
        of = hints[p.name]
        fields = {f"{p.name}_{field}": x for field, x in get_type_hints(of).items()} if hasattr(of, "_fields") else {}
        parameters += [p.replace(name=name, annotation=x) for name, x in (fields or {p.name: of}).items()]

    def flat() -> None: ...

    result = None if hints["return"] is type(None) else hints["return"]
    flat.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return flat


def _nothing(*args: Any) -> None:
    return None


def _like_the_first(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def operation(
    cpp: bool | Serves = False,
    fake: Callable[..., Any] | None = None,
    opaque: bool = False,
    mutates: tuple[str, ...] = (),
    reads: Callable[..., dict[str, int]] | None = None,
) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declare the operation of which the decorated function is the torch version.

    All callables take the arguments of that function. cpp: whether there is a C++ version, the function of that name in
    kernels/native/, or which shapes it serves; fake: gives empty results of the right shapes, by default one like the
    first argument; opaque: a compiled graph calls the torch version, too, as an operator, where by default the compiler
    sees into it; mutates: arguments that are written in place; reads: bytes of each argument of which a part is read,
    or that is both written and read.
    """
    return lambda reference: Operation(reference, cpp, fake, opaque, mutates, reads)


def whole_vectors(x: Tensor, *rest: Any) -> bool:
    """For `cpp`: it reads rows of the first argument in whole vectors."""
    return x.shape[-1] % VECTOR == 0


def nbytes(x: Tensor | None) -> int:
    """Bytes of a tensor's numbers; the tensor may be part of a larger one."""
    return 0 if x is None else x.numel() * x.element_size()


def picked(idx: Tensor | None, x: Tensor | None, dim: int = 2) -> int:
    """Bytes of chosen slots of x [>= B, H, T, ...], or [>= B, T, ...] with dim=1: idx [B, ..., K] has a list for each
    row, for all heads or for each. None: bytes of all slots."""
    if idx is None or x is None or not x.numel():
        return nbytes(x)
    lists = idx.numel() if dim == 1 or idx.shape[1] >= x.shape[1] else idx.numel() * x.shape[1] // idx.shape[1]
    return lists * (nbytes(x) // math.prod(x.shape[: dim + 1]))


def slots(n: int, x: Tensor | None, dim: int = 2) -> int:
    """Bytes of one slot in each of n rows of x, over all heads."""
    return 0 if x is None or not x.numel() else n * (nbytes(x) // (len(x) * x.shape[dim]))


class _Reads(TorchDispatchMode):
    """Sums the bytes that are read of some buffers."""

    def __init__(self, buffers: Iterable[Tensor]):
        super().__init__()
        self.storages = {x.untyped_storage()._cdata for x in buffers}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func.is_view:
            return out
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if func.namespace == "kv_fast":
            sizes = OPERATIONS[func._opname].reads(*args)
        else:  # a gather reads as many bytes as it returns
            sizes = {name: nbytes(out) for name in ("self",) if func.overloadpacket in _GATHERS}
        for name, x in named.items():
            for part in x if isinstance(x, (list, tuple)) else (x,):
                if isinstance(part, Tensor) and part.untyped_storage()._cdata in self.storages:
                    whole = min(nbytes(part), part.untyped_storage().nbytes())  # an expanded one is read once
                    self.bytes += sizes.get(name, 0 if name in written else whole)
        return out


_GATHERS = {torch.ops.aten.index, torch.ops.aten.gather, torch.ops.aten.index_select}


def bytes_read(step: Callable[[], object], buffers: Iterable[Tensor]) -> int:
    """Bytes of `buffers`, all on `meta`, that a step reads: our operations say what they read, and torch's own read
    their arguments. Lists and caches count as full, because `meta` tensors hold no lengths."""
    with _Reads(buffers) as seen, torch.no_grad():
        step()
    return seen.bytes


class Declarations(dict[str, list[str]]):
    """Operators as C functions, for inductor's `aot_inductor.custom_ops_to_c_shims`: a compiled step calls them as such
    (`Operator` in native/tensor.h), not through torch's dispatcher. Inductor looks an operator up, but its cache of
    compiled code cannot tell whether two operators are the same: so the keys are their names."""

    def __init__(self) -> None:
        for operation in OPERATIONS.values():
            if operation.cpp is not None:
                schema = operation.cpp._schema
                given = [_IN_C[str(x.type)] for x in schema.arguments]
                given += ["AtenTensorHandle*"] * max(1, len(schema.returns))
                name = f"AOTITorchError (*const aoti_torch_cpu_{operation.name})({', '.join(given)})"
                self[str(operation.cpp)] = [name]

    def __contains__(self, op: object) -> bool:
        return super().__contains__(str(op))
