"""The tokenizer package against the libraries that define the ids: `tokenizers`, sentencepiece and tiktoken, and
transformers for chat templates. Every vocabulary is trained or written here; nothing is downloaded. Published
vocabularies: tests/test_real_files.py.
"""

from __future__ import annotations

import base64
import io
import json
import random

import gguf
import pytest
import sentencepiece
import tokenizers as hf
from formats_files import sentencepiece_vocab
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from loading.tokenizer import load_tokenizer
from loading.tokenizer.chat import template_variable
from loading.tokenizer.gguf import PRE
from loading.tokenizer.library import CHAR_BYTES, GPT2, LLAMA3, QWEN2
from loading.tokenizer.turns import Chat, ChatParts
from runtime.errors import InputError
from runtime.machine import TINY
from weights.gguf_config import stop_ids
from weights.gguf_file import GGUFFile

SPECIAL = ["<|begin|>", "<|end|>", "<|end|>x", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox's tail isn't what they'd seen; we'll say I'M HERE'S 123 4567 times.",
    "def f(x):\n\treturn x ** 2  # squared\r\n\n\n    if x == 10:\n        pass\n",
    "naïve café, Straße, ÅNGSTRÖM, e\u0301 o\u0308, données — “quoted”… 中文分词很有趣。日本語のテキスト 한국어 문장",
    "שלום עולם مرحبا بالعالم हिन्दी में पाठ 👩‍👩‍👧‍👦 🇫🇷🇩🇪 😀😀😀 a🙂b   trailing   ",
    "aaaa aaaaaaaa abababab bcbcbc abcabcabc    spaces     here",
] * 3
ADVERSARIAL = [
    "", " ", "   ", "\n", "\t\t\n \n  x", "a\r\nb\r\n\r\n c \r\n", "trailing spaces   ", "  leading",
    "I'm you'RE we'Ve 's 'ſ it'll'd 't", "12345678901234567890 3.14159 1,000,000 ½ ² ٣٤٥ Ⅷ",
    "é e\u0301 \u0301\u0302\u0303 ﬁ Å \u212b 각 \u1100\u1161\u11a8", "👩‍👩‍👧‍👦🏳️‍🌈🇫🇷🇩🇪🇯 👍🏽 ☺️",
    "中文，没有空格的长句子。日本語テスト「引用」한국어", "שָׁלוֹם مَرْحَبًا \u202eRTL\u202c \u200b\u200d\ufeff",
    "\x00\x01\x07\x1b[0m\x7f\x80\x85\xa0\xad\u2028\u2029\u3000\x1c\x1f",
    "<|begin|>Hello<|end|> world<|end|>x<|im_start|>user\nhi<|im_end|>\n",
    "<|begin|><|begin|> <|begin <|end| >|<|end|>|", "<s>hi</s> there <s> <unk><pad> <0x41> ▁under▁ ▁",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa abababababab bcabcabcbc",
    "snake_case camelCase SCREAMING HTTPServer x=y+1;//comment\n#!/bin/sh", "\U0001f600\U0010ffff\ue000\ufffd",
    "x" * 300 + " " * 300 + "\n" * 50 + "9" * 100,
]  # fmt: skip
TEXT = st.one_of(
    st.text(max_size=40),
    st.text("ab c'sdltrvem \n\r\t1239AB.é\u0301中😀", max_size=60),
    st.lists(st.sampled_from([*ADVERSARIAL, *CORPUS[:5], *SPECIAL, "<s>", "</s>", "[INST]"]), max_size=4).map("".join),
)
FUZZ = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def write(folder, **files):
    """Writes files named `tokenizer_config="..."`, as JSON where the value is a dict, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        path = folder / (name if "." in name else f"{name}.json")
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return folder


def trained(pre, normalizer=None, **options):
    """A byte-level BPE trained by `tokenizers` on CORPUS: pre is a pattern, or pre-tokenizers before ByteLevel."""
    tok = hf.Tokenizer(models.BPE(**options))
    tok.normalizer = normalizer
    steps = [pre_tokenizers.Split(Regex(p), "isolated") if isinstance(p, str) else p for p in pre]
    tok.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    tok.add_special_tokens([hf.AddedToken(s, special=True, normalized=False) for s in SPECIAL[:-1]])
    tok.add_tokens([hf.AddedToken(SPECIAL[-1], special=False, normalized=False)])
    return tok


def llama3(bos=True):
    tok = trained([LLAMA3], ignore_merges=True)
    if bos:
        template = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tok.token_to_id("<|begin|>"))]
        )
        tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tok


def fallback(scheme):
    """Llama 2's tokenizer.json in small: with Prepend and Replace ("normalizer"), or Metaspace's prepend_scheme."""
    tok = hf.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    special = ["<unk>", "<s>", "</s>"]
    first = [*special, *[f"<0x{b:02X}>" for b in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False)
    tok.train_from_iterator([line[:40] for line in CORPUS], trainer)
    spec = json.loads(tok.to_str())
    spec["added_tokens"] = spec["added_tokens"][: len(special)]
    tok = hf.Tokenizer.from_str(json.dumps(spec))
    if scheme == "normalizer":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tok.pre_tokenizer = None
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tok.decoder = decoders.Sequence(steps)
    return tok


def unigram():
    pieces = [
        ("<unk>", 0.0),
        *((p, -float(i)) for i, p in enumerate(["▁", "▁the", "a", "b", "c", "e", "r", "t", "▁x"], 1)),
    ]
    tok = hf.Tokenizer(models.Unigram(pieces, unk_id=0))
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tok


def word_piece():
    vocab = {t: i for i, t in enumerate(["[UNK]", "the", "cat", "##s", "a", "b", "##c", ".", "x"])}
    tok = hf.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tok


LIBRARY = {
    "llama3": llama3,
    "qwen2": lambda: trained([QWEN2], normalizers.NFC()),
    "gpt2-digits": lambda: trained([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "split-with-gaps": lambda: trained([r"[a-z]+"], normalizers.Sequence([normalizers.NFC()])),
    **{f"llama2-{s}": lambda s=s: fallback(s) for s in ("normalizer", "always", "first", "never")},
    "unigram": unigram,
    "word_piece": word_piece,
}


@pytest.fixture(scope="module", params=LIBRARY)
def pair(request, tmp_path_factory):
    """(ours, the `tokenizers` original), from tokenizer.json."""
    oracle = LIBRARY[request.param]()
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


# ---- tokenizer.json, and vocab.json with merges.txt ------------------------------------------------------------------


@FUZZ
@given(text=TEXT)
def test_ids_and_text_are_those_of_tokenizers(pair, text):
    ours, oracle = pair
    for t in (text, *ADVERSARIAL):
        same_ids(ours, oracle, t)
        ids = ours.encode(t)
        if "BertPre" not in str(oracle.pre_tokenizer):  # whose decoder rewrites what came before
            same_text(ours, ids, oracle.decode(ids))


@FUZZ
@given(seed=st.integers(0, 2**32))
def test_random_ids_decode_as_tokenizers_does(pair, seed):
    ours, oracle = pair
    ids = random.Random(seed).choices(range(ours.vocab_size), k=30)
    if ours.byte_level:
        same_text(ours, ids, oracle.decode(ids))
    else:  # a run of bytes that is not UTF-8 as a whole is all U+FFFD there, and only its invalid part here
        ids = [i for i in ids if i not in ours.fallback]
        if "BertPre" not in str(oracle.pre_tokenizer):
            same_text(ours, ids, oracle.decode(ids))


def test_word_pieces_are_text(tmp_path):
    ours = load_json(tmp_path, word_piece())
    assert ours.decode(ours.encode("the cats. ac")) == "the cats. ac"


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_vocab_and_merges_files(tmp_path, kind):
    oracle = trained([QWEN2], normalizers.NFC()) if kind == "Qwen2Tokenizer" else trained([GPT2])
    oracle.model.save(str(tmp_path))
    tokens = {str(oracle.token_to_id(s)): {"content": s, "special": s != SPECIAL[-1]} for s in SPECIAL}
    tokens[str(oracle.token_to_id(SPECIAL[-1]))]["normalized"] = False
    config = {"tokenizer_class": kind, "added_tokens_decoder": tokens, "eos_token": "<|im_end|>", "bos_token": None}
    ours = load_tokenizer(write(tmp_path, tokenizer_config=config))
    for text in ADVERSARIAL + CORPUS:
        same_ids(ours, oracle, text)
    assert ours.bos_id is None and ours.eos_ids == {oracle.token_to_id("<|im_end|>")}
    assert ours.vocab_size == oracle.get_vocab_size()


def test_special_tokens_named_only_beside_the_vocabulary(tmp_path):
    """added_tokens.json and special_tokens_map.json, as older Qwen and Llama folders have them."""
    oracle = trained([QWEN2], normalizers.NFC())
    size = oracle.model.save(str(tmp_path)) and len(json.loads((tmp_path / "vocab.json").read_text()))
    named = {"eos_token": {"content": "<|end|>"}, "additional_special_tokens": ["<|im_start|>"]}
    added = {"<|end|>": size, "<|im_start|>": size + 1, "<extra>": size + 2}
    files = {"config": {"model_type": "qwen2"}, "special_tokens_map": named, "added_tokens": added}
    ours = load_tokenizer(write(tmp_path, **files))
    ids = ours.encode("<|im_start|>x<extra><|end|>")
    assert ids == [size + 1, oracle.token_to_id("x"), size + 2, size] and ours.decode(ids) == "x<extra>"
    assert ours.eos_ids == {size} and ours.vocab_size == size + 3


def test_bos_follows_post_processor_unless_the_config_says_otherwise(tmp_path):
    bos = llama3()
    begin = bos.token_to_id("<|begin|>")
    ours = load_json(tmp_path / "a", bos)
    assert ours.bos_id == begin and ours.encode("hi")[0] == begin and ours.encode("hi", bos=False)[0] != begin
    off = load_json(tmp_path / "b", bos, tokenizer_config={"add_bos_token": False, "bos_token": "<|begin|>"})
    assert off.bos_id == begin and off.encode("hi") == ours.encode("hi", bos=False)
    plain = llama3(bos=False)
    silent = load_json(tmp_path / "c", plain, tokenizer_config={"bos_token": {"content": "<|begin|>"}})
    assert silent.bos_id == begin and silent.encode("hi") == ours.encode("hi", bos=False)
    on = load_json(tmp_path / "d", plain, tokenizer_config={"add_bos_token": True, "bos_token": "<|begin|>"})
    assert on.encode("hi") == ours.encode("hi")


def test_stop_ids_are_a_union(tmp_path):
    tok = llama3(bos=False)
    files = {"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 9]}}
    ours = load_json(tmp_path, tok, **files, tokenizer_config={"eos_token": "<|im_end|>"})
    assert ours.eos_ids == {5, 7, 9, tok.token_to_id("<|im_end|>")}


@pytest.mark.parametrize("files", [dict(generation_config={"eos_token_id": [561]}),
                                   dict(tokenizer_config={"eos_token": "<|turn|>"})])  # fmt: skip
def test_stop_tokens_keep_their_flags(files, tmp_path):
    """Phi's turns end in tokens that take the blanks beside them."""
    tok = llama3(bos=False)
    flags = dict(special=True, normalized=False)
    tok.add_special_tokens([hf.AddedToken("<|turn|>", lstrip=True, rstrip=True, **flags)])
    assert tok.token_to_id("<|turn|>") == 561
    ours = load_json(tmp_path, tok, **files)
    assert ours.eos_ids == {561}
    for text in ("a \n<|turn|> \n b<|turn|>\n", "<|turn|>", f"{' ' * 99}<|turn|>x \n<|turn|> <|end|> <|turn|>"):
        assert ours.encode(text) == tok.encode(text).ids
        parts = [id or tok.encode(part).ids for part, id in ours.split_added(text, True)]
        assert ours.encode(text) == [i for part in parts for i in (part if isinstance(part, list) else [part])]


