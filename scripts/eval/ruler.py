"""RULER's tasks (Hsieh et al. 2024) by the rules of NVIDIA/RULER: the same seed and tokenizer give the same samples.

    python -m scripts.eval.compare --tasks niah_single_1,vt --lengths 1024

Rows have kvpress's format: context, question, answer_prefix, answer, max_new_tokens, task. A length counts the prompt,
with a chat template if one is reserved for, and the tokens of an answer.

niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe and fwe need no data. The other needles are hidden in essays,
those of RULER with --essays (its PaulGrahamEssays.json, or a folder of .txt files); otherwise in held-out prose of
this machine, and their names end in "-style". qa_1 needs --squad FILE, qa_2 --hotpotqa FILE. Differences from RULER:

- sentences of essays end at . ! or ?, where RULER uses nltk;
- cwe has no more different words than wonderwords, where RULER uses a longer list from 64K tokens on;
- "-style" haystacks get the words that fill 95 % of the length, where RULER takes 500 off a sample that is too long;
- where RULER's smallest haystack does not fit, a smaller one is searched.

A row's `tokens` count template, prompt and answer; `short` marks rows of less than 95 % of the length.
"""

from __future__ import annotations

import bisect
import functools
import importlib.resources
import itertools
import json
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loading.tokenizer import Tokenizer
from runtime.corpus import collect
from runtime.errors import InputError, did_you_mean
from runtime.machine import read_text
from runtime.options import Parser

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()
# RULER's templates (scripts/data/synthetic/constants.py): before the question, the question, the answer's beginning
NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\n",
    "What are all the special magic {kind} for {query} mentioned in the provided text? ",
    "The special magic {kind} for {query} mentioned in the provided text are",
)
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n",
    "Question: Find all variables that are assigned the value {query} in the text above. ",
    "Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assigned the value "
    "{query}, they are: ",
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\n",
    "Question: What are the 10 most common words in the above list? ",
    "Answer: The top 10 words that appear most often in the list are:",
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\n",
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? ",
    "Answer: According to the coded text above, the three most frequently appeared words are:",
)
QA_RULE = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
QA = (
    QA_RULE + "\n\nThe following are given documents.\n\n{context}\n\n",
    QA_RULE + "\n\nQuestion: {query} ",
    "Answer:",
)
NEW_TOKENS = dict(niah=128, vt=30, cwe=120, fwe=50, qa=32)
# RULER's scripts/synthetic.yaml: haystack, kind of keys, kind of values, number of keys, values per key, keys asked
NEEDLES = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
FULL = 0.95  # of its length that a sample fills; less is marked
QA_FILES = dict(qa_1="squad", qa_2="hotpotqa")
TASKS = [*NEEDLES, "vt", "cwe", "fwe", *QA_FILES]

Row = dict[str, Any]
Parts = tuple[str, str, str, list[str]]  # context, question, answer prefix, answers
Make = Callable[[int], Parts]  # number of pieces of the haystack -> a sample


@dataclass
class Sources:
    """Files that some tasks need; an argparse.Namespace with these names serves, too."""

    essays: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except ValueError as e:
        raise InputError(f"{path} is no JSON: {e}") from None


def name_of(task: str, sources: Any) -> str:
    """The task's name, with "-style" if the haystack is not RULER's."""
    return f"{task}-style" if NEEDLES.get(task, " ")[0] == "essay" and not sources.essays else task


def check_tasks(tasks: Sequence[str], sources: Any) -> None:
    """Raises InputError if a task is unknown, lacks its file, or the file cannot be read."""
    for task in tasks:
        if task not in TASKS:
            raise InputError(f"unknown task {task!r}: {did_you_mean(task, TASKS)}use some of {', '.join(TASKS)}")
        if (source := QA_FILES.get(task)) and not getattr(sources, source):
            raise InputError(f"{task} needs --{source} FILE, as {source}.json was published; or leave it out")
        if source:
            questions(source, getattr(sources, source))
    if sources.essays and any(NEEDLES.get(t, " ")[0] == "essay" for t in tasks):
        essay_words(sources.essays)


