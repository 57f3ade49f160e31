"""A prompt and the questions about it as one turn of a chat each: what a template writes around them.

A prompt that is read once, before its questions are known, ends in the middle of a user's turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from errors import InputError
from tokenizer.base import Tokenizer


@dataclass(frozen=True)
class ChatParts:
    """What a chat template writes before a user's text, after it, and between an answer and the next question."""

    head: str = ""
    tail: str = ""
    between: str = "\n"

    def tokens(self, tk: Tokenizer) -> int:
        """How many tokens a prompt has beside its text."""
        return len(tk.encode("", bos=True) if not self.head else self.opening(tk, "")) + len(self.closing(tk, ""))

    def opening(self, tk: Tokenizer, context: str) -> list[int]:
        """The prompt's beginning. A text's words that name special tokens are text."""
        if not self.head:
            return tk.encode(context, bos=True)
        return tk.encode(self.head, bos=False) + tk.encode_text(context, False, first=False)

    def closing(self, tk: Tokenizer, question: str, prefix: str = "", turn: int = 0) -> list[int]:
        """A question, in turn `turn` of those on one context, and the beginning of its answer."""
        if not self.tail:
            return tk.encode((self.between if turn else "") + question + prefix, bos=False)
        start = tk.encode(self.between, bos=False) if turn else []
        ids = start + (tk.encode_text(question, False, first=False) if question else [])
        return ids + tk.encode(self.tail, bos=False) + (tk.encode_text(prefix, False, first=False) if prefix else [])


def parts_of(tk: Tokenizer, before: Sequence[dict[str, str]] = (), **variables: Any) -> ChatParts:
    """Of the checkpoint's chat template, with these messages before a user's first. InputError if there is none, or it
    takes no conversation."""
    marks = ["user-said", "was-answered", "asks-again"]
    said = [dict(role=r, content=c) for r, c in zip(("user", "assistant", "user"), marks, strict=True)]
    first, whole = (tk.apply_chat_template([*before, *messages], **variables) for messages in (said[:1], said))
    head, mark, tail = first.partition(marks[0])
    between = whole.partition(marks[1])[2].partition(marks[2])[0]
    if not mark or marks[0] in tail:
        raise InputError(f"{tk.source}: the chat template does not write a user's text once, as it is")
    return ChatParts(head, tail, between)


def chat_parts(tk: Tokenizer, chat: bool) -> ChatParts:
    """`parts_of`, or of a plain text if the checkpoint has no template for it, or `chat` is off."""
    try:
        return parts_of(tk) if chat and tk.template() else ChatParts()
    except InputError:
        return ChatParts()
