"""A GGUF file's metadata -> the dictionary of a config.json, which checkpoint.args_from_hf reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kernels.rope import RopeArgs, rope_inv_freq
from runtime.errors import short
from weights.gguf_file import GGUFFile, rows_of

ARCHITECTURES = {  # llama.cpp's -> transformers' class and model_type
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "mistral3": ("Ministral3ForCausalLM", "ministral3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "granite": ("GraniteForCausalLM", "granite"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
SCALARS = {  # keys of an architecture -> config.json's; 0 is as none
    "granite": {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
                "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"},
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping"},
}  # fmt: skip
# other keys that an architecture reads below
READS = {
    "mistral3": ("attention.temperature_scale", "attention.temperature_length", "rope.scaling.yarn_log_multiplier"),
    "olmo2": ("attention.sliding_window_pattern",),
    "gemma3": ("attention.sliding_window_pattern",),
    "phi3": ("rope.scaling.attn_factor",),
}
PATTERNS = {"olmo2": 4, "gemma3": 6}  # every n-th layer attends to everything, where no pattern is given
# Unsupported keys that change the output, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0, 1.0),
    "attention.temperature_length": (0,),
    "attention.sliding_window_pattern": (),
    "rope.dimension_sections": (),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (-1.0, 1.0),
}
NORMAL = 1  # the token type of normal text
# llama.cpp's end-of-generation tokens by name: those of turns and of fill-in-the-middle.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
             "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
             "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[")  # fmt: skip
FILL_IN_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
LLAMA3 = (1.0, 4.0, 8192)  # low_freq_factor, high_freq_factor, original context of all published models


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The metadata as a config.json. An InputError names what is not supported; args_from_hf checks sizes."""
    arch = file.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise file.error(f"unsupported architecture {short(arch)}: supported are {', '.join(ARCHITECTURES)}")
    if (file_type := file.text("general.type", "model")) != "model":
        raise file.error(f"is a {short(file_type)}, expected a model")
    if file.number("split.count", 0) > 1:
        raise file.error("is one part of several: join them with llama-gguf-split --merge")
    own = {*SCALARS.get(arch, ()), *READS.get(arch, ())}
    for key, neutral in NEUTRAL.items():
        value = None if key in own else file.metadata.get(f"{arch}.{key}")
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise file.error(f"sets {arch}.{key} = {short(value)}, which is not supported and changes the output")
    dim, n_head = file.number(f"{arch}.embedding_length"), _heads(file, f"{arch}.attention.head_count")
    context, n_layer = file.number(f"{arch}.context_length"), file.number(f"{arch}.block_count")
    if not 0 < dim < 1 << 20 or not 0 < n_head <= dim:
        raise file.error(f"has embedding_length {dim} and {n_head} heads: download it again")
    head_dim = file.number(f"{arch}.attention.key_length", dim // n_head)
    rotated = file.number(f"{arch}.rope.dimension_count", head_dim)
    for key, other in (("attention.value_length", file.number(f"{arch}.attention.value_length", head_dim)),
                       ("rope.dimension_count", head_dim if arch == "phi3" else rotated)):  # fmt: skip
        if other != head_dim:
            raise file.error(f"sets {arch}.{key} = {other} beside a head_dim of {head_dim}, which is not supported")
    window = file.number(f"{arch}.attention.sliding_window", 0)
    if 0 < window < context and arch not in (*PATTERNS, "phi3"):
        raise file.error(f"sets {arch}.attention.sliding_window = {window}, which is not supported")
    config = {
        "architectures": [ARCHITECTURES[arch][0]],
        "model_type": ARCHITECTURES[arch][1],
        "hidden_size": dim,
        "num_hidden_layers": n_layer,
        "num_attention_heads": n_head,
        "num_key_value_heads": _heads(file, f"{arch}.attention.head_count_kv", n_head),
        "head_dim": head_dim,
        "intermediate_size": _heads(file, f"{arch}.feed_forward_length"),
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": context,
        "rms_norm_eps": _real(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _real(file, f"{arch}.rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(f"blk.0.attn_{x}.bias" in file.tensors for x in ("q", "output")),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": _dtype(file),
    }
    if file.number(f"{arch}.expert_count", 0) > 1:
        config |= _experts(file, arch)
    for key, name in SCALARS.get(arch, {}).items():
        if value := _real(file, f"{arch}.{key}", 0.0):
            config[name] = value
    config["sliding_window"] = window if arch in (*PATTERNS, "phi3") and window else None
    if arch in PATTERNS and window:
        config["layer_types"] = _layer_types(file, arch, n_layer)
        config["model_type"] = "olmo3" if arch == "olmo2" else config["model_type"]
    match arch:
        case "granite":
            config.setdefault("attention_multiplier", head_dim**-0.5)
            if file.metadata.get(f"{arch}.rope.scaling.finetuned") is False:  # as llama.cpp reads it, there alone
                raise file.error(f"sets {arch}.rope.scaling.finetuned = False: layers that do not rotate are not "
                                 "supported")  # fmt: skip
        case "gemma3":  # llama.cpp knows Gemma 3 27B by its layers
            config["query_pre_attn_scalar"] = dim // n_head if n_layer == 62 else head_dim
            config["rope_local_base_freq"] = _real(file, f"{arch}.rope.freq_base_swa", 10_000.0)
            config.setdefault("layer_types", ["full_attention"] * n_layer)  # without a window
        case "phi3":
            config["partial_rotary_factor"] = rotated / head_dim
            key = f"{arch}.rope.scaling.original_context_length"
            config["original_max_position_embeddings"] = file.number(key, context)
    config["rope_scaling"], theta = _rope_scaling(file, arch, config), config["rope_theta"]
    if arch != "gemma3" and (local := _real(file, f"{arch}.rope.freq_base_swa", theta)) != theta:
        if config["model_type"] != "olmo3":
            raise file.error(f"sets {arch}.rope.freq_base_swa = {local} beside a freq_base of {theta}, not supported")
        full = (config.pop("rope_scaling") or {}) | dict(rope_theta=theta)
        config["rope_parameters"] = dict(full_attention=full, sliding_attention=dict(rope_theta=local))
    if (key := "tokenizer.ggml.bos_token_id") in file.metadata:
        config["bos_token_id"] = file.number(key)
    if ids := stop_ids(file):
        config["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return config


def _experts(file: GGUFFile, arch: str) -> dict[str, Any]:
    """The keys of a mixture of experts. Whether the weights of a token's experts sum to 1 goes by the architecture."""
    if arch not in ("llama", "qwen2moe", "qwen3moe"):
        raise file.error(f"sets {arch}.expert_count, which is supported for llama, qwen2moe and qwen3moe alone")
    config = dict(num_local_experts=file.number(f"{arch}.expert_count"),
                  num_experts_per_tok=file.number(f"{arch}.expert_used_count"),
                  norm_topk_prob=arch != "qwen2moe")  # fmt: skip
    if arch == "llama":
        config |= dict(architectures=["MixtralForCausalLM"], model_type="mixtral")
    keys = dict(moe_intermediate_size="expert_feed_forward_length",
                shared_expert_intermediate_size="expert_shared_feed_forward_length")  # fmt: skip
    found = {ours: file.number(key) for ours, k in keys.items() if (key := f"{arch}.{k}") in file.metadata}
    for ours, rows in (("moe_intermediate_size", "gate_exps"), ("shared_expert_intermediate_size", "gate_shexp")):
        if ours not in found and (t := file.tensors.get(f"blk.0.ffn_{rows}.weight")):  # older files: the tensor's rows
            found[ours] = t.shape[-2]
    return config | found


def stop_ids(file: GGUFFile) -> list[int]:
    """Ids that end an answer in llama.cpp: by key those that end a text, a turn or a message; by name those that end a
    turn; by key or name those that pad or separate files for fill-in-the-middle. The first is eos."""
    tokens: Any = file.metadata.get("tokenizer.ggml.tokens")
    ids = {token: id for id, token in enumerate(tokens)} if isinstance(tokens, list) else {}
    default = {"eos": 2} if file.text("tokenizer.ggml.model", "") == "llama" and len(ids) > 2 else {}
    found = [file.number(f"tokenizer.ggml.{key}_token_id", default.get(key, -1)) for key in ("eos", "eot", "eom")]
    for key, names in FILL_IN_ENDS.items():
        named = next((ids[name] for name in names if name in ids), -1)
        found.append(file.number(f"tokenizer.ggml.{key}_token_id", named))
    ends = {name for name in TURN_ENDS if name in ids}
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|flush|>", "<|calls|>"} <= ids.keys():  # <|end|> ends a part
        ends -= {"<|end|>"}
    types = file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, np.ndarray) and ids.get("</s>", len(types)) < len(types) and types[ids["</s>"]] == NORMAL:
        ends -= {"</s>"}  # Qwen2's is HTML's: text, though llama.cpp ends there
    return [id for id in dict.fromkeys([*found, *sorted(ids[name] for name in ends)]) if id != -1]


def _heads(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A number that the file may give per layer; it must be the same in all layers."""
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) and (value == value[0]).all():
        return int(value[0])
    return file.number(key, default)


def _real(file: GGUFFile, key: str, default: float | None = None) -> float:
    """The shortest decimal for an fp32 number, such as 1e-05, as it was before it was stored in 32 bits."""
    value = file.number(key, default, whole=False)
    return float(str(np.float32(value))) if abs(value) < 1e30 else value


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise file.error("has no token_embd.weight: it holds no model, or a part of one")
    rows = rows_of(file.tensors["token_embd.weight"])
    if "tokenizer.ggml.tokens" in file.metadata and (n := len(file.texts("tokenizer.ggml.tokens"))) != rows:
        raise file.error(f"has {n} tokens and embeddings of {rows}: convert it again")
    return rows


def _dtype(file: GGUFFile) -> str:
    """The compute dtype: the type of the matrices if they are floats, else bfloat16."""
    types = {t.type for t in file.tensors.values() if len(t.shape) == 2}
    return {frozenset({0}): "float32", frozenset({1}): "float16"}.get(frozenset(types), "bfloat16")


def _rope_scaling(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """Hugging Face's rope_scaling: linear and yarn from metadata, llama3 from the tensor of its divisors."""
    scaling = file.text(f"{arch}.rope.scaling.type", "linear")  # older files give a factor alone
    factor = _real(file, f"{arch}.rope.scaling.factor", _real(file, f"{arch}.rope.scale_linear", 0.0))
    scaled = scaling != "none" and factor not in (0.0, 1.0)
    if arch == "phi3" and "rope_factors_long.weight" in file.tensors:
        return _longrope(file, config)
    if scaling not in ("none", "linear", "yarn") or any(n.startswith("rope_factors") for n in file.tensors):
        raise file.error(f"rope scaling {short(scaling)} is not supported, expected none, linear, yarn or llama3's")
    if "rope_freqs.weight" in file.tensors:
        if scaled:
            raise file.error(f"has rope_freqs.weight beside rope scaling {scaling!r}, which is not supported")
        return _llama3(file, config)
    growth = {}
    if arch == "mistral3" and (beta := _real(file, f"{arch}.attention.temperature_scale", 0.0)):
        original = file.number(f"{arch}.rope.scaling.original_context_length", config["max_position_embeddings"])
        if file.number(f"{arch}.attention.temperature_length", original) not in (0, original):
            raise file.error(f"sets {arch}.attention.temperature_length to another length than that of its yarn")
        growth = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    if not scaled:
        return {"rope_type": "default"} | growth if arch == "mistral3" else None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": factor} | growth
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": factor} | growth
    if arch == "mistral3" and (multiplier := _real(file, f"{arch}.rope.scaling.yarn_log_multiplier", 0.0)):
        yarn |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if (key := f"{arch}.rope.scaling.original_context_length") in file.metadata:
        yarn["original_max_position_embeddings"] = file.number(key)
    for name in ("beta_fast", "beta_slow"):
        if (key := f"{arch}.rope.scaling.yarn_{name}") in file.metadata:
            yarn[name] = _real(file, key)
    return yarn


def _layer_types(file: GGUFFile, arch: str, n_layer: int) -> list[str]:
    """By the pattern in the file, every n-th layer or a flag for each, or by llama.cpp's own."""
    pattern: Any = file.metadata.get(f"{arch}.attention.sliding_window_pattern", PATTERNS[arch])
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(n_layer)]
    if not isinstance(pattern, list | np.ndarray) or len(pattern) < n_layer:
        raise file.error(f"sets {arch}.attention.sliding_window_pattern = {short(pattern)} for {n_layer} layers")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern[:n_layer]]


def _longrope(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Phi's divisors of frequencies, from two tensors."""
    out: dict[str, Any] = {"rope_type": "longrope"}
    for length in ("short", "long"):
        t = file.tensors.get(f"rope_factors_{length}.weight")
        if t is None or t.type != 0 or len(t.shape) != 1:
            raise file.error(f"has no rope_factors_{length}.weight in fp32 beside the other: convert it again")
        out[f"{length}_factor"] = [float(str(x)) for x in np.array(file.raw(t.name)).view(np.float32).reshape(-1)]
    given, original = _real(file, "phi3.rope.scaling.attn_factor", 0.0), config["original_max_position_embeddings"]
    longer = max(config["max_position_embeddings"] / original, 1.0)
    if given and not math.isclose(given, math.sqrt(1 + math.log(longer) / math.log(original)), rel_tol=1e-6):
        out["attention_factor"] = given
    return out


def _llama3(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """The llama3 parameters that give exactly rope_freqs.weight [D / 2], the divisors of inverse frequencies."""
    t, D = file.tensors["rope_freqs.weight"], config["head_dim"]
    if t.type != 0 or t.shape != (D // 2,) or config["rope_theta"] <= 0:
        raise file.error(f"rope_freqs.weight has shape {list(t.shape)}, expected {D // 2} numbers in fp32")
    found = torch.from_numpy(np.array(file.raw(t.name))).view(torch.float32).flatten()
    if (found == 1).all():
        return None
    low, high, original = LLAMA3
    factor = float(found.max())
    if math.isfinite(factor) and factor > 1:
        base = RopeArgs(config["rope_theta"])
        scaled = RopeArgs(base.theta, "llama3", factor, low, high, original)
        plain, _ = rope_inv_freq(base, D, original)
        divided, _ = rope_inv_freq(scaled, D, original)
        if torch.allclose(found, plain / divided, rtol=1e-5, atol=0):
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                    "original_max_position_embeddings": original}  # fmt: skip
    raise file.error(f"rope_freqs.weight is not llama3's scaling with frequency factors {low}, {high} and an original "
                     f"context of {original}, which alone is supported")  # fmt: skip
