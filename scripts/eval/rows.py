"""Samples in kvpress's format: from files, or of the tasks here; their scores; and the contexts that they share.

A row has context, question, answer_prefix, answer (the references), max_new_tokens and task. RULER, LongBench,
InfiniteBench and LooGLE are published in this format; the rows of one context follow one another. As in kvpress, a
task's name decides its metric; for unknown names it is RULER's, the share of the references that the answer contains.

needle, needle4, ruler, ruler4, key_value and repeats are rows of token ids in held-out text (models/tiny/training);
their keys are words that training never saw. kv (a JSON object of uuids) and prefix_suffix (find a string by its two
ends) ask five questions about one context, after SCBench (Li et al. 2024): each from the same state, or in turn. The
other tasks are RULER's.
"""

from __future__ import annotations

import functools
import json
import random
import re
import string
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loading.tokenizer import Tokenizer
from loading.tokenizer.turns import ChatParts
from models.tiny.training.tasks import FIRST_PLAIN_ID, PLAIN, RULER
from runtime.errors import InputError, did_you_mean
from runtime.machine import read_text
from scripts.eval import ruler
from scripts.eval.ruler import Row

# ---- files ----


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a .jsonl or .parquet file. Raises InputError if it cannot be read, or if a row lacks a field."""
    if Path(path).suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise InputError(f"{path} is a parquet file: pip install pyarrow, or give a .jsonl file") from None
        try:
            rows = parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as e:
            raise InputError(f"cannot read {path}: {e}") from None
    else:
        try:
            rows = [json.loads(line) for line in read_text(path).split("\n") if line.strip()]
        except ValueError as e:
            raise InputError(f"{path} is not a .jsonl file ({e}): give one JSON object per line") from None
    for i, row in enumerate(rows):
        row["answer"] = row.get("answer", row.pop("answers", None)) if isinstance(row, dict) else None
        if row["answer"] is None or {"context", "question", "task", "max_new_tokens"} - row.keys():
            raise InputError(f"row {i + 1} of {path} lacks one of context, question, answer, max_new_tokens, task")
        if isinstance(row["answer"], str | int | float):
            row["answer"] = [row["answer"]]
        row["answer_prefix"], row["length"] = row.get("answer_prefix") or "", row.get("length") or 0
        texts = all(isinstance(row[k], str) for k in ("context", "question", "task", "answer_prefix"))
        numbers = all(type(row[k]) is int for k in ("max_new_tokens", "length"))
        lists = all(isinstance(x, list | tuple) for x in (row["answer"], row.get("all_classes") or []))
        if not (texts and numbers and lists):
            raise InputError(f"row {i + 1} of {path}: context, question, task and answer_prefix are texts, "
                             "max_new_tokens and length whole numbers, answer a text, a number or a list of them, "
                             "all_classes a list")  # fmt: skip
        if not row["answer"] or "" in map(str, row["answer"]) or row["max_new_tokens"] < 1:
            raise InputError(f"row {i + 1} of {path} has no answer, or an empty one, or max_new_tokens below 1")
        row["index"] = i  # an index of the file's own may be that of a text with several questions
    if not rows:
        raise InputError(f"{path} has no rows")
    return rows


# ---- scores ----


def contained(said: str, answers: Sequence[Any], row: Row) -> float:
    """RULER's metric: the share of the references that the answer contains, ignoring case and, as kvpress does,
    control characters (RULER: they are line ends)."""
    said = re.sub(r"[\x00-\x1f]", "", said).lower()
    return sum(str(a).lower() in said for a in answers) / len(answers)


def any_contained(said: str, answers: Sequence[Any], row: Row) -> float:
    return float(any(contained(said, [a], row) for a in answers))


def words_of(text: str) -> list[str]:
    """SQuAD's normalization: lower case, no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(said: str, answer: Any, row: Row) -> float:
    """F1 of the words in common (LongBench's and InfiniteBench's question answering)."""
    a, b = words_of(said), words_of(str(answer))
    same = sum((Counter(a) & Counter(b)).values())
    return 2 * same / (len(a) + len(b)) if same else 0.0


@functools.cache
def rouge_scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise InputError(
            "summaries are scored by rouge-score, which is not installed: pip install rouge-score"
        ) from None
    return rouge_scorer.RougeScorer(["rougeL"])


def rouge_l(said: str, answer: Any, row: Row) -> float:
    """F1, of words without case and punctuation, which kvpress' package keeps."""
    return rouge_scorer().score(str(answer), said)["rougeL"].fmeasure


def rouge_l_recall(said: str, answer: Any, row: Row) -> float:
    """LooGLE's."""
    return rouge_scorer().score(str(answer), said)["rougeL"].recall


def edit_similarity(said: str, answer: Any, row: Row) -> float:
    """Similarity of the first line that is code (LongBench's completions)."""
    try:
        from rapidfuzz import fuzz
    except ImportError:
        raise InputError("code is scored by rapidfuzz, which is not installed: pip install rapidfuzz") from None
    lines = said.lstrip("\n").split("\n")
    line = next((x for x in lines if "`" not in x and "#" not in x and "//" not in x), "")
    return round(fuzz.ratio(line, str(answer))) / 100  # whole percents, as fuzzywuzzy gives them


