"""The flags that name a model: --checkpoint, and --transformers for one that transformers runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runtime.errors import InputError, short
from runtime.machine import TINY

FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja")  # that are downloaded of a model


def fetched_folder(name: str | Path) -> str:
    """The folder of a model on the Hugging Face hub, downloaded if need be; a folder is its own. Raises InputError."""
    if Path(name).is_dir():
        return str(name)
    try:
        from huggingface_hub import snapshot_download  # transformers brings it

        return snapshot_download(str(name), allow_patterns=[*FILES])
    except ImportError as e:
        raise InputError(f"this needs transformers 5.16 to 5.24 ({e}): pip install transformers==5.24.0") from None
    except Exception as e:  # of the hub, the network or the disk
        raise InputError(f"{short(str(name))} is no folder, and it cannot be downloaded: {e}") from None


class _Transformers(argparse.Action):
    """Sets --checkpoint, too: to the model's folder."""

    def __call__(self, parser: Any, opt: Any, value: Any, flag: Any = None) -> None:
        opt.transformers, opt.checkpoint = value, fetched_folder(value)


def add_checkpoint(p: argparse.ArgumentParser) -> None:
    """Add --checkpoint and --transformers."""
    one = p.add_mutually_exclusive_group()
    one.add_argument("--checkpoint", default=str(TINY), metavar="CKPT", help="Hugging Face folder or GGUF file")
    one.add_argument("--transformers", metavar="NAME_OR_FOLDER", action=_Transformers, help="a model of any "
                     "architecture, which transformers runs with the methods as its attention")  # fmt: skip
