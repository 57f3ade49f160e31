"""Every family beside Llama, against transformers: tiny random models, saved in both layouts of config.json.

A family is a row of CASES. Weights are large, and norms and biases are random, so that every feature moves the logits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import gguf
import pytest
import torch
from formats_files import write_gguf
from safetensors.torch import load_file
from test_parallel import compare

import loading.checkpoint as checkpoint
import scripts.quantize
from cache.calibration import of_model
from cache.grammar import method_files
from cache.spec import layer_methods, method_class
from calibrate import calibrate
from engine.snapshot import CacheFile, State, identity, save
from loading.checkpoint import load_checkpoint, save_checkpoint_tensors, tensors_of
from loading.config import FAMILIES, args_from_hf
from model import ModelArgs
from runtime.errors import InputError
from runtime.parallel import Ranks
from weights import PackedLinear, WeightFormat

transformers = pytest.importorskip("transformers")

SEED = int(os.environ.get("SEED") or 0)  # draws the methods

VOCAB, NEW, LENGTHS = 199, 20, [37, 9, 1]
SIZES = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=1e4)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA = dict(head_dim=32, query_pre_attn_scalar=20, sliding_window=8, layer_types=TYPES)
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
PIXTRAL = dict(VISION, model_type="pixtral", patch_size=14, head_dim=16)
SIGLIP = dict(VISION, model_type="siglip_vision_model", patch_size=14)
BY_TYPE = dict(sliding_attention=ROPE, full_attention=dict(YARN, rope_theta=1e4))
EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32)
MINISTRAL3 = dict(YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5)


def longrope(pairs, original):
    short, long = ([round(1 + base * i, 3) for i in range(pairs)] for base in (0.1, 1.7))
    return dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=short, long_factor=long),
                original_max_position_embeddings=original)  # fmt: skip


CASES = {  # transformers' config class, and what differs from SIZES
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0, 1, 1], attention_bias=True, mlp_bias=True)),
    "smollm3-window": ("SmolLM3", dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8)),
    "smollm3-gguf": ("SmolLM3", dict(attention_bias=True)),  # which holds no list of layers
    "granite": ("Granite", dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.4,
                                logits_scaling=0.8, attention_bias=True, mlp_bias=True)),
    "seed-oss": ("SeedOss", dict(head_dim=32, attention_bias=True, attention_out_bias=True, mlp_bias=True)),
    "seed-oss-no-output-bias": ("SeedOss", dict(head_dim=24)),
    "internlm3": ("InternLM3", dict(head_dim=32, attention_bias=True, mlp_bias=True)),
    "internlm3-dynamic": ("InternLM3", dict(head_dim=32, max_position_embeddings=24, rope_parameters=dict(
        rope_type="dynamic", rope_theta=1e4, factor=4.0))),
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "olmo3": ("Olmo3", dict(sliding_window=8, rope_parameters=BY_TYPE)),
    "gemma3-text": ("Gemma3Text", dict(GEMMA, final_logit_softcapping=8.0, rope_parameters=dict(
        sliding_attention=dict(ROPE, rope_theta=100.0), full_attention=LINEAR))),
    "gemma3-gguf": ("Gemma3Text", dict(GEMMA, query_pre_attn_scalar=32)),  # which holds no scale of queries
    "gemma3-text-pattern": ("Gemma3Text", dict(GEMMA, layer_types=None, sliding_window_pattern=3)),
    "gemma3-images": ("Gemma3", dict(text_config=dict(SIZES, **GEMMA, model_type="gemma3_text"), vision_config=SIGLIP)),
    "phi3-window": ("Phi3", dict(sliding_window=8)),
    "phi3-partial": ("Phi3", dict(rope_parameters=dict(ROPE, partial_rotary_factor=0.75))),
    "phi3-long": ("Phi3", longrope(8, 32)),
    "phi3-short": ("Phi3", longrope(8, 64)),
    "phi4-mini": ("Phi3", dict(hidden_size=128, **longrope(12, 256), max_position_embeddings=1024)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral-window": ("Mixtral", dict(num_local_experts=3, num_experts_per_tok=1, sliding_window=8)),
    "qwen2-moe": ("Qwen2Moe", dict(EXPERTS, shared_expert_intermediate_size=96, decoder_sparse_step=2)),
    "qwen2-moe-window": ("Qwen2Moe", dict(EXPERTS, shared_expert_intermediate_size=64, norm_topk_prob=True,
                                          qkv_bias=False, use_sliding_window=True, sliding_window=8)),
    "qwen3-moe": ("Qwen3Moe", dict(EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3-moe-not-normed": ("Qwen3Moe", dict(EXPERTS, head_dim=16, attention_bias=True, rope_parameters=YARN)),
    "ministral": ("Ministral", dict(sliding_window=8, layer_types=TYPES[::-1], head_dim=32)),
    "ministral3": ("Ministral3", dict(head_dim=32, rope_parameters=MINISTRAL3)),
    "ministral3-linear": ("Ministral3", dict(head_dim=32, rope_parameters=dict(
        LINEAR, llama_4_scaling_beta=0.5, original_max_position_embeddings=16))),
    "mistral3-images": ("Mistral3", dict(text_config=dict(SIZES, sliding_window=8, model_type="mistral"),
                                         vision_config=PIXTRAL)),
    "ministral3-images": ("Mistral3", dict(text_config=dict(SIZES, head_dim=32, model_type="ministral3",
                                                            rope_parameters=MINISTRAL3), vision_config=PIXTRAL,
                                           tie_word_embeddings=False)),
}  # fmt: skip
CASES["phi4-mini"][1]["rope_parameters"]["partial_rotary_factor"] = 0.75
OF_ONE_MODEL = ("Ministral", "Mistral", "Qwen2", "Qwen3")  # number of KV heads by default, whatever that of heads
OF_IMAGES = [name for name in CASES if "images" in name]
TOL = 1e-3  # of logits of 20, in fp32


def build_hf(kind, changes, seed, sizes=SIZES):
    """A transformers model with random weights, biases and norms included."""
    images = "text_config" in changes
    sizes = {} if images else sizes
    config = getattr(transformers, f"{kind}Config")(**sizes | json.loads(json.dumps(changes)))
    config._attn_implementation = "eager"
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    hf, gen = auto.from_config(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, p in hf.named_parameters():
            if path.endswith("bias"):
                p.normal_(0, 0.5, generator=gen)
            elif p.dim() == 1:
                p.uniform_(-0.5, 0.5, generator=gen).add_(0.0 if kind.startswith("Gemma") else 1.0)
            else:
                p.normal_(0, 0.25, generator=gen)
    return hf


def older(config, key="rope_type"):
    """A config.json of transformers 5 in the keys of version 4; key: of the rope's type."""
    if "text_config" in config:
        return config | dict(text_config=older(config["text_config"], key))
    config, rope = dict(config), dict(config["rope_parameters"])
    del config["rope_parameters"]
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if "full_attention" in rope:
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    config["rope_theta"] = rope.pop("rope_theta")
    if (part := rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        config["partial_rotary_factor"] = part
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    return config


def make_case(folder, cases, name, sizes=SIZES, tol=TOL):
    """The same model in transformers and in kv-fast, and prompts of LENGTHS."""
    kind, changes = cases[name]
    hf = build_hf(kind, changes, list(cases).index(name), sizes)
    hf.save_pretrained(folder)
    gen = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB, (n,), generator=gen).tolist() for n in LENGTHS]
    return SimpleNamespace(name=name, kind=kind, hf=hf, folder=folder, prompts=prompts, model=load_checkpoint(folder),
                           config=json.loads((folder / "config.json").read_text()), tol=tol)  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("zoo") / request.param, CASES, request.param)


