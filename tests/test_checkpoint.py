"""Reading checkpoint folders: what is broken or unsupported is one InputError that names it, never a wrong model."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.rope import RopeArgs
from loading.checkpoint import load_checkpoint, random_transformer, save_checkpoint_tensors, tensors_of
from loading.config import args_from_hf
from loading.named import NAMED, named_args
from model import Transformer
from runtime.errors import InputError
from weights import WeightFormat

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-5,
    rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False, torch_dtype="float32",
)  # fmt: skip
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 538090408\n"
EMBED, K_PROJ = "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"
PARAMETERS = {  # as published; tied weights once
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400, "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552, "mistral-nemo-12b": 12_247_782_400, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704, "mistral-small-24b": 23_572_403_200, "ministral-3-8b": 8_489_553_920,
    "smollm3-3b": 3_075_098_624, "phi-4-mini": 3_836_021_760, "gemma-3-270m": 268_098_176,
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint that loads."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = random_transformer(args_from_hf(CONFIG), "cpu", torch.float32)
    save_file(save_checkpoint_tensors(weights, torch.float32), folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(good, tmp_path):
    """A copy of it to break."""
    return shutil.copytree(good, tmp_path / "checkpoint")


def shard(folder):
    """Split model.safetensors in two, with an index -> the index, to break."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    index = {"metadata": {}, "weight_map": {}}
    for i, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({n: weights[n] for n in part}, folder / file)
        index["weight_map"].update(dict.fromkeys(part, file))
    write_index(folder, index)
    return index


def write_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def change_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


# ---- files ----


def test_good_folder_loads(folder):
    expected = load_checkpoint(folder)
    index = shard(folder)
    assert len(set(index["weight_map"].values())) == 2
    for name, p in load_checkpoint(str(folder)).named_parameters():
        assert torch.equal(p, expected.get_parameter(name))
    (folder / "model.safetensors.index.json").unlink()  # shards without an index: every *.safetensors is read
    assert torch.equal(load_checkpoint(folder).output.weight, expected.output.weight)


def test_names_without_prefix_and_buffers_of_older_versions(folder):
    """A base model has `layers.0...` where a whole one has `model.layers.0...`; buffers are no parameters."""
    expected = load_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model."): t for name, t in weights.items()}
    buffers = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias", "bias")
    weights |= {f"layers.1.self_attn.{name}": torch.ones(3) for name in buffers} | {buffers[0]: torch.ones(3)}
    save_file(weights, folder / "model.safetensors")
    got = load_checkpoint(folder)
    assert all(torch.equal(p, expected.get_parameter(name)) for name, p in got.named_parameters())
    weights.pop("lm_head.weight")  # with embeddings that are the head, there is none
    change_config(folder, tie_word_embeddings=True)
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(load_checkpoint(folder).output.weight, expected.tok_embeddings.weight)


def test_tied_weights_under_the_name_of_the_head(folder):
    """Of two names for one tensor, safetensors' save_model keeps the first in the alphabet."""
    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    want = load_checkpoint(folder).output.weight
    change_weights(folder, lambda w: w.update({"lm_head.weight": w.pop(EMBED)}))
    for weight_format in (None, WeightFormat.parse("bf16", None)):
        model = load_checkpoint(folder, weight_format=weight_format)
        assert torch.equal(
            tensors_of(model)[EMBED].read().float(), want.to(torch.bfloat16).float() if weight_format else want
        )
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    with pytest.raises(InputError, match=EMBED + " is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize("weights", [None, "bf16", "int8:channel", "int4:channel"])
def test_a_tied_head_that_is_another_matrix_is_refused(folder, weights):
    """The embedding beside it is compared as stored, since --weights may round it."""
    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, lambda w: w.update({"lm_head.weight": w[EMBED].clone()}))
    load_checkpoint(folder, weight_format=WeightFormat.parse(weights))
    change_weights(folder, lambda w: w["lm_head.weight"][-1].add_(1e-3))
    with pytest.raises(InputError, match=r"lm_head\.weight in .* is not the embedding, as tie_word_embeddings"):
        load_checkpoint(folder, weight_format=WeightFormat.parse(weights))


