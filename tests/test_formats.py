"""Quantized checkpoints: bit for bit what the formats' own tools compute; what is damaged or unknown is one line."""

from __future__ import annotations

import contextlib
import json

import gguf
import numpy as np
import pytest
import torch
from formats_files import (
    model_tensors,
    pack_awq,
    pack_gptq,
    random_codes,
    sentencepiece_vocab,
    write_folder,
    write_gguf,
)
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file

from loading.checkpoint import load_checkpoint, random_transformer, tensors_of
from loading.config import args_from_hf
from runtime import errors
from runtime.errors import InputError
from runtime.machine import TINY
from weights import Codes, PackedLinear, gguf_config, gguf_tensors, is_gguf, open_checkpoint
from weights.codes import Layout, grouped
from weights.gguf import gguf_layouts
from weights.gguf_file import GGUFFile

CONFIG = dict(
    model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-5,
    rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False, torch_dtype="float32",
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)  # fmt: skip


def dense(t):
    return t.dequantize() if isinstance(t, Codes) else t.float()


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


# ---- Codes ----


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [8, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_scale_times_code_minus_zero(bits, group, symmetric):
    u, z, s, w = random_codes(32, 16, group, bits, symmetric)
    u, z, s = (torch.from_numpy(t.T.copy()) for t in (u.astype(np.uint8), z.astype(np.uint8), s))
    c = grouped("here", u, s, z, bits)
    assert (c.bits, c.group, c.shape, c.scale.dtype) == (bits, group, (16, 32), torch.float32)
    assert c.codes.dtype == (torch.uint8 if bits == 4 else torch.int8)
    assert (c.zero is None) == (symmetric or bits == 8) and (c.minimum is None) == (symmetric or bits == 4)
    assert (torch.equal if bits == 8 else same_bits)(c.dequantize(), w)  # a zero of 8 bits may have another sign
    assert torch.equal(c.dequantize(torch.bfloat16), w.bfloat16())
    rows = torch.tensor([3, 1])
    assert torch.equal(c.rows(rows).dequantize(), w[rows])


# ---- GGUF: models/tiny, converted ----


@pytest.fixture(scope="module")
def tiny():
    return json.loads((TINY / "config.json").read_text()), load_file(TINY / "model.safetensors")


def tiny_gguf(path, tiny, kind):
    def vocab(writer):
        sentencepiece_vocab(writer, TINY)
        writer.add_add_space_prefix(False)  # as its proto says, which the converter passes on for some models only

    return write_gguf(path, *tiny, kind, vocab)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0], ids=lambda k: k.name)
def test_tiny_as_gguf(kind, tiny, tmp_path):
    config, weights = tiny
    path = tiny_gguf(tmp_path / "tiny.gguf", tiny, kind)
    assert is_gguf(path) and not is_gguf(TINY / "model.safetensors")
    reader = open_checkpoint(path)
    args, expected = args_from_hf(reader.config), args_from_hf(config)
    expected.dtype = args.dtype  # what the file's numbers are
    assert args == expected
    seen = {}
    for name, t in reader.tensors():
        assert name not in seen
        matrix = weights[name].dim() == 2
        assert isinstance(t, Codes) == (matrix and kind in (Q.Q8_0, Q.Q4_0))
        if matrix:
            data = gguf.quants.quantize(weights[name].float().numpy(), kind)
            want = torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(weights[name].shape))
        else:
            want = weights[name].float()
        assert same_bits(dense(t), want)
        seen[name] = t
    assert seen.keys() == weights.keys()
    if kind == Q.F32:
        assert all(torch.equal(seen[name], w.float()) for name, w in weights.items())


# ---- GGUF: the container, and all types ----


