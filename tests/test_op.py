"""What a declaration gives: which version runs, the operator's schema, and the bytes that a step reads."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from cache.base import connected
from cache.grammar import method_files
from cache.spec import make_args, resolve
from kernels import backend
from kernels.gather_attention import gather_attention
from kernels.op import OPERATIONS, bytes_read, operation
from kernels.splits import empty_scores
from kv_methods.full import Full
from loading.named import named_args
from model import ModelArgs, Transformer

LLAMA = named_args("llama-3.1-8b")


def on_meta(cls, knobs, batch, T):
    shape = LLAMA.cache_shape(2, batch, T, torch.bfloat16, "cpu").on("meta")
    return connected([cls(make_args(cls, knobs), shape, 2, LLAMA.rotary(batch, 1, "meta"), None)])[0]


def read_by(method, B):
    s = method.shape
    q, k, v = (torch.empty(B, n, s.head_dim, dtype=s.dtype, device="meta") for n in (s.n_head, *[s.n_kv_head] * 2))
    pos = torch.empty(B, dtype=torch.int64, device="meta")
    read = bytes_read(lambda: method.decode(q, k, v, pos), method.buffers())
    return read + bytes_read(lambda: method.maintain(MAINTAINED), method.buffers()) / MAINTAINED


MAINTAINED = 96  # steps until all that methods maintain is due
# Lengths are numbers, which `meta` has not: caches count as full, and so these read more than at the end of a prompt
ROOM = {"self_index": "a ring of decoded tokens", "snapkv": "slots of decoded tokens", "pyramidkv": "the same",
        "expected_attention": "the same", "kvzip": "the same", "rkv": "a buffer of decoded tokens",
        "rocket": "the same as snapkv", "compactor": "the same",
        "attention_matching": "the same", "lagkv": "a window of decoded tokens",
        "triattention": "a buffer of decoded tokens"}  # fmt: skip
MORE = {"hshare": (2.3, "`meta` scores in every step, layer and head: `traffic` is the mean of them")}
AHEAD = {"double_sparsity_offload": "tokens are fetched by `prefetch`, before the step"}


@pytest.mark.parametrize("name", sorted(method_files().keys() - ROOM.keys() - AHEAD.keys()))
def test_a_step_reads_what_its_method_tells(name):
    """By operations, at the end of a text, against `traffic`: no less, and a twentieth more at most."""
    method = on_meta(*resolve(name), 8, 4096)
    assert 1 <= read_by(method, 8) / method.traffic(4095) < MORE.get(name, (1.05,))[0]


class Rereads(Full):
    """Tells what `Full` does, and takes all keys a second time, in an operation of torch."""

    def attend(self, q, idx, count, pos):
        return super().attend(q, idx, count, pos) + self.k.sum(2).mean(1, keepdim=True)


class Gathers(Full):
    """Takes some of them."""

    def attend(self, q, idx, count, pos):
        return super().attend(q, idx, count, pos) + self.k[:, :, pos].sum()


class Channels(Full):
    """Takes one channel of each, which a list names that is expanded to all keys."""

    def __init__(self, *args):
        super().__init__(*args)
        self.channels = self.constant("channels", (self.shape.n_kv_head, 1), None, torch.int64)

    def attend(self, q, idx, count, pos):
        at = self.channels[None, :, None].expand(len(q), -1, self.k.shape[2], -1)
        return super().attend(q, idx, count, pos) + self.k.gather(3, at).sum()


@pytest.mark.parametrize("cls, more", [(Full, 0), (Rereads, 4096), (Gathers, 8), (Channels, 4096 / 128 + 1 / 256)])
def test_a_method_that_reads_more_than_it_says_is_seen(cls, more):
    """In keys of every row and head."""
    method = on_meta(cls, {}, 8, 4096)
    assert read_by(method, 8) == method.traffic(4095) + more * 8 * 8 * 128 * 2


def test_bytes_of_a_token_are_the_papers():
    """16 bytes a token and head are looked up (Self-Indexing KVCache), 77 of 128 coordinates attended to (OjaKV)."""
    empty = lambda *size, dtype=torch.bfloat16: torch.empty(size, dtype=dtype, device="meta")  # noqa: E731
    q, pos = empty(2, 32, 128), empty(2, dtype=torch.int64)
    codes, book = empty(2, 8, 1000, 16, dtype=torch.uint8), empty(2, 8, 32, 16, 4, dtype=torch.float32)
    assert OPERATIONS["lut_score"].reads(q, book, codes, pos, None)["packed"] == 2 * 8 * 1000 * 16
    read = OPERATIONS["lowrank_attention"].reads(q, *[empty(2, 8, 1000, 77)] * 2, *[empty(2, 8, 128, 77)] * 2, pos)
    assert read["k_lat"] + read["v_lat"] == 2 * 8 * 1000 * 2 * 77 * 2
    ring = empty(2, 64, 512), empty(2, 64, 1024, dtype=torch.uint8), empty(2, 64, 32, 2, dtype=torch.float16)
    store = empty(2, 1000, 128), empty(2, 1000, 128), empty(2, 1000, 512, dtype=torch.uint8), empty(2, 1000, 32, 2)
    read = OPERATIONS["latent_attention"].reads(q, empty(512, 1024), *ring, *store, pos, None, None)
    assert sum(read[name] for name in ("lead", "rest", "v", "params")) == 2 * 1000 * 8 * 144  # sals-25, a KV head
    few = OPERATIONS["latent_attention"].reads(q, empty(512, 1024), *ring, *store, pos, empty(2, 100), None)
    assert sum(few[name] for name in ("lead", "rest", "v", "params")) == 2 * 100 * 8 * 144


def test_one_list_for_all_heads_is_as_many_rows():
    q, k = torch.empty(2, 8, 64), torch.empty(3, 4, 100, 64)
    for heads in (1, 4):
        idx = torch.empty(2, heads, 10, dtype=torch.int64)
        assert gather_attention.reads(q, k, k, idx, idx[..., 0])["k"] == 2 * 4 * 10 * 64 * 4


@pytest.mark.cpp
@pytest.mark.parametrize("method, most", [("full", 130), ("double_sparsity", 175), ("self_index", 165), ("kivi", 180)])
def test_a_layer_of_an_eager_step_takes_few_python_calls(method, most):
    """Which version runs is decided once: half of a layer's calls were that choice, made again by every operation."""
    calls = {n: python_calls(method, n) for n in (2, 3)}
    assert calls[3] - calls[2] < most


