"""The tensors of a checkpoint -> the parameters of a Transformer, by the names of Hugging Face.

There is no conversion step: weights are memory-mapped and copied once into place, which fuses q/k/v and gate/up.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.rope import half_split
from loading.allocate import empty_transformer
from loading.config import args_from_hf
from model import ModelArgs, Transformer
from runtime.errors import InputError
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
from weights.codes import BF16
from weights.quantization import quantize
from weights.shards import MERGE

IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


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
            if reader.format == "gptq" and name.endswith("_proj.bias") and not _dense(value).any():
                continue  # AutoGPTQ writes them for modules that have none
            why = f"it is of an adapter: {MERGE}" if ".lora_" in name else "the model of config.json has none such"
            raise InputError(f"unexpected tensor {name} in {path}: {why}")
        target = targets.pop(name)
        if tuple(value.shape) != target.shape:
            raise InputError(
                f"tensor {name} in {path} has shape {list(value.shape)}, expected {list(target.shape)} by config.json"
            )
        if isinstance(value, Codes) and not target.takes(value):
            again += weight_format is not None and choose is not None
            value = value.dequantize()
        target.put(value)
    if [*targets] == ["model.embed_tokens.weight"] and head is not None:  # safetensors' save_model keeps the first name
        targets.pop("model.embed_tokens.weight").put(_dense(head))
    elif head is not None and embedding is not None:  # as stored, since --weights may round
        check_tied(path, _dense(head), _dense(embedding))
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


def check_tied(path: Path, head: Tensor, embedding: Tensor) -> None:
    """Raises InputError unless a stored head is the embedding, as it should be where they are tied."""
    if not torch.equal(head.to(embedding.dtype), embedding):
        raise InputError(f"lm_head.weight in {path} is not the embedding, as tie_word_embeddings in config.json says: "
                         "set it to false if the head is a matrix of its own")  # fmt: skip


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
        if choose("tok_embeddings", 0, args.dim) == BF16:  # torch 2.11 draws other numbers in bf16 than in fp32
            whole.tok_embeddings.to(torch.bfloat16)
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
