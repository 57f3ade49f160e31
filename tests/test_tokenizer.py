"""The tokenizer package against the libraries that define the ids: `tokenizers` for byte-pair encoding, sentencepiece
for its own models, transformers for chat templates. Every vocabulary is trained or written here; nothing is downloaded.
"""

from __future__ import annotations

import base64
import io
import json
import random
import unicodedata

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errors import InputError
from tokenizer import load_tokenizer
from tokenizer.bpe import merge_pairs
from tokenizer.pretokenize import BYTE_CHARS, GPT2, LLAMA3, QWEN2

hf = pytest.importorskip("tokenizers")
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

TEKKEN = (  # Mistral Nemo's
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|end|>x", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox's tail isn't what they'd seen; we'll say I'M HERE'S 123 4567 times.",
    "def f(x):\n\treturn x ** 2  # squared\r\n\n\n    if x == 10:\n        pass\n",
    "naïve café, Straße, ÅNGSTRÖM, e\u0301 o\u0308, données — “quoted”… 中文分词很有趣。日本語のテキスト 한국어 문장",
    "שלום עולם مرحبا بالعالم हिन्दी में पाठ 👩‍👩‍👧‍👦 🇫🇷🇩🇪 😀😀😀 a🙂b   trailing   ",
    "aaaa aaaaaaaa abababab bcbcbc abcabcabc    spaces     here",
] * 3
ADVERSARIAL = [
    "",
    " ",
    "   ",
    "\n",
    "\t\t\n \n  x",
    "a\r\nb\r\n\r\n c \r\n",
    "trailing spaces   ",
    "  leading",
    "I'm you'RE we'Ve 's 'ſ it'll'd 't",
    "12345678901234567890 3.14159 1,000,000 ½ ² ٣٤٥ Ⅷ",
    "é e\u0301 \u0301\u0302\u0303 ﬁ Å \u212b 각 \u1100\u1161\u11a8",
    "👩‍👩‍👧‍👦🏳️‍🌈🇫🇷🇩🇪🇯 👍🏽 ☺️",
    "中文，没有空格的长句子。日本語テスト「引用」한국어",
    "שָׁלוֹם مَرْحَبًا \u202eRTL\u202c \u200b\u200d\ufeff",
    "\x00\x01\x07\x1b[0m\x7f\x80\x85\xa0\xad\u2028\u2029\u3000\x1c\x1f",
    "<|begin|>Hello<|end|> world<|end|>x<|im_start|>user\nhi<|im_end|>\n",
    "<|begin|><|begin|> <|begin <|end| >|<|end|>|",
    "<s>hi</s> there <s> <unk><pad> <0x41> ▁under▁ ▁",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa abababababab bcabcabcbc",
    "snake_case camelCase SCREAMING HTTPServer x=y+1;//comment\n#!/bin/sh",
    "\U0001f600\U0010ffff\ue000\ufffd",
    "x" * 300 + " " * 300 + "\n" * 50 + "9" * 100,
]
# Characters that every Unicode version in use agrees about (Python 3.11 has version 14).
CHARS = st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\u0295")
TEXT = st.one_of(
    st.text(CHARS, max_size=40),
    st.text("ab c'sdltrvem \n\r\t1239AB.é\u0301中😀", max_size=60),
    st.lists(st.sampled_from([*ADVERSARIAL, *CORPUS[:5], *SPECIAL, "<s>", "</s>", "[INST]"]), max_size=4).map("".join),
)
FUZZ = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def write(folder, **files):
    """Writes files named `tokenizer_config="..."`, as JSON where the value is a dict, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        path = folder / (name if "." in name else f"{name}.json")
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return folder


def add_special(tok):
    tok.add_special_tokens([hf.AddedToken(s, special=True, normalized=False) for s in SPECIAL[:-1]])
    tok.add_tokens([hf.AddedToken(SPECIAL[-1], special=False, normalized=False)])
    return tok


def byte_level(pattern, normalizer=None, ignore_merges=False, prefix=False, bos=False):
    """A byte-level BPE trained by `tokenizers` on CORPUS."""
    tok = hf.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tok.normalizer = normalizer
    if pattern is None:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    else:
        patterns = [pattern] if isinstance(pattern, str) else pattern
        splits = [pre_tokenizers.Split(Regex(p), "isolated") if isinstance(p, str) else p for p in patterns]
        tok.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(prefix, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    add_special(tok)
    if bos:
        template = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tok.token_to_id("<|begin|>"))]
        )
        tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tok


BYTE_LEVEL = {
    "llama3": lambda: byte_level(LLAMA3, ignore_merges=True, bos=True),
    "llama3-merges": lambda: byte_level(LLAMA3),
    "qwen2": lambda: byte_level(QWEN2, normalizers.NFC()),
    "nemo": lambda: byte_level(TEKKEN, ignore_merges=True),
    "gpt2": lambda: byte_level(None),
    "gpt2-prefix": lambda: byte_level(None, prefix=True),
    "split-twice-prefix": lambda: byte_level([r"\p{N}{1,3}", r"[一-龥]+", GPT2], prefix=True),
    "digits": lambda: byte_level(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split("ab", "isolated"), GPT2]
    ),
    "digit-runs": lambda: byte_level([pre_tokenizers.Digits(individual_digits=False), GPT2], normalizers.NFKC()),
    "split-with-gaps": lambda: byte_level(r"[a-z]+", normalizers.Sequence([normalizers.NFC()])),
}


@pytest.fixture(scope="module", params=BYTE_LEVEL)
def pair(request, tmp_path_factory):
    """(ours, the `tokenizers` original), from tokenizer.json."""
    oracle = BYTE_LEVEL[request.param]()
    return load_json(tmp_path_factory.mktemp("json"), oracle), oracle


def load_json(folder, oracle, **files):
    return load_tokenizer(write(folder, **{"tokenizer.json": json.loads(oracle.to_str())}, **files))


def same_ids(ours, oracle, text):
    assert ours.encode(text) == oracle.encode(text).ids, repr(text)
    assert ours.encode(text, bos=False) == oracle.encode(text, add_special_tokens=False).ids, repr(text)
    oracle.encode_special_tokens = True
    plain = oracle.encode(text, add_special_tokens=False).ids
    oracle.encode_special_tokens = False
    assert ours.encode(text, bos=False, parse_special=False) == plain, repr(text)


def same_text(ours, ids, expected):
    """decode and stream give `expected`; nothing streamed is ever taken back."""
    assert ours.decode(ids) == expected
    stream = ours.stream()
    assert "".join(map(stream.put, ids)) + stream.flush() == expected


# ---- tokenizer.json and vocab.json + merges.txt ----------------------------------------------------------------------


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_tokenizer_json_parity(pair, text):
    ours, oracle = pair
    same_ids(ours, oracle, text)
    ids = ours.encode(text)
    same_text(ours, ids, oracle.decode(ids))


@FUZZ
@given(text=TEXT)
def test_tokenizer_json_parity_fuzz(pair, text):
    same_ids(*pair, text)


@FUZZ
@given(seed=st.integers(0, 2**32))
def test_random_ids_decode_as_tokenizers_does(pair, seed):
    ours, oracle = pair
    ids = random.Random(seed).choices(range(ours.vocab_size), k=30)
    same_text(ours, ids, oracle.decode(ids))


@FUZZ
@given(text=TEXT)
def test_decode_inverts_encode(pair, text):
    """Up to normalization, and up to the spaces that add_prefix_space adds."""
    ours, oracle = pair
    decoded, plain = ours.decode(ours.encode(text, parse_special=False)), ours.normalize(text)
    if '"add_prefix_space":true' in oracle.to_str():
        decoded, plain = decoded.replace(" ", ""), plain.replace(" ", "")
    assert decoded == plain


def test_ignore_merges_decides_between_whole_token_and_merges(tmp_path):
    """A token that no merge makes: used only where ignore_merges finds a whole piece."""
    spec = json.loads(byte_level(LLAMA3).to_str())
    new = max(spec["model"]["vocab"].values()) + 100
    spec["model"]["vocab"]["Zyzzyva"] = new
    for flag in (True, False):
        spec["model"]["ignore_merges"] = flag
        ours = load_tokenizer(write(tmp_path / str(flag), **{"tokenizer.json": spec}))
        oracle = hf.Tokenizer.from_str(json.dumps(spec))
        for text in ("Zyzzyva", "xZyzzyva", "Zyzzyva Zyzzyva"):
            same_ids(ours, oracle, text)
        assert (ours.encode("Zyzzyva") == [new]) is flag


@FUZZ
@given(data=st.data())
def test_merge_pairs_on_untrained_merge_lists(data):
    """Merge lists that no training gives: repeated results, unreachable merges, ranks that contradict the ids."""
    vocab = {c: i for i, c in enumerate("abc")}
    merges = []
    for _ in range(data.draw(st.integers(0, 14))):
        left, right = data.draw(st.tuples(*[st.sampled_from(sorted(vocab))] * 2))
        if len(left + right) <= 8:
            vocab.setdefault(left + right, len(vocab))
            merges.append((left, right))
    merges = data.draw(st.permutations(merges))
    oracle = models.BPE(vocab=vocab, merges=merges)
    table = {(vocab[a], vocab[b]): (rank, vocab[a + b]) for rank, (a, b) in enumerate(merges)}
    for text in data.draw(st.lists(st.text("abc", max_size=24), min_size=1, max_size=8)):
        assert merge_pairs([vocab[c] for c in text], table) == [t.id for t in oracle.tokenize(text)], (merges, text)


def test_merges_written_as_strings_and_as_pairs_agree(tmp_path):
    spec = json.loads(byte_level(LLAMA3).to_str())
    pairs = spec["model"]["merges"]
    assert isinstance(pairs[0], list)
    a = load_tokenizer(write(tmp_path / "pairs", **{"tokenizer.json": spec}))
    spec["model"]["merges"] = [" ".join(p) for p in pairs]
    b = load_tokenizer(write(tmp_path / "strings", **{"tokenizer.json": spec}))
    assert all(a.encode(t) == b.encode(t) for t in ADVERSARIAL)


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_vocab_and_merges_files(tmp_path, kind):
    oracle = BYTE_LEVEL["qwen2" if kind == "Qwen2Tokenizer" else "gpt2"]()
    oracle.model.save(str(tmp_path))
    tokens = {str(oracle.token_to_id(s)): {"content": s, "special": s != SPECIAL[-1]} for s in SPECIAL}
    tokens[str(oracle.token_to_id(SPECIAL[-1]))]["normalized"] = False
    config = {"tokenizer_class": kind, "added_tokens_decoder": tokens, "eos_token": "<|im_end|>", "bos_token": None}
    ours = load_tokenizer(write(tmp_path, tokenizer_config=config))
    for text in ADVERSARIAL + CORPUS:
        same_ids(ours, oracle, text)
    assert ours.bos_id is None and ours.eos_ids == {oracle.token_to_id("<|im_end|>")}
    assert ours.vocab_size == oracle.get_vocab_size()


def test_added_token_flags(tmp_path):
    """lstrip, rstrip, and tokens that are looked for in the normalized text."""
    tok = byte_level(QWEN2, normalizers.NFC())
    tok.add_special_tokens([hf.AddedToken("<mask>", lstrip=True, rstrip=False), hf.AddedToken("[R]", rstrip=True)])
    tok.add_tokens([hf.AddedToken("e\u0301t", normalized=True), hf.AddedToken("<mask>>", lstrip=True, rstrip=True)])
    ours = load_json(tmp_path, tok)
    for text in (
        "a  <mask> b",
        "<mask>",
        " \n\u3000<mask>\x1c",
        "a\x1c<mask>",
        "[R]\x1c b",
        "x[R]  \t y",
        "ét e\u0301t été",
        "<mask>>  <mask>  >[R] <mask>",
    ):
        same_ids(ours, tok, text)
    assert ours.encode("a  <mask>") == [*ours.encode("a"), tok.token_to_id("<mask>")]


def test_special_tokens_named_only_beside_the_vocabulary(tmp_path):
    """added_tokens.json and special_tokens_map.json, as older Qwen and Llama folders have them."""
    oracle = byte_level(QWEN2, normalizers.NFC())
    size = oracle.model.save(str(tmp_path)) and len(json.loads((tmp_path / "vocab.json").read_text()))
    named = {"eos_token": {"content": "<|end|>"}, "additional_special_tokens": ["<|im_start|>"]}
    added = {"<|end|>": size, "<|im_start|>": size + 1, "<extra>": size + 2}
    files = {"config": {"model_type": "qwen2"}, "special_tokens_map": named, "added_tokens": added}
    ours = load_tokenizer(write(tmp_path, **files))
    ids = ours.encode("<|im_start|>x<extra><|end|>")
    assert ids == [size + 1, oracle.token_to_id("x"), size + 2, size] and ours.decode(ids) == "x<extra>"
    assert ours.eos_ids == {size} and ours.vocab_size == size + 3


def test_bos_follows_post_processor_unless_the_config_says_otherwise(tmp_path):
    bos = byte_level(LLAMA3, bos=True)
    begin = bos.token_to_id("<|begin|>")
    ours = load_json(tmp_path / "a", bos)
    assert ours.bos_id == begin and ours.encode("hi")[0] == begin and ours.encode("hi", bos=False)[0] != begin
    off = load_json(tmp_path / "b", bos, tokenizer_config={"add_bos_token": False, "bos_token": "<|begin|>"})
    assert off.bos_id == begin and off.encode("hi") == ours.encode("hi", bos=False)
    plain = byte_level(LLAMA3)
    silent = load_json(tmp_path / "c", plain, tokenizer_config={"bos_token": {"content": "<|begin|>"}})
    assert silent.bos_id == begin and silent.encode("hi") == ours.encode("hi", bos=False)
    on = load_json(tmp_path / "d", plain, tokenizer_config={"add_bos_token": True, "bos_token": "<|begin|>"})
    assert on.encode("hi") == ours.encode("hi")


def test_stop_ids_are_a_union(tmp_path):
    tok = byte_level(LLAMA3)
    files = {"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 9]}}
    ours = load_json(tmp_path, tok, **files, tokenizer_config={"eos_token": "<|im_end|>"})
    assert ours.eos_ids == {5, 7, 9, tok.token_to_id("<|im_end|>")}


def test_a_long_run_of_one_character_is_no_problem(tmp_path):
    ours = load_json(tmp_path, byte_level(LLAMA3))
    for char in " a\n1😀":
        text = char * 20_000
        assert ours.decode(ours.encode(text)) == text


# ---- byte fallback in tokenizer.json ---------------------------------------------------------------------------------


def fallback_spec(scheme):
    """Llama 2's tokenizer.json in small: with Prepend and Replace ("normalizer"), or Metaspace's prepend_scheme."""
    tok = hf.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    tok.train_from_iterator(
        [line[:40] for line in CORPUS],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)]],
            show_progress=False,
        ),
    )
    spec = json.loads(tok.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if scheme == "normalizer":
        spec["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
        spec["pre_tokenizer"] = None
    else:
        spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    spec["decoder"] = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    return spec


@pytest.mark.parametrize("scheme", ["normalizer", "always", "first", "never"])
@pytest.mark.parametrize("normalized", [False, True])
def test_byte_fallback_tokenizer_json(tmp_path, scheme, normalized):
    spec = fallback_spec(scheme)
    for token in spec["added_tokens"]:
        token["normalized"] = normalized
    ours = load_tokenizer(write(tmp_path, **{"tokenizer.json": spec}))
    oracle = hf.Tokenizer.from_str(json.dumps(spec))
    for text in ADVERSARIAL + CORPUS + ["<s>a</s> b</s>c", "</s> ", "a <s> b"]:
        same_ids(ours, oracle, text)
        ids = ours.encode(text)
        if not normalized:  # the oracle shows the special tokens whose names its normalizer changed
            same_text(ours, ids, oracle.decode(ids))


# ---- SentencePiece ---------------------------------------------------------------------------------------------------

LINES = [line for text in CORPUS for line in text.splitlines() if line.strip()] + [f"number {i}" for i in range(50)]
SP_KINDS = {
    "llama": dict(byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False),
    "no-prefix": dict(
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False
    ),
    "tiny": dict(
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        split_digits=True, allow_whitespace_only_pieces=True, user_defined_symbols=["\n", "[INST]"], pad_id=-1,
    ),
    "defaults": dict(byte_fallback=True, control_symbols=["[CTRL]"]),
    "unknowns": dict(character_coverage=0.98),
}  # fmt: skip


@pytest.fixture(scope="module")
def sp_protos():
    protos = {}
    for name, options in SP_KINDS.items():
        out = io.BytesIO()
        options = dict(character_coverage=1.0, vocab_size=480 if "byte_fallback" in options else 200) | options
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=out, model_type="bpe", minloglevel=2, num_threads=1, **options
        )
        protos[name] = out.getvalue()
    return protos


@pytest.fixture(scope="module", params=SP_KINDS)
def sp_pair(request, sp_protos, tmp_path_factory):
    proto = sp_protos[request.param]
    folder = write(tmp_path_factory.mktemp("sp"), **{"tokenizer.model": proto})
    return load_tokenizer(folder), sentencepiece.SentencePieceProcessor(model_proto=proto)


def is_plain(text):
    return not any(token in text for token in ("<s>", "</s>", "<unk>", "<pad>", "[CTRL]"))


@pytest.mark.parametrize("text", [t for t in ADVERSARIAL if is_plain(t)])
def test_sentencepiece_parity(sp_pair, text):
    ours, sp = sp_pair
    ids = sp.encode(text)
    assert ours.encode(text, bos=False) == ids and ours.encode(text) == [sp.bos_id(), *ids]
    if sp.unk_id() not in ids:
        same_text(ours, ours.encode(text), sp.decode(ids))


@FUZZ
@given(text=TEXT.filter(is_plain))
def test_sentencepiece_parity_fuzz(sp_pair, text):
    ours, sp = sp_pair
    assert ours.encode(text, bos=False) == sp.encode(text)


@FUZZ
@given(seed=st.integers(0, 2**32))
def test_sentencepiece_decodes_random_ids(sp_pair, seed):
    """Dummy prefixes and invalid bytes as sentencepiece's own decode; control tokens anywhere change nothing."""
    ours, sp = sp_pair
    rng = random.Random(seed)
    space = [i for i in range(sp.get_piece_size()) if sp.id_to_piece(i).startswith("▁")]
    byte = [i for i in range(sp.get_piece_size()) if sp.is_byte(i)] or space
    control = {i for i in range(sp.get_piece_size()) if sp.is_control(i)}
    pools = [space, byte, list(control), range(1, sp.get_piece_size())]
    ids = [rng.choice(rng.choice(pools)) for _ in range(12)]
    same_text(ours, ids, sp.decode([i for i in ids if i not in control]))
    blanks = [i for i in space if not sp.id_to_piece(i).strip("▁")]
    ids = [rng.choice([*blanks, sp.bos_id()]) for _ in range(3)] + ids
    same_text(ours, ids, sp.decode([i for i in ids if i not in control]))


