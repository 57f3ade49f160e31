"""Drawing a token: noise that is a row's own, and each way to cut a distribution, against Hugging Face's."""

import pytest
import torch

import engine as E
from engine import LLM, Sampling

PROMPTS = ["import os\n", "def f(x):", "import os\n", "import os\n"]
WARM = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def llm():
    return LLM()


def draw(sampling, logits):
    """Each row of logits [B, V] with noise of its own."""
    keys = torch.tensor(E.noise_keys(sampling.seed, [[1]] * len(logits)))
    return sampling.draw(logits, torch.zeros_like(keys), keys)


@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_equal_prompts_differ_and_each_gets_what_it_gets_in_any_batch(llm, batch_size):
    tokens = [c.tokens for c in llm.generate(PROMPTS, 16, WARM, batch_size=batch_size)]
    assert len({tuple(t) for t in tokens}) == 4
    assert tokens[:2] == [llm.generate(p, 16, WARM)[0].tokens for p in PROMPTS[:2]]
    assert tokens == [c.tokens for c in llm.generate(PROMPTS, 16, WARM)]
    text = "".join(llm.stream(PROMPTS[1], 16, WARM))
    assert text == llm.generate(PROMPTS[1], 16, WARM)[0].text


def test_a_conversation_that_prefills_again_draws_the_same(llm):
    def turns(between):
        talk = llm.conversation(WARM)
        first = talk.say("import os", 6).tokens
        between()
        return first, talk.say("def f", 6).tokens

    assert turns(lambda: None) == turns(lambda: llm.generate("x", 5))


def test_the_global_generator_is_left_alone(llm):
    state = torch.get_rng_state()
    llm.generate(PROMPTS, 5, WARM)
    assert torch.equal(state, torch.get_rng_state())


def test_another_seed_is_another_text(llm):
    assert len({tuple(llm.generate("The ", 12, Sampling(1.5, seed=i))[0].tokens) for i in range(4)}) == 4


def test_noise_is_exponential_and_independent_in_every_direction():
    """Kolmogorov-Smirnov against Exp(1), and no correlation between rows, positions, columns or seeds."""
    rows, n = 64, 4096
    keys = torch.tensor(E.noise_keys(0, [[1]] * rows))
    pos = torch.arange(rows)
    by_row, by_pos = (E.exponential_noise(k, p, n) for k, p in ((keys, pos * 0), (keys[:1].expand(rows), pos)))
    near = E.exponential_noise(torch.arange(rows), pos * 0, n)  # keys that differ in few bits
    for x in (by_row, by_pos, near):
        u = (1 - (-x.double()).exp()).flatten().sort().values
        steps = torch.arange(1, len(u) + 1) / len(u)
        assert (u - steps).abs().max() < 1.63 / len(u) ** 0.5  # 1 % of true samples are farther off
        uniform = 1 - (-x).exp()
        for a, b in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])):
            assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 4 / a.numel() ** 0.5
        assert abs(torch.corrcoef(x)[~torch.eye(rows, dtype=bool)]).max() < 6 / n**0.5
        bits = (x.view(torch.int32) >> torch.arange(16)[:, None, None] & 1).float().mean((1, 2))
        assert ((bits - 0.5).abs() < 0.01).all()
    assert by_row.min() > 0 and by_row.max() < 17


def test_the_noise_of_a_compiled_step_is_that_of_an_eager_one(llm):
    want = [c.tokens for c in llm.generate(PROMPTS, 12, WARM)]
    assert [c.tokens for c in LLM(compile=True).generate(PROMPTS, 12, WARM)] == want


def test_sampled_frequencies_follow_the_cut_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(20_000, 4)
    p = logits[0].softmax(-1)
    freq = torch.bincount(draw(Sampling(1.0), logits), minlength=4) / 20_000
    assert (freq - p).abs().max() < 0.015
    for cut, kept in (
        (dict(top_k=2), 2),
        (dict(top_p=float(p[0] + p[1]) - 0.01), 2),
        (dict(top_p=float(p[0]) + 0.01), 2),
    ):
        freq = torch.bincount(draw(Sampling(1.0, **cut), logits), minlength=4) / 20_000
        want = p[:kept] / p[:kept].sum()
        assert freq[kept:].sum() == 0 and (freq[:kept] - want).abs().max() < 0.015


@pytest.mark.parametrize("least", [dict(temperature=1e-4), dict(temperature=1.0, top_p=1e-300)], ids=str)
def test_the_least_that_is_allowed_is_greedy(least):
    logits = torch.tensor([[1.0, 3.0, 2.0], [1e4, 0.0, 1e30]])
    assert draw(Sampling(**least), logits).tolist() == [1, 2]
