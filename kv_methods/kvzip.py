"""KVzip: keep what the model needs to repeat the context, whatever question comes later.

After the prompt, the model is asked to repeat it chunk by chunk, and is given each chunk as the answer. A token's score
is the most attention that any query of the repetition pays to it: softmax over the first tokens, the chunk and the
repetition so far. This second pass over the prompt serves all later questions. Decoded tokens stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import knob
from cache.prompt import Text
from cache.prompt_evicting import PromptEvicting

ASK = "\n\nRepeat the previous context exactly."
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with"  # followed by the end of the chunk before

QUERIES = 256  # queries whose weights are held at a time


@dataclass
class Repeat(Text):
    """The request to repeat, followed by a chunk of the prompts from token `start` on."""

    start: int


class KVzip(PromptEvicting):
    paper = "Kim, Kim et al. 2025, KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction"
    stress = dict(budget=12, sinks=2, chunk=16)
    lookback = 0
    reads_queries = False
    exact_prefill = False  # it is exact, but nothing can be stored before the prompt is read again
    votes: Tensor | None = None  # fp32 [B, Hkv, S], while a prompt is read

    @dataclass
    class Args(PromptEvicting.Args):
        budget: int | float = knob(0.3, "tokens kept of a prompt, or their share (published README: 0.3)")
        recent: int = knob(0, "last tokens of a prompt that are kept in any case (ours; published: none)", low=0)
        sinks: int = knob(4, "first tokens, kept and seen by every chunk (KVzip: the system prompt; kvpress: 4)", low=0)
        chunk: int = knob(2048, "tokens repeated at a time (kvpress; published code: 2000)", 1)
        tail: int = knob(8, "tokens of the chunk before that the request ends with (published code)", 0)
        adaptive: bool = knob(True, "share a layer's budget over its KV heads by score (KVzip)")
        safeguard: float = knob(0.0, "with adaptive: the part of its budget that each head has (KVzip: none)", 0, 1)

    def second_pass(self, tokens, lengths, encode):
        a, texts = self.args, []
        for start in range(0, tokens.shape[1], a.chunk):
            ask = torch.tensor(encode(GO_ON if start else ASK), dtype=torch.int64, device=tokens.device)
            given = tokens[:, max(0, start - a.tail) : start + a.chunk] if start else tokens[:, : a.chunk]
            new = (lengths - start).clamp(0, a.chunk)
            n = torch.where(new > 0, new + len(ask) + min(a.tail, start), 0)
            texts.append(Repeat(torch.cat((ask.expand(len(tokens), -1), given), 1), n, start))
        return texts

    def begin_prompt(self, total):
        super().begin_prompt(total)
        self.votes = None

    def reread(self, q, k, v, lengths, text):
        assert self.prompt is not None, "begin_prompt comes first"
        if self.votes is None:
            self.votes = torch.zeros(*k.shape[:2], self.prompt.total, device=k.device)
        if isinstance(text, Repeat):
            chunk = slice(text.start, min(text.start + self.args.chunk, self.prompt.total))
            self.votes[:, :, chunk] = self.most_attention(q, k, lengths, text, chunk)
        return super().reread(q, k, v, lengths, text)

    def most_attention(self, q: Tensor, k: Tensor, lengths: Tensor, text: Repeat, chunk: slice) -> Tensor:
        """The most attention of a text's queries, over a group's heads, to each token of its chunk: q [B, Hq, n, D], k
        [B, Hkv, n, D] -> fp32 [B, Hkv, chunk]."""
        (B, H, n, D), sinks = k.shape, min(self.args.sinks, text.start)
        assert self.prompt is not None
        keys = torch.cat((self.prompt.k_rot[:, :, :sinks], self.prompt.k_rot[:, :, chunk], k), 2)
        at, i = torch.arange(chunk.start, chunk.stop, device=k.device), torch.arange(n, device=k.device)
        inside = at < lengths[:, None]  # [B, chunk]
        there = torch.cat((inside.new_ones(B, sinks), inside, i < text.lengths[:, None]), 1)
        keys = keys.float().masked_fill(~there[:, None, :, None], 0)
        most = torch.full((B, H, len(at)), float("-inf"), device=k.device)  # logarithms
        for first in range(0, n, QUERIES):
            rows = i[first : first + QUERIES]
            seen = sinks + len(at) + first + len(rows)  # keys that one of these queries may see
            causal = i[: first + len(rows)] <= rows[:, None]
            causal = torch.cat((inside.new_ones(len(rows), sinks + len(at)), causal), 1)
            hidden = ~(there[:, None, :seen] & causal)[:, None]  # [B, 1, rows, keys]
            real = (rows < text.lengths[:, None])[:, None, :, None]
            for x in q[:, :, rows].unflatten(1, (H, -1)).unbind(2):  # x [B, H, rows, D]
                logits = (x.float() * D**-0.5 @ keys[:, :, :seen].mT).masked_fill_(hidden, float("-inf"))
                p = logits[..., sinks : sinks + len(at)] - logits.logsumexp(-1, keepdim=True)
                most = most.maximum(p.masked_fill_(~real, float("-inf")).amax(2))
        return most.exp()

    def prompt_scores(self, q, k, v, mass, lengths):
        votes, self.votes = self.votes, None
        assert votes is not None, "no text has been read again"
        t = torch.arange(k.shape[2], device=k.device)
        return votes.masked_fill(t < self.args.sinks, float("inf"))
