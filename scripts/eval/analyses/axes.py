"""Axes that several plots use."""

from __future__ import annotations

import math
from typing import Any


def fraction(x: float) -> str:
    """1/8 for 0.125; a number that is not a power of two stays decimal."""
    return f"1/{1 / x:g}" if x < 1 and math.log2(x).is_integer() else f"{x:g}"


def integer_axis(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def fraction_axis(ax: Any, values: tuple[float, ...]) -> None:
    """A logarithmic x axis with a tick at each value."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [fraction(v) for v in values])
    ax.minorticks_off()