@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_keep_their_ids(where, tmp_path):
    """Where ids are left out before them; the library alone numbers them without gaps."""
    tok = llama3(bos=False)
    spec, n = json.loads(tok.to_str()), tok.get_vocab_size()
    if where == "tokenizer.json":
        for i, token in enumerate(spec["added_tokens"][2:]):
            token["id"] = n + 7 * i
        want = {t["content"]: t["id"] for t in spec["added_tokens"]}
        ours = load_tokenizer(write(tmp_path, **{"tokenizer.json": spec}))
    else:
        want = {"<far>": n + 5, "<near>": n + 2}
        flags = dict(special=True, normalized=False)
        decoder = {str(id): dict(content=token, **flags) for token, id in want.items()}
        value = want if where == "added_tokens.json" else {"added_tokens_decoder": decoder}
        ours = load_json(tmp_path, tok, **{where: value})
    assert ours.encode("a".join(want)) == [i for id in want.values() for i in (id, tok.token_to_id("a"))][:-1]
    assert ours.vocab_size == max(want.values()) + 1 and ours.piece(n + 1) == b""
    assert ours.encode("naïve café") == tok.encode("naïve café").ids
    with pytest.raises(InputError, match="added token '<far>' has id 99999999, but .*: download"):
        load_json(tmp_path / "b", tok, added_tokens={"<far>": 99999999})


