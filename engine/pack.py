"""Small files of saved caches: keys and values decorrelated, quantized and entropy-coded (KVTC, arXiv 2511.01815).

Keys, before rotation, are projected on the calibrated basis of all heads of their layer (`sals.basis`), values on that
of their head (`oja.v_basis`), less their mean. All coordinates are rounded to multiples of one step, and zlib codes one
coordinate of all tokens after another: a coordinate takes bits by the logarithm of its deviation over the step, and
none where it is below. KVTC finds such bits by dynamic programming, with scales for groups of coordinates; a common
step with an entropy coder needs neither. The first and newest tokens stay exact. Buffers that hold no dense keys and
values, such as codes and labels, are coded without loss.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from cache.base import KVMethod
from cache.calibration import Calibration
from cache.dense import Dense
from kernels.rope import Rope, apply_rope
from runtime.errors import InputError, check_range

SINKS, RECENT = 4, 128  # tokens that stay exact (KVTC, Sec. 3)


def check_step(step: float) -> None:
    check_range("--pack", step, 1e-4, 10)


def pack(tensors: dict[str, Tensor], cache: nn.Module, lengths: list[int], step: float, calib: Calibration,
         ) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """The filled parts of a cache's buffers, by name, for rows of these lengths -> their bytes, uint8 [n], by name, and
    what `unpack` needs. step: in standard deviations. Raises InputError if a basis is missing."""
    check_step(step)
    out, how, modules = dict[str, Tensor](), dict[str, Any](), dict(cache.named_modules())
    for name, x in tensors.items():
        x = x.detach().cpu().contiguous()
        how[name] = dict(shape=[*x.shape], dtype=str(x.dtype).removeprefix("torch."))
        dense, part = dense_of(modules, name)
        if dense is None:
            out[name] = compressed(x)
            continue
        rows = [x[b, :, SINKS : max(SINKS, n - RECENT)] for b, n in enumerate(lengths)]
        basis = basis_of(dense, part, calib)
        y = torch.cat([coordinates(dense.rope, basis, part, b, row.float()) for b, row in enumerate(rows)])
        mean, unit = y.new_zeros(y.shape[1]), 1.0
        if len(y):
            mean = y.mean(0)
            y = y - mean
            unit = max(step * float(y.square().mean().sqrt()), float(y.abs().max()) / 16383) or 1.0  # 15 bits a code
        coded = (y / unit).round().int().split([row.shape[1] for row in rows])
        codes = torch.cat([row.T.flatten() for row in coded])  # one coordinate of all tokens after another
        exact = torch.cat([end.flatten() for b, n in enumerate(lengths) for end in ends(x[b], n)])
        codes = codes * 2 ^ codes >> 31  # the sign last: 0, -1, 1, -2, ... are 0, 1, 2, 3
        planes = codes.short().view(torch.uint8).view(-1, 2)  # the upper bytes are nearly all 0
        parts = [compressed(one.contiguous()) for one in (planes[:, 0], planes[:, 1], mean, exact)]
        out[name] = torch.cat(parts)
        how[name] |= dict(unit=unit, lengths=lengths, sizes=[len(p) for p in parts])
    return out, how


def unpack(tensors: dict[str, Tensor], how: dict[str, Any], cache: nn.Module, calib: Calibration,
           ) -> dict[str, Tensor]:  # fmt: skip
    """The buffers that `pack` was given, up to half a step; slots that its rows do not fill are 0."""
    out, modules = dict[str, Tensor](), dict(cache.named_modules())
    for name, of in how.items():
        dtype, data = getattr(torch, of["dtype"]), tensors[name]
        if "unit" not in of:
            out[name] = expanded(data, dtype).view(of["shape"])
            continue
        dense, part = dense_of(modules, name)
        assert dense is not None
        low, high, mean, exact = data.split(of["sizes"])
        planes = torch.stack([expanded(plane, torch.uint8) for plane in (low, high)], 1)
        codes = planes.flatten().view(torch.int16).int()
        codes = codes >> 1 ^ -(codes & 1)
        basis, x, rest = basis_of(dense, part, calib), torch.zeros(of["shape"], dtype=dtype), expanded(exact, dtype)
        H, _, D = x.shape[1:]
        for b, n in enumerate(of["lengths"]):
            for kept in ends(x[b], n):
                kept.copy_(rest[: kept.numel()].view(kept.shape))
                rest = rest[kept.numel() :]
            middle = max(0, n - RECENT - SINKS)
            mine, codes = codes.split([H * D * middle, len(codes) - H * D * middle])
            y = mine.view(H * D, middle).T * of["unit"] + expanded(mean, torch.float32)
            x[b, :, SINKS : SINKS + middle] = restored(dense.rope, basis, part, b, y).to(dtype)
        out[name] = x
    return out


def dense_of(modules: dict[str, nn.Module], name: str) -> tuple[Dense | None, str]:
    """The module of a buffer of dense keys or values whose slot is their position, and "k" or "v"."""
    module, _, part = name.rpartition(".")
    m, layer = modules.get(module), modules[name.partition(".")[0]]
    if not isinstance(m, Dense) or part not in ("k", "v") or m.own_basis:
        return None, part
    if isinstance(layer, KVMethod) and m.shape.n_kv_head != layer.shape.n_kv_head:  # razor: the basis is of all heads
        return None, part
    return (None if m.layout(m.shape.max_seq_len) else m), part


def basis_of(m: Dense, part: str, calib: Calibration) -> Tensor:
    """[H D, H D] of keys, or [H, D, D] of values."""
    return calib.get(m.layer, "sals.basis" if part == "k" else "oja.v_basis").float()


def ends(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The first and newest of n tokens in x [H, T, D]."""
    return x[:, : min(SINKS, n)], x[:, max(SINKS, n - RECENT) : n]


def coordinates(rope: Rope, basis: Tensor, part: str, row: int, x: Tensor) -> Tensor:
    """Tokens x [H, n, D] of a row, from position SINKS on -> their coordinates [n, H D]."""
    if part == "v":
        return (x @ basis).transpose(0, 1).flatten(1)
    cos, sin = angles(rope, row, x.shape[1])
    x = apply_rope(x, cos, -sin) / (cos * cos + sin * sin).repeat(1, 2)  # a scaled rotation taken back
    return x.transpose(0, 1).flatten(1) @ basis


def restored(rope: Rope, basis: Tensor, part: str, row: int, y: Tensor) -> Tensor:
    """The tokens [H, n, D] of coordinates y [n, H D]."""
    if part == "v":
        return y.unflatten(1, (len(basis), -1)).transpose(0, 1) @ basis.mT
    D = 2 * rope.cos.shape[-1]
    return apply_rope((y @ basis.T).unflatten(1, (-1, D)).transpose(0, 1), *angles(rope, row, len(y)))


def angles(rope: Rope, row: int, n: int) -> tuple[Tensor, Tensor]:
    """cos, sin [n, D/2] of n positions from SINKS on."""
    cos, sin = (t[min(row, len(t) - 1), 0].cpu() for t in rope.prompt(n, SINKS))
    return cos, sin


def compressed(x: Tensor) -> Tensor:
    """The bytes of x, entropy-coded: uint8 [n]."""
    return torch.frombuffer(
        bytearray(zlib.compress(x.flatten().view(torch.uint8).numpy().tobytes())), dtype=torch.uint8
    )


def expanded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `compressed` bytes x. Raises InputError if they are damaged."""
    try:
        data = zlib.decompress(x.numpy().tobytes())
    except zlib.error as e:
        raise InputError(f"a part of the saved cache is damaged ({e}): save it again") from None
    if not data:  # numpy's empty array has a stride of 0
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype)
