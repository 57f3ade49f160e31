"""A conversation of one row. The first turn is prefilled; later turns go through decode into the same cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cache.base import KVMethod
from engine.decode import Batch, Completion, Session
from engine.sampling import Sampling, noise_keys
from engine.snapshot import ropes_of
from loading.tokenizer.turns import Chat
from runtime.errors import InputError, check_count

if TYPE_CHECKING:
    from engine.llm import LLM

CONVERSATION = 8192  # slots allocated for a conversation, at most the model's context


class Conversation:
    """Made by `LLM.conversation`; `say` takes a turn."""

    def __init__(self, llm: LLM, sampling: Sampling, chat: Chat | None = None, stop: Sequence[str] = ()):
        self.llm, self.sampling, self.chat, self.stop = llm, sampling, chat, stop
        self.size = llm.max_seq_len or min(llm.model.args.context, CONVERSATION)
        self.forget()
        with llm.lock:
            self._open()

    def _open(self, new: int = 0) -> Session:
        """Get an empty cache for a turn of `new` tokens, which belongs to this conversation until another call takes
        it."""
        known = self.llm.new_tokens(new, new)
        self.session = self.llm.session(1, self.size, known, new, self.sampling)
        self.session.lag = 0  # the next turn continues exactly where this one stopped
        return self.session

    def _room(self) -> int:
        """The most tokens that the cache's methods hold behind a prompt."""
        return min(m.room() for m in self.llm.model.cache.modules() if isinstance(m, KVMethod))

    def forget(self) -> None:
        """Start over."""
        self.messages = self.chat.opening if self.chat else []
        self.tokens: list[int] = []  # tokens in the cache
        self.keys: list[int] = []  # noise keys, from the first turn
        self.stale = False  # whether a failed turn has overwritten `tokens` in the cache

    def say(self, text: str, max_new_tokens: int, on_text: Callable[[str], None] | None = None) -> Completion:
        """One turn. If it exceeds the context or a step fails, raises InputError; the conversation stays unchanged."""
        with self.llm.lock:
            return self._say(text, max_new_tokens, on_text)

    def _say(self, text: str, max_new_tokens: int, on_text: Callable[[str], None] | None) -> Completion:
        llm, session = self.llm, self.session
        if not isinstance(text, str):
            raise InputError(f"a turn is a {type(text).__name__}: give text")
        check_count("--max-new-tokens", max_new_tokens, 1, 2**31 - 1)
        messages, cached = [*self.messages, {"role": "user", "content": text}], self.tokens
        if self.chat:
            ids = llm.tokenizer.encode_chat(messages, **self.chat.variables)
        else:
            tk = llm.tokenizer
            ids = cached + (tk.encode_after(cached, f"\n{text}", True) if cached else tk.encode(text))
        most = min(max_new_tokens, self.size - len(ids))
        # read the whole text again if another call has the cache, if the template rewrote an earlier turn, if the
        # methods have no slots for this one, or if longrope rotates so long a text otherwise
        goes_on = not self.stale and session.owns_cache and ids[: len(cached)] == cached
        longer = any(rope.outgrown(len(ids) + most) for rope in ropes_of(llm.model.cache)) if goes_on else False
        if not goes_on or longer or session.decoded + len(ids) - len(cached) + most > self._room():
            cached = []
        new = llm.prompts.check_ids(ids[len(cached) :])
        if len(ids) + 1 > self.size:
            raise InputError(f"the conversation has {len(ids)} tokens, the context {self.size}: /reset to start over")
        if not cached:
            session = self._open(most)
        self.stale, keys = True, self.keys or noise_keys(session.sampling.seed, [ids])
        out: list[Completion] = []
        llm._run(
            out, session, None if cached else [new], new if cached else [], Batch.of([new]), keys,
            max_new_tokens=most, stop=self.stop,
            on_text=on_text and (lambda row, piece: on_text(piece)),
        )  # fmt: skip
        self.tokens = ids + out[0].tokens
        if session.owns_cache:  # not after Ctrl-C
            session.rewind(len(self.tokens))
            # feeds the last token, which was drawn but not fed if max_new_tokens ended the turn
            session.feed(self.tokens[int(session.pos[0]) :])
        self.stale, self.keys = False, keys
        self.messages = [*messages, {"role": "assistant", "content": out[0].text}]
        return out[0]