@pytest.mark.parametrize("legacy", [None, True, False])
def test_sentencepiece_special_tokens_in_text(tmp_path, sp_protos, legacy):
    proto = sp_protos["llama"]
    sp = sentencepiece.SentencePieceProcessor(model_proto=proto)
    size = sp.get_piece_size()
    config = {"added_tokens_decoder": {"1": {"content": "<s>", "special": True}, str(size): {"content": "<tool>"}}}
    config |= {} if legacy is None else {"legacy": legacy}
    ours = load_tokenizer(write(tmp_path, tokenizer_config=config, **{"tokenizer.model": proto}))

    def rest(text):  # without the dummy prefix: what follows a byte piece is encoded the same way as at the start
        ids = sp.encode("\x01" + text)
        return ids[ids.index(sp.piece_to_id("<0x01>")) + 1 :]

    after = rest if legacy is False else sp.encode
    bos, eos = sp.bos_id(), sp.eos_id()
    assert ours.encode("<s>The fox</s> tail<tool>x", bos=False) == [
        bos, *after("The fox"), eos, *after(" tail"), size, *after("x"),
    ]  # fmt: skip
    assert ours.encode("The <s>") == [bos, *sp.encode("The "), bos]
    assert rest("The fox") != sp.encode("The fox")  # the case tells the two apart
    assert ours.encode("<s>The", bos=False, parse_special=False) == sp.encode("<s>The")
    assert ours.decode([bos, *sp.encode("The fox"), size, eos]) == "The fox<tool>"
    assert ours.vocab_size == size + 1 and ours.eos_ids == {eos} and ours.bos_id == bos
    if legacy is not None:  # the same convention where a tokenizer.json is there to state it
        spec = fallback_spec("always" if legacy else "first")
        files = {"tokenizer.model": proto, "tokenizer.json": spec}
        stated = load_tokenizer(write(tmp_path / "json", tokenizer_config={}, **files))
        assert stated.encode("<s>The fox</s> tail") == ours.encode("<s>The fox</s> tail")


