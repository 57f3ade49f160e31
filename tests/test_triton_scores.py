"""Score and label kernels against float64 oracles and their torch versions, interpreted without a GPU, and compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import label_score as module
from kernels.label_score import label_score, quantize_labels, store_labels
from kernels.latent_score import _latent_score_triton, latent_score

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rand(seed, *size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def f64(x):
    return x.detach().double().cpu().numpy()


@st.composite
def positions(draw, B, T):
    """None, or the last slot that matters of each row: none, any, all."""
    return draw(st.none() | st.lists(st.integers(-2, T - 1), min_size=B, max_size=B))


def close(got, want, size, pos):
    """got as the float64 `want` up to rounding in fp32 of terms that sum to `size` in magnitude; slots up to pos."""
    assert got.shape == want.shape and got.dtype == torch.float32 and got.stride(-2) % 16 == 0
    held = np.ones(want.shape, bool)
    if pos is not None:
        held &= np.arange(want.shape[-1]) <= np.array(pos).reshape(-1, *[1] * (want.ndim - 1))
    error = np.abs(f64(got) - want)[held]
    assert (error <= 2e-6 * size[held]).all(), f"off by {error.max()} of {size[held].max()}"


def beyond(pos, T):
    """[B, T], true for slots past pos [B]."""
    return torch.arange(T, device=DEVICE) > torch.tensor(pos, device=DEVICE)[:, None]


# ---- scores from coordinates ----


@st.composite
def latents(draw):
    B, T = draw(st.integers(1, 2)), draw(st.integers(1, 70))
    return dict(
        seed=draw(st.integers(0, 2**31 - 2)), B=B, H=draw(st.integers(1, 2)), T=T,
        C=draw(st.sampled_from((1, 1, 3, 8, 33))), r=draw(st.integers(1, 200)), dtype=draw(st.sampled_from(DTYPES)),
        pos=draw(positions(B, T)), block=draw(st.sampled_from((16, 64))),
    )  # fmt: skip


def check_latent_score(seed, B, H, T, C, r, dtype, pos, block):
    q, x = rand(seed, B, H, C, r, dtype=dtype), rand(seed + 1, B + 1, H, T, r + 5, dtype=dtype)[..., :r]
    want = f64(q) @ f64(x[:B]).swapaxes(2, 3)
    size = np.abs(f64(q)) @ np.abs(f64(x[:B])).swapaxes(2, 3)
    x[B] = NAN  # a row beyond the batch, and slots that were not filled
    if pos is not None:
        x[:B].masked_fill_(beyond(pos, T)[:, None, :, None], NAN)
    at = None if pos is None else torch.tensor(pos, device=DEVICE)
    close(_latent_score_triton(q, x, at, block), want, size, pos)


@settings(max_examples=12, deadline=None)
@given(latents())
def test_latent_score(problem):
    check_latent_score(**problem)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(latents())
def test_latent_score_many(problem):
    check_latent_score(**problem)


@pytest.mark.parametrize(("C", "dtypes"), [(1, DTYPES[:2]), (4, DTYPES[:1] * 2)])
def test_latent_score_through_the_operator(monkeypatch, C, dtypes):
    """One query may be of another dtype than the latents; layouts are those of methods."""
    q, x = rand(0, C, 2, 24, dtype=dtypes[0]).transpose(0, 1), rand(1, 3, 21, 24, dtype=dtypes[1])
    want = f64(q) @ f64(x[:2]).swapaxes(1, 2)
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")
    close(latent_score(q, x), want, np.abs(f64(q)) @ np.abs(f64(x[:2])).swapaxes(1, 2), None)


# ---- scores from labels ----


def decoded(labels, params, bits):
    """float64 [..., r] that uint8 [..., r * bits / 8] and fp16 [..., 2] stand for, digit by digit."""
    packed, (scale, zero) = labels.cpu().numpy().astype(np.int64), np.moveaxis(f64(params), -1, 0)
    digits = [packed // 2 ** (bits * i) % 2**bits for i in range(8 // bits)]
    codes = np.stack(digits, -1).reshape(*packed.shape[:-1], -1)
    return scale[..., None] * codes + zero[..., None], np.abs(scale)[..., None] * codes + np.abs(zero)[..., None]


@st.composite
def scored(draw):
    B, T, bits = draw(st.integers(1, 2)), draw(st.integers(1, 70)), draw(st.sampled_from((2, 4)))
    return dict(
        seed=draw(st.integers(0, 2**31 - 2)), B=B, H=draw(st.integers(1, 2)), T=T, bits=bits,
        r=8 // bits * draw(st.integers(1, 20)), pos=draw(positions(B, T)), size=draw(st.sampled_from((1.0, 1e-9, 1e6))),
    )  # fmt: skip


def check_label_score(seed, B, H, T, bits, r, pos, size):
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(256, (B + 1, H, T, r * bits // 8), generator=gen, dtype=torch.uint8).to(DEVICE)
    params, q = rand(seed, B + 1, H, T, 2, dtype=torch.float16), size * rand(seed + 1, B, H, r)
    x, magnitude = decoded(labels[:B], params[:B], bits)
    want, most = (x @ f64(q)[..., None])[..., 0], (magnitude @ np.abs(f64(q))[..., None])[..., 0]
    params[B] = NAN
    if pos is not None:
        params[:B].masked_fill_(beyond(pos, T)[:, None, :, None], NAN)
    at = None if pos is None else torch.tensor(pos, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCORED", 32)
        close(module._label_score_triton(q, labels[:B], params[:B], bits, at), want, most, pos)


@settings(max_examples=12, deadline=None)
@given(scored())
def test_label_score(problem):
    check_label_score(**problem)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(scored())
def test_label_score_many(problem):
    check_label_score(**problem)


@pytest.mark.parametrize("r", (32, 6))
def test_label_score_at_the_block_of_launches(r):
    check_label_score(seed=r, B=1, H=2, T=700, bits=4, r=r, pos=[650], size=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_labels_of_16_bits(monkeypatch, dtype):
    """As they are: the scores are those of `latent_score`."""
    q, x = rand(0, 2, 2, 24), rand(1, 2, 2, 21, 24, dtype=dtype)
    want, most = ((m(f64(x)) @ m(f64(q))[..., None])[..., 0] for m in (np.positive, np.abs))
    pos = [20, 7]
    x.masked_fill_(beyond(pos, 21)[:, None, :, None], NAN)
    monkeypatch.setenv("KV_FAST_BACKEND", "triton")
    close(label_score(q, x, None, 16, torch.tensor(pos, device=DEVICE)), want, most, pos)


# ---- labels ----


@st.composite
def stored(draw):
    B, bits = draw(st.integers(1, 2)), draw(st.sampled_from((2, 4)))
    D = draw(st.sampled_from((32, 64, 96, 128)))
    S = draw(st.integers(1, 40))
    return dict(
        seed=draw(st.integers(0, 2**31 - 2)), B=B, H=draw(st.integers(1, 2)), S=S, D=D, bits=bits,
        r=8 // bits * draw(st.integers(1, D * bits // 8)), dtype=draw(st.sampled_from(DTYPES)),
        start=draw(st.none() | st.lists(st.integers(0, 45 - S), min_size=B, max_size=B)),
        odd=draw(st.sampled_from(("no", "constant", "large", "tiny"))),
    )  # fmt: skip


def check_store_labels(seed, B, H, S, D, bits, r, dtype, start, odd):
    """Bytes are those of torch, slots that are not meant stay, and what is stored is next to the key."""
    gen = torch.Generator().manual_seed(seed)
    k = 3 * rand(seed, B, S, H, D).transpose(1, 2) + rand(seed + 1, B, H, 1, 1)  # the layout of a projection
    if odd == "constant":
        k[:, :, ::2] = 0.7  # the scale of such a token is 0
    elif odd == "large" and dtype != torch.float16:
        k[:, :, ::2] *= 1e5  # beyond fp16: parameters saturate
    elif odd == "tiny":
        k *= 1e-6  # scales are subnormal in fp16
    k = k.to(dtype)
    channels = torch.stack([torch.randperm(D, generator=gen)[:r] for _ in range(H)]).to(DEVICE)
    labels = torch.full((B + 1, H, 45, r * bits // 8), 77, dtype=torch.uint8, device=DEVICE)
    params = torch.full((B + 1, H, 45, 2), 7.0, dtype=torch.float16, device=DEVICE)
    at = None if start is None else torch.tensor(start, device=DEVICE)
    torch.ops.kv_fast.store_labels(k, channels, at, labels, params, bits)

    want_labels, want_params = torch.full_like(labels, 77).cpu(), torch.full_like(params, 7.0).cpu()
    for b in range(B):
        slots = slice(0, S) if start is None else slice(start[b], start[b] + S)
        for h in range(H):
            # on the CPU: on a GPU torch divides by a number by multiplying with its inverse
            want_labels[b, h, slots], want_params[b, h, slots] = quantize_labels(k[b, h][:, channels[h]].cpu(), bits)
            x = f64(k[b, h][:, channels[h]])
            kept, _ = decoded(labels[b, h, slots], params[b, h, slots], bits)
            if odd != "large":
                step = np.ptp(x, axis=-1) / (2**bits - 1)
                # half a step, and the rounding of zero and scale to fp16
                bound = 0.5 * step + 2**-10 * (np.abs(x).max(-1) + step * 2**bits) + 2**-24 * 2**bits
                assert (np.abs(kept - x) <= bound[:, None]).all()
    assert torch.equal(labels.cpu(), want_labels) and torch.equal(params.cpu(), want_params)


@settings(max_examples=12, deadline=None)
@given(stored())
def test_store_labels(problem):
    check_store_labels(**problem)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(stored())
def test_store_labels_many(problem):
    check_store_labels(**problem)


def test_codes_on_the_border_go_to_the_even_one():
    """0 to 15 in steps of 0.5 with scale 1: torch rounds halves to even."""
    k = torch.tensor([0.0, 15.0, *(i + 0.5 for i in range(14))], device=DEVICE)[None, None, None]
    labels, params = torch.zeros(1, 1, 1, 8, dtype=torch.uint8, device=DEVICE), torch.zeros(1, 1, 1, 2, device=DEVICE)
    params = params.half()
    torch.ops.kv_fast.store_labels(k, torch.arange(16, device=DEVICE)[None], None, labels, params, 4)
    kept, _ = decoded(labels, params, 4)
    assert kept[0, 0, 0].tolist() == [0.0, 15.0, *(float(round(i + 0.5)) for i in range(14))]


def test_both_versions_store_and_score_the_same(monkeypatch):
    """Through the public functions, a prompt and a token after it."""
    k, q, channels = rand(0, 2, 2, 20, 32), rand(1, 2, 2, 8), torch.stack([torch.randperm(32)[:8] for _ in range(2)])
    channels, pos, results = channels.to(DEVICE), torch.tensor([19, 12], device=DEVICE), []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("KV_FAST_BACKEND", backend)
        labels = torch.zeros(3, 2, 24, 4, dtype=torch.uint8, device=DEVICE)
        params = torch.zeros(3, 2, 24, 2, dtype=torch.float16, device=DEVICE)
        store_labels(k[:, :, :19], channels, None, labels, params, 4)
        store_labels(k[:, :, 19:], channels, pos, labels, params, 4)
        results.append((labels, params, label_score(q, labels[:2], params[:2], 4, pos)))
    (labels, params, score), (labels2, params2, score2) = results
    assert torch.equal(labels, labels2) and torch.equal(params, params2)
    held = ~beyond([19, 12], 24)[:, None].expand_as(score)
    torch.testing.assert_close(score[held], score2[held], atol=1e-5, rtol=1e-5)


# ---- operators, ahead of time ----


def test_operators_are_registered_right():
    """Schemas tell what is written, and a compiled graph expects what the kernels return."""
    n = dict(device=DEVICE)
    labels, params = quantize_labels(rand(1, 2, 2, 10, 8), 4)
    channels = torch.stack([torch.randperm(16)[:8] for _ in range(2)]).to(DEVICE)
    ops = torch.ops.kv_fast
    for op, args in (
        (ops.head_scores.default, (rand(0, 2, 1, 1, 8), rand(1, 2, 1, 10, 8), None)),
        (ops.label_score.default, (rand(0, 2, 2, 8), labels, params, 4, None)),
        (ops.store_labels.default, (rand(0, 2, 2, 3, 16), channels, torch.tensor([0, 4], **n), labels, params, 4)),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