def test_files_with_a_byte_order_mark(tmp_path):
    """As an editor on Windows leaves them."""
    tok = llama3(bos=False)
    want = load_json(tmp_path, tok, tokenizer_config={"eos_token": "<|end|>"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes(b"\xef\xbb\xbf" + (tmp_path / file).read_bytes())
    got = load_tokenizer(tmp_path)
    assert got.encode(CORPUS[0]) == want.encode(CORPUS[0]) and got.eos_ids == want.eos_ids


# ---- GGUF vocabularies -----------------------------------------------------------------------------------------------


def write_vocab(path, tokens, types, model="gpt2", merges=None, **keys):
    """A GGUF file that is a vocabulary alone."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model(model)
    w.add_token_list(tokens)
    w.add_token_types(types)
    if merges is not None:
        w.add_token_merges(merges)
    for key, value in keys.items():
        add = {bool: w.add_bool, int: w.add_uint32, str: w.add_string, list: w.add_array}[type(value)]
        add("tokenizer.ggml." + key if key != "chat_template" else "tokenizer.chat_template", value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return path


def vocab_of(tok, path, pre, **keys):
    """A tokenizer of `tokenizers`, as the converter writes it."""
    spec, n = json.loads(tok.to_str()), tok.get_vocab_size()
    types = [1] * (n - len(SPECIAL)) + [3] * (len(SPECIAL) - 1) + [4, 5]
    merges = [" ".join(m) for m in spec["model"]["merges"]]
    begin, end = tok.token_to_id("<|begin|>"), tok.token_to_id("<|end|>")
    tokens = [*(tok.id_to_token(i) for i in range(n)), "[PAD0]"]
    return write_vocab(path, tokens, types, merges=merges, pre=pre, bos_token_id=begin, eos_token_id=end, **keys)


@pytest.mark.parametrize("pre", sorted(set(map(min, ([n for n, q in PRE.items() if q is p] for p in PRE.values())))))
def test_byte_level_vocabulary(pre, tmp_path):
    """One of each family of patterns, with Oniguruma's own reading of them."""
    how = PRE[pre]
    oracle = trained(how.patterns, normalizers.NFC() if how.nfc else None, ignore_merges=how.whole_words)
    path = vocab_of(oracle, tmp_path / "a.gguf", pre)
    ours, end = load_tokenizer(path), oracle.token_to_id("<|end|>")
    assert ours.adds_bos == how.bos and ours.eos_ids == {end, oracle.token_to_id("<|im_end|>")}
    assert ours.vocab_size == oracle.get_vocab_size() + 1 and ours.vocab_size - 1 not in ours.text_ids
    for text in [*ADVERSARIAL, "DON'T 123456 e\u0301 +=~ 99 "]:
        assert ours.encode(text, bos=False) == oracle.encode(text, add_special_tokens=False).ids
    assert load_tokenizer(tmp_path).encode("a") == ours.encode("a")  # the folder that holds it


def test_saved_vocabulary_is_what_transformers_loads(tmp_path):
    from transformers import AutoTokenizer

    ours = load_tokenizer(vocab_of(llama3(), tmp_path / "a.gguf", "llama-bpe", chat_template=CHATML))
    (tmp_path / "out").mkdir()
    ours.save(tmp_path / "out")
    theirs, again = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    for text in ADVERSARIAL:
        assert theirs.encode(text) == again.encode(text) == ours.encode(text)
    assert again.eos_ids == ours.eos_ids and theirs.eos_token == "<|end|>"
    assert theirs.apply_chat_template([USER], tokenize=False) == ours.apply_chat_template([USER], False)
    with pytest.raises(InputError, match="cannot write"):
        ours.save(tmp_path / "nowhere")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary(prefix, tmp_path, sp_protos):
    """The ids of sentencepiece, from the scores alone; llama.cpp's prefix behind special tokens."""
    (tmp_path / "tokenizer.model").write_bytes(sp_protos["llama" if prefix else "no-prefix"])
    w = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    sentencepiece_vocab(w, tmp_path)
    w.add_add_space_prefix(prefix)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    ours, its = load_tokenizer(tmp_path / "a.gguf"), load_tokenizer(tmp_path)
    for text in [*ADVERSARIAL, *CORPUS, "<s>x</s> y", "aaaaaaa aaa", " " * 37 + "b" + " " * 11]:
        assert ours.encode(text) == its.encode(text), repr(text)
        assert ours.encode(text, bos=False, parse_special=False) == its.encode(text, bos=False, parse_special=False)
        assert ours.decode(ours.encode(text)) == its.decode(its.encode(text))
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (its.bos_id, its.eos_ids, its.vocab_size)
    assert ours.text_ids == its.text_ids


@pytest.mark.parametrize("arch", ["phi3", "llama"])
def test_special_tokens_of_phi3_take_the_blanks_behind_them(arch, tmp_path, sp_protos):
    (tmp_path / "tokenizer.model").write_bytes(sp_protos["llama"])
    w = gguf.GGUFWriter(tmp_path / "a.gguf", arch)
    sentencepiece_vocab(w, tmp_path)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    ours = load_tokenizer(tmp_path / "a.gguf")
    assert (ours.encode("</s>\n a") == ours.encode("</s>a")) == (arch == "phi3")
    assert ours.encode("<s>\n a") != ours.encode("<s>a")


STOPS = {
    "smollm2": (["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>"], {"eos": 2}, [0, 2, 4]),
    "by key alone": (["a", "b", "c", "d"], {"eos": 1, "eot": 2, "eom": 3}, [1, 2, 3]),
    "fill-in": (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>", "x"], {"fim_rep": 4}, [0, 2, 4]),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_tokens_by_key_and_by_name(name, tmp_path):
    tokens, keys, expected = STOPS[name]
    keys = {f"{k}_token_id": v for k, v in keys.items()}
    path = write_vocab(tmp_path / "a.gguf", tokens, [3] * len(tokens), merges=["a b"][:0] or ["x y"][:0] or [], **keys)
    assert sorted(stop_ids(GGUFFile(path))) == expected
    html = write_vocab(tmp_path / "b.gguf", ["</s>", "x"], [1, 3], eos_token_id=1)
    assert stop_ids(GGUFFile(html)) == [1]  # a normal token that only looks like an end
    spm = write_vocab(tmp_path / "c.gguf", ["<unk>", "<s>", "</s>"], [2, 3, 3], model="llama")
    assert stop_ids(GGUFFile(spm)) == [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model="bert"), "a.gguf: tokenizer.ggml.model is 'bert', which is not supported"),
        (dict(pre="kimi-k2"), "a.gguf: tokenizer.ggml.pre is 'kimi-k2', which is not supported"),
        (dict(add_eos_token=True), "a.gguf: .*add_eos_token"),
        (dict(bos_token_id=9), "a.gguf: tokenizer.ggml.bos_token_id is 9, expected one of 3"),
        (dict(merges=None), "a.gguf: has no tokenizer.ggml.merges"),
        (dict(merges=["a z"]), "a.gguf: the vocabulary and its merges do not fit"),
        (dict(model="llama"), "a.gguf: has no finite tokenizer.ggml.scores"),
        (dict(tokens=["a", "a", "b"]), "a.gguf: token 'a' has ids 0 and 1"),
    ],
)
def test_unsupported_vocabularies(change, message, tmp_path):
    given = dict(tokens=["a", "b", "ab"], types=[1, 1, 1], merges=["a b"]) | change
    with pytest.raises(InputError, match=message) as e:
        load_tokenizer(write_vocab(tmp_path / "a.gguf", **given))
    assert "\n" not in str(e.value)


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


@FUZZ
@given(text=TEXT.filter(is_plain))
def test_sentencepiece_parity(sp_pair, text):
    ours, sp = sp_pair
    for t in (text, *filter(is_plain, ADVERSARIAL)):
        ids = sp.encode(t)
        assert ours.encode(t, bos=False) == ids and ours.encode(t) == [sp.bos_id(), *ids]
        if sp.unk_id() not in ids:
            same_text(ours, ours.encode(t), sp.decode(ids))


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


def test_sentencepiece_without_prefix_space(tmp_path, sp_protos):
    config = {"add_prefix_space": False}
    files = {"tokenizer.model": sp_protos["llama"]}
    ours = load_tokenizer(write(tmp_path, tokenizer_config=config, **files))
    with_prefix = load_tokenizer(write(tmp_path / "p", **files))
    for text in ("The fox", " The fox", "", "  "):
        assert ours.decode(ours.encode(text)) == text == with_prefix.decode(with_prefix.encode(text))
    assert ours.encode(" The fox") == with_prefix.encode("The fox") != ours.encode("The fox")


def test_a_first_piece_of_two_spaces_loses_one(tmp_path):
    """As in the published vocabularies of Llama 2 and Mistral, where it comes before the single space."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a  b  c  d    e    f  g"] * 9 + LINES), model_writer=out, model_type="bpe",
        vocab_size=450, minloglevel=2, allow_whitespace_only_pieces=True, character_coverage=1.0, **SP_KINDS["llama"],
    )  # fmt: skip
    ours = load_tokenizer(write(tmp_path, **{"tokenizer.model": out.getvalue()}))
    pieces = [p for p in ours.ids if p.startswith("▁")]
    assert "▁▁" in pieces and pieces.index("▁▁") < pieces.index("▁")
    for text in ("Hello world", " Hello", "   x", "a  b    c", "", " "):
        assert ours.decode(ours.encode(text)) == text


def test_unknown_and_out_of_range_ids_decode_to_nothing(sp_pair, pair):
    for ours in (sp_pair[0], pair[0]):
        assert ours.decode([ours.vocab_size, -1, 10**9]) == ""


# ---- tiktoken's format -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    """A Llama 3 folder as Meta publishes it, and the same vocabulary in `tokenizers`."""
    oracle = llama3(bos=False)
    spec = json.loads(oracle.to_str())
    spec["added_tokens"] = []
    oracle = hf.Tokenizer.from_str(json.dumps(spec))
    back = {v: k for k, v in spec["model"]["vocab"].items()}
    lines = [b"%s %d" % (base64.b64encode(bytes(CHAR_BYTES[c] for c in back[i])), i) for i in range(len(back))]
    folder = write(tmp_path_factory.mktemp("llama3"), **{"tokenizer.model": b"\n".join(lines) + b"\n"})
    return folder, oracle


def test_tiktoken_file_parity(meta):
    folder, oracle = meta
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


def test_tiktoken_survives_a_million_blanks(meta):
    ours = load_tokenizer(meta[0])
    for text in (1_000_000 * " " + "a", 1_000_000 * " ", 500_000 * " \n" + " a"):
        assert ours.decode(ours.encode(text)) == text
    for n in range(98, 305):  # blanks by the hundred are cut where single ones are
        for end in ("a", "", "\n", "\na"):
            assert ours.encode("b" + n * " " + end, bos=False) == meta[1].encode("b" + n * " " + end).ids


def test_tiktoken_names_from_the_config(meta, tmp_path):
    base = meta[1].get_vocab_size()
    tokens = {str(base): {"content": "<bos>", "special": True}, str(base + 5): {"content": "<stop>", "special": True}}
    config = {"added_tokens_decoder": tokens, "bos_token": "<bos>", "eos_token": "<stop>", "add_bos_token": False}
    data = (meta[0] / "tokenizer.model").read_bytes()
    ours = load_tokenizer(write(tmp_path, tokenizer_config=config, **{"tokenizer.model": data}))
    assert ours.eos_ids == {base + 5} and ours.encode("<bos>") == [base] and ours.vocab_size == base + 6
    write(tmp_path, **{"tokenizer.json": json.loads(llama3(bos=False).to_str())}, tokenizer_config={})
    assert type(load_tokenizer(tmp_path)).__name__ == "LibraryTokenizer"  # goes before either kind of tokenizer.model


def test_tekken(meta, tmp_path):
    """Mistral's JSON of the same vocabulary: special tokens come first."""
    oracle, n, pattern = meta[1], 24, LLAMA3
    back = {v: k for k, v in json.loads(oracle.to_str())["model"]["vocab"].items()}
    data = [base64.b64encode(bytes(CHAR_BYTES[c] for c in back[i])).decode() for i in range(len(back))]
    vocab = [{"rank": i, "token_bytes": d, "token_str": None} for i, d in enumerate([*data, "bm90IHVzZWQ="])]
    config = {"pattern": pattern, "default_vocab_size": len(data) + n, "default_num_special_tokens": n}
    ours = load_tokenizer(write(tmp_path, **{"tekken.json": {"config": config, "vocab": vocab}}))
    for text in ADVERSARIAL:
        assert ours.encode(text, bos=False, parse_special=False) == [i + n for i in oracle.encode(text).ids]
    assert ours.encode("[INST]a<SPECIAL_23>") == [1, 3, *(i + n for i in oracle.encode("a").ids), 23]
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, {2}, len(data) + n)
    config["default_num_special_tokens"] = "many"
    with pytest.raises(InputError, match="malformed"):
        load_tokenizer(write(tmp_path, **{"tekken.json": {"config": config, "vocab": vocab}}))


