"""Rotary embedding: the inverse frequencies of every rope type, the tables of a cache, and the rotation itself.

The layout is half-split, as in Hugging Face's checkpoints: channel i turns with channel i + D/2. Channels that do not
turn have the frequency 0, and `half_split` is the order of channels in which they are the last pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import version_for
from kernels.op import operation
from runtime.errors import InputError

PROMPT_CHUNK = 4096  # tokens rotated at a time


@dataclass(unsafe_hash=True)
class RopeArgs:
    """Rotary embedding: `type` is default, linear, dynamic, llama3, yarn or longrope, or none for a layer without
    positions; the rest as in Hugging Face's configs."""

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0  # 0: the model's context
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rotated: int = 0  # channels of a head that turn; 0: all
    short_factor: tuple[float, ...] = ()  # longrope's divisors of frequencies, up to the original context
    long_factor: tuple[float, ...] = ()  # and beyond it

    @property
    def varies(self) -> bool:
        """Whether angles depend on the length of the text."""
        return self.type in ("dynamic", "longrope")


def half_split(head_dim: int, rotated: int) -> Tensor:
    """The order of a head's channels in which channel i turns with i + D/2, where i turned with i + rotated/2."""
    turning, rest = torch.arange(head_dim).split((rotated, head_dim - rotated))
    return torch.cat((turning.view(2, -1), rest.view(2, -1)), 1).flatten()


