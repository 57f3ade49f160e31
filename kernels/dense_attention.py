"""Exact attention: causal over a prompt (prefill), and one query per row over the filled slots of a cache (decode).

The torch versions here are the reference for every kernel that computes the same thing. `decode_attention` is a
registered operator, so that a compiled graph calls it with fixed shapes while it reads filled slots alone.

The Triton kernel cuts the slots of all rows and heads, laid end to end, into as many equal shares as the card holds
programs: a long row among short ones gets most of them, where a fixed number of splits per row would leave most idle.
The lengths are read on the GPU; the grid depends on sizes alone. A program holds the query heads of one KV head as a
tile, so that K and V are read once, 2 * D * slots elements; where its share crosses from one head to the next, it
writes another partial output, (D + 1) * g fp32 numbers, which a second kernel reduces. Even one query head is padded
to the 16 rows of a tensor-core tile: an mma of 8 slots and 16 channels replaces 8 instructions that convert and
multiply-add loaded values, and memory is what bounds decode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.backend import tl, triton
from kernels.op import operation, whole_vectors
from kernels.splits import COMBINE_D, blocks_of, multiprocessors
from kernels.tiles import LOG2_E, dot
from kernels.tuned import tuned

QUERY_BLOCK = 1024  # queries per call under a sliding window: bounds the mask to QUERY_BLOCK x (QUERY_BLOCK + window)
CUDNN_FROM = 4096  # tokens of a prompt: cuDNN is faster on Hopper, but makes a plan for every length it has not seen


Sees = Callable[[Tensor, Tensor], Tensor]  # positions of queries [n, 1] and of keys [m] -> bool [n, m]


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    lengths: Tensor | None = None,
    sees: Sees | None = None,
) -> Tensor:
    """Causal attention of a prompt over itself; `window` keeps the last `window` keys, the query's own included.

    q [B, Hq, n, D], k and v [B, Hkv, S, D] (rotated) -> [B, Hq, n, D]. Scale 1/sqrt(D). K and V are not repeated. The
    queries are those of the last n of the S tokens: all of them, or a chunk after others. sees: which earlier keys a
    query attends to, at least one.
    lengths [B] of right-padded prompts: outputs past them may be anything. On a CPU each prompt is then computed by
    itself and gives what it gives alone: torch cuts longer ones into other blocks, whose sums round differently.
    """
    ends = lengths.tolist() if lengths is not None and q.device.type == "cpu" and len(q) > 1 else []
    S, before = k.shape[2], k.shape[2] - q.shape[2]
    if ends and min(ends) < S:
        out = torch.zeros_like(q)
        for b, n in enumerate(ends):
            if n > before:
                one, row, keys = slice(b, b + 1), slice(n - before), slice(n)
                out[one, :, row] = prefill_attention(
                    q[one, :, row], k[one, :, keys], v[one, :, keys], window, None, sees
                )
        return out
    attend = _attend_on(q)
    if not before and sees is None and (window is None or window >= S):
        return attend(q, k, v)
    out = torch.empty_like(q)
    for i in range(before, S, QUERY_BLOCK):
        j, lo = min(i + QUERY_BLOCK, S), 0 if window is None else max(0, i - window + 1)
        rows, cols = torch.arange(i, j, device=q.device)[:, None], torch.arange(lo, j, device=q.device)[None]
        mask = cols <= rows
        if window is not None:
            mask &= cols > rows - window
        if sees is not None:
            mask &= sees(rows, cols)
        of = slice(i - before, j - before)
        out[:, :, of] = attend(q[:, :, of], k[:, :, lo:j], v[:, :, lo:j], mask)
    return out


def attend_where(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention under a mask [B, n, S] for each row, True where a query sees a key: at least one, and all finite.

    q [B, Hq, n, D], k and v [B, Hkv, S, D] (rotated) -> [B, Hq, n, D].
    """
    return _attend_on(q)(q, k, v, mask[:, None])


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention under a mask [queries, keys], True where a query sees a key, or causal; by any backend of SDPA."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)


