"""The base of all tokenizers: special tokens, streaming, and chats whose text cannot forge special tokens."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from loading.tokenizer import chat
from runtime.errors import InputError, short, warn_once

# SentencePiece and ByteFallback give each byte of an invalid sequence its own U+FFFD; "replace" gives one for a
# truncated character.
codecs.register_error("replace_each_byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]


class Tokenizer:
    """Base class. A subclass defines `encode_text`, `piece` (the bytes of every id) and `id_of`.

    source: the file or folder that messages name; added: id -> token that is matched in text as a whole; names: the
    texts of `bos_token`, `eos_token` ...; adds_bos: whether texts begin with bos; template: returns the chat template.
    """

    invalid_bytes = "replace"  # the codec error handler of decoding
    fallback: frozenset[int] = frozenset()  # single bytes for characters that have no piece, and unused pieces
    strips_all_leading = False  # whether a text's leading spaces are dropped in decoding until there is text
    vocab_size: int

    def __init__(
        self,
        source: Path,
        added: dict[int, AddedToken],
        names: dict[str, str],
        stop_ids: Iterable[int],
        adds_bos: bool,
        template: Callable[[], str],
    ):
        self.source, self.added, self.names, self.template = source, added, names, template
        self.bos_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        self.eos_ids = frozenset(stop_ids) | (set() if eos is None else {eos})
        self.prefix = [self.bos_id] if adds_bos and self.bos_id is not None else []  # ids that a text begins with

    def encode_text(self, text: str, parse_special: bool, first: bool = True) -> list[int]:
        """Ids of a text without bos. first: False for the rest of a text that was cut at a special token."""
        raise NotImplementedError

    def piece(self, id: int) -> bytes:
        """The bytes that an id stands for; none for a special token or an unknown id."""
        raise NotImplementedError

    def first_piece(self, id: int) -> bytes:
        """`piece` at the start of a text, where many pieces lose a space."""
        return self.piece(id)

    def id_of(self, token: str) -> int | None:
        raise NotImplementedError

    def _special_id(self, name: str) -> int | None:
        if (token := self.names.get(name)) is None:
            return None
        if not isinstance(token, str) or (id := self.id_of(token)) is None:
            raise InputError(f"{self.source}: {name} {token!r} is not in the vocabulary; correct tokenizer_config.json")
        return id

    @property
    def adds_bos(self) -> bool:
        return bool(self.prefix)

    @functools.cached_property
    def text_ids(self) -> list[int]:
        """Ids that stand for pieces of text, without special tokens, fallback bytes and padding of the vocabulary."""
        return [id for id in range(self.vocab_size) if id not in self.fallback and self.piece(id)]

    # ---- text and ids ----

    def encode(self, text: str, bos: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids. bos: prepend the bos token if the checkpoint does so. parse_special=False: read the names of
        special tokens as plain text."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"the text is not valid Unicode at character {e.start}: give UTF-8 text") from e
        return self.prefix * bos + self.encode_text(text, parse_special)

    def encode_after(self, before: Sequence[int] | None, text: str, parse_special: bool = False) -> list[int]:
        """Ids of a text that goes on after ids, or after some text (None). Many tokenizers put a space before a text
        and after a special token, but none within a text."""
        for some in ("\n", "a") if text and (before is None or before and before[-1] not in self.added) else ():
            start, ids = self.encode_text(some, False), self.encode_text(some + text, parse_special)
            if ids[: len(start)] == start:  # they are not joined
                return ids[len(start) :]
        return self.encode_text(text, parse_special, first=False) if text else []

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text. Special tokens and unknown ids give no text; invalid UTF-8 gives U+FFFD."""
        stream, rest, text = self.stream(), map(int, ids), ""
        while stream.at_start and (id := next(rest, None)) is not None:
            text += stream.put(id)
        return text + stream.utf8.decode(b"".join(map(self.piece, rest)), final=True)

    def stream(self, stop: Sequence[str] = ()) -> Stream:
        return Stream(self, stop)

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return _pattern(self.added.values())

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _pattern(t for t in self.added.values() if t.special)

    @functools.cached_property
    def _plain_pattern(self) -> re.Pattern[str]:
        return _pattern(t for t in self.added.values() if not t.special)

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.content: id for id, token in self.added.items()}

    def split_added(self, text: str, parse_special: bool) -> Iterator[tuple[str, int | None]]:
        """Yields (text, None) and (matched text, id of an added token) in order; no empty text."""
        yield from self._split(text, (self._added_pattern if parse_special else self._plain_pattern).finditer(text))

    def _split(self, text: str, matches: Iterable[re.Match[str]]) -> Iterator[tuple[str, int | None]]:
        at = 0
        for m in matches:
            if m.start() > at:
                yield text[at : m.start()], None
            yield m[0], self._added_ids[m[1]]
            at = m.end()
        if at < len(text):
            yield text[at:], None

    # ---- chats ----

    def apply_chat_template(self, messages: list[dict], /, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as text in the model's training format. Encode it with `bos=False`, as it contains the bos.
        variables: those of the template, such as enable_thinking=False. Raises InputError if it reads none of that
        name."""
        given = self.names | variables | {"add_generation_prompt": add_generation_prompt}
        return chat.render(self.source, self.template(), messages, given, variables)

    def encode_chat(self, messages: list[dict], /, **variables: Any) -> list[int]:
        """The ids of a conversation, up to the answer. In the content of messages, names of special tokens are plain
        text. Raises InputError if such a name occurs and the template changes contents, so that they cannot be found in
        its output."""
        text = self.apply_chat_template(messages, **variables)
        for content in chat.contents([m for m in messages if m.get("role") == "system"]):
            if content.strip() not in text:
                warn_once(f"{self.source}: the chat template does not show the system message as it is, or at all")
        parts = chat.locate(text, messages, lambda marked: self.apply_chat_template(marked, **variables))
        if parts is None:
            for content in chat.contents(messages):
                if found := self._special_pattern.search(content):
                    said = f"a message holds the special token {found[1]!r}, and the chat template changes it"
                    raise InputError(f"{self.source}: {said}, so that it cannot be told from its own: remove it")
            return self.encode(text, bos=False)
        hidden = "".join("\0" * len(part) if i % 2 else part for i, part in enumerate(parts))
        own = list(self._special_pattern.finditer(hidden))
        if [m.span() for m in own] == [m.span() for m in self._special_pattern.finditer(text)]:
            return self.encode(text, bos=False)
        ids: list[int] = []
        for i, (part, id) in enumerate(self._split(text, own)):
            ids += self.encode_text(part, False, first=i == 0) if id is None else [id]
        return ids


class Stream:
    """Decodes one text: takes ids one by one and returns text as soon as its characters are complete, up to the first
    of the `stop` strings. A possible beginning of one is held back."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.invalid_bytes)
        self.at_start = True
        self.text = self.waiting = ""  # what was returned, and what is held back
        self.stopped = False  # whether a stop string has ended the text

    def put(self, id: int) -> str:
        """The text that can be shown after this token."""
        data = self.tokenizer.piece(id)
        if self.at_start and data:
            data = self.tokenizer.first_piece(id)
            self.at_start = self.tokenizer.strips_all_leading and not data
        return self._show(self.utf8.decode(data))

    def flush(self) -> str:
        """The end of the text: U+FFFD for bytes of an incomplete character."""
        return self._show(self.utf8.decode(b"", final=True), last=True)

    def _show(self, piece: str, last: bool = False) -> str:
        if self.stopped:
            return ""
        self.waiting += piece
        # the stop string that ends first, however the text comes in pieces
        found = [(i + len(s), i) for s in self.stop if (i := self.waiting.find(s)) >= 0]
        self.stopped = bool(found)
        begun = [n for s in self.stop for n in range(1, len(s)) if self.waiting.endswith(s[:n])]
        end = min(found)[1] if found else len(self.waiting) - (0 if last else max(begun, default=0))
        shown, self.waiting = self.waiting[:end], self.waiting[end:]
        self.text += shown
        return shown


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The stop strings. Raises InputError unless `stop` is a non-empty text or a list of them."""
    given = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, list | tuple) or not all(isinstance(s, str) and s for s in given):
        raise InputError(f"--stop is {short(stop)}: give a text, or a list of texts, that are not empty")
    return tuple(given)


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """A pattern that finds tokens, the leftmost and then the longest, as group 1. The match includes blanks that a
    token strips."""
    ordered = sorted((t for t in tokens if t.content), key=lambda t: -len(t.content))
    found = "|".join(re.escape(t.content) for t in ordered)
    if not any(t.lstrip or t.rstrip for t in ordered):
        return re.compile(f"({found or '(?!)'})")
    # not from within a run of blanks: from each of its places to its end would be quadratic
    before = "|".join(rf"(?<!\s)\s+(?={re.escape(t.content)})" for t in ordered if t.lstrip)
    after = "|".join(rf"(?<={re.escape(t.content)})\s*" for t in ordered if t.rstrip)
    return re.compile(f"(?:{before})?({found})(?:{after})?" if before else f"({found})(?:{after})?")
