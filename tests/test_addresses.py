"""No kernel loads or stores outside of its tensors, where lengths are least alike: a GPU would not say so.

tests/conftest.py has the interpreted kernels of every test watched; here are the cases that reach for the edges.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from kernels.backend import tl, triton
from runtime.machine import ROOT
from tests.audit import addresses
from tests.audit.addresses import edges

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="natively, nothing is watched")


@triton.jit
def shifted(x, y, n, BY: tl.constexpr, STORE: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(y + i + STORE, tl.load(x + i + BY, mask=i < n, other=0.0), mask=i < n)


@pytest.mark.parametrize(
    "by, store, n, wrong",
    [(0, 0, 16, None), (1, 0, 15, None), (-1, 0, 1, "loads .* at byte -4 of one of 64"), (1, 0, 16, "loads .* 64 of")]
    + [(0, 1, 16, "1 of the addresses that it stores .* at byte 64 of one of 64")],
)
def test_what_is_masked_in_lies_in_a_tensor(by, store, n, wrong):
    x, y = torch.zeros(3, 16)[1], torch.zeros(16)
    x = x.clone()  # a storage of its own
    if wrong is None:
        shifted[(1,)](x, y, n, BY=by, STORE=store)
    else:
        with pytest.raises(Exception, match=wrong):
            shifted[(1,)](x, y, n, BY=by, STORE=store)


# the two that ask a selection for slots up to a position before the first one, and other ways of selecting; whole rows
# and the other methods' own kernels are in tests/test_triton_contract.py
CASES = [("sals", "chunks"), ("double_sparsity_offload", "chunks"), ("sals", "alone"), ("quest", "chunks"),
         ("self_index", "chunks"), ("hshare", "alone"), ("razor", "whole")]  # fmt: skip


@pytest.mark.parametrize("name, blocks", CASES)
def test_edges(name, blocks, monkeypatch):
    monkeypatch.setattr("kernels.backend.BACKEND", "triton")
    seen = edges(name, blocks)
    assert seen.launches and all(seen.stores[kernel] and seen.addresses[kernel] for kernel in seen.launches), (
        seen.stores
    )


def test_a_methods_file_outside_the_repository(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("kernels.backend.BACKEND", "triton")
    monkeypatch.setenv("KV_FAST_METHODS", "")
    code = (ROOT / "kv_methods" / "random.py").read_text()
    (tmp_path / "by_chance.py").write_text(code)
    status, out, err = cli(addresses, "--methods", tmp_path / "by_chance.py", "--blocks", "whole", "--json")
    assert status == 0, err
    (row,) = json.loads(out)
    assert row["method"] == "by_chance" and row["loads"] > 0
