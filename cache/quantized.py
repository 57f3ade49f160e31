"""Keeps and attends to every token, quantized except for the newest and, if asked for, the first tokens.

A subclass allocates the stores `keys` and `values` and may choose a basis (`turn`). The rest is done here: a ring of
the newest tokens in the cache's dtype, packing of the tokens that leave it, and one pass of attention over both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cache.base import Attended, CacheShape, KVMethod, Storage, knob
from cache.packed import PackedVectors
from kernels.codebook import e4m3, lloyd_max
from kernels.quantize import BITS, GROUP, groups_of
from kernels.quantized_attention import (
    QuantizedTokens,
    quantized_append,
    quantized_attention,
    read_tokens,
    skipping_quantized_attention,
    store_prompt,
    values_read,
)
from kernels.rope import apply_rope, rotated_products
from kernels.rotate_append import turn_heads
from runtime.errors import InputError

# A key bias that is subtracted by default, in lengths of a key without it (ours). Codes that share one scale for all
# channels of a head lose in proportion to the key's length, bias included. Random model of 4 layers, 100 + 60 tokens,
# bias in 4 slow channels of the first and last layer: mean KL to full at 0, 1.6, 3.2, 6.4 and 16 lengths:
# hadamard-4 .0019, .0024, .0032, .0091, .050;  turboquant .0024, .0031, .0047, .0098, .051;
# fp8 .00010, .00020, .00039, .0011, .0092;  kivi, whose scales are of channels: .0019, .0019, .0020, .0021, .0021, but
# it loses, too, where a channel turns within the 32 tokens of a scale
KEY_BIAS = 4.0


def center() -> Any:
    """A common knob of the quantizing methods."""
    return knob(None, "keys are stored less their layer's bias, which each step adds to the logits (ours); None: where "
                f"it is over {KEY_BIAS:g} times as long as a key")  # fmt: skip


def skip() -> Any:
    """A common knob of methods that attend to every compressed token."""
    return knob(0.0, "threshold, times the length, of a packed block's weight below which its values are not read, as "
                "in skip_softmax (0: all are read)", 0)  # fmt: skip


class ByToken(Storage):
    """Codes and params, slot = position."""

    layout = Storage.first_slots


class QuantizedStore(Storage):
    """Keys, or values. Packed tokens have slot = position; the first `sinks` tokens and a ring of the `ring` newest are
    in full precision."""

    full_precision: Tensor  # [B, Hkv, sinks + ring, D]
    layout = Storage.first_slots

    def __init__(
        self, shape: CacheShape, bits: int, sinks: int, ring: int, group: int = GROUP, clip: float = 1.0,
        block: int = 0, codebook: bool = False,
    ):  # fmt: skip
        """block: the number of tokens that leave the ring together, 0: one at a time. GROUP of them then share a scale
        and a zero per channel, instead of `group` channels of one token; the ring may hold one token more than a block.
        codebook: codes are indices of numbers, with 8 bits those of e4m3, else Lloyd-Max levels of a random unit
        vector; one token, or GROUP of them, has one scale for all channels."""
        super().__init__(shape)
        B, H, T, D = shape.kv
        self.bits, self.clip, self.sinks, self.block = bits, clip, sinks, block if bits < 16 else 0
        self.book: Tensor | None = None
        if bits == 16 or not (block or codebook):
            self.packed: Storage = PackedVectors(shape, (B, H, T), D, bits, group, clip)
            self.vector_bytes: int | float = self.packed.vector_bytes  # of one token and KV head
        else:
            each = GROUP if block else 1  # tokens that share scales
            slots, scales = groups_of(T, each) * each, (1,) if codebook else (D, 2)
            self.packed = ByToken(shape)
            self.packed.buffer("data", (B, H, slots, D * bits // 8), torch.uint8)
            self.packed.buffer("params", (B, H, slots // each, *scales), torch.float16)
            self.vector_bytes = D * bits // 8 + 2 * math.prod(scales) / each
            if codebook:
                numbers = e4m3() if bits == 8 else lloyd_max(D, bits)
                self.book = self.packed.constant("book", (2**bits,), numbers, torch.float32)
        self.buffer("full_precision", (B, H, sinks + ring, D))

    @property
    def tokens(self) -> QuantizedTokens:
        """The store as the kernels take it."""
        parts, rest = self.packed._buffers, (self.bits, self.sinks, self.block, self.clip)
        return QuantizedTokens(parts["data"], parts.get("params"), self.full_precision, *rest, parts.get("book"))  # type: ignore[arg-type]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the codebook."""
        return 0 if self.book is None else self.book.nbytes


