"""The one exception that means "the user can fix this", and the wrapper that turns it into one line and exit code 2."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any


class InputError(ValueError):
    """Bad input: the message says what was found, what was expected and what to do, in one line, whatever it quotes."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a command line's `main` and exit: InputError -> `error: ...` on stderr and code 2, Ctrl-C -> code 130."""
    try:
        code = main() or 0
        sys.stdout.flush()
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt as e:
        print(f"interrupted: {e}" if str(e) else "interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader (head, less) has gone: not an error of ours
        sys.stderr.close()
        code = 0
    sys.exit(code)


def short(value: Any) -> str:
    """A value as a message shows it: what was pasted by mistake may be long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_range(what: str, value: float, low: float, high: float, advice: str = "") -> None:
    """InputError unless low <= value <= high; NaN is nowhere."""
    if not isinstance(value, int | float):
        raise InputError(f"{what} is a {type(value).__name__}: give a number from {low} to {high}")
    if not low <= value <= high:
        found = str(value) if len(str(value)) <= 24 else f"{str(value)[:20]}..."
        raise InputError(f"{what} {found} is {_beside(value, low, high)}{advice and f': {advice}'}")


def check_count(what: str, value: Any, low: int, high: int, advice: str = "") -> None:
    """`check_range` of a whole number; InputError if it is none."""
    if type(value) is not int:
        raise InputError(f"{what} is {short(value)}, a {type(value).__name__}: give a whole number, {low} or more")
    check_range(what, value, low, high, advice)


def _beside(value: float, low: float, high: float) -> str:
    return f"below {low}" if value < low else f"above {high}" if value > high else "no number"


@functools.cache
def warn_once(text: str) -> None:
    """A line on stderr, the first time that this is said."""
    print(f"warning: {text}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """A command line whose help is the script's docstring, and whose errors are one line like all others."""

    def __init__(self, doc: str | None):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):  # type: ignore[override]
        if (
            os.environ.get("LOCAL_RANK", "0") != "0"
        ):  # of torchrun's processes, all of which read this, the first says it
            sys.exit(2)
        raise InputError(f"{message}; see {self.prog} --help")
