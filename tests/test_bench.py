"""The benchmarks run, say what they measured and what they could not, and go on; no time is asserted anywhere."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import statistics
from pathlib import Path

import pytest
import torch
from helps import helps

from cache.calibration import Calibration
from cache.grammar import method_files
from cache.spec import layer_methods, make_args, method_name
from kv_methods.razor import Razor
from loading.checkpoint import random_transformer
from loading.config import args_from_hf
from models.tiny.training import train_tiny
from runtime.errors import InputError
from scripts.bench import bench_attention, bench_generate, layer, our_runs
from scripts.bench import dense as dense_attentions
from scripts.eval import analyze
from scripts.report import measure
from scripts.shared import timing
from scripts.shared.markdown import share, wilson
from tests.audit import launches

ROOT = Path(__file__).resolve().parent.parent
CONFIG = dict(model_type="llama", vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Nothing large is read between calls, and the compiler's limits are ours for the test alone."""
    monkeypatch.setattr(timing, "PROBE_BYTES", dict(cpu=1 << 16, cuda=1 << 20))
    monkeypatch.setattr(timing, "flush_bytes", lambda device: 1 << 16)
    limits = ("recompile_limit", "accumulated_recompile_limit")
    with torch._dynamo.config.patch({k: getattr(torch._dynamo.config, k) for k in limits}):
        yield


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def attention(cli, config, *argv):
    common = ("--device", "cpu", "--dtype", "fp32", "--no-compile", "--rounds", 2, "--json")
    status, out, err = cli(bench_attention, "--model", config, *common, *argv)
    assert status == 0, err
    return json.loads(out)


def generated(cli, config, *argv):
    common = ("--random-init", config, "--device", "cpu", "--dtype", "fp32", "--rounds", 2, "--new", 3, "--json")
    status, out, err = cli(bench_generate, *common, *argv)
    assert status == 0, err
    return json.loads(out)


# ---- attention ----


def test_attention_rows(cli, config, tmp_path):
    out = tmp_path / "attention.json"
    methods = ["full", "double_sparsity", "sals,recent=8,sinks=4", "razor"]
    data = attention(cli, config, "--method", *methods, "--batch", 2, "--length", 48, "--out", out)
    assert data == json.loads(out.read_text())
    assert data["bandwidth"] == max(data["read_bytes_per_s"], data["copy_bytes_per_s"]) and data["matmul_flops"] > 0
    assert {"command", "device", "versions", "commit", "date", "floor_ms"} <= set(data)
    stages = {
        "full": {"append", "attend"},
        "double_sparsity": {"append", "score", "select", "attend"},
        methods[2]: {"append", "score", "select", "attend"},
        "razor": set(),  # its decode is its own
    }
    assert [r["method"] for r in data["rows"]] == methods
    for r in data["rows"]:
        assert (r["batch"], r["length"]) == (2, 48) and r["traffic"] > 0 and r["nbytes"] > 0
        assert set(r) & {"prefetch", "append", "score", "select", "attend"} == stages[r["method"]]
        for name in {"operator", "dense"} | stages[r["method"]]:
            assert len(r[name]["each"]) == 2 and r[name]["spread"] >= 0
        ratios = [d / o for d, o in zip(r["dense"]["each"], r["operator"]["each"], strict=True)]
        assert r["times_dense"] == statistics.median(ratios)
        assert r["times_dense_spread"] == (max(ratios) - min(ratios)) / r["times_dense"]
        assert r["limit_share"] == pytest.approx(r["bytes_per_s"] / data["bandwidth"])
    full = data["rows"][0]
    assert full["traffic"] == 2 * 2 * 2 * 49 * 32 * 4  # K and V, batch, heads, tokens, channels, fp32
    assert full["nbytes"] == 2 * 2 * 2 * (48 + bench_attention.SPARE) * 32 * 4
    assert {r["name"] for r in data["dense"]} == {"matmul", "decode_attention", "sdpa", "sdpa, grouped queries"}
    assert sum(r["best"] for r in data["dense"]) == 1 and all(r["difference"] < 1e-4 for r in data["dense"])


