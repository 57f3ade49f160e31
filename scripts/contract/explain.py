"""Explains errors in a method's file, for the contract's command."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cache.base import KVMethod
from runtime.errors import InputError
from scripts.contract.harness import doing

ROOT = str(Path(__file__).resolve().parents[2])


class Broken(AssertionError):
    """A method breaks the contract: `what` was found, and `todo`, what its author can do about it."""

    def __init__(self, what: str, todo: str = ""):
        super().__init__(f"{what}: {todo}" if todo else what)
        self.what, self.todo = what, todo


def file_of(cls: type[KVMethod]) -> str:
    return str(sys.modules[cls.__module__].__file__)


def explain(e: BaseException, file: str) -> Broken:
    """An exception that ended a check -> what to tell the author of `file`."""
    if isinstance(e, Broken):
        return e
    if isinstance(e, InputError):
        return Broken(f"it refuses {doing()}: {e}" if doing() else str(e))
    text = " ".join(str(e).split("\n\n")[0].split())
    where = _where(e, file)
    if isinstance(e, torch._dynamo.exc.RecompileError | torch._dynamo.exc.FailOnRecompileLimitHit):
        guard = re.search(r"- \d+/\d+: (.*)", str(e))
        return Broken(
            f"a later step compiled another graph, because of {guard[1] if guard else text}",
            "a step may not depend on Python numbers or shapes that change: keep them in buffers, or in `maintain`",
        )
    if isinstance(e, torch._dynamo.exc.TorchDynamoException):
        return Broken(
            f"{where}: a step is not one graph: {_shorter(text)}",
            "no branch on data, no .item() or .tolist(), no Python state that changes; what cannot be so goes into "
            "`maintain`, which runs between steps",
        )
    what = f"{where}: {type(e).__name__}: {_shorter(text)}, in {doing()}"
    given = _given(e, file)
    todo = given or "see the full error with --traceback"
    if doing().startswith("a warm-up"):
        todo = f"decode is called before any prompt (warm-up): buffers must be valid then. {todo}"
    return Broken(what, todo)


# names of dtypes in C++ -> in torch
DTYPES = dict(Long="torch.int64", Float="torch.float32", Half="torch.float16", Byte="torch.uint8", Bool="torch.bool")


def _shorter(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."


def _where(e: BaseException, file: str) -> str:
    """file:line of the last line of the author's file that ran; if none did, of the methods', the cache's or ours."""
    frames = [(f.filename, f.lineno) for f in (getattr(e, "real_stack", None) or ())]
    frames += [(m[1], int(m[2])) for m in re.finditer(r'File "([^"]+)", line (\d+)', str(e))]
    frames += [(f.filename, f.lineno) for f in traceback.extract_tb(e.__traceback__)]
    for wanted in (file, ROOT + "/kv_methods", ROOT + "/cache", ROOT):
        inside = [f for f in frames if f[0].startswith(wanted) and ".venv" not in f[0] and "/contract/" not in f[0]]
        if inside:
            return ":".join(map(str, inside[-1]))
    return file


def _given(e: BaseException, file: str) -> str:
    """The tensors that the author's file passed to the failed function of kernels/, and which one it refused."""
    tb, called, refused = e.__traceback__, None, None
    while tb is not None:
        frame, path = tb.tb_frame, tb.tb_frame.f_code.co_filename
        if path == file or path.startswith(ROOT + "/cache"):
            called = None
        elif called is None and path.startswith(ROOT + "/kernels"):
            called = frame
        refused = frame.f_locals.get("x")
        tb = tb.tb_next
    if called is None:
        return ""
    code = called.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    tensors = {n: x for n in names if isinstance(x := called.f_locals.get(n), Tensor)}
    listed = ", ".join(f"{n} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for n, x in tensors.items())
    blamed = next((n for n, x in tensors.items() if x is refused), None)
    needed = re.search(r"a tensor of (torch\.\w+)", str(e))
    if in_cpp := re.search(r"(\w+): a tensor of dtype (\w+) is needed", str(e)):
        first = f"give {in_cpp[1]} as {DTYPES.get(in_cpp[2], in_cpp[2])}: "
    else:
        first = f"give {blamed} as {needed[1]}: " if blamed and needed else ""
    return f"{first}{code.co_name} was called with {listed}"


class Ties(TorchDispatchMode):
    """Records where a choice among equal scores depends on an unspecified order."""

    def __init__(self, file: str):
        super().__init__()
        self.file, self.found = file, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, tied = func._schema.name, False
        if name == "aten::topk" and out[0].numel():
            dim = args[2] if len(args) > 2 else -1
            last = out[0].amin(dim, keepdim=True)
            tied = bool((((args[0] == last).sum(dim) > (out[0] == last).sum(dim)) & last.isfinite().squeeze(dim)).any())
        elif name == "aten::sort" and not (kwargs or {}).get("stable"):
            dim = -1 if func._overloadname == "stable" or len(args) < 2 else args[1]
            values = out[0].transpose(dim, -1)
            tied = bool(((values[..., 1:] == values[..., :-1]) & values[..., 1:].isfinite()).any())
        if tied:
            lines = [f for f in traceback.extract_stack() if f.filename == self.file] or [
                f for f in traceback.extract_stack() if f.filename.startswith((ROOT + "/cache", ROOT + "/kernels"))
            ]
            self.found += [f"{f.filename}:{f.lineno}" for f in lines[-1:]]
        return out
