"""Ten questions about one text: every method's answers in words, next to those of the full cache.

    python -m scripts.eval.answers --checkpoint m.gguf --calibration FILE --out answers.json
    python -m scripts.eval.answers --checkpoint CKPT --method full sals-25 self_index,store_bits=4 --length 3000

The text is examples/observatory.txt with nine more facts scattered in it. Each question ends the same turn of a chat,
and the beginning of the answer is given, as in RULER. Both come through decode after the text has been compressed, or
with --query-in-prompt before. The text is prefilled once for all questions. An answer is found if it has the word that
was asked for. --out is written after every method's answers; --resume continues from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
from tqdm import tqdm

from cache.spec import layer_methods
from loading.checkpoint import read_args
from loading.tokenizer import Tokenizer
from runtime.errors import InputError, Parser, run_cli
from runtime.machine import ROOT, read_text, set_threads
from scripts.eval.evaluation import Context, open_evaluation, parse_flags
from scripts.shared.options import SPECS_BY_LAYER, earlier, expand, precision
from scripts.shared.results import record, write_json
from weights import WeightFormat

TEXT = ROOT / "examples" / "observatory.txt"
FACTS = [  # question, beginning of the answer, its end, the word that counts; the first is in the text
    ("Where is the spare key to the observatory hidden?", "The spare key to the observatory is hidden under",
     "the blue flowerpot beside the north gate.", "flowerpot"),
    ("Where does the ferry to Orlan leave?", "The ferry to Orlan leaves from", "the copper pier.", "copper"),
    ("What is the captain's parrot called?", "The captain's parrot is called", "Biscuit.", "Biscuit"),
    ("What is the password of the old library?", "The password of the old library is", "silver lantern.", "lantern"),
    ("In which town was Doctor Hale born?", "Doctor Hale was born in the town of", "Wexford.", "Wexford"),
    ("Which horse won the harvest race?", "The horse that won the harvest race is", "Thunder.", "Thunder"),
    ("What does the bakery on Mill Street sell?", "The bakery on Mill Street sells", "rye bread.", "rye"),
    ("When was the bridge at Kestrel Falls built?", "The bridge at Kestrel Falls was built in", "1847.", "1847"),
    ("What is the colour of the greenhouse door?", "The colour of the greenhouse door is", "purple.", "purple"),
    ("What does Aunt Rosalind play?", "The instrument that Aunt Rosalind plays is", "the cello.", "cello"),
]  # fmt: skip


def parse_args() -> argparse.Namespace:
    p = Parser(__doc__)
    a = p.add_argument
    a("--checkpoint", required=True, help="Hugging Face folder or GGUF file, with a chat template")
    a("--method", nargs="+", default=["all"], help=f"{SPECS_BY_LAYER}; `all`: every method")
    a("--length", type=int, metavar="N", default=3000, help="about how many tokens the text has; default: 3000")
    a("--max-new-tokens", type=int, default=24, metavar="N", help="the most tokens of an answer; default: 24")
    opt = parse_flags(p, "answers.json")
    if opt.length < 256 or opt.max_new_tokens < 1:
        raise InputError("--length must be at least 256, --max-new-tokens at least 1")
    WeightFormat.parse(opt.weights, opt.head)
    opt.method = list(dict.fromkeys(["full", *expand(opt.method)]))
    args = read_args(opt.checkpoint)
    for spec in opt.method:
        layer_methods(spec, args.n_layer, {})  # a wrong name or knob ends the run before it starts
    set_threads(opt.threads)
    return opt


def text_of(tk: Tokenizer, length: int) -> str:
    """Paragraphs of the text with the facts between them, about `length` tokens."""
    paragraphs, kept = read_text(TEXT).strip().split("\n\n"), []
    facts = [f"{beginning} {end}" for _, beginning, end, _ in FACTS[1:]]
    room = length - sum(len(tk.encode(f, bos=False)) for f in facts)
    for paragraph in paragraphs:
        room -= len(tk.encode(paragraph + "\n\n", bos=False))
        if room < 0:
            break
        kept.append(paragraph)
    for i, fact in reversed(list(enumerate(facts))):
        kept.insert((2 * i + 1) * len(kept) // (2 * len(facts)), fact)
    return "\n\n".join(kept)


def split(turns: list[list[int]]) -> int:
    """The number of tokens that all turns have in common at their beginning."""
    return next(i for i, column in enumerate(zip(*turns, strict=False)) if len(set(column)) > 1)


def main() -> None:
    opt = parse_args()
    ev, ranks = open_evaluation(opt, 1), opt.ranks
    text = text_of(ev.tk, opt.length)
    turns = [
        ev.tk.encode_chat([{"role": "user", "content": f"{text}\n\n{question}"}]) + ev.tk.encode(beginning, bos=False)
        for question, beginning, _, _ in FACTS
    ]
    shared = split(turns)
    settings = dict(length=opt.length, new=opt.max_new_tokens, query_in_prompt=opt.query_in_prompt)
    settings |= dict(text_tokens=shared) | precision(opt, ev.model)
    data = record(ev.device, checkpoint=Path(opt.checkpoint).name, settings=settings)
    resume = opt.resume and ranks.rank == 0
    old = earlier(opt.out, data, ("device", "commit", "checkpoint", "settings"), ("rows",)) if resume else {}
    data["rows"] = ranks.all(old.get("rows", []))[0]
    rows = [dict(task="facts", max_new_tokens=opt.max_new_tokens, answer=[wanted]) for *_, wanted in FACTS]
    if opt.query_in_prompt:  # then every question is a prompt of its own
        asked = [Context(turn, [row], [[]]) for turn, row in zip(turns, rows, strict=True)]
    else:
        asked = [Context(turns[0][:shared], rows, [turn[shared:] for turn in turns])]
    longest, prompt = max(map(len, turns)), max(len(c.prompt) for c in asked)
    ev.setup({m: (m, {}) for m in opt.method}, longest + opt.max_new_tokens, longest - prompt + opt.max_new_tokens)
    if [r["method"] for r in data["rows"]] != opt.method:
        data["rows"] = [dict(method=m, answers=[], found=[]) | ev.bytes(m, shared) for m in opt.method]
    by_method, caches, done = {r["method"]: r for r in data["rows"]}, ev.caches, 0
    bar = tqdm(desc="answers", total=len(FACTS) * len(opt.method))
    for context in asked:
        done += len(context.rows)
        todo = [m for m, r in by_method.items() if len(r["answers"]) < done]
        ev.caches = {m: caches[m] for m in todo[ranks.rank :: ranks.size]}
        said = groupby(ev.ask([context]), itemgetter(0)) if ev.caches else iter(())

        def answers(method: str, said: Iterator = said) -> list[tuple[str, bool]]:
            """The answers of `method`, which is the next one in `said`."""
            return [(text.strip(), bool(score)) for *_, text, score in next(said)[1]]

        for method, found in zip(todo, ranks.in_turns(todo, answers), strict=True):
            row = by_method[method]
            row["answers"] += [text for text, _ in found]
            row["found"] += [right for _, right in found]
            bar.update(len(found))
            if opt.out and ranks.rank == 0:
                write_json(opt.out, data)
    bar.close()
    if ranks.rank:
        return
    if opt.json:
        print(json.dumps(data))
        return
    for row in data["rows"]:
        print(f"{row['method']}: {sum(row['found'])} of {len(FACTS)} found, {row['kv_share']} of full's bytes")
        for (question, *_), found, answer in zip(FACTS, row["found"], row["answers"], strict=True):
            print(f"    {'+' if found else '-'} {question} {answer!r}")


if __name__ == "__main__":
    with torch.inference_mode():
        run_cli(main)
