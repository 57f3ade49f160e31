"""Hugging Face checkpoint folders: config.json -> ModelArgs, *.safetensors -> the parameters of a Transformer.

No conversion step: weights are memory-mapped and copied once into place, q/k/v and gate/up fused on the way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from errors import InputError, short
from formats import Codes, Reader, open_checkpoint
from kernels.rope import RopeArgs
from model import ModelArgs, Transformer, empty_transformer
from weights import DENSE, PackedEmbedding, PackedLinear, WeightFormat

# model_type -> (q/k/v bias, o bias, q/k norm): True, False, or the config key that says so
FAMILIES: dict[str, tuple[bool | str, bool | str, bool]] = {
    "llama": ("attention_bias", "attention_bias", False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": ("attention_bias", "attention_bias", True),
}
# Keys of other architectures or of quantized checkpoints that change the numbers, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
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
}
ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {f.name for f in fields(RopeArgs)} - {"theta", "type", "low_freq_factor", "high_freq_factor"},
}


def args_from_hf(c: dict[str, Any]) -> ModelArgs:
    """From a config.json as a dict. InputError names any key that would change the numbers and is not supported."""
    family = c.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"unsupported architecture {family!r} in config.json: supported are {', '.join(FAMILIES)}")
    for key, neutral in NEUTRAL.items():
        if c.get(key) is not None and c[key] not in neutral:
            raise InputError(
                f"config.json sets {key} = {str(c[key])[:80]}, which is not supported and changes the output"
            )
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if c.get(key) not in (None, True, False):
            raise InputError(f"config.json: {key} must be true or false, found {short(c[key])}")
    dim = _number(c, "hidden_size", most=1 << 20)
    n_layer = _number(c, "num_hidden_layers", most=1000)
    n_head = _number(c, "num_attention_heads", most=1 << 14)
    n_kv_head = _number(c, "num_key_value_heads", n_head, most=1 << 14)
    head_dim = _number(c, "head_dim", 128 if family == "qwen3" else dim // n_head, most=1 << 14)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim {head_dim} is odd, rotary embeddings need pairs of channels")
    if n_head % n_kv_head:
        raise InputError(f"config.json: num_attention_heads {n_head} is no multiple of num_key_value_heads {n_kv_head}")
    flag = [c.get(f, False) if isinstance(f, str) else f for f in FAMILIES[family]]
    context = {"llama": 2048, "mistral": 131072}.get(family, 32768)  # transformers' defaults for an absent key
    max_seq_len = _number(c, "max_position_embeddings", context)
    eos = [] if c.get("eos_token_id") is None else c["eos_token_id"]
    eos = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) for i in eos):
        raise InputError(f"config.json: eos_token_id must be one or several token numbers, found {c['eos_token_id']!r}")
    return ModelArgs(
        dim=dim,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        ffn_dim=_number(c, "intermediate_size", most=1 << 24),
        vocab_size=_number(c, "vocab_size"),
        max_seq_len=max_seq_len,
        norm_eps=_number(c, "rms_norm_eps", 1e-6, whole=False),
        rope=_rope_from_hf(c, max_seq_len),
        tie_embeddings=c.get("tie_word_embeddings", False),
        qkv_bias=bool(flag[0]),
        o_bias=bool(flag[1]),
        mlp_bias=family == "llama" and c.get("mlp_bias", False),
        qk_norm=bool(flag[2]),
        windows=_windows_from_hf(c, family, n_layer),
        dtype=str(c.get("dtype") or c.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_ids=tuple(eos),
    )


def read_args(checkpoint: str | Path) -> ModelArgs:
    """Of a folder or a GGUF file, whose weights are not read."""
    return args_from_hf(open_checkpoint(checkpoint).config)


def _number(
    c: dict[str, Any], key: str, default: float | None = None, whole: bool = True, most: float | None = None
) -> Any:
    """A positive number of the config, not above what any model has; InputError names the key if it is anything else.

    most: by default what an int32 holds, or 1e15 if it need not be whole.
    """
    value: Any = default if c.get(key) is None else c[key]
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        kind = "whole number" if whole else "number"
        raise InputError(f"config.json: {key} must be a positive {kind}, found {short(value)}")
    if value > (limit := most or (2**31 - 1 if whole else 1e15)):
        raise InputError(f"config.json: {key} is {short(value)}, no model has more than {limit:,}: correct it")
    return value


def _windows_from_hf(c: dict[str, Any], family: str, n_layer: int) -> tuple[int | None, ...]:
    """Mistral slides in every layer, Qwen from max_window_layers on (or as layer_types says) if use_sliding_window."""
    if family == "llama" or (family != "mistral" and not c.get("use_sliding_window", False)):
        return ()
    if c.get("sliding_window", 4096) is None:
        return ()
    window = _number(c, "sliding_window", 4096)
    types = c.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(t, str) for t in types)):
        raise InputError(f"config.json: layer_types must be a list of names, found {short(types)}")
    if family == "mistral":
        if types and set(types) != {"sliding_attention"}:
            raise InputError("config.json sets layer_types on a mistral model, which is not supported")
        return (window,) * n_layer
    if not types:
        full = c.get("max_window_layers", 28)
        if not isinstance(full, int):
            raise InputError(f"config.json: max_window_layers must be a whole number, found {short(full)}")
        types = ["full_attention" if i < full else "sliding_attention" for i in range(n_layer)]
    if len(types) != n_layer or not set(types) <= {"full_attention", "sliding_attention"}:
        raise InputError(f"config.json: layer_types must name full_attention or sliding_attention for {n_layer} layers")
    return tuple(window if t == "sliding_attention" else None for t in types)


def _rope_from_hf(c: dict[str, Any], max_seq_len: int) -> RopeArgs:
    """Both layouts: rope_theta + rope_scaling, and the newer rope_parameters (transformers v5)."""
    p = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if not isinstance(p, dict):
        raise InputError(f"config.json: rope_scaling or rope_parameters must be an object, found {p!r}")
    p = dict(p)
    if any(isinstance(v, dict) for v in p.values()):
        raise InputError("config.json: rope_parameters per layer type are not supported")
    kind = p.pop("rope_type", None) or p.pop("type", None) or "default"
    p.pop("type", None)
    theta = _number(
        {"rope_theta": p.pop("rope_theta", None) or c.get("rope_theta")}, "rope_theta", 10_000.0, whole=False
    )
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise InputError(f"unsupported rope type {kind!r} in config.json: supported are {', '.join(ROPE_KEYS)}")
    if p.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("config.json sets partial_rotary_factor, which is not supported and changes the output")
    if kind == "yarn":
        p.pop("finetuned", None)  # how the model was trained: nothing is computed from it
    known = {k: v for k, v in p.items() if k in ROPE_KEYS[kind] and v is not None}
    extra = {k for k, v in p.items() if v is not None} - ROPE_KEYS[kind]
    if kind != "default" and extra - {"original_max_position_embeddings"}:
        raise InputError(f"config.json: rope parameter {sorted(extra)[0]!r} is not known for rope type {kind!r}")
    if kind in ("llama3", "yarn") and c.get("original_max_position_embeddings"):
        known["original_max_position_embeddings"] = c["original_max_position_embeddings"]
    for key in known.keys() - {"truncate"}:
        _number(known, key, whole=False)
    if "factor" in ROPE_KEYS[kind] and "factor" not in known:
        if kind == "yarn" and "original_max_position_embeddings" in known:
            known["factor"] = max_seq_len / known["original_max_position_embeddings"]
        else:
            raise InputError(f"config.json: rope type {kind!r} needs a factor")
    rope = RopeArgs(theta=float(theta), type=kind, **known)
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise InputError(f"config.json: rope's low_freq_factor {rope.low_freq_factor:g} is not below its "
                         f"high_freq_factor {rope.high_freq_factor:g}: correct them (Llama 3.1: 1 and 4)")  # fmt: skip
    return rope


def load_checkpoint(
    source: str | Path | Reader,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = torch.float32,
    how: WeightFormat | None = None,
) -> Transformer:
    """Read a Hugging Face folder as it is, one of GPTQ, AWQ or compressed-tensors, too, or a GGUF file (formats/).

    Weights are memory-mapped and copied once into place, q/k/v and gate/up fused on the way; `dtype` None keeps the
    checkpoint's. how: packed in few bits, a tensor at a time: no more than one is there unpacked; None: as the file has
    them, in the bits and groups of most, the head in its own. InputError if a file is missing or truncated, or a tensor
    is missing, unexpected or of a wrong shape.
    """
    reader = source if isinstance(source, Reader) else open_checkpoint(source)
    path, args = reader.path, args_from_hf(reader.config)
    if reader.warning:
        print(f"warning: {reader.warning}", file=sys.stderr)
    if dtype is None:
        if args.dtype not in ("float32", "bfloat16", "float16"):
            raise InputError(f"config.json: dtype {args.dtype!r} is not float32, bfloat16 or float16: give --dtype")
        dtype = getattr(torch, args.dtype)
    own = None  # the format of most of the file's weights
    if how is not None and how.bits == DENSE:
        how = None
    elif how is None and reader.kind != "dense":
        codes = next((c for name, c in reader.tensors() if ".layers." in name and isinstance(c, Codes)), None)
        if isinstance(codes, Codes):
            how = own = WeightFormat(codes.bits, None if codes.group == codes.shape[1] else codes.group)
    model = empty_transformer(args, device, dtype, how)
    model.folder = path
    targets, head = tensors_of(model), None
    for name, value in reader.tensors():
        if name == "lm_head.weight" and args.tie_embeddings:
            head = value if isinstance(value, Tensor) else None
            continue
        if name not in targets:
            raise InputError(f"unexpected tensor {name} in {path}: config.json describes another model")
        target = targets.pop(name)
        if own and name == ("model.embed_tokens.weight" if args.tie_embeddings else "lm_head.weight"):
            target = _head_as_in_file(model, value)
        if tuple(value.shape) != target.shape:
            raise InputError(
                f"tensor {name} in {path} has shape {list(value.shape)}, expected {list(target.shape)} by config.json"
            )
        target.put(value if target.packed or isinstance(value, Tensor) else value.dequantize())
    if [*targets] == ["lm_head.weight"]:
        raise InputError(f"tensor lm_head.weight is missing from {path}: a base model without its output head; "
                         "save the model that generates (AutoModelForCausalLM), or set tie_word_embeddings in "
                         "config.json if the head is the embedding")  # fmt: skip
    if targets:
        raise InputError(f"tensor {next(iter(targets))} is missing from {path} ({len(targets)} missing in all)")
    _check_finite(model)
    if head is not None and not how and not torch.equal(head.to(model.output.weight), model.output.weight):
        raise InputError(f"lm_head.weight in {path} is not the embedding, as tie_word_embeddings in config.json says")
    return model.eval()


def _head_as_in_file(model: Transformer, value: Tensor | Codes) -> Target:
    """The output head in bits of its own: those of the codes, or bf16."""
    old: Any = model.output
    bits, group = (value.bits, value.group) if isinstance(value, Codes) else (16, old.in_features)
    model.output = PackedLinear(old.in_features, old.out_features, False, bits, group, model.device)  # type: ignore
    if isinstance(model.tok_embeddings, PackedEmbedding):
        model.tok_embeddings = PackedEmbedding(model.output, model.dtype)  # type: ignore[arg-type]
    return _targets(["head"], [old.out_features], model.output)["head.weight"]


def _check_finite(model: Transformer) -> None:
    """InputError names a tensor with NaN or infinity. Minimum and maximum are one fast reading; NaN is both of them."""
    params = [p.data if p.is_contiguous() else p.data.t() for p in model.parameters()]  # as they lie in memory
    params += [m.finite() for m in model.modules() if isinstance(m, PackedLinear)]
    if torch.stack([x for p in params for x in torch.aminmax(p)]).isfinite().all():
        return
    name, t = next((n, t) for n, target in tensors_of(model).items() if not (t := target.read()).isfinite().all())
    raise InputError(f"tensor {name} in {model.folder} holds NaN or infinity as {str(t.dtype).removeprefix('torch.')}: "
                     "download it again" + ("" if t.dtype == torch.float32 else ", or try --dtype fp32"))  # fmt: skip


@dataclass
class Target:
    """Where a tensor of a checkpoint goes: a parameter, some rows of one, or of a packed weight."""

    shape: tuple[int, ...]
    put: Callable[[Any], Any]
    read: Callable[[], Tensor]
    packed: bool = False  # takes codes as they are


def _targets(names: list[str], sizes: list[int], module: nn.Module) -> dict[str, Target]:
    """Of one module that holds the rows of several tensors, `sizes` each."""
    out: dict[str, Target] = {}
    for kind, p in module.named_parameters(recurse=False):
        for name, part in zip(names, p.data.split(sizes), strict=True):
            out[f"{name}.{kind}"] = Target(tuple(part.shape), part.copy_, part.detach)
    if isinstance(module, PackedLinear):
        for name, n, end in zip(names, sizes, accumulate(sizes), strict=True):
            shape = (n, module.in_features)
            out[f"{name}.weight"] = Target(shape, partial(module.put, end - n), partial(module.dense, end - n, n), True)
            if module.bias is not None:
                part = module.bias[end - n : end]
                out[f"{name}.bias"] = Target((n,), part.copy_, part.detach)
    return out


def tensors_of(model: Transformer) -> dict[str, Target]:
    """Hugging Face's tensor names -> where they are in the model; fused ones are slices."""
    a = model.args
    out: dict[str, Target] = {}

    def add(name: str, module: nn.Module) -> None:
        sizes = [p.shape[0] for p in module.parameters(recurse=False)]
        out.update(_targets([name], sizes[:1] or [getattr(module, "out_features", 0)], module))

    add(
        "model.embed_tokens",
        model.output if isinstance(model.tok_embeddings, PackedEmbedding) else model.tok_embeddings,
    )
    add("model.norm", model.norm)
    if not a.tie_embeddings:
        add("lm_head", model.output)
    block: Any  # nn.ModuleList does not know what it holds
    for i, block in enumerate(model.layers):
        at, ff, pre = block.attention, block.feed_forward, f"model.layers.{i}"
        heads = [a.n_head * a.head_dim, a.n_kv_head * a.head_dim, a.n_kv_head * a.head_dim]
        out.update(_targets([f"{pre}.self_attn.{x}_proj" for x in "qkv"], heads, at.wqkv))
        out.update(_targets([f"{pre}.mlp.{x}_proj" for x in ("gate", "up")], [a.ffn_dim] * 2, ff.w13))
        add(f"{pre}.self_attn.o_proj", at.wo)
        add(f"{pre}.self_attn.q_norm", at.q_norm)
        add(f"{pre}.self_attn.k_norm", at.k_norm)
        add(f"{pre}.mlp.down_proj", ff.w2)
        add(f"{pre}.input_layernorm", block.attention_norm)
        add(f"{pre}.post_attention_layernorm", block.ffn_norm)
    return out


def save_checkpoint_tensors(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, unfused, contiguous: what safetensors' save_file takes."""
    return {name: t.read().to(dtype).contiguous().clone() for name, t in tensors_of(model).items()}
