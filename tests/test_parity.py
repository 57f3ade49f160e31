"""model.py against transformers, on random checkpoints that transformers saved: every family and every feature.

Weights are large (std 0.25), biases and norm weights are random, so that attention is peaked, positions matter and the
logits are far apart: each feature, switched off, moves them by more than 1e-2.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kernels.dense_attention
import model as model_module
from kernels.rope import rope_inv_freq
from loading.checkpoint import load_checkpoint, random_transformer
from loading.config import args_from_hf
from loading.named import named_args

transformers = pytest.importorskip("transformers")

TOL = 1e-4  # absolute, on logits whose standard deviation is above 1
VOCAB, N_NEW = 199, 48
LENGTHS = [37, 9, 1]  # of a ragged batch; the first is longer than the narrow sliding windows
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
LLAMA3 = dict(
    rope_theta=5e5,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_theta=1e4, rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
DYNAMIC = dict(rope_theta=1e4, rope_type="dynamic", factor=4.0)


def rope(base=None, **changes):
    return dict(rope_parameters=dict(base or dict(rope_theta=1e4, rope_type="default"), **changes))


CASES = {  # family, and what differs from SIZES
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
    "llama-rope-yarn": ("Llama", rope(YARN)),
    "llama-rope-yarn-mscale": ("Llama", rope(YARN, mscale=2.0, mscale_all_dim=0.5)),
    "llama-rope-yarn-attention-factor": ("Llama", rope(YARN, attention_factor=1.4, mscale=2.0, mscale_all_dim=0.5)),
    "llama-rope-yarn-no-truncate": ("Llama", dict(head_dim=64, **rope(YARN, truncate=False))),
    "llama-rope-yarn-betas": ("Llama", dict(head_dim=64, **rope(YARN, beta_fast=3.0, beta_slow=0.25))),
    "mistral-v0.1": ("Mistral", dict(sliding_window=8)),
    "mistral-v0.2": ("Mistral", dict(sliding_window=None, **rope(rope_theta=1e6))),
    "mistral-nemo": ("Mistral", dict(head_dim=32, sliding_window=None, **rope(rope_theta=1e6))),
    "mistral-window-d96-yarn": ("Mistral", dict(head_dim=96, sliding_window=30, **rope(YARN))),
    "mistral-window-wide": ("Mistral", dict(sliding_window=200, tie_word_embeddings=True)),
    "qwen2": ("Qwen2", rope(rope_theta=1e6)),
    "qwen2-tied-yarn": ("Qwen2", dict(tie_word_embeddings=True, **rope(YARN))),
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
    "qwen3-yarn": ("Qwen3", dict(head_dim=64, **rope(YARN, rope_theta=1e6))),
    "qwen3-yarn-attn-factor": ("Qwen3", dict(head_dim=64, **rope(YARN, rope_theta=1e6, attn_factor=0.8782))),
}


def build_hf(name):
    """A transformers model of a case with random weights, biases and norms included."""
    family, changes = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **json.loads(json.dumps(changes))})
    config._attn_implementation = "eager"
    hf = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    gen = torch.Generator().manual_seed(list(CASES).index(name))
    with torch.no_grad():
        for path, p in hf.named_parameters():
            if path.endswith("bias"):
                p.normal_(0, 0.5, generator=gen)
            elif p.dim() == 1:
                p.uniform_(0.5, 1.5, generator=gen)
            else:
                p.normal_(0, 0.25, generator=gen)
    return hf


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The same checkpoint in transformers and in kv-fast, and prompts of LENGTHS."""
    folder = tmp_path_factory.mktemp("hf") / request.param
    hf = build_hf(request.param)
    hf.save_pretrained(folder)
    gen = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB, (n,), generator=gen).tolist() for n in LENGTHS]
    return SimpleNamespace(name=request.param, hf=hf, folder=folder, model=load_checkpoint(folder), prompts=prompts)


def is_dynamic(hf):
    return hf.config.rope_parameters["rope_type"] == "dynamic"


