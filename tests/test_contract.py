"""The contract of scripts/contract/, for every method that is found: a new file is tested by being there.

And of the checks themselves: what each fault of a method's file is told as, and that no fault passes.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from cache.grammar import method_files
from kernels.op import OPERATIONS
from runtime.errors import InputError
from runtime.machine import ROOT
from scripts.contract import __main__ as testing
from scripts.contract.__main__ import CHECKS, SLOW, run_check
from scripts.contract.checks import (
    SHAPES,
    at_knobs,
    check_lossless,
    check_ragged,
    settings,
)  # fmt: skip
from scripts.contract.harness import tiny

METHODS = sorted(method_files())
every_method = pytest.mark.parametrize("name", METHODS)


# ---- every method ----


# the checks that run at each of a method's settings; of these, one is in every run
AT_A_SETTING = {k: run.__wrapped__ for k, run in CHECKS.items() if hasattr(run, "__wrapped__")}
LONG = ("compiled", "copies", "deep")


def at_one_setting():
    """Of every check and method; those that compile or decode for long are in `at_every_setting` alone."""
    quick = [(k, AT_A_SETTING.get(k, check)) for k, check in CHECKS.items() if k not in (*SLOW, *LONG)]
    # sals ranks equal tokens of the first layer by rounding, which in torch depends on the number of slots
    return [pytest.param(name, check, [settings(name)[-1]] if k in AT_A_SETTING else [], id=f"{k}-{name}",
                         marks=[pytest.mark.cpp] * ((k, name) == ("sizes", "sals")))
            for k, check in quick for name in METHODS]  # fmt: skip


@pytest.mark.parametrize("name, check, setting", at_one_setting())
def test_a_method_keeps_the_contract(name, check, setting):
    check(name, *setting)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["poison", "ragged", "presets", *LONG])
@every_method
def test_a_method_keeps_the_contract_at_every_setting(name, check):
    CHECKS[check](name)


@pytest.mark.slow
@pytest.mark.parametrize("i, name", list(enumerate(METHODS)))
def test_other_shapes(i, name):
    """One a method: `python -m scripts.contract NAME --slow` has them all, and inductor."""
    shape = SHAPES[i % len(SHAPES)]
    check_lossless(name, shape)
    check_ragged(name, settings(name)[-1], shape, (1, 33, 65, 150))


# ---- faults ----

TOY = '''
"""Dense attention in 30 lines: what a user's own file looks like."""
import torch
from cache.base import KVMethod
from kernels.dense_attention import decode_attention


class Toy(KVMethod):
    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.buffer("k", shape.kv), self.buffer("v", shape.kv)
        self.buffer("seen", (shape.max_batch,), torch.int64)

    def compress(self, q, k, v, lengths):
        B, H, S, D = k.shape
        self.k[:B, :, :S], self.v[:B, :, :S] = k, v
        self.seen[:B] = lengths

    def append(self, k, v, pos):
        row = torch.arange(len(pos))
        self.k[row, :, pos], self.v[row, :, pos] = k, v
        self.seen[: len(pos)] += 1

    def attend(self, q, idx, count, pos):
        B = len(pos)
        return decode_attention(q, self.k, self.v, torch.zeros_like(pos), self.seen[:B])

    def reset(self):
        self.seen.zero_()

    def card_nbytes(self):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * s.max_seq_len * s.head_dim * s.dtype.itemsize + 8 * s.max_batch

    def traffic(self, pos):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * (pos + 1) * s.head_dim * s.dtype.itemsize
