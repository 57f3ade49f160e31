"""`LLM`: a model, its tokenizer, a KV-cache method and the decode loop (decode.py)."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cache.spec import layer_methods
from engine.conversation import Conversation
from engine.decode import Batch, Completion, Session, make_step
from engine.pack import check_step
from engine.prompts import Prompts
from engine.sampling import Sampling, noise_keys
from engine.snapshot import CacheFile, Snapshot, check_layouts, identity, resume, ropes_of, save, state_of
from engine.speculation import Speculating, Speculator
from engine.stored import StoredStep, allowed, key_of, made_of
from kernels import backend
from loading import load_checkpoint, load_tokenizer
from loading.checkpoint import random_transformer
from loading.named import named_args
from loading.tokenizer.base import stop_strings
from loading.tokenizer.random import RandomVocabulary
from loading.tokenizer.turns import Chat
from runtime.errors import InputError, check_count, short
from runtime.hub import fetched_folder
from runtime.machine import TINY, SpareCores, check_out, pick_device, pick_dtype
from runtime.parallel import ONE, Ranks
from weights import WeightFormat, open_checkpoint

LEAST = 256  # least slots for prompts in a cache that may be saved: in smaller ones, methods lay out sinks differently
STEPS = 4  # compiled steps kept for one cache, one per kind of sampling; the least recently used is dropped


class Ended(InputError):
    """An error that ended a run in the middle of its text; `completions` holds the text so far."""

    def __init__(self, message: str, completions: list[Completion]):
        super().__init__(message)
        self.completions = completions


def round_up(n: int) -> int:
    """The capacity allocated for n tokens in a compiled step: a multiple of 256, two sizes per octave from 1024."""
    unit = max(256, 2 ** ((n - 1).bit_length() - 2))
    return -(-n // unit) * unit


class LLM:
    """A model, its tokenizer and a KV-cache method.

        llm = LLM("models/tiny", method="self_index,budget=160")
        for c in llm.generate(["import os", "def main():"], max_new_tokens=64):
            print(c.text, c.decode_tokens_per_s, c.kv_bytes / c.kv_bytes_full)
        for piece in llm.stream("import os"):
            print(piece, end="")

    method is a spec (cache/spec.py); further arguments are its knobs. random_init: a name in loading/named.py
    for random weights. weights, head: as --weights and --head of generate.py. dtype: the compute dtype; kv_dtype: that
    of the cache. calibration: files of calibrate.py, by default the one beside the weights. compile: torch.compile the
    decode step, by default on a GPU; the cache's capacity is then rounded up, so that one step serves many lengths.
    max_seq_len: the capacity of every call, in tokens of prompt and answer. prefill_chunk: the number of prompt tokens
    read at a time, to save memory; by default all. ranks: those of `parallel.start()`, the processes that share the
    model; all must make the same calls, and get the same tokens. speculate: the method drafts this many tokens and
    exact attention verifies them, so that the text is that of method="full". adaptive: lower and raise the number of
    drafts, up to `speculate`, by how many are accepted. transformers: the checkpoint is a folder or a name that
    transformers loads, whatever its architecture; it runs the model, without compiled steps.

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
        transformers: bool = False,
        **knobs: Any,
    ):
        if speculate is not None:
            check_count("--speculate", speculate, 1, 64, "leave it out to answer by the method alone")
        elif adaptive:
            raise InputError("adaptive sets the number of drafts: give speculate, too")
        if prefill_chunk is not None:
            check_count("--prefill-chunk", prefill_chunk, 1, 2**31 - 1, "leave it out to read a prompt at once")
        check_count("--seed", seed, 0, 2**63 - 1)
        backend.FALL_BACK = not backend.INTERPRETED
        self.speculate, self.adaptive = speculate or 0, adaptive
        self.cores, self.lock = SpareCores(), threading.RLock()
        device = pick_device(None if device is None else str(device))
        dtype = pick_dtype(dtype, device)
        self.weight_format = WeightFormat.parse(weights, head)
        self.compile = device.type == "cuda" and not transformers if compile is None else compile
        # steps that an earlier run compiled are used if compile is None; of one process on a CPU
        fixed = ranks.size > 1 or speculate or transformers or compile is False
        self.stores = device.type == "cpu" and not fixed and allowed()
        self.tokenizer: Any
        if random_init:
            args = dataclasses.replace(named_args(random_init), ranks=ranks)
            self.model = random_transformer(args, device, dtype, seed, self.weight_format)
            self.tokenizer = RandomVocabulary()
        elif transformers:
            from engine.transformers_backend import load_model  # transformers is optional

            if self.compile or ranks.size > 1:
                raise InputError("transformers' models run eagerly, in one process: leave out --compile and torchrun")
            folder = fetched_folder(checkpoint)
            self.model = load_model(folder, device, dtype, self.weight_format)
            self.tokenizer = load_tokenizer(folder)
        else:
            reader = open_checkpoint(checkpoint)
            self.model = load_checkpoint(reader, device, dtype, self.weight_format, ranks)
            self.tokenizer = load_tokenizer(reader.tokenizer)
        self.source = f"--random-init {random_init} and seed {seed}" if random_init else str(checkpoint)
        self.source += "".join(f" {flag} {x}" for flag, x in (("--weights", weights), ("--head", head)) if x)
        self.model.kv_dtype = None if kv_dtype is None else pick_dtype(kv_dtype, device)
        self.model.use_calibration(calibration)
        if max_seq_len is not None:
            check_count("--max-seq-len", max_seq_len, 2, self.model.args.context, "the most is the model's context")
        self.max_seq_len = max_seq_len
        self.model.prefill_chunk = prefill_chunk
        self.prompts = Prompts(self.tokenizer, self.model.args)
        self.model.encode = functools.partial(self.tokenizer.encode, bos=False)
        self.use(method, **knobs)

    def use(self, method: str, /, **knobs: Any) -> LLM:
        """Switch to another method. Raises InputError if it or a knob is unknown or out of range."""
        layers = layer_methods(method, self.model.args.n_layer, knobs)
        with self.lock:
            self.method, self.knobs, self.layers = method, knobs, layers
            # for the current cache: sampling without its seed -> step and speculator
            self._steps: dict[Any, tuple[Any, Speculator | None]] = {}
            self._ready: tuple[Any, Any] = (None, None)  # the current cache and its size
            self._made_of: str | None = None  # of a stored step's key: the part that all sizes share
            self.model.cache = None  # its owner loses it
        return self

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_ids | frozenset(self.model.args.eos_ids)

    # ---- a session: an empty cache of the right size, and a step ----

    def session(self, batch: int, max_seq_len: int, most_new: int | None, ahead: int, sampling: Sampling) -> Session:
        """A session with its step and an empty cache, by `capacity`; reuses those of the last call if they fit."""
        size, model = (batch, max_seq_len, most_new), self.model
        if model.cache is not None and self._ready == (model.cache, size):
            model.reset_cache()
            model.cache.owner = None
        else:
            self._steps, self._ready = {}, (None, None)  # the old cache goes before there is another
            model.setup_cache(self.layers, *size, drafts=self.speculate)
            self._ready = (model.cache, size)
        for rope in ropes_of(model.cache):
            rope.look_ahead(ahead)
        key, stored = sampling.graph_key, self._stored(size, sampling)
        there = stored is not None and stored.there
        compile = self.compile or there
        made, (like, _) = self._steps.pop(key, None), next(iter(self._steps.values()), (None, None))
        timed = Batch([], [])
        with timed.timed("compile_s", model.device):  # includes the import of the compiler
            step, speculator = made or (make_step(model, sampling, compile, like, stored), None)
            if self.speculate and speculator is None:
                speculator = Speculator(model, sampling.draw, self.speculate, self.compile, self.adaptive)
            args = model, step, sampling, self.cores
            session = Speculating(speculator, *args) if speculator else Session(*args)
            self._steps[key] = step, speculator  # the most recently used is last
            if len(self._steps) > STEPS:
                del self._steps[next(iter(self._steps))]
            if made is None and compile:
                torch.set_num_threads(SpareCores.usual())  # what a graph is compiled with, it keeps
                what = f"{self.method}, {batch} rows of {max_seq_len} tokens"
                doing = "loading the decode step that an earlier run compiled" if there else "compiling the decode step"
                print(f"{doing}: {what}", file=sys.stderr)
                session.warm_up(batch)
        session.compile_s = timed.compile_s if made is None and compile else 0.0
        return session

    def _stored(self, size: tuple[Any, ...], sampling: Sampling) -> StoredStep | None:
        """Where the compiled step of a cache of this size lies, or may be stored; None if it may not."""
        if not self.stores:
            return None
        if self._made_of is None:
            self._made_of = made_of(self.model, self._identity())
        return StoredStep(key_of(self._made_of, size, sampling.graph_key))

    def capacity(self, prompt: int, max_new_tokens: int, question: int = 0, batch: int = 1,
                 sampling: Sampling | None = None, least: int = 0) -> tuple[int, int | None, int]:  # fmt: skip
        """max_seq_len and max_new_tokens of a cache for these tokens, rounded up or not, and the tokens that may follow
        a prompt. least: slots for prompts, if the context allows. Raises InputError if they exceed the context."""
        check_count("--max-new-tokens", max_new_tokens, 1, 2**31 - 1)
        most = self.max_seq_len or self.model.args.context
        prompt = max(prompt, min(least, most - question - max_new_tokens))
        longest = prompt + question
        limit = ("--max-seq-len" if self.max_seq_len else "the model's context") + f" of {most}"
        if longest >= most:
            raise InputError(f"the prompt of {longest} tokens exceeds {limit}: shorten the prompt")
        if longest + max_new_tokens > most:
            raise InputError(f"{longest} prompt tokens and --max-new-tokens {max_new_tokens} exceed {limit}: "
                             f"use --max-new-tokens {most - longest} or less")  # fmt: skip
        new = question + max_new_tokens
        exact, wide = (prompt + new, new, new), (round_up(prompt) + round_up(new), round_up(new), new)
        one = (most, self.new_tokens(new, min(round_up(new), most - prompt)), new)
        compiled = wide if wide[0] <= most and not self.max_seq_len else one
        if self.compile or self.max_seq_len:
            return compiled
        stored = self._stored((batch, *compiled[:2]), Sampling.of(sampling))
        return compiled if stored and stored.there else exact

    def new_tokens(self, new: int, most: int) -> int | None:
        """max_new_tokens of a cache for all calls: None as far as slots for decoded tokens go, `most` for more."""
        rooms = [room for cls, args in self.layers if (room := cls.room_if_unknown(args)) is not None]
        return most if new > min(rooms, default=new) else None

    def encode(self, prompt: str | list[int], chat: Chat | None = None) -> list[int]:
        """Token ids of a prompt, given as text or as ids. Raises InputError if it has none.

        chat: apply the chat template to the prompt as a user's message, in which special tokens are plain text.
        """
        return self.prompts.encode(prompt, chat)

    # ---- answers ----

    def generate(
        self,
        prompts: str | Sequence[str | list[int]] | None,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        *,
        questions: str | Sequence[str | list[int]] = (),
        chat: Chat | None = None,
        batch_size: int | None = None,
        stop: str | Sequence[str] = (),
        on_text: Callable[[int, str], None] | None = None,
        save: str | Path | None = None,
        pack: float | None = None,
        load: str | Path | CacheFile | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order. Prompts of any lengths run together, `batch_size` at a time.

        questions: texts about the prompts, which are read once, as one batch. A question follows the prompts through
        decode, so that the method compresses without knowing it, and starts from the state behind them, without other
        answers. All prompts' answers to the first question come first, then those to the next.
        chat: write each prompt, or a prompt and a question as one turn, by the chat template.
        stop: strings that end a text. The text does not include them, but `tokens` include theirs.
        on_text(i, piece) is called as the text of the i-th completion comes.
        save: write the prompts' cache to this file; pack: as a small one (`save`). load: read it from a file, instead
        of prompts.
        Ctrl-C ends the run early and keeps the text so far. Raises InputError if prompt and new tokens exceed the
        model's context or the free memory, and `Ended`, with the text so far, if a step fails.
        """
        sampling, chat, out = Sampling.of(sampling), Chat.check(chat), list[Completion]()
        if not isinstance(questions, str | Iterable | None):
            raise InputError(f"questions are {short(questions)}: give a text, or a list of texts")
        texts = [questions] if isinstance(questions, str) else list(questions or ())
        if save is not None:  # what `save` would refuse after the prompts are read
            check_out(save, "--save-cache")
        if pack is not None:
            if save is None:
                raise InputError("pack makes a small file of a saved cache: give save, too")
            check_step(pack)
            self.model.find_calibration()
        saved = load if isinstance(load, CacheFile | None) else CacheFile(load)
        if saved is not None:
            if prompts is not None or (chat and chat.system is not None):
                raise InputError("--load-cache brings its prompt: drop --prompt, --prompt-file and --system")
            saved.check_chat(chat is not None)
        once = len(texts) > 1 or save is not None or saved is not None or bool(texts and chat)
        # with a question, or to save, the prompt's turn of a chat stays open
        turn = chat.parts(self.tokenizer) if chat and once else None
        asked = [self.prompts.question(text, turn) for text in texts or [""]]
        further = max(map(len, asked))
        run = functools.partial(self._run, out, max_new_tokens=max_new_tokens, stop=stop_strings(stop), on_text=on_text)
        if batch_size is not None:
            check_count("--batch-size", batch_size, 1, 1_000_000)
            if once:
                raise InputError("prompts that are read once, for several questions, a chat's question or a file, are "
                                 "one batch: drop --batch-size")  # fmt: skip
        if not once:
            rows = self.prompts.rows(prompts, chat)
            keys, step = noise_keys(sampling.seed, rows), batch_size or len(rows)
            size = self.capacity(max(map(len, rows)), max_new_tokens, further, min(step, len(rows)), sampling)
            with self.lock:
                for first in range(0, len(rows), step):
                    part = slice(first, first + step)
                    session = self.session(len(rows[part]), *size, sampling)
                    if not run(session, rows[part], asked[0], Batch.of(rows[part], asked[0]), keys[part]):
                        break
            return out
        read = Batch([], [])
        with self.lock:
            with read.timed("prefill_s", self.model.device):
                if saved is None:
                    rows = self.prompts.rows(prompts, chat, turn)
                    session = self.read(rows, max_new_tokens, sampling, further, save is not None)
                else:
                    session = self.restore(saved, max_new_tokens, sampling, further)
            if save is not None:
                self.save(save, pack, chat=chat is not None)
            start = (state_of(session), Snapshot(self.model.cache)) if len(asked) > 1 else None
            for i, question in enumerate(asked):
                if i and start:
                    state, cache = start
                    cache.restore()
                    resume(session, state)
                batch = Batch.of(session.prompts, question)
                if i == 0:
                    batch.prefill_s = read.prefill_s - session.compile_s
                if i or saved is not None:  # the prompts were read before
                    batch.read = len(question) * len(session.prompts)
                if not run(session, None, question, batch):
                    break
        return out

    def _run(
        self, out: list[Completion], session: Session, prompts: list[list[int]] | None, question: list[int],
        batch: Batch, keys: list[int] | None = None, *,
        max_new_tokens: int, stop: Sequence[str], on_text: Callable[[int, str], None] | None,
    ) -> bool:  # fmt: skip
        """`Session.run` into `batch`, and append its completions to `out`. Returns False after Ctrl-C. If a step fails,
        raises `Ended`, or the error itself if there is no text yet."""
        texts, first, error = [self.tokenizer.stream(stop) for _ in batch.tokens], len(out), None
        batch.compile_s, session.compile_s = session.compile_s, 0.0
        batch.kv_bytes = self.model.kv_bytes()  # now: on_text may take the cache away
        batch.kv_bytes_full = self.model.kv_bytes_full(len(texts), self.model.cache[0].shape.max_seq_len)

        def show(row: int, piece: str) -> None:
            if on_text:
                on_text(first + row, piece)

        def put(row: int, token: int) -> bool:
            show(row, texts[row].put(token))
            return texts[row].stopped

        try:
            session.run(prompts, max_new_tokens, self.stop_ids, put, batch, question, keys)
        except InputError as e:
            if not out and not any(batch.tokens):
                raise
            error = e
        except KeyboardInterrupt:  # in a prompt or a question
            if not out:
                raise
            batch.interrupted = True
        for row, (ids, text) in enumerate(zip(batch.tokens, texts, strict=True)):
            show(row, text.flush())
            out.append(Completion(text.text, ids, batch.prompt_tokens[row], batch))
        if error:
            raise Ended(str(error), out)
        return not batch.interrupted

    def stream(
        self, prompt: str | list[int], max_new_tokens: int = 128, sampling: Sampling | None = None,
        chat: Chat | None = None, stop: str | Sequence[str] = (),
    ) -> Iterator[str]:  # fmt: skip
        """Yields the completion of one prompt piece by piece."""
        ids, text = self.encode(prompt, chat), self.tokenizer.stream(stop_strings(stop))
        with self.lock:
            sampling = Sampling.of(sampling)
            session = self.session(1, *self.capacity(len(ids), max_new_tokens, sampling=sampling), sampling)
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
        self, sampling: Sampling | None = None, chat: Chat | None = None, stop: str | Sequence[str] = ()
    ) -> Conversation:
        """A conversation whose turns continue one cache. chat: as in `encode`; stop: as in `generate`."""
        return Conversation(self, Sampling.of(sampling), Chat.check(chat), stop_strings(stop))

    # ---- prompts that are read once and used several times ----

    def _identity(self) -> dict[str, Any]:
        spec = self.method + "".join(f", {k}={v}" for k, v in self.knobs.items())
        given = [self.method, {k: str(v) for k, v in self.knobs.items()}]
        return identity(self.model, spec, self.layers, self.source, self.weight_format) | dict(given=given)

    def read(
        self, prompts: str | Sequence[str | list[int]], max_new_tokens: int = 128, sampling: Sampling | None = None,
        further: int = 0, saves: bool = False,
    ) -> Session:  # fmt: skip
        """Prefill prompts together and return their session, for `feed` and `rows`, until another call takes the cache.
        further: the number of tokens that may be fed beside the new ones. saves: before the prompts are read, refuse a
        method that `save` would refuse. Raises InputError as `generate`."""
        rows = self.prompts.rows(prompts)
        with self.lock:
            sampling = Sampling.of(sampling)
            size = self.capacity(max(map(len, rows)), max_new_tokens, further, len(rows), sampling, LEAST)
            session = self.session(len(rows), *size, sampling)
            if saves:
                check_layouts(self.model.cache)
            session.prefill(rows)
            return session

    def save(self, file: str | Path, pack: float | None = None, **more: Any) -> None:
        """Write the cache, with the prompt of the last call and the tokens decoded since, to a file for `restore`.
        pack: write a small file, in which dense keys and values are rounded to this share of their standard
        deviation (pack.py). more: further metadata of the file, as JSON."""
        check_out(file, "--save-cache")
        with self.lock:
            session = getattr(self.model.cache, "owner", None)
            if session is None or not session.prompts:
                raise InputError("there is nothing in the cache to save: read a prompt first")
            packed = None if pack is None else (pack, self.model.find_calibration())
            save(Path(file), self.model.cache, state_of(session), self._identity(), packed, **more)

    def restore(
        self, file: str | Path | CacheFile, max_new_tokens: int = 128, sampling: Sampling | None = None,
        further: int = 0,
    ) -> Session:  # fmt: skip
        """Continue from a file of `save`, as if the prompt had been read here; other arguments are those of `read`.
        Raises InputError if the file is damaged, does not fit, or has another model, method, knob, dtype or
        calibration."""
        saved = file if isinstance(file, CacheFile) else CacheFile(file)
        saved.check(self._identity())
        state, sampling = saved.state, Sampling.of(sampling)
        longest, rows, further = max(map(len, state.prompts)), len(state.prompts), further + state.decoded
        size = self.capacity(longest, max_new_tokens, further, rows, sampling, LEAST)
        with self.lock:
            session = self.session(rows, *size, sampling)
            self.model.cache.owner = None
            saved.follow(self.model.cache)
            if saved.meta["packed"]:
                saved.unpack(self.model.cache, self.model.find_calibration())
            saved.fill(self.model.cache)
            resume(session, state)
            return session
