"""Tokenizers that run in Hugging Face's `tokenizers`: any tokenizer.json, vocab.json with merges.txt, and the
vocabularies of GGUF files (gguf.py)."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from loading.tokenizer.base import Tokenizer
from loading.tokenizer.folder import Folder
from runtime.errors import InputError

# Published patterns of byte-level BPE, for folders without a tokenizer.json.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = WORDS % r"\p{N}{1,3}"
QWEN2 = WORDS % r"\p{N}"

# GPT-2's printable alphabet for bytes: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHAR_BYTES = {chr(b): b for b in _PRINTABLE}
CHAR_BYTES |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)}

MOST_FREE = 1 << 16  # the most unused ids before an added token

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class LibraryTokenizer(Tokenizer):
    """A tokenizer that runs in `engine`. It prepends bos itself, so that a caller can leave it out."""

    def __init__(
        self,
        engine: Engine,
        source: Path,
        names: dict[str, str],
        stop_ids: Iterable[int],
        adds_bos: bool,
        template: Callable[[], str],
    ):
        self.engine, self.lock = engine, threading.RLock()  # other threads must not see a call's settings
        engine.no_truncation()
        engine.no_padding()
        decoder = "" if engine.decoder is None else engine.decoder.__getstate__().decode()
        self.byte_level, self.byte_fallback = '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
        if self.byte_fallback:
            self.invalid_bytes = "replace_each_byte"
            ids = (engine.token_to_id(f"<0x{b:02X}>") for b in range(256))
            self.fallback = frozenset(id for id in ids if id is not None)
        super().__init__(source, engine.get_added_tokens_decoder(), names, stop_ids, adds_bos, template)
        self.piece = functools.cache(self.piece)  # type: ignore[method-assign]  # the library takes microseconds
        # Decoded before a piece, so that the piece is decoded as in the middle of a text.
        self.before = self.encode_text("a", False)[-1:]
        self.n_before = len(engine.decode(self.before))

    @functools.cached_property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 1 + max(self.engine.get_vocab().values(), default=-1)

    def id_of(self, token: str) -> int | None:
        return self.engine.token_to_id(token)

    def encode_text(self, text: str, parse_special: bool, first: bool = True) -> list[int]:
        with self.lock:
            self.engine.encode_special_tokens = not parse_special
            pre = self.engine.pre_tokenizer
            if first or not isinstance(pre, pre_tokenizers.Metaspace) or pre.prepend_scheme != "first":
                return self.engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
            try:
                pre.prepend_scheme = "never"
                return self.encode_text(text, parse_special)
            finally:
                pre.prepend_scheme = "first"

    def piece(self, id: int) -> bytes:
        token = self.engine.id_to_token(id) if id >= 0 else None
        if token is None or ((added := self.added.get(id)) and added.special):
            return b""
        if self.byte_level:
            try:
                return bytes([CHAR_BYTES[char] for char in token])
            except KeyError:  # an added token, written as plain text
                return token.encode()
        if self.byte_fallback and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return self.engine.decode([*self.before, id])[self.n_before :].encode()

    def first_piece(self, id: int) -> bytes:
        if self.byte_level or "\ufffd" in (text := self.engine.decode([id])):
            return self.piece(id)
        return text.encode()

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json, which transformers loads. Raises
        InputError if they cannot be written."""
        engine = Engine.from_str(self.engine.to_str())
        if self.prefix:
            bos = self.names["bos_token"]
            engine.post_processor = processors.TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", "$B:1"],
                                                                  special_tokens=[(bos, self.bos_id)])  # fmt: skip
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | self.names
        config["add_bos_token"] = bool(self.prefix)
        with contextlib.suppress(InputError):  # if there is a template
            config["chat_template"] = self.template()
        try:
            engine.save(str(Path(folder) / "tokenizer.json"))
            for name, value in (("tokenizer", config), ("generation", {"eos_token_id": sorted(self.eos_ids)})):
                (Path(folder) / f"{name}_config.json").write_text(
                    json.dumps(value, indent=1, ensure_ascii=False) + "\n"
                )
        except Exception as e:  # the library raises plain Exception
            raise InputError(f"cannot write the tokenizer into {folder}: {e}") from None


def from_tokenizer_json(folder: Folder) -> LibraryTokenizer:
    text, moved = folder.text("tokenizer.json"), []
    try:
        engine = Engine.from_str(text)
        if listed := re.search(r'"added_tokens"\s*:\s*(?=\[)', text):
            tokens, end = json.JSONDecoder().raw_decode(text, listed.end())
            for t in tokens:  # tokens that the vocabulary also has keep its ids
                t["id"] = t["id"] if engine.model.token_to_id(t["content"]) is None else None
            if any(t["id"] not in (None, engine.token_to_id(t["content"])) for t in tokens):  # ids with gaps
                engine = Engine.from_str(f"{text[: listed.end()]}[]{text[end:]}")
                moved = [(t.pop("id"), AddedToken(**t)) for t in sorted(tokens, key=lambda t: t["id"] or 0)]
    except Exception as e:  # the library raises plain Exception
        raise folder.error("tokenizer.json", f"not read by tokenizers ({e}); download it again") from None
    for id, token in moved:
        _add(folder, engine, id, token)
    return _of_folder(folder, engine)


