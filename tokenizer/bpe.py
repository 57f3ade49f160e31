"""`tokenizer.json`, or `vocab.json` + `merges.txt`, with a BPE model: byte-level (Llama 3, Qwen, Nemo), or with byte
fallback (Llama 2, Mistral)."""

from __future__ import annotations

import functools
import heapq
import re
from typing import Any

from tokenizer.base import SPACE, Tokenizer
from tokenizer.folder import Folder, sequence
from tokenizer.pretokenize import CHAR_BYTES, QWEN2, byte_level, metaspace, normalizer

FALLBACK_DECODER = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
Merges = dict[tuple[int, int], tuple[int, int]]  # (left id, right id) -> (rank, merged id)


class BPETokenizer(Tokenizer):
    """`tokenizer.json` with a BPE model: byte-level (Llama 3, Qwen, Nemo), or with byte fallback (Llama 2, Mistral).

    Merging goes by pairs of ids, as in `tokenizers`, and not through tiktoken, which goes by the merged bytes: the two
    differ where a token has two merges, where its merge cannot be reached, or where ids are not in merge order.
    """

    def __init__(self, folder: Folder, spec: dict):
        model = spec["model"]
        kind = model.get("type", "BPE" if "merges" in model else None)  # GPT-2's own file names no type
        if kind != "BPE":
            raise folder.unsupported("model type", kind, "BPE")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise folder.unsupported(f"BPE option {key}", model[key], "none")
        self.vocab: dict[str, int] = model["vocab"]
        self.merges = _read_merges(folder, self.vocab, model["merges"])
        self.ignore_merges = bool(model.get("ignore_merges"))
        self.byte_fallback = bool(model.get("byte_fallback"))
        byte_tokens = [f"<0x{b:02X}>" for b in range(256)] if self.byte_fallback else list(CHAR_BYTES)
        if missing := [token for token in byte_tokens if token not in self.vocab]:
            raise folder.error("", f"the vocabulary lacks {len(missing)} of the 256 bytes, {missing[0]!r} first")

        decoder = sequence(spec.get("decoder"), "decoders")
        pre = sequence(spec.get("pre_tokenizer"), "pretokenizers")
        if self.byte_fallback:
            if decoder not in (FALLBACK_DECODER, FALLBACK_DECODER[:-1]):
                raise folder.unsupported("decoder", decoder, "Replace, ByteFallback, Fuse and Strip as in Llama 2")
            self._pieces = metaspace(folder, pre)
            self.invalid_bytes = "replace_each_byte"
            to_bytes = _fallback_bytes
        else:
            if [step["type"] for step in decoder] != ["ByteLevel"]:
                raise folder.unsupported("decoder", decoder, "ByteLevel")
            self._pieces = byte_level(folder, pre)
            to_bytes = _byte_level_bytes
        self._bpe = functools.lru_cache(maxsize=1 << 16)(self._merge_piece)  # text repeats its words

        added = folder.added_tokens(self.vocab, spec)
        for token in added.values():
            if (id := self.vocab.get(token.content, token.id)) != token.id:
                raise folder.error("", f"added token {token.content!r} has id {token.id}, but {id} in the vocabulary")
        token_bytes = {id: to_bytes(token) for token, id in self.vocab.items()}
        token_bytes |= {id: to_bytes(token.content) for id, token in added.items()}
        if decoder == FALLBACK_DECODER:
            self.fallback = frozenset(self.vocab[t] for b in range(256) if (t := f"<0x{b:02X}>") in self.vocab)
            self.leading_space = frozenset(id for id, data in token_bytes.items() if data.startswith(b" "))
        bos = _template_bos(folder, spec.get("post_processor"))
        super().__init__(
            folder,
            self.vocab,
            token_bytes,
            added,
            bos=bos or folder.special("bos_token"),
            eos=folder.special("eos_token"),
            adds_bos=bos is not None,
            normalize=normalizer(folder, spec.get("normalizer")),
        )

    def _encode(self, text: str, first: bool) -> list[int]:
        return [id for piece in self._pieces(text, first) for id in self._bpe(piece)]

    def _merge_piece(self, piece: str) -> list[int]:
        if self.ignore_merges and piece in self.vocab:
            return [self.vocab[piece]]
        ids: list[int] = []
        for char in piece:
            id = self.vocab.get(char)  # always there in a byte-level vocabulary
            ids += [id] if id is not None else [self.vocab[f"<0x{b:02X}>"] for b in char.encode()]
        return merge_pairs(ids, self.merges)


