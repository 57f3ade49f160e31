"""A GGUF file's vocabulary as a tokenizer of `tokenizers`, in memory.

"gpt2" is byte-level BPE, and `tokenizer.ggml.pre` names how text is split. "llama" is SentencePiece's BPE: pieces with
scores, a space before the text and after every special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Engine

from loading.tokenizer.library import GPT2, LLAMA3, QWEN2, WORDS, LibraryTokenizer, byte_level_bpe
from runtime.errors import InputError, short
from weights.gguf_config import stop_ids
from weights.gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # token types, SentencePiece's numbers
SPACE = "▁"


@dataclass(frozen=True)
class Pre:
    """How text is split: by patterns, one after another. whole_words: a word that is a token is not split into merges.
    bos: whether a text begins with bos if the file does not say. nfc: whether the model's tokenizer applies NFC."""

    patterns: Sequence[str]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = _CASED % (_ENGLISH + "?", _ENGLISH + "?") + r"|\p{N}{1,3}" + _REST
_PUNCTUATED = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
               r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (  # the cased letters of an older Unicode, as the model's file lists them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
# Names as in llama.cpp's llama-vocab.cpp; the patterns are those of the models' tokenizer.json.
_FAMILIES: dict[str, Pre] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Pre([LLAMA3], True, True),
    "glm4 glm5": Pre([LLAMA3], True),
    "dbrx smaug-bpe chatglm-bpe": Pre([LLAMA3]),
    "qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2": Pre([QWEN2], nfc=True),
    "hunyuan solar-open grok-2": Pre([QWEN2]),
    "qwen35": Pre([QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")]),
    "minicpm5": Pre([r"\p{N}{1,3}", WORDS % r"\p{N}+"], True),
    "tekken": Pre([_CASED % ("", "") + r"|\p{N}" + _REST], True, True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Pre([_GPT4O]),
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion "
    "granite-docling": Pre([GPT2]),
    "mpt olmo": Pre([GPT2], nfc=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": Pre([r"\p{N}", GPT2]),
    "command-r": Pre([r"\p{N}", GPT2], nfc=True),
    "falcon": Pre([r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    "deepseek-llm": Pre(["[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_SIGNS}]+", r"\s+$", _CJK,
                         r"\p{N}+"]),
    "deepseek-coder": Pre(["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"]),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Pre([r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED]),
    "bloom poro-chat gpt3-finnish": Pre([_BLOOM]),
    "viking": Pre([_BLOOM, r"\p{N}"]),
    "default": Pre([r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
}  # fmt: skip
PRE = {name: pre for names, pre in _FAMILIES.items() for name in names.split()}


def gguf_tokenizer(file: GGUFFile) -> LibraryTokenizer:
    """The tokenizer of a GGUF file. Raises InputError if its vocabulary cannot be read exactly."""
    model, tokens = file.text("tokenizer.ggml.model"), file.texts("tokenizer.ggml.tokens")
    types = file.array("tokenizer.ggml.token_type", len(tokens))
    kinds = [NORMAL] * len(tokens) if types is None else [int(t) for t in types]
    if model not in ("gpt2", "llama"):
        raise file.error(f"tokenizer.ggml.model is {short(model)}, which is not supported, expected llama or gpt2")
    if file.flag("tokenizer.ggml.add_eos_token", False):
        raise file.error("tokenizer.ggml.add_eos_token would end every prompt, which is not supported")
    vocab: dict[str, int] = {}
    for id, token in enumerate(tokens):
        if kinds[id] == UNUSED:  # padding by the converter
            continue
        if token in vocab:
            raise file.error(f"token {short(token)} has ids {vocab[token]} and {id}: convert it again")
        vocab[token] = id
    defaults: dict[str, int] = {}
    if model == "gpt2":
        engine, adds_bos = _byte_level(file, vocab)
    else:
        engine, adds_bos, defaults = _sentencepiece(file, tokens, kinds, vocab), True, {"bos": 1, "eos": 2}
    stops = stop_ids(file)
    special = [t for t, id in vocab.items() if kinds[id] in (CONTROL, UNKNOWN) or id in stops]
    user = [t for t, id in vocab.items() if kinds[id] == USER and id not in stops]
    # as llama.cpp: the file does not say it, and the template's newlines would be tokens
    strips = model == "llama" and file.text("general.architecture", "") == "phi3"
    for kind, add in ((special, engine.add_special_tokens), (user, engine.add_tokens)):
        rstrip = {t: strips and t not in ("<unk>", "<s>", "<|endoftext|>") for t in kind if t}
        add([AddedToken(t, special=kind is special, normalized=False, rstrip=r) for t, r in rstrip.items()])
    names = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("sep", "seperator"), ("pad", "padding")):
        id = file.number(f"tokenizer.ggml.{key}_token_id", defaults.get(name, -1))
        if id != -1 and tokens[check_id(file, key, id, len(tokens))] in vocab:
            names[f"{name}_token"] = tokens[id]
    adds_bos = file.flag("tokenizer.ggml.add_bos_token", adds_bos)
    tokenizer = LibraryTokenizer(engine, file.path, names, stops, adds_bos, lambda: _template(file))
    tokenizer.vocab_size = len(tokens)
    return tokenizer


def check_id(file: GGUFFile, key: str, id: int, n: int) -> int:
    if not 0 <= id < n:
        raise file.error(f"tokenizer.ggml.{key}_token_id is {id}, expected one of {n} tokens")
    return id


def _template(file: GGUFFile) -> str:
    if "tokenizer.chat_template" not in file.metadata:
        raise file.error("no chat template (tokenizer.chat_template); if it is a base model, run it without --chat")
    return file.text("tokenizer.chat_template")


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> tuple[Engine, bool]:
    name = file.text("tokenizer.ggml.pre", "default")
    if (pre := PRE.get(name)) is None:
        raise file.error(f"tokenizer.ggml.pre is {short(name)}, which is not supported: take the model's own folder")
    merges = [tuple(merge.split(" ", 1)) for merge in file.texts("tokenizer.ggml.merges")]
    engine = byte_level_bpe(file.path, vocab, merges, list(pre.patterns), pre.whole_words)
    if pre.nfc:
        engine.normalizer = normalizers.NFC()
    return engine, pre.bos


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int], vocab: dict[str, int]) -> Engine:
    """BPE by scores: every way to make a piece of two others is a merge, ranked by the piece's score."""
    scores: Any = file.array("tokenizer.ggml.scores", len(tokens))
    if scores is None or not np.isfinite(scores).all() or not all(NORMAL <= k <= BYTE for k in kinds):
        raise file.error("has no finite tokenizer.ggml.scores, or token types beside 1 to 6: convert it again")
    pieces = {token: id for token, id in vocab.items() if kinds[id] in (NORMAL, USER)}
    merges = [(token[:i], token[i:]) for token in sorted(pieces, key=lambda t: -scores[pieces[t]])
              for i in range(1, len(token)) if token[:i] in pieces and token[i:] in pieces]  # fmt: skip
    unknown = next((token for token, id in vocab.items() if kinds[id] == UNKNOWN), None)
    try:
        engine = Engine(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in kinds))
    except Exception as e:  # the library raises plain Exception
        raise InputError(f"{file.path}: the vocabulary is not read by tokenizers ({e}); convert it again") from None
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    engine.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return engine