@pytest.mark.parametrize("kind", [t for t in gguf.quants._type_traits if t != Q.BF16], ids=lambda k: k.name)
def test_every_type_is_dequantized_as_gguf_does(kind, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 0x3B, (64, 256 // block * size), dtype=np.uint8)  # no fp16 above 1
    w = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    w.add_tensor("token_embd.weight", data, raw_dtype=kind)
    written(w)
    ((name, t),) = gguf_tensors(tmp_path / "a.gguf")
    assert name == "model.embed_tokens.weight"
    assert same_bits(dense(t), torch.from_numpy(gguf.quants.dequantize(data, kind)))
    held, note = gguf_layouts(tmp_path / "a.gguf")
    if isinstance(t, Codes):
        assert held == {name: t.layout} and note is None
        layer = PackedLinear(256, 64, False, t.layout)
        layer.put(0, t)
        assert same_bits(layer.dense(0, 64), dense(t))
        nbytes = sum(b.nbytes for b in layer.buffers())
        bits = 8 * size / block  # Q2_K, Q3_K and IQ4 are held in more, so that they are exact
        assert nbytes <= data.nbytes * (
            1.03 if kind.name in ("Q4_0", "Q4_1", "Q4_K", "Q8_0") else 1.6 if bits >= 5 else 2
        )
    else:
        assert not held and (note is None or f"of {kind.name}," in note)


def written(w):
    """Ends a GGUF of one's own tensors, with the least metadata."""
    for key in ("embedding_length", "block_count", "context_length", "feed_forward_length", "attention.head_count"):
        w.add_uint32(f"{w.arch}.{key}", 4)
    w.add_layer_norm_rms_eps(1e-5)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def test_container_is_read_as_gguf_does(tmp_path):
    keys = dict(a=True, b=-1.5, c="ü", d=[1, 2, 3], e=["x", ""], f=[0.5, 2.0], g=[True, False])
    path = write_gguf(
        tmp_path / "a.gguf", CONFIG, model_tensors(CONFIG), vocab=lambda w: w.add_custom_alignment(64), **keys
    )
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert fields.keys() == ours.metadata.keys() and len(fields) > 20
    for key, value in fields.items():
        mine = ours.metadata[key]
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == value
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for t in theirs.tensors:
        assert ours.raw(t.name).tobytes() == t.data.tobytes()
        assert ours.tensors[t.name].shape == tuple(t.shape[::-1].tolist())


# ---- GGUF: architectures, rope ----

FAMILIES = {
    "llama": dict(),
    "llama-3.1": dict(rope_scaling=LLAMA3, rope_theta=5e5),
    "llama-3.2": dict(rope_scaling=LLAMA3 | dict(factor=32.0), rope_theta=5e5, tie_word_embeddings=True),
    "llama-biases": dict(attention_bias=True, mlp_bias=True),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, rms_norm_eps=1e-6),
    "qwen3": dict(model_type="qwen3", rope_theta=1e6),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    config = CONFIG | FAMILIES[family]
    tensors = model_tensors(config)
    path = write_gguf(tmp_path / "a.gguf", config, tensors)
    assert args_from_hf(gguf_config(path)) == args_from_hf(config)
    read = dict(gguf_tensors(path))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], t) for name, t in tensors.items())