class Quantized(KVMethod):
    """Base of the quantizing methods. A subclass allocates `keys` and `values` with the same sinks and ring.

    With `center`, keys are stored less their bias b. It adds q . R_t b to the product with the key at t, where R_t is
    the rotation: exact, whatever the position, and nothing is stored for it.
    """

    reads_queries = False
    units = "kv"
    layout = KVMethod.first_slots
    keys: QuantizedStore
    values: QuantizedStore
    key_bias: Tensor | None = None  # [Hkv, D] before rotation, the model's (key_bias.py); None: keys are stored whole

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        if args.skip:
            self.note_reads()

    def turn(self, q: Tensor) -> Tensor:
        """Transform q [B, Hq, D] to the orthonormal basis in which keys and values are stored."""
        return q

    def turn_back(self, x: Tensor) -> Tensor:
        """The inverse, of outputs [B, Hq, D], or of keys or values [B, Hkv, T, D] as stored."""
        return x

    def store_prompt(self, q, k, q_rot, k_rot, v, lengths):
        if self.key_bias is not None:
            k_rot = self.rope.rotate_prompt(self.centered(k))
        super().store_prompt(q, k, q_rot, k_rot, v, lengths)

    def rotate_append(self, q, k, v, pos):
        return super().rotate_append(q, self.centered(k), v, pos)

    def centered(self, k: Tensor) -> Tensor:
        """k [B, Hkv, ..., D] before rotation, less the bias if there is one to subtract."""
        if self.key_bias is None:
            return k
        bias = self.key_bias.float()
        return (k.float() - (bias if k.dim() == 3 else bias[:, None])).to(k.dtype)

    def bias_of(self, B: int) -> Tensor:
        """The bias in the units of the keys of B rows, fp32 [B, Hkv, D]."""
        assert self.key_bias is not None
        return self.key_bias.float() / self.k_unit[:B].float()

    def compress(self, q, k, v, lengths):
        for store, x in ((self.keys, k), (self.values, v)):
            store_prompt(store.tokens, x, lengths)

    def append(self, k, v, pos):
        for store, x in ((self.keys, k), (self.values, v)):
            quantized_append(x, pos, store.tokens)

    def products_with_bias(self, q: Tensor) -> Tensor | None:
        """What a bias that keys are stored without adds to q . k, [B, Hq, T]."""
        if self.key_bias is None:
            return None
        return rotated_products(q, self.bias_of(len(q)), self.rope.cos, self.rope.sin)

    def attend(self, q, idx, count, pos):
        k, v, bias = self.keys.tokens, self.values.tokens, self.products_with_bias(q)
        stops = (self.once_a_step(pos, "keys", lambda: k.packed_until(pos)),
                 self.once_a_step(pos, "values", lambda: v.packed_until(pos)))  # fmt: skip
        if not self.args.skip:
            return self.turn_back(quantized_attention(self.turn(q), k, v, pos, stops, bias))
        y, values = skipping_quantized_attention(self.turn(q), k, v, pos, *stops, bias, self.args.skip)
        self.note_read(values, pos, keys=True)
        return self.turn_back(y)

    def attended(self, q, idx, count, pos):
        T = self.shape.max_seq_len
        t = torch.arange(T, device=pos.device).expand(len(pos), -1)
        k, v = (self.turn_back(read_tokens(x.tokens, pos, T)) for x in (self.keys, self.values))
        if self.key_bias is not None:
            cos, sin = (x[:, None] for x in self.rope.at(t))
            k = k + apply_rope(self.bias_of(len(q))[:, :, None], cos, sin)
        there = torch.where(t <= pos[:, None], t, -2)
        if self.args.skip:
            k_stop, v_stop = (x.tokens.packed_until(pos) for x in (self.keys, self.values))
            read = values_read(q, k, pos, self.keys.sinks, k_stop, v_stop, None, self.args.skip)
            there = there[:, None].where(read, -2)
        return Attended.of(q, (there, k, v))

    # ---- accounting ----

    def card_nbytes(self):
        B, H, T, D = self.shape.kv
        size = self.shape.dtype.itemsize
        total = self.unit_nbytes + (self.noted.nbytes if self.notes_reads else 0)
        for store in (self.keys, self.values):
            slots, n_full = store.packed.get_buffer("data").shape[2], store.full_precision.shape[2]
            total += B * H * (round(slots * store.vector_bytes) + n_full * D * size) + store.fixed_bytes
        return total

    def traffic(self, pos):
        """Bytes of packed and of full-precision tokens. Rings that empty by blocks count as full."""
        (B, H, _, D), n, size = self.shape.kv, self.tokens_read(pos) or pos + 1, self.shape.dtype.itemsize
        n_full = min(n, self.keys.full_precision.shape[2])
        packed = math.ceil((n - n_full) * (self.keys.vector_bytes + self.values.vector_bytes))
        return B * H * (2 * n_full * D * size + packed) + self.keys.fixed_bytes + self.values.fixed_bytes


class Turned(Quantized):
    """Transforms by one orthonormal matrix per layer, an fp32 constant that counts as cache memory."""

    matrix: Tensor  # fp32 [D, D]

    def kv_in_units(self, k, v):
        return turn_heads(k, self.matrix, self.k_unit, True), turn_heads(v, self.matrix, self.v_unit, True)

    def turn(self, q):
        return turn_heads(q, self.matrix)

    def turn_back(self, x):
        return turn_heads(x, self.matrix.T)

    def card_nbytes(self):
        return super().card_nbytes() + 4 * self.shape.head_dim**2

    def traffic(self, pos):
        return super().traffic(pos) + 4 * self.shape.head_dim**2


def check_bits(method: str, *given: int | None) -> None:
    """Raises InputError for bits that cannot be packed; None stands for bits that were not given."""
    for bits in given:
        if bits is not None and bits not in BITS:
            raise InputError(f"{method}: {bits} bits cannot be packed, use one of {', '.join(map(str, BITS))}")