def numbers(said: str, answer: Any, row: Row) -> float:
    """The share of the answer's numbers that equal the reference's (LongBench's counting and retrieval)."""
    found, wanted = re.findall(r"\d+", said), re.findall(r"\d+", str(answer))
    return sum(n == wanted[0] for n in found) / len(found) if found and wanted else 0.0


def classified(said: str, answer: Any, row: Row) -> float:
    named = [c for c in row.get("all_classes") or () if c in said]
    named = [c for c in named if c == answer or c not in answer]
    return 1 / len(named) if answer in named else 0.0


def first_number(said: str, answer: Any, row: Row) -> float:
    found = re.search(r"\d+\.\d+|\d+", said)
    return float(found is not None and float(found[0]) == float(answer))


def first_digits(said: str, answer: Any, row: Row) -> float:
    found = re.search(r"\d+", said)
    return float(found is not None and found[0] == str(answer))


def last_word(said: str, answer: Any, row: Row) -> float:
    words = re.sub("[\n.`'\":]", " ", said).split()
    return float(bool(words) and re.fullmatch(r"[-+]?\d+", words[-1]) is not None and int(words[-1]) == int(answer))


def a_word(said: str, answer: Any, row: Row) -> float:
    return float(str(answer) in re.sub("[\n:\"'.,?!{}]", " ", said).split())


def letter(said: str, answer: Any, row: Row) -> float:
    """Whether the last capital letter of an option, in the first line that has one, is the answer. InfiniteBench then
    tries other readings of the text."""
    option = r"\b[A-D]\b" if row["task"].startswith("longbook") else r"\b[A-J]\b"
    found = re.search(rf"{option}(?!.*{option})", said.strip())
    return float(bool(found) and found[0] == answer)


def best_of(metric: Callable[[str, Any, Row], float]) -> Callable[[str, Sequence[Any], Row], float]:
    return lambda said, answers, row: max((metric(said, a, row) for a in answers), default=0.0)


# metric -> the tasks that it scores, by kvpress's names
METRICS: dict[Callable[..., float], str] = {
    f1: "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa longbook_qa_eng",
    rouge_l: "gov_report qmsum multi_news samsum longbook_sum_eng",
    rouge_l_recall: "shortdep_qa longdep_qa longdep_summarization",
    edit_similarity: "lcc repobench-p",
    numbers: "passage_count passage_retrieval_en",
    classified: "trec",
    first_number: "math_find",
    first_digits: "passkey number_string",
    last_word: "code_run",
    a_word: "kv_retrieval",
    letter: "longbook_choice_eng code_debug",
}
BY_NAME = {name: best_of(metric) for metric, names in METRICS.items() for name in names.split()}
BY_NAME |= dict.fromkeys(("qa_1", "qa_2", "longdialogue_qa_eng"), any_contained)
OTHERS = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh", "longbook_qa_chn", "math_calc",
          "shortdep_cloze"}  # fmt: skip
FIRST_LINE = ("trec", "triviaqa", "samsum")


def check_metric(task: str) -> None:
    """Raises InputError for tasks whose metric is missing here: Chinese words, lists of numbers, JSON."""
    if task.removesuffix("-e").removesuffix("_e") in OTHERS:
        raise InputError(f"{task} has no metric here: leave its rows out, or score them by its benchmark's own script")


def score(row: Row, said: str) -> float:
    """The score of an answer by the task's metric, from 0 to 1."""
    task = row["task"].removesuffix("-e").removesuffix("_e")
    if task in FIRST_LINE:
        said = said.lstrip().split("\n")[0]
    said = said.strip("\n") if task in METRICS[edit_similarity].split() else said.strip()
    return float(BY_NAME.get(task, contained)(said, row["answer"], row))


# ---- the rows of every task ----

NEEDLES = dict(needle=dict(n=1, fmt=PLAIN), needle4=dict(n=4, fmt=PLAIN),
               ruler=dict(n=1, fmt=RULER), ruler4=dict(n=4, fmt=RULER))  # fmt: skip
OF_TOKENS = [*NEEDLES, "key_value", "repeats"]
SEVERAL = ["kv", "prefix_suffix"]
TASKS = [*OF_TOKENS, *SEVERAL, *ruler.TASKS]
QUESTIONS = 5  # on one context
DECODED = 512  # most tokens of a copy


def check_names(text: str, opt: Any, leave_out: Collection[str] = ()) -> list[str]:
    """--tasks as a list. Raises InputError if one is unknown, or lacks its file."""
    tasks, known = text.split(","), [t for t in TASKS if t not in leave_out]
    if unknown := {*tasks} - {*known}:
        raise InputError(f"unknown task {min(unknown)!r}: {did_you_mean(min(unknown), known)}use some of "
                         f"{', '.join(known)}")  # fmt: skip
    ruler.check_tasks([t for t in tasks if t in ruler.TASKS], opt)
    return tasks


