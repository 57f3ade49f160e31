"""A progress line on stderr: what runs now, the time since the start, and about how much is left.

On a terminal the line is rewritten every second. Elsewhere a line is added when a step begins, and every few seconds
during a long one, such as a compilation of minutes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

FIRST, EVERY = 1.0, 10.0  # seconds: bad input is refused before the first line; the longest silence off a terminal
SPACED = 2.0  # between two lines off a terminal


class Progress:
    """with Progress(dict(prepare=2, round=10)) as progress: progress.now("prepare", "full") ...

    plan: kind of step -> how many there will be; the steps done so far tell how long one takes.
    """

    def __init__(self, plan: dict[str, int] | None = None, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic):  # fmt: skip
        self.plan, self.took = dict(plan or {}), dict[str, list[float]]()
        self.stream, self.clock = stream or sys.stderr, clock
        self.kind, self.what = "", "starting"
        self.begin = self.since = clock()
        self.printed, self.shown = self.begin + FIRST - EVERY, ""
        self.lock, self.ended = threading.RLock(), threading.Event()

    def __enter__(self) -> Progress:
        self.thread = threading.Thread(target=self._tick, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join()  # it may write to the stream, which the caller may close next
        with self.lock:
            self._clear()

    def now(self, kind: str, what: str) -> None:
        """Ends the previous step and begins this one. kind: one of the plan's; any other is not counted."""
        with self.lock:
            now = self.clock()
            if self.kind in self.plan:
                self.took.setdefault(self.kind, []).append(now - self.since)
            self.kind, self.what, self.since = kind, what, now
            self._show(SPACED)

    def drop(self, kind: str, n: int) -> None:
        """Removes n steps from the plan."""
        with self.lock:
            self.plan[kind] -= n

    def write(self, text: str) -> None:
        """Prints a result to stdout, above the line."""
        with self.lock:
            self._clear()
            print(text, flush=True)

    def left(self) -> float | None:
        """Seconds left for the kinds of steps of which at least one is done; None if there are none."""
        total, known = 0.0, [kind for kind in self.plan if kind in self.took]
        for kind in known:
            each, running = sum(self.took[kind]) / len(self.took[kind]), kind == self.kind
            total += max(0, self.plan[kind] - len(self.took[kind]) - running) * each
            total += running * max(0.0, each - (self.clock() - self.since))
        return total if known else None

    def line(self) -> str:
        left = self.left()
        unknown = any(n > 0 for kind, n in self.plan.items() if kind not in self.took)
        about = ""
        if left is not None and (left >= 1 or not unknown):  # "more than 0:00" says nothing
            about = f", {'more than' if unknown else 'about'} {minutes(left)} left"
        return f"[{minutes(self.clock() - self.begin)}{about}] {self.what}"

    def _tick(self) -> None:
        while not self.ended.wait(1.0 if self.stream.isatty() else 0.5):
            with self.lock:
                if not self.ended.is_set():
                    self._show(0.0 if self.stream.isatty() else EVERY)

    def _show(self, spaced: float) -> None:
        now = self.clock()
        if self.stream.isatty():
            self.shown = self.line()
            self.stream.write(f"\r\x1b[K{self.shown}")
        elif now - self.printed >= spaced and now - self.begin >= FIRST:
            self.stream.write(self.line() + "\n")
            self.printed = now
        self.stream.flush()

    def _clear(self) -> None:
        if self.shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.shown = ""


def minutes(seconds: float) -> str:
    """0:07, 12:30, 1:02:30."""
    m, s = divmod(round(seconds), 60)
    return f"{m}:{s:02d}" if m < 60 else f"{m // 60}:{m % 60:02d}:{s:02d}"