def test_all_rows_of_a_size_stand_against_one_baseline(cli, config):
    """Every dense attention and every method is called once a round: the rows of a size share the baseline's times."""
    methods = ["full", "streaming", "random"]
    data = attention(cli, config, "--method", *methods, "--length", 16, 24, "--no-stages", "--rounds", 3)
    for n in (16, 24):
        rows = [r for r in data["rows"] if r["length"] == n]
        assert [r["method"] for r in rows] == methods
        assert len({json.dumps(r["dense"]) for r in rows}) == 1 and len(rows[0]["operator"]["each"]) == 3
        dense = {r["name"]: r for r in data["dense"] if r["length"] == n}
        assert rows[0]["dense"]["each"] == dense[rows[0]["dense"]["name"]]["each"]
        assert all(len(r["each"]) == 3 for r in dense.values())
        assert dense[rows[0]["dense"]["name"]]["best"] and dense[rows[0]["dense"]["name"]]["ms"] == min(
            r["ms"] for r in dense.values()
        )


def test_calls_take_turns():
    """A round calls each once, in one order; what an interruption leaves is whole rounds."""
    clock, order, into = timing.Clock(torch.device("cpu"), cold=False), [], {}

    def call(name, last=99):
        def run():
            order.append(name)
            if len(order) > last:
                raise KeyboardInterrupt

        return run

    said = []
    calls = {("dense", "sdpa"): call("dense"), ("a", "operator"): call("a"), ("b", "operator"): call("b", 7)}
    with pytest.raises(KeyboardInterrupt):
        clock.rounds(calls, 5, into, said.append)
    assert order == ["dense", "a", "b"] * 3 and said == [0, 1, 2]
    assert {key: len(times) for key, times in into.items()} == dict.fromkeys(calls, 2)


def test_ratios_are_of_the_same_round():
    """A machine that is twice as slow in one round changes no ratio."""
    opt = argparse.Namespace(layers=2)
    size = bench_attention.Size("m", 1, 8, None, opt, None, tried=[dict(name="x"), dict(name="y")])
    times = {("dense", "x"): [8.0, 16.0, 8.0], ("dense", "y"): [9.0, 18.0, 9.0], ("a", "operator"): [4.0, 8.0, 2.0]}
    row = dict(nbytes=0, traffic=10)
    bench_attention.judge(size, {"a": row}, times, 1e4)
    assert row["dense"]["name"] == "x" and row["dense"]["each"] == [4, 8, 4] and row["operator"]["each"] == [2, 4, 1]
    assert row["times_dense"] == 2 and row["times_dense_spread"] == (4 - 2) / 2
    assert [r["best"] for r in size.tried] == [True, False]


def test_methods_that_do_not_fit_together_are_timed_apart(cli, config, monkeypatch):
    """Each group has the baseline in its rounds."""
    one = layer.cache_bytes("full", config, 1, 16 + bench_attention.SPARE, torch.float32)
    monkeypatch.setattr(bench_attention, "available_memory", lambda device: 2.5 * 4 * one / bench_attention.MEMORY)
    argv = ("--method", "full", "random", "oracle", "--length", 16, "--no-stages", "--layers", 4)
    data = attention(cli, config, *argv)
    first, second, third = data["rows"]
    assert first["dense"] == second["dense"] != third["dense"]
    dense = {r["name"]: r["each"] for r in data["dense"]}
    assert all(len(each) == 4 for each in dense.values())
    assert third["dense"]["each"] == dense[third["dense"]["name"]][2:]


def test_interrupted_while_preparing(cli, config, tmp_path, monkeypatch):
    """Ctrl-C times what is ready, and keeps it."""
    out, build = tmp_path / "attention.json", layer.build

    def interrupted(text, *args):
        if text == "random":
            raise KeyboardInterrupt
        return build(text, *args)

    monkeypatch.setattr(bench_attention, "build", interrupted)
    argv = ("--model", config, "--device", "cpu", "--no-compile", "--rounds", 2, "--length", 16, "--no-stages",
            "--method", "full", "random", "streaming", "--out", out)  # fmt: skip
    assert cli(bench_attention, *argv)[0] == 130
    rows = json.loads(out.read_text())["rows"]
    assert [r["method"] for r in rows] == ["full"] and len(rows[0]["operator"]["each"]) == 2


