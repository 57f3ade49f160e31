"""What the functions of the library are called with; shapes as in the files of kernels/ of the same names.

What a decode step calls for every layer are operators of torch in C++ (operators.cpp), whose arguments are checked
there; the rest is called through ctypes, which costs 15 us and as much again for the checks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.native import build

VECTOR = 16  # floats: rows are read in whole vectors
RANKS = 32  # coordinates that bases are multiplied with at a time
DTYPES = (torch.float32, torch.bfloat16)
_NO_ELEMENTS = ctypes.create_string_buffer(64)


def call(name: str, *args: Tensor | int | None) -> None:
    """Call a function of the library with pointers to the data of tensors, and int64; and the number of threads."""
    # the pointer of a tensor without elements is null, which means that there is no tensor
    given = [ctypes.c_void_p(x.data_ptr() or ctypes.addressof(_NO_ELEMENTS)) if isinstance(x, Tensor)
             else None if x is None else ctypes.c_int64(x) for x in (*args, torch.get_num_threads())]  # fmt: skip
    getattr(build.library(), name)(*given)


def is_bf16(*tensors: Tensor | None) -> int:
    """0 or 1, of tensors of one dtype."""
    some = {x.dtype for x in tensors if x is not None}
    assert len(some) == 1 and some <= {*DTYPES}, f"one of {DTYPES} is needed, not {some}"
    return int(torch.bfloat16 in some)


def expect(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """What C++ takes for granted: it would read other memory, and not notice."""
    for x in tensors:
        if x is not None and (x.dtype != dtype or x.device.type != "cpu"):
            raise TypeError(f"a tensor of {dtype} on the CPU is needed, not of {x.dtype} on {x.device}")


def whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


# ---- operators in C++ ----

_lib = torch.library.Library("kv_fast_cpp", "DEF")
_SCHEMAS: dict[str, tuple[str, Callable[..., Any]]] = {
    "decode_attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor? start, Tensor stop, Tensor? mean_k, Tensor? mean_v, Tensor? count) "
        "-> Tensor",
        lambda q, *rest: q.new_empty(q.shape),
    ),
    "gather_attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor idx, Tensor count) -> Tensor",
        lambda q, *rest: q.new_empty(q.shape),
    ),
    "packed_gather_attention": (
        "(Tensor q, Tensor idx, Tensor count, Tensor k, Tensor v, Tensor? k_params, Tensor? v_params, Tensor? alpha, "
        "Tensor? codes, Tensor sink_k, Tensor sink_v, Tensor tail_k, Tensor tail_v, Tensor pos, Tensor prompt_len, "
        "Tensor flushed, int bits) -> Tensor",
        lambda q, *rest: q.new_empty(q.shape),
    ),
    "select": (
        "(Tensor scores, Tensor? mask, Tensor? pos, Tensor wanted, int k, int sinks, int recent) -> (Tensor, Tensor)",
        lambda scores, mask, pos, wanted, k, sinks, recent: _lists(scores, k),
    ),
    "lut_score": (
        "(Tensor q, Tensor book, Tensor packed, Tensor? pos, Tensor? skip) -> Tensor",
        lambda q, book, packed, pos, skip: _scores(packed, packed.shape[2], 2),
    ),
    "label_score": (
        "(Tensor q, Tensor labels, Tensor params, int bits, Tensor? pos) -> Tensor",
        lambda q, labels, params, bits, pos: _scores(labels[: len(q)], labels.shape[2], 2),
    ),
    "store_labels": (
        "(Tensor k, Tensor channels, Tensor? start, Tensor(a!) labels, Tensor(b!) params, int bits) -> ()",
        lambda *args: None,
    ),
    "head_scores": ("(Tensor q, Tensor x, Tensor? pos) -> Tensor", lambda q, x, pos: _scores(q, x.shape[2])),
    "channel_score": (
        "(Tensor q, Tensor channels, Tensor keys, Tensor pos) -> Tensor",
        lambda q, channels, keys, pos: _scores(q, keys.shape[3]),
    ),
    "latent_append": (
        "(Tensor latents, Tensor values, Tensor pos, Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor(c!)? ring_params, "
        "Tensor(d!) lead, Tensor(e!) rest, Tensor(f!) v, Tensor(g!)? params, int bits) -> ()",
        lambda *args: None,
    ),
    "latent_attention": (
        "(Tensor q, Tensor basis, Tensor ring_k, Tensor ring_v, Tensor? ring_params, Tensor lead, Tensor rest, "
        "Tensor v, Tensor? params, Tensor pos, Tensor? idx, Tensor? count, Tensor cos, Tensor sin, int ring_bits, "
        "int bits) -> Tensor",
        lambda q, *rest: q.new_empty(q.shape),
    ),
    "quantized_append": (
        "(Tensor x, Tensor pos, Tensor(a!) whole, Tensor(b!) data, Tensor(c!)? params, int bits, int sinks, "
        "int block, float clip) -> ()",
        lambda *args: None,
    ),
    "quantized_attention": (
        "(Tensor q, Tensor k, Tensor? k_params, Tensor k_whole, Tensor v, Tensor? v_params, Tensor v_whole, "
        "Tensor pos, Tensor k_stop, Tensor v_stop, int sinks, int k_bits, int v_bits, bool channels) -> Tensor",
        lambda q, *rest: q.new_empty(q.shape),
    ),
    "lowrank_attention": (
        "(Tensor q, Tensor k_lat, Tensor v_lat, Tensor k_basis, Tensor v_basis, Tensor stored, Tensor k_full, "
        "Tensor v_full, Tensor filled) -> Tensor",
        lambda q, *rest: q.new_empty(q.shape),
    ),
    "dense_linear": (
        "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
        lambda x, weight, bias: x.new_empty(len(x), len(weight)),
    ),
    "group_attention": (
        "(Tensor q, Tensor k, Tensor? k_params, Tensor v, Tensor? v_params, Tensor k_basis, Tensor v_basis, "
        "Tensor k_bias, Tensor v_bias, Tensor pos, Tensor cos, Tensor sin, int bits) -> Tensor",
        lambda q, *rest: q.new_empty(q.shape),
    ),
    "linear": (
        "(Tensor x, Tensor packed, Tensor? scale, Tensor? step, Tensor? zero, Tensor? minimum, Tensor? min_step, "
        "Tensor? bias, int bits) -> Tensor",
        lambda x, packed, *rest: x.new_empty(len(x), packed.shape[0] * VECTOR),
    ),
}
for _name, (_schema, _fake) in _SCHEMAS.items():
    _lib.define(_name + _schema)
    torch.library.register_fake(f"kv_fast_cpp::{_name}", _fake, lib=_lib)

_IN_C = {"Tensor": "AtenTensorHandle", "Optional[Tensor]": "AtenTensorHandle*", "int": "int64_t", "bool": "int32_t",
         "float": "double"}  # fmt: skip


class Declarations(dict[str, list[str]]):
    """The operators as functions in C, for inductor's `aot_inductor.custom_ops_to_c_shims`: a compiled step calls them
    so (`Operator` in tensor.h), not through torch's dispatcher. Inductor asks for an operator, but its cache of
    compiled code can't tell whether operators are the same ones: so they are under their names."""

    def __init__(self) -> None:
        for name in _SCHEMAS:
            op = getattr(torch.ops.kv_fast_cpp, name).default
            given = [_IN_C[str(x.type)] for x in op._schema.arguments]
            given += ["AtenTensorHandle*"] * max(1, len(op._schema.returns))
            self[str(op)] = [f"AOTITorchError (*const aoti_torch_cpu_{name})({', '.join(given)})"]

    def __contains__(self, op: object) -> bool:
        return super().__contains__(str(op))


