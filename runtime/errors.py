"""InputError, the exception for errors that the user can fix, and `run_cli`, which prints it in one line."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib.util
import io
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Bad input. The message says in one line what was found, what was expected and what to do."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a command line's `main` and exit: InputError -> `error: ...` on stderr and code 2, Ctrl-C -> code 130."""
    said = ""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a text may have characters that a terminal's encoding has not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main() or 0
        if sys.stdout:  # None if it is closed
            sys.stdout.flush()
    except InputError as e:
        said, code = f"error: {e}", 2
    except KeyboardInterrupt as e:
        said, code = f"interrupted: {e}" if str(e) else "interrupted", 130
    except BrokenPipeError:  # the reader (head, less) has gone: not an error of ours
        sys.stderr.close()
        code = 0
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF) or e.filename:  # of a file: a fault of ours
            raise
        said = f"error: the output cannot be written: {e.strerror}"
        sys.stdout, code = open(os.devnull, "w"), 2  # noqa: SIM115, what is left in the old one is not flushed again
    end(code, said)


leave: Callable[[int], Any] = sys.exit  # how `end` ends the process; parallel.py has another way
FIRST_RANK_SPEAKS = 30  # seconds


def end(code: int, said: str = "") -> None:
    """Print what was wrong, if anything, and exit.

    All processes of torchrun find the same bad input, and the first one says so. Another waits meanwhile for the end
    that torchrun then brings: if it ended first, the first would be killed in silence. If none comes, the fault is this
    process's own, and it says so itself, whether its stderr is muted or not.
    """
    stderr = sys.stderr
    if code == 2 and os.environ.get("RANK", "0") != "0":
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(FIRST_RANK_SPEAKS)
        stderr = sys.__stderr__
    if said:
        print(said, file=stderr)
    leave(code)


def quiet_interrupt() -> None:
    """Ctrl-C before `run_cli`, while imports take seconds, is a line, too. For command lines: it is a hook of the whole
    process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            os._exit(130)  # Python would end by the signal
        before(kind, error, trace)

    sys.excepthook = hook


def need_torch() -> None:
    """Exit with one line and code 2 if this Python has no PyTorch, because the environment is not active."""
    if importlib.util.find_spec("torch") is not None:
        return
    folder = Path(os.path.relpath(Path(__file__).resolve().parents[1])) / ".venv" / "bin"
    hint = "run `make demo`, which sets up .venv, or `pip install -r requirements.txt`"
    if (folder / "python").exists():
        hint = f"run {folder}/python {sys.argv[0]} ..., or first `source {folder}/activate`"
    print(f"error: {sys.executable} has no PyTorch: {hint}", file=sys.stderr)
    sys.exit(2)


def short(value: Any) -> str:
    """A value for a message, cut to 80 characters, as it may be a long text pasted by mistake."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean a or b? ` of the known names that are most like this one; empty if none is."""
    known, name = list(known), name[:80].lower()
    close = difflib.get_close_matches(name, known, 3) or [k for k in known if len(name) > 2 and name in k][:3]
    return f"did you mean {' or '.join(close)}? " if close else ""


def check_range(what: str, value: float, low: float, high: float, advice: str = "") -> None:
    """Raises InputError unless low <= value <= high; NaN is out of every range."""
    if not isinstance(value, int | float):
        raise InputError(f"{what} is a {type(value).__name__}: give a number from {low} to {high}")
    if not low <= value <= high:
        found = str(value) if len(str(value)) <= 24 else f"{str(value)[:20]}..."
        raise InputError(f"{what} {found} is {_beside(value, low, high)}{advice and f': {advice}'}")


def check_count(what: str, value: Any, low: int, high: int, advice: str = "") -> None:
    """`check_range` for an integer. Raises InputError if `value` is no int."""
    if type(value) is not int:
        raise InputError(f"{what} is {short(value)}, a {type(value).__name__}: give a whole number, {low} or more")
    check_range(what, value, low, high, advice)


def _beside(value: float, low: float, high: float) -> str:
    return f"below {low}" if value < low else f"above {high}" if value > high else "no number"


@functools.cache
def warn_once(text: str) -> None:
    """Print a warning on stderr, once per text."""
    print(f"warning: {text}", file=sys.stderr)


@functools.cache
def note_once(text: str) -> None:
    """Print a note on stderr, once per text."""
    print(f"note: {text}", file=sys.stderr)
