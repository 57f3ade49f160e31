"""The rows of every task: RULER's, tasks in the shipped model's wording, and several questions about one context.

needle, needle4, ruler, ruler4, key_value and repeats are rows of token ids in held-out text (tasks.py); their keys are
words that training never saw. kv (a JSON object of uuids) and prefix_suffix (find a string by its two ends) ask five
questions about one context, after SCBench (Li et al. 2024): each from the same state, or in turn.
"""

from __future__ import annotations

import functools
import json
import random
import string
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from loading.tokenizer import Tokenizer
from models.tiny.training.tasks import FIRST_PLAIN_ID, PLAIN, RULER
from runtime.errors import InputError
from scripts.eval import ruler
from scripts.eval.evaluation import Evaluation
from scripts.eval.rows import Row

NEEDLES = dict(needle=dict(n=1, fmt=PLAIN), needle4=dict(n=4, fmt=PLAIN),
               ruler=dict(n=1, fmt=RULER), ruler4=dict(n=4, fmt=RULER))  # fmt: skip
OF_TOKENS = [*NEEDLES, "key_value", "repeats"]
SEVERAL = ["kv", "prefix_suffix"]
TASKS = [*OF_TOKENS, *SEVERAL, *ruler.TASKS]
QUESTIONS = 5  # on one context
DECODED = 512  # most tokens of a copy


def rows_of(ev: Evaluation, task: str, T: int, samples: int, opt: Any, reserve: int) -> Iterator[Row]:
    """The samples of a task; opt has the seed and the files that tasks need. Samples with one needle have evenly spaced
    depths in a random order, so that an interrupted run has all depths."""
    if task in OF_TOKENS:
        yield from (token_row(ev, task, T, int(i), samples) for i in np.random.default_rng(0).permutation(samples))
    elif task in SEVERAL:
        yield from several(task, ev.tk, T, samples, opt.seed, reserve)
    else:
        yield from ruler.generate(task, ev.tk, T, samples, opt.seed, opt, reserve)


def token_row(ev: Evaluation, task: str, T: int, i: int, samples: int) -> Row:
    row = dict(task=task, length=T, index=i, answer_prefix="")
    if task == "repeats":
        rng = ev.tasks(T, i).rng
        copy = rng.integers(FIRST_PLAIN_ID, ev.tk.vocab_size, T // 2 - 1).tolist()
        return row | dict(context=ev.tk.encode("") + copy, question=copy[:DECODED], answer=[], max_new_tokens=0)
    context, question, value = case(ev, task, T, i, samples)
    answer = [ev.tk.decode(value).strip()]
    row |= dict(context=context, question=question, answer=answer, max_new_tokens=len(value))
    return row | (dict(depth=(i + 0.5) / samples) if NEEDLES.get(task, {}).get("n") == 1 else {})


def case(ev: Evaluation, task: str, T: int, i: int, samples: int) -> tuple[list[int], list[int], list[int]]:
    """Sample i of a task in the shipped model's wording: tokens of context, question, answer."""
    tasks = ev.tasks(T, i, [*NEEDLES, "key_value"].index(task))
    if task == "key_value":
        context, asked = tasks.key_value_case(T)
        return context.ids, asked.query, asked.value
    depth = (i + 0.5) / samples if NEEDLES[task]["n"] == 1 else None
    made = tasks.needle_case(T, depth=depth, digits_only=True, **NEEDLES[task])
    if made is None:
        raise InputError(f"a length of {T} has no room for the needles of {task}")
    return made[0].ids, ev.tk.encode("\n", bos=False) + made[1][0].query, made[1][0].value


# ---- several questions on one context ----


def keys_and_values(rng: random.Random, n: int) -> tuple[str, list[tuple[str, str, str]]]:
    def draw() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    pairs = {draw(): draw() for _ in range(n)}
    asked = rng.sample(list(pairs), QUESTIONS)
    context = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
    said = [(f'Key: "{k}"\n', "The value associated with the specified key is:", pairs[k]) for k in asked]
    return context + json.dumps(pairs, indent=0) + "\n\n", said


def prefixes_and_suffixes(rng: random.Random, n: int) -> tuple[str, list[tuple[str, str, str]]]:
    """Every string shares its first letters with another string, and its last letters with a third."""

    def draw(n: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=n))

    ends = [draw(4) for _ in range(n)]
    strings = [f"{ends[i // 2]}{draw(rng.randint(6, 10))}{ends[-1 - (i + 1) // 2]}" for i in range(n)]
    asked = rng.sample(strings, QUESTIONS)
    rng.shuffle(strings)
    said = [
        (f"Which string begins with {s[:4]} and ends with {s[-4:]}?\n", "The string is:", s) for s in asked
    ]  # fmt: skip
    return "Here is a list of strings, one on a line.\n\n" + "\n".join(strings) + "\n\n", said


def several(task: str, tk: Tokenizer, T: int, samples: int, seed: int, reserve: int) -> Iterator[Row]:
    """Contexts that have at most T tokens together with all questions and answers, asked in turn."""
    make: Callable[..., Any] = keys_and_values if task == "kv" else prefixes_and_suffixes
    new = 40 if task == "kv" else 24

    def parts(made: tuple[str, list[tuple[str, str, str]]]) -> ruler.Parts:
        return made[0], "".join(q + p + f" {a}" for q, p, a in made[1]), "", []

    def size(p: ruler.Parts) -> int:
        return len(tk.encode(p[0] + p[1], bos=False)) + (QUESTIONS - 1) * reserve + new

    rng = random.Random(f"{seed} {task} {T}")
    fit = ruler.Fit(size, T - reserve, QUESTIONS, task)
    found = functools.partial(make, rng)
    n = fit.largest(lambda n: parts(found(n)), T // 4)
    for i in range(samples):
        while size(parts(made := found(n))) > fit.limit and n > QUESTIONS:
            n -= 1
        if size(parts(made)) > fit.limit:
            raise InputError(
                f"a length of {T} has no room for {QUESTIONS} questions of {task}: give a larger --lengths"
            )
        for turn, (question, prefix, answer) in enumerate(made[1]):
            yield dict(turn=turn, task=task, context=made[0], question=question, answer_prefix=prefix, answer=[answer],
                       max_new_tokens=new, length=T, index=i)  # fmt: skip