def test_sentencepiece_without_prefix_space(tmp_path, sp_protos):
    config = {"add_prefix_space": False}
    files = {"tokenizer.model": sp_protos["llama"]}
    ours = load_tokenizer(write(tmp_path, tokenizer_config=config, **files))
    with_prefix = load_tokenizer(write(tmp_path / "p", **files))
    for text in ("The fox", " The fox", "", "  "):
        assert ours.decode(ours.encode(text)) == text == with_prefix.decode(with_prefix.encode(text))
    assert ours.encode(" The fox") == with_prefix.encode("The fox") != ours.encode("The fox")


def test_unknown_and_out_of_range_ids_decode_to_nothing(sp_pair, pair):
    for ours in (sp_pair[0], pair[0]):
        assert ours.decode([ours.vocab_size, -1, 10**9]) == ""


# ---- tiktoken's format -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    """A Llama 3 folder as Meta publishes it, and the same vocabulary in `tokenizers`."""
    oracle = byte_level(LLAMA3, ignore_merges=True)
    spec = json.loads(oracle.to_str())
    spec["added_tokens"] = []
    oracle = hf.Tokenizer.from_str(json.dumps(spec))
    back = {v: k for k, v in spec["model"]["vocab"].items()}
    chars = {c: b for b, c in BYTE_CHARS.items()}
    lines = [b"%s %d" % (base64.b64encode(bytes(chars[c] for c in back[i])), i) for i in range(len(back))]
    folder = write(tmp_path_factory.mktemp("llama3"), **{"tokenizer.model": b"\n".join(lines) + b"\n"})
    return folder, oracle


