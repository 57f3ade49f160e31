"""The grammar of --method: names, knobs and layers; files of a user's own folder."""

from __future__ import annotations

import pytest

from cache.grammar import HERE, Part, check_names, parse_spec
from cache.spec import describe, layer_methods, method_class, resolve
from kv_methods.full import Full
from kv_methods.sals import Sals
from kv_methods.self_index import SelfIndex
from runtime.errors import InputError


def test_grammar():
    assert parse_spec("self_index") == [Part("self_index")]
    assert parse_spec("sals-12.5,budget=0.1,sinks=8") == [Part("sals-12.5", knobs=dict(budget="0.1", sinks="8"))]
    assert parse_spec("0-1:full, 2-:sals-12.5, budget=0.1") == [
        Part("full", 0, 1), Part("sals-12.5", 2, None, dict(budget="0.1"))]  # fmt: skip
    assert parse_spec("3:full")[0] == Part("full", 3, 3)
    assert parse_spec("sals,skip_layers=0,1,-1,budget=0.2")[0].knobs == dict(skip_layers="0,1,-1", budget="0.2")


UNREADABLE = [
    "", ",", "=", "a=1", "full,", "full,streaming", "0-1:", ":full", "x:full", "0-1-2:full", "0:full,streaming",
    "full,,budget=1", "full,1",
]  # fmt: skip


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_cannot_be_read_is_named(text):
    with pytest.raises(InputError, match="cannot read|unknown"):
        parse_spec(text)


def test_knobs_belong_to_their_part_and_common_ones_to_all_that_have_them():
    layers = layer_methods("0-1:full,2:self_index,budget=80,3-:self_index", 5, dict(budget=100))
    assert [c for c, _ in layers] == [Full, Full, SelfIndex, SelfIndex, SelfIndex]
    assert [a.budget for _, a in layers[2:]] == [80, 100, 100]
    assert [a.rank for _, a in layer_methods("sals-12.5", 2)] == [0.125] * 2


def test_later_parts_win_and_skipped_layers_take_the_methods_own_rule():
    assert [c for c, _ in layer_methods("0-:self_index,1:full", 3)] == [SelfIndex, Full, SelfIndex]
    layers = layer_methods("sals,budget=0.2", 16)
    assert [a.budget for _, a in layers[:3]] == [1.0, 1.0, 0.2] and layers[-1][1].budget == 1.0
    assert {c for c, _ in layers} == {Sals}
    assert [c for c, _ in layer_methods("double_sparsity,skip_layers=0,-1", 3)][::2] == [Full, Full]
    assert all(a.budget == 0.2 for _, a in layer_methods("sals,budget=0.2,skip_layers=none", 16))


@pytest.mark.parametrize(
    "spec, says",
    [
        ("self_index,colour=red", "no knob 'colour'"), ("0-99:full", "outside"), ("0:full", "no method for layer 1"),
        ("self_index,budget=lots", "budget='lots'"), ("sals,skip_layers=7", "layer 7"),
        ("sals,skip_layers=some", "neither auto"), ("full,budget=3", "no knob 'budget'"),
        ("slas", r"unknown method 'slas': did you mean sals\? generate.py --list-methods prints all"),
        ("self-index,budget=80", "did you mean self_index or"), ("sals-12", "did you mean sals-12.5 or"),
        ("double", "did you mean double_sparsity"),
        ("quest,bugdet=80", "'bugdet': did you mean budget.* it takes budget, "),
        ("razor,retrieval_method=qest", "did you mean quest"), ("h2o,heavy=0", "h2o: heavy 0 is out of range"),
        ("rocket,kept=0", "rocket: kept 0 is out of range"),
    ],
)  # fmt: skip
def test_wrong_specs(spec, says):
    with pytest.raises(InputError, match=says):
        layer_methods(spec, 4)


# ---- a folder of one's own ----

FIRST = "from kv_methods.full import Full\nNEAR = 7\nclass First(Full):\n    pass\n"
SECOND = "from kv_methods.own_first import NEAR, First\nclass Second(First):\n    near = NEAR\n"


def test_siblings_import_each_other_and_a_broken_file_breaks_itself_alone(tmp_path, monkeypatch):
    (tmp_path / "own_first.py").write_text(FIRST)
    (tmp_path / "own_second.py").write_text(SECOND)
    (tmp_path / "own_broken.py").write_text("import torch\n\nthis is no Python\n")
    (tmp_path / "own_raises.py").write_text('"""Mine."""\nx = 1\nraise KeyError("gone")\n')
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
    assert method_class("own_second").near == 7
    assert resolve("sals-12.5")[0].__name__ == "Sals"  # presets are looked up in every file
    listed = describe()
    assert "own_broken: broken: " in listed and "own_broken.py:3 does not import: SyntaxError" in listed
    assert "own_raises.py:3 does not import: KeyError: 'gone'" in listed and "own_second: " in listed
    for name in ("own_broken", "own_raises"):
        with pytest.raises(InputError, match=f"{name}.py:3"):
            resolve(name)
    (tmp_path / "own_raises.py").write_text(FIRST.replace("First", "Raises"))
    assert method_class("own_raises").__name__ == "Raises"  # mended, and read again


def test_an_own_file_takes_the_place_of_ours_and_one_line_says_so(tmp_path, monkeypatch, capsys):
    own, ours = tmp_path / "h2o.py", resolve("h2o")[0]
    own.write_text(FIRST.replace("First", "H2O"))
    (tmp_path / "mysals.py").write_text((HERE / "sals.py").read_text())
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
    layers = layer_methods("0-1:h2o,2-:quest,budget=32", 4)
    assert [cls.__name__ for cls, _ in layers] == ["H2O", "H2O", "Quest", "Quest"]
    layer_methods("h2o", 4)
    assert capsys.readouterr().err == f"warning: {own} takes the place of kv-fast's own method h2o\n"
    assert resolve("sals-12.5")[0].__module__ == "kv_methods.sals"  # a copy under another name leaves presets alone
    (tmp_path / "sals.py").write_text("no Python\n")
    for name in ("sals", "sals-12.5"):
        with pytest.raises(InputError, match="sals.py:1 does not import: SyntaxError"):
            resolve(name)
    monkeypatch.setenv("KV_FAST_METHODS", "")
    assert method_class("h2o").paper == ours.paper


@pytest.mark.parametrize("presets", [
    "PRESETS = dict(tight=dict(knob=1))", 'PRESETS: dict[str, dict] = {"tight": {}}',
    'PRESETS = {f"{x}ight": {} for x in "tf"}', 'MORE = {"tight": {}}\nPRESETS = {**MORE, "loose": {}}',
])  # fmt: skip
def test_a_preset_is_known_before_torch_is_imported(tmp_path, monkeypatch, presets):
    (tmp_path / "own.py").write_text(f"{FIRST}\n\n{presets}\n")
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
    check_names("0:full,1-:tight")
    (tmp_path / "own.py").write_text(f'{FIRST}\n\nPRESETS = {{"loose": {{}}}}\n')
    with pytest.raises(InputError, match="unknown method 'tight'"):
        check_names("0:full,1-:tight")


def test_a_missing_folder_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="nowhere.* not a folder"):
        resolve("full")


def test_the_same_name_in_another_folder_is_another_method(tmp_path, monkeypatch):
    for folder, near in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_near.py").write_text(FIRST.replace("pass", f"near = {near}"))
        monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path / folder))
        assert method_class("own_near").near == near
