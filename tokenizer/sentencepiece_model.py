"""`tokenizer.model` as a SentencePiece proto (Llama 2, Mistral v0.1, models/tiny), encoded by the library itself."""

from __future__ import annotations

import sentencepiece

from tokenizer.base import SPACE, Tokenizer
from tokenizer.folder import AddedToken, Folder, sequence


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

        self.fallback = frozenset(i for i in pieces if sp.is_byte(i) or sp.is_unused(i))
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
        pre = sequence(spec.get("pre_tokenizer"), "pretokenizers")
        metaspace = [step for step in pre if step["type"] == "Metaspace"]
        return metaspace[0].get("prepend_scheme", "always") if metaspace else "always"
    if folder.config.get("add_prefix_space") is False:
        return "never"
    return "first" if folder.config.get("legacy") is False else "always"