def test_attention_goes_on_where_it_stopped(cli, config, tmp_path):
    out = tmp_path / "attention.json"
    argv = ("--length", 16, "--no-stages", "--out", out)
    first = attention(cli, config, "--method", "full", *argv)
    both = attention(cli, config, "--method", "full", "streaming", "--resume", *argv)
    assert both["rows"][0] == first["rows"][0] and both["rows"][1]["method"] == "streaming"
    more = attention(cli, config, "--method", "full", "--resume", *argv, "--rounds", 4)
    assert {r["method"]: len(r["operator"]["each"]) for r in more["rows"]} == dict(full=4, streaming=2)
    out.write_text(out.read_text().replace('"float32"', '"bfloat16"'))
    status, _, err = cli(bench_attention, "--model", config, "--dtype", "fp32", "--resume", *argv)
    assert status == 2 and "another dtype" in err
    out.write_text("[1]")
    status, _, err = cli(bench_attention, "--model", config, "--dtype", "fp32", "--resume", *argv)
    assert status == 2 and "is no result of this script" in err


def test_every_method_runs_once(cli, config):
    data = attention(cli, config, "--once", "--method", "all", "--batch", 2, "--length", 40)
    assert {r["method"] for r in data["rows"]} == set(method_files())
    assert all(r["finite"] for r in data["rows"]), data["rows"]


def test_what_cannot_be_measured_is_a_row(cli, config, monkeypatch):
    build = layer.build

    def refuse(text, *args):
        if text == "streaming":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return build(text, *args)

    monkeypatch.setattr(bench_attention, "build", refuse)
    rows = attention(cli, config, "--method", "streaming", "full", "--length", 16, "--no-stages")["rows"]
    assert rows[0]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate" and "operator" in rows[1]

    def no_memory(*args):
        raise InputError("the dense cache needs 900 GiB")

    monkeypatch.setattr(layer, "require_memory", no_memory)
    argv = ("--model", config, "--device", "cpu", "--dtype", "fp32", "--no-compile", "--rounds", 2, "--length", 16)
    status, out, _ = cli(bench_attention, *argv, "--json", "--method", "full", "streaming")
    assert "every row is an error" in status
    rows = json.loads(out)["rows"]
    assert [r["error"] for r in rows] == ["the dense cache needs 900 GiB"] * 2


def test_a_baseline_that_computes_something_else_does_not_count(cli, config, monkeypatch):
    calls = dense_attentions.dense_calls

    def wrong(q, k, v, compile):
        return dict(nothing=lambda: lambda: torch.zeros_like(q), absent=lambda: __import__("no_such_module")) | calls(
            q, k, v, compile
        )

    monkeypatch.setattr(dense_attentions, "dense_calls", wrong)
    dense = {r["name"]: r for r in attention(cli, config, "--method", "full", "--length", 16, "--no-stages")["dense"]}
    assert "does not compute attention" in dense["nothing"]["error"] and dense["absent"]["error"] == "not installed"
    assert not dense["nothing"]["best"] and "ms" not in dense["nothing"]


def test_intervals_are_wilsons():
    """The shares at which the score test of n samples is just rejected: |x/n - p| = z sqrt(p (1 - p) / n)."""
    for hits, n in ((0, 10), (3, 10), (95, 100), (100, 100), (1, 1)):
        for p in wilson(hits, n):
            assert abs(abs(hits / n - p) - 1.96 * (p * (1 - p) / n) ** 0.5) < 1e-7
    low, high = wilson(95, 100)
    assert low < 0.95 < high and share([1] * 95 + [0] * 5) == "95 (89-98) %" and share([0.5, 1.0]) == "75 %"


