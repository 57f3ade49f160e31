"""Files for tests/test_formats.py: GGUF as llama.cpp's converter lays it out, GPTQ and AWQ packed number by number.

The loops of GPTQ and AWQ are written from the formats' descriptions; that GPTQModel 7.7, AutoGPTQ 0.7.1 and AutoAWQ
0.2.9 pack the same was checked once by hand, with methods taken from their sources: none of them is installed here.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file

PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
for ours, theirs in (("exps", "experts"), ("shexp", "shared_expert")):
    PARTS |= {f"mlp.{theirs}.{x}_proj": f"ffn_{x}_{ours}" for x in ("gate", "up", "down")}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def model_tensors(c):
    """Random tensors of a model by Hugging Face's names and shapes; c: its config."""
    dim, ffn, D = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], dim)
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    mlp = {"mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim), "mlp.down_proj": (dim, ffn)}
    matrices = {name: (n, dim) for name, n in qkv.items()} | {"self_attn.o_proj": (dim, q)} | mlp
    biased = list(qkv) if c["model_type"] == "qwen2" or c.get("attention_bias") else []
    biased += ["self_attn.o_proj"] * bool(c.get("attention_bias")) + list(mlp) * bool(c.get("mlp_bias"))
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), dim)
    if c["model_type"] == "qwen3":
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), D)
    for i in range(c["num_hidden_layers"]):
        layer = {f"{n}.weight": s for n, s in matrices.items()} | {f"{n}.weight": (d,) for n, d in norms.items()}
        layer |= {f"{n}.bias": matrices[n][:1] for n in biased}
        shapes |= {f"model.layers.{i}.{n}": s for n, s in layer.items()}
    return {name: torch.randn(s) for name, s in shapes.items()}


# ---- GGUF ----


def gguf_name(name, arch):
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{WHOLE.get(module, module)}.{kind}"
    layer, part = module.removeprefix("model.layers.").split(".", 1)
    after = part == "post_attention_layernorm" and arch in ("gemma3", "olmo2")
    return f"blk.{layer}.{'post_attention_norm' if after else PARTS[part]}.{kind}"


def permute(w, n_head):
    """convert_hf_to_gguf.py, LlamaModel: channel i and i + D/2 of a head come to lie together."""
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def sentencepiece_vocab(writer, folder):
    """As the converter's set_vocab of a Llama with tokenizer.model."""
    sp = sentencepiece.SentencePieceProcessor(str(Path(folder) / "tokenizer.model"))
    ids = range(sp.get_piece_size())
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([sp.id_to_piece(i).encode() for i in ids])
    writer.add_token_scores([sp.get_score(i) for i in ids])
    writer.add_token_types([
        kind.UNKNOWN if sp.is_unknown(i) else kind.CONTROL if sp.is_control(i) else kind.UNUSED if sp.is_unused(i)
        else kind.BYTE if sp.is_byte(i) else kind.NORMAL for i in ids
    ])  # fmt: skip
    writer.add_bos_token_id(sp.bos_id())
    writer.add_eos_token_id(sp.eos_id())
    writer.add_unk_token_id(sp.unk_id())
    writer.add_add_bos_token(True)