def test_two_files_that_give_different_tokens(meta, tmp_path, capsys):
    """A tokenizer.json with Llama 3's pattern beside tekken.json, as published: the latter trained the model."""
    oracle, pattern = meta[1], LLAMA3.replace("{1,3}", "")
    ranks = {v: k for k, v in json.loads(oracle.to_str())["model"]["vocab"].items()}
    data = [base64.b64encode(bytes(CHAR_BYTES[c] for c in ranks[i])).decode() for i in range(len(ranks))]
    config = {"pattern": LLAMA3, "default_vocab_size": len(data), "default_num_special_tokens": 0}
    vocab = [{"rank": i, "token_bytes": d, "token_str": None} for i, d in enumerate(data)]
    both = {"tokenizer.json": json.loads(oracle.to_str()), "tekken.json": {"config": config, "vocab": vocab}}
    ours = load_tokenizer(write(tmp_path / "alike", **both))
    assert type(ours).__name__ == "LibraryTokenizer" and not capsys.readouterr().err
    config["pattern"] = pattern
    ours = load_tokenizer(write(tmp_path / "other", **both))
    alone = load_tokenizer(write(tmp_path / "alone", **{"tekken.json": both["tekken.json"]}))
    text = "2026 and 12345"
    assert ours.encode(text) == alone.encode(text) != oracle.encode(text).ids
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "tokenizer.json and tekken.json give different tokens; tekken.json is read" in err
    write(tmp_path / "alike", **{"tekken.json": b"["})  # a second file that cannot be read is not needed
    load_tokenizer(tmp_path / "alike")
    # another vocabulary beside the first file is told of, and not read
    other = {"tokenizer.model": b"\n".join(b"%s %d" % (base64.b64encode(bytes([b])), b) for b in range(256)) + b"\n"}
    load_tokenizer(write(tmp_path / "alike", **other))
    assert "tokenizer.json and tokenizer.model give different tokens; tokenizer.json is read" in capsys.readouterr().err


