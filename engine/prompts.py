"""Prompts and questions, given as text or as token ids, as checked token ids."""

from __future__ import annotations

from typing import Any

from loading.tokenizer.turns import Chat, ChatParts
from model import ModelArgs
from runtime.errors import InputError


class Prompts:
    """Encodes for one model. Whatever is not text, or a list of ids of this model's tokens, is an InputError."""

    def __init__(self, tokenizer: Any, args: ModelArgs):
        self.tokenizer, self.args = tokenizer, args

    def check_ids(self, ids: Any) -> list[int]:
        """The ids as a list."""
        if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
            what = f"{type(ids).__name__} of {type(ids[0]).__name__}" if isinstance(ids, list) else type(ids).__name__
            raise InputError(f"a prompt is a {what}: give text or a list of token ids, of a tensor its tolist()")
        self.args.check_ids(ids)
        return list(ids)

    def encode(self, prompt: str | list[int], chat: Chat | None = None) -> list[int]:
        """Ids of one prompt, which must have some."""
        if isinstance(prompt, str):
            tk, chat = self.tokenizer, Chat.check(chat)
            prompt = chat.encode(tk, prompt) if chat else tk.encode(prompt, bos=True)
        if not (ids := self.check_ids(prompt)):
            raise InputError("a prompt has no tokens: give some text")
        return ids

    def rows(self, prompts: Any, chat: Chat | None = None, turn: ChatParts | None = None) -> list[list[int]]:
        """Ids of a text, or of a list of texts or of lists of ids; each text is encoded once. turn: the chat's turn
        that the prompts begin, and that stays open."""
        given = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(given, list | tuple) or given and all(type(p) is int for p in given):
            raise InputError(f"the prompts are a {type(given).__name__}: give a list, of texts or of lists of token "
                             "ids, as [[1, 2, 3]]")  # fmt: skip
        if not given:
            raise InputError("no prompt was given: give a text, or a list of them")
        opened = {p: turn.opening(self.tokenizer, p) if turn else p for p in given if isinstance(p, str)}
        ids = {p: self.encode(x, chat) for p, x in opened.items()}
        return [ids[p] if isinstance(p, str) else self.encode(p) for p in given]

    def question(self, question: str | list[int], turn: ChatParts | None) -> list[int]:
        """Ids of a question about a prompt. turn: that of the chat, which it ends."""
        if not isinstance(question, str):
            return self.check_ids(question)
        return self.check_ids((turn or ChatParts()).closing(self.tokenizer, question)) if turn or question else []
