"""Vocabularies that tiktoken encodes: Meta's `tokenizer.model` of Llama 3, and Mistral's `tekken.json`."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

import tiktoken
from tokenizers import AddedToken

from loading.tokenizer.base import Tokenizer
from loading.tokenizer.folder import Folder
from loading.tokenizer.library import LLAMA3

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
# Llama 3.1's names by their offset from the last rank; the others of the 256 are reserved_special_token_N.
LLAMA3_SPECIAL = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id"}
LLAMA3_SPECIAL |= {7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}
# Tekken's names of ids 0 to 19 if the file has none (Nemo, Pixtral); further special tokens are <SPECIAL_N>.
TEKKEN_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                  "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]",
                  "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
                  "[TOOL_CONTENT]"]  # fmt: skip
# Two alternatives of Llama 3's and Tekken's patterns, and equivalents that backtrack less: on a million blanks the
# originals exceed the backtracking limit of tiktoken's regular expressions.
LINEAR = {r"\s*[\r\n]+": r"(?:[^\S\r\n]*+[\r\n]++)++", r"\s+(?!\S)": r"(?:\s{100}(?=\s\s))*+\s+(?!\S)"}


class TiktokenTokenizer(Tokenizer):
    """A vocabulary for tiktoken. ranks: bytes -> id, in the order of merges; special: id -> special token."""

    def __init__(
        self,
        folder: Folder,
        name: str,
        ranks: dict[bytes, int],
        pattern: str,
        special: dict[int, AddedToken],
        bos: str | None,
        eos: str | None,
        turn_ends: Iterable[str] = (),
    ):
        ids = set(ranks.values())
        if len(ids) != len(ranks) or any(bytes([b]) not in ranks for b in range(256)) or ids & special.keys():
            raise folder.error(name, "repeats tokens or ranks, or lacks single bytes; download it again")
        special = {id: token for id, token in folder.added_tokens() if id is not None} or special
        self.special_ids = {token.content: id for id, token in special.items()}
        self.pieces = {rank: data for data, rank in ranks.items()}
        self.pieces |= {id: b"" if token.special else token.content.encode() for id, token in special.items()}
        self.vocab_size = max(self.pieces) + 1
        for alternative, linear in LINEAR.items():
            pattern = pattern.replace(alternative, linear)
        self.bpe = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        stop_ids = folder.stop_ids()
        if not folder.config:  # Meta's folder does not say where a turn ends
            stop_ids |= {self.special_ids[t] for t in turn_ends if t in self.special_ids}
        names = folder.special_names(
            bos=bos if bos in self.special_ids else None, eos=eos if eos in self.special_ids else None
        )
        super().__init__(folder.path, special, names, stop_ids, folder.adds_bos(True), folder.chat_template)

    @classmethod
    def llama3(cls, folder: Folder, name: str, data: bytes) -> TiktokenTokenizer:
        """A file with one "base64(token) rank" per line; 256 special tokens follow the ranks."""
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(data.splitlines(), 1):
            if not TIKTOKEN_LINE.fullmatch(line):
                raise folder.error(name, f"line {number} is {line[:40]!r}, expected base64 and a rank")
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        if len(ranks) != number:
            raise folder.error(name, "repeats tokens; download it again")
        reserved = (f"reserved_special_token_{i}" for i in range(256))
        names = [f"<|{LLAMA3_SPECIAL.get(i) or next(reserved)}|>" for i in range(256)]
        special = {max(ranks.values()) + 1 + i: _special(name) for i, name in enumerate(names)}
        ends = ("<|eot_id|>", "<|eom_id|>")
        return cls(folder, name, ranks, LLAMA3, special, "<|begin_of_text|>", "<|end_of_text|>", ends)

    @classmethod
    def tekken(cls, folder: Folder, name: str) -> TiktokenTokenizer:
        """A file whose ids are special tokens first, then as much of the vocabulary as its configuration says."""
        spec = folder.json(name)
        config, given = spec["config"], spec.get("special_tokens")
        n = config["default_num_special_tokens"]
        names = {t["rank"]: t["token_str"] for t in given} if given else dict(enumerate(TEKKEN_SPECIAL))
        special = {i: _special(names.get(i, f"<SPECIAL_{i}>")) for i in range(n)}
        vocab = spec["vocab"][: config["default_vocab_size"] - n]
        ranks = {base64.b64decode(token["token_bytes"]): token["rank"] + n for token in vocab}
        return cls(folder, name, ranks, config["pattern"], special, "<s>", "</s>")

    def id_of(self, token: str) -> int | None:
        return self.special_ids.get(token)

    def piece(self, id: int) -> bytes:
        return self.pieces.get(id, b"")

    def encode_text(self, text: str, parse_special: bool, first: bool = True) -> list[int]:
        ids: list[int] = []
        for part, id in self.split_added(text, parse_special):
            ids += self.bpe.encode_ordinary(part) if id is None else [id]
        return ids


def _special(content: str) -> AddedToken:
    return AddedToken(content, special=True, normalized=False)
