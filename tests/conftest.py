"""Every test starts from the same random state. Without a GPU, Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def kernel_device() -> torch.device:
    """Where kernels are tested: natively if there is a GPU, interpreted otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