def test_a_config_with_a_byte_order_mark(folder):
    """As an editor on Windows leaves it."""
    want = load_checkpoint(folder).args
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    assert load_checkpoint(folder).args == want


def truncate(folder, file, keep):
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(len(data) * keep)])


def sharded(change):
    """Break a folder's index."""

    def apply(folder):
        index = shard(folder)
        change(index)
        write_index(folder, index)

    return apply


def remove_shard(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def truncate_shard(folder):
    shard(folder)
    truncate(folder, "model-00002-of-00002.safetensors", 0.5)


def shard_outside(name, where="x.safetensors"):
    """Move a shard out of the folder, to `where` beside it, and have the index name it so."""

    def apply(folder):
        index = shard(folder)
        (folder.parent / where).parent.mkdir(exist_ok=True)
        (folder / "model-00001-of-00002.safetensors").rename(folder.parent / where)
        names = {tensor: name if "00001" in file else file for tensor, file in index["weight_map"].items()}
        write_index(folder, dict(weight_map=names))

    return apply


def garbage(folder):
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)


def huge_header(folder):
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def drop_file(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def weights(change):
    return lambda folder: change_weights(folder, change)


BROKEN = {  # what is done to the folder -> what the message must name
    "no config": (drop_file("config.json"), r"config\.json is missing"),
    "config not JSON": (write("config.json", "{'a': 1,"), r"config\.json as JSON"),
    "config not UTF-8": (write("config.json", b'{"a": "\xff"}'), r"config\.json as JSON"),
    "config a list": (write("config.json", "[1]"), r"config\.json holds a JSON list"),
    "no weights": (drop_file("model.safetensors"), r"no \*\.safetensors"),
    "only a pickle": (only_pickle, r"no \*\.safetensors.*pickles .* never are.*save the model anew"),
    "an adapter alone": (adapter, r"is an adapter \(LoRA\), no model: merge it"),
    "an adapter's tensors": (
        weights(lambda w: w.update({K_PROJ.replace("weight", "lora_A.weight"): torch.ones(8, 32)})),
        r"unexpected tensor .*lora_A\.weight in .*: it is of an adapter: merge it",
    ),
    "MLX's quantization": (
        lambda f: change_config(f, quantization=dict(group_size=64, bits=4)),
        "config.json sets quantization, which is MLX's",
    ),
    "truncated": (lambda f: truncate(f, "model.safetensors", 0.7), r"cannot read .*model\.safetensors.*truncated"),
    "empty file": (write("model.safetensors", b""), r"cannot read .*model\.safetensors"),
    "garbage": (garbage, r"cannot read .*model\.safetensors"),
    "huge header": (huge_header, r"cannot read .*model\.safetensors"),
    "tensor missing": (weights(lambda w: w.pop(K_PROJ)), K_PROJ + " is missing"),
    "layer missing": (lambda f: change_config(f, num_hidden_layers=3), r"model\.layers\.2\..* is missing"),
    "unexpected tensor": (
        weights(lambda w: w.update({"a.b": torch.ones(2)})),
        r"unexpected tensor a\.b in .*: the model of config\.json has none such",
    ),
    "bias missing": (lambda f: change_config(f, attention_bias=True), r"_proj\.bias is missing"),
    "head missing": (
        weights(lambda w: w.pop("lm_head.weight")),
        r"lm_head\.weight is missing.*base model without its output head.*AutoModelForCausalLM",
    ),
    "some names without a prefix": (
        weights(lambda w: w.update({K_PROJ.removeprefix("model."): w.pop(K_PROJ)})),
        "unexpected tensor " + K_PROJ.removeprefix("model."),
    ),
    "an LFS pointer": (lambda f: (f / "model.safetensors").write_text(POINTER), r"git LFS pointer.*git lfs pull"),
    "an LFS pointer in place of the config": (write("config.json", POINTER), r"config\.json is a git LFS pointer"),
    "wrong shape": (
        weights(lambda w: w.update({K_PROJ: torch.ones(16, 31)})),
        rf"{K_PROJ} .* shape \[16, 31\], expected \[16, 32\]",
    ),
    "integer weights": (
        weights(lambda w: w.update({K_PROJ: w[K_PROJ].to(torch.int8)})),
        K_PROJ + " .* is int8: quantized weights",
    ),
    "shard truncated": (truncate_shard, r"cannot read .*model-00002-of-00002\.safetensors"),
    "shard missing": (remove_shard, r"index\.json names 'model-00002-of-00002\.safetensors"),
    "no weight_map": (sharded(lambda i: i.pop("weight_map")), r"index\.json has no weight_map"),
    "weight_map to a number": (sharded(lambda i: i["weight_map"].update({EMBED: 3})), r"index\.json"),
    "shard in the parent": (shard_outside("../x.safetensors"), r"x\.safetensors', which is not in the folder"),
    "config with a number of 5000 digits": (write("config.json", '{"a":' + "1" * 5000 + "}"), r"config\.json as JSON"),
    "a billion layers": (lambda f: change_config(f, num_hidden_layers=10**9), r"num_hidden_layers is 1000000000"),
    "a number of no int64": (lambda f: change_config(f, hidden_size=2**70), r"hidden_size is 1180591620717411303424"),
    "float8 weights": (
        weights(lambda w: w.update({K_PROJ: w[K_PROJ].to(torch.float8_e4m3fn)})),
        K_PROJ + r" .* is float8_e4m3fn: quantized weights, .* no quantization_config .* bf16 or fp16",
    ),
    "NaN in weights": (weights(lambda w: w[K_PROJ][3].fill_(torch.nan)), K_PROJ + r" in .* holds NaN or infinity"),
    "infinities that cancel": (
        weights(lambda w: w[K_PROJ][0, :2].copy_(torch.tensor([torch.inf, -torch.inf]))),
        K_PROJ + r" in .* holds NaN or infinity as float32: download it again$",
    ),
    "config of many brackets": (write("config.json", '{"a":' + "[" * 10_000), r"config\.json as JSON"),
}


def test_weights_that_a_dtype_does_not_hold(folder):
    weights(lambda w: w[K_PROJ][0, 0].fill_(1e6))(folder)
    load_checkpoint(folder)
    load_checkpoint(folder, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=K_PROJ + r" .* infinity as float16: .* try --dtype fp32"):
        load_checkpoint(folder, dtype=torch.float16)


def test_finite_weights_whose_sum_is_not(folder):
    weights(lambda w: w[K_PROJ].fill_(3e38))(folder)
    load_checkpoint(folder)


@pytest.mark.parametrize("what", BROKEN)
def test_broken_folder(what, folder):
    spoil, message = BROKEN[what]
    spoil(folder)
    with pytest.raises(InputError, match=message):
        load_checkpoint(folder)


def test_missing_folder(tmp_path):
    with pytest.raises(InputError, match="nowhere not found.*on this machine, nothing is downloaded"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(InputError, match="config.json is missing"):
        load_checkpoint(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file is no GGUF file"):
        load_checkpoint(tmp_path / "file")
    (tmp_path / "m.gguf").write_text(POINTER)
    with pytest.raises(InputError, match="m.gguf is a git LFS pointer"):
        load_checkpoint(tmp_path / "m.gguf")


# ---- config.json ----


YARN = dict(rope_type="yarn", original_max_position_embeddings=64)
UNSUPPORTED = {  # changes of the config -> what the message must name
    "attention to both sides": (dict(is_causal=False), "is_causal"),
    "attention to both sides, too": (dict(is_causal=None), "is_causal to null"),
    "layers that differ": (dict(per_layer_config={"0": {"num_key_value_heads": 1}}), "per_layer_config"),
    "no architecture": (dict(model_type=None), "None"),
    "architecture": (dict(model_type="gemma2"), "gemma2.*llama, mistral, .*qwen3, .*; engine/bridge.py"),
    "deepseek_v3": (dict(model_type="deepseek_v3"), "deepseek_v3"),
    "rope type": (dict(rope_scaling=dict(type="mrope", factor=2.0)), "'mrope'"),
    "longrope": (dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4)), "'longrope' needs a short_factor"),
    "su": (dict(rope_scaling=dict(type="su", short_factor=[1.0], long_factor=[1.0])), "a short_factor of 4 numbers"),
    "rope_scaling not a dict": (dict(rope_scaling="linear"), "rope_scaling"),
    "rope parameter": (dict(rope_scaling=dict(type="linear", factor=2.0, alpha=3.0)), "'alpha'"),
    "rope per layer type": (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "per layer type"),
    "factor missing, linear": (dict(rope_scaling=dict(type="linear")), "'linear' needs a factor"),
    "low frequencies and high ones alike": (
        dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=4.0)),
        "low_freq_factor 4 is not below its high_freq_factor 4",
    ),
    "factor text": (dict(rope_scaling=dict(type="linear", factor="8")), "factor"),
    "factor negative": (dict(rope_scaling=dict(YARN, factor=-2.0)), "factor"),
    "original length 0, no factor": (
        dict(rope_scaling=dict(type="yarn", original_max_position_embeddings=0)),
        "original_max_position_embeddings",
    ),
    "theta text": (dict(rope_theta="many"), "rope_theta"),
    "theta 0": (dict(rope_parameters=dict(rope_type="default", rope_theta=-1.0)), "rope_theta"),
    "hidden_act": (dict(hidden_act="relu"), "hidden_act = 'relu'"),
    "bidirectional": (dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    "partial rotary": (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "soft capping": (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    "logit scale": (dict(logit_scale=0.25), "logit_scale"),
    "embedding multiplier": (dict(embedding_multiplier=12.0), "embedding_multiplier"),
    "experts": (dict(num_local_experts=8), "num_local_experts"),
    "mistral layer types": (
        dict(model_type="mistral", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "layer_types",
    ),
    "unknown layer type": (
        dict(model_type="qwen3", use_sliding_window=True, sliding_window=8, layer_types=["linear_attention"] * 2),
        "layer_types",
    ),
    "window 0": (dict(model_type="mistral", sliding_window=0), "sliding_window"),
    "heads not divisible": (dict(num_attention_heads=8, num_key_value_heads=3), "num_attention_heads 8 .* 3"),
    "more kv heads than heads": (dict(num_key_value_heads=8), "num_attention_heads 4 .* 8"),
    "odd head_dim": (dict(head_dim=7), "head_dim"),
    "eps text": (dict(rms_norm_eps="tiny"), "rms_norm_eps"),
    "eos text": (dict(eos_token_id="</s>"), "eos_token_id"),
    "architecture not text": (dict(model_type=["llama"]), "llama"),
    "rope type not text": (dict(rope_scaling=dict(type=["yarn"])), "yarn"),
    "partial rotary, new key": (
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
        "partial_rotary_factor",
    ),
    "too few layer types": (
        dict(model_type="qwen2", use_sliding_window=True, sliding_window=8, layer_types=["full_attention"]),
        "layer_types",
    ),
    "hidden size smaller than heads": (dict(hidden_size=2), "head_dim"),
}
WHOLE = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
OPTIONAL = ["num_key_value_heads", "head_dim", "max_position_embeddings"]


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_config(what):
    changes, message = UNSUPPORTED[what]
    with pytest.raises(InputError, match=message):
        args_from_hf({**CONFIG, **changes})


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", [8], True], ids=repr)
@pytest.mark.parametrize("key", WHOLE + OPTIONAL)
def test_size_is_no_positive_whole_number(key, value):
    with pytest.raises(InputError, match=key):
        args_from_hf({**CONFIG, key: value})


@pytest.mark.parametrize("key", WHOLE)
def test_size_is_absent(key):
    with pytest.raises(InputError, match=key):
        args_from_hf({k: v for k, v in CONFIG.items() if k != key})
    with pytest.raises(InputError, match=key):
        args_from_hf({**CONFIG, key: None})


def test_a_family_whose_default_rotation_is_not_plain():
    absent = {k: v for k, v in CONFIG.items() if k != "rope_theta"} | dict(model_type="ministral3")
    args = args_from_hf(absent)
    assert args.rope != RopeArgs() and args_from_hf(absent | dict(rope_parameters=None)) == args


NEUTRAL = {
    "explicit defaults": dict(partial_rotary_factor=1.0, logit_scale=1.0, attn_logit_softcapping=None),
    "causal": dict(is_causal=True, per_layer_config=None),
    "rope null": dict(rope_scaling=None, rope_parameters=None),
    "rope default": dict(rope_scaling=dict(rope_type="default")),
    "llama layer types": dict(layer_types=["full_attention"] * 2),
    "swish": dict(hidden_act="swish"),
    "training keys": dict(
        attention_dropout=0.1, pretraining_tp=2, use_cache=False, initializer_range=0.3, bos_token_id=1
    ),
    "null quantization": dict(quantization_config=None),
}


@pytest.mark.parametrize("what", NEUTRAL)
def test_neutral_keys_are_accepted(what):
    args = args_from_hf({**CONFIG, **NEUTRAL[what]})
    assert args.rope == RopeArgs()
    assert args.n_kv_head == 2
    assert args.windows == ()


@pytest.mark.parametrize(
    ("eos", "ids"), [(None, ()), (2, (2,)), ([2, 5], (2, 5)), (0, (0,))], ids=["none", "one", "two", "zero"]
)
def test_eos_ids(eos, ids):
    assert args_from_hf({**CONFIG, "eos_token_id": eos}).eos_ids == ids


@pytest.mark.parametrize("name", ["float128x", "int8", "load", "torch.nothing", "nn"])
def test_unknown_dtype(name, folder):
    change_config(folder, torch_dtype=name)
    assert load_checkpoint(folder).output.weight.dtype == torch.float32  # ours, given: the config's is not used
    with pytest.raises(InputError, match=name.removeprefix("torch.")):
        load_checkpoint(folder, dtype=None)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "torch.float16"])
def test_dtype_of_the_config(name, folder):
    change_config(folder, torch_dtype=name)
    assert str(load_checkpoint(folder, dtype=None).output.weight.dtype) == f"torch.{name.removeprefix('torch.')}"


# ---- pickles ----


def test_pickle_is_not_read(folder, tmp_path, monkeypatch):
    """A pickle beside or instead of the safetensors is never opened, whatever its name."""
    ran = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return Path.touch, (ran,)

    payload = pickle.dumps(Payload())
    pickle.loads(payload)
    assert ran.exists()  # the payload works
    ran.unlink()

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was read")

    for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, refuse)
    (folder / "pytorch_model.bin").write_bytes(payload)
    load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="safetensors"):
        load_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(payload)
    with pytest.raises(InputError, match="model.safetensors"):
        load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    write_index(folder, dict(weight_map={EMBED: "pytorch_model.bin"}))
    with pytest.raises(InputError, match="pytorch_model.bin"):
        load_checkpoint(folder)
    assert not ran.exists()


