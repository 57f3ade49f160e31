"""The tokenizer of a model with random weights: bytes in, token numbers out."""

from __future__ import annotations

from collections.abc import Sequence

from loading.tokenizer.base import Stream


class RandomVocabulary:
    eos_ids: frozenset[int] = frozenset()
    invalid_bytes = "replace"
    strips_all_leading = False
    added: dict[int, object] = {}

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return list(text.encode())

    def encode_after(self, before: Sequence[int] | None, text: str, parse_special: bool = False) -> list[int]:
        return self.encode(text)

    def apply_chat_template(self, messages: Sequence[dict], /, **variables: object) -> str:
        return "".join(m["content"] for m in messages)

    def encode_chat(self, messages: Sequence[dict], /, **variables: object) -> list[int]:
        return self.encode(self.apply_chat_template(messages))

    def piece(self, id: int) -> bytes:
        return b" %d" % id

    first_piece = piece

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.piece, ids)).decode()

    def stream(self, stop: Sequence[str] = ()) -> Stream:
        return Stream(self, stop)