def language(hf):
    return getattr(hf.model, "language_model", hf.model)


@torch.inference_mode()
def hf_forward(hf, tokens):
    rotary = language(hf).rotary_emb  # of dynamic types it has a memory: take a new one
    language(hf).rotary_emb = type(rotary)(rotary.config)
    return hf(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@torch.inference_mode()
def hf_steps(hf, prompt, new):
    """What transformers predicts after the prompt and after each of `new` [len(new) + 1, V], step by step where angles
    depend on the length of the text."""
    if not any("dynamic" in str(r) for r in (hf.config.get_text_config().rope_parameters,)):
        return hf_forward(hf, prompt + new)[len(prompt) - 1 :]
    rotary = language(hf).rotary_emb
    language(hf).rotary_emb, cache, out = type(rotary)(rotary.config), transformers.DynamicCache(), []
    for part in [prompt, *([t] for t in new)]:
        out.append(hf(input_ids=torch.tensor([part]), past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.stack(out)


@torch.inference_mode()
def forward(model, tokens):
    return model(torch.tensor([tokens]))[0]


@torch.inference_mode()
def rollout(model, prompts, n_new=NEW, feed=None):
    """Greedy tokens, or those of `feed`, in the cache that is set up: for each row tokens, and logits before each."""
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.full((len(prompts), int(lengths.max())), 3)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    logits, fed = [model.prefill(tokens, lengths)], []
    for i in range(n_new):
        fed.append(logits[-1].argmax(-1) if feed is None else torch.tensor([row[i] for row in feed]))
        logits.append(model.decode(fed[-1], lengths + i))
        model.maintain(i + 1)
    return torch.stack(fed, 1).tolist(), torch.stack(logits, 1)


# ---- the numbers ----


def test_teacher_forcing(case):
    expected = hf_forward(case.hf, case.prompts[0])
    assert expected.std() > 1
    assert (forward(case.model, case.prompts[0]) - expected).abs().max() < case.tol


def test_greedy_in_a_ragged_batch_and_alone(case):
    n = max(LENGTHS) + NEW
    case.model.setup_cache("full", len(LENGTHS), n)
    fed, logits = rollout(case.model, case.prompts)
    for prompt, row, got in zip(case.prompts, fed, logits, strict=True):
        expected = hf_steps(case.hf, prompt, row)
        assert (got - expected).abs().max() < case.tol
        assert row == expected[:-1].argmax(-1).tolist()
        case.model.setup_cache("full", 1, n)
        assert rollout(case.model, [prompt])[0][0] == fed[case.prompts.index(prompt)]


@pytest.mark.parametrize("case", ["phi3-long"], indirect=True)
def test_text_that_will_leave_the_original_context(case):
    """If that is known, all of its keys turn as beyond it: as transformers' forward of the whole text."""
    prompt = case.prompts[1]
    case.model.setup_cache("full", 1, 64, max_new_tokens=40)
    fed, logits = rollout(case.model, [prompt], 40)
    expected = hf_forward(case.hf, prompt + fed[0])[len(prompt) - 1 :]
    assert len(prompt) < 32 < len(prompt) + 40 and (logits[0] - expected).abs().max() < TOL


@pytest.mark.parametrize("case", OF_IMAGES, indirect=True)
def test_a_model_of_images_that_does_not_say_whether_its_head_is_tied(case, tmp_path):
    """Mistral Small 3: the file has a head, or it does not."""
    shutil.copytree(case.folder, tmp_path, dirs_exist_ok=True)
    config = {k: v for k, v in case.config.items() if k != "tie_word_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(tmp_path).args.tie_embeddings == case.hf.config.tie_word_embeddings


def test_prompt_in_chunks(case):
    case.model.setup_cache("full", 1, 60)
    whole = rollout(case.model, case.prompts[:1], 1)[1]
    case.model.prefill_chunk = 10
    chunked = rollout(case.model, case.prompts[:1], 1)[1]
    case.model.prefill_chunk = None
    assert (whole - chunked).abs().max() < TOL


def test_both_layouts_of_the_config(case, tmp_path):
    """transformers reads the older keys, too: its logits from them are ours."""
    config = older(case.config)
    assert args_from_hf(config) == args_from_hf(older(case.config, "type")) == case.model.args
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = type(case.hf).config_class.from_pretrained(tmp_path)
    kind._attn_implementation = "eager"
    again = type(case.hf)(kind).eval()
    again.load_state_dict(case.hf.state_dict())
    expected = hf_forward(again, case.prompts[0])
    if case.name == "olmo3":  # rope_theta of sliding layers: version 5 replaces it by its default, version 4 did not
        expected = hf_forward(case.hf, case.prompts[0])
    assert (forward(case.model, case.prompts[0]) - expected).abs().max() < TOL


def test_absent_keys_are_transformers_defaults(case):
    """A config.json with the sizes alone."""
    kind, given = case.kind, case.config.get("text_config", case.config)
    if case.name in OF_IMAGES:
        return
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads" or kind in OF_ONE_MODEL}
    if (heads := FAMILIES[given["model_type"]].absent.get("num_key_value_heads")) is not None:
        sizes["num_attention_heads"] = 2 * heads
    sizes["hidden_size"] = 16 * sizes["num_attention_heads"]
    del sizes["max_position_embeddings"]
    full = getattr(transformers, f"{kind}Config")(**sizes).to_dict()
    assert args_from_hf(sizes | dict(model_type=given["model_type"])) == args_from_hf(full)


def test_each_feature_matters(case, monkeypatch):
    """With a field of ModelArgs at its default, the file does not fit or the logits move."""
    usual, expected, seen = ModelArgs(), forward(case.model, case.prompts[0]), 0
    sizes = ("dim", "n_layer", "n_head", "n_kv_head", "head_dim", "ffn_dim", "vocab_size", "max_seq_len", "dtype",
             "eos_ids", "norm_eps", "tie_embeddings")  # fmt: skip
    for f in dataclasses.fields(ModelArgs):
        value, default = getattr(case.model.args, f.name), getattr(usual, f.name)
        if f.name in sizes or value == default or (f.name == "rope" and case.model.args.ropes):
            continue
        if f.name == "rope" and value == replace(default, theta=value.theta):
            default = replace(default, theta=value.theta * 1.5)
        changed = replace(case.model.args, **{f.name: default})
        monkeypatch.setattr(checkpoint, "args_from_hf", lambda config, changed=changed: changed)
        try:
            moved = (forward(load_checkpoint(case.folder), case.prompts[0]) - expected).abs().max()
        except InputError:
            moved = 1
        assert moved > 1e-2, f.name
        seen += 1
    assert seen


# ---- keys of config.json ----

# attributes that transformers reads and that change no logits: how to compute, training, padding, and images
NO_LOGITS = {
    "initializer_range", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "_attn_implementation", "json", "default_theta", "attention_dropout", "residual_dropout", "resid_pdrop",
    "pad_token_id", "image_token_id", "mm_tokens_per_image", "vision_config", "text_config", "get_text_config",
    "standardize_rope_params", "_sliding_window_pattern",
}  # fmt: skip


class Watched(dict):
    """A config that notes which keys are looked up."""

    read: ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __or__(self, other):
        return Watched({**self, **other})


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_that_transformers_reads_is_known(name, monkeypatch):
    """Its model's code, its configuration and what all share: each attribute is read by us or changes no logits."""
    folder, models = Path(transformers.__file__).parent, {"internlm3": "llama", "gemma3_text": "gemma3"}
    own = models.get(name, name)
    files = [folder / f"{part}_utils.py" for part in ("masking", "modeling_rope", "cache")]
    files.append(folder / f"models/{own}/modeling_{own}.py")
    read = {key for f in files for key in re.findall(r"\bconfig\.(\w+)\b(?!\()", f.read_text())}
    read |= {key for f in files for key in re.findall(r'getattr\((?:self\.)?config, "(\w+)"', f.read_text())}
    text = (folder / f"models/{own}/configuration_{own}.py").read_text()
    read |= {key for key in re.findall(r"\bself\.(\w+)\b(?!\()", text)}
    read |= {key for key in re.findall(r'kwargs\.\w+\("(\w+)"', text)}
    assert len(read) > 20
    monkeypatch.setattr(Watched, "read", set())
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], absent=Watched(FAMILIES[name].absent)))
    for scaling in (None, YARN):
        args_from_hf(SIZES | dict(model_type=name, use_sliding_window=True, sliding_window=8, rope_scaling=scaling))
    unread = read - Watched.read - NO_LOGITS
    # the window of a family that has none: of no use but to transformers' own cache, which then drops tokens
    assert unread <= (set() if FAMILIES[name].slides else {"sliding_window"}), unread


def test_windows_in_mistrals_own_notation():
    """Ministral 8B: a pattern of windows, repeated over the layers."""
    config = SIZES | dict(model_type="ministral", sliding_window=[None, 8])
    assert args_from_hf(config).windows == (None, 8, None, 8)
    for pattern in ([], [8, 8, 8], [8, "x"], [8, 0]):
        with pytest.raises(InputError, match="sliding_window"):
            args_from_hf(config | dict(sliding_window=pattern))


def test_attn_factor_is_ignored_and_said(tmp_path, capsys):
    """DeepSeek-R1-0528-Qwen3-8B sets it; transformers reads attention_factor alone."""
    config = transformers.Qwen3Config(**SIZES, rope_parameters=dict(YARN, attn_factor=0.8))
    hf = transformers.Qwen3ForCausalLM(config).eval()
    hf.save_pretrained(tmp_path)
    ours, tokens = forward(load_checkpoint(tmp_path), range(30)), list(range(30))
    assert "attn_factor" in capsys.readouterr().err
    assert (ours - hf_forward(hf, tokens)).abs().max() < TOL


def test_a_length_beside_ropes_by_type_is_not_theirs():
    """As transformers reads it; it counts beside one rope for all layers."""
    config = SIZES | dict(model_type="olmo3", sliding_window=8, rope_parameters=BY_TYPE)
    assert args_from_hf(config | dict(original_max_position_embeddings=8)).rope == args_from_hf(config).rope


@pytest.mark.parametrize("name", ["cohere", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma2", "starcoder2", "glm4"])
def test_other_architectures_are_refused_with_the_bridge_named(name):
    with pytest.raises(InputError, match=f"'{name}'.*engine/bridge.py"):
        args_from_hf(SIZES | dict(model_type=name))


@pytest.mark.parametrize("changes", [
    dict(partial_rotary_factor=0.2), dict(partial_rotary_factor=2.0), dict(rope_scaling=dict(type="longrope")),
    dict(rope_scaling=dict(type="su", short_factor=[1.0] * 8, long_factor=[1.0] * 7)),
    dict(rope_scaling=dict(type="su", short_factor=[1.0] * 8, long_factor=["x"] * 8)),
    dict(model_type="gemma3_text", use_bidirectional_attention=True),
    dict(model_type="gemma3_text", attn_logit_softcapping=50.0),
    dict(model_type="gemma3_text", rope_parameters=dict(rope_theta=1e4)),
    dict(model_type="olmo3", rope_parameters=BY_TYPE, rope_scaling=YARN),
    dict(model_type="smollm3", use_sliding_window=True, sliding_window=0), dict(hidden_act=["silu"]),
    dict(model_type="smollm3", use_sliding_window=False, sliding_window=8, layer_types=TYPES),
    dict(model_type="ministral3", rope_parameters=dict(MINISTRAL3, llama_4_scaling_beta="x")),
    dict(model_type="smollm3", no_rope_layers=[1]), dict(model_type="smollm3", no_rope_layers="all"),
    dict(model_type="granite", residual_multiplier="x"), dict(model_type="granite", logits_scaling=0),
    dict(model_type="mistral", rope_scaling=dict(YARN, llama_4_scaling_beta=0.1)),
    dict(model_type="mistral", sliding_window=8, layer_types=TYPES),
    dict(model_type="llama", sliding_window=8, layer_types=[[1]]),
    dict(model_type="qwen2", layer_types=["chunked_attention"] * 4),
    dict(model_type="qwen3", use_sliding_window=False, layer_types=TYPES[:1]),
    dict(model_type="ministral", sliding_window=None, layer_types=TYPES),
    dict(model_type="gemma3_text", sliding_window=None), dict(model_type="olmo3", sliding_window=None),
], ids=str)  # fmt: skip
def test_settings_that_are_not_computed_are_refused_by_name(changes):
    key = [*changes][-1]
    with pytest.raises(InputError, match=f"{key}|longrope|short_factor|long_factor|rope_parameters|llama_4"):
        args_from_hf(SIZES | dict(model_type="phi3") | changes)


# ---- what else is done with a model ----


@pytest.mark.parametrize("case", ["smollm3", "phi3-long", "ministral3"], indirect=True)
def test_drafted_tokens_are_checked_exactly(case):
    """Several tokens at a time in one exact pass, at positions that differ by row."""
    model, lengths = case.model, torch.tensor(LENGTHS)
    model.setup_cache("full", len(LENGTHS), max(LENGTHS) + NEW)
    fed, expected = rollout(model, case.prompts, 8)
    model.setup_cache("full", len(LENGTHS), max(LENGTHS) + NEW, drafts=4)
    rollout(model, case.prompts, 4, fed)
    got = model.decode(torch.tensor([row[4:8] for row in fed]), lengths + 4)
    assert (got - expected[:, 5:]).abs().max() < TOL


@pytest.mark.parametrize("case", ["olmo3", "gemma3-text", "ministral3"], indirect=True)
def test_a_step_is_one_graph(case):
    model, lengths = case.model, torch.tensor(LENGTHS)
    model.setup_cache("full", len(LENGTHS), max(LENGTHS) + NEW)
    fed, expected = rollout(model, case.prompts, 2)
    model.setup_cache("full", len(LENGTHS), max(LENGTHS) + NEW)
    rollout(model, case.prompts, 1, fed)
    torch._dynamo.reset()
    step = torch.compile(model.decode, fullgraph=True, dynamic=False, backend="eager")
    got = step(torch.tensor([row[1] for row in fed]), lengths + 1)
    assert (got - expected[:, 2]).abs().max() < TOL


def test_methods_at_their_lossless_knobs(case):
    """Some methods, others for each SEED, say what `full` says; of layers that rotate otherwise, those that do so
    themselves. Layers with narrow windows keep `full`."""
    model, a, n = case.model, case.model.args, max(LENGTHS) + NEW
    narrow = {i for i, w in enumerate(a.windows) if w and w < n}
    if len(narrow) == a.n_layer:
        pytest.skip("every layer slides")
    model.setup_cache("full", len(LENGTHS), n)
    fed, expected = rollout(model, case.prompts, 6)
    names = [m for m in sorted(method_files()) if m != "full" and method_class(m).lossless is not None]
    names = random.Random(f"{SEED} {case.name}").sample(names, 2)
    if case.name in ("smollm3", "phi4-mini", "gemma3-text", "ministral3"):
        names += ["sals", "palu", "expected_attention", "kvzip"]
    for name in names:
        knobs = method_class(name).lossless
        of = [("full", {}) if i in narrow else (name, knobs) for i in range(a.n_layer)]
        layers = [layer_methods(name, a.n_layer, knobs)[i] for i, (name, knobs) in enumerate(of)]
        needs = {s.name: s for cls, args in layers for s in cls.needs(args)}
        if needs:
            model.calibration = calibrate(model, [torch.tensor(case.prompts[0] * 2)], 16, needs.values())
        model.setup_cache(layers, len(LENGTHS), n)
        got = rollout(model, case.prompts, 6, fed)[1]
        model.calibration = None
        assert (got - expected).abs().max() < 20 * TOL, name


@pytest.mark.parametrize("case", ["smollm3", "gemma3-text", "phi3-long", "ministral3"], indirect=True)
def test_saved_cache(case, tmp_path):
    """Text goes on from a file as it does in memory: bit for bit."""
    model, spec, lengths = case.model, "full", torch.tensor(LENGTHS)
    model.setup_cache(spec, len(LENGTHS), max(LENGTHS) + NEW)
    fed, expected = rollout(model, case.prompts)
    model.setup_cache(spec, len(LENGTHS), max(LENGTHS) + NEW)
    tokens = torch.tensor(rollout(model, case.prompts, 8, fed)[0])
    state = State(case.prompts, tokens[:, :7], tokens[:, 7], None)
    save(
        tmp_path / "cache", model.cache, state, identity(model, spec, layer_methods(spec, model.args.n_layer), "", None)
    )
    model.setup_cache(spec, len(LENGTHS), max(LENGTHS) + NEW)
    CacheFile(tmp_path / "cache").fill(model.cache)
    for rope in {m.rope for m in model.cache}:
        rope.set_prompt(lengths)
    for i in range(7, NEW):
        step = torch.tensor([row[i] for row in fed])
        assert torch.equal(model.decode(step, lengths + i), expected[:, i + 1])


def test_weights_in_8_bits(case):
    """Packed weights say what a dense model of the same rounded weights says, and read back under their names."""
    packed = load_checkpoint(case.folder, weight_format=WeightFormat.parse("int8"))
    rounded = save_checkpoint_tensors(packed, torch.float32)
    dense = load_checkpoint(case.folder)
    for name, target in tensors_of(dense).items():
        target.put(rounded[name])
    got, expected = (forward(m, case.prompts[0]) for m in (packed, dense))
    assert (got - expected).abs().max() < 0.05 * expected.std()
    assert (expected - forward(case.model, case.prompts[0])).abs().max() > 1e-3


def test_shares_of_two_ranks_are_the_model(case):
    """Tensor by tensor; a rank's part is read through the same order of channels."""
    whole = save_checkpoint_tensors(case.model, torch.float32)
    parts = [save_checkpoint_tensors(load_checkpoint(case.folder, ranks=Ranks(r, 2)), torch.float32) for r in (0, 1)]
    assert parts[0].keys() == parts[1].keys() and whole.keys() - parts[0].keys() <= {"lm_head.weight"}
    for name, (one, two) in {name: [p[name] for p in parts] for name in parts[0]}.items():
        dim = next((i for i in range(one.dim()) if one.shape[i] != whole[name].shape[i]), None)
        assert torch.equal(one if dim is None else torch.cat((one, two), dim), whole[name]) or "o_proj.bias" in name


@pytest.mark.parametrize("case", ["phi4-mini", "gemma3-images"], indirect=True)
def test_a_quantized_folder(case, tmp_path, cli):
    """Fused tensors are packed, too; those of images are kept."""
    assert cli(scripts.quantize, case.folder, tmp_path / "out", "--weights", "int8")[0] == 0
    saved = load_checkpoint(tmp_path / "out")
    assert isinstance(saved.layers[0].attention.wqkv, PackedLinear)
    want = forward(load_checkpoint(case.folder, weight_format=WeightFormat.parse("int8")), case.prompts[0])
    assert (forward(saved, case.prompts[0]) - want).abs().max() < 0.4 * want.std()  # embeddings are in bf16


@pytest.mark.slow
@pytest.mark.parametrize("case", ["olmo2", "gemma3-text", "phi4-mini"], indirect=True)
def test_two_processes(case, tmp_path):
    specs = ["full"] if case.model.args.windows else ["full", "streaming", "quest"]
    compare(tmp_path, 2, specs, checkpoint=str(case.folder), rows=case.prompts, tolerance=2 * TOL)


# ---- GGUF ----

ARCHS = {"smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "olmo3": "olmo2", "gemma3_text": "gemma3",
         "phi3": "phi3", "ministral3": "mistral3"}  # fmt: skip


def as_gguf(path, case, kind):
    """The checkpoint as llama.cpp's converter writes it, with the keys of its family."""
    c, arch = case.hf.config.to_dict(), ARCHS[case.hf.config.model_type]
    D = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    rope = c["rope_parameters"].get("full_attention") or c["rope_parameters"]
    tensors = load_file(case.folder / "model.safetensors")
    keys = {"rope.dimension_count": int(D * rope.get("partial_rotary_factor", 1.0))}
    if c.get("sliding_window"):
        keys["attention.sliding_window"] = c["sliding_window"]
        if "layer_types" in c:
            keys["attention.sliding_window_pattern"] = [t[0] == "s" for t in c["layer_types"]]
    if arch == "granite":
        keys |= {"embedding_scale": c["embedding_multiplier"], "residual_scale": c["residual_multiplier"],
                 "attention.scale": c["attention_multiplier"], "logit_scale": c["logits_scaling"]}  # fmt: skip
    if arch == "gemma3":
        keys["rope.freq_base_swa"] = c["rope_parameters"]["sliding_attention"]["rope_theta"]
        keys["final_logit_softcapping"] = c["final_logit_softcapping"] or 0.0
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        longer = c["max_position_embeddings"] / rope["original_max_position_embeddings"]
        scale = math.sqrt(1 + math.log(longer) / math.log(rope["original_max_position_embeddings"]))
        keys["rope.scaling.attn_factor"] = scale
        tensors |= {f"rope_factors_{x}.weight": torch.tensor(rope[f"{x}_factor"]) for x in ("long", "short")}
    if arch == "mistral3":
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    config = {k: v for k, v in c.items() if k != "vocab_size"} | dict(model_type=arch, rope_theta=rope["rope_theta"])
    return write_gguf(path, config, tensors, kind, **{f"ARCH__{key}": value for key, value in keys.items()})


IN_GGUF = ["smollm3-gguf", "granite", "olmo2", "olmo3", "gemma3-gguf", "phi3-window", "phi3-partial", "phi3-long",
           "phi4-mini", "ministral3"]  # fmt: skip


@pytest.mark.parametrize("case", IN_GGUF, indirect=True)
def test_gguf(case, tmp_path):
    """The same logits from a GGUF file, in fp32 and, of the numbers that it holds, in 8 bits."""
    kinds, prompt = gguf.GGMLQuantizationType, case.prompts[0]
    as_gguf(tmp_path / "f32.gguf", case, kinds.F32)
    model = load_checkpoint(tmp_path / "f32.gguf")
    assert of_model(model.args) == of_model(case.model.args)  # a calibration of one fits the other
    assert (forward(model, prompt) - forward(case.model, prompt)).abs().max() < TOL
    as_gguf(tmp_path / "q8.gguf", case, kinds.Q8_0)
    packed, dense = load_checkpoint(tmp_path / "q8.gguf"), model
    assert isinstance(packed.layers[0].attention.wqkv, PackedLinear)
    rounded = save_checkpoint_tensors(packed, torch.float32)
    for name, target in tensors_of(dense).items():
        target.put(rounded[name])
    assert (forward(packed, prompt) - forward(dense, prompt)).abs().max() < 0.05
