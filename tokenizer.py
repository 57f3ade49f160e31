"""Text to token ids and back, from the tokenizer files of a Hugging Face checkpoint folder. A checkpoint is untrusted:
only JSON, the SentencePiece proto and tiktoken's text format are read, and chat templates run in a sandbox.

Three backends share one base. The folder's files choose:
1. `tokenizer.model`, a SentencePiece proto (Llama 2, Mistral, models/tiny)   -> SentencePieceTokenizer
2. `tokenizer.model`, "base64 rank" lines (Llama 3 as Meta publishes it)      -> TiktokenTokenizer
3. `tokenizer.json`, or `vocab.json` + `merges.txt` (Llama 3, Qwen, Nemo)     -> BPETokenizer
A byte-level `tokenizer.json` goes before any `tokenizer.model`; a SentencePiece proto goes before the `tokenizer.json`
converted from it. Ids are those of the `tokenizers` library; what would make them differ is refused by name. Known
differences: decoding never "cleans up" spaces, and pre-tokenization uses the Unicode version of the `regex` package,
so characters added to Unicode after the reference's version may be split otherwise.
"""

from __future__ import annotations

import base64
import codecs
import functools
import heapq
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import regex
import sentencepiece
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import InputError

# The published pre-tokenization patterns: GPT-2 is what ByteLevel(use_regex) means, the others are written out in the
# checkpoints' tokenizer.json and are needed here only for the folders that do not have one.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = WORDS % r"\p{N}{1,3}"
QWEN2 = WORDS % r"\p{N}"

WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))  # as \s
SPACE = "▁"  # how SentencePiece writes a space

# GPT-2's printable alphabet for bytes: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_CHARS = {b: chr(b) for b in _PRINTABLE} | {
    b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}
CHAR_BYTES = {c: b for b, c in BYTE_CHARS.items()}

