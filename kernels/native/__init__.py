"""Operations in C++ for CPU tensors, compiled when first needed.

What torch cannot say fast on a CPU: look-ups in tables of 16 numbers, a selection that does not sort, attention that
unpacks tokens in registers or reads each row of a list once. Compiling takes a few seconds, once (build.py). Without a
compiler a note says so, once, and the torch versions run.
"""

from kernels.native.build import available
from kernels.native.ops import (
    DTYPES,
    VECTOR,
    decode_attention,
    gather_attention,
    latent_attention,
    latent_space_attention,
    linear,
    look_up,
    oja_sequential,
    packed_gather_attention,
    quantized_attention,
    select,
    unpack_rows,
)
from kernels.native.pages import in_huge_pages

__all__ = [
    "DTYPES",
    "VECTOR",
    "available",
    "decode_attention",
    "gather_attention",
    "in_huge_pages",
    "latent_attention",
    "latent_space_attention",
    "linear",
    "look_up",
    "oja_sequential",
    "packed_gather_attention",
    "quantized_attention",
    "select",
    "unpack_rows",
]
