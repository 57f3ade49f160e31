"""model.py against transformers, beside tests/test_zoo.py, for Llama, Mistral and Qwen: blocks, lengths, dtypes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from test_zoo import (  # noqa: F401, their tests run for these models, too
    ROPE,
    SIZES,
    VOCAB,
    YARN,
    build_hf,
    forward,
    hf_forward,
    hf_steps,
    make_case,
    rollout,
    test_absent_keys_are_transformers_defaults,
    test_both_layouts_of_the_config,
    test_greedy_in_a_ragged_batch_and_alone,
    test_teacher_forcing,
)

import kernels.dense_attention
import model as model_module
from kernels.rope import rope_inv_freq
from loading.checkpoint import load_checkpoint, random_transformer
from loading.config import args_from_hf
from loading.named import named_args

transformers = pytest.importorskip("transformers")

TOL = 1e-4  # absolute, on logits whose standard deviation is above 1
TWO_LAYERS = SIZES | dict(num_hidden_layers=2)
LLAMA3 = dict(rope_theta=5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
SCALED = dict(YARN, original_max_position_embeddings=32)
DYNAMIC = dict(rope_theta=1e4, rope_type="dynamic", factor=4.0)


def rope(base=ROPE, **changes):
    return dict(rope_parameters=dict(base, **changes))


CASES = {  # Llama, Mistral and Qwen: mechanisms that other families share
    "llama-mha": ("Llama", dict(num_key_value_heads=4)),
    "llama-gqa2-d64": ("Llama", dict(head_dim=64, **rope(rope_theta=5e5))),
    "llama-gqa3-d32": ("Llama", dict(hidden_size=96, num_attention_heads=6, head_dim=32)),
    "llama-mqa5-d96": ("Llama", dict(hidden_size=80, num_attention_heads=5, num_key_value_heads=1, head_dim=96)),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-attention-bias": ("Llama", dict(attention_bias=True)),
    "llama-mlp-bias": ("Llama", dict(mlp_bias=True)),
    "llama-all-biases-tied": ("Llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama-eps": ("Llama", dict(rms_norm_eps=0.1)),
    "llama-rope-llama3": ("Llama", rope(LLAMA3)),
    "llama-rope-llama3-blend": ("Llama", dict(head_dim=64, **rope(LLAMA3, low_freq_factor=0.5, high_freq_factor=9.0))),
    "llama-rope-linear": ("Llama", rope(rope_type="linear", factor=4.0)),
    "llama-rope-dynamic": ("Llama", dict(max_position_embeddings=24, **rope(DYNAMIC))),
    "llama-rope-dynamic-crossing": ("Llama", dict(max_position_embeddings=50, head_dim=32, **rope(DYNAMIC))),
    "llama-rope-dynamic-short": ("Llama", dict(max_position_embeddings=512, **rope(DYNAMIC))),
    "llama-rope-yarn": ("Llama", rope(SCALED)),
    "llama-rope-yarn-mscale": ("Llama", rope(SCALED, mscale=2.0, mscale_all_dim=0.5)),
    "llama-rope-yarn-attention-factor": ("Llama", rope(SCALED, attention_factor=1.4, mscale=2.0, mscale_all_dim=0.5)),
    "llama-rope-yarn-no-truncate": ("Llama", dict(head_dim=64, **rope(SCALED, truncate=False))),
    "llama-rope-yarn-betas": ("Llama", dict(head_dim=64, **rope(SCALED, beta_fast=3.0, beta_slow=0.25))),
    "mistral-v0.1": ("Mistral", dict(sliding_window=8)),
    "mistral-v0.2": ("Mistral", dict(sliding_window=None, **rope(rope_theta=1e6))),
    "mistral-nemo": ("Mistral", dict(head_dim=32, sliding_window=None, **rope(rope_theta=1e6))),
    "mistral-window-d96-yarn": ("Mistral", dict(head_dim=96, sliding_window=30, **rope(SCALED))),
    "mistral-window-wide": ("Mistral", dict(sliding_window=200, tie_word_embeddings=True)),
    "qwen2": ("Qwen2", rope(rope_theta=1e6)),
    "qwen2-tied-yarn": ("Qwen2", dict(tie_word_embeddings=True, **rope(SCALED))),
    "qwen2-max-window-layers": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3),
    ),
    "qwen2-layer-types": (
        "Qwen2",
        dict(
            use_sliding_window=True,
            sliding_window=5,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "qwen2-window-unused": ("Qwen2", dict(use_sliding_window=False, sliding_window=5, max_window_layers=0)),
    "qwen3": ("Qwen3", dict(head_dim=32, **rope(rope_theta=1e6))),
    "qwen3-default-d128-tied": ("Qwen3", dict(tie_word_embeddings=True)),
    "qwen3-attention-bias": ("Qwen3", dict(head_dim=64, attention_bias=True)),
    "qwen3-window": (
        "Qwen3",
        dict(head_dim=32, use_sliding_window=True, sliding_window=8, max_window_layers=0, attention_bias=True),
    ),
    "qwen3-yarn": ("Qwen3", dict(head_dim=64, **rope(SCALED, rope_theta=1e6))),
    "qwen3-yarn-attn-factor": ("Qwen3", dict(head_dim=64, **rope(SCALED, rope_theta=1e6, attn_factor=0.8782))),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("hf") / request.param, CASES, request.param, TWO_LAYERS, TOL)


def generate(model, prompts, n_new):
    """`rollout` in a full cache of its own, with 5 slots to spare."""
    model.setup_cache("full", len(prompts), max(map(len, prompts)) + n_new + 5)
    return rollout(model, prompts, n_new)


def test_many_tokens_and_a_second_turn(case):
    """48 greedy tokens cross windows and the lengths at which dynamic angles change; a turn is fed through decode."""
    n, turn = 48, [5, 17, 17, 101, 3, 198, 0, 44, 9]
    feed = [row + turn for row in generate(case.model, case.prompts, n)[0]]
    case.model.setup_cache("full", len(feed), max(map(len, case.prompts)) + n + len(turn))
    logits = rollout(case.model, case.prompts, n + len(turn), feed)[1]
    for prompt, row, got in zip(case.prompts, feed, logits, strict=True):
        expected = hf_steps(case.hf, prompt, row)
        assert (got - expected).abs().max() < TOL
        assert row[:n] == expected[:n].argmax(-1).tolist()


def test_reset_then_another_prompt(case):
    """After reset_cache a prompt gives what a fresh cache gives: nothing remains of the longer one before it."""
    model, (long, short, _) = case.model, case.prompts
    fresh = generate(model, [short], n_new=8)
    model.setup_cache("full", 1, len(long) + 13)
    rollout(model, [long], n_new=8)
    model.reset_cache()
    fed, logits = rollout(model, [short], n_new=8)
    assert fed == fresh[0]
    torch.testing.assert_close(logits, fresh[1], rtol=0, atol=1e-5)


def test_blocks_and_chunks_do_not_change_the_result(case, monkeypatch):
    """A window's query blocks and the MLP's token chunks, made so small that the prompt spans several."""
    monkeypatch.setattr(kernels.dense_attention, "QUERY_BLOCK", 7)
    monkeypatch.setattr(model_module, "MLP_CHUNK", 10)
    prompt = case.prompts[0]
    assert (forward(case.model, prompt) - hf_forward(case.hf, prompt)).abs().max() < TOL
    fed, logits = generate(case.model, case.prompts[:2], n_new=2)
    expected = hf_steps(case.hf, prompt, fed[0])
    assert (logits[0] - expected).abs().max() < TOL and fed[0] == expected[:-1].argmax(-1).tolist()


def test_rope_tables_of_forward_survive_inference_mode_and_to():
    """They are cached: an evaluation must not make them unfit for training, nor `.to(bfloat16)` round them."""
    args = named_args("llama-3.2-1b")
    model = random_transformer(replace(args, dim=64, n_layer=1, ffn_dim=32, vocab_size=VOCAB), "cpu", torch.float32)
    forward(model, [1, 2, 3])
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    before = [t.clone() for t in model.rope_tables(3)]
    after = model.bfloat16().rope_tables(3)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any("rope" in name for name, _ in model.named_buffers())


# ---- the configuration ----


def test_args_are_the_config(case):
    c, a = case.hf.config, case.model.args
    assert (a.dim, a.n_layer, a.n_head, a.n_kv_head) == (
        c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads,
    )  # fmt: skip
    assert a.head_dim == case.hf.model.layers[0].self_attn.head_dim
    assert (a.ffn_dim, a.vocab_size, a.max_seq_len) == (c.intermediate_size, c.vocab_size, c.max_position_embeddings)
    assert (a.norm_eps, a.tie_embeddings, a.dtype) == (c.rms_norm_eps, c.tie_word_embeddings, "float32")
    inv_freq, scale = rope_inv_freq(a.rope, a.head_dim, a.max_seq_len)
    rotary = type(case.hf.model.rotary_emb)(c)
    torch.testing.assert_close(inv_freq, rotary.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(rotary.attention_scaling, rel=1e-6)
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in case.hf.model.layers]
    if case.name.startswith("mistral"):
        windows = [c.sliding_window] * c.num_hidden_layers
    assert [a.window(i) for i in range(a.n_layer)] == windows


@pytest.mark.parametrize("name", ["qwen2-max-window-layers", "qwen3-window"])
def test_windows_without_layer_types(name):
    """Configs of transformers 4 have no layer_types: max_window_layers decides, and 4096 is the window's default."""
    config = build_hf(*CASES[name], 0, TWO_LAYERS).config
    old = config.to_dict()
    del old["layer_types"]
    assert args_from_hf(old).windows == args_from_hf(config.to_dict()).windows
    del old["sliding_window"]
    theirs = type(config)(**json.loads(json.dumps(old)))
    sliding = [theirs.sliding_window if t == "sliding_attention" else None for t in theirs.layer_types]
    assert list(args_from_hf(old).windows) == sliding


