"""Operations in C++ for CPU tensors, compiled when first needed.

What torch cannot say fast on a CPU: look-ups in tables of 16 numbers, a selection that does not sort, attention that
unpacks tokens in registers or reads each row of a list once. Compiling takes a few seconds, once (build.py). Without a
compiler a note says so, once, and the torch versions run.
"""

from kernels.native.build import available
from kernels.native.ops import (
    DTYPES,
    RANKS,
    VECTOR,
    Declarations,
    channel_score,
    decode_attention,
    dense_linear,
    gather_attention,
    group_attention,
    has_many_rows,
    has_tiles,
    head_scores,
    label_score,
    latent_append,
    latent_attention,
    linear,
    lowrank_attention,
    lut_score,
    many_rows,
    multiplies_one_row,
    oja_sequential,
    packed_gather_attention,
    quantized_append,
    quantized_attention,
    select,
    store_labels,
    top_p_count,
    unpack_rows,
)
from kernels.native.pages import OnePiece, in_huge_pages

__all__ = [
    "DTYPES",
    "RANKS",
    "VECTOR",
    "Declarations",
    "OnePiece",
    "available",
    "channel_score",
    "decode_attention",
    "dense_linear",
    "gather_attention",
    "group_attention",
    "has_many_rows",
    "has_tiles",
    "head_scores",
    "in_huge_pages",
    "label_score",
    "latent_append",
    "latent_attention",
    "linear",
    "lowrank_attention",
    "lut_score",
    "many_rows",
    "multiplies_one_row",
    "oja_sequential",
    "packed_gather_attention",
    "quantized_append",
    "quantized_attention",
    "select",
    "store_labels",
    "top_p_count",
    "unpack_rows",
]
