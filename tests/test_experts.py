"""Mixtures of experts beside tests/test_zoo.py, which holds their numbers against transformers: files and formats of
weights, products with chosen experts, ranks, compiled steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from formats_files import write_gguf
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file
from test_parallel import SIZES, compare
from test_weights import BACKENDS, FORMS, by_hand, codes, quantized

import kernels.backend
import kernels.experts
from loading.checkpoint import load_checkpoint, random_transformer, save_checkpoint_tensors, tensors_of
from loading.config import args_from_hf
from model import ModelArgs
from runtime.errors import InputError
from runtime.parallel import Ranks
from scripts.bench.bench_generate import weight_bytes
from weights import Codes, Layout, PackedLinear, WeightFormat, open_checkpoint

ARGS = ModelArgs(
    dim=64, n_layer=2, n_head=4, n_kv_head=2, head_dim=32, ffn_dim=128, vocab_size=199, max_seq_len=256, n_expert=6,
    n_active=2, expert_dim=64, shared_dim=32, dense_layers=(1,),
)  # fmt: skip
CONFIG = dict(
    model_type="qwen2_moe", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, intermediate_size=128, vocab_size=199, max_position_embeddings=256, rms_norm_eps=1e-5, qkv_bias=False,
    rope_theta=1e4, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
    shared_expert_intermediate_size=32, mlp_only_layers=[1], tie_word_embeddings=False,
)  # fmt: skip
PROMPT = torch.arange(3, 43)[None]


@torch.no_grad()
def loud(args=ARGS, weight_format=None):
    """A model whose experts matter to the logits."""
    model = random_transformer(args, "cpu", torch.float32, weight_format=weight_format)
    for p in model.parameters():
        p.data *= 10.0 if p.dim() == 2 else 1.0
    return model


@torch.inference_mode()
def decoded(model, step=None, rows=3, steps=6):
    """Logits of a prompt and of steps."""
    model.setup_cache("full", rows, 64)
    lengths = torch.tensor([40, 7, 1])[:rows]
    logits = [model.prefill(PROMPT.repeat(rows, 1).clone(), lengths)]
    for i in range(steps):
        logits.append((step or model.decode)(torch.full((rows,), 5 + i), lengths + i).clone())
    return torch.stack(logits)


# ---- products ----


def product(
    seed, rows, bits, group, form, dtype, backend, monkeypatch, experts=5, out=32, n=96, most=(1e-4, 2e-2), device="cpu"
):
    """most: the error in fp32 and in bf16, of the largest number."""
    monkeypatch.setattr(kernels.backend, "BACKEND", backend)
    gen = torch.Generator().manual_seed(seed)
    x, expert = torch.randn(rows, n, generator=gen).to(dtype), torch.randint(experts, (rows,), generator=gen)
    if bits == 32:
        w = torch.randn(experts * out, n, generator=gen).to(dtype)
        got = kernels.experts.dense_experts(x.to(device), expert.to(device), w.to(device), experts)
    else:
        c = None if bits == 16 else codes(gen, experts * out, n, bits, group, form)
        layer = PackedLinear(n, experts * out, False, c.layout if c else Layout(16))
        w = torch.randn(experts * out, n, generator=gen).bfloat16()
        layer.put(0, c or w)
        w = torch.from_numpy(by_hand(c)) if c else w
        got = kernels.experts.packed_experts(x.to(device), expert.to(device), *layer.to(device).weight, bits, experts)
    want = torch.einsum("ni,noi->no", x.double(), w.double().view(experts, out, n)[expert])
    assert got.shape == (rows, out) and got.dtype == dtype
    assert (got.double().cpu() - want).abs().max() < most[dtype == torch.bfloat16] * want.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_every_row_meets_its_expert(backend, dtype, monkeypatch):
    """Experts of one row, of several and of none, in every form of the codes."""
    for rows in (1, 3, 17):
        for bits in (32, 16):
            product(rows, rows, bits, 96, "", dtype, backend, monkeypatch)
        for form in FORMS:
            product(rows, rows, 8, 32, form, dtype, backend, monkeypatch)
            product(rows, rows, 4, 48, form, dtype, backend, monkeypatch)


def test_gathered_and_grouped_agree(monkeypatch):
    """A prompt's tokens by expert, and token by token; experts that no token chose are not read."""
    model, out = loud(), []
    for few in (0, 1000):
        monkeypatch.setattr("weights.experts.FEW", few)
        with torch.inference_mode():
            out.append(model(PROMPT))
    assert (out[0] - out[1]).abs().max() < 1e-4
    experts = model.layers[0].feed_forward
    with torch.inference_mode():
        x = torch.randn(4, 64)
        want, unused = experts(x), set(range(6)) - set(experts.route(x)[1].flatten().tolist())
        for e in unused:
            experts.w13.weight.data[e * 128 : (e + 1) * 128] = float("nan")
        assert unused and torch.equal(experts(x), want)


