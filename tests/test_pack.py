"""Small files of saved caches: what is rounded, by how much, and what is not."""

import pytest
import torch

import generate
from engine import LLM, pack
from engine.snapshot import CacheFile, buffers_of
from runtime.errors import InputError
from runtime.machine import TINY

LENGTHS = (400, 150, 133, 132, 7)


@pytest.fixture
def read():
    """Ragged prompts in a cache of this method -> the LLM."""

    def make(method):
        llm = LLM(TINY, method=method, compile=False)
        gen = torch.Generator().manual_seed(0)
        llm.read([torch.randint(5, 2000, (n,), generator=gen).tolist() for n in LENGTHS], 8)
        return llm

    return make


def buffers(llm):
    return {f"{name}.{b}": x.clone() for name, m in llm.model.cache.named_modules() for b, x in buffers_of(m).items()}


def rotated_back(x):
    """Keys [H, n, D] before rotation, from position 0 on; theta of models/tiny."""
    half = x.shape[-1] // 2
    freq = LLM(TINY).model.args.rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(*x.double().chunk(2, -1)) * torch.exp(-1j * torch.arange(x.shape[1])[:, None] * freq)
    return torch.cat((z.real, z.imag), -1)


def test_dense_keys_and_values_are_rounded_to_a_step(read, tmp_path, step=0.5):
    llm, file = read("full"), tmp_path / "small.cache"
    llm.save(file, step)
    was = buffers(llm)
    for _ in range(2):  # in this cache, and in a larger one
        llm.restore(file, 8)
        now = buffers(llm)
        for name in ("0.k", "3.v"):
            spread, worst = [], 0.0
            for b, n in enumerate(LENGTHS):
                x, y = (t[name][b, :, :n] for t in (was, now))
                assert torch.equal(x[:, :4], y[:, :4]) and torch.equal(x[:, -128:], y[:, -128:])
                if name == "0.k":
                    x, y = (rotated_back(t) for t in (x, y))
                spread.append(x[:, 4 : max(4, n - 128)].double())
                worst = max(worst, (x.double() - y).norm(dim=-1).max().item())
            middle = torch.cat(spread, 1)
            deviation = (middle - middle.mean(1, keepdim=True)).square().mean().sqrt().item()
            # each of a token's D coordinates, of a head or of all, is off by half a step at most
            most = step / 2 * deviation * (middle.shape[-1] * (len(middle) if name == "0.k" else 1)) ** 0.5
            assert most / 4 < worst < 1.1 * most
        llm.max_seq_len = 600
        llm.use("full")
    plain = tmp_path / "plain.cache"
    llm.max_seq_len = None
    read("full").save(plain)
    assert file.stat().st_size < 0.35 * plain.stat().st_size  # a third of the tokens is exact


def test_a_smaller_step_rounds_less(read, tmp_path):
    """Down to the 15 bits of a code: the largest coordinates are not cut off."""
    llm, worst = read("full"), []
    was = buffers(llm)
    for step in (0.1, 0.01, 1e-3, 1e-4):
        llm.save(tmp_path / "small.cache", step)
        llm.restore(tmp_path / "small.cache", 8)
        now = buffers(llm)
        worst.append(max((now[f"0.{x}"] - was[f"0.{x}"])[0, :, : LENGTHS[0]].norm() for x in "kv"))
        for name, x in was.items():
            llm.model.cache.get_buffer(name).copy_(x)
    assert worst[1] < worst[0] / 5 and worst[2] < worst[1] / 5 and worst[3] <= worst[2]


@pytest.mark.parametrize("method", ["self_index", "kivi", "0:full,1-:h2o", "razor,window=40", "lagkv"])
def test_other_buffers_are_coded_without_loss(read, tmp_path, method):
    llm, file, plain = read(method), tmp_path / "small.cache", tmp_path / "plain.cache"
    llm.save(file, 1e-4), llm.save(plain)
    llm.restore(plain, 8)
    was = buffers(llm)
    llm.restore(file, 8)
    rounded = {name for name, x in buffers(llm).items() if not torch.equal(x, was[name])}
    assert rounded == ({"0.k", "0.v"} if "full" in method else set())
    assert file.stat().st_size < plain.stat().st_size


def test_the_command_line(cli, tmp_path):
    file, prompt = tmp_path / "small.cache", "import os\n" * 60
    first = cli(generate, "--prompt", prompt, "--max-new-tokens", 8, "--save-cache", file, "--pack", 0.01)
    again = cli(generate, "--load-cache", file, "--max-new-tokens", 8)
    assert first[0] == again[0] == 0 and first[1] == again[1]
    saved = CacheFile(file)
    saved.meta["packed"]["calibration"] = "another"
    llm = LLM(TINY)
    with pytest.raises(InputError, match="was packed with another calibration"):
        saved.unpack(llm.model.cache, llm.model.find_calibration())


@pytest.mark.parametrize("argv, says", [
    (("--pack",), "add --save-cache FILE"),
    (("--save-cache", "x", "--pack", "20"), "--pack 20.0 is above 10"),
])  # fmt: skip
def test_wrong_use(cli, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    status, _, err = cli(generate, "--prompt", "import os", "--max-new-tokens", 2, *argv)
    assert status == 2 and says in err and not list(tmp_path.iterdir())


def test_a_cut_part_is_one_line():
    with pytest.raises(InputError, match="is damaged"):
        pack.expanded(pack.compressed(torch.arange(100))[:-3], torch.int64)
