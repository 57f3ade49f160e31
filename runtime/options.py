"""Command lines: a parser whose errors are one line, and options that several scripts have. It needs no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.errors import InputError, end, need_torch, quiet_interrupt

PRECISIONS = ("fp32", "bf16", "fp16")


class Store(argparse._StoreAction):
    """A flag of several values that is given twice has the values of both: argparse would drop the first ones."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest)
        again = isinstance(values, list) and before is not self.default
        super().__call__(parser, namespace, before + values if again else values, option_string)


class Parser(argparse.ArgumentParser):
    """A command line whose help is the script's docstring, and whose errors are one line like any InputError.

    shares: whether the script shares its work among the processes of torchrun.
    """

    def __init__(self, doc: str | None, shares: bool = False):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.register("action", None, Store)
        self.shares = shares

    def parse_args(self, *given):  # type: ignore[override]
        opt = super().parse_args(*given)
        if not self.shares and "parallel" not in opt:  # a script with --parallel says so itself
            refuse_torchrun()
        return opt

    def error(self, message: str):  # type: ignore[override]
        raise InputError(f"{message}; see {self.prog} --help")


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def refuse_torchrun() -> None:
    """Raises InputError if there are several processes."""
    if started_by_torchrun():
        raise InputError("torchrun started several processes, which would all do the same: start one, with python")


def answer_early(parse: Callable[[], Any]) -> None:
    """Before torch is imported, which takes seconds: print help, or what is wrong with the options, and exit."""
    need_torch()
    quiet_interrupt()
    try:
        parse()
    except InputError as e:
        end(2, f"error: {e}")


def add_precision(p: argparse.ArgumentParser) -> None:
    """Add --dtype, --weights, --head and --kv-dtype."""
    a = p.add_argument
    a("--dtype", choices=PRECISIONS, help="compute dtype; default: fp32 on the CPU, bf16 on a GPU")
    add_weights(p)
    a("--kv-dtype", choices=PRECISIONS, help="dtype of the KV cache; default: that of --dtype")


def add_calibration(p: argparse.ArgumentParser) -> None:
    """Add --calibration, for scripts that run methods."""
    p.add_argument("--calibration", metavar="FILE", type=_existing, nargs="+",
                   help="calibrate.py's file of this model, in any bits, or several that have different statistics; "
                   "default: that beside the weights")  # fmt: skip


def _existing(file: str) -> str:
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {file}; python calibrate.py --calibration {file} makes it")
    return file


def add_weights(p: argparse.ArgumentParser) -> None:
    """Add --weights and --head."""
    a = p.add_argument
    a("--weights", metavar="W", help="fp32 (not packed), bf16, int8, int4; with a group: int4:64, int8:channel")
    a("--head", metavar="W", help="bf16, int8, int4: the output head (default: as --weights, int8 beside int4)")
