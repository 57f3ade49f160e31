"""A folder's *.safetensors as one lazy table: a tensor is read from its mapped file on demand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.linear import ROWS
from runtime.errors import InputError
from runtime.machine import check_fetched
from weights.codes import BF16, Layout, dtype_name, exact_in_fp16

# Buffers that older versions of transformers saved and that are computed on loading: not parameters.
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias", "attn.bias")
Layouts = tuple[dict[str, Layout], str | None]  # of matrices, and a note on those that take more bits
MERGE = "merge it into its model (peft's merge_and_unload) and save that"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError if it cannot be read or is no object."""
    check_fetched(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if path.with_name("adapter_config.json").is_file():
            raise InputError(f"{path.parent} is an adapter (LoRA), no model: {MERGE}") from None
        raise InputError(f"{path} is missing: a checkpoint is a GGUF file, or a Hugging Face folder with config.json, "
                         "*.safetensors and tokenizer files") from None  # fmt: skip
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"cannot read {path} as JSON: {e}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def shard_files(folder: Path) -> list[Path]:
    """model.safetensors, as transformers has it even beside an index; or the shards named by the index, or every
    *.safetensors of the folder that is not a calibration."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
            raise InputError(f"{index} has no weight_map from tensors to files")
        files = [folder / name for name in sorted(set(shards.values()))]
        if gone := [f.name for f in files if "\0" in f.name or f.parent != folder or not f.is_file()]:
            raise InputError(f"{index} names {gone[0]!r}, which is not in the folder: download the missing shard")
        return files
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("calibration"))
    if not files:
        raise InputError(f"no *.safetensors in {folder}: only safetensors and GGUF are read, pickles (*.bin, *.pth) "
                         "never are. Download the safetensors, or save the model anew (save_pretrained)")  # fmt: skip
    return files


class Shards:
    """Names, shapes and tensors of a folder's parameters. Raises InputError if a file is broken or two files have the
    same name. Names of a base model saved without its head, `layers.0...`, get the prefix of a full model.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, tuple[Path, Any, str]] = {}  # tensor name -> path, opened file, name in that file
        for path in shard_files(folder):
            check_fetched(path)
            try:
                file = safe_open(path, framework="pt", device="cpu")
                names = list(file.keys())
            except (SafetensorError, OSError) as e:
                raise self.broken(path, e) from None
            for stored in names:  # in a model of images, the names of its text have a prefix, which version 5 moved
                name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", stored)
                name = name.removeprefix("language_model.")
                if name in self.files:
                    raise InputError(f"tensor {name} is in {self.files[name][0].name} and in {path.name}: remove one")
                if not name.endswith(BUFFERS):
                    self.files[name] = path, file, stored
        if any(n.startswith("layers.") for n in self.files) and not any(n.startswith("model.") for n in self.files):
            self.files = {n if n.startswith("lm_head.") else f"model.{n}": f for n, f in self.files.items()}

    def broken(self, path: Path, e: Exception) -> InputError:
        return InputError(f"cannot read {path}: {e}; the file is truncated or is no safetensors file")

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def source(self, name: str) -> str:
        """The tensor's name for messages."""
        return f"tensor {name} in {self.files[name][0]}"

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it; () if there is none."""
        if name not in self.files:
            return ()
        _, file, stored = self.files[name]
        return tuple(file.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor by safetensors' name, without reading it; empty if there is none."""
        if name not in self.files:
            return ""
        _, file, stored = self.files[name]
        return str(file.get_slice(stored).get_dtype())

    def get(self, name: str, dtypes: tuple[torch.dtype, ...] = (), needed_by: str = "") -> Tensor:
        """The tensor, which must have one of `dtypes`, if any are given."""
        if name not in self.files:
            raise InputError(f"tensor {name} is missing from {self.folder}, {needed_by} needs it: download it again")
        path, file, stored = self.files[name]
        try:
            t = file.get_tensor(stored)
        except (SafetensorError, OSError) as e:
            raise self.broken(path, e) from None
        except (RuntimeError, ValueError, AttributeError, KeyError) as e:  # a dtype or a shape that torch cannot hold
            raise InputError(f"{self.source(name)} cannot be read as a tensor: {e}") from None
        if dtypes and t.dtype not in dtypes:
            if dtypes == FLOATS and not needed_by:
                raise InputError(f"{self.source(name)} is {dtype_name(t)}: quantized weights, without scales beside "
                                 "them, or config.json has no quantization_config that says how. Take the checkpoint "
                                 "in bf16 or fp16, or one of GPTQ, AWQ, compressed-tensors or GGUF")  # fmt: skip
            expected = " or ".join(map(dtype_name, dtypes))
            raise InputError(f"{self.source(name)} is {dtype_name(t)}, expected {expected}: download it again")
        return t


def layouts_of(shards: Shards, codes: dict[str, tuple[str, int, int]]) -> Layouts:
    """The layouts that hold matrices exactly, and a note on matrices that packed weights cannot hold exactly.

    codes: a weight's name -> the name of its scales, the bits of a code, and the number of inputs that share a scale.
    If there are codes, bf16 matrices stay in 16 bits.
    """
    out: dict[str, Layout] = {}
    for name, (scale, bits, group) in codes.items():
        if shards.dtype(name) == "F8_E4M3":
            if group % ROWS == 0 and shards.shape(name)[1] % group == 0:
                out[name] = Layout(8, group, e4m3=True)
        elif group % ROWS == 0 and exact_in_fp16(shards.get(scale, FLOATS)):
            out[name] = Layout(bits, group)
    if codes:
        for name in shards:
            if len(shards.shape(name)) == 2 and shards.dtype(name) == "BF16":
                out.setdefault(name, BF16)
    odd = len(codes.keys() - out.keys())
    return (
        out,
        f"{odd} tensors have scales or groups that packed weights do not hold exactly: held unpacked" if odd else None,
    )


def with_suffix(shards: Shards, suffix: str) -> list[str]:
    """Modules with a tensor of that suffix: `a.b` for `a.b.qweight`."""
    return [name.removesuffix(suffix) for name in shards if name.endswith(suffix)]


def packed_module(shards: Shards, module: str) -> tuple[str, Tensor, Tensor, Tensor]:
    """A GPTQ or AWQ module: its name for messages, qweight, scales and qzeros."""
    name = f"{module}.qweight"
    packed = shards.get(name, (torch.int32,))
    scales = shards.get(f"{module}.scales", FLOATS, name)
    return shards.source(name), packed, scales, shards.get(f"{module}.qzeros", (torch.int32,), name)


def check_groups(source: str, inputs: int, out: int, group: int, per_word: int, scales: Tensor, zeros: Tensor) -> None:
    """Raises InputError unless scales are [inputs / group, out] and qzeros hold as many codes, `per_word` each."""
    expected = [inputs // group, out], [inputs // group, out // per_word]
    if inputs % group or out % per_word or [list(scales.shape), list(zeros.shape)] != list(expected):
        raise InputError(
            f"{source} has {inputs} inputs and {out} outputs, scales {list(scales.shape)} and qzeros "
            f"{list(zeros.shape)}: with groups of {group} expected {expected[0]} and {expected[1]}"
        )