@pytest.mark.parametrize("kind, pattern, told", [
    ("Qwen2Tokenizer", LLAMA3, True), ("Qwen2Tokenizer", QWEN2, False), ("GPT2Tokenizer", LLAMA3, False),
])  # fmt: skip
def test_a_pattern_that_is_not_of_the_class(tmp_path, capsys, kind, pattern, told):
    """Of vocab.json and merges.txt the class gives the pattern; tokenizer.json has its own."""
    tok = trained([pattern])
    model = json.loads(tok.to_str())["model"]
    merges = "\n".join(m if isinstance(m, str) else " ".join(m) for m in model["merges"]).encode()
    load_tokenizer(write(tmp_path, **{
        "tokenizer.json": json.loads(tok.to_str()), "vocab.json": model["vocab"], "merges.txt": merges,
        "tokenizer_config": {"tokenizer_class": kind},
    }))  # fmt: skip
    said = "tokenizer.json and merges.txt give different tokens; tokenizer.json is read"
    assert (said in capsys.readouterr().err) == told


# ---- streaming -------------------------------------------------------------------------------------------------------


@FUZZ
@given(text=TEXT)
def test_stream_prints_whole_characters(pair, text):
    """Text without U+FFFD never shows one, and what is shown is at every step all that is complete."""
    ours, _ = pair
    ids = ours.encode(text, bos=False, parse_special=False)
    stream, shown, data = ours.stream(), "", b""
    for i, id in enumerate(ids):
        shown += stream.put(id)
        data += ours.piece(id) if data or i else ours.first_piece(id)
        assert shown == data.decode("utf-8", "ignore")
        assert "\ufffd" not in shown or "\ufffd" in text
    assert stream.flush() == ""


