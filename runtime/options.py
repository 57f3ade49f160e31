"""Command lines: a parser whose errors are one line, and options that several scripts have. It needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.errors import InputError, end, need_torch, quiet_interrupt

PRECISIONS = ("fp32", "bf16", "fp16")


class Parser(argparse.ArgumentParser):
    """A command line whose help is the script's docstring, and whose errors are one line like any InputError."""

    def __init__(self, doc: str | None):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):  # type: ignore[override]
        raise InputError(f"{message}; see {self.prog} --help")


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
