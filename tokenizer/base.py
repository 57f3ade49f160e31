"""What all kinds of tokenizer share: added tokens, encoding around them, decoding as a stream, and chats."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Iterable, Iterator

from errors import InputError
from tokenizer import chat
from tokenizer.folder import SPECIAL_NAMES, AddedToken, Folder

WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))  # as \s
SPACE = "▁"  # how SentencePiece writes a space

# SentencePiece gives each byte of an invalid sequence its own U+FFFD; "replace" gives a truncated character one.
codecs.register_error("replace_each_byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]


class Tokenizer:
    """A kind gives the bytes of every id and `_encode`, for text in which there are no added tokens."""

    invalid_bytes = "replace"  # the codec error handler of decoding
    leading_space: frozenset[int] = frozenset()  # ids that lose their leading space when they start a text
    strips_all_leading = False  # ... and whether that goes on until there is text
    fallback: frozenset[int] = frozenset()  # single bytes for characters that have no piece, and unused pieces

    def __init__(
        self,
        folder: Folder,
        vocab: dict[str, int],
        token_bytes: dict[int, bytes],
        added: dict[int, AddedToken],
        *,
        bos: str | None,
        eos: str | None,
        adds_bos: bool,
        normalize: Callable[[str], str] = str,
    ):
        self.folder = folder
        self.token_bytes = token_bytes | {id: b"" for id, token in added.items() if token.special}
        self.ids = vocab | {token.content: id for id, token in added.items()}
        self.normalize = normalize
        # Hugging Face looks for tokens twice: in the text as it is, then in the normalized text.
        self.raw_added = AddedTokens(t for t in added.values() if not t.normalized)
        self.normalized_added = AddedTokens((t for t in added.values() if t.normalized), normalize)
        self.bos_token, self.eos_token = bos, eos
        self.bos_id = self._special_id("bos_token", bos)
        self.eos_ids = self._stop_ids(self._special_id("eos_token", eos))
        self.vocab_size: int = max(self.token_bytes) + 1
        if folder.config.get("add_eos_token"):
            raise folder.error("tokenizer_config.json", "add_eos_token would end every prompt; set it to false")
        flag = folder.config.get("add_bos_token")
        self.adds_bos = self.bos_id is not None and (adds_bos if flag is None else bool(flag))

    @property
    def text_ids(self) -> list[int]:
        """Ids that stand for pieces of text: no special tokens, no fallback bytes, nothing that pads the vocabulary."""
        return sorted(id for id, data in self.token_bytes.items() if data and id not in self.fallback)

    def _special_id(self, name: str, token: str | None) -> int | None:
        if token is not None and token not in self.ids:
            raise self.folder.error("", f"{name} {token!r} is not in the vocabulary; correct tokenizer_config.json")
        return None if token is None else self.ids[token]

    def _stop_ids(self, eos: int | None) -> frozenset[int]:
        ids = set() if eos is None else {eos}
        for name in ("generation_config.json", "config.json"):
            value = self.folder.json(name).get("eos_token_id")
            for id in value if isinstance(value, list) else [] if value is None else [value]:
                if type(id) is not int or id < 0:
                    raise self.folder.error(name, f"eos_token_id is {value!r}, expected ids >= 0")
                ids.add(id)
        return frozenset(ids)

    def _encode(self, text: str, first: bool) -> list[int]:
        """Ids of plain, normalized text; `first`: it starts the whole text."""
        raise NotImplementedError

    def encode(self, text: str, bos: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids. `bos` prepends the bos token if the checkpoint says so; `parse_special=False` reads the names
        of special tokens as plain text."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"the text is not valid Unicode at character {e.start}: give UTF-8 text") from e
        ids = [self.bos_id] if bos and self.adds_bos and self.bos_id is not None else []
        for i, (segment, token) in enumerate(self.raw_added.split(text, parse_special)):
            if token is not None:
                ids.append(token)
                continue
            for j, (plain, token) in enumerate(self.normalized_added.split(self.normalize(segment), parse_special)):
                ids += self._encode(plain, i == j == 0) if token is None else [token]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text. Special tokens and ids that the vocabulary does not have give nothing; invalid UTF-8 U+FFFD."""
        stream = self.stream()
        return "".join(map(stream.put, map(int, ids))) + stream.flush()

    def stream(self) -> Stream:
        return Stream(self)

    @functools.cached_property
    def _chat_template(self) -> str:
        return chat.read_template(self.folder)

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model was trained on; encode it with `bos=False`, the bos is in it."""
        names = {f"{name}_token": self.folder.special(f"{name}_token") for name in SPECIAL_NAMES}
        names |= {"bos_token": self.bos_token, "eos_token": self.eos_token}
        given = {name: token for name, token in names.items() if token is not None}
        return chat.render(self.folder, self._chat_template, messages, add_generation_prompt, given)

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """The ids of a conversation, ready for the answer. As in Hugging Face, special tokens written inside a message
        are read as such."""
        return self.encode(self.apply_chat_template(messages), bos=False)


class Stream:
    """Ids in, text out as soon as its characters are complete. One stream decodes one text."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.invalid_bytes)
        self.at_start = True

    def put(self, id: int) -> str:
        tk = self.tokenizer
        data = tk.token_bytes.get(id, b"")
        if self.at_start and data:
            if id in tk.leading_space:
                data = data[1:]
            self.at_start = tk.strips_all_leading and not data
        return self.utf8.decode(data)

    def flush(self) -> str:
        """The end of the text: bytes that never became a character, as U+FFFD."""
        return self.utf8.decode(b"", final=True)


class AddedTokens:
    """Splits text at added tokens, leftmost and then longest first."""

    def __init__(self, tokens: Iterable[AddedToken], normalize: Callable[[str], str] = str):
        self.tokens = {normalize(token.content): token for token in tokens if token.content}
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str, parse_special: bool) -> Iterator[tuple[str, int | None]]:
        """Yields (text, None) and (matched text, id) in order; no empty text."""
        at = 0
        for match in self.pattern.finditer(text):
            token = self.tokens[match[0]]
            if token.special and not parse_special:
                continue
            start, end = match.span()
            if token.lstrip:
                start = at + len(text[at:start].rstrip(WHITE))
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip(WHITE))
            if start > at:
                yield text[at:start], None
            yield text[start:end], token.id
            at = end
        if at < len(text):
            yield text[at:], None