def rope_inv_freq(r: RopeArgs, head_dim: int, context: int, seq_len: int | Tensor = 0) -> tuple[Tensor, float | Tensor]:
    """Inverse frequencies [..., D/2] in fp32 and the factor on cos and sin, [D/2] if some channels do not turn.

    context: the length the model was trained for; seq_len [...] matters to dynamic and longrope alone.
    """
    if r.type == "none":
        return torch.zeros(head_dim // 2, device="cpu"), 1.0
    inv_freq, scale = _inv_freq(r, r.rotated or head_dim, context, seq_len)
    if still := head_dim // 2 - inv_freq.shape[-1]:
        scales = torch.full((head_dim // 2 - still,), scale, device="cpu")
        return F.pad(inv_freq, (0, still)), F.pad(scales, (0, still), value=1.0)
    return inv_freq, scale


def _inv_freq(r: RopeArgs, d: int, context: int, seq_len: int | Tensor) -> tuple[Tensor, float]:
    """`rope_inv_freq` of the d channels that turn."""
    original = r.original_max_position_embeddings or context
    theta, scale = r.theta, 1.0
    exponent = torch.arange(0, d, 2, dtype=torch.float32, device="cpu") / d
    if r.type == "dynamic":
        n = torch.as_tensor(seq_len, dtype=torch.float64, device="cpu").clamp(min=context)
        base = theta * (r.factor * n / context - (r.factor - 1)) ** (d / (d - 2))
        return 1.0 / base.float()[..., None] ** exponent, scale
    if r.type == "longrope":  # Ding et al. 2024
        beyond = (torch.as_tensor(seq_len, device="cpu") > original)[..., None]
        short, long = (torch.tensor(t, device="cpu") for t in (r.short_factor, r.long_factor))
        if r.factor > 1:
            scale = math.sqrt(1 + math.log(r.factor) / math.log(original))
        frequency = 1.0 / (torch.where(beyond, long, short) * theta**exponent)
        return frequency, scale if r.attention_factor is None else r.attention_factor
    inv_freq = 1.0 / theta**exponent
    if r.type == "linear":
        inv_freq = inv_freq / r.factor
    elif r.type == "llama3":  # slow down the wavelengths above the original context, blend those around it
        turns = original * inv_freq / (2 * math.pi)
        blend = ((turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)).clamp(0, 1)
        inv_freq = inv_freq * (blend + (1 - blend) / r.factor)
    elif r.type == "yarn":  # Peng et al. 2023: interpolate the channels that turn less than beta_slow times

        def channel(turns: float) -> float:
            return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = channel(r.beta_fast), channel(r.beta_slow)
        if r.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        ramp = ((torch.arange(d // 2, device="cpu") - low) / (high - low or 0.001)).clamp(0, 1)
        inv_freq = inv_freq * (1 - ramp) + inv_freq / r.factor * ramp

        def mscale(m: float) -> float:
            return 0.1 * m * math.log(r.factor) + 1.0 if r.factor > 1 else 1.0

        if r.attention_factor is not None:
            scale = r.attention_factor
        elif r.mscale and r.mscale_all_dim:
            scale = mscale(r.mscale) / mscale(r.mscale_all_dim)
        else:
            scale = mscale(1.0)
    return inv_freq, scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., D] in halves (x1, x2) by cos, sin [..., D/2] that broadcast against it; computed in fp32."""
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


def grow(q: Tensor, first: int | Tensor, growth: float, original: int) -> Tensor:
    """Queries longer the later they are beyond the original context (Llama 4, Ministral 3): q [B, Hq, D] at positions
    first [B], or [B, S, Hq, D] from there on."""
    pos = torch.as_tensor(first, device=q.device)
    if q.dim() == 4:
        pos = pos[..., None] + torch.arange(q.shape[1], device=q.device)
    return q * (1 + growth * torch.log1p(pos // original))[..., None, None].to(q.dtype)


def angles(table: Tensor, pos: Tensor) -> Tensor:
    """A table [1 or >= B, T, D/2] at positions pos [B, ...] int64 -> [B, ..., D/2]."""
    if table.shape[0] == 1:
        return table[0][pos]
    return table[torch.arange(len(pos), device=pos.device).view(-1, *[1] * (pos.dim() - 1)), pos]


def angle_bytes(q: Tensor, *rest: Tensor) -> dict[str, int]:
    """For `reads`: cos and sin at one position per row."""
    return dict.fromkeys(("cos", "sin"), len(q) * q.shape[2] // 2 * 4)


@operation(cpp=True, reads=angle_bytes)
def rotate_query(q: Tensor, cos: Tensor, sin: Tensor, pos: Tensor) -> Tensor:
    """q [B, Hq, D], one token per row, rotated at pos [B] int64; cos and sin are those of `Rope`."""
    return apply_rope(q, angles(cos, pos)[:, None], angles(sin, pos)[:, None])


def rotated_products(q: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q [B, Hq, D] . (x rotated at every position): one x [B, Hkv, D] per KV head, tables [1 or >= B, T, D/2] -> fp32
    [B, Hq, T]. A pair of channels gives (q1 x1 + q2 x2) cos + (q2 x1 - q1 x2) sin: a product with the tables."""
    q1, q2 = q.float().unflatten(1, (x.shape[1], -1)).chunk(2, -1)
    x1, x2 = x.float()[:, :, None].chunk(2, -1)
    cos, sin = (t[0] if len(t) == 1 else t[: len(q)] for t in (cos, sin))
    return (q1 * x1 + q2 * x2).flatten(1, 2) @ cos.mT + (q2 * x1 - q1 * x2).flatten(1, 2) @ sin.mT


class Rope(nn.Module):
    """cos and sin of every position a cache can hold, [R, T, D/2] fp32, with which a method rotates.

    R is 1, or the batch size for dynamic NTK and longrope, whose angles depend on each row's prompt length. As in
    Hugging Face, a prompt longer than the model's (original) context is rotated with the frequencies for its length,
    and each token decoded after it with those for its own position. Longrope's differ so much that all of a text takes
    the same: those beyond the original context if `new_tokens` after a prompt will get there.
    """

    cos: Tensor
    sin: Tensor
    cos_16: Tensor | None
    sin_16: Tensor | None

    def __init__(
        self, args: RopeArgs, head_dim: int, context: int, max_batch: int, max_seq_len: int, device: Any = None,
        new_tokens: int = 0,
    ):  # fmt: skip
        super().__init__()
        self.of, self.long = (args, head_dim, context), args.type == "longrope"
        self.look_ahead(new_tokens)
        self.fitted: Tensor | None = None  # int64 [B], longrope's: the lengths for which frequencies were chosen
        first = args.original_max_position_embeddings if self.long else context
        self.per_row = args.varies and max_seq_len > first
        pos = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
        if self.per_row:
            inv_freq, scale = rope_inv_freq(*self.of, pos + 1)
            angle = pos[:, None] * inv_freq
        else:
            inv_freq, scale = rope_inv_freq(*self.of)
            angle = torch.outer(pos, inv_freq)
        R = max_batch if self.per_row else 1
        tables = torch.stack((angle.cos() * scale, angle.sin() * scale)).to(device or torch.get_default_device())
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table.expand(R, -1, -1).clone(), persistent=False)
            self.register_buffer(f"{name}_16", None, persistent=False)

    def shorten(self, dtype: torch.dtype) -> None:
        """Prepare `tables` for a cache of `dtype`: in fp16 on a GPU if that has 16 bits, which rounds angles less than
        bf16 rounds keys. In fp32, a token's angles are as many bytes as its key and value in 16 bits."""
        if self.cos_16 is None and dtype.itemsize == 2 and version_for(self.cos.device, dtype) == "triton":
            self.cos_16, self.sin_16 = self.cos.half(), self.sin.half()

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin for kernels that read the angles of many tokens."""
        if self.cos_16 is None or self.sin_16 is None:
            return self.cos, self.sin
        return self.cos_16, self.sin_16

    def look_ahead(self, new_tokens: int) -> None:
        """How many tokens may follow the next prompts: by what is asked for, not by the size of the cache."""
        self.ahead = new_tokens if self.long else 0

    def follow(self, lengths: Sequence[int], ahead: int) -> None:
        """Prompts of these lengths were read with `ahead` tokens to come, and their keys are kept. Raises InputError if
        this run's tokens would have given them other frequencies."""
        first = self.of[0].original_max_position_embeddings
        if self.long and any(n + ahead <= first < n + self.ahead for n in lengths):
            raise InputError(f"the saved text was read for {ahead} tokens more, within the model's original context of "
                             f"{first}, and this run's {self.ahead} lie beyond it, where all of a text is rotated "
                             f"otherwise: save it again with --max-new-tokens {self.ahead}")  # fmt: skip
        self.look_ahead(max(ahead, self.ahead))
        self.fitted = torch.tensor(lengths) + self.ahead if self.long else None

    def outgrown(self, n: int) -> bool:
        """Whether a text of n tokens has other frequencies than those of the prompt whose keys are kept."""
        first = self.of[0].original_max_position_embeddings
        return self.long and self.fitted is not None and int(self.fitted[0]) <= first < n

    def set_prompt(self, lengths: Tensor) -> None:
        """Fit the tables to a batch of prompts; a no-op for types that do not vary. lengths [B]."""
        self.fitted = lengths.cpu() + self.ahead if self.long else None
        if not self.per_row:
            return
        T = self.cos.shape[1]
        fresh = Rope(*self.of, 1, T, self.cos.device)
        self.cos.copy_(fresh.cos.expand_as(self.cos))
        self.sin.copy_(fresh.sin.expand_as(self.sin))
        for row, n in enumerate(lengths.tolist()):
            n += self.ahead
            inv_freq, scale = rope_inv_freq(*self.of, n)
            angle = torch.outer(torch.arange(min(n, T), dtype=torch.float32), inv_freq)
            self.cos[row, :n], self.sin[row, :n] = ((t * scale).to(self.cos) for t in (angle.cos(), angle.sin()))
        for table, source in zip(self.tables, (self.cos, self.sin), strict=True):
            table.copy_(source)

    def prompt(self, S: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """cos, sin [R, 1, S, D/2] of S positions from `start` on, ready for [B, H, S, D]."""
        return self.cos[:, None, start : start + S], self.sin[:, None, start : start + S]

    def mean(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """The mean rotation over positions pos [B, n], which may lie beyond the tables: cos, sin [B, 1, 1, D/2]."""
        where = pos.cpu()
        text = where + 1 if self.fitted is None else self.fitted[: len(where), None].expand_as(where)
        inv_freq, scale = rope_inv_freq(*self.of, text)
        angle = where[..., None].double() * inv_freq
        mean = (torch.stack((angle.cos(), angle.sin())).mean(2) * scale).float().to(pos.device)
        return mean[0, :, None, None], mean[1, :, None, None]

    def at(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [B, ..., D/2] at positions pos [B, ...] int64."""
        return angles(self.cos, pos), angles(self.sin, pos)

    def rotate_prompt(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate x [B, H, S, D] from position `start` on, PROMPT_CHUNK tokens at a time to save fp32 temporaries."""
        B, S = len(x), x.shape[2]
        cos, sin = (t[:B] for t in self.prompt(S, start))
        if S <= PROMPT_CHUNK:
            return apply_rope(x, cos, sin)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for part, *of in zip(*(t.split(PROMPT_CHUNK, 2) for t in (out, x, cos, sin)), strict=True):
            part.copy_(apply_rope(*of))
        return out

    def rotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """Rotate x [B, H, D], one token per row, at pos [B]."""
        return rotate_query(x, self.cos, self.sin, pos)
