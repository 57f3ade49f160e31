"""Keys in a latent space that all KV heads of a layer share: how tokens are stored, of a prompt and one by one.

A token's coordinates lie in one buffer, or in two: those that score, and the rest apart, so that a scoring pass reads
whole rows and nothing else. Values are quantized as in kernels/quantize.py.

For a prompt, one kernel multiplies the keys with the basis and writes each tile of coordinates to its buffer: it reads
2 n*D bytes per token and writes 2 r. A product into a temporary and a split would write and read 2 r more; two products
would read the keys twice. Its 2 n*D r operations per token are what prefill pays: at Llama-2-7B's shapes (n*D = 4096,
r = 1024) 8.4 MFLOP beside 405 MFLOP of a layer's weights and, at 32K, 268 of its attention: 1.2 %.

In decode, one kernel copies the token that is no longer among the newest to the store, at the target ratio, and puts
the new one into the ring. Where tokens may be taken back, the ring has more slots than tokens are read from it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.gather_attention import gather_rows
from kernels.op import operation, slots
from kernels.quantize import GROUP, dequantize, quantize
from kernels.tiles import dot, encode_groups, scale_zero
from kernels.tuned import tuned


class LatentTokens(NamedTuple):
    """T slots of each row; a slot holds one token of all n KV heads together."""

    latents: tuple[Tensor, ...]  # [>= B, T, r_i]: the coordinates of a key in order, in buffers that are read apart
    values: tuple[Tensor, ...]  # uint8 [>= B, T, n*D*bits/8] and fp16 [>= B, T, n*D/32, 2]; at 16 bits [>= B, T, n*D]
    bits: int

    def coded(self) -> tuple[Tensor, Tensor | None]:
        """The values, with their scales and zeros if they have any."""
        return self.values[0], self.values[1] if self.bits < 16 else None


def latent_tokens(latents: tuple[Tensor, ...], v: Tensor, params: Tensor | None, width: int) -> LatentTokens:
    """LatentTokens of the buffers that an operation takes; width: n*D."""
    if params is None:
        return LatentTokens(latents, (v,), 16)
    return LatentTokens(latents, (v, params), v.shape[2] * 8 // width)


def write_tokens(tokens: LatentTokens, row: Tensor, slot: Tensor, latents: Tensor, values: Tensor) -> None:
    """Store latents [..., >= r] and values [..., n*D] at (row, slot), which broadcast to [...].

    Coordinates past r are dropped. That is exact: the basis of a lower rank is the first vectors of a higher one's.
    """
    widths = [part.shape[2] for part in tokens.latents]
    for part, x in zip(tokens.latents, latents[..., : sum(widths)].split(widths, -1), strict=True):
        part[row, slot] = x
    coded = (values.to(tokens.values[0].dtype),) if tokens.bits == 16 else quantize(values, tokens.bits)
    for part, x in zip(tokens.values, coded, strict=True):
        part[row, slot] = x


def read_tokens(tokens: LatentTokens, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [B, K] of each row -> latents [B, K, r], values [B, K, n*D] (dequantized: fp32)."""

    def take(part: Tensor) -> Tensor:
        return gather_rows(part.flatten(2)[:, None], slot[:, None])[:, 0]

    latents = torch.cat([take(part) for part in tokens.latents if part.shape[2]], -1)
    if tokens.bits == 16:
        return latents, take(tokens.values[0])
    packed, params = (take(part) for part in tokens.values)
    return latents, dequantize(packed, params.unflatten(-1, (-1, 2)), tokens.bits)


