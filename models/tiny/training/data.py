"""Makes the shipped model's vocabulary, token arrays and words once from the corpus, and tasks from them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import sentencepiece as spm
from tqdm import tqdm

from models.tiny.training.tasks import Tasks
from runtime.corpus import collect

VOCAB = 2048


class Pieces:
    """The SentencePiece vocabulary as an `Encoder` of tasks.py."""

    def __init__(self, path: Path):
        self.sp = spm.SentencePieceProcessor(model_file=str(path))
        self.vocab_size: int = self.sp.get_piece_size()

    def encode(self, text: str, bos: bool = False) -> list[int]:
        return [self.sp.bos_id()] * bos + self.sp.encode(text)


def prepare(data: Path) -> None:
    """Writes vocabulary, token arrays and word lists of the corpus into `data`, if they are not there yet."""
    if (data / "meta.json").exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    docs = collect(progress=True)
    train = [d for d in docs if not d.held_out]
    sample = data / "vocabulary.txt"
    prose = "\n".join(d.text for d in train if d.kind == "prose")
    sample.write_text(prose + "\n" + "\n".join(d.text for d in train if d.kind == "code"), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(sample), model_prefix=str(data / "tokenizer"), vocab_size=VOCAB, model_type="bpe", byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        allow_whitespace_only_pieces=True, user_defined_symbols=["\n"], character_coverage=0.9995,
        input_sentence_size=200_000, shuffle_input_sentence=True, max_sentence_length=8000, minloglevel=2,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, num_threads=2,
    )  # fmt: skip
    sample.unlink()
    pieces = Pieces(data / "tokenizer.model")
    meta: dict[str, dict[str, float]] = {}
    for split in ("train", "held_out"):
        for kind in ("code", "prose"):
            texts = [d.text for d in docs if d.kind == kind and d.held_out == (split == "held_out")]
            ids = [i for t in tqdm(texts, desc=f"{split} {kind}") for i in pieces.encode(t, bos=True)]
            np.save(data / f"{split}_{kind}.npy", np.array(ids, dtype=np.uint16), allow_pickle=False)
            n_bytes = sum(len(t.encode()) for t in texts)
            meta[f"{split}_{kind}"] = dict(documents=len(texts), tokens=len(ids), bytes=n_bytes)
    counts = Counter(re.findall(r"(?<![A-Za-z_])[a-z]{3,8}(?![A-Za-z_(])", prose))
    words = [w for w, _ in counts.most_common(5000) if len(pieces.encode(" " + w)) <= 3]
    np.random.default_rng(0).shuffle(words)
    (data / "words.json").write_text(json.dumps(dict(train=words[:-400], held_out=words[-400:])))
    (data / "meta.json").write_text(json.dumps(meta, indent=1))


def make_tasks(data: Path, held_out: bool, seed: object, pieces: Pieces | None = None) -> Tasks:
    split = "held_out" if held_out else "train"
    texts = [np.load(data / f"{split}_{kind}.npy", mmap_mode="r") for kind in ("code", "prose")]
    words = json.loads((data / "words.json").read_text())[split]
    return Tasks(pieces or Pieces(data / "tokenizer.model"), texts, [0.5, 0.5], words, seed)