def _attend_on(q: Tensor) -> Callable[..., Tensor]:
    """`_attend`, or on a GPU `fused_attention` with the backends that the card has."""
    if not q.is_cuda:
        return _attend
    card, long = torch.cuda.get_device_capability(q.device), q.shape[2] >= CUDNN_FROM
    return functools.partial(fused_attention, flash=card >= (8, 0), cudnn=card >= (9, 0) and long)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, flash: bool = True, cudnn: bool = False
) -> Tensor:
    """`_attend` on a GPU, never by SDPA's math backend, which writes all weights, queries times keys, to memory.

    FlashAttention takes groups of query heads, but neither fp32 nor a mask; the memory-efficient backend takes both,
    but no groups. With it, the first heads of all groups go in one call, the second ones in another, and K and V are
    not copied. flash: whether the card has FlashAttention; cudnn: its backend is tried first.
    """
    flash = flash and mask is None and q.dtype != torch.float32 and q.shape[3] <= 256
    order = [SDPBackend.CUDNN_ATTENTION] * cudnn + [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        if flash or q.shape[1] == k.shape[1]:
            return _attend(q, k, v, mask)
        parts = [_attend(heads, k, v, mask) for heads in q.unflatten(1, (k.shape[1], -1)).unbind(2)]
        return torch.stack(parts, 2).flatten(1, 2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """One query per row over T slots, some of which are masked and may hold anything, NaN included. Logits in fp32.

    q [B, Hq, D], k and v [B, Hkv, T, D] (rotated), mask [B, 1 or Hkv, T] bool, True = attend -> [B, Hq, D].
    bias: what is added to the products q . k before they are scaled, fp32 [B, Hq, T].
    """
    B, Hq, D = q.shape
    Hkv = k.shape[1]
    scores = q.view(B, Hkv, Hq // Hkv, D).float() @ k.float().mT  # [B, Hkv, g, T]
    if bias is not None:
        scores = scores + bias.view(scores.shape)
    scores = scores * D**-0.5
    scores = torch.where(mask[:, :, None], scores, float("-inf"))
    # 0 * NaN is NaN: values of masked slots must not reach the product
    y = scores.softmax(-1).to(v.dtype) @ v.masked_fill(~mask[..., None], 0)
    return y.view(B, Hq, D)


# ---- one query per row over a range of slots: the kernels, which packed_attention also uses ----

# A tile of K or V is 16 KB. Three stages keep two blocks of both in flight, 64 KB of shared memory a program: what
# covers the memory's latency on an H100 (about 20 KB per multiprocessor) several times, and three programs fit.
TILE_BYTES = 16384
NUM_STAGES = 3


@triton.jit
def _blocks(start, stop, rows, B, BLOCK_N: tl.constexpr):
    """Where the slots of `rows` begin and end, and how many blocks they are; none count as one, which writes zeros."""
    lo = rows * 0
    if start is not None:
        lo = tl.maximum(tl.load(start + rows, mask=rows < B, other=0).to(tl.int32), 0)
    hi = tl.load(stop + rows, mask=rows < B, other=0).to(tl.int32)
    return lo, hi, tl.where(rows < B, tl.maximum(tl.cdiv(hi - lo, BLOCK_N), 1), 0)


@triton.jit
def _split_attention(
    q, k, v, start, stop, mean_k, mean_v, count, part, lse, q_strides, k_strides, v_strides, B, H,
    G: tl.constexpr, D: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr = 1,
):  # fmt: skip
    """Program pid: blocks pid * share to (pid + 1) * share of the sequence (row, KV head, block), attention of each KV
    head's G query heads over those of its blocks that are among them. Of TOKENS that follow each other
    (`verify_attention`) each is a query head of its own, and sees what the first one sees, moved by its place."""
    pid = tl.program_id(0)
    offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    SCALE: tl.constexpr = D**-0.5 * LOG2_E  # exp2 is the hardware's: logits are in units of log 2

    rows = tl.arange(0, BLOCK_B)
    _, _, blocks = _blocks(start, stop, rows, B, BLOCK_N)
    total = tl.sum(blocks) * H
    share = tl.cdiv(total, tl.num_programs(0))
    at = pid * share
    end = tl.minimum(total, at + share)
    off_b = tl.sum((tl.cumsum(blocks) * H <= at).to(tl.int32))  # rows that end before the share
    at_row = tl.sum(tl.where(rows < off_b, blocks, 0)) * H
    _, _, n_blocks = _blocks(start, stop, tl.minimum(off_b, B - 1), B, BLOCK_N)
    off_h = (at - at_row) // n_blocks
    while at < end:
        lo, hi, n_blocks = _blocks(start, stop, off_b, B, BLOCK_N)
        first_block = at - at_row - off_h * n_blocks
        token = offs_g % TOKENS
        seen_from, seen_to = token, hi - (TOKENS - 1) + token
        if start is not None:
            seen_from += tl.load(start + off_b).to(tl.int32)  # a window may begin before the text
        past = tl.minimum(n_blocks, first_block + end - at)  # the head's blocks, or what is left of the share
        at += past - first_block
        hi = tl.minimum(hi, lo + past * BLOCK_N)
        lo += first_block * BLOCK_N

        row, off_bh = off_b.to(tl.int64), off_b.to(tl.int64) * H + off_h
        head, real = off_h * G + offs_g, (offs_g[:, None] < G) & (offs_d < D)
        b_q = tl.load(q + row * q_strides[0] + head[:, None] * q_strides[1] + offs_d, mask=real, other=0.0)
        b_q = b_q.to(k.dtype.element_ty)
        if count is not None:  # one token more, beside the first block; loaded here so that the loop hides the latency
            extra_k = tl.load(mean_k + off_bh * D + offs_d, mask=offs_d < D, other=0.0)
            extra_v = tl.load(mean_v + off_bh * D + offs_d, mask=offs_d < D, other=0.0)
            many = tl.load(count + off_b).to(tl.float32)

        far = off_bh - row * H  # the head in 64 bits
        k_base = k + row * k_strides[0] + far * k_strides[1]
        v_base = v + row * v_strides[0] + far * v_strides[1]
        m_i = tl.full([BLOCK_G], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for first in range(lo, hi, BLOCK_N):
            slot = (first + offs_n).to(tl.int64)
            # other slots may hold NaN: not even their values are loaded
            inside = (first + offs_n < hi)[:, None] & (offs_d < D)
            b_k = tl.load(k_base + slot[:, None] * k_strides[2] + offs_d, mask=inside, other=0.0)
            b_v = tl.load(v_base + slot[:, None] * v_strides[2] + offs_d, mask=inside, other=0.0)
            logits = dot(b_q, tl.trans(b_k)) * SCALE
            logits = tl.where((first + offs_n < hi)[None, :], logits, float("-inf"))
            if TOKENS > 1:
                seen = (first + offs_n)[None, :] < seen_to[:, None]
                if start is not None:
                    seen = seen & ((first + offs_n)[None, :] >= seen_from[:, None])
                logits = tl.where(seen, logits, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(logits, 1))  # finite: a block starts at a slot that is inside
            base = tl.where(m_new == float("-inf"), 0.0, m_new) if TOKENS > 1 else m_new  # but not for every token
            p, shrink = tl.exp2(logits - base[:, None]), tl.exp2(m_i - base)
            l_i = l_i * shrink + tl.sum(p, 1)
            acc = dot(p.to(b_v.dtype), b_v, acc * shrink[:, None])
            m_i = m_new

        if count is not None:
            some = (many > 0) & (first_block == 0)
            logit = tl.sum(b_q.to(tl.float32) * extra_k, 1) * SCALE
            logit = tl.where(some, logit + tl.log2(tl.maximum(many, 1.0)), float("-inf"))  # RazorAttention, Eq. 5
            m_new = tl.maximum(m_i, logit)
            base = tl.where(m_new == float("-inf"), 0.0, m_new)  # neither slots nor the extra token
            p, shrink = tl.exp2(logit - base), tl.exp2(m_i - base)
            l_i = l_i * shrink + p
            acc = acc * shrink[:, None] + p[:, None] * tl.where(some, extra_v, 0.0)[None, :]
            m_i = m_new

        l_i = tl.maximum(l_i, 1e-30)
        # pid and the head never fall, and one of them rises from a part to the next: their sum numbers the parts
        to = (pid + off_bh) * G + offs_g
        tl.store(part + to[:, None] * D + offs_d, acc / l_i[:, None], mask=real)
        tl.store(lse + to, m_i + tl.log2(l_i), mask=offs_g < G)
        off_h += 1
        if off_h == H:
            off_b, off_h, at_row = off_b + 1, 0, at


@triton.jit
def _combine_shares(
    part, lse, out, start, stop, P, B, H,
    G: tl.constexpr, D: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (query head of a row, channels): the mean of its parts, which lie one behind the other in `part`."""
    head, rows = tl.program_id(0), tl.arange(0, BLOCK_B)
    pid_bh = head // G
    pid_b, pid_h = pid_bh // H, pid_bh % H
    _, _, blocks = _blocks(start, stop, rows, B, BLOCK_N)
    share = tl.cdiv(tl.sum(blocks) * H, P)
    mine = tl.sum(tl.where(rows == pid_b, blocks, 0))
    first = tl.sum(tl.where(rows < pid_b, blocks, 0)) * H + pid_h * mine
    lo, hi = first // share + pid_bh, (first + mine - 1) // share + pid_bh + 1

    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_i, l_i, acc = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    for i in range(lo, hi, BLOCK_S):
        at = (i + offs_s).to(tl.int64) * G + head % G
        weight = tl.load(lse + at, mask=i + offs_s < hi, other=float("-inf"))
        b_o = tl.load(part + at[:, None] * D + offs_d, mask=(i + offs_s < hi)[:, None] & (offs_d < D), other=0.0)
        m_new = tl.maximum(m_i, tl.max(weight))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row without tokens
        weight, shrink = tl.exp2(weight - base), tl.exp2(m_i - base)
        acc = acc * shrink + tl.sum(b_o * weight[:, None], 0)
        l_i = l_i * shrink + tl.sum(weight)
        m_i = m_new
    acc /= tl.maximum(l_i, 1e-30)
    tl.store(out + head.to(tl.int64) * D + offs_d, acc.to(out.dtype.element_ty), mask=offs_d < D)


PROGRAMS = 2  # a multiprocessor: what shared memory lets every card since the A100 hold
COMBINE_S = 64  # most parts that one step of the reduction takes


def _config(G: int, D: int, itemsize: int, B: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and launch options for B rows, groups of G query heads, head_dim D, K and V of `itemsize` bytes."""
    tile = blocks_of(G, 1, D)
    row = tile["BLOCK_D"] * itemsize
    warps = 4 if tile["BLOCK_G"] * row <= 8192 else 8  # four would spill: every warp holds all of the queries
    constants = tile | dict(BLOCK_B=triton.next_power_of_2(B), BLOCK_N=min(128, max(16, TILE_BYTES // row)))
    return constants, dict(num_warps=warps, num_stages=NUM_STAGES)


def _combine_config(constants: dict[str, int], groups: int, programs: int) -> tuple[dict[str, int], dict[str, int]]:
    """Launch options of the reduction: rows of equal length take one step, a long one among short ones several."""
    parts = triton.cdiv(programs, groups) + 1
    own = dict(BLOCK_D=COMBINE_D, BLOCK_S=min(COMBINE_S, triton.next_power_of_2(parts)))
    return {a: x for a, x in (constants | own).items() if a != "BLOCK_G"}, dict(num_warps=2, num_stages=1)


def _programs(groups: int, n: int, block: int, device: torch.device) -> int:
    """The number of programs that share `groups` heads of up to n slots: what the card holds, if each has a block."""
    return min(PROGRAMS * multiprocessors(device), groups * max(1, triton.cdiv(n, block)))


def split_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stop: Tensor,
    start: Tensor | None = None,
    mean: tuple[Tensor, Tensor, Tensor] | None = None,
    block: int | None = None,
    programs: int | None = None,
    tokens: int = 1,
) -> Tensor:
    """The Triton version of `decode_attention` and, with mean = (mean_k, mean_v, count), of `packed_attention`.

    tokens: the number of tokens of each head in q, one after another (`verify_attention`); stop is where the slots of
    the last one end. block (slots, a power of two >= 16) and programs follow from the sizes unless tests give them.
    """
    B, Hq, D = q.shape
    H, T = k.shape[1:3]
    assert q.stride(2) == k.stride(3) == v.stride(3) == 1, "channels must be contiguous"
    constants, options = _config(Hq // H, D, k.element_size(), B)
    options = tuned("_split_attention", BLOCK_N=block or constants["BLOCK_N"], **options)
    constants["BLOCK_N"] = block = options.pop("BLOCK_N")
    programs = programs or _programs(B * H, T, block, q.device)
    parts = programs + B * H - 1  # a program's share ends, or a head does
    part = torch.empty(parts, Hq // H, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts, Hq // H, dtype=torch.float32, device=q.device)
    out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    mean_k, mean_v, count = (x.contiguous() for x in mean) if mean else (None, None, None)
    start, stop = None if start is None else start.contiguous(), stop.contiguous()
    _split_attention[(programs,)](
        q, k, v, start, stop, mean_k, mean_v, count, part, lse, q.stride(), k.stride(), v.stride(), B, H,
        **constants, TOKENS=tokens, **options,
    )  # fmt: skip
    constants, options = _combine_config(constants, B * H, programs)
    grid = (B * Hq, triton.cdiv(D, COMBINE_D))
    _combine_shares[grid](
        part, lse, out, start, stop, programs, B, H, **constants, **tuned("_combine_shares", **options)
    )
    return out


# ---- the operator ----


@operation(cpp=whole_vectors, opaque=True)
def decode_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor) -> Tensor:
    """One query per row over slots start <= t < stop of its row; start None: 0, with no tensor of zeros to read.

    q [B, Hq, D], k and v [B, Hkv, T, D] (rotated), start and stop [B] int64 -> [B, Hq, D]. Scale 1/sqrt(D).
    """
    return (_decode_attention_cpu if q.device.type == "cpu" else _decode_attention_masked)(q, k, v, start, stop)


@decode_attention.triton
def _(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor) -> Tensor:
    return split_attention(q, k, v, stop, start)


def _decode_attention_cpu(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor) -> Tensor:
    """Read filled slots only: in one call if all rows have the same, otherwise row by row."""
    B, Hq, D = q.shape
    grouped = q.reshape(B, k.shape[1], -1, D)  # the group's queries stand where SDPA expects query positions
    spans = list(zip([0] * B if start is None else start.tolist(), stop.tolist(), strict=True))
    if len(set(spans)) == 1:
        lo, hi = spans[0]
        return F.scaled_dot_product_attention(grouped, k[:B, :, lo:hi], v[:B, :, lo:hi]).reshape(B, Hq, D)
    rows = [
        F.scaled_dot_product_attention(grouped[b : b + 1], k[b : b + 1, :, lo:hi], v[b : b + 1, :, lo:hi])
        for b, (lo, hi) in enumerate(spans)
    ]
    return torch.cat(rows).reshape(B, Hq, D)


def _decode_attention_masked(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor) -> Tensor:
    """On a GPU no length may reach the host: every slot is read and masked."""
    t = torch.arange(k.shape[2], device=q.device)
    mask = t < stop[:, None]
    if start is not None:
        mask &= t >= start[:, None]
    return masked_attention(q, k[: len(q)], v[: len(q)], mask[:, None])