def rows_of(ev: Any, task: str, T: int, samples: int, opt: Any, reserve: int) -> Iterator[Row]:
    """The samples of a task; opt has the seed and the files that tasks need. Samples with one needle have evenly spaced
    depths in a random order, so that an interrupted run has all depths."""
    if task in OF_TOKENS:
        yield from (token_row(ev, task, T, int(i), samples) for i in np.random.default_rng(0).permutation(samples))
    elif task in SEVERAL:
        yield from several(task, ev.tk, T, samples, opt.seed, reserve, getattr(opt, "multi_turn", False))
    else:
        yield from ruler.generate(task, ev.tk, T, samples, opt.seed, opt, reserve)


def token_row(ev: Any, task: str, T: int, i: int, samples: int) -> Row:
    row = dict(task=task, length=T, index=i, answer_prefix="")
    if task == "repeats":
        rng = ev.tasks(T, i).rng
        copy = rng.integers(FIRST_PLAIN_ID, ev.tk.vocab_size, T // 2 - 1).tolist()
        return row | dict(context=ev.tk.encode("") + copy, question=copy[:DECODED], answer=[], max_new_tokens=0)
    context, question, value = case(ev, task, T, i, samples)
    answer = [ev.tk.decode(value).strip()]
    row |= dict(context=context, question=question, answer=answer, max_new_tokens=len(value))
    return row | (dict(depth=(i + 0.5) / samples) if NEEDLES.get(task, {}).get("n") == 1 else {})


def case(ev: Any, task: str, T: int, i: int, samples: int) -> tuple[list[int], list[int], list[int]]:
    """Sample i of a task in the shipped model's wording: tokens of context, question, answer."""
    tasks = ev.tasks(T, i, [*NEEDLES, "key_value"].index(task))
    if task == "key_value":
        context, asked = tasks.key_value_case(T)
        return context.ids, asked.query, asked.value
    depth = (i + 0.5) / samples if NEEDLES[task]["n"] == 1 else None
    newline = ev.tk.encode("\n", bos=False)  # beside the T tokens, as far as the context goes
    T = min(T, ev.model.args.context - len(newline))
    made = tasks.needle_case(T, depth=depth, digits_only=True, **NEEDLES[task])
    if made is None:
        raise InputError(f"a length of {T} has no room for the needles of {task}")
    return made[0].ids, newline + made[1][0].query, made[1][0].value


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


def several(task: str, tk: Tokenizer, T: int, samples: int, seed: int, reserve: int, turns: bool) -> Iterator[Row]:
    """Contexts that have at most T tokens together with a question and its answer or, asked in turn, with all."""
    make: Callable[..., Any] = keys_and_values if task == "kv" else prefixes_and_suffixes
    new = 40 if task == "kv" else 24

    def parts(made: tuple[str, list[tuple[str, str, str]]]) -> ruler.Parts:
        asked = [q + p + f" {a}" * turns for q, p, a in made[1]]
        return made[0], "".join(asked) if turns else max(asked, key=len), "", []

    def size(p: ruler.Parts) -> int:
        return len(tk.encode(p[0] + p[1], bos=False)) + (QUESTIONS - 1) * reserve * turns + new

    rng = random.Random(f"{seed} {task} {T}")
    fit = ruler.Fit(size, T - reserve, QUESTIONS, task, QUESTIONS)
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


# ---- contexts ----


@dataclass
class Context:
    """A prompt and the rows that ask about it, as tokens; each row's `asked` follows the `prompt`."""

    prompt: list[int]
    rows: list[Row] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)


def contexts(rows: Sequence[Row], tk: Tokenizer, chat: ChatParts, known: bool, turns: bool) -> list[Context]:
    """Groups rows by context, in the order in which contexts first appear.

    known: the question is part of the prompt, so every row becomes a context of its own; with `turns`, only the first
    question is. turns: a question follows earlier ones and their reference answers; otherwise each question comes right
    after the context. Rows of token ids, such as those of the shipped model's tasks, are taken as they are.
    """
    found: dict[object, Context] = {}
    for i, row in enumerate(rows):
        text, question = row["context"], row["question"]
        key = (row["task"], row["length"], text if isinstance(text, str) else tuple(text), known and not turns and i)
        if key not in found:
            found[key] = Context(list(text) if isinstance(text, list) else chat.opening(tk, text))
        c = found[key]
        if isinstance(question, list):
            ids = list(question)
        else:
            ids = chat.closing(tk, question, row["answer_prefix"], turn=len(c.rows) if turns else 0)
        if turns and c.rows:
            last = c.rows[-1]
            space = "" if (last["answer_prefix"] or " ").endswith((" ", "\n")) else " "
            ids = c.asked[-1] + tk.encode_after(c.asked[-1], f"{space}{last['answer'][0]}") + ids
        c.rows.append(row)
        c.asked.append(ids)
    for c in found.values() if known else ():
        first = c.asked[0]
        c.prompt, c.asked = c.prompt + first, [ids[len(first) :] for ids in c.asked]
    return list(found.values())
