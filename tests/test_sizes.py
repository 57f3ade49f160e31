"""Sizes at the edges: caches of more elements than 32 bits count, more blocks than the second dimension of a grid may
have, and heads whose halves are less than what tensor cores multiply."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.jit import KernelInterface

from kernels import latent_attention
from kernels.channel_score import channel_score
from kernels.label_score import _label_score, _store_labels
from kernels.latent_score import head_scores
from kernels.page_score import page_score
from kernels.sign_codes import lut_score

H, T, D, FAR = 3, 16, 32, 2**30  # FAR: elements from a head to the next, so that the third begins at 2^31


def far(dtype, width):
    """[1, H, T, width] random numbers; the memory between heads is never touched, and so never taken."""
    memory = torch.empty((H - 1) * FAR + T * width, dtype=dtype)
    x = memory.as_strided((1, H, T, width), (H * FAR, FAR, width, 1))
    return x.copy_(torch.randint(0, 256, x.shape) if dtype == torch.uint8 else torch.randn(x.shape))


FAR_CASES = {
    "one query": lambda: (head_scores, torch.randn(1, H, 1, D), far(torch.float16, D), None),
    "queries": lambda: (head_scores, torch.randn(1, H, 2, D).half(), far(torch.float16, D), None),
    "labels": lambda: (
        _label_score, torch.randn(1, H, 8), far(torch.uint8, 4), torch.randn(1, H, T, 2).half(), 4, None),
    "signs": lambda: (lut_score, torch.randn(1, H, D), torch.randn(1, H, D // 4, 16, 4), far(torch.uint8, 4), None),
    "pages": lambda: (page_score, torch.randn(1, H, D), *2 * (far(torch.float16, D),), None),
}  # fmt: skip


@pytest.mark.parametrize("case", FAR_CASES)
def test_a_head_beyond_32_bits(case, monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "copy_", lambda *_: None)  # the interpreter would copy all onto itself
    operation, *args = FAR_CASES[case]()
    got, want = operation.launch(*args), operation.reference(*args)
    assert torch.allclose(got, want, atol=1e-2, rtol=1e-2), (got - want).abs().max()


N = 2**26  # slots
WIDE_CASES = {
    "one query": (head_scores, (1, 1, 1, 8), (1, 1, N, 8), None),
    "queries": (head_scores, (1, 1, 4, 8), (1, 1, N, 8), None),
    "labels": (_label_score, (1, 1, 8), (1, 1, N, 4), (1, 1, N, 2), 4, None),
    "labels of a prompt": (_store_labels, (1, 1, N, 8), (1, 8), None, (1, 1, N, 4), (1, 1, N, 2), 4),
    "pages": (page_score, (1, 1, 8), (1, 1, N, 8), (1, 1, N, 8), None),
    "channels": (channel_score, (1, 1, 4, 8), (1, 1, 8), (1, 1, 8, N), (1,)),
}


@pytest.mark.parametrize("case", WIDE_CASES)
def test_more_blocks_than_y_counts(case, monkeypatch):
    """65,535 of them: slots go into the first dimension of a grid, or programs take turns."""
    grids, kinds = [], dict(labels=torch.uint8, params=torch.float16, channels=torch.int64, pos=torch.int64)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda _, grid: lambda *_, **__: grids.append(grid))
    operation, *given = WIDE_CASES[case]
    operation.launch(*(
        torch.empty(x, dtype=kinds.get(name, torch.float32), device="meta") if isinstance(x, tuple) else x
        for (name, _), x in zip(operation.defaults, given, strict=True)
    ))  # fmt: skip
    assert grids and all(n <= 65535 for grid in grids for n in grid[1:]), grids


def test_halves_of_small_heads_are_padded():
    """Keys of 16 channels are multiplied by halves, and a product has at least 16 channels. Only a compiler refuses."""
    constants, _ = latent_attention._config(4, 16, 64, 64, 2, 4)
    assert constants["BLOCK_D"] == 32 and latent_attention._config(4, 128, 64, 64, 2, 4)[0]["BLOCK_D"] == 128