def test_yarn_factor_from_the_lengths():
    """A null factor is the ratio of the lengths, wherever the original one is given."""
    sizes = dict(SIZES, model_type="llama")
    scaling = {k: v for k, v in SCALED.items() if k != "original_max_position_embeddings"}
    want = args_from_hf(dict(sizes, rope_parameters=SCALED)).rope
    assert want.factor == SIZES["max_position_embeddings"] / SCALED["original_max_position_embeddings"]
    assert args_from_hf(dict(sizes, rope_parameters=dict(SCALED, factor=None))).rope == want
    config = dict(sizes, rope_parameters=dict(scaling, factor=None), original_max_position_embeddings=32)
    assert args_from_hf(config).rope == want


def test_yarn_and_llama3_take_the_original_length_from_the_config():
    """Phi style: a key of the config itself goes before the one in rope_parameters; without either, max_position."""
    sizes = dict(SIZES, model_type="llama")
    for where in (dict(original_max_position_embeddings=64), {}):
        for base in (SCALED, LLAMA3):
            scaling = {k: v for k, v in base.items() if where or k != "original_max_position_embeddings"}
            config = dict(sizes, rope_parameters=scaling, **where)
            hf = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
                transformers.LlamaConfig(**json.loads(json.dumps(config)))
            )
            a = args_from_hf(config)
            inv_freq, scale = rope_inv_freq(a.rope, a.head_dim, a.max_seq_len)
            torch.testing.assert_close(inv_freq, hf.inv_freq, rtol=1e-6, atol=0)
            assert scale == pytest.approx(hf.attention_scaling)


