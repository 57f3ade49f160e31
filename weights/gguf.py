"""GGUF files of the architectures in gguf_config.py: llama.cpp's tensors -> Hugging Face's names, layout and order.

Types of 4 and more bits become Codes, exactly as in the file: a block of 32 numbers has an fp16 scale d, perhaps an
fp16 minimum m, and codes, w = d * q + m (Q4_0 to Q8_0); a block of 256 has an fp16 d and dmin whose multiples are
scales and minima of its groups of 16 or 32 numbers (Q2_K to Q6_K, IQ4_XS). Other types, with fewer bits or tables, are
dequantized in fp32 by gguf's own `quants.dequantize`. Layout of blocks: ggml/src/ggml-common.h of llama.cpp.
llama.cpp rotates adjacent channels, Hugging Face channel i with i + D/2: for Llama and some others its converter
permutes the rows of q and k, which is undone here. It adds 1 to Gemma's norms, which is taken off again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.errors import InputError
from weights.codes import BF16 as HELD_BF16
from weights.codes import Codes, Layout, check_finite
from weights.gguf_config import config_of
from weights.gguf_file import MAGIC, GGUFFile, TensorInfo, rows_of, type_name, type_sizes
from weights.shards import Layouts

F32, F16, BF16 = 0, 1, 30  # ggml's numbers
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23
# The layout that holds the numbers of a type exactly: groups of 16 and 32; for K types, steps for 256 numbers.
LAYOUTS = {
    Q4_0: Layout(4, 32), Q4_1: Layout(4, 32, minimum=True), Q5_0: Layout(8, 32), Q5_1: Layout(8, 32, minimum=True),
    Q8_0: Layout(8, 32), Q2_K: Layout(4, 16, 16, True), Q3_K: Layout(4, 16, 16), Q4_K: Layout(4, 32, 8, True),
    Q5_K: Layout(8, 32, 8, True), Q6_K: Layout(8, 16, 16), IQ4_NL: Layout(8, 32), IQ4_XS: Layout(8, 32, 8),
}  # fmt: skip
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's kvalues_iq4nl
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
         "output.weight": "lm_head.weight"}  # fmt: skip
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
for ours, theirs in (("exps", "experts"), ("shexp", "shared_expert")):  # experts: [experts, rows, inputs]
    PARTS |= {f"ffn_{x}_{ours}": f"mlp.{theirs}.{x}_proj" for x in ("gate", "up", "down")}
OWN_PARTS = {  # of an architecture, where they are others
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
               "post_ffw_norm": "post_feedforward_layernorm"},
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}  # fmt: skip
PERMUTED = ("llama", "mistral3", "smollm3", "granite")
IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
CHUNK = 1 << 24  # numbers dequantized at a time


def is_gguf(path: str | Path) -> bool:
    """Whether a file begins with GGUF's magic."""
    try:
        with open(path, "rb") as f:
            return f.read(4) == MAGIC
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False


def gguf_config(path: str | Path | GGUFFile) -> dict[str, Any]:
    """The metadata as a config.json. An InputError names what this engine does not compute."""
    return config_of(_open(path))


def gguf_layouts(path: str | Path | GGUFFile) -> Layouts:
    """The layouts of the file's matrices by Hugging Face's names, and a note on those that no codes hold exactly."""
    file = _open(path)
    n_layer = config_of(file)["num_hidden_layers"]
    found = {t.name: LAYOUTS[t.type] for t in file.tensors.values() if t.type in LAYOUTS and len(t.shape) > 1}
    if found:  # if there are codes, bf16 matrices stay in 16 bits
        found |= {t.name: HELD_BF16 for t in file.tensors.values() if t.type == BF16 and len(t.shape) > 1}
    rest = {t.name: t.type for t in file.tensors.values() if t.type not in (F32, F16, BF16, *LAYOUTS)}
    kinds = ", ".join(sorted({type_name(t) for t in rest.values()}))
    note = f"{len(rest)} tensors are of {kinds}, which no codes of 4 or 8 bits hold exactly: held unpacked"
    return {hf_name(file, name, n_layer): layout for name, layout in found.items()}, note if rest else None


