"""The contract of base.py as a command: runs every check on a method and says what to do where one fails.

    python -m scripts.contract my_method.py          # a file anywhere
    python -m scripts.contract self_index --slow     # a method of kv_methods/, and what takes longer
    python -m scripts.contract snapkv,adaptive=True  # with knobs that all checks keep
    python -m scripts.contract mine.py --only ragged,poison --traceback
    python -m scripts.contract mine.py --kernels     # the file's own Triton kernels, interpreted, against torch

Exit code 0: the contract is kept; 1: it is not; 2: there is no such method. The method runs in the real model, small
and with random weights (harness.py), at its defaults and at its `stress`, knobs at which its limits bind within 40
tokens.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import InputError, did_you_mean, need_torch, run_cli

if __name__ == "__main__":
    need_torch()  # before what needs it is imported
if __name__ == "__main__" and "--kernels" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
import torch

from cache.grammar import method_files, own_folders
from kernels.op import OPERATIONS, Operation
from runtime.options import Parser
from scripts.contract import checks as c
from scripts.contract import step_checks as s
from scripts.contract.explain import Broken, explain, file_of
from scripts.contract.harness import class_of, now_doing

Run = Callable[[str], str | None]  # a method's name -> a note; raises where the contract is broken


def _each(check: Callable[..., str | None], more: bool = False) -> Run:
    """A check at every setting; `more`: at the lossless knobs, too."""

    @functools.wraps(check)
    def run(name: str) -> str | None:
        notes = [check(name, knobs) for knobs in c.settings(name) + ([class_of(name).lossless] if more else [])]
        return notes[-1]

    return run


def _lossless(name: str) -> None:
    """At its `lossless` knobs the method equals dense attention."""
    for shape in c.SAMPLE:
        c.check_lossless(name, shape)


def _turn(name: str) -> None:
    """A second turn, fed through decode, continues the cache, at its `lossless` knobs."""
    c.check_second_turn(name, class_of(name).lossless)


def _compiled(name: str) -> None:
    """A compiled step equals the eager one: one graph, no recompilation, buffers that stay in place."""
    s.check_compiled(name, class_of(name).stress or {})


def _inductor(name: str) -> None:
    """A step compiled by inductor equals the eager one."""
    s.check_compiled(name, c.settings(name)[-1], "inductor")


def presets_of(name: str) -> dict[str, c.Knobs]:
    return getattr(sys.modules[class_of(name).__module__], "PRESETS", {})


def _saved(name: str) -> str | None:
    """A cache that was saved to a file goes on as one that was not, at every setting and preset."""
    notes = [c.check_saved(name, knobs) for knobs in c.settings(name)]
    for knobs in presets_of(name).values():
        c.check_saved(name, knobs, c.WAYS[-1:])
    return notes[-1]


def _presets(name: str) -> str | None:
    """Every preset keeps the contract, too."""
    cls, table = class_of(name), presets_of(name)
    for preset, knobs in table.items():
        try:
            for check in (c.check_poison, c.check_ragged, s.check_nbytes, s.check_traffic, c.check_reset):
                check(name, knobs)
        except Exception as e:
            broken = explain(e, file_of(cls))
            raise Broken(f"preset {preset}: {broken.what}", broken.todo) from e
    return f"{len(table)} presets"


def _shapes(name: str) -> None:
    """The lossless limit holds at random shapes, and ragged rows at all shapes."""
    for seed in range(4):
        gen = torch.Generator().manual_seed(seed)
        g, head_dim, n_kv_head = (int(torch.randint(n, (1,), generator=gen)) for n in (4, 6, 3))
        lengths = torch.randint(1, 300, (6,), generator=gen).tolist()
        c.check_lossless(name, ((1, 3, 4, 8)[g], (32, 64, 96, 128, 40, 80)[head_dim], 1 + n_kv_head), lengths)
    for shape in c.SHAPES:
        c.check_lossless(name, shape)
        for knobs in c.settings(name):
            c.check_ragged(name, knobs, shape, (1, 33, 65, 150))


FAST: dict[str, Run] = dict(
    lossless=_lossless,
    stress=c.check_stress,
    poison=_each(c.check_poison, more=True),
    ragged=_each(c.check_ragged),
    deep=c.check_deep,
    nbytes=_each(s.check_nbytes),
    traffic=_each(s.check_traffic),
    reset=_each(c.check_reset),
    store=_each(c.check_store),
    chunks=_each(c.check_chunks),
    turn=_turn,
    window=c.check_window,
    sizes=_each(c.check_sizes),
    saved=_saved,
    attended=_each(c.check_attended),
    nothing=c.check_nothing_chosen,
    half=_each(c.check_half),
    size=_each(c.check_size),
    compiled=_compiled,
    copies=s.check_copies,
)
SLOW: dict[str, Run] = dict(shapes=_shapes, presets=_presets, inductor=_inductor)
CHECKS = FAST | SLOW
KERNELS: dict[str, Run] = dict(kernels=_each(c.check_kernels))  # in a process that interprets them


@dataclass
class Result:
    check: str
    ok: bool
    seconds: float = 0.0
    note: str = ""  # a remark on a check that passed
    what: str = ""  # what was found
    todo: str = ""  # what to do about it
    error: BaseException | None = None

    @property
    def cause(self) -> str:
        """`what` without the step in which it was found."""
        return self.what.rpartition(", in ")[0] or self.what


def run_check(name: str, check: str) -> Result:
    """Run one check on a method."""
    torch.manual_seed(0)
    now_doing("")
    start = time.perf_counter()
    try:
        result = Result(check, True, note=(CHECKS | KERNELS)[check](name) or "")
    except Exception as e:
        broken = explain(e, file_of(class_of(name)))
        result = Result(check, False, what=broken.what, todo=broken.todo, error=e)
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def load(method: str) -> str:
    """A method's name or a file's path, with or without knobs -> its name and the knobs, made known to `setup_cache`.

    A file that is not at its path is looked for in KV_FAST_METHODS. Raises InputError if it is neither.
    """
    method, knobs = re.fullmatch(r"(.*?\.py|[^,]*)(|,.*)", method, re.DOTALL).groups()  # type: ignore[union-attr]
    path = next((f for f in (Path(method), *(own / method for own in own_folders())) if f.is_file()), Path(method))
    if path.suffix != ".py":
        if method not in method_files():
            raise InputError(f"no method {method!r}: {did_you_mean(method, method_files())}give the path of a .py "
                             "file, or a name that generate.py --list-methods prints, without the preset")  # fmt: skip
    elif not path.is_file():
        raise InputError(f"{method} is not a file, here or in a folder of KV_FAST_METHODS")
    else:
        path = path.resolve()
        folders = [str(path.parent), *filter(None, [os.environ.get("KV_FAST_METHODS")])]
        method = path.stem
        if path not in method_files().values():
            os.environ["KV_FAST_METHODS"] = os.pathsep.join(folders)
        if method not in method_files():
            raise InputError(f"{path.name} begins with an underscore and is not found as a method: rename it")
    class_of(method + knobs)
    return method + knobs


def interpret_own(name: str) -> None:
    """Leave Triton's versions only to the operations that the method's file declares, or else imports."""
    module = sys.modules[class_of(name).__module__]
    named = [x for x in vars(module).values() if isinstance(x, Operation) and "triton" in x.versions]
    own = [x for x in named if x.__module__ == module.__name__] or named
    if not own:
        raise InputError(f"{module.__file__} declares or imports no operation with a Triton version: drop --kernels")
    for operation in OPERATIONS.values():
        if operation not in own:
            operation.versions.pop("triton", None)


def main() -> int:
    parser = Parser(__doc__)
    parser.allow_abbrev = False  # --kernels is looked for before
    a = parser.add_argument
    a("method", nargs="?", help="path of a method's file, or a name of kv_methods/; with knobs: NAME,K=V")
    a("--only", metavar="CHECK", action="append", help=f"run only these, as ragged,poison, of {', '.join(CHECKS)}")
    a("--slow", action="store_true", help="also run checks that take minutes: all shapes, all presets, inductor")
    a("--kernels", action="store_true", help="only compare the Triton kernels of the file's operations to torch")
    a("--traceback", action="store_true", help="show where a check failed")
    a("--list", action="store_true", help="list the checks, one per line")
    a("--json", action="store_true", help="print one JSON object instead of lines")
    args = parser.parse_args()
    if args.list:
        said = {c: f"{(run.__doc__ or '').splitlines()[0]}{' (--slow)' * (c in SLOW)}" for c, run in CHECKS.items()}
        print(json.dumps(said) if args.json else "\n".join(f"{check:9} {text}" for check, text in said.items()))
        return 0
    if args.method is None:
        parser.error("give a method's file or name")
    only = ",".join(args.only).split(",") if args.only else []
    if unknown := [x for x in only if x not in CHECKS]:
        raise InputError(f"no check {unknown[0]!r}: {did_you_mean(unknown[0], CHECKS)}use some of {', '.join(CHECKS)}")
    if (args.kernels or args.slow) and only or args.kernels and args.slow:
        raise InputError("--only, --slow and --kernels each say which checks run: give one of them")
    name = load(args.method)
    if args.kernels:
        interpret_own(name)
    chosen = [*KERNELS] if args.kernels else only or [*FAST, *(SLOW if args.slow else ())]
    torch.set_num_threads(1)  # all tensors are small
    results: list[Result] = []
    same: dict[str, list[str]] = {}  # check -> those that fail for the same reason
    for check in chosen:
        r = run_check(name, check)
        # one exception may end many checks: report it once
        known = next((x.check for x in results if r.error is not None and x.cause == r.cause), None)
        results.append(r)
        if known:
            same.setdefault(known, []).append(check)
        elif not args.json:
            print(
                f"{check:9} {'ok' if r.ok else 'FAILED':6} {r.seconds:6.1f} s  {r.note or r.what}".rstrip(), flush=True
            )
            if r.todo:
                print(f"{'':28}-> {r.todo}", flush=True)
        if args.traceback and r.error is not None:
            traceback.print_exception(r.error)
    ok = all(r.ok for r in results)
    if args.json:
        rows = [{k: v for k, v in vars(r).items() if k != "error"} for r in results]
        print(json.dumps(dict(method=name, file=file_of(class_of(name)), ok=ok, checks=rows)))
    elif not ok:
        for known, checks in same.items():
            print(f"FAILED, the same as in {known}: {', '.join(checks)}")
        failed = [r.check for r in results if not r.ok]
        print(f"{name} breaks the contract in {len(failed)} of {len(results)} checks: {', '.join(failed)}")
    return 0 if ok else 1


if __name__ == "__main__":
    run_cli(main)