# ---- the files ----


@pytest.mark.parametrize("name", ["llama-all-biases-tied", "llama-gqa3-d32", "qwen2", "qwen3-attention-bias"])
def test_sharded(name, tmp_path):
    hf = build_hf(*CASES[name], 0, TWO_LAYERS)
    hf.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert not (tmp_path / "model.safetensors").exists()
    tokens = list(range(40))
    assert (forward(load_checkpoint(tmp_path), tokens) - hf_forward(hf, tokens)).abs().max() < TOL


@pytest.mark.parametrize("name", ["llama-mha", "mistral-nemo", "qwen2", "qwen3-default-d128-tied"])
def test_bfloat16(name, tmp_path):
    """Saved in bf16: exact as fp32; with dtype None the weights stay bf16, bit for bit, and the logits are close."""
    build_hf(*CASES[name], 0, TWO_LAYERS).bfloat16().save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    tokens = list(range(30))
    as_fp32 = load_checkpoint(tmp_path)
    assert as_fp32.args.dtype == "bfloat16"
    assert {p.dtype for p in as_fp32.parameters()} == {torch.float32}
    expected = hf_forward(auto.from_pretrained(tmp_path, dtype=torch.float32), tokens)
    assert (forward(as_fp32, tokens) - expected).abs().max() < TOL
    model = load_checkpoint(tmp_path, dtype=None)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(p.float(), q) for p, q in zip(model.parameters(), as_fp32.parameters(), strict=True))
    theirs = hf_forward(auto.from_pretrained(tmp_path, dtype=torch.bfloat16), tokens)
    ours = forward(model, tokens)
    assert ours.dtype == torch.bfloat16
    # two bf16 computations: ours must be about as near to the exact logits as theirs
    assert (ours - expected).abs().mean() < 1.5 * (theirs - expected).abs().mean()
