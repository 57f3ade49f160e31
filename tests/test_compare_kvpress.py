"""Our eviction methods beside kvpress, where it is installed; else what the comparison itself computes."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch

from runtime.errors import InputError
from scripts.shared.markdown import both_found
from tests.audit import compare_kvpress

INSTALLED = importlib.util.find_spec("kvpress") is not None


def command(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["compare_kvpress.py", *args])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    compare_kvpress.main()


@pytest.mark.skipif(not INSTALLED, reason="kvpress is not installed")
def test_set_alike_they_keep_the_same_tokens(monkeypatch, tmp_path):
    out = tmp_path / "kvpress.json"
    args = ["--samples", "2", "--lengths", "320", "--keep", "1/2,1/4", "--out", str(out)]
    command(monkeypatch, *args)
    data = json.loads(out.read_text())
    rows = data["rows"]
    assert {r["method"] for r in rows} == {
        "full", "random", "streaming", "snapkv", "tova", "h2o", "pyramidkv", "keydiff", "expected_attention", "kvzip",
        "adakv", "criticalkv", "knorm", "chunkkv", "lagkv", "qfilters", "compactor",
    }  # fmt: skip
    assert len(data["samples"]) == 2 and max(s["logits_apart"] for s in data["samples"]) < 1e-3
    for r in rows:
        assert len(r["needle_ours"]) == len(r["needle_theirs"]) == 2
        if "common" in r:
            assert 0 < r["common_min"] <= r["common"] <= 1
        if "common" in r and r["setting"] == "alike":  # nearly equal scores may be rounded apart
            assert r["common"] > 0.995 and r["sizes_apart"] == 0, r
    assert [r["common"] for r in rows if r["setting"] == "default" and r["method"] == "snapkv"][0] < 0.95
    # what a run that was cut short left is gone on with
    cut = data | dict(samples=data["samples"][:1], rows=[])
    out.write_text(json.dumps(cut))
    command(monkeypatch, *args, "--resume")
    assert json.loads(out.read_text())["samples"] == data["samples"]
    out.write_text(json.dumps(data | dict(commit="another")))
    with pytest.raises(InputError, match="another version of files"):
        command(monkeypatch, *args, "--resume")


@pytest.mark.skipif(INSTALLED, reason="kvpress is installed")
def test_without_kvpress_it_says_so(monkeypatch):
    with pytest.raises(InputError, match="pip install kvpress"):
        command(monkeypatch)


def test_positions_of_kept_keys():
    keys = torch.randn(1, 2, 9, 4)
    kept = torch.stack((keys[0, 0, [7, 1, 4]], keys[0, 1, [0, 8, 2]]))[None]
    whole = compare_kvpress.Held([(keys, keys)], [None])
    held = compare_kvpress.Held([(kept, kept)], [None])
    assert compare_kvpress.positions(held, whole) == [[[1, 4, 7], [0, 2, 8]]]
    marks = torch.zeros(9, dtype=torch.long), torch.tensor([0] * 3 + [1] * 6), torch.tensor([*range(3), *range(3, 9)])
    marked = compare_kvpress.Held([(keys, keys)], [marks])
    assert compare_kvpress.positions(marked, whole) == [[[3, 4, 5, 6, 7, 8], [0, 1, 2]]]
    assert compare_kvpress.common([[[1, 4, 7], [0, 2, 8]]], [[[1, 4, 7], [0, 3]]]) == ([1.0, 1 / 3], 1)


def test_a_row_counts_both_sides_by_task():
    pair = compare_kvpress.Pair("snapkv", "alike", "SnapKVPress", lambda ratio: None, "snapkv,budget={n}", "")

    def sample(task, index, ours, theirs, share):
        result = dict(found=[ours, theirs], common=share, common_min=share / 2, sizes_apart=index)
        return dict(task=task, length=512, index=index, cases=[result])

    samples = [sample("a", 0, 1, 0, 1.0), sample("b", 0, 1, 1, 0.5), sample("a", 1, 0, 0, 0.6)]
    (row,) = compare_kvpress.summary(samples, [(pair, "1/4", 100)], 512)
    assert row["ours"] == "snapkv,budget=100" and row["a_ours"] == [1, 0] and row["b_theirs"] == [1]
    assert sorted(both_found(row)[0]) == [0, 1, 1]
    assert (row["common"], row["common_min"], row["sizes_apart"]) == (0.7, 0.25, 1)
    assert list(compare_kvpress.summary(samples, [(pair, "1/4", 100)], 1024)) == []


@pytest.mark.parametrize("kept", [100, 256, 1000])
def test_a_steeper_beta_makes_their_sizes(kept):
    """w + (K - w) s, of ours, are K s' of theirs at both ends of a sequence of the same mean."""
    window, theirs = 8, compare_kvpress.BETA
    ours = float(compare_kvpress.Pair("", "", "", None, "{beta}", "").spec(kept))
    for a, b in ((2 - 1 / ours, 2 - 1 / theirs), (1 / ours, 1 / theirs)):
        assert abs(window + (kept - window) * a - kept * b) < 1e-6