'''

IN_HALF = """x = q.unflatten(1, (2, -1)) @ self.k[:B].mT * q.shape[2] ** -0.5
        there = torch.arange(x.shape[3]) < self.seen[:B, None, None, None]
        return (x.masked_fill(~there, float("-inf")).softmax(-1) @ self.v[:B]).flatten(1, 2)"""
ATTENDED = """    def attended(self, q, idx, count, pos):
        from cache.base import Attended

        k, v = self.k[: len(q)], self.v[: len(q)]
        at = torch.arange(k.shape[2]).expand(k.shape[:3])
        return Attended(torch.where(at < pos[:, None, None], at, -2), q, k, v)  # but for the newest
"""
PREFILL = """    def prefill(self, q, k, v, lengths, start=None):
        y = super().prefill(q, {}, v, lengths, start)
"""
ARGS = """    from dataclasses import dataclass

    @dataclass
    class Args:
        keep: int = 500
"""

# fault -> what is replaced in TOY, by what, the check that finds it, and what its author is told
BROKEN = {
    "reads_unfilled": ("self.seen[:B])", "self.seen[:B] + 1)", "poison", "not filled"),
    "forgets_the_newest": ("self.seen[:B])", "self.seen[:B] - 1)", "lossless", "not dense attention"),
    "ignores_lengths": ("self.seen[:B] = lengths", "self.seen[:B] = lengths.max()", "ragged", "or by the longest"),
    "wrong_row": ("self.k[row, :, pos], self", "self.k[0, :, pos], self", "ragged", ":21: RuntimeError: shape"),
    "reads_row_0": ("self.seen[:B])", "self.seen[:1].expand(B))", "ragged", "from another row"),
    "moves_a_buffer": ("self.seen[: len(pos)] += 1", "self.seen = self.seen + 1", "compiled", "seen moved"),
    "branches_on_data": ("B = len(pos)", "q = q * 1 if pos.max() > 50 else q\n        B = len(pos)", "compiled",
                         ":25: a step is not one graph"),
    "counts_in_python": ("self.seen[: len(pos)] += 1", "self.n = getattr(self, 'n', 0) + 1\n"
                         "        self.seen[: len(pos)] += 1 if self.n else 2", "compiled", "changes Toy"),
    "remembers_in_python": ("self.seen[: len(pos)] += 1", "self.n = 'ab' if getattr(self, 'n', '') == 'ba' else 'ba'\n"
                            "        self.seen[: len(pos)] += 1 if self.n else 2", "compiled", "another graph"),
    "forgets_to_reset": ("self.seen[:B] = lengths", "self.seen[:B] += lengths", "reset", "leaks"),
    "wrong_card": ("+ 8 * s.max_batch", "", "nbytes", "card_nbytes() is"),
    "lies_about_the_window": ("class Toy(KVMethod):", "class Toy(KVMethod):\n    supports_window = True", "window",
                              "not honoured"),
    "reads_too_much": ("(pos + 1)", "3 * s.max_seq_len", "traffic", "its buffers have"),
    "tells_less_than_it_reads": ("return decode_attention(", "return self.k[:B].sum(2).mean(1, keepdim=True) * 0 + "
                                 "decode_attention(", "traffic", "a step of 32768 tokens reads"),
    "copies_the_cache": ("self.seen[: len(pos)] += 1", "self.k[: len(pos)] = self.k[: len(pos)].roll(0, 2) * 1.0",
                         "copies", "as large as its buffer k"),
    "takes_the_wrong_dtype": ("self.seen[:B])", "self.seen[:B].float())", "lossless", "give stop as torch.int64"),
    "cannot_warm_up": ("B = len(pos)", "B = len(pos)\n        assert self.seen.min() > 1, 'empty'", "reset",
                       "before any prompt (warm-up)"),
    "sums_over_padding": ("    def reset", PREFILL.format("k") + "        return y + 1e-6 * v.mean()\n\n    def reset",
                          "deep", "sum over no padding"),
    "gives_nan": ("B = len(pos)", "B = len(pos)\n        q = q / (pos != 9)[:, None, None]", "ragged", "NaN, first in"),
    "shares_a_buffer": ("shape.kv), self.buffer(\"v\", shape.kv)", "shape.kv), self.register_buffer(\"v\", self.k[:])",
                        "nbytes", "share memory"),
    "knows_only_float32": ("shape.kv), self", "shape.kv, torch.float32), self", "half", "RuntimeError"),
    "clamps_values": ("] = k, v\n        self.seen[:B]", "] = k, v.clamp(-1000, 1000)\n        self.seen[:B]",
                      "size", 'units = "kv"'),
    "rounds_logits": ("return decode_attention(q, self.k, self.v, torch.zeros_like(pos), self.seen[:B])", IN_HALF,
                      "half", "compute logits in float32"),
    "takes_max_seq_len": ("self.seen[:B])", "self.seen[:B].clamp(max=self.shape.max_seq_len - 30))", "sizes",
                          "max_seq_len=150 changes"),
    "tells_something_else": ("    def reset", ATTENDED + "\n    def reset", "attended", "differs from that of"),
    "drops_and_does_not_say_when": ("    def __init__", ARGS + "\n    def __init__", "stress", "state `stress`"),
    "rounds_its_prompts": ("    def reset", PREFILL.format("k * 0.9") + "        return y\n\n    def reset", "store",
                           "exact_prefill = False"),
    "stores_otherwise": ("    def reset", PREFILL.format("k") + "        self.k.mul_(2)\n        return y\n\n"
                        "    def reset", "store", "needs a `store_prompt`"),
    "names_a_knob_it_has_not": ("    def __init__", "    stress = dict(keep=4)\n\n    def __init__", "ragged",
                                "has no knob 'keep'"),
}  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a method's file -> its name."""

    def to(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
        return testing.load(str(tmp_path / f"{name}.py"))

    return to


# torch.compile needs a compiler; torch's version of decode_attention takes other dtypes, and gives 0 for NaN
IN_CPP = {"copies_the_cache", "takes_the_wrong_dtype", "gives_nan"}


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.cpp] * (f in IN_CPP)) for f in BROKEN])
def test_a_fault_is_found_and_explained(fault, write):
    if fault == "remembers_in_python" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 keeps a module's attribute as it was when it compiled, without a guard")
    old, new, check, message = BROKEN[fault]
    assert TOY.count(old) == 1
    source = TOY.replace(old, new)
    if fault == "forgets_to_reset":
        source = source.replace("self.seen.zero_()", "pass")
    result = run_check(write(f"toy_{fault}", source), check)
    assert not result.ok and message in f"{result.what} -> {result.todo}", result


SILENT = """
from cache.base import KVMethod
from kv_methods.snapkv import SnapKV

class Silent(SnapKV):
    layout = KVMethod.first_slots
    stress = dict(budget=12, recent=4, adaptive=True)
"""


def test_slots_that_nobody_tells_of_are_found(write):
    """As adaptive heads were, whose slots depend on how many there are; and what says nothing cannot be saved."""
    result = run_check(write("silent", SILENT), "saved")
    assert not result.ok and "it differs from one never saved" in result.what and "`layout`" in result.todo, result
    result = run_check(write("toy_unsaid", TOY), "saved")
    assert result.ok and "Toy does not say how tokens lie in its buffer k, so it cannot be saved" in result.note, result
    said = TOY.replace("    def reset", "    layout = KVMethod.first_slots\n\n    def reset")
    assert run_check(write("toy_said", said), "saved").note == ""


RAZOR = "window_append(self.k, self.v, self.slot_of, mean_k, mean_v, k, v, place, fresh, dropped)"
READ_THEN_WRITTEN = """row, slot = torch.arange(len(pos), device=pos.device), fresh.clamp(min=0)
        left_k, left_v = self.k[row, :, slot], self.v[row, :, slot]
        self.k[row, :, slot], self.v[row, :, slot] = k, v
        self.mean_k[: len(pos)], self.mean_v[: len(pos)] = left_k, left_v"""


@pytest.mark.cpp
def test_a_step_that_copies_its_cache_is_found(write):
    """As razor did: a slot that is read before it is written made a compiled step copy the cache."""
    source = (ROOT / "kv_methods" / "razor.py").read_text()
    assert source.count(RAZOR) == 1
    result = run_check(write("razor_that_copies", source.replace(RAZOR, READ_THEN_WRITTEN)), "copies")
    assert not result.ok and "as large as its buffer" in result.what and "read before it is written" in result.todo


H2O = '''
"""H2O: keep what has gathered the most attention."""
from cache.evicting import Evicting