# SentencePiece gives each byte of an invalid sequence its own U+FFFD; "replace" gives a truncated character one.
codecs.register_error("replace_each_byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]


# ---- the folder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddedToken:
    """A token found in the text before the model sees it; the flags are those of tokenizer.json's `added_tokens`."""

    id: int
    content: str
    special: bool
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False

    @classmethod
    def read(cls, id: int, token: dict) -> AddedToken:
        if token.get("single_word"):
            raise InputError(f"added token {token['content']!r} has single_word=true, which is not supported")
        special = bool(token.get("special"))
        flags = {"normalized": not special, "lstrip": False, "rstrip": False}
        return cls(id, token["content"], special, **{name: bool(token.get(name, flags[name])) for name in flags})


class Folder:
    """The tokenizer files of a checkpoint folder. A JSON file that is not there reads as {}."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            found = "is a file" if self.path.exists() else "does not exist"
            raise InputError(f"checkpoint {self.path} {found}: give a folder in the Hugging Face format")
        self.config = self.json("tokenizer_config.json")
        self.special_tokens_map = self.json("special_tokens_map.json")

    def error(self, name: str, message: str) -> InputError:
        return InputError(f"{self.path / name if name else self.path}: {message}")

    def has(self, *names: str) -> bool:
        return all((self.path / name).is_file() for name in names)

    def read(self, name: str) -> bytes:
        try:
            data = (self.path / name).read_bytes()
        except OSError as e:
            raise self.error(name, f"cannot be read ({e.strerror})") from e
        if data.startswith(b"version https://git-lfs"):
            raise self.error(name, "a Git LFS pointer, not the file: run `git lfs pull` in the checkpoint")
        return data

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as e:
            raise self.error(name, f"not UTF-8 text ({e}); download it again") from e

    def json(self, name: str) -> dict[str, Any]:
        if not self.has(name):
            return {}
        try:
            value = json.loads(self.text(name))
        except (json.JSONDecodeError, RecursionError) as e:
            raise self.error(name, f"not valid JSON ({e}); download it again") from e
        if not isinstance(value, dict):
            raise self.error(name, f"holds a JSON {type(value).__name__}, expected an object")
        return value

    def special(self, name: str, default: str | None = None) -> str | None:
        """The text of `bos_token`, `eos_token`...; a null in the files means none, whatever the default."""
        for source in (self.config, self.special_tokens_map):
            if name in source:
                return _content(source[name])
        return default

    def added_tokens(self, vocab: dict[str, int], spec: dict) -> dict[int, AddedToken]:
        """Added tokens by id. As in Hugging Face, tokenizer_config.json has the last word on a token's flags, and the
        named special tokens are special wherever they come from."""
        names = [_content(s.get(f"{n}_token")) for s in (self.special_tokens_map, self.config) for n in SPECIAL_NAMES]
        for source in (self.special_tokens_map, self.config):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                more = source.get(key) or []
                names += [_content(token) for token in (more.values() if isinstance(more, dict) else more)]
        tokens = {t["id"]: AddedToken.read(t["id"], t) for t in spec.get("added_tokens") or []}
        for content, id in self.json("added_tokens.json").items():
            special = content in names
            tokens.setdefault(id, AddedToken(id, content, special, normalized=not special))
        for key, token in (self.config.get("added_tokens_decoder") or {}).items():
            tokens[int(key)] = AddedToken.read(int(key), token)
        known = {token.content for token in tokens.values()}
        for name in names:
            if name in vocab and name not in known:
                tokens[vocab[name]] = AddedToken(vocab[name], name, special=True)
        return tokens


SPECIAL_NAMES = ("bos", "eos", "unk", "pad")


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


# ---- what the backends share -----------------------------------------------------------------------------------------


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


class Tokenizer:
    """A backend gives the bytes of every id and `_encode`, for text in which there are no added tokens."""

    invalid_bytes = "replace"  # the codec error handler of decoding
    leading_space: frozenset[int] = frozenset()  # ids that lose their leading space when they start a text
    strips_all_leading = False  # ... and whether that goes on until there is text

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
        template = self.folder.config.get("chat_template")
        if self.folder.has("chat_template.jinja"):
            template = self.folder.text("chat_template.jinja")
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            if "default" not in named:
                raise self.folder.error("tokenizer_config.json", f"no chat template is 'default' among {list(named)}")
            template = named["default"]
        if not isinstance(template, str):
            where = "neither chat_template in tokenizer_config.json nor chat_template.jinja"
            raise self.folder.error("", f"no chat template ({where}); if it is a base model, run it without --chat")
        return template

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model was trained on; encode it with `bos=False`, the bos is in it."""
        names = {f"{name}_token": self.folder.special(f"{name}_token") for name in SPECIAL_NAMES}
        names |= {"bos_token": self.bos_token, "eos_token": self.eos_token}
        given = {name: token for name, token in names.items() if token is not None}
        flags = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        source = self._chat_template
        try:
            return _chat_environment().from_string(source).render(given, messages=messages, **flags)
        except Exception as e:  # a template is untrusted code: whatever it raises is bad input, with no traceback
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            raise self.folder.error("", f"the chat template cannot render these messages ({reason})") from e

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """The ids of a conversation, ready for the answer. As in Hugging Face, special tokens written inside a message
        are read as such."""
        return self.encode(self.apply_chat_template(messages), bos=False)


@functools.cache
def _chat_environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a template and no more: no attribute that starts with _, no changing of its arguments."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:  # jinja's own escapes HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return env


# ---- 1. SentencePiece ------------------------------------------------------------------------------------------------


class SentencePieceTokenizer(Tokenizer):
    """`tokenizer.model` as a SentencePiece proto. Between added tokens each stretch of text is encoded on its own, with
    the model's dummy prefix (Llama 2, Mistral v0.1), or with it at the start of the text only (`legacy: false`)."""

    invalid_bytes = "replace_each_byte"

    def __init__(self, folder: Folder, proto: bytes, spec: dict):
        self.start = sp = self._load(folder, proto)
        # Protobuf merges a repeated field: normalizer_spec (field 3) {add_dummy_prefix (field 3): false}.
        self.rest = self._load(folder, proto + b"\x1a\x02\x18\x00")
        scheme = _prefix_scheme(folder, spec)
        if scheme == "never":
            self.start = self.rest
        elif scheme == "always":
            self.rest = self.start

        pieces = {i: sp.id_to_piece(i) for i in range(sp.get_piece_size())}
        token_bytes = {
            i: bytes([int(piece[3:5], 16)]) if sp.is_byte(i) else piece.replace(SPACE, " ").encode()
            for i, piece in pieces.items()
        }
        spaced = [i for i, piece in pieces.items() if piece.startswith(SPACE)]
        # Whether decoding drops the space before the first word, and if so all spaces or one: asked, not guessed.
        if spaced and scheme != "never" and not sp.decode(spaced[:1]).startswith(" "):
            self.leading_space = frozenset(spaced)
            bare = sp.piece_to_id(SPACE)
            self.strips_all_leading = bare in self.leading_space and sp.decode([bare, bare]) == ""

        vocab = {piece: i for i, piece in pieces.items()}
        control = [i for i in pieces if sp.is_control(i) or sp.is_unknown(i)]
        added = {i: AddedToken(i, pieces[i], special=True) for i in control} | folder.added_tokens(vocab, spec)
        super().__init__(
            folder,
            vocab,
            token_bytes | {i: token.content.encode() for i, token in added.items()},
            added,
            bos=folder.special("bos_token", pieces.get(sp.bos_id())),
            eos=folder.special("eos_token", pieces.get(sp.eos_id())),
            adds_bos=True,
        )

    @staticmethod
    def _load(folder: Folder, proto: bytes) -> sentencepiece.SentencePieceProcessor:
        expected = "expected a SentencePiece model or tiktoken's base64 lines; download it again"
        if not proto.strip():  # sentencepiece accepts an empty proto and then fails in every call
            raise folder.error("tokenizer.model", f"empty, {expected}")
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=proto)
        except RuntimeError as e:
            raise folder.error("tokenizer.model", f"cannot be parsed, {expected}") from e

    def _encode(self, text: str, first: bool) -> list[int]:
        return (self.start if first else self.rest).encode(text)


