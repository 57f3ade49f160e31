"""What tokenizer.json does to a text before merging: its normalizers, and the pre-tokenizers that cut it into pieces.
Anything that cannot be done exactly as the `tokenizers` library does it is refused by name."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable

import regex

from tokenizer.base import SPACE
from tokenizer.folder import Folder, sequence

Splitter = Callable[[str], list[str]]

# The published pre-tokenization patterns: GPT-2 is what ByteLevel(use_regex) means, the others are written out in the
# checkpoints' tokenizer.json and are needed here only for the folders that do not have one.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = WORDS % r"\p{N}{1,3}"
QWEN2 = WORDS % r"\p{N}"

# GPT-2's printable alphabet for bytes: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_CHARS = {b: chr(b) for b in _PRINTABLE} | {
    b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}
CHAR_BYTES = {c: b for b, c in BYTE_CHARS.items()}

# Oniguruma (Ruby syntax) runs these patterns in `tokenizers`. What is listed here means the same to `regex`; anchors,
# \w, \h, &&, nested sets, inline flags and possessive {n}+ do not.
_ESCAPE = r"\\(?:[pP]\{\w+\}|[sSdDrntf]|[^\w\s])"
_PORTABLE_PARTS = (
    _ESCAPE,
    rf"\[\^?(?:{_ESCAPE}|(?!&&)[^\\\[\]])+\]",  # a set
    r"\(\?(?:i?:|<?[=!])",  # (?: (?i: (?= (?! (?<= (?<!
    r"\((?!\?)",
    r"\{\d+(?:,\d*)?\}(?!\+)",
    r"[^\\\[\](){}^$]",
    r"\)",
)
_PORTABLE = re.compile(f"(?:{'|'.join(_PORTABLE_PARTS)})+")


def _replace(old: str, new: str, text: str) -> str:
    return text.replace(old, new)


def normalizer(folder: Folder, node: dict | None) -> Callable[[str], str]:
    """Normalizers, each applied to the text of the one before."""
    steps: list[Callable[[str], str]] = []
    for step in sequence(node, "normalizers"):
        match step:
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" as form}:
                steps.append(functools.partial(unicodedata.normalize, form))
            case {"type": "Prepend", "prepend": str(prefix)}:
                steps.append(prefix.__add__)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                steps.append(functools.partial(_replace, old, new))
            case _:
                raise folder.unsupported("normalizer", step, "NFC, NFD, NFKC, NFKD, Prepend or Replace of a string")
    return lambda text: functools.reduce(lambda t, step: step(t), steps, text)


def isolate(pattern: str) -> Splitter:
    """Split(pattern, behavior="Isolated"): the matches, and what is between them."""
    finditer = regex.compile(pattern).finditer

    def split(text: str) -> list[str]:
        pieces, at = [], 0
        for match in finditer(text):
            start, end = match.span()
            if start > at:
                pieces.append(text[at:start])
            if end > start:
                pieces.append(text[start:end])
            at = end
        return [*pieces, text[at:]] if at < len(text) else pieces

    return split


def byte_level(folder: Folder, steps: list[dict]) -> Callable[[str, bool], list[str]]:
    """Pre-tokenizers that end in ByteLevel, each applied to the pieces of the one before."""
    splitters: list[Splitter] = []
    for i, step in enumerate(steps):
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                if not _PORTABLE.fullmatch(pattern):
                    raise folder.unsupported("pattern", pattern, "only what regex reads as Oniguruma does")
                splitters.append(isolate(pattern))
            case {"type": "Split", "pattern": {"String": text}, "behavior": "Isolated"}:
                splitters.append(isolate(regex.escape(text)))
            case {"type": "Digits"}:
                splitters.append(isolate(r"\p{N}" if step.get("individual_digits") else r"\p{N}+"))
            case {"type": "ByteLevel"} if i == len(steps) - 1:
                if step.get("add_prefix_space", True):
                    splitters.append(lambda piece: [piece if piece.startswith(" ") else " " + piece])
                if step.get("use_regex", True):
                    splitters.append(isolate(GPT2))
            case _:
                raise folder.unsupported("pre_tokenizer", step, "Split (Isolated), Digits, and ByteLevel at the end")
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise folder.unsupported("pre_tokenizer", steps, "one that ends in ByteLevel")

    def pieces(text: str, first: bool) -> list[str]:
        parts = [text]
        for split in splitters:
            parts = [piece for part in parts for piece in split(part)]
        return [part.encode().decode("latin-1").translate(BYTE_CHARS) for part in parts]

    return pieces


def metaspace(folder: Folder, steps: list[dict]) -> Callable[[str, bool], list[str]]:
    """No pre-tokenizer (the normalizer wrote the spaces), or Metaspace. It does not repeat a leading space."""
    match steps:
        case []:
            return lambda text, first: [text]
        case [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}]:

            def pieces(text: str, first: bool) -> list[str]:
                text = text.replace(" ", SPACE)
                prefix = scheme == "always" or (scheme == "first" and first)
                return [SPACE + text if prefix and not text.startswith(SPACE) else text]

            return pieces
    raise folder.unsupported("pre_tokenizer", steps, "none or Metaspace with split=false beside byte_fallback")
