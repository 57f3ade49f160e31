"""Text to token ids and back, from the tokenizer files of a Hugging Face checkpoint folder. A checkpoint is untrusted:
only JSON, the SentencePiece proto and tiktoken's text format are read, and chat templates run in a sandbox.

Three kinds share one base. The folder's files choose:
1. `tokenizer.model`, a SentencePiece proto (Llama 2, Mistral, models/tiny)   -> sentencepiece_model.py
2. `tokenizer.model`, "base64 rank" lines (Llama 3 as Meta publishes it)      -> tiktoken_model.py
3. `tokenizer.json`, or `vocab.json` + `merges.txt` (Llama 3, Qwen, Nemo)     -> bpe.py
A byte-level `tokenizer.json` goes before any `tokenizer.model`; a SentencePiece proto goes before the `tokenizer.json`
converted from it. Ids are those of the `tokenizers` library; what would make them differ is refused by name. Known
differences: decoding never "cleans up" spaces, and pre-tokenization uses the Unicode version of the `regex` package,
so characters added to Unicode after the reference's version may be split otherwise.
"""

from __future__ import annotations

from pathlib import Path

import regex

from errors import InputError
from tokenizer.base import Stream, Tokenizer
from tokenizer.bpe import BPETokenizer, spec_from_vocab
from tokenizer.folder import Folder, sequence
from tokenizer.sentencepiece_model import SentencePieceTokenizer
from tokenizer.tiktoken_model import TIKTOKEN_LINE, TiktokenTokenizer

__all__ = ["BPETokenizer", "SentencePieceTokenizer", "Stream", "TiktokenTokenizer", "Tokenizer", "load_tokenizer"]

# What JSON of an unexpected shape raises.
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError, regex.error)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises InputError for a folder or a file that cannot be used as it is."""
    folder = Folder(path)
    try:
        return _load(folder)
    except InputError:
        raise
    except MALFORMED as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        raise folder.error("", f"the tokenizer files are malformed ({reason}); download them again") from e


def _load(folder: Folder) -> Tokenizer:
    spec = folder.json("tokenizer.json")
    proto = folder.read("tokenizer.model") if folder.has("tokenizer.model") else None
    is_tiktoken = proto is not None and TIKTOKEN_LINE.match(proto) is not None
    byte_level = any(step["type"] == "ByteLevel" for step in sequence(spec.get("decoder"), "decoders"))
    if proto is not None and not is_tiktoken and not byte_level:
        return SentencePieceTokenizer(folder, proto, spec)
    if spec:
        return BPETokenizer(folder, spec)
    if proto is not None:
        return TiktokenTokenizer(folder, proto)
    if folder.has("vocab.json", "merges.txt"):
        return BPETokenizer(folder, spec_from_vocab(folder))
    expected = "tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
    raise folder.error("", f"no tokenizer here, expected {expected}; copy them from where it was published")
