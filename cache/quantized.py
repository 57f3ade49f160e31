"""Every token kept and attended to, in few bits but for the newest and, where asked for, the first ones.

A subclass says how keys and values are quantized (`Quantized.store`) and in which basis (`turn`). The rest is done: a
ring of the newest tokens in the cache's dtype, what leaves it packed, one pass of attention over both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cache.base import Attended, CacheShape, KVMethod, Storage
from cache.packed import PackedVectors
from errors import InputError
from kernels.codebook import e4m3, lloyd_max
from kernels.quantize import BITS, GROUP, groups_of
from kernels.quantized_attention import (
    QuantizedTokens,
    append_token,
    quantized_attention,
    read_tokens,
    store_prompt,
)


class QuantizedStore(Storage):
    """Keys, or values: slot = position where packed; `sinks` first tokens and a ring of `ring` newest ones whole."""

    full_precision: Tensor  # [B, Hkv, sinks + ring, D]

    def __init__(
        self, shape: CacheShape, bits: int, sinks: int, ring: int, group: int = GROUP, clip: float = 1.0,
        block: int = 0, codebook: bool = False,
    ):  # fmt: skip
        """block: so many tokens leave the ring together, and GROUP of them share a scale and a zero for each channel,
        instead of `group` channels of a token; the ring holds them, and may hold one more. codebook: codes stand for
        numbers, of 8 bits those of e4m3, else those of a random unit vector, and a token, or GROUP of them, has a scale
        for all channels."""
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
            self.packed = Storage(shape)
            self.packed.buffer("data", (B, H, slots, D * bits // 8), torch.uint8)
            self.packed.buffer("params", (B, H, slots // each, *scales), torch.float16)
            self.vector_bytes = D * bits // 8 + 2 * math.prod(scales) / each
            if codebook:
                numbers = e4m3() if bits == 8 else lloyd_max(D, bits)
                self.book = self.packed.constant("book", (2**bits,), numbers, torch.float32)
        self.buffer("full_precision", (B, H, sinks + ring, D))

    @property
    def tokens(self) -> QuantizedTokens:
        """As the kernels take them."""
        data, params = self.packed.get_buffer("data"), None if self.bits == 16 else self.packed.get_buffer("params")
        book = None if self.book is None else self.packed.get_buffer("book")
        return QuantizedTokens(data, params, self.full_precision, self.bits, self.sinks, self.block, self.clip, book)

    @property
    def fixed_bytes(self) -> int:
        """Of the codebook."""
        return 0 if self.book is None else self.book.nbytes


class Quantized(KVMethod):
    """A subclass allocates `keys` and `values`, of the same sinks and ring."""

    reads_queries = False
    keys: QuantizedStore
    values: QuantizedStore

    def turn(self, x: Tensor) -> Tensor:
        """Into the basis in which keys, values and queries are stored and meet, [..., D]; orthonormal."""
        return x

    def turn_back(self, y: Tensor) -> Tensor:
        return y

    def compress(self, q, k, v, lengths):
        for store, x in ((self.keys, k), (self.values, v)):
            store_prompt(store.tokens, self.turn(x), lengths)

    def append(self, k, v, pos):
        for store, x in ((self.keys, k), (self.values, v)):
            append_token(store.tokens, self.turn(x), pos)

    def attend(self, q, idx, count, pos):
        return self.turn_back(quantized_attention(self.turn(q), self.keys.tokens, self.values.tokens, pos))

    def attended(self, q, idx, count, pos):
        T = self.shape.max_seq_len
        t = torch.arange(T, device=pos.device).expand(len(pos), -1)
        k, v = (self.turn_back(read_tokens(x.tokens, pos, T)) for x in (self.keys, self.values))
        return Attended.of(q, (torch.where(t <= pos[:, None], t, -2), k, v))

    # ---- accounting ----

    def card_nbytes(self):
        B, H, T, D = self.shape.kv
        size = self.shape.dtype.itemsize
        total = 0
        for store in (self.keys, self.values):
            slots, whole = store.packed.get_buffer("data").shape[2], store.full_precision.shape[2]
            total += B * H * (round(slots * store.vector_bytes) + whole * D * size) + store.fixed_bytes
        return total

    def traffic(self, pos):
        """Bytes of packed tokens and of whole ones; rings that empty at once are counted as full, the most they are."""
        (B, H, _, D), n, size = self.shape.kv, pos + 1, self.shape.dtype.itemsize
        whole = min(n, self.keys.full_precision.shape[2])
        packed = math.ceil((n - whole) * (self.keys.vector_bytes + self.values.vector_bytes))
        return B * H * (2 * whole * D * size + packed) + self.keys.fixed_bytes + self.values.fixed_bytes


class Turned(Quantized):
    """By one orthonormal matrix a layer, a constant that counts as fp32 of the cache."""

    matrix: Tensor  # fp32 [D, D]

    def turn(self, x):
        return (x.float() @ self.matrix).to(x.dtype)

    def turn_back(self, y):
        return (y.float() @ self.matrix.T).to(y.dtype)

    def card_nbytes(self):
        return super().card_nbytes() + 4 * self.shape.head_dim**2

    def traffic(self, pos):
        return super().traffic(pos) + 4 * self.shape.head_dim**2


def check_bits(method: str, *given: int | None) -> None:
    """InputError for bits that cannot be packed; None: not given."""
    for bits in given:
        if bits is not None and bits not in BITS:
            raise InputError(f"{method}: {bits} bits cannot be packed, use one of {', '.join(map(str, BITS))}")
