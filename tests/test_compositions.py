"""Methods put together by a line of text: a method within a method, layers of several, and a question asked later."""

from __future__ import annotations

import pytest
import torch

from cache.grammar import method_files
from cache.spec import layer_methods, resolve
from engine import LLM
from runtime.errors import InputError
from scripts.contract import checks as c
from scripts.contract import step_checks as s
from scripts.contract.harness import methods_of, prompt, run, teacher, tiny

METHODS = sorted(method_files())
INNER = [m for m in METHODS if m != "razor"]
SHAPE = (2, 32, 4)  # of 4 KV heads some are protected, and others are not
RAZOR = dict(induction=0.4, echo=0.0)
LENGTHS = (3, 40, 90)


def inner(name, knobs):
    return ":".join([name, *(f"{k}={v}" for k, v in knobs.items())])


def check_dense(spec, steps=12, **knobs):
    """What loses nothing, however it is composed, is dense attention."""
    model, prompts = tiny(*SHAPE), [prompt(n) for n in LENGTHS]
    model.setup_cache(spec, len(prompts), max(LENGTHS) + steps, **knobs)
    got, fed = run(model, prompts, steps)
    c.same(got, teacher(model, prompts, fed), f"{spec} {knobs}")
    return model


@pytest.mark.parametrize("name", INNER)
def test_any_method_holds_the_protected_heads(name):
    """In every layer some KV heads go to it; where neither it nor the window of the others loses anything, nothing is
    lost: each head met its own queries, and outputs stand in their order."""
    whole = RAZOR | dict(window=1000, retrieval_method=inner(name, resolve(name)[0].lossless))
    model = check_dense("razor", **whole)
    assert all(m.n_own and m.n_other for m in model.cache)
    assert {type(m.other) for m in model.cache} == {resolve(name)[0]}


CONTRACT = (c.check_poison, c.check_ragged, c.check_reset, c.check_store, c.check_chunks,
            c.check_sizes, c.check_attended, c.check_half, s.check_nbytes, s.check_traffic)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["double_sparsity_offload", "ojakv", "sals", "self_index", "snapkv"])
def test_with_a_method_within_razor_keeps_the_contract(name):
    composed = RAZOR | dict(window=16, retrieval_method=inner(name, c.settings(name)[-1]))
    for check in (*CONTRACT, s.check_compiled):
        check("razor", composed)


def test_a_method_within_a_method_has_knobs_of_its_own():
    (_, args), *_ = layer_methods("razor,window=16,retrieval_method=quest:budget=64:recent=8", 2)
    assert args.window == 16
    model = tiny(*SHAPE)
    model.setup_cache("razor,retrieval_method=quest-7.5:recent=8:min_tokens=0", 1, 256, **RAZOR)
    assert [(m.other.args.budget, m.other.args.recent) for m in model.cache] == [(0.075, 8)] * 2
    for text, says in (
        ("quest:budget", "cannot read 'budget' in 'quest:budget'"),
        ("quest:colour=1", "no knob 'colour'"),
        ("quest:budget=none", "quest: budget='none' is not"),
        ("nope:budget=1", "unknown method 'nope'"),
        ("razor-28", "another method than razor"),
    ):
        with pytest.raises(InputError, match=says):
            layer_methods(f"razor,retrieval_method={text}", 2)


def test_a_common_knob_is_not_the_inner_methods_and_the_error_says_how_to_give_it():
    with pytest.raises(InputError, match="no knob 'budget'.*retrieval_method=quest:budget=64"):
        layer_methods("razor,retrieval_method=quest", 2, dict(budget=64))


def test_palu_says_which_group_serves_any_number_of_heads():
    """Five protected heads are no whole groups of four."""
    model = tiny(1, 32, 8)
    scores = torch.arange(8.0).repeat(2, 1)
    cls, args = layer_methods("razor,retrieval_method=palu", 1)[0]
    model.calibration = model.measured(cls.needs(args))
    model.calibration.tensors |= {f"layers.{i}.razor.induction": scores[i] for i in range(2)}
    try:
        knobs = dict(induction=0.625, echo=0.0)
        with pytest.raises(InputError, match="groups of 4 heads do not divide the 5 KV heads: use group=1"):
            model.setup_cache("razor,retrieval_method=palu", 1, 64, **knobs)
        model.setup_cache("razor,retrieval_method=palu:group=1", 1, 64, **knobs)
        assert [m.other.keys.basis.shape[0] for m in model.cache] == [5, 5]
    finally:
        model.calibration = None


# ---- by layers ----


LAYERS = [
    "0:h2o,heavy=1.0,1:quest,budget=1.0",
    "0:palu,rank=1.0,1:double_sparsity_offload,budget=1.0",
    "0:hshare,budget=1.0,1:razor,window=1000,retrieval_method=ojakv:rank=1.0",
]


