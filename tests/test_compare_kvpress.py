"""Our eviction methods beside kvpress, where it is installed; else what the comparison itself computes."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch

from errors import InputError
from scripts.eval import compare_kvpress

INSTALLED = importlib.util.find_spec("kvpress") is not None


def command(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["compare_kvpress.py", *args])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    compare_kvpress.main()


@pytest.mark.skipif(not INSTALLED, reason="kvpress is not installed")
def test_set_alike_they_keep_the_same_tokens(monkeypatch, tmp_path, capsys):
    out = tmp_path / "kvpress.json"
    command(monkeypatch, "--samples", "1", "--seq-len", "320", "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert {r["method"] for r in rows} == {"streaming", "snapkv", "tova", "h2o", "pyramidkv"}
    for r in rows:
        assert np.shape(r["common_by_head"]) == (6, 4) and 0 < r["common_min"] <= r["common"] <= 1
        if r["setting"] == "alike":  # nearly equal scores may be rounded apart
            assert r["common"] > 0.995 and r["kept_by_layer"]["ours"] == r["kept_by_layer"]["theirs"], r
    assert [r["common"] for r in rows if r["setting"] == "default" and r["method"] == "snapkv"][0] < 0.95


@pytest.mark.skipif(INSTALLED, reason="kvpress is installed")
def test_without_kvpress_it_says_so(monkeypatch):
    with pytest.raises(InputError, match="pip install kvpress"):
        command(monkeypatch)


def test_positions_of_kept_keys():
    keys = torch.randn(2, 9, 4)
    kept = torch.stack((keys[0, [7, 1, 4]], keys[1, [0, 8, 2]]))
    assert compare_kvpress.positions(kept, keys) == [[1, 4, 7], [0, 2, 8]]
    share = compare_kvpress.common([[[1, 4, 7], [0, 2, 8]]], [[[1, 4, 7], [0, 3]]])
    assert share.tolist() == [[1.0, 1 / 3]]


@pytest.mark.parametrize("kept", [64, 256, 1000])
def test_a_steeper_beta_makes_their_sizes(kept):
    """w + (K - w) s, of ours, are K s' of theirs at both ends of a sequence of the same mean."""
    window, theirs = 8, compare_kvpress.BETA
    ours = compare_kvpress.steeper(kept, window)
    for a, b in ((2 - 1 / ours, 2 - 1 / theirs), (1 / ours, 1 / theirs)):
        assert abs(window + (kept - window) * a - kept * b) < 1e-6
