"""The decode loop over a batch of rows and its KV cache: the file to fork for another loop.

`Session.run` reads prompts and writes answers. `speculation.py` and `snapshot.py` build on it, `llm.py` makes sessions.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.compiled import Step, compile_step, eager_step
from engine.sampling import NO_TOKEN, Sampling, noise_keys
from engine.stored import StoredStep
from model import Transformer
from runtime.errors import InputError
from runtime.machine import SpareCores, synchronize

LAG = 2  # decode steps in flight before the host reads a token, so that the device never waits for the stop check


@dataclass
class Tally:
    """Counts of drafts that were checked and accepted, and of checks, over rows that were not done."""

    drafted: int = 0
    kept: int = 0
    checks: int = 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted, not counting drafts after a rejected one."""
        return self.kept / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_check(self) -> float:
        """The mean number of tokens per check: the accepted drafts and one more."""
        return (self.kept + self.checks) / self.checks if self.checks else 0.0


@dataclass
class Batch:
    """Rows that ran together: the tokens of each (without the stop token), times and bytes."""

    tokens: list[list[int]]
    prompt_tokens: list[int]
    read: int = 0  # tokens that `prefill_s` took
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    compile_s: float = 0.0
    kv_bytes: int = 0  # bytes of all buffers of the cache, as allocated
    kv_bytes_full: int = 0  # bytes of dense keys and values of the same capacity
    interrupted: bool = False  # whether Ctrl-C ended it
    drafts: Tally = field(default_factory=Tally)  # counts of drafted and accepted tokens

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], question: Sequence[int] = ()) -> Batch:
        """A batch without tokens yet."""
        sizes = [len(p) + len(question) for p in prompts]
        return cls([[] for _ in prompts], sizes, sum(sizes))

    @property
    def decoded(self) -> int:
        """The tokens that steps gave: of rows that end before others, and of the last drafts, those of their texts."""
        return sum(min(self.steps, len(row)) for row in self.tokens)

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decoded / self.decode_s if self.decode_s else 0.0

    @contextlib.contextmanager
    def timed(self, part: str, device: torch.device) -> Iterator[None]:
        """Adds the seconds of the code inside to `part`, also if an error ends it."""
        synchronize(device)
        start = time.perf_counter()
        try:
            yield
        finally:
            synchronize(device)
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)


@dataclass
class Completion:
    """The completion of one prompt; `batch` holds times and bytes of the rows that ran with it."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    batch: Batch

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second of the whole batch."""
        return self.batch.decode_tokens_per_s

    @property
    def kv_bytes(self) -> int:
        return self.batch.kv_bytes

    @property
    def kv_bytes_full(self) -> int:
        return self.batch.kv_bytes_full


def make_step(model: Transformer, sampling: Sampling, compile: bool, like: Step | None = None,
              stored: StoredStep | None = None) -> Step:  # fmt: skip
    """A decode step that draws the next token. like, stored: as for `compile_step`."""
    return compile_step(model, sampling.draw, like, stored) if compile else eager_step(model, sampling.draw)


def pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, S] int64 and lengths [B], for `Transformer.prefill`."""
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, p in enumerate(prompts):
        tokens[row, : len(p)] = torch.tensor(p)
    return tokens.to(device), lengths.to(device)


class Session:
    """A batch of rows and its KV cache: `prefill` once, then `rows`, and `feed` for the turns that follow.

    A cache has one owner, the session that prefilled it last; a step of another session raises InputError. cores:
    adapts the number of threads.
    """

    uneven = False  # whether rows have different numbers of tokens; only speculation makes it so

    def __init__(self, model: Transformer, step: Step, sampling: Sampling, cores: SpareCores | None = None):
        self.model, self.step, self.sampling, self.cores = model, step, sampling, cores
        self.device = model.device
        self.lag = LAG if self.device.type == "cuda" else 0
        self.done: list[bool] = []  # which rows have ended, in `rows`
        self.decoded = 0  # decode steps since the prompt, as `maintain` counts them
        self.compile_s = 0.0
        self.tally = Tally()
        self.pos = self.next = torch.empty(0, dtype=torch.int64)
        self.given: list[Tensor] = []  # arguments of Sampling.draw after logits and pos
        self.prompts: list[list[int]] = []
        self.fed: list[Tensor] = []  # tokens [B] of each step since the prompt
        self.logits: Tensor | None = None  # [B, V] right after a prompt

    @property
    def owns_cache(self) -> bool:
        return getattr(self.model.cache, "owner", None) is self

    def own_cache(self) -> None:
        if not self.owns_cache:
            raise InputError("another call has taken the KV cache of this text: finish a stream before the next call, "
                             "or make a second LLM")  # fmt: skip

    @torch.inference_mode()
    def warm_up(self, batch: int) -> float:
        """Compile the step (and capture its graph) on an empty cache; returns the seconds this took."""
        start = time.perf_counter()
        # separate tensors: with one tensor as two arguments, the first real step would compile again
        tokens, pos, keys = (torch.zeros(batch, dtype=torch.int64, device=self.device) for _ in range(3))
        for _ in range(3):
            self.warm_step(tokens, pos, self.sampling.given(keys, [[]] * batch, self.model.args.vocab_size))
        synchronize(self.device)
        self.model.reset_cache()
        return time.perf_counter() - start

    def warm_step(self, tokens: Tensor, pos: Tensor, given: list[Tensor]) -> None:
        self.step(tokens, pos, *given)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], keys: list[int] | None = None) -> None:
        """Right-pad the prompts, run them, draw each row's first new token. keys: by default `noise_keys` of them."""
        if self.cores is not None:
            self.cores.adapt()
        tokens, lengths = pad(prompts, self.device)
        self.model.cache.owner = None  # even if the next lines fail
        drawn_with = torch.tensor(keys or noise_keys(self.sampling.seed, prompts), device=self.device)
        given = self.sampling.given(drawn_with, prompts, self.model.args.vocab_size)
        logits = self.model.prefill(tokens, lengths)
        self.begin(self.sampling.draw(logits, lengths - 1, *given), lengths, *given)
        self.prompts, self.logits = prompts, logits

    def begin(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> None:
        """Take over a cache that holds pos [B] tokens per row; `tokens` [B] come next."""
        self.next, self.pos, self.given = tokens, pos, list(given) or [torch.zeros_like(pos)]
        self.prompts, self.fed, self.logits, self.uneven = [], [], None, False
        self.decoded, self.model.cache.owner = 0, self

    @torch.inference_mode()
    def advance(self, tokens: Tensor) -> None:
        """One decode step with these tokens; sets `next` to those drawn after them."""
        self.own_cache()
        self.fed.append(tokens)
        self.logits = None
        if len(self.given) > 1:
            self.given[1].scatter_(1, tokens.clamp(min=0)[:, None], True)
        # a clone: under CUDA graphs the output's memory is reused by the next replay
        self.next = self.step(tokens, self.pos, *self.given).clone()
        self.pos = self.pos + 1
        self.decoded += 1
        self.model.maintain(self.decoded)

    @torch.inference_mode()  # a step compiled for inference tensors would be compiled again for others
    def feed(self, tokens: Sequence[int]) -> None:
        """Feed the same tokens to every row, through decode: what was compressed stays as it is."""
        for t in tokens:
            self.advance(torch.full_like(self.pos, t))

    def rewind(self, length: int) -> None:
        """Shorten each row's text to `length` tokens: here it has no more, as `tokens` yields each before it is fed."""

    def tokens(self, n: int) -> Iterator[list[int | None]]:
        """Yield n times the next token of every row.

        With `lag` steps in flight, the host reads a token after launching the next steps: the device never waits for
        the host, and has run up to `lag` steps too many when the caller stops. With lag 0 a token is yielded before it
        is fed, so that stopping leaves the cache at the end of the text. An error of a step is raised after the tokens
        before it are yielded.
        """
        flying: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        error: InputError | None = None
        for i in range(n):
            if self.lag == 0:
                yield self.next.tolist()
            else:
                host = torch.empty(self.next.shape, dtype=self.next.dtype, pin_memory=True)
                host.copy_(self.next, non_blocking=True)
                flying.append((host, torch.cuda.Event()))
                flying[-1][1].record()
            if i + 1 < n:
                try:
                    self.advance(self.next)
                except InputError as e:
                    error = e
            while len(flying) > (self.lag if i + 1 < n and not error else 0):
                host, ready = flying.popleft()
                ready.synchronize()
                yield host.tolist()
            if error:
                raise error

    def rows(self, n: int, stop_ids: frozenset[int] = frozenset()) -> Iterator[list[int | None]]:
        """Yield the next token of every row, up to n each, until all rows are done. A row is done, and gets None, after
        a stop id or if the caller sets `done`. Raises InputError if a row's logits are not finite.

        With speculation, None may also mean that the row has no token in this round yet."""
        self.done = [False] * len(self.next)
        for step, drawn in enumerate(self.tokens(n)):
            if self.cores is not None:
                self.cores.adapt()
            self.done = [done or token in stop_ids for done, token in zip(self.done, drawn, strict=True)]
            kept = [None if done else token for done, token in zip(self.done, drawn, strict=True)]
            if NO_TOKEN in kept:
                raise InputError(f"logits are NaN or infinite at step {step}: {self._not_finite()}")
            if not all(self.done):
                yield kept
            if all(self.done):
                return

    def _not_finite(self) -> str:
        flags = {"--dtype": self.model.dtype, "--kv-dtype": self.model.kv_dtype or self.model.dtype}
        for flag, dtype in flags.items():
            if dtype == torch.float16:
                return f"fp16 holds no number above 65504; try {flag} bf16 or fp32"
        return "the method's knobs are exceeded, or the weights are damaged; try --method full"

    def run(self, prompts: list[list[int]] | None, max_new_tokens: int, stop_ids: frozenset[int] = frozenset(),
            on_token: Callable[[int, int], bool] | None = None, batch: Batch | None = None,
            question: Sequence[int] = (), keys: list[int] | None = None) -> Batch:  # fmt: skip
        """Prefill `prompts` (None: they were read), feed the `question` to each row, whose time counts as prefill, then
        decode until every row has a stop id or max_new_tokens.

        on_token(row, id) is called for every token of a text and ends the row if it returns True. Ctrl-C ends the run
        early and keeps the text so far. Raises InputError if logits are not finite or a method cannot continue;
        `batch`, from `Batch.of`, then holds the tokens before it.
        """
        batch = batch or Batch.of(prompts or self.prompts, question)
        with batch.timed("prefill_s", self.device):
            if prompts is not None:
                self.prefill(prompts, keys)
            self.feed(question)
        before, self.tally = self.decoded, batch.drafts
        with batch.timed("decode_s", self.device):
            try:
                for tokens in self.rows(max_new_tokens, stop_ids):
                    for row, token in enumerate(tokens):
                        if token is not None:
                            batch.tokens[row].append(token)
                            self.done[row] = on_token is not None and on_token(row, token)
            except KeyboardInterrupt:  # in a step, perhaps, whose token some layers hold: nothing can follow it
                batch.interrupted, self.model.cache.owner = True, None
            finally:
                batch.steps += self.decoded - before
        return batch
