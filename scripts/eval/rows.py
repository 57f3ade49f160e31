"""Samples in kvpress's format, and their scores.

A row has context, question, answer_prefix, answer (the references), max_new_tokens and task. RULER, LongBench,
InfiniteBench and LooGLE are published in this format; the rows of one context follow one another. As in kvpress, a
task's name decides its metric; for unknown names it is RULER's, the share of the references that the answer contains.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import InputError
from runtime.machine import read_text, written

Row = dict[str, Any]


# ---- files ----


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except ValueError as e:
        raise InputError(f"{path} is no JSON: {e}") from None


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Writes one line per row, all of them or none."""
    with written(path) as tmp:
        tmp.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")


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
            rows = [json.loads(line) for line in read_text(path).splitlines() if line.strip()]
        except ValueError as e:
            raise InputError(f"{path} is not a .jsonl file ({e}): give one JSON object per line") from None
    for i, row in enumerate(rows):
        row["answer"] = row.get("answer", row.pop("answers", None)) if isinstance(row, dict) else None
        if row["answer"] is None or {"context", "question", "task", "max_new_tokens"} - row.keys():
            raise InputError(f"row {i + 1} of {path} lacks one of context, question, answer, max_new_tokens, task")
        if isinstance(row["answer"], str | int | float):
            row["answer"] = [row["answer"]]
        row["answer_prefix"] = row.get("answer_prefix") or ""
        row.setdefault("length", 0)
        row.setdefault("index", i)
    if not rows:
        raise InputError(f"{path} has no rows")
    return rows


# ---- scores ----


def contained(said: str, answers: Sequence[Any], row: Row) -> float:
    """RULER's metric: the share of the references that the answer contains, ignoring case."""
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
    return rouge_scorer().score(str(answer), said)["rougeL"].fmeasure


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
    found = re.findall(r"\d+\.\d+|\d+" if isinstance(answer, float) else r"\d+", said)
    return float(bool(found) and float(found[0]) == float(answer))


def last_number(said: str, answer: Any, row: Row) -> float:
    found = re.findall(r"-?\d+", said)
    return float(bool(found) and int(found[-1]) == int(answer))


def a_word(said: str, answer: Any, row: Row) -> float:
    return float(str(answer) in re.sub("[\n:\"'.,?!{}]", " ", said).split())


def letter(said: str, answer: Any, row: Row) -> float:
    """Whether the last capital letter of an option, in the first line that has one, is the answer."""
    found = re.search(r"\b[A-J]\b(?!.*\b[A-J]\b)", said.strip())
    return float(bool(found) and found[0] == answer)


def best_of(metric: Callable[[str, Any, Row], float]) -> Callable[[str, Sequence[Any], Row], float]:
    return lambda said, answers, row: max((metric(said, a, row) for a in answers), default=0.0)


# metric -> the tasks that it scores, by kvpress's names
METRICS: dict[Callable[..., float], str] = {
    f1: "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa longbook_qa_eng",
    rouge_l: "gov_report qmsum multi_news samsum longbook_sum_eng shortdep_qa longdep_qa longdep_summarization",
    edit_similarity: "lcc repobench-p",
    numbers: "passage_count passage_retrieval_en",
    classified: "trec",
    first_number: "passkey number_string math_find",
    last_number: "code_run",
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
    return float(BY_NAME.get(task, contained)(said.strip(), row["answer"], row))