def store_prompt(store: LatentTokens, basis: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    """Write the tokens of prompts to slots 0, 1, ... of the store; past their lengths [B], slots may get anything.

    k, v [B, n, S, D] before rotation; basis [>= r, n*D] with the basis vectors in rows, of which r are used.
    """
    keys, values = k.transpose(1, 2).flatten(2), v.transpose(1, 2)
    B, S, _ = keys.shape
    _project(keys, basis, lengths, *store.latents)
    values = values.flatten(2) if values.shape[3] % GROUP else values  # groups of 32 may span two heads
    coded = (values,) if store.bits == 16 else quantize(values, store.bits)
    for part, x in zip(store.values, coded, strict=True):
        part[:B, :S] = x.reshape(B, S, *part.shape[2:])


@operation(mutates=("lead", "rest"))
def _project(x: Tensor, basis: Tensor, lengths: Tensor, lead: Tensor, rest: Tensor) -> None:
    """Keys x [B, S, n*D] into the latent space (eq. 1), coordinates to two buffers [>= B, >= S, r_i]."""
    widths = [part.shape[2] for part in (lead, rest)]
    latents = x @ basis[: sum(widths)].T
    for part, y in zip((lead, rest), latents.split(widths, -1), strict=True):
        part[: len(x), : x.shape[1]] = y


def store_newest(ring: LatentTokens, basis: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    """Write the newest tokens of prompts to a ring, slot = position modulo its R slots; arguments as in `store_prompt`.

    If a prompt is shorter than the ring, slots of negative positions get values that are never attended to.
    """
    R, row = ring.latents[0].shape[1], torch.arange(len(k), device=k.device)[:, None]
    newest = lengths[:, None] - 1 - torch.arange(R, device=k.device)
    k, v = (x.transpose(1, 2)[row, newest.clamp(min=0)].flatten(2) for x in (k, v))
    write_tokens(ring, row, newest % R, k @ basis.T, v)


def append_token(
    ring: LatentTokens, store: LatentTokens, latents: Tensor, values: Tensor, pos: Tensor, recent: int
) -> None:
    """Put a token a row, latents [B, rank of the ring] and values [B, n, D] at pos [B], into the ring of R slots.

    The token at pos - recent goes from the ring to the store, at the target ratio. Where there is none yet, what its
    slot holds goes to one of the store's last slots, which are of tokens that stay recent. With R = recent the new
    token takes its slot; with more slots it is still there after R - recent further tokens, so that those can be taken
    back: the same positions again then leave what they alone would.
    """
    lead, rest = store.latents
    _latent_append(latents, values, pos, ring.latents[0], *ring.coded(), lead, rest, *store.coded(), store.bits, recent)


def _whole_groups(latents: Tensor, values: Tensor, *rest: object) -> bool:
    return math.prod(values.shape[1:]) % GROUP == 0


@operation(
    cpp=_whole_groups,
    mutates=("ring_k", "ring_v", "ring_params", "lead", "rest", "v", "params"),
    reads=lambda latents, values, pos, ring_k, ring_v, ring_params, *_: {  # the token that goes to the store
        name: slots(len(pos), x, 1) for name, x in dict(ring_k=ring_k, ring_v=ring_v, ring_params=ring_params).items()
    },
)
def _latent_append(
    latents: Tensor, values: Tensor, pos: Tensor, ring_k: Tensor, ring_v: Tensor, ring_params: Tensor | None,
    lead: Tensor, rest: Tensor, v: Tensor, params: Tensor | None, bits: int, recent: int,
) -> None:  # fmt: skip
    width = math.prod(values.shape[1:])
    ring, store = latent_tokens((ring_k,), ring_v, ring_params, width), latent_tokens((lead, rest), v, params, width)
    R, T = ring_k.shape[1], lead.shape[1]
    row, old = torch.arange(len(pos), device=pos.device), pos - recent
    old_latents, old_values = read_tokens(ring, (old % R)[:, None])
    write_tokens(store, row, old % T, old_latents[:, 0], old_values[:, 0])
    write_tokens(ring, row, pos % R, latents, values.flatten(1))


# ---- a prompt's keys into the latent space ----

TILE, BLOCK_K = 128, 64  # 128 tokens by 128 coordinates: 64 accumulators a thread in 8 warps, 32 KB a stage
NUM_WARPS, NUM_STAGES = 8, 3


@triton.jit
def _project_kernel(
    x, basis, lengths, lead, rest, x_strides, lead_strides, rest_strides, S, tiles,
    WIDTH: tl.constexpr, LEAD: tl.constexpr, REST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (tile of coordinates, within a tile of tokens; row). The tiles of the same tokens run side by side."""
    pid_b = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) // tiles * BLOCK_T
    seq_len = tl.minimum(tl.load(lengths + pid_b), S).to(tl.int32)
    if first >= seq_len:
        return
    lo = tl.program_id(0) % tiles * BLOCK_R
    offs_t, offs_r, offs_k = first + tl.arange(0, BLOCK_T), lo + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    token = offs_t.to(tl.int64)
    acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for at in range(0, WIDTH, BLOCK_K):
        p_x = x + pid_b * x_strides[0] + token[:, None] * x_strides[1] + at + offs_k
        p_u, inside = basis + offs_r[:, None] * WIDTH + at + offs_k, at + offs_k < WIDTH
        b_x = tl.load(p_x, mask=(offs_t[:, None] < seq_len) & inside, other=0.0)
        b_u = tl.load(p_u, mask=(offs_r[:, None] < LEAD + REST) & inside, other=0.0)
        acc = dot(b_x, tl.trans(b_u), acc)
    coords, some = acc.to(lead.dtype.element_ty), offs_t[:, None] < seq_len
    if lo < LEAD:
        tl.store(lead + pid_b * lead_strides[0] + token[:, None] * LEAD + offs_r, coords, mask=some & (offs_r < LEAD))
    if lo + BLOCK_R > LEAD:
        to = rest + pid_b * rest_strides[0] + token[:, None] * REST + offs_r - LEAD
        tl.store(to, coords, mask=some & (offs_r >= LEAD) & (offs_r < LEAD + REST))


def tiles_of(itemsize: int) -> tuple[int, int]:
    """Tokens and coordinates of a tile; in fp32, with three products each, 128 by 128 would spill below cc 9."""
    return TILE, TILE // 2 if itemsize == 4 else TILE


@_project.triton
def _project_launch(
    x: Tensor, basis: Tensor, lengths: Tensor, lead: Tensor, rest: Tensor, tile: int | None = None
) -> None:
    """x [B, S, n*D]; tests give the size of a tile (a power of two >= 16)."""
    B, S, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    assert lead.is_contiguous() and rest.is_contiguous() and basis.is_contiguous()
    ranks, block_k = dict(LEAD=lead.shape[2], REST=rest.shape[2]), BLOCK_K * 2 // x.element_size()
    block_t, block_r = (tile, tile) if tile else tiles_of(x.element_size())
    tiles = triton.cdiv(sum(ranks.values()), block_r)
    _project_kernel[(triton.cdiv(S, block_t) * tiles, B)](
        x, basis, lengths.contiguous(), lead, rest, x.stride(), lead.stride(), rest.stride(), S, tiles,
        WIDTH=width, **ranks, BLOCK_T=block_t, BLOCK_R=block_r, BLOCK_K=min(block_k, block_r),
        **tuned("_project_kernel", num_warps=NUM_WARPS, num_stages=NUM_STAGES),
    )  # fmt: skip


# ---- one token ----

PART = 1024  # coordinates or channels of a program
APPEND_WARPS = 4


@triton.jit
def _move(new, ring, old, lead, rest, offs_c, RING: tl.constexpr, LEAD: tl.constexpr, REST: tl.constexpr):
    """Numbers offs_c [PART]: those at `old` go to lead and then rest, the new ones to `ring`, perhaps the same slot."""
    come = tl.load(new + offs_c, mask=offs_c < RING, other=0.0)
    leave = tl.load(old + offs_c, mask=offs_c < LEAD + REST, other=0.0)
    tl.debug_barrier()  # all is read before any is written
    tl.store(lead + offs_c, leave, mask=offs_c < LEAD)
    tl.store(rest + offs_c - LEAD, leave, mask=(offs_c >= LEAD) & (offs_c < LEAD + REST))
    tl.store(ring + offs_c, come.to(ring.dtype.element_ty), mask=offs_c < RING)


@triton.jit
def _move_coded(
    new, ring, ring_pairs, old, old_pairs, v, pairs, first,
    GROUPS: tl.constexpr, BITS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The same of groups of 32 channels, from `first` on: 8 words of 8-bit codes in the ring, BITS words in v."""
    offs_group, offs_w = first + tl.arange(0, PART), tl.arange(0, 8)
    offs_bits, offs_c = tl.arange(0, BITS), tl.arange(0, 32)
    real = offs_group[:, None] < GROUPS
    come = tl.load(new + offs_group[:, None] * 32 + offs_c, mask=real, other=0.0).to(tl.float32)
    words = tl.load(old + offs_group[:, None] * 8 + offs_w, mask=real, other=0)
    scale, zero = scale_zero(tl.load(old_pairs + offs_group, mask=offs_group < GROUPS, other=0))
    tl.debug_barrier()
    codes = tl.reshape((words[:, :, None] >> (tl.arange(0, 4) * 8)) & 255, [PART, 32]).to(tl.float32)
    # a code of 8 bits times a scale of 11 is exact in fp32: fused with the sum or not, the result is one
    words, pair = encode_groups(codes * scale[:, None] + zero[:, None], BITS)
    tl.store(v + offs_group[:, None] * BITS + offs_bits, words, mask=real)
    tl.store(pairs + offs_group, pair, mask=offs_group < GROUPS)
    words, pair = encode_groups(come, 8)
    tl.store(ring + offs_group[:, None] * 8 + offs_w, words, mask=real)
    tl.store(ring_pairs + offs_group, pair, mask=offs_group < GROUPS)


@triton.jit
def _append(
    latents, values, pos, ring_k, ring_v, ring_pairs, lead, rest, v, pairs, value_row, R, T, recent,
    RING_RANK: tl.constexpr, LEAD: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Program (row, part): PART coordinates, or PART channels of the values."""
    pid_b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(pos + pid_b)
    slot, old = pid_b * R + at % R, pid_b * R + (at - recent + R) % R  # recent <= R <= T
    left = pid_b * T + (at - recent + T) % T
    LATENT_PARTS: tl.constexpr = (RING_RANK + PART - 1) // PART
    GROUPS: tl.constexpr = WIDTH // 32
    values += pid_b * value_row
    if part < LATENT_PARTS:
        _move(latents + pid_b * RING_RANK, ring_k + slot * RING_RANK, ring_k + old * RING_RANK, lead + left * LEAD,
              rest + left * REST, part * PART + tl.arange(0, PART), RING_RANK, LEAD, REST)  # fmt: skip
    elif BITS == 16:
        to, offs_c = v + left * WIDTH, (part - LATENT_PARTS) * PART + tl.arange(0, PART)
        _move(values, ring_v + slot * WIDTH, ring_v + old * WIDTH, to, to, offs_c, WIDTH, WIDTH, 0)
    else:
        first = (part - LATENT_PARTS) * (PART // 32)
        _move_coded(values, ring_v + slot * GROUPS * 8, ring_pairs + slot * GROUPS, ring_v + old * GROUPS * 8,
                    ring_pairs + old * GROUPS, v + left * GROUPS * BITS, pairs + left * GROUPS, first,
                    GROUPS, BITS, PART // 32)  # fmt: skip


@_latent_append.triton(serves=_whole_groups)
def _append_launch(
    latents: Tensor, values: Tensor, pos: Tensor,
    ring_k: Tensor, ring_v: Tensor, ring_params: Tensor | None,
    lead: Tensor, rest: Tensor, v: Tensor, params: Tensor | None, bits: int, recent: int,
    part: int = PART,
) -> None:  # fmt: skip
    """The Triton version of `append_token`; tests give the size of a part (a power of two >= 32)."""
    values = values.flatten(1)
    rank, width = ring_k.shape[2], values.shape[1]
    tensors = (ring_k, ring_v, ring_params, lead, rest, v, params)
    assert all(x is None or x.is_contiguous() for x in tensors) and values.stride(1) == 1
    if ring_params is not None and params is not None:
        ring_v, ring_params, v, params = (x.view(torch.int32) for x in (ring_v, ring_params, v, params))
    _append[(len(pos), triton.cdiv(rank, part) + triton.cdiv(width, part))](
        latents.contiguous(), values, pos.contiguous(), ring_k, ring_v, ring_params, lead, rest, v, params,
        values.stride(0), ring_k.shape[1], lead.shape[1], recent,
        RING_RANK=rank, LEAD=lead.shape[2], REST=rest.shape[2], WIDTH=width, BITS=bits, PART=part,
        **tuned("_append", num_warps=APPEND_WARPS),
    )  # fmt: skip
