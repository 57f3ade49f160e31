"""How the next token is drawn from logits: greedily, or with noise that is a function of seed, prompt and position.

No generator, no synchronization: `Sampling.draw` is a part of the compiled step, and gives every row what it gives
alone. Drafts and checks of speculation draw with the same noise (speculation.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.errors import InputError, check_count, check_range, short

NO_TOKEN = -1  # drawn if logits are not finite; found when the token is read, so that no step waits for a check


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn, as in Hugging Face's generate: the penalty comes first, then the fields in their order.

    temperature: 0 is greedy, without any of the next three. top_k: draw from the k most likely tokens. top_p: from the
    fewest that together reach probability p. min_p: from those at least p times as likely as the most likely one. seed:
    makes a run repeatable. repetition_penalty: positive logits of tokens in prompt or text are divided by it, negative
    ones multiplied.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0:  # dividing logits by less than the limit gives infinity
            check_range("--temperature", self.temperature, 1e-4, 1e4, "use 0 for greedy decoding, or 0.1 to 2")
        if self.top_k is not None:
            check_count("--top-k", self.top_k, 1, 2**31 - 1, "leave it out to keep every token")
        if self.top_p is not None:
            check_range("--top-p", self.top_p, 0, 1, "leave it out to keep every token")
        if self.min_p is not None:
            check_range("--min-p", self.min_p, 0, 1, "leave it out to keep every token")
        cuts = {"--top-k": self.top_k, "--top-p": self.top_p, "--min-p": self.min_p}
        if self.temperature == 0 and (idle := [flag for flag, value in cuts.items() if value is not None]):
            raise InputError(f"{idle[0]} is for sampling, and at temperature 0 the likeliest token is taken: give "
                             "--temperature 1, too, or drop it")  # fmt: skip
        check_range("--repetition-penalty", self.repetition_penalty, 1e-4, 1e4, "1 is none, 1.1 to 1.3 are usual")
        check_count("--seed", self.seed, 0, 2**63 - 1)

    @staticmethod
    def of(given: Sampling | None) -> Sampling:
        """The given one, or the default, greedy. Raises InputError if it is something else."""
        if given is not None and not isinstance(given, Sampling):
            raise InputError(f"sampling={short(given)} is no Sampling: give Sampling(temperature=...), from engine")
        return given or Sampling()

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """What a step's graph holds: all but the seed."""
        return astuple(replace(self, seed=0))

    def given(self, keys: Tensor, texts: Sequence[Sequence[int]], vocab: int) -> list[Tensor]:
        """The last arguments of `draw`: keys [B], and the tokens of the texts [B, vocab] if there is a penalty."""
        if self.repetition_penalty == 1:
            return [keys]
        seen = torch.zeros(len(texts), vocab, dtype=torch.bool)
        for row, text in zip(seen, texts, strict=True):
            row[list(text)] = True
        return [keys, seen.to(keys.device)]

    def draw(self, logits: Tensor, pos: Tensor, keys: Tensor, seen: Tensor | None = None) -> Tensor:
        """Draw without synchronization: logits [B, V] of the tokens at pos [B], keys [B] of `noise_keys` -> tokens [B],
        NO_TOKEN for a row with a NaN or infinite logit. seen [B, V] bool: tokens in prompt and text, None without a
        penalty."""
        finite = logits.sum(-1, dtype=torch.float32).isfinite()  # one number that is not makes the sum so
        return torch.where(finite, self._choose(logits, pos, keys, seen), NO_TOKEN)

    def _choose(self, logits: Tensor, pos: Tensor, keys: Tensor, seen: Tensor | None) -> Tensor:
        if seen is not None:
            logits, penalty = logits.float(), self.repetition_penalty
            logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self.temperature == 0:
            return logits.argmax(-1)
        # argmax of p / Exp(1) draws from p, without the synchronization of torch.multinomial
        return (self.probs(logits) / exponential_noise(keys, pos, logits.shape[-1])).argmax(-1)

    def probs(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> the distribution to draw from, fp32 [B, V], not normalized."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            sorted_probs, order = probs.sort(-1, descending=True)
            # the token that crosses top_p is kept; a top_p that fp32 rounds to 0 would keep none
            kept = sorted_probs.cumsum(-1) - sorted_probs < max(self.top_p, 1e-30)
            probs = torch.zeros_like(probs).scatter(-1, order, torch.where(kept, sorted_probs, 0))
        if self.min_p is not None:
            probs = torch.where(probs < self.min_p * probs.amax(-1, keepdim=True), 0, probs)
        return probs


def noise_keys(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """A key for each row, from the seed, its prompt and the number of equal prompts before it. Equal prompts get
    different texts, and a prompt gets the text it gets alone, whatever its batch."""
    before: Counter[tuple[int, ...]] = Counter()
    keys = []
    for prompt in map(tuple, prompts):
        digest = hashlib.blake2b(repr((seed, before[prompt], prompt)).encode(), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "big") >> 1)  # 63 bits: an int64
        before[prompt] += 1
    return keys


WORD = 2**32 - 1  # the low 32 bits


def mix_bits(x: Tensor) -> Tensor:
    """A 32-bit hash in int64 (lowbias32, Wellons 2018). The second factor has 2^32 subtracted, so nothing overflows."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * (0x846CA68B - 2**32) & WORD
    return x ^ (x >> 16)


def exponential_noise(keys: Tensor, pos: Tensor, n: int) -> Tensor:
    """Exp(1) noise fp32 [B, n], a function of keys [B], pos [B] and the column, without a generator."""
    low = mix_bits((keys & WORD) ^ mix_bits(pos))
    high = keys >> 32
    # a column whose number is the high word would get no noise: lowbias32 of 0 is 0
    high = mix_bits((high + (high < n) * 2**31) ^ low)
    bits = mix_bits(mix_bits(torch.arange(n, device=keys.device) ^ low[:, None]) ^ high[:, None])
    # fp32 rounds the largest value up to 1, which would give infinity
    return -torch.log1p(-((bits.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24))