def test_gradients_flow_through_experts():
    model = loud()
    model(PROMPT[:, :9]).sum().backward()
    router, w2 = model.layers[0].feed_forward.router, model.layers[0].feed_forward.w2
    assert all(p.grad.abs().max() > 0 for p in (router.weight, w2.weight))


# ---- formats ----


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4", "int8:channel"])
def test_packed_weights_are_those_that_they_stand_for(weights):
    """Held packed, against the same weights dequantized in fp32; the router is not rounded."""
    model = random_transformer(ARGS, "cpu", torch.float32, weight_format=WeightFormat.parse(weights))
    experts, plain = model.layers[0].feed_forward, random_transformer(ARGS, "cpu", torch.float32)
    assert isinstance(experts.w13, PackedLinear) and experts.router.weight.dtype == torch.float32
    targets = tensors_of(plain)
    for name, tensor in save_checkpoint_tensors(model, torch.float32).items():
        targets[name].put(tensor)
    want, got = decoded(plain), decoded(model)
    assert (got - want).abs().max() < 2e-3 * want.std()


def test_a_step_reads_the_weights_of_the_experts_that_it_chose():
    """A row chooses two of six; of those that are left, a second row leaves two thirds, if they choose evenly."""
    model = random_transformer(ARGS, "cpu", torch.float32, weight_format=WeightFormat.parse("int4"))
    size = model.layers[0].feed_forward.nbytes()
    assert size == 6 * 3 * 64 * 64 * 4.5 / 8
    every = weight_bytes(model, 1000)
    assert [every - weight_bytes(model, b) for b in (1, 2)] == [round(size * 2 / 3), round(size * 4 / 9)]


# ---- files ----


def test_both_layouts_of_tensors(tmp_path):
    """Tensors of one expert each, as published, and of all experts, as transformers has them in memory."""
    model = loud()
    tensors = save_checkpoint_tensors(model, torch.float32)
    fused, prefix = dict(tensors), "model.layers.0.mlp.experts"
    each = [[fused.pop(f"{prefix}.{e}.{x}_proj.weight") for x in ("gate", "up", "down")] for e in range(6)]
    fused[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(e[:2]) for e in each])
    fused[f"{prefix}.down_proj"] = torch.stack([e[2] for e in each])
    with torch.inference_mode():
        want = model(PROMPT)
        for name, given in (("published", tensors), ("fused", fused)):
            (folder := tmp_path / name).mkdir()
            (folder / "config.json").write_text(json.dumps(CONFIG))
            save_file(given, folder / "model.safetensors")
            assert torch.equal(load_checkpoint(folder)(PROMPT), want)
    fused[f"{prefix}.gate_up_proj"] = fused[f"{prefix}.gate_up_proj"][1:]
    save_file({k: v.contiguous() for k, v in fused.items()}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"gate_up_proj .*expected 768 rows"):
        load_checkpoint(folder)


@torch.inference_mode()
def test_quantized_folder(tmp_path):
    """Of experts in one tensor: each in 4 bits, as --weights packs them; the router is not rounded beyond bf16."""
    model, prefix = loud(), "model.layers.0.mlp.experts"
    tensors = save_checkpoint_tensors(model, torch.float32)
    tensors = {name: t.bfloat16() for name, t in tensors.items()}
    for x in ("gate", "up", "down"):
        each = [tensors.pop(f"{prefix}.{e}.{x}_proj.weight") for e in range(6)]
        tensors[f"{prefix}.{x}_proj"] = torch.stack(each)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    got = load_checkpoint(quantized(tmp_path / "in", tmp_path / "out", "--weights", "int4", "--head", "bf16"))
    want = load_checkpoint(tmp_path / "in", weight_format=WeightFormat.parse("int4", "bf16"))
    assert got.layers[0].feed_forward.w13.bits == 4
    assert torch.equal(got.layers[0].feed_forward.w2.packed, want.layers[0].feed_forward.w2.packed)
    assert (got(PROMPT) - want(PROMPT)).abs().max() < 1e-2 * want(PROMPT).std()


GGUF = {  # architecture, its keys, whether there is a shared expert, kinds of gate and up, and of down
    "llama": ("llama", {}, False, Q.Q8_0, Q.Q4_0),
    "qwen2moe": ("qwen2moe", dict(ARCH__expert_feed_forward_length=64), True, Q.Q4_1, Q.F32),
    "qwen3moe": ("qwen3moe", dict(ARCH__expert_feed_forward_length=64), False, Q.Q8_0, Q.BF16),
}