def merge_pairs(ids: list[int], merges: Merges) -> list[int]:
    """Joins neighbours, the lowest rank first and the leftmost of equals, until no pair can be joined: O(n log n)."""
    n = len(ids)
    ids = [*ids, -1]  # -1: joined into its left neighbour. The last one ends the text, and as ids[-1] it begins it
    after, before = list(range(1, n + 2)), list(range(-1, n))
    heap: list[tuple[int, int, int]] = []

    def consider(i: int, j: int) -> None:
        if (merge := merges.get((ids[i], ids[j]))) is not None:
            heapq.heappush(heap, (merge[0], i, merge[1]))

    for i in range(n - 1):
        consider(i, i + 1)
    while heap:
        rank, i, merged = heapq.heappop(heap)
        j = after[i]
        if merges.get((ids[i], ids[j])) != (rank, merged):  # one of the two has been joined to another since
            continue
        ids[i], ids[j] = merged, -1
        after[i] = after[j]
        before[after[i]] = i
        consider(before[i], i)
        consider(i, after[i])
    return [id for id in ids if id >= 0]


def _read_merges(folder: Folder, vocab: dict[str, int], merges: list) -> Merges:
    """Pairs written "left right" or [left, right], in order of rank; of a pair given twice the last counts."""
    table = {}
    for rank, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if len(parts) != 2 or any(token not in vocab for token in (*parts, "".join(parts))):
            raise folder.error("", f"merge {rank} is {merge!r}, expected two tokens that join into a third")
        table[vocab[parts[0]], vocab[parts[1]]] = rank, vocab["".join(parts)]
    return table


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([CHAR_BYTES[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


def _fallback_bytes(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


def _template_bos(folder: Folder, node: dict | None) -> str | None:
    """The token that the post_processor puts before a text."""
    bos: Any = None
    for step in sequence(node, "processors"):
        match step:
            case {"type": "ByteLevel"}:  # moves offsets only
                pass
            case {"type": "TemplateProcessing", "single": [{"Sequence": _}]}:
                pass
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": bos}}, {"Sequence": _}]}:
                pass
            case _:
                raise folder.unsupported("post_processor", step, "a template of at most one token before the text")
    return bos


def spec_from_vocab(folder: Folder) -> dict:
    """`vocab.json` + `merges.txt` as the tokenizer.json that Hugging Face makes of them. Only the name of the
    tokenizer's class, or of the model, says which pattern goes with them."""
    name = folder.config.get("tokenizer_class") or folder.json("config.json").get("model_type") or "not named"
    pre: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": bool(folder.config.get("add_prefix_space"))}
    normal_form = None
    if name.lower().startswith("qwen"):
        split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated"}
        pre = {"type": "Sequence", "pretokenizers": [split, pre | {"use_regex": False}]}
        normal_form = {"type": "NFC"}
    elif not name.lower().startswith("gpt2"):
        expected = "expected Qwen2Tokenizer or GPT2Tokenizer; add its tokenizer.json"
        raise folder.error("", f"vocab.json and merges.txt are of tokenizer class {name}, {expected}")
    lines = [line for line in folder.text("merges.txt").split("\n") if line.strip() and not line.startswith("#version")]
    model = {"type": "BPE", "vocab": folder.json("vocab.json"), "merges": [line.rstrip("\r") for line in lines]}
    return {"model": model, "normalizer": normal_form, "pre_tokenizer": pre, "decoder": {"type": "ByteLevel"}}
