"""The weight formats of --weights, and quantization to them by rounding.

    --weights int4          8- and 4-bit codes share a scale in groups of 32 inputs
    --weights int4:128      or in groups of 64 or 128; int8:channel: one scale per row

With 4-bit weights, the output head, and the embedding if it is the same matrix, have 8 bits unless `head` is given.
8 bits are symmetric, by the largest |w| of a group; 4 bits span the range between its smallest and largest w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import ROWS
from runtime.errors import InputError
from weights.codes import BF16, Codes, Layout

BITS = {"bf16": 16, "int8": 8, "int4": 4}
GROUPS = ("32", "64", "128", "channel")
DENSE = 32  # stands for weights that are not packed but in the compute dtype


def quantize(w: Tensor, bits: int, group: int) -> Codes:
    """w [out, in] -> codes of 8 or 4 bits, with fp16 scales, by rounding to nearest."""
    x = w.float().unflatten(1, (-1, group))
    if bits == 8:
        scale = (x.abs().amax(-1) / 127).clamp(min=6e-8).half()
        codes = (x / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
        return Codes(codes.flatten(1), scale, None, 8)
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=6e-8).half()
    step = scale.float()
    zero = (-low / step).round().clamp(0, 15)
    codes = (x / step[..., None] + zero[..., None]).round().clamp(0, 15)
    return Codes(codes.to(torch.uint8).flatten(1), scale, zero.to(torch.uint8), 4)


@dataclass(frozen=True)
class WeightFormat:
    """The weight format of a model: bits, the number of inputs that share a scale (None: a row), bits of the head."""

    bits: int
    group: int | None = None
    head_bits: int = 8

    @classmethod
    def parse(cls, text: str | None, head: str | None = None) -> WeightFormat | None:
        """Parse `int4`, `int8:channel`, `bf16`, or `fp32`, which is not packed. None keeps the checkpoint's formats.
        Raises InputError for any other text."""
        if text is None or text == "fp32":
            if head not in (None, "fp32"):
                raise InputError(f"--head {head} needs --weights bf16, int8 or int4")
            return cls(DENSE) if text else None
        name, colon, group = str(text).partition(":")
        if name not in BITS or (colon and (name == "bf16" or group not in GROUPS)):
            raise InputError(f"--weights {text}: use fp32, bf16, int8 or int4, these also with a group: int4:64, "
                             "int8:channel (32, 64, 128 or channel inputs share a scale)")  # fmt: skip
        if head is not None and head not in BITS:
            raise InputError(f"--head {head}: use bf16, int8 or int4")
        size = None if group == "channel" else int(group or 32)
        return cls(BITS[name], size, BITS[head] if head else max(8, BITS[name]))

    def group_of(self, n: int, bits: int) -> int:
        """The group for rows of n inputs. Raises InputError if it does not divide n."""
        group = n if self.group is None or bits == 16 else self.group
        if n % group or group % ROWS:
            raise InputError(f"weights of {n} inputs have no groups of {group}: use --weights int8:channel, "
                             "or another group")  # fmt: skip
        return group

    def choose(self, name: str, part: int, n: int) -> Layout | None:
        """The layout of a layer with n inputs: see `Choose`."""
        if name.endswith((".router", ".shared_gate")):  # few numbers, on which the choice of experts depends
            return None
        bits = {"output": self.head_bits, "tok_embeddings": 16}.get(name, self.bits)
        return BF16 if bits == 16 else Layout(bits, self.group_of(n, bits))
