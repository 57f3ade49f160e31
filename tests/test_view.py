"""The page of scripts/eval/view.py: one file, and what its script reads."""

from __future__ import annotations

import re

import pytest
import torch

from scripts.eval import view

TEXT = "import os\n\n</script> is text. " + "def main():\n    return os.name\n" * 12


def test_page_has_everything_in_it(cli, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    argv = ("--method", "self_index,sinks=4,budget=24", "--steps", "3", "--out", tmp_path / "view.html")
    assert cli(view, "--prompt-file", tmp_path / "text.txt", *argv)[0] == 0
    text = (tmp_path / "view.html").read_text()
    assert not re.search(r"https?://", text) and "default-src 'none'" in text
    assert text.count("</script>") == 2, "the text's own </script> would end the script that holds it"


def test_packed_arrays_are_what_was_recorded():
    torch.manual_seed(0)
    full, some = (view.Recording(2, 3, 4, 2, 21) for _ in range(2))
    for r in (full, some):
        r.mass[:] = torch.rand(r.mass.shape).softmax(-1)
        r.seen[:] = torch.rand(r.seen.shape) < 0.5
    packed = some.packed(full)
    for s, layer, h in ((0, 0, 0), (1, 2, 3)):
        kept = sum(float(full.mass[s, layer, h, t]) for t in range(21) if some.seen[s, layer, h // 2, t])
        assert packed["recall"][s][layer][h] == pytest.approx(kept, abs=6e-4)
    bits = view.pack_bits(some.seen)
    assert bits.shape[-1] == 3
    for t in range(21):
        assert torch.equal(bits[..., t // 8] >> t % 8 & 1, some.seen[..., t].to(torch.uint8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps 0"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt"),
        (("--method", "no"), "no"),
        (("--query-in-prompt",), "add --question"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, refused):
    assert message in refused(view, "--out", tmp_path / "v.html", *arguments) and not list(tmp_path.iterdir())


def test_a_text_of_more_positions_than_the_page_holds_is_refused(tmp_path, refused, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setattr(view, "MOST", 100)
    error = refused(view, "--prompt-file", tmp_path / "text.txt", "--out", tmp_path / "view.html")
    assert "tokens: with --steps, a page holds 100" in error