def test_the_layer_whose_split_is_nearest_the_mean_is_timed(cli, config):
    """Razor protects more heads in some layers than in others: none speaks for the model by chance."""
    others = layer._others("razor", "llama-3.1-8b")
    mean, timed = sum(others) / 32, layer.timed_layer("razor", "llama-3.1-8b")
    assert len(others) == 32 and len(set(others)) > 2 and sum(others) > 0
    assert abs(others[timed] - mean) == min(abs(n - mean) for n in others)
    assert layer.timed_layer("full", "llama-3.1-8b") == layer.LAYER and not layer.heads_of("full", "llama-3.1-8b")
    (row,) = attention(cli, config, "--method", "razor", "--length", 16, "--no-stages")["rows"]
    method = layer.build("razor", config, 1, 32, torch.float32, torch.device("cpu"))
    assert row["heads"]["other"] == method.n_other and row["layer"] == method.layer
    assert row["heads"]["of"] == args_from_hf(CONFIG).n_kv_head


def test_razor_is_filled_as_by_its_own_prefill():
    """`fill` sends each kind of head to its own method, as prefill does."""
    args = args_from_hf(CONFIG)
    shape, rope = args.cache_shape(0, 2, 64, torch.float32, "cpu"), args.rotary(2, 64, "cpu")
    own = make_args(Razor, dict(window=8, sinks=2, retrieval_method="full"))
    scores = torch.zeros(2, 4)
    scores[0, 2:] = torch.tensor([0.9, 0.8])  # of the second KV head of the first layer
    calib = Calibration({f"layers.{i}.razor.{n}": scores[i] for i in range(2) for n in ("induction", "echo")}, 2)
    one, two = (Razor(own, shape, 0, rope, calib) for _ in range(2))
    q, k, v = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 40, 32), torch.randn(2, 2, 40, 32)
    layer.fill(one, q, rope.rotate_prompt(k), v)
    two.prefill(q.expand(-1, -1, 40, -1), k, v, torch.full((2,), 40))
    assert one.n_other and one.n_own
    for (name, a), b in zip(one.named_buffers(), two.buffers(), strict=True):
        assert torch.equal(a, b), name


# ---- generate ----


def test_bytes_read_by_budgets_of_p_are_those_of_the_steps(cli, config):
    """Not the most that a step could read, which is all that is known before one."""
    methods = [f"double_sparsity,budget=p{p},min_tokens=0,sinks=0,recent=1" for p in (0.99, 0.1)]
    data = generated(cli, config, "--method", *methods, "--mode", "eager", "--batch", 1, "--length", 40)
    most, least = (r["traffic"] for r in data["rows"])
    assert least < 0.7 * most


def test_generate_rows(cli, config, tmp_path):
    """What update_readme.py reads, and what is new."""
    out = tmp_path / "generate.json"
    argv = ("--method", "full", "double_sparsity", "--mode", "eager", "--batch", 2, "--length", 24, "--out", out)
    data = generated(cli, config, *argv)
    assert data == json.loads(out.read_text())
    assert (data["prompt_tokens"], data["new_tokens"], data["dtype"], data["synthetic"]) == (24, 3, "float32", False)
    assert [r["run"] for r in data["rows"]] == ["full eager", "double_sparsity eager"]
    for r in data["rows"]:
        assert {"batch", "run", "tokens_per_s", "seconds_per_step", "spread", "kv_bytes", "prefill_s"} <= set(r)
        assert len(r["seconds_per_step"]) == len(r["prefill_s"]) == 2 and r["limit_share"] > 0
        assert all(second > first for first, second in zip(r["prefill_s"], r["second_token_s"], strict=True))
        assert r["kv_bytes_full"] == 2 * 2 * 2 * 2 * 27 * 32 * 4  # layers, K and V, batch, heads, tokens, ...
    full, sparse = data["rows"]
    assert full["times_full"] == 1 and full["kv_bytes"] == full["kv_bytes_full"] and "prefill_overhead" not in full
    assert sparse["full_prefill_s"] == full["prefill_s"] and sparse["kv_bytes"] > full["kv_bytes"]
    again = generated(cli, config, *argv, "--resume")
    assert again["rows"] == data["rows"]
    more = generated(cli, config, *argv, "--resume", "--rounds", 3)  # as after an interruption in round 3
    assert [len(r["seconds_per_step"]) for r in more["rows"]] == [3, 3]