def test_stream_flushes_half_a_character(tmp_path):
    ours = load_json(tmp_path, llama3())
    half = ours.encode("\U0010ffff", bos=False)[:-1]
    stream = ours.stream()
    assert "".join(map(stream.put, half)) == "" and stream.flush() == "\ufffd"


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
{% if tools is not none %}TOOLS{% endif %}{% if enable_thinking is false %}<think></think>{% endif %}
{% generation %}{% set x = 1 %}{{ strftime_now("%Y") }}{% endgeneration %}{{ x }}
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
    ours = load_json(tmp_path, llama3(bos=False), tokenizer_config={"chat_template": template, **names})
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
    tok = llama3(bos=False)
    config = {"chat_template": named, "eos_token": "<|end|>"}
    assert load_json(tmp_path, tok, tokenizer_config=config).apply_chat_template([USER]) == "D<|end|>"
    (tmp_path / "chat_template.jinja").write_text("F{{ pad_token }}{{ strftime_now('%Y')|length }}")
    assert load_tokenizer(tmp_path).apply_chat_template([USER]) == "F4"
    config["chat_template"] = named[:1]
    with pytest.raises(InputError, match="'default'.*tool_use.*copy the one to use into chat_template.jinja"):
        load_json(tmp_path / "b", tok, tokenizer_config=config).encode_chat([USER])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ lipsum.__globals__['os'].popen('id').read() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_chat_template_failures_are_one_line(tmp_path, template, reason):
    ours = load_json(tmp_path, llama3(bos=False), tokenizer_config={"chat_template": template})
    with pytest.raises(InputError, match=reason) as e:
        ours.encode_chat([USER])
    assert "\n" not in str(e.value)