def write_gguf(path, config, tensors, kind=Q.F32, vocab=None, **keys):
    """Names, order and norms as of llama.cpp's converter. config: of Hugging Face; tensors: name -> fp32,
    or a block format's bytes uint8; kind: of matrices, of all or by name; vocab(writer); keys: more metadata."""
    arch = config["model_type"]
    w = gguf.GGUFWriter(path, arch)
    n_head, n_kv_head = config["num_attention_heads"], config["num_key_value_heads"]
    D = config.get("head_dim") or config["hidden_size"] // n_head
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(n_head)
    w.add_head_count_kv(n_kv_head)
    w.add_rope_freq_base(config["rope_theta"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "vocab_size" in config:
        w.add_vocab_size(config["vocab_size"])
    w.add_key_length(D)
    w.add_value_length(D)
    if arch == "llama":
        w.add_rope_dimension_count(D)
    for key, value in keys.items():
        key = key.replace("__", ".").replace("ARCH", arch)
        add = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}
        add[type(value)](key, value)
    if vocab:
        vocab(w)
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_divisors(config["rope_theta"], D, rope))
    kinds = kind if isinstance(kind, dict) else {}
    for name, t in tensors.items():
        kind = kinds.get(name, kind if not kinds else Q.F32)
        if t.dtype == torch.uint8:
            w.add_tensor(gguf_name(name, arch), t.numpy(), raw_dtype=kind)
            continue
        data = t.float().numpy()
        if arch in ("llama", "smollm3", "granite", "mistral3") and ("q_proj" in name or "k_proj" in name):
            data = permute(data, n_head if "q_proj" in name else n_kv_head)
        data = np.ascontiguousarray(data + 1 if arch == "gemma3" and "norm" in name else data)
        if data.ndim == 1 or kind == Q.F32:
            w.add_tensor(gguf_name(name, arch), data)
        else:
            w.add_tensor(gguf_name(name, arch), gguf.quants.quantize(data, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def llama3_divisors(base, D, rope):
    """As the converter's generate_extra_tensors of a Llama 3.1."""
    out = []
    for freq in 1.0 / base ** (torch.arange(0, D, 2, dtype=torch.float32) / D):
        length, old = 2 * np.pi / float(freq), rope["original_max_position_embeddings"]
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        if length < old / high:
            out.append(1.0)
        elif length > old / low:
            out.append(factor)
        else:
            smooth = (old / length - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


# ---- GPTQ, AWQ ----


def random_codes(inputs, out, group, bits, symmetric, seed=0):
    """codes [in, out], zeros [groups, out], scales fp16 [groups, out], and w [out, in] in fp32."""
    rng = np.random.default_rng(seed)
    n = inputs // group
    codes = rng.integers(0, 1 << bits, (inputs, out))
    zeros = np.full((n, out), 1 << (bits - 1)) if symmetric else rng.integers(0, 1 << bits, (n, out))
    scales = (rng.random((n, out)) * 0.01 + 0.001).astype(np.float16)
    scales[0, 0] = -scales[0, 0]
    w = np.empty((out, inputs), np.float32)
    for i in range(inputs):
        w[:, i] = scales[i // group].astype(np.float32) * (codes[i] - zeros[i // group]).astype(np.float32)
    return codes, zeros, scales, torch.from_numpy(w)


def int32(words):
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def pack_gptq(codes, zeros, scales, group, bits, version):
    """-> the four tensors of a module. Version 1 takes one from each zero, borrowing within a word as GPTQModel."""
    n = 32 // bits
    qweight = [
        [sum(int(codes[n * r + j, c]) << bits * j for j in range(n)) for c in range(codes.shape[1])]
        for r in range(len(codes) // n)
    ]
    ones = sum(1 << bits * j for j in range(n)) if version == 1 else 0
    qzeros = [
        [(sum(int(z[n * c + j]) << bits * j for j in range(n)) - ones) % (1 << 32) for c in range(len(z) // n)]
        for z in zeros
    ]
    g_idx = torch.tensor([i // group for i in range(len(codes))], dtype=torch.int32)
    return dict(qweight=int32(qweight), qzeros=int32(qzeros), scales=torch.from_numpy(scales), g_idx=g_idx)


def pack_awq(codes, zeros, scales):
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # the channel in each place of a word

    def words(rows):
        return [
            [sum(int(r[8 * c + k]) << 4 * j for j, k in enumerate(order)) for c in range(len(r) // 8)] for r in rows
        ]

    return dict(qweight=int32(words(codes)), qzeros=int32(words(zeros)), scales=torch.from_numpy(scales))


def write_folder(folder, config, quantization, tensors):
    """A checkpoint folder of tensors by name, some as modules: {"a": {"qweight": ...}}."""
    folder.mkdir(exist_ok=True)
    flat = {}
    for name, t in tensors.items():
        flat |= {f"{name}.{k}": v for k, v in t.items()} if isinstance(t, dict) else {name: t}
    save_file({k: v.contiguous() for k, v in flat.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder
