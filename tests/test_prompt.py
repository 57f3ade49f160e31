"""Prompts in chunks, evicted from while they are read, scored before rotation, and read a second time."""

from __future__ import annotations

import pytest
import torch

import generate
from cache.base import connected
from cache.evicting import Evicting
from cache.prompt import Text
from engine import LLM
from kernels.dense_attention import prefill_attention
from model import ModelArgs
from runtime.errors import InputError
from scripts.contract.harness import prompt, run, teacher, tiny
from scripts.contract.reference import forward

H, G, D, T = 2, 2, 32, 96


def made(cls, args=None, T=T, batch=1):
    """One layer of a class that is in no file."""
    sizes = ModelArgs(n_head=G * H, n_kv_head=H, head_dim=D, n_layer=1)
    shape = sizes.cache_shape(0, batch, T, torch.float32, "cpu")
    return connected([cls(args or cls.Args(), shape, 0, sizes.rotary(batch, T))])[0]


def tensors(n, batch=1):
    return torch.randn(batch, G * H, n, D), *torch.randn(2, batch, H, n, D)


# ---- attention ----


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("n", [1, 7, 50])
def test_a_chunk_is_the_end_of_the_whole(window, n):
    (q, k, v), lengths = tensors(50, 3), torch.tensor([50, 44, 12])
    want = prefill_attention(q, k, v, window, lengths)
    got = prefill_attention(q[:, :, 50 - n :], k, v, window, lengths)
    for b, end in enumerate(lengths.tolist()):
        assert torch.allclose(got[b, :, : max(0, n - 50 + end)], want[b, :, 50 - n : end], atol=1e-5)


def test_what_a_query_sees():
    """Sinks and a window: the loop in float64."""
    q, k, v = tensors(30)
    got = prefill_attention(q, k, v, sees=lambda rows, cols: (cols < 3) | (cols > rows - 6))
    for t in range(30):
        at = sorted({*range(min(3, t + 1)), *range(max(0, t - 5), t + 1)})
        p = (q[0, :, t].double().view(H, G, D) @ k[0, :, at].double().mT * D**-0.5).softmax(-1)
        assert torch.allclose(got[0, :, t].double(), (p @ v[0, :, at].double()).flatten(0, 1), atol=1e-5)


# ---- chunks ----


@pytest.mark.parametrize("method", ["full", "streaming"])
def test_chunks_of_a_model_with_a_sliding_window(method):
    model, prompts = tiny(windows=(20, None)), [prompt(n) for n in (5, 21, 70)]
    model.setup_cache(method, 3, 100, **({} if method == "full" else dict(recent=1000)))
    got, fed = run(model, prompts, 10, chunk=16)
    assert torch.allclose(got, teacher(model, prompts, fed), atol=1e-4)


@pytest.mark.parametrize("method", ["ojakv", "razor,retrieval_method=ojakv,window=16"])
def test_who_needs_a_whole_prompt_refuses(method):
    llm = LLM(method=method, prefill_chunk=8)
    with pytest.raises(InputError, match="needs a whole prompt at a time: leave out --prefill-chunk, or give at least"):
        llm.generate("import os\nimport sys\nimport re\n", 4)
    assert llm.generate("import", 4)  # of fewer tokens than a chunk


def test_the_command_line(cli):
    texts = ["--prompt", "import os\nimport sys\nclass A", "def", "--max-new-tokens", 8, "--no-compile"]
    status, want, _ = cli(generate, *texts)
    assert status == 0 and cli(generate, *texts, "--prefill-chunk", 3)[:2] == (0, want)
    status, out, err = cli(generate, *texts, "--prefill-chunk", 0)
    assert status == 2 and not out and "--prefill-chunk" in err


# ---- eviction ----


class Reader(Evicting):
    lookback = 3
    evicts_while_reading = True


@pytest.mark.parametrize("chunk, n", [(8, 40), (5, 33), (40, 40)])
def test_eviction_while_reading_is_the_loop(chunk, n):
    """A chunk attends to what is kept and to itself; then stay the newest and what its last queries look at."""
    method, (q, k, v) = made(Reader, Reader.Args(budget=12, recent=4)), tensors(n)
    assert method.k.shape[2] == 12
    length, y = torch.tensor([n]), []
    method.begin_prompt(n)
    for start in range(0, n, chunk):
        y.append(method.prefill(*(x[:, :, start : start + chunk] for x in (q, k, v)), length, start))
    method.end_prompt(length)
    q_rot, k_rot, v = method.rope.rotate_prompt(q)[0].double(), method.rope.rotate_prompt(k)[0].double(), v[0].double()
    for h in range(H):
        kept: list[int] = []
        for start in range(0, n, chunk):
            end, mass = min(n, start + chunk), dict.fromkeys([*kept, *range(start, min(n, start + chunk))], 0.0)
            for t in range(start, end):
                at = [*kept, *range(start, t + 1)]
                p = (q_rot[h * G : h * G + G, t] @ k_rot[h, at].T * D**-0.5).softmax(-1)
                got = torch.cat(y, 2)[0, h * G : h * G + G, t].double()
                assert torch.allclose(got, p @ v[h, at], atol=1e-5)
                if t >= end - 3:
                    mass |= {j: mass[j] + float(w) for j, w in zip(at, p.sum(0), strict=True)}
            newest = list(range(max(0, end - 4), end))
            older = sorted((j for j in mass if j not in newest), key=lambda j: -mass[j])
            kept = sorted(older[: 12 - len(newest)] + newest)
        assert sorted(method.place[0, h, : int(method.filled[0])].tolist()) == kept


def test_scores_before_rotation_and_without_attention():
    seen = {}

    class Mine(Evicting):
        lookback, scores_pre_rope, evicts_while_reading = 0, True, True

        def prompt_scores(self, q, k, v, mass, lengths):
            seen.update(q=q, k=k, mass=mass)
            return k.norm(dim=-1)

    method, (q, k, v) = made(Mine, Mine.Args(budget=12, recent=4)), tensors(40)
    method.prefill(q, k, v, torch.tensor([40]))
    assert torch.equal(seen["q"], q) and torch.equal(seen["k"], k) and not seen["mass"].numel()
    at = method.place[:, :, :12].long()
    for h in range(H):
        best = k[0, h, :36].norm(dim=-1).topk(8).indices.tolist()
        assert sorted(at[0, h].tolist()) == sorted([*best, *range(36, 40)])
        assert torch.equal(method.k[0, h, :12], method.rope.rotate_prompt(k)[0, h, at[0, h]])
    with pytest.raises(InputError, match="cannot score them while reading"):
        method.begin_prompt(40)


# ---- a second pass ----


class Twice(Evicting):
    lookback = 0

    def second_pass(self, tokens, lengths, encode):
        ask = torch.tensor(encode("again")).expand(len(tokens), -1)
        return [Text(torch.cat((ask, tokens[:, s : s + 16]), 1), (lengths - s).clamp(0, 16) + 2) for s in (0, 16)]

    def reread(self, q, k, v, lengths, text):
        self.looks.append((q, k, self.prompt.k_rot, lengths, text))
        return super().reread(q, k, v, lengths, text)

    def prompt_scores(self, q, k, v, mass, lengths):
        return torch.zeros(k.shape[:3])


@pytest.mark.parametrize("chunk", [None, 10])
def test_a_second_pass_reads_what_a_longer_text_would(chunk, monkeypatch):
    """A text behind the prompt is teacher forcing over both, by its queries and keys in every layer."""
    model, prompts = tiny(), [prompt(30), prompt(21)]
    model.setup_cache("full", 2, 40)
    want = run(model, prompts, 0, chunk=chunk)[0]
    model.cache = torch.nn.ModuleList(
        connected(
            Twice(Twice.Args(), model.args.cache_shape(i, 2, 40, torch.float32), i, model.cache[0].rope) for i in (0, 1)
        )
    )
    monkeypatch.setattr(model, "encode", lambda text: [5, 6], raising=False)
    for method in model.cache:
        method.looks = []
    assert torch.allclose(run(model, prompts, 0, chunk=chunk)[0], want, atol=1e-5)
    for b, p in enumerate(prompts):
        for i in (0, 1):
            behind = torch.cat((torch.tensor([5, 6]), p[16 * i : 16 * i + 16]))
            told = []
            forward(model, torch.cat((p, behind))[None], told.append)
            for layer, method in enumerate(model.cache):
                q, k, k_prompt, lengths, text = method.looks[i]
                n, m = len(p), len(behind)
                assert lengths.tolist() == [30, 21] and int(text.lengths[b]) == m
                assert torch.allclose(q[b, :, :m].transpose(0, 1), told[layer].q_rot[n:], atol=1e-4)
                assert torch.allclose(k[b, :, :m].transpose(0, 1), told[layer].k_rot[n:], atol=1e-4)
                assert torch.allclose(k_prompt[b, :, :n].transpose(0, 1), told[layer].k_rot[:n], atol=1e-4)


def test_palu_holds_nothing_to_read_again():
    model = tiny()
    model.setup_cache("palu", 1, 40)
    model.cache[0].second_pass = lambda tokens, lengths, encode: [Text(tokens, lengths)]
    with pytest.raises(InputError, match="has no prompt to read a second time"):
        run(model, [prompt(20)], 0)