def test_tiktoken_file_parity(llama3):
    folder, oracle = llama3
    ours, base = load_tokenizer(folder), oracle.get_vocab_size()
    for text in ADVERSARIAL + CORPUS:
        ids = ours.encode(text, bos=False)
        assert ids == oracle.encode(text).ids
        same_text(ours, ids, text)
    assert ours.vocab_size == base + 256 and ours.bos_id == base
    assert ours.eos_ids == {base + 1, base + 8, base + 9}  # end of text, message, turn
    ids = ours.encode("<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|reserved_special_token_247|>")
    hi = oracle.encode("\n\nhi").ids
    assert ids == [base, base + 6, *oracle.encode("user").ids, base + 7, *hi, base + 9, base + 255]
    assert ours.decode(ids) == "user\n\nhi"


def test_tiktoken_survives_a_million_blanks(llama3):
    text = " " * 1_000_000 + "a"
    ours = load_tokenizer(llama3[0])
    assert ours.decode(ours.encode(text)) == text


def test_tiktoken_names_from_the_config(llama3, tmp_path):
    base = llama3[1].get_vocab_size()
    tokens = {str(base): {"content": "<bos>", "special": True}, str(base + 5): {"content": "<stop>", "special": True}}
    config = {"added_tokens_decoder": tokens, "bos_token": "<bos>", "eos_token": "<stop>", "add_bos_token": False}
    data = (llama3[0] / "tokenizer.model").read_bytes()
    ours = load_tokenizer(write(tmp_path, tokenizer_config=config, **{"tokenizer.model": data}))
    assert ours.eos_ids == {base + 5} and ours.encode("<bos>") == [base] and ours.vocab_size == base + 6
    write(tmp_path, **{"tokenizer.json": json.loads(byte_level(LLAMA3).to_str())}, tokenizer_config={})
    assert type(load_tokenizer(tmp_path)).__name__ == "BPETokenizer"  # goes before either kind of tokenizer.model


