"""Launch options and blocks that a sweep has found to be faster on a card than those which the launchers would take.

`python -m tests.audit.sweep` writes the table: card -> version of Triton -> kernel -> options.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import torch

from kernels.backend import triton
from runtime.errors import InputError

TABLE = Path(os.environ.get("KV_FAST_OPTIONS", Path(__file__).with_name("tuned.json")))
OF_LAUNCHES = ("num_warps", "num_stages", "maxnreg")
ASKED: dict[str, dict[str, int]] = {}  # kernel -> what its launcher would take


def tuned(kernel: str, **default: int) -> dict[str, int]:
    """The options with which a launcher launches `kernel`, blocks among them: `default`, or what the table has."""
    ASKED[kernel] = default
    return default | {n: x for n, x in chosen().get(kernel, {}).items() if n in default or n in OF_LAUNCHES}


@functools.cache
def chosen() -> dict[str, dict[str, int]]:
    """The table's options by kernel, for this card and this Triton."""
    if not torch.cuda.is_available() or not TABLE.exists():
        return {}
    try:
        return json.loads(TABLE.read_text()).get(torch.cuda.get_device_name(), {}).get(triton.__version__, {})
    except (ValueError, AttributeError):
        raise InputError(f"{TABLE} is no table of `python -m tests.audit.sweep`: delete it, or sweep again") from None