class H2O(Evicting):
    lookback = None

    def observe(self, weights):
        self.score[: len(weights)] += weights
'''
# eviction by the scores of row 0 in all rows, with a budget of another name: its limits bind by `stress` alone
BY_ROW_0 = """
from dataclasses import dataclass
import torch
from cache.base import knob
from cache.budget import budget_tokens
from cache.evicting import Evicting

class H2O(Evicting):
    lossless = dict(heavy=1.0)
    stress = dict(heavy=24, recent=8)

    @dataclass
    class Args:
        heavy: int | float = knob(500, "tokens kept")
        recent: int = knob(32, "newest tokens")

    def num_kept(self, length):
        return budget_tokens(self.args.heavy, length)

    def observe(self, weights):
        self.score[: len(weights)] += weights[:1]
"""
# pooling makes equal scores, of which topk takes any
PICKED = """
    def prompt_scores(self, q, k, v, mass, lengths):
        from torch.nn.functional import max_pool1d
        mass = max_pool1d(mass, 7, 1, 3)
        return (mass * 0).scatter(2, mass.topk(min(12, mass.shape[2])).indices, 1.0)
"""


def test_eviction_that_mixes_rows_is_found(write):
    name = write("h2o_by_row_0", BY_ROW_0)
    assert [k for k in settings(name)] == [{}, dict(heavy=24, recent=8), dict(heavy=0.24, recent=8)]
    result = run_check(name, "ragged")
    assert not result.ok and at_knobs(settings(name)[1]) in result.what and "another row" in result.todo
    assert run_check(write("h2o_by_row_0_dense", BY_ROW_0.replace("heavy=24", "heavy=400")), "stress").what


@pytest.mark.slow
def test_a_choice_among_equal_scores_is_told_of(write):
    name = write("h2o_with_ties", H2O + PICKED)
    result = run_check(name, "ragged")
    assert not result.ok and "h2o_with_ties.py:14 chooses among equal scores" in result.todo, result


SHARED = '''
"""Every layer attends to what the first one holds."""
from cache.base import KVMethod
from kv_methods.full import Full

