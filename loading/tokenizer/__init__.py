"""Text to token ids and back. A checkpoint is untrusted: no pickle is read, and chat templates run in a sandbox.

The library that defines a format computes its ids. A folder's tokenizer is the first of these that it holds:
1. `tokenizer.json`, by Hugging Face's `tokenizers`                           -> library.py
2. `tokenizer.model`, or Mistral's `*.model.v3` and so on, by SentencePiece   -> sentencepiece_model.py,
   but with "base64 rank" lines (Llama 3 as Meta publishes it), by tiktoken   -> tiktoken_model.py
3. Mistral's `tekken.json`, by tiktoken                                       -> tiktoken_model.py
4. `vocab.json` with `merges.txt`, by `tokenizers`                            -> library.py
Where a second of them gives other ids, a line says so. Then `tekken.json` goes before `tokenizer.json`: it is the file
that the model was trained with, and published conversions of it have another model's pattern.
A GGUF file's vocabulary becomes a tokenizer of `tokenizers` in memory (gguf.py).
"""

from __future__ import annotations

from pathlib import Path

from loading.tokenizer.base import Stream, Tokenizer
from loading.tokenizer.folder import Folder
from loading.tokenizer.gguf import gguf_tokenizer
from loading.tokenizer.library import (
    LibraryTokenizer,
    differs_from_merges,
    from_tokenizer_json,
    from_vocab_and_merges,
)
from loading.tokenizer.sentencepiece_model import SentencePieceTokenizer
from loading.tokenizer.tiktoken_model import TIKTOKEN_LINE, TiktokenTokenizer
from runtime.errors import InputError, warn_once
from weights import GGUFFile, find_gguf

__all__ = ["LibraryTokenizer", "SentencePieceTokenizer", "Stream", "TiktokenTokenizer", "Tokenizer", "load_tokenizer"]

# Exceptions that malformed files raise.
MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
# Plain text on which the patterns of published vocabularies differ: digits, case within words, blanks, marks.
PROBE = "It's 2026: getItems()  cost 12345.67 EUR,\n\n\tnaïve HTTPServer x += 1;"
FILES = ("tokenizer.json", "*.model", "*.model.v*", "*tekken*.json", "merges.txt")


def load_tokenizer(path: str | Path | GGUFFile) -> Tokenizer:
    """The tokenizer of a checkpoint folder or a GGUF file, which may hold only a vocabulary. Raises InputError, which
    names the file, if it cannot be used as it is."""
    where = path.path if isinstance(path, GGUFFile) else Path(path).expanduser()
    try:
        if isinstance(path, GGUFFile):
            return gguf_tokenizer(path)
        if not where.exists():
            raise InputError(f"checkpoint {where} does not exist: give a Hugging Face folder or a GGUF file")
        if not Folder.find(where, *FILES) and (file := find_gguf(where)):
            return gguf_tokenizer(GGUFFile(file))
        if not where.is_dir():
            raise InputError(f"{where} is no GGUF file: give one, or a folder with tokenizer files")
        return _load_folder(Folder(where))
    except InputError:
        raise
    except MALFORMED as e:
        raise InputError(f"{where}: the tokenizer is malformed ({type(e).__name__}: {e}); download it again") from e


def _load_folder(folder: Folder) -> Tokenizer:
    names = [n for n in folder.find(folder.path, *FILES) if n != "merges.txt" or folder.has("vocab.json")]
    if not names:
        expected = "tokenizer.json, tokenizer.model, tekken.json, or vocab.json with merges.txt"
        raise folder.error("", f"no tokenizer here, expected {expected}; copy them from where it was published")
    first = _load_file(folder, names[0])
    for name in names[1:]:
        try:
            if name == "merges.txt" and (names[0] != "tokenizer.json" or not differs_from_merges(folder)):
                continue
            other = _load_file(folder, name)
            ids, others = (tk.encode(PROBE, bos=False) for tk in (first, other))
        except (InputError, *MALFORMED):  # nothing needs it
            continue
        if ids != others:
            added, known = ({t.content for t in tk.added.values()} for tk in (first, other))
            # the file that trained the model, unless a fine-tune has added tokens to the other
            trained = names[0] == "tokenizer.json" and name.endswith(".json") and added <= known
            warn_once(f"{folder.path}: {names[0]} and {name} give different tokens; {name if trained else names[0]} is "
                      "read, remove the wrong one")  # fmt: skip
            if trained:
                return other
    return first


def _load_file(folder: Folder, name: str) -> Tokenizer:
    if name == "tokenizer.json":
        return from_tokenizer_json(folder)
    if name == "merges.txt":
        return from_vocab_and_merges(folder)
    if name.endswith(".json"):
        return TiktokenTokenizer.tekken(folder, name)
    data = folder.read(name)
    kind = TiktokenTokenizer.llama3 if TIKTOKEN_LINE.match(data) else SentencePieceTokenizer
    return kind(folder, name, data)