# ---- words ----


@functools.cache
def words(kind: str) -> list[str]:
    """A list of PyPI's wonderwords, which RULER uses: noun, adjective or verb."""
    try:
        text = (importlib.resources.files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    except (ImportError, OSError):
        raise InputError(
            "RULER's keys are words of wonderwords, which is not installed: pip install wonderwords"
        ) from None
    return [w.rstrip() for w in text.splitlines()]


class Pairs(Sequence[str]):
    """All 6 million "adjective-noun" texts in sorted order, each made when it is asked for."""

    def __init__(self) -> None:
        self.nouns = sorted(set(words("noun")))
        groups: list[list[str]] = []  # adjectives that one of them, with its hyphen, begins: "blue-", "blue-eyed-"
        for adjective in sorted({f"{a}-" for a in words("adjective")}):
            if groups and adjective.startswith(groups[-1][0]):
                groups[-1].append(adjective)
            else:
                groups.append([adjective])
        self.groups = [g if len(g) == 1 else sorted({a + n for a in g for n in self.nouns}) for g in groups]
        self.ends = list(itertools.accumulate(len(self.nouns) if len(g) == 1 else len(g) for g in self.groups))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, i: Any) -> Any:
        at = bisect.bisect_right(self.ends, i)
        group, i = self.groups[at], i - (self.ends[at - 1] if at else 0)
        return group[0] + self.nouns[i] if len(group) == 1 else group[i]


@functools.cache
def essay_words(folder: str | None) -> list[str]:
    if folder is None:
        docs = [d.text for d in collect(only_held_out=True) if d.held_out and d.kind == "prose"]
        return re.sub(r"\s+", " ", " ".join(docs)).split(" ")
    path = Path(folder)
    if path.suffix == ".json":
        text = read_json(path).get("text", "")
    else:
        text = "".join(map(read_text, sorted(path.glob("*.txt"))))
    if not text.strip():
        raise InputError(
            f"--essays {folder} has no text: give a folder of .txt files, or RULER's PaulGrahamEssays.json"
        )
    return re.sub(r"\s+", " ", text).split(" ")


# ---- the tasks ----


