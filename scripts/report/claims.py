"""The sentences of results/claims.txt, each with the condition on the result files under which it is true."""

from __future__ import annotations

import re

from runtime.errors import InputError
from runtime.machine import ROOT
from scripts.report import data
from scripts.report.data import NotMeasured, predicted
from scripts.report.measure import DECODING
from scripts.shared.markdown import both_found, percent, resampled

FILE = ROOT / "results" / "claims.txt"


def closer(method: str, other: str, tokens: int = 4096) -> bool:
    """Whether a method's KL to full is below another's on the same windows: the interval of the mean difference is."""
    mine, theirs = (data.windows_of(m, tokens)["windows"] for m in (method, other))
    each = zip(mine["kl"], theirs["kl"], mine["tokens"], strict=True)
    return resampled([(a - b) / n for a, b, n in each])[2] < 0


def kl(method: str, tokens: int = 4096) -> str:
    return f"{predicted(method, 'kl', tokens)[0]:.3f}"


def read(method: str, tokens: int = 4096) -> float:
    """The share of full's bytes that a step reads."""
    return data.windows_of(method, tokens)["read_share"]


NAMES = vars(data) | dict(DECODING=DECODING, closer=closer, kl=kl, read=read, both_found=both_found, percent=percent)


def claims() -> list[list[str]]:
    """[section, sentence, condition] of every line."""
    lines = [line.split(" | ") for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    if wrong := [line for line in lines if len(line) != 3]:
        raise InputError(f"{FILE}: a line is section | sentence | condition, but one is {' | '.join(wrong[0])[:80]}")
    return lines


def filled(sentence: str) -> str:
    """With the values of its expressions; numbers have three digits."""

    def value(found: re.Match) -> str:
        x = eval(found[1], NAMES)
        return f"{x:.3g}" if isinstance(x, float) else str(x)

    return re.sub(r"\{(.*?)\}", value, sentence)


def holding(section: str = "") -> tuple[list[str], list[str]]:
    """The sentences of a section, or of all, that hold, and those that do not. Those not measured are in neither."""
    hold, broken = list[str](), list[str]()
    for of, sentence, condition in claims():
        if of.startswith(section):
            try:
                (hold if eval(condition, NAMES) else broken).append(filled(sentence))
            except NotMeasured:
                continue
            except Exception as e:  # a wrong name or field: say in which line
                raise InputError(f"{FILE}: {type(e).__name__}: {e}, in: {sentence[:60]}... | {condition}") from None
    return hold, broken
