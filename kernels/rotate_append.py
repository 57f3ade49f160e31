"""One token per row: rotate its query and key, and write key and value to their slots of the cache, in one launch.

In torch this is a dozen operations on a few kilobytes, which a compiler turns into several launches: angles by
position, two rotations, and K and V into their slots. The torch version stays open to the compiler, which fuses it on
a CPU.

The kernel rounds after each multiplication and addition, as torch does: both versions give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.native import VECTOR
from kernels.op import operation
from kernels.rope import angle_bytes, angles, apply_rope
from kernels.tuned import tuned


def _new(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operation(cpp=True, fake=lambda q, k, *_: (_new(q), _new(k)), reads=angle_bytes)
def rotate_token(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, Hq, D] and k [B, Hkv, D], one token per row, rotated at pos [B] int64; cos and sin are those of `Rope`."""
    a, b = angles(cos, pos)[:, None], angles(sin, pos)[:, None]
    return apply_rope(q, a, b), apply_rope(k, a, b)


@operation(cpp=True, fake=lambda q, *_: _new(q), mutates=("k_cache", "v_cache"), reads=angle_bytes)
def rotate_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """`rotate_token` -> q; in place, rotated k and v [B, Hkv, D] go to slot pos of caches [>= B, Hkv, T, D]."""
    q, k = rotate_token(q, k, cos, sin, pos)
    append_token.reference(k, v, pos, k_cache, v_cache)
    return q


@operation(cpp=True, fake=lambda *_: None, mutates=("k_cache", "v_cache"))
def append_token(k: Tensor, v: Tensor, slot: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """In place, k and v [B, H, D] go to slot [B], or [B, H], of caches [>= B, H, T, D]."""
    row = torch.arange(len(slot), device=slot.device)
    if slot.dim() == 1:
        k_cache[row, :, slot], v_cache[row, :, slot] = k, v
    else:
        at = row[:, None], torch.arange(slot.shape[1], device=slot.device), slot
        k_cache[at], v_cache[at] = k, v


@operation(cpp=lambda x, *_: x.dim() == 3)
def scale_heads(x: Tensor, unit: Tensor, divide: bool = False) -> Tensor:
    """x [B, H * g, ..., D] times the unit [>= B, H, 1] of its KV head, or divided by it."""
    groups, unit = x.unflatten(1, (unit.shape[1], -1)), unit[: len(x)]
    unit = unit.view(*unit.shape, *[1] * (x.dim() - 2))
    return (groups / unit if divide else groups * unit).flatten(1, 2)


@operation(cpp=lambda x, matrix, *_: x.dim() == 3 and x.shape[2] % VECTOR == 0)
def turn_heads(x: Tensor, matrix: Tensor, unit: Tensor | None = None, divide: bool = False) -> Tensor:
    """x [B, H * g, ..., D] times matrix [D, D], or with x [B, H * g, D] that of its KV head [H, D, D], in the dtype of
    the matrix; with unit [>= B, H, 1] scaled as by `scale_heads`."""
    y = (x if unit is None else scale_heads.reference(x, unit, divide)).to(matrix.dtype)
    if matrix.dim() == 2:
        return (y @ matrix).to(x.dtype)
    # one product per head for all rows: batched over rows, torch would copy the matrix for each
    return torch.einsum("bhgd,hde->bhge", y.unflatten(1, (len(matrix), -1)), matrix).flatten(1, 2).to(x.dtype)


# ---- Triton ----


@triton.jit
def _rotate(x, x_head, to, to_head, cosine, sine, head, real, D: tl.constexpr, offs_c):
    """Heads [N, 1] of x to those of `to`, rotated by cosine and sine [C], fp32, of channels offs_c [C]."""
    x1 = tl.load(x + head * x_head + offs_c, mask=real, other=0.0).to(tl.float32)
    x2 = tl.load(x + head * x_head + D // 2 + offs_c, mask=real, other=0.0).to(tl.float32)
    tl.store(to + head * to_head + offs_c, (x1 * cosine - x2 * sine).to(to.dtype.element_ty), mask=real)
    tl.store(to + head * to_head + D // 2 + offs_c, (x2 * cosine + x1 * sine).to(to.dtype.element_ty), mask=real)


@triton.jit
def _rotate_append_kernel(
    q, k, v, cos, sin, pos, q_out, k_out, v_out,
    q_strides, k_strides, v_strides, table_row, k_out_strides, v_out_strides, H,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program: one KV head of a row and its G query heads. v None: k_out has no slots."""
    pid_bh = tl.program_id(0).to(tl.int64)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    at = tl.load(pos + pid_b)
    offs_c, offs_g = tl.arange(0, BLOCK_D // 2), tl.arange(0, BLOCK_G)[:, None]
    inside = offs_c < D // 2
    cosine = tl.load(cos + pid_b * table_row + at * (D // 2) + offs_c, mask=inside, other=0.0)
    sine = tl.load(sin + pid_b * table_row + at * (D // 2) + offs_c, mask=inside, other=0.0)
    q += pid_b * q_strides[0] + pid_h * G * q_strides[1]
    _rotate(q, q_strides[1], q_out + pid_bh * (G * D), D, cosine, sine, offs_g, (offs_g < G) & inside, D, offs_c)
    k_out += pid_b * k_out_strides[0] + pid_h * k_out_strides[1]
    if v is not None:
        k_out += at * k_out_strides[2]
        offs_d = tl.arange(0, BLOCK_D)
        value = tl.load(v + pid_b * v_strides[0] + pid_h * v_strides[1] + offs_d, mask=offs_d < D, other=0.0)
        tl.store(
            v_out + pid_b * v_out_strides[0] + pid_h * v_out_strides[1] + at * v_out_strides[2] + offs_d,
            value,
            mask=offs_d < D,
        )
    _rotate(k + pid_b * k_strides[0] + pid_h * k_strides[1], 0, k_out, 0, cosine, sine, 0, inside, D, offs_c)


def _config(G: int, D: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and launch options for G query heads per KV head. Fused multiply-adds would round differently."""
    tile = dict(BLOCK_G=triton.next_power_of_2(G), BLOCK_D=triton.next_power_of_2(D))
    warps = min(4, max(1, tile["BLOCK_G"] * tile["BLOCK_D"] // 512))
    return dict(G=G, D=D) | tile, dict(num_warps=warps, enable_fp_fusion=False)


@rotate_append.triton
def _launch(
    q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor, pos: Tensor, k_out: Tensor, v_out: Tensor | None
) -> Tensor:
    """-> q rotated; k_out and v_out [.., H, T, D] are caches, or k_out is [B, H, D] and v and v_out None."""
    (B, Hq, D), H = q.shape, k.shape[1]
    given = [x for x in (q, k, v, k_out, v_out) if x is not None]
    assert all(x.stride(-1) == 1 for x in given), "channels must be contiguous"
    assert cos.stride()[1:] == sin.stride()[1:] == (D // 2, 1), "a position's angles must be contiguous"
    q_out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    constants, options = _config(Hq // H, D)
    v_strides, v_out_strides = (None if x is None else x.stride() for x in (v, v_out))
    _rotate_append_kernel[(B * H,)](
        q, k, v, cos, sin, pos.contiguous(), q_out, k_out, v_out, q.stride(), k.stride(), v_strides,
        0 if len(cos) == 1 else cos.stride(0), k_out.stride(), v_out_strides, H, **constants,
        **tuned("_rotate_append_kernel", **options),
    )  # fmt: skip
    return q_out


@rotate_token.triton
def _token(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    return _launch(q, k, None, cos, sin, pos, k_out, None), k_out
