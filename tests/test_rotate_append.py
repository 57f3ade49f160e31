"""One token's rotation and append: the kernel, interpreted or native on a GPU, gives torch's bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope import Rope, RopeArgs
from kernels.rotate_append import rotate_append, rotate_token
from scripts.contract.harness import prompt, run, tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAN = float("nan")


@st.composite
def cases(draw):
    return dict(
        seed=draw(st.integers(0, 2**31 - 1)), B=draw(st.integers(1, 3)), H=draw(st.integers(1, 3)),
        G=draw(st.sampled_from((1, 3, 4, 7))), D=draw(st.sampled_from((4, 6, 10, 64, 80, 128))),
        T=draw(st.integers(1, 40)), type=draw(st.sampled_from(("default", "dynamic"))),
        dtype=draw(st.sampled_from(DTYPES)), spare=draw(st.integers(0, 2)),
    )  # fmt: skip


def tensors(case):
    """The rotation's tables, q, k and v as views of one projection, positions, and caches of NaN."""
    seed, B, H, G, D, T, dtype, spare = (case[x] for x in ("seed", "B", "H", "G", "D", "T", "dtype", "spare"))
    gen = torch.Generator().manual_seed(seed)
    rope = Rope(RopeArgs(type=case["type"], factor=2.0), D, max(1, T // 3), B + spare, T, DEVICE)
    rope.set_prompt(torch.randint(1, T + 1, (B,), generator=gen))  # dynamic: every row has angles of its own
    qkv = torch.randn(B, (G + 2) * H, D, generator=gen).to(DEVICE, dtype)
    q, k, v = qkv.split((G * H, H, H), 1)
    pos = torch.randint(0, T, (B,), generator=gen).to(DEVICE)
    caches = [torch.full((B + spare, H, T, D), NAN, device=DEVICE, dtype=dtype) for _ in range(2)]
    return rope, q, k, v, pos, caches


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_kernel_gives_torchs_bits(case):
    rope, q, k, v, pos, caches = tensors(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_FAST_BACKEND", "torch")
        wanted, stored = [x.clone() for x in caches], rope.rotate(k, pos)
        turned = rotate_append(q, k, v, rope.cos, rope.sin, pos, *wanted)
        patch.setenv("KV_FAST_BACKEND", "triton")
        got = rotate_append(q, k, v, rope.cos, rope.sin, pos, *caches)
        assert torch.equal(got, turned) and torch.equal(got, rope.rotate(q, pos))
        both = rotate_token(q, k, rope.cos, rope.sin, pos)
        assert all(torch.equal(x, y) for x, y in zip(both, (turned, stored), strict=True))
    for cache, new, also in zip(caches, (stored, v), wanted, strict=True):
        row = torch.arange(len(pos), device=DEVICE)
        assert torch.equal(cache[row, :, pos], new)
        cache[row, :, pos] = NAN
        assert cache.isnan().all(), "no other slot is written"
        also[row, :, pos] = NAN
        assert also.isnan().all()


def test_a_subclass_with_an_append_of_its_own_still_gets_the_rotated_key(monkeypatch):
    """quest's bounds are of rotated keys; full never calls `append`. Both give what torch gives."""
    for name in ("full", "quest"):
        out = []
        for backend in ("torch", "triton"):
            monkeypatch.setenv("KV_FAST_BACKEND", backend)
            model = tiny(2, 32)
            model.setup_cache(name, 2, 40)
            model = model.to(DEVICE)
            calls = []
            for method in model.cache:
                append = method.append
                monkeypatch.setattr(
                    method, "append", lambda *args, f=append, calls=calls: (calls.append(1), f(*args))[1]
                )
            out.append(run(model, [prompt(9), prompt(5)], 3))
            assert bool(calls) == (name == "quest")
        (a, _), (b, _) = (o[:2] for o in out)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