def _prefix_scheme(folder: Folder, spec: dict) -> str:
    """Which stretches of text get SentencePiece's dummy prefix: "always", "first" or "never". The tokenizer.json made
    from the model knows; without one, tokenizer_config.json's `add_prefix_space` and `legacy` (default true) do."""
    if spec:
        metaspace = [step for step in _steps(spec.get("pre_tokenizer"), "pretokenizers") if step["type"] == "Metaspace"]
        return metaspace[0].get("prepend_scheme", "always") if metaspace else "always"
    if folder.config.get("add_prefix_space") is False:
        return "never"
    return "first" if folder.config.get("legacy") is False else "always"


# ---- 2. tiktoken's format --------------------------------------------------------------------------------------------

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
        self.split = _isolate(LLAMA3)
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


# ---- 3. byte-pair encoding as tokenizer.json describes it ------------------------------------------------------------

FALLBACK_DECODER = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
Splitter = Callable[[str], list[str]]
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
            raise _unsupported(folder, "model type", kind, "BPE")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise _unsupported(folder, f"BPE option {key}", model[key], "none")
        self.vocab: dict[str, int] = model["vocab"]
        self.merges = _read_merges(folder, self.vocab, model["merges"])
        self.ignore_merges = bool(model.get("ignore_merges"))
        self.byte_fallback = bool(model.get("byte_fallback"))
        byte_tokens = [f"<0x{b:02X}>" for b in range(256)] if self.byte_fallback else list(CHAR_BYTES)
        if missing := [token for token in byte_tokens if token not in self.vocab]:
            raise folder.error("", f"the vocabulary lacks {len(missing)} of the 256 bytes, {missing[0]!r} first")

        decoder = _steps(spec.get("decoder"), "decoders")
        pre = _steps(spec.get("pre_tokenizer"), "pretokenizers")
        if self.byte_fallback:
            if decoder not in (FALLBACK_DECODER, FALLBACK_DECODER[:-1]):
                raise _unsupported(folder, "decoder", decoder, "Replace, ByteFallback, Fuse and Strip as in Llama 2")
            self._pieces = _metaspace(folder, pre)
            self.invalid_bytes = "replace_each_byte"
            to_bytes = _fallback_bytes
        else:
            if [step["type"] for step in decoder] != ["ByteLevel"]:
                raise _unsupported(folder, "decoder", decoder, "ByteLevel")
            self._pieces = _byte_level(folder, pre)
            to_bytes = _byte_level_bytes
        self._bpe = functools.lru_cache(maxsize=1 << 16)(self._merge_piece)  # text repeats its words

        added = folder.added_tokens(self.vocab, spec)
        for token in added.values():
            if (id := self.vocab.get(token.content, token.id)) != token.id:
                raise folder.error("", f"added token {token.content!r} has id {token.id}, but {id} in the vocabulary")
        token_bytes = {id: to_bytes(token) for token, id in self.vocab.items()}
        token_bytes |= {id: to_bytes(token.content) for id, token in added.items()}
        if decoder == FALLBACK_DECODER:
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
            normalize=_normalizer(folder, spec.get("normalizer")),
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


