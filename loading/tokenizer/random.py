"""The tokenizer of a model with random weights: bytes in, token numbers out."""

from __future__ import annotations


class RandomVocabulary:
    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict], **variables: object) -> list[int]:
        return self.encode("".join(m["content"] for m in messages))

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)

    def stream(self) -> RandomVocabulary:
        return self

    def put(self, token: int) -> str:
        return f" {token}"

    def flush(self) -> str:
        return ""
