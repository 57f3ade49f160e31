"""Generation: the decode loop over a batch and its cache, and the class `LLM`, which joins it with model and tokenizer.

from engine import LLM
print(LLM("models/tiny", method="self_index").generate("import os", max_new_tokens=32)[0].text)
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache.spec import layer_methods
from engine.compiled import Step, compile_step, eager_step
from engine.sampling import NO_TOKEN, Sampling, draw_finite, noise_keys
from engine.snapshot import CacheFile, Snapshot, State, check_layouts, identity, save
from engine.speculation import Speculator, Tally, behind
from loading.checkpoint import load_checkpoint, random_transformer
from loading.tokenizer import load_tokenizer
from loading.tokenizer.random import RandomVocabulary
from loading.tokenizer.turns import ChatParts, parts_of
from model import ModelArgs, Transformer
from runtime.errors import InputError, check_count, short
from runtime.machine import TINY, SpareCores, check_out, pick_device, pick_dtype, synchronize
from runtime.parallel import ONE, Ranks
from weights import WeightFormat, open_checkpoint

LAG = 2  # decode steps in flight before the host reads a token, so that the device never waits for the stop check
CONVERSATION = 8192  # slots allocated for a conversation, at most the model's context
LEAST = 256  # least slots for prompts in a cache that may be saved: in smaller ones, methods lay out sinks differently
STEPS = 4  # compiled steps kept for one cache, one per kind of sampling; the least recently used is dropped


# ---- the decode loop ----


class Ended(InputError):
    """An error that ended a run in the middle of its text; `completions` holds the text so far."""

    def __init__(self, message: str, completions: list[Completion]):
        super().__init__(message)
        self.completions = completions


def make_step(model: Transformer, sampling: Sampling, compile: bool, like: Step | None = None) -> Step:
    """A decode step that draws the next token. like: a compiled step on the same cache; its layer graphs are reused."""

    def choose(logits: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        return draw_finite(sampling, logits, pos, *given)

    return compile_step(model, choose, like) if compile else eager_step(model, choose)


def pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, S] int64 and lengths [B], for `Transformer.prefill`."""
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, p in enumerate(prompts):
        tokens[row, : len(p)] = torch.tensor(p)
    return tokens.to(device), lengths.to(device)


class Session:
    """A batch of rows and its KV cache: `prefill` once, then `generate`, and `feed` for the turns that follow.

    A cache has one owner, the session that prefilled it last; a step of another session raises InputError. With a
    speculator the method drafts, and every token is drawn by exact attention. cores: adapts the number of threads.
    """

    def __init__(
        self,
        model: Transformer,
        step: Step,
        sampling: Sampling,
        speculator: Speculator | None = None,
        cores: SpareCores | None = None,
    ):
        self.model, self.step, self.sampling, self.speculator, self.cores = model, step, sampling, speculator, cores
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
        self.uneven = False  # whether rows have different numbers of tokens, after speculation
        self.logits: Tensor | None = None  # [B, V] right after a prompt

    @property
    def owns_cache(self) -> bool:
        return getattr(self.model.cache, "owner", None) is self

    @torch.inference_mode()
    def warm_up(self, batch: int) -> float:
        """Compile the step (and capture its graph) on an empty cache; returns the seconds this took."""
        start = time.perf_counter()
        # separate tensors: with one tensor as two arguments, the first real step would compile again
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
        """Right-pad the prompts, run them, draw each row's first new token. keys: by default `noise_keys` of them."""
        for prompt in prompts:
            self.model.args.check_ids(prompt)
        if self.cores is not None:
            self.cores.adapt()
        tokens, lengths = pad(prompts, self.device)
        self.model.cache.owner = None  # even if the next lines fail
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
        """Take over a cache that holds pos [B] tokens per row; `tokens` [B] come next."""
        self.next, self.pos, self.given = tokens, pos, list(given) or [torch.zeros_like(pos)]
        self.prompts, self.fed, self.logits, self.uneven = [], [], None, False
        self.decoded, self.model.cache.owner = 0, self

    def state(self) -> State:
        """The session's state: all that `resume` needs beside the cache itself. Raises InputError without a cache."""
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
        """Continue from a state, in a cache with the contents of that time. If a prompt's logits are known, the next
        token is drawn again, since the Sampling may differ."""
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
        """One decode step with these tokens; sets `next` to those drawn after them."""
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
        """Feed the same tokens to every row, through decode: what was compressed stays as it is."""
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
        """Shorten each row's text to `length` tokens; only a speculating session may have fed more."""
        over = int((self.pos - length).amax())
        if over > 0:
            end, self.pos = self.pos, self.pos.clamp(max=length)
            self.model.rewind(self.pos, end)
            self.decoded -= over
            self.fed = self.fed[:-over]

    def rows(self, n: int, stop_ids: frozenset[int] = frozenset()) -> Iterator[list[int | None]]:
        """Yield the next token of every row, up to n each, until all rows are done. A row is done, and gets None, after
        a stop id or if the caller sets `done`. Raises InputError if a row's logits are not finite.

        With speculation, None may also mean that the row has no token in this round yet."""
        self.done = [False] * len(self.next)
        source: Iterator[Any] = self.tokens(n) if self.speculator is None else self.checked_tokens(n)
        for step, drawn in enumerate(source):
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
        model = self.model
        flags = {"--dtype": model.dtype, "--kv-dtype": model.kv_dtype or model.dtype}
        for flag, dtype in flags.items():
            if dtype == torch.float16:
                return f"fp16 holds no number above 65504; try {flag} bf16 or fp32"
        return "the method's knobs are exceeded, or the weights are damaged; try --method full"

    def checked_tokens(self, n: int) -> Iterator[list[int | None]]:
        """The next n tokens of every row, drafted by the method and verified by exact attention in rounds. A round's
        tokens are all fed when its first is yielded; `rewind` takes back those that the caller does not use."""
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
        """One round (`Speculator.round`), with its results read on the host."""
        assert self.speculator is not None
        self._own_cache()
        tokens, count, kept = self.speculator.round(self.step, self.next, self.pos, left, self.given)
        last = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.next = torch.where(count > 0, last, self.next)
        return tokens.tolist(), count.tolist(), kept.tolist()

    def _count(self, left: list[int], kept: list[int]) -> None:
        """Count a round's drafted and accepted tokens, of rows that are not done, and adapt the number of drafts."""
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


