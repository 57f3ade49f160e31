"""Palu: keys and values as coordinates of low-rank projections, one for each group of four KV heads.

The weights of a group's key projection are cut to rank r by an SVD whitened with the calibration's inputs, and so are
those of its values: x W_down is cached, r numbers per group, before rotation. With inputs x of second moment M, the
whitened SVD of W keeps W V V^T, where V are the leading eigenvectors of W^T M W, the second moment of the keys less
their bias: so the method needs no weights and projects keys and values themselves. The prompt is attended to as it is
stored. Coordinates may be quantized: each is divided by the square root of its singular value, the other factor is
multiplied with it, and all are turned by a Hadamard matrix. At rank 70 % in 3 bits: 68 of 512 bytes, 2 scales a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cache.base import Attended, CacheShape, KVMethod, Storage, knob
from cache.packed import PackedVectors
from cache.statistic import Statistic, principal, principal_of_heads
from kernels.group_attention import coordinates, group_append, group_attention, project, rebuild
from kernels.hadamard import hadamard_matrix, has_hadamard
from runtime.errors import InputError

PRESETS = {
    "palu-30": dict(rank=0.7, bits=3),  # Palu-30 % (3bit) of SALS, Tables 2 and 3
    "palu-50": dict(rank=0.5, bits=3),  # Palu-50 % (3bit)
    "palu-30-16bit": dict(rank=0.7),  # Palu's own, not quantized
    "palu-50-16bit": dict(rank=0.5),
}
MULTIPLE = 32  # ranks are rounded to multiples of it (published code)
FLOOR = 1e-8  # share of a group's largest eigenvalue: below it is noise, which the division must not amplify


class Projections(Statistic):
    """Principal directions of x W, all heads together, for keys (before rotation) and for values; their biases."""

    name = "palu"

    def measure(self, t):
        out: dict[str, torch.Tensor] = {}
        for part, x, bias in (("k", t.k, t.k_bias), ("v", t.v, t.v_bias)):
            bias = torch.zeros_like(x[0]) if bias is None else bias
            less = (x - bias).flatten(1)  # [S, n*D]
            out |= {part: less.T @ less, f"{part}_bias": bias * len(x)}
        return out

    def finish(self, mean):
        out = {f"{part}_bias": mean[f"{part}_bias"] for part in "kv"}
        for part in "kv":
            out[f"{part}_eigenvalues"], out[f"{part}_basis"] = principal(mean[part])
        return out

    def take_heads(self, tensors, kv_heads, n_kv_head):
        out = {f"{part}_bias": tensors[f"{part}_bias"][kv_heads] for part in "kv"}
        for part in "kv":
            given = tensors[f"{part}_eigenvalues"], tensors[f"{part}_basis"]
            values, basis = principal_of_heads(*given, kv_heads, n_kv_head)
            out |= {f"{part}_eigenvalues": values.float(), f"{part}_basis": basis.float()}
        return out


class Coordinates(Storage):
    """Keys, or values, of N groups of s KV heads: r numbers per token and group, slot = position."""

    def __init__(self, shape: CacheShape, s: int, rank: int, bits: int, balanced: bool, basis, eigenvalues, bias):
        """basis [N, s * D, r], eigenvalues [N, r] and bias [N, s * D] of the calibration, or None: sizes only."""
        super().__init__(shape)
        N, width = shape.n_kv_head // s, s * shape.head_dim
        down = up = basis  # x W_down = (keys less their bias) down, and times up^T they are keys again
        if basis is not None and bits < 16:  # the Hadamard matrix is folded into the weights
            # eigenvalues are squares of singular values S: S^(-1/2) U^T y is cached, U S^(1/2) rebuilds
            least = FLOOR * eigenvalues.amax(-1, keepdim=True)
            root = eigenvalues.maximum(least).pow(0.25)[:, None] if balanced else 1
            turn = hadamard_matrix(rank)
            down, up = basis / root @ turn, basis * root @ turn
        self.basis = self.constant("u", (N, width, rank), up)  # in the dtype of the cache, as weights are
        two = balanced and bits < 16
        self.down = self.constant("down", (N, width, rank), down) if two else self.basis
        self.bias = self.constant("bias", (N, width), bias, torch.float32)
        self.packed = PackedVectors(shape, (shape.max_batch, N, shape.max_seq_len), rank, bits, group=rank)
        self.fixed_bytes = N * width * ((1 + two) * rank * shape.dtype.itemsize + 4)

    def put(self, x, start: int):
        """Store tokens of prompts [B, Hkv, n, D], not rotated, from slot `start` on."""
        slots = (slice(len(x)), slice(None), slice(start, start + x.shape[2]))
        self.packed.put(slots, project(x, self.down, self.bias))

    def append(self, x, pos):
        """Store one token per row, [B, Hkv, D], not rotated."""
        group_append(x, pos, self.down, self.bias, self.packed.data, self.packed.params, self.packed.bits)

    def restored(self, B: int, n: int):
        """The first n tokens, rebuilt: fp32 [B, Hkv, n, D]."""
        stored = [x[:B, :, :n] for x in self.packed.parts()]
        x = coordinates(stored[0], stored[1] if len(stored) > 1 else None, self.packed.bits)
        return rebuild(x, self.basis, self.bias, self.shape.head_dim)


class Palu(KVMethod):
    paper = "Chang, Lin et al. 2024, Palu: Compressing KV-Cache with Low-Rank Projection"
    lossless = dict(rank=1.0, bits=16)
    stress = dict(rank=0.5, bits=4)
    pre_rope = True
    statistics = (Projections(),)
    exact_prefill = False  # a prompt is attended to as it is stored

    @dataclass
    class Args:
        rank: float = knob(0.7, "coordinates of a group, share of its channels (Palu-30 %: 0.7, Palu-50 %: 0.5)", 0, 1)
        group: int = knob(4, "KV heads that share coordinates (G-LRD: 4; M-LRD: 1; J-LRD: all)", 1)
        bits: Literal[2, 3, 4, 8, 16] = knob(16, "bits of coordinates (Palu: 3 and 2 beside 16)")
        factors: Literal["balanced", "orthonormal"] = knob(
            "balanced",
            "below 16 bits: both factors carry the singular values' square root (published code), or neither (ours)",
        )

        def __post_init__(self):
            if not self.rank:
                raise InputError("palu: rank is a share in (0, 1], got 0")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        H, s = shape.n_kv_head, min(args.group, shape.layer_heads)  # never across ranks
        if H % s:
            here = f" of each of {shape.ranks.size} processes" if shape.ranks.size > 1 else ""
            raise InputError(f"palu: groups of {s} heads do not divide the {H} KV heads{here}: use group=1")
        rope.shorten(shape.dtype)
        width = s * shape.head_dim
        # all layers, keys and values alike: "uniform" of the published code
        rank = max(1, round(args.rank * width / MULTIPLE)) * MULTIPLE
        self.rank = width if args.rank == 1 else min(width, rank)
        if args.bits < 16 and (self.rank % MULTIPLE or not has_hadamard(self.rank)):
            raise InputError(f"palu: a rank of {self.rank} cannot be packed in {args.bits} bits: use bits=16")
        self.keys, self.values = (
            Coordinates(shape, s, self.rank, args.bits, args.factors == "balanced", *self._calibrated(part, s))
            for part in "kv"
        )

    def _calibrated(self, part, s):
        if not self.calib:
            return None, None, None
        H, get = self.shape.n_kv_head, lambda name: self.calib.get(self.layer, f"palu.{part}_{name}")
        groups = [list(range(i, i + s)) for i in range(0, H, s)]
        given = get("eigenvalues"), get("basis")
        parts = [given if s == H else principal_of_heads(*given, heads, H) for heads in groups]
        values, basis = (torch.stack([part[i][..., : self.rank] for part in parts]).float() for i in (0, 1))
        return basis, values, get("bias").reshape(len(groups), -1)

    # ---- the prompt: the weights are cut, so its own attention sees what is stored, too ----

    def prefill(self, q, k, v, lengths, start=None):
        start = start or 0
        self.keys.put(k, start), self.values.put(v, start)
        k, v = (x.restored(len(q), start + q.shape[2]).to(q.dtype) for x in (self.keys, self.values))
        return self.attend_prompt(self.rope.rotate_prompt(q, start), self.rope.rotate_prompt(k), v, lengths)

    def begin_prompt(self, total):
        """Nothing to prepare: every chunk is stored when it comes."""

    def compress(self, q, k, v, lengths):
        self.keys.put(k, 0), self.values.put(v, 0)

    # ---- one token per row ----

    def append(self, k, v, pos):
        self.keys.append(k, pos), self.values.append(v, pos)

    def attend(self, q, idx, count, pos):
        k, v = self.keys, self.values
        return group_attention(
            self.rope.rotate(q, pos), k.packed.parts(), v.packed.parts(), k.packed.bits, k.basis, v.basis, k.bias,
            v.bias, pos, *self.rope.tables)  # fmt: skip

    def attended(self, q, idx, count, pos):
        B, T = len(pos), self.shape.max_seq_len
        k, v = (x.restored(B, T) for x in (self.keys, self.values))
        t = torch.arange(T, device=pos.device).expand(B, -1)
        at = torch.where(t <= pos[:, None], t, -2)
        return Attended.of(self.rope.rotate(q, pos), (at, self.rope.rotate_prompt(k), v))

    # ---- accounting ----

    def _fixed(self):
        return self.keys.fixed_bytes + self.values.fixed_bytes

    def _tokens(self, n):
        each = self.keys.packed.vector_bytes + self.values.packed.vector_bytes
        return self.shape.max_batch * len(self.keys.basis) * n * each

    def card_nbytes(self):
        return self._fixed() + self._tokens(self.shape.max_seq_len)

    def traffic(self, pos):
        return self._fixed() + self._tokens(pos + 1)
