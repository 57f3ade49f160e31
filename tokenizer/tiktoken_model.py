"""`tokenizer.model` as Meta publishes it for Llama 3, in tiktoken's text format, encoded by tiktoken."""

from __future__ import annotations

import base64
import re

import tiktoken

from tokenizer.base import Tokenizer
from tokenizer.folder import AddedToken, Folder
from tokenizer.pretokenize import LLAMA3, isolate

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
# Llama 3.1's names by their offset from the last rank; the others of the 256 are reserved_special_token_N.
LLAMA3_SPECIAL = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id"}
LLAMA3_SPECIAL |= {7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}


class TiktokenTokenizer(Tokenizer):
    """Llama 3's `tokenizer.model`: one "base64(token) rank" a line, the rank being the id and the merge priority, then
    256 special tokens."""

    def __init__(self, folder: Folder, data: bytes):
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(data.splitlines(), 1):
            if not TIKTOKEN_LINE.fullmatch(line):
                raise folder.error("tokenizer.model", f"line {number} is {line[:40]!r}, expected base64 and a rank")
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        token_bytes = {rank: token for token, rank in ranks.items()}
        if len(token_bytes) != number or any(bytes([b]) not in ranks for b in range(256)):
            raise folder.error("tokenizer.model", "repeats tokens or ranks, or lacks single bytes; download it again")
        added = folder.added_tokens({}, {}) or self._llama3_special(len(ranks))
        names = {token.content: token.content for token in added.values()}
        # Our splitter runs first: tiktoken's own panics on a million blanks. Its pattern here takes a piece as a whole.
        self.split = isolate(LLAMA3)
        self.bpe = tiktoken.Encoding("llama3", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
        super().__init__(
            folder,
            {},
            token_bytes | {id: token.content.encode() for id, token in added.items()},
            added,
            bos=folder.special("bos_token", names.get("<|begin_of_text|>")),
            eos=folder.special("eos_token", names.get("<|end_of_text|>")),
            adds_bos=True,
        )
        if not folder.config:  # Meta's own folder says nowhere where a turn ends
            self.eos_ids |= {self.ids[name] for name in ("<|eot_id|>", "<|eom_id|>") if name in self.ids}

    @staticmethod
    def _llama3_special(base: int) -> dict[int, AddedToken]:
        reserved = (f"reserved_special_token_{i}" for i in range(256))
        names = [f"<|{LLAMA3_SPECIAL.get(i) or next(reserved)}|>" for i in range(256)]
        return {base + i: AddedToken(base + i, name, special=True) for i, name in enumerate(names)}

    def _encode(self, text: str, first: bool) -> list[int]:
        return [id for piece in self.split(text) for id in self.bpe.encode_ordinary(piece)]