def test_every_round_is_kept(cli, config, tmp_path, monkeypatch):
    """What is killed leaves the rounds that were over."""
    out, write, seen = tmp_path / "generate.json", bench_generate.write_json, []

    def written(path, data):
        seen.append([len(r["seconds_per_step"]) for r in data["rows"]])
        write(path, data)

    monkeypatch.setattr(bench_generate, "write_json", written)
    argv = ("--method", "full", "streaming", "--mode", "eager", "--batch", 1, "--length", 24, "--out", out)
    generated(cli, config, *argv, "--rounds", 3, "--warm-up", 1)
    assert seen[:4] == [[], [1, 1], [2, 2], [3, 3]]


def test_interrupted_in_a_round(cli, config, tmp_path, monkeypatch):
    """Ctrl-C ends the run, not only the loop that decodes; what was measured before it stays."""
    out, rows = tmp_path / "generate.json", our_runs.Session.rows

    def interrupted(session, *args):
        if "streaming" in str(type(session.model.cache[0])):
            raise KeyboardInterrupt
        return rows(session, *args)

    monkeypatch.setattr(our_runs.Session, "rows", interrupted)
    argv = ("--random-init", config, "--device", "cpu", "--rounds", 1, "--new", 3, "--mode", "eager", "--batch", 1,
            "--length", 16, "--no-interleave", "--method", "full", "streaming", "random", "--out", out)  # fmt: skip
    assert cli(bench_generate, *argv)[0] == 130
    assert [r["run"] for r in json.loads(out.read_text())["rows"]] == ["full eager"]


def test_generate_synthetic(cli, config):
    methods = ["full", "self_index,sinks=4", "razor"]
    data = generated(cli, config, "--synthetic", "--method", *methods, "--mode", "eager", "--batch", 2, "--length", 24)
    assert [r["method"] for r in data["rows"]] == methods
    assert all("prefill_s" not in r and r["tokens_per_s"] > 0 for r in data["rows"])
    params = 2 * (128 * (4 + 2 * 2) * 32 + 128 * 128 + 3 * 128 * 64 + 2 * 128) + 128 + 64 * 128
    assert data["weight_bytes"] == 4 * params  # the embedding is not read


def test_generate_synthetic_fills_every_layer(config):
    """After a round the cache of `full` holds the random keys, and then what was decoded."""
    model = random_transformer(args_from_hf(CONFIG), "cpu", torch.float32)
    work = our_runs.Work(model, 2, 24, 3, synthetic=True)
    run = our_runs.Ours(work, "full", "eager")
    run.open()
    run()
    for method in run.cache:
        assert torch.equal(method.k[:, :, :24], work.random_kv()[0]) and method.k[:, :, 24:].abs().sum(-1).all()


@pytest.mark.parametrize("synthetic", [False, True])
def test_generate_compiles_a_step_before_the_first_round(config, compiled_inputs, synthetic):
    model = random_transformer(args_from_hf(CONFIG), "cpu", torch.float32)
    run = our_runs.Ours(our_runs.Work(model, 2, 24, 3, synthetic=synthetic), "full", "compiled")
    run.open()
    assert len(graphs := compiled_inputs.copy()) == 3  # the embedding, a group of layers, the head
    run(), run()
    assert len(compiled_inputs) == len(graphs)


def test_prefill_rows(cli, config):
    data = generated(
        cli, config, "--prefill", "--method", "full", "sals,recent=8,sinks=4", "--batch", 1, "--length", 24
    )
    full, sals = data["rows"]
    assert (full["run"], sals["run"]) == ("full prefill", "sals,recent=8,sinks=4 prefill")
    assert len(sals["prefill_s"]) == 2 and sals["full_prefill_s"] == full["prefill_s"] and "tokens_per_s" not in sals
    assert sals["full_second_token_s"] == full["second_token_s"] and len(sals["second_token_s"]) == 2