@torch.inference_mode()
def hf_forward(hf, tokens):
    """Teacher-forced logits of one sequence [S] -> [S, V]. Dynamic's rotary module has a memory: take a new one."""
    hf.model.rotary_emb = type(hf.model.rotary_emb)(hf.config)
    return hf(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.inference_mode()
def hf_steps(hf, prompt, new):
    """What transformers predicts after the prompt and after each of `new`: [len(new) + 1, V].

    One causal forward gives what a token by token generation would. Not so under dynamic NTK, where cached keys keep
    the rotation of their time: there the tokens are fed one by one through transformers' own cache.
    """
    if not is_dynamic(hf):
        return hf_forward(hf, prompt + new)[len(prompt) - 1 :]
    hf.model.rotary_emb = type(hf.model.rotary_emb)(hf.config)
    cache, out = transformers.DynamicCache(), []
    for part in [prompt, *([t] for t in new)]:
        out.append(hf(torch.tensor([part]), past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.stack(out)


@torch.inference_mode()
def forward(model, tokens):
    return model(torch.tensor([tokens]))[0]


@torch.inference_mode()
def rollout(model, prompts, n_new=N_NEW, second_turn=()):
    """Greedy tokens by prefill and decode in the cache that is set up, then those of a second turn through decode.

    -> for each row, what it was fed after the prompt, and the logits of the prompt's last token and of each token fed.
    """
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.full((len(prompts), int(lengths.max())), 3)  # padded by a token that attention would notice
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    logits, fed = [model.prefill(tokens, lengths)], []
    for i in range(n_new + len(second_turn)):
        fed.append(logits[-1].argmax(-1) if i < n_new else torch.full_like(lengths, second_turn[i - n_new]))
        logits.append(model.decode(fed[-1], lengths + i))
    return torch.stack(fed, 1).tolist(), torch.stack(logits, 1)


def generate(model, prompts, n_new=N_NEW, second_turn=()):
    """`rollout` in a full cache of its own, with 5 slots to spare."""
    model.setup_cache("full", len(prompts), max(map(len, prompts)) + n_new + len(second_turn) + 5)
    return rollout(model, prompts, n_new, second_turn)


def assert_same_generation(hf, prompt, fed, logits, n_new=N_NEW):
    """Row by row: the logits agree, and each greedy token is transformers' argmax given the ones before it."""
    expected = hf_steps(hf, prompt, fed)
    assert (logits - expected).abs().max() < TOL
    assert fed[:n_new] == expected[:n_new].argmax(-1).tolist()


# ---- the numbers ----


def test_teacher_forcing(case):
    for prompt in case.prompts:
        expected = hf_forward(case.hf, prompt)
        assert expected.std() > 1
        assert (forward(case.model, prompt) - expected).abs().max() < TOL


def test_greedy_ragged_batch(case):
    fed, logits = generate(case.model, case.prompts)
    for prompt, row, row_logits in zip(case.prompts, fed, logits, strict=True):
        assert_same_generation(case.hf, prompt, row, row_logits)


def test_second_turn(case):
    prompts, turn = case.prompts[:2], [5, 17, 17, 101, 3, 198, 0, 44, 9]
    fed, logits = generate(case.model, prompts, n_new=10, second_turn=turn)
    for prompt, row, row_logits in zip(prompts, fed, logits, strict=True):
        assert row[10:] == turn
        assert_same_generation(case.hf, prompt, row, row_logits, n_new=10)


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
    assert_same_generation(case.hf, prompt, fed[0], logits[0], n_new=2)


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


def old_config(config, type_key="rope_type"):
    """A config.json of transformers 5 in the keys of version 4."""
    config = json.loads(json.dumps(config))
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {type_key: kind, **scaling}
    config["torch_dtype"] = config.pop("dtype")
    return config


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_old_rope_keys(case, type_key, tmp_path):
    new = read_config(case.folder)
    assert "rope_parameters" in new
    assert "rope_scaling" not in new
    old = old_config(new, type_key)
    theirs = type(case.hf.config)(**json.loads(json.dumps(old))).rope_parameters
    assert {k: theirs[k] for k in new["rope_parameters"]} == new["rope_parameters"]
    shutil.copy(case.folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(old))
    model = load_checkpoint(tmp_path)
    assert model.args == case.model.args
    assert torch.equal(forward(model, case.prompts[0]), forward(case.model, case.prompts[0]))


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
    config = build_hf(name).config
    old = config.to_dict()
    del old["layer_types"]
    assert args_from_hf(old).windows == args_from_hf(config.to_dict()).windows
    del old["sliding_window"]
    theirs = type(config)(**json.loads(json.dumps(old)))
    sliding = [theirs.sliding_window if t == "sliding_attention" else None for t in theirs.layer_types]
    assert list(args_from_hf(old).windows) == sliding


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_defaults_of_absent_keys(family):
    """A config that leaves out what transformers can fill in means what it means there."""
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
    if family != "Llama":  # theirs default to the sizes of one model, not to the number of heads
        sizes["num_key_value_heads"] = 2
    config = getattr(transformers, f"{family}Config")(**sizes)
    a = args_from_hf(dict(sizes, model_type=family.lower()))
    assert (a.n_kv_head, a.norm_eps) == (config.num_key_value_heads, config.rms_norm_eps)
    assert a.rope.theta == config.rope_parameters["rope_theta"]
    assert a.head_dim == getattr(config, "head_dim", None) or SIZES["hidden_size"] // 4
    assert a.window(0) == (config.sliding_window if family == "Mistral" else None)
    assert not (a.tie_embeddings or a.o_bias or a.mlp_bias)


def test_yarn_factor_from_the_lengths():
    """A null factor is the ratio of the lengths, wherever the original one is given."""
    sizes = dict(SIZES, model_type="llama")
    scaling = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    want = args_from_hf(dict(sizes, rope_parameters=YARN)).rope
    assert want.factor == SIZES["max_position_embeddings"] / YARN["original_max_position_embeddings"]
    assert args_from_hf(dict(sizes, rope_parameters=dict(YARN, factor=None))).rope == want
    config = dict(sizes, rope_parameters=dict(scaling, factor=None), original_max_position_embeddings=32)
    assert args_from_hf(config).rope == want


def test_yarn_and_llama3_take_the_original_length_from_the_config():
    """Phi style: a key of the config itself goes before the one in rope_parameters; without either, max_position."""
    sizes = dict(SIZES, model_type="llama")
    for where in (dict(original_max_position_embeddings=64), {}):
        for base in (YARN, LLAMA3):
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
    hf = build_hf(name)
    hf.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert not (tmp_path / "model.safetensors").exists()
    tokens = list(range(40))
    assert (forward(load_checkpoint(tmp_path), tokens) - hf_forward(hf, tokens)).abs().max() < TOL


@pytest.mark.parametrize("name", ["llama-mha", "mistral-nemo", "qwen2", "qwen3-default-d128-tied"])
def test_bfloat16(name, tmp_path):
    """Saved in bf16: exact as fp32; with dtype None the weights stay bf16, bit for bit, and the logits are close."""
    build_hf(name).bfloat16().save_pretrained(tmp_path)
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