def test_no_chat_template(pair, tmp_path):
    for ours in (pair[0], load_tokenizer(vocab_of(llama3(), tmp_path / "a.gguf", "llama-bpe"))):
        with pytest.raises(InputError, match="no chat template.*without --chat"):
            ours.encode_chat([USER])


def test_a_template_without_the_system_message_says_so(tmp_path, capsys):
    says = "<|im_start|>{{ messages[-1].content }}"
    ours = load_json(tmp_path, llama3(bos=False), tokenizer_config={"chat_template": says})
    shows = load_json(tmp_path / "b", llama3(bos=False), tokenizer_config={"chat_template": CHATML})
    chat = [{"role": "system", "content": " Be brief. "}, USER]
    shows.encode_chat(chat), ours.encode_chat([USER])
    assert not capsys.readouterr().err
    ours.encode_chat(chat)
    err = capsys.readouterr().err
    assert err == f"warning: {tmp_path}: the chat template does not show the system message as it is, or at all\n"


def test_template_variables(tmp_path):
    ours = load_json(tmp_path, llama3(), tokenizer_config={"chat_template": CHATML})
    assert "<think>" not in ours.apply_chat_template([USER])
    given = dict(map(template_variable, ["enable_thinking=false", "tools=[]"]))
    assert "TOOLS<think></think>" in ours.apply_chat_template([USER], **given)
    assert template_variable("a=b=c") == ("a", "b=c") and template_variable('a="1"') == ("a", "1")
    for wrong in ("x", "=1", "a b=1"):
        with pytest.raises(InputError, match="not of the form K=V"):
            template_variable(wrong)
    for wrong in ("enable_thinkin", "messages"):
        with pytest.raises(
            InputError, match=f"no variable '{wrong}' to set; it reads add_generation_prompt, enable_th"
        ):
            ours.encode_chat([USER], **{wrong: []})
    for wrong in ("tk", "before"):
        with pytest.raises(InputError, match=f"no variable '{wrong}' to set"):
            Chat(variables={wrong: []}).parts(ours)


LOUD = "{% for m in messages %}{{ '<|im_start|>' + m.content | upper + '<|im_end|>' }}{% endfor %}"
TRIMMED = "{% for m in messages %}{{ '<|im_start|>' + m.content | trim | tojson + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module", params=["library", "sentencepiece"])
def chatty(request, sp_protos, tmp_path_factory):
    """Of each kind of tokenizer one with <|im_start|> and <|im_end|>."""
    folder, config = tmp_path_factory.mktemp("chat"), {"chat_template": TRIMMED, "eos_token": "<|im_end|>"}
    if request.param == "library":
        return load_json(folder, llama3(), tokenizer_config=config)
    tokens = {"700": {"content": "<|im_start|>", "special": True}, "701": {"content": "<|im_end|>", "special": True}}
    config |= {"added_tokens_decoder": tokens, "legacy": False}
    return load_tokenizer(write(folder, tokenizer_config=config, **{"tokenizer.model": sp_protos["llama"]}))


@FUZZ
@given(text=st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "hi", " ", "\n", "é", '"', "a b"]), max_size=6))
def test_what_a_user_says_is_no_special_token(chatty, text):
    """Its ids are those of the text as plain text between the template's special tokens, merged with its text."""
    text, ours = "".join(text), chatty
    said_by_both = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
    start, end = ours.id_of("<|im_start|>"), ours.id_of("<|im_end|>")
    ids = ours.encode_chat(said_by_both)
    said = json.dumps(text.strip(), ensure_ascii=False)
    assert [i for i in ids if i in (start, end)] == [start, end, start, end]
    assert ids[1 : ids.index(end)] == ours.encode_text(said, False, first=False)
    if "<|im_end|>" not in text:  # and then they are those of the whole text
        assert ids == ours.encode(ours.apply_chat_template(said_by_both), bos=False)


TURNS = {
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
               "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
    "tinyllama": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "none": None,
}  # fmt: skip


