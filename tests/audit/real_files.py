"""Compares our reading of published files to other readers': vocabularies, chat templates, tokenizers, GGUF models.

Vocabularies (ggml-vocab-*.gguf with .inp and .out, in vendor/llama.cpp/models of llama-cpp-python's sdist) must give
the published ids of the published texts, and the texts again from the ids. Templates (models/templates there) must give
the text that transformers renders. Mistral's tokenizers (mistral_common/data of mistral-common's wheel) must give the
ids of sentencepiece, or of tiktoken with the file's own pattern, and the texts again. Quantized models must give the
numbers of the gguf package.
"""

from __future__ import annotations

import json
import tempfile
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loading.checkpoint import load_checkpoint, save_checkpoint_tensors
from loading.tokenizer import Tokenizer, chat, load_tokenizer
from runtime.errors import InputError
from weights.gguf import hf_name
from weights.gguf_file import GGUFFile

BETWEEN = "\n__ggml_vocab_test__\n"  # the texts of an .inp file
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}  # because templates are published without a vocabulary
CHATS = [
    [{"role": "user", "content": "Who wrote it?"}],
    [{"role": "user", "content": "Who wrote it?"}, {"role": "assistant", "content": "I did."},
     {"role": "user", "content": "  When?\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who wrote it?"}],
]  # fmt: skip
TEXTS = [
    "Hello world", " Hello world", "  two  blanks ", "\n\n \t\n x", "def f(x):\n    return x  # 3.14\n", "1234567890",
    "Größe, naïve, Ελλάδα, Привет, שלום, नमस्ते, 你好世界, 日本語, 한국어", "🚀 (normal) 😶\u200d🌫️ (multiple)",
    "'s 'LL I'm", "\u1ed8 \u0301e \ufb01", "https://example.org/a?b=c&d=%20", "",
]  # fmt: skip


def refused_or(check: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """A row: the result of the check, or why the file is refused."""
    try:
        return dict(file=path.name) | check(path)
    except InputError as e:
        return dict(file=path.name, exact=False, refused=str(e).replace(f"{path}: ", ""))


def faults(tk: Tokenizer, texts: list[str], expected: Callable[[str], list[int]]) -> dict[str, Any]:
    """Texts with wrong ids, and texts that decoding does not restore."""
    wrong = [t for t in texts if tk.encode(t, bos=False) != expected(t)]
    lost = [t for t in texts if tk.decode(tk.encode(t, bos=False)) != t]
    return dict(exact=not wrong and not lost, texts=len(texts), wrong=wrong, lost=lost)


def vocabulary(path: Path) -> dict[str, Any]:
    tk = load_tokenizer(path)
    found: dict[str, Any] = dict(tokens=tk.vocab_size, stop_ids=sorted(tk.eos_ids))
    if not path.with_name(path.name + ".inp").exists():
        return found | dict(exact=None, why="no texts are published with it")
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split(BETWEEN)
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    ids = {text: [int(id) for id in line.split()] for text, line in zip(texts, lines, strict=False)}
    return found | faults(tk, texts, ids.__getitem__)


def mistral(path: Path) -> dict[str, Any]:
    """One of Mistral's files in a folder without any other tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        name = "tekken.json" if path.suffix == ".json" else "tokenizer.model"
        (Path(folder) / name).write_bytes(path.read_bytes())
        tk = load_tokenizer(folder)
        return faults(tk, TEXTS, _tekken_ids(path) if path.suffix == ".json" else _sentencepiece_ids(path))


def _tekken_ids(path: Path) -> Callable[[str], list[int]]:
    import tiktoken

    spec = json.loads(path.read_text(encoding="utf-8"))
    n = spec["config"]["default_num_special_tokens"]
    vocab = spec["vocab"][: spec["config"]["default_vocab_size"] - n]
    ranks = {b64decode(t["token_bytes"]): t["rank"] for t in vocab}
    bpe = tiktoken.Encoding("tekken", pat_str=spec["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})
    return lambda text: [id + n for id in bpe.encode_ordinary(text)]


def _sentencepiece_ids(path: Path) -> Callable[[str], list[int]]:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode


def template(path: Path) -> dict[str, Any]:
    """Whether both render the same text for every conversation, or both refuse it; and whether user text can be told
    from the template's own."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text = path.read_text(encoding="utf-8")

    def theirs(messages: list[dict]) -> str | None:
        try:
            return render_jinja_template([messages], chat_template=text, add_generation_prompt=True, **NAMES)[0][0]
        except Exception:  # templates raise many kinds of errors
            return None

    def ours(messages: list[dict]) -> str | None:
        try:
            return chat.render(path, text, messages, NAMES | {"add_generation_prompt": True}, {})
        except InputError:
            return None

    pairs = [(theirs(m), ours(m)) for m in CHATS]
    rendered = [(m, o) for m, (_, o) in zip(CHATS, pairs, strict=True) if o is not None]
    told = all(chat.locate(o, m, lambda marked: ours(marked) or "") for m, o in rendered)
    return dict(exact=all(a == b for a, b in pairs), rendered=len(rendered), of=len(CHATS), told_apart=told)


def quantized(path: Path) -> dict[str, Any]:
    """Compares every tensor to the gguf package's numbers, and the bytes held to those of the file's tensors."""
    import gguf

    start = time.perf_counter()
    model = load_checkpoint(path)
    seconds = time.perf_counter() - start
    file, a = GGUFFile(path), model.args
    held = save_checkpoint_tensors(model, torch.float32)
    parts = {id(x): x for x in (*model.parameters(), *model.buffers())}
    types: Counter[str] = Counter()
    wrong, size = [], 0
    for t in gguf.GGUFReader(path).tensors:
        size += int(t.n_bytes)
        if t.name == "rope_freqs.weight":  # belongs to the configuration
            continue
        name = hf_name(file, t.name, a.n_layer)
        types[t.tensor_type.name] += 1
        w = torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type), dtype=torch.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")) and file.text("general.architecture") == "llama":
            w = w.view(-1, a.head_dim // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)  # its order of rotation
        ours = held.get(name, held.get("model.embed_tokens.weight"))
        if ours is None or not torch.equal(ours.view(w.shape), w):
            wrong.append(t.name)
    ratio = sum(x.nbytes for x in parts.values()) / size
    return dict(exact=not wrong, wrong=wrong, types=dict(types), bytes=size, held_of_file=ratio, load_seconds=seconds)


CHECKS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "vocabularies": ("*.gguf", vocabulary),
    "mistral": ("*[.]model*|tekken*.json", mistral),
    "templates": ("*.jinja", template),
    "ggufs": ("*.gguf", quantized),
}


def files(kind: str, folder: str | Path) -> list[Path]:
    """The files of a kind in a folder, in order."""
    return sorted({f for pattern in CHECKS[kind][0].split("|") for f in Path(folder).glob(pattern)})
