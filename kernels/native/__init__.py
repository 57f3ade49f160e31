"""Operations in C++ for CPU tensors, compiled when first needed.

They do what torch cannot do fast on a CPU: look-ups in tables of 16 numbers, selection without sorting, attention that
unpacks tokens in registers or reads each row of a list once. Compiling takes a few seconds, once (build.py). Without a
compiler a note says so, once, and the torch versions run.
"""

import torch

from kernels.native.build import ask, available
from kernels.native.graphs import Graphs
from kernels.native.pages import OnePiece, in_huge_pages

VECTOR = 16  # floats: rows are read in whole vectors
DTYPES = (torch.float32, torch.bfloat16)

__all__ = ["DTYPES", "VECTOR", "Graphs", "OnePiece", "ask", "available", "in_huge_pages"]
