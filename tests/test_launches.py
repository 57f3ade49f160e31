"""Every launch at real sizes goes through Triton's own launcher, for cards that are not there.

The interpreter calls a kernel as it stands and an ahead-of-time compilation never calls it: neither has seen that five
kernels could not be launched at all, because of an argument's name.
"""

from __future__ import annotations

import json

import pytest

from tests.audit.kernel_report import kernels
from tests.compiling import EXPERTS, FEW, report

KERNELS = set(kernels())


def launches(*argv):
    rows, done = report(*argv)
    assert done.returncode == 0, done.stderr
    return rows


@pytest.mark.slow
def test_every_kernel_is_launched_by_some_method_and_can_be():
    """On every card; nothing is compiled."""
    found = launches("--bind", *FEW) + launches("--bind", *EXPERTS)
    assert {(x["file"], x["kernel"]) for x in found} == KERNELS
    assert {x["cc"] for x in found} == {80, 89, 90, 100}
    assert all(x["problem"] is None and x["launches"] > 0 and x["methods"] for x in found)
    forms = [json.dumps([x["kernel"], x["args"], x["options"]], sort_keys=True) for x in found if x["cc"] == 90]
    assert len(set(forms)) == len(forms), "no launch is there twice"
