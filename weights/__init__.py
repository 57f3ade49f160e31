"""Weights behind `Linear`: their files, the formats of matrices in memory, and quantization.

reader.py                   `open_checkpoint`: the format of a path, and a pass over its tensors
gguf*.py  gptq.py  awq.py   one published format per file, read as tensors or `Codes` (codes.py); shards.py: safetensors
compressed_tensors.py
quantization.py             --weights: rounding to 8 and 4 bits
linear.py  norm.py         the modules that multiply, and those that norm
"""

from weights.codes import BF16, Codes, Layout
from weights.experts import Experts
from weights.gguf import gguf_config, gguf_tensors, is_gguf
from weights.gguf_file import GGUFFile
from weights.linear import (
    Choose,
    Joined,
    Linear,
    PackedEmbedding,
    PackedLinear,
    fill_normal,
    first_outputs,
    pack,
)
from weights.norm import CenteredNorm, HeadsNorm
from weights.quantization import DENSE, WeightFormat, quantize
from weights.reader import Reader, find_gguf, open_checkpoint
