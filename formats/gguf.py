"""GGUF files of Llama (and Mistral), Qwen2 and Qwen3: llama.cpp's tensors -> Hugging Face's names, layout and order.

Q8_0 and Q4_0 are Codes in groups of 32: a block is fp16 d and 32 signed bytes, or 16 bytes whose low halves are numbers
0 to 15 and whose high halves are 16 to 31, w = d * (q - 8). All others go through gguf's own `quants.dequantize`.
llama.cpp turns neighbouring channels where Hugging Face turns channel i with i + D/2: for Llama its converter permutes
the rows of q and k, which is undone here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from errors import InputError
from formats.codes import Codes, check
from formats.gguf_config import config_of
from formats.gguf_file import MAGIC, GGUFFile, TensorInfo, rows_of

F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30  # ggml's numbers
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
         "output.weight": "lm_head.weight"}  # fmt: skip
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
CHUNK = 1 << 24  # numbers dequantized at a time


def is_gguf(path: str | Path) -> bool:
    """Whether a file begins as GGUF does."""
    try:
        with open(path, "rb") as f:
            return f.read(4) == MAGIC
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False


def gguf_config(path: str | Path | GGUFFile) -> dict[str, Any]:
    """The metadata as a config.json; InputError names what this engine does not compute."""
    return config_of(_open(path))


def gguf_tensors(path: str | Path | GGUFFile) -> Iterator[tuple[str, Tensor | Codes]]:
    """(Hugging Face's name, tensor), one at a time: F32, F16, BF16 as they are, Q4_0 and Q8_0 as Codes, else fp32."""
    file = _open(path)
    config = config_of(file)
    for name in file.tensors:
        if name == "rope_freqs.weight":  # is in the config
            continue
        t, hf = _tensor(file, name), _hf_name(file, name, config["num_hidden_layers"])
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(hf.split(".")[-2])
        if heads and config["model_type"] == "llama":
            n, D = config[heads], config["head_dim"]
            if n < 1 or D < 2 or D % 2 or t.shape[0] != n * D:
                raise file.error(f"tensor {name} has {t.shape[0]} rows, expected {n} heads of {D}")
            rows = torch.arange(n * D).view(n, D // 2, 2).transpose(1, 2).flatten()
            t = t.rows(rows) if isinstance(t, Codes) else t[rows]
        yield hf, t


def _open(path: str | Path | GGUFFile) -> GGUFFile:
    return path if isinstance(path, GGUFFile) else GGUFFile(path)


def _hf_name(file: GGUFFile, name: str, n_layer: int) -> str:
    if name in NAMES:
        return NAMES[name]
    m = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)", name)
    if not m or m[2] not in PARTS or int(m[1]) >= n_layer:
        raise file.error(f"tensor {name!r} belongs to no Llama, Qwen2 or Qwen3 of {n_layer} layers: not supported")
    return f"model.layers.{m[1]}.{PARTS[m[2]]}.{m[3]}"


def _tensor(file: GGUFFile, name: str) -> Tensor | Codes:
    t = file.tensors[name]
    if t.type in (F32, F16, BF16):
        flat = np.array(file.raw(name)).reshape(-1)  # a copy: torch must not write into the file
        return (
            torch.from_numpy(flat)
            .view({F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[t.type])
            .view(t.shape)
        )
    if t.type in (Q4_0, Q8_0) and len(t.shape) == 2:
        return _codes(file, t)
    return _dequantized(file, t)


def _codes(file: GGUFFile, t: TensorInfo) -> Codes:
    """The blocks of Q8_0, 34 bytes, or of Q4_0, 18 bytes."""
    out, n = t.shape
    blocks = torch.from_numpy(np.array(file.raw(t.name))).view(out, n // 32, -1)
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
    q = blocks[..., 2:]
    codes = q.contiguous().view(torch.int8) if t.type == Q8_0 else torch.cat((q & 15, q >> 4), -1)
    codes = codes.reshape(out, n)
    check(f"tensor {t.name} in {file.path}", codes, scale)
    return Codes(codes, scale, None, 8 if t.type == Q8_0 else 4)


def _dequantized(file: GGUFFile, t: TensorInfo) -> Tensor:
    """By the gguf package, some rows at a time -> fp32."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, rows = GGMLQuantizationType(t.type), rows_of(t)
    flat = torch.empty(rows, t.shape[-1])
    step = max(1, CHUNK // t.shape[-1])
    for i in range(0, rows, step):
        try:
            with np.errstate(all="ignore"):
                part = torch.from_numpy(dequantize(file.raw(t.name, slice(i, i + step)), kind))
        except (NotImplementedError, KeyError):
            raise InputError(f"{file.path}: tensor {t.name} is {kind.name}, which the gguf package cannot dequantize: "
                             "quantize it otherwise") from None  # fmt: skip
        if not part.isfinite().all():
            raise file.error(f"tensor {t.name} holds NaN or infinity: download it again")
        flat[i : i + step] = part
    return flat.view(t.shape)
