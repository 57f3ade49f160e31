"""The page of scripts/eval/view.py: one file, and what its script reads."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from runtime.errors import run_cli
from scripts.eval import view

TEXT = "import os\n\n</script> is text. " + "def main():\n    return os.name\n" * 12


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view")
    (folder / "text.txt").write_text(TEXT)
    run("--prompt-file", folder / "text.txt", "--method", "self_index,sinks=4,budget=24", "--steps", "3",
        "--out", folder / "view.html")  # fmt: skip
    return folder / "view.html"


def run(*arguments) -> int:
    """The command in this process -> its exit code."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", ["view.py", *map(str, arguments)])
        try:
            run_cli(view.main)
        except SystemExit as e:
            return int(e.code or 0)
    return 0


def test_page_has_everything_in_it(page):
    text = page.read_text()
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
    [(("--steps", "0"), "--steps 0"), (("--prompt-file", "nowhere.txt"), "nowhere.txt"), (("--method", "no"), "no")],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    assert run("--out", tmp_path / "v.html", *arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not list(tmp_path.iterdir())
