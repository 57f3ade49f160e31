"""The sentences of results/claims.txt, each with the condition on the result files under which it is true."""

from __future__ import annotations

import re
from typing import Any

from runtime.errors import InputError
from runtime.machine import ROOT
from scripts.report import data
from scripts.report.data import NotMeasured, predicted, rows_of
from scripts.shared.markdown import Row, both_found, paired, percent

FILE = ROOT / "results" / "claims.txt"
SMOL = "SmolLM2"


def closer(method: str, other: str, tokens: int = 4096) -> bool:
    """Whether a method's KL to full is below another's, intervals apart."""
    return predicted(method, "kl", tokens)[2] < predicted(other, "kl", tokens)[1]


def kl(method: str, tokens: int = 4096) -> str:
    return f"{predicted(method, 'kl', tokens)[0]:.3f}"


def measured(rows: list[Any]) -> list[Any]:
    if not rows:
        raise NotMeasured
    return rows


def alike() -> list[Row]:
    """The pairs of the comparison to kvpress that have equal settings."""
    return measured([r for r in rows_of("kvpress") if r["setting"] == "alike"])


def in_common() -> list[float]:
    """Of the pairs with equal settings that drop tokens, the share of tokens that both keep."""
    return measured([r["common"] for r in alike() if "common" in r])


def drafting(chance: float) -> list[float]:
    """Tokens/s with drafts that are right with a chance, over full's."""
    return measured([r["times_full"] for r in rows_of("speculate") if r.get("chance") == chance and "times_full" in r])


def restoring(method: str, key: str) -> float:
    return measured([min(r[key]) for r in rows_of("restore") if r["method"] == method])[0]


NAMES = vars(data) | dict(closer=closer, kl=kl, alike=alike, in_common=in_common, drafting=drafting, percent=percent,
                          restoring=restoring, both_found=both_found, paired=paired, SMOL=SMOL)  # fmt: skip


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
    return hold, broken
