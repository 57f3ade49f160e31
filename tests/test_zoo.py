"""Every family beside Llama, against transformers: tiny random models, saved in both layouts of config.json.

A family is a row of CASES. Weights are large, and norms and biases are random, so that every feature moves the logits.
"""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sampled import SEED

import loading.checkpoint as checkpoint
from cache.spec import layer_methods, method_class, method_files
from calibrate import calibrate
from loading.checkpoint import FAMILIES, args_from_hf, load_checkpoint
from model import ModelArgs
from runtime.errors import InputError

transformers = pytest.importorskip("transformers")

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
    short, long = ([1.0 + base * i for i in range(pairs)] for base in (0.1, 1.7))
    return dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=short, long_factor=long),
                original_max_position_embeddings=original)  # fmt: skip


CASES = {  # transformers' config class, and what differs from SIZES
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0, 1, 1], attention_bias=True, mlp_bias=True)),
    "smollm3-window": ("SmolLM3", dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8)),
    "granite": ("Granite", dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.4,
                                logits_scaling=0.2, attention_bias=True, mlp_bias=True)),
    "seed-oss": ("SeedOss", dict(head_dim=32, attention_bias=True, attention_out_bias=True, mlp_bias=True)),
    "seed-oss-no-output-bias": ("SeedOss", dict(head_dim=24)),
    "internlm3": ("InternLM3", dict(head_dim=32, attention_bias=True, mlp_bias=True)),
    "internlm3-dynamic": ("InternLM3", dict(head_dim=32, max_position_embeddings=24, rope_parameters=dict(
        rope_type="dynamic", rope_theta=1e4, factor=4.0))),
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "olmo3": ("Olmo3", dict(sliding_window=8, rope_parameters=BY_TYPE)),
    "gemma3-text": ("Gemma3Text", dict(GEMMA, final_logit_softcapping=8.0, rope_parameters=dict(
        sliding_attention=dict(ROPE, rope_theta=100.0), full_attention=LINEAR))),
    "gemma3-text-pattern": ("Gemma3Text", dict(GEMMA, layer_types=None, sliding_window_pattern=3)),
    "gemma3-images": ("Gemma3", dict(text_config=dict(SIZES, **GEMMA, model_type="gemma3_text"), vision_config=SIGLIP)),
    "phi3-window": ("Phi3", dict(sliding_window=8)),
    "phi3-partial": ("Phi3", dict(rope_parameters=dict(ROPE, partial_rotary_factor=0.75))),
    "phi3-long": ("Phi3", longrope(8, 32)),
    "phi3-short": ("Phi3", longrope(8, 64)),
    "phi4-mini": ("Phi3", dict(hidden_size=128, **longrope(12, 256), max_position_embeddings=1024)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral-window": ("Mixtral", dict(num_local_experts=3, num_experts_per_tok=1, sliding_window=8)),
    "qwen2-moe": ("Qwen2Moe", dict(EXPERTS, shared_expert_intermediate_size=48, decoder_sparse_step=2)),
    "qwen2-moe-window": ("Qwen2Moe", dict(EXPERTS, shared_expert_intermediate_size=64, norm_topk_prob=True,
                                          qkv_bias=False, use_sliding_window=True, sliding_window=8)),
    "qwen3-moe": ("Qwen3Moe", dict(EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3-moe-not-normed": ("Qwen3Moe", dict(EXPERTS, head_dim=16, attention_bias=True, rope_parameters=YARN)),
    "ministral": ("Ministral", dict(sliding_window=8, layer_types=TYPES[::-1], head_dim=32)),
    "ministral3": ("Ministral3", dict(head_dim=32, rope_parameters=MINISTRAL3)),
    "mistral3-images": ("Mistral3", dict(text_config=dict(SIZES, sliding_window=8, model_type="mistral"),
                                         vision_config=PIXTRAL)),
    "ministral3-images": ("Mistral3", dict(text_config=dict(SIZES, head_dim=32, model_type="ministral3",
                                                            rope_parameters=MINISTRAL3), vision_config=PIXTRAL,
                                           tie_word_embeddings=False)),
}  # fmt: skip
CASES["phi4-mini"][1]["rope_parameters"]["partial_rotary_factor"] = 0.75
OF_IMAGES = [name for name in CASES if "images" in name]
# logits that are compared in fp32 with a standard deviation above 1
TOL = 2e-4


def build_hf(name):
    kind, changes = CASES[name]
    sizes = {} if name in OF_IMAGES else SIZES
    config = getattr(transformers, f"{kind}Config")(**sizes | json.loads(json.dumps(changes)))
    config._attn_implementation = "eager"
    auto = transformers.AutoModelForImageTextToText if name in OF_IMAGES else transformers.AutoModelForCausalLM
    hf, gen = auto.from_config(config).eval(), torch.Generator().manual_seed(list(CASES).index(name))
    with torch.no_grad():
        for path, p in hf.named_parameters():
            if path.endswith("bias"):
                p.normal_(0, 0.5, generator=gen)
            elif p.dim() == 1:
                p.uniform_(-0.5, 0.5, generator=gen).add_(0.0 if kind.startswith("Gemma") else 1.0)
            else:
                p.normal_(0, 0.25, generator=gen)
    return hf


def older(config):
    """A config.json of transformers 5 in the keys of version 4."""
    if "text_config" in config:
        return config | dict(text_config=older(config["text_config"]))
    config, rope = dict(config), dict(config["rope_parameters"])
    del config["rope_parameters"]
    if "full_attention" in rope:
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    config["rope_theta"] = rope.pop("rope_theta")
    if (part := rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        config["partial_rotary_factor"] = part
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The same model in transformers and in kv-fast, and prompts of LENGTHS."""
    folder, hf = tmp_path_factory.mktemp("zoo") / request.param, build_hf(request.param)
    hf.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    gen = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB, (n,), generator=gen).tolist() for n in LENGTHS]
    return SimpleNamespace(name=request.param, hf=hf, folder=folder, config=config, prompts=prompts,
                           model=load_checkpoint(folder))  # fmt: skip


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
    assert (forward(case.model, case.prompts[0]) - expected).abs().max() < TOL


def test_greedy_in_a_ragged_batch_and_alone(case):
    n = max(LENGTHS) + NEW
    case.model.setup_cache("full", len(LENGTHS), n)
    fed, logits = rollout(case.model, case.prompts)
    for prompt, row, got in zip(case.prompts, fed, logits, strict=True):
        expected = hf_steps(case.hf, prompt, row)
        if case.name == "phi3-long" and len(prompt) <= 32 < len(prompt) + NEW:
            # transformers' forward of the whole text takes other frequencies than it does up to there
            expected, got, row = expected[:0], got[:0], []
        assert not len(got) or (got - expected).abs().max() < TOL
        assert row == expected[:-1].argmax(-1).tolist()
        case.model.setup_cache("full", 1, n)
        assert rollout(case.model, [prompt])[0][0] == fed[case.prompts.index(prompt)]


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
    assert args_from_hf(config) == case.model.args
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
    kind, given = CASES[case.name][0], case.config.get("text_config", case.config)
    if case.name in OF_IMAGES:
        return
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads" or kind == "Ministral"}
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


# ---- what else is done with a model ----


def test_methods_at_their_lossless_knobs(case):
    """Some methods, others for each SEED, say what `full` says. Narrow windows keep `full`."""
    model, a, n = case.model, case.model.args, max(LENGTHS) + NEW
    narrow = {i for i, w in enumerate(a.windows) if w and w < n}
    if len(narrow) == a.n_layer:
        pytest.skip("every layer slides")
    model.setup_cache("full", len(LENGTHS), n)
    fed, expected = rollout(model, case.prompts)
    names = [m for m in sorted(method_files()) if m != "full" and method_class(m).lossless is not None]
    for name in random.Random(f"{SEED} {case.name}").sample(names, 4) + ["sals", "expected_attention", "palu"]:
        knobs = method_class(name).lossless
        layers = [layer_methods("full" if i in narrow else name, a.n_layer, {} if i in narrow else knobs)[i]
                  for i in range(a.n_layer)]  # fmt: skip
        needs = [s for cls, args in layers for s in cls.needs(args)]
        if needs:
            texts = [torch.tensor(case.prompts[0] * 3) for _ in range(2)]
            model.calibration = calibrate(model, texts, 16, list({s.name: s for s in needs}.values()))
        model.setup_cache(layers, len(LENGTHS), n)
        got = rollout(model, case.prompts, feed=fed)[1]
        model.calibration = None
        assert (got - expected).abs().max() < 20 * TOL, name
