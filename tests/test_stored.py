"""Compiled steps on disk: used unasked where they fit, by nobody else, and never damaged ones."""

import json
import os
import shutil
from unittest.mock import Mock

import pytest
import torch

from engine import LLM, Sampling, compiled, stored
from runtime.machine import TINY

pytestmark = pytest.mark.cpp
PROMPTS = ["import os\n" * 30, "class Reader:\n    def __init__(self"]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A folder with the step of two rows, and the tokens that it gave and an eager one gives."""
    folder = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_FAST_STEPS", "1")
        patch.setattr(stored, "cache_path", lambda name: folder / name)
        given = [c.tokens for c in LLM(TINY, method="self_index", compile=True).generate(PROMPTS, 12)]
    assert given == [c.tokens for c in LLM(TINY, method="self_index").generate(PROMPTS, 12)]
    return folder, given


@pytest.fixture
def llm(steps, monkeypatch, tmp_path):
    """Makes LLMs that find a copy of the folder and cannot compile."""
    shutil.copytree(steps[0] / "steps", tmp_path / "steps")
    monkeypatch.setenv("KV_FAST_STEPS", "1")
    monkeypatch.setattr(stored, "cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(compiled, "torch_compile", lambda function, device: None)
    return lambda **more: LLM(TINY, **dict(method="self_index") | more)


def used(llm):
    """Whether the last call ran stored graphs."""
    step = next(iter(llm._steps.values()))[0]
    return isinstance(step, compiled.CompiledStep) and step.graphs is not None


def test_a_stored_step_is_used_unasked(llm, steps, capsys, monkeypatch):
    monkeypatch.setattr(os, "utime", Mock(side_effect=OSError))  # a file system that is only read
    x = llm()
    assert [c.tokens for c in x.generate(PROMPTS, 12)] == steps[1] and used(x)
    assert "loading the decode step that an earlier run compiled: self_index, 2 rows" in capsys.readouterr().err
    assert [c.tokens for c in x.generate(PROMPTS, 9)] == [t[:9] for t in steps[1]] and used(x)  # of the same size


@pytest.mark.parametrize("more, prompts, sampling", [
    (dict(compile=False), PROMPTS, None), (dict(budget=100), PROMPTS, None), (dict(method="full"), PROMPTS, None),
    (dict(dtype="bf16"), PROMPTS, None), ({}, PROMPTS[:1], None), ({}, [PROMPTS[0] * 4, "x"], None),
    ({}, PROMPTS, Sampling(0.7)),
])  # fmt: skip
def test_another_step_is_not(llm, more, prompts, sampling):
    x = llm(**more)
    assert len(x.generate(prompts, 4, sampling)) == len(prompts) and not used(x)


def test_other_code_has_other_steps(llm, monkeypatch, tmp_path):
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))  # which may hold anything
    x = llm()
    x.generate(PROMPTS, 4)
    assert not used(x) and x._stored((2, 512, 256), Sampling()) is None
    monkeypatch.delenv("KV_FAST_METHODS")
    folders = [llm()._stored((2, 512, 256), Sampling()).folder]
    with monkeypatch.context() as m:
        m.setattr(stored.SpareCores, "usual", lambda: 99)  # graphs have a number of threads of their own
        assert llm()._stored((2, 512, 256), Sampling()).folder not in folders
    monkeypatch.setattr(stored, "code", lambda: "edited")
    x = llm()
    x.generate(PROMPTS, 4)
    assert not used(x)


def test_a_damaged_step_is_not_loaded(llm, tmp_path):
    (folder,) = (tmp_path / "steps").iterdir()
    given = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
    x = llm()
    x.generate(PROMPTS, 2)
    step = stored.StoredStep(folder.name)
    assert step.load(x.model, given) is not None and step.load(x.model, given[:2]) is None
    library = folder / "0.so"
    whole, meta = library.read_bytes(), json.loads((folder / "step.json").read_text())
    library.unlink()  # it is loaded: another file in its place
    library.write_bytes(whole[:-1])
    library.chmod(0o700)
    assert step.load(x.model, given) is None
    library.write_bytes(whole)
    library.chmod(0o777)  # others may write to it
    assert step.load(x.model, given) is None
    library.chmod(0o700)
    name = next(iter(meta["tensors"]))
    for wrong in ("{", json.dumps(meta | dict(tensors={name: [[1], [1], "torch.int8"]})), json.dumps([])):
        (folder / "step.json").write_text(wrong)
        assert step.load(x.model, given) is None
    (folder / "step.json").write_text(json.dumps(meta))
    assert step.load(x.model, given) is not None


def test_the_least_recently_used_go(llm, tmp_path, monkeypatch):
    x, (folder,) = llm(), (tmp_path / "steps").iterdir()
    x.generate(PROMPTS, 2)
    monkeypatch.setattr(stored, "MOST", 2)
    for i in range(3):
        stored.StoredStep(f"{i}").keep(x.model, [], [])
        os.utime(tmp_path / "steps" / f"{i}", (i, i))
    assert {f.name for f in (tmp_path / "steps").iterdir()} == {folder.name, "2"}