# ---- named models, and writing ----


@pytest.mark.parametrize("name", NAMED)
def test_named_model_has_its_published_size(name):
    args = named_args(name)
    with torch.device("meta"):
        model = Transformer(args)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert args.rope.theta >= 1e4
    assert args.n_head % args.n_kv_head == 0


FAMILIES = {
    "llama": dict(attention_bias=True, mlp_bias=True),
    "llama-tied": dict(model_type="llama", tie_word_embeddings=True),
    "mistral": dict(sliding_window=8, head_dim=16),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(head_dim=16, attention_bias=True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_write(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    kind = family.split("-")[0]
    config = {**CONFIG, "model_type": kind, **FAMILIES[family]}
    config["architectures"] = [f"{kind.capitalize()}ForCausalLM"]
    model = random_transformer(args_from_hf(config), "cpu", torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.25) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    tensors = save_checkpoint_tensors(model, torch.float32)
    assert all(t.is_contiguous() for t in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    hf, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        expected = hf(tokens).logits
        assert expected.std() > 1
        assert (model(tokens) - expected).abs().max() < 1e-4
        assert torch.equal(load_checkpoint(tmp_path)(tokens), model(tokens))


def test_saved_tensors_are_copies():
    model = random_transformer(args_from_hf(CONFIG), "cpu", torch.float32)
    save_checkpoint_tensors(model, torch.float32)[K_PROJ].fill_(9)
    assert model.layers[1].attention.wqkv.weight.max() < 1
    assert {t.dtype for t in save_checkpoint_tensors(model, torch.bfloat16).values()} == {torch.bfloat16}
