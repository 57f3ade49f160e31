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
    model.setup_cache("quest", 2, 20)  # no window is narrower than that
    assert names(model) == ["Quest"] * 4 and not capsys.readouterr().err


def test_by_layers(capsys):
    model = sliding()
    model.setup_cache("0:streaming,recent=8,1:quest,2-:h2o", 1, 200)
    assert names(model) == ["Streaming", "Quest", "Full", "H2O"] and model.cache[0].k.shape[2] == 8
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


def test_what_a_ring_attends_to():
    model, lengths = sliding(), torch.tensor([7, 30])
    model.setup_cache("full", 2, 64)
    tokens = torch.stack([prompt(30), prompt(30, 1)])
    model.prefill(tokens, lengths)
    with observe(model) as trace:
        model.decode(tokens[:, 0], lengths)
    seen = [sorted(p for p in t.position[b, 0].tolist() if p >= 0) for t in trace[:2] for b in (0, 1)]
    assert seen == [[*range(8)], [*range(11, 31)], [*range(8)], [*range(31)]]


@pytest.mark.parametrize("n", [10, 19, 20, 21, 60])
def test_saved_and_restored_in_a_larger_cache(tmp_path, n):
    model, tokens = sliding(), prompt(n)[None]
    model.setup_cache("quest", 1, n + 8, 8)
    model.prefill(tokens, torch.tensor([n]))
    layers = [(type(m), m.args) for m in model.cache]
    state = snapshot.State([tokens[0].tolist()], torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1), None)
    snapshot.save(tmp_path / "a", model.cache, state, snapshot.identity(model, "quest", layers, "tiny", None))

    def steps():
        feed = prompt(8, 3)
        return torch.stack([model.decode(feed[i : i + 1], torch.tensor([n + i])).clone() for i in range(6)])

    logits = steps()
    model.setup_cache("quest", 1, 200)
    poison(model)
    model.reset_cache()
    CacheFile(tmp_path / "a").fill(model.cache)
    model.cache[0].rope.set_prompt(torch.tensor([n]))
    torch.testing.assert_close(steps(), logits, rtol=0, atol=0 if native.available() else 1e-5)
