"""The contract of base.py as a command: every check on one method, a line each, and what to do where one fails.

    python -m contract my_method.py          # a file anywhere
    python -m contract self_index --slow     # a method of kv_methods/, and what takes longer
    python -m contract snapkv,adaptive=True  # with knobs that all checks keep
    python -m contract mine.py --only ragged --traceback

Exit code 0: the contract is kept; 1: it is not; 2: there is no such method. The method drives the real model, small
and of random weights (harness.py), at its defaults and at its `stress`: knobs under which its limits bind within 40
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

import torch

from cache.spec import method_files
from contract import checks as c
from contract import step_checks as s
from contract.explain import Broken, explain, file_of
from contract.harness import at, class_of
from errors import InputError, Parser, run_cli

Run = Callable[[str], str | None]  # a method's name -> a note; raises where the contract is broken


def _each(check: Callable[..., str | None], more: bool = False) -> Run:
    """A check at every setting; `more`: at the lossless one, too."""

    @functools.wraps(check)
    def run(name: str) -> str | None:
        notes = [check(name, knobs) for knobs in c.settings(name) + ([class_of(name).lossless] if more else [])]
        return notes[-1]

    return run


def _lossless(name: str) -> None:
    """At its `lossless` knobs it is dense attention."""
    for shape in c.SAMPLE:
        c.check_lossless(name, shape)


def _turn(name: str) -> str | None:
    """A second turn, which comes through decode, continues the cache."""
    c.check_second_turn(name, class_of(name).lossless, True)
    return _each(c.check_second_turn)(name)


def _compiled(name: str) -> None:
    """A compiled step is the eager one: one graph, no second compilation, buffers that stay where they are."""
    s.check_compiled(name, class_of(name).stress or {})


def _inductor(name: str) -> None:
    """The same, compiled by inductor."""
    s.check_compiled(name, c.settings(name)[-1], "inductor")


def _presets(name: str) -> str | None:
    """Its presets keep the contract, too."""
    cls = class_of(name)
    table = getattr(sys.modules[cls.__module__], "PRESETS", {})
    for preset, knobs in table.items():
        try:
            for check in (c.check_poison, c.check_ragged, s.check_nbytes, s.check_traffic, c.check_reset):
                check(name, knobs)
        except Exception as e:
            broken = explain(e, file_of(cls))
            raise Broken(f"preset {preset}: {broken.what}", broken.todo) from e
    return f"{len(table)} presets"


def _shapes(name: str) -> None:
    """The lossless limit at random shapes, ragged rows at all."""
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
    attended=_each(c.check_attended),
    nothing=c.check_nothing_chosen,
    half=_each(c.check_half),
    compiled=_compiled,
    copies=s.check_copies,
)
SLOW: dict[str, Run] = dict(shapes=_shapes, presets=_presets, inductor=_inductor)
CHECKS = FAST | SLOW


@dataclass
class Result:
    check: str
    ok: bool
    seconds: float = 0.0
    note: str = ""  # what there is to say of a check that passed
    what: str = ""  # was found
    todo: str = ""
    error: BaseException | None = None

    @property
    def cause(self) -> str:
        """What was found, less the step in which it was."""
        return self.what.rpartition(", in ")[0] or self.what


def run_check(name: str, check: str) -> Result:
    """Run one check on a method."""
    torch.manual_seed(0)
    at("")
    start = time.perf_counter()
    try:
        result = Result(check, True, note=CHECKS[check](name) or "")
    except Exception as e:
        broken = explain(e, file_of(class_of(name)))
        result = Result(check, False, what=broken.what, todo=broken.todo, error=e)
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def load(method: str) -> str:
    """A method's name or a file's path, with knobs behind it or none -> the name with them, which can be set up from
    here on. InputError if it is neither."""
    method, knobs = re.fullmatch(r"(.*?\.py|[^,]*)(|,.*)", method, re.DOTALL).groups()  # type: ignore[union-attr]
    path = Path(method)
    if path.suffix != ".py":
        if method not in method_files():
            raise InputError(
                f"no method {method!r}: give the path of a .py file, or one of {', '.join(sorted(method_files()))}"
            )
    elif not path.is_file():
        raise InputError(f"{method} is no file")
    else:
        path = path.resolve()
        folders = [str(path.parent), *filter(None, [os.environ.get("KV_FAST_METHODS")])]
        method = path.stem
        if path not in method_files().values():
            os.environ["KV_FAST_METHODS"] = os.pathsep.join(folders)
        found = method_files().get(method)
        if found is None:
            raise InputError(f"{path.name} begins with an underscore: methods are not found by such names, rename it")
        if found.resolve() != path:
            raise InputError(f"{found} has the name {method}, too, and goes first: rename {path.name}")
    class_of(method + knobs)
    return method + knobs


def main() -> int:
    parser = Parser(__doc__)
    a = parser.add_argument
    a("method", nargs="?", help="path of a method's file, or a name of kv_methods/; with knobs: NAME,K=V")
    a("--only", metavar="CHECK", action="append", help=f"of {', '.join(CHECKS)}; may be given again")
    a("--slow", action="store_true", help="also what takes minutes: all shapes, all presets, compiled by inductor")
    a("--traceback", action="store_true", help="show where a check failed")
    a("--list", action="store_true", help="the checks, a line each")
    a("--json", action="store_true", help="print one object instead of lines")
    args = parser.parse_args()
    if args.list:
        for check, run in CHECKS.items():
            print(f"{check:9} {(run.__doc__ or '').splitlines()[0]}{' (--slow)' if check in SLOW else ''}")
        return 0
    if args.method is None:
        parser.error("give a method's file or name")
    if unknown := [x for x in args.only or () if x not in CHECKS]:
        raise InputError(f"no check {unknown[0]!r}: use one of {', '.join(CHECKS)}")
    name = load(args.method)
    chosen = args.only or [*FAST, *(SLOW if args.slow else ())]
    torch.set_num_threads(1)  # everything is small
    results: list[Result] = []
    for check in chosen:
        r = run_check(name, check)
        # an exception ends many checks: it is told once
        known = next((x.check for x in results if r.error is not None and x.cause == r.cause), None)
        results.append(r)
        if not args.json:
            text = f"the same as in {known}" if known else r.note or r.what
            print(f"{check:9} {'ok' if r.ok else 'FAILED':6} {r.seconds:6.1f} s  {text}".rstrip(), flush=True)
            if r.todo and not known:
                print(f"{'':28}-> {r.todo}", flush=True)
        if args.traceback and r.error is not None:
            traceback.print_exception(r.error)
    ok = all(r.ok for r in results)
    if args.json:
        rows = [{k: v for k, v in vars(r).items() if k != "error"} for r in results]
        print(json.dumps(dict(method=name, file=file_of(class_of(name)), ok=ok, checks=rows)))
    elif not ok:
        failed = [r.check for r in results if not r.ok]
        print(f"{name} breaks the contract in {len(failed)} of {len(results)} checks: {', '.join(failed)}")
    return 0 if ok else 1


if __name__ == "__main__":
    run_cli(main)
