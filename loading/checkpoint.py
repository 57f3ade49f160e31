"""Hugging Face checkpoint folders: config.json -> ModelArgs, *.safetensors -> the parameters of a Transformer.

There is no conversion step: weights are memory-mapped and copied once into place, which fuses q/k/v and gate/up.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.rope import RopeArgs, half_split
from loading.allocate import empty_transformer
from model import ACTS, ModelArgs, Transformer
from runtime.errors import InputError, short
from runtime.parallel import ONE, Ranks
from weights import (
    DENSE,
    Choose,
    Codes,
    Joined,
    PackedEmbedding,
    PackedLinear,
    Reader,
    WeightFormat,
    fill_normal,
    open_checkpoint,
    pack,
)
from weights.quantization import quantize
from weights.shards import MERGE


@dataclass(frozen=True)
class Family:
    """How the models of a model_type differ from Llama's, as transformers computes them: tests/test_zoo.py."""

    absent: dict[str, Any] = field(default_factory=dict)  # values of absent keys, where they are not Llama's
    qkv_bias: bool | str = "attention_bias"  # a str names the key that decides
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    args: dict[str, Any] = field(default_factory=dict)  # fields of ModelArgs that all models of the family share
    reads: tuple[str, ...] = ()  # keys that other families must not set, or do not look at
    slides: Callable[[dict[str, Any], int], bool] | None = None  # whether a layer has the window, by default
    local_theta: str = ""  # the older key of the theta of sliding layers, where their angles are others
    aliases: dict[str, str] = field(default_factory=dict)  # other names of keys


def _every(c: dict[str, Any], i: int) -> bool:
    return True


def _from_max_window_layers(c: dict[str, Any], i: int) -> bool:
    if not isinstance(full := c["max_window_layers"], int):
        raise InputError(f"config.json: max_window_layers must be a whole number, found {short(full)}")
    return i >= full


QWEN = dict(max_position_embeddings=32768, use_sliding_window=False, sliding_window=4096, max_window_layers=28)
MISTRAL = dict(max_position_embeddings=131072, sliding_window=4096)
MINISTRAL3 = dict(
    type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0, beta_slow=1.0,
    mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip
GEMMA3 = dict(
    vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, tie_word_embeddings=True,
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, sliding_window=4096, rope_theta=1e6,
    rope_local_base_freq=1e4,
)  # fmt: skip
EXPERTS = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
           "decoder_sparse_step", "mlp_only_layers")  # fmt: skip