# ---- streaming -------------------------------------------------------------------------------------------------------


@FUZZ
@given(text=TEXT)
def test_stream_prints_whole_characters(pair, text):
    """Text without U+FFFD never shows one, and what is shown is at every step all that is complete."""
    ours, _ = pair
    ids = ours.encode(text, bos=False, parse_special=False)
    stream, shown, data = ours.stream(), "", b""
    for id in ids:
        shown += stream.put(id)
        data += ours.token_bytes[id]
        assert shown == data.decode("utf-8", "ignore")
        assert "\ufffd" not in shown or "\ufffd" in text
    assert stream.flush() == ""


def test_stream_flushes_half_a_character(pair):
    ours, _ = pair
    half = ours.encode("\U0010ffff", bos=False)[:-1]
    stream = ours.stream()
    assert "".join(stream.put(id) for id in half).strip(" ") == ""  # a prefix space is a character
    assert stream.flush() == "\ufffd"


# ---- chat ------------------------------------------------------------------------------------------------------------

LLAMA3_CHAT = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
LLAMA2_CHAT = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHATML = """{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content | tojson if message.content is mapping else message.content }}<|im_end|>
{% endfor %}
{% if tools is not none %}TOOLS{% endif %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
USER = {"role": "user", "content": " Is 1 < 2 & 'é'?\n"}
CHATS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes."}, USER],
    [{"role": "user", "content": {"a": "<é>", "b": [1, None]}}],
]


@pytest.mark.parametrize("template", [LLAMA3_CHAT, LLAMA2_CHAT, CHATML], ids=["llama3", "llama2", "chatml"])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_templates_render_as_in_transformers(tmp_path, template, prompt):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    ours = load_json(tmp_path, byte_level(LLAMA3), tokenizer_config={"chat_template": template, **names})
    for chat in CHATS if template is CHATML else CHATS[:2]:
        [expected], _ = utils.render_jinja_template(
            [chat], chat_template=template, add_generation_prompt=prompt, **names
        )
        assert ours.apply_chat_template(chat, add_generation_prompt=prompt) == expected


def test_encode_chat_has_one_bos_and_real_special_tokens(tmp_path, sp_protos):
    config = {"chat_template": LLAMA2_CHAT}
    ours = load_tokenizer(write(tmp_path, tokenizer_config=config, **{"tokenizer.model": sp_protos["llama"]}))
    sp = ours.start
    ids = ours.encode_chat([USER, {"role": "assistant", "content": "Yes."}, USER])
    ask = sp.encode(f"[INST] {USER['content'].strip()} [/INST]")
    assert ids == [1, *sp.encode(f"[INST] {USER['content'].strip()} [/INST] Yes. "), 2, 1, *ask]


def test_chat_template_sources(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ eos_token }}"}]
    tok = byte_level(LLAMA3)
    config = {"chat_template": named, "eos_token": "<|end|>"}
    assert load_json(tmp_path, tok, tokenizer_config=config).apply_chat_template([USER]) == "D<|end|>"
    (tmp_path / "chat_template.jinja").write_text("F{{ pad_token }}{{ strftime_now('%Y')|length }}")
    assert load_tokenizer(tmp_path).apply_chat_template([USER]) == "F4"
    config["chat_template"] = named[:1]
    with pytest.raises(InputError, match="'default'.*tool_use"):
        load_json(tmp_path / "b", tok, tokenizer_config=config).encode_chat([USER])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].content.nothing.here }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ raise_exception.__globals__['json'] }}", "SecurityError"),
        ("{{ lipsum.__globals__['os'].popen('id').read() }}", "SecurityError"),
        ("{{ (''|attr('__class__')).__mro__ }}", "SecurityError"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_chat_template_failures_are_one_line(tmp_path, template, reason):
    ours = load_json(tmp_path, byte_level(LLAMA3), tokenizer_config={"chat_template": template})
    with pytest.raises(InputError, match=reason) as e:
        ours.encode_chat([USER])
    assert "\n" not in str(e.value)


def test_no_chat_template(pair):
    with pytest.raises(InputError, match="no chat template.*without --chat"):
        pair[0].encode_chat([USER])


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_spec():
    return byte_level(LLAMA3, bos=True).to_str()


def edit(spec, path, value):
    node = spec
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
UNSUPPORTED = [
    (["model", "type"], "WordPiece", "model type WordPiece"),
    (["model", "type"], "Unigram", "model type Unigram"),
    (["model", "dropout"], 0.1, "dropout"),
    (["model", "end_of_word_suffix"], "</w>", "end_of_word_suffix"),
    (["model", "continuing_subword_prefix"], "##", "continuing_subword_prefix"),
    (["model", "merges"], [["a", "\u4e2d"]], "merge 0"),
    (["model", "merges"], ["a b c"], "merge 0"),
    (["model", "vocab"], {"a": 0}, "merge 0"),
    (["model", "byte_fallback"], True, "lacks 256 of the 256 bytes"),
    (["normalizer"], {"type": "Lowercase"}, "normalizer.*Lowercase"),
    (["normalizer"], {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}, "normalizer.*Regex"),
    (["pre_tokenizer"], None, "pre_tokenizer"),
    (["pre_tokenizer"], {"type": "Whitespace"}, "pre_tokenizer.*Whitespace"),
    (["pre_tokenizer", "pretokenizers", 0, "behavior"], "Removed", "pre_tokenizer.*Removed"),
    (["pre_tokenizer", "pretokenizers"], [LEVEL, LEVEL], "pre_tokenizer.*ByteLevel"),
    *[
        (["pre_tokenizer", "pretokenizers", 0], SPLIT | {"pattern": {"Regex": p}}, "pattern .* is not supported")
        for p in (r"^a|b", r"\w+", r"[\p{L}&&[a-z]]", r"[a&&b]", r"a{2}+", r"(?i)a", r"(a)\1", r"\h+", "a$")
    ],
    (["pre_tokenizer", "pretokenizers", 0], SPLIT | {"pattern": {"Regex": r"\p{Nonsense}"}}, "unknown property"),
    (["decoder"], {"type": "WordPiece"}, "decoder.*WordPiece"),
    (["decoder"], None, "decoder"),
    (["post_processor"], {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["a", 1]}, "post_processor.*Roberta"),
    (
        ["post_processor", "processors", 1, "single"],
        [{"Sequence": {}}, {"SpecialToken": {"id": "x"}}],
        "post_processor",
    ),
    (["added_tokens", 0, "single_word"], True, "<.begin.>.*single_word"),
    (["added_tokens", 0, "content"], "a", "added token 'a'"),
    (["model"], "BPE", "malformed"),
    (["model", "vocab"], None, "malformed"),
    (["added_tokens"], [1], "malformed"),
]


@pytest.mark.parametrize(("path", "value", "message"), UNSUPPORTED)
def test_unsupported_tokenizer_json_is_refused_by_name(tmp_path, good_spec, path, value, message):
    spec = json.loads(good_spec)
    load_tokenizer(write(tmp_path, **{"tokenizer.json": spec}))
    edit(spec, path, value)
    with pytest.raises(InputError, match=message) as e:
        load_tokenizer(write(tmp_path, **{"tokenizer.json": spec}))
    assert "\n" not in str(e.value)


def test_a_missing_byte_is_refused(tmp_path, good_spec):
    spec = json.loads(good_spec)
    spec["model"]["merges"] = []
    del spec["model"]["vocab"]["Ā"]
    with pytest.raises(InputError, match="lacks 1 of the 256 bytes, 'Ā'"):
        load_tokenizer(write(tmp_path, **{"tokenizer.json": spec}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(pre_tokenizer={"type": "BertPreTokenizer"}), "pre_tokenizer.*Bert"),
        (lambda s: s["decoder"]["decoders"].pop(1), "decoder"),
        (lambda s: s["pre_tokenizer"].update(split=True), "pre_tokenizer.*Metaspace"),
    ],
)
def test_unsupported_byte_fallback_is_refused(tmp_path, change, message):
    spec = fallback_spec("first")
    change(spec)
    with pytest.raises(InputError, match=message):
        load_tokenizer(write(tmp_path, **{"tokenizer.json": spec}))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer here, expected tokenizer.json, tokenizer.model, or vocab.json with merges.txt"),
        ({"vocab.json": {}}, "no tokenizer"),
        ({"tokenizer.json": b"{"}, "tokenizer.json: not valid JSON"),
        ({"tokenizer.json": b"\xff\xfe"}, "not UTF-8"),
        ({"tokenizer.json": b"[" * 100_000}, "not valid JSON"),
        ({"tokenizer.json": b"[1]"}, "holds a JSON list, expected an object"),
        ({"tokenizer.json": LFS}, "Git LFS pointer.*git lfs pull"),
        ({"tokenizer_config.json": b"nonsense"}, "tokenizer_config.json: not valid JSON"),
        ({"tokenizer.model": LFS}, "Git LFS pointer"),
        ({"tokenizer.model": b""}, "tokenizer.model: empty"),
        ({"tokenizer.model": b"\x80\x04not a model"}, "tokenizer.model: cannot be parsed"),
        ({"tokenizer.model": b"<html>404</html>"}, "tokenizer.model: cannot be parsed"),
        ({"tokenizer.model": b"IQ== 0\nnot a line\n"}, "line 2 is b'not a line'"),
        ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "lacks single bytes"),
        ({"vocab.json": {"a": 0}, "merges.txt": b"#version: 0.2\n"}, "class not named, expected Qwen2Tokenizer"),
        (
            {"vocab.json": {"a": 0}, "merges.txt": b"", "tokenizer_config": {"tokenizer_class": "X"}},
            "class X, expected",
        ),
        ({"vocab.json": {"a": 0}, "merges.txt": b"a b\n", "config": {"model_type": "qwen2"}}, "merge 0"),
    ],
)
def test_bad_files(tmp_path, files, message):
    with pytest.raises(InputError, match=message) as e:
        load_tokenizer(write(tmp_path, **files))
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"bos_token": "<nope>"}}, "bos_token '<nope>' is not in the vocabulary"),
        ({"tokenizer_config": {"eos_token": "<nope>"}}, "eos_token '<nope>' is not in the vocabulary"),
        ({"tokenizer_config": {"add_eos_token": True}}, "add_eos_token"),
        ({"tokenizer_config": {"eos_token": 3}}, "eos_token 3 is not in the vocabulary"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "malformed"),
        ({"config": {"eos_token_id": "2"}}, "config.json: eos_token_id is '2'"),
        ({"generation_config": {"eos_token_id": [1, None]}}, "generation_config.json: eos_token_id"),
        ({"generation_config": {"eos_token_id": True}}, "generation_config.json: eos_token_id"),
    ],
)
def test_bad_configuration(tmp_path, sp_protos, files, message):
    with pytest.raises(InputError, match=message):
        load_tokenizer(write(tmp_path, **{"tokenizer.model": sp_protos["llama"]}, **files))


def test_bad_paths_and_text(tmp_path, pair):
    with pytest.raises(InputError, match="does not exist"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        load_tokenizer(str(tmp_path / "file"))
    with pytest.raises(InputError, match="not valid Unicode at character 1"):
        pair[0].encode("a\ud800")


def test_the_patterns_agree_on_every_character(tmp_path):
    """Character by character, for the Unicode that Python knows: a class that `regex` reads otherwise would show."""
    chars = [chr(c) for c in range(0x11000) if unicodedata.category(chr(c)) not in ("Cs", "Cn") and c != 0x295]
    for pattern in (GPT2, LLAMA3, TEKKEN):
        oracle = byte_level(pattern)
        ours = load_json(tmp_path, oracle)
        for at in range(0, len(chars), 8000):
            text = "".join(f"{c}a{c}1 {c}" for c in chars[at : at + 8000])
            assert ours.encode(text) == oracle.encode(text).ids
