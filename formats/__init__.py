"""Quantized checkpoints as they are published: GGUF files, and safetensors folders of GPTQ, AWQ or compressed-tensors.

`open_checkpoint` says what a path holds; its reader yields Hugging Face's tensor names with tensors, or with `Codes`
where the format's numbers are integer codes and scales. Nothing is rounded: dequantized Codes are what the format's own
tools compute in fp32. What cannot be read exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from errors import InputError, short
from formats.awq import AWQ
from formats.codes import Codes
from formats.compressed_tensors import CompressedTensors
from formats.gguf import gguf_config, gguf_layouts, gguf_tensors, gguf_tokenizer_files, is_gguf
from formats.gguf_file import GGUFFile
from formats.gptq import GPTQ, biased_projections
from formats.settings import Settings
from formats.shards import FLOATS, Held, Shards, check_fetched, read_object

__all__ = ["Codes", "Reader", "gguf_config", "gguf_tensors", "gguf_tokenizer_files", "is_gguf", "open_checkpoint"]

METHODS = ("gptq", "awq", "compressed-tensors")
Named = Iterator[tuple[str, Tensor | Codes]]


@dataclass
class Reader:
    """An opened checkpoint.

    path: the file or folder; kind: "gguf", one of METHODS, or "dense"; config: a config.json without its
    quantization_config; tensors(): a pass over (name, tensor), one read at a time; layouts(): how its matrices are held
    as they are, told without reading them; warning: a line to show; tokenizer_files(folder): writes a GGUF file's
    tokenizer as files, None where the folder has its own.
    """

    path: Path
    kind: str
    config: dict[str, Any]
    tensors: Callable[[], Named]
    layouts: Callable[[], Held]
    warning: str | None = None
    tokenizer_files: Callable[[str | Path], None] | None = None


def open_checkpoint(path: str | Path, config: dict[str, Any] | None = None) -> Reader:
    """A GGUF file, a folder that holds one and no config.json, or a Hugging Face folder, whose `config` is config.json
    unless given. Settings are checked here, tensors as they are read; InputError says what is not supported."""
    path = Path(path)
    if path.is_dir() and config is None and not (path / "config.json").exists() and (found := [*path.glob("*.gguf")]):
        if len(found) > 1:
            raise InputError(f"{path} holds {len(found)} GGUF files: name one, as {sorted(found)[0]}")
        path = found[0]
    if path.is_dir():
        return _open_folder(path, read_object(path / "config.json") if config is None else config)
    if not path.exists():
        raise InputError(f"checkpoint {path} not found: give a Hugging Face model folder or a GGUF file")
    check_fetched(path)
    if not is_gguf(path):
        raise InputError(f"{path} is no GGUF file: give one, or the folder that holds config.json and *.safetensors")
    file = GGUFFile(path)
    return Reader(
        path,
        "gguf",
        gguf_config(file),
        lambda: gguf_tensors(file),
        lambda: gguf_layouts(file),
        tokenizer_files=lambda folder: gguf_tokenizer_files(file, folder),
    )


def _open_folder(folder: Path, config: dict[str, Any]) -> Reader:
    where, said = "quantization_config in config.json", config.get("quantization_config")
    if said is None:  # older ones say it in a file of their own
        for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
            if (folder / name).is_file():
                where, said = name, {"quant_method": method} | read_object(folder / name)
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    if said is None:
        return Reader(folder, "dense", plain, lambda: _dense(Shards(folder)), lambda: ({}, None))
    if not isinstance(said, dict):
        raise InputError(f"config.json: quantization_config must be an object, found {short(said)}")
    settings = Settings(said, where)
    match settings.one_of(METHODS, None, "quant_method"):
        case "gptq":
            gptq, biased = GPTQ(settings), biased_projections(config)
            return Reader(
                folder, "gptq", plain, lambda: gptq.read(Shards(folder), biased), lambda: gptq.layouts(Shards(folder))
            )
        case "awq":
            awq = AWQ(settings)
            return Reader(folder, "awq", plain, lambda: awq.read(Shards(folder)), lambda: awq.layouts(Shards(folder)))
        case _:
            ct = CompressedTensors(settings)
            read, layouts = (lambda: ct.read(Shards(folder))), (lambda: ct.layouts(Shards(folder)))
            return Reader(folder, "compressed-tensors", plain, read, layouts, ct.warning)


def _dense(shards: Shards) -> Named:
    for name in shards:
        yield name, shards.get(name, FLOATS)
