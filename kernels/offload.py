"""Moving tokens from host memory to the device while the device computes.

On a GPU the host's K and V are pinned and mapped: under unified addressing the device reads and writes them at the same
address, over the bus. `host_buffer` hands them out as device tensors, so that a prompt is stored with plain copies, a
step is one static graph that a CUDA graph can capture, and `fetch_rows` gathers the chosen rows without a staging copy.
On a CPU, host and device are one memory and the same code copies rows.

The Triton kernel of `fetch_rows` loads rows of pinned memory like any others; its task is to keep the bus full while
the layer before computes. PCIe 5 x16 moves 64 GB/s and answers a read in 1 to 2 us, later when it is busy: 128 KB must
be in flight at any time. A program has ROWS rows of both K and V in flight, 16 KB at D = 128 in bf16 in loads of 16
bytes, before it stores any, and so waits for the bus most of the time: PROGRAMS = 32 of them have 512 KB in flight,
four times what a quiet bus needs. They take 4 warps each on a quarter of an H100's multiprocessors; more of them would
fetch no faster, and take issue slots and registers from the compute stream.
"""

from __future__ import annotations

import functools
import math
import mmap
import weakref

import torch
from torch import Tensor

from kernels.backend import tl, triton, version_for
from kernels.dense_attention import masked_attention
from kernels.native import in_huge_pages
from kernels.op import operation, picked, whole_vectors
from kernels.packed_gather_attention import FullPrecisionTokens, PackedTokens, packed_gather_attention
from kernels.ring import ring_positions
from kernels.tuned import tuned

PROGRAMS = 32  # programs of a fetch, whatever its size
TILE_BYTES, MAX_ROWS = 8192, 64  # bytes and rows of K or V that a program has in flight


@operation(
    opaque=True,
    mutates=("asked", "out_k", "out_v"),
    reads=lambda host_k, host_v, idx, *_: dict(host_k=picked(idx, host_k), host_v=picked(idx, host_v)),
)
def fetch_rows(
    host_k: Tensor, host_v: Tensor, idx: Tensor, after: Tensor, asked: Tensor, out_k: Tensor, out_v: Tensor
) -> None:
    """Start to copy rows idx of K and V to the device, where they may be read after `await_rows`.

    host_k and host_v [>= B, H, T, D] from `host_buffer`, idx [B, H, K] int64, out_k and out_v [>= B, H, K, D]. A
    negative index asks for nothing: its row of the output may hold anything. The rows must have been written before,
    and may not change until `await_rows`. asked [>= B, H, K] int64, a buffer that outlives a step, gets idx, and the
    copy reads only it: a compiled graph frees idx, a temporary of its own, while the copy is in flight. after: any
    result of what last read the outputs; a compiled graph that fetched before it would copy them first.
    """
    (_fetch_rows_cpu if idx.device.type == "cpu" else _fetch_rows_cuda)(host_k, host_v, idx, asked, out_k, out_v)


@operation(opaque=True, mutates=("asked", "out_k", "out_v"))
def await_rows(asked: Tensor, out_k: Tensor, out_v: Tensor) -> None:
    """Wait for the last `fetch_rows` to these buffers: what is computed from them after this sees its rows.

    All three are declared as written here, so that a compiled graph reads them after it, and fetches again after that.
    """
    if asked.device.type != "cpu":
        torch.cuda.current_stream(asked.device).wait_event(_arrival(asked.device, out_k.data_ptr()))


def fetched_attention(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, count: Tensor, ring_k: Tensor, ring_v: Tensor, pos: Tensor
) -> Tensor:
    """One query per row over the tokens that were fetched and the newest ones, under one softmax.

    q [B, Hq, D]; k and v [>= B, H, K, D], the first count [B, H] of them fetched, idx [B, H, K], -1 past the count;
    ring_k and ring_v [>= B, H, R, D] with the token at position p in slot p % R, up to pos [B] -> [B, Hq, D]. Other
    slots may hold anything.
    """
    B, H, K = idx.shape
    version = version_for(q.device, q.dtype)
    if version == "triton" or (version == "cpp" and whole_vectors(q)):
        # both are read where they are: the list is 0, 1, ..., and a ring of decoded tokens is one of a prompt of none
        none, slots = torch.zeros_like(pos), torch.arange(K, device=q.device).expand(B, H, K)
        whole = FullPrecisionTokens(ring_k[:, :, :0], ring_v[:, :, :0], ring_k, ring_v)
        return packed_gather_attention(q, slots, count, PackedTokens(k, v, 16), whole, pos, none, none[:1])
    in_ring = ring_positions(pos, ring_k.shape[2]) >= 0
    keys, values = torch.cat((k[:B], ring_k[:B]), 2), torch.cat((v[:B], ring_v[:B]), 2)
    return masked_attention(q, keys, values, torch.cat((idx >= 0, in_ring[:, None].expand(B, H, -1)), 2))


# ---- the copy in Triton ----


