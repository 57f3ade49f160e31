"""Drawing a token: noise that is a row's own, and each way to cut a distribution, against Hugging Face's."""

import dataclasses

import pytest
import torch

from engine import LLM
from engine.sampling import Sampling, exponential_noise, noise_keys
from loading.tokenizer.base import Stream
from runtime.errors import InputError

PROMPTS = ["import os\n", "def f(x):", "import os\n", "import os\n"]
WARM = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def llm():
    return LLM()


def draw(sampling, logits):
    """Each row of logits [B, V] with noise of its own."""
    keys = torch.tensor(noise_keys(sampling.seed, [[1]] * len(logits)))
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


def test_noise_is_exponential_and_independent_in_every_direction():
    """Kolmogorov-Smirnov against Exp(1), and no correlation between rows, positions, columns or seeds."""
    rows, n = 64, 4096
    keys = torch.tensor(noise_keys(0, [[1]] * rows))
    pos = torch.arange(rows)
    by_row, by_pos = (exponential_noise(k, p, n) for k, p in ((keys, pos * 0), (keys[:1].expand(rows), pos)))
    near = exponential_noise(torch.arange(rows), pos * 0, n)  # keys that differ in few bits
    for x in (by_row, by_pos, near):
        u = (1 - (-x.double()).exp()).flatten().sort().values
        steps = torch.arange(1, len(u) + 1) / len(u)
        assert (u - steps).abs().max() < 1.63 / len(u) ** 0.5  # 1 % of true samples are farther off
        uniform = 1 - (-x).exp()
        for a, b in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])):
            assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 4 / a.numel() ** 0.5
        assert abs(torch.corrcoef(x)[~torch.eye(rows, dtype=bool)]).max() < 6 / n**0.5
        # the lowest bit is how a processor's logarithm rounds
        bits = (x.view(torch.int32) >> torch.arange(1, 16)[:, None, None] & 1).float().mean((1, 2))
        assert ((bits - 0.5).abs() < 0.01).all()
    assert by_row.min() > 0 and by_row.max() < 17


def test_every_key_gives_every_column_noise():
    """Also one whose high word is the number of a column."""
    pos = torch.arange(2000)
    for word, column in ((0, 0), (7, 7), (99, 99)):
        noise = exponential_noise(torch.full_like(pos, (word << 32) + 5), pos, 100)
        assert noise[:, column].mean() == pytest.approx(1, abs=0.1) and noise.argmin(1).unique().numel() == 100


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