def test_peer_transformers(cli, config):
    """Beside a random model, with its cache filled."""
    pytest.importorskip("transformers")
    argv = ("--peer", "transformers", "--mode", "eager", "--batch", 1, "--length", 24)
    rows = {r["run"]: r for r in generated(cli, config, "--synthetic", *argv)["rows"]}
    assert set(rows) == {"full eager", "transformers dynamic", "transformers static"}
    assert all("error" not in r for r in rows.values()), rows
    speed = {name: bench_generate.speed_of(row) for name, row in rows.items()}  # tokens_per_s is rounded
    best = max(speed[name] for name in rows if name != "full eager")
    assert rows["full eager"]["times_peer"] == round(speed["full eager"] / best, 2)


def test_a_method_in_transformers_beside_its_own_cache(cli, config):
    pytest.importorskip("transformers")
    argv = ("--peer", "transformers", "bridge:kivi-4", "bridge:full", "--mode", "eager", "--batch", 2, "--length", 24)
    rows = {r["run"]: r for r in generated(cli, config, *argv)["rows"]}
    assert set(rows) == {"full eager", "transformers dynamic", "transformers static", "bridge kivi-4", "bridge full"}
    # a difference of two short times, which a busy machine may turn negative
    assert all("error" not in r and r["tokens_per_s"] for r in rows.values()), rows
    assert rows["bridge full"]["kv_bytes"] == rows["full eager"]["kv_bytes"]
    assert 0 < rows["transformers dynamic"]["kv_bytes"] < rows["bridge full"]["kv_bytes"]  # without the last token


PEER_MODEL = """
import torch
KEEPS = ("k_cache", "v_cache")
class ModelArgs:
    def __init__(self, **shapes): self.__dict__ |= shapes
class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in KEEPS:
            self.register_buffer(name, torch.zeros(3))
class Transformer(torch.nn.Linear):
    def __init__(self, args): super().__init__(args.dim, args.n_local_heads)
    def setup_caches(self, max_batch_size, max_seq_length):
        self.max_seq_length = max_seq_length
        block = torch.nn.Module()
        block.attention = torch.nn.Module()
        block.attention.kv_cache = Cache()
        block.attention.n_head, block.attention.head_dim = 4, 32
        self.layers = [block]
"""
PEER_GENERATE = """
import torch
causal_mask, create_block_mask = None, lambda *args, **kwargs: None
def decode_one_token(model, token, pos, mask, temperature):
    torch._dynamo.graph_break()  # cannot be compiled with fullgraph
    assert model.max_seq_length == 27 and 24 <= pos.item() < 27 and model.layers[0].attention.kv_cache.k_cache.any()
    return token, None
"""


def peer_rows(cli, config, peer):
    argv = ("--synthetic", "--peer", peer, "--mode", "eager", "--batch", 1, "--length", 24)
    return generated(cli, config, *argv)["rows"]


@pytest.mark.slow
def test_peer_gpt_fast(cli, config, tmp_path):
    """The protocol with a stand-in of its API; one that is not compiled is nothing to be held against."""
    for name, code in (("model.py", PEER_MODEL), ("generate.py", PEER_GENERATE)):
        (tmp_path / name).write_text(code)
    ours, peer = peer_rows(cli, config, f"gpt-fast:{tmp_path}")
    assert len(peer["seconds_per_step"]) == 2 and peer["compiled"] is False and "times_gpt_fast" not in ours


def test_peer_that_fails(cli, config, tmp_path):
    (tmp_path / "generate.py").write_text("raise RuntimeError('no luck')")
    ours, peer = peer_rows(cli, config, f"gpt-fast:{tmp_path}")
    assert peer["error"] == "RuntimeError: gpt-fast ended: RuntimeError: no luck" and "tokens_per_s" in ours


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "trees"])
def test_modes(cli, config, mode):
    """Every way to compile a step, methods in turns: what one compiles is not dropped when the next one runs."""
    methods = ["full", "double_sparsity"]
    data = generated(cli, config, "--synthetic", "--method", *methods, "--mode", mode, "--batch", 1, "--length", 24)
    assert all("tokens_per_s" in r for r in data["rows"]), data["rows"]


# ---- commands, wrong use ----


