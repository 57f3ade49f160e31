"""Generation: sampling, the decode loop over a batch and its cache, and `LLM`, which puts them together.

from engine import LLM
print(LLM("models/tiny", method="self_index").generate("import os", max_new_tokens=32)[0].text)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache.spec import layer_methods
from checkpoint import load_checkpoint, random_transformer
from compiled import Step, compile_step, eager_step
from errors import InputError, check_count, check_range, short
from model import ModelArgs, Transformer
from parallel import ONE, Ranks
from runtime import TINY, check_out, pick_device, pick_dtype, synchronize
from snapshot import CacheFile, Snapshot, State, identity, save
from speculation import Speculator, Tally, behind
from tokenizer import load_tokenizer
from tokenizer.random import RandomVocabulary
from tokenizer.turns import ChatParts, parts_of
from weights import WeightFormat, open_checkpoint

LAG = 2  # decode steps in flight before a token is read on the host: the device never waits for the stop check
NO_TOKEN = -1  # drawn from logits that are not finite: seen when the token is read, so that no step waits for a check
CONVERSATION = 8192  # slots allocated for a conversation, if the model's context has as many
LEAST = 256  # slots for prompts in a cache that may be saved: in smaller ones, methods lay out sinks otherwise
STEPS = 4  # compiled steps that are kept for one cache, each for a way of sampling; the one not used for longest goes


# ---- sampling ----


@dataclass
class Sampling:
    """How a token is drawn, as by Hugging Face's generate: the penalty first, the rest in the order of the fields.

    temperature: 0 is greedy. top_k, top_p, min_p: draw from the k likeliest; from the fewest that have probability p
    together; from those at least p times as likely as the likeliest. seed: makes a run repeatable.
    repetition_penalty: positive logits of tokens in prompt or text are divided by it, negative ones multiplied.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0:  # logits over less than the least would be infinite
            check_range("--temperature", self.temperature, 1e-4, 1e4, "use 0 for greedy decoding, or 0.1 to 2")
        if self.top_k is not None:
            check_count("--top-k", self.top_k, 1, 2**31 - 1, "leave it out to keep every token")
        if self.top_p is not None:
            check_range("--top-p", self.top_p, 0, 1, "leave it out to keep every token")
        if self.min_p is not None:
            check_range("--min-p", self.min_p, 0, 1, "leave it out to keep every token")
        check_range("--repetition-penalty", self.repetition_penalty, 1e-4, 1e4, "1 is none, 1.1 to 1.3 are usual")
        check_count("--seed", self.seed, 0, 2**63 - 1)

    def draw(self, logits: Tensor, pos: Tensor, keys: Tensor, seen: Tensor | None = None) -> Tensor:
        """logits [B, V] of the tokens at pos [B], keys [B] of `noise_keys`, seen [B, V] bool -> tokens [B]; no
        synchronization. seen: what is in prompt and text, None without a penalty."""
        if seen is not None:
            logits, penalty = logits.float(), self.repetition_penalty
            logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self.temperature == 0:
            return logits.argmax(-1)
        # argmax of p / Exp(1) draws from p, without the synchronization of torch.multinomial
        return (self.probs(logits) / exponential_noise(keys, pos, logits.shape[-1])).argmax(-1)

    def probs(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> the distribution that is drawn from, fp32 [B, V], not normalized."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            sorted_probs, order = probs.sort(-1, descending=True)
            # the token that crosses top_p is kept; far below 1e-30, fp32 has only 0, and would keep none
            kept = sorted_probs.cumsum(-1) - sorted_probs < max(self.top_p, 1e-30)
            probs = torch.zeros_like(probs).scatter(-1, order, torch.where(kept, sorted_probs, 0))
        if self.min_p is not None:
            probs = torch.where(probs < self.min_p * probs.amax(-1, keepdim=True), 0, probs)
        return probs


def noise_keys(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Of each row, by the seed, its prompt, and how many equal prompts come before it: equal prompts get different
    texts, and each prompt what it gets alone, whatever stands beside it and however many rows run at a time."""
    before: Counter[tuple[int, ...]] = Counter()
    keys = []
    for prompt in map(tuple, prompts):
        digest = hashlib.blake2b(repr((seed, before[prompt], prompt)).encode(), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "big") >> 1)  # 63 bits: an int64
        before[prompt] += 1
    return keys


WORD = 2**32 - 1


def mix_bits(x: Tensor) -> Tensor:
    """A hash of 32 bits in int64 (lowbias32, Wellons 2018). The second factor is less by 2^32: no product overflows."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * (0x846CA68B - 2**32) & WORD
    return x ^ (x >> 16)


def exponential_noise(keys: Tensor, pos: Tensor, n: int) -> Tensor:
    """Exp(1) fp32 [B, n], a function of keys [B], pos [B] and the column: it needs no generator."""
    low = mix_bits((keys & WORD) ^ mix_bits(pos))
    high = keys >> 32
    # a column whose number is the high word would get no noise: lowbias32 of 0 is 0
    high = mix_bits((high + (high < n) * 2**31) ^ low)
    bits = mix_bits(mix_bits(torch.arange(n, device=keys.device) ^ low[:, None]) ^ high[:, None])
    # fp32 rounds the largest up to 1, whose exponential would be infinite
    return -torch.log1p(-((bits.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24))


# ---- the decode loop ----


class Ended(InputError):
    """What ended a run in the middle of its text; `completions` holds what there is."""

    def __init__(self, message: str, completions: list[Completion]):
        super().__init__(message)
        self.completions = completions


def draw_finite(sampling: Sampling, logits: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
    """`Sampling.draw`, but NO_TOKEN where one of a row's logits is NaN or infinite, which the sum then is, too."""
    return torch.where(logits.sum(-1, dtype=torch.float32).isfinite(), sampling.draw(logits, pos, *given), NO_TOKEN)


def make_step(model: Transformer, sampling: Sampling, compile: bool, like: Step | None = None) -> Step:
    """One decode step and the draw. like: a compiled one on the same cache, whose layers serve this one, too."""

    def choose(logits: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        return draw_finite(sampling, logits, pos, *given)

    return compile_step(model, choose, like) if compile else eager_step(model, choose)


def pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, S] int64 and lengths [B], what `Transformer.prefill` takes."""
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, p in enumerate(prompts):
        tokens[row, : len(p)] = torch.tensor(p)
    return tokens.to(device), lengths.to(device)


class Session:
    """A batch of rows and its KV cache: `prefill` once, then `generate`, and `feed` for the turns that follow.

    A cache has one owner: the session that has prefilled it last. InputError if another one asks for a step. With a
    speculator the method drafts, and every token is what exact attention draws.
    """

    def __init__(self, model: Transformer, step: Step, sampling: Sampling, speculator: Speculator | None = None):
        self.model, self.step, self.sampling, self.speculator = model, step, sampling, speculator
        self.device = model.device
        self.lag = LAG if self.device.type == "cuda" else 0
        self.done: list[bool] = []  # by row, in `rows`
        self.decoded = 0  # steps since the prompt, what `maintain` counts
        self.compile_s = 0.0
        self.tally = Tally()
        self.pos = self.next = torch.empty(0, dtype=torch.int64)
        self.given: list[Tensor] = []  # what Sampling.draw takes beside logits and pos
        self.prompts: list[list[int]] = []
        self.fed: list[Tensor] = []  # tokens [B] of each step since
        self.uneven = False  # rows that speculate have got different numbers of them
        self.logits: Tensor | None = None  # [B, V] right after a prompt

    @property
    def owns_cache(self) -> bool:
        return getattr(self.model.cache, "owner", None) is self

    @torch.inference_mode()
    def warm_up(self, batch: int) -> float:
        """Compile the step (and capture its graph) on an empty cache; returns the seconds it took."""
        start = time.perf_counter()
        # each its own tensor: the code for one that is two would be compiled again at the first real step
        tokens, pos, keys = (torch.zeros(batch, dtype=torch.int64, device=self.device) for _ in range(3))
        given = self._given(keys, [[]] * batch)
        for _ in range(3):
            self.step(tokens, pos, *given)
        if self.speculator is not None:
            for n in self.speculator.sizes():
                block = tokens[:, None].repeat(1, n + 1)
                for _ in range(3):
                    self.speculator.check(block, pos, *behind(given, block))
        synchronize(self.device)
        self.model.reset_cache()
        return time.perf_counter() - start

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], keys: list[int] | None = None) -> None:
        """Right-pad the prompts, run them, and draw the first new token of each row; keys: by default of these rows."""
        for prompt in prompts:
            self.model.args.check_ids(prompt)
        tokens, lengths = pad(prompts, self.device)
        self.model.cache.owner = None  # also if what follows fails
        given = self._given(torch.tensor(keys or noise_keys(self.sampling.seed, prompts), device=self.device), prompts)
        logits = self.model.prefill(tokens, lengths)
        self.begin(draw_finite(self.sampling, logits, lengths - 1, *given), lengths, *given)
        self.prompts, self.logits = prompts, logits

    def _given(self, keys: Tensor, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        if self.sampling.repetition_penalty == 1:
            return [keys]
        seen = torch.zeros(len(prompts), self.model.args.vocab_size, dtype=torch.bool)
        for row, prompt in zip(seen, prompts, strict=True):
            row[list(prompt)] = True
        return [keys, seen.to(self.device)]

    def begin(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> None:
        """From a cache that holds pos [B] tokens a row: `tokens` [B] are the next ones. The cache is this session's."""
        self.next, self.pos, self.given = tokens, pos, list(given) or [torch.zeros_like(pos)]
        self.prompts, self.fed, self.logits, self.uneven = [], [], None, False
        self.decoded, self.model.cache.owner = 0, self

    def state(self) -> State:
        """Where it stands: with what the cache holds, all that `resume` needs. InputError if it has no cache."""
        if not self.owns_cache:
            raise InputError("there is nothing in the cache to save: read a prompt first")
        if self.uneven:
            raise InputError(
                "rows that speculate have gone on unevenly: save the cache after the prompt, or a row alone"
            )
        fed = torch.stack(self.fed, 1) if self.fed else self.next.new_empty(len(self.next), 0)
        return State(self.prompts, fed, self.next, self.logits)

    @torch.inference_mode()
    def resume(self, state: State) -> None:
        """Go on from there, in a cache that holds what it held. By another Sampling than then, what comes next is
        drawn again where a prompt's logits are known."""
        lengths = torch.tensor([len(p) for p in state.prompts], device=self.device)
        fed, tokens, pos = state.fed.to(self.device), state.next.to(self.device), lengths + state.decoded
        texts = [p + row for p, row in zip(state.prompts, fed.tolist(), strict=True)]
        given = self._given(torch.tensor(noise_keys(self.sampling.seed, state.prompts), device=self.device), texts)
        logits = None if state.logits is None else state.logits.to(self.device)
        if logits is not None:
            tokens = draw_finite(self.sampling, logits, pos - 1, *given)
        self.model.cache[0].rope.set_prompt(lengths)
        self.begin(tokens, pos, *given)
        self.prompts, self.fed, self.logits = state.prompts, list(fed.unbind(1)), logits
        self.decoded = state.decoded

    def _own_cache(self) -> None:
        if not self.owns_cache:
            raise InputError("another call has taken the KV cache of this text: finish a stream before the next call, "
                             "or make a second LLM")  # fmt: skip

    @torch.inference_mode()
    def advance(self, tokens: Tensor) -> None:
        """One decode step with these tokens; `next` is what follows them."""
        self._own_cache()
        self.fed.append(tokens)
        self.logits = None
        if len(self.given) > 1:
            self.given[1].scatter_(1, tokens.clamp(min=0)[:, None], True)
        # a clone: under CUDA graphs the output's memory is reused by the next replay
        self.next = self.step(tokens, self.pos, *self.given).clone()
        self.pos = self.pos + 1
        self.decoded += 1
        self.model.maintain(self.decoded)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> None:
        """The same further tokens for every row: they go through decode, what was compressed stays as it is."""
        self.model.args.check_ids(tokens)
        if self.speculator is None:
            for t in tokens:
                self.advance(torch.full_like(self.pos, t))
            return
        block = self.speculator.most + 1
        for i in range(0, len(tokens), block):
            self._own_cache()
            part = list(tokens[i : i + block])
            self.next, self.logits = self.speculator.feed(part, self.pos, self.given), None
            self.fed += [torch.full_like(self.pos, t) for t in part]
            self.pos = self.pos + len(part)
            self.decoded += len(part)
            self.model.maintain(self.decoded)

    @torch.inference_mode()
    def rewind(self, length: int) -> None:
        """A text of `length` tokens a row, of which this session has fed more: only a speculating one does."""
        over = int((self.pos - length).amax())
        if over > 0:
            end, self.pos = self.pos, self.pos.clamp(max=length)
            self.model.rewind(self.pos, end)
            self.decoded -= over
            self.fed = self.fed[:-over]

    def rows(self, n: int, stop_ids: frozenset[int] = frozenset()) -> Iterator[list[int | None]]:
        """Yield the next token of every row, up to n for each; None for a row that is done: it met a stop id, or
        whoever reads this set `done`. Ends when all are. InputError if a row's logits are not finite.

        Rows that speculate get tokens at times of their own: None is then also of a row that has none this time."""
        self.done = [False] * len(self.next)
        source: Iterator[Any] = self.tokens(n) if self.speculator is None else self.checked_tokens(n)
        for step, drawn in enumerate(source):
            self.done = [done or token in stop_ids for done, token in zip(self.done, drawn, strict=True)]
            kept = [None if done else token for done, token in zip(self.done, drawn, strict=True)]
            if NO_TOKEN in kept:
                raise InputError(f"logits are NaN or infinite at step {step}: {self._not_finite()}")
            if not all(self.done):
                yield kept
            if all(self.done):
                return

    def _not_finite(self) -> str:
        model = self.model
        flags = {"--dtype": model.dtype, "--kv-dtype": model.kv_dtype or model.dtype}
        for flag, dtype in flags.items():
            if dtype == torch.float16:
                return f"fp16 holds no number above 65504; try {flag} bf16 or fp32"
        return "the method's knobs are exceeded, or the weights are damaged; try --method full"

    def checked_tokens(self, n: int) -> Iterator[list[int | None]]:
        """The next n tokens of every row, drafted by the method and checked by exact attention, a round at a time. A
        round's tokens are fed when the first of them is yielded: `rewind` takes back those that the caller does not
        want."""
        assert self.speculator is not None
        yield self.next.tolist()
        left, begun = torch.full_like(self.pos, n - 1), self.decoded
        fed = [0] * len(self.pos)
        while not all(f == n - 1 or done for f, done in zip(fed, self.done, strict=True)):
            first = self.next
            tokens, count, kept = self.check(left)
            self.logits, self.uneven = None, self.uneven or len(set(count)) > 1
            self.fed += [first, *torch.tensor(tokens, device=first.device).unbind(1)][: max(count)]
            at_most = [n - 1 - f for f in fed]
            fed = [f + c for f, c in zip(fed, count, strict=True)]
            self._count(at_most, kept)
            left = left - torch.tensor(count, device=left.device)
            self.pos = self.pos + torch.tensor(count, device=left.device)
            self.decoded = begun + max(fed)
            self.model.maintain(self.decoded)
            for i in range(max(count)):
                yield [row[i] if i < c else None for row, c in zip(tokens, count, strict=True)]

    @torch.inference_mode()
    def check(self, left: Tensor) -> tuple[list[list[int]], list[int], list[int]]:
        """A round (`Speculator.round`), read on the host."""
        assert self.speculator is not None
        self._own_cache()
        tokens, count, kept = self.speculator.round(self.step, self.next, self.pos, left, self.given)
        last = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.next = torch.where(count > 0, last, self.next)
        return tokens.tolist(), count.tolist(), kept.tolist()

    def _count(self, left: list[int], kept: list[int]) -> None:
        """Of the rows that go on."""
        assert self.speculator is not None
        n, before = self.speculator.n, (self.tally.kept, self.tally.drafted)
        for most, agreed, done in zip(left, kept, self.done, strict=True):
            if most and not done:
                self.tally.kept += min(agreed, most)
                self.tally.drafted += min(agreed + 1, n, most)
                self.tally.checks += 1
        self.speculator.adapt(self.tally.kept - before[0], self.tally.drafted - before[1])

    def tokens(self, n: int) -> Iterator[list[int]]:
        """Yield n times the next token of every row.

        With `lag` steps in flight a token is read on the host after the steps that follow it were launched: the device
        never waits for us, and has run up to `lag` steps too many when the caller stops. With lag 0 a token is yielded
        before it is fed, so that stopping leaves the cache at the text's end. What a step raises is raised when the
        tokens before it are read.
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


@dataclass
class Result:
    """A batch: the tokens of each row (a stop token not included), and what it took."""

    tokens: list[list[int]]
    prompt_tokens: list[int]
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    compile_s: float = 0.0
    kv_bytes: int = 0  # of all buffers of the cache, as allocated
    kv_bytes_full: int = 0  # of a dense K and V of the same capacity
    interrupted: bool = False  # by Ctrl-C
    drafts: Tally = field(default_factory=Tally)  # what speculation drafted and kept

    @property
    def decode_tokens_per_s(self) -> float:
        return self.steps * len(self.tokens) / self.decode_s if self.decode_s else 0.0


@dataclass
class Completion:
    """What one prompt got; `batch` holds times and bytes of the rows that ran with it."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    batch: Result

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the whole batch."""
        return self.batch.decode_tokens_per_s

    @property
    def kv_bytes(self) -> int:
        return self.batch.kv_bytes

    @property
    def kv_bytes_full(self) -> int:
        return self.batch.kv_bytes_full


def empty_result(prompts: list[list[int]], question: Sequence[int] = ()) -> Result:
    return Result([[] for _ in prompts], [len(p) + len(question) for p in prompts])


def generate(
    session: Session,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    on_token: Callable[[int, int], Any] | None = None,
    result: Result | None = None,
    question: Sequence[int] = (),
    keys: list[int] | None = None,
) -> Result:
    """Prefill `prompts`, feed each row the `question`, decode until every row has met a stop id or has max_new_tokens.

    on_token(row, id) is called for every token kept, and ends the row if it returns True. Ctrl-C ends early and keeps
    what there is. InputError if logits are not finite, or a method cannot go on; `result`, an `empty_result`, then
    holds what came before.
    """
    result = result or empty_result(prompts)
    synchronize(session.device)
    start = time.perf_counter()
    session.prefill(prompts, keys)
    result.prefill_s = time.perf_counter() - start
    answer(session, question, result, max_new_tokens, stop_ids, on_token)
    return result


def answer(
    session: Session,
    question: Sequence[int],
    result: Result,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    on_token: Callable[[int, int], Any] | None,
) -> None:
    """`generate`, from a session that has read the prompts; the time of the question counts as prefill."""
    start = time.perf_counter()
    session.feed(question)
    synchronize(session.device)
    result.prefill_s += time.perf_counter() - start
    continue_rows(session, result, max_new_tokens, stop_ids, on_token)


def continue_rows(
    session: Session,
    result: Result,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    on_token: Callable[[int, int], Any] | None,
) -> None:
    """The decode loop: from `session.next` on, until all rows stop."""
    before, start = session.decoded, time.perf_counter()
    session.tally = result.drafts
    try:
        for tokens in session.rows(max_new_tokens, stop_ids):
            for row, token in enumerate(tokens):
                if token is not None:
                    result.tokens[row].append(token)
                    session.done[row] = on_token is not None and on_token(row, token) is True
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        synchronize(session.device)
        result.decode_s += time.perf_counter() - start
        result.steps += session.decoded - before


def round_up(n: int) -> int:
    """Tokens that are allocated for n in a compiled step: multiples of 256, from 1024 on two sizes an octave."""
    unit = max(256, 2 ** ((n - 1).bit_length() - 2))
    return -(-n // unit) * unit


# ---- for a user ----


class Text:
    """The text of a row as its tokens come, up to the first stop string: what may be the beginning of one waits."""

    def __init__(self, stream: Any, stop: Sequence[str]):
        self.stream, self.stop = stream, stop
        self.text = self.waiting = ""
        self.stopped = False

    def put(self, token: int) -> str:
        """The text that this token makes certain; `stopped` if there is no more."""
        return self._show(self.stream.put(token))

    def flush(self) -> str:
        return self._show(self.stream.flush(), last=True)

    def _show(self, piece: str, last: bool = False) -> str:
        if self.stopped:
            return ""
        self.waiting += piece
        # by its end: the same however the text is cut into pieces
        found = [(i + len(s), i) for s in self.stop if (i := self.waiting.find(s)) >= 0]
        self.stopped = bool(found)
        begun = [n for s in self.stop for n in range(1, len(s)) if self.waiting.endswith(s[:n])]
        end = min(found)[1] if found else len(self.waiting) - (0 if last else max(begun, default=0))
        shown, self.waiting = self.waiting[:end], self.waiting[end:]
        self.text += shown
        return shown


def stop_strings(stop: Any) -> tuple[str, ...]:
    """InputError unless this is a text or several."""
    given = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, list | tuple) or not all(isinstance(s, str) and s for s in given):
        raise InputError(f"--stop is {short(stop)}: give a text, or a list of texts, that are not empty")
    return tuple(given)


def locked(call: Callable[..., Any]) -> Any:
    """A method of an LLM or of what has one, which other threads wait for."""

    @functools.wraps(call)
    def wait(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with getattr(self, "llm", self).lock:
            return call(self, *args, **kwargs)

    return wait


class LLM:
    """A model, its tokenizer and a KV-cache method.

        llm = LLM("models/tiny", method="self_index,budget=160")
        for c in llm.generate(["import os", "def main():"], max_new_tokens=64):
            print(c.text, c.decode_tokens_per_s, c.kv_bytes / c.kv_bytes_full)
        for piece in llm.stream("import os"):
            print(piece, end="")

    method is a spec (cache/spec.py), further arguments are knobs of it. random_init names a model of model.NAMED that
    gets random weights. weights, head: as --weights and --head of generate.py; dtype is what is computed in, kv_dtype
    what the cache holds. calibration: a file of calibrate.py, by default the one beside the weights. compile:
    torch.compile the decode step, by default on a GPU; the cache's capacity is then rounded up, so that other lengths
    need no other step. max_seq_len: the capacity, in tokens of prompt and answer, of every call.
    prefill_chunk: a prompt is read so many tokens at a time, in less memory; by default all at once. ranks: of
    `parallel.start()`, the processes that share the model: all make the same calls, and get the same tokens.
    speculate: the method drafts so many tokens, exact attention checks them: the text is that of method="full".
    adaptive: fewer and more again, up to `speculate`, by how many are right.

    All calls share one cache. Threads wait for each other; a stream that another call interrupts ends with an
    InputError; a conversation prefills again what it has said.
    """

    def __init__(
        self,
        /,  # a knob may be called self
        checkpoint: str | Path = TINY,
        method: str = "full",
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        compile: bool | None = None,
        random_init: str | None = None,
        seed: int = 0,
        weights: str | None = None,
        head: str | None = None,
        kv_dtype: str | torch.dtype | None = None,
        calibration: str | Path | None = None,
        max_seq_len: int | None = None,
        prefill_chunk: int | None = None,
        ranks: Ranks = ONE,
        speculate: int | None = None,
        adaptive: bool = False,
        **knobs: Any,
    ):
        if speculate is not None:
            check_count("--speculate", speculate, 1, 64, "leave it out to answer by the method alone")
        self.speculate, self.adaptive = speculate or 0, adaptive
        device = pick_device(None if device is None else str(device))
        dtype = dtype if isinstance(dtype, torch.dtype) else pick_dtype(dtype, device)
        weight_format = WeightFormat.parse(weights, head)
        self.compile = device.type == "cuda" if compile is None else compile
        self.tokenizer: Any
        if random_init:
            args = dataclasses.replace(ModelArgs.from_name(random_init), ranks=ranks)
            self.model = random_transformer(args, device, dtype, seed, weight_format)
            self.tokenizer = RandomVocabulary()
        else:
            reader = open_checkpoint(checkpoint)
            self.model = load_checkpoint(reader, device, dtype, weight_format, ranks)
            self.tokenizer = load_tokenizer(reader.tokenizer)
        self.source = f"--random-init {random_init} and seed {seed}" if random_init else str(checkpoint)
        self.source += "".join(f" {flag} {x}" for flag, x in (("--weights", weights), ("--head", head)) if x)
        self.weight_format = weight_format
        self.model.kv_dtype = pick_dtype(kv_dtype, device) if isinstance(kv_dtype, str) else kv_dtype
        self.model.use_calibration(calibration)
        if max_seq_len is not None:
            check_count("--max-seq-len", max_seq_len, 2, self.model.args.context, "the most is the model's context")
        self.max_seq_len = max_seq_len
        if prefill_chunk is not None:
            check_count("--prefill-chunk", prefill_chunk, 1, 2**31 - 1, "leave it out to read a prompt at once")
        self.model.prefill_chunk = prefill_chunk
        self.model.encode = functools.partial(self.tokenizer.encode, bos=False)
        self.lock = threading.RLock()
        self.use(method, **knobs)

    @locked
    def use(self, method: str, /, **knobs: Any) -> LLM:
        """Another method from here on. InputError if it or a knob is unknown or out of range."""
        layer_methods(method, self.model.args.n_layer, knobs)
        self.method, self.knobs = method, knobs
        # on the cache that is set up: sampling, but for the seed -> step, and what speculates
        self._steps: dict[Any, tuple[Step, Speculator | None]] = {}
        self._ready: tuple[Any, Any] = (None, None)  # that cache, and its size
        self.model.cache = None  # whoever owned it loses it
        return self

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_ids | frozenset(self.model.args.eos_ids)

    def session(self, batch: int, max_seq_len: int, max_new_tokens: int | None, sampling: Sampling) -> Session:
        """An empty cache for so many rows and tokens, and the step on it: those of the last call if they fit."""
        size = (batch, max_seq_len, max_new_tokens)
        if self.model.cache is not None and self._ready == (self.model.cache, size):
            self.model.reset_cache()
            self.model.cache.owner = None
        else:
            self._steps = {}
            self.model.setup(self.method, *size, self.knobs, self.speculate)
            self._ready = (self.model.cache, size)
        key = dataclasses.astuple(dataclasses.replace(sampling, seed=0))
        start = time.perf_counter()
        made, (like, _) = self._steps.pop(key, None), next(iter(self._steps.values()), (None, None))
        step, speculator = made or (make_step(self.model, sampling, self.compile, like), self._speculator(sampling))
        session = Session(self.model, step, sampling, speculator)
        self._steps[key] = step, speculator  # as the newest
        if len(self._steps) > STEPS:
            del self._steps[next(iter(self._steps))]
        if made is None and self.compile:
            print(f"compiling the decode step: {self.method}, {batch} rows of {max_seq_len} tokens", file=sys.stderr)
            session.warm_up(batch)
            session.compile_s = time.perf_counter() - start  # with the import of the compiler
        return session

    def _speculator(self, sampling: Sampling) -> Speculator | None:
        if not self.speculate:
            return None
        draw = functools.partial(draw_finite, sampling)
        return Speculator(self.model, draw, self.speculate, self.compile, self.adaptive)

    def capacity(self, prompt: int, max_new_tokens: int, question: int = 0) -> tuple[int, int | None]:
        """max_seq_len and max_new_tokens of a cache for so many tokens. InputError if there is no room for them."""
        check_count("--max-new-tokens", max_new_tokens, 1, 2**31 - 1)
        longest, most = prompt + question, self.max_seq_len or self.model.args.context
        limit = ("--max-seq-len" if self.max_seq_len else "the model's context") + f" of {most}"
        if longest >= most:
            raise InputError(f"the prompt of {longest} tokens exceeds {limit}: shorten the prompt")
        if longest + max_new_tokens > most:
            raise InputError(f"{longest} prompt tokens and --max-new-tokens {max_new_tokens} exceed {limit}: "
                             f"use --max-new-tokens {most - longest} or less")  # fmt: skip
        new = question + max_new_tokens
        if not self.compile and not self.max_seq_len:
            return prompt + new, new
        prompt, new = round_up(prompt), round_up(new)
        return (prompt + new, new) if prompt + new <= most and not self.max_seq_len else (most, None)

    def encode(
        self,
        prompt: str | list[int],
        chat: bool = False,
        system: str | None = None,
        chat_args: dict[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a prompt: text, or tokens as they are. InputError if there are none.

        chat: by the chat template, in which the prompt is a user's text and names no special tokens; system: a message
        before it; chat_args: variables of the template, as enable_thinking=False.
        """
        messages = self.open_chat(chat, system, chat_args)
        if isinstance(prompt, str):
            if chat:
                turns = [*messages, {"role": "user", "content": prompt}]
                prompt = self.tokenizer.encode_chat(turns, **(chat_args or {}))
            else:
                prompt = self.tokenizer.encode(prompt, bos=True)
        if not (ids := self._check_ids(prompt)):
            raise InputError("a prompt has no tokens: give some text")
        return ids

    def _check_ids(self, ids: Any) -> list[int]:
        """InputError unless these are ids of this model's tokens."""
        if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
            what = f"{type(ids).__name__} of {type(ids[0]).__name__}" if isinstance(ids, list) else type(ids).__name__
            raise InputError(f"a prompt is a {what}: give text or a list of token ids, of a tensor its tolist()")
        self.model.args.check_ids(ids)
        return list(ids)

    def open_chat(self, chat: bool, system: str | None, chat_args: dict[str, Any] | None) -> list[dict[str, str]]:
        """The messages before the first of a user. InputError if there is something for a chat template, and none."""
        if not chat and (system is not None or chat_args):
            raise InputError(
                "a system message and template variables are for the chat template: add --chat (chat=True)"
            )
        return [] if system is None else [{"role": "system", "content": system}]

    def _encode_question(self, question: str | list[int] | None, chat: bool) -> list[int]:
        """Tokens of what follows every prompt through decode. InputError with a chat template, which closes a prompt's
        turn behind it."""
        if not question:
            return []
        if chat:
            raise InputError("a chat template ends the prompt's turn: ask(prompt, questions, chat=True), or ask in a "
                             "second turn of a conversation (--interactive)")  # fmt: skip
        return self._check_ids(self.tokenizer.encode(question, bos=False) if isinstance(question, str) else question)

    @locked
    def generate(
        self,
        prompts: str | Sequence[str | list[int]],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        *,
        chat: bool = False,
        system: str | None = None,
        chat_args: dict[str, Any] | None = None,
        question: str | list[int] | None = None,
        batch_size: int | None = None,
        stop: str | Sequence[str] = (),
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in order; prompts of any lengths run side by side, `batch_size` at a time.

        chat, system, chat_args: as in `encode`.
        question: more text behind every prompt, which comes through decode: the method compresses without knowing it.
        stop: strings that end a text, which does not show them; their tokens are in `tokens`.
        on_text(row, piece) is called as text comes. Ctrl-C ends early and keeps what there is. InputError if prompt and
        new tokens exceed the model's context or the free memory; `Ended`, with the text so far, if a step fails.
        """
        asked = self._encode_question(question, chat)
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, list | tuple) or prompts and all(type(p) is int for p in prompts):
            raise InputError(f"the prompts are a {type(prompts).__name__}: give a list, of texts or of lists of token "
                             "ids, as [[1, 2, 3]]")  # fmt: skip
        rows = [self.encode(p, chat, system, chat_args) for p in prompts]
        if not rows:
            raise InputError("no prompt was given: give a text, or a list of them")
        if batch_size is not None:
            check_count("--batch-size", batch_size, 1, 1_000_000)
        sampling, out = sampling or Sampling(), list[Completion]()
        keys, stop = noise_keys(sampling.seed, rows), stop_strings(stop)
        size = self.capacity(max(map(len, rows)), max_new_tokens, len(asked))
        step = batch_size or len(rows)
        for first in range(0, len(rows), step):
            batch = rows[first : first + step]
            session, result = self.session(len(batch), *size, sampling), empty_result(batch, asked)
            result.compile_s = session.compile_s
            go = functools.partial(generate, session, batch, result=result, question=asked,
                                   keys=keys[first : first + step])  # fmt: skip
            if not self._run(go, result, out, max_new_tokens, stop, on_text):
                break
        return out

    def _run(
        self,
        go: Callable[..., Any],
        result: Result,
        out: list[Completion],
        max_new_tokens: int,
        stop: Sequence[str],
        on_text: Callable[[int, str], None] | None,
    ) -> bool:
        """Run a batch by `go`, a `generate` or an `answer` into `result`, and add its completions to those before it.
        False after Ctrl-C. `Ended` if a step fails; with nothing to show, what was raised."""
        texts, first, error = [Text(self.tokenizer.stream(), stop) for _ in result.tokens], len(out), None

        def show(row: int, piece: str) -> None:
            if on_text:
                on_text(first + row, piece)

        def put(row: int, token: int) -> bool:
            show(row, texts[row].put(token))
            return texts[row].stopped

        try:
            go(max_new_tokens=max_new_tokens, stop_ids=self.stop_ids, on_token=put)
        except InputError as e:
            if not out and not any(result.tokens):
                raise
            error = e
        except KeyboardInterrupt:  # in a prompt or a question
            if not out:
                raise
            result.interrupted = True
        result.kv_bytes = self.model.kv_bytes()
        result.kv_bytes_full = self.model.kv_bytes_full(len(texts), self.model.cache[0].shape.max_seq_len)
        for row, (ids, text) in enumerate(zip(result.tokens, texts, strict=True)):
            show(row, text.flush())
            out.append(Completion(text.text, ids, result.prompt_tokens[row], result))
        if error:
            raise Ended(str(error), out)
        return not result.interrupted

    # ---- a prompt that is read once ----

    def _identity(self) -> dict[str, Any]:
        return identity(self.model, self.method, self.knobs, self.source, self.weight_format)

    @locked
    def read(
        self,
        prompts: str | Sequence[str | list[int]],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        further: int = 0,
    ) -> Session:
        """Prompts, read side by side: what follows is up to the session, `feed` and `rows`, until another call takes
        the cache. further: tokens beside the new ones that may be fed. InputError as `generate`."""
        given = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(given, list | tuple) or not given:
            raise InputError("no prompt was given: give a text, or a list of them")
        rows = [self.encode(p) for p in given]
        session = self.session(len(rows), *self._roomy(rows, max_new_tokens, further), sampling or Sampling())
        session.prefill(rows)
        return session

    def _roomy(self, prompts: list[list[int]], max_new_tokens: int, further: int) -> tuple[int, int | None]:
        """`capacity`, where there is room with LEAST slots for prompts."""
        check_count("--max-new-tokens", max_new_tokens, 1, 2**31 - 1)
        room = (self.max_seq_len or self.model.args.context) - further - max_new_tokens
        return self.capacity(max(*map(len, prompts), min(LEAST, room)), max_new_tokens, further)

    @locked
    def save(self, file: str | Path, **more: Any) -> None:
        """Write what the cache holds, the prompt of the last call and what was decoded since, to a file for `restore`.
        more: what is to be found in the file, in JSON."""
        check_out(file, "--save-cache")
        session = getattr(self.model.cache, "owner", None)
        if session is None or not session.prompts:
            raise InputError("there is nothing in the cache to save: read a prompt first")
        save(Path(file), self.model.cache, session.state(), self._identity(), **more)

    @locked
    def restore(
        self,
        file: str | Path | CacheFile,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        further: int = 0,
    ) -> Session:
        """Go on from a file of `save`, as if the prompt had been read here; the arguments are those of `read`.
        InputError if the file is damaged, of another model, method, knob, dtype or calibration, or does not fit."""
        saved = file if isinstance(file, CacheFile) else CacheFile(file)
        saved.check(self._identity())
        state = saved.state
        size = self._roomy(state.prompts, max_new_tokens, further + state.decoded)
        session = self.session(len(state.prompts), *size, sampling or Sampling())
        self.model.cache.owner = None
        saved.fill(self.model.cache)
        session.resume(state)
        return session

    @locked
    def ask(
        self,
        prompts: str | Sequence[str | list[int]] | None,
        questions: str | Sequence[str | list[int]] = (),
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        *,
        chat: bool = False,
        system: str | None = None,
        chat_args: dict[str, Any] | None = None,
        stop: str | Sequence[str] = (),
        on_text: Callable[[int, str], None] | None = None,
        save: str | Path | None = None,
        load: str | Path | CacheFile | None = None,
    ) -> list[Completion]:
        """Every question about the same prompts, which are read once: all prompts' answers to the first question, then
        to the next. What one was answered, the next does not see: each starts from the state after the prompts.

        questions: none asks for what follows the prompts. chat: prompt and question are one turn of the chat template.
        save: write the prompts' cache to this file; load: take it from there, with no prompts. The other arguments, and
        what is raised, are those of `generate`.
        """
        stop, parts = stop_strings(stop), self._chat_parts(chat, system, chat_args)
        asked = [self._ids_of(q, parts) for q in ([questions] if isinstance(questions, str) else questions or [""])]
        sampling, further = sampling or Sampling(), max(map(len, asked))
        start = time.perf_counter()
        if load is not None:
            if prompts is not None or system is not None:
                raise InputError("--load-cache brings its prompt: drop --prompt, --prompt-file and --system")
            saved = load if isinstance(load, CacheFile) else CacheFile(load)
            if (was := saved.meta["more"].get("chat", False)) != chat:
                raise InputError(f"{saved.path} was saved with{'' if was else 'out'} a chat template: "
                                 f"{'add' if was else 'drop'} --chat (chat={was})")  # fmt: skip
            session = self.restore(saved, max_new_tokens, sampling, further)
        else:
            texts_of = [prompts] if isinstance(prompts, str) else prompts or []
            rows = [parts.opening(self.tokenizer, p) if parts.head and isinstance(p, str) else p for p in texts_of]
            session = self.read(rows, max_new_tokens, sampling, further)
        synchronize(session.device)
        read_s, out = time.perf_counter() - start - session.compile_s, list[Completion]()
        if save is not None:
            self.save(save, chat=chat)
        state, cache = session.state(), Snapshot(self.model.cache) if len(asked) > 1 else None
        for i, question in enumerate(asked):
            if i and cache is not None:
                cache.restore()
                session.resume(state)
            result = empty_result(session.prompts, question)
            if i == 0:
                result.compile_s, result.prefill_s = session.compile_s, read_s
            go = functools.partial(answer, session, question, result)
            if not self._run(go, result, out, max_new_tokens, stop, on_text):
                break
        return out

    def _chat_parts(self, chat: bool, system: str | None, chat_args: dict[str, Any] | None) -> ChatParts:
        """What stands around a prompt and a question. InputError as `open_chat` and `parts_of`."""
        before = self.open_chat(chat, system, chat_args)
        if not chat or isinstance(self.tokenizer, RandomVocabulary):
            return ChatParts("", "", "")
        return parts_of(self.tokenizer, before, **(chat_args or {}))

    def _ids_of(self, question: str | list[int], parts: ChatParts) -> list[int]:
        if not isinstance(question, str):
            return self._check_ids(question)
        return self._check_ids(parts.closing(self.tokenizer, question)) if parts.tail or question else []

    def stream(
        self,
        prompt: str | list[int],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        chat: bool = False,
        system: str | None = None,
        chat_args: dict[str, Any] | None = None,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """The completion of one prompt, piece by piece."""
        ids, sampling = self.encode(prompt, chat, system, chat_args), sampling or Sampling()
        size, text = self.capacity(len(ids), max_new_tokens), Text(self.tokenizer.stream(), stop_strings(stop))
        with self.lock:
            session = self.session(1, *size, sampling)
            session.prefill([ids])
        rows = session.rows(max_new_tokens, self.stop_ids)
        while not text.stopped:
            with self.lock:
                row = next(rows, None)
            if row is None or row[0] is None:
                break
            yield text.put(row[0])
        yield text.flush()

    def conversation(
        self,
        sampling: Sampling | None = None,
        chat: bool = False,
        system: str | None = None,
        chat_args: dict[str, Any] | None = None,
        stop: str | Sequence[str] = (),
    ) -> Conversation:
        """Turns that continue one cache; chat, system, chat_args: as in `encode`, stop: as in `generate`."""
        return Conversation(self, sampling or Sampling(), chat, system, chat_args, stop)


class Conversation:
    """Turns of one row: the first is prefilled, later ones go through decode into the same cache."""

    def __init__(
        self,
        llm: LLM,
        sampling: Sampling,
        chat: bool,
        system: str | None = None,
        chat_args: dict[str, Any] | None = None,
        stop: str | Sequence[str] = (),
    ):
        self.stop = stop_strings(stop)
        self.llm, self.sampling, self.chat, self.chat_args = llm, sampling, chat, chat_args or {}
        self.opening = llm.open_chat(chat, system, chat_args)
        self.size = llm.max_seq_len or min(llm.model.args.context, CONVERSATION)
        self.compile_s = 0.0
        self.forget()
        self._open()

    @locked
    def _open(self) -> Session:
        """An empty cache, which is this conversation's until another call takes it."""
        self.session = self.llm.session(1, self.size, None, self.sampling)
        self.session.lag = 0  # the next turn continues exactly where this one stopped
        self.compile_s += self.session.compile_s
        return self.session

    def forget(self) -> None:
        """Start over."""
        self.messages: list[dict[str, str]] = self.opening
        self.tokens: list[int] = []  # tokens in the cache
        self.keys: list[int] = []  # of the noise, by the first turn
        self.stale = False  # or not there any more: a turn that failed has overwritten them

    @locked
    def say(self, text: str, max_new_tokens: int, on_text: Callable[[str], None] | None = None) -> Completion:
        """One turn. InputError, and the conversation is as before, if the context has no room or a step fails."""
        llm, tk, session = self.llm, self.llm.tokenizer, self.session
        if not isinstance(text, str):
            raise InputError(f"a turn is a {type(text).__name__}: give text")
        check_count("--max-new-tokens", max_new_tokens, 1, 2**31 - 1)
        messages, cached = [*self.messages, {"role": "user", "content": text}], self.tokens
        if self.chat:
            ids = tk.encode_chat(messages, **self.chat_args)
        else:
            ids = cached + tk.encode(text if not cached else "\n" + text, bos=not cached)
        # another call has the cache, or the template rewrote an earlier turn: start over from the whole
        if self.stale or not session.owns_cache or ids[: len(cached)] != cached:
            cached = []
        if len(ids) + 1 > self.size:
            raise InputError(f"the conversation has {len(ids)} tokens, the context {self.size}: /reset to start over")
        if not cached:
            session = self._open()
        result = Result([[]], [len(ids) - len(cached)], compile_s=self.compile_s)
        self.compile_s = 0.0
        synchronize(session.device)
        start, self.stale = time.perf_counter(), True
        if cached:
            session.feed(ids[len(cached) :])
        else:
            self.keys = self.keys or noise_keys(session.sampling.seed, [ids])
            session.prefill([ids], self.keys)
        synchronize(session.device)
        result.prefill_s = time.perf_counter() - start
        said = Text(tk.stream(), self.stop)

        def show(row: int, token: int) -> bool:
            piece = said.put(token)
            if on_text is not None:
                on_text(piece)
            return said.stopped

        continue_rows(session, result, min(max_new_tokens, self.size - len(ids)), llm.stop_ids, show)
        piece = said.flush()
        if on_text is not None:
            on_text(piece)
        self.tokens = ids + result.tokens[0]
        session.rewind(len(self.tokens))
        # the last token, drawn but not fed if max_new_tokens ended the turn
        session.feed(self.tokens[int(session.pos[0]) :])
        self.stale, self.messages = False, [*messages, {"role": "assistant", "content": said.text}]
        result.kv_bytes, result.kv_bytes_full = llm.model.kv_bytes(), llm.model.kv_bytes_full(1, self.size)
        return Completion(said.text, result.tokens[0], result.prompt_tokens[0], result)
