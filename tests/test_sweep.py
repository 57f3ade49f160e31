"""Launch options: the table that launchers read, and the search that writes it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from kernels import backend, tuned
from kernels.page_score import page_score
from runtime.errors import InputError
from runtime.machine import ROOT
from tests.audit.sweep import best, noting


@pytest.fixture
def table(monkeypatch, tmp_path):
    """On a card of a name, a table of options."""
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    monkeypatch.setattr(backend.triton, "__version__", "3.6.0")
    monkeypatch.setattr(tuned, "TABLE", path)
    tuned.chosen.cache_clear()
    yield path
    tuned.chosen.cache_clear()


def test_launchers_take_what_the_table_has_for_card_and_triton(table):
    options = dict(kernel=dict(num_warps=8, maxnreg=128, BLOCK_N=32, D=64))
    table.write_text(json.dumps({"card": {"3.6.0": options, "3.9.0": dict(kernel=dict(num_warps=16))}, "other": {}}))
    assert tuned.tuned("kernel", BLOCK_N=64, num_warps=4) == dict(BLOCK_N=32, num_warps=8, maxnreg=128)
    assert tuned.tuned("another", num_warps=4) == dict(num_warps=4)


def test_without_a_table_they_take_their_own(table):
    assert tuned.tuned("kernel", BLOCK_N=64, num_warps=4) == dict(BLOCK_N=64, num_warps=4)


def test_a_broken_table_is_named(table):
    table.write_text("[1")
    with pytest.raises(InputError, match=r"tuned.json is no table of .* delete it, or sweep again"):
        tuned.tuned("kernel", num_warps=4)


def test_the_best_options_are_found():
    """One change after the other; what does not run is infinitely slow, and a gain below 2 % is none."""
    times = {(4, 64): 10.0, (8, 64): 9.9, (4, 128): 8.0, (8, 128): 6.0, (16, 128): math.inf, (8, 256): 7.0}
    default = dict(num_warps=4, BLOCK_N=64, D=128)
    tried = []

    def score(changes):
        both = default | changes
        tried.append((both["num_warps"], both["BLOCK_N"]))
        assert both["D"] == 128
        return times.get(tried[-1], 11.0)

    assert best(default, score) == dict(num_warps=8, BLOCK_N=128)
    assert len(tried) == len(set(tried)), "nothing is measured twice"
    assert best(dict(num_warps=4), lambda changes: 1.0) == {}


def test_an_operation_is_called_again(monkeypatch):
    """Once for each form, with the options that are tried."""
    monkeypatch.setattr(backend, "BACKEND", "triton")
    launched = []
    monkeypatch.setattr(tuned, "chosen", lambda: {"_page_score": dict(BLOCK_P=16)} if launched else {})
    with noting() as calls:
        for pages in (40, 40, 50):
            q, low = torch.randn(2, 4, 32), torch.randn(2, 2, pages, 32)
            page_score(q, low, low + 1)
    assert [len(c) for c in calls.values()] == [2] and list(calls) == ["_page_score"]
    before = calls["_page_score"][0]()
    launched.append(True)
    assert torch.allclose(calls["_page_score"][0](), before, atol=1e-5)
    assert tuned.ASKED["_page_score"]["BLOCK_P"] > 16


@pytest.mark.slow
def test_a_sweep_without_a_card(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KV_FAST_BACKEND")}
    out = tmp_path / "tried.json"
    command = ["--cc", "90", "--kernels", "_page_score", "--methods", "quest", "--sizes", "2x4096", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "tests.audit.sweep", *command], cwd=ROOT, env=env, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["cc 90"]
    assert "_page_score: " in done.stdout and len(found) == 1