OLMO = dict(pre_norm=False, post_norm=True, qk_norm=True, qk_norm_all=True)
FAMILIES = {
    "llama": Family(dict(max_position_embeddings=2048), mlp_bias="mlp_bias"),
    "mistral": Family(MISTRAL, False, False, slides=_every),
    "ministral": Family(MISTRAL, False, False, slides=_every, reads=("layer_types",)),
    "ministral3": Family(
        dict(max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
             rope_parameters=MINISTRAL3),
        False, False, slides=_every, reads=("llama_4_scaling_beta",),
    ),
    "qwen2": Family(QWEN, True, False, slides=_from_max_window_layers, reads=("use_sliding_window", "layer_types")),
    "qwen3": Family(
        QWEN | dict(head_dim=128), args=dict(qk_norm=True), slides=_from_max_window_layers,
        reads=("use_sliding_window", "layer_types"),
    ),
    "smollm3": Family(
        dict(max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True, rope_theta=2e6,
             no_rope_layer_interval=4),
        mlp_bias="mlp_bias", slides=lambda c, i: not _rotates(c, i),
        reads=("no_rope_layers", "use_sliding_window", "layer_types"),
    ),
    "granite": Family(
        dict(max_position_embeddings=2048, attention_multiplier=1.0), mlp_bias="mlp_bias",
        reads=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
    "seed_oss": Family(
        dict(max_position_embeddings=524288, num_key_value_heads=8, head_dim=128, attention_bias=True),
        o_bias="attention_out_bias", mlp_bias="mlp_bias",
    ),
    "internlm3": Family(
        dict(max_position_embeddings=32768, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5),
        mlp_bias="mlp_bias", aliases=dict(qkv_bias="attention_bias", bias="mlp_bias"),
    ),
    "olmo2": Family(dict(max_position_embeddings=2048, rms_norm_eps=1e-5), args=OLMO),
    "olmo3": Family(
        dict(max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096, rope_theta=5e5), args=OLMO,
        reads=("layer_types",), slides=lambda c, i: (i + 1) % 4 != 0, local_theta="rope_theta",
    ),
    "gemma3_text": Family(
        GEMMA3, args=dict(qk_norm=True, centered_norm=True, post_norm=True),
        reads=("hidden_size", "query_pre_attn_scalar", "final_logit_softcapping", "layer_types"),
        slides=lambda c, i: (i + 1) % _number(c, "sliding_window_pattern", 6) != 0, local_theta="rope_local_base_freq",
    ),
    "phi3": Family(
        dict(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5), False, False,
        reads=("partial_rotary_factor",), slides=_every,
    ),
    "mixtral": Family(
        dict(max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6,
             num_local_experts=8, num_experts_per_tok=2), False, False, slides=_every, reads=EXPERTS[:2],
    ),
    "qwen2_moe": Family(
        QWEN | dict(num_key_value_heads=16, qkv_bias=True, num_experts_per_tok=4, num_local_experts=60,
                    moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False),
        "qkv_bias", False, aliases=dict(num_experts="num_local_experts"),
        slides=lambda c, i: not (i % 2 or _from_max_window_layers(c, i)),
        reads=("use_sliding_window", "layer_types", *EXPERTS, "shared_expert_intermediate_size"),
    ),
    "qwen3_moe": Family(
        QWEN | dict(num_key_value_heads=4, num_experts_per_tok=8, num_local_experts=128, moe_intermediate_size=768,
                    norm_topk_prob=False),
        args=dict(qk_norm=True), aliases=dict(num_experts="num_local_experts"), slides=_every,
        reads=("use_sliding_window", *EXPERTS),
    ),
}  # fmt: skip
WRAPPED = {"mistral3": "mistral", "gemma3": "gemma3_text"}  # models of images -> their model of text, by default
IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
# Keys of families that read them -> the field of ModelArgs, from the key's value and head_dim
SCALARS: dict[str, tuple[str, Callable[[float, int], float]]] = {
    "hidden_size": ("embed_scale", lambda x, D: math.sqrt(x)),  # Gemma
    "embedding_multiplier": ("embed_scale", lambda x, D: x),
    "residual_multiplier": ("residual_scale", lambda x, D: x),
    "attention_multiplier": ("query_scale", lambda x, D: x * math.sqrt(D)),
    "query_pre_attn_scalar": ("query_scale", lambda x, D: math.sqrt(D / x)),
    "logits_scaling": ("logit_scale", lambda x, D: 1 / x),
    "final_logit_softcapping": ("logit_cap", lambda x, D: x),
}
# Keys that change the output unless their family reads them, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0, 1),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logits_scaling": (1.0, 1),
    "logit_scale": (1.0, 1),
    "embedding_multiplier": (1.0, 1),
    "residual_multiplier": (1.0, 1),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "no_rope_layers": (),
    "attention_chunk_size": (),
    "is_causal": (True,),
    "kv_sharing_modes": (),
    "use_bidirectional_attention": (False,),
    "per_layer_config": ({},),
}
ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}  # fmt: skip
IGNORED = {  # parameters of a rope type that transformers does not read; `attn_factor` is vLLM's
    "yarn": {"finetuned", "attn_factor", "max_position_embeddings"},
}