@pytest.mark.parametrize("specs, aside", [
    (launches.METHODS, set()),
    (f"{measure.EVERY} {measure.SLOW}".split(), {"double_sparsity_offload"}),  # finds what double_sparsity does
])  # fmt: skip
def test_all_methods_are_in_the_lists_of_all(specs, aside):
    """And the knobs of every evicting method."""
    found = {method_name(cls) for spec in specs for cls, _ in layer_methods(spec, 1)}
    assert method_files().keys() - found == aside
    assert {"snapkv,adaptive=True", "snapkv,value_aware=True"} <= {*specs}


def test_the_commands_parse(cli):
    """By the script's own parser; their methods exist."""
    for every in (measure.commands("llama-bench"), measure.gpu_commands("gpt-fast")):
        for line in (line for lines in every.values() for line in lines if not line.startswith("pytest")):
            module, *argv = shlex.split(line)
            parser = importlib.import_module(measure.full_name(module)).parser()
            for spec in getattr(parser.parse_args(argv), "method", None) or ():
                assert spec == "all" or layer_methods(spec, 30)
            assert "--out" in parser.format_help() and "--resume" in parser.format_help()
    commands = measure.commands()
    assert cli(measure, "--list")[1].count("\n") == sum(map(len, commands.values()))
    assert {q: len(lines) for q, lines in json.loads(cli(measure, "--list", "--json")[1]).items()} == {
        q: len(lines) for q, lines in commands.items()}  # fmt: skip


def test_a_stale_result_is_told(monkeypatch):
    """Where its file lies, and what continued it, make no difference."""
    monkeypatch.setattr(measure, "known_commands", lambda: frozenset(["bench.bench_attention --threads 2"]))
    monkeypatch.setattr(
        measure, "changed", lambda since, *_: [] if since == "new" else ["a.py", "b.py", "c.py", "d.py"]
    )
    run = dict(command="python -m scripts.bench.bench_attention --threads 2 --out runs/a-0.json --resume", commit="new")
    assert measure.stale(run) == "" and measure.stale(run | dict(command=run["command"] + " --time-limit 9")) == ""
    assert measure.stale(run | dict(commit="old")) == "a.py, b.py, c.py and 1 more changed since"
    assert "another command" in measure.stale(run | dict(command=run["command"].replace("2", "1")))


@pytest.mark.parametrize("how", [["--synthetic"], []])
def test_restoring_is_timed_and_files_are_measured(cli, how):
    argv = ["--restore", "--size", "1x300", "--method", "full", "streaming,recent=96", "--rounds", "2", *how]
    status, out, err = cli(bench_generate, *argv, "--json")
    assert status == 0, err
    full, few = json.loads(out)["rows"]
    for r in (full, few):
        assert len(r["restore_s"]) == len(r["save_s"]) == 2 and ("prefill_s" in r) == (not how), r
    token = full["kv_bytes"] // 428  # of the cache, which has room for 128 tokens beside the prompt
    assert 300 * token < full["file_bytes"] < 301 * token + 4 * 2048 + 16384
    assert (
        abs(full["file_bytes"] - few["file_bytes"] - 200 * token) < token + 4096
    )  # the file of a prompt has its logits


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        (bench_attention, ["--method", "nothing"]), (bench_attention, ["--method", "sals,budget=x"]),
        (bench_attention, ["--method", "0-1:full,2-:sals-12.5,budget=0.1"]), (bench_attention, ["--layers", "0"]),
        (bench_attention, ["--model", "nothing"]), (bench_attention, ["--model", "nothing.json"]),
        (bench_attention, ["--rounds", "0"]), (bench_attention, ["--resume"]), (bench_attention, ["--size", "4096"]),
        (bench_attention, ["--device", "nothing"]), (bench_generate, ["--texts"]),
        (bench_generate, ["--texts", "--speculate", "4", "--length", "100"]),
        (bench_generate, ["--texts", "--speculate", "4", "--length", "1024", "--synthetic"]),
        (bench_generate, ["--texts", "--speculate", "4", "--length", "1024", "--acceptance", "1"]),
        (bench_generate, ["--time-limit", "nan"]), (bench_generate, ["--method", "0-1:full"]),
        (bench_generate, ["--method", "full", "sals,nothing=1"]),
        (bench_generate, ["--checkpoint", "/no/such/folder"]), (bench_generate, ["--new", "1"]),
        (bench_generate, ["--random-init", "nothing"]), (bench_generate, ["--peer", "nothing"]),
        (bench_generate, ["--peer", "gpt-fast:/no/such/folder"]), (bench_generate, ["--warm-up", "-1"]),
        (bench_generate, ["--size", "8x"]), (bench_generate, ["--prefill", "--speculate", "4"]),
        (bench_generate, ["--synthetic", "--prefill"]),
        (bench_generate, ["--out", "/no/such/folder/x.json"]), (measure, ["--only", "weights"]), (measure, ["--small"]),
        (measure, ["--gpt-fast", "."]), (measure, ["--gpu", "--llama-bench", "x"]),
        (measure, ["--gpu", "--gpt-fast", "/no/such/folder"]), (analyze, ["--checkpoint", "/no/such/folder"]),
        (train_tiny, ["--evaluate", "512", "--run", "/no/such/folder"]),
    ],
)  # fmt: skip
def test_wrong_use(script, argv, refused):
    assert refused(script, *argv)


