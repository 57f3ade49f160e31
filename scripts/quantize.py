"""Writes a checkpoint with quantized weights, or plain ones, as a folder that loads without the original.

    python -m scripts.quantize models/tiny /tmp/tiny-int4                    # 4 bits in groups of 32, the head in 8
    python -m scripts.quantize Llama-3.2-1B.gguf OUT --weights int8:128      # from any supported checkpoint
    python -m scripts.quantize Llama-3.2-1B.gguf OUT --weights bf16          # a plain folder, for other tools

The folder is in compressed-tensors' format: pack-quantized (4 bits, with zero points) or int-quantized (8 bits), with
scales in fp16. Tensors are quantized one at a time; tensors of other layers than linear ones are kept in bf16. With
bf16 or fp32 it is a plain Hugging Face folder with the dequantized numbers of IN. A calibration is not copied: give
--calibration with the file of IN, which fits the model at any number of bits, or run calibrate.py --checkpoint OUT.
"""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cache.calibration import write_tensors
from kernels.linear import pack_bits
from loading.checkpoint import check_tied, split
from loading.config import args_from_hf
from loading.tokenizer import FILES, load_tokenizer
from model import ModelArgs
from runtime.errors import InputError, run_cli
from runtime.machine import temporary
from runtime.options import Parser
from weights import DENSE, Codes, WeightFormat, open_checkpoint, quantize

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
               "qkv_proj", "gate_up_proj")  # fmt: skip
FORMAT = {4: "pack-quantized", 8: "int-quantized"}
PLAIN = {16: torch.bfloat16, DENSE: torch.float32}


def words(codes: Tensor) -> Tensor:
    """4-bit numbers uint8 [rows, n] -> int32 [rows, n / 8], the first one in the lowest bits; n is padded."""
    codes = F.pad(codes, (0, -codes.shape[1] % 8))
    return pack_bits(codes, 4).flatten().view(torch.int32).unflatten(0, (len(codes), -1))


def module(name: str, c: Codes) -> dict[str, Tensor]:
    """A linear layer's tensors under compressed-tensors' names. Its numbers are signed: code - 8, zero - 8."""
    scale = c.scale.half()
    if c.bits == 8:
        return {f"{name}.weight": c.codes, f"{name}.weight_scale": scale}
    zero = torch.full_like(c.scale, 8, dtype=torch.uint8) if c.zero is None else c.zero
    return {
        f"{name}.weight_packed": words(c.codes),
        f"{name}.weight_scale": scale,
        f"{name}.weight_zero_point": words(zero.t().contiguous()).t().contiguous(),  # packed along the outputs
        f"{name}.weight_shape": torch.tensor(c.shape),
    }


def scheme(bits: int, group: int | None, targets: list[str]) -> dict[str, Any]:
    weights = dict(num_bits=bits, type="int", symmetric=bits == 8, strategy="group" if group else "channel",
                   group_size=group, dynamic=False)  # fmt: skip
    return dict(targets=targets, weights=weights, format=FORMAT[bits])


def config_of(config: dict[str, Any], weight_format: WeightFormat, head: str) -> dict[str, Any]:
    """The config.json of the new folder."""
    config = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype", "torch_dtype")}
    config["torch_dtype"] = str(PLAIN.get(weight_format.bits, torch.bfloat16)).removeprefix("torch.")
    if weight_format.bits in PLAIN:
        return config
    groups = {"group_0": scheme(weight_format.bits, weight_format.group, ["re:.*_proj$"])}
    if weight_format.head_bits in FORMAT:
        groups["group_1"] = scheme(weight_format.head_bits, weight_format.group, [head])
    kinds = {g["format"] for g in groups.values()}
    quantization = dict(quant_method="compressed-tensors", quantization_status="compressed", config_groups=groups,
                ignore=[] if weight_format.head_bits in FORMAT else [head],
                format=kinds.pop() if len(kinds) == 1 else "mixed-precision")  # fmt: skip
    return config | dict(quantization_config=quantization)


