"""Damaged files, flags and knobs by the thousand: each is accepted, or one InputError; never a traceback or a hang.

A seed draws every mutant, so that a failure names the one to look at. `make test-all` draws 10,000.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampled import sampled
from watch import Hang, within

import generate as G
import model as M
from cache.calibration import VERSION, Calibration, fingerprint
from cache.spec import knob_names, layer_methods, method_class, method_files, presets
from engine import llm as engine
from loading.checkpoint import args_from_hf, load_checkpoint, random_transformer, save_checkpoint_tensors
from loading.tokenizer import load_tokenizer
from models.tiny.training import train_tiny
from runtime import machine
from runtime.errors import InputError, run_cli
from runtime.machine import TINY
from scripts.bench import bench_attention, bench_generate
from scripts.eval import analyze, compare
from scripts.report import plots, update_readme
from scripts.shared import options

CONFIG = dict(
    model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-5,
    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=64),
    rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False, torch_dtype="float32", eos_token_id=[1, 2],
    attention_bias=False, use_sliding_window=False, sliding_window=16, max_window_layers=1, layer_types=None,
)  # fmt: skip
ROPES = [
    None,
    dict(type="linear", factor=2.0),
    dict(rope_type="dynamic", factor=2.0),
    dict(rope_type="yarn", factor=2.0, beta_fast=32, beta_slow=1, truncate=True, original_max_position_embeddings=64),
]
TOKENIZER = dict(
    model=dict(type="BPE", vocab={c: i for i, c in enumerate("abcdefgh ")} | {"ab": 9, "abc": 10},
               merges=["a b", "ab c"]),
    added_tokens=[dict(id=11, content="<s>", special=True)],
    decoder=dict(type="ByteLevel"), pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False), normalizer=None,
)  # fmt: skip
DIGITS, NESTED = "@digits", "@nested"  # stand for what json.dumps cannot write
NUMBERS = [0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**23, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")]
WORDS = [None, True, False, "", "x", "none", "\ud800", "é" * 50, DIGITS, NESTED, [], {}, [[]], [None], [{}], {"a": 1}]
VALUES = [*NUMBERS, *WORDS]
TEXTS = [*map(str, NUMBERS), *"x-=,: \né", "", "None", "true", "0-", "9" * 5000, "[" * 99]
SECONDS, BYTES = 20, 1 << 30


# ---- mutants ----


def nodes(value, at=()):
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from nodes(child, (*at, key))


def mutate(rng, value):
    """One to three changes of a JSON value: another value, a key gone, a key of another name."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        *path, key = rng.choice([n for n in nodes(value) if n] or [(None,)])
        if key is None:
            return rng.choice(VALUES)
        at = value
        for k in path:
            at = at[k]
        match rng.randrange(4):
            case 0:
                del at[key]
            case 1 if isinstance(at, dict):
                at[rng.choice(["", "x", "type", str(key).upper()])] = at.pop(key)
            case _:
                at[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def spoil(rng, data):
    """Bytes, of which some are cut off, overwritten or repeated."""
    data, i, j = bytearray(data), rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    match rng.randrange(4):
        case 0:
            del data[i:]
        case 1:
            data[min(i, j) : max(i, j)] = b""
        case 2:
            data[i : i + 8] = rng.randbytes(8)
        case _:
            data[i:i] = data[:j]
    return bytes(data)


def dump(rng, value):
    """As a JSON file, perhaps damaged further."""
    text = json.dumps(value).replace(f'"{DIGITS}"', "7" * 5000).replace(f'"{NESTED}"', "[" * 9000 + "]" * 9000)
    data = text.encode("utf-8", "surrogatepass")
    return spoil(rng, data) if rng.random() < 0.1 else data


def with_header(rng, file):
    """A safetensors file whose header is another."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = dump(rng, mutate(rng, json.loads(data[8 : 8 + size])))
    n = len(header) if rng.random() < 0.9 else rng.choice([0, 1, 2**31, 2**63, 2**64 - 1])
    return n.to_bytes(8, "little") + header + data[8 + size :]


# ---- what is mutated: (rng, folders) -> runs it ----


def config(rng, at):
    (at.model / "config.json").write_bytes(dump(rng, mutate(rng, CONFIG)))
    load_checkpoint(at.model)


def config_object(rng, at):
    family = dict(model_type=rng.choice(["llama", "mistral", "qwen2", "qwen3"]), use_sliding_window=True,
                  rope_scaling=rng.choice([CONFIG["rope_scaling"], *ROPES]),
                  layer_types=rng.choice([None, ["sliding_attention"] * 2]))  # fmt: skip
    c = mutate(rng, CONFIG | family)
    args_from_hf(c if isinstance(c, dict) else {})


def index(rng, at):
    names = {name: "model.safetensors" for name in load_file(at.model / "model.safetensors")}
    (at.model / "model.safetensors.index.json").write_bytes(dump(rng, mutate(rng, dict(metadata={}, weight_map=names))))
    load_checkpoint(at.model)


def weights(rng, at):
    file = at.model / "model.safetensors"
    file.write_bytes(with_header(rng, file) if rng.random() < 0.7 else spoil(rng, file.read_bytes()))
    load_checkpoint(at.model)


def calibration(rng, at):
    file, args = at.calibrated / "calibration.safetensors", args_from_hf(CONFIG)
    file.write_bytes(with_header(rng, file) if rng.random() < 0.7 else spoil(rng, file.read_bytes()))
    Calibration.load(at.calibrated, args).require(method_class("sals").statistics)


def tokenizer(rng, at):
    folder = at.tokenizer
    if rng.random() < 0.5:
        (folder / "tokenizer.json").write_bytes(dump(rng, mutate(rng, TOKENIZER)))
        (folder / "tokenizer.model").unlink()
    elif rng.random() < 0.2:
        (folder / "tokenizer.model").write_bytes(spoil(rng, (TINY / "tokenizer.model").read_bytes()))
    else:
        said = json.loads((TINY / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_bytes(dump(rng, mutate(rng, said)))
    tk = load_tokenizer(folder)
    tk.decode(tk.encode("abc def", bos=True))


def spec(rng, at):
    name = rng.choice([*method_files(), *presets()])
    names = [*knob_names(method_class(presets()[name][0] if name in presets() else name)), "skip_layers", "self", "x"]
    knobs = {rng.choice(names): rng.choice(TEXTS if rng.random() < 0.8 else VALUES) for _ in range(rng.randrange(3))}
    text = rng.choice(["{}", "0-1:{}", "0:full,1-:{}", "{},{}", "0-99999999999:{}", "{}:{}"]).format(name, name)
    if rng.random() < 0.5:
        text += "".join(f",{k}={v}" for k, v in knobs.items())
        knobs = {}
    layer_methods(text, 2, knobs)


def flags(rng, at):
    options = ["--method", "--method-arg", "--budget", "--sinks", "--recent", "--prompt", "--prompt-file", "--device",
               "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--batch-size", "--dtype",
               "--profile", "--checkpoint", "--random-init", "--interactive", "--chat", "--json",
               "--compile"]  # fmt: skip
    argv = ["--prompt", "a", "--checkpoint", str(TINY)]
    for flag in rng.sample(options, rng.choice((1, 2, 3))):
        argv += [flag] if rng.random() < 0.1 else [flag, rng.choice(TEXTS)]
    G.main(argv)


KINDS = dict(config=config, config_object=config_object, index=index, weights=weights, calibration=calibration,
             tokenizer=tokenizer, spec=spec, flags=flags)  # fmt: skip


# ---- the test ----


class Folders:
    """What mutants may spoil: made anew for each."""

    def __init__(self, good, own):
        self.good, self.own = good, own
        self.model, self.calibrated, self.tokenizer = (own / name for name in ("model", "calibrated", "tokenizer"))

    def fresh(self):
        shutil.rmtree(self.own, ignore_errors=True)
        shutil.copytree(self.good, self.own)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    for name in ("model", "calibrated", "tokenizer"):
        (folder / name).mkdir()
    args = args_from_hf(CONFIG)
    for name in ("model", "calibrated"):
        (folder / name / "config.json").write_text(json.dumps(CONFIG))
        tensors = save_checkpoint_tensors(random_transformer(args, "cpu", torch.float32), torch.float32)
        save_file(tensors, folder / name / "model.safetensors")
    sizes = {f"{s.name}.{part}": t.shape for s in method_class("sals").statistics for part, t in s.layout(args).items()}
    tensors = {f"layers.{i}.{name}": torch.rand(shape) for i in range(2) for name, shape in sizes.items()}
    meta = dict(version=VERSION, fingerprint=fingerprint(folder / "calibrated"), statistics={})
    Calibration(tensors, 2, meta).save(folder / "calibrated" / "calibration.safetensors")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / "tokenizer")
    return folder


class Model:
    """Stands for LLM: what comes after the flags are read is not computed."""

    def __init__(self, *a, device=None, **kw):
        machine.pick_device(device)

    def use(self, method, /, **knobs):
        layer_methods(method, 4, knobs)
        raise InputError("this far and no further")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", sampled((40, 1250), (40,)))
def test_mutants_are_accepted_or_one_line(kind, n, good, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda device: 1 << 28)
    monkeypatch.setattr(G, "LLM", Model)
    at, peak, accepted = Folders(good, tmp_path / "own"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for seed in range(n):
        if kind not in ("config_object", "spec", "flags"):
            at.fresh()
        try:
            with within(SECONDS):
                KINDS[kind](random.Random(f"{kind} {seed}"), at)
            accepted += 1
        except InputError as e:
            assert str(e), seed
        except (Exception, Hang) as e:
            raise AssertionError(f"mutant {seed} of {kind}: {type(e).__name__}: {str(e)[:300]}") from e
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < BYTES, seed
    assert accepted < n


OUTPUTS = {
    "generate --profile": (G.main, ["--prompt", "a", "--profile"]),
    "compare": (compare.main, ["--out"]),
    "analyze": (analyze.main, ["--out"]),
    "analyze --plots": (analyze.main, ["--plots"]),
    "bench_generate": (bench_generate.main, ["--out"]),
    "bench_attention": (bench_attention.main, ["--model", "llama-2-7b", "--out"]),
    "plots": (plots.main, ["--out"]),
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
        for module in {sys.modules[main.__module__], engine, options}:
            monkeypatch.setattr(module, heavy, lambda *a, **kw: pytest.fail("it has begun"), raising=False)
    out = [str(tmp_path if name == "plots" else tmp_path / "out")] if argv else []
    monkeypatch.setattr(sys, "argv", [name, *argv, *out])
    with within(SECONDS), pytest.raises(SystemExit) as e:
        run_cli((lambda: main([*argv, *out])) if main is G.main else main)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and "cannot" in err, err


def test_what_is_not_mutated_is_accepted(good, tmp_path):
    at = Folders(good, tmp_path / "own")
    at.fresh()
    load_checkpoint(at.model)
    Calibration.load(at.calibrated, args_from_hf(CONFIG)).require(method_class("sals").statistics)
    load_tokenizer(at.tokenizer)
    assert isinstance(M.ModelArgs.from_name("llama-2-7b"), M.ModelArgs) and Path(good).is_dir()