def test_every_script_has_an_example_and_json():
    scripts = sorted(f for f in (ROOT / "scripts").rglob("*.py") if "run_cli(main)" in f.read_text())
    assert len(scripts) > 10
    modules = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in scripts]
    for module, text in helps(modules).items():
        assert f"python -m {module.removesuffix('.__main__')}" in text and "--json" in text, module


# ---- the commands of a GPU ----


@pytest.mark.slow
def test_the_commands_of_a_gpu_run_on_a_cpu(cli, monkeypatch, tmp_path):
    """With toy models, all of them; what was done is not done again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    argv = ("--gpu", "--small", "--machine", f"try-{tmp_path.name}", "--json")
    status, out, err = cli(measure, *argv)
    assert status == 0, err[-2000:]
    files = [ROOT / f for f in json.loads(out)]
    assert [f.stem for f in files] == ["attention", "speed", "prompt"]
    for file in files:
        assert all(r["rows"] and not any("error" in x for x in r["rows"]) for r in json.loads(file.read_text())["runs"])
    monkeypatch.setattr(measure, "run", None)  # would not be callable
    assert cli(measure, *argv)[0] == 0


def test_a_run_that_costs_the_device_is_not_tried_again(cli, config, tmp_path, monkeypatch):
    """End to end, where runs take turns: the others of its group are measured when the run is resumed."""
    tried, out = [], tmp_path / "generate.json"

    def opened(run, real=our_runs.Ours.open):
        tried.append(run.method)
        if run.method == "random":
            raise RuntimeError("an illegal memory access")
        real(run)

    def recover(device, lost=lambda: None):  # as torch.cuda.synchronize tells
        if tried[-1:] == ["random"]:
            lost()
            raise SystemExit("error: the device is lost")

    monkeypatch.setattr(our_runs.Ours, "open", opened)
    monkeypatch.setattr(bench_generate, "recover", recover)
    argv = ("--random-init", config, "--device", "cpu", "--rounds", 1, "--new", 3, "--mode", "eager", "--batch", 1,
            "--length", 16, "--method", "full", "random", "streaming", "--resume", "--out", out)  # fmt: skip
    assert cli(bench_generate, *argv)[0] not in (0, None)
    assert [r["method"] for r in json.loads(out.read_text())["rows"] if r.get("lost")] == ["random"]
    tried.clear()
    status, _, err = cli(bench_generate, *argv)
    assert status == 0 and "random" not in tried, err
    rows = {r["method"]: r for r in json.loads(out.read_text())["rows"]}
    assert rows["random"]["lost"] and all(rows[m]["tokens_per_s"] > 0 for m in ("full", "streaming"))


def test_a_device_that_is_lost_ends_a_run_after_its_row(monkeypatch):
    def lost():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    row = dict(error="x")
    with pytest.raises(SystemExit, match="the device is lost"):
        timing.recover(torch.device("cuda"), lambda: row.update(lost=True))
    assert row["lost"] and timing.settled(row) and not timing.settled(dict(error="x"))