def _unsupported(folder: Folder, what: str, found: Any, expected: str) -> InputError:
    found = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return folder.error("tokenizer.json", f"{what} {found[:200]} is not supported, expected {expected}")


def _steps(node: dict | None, key: str) -> list[dict]:
    """The parts of a normalizer, pre_tokenizer, decoder or post_processor, each null, one thing, or a Sequence."""
    return [] if node is None else node[key] if node["type"] == "Sequence" else [node]


def _replace(old: str, new: str, text: str) -> str:
    return text.replace(old, new)


def _normalizer(folder: Folder, node: dict | None) -> Callable[[str], str]:
    steps: list[Callable[[str], str]] = []
    for step in _steps(node, "normalizers"):
        match step:
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" as form}:
                steps.append(functools.partial(unicodedata.normalize, form))
            case {"type": "Prepend", "prepend": str(prefix)}:
                steps.append(prefix.__add__)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                steps.append(functools.partial(_replace, old, new))
            case _:
                raise _unsupported(folder, "normalizer", step, "NFC, NFD, NFKC, NFKD, Prepend or Replace of a string")
    return lambda text: functools.reduce(lambda t, step: step(t), steps, text)


# Oniguruma (Ruby syntax) runs these patterns in `tokenizers`. What is listed here means the same to `regex`; anchors,
# \w, \h, &&, nested sets, inline flags and possessive {n}+ do not.
_ESCAPE = r"\\(?:[pP]\{\w+\}|[sSdDrntf]|[^\w\s])"
_PORTABLE = re.compile(
    rf"(?:{_ESCAPE}|\[\^?(?:{_ESCAPE}|(?!&&)[^\\\[\]])+\]|\(\?(?:i?:|<?[=!])|\((?!\?)|\{{\d+(?:,\d*)?\}}(?!\+)|[^\\\[\](){{}}^$]|\))+"
)


def _isolate(pattern: str) -> Splitter:
    """Split(pattern, behavior="Isolated"): the matches, and what is between them."""
    finditer = regex.compile(pattern).finditer

    def split(text: str) -> list[str]:
        pieces, at = [], 0
        for match in finditer(text):
            start, end = match.span()
            if start > at:
                pieces.append(text[at:start])
            if end > start:
                pieces.append(text[start:end])
            at = end
        return [*pieces, text[at:]] if at < len(text) else pieces

    return split


def _byte_level(folder: Folder, steps: list[dict]) -> Callable[[str, bool], list[str]]:
    """Pre-tokenizers that end in ByteLevel, each applied to the pieces of the one before."""
    splitters: list[Splitter] = []
    for i, step in enumerate(steps):
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                if not _PORTABLE.fullmatch(pattern):
                    raise _unsupported(folder, "pattern", pattern, "only what regex reads as Oniguruma does")
                splitters.append(_isolate(pattern))
            case {"type": "Split", "pattern": {"String": text}, "behavior": "Isolated"}:
                splitters.append(_isolate(regex.escape(text)))
            case {"type": "Digits"}:
                splitters.append(_isolate(r"\p{N}" if step.get("individual_digits") else r"\p{N}+"))
            case {"type": "ByteLevel"} if i == len(steps) - 1:
                if step.get("add_prefix_space", True):
                    splitters.append(lambda piece: [piece if piece.startswith(" ") else " " + piece])
                if step.get("use_regex", True):
                    splitters.append(_isolate(GPT2))
            case _:
                raise _unsupported(folder, "pre_tokenizer", step, "Split (Isolated), Digits, and ByteLevel at the end")
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise _unsupported(folder, "pre_tokenizer", steps, "one that ends in ByteLevel")

    def pieces(text: str, first: bool) -> list[str]:
        parts = [text]
        for split in splitters:
            parts = [piece for part in parts for piece in split(part)]
        return [part.encode().decode("latin-1").translate(BYTE_CHARS) for part in parts]

    return pieces


