"""The text that a chat template writes around a prompt and a question about it, which form one turn.

A prompt that is read once, before its questions are known, ends in the middle of a user's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loading.tokenizer.base import Tokenizer
from runtime.errors import InputError


@dataclass(frozen=True)
class Chat:
    """Prompts are a user's messages, written by the checkpoint's chat template. system: a message before the first;
    variables: those of the template, such as dict(enable_thinking=False)."""

    system: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def opening(self) -> list[dict[str, str]]:
        """The messages before the user's first."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def encode(self, tk: Any, prompt: str) -> list[int]:
        """Ids of a conversation up to the answer; names of special tokens in the prompt are plain text."""
        return tk.encode_chat([*self.opening, {"role": "user", "content": prompt}], **self.variables)

    @staticmethod
    def check(chat: Any) -> Chat | None:
        """Raises InputError unless this is a Chat, or None: no template."""
        if chat is not None and not isinstance(chat, Chat):
            raise InputError(f"chat={chat!r} is no Chat: give Chat(), or Chat(system, variables), from engine")
        return chat

    def parts(self, tk: Any) -> ChatParts:
        """The text around a prompt and a question about it. Raises InputError as `parts_of`."""
        return parts_of(tk, self.opening, **self.variables)


@dataclass(frozen=True)
class ChatParts:
    """A chat template's text before a user's text, after it, and between an answer and the next question."""

    head: str = ""
    tail: str = ""
    between: str = "\n"

    def tokens(self, tk: Tokenizer) -> int:
        """The number of tokens of a prompt beside its text."""
        return len(tk.encode("", bos=True) if not self.head else self.opening(tk, "")) + len(self.closing(tk, ""))

    def opening(self, tk: Tokenizer, context: str) -> list[int]:
        """Ids of a prompt's beginning. Names of special tokens in the context are plain text."""
        if not self.head:
            return tk.encode(context, bos=True)
        head, context = _before(tk, lambda text: tk.encode(text, bos=False), self.head, context)
        return head + tk.encode_after(head, context)

    def closing(self, tk: Tokenizer, question: str, prefix: str = "", turn: int = 0) -> list[int]:
        """Ids of a question, the turn-th about one context, and of `prefix`, the beginning of its answer."""
        between = self.between if turn else ""
        if not self.tail:
            return tk.encode_after(None, between + question + prefix, True)
        start, question = _before(tk, lambda text: tk.encode_after(None, text, True), between, question)
        ids = start + tk.encode_after(start or None, question)
        ids += tk.encode_after(ids or None, self.tail, True)
        return ids + tk.encode_after(ids, prefix)


def _before(tk: Tokenizer, encode: Callable[[str], list[int]], own: str, text: str) -> tuple[list[int], str]:
    """Ids of a template's own text, and the text after it: with a blank before it, which belongs to its first word."""
    ids = encode(own)
    if own.endswith(" ") and text and ids and ids[-1] not in tk.added:
        return encode(own[:-1]), f" {text}"
    return ids, text


def parts_of(tk: Tokenizer, before: Sequence[dict[str, str]] = (), /, **variables: Any) -> ChatParts:
    """The parts of the checkpoint's chat template, with messages `before` a user's first. Raises InputError if there is
    no template or it cannot render a conversation."""
    marks = ["user-said", "was-answered", "asks-again"]
    said = [dict(role=r, content=c) for r, c in zip(("user", "assistant", "user"), marks, strict=True)]
    first, whole = (tk.apply_chat_template([*before, *messages], **variables) for messages in (said[:1], said))
    head, mark, tail = first.partition(marks[0])
    between = whole.partition(marks[1])[2].partition(marks[2])[0]
    if not mark or marks[0] in tail:
        raise InputError(f"{tk.source}: the chat template does not write a user's text once, as it is")
    return ChatParts(head, tail, between)


def chat_parts(tk: Tokenizer, chat: bool) -> ChatParts:
    """`parts_of` or, if `chat` is off or the checkpoint has no usable template, those of plain text."""
    try:
        return parts_of(tk) if chat and tk.template() else ChatParts()
    except InputError:
        return ChatParts()