def gguf_tensors(path: str | Path | GGUFFile) -> Iterator[tuple[str, Tensor | Codes]]:
    """Yields (Hugging Face's name, tensor): F32, F16 and BF16 as they are, codes as Codes, other types in fp32."""
    file = _open(path)
    config, arch = config_of(file), file.text("general.architecture")
    for name in file.tensors:
        if name in IN_CONFIG:
            continue
        t, hf = _tensor(file, name), hf_name(file, name, config["num_hidden_layers"])
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(hf.split(".")[-2])
        if arch == "gemma3" and isinstance(t, Tensor) and hf.endswith("norm.weight"):
            t = t.float() - 1
        if heads and arch in PERMUTED:
            n, D = config[heads], config["head_dim"]
            if n < 1 or D < 2 or D % 2 or t.shape[0] != n * D:
                raise file.error(f"tensor {name} has {t.shape[0]} rows, expected {n} heads of {D}")
            rows = torch.arange(n * D).view(n, D // 2, 2).transpose(1, 2).flatten()
            t = t.rows(rows) if isinstance(t, Codes) else t[rows]
        if isinstance(t, Tensor) and "shared_expert_gate" in hf:  # llama.cpp's is a vector
            t = t.view(1, -1)
        yield hf, t


def _open(path: str | Path | GGUFFile) -> GGUFFile:
    return path if isinstance(path, GGUFFile) else GGUFFile(path)


def hf_name(file: GGUFFile, name: str, n_layer: int) -> str:
    """Hugging Face's name of a tensor. Raises InputError if the model has no such tensor."""
    if name in NAMES:
        return NAMES[name]
    m, arch = (
        re.fullmatch(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)", name),
        file.text("general.architecture"),
    )
    parts = PARTS | OWN_PARTS.get(arch, {})
    if not m or m[2] not in parts or int(m[1]) >= n_layer:
        raise file.error(f"tensor {name!r} belongs to no {arch} of {n_layer} layers: not supported")
    return f"model.layers.{m[1]}.{parts[m[2]]}.{m[3]}"


def _tensor(file: GGUFFile, name: str) -> Tensor | Codes:
    t = file.tensors[name]
    if t.type in (F32, F16, BF16):
        flat = np.array(file.raw(name)).reshape(-1)  # a copy: torch must not write into the file
        return (
            torch.from_numpy(flat)
            .view({F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[t.type])
            .view(t.shape)
        )
    if t.type in LAYOUTS and len(t.shape) > 1:
        return _codes(file, t)
    return _dequantized(file, t)


def _codes(file: GGUFFile, t: TensorInfo) -> Codes:
    """A matrix of a type in LAYOUTS, or those of all experts, one below the other."""
    out, n = rows_of(t), t.shape[-1]
    layout, size = LAYOUTS[t.type], type_sizes()[t.type][0]
    blocks = torch.from_numpy(np.array(file.raw(t.name))).view(out, n // size, -1)
    codes, scale, step, minimum, min_step = _UNPACK[t.type](blocks)
    c = Codes(codes.reshape(out, n), scale.reshape(out, -1), None, layout.bits)
    if step is not None:
        c.step = step.reshape(out, -1)
    if minimum is not None:
        c.minimum, c.min_step = minimum.reshape(out, -1), None if min_step is None else min_step.reshape(out, -1)
    for x in (c.step, c.min_step) if layout.steps else (c.scale, c.minimum):
        if x is not None:
            check_finite(f"tensor {t.name} in {file.path}", x)
    return c


# Blocks uint8 [out, blocks, bytes] -> codes, scale, step, minimum, min_step of each

Unpacked = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _half(b: Tensor, offset: int) -> Tensor:
    """The fp16 number at a byte offset of each block: [out, blocks, 1]."""
    return b[..., offset : offset + 2].contiguous().view(torch.float16)


def _nibbles(b: Tensor, offset: int) -> Tensor:
    """The 16 bytes at a byte offset of each block: low halves are numbers 0 to 15, high halves 16 to 31."""
    q = b[..., offset : offset + 16]
    return torch.cat((q & 15, q >> 4), -1)


def _fifths(b: Tensor, offset: int) -> Tensor:
    """The highest bit of number j, bit j of the 4 bytes at a byte offset, shifted to bit 4."""
    return (b[..., offset : offset + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q4_0(b: Tensor) -> Unpacked:
    return _nibbles(b, 2), _half(b, 0), None, None, None


def _q4_1(b: Tensor) -> Unpacked:
    return _nibbles(b, 4), _half(b, 0), None, _half(b, 2), None


def _q5_0(b: Tensor) -> Unpacked:
    return (_nibbles(b, 6) | _fifths(b, 2)).view(torch.int8) - 16, _half(b, 0), None, None, None


def _q5_1(b: Tensor) -> Unpacked:
    return (_nibbles(b, 8) | _fifths(b, 4)).view(torch.int8), _half(b, 0), None, _half(b, 2), None


def _q8_0(b: Tensor) -> Unpacked:
    return b[..., 2:].contiguous().view(torch.int8), _half(b, 0), None, None, None


def _pairs(q: Tensor, bits: int) -> Tensor:
    """[..., n * 32] -> [..., n, 8 / bits, 32]: the lowest bits of 32 bytes are the first 32 numbers, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return q.unflatten(-1, (-1, 1, 32)) >> shifts & (1 << bits) - 1


def _scales_and_minima(b: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K and Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes; the upper 2 bits of the last four are in the first
    8 bytes."""
    first, second, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = torch.cat((first & 63, rest & 15 | (first >> 6) << 4), -1)
    minimum = torch.cat((second & 63, rest >> 4 | (second >> 6) << 4), -1)
    return scale.view(torch.int8), minimum.view(torch.int8)


def _q2_k(b: Tensor) -> Unpacked:
    scale, minimum = (x.contiguous().view(torch.int8) for x in (b[..., :16] & 15, b[..., :16] >> 4))
    return _pairs(b[..., 16:80], 2), scale, _half(b, 80), minimum, -_half(b, 82)


def _q3_k(b: Tensor) -> Unpacked:
    """Codes of 3 bits minus 4, with the highest bits in a separate mask; scales of 6 bits minus 32."""
    high = b[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [..., 8, 32]
    codes = _pairs(b[..., 32:96], 2).flatten(-3, -2) + (high << 2) + 4  # held around 8
    low = torch.cat((b[..., 96:104] & 15, b[..., 96:104] >> 4), -1)
    top = (b[..., None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(-2)
    return codes, (low | top << 4).view(torch.int8) - 32, _half(b, 108), None, None


def _q4_k(b: Tensor) -> Unpacked:
    scale, minimum = _scales_and_minima(b)
    return _pairs(b[..., 16:144], 4), scale, _half(b, 0), minimum, -_half(b, 2)


def _q5_k(b: Tensor) -> Unpacked:
    scale, minimum = _scales_and_minima(b)
    high = b[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [..., 8, 32]
    codes = _pairs(b[..., 48:176], 4).flatten(-3, -2) | high << 4
    return codes.view(torch.int8), scale, _half(b, 0), minimum, -_half(b, 2)


def _q6_k(b: Tensor) -> Unpacked:
    """Codes of 6 bits minus 32: for each half of 128 numbers, 64 bytes hold the lower 4 bits and 32 the upper 2."""
    low = b[..., :128].unflatten(-1, (2, 1, 64)) >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    codes = low.unflatten(-1, (2, 32)).flatten(-3, -2) | _pairs(b[..., 128:192], 2) << 4  # [..., 2, 4, 32]
    return codes.view(torch.int8) - 32, b[..., 192:208].contiguous().view(torch.int8), _half(b, 208), None, None


def _iq4_nl(b: Tensor) -> Unpacked:
    return torch.tensor(IQ4_TABLE, dtype=torch.int8)[_nibbles(b, 2).long()], _half(b, 0), None, None, None


def _iq4_xs(b: Tensor) -> Unpacked:
    """Scales of 6 bits minus 32: the lower 4 bits in 4 bytes, the upper 2 in a word before them."""
    low = torch.stack((b[..., 4:8] & 15, b[..., 4:8] >> 4), -1).flatten(-2)
    high = (b[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    q = b[..., 8:136].unflatten(-1, (8, 16))
    codes = torch.tensor(IQ4_TABLE, dtype=torch.int8)[torch.cat((q & 15, q >> 4), -1).long()]
    return codes, (low | high << 4).view(torch.int8) - 32, _half(b, 0), None, None


_UNPACK = {Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q5_1: _q5_1, Q8_0: _q8_0, Q2_K: _q2_k, Q3_K: _q3_k, Q4_K: _q4_k,
           Q5_K: _q5_k, Q6_K: _q6_k, IQ4_NL: _iq4_nl, IQ4_XS: _iq4_xs}  # fmt: skip


def _dequantized(file: GGUFFile, t: TensorInfo) -> Tensor:
    """Dequantize by the gguf package, some rows at a time -> fp32."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    ggml_type, rows = GGMLQuantizationType(t.type), rows_of(t)
    flat = torch.empty(rows, t.shape[-1])
    step = max(1, CHUNK // t.shape[-1])
    for i in range(0, rows, step):
        try:
            with np.errstate(all="ignore"):
                part = torch.from_numpy(dequantize(file.raw(t.name, slice(i, i + step)), ggml_type))
        except (NotImplementedError, KeyError):
            raise InputError(f"{file.path}: tensor {t.name} is {ggml_type.name}, which the gguf package cannot "
                             "dequantize: quantize it otherwise") from None  # fmt: skip
        if not part.isfinite().all():
            raise file.error(f"tensor {t.name} holds NaN or infinity: download it again")
        flat[i : i + step] = part
    return flat.view(t.shape)