def python_calls(method, n_layer):
    model = Transformer(ModelArgs(dim=64, n_layer=n_layer, n_head=2, n_kv_head=1, ffn_dim=64, vocab_size=32))
    model.setup_cache(method, 2, 64)  # two rows: on Intel, torch multiplies one row in fp32 by itself
    token, pos, count = torch.tensor([1, 1]), torch.tensor([40, 40]), Counter()
    model.prefill(torch.arange(40).expand(2, -1) % 32, pos)
    model.decode(token, pos)
    sys.setprofile(lambda frame, event, arg: count.update([event]))
    model.decode(token, pos)
    sys.setprofile(None)
    return count["call"]


def test_what_takes_a_broken_kernels_place_lies_as_it_did(monkeypatch):
    """A compiled graph relies on the strides of what an operator returns."""

    @operation(fake=lambda x: empty_scores(*x.shape, device=x.device))
    def toy_scores(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @toy_scores.triton
    def launch(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("it cannot be launched")

    monkeypatch.setattr(backend, "BACKEND", "triton")
    monkeypatch.setattr(backend, "FALL_BACK", True)
    for T in (5, 5, 16):
        out = toy_scores.op(torch.ones(2, 3, T))
        assert (out == 2).all() and out.stride() == (48, 16, 1)