def _metaspace(folder: Folder, steps: list[dict]) -> Callable[[str, bool], list[str]]:
    """No pre-tokenizer (the normalizer wrote the spaces), or Metaspace. It does not repeat a leading space."""
    match steps:
        case []:
            return lambda text, first: [text]
        case [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}]:

            def pieces(text: str, first: bool) -> list[str]:
                text = text.replace(" ", SPACE)
                prefix = scheme == "always" or (scheme == "first" and first)
                return [SPACE + text if prefix and not text.startswith(SPACE) else text]

            return pieces
    raise _unsupported(folder, "pre_tokenizer", steps, "none or Metaspace with split=false beside byte_fallback")


def _template_bos(folder: Folder, node: dict | None) -> str | None:
    """The token that the post_processor puts before a text."""
    bos: Any = None
    for step in _steps(node, "processors"):
        match step:
            case {"type": "ByteLevel"}:  # moves offsets only
                pass
            case {"type": "TemplateProcessing", "single": [{"Sequence": _}]}:
                pass
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": bos}}, {"Sequence": _}]}:
                pass
            case _:
                raise _unsupported(folder, "post_processor", step, "a template of at most one token before the text")
    return bos


def _spec_from_vocab(folder: Folder) -> dict:
    """`vocab.json` + `merges.txt` as the tokenizer.json that Hugging Face makes of them. Only the name of the
    tokenizer's class, or of the model, says which pattern goes with them."""
    name = folder.config.get("tokenizer_class") or folder.json("config.json").get("model_type") or "not named"
    pre: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": bool(folder.config.get("add_prefix_space"))}
    normalizer = None
    if name.lower().startswith("qwen"):
        split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated"}
        pre = {"type": "Sequence", "pretokenizers": [split, pre | {"use_regex": False}]}
        normalizer = {"type": "NFC"}
    elif not name.lower().startswith("gpt2"):
        expected = "expected Qwen2Tokenizer or GPT2Tokenizer; add its tokenizer.json"
        raise folder.error("", f"vocab.json and merges.txt are of tokenizer class {name}, {expected}")
    lines = [line for line in folder.text("merges.txt").split("\n") if line.strip() and not line.startswith("#version")]
    model = {"type": "BPE", "vocab": folder.json("vocab.json"), "merges": [line.rstrip("\r") for line in lines]}
    return {"model": model, "normalizer": normalizer, "pre_tokenizer": pre, "decoder": {"type": "ByteLevel"}}


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises InputError for a folder or a file that cannot be used as it is."""
    folder = Folder(path)
    try:
        return _load(folder)
    except InputError:
        raise
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        regex.error,
    ) as e:  # JSON of an unexpected shape
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        raise folder.error("", f"the tokenizer files are malformed ({reason}); download them again") from e


def _load(folder: Folder) -> Tokenizer:
    spec = folder.json("tokenizer.json")
    proto = folder.read("tokenizer.model") if folder.has("tokenizer.model") else None
    is_tiktoken = proto is not None and TIKTOKEN_LINE.match(proto) is not None
    byte_level = any(step["type"] == "ByteLevel" for step in _steps(spec.get("decoder"), "decoders"))
    if proto is not None and not is_tiktoken and not byte_level:
        return SentencePieceTokenizer(folder, proto, spec)
    if spec:
        return BPETokenizer(folder, spec)
    if proto is not None:
        return TiktokenTokenizer(folder, proto)
    if folder.has("vocab.json", "merges.txt"):
        return BPETokenizer(folder, _spec_from_vocab(folder))
    expected = "tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
    raise folder.error("", f"no tokenizer here, expected {expected}; copy them from where it was published")
