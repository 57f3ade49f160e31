"""Models some of whose layers have a sliding window: `full` keeps it, in a ring, and the method takes the others."""

from __future__ import annotations

import pytest
import torch

from cache.trace import observe
from engine import snapshot
from engine.snapshot import CacheFile
from kernels import native
from runtime.errors import InputError, note_once
from scripts.contract.harness import poison, prompt, run, teacher, tiny
from scripts.contract.reference import forward

WINDOWS = (20, None, 20, None)
LENGTHS = (5, 19, 20, 21, 70)


def sliding(windows=WINDOWS):
    return tiny(windows=windows, n_layer=len(windows))


def names(model) -> list[str]:
    return [type(m).__name__ for m in model.cache]


@pytest.fixture(autouse=True)
def anew():
    note_once.cache_clear()


@pytest.mark.cpp  # without a compiler, another note may come first
def test_the_method_takes_the_other_layers(capsys):
    model = sliding()
    for _ in range(2):
        model.setup_cache("quest,budget=64,skip_layers=none", 2, 200)
    assert names(model) == ["Full", "Quest"] * 2
    note = "note: 2 of 4 layers have a sliding window of 20 tokens and keep it with full: quest takes the others\n"
    assert capsys.readouterr().err == note
    token = 2 * 2 * model.args.n_kv_head * model.args.head_dim * 4  # bytes of K and V of both rows
    assert [sum(b.values()) for b in model.cache_nbytes().values()][::2] == [20 * token] * 2
    assert model.kv_bytes_full(2, 200) == 2 * (20 + 200) * token
    assert [m.traffic(99) for m in model.cache][::2] == [20 * token] * 2
    model.setup_cache("quest", 2, 20)  # the layers of a text do not depend on the size of its cache
    assert names(model) == ["Full", "Quest"] * 2 and not capsys.readouterr().err  # it was said
    every = sliding((20,) * 4)
    every.setup_cache("quest", 2, 20)
    assert names(every) == ["Quest"] * 4 and not capsys.readouterr().err


def test_by_layers(capsys):
    model = sliding()
    model.setup_cache("0:streaming,recent=8,1:quest,2-:h2o", 1, 200)
    assert names(model) == ["Streaming", "Quest", "Full", "H2O"] and model.cache[0].k.shape[2] == 4 + 8
    assert "1 of 4 layers have a sliding window of 20 tokens" in capsys.readouterr().err
    with pytest.raises(InputError, match="Quest cannot honour this model's sliding window of 20"):
        model.setup_cache("0-1:full,2:quest,3:full", 1, 200)  # quest would get no layer
    with pytest.raises(InputError, match="H2O cannot honour this model's sliding window of 20"):
        sliding((20, 20)).setup_cache("h2o", 1, 200)


def test_a_ring_of_the_window_is_the_window():
    """Ragged prompts around the window's borders, and 40 steps; slots that were not filled are not read."""
    model, prompts = sliding(), [prompt(n) for n in LENGTHS]
    model.setup_cache("full", 5, 128)
    poison(model)
    got, fed = run(model, prompts)
    want = teacher(model, prompts, fed)
    assert (got - want).abs().max() < 1e-4
    model.setup_cache("full", 5, 128, drafts=3)  # what may be taken back must not overwrite: all tokens are kept
    assert model.cache[0].k.shape[2] == 131
    assert (run(model, prompts, feed=fed)[0] - want).abs().max() < 1e-4


OF_A_SIZE = ("streaming,sinks=4,recent=8", "streaming,sinks=4,recent=8,positions=cache", "tova,budget=12",
             "skip_softmax,scale=39,shortest=1")  # fmt: skip


@pytest.mark.parametrize("spec", OF_A_SIZE)
def test_the_size_of_a_cache_changes_no_output(spec):
    """Also where the model's window is narrower than one cache and wider than the other."""
    model, prompts, feed, out = sliding((20, None)), [prompt(9), prompt(3)], None, []
    for T in (19, 90):
        model.setup_cache(spec, 2, T, 10)
        got, feed = run(model, prompts, 10, feed)
        out.append(got)
    assert (out[0] - out[1]).abs().max() < 1e-5