@dataclass
class Result:
    """The result of a batch: the tokens of each row (without the stop token), times and bytes."""

    tokens: list[list[int]]
    prompt_tokens: list[int]
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    compile_s: float = 0.0
    kv_bytes: int = 0  # bytes of all buffers of the cache, as allocated
    kv_bytes_full: int = 0  # bytes of dense keys and values of the same capacity
    interrupted: bool = False  # whether Ctrl-C ended it
    drafts: Tally = field(default_factory=Tally)  # counts of drafted and accepted tokens

    @property
    def decode_tokens_per_s(self) -> float:
        return self.steps * len(self.tokens) / self.decode_s if self.decode_s else 0.0


@dataclass
class Completion:
    """The completion of one prompt; `batch` holds times and bytes of the rows that ran with it."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    batch: Result

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
    """Prefill `prompts`, feed the `question` to each row, then decode until every row has a stop id or max_new_tokens.

    on_token(row, id) is called for every token of a text and ends the row if it returns True. Ctrl-C ends the run early
    and keeps the text so far. Raises InputError if logits are not finite or a method cannot continue; `result`, an
    `empty_result`, then holds the tokens before it.
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
    """The part of `generate` after the prompts: feed the question, whose time counts as prefill, and decode."""
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
    """The decode loop, from `session.next` until all rows stop."""
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
    """The capacity allocated for n tokens in a compiled step: a multiple of 256, two sizes per octave from 1024."""
    unit = max(256, 2 ** ((n - 1).bit_length() - 2))
    return -(-n // unit) * unit


# ---- the user's interface ----


class Text:
    """The text of a row as its tokens come, up to the first stop string. A possible beginning of one is held back."""

    def __init__(self, stream: Any, stop: Sequence[str]):
        self.stream, self.stop = stream, stop
        self.text = self.waiting = ""
        self.stopped = False

    def put(self, token: int) -> str:
        """The text that can be shown after this token; sets `stopped` at a stop string."""
        return self._show(self.stream.put(token))

    def flush(self) -> str:
        return self._show(self.stream.flush(), last=True)

    def _show(self, piece: str, last: bool = False) -> str:
        if self.stopped:
            return ""
        self.waiting += piece
        # the stop string that ends first, however the text comes in pieces
        found = [(i + len(s), i) for s in self.stop if (i := self.waiting.find(s)) >= 0]
        self.stopped = bool(found)
        begun = [n for s in self.stop for n in range(1, len(s)) if self.waiting.endswith(s[:n])]
        end = min(found)[1] if found else len(self.waiting) - (0 if last else max(begun, default=0))
        shown, self.waiting = self.waiting[:end], self.waiting[end:]
        self.text += shown
        return shown


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The stop strings. Raises InputError unless `stop` is a non-empty text or a list of them."""
    given = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, list | tuple) or not all(isinstance(s, str) and s for s in given):
        raise InputError(f"--stop is {short(stop)}: give a text, or a list of texts, that are not empty")
    return tuple(given)


def locked(call: Callable[..., Any]) -> Any:
    """Decorates a method of an LLM, or of an object with one, to hold the LLM's lock."""

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

    method is a spec (cache/spec.py); further arguments are its knobs. random_init names a model of model.NAMED to make
    with random weights. weights, head: as --weights and --head of generate.py. dtype: the compute dtype; kv_dtype: that
    of the cache. calibration: files of calibrate.py, by default the one beside the weights. compile: torch.compile the
    decode step, by default on a GPU; the cache's capacity is then rounded up, so that one step serves many lengths.
    max_seq_len: the capacity of every call, in tokens of prompt and answer. prefill_chunk: the number of prompt tokens
    read at a time, to save memory; by default all. ranks: those of `parallel.start()`, the processes that share the
    model; all must make the same calls, and get the same tokens. speculate: the method drafts this many tokens and
    exact attention verifies them, so that the text is that of method="full". adaptive: lower and raise the number of
    drafts, up to `speculate`, by how many are accepted.

    All calls share one cache. Threads wait for each other. A stream that another call interrupts ends with an
    InputError; an interrupted conversation prefills its text again.
    """

    def __init__(
        self,
        /,  # positional-only, because a knob may be called self
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
        calibration: str | Path | Sequence[str | Path] | None = None,
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
        self.cores = SpareCores()
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
        """Switch to another method. Raises InputError if it or a knob is unknown or out of range."""
        layer_methods(method, self.model.args.n_layer, knobs)
        self.method, self.knobs = method, knobs
        # for the current cache: sampling without its seed -> step and speculator
        self._steps: dict[Any, tuple[Step, Speculator | None]] = {}
        self._ready: tuple[Any, Any] = (None, None)  # the current cache and its size
        self.model.cache = None  # its owner loses it
        return self

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_ids | frozenset(self.model.args.eos_ids)

    def session(self, batch: int, max_seq_len: int, max_new_tokens: int | None, sampling: Sampling) -> Session:
        """A session with an empty cache of this size and its step; reuses those of the last call if they fit."""
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
        session = Session(self.model, step, sampling, speculator, self.cores)
        self._steps[key] = step, speculator  # the most recently used is last
        if len(self._steps) > STEPS:
            del self._steps[next(iter(self._steps))]
        if made is None and self.compile:
            print(f"compiling the decode step: {self.method}, {batch} rows of {max_seq_len} tokens", file=sys.stderr)
            session.warm_up(batch)
            session.compile_s = time.perf_counter() - start  # includes the import of the compiler
        return session

    def _speculator(self, sampling: Sampling) -> Speculator | None:
        if not self.speculate:
            return None
        draw = functools.partial(draw_finite, sampling)
        return Speculator(self.model, draw, self.speculate, self.compile, self.adaptive)

    def capacity(self, prompt: int, max_new_tokens: int, question: int = 0) -> tuple[int, int | None]:
        """max_seq_len and max_new_tokens of a cache for these tokens. Raises InputError if they exceed the context."""
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
        """Token ids of a prompt, given as text or as ids. Raises InputError if it has none.

        chat: apply the chat template to the prompt as a user's message, in which special tokens are plain text.
        system: a message before it. chat_args: variables of the template, such as enable_thinking=False.
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
        """The ids as a list. Raises InputError unless they are ids of this model's tokens."""
        if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
            what = f"{type(ids).__name__} of {type(ids[0]).__name__}" if isinstance(ids, list) else type(ids).__name__
            raise InputError(f"a prompt is a {what}: give text or a list of token ids, of a tensor its tolist()")
        self.model.args.check_ids(ids)
        return list(ids)

    def open_chat(self, chat: bool, system: str | None, chat_args: dict[str, Any] | None) -> list[dict[str, str]]:
        """The messages before the user's first. Raises InputError for a system message or chat_args without `chat`."""
        if not chat and (system is not None or chat_args):
            raise InputError(
                "a system message and template variables are for the chat template: add --chat (chat=True)"
            )
        return [] if system is None else [{"role": "system", "content": system}]

    def _encode_question(self, question: str | list[int] | None, chat: bool) -> list[int]:
        """Token ids of the question fed after every prompt. Raises InputError with a chat template, because that has
        already closed the prompt's turn."""
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
        """One completion per prompt, in order. Prompts of any lengths run together, `batch_size` at a time.

        chat, system, chat_args: as in `encode`.
        question: text that follows every prompt, through decode, so that the method compresses without knowing it.
        stop: strings that end a text. The text does not include them, but `tokens` include theirs.
        on_text(row, piece) is called as text comes. Ctrl-C ends the run early and keeps the text so far. Raises
        InputError if prompt and new tokens exceed the model's context or the free memory, and `Ended`, with the text so
        far, if a step fails.
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
        """Run a batch with `go`, a `generate` or an `answer` into `result`, and append its completions to `out`.
        Returns False after Ctrl-C. If a step fails, raises `Ended`, or the error itself if there is no text yet."""
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

    # ---- prompts that are read once and used several times ----

    def _identity(self) -> dict[str, Any]:
        return identity(self.model, self.method, self.knobs, self.source, self.weight_format)

    @locked
    def read(
        self,
        prompts: str | Sequence[str | list[int]],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        further: int = 0,
        saves: bool = False,
    ) -> Session:
        """Prefill prompts together and return their session, for `feed` and `rows`, until another call takes the cache.
        further: the number of tokens that may be fed beside the new ones. saves: before the prompts are read, refuse a
        method that `save` would refuse. Raises InputError as `generate`."""
        given = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(given, list | tuple) or not given:
            raise InputError("no prompt was given: give a text, or a list of them")
        rows = [self.encode(p) for p in given]
        session = self.session(len(rows), *self._roomy(rows, max_new_tokens, further), sampling or Sampling())
        if saves:
            check_layouts(self.model.cache)
        session.prefill(rows)
        return session

    def _roomy(self, prompts: list[list[int]], max_new_tokens: int, further: int) -> tuple[int, int | None]:
        """`capacity` with at least LEAST slots for prompts, if the context allows."""
        check_count("--max-new-tokens", max_new_tokens, 1, 2**31 - 1)
        room = (self.max_seq_len or self.model.args.context) - further - max_new_tokens
        return self.capacity(max(*map(len, prompts), min(LEAST, room)), max_new_tokens, further)

    @locked
    def save(self, file: str | Path, **more: Any) -> None:
        """Write the cache, with the prompt of the last call and the tokens decoded since, to a file for `restore`.
        more: further metadata of the file, as JSON."""
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
        """Continue from a file of `save`, as if the prompt had been read here; other arguments are those of `read`.
        Raises InputError if the file is damaged, does not fit, or has another model, method, knob, dtype or
        calibration."""
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
        """Answer several questions about the same prompts, which are read once. Returns all prompts' answers to the
        first question, then to the next. Each question starts from the state after the prompts, without other answers.

        questions: without any, the prompts are continued. chat: prompt and question are one turn of the chat template.
        save: write the prompts' cache to this file. load: read it from a file, instead of prompts. The other arguments
        and errors are those of `generate`.
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
            session = self.read(rows, max_new_tokens, sampling, further, save is not None)
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
        """The chat template's text around a prompt and a question. Raises InputError as `open_chat` and `parts_of`."""
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
        """Yields the completion of one prompt piece by piece."""
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
        """A conversation whose turns continue one cache. chat, system, chat_args: as in `encode`; stop: as in
        `generate`."""
        return Conversation(self, sampling or Sampling(), chat, system, chat_args, stop)


class Conversation:
    """A conversation of one row. The first turn is prefilled; later turns go through decode into the same cache."""

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
        """Get an empty cache, which belongs to this conversation until another call takes it."""
        self.session = self.llm.session(1, self.size, None, self.sampling)
        self.session.lag = 0  # the next turn continues exactly where this one stopped
        self.compile_s += self.session.compile_s
        return self.session

    def forget(self) -> None:
        """Start over."""
        self.messages: list[dict[str, str]] = self.opening
        self.tokens: list[int] = []  # tokens in the cache
        self.keys: list[int] = []  # noise keys, from the first turn
        self.stale = False  # whether a failed turn has overwritten `tokens` in the cache

    @locked
    def say(self, text: str, max_new_tokens: int, on_text: Callable[[str], None] | None = None) -> Completion:
        """One turn. If it exceeds the context or a step fails, raises InputError; the conversation stays unchanged."""
        llm, tk, session = self.llm, self.llm.tokenizer, self.session
        if not isinstance(text, str):
            raise InputError(f"a turn is a {type(text).__name__}: give text")
        check_count("--max-new-tokens", max_new_tokens, 1, 2**31 - 1)
        messages, cached = [*self.messages, {"role": "user", "content": text}], self.tokens
        if self.chat:
            ids = tk.encode_chat(messages, **self.chat_args)
        else:
            ids = cached + tk.encode(text if not cached else "\n" + text, bos=not cached)
        # if another call has the cache, or the template rewrote an earlier turn, read the whole text again
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
        # feeds the last token, which was drawn but not fed if max_new_tokens ended the turn
        session.feed(self.tokens[int(session.pos[0]) :])
        self.stale, self.messages = False, [*messages, {"role": "assistant", "content": said.text}]
        result.kv_bytes, result.kv_bytes_full = llm.model.kv_bytes(), llm.model.kv_bytes_full(1, self.size)
        return Completion(said.text, result.tokens[0], result.prompt_tokens[0], result)
