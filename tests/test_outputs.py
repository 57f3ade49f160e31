"""Commands that write: a disk that does not take it is one line, before anything is computed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

import generate
from engine import llm
from models.tiny.training import train_tiny
from runtime.errors import run_cli
from scripts.bench import bench_attention, bench_generate
from scripts.eval import analyze, compare
from scripts.report import update_readme
from scripts.shared import options
from tests.audit import kernel_report

OUTPUTS = {
    "generate --profile": (generate.main, ["--prompt", "a", "--profile"]),
    "compare": (compare.main, ["--out"]),
    "analyze": (analyze.main, ["--out"]),
    "analyze --plots": (analyze.main, ["--plots"]),
    "bench_generate": (bench_generate.main, ["--out"]),
    "bench_attention": (bench_attention.main, ["--model", "llama-2-7b", "--out"]),
    "kernel_report": (kernel_report.main, ["--out"]),
    "train_tiny": (train_tiny.main, ["--out"]),
    "update_readme": (update_readme.main, []),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_disk_that_is_read_only_is_told_before_anything_is_computed(name, tmp_path, monkeypatch, capsys):
    main, argv = OUTPUTS[name]

    def read_only(*a, **kw):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for change in ("touch", "mkdir", "write_text", "write_bytes"):
        monkeypatch.setattr(Path, change, read_only)
    for heavy in ("load_checkpoint", "random_transformer", "load_tokenizer"):
        for module in {sys.modules[main.__module__], llm, options}:
            monkeypatch.setattr(module, heavy, lambda *a, **kw: pytest.fail("it has begun"), raising=False)
    out = [str(tmp_path if name == "plots" else tmp_path / "out")] if argv else []
    monkeypatch.setattr(sys, "argv", [name, *argv, *out])
    with pytest.raises(SystemExit) as e:
        run_cli((lambda: main([*argv, *out])) if main in (generate.main, kernel_report.main) else main)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and "cannot" in err, err