def args_from_hf(c: dict[str, Any]) -> ModelArgs:
    """Read a config.json, given as a dict. Raises InputError for an unsupported key that would change the output."""
    if isinstance(c.get("text_config"), dict) and c.get("model_type") in [*WRAPPED]:
        outer = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id")
        given = {k: c[k] for k in outer if c.get(k) is not None}
        default = dict(model_type=WRAPPED[c["model_type"]])
        return args_from_hf(default | c["text_config"] | dict(tie_word_embeddings=True) | given)
    name = c.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join([*FAMILIES, *WRAPPED])
        raise InputError(f"unsupported architecture {name!r} in config.json: supported are {known}; engine/bridge.py "
                         "runs methods inside transformers' own models")  # fmt: skip
    family = FAMILIES[name]
    c = family.absent | {family.aliases.get(k, k): v for k, v in c.items()}
    for key, neutral in NEUTRAL.items():
        if key not in family.reads and c.get(key) is not None and c[key] not in neutral:
            raise InputError(
                f"config.json sets {key} = {str(c[key])[:80]}, which is not supported and changes the output"
            )
    for key in ("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "use_sliding_window"):
        if c.get(key) not in (None, True, False):
            raise InputError(f"config.json: {key} must be true or false, found {short(c[key])}")
    activation = "hidden_activation" if "hidden_activation" in family.absent else "hidden_act"
    act = "silu" if c.get(activation) in (None, "swish") else c[activation]
    if act not in [*ACTS]:
        raise InputError(f"config.json sets {activation} = {short(act)}, which is not supported: {', '.join(ACTS)} are")
    dim = _number(c, "hidden_size", most=1 << 20)
    n_layer = _number(c, "num_hidden_layers", most=1000)
    n_head = _number(c, "num_attention_heads", most=1 << 14)
    n_kv_head = _number(c, "num_key_value_heads", n_head, most=1 << 14)
    head_dim = _number(c, "head_dim", family.absent.get("head_dim", dim // n_head), most=1 << 14)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim {head_dim} is odd, rotary embeddings need pairs of channels")
    if n_head % n_kv_head:
        raise InputError(f"config.json: num_attention_heads {n_head} is no multiple of num_key_value_heads {n_kv_head}")
    max_seq_len = _number(c, "max_position_embeddings", family.absent["max_position_embeddings"])
    eos = [] if c.get("eos_token_id") is None else c["eos_token_id"]
    eos = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) for i in eos):
        raise InputError(f"config.json: eos_token_id must be one or several token numbers, found {c['eos_token_id']!r}")
    fields: dict[str, Any] = {
        f: bool(c.get(key, False) if isinstance(key := getattr(family, f), str) else key)
        for f in ("qkv_bias", "o_bias", "mlp_bias")
    }
    for key in SCALARS.keys() & set(family.reads):
        if c.get(key) is not None:
            to, of = SCALARS[key]
            fields[to] = float(of(_number(c, key, integer=False), head_dim))
    if "num_local_experts" in family.reads:
        fields |= _experts_from_hf({k: c.get(k) for k in (*family.reads, "intermediate_size")}, n_layer)
    rope, ropes = _ropes_from_hf(c, family, n_layer, max_seq_len, head_dim)
    p = c.get("rope_scaling") or c.get("rope_parameters") or {}
    grows = "llama_4_scaling_beta" in family.reads and p.get("llama_4_scaling_beta")
    return ModelArgs(
        dim=dim,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        ffn_dim=_number(c, "intermediate_size", most=1 << 24),
        vocab_size=_number(c, "vocab_size"),
        max_seq_len=max_seq_len,
        norm_eps=_number(c, "rms_norm_eps", 1e-6, integer=False),
        rope=rope,
        ropes=ropes,
        query_growth=_number(p, "llama_4_scaling_beta", integer=False) if grows else 0.0,
        tie_embeddings=bool(c.get("tie_word_embeddings")),
        act=act,
        windows=_windows_from_hf(c, family, n_layer),
        dtype=str(c.get("dtype") or c.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_ids=tuple(eos),
        **fields,
        **family.args,
    )


def read_args(checkpoint: str | Path) -> ModelArgs:
    """ModelArgs of a folder or a GGUF file, without reading its weights."""
    return args_from_hf(open_checkpoint(checkpoint).config)


def rope_args(c: dict[str, Any], max_seq_len: int, head_dim: int) -> list[RopeArgs]:
    """What the rope_parameters of any architecture, as transformers holds them, may mean; it is to be tried."""
    given, out = c.get("rope_parameters") or {}, list[RopeArgs]()
    for p in [x for x in given.values() if isinstance(x, dict)] or [given]:
        with suppress(InputError):
            found = c | dict(rope_parameters=p, rope_scaling=None)
            out.append(_rope_from_hf(found, Family(reads=("partial_rotary_factor",)), max_seq_len, head_dim))
    return out


def _number(
    c: dict[str, Any], key: str, default: float | None = None, integer: bool = True, most: float | None = None
) -> Any:
    """A positive number of the config, at most `most`. Raises InputError that names the key if it is anything else.

    most: by default the largest int32, or 1e15 for a number that need not be an integer.
    """
    value: Any = default if c.get(key) is None else c[key]
    types = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not 0 < value < math.inf:
        expected = "whole number" if integer else "number"
        raise InputError(f"config.json: {key} must be a positive {expected}, found {short(value)}")
    if value > (limit := most or (2**31 - 1 if integer else 1e15)):
        raise InputError(f"config.json: {key} is {short(value)}, no model has more than {limit:,}: correct it")
    return value


def _layer_types(c: dict[str, Any], family: Family, n_layer: int) -> list[str]:
    """full_attention or sliding_attention for each layer."""
    types, slides = c.get("layer_types"), family.slides or (lambda c, i: False)
    if types is not None and not (isinstance(types, list) and all(isinstance(t, str) for t in types)):
        raise InputError(f"config.json: layer_types must be a list of names, found {short(types)}")
    usual = ["sliding_attention" if slides(c, i) else "full_attention" for i in range(n_layer)]
    if "layer_types" not in family.reads and types and set(types) - {*usual} and c.get("sliding_window") is not None:
        raise InputError(f"config.json sets layer_types, which transformers ignores in a {c['model_type']} model: "
                         "leave them out, or set a model_type that reads them, as ministral")  # fmt: skip
    types = types if types and "layer_types" in family.reads else usual
    if len(types) != n_layer or not set(types) <= {"full_attention", "sliding_attention"}:
        raise InputError(f"config.json: layer_types must name full_attention or sliding_attention for {n_layer} layers")
    return types


def _experts_from_hf(c: dict[str, Any], n_layer: int) -> dict[str, Any]:
    """The fields of ModelArgs of a mixture of experts."""
    n = _number(c, "num_local_experts", most=1 << 14)
    active, norm = _number(c, "num_experts_per_tok", most=n), c.get("norm_topk_prob", True)
    if not isinstance(norm, bool):
        raise InputError(f"config.json: norm_topk_prob must be true or false, found {short(norm)}")
    listed, every = c.get("mlp_only_layers") or [], _number(c, "decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise InputError(f"config.json: mlp_only_layers must be a list of layers, found {short(listed)}")
    dense = tuple(i for i in range(n_layer) if i in listed or (i + 1) % every)
    width = _number(c, "moe_intermediate_size", c.get("intermediate_size"), most=1 << 24)
    fields = dict(n_expert=n, n_active=active, expert_dim=width, norm_topk=norm, dense_layers=dense)
    if c.get("shared_expert_intermediate_size"):
        fields["shared_dim"] = _number(c, "shared_expert_intermediate_size", most=1 << 24)
    return fields


def _windows_from_hf(c: dict[str, Any], family: Family, n_layer: int) -> tuple[int | None, ...]:
    """The windows of layers that slide: all of a family, or as layer_types, or a pattern of windows, says."""
    window, switched = c.get("sliding_window"), "use_sliding_window" in family.reads
    if window is None or (switched and not c.get("use_sliding_window")):
        return ()
    types = _layer_types(c, family, n_layer)
    if not family.slides:
        return ()
    if isinstance(window, list):  # Ministral 8B in Mistral's own notation: windows of the first layers, repeated
        if not window or n_layer % len(window):
            raise InputError(f"config.json: sliding_window has {len(window)} values, which do not repeat to {n_layer}")
        each = [None if w is None else _number(dict(sliding_window=w), "sliding_window") for w in window]
        return tuple(each * (n_layer // len(each)))
    window = _number(c, "sliding_window")
    return tuple(window if t == "sliding_attention" else None for t in types)


def _rotates(c: dict[str, Any], layer: int) -> bool:
    """Whether a layer of SmolLM3 has rotary embeddings."""
    every, listed = _number(c, "no_rope_layer_interval", 4), c.get("no_rope_layers")
    if listed is None:
        return (layer + 1) % every != 0
    if not isinstance(listed, list) or layer >= len(listed) or listed[layer] not in (0, 1):
        raise InputError(f"config.json: no_rope_layers must hold 0 or 1 for each layer, found {short(listed)}")
    return bool(listed[layer])


def _ropes_from_hf(
    c: dict[str, Any], family: Family, n_layer: int, max_seq_len: int, head_dim: int
) -> tuple[RopeArgs, tuple[RopeArgs, ...]]:
    """The rope of layers with full attention, and that of each layer if they differ."""

    def read(**changes: Any) -> RopeArgs:
        return _rope_from_hf(c | changes, family, max_seq_len, head_dim)

    if not family.local_theta:
        rope = read()
        if "no_rope_layers" not in family.reads:
            return rope, ()
        return rope, tuple(rope if _rotates(c, i) else RopeArgs(type="none") for i in range(n_layer))
    by_type, scaling = c.get("rope_parameters") or {}, c.get("rope_scaling")
    if (
        not isinstance(by_type, dict)
        or not all(isinstance(v, dict | None) for v in by_type.values())
        or (by_type and scaling)
    ):
        raise InputError(f"config.json: rope_parameters of a {c['model_type']} must be objects by layer type, without "
                         "rope_scaling beside them")  # fmt: skip
    full = read(rope_scaling=None, rope_parameters=by_type.get("full_attention") or scaling)
    local = read(
        rope_scaling=None, rope_parameters=by_type.get("sliding_attention"), rope_theta=c.get(family.local_theta)
    )
    types = _layer_types(c, family, n_layer)
    return full, tuple(full if t == "full_attention" else local for t in types)


def _rope_from_hf(c: dict[str, Any], family: Family, max_seq_len: int, head_dim: int) -> RopeArgs:
    """Reads both layouts: rope_theta with rope_scaling, and the newer rope_parameters (transformers v5)."""
    p = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if not isinstance(p, dict):
        raise InputError(f"config.json: rope_scaling or rope_parameters must be an object, found {p!r}")
    p = dict(p)
    if any(isinstance(v, dict) for v in p.values()):
        raise InputError("config.json: rope_parameters per layer type are not supported")
    rope_type = p.pop("rope_type", None) or p.pop("type", None) or "default"
    rope_type = "longrope" if rope_type == "su" else rope_type
    p.pop("type", None)
    theta = _number(
        {"rope_theta": p.pop("rope_theta", None) or c.get("rope_theta")}, "rope_theta", 10_000.0, integer=False
    )
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise InputError(f"unsupported rope type {rope_type!r} in config.json: supported are {', '.join(ROPE_KEYS)}")
    part = p.pop("partial_rotary_factor", None) or c.get("partial_rotary_factor") or 1.0
    if part != 1.0 and "partial_rotary_factor" not in family.reads:
        raise InputError("config.json sets partial_rotary_factor, which is not supported and changes the output")
    rotated = int(head_dim * _number(dict(partial_rotary_factor=part), "partial_rotary_factor", integer=False, most=1))
    if rotated < 2 or rotated % 2:
        raise InputError(f"config.json: partial_rotary_factor {part} turns {rotated} of {head_dim} channels, no pairs")
    for key in {"llama_4_scaling_beta"} & {*family.reads} | IGNORED.get(rope_type, set()):
        p.pop(key, None)
    known = {k: v for k, v in p.items() if k in ROPE_KEYS[rope_type] and v is not None}
    extra = {k for k, v in p.items() if v is not None} - ROPE_KEYS[rope_type]
    if rope_type != "default" and extra - {"original_max_position_embeddings"}:
        raise InputError(f"config.json: rope parameter {sorted(extra)[0]!r} is not known for rope type {rope_type!r}")
    if rope_type in ("llama3", "yarn", "longrope") and c.get("original_max_position_embeddings"):
        known["original_max_position_embeddings"] = c["original_max_position_embeddings"]
    if rope_type == "longrope":
        known.setdefault("original_max_position_embeddings", max_seq_len)
        for key in ("short_factor", "long_factor"):
            given = known.get(key)
            if not isinstance(given, list) or len(given) != rotated // 2:
                raise InputError(f"config.json: rope type {rope_type!r} needs a {key} of {rotated // 2} numbers")
            known[key] = tuple(_number({key: x}, key, integer=False) for x in given)
    for key in known.keys() - {"truncate", "short_factor", "long_factor"}:
        _number(known, key, integer=False)
    if "factor" in ROPE_KEYS[rope_type] and "factor" not in known:
        if rope_type in ("yarn", "longrope") and "original_max_position_embeddings" in known:
            known["factor"] = max_seq_len / known["original_max_position_embeddings"]
        else:
            raise InputError(f"config.json: rope type {rope_type!r} needs a factor")
    rope = RopeArgs(theta=float(theta), type=rope_type, rotated=rotated if rotated < head_dim else 0, **known)
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise InputError(f"config.json: rope's low_freq_factor {rope.low_freq_factor:g} is not below its "
                         f"high_freq_factor {rope.high_freq_factor:g}: correct them (Llama 3.1: 1 and 4)")  # fmt: skip
    return rope


def load_checkpoint(
    source: str | Path | Reader,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = torch.float32,
    weight_format: WeightFormat | None = None,
    ranks: Ranks = ONE,
) -> Transformer:
    """Load a Hugging Face folder, also one of GPTQ, AWQ, compressed-tensors or FP8, or a GGUF file (weights/).

    Weights are memory-mapped and copied once into place, which fuses q/k/v and gate/up. dtype: None keeps the
    checkpoint's. weight_format: quantize to it, one tensor at a time, so that at most one is unpacked in memory; None:
    keep the file's formats. With several ranks each loads its share. A line on stderr says which weights take more bits
    than in the file, or are rounded again. Raises InputError if a file is missing or truncated, or a tensor is missing,
    unexpected or has the wrong shape.
    """
    reader = source if isinstance(source, Reader) else open_checkpoint(source)
    path, args = reader.path, replace(args_from_hf(reader.config), ranks=ranks)
    if dtype is None:
        if args.dtype not in ("float32", "bfloat16", "float16"):
            raise InputError(f"config.json: dtype {args.dtype!r} is not float32, bfloat16 or float16: give --dtype")
        dtype = getattr(torch, args.dtype)
    notes = [reader.warning] if reader.warning else []
    if weight_format is None:
        (layouts, note), names = reader.layouts(), dict(sources(args))
        layouts = {part: layout for name, layout in layouts.items() for part, _ in fused_parts(name, args)}
        choose = (lambda name, part, n: layouts.get(f"{names[name][part][0]}.weight")) if layouts else None
        notes += [f"{path}: {note}"] if note else []
    else:
        choose = weight_format.choose if weight_format.bits != DENSE else None
    model = empty_transformer(args, device, dtype, choose)
    model.folder = path
    targets, head, embedding, again, images = tensors_of(model), None, None, 0, 0
    for name, value in chain.from_iterable(split(*named, args) for named in reader.tensors()):
        if name.startswith(IMAGES) and "text_config" in reader.config:
            images += 1
            continue
        if name == "lm_head.weight" and args.tie_embeddings:
            head = value
            continue
        if name == "model.embed_tokens.weight":
            embedding = value
        if name not in targets:
            why = f"it is of an adapter: {MERGE}" if ".lora_" in name else "the model of config.json has none such"
            raise InputError(f"unexpected tensor {name} in {path}: {why}")
        target = targets.pop(name)
        if tuple(value.shape) != target.shape:
            raise InputError(
                f"tensor {name} in {path} has shape {list(value.shape)}, expected {list(target.shape)} by config.json"
            )
        if isinstance(value, Codes) and not target.takes(value):
            again += choose is not None
            value = value.dequantize()
        target.put(value)
    if [*targets] == ["model.embed_tokens.weight"] and head is not None:  # safetensors' save_model keeps the first name
        targets.pop("model.embed_tokens.weight").put(_dense(head))
    elif head is not None and embedding is not None:  # as stored, since --weights may round
        given, tied = _dense(head), _dense(embedding)
        if not torch.equal(given.to(tied.dtype), tied):
            raise InputError(
                f"lm_head.weight in {path} is not the embedding, as tie_word_embeddings in config.json says: "
                "set it to false if the head is a matrix of its own"
            )
    if [*targets] == ["lm_head.weight"]:
        raise InputError(f"tensor lm_head.weight is missing from {path}: a base model without its output head; "
                         "save the model that generates (AutoModelForCausalLM), or set tie_word_embeddings in "
                         "config.json if the head is the embedding")  # fmt: skip
    if targets:
        raise InputError(f"tensor {next(iter(targets))} is missing from {path} ({len(targets)} missing in all)")
    if again:
        notes.append(f"{again} tensors of {path} are quantized already and --weights rounds them again: leave it out "
                     "to keep them as they are")  # fmt: skip
    if images:
        notes.append(f"{images} tensors of {path} are for images, which are passed over: the model reads text alone")
    if "attn_factor" in (reader.config.get("rope_scaling") or reader.config.get("rope_parameters") or {}):
        notes.append(f"attn_factor in {path / 'config.json'} is ignored, as by transformers; vLLM multiplies by it")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    _check_finite(model)
    return model.eval()


def _dense(value: Tensor | Codes) -> Tensor:
    return value.dequantize() if isinstance(value, Codes) else value


def _check_finite(model: Transformer) -> None:
    """Raises InputError that names a tensor with NaN or infinity. `aminmax` finds both in one fast pass over memory."""
    params = (p.data if p.is_contiguous() else p.data.t() for p in model.parameters())  # as they lie in memory
    scales = (t for m in model.modules() if isinstance(m, PackedLinear) for t in m.numbers())
    if torch.stack([x for p in chain(params, scales) for x in torch.aminmax(p)]).isfinite().all():
        return
    name, t = next((n, t) for n, target in tensors_of(model).items() if not (t := target.read()).isfinite().all())
    raise InputError(f"tensor {name} in {model.folder} holds NaN or infinity as {str(t.dtype).removeprefix('torch.')}: "
                     "download it again" + ("" if t.dtype == torch.float32 else ", or try --dtype fp32"))  # fmt: skip


@dataclass
class Target:
    """The destination of a checkpoint's tensor: a parameter, or rows of a parameter or of a packed weight."""

    shape: tuple[int, ...]
    put: Callable[[Any], Any]
    read: Callable[[], Tensor]
    takes: Callable[[Codes], bool] = lambda codes: False  # whether codes stay as they are
    row_bits: int = 0  # bits, if it is quantized with one scale per row


# ---- fused tensors, and channels in another order ----


def hf_name(name: str) -> str:
    """The name of a tensor of Mixtral as other families have it."""
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def fused_parts(name: str, a: ModelArgs) -> list[tuple[str, int]]:
    """The tensors that are joined in one, of Phi's files or of all experts, and their numbers of rows; of others the
    name alone."""
    name = hf_name(name)
    if m := re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|gate|up|down)_proj(?:\.weight)?", name):
        each = [(x, a.dim if x == "down" else a.expert_dim) for x in m[2].split("_")]
        return [(f"{m[1]}.{e}.{x}_proj.weight", rows) for e in range(a.n_expert) for x, rows in each]
    q, kv = a.n_head * a.head_dim, a.n_kv_head * a.head_dim
    for fused, parts in (("qkv", dict(q=q, k=kv, v=kv)), ("gate_up", dict(gate=a.ffn_dim, up=a.ffn_dim))):
        if f".{fused}_proj." in name:
            return [(name.replace(f"{fused}_proj", f"{part}_proj"), rows) for part, rows in parts.items()]
    return [(name, 0)]


def split(name: str, value: Tensor | Codes, a: ModelArgs) -> list[tuple[str, Tensor | Codes]]:
    """A fused tensor's parts by name."""
    names, sizes = zip(*fused_parts(name, a), strict=True)
    if len(names) == 1:
        return [(names[0], value)]
    if isinstance(value, Tensor) and value.dim() == 3:  # [experts, rows, inputs]
        value = value.flatten(0, 1)
    if value.shape[0] != sum(sizes):
        raise InputError(f"tensor {name} has shape {list(value.shape)}, expected {sum(sizes)} rows by config.json")
    parts = [slice(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]
    return [(n, value.cut(0, p) if isinstance(value, Codes) else value[p]) for n, p in zip(names, parts, strict=True)]


def in_pairs(target: Target, a: ModelArgs) -> Target:
    """A target of q or k whose heads rotate a part of their channels: rows in the order of `half_split`."""
    heads = torch.arange(target.shape[0]).view(-1, a.head_dim)
    rows = heads[:, half_split(a.head_dim, a.rope.rotated)].flatten()

    def put(value: Any) -> None:
        target.put(value.rows(rows) if isinstance(value, Codes) else value[rows])

    return replace(target, put=put, read=lambda: target.read()[rows.argsort()])


# ---- a rank's share of a tensor ----


def cut_of(name: str, a: ModelArgs) -> tuple[int, slice, int] | None:
    """How ranks share the tensor of a Hugging Face name: the dimension, this rank's slice of it, and its full size.
    None: every rank holds the full tensor."""
    r, D, (module, _, parameter) = a.ranks, a.head_dim, name.rpartition(".")
    own, g, last = r.heads(a.n_kv_head), a.n_head // a.n_kv_head, module.rpartition(".")[2]
    ffn = a.expert_dim if ".experts." in name else a.shared_dim if ".shared_expert." in name else a.ffn_dim
    match last.replace("_norm", "_proj") if a.qk_norm_all else last, parameter:
        case "q_proj", _:
            return 0, slice(own.start * g * D, own.stop * g * D), a.n_head * D
        case "k_proj" | "v_proj", _:
            return 0, slice(own.start * D, own.stop * D), a.n_kv_head * D
        case "gate_proj" | "up_proj", _:
            return 0, r.part(ffn), ffn
        case "o_proj", "weight":
            return 1, r.part(a.n_head * D), a.n_head * D
        case "down_proj", "weight":
            return 1, r.part(ffn), ffn
        case "lm_head", _ if a.local.vocab_size < a.vocab_size:
            return 0, r.part(a.vocab_size), a.vocab_size
    return None


def shared(name: str, target: Target, a: ModelArgs) -> Target:
    """A target that gets the full tensor and takes this rank's part; of a mapped file only that part is read."""
    if name.endswith((".o_proj.bias", ".down_proj.bias")):  # ranks sum their outputs, so only one adds the bias
        return replace(target, put=lambda value: target.put(value if a.ranks.rank == 0 else torch.zeros_like(value)))
    if (found := cut_of(name, a)) is None:
        return target
    dim, part, whole = found

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and target.row_bits and dim:  # a row's scale covers all ranks' parts of the row
            value = quantize(value, target.row_bits, whole)
        if isinstance(value, Codes):
            return value.cut(dim, part, name)
        return value[part] if dim == 0 else value[:, part]

    shape = tuple(whole if i == dim else n for i, n in enumerate(target.shape))
    return replace(target, shape=shape, put=lambda value: target.put(cut(value)),
                   takes=lambda codes: target.takes(cut(codes)))  # fmt: skip


def sources(a: ModelArgs) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yields each module's name in the model, with the Hugging Face modules it joins and their numbers of rows."""
    yield "tok_embeddings", [("model.embed_tokens", a.vocab_size)]
    for i in range(a.n_layer):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        heads = (("q", a.n_head), ("k", a.n_kv_head), ("v", a.n_kv_head))
        yield f"{ours}.attention.wqkv", [(f"{theirs}.self_attn.{x}_proj", n * a.head_dim) for x, n in heads]
        yield f"{ours}.attention.wo", [(f"{theirs}.self_attn.o_proj", a.dim)]
        for x, n in heads[:2] if a.qk_norm else ():
            yield (
                f"{ours}.attention.{x}_norm",
                [(f"{theirs}.self_attn.{x}_norm", a.head_dim * (n if a.qk_norm_all else 1))],
            )
        mlps = {".feed_forward": ([f"{theirs}.mlp"], a.ffn_dim)}
        if a.n_expert and i not in a.dense_layers:
            mlps[".feed_forward"] = [f"{theirs}.mlp.experts.{e}" for e in range(a.n_expert)], a.expert_dim
            yield f"{ours}.feed_forward.router", [(f"{theirs}.mlp.gate", a.n_expert)]
            if a.shared_dim:
                mlps[".feed_forward.shared"] = [f"{theirs}.mlp.shared_expert"], a.shared_dim
        for mine, (mlp, width) in mlps.items():
            yield f"{ours}{mine}.w13", [(f"{one}.{x}_proj", width) for one in mlp for x in ("gate", "up")]
            yield f"{ours}{mine}.w2", [(f"{one}.down_proj", a.dim) for one in mlp]
        if ".feed_forward.shared" in mlps:
            yield f"{ours}.feed_forward.shared_gate", [(f"{theirs}.mlp.shared_expert_gate", 1)]
        if a.pre_norm:
            yield f"{ours}.attention_norm", [(f"{theirs}.input_layernorm", a.dim)]
            before = "pre_feedforward" if a.post_norm else "post_attention"
            yield f"{ours}.ffn_norm", [(f"{theirs}.{before}_layernorm", a.dim)]
        if a.post_norm:
            yield f"{ours}.attention_post", [(f"{theirs}.post_attention_layernorm", a.dim)]
            yield f"{ours}.ffn_post", [(f"{theirs}.post_feedforward_layernorm", a.dim)]
    yield "norm", [("model.norm", a.dim)]
    yield "output", [("model.embed_tokens" if a.tie_embeddings else "lm_head", a.vocab_size)]


def _targets(parts: list[tuple[str, int]], module: Any) -> dict[str, Target]:
    """The targets of one module that joins the rows of several tensors."""
    out: dict[str, Target] = {}
    if isinstance(module, Joined):
        for one in module.parts:
            n, rows = 0, int(one.out_features)  # type: ignore[arg-type]
            while rows:
                rows -= parts[n][1]
                n += 1
            out |= _targets(parts[:n], one)
            parts = parts[n:]
        return out
    names, sizes = zip(*parts, strict=True)
    for parameter, p in module.named_parameters(recurse=False):
        for name, part in zip(names, p.data.split(sizes), strict=True):
            out[f"{name}.{parameter}"] = Target(tuple(part.shape), part.copy_, part.detach)
    if isinstance(module, PackedLinear):
        for name, n, end in zip(names, sizes, accumulate(sizes), strict=True):
            put, read = partial(module.put, end - n), partial(module.dense, end - n, n)
            row_bits = module.bits if module.bits < 16 and module.layout.group is None else 0
            out[f"{name}.weight"] = Target((n, module.in_features), put, read, module.takes, row_bits)
            if module.bias is not None:
                part = module.bias[end - n : end]
                out[f"{name}.bias"] = Target((n,), part.copy_, part.detach)
    return out


def tensors_of(model: Transformer) -> dict[str, Target]:
    """Hugging Face's tensor names -> targets in the model; fused tensors are slices. With several ranks `put` takes the
    full tensor, and `read` returns this rank's part."""
    out: dict[str, Target] = {}
    a, several = model.args, model.args.ranks.size > 1
    for name, parts in sources(replace(a.local, vocab_size=a.vocab_size) if several else a):
        module: Any = model.get_submodule(name)
        if isinstance(module, PackedEmbedding):
            module = module.matrix
        if several and name == "output":  # even with a tied head: a rank holds rows of it beside the embedding
            parts = [("lm_head", a.local.vocab_size)]
        found = _targets(parts, module)
        if a.rope.rotated:
            found |= {n: in_pairs(t, a) for n, t in found.items() if ".q_proj." in n or ".k_proj." in n}
        out |= {n: shared(n, t, a) if several else t for n, t in found.items()}
    if several and a.tie_embeddings:
        embedding, head = out["model.embed_tokens.weight"], out.pop("lm_head.weight")

        def put(value: Tensor | Codes) -> None:
            for target in (embedding, head):
                again = isinstance(value, Codes) and not target.takes(value)
                target.put(value.dequantize() if again and isinstance(value, Codes) else value)

        out["model.embed_tokens.weight"] = replace(embedding, put=put, takes=lambda codes: True)
    return out


def random_transformer(
    args: ModelArgs,
    device: str | torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    weight_format: WeightFormat | None = None,
) -> Transformer:
    """A model with random weights of std 0.02, made on the device, for throughput runs without a checkpoint. Any number
    of ranks gets the same weights."""
    choose = weight_format.choose if weight_format and weight_format.bits != DENSE else None
    model = empty_transformer(args, device, dtype, choose)
    gen = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        if args.ranks.size > 1:
            _fill_shares(model, gen, choose)
            return model.eval()
        for name, p in model.named_parameters():
            if p.dim() == 2:
                fill_normal(p.view(-1), 0.02, gen)
            elif name.endswith("bias"):
                p.zero_()
            else:
                p.fill_(1.0)
        for m in model.modules():
            if isinstance(m, PackedLinear):
                m.fill_random(0.02, gen)
    return model.eval()


def _fill_shares(model: Transformer, gen: torch.Generator, choose: Choose | None) -> None:
    """Draw the full weights as one process does, layer by layer; each rank stores its part."""
    args, targets = replace(model.args, ranks=ONE), tensors_of(model)
    with torch.device("meta"):
        whole = Transformer(args).to(model.dtype)
    if choose:
        pack(whole, choose, torch.device("meta"))
    names = dict(sources(args))
    for packed in (False, True):  # dense weights are drawn first
        for name, parts in names.items():
            module: Any = whole.get_submodule(name)
            if name == "output" and args.tie_embeddings:
                if packed and isinstance(module, PackedLinear):
                    raise InputError("random weights of a model whose head is its embedding are packed by one process "
                                     "alone: leave --weights out, or start one")  # fmt: skip
                continue
            ends, dense = [*accumulate(n for _, n in parts)], not isinstance(module, PackedLinear)
            if dense != packed:
                _fill_module(module, parts, ends, targets, gen, model.device)


def _fill_module(module: Any, parts: list[tuple[str, int]], ends: list[int], targets: dict[str, Target],
                 gen: torch.Generator, device: torch.device) -> None:  # fmt: skip
    """Draw the weights of a module, given from the full model on the meta device, and store them."""
    packed = isinstance(module, PackedLinear)
    if packed:
        drawn = PackedLinear(module.in_features, module.out_features, False, module.layout, device)
        drawn.fill_random(0.02, gen)
    named = {"bias": module.bias} if packed else dict(module.named_parameters(recurse=False))
    for (name, n), end in zip(parts, ends, strict=True) if packed else ():
        targets[f"{name}.weight"].put(drawn.rows(end - n, n))
    for parameter, p in named.items():
        if p is None:
            continue
        full = torch.empty(p.shape, dtype=p.dtype, device=device)
        if p.dim() == 2:
            fill_normal(full.view(-1), 0.02, gen)
        else:
            full.fill_(0.0 if parameter == "bias" else 1.0)
        for (name, n), end in zip(parts, ends, strict=True):
            targets[f"{name}.{parameter}"].put(full[end - n : end])


def save_checkpoint_tensors(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, unfused and contiguous, for safetensors' save_file."""
    return {name: t.read().to(dtype).contiguous().clone() for name, t in tensors_of(model).items()}
