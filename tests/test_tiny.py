"""The shipped model: its size and format, and that it really retrieves (small samples; results/ has the large ones)."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loading.checkpoint import load_checkpoint
from loading.tokenizer import load_tokenizer
from loading.tokenizer.turns import ChatParts
from models.tiny.training.tasks import Tasks
from models.tiny.training.train_tiny import Trainer
from scripts.eval.evaluation import Evaluation
from scripts.eval.rows import contexts, rows_of

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"


@pytest.fixture(scope="module")
def evaluation():
    return Evaluation(TINY, torch.device("cpu"), batch=5, query_in_prompt=False, seed=5)


def test_it_is_small_and_leaves_the_methods_something_to_do():
    files = [f for f in TINY.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 16 * 2**20
    assert not [f for f in files if f.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
    model = load_checkpoint(TINY, dtype=None)
    a = model.args
    assert a.n_layer >= 6 and a.n_kv_head >= 4 and a.head_dim == 64 and a.n_head > a.n_kv_head and a.max_seq_len >= 4096
    assert model.norm.weight.dtype == torch.bfloat16 and 2000 <= a.vocab_size <= 4096


def test_transformers_reads_it_and_agrees():
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    ids = torch.tensor([load_tokenizer(TINY).encode("def main():\n    parser = argparse.")])
    with torch.inference_mode():
        assert (hf(ids).logits - load_checkpoint(TINY)(ids)).abs().max() < 1e-4


def test_what_trains_is_the_decoder():
    """The trainer goes through the layers by itself, to stop early and to look at the second: to the same logits."""
    model, tokens = load_checkpoint(TINY), torch.randint(0, 2048, (2, 40))
    with torch.inference_mode():
        x, early = Trainer.trunk(SimpleNamespace(model=model), model.args.n_layer)(tokens, *model.rope_tables(40))
        assert torch.equal(model.output(x), model(tokens))
        assert torch.equal(early, list(model.hidden_states(tokens))[2])


def found(evaluation):
    """The share of ten needles."""
    return np.mean(scores(evaluation, "needle", 512, 10))


def scores(evaluation, task, length, n):
    asked = contexts(list(rows_of(evaluation, task, length, n, None, 0)), evaluation.tk, ChatParts(), False, False)
    return [score for i in range(0, n, 5) for *_, score in evaluation.ask(asked[i : i + 5])]


@pytest.mark.parametrize("method, knobs", [("full", {}), ("self_index", dict(tail=64))], ids=["full", "self_index"])
def test_it_finds_a_needle(evaluation, method, knobs):
    evaluation.setup({method: (method, knobs)}, 512 + 64)
    assert found(evaluation) >= (0.9 if method == "full" else 0.75)


def test_forgetting_loses_the_needle(evaluation):
    """The control: a needle outside of the window cannot be found, so the test above measures retrieval."""
    evaluation.setup({"streaming": ("streaming", dict(recent=64))}, 512 + 64)
    assert found(evaluation) <= 0.3


def test_self_index_at_its_lossless_limit_is_full_token_for_token(evaluation):
    cases = [evaluation.tasks(9, i).needle_case(512, n=4)[0].ids[: 512 - 16 * i] for i in range(2)]
    lossless = dict(store_bits=16, budget=1.0)
    evaluation.setup({"full": ("full", {}), "self_index": ("self_index", lossless)}, 600)
    first, lengths = evaluation.prefill(cases)
    got = []
    for name, cache in evaluation.caches.items():
        evaluation.model.cache = cache
        got.append(evaluation.decode(first[name], lengths, [[] for _ in cases], [48] * 2))
    assert got[0] == got[1]


def test_it_continues_a_random_repeat(evaluation):
    evaluation.setup({"full": ("full", {})}, 264)
    assert min(scores(evaluation, "repeats", 256, 2)) > 0.9


def test_the_words_of_the_evaluation_were_held_out():
    words = json.loads((TINY / "words.json").read_text())
    assert len(words["held_out"]) >= 300 and not set(words["held_out"]) & set(words["train"])


@pytest.mark.parametrize("adds", [True, False])
def test_samples_begin_with_bos_where_the_models_texts_do(adds, tmp_path):
    for file in ("tokenizer.model", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((TINY / file).read_bytes())
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | dict(add_bos_token=adds)))
    tk = load_tokenizer(tmp_path)
    tasks = Tasks(tk, [torch.arange(300, 1300).numpy()], [1.0], ["alpha", "beta", "gamma", "delta"], 0)
    samples = [tasks.plain_text(64)[0], tasks.haystack(400, n=1, n_query=1)[0], tasks.needle_case(400, n=2)[0].ids]
    assert [s[0] == tk.bos_id for s in samples] == [adds] * 3


def test_generated_samples_are_labelled_right():
    """An ANSWER position's target is the value of the needle that the text before it asks for."""
    tk = load_tokenizer(TINY)
    text = torch.arange(300, 1300).numpy()
    for seed in range(20):
        tasks = Tasks(tk, [text], [1.0], ["alpha", "beta", "gamma", "delta"], seed)
        context, asked = tasks.needle_case(400, n=2, n_query=1)
        whole = tk.decode(context.ids)
        assert tk.decode(asked[0].statement) + tk.decode(asked[0].value) in whole
        ids, labels = Tasks(tk, [text], [1.0], ["alpha", "beta", "gamma"], seed).haystack(400, n=1, n_query=1)
        answer = tk.decode(ids[labels == 2].tolist())
        assert answer and tk.decode(ids.tolist()).count(answer) >= 2
        assert len(ids) == len(labels) == 401