def class_name(folder: Folder) -> str:
    """The name of the tokenizer's class, or of the model."""
    return folder.config.get("tokenizer_class") or folder.json("config.json").get("model_type") or "not named"


def differs_from_merges(folder: Folder) -> bool:
    """Whether tokenizer.json has another pattern than its class gives `vocab.json` and `merges.txt`. Only Qwen's class
    has a pattern of its own: GPT-2's is named by models with many others."""
    qwen = class_name(folder).lower().startswith("qwen")
    return qwen and json.dumps(QWEN2)[1:-1] not in folder.text("tokenizer.json")


def from_vocab_and_merges(folder: Folder) -> LibraryTokenizer:
    """`vocab.json` + `merges.txt`. Only the name of the tokenizer's class or of the model tells which pattern
    belongs to them."""
    name = class_name(folder)
    qwen = name.lower().startswith("qwen")
    if not qwen and not name.lower().startswith("gpt2"):
        expected = "expected Qwen2Tokenizer or GPT2Tokenizer; add its tokenizer.json"
        raise folder.error("", f"vocab.json and merges.txt are of tokenizer class {name}, {expected}")
    lines = [
        line for line in folder.text("merges.txt").splitlines() if line.strip() and not line.startswith("#version")
    ]
    merges = [tuple(line.split(" ")) for line in lines]
    prefix = bool(folder.config.get("add_prefix_space"))
    engine = byte_level_bpe(folder.path, folder.json("vocab.json"), merges, [QWEN2 if qwen else GPT2], prefix=prefix)
    if qwen:
        engine.normalizer = normalizers.NFC()
    return _of_folder(folder, engine)


def byte_level_bpe(
    source: Path,
    vocab: dict[str, int],
    merges: list,
    patterns: list[str],
    whole_words: bool = False,
    prefix: bool = False,
) -> Engine:
    """Byte-level BPE; patterns split the text one after another. whole_words: a word that is a token is not split into
    merges. Bytes that the vocabulary lacks are dropped."""
    try:
        engine = Engine(models.BPE(vocab, merges, ignore_merges=whole_words))
    except Exception as e:  # the library raises plain Exception
        raise InputError(f"{source}: the vocabulary and its merges do not fit ({e}); download it again") from None
    split = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    engine.decoder = decoders.ByteLevel()
    return engine


def _add(folder: Folder, engine: Engine, id: int | None, token: AddedToken) -> None:
    """Add a token with its id. The library assigns the next free id, so unused ids before it get unwritable tokens."""
    if id is not None and engine.token_to_id(token.content) is None and id - engine.get_vocab_size() < MOST_FREE:
        free = range(engine.get_vocab_size(), id)
        engine.add_special_tokens([AddedToken(f"\ue000{i}\ue001", special=True, normalized=False) for i in free])
    (engine.add_special_tokens if token.special else engine.add_tokens)([token])
    if id is not None and (found := engine.token_to_id(token.content)) != id:
        raise folder.error("", f"added token {token.content!r} has id {id}, but {found} in the vocabulary: "
                           "download the tokenizer's files again, all from one place")  # fmt: skip


def _special(t: AddedToken) -> AddedToken:
    """The token as a special one: with its other flags, which adding its text alone would reset."""
    flags = dict(single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip, normalized=t.normalized)
    return AddedToken(t.content, special=True, **flags)


def _of_folder(folder: Folder, engine: Engine) -> LibraryTokenizer:
    for id, token in folder.added_tokens():
        if id is None:
            if (known := engine.token_to_id(token.content)) is None:
                continue  # bos and eos are checked elsewhere, and others are not needed
            token = _special(engine.get_added_tokens_decoder().get(known, token))
        _add(folder, engine, id, token)
    stops = folder.stop_ids()
    ends = [_special(token) for id, token in engine.get_added_tokens_decoder().items() if id in stops]
    engine.add_special_tokens(ends)  # so that no user text can end a turn
    around = engine.encode("a")
    start = next((i for i, special in enumerate(around.special_tokens_mask) if not special), len(around.ids))
    if any(around.special_tokens_mask[start:]):
        raise folder.error("tokenizer.json", "post_processor would end every prompt with a special token; remove it")
    names = folder.special_names(bos=engine.id_to_token(around.ids[0]) if start else None)
    adds_bos = folder.adds_bos(start > 0)
    tokenizer = LibraryTokenizer(engine, folder.path, names, stops, adds_bos, folder.chat_template)
    if adds_bos and start:  # the prefix may be more than bos
        tokenizer.prefix = around.ids[:start]
    return tokenizer