def test_a_second_reading_has_the_models_window():
    """Votes of kvzip as by one pass over the text twice. One window is as wide as the cache, but not as both."""
    tokens = prompt(70)
    for windows, T in (((20, None), 100), ((90, None), 80)):
        model, layers, votes = sliding(windows), [], []
        forward(model, torch.cat((tokens, tokens))[None], layers.append)
        q, k = layers[1].q_rot.double(), layers[1].k_rot.double()  # [S, heads, D]
        model.setup_cache("kvzip", 1, T, 10, budget=12, min_tokens=0, adaptive=False)
        score = model.cache[1].prompt_scores
        model.cache[1].prompt_scores = lambda *a, score=score, votes=votes: votes.append(score(*a)) or votes[-1]
        run(model, [tokens], 0)
        for h in range(k.shape[1]):
            of = range(h * q.shape[1] // k.shape[1], (h + 1) * q.shape[1] // k.shape[1])
            weights = [
                ((k[: i + 1, h] @ q[i, g]) * q.shape[2] ** -0.5).softmax(0)[:70] for g in of for i in range(70, 140)
            ]
            want = torch.stack(weights).amax(0)
            assert (votes[0][0, h, 4:70].double() - want[4:]).abs().max() < 1e-5, windows


@pytest.mark.parametrize("n", [1, 5, 17, 19, 20, 40])
def test_drafts_in_a_text_shorter_than_the_window(n):
    """Those of the checked tokens whose windows begin before the text see all of it."""
    model, tokens = sliding(), prompt(n + 5)
    model.setup_cache("full", 1, n + 30, 30, drafts=4)
    model.prefill(tokens[None, :n], torch.tensor([n]))
    got = model.decode(tokens[None, n:], torch.tensor([n]))[0]
    assert (got - forward(model, tokens[None])[0, n:]).abs().max() < 1e-4


def test_what_a_ring_attends_to():
    model, lengths = sliding(), torch.tensor([7, 30])
    model.setup_cache("full", 2, 64)
    tokens = torch.stack([prompt(30), prompt(30, 1)])
    model.prefill(tokens, lengths)
    with observe(model) as trace:
        model.decode(tokens[:, 0], lengths)
    seen = [sorted(p for p in t.position[b, 0].tolist() if p >= 0) for t in trace[:2] for b in (0, 1)]
    assert seen == [[*range(8)], [*range(11, 31)], [*range(8)], [*range(31)]]


@pytest.mark.parametrize("spec", ["quest", "tova,budget=16", "streaming,sinks=4,recent=30"])
@pytest.mark.parametrize("n", [10, 19, 20, 21, 60])
def test_saved_and_restored_in_a_larger_cache(tmp_path, n, spec):
    model, tokens = sliding(), prompt(n)[None]
    model.setup_cache(spec, 1, n + 8, 8)
    model.prefill(tokens, torch.tensor([n]))
    layers = [(type(m), m.args) for m in model.cache]
    state = snapshot.State([tokens[0].tolist()], torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1), None)
    snapshot.save(tmp_path / "a", model.cache, state, snapshot.identity(model, spec, layers, "tiny", None))

    def steps():
        feed = prompt(8, 3)
        return torch.stack([model.decode(feed[i : i + 1], torch.tensor([n + i])).clone() for i in range(6)])

    logits = steps()
    model.setup_cache(spec, 1, 200)
    poison(model)
    model.reset_cache()
    CacheFile(tmp_path / "a").fill(model.cache)
    model.cache[0].rope.set_prompt(torch.tensor([n]))
    torch.testing.assert_close(steps(), logits, rtol=0, atol=0 if native.available() else 1e-5)