def needles(task: str, rng: random.Random, seed: int, essays: str | None) -> Make:
    haystack, key_kind, value_kind, n_key, n_value, n_query = NEEDLES[task]
    draw = dict(
        numbers=lambda: str(rng.randint(10**6, 10**7 - 1)),
        words=functools.partial(rng.choice, Pairs()) if key_kind == "words" else None,
        uuids=lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    )

    def statement() -> tuple[str, str, str]:
        key, value = draw[key_kind](), draw[value_kind]()
        return NEEDLE.format(kind=value_kind, key=key, value=value), key, value

    def make(n: int) -> Parts:
        keys, values, inserted = [], [], []
        for _ in range(n_key):
            keys.append(draw[key_kind]())
            values.append([draw[value_kind]() for _ in range(n_value)])
            inserted += [NEEDLE.format(kind=value_kind, key=keys[-1], value=v) for v in values[-1]]
        random.Random(seed).shuffle(inserted)
        if haystack == "essay":
            every = essay_words(essays)
            text = " ".join((every * -(-n // len(every)))[:n])
            sentences = re.split(r"(?<=[.!?])\s+", text.strip())
            at = sorted(int(len(sentences) * (depth / 100)) for depth in rng.sample(DEPTHS, len(inserted)))
            pieces = []
            for first, last, needle in zip([0, *at], [*at, len(sentences)], [*inserted, None], strict=True):
                pieces += [" ".join(sentences[first:last])] + ([needle] if needle else [])
            context = " ".join(pieces)
        else:
            sentences = [NOISE] * n if haystack == "noise" else [statement()[0] for _ in range(n)]
            where = sorted(rng.sample(range(n), len(inserted)), reverse=True)
            for index, needle in zip(where, inserted, strict=True):
                sentences.insert(index, needle)
            context = "\n".join(sentences)
        asked = rng.sample(range(n_key), n_query)
        queries = [keys[i] for i in asked]
        query = queries[0] if n_query == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
        texts, kind = list(NIAH), value_kind
        if n_query * n_value == 1:
            texts = [t.replace("Some", "A").replace("are all", "is").replace("are", "is") for t in NIAH]
            kind = value_kind[:-1]
        before, question, prefix = (t.format(kind=kind, context=context, query=query) for t in texts)
        return before, question, prefix, [v for i in asked for v in values[i]]

    return make


def chain(rng: random.Random, values: np.random.RandomState, n: int, letters: int = 5, hops: int = 4) -> Parts:
    """One chain of variables within n repetitions of the noise. With names of 3 letters it is the one of the example,
    whose value is 12345."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=letters)) for _ in range(hops + 1)]
    while len(set(names)) <= hops:
        names = [*dict.fromkeys(names), "".join(rng.choices(string.ascii_uppercase, k=letters))]
    value = "12345" if letters == 3 else str(values.randint(10000, 99999))
    lines = [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]
    sentences = [NOISE] * n
    for i, at in enumerate(sorted(rng.sample(range(n), len(lines)))):
        sentences.insert(at + i, lines[i])
    before, question, prefix = (t.format(context="\n".join(sentences), query=value, n=hops + 1) for t in VT)
    return before, question, prefix, names


def chains(rng: random.Random, values: np.random.RandomState, tokens: Callable[[Parts], int], fit: Fit) -> tuple[
        Callable[[int], Make], int]:  # fmt: skip
    """A maker of chains that follow an example of at most 500 tokens, whose names and value are drawn again for every
    sample; and how much noise fits."""
    small, plain = functools.partial(chain, rng, values, letters=3), functools.partial(chain, rng, values)
    short = Fit(tokens, 500, 5, fit.task, 5)
    *texts, names = short.sample(small, short.largest(small, short.estimate(small, 0)))
    example = "".join(texts) + f" {' '.join(names)}\n"
    shown, alone = tokens((example, "", "", [])), fit.size

    def make(n: int) -> Parts:
        before, *rest = plain(n)
        text = example
        for name in names:
            text = text.replace(name, "".join(rng.choices(string.ascii_uppercase, k=len(name))))
        return text.replace("12345", str(values.randint(10000, 99999))) + "\n" + before, *rest

    new = alone(("", "", "", []))
    searched = replace(fit, size=lambda parts: alone(parts) + shown)
    return lambda i: make, searched.largest(plain, fit.estimate(plain, new))


def common_words(rng: random.Random, seed: int, length: int) -> tuple[Make, int]:
    """A maker of lists in which ten words occur 30 times and others 3 times, after an example with 10 and 3 times
    (fewer below 4K tokens); and how many words there are."""
    every = sorted({*words("noun"), *words("adjective"), *words("verb")})
    random.Random(seed).shuffle(every)
    example, real = ((20, 3, 1), (6, 1)) if length < 4096 else ((40, 10, 3), (30, 3))

    def numbered(some: Sequence[str]) -> str:
        return " ".join(f"{i + 1}. {word}" for i, word in enumerate(some))

    def make_list(n: int, often: int, seldom: int) -> tuple[str, list[str]]:
        drawn = rng.sample(every, n)
        listed = drawn[:10] * often + drawn[10:] * seldom
        random.Random(seed).shuffle(listed)
        return numbered(listed), drawn[:10]

    def make(n: int) -> Parts:
        shown, answers = make_list(*example)
        context, common = make_list(n, *real)
        shot = "".join(CWE).format(context=shown) + f" {numbered(answers)}\n"
        return shot + CWE[0].format(context=context), CWE[1], CWE[2], common

    return make, len(every)


def coded_words(rng: random.Random, seed: int, limit: int) -> Callable[[], Make]:
    """Words of 6 letters with frequencies by Zeta(2); the most common is shown as dots. Every call draws new words."""
    n_word = limit // 50

    def draw() -> Make:
        drawn = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(n_word)]
        while len(set(drawn)) < n_word:
            drawn.append("".join(rng.choices(string.ascii_lowercase, k=6)))
        coded = sorted(set(drawn))
        random.Random(seed).shuffle(coded)
        coded[0] = "..."

        def make(n: int) -> Parts:
            counts = (n * (np.arange(1, len(coded) + 1) ** -2.0) / (math.pi**2 / 6)).astype(int)
            text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
            random.Random(seed).shuffle(text)
            return FWE[0].format(context=" ".join(text)), FWE[1], FWE[2], coded[1:4]

        return make

    return draw


Question = tuple[str, list[str], list[int], list[int]]  # question, answers, its documents, others of its article


@functools.cache
def questions(kind: str, file: str) -> tuple[list[Question], list[str]]:
    """The questions of SQuAD or HotpotQA as published, and every document once."""
    data = read_json(Path(file))
    try:
        if kind == "squad":
            articles = [[p["context"] for p in d["paragraphs"]] for d in data["data"]]
        else:
            articles = [[f"{title}\n{''.join(said)}" for title, said in d["context"]] for d in data]
        docs = sorted({doc for article in articles for doc in article})
        index = {doc: i for i, doc in enumerate(docs)}
        found: list[Question] = []
        for d, article in zip(data["data"] if kind == "squad" else data, articles, strict=True):
            if kind == "hotpotqa":
                found.append((d["question"], [d["answer"]], [index[doc] for doc in article], []))
                continue
            for p in d["paragraphs"]:
                own = index[p["context"]]
                more = [index[doc] for doc in article if index[doc] != own]
                found += [(qa["question"], [a["text"] for a in qa["answers"]], [own], more)
                          for qa in p["qas"] if not qa["is_impossible"]]  # fmt: skip
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(f"--{kind} {file} is not {kind} as published ({type(e).__name__}: {e})") from None
    return found, docs


def documents(rng: random.Random, seed: int, kind: str, file: str) -> Callable[[int], Make]:
    """Makers by question: its documents, others of the same article, then any others, shuffled."""
    every, docs = questions(kind, file)

    def of(index: int) -> Make:
        query, answers, own, more = every[index % len(every)]

        def make(n: int) -> Parts:
            if n >= len(docs):
                shown = (docs * -(-n // len(docs)))[:n]
            elif n - len(own) > len(more):
                others = [i for i in range(len(docs)) if i not in {*own, *more}]
                shown = [docs[i] for i in own + more + rng.sample(others, max(0, n - len(own) - len(more)))]
            else:
                shown = [docs[i] for i in own + rng.sample(more, max(0, n - len(own)))]
            random.Random(seed).shuffle(shown)
            context = "\n\n".join(f"Document {i + 1}:\n{doc}" for i, doc in enumerate(shown))
            return QA[0].format(context=context), QA[1].format(query=query), QA[2], answers

        return make

    return of


# ---- the size of a haystack ----


@dataclass
class Fit:
    """The size of a sample. step: the pieces that RULER removes if a sample is longer than those of its search. least:
    the fewest pieces. fills: instead of RULER's steps, pieces are removed or added until a sample is FULL."""

    size: Callable[[Parts], int]  # tokens of prompt and answer
    limit: int
    step: int
    task: str
    least: int = 1
    fills: bool = False

    def estimate(self, make: Make, answer: int) -> int:
        """Three times the number of pieces that would fit if all were as long as the first `step` pieces."""
        return int(self.limit / ((self.size(make(self.step)) - answer) / self.step) * 3)

    def largest(self, make: Make, high: int) -> int:
        """The most pieces of a haystack that fit, by binary search; `least` if none do."""
        return (
            self._search(make, self.step, max(high, 2 * self.step))
            or self._search(make, self.least, self.step - 1)
            or self.least
        )

    def _search(self, make: Make, low: int, high: int) -> int:
        best = 0
        while low <= high:
            middle = (low + high) // 2
            if self.size(make(middle)) <= self.limit:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def sample(self, make: Make, n: int) -> Parts:
        while True:
            size = self.size(parts := make(n))
            more = (self.limit - size) * n // size
            if size <= self.limit:
                if not self.fills or size >= FULL * self.limit or not more:
                    return parts
                n += more
            elif n <= self.least:
                raise InputError(f"{self.task}: the smallest sample has {size} tokens with its answer, of which "
                                 f"{self.limit} fit: leave it out, or give a larger --lengths")  # fmt: skip
            else:
                n = max(self.least, n + more if self.fills or n <= self.step else n - self.step)


def sized(tokens: int, length: int) -> Row:
    """The fields of a row that say how long it is, template, prompt and answer together."""
    return dict(tokens=tokens) | (dict(short=True) if tokens < FULL * length else {})


def generate(task: str, tk: Tokenizer, length: int, samples: int, seed: int = 42, sources: Any = None,
             reserve: int = 0) -> Iterator[Row]:  # fmt: skip
    """The samples of a task of TASKS. A prompt, an answer and `reserve` tokens of a chat template have at most `length`
    tokens together. Raises InputError if the smallest sample does not fit."""
    sources = sources or Sources()
    rng, values = random.Random(seed), np.random.RandomState(seed)
    new, limit = NEW_TOKENS[task.split("_")[0]], length - reserve

    def tokens(parts: Parts) -> int:
        return len(tk.encode("".join(parts[:3]), bos=False))

    essay = NEEDLES.get(task, " ")[0] == "essay"
    step = 500 if essay else 10 if task in ("cwe", *QA_FILES) else 5 if length < 4096 else 10 if task == "vt" else 25
    least = dict(vt=5, cwe=10, qa_1=step, qa_2=step).get(task, 1)  # pieces: a chain has 5 lines, cwe 10 answers
    fit = Fit(lambda parts: tokens(parts) + new, limit, step, task, least, essay and not sources.essays)
    of: Callable[[int], Make]
    if task == "vt":
        of, best = chains(rng, values, tokens, fit)
    elif task == "cwe":
        make, most = common_words(rng, seed, length)
        each = tokens(make(4096)) / 4096
        best, of = fit.largest(lambda n: make(min(n, most)), int(limit // each) * 2), lambda i: make
        best = min(best, most)
    elif task == "fwe":
        fit.step = fit.least = max(1, (limit - new) // 32)
        draw = coded_words(rng, seed, limit - new)
        make, best = draw(), (limit - new) // 6
        while fit.size(make(best)) < limit:
            best += fit.step
        best, of = best - fit.step, lambda i: draw()
    else:
        if task in NEEDLES:
            make = needles(task, rng, seed, sources.essays)
            of = lambda i: make  # noqa: E731
        else:
            of = documents(rng, seed, QA_FILES[task], getattr(sources, QA_FILES[task]))
        best = fit.largest(of(0), fit.estimate(of(0), new))
    for index in range(samples):
        context, question, prefix, answer = fit.sample(of(index), best)
        row: Row = dict(task=name_of(task, sources), context=context, question=question, answer_prefix=prefix,
                        answer=answer, max_new_tokens=new, length=length, index=index)  # fmt: skip
        row |= sized(fit.size((context, question, prefix, [])) + reserve, length)
        if len(answer) == 1 and task in NEEDLES:
            row["depth"] = round(context.index(answer[0]) / len(context), 4)
        yield row


def add_sources(p: Parser) -> None:
    """--essays, --squad, --hotpotqa."""
    p.add_argument("--essays", help="RULER's PaulGrahamEssays.json, or a folder of .txt files")
    p.add_argument("--squad", metavar="FILE", help="dev-v2.0.json, for qa_1")
    p.add_argument("--hotpotqa", metavar="FILE", help="hotpot_dev_distractor_v1.json, for qa_2")