def bits_of(name: str, args: ModelArgs, weight_format: WeightFormat) -> int:
    """The number of bits of a tensor; 16: it is not quantized."""
    if weight_format.bits in PLAIN:
        return 16
    if name == ("model.embed_tokens.weight" if args.tie_embeddings else "lm_head.weight"):
        return weight_format.head_bits
    return weight_format.bits if name.endswith(tuple(f".{p}.weight" for p in PROJECTIONS)) else 16


def main() -> None:
    p = Parser(__doc__)
    a = p.add_argument
    a("source", metavar="IN", help="Hugging Face folder or GGUF file")
    a("out", metavar="OUT", help="a folder that does not exist yet")
    a("--weights", default="int4", metavar="W",
      help="int4 or int8, with or without a group: int4:64, int8:channel; bf16 or fp32: a plain folder")  # fmt: skip
    a("--head", metavar="W", help="format of the output head: bf16, int8 or int4 (default: int8)")
    a("--json", action="store_true", help="print one JSON object")
    opt = p.parse_args()
    weight_format, out = WeightFormat.parse(opt.weights, opt.head), Path(opt.out)
    assert weight_format is not None  # there is a default
    if weight_format.bits in PLAIN and opt.head:
        raise InputError(f"--head {opt.head} needs --weights int4 or int8: {opt.weights} applies to all tensors")
    if out.exists():
        raise InputError(f"{out} exists already: give the name of a new folder")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent} is not a folder: create it first")
    reader = open_checkpoint(opt.source)
    args = args_from_hf(reader.config)
    head = "model.embed_tokens" if args.tie_embeddings else "lm_head"
    tensors: dict[str, Tensor] = {}
    embedding, before = None, 0
    # experts one by one; a plain folder for other tools keeps the names that it has
    apart = reader.gguf is not None or weight_format.bits not in PLAIN
    named = ((split(*x, args) if apart and ".experts." in x[0] else [x]) for x in reader.tensors())
    for name, value in tqdm(chain.from_iterable(named), desc="tensors", unit=""):
        dense = value.dequantize() if isinstance(value, Codes) else value
        if args.tie_embeddings and name in ("model.embed_tokens.weight", "lm_head.weight"):  # perhaps both are there
            if embedding is not None:
                check_tied(Path(opt.source), dense, embedding)
                continue
            name, embedding = "model.embed_tokens.weight", dense
        before += dense.numel() * 2
        if not dense.isfinite().all():
            raise InputError(f"tensor {name} in {opt.source} holds NaN or infinity: download it again")
        bits = bits_of(name, args, weight_format)
        if bits == 16:
            tensors[name] = dense.to(PLAIN.get(weight_format.bits, torch.bfloat16))
            if not tensors[name].isfinite().all():
                raise InputError(f"tensor {name} in {opt.source} has numbers too large for bf16: use --weights fp32")
        else:
            c = quantize(dense, bits, weight_format.group_of(dense.shape[1], bits))
            tensors |= module(name.removesuffix(".weight"), c)
    write(Path(opt.source), out, tensors, config_of(reader.config, weight_format, head), reader.gguf)
    size = sum(t.nbytes for t in tensors.values())
    if opt.json:
        print(json.dumps(dict(out=str(out), bytes=size, bytes_bf16=before)))
    else:
        print(f"{out}: {size / 2**20:,.1f} MiB, {size / before:.3f} of bf16")


def write(source: Path, out: Path, tensors: dict[str, Tensor], config: dict[str, Any], gguf: Any) -> None:
    """Writes under a temporary name, then renames, so that there is a complete folder or none."""
    tmp = temporary(out)
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        tmp.mkdir()
        if gguf:
            load_tokenizer(gguf).save(tmp)
        for f in sorted(source.iterdir()) if source.is_dir() else ():
            copied = f.suffix in (".json", ".txt", ".jinja") or any(map(f.match, FILES))
            if f.is_file() and copied and not f.name.endswith(".index.json"):
                shutil.copyfile(f, tmp / f.name)
        write_tensors(tmp / "model.safetensors", tensors, {"format": "pt"})
        (tmp / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        tmp.rename(out)
    except OSError as e:
        raise InputError(f"cannot write {out}: {e.strerror}") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    run_cli(main)