SCALINGS = {
    "none": (dict(ARCH__rope__scaling__type="none"), None),
    "linear": (
        dict(ARCH__rope__scaling__type="linear", ARCH__rope__scaling__factor=4.0),
        dict(rope_type="linear", factor=4.0),
    ),
    "linear, not named": (dict(ARCH__rope__scaling__factor=4.0), dict(rope_type="linear", factor=4.0)),
    "linear, of older files": (dict(ARCH__rope__scale_linear=4.0), dict(rope_type="linear", factor=4.0)),
    "yarn": (
        dict(ARCH__rope__scaling__type="yarn", ARCH__rope__scaling__factor=4.0,
             ARCH__rope__scaling__original_context_length=64),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling(kind, tmp_path):
    keys, expected = SCALINGS[kind]
    path = write_gguf(tmp_path / "a.gguf", CONFIG, model_tensors(CONFIG), **keys)
    assert gguf_config(path)["rope_scaling"] == expected


def test_rotation_by_layer(tmp_path):
    """Gemma 3 without a window, as Rnj-1, rotates all layers alike; OLMo 3 may have a second theta."""
    path = write_gguf(tmp_path / "a.gguf", CONFIG | dict(model_type="gemma3", rope_theta=1e6), model_tensors(CONFIG))
    assert {rope.theta for rope in args_from_hf(gguf_config(path)).layer_ropes} == {1e6}
    keys = dict(ARCH__attention__sliding_window=8, ARCH__rope__freq_base_swa=500.0)
    config = CONFIG | dict(model_type="olmo2", num_hidden_layers=4)
    path = write_gguf(tmp_path / "b.gguf", config, model_tensors(CONFIG), **keys)
    assert [rope.theta for rope in args_from_hf(gguf_config(path)).layer_ropes] == [500.0] * 3 + [1e4]


# ---- GGUF: refused ----

REFUSED = {
    "architecture": (dict(general__type="model"), dict(model_type="gemma2"), "gemma2.*llama, qwen2, qwen3"),
    "adapter": (dict(general__type="adapter"), {}, "adapter"),
    "split": (dict(split__count=3), {}, "--merge"),
    "experts": (dict(ARCH__expert_count=8), {}, "expert_used_count"),
    "routing": (dict(ARCH__expert_count=8, ARCH__expert_gating_func=2), {}, "expert_gating_func = 2"),
    "soft capping": (dict(ARCH__attn_logit_softcapping=50.0), {}, "attn_logit_softcapping"),
    "window": (dict(ARCH__attention__sliding_window=8), {}, "sliding_window = 8"),
    "llama3 of its own": ({}, dict(rope_scaling=LLAMA3 | dict(high_freq_factor=3.0), rope_theta=5e5), "rope_freqs"),
    "alignment": (dict(general__alignment=True), {}, "alignment"),
    "partial rotary": (dict(ARCH__rope__dimension_count=8), dict(model_type="qwen2"), "rope.dimension_count = 8"),
    "longrope": (dict(ARCH__rope__scaling__type="longrope"), {}, "longrope"),
    "second theta": (dict(ARCH__rope__freq_base_swa=500.0), {}, "freq_base_swa = 500.0 beside"),
    "no rotation": (dict(ARCH__rope__scaling__finetuned=False), dict(model_type="granite"), "finetuned = False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_gguf_refused(what, tmp_path):
    keys, changes, message = REFUSED[what]
    config = CONFIG | changes
    tensors = model_tensors(CONFIG)
    path = tmp_path / "a.gguf"
    with contextlib.suppress(ValueError):  # what the writer itself does not believe
        write_gguf(path, config, tensors, **{k: v for k, v in keys.items() if k != "general__alignment"})
    if what == "alignment":
        write_gguf(path, config, tensors, general__alignmenu=3)
        path.write_bytes(path.read_bytes().replace(b"alignmenu", b"alignment"))
    with pytest.raises(InputError, match=message):
        open_checkpoint(path)


def test_more_gguf_refused(tmp_path):
    tensors = model_tensors(CONFIG)
    path = write_gguf(tmp_path / "a.gguf", CONFIG, tensors, Q.Q8_0)
    data = path.read_bytes()
    for broken, message in (
        (data[:-40], "truncated, tensor"),
        (data[:200], "truncated or damaged"),
        (data[:4] + b"\0\0\0\3" + data[8:], "big-endian"),
        (data[:4] + b"\1\0\0\0" + data[8:], "version 1"),
        (data[:16] + b"\xff" * 8 + data[24:], "counts 18,446"),
        (data.replace(b"blk.1.attn_v", b"blk.1.attn_x"), "attn_x.*not supported"),
        (data.replace(b"blk.1.attn_v", b"blk.9.attn_v"), "blk.9.*2 layers"),
        (data.replace(b"blk.1.attn_v", b"blk.1.attn_k"), "twice"),
    ):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=message):
            list(open_checkpoint(path).tensors())
    at = GGUFFile(write_gguf(path, CONFIG, tensors, Q.Q8_0)).tensors["token_embd.weight"].offset
    path.write_bytes(data[:at] + b"\0\x7c" + data[at + 2 :])
    with pytest.raises(InputError, match="token_embd.weight.*infinity"):
        list(open_checkpoint(path).tensors())
    with pytest.raises(InputError, match="not found"):
        open_checkpoint(tmp_path / "nowhere.gguf")
    with pytest.raises(InputError, match="no GGUF file"):
        open_checkpoint(TINY / "model.safetensors")


# ---- GPTQ, AWQ ----

NAME = "model.layers.0.mlp.down_proj"


def gptq_settings(bits=4, group=32, sym=True, version=1, **changes):
    said = dict(quant_method="gptq", bits=bits, group_size=group, sym=sym, desc_act=False,
                checkpoint_format="gptq" if version == 1 else "gptq_v2")  # fmt: skip
    return said | changes


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits, group, sym, version, tmp_path):
    size = 128 if group == -1 else group
    codes, zeros, scales, w = random_codes(128, 24, size, bits, sym, seed=bits + size)
    module = pack_gptq(codes, zeros, scales, size, bits, version)
    plain = torch.randn(4, 4, dtype=torch.float16)
    folder = write_folder(tmp_path / "a", CONFIG, gptq_settings(bits, group, sym, version),
                          {NAME: module, "lm_head.weight": plain})  # fmt: skip
    reader = open_checkpoint(folder)
    read = dict(reader.tensors())
    assert reader.format == "gptq" and args_from_hf(reader.config).dim == 64
    assert read.keys() == {f"{NAME}.weight", "lm_head.weight"}
    assert torch.equal(read["lm_head.weight"], plain)
    t = read[f"{NAME}.weight"]
    assert torch.equal(dense(t), w) and reader.layouts() == ({f"{NAME}.weight": Layout(bits, size)}, None)
    assert (t.bits, t.group, t.zero is None, t.minimum is None) == (bits, size, sym or bits == 8, sym or bits == 4)


BIASED = {
    "llama": {},
    "qwen2": {},
    "qwen2_moe": dict(
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "seed_oss": dict(attention_bias=True, attention_out_bias=False),
    "internlm3": dict(qkv_bias=True, bias=True),
}


@pytest.mark.parametrize("kind", BIASED)
def test_gptq_writes_a_bias_for_every_module(kind, tmp_path):
    """Of zeros where the model has none: only the model tells."""
    config = CONFIG | dict(model_type=kind, intermediate_size=64, num_key_value_heads=4) | BIASED[kind]
    whole, tensors = tensors_of(random_transformer(args_from_hf(config), "cpu", torch.float32)), {}
    for name, target in whole.items():
        module, _, part = name.rpartition(".")
        if not module.endswith("_proj"):
            tensors[name] = target.read()
        elif part == "weight":
            rows, inputs = target.shape
            tensors[module] = pack_gptq(*random_codes(inputs, rows, 32, 4, False)[:3], 32, 4, 1)
            tensors[f"{module}.bias"] = torch.randn(rows) if f"{module}.bias" in whole else torch.zeros(rows)
    read = tensors_of(load_checkpoint(write_folder(tmp_path / "a", config, gptq_settings(sym=False), tensors)))
    assert all(torch.equal(t.read(), tensors[name]) for name, t in read.items() if name.endswith("_proj.bias"))
    if kind == "llama":
        tensors[f"{NAME}.bias"] += 1
        with pytest.raises(InputError, match="down_proj.bias .* has none such"):
            load_checkpoint(write_folder(tmp_path / "b", config, gptq_settings(sym=False), tensors))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_under_the_label_of_the_other_version(bits, version, tmp_path, capsys):
    """As published: with sym = true every zero is 2^(bits - 1), so that the stored number tells the version."""
    for sym in (True, False):
        codes, zeros, scales, w = random_codes(128, 24, 32, bits, sym)
        module = pack_gptq(codes, zeros, scales, 32, bits, version)
        said = gptq_settings(bits, 32, sym, 3 - version)
        folder = write_folder(tmp_path / f"{sym}{bits}{version}", CONFIG, said, {NAME: module})
        errors.warn_once.cache_clear()
        ((_, t),) = open_checkpoint(folder).tensors()
        err = capsys.readouterr().err
        assert torch.equal(dense(t), w) == sym and bool(err) == sym and err.count("\n") == sym
        if sym:  # a zero that is off is not another format
            module["qzeros"][0, 0] += 1
            folder = write_folder(tmp_path / f"off {bits}{version}", CONFIG, said, {NAME: module})
            ((_, off),) = open_checkpoint(folder).tensors()
            assert 0 < (dense(off) != w).double().mean() < 0.1
        assert (
            not sym or f"with sym = true, its zeros are those of gptq{'_v2' * (version == 2)}, and are read so" in err
        )


def test_a_head_beside_a_tied_embedding_and_packed_weights(tmp_path):
    config = CONFIG | dict(tie_word_embeddings=True, num_hidden_layers=1)
    tensors = model_tensors(config)
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    for name, n, out in (("gate", 64, 96), ("up", 64, 96), ("down", 96, 64)):
        module = pack_gptq(*random_codes(n, out, 32, 4, True)[:3], 32, 4, 1)
        del tensors[f"model.layers.0.mlp.{name}_proj.weight"]
        tensors[f"model.layers.0.mlp.{name}_proj"] = module
    folder = write_folder(tmp_path, config, gptq_settings(), tensors)
    assert isinstance(load_checkpoint(folder).layers[0].feed_forward.w2, PackedLinear)
    tensors["lm_head.weight"][3] += 1
    with pytest.raises(InputError, match="lm_head.weight in .* is not the embedding"):
        load_checkpoint(write_folder(tmp_path, config, gptq_settings(), tensors))


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("version", ["gemm", "GEMM", None])
def test_awq(group, version, tmp_path):
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    size = 128 if group == -1 else group
    codes, zeros, scales, w = random_codes(128, 24, size, 4, False, seed=size)
    module = pack_awq(codes, zeros, scales)
    said = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version=version)
    folder = write_folder(tmp_path / "a", CONFIG, said, {NAME: module})
    reader = open_checkpoint(folder)
    ((name, t),) = reader.tensors()
    assert name == f"{NAME}.weight" and (t.bits, t.group) == (4, size)
    assert reader.layouts() == ({name: Layout(4, size)}, None)
    assert same_bits(t.dequantize(), w)
    theirs = AutoAWQConverter.from_autoawq_config(said | dict(version="gemm", group_size=size)).process(
        {f"{NAME}.{k}": v.clone() for k, v in module.items()}
    )
    signed = unpack_from_int32(theirs[f"{NAME}.weight_packed"], 4, t.shape)
    assert torch.equal(t.codes, (signed + 8).to(torch.uint8))
    zero = unpack_from_int32(theirs[f"{NAME}.weight_zero_point"], 4, t.scale.shape, packed_dim=0)
    assert torch.equal(t.zero, (zero + 8).to(torch.uint8))


def test_settings_in_a_file_of_their_own(tmp_path):
    codes, zeros, scales, w = random_codes(64, 16, 32, 4, False)
    for name, said, module in (
        ("quantize_config.json", dict(bits=4, group_size=32, desc_act=False, sym=False),
         pack_gptq(codes, zeros, scales, 32, 4, 1)),
        ("quant_config.json", dict(w_bit=4, q_group_size=32, zero_point=True, version="GEMM"),
         pack_awq(codes, zeros, scales)),
    ):  # fmt: skip
        folder = write_folder(tmp_path / name[:7], CONFIG, None, {NAME: module})
        (folder / name).write_text(json.dumps(said))
        ((_, t),) = open_checkpoint(folder).tensors()
        assert same_bits(t.dequantize(), w)
    # what config.json leaves out
    settings = gptq_settings(sym=False, checkpoint_format=None)
    folder = write_folder(tmp_path / "both", CONFIG, settings, {NAME: pack_gptq(codes, zeros, scales, 32, 4, 2)})
    (folder / "quantize_config.json").write_text(json.dumps(dict(checkpoint_format="gptq_v2", bits=8)))
    ((_, t),) = open_checkpoint(folder).tensors()
    assert same_bits(t.dequantize(), w)


SETTINGS_REFUSED = {
    "method": (dict(quant_method="bitsandbytes"), "'bitsandbytes'"),
    "bits 3": (gptq_settings(bits=3), "bits = 3"),
    "act-order": (gptq_settings(desc_act=True), "desc_act = True"),
    "marlin": (gptq_settings(checkpoint_format="marlin"), "'marlin'"),
    "dynamic": (gptq_settings(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic"),
    "group": (gptq_settings(group=0), "group_size = 0"),
    "awq 8 bits": (dict(quant_method="awq", bits=8, group_size=32), "bits = 8"),
    "awq exllama": (dict(quant_method="awq", group_size=32, version="exllama"), "'exllama'"),
    "awq symmetric": (dict(quant_method="awq", group_size=32, zero_point=False), "zero_point = False"),
    "method a list": (dict(quant_method=["gptq"]), "quant_method"),
    "two labels": (gptq_settings(format="gptq_v2"), "checkpoint_format is gptq and format is gptq_v2"),
    "old marlin": (gptq_settings(is_marlin_format=True), "is_marlin_format"),
}


GPTQ_BROKEN = {
    "order": (lambda m: m.update(g_idx=m["g_idx"].flip(0)), "act-order"),
    "nan": (lambda m: m["scales"].fill_(float("nan")), "NaN"),
    "no scales": (lambda m: m.pop("scales"), "scales is missing"),
    "groups": (lambda m: m.update(scales=m["scales"][:3]), r"expected \[4, 24\]"),
    "dtype": (lambda m: m.update(qweight=m["qweight"].long()), "int64, expected int32"),
    "vector": (lambda m: m.update(qzeros=m["qzeros"].flatten()), "matrices"),
}


# ---- compressed-tensors ----

TOKENS8 = dict(num_bits=8, dynamic=True, strategy="token")
SCHEMES = {  # weights, activations, what comes of it; a group of 0: with scales in fp32 it is unpacked
    "int4 group": (dict(num_bits=4, strategy="group", group_size=32), None, (4, 32)),
    "int4 group asymmetric": (dict(num_bits=4, strategy="group", group_size=16, symmetric=False), None, (4, 16)),
    "int4 channel": (dict(num_bits=4, strategy="channel"), None, (4, None)),
    "int8 channel": (dict(num_bits=8, strategy="channel"), None, (8, None)),
    "int8 channel asymmetric": (dict(num_bits=8, strategy="channel", symmetric=False), None, (8, 0)),
    "w8a8": (dict(num_bits=8, strategy="channel"), TOKENS8, (8, None)),
    "w4a8": (dict(num_bits=4, strategy="channel"), TOKENS8, (8, None)),
    "fp8 tensor": (dict(num_bits=8, type="float", strategy="tensor"), TOKENS8 | dict(type="float"), (8, None)),
    "fp8 channel": (dict(num_bits=8, type="float", strategy="channel"), TOKENS8 | dict(type="float"), (8, None)),
    "fp8 block": (dict(num_bits=8, type="float", strategy="block", block_structure=[32, 32]), None, (8, 32)),
}


def compressed(folder, weights, activations, dtype):
    """A folder written by compressed-tensors' own compressor -> what its decompressor makes of it."""
    transformers = pytest.importorskip("transformers")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for m in model.modules():
        if hasattr(m, "weight_scale"):
            a, w = m.quantization_scheme.weights, m.weight.data.float()
            parts = w.unflatten(1, (-1, a.group_size or w.shape[1]))
            low, high = parts.amin(-1), parts.amax(-1)
            if a.strategy == "tensor":
                low, high = w.min()[None], w.max()[None]
            elif a.strategy == "block":
                parts = w.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
                low, high = parts.amin((1, 3)), parts.amax((1, 3))
            scale, zero = calculate_qparams(low, high, a)
            m.weight_scale.data.copy_(scale)
            if hasattr(m, "weight_zero_point"):
                m.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", SCHEMES)
def test_compressed_tensors(what, dtype, tmp_path):
    weights, activations, expected = SCHEMES[what]
    theirs = compressed(tmp_path, weights, activations, dtype)
    reader = open_checkpoint(tmp_path)
    assert (reader.warning is None) == (activations is None)
    assert args_from_hf(reader.config).n_layer == 2
    read = dict(reader.tensors())
    assert read.keys() == {n for n in theirs if not n.endswith(("_scale", "_zero_point", "_shape"))}
    for name, t in read.items():
        ours = t.dequantize(dtype) if isinstance(t, Codes) else t.to(dtype)
        assert torch.equal(ours, theirs[name]), name
        if "_proj" in name:
            assert isinstance(t, Codes) == (dtype != torch.float32 or expected != (8, 0))
            if isinstance(t, Codes):
                assert (t.bits, t.group) == (expected[0], expected[1] or t.shape[1])
                floats = t.codes.dtype == torch.float8_e4m3fn
                exact = t.group % 16 == 0 and (floats or torch.equal(t.scale.half().float(), t.scale))
                assert reader.layouts()[0].get(name) == (Layout(t.bits, t.group, e4m3=floats) if exact else None)


CT = dict(
    quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed",
    config_groups=dict(group_0=dict(targets=["Linear"], weights=dict(num_bits=4, strategy="group", group_size=32))),
)  # fmt: skip


def ct_weights(**changes):
    return CT | dict(config_groups=dict(group_0=dict(weights=CT["config_groups"]["group_0"]["weights"] | changes)))


CT_REFUSED = {
    "format": (CT | dict(format="nvfp4-pack-quantized"), "nvfp4"),
    "marlin": (CT | dict(format="marlin-24"), "marlin-24"),
    "sparsity": (CT | dict(sparsity_config=dict(format="sparse-24-bitmask")), "sparsity_config"),
    "rotations": (CT | dict(transform_config=dict(config_groups=dict(a=1))), "transform_config"),
    "no groups": (CT | dict(config_groups=None), "config_groups"),
    "bits 3": (ct_weights(num_bits=3), "num_bits = 3"),
    "act-order": (ct_weights(actorder="group"), "actorder"),
    "strategy": (ct_weights(strategy="tensor_group"), "tensor_group"),
    "block": (ct_weights(strategy="block", block_structure="32x32"), "block_structure"),
    "float 4": (ct_weights(type="float"), "num_bits = 4"),
}


def ct_module(out=8, n=64):
    return dict(weight_packed=torch.zeros(out, n // 8, dtype=torch.int32), weight_shape=torch.tensor([out, n]),
                weight_scale=torch.ones(out, n // 32))  # fmt: skip


CT_BROKEN = {
    "shape": (lambda m: m.update(weight_shape=torch.tensor([8, 96])), r"holds no \[8, 96\]"),
    "scales": (lambda m: m.update(weight_scale=torch.ones(8, 3)), "whole groups"),
    "order": (lambda m: m.update(weight_g_idx=torch.zeros(64, dtype=torch.int32)), "activation ordering"),
    "zeros": (lambda m: m.update(weight_zero_point=torch.zeros(8, 2, dtype=torch.int8)), "int8, expected int32"),
    "both": (lambda m: m.update(weight=torch.zeros(8, 64)), "packed too"),
    "nan": (lambda m: m["weight_scale"].fill_(float("nan")), "NaN"),
    "not quantized": (lambda m: (m.pop("weight_packed"), m.update(weight=torch.zeros(8, 64))), "float32 beside"),
    "negative": (lambda m: m.update(weight_shape=torch.tensor([-8, 64])), "weight_shape"),
}


# ---- FP8 ----

FP8 = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[16, 32],
           modules_to_not_convert=["lm_head"])  # fmt: skip


def fp8_folder(folder, config, block, scales=torch.float32, name_of_scales="weight_scale_inv", **changes):
    """A folder in FP8: each block's largest number is 448. -> the weights that it stands for."""
    tensors, stands = model_tensors(config), {}
    for name, w in list(tensors.items()):
        stands[name] = w
        if name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            continue
        rows, cols = block or w.shape
        scale = torch.empty(-(-w.shape[0] // rows), -(-w.shape[1] // cols), dtype=scales)
        codes, stands[name] = torch.empty_like(w, dtype=torch.float8_e4m3fn), torch.empty_like(w)
        for i, j in np.ndindex(*scale.shape):
            part = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
            scale[i, j] = w[part].abs().max() / 448
            codes[part] = (w[part] / scale[i, j].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            stands[name][part] = codes[part].float() * scale[i, j].float()
        tensors |= {name: codes, f"{name.rpartition('.')[0]}.{name_of_scales}": scale if block else scale[0, 0]}
    said = FP8 | dict(weight_block_size=list(block) if block else None) | changes
    return write_folder(folder, config | dict(tie_word_embeddings=False), said, tensors), stands


FP8_CASES = {
    "blocks": ((16, 32), {}),
    "scales in bf16": ((16, 32), dict(scales=torch.bfloat16)),
    "rows and inputs left over": ((48, 48), {}),
    "a tensor": (None, dict(activation_scheme="static")),
    "of AutoFP8": (None, dict(activation_scheme="static", name_of_scales="weight_scale")),
}


@pytest.mark.parametrize("what", FP8_CASES)
def test_fp8(what, tmp_path, capsys):
    """Held in 8 bits and without rounding, but for inputs that are left over."""
    block, changes = FP8_CASES[what]
    folder, stands = fp8_folder(tmp_path / "a", CONFIG, block, **changes)
    model = load_checkpoint(folder)
    note = capsys.readouterr().err
    assert "8-bit activations are asked for and not performed" in note
    assert ("held unpacked" in note) == (what == "rows and inputs left over")
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 8 and {m.packed.dtype for m in layers} == {torch.float8_e4m3fn} or "unpacked" in note
    for name, t in tensors_of(model).items():
        assert torch.equal(t.read(), stands[name]), name
    ids = torch.randint(CONFIG["vocab_size"], (1, 40))
    plain = load_checkpoint(write_folder(tmp_path / "plain", CONFIG, None, stands))
    with torch.inference_mode():
        for n in (1, 40):  # few rows and many have products of their own
            ours, want = model(ids[:, :n]), plain(ids[:, :n])
            tiles = n == 40 and torch.cpu._is_amx_tile_supported()  # a product by AMX is off by about 2^-16
            assert (ours - want).abs().max() < (1e-3 if tiles else 1e-4) * want.abs().max()


FP8_BROKEN = {
    "no scale": (lambda m: m.pop("weight_scale_inv"), "weight_scale_inv is missing"),
    "scales": (lambda m: m.update(weight_scale_inv=torch.ones(2, 2)), r"expected \[1, 2\]"),
    "nan": (lambda m: m["weight"].view(torch.uint8).fill_(127), "holds NaN"),
    "infinite": (lambda m: m["weight_scale_inv"].fill_(float("inf")), "infinity"),
    "plain": (lambda m: m.update(weight=torch.ones(16, 64)), "scales no weight in float8_e4m3fn"),
}
FP8_REFUSED = {
    "block": (FP8 | dict(weight_block_size=[16]), "weight_block_size"),
    "format": (FP8 | dict(fmt="e5m2"), "fmt = 'e5m2'"),
    "activations": (FP8 | dict(activation_scheme="group"), "activation_scheme"),
}


def broken():
    """What quantizers wrote, and a change to a module."""
    gptq = lambda: pack_gptq(*random_codes(128, 24, 32, 4, True)[:3], 32, 4, 1)  # noqa: E731
    fp8 = lambda: dict(weight=torch.ones(16, 64).to(torch.float8_e4m3fn), weight_scale_inv=torch.ones(1, 2))  # noqa: E731
    for kind, said, module, changes in (("gptq", gptq_settings(), gptq, GPTQ_BROKEN), ("ct", CT, ct_module, CT_BROKEN),
                                        ("fp8", FP8, fp8, FP8_BROKEN)):  # fmt: skip
        for what, (change, message) in changes.items():
            yield pytest.param(said, module, change, message, id=f"{kind}: {what}")


@pytest.mark.parametrize("said, module, change, message", list(broken()))
def test_a_broken_module(said, module, change, message, tmp_path):
    change(tensors := module())
    with pytest.raises(InputError, match=message):
        list(open_checkpoint(write_folder(tmp_path / "a", CONFIG, said, {NAME: tensors})).tensors())


@pytest.mark.parametrize("said, message", [*SETTINGS_REFUSED.values(), *CT_REFUSED.values(), *FP8_REFUSED.values()])
def test_settings_refused(said, message, tmp_path):
    with pytest.raises(InputError, match=message):
        open_checkpoint(write_folder(tmp_path / "a", CONFIG, said, {"a": torch.zeros(1)}))


def test_scales_of_a_cache_are_not_used(tmp_path):
    """kv_cache_scheme asks for a cache in 8 bits, with scales of its own: a method of this engine takes its place."""
    config = CT | dict(kv_cache_scheme=dict(num_bits=8, type="float"))
    tensors = {"model.layers.0.self_attn.k_scale": torch.ones(1), "a": torch.ones(1)}
    reader = open_checkpoint(write_folder(tmp_path / "a", CONFIG, config, tensors))
    assert "kv_cache_scheme is ignored" in reader.warning and [*dict(reader.tensors())] == ["a"]


# ---- folders ----


def test_plain_folder_and_shards(tmp_path):
    config, tensors = CONFIG | dict(tie_word_embeddings=True), model_tensors(CONFIG)
    reader = open_checkpoint(write_folder(tmp_path / "a", config, None, tensors))
    assert reader.format == "dense" and reader.warning is None
    assert all(torch.equal(t, tensors[name]) for name, t in reader.tensors())
    codes, zeros, scales, w = random_codes(64, 16, 32, 4, False)
    folder = write_folder(tmp_path / "b", CONFIG, gptq_settings(), {})
    (folder / "model.safetensors").unlink()
    module = {f"{NAME}.{k}": v for k, v in pack_gptq(codes, zeros, scales, 32, 4, 1).items()}
    for i, (name, t) in enumerate(module.items()):  # a module over several files
        save_file({name: t}, folder / f"{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(dict(weight_map={name: f"{i}.safetensors" for i, name in enumerate(module)}))
    )
    ((_, t),) = open_checkpoint(folder).tensors()
    assert same_bits(t.dequantize(), w)
    (folder / "2.safetensors").unlink()
    with pytest.raises(InputError, match="2.safetensors"):
        list(open_checkpoint(folder).tensors())


def test_a_file_beside_an_index_left_over(tmp_path):
    """As transformers: `save_pretrained` of one file leaves an earlier index there."""
    folder = write_folder(tmp_path / "a", CONFIG, None, model_tensors(CONFIG))
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map={"x": "old.safetensors"})))
    assert len(dict(open_checkpoint(folder).tensors())) == len(model_tensors(CONFIG))
    save_file({"x": torch.zeros(2)}, folder / "old.safetensors")
    assert "x" not in dict(open_checkpoint(folder).tensors())


def test_a_folder_of_one_gguf(tmp_path):
    write_gguf(tmp_path / "a.gguf", CONFIG, model_tensors(CONFIG))
    assert open_checkpoint(tmp_path).format == "gguf"
    write_gguf(tmp_path / "b.gguf", CONFIG, model_tensors(CONFIG))
    with pytest.raises(InputError, match="2 GGUF files"):
        open_checkpoint(tmp_path)