CUTS = [dict(top_k=5), dict(top_p=0.7), dict(min_p=0.2), dict(min_p=0.0), dict(min_p=1.0), dict(top_k=20, top_p=0.9),
        dict(temperature=0.6, top_k=30, top_p=0.8, min_p=0.1)]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_distribution_is_hugging_faces(cut):
    from transformers.generation import logits_process as hf

    logits = torch.randn(8, 200, generator=torch.Generator().manual_seed(0)) * 3
    kinds = dict(temperature=hf.TemperatureLogitsWarper, top_k=hf.TopKLogitsWarper, top_p=hf.TopPLogitsWarper,
                 min_p=hf.MinPLogitsWarper)  # fmt: skip
    scores = logits
    for name, kind in kinds.items():  # in the order of its generate
        scores = kind(cut[name])(None, scores) if name in cut else scores
    probs = Sampling(**{"temperature": 1.0} | cut).probs(logits)
    torch.testing.assert_close(probs / probs.sum(-1, keepdim=True), scores.softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_with_a_penalty_are_those_of_hugging_faces_processor(llm, temperature):
    """Teacher-forced: the prompt and all that was said before count, in every row for itself."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    prompts = [llm.encode(p) for p in ("import os\nimport sys\n", "def f(x):\n    return")]
    sampling = Sampling(temperature, repetition_penalty=1.3, seed=2)
    got = [c.tokens for c in llm.generate(prompts, 12, sampling)]
    for prompt, tokens, key in zip(prompts, got, noise_keys(2, prompts), strict=True):
        ids = torch.tensor([prompt + tokens])
        with torch.inference_mode():
            logits = llm.model(ids)
        for i, token in enumerate(tokens, len(prompt)):
            scores = RepetitionPenaltyLogitsProcessor(1.3)(ids[:, :i], logits[:, i - 1])
            assert Sampling(temperature).draw(scores, torch.tensor([i - 1]), torch.tensor([key])) == token
    if temperature == 0:
        assert got != [c.tokens for c in llm.generate(prompts, 12)]


def test_a_penalty_counts_the_question_and_earlier_turns(llm):
    penalty = Sampling(repetition_penalty=1.3)
    whole = llm.generate([llm.encode("import os") + llm.tokenizer.encode(" as x", bos=False)], 6, penalty)[0].tokens
    assert llm.generate("import os", 6, penalty, questions=" as x")[0].tokens == whole
    talk = llm.conversation(penalty)
    first = talk.say("import os", 4).tokens
    ids = llm.encode("import os") + first + llm.tokenizer.encode("\ndef f", bos=False)
    assert talk.say("def f", 4).tokens == llm.generate([ids], 4, penalty)[0].tokens


# ---- stop strings ----


def test_a_stop_string_ends_each_row_and_is_not_shown(llm):
    prompts = ["import os\n", "def f(x):\n    return", "class A:"]
    free = [c.text for c in llm.generate(prompts, 24)]
    stop = [free[0][7:10], free[1][3:5]]
    shown: dict[int, str] = {}
    got = llm.generate(prompts, 24, stop=stop, on_text=lambda r, piece: shown.update({r: shown.get(r, "") + piece}))
    for row, (c, whole) in enumerate(zip(got, free, strict=True)):
        ends = [whole.find(s) for s in stop if s in whole]
        assert c.text == shown[row] == whole[: min(ends, default=None)]
        assert any(s in llm.tokenizer.decode(c.tokens) for s in stop) == bool(ends)  # no token was drawn beyond
        assert not ends or not any(s in llm.tokenizer.decode(c.tokens[:-1]) for s in stop)
    assert "".join(llm.stream(prompts[0], 24, stop=stop)) == got[0].text
    assert llm.generate(prompts[0], 24, stop=stop[0])[0].text == free[0][: free[0].find(stop[0])]


def test_what_may_become_a_stop_string_waits():
    class Pieces:
        invalid_bytes, strips_all_leading = "replace", False
        piece = first_piece = staticmethod(str.encode)

    def pieces(stop, *said):
        text = Stream(Pieces(), stop)
        return [*map(text.put, said), text.flush()]

    assert pieces(["END"], "a", "E", "N", "x", "EN", "D", "b") == ["a", "", "", "ENx", "", "", "", ""]
    assert pieces(["END"], "aEN") == ["a", "EN"]
    assert pieces(["bc", "abcd"], "xabcd") == ["xa", ""]  # the first that is whole
    assert pieces(["aab"], "aa", "a", "b") == ["", "a", "", ""]


def test_a_conversation_goes_on_after_a_stop_string(llm):
    free = llm.conversation().say("import os", 12).text
    talk = llm.conversation(stop=free[4:6])
    assert talk.say("import os", 12).text == free[: free.find(free[4:6])]
    ids = list(talk.tokens) + llm.tokenizer.encode("\ndef f", bos=False)
    assert talk.say("def f", 4).tokens[:1] == llm.generate([ids], 1)[0].tokens


@pytest.mark.parametrize("stop", ["", ["a", ""], None, 3, [3]], ids=str)
def test_bad_stop_strings(llm, stop):
    with pytest.raises(InputError, match="--stop is .*: give a text, or a list of texts, that are not empty"):
        llm.generate("a", 3, stop=stop)


@pytest.mark.parametrize("bad", [dict(min_p=1.5), dict(min_p=-0.1), dict(repetition_penalty=0.0),
                                 dict(repetition_penalty=float("nan")), dict(min_p="x")], ids=str)  # fmt: skip
def test_bad_values(bad):
    with pytest.raises(dataclasses.FrozenInstanceError):  # a compiled step holds it
        Sampling().temperature = 0.5
    (name,) = bad
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} "):
        Sampling(**bad)


@pytest.mark.parametrize("cut", [dict(top_k=5), dict(top_p=0.5), dict(min_p=0.1)], ids=str)
def test_a_cut_at_temperature_0_does_nothing(cut):
    with pytest.raises(InputError, match=f"{min(cut).replace('_', '-')} is for sampling"):
        Sampling(**cut)
