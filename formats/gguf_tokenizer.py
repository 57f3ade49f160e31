"""A GGUF file's tokenizer -> the files that load_tokenizer reads: a SentencePiece proto, or a tokenizer.json.

"llama" is SentencePiece's BPE: pieces with scores; llama.cpp puts a space before the text and after every special
token, which is SentencePiece's own habit too. "gpt2" is byte-level BPE; `tokenizer.ggml.pre` names how text is cut.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from errors import InputError, short
from formats.gguf_config import stop_ids
from formats.gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # token types, SentencePiece's numbers

# How text is cut, by the names of llama.cpp's llama-vocab.cpp; the patterns are the models' tokenizer.json's.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
           r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]"]
# name -> (patterns one after another, whole words before merges, whether a text begins with bos, Unicode form)
PRE: dict[str, tuple[list[str], bool, bool, str | None]] = {
    "llama-bpe": ([_LLAMA3], True, True, None),
    "llama3": ([_LLAMA3], True, True, None),
    "llama-v3": ([_LLAMA3], True, True, None),
    "qwen2": ([_QWEN2], False, False, "NFC"),
    "deepseek-r1-qwen": ([_QWEN2], False, True, "NFC"),
    "tekken": ([_TEKKEN], True, True, None),
    "smollm": ([r"\p{N}", _GPT2], False, False, None),
    "gpt-2": ([_GPT2], False, False, None),
    "default": (_DEFAULT, False, False, None),
}


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write the files into a folder that is there. InputError if the tokenizer is none that is read exactly."""
    model, tokens = file.text("tokenizer.ggml.model"), file.texts("tokenizer.ggml.tokens")
    types = file.array("tokenizer.ggml.token_type", len(tokens))
    kinds = [NORMAL] * len(tokens) if types is None else [int(t) for t in types]
    if file.flag("tokenizer.ggml.add_eos_token", False):
        raise file.error("tokenizer.ggml.add_eos_token would end every prompt, which is not supported")
    if model == "llama":
        files = _sentencepiece(file, tokens, kinds)
        adds_bos = True
    elif model == "gpt2":
        pre = file.text("tokenizer.ggml.pre", "default")
        if pre not in PRE:
            raise file.error(f"tokenizer.ggml.pre is {short(pre)}, which is not supported, expected {', '.join(PRE)}")
        files, adds_bos = _byte_level(file, tokens, kinds, pre), PRE[pre][2]
    else:
        raise file.error(f"tokenizer.ggml.model is {short(model)}, which is not supported, expected llama or gpt2")
    config = _config(file, tokens)
    config |= {"add_bos_token": file.flag("tokenizer.ggml.add_bos_token", adds_bos), "add_eos_token": False}
    if model == "llama":
        config["add_prefix_space"] = file.flag("tokenizer.ggml.add_space_prefix", True)
    files["tokenizer_config.json"] = json.dumps(config).encode()
    files["generation_config.json"] = json.dumps({"eos_token_id": stop_ids(file)}).encode()
    try:
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as e:
        raise InputError(f"cannot write {e.filename}: {e.strerror}") from None


def _config(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by their text, and the chat template."""
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (key := f"tokenizer.ggml.{key}_token_id") in file.metadata:
            config[f"{name}_token"] = tokens[_id(file, key, len(tokens))]
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.text("tokenizer.chat_template")
    return config


def _id(file: GGUFFile, key: str, n: int) -> int:
    if not 0 <= (id := file.number(key)) < n:
        raise file.error(f"{key} is {id}, expected one of {n} tokens")
    return id


def _byte_level(file: GGUFFile, tokens: list[str], kinds: list[int], pre: str) -> dict[str, bytes]:
    """tokenizer.json. Unused ids (the converter pads the vocabulary) have no token."""
    patterns, whole_words, _, form = PRE[pre]
    vocab: dict[str, int] = {}
    for id, token in enumerate(tokens):
        if kinds[id] == UNUSED:
            continue
        if token in vocab:
            raise file.error(f"token {short(token)} has ids {vocab[token]} and {id}: convert it again")
        vocab[token] = id
    added = [{"id": id, "content": token, "special": kinds[id] != USER, "normalized": False}
             for token, id in vocab.items() if kinds[id] in (CONTROL, UNKNOWN, USER)]  # fmt: skip
    split = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": file.texts("tokenizer.ggml.merges"),
             "ignore_merges": whole_words}  # fmt: skip
    spec = {"version": "1.0", "added_tokens": added, "normalizer": {"type": form} if form else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, byte_level]},
            "post_processor": None, "decoder": byte_level, "model": model}  # fmt: skip
    return {"tokenizer.json": json.dumps(spec).encode()}


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int]) -> dict[str, bytes]:
    """tokenizer.model, as sentencepiece_model.proto lays it out: pieces (1), trainer_spec (2), normalizer_spec (3)."""
    scores = file.array("tokenizer.ggml.scores", len(tokens))
    if scores is None or not np.isfinite(scores).all() or not all(NORMAL <= k <= BYTE for k in kinds):
        raise file.error("has no finite tokenizer.ggml.scores, or token types beside 1 to 6: convert it again")
    out = bytearray()
    for token, score, kind in zip(tokens, scores.tolist(), kinds, strict=True):
        text = token.encode()
        out += _field(1, _field(1, text) + b"\x15" + struct.pack("<f", score) + _field(3, kind))
    trainer = _field(3, 2) + _field(4, len(tokens)) + _field(35, int(BYTE in kinds))  # BPE, vocab_size, byte_fallback
    prefix = int(file.flag("tokenizer.ggml.add_space_prefix", True))
    extra = int(file.flag("tokenizer.ggml.remove_extra_whitespaces", False))
    out += _field(2, trainer) + _field(3, _field(1, b"identity") + _field(3, prefix) + _field(4, extra))
    return {"tokenizer.model": bytes(out)}


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer: a whole number, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value & (1 << 64) - 1)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)
