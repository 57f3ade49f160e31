"""Reads published checkpoints: GGUF files, and safetensors folders, also of GPTQ, AWQ, compressed-tensors or FP8.

`open_checkpoint` finds the format of a path; its reader yields Hugging Face's tensor names with tensors, or `Codes` if
the format stores integer codes and scales. Nothing is rounded: dequantized Codes equal what the format's own tools
compute in fp32. Anything that cannot be read exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.errors import InputError, short
from weights.awq import AWQ
from weights.codes import Codes
from weights.compressed_tensors import CompressedTensors
from weights.fp8 import FP8
from weights.gguf import gguf_config, gguf_layouts, gguf_tensors, is_gguf
from weights.gguf_file import GGUFFile
from weights.gptq import GPTQ
from weights.settings import Settings
from weights.shards import FLOATS, Layouts, Shards, check_fetched, read_object

METHODS: dict[str, type[GPTQ | AWQ | CompressedTensors | FP8]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
}
Named = Iterator[tuple[str, Tensor | Codes]]


@dataclass
class Reader:
    """An opened checkpoint.

    path: the file or folder; format: "gguf", one of METHODS, or "dense"; config: a config.json without its
    quantization_config; tensors(): yields (name, tensor), reading one at a time; layouts(): the layouts that hold its
    matrices exactly, found without reading them; warning: a line to show; gguf: the file, None for a folder.
    """

    path: Path
    format: str
    config: dict[str, Any]
    tensors: Callable[[], Named]
    layouts: Callable[[], Layouts]
    warning: str | None = None
    gguf: GGUFFile | None = None

    @property
    def tokenizer(self) -> Path | GGUFFile:
        """The source for `load_tokenizer`: the folder, or the GGUF file, which is already open."""
        return self.gguf or self.path


def open_checkpoint(path: str | Path) -> Reader:
    """Open a GGUF file, a folder with one and no config.json, or a Hugging Face folder. Settings are checked here,
    tensors when they are read. An InputError says what is not supported."""
    path = Path(path)
    if path.is_dir() and not (path / "config.json").exists():
        path = find_gguf(path) or path
    if path.is_dir():
        return _open_folder(path, read_object(path / "config.json"))
    if not path.exists():
        raise InputError(f"checkpoint {path} not found: give a Hugging Face model folder or a GGUF file on this "
                         "machine, nothing is downloaded")  # fmt: skip
    check_fetched(path)
    if not is_gguf(path):
        raise InputError(f"{path} is no GGUF file: give one, or the folder that holds config.json and *.safetensors")
    file = GGUFFile(path)
    return Reader(path, "gguf", gguf_config(file), lambda: gguf_tensors(file), lambda: gguf_layouts(file), gguf=file)


def find_gguf(path: str | Path) -> Path | None:
    """A GGUF file, or the only one in a folder; None if there is none. Raises InputError if there are several."""
    path = Path(path)
    if not path.is_dir():
        return path if is_gguf(path) else None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise InputError(f"{path} holds {len(found)} GGUF files: name one, as {found[0]}")
    return found[0] if found else None


def _open_folder(folder: Path, config: dict[str, Any]) -> Reader:
    if "text_config" in config and config.get("tie_word_embeddings") is None and any(folder.glob("*.safetensors")):
        tied = "lm_head.weight" not in Shards(folder)  # Mistral Small 3 does not say
        config = config | dict(tie_word_embeddings=tied)
    source, quantization = "quantization_config in config.json", config.get("quantization_config")
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():  # older checkpoints have it in a separate file, or a part of it
            if quantization is None:
                source, quantization = name, {"quant_method": method} | read_object(folder / name)
            elif isinstance(quantization, dict) and quantization.get("quant_method") == method:
                said = {k: v for k, v in quantization.items() if v is not None}
                source, quantization = f"{source} with {name}", read_object(folder / name) | said
    if "quantization" in config:
        raise InputError(f"{folder}: config.json sets quantization, which is MLX's: not supported. Take the checkpoint "
                         "in bf16 or fp16, or one of GPTQ, AWQ, compressed-tensors or GGUF")  # fmt: skip
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    if quantization is None:
        return Reader(folder, "dense", plain, lambda: _dense(Shards(folder)), lambda: ({}, None))
    if not isinstance(quantization, dict):
        raise InputError(f"config.json: quantization_config must be an object, found {short(quantization)}")
    settings = Settings(quantization, source)
    method = settings.one_of((*METHODS,), None, "quant_method")
    of = METHODS[method](settings)
    read, layouts = (lambda: of.read(Shards(folder))), (lambda: of.layouts(Shards(folder)))
    return Reader(folder, method, plain, read, layouts, getattr(of, "warning", None))


def _dense(shards: Shards) -> Named:
    for name in shards:
        yield name, shards.get(name, FLOATS)
