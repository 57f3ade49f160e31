"""config.json -> ModelArgs. A family of models is a row of `FAMILIES`; an unsupported setting raises an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.rope import RopeArgs
from model import ACTS, ModelArgs
from runtime.errors import InputError, short
from weights import open_checkpoint


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
    if c.get("rope_parameters") is None:  # null is as good as absent
        c["rope_parameters"] = family.absent.get("rope_parameters")
    if c.get("is_causal", True) is None:
        raise InputError("config.json sets is_causal to null, which transformers takes for false: remove it")
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
    if types and "layer_types" in family.reads:
        if len(types) == n_layer and set(types) <= {"full_attention", "sliding_attention"}:
            return types
        raise InputError(f"config.json: layer_types must name full_attention or sliding_attention for {n_layer} layers")
    usual = ["sliding_attention" if slides(c, i) else "full_attention" for i in range(n_layer)]
    if types and set(types) - {*usual} and c.get("sliding_window") is not None:
        raise InputError(f"config.json sets layer_types, which transformers ignores in a {c['model_type']} model: "
                         "leave them out, or set a model_type that reads them, as ministral")  # fmt: skip
    return usual


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
    window, off = c.get("sliding_window"), "use_sliding_window" in family.reads and not c.get("use_sliding_window")
    if off or window is None:
        named = "layer_types" in family.reads and (c.get("layer_types") or family.local_theta)
        if named and "sliding_attention" in _layer_types(c, family, n_layer):
            why = "use_sliding_window is not true" if off else "there is no sliding_window"
            raise InputError(f"config.json: layer_types has sliding_attention, but {why}: correct one of them")
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
    full = read(  # an object has its own original_max_position_embeddings
        rope_scaling=None, rope_parameters=by_type.get("full_attention") or scaling,
        original_max_position_embeddings=None,
    )  # fmt: skip
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
    grows = "llama_4_scaling_beta" in family.reads and p.pop("llama_4_scaling_beta", None)
    for key in IGNORED.get(rope_type, set()):
        p.pop(key, None)
    known = {k: v for k, v in p.items() if k in ROPE_KEYS[rope_type] and v is not None}
    if grows and p.get("original_max_position_embeddings"):  # from where queries grow, with any rope
        known["original_max_position_embeddings"] = p["original_max_position_embeddings"]
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