@pytest.mark.parametrize("spec", LAYERS)
def test_layers_of_two_methods_that_lose_nothing_are_dense(spec):
    check_dense(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "0:pyramidkv,budget=48,1:tova,budget=24",
        "0:hshare,budget=48,sinks=4,recent=16,1:hshare,budget=32,sinks=4,recent=16",
        "0:double_sparsity_offload,budget=0.5,min_tokens=0,1:double_sparsity_offload-sync,budget=24",
        "0:razor,window=16,retrieval_method=quest:budget=24,1:razor,window=32,retrieval_method=snapkv:budget=40",
    ],
)
def test_layers_of_their_own_budgets_keep_the_contract(spec):
    for check in (c.check_poison, c.check_ragged, c.check_sizes):
        check(spec, {})


def test_every_layer_has_the_budget_that_is_told():
    model = tiny(*SHAPE)
    model.setup_cache("0:snapkv,budget=48,recent=8,1:snapkv,budget=16,recent=8", 1, 120, max_new_tokens=4)
    run(model, [prompt(100)], 4)
    assert [int(m.filled) for m in model.cache] == [52, 20]
    assert [m.k.shape[2] for m in model.cache] == [52, 20]


@pytest.mark.parametrize("keep", [0.5, 40])
def test_ojakv_over_snapkv_is_a_knob(keep):
    """Sec. 7: of the prompt what SnapKV keeps, as coordinates. With whole bases and all kept it is dense attention."""
    check_dense("ojakv", rank=1.0, keep=1.0)
    model, n = tiny(*SHAPE), 100
    model.setup_cache(f"ojakv,keep={keep},min_tokens=0", 1, n + 4, n_start=4, n_recent=4)
    run(model, [prompt(n)], 2)
    kept = round(keep * n) if isinstance(keep, float) else keep
    assert [int(m.stored) for m in methods_of(model)] == [kept - 8] * 2
    assert resolve("ojakv-snapkv")[1] == dict(rank=0.6, keep=0.5)


# ---- a question that the method does not know when it compresses ----

CONTEXT = "import os\nimport sys\n\n\ndef read(path):\n    with open(path) as f:\n        return f.read()\n"
QUESTIONS = "\ndef write(path, text):", "\nclass Reader"
SNAPKV = "snapkv,budget=16,recent=8"


@pytest.fixture(scope="module")
def llm():
    return LLM()


def kept(llm, n):
    """Positions below n that each layer's heads hold, of the first row."""
    return [[sorted(p for p in head.tolist() if p < n) for head in m.place[0, :, : int(m.filled[0])]]
            for m in llm.model.cache]  # fmt: skip


def test_a_prompt_is_compressed_without_its_question(llm):
    """SnapKV keeps the same tokens of the context whatever is asked, and others where the question is in the prompt."""
    tk, n = llm.tokenizer, len(llm.encode(CONTEXT))
    llm.use(SNAPKV)
    agnostic, aware = [], []
    for question in QUESTIONS:
        llm.generate(CONTEXT, 1, questions=[question])
        agnostic.append(kept(llm, n))
        llm.generate([llm.encode(CONTEXT) + tk.encode(question, bos=False)], 1)
        aware.append(kept(llm, n))
    assert agnostic[0] == agnostic[1] and aware[0] != aware[1]
    assert all(len(head) == 16 for layer in agnostic[0] for head in layer)


def test_where_nothing_is_lost_it_is_the_same_when_the_question_comes(llm):
    """With rows of several lengths, which give what each gives alone; slots and counts have room for the question."""
    rows, asked = [llm.encode(CONTEXT), llm.encode("import os\n")], llm.tokenizer.encode(QUESTIONS[0], bos=False)
    llm.use("full")
    later = llm.generate(rows, 4, questions=QUESTIONS[:1])
    at_once = llm.generate([row + asked for row in rows], 4)
    assert [x.tokens for x in later] == [x.tokens for x in at_once]
    assert [x.prompt_tokens for x in later] == [len(row) + len(asked) for row in rows]
    assert later[0].kv_bytes == at_once[0].kv_bytes and later[0].batch.steps == at_once[0].batch.steps
    llm.use(SNAPKV)
    both = llm.generate(rows, 4, questions=[asked])
    assert [x.tokens for x in both] == [llm.generate([row], 4, questions=[asked])[0].tokens for row in rows]


def test_layers_that_read_a_prompt_again_in_different_ways():
    """All texts go through all layers, so only one way can be read."""
    (model, tokens), kvzip = (tiny(2, 32), prompt(60)), "kvzip,budget=12,min_tokens=0,adaptive=False"
    for other in ("attention_matching,queries=repeat", "kvzip,chunk=8"):
        for spec in (f"0:{other},1:{kvzip}", f"0:{kvzip},1:{other}"):
            model.setup_cache(spec, 1, 100, 20)
            with pytest.raises(InputError, match="read a prompt again in different ways: give all that do the same"):
                model.prefill(tokens[None], torch.tensor([60]))
    kept = []
    for spec in (f"0:full,1:{kvzip}", f"0:{kvzip},sinks=2,1:{kvzip}"):
        model.setup_cache(spec, 1, 100, 20)
        run(model, [tokens], 0)
        kept.append(model.cache[1].place[0, 0].tolist())
    assert kept[0] == kept[1]
