"""`tokenizer.model` as a SentencePiece proto (Llama 2, Mistral v1 to v7, models/tiny), encoded by the library."""

from __future__ import annotations

import sentencepiece
from tokenizers import AddedToken

from loading.tokenizer.base import Tokenizer
from loading.tokenizer.folder import Folder

SPACE = "▁"  # how SentencePiece writes a space


class SentencePieceTokenizer(Tokenizer):
    """Encodes each stretch of text between added tokens alone: with the model's dummy prefix (Llama 2, Mistral v0.1),
    with it only at the start of the text (`legacy: false`), or without it (`add_prefix_space: false`)."""

    invalid_bytes = "replace_each_byte"

    def __init__(self, folder: Folder, name: str, proto: bytes):
        self.start = sp = _load(folder, name, proto)
        # Protobuf merges a repeated field: normalizer_spec (field 3) {add_dummy_prefix (field 3): false}.
        self.rest = _load(folder, name, proto + b"\x1a\x02\x18\x00")
        never = folder.config.get("add_prefix_space") is False
        if never:
            self.start = self.rest
        elif folder.config.get("legacy") is not False:
            self.rest = self.start

        pieces = [sp.id_to_piece(i) for i in range(sp.get_piece_size())]
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        added = {i: AddedToken(pieces[i], special=True, normalized=False)
                 for i in range(len(pieces)) if sp.is_control(i) or sp.is_unknown(i)}  # fmt: skip
        for id, token in folder.added_tokens():
            if (id := self.ids.get(token.content) if id is None else id) is not None:
                added[id] = token
        self.ids |= {token.content: id for id, token in added.items()}
        self.pieces = {
            i: bytes([int(piece[3:5], 16)]) if sp.is_byte(i) else piece.replace(SPACE, " ").encode()
            for i, piece in enumerate(pieces)
        } | {i: b"" if token.special else token.content.encode() for i, token in added.items()}
        self.vocab_size = max(self.pieces) + 1
        self.fallback = frozenset(i for i in range(len(pieces)) if sp.is_byte(i) or sp.is_unused(i))
        # Asks the library whether decoding drops the space before the first word, and if so, all spaces or one.
        one = next((i for i, p in enumerate(pieces) if p.startswith(SPACE) and p.count(SPACE) == 1), None)
        self.drops_space = one is not None and not never and not sp.decode([one]).startswith(" ")
        if self.drops_space and SPACE in self.ids:
            self.strips_all_leading = sp.decode([self.ids[SPACE]] * 2) == ""
        names = folder.special_names(bos=_piece(sp, sp.bos_id()), eos=_piece(sp, sp.eos_id()))
        super().__init__(folder.path, added, names, folder.stop_ids(), folder.adds_bos(True), folder.chat_template)

    def id_of(self, token: str) -> int | None:
        return self.ids.get(token)

    def piece(self, id: int) -> bytes:
        return self.pieces.get(id, b"")

    def first_piece(self, id: int) -> bytes:
        data = self.piece(id)
        return data[1:] if self.drops_space and data.startswith(b" ") else data

    def encode_text(self, text: str, parse_special: bool, first: bool = True) -> list[int]:
        ids: list[int] = []
        for part, id in self.split_added(text, parse_special):
            ids += (self.start if first else self.rest).encode(part) if id is None else [id]
            first = False
        return ids


def _load(folder: Folder, name: str, proto: bytes) -> sentencepiece.SentencePieceProcessor:
    expected = "expected a SentencePiece model or tiktoken's base64 lines; download it again"
    if not proto.strip():  # sentencepiece accepts an empty proto and then fails in every call
        raise folder.error(name, f"empty, {expected}")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=proto)
    except RuntimeError as e:
        raise folder.error(name, f"cannot be parsed, {expected}") from e


def _piece(sp: sentencepiece.SentencePieceProcessor, id: int) -> str | None:
    return sp.id_to_piece(id) if id >= 0 else None
