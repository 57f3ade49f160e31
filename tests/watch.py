"""A limit to what a test may take: what hangs is told as that."""

from __future__ import annotations

import contextlib
import signal


class Hang(BaseException):
    pass


@contextlib.contextmanager
def within(seconds):
    def stop(number, frame):
        raise Hang(f"{seconds} s are over")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
