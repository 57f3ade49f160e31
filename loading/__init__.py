"""Checkpoints and their tokenizers, as files on disk."""

from loading.checkpoint import load_checkpoint
from loading.tokenizer import load_tokenizer

__all__ = ["load_checkpoint", "load_tokenizer"]