@pytest.mark.parametrize("what", GGUF)
def test_gguf(what, tmp_path):
    """The experts of a kind are one tensor, whose codes stay as they are; as the same weights in a folder."""
    arch, keys, has_shared, up, down = GGUF[what]
    args = replace(ARGS, dense_layers=(), shared_dim=32 if has_shared else 0, qk_norm=arch == "qwen3moe",
                   norm_topk=arch != "qwen2moe", qkv_bias=arch == "qwen2moe",
                   expert_dim=128 if arch == "llama" else 64)  # fmt: skip
    tensors = save_checkpoint_tensors(loud(args), torch.float32)
    for i in range(2):
        for x in ("gate", "up", "down"):
            name = f"model.layers.{i}.mlp.experts"
            each = [tensors.pop(f"{name}.{e}.{x}_proj.weight") for e in range(6)]
            tensors[f"{name}.{x}_proj.weight"] = torch.stack(each)
        if has_shared:
            name = f"model.layers.{i}.mlp.shared_expert_gate.weight"
            tensors[name] = tensors[name][0]
    kinds = {name: down if ".down_proj" in name else up for name in tensors if ".mlp.experts." in name}
    path = write_gguf(tmp_path / "a.gguf", CONFIG | dict(model_type=arch), tensors, kinds, ARCH__expert_count=6,
                      ARCH__expert_used_count=2, **keys)  # fmt: skip
    model = load_checkpoint(path)
    assert replace(model.args, eos_ids=(), dtype=args.dtype, norm_eps=args.norm_eps) == args
    held = model.layers[0].feed_forward
    assert held.w13.bits == {Q.Q8_0: 8, Q.Q4_1: 4}[up] and isinstance(held.w2, PackedLinear) == (down != Q.F32)
    stands = random_transformer(args, "cpu", torch.float32)
    targets = tensors_of(stands)
    for name, value in save_checkpoint_tensors(model, torch.float32).items():
        targets[name].put(value)
    read = dict(open_checkpoint(path).tensors())["model.layers.1.mlp.experts.up_proj.weight"]
    assert isinstance(read, Codes) and read.shape == (6 * args.expert_dim, 64)
    assert torch.equal(targets["model.layers.1.mlp.experts.5.up_proj.weight"].read(),
                       read.dequantize()[-args.expert_dim :])  # fmt: skip
    want, got = decoded(stands), decoded(model)
    assert (got - want).abs().max() < 2e-3 * want.std()


REFUSED = {
    "more of a token than there are": (dict(num_experts_per_tok=7), "num_experts_per_tok is 7"),
    "no whole number": (dict(num_experts_per_tok=1.5), "num_experts_per_tok"),
    "norm": (dict(norm_topk_prob="yes"), "norm_topk_prob must be true or false"),
    "layers": (dict(mlp_only_layers=["0"]), "mlp_only_layers must be a list of layers"),
    "another routing": (dict(model_type="deepseek_v3"), "deepseek_v3.*bridge"),
    "experts of a dense family": (dict(model_type="qwen3"), "num_experts = 6, which is not supported"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    changes, message = REFUSED[what]
    with pytest.raises(InputError, match=message):
        args_from_hf(CONFIG | changes)


# ---- ranks, and one graph ----


class Both(Ranks):
    """A rank of two in one process: sums are left to the test."""

    def sum(self, x):
        return x


@torch.inference_mode()
def test_ranks_hold_columns_of_every_expert(tmp_path):
    """What two ranks make of an input adds up to what one makes; int4 as well."""
    model = loud(replace(ARGS, shared_dim=64))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | dict(shared_expert_intermediate_size=64)))
    save_file(save_checkpoint_tensors(model, torch.float32), tmp_path / "model.safetensors")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    for packed in (None, "int4"):
        form = WeightFormat.parse(packed)
        want = load_checkpoint(tmp_path, weight_format=form).layers[0].feed_forward(x)
        ranks = [load_checkpoint(tmp_path, weight_format=form, ranks=Both(r, 2)) for r in (0, 1)]
        parts = [model.layers[0].feed_forward for model in ranks]
        assert [p.w2.in_features for p in parts] == [32, 32]
        assert (sum(p(x) for p in parts) - want).abs().max() < 2e-3 * want.std()


@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_step_is_one_graph(weights):
    model = loud(weight_format=WeightFormat.parse(weights))
    torch._dynamo.reset()
    step = torch.compile(model.decode, fullgraph=True, dynamic=False, backend="aot_eager")
    want, got = decoded(model), decoded(model, step)
    assert (got - want).abs().max() < 1e-4 * want.std()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [None, "int4"])
def test_two_processes_say_what_one_says(tmp_path, packed):
    """By torchrun, with a compiled step."""
    sizes = SIZES | dict(ffn_dim=128, n_expert=6, n_active=2, expert_dim=64, shared_dim=64, dense_layers=(1,))
    compare(tmp_path, 2, ["full", "sals"], random=sizes, weights=packed, tolerance=5e-3, compile="aot_eager")