def _lists(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    B, H, T = scores.shape
    return scores.new_empty(B, H, min(k, T), dtype=torch.int64), scores.new_empty(B, H, dtype=torch.int64)


def _scores(x: Tensor, T: int, lead: int = 3) -> Tensor:
    """Of the first dimensions of x, [..., T] of rows in whole vectors."""
    return x.new_empty(*x.shape[:lead], -(-T // VECTOR) * VECTOR, dtype=torch.float32)[..., :T]


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor,
    mean: Sequence[Tensor | None] = (None, None, None),
) -> Tensor:  # fmt: skip
    """`decode_attention` and, with mean = (mean_k, mean_v, count), `packed_attention`."""
    return torch.ops.kv_fast_cpp.decode_attention(q, k, v, start, stop, *mean)


def gather_attention(q: Tensor, k: Tensor, v: Tensor, idx: Tensor, count: Tensor) -> Tensor:
    return torch.ops.kv_fast_cpp.gather_attention(q, k, v, idx, count)


def group_attention(*args: Any) -> Tensor:
    """Ranks of whole steps of 32 coordinates; bases in the dtype of q."""
    return torch.ops.kv_fast_cpp.group_attention(*args)


def packed_gather_attention(*args: Any) -> Tensor:
    return torch.ops.kv_fast_cpp.packed_gather_attention(*args)


def select(
    scores: Tensor, mask: Tensor | None, pos: Tensor | None, wanted: Tensor, k: int, sinks: int = 0, recent: int = 0
) -> tuple[Tensor, Tensor]:
    """`topk_select`, with a mask, and `budget_select`, with pos, wanted [B] and what is forced in."""
    return torch.ops.kv_fast_cpp.select(scores.float(), mask, pos, wanted, k, sinks, recent)


def lut_score(q: Tensor, book: Tensor, packed: Tensor, pos: Tensor | None, skip: Tensor | None = None) -> Tensor:
    return torch.ops.kv_fast_cpp.lut_score(q, book, packed, pos, skip)


def label_score(q: Tensor, labels: Tensor, params: Tensor, bits: int, pos: Tensor | None) -> Tensor:
    return torch.ops.kv_fast_cpp.label_score(q, labels, params, bits, pos)


def store_labels(*args: Any) -> None:
    """See kernels/label_score.py."""
    torch.ops.kv_fast_cpp.store_labels(*args)


def head_scores(q: Tensor, x: Tensor, pos: Tensor | None) -> Tensor:
    """q [B, H, C, R] . x [>= B, H, T, R], rows of which may lie apart -> fp32 [B, H, C, T]."""
    return torch.ops.kv_fast_cpp.head_scores(q, x, pos)


def channel_score(*args: Tensor) -> Tensor:
    """See kernels/channel_score.py."""
    return torch.ops.kv_fast_cpp.channel_score(*args)


def quantized_append(*args: Any) -> None:
    """See `append_token` of kernels/quantized_attention.py."""
    torch.ops.kv_fast_cpp.quantized_append(*args)


def quantized_attention(*args: Any) -> Tensor:
    return torch.ops.kv_fast_cpp.quantized_attention(*args)


def lowrank_attention(*args: Any) -> Tensor:
    """See kernels/lowrank.py; latents lie coordinate by coordinate in memory."""
    return torch.ops.kv_fast_cpp.lowrank_attention(*args)


def latent_append(*args: Any) -> None:
    """See `append_token` of kernels/latent.py."""
    torch.ops.kv_fast_cpp.latent_append(*args)


def latent_attention(*args: Any) -> Tensor:
    return torch.ops.kv_fast_cpp.latent_attention(*args)


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Few rows of x [M, in] and weight [out, in] as it is; all of one dtype."""
    return torch.ops.kv_fast_cpp.dense_linear(x, weight, bias)


def linear(x: Tensor, *args: Any) -> Tensor:
    """Few rows of x; see `packed_linear` of kernels/linear.py, which gives the parts of a Weight, bias and bits."""
    return torch.ops.kv_fast_cpp.linear(x, *args)


# ---- through ctypes ----


Packed = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # a Weight's parts


def unpack_rows(dtype: torch.dtype, w: Packed, bits: int, first: int, blocks: int) -> Tensor:
    """Blocks of 16 rows of W from `first` on -> [in, blocks * 16] of fp32 or bf16."""
    n = w[0][0].numel() // VECTOR * 8 // bits
    sizes = _check_weight(n, w, bits)
    y = torch.empty(n, blocks * VECTOR, dtype=dtype)
    call("kvf_unpack_rows", is_bf16(y), bits, *w, y, n, *sizes, first, blocks)
    return y


def has_tiles() -> bool:
    """Whether the processor multiplies tiles of bf16, and the system lets us."""
    return bool(build.library().kvf_has_tiles())


has_tiles._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as build.available


def multiplies_one_row() -> bool:
    """Whether `dense_linear` multiplies a single row in fp32 faster than torch."""
    return bool(build.library().kvf_multiplies_one_row())


multiplies_one_row._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_many_rows(bits: int) -> bool:
    """Whether prompts are multiplied with such weights here: by tiles, or by vectors (many_rows.cpp). Else torch is
    faster."""
    return bool(build.library().kvf_has_many_rows(bits))


def many_rows(x: Tensor, w: Packed, bias: Tensor | None, bits: int) -> Tensor:
    """x [M, in], a prompt, where the processor has a way of its own (`has_many_rows`); see kernels/linear.py."""
    (M, n), blocks = x.shape, len(w[0])
    sizes = _check_weight(n, w, bits)
    expect(torch.float32, bias)
    assert x.is_contiguous()
    y = x.new_empty(M, blocks * VECTOR)
    call("kvf_many_rows", is_bf16(x), bits, x, *w, bias, y, M, n, blocks, *sizes)
    return y


def _check_weight(n: int, w: Packed, bits: int) -> tuple[int, int, int]:
    """Inputs that share a scale, groups that share a step, and a step of minima."""
    packed, scale, step, zero, minimum, min_step = w
    expect(torch.uint8, packed, zero)
    for x, of in ((scale, step), (minimum, min_step)):
        expect(torch.float16, of)
        expect(torch.float16 if of is None else torch.int8, x)
    assert all(t is None or t.is_contiguous() for t in w)
    assert packed[0].numel() * 8 == n * VECTOR * bits, f"{packed.shape} is no weight of {n} inputs in {bits} bits"
    assert zero is None or (scale is not None and zero.numel() * 2 == scale.numel()), "a zero has 4 bits"
    assert minimum is None or (scale is not None and minimum.shape == scale.shape), "a group has one minimum"
    pairs = ((scale, step), (minimum, min_step))
    shared, min_shared = (1 if a is None or b is None else a.shape[1] // b.shape[1] for a, b in pairs)
    assert not shared & (shared - 1) and not min_shared & (min_shared - 1), "1, 2, 4, 8 ... groups share a step"
    return (n if scale is None else n // scale.shape[1]), shared, min_shared


def oja_sequential(basis: Tensor, x: Tensor) -> Tensor:
    """A basis U [N, D, r] after tokens x [N, m, D], one by one, U += (x - U y) y^T with y = U^T x; all fp32."""
    (N, D, r), m = basis.shape, x.shape[1]
    expect(torch.float32, basis, x)
    u = torch.nn.functional.pad(basis, (0, -r % VECTOR)).clone(memory_format=torch.contiguous_format)
    call("kvf_oja_sequential", x.contiguous(), u, N, m, D, u.shape[2])
    return u[..., :r]


def top_p_count(weights: Tensor, pos: Tensor, p: float, sinks: int, recent: int) -> Tensor:
    """See kernels/top_p.py."""
    B, H, T = weights.shape
    weights = weights if weights.stride(2) == 1 else weights.contiguous()
    expect(torch.float32, weights)
    expect(torch.int64, pos)
    count = torch.empty(B, H, dtype=torch.int64)
    share = torch.tensor(p, dtype=torch.float64)  # `call` passes integers and tensors
    call("kvf_top_p", weights, pos.contiguous(), share, count, *weights.stride()[:2], B, H, T, sinks, recent)
    return count