class Shared(Full):
    exact_prefill = False
    card_nbytes = None

    def __init__(self, args, shape, layer, rope, calib=None):
        KVMethod.__init__(self, args, shape, layer, rope, calib)

    def connect(self, layers):
        self.shared_part("held", layers, lambda: Full(self.args, self.shape, self.layer, self.rope))
        self.k, self.v = self.held.k, self.held.v
'''


def test_a_layer_may_hold_nothing(write):
    name, model = write("shared", SHARED), tiny()
    assert all(run_check(name, check).ok for check in ("nbytes", "poison", "ragged", "reset", "attended"))
    model.setup_cache(name, 1, 40)
    assert [sum(b.values()) for b in model.cache_nbytes().values()] == [2 * 2 * 40 * 32 * 4, 0]


# ---- the command ----


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch):
    monkeypatch.setenv("KV_FAST_METHODS", "")
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)


@pytest.mark.slow
def test_a_new_file_passes(tmp_path, cli):
    file = tmp_path / "toy_new.py"
    file.write_text(TOY)
    code, out, _ = cli(testing, file)
    assert code == 0, out
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines] == [[check, "ok"] for check in testing.FAST]


def test_a_file_that_fails_is_told_why(tmp_path, cli):
    file = tmp_path / "toy_crash.py"
    file.write_text(TOY.replace("B = len(pos)", "B = len(pos) + self.missing"))
    only = ["--only", "lossless,traffic", "--only", "turn"]
    code, out, err = cli(testing, file, *only)
    assert code == 1 and not err
    assert "FAILED    " in out and f"{file}:25: AttributeError: 'Toy' object has no attribute 'missing'" in out
    assert "in decode step 1 after prompts of" in out and "FAILED, the same as in lossless: traffic, turn" in out
    assert len(out.splitlines()) == 4
    assert "3 of 3 checks: lossless, traffic, turn" in out and "Traceback" not in out
    code, out, err = cli(testing, file, *only, "--traceback")
    assert code == 1 and "Traceback" in err
    code, out, err = cli(testing, file, *only, "--json")
    report = json.loads(out)
    assert code == 1 and not report["ok"] and report["file"] == str(file)
    assert [c["ok"] for c in report["checks"]] == [False] * 3 and report["checks"][0]["todo"]


@pytest.mark.parametrize("source, args, message", [
    ("", [], "must define one KVMethod subclass, found 0"),
    ("import nothing_of_this_name", [], ".py:1 does not import: ModuleNotFoundError"),
    (TOY, ["--only", "speed"], "no check 'speed': did you mean saved? use some of lossless,"),
    (TOY, ["--only", "ragged", "--kernels"], "each say which checks run"),
    (None, [], "is not a file"),
])  # fmt: skip
def test_bad_input_is_one_line(source, args, message, tmp_path, cli):
    file = tmp_path / "bad_input.py"
    if source is not None:
        file.write_text(source)
    code, out, err = cli(testing, file, *args)
    assert code == 2 and not out and message in err and len(err.splitlines()) == 1


def test_names(cli):
    for given, message in (
        ("snapvk", "no method 'snapvk': did you mean snapkv"),
        ("snapkv,no_such=1", "no knob 'no_such'"),
        ("no_such", "no method 'no_such': give the path of a .py file, or a name that"),
    ):
        code, _, err = cli(testing, given)
        assert code == 2 and message in err
    code, out, _ = cli(testing, ROOT / "kv_methods" / "full.py", "--only", "stress")
    assert code == 0 and "no limits to test" in out
    code, out, _ = cli(testing, "snapkv,decode_budget=4,decode_every=4,recent=4", "--only", "lossless")
    assert code == 1 and "not dense attention" in out  # the knobs are kept in every check
    code, out, _ = cli(testing, "--list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(CHECKS)
    assert list(json.loads(cli(testing, "--list", "--json")[1])) == list(CHECKS)


def test_a_file_is_found_in_the_folders_of_ones_own(write):
    name = write("toy_found", TOY)
    assert testing.load(f"{name}.py") == name
    with pytest.raises(InputError, match="is not a file, here or in a folder of KV_FAST_METHODS"):
        testing.load("toy_lost.py")


COMPACTS = """
from dataclasses import dataclass
from cache.base import knob
from cache.compacting import Compacting

class ByKeys(Compacting):
    stress = dict(budget=24, recent=8)
    lookback, every = 0, 6

    def decode_slots(self):
        return min(self.every, self.shape.max_decoded)

    def prompt_scores(self, q, k, v, mass, lengths):
        assert not mass.numel()
        return -k.float().norm(dim=-1)
"""


@pytest.mark.slow
def test_a_method_compacts_without_queries(write):
    name = write("compacts_by_keys", COMPACTS)
    for check in ("stress", "ragged", "compiled"):
        assert (result := run_check(name, check)).ok, result


OWN_OPERATION = """
from torch import Tensor
from kernels.op import operation
from kv_methods.full import Full

@operation()
def toy_scaled_BY(x: Tensor) -> Tensor:
    return x * 1.0

@toy_scaled_BY.triton
def launch(x: Tensor) -> Tensor:
    return x * SCALE

class Scaled(Full):
    def attend(self, q, idx, count, pos):
        return toy_scaled_BY(super().attend(q, idx, count, pos))
"""


@pytest.mark.parametrize("scale, ok", [("1.0", True), ("1.1", False)])
def test_only_the_files_own_kernels_are_run_and_compared(scale, ok, write, monkeypatch):
    monkeypatch.setattr("kernels.backend.INTERPRETED", True)
    for operation in OPERATIONS.values():
        monkeypatch.setattr(operation, "versions", dict(operation.versions))  # and put back
    name = write(f"toy_scaled_{ok}", OWN_OPERATION.replace("BY", str(ok).lower()).replace("SCALE", scale))
    testing.interpret_own(name)
    result = run_check(name, "kernels")
    assert result.ok == ok, result
    assert (result.note == f"toy_scaled_{str(ok).lower()}") if ok else "kernels against torch" in result.what
    with pytest.raises(InputError, match="no operation with a Triton version: drop --kernels"):
        testing.interpret_own(write("toy_without", TOY))


@pytest.mark.slow
def test_as_a_command(tmp_path):
    (tmp_path / "mine.py").write_text(H2O)
    command = [sys.executable, "-m", "scripts.contract", str(tmp_path / "mine.py"), "--only", "window"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "window    ok" in done.stdout and not done.stderr


def test_input_errors_are_told_as_such(write):
    refusing = "from runtime.errors import InputError\n        raise InputError('too short')"
    result = run_check(write("toy_refuses", TOY.replace("B, H, S, D = k.shape", refusing)), "turn")
    assert not result.ok and result.what.startswith("it refuses the prefill") and isinstance(result.error, InputError)
