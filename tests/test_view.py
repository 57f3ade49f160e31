"""The page of scripts/eval/view.py, in a real browser without a window; skipped where there is none."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from runtime.errors import run_cli
from scripts.eval import view

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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


def in_browser(page, where: str = "") -> str:
    """The document after its script has run."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run([*command, f"{page.as_uri()}{where}"], capture_output=True, text=True, timeout=120)
    return done.stdout


def shown(dom: str) -> list[str]:
    return [html.unescape(x) for x in re.findall(r'<span class="facts">(.*?)</span>', dom)]


def test_page_has_everything_in_it(page):
    text = page.read_text()
    assert not re.search(r"https?://", text) and "default-src 'none'" in text
    assert text.count("</script>") == 2, "the text's own </script> would end the script that holds it"


@pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")
def test_what_the_browser_shows_is_what_was_attended_to(page):
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])
    _, method = data["methods"].values()
    for step, layer, head in ((0, 0, 0), (2, 1, 1)):
        where = f"#step={step}&layer={layer}&head={head}"
        left, right = shown(in_browser(page, where))
        assert "attends to 100.0 %" in left and "recall 1.000" in left
        assert f"recall {method['recall'][step][layer][head]:.3f}" in right
        assert f"says {json.dumps(method['said'][step], ensure_ascii=False)}" in right
        share = float(re.search(r"attends to ([\d.]+) %", right)[1])
        assert 24 / data["tokens"] <= share / 100 < 0.8  # at least the budget, and not everything
    assert shown(in_browser(page, "#layer=99")) == shown(in_browser(page)), "a layer that is not there"
    dom = in_browser(page)
    assert dom.count('title="token ') == 2 * data["tokens"], "a token is missing on one of the two sides"
    assert 'class="unseen"' in dom and 'class="now"' in dom and "rgba(var(--ink)" in dom


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