@triton.jit
def _fetch(
    host_k, host_v, idx, out_k, out_v, n, K, T, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rows of one shape out of host memory, a tile of them by turns of the programs; n = B * H * K entries of idx."""
    offs_row, offs_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        entry = first + offs_row
        slot = tl.load(idx + entry, mask=entry < n, other=-1)
        real = (slot >= 0)[:, None] & (offs_d < D)
        source = ((entry // K).to(tl.int64) * T + slot)[:, None] * D + offs_d
        to = entry.to(tl.int64)[:, None] * D + offs_d
        # past L1, where nothing comes to be read again; both before the first store, so that both are on the way
        b_k = tl.load(host_k + source, mask=real, other=0.0, cache_modifier=".cg")
        b_v = tl.load(host_v + source, mask=real, other=0.0, cache_modifier=".cg")
        tl.store(out_k + to, b_k, mask=real)
        tl.store(out_v + to, b_v, mask=real)


def rows_of(D: int, itemsize: int) -> int:
    """Rows of K and of V that a program has in flight."""
    return max(1, min(MAX_ROWS, TILE_BYTES // (triton.next_power_of_2(D) * itemsize)))


def launch(
    host_k: Tensor,
    host_v: Tensor,
    idx: Tensor,
    out_k: Tensor,
    out_v: Tensor,
    programs: int = PROGRAMS,
    rows: int | None = None,
) -> None:
    """The Triton version of the copy, on the current stream; tests give the number of programs and their rows."""
    T, D = host_k.shape[2:]
    assert all(x.is_contiguous() for x in (host_k, host_v, idx, out_k, out_v)), "rows are numbered through all heads"
    rows = rows or rows_of(D, host_k.element_size())
    _fetch[(min(programs, triton.cdiv(idx.numel(), rows)),)](
        host_k, host_v, idx, out_k, out_v, idx.numel(), idx.shape[2], T,
        D=D, BLOCK_D=triton.next_power_of_2(D), ROWS=rows, **tuned("_fetch", num_warps=4, num_stages=1),
    )  # fmt: skip


# ---- CPU: plain copies ----


def _flat_rows(idx: Tensor, T: int) -> Tensor:
    """idx [B, H, K] of slots -> [B * H * K] row numbers of a flattened [>= B, H, T, ...]; -1 becomes slot 0."""
    B, H, _ = idx.shape
    return (idx.clamp(min=0) + torch.arange(B * H, device=idx.device).view(B, H, 1) * T).flatten()


def _fetch_rows_cpu(host_k: Tensor, host_v: Tensor, idx: Tensor, asked: Tensor, out_k: Tensor, out_v: Tensor) -> None:
    asked = asked[: len(idx)].copy_(idx)
    if version_for(asked.device, asked.dtype) == "triton":
        return launch(host_k, host_v, asked, out_k, out_v)
    rows, into = _flat_rows(asked, host_k.shape[2]), (asked >= 0).flatten().nonzero()[:, 0]
    for host, out in ((host_k, out_k), (host_v, out_v)):
        D = host.shape[-1]
        out.view(-1, D).index_copy_(0, into, host.view(-1, D).index_select(0, rows[into]))


# ---- CUDA: a side stream ----


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _arrival(device: torch.device, address: int) -> torch.cuda.Event:
    """The event of a copy into the buffer at `address`: the two halves of a double buffer are in flight at once.

    It belongs to the device of the stream on which it is first recorded."""
    return torch.cuda.Event()


def _fetch_rows_cuda(host_k: Tensor, host_v: Tensor, idx: Tensor, asked: Tensor, out_k: Tensor, out_v: Tensor) -> None:
    """Nothing waits on the host, and only streams wait on streams: fork and join are captured into a CUDA graph.

    The side stream waits for the compute stream's work so far: `asked` is written, the layer that used this half of
    the double buffer has attended, and its rows of K and V are in host memory. The compute stream then goes on with the
    layer before, and decode joins the side stream by the event recorded here (`await_rows`) before it attends.
    """
    side, B = _side_stream(idx.device), len(idx)
    asked = asked[:B].copy_(idx)
    side.wait_stream(torch.cuda.current_stream(idx.device))
    with torch.cuda.stream(side):
        # temporaries belong to the side stream's pool, and all else are buffers: no record_stream is needed
        if version_for(asked.device, asked.dtype) == "triton":
            launch(host_k, host_v, asked, out_k, out_v)
        else:
            rows = _flat_rows(asked, host_k.shape[2])
            for host, out in ((host_k, out_k), (host_v, out_v)):
                D = host.shape[-1]
                torch.index_select(host.view(-1, D), 0, rows, out=out[:B].view(-1, D))
        _arrival(idx.device, out_k.data_ptr()).record(side)


# ---- host memory ----


PORTABLE, MAPPED = 1, 2  # cudaHostRegister: for all devices, in their address space


class _Mapped:
    """Pinned bytes of the host, described to torch as memory of the device; torch keeps this object while in use.

    It maps exactly the pages it needs: torch's allocator of pinned memory rounds each buffer up to a power of two,
    which no memory check has counted.
    """

    def __init__(self, nbytes: int, device: torch.device):
        self.host = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # zeros
        at, cuda = self.host.data_ptr(), torch.cuda.cudart()
        with torch.cuda.device(device):
            torch.cuda.check_error(cuda.cudaHostRegister(at, nbytes, PORTABLE | MAPPED))
        weakref.finalize(self, cuda.cudaHostUnregister, at)  # before the pages go
        self.__cuda_array_interface__ = dict(shape=(nbytes,), typestr="|u1", data=(at, False), version=3)


def host_buffer(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the memory of the host that kernels of `device` can read and write: a tensor of that device."""
    if device.type != "cuda":
        return in_huge_pages(torch.empty(size, dtype=dtype, device=device)).zero_()
    pinned = _Mapped(math.prod(size) * dtype.itemsize, device)
    return torch.as_tensor(pinned, device=device).view(dtype).view(size)