@pytest.mark.parametrize("template", TURNS)
@pytest.mark.parametrize("kind", ["sentencepiece", "legacy", "llama3", *(k for k in LIBRARY if k.startswith("llama2"))])
def test_the_parts_of_a_conversation_are_those_of_the_whole(kind, template, tmp_path, sp_protos):
    """Many tokenizers put a space before a text: none before what follows a text."""
    bos, eos = ("<|begin|>", "<|end|>") if kind == "llama3" else ("<s>", "</s>")
    config = dict(bos_token=bos, eos_token=eos)
    config |= dict(chat_template=TURNS[template]) if template != "none" else {}
    if kind in LIBRARY:
        ours = load_json(tmp_path, LIBRARY[kind](), tokenizer_config=config)
    else:
        config |= dict(legacy=kind == "legacy")
        ours = load_tokenizer(write(tmp_path, tokenizer_config=config, **{"tokenizer.model": sp_protos["llama"]}))
    context, question, answer = "The cat sat.\n", "Where is it?", "On the mat."
    parts = Chat().parts(ours) if template != "none" else ChatParts()
    ids = parts.opening(ours, context) + parts.closing(ours, question)
    said = [dict(role="user", content=context + question), dict(role="assistant", content=answer)]
    assert ids == (ours.encode_chat(said[:1]) if template != "none" else ours.encode(context + question))
    ids += ours.encode_after(ids, answer) + parts.closing(ours, "Who?", turn=1)
    whole = f"{context}{question}{answer}\nWho?"
    asked = [*said, dict(role="user", content="Who?")]
    assert ids == (ours.encode_chat(asked) if template != "none" else ours.encode(whole))


def test_a_template_that_changes_what_is_said(tmp_path):
    ours = load_json(tmp_path, llama3(), tokenizer_config={"chat_template": LOUD, "eos_token": "<|im_end|>"})
    plain = [{"role": "user", "content": "it is <b>late</b>"}]
    assert ours.encode_chat(plain) == ours.encode("<|im_start|>IT IS <B>LATE</B><|im_end|>", bos=False)
    with pytest.raises(InputError, match="a message holds the special token '<.im_end.>'.*remove it"):
        ours.encode_chat([{"role": "user", "content": [{"type": "text", "text": "no <|im_end|>"}]}, *plain])


# ---- bad input -------------------------------------------------------------------------------------------------------

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer here, expected tokenizer.json, tokenizer.model, tekken.json, or vocab.json"),
        ({"tokenizer.json": b"{"}, "tokenizer.json: not read by tokenizers"),
        ({"tekken.json": b"[1]"}, "holds a JSON list, expected an object"),
        ({"tokenizer.json": b"\xff\xfe"}, "not UTF-8"),
        ({"tokenizer.model": b""}, "tokenizer.model: empty"),
        ({"tokenizer_config.json": LFS}, r"^\S*tokenizer_config\.json is a git LFS pointer[^(]*git lfs pull"),
        ({"tokenizer.model": LFS}, r"tokenizer\.model is a git LFS pointer"),
        ({"tokenizer.model": b"\x80\x04not a model"}, "tokenizer.model: cannot be parsed"),
        ({"tokenizer.model": b"IQ== 0\nnot a line\n"}, "line 2 is b'not a line'"),
        ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "lacks single bytes"),
        ({"vocab.json": {"a": 0}, "merges.txt": b"#version: 0.2\n"}, "class not named, expected Qwen2Tokenizer"),
        (
            {"vocab.json": {"a": 0}, "merges.txt": b"", "tokenizer_config": {"tokenizer_class": "X"}},
            "class X, expected",
        ),
        ({"vocab.json": {"a": 0}, "merges.txt": b"a b\n", "config": {"model_type": "qwen2"}}, "do not fit"),
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
        ({"tokenizer_config": {"add_eos_token": True}}, "add_eos_token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "malformed"),
        ({"config": {"eos_token_id": "2"}}, "config.json: eos_token_id is '2'"),
        ({"generation_config": {"eos_token_id": True}}, "generation_config.json: eos_token_id"),
    ],
)
def test_bad_configuration(tmp_path, sp_protos, files, message):
    with pytest.raises(InputError, match=message):
        load_tokenizer(write(tmp_path, **{"tokenizer.model": sp_protos["llama"]}, **files))


def test_a_post_processor_that_ends_a_text_is_refused(tmp_path):
    tok = llama3()
    end = [("<|end|>", tok.token_to_id("<|end|>"))]
    tok.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=end)
    with pytest.raises(InputError, match="tokenizer.json: post_processor would end every prompt"):
        load_json(tmp_path, tok)


def test_bad_paths_and_text(tmp_path, pair):
    with pytest.raises(InputError, match="does not exist"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is no GGUF file"):
        load_tokenizer(str(tmp_path / "file"))
    with pytest.raises(InputError, match="not valid Unicode at character 1"):
        pair[0].encode("a\ud800")


def test_the_shipped_model():
    """models/tiny: a proto without a dummy prefix, alone and in a GGUF file."""
    ours = load_tokenizer(TINY)
    sp = sentencepiece.SentencePieceProcessor(str(TINY / "tokenizer.model"))
    for text in ADVERSARIAL:
        if is_plain(text):
            assert ours.encode(text) == [1, *sp.encode(text)] and ours.decode(ours.encode(text)) == text
